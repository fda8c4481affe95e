"""The optimizer loop of one stage, on accelerate: steps, metrics, evaluation, checkpoints, interruption."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .data import BlockOrder, Blocks
from .errors import Exit, LinearizeError
from .evaluate import collate
from .progress import StageProgress, memory_bytes
from .recipe import AttentionTransfer, Stage
from .runs import Position
from .stages import end_to_end_loss, transfer_loss

if TYPE_CHECKING:
    from .finetune import Finetuner


class StageLoop:
    """The optimizer loop of one stage."""

    def __init__(
        self,
        owner: Finetuner,
        number: int,
        stage: Stage,
        blocks: Blocks,
        steps: int,
        parameters: list[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        schedule: Any,
    ) -> None:
        self.owner, self.number, self.stage, self.blocks, self.steps = owner, number, stage, blocks, steps
        self.parameters, self.schedule = parameters, schedule
        accelerator = owner.accelerator
        accelerator.free_memory()  # forget the optimizer of the stage before
        accelerator.gradient_accumulation_steps = stage.batch.accumulate
        self.order = BlockOrder(len(blocks), owner.recipe.seed)
        self.transfers = isinstance(stage, AttentionTransfer)
        self.wrapped, self.optimizer = owner.model, accelerator.prepare(optimizer)
        # Layer losses of a transfer are backpropagated inside forward, past the hooks of DDP: no wrapper there,
        # gradients are averaged by hand. A single process needs none, and accelerate's would widen the logits.
        if not self.transfers and accelerator.num_processes > 1:
            self.wrapped = accelerator.prepare(owner.model)
        if not self.transfers and owner.recipe.runtime.compile:
            self.wrapped = torch.compile(self.wrapped)
        self._checkpointing(owner.recipe.runtime.gradient_checkpointing and not self.transfers)

    def _checkpointing(self, on: bool) -> None:
        if on:
            self.owner.model.gradient_checkpointing_enable({"use_reentrant": False})
        elif self.owner.model.is_gradient_checkpointing:
            self.owner.model.gradient_checkpointing_disable()

    # ------------------------------------------------------------ the loop

    def run(self, start: int) -> None:
        """Steps `start`..`steps`, with metrics, evaluation and checkpoints on the way."""
        owner, recipe = self.owner, self.owner.recipe
        tokens_per_step = self.blocks.seq_len * owner._blocks_per_step(self.stage)
        began = time.monotonic()
        with StageProgress(self.stage.name, self.steps, start, not owner.accelerator.is_main_process) as bar:
            for step in range(start, self.steps):
                loss, norm, lr = self.step(step)
                done = step + 1
                rate = (done - start) * tokens_per_step / (time.monotonic() - began)
                self._log(done, loss=loss, grad_norm=norm, lr=lr, tokens=done * tokens_per_step, tokens_per_s=round(rate))
                bar.update(done, loss, rate)
                if not math.isfinite(loss):
                    raise self._not_finite(loss, done)
                last = done == self.steps
                if last or recipe.eval.every_steps and done % recipe.eval.every_steps == 0:
                    self._evaluate(done)
                if last or owner.interrupted or done % recipe.checkpoint.every_steps == 0:
                    owner.save(Position(self.number, done, done * tokens_per_step, last), self)
                if owner.interrupted:
                    raise LinearizeError(
                        f"interrupted after step {done} of {self.stage.name}; state saved in {owner.last_checkpoint}. "
                        "The same command continues",
                        Exit.INTERRUPTED,
                    )

    def step(self, step: int) -> tuple[float, float, float]:
        """One optimizer step over all micro batches: mean loss, gradient norm before clipping, learning rate."""
        owner, accelerator = self.owner, self.owner.accelerator
        micro = [self.batch(step, m) for m in range(self.stage.batch.accumulate)]
        counts = torch.stack([torch.stack([b["valid"].sum(), (b["labels"][:, 1:] != -100).sum()]) for b in micro])
        tokens = accelerator.reduce(counts.sum(0), "sum")
        losses = []
        owner.model.train()
        for number, batch in enumerate(micro):
            last = number == len(micro) - 1
            with contextlib.nullcontext() if last or self.transfers else accelerator.no_sync(self.wrapped):
                losses.append(self._micro_batch(batch, tokens))
        if self.transfers:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad = accelerator.reduce(parameter.grad, "mean")
        norm = accelerator.clip_grad_norm_(self.parameters, self.stage.optimizer.clip)
        lr = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            self.schedule.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).sum()
        return float(accelerator.reduce(loss, "mean")), float(norm), lr

    def _micro_batch(self, batch: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """Forward and backward of one micro batch; returns its share of the step's loss, without gradient."""
        owner, accelerator, accumulate = self.owner, self.owner.accelerator, self.stage.batch.accumulate
        if self.transfers:
            with accelerator.autocast():
                return transfer_loss(owner.student, batch, accelerator.backward) / accumulate
        loss = end_to_end_loss(self.stage, owner.student, self.wrapped, batch, tokens, accelerator.autocast)
        # The loss is divided by the tokens of all processes; accelerate and DDP divide again, by both counts.
        accelerator.backward(loss * accumulate * accelerator.num_processes)
        return loss.detach() * accelerator.num_processes

    def batch(self, step: int, micro: int) -> dict[str, Tensor]:
        """The blocks of one micro batch of this process."""
        accelerator, batch = self.owner.accelerator, self.stage.batch
        indices = self.order.batch(
            step, micro, accelerator.process_index, accelerator.num_processes, batch.per_device, batch.accumulate
        )
        return collate([self.blocks[i] for i in indices], self.owner.device)

    # ------------------------------------------------------------ around the loop

    def _evaluate(self, step: int) -> None:
        ppl = self.owner.evaluate(self.stage)
        if ppl is not None:
            tokens = step * self.blocks.seq_len * self.owner._blocks_per_step(self.stage)
            self.owner.log_evaluation(self.stage.name, step, tokens, ppl)

    def _log(self, step: int, **values: Any) -> None:
        if self.owner.accelerator.is_main_process:
            self.owner.run.log(stage=self.stage.name, step=step, **values, memory=memory_bytes())
            self.owner.accelerator.log({f"{self.stage.name}/{k}": v for k, v in values.items()}, step=step)

    def _not_finite(self, loss: float, step: int) -> LinearizeError:
        kept = self.owner.last_checkpoint
        good = f"last good checkpoint {kept}" if kept else "no checkpoint was written yet"
        return LinearizeError(
            f"loss is {loss} at step {step} of {self.stage.name}; {good}. Lower stages[{self.number}].optimizer.lr "
            f"(now {self.stage.optimizer.lr:g}) or use runtime.precision: fp32",
            Exit.CHECK_FAILED,
        )

    def state(self) -> dict[str, Any]:
        """Optimizer, schedule, random numbers and loss scale, for a checkpoint."""
        scaler = self.owner.accelerator.scaler
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.owner.device.type == "cuda" else None,
            "scaler": scaler.state_dict() if scaler is not None else None,
        }

    def restore(self, checkpoint: Path) -> None:
        """The inverse of `state`."""
        state = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and self.owner.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"])
        if state["scaler"] is not None and self.owner.accelerator.scaler is not None:
            self.owner.accelerator.scaler.load_state_dict(state["scaler"])
