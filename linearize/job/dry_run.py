"""`linearize finetune --dry-run` and `linearize estimate`: what a job would do and cost, from configs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..checkpoint.manifest import plan_in
from ..checkpoint.provenance import trained_before
from ..convert import slower
from ..data.documents import check_first_rows
from ..diffusion.finetune import dry_run as latents_dry_run
from ..diffusion.recipe import DiffusionRecipe
from ..errors import LinearizeError
from ..estimate.advice import advise
from ..estimate.break_even import speeds
from ..estimate.estimate import refusal, sharded
from ..estimate.memory import Rehearsal
from ..estimate.step import measure_stages
from ..plan.plan import Plan
from ..recipe.recipe import Recipe
from ..terminal.output import counted, size
from ..terminal.progress import progress
from ..terminal.tables import chosen_options
from ..train.runs import processes
from ..train.runtime import Say, check_divided
from ..train.session import check_graphs, stage_notes
from ..train.teacher import teacher_line
from .checks import check_fit, check_packages, check_text
from .notes import data_summary, loading_dtype_note, not_held_out, note_of_run, say_rounding, unreachable_data_note
from .resolve import resolve
from .source import base_path


def dry_run(
    recipe: Recipe | DiffusionRecipe,
    say: Say,
    max_steps: int | None = None,
    only: str | None = None,
    *,
    resume: str | None = None,
    gpu: str | None = None,
    price: float | None = None,
    measure: bool = False,
) -> dict[str, Any]:
    """What each stage, or `only` the one of that name, would do and cost, from configs alone, on the device here or on
    the card named `gpu`; `price` is that of a device for an hour. With `measure` each stage takes two steps here.

    With `resume`, as `finetune` takes it, the first row of each local file of text is read, and `say` gets what a real
    run would do with the run in its folder. An estimate has none: it may be for another machine.

    `stages` have parameters, steps, tokens, memory, time; beside them `device`, `hours`, `kwh`, `price` and `disk`.
    """
    if measure and gpu is not None:
        raise LinearizeError("--measure runs on the device that is here: leave out --gpu")
    with resolve(recipe, only=only, max_steps=max_steps, gpu=gpu, say=say) as job:
        if not isinstance(recipe, Recipe):
            return latents_dry_run(job, resume or "never")
        if resume is not None and (note := note_of_run(recipe, resume, only, max_steps)):
            say(note)
        device = job.device
        check_packages(recipe)
        with progress("estimate", Rehearsal.PLANNED + Rehearsal.parts(recipe)) as advance:
            planned, folder, _ = job.base
            advance(Rehearsal.PLANNED)
            job.resolve_auto()
            recipe = job.recipe
            if sharded():
                check_divided(recipe, zero=sharded("DEEPSPEED"))
            rehearsal = job.rehearse(advance=advance)
            check_fit(job, rehearsal.model)
            try:
                check_graphs(recipe, torch.device(device.kind), sharded(), rehearsal.model)
            except LinearizeError as error:
                say(f"note: a real run is refused: {error.message}")
            if resume is not None:
                check_text(recipe, check_first_rows)
                if note := unreachable_data_note(recipe):
                    say(note)
            named = job.teacher
            if folder is not None and (note := trained_before(folder, named.name if named else None)):
                say(note)
            cost = job.cost(rehearsal)
            cost.stages = [one for one in cost.stages if only in (None, one.stage.name)]
            samples = [(one.stage, one.stage.batch.blocks * processes()) for one in cost.stages]
            at: Any = planned[1].folder if planned is not None else folder
            for note in (*stage_notes(rehearsal.model, recipe, samples, at), *not_held_out(recipe)):
                say(note)
            if planned is not None:
                if note := slower(*planned):
                    say(note)
                for line in speeds(planned[0]):
                    say(line)
                say_plan(planned[0], say)
            elif folder is not None and not recipe.plain:
                say(f"{Path(base_path(recipe)).name}: {plan_in(folder).attention}")
                if note := loading_dtype_note(recipe, rehearsal):
                    say(note)
            if named is not None:
                say(teacher_line(named, rehearsal.student.other))
            if cost.too_large:
                say(f"note: {refusal(cost, advise(rehearsal, device, cost)).message}")
            measured = measure_stages(rehearsal, [one.stage for one in cost.stages]) if measure else []
            for one, found in zip(cost.stages, measured, strict=measure):
                one.hours = None if one.tokens is None else one.tokens / found["tokens_per_s"] / 3600
            rows = [one.row(device) | {"data": data_summary(recipe, one)} for one in cost.stages]
            for row, found in zip(rows, measured, strict=measure):
                row["measured"] = found
            return {"stages": rows, **cost.summary(price)}


def say_plan(plan: Plan, say: Say) -> None:
    """Say what a conversion would make of which layers, and what it costs while decoding."""
    step, memory = plan.linear[0], plan.cache_bytes(32768)
    say(f"{plan.source}: {counted(len(plan.linear), 'layer')} become {step.mechanism}, {chosen_options(step)}")
    said = f"{plan.new_parameters:,} new parameters"
    if memory["source"]:
        held = f"{size(memory['converted'])} while decoding, {size(memory['source'])} before"
        said += f"; a sequence of 32,768 tokens holds, in {plan.dtype}, {held}"
    say(said)
    say_rounding(plan, say)
    if plan.choice is not None:
        kept, of = len(plan.softmax_layers), counted(len(plan.steps) + len(plan.kept), "layer")
        say(f"softmax stays in {kept} of {of} ({plan.choice.asked}); the run measures which")
    if plan.heads_choice is not None:
        asked, count = plan.heads_choice.asked, counted(len(plan.softmax_groups), "KV head")
        say(f"softmax stays in {count} of linear layers ({asked}); the run measures which")
    if plan.window_choice is not None:
        say(f"convert.kept_window={plan.window_choice.asked}: the run measures which kept layers get it")
