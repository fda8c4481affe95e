"""Replace what a recipe leaves open by what fits the device: `runtime.gradient_checkpointing: auto`,
`optimizer.memory: auto`, `runtime.batch: auto`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ..data.batches import tokens_per_sample
from ..recipe.recipe import AttentionTransfer, Recipe, trains_source
from ..terminal.output import counted, size
from .advice import fitting_rows
from .estimate import Cost, estimate, sharded
from .gpus import Device
from .memory import Rehearsal

# Tokens of a micro batch beyond which a GPU has enough to do.
ENOUGH = 1 << 15
# Those that have to fit with all activations; of fewer a GPU that computes them again is as fast.
KEPT = 1 << 13
SMALLER = "So optimizer.memory is small: moments in 8 bits, source weights and their gradients in the model's dtype"


def is_open(recipe: Recipe) -> bool:
    """Whether a recipe leaves something to the device."""
    return "auto" in (recipe.runtime.batch, recipe.runtime.gradient_checkpointing) or any(
        stage.optimizer.memory == "auto" for stage in recipe.stages
    )


def as_before(recipe: Recipe, record: Path) -> Recipe:
    """What a run chose when it began, from its run.json, so that it goes on with it."""
    before, values = json.loads(record.read_text("utf-8"))["recipe"], recipe.resolved()
    for now, then in zip(values["stages"], before["stages"], strict=False):
        if now["optimizer"]["memory"] == "auto":
            now["optimizer"]["memory"] = then["optimizer"].get("memory", "full")
        if values["runtime"]["batch"] == "auto":
            now["batch"] = then["batch"]
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
    asks for it and does not fit otherwise. Then, on a GPU, the rows of a micro batch, of the blocks of its step.
    """
    plain = without_auto(recipe)
    cost, values = estimate(rehearse(plain), device), plain.resolved()
    free = recipe.runtime.gradient_checkpointing == "auto" and not plain.runtime.gradient_checkpointing
    if free and cost.checkpointing and not keeps_activations(plain, cost):
        values["runtime"]["gradient_checkpointing"] = True
        plain = recipe.changed(values)
        cost = estimate(rehearse(plain), device)
        say("activations are computed again in the backward pass (gradient_checkpointing): all of them do not fit")
    open_stages = [stage.optimizer.memory == "auto" for stage in recipe.stages]
    changed = False
    tight = [] if sharded("DEEPSPEED") else [one for one in cost.too_large if open_stages[cost.stages.index(one)]]
    first = next((one.stage.name for one in tight if sharded() and trains_source(one.stage.train)), "")
    for asked, one, stage in zip(open_stages, cost.stages, values["stages"], strict=True):
        if one in tight:
            stage["optimizer"]["memory"], changed = "small", True
            needs = f"{size(one.needs(device))} of {size(device.memory)}"
            say(f"{one.stage.name}: full needs {needs}. {SMALLER}")
        elif asked and first and trains_source(stage["train"]):
            stage["optimizer"]["memory"] = "small"
            say(f"{one.stage.name}: optimizer.memory is small as in {first}: FSDP2 shards weights once for all stages")
    if recipe.runtime.batch != "auto" or device.kind != "cuda":
        return recipe.changed(values)
    if changed:
        cost = estimate(rehearse(recipe.changed(values)), device)
    for one, stage in zip(cost.stages, values["stages"], strict=True):
        blocks, given = one.stage.batch.blocks, one.stage.batch.per_device
        most = max(ENOUGH // tokens_per_sample(recipe.data_for(one.stage)), 1)
        rows = fitting_rows(one, device, min(blocks, most))
        if rows != given and blocks % rows == 0:
            stage["batch"] = {"per_device": rows, "gradient_accumulation_steps": blocks // rows}
            micro = counted(blocks // rows, "micro batch", "micro batches")
            say(f"{one.stage.name}: {counted(rows, 'block')} in a micro batch, {micro} in a step")
    return recipe.changed(values)


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
