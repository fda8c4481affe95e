"""Pipelines of diffusers: convert and verify their transformers."""
