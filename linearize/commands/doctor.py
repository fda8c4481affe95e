"""`linearize doctor`."""

from __future__ import annotations

import typer

from ..errors import Exit
from ..terminal.output import Json, print_json


def doctor(as_json: Json = False) -> None:
    """What this machine has of what linearize needs; exit 4 when something is missing."""
    from ..doctor import examine, lines

    found = examine()
    if as_json:
        print_json(found)
    else:
        print("\n".join(lines(found)))
    if found["missing"]:
        raise typer.Exit(int(Exit.RESOURCE))
