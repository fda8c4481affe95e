"""Decide whether linearize wrote a folder, by which plan, and whether its code is unchanged."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from linearize_kernels.mixer import Site

from .. import __version__
from ..errors import Exit, LinearizeError
from ..plan.plan import DIFFUSERS, Plan, Step, some
from ..probe.meta_run import quiet
from ..probe.probe import model_class_of
from . import write as checkpoint
from .code import Natives, auto_map, code_files
from .source import ADAPTER_CONFIG


def check_code(folder: Path, trust_remote_code: bool) -> Plan:
    """The plan by which a folder was converted, whose code is this version's or trusted; else exit 3."""
    plan = saved_again(folder) or read_plan(folder)
    if not trust_remote_code:
        refuse_code(folder, changed_code(folder, plan))
    return plan


def refuse_code(folder: Path, changed: Iterable[str]) -> None:
    """Raise LinearizeError (exit 3) where files of a folder, whose code is about to run, are `changed`."""
    names = sorted(changed)
    if names:
        raise LinearizeError(
            f"{folder} carries other code than this version of linearize writes ({some(names)}), and it would run. "
            "Read it, then pass --trust-remote-code (in a recipe, model.trust_remote_code: true)",
            Exit.INCOMPATIBLE,
        )


def read_plan(folder: Path) -> Plan:
    """The plan by which a folder was converted.

    Raises LinearizeError (exit 3) when there is none, or a newer version wrote it.
    """
    try:
        manifest = json.loads((folder / checkpoint.MANIFEST).read_text("utf-8"))
        if manifest.get("format", 1) > checkpoint.FORMAT:
            raise LinearizeError(
                f"{folder} was written by linearize {manifest.get('linearize')}, in a format that is unknown to "
                f"{__version__}. Use that version or a newer one",
                Exit.INCOMPATIBLE,
            )
        plan = Plan.from_json(manifest["plan"])
        if plan.model_type == DIFFUSERS:
            raise LinearizeError(
                f"{folder} holds {plan.architecture} of diffusers. Upload it with hf upload REPO DIR, and train it as "
                "docs/diffusers.md says",
                Exit.INCOMPATIBLE,
            )
        return plan
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if saved_again(folder):
            raise LinearizeError(
                f"{folder} is linearized but has no {checkpoint.MANIFEST}, which says what is whose in it; "
                "save_pretrained leaves it out. generate and verify need none. Finetune the folder that linearize "
                "wrote, and push this one with hf upload",
                Exit.INCOMPATIBLE,
            ) from error
        raise LinearizeError(
            f"{folder} is no folder written by linearize convert ({type(error).__name__}: {error}). "
            "Convert first, or add a convert section to the recipe",
            Exit.INCOMPATIBLE,
        ) from error


def trained_before(folder: Path) -> str:
    """What to note of a base whose source weights an earlier run trained, or whose LoRA it left apart; else empty."""
    notes = []
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        recipe = json.loads((folder / checkpoint.MANIFEST).read_text("utf-8"))["recipe"]
        merged = recipe["finish"]["merge_lora"]
        parts = {"mixer", "all", *(["lora"] if merged else [])}
        stages = [stage["name"] for stage in recipe["stages"] if parts & set(stage["train"])]
        if stages:
            how = f"as {', '.join(stages)} trained them, and the teacher is softmax on those"
            instead = "To distil further towards the source itself, put all stages into one recipe"
            notes.append(f"note: {folder} has the source's weights {how}. {instead}")
        if not merged and any(stage["lora"] for stage in recipe["stages"]):
            notes.append(f"note: the LoRA in {folder / 'adapter'} was not merged, and this run begins without it")
    return "\n".join(notes)


def saved_again(folder: Path) -> Plan | None:
    """`plan_of` a linearized model that save_pretrained wrote; None for any other folder."""
    if (folder / checkpoint.MANIFEST).exists():
        return None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        return plan_of(json.loads((folder / "config.json").read_text("utf-8")))
    return None


def plan_of(config: dict[str, Any]) -> Plan:
    """As much of a plan as a linearized config.json holds; a folder saved by transformers has no linearize.json."""
    layers = config["linearize"]["layers"]
    steps = tuple(Step(Site.from_dict(one["site"]), one["mechanism"], one["options"], 0, 0) for one in layers)
    architecture = config["architectures"][0].removeprefix("Linearized")
    model_type, dtype = config["model_type"].removeprefix("linearized_"), str(config.get("dtype"))
    return Plan("", None, architecture, model_type, dtype, False, False, steps, (), 0, 0)


def changed_code(folder: Path, plan: Plan) -> Iterator[str]:
    """Names of files that differ from what a plan leads to and decide which code runs: Python, and JSON that names it.

    Python also in folders, for transformers runs custom_generate/generate.py; folders may be links.
    """
    try:
        with quiet():
            config = AutoConfig.for_model(plan.model_type, architectures=[plan.architecture])
        natives = Natives(config, model_class_of(config))
        expected = code_files(plan, natives)
    except (ValueError, LinearizeError):  # of a model that transformers does not have
        yield f"the code of {plan.architecture}"
        return
    paths = {path for pattern in ("**/*.py", "*/*.py") for path in folder.glob(pattern) if path.is_file()}
    present = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    ours = {name: text.encode() for name, text in expected.items()}
    yield from (name for name in ours.keys() | present.keys() if ours.get(name) != present.get(name))
    if (folder / ADAPTER_CONFIG).exists():  # transformers would load the base model that it names, and its code
        yield ADAPTER_CONFIG
    for path in folder.glob("*.json"):
        with contextlib.suppress(ValueError, AttributeError):
            said = json.loads(path.read_text("utf-8"))
            if path.name == "config.json":
                named = said.get("auto_map") != auto_map(natives)
            else:  # processor_config.json has those of its parts one level down
                named = any(part.get("auto_map") for part in (said, *said.values()) if isinstance(part, dict))
            if named:
                yield path.name
