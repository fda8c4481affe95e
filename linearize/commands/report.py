"""`linearize report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.output import Json, print_json, say


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run of linearize finetune, finished or not.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: RUN/report.html.")
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option("--eval", help="File that linearize eval -o wrote. Default: RUN/eval.json where there is one."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page about a run: layers, losses, fidelity, needles, memory, samples, cost, recipe."""
    from ..page.record import read_run
    from ..page.report import PAGE, report_page, write_page
    from ..terminal.output import size

    record = read_run(run, evaluation)
    path = output or run / PAGE
    written = write_page(report_page(record), path)
    say(f"wrote {path} ({size(written)})")
    if as_json:
        print_json({"page": str(path), "bytes": written, "finished": record.finished, "ppl_ratio": record.ratio()})
