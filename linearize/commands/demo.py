"""`linearize demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.arguments import path
from ..terminal.output import Json, print_json, say
from ..terminal.progress import starting


def demo(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder that keeps the run. Default: a temporary folder.", parser=path),
    ] = None,
    prompt: Annotated[str, typer.Option(help="Text that teacher and students continue.")] = "def read_lines(path):\n",
    as_json: Json = False,
) -> None:
    """Choose layers, convert, distil and compare the small model that linearize ships. Takes a few minutes on a CPU;
    no downloads."""
    with starting():
        from ..demo.tour import tour

    report = tour(output, prompt, say)
    if as_json:
        print_json(report)
