"""The format of Granite 4's dense hybrids (`GraniteMoeHybridForCausalLM`): mamba2 beside softmax layers of Llama.

Its softmax layer is Llama's once every multiplier is 1 and that of attention D^-1/2; gate and up projection lie in one
matrix. A linear layer keeps the projections: q, k and v of the source are C, B and x of a state space layer with as
many groups as query heads, for which key heads are written out. Two memories of a head are two heads: q, k and v are
written out twice, and so is the output projection, which adds them up. Maps of q and k are multiplied with their
projections. Nothing else folds: its norm has a weight for each channel, and its groups are the heads. Biases of q, k
and v go into those of all projections, which are 0 elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import layers

SOURCES, MECHANISM = {"granitemoehybrid": ("llama", "mistral", "qwen2")}, "mamba2"
PRECISE = ("A_log", "dt_bias", "mamba.D", "norm.weight", "layernorm.weight")
ASK = "--to mamba2"


def obstacles(config: Any) -> list[str]:
    """Why a converted model is not exact in this format."""
    text = config.get_text_config()
    found = layers.layer_obstacles(
        config, MECHANISM, {"eps": text.rms_norm_eps}, f"{ASK} --set eps={text.rms_norm_eps}"
    )
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
    first, rope = next(iter(linear.values())), layers.rope_of(text)
    site, M = first["site"], layers.memories(first)
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
        "mamba_n_heads": M * text.num_attention_heads,
        "mamba_n_groups": M * text.num_attention_heads,
        "mamba_d_head": site["value_dim"],
        "mamba_d_state": site["key_dim"],
        "mamba_d_conv": 4,
        "mamba_expand": M,
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
        if plan is None:
            out |= {f"{here}self_attn.{x}_proj.weight": own[f"self_attn.{x}_proj.weight"] for x in "qkvo"}
            if biased(text):
                out |= {f"{here}self_attn.{x}_proj.bias": bias(own, x) for x in "qkvo"}
            continue
        M, roles = layers.memories(plan), {"value": Hkv, "key": Hkv, "query": H}
        biases = [layers.repeated(mixer[f"{role}_bias"].flatten(), M * H, M * heads) for role, heads in roles.items()]
        weights_of = {role: own[f"self_attn.{role[0]}_proj.weight"] for role in roles}
        wide = (layers.written_out(mixer, role, weights_of[role], heads, M, H) for role, heads in roles.items())
        parts = [mixer["output_gate.weight"], *wide, mixer["step.weight"]]
        there = f"{here}mamba."
        if biased(text):  # the format has one in all of a layer's projections, or in none
            none = torch.zeros(len(mixer["output_gate.weight"])), torch.zeros(M * H)
            given = {role: bias(own, role[0])[:, None] for role in roles}
            wide = (layers.written_out(mixer, role, given[role], heads, M, H)[:, 0] for role, heads in roles.items())
            out[f"{there}in_proj.bias"] = torch.cat([none[0], *wide, none[1]])
            out[f"{there}out_proj.bias"] = bias(own, "o")
        out |= {
            f"{there}in_proj.weight": torch.cat(parts),
            f"{there}conv1d.weight": layers.taps_of(mixer, roles, M * H),
            f"{there}conv1d.bias": torch.cat(biases),
            f"{there}dt_bias": mixer["step.bias"],
            f"{there}A_log": mixer["A_log"],
            f"{there}D": mixer["skip"],
            f"{there}norm.weight": mixer["norm.weight"].flatten(),
            f"{there}out_proj.weight": own["self_attn.o_proj.weight"].repeat(1, M),
        }
    return out
