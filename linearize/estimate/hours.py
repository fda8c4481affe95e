"""The time of a run: the work of its steps, of choosing layers, of evaluations and of checks, at a device's rates.

On a GPU a pass takes its products at a share of the card's rate and the bytes of its other operations at a share of its
bandwidth, or its launches, whichever takes longer. The shares were fitted to steps of eleven models on H100s and H200s
(docs/cost.md); on any other card they are not measured. On a CPU products, bytes that are moved and launches add up,
each at the rate of this machine, which is measured then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..choose.choose import tokens_of_choice, tokens_of_windows
from ..data.batches import tokens_per_sample
from ..data.images import count_images
from ..measure.positions import longest_text
from ..plan.keep import SINK, KeptWindow
from ..recipe.data import FileSource, TeacherSource, holds_images, local_paths, parts_of
from ..recipe.recipe import AttentionTransfer, Stage
from ..train.own_text import LARGEST, ON_CPU
from ..train.runs import processes
from ..train.samples import NEW_TOKENS
from ..train.session import FIDELITY_TOKENS, POSITION_TOKENS
from .gpus import Device, cpu_rates
from .memory import Memory, Rehearsal
from .tracker import Work

if TYPE_CHECKING:
    from .estimate import StageCost

# Of a card's dense bf16 rate, and of its bandwidth; and what compiled layers leave of the bytes and the launches.
PRODUCTS, BYTES, COMPILED = 0.67, 0.56, 0.5
# Seconds of a process that loads torch and transformers, and of a byte of weights that is read, hashed or written.
START, STORED = 8.0, 2e-9
# Tokens that a run writes at its end for its report, one after another: by student and teacher.
WRITTEN = 2 * NEW_TOKENS
# Seconds that a host takes to start one operation on a GPU, for which small models wait; and what one takes at least in
# a recorded step, where nothing waits.
LAUNCH, RECORDED = 4.5e-5, 1.6e-5
# A token that is written, in a large batch, beside one of a pass; and seconds of a step at least, on a GPU. Rough.
DECODED, STEP = 4, 0.01
# AdamW and clipping on a CPU: operations for each tensor, and how often they read or write the bytes of the moments.
OPTIMIZER_LAUNCHES, OPTIMIZER_READS = 8, 4


def seconds_of(work: Work, device: Device, precision: str, launch: float = LAUNCH) -> float | None:
    """What some work takes on a device, in accelerate's `precision`; None where its rates are not known or the work was
    not counted. `launch` is seconds that an operation takes on a GPU at least."""
    if not work.flops:
        return None
    if device.kind == "cpu":
        return cpu_rates(torch.bfloat16 if precision == "bf16" else torch.float32).seconds(work)
    if device.flops is None or device.bandwidth is None:
        return None
    busy = work.flops / (PRODUCTS * device.flops) + work.moved / (BYTES * device.bandwidth)
    return max(busy, work.launches * launch)


def step_seconds(
    stage: Stage, memory: Memory, device: Device, precision: str, recorded: bool, compiled: bool
) -> float | None:
    """One optimizer step on one device, on a GPU perhaps `recorded` (train/graphs.py) and of `compiled` layers. None
    where the device's rates are not known, or the step was not counted."""
    work = memory.work
    if compiled:
        work = Work(work.flops, COMPILED * work.launches, COMPILED * work.moved)
    micro = seconds_of(work, device, precision, RECORDED if recorded else LAUNCH)
    if micro is None:
        return None
    if device.kind == "cpu":
        kept = memory.parts["optimizer"]
        update = Work(0, OPTIMIZER_LAUNCHES * memory.tensors, OPTIMIZER_READS * kept)
        return stage.batch.gradient_accumulation_steps * micro + cpu_rates(torch.float32).seconds(update)
    assert device.bandwidth is not None
    # The optimizer reads and writes weights and moments, and reads gradients.
    moved = sum(memory.parts[part] for part in ("masters", "gradients", "optimizer")) * 2
    return stage.batch.gradient_accumulation_steps * micro + moved / device.bandwidth


