"""`linearize bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..output import Json, print_json

bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory.")


@bench.command("kernels")
def bench_kernels(
    mechanism: Annotated[str, typer.Option(help="Measure this mechanism's kernels only.")] = "all",
    tokens: Annotated[int | None, typer.Option(min=1, help="Cut every shape to at most this many tokens.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Also draw the times into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Each mechanism beside PyTorch, scaled dot product attention and, where installed, flash-linear-attention."""
    from ..bench import bench_kernels as measure
    from ..bench import failures
    from ..bench_report import check_plot, markdown, plot
    from ..errors import Exit, LinearizeError

    if picture is not None:
        check_plot()
    result = measure(mechanism, tokens)
    if as_json:
        print_json(result)
    else:
        print(markdown(result))
    if picture is not None:
        plot(result, picture)
    if failed := failures(result):
        raise LinearizeError("; ".join(failed), Exit.CHECK_FAILED)
