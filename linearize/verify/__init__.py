"""Verification: reload a saved model in a clean process and compare."""
