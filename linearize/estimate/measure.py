"""`linearize estimate --measure`: two real optimizer steps of each stage on this device, on random weights."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..data.batches import tokens_per_sample
from ..recipe.recipe import Stage
from ..terminal.progress import Advance, progress, silent
from ..train.device import on_cpu
from ..train.progress import forget_peak, memory_bytes
from ..train.runtime import make_optimizer
from ..train.save import meta_model
from ..train.student import Student
from ..train.teacher import give_teacher
from .memory import Rehearsal
from .step import Step

STEPS = 2  # of each stage


def measure_stages(rehearsal: Rehearsal, chosen: list[Stage]) -> list[dict[str, float]]:
    """Of each chosen stage `tokens_per_s` of the second step, and `peak` bytes: of tensors on a GPU, of the process on
    a CPU; `reserved` is what the allocator had taken. The first step compiles kernels."""
    recipe, device = rehearsal.recipe, torch.device("cpu" if on_cpu(rehearsal.recipe) else "cuda")
    passes = sum(STEPS * stage.batch.gradient_accumulation_steps + 1 for stage in recipe.stages if stage in chosen)
    with progress("measuring", 1 + passes) as advance:
        model = meta_model(
            rehearsal.folder, rehearsal.planned, rehearsal.dtype, recipe.model.trust_remote_code, str(device)
        )
        student, found = Student(model, own_teacher=rehearsal.student.own_teacher), []
        if rehearsal.named is not None:
            give_teacher(rehearsal.named, student, str(device))
        advance(1)
        for stage in recipe.stages:
            step = Step(recipe, stage, student, rehearsal.precision, rehearsal.stored_logits)
            step.prepare()
            if stage in chosen:
                step.compile()
                found.append(measure_steps(step, device, advance))
    return found


def measure_steps(step: Step, device: torch.device, advance: Advance = silent) -> dict[str, float]:
    """STEPS optimizer steps of a stage that is prepared, on random tokens and at learning rate 0; `advance` counts
    micro batches, and the evaluation as one.

    A recipe's first steps are small, since its rate warms up. At its full rate the gates of a model that means nothing
    close within a step, and kernels then take the slow way of chunks that decay by more than their range.
    """
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        forget_peak()
    stage = step.stage
    optimizer: Any = make_optimizer(step.student.groups(stage, step.parameters), stage, device, step.recipe.seed)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    seconds = 0.0
    for _ in range(STEPS):
        began = time.perf_counter()
        for _ in range(stage.batch.gradient_accumulation_steps):
            step.micro_batch(step.batch())
            advance(1)
        torch.nn.utils.clip_grad_norm_(step.parameters, stage.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    step.evaluate(step.batch())
    advance(1)
    tokens = stage.batch.blocks * tokens_per_sample(step.recipe.data_for(stage))
    peak = memory_bytes()
    return {
        "tokens_per_s": tokens / seconds,
        "peak": peak,
        "reserved": torch.cuda.max_memory_reserved() if gpu else peak,
    }
