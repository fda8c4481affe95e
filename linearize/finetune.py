"""Finetune, the story on one screen: convert if asked, run the recipe's stages, save, reload, verify.

Read `finetune` first; session.py holds the process that trains, loop.py one stage, runs.py the folder on disk.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .checkpoint.adopt import adopt
from .checkpoint.atomic import scratch_beside, write_result
from .checkpoint.manifest import plan_in, read_plan, saved_again
from .checkpoint.provenance import behind, check_code, check_code_cache, trained_before
from .checkpoint.source import Source, open_source, read_json
from .checkpoint.upgrade import plan_upgrade, upgrade
from .choose.choose import Scoring, choosers
from .convert import UNREAD, convert, plan_conversion, separate, slower, unread
from .data.augment import augmentation
from .data.batches import check_there, kind_of, source_hash, tokens_per_sample
from .data.documents import TextSource, check_first_rows, check_rows, no_datasets
from .data.images import count_images
from .demo import named_base
from .errors import Exit, LinearizeError, did_you_mean, existing_folder, os_error, undamaged
from .estimate.advice import advise
from .estimate.choose import as_before, choose, is_open, plainly
from .estimate.estimate import StageCost, estimate, refusal, sharded
from .estimate.gpus import Device, card, present
from .estimate.hours import most_tokens_of
from .estimate.measure import measure_stages
from .estimate.memory import Rehearsal
from .hub.download import unanswered
from .hub.errors import shortly
from .hub.push import check_access, push_saved
from .measure.generate import load_tokenizer
from .measure.positions import warning_of
from .page.record import EVAL, FINAL, read_run
from .page.report import PAGE, card_pictures, report_page
from .plan.keep import is_auto
from .plan.plan import Plan
from .recipe.data import DatasetSource, FileSource, described, holds_images, local_paths, parts_of, unit_of
from .recipe.models import Convert, Scratch
from .recipe.recipe import Recipe
from .terminal.output import counted, duration, short, size
from .terminal.progress import progress
from .terminal.tables import chosen_options
from .train.device import device_name, on_cpu
from .train.progress import pace
from .train.random_model import write_random
from .train.runs import START_OVER, Position, Run, converted_from, processes, read_position
from .train.runtime import (
    Say,
    check_divided,
    check_runtime,
    hyperparameters,
    make_accelerator,
    stage_steps,
    to_source,
)
from .train.save import meta_model, save_final, save_plain
from .train.session import Finetuner, check_model, doubts
from .train.teacher import Named, check_teacher, find_teacher, meta_teacher, teacher_line
from .verify.reload import Level, numbers

# A parameter takes at most so much: float32 weight, gradient and two moments, and the teacher's copy. A model whose
# parameters take less than this share of the memory is not rehearsed before it trains.
BYTES_AT_MOST, SMALL = 20, 0.02


def finetune(
    recipe: Recipe, *, resume: str = "auto", only: str | None = None, max_steps: int | None = None, say: Say = print
) -> dict[str, Any]:
    """Run a recipe; returns the report: `output`, `max_steps`, `teacher_ppl`, `stages`, .. (also in report.json).

    `output` is None when `only` left later stages to do. Raises LinearizeError: 2 for the recipe, 3 for what does
    not fit, 4 for resources, 5 for the Hub, 6 for NaN or a failed verification, 130 when interrupted (state saved).
    """
    check_only(recipe, only)
    check_apart(recipe)
    check_code_cache()  # before minutes are spent on choosing layers
    recipe = settle(recipe, resume, say)
    run = Run(recipe, resume, max_steps)
    if run.finished:
        say(f"{run.final} is finished already; `--resume never` would start over")
        return run.read_report()
    check_order(recipe, run, only)
    tuner = Finetuner(recipe, run, make_accelerator(recipe, run.folder), say)
    accelerator = tuner.accelerator
    for note in not_held_out(recipe):
        tuner.say(note)
    if run.resume_from is not None:
        tuner.say(what_is_left(recipe, run, read_position(run.resume_from)))
    if recipe.finish.push is not None and accelerator.is_main_process:
        check_access(recipe.finish.push)
    with memory_errors(tuner), contextlib.closing(run):
        with run.preparing(accelerator.is_main_process):
            with accelerator.main_process_first():
                named = find_teacher(recipe, run.teacher_commit())
                base = open_base(recipe, run, named, accelerator.is_main_process, say)
                named = named and named.downloaded()
            tuner.load(base, named)
        accelerator.init_trackers(recipe.name, config=hyperparameters(recipe))
        complete = tuner.train(only)
        if complete:
            tuner.take_best()
        layers = tuner.fidelity() if complete else []
        positions = tuner.positions() if complete and accelerator.is_main_process else None
        report = run.report(layers, complete, positions)
        if complete and accelerator.is_main_process:
            report |= {"samples": tuner.samples(), "device": device_name(accelerator.device)}
            report["teacher"] = run.teacher()
            if positions and (message := warning_of(positions)):
                say(message)
            run.write_report(report)
            with failed_check(tuner):
                save(tuner, report, say)
            run.finish()
            write_result(run.folder / PAGE, report_page(read_run(run.folder)))
            say(f"wrote {run.folder / PAGE}: open it in a browser")
            if recipe.finish.push is not None:
                report["pushed"] = push_saved(run.final, recipe.finish.push, recipe.model.trust_remote_code, say)
        accelerator.wait_for_everyone()
        accelerator.end_training()
    return report


def save(tuner: Finetuner, report: dict[str, Any], say: Say) -> None:
    """Write the finished model of a run into its folder `final`."""
    recipe, run, student = tuner.recipe, tuner.run, tuner.whole_student
    if recipe.plain:
        save_plain(student(), tuner.base, run.final, recipe, report, say, run.plain_files())
        return
    pictures = card_pictures(read_run(run.folder, plan=read_plan(tuner.base)))
    save_final(student(), tuner.base, run.final, recipe, report, say, pictures, run.plain_files())


def next_commands(recipe: Recipe) -> str:
    """What to do with the model of a finished run, to be pasted: write text, measure it, upload it."""
    run = Path(recipe.output_dir)
    final = run / FINAL
    config = final / "config.json"
    writes = config.is_file() and "AutoModelForCausalLM" in (read_json(config).get("auto_map") or {})
    commands: list[list[str | Path]] = [["generate", final, "Once upon a time"]] if writes else []
    if recipe.data.eval is not None and not recipe.plain:
        plan = read_plan(final)
        # Else `eval` finds the teacher: the base of a run that converts, or what was converted before.
        unnamed = not isinstance(recipe.model.base, str) if recipe.convert else not converted_from(plan, recipe.folder)
        teacher = ["--teacher", plan.source or "MODEL"] if unnamed else []
        commands.append(["eval", final, "--recipe", run, "-o", run / EVAL, *teacher])
    commands += [] if recipe.finish.push is not None else [["push", final, "USER/NAME", "--dry-run"]]
    trust = ["--trust-remote-code"] * recipe.model.trust_remote_code
    return "; ".join(shlex.join(["linearize", *map(str, words), *trust]) for words in commands)


def what_is_left(recipe: Recipe, run: Run, position: Position) -> str:
    """What a run that goes on says first: from which step, and how long all stages will take, by the last rate."""
    left, message = 0, f"{run.folder} goes on after step {position.step} of {recipe.stages[position.stage].name}"
    equal = 0.0  # tokens of the stage that has a rate
    for number, stage in enumerate(recipe.stages[position.stage :], position.stage):
        per_step = stage.batch.blocks * processes()
        length = tokens_per_sample(recipe.data_for(stage))
        steps = stage_steps(stage, per_step, length, run.max_steps)
        if steps is None:
            return message
        done = 0 if number > position.stage else steps if position.done else position.step
        tokens = max(steps - done, 0) * per_step * length
        left += tokens
        equal += tokens * pace(stage) / pace(recipe.stages[position.stage])
    unit = unit_of(recipe.data.train)
    message += f"; {short(left)} {unit} of all stages are left"
    rate = run.last_rate(recipe.stages[position.stage].name)
    if not rate or not left:
        return message
    return f"{message}, about {duration(equal / rate)} at its last speed, {rate:,.0f} {unit}/s"


def check_only(recipe: Recipe, only: str | None) -> None:
    """Raise LinearizeError (exit 2) unless `only` is the name of a stage, or None."""
    names = [stage.name for stage in recipe.stages]
    if only is not None and only not in names:
        raise LinearizeError(f"--stage {only}: the recipe has {', '.join(names)}.{did_you_mean(only, names)}")


def check_order(recipe: Recipe, run: Run, only: str | None) -> None:
    """Raise LinearizeError (exit 2) where a stage before `only` is not finished in the run."""
    position = read_position(run.resume_from) if run.resume_from else Position(-1, 0, 0, True)
    names = [stage.name for stage in recipe.stages]
    first = position.stage + position.done
    if only is not None and names.index(only) > first:
        raise LinearizeError(
            f"--stage {only} needs {names[first]}, which is not finished in {run.folder}. Run --stage {names[first]} "
            "first, or all without --stage"
        )


def check_apart(recipe: Recipe) -> None:
    """Raise LinearizeError (exit 2) for a run in the folder of its base or teacher, or around it: it replaces files."""
    read = {} if isinstance(recipe.model.base, Scratch) else {"model.base": base_path(recipe)}
    if recipe.teacher is not None:
        read |= {"teacher.model": recipe.teacher.model or "", "teacher.logits": recipe.teacher.logits or ""}
    for key, name in read.items():
        folder = Path(os.path.expanduser(named_base(name)))
        if name and folder.is_dir() and not separate(folder, Path(recipe.output_dir)):
            raise LinearizeError(
                f"output_dir {recipe.output_dir} and {key} {folder} must be separate folders: neither inside the "
                "other. Set output_dir to another folder"
            )


def base_path(recipe: Recipe) -> str:
    """`demo` stands for the model that the package ships. The base is not a random one."""
    assert isinstance(recipe.model.base, str)
    return named_base(recipe.model.base)


@contextlib.contextmanager
def open_source_of(recipe: Recipe, weights: bool) -> Iterator[str]:
    """Within: where the model is that a recipe starts from. A random one is made for as long: with `weights` on the
    disk of the run, so that the conversion can link them, else its config alone."""
    if not isinstance(recipe.model.base, Scratch):
        yield base_path(recipe)
        return
    run = Path(recipe.output_dir).absolute()
    near = existing_folder(run.parent) / run.name
    with scratch_beside(near) if weights else tempfile.TemporaryDirectory() as folder:
        yield str(write_random(recipe, Path(folder), weights))


@contextlib.contextmanager
def from_configs(recipe: Recipe) -> Iterator[tuple[Any, Path | None]]:
    """Within: the conversion as planned without weights, or the folder of a base that was converted before, or that
    keeps its softmax."""
    if recipe.convert is None and not recipe.plain:
        yield None, converted_base(recipe, weights=False).folder
        return
    with open_source_of(recipe, False) as base:
        yield (None, Path(base)) if recipe.plain else (plan_base(recipe, base, weights=False), None)


def open_base(recipe: Recipe, run: Run, named: Named | None, owner: bool, say: Say) -> Path:
    """The checkpoint that training starts from, converted unless it keeps its softmax; the process that is `owner`
    opens the run's folder. `named` is the recipe's own teacher.

    Of the Hub it is the commit that the run began with, whatever the branch has become.
    """
    if recipe.convert is not None or recipe.plain:
        if owner:
            prepare_base(recipe, run, named, say)
        if owner and not recipe.plain:
            upgrade_base(recipe, run, run.converted, say)
        return run.converted
    commit = None if owner and run.resume == "never" else run.commit()
    if owner:
        check_packages(recipe)
        if named is not None:
            model = meta_model(
                converted_base(recipe, commit, weights=False).folder, None, None, recipe.model.trust_remote_code
            )
            check_teacher(named, recipe, model, run.max_steps, processes())
    source = converted_base(recipe, commit)
    if owner and saved_again(source.folder) is not None and not run.has_converted:
        check_text(recipe)
        begin(recipe, run, None, source.revision, named, say)
        adopt(source.folder, run.converted, trust_remote_code=recipe.model.trust_remote_code)
        run.note_base(run.converted)
        say(f"{source.folder} has no linearize.json, as transformers saved it: training starts from {run.converted}")
    elif owner:
        check_room(recipe, run, None, source.folder, numbers([source.folder]))
        check_text(recipe)
        begin(recipe, run, run.converted if run.has_converted else source.folder, source.revision, named, say)
        upgrade_base(recipe, run, run.converted if run.converted.exists() else source.folder, say)
    return run.converted if run.converted.exists() else source.folder


def upgrade_base(recipe: Recipe, run: Run, base: Path, say: Say) -> None:
    """Where an earlier version wrote the code of `base`: bring it to this version's in the run's folder, since training
    needs both sides of one version."""
    trust = recipe.model.trust_remote_code
    version = behind(base, check_code(base, trust))
    if version is None:
        return
    planned = plan_upgrade(base, None if base == run.converted else run.converted, trust_remote_code=trust)
    if planned is not None:
        run.note_base(None)  # a kill within finds no hashes of the code before
        message = upgrade(planned)
        run.note_base(run.converted)
        say(f"{base} has the code of linearize {version}, this run that of {__version__}. {message}")


def begin(recipe: Recipe, run: Run, base: Path | None, commit: str | None, named: Named | None, say: Say) -> None:
    """Open the run's folder, unless the data, the files of `base` or the teacher are others than the run began with."""
    data = data_hashes(recipe)
    for note in run.start(versions(), commit, data, base, named.downloaded().facts() if named else None):
        say(note)


