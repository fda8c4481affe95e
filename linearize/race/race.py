"""`linearize race`, the story: plan the contestants, train each by the ordinary finetune, measure all alike.

A plan is a value, made before anything is written. Each contestant is one recipe or several in a row, and each recipe
has a run's folder in that of the race. So a race that was stopped goes on: finished runs are read, others resume.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.atomic import check_result, write_result
from ..convert import separate
from ..data.batches import kind_of, tokens_per_sample
from ..errors import CheckFailedError, Exit, IncompatibleError, LinearizeError, did_you_mean
from ..estimate.choose import as_before
from ..estimate.estimate import lora_targets
from ..finetune import finetune
from ..job.checks import data_hashes
from ..job.dry_run import dry_run
from ..job.resolve import resolve, say_nothing
from ..job.source import base_path
from ..job.start import versions
from ..measure.compare import EvalRequest, check_eval, check_measures, compare
from ..measure.generate import Loaded, load
from ..page.html import BEGINS
from ..page.race import Lane, race_page, results
from ..page.record import EVAL, RUN, RunRecord, read_run, whole
from ..plan.plan import some
from ..recipe.models import Scratch
from ..recipe.recipe import AttentionTransfer, LogitKL, Recipe, diff_resolved, weight_settings
from ..terminal.output import finite
from ..train.device import device_name
from ..train.runs import changes as changed
from ..train.runs import processes
from ..train.runtime import Say, stage_steps
from .methods import FEWEST, METHODS, Common, Method, budget, per_step

RESULT, PAGE = "race.json", "race.html"
# By which a result is known.
RESULT_BEGINS = '{"race": "'
ASKED = "asked"  # of a contestant's eval.json: what was measured


@dataclass(frozen=True)
class RaceRun:
    """One run of a contestant. `rehearsal` is the same on the original model, which is there before the race."""

    recipe: Recipe
    rehearsal: Recipe

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output_dir)


@dataclass(frozen=True)
class Contestant:
    """A method and its runs; the last one ends with the finished student."""

    method: Method
    legs: tuple[RaceRun, ...]

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def folder(self) -> Path:
        return self.legs[-1].folder

    @property
    def tokens(self) -> int:
        """Tokens that it trains on in all its runs."""
        return sum(tokens_of(leg.recipe) for leg in self.legs)


@dataclass(frozen=True)
class Race:
    """All contestants, of which those `chosen` run; `request` is what is measured of each."""

    folder: Path
    common: Recipe
    contestants: tuple[Contestant, ...]
    chosen: tuple[str, ...]
    request: EvalRequest

    @property
    def tokens(self) -> int:
        """Tokens of every contestant."""
        return self.contestants[0].tokens

    def asked(self) -> dict[str, Any]:
        """What decides the figures of an evaluation, as JSON has it."""
        data = self.common.data.model_dump(mode="json")
        read = {"eval": data["eval"], "pack": data["pack"], "max_tokens": self.common.eval.max_tokens}
        asked: dict[str, Any] = json.loads(json.dumps(asdict(self.request) | read))
        return asked

    def to_json(self) -> dict[str, Any]:
        """The plan, with the recipes of every contestant."""
        rows = [
            {
                "name": one.name,
                "chosen": one.name in self.chosen,
                **about(one.method),
                "tokens": one.tokens,
                "recipes": [leg.recipe.resolved() for leg in one.legs],
            }
            for one in self.contestants
        ]
        return {"race": str(self.folder), "tokens": self.tokens, "contestants": rows}


def about(method: Method) -> dict[str, str]:
    """A method in words."""
    return {"about": method.about, "source": method.source, "differs": method.differs}


# ---------------------------------------------------------------- the plan


def plan_race(
    recipe: Recipe, folder: Path, request: EvalRequest, only: Collection[str] = (), tokens: int | None = None
) -> Race:
    """What each contestant does, `tokens` of training each (None: those of the recipe), in `folder`.

    Raises LinearizeError: 2 for the recipe, a name that is no method, and a folder that holds another race or unequal
    tokens, 3 for a model that a method does not fit.
    """
    chosen = check_names(only)
    check_common(recipe)
    common = common_of(recipe, tokens)
    contestants = tuple(contestant(method, common, folder) for method in METHODS.values())
    check_tokens({one.name: one.tokens for one in contestants})
    race = Race(folder, recipe, contestants, chosen, request)
    check_folder(race)
    for one in contestants:
        for leg in one.legs if one.name in chosen else ():
            with resolve(leg.rehearsal) as job:
                _ = job.base  # raises for what does not fit
    return race


def check_names(only: Collection[str]) -> tuple[str, ...]:
    """The methods of these names in their usual order, all for none. Raises LinearizeError (exit 2)."""
    for name in only:
        if name not in METHODS:
            near = did_you_mean(name, METHODS)
            raise LinearizeError(f"--only {name}: no contestant has that name.{near} Known: {', '.join(METHODS)}")
    return tuple(name for name in METHODS if not only or name in only)


def check_common(recipe: Recipe) -> None:
    """Raise LinearizeError: 2 for a recipe that cannot be the common one, 3 for several processes."""
    if processes() > 1:
        raise IncompatibleError("a race runs in one process: start it without a launcher")
    problem = ""
    if isinstance(recipe.model.base, Scratch):
        problem = "model.base is a random model. Name one that was trained"
    elif recipe.convert is None:
        problem = "convert is null. Name the mechanism that contestants share, for example convert={mechanism: gsa}"
    elif recipe.teacher is not None:
        problem = "teacher is set, and all contestants learn from the model that is converted. Leave it out"
    elif [type(stage) for stage in recipe.stages] != [AttentionTransfer, LogitKL]:
        kinds = ", ".join(stage.kind for stage in recipe.stages)
        problem = f"its stages are {kinds}. Give attention_transfer, then logit_kl, from which methods are made"
    elif not all(budget(recipe, place) for place in (0, 1)):
        problem = "a stage lasts for epochs. Give both tokens or steps, so that contestants get as many"
    elif recipe.eval.patience is not None:
        problem = "eval.patience may end a contestant early, and tokens would not be equal. Set it to null"
    elif recipe.finish.push is not None:
        problem = "finish.push would upload every contestant. Set it to null; linearize push uploads the winner"
    if problem:
        raise LinearizeError(f"the recipe of a race: {problem}")
    check_eval(recipe)


def common_of(recipe: Recipe, tokens: int | None) -> Common:
    """What contestants share, of the model's config alone. Raises LinearizeError: 2 for few tokens, 3 for a model that
    writes no text."""
    step = per_step(recipe, 1)
    asked = tokens or budget(recipe, 0) + budget(recipe, 1)
    steps = math.ceil(asked / step)
    if steps < FEWEST:
        raise LinearizeError(
            f"--tokens {asked}: that is {steps} optimizer steps of {step} tokens, and a contestant has up to {FEWEST} "
            f"stages. Give at least {FEWEST * step}, or a smaller stages.logit_kl.batch"
        )
    convert = {"keep_softmax": "", "keep_heads": "", "kept_window": None}
    resolved = recipe.resolved()
    with resolve(recipe.changed({**resolved, "convert": {**resolved["convert"], **convert}})) as job:
        plan, model = job.base.planned[0], job.model
    if kind_of(model) != "text":
        raise IncompatibleError(
            f"a race is for models that write text, and {type(model).__name__} writes none. Give another model"
        )
    layers = tuple(sorted({one.site.layer for one in plan.steps}))
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Common(recipe, steps, layers, lora_targets(model), longest)


def contestant(method: Method, common: Common, folder: Path) -> Contestant:
    """The recipes of a method, each in a run's folder within `folder`."""
    resolved = common.recipe.resolved()
    legs = list[RaceRun]()
    parts = method.parts(common)
    for number, part in enumerate(parts, 1):
        name = method.name if number == len(parts) else f"{method.name}-{number}"
        values = {**resolved, "name": name, "output_dir": str(folder / name), "stages": part.stages}
        rehearsal = common.recipe.changed({**values, "convert": part.whole})
        model = resolved["model"]
        if legs:  # goes on from the model before, learns from the original, and reads the text in another order
            values["seed"] = resolved["seed"] + len(legs)
            values["model"] = {**model, "base": str(legs[-1].folder / "final"), "revision": None, "dtype": None}
            values["teacher"] = {"model": model["base"]} | {
                key: model[key] for key in ("revision", "dtype", "trust_remote_code")
            }
        legs.append(RaceRun(common.recipe.changed({**values, "convert": part.convert}), rehearsal))
    return Contestant(method, tuple(legs))


