"""`linearize runs` and `linearize compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import check_runs
from ..terminal.arguments import path, run
from ..terminal.output import Json, layers_named, percent, print_json, say, short
from ..terminal.progress import starting
from ..terminal.tables import asked_for, results, table


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs, or one run.", parser=path)] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs of finetune, the newest first: how far each is, and how near its teacher."""
    check_runs(folder)
    with starting():
        from ..page.compare import list_runs

    found = list_runs(folder)
    if as_json:
        print_json(found)
        return
    runs_table(found)


def compare(
    places: Annotated[
        list[Path],
        typer.Argument(help="Runs, converted folders, files that eval -o wrote, and their teachers.", parser=run),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="HTML page to write, with the runs' curves in one picture.", parser=path),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs and models: perplexity and KL against the teacher, needles and state. Name a teacher, too, for its
    own needles and cache."""
    with starting():
        from ..checkpoint.atomic import check_result, write_result
        from ..page.compare import columns, compare_page, figures, labels, notes, notes_below, read_rows, table_rows
        from ..page.html import BEGINS
        from ..terminal.output import size

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


def runs_table(found: list[dict[str, Any]]) -> None:
    """One row a run; a damaged one says what is wrong with it."""
    columns = {"run": "text", "base": "text", "attention": "text", "at": "text"}
    images = any(one.get("unit") == "images" for one in found)
    columns |= {"trained on" if images else "tokens": "number", "x teacher": "number"}
    columns |= {"accuracy (teacher's)": "number"} if images else {}
    columns |= {"changed (UTC)": "short"}
    rows = []
    for one in found:
        if "error" in one:
            rows.append((one["run"], "", "", one["error"], *[""] * (len(columns) - 4)))
            continue
        ratio = "" if one["ppl_ratio"] is None else f"{one['ppl_ratio']:.3f}"
        attention = "+".join(one["mechanisms"]) + (f", softmax in {layers_named(one['kept'])}" if one["kept"] else "")
        changed = one["changed"][:16].replace("T", " ")
        count = asked_for(one["tokens"], one["unit"] == "images") if images else short(one["tokens"])
        cells: tuple[str, ...] = (one["run"], one["base"], attention, one["at"], count, ratio)
        if images:
            both = [percent(one[who]) for who in ("accuracy", "teacher_accuracy")]
            cells += (both[0] + f" ({both[1]})" * bool(both[1]),)
        rows.append((*cells, changed))
    results().print(table(columns, rows))
