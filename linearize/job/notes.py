"""What a job tells people beside its figures: what is left, what is not held out, what to do next."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import read_plan
from ..checkpoint.source import read_json
from ..data.batches import tokens_per_sample
from ..data.images import count_images
from ..errors import LinearizeError
from ..estimate.estimate import StageCost, most_tokens_of
from ..estimate.memory import Rehearsal
from ..hub.download import unanswered
from ..hub.errors import shortly
from ..page.record import EVAL, FINAL
from ..plan.plan import Plan
from ..recipe.data import DatasetSource, FileSource, described, holds_images, local_paths, parts_of, unit_of
from ..recipe.recipe import Recipe
from ..terminal.output import duration, short
from ..train.progress import pace
from ..train.runs import START_OVER, Position, Run, converted_from, processes, read_position
from ..train.runtime import Say, stage_steps
from .checks import check_stage_order
from .resolve import as_resumed


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
        teacher = ["--teacher", "MODEL"] if unnamed else []  # of a folder the plan has the name without its place
        commands.append(["eval", final, "--recipe", run, "-o", run / EVAL, *teacher])
    commands += [] if recipe.finish.push is not None else [["push", final, "USER/NAME", "--dry-run"]]
    trust = ["--trust-remote-code"] * recipe.model.trust_remote_code
    return "; ".join(shlex.join(["linearize", *map(str, words), *trust]) for words in commands)


def resume_note(recipe: Recipe, run: Run, position: Position) -> str:
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


def note_of_run(recipe: Recipe, resume: str, only: str | None, max_steps: int | None) -> str:
    """What a real run would do with the run that its folder has already: refuse it, by the checks of `finetune`, leave
    it as it is, go on with it or start it over. Empty where there is none."""
    try:
        run = Run(as_resumed(recipe, resume), resume, max_steps)
        if not run.record.exists():
            return ""
        if run.finished:
            return f"note: {run.final} is finished already, and a real run trains nothing. {START_OVER}"
        check_stage_order(run.recipe, run, only)
        if resume == "never":
            return f"note: {run.folder} has a run already, and a real run with `--resume never` starts it over"
        if run.resume_from is None:
            return f"note: {run.folder} has a run without a checkpoint, and a real run begins its training again"
        left = resume_note(run.recipe, run, read_position(run.resume_from))
        return f"note: a real run continues this one: {left}. {START_OVER}"
    except LinearizeError as error:
        return f"note: a real run in {recipe.output_dir} is refused: {error.message}"


def loading_dtype_note(recipe: Recipe, rehearsal: Rehearsal) -> str:
    """A note where `model.dtype` rounds the weights of a converted folder for training; the result has the folder's
    dtype. Empty where it does not."""
    kept, loaded = (str(dtype).removeprefix("torch.") for dtype in (rehearsal.stored_dtype, rehearsal.dtype))
    if kept == loaded or loaded != recipe.model.dtype:
        return ""
    return (
        f"training loads its {kept} weights as {loaded} (model.dtype), and the result is saved in {kept}, as "
        "the folder is (linearize convert --dtype casts); model.dtype=null loads them as they are"
    )


def data_summary(recipe: Recipe, cost: StageCost) -> dict[str, Any]:
    """What a stage reads: `train` and `eval` by their names, and `seq_len`, `tokens`, `eval_tokens`, which it asks for;
    an image counts as one token, and `tokens` is None where epochs ask for as many as there are. `passes`, where files
    are short: how often at least the stage reads them. `foreign_eval`, where it trains on files and is evaluated on a
    dataset, as a preset is whose `data.train` alone was replaced."""
    data, held = recipe.data_for(cost.stage), recipe.eval.max_tokens
    if holds_images(data.eval) and (known := count_images(data.eval, recipe.folder)) is not None:
        held = min(held, known)
    most = most_tokens_of(data.train, recipe.folder)
    facts: dict[str, Any] = {}
    if cost.tokens is not None and cost.tokens > most > 0:
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


def unreachable_data_note(recipe: Recipe) -> str:
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


def say_rounding(plan: Plan, say: Say) -> None:
    """Say where the result has another dtype than the source, and what keeps it."""
    if plan.rounding:
        say(f"{plan.rounding}; model.dtype=null keeps {plan.source_dtype}")
