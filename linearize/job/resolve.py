"""`resolve` makes the Job of a recipe: a value that holds what was found out about it, each thing found once.

First from configs alone: the model without weights, the plan of its conversion, its teacher, the device, the cost.
`start.open_base` then refines it with weights, in the run's folder. Whoever has a Job opens neither recipe nor folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import IncompatibleError, LinearizeError, reason_of, resource_error, undamaged
from ..estimate.advice import as_before, choose, is_open, without_auto
from ..estimate.estimate import Cost, estimate
from ..estimate.gpus import Device, card, present
from ..estimate.memory import Counted, Rehearsal
from ..recipe.models import Scratch
from ..recipe.recipe import Recipe
from ..terminal.progress import Advance, progress, silent
from ..train.device import on_cpu
from ..train.runs import Run
from ..train.runtime import Say, check_runtime
from ..train.save import meta_model
from ..train.teacher import Named, find_teacher, meta_teacher
from ..verify.reload import stop_children
from .checks import check_folders_separate, check_stage_name
from .source import Base, base_of_latents, base_path, converted_base, open_source_of, plan_base

# A parameter takes at most so much: float32 weight, gradient and two moments, and the teacher's copy. A model whose
# parameters take less than this share of the memory is not rehearsed before it trains.
BYTES_AT_MOST, SMALL = 20, 0.02


class Job:
    """A recipe and all that belongs to it. `run` is its folder on disk; None for what is only estimated. `gpu` names
    another card than that of this machine. Of a job of latents only the recipe, what was asked with it, the run and the
    base are read (diffusion/finetune.py)."""

    recipe: Recipe

    def __init__(
        self,
        recipe: Any,
        held: contextlib.ExitStack,
        *,
        run: Run | None = None,
        only: str | None = None,
        max_steps: int | None = None,
        gpu: str | None = None,
        say: Say = print,
    ) -> None:
        self.recipe, self.run, self.only, self.max_steps, self.say = recipe, run, only, max_steps, say
        self._held, self._gpu = held, gpu
        self._counted = dict[str, Counted]()  # of stages that were rehearsed, for other recipes
        self._check: Future[str] | None = None  # of the base

    # ------------------------------------------------------------ found once

    @cached_property
    def target(self) -> tuple[Device, str]:
        """The device that a run takes, or the card that was asked for, and accelerate's name of the precision there."""
        precision = self.recipe.runtime.precision
        if self._gpu is None:
            precision_here = check_runtime(self.recipe)
            return present(on_cpu(self.recipe)), precision_here
        return card(self._gpu), {"fp32": "no", "auto": "bf16"}.get(precision, precision)

    @property
    def device(self) -> Device:
        return self.target[0]

    @property
    def trust(self) -> bool:
        """Whether code that came with the model may run."""
        return self.recipe.model.trust_remote_code

    @cached_property
    def base(self) -> Base:
        """What it starts from, of configs alone. Of the Hub it is the commit that the run began with, whatever the
        branch has become."""
        recipe, run = self.recipe, self.run
        if not isinstance(recipe, Recipe):
            return base_of_latents(recipe, run)
        if recipe.convert is None and not recipe.plain:
            local = os.path.isdir(os.path.expanduser(base_path(recipe)))
            commit = None if run is None or run.resume == "never" else run.commit()
            source = converted_base(recipe, commit, weights=run is not None and local)
            return Base(None, source.folder, source)
        folder = self._held.enter_context(open_source_of(recipe, False))
        return Base(None, Path(folder)) if recipe.plain else Base(plan_base(recipe, folder, weights=False), None)

    def refine(self, base: Base) -> None:
        """Take what was found with weights instead."""
        self.base = base
        self._counted = {}
        self.__dict__.pop("model", None)

    @cached_property
    def model(self) -> Any:
        """The model to train, without memory behind its weights. Raises LinearizeError (exit 3) where the code of its
        architecture refuses the folder's config."""
        try:
            return meta_model(self.base.folder, self.base.planned, None, self.trust)
        except Exception as error:  # code of many architectures, which raises as it likes
            if isinstance(error, LinearizeError) or resource_error(error) is not None:
                raise
            found = f"{self.base.folder or self.recipe.name} cannot be loaded"
            why = f"{type(error).__name__}: {reason_of(error)}"
            raise IncompatibleError(f"{found} ({why}). Download or convert it again") from error

    @cached_property
    def teacher(self) -> Named | None:
        """The recipe's own teacher, of configs alone."""
        return find_teacher(self.recipe, self.run.teacher_commit() if self.run else None)

    @cached_property
    def full_teacher(self) -> Named | None:
        """That teacher with its weights, of the commit that was found."""
        return self.teacher and self.teacher.downloaded()

    @cached_property
    def is_small(self) -> bool:
        """Whether its parameters, and its teacher's, are few beside the memory, so that it need not be rehearsed."""
        models = [self.model]
        if self.teacher is not None:
            models.append(meta_teacher(self.teacher))
        count = sum(p.numel() for model in models for p in model.parameters())
        return count * BYTES_AT_MOST < SMALL * self.device.memory

    def meanwhile(self, check: Callable[[], str]) -> None:
        """Check the converted base in a clean process, seconds in which this one loads it; `checked` waits for that."""
        self._check = self._held.enter_context(ThreadPoolExecutor(1)).submit(check)
        self._held.callback(stop_children)

    def checked(self) -> None:
        """Say what the check found. Raises what it raised, and then leaves no base that a start would take for good."""
        if self._check is None:
            return
        try:
            self.say(self._check.result())
        except BaseException:
            assert self.run is not None
            shutil.rmtree(self.run.converted)
            raise

    def rehearse(self, recipe: Recipe | None = None, advance: Advance = silent) -> Rehearsal:
        """Its steps on tensors without memory; or those of another recipe for the same model."""
        device, precision = self.target
        planned, folder, _ = self.base
        gpu = device.kind == "cuda"
        recipe = recipe or self.recipe
        return Rehearsal(recipe, planned, folder, precision, gpu, self.teacher, advance, self._counted)

    def cost(self, rehearsal: Rehearsal) -> Cost:
        """Memory, time and disk of a rehearsal's recipe, on this job's device."""
        return estimate(rehearsal, self.device, self.max_steps)

    # ------------------------------------------------------------ decided once

    def resolve_auto(self) -> None:
        """Choose what the recipe leaves to the device; for a small model as it is given, without a rehearsal."""
        if not is_open(self.recipe):
            return
        if self.device.kind == "cpu" and self.is_small:
            self.recipe = without_auto(self.recipe)
        else:
            # At most: others follow where activations do not fit, and where an optimizer had to become smaller.
            runtime = self.recipe.runtime
            automatic = any(stage.optimizer.memory == "auto" for stage in self.recipe.stages)
            again = runtime.gradient_checkpointing == "auto"
            count = 1 + automatic * (again or runtime.batch == "auto") + 2 * again
            with progress("trying batch and optimizer", count * Rehearsal.parts(self.recipe)) as advance:
                self.recipe = choose(self.recipe, lambda one: self.rehearse(one, advance), self.device, self.say)
        if self.run is not None:
            self.run.recipe = self.recipe


