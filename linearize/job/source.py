"""Where the model of a recipe comes from: a folder, the Hub, a random one; and the conversion that is planned of it."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from ..checkpoint.atomic import scratch_beside
from ..checkpoint.carried import check_carried
from ..checkpoint.manifest import plan_of_resaved, read_plan
from ..checkpoint.source import Source, open_source
from ..choose.choose import Scoring, choosers
from ..convert import load_config, plan_conversion
from ..data.batches import image_processor
from ..demo import named_base
from ..diffusion import convert as latents
from ..diffusion.recipe import DiffusionRecipe
from ..errors import Exit, IncompatibleError, LinearizeError, did_you_mean, existing_folder, reason_of
from ..measure.generate import load_tokenizer
from ..probe.probe import model_class_of
from ..probe.trace import quiet
from ..recipe.data import TeacherSource, holds_images, parts_of
from ..recipe.models import Convert, Scratch
from ..recipe.recipe import Recipe
from ..train.device import on_cpu
from ..train.runs import Run
from ..train.runtime import Say, to_source

# Option of `linearize convert` -> the key in a recipe's `convert`.
KEYS = {"to": "mechanism", "layers": "layers", "keep-softmax": "keep_softmax", "keep-heads": "keep_heads"}
KEYS |= {"kept-window": "kept_window", "allow-drop": "allow_drop", "score-by": "score_by"}
# With the blank before a value, which is no word of a sentence.
OPTION = re.compile(rf"--({'|'.join(KEYS)})\b( (?!(?:is|and|or|names)\b))?")
CONSENT = re.compile(r"--allow-drop \w+(?: --allow-drop \w+)*")


class Base(NamedTuple):
    """What a job starts from: a conversion that is `planned`, as `plan_conversion` returns it, or a `folder`. `source`
    is where the folder of a model that was converted before comes from."""

    planned: Any
    folder: Path | None
    source: Source | None = None


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


def converted_base(recipe: Recipe, commit: str | None = None, *, weights: bool = True) -> Source:
    """A base that was converted before; from the Hub, with its `weights`, when there is none here.

    Raises LinearizeError (exit 3) for a base that linearize did not write, or half of which was copied.
    """
    source = open_source(base_path(recipe), commit or recipe.model.revision, weights=weights)
    if plan_of_resaved(source.folder) is None:
        read_plan(source.folder)
    if weights:
        check_carried(source.folder)
    return source


def plan_base(recipe: Recipe, base: str | None = None, *, weights: bool = True, say: Say = print) -> Any:
    """The conversion that the recipe asks for, as `plan_conversion` returns it, of the model at `base` (None: the one
    that it names)."""
    how = recipe.convert
    assert how is not None
    scored = choosers(scoring_of(recipe, how, say)) if weights else {}
    with named_by_keys():
        asked = asked_of(recipe, how)
        return plan_conversion(base or base_path(recipe), how.mechanism, weights=weights, **scored, **asked)


def base_of_latents(recipe: DiffusionRecipe, run: Run | None) -> Base:
    """What a job of latents starts from. Raises LinearizeError: 3 for no folder of diffusers, and as planning."""
    base, asked = recipe.model.base, recipe.convert
    if not latents.holds_diffusers(base):
        message = f"model.base {base} is no folder of a pipeline or transformer of diffusers"
        raise IncompatibleError(f"{message}, which latents are for")
    if asked is None:
        return Base(None, Path(base).expanduser())
    if run is not None and run.has_converted:
        return Base(None, run.converted)
    with named_by_keys():
        planned = latents.plan_conversion(base, asked.mechanism, **asked_of(recipe, asked))
    latents.check_one(base, [part.name for part in planned[2]])
    latents.check_inputs(base, planned[2][0].model)
    return Base(planned, None)


@contextlib.contextmanager
def named_by_keys() -> Iterator[None]:
    """Errors of a plan name options of `linearize convert`; within, they name the keys of a recipe in their place."""
    try:
        yield
    except LinearizeError as error:
        consent = CONSENT.sub(
            lambda found: f"'convert.allow_drop=[{', '.join(found[0].split()[1::2])}]'", error.message
        )
        error.message = OPTION.sub(lambda found: f"convert.{KEYS[found[1]]}" + "=" * bool(found[2]), consent)
        error.args = (error.message,)
        raise


def asked_of(recipe: Any, how: Convert) -> dict[str, Any]:
    """What a recipe, also one of latents, asks of a conversion, as arguments of `plan_conversion`."""
    return {
        "layers": how.layers,
        "keep_softmax": how.keep_softmax,
        "keep_heads": how.keep_heads,
        "kept_window": how.kept_window,
        "options": how.options,
        "allow_drop": how.allow_drop,
        "dtype": getattr(recipe.model, "dtype", None) or "keep",
        "copy": how.copy_weights,
        "revision": getattr(recipe.model, "revision", None),
        "trust_remote_code": recipe.model.trust_remote_code,
    }


def scoring_of(recipe: Recipe, convert: Convert, say: Say) -> Scoring:
    """How `auto` compares layers and heads: on the text of the first stage, in its rows. Not with its seed, so that
    `convert` chooses the same on the same text in rows of the same length."""
    data = recipe.data_for(recipe.stages[0])
    device = "cpu" if on_cpu(recipe) else "cuda"
    if holds_images(data.train):
        return Scoring(convert.score_by, data.train, device=device, folder=recipe.folder, say=say)
    first, _ = parts_of(data.train)[0]
    if isinstance(first, TeacherSource):  # nothing is written before the conversion
        return Scoring(convert.score_by, seq_len=data.pack.seq_len, device=device, say=say)
    text = to_source(first, data.pack.text_key, recipe.folder)
    return Scoring(convert.score_by, text, data.pack.seq_len, data.pack.rows == "texts", device=device, say=say)


# ---------------------------------------------------------------- random models


def write_random(recipe: Recipe, place: Path, weights: bool) -> Path:
    """Write a recipe's random model with its tokenizer, or its image processor, into a new folder of `place`, and
    return that; without `weights` its config alone. The recipe's seed decides the weights.

    Raises LinearizeError: 2 for a config that is wrong, 3 for an architecture without a class.
    """
    base = recipe.model.base
    assert isinstance(base, Scratch)
    config, trust = config_of(base, recipe.model.trust_remote_code), recipe.model.trust_remote_code
    kind = model_class_of(config)
    config.architectures = [kind.__name__]
    dtype = getattr(torch, recipe.model.dtype or "float32")
    config.dtype = dtype
    folder = place / f"random-{config.model_type}"
    if not weights:
        config.save_pretrained(folder)
        return folder
    images = kind.main_input_name == "pixel_values"
    tokenizer = (base.processor if images else base.tokenizer) or (
        base.config if isinstance(base.config, str) else None
    )
    found: Any = None
    if images and tokenizer is not None:
        found = image_processor(named_base(tokenizer), trust)
    elif tokenizer is not None:
        found = load_tokenizer(Path(named_base(tokenizer)), trust)
        if len(found) > config.get_text_config().vocab_size:
            raise LinearizeError(
                f"model.base: the tokenizer has {len(found)} tokens, the config vocab_size="
                f"{config.get_text_config().vocab_size}. Raise it"
            )
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(recipe.seed)
        try:
            model = kind(config)
        except Exception as error:  # sizes that do not fit together; architectures raise as they like
            raise LinearizeError(f"model.base.config makes no {kind.__name__}: {reason_of(error)}") from error
        model.to(dtype).save_pretrained(folder)
    if found is not None:
        found.save_pretrained(folder)
    return folder


def config_of(base: Scratch, trust_remote_code: bool) -> Any:
    """The config of a random model."""
    if isinstance(base.config, str):
        return load_config(open_source(named_base(base.config), None, weights=False), trust_remote_code)
    given: dict[str, Any] = dict(base.config)
    known = [*transformers.CONFIG_MAPPING]
    kind = given.pop("model_type", None)
    if kind not in known:
        hint = did_you_mean(str(kind), known)
        raise LinearizeError(f"model.base.config: model_type is {kind!r}, no type of transformers.{hint}")
    defaults = {**transformers.CONFIG_MAPPING[kind]().to_dict(), "num_labels": 2}
    for name in given:
        if name not in defaults:
            raise LinearizeError(f"model.base.config: {kind} has no {name}.{did_you_mean(name, defaults)}")
    try:
        return transformers.CONFIG_MAPPING[kind](**given)
    except Exception as error:  # validators of architectures raise as they like
        raise LinearizeError(f"model.base.config: {reason_of(error)}", Exit.USAGE) from error
