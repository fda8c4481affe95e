"""`linearize runs` and `linearize compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.arguments import path
from ..terminal.output import Json, print_json, say
from ..terminal.progress import TORCH, starting


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs, or one run.", parser=path)] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs of finetune, the newest first: how far each is, and how near its teacher."""
    with starting(TORCH):
        from ..page.compare import list_runs
        from ..terminal.tables import runs_table

    found = list_runs(folder)
    if as_json:
        print_json(found)
        return
    runs_table(found)


def compare(
    places: Annotated[
        list[Path],
        typer.Argument(help="Runs, converted folders, files that eval -o wrote, and their teachers.", parser=path),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="HTML page to write, with the runs' curves in one picture.", parser=path),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs and models: perplexity and KL beside the teacher's, needles and state. Name a teacher, too, for its
    own needles and cache."""
    with starting(TORCH):
        from ..checkpoint.atomic import check_result, write_result
        from ..page.compare import columns, compare_page, figures, labels, notes, notes_below, read_rows, table_rows
        from ..page.html import BEGINS
        from ..terminal.output import size
        from ..terminal.tables import results, table

    found = read_rows(places)
    for note in notes(found):
        say(f"note: {note}")
    if output is not None:
        check_result(output, BEGINS, "compare")
        say(f"wrote {output} ({size(write_result(output, compare_page(found)))})")
    if as_json:
        print_json([figures(run) for run in found])
        return
    names = labels(found)
    rows = zip(*table_rows(found), strict=True)  # a column for each run: there are more figures than runs
    measures = [(name, *row) for name, row in zip(columns(found), rows, strict=True) if name != "run"]
    results().print(table({"": "text"} | dict.fromkeys(names, "number"), measures))
    for note in notes_below(found):
        say(f"note: {note}")
