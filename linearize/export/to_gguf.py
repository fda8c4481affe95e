"""`linearize export --as gguf`: one file for llama.cpp and what is built on it, from the weights that a format folded.

llama.cpp knows Qwen3.5 as it is. Of Granite's hybrids it knows those whose linear layers are twice as wide as the
model, as they are with two memories a head. With one, value channels stand twice, of which the output projection reads
the first, and a norm over both is that of one. Its kernels of the scan for CUDA, Vulkan and SYCL have states of 128 and
256, so keys and queries get channels of zero. Windows in some layers are in its Granite-SWA, whose sinks get no weight
where the student has none.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import Exit, LinearizeError
from .windows import NO_SINK

FILE = "model.gguf"
# Value of --as -> the type of matrices, by default the model's own; and llama.cpp's names of types.
FORMS = {"gguf": None, "gguf-q8_0": "q8_0"}
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
INSTALL = 'pip install "linearize[gguf]"'
STATES = (128, 256)
# How GPT-4, Llama 3 and Qwen split text in front of byte pairs; the digits that stay together tell them apart.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {SPLIT.replace("DIGITS", r"\p{N}{1,3}"): "llama-bpe", SPLIT.replace("DIGITS", r"\p{N}"): "qwen2"}


def check(form: str, config: dict[str, Any], folder: Path, name: str) -> None:
    """Raise LinearizeError: 3 for what llama.cpp does not hold of the `config` of a format, or of the tokenizer in
    `folder`; 4 without the package gguf."""
    text = config.get("text_config", config)
    found = obstacles(form, text)
    if (folder / "tokenizer.json").exists():
        try:
            way, size = pre_tokenizer(folder), max(tokens_of(folder)) + 1
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # a file of another program, or damaged
            message = f"{folder / 'tokenizer.json'} is no tokenizer ({type(error).__name__}). Copy the source's there"
            raise LinearizeError(message, Exit.INCOMPATIBLE) from error
        if way is None:
            found.append("a tokenizer that does not split text as those of GPT-2, SmolLM, Llama 3 or Qwen")
        elif size > text["vocab_size"]:
            found.append(f"a tokenizer of {size} tokens beside {text['vocab_size']} embeddings")
    elif (folder / "tokenizer.model").exists():
        found.append("a tokenizer without tokenizer.json")
    if found:
        raise LinearizeError(f"{name} is not exact as gguf: {'; '.join(found)}", Exit.INCOMPATIBLE)
    if importlib.util.find_spec("gguf") is None:
        raise LinearizeError(f"gguf is not installed: {INSTALL}", Exit.RESOURCE)


def obstacles(form: str, text: dict[str, Any]) -> list[str]:
    """What llama.cpp does not hold of a format's config of text."""
    found, rope = [], text["rope_parameters"].get("rope_type", "default")
    if form == "qwen3":
        found.append("norms of q and k: no architecture of llama.cpp has them beside windows in some layers")
    if rope not in ("default", "llama3")[: 1 + (form != "qwen3_5")]:
        found.append(f"{rope} scaling of the rotary embedding")
    if form == "qwen3_5" and text["linear_value_head_dim"] != text["linear_key_head_dim"]:
        found.append("heads whose values and keys differ in size")
    if text.get("mamba_proj_bias"):
        found.append("biases of q, k and v in linear layers: llama.cpp reads none")
    return found


