"""`linearize estimate`, the story on one screen: rehearse each stage on fake tensors, then time, energy, price, disk.

Memory is counted (memory.py), time is computed from the work of a step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linearize_kernels.hf.attention_hooks import mixers_of

from ..choose.choose import tokens_of_choice, tokens_of_windows
from ..data.batches import limits, token_limit, tokens_per_sample
from ..data.images import count_images
from ..data.kinds import kind_of
from ..demo import BYTES
from ..errors import Exit, LinearizeError
from ..measure.positions import longest_text
from ..plan.keep import SINK, KeptWindow
from ..recipe.data import DemoSource, FileSource, TeacherSource, holds_images, local_paths, parts_of
from ..recipe.recipe import AttentionTransfer, Recipe, Stage
from ..terminal.output import size
from ..train.chunked_head import obstacle
from ..train.compiled import compiles
from ..train.graphs import unrecordable
from ..train.own_text import LARGEST, ON_CPU
from ..train.runs import processes
from ..train.runtime import stage_steps
from ..train.samples import NEW_TOKENS
from ..train.session import FIDELITY_TOKENS, POSITION_TOKENS
from ..train.student import linear_layers
from .gpus import GIB, Device, cpu_rates
from .memory import Memory, Rehearsal, divided
from .tracker import Work

# What the allocator holds beyond the tensors that are alive, of their bytes.
FRAGMENTS = 0.03
# Bytes of text that become a token, of usual vocabularies: the demo's, of 2,048 words, takes 3.1 of code to a token,
# large ones 4 and more of English. A vocabulary of no more than BYTE_WORDS is one of bytes.
TEXT_BYTES, BYTE_WORDS = 3, 512
# Bytes of a token in a text that the teacher writes, with what stands around it.
OWN_TEXT = 6
# How much longer text is than its packed file, .gz, .zst or .parquet.
UNPACKED = 3
USUAL = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass
class StageCost:
    """One stage on one of its devices. Times are None where the device's rate is not known, or the stage's length."""

    stage: Stage
    memory: Memory
    steps: int | None
    tokens: int | None
    tokens_per_s: float | None
    hours: float | None

    def needs(self, device: Device) -> int:
        """Bytes that the device must have: the peak, the allocator's fragments, the context."""
        return int(self.memory.peak * (1 + FRAGMENTS * (device.kind == "cuda"))) + device.reserved

    def row(self, device: Device) -> dict[str, Any]:
        """Plain data, for JSON."""
        stage = self.stage
        return {
            "name": stage.name,
            "kind": stage.kind,
            "train": list(stage.train),
            "parameters": self.memory.trained,
            "steps": self.steps,
            "tokens": self.tokens,
            "epochs": stage.epochs,
            "lr": stage.optimizer.lr,
            "new_lr": stage.optimizer.new_lr,
            "optimizer_memory": stage.optimizer.memory,
            "batch": {
                "per_device": stage.batch.per_device,
                "gradient_accumulation_steps": stage.batch.gradient_accumulation_steps,
            },
            "teacher_copy_bytes": self.memory.teacher_copy,
            "memory": {**self.memory.parts, "total": self.memory.peak, "device": self.needs(device)},
            "host_bytes": self.memory.host,
            "fits": self.needs(device) <= device.memory,
            "uncounted": self.memory.reason or None,
            "tokens_per_s": None if self.tokens_per_s is None else float(f"{self.tokens_per_s:.3g}"),
            "hours": None if self.hours is None else float(f"{self.hours:.3g}"),
        }


@dataclass
class Cost:
    """A recipe on `count` devices: its stages, bytes of disk by what they are for, and what takes time `around` the
    steps: hours of choosing layers, of evaluations, and of start-up and checks; None where they are not known.

    `checkpointing`: the model knows how; `targets` are its linear layers for LoRA; `chunks`: its head runs on some
    tokens alone.
    """

    device: Device
    count: int
    stages: list[StageCost]
    disk: dict[str, int]
    around: dict[str, float | None]
    checkpointing: bool = False
    targets: tuple[str, ...] = ()
    chunks: bool = False

    @property
    def too_large(self) -> list[StageCost]:
        return [cost for cost in self.stages if cost.needs(self.device) > self.device.memory]

    def summary(self, price: float | None = None) -> dict[str, Any]:
        """What holds for the whole recipe, as plain data; `price` is that of one device for an hour."""
        parts = {"training": added(cost.hours for cost in self.stages), **self.around}
        total = added(parts.values())
        power = self.device.watts
        return {
            "device": {"name": self.device.name, "memory": self.device.memory, "count": self.count},
            "hours": total,
            "hours_of": parts,
            "kwh": None if total is None or power is None else total * power * self.count / 1000,
            "price": None if total is None or price is None else total * price * self.count,
            "disk": {**self.disk, "total": sum(self.disk.values())},
        }


