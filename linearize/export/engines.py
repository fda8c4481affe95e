"""Engines and what they take of a format: by name and reason, and by trial where the engine is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Tokens at the end of a row that come one by one, at most.
STEPS = 16


class Engine(NamedTuple):
    """Whether an engine takes a model, and what is to be said: why it does not, or what it needs."""

    name: str
    takes: bool
    note: str


def engines_for(form: str, config: dict[str, Any]) -> tuple[Engine, ...]:
    """What engines make of a config.json that was written."""
    return (qwen3_5_engines if form == "qwen3_5" else granite_engines)(config.get("text_config", config))


def qwen3_5_engines(config: dict[str, Any]) -> tuple[Engine, ...]:
    """Placements: an engine that knows intervals alone reads `full_attention_interval`, and computes other layers than
    those that were trained where it does not fit."""
    fits = "full_attention_interval" in config
    every = "" if fits else (
        "it knows intervals alone, and the kept layers are not N-1, 2N-1, ..: convert with --keep-softmax every:4:3"
    )  # fmt: skip
    D, Dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
    sizes = "" if Dv == D and D in (16, 32, 64, 128) else f"on a GPU not with heads of {D} and {Dv}"
    rope = config["rope_parameters"].get("rope_type", "default")
    scaled = "" if rope == "default" else f"nobody tried its {rope} rotary embedding"
    cpp = scaled and f"the {rope} scaling of its rotary embedding has no place in the file that --as gguf writes"
    sglang = "0.5.23 and later, with the text_config of config.json as its config.json"
    old = "a version before kept layers could be anywhere (pull request 28208) computes others" if every else ""
    return (
        Engine("transformers", True, "5.24 and later"),
        Engine("vLLM", True, "; ".join(filter(None, ("0.32 and later", scaled)))),
        Engine("SGLang", fits and not scaled, every or scaled or sglang),
        Engine("MLX", fits, every),
        Engine("llama.cpp", not scaled, cpp or "; ".join(filter(None, (old, sizes)))),
    )


def granite_engines(config: dict[str, Any]) -> tuple[Engine, ...]:
    """Norms: MLX normalises all heads together, whatever the groups. Biases: transformers multiplies hidden states of
    padding by 0, but not what a projection makes of them, and convolves its bias into the first real tokens."""
    groups, rope = config["mamba_n_groups"], config["rope_parameters"].get("rope_type", "default")
    scaled = "" if rope == "default" else f"it drops the {rope} scaling of the rotary embedding"
    known = rope in ("default", "llama3")  # which were read in SGLang's source
    mlx = [f"it normalises the {groups} groups of a linear layer together"] if groups > 1 else []
    mlx += [scaled] if scaled else []
    inner = config["mamba_n_heads"] * config["mamba_d_head"]
    biased = "rows behind left padding differ, for it convolves biases of padding: pad on the right, or not at all"
    # Of Qwen3.5 alone it reads from config.json in what dtype the state of a linear layer is kept.
    half = config["dtype"] != "float32"
    rounded = [f"with --mamba-ssm-cache-dtype float32, or it rounds memories to {config['dtype']} at each token"] * half
    cpp = f"it insists on an inner size of twice the hidden size, and this one is {inner}: export it --as gguf"
    return (
        Engine("transformers", True, "; ".join(["5.24 and later"] + [biased] * config["mamba_proj_bias"])),
        Engine("vLLM", True, "; ".join(["0.32 and later", *rounded])),
        Engine("SGLang", known, "0.5.23 and later" if known else f"nobody tried its {rope} rotary embedding"),
        Engine("MLX", not mlx, "; ".join(mlx)),
        Engine("llama.cpp", False, cpp),
    )


def compared(model: Any, folder: Path, form: str, config: dict[str, Any], rows: list[Tensor]) -> dict[str, float]:
    """How far engines that are installed and take the model in `folder` are from transformers' `model` of it, in fp32,
    on `rows` of tokens: the largest difference over the largest logit, in one pass and token by token."""
    takes = {engine.name for engine in engines_for(form, config) if engine.takes}
    if "MLX" not in takes or importlib.util.find_spec("mlx_lm") is None:
        return {}
    worst = 0.0
    for row in rows:
        want = model(input_ids=row[None], use_cache=False).logits[0]
        for logits in mlx_logits(folder, row):
            worst = max(worst, float((logits - want).abs().max() / want.abs().max()))
    return {"MLX": worst}


def mlx_logits(folder: Path, row: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T,V] of a row [T] by mlx-lm in fp32: in one pass, and with the last tokens one by one."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)

    def tensor(logits: Any) -> Tensor:
        return torch.from_numpy(np.array(logits)[0].copy())

    ids, begin = mx.array(row[None].numpy()), len(row) - min(STEPS, len(row) // 2)
    whole, cache = tensor(model(ids)), make_prompt_cache(model)
    parts = [tensor(model(ids[:, :begin], cache=cache))]
    parts += [tensor(model(ids[:, place : place + 1], cache=cache)) for place in range(begin, len(row))]
    return whole, torch.cat(parts)
