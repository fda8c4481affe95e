"""Architectures whose softmax slides over a window in the layers that their config names: students of `window` alone.

No weight changes. Llama and Mistral become Ministral, which is Llama with `layer_types`: transformers' own Llama does
not read them, so no config says `llama`. Qwen2 and Qwen3 read them. A window counts its own token here and there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import layers

# Each format, which is a model type of transformers too -> the model types of its sources.
SOURCES = {"ministral": ("llama", "mistral"), "qwen3": ("qwen3",), "qwen2": ("qwen2",)}
MECHANISM = "window"
PRECISE = ()
ASK = "--to window --set sink=0"


def obstacles(config: Any) -> list[str]:
    """Why a converted model is not exact in these formats."""
    text = config.get_text_config()
    found = layers.layer_obstacles(config, MECHANISM, {"sink": 0}, ASK) + layers.common_obstacles(text)
    sizes = {layer["options"].get("window") for layer in layers.linear_layers(config).values()} - {None}
    if len(sizes) > 1:
        found.append(f"windows of {', '.join(map(str, sorted(sizes)))} tokens: the format has one size")
    if form_of(text) == "ministral" and getattr(text, "attention_bias", False):
        found.append("biases of q, k, v and o (attention_bias)")
    if getattr(text, "mlp_bias", False):
        found.append("biases of the MLP (mlp_bias)")
    return found


def form_of(text: Any) -> str:
    """The format that has a source's softmax layers."""
    return next((form for form, sources in SOURCES.items() if text.model_type in sources), "ministral")


def config_of(config: Any) -> dict[str, Any]:
    """config.json. vLLM's own Qwen2 and Qwen3 know no windows in some layers, and stop where `max_window_layers` is not
    the number of layers; transformers does not read it beside `layer_types`. MLX reads `rope_theta` and `rope_scaling`
    alone."""
    text, linear = config.get_text_config(), layers.linear_layers(config)
    form, rope = form_of(text), layers.rope_of(text)
    written = {
        **layers.tokens_of(text),
        "architectures": [f"{form.capitalize()}ForCausalLM"],
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
    if form != "ministral":
        written |= {"use_sliding_window": True, "max_window_layers": 0}
        written["attention_bias"] = bool(getattr(text, "attention_bias", False))
    return written


def fold(config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the converted model as they are; a tied head is left out."""
    tied = config.get_text_config().tie_word_embeddings
    return {name: x for name, x in weights.items() if not (tied and name == "lm_head.weight")}
