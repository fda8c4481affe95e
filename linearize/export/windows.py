"""Architectures whose softmax slides over a window in the layers that their config names: students of `window` alone.

No weight changes. Llama and Mistral become Ministral, which is Llama with `layer_types`: transformers' own Llama does
not read them, so no config says `llama`. With `sink_logit` they become Granite-SWA, whose softmax has such a number for
each head, in all layers; kept ones get one that takes no weight. Qwen2 and Qwen3 read `layer_types`. A window counts
its own token here and there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import layers

# Each format, which is a model type of transformers too -> the model types of its sources.
SOURCES = {
    "ministral": ("llama", "mistral"),
    "granite_swa": ("llama", "mistral"),
    "qwen3": ("qwen3",),
    "qwen2": ("qwen2",),
}
CLASSES = {"ministral": "Ministral", "granite_swa": "GraniteSWA", "qwen3": "Qwen3", "qwen2": "Qwen2"}
MECHANISM = "window"
PRECISE = ("self_attn.sinks",)
# Of a head whose softmax has no sink.
NO_SINK = -1e9
ASK = "--to window --set sink=0"


def obstacles(config: Any) -> list[str]:
    """Why a converted model is not exact in these formats."""
    text, form = config.get_text_config(), form_of(config)
    options = {"sink": 0, "sink_logit": form == "granite_swa"}
    found = layers.layer_obstacles(config, MECHANISM, options, ASK) + layers.common_obstacles(text)
    sizes = {layer["options"].get("window") for layer in layers.linear_layers(config).values()} - {None}
    if len(sizes) > 1:
        found.append(f"windows of {', '.join(map(str, sorted(sizes)))} tokens: the format has one size")
    if form in ("ministral", "granite_swa") and getattr(text, "attention_bias", False):
        found.append("biases of q, k, v and o (attention_bias)")
    if getattr(text, "mlp_bias", False):
        found.append("biases of the MLP (mlp_bias)")
    return found


def form_of(config: Any) -> str:
    """The format that has the softmax layers of a converted model, and its sinks."""
    model_type = config.get_text_config().model_type
    sinks = any(layer["options"].get("sink_logit") for layer in layers.linear_layers(config).values())
    if sinks and model_type in SOURCES["granite_swa"]:
        return "granite_swa"
    return next((form for form, sources in SOURCES.items() if model_type in sources), "ministral")


def config_of(config: Any) -> dict[str, Any]:
    """config.json. vLLM's own Qwen2 and Qwen3 know no windows in some layers, and stop where `max_window_layers` is not
    the number of layers; transformers does not read it beside `layer_types`. MLX reads `rope_theta` and `rope_scaling`
    alone."""
    text, linear = config.get_text_config(), layers.linear_layers(config)
    form, rope = form_of(config), layers.rope_of(text)
    written = {
        **layers.tokens_of(text),
        "architectures": [f"{CLASSES[form]}ForCausalLM"],
        "model_type": form,
        "hidden_act": "silu",
        "head_dim": layers.head_dim(text),
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "layer_types": [f"{'sliding' if n in linear else 'full'}_attention" for n in range(text.num_hidden_layers)],
        "sliding_window": next(iter(linear.values()))["options"]["window"],
        "dtype": str(text.dtype).removeprefix("torch."),
    }
    if rope.get("rope_type", "default") != "default":
        written["rope_scaling"] = rope
    if form == "granite_swa":
        written["attention_multiplier"] = layers.head_dim(text) ** -0.5
        written |= dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
    elif form != "ministral":
        written |= {"use_sliding_window": True, "max_window_layers": 0}
        written["attention_bias"] = bool(getattr(text, "attention_bias", False))
    return written


def fold(config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the converted model as they are, with sinks in each layer where the format has them; a tied head is
    left out."""
    text = config.get_text_config()
    found = {name.replace(".mixer.sinks", ".sinks"): x for name, x in weights.items()}
    if text.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    for number in range(text.num_hidden_layers) if form_of(config) == "granite_swa" else ():
        none = torch.full((text.num_attention_heads,), NO_SINK)
        found.setdefault(f"model.layers.{number}.self_attn.sinks", none)
    return found
