"""`linearize runs` and `linearize compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.output import Json, print_json, say


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs, or one run.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs of finetune, the newest first: how far each is, and how near its teacher."""
    from ..page.compare import list_runs
    from ..terminal.tables import runs_table

    found = list_runs(folder)
    if as_json:
        print_json(found)
        return
    runs_table(found)


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs; linearize runs lists them.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML page to write, with the runs' curves in one picture.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: perplexity, KL, needles and state of each beside its teacher's."""
    from ..page.compare import COLUMNS, cells, compare_page, figures, labels, notes, read_runs
    from ..page.report import write_page
    from ..terminal.output import size
    from ..terminal.tables import results, table

    found = read_runs(folders)
    for note in notes(found):
        say(f"note: {note}")
    if output is not None:
        say(f"wrote {output} ({size(write_page(compare_page(found), output))})")
    if as_json:
        print_json([figures(run) for run in found])
        return
    names = labels(found)
    rows = zip(*map(cells, found, names), strict=True)  # a column for each run: there are more figures than runs
    measures = [(name, *row) for name, row in zip(COLUMNS, rows, strict=True) if name != "run"]
    results().print(table({"": "text"} | dict.fromkeys(names, "number"), measures))
