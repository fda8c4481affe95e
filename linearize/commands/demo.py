"""`linearize demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.output import Json, print_json, say


def demo(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the run here; default: a temporary folder.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="Continued by teacher and student.")] = "def read_lines(path):\n",
    as_json: Json = False,
) -> None:
    """Convert, distil and compare the model that the package ships: three minutes on a CPU, no downloads."""
    from ..demo.tour import tour

    report = tour(output, prompt, say)
    if as_json:
        print_json(report)
