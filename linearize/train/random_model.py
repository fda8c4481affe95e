"""A model with random weights, as a folder like any other, for recipes that train from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from ..checkpoint.source import open_source
from ..convert import load_config
from ..data.batches import image_processor
from ..demo import named_base
from ..errors import Exit, LinearizeError, did_you_mean, reason_of
from ..measure.generate import load_tokenizer
from ..probe.probe import model_class_of
from ..probe.trace import quiet
from ..recipe.models import Scratch
from ..recipe.recipe import Recipe


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
