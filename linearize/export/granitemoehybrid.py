"""The format of Granite 4's dense hybrids (`GraniteMoeHybridForCausalLM`): mamba2 beside softmax layers of Llama.

Its softmax layer is Llama's once every multiplier is 1 and that of attention D^-1/2; gate and up projection lie in one
matrix. A linear layer keeps the projections: q, k and v of the source are C, B and x of a state space layer with as
many groups as query heads, for which key heads are written out. Nothing else folds: its norm has a weight for each
channel, and its groups are the heads. Biases of q, k and v go into those of all projections, which are 0 elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import layers

SOURCES = ("llama", "mistral", "qwen2")
PRECISE = ("A_log", "dt_bias", "mamba.D", "norm.weight", "layernorm.weight")
ASK = "--to mamba2"


def obstacles(config: Any) -> list[str]:
    """Why a converted model is not exact in this format."""
    text = config.get_text_config()
    found = layers.layer_obstacles(config, "mamba2", {"eps": text.rms_norm_eps}, f"{ASK} --set eps={text.rms_norm_eps}")
    found += layers.common_obstacles(text)
    if getattr(text, "mlp_bias", False):
        found.append("biases of the MLP (mlp_bias)")
    D, H = layers.head_dim(text), text.num_attention_heads
    if text.hidden_size != H * D:
        size = text.hidden_size
        found.append(f"{H} heads of {D} beside a hidden size of {size}: the format divides that by the heads")
    return found


def biased(text: Any) -> bool:
    """Whether q, k and v have biases, which stand in front of the convolution and its own."""
    return text.model_type == "qwen2" or bool(getattr(text, "attention_bias", False))


def config_of(config: Any) -> dict[str, Any]:
    """config.json. `rope_theta` stands twice, since some engines read it alone. Time steps have no limit; JSON has no
    infinity that all engines read, so the upper one is a large number."""
    text, linear = config.get_text_config(), layers.linear_layers(config)
    site, rope = next(iter(linear.values()))["site"], layers.rope_of(text)
    return {
        **layers.tokens_of(text),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_act": "silu",
        "attention_bias": biased(text),
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": site["scale"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": text.intermediate_size,
        "position_embedding_type": "rope",
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "layer_types": ["mamba" if n in linear else "attention" for n in range(text.num_hidden_layers)],
        "mamba_n_heads": text.num_attention_heads,
        "mamba_n_groups": text.num_attention_heads,
        "mamba_d_head": site["value_dim"],
        "mamba_d_state": site["key_dim"],
        "mamba_d_conv": 4,
        "mamba_expand": 1,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": biased(text),
        "time_step_limit": [0.0, 1e9],
        "dtype": str(text.dtype).removeprefix("torch."),
    }


def bias(own: dict[str, Tensor], part: str) -> Tensor:
    """The bias of a projection; zeros where it has none."""
    name = f"self_attn.{part}_proj"
    return own.get(f"{name}.bias", torch.zeros(len(own[f"{name}.weight"])))


def fold(config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the converted model in fp32 under the format's names."""
    text = config.get_text_config()
    H, Hkv, out = text.num_attention_heads, text.num_key_value_heads, layers.ends_of(text, weights)
    for here, own, mixer, plan in layers.each_layer(config, weights):
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{here}{name}.weight"] = own[f"{name}.weight"]
        both = torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]])
        out[f"{here}shared_mlp.input_linear.weight"] = both
        out[f"{here}shared_mlp.output_linear.weight"] = own["mlp.down_proj.weight"]
        q, k, v, o = (own[f"self_attn.{x}_proj.weight"] for x in "qkvo")
        if plan is None:
            out |= {f"{here}self_attn.{x}_proj.weight": own[f"self_attn.{x}_proj.weight"] for x in "qkvo"}
            if biased(text):
                out |= {f"{here}self_attn.{x}_proj.bias": bias(own, x) for x in "qkvo"}
            continue
        roles = ("value", "key", "query")
        biases = [layers.repeated(mixer[f"{role}_bias"].flatten(), H, mixer[f"{role}_bias"].shape[0]) for role in roles]
        wide = (layers.repeated(x, H, Hkv) for x in (v, k))
        parts = [mixer["output_gate.weight"], *wide, q, mixer["step.weight"]]
        there = f"{here}mamba."
        if biased(text):  # the format has one in all of a layer's projections, or in none
            none = torch.zeros(len(mixer["output_gate.weight"])), torch.zeros(H)
            qkv = bias(own, "q"), *(layers.repeated(bias(own, x), H, Hkv) for x in "kv")
            out[f"{there}in_proj.bias"] = torch.cat([none[0], qkv[2], qkv[1], qkv[0], none[1]])
            out[f"{there}out_proj.bias"] = bias(own, "o")
        out |= {
            f"{there}in_proj.weight": torch.cat(parts),
            f"{there}conv1d.weight": layers.taps_of(mixer, roles, H),
            f"{there}conv1d.bias": torch.cat(biases),
            f"{there}dt_bias": mixer["step.bias"],
            f"{there}A_log": mixer["A_log"],
            f"{there}D": mixer["skip"],
            f"{there}norm.weight": mixer["norm.weight"].flatten(),
            f"{there}out_proj.weight": o,
        }
    return out
