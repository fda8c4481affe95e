"""The stages of a diffusion transformer: attention transfer per block, then the teacher's predictions.

The teacher is the model under `teacher()`, on the same weights; a stage that trains all weights has a copy of it.
Latents, noise and their order are functions of the step, so that a run goes on anywhere. Gradients of several processes
are averaged by hand.
"""

from __future__ import annotations

import copy
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckFailedError, Exit, LinearizeError
from ..terminal.output import say
from ..terminal.progress import progress, silent
from ..terminal.signals import END, caught, end_or_stop
from ..train.loop import seed_for
from ..train.runs import OPTIMIZER, WEIGHTS, Position, Run, read_position, reading
from ..train.runtime import make_optimizer, make_schedule
from .latents import Opened, inputs_of
from .recipe import DiffusionRecipe, DiffusionStage


def relative(ours: Tensor, theirs: Tensor) -> Tensor:
    """|ours - theirs|^2 / |theirs|^2 of each latent [B,..], in float32: their mean, a scalar.

    Outputs at one noise level may be many times as large as at another, and each level counts the same in `eval`.
    """
    ours, theirs = (x.float().flatten(1) for x in (ours, theirs.detach()))
    return ((ours - theirs).square().sum(1) / theirs.square().sum(1).clamp_min(1e-12)).mean()