def added(hours: Iterable[float | None]) -> float | None:
    """Their sum; None where one is not known."""
    known = list(hours)
    return None if None in known else sum(one for one in known if one is not None)


def estimate(rehearsal: Rehearsal, device: Device, max_steps: int | None = None) -> Cost:
    """What the recipe of a rehearsal costs on such a device. Nothing is read but configs, and no memory of a model's
    size is taken."""
    recipe, found = rehearsal.recipe, list[StageCost]()
    for number, stage in enumerate(recipe.stages):
        memory = divided(rehearsal.stage(number), processes(), sharded())
        blocks, length = stage.batch.blocks, tokens_per_sample(recipe.data_for(stage))
        steps = stage_steps(stage, blocks * processes(), length, max_steps)
        tokens = None if steps is None else steps * blocks * processes() * length
        plain = unrecordable(recipe, stage, torch.device("cuda"), sharded(), kind_of(rehearsal.model))
        recorded = recipe.runtime.graphs is not False and not plain
        own = (tokens or 0) // processes()
        compiled = compiles(recipe, stage, rehearsal.model, torch.device(device.kind), sharded(), own)
        seconds = step_seconds(stage, memory, device, rehearsal.precision, recorded, compiled)
        rate = None if seconds is None else blocks * processes() * length / seconds
        hours = None if rate is None or tokens is None else tokens / rate / 3600
        found.append(StageCost(stage, memory, steps, tokens, rate, hours))
    model = rehearsal.model
    targets = lora_targets(model)
    of_disk = disk(rehearsal, found, max_steps)
    chunks = not obstacle(model) and not sharded("DEEPSPEED")
    beside = around(rehearsal, found, device)
    return Cost(device, processes(), found, of_disk, beside, model.supports_gradient_checkpointing, targets, chunks)


def own_tokens(recipe: Recipe) -> int:
    """Tokens of the texts that the teacher writes for a recipe."""
    parts = {part for stage in recipe.stages for part, _ in parts_of(recipe.data_for(stage).train)}
    return sum(part.teacher.tokens for part in parts if isinstance(part, TeacherSource))


def lora_targets(model: Any) -> tuple[str, ...]:
    """Where LoRA goes: the usual projections, else the linear layers of the attention modules that have a mixer."""
    if set(USUAL) <= linear_layers(model).keys():
        return USUAL
    inside: dict[str, Any] = {}
    for path in mixers_of(model):
        inside |= linear_layers(model.get_submodule(path))
    return tuple(inside)


def sharded(*by: str) -> bool:
    """Whether the launcher says that weights are divided among processes, `by` FSDP or DEEPSPEED, or by either."""
    return any(
        os.environ.get(f"ACCELERATE_USE_{how}", "false").lower() == "true" for how in by or ("FSDP", "DEEPSPEED")
    )


def disk(rehearsal: Rehearsal, costs: list[StageCost], max_steps: int | None = None) -> dict[str, int]:
    """Bytes at the fullest moment of a run that is not interrupted, beyond the source: the converted base, checkpoints,
    tokens, the result. At its end the checkpoints within stages are gone."""
    planned = rehearsal.planned
    within = max(held_within(rehearsal.recipe, c) * (c.memory.checkpoint + c.memory.parts["optimizer"]) for c in costs)
    ends = sum(c.memory.checkpoint for c in costs)
    merged = rehearsal.student.lora is not None and rehearsal.recipe.finish.merge_lora
    changed = rehearsal.student.drifted or merged
    return {
        "converted": 0 if planned is None else planned[0].needed_bytes,
        "checkpoints": within + ends,
        "tokens": 4 * packed_tokens(rehearsal, costs, max_steps) + OWN_TEXT * own_tokens(rehearsal.recipe),
        "result": rehearsal.stored if changed else rehearsal.stored_new,
    }


