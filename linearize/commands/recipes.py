"""`linearize recipes`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import Exit, LinearizeError
from ..terminal.arguments import path, split_values
from ..terminal.output import Json, print_json, say, say_error
from ..terminal.tables import results, table

if TYPE_CHECKING:
    from ..recipe.presets import Preset

recipes = typer.Typer(no_args_is_help=True, help="List, copy and check recipes.")

Name = Annotated[str, typer.Argument(help="Name of a preset (list: linearize recipes ls).")]


@recipes.command("ls")
def ls(as_json: Json = False) -> None:
    """List the presets: name, and what each does."""
    from ..recipe.presets import presets

    found = presets()
    if as_json:
        print_json([{"name": p.name, "about": p.about, **p.measured} for p in found])
        return
    presets_table(found)


@recipes.command("show")
def show(name: Name) -> None:
    """Print a preset."""
    from ..recipe.presets import preset

    print(preset(name).path.read_text("utf-8"), end="")


@recipes.command("cp")
def cp(
    name: Name,
    to: Annotated[
        Path | None, typer.Argument(help="File or folder to write. Default: ./NAME.yaml.", parser=path)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
) -> None:
    """Copy a preset so that you can change it, with the schema by which editors complete and check it."""
    import yaml

    from ..recipe.presets import copy
    from ..recipe.schema import recipe_schema

    target = copy(name, to or Path(), overwrite, recipe_schema())
    base = [] if "base" in yaml.safe_load(target.read_text("utf-8"))["model"] else ["model.base=DIR"]
    say(f"wrote {target}. Next: {shlex.join(['linearize', 'finetune', str(target), *base, '--dry-run'])}")


@recipes.command("validate")
def validate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|KEY=VALUE",
            help="Recipe files, or names of presets; and recipe values as key.sub=value, for every file.",
        ),
    ],
    settings: Annotated[list[str] | None, typer.Option("--set", help="The same as a value without --set.")] = None,
    as_json: Json = False,
) -> None:
    """Check recipes. Every mistake is printed with file, line and column; then the exit code is 2."""
    from ..diffusion.recipe import load_either
    from ..recipe.recipe import later_base

    files, values = split_values(words)
    values += settings or []
    if not files:
        raise LinearizeError(f"{' '.join(values)}: no recipe is named. Give a file, or a preset: linearize recipes ls")
    mistakes: dict[str, list[str]] = {}
    left: dict[str, str] = {}
    for file in files:
        try:
            later = later_base(file, values)
            load_either(file, [*values, *later])
            mistakes[file] = []
            if later:
                left[file] = (
                    ", apart from model.base. Give it on the command line: "
                    f"linearize finetune {shlex.quote(file)} {later[0]}"
                )
        except LinearizeError as error:
            mistakes[file] = error.message.splitlines()
    if as_json:
        print_json({"mistakes": mistakes})
    for file, lines in mistakes.items():
        if lines:
            say_error("", "\n".join(lines))
        else:
            say(f"{file}: fine{left.get(file, '')}")
    if any(mistakes.values()):
        raise typer.Exit(int(Exit.USAGE))


@recipes.command("schema")
def schema() -> None:
    """Print the JSON schema of recipes.

    For editors that have a YAML language server: save it as recipe.schema.json, and put the comment
    `# yaml-language-server: $schema=recipe.schema.json` into a recipe next to it. `recipes cp` does both.
    """
    from ..recipe.schema import recipe_schema

    print_json(recipe_schema(), indent=2)


def presets_table(found: list[Preset]) -> None:
    """One row a preset."""
    results().print(table({"preset": "short", "what it does": "text"}, [(one.name, one.about) for one in found]))
