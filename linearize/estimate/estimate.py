"""`linearize estimate`, the story on one screen: rehearse each stage on fake tensors, then time, energy, price, disk.

Memory is counted (memory.py), time is computed from the work of a step (hours.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from linearize_kernels.hf.attention_hooks import mixers_of

from ..data.batches import limits, token_limit, tokens_per_sample
from ..data.kinds import kind_of
from ..demo import BYTES
from ..errors import Exit, LinearizeError
from ..recipe.data import DemoSource, FileSource, TeacherSource, holds_images, local_paths, parts_of
from ..recipe.recipe import Recipe, Stage
from ..terminal.output import size
from ..train.chunked_head import obstacle
from ..train.compiled import compiles, saved_seconds
from ..train.graphs import unrecordable
from ..train.runs import processes
from ..train.runtime import stage_steps
from ..train.student import linear_layers
from .gpus import GIB, Device
from .hours import around, step_seconds
from .memory import Memory, Rehearsal, divided

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
        seconds = step_seconds(stage, memory, device, rehearsal.precision, recorded)
        own = (tokens or 0) // processes()
        if seconds is not None and compiles(recipe, stage, rehearsal.model, torch.device(device.kind), sharded(), own):
            seconds -= min(saved_seconds(rehearsal.model, blocks * length), seconds / 2)
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
