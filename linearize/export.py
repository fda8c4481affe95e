"""From a run to a model folder: load the converted base for training, save what training made of it."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from . import card, checkpoint
from .errors import Exit, LinearizeError
from .plan import Plan
from .probe import model_class_of, quiet
from .recipe import Recipe
from .render import Natives, code_files
from .runs import write_atomically
from .source import Source, read_header
from .trainable import ADAPTER, Student, is_source
from .verify import check_keys


def load_converted(folder: Path, dtype: Any, trust_remote_code: bool) -> Any:
    """The linearized model in `folder`. Its code runs when it is byte for byte what this version writes.

    Raises LinearizeError (exit 3) for a folder that linearize did not write, or other code without trust.
    """
    plan = read_plan(folder)
    if not trust_remote_code:
        changed = [name for name, text in expected_code(plan).items() if _text(folder / name) != text]
        if changed:
            raise LinearizeError(
                f"{folder} carries other code than this version of linearize writes ({', '.join(sorted(changed))}). "
                "Read it, then set model.trust_remote_code: true",
                Exit.INCOMPATIBLE,
            )
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=True)


def meta_model(base: str, planned: tuple[Plan, Source, Natives] | None) -> Any:
    """The linearized model without memory behind its weights: of a conversion that is planned, or of a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(base)
        if planned is not None:
            plan, source, natives = planned
            folder = Path(scratch)
            for name, text in code_files(plan, natives).items():
                (folder / name).write_text(text, "utf-8")
            checkpoint.write_json(folder / "config.json", checkpoint.converted_config(source.config, plan, natives))
        with quiet(), torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
            return AutoModelForCausalLM.from_config(config, trust_remote_code=True)


def read_plan(folder: Path) -> Plan:
    """The plan by which a folder was converted. Raises LinearizeError (exit 3) when there is none."""
    try:
        return Plan.from_json(json.loads((folder / checkpoint.MANIFEST).read_text("utf-8"))["plan"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LinearizeError(
            f"{folder} is no folder written by linearize convert ({type(error).__name__}: {error}). "
            "Convert first, or add a convert section to the recipe",
            Exit.INCOMPATIBLE,
        ) from error


def expected_code(plan: Plan) -> dict[str, str]:
    """The code files that this version writes for a plan."""
    with quiet():
        config = AutoConfig.for_model(plan.model_type, architectures=[plan.architecture])
    return code_files(plan, Natives(config, model_class_of(config)))


def _text(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None


def save_final(student: Student, base: Path, output: Path, recipe: Recipe, say: Any) -> None:
    """Write the finished model, reload it in a clean process, then put it in place.

    Untouched source shards are linked from the base; with trained source weights everything is written anew.
    """
    plan = read_plan(base)
    shutil.rmtree(output, ignore_errors=True)
    with checkpoint.output_folder(output, overwrite=False) as folder:
        adapter = finish_adapters(student, recipe.finish.merge_lora, folder)
        changed = bool(student.originals) or student.lora is not None and not adapter
        copy_rest(base, folder, weights=not changed)
        save_mixers(student, folder, plan)
        if changed:
            save_source_weights(student, folder, plan)
        (folder / "README.md").write_text(trained_card(plan, recipe), "utf-8")
        write_manifest(folder, plan, recipe)
        if recipe.finish.verify:
            say(f"reloaded in a clean process: {check_keys(folder)} tensors, none missing, none unexpected")
    say(f"saved {output}")


def finish_adapters(student: Student, merge: bool, folder: Path) -> bool:
    """Merge LoRA layers into the source weights, or save them as `adapter/` and take them off; True when kept."""
    if student.lora is None:
        return False
    if merge:
        student.lora.merge_and_unload()
        return False
    from peft import get_peft_model_state_dict

    target = folder / "adapter"
    target.mkdir()
    tensors = get_peft_model_state_dict(student.lora, adapter_name=ADAPTER)
    save_file({f"base_model.model.{k}": v.contiguous().cpu() for k, v in tensors.items()}, target / "adapter_model.safetensors")
    student.lora.peft_config[ADAPTER].save_pretrained(target)
    student.lora.unload()
    return True


def copy_rest(base: Path, folder: Path, weights: bool) -> None:
    """Everything but weights, and the source shards as links when they are unchanged."""
    for path in sorted(base.iterdir()):
        target = folder / path.name
        if path.is_dir():
            shutil.copytree(path, target)
        elif path.suffix == ".safetensors":
            if weights and path.name != checkpoint.MIXER_SHARD:
                checkpoint.link_or_copy(path, target)
        elif path.name != checkpoint.INDEX or weights:
            shutil.copyfile(path, target)


def save_mixers(student: Student, folder: Path, plan: Plan) -> None:
    """The shard of mixers, in the dtype of the plan."""
    tensors = {k: v for k, v in student.model.state_dict().items() if not is_source(k) and ".lora_" not in k}
    cast = {k: v.to("cpu", getattr(torch, plan.dtype)).contiguous() for k, v in tensors.items()}
    save_file(cast, folder / checkpoint.MIXER_SHARD, {"format": "pt"})


def save_source_weights(student: Student, folder: Path, plan: Plan) -> None:
    """Everything but mixers, through transformers, which undoes its own renames; then the index over all shards."""
    student.model.to(getattr(torch, plan.dtype))
    config = (folder / "config.json").read_text("utf-8")
    tensors = {k: v for k, v in student.model.state_dict().items() if is_source(k)}
    with quiet():
        student.model.save_pretrained(folder, state_dict=tensors, max_shard_size="5GB")
    # The converted config is the reference: save_pretrained adds run-time values to it.
    write_atomically(folder / "config.json", config)
    single = folder / "model.safetensors"
    if single.exists():
        single.rename(folder / checkpoint.SINGLE_SHARD)
    checkpoint.write_index(folder, {f.name: list(read_header(f)) for f in folder.glob("*.safetensors")})


def trained_card(plan: Plan, recipe: Recipe) -> str:
    """The model card of a finished run."""
    stages = "; ".join(f"{s.kind} of {', '.join(s.train)}" for s in recipe.stages)
    source = Source(Path(), plan.source, plan.revision, {}, (), False)
    return card.model_card(plan, source, f"Trained with `linearize finetune` ({recipe.name}): {stages}.")


def write_manifest(folder: Path, plan: Plan, recipe: Recipe) -> None:
    """linearize.json: the plan and the resolved recipe."""
    checkpoint.write_json(folder / checkpoint.MANIFEST, {**checkpoint.manifest(folder, plan), "recipe": recipe.resolved()})