def tokens_of(recipe: Recipe) -> int:
    """Tokens that a recipe trains on in one process: whole steps of every stage."""
    total = 0
    for stage in recipe.stages:
        length = tokens_per_sample(recipe.data_for(stage))
        steps = stage_steps(stage, stage.batch.blocks, length, None)
        total += (steps or 0) * stage.batch.blocks * length
    return total


def check_tokens(found: dict[str, int]) -> None:
    """Raise LinearizeError (exit 2) unless all contestants have the same number of tokens."""
    if len({*found.values()}) > 1:
        listed = ", ".join(f"{name} {tokens:,}" for name, tokens in found.items())
        raise LinearizeError(f"contestants of a race train on equal tokens, and these have {listed}")


def check_folder(race: Race) -> None:
    """Raise LinearizeError (exit 2) for what lies in the folder of a race and is not this race's."""
    base = Path(base_path(race.common)).expanduser()
    if base.is_dir() and not separate(base, race.folder):
        raise LinearizeError(f"{race.folder} and the model {base} must be separate folders. Choose another -o")
    check_result(race.folder / RESULT, RESULT_BEGINS, "race")
    check_result(race.folder / PAGE, BEGINS, "race")
    for one in race.contestants:
        for leg in one.legs:
            if (leg.folder / RUN).exists():
                check_same(leg)


