"""`linearize estimate`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..terminal.arguments import Overrides, check_base
from ..terminal.output import Json, print_json, say
from ..terminal.progress import starting


def estimate(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a preset (list: linearize recipes ls).")],
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="Card to estimate for: a100-80g, h100, h200, 4090, .. Default: this machine's.")
    ] = None,
    price: Annotated[str | None, typer.Option(help="Price of one device for an hour: 2.5/h, or 2.5.")] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Run two steps of each stage, on random weights, and compute the time from them."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Estimate what a recipe costs: peak memory by its parts, tokens a second, hours, energy, price, disk.

    It reads configs alone, no weights and no data. With --measure it also runs steps.
    """
    check_base(overrides or [])
    from ..recipe.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    with starting():
        from ..estimate.gpus import per_hour
        from ..job.dry_run import dry_run
        from ..terminal.tables import data_lines, estimate_table

    found = dry_run(loaded, say, gpu=gpu, price=per_hour(price), measure=measure)
    data_lines(found["stages"])
    estimate_table(found)
    if as_json:
        print_json(found)