def data_hashes(recipe: Recipe) -> dict[str, str]:
    """`source_hash` of each source of a recipe, by its name there."""
    found = dict[str, str]()
    for number, stage in enumerate(recipe.stages):
        for split in ("train", "eval"):
            source = getattr(recipe.data_for(stage), split)
            if source is not None:
                own = f"stages[{number}]." * (getattr(stage.data, split) is not None)
                name = f"{own}data.{split}"
                found[name] = found.get(name) or source_hash(source, recipe.folder)
    return found


def converted_base(recipe: Recipe, commit: str | None = None, *, weights: bool = True) -> Source:
    """A base that was converted before; from the Hub, with its `weights`, when there is none here.

    Raises LinearizeError (exit 3) for a base that linearize did not write.
    """
    source = open_source(base_path(recipe), commit or recipe.model.revision, weights=weights)
    if saved_again(source.folder) is None:
        read_plan(source.folder)
    return source


def plan_base(recipe: Recipe, base: str | None = None, *, weights: bool = True, say: Say = print) -> Any:
    """The conversion that the recipe asks for, as `plan_conversion` returns it, of the model at `base` (None: the one
    that it names)."""
    assert recipe.convert is not None
    scoring = scoring_of(recipe, recipe.convert, say)
    return plan_conversion(
        base or base_path(recipe),
        recipe.convert.mechanism,
        layers=recipe.convert.layers,
        keep_softmax=recipe.convert.keep_softmax,
        keep_heads=recipe.convert.keep_heads,
        kept_window=recipe.convert.kept_window,
        options=recipe.convert.options,
        allow_drop=recipe.convert.allow_drop,
        dtype=recipe.model.dtype or "keep",
        copy=recipe.convert.copy_weights,
        revision=recipe.model.revision,
        trust_remote_code=recipe.model.trust_remote_code,
        weights=weights,
        **(choosers(scoring) if weights else {}),
    )


