"""What formats ask of a converted model: its layers by number, and their weights under short names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..terminal.output import layers_named

NO_SOFTMAX = (
    "no layer keeps softmax, and transformers' classes write text only with one that does (convert with --keep-softmax "
    "every:4:3, or give a layer of this one its softmax back: linearize convert DIR --restore 3)"
)
TWO_SIZES = "layers with one and with two memories a head: the format has one size"


def linear_layers(config: Any) -> dict[int, dict[str, Any]]:
    """What the plan says of each converted layer, by its number."""
    return {layer["site"]["layer"]: layer for layer in config.linearize["layers"]}


def grouped(found: Iterable[tuple[str, int]]) -> list[str]:
    """Reasons, each with its layers: `layers 0-2: softmax over a window`."""
    reasons: dict[str, list[int]] = {}
    for reason, layer in found:
        reasons.setdefault(reason, []).append(layer)
    return [f"{layers_named(layers)}: {reason}" for reason, layers in reasons.items()]


def layer_obstacles(config: Any, mechanism: str, options: dict[str, Any], ask: str) -> list[str]:
    """Why linear layers are not those of a format, which holds `mechanism` with `options`; `ask` makes them."""
    found, linear = [], linear_layers(config)
    for number, layer in linear.items():
        name, site, own = layer["mechanism"], layer["site"], layer["options"]
        wrong = [f"{option}={own.get(option)}" for option, value in options.items() if own.get(option) != value]
        if name == "window" and mechanism != name:
            found.append((f"softmax over a window of {own['window']} tokens, which the format does not know", number))
        elif name != mechanism:
            found.append((f"{name}, and the format holds {mechanism} alone (convert with {ask})", number))
        elif wrong:
            found.append((f"{mechanism} with {', '.join(wrong)} (convert with {ask})", number))
        if own.get("window") and name != "window":
            found.append((f"a window of {own['window']} tokens beside {name}", number))
        if site["softmax_groups"]:
            found.append((f"key heads {[*site['softmax_groups']]} keep softmax", number))
    windows = sum(layer["mechanism"] == "window" for layer in linear.values())
    none_kept = len(linear) - windows == config.get_text_config().num_hidden_layers
    several = len({memories(layer) for layer in linear.values()}) > 1
    # transformers counts the tokens of a cache in a softmax layer
    return grouped(found) + [TWO_SIZES] * several + [NO_SOFTMAX] * none_kept


def memories(layer: dict[str, Any]) -> int:
    """Of each query head in a layer of the plan, which says nothing where its checkpoint is older than the option."""
    return int(layer["options"].get("memories", 1))


def common_obstacles(text: Any) -> list[str]:
    """What of the source's config no format here has."""
    found = []
    if text.hidden_act not in ("silu", "swish"):
        found.append(f"its MLP has {text.hidden_act}, the format has silu")
    sliding = [n for n, kind in enumerate(getattr(text, "layer_types", None) or []) if kind == "sliding_attention"]
    if getattr(text, "sliding_window", None) and (sliding or getattr(text, "layer_types", None) is None):
        found.append(f"softmax slides over {text.sliding_window} tokens")
    return found


def head_dim(text: Any) -> int:
    """D, also of configs that do not say it."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def repeated(weight: Tensor, heads: int, groups: int) -> Tensor:
    """A key head's rows [groups * D, ..] for each of its query heads: [heads * D, ..]."""
    return weight.unflatten(0, (groups, -1)).repeat_interleave(heads // groups, 0).flatten(0, 1)


def written_out(mixer: dict[str, Tensor], role: str, x: Tensor, heads: int, memories: int, H: int) -> Tensor:
    """The rows of a projection [heads * D,N] for all memories of the H query heads, [memories * H * D,N], mapped."""
    rows = torch.cat([x.unflatten(0, (heads, -1))] * memories)
    weight = mixer.get(f"{role}_map")
    if weight is not None:
        rows = rows + weight.shape[-1] ** -0.5 * weight @ rows
    return repeated(rows.flatten(0, 1), memories * H, memories * heads)


def taps_of(mixer: dict[str, Tensor], roles: Iterable[str], heads: int) -> Tensor:
    """The convolution over the channels of all heads, one role behind the other: [channels,1,4], zeros in front."""
    parts = []
    for role in roles:
        taps = mixer[f"{role}_taps"]
        full = torch.nn.functional.pad(taps, (4 - taps.shape[-1], 0))
        parts.append(full.repeat_interleave(heads // full.shape[0], 0).flatten(0, 1))
    return torch.cat(parts)[:, None]


class Layer(NamedTuple):
    """A layer's weights: all by their names in it, those of its mixer, and of a linear one what the plan says."""

    prefix: str
    own: dict[str, Tensor]
    mixer: dict[str, Tensor]
    plan: dict[str, Any] | None


def each_layer(config: Any, weights: dict[str, Tensor]) -> Iterator[Layer]:
    """The layers of a converted model, in turn. A mixer without a convolution gets the identity of one tap."""
    text, linear = config.get_text_config(), linear_layers(config)
    for number in range(text.num_hidden_layers):
        prefix, plan = f"model.layers.{number}.", linear.get(number)
        own = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
        mixer = {name.removeprefix("self_attn.mixer."): x for name, x in own.items() if ".mixer." in name}
        if plan is not None:
            H, Hkv = text.num_attention_heads, text.num_key_value_heads
            D, Dv = (plan["site"][f"{x}_dim"] for x in ("key", "value"))
            for role, size in {"query": (H, D), "key": (Hkv, D), "value": (Hkv, Dv)}.items():
                mixer.setdefault(f"{role}_taps", torch.ones(*size, 1))
        yield Layer(prefix, own, mixer, plan)


def ends_of(text: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The embeddings, the last norm, and the head where it has weights of its own."""
    names = ["model.norm.weight", "model.embed_tokens.weight"]
    return {name: weights[name] for name in names + ["lm_head.weight"] * (not text.tie_word_embeddings)}


def rope_of(text: Any) -> dict[str, Any]:
    """The rotary embedding as transformers writes it."""
    return dict(getattr(text, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})


def tokens_of(text: Any) -> dict[str, Any]:
    """Special tokens and sizes that every config has."""
    sizes = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    numbers = "max_position_embeddings rms_norm_eps initializer_range"
    tokens = "bos_token_id eos_token_id pad_token_id tie_word_embeddings"
    return {name: getattr(text, name, None) for name in f"{sizes} {numbers} {tokens}".split()}