def check_same(leg: RaceRun) -> None:
    """Raise LinearizeError (exit 2) for a run in the folder of a leg that has other tokens, text or settings."""
    other = "or another -o for a race of its own"
    run = read_run(leg.folder)
    recorded = run.recipe
    if recorded is None:
        raise LinearizeError(f"{leg.folder} is a run of another version of linearize. Give another -o")
    recipe = as_before(leg.recipe, leg.folder / RUN)  # which has what the device chose for auto
    before, now = tokens_of(recorded), tokens_of(recipe)
    if before != now:
        raise LinearizeError(
            f"tokens are not equal: {leg.folder} was begun with {before:,} tokens, and this race has {now:,} there. "
            f"Give the --tokens of before, {other}"
        )
    changes = diff_resolved(weight_settings(recorded.resolved()), weight_settings(recipe.resolved()))
    if changes:
        raise LinearizeError(
            f"{leg.folder} is of another race ({'; '.join(changes[:3])}{' ...' if len(changes) > 3 else ''}). Give "
            f"the recipe of before, {other}"
        )
    now_read = data_hashes(leg.recipe)
    with whole(leg.folder):
        text = changed(run.settings.get("data") or {}, now_read)
    if text:
        raise LinearizeError(
            f"{leg.folder} read other text: {some(text)} changed since it began, and contestants read the same. Give "
            f"the text of before, {other}"
        )


def estimated(race: Race) -> dict[str, float | None]:
    """Hours of training of each contestant, by the rates that the common recipe's two stages would have here; None
    where they are not known. From configs alone."""
    first, second = (row["tokens_per_s"] for row in dry_run(race.common, say_nothing)["stages"])
    found: dict[str, float | None] = {}
    for one in race.contestants:
        stages = [stage for leg in one.legs for stage in leg.recipe.stages]
        steps = [(stage.steps or 0, first if isinstance(stage, AttentionTransfer) else second) for stage in stages]
        known = first and second
        found[one.name] = sum(n * per_step(race.common, 1) / rate for n, rate in steps) / 3600 if known else None
    return found


# ---------------------------------------------------------------- the race


