"""Load a recipe: YAML in, validated value out.

`load_recipe` reads a file, applies `key.sub=value` overrides and reports all mistakes at once, each with its
position. models.py says what a recipe may hold, yaml.py where in the file everything stands.
Relative data files start at the recipe's folder (`Recipe.folder`); `model.base` and `output_dir` start at the
working directory, as on the command line.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from ..errors import LinearizeError, did_you_mean, leaves, redact
from ..plan.mechanisms import check_name
from .data import SOURCES, TeacherSource, parts_of
from .models import NAMED, RANDOM, SFT, AttentionTransfer, Convert, FeatureCosine, LogitKL, Recipe, Stage
from .presets import presets, recipe_path, recipes_folder
from .renamed import GONE
from .types import ParentError, Strict
from .yaml import Document, Keys, dotted, shown

__all__ = [
    "SFT",
    "AttentionTransfer",
    "FeatureCosine",
    "LogitKL",
    "Recipe",
    "Stage",
    "diff_resolved",
    "fixed",
    "load_recipe",
    "per_step",
    "portable",
    "weight_settings",
]

# What changes no weight, and may differ from the run's own recipe whenever it goes on.
FREE = ("checkpoint", "eval", "track", "finish", "output_dir")
# What may differ when a checkpoint is named: nothing that decides what is in it.
CHANGEABLE = ("runtime", *FREE)
CHANGEABLE_IN_STAGE = ("optimizer", "schedule")

# What pydantic puts into an error's path to tell a union's members apart.
_TAGGED: dict[str, type[Strict]] = {
    "attention_transfer": AttentionTransfer,
    "logit_kl": LogitKL,
    "feature_cosine": FeatureCosine,
    "sft": SFT,
    **SOURCES,
}

# pydantic's error types, as the end of "must be ..."
_DUE = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "tuple_type": "a list",
    "greater_than": "> {gt:g}",
    "greater_than_equal": ">= {ge:g}",
    "less_than": "< {lt:g}",
    "less_than_equal": "<= {le:g}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of {max_length}",
    "string_too_short": "some text",
}


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, a file or a preset's name, and apply overrides such as `stages.logit_kl.optimizer.lr=1e-4`.

    Raises LinearizeError with a line per mistake: `gsa.yaml:14:5 stages[1].optimizer.lrr: unknown key. ...`.
    """
    path = recipe_path(recipe)
    loaded: Recipe = validated(document := Document(path, overrides), path.parent, Recipe)
    rules = (_stage_rules, _mixing_rules, _teacher_rules, _own_text_rules, _plain_rules, _option_rules)
    broken = [found for rule in rules for found in rule(loaded)]
    options = [keys for keys, _ in broken if keys[:2] == ("convert", "options") and not document.overridden(keys)]
    left_over = options if document.overridden(("convert", "mechanism")) else []
    for keys, text in broken:
        if keys not in left_over:
            document.problem(keys, text)
    if loaded.convert is not None and left_over:
        text = _replace_options(loaded.convert, [str(keys[-1]) for keys in left_over])
        document.problem(("convert", "options"), text)
    document.check()
    # A preset names no files of its own: those of its overrides start where the person who gives them is.
    loaded._folder = Path() if path.parent == recipes_folder() else path.parent
    return loaded


def validated(document: Document, folder: Path, kind: type[Strict]) -> Any:
    """The value of a recipe in `folder`, as `kind` has it. Raises LinearizeError with a line per mistake."""
    document.substitute("name")
    for keys, text in _name_clashes(document.data.get("stages")):
        document.problem(keys, text)
    for keys, value in leaves(document.data):
        if isinstance(value, str) and redact(value) != value:
            document.problem(keys, "holds an access token or a password, and recipes are stored. Use HF_TOKEN instead")
    found: Any = None
    try:
        found = kind.model_validate(document.data, context={"folder": folder})
    except ValidationError as error:
        for one in error.errors():
            _report(document, one, kind)
    document.check()
    return found


