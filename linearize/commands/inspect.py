"""`linearize inspect`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..terminal.arguments import model as model_name
from ..terminal.output import Json, print_json
from ..terminal.progress import starting


def inspect(
    model: Annotated[str, typer.Argument(help="Model: a local folder, a Hub id, or demo.", parser=model_name)],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the model that linearize did not write.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    as_json: Json = False,
) -> None:
    """Show a model's attention modules and the mechanisms that fit, or what a converted model has in their place."""
    with starting():
        from ..probe.inspection import Converted, inspect_model
        from ..terminal.tables import converted_table, inspection_tables

    inspection = inspect_model(model, revision=revision, trust_remote_code=trust_remote_code)
    if isinstance(inspection, Converted):
        converted_table(inspection)
    else:
        inspection_tables(inspection)
    if as_json:
        print_json(inspection.to_json())