def evaluations(rehearsal: Rehearsal, costs: Sequence[StageCost], device: Device) -> float | None:
    """Seconds of all evaluations of a run: of teacher and converted model, of the stages, and of its end."""
    recipe, total = rehearsal.recipe, 0.0
    for number, cost in enumerate(costs):
        data, every = recipe.data_for(cost.stage), recipe.eval.every_steps
        if data.eval is None or not (cost.memory.evaluated.flops or cost.memory.reason):  # a model without a head
            continue
        batch = seconds_of(cost.memory.evaluated, device, rehearsal.precision)
        if batch is None or cost.steps is None:
            return None
        per_token = batch / (cost.stage.batch.per_device * tokens_per_sample(data) * processes())
        held = min(recipe.eval.max_tokens, most_tokens_of(data.eval, recipe.folder))
        times = 1 + (max(cost.steps - 1, 0) // every if every else 0)
        if number == 0:  # the teacher alone, the converted model beside it, and each of its layers
            total += (1.5 * held + min(FIDELITY_TOKENS, held)) * per_token
        total += times * held * per_token
        if number == len(costs) - 1:  # each layer, longer texts, and samples
            total += (min(FIDELITY_TOKENS, held) + min(POSITION_TOKENS, held)) * per_token
            one = Work(1.0, cost.memory.evaluated.launches / 2)
            total += WRITTEN * (seconds_of(one, device, rehearsal.precision) or 0.0)
    return total


def most_tokens_of(source: Any, start: Path) -> float:
    """No more tokens than there are bytes in a source's plain files; of a folder or arrays of images as many as there
    are images, for one counts as a token; unknown, infinity, of others."""
    if holds_images(source):
        known = count_images(source, start)
        return math.inf if known is None else known
    if isinstance(source, TeacherSource):
        return source.teacher.tokens
    files = local_paths(source, start) if isinstance(source, FileSource) else ()
    if not files or any(path.suffix not in (".txt", ".jsonl") or not path.is_file() for path in files):
        return math.inf
    return sum(path.stat().st_size for path in files)


def choosing(rehearsal: Rehearsal, costs: Sequence[StageCost], device: Device) -> float | None:
    """Seconds of finding the layers, or heads, that keep softmax, or those with a window, where the recipe leaves that
    to linearize.

    It reads in float32 on a CPU, and trains mixers as attention transfer does.
    """
    plan, convert = rehearsal.planned and rehearsal.planned[0], rehearsal.recipe.convert
    choices = [] if plan is None else [one for one in (plan.choice, plan.heads_choice) if one is not None]
    windows = None if plan is None else plan.window_choice
    if convert is None or not (choices or windows):
        return 0.0
    data, precision = rehearsal.recipe.data_for(costs[0].stage), "no" if device.kind == "cpu" else "bf16"
    length, memory = tokens_per_sample(data), costs[0].memory
    blocks = costs[0].stage.batch.per_device
    passed = seconds_of(memory.evaluated, device, precision)
    if passed is None:
        return None
    a_pass = passed / (2 * blocks * length)  # of one model over one token
    transfers = isinstance(costs[0].stage, AttentionTransfer)
    trained = (seconds_of(memory.work, device, precision) if transfers else 2 * passed) or 0.0
    total = 0.0
    if plan is not None and windows is not None:
        most, layers = longest_text(rehearsal.model), len({site.layer for site in plan.kept})
        total += tokens_of_windows(layers, KeptWindow.parse(windows.asked).tokens, SINK, most) * a_pass
    for choice in choices:
        assert plan is not None
        layers = len(plan.steps) + len(plan.kept)
        units = layers if choice is plan.choice else sum(step.site.kv_heads for step in plan.linear)
        read, learned = tokens_of_choice(convert.score_by, units, len(choice.kept), length, plan.linear[0].site.causal)
        total += read * a_pass + learned * trained / (blocks * length)
    return total


def own_text(rehearsal: Rehearsal, costs: Sequence[StageCost], device: Device) -> float | None:
    """Seconds in which the teacher writes the text of its own that stages read, each text once."""
    recipe, total, seen = rehearsal.recipe, 0.0, list[TeacherSource]()
    for cost in costs:
        data, memory = recipe.data_for(cost.stage), cost.memory
        for part, _ in parts_of(data.train):
            if not isinstance(part, TeacherSource) or part in seen:
                continue
            seen.append(part)
            # Batches are so large that a GPU does not wait for launches.
            passed = seconds_of(memory.evaluated, device, rehearsal.precision, launch=0)
            if passed is None:
                return None
            a_pass = passed / (2 * cost.stage.batch.per_device * data.pack.seq_len)
            asked, texts = part.teacher, ON_CPU if device.kind == "cpu" else LARGEST
            steps = math.ceil(asked.tokens / min(texts * asked.length, asked.tokens)) * asked.length
            total += max(asked.tokens * a_pass * DECODED, steps * STEP * (device.kind != "cpu"))
    return total


def around(rehearsal: Rehearsal, costs: Sequence[StageCost], device: Device) -> dict[str, float | None]:
    """Hours of what a run does beside its steps; None where they are not known."""
    seconds = {
        "choosing": choosing(rehearsal, costs, device),
        "evaluation": evaluations(rehearsal, costs, device),
        "start and checks": checks(rehearsal),
    }
    writing = own_text(rehearsal, costs, device)
    seconds |= {} if writing == 0 else {"the teacher's text": writing}
    return {name: None if value is None else value / 3600 for name, value in seconds.items()}


def checks(rehearsal: Rehearsal) -> float:
    """Seconds of what a run does once: it starts, and loads the converted model and the result in clean processes."""
    recipe = rehearsal.recipe
    starts = 1 + recipe.finish.verify * (1 + (recipe.convert is not None))
    return starts * START + 4 * rehearsal.stored * STORED
