"""`linearize doctor`."""

from __future__ import annotations

import typer

from ..errors import Exit
from ..terminal.output import Json, print_json
from ..terminal.tables import results, table


def doctor(as_json: Json = False) -> None:
    """Check this machine: packages, GPU, disk and Hub. Exit 4 when something required is missing."""
    from ..doctor import examine, rows

    found = examine()
    if as_json:
        print_json(found)
    else:
        doctor_table(list(rows(found)))
    if found["missing"]:
        raise typer.Exit(int(Exit.RESOURCE))


def doctor_table(rows: list[tuple[str, str]]) -> None:
    """What `linearize doctor` found: for each thing a result, and its description."""
    results().print(table({"result": "short", "found": "text"}, rows))
