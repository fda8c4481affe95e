"""Inputs for one forward pass of any model, and its outputs.

This folder is copied to clean processes; nothing outside it may be imported here.

Letters: B batch, T tokens.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from typing import Any

import torch
from torch import Tensor

# The most tokens of a prompt that proves decoding.
LONGEST = 200


def auto_class(config: Any) -> str:
    """The Auto class that loads a checkpoint with its head: what its own code is registered for, else causal."""
    entries, heads = getattr(config, "auto_map", None) or {}, config.architectures or [""]
    models = {name: where for name, where in entries.items() if name.startswith("AutoModel")}
    return next(
        (name for name, where in models.items() if where.rpartition(".")[2] == heads[0]), "AutoModelForCausalLM"
    )


def keep_first(config: Any, layers: int) -> Any:
    """The config of the model without what follows its first `layers` layers, where `layers` is not 0."""
    text = config.get_text_config()
    if layers:
        whole = text.num_hidden_layers
        for name, value in vars(text).items():
            if isinstance(value, list) and len(value) == whole and name != "linearize":
                setattr(text, name, value[:layers])
        text.num_hidden_layers = layers
        if hasattr(config, "linearize"):
            config.linearize = first_of_plan(config.linearize, layers)
    return config


def first_of_plan(spec: dict[str, Any], layers: int) -> dict[str, Any]:
    """What a plan in config.json says of the first `layers` layers, where `layers` is not 0."""
    held = [layer for layer in spec["layers"] if not layers or layer["site"]["layer"] < layers]
    return {**spec, "layers": held}


def writes_text(model: Any) -> bool:
    """Whether it continues a text: it generates, and not from what an encoder makes of something else."""
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


def takes(model: Any) -> list[str]:
    """Which inputs a model gets here, the main one first; a model that writes text gets text alone."""
    names = inspect.signature(model.forward).parameters
    if "input_ids" in names and writes_text(model):
        return ["input_ids"]
    known = ("input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids")
    found = sorted((name for name in known if name in names), key=lambda name: name != model.main_input_name)
    return found or [model.main_input_name]  # of code that hands its arguments on


def make_inputs(model: Any, B: int = 2, T: int = 24) -> dict[str, Tensor]:
    """Fixed inputs of B rows: T token ids of text, images of the size that the config names, sound."""
    makers: dict[str, Any] = {"pixel_values": make_images, "input_features": make_features, "input_values": make_sound}
    inputs: dict[str, Tensor] = {}
    for name in takes(model):
        if name not in (*makers, "input_ids", "decoder_input_ids"):
            raise NotImplementedError(f"it takes {name}, and there is nothing of that kind to try it with")
        # A decoder gets fewer tokens than its encoder, so that attention to the encoder's shows.
        short = name == "decoder_input_ids" and T > 1
        made = makers[name](model, B) if name in makers else make_tokens(model, B, T - short)
        inputs |= {name: made} if isinstance(made, Tensor) else made
    return inputs


def tokens_of(model: Any, wanted: int) -> int:
    """`wanted` tokens of text, or as many as the model takes."""
    config = model.config.get_text_config()
    return min(wanted, (getattr(config, "max_position_embeddings", None) or wanted + 2) - 2)


def most_tokens(model: Any) -> int | None:
    """How many tokens a model takes at most: those that its table of positions has rows for; None where there is no
    table, as with rotary embeddings, which reach as far as they are asked to."""
    rows: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if rows is None:
        return None
    try:
        words = model.get_input_embeddings()
    except NotImplementedError:  # some models of two towers do not say which is meant
        words = None
    for part in model.modules():
        if isinstance(part, torch.nn.Embedding) and part is not words and rows <= part.num_embeddings <= rows + 2:
            # OPT and others have two rows more; RoBERTa has not, and begins behind the row of padding.
            return rows if part.padding_idx is None else part.num_embeddings - part.padding_idx - 1
    return rows if any(table.ndim == 2 and len(table) == rows for table in model.buffers()) else None


def reach_of(config: Any) -> int:
    """How many tokens the largest window of the linear layers sees, with the first ones; 0 where there is none."""
    options = [layer["options"] for layer in config.linearize["layers"]]
    return max((one.get("window", 0) + one.get("sink", 0) for one in options), default=0)


def proof_length(config: Any, least: int, steps: int, longest: int = LONGEST) -> int:
    """How many tokens a prompt has that proves decoding, `steps` following it: `least`, or enough that tokens have left
    every window, up to `longest` and the positions of the model."""
    places = getattr(config.get_text_config(), "max_position_embeddings", None) or longest + steps
    return int(max(1, min(max(least, reach_of(config) + 3), longest, places - steps)))


def make_tokens(model: Any, B: int, T: int) -> Tensor:
    """Token ids [B,T], past the special ones that vocabularies begin with (tiny ones have no others)."""
    vocab = min(model.config.get_text_config().vocab_size, 4096)
    first = 4 if vocab > 8 else 0
    return (torch.arange(B * T).reshape(B, T) * 7919 + 11) % (vocab - first) + first


def make_images(model: Any, B: int) -> dict[str, Tensor]:
    """Images [B,C,height,width], films [B,frames,C,height,width], or patches [B,N,C*p*p] and the grid of each image."""
    towers = (getattr(model.config, name, None) for name in ("vision_config", "image_config", "encoder"))
    config = next((tower for tower in towers if tower is not None), model.config)
    channels, patch = getattr(config, "num_channels", 3), getattr(config, "patch_size", 16)
    if "spatial_shapes" in inspect.signature(model.forward).parameters:
        side = math.isqrt(config.num_patches)
        return {
            "pixel_values": noise(B, side * side, channels * patch * patch),
            "pixel_attention_mask": torch.ones(B, side * side, dtype=torch.long),
            "spatial_shapes": torch.full((B, 2), side),
        }
    size = getattr(config, "image_size", None) or 64
    size = tuple(size.values()) if isinstance(size, dict) else size
    height, width = (size, size) if isinstance(size, int) else size[-2:]
    frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
    return {"pixel_values": noise(B, *frames, channels, height, width)}


def taller_images(model: Any, inputs: dict[str, Tensor]) -> dict[str, Any] | None:
    """`inputs` with images twice as high, and what asks a model for that; None where its images are of one size."""
    images = inputs.get("pixel_values")
    if images is None or images.ndim == 3:
        return None
    flat = images.flatten(0, -4)
    flat = torch.nn.functional.interpolate(flat, (flat.shape[-2] * 2, flat.shape[-1]))
    found: dict[str, Any] = {**inputs, "pixel_values": flat.reshape(*images.shape[:-2], *flat.shape[-2:])}
    known = inspect.signature(model.forward).parameters
    if "interpolate_pos_encoding" in known:
        found["interpolate_pos_encoding"] = True
    try:
        with torch.no_grad(), model.teacher() if hasattr(model, "teacher") else contextlib.nullcontext():
            model(**found)
    except Exception:  # as architectures say that a size is not theirs
        return None
    return found


def make_features(model: Any, B: int) -> Tensor:
    """Mel features [B,bins,frames], two frames a position, as Whisper takes them."""
    return noise(B, model.config.num_mel_bins, 2 * model.config.max_source_positions)


def make_sound(model: Any, B: int) -> Tensor:
    """A quarter of a second at 16 kHz: [B,4000]; for a model of spectrograms one of its size, [B,frames,bins]."""
    config = model.config
    return noise(B, config.max_length, config.num_mel_bins) if hasattr(config, "num_mel_bins") else noise(B, 4000)


def noise(*shape: int) -> Tensor:
    """Numbers like normal ones, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def outcome(model: Any, inputs: dict[str, Any], mask: Tensor | None = None) -> Tensor:
    """Everything that one pass without a cache puts out, as one row of numbers in float32.

    With `mask` [B,T], 1 at real tokens, what belongs to padding is left out.
    """
    given: dict[str, Any] = dict(inputs) if mask is None else {**inputs, "attention_mask": mask}
    if model.can_generate():
        given["use_cache"] = False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)  # ViT-MAE chooses its tokens by chance
        values = [value if isinstance(value, tuple) else (value,) for value in model(**given).values()]
    found = [part for part in sum(values, ()) if isinstance(part, Tensor) and part.is_floating_point()]
    if mask is not None:
        found = [value[mask.bool()] if value.shape[:2] == mask.shape else value for value in found]
    return torch.cat([value.float().flatten() for value in found])


def outputs(model: Any, padded: bool = True) -> Tensor:
    """`outcome` for inputs that are the same for every copy of a model; one row of text has padding, if `padded`."""
    inputs = make_inputs(model, 2, tokens_of(model, 24))
    mask = None
    if padded and [*inputs] == ["input_ids"]:
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, slice(0, 5) if writes_text(model) else slice(-5, None)] = 0
    return outcome(model, inputs, mask)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Infinite when anything is not finite."""
    if not bool(ours.isfinite().all() and theirs.isfinite().all()):
        return float("inf")
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-30))


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """A cache as an argument of a model's call; transformers renamed it in 5.24."""
    names = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def cache_of(output: Any) -> Any:
    """The cache in what a model's call returns."""
    return output[next(name for name in ("cache", "past_key_values") if name in output)]
