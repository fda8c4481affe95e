"""Read what linearize.json says of a folder: by which plan it was made, from what, and which files are its own.

Commands that list runs read these, so nothing here builds a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Container
from pathlib import Path
from typing import Any

from linearize_kernels.mixer import AttentionSite

from .. import __version__
from ..errors import MALFORMED, Exit, IncompatibleError, LinearizeError, holds_model, no_model, some
from ..plan.plan import DIFFUSERS, Plan, Step
from ..terminal.progress import Advance
from .atomic import MANIFEST
from .shards import file_hashes, file_size, in_parallel, known_sha256
from .source import find_shards, read_json

CARD = "README.md"
WEIGHTS = ".safetensors"
FORMAT = 1  # of the manifest; counts what an earlier version cannot read


def read_plan(folder: Path) -> Plan:
    """The plan by which a folder was converted.

    Raises LinearizeError (exit 3) when there is none, or a newer version wrote it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        if manifest.get("format", 1) > FORMAT:
            raise IncompatibleError(
                f"{folder} was written by linearize {manifest.get('linearize')}, in a format that is unknown to "
                f"{__version__}. Use that version or a newer one"
            )
        plan = Plan.from_json(manifest["plan"])
        if plan.model_type == DIFFUSERS:
            raise IncompatibleError(
                f"{folder} holds {plan.architecture} of diffusers. Train it with a recipe of latents, as "
                "docs/diffusers.md says"
            )
        return plan
    except (OSError, *MALFORMED) as error:
        if plan_of_resaved(folder):
            raise IncompatibleError(
                f"{folder} is linearized but has no {MANIFEST}, which says what is whose in it; "
                "save_pretrained leaves it out. finetune, eval, generate, verify, serve, export and push take the "
                "folder as it is"
            ) from error
        gone = isinstance(error, FileNotFoundError)
        if gone and not holds_model(folder):
            raise no_model(folder) from error
        reason = f"it has no {MANIFEST}" if gone else f"{type(error).__name__}: {error}"
        raise IncompatibleError(
            f"{folder} is no folder written by linearize convert ({reason}). "
            "Convert it first: linearize convert, or the convert section of a recipe"
        ) from error


def plan_of(config: dict[str, Any]) -> Plan:
    """As much of a plan as a linearized config.json holds; a folder saved by transformers has no linearize.json.

    Why some layers are not linear it does not say: `reads_masks` stands for each reason."""
    layers, mixed = config["linearize"]["layers"], not config["linearize"].get("all_linear", True)
    steps = tuple(Step(AttentionSite.from_dict(one["site"]), one["mechanism"], one["options"], 0, 0) for one in layers)
    architecture = config["architectures"][0].removeprefix("Linearized")
    model_type, dtype = config["model_type"].removeprefix("linearized_"), str(config.get("dtype"))
    return Plan("", None, architecture, model_type, dtype, False, False, steps, (), 0, 0, reads_masks=mixed)


def plan_of_resaved(folder: Path) -> Plan | None:
    """`plan_of` a linearized model that save_pretrained wrote; None for any other folder."""
    if (folder / MANIFEST).exists():
        return None
    with contextlib.suppress(OSError, *MALFORMED):
        return plan_of(json.loads((folder / "config.json").read_text("utf-8")))
    return None


def plan_in(folder: Path) -> Plan:
    """`read_plan`, or `plan_of` what transformers saved."""
    return plan_of_resaved(folder) or read_plan(folder)


def is_linearized(folder: Path) -> bool:
    """Whether linearize wrote the folder, or transformers saved what it wrote."""
    return (folder / MANIFEST).exists() or plan_of_resaved(folder) is not None


def recipes_of(folder: Path) -> list[dict[str, Any]]:
    """The recipes by which a folder, and those that it was converted again from, were trained; the earliest first."""
    last = read_json(folder / MANIFEST).get("recipe")
    return [one for one in [*(past.recipe for past in read_plan(folder).reconversions), last] if one is not None]


def listed_files(folder: Path) -> list[str]:
    """The files that a folder's linearize.json lists. Raises LinearizeError (exit 3) where it lists none."""
    path = folder / MANIFEST
    listed = read_json(path).get("files") if path.exists() else None
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise IncompatibleError(f"{path} does not say which files are the model's. Convert or train again")
    return listed


def check_complete(folder: Path, without: Container[str] = (), code: Exit = Exit.INCOMPATIBLE) -> None:
    """Raise LinearizeError (exit `code`) where files that a folder's linearize.json lists are gone, but for those in
    `without`: half of it was copied, or transformers has saved a model over it."""
    missing = sorted(name for name in listed_files(folder) if not (name in without or os.path.lexists(folder / name)))
    if not missing:
        return
    lacks = f"{folder} lacks {some(missing)}, which {MANIFEST} lists. Copy or download the folder again, or convert or "
    raise LinearizeError(saved_over(folder) or lacks + "train again", code)


def saved_over(folder: Path) -> str:
    """What to do with a folder into which transformers saved a model later, whose linearize.json is of the one before;
    empty for any other."""
    listed = {*listed_files(folder)}
    later = sorted({shard.name for shard in find_shards(folder, False)[0] if shard.is_file()} - listed)
    if not later or all((folder / name).is_file() for name in listed if name.endswith(WEIGHTS)):
        return ""
    return (
        f"{folder} has other weights ({some(later)}) than {MANIFEST} lists: transformers saved a model into it later. "
        f"Remove {folder / MANIFEST}, and the folder is taken as save_pretrained wrote it"
    )


def base_hashes(folder: Path, *, new: bool = False) -> dict[str, str]:
    """Hashes of the files that a folder's linearize.json lists, by name; the card is for people, and left out. Of a
    folder without one, of a random model that keeps its softmax, those of all files.

    Of a folder that is `new`, those that linearize.json has are taken from there.
    """
    if not is_linearized(folder):
        return file_hashes(folder, sorted(path for path in folder.iterdir() if path.is_file()), known_sha256)
    names = [name for name in listed_files(folder) if name != CARD and (folder / name).is_file()]
    manifest = read_json(folder / MANIFEST) if new else {}
    known = {**manifest.get("untouched", {}).get("shards", {}), **manifest.get("code", {})}

    def hashed(name: str, advance: Advance) -> str:
        return known.get(name) or known_sha256(folder / name, advance)

    hashes = in_parallel(hashed, names, "hashing", lambda name: file_size(folder / name))
    return dict(zip(names, hashes, strict=True))


def identity(folder: Path) -> str:
    """A hash of the plan and the weights of a linearized folder: by it a model is known when its code is upgraded."""
    if (folder / MANIFEST).exists():
        manifest = read_json(folder / MANIFEST)
        known = {key: manifest.get(key) for key in ("plan", "untouched", "written")}
    else:
        shards = sorted(folder.glob("*.safetensors"))
        hashes = file_hashes(folder, shards, known_sha256)
        known = {"plan": read_json(folder / "config.json")["linearize"], "shards": hashes}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
