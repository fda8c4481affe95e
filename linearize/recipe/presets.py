"""The recipes that linearize ships, by name. The folder is the list."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from ..errors import Exit, LinearizeError, did_you_mean

FIRST = "hybrid"
SCHEMA = "recipe.schema.json"  # beside the presets; their last comment names it for editors


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
    """All of them, by name; the one to begin with comes first."""
    paths = sorted(recipes_folder().glob("*.yaml"), key=lambda path: (path.stem != FIRST, path.stem))
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


def recipe_path(recipe: str | Path) -> Path:
    """The file that a person means by a path or a preset's name; an existing file comes first.

    A word without a folder or an ending that is neither raises LinearizeError (exit 2); what looks like a path is
    returned as it is.
    """
    path = Path(recipe)
    if path.exists() or path.suffix or path.name != str(recipe):
        return path
    known = {found.name: found.path for found in presets()}
    if path.name in known:
        return known[path.name]
    files = [other.name for other in Path().glob("*.y*ml")]
    raise LinearizeError(
        f"no recipe file {str(recipe)!r}, and no preset of that name.{did_you_mean(path.name, [*known, *files])} "
        f"Presets: {', '.join(known)}"
    )


def copy(name: str, to: Path, overwrite: bool = False) -> Path:
    """Copy a preset to a file, or into a folder that exists, and beside it the schema that it names; returns the file.

    Raises LinearizeError: 2 for an unknown name or a file that exists without `overwrite`, 4 where nothing can be
    written.
    """
    source = preset(name).path
    target = to / source.name if to.is_dir() else to
    if target.exists() and not overwrite:
        raise LinearizeError(f"{target} exists; --overwrite replaces it, or choose another name")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        schema = target.with_name(SCHEMA)
        if not schema.exists() or '"$id": "urn:linearize:' in schema.read_text("utf-8", "replace"):
            shutil.copyfile(recipes_folder() / SCHEMA, schema)
    except OSError as error:
        raise LinearizeError(f"cannot write {target}: {error.strerror}", Exit.RESOURCE) from None
    return target
