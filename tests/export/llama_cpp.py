"""llama.cpp on what `linearize export --as gguf` and `gguf-q8_0` write: logits beside the converted model, and tokens,
where the folder has a tokenizer.

    python tests/export/llama_cpp.py LIBRARIES FOLDER ...

LIBRARIES is a folder with llama.cpp's shared libraries for a CPU (libllama, libggml and its backends), or one library
that has all of it, such as the package xllamacpp; FOLDER a converted model. Needs the package gguf; not a test of CI.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

# Rows of tokens, of which the last STEPS come one by one.
LENGTHS, STEPS = (9, 200), 4
F32, F16 = 0, 1  # kinds of ggml


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
    """llama.cpp, with its backends loaded; `folder` may be one library that has all of it."""
    names = ("libggml-base", "libggml", "libllama") if folder.is_dir() else ("",)
    for name in names:
        file = next(folder.glob(f"{name}.*so*")) if name else folder
        loaded = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        if name == "libggml":
            loaded.ggml_backend_load_all_from_path(str(folder).encode())
    loaded.llama_model_default_params.restype = ModelParams
    loaded.llama_context_default_params.restype = ContextParams
    loaded.llama_batch_init.restype = Batch
    for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab"):
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


TEXT = "Hello World! I've 12345 apples, it's 3.14\n\n  café naïve   déjà-vu 我想在 🚀\t x=1; // end"


def same_tokens(llama: Any, path: Path, folder: Path) -> bool:
    """Whether llama.cpp makes the tokens of TEXT that transformers makes."""
    from transformers import AutoTokenizer

    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    vocabulary = ctypes.c_void_p(llama.llama_model_get_vocab(ctypes.c_void_p(model)))
    text, room = TEXT.encode(), (ctypes.c_int32 * 512)()
    count = llama.llama_tokenize(vocabulary, text, len(text), room, 512, ctypes.c_bool(True), ctypes.c_bool(True))
    llama.llama_model_free(ctypes.c_void_p(model))
    return [*room[:count]] == AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]


def rows_of(folder: Path, vocabulary: int) -> list[list[int]]:
    """Rows of tokens: of the demo's held-out text where the folder has a tokenizer, else random ones."""
    import torch

    if not (folder / "tokenizer.json").exists():
        return [
            torch.randint(1, vocabulary, (T,), generator=torch.Generator().manual_seed(T)).tolist() for T in LENGTHS
        ]
    from transformers import AutoTokenizer

    from linearize.demo.corpus import documents

    texts = [document.text for document in documents("heldout") if len(document.text) > 4000]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"][:T] for T in LENGTHS for text in texts[:4]]


def main(libraries: str, *folders: str) -> int:
    import torch

    from linearize.checkpoint.provenance import open_config
    from linearize.export.native import export_native
    from linearize.export.to_gguf import pre_tokenizer
    from linearize.train.save import load_converted

    llama, failed = library(Path(libraries)), 0
    for folder in map(Path, folders):
        model = load_converted(folder, torch.float32, False).eval()
        V = model.config.vocab_size
        rows = rows_of(folder, V)
        with torch.no_grad():
            expected = [model(input_ids=torch.tensor([row])).logits[0].numpy() for row in rows]
        with tempfile.TemporaryDirectory() as place:
            given = folder
            if (folder / "tokenizer.json").exists() and pre_tokenizer(folder) is None:  # the demo's: left out
                given = Path(shutil.copytree(folder, f"{place}/bare", ignore=shutil.ignore_patterns("tokenizer*")))
                listed = json.loads((given / "linearize.json").read_text())
                listed["files"] = [name for name in listed["files"] if not name.startswith("tokenizer")]
                (given / "linearize.json").write_text(json.dumps(listed))
            for form in ("gguf", "gguf-q8_0"):
                path = export_native(str(given), form, Path(place) / form).folder / "model.gguf"
                computed = logits_of(llama, path, rows, V)
                worst = max(
                    float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(computed, expected, strict=True)
                )
                # What 8 bits cost depends on the weights; of bfloat16 llama.cpp rounds hidden states as well.
                failed += form == "gguf" and open_config(folder).dtype == torch.float32 and not worst <= 1e-4
                found, wanted = (torch.from_numpy(np.concatenate(x)).log_softmax(-1) for x in (computed, expected))
                kl = float((wanted.exp() * (wanted - found)).sum(-1).mean())
                print(f"{folder}: {form}, {worst:.1e} of the largest logit, KL {kl:.1e} nats a token", flush=True)
            if (given / "tokenizer.json").exists():
                same = same_tokens(llama, path, folder)
                failed += not same
                print(f"{folder}: {'the same' if same else 'other'} tokens", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
