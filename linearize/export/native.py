"""`linearize export --as`: a converted model in a format that engines know, without code of its own.

A format says which layers it holds (`obstacles`), what its config is, and how weights fold into it. This file asks it,
writes the folder, and proves that transformers' own class computes the same logits from it, all tokens at once and one
by one; then it says which engines take the result.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.atomic import output_folder
from ..errors import Exit, LinearizeError, check_choice
from ..train.save import load_converted
from ..verify.tolerances import AMPLIFIED, NATIVE
from . import to_gguf
from .formats import CHOICES, choose
from .to_onnx import open_converted, proof_rows, silent
from .tokens import check_rule, other_tokens

# The largest shard that is written.
SHARD = 5 * 10**9
# Tokens of a proof's row, at most, which goes beyond a window.
LONGEST = 4096
TOKENS = "it reads text by AutoTokenizer, which makes other tokens"


class Exported(NamedTuple):
    """The folder that was written, in which format; how far the engines that ran are from transformers; which engines
    take it; and where its tokens are others than the model's, how to read them (`tokens`)."""

    folder: Path
    form: str
    differences: dict[str, float]
    engines: tuple[Engine, ...]
    tokens: str = ""


def export_native(
    model: str, form: str, output: Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Exported:
    """Write a converted model of a folder or the Hub, and its tokenizer, into a new folder as engines know it; as
    `gguf` or `gguf-q8_0` in one file, of the format that `auto` takes.

    Raises LinearizeError: 2 for an unknown format and where `output` is in the way, 3 for a model that the format does
    not hold, naming what is not exact, 4 for disk, memory and packages, 5 for the Hub, 6 if the
    logits differ.
    """
    check_choice("--as", form, CHOICES)
    folder, plan, config, carried = open_converted(model, output, revision, trust_remote_code)
    chosen = choose("auto" if form in to_gguf.FORMS else form, config, model)
    written = chosen.config(config)
    if form in to_gguf.FORMS:
        to_gguf.check(chosen.name, written, folder, model)
        check_rule(folder, model, trust_remote_code)
    loaded = load_converted(folder, torch.float32, trust_remote_code).eval()
    # A tied head has the same storage; formats that tie leave it out.
    weights = {name: tensor.detach() for name, tensor in loaded.state_dict().items()}
    with output_folder(output, overwrite=None) as work, silent(), torch.no_grad():
        tensors = chosen.fold(config, weights)
        (work / "config.json").write_text(json.dumps(written, indent=2) + "\n", "utf-8")
        rows = proof_rows(config.get_text_config(), LONGEST)
        expected = [loaded(input_ids=row[None], use_cache=False).logits[0] for row in rows]
        prove(work, tensors, rows, expected)
        del loaded, weights
        if form in to_gguf.FORMS:
            (work / "config.json").unlink()
            dtype = to_gguf.FORMS[form]
            to_gguf.write(work / to_gguf.FILE, chosen.name, written, tensors, folder, dtype)
            return Exported(output, form, {}, (Engine("llama.cpp", True, "0.5 and later, and what is built on it"),))
        save(work, tensors, plan.dtype, chosen.precise)
        for path in carried:
            shutil.copyfile(path, work / path.name)
        tokens = other_tokens(work, folder, trust_remote_code, output.name)
        differences = compared(reloaded(work), work, chosen.name, written, rows)
        wrong = {name: found for name, found in differences.items() if not found <= NATIVE}
        if wrong:
            name, found = next(iter(wrong.items()))
            raise LinearizeError(
                f"{name} computes other logits from the result than transformers: {found:.1e} of the largest, at most "
                f"{NATIVE:.0e} was expected. Nothing was written",
                Exit.CHECK_FAILED,
            )
    engines = engines_for(chosen.name, written)
    if tokens:
        engines = tuple(one._replace(takes=False, note=TOKENS) if one.name == "MLX" else one for one in engines)
    return Exported(output, chosen.name, differences, engines, tokens)


def save(folder: Path, tensors: dict[str, Tensor], dtype: str, precise: tuple[str, ...]) -> None:
    """Write the weights as safetensors in the model's dtype, and those that lose by it in fp32."""
    from huggingface_hub import save_torch_state_dict

    target = getattr(torch, dtype)
    stored = {n: x.contiguous() if n.endswith(precise) else x.to(target).contiguous() for n, x in tensors.items()}
    save_torch_state_dict(stored, folder, max_shard_size=SHARD, metadata={"format": "pt"})


def reloaded(folder: Path) -> Any:
    """What transformers loads from a folder, in fp32. Raises LinearizeError (exit 6) for missing or unknown weights."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, found = loaded
    wrong = [str(name) for names in found.values() for name in names]
    if wrong:
        message = f"transformers does not load what was written: {', '.join(wrong[:3])}. Nothing was written"
        raise LinearizeError(message, Exit.CHECK_FAILED)
    return model.eval()


def prove(folder: Path, tensors: dict[str, Tensor], rows: list[Tensor], expected: list[Tensor]) -> None:
    """Compare transformers' own class on the folded weights, in fp32, with the converted model: rows in one pass, and
    rows whose last tokens come one by one.

    Raises LinearizeError (exit 6) for missing or unknown weights, and for other logits than `expected`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    found = model.load_state_dict(tensors, strict=False)
    tied = {*(model.all_tied_weights_keys or {})} if hasattr(model, "all_tied_weights_keys") else set()
    missing = [name for name in found.missing_keys if name not in tied]
    model.tie_weights()
    if missing or found.unexpected_keys:
        what = ", ".join([*missing, *found.unexpected_keys][:3])
        message = f"weights do not fit {type(model).__name__}: {what}. Nothing was written"
        raise LinearizeError(message, Exit.CHECK_FAILED)
    for row, want in zip(rows, expected, strict=True):
        for what, logits in {"in one pass": one_pass(model, row), "step by step": stepped(model, row)}.items():
            difference = apart(logits, want, model, row)
            if not difference <= NATIVE:
                raise LinearizeError(
                    f"{type(model).__name__} computes other logits {what} than the model: {difference:.1e} of the "
                    f"largest, at most {NATIVE:.0e} was expected. Nothing was written",
                    Exit.CHECK_FAILED,
                )


def apart(logits: Tensor, want: Tensor, model: Any, row: Tensor) -> float:
    """The largest difference between logits [T,V] of a row [T] over the largest logit. Where that is more than NATIVE,
    tokens are left out that fp32's rounding of the embeddings moves as far in `model`."""
    each = (logits - want).abs().amax(-1) / want.abs().max()
    if bool((each <= NATIVE).all()):
        return float(each.max())
    embedded = model.get_input_embeddings()(row[None])
    noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(0)) * torch.finfo(torch.float32).eps
    one, other = (model(inputs_embeds=x, use_cache=False).logits[0] for x in (embedded, embedded * (1 + noise)))
    moved = (one - other).abs().amax(-1) / one.abs().max()
    return float(each.masked_fill(each <= AMPLIFIED * moved, 0.0).max())


