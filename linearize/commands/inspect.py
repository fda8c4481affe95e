"""`linearize inspect`."""

from __future__ import annotations

from ..terminal.arguments import Model, Revision, Trust
from ..terminal.output import Json, print_json
from ..terminal.progress import starting


def inspect(
    model: Model,
    trust_remote_code: Trust = False,
    revision: Revision = None,
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
