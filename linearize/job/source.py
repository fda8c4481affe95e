"""Where the model of a recipe comes from: a folder, the Hub, a random one; and the conversion that is planned of it."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoint.atomic import scratch_beside
from ..checkpoint.carried import check_carried
from ..checkpoint.manifest import plan_of_resaved, read_plan
from ..checkpoint.source import Source, open_source
from ..choose.choose import Scoring, choosers
from ..convert import plan_conversion
from ..demo import named_base
from ..errors import LinearizeError, existing_folder
from ..recipe.data import TeacherSource, holds_images, parts_of
from ..recipe.models import Convert, Scratch
from ..recipe.recipe import Recipe
from ..train.device import on_cpu
from ..train.random_model import write_random
from ..train.runtime import Say, to_source

# Option of `linearize convert` -> the key in a recipe's `convert`.
KEYS = {"to": "mechanism", "layers": "layers", "keep-softmax": "keep_softmax", "keep-heads": "keep_heads"}
KEYS |= {"kept-window": "kept_window", "allow-drop": "allow_drop", "score-by": "score_by"}
# With the blank before a value, which is no word of a sentence.
OPTION = re.compile(rf"--({'|'.join(KEYS)})\b( (?!(?:is|and|or|names)\b))?")
CONSENT = re.compile(r"--allow-drop \w+(?: --allow-drop \w+)*")


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
