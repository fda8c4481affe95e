"""Where words go: human text to stderr, results to stdout."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def say(text: str) -> None:
    """One message for a person."""
    print(text, file=sys.stderr, flush=True)
