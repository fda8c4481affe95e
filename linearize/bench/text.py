"""Text models in `linearize bench model`: training, prefill and decode at several lengths.

Training is forward and backward of the next-token loss, without an optimizer. Prefill is one pass over a prompt that
fills the cache. Decode is `generate()`, greedy: the median time from one token to the next, past the first ones; the
cache before it is filled with random numbers rather than computed. Softmax is the same model under `teacher()`, through
SDPA, with transformers' dynamic cache.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache

from ..checkpoint.code import SourceClasses
from ..checkpoint.source import Source
from ..errors import LinearizeError
from ..measure.generate import check_compiles
from ..plan.plan import Plan
from ..train.loop import set_checkpointing
from ..train.save import meta_model
from ..verify.child.behaviours import held_bytes
from ..verify.child.inputs import most_tokens
from .kernels import attempt
from .timing import allocated, here, peak_mib, timed

# What config.json of Llama 3.2 1B says.
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": 128256,
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
}  # fmt: skip
SOFTMAX = "softmax, SDPA"
# Tokens of one training step.
STEP_TOKENS = 16384
# New tokens of a call of generate(), and how many of them come before the measurement.
TOKENS, FIRST = 40, 8
# A prompt that gives every cache its layers.
PROMPT = 4


def bench_text(
    planned: tuple[Plan, Source, SourceClasses],
    mechanism: str,
    *,
    train: Sequence[int] = (2048, 8192),
    contexts: Sequence[int] = (2048, 8192, 32768, 131072),
    batches: Sequence[int] = (1, 16),
    compiled: bool = False,
) -> tuple[Any, dict[str, list[dict[str, Any]]]]:
    """The model, and its tables: `train` by length, `prefill` by context, `decode` by context and batch, also by a
    compiled step.
    """
    built = meta_model(None, planned, None, False, here()).eval()
    check_positions(built, [*train, *(context + TOKENS for context in contexts)])
    built.generation_config.eos_token_id = None  # no text ends early
    if compiled:
        check_compiles(built)
    sides = {SOFTMAX: True, mechanism: False}
    result: dict[str, Any] = {"train": [], "prefill": [], "decode": []}

    def measure(table: str, what: dict[str, Any], work: Any, *arguments: Any) -> None:
        for name, teacher in sides.items():
            with built.teacher() if teacher else contextlib.nullcontext():
                result[table].append({"name": name, **what, **attempt(partial(work, built, *arguments))})

    for length in train:
        for checkpointing in (False, True):
            measure("train", {"tokens": length, "checkpointing": checkpointing}, training, length, checkpointing)
    for context in contexts:
        measure("prefill", {"context": context}, prefill, context)
    for context in contexts:
        for batch in batches:
            what = {"context": context, "batch": batch}
            measure("decode", what, decode, context, batch)
            if compiled:
                steps = attempt(partial(decode, built, context, batch, compiled))
                result["decode"].append({"name": f"{mechanism}, compiled", **what, **steps})
    return built, result


def check_positions(model: Any, lengths: list[int]) -> None:
    """Raise LinearizeError (exit 2) for more tokens than a model takes, which on a GPU would end the whole process."""
    most = most_tokens(model)
    if most is not None and max(lengths, default=0) > most:
        message = f"{type(model).__name__} takes at most {most} tokens"
        raise LinearizeError(f"{message}: give --train up to {most} and --contexts up to {most - TOKENS}")


def some_tokens(model: Any, batch: int, length: int) -> Tensor:
    return torch.randint(0, model.config.get_text_config().vocab_size, (batch, length), device=model.device)


# ---------------------------------------------------------------- training


def training(model: Any, length: int, checkpointing: bool) -> dict[str, Any]:
    """Tokens per second of forward and backward, and peak memory with weights and gradients."""
    batch = max(1, STEP_TOKENS // length) if here() == "cuda" else 1
    ids = some_tokens(model, batch, length)
    model.train()
    set_checkpointing(model, checkpointing)

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    try:
        took = timed(step, warm=2, least=3)
        peak = peak_mib(step, 0)
    finally:
        model.zero_grad(set_to_none=True)
        set_checkpointing(model, False)
        model.eval()
    return {"batch": batch, **took, "tokens_s": 1e3 * batch * length / took["ms"], "peak_mib": peak}


# ---------------------------------------------------------------- inference


@torch.no_grad()
def prefill(model: Any, context: int) -> dict[str, Any]:
    """Time of one prompt through an empty cache, and the memory that it takes beside the weights."""
    ids = some_tokens(model, 1, context)

    def run() -> None:
        model(ids, past_key_values=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)

    before = allocated()
    took = timed(run, warm=1, least=3)
    return {**took, "peak_mib": peak_mib(run, before)}


@torch.no_grad()
def decode(model: Any, context: int, batch: int, compiled: bool = False) -> dict[str, Any]:
    """Time per token after `context` tokens, the size of the cache then, and the peak beside the weights."""
    before, run = allocated(), partial(generate, model, context, batch, compiled=compiled)
    peak = peak_mib(lambda: run(FIRST), before)  # kernels are compiled, algorithms chosen
    times, cache = run(TOKENS)
    steps = sorted(1e3 * (end - start) for start, end in pairwise(times[FIRST:]))
    middle = {"ms": steps[len(steps) // 2], "low": steps[len(steps) // 4], "high": steps[3 * len(steps) // 4]}
    return {**middle, "tokens_s": 1e3 * batch / middle["ms"], "cache_mib": cache, "peak_mib": peak}


class Clock:
    """A streamer of generate() that notes when each token is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to print."""


def generate(model: Any, context: int, batch: int, tokens: int, compiled: bool = False) -> tuple[list[float], float]:
    """When each of `tokens` tokens after `context` was there, in seconds, and MiB of the cache before."""
    cache, clock = filled_cache(model, batch, context), Clock()
    ids = some_tokens(model, batch, context + 1)
    mib = sum(held_bytes(vars(layer)) for layer in cache.layers) / 2**20
    settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    if compiled:
        settings["compile_config"] = CompileConfig()
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, streamer=clock, **settings)
    return clock.times, mib


def filled_cache(model: Any, batch: int, context: int) -> DynamicCache:
    """A cache after `context` tokens: a state of one size, keys and values of so many."""
    cache = DynamicCache(config=model.config)
    model(some_tokens(model, batch, PROMPT), past_key_values=cache, use_cache=True, logits_to_keep=1)
    layers: list[Any] = cache.layers
    for layer in layers:
        if hasattr(layer, "state"):
            layer.seen = context
        else:
            layer.update(*(_more(x, context - PROMPT) for x in (layer.keys, layer.values)))
    return cache


def _more(x: Tensor, tokens: int) -> Tensor:
    return torch.randn(*x.shape[:2], tokens, x.shape[3], device=x.device, dtype=x.dtype)