def run_race(race: Race, say: Say) -> dict[str, Any]:
    """Train and measure those chosen, and write race.json and race.html with all that are finished in the folder.

    Returns what race.json has. Raises LinearizeError as `finetune` and `compare` do; what is finished stays.
    """
    chosen = [one for one in race.contestants if one.name in race.chosen]
    teacher, before = None, None
    if any(evaluation(one, race) is None for one in chosen):
        teacher = opened(race, base_path(race.common), race.common.model.revision)
        check_measures(teacher, race.common, race.request)
    for number, one in enumerate(chosen, 1):
        done = " are trained already" * finished(one)
        say(f"contestant {number} of {len(chosen)}: {one.name}, {one.tokens:,} tokens{done}")
        new, began = not any(leg.folder.exists() for leg in one.legs), time.monotonic()
        try:
            for leg in one.legs:
                if not trained(leg):
                    finetune(leg.recipe, say=say)
        except LinearizeError as error:
            others = ",".join(other.name for other in chosen if other is not one)
            if error.code == Exit.INTERRUPTED or not others:
                raise
            then = f"What is trained stays; with --only {others} the same command leaves {one.name} out"
            raise LinearizeError(f"{one.name}: {error.message}. {then}", error.code) from error
        spent = time.monotonic() - began
        if teacher is not None and evaluation(one, race) is None:
            earlier = read_run(one.folder).evaluation or {}  # by other measures
            before = measured(one, race, teacher, spent if new else earlier.get("seconds"), before)
    lanes = [lane(one) for one in race.contestants if finished(one) and evaluation(one, race) is not None]
    check_tokens({one.name: one.tokens for one in lanes})
    found = {"race": str(race.folder), **results(lanes), ASKED: race.asked(), "versions": versions()}
    write_result(race.folder / RESULT, json.dumps(finite(found)) + "\n")
    write_result(race.folder / PAGE, race_page(lanes, found))
    say(f"wrote {race.folder / RESULT} and {race.folder / PAGE}")
    return found


def opened(race: Race, model: str, revision: str | None = None) -> Loaded:
    """A model to be measured, where the recipe trains."""
    common = race.common
    return load(
        model,
        revision,
        device=common.runtime.device,
        dtype=common.model.dtype or "keep",
        teacher=False,
        trust_remote_code=common.model.trust_remote_code,
    )


def measured(
    one: Contestant, race: Race, teacher: Loaded, seconds: float | None, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Write eval.json of a finished contestant, and return it; `seconds` is what its runs took, where they ran in one
    go. What the teacher did alone is taken from that of the contestant `before`."""
    student = opened(race, str(one.folder / "final"))
    base = str(race.common.model.base)
    result: dict[str, Any] = {"student": str(one.folder / "final"), "teacher": base, "seed": race.request.seed}
    result |= compare(student, teacher, race.common, race.request, before)
    result |= {ASKED: race.asked(), "seconds": seconds, "device": device_name(student.model.device)}
    if not math.isfinite(result["kl"]) or not math.isfinite(result["student_ppl"]):
        raise CheckFailedError(
            f"{one.name}: its student in {one.folder / 'final'} gives no finite numbers. Leave it out with --only, or "
            "lower its learning rates"
        )
    write_result(one.folder / EVAL, json.dumps(finite(result)) + "\n")
    return result


def trained(leg: RaceRun) -> bool:
    """Whether its run is finished."""
    return (leg.folder / RUN).exists() and read_run(leg.folder).finished


def finished(one: Contestant) -> bool:
    """Whether all runs of a contestant are."""
    return all(map(trained, one.legs))


def evaluation(one: Contestant, race: Race) -> dict[str, Any] | None:
    """Its eval.json; None where there is none that measured the same."""
    if not (one.folder / RUN).exists():
        return None
    found = read_run(one.folder).evaluation
    return found if found is not None and found.get(ASKED) == race.asked() else None


def lane(one: Contestant) -> Lane:
    """A contestant as its folders tell it."""
    runs: Sequence[RunRecord] = [read_run(leg.folder) for leg in one.legs]
    return Lane(one.name, tuple(runs), about(one.method))
