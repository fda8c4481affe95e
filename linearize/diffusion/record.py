"""The record of a run on latents: what it began with, for a run that goes on has the same, and whether it ended."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from .. import __version__
from ..checkpoint.atomic import foreign_files, write_atomically
from ..checkpoint.manifest import base_hashes
from ..checkpoint.shards import combined_sha256, file_hashes
from ..errors import LinearizeError, json_object, undamaged
from ..plan.plan import some
from ..train.runs import START_OVER, changed_versions, changes, refuse_foreign
from .latents import files_of
from .recipe import DiffusionRecipe

RECORD = "inputs.json"


def finished(folder: Path, resume: str) -> bool:
    """Whether nothing is left to do. A start over leaves the finished model of before in its place until the new one
    is ready."""
    return resume == "auto" and (folder / "final").exists() and read_record(folder).get("finished", True)


def check_owned(folder: Path, resume: str) -> None:
    """Raise LinearizeError (exit 2) for files that linearize did not write and this start, or its end, would remove."""
    replaced = ("final", "converted") if resume == "never" else ("final",)
    refuse_foreign([folder / place / name for place in replaced for name in foreign_files(folder / place)])


def begin(recipe: DiffusionRecipe, folder: Path, base: Path | None, resume: str) -> tuple[dict[str, Any], list[str]]:
    """The record that a start writes, and notes to print; `base` is None before it is converted.

    Raises LinearizeError (exit 2) where the data or the files of `base` are others than the run began with.
    """
    old = read_record(folder) if resume == "auto" else {}
    record = {"data": data_hashes(recipe), "base": {} if base is None else base_hashes(base), "versions": versions()}
    with _whole(folder):
        changed = changes(old.get("data", {}), record["data"])
        if base is not None:
            changed += [str(base / name) for name in changes(old.get("base", {}), record["base"])]
        notes = changed_versions(old.get("versions", {}), record["versions"])
    if changed:
        raise LinearizeError(f"changed since this run began: {some(changed)}. {START_OVER}, or restore what was there")
    return record | {"finished": False}, notes


def read_record(folder: Path) -> dict[str, Any]:
    """What `write_record` wrote; empty where there is none."""
    path = folder / RECORD
    with _whole(folder):
        return json_object(path) if path.exists() else {}


def _whole(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Within: what the record says is used. Raises LinearizeError (exit 2) where it is damaged."""
    return undamaged(folder / RECORD, "Restore it, or start over with --resume never")


def write_record(folder: Path, record: dict[str, Any]) -> None:
    write_atomically(folder / RECORD, json.dumps(record, indent=2) + "\n")


def data_hashes(recipe: DiffusionRecipe) -> dict[str, str]:
    """A hash of the files of each folder of latents and prompts, by its place in the recipe."""
    found = {}
    for split, source in (("train", recipe.data.train), ("eval", recipe.data.eval)):
        for key, (folder, files) in (files_of(source, recipe.folder) if source is not None else {}).items():
            found[f"data.{split}.{key}"] = combined_sha256(file_hashes(folder, files))
    return found


def versions() -> dict[str, str]:
    """Versions of what a run on latents depends on."""
    packages = ("torch", "transformers", "accelerate", "diffusers")
    return {"linearize": __version__, **{name: importlib.metadata.version(name) for name in packages}}