def held_within(recipe: Recipe, cost: StageCost) -> int:
    """How many checkpoints within a stage lie there at a time, no more than it writes before its end: a new one is
    complete before the oldest one goes."""
    most = recipe.checkpoint.save_total_limit + 1
    return most if cost.steps is None else min(most, max(cost.steps - 1, 0) // recipe.checkpoint.every_steps)


def packed_tokens(rehearsal: Rehearsal, costs: list[StageCost], max_steps: int | None) -> int:
    """Tokens of all files of packed text that a run writes, 4 bytes each.

    Of training text without a limit a run packs all, whatever the stages read of it, and again for another length of
    rows or for answers alone. Nothing is tokenised here: files are counted by their bytes, TEXT_BYTES and UNPACKED,
    which is right within a factor of 2 or so. The length of a dataset is not known here: it counts with what its stages
    read of it, although a run packs all of one that is not streamed.
    """
    recipe, found = rehearsal.recipe, dict[Any, int]()
    for cost in costs:
        data, sft = recipe.data_for(cost.stage), cost.stage.answers_alone and kind_of(rehearsal.model) == "text"
        for split in ("train", "eval"):
            source = getattr(data, split)
            if source is None or holds_images(source):
                continue
            for part, limit in limits(source, token_limit(recipe, cost.stage, split, processes(), max_steps)):
                held = tokens_in(part, rehearsal)
                if held is None:
                    held = limit if limit is not None else cost.tokens or 0
                count = held if limit is None else min(held, limit)
                length = data.pack.seq_len
                key = (part.model_dump_json(), data.pack.text_key, length, sft, limit)
                found[key] = max(found.get(key, 0), -(-count // length) * length)
    return sum(found.values())


def tokens_in(source: Any, rehearsal: Rehearsal) -> int | None:
    """About how many tokens files or the demo's texts have; None where that is not known."""
    if isinstance(source, TeacherSource):
        return source.teacher.tokens
    if isinstance(source, DemoSource):
        count = BYTES.get(source.demo)
    elif isinstance(source, FileSource):
        files = [path for path in local_paths(source, rehearsal.recipe.folder) if path.is_file()]
        plain = [path.suffix in (".txt", ".jsonl") for path in files]
        count = sum(path.stat().st_size * (1 if one else UNPACKED) for path, one in zip(files, plain, strict=True))
    else:
        return None
    words = getattr(rehearsal.model.config.get_text_config(), "vocab_size", None) or 0
    return None if count is None else count // (1 if words <= BYTE_WORDS else TEXT_BYTES)


def refusal(cost: Cost, advice: str) -> LinearizeError:
    """The error (exit 4) for a stage that does not fit its device; `advice` is what to type instead."""
    worst = max(cost.too_large, key=lambda c: c.needs(cost.device))
    parts = ", ".join(f"{part} {value / GIB:.1f}" for part, value in worst.memory.parts.items() if value)
    return LinearizeError(
        f"{worst.stage.name} needs {size(worst.needs(cost.device))} of {cost.device.name}, which has "
        f"{size(cost.device.memory)} (GiB: {parts}). Nothing was converted. {advice}",
        Exit.RESOURCE,
    )


# ---------------------------------------------------------------- hours

# Of the steps of a run, of choosing layers, of evaluations and of checks, at a device's rates. On a GPU a pass takes
# its products at a share of the card's rate and the bytes of its other operations at a share of its bandwidth, or its
# launches, whichever takes longer. The shares were fitted to steps of eleven models on H100s and H200s (docs/cost.md);
# on any other card they are not measured. On a CPU products, bytes that are moved and launches add up, each at the rate
# of this machine, which is measured then.

# Of a card's dense bf16 rate, and of its bandwidth; and what compiled layers leave of the bytes and the launches.
PRODUCTS, BANDWIDTH, COMPILED = 0.67, 0.56, 0.5
# Seconds of a process that loads torch and transformers, and of a byte of weights that is read, hashed or written.
START, STORED = 8.0, 2e-9
# Tokens that a run writes at its end for its report, one after another: by student and teacher.
WRITTEN = 2 * NEW_TOKENS
# Seconds that a host takes to start one operation on a GPU, for which small models wait; and what one takes at least in
# a recorded step, where nothing waits.
LAUNCH, RECORDED = 4.5e-5, 1.6e-5
# A token that is written, in a large batch, beside one of a pass; and seconds of a step at least, on a GPU. Rough: for
# 8M tokens of SmolLM2-135M on an H200 they make 95 s, and the teacher's measured rate 126.
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
    busy = work.flops / (PRODUCTS * device.flops) + work.moved / (BANDWIDTH * device.bandwidth)
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
