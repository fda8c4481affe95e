"""Finetune, the story on one screen: convert if asked, run the recipe's stages, save, reload, verify.

Read `finetune` first; session.py holds the process that trains, loop.py one stage, runs.py the folder on disk.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .checkpoint.adopt import adopt
from .checkpoint.provenance import behind, check_code, read_plan, saved_again, trained_before
from .checkpoint.source import Source, open_source
from .checkpoint.upgrade import plan_upgrade, upgrade
from .choose.choose import Scoring, chooser
from .convert import UNREAD, convert, plan_conversion, unread
from .data.batches import kind_of, small_batch, source_hash, tokens_per_sample
from .errors import Exit, LinearizeError, did_you_mean, os_error
from .hub.push import check_access, push_saved
from .measure.generate import load_tokenizer
from .measure.positions import warning_of
from .page.record import read_run
from .page.report import PAGE, card_pictures, report_page, write_page
from .recipe.data import holds_images
from .recipe.models import Convert, Scratch
from .recipe.recipe import Recipe
from .train.random_model import named_base, write_random
from .train.runs import Run, processes
from .train.runtime import Say, check_runtime, device_name, make_accelerator, on_cpu, stage_steps, to_source
from .train.save import meta_model, save_final
from .train.session import Finetuner, check_model
from .train.student import Student


def finetune(
    recipe: Recipe, *, resume: str = "auto", only: str | None = None, max_steps: int | None = None, say: Say = print
) -> dict[str, Any]:
    """Run a recipe; returns the report: `output`, `max_steps`, `teacher_ppl`, `stages`, .. (also in report.json).

    `output` is None when `only` left later stages to do. Raises LinearizeError: 2 for the recipe, 3 for what does
    not fit, 4 for resources, 5 for the Hub, 6 for NaN or a failed verification, 130 when interrupted (state saved).
    """
    check_only(recipe, only)
    run = Run(recipe, resume, max_steps)
    if run.finished:
        say(f"{run.final} is finished already; --resume never starts over")
        return run.read_report()
    tuner = Finetuner(recipe, run, make_accelerator(recipe, run.folder), say)
    accelerator = tuner.accelerator
    if recipe.finish.push is not None and accelerator.is_main_process:
        check_access(recipe.finish.push)
    with memory_errors(tuner), contextlib.closing(run):
        with run.preparing(accelerator.is_main_process):
            with accelerator.main_process_first():
                base = open_base(recipe, run, accelerator.is_main_process, say)
            tuner.load(base)
        accelerator.init_trackers(recipe.name)
        complete = tuner.train(only)
        layers = tuner.fidelity() if complete else []
        positions = tuner.positions() if complete and accelerator.is_main_process else None
        report = run.report(layers, complete, positions)
        if complete and accelerator.is_main_process:
            report |= {"samples": tuner.samples(), "device": device_name(accelerator.device)}
            if positions and (message := warning_of(positions)):
                say(message)
            run.write_report(report)
            pictures = card_pictures(read_run(run.folder, plan=read_plan(tuner.base)))
            with failed_check(tuner):
                save_final(tuner.whole_student(), tuner.base, run.final, recipe, report, say, pictures)
            run.finish()
            write_page(report_page(read_run(run.folder)), run.folder / PAGE)
            say(f"wrote {run.folder / PAGE}")
            if recipe.finish.push is not None:
                report["pushed"] = push_saved(run.final, recipe.finish.push, recipe.model.trust_remote_code, say)
        accelerator.wait_for_everyone()
        accelerator.end_training()
    return report


def check_only(recipe: Recipe, only: str | None) -> None:
    """Raise LinearizeError (exit 2) unless `only` is the name of a stage, or None."""
    names = [stage.name for stage in recipe.stages]
    if only is not None and only not in names:
        raise LinearizeError(f"--stage {only}: the recipe has {', '.join(names)}.{did_you_mean(only, names)}")


def base_path(recipe: Recipe) -> str:
    """`demo` stands for the model that the package ships. The base is not a random one."""
    assert isinstance(recipe.model.base, str)
    return named_base(recipe.model.base)


@contextlib.contextmanager
def open_source_of(recipe: Recipe, weights: bool) -> Iterator[str]:
    """Within: where the model is that a recipe starts from. A random one is made for as long, on the run's disk."""
    if not isinstance(recipe.model.base, Scratch):
        yield base_path(recipe)
        return
    outside = Path(recipe.output_dir).absolute().parent
    near = next(place for place in (outside, *outside.parents) if place.is_dir())
    with tempfile.TemporaryDirectory(prefix=".linearize-", dir=near if weights else None) as folder:
        yield str(write_random(recipe, Path(folder), weights))


