"""`python -m linearize`, and so `accelerate launch -m linearize`."""

from .cli import run

run()
