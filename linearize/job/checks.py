"""Every question that is asked before a job starts, in one file. Each raises LinearizeError before anything is written.

`check_fit` calls `check_model` (train/session.py) and `check_teacher` (train/teacher.py), which ask what is theirs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.atomic import separate
from ..data.augment import augmentation
from ..data.batches import check_there, source_hash
from ..data.documents import TextSource, check_rows, no_datasets
from ..demo import named_base
from ..errors import LinearizeError, ResourceError, did_you_mean, existing_folder
from ..estimate.advice import advise
from ..estimate.estimate import refusal, sharded
from ..estimate.memory import Rehearsal
from ..recipe.data import DatasetSource, TeacherSource, holds_images, parts_of
from ..recipe.recipe import Recipe
from ..terminal.output import size
from ..terminal.progress import progress
from ..train.runs import Position, Run, read_position
from ..train.runtime import prompts_of, to_source
from ..train.session import check_graphs, check_model
from ..train.teacher import check_teacher

if TYPE_CHECKING:
    from .resolve import Job


def check_fit(job: Job, model: Any) -> None:
    """Refuse stages, a teacher or data that do not fit the job's `model`, which has no weights."""
    check_model(model, job.recipe)
    check_teacher(job.teacher, job.recipe, model)


def check_fit_here(job: Job) -> None:
    """`check_fit` of its own model, and refuse steps that its device cannot record."""
    check_fit(job, job.model)
    check_graphs(job.recipe, torch.device(job.device.kind), sharded(), job.model)


def check_before_start(job: Job) -> None:
    """All that can be refused of a job before its folder is opened."""
    check_fit_here(job)
    check_resources(job)
    check_text(job.recipe)


def check_stage_name(recipe: Recipe, only: str | None) -> None:
    """Raise LinearizeError (exit 2) unless `only` is the name of a stage, or None."""
    names = [stage.name for stage in recipe.stages]
    if only is not None and only not in names:
        raise LinearizeError(f"--stage {only}: the recipe has {', '.join(names)}.{did_you_mean(only, names)}")


def check_stage_order(recipe: Recipe, run: Run, only: str | None) -> None:
    """Raise LinearizeError (exit 2) where a stage before `only` is not finished in the run."""
    position = read_position(run.resume_from) if run.resume_from else Position(-1, 0, 0, True)
    names = [stage.name for stage in recipe.stages]
    first = position.stage + position.done
    if only is not None and names.index(only) > first:
        raise LinearizeError(
            f"--stage {only} needs {names[first]}, which is not finished in {run.folder}. Run --stage {names[first]} "
            "first, or all without --stage"
        )


def check_folders_separate(recipe: Any, read: dict[str, str]) -> None:
    """Raise LinearizeError (exit 2) for a run in the folder of its base or teacher, or around it: it replaces files.
    The recipe may be one of latents. `read` has base and teacher by their keys, where they have a name."""
    for key, name in read.items():
        folder = Path(os.path.expanduser(named_base(name)))
        if name and folder.is_dir() and not separate(folder, Path(recipe.output_dir)):
            raise LinearizeError(
                f"output_dir {recipe.output_dir} and {key} {folder} must be separate folders: neither inside the "
                "other. Set output_dir to another folder"
            )


def check_packages(recipe: Recipe) -> None:
    """Raise LinearizeError (exit 4) where the recipe's data need a package that is not installed."""
    for stage in recipe.stages:
        data = recipe.data_for(stage)
        augmentation(data.augment)
        for source in (*(part for part, _ in parts_of(data.train)), data.eval):
            if isinstance(source, DatasetSource) and importlib.util.find_spec("datasets") is None:
                raise no_datasets(source.path)


def check_text(recipe: Recipe, check: Callable[..., None] = check_rows) -> None:
    """Before anything is written: raise LinearizeError for text of the recipe that training could not read, by its file
    and line; `check` reads a source."""
    seen = set[tuple[TextSource, bool]]()
    for stage in recipe.stages:
        data = recipe.data_for(stage)
        for source in (*(part for part, _ in parts_of(data.train)), data.eval):
            if source is None or holds_images(source):
                continue
            check_there(source, recipe.folder)
            own = isinstance(source, TeacherSource)
            sft = stage.answers_alone and not own  # the teacher answers prompts
            text = (prompts_of if own else to_source)(source, data.pack.text_key, recipe.folder)
            if text is not None and (text, sft) not in seen:
                check(text, sft=sft)
                seen.add((text, sft))


def check_resources(job: Job) -> None:
    """Refuse (exit 4) a job that does not fit the device's memory or the disk. A small model is let through: to
    rehearse its stages takes seconds."""
    if job.is_small:
        return
    with progress("estimate", Rehearsal.parts(job.recipe)) as advance:
        rehearsal = job.rehearse(advance=advance)
        cost = job.cost(rehearsal)
    if cost.too_large:
        raise refusal(cost, advise(rehearsal, job.device, cost))
    parent = existing_folder(Path(job.recipe.output_dir))
    need, free = sum(cost.disk.values()), shutil.disk_usage(parent).free
    if need > free:
        parts = ", ".join(f"{part} {size(count)}" for part, count in cost.disk.items())
        raise ResourceError(
            f"the run needs {size(need)} in {parent} ({parts}), {size(free)} free. Make room, choose another "
            "output_dir, or set checkpoint.save_total_limit=1"
        )


def data_hashes(recipe: Recipe) -> dict[str, str]:
    """`source_hash` of each source of a recipe, by its name there."""
    found = dict[str, str]()
    for stage in recipe.stages:
        for name, source in recipe.sources_of(stage).items():
            found[name] = found.get(name) or source_hash(source, recipe.folder)
    return found
