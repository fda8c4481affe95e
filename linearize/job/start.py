"""Start a job: open its run's folder, and put into it what training starts from, converted where the recipe says so."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..checkpoint.adopt import adopt
from ..checkpoint.manifest import plan_of_resaved
from ..checkpoint.provenance import behind, check_code
from ..checkpoint.source import Source
from ..checkpoint.upgrade import plan_upgrade, upgrade
from ..convert import UNREAD, convert, unread
from ..data.documents import TextSource, check_chats, check_enough
from ..data.kinds import kind_of
from ..measure.generate import load_tokenizer
from ..plan.keep import is_auto
from ..recipe.data import CHAT
from ..recipe.models import Scratch
from ..recipe.recipe import Recipe
from ..train.own_text import find_prompts
from ..train.runs import Run
from ..train.session import own_texts
from ..verify.reload import verify
from .checks import check_before_start, check_fit_here, check_packages, check_text, data_hashes
from .notes import say_rounding
from .resolve import say_nothing
from .source import Base, converted_base, open_source_of, plan_base

if TYPE_CHECKING:
    from .resolve import Job


def open_base(job: Job, owner: bool) -> Path:
    """The checkpoint that training starts from, converted unless it keeps its softmax; the process that is `owner`
    checks the job, opens the run's folder and writes. All that can be refused is refused before."""
    recipe, run = job.recipe, run_of(job)
    if recipe.convert is not None or recipe.plain:
        if owner:
            convert_base(job)
            if not recipe.plain:
                upgrade_base(job, run.converted)
        return run.converted
    if not owner:
        source = converted_base(recipe, run.commit())
    else:
        source = open_converted_base(job)
    return run.converted if run.converted.exists() else source.folder


def run_of(job: Job) -> Run:
    """Its run; a job that is started has one."""
    assert job.run is not None
    return job.run


def open_converted_base(job: Job) -> Source:
    """The base that was converted before, with its weights; its code in this version, in the run's folder where it was
    another's."""
    recipe, run = job.recipe, run_of(job)
    check_packages(recipe)
    check_before_start(job)
    source = job.base.source
    assert source is not None
    if source.revision is not None:
        source = converted_base(recipe, source.revision)
    if plan_of_resaved(source.folder) is not None and not run.has_converted:
        open_run(job, None, source.revision)
        adopt(source.folder, run.converted, trust_remote_code=job.trust)
        run.note_base(run.converted)
        job.say(
            f"{source.folder} has no linearize.json, as transformers saved it: training starts from {run.converted}"
        )
        return source
    open_run(job, run.converted if run.has_converted else source.folder, source.revision)
    upgrade_base(job, run.converted if run.converted.exists() else source.folder)
    return source


def upgrade_base(job: Job, base: Path) -> None:
    """Where an earlier version wrote the code of `base`: bring it to this version's in the run's folder, since training
    needs both sides of one version."""
    run = run_of(job)
    version = behind(base, check_code(base, job.trust))
    if version is None:
        return
    planned = plan_upgrade(base, None if base == run.converted else run.converted, trust_remote_code=job.trust)
    if planned is not None:
        run.note_base(None)  # a kill within finds no hashes of the code before
        message = upgrade(planned)
        run.note_base(run.converted)
        job.say(f"{base} has the code of linearize {version}, this run that of {__version__}. {message}")


def open_run(job: Job, base: Path | None, commit: str | None = None) -> None:
    """Open the run's folder, unless the data, the files of `base` or the teacher are others than the run began with."""
    teacher = job.full_teacher
    facts = teacher.facts() if teacher else None
    for note in run_of(job).start(versions(), commit, data_hashes(job.recipe), base, facts):
        job.say(note)


def convert_base(job: Job) -> None:
    """Open the run's folder, and convert the base into it unless an earlier start of this run did; a random base that
    keeps its softmax is put there as it is."""
    recipe, run = job.recipe, run_of(job)
    if run.has_converted:
        job.refine(Base(None, run.converted))
        check_fit_here(job)
        open_run(job, run.converted)
        return
    check_packages(recipe)
    # To compare layers, and to make or fetch weights, takes minutes: whether the run fits is known before.
    how = recipe.convert
    chosen_here = how is not None and any(map(is_auto, (how.keep_softmax, how.keep_heads, how.kept_window)))
    early = chosen_here or isinstance(recipe.model.base, Scratch) or job.teacher is not None
    if early:
        check_before_start(job)
    with open_source_of(recipe, True) as base:
        if recipe.plain:
            open_run(job, None)
            run.note_base(Path(base))
            Path(base).rename(run.converted)
            job.say(f"{Path(base).name} keeps its softmax: no layer is converted")
            return
        plan, source, natives = plan_base(recipe, base, say=job.say)
        job.refine(Base((plan, source, natives), None))
        if not early:
            check_before_start(job)
        if kind_of(job.model) != "images":
            check_tokens_of(recipe, load_tokenizer(source.folder, job.trust))
        if left := unread(source):
            job.say(UNREAD.format(", ".join(left)))
        open_run(job, None)
        say_rounding(plan, job.say)
        for choice in (plan.choice, plan.heads_choice):
            if choice is not None and choice.scores:
                job.say(choice.scored())
        if plan.window_choice is not None:
            job.say(plan.window_choice.measured())
        target, trust = run.converted, job.trust
        convert(plan, source, natives, target, level="none", trust_remote_code=trust, seed=recipe.seed, say=say_nothing)
        if recipe.finish.verify:
            job.meanwhile(lambda: verify(target, "keys", source, plan, trust))
    run.note_base(run.converted)


def check_tokens_of(recipe: Recipe, tokenizer: Any) -> None:
    """Raise LinearizeError for texts of a recipe that this tokenizer makes nothing of: too short, or conversations
    without a template for them."""

    def check(text: TextSource, sft: bool) -> None:
        check_enough(text, tokenizer)
        check_chats(text, tokenizer, sft=sft)

    check_text(recipe, check)
    for stage in recipe.stages:
        for source in own_texts(recipe.data_for(stage)):
            if source.teacher.prompts == CHAT:
                find_prompts(source.teacher, None, tokenizer)


def versions() -> dict[str, str]:
    """Versions of what a run depends on."""
    packages = ("torch", "transformers", "accelerate", "peft")
    return {"linearize": __version__, **{name: importlib.metadata.version(name) for name in packages}}
