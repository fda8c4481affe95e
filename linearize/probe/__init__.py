"""Probing: which attention modules a model has, and what each computes."""
