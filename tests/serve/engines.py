"""Engines of vLLM on small converted models, and the comparison of what they write with what generate() writes.

Used by vllm_engines.py and vllm_matrix.py, in an environment that has vLLM (`make .venv-vllm/ready`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Before vllm is imported: the engine runs in this process, so that a test can look at its memory.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import transformers
from torch import Tensor

from linearize.convert import convert, plan_conversion

VOCAB = 97
LAYERS = 4
# Head dims that vLLM's attention on a CPU takes; weights large enough that a wrong position or mask shows.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Architecture -> (config class, what differs from SMALL); None: SMALL lacks that name.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "head_dim": None, "num_attention_heads": 2}),
    "qwen3": ("Qwen3Config", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "gemma2": ("Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 32}),
    "granite": ("GraniteConfig", {"head_dim": None, "num_attention_heads": 2, "attention_multiplier": 0.18}),
    "phi3": ("Phi3Config", {"head_dim": None, "num_attention_heads": 2}),
    "olmo2": ("Olmo2Config", {"head_dim": None, "num_attention_heads": 2}),
    "gpt_neox": ("GPTNeoXConfig", {"head_dim": None, "num_key_value_heads": None, "num_attention_heads": 2}),
    "gpt2": ("GPT2Config", {"head_dim": None, "num_key_value_heads": None, "num_attention_heads": 2}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}


class Case(NamedTuple):
    """A converted model: its architecture, and for each layer the mechanism and its options (None: softmax stays).

    Of the options `heads` are KV heads that keep softmax, as `--keep-heads` has them: "0,2".
    """

    architecture: str
    layers: tuple[tuple[str, dict[str, Any]] | None, ...]


def alike(architecture: str, mechanism: str, keep: tuple[int, ...] = (), **options: Any) -> Case:
    """A case with the same mechanism in every layer but those that `keep` softmax."""
    return Case(architecture, tuple(None if i in keep else (mechanism, options) for i in range(LAYERS)))


def source(folder: Path, architecture: str) -> Path:
    """A random model of an architecture, the same at each call."""
    kind, differences = ARCHITECTURES[architecture]
    values = {name: value for name, value in {**SMALL, **differences}.items() if value is not None}
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values))
        for parameter in model.parameters():
            if parameter.ndim == 1:  # ones and zeros would hide a norm or a bias that went lost
                torch.nn.init.normal_(parameter.data, float(parameter.data.mean()), 0.1)
        model.save_pretrained(folder)
    return folder


def converted(folder: Path, case: Case) -> Path:
    """The converted model of a case in `folder`/linear."""
    given = source(folder / "source", case.architecture)
    steps: list[Any] = []
    for number, layer in enumerate(case.layers):
        if layer is not None:
            options = {**layer[1]}
            heads = f"{number}:{options.pop('heads')}" if "heads" in options else ""
            made = plan_conversion(str(given), layer[0], layers=str(number), options=options, keep_heads=heads)
            steps += made[0].steps
    plan = dataclasses.replace(
        made[0], steps=tuple(steps), kept=tuple(s for s in made[0].kept if case.layers[s.layer] is None)
    )
    convert(plan, *made[1:], folder / "linear", level="none", say=lambda text: None)
    return folder / "linear"


@contextlib.contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[Any]:
    """An engine in float32 with little memory, not compiled unless asked; what it held is given back."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    plain = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 64 << 20}
    plain |= {"trust_remote_code": True, "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True}
    llm: Any = None
    try:
        llm = LLM(str(folder), **{**plain, **settings})
        yield llm
    finally:
        if llm is not None:  # a failed test's traceback holds it
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def state_layers(llm: Any) -> list[Any]:
    """The layers of an engine that have a state."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if type(layer).__name__ == "StateAttention"]


def fill_with_nan(llm: Any) -> None:
    """Overwrite the memory of all states with bytes that are NaN in every float dtype."""
    for layer in state_layers(llm):
        layer.kv_cache[0].fill_(255)


def prompts_of(lengths: tuple[int, ...], vocabulary: int = VOCAB, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    chance = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=chance).tolist() for n in lengths]


def load(folder: Path) -> Any:
    """The converted model as transformers loads it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def expected(model: Any, prompts: list[list[int]], new: int) -> list[tuple[list[int], Tensor]]:
    """What generate() writes greedily for each prompt alone: tokens, and the log-probabilities of the vocabulary."""
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        rows.append((out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).log_softmax(-1)))
    return rows


def write(llm: Any, prompts: list[list[int]], new: int, **sampling: Any) -> list[Any]:
    """What the engine makes of prompts of tokens; greedy unless `sampling` says otherwise."""
    from vllm import SamplingParams

    asked = {"temperature": 0.0, "max_tokens": new, "ignore_eos": True, "logprobs": 0, "detokenize": False, **sampling}
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(requests, SamplingParams(**asked), use_tqdm=False)


def differences(outputs: list[Any], references: list[tuple[list[int], Tensor]], limit: float = 2e-3) -> list[str]:
    """Where an engine's tokens, or the log-probabilities of its tokens, are not those of generate()."""
    found = []
    for output, (tokens, logprobs) in zip(outputs, references, strict=True):
        got, length = list(output.outputs[0].token_ids), len(output.prompt_token_ids)
        if got != tokens:
            found.append(f"prompt of {length}: {got} for {tokens}")
            continue
        ours = torch.tensor([step[token].logprob for step, token in zip(output.outputs[0].logprobs, got, strict=True)])
        error = float((ours - logprobs.gather(1, torch.tensor(got)[:, None])[:, 0]).abs().max())
        if not error <= limit:
            found.append(f"prompt of {length}: log-probabilities differ by {error:.1e}")
    return found
