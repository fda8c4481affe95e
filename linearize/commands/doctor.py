"""`linearize doctor`."""

from __future__ import annotations

import typer

from ..errors import Exit
from ..terminal.output import Json, print_json


def doctor(as_json: Json = False) -> None:
    """Check this machine: packages, GPU, disk and Hub. Exit 4 when something required is missing."""
    from ..doctor import examine, rows
    from ..terminal.tables import doctor_table

    found = examine()
    if as_json:
        print_json(found)
    else:
        doctor_table(list(rows(found)))
    if found["missing"]:
        raise typer.Exit(int(Exit.RESOURCE))
