"""`linearize report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.arguments import path
from ..terminal.arguments import run as of_run
from ..terminal.output import Json, print_json, say
from ..terminal.progress import starting


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run of linearize finetune, finished or not.", parser=of_run)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: RUN/report.html.", parser=path)
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(
            "--eval", help="File that linearize eval -o wrote. Default: RUN/eval.json where there is one.", parser=path
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page about a run: layers, losses, fidelity, needles, memory, samples, cost, recipe."""
    with starting():
        from ..checkpoint.atomic import check_result, write_result
        from ..page.html import BEGINS
        from ..page.record import read_run, whole
        from ..page.report import PAGE, report_page
        from ..terminal.output import size

    record = read_run(run, evaluation)
    page = output or run / PAGE
    check_result(page, BEGINS, "report")
    with whole(run):
        text, ratio = report_page(record), record.ratio()
    written = write_result(page, text)
    say(f"wrote {page} ({size(written)})")
    if as_json:
        print_json({"page": str(page), "bytes": written, "finished": record.finished, "ppl_ratio": ratio})
