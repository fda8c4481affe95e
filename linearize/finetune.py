"""Finetune, the story on one screen: resolve the recipe, train its stages, save, reload, verify.

Read `finetune` first; job/resolve.py finds and job/checks.py checks what is needed, job/start.py converts, session.py
holds the process that trains, loop.py one stage, runs.py the folder on disk. What trains on latents is resolved here as
well, and carried out by `train` of diffusion/finetune.py.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

import torch

from .checkpoint.atomic import write_result
from .checkpoint.manifest import read_plan
from .checkpoint.provenance import check_code_cache
from .diffusion.finetune import train as train_on_latents
from .diffusion.recipe import DiffusionRecipe
from .errors import Exit, LinearizeError, ResourceError, os_error, quoted
from .hub.push import check_access, push_saved
from .job.checks import check_stage_order
from .job.notes import not_held_out, resume_note
from .job.resolve import Job, resolve
from .job.start import open_base, run_of
from .measure.evaluate import note_farther
from .measure.positions import warning_of
from .page.record import read_run
from .page.report import PAGE, card_pictures, report_page
from .recipe.recipe import Recipe
from .train.device import device_name
from .train.runs import read_position
from .train.runtime import Say, hyperparameters, make_accelerator
from .train.save import save_final, save_plain
from .train.session import Finetuner


def finetune(
    recipe: Recipe | DiffusionRecipe,
    *,
    resume: str = "auto",
    only: str | None = None,
    max_steps: int | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Run a recipe; returns the report: `output`, `max_steps`, `teacher_ppl`, `stages`, .. (also in report.json); of a
    recipe of latents `predictions` before and after by noise level.

    `output` is None when `only` left later stages to do. Raises LinearizeError: 2 for the recipe, 3 for what does
    not fit, 4 for resources, 5 for the Hub, 6 for NaN or a failed verification, 130 when interrupted (state saved).
    """
    with resolve(recipe, resume=resume, only=only, max_steps=max_steps, say=say) as job:
        check_code_cache()  # before minutes are spent on choosing layers
        run = run_of(job)
        if run.finished:
            job.say(f"{run.final} is finished already; `--resume never` would start over")
            return run.read_report()
        check_stage_order(job.recipe, run, only)
        job.say = run.noted(job.say)
        job.resolve_auto()
        return train(job) if isinstance(recipe, Recipe) else train_on_latents(job)


def train(job: Job) -> dict[str, Any]:
    """Carry a job out: start or go on with its run, train, save. Returns the report, as `finetune`."""
    recipe, run, say = job.recipe, run_of(job), job.say
    tuner = Finetuner(recipe, run, make_accelerator(recipe, run.folder), say)
    accelerator = tuner.accelerator
    for note in not_held_out(recipe):
        tuner.say(note)
    if run.resume_from is not None:
        tuner.say(resume_note(recipe, run, read_position(run.resume_from)))
    if recipe.finish.push is not None and accelerator.is_main_process:
        check_access(recipe.finish.push)
    with memory_errors(tuner), contextlib.closing(run):
        with run.preparing(accelerator.is_main_process):
            with accelerator.main_process_first():
                base, named = open_base(job, accelerator.is_main_process), job.full_teacher
            tuner.load(base, named)
            job.checked()
        accelerator.init_trackers(recipe.name, config=hyperparameters(recipe))
        complete = tuner.train(job.only)
        report = finish(tuner, complete, say)
        accelerator.wait_for_everyone()
        accelerator.end_training()
    return report


def finish(tuner: Finetuner, complete: bool, say: Say) -> dict[str, Any]:
    """Measure what was trained and, where the run is `complete`, save it with its page. Returns the report."""
    recipe, run, accelerator = tuner.recipe, tuner.run, tuner.accelerator
    if complete:
        tuner.take_best()
    layers = tuner.fidelity() if complete else []
    positions = tuner.positions() if complete and accelerator.is_main_process else None
    report = run.report(layers, complete, positions)
    if not complete or not accelerator.is_main_process:
        return report
    report |= {"samples": tuner.samples(), "device": device_name(accelerator.device)}
    report["teacher"] = run.teacher()
    if positions and (message := warning_of(positions)):
        say(message)
    if recipe.stages[-1].weights.keys() == {"kl"} and (note := note_farther(report["stages"])):
        say(note)
    run.write_report(report)
    with failed_check(tuner):
        save(tuner, report, say)
    run.finish()
    write_result(run.folder / PAGE, report_page(read_run(run.folder)))
    say(f"wrote {run.folder / PAGE}: open it in a browser")
    if recipe.finish.push is not None:
        report["pushed"] = push_saved(run.final, recipe.finish.push, recipe.model.trust_remote_code, say)
    return report


def save(tuner: Finetuner, report: dict[str, Any], say: Say) -> None:
    """Write the finished model of a run into its folder `final`."""
    recipe, run, student = tuner.recipe, tuner.run, tuner.whole_student
    record = read_run(run.folder, plan=None if recipe.plain else read_plan(tuner.base))
    report = report | {"notes": record.notes}
    if recipe.plain:
        save_plain(student(), tuner.base, run.final, recipe, report, say, run.plain_files())
        return
    save_final(student(), tuner.base, run.final, recipe, report, say, card_pictures(record), run.plain_files())


@contextlib.contextmanager
def memory_errors(tuner: Finetuner) -> Iterator[None]:
    """Within: running out of memory, of the machine or of a device, becomes advice (exit 4)."""
    try:
        yield
    except Exception as error:
        refused = os_error(error)
        if refused is None or refused.errno != errno.ENOMEM:
            raise
        what = "out of memory"
        if isinstance(error, torch.cuda.OutOfMemoryError):
            peak, total = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.mem_get_info()[1] / 2**30
            what = f"CUDA out of memory (peak {peak:.1f} of {total:.1f} GiB)"
        raise ResourceError(
            f"{what}. Try, cheapest first: runtime.gradient_checkpointing=true; batch.per_device=1 with a larger "
            f"batch.gradient_accumulation_steps; a smaller data.pack.seq_len (now {tuner.recipe.data.pack.seq_len}); "
            f"train: [new, lora]. Last checkpoint: {tuner.last_checkpoint or 'none'}"
        ) from error


@contextlib.contextmanager
def failed_check(tuner: Finetuner) -> Iterator[None]:
    """Within: a finished model that fails a check is not lost, and the error says where it is."""
    try:
        yield
    except LinearizeError as error:
        if error.code != Exit.CHECK_FAILED:
            raise
        then = f"--resume {quoted(tuner.last_checkpoint)} with finish.verify=false saves the model all the same"
        raise LinearizeError(f"{error.message}. The training is kept: {then}", error.code) from error
