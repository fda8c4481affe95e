"""Which change makes a recipe fit a device: tried one after another, cheapest first, and written as what to type. And
what a recipe leaves open, replaced by what fits: `runtime.gradient_checkpointing: auto`, `optimizer.memory: auto`,
`runtime.batch: auto`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data.batches import tokens_per_sample
from ..recipe.recipe import AttentionTransfer, Recipe, per_step, trains_source
from ..terminal.output import counted, size
from ..terminal.progress import progress
from ..train.drop_path import layers_of
from ..train.runs import processes
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
    if values["runtime"]["gradient_checkpointing"] is not True and cost.checkpointing:
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
        checkpointed = {} if runtime["gradient_checkpointing"] is True else {"runtime.gradient_checkpointing": True}
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


# ---------------------------------------------------------------- what a recipe leaves open


# Tokens of a micro batch beyond which a GPU has enough to do.
ENOUGH = 1 << 15
# Those that have to fit with all activations; of fewer a GPU that computes them again is as fast.
KEPT = 1 << 13
# Of a device, what layers that keep their activations may fill.
FULL = 0.95
SMALLER = "So optimizer.memory is small: moments in 8 bits, source weights and their gradients in the model's dtype"


def is_open(recipe: Any) -> bool:
    """Whether a recipe leaves something to the device; one of latents never does."""
    return isinstance(recipe, Recipe) and (
        "auto" in (recipe.runtime.batch, recipe.runtime.gradient_checkpointing)
        or any(stage.optimizer.memory == "auto" for stage in recipe.stages)
    )


def as_before(recipe: Recipe, record: Path) -> Recipe:
    """What a run chose when it began, from its run.json, so that it goes on with it. It chose the rows of a micro
    batch, and not the blocks of a step: those are what the recipe says."""
    run = json.loads(record.read_text("utf-8"))
    before, values = run["recipe"], recipe.resolved()
    blocks = [
        [stage["blocks_per_step"] for stage in per_step(*one)["stages"]]
        for one in ((values, processes()), (before, run["processes"]))
    ]
    for now, then, asked, had in zip(values["stages"], before["stages"], *blocks, strict=False):
        if now["optimizer"]["memory"] == "auto":
            now["optimizer"]["memory"] = then["optimizer"].get("memory", "full")
        if values["runtime"]["batch"] == "auto":
            steps, left = divmod(asked, then["batch"]["per_device"] * processes())
            if asked == had and not left:
                now["batch"] = then["batch"] | {"gradient_accumulation_steps": steps}
    values["runtime"]["batch"] = "given"
    if values["runtime"]["gradient_checkpointing"] == "auto":
        values["runtime"]["gradient_checkpointing"] = before["runtime"]["gradient_checkpointing"]
    return recipe.changed(values)


def without_auto(recipe: Recipe) -> Recipe:
    """All that is left open as it is without this file: the batch as given, activations kept unless they are offloaded,
    and `full`; where FSDP2 shards weights once for all stages, `small` beside a `small` that is given."""
    values = recipe.resolved()
    values["runtime"]["batch"] = "given"
    if values["runtime"]["gradient_checkpointing"] == "auto":
        values["runtime"]["gradient_checkpointing"] = recipe.runtime.offload_activations
    of_source = [stage for stage in values["stages"] if trains_source(stage["train"])]
    alike = sharded("FSDP") and any(stage["optimizer"]["memory"] == "small" for stage in of_source)
    for stage in values["stages"]:
        if stage["optimizer"]["memory"] == "auto":
            stage["optimizer"]["memory"] = "small" if alike and stage in of_source else "full"
    return recipe.changed(values)


def choose(
    recipe: Recipe, rehearse: Callable[[Recipe], Rehearsal], device: Device, say: Callable[[str], None]
) -> Recipe:
    """The recipe with everything chosen; `rehearse` makes a rehearsal. `say` gets what was chosen and why.

    First whether activations are computed again: where they do not fit. Then the optimizer: `small` in a stage that
    asks for it and does not fit otherwise. Then, on a GPU, the rows of a micro batch, of the blocks of its step. Then
    in how many layers activations are computed again.
    """
    plain = without_auto(recipe)
    first = rehearse(plain)
    cost, values = estimate(first, device), plain.resolved()
    kept, layers = cost, len(layers_of(first.model))
    free = recipe.runtime.gradient_checkpointing == "auto" and not plain.runtime.gradient_checkpointing
    again = free and cost.checkpointing and not keeps_activations(plain, cost)
    if again:
        values["runtime"]["gradient_checkpointing"] = True
        plain = recipe.changed(values)
        cost = estimate(rehearse(plain), device)
    open_stages = [stage.optimizer.memory == "auto" for stage in recipe.stages]
    changed = False
    tight = [] if sharded("DEEPSPEED") else [one for one in cost.too_large if open_stages[cost.stages.index(one)]]
    narrow = next((one.stage.name for one in tight if sharded() and trains_source(one.stage.train)), "")
    for asked, one, stage in zip(open_stages, cost.stages, values["stages"], strict=True):
        if one in tight:
            stage["optimizer"]["memory"], changed = "small", True
            needs = f"{size(one.needs(device))} of {size(device.memory)}"
            say(f"{one.stage.name}: full needs {needs}. {SMALLER}")
        elif asked and narrow and trains_source(stage["train"]):
            stage["optimizer"]["memory"] = "small"
            say(f"{one.stage.name}: optimizer.memory is small as in {narrow}: FSDP2 shards weights once for all stages")
    rows = recipe.runtime.batch == "auto" and device.kind == "cuda"
    if changed and (rows or again):
        cost = estimate(rehearse(recipe.changed(values)), device)
    if rows:
        choose_rows(recipe, cost, values, say)
    if again:
        count = layers_again(recipe.changed(values), layers, kept, cost)
        values["runtime"]["gradient_checkpointing"] = count
        if count is not True and estimate(rehearse(recipe.changed(values)), device).too_large:
            values["runtime"]["gradient_checkpointing"] = count = True
        which, key = ("", "") if count is True else (f" of {count} of {layers} layers", f": {count}")
        what = f"activations{which} are computed again in the backward pass (gradient_checkpointing{key})"
        say(f"{what}: all of them do not fit")
    return recipe.changed(values)


def choose_rows(recipe: Recipe, cost: Cost, values: Values, say: Callable[[str], None]) -> None:
    """Put into a resolved recipe the rows of micro batches that fit, of the blocks of a step."""
    for one, stage in zip(cost.stages, values["stages"], strict=True):
        blocks, given = one.stage.batch.blocks, one.stage.batch.per_device
        most = max(ENOUGH // tokens_per_sample(recipe.data_for(one.stage)), 1)
        rows = fitting_rows(one, cost.device, min(blocks, most))
        if rows != given and blocks % rows == 0:
            stage["batch"] = {"per_device": rows, "gradient_accumulation_steps": blocks // rows}
            micro = counted(blocks // rows, "micro batch", "micro batches")
            say(f"{one.stage.name}: {counted(rows, 'block')} in a micro batch, {micro} in a step")


def layers_again(recipe: Recipe, layers: int, kept: Cost, cost: Cost) -> bool | int:
    """In how many of its layers a recipe that computes activations again has to: True in all, else their number. `cost`
    and `kept` are of such a recipe and of one that keeps all, in micro batches of as many rows as each counts for.

    What a layer keeps is the difference, divided by the layers; a tenth more is left free, and some of the device. It
    is there when the backward pass begins, which has no gradients yet, and goes before the layers that compute theirs
    again.
    """
    spared = layers
    for stage, one, other in zip(recipe.stages, cost.stages, kept.stages, strict=True):
        if isinstance(stage, AttentionTransfer):
            continue
        rows, parts = stage.batch.per_device, dict(one.memory.parts)
        parts["activations"] = int(one.memory.saved * rows / one.stage.batch.per_device) + one.memory.gathered
        parts["logits"] = 0  # which are in `saved`
        if stage.batch.gradient_accumulation_steps == 1:
            parts["gradients"] = 0
        begins = replace(one, memory=replace(one.memory, parts=parts))
        more = other.memory.saved * rows / other.stage.batch.per_device - parts["activations"]
        free = FULL * cost.device.memory - begins.needs(cost.device)
        spared = min(spared, int(layers * free / (1.1 * more)) if free > 0 and more > 0 else 0)
    return max(layers - spared, 1) if spared else True


def keeps_activations(recipe: Recipe, cost: Cost) -> bool:
    """Whether each stage that could compute activations again fits with them, in micro batches of KEPT tokens."""
    if cost.too_large or cost.device.kind == "cpu":
        return not cost.too_large
    for one in cost.stages:
        blocks, length = one.stage.batch.blocks, tokens_per_sample(recipe.data_for(one.stage))
        rows = fitting_rows(one, cost.device, blocks)
        if not isinstance(one.stage, AttentionTransfer) and rows * length < min(KEPT, blocks * length):
            return False
    return True
