"""`linearize logits`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..terminal.arguments import path
from ..terminal.output import Json, print_json, say
from ..terminal.progress import starting, uncollected


def logits(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a preset (list: linearize recipes ls).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Recipe values as key.sub=value, for example teacher.model=DIR.")
    ] = None,
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write. An interrupted call continues.", parser=path)
    ],
    top: Annotated[int, typer.Option(min=1, help="Likeliest tokens to keep at each position of the text.")] = 64,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print how much disk it takes, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Write a teacher's predictions on the text of a recipe, for a run that has no memory for the teacher.

    finetune reads them with teacher.logits=DIR. A position of the text takes 8 bytes for each likely token, and 8 more.
    """
    from ..recipe.recipe import load_recipe

    with uncollected():  # a mechanism's options are checked by its code, which imports torch
        loaded = load_recipe(recipe, overrides or [])
    with starting():
        from ..logits import write_logits

    found = write_logits(loaded, output, top, dry_run=dry_run, say=say)
    if int(os.environ.get("RANK", "0")):
        return
    if not dry_run:
        own = [word for word in overrides or [] if not word.startswith("teacher.")]
        say(f"Next: {shlex.join(['linearize', 'finetune', recipe, *own, f'teacher.logits={output}'])}")
    if as_json:
        print_json(found)
