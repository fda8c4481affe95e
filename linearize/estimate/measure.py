"""`linearize estimate --measure` and `bench train`: real steps of each stage on this device, on random weights."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from ..bench.timing import device_ms, wait
from ..data.batches import tokens_per_sample
from ..data.kinds import kind_of
from ..recipe.recipe import AttentionTransfer, Stage
from ..terminal.progress import Advance, progress, silent
from ..train.device import on_cpu
from ..train.graphs import PLAIN_STEPS, GraphedSteps, unrecordable
from ..train.progress import forget_peak, memory_bytes
from ..train.runtime import clip, make_optimizer
from ..train.save import meta_model
from ..train.speed import Products, shares
from ..train.student import Student
from ..train.teacher import give_teacher
from .memory import Rehearsal
from .step import Step

STEPS = 2  # of each stage; before them those in which a graph is recorded and compared
DOCUMENTS = 8  # of a row: softmax of a row that holds one takes other kernels than most of packed text


def measure_stages(rehearsal: Rehearsal, chosen: list[Stage], softmax: bool = False) -> list[dict[str, Any]]:
    """Each chosen stage as `measure_steps` measures it. With `softmax` each, but a transfer, is also measured with a
    student that keeps its softmax, under the key `softmax`."""
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
            step = Step(recipe, stage, student, rehearsal.precision)
            step.prepare()
            if stage in chosen:
                step.compile()
                one = measure_steps(step, device, advance)
                if softmax and not isinstance(stage, AttentionTransfer) and hasattr(model, "teacher"):
                    with model.teacher():
                        one["softmax"] = measure_steps(step, device)
                found.append(one)
    return found


def measure_steps(step: Step, device: torch.device, advance: Advance = silent) -> dict[str, Any]:
    """Optimizer steps of a stage that is prepared, on random tokens and at learning rate 0, and an evaluation;
    `advance` counts micro batches, and the evaluation as one.

    `tokens_per_s` is that of the last step, for the first ones compile kernels and record graphs, `peak` are bytes: of
    tensors on a GPU, of the process on a CPU; `reserved` is what the allocator had taken. On a GPU also
    `device_waits`, the share of a step in which it has nothing to do, `products`, the share of the card's dense bf16
    products that a step reaches, both None where they are not known, and `graphs`, whether micro batches were recorded.

    A recipe's first steps are small, since its rate warms up. At its full rate the gates of a model that means nothing
    close within a step, and kernels then take the slow way of chunks that decay by more than their range.
    """
    gpu, stage, micro = device.type == "cuda", step.stage, step.stage.batch.gradient_accumulation_steps
    if gpu:
        torch.cuda.empty_cache()
        forget_peak()
    optimizer: Any = make_optimizer(step.student.groups(stage, step.parameters), stage, device, step.recipe.seed)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    kind = kind_of(step.student.model)
    batches = [step.batch(DOCUMENTS if gpu else 1) for _ in range(micro)]
    tokens, said = torch.ones(3, device=device), list[str]()
    run: Any = lambda batch, tokens: (step.micro_batch(batch), {})  # noqa: E731
    graphed = None
    if step.recipe.runtime.graphs and not unrecordable(step.recipe, stage, device, False, kind):
        run = graphed = GraphedSteps(run, step.parameters, micro, said.append)

    def one_step(advance: Advance = silent) -> None:
        for batch in batches:
            run(batch, tokens)
            advance(1)
        clip(step.parameters, stage.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=graphed is None)

    counted = Products()
    compiled, step.compiled = step.compiled, contextlib.nullcontext  # compiled layers show no products
    with counted if gpu else contextlib.nullcontext():
        one_step(advance)
    step.compiled = compiled
    for _ in range(PLAIN_STEPS + 1 if graphed else int(compiled is not contextlib.nullcontext)):
        one_step()
    wait()
    began = time.perf_counter()
    one_step(advance)
    wait()
    seconds = time.perf_counter() - began
    found: dict[str, Any] = {
        "tokens_per_s": stage.batch.blocks * tokens_per_sample(step.recipe.data_for(stage)) / seconds
    }
    if gpu:
        found["products"], found["device_waits"] = shares(seconds, counted.flops, device_ms(one_step))
        found["graphs"], found["note"] = graphed is not None and graphed.checked, said[0] if said else None
    if graphed is not None:
        graphed.close()
    optimizer.zero_grad()
    step.evaluate(batches[0])
    advance(1)
    peak = memory_bytes()
    return found | {"peak": peak, "reserved": torch.cuda.max_memory_reserved() if gpu else peak}