def write(
    path: Path, form: str, config: dict[str, Any], tensors: dict[str, Tensor], folder: Path, dtype: str | None = None
) -> None:
    """Write what a format folded, in fp32, with the tokenizer in `folder`: matrices in the config's dtype or `dtype`
    (of q8_0 those with rows of other sizes than blocks in fp16), all else in fp32, which llama.cpp insists on."""
    import gguf

    text = config.get("text_config", config)
    known = {"qwen3_5": of_qwen3_5, "granitemoehybrid": of_granite}
    architecture, metadata, found = known.get(form, of_windows)(text, tensors)
    writer = gguf.GGUFWriter(path, architecture)
    D, rope = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"], text["rope_parameters"]
    name = TYPES[dtype or text["dtype"]]
    quantized = gguf.GGMLQuantizationType[name]
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if name == "F32" else f"MOSTLY_{name}"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(D)
    writer.add_key_length(D)
    writer.add_value_length(D)
    writer.add_vocab_size(text["vocab_size"])
    for key, value in metadata.items():
        whole = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(whole, value)
        elif isinstance(value, bool):
            writer.add_bool(whole, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(whole, value)
    add_tokenizer(writer, text["vocab_size"], folder)
    for name, x in found.items():
        small = x.ndim == 2 and "norm" not in name and "ssm_conv1d" not in name and min(x.shape) > 1
        stored = quantized if small else gguf.GGMLQuantizationType.F32
        if x.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0]:
            stored = gguf.GGMLQuantizationType.F16
        writer.add_tensor(name, gguf.quants.quantize(x.float().contiguous().numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---------------------------------------------------------------- architectures


def of_qwen3_5(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """llama.cpp's name, metadata and tensors: norms as w, decays as -exp(A_log)."""
    heads = config["linear_num_value_heads"]
    metadata = {
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.recurrent_layers": [layer_type == "linear_attention" for layer_type in config["layer_types"]],
        "rope.dimension_sections": [*config["rope_parameters"]["mrope_section"], 0],
        "ssm.conv_kernel": 4,
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": heads,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
    }
    own = {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
        "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
        "linear_attn.in_proj_z.weight": "attn_gate.weight",
        "linear_attn.in_proj_b.weight": "ssm_beta.weight",
        "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
        "linear_attn.conv1d.weight": "ssm_conv1d.weight",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.norm.weight": "ssm_norm.weight",
        "linear_attn.out_proj.weight": "ssm_out.weight",
    }
    own |= {f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in ("gate", "up", "down")}
    found = {}
    for name, x in weights.items():
        y = x + 1.0 if "norm" in name and "linear_attn" not in name else x
        y = -y.exp() if name.endswith("A_log") else y[:, 0] if name.endswith("conv1d.weight") else y
        found[renamed(name, own)] = y
    return "qwen35", metadata, found


def of_granite(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """llama.cpp's name, metadata and tensors: layers twice as wide, states filled up, q and k for rotation in pairs."""
    H, D, V = config["mamba_n_heads"], config["mamba_d_state"], config["mamba_d_head"]
    copies = 2 // config["mamba_expand"]
    state = next((size for size in STATES if size >= D), D)
    kept, rope = [layer_type == "attention" for layer_type in config["layer_types"]], config["rope_parameters"]
    metadata = {
        "attention.head_count_kv": [config["num_key_value_heads"] * here for here in kept],
        "attention.scale": float(config["attention_multiplier"]),
        "rope.scaling.finetuned": True,  # llama.cpp's switch for a rotary embedding in this architecture
        "ssm.conv_kernel": 4,
        "ssm.state_size": state,
        "ssm.group_count": H,
        "ssm.time_step_rank": H,
        "ssm.inner_size": copies * H * V,
    }
    own = {
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "shared_mlp.output_linear.weight": "ffn_down.weight",
        "mamba.in_proj.weight": "ssm_in.weight",
        "mamba.conv1d.weight": "ssm_conv1d.weight",
        "mamba.conv1d.bias": "ssm_conv1d.bias",
        "mamba.dt_bias": "ssm_dt.bias",
        "mamba.A_log": "ssm_a",
        "mamba.D": "ssm_d",
        "mamba.norm.weight": "ssm_norm.weight",
        "mamba.out_proj.weight": "ssm_out.weight",
    }

    def widened(x: Tensor) -> Tensor:
        return torch.cat([x.unflatten(0, (H, V))] * copies, 1).flatten(0, 1)

    def filled(x: Tensor) -> Tensor:
        heads = x.unflatten(0, (H, D))
        return torch.cat([heads, x.new_zeros(H, state - D, *x.shape[1:])], 1).flatten(0, 1)

    found = {}
    for name, x in weights.items():
        if name.endswith("input_linear.weight"):
            here = f"blk.{name.split('.')[2]}."
            found[f"{here}ffn_gate.weight"], found[f"{here}ffn_up.weight"] = x.chunk(2)
            continue
        if name.endswith(("in_proj.weight", "conv1d.weight", "conv1d.bias")):
            *z, v, k, q = x[: (H * V) * ("in_proj" in name) + H * (V + 2 * D)].split(
                [H * V] * (1 + ("in_proj" in name)) + [H * D] * 2
            )
            rest = x[len(x) - H :] if "in_proj" in name else x[:0]
            y = torch.cat([*map(widened, z), widened(v), filled(k), filled(q), rest])
            y = y[:, 0] if name.endswith("conv1d.weight") else y
        elif name.endswith("mamba.out_proj.weight"):
            heads = x.unflatten(1, (H, V))
            y = torch.cat([heads, *[torch.zeros_like(heads)] * (copies - 1)], 2).flatten(1)
        elif name.endswith("mamba.norm.weight"):
            y = widened(x).unflatten(0, (H, copies * V))
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            y = paired(x, config["hidden_size"] // config["num_attention_heads"])
        else:
            y = -x.exp()[:, None] if name.endswith("A_log") else x[:, None] if name.endswith("mamba.D") else x
        found[renamed(name, own)] = y
    if rope.get("rope_type", "default") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(rope, config["hidden_size"] // config["num_attention_heads"])
    return "granitehybrid", metadata, found


def of_windows(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """llama.cpp's name, metadata and tensors: q and k for rotation in pairs, and a sink for each head."""
    D, H, rope = config["head_dim"], config["num_attention_heads"], config["rope_parameters"]
    metadata = {
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "logit_scale": 1.0,
    }
    own = {"post_attention_layernorm.weight": "ffn_norm.weight"}
    own |= {f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in ("gate", "up", "down")}
    own |= {"self_attn.sinks": "attn_sinks.weight"} | {f"self_attn.{x}_proj.bias": f"attn_{x}.bias" for x in "qkv"}
    turned = tuple(f"{x}_proj.{kind}" for x in "qk" for kind in ("weight", "bias"))
    found = {renamed(name, own): paired(x, D) if name.endswith(turned) else x for name, x in weights.items()}
    for number in range(config["num_hidden_layers"]):
        found.setdefault(f"blk.{number}.attn_sinks.weight", torch.full((H,), NO_SINK))
    if rope.get("rope_type", "default") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(rope, D)
    return "granite_swa", metadata, found


def paired(x: Tensor, D: int) -> Tensor:
    """Rows of heads of D, with the two channels that turn together side by side, as llama.cpp turns those of Llama."""
    return x.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).flatten(0, 2)


def llama3_factors(rope: dict[str, Any], D: int) -> Tensor:
    """What divides each frequency of Llama 3's rotary embedding: 1 for short waves, `factor` for long ones."""
    old, low, high = (
        rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    waves = 2.0 * math.pi * rope["rope_theta"] ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
    short = ((old / waves - low) / (high - low)).clamp(0.0, 1.0)
    return 1.0 / ((1.0 - short) / rope["factor"] + short)


def renamed(name: str, own: dict[str, str]) -> str:
    """A tensor's name in GGUF."""
    shared = {"input_layernorm.weight": "attn_norm.weight", "self_attn.o_proj.weight": "attn_output.weight"}
    shared |= {f"self_attn.{x}_proj.weight": f"attn_{x}.weight" for x in "qkv"}
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return {**whole, "lm_head.weight": "output.weight"}[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{ {**shared, **own}[rest] }"


# ---------------------------------------------------------------- the tokenizer


def pre_tokenizer(folder: Path) -> str | None:
    """llama.cpp's name for how the byte-level tokenizer in `folder` splits text; None for any other tokenizer."""
    whole = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    split = whole.get("pre_tokenizer") or {}
    parts = split.get("pretokenizers", [split])
    kinds = [part.get("type") for part in parts]
    if whole["model"].get("type") != "BPE" or not kinds or kinds[-1] != "ByteLevel":
        return None
    if parts[-1].get("add_prefix_space") or (whole.get("normalizer") or {}).get("type", "NFC") != "NFC":
        return None
    if kinds == ["Split", "ByteLevel"] and not parts[-1].get("use_regex", True):
        return SPLITS.get(parts[0]["pattern"].get("Regex", ""))
    names = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
    if not parts[-1].get("use_regex", True) or (kinds[0] == "Digits" and not parts[0].get("individual_digits")):
        return None
    return names.get(tuple(kinds))


def tokens_of(folder: Path) -> dict[int, tuple[str, str]]:
    """Each token of tokenizer.json by its number, and llama.cpp's kind of it."""
    whole = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    found = {i: (token, "NORMAL") for token, i in whole["model"].get("vocab", {}).items()}
    for added in whole.get("added_tokens", []):
        found[added["id"]] = (added["content"], "CONTROL" if added["special"] else "USER_DEFINED")
    return found


def add_tokenizer(writer: Any, size: int, folder: Path) -> None:
    """Tokens, merges, special tokens and the chat template; of a folder without a tokenizer nothing but that."""
    import gguf

    if not (folder / "tokenizer.json").exists():
        writer.add_tokenizer_model("none")
        return
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [gguf.TokenType.UNUSED] * size
    for i, (token, token_type) in tokens_of(folder).items():
        tokens[i], kinds[i] = token, gguf.TokenType[token_type]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(folder))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)