def scoring_of(recipe: Recipe, convert: Convert, say: Say) -> Scoring:
    """How `auto` compares layers and heads: on the text of the first stage, in its rows. Not with its seed, so that
    `convert` chooses the same on the same text in rows of the same length."""
    data = recipe.data_for(recipe.stages[0])
    if holds_images(data.train):  # the plan says that it has no text to compare
        return Scoring(convert.score_by)
    first, _ = parts_of(data.train)[0]
    text = to_source(first, data.pack.text_key, recipe.folder)
    device = "cpu" if on_cpu(recipe) else "cuda"
    return Scoring(convert.score_by, text, data.pack.seq_len, device, say=say)


def prepare_base(recipe: Recipe, run: Run, named: Named | None, say: Say) -> None:
    """Open the run's folder, and convert the base into it unless an earlier start of this run did; a random base that
    keeps its softmax is put there as it is."""
    if run.has_converted:
        if named is not None:
            model = meta_model(run.converted, None, None, recipe.model.trust_remote_code)
            check_teacher(named, recipe, model, run.max_steps, processes())
        begin(recipe, run, run.converted, None, named, say)
        return
    check_packages(recipe)
    # To compare layers, and to make or fetch weights, takes minutes: whether the run fits is known before.
    how = recipe.convert
    chosen_here = how is not None and any(map(is_auto, (how.keep_softmax, how.keep_heads, how.kept_window)))
    early = chosen_here or isinstance(recipe.model.base, Scratch) or named is not None
    if early:
        with from_configs(recipe) as (likely, folder):
            student = meta_model(folder, likely, None, recipe.model.trust_remote_code)
            check_model(student, recipe)
            if named is not None:
                check_teacher(named, recipe, student, run.max_steps, processes())
            parameters = likely[2].parameters() if likely else sum(p.numel() for p in student.parameters())
            check_room(recipe, run, likely, folder, parameters)
        check_text(recipe)
    with open_source_of(recipe, True) as base:
        if recipe.plain:
            begin(recipe, run, None, None, named, say)
            run.note_base(Path(base))
            Path(base).rename(run.converted)
            say(f"{Path(base).name} keeps its softmax: no layer is converted")
            return
        plan, source, natives = plan_base(recipe, base, say=say)
        trust = recipe.model.trust_remote_code
        check_model(model := meta_model(None, (plan, source, natives), None, trust), recipe)
        if not early:
            check_room(recipe, run, (plan, source, natives), None, sum(p.numel() for p in model.parameters()))
            check_text(recipe)
        if kind_of(model) != "images":
            load_tokenizer(source.folder, trust)
        if left := unread(source):
            say(UNREAD.format(", ".join(left)))
        begin(recipe, run, None, None, named, say)
        say_rounding(plan, say)
        for choice in (plan.choice, plan.heads_choice):
            if choice is not None and choice.scores:
                say(choice.scored())
        if plan.window_choice is not None:
            say(plan.window_choice.measured())
        level: Level = "keys" if recipe.finish.verify else "none"
        convert(plan, source, natives, run.converted, level=level, trust_remote_code=trust, seed=recipe.seed, say=say)
    run.note_base(run.converted)