@contextlib.contextmanager
def resolve(
    recipe: Any,
    *,
    resume: str | None = None,
    only: str | None = None,
    max_steps: int | None = None,
    gpu: str | None = None,
    say: Say = print,
) -> Iterator[Job]:
    """The Job of a recipe, which may be one of latents; a random model's config is on the disk while this is open. With
    `resume`, as `finetune` takes it, it goes on with the run in its folder, as that began. Of several processes the
    first one speaks.

    Raises LinearizeError (exit 2) for a stage that there is none of, folders that overlap, and as `Run` does.
    """
    check_stage_name(recipe, only)
    read = {} if isinstance(recipe.model.base, Scratch) else {"model.base": base_path(recipe)}
    if teacher := getattr(recipe, "teacher", None):
        read["teacher.model"] = teacher.model
    check_folders_separate(recipe, read)
    run = None
    if resume is not None:
        recipe = as_resumed(recipe, resume)
        run = Run(recipe, resume, max_steps)
    if int(os.environ.get("RANK", "0")):
        say = say_nothing
    with contextlib.ExitStack() as held:
        yield Job(recipe, held, run=run, only=only, max_steps=max_steps, gpu=gpu, say=say)


def as_resumed(recipe: Recipe, resume: str) -> Recipe:
    """The recipe with all that it leaves to the device as the run that it continues chose it; as it is without one."""
    record = Path(recipe.output_dir) / "run.json"
    if not is_open(recipe) or not record.exists() or resume == "never":
        return recipe
    with undamaged(record, "Restore it, start over with --resume never, or choose a new output_dir"):
        return as_before(recipe, record)


def say_nothing(text: str) -> None:
    """A `say` that is silent."""