def one_pass(model: Any, row: Tensor) -> Tensor:
    """Logits [T,V] of a row [T]."""
    logits: Tensor = model(input_ids=row[None], use_cache=False).logits[0]
    return logits


def stepped(model: Any, row: Tensor) -> Tensor:
    """Logits [T,V] of a row [T], whose last tokens come one by one."""
    begin = len(row) - min(STEPS, len(row) // 2)
    out = model(input_ids=row[None, :begin], use_cache=True)
    parts, cache = [out.logits[0]], out.past_key_values
    for place in range(begin, len(row)):
        out = model(input_ids=row[None, place : place + 1], past_key_values=cache, use_cache=True)
        parts, cache = [*parts, out.logits[0]], out.past_key_values
    return torch.cat(parts)


# ---------------------------------------------------------------- engines

# What they take of a format: by name and reason, and by trial where the engine is installed.


# Tokens at the end of a row that come one by one, at most.
STEPS = 16


class Engine(NamedTuple):
    """Whether an engine takes a model, and what is to be said: why it does not, or what it needs."""

    name: str
    takes: bool
    note: str


def engines_for(form: str, config: dict[str, Any]) -> tuple[Engine, ...]:
    """What engines make of a config.json that was written."""
    known = {"qwen3_5": qwen3_5_engines, "granitemoehybrid": granite_engines}
    return known.get(form, window_engines)(config.get("text_config", config))


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
    biased = "rows behind left padding differ, for it convolves biases of padding: pad on the right, or not at all"
    # Of Qwen3.5 alone it reads from config.json in what dtype the state of a linear layer is kept.
    half = config["dtype"] != "float32"
    rounded = [f"with --mamba-ssm-cache-dtype float32, or it rounds memories to {config['dtype']} at each token"] * half
    way = "its converter leaves out the rotary embedding: export it --as gguf"
    cpp = "; ".join(to_gguf.obstacles("granitemoehybrid", config)) or way
    return (
        Engine("transformers", True, "; ".join(["5.24 and later"] + [biased] * config["mamba_proj_bias"])),
        Engine("vLLM", True, "; ".join(["0.32 and later", *rounded])),
        Engine("SGLang", known, "0.5.23 and later" if known else f"nobody tried its {rope} rotary embedding"),
        Engine("MLX", not mlx, "; ".join(mlx)),
        Engine("llama.cpp", False, cpp),
    )


def window_engines(config: dict[str, Any]) -> tuple[Engine, ...]:
    """Windows: an engine whose class does not read `layer_types` computes softmax over all tokens, without an error."""
    form, rope = config["model_type"], config["rope_parameters"].get("rope_type", "default")
    untried = [] if rope in ("default", "llama3", "yarn") else [f"nobody tried its {rope} rotary embedding"]
    llama = 'with --hf-overrides \'{"architectures": ["LlamaForCausalLM"]}\' its own class, else that of transformers'
    vllm = {"ministral": llama, "granite_swa": "its own class"}.get(form)
    vllm = vllm or "with --model-impl transformers, for its own class stops"
    blind = f"its {form} knows no windows, and computes others without an error"
    mlx = {"ministral": [], "granite_swa": ["it has no class for it"]}.get(form, [blind])
    mlx += [] if "full_attention" in config["layer_types"] else ["its class wants a layer that keeps softmax"]
    copy = "in a copy with model_type llama in config.json, which no other engine should read"
    cpp = "; ".join(to_gguf.obstacles(form, config)) or "export it --as gguf"
    return (
        Engine("transformers", True, "5.24 and later" if form == "granite_swa" else "5.17 and later"),
        Engine("vLLM", True, "; ".join(["0.32 and later", vllm, *untried])),
        Engine("SGLang", False, "nobody tried it"),
        Engine("MLX", not mlx, "; ".join(mlx or [copy, *untried])),
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
            worst = max(worst, apart(logits, want, model, row))
    return {"MLX": worst}


def mlx_logits(folder: Path, row: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T,V] of a row [T] by mlx-lm in fp32: in one pass, and with the last tokens one by one."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    config = json.loads((folder / "config.json").read_text("utf-8"))
    # As in a copy that docs/native.md makes.
    model, _ = load_model(folder, model_config={"model_type": "llama"} if config["model_type"] == "ministral" else None)
    model.set_dtype(mx.float32)

    def tensor(logits: Any) -> Tensor:
        return torch.from_numpy(np.array(logits)[0].copy())

    ids, begin = mx.array(row[None].numpy()), len(row) - min(STEPS, len(row) // 2)
    whole, cache = tensor(model(ids)), make_prompt_cache(model)
    parts = [tensor(model(ids[:, :begin], cache=cache))]
    parts += [tensor(model(ids[:, place : place + 1], cache=cache)) for place in range(begin, len(row))]
    return whole, torch.cat(parts)