class Distiller:
    """A model, its teacher, data and noise."""

    def __init__(self, recipe: DiffusionRecipe, opened: Opened, accelerator: Accelerator) -> None:
        self.recipe, self.accelerator = recipe, accelerator
        model, self.noise, self.data, self.held, self.decode = opened
        self.interrupted = False  # by a signal, in this process
        self.model = model.to(accelerator.device).eval().requires_grad_(False)
        everything = any(stage.train == "all" for stage in recipe.stages)
        # Copied before anything trains.
        self.source = copy.deepcopy(self.model) if everything else self.model
        self.processors = [module for module in self.model.modules() if type(module).__name__ == "Processor"]

    def predict(self, inputs: dict[str, Any]) -> Tensor:
        """What the student predicts."""
        with self.accelerator.autocast():
            predicted: Tensor = self.model(**inputs).sample
        return predicted

    @torch.no_grad()
    def target(self, inputs: dict[str, Any]) -> Tensor:
        """What the teacher predicts."""
        with self.accelerator.autocast(), self.source.teacher():
            predicted: Tensor = self.source(**inputs).sample
        return predicted

    def batch(self, stage: int, step: int, part: int) -> dict[str, Any]:
        """Noised latents of one pass of a step in this process."""
        process = self.accelerator.process_index
        generator = torch.Generator().manual_seed(seed_for(self.recipe.seed, stage, step, part, process))
        count = self.recipe.stages[stage].batch.per_device
        rows = torch.randint(len(self.data.latents), (count,), generator=generator).tolist()
        latents, prompts = self.data.batch(rows, self.accelerator.device)
        noise = torch.randn(latents.shape, generator=generator).to(latents.device)
        level = torch.rand(count, generator=generator).to(latents.device)
        noised, time = self.noise.at(latents, noise, level)
        return inputs_of(self.model, noised, time, prompts)

    def transfer(self, inputs: dict[str, Any], share: float) -> float:
        """Each attention module's output against its teacher's on the same input, with the backward pass."""
        seen: list[tuple[Any, Any, Any, Tensor]] = []
        hooks = [
            processor.register_forward_hook(lambda m, a, k, o: seen.append((m, a, k, o)), with_kwargs=True)
            for processor in self.processors
        ]
        try:
            with torch.no_grad(), self.accelerator.autocast(), self.model.teacher():
                self.model(**inputs)
        finally:
            for hook in hooks:
                hook.remove()
        total = 0.0
        for processor, args, kwargs, output in seen:
            with self.accelerator.autocast():
                loss = relative(processor(*args, **kwargs), output)
            if loss.requires_grad:  # a mechanism may have nothing to learn
                (share * loss).backward()
            total += float(loss.detach()) / len(seen)
        return share * total

    def match(self, inputs: dict[str, Any], share: float) -> float:
        """The model's prediction against its teacher's, with the backward pass."""
        loss = share * relative(self.predict(inputs), self.target(inputs))
        loss.backward()
        return float(loss.detach())

    # ------------------------------------------------------------ a stage

    def trained(self, stage: DiffusionStage) -> dict[str, torch.nn.Parameter]:
        """The parameters that a stage trains, by name."""
        named = self.model.named_parameters()
        return {name: value for name, value in named if stage.train == "all" or ".mixer." in name}

    def run(self, number: int, run: Run, start: int) -> None:
        """Steps `start`.. of a stage, with checkpoints in its run."""
        stage, accelerator = self.recipe.stages[number], self.accelerator
        parameters = self.trained(stage)
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        settings = stage.optimizer
        new = [p for name, p in parameters.items() if ".mixer." in name]
        old = [p for name, p in parameters.items() if ".mixer." not in name]
        groups = [{"params": new, "lr": settings.new_lr or settings.lr}, {"params": old, "lr": settings.lr}]
        asked: Any = stage  # which has what is read of any stage
        optimizer = make_optimizer([group for group in groups if group["params"]], asked, accelerator.device)
        rates, factor = [group["lr"] for group in optimizer.param_groups], make_schedule(asked, stage.steps)
        if start and run.resume_from is not None:
            with reading(path := run.resume_from / OPTIMIZER):
                optimizer.load_state_dict(torch.load(path, map_location=accelerator.device, weights_only=True))
        loss_of = self.transfer if stage.kind == "attention_transfer" else self.match
        share = 1 / stage.batch.gradient_accumulation_steps
        shown = progress(stage.name, stage.steps - start) if accelerator.is_main_process else nullcontext(silent)
        with caught((*END, signal.SIGINT), self.interrupt), shown as advance:
            for step in range(start, stage.steps):
                loss = sum(
                    loss_of(self.batch(number, step, part), share)
                    for part in range(stage.batch.gradient_accumulation_steps)
                )
                stopping = self.interrupted
                if accelerator.num_processes > 1:
                    # All stop after the same step, whichever was told first.
                    told = torch.tensor(float(stopping), device=accelerator.device)
                    stopping = bool(accelerator.reduce(told, "sum") > 0)
                    for parameter in parameters.values():
                        if parameter.grad is not None:
                            parameter.grad = accelerator.reduce(parameter.grad, "mean")
                norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), settings.max_grad_norm))
                if not torch.isfinite(torch.tensor([loss, norm])).all():
                    message = f"{stage.name}: the loss or its gradient is not finite at step {step + 1}. Lower the lr"
                    raise CheckFailedError(message)
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor(step)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                done = step + 1
                position = Position(number, done, done * self.latents_of(stage), done == stage.steps)
                if accelerator.is_main_process:
                    run.log(stage=stage.name, step=done, tokens=position.tokens, loss=loss, grad_norm=norm)
                advance(1)
                if position.done or stopping or done % self.recipe.checkpoint.every_steps == 0:
                    self.save(run, position, optimizer)
                if stopping:
                    message = f"interrupted after step {done} of {stage.name}. The same command continues"
                    raise LinearizeError(message, Exit.INTERRUPTED)
        for parameter in parameters.values():
            parameter.requires_grad_(False)

    def interrupt(self, number: int) -> None:
        """A signal ends the run after this step, or at once."""
        end_or_stop(self.interrupted, number, say)
        self.interrupted = True

    def weights(self) -> dict[str, Tensor]:
        """The values, on the CPU, of all that the recipe's stages train."""
        names = {name for stage in self.recipe.stages for name in self.trained(stage)}
        return {name: p.detach().cpu().contiguous() for name, p in self.model.named_parameters() if name in names}

    def latents_of(self, stage: DiffusionStage) -> int:
        """Latents of an optimizer step in all processes."""
        return stage.batch.blocks * self.accelerator.num_processes

    def save(self, run: Run, position: Position, optimizer: torch.optim.Optimizer) -> None:
        """A checkpoint: where the run is, all that it has trained, and within a stage its optimizer."""
        if not self.accelerator.is_main_process:
            return
        weights = self.weights()

        def write(folder: Path) -> None:
            save_file(weights, folder / WEIGHTS)
            if not position.done:
                torch.save(optimizer.state_dict(), folder / OPTIMIZER)

        run.save(position, write)

    def restore(self, run: Run) -> Position:
        """How far the run is that goes on, whose weights are taken."""
        if run.resume_from is None:
            return Position(0, 0, 0, False)
        with reading(run.resume_from / WEIGHTS):
            self.model.load_state_dict(load_file(run.resume_from / WEIGHTS), strict=False)
        return read_position(run.resume_from)
