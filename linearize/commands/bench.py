"""`linearize bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..output import Json, print_json

bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory.")


@bench.command("kernels")
def bench_kernels(
    mechanism: Annotated[str, typer.Option(help="Mechanism whose GPU kernels are measured.")] = "gsa",
    picture: Annotated[Path | None, typer.Option("--plot", help="Also draw the times into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """GPU kernels beside PyTorch, scaled dot product attention and, where installed, flash-linear-attention."""
    from ..bench import bench_kernels as measure
    from ..bench_report import markdown, plot

    result = measure(mechanism)
    if as_json:
        print_json(result)
    else:
        print(markdown(result))
    if picture is not None:
        plot(result, picture)
