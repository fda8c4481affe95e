"""Recipes: YAML, checked and resolved."""
