"""Which change makes a recipe fit a device: tried one after another, cheapest first, and written as what to type."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from ..recipe.recipe import trains_source
from ..terminal.progress import progress
from .estimate import Cost, StageCost, estimate, sharded
from .gpus import Device
from .memory import Rehearsal

Values = dict[str, Any]


def advise(rehearsal: Rehearsal, device: Device, cost: Cost) -> str:
    """The cheapest change that makes it fit, as overrides; else that none was found.

    Each change is tried alone first, then each together with those before it.
    """
    recipe = rehearsal.recipe
    smallest = max(c.needs(device) for c in cost.stages)
    count = len(list(changes(recipe.resolved(), cost)))
    tries = [range(n, n + 1) for n in range(count)] + [range(n + 1) for n in range(1, count)]
    with progress("looking for what fits", len(tries) * rehearsal.parts(recipe)) as advance:
        for chosen in tries:
            values, overrides = recipe.resolved(), list[str]()
            for number, change in enumerate(changes(values, cost)):
                if number in chosen:
                    overrides += [f"{key}={written(value)}" for key, value in change.items()]
                    for key, value in change.items():
                        put(values, key, value)
            found = estimate(rehearsal.changed(recipe.changed(values), advance), device)
            if not found.too_large:
                return f"This fits: {shlex.join(overrides)}"
            smallest = min(smallest, max(c.needs(device) for c in found.stages))
    return (
        f"No change that linearize knows makes it fit: the smallest that it tried needs {smallest / 2**30:.1f} GiB. "
        "Choose a larger card, or several of them with FSDP2"
    )


def changes(values: Values, cost: Cost) -> Iterator[Values]:
    """What may be changed in a resolved recipe, cheapest first: keys of overrides and their values.

    First what costs time alone, then what changes the training.
    """
    if not values["runtime"]["gradient_checkpointing"] and cost.checkpointing:
        yield {"runtime.gradient_checkpointing": True}
    large = [(s, c) for s, c in zip(values["stages"], cost.stages, strict=True) if c in cost.too_large]
    whole = [s["name"] for s, _ in large if s["kind"] == "logit_kl" and s["loss"]["chunk_size"] is None]
    if whole and cost.chunks:
        yield {f"stages.{name}.loss.chunk_size": 1024 for name in whole}
    batches = {}
    for stage, of_stage in large:
        rows, blocks = of_stage.stage.batch.per_device, of_stage.stage.batch.blocks
        fewer = fitting_rows(of_stage, cost.device, rows - 1)
        if fewer < rows:
            batches[f"stages.{stage['name']}.batch"] = {
                "per_device": fewer,
                "gradient_accumulation_steps": blocks // fewer,
            }
    if batches:
        yield batches
    runtime = values["runtime"]
    if (
        cost.checkpointing
        and not runtime["offload_activations"]
        and any(s["kind"] != "attention_transfer" for s, _ in large)
    ):
        checkpointed = {} if runtime["gradient_checkpointing"] else {"runtime.gradient_checkpointing": True}
        yield {**checkpointed, "runtime.offload_activations": True}
    moved = [stage for stage, _ in large if trains_source(stage["train"])]
    # FSDP2 shards weights once, in one dtype for all stages.
    alike = [stage for stage in values["stages"] if trains_source(stage["train"])] if moved and sharded() else moved
    full = [stage["name"] for stage in alike if stage["optimizer"]["memory"] == "full" and not sharded("DEEPSPEED")]
    if full:
        yield {f"stages.{name}.optimizer.memory": "small" for name in full}
    adapters: Values = {}
    for stage in moved if cost.targets else ():
        adapters[f"stages.{stage['name']}.train"] = ["lora"]
        adapters[f"stages.{stage['name']}.lora"] = {"r": 16, "alpha": 32.0, "target_modules": list(cost.targets)}
    if adapters:
        yield adapters
    length = values["data"]["pack"]["seq_len"]
    if length > 512:
        yield {"data.pack.seq_len": length // 2}


def fitting_rows(cost: StageCost, device: Device, most: int) -> int:
    """The most rows of a micro batch, at most `most`, that divide the blocks of a step and should fit; at least 1.

    Activations and logits grow with the rows, but not what is gathered of whole weights; a tenth of them is left free.
    """
    parts, blocks = cost.memory.parts, cost.stage.batch.blocks
    of_row = (parts["activations"] + parts["logits"] - cost.memory.gathered) / cost.stage.batch.per_device
    free = device.memory - cost.needs(device) + of_row * cost.stage.batch.per_device
    fitting = (n for n in range(min(blocks, most), 0, -1) if blocks % n == 0 and 1.1 * of_row * n <= free)
    return next(fitting, 1)


def put(values: Values, key: str, value: Any) -> None:
    """Set a dotted key of a resolved recipe; a stage goes by its name."""
    *path, last = key.split(".")
    for step in path:
        if isinstance(values, list):
            values = next(entry for entry in values if entry["name"] == step)
        else:
            values = values[step]
    values[last] = value


def written(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
