"""The recipes that linearize ships, by name. The folder is the list."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..demo import DEMO
from ..errors import LinearizeError, ResourceError, did_you_mean

FIRST = "hybrid-window", "hybrid-eighth", "window"  # by size of the cache
SCHEMA = "recipe.schema.json"  # which `copy` writes beside a recipe
EDITORS = f"# yaml-language-server: $schema={SCHEMA}"


class Preset(NamedTuple):
    """A recipe of the package: its file, the first line of its header, and what its header says was measured."""

    name: str
    path: Path
    about: str
    measured: dict[str, str]


def recipes_folder() -> Path:
    """Where the recipes of the package lie."""
    import linearize_recipes

    return Path(next(iter(linearize_recipes.__path__)))


def presets() -> list[Preset]:
    """All of them by name, behind those to choose from first."""
    order = {name: place for place, name in enumerate(FIRST)}
    paths = sorted(recipes_folder().glob("*.yaml"), key=lambda path: (order.get(path.stem, len(order)), path.stem))
    return [_read(path) for path in paths]


def _read(path: Path) -> Preset:
    header = re.match(r"(?:#.*\n)*", path.read_text("utf-8"))
    lines = [line.removeprefix("# ").rstrip() for line in header[0].splitlines()] if header else []
    measured: dict[str, str] = {}
    for line in lines:
        if found := re.match(r"(command|hardware|duration|result)\s+(.*)", line):
            measured[found[1]] = found[2]
        elif measured and line.startswith(" "):  # goes on below its key
            last = next(reversed(measured))
            measured[last] += f" {line.strip()}"
    return Preset(path.stem, path, lines[0] if lines else "", measured)


def preset(name: str) -> Preset:
    """The preset of that name. Raises LinearizeError (exit 2) with the nearest name."""
    known = {found.name: found for found in presets()}
    if name not in known:
        raise LinearizeError(f"no preset {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")
    return known[name]


def is_recipe(word: str, values: Sequence[str] = ()) -> bool:
    """Whether a word that may also name a model means a recipe: a YAML file, a preset unless a folder has its name, or
    whatever stands before a value such as model.base=M, which only recipes have. `demo` is the model of that name."""
    if word.endswith((".yaml", ".yml")) or any(value.startswith("model.") for value in values):
        return True
    return word != DEMO and not os.path.isdir(word) and os.path.isfile(recipes_folder() / f"{word}.yaml")


def recipe_path(recipe: str | Path) -> Path:
    """The file that a person means by a path or a preset's name; an existing file comes first, a folder does not.

    A word without a folder or an ending that is neither, and an empty one, raise LinearizeError (exit 2); what looks
    like a path is returned as it is.
    """
    path = Path(recipe)
    if not str(recipe).strip():
        raise LinearizeError("the name of the recipe is empty. Give a file, or a preset: linearize recipes ls")
    if (path.exists() and not path.is_dir()) or path.suffix or path.name != str(recipe):
        return path
    known = {found.name: found.path for found in presets()}
    if path.name in known or path.is_dir():
        return known.get(path.name, path)
    files = [other.name for other in Path().glob("*.y*ml")]
    raise LinearizeError(
        f"no recipe file {str(recipe)!r}, and no preset of that name.{did_you_mean(path.name, [*known, *files])} "
        f"Presets: {', '.join(known)}"
    )


def copy(name: str, to: Path, overwrite: bool = False, schema: Mapping[str, Any] | None = None) -> Path:
    """Copy a preset to a file, or into a folder that exists, and write the `schema` that it names beside it; returns
    the file. A schema of somebody else stays.

    Raises LinearizeError: 2 for an unknown name or a file that exists without `overwrite`, 4 where nothing can be
    written.
    """
    from ..checkpoint.atomic import write_atomically

    source = preset(name).path
    target = to / source.name if to.is_dir() else to
    if target.exists() and not overwrite:
        raise LinearizeError(f"{target} exists; --overwrite replaces it, or choose another name")
    text = source.read_text("utf-8")
    header = re.match(r"(?:#.*\n)*", text)
    if EDITORS not in text and header:
        text = f"{header[0]}\n{EDITORS}\n{text[header.end() :]}"
    beside = target.with_name(SCHEMA)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
        ours = not beside.exists() or '"$id": "urn:linearize:' in beside.read_text("utf-8", "replace")
        if schema is not None and ours:
            write_atomically(beside, json.dumps(schema, indent=2) + "\n")
    except OSError as error:
        raise ResourceError(f"cannot write {target}: {error.strerror}") from None
    return target