def say_rounding(plan: Plan, say: Say) -> None:
    """Say where the result has another dtype than the source, and what keeps it."""
    if plan.rounding:
        say(f"{plan.rounding}; model.dtype=null keeps {plan.source_dtype}")


def dry_run(
    recipe: Recipe,
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
    check_only(recipe, only)
    check_apart(recipe)
    if resume is not None and (note := note_of_run(recipe, resume, only, max_steps)):
        say(note)
    device, precision = target(recipe, gpu)
    check_packages(recipe)
    with (
        progress("estimate", Rehearsal.PLANNED + Rehearsal.parts(recipe)) as advance,
        from_configs(recipe) as (planned, folder),
    ):
        advance(Rehearsal.PLANNED)
        recipe = chosen(recipe, planned, folder, device, precision, say)
        if sharded():
            check_divided(recipe, zero=sharded("DEEPSPEED"))
        rehearsal = Rehearsal(recipe, planned, folder, precision, device.kind == "cuda", advance=advance)
        check_model(rehearsal.model, recipe)
        if resume is not None:
            check_text(recipe, check_first_rows)
            if note := out_of_reach(recipe):
                say(note)
        named = rehearsal.named
        check_teacher(named, recipe, rehearsal.model, max_steps, processes())
        if folder is not None and (note := trained_before(folder, named.name if named else None)):
            say(note)
        cost = estimate(rehearsal, device, max_steps)
        cost.stages = [one for one in cost.stages if only in (None, one.stage.name)]
        samples = [(one.stage, one.stage.batch.blocks * processes()) for one in cost.stages]
        for note in (*doubts(rehearsal.model, recipe, samples), *not_held_out(recipe)):
            say(note)
        if planned is not None:
            plan = planned[0]
            if note := slower(*planned):
                say(note)
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
                asked, count = plan.heads_choice.asked, counted(len(plan.softmax_groups), "key head")
                say(f"softmax stays in {count} of linear layers ({asked}); the run measures which")
            if plan.window_choice is not None:
                say(f"--kept-window {plan.window_choice.asked}: the run measures which kept layers get it")
        elif folder is not None and not recipe.plain:
            say(f"{Path(base_path(recipe)).name}: {plan_in(folder).attention}")
            if note := loaded_otherwise(recipe, rehearsal):
                say(note)
        if named is not None:
            say(teacher_line(named, rehearsal.student.other))
        if cost.too_large:
            say(f"note: {refusal(cost, advise(rehearsal, device, cost)).message}")
        if measure and gpu is not None:
            raise LinearizeError("--measure runs on the device that is here: leave out --gpu")
        measured = measure_stages(rehearsal, [one.stage for one in cost.stages]) if measure else []
        for one, found in zip(cost.stages, measured, strict=measure):
            one.take_measured(found["tokens_per_s"])
        rows = [one.row(device) | {"data": data_of(recipe, one)} for one in cost.stages]
        for row, found in zip(rows, measured, strict=measure):
            row["measured"] = found
        return {"stages": rows, **cost.summary(price)}


def note_of_run(recipe: Recipe, resume: str, only: str | None, max_steps: int | None) -> str:
    """What a real run would do with the run that its folder has already: refuse it, by the checks of `finetune`, leave
    it as it is, go on with it or start it over. Empty where there is none."""
    try:
        run = Run(as_begun(recipe, resume), resume, max_steps)
        if not run.record.exists():
            return ""
        if run.finished:
            return f"note: {run.final} is finished already, and a real run trains nothing. {START_OVER}"
        check_order(run.recipe, run, only)
        if resume == "never":
            return f"note: {run.folder} has a run already, and a real run with `--resume never` starts it over"
        if run.resume_from is None:
            return f"note: {run.folder} has a run without a checkpoint, and a real run begins its training again"
        left = what_is_left(run.recipe, run, read_position(run.resume_from))
        return f"note: a real run continues this one: {left}. {START_OVER}"
    except LinearizeError as error:
        return f"note: a real run in {recipe.output_dir} is refused: {error.message}"


def loaded_otherwise(recipe: Recipe, rehearsal: Rehearsal) -> str:
    """A note where `model.dtype` rounds the weights of a converted folder for training; the result has the folder's
    dtype. Empty where it does not."""
    kept, loaded = (str(dtype).removeprefix("torch.") for dtype in (rehearsal.stored_dtype, rehearsal.dtype))
    if kept == loaded or loaded != recipe.model.dtype:
        return ""
    return (
        f"training loads its {kept} weights as {loaded} (model.dtype), and the result is saved in {kept}, as "
        "the folder is (linearize convert --dtype casts); model.dtype=null loads them as they are"
    )


def data_of(recipe: Recipe, cost: StageCost) -> dict[str, Any]:
    """What a stage reads: `train` and `eval` by their names, and `seq_len`, `tokens`, `eval_tokens`, which it asks for;
    an image counts as one token, and `tokens` is None where epochs ask for as many as there are. `passes`, where files
    are short: how often at least the stage reads them. `foreign_eval`, where it trains on files and is evaluated on a
    dataset, as a preset is whose `data.train` alone was replaced."""
    data, held = recipe.data_for(cost.stage), recipe.eval.max_tokens
    if holds_images(data.eval) and (known := count_images(data.eval, recipe.folder)) is not None:
        held = min(held, known)
    most = most_tokens_of(data.train, recipe.folder)
    facts: dict[str, Any] = {}
    if cost.tokens is not None and cost.tokens > most:
        facts["passes"] = math.ceil(cost.tokens / most)
    if isinstance(data.train, FileSource) and isinstance(data.eval, DatasetSource):
        facts["foreign_eval"] = True
    return facts | {
        "train": described(data.train),
        "tokens": cost.tokens,
        "seq_len": tokens_per_sample(data),
        "eval": None if data.eval is None else described(data.eval),
        "eval_tokens": None if data.eval is None else held,
    }


def out_of_reach(recipe: Recipe) -> str:
    """A note where the Hub gives no answer about a dataset of the recipe, which a real run would then have to find in
    its cache; else empty."""
    from huggingface_hub import constants

    sources = [source for data in map(recipe.data_for, recipe.stages) for source in (data.train, data.eval)]
    parts = [part for source in sources for part, _ in parts_of(source) if isinstance(part, DatasetSource)]
    paths = [path for path in dict.fromkeys(part.path for part in parts) if not Path(path).exists()]
    away = next(filter(None, (unanswered(path, dataset=True) for path in paths)), None)
    if away is None:
        return ""
    why = "offline" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached ({shortly(away)})"
    return (
        f"note: {why}, and a real run stops unless the cache has {' and '.join(paths)}. For text of your own: "
        "'data.train={files: [train.txt]}' 'data.eval={files: [held-out.txt]}'"
    )


def not_held_out(recipe: Recipe) -> list[str]:
    """Notes on what a stage is evaluated on, where it trains on all of it."""

    def places(source: Any) -> set[str]:
        names = [local_paths(part, recipe.folder) or (described(part),) for part, _ in parts_of(source)]
        return {os.path.realpath(name) for part in names for name in part}

    data = [recipe.data_for(stage) for stage in recipe.stages]
    found = [described(one.eval) for one in data if one.eval is not None and places(one.eval) <= places(one.train)]
    return [f"note: data.train and data.eval both read {text}: nothing is held out" for text in dict.fromkeys(found)]


def settle(recipe: Recipe, resume: str, say: Say) -> Recipe:
    """The recipe with all that it leaves to the device chosen: as the run that it continues did, or for this device."""
    recipe = as_begun(recipe, resume)
    if not is_open(recipe):
        return recipe
    if int(os.environ.get("RANK", "0")):  # of several processes the first one speaks
        say = no_one
    device, precision = target(recipe, None)
    with from_configs(recipe) as (planned, folder):
        return chosen(recipe, planned, folder, device, precision, say)


def as_begun(recipe: Recipe, resume: str) -> Recipe:
    """The recipe with all that it leaves to the device as the run that it continues chose it; as it is without one."""
    record = Path(recipe.output_dir) / "run.json"
    if not is_open(recipe) or not record.exists() or resume == "never":
        return recipe
    with undamaged(record, "Restore it, start over with --resume never, or choose a new output_dir"):
        return as_before(recipe, record)


def no_one(text: str) -> None:
    """A `say` that is silent."""


def chosen(recipe: Recipe, planned: Any, folder: Path | None, device: Device, precision: str, say: Say) -> Recipe:
    """`choose` for a base; for a small model everything plainly, without a rehearsal."""
    if not is_open(recipe):
        return recipe
    model = meta_model(folder, planned, None, recipe.model.trust_remote_code)
    parameters = sum(p.numel() for p in model.parameters())
    if device.kind == "cpu" and parameters * BYTES_AT_MOST < SMALL * device.memory:
        return plainly(recipe)
    # At most: a second rehearsal follows where an optimizer had to become smaller.
    count = 1 + any(stage.optimizer.memory == "auto" for stage in recipe.stages) * (recipe.runtime.batch == "auto")
    with progress("trying batch and optimizer", count * Rehearsal.parts(recipe)) as advance:

        def rehearse(changed: Recipe) -> Rehearsal:
            return Rehearsal(changed, planned, folder, precision, device.kind == "cuda", advance=advance)

        return choose(recipe, rehearse, device, say)


def target(recipe: Recipe, gpu: str | None) -> tuple[Device, str]:
    """The device that a run would take, or the card named `gpu`, and accelerate's name of the precision there."""
    if gpu is None:
        precision = check_runtime(recipe)
        return present(on_cpu(recipe)), precision
    return card(gpu), {"fp32": "no", "auto": "bf16"}.get(recipe.runtime.precision, recipe.runtime.precision)


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
        sft = stage.answers_alone
        for source in (*(part for part, _ in parts_of(data.train)), data.eval):
            if source is None or holds_images(source):
                continue
            check_there(source, recipe.folder)
            text = to_source(source, data.pack.text_key, recipe.folder)
            if (text, sft) not in seen:
                check(text, sft=sft)
                seen.add((text, sft))


def check_room(recipe: Recipe, run: Run, planned: Any, folder: Path | None, parameters: int) -> None:
    """Before anything is written: refuse (exit 4) a run that does not fit the device's memory or the disk.

    A model whose `parameters` are few beside the memory is let through: to rehearse its stages takes seconds.
    """
    device, precision = target(recipe, None)
    named = find_teacher(recipe)
    if named is not None and named.stored is None:
        parameters += sum(p.numel() for p in meta_teacher(named).parameters())
    if parameters * BYTES_AT_MOST < SMALL * device.memory:
        return
    with progress("estimate", Rehearsal.parts(recipe)) as advance:
        rehearsal = Rehearsal(recipe, planned, folder, precision, device.kind == "cuda", advance=advance)
        cost = estimate(rehearsal, device, run.max_steps)
    if cost.too_large:
        raise refusal(cost, advise(rehearsal, device, cost))
    parent = existing_folder(run.folder)
    need, free = sum(cost.disk.values()), shutil.disk_usage(parent).free
    if need > free:
        parts = ", ".join(f"{part} {size(count)}" for part, count in cost.disk.items())
        raise LinearizeError(
            f"the run needs {size(need)} in {parent} ({parts}), {size(free)} free. Make room, choose another "
            "output_dir, or set checkpoint.keep=1",
            Exit.RESOURCE,
        )


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
        raise LinearizeError(
            f"{what}. Try, cheapest first: runtime.gradient_checkpointing=true; batch.per_device=1 with a larger "
            f"batch.accumulate; a smaller data.pack.seq_len (now {tuner.recipe.data.pack.seq_len}); "
            f"train: [new, lora]. Last checkpoint: {tuner.last_checkpoint or 'none'}",
            Exit.RESOURCE,
        ) from error


@contextlib.contextmanager
def failed_check(tuner: Finetuner) -> Iterator[None]:
    """Within: a finished model that fails a check is not lost, and the error says where it is."""
    try:
        yield
    except LinearizeError as error:
        if error.code != Exit.CHECK_FAILED:
            raise
        then = f"--resume {tuner.last_checkpoint} with finish.verify=false saves the model all the same"
        raise LinearizeError(f"{error.message}. The training is kept: {then}", error.code) from error


def versions() -> dict[str, str]:
    """Versions of what a run depends on."""
    packages = ("torch", "transformers", "accelerate", "peft")
    return {"linearize": __version__, **{name: importlib.metadata.version(name) for name in packages}}