def later_base(recipe: str | Path, overrides: Sequence[str]) -> list[str]:
    """An override that stands in for the model that a recipe leaves to the command line; empty where it names one.

    Presets, and copies of them, name no model.
    """
    model = Document(recipe_path(recipe), overrides).data.get("model")
    return ["model.base=DIR"] if isinstance(model, dict) and "base" not in model else []


def trains_source(parts: Collection[str]) -> bool:
    """Whether what a stage trains has weights of the source in it, adapters apart."""
    return not {"mixer", "all"}.isdisjoint(parts)


def _name_clashes(stages: Any) -> Iterator[tuple[Keys, str]]:
    """Stages that share a name. Looked for before validation, so that other mistakes do not hide them."""
    first: dict[str, int] = {}
    for i, stage in enumerate(stages if isinstance(stages, list) else ()):
        name = stage.get("name", stage.get("kind")) if isinstance(stage, dict) else None
        if isinstance(name, str) and first.setdefault(name, i) != i:
            yield (("stages", i, "name"), f"{name!r} names stages[{first[name]}] already; give each stage its own")


def _stage_rules(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """Rules about several stages."""
    drifted, lora = None, None
    for i, stage in enumerate(recipe.stages):
        if stage.name in ("teacher", "converted"):
            yield ("stages", i, "name"), f"{stage.name!r} is what metrics call the start of a run"
        if isinstance(stage, AttentionTransfer) and drifted:
            yield (
                ("stages", i),
                f"transfers attention after {drifted} trained source weights: the residual stream is no longer "
                "the teacher's. Put attention_transfer first",
            )
        if trains_source(stage.train):
            drifted = stage.name
        if lora is not None and stage.lora not in (None, lora):
            yield ("stages", i, "lora"), "differs from an earlier stage's; a run has one set of adapters"
        lora = stage.lora or lora


def _mixing_rules(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """Images are mixed with others of the same pass."""
    data = recipe.data
    for i, stage in enumerate(recipe.stages):
        if (data.mixup or data.cutmix) and stage.batch.per_device < 2:
            text = "must be >= 2: data.mixup and data.cutmix mix images of one pass. Set it to 64, or leave them out"
            yield ("stages", i, "batch", "per_device"), text


def _teacher_rules(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """Stages that a teacher other than the source cannot serve."""
    if recipe.teacher is None:
        return
    if not any(stage.learns_logits for stage in recipe.stages):
        yield ("teacher",), "no stage learns a teacher's logits: add logit_kl, or leave teacher out"
    for i, stage in enumerate(recipe.stages):
        if isinstance(stage, FeatureCosine):
            yield ("stages", i), "compares hidden states with the source's own, so teacher has no use: leave it out"


def _own_text_rules(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """Text that a teacher writes itself needs a teacher with weights."""
    places: list[tuple[Keys, Any]] = [(("data",), recipe.data.train)]
    places += [(("stages", i, "data"), stage.data.train) for i, stage in enumerate(recipe.stages)]
    for keys, source in places:
        if not any(isinstance(part, TeacherSource) for part, _ in parts_of(source)):
            continue
        if recipe.teacher is None and recipe.plain:
            yield (*keys, "train"), "has a teacher write, and a random model has none: name one, or give files"


def _plain_rules(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """What a random model that keeps its softmax cannot do: it has no mixers, and nothing to compare them with."""
    if not recipe.plain:
        return
    for i, stage in enumerate(recipe.stages):
        if isinstance(stage, AttentionTransfer | FeatureCosine):
            yield ("stages", i), "compares with the base's softmax, which this model keeps: use sft, or add convert"
        elif stage.learns_logits and recipe.teacher is None:
            yield ("stages", i), "a random model that keeps its softmax has no teacher: use sft, or name a teacher"
        if stage.train != ("all",):
            yield ("stages", i, "train"), "must be all: a random model that keeps its softmax has no other parameters"
    if recipe.finish.push is not None:
        yield ("finish", "push"), "sends models with linear layers alone. hf upload sends this one"


def _option_rules(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """A mechanism that there is, and its options one by one."""
    if recipe.convert is None:
        return
    mechanism = recipe.convert.mechanism
    try:
        check_name(mechanism)
    except LinearizeError as error:
        yield ("convert", "mechanism"), error.message
        return
    from ..plan.plan import make_steps

    # `base` first, for others may belong to it.
    options = dict(sorted(recipe.convert.options.items(), key=lambda item: item[0] != "base"))
    base: dict[str, Any] = {}
    for option, value in options.items():
        try:
            make_steps([], mechanism, {**base, option: value})
            base |= {option: value} if option == "base" else {}
        except LinearizeError as error:
            name = option.partition("@")[0]
            text = error.message.removeprefix(f"{name}={value}: ").removeprefix(f"{name}: ").removeprefix(f"{option}: ")
            yield ("convert", "options", option), text


def _replace_options(convert: Convert, unknown: Collection[str]) -> str:
    """What to do where a file has the options of another mechanism than the command line names."""
    mechanism = convert.mechanism
    own = {option: value for option, value in convert.options.items() if option not in unknown}
    known = yaml.safe_dump(own, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    shipped = any(preset.name == mechanism for preset in presets())
    start = f"Start from the preset {mechanism}, or replace" if shipped else "Replace"
    return f"{mechanism} does not take {', '.join(unknown)}. {start} all options: 'convert.options={known}'"


def _report(document: Document, error: Mapping[str, Any], root: type[Strict]) -> None:
    """Note one of pydantic's errors at its place in the document."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "default_factory_not_called" or (kind == "too_short" and error["input"]):
        return  # echoes of other errors: a default made from an invalid field, a list of invalid entries
    keys, known = _place(error["loc"], root)
    if kind.startswith("union_tag"):
        keys = (*keys, context["discriminator"].strip("'"))
    elif isinstance(context.get("error"), ParentError):
        keys = keys[:-1]
    document.problem(keys, _mistake(error, keys, known), at_key=kind == "extra_forbidden")


def _place(path: Sequence[str | int], root: type[Strict]) -> tuple[Keys, Collection[str]]:
    """The keys of an error's path without the union tags among them, and what its last mapping may hold."""
    keys: Keys = ()
    model: type[Strict] | None = root
    holder: type[Strict] | None = None
    tagged: dict[str | int, type[Strict]] = {}
    for part in path:
        if part in (NAMED, RANDOM):
            continue
        if part in tagged:
            model, tagged = tagged[part], {}
            continue
        keys = (*keys, part)
        if isinstance(part, str):
            holder = model
            field = holder.model_fields.get(part) if holder else None
            found = list(_models_in(field.annotation)) if field else []
            model = found[0] if len(found) == 1 else None
            tagged = {tag: kind for tag, kind in _TAGGED.items() if kind in found and len(found) > 1}
    return keys, holder.model_fields if holder else ()


def _models_in(annotation: Any) -> Iterator[type[Strict]]:
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _mistake(error: Mapping[str, Any], keys: Keys, known: Collection[str]) -> str:
    """One of pydantic's errors in the words of recipes; `known` are the keys of the mapping around `keys`."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        if gone := GONE.get(keys[-2:]):
            return gone
        near = did_you_mean(str(keys[-1]), known)
        if not near and len(keys) == 1 and str(keys[0]).isidentifier():
            near = f" An option of the mechanism is convert.options.{keys[0]}, as --set is of linearize convert."
            near += f" Known: {', '.join(known)}"
        return f"unknown key.{near or ' Known: ' + ', '.join(known)}"
    if kind in ("missing", "union_tag_not_found"):
        return f"missing; set it in the file or with {dotted(keys)}=..."
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}, not {shown(value)}"
    if kind in _DUE:
        found = f"one of {len(value)}" if kind in ("too_short", "too_long") else shown(value)
        quote = " (quote it)" if kind == "string_type" and isinstance(value, int | float) else ""
        return f"must be {_DUE[kind].format(**context)}, not {found}{quote}"
    if kind in ("literal_error", "union_tag_invalid"):
        expected = context.get("expected") or context["expected_tags"]
        choices = [word.strip("'").lower() for word in re.findall(r"'[^']*'|True|False", expected)] or [expected]
        value = value if kind == "literal_error" else value[keys[-1]]
        if gone := GONE.get((keys[-1], str(value))):  # a list has no hash
            return gone
        near = did_you_mean(str(value), choices)
        return f"must be {' | '.join(choices)}, not {shown(value)}{near and '.' + near}"
    message = str(context.get("error") or error["msg"])
    if kind == "rule" and isinstance(value, dict) and len(given := [key for key in value if key in SOURCES]) > 1:
        # As of a preset's `path` with an override of `files`.
        message += f", not {' and '.join(given)}. Replace it whole: {dotted(keys)}={{{given[-1]}: ...}}"
    return message


def per_step(resolved: dict[str, Any], processes: int) -> dict[str, Any]:
    """A resolved recipe with the blocks of a whole optimizer step in place of what divides them."""
    stages = [dict(stage) for stage in resolved["stages"]]
    for stage in stages:
        batch = stage.pop("batch")
        stage["blocks_per_step"] = batch["per_device"] * batch["gradient_accumulation_steps"] * processes
    return {**resolved, "stages": stages}


def weight_settings(resolved: dict[str, Any]) -> dict[str, Any]:
    """A resolved recipe without what changes no weight; when a stage ends is kept."""
    kept = {key: value for key, value in resolved.items() if key not in FREE}
    runtime = {key: value for key, value in resolved["runtime"].items() if key != "workers"}  # they change no number
    return {**kept, "runtime": runtime, "eval": {"patience": resolved["eval"].get("patience")}}


def fixed(resolved: dict[str, Any]) -> dict[str, Any]:
    """A resolved recipe without what may change at a named checkpoint."""
    stages = [{k: v for k, v in stage.items() if k not in CHANGEABLE_IN_STAGE} for stage in resolved["stages"]]
    for stage, of in zip(stages, resolved["stages"], strict=True):
        stage["optimizer"] = {"memory": of["optimizer"].get("memory", "full")}  # moments of one kind are no others
    return {**{k: v for k, v in resolved.items() if k not in CHANGEABLE}, "stages": stages}


def diff_resolved(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed between two resolved recipes, a line each: `stages[0].optimizer.lr 1e-3 -> 1e-2`."""
    return list(_changes(old, new, ()))


def _changes(old: Any, new: Any, keys: Keys) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        before, after = dict(old), dict(new)
    elif _is_nested(old) and _is_nested(new):
        before, after = dict(enumerate(old)), dict(enumerate(new))
    else:
        if old != new:
            yield f"{dotted(keys)} {_compact(old)} -> {_compact(new)}"
        return
    for key in before | after:
        child = (*keys, key)
        if key not in after:
            yield f"{dotted(child)} removed (was {_compact(before[key])})"
        elif key not in before:
            yield f"{dotted(child)} added ({_compact(after[key])})"
        else:
            yield from _changes(before[key], after[key], child)


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _compact(value: Any) -> str:
    """JSON, cut short, with small numbers as recipes write them: 1e-3."""
    if isinstance(value, float) and 0 < abs(value) <= 0.01:
        digits = next(text for n in range(18) if float(text := f"{value:.{n}e}") == value)
        return re.sub(r"e-0?", "e-", digits)
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def portable(value: Any) -> Any:
    """A recipe as others may see it: of paths on this machine only the last part."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [portable(item) for item in value]
    return Path(value).name if isinstance(value, str) and (os.path.isabs(value) or value.startswith("~")) else value
