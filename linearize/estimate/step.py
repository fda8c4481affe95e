"""One optimizer step of a stage on made-up data, by the code that trains: to count it, or to measure it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linearize_kernels.hf.attention_hooks import evaluating

from ..bench.timing import device_ms, wait
from ..data.batches import Batch, tokens_per_sample
from ..data.kinds import has_head, kind_of
from ..measure.evaluate import sums_of
from ..recipe.recipe import AttentionTransfer, FeatureCosine, Recipe, Stage
from ..terminal.progress import Advance, progress, silent
from ..train.compiled import CompiledLayers, compiles
from ..train.device import on_cpu
from ..train.graphs import PLAIN_STEPS, GraphedSteps, unrecordable
from ..train.loop import set_checkpointing, set_training
from ..train.offload import Host, offloaded
from ..train.progress import forget_peak, memory_bytes
from ..train.runtime import caches_casts, clip, make_optimizer, stage_steps
from ..train.save import meta_model
from ..train.speed import Products, shares
from ..train.stages import end_to_end_loss, transfer_loss
from ..train.student import Student
from ..train.teacher import give_teacher
from ..verify.child.inputs import make_inputs

if TYPE_CHECKING:
    from .memory import Rehearsal


class Step:
    """Micro batches of one stage for a model whose weights mean nothing.

    `precision` is accelerate's name of it.
    `prepare` comes before everything else. `host` is where activations wait that the recipe offloads.
    """

    def __init__(self, recipe: Recipe, stage: Stage, student: Student, precision: str) -> None:
        self.recipe, self.stage, self.student = recipe, stage, student
        self.precision = precision
        self.transfers = isinstance(stage, AttentionTransfer)
        self.host: Host | None = None
        self.compiled: Callable[[], Any] = contextlib.nullcontext
        self.parameters: list[torch.nn.Parameter] = []

    @property
    def wide(self) -> bool:
        return self.precision != "no"

    def prepare(self) -> None:
        """What the stage trains, as `Finetuner.prepare` does."""
        self.parameters = self.student.prepare(self.stage, wide=self.wide)
        set_checkpointing(self.student.model, not self.transfers and self.recipe.runtime.gradient_checkpointing)

    def compile(self) -> None:
        """Compile what a run of the recipe would, which takes a device and time; what is only counted is as in
        Python."""
        model, blocks = self.student.model, self.stage.batch.blocks
        length = self.recipe.data_for(self.stage).pack.seq_len
        tokens = (stage_steps(self.stage, blocks, length, None) or 0) * blocks * length
        if compiles(self.recipe, self.stage, model, next(model.parameters()).device, False, tokens):
            self.compiled = CompiledLayers(self.student.model).on

    def batch(self, documents: int = 1) -> Batch:
        """One micro batch of the recipe's size on the model's device: random tokens, all of which count, in so many
        documents a row, or black images."""
        model, rows = self.student.model, self.stage.batch.per_device
        device = next(model.parameters()).device
        kind, length = kind_of(model), self.recipe.data_for(self.stage).pack.seq_len
        if kind == "images":
            pixels = make_inputs(model, rows)["pixel_values"]
            inputs = {"pixel_values": torch.zeros(pixels.shape)}
            length = 1
        else:
            inputs = {"input_ids": torch.randint(model.config.get_text_config().vocab_size, (rows, length))}
            place = (torch.arange(length) % -(-length // documents)).expand(rows, -1)
            inputs |= {"position_ids": place} if kind == "text" else {"attention_mask": torch.ones_like(place)}
        made = {"labels": torch.zeros(rows, length, dtype=torch.long), "valid": torch.ones(rows, length).bool()}
        return {name: value.to(device) for name, value in (inputs | made).items()}

    def autocast(self, device: torch.device) -> Callable[[], Any]:
        if not self.wide:
            return contextlib.nullcontext
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        kept = caches_casts(self.recipe, zero=False)
        return lambda: torch.autocast(device.type, dtype, cache_enabled=kept)

    def micro_batch(
        self,
        batch: Batch,
        before_backward: Callable[[], None] = lambda: None,
        after_backward: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Forward and backward, as `StageLoop._micro_batch`; returns the loss. `before_backward` is called when a
        forward pass is over, of a transfer after that of each layer's mixer, `after_backward` when the backward pass
        is."""
        model, device = self.student.model, batch["labels"].device
        autocast = self.autocast(device)
        set_training(model, dropout=not isinstance(self.stage, FeatureCosine))
        tokens = torch.ones(3, device=device)

        def backward(loss: Tensor) -> None:
            before_backward()
            loss.backward()
            after_backward()

        if self.transfers:
            layers = [module.mixer.site.layer for module in model.modules() if hasattr(module, "mixer")]
            power = {layer: torch.ones((), device=device) for layer in layers}
            with autocast():
                return transfer_loss(self.student, batch, tokens[0], power, backward)
        saving: Callable[[], Any] = contextlib.nullcontext
        if self.recipe.runtime.offload_activations:
            saving = partial(offloaded, self.host or Host(model))
        with self.compiled():
            loss = end_to_end_loss(self.stage, self.student, batch, tokens, autocast, saving)[0]
            backward(loss)
        return loss.detach()

    def evaluate(self, batch: Batch) -> None:
        """What an evaluation does with a batch, as `measure.evaluate.score`."""
        model, student = self.student.model, self.student if self.student.has_teacher else None
        if not has_head(model):
            return
        with evaluating(model):
            sums_of(model, batch, self.autocast(batch["labels"].device), student)


# ---------------------------------------------------------------- measured


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
