"""`linearize finetune`."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from ..terminal.arguments import Overrides, check_base
from ..terminal.output import Json, print_json, say
from ..terminal.progress import starting


def finetune(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a preset (list: linearize recipes ls).")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what each stage will do, and stop.")] = False,
    resume: Annotated[str, typer.Option(help="Go on from a checkpoint: auto, never, or its folder.")] = "auto",
    stage: Annotated[str | None, typer.Option(help="Run only the stage with this name.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop each stage after this many steps.")] = None,
    as_json: Json = False,
) -> None:
    """Convert a model and train it by a recipe's stages: attention transfer, logit KL, finetuning."""
    check_base(overrides or [])
    from ..diffusion.recipe import holds_latents
    from ..recipe.recipe import load_recipe

    if holds_latents(recipe, overrides or []):
        _finetune_latents(recipe, overrides or [], dry_run, resume, stage, max_steps, as_json)
        return
    loaded = load_recipe(recipe, overrides or [])
    with starting():
        from .. import finetune as story
        from ..job.dry_run import dry_run as estimated
        from ..job.notes import next_commands
        from ..terminal.tables import data_lines, estimate_table, recipe_table, report_table

    result: dict[str, Any]
    if dry_run:
        result = estimated(loaded, say, max_steps, stage, resume=resume)
        recipe_table(result["stages"])
        data_lines(result["stages"])
        estimate_table(result)
    else:
        result = story.finetune(loaded, resume=resume, only=stage, max_steps=max_steps, say=say)
        if int(os.environ.get("RANK", "0")):
            return  # of several processes the first one speaks
        report_table(result)
        if result["output"] is not None:
            say(f"Next: {next_commands(loaded)}")
    if as_json:
        print_json(result)


def _finetune_latents(
    recipe: str, overrides: list[str], dry_run: bool, resume: str, stage: str | None, steps: int | None, as_json: bool
) -> None:
    """A recipe of latents: a pipeline of diffusers is distilled."""
    from ..diffusion.recipe import load_latents_recipe
    from ..terminal.tables import prediction_table

    stages = load_latents_recipe(recipe, overrides).stages
    given = [f"stages.{one.name}.steps={min(steps, one.steps)}" for one in stages if steps is not None]
    loaded = load_latents_recipe(recipe, [*overrides, *given])
    with starting():
        from ..diffusion import finetune as story

    result: dict[str, Any]
    if dry_run:
        result = story.dry_run(loaded, say, stage, resume)
    else:
        result = story.finetune(loaded, only=stage, resume=resume, say=say)
        if int(os.environ.get("RANK", "0")):
            return
        prediction_table(result["predictions"])
    if as_json:
        print_json(result)
