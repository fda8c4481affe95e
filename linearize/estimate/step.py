"""One optimizer step of a stage on made-up data, by the code that trains: to count it, or to measure it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linearize_kernels.hf.attention_hooks import evaluating

from ..data.batches import Batch
from ..data.kinds import has_head, kind_of
from ..measure.evaluate import sums_of
from ..recipe.recipe import AttentionTransfer, FeatureCosine, Recipe, Stage
from ..train.compiled import CompiledLayers, compiles
from ..train.loop import set_checkpointing, set_training
from ..train.offload import Host, offloaded
from ..train.runtime import caches_casts, stage_steps
from ..train.stages import end_to_end_loss, transfer_loss
from ..train.student import Student
from ..verify.child.inputs import make_inputs


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
        set_checkpointing(self.student.model, self.recipe.runtime.gradient_checkpointing and not self.transfers)

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
