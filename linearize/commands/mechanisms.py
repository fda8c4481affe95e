"""`linearize mechanisms`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..terminal.output import Json, print_json


def mechanisms(
    name: Annotated[str | None, typer.Argument(help="Show this mechanism with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the mechanisms that can replace softmax, or show one with its options."""
    from ..plan.mechanisms import describe, mechanism_names, summary

    whole = describe if as_json else summary
    found: Any = describe(name) if name is not None else [whole(known) for known in mechanism_names()]
    if as_json:
        print_json(found)
        return
    from ..terminal.tables import mechanism_table, mechanisms_table

    if name is None:
        mechanisms_table(found)
    else:
        mechanism_table(found)
