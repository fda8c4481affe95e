"""Where words go: human text to stderr, results to stdout."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .errors import redact

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def say(text: str) -> None:
    """One message for a person, without secrets."""
    print(redact(text), file=sys.stderr, flush=True)


def size(count: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
