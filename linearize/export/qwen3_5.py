"""The format of Qwen3.5's text models (`Qwen3_5ForCausalLM`): gdn with native=true beside softmax layers of Qwen3.

A softmax layer of Qwen3.5 has a gate on its output. With gate rows of zero it is sigmoid(0) = 1/2 for every token, and
an output projection times 2 undoes it without rounding. Norms store w - 1. The rotary embedding turns all channels: a
partial factor of 1, and sections that add up to D/2, which mean nothing where all three positions of a token are equal,
but for llama.cpp (`sections_of`).

A linear layer keeps the projections; key heads are written for each query head, and all once for each of its memories,
multiplied with the memory's maps. The output projection, written for each memory, adds these up. HeadNorm's weight of
each head folds into it, since the swish gate behind it works on each channel alone; the format's own weight, which
heads share, is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import layers

SOURCES, MECHANISM = {"qwen3_5": ("qwen3",)}, "gdn"
PRECISE = ("A_log", "dt_bias", "norm.weight", "layernorm.weight")
ASK = "--to gdn --set native=true"


def obstacles(config: Any) -> list[str]:
    """Why a converted model is not exact in this format."""
    text = config.get_text_config()
    found = layers.layer_obstacles(config, MECHANISM, {"native": True}, ASK) + layers.common_obstacles(text)
    if getattr(text, "attention_bias", False):
        found.append("biases of q, k and v (attention_bias): vLLM and SGLang do not read them")
    if text.rms_norm_eps != 1e-6:
        found.append(f"rms_norm_eps={text.rms_norm_eps}: gdn's norm adds 1e-6, and the format has one number for all")
    return found


def interval(config: Any) -> int | None:
    """N where layers N-1, 2N-1, .. and no others keep softmax; None for other placements."""
    count, linear = config.get_text_config().num_hidden_layers, layers.linear_layers(config)
    kept = [n for n in range(count) if n not in linear]
    fits = [N for N in range(2, count + 1) if kept == list(range(N - 1, count, N))]
    return fits[0] if fits else None


def sections_of(pairs: int) -> list[int]:
    """How many pairs of channels turn by each of the three positions of a token, one after the other. llama.cpp does
    not turn a pair beyond its section."""
    return [len(range(first, pairs, 3)) for first in range(3)]


def config_of(config: Any) -> dict[str, Any]:
    """config.json: a text model alone, in the form of the whole family, which MLX asks for; transformers and vLLM read
    `text_config`. Sections of the rotary embedding have to be named, or theirs are for a head dim of 256 * 1/4; and the
    partial factor stands twice, since SGLang reads it beside the other parameters, where its own is 1/4."""
    text, linear = config.get_text_config(), layers.linear_layers(config)
    D, heads, every = layers.head_dim(text), text.num_attention_heads, interval(config)
    first = next(iter(linear.values()))
    site, states = first["site"], layers.memories(first) * heads
    turned = {"partial_rotary_factor": 1.0, "mrope_section": sections_of(D // 2), "mrope_interleaved": True}
    part = {
        **layers.tokens_of(text),
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "head_dim": D,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": D,
        "linear_value_head_dim": site["value_dim"],
        "linear_num_key_heads": states,
        "linear_num_value_heads": states,
        "layer_types": ["linear_attention" if n in linear else "full_attention" for n in range(text.num_hidden_layers)],
        "rope_parameters": {**layers.rope_of(text), **turned},
        "partial_rotary_factor": 1.0,
        "mamba_ssm_dtype": "float32",
        "dtype": str(text.dtype).removeprefix("torch."),
    }  # fmt: skip
    if every is not None:
        part["full_attention_interval"] = every
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype")
    whole = {name: part[name] for name in names}
    return {**whole, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5", "text_config": part}


def fold(config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the converted model in fp32 under the format's names."""
    text = config.get_text_config()
    H, Hkv, out = text.num_attention_heads, text.num_key_value_heads, layers.ends_of(text, weights)
    out["model.norm.weight"] = out["model.norm.weight"] - 1.0
    for here, own, mixer, plan in layers.each_layer(config, weights):
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{here}{name}.weight"] = own[f"{name}.weight"] - 1.0
        for name in ("gate_proj", "up_proj", "down_proj"):
            out[f"{here}mlp.{name}.weight"] = own[f"mlp.{name}.weight"]
        q, k, v, o = (own[f"self_attn.{x}_proj.weight"] for x in "qkvo")
        if plan is None:
            gated = torch.stack([q.unflatten(0, (H, -1)), torch.zeros_like(q).unflatten(0, (H, -1))], 1)
            out |= {
                f"{here}self_attn.q_proj.weight": gated.flatten(0, 2),  # [q; gate] of each head
                f"{here}self_attn.k_proj.weight": k,
                f"{here}self_attn.v_proj.weight": v,
                f"{here}self_attn.o_proj.weight": 2.0 * o,
                f"{here}self_attn.q_norm.weight": own["self_attn.q_norm.weight"] - 1.0,
                f"{here}self_attn.k_norm.weight": own["self_attn.k_norm.weight"] - 1.0,
            }
            continue
        there, M = f"{here}linear_attn.", layers.memories(plan)
        rows = {"query": (q, H), "key": (k, Hkv), "value": (v, Hkv)}
        wide = [layers.written_out(mixer, role, *given, M, H) for role, given in rows.items()]
        out |= {
            f"{there}in_proj_qkv.weight": torch.cat(wide),
            f"{there}conv1d.weight": layers.taps_of(mixer, rows, M * H),
            f"{there}in_proj_z.weight": mixer["output_gate.weight"],
            f"{there}in_proj_b.weight": mixer["strength.weight"],
            f"{there}in_proj_a.weight": mixer["decay.weight"],
            f"{there}dt_bias": mixer["decay.bias"],
            f"{there}A_log": mixer["A_log"],
            f"{there}norm.weight": torch.ones(mixer["norm.weight"].shape[1]),
            f"{there}out_proj.weight": o.repeat(1, M) * mixer["norm.weight"].flatten(),
        }
    return out