def open_base(recipe: Recipe, run: Run, owner: bool, say: Say) -> Path:
    """The converted checkpoint that training starts from; the process that is `owner` opens the run's folder.

    Of the Hub it is the commit that the run began with, whatever the branch has become.
    """
    if recipe.convert is not None:
        if owner:
            prepare_base(recipe, run, say)
            upgrade_base(recipe, run, run.converted, say)
        return run.converted
    source = converted_base(recipe, None if owner and run.resume == "never" else run.commit())
    if owner and saved_again(source.folder) is not None and not run.has_converted:
        begin(recipe, run, None, source.revision, say)
        adopt(source.folder, run.converted, trust_remote_code=recipe.model.trust_remote_code)
        run.note_base(run.converted)
        say(f"{source.folder} has no linearize.json, as transformers saved it: training starts from {run.converted}")
    elif owner:
        begin(recipe, run, run.converted if run.has_converted else source.folder, source.revision, say)
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


def begin(recipe: Recipe, run: Run, base: Path | None, commit: str | None, say: Say) -> None:
    """Open the run's folder, unless the data or the files of `base` are others than the run began with."""
    data = {}
    for number, stage in enumerate(recipe.stages):
        for split in ("train", "eval"):
            source = getattr(recipe.data_for(stage), split)
            if source is not None:
                own = f"stages[{number}]." * (getattr(stage.data, split) is not None)
                data[f"{own}data.{split}"] = source_hash(source, recipe.folder)
    for note in run.start(versions(), commit, data, base):
        say(note)


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
    return plan_conversion(
        base or base_path(recipe),
        recipe.convert.mechanism,
        layers=recipe.convert.layers,
        keep_softmax=recipe.convert.keep_softmax,
        options=recipe.convert.options,
        allow_drop=recipe.convert.allow_drop,
        dtype=recipe.model.dtype or "keep",
        copy=recipe.convert.copy_weights,
        revision=recipe.model.revision,
        trust_remote_code=recipe.model.trust_remote_code,
        weights=weights,
        choose=chooser(scoring_of(recipe, recipe.convert, say)) if weights else None,
    )


def scoring_of(recipe: Recipe, convert: Convert, say: Say) -> Scoring:
    """How `keep_softmax: auto` compares layers: on the text of the first stage."""
    data = recipe.data_for(recipe.stages[0])
    if holds_images(data.train):  # the plan says that it has no text to compare
        return Scoring(convert.score_by)
    text = to_source(data.train, data.pack.text_key, recipe.folder)
    device = "cpu" if on_cpu(recipe) else "cuda"
    return Scoring(convert.score_by, text, data.pack.seq_len, device, recipe.seed, say)


def prepare_base(recipe: Recipe, run: Run, say: Say) -> None:
    """Open the run's folder, and convert the base into it unless an earlier start of this run did."""
    if run.has_converted:
        begin(recipe, run, run.converted, None, say)
        return
    with open_source_of(recipe, True) as base:
        plan, source, natives = plan_base(recipe, base, say=say)
        trust = recipe.model.trust_remote_code
        check_model(model := meta_model(None, (plan, source, natives), None, trust), recipe)
        if kind_of(model) != "images":
            load_tokenizer(source.folder, trust)
        if left := unread(source):
            say(UNREAD.format(", ".join(left)))
        begin(recipe, run, None, None, say)
        convert(plan, source, natives, run.converted, level="keys", trust_remote_code=trust, seed=recipe.seed, say=say)
    run.note_base(run.converted)


def dry_run(recipe: Recipe, say: Say, max_steps: int | None = None, only: str | None = None) -> list[dict[str, Any]]:
    """What each stage, or `only` the one of that name, would do, from the config alone: parameters, steps, tokens, and
    bytes of teacher copies.
    """
    check_only(recipe, only)
    wide = check_runtime(recipe) != "no"
    planned, folder, dtype = None, None, None if wide else torch.float32
    if recipe.convert is None:
        folder = converted_base(recipe, weights=False).folder
        model = meta_model(folder, None, dtype, recipe.model.trust_remote_code)
    else:
        with open_source_of(recipe, False) as base:
            planned = plan_base(recipe, base, weights=False)
            model = meta_model(None, planned, dtype, recipe.model.trust_remote_code)
    check_model(model, recipe)
    if folder is not None and (note := trained_before(folder)):
        say(note)
    student = Student(model)
    rows = []
    for stage in recipe.stages:
        parameters = student.prepare(stage, wide=wide)
        if only not in (None, stage.name):
            continue
        blocks = stage.batch.per_device * stage.batch.accumulate * processes()
        seq_len = tokens_per_sample(recipe.data_for(stage))
        if note := small_batch(model, stage, blocks):
            say(note)
        steps = stage_steps(stage, blocks, seq_len, max_steps)
        rows.append(
            {
                "name": stage.name,
                "kind": stage.kind,
                "train": list(stage.train),
                "parameters": sum(p.numel() for p in parameters),
                "steps": steps,
                "tokens": None if steps is None else steps * blocks * seq_len,
                "epochs": stage.epochs,
                "lr": stage.optimizer.lr,
                "teacher_copy_bytes": student.teacher_bytes(),
            }
        )
    if planned is not None:
        plan = planned[0]
        say(f"{plan.source}: {len(plan.steps)} layers become {plan.steps[0].mechanism}")
        if plan.choice is not None:
            of = len(plan.steps) + len(plan.kept)
            say(f"softmax stays in {len(plan.kept)} of {of} layers ({plan.choice.asked}); the run measures which")
    return rows


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
