"""llama.cpp on what `linearize export --as` wrote: logits beside transformers, in float32 and with 8-bit weights.

    python tests/export/llama_cpp.py LIBRARIES FOLDER ...

LIBRARIES is a folder with llama.cpp's shared libraries for a CPU (libllama, libggml and its backends), FOLDER an
export as qwen3_5. Needs the package gguf; not a test of CI. A GGUF file without a tokenizer is made of each export, as
llama.cpp's converter makes it.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

# Rows of tokens, of which the last STEPS come one by one.
LENGTHS, STEPS = (9, 60), 4
F32, F16 = 0, 1  # kinds of ggml


def tensors_of(config: dict[str, Any], weights: dict[str, Any], out: gguf.GGUFWriter) -> dict[str, Any]:
    """Metadata of a Qwen3_5ForCausalLM; returns its tensors: norms as w, -exp(A_log)."""
    heads, D = config["linear_num_key_heads"], config["head_dim"]
    rope = config["rope_parameters"]
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_rope_dimension_sections([*rope["mrope_section"], 0])
    out.add_ssm_conv_kernel(4)
    out.add_ssm_state_size(config["linear_key_head_dim"])
    out.add_ssm_group_count(heads)
    out.add_ssm_time_step_rank(heads)
    out.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    out.add_key_length(D)
    out.add_value_length(D)
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    out.add_array("qwen35.attention.recurrent_layers", recurrent)
    names = {
        "input_layernorm.weight": "attn_norm.weight",
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
    found = {}
    for name, x in weights.items():
        y = x + 1.0 if "norm" in name and "linear_attn" not in name else x
        y = -np.exp(y) if name.endswith("A_log") else y[:, 0] if name.endswith("conv1d.weight") else y
        found[renamed(name, names)] = y
    return found


def renamed(name: str, names: dict[str, str]) -> str:
    """A tensor's name in GGUF."""
    shared = {"self_attn.o_proj.weight": "attn_output.weight"}
    shared |= {f"self_attn.{x}_proj.weight": f"attn_{x}.weight" for x in "qkv"}
    shared |= {f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in ("gate", "up", "down")}
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return {**whole, "lm_head.weight": "output.weight"}[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{ {**shared, **names}[rest] }"


def write(folder: Path, path: Path, bits: int = 32) -> None:
    """An export as GGUF, with matrices of 8 bits where asked for."""
    whole = json.loads((folder / "config.json").read_text())
    config = whole["text_config"]
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    weights = {name: x.astype(np.float32) for file in files for name, x in file.items()}
    out = gguf.GGUFWriter(path, "qwen35")
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("none")
    for name, x in tensors_of(config, weights, out).items():
        small = bits == 8 and x.ndim == 2 and x.shape[1] % 32 == 0 and name.endswith("weight") and "conv1d" not in name
        x = np.ascontiguousarray(x)
        if small and "norm" not in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            out.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)
        else:
            out.add_tensor(name, x)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class ModelParams(ctypes.Structure):
    """llama_model_params: the defaults as they come, with room to spare."""

    _fields_ = [("bytes", ctypes.c_uint8 * 256)]


class ContextParams(ctypes.Structure):
    """llama_context_params of version 0.5.0, as far as fields are changed here."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        ("outputs", ctypes.c_uint32 * 2),
        ("n_threads", ctypes.c_int32 * 2),
        *((name, ctypes.c_int32) for name in ("ctx_type", "rope_scaling", "pooling", "attention", "flash_attn")),
        ("rope", ctypes.c_float * 6),
        ("yarn_orig_ctx", ctypes.c_uint32),
        ("defrag", ctypes.c_float),
        ("callbacks", ctypes.c_void_p * 2),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 256),
    ]


def library(folder: Path) -> Any:
    """llama.cpp, with its backends loaded."""
    for name in ("libggml-base", "libggml", "libllama"):
        file = next(folder.glob(f"{name}.*so*"))
        loaded = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        if name == "libggml":
            loaded.ggml_backend_load_all_from_path(str(folder).encode())
    loaded.llama_model_default_params.restype = ModelParams
    loaded.llama_context_default_params.restype = ContextParams
    loaded.llama_batch_init.restype = Batch
    for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_get_memory"):
        getattr(loaded, name).restype = ctypes.c_void_p
    loaded.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    loaded.llama_backend_init()
    return loaded


def logits_of(llama: Any, path: Path, rows: list[list[int]], vocabulary: int) -> list[Any]:
    """Logits [T,V] of each row: a prompt, then its last tokens one by one."""
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model, f"llama.cpp does not load {path}"
    params = llama.llama_context_default_params()
    layout = params.n_batch, params.flash_attn, params.type_k, params.type_v
    assert layout == (2048, -1, F16, F16), "another layout of llama_context_params"
    params.n_ctx, params.flash_attn, params.type_k, params.type_v = 512, 0, F32, F32
    found = []
    for row in rows:
        context = ctypes.c_void_p(llama.llama_init_from_model(ctypes.c_void_p(model), params))
        assert context
        parts, begin = [], 0
        for end in range(len(row) - STEPS, len(row) + 1):
            batch = llama.llama_batch_init(end - begin, 0, 1)
            batch.n_tokens = end - begin
            for i, place in enumerate(range(begin, end)):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = row[place], place, 1, 1
                batch.seq_id[i][0] = 0
            assert llama.llama_decode(context, batch) == 0
            for i in range(end - begin):
                parts.append(np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (vocabulary,)).copy())
            llama.llama_batch_free(batch)
            begin = end
        llama.llama_free(context)
        found.append(np.stack(parts))
    llama.llama_model_free(ctypes.c_void_p(model))
    return found


def main(libraries: str, *folders: str) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    llama, failed = library(Path(libraries)), 0
    for folder in map(Path, folders):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        V = model.config.vocab_size
        rows = [torch.randint(1, V, (T,), generator=torch.Generator().manual_seed(T)).tolist() for T in LENGTHS]
        with torch.no_grad():
            expected = [model(input_ids=torch.tensor([row])).logits[0].numpy() for row in rows]
        for bits in (32, 8):
            with tempfile.TemporaryDirectory() as place:
                write(folder, Path(place) / "model.gguf", bits)
                computed = logits_of(llama, Path(place) / "model.gguf", rows, V)
            worst = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(computed, expected, strict=True))
            failed += bits == 32 and not worst <= 1e-4  # what 8 bits cost depends on the weights
            print(f"{folder}: {bits} bits, {worst:.1e} of the largest logit", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
