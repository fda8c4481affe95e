"""Text models in `linearize bench model`: training, prefill and decode at several lengths.

Training is forward and backward of the next-token loss, without an optimizer. Prefill is one pass over a prompt that
fills the cache. Decode is `generate()`, greedy: the median time from one token to the next, past the first ones; the
cache before it is filled with random numbers rather than computed. Softmax is the same model under `teacher()`, through
SDPA: with transformers' dynamic cache, and in decode also with its static cache, where transformers compiles the step
on a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, CompileConfig, DynamicCache, StaticCache

from ..checkpoint.code import SourceClasses
from ..checkpoint.source import Source
from ..errors import LinearizeError
from ..measure.generate import check_compiles
from ..plan.plan import Plan
from ..terminal.progress import progress
from ..train.compiled import CompiledLayers
from ..train.loop import set_checkpointing
from ..train.save import meta_model
from ..verify.child.behaviours import held_bytes
from ..verify.child.inputs import most_tokens, with_cache
from .case import COMPILED
from .kernels import attempt
from .timing import allocated, beside_device, device_ms, faster, here, measured, peak_mib


def llama(
    words: int, hidden: int, inner: int, layers: int, heads: int, kv: int, dim: int, tied: bool = False
) -> dict[str, Any]:
    """config.json of a Llama of that size."""
    sizes = {"vocab_size": words, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim}
    known = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    return {**known, **sizes, "max_position_embeddings": 131072, "tie_word_embeddings": tied}


# What config.json of Llama 3.2 1B and 3B and of Llama 3.1 8B says; the models that the papers of GSA and SLA train from
# scratch, in the form of a Llama, whose heads are fewer and wider;
# Pythia 1.4B, for the 8,192 tokens that the paper of LA trains it with.
SHAPES: dict[str, dict[str, Any]] = {
    "1b": llama(128256, 2048, 8192, 16, 32, 8, 64, tied=True),
    "3b": llama(128256, 3072, 8192, 28, 24, 8, 128, tied=True),
    "8b": llama(128256, 4096, 14336, 32, 32, 8, 128),
    "llama-1.3b": llama(32000, 2048, 5632, 24, 8, 8, 256),
    "llama-340m": llama(32000, 1024, 2816, 24, 4, 4, 256),
    "pythia-1.4b": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "dtype": "bfloat16", "vocab_size": 50304,
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16,
        "max_position_embeddings": 8192, "rotary_pct": 0.25,
    },
}  # fmt: skip
SOFTMAX, STATIC = "softmax, SDPA", "softmax, SDPA, static cache"
# Gets the name of a table, and a row of it.
Tell = Callable[[str, dict[str, Any]], None]
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
    tell: Tell = lambda *_: None,
) -> tuple[Any, dict[str, list[dict[str, Any]]]]:
    """The model, and its tables: `train` by length, `prefill` by context, `decode` by context and batch. With
    `compiled` steps of both models are measured compiled, too: decode as a whole, training layer by layer. `tell` gets
    a table's name and each row when it is measured; rows of the model called `mechanism` come before those of its
    peers.
    """
    result: dict[str, list[dict[str, Any]]] = {"train": [], "prefill": [], "decode": []}
    decoded = len(contexts) * len(batches) * (4 if compiled else 3)
    trained = 4 * len(train) * (2 if compiled else 1)
    total = 1 + trained + 2 * len(contexts) + decoded  # building the model, and the rows

    def measure(table: str, what: dict[str, Any], rows: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
        ours: dict[str, Any] = {}
        for name, work in rows.items():
            with built.teacher() if name.removesuffix(COMPILED) in (SOFTMAX, STATIC) else contextlib.nullcontext():
                record = {"name": name, **what, **attempt(work)}
            ours = ours or record
            result[table].append(record | faster(ours, record))
            tell(table, result[table][-1])
            advance(1)

    with progress("bench model", total) as advance:
        built = meta_model(None, planned, None, False, here()).eval()
        check_positions(built, [*train, *(context + TOKENS for context in contexts)])
        built.generation_config.eos_token_id = None  # no text ends early
        if compiled:
            check_compiles(built)
        advance(1)
        for length in train:
            for checkpointing, how in itertools.product((False, True), ("", COMPILED) if compiled else ("",)):
                step = partial(training, built, length, checkpointing, compiled=bool(how))
                what = {"tokens": length, "checkpointing": checkpointing}
                measure("train", what, {mechanism + how: step, SOFTMAX + how: step})
        for context in contexts:
            prompt = partial(prefill, built, context)
            measure("prefill", {"context": context}, {mechanism: prompt, SOFTMAX: prompt})
        for context in contexts:
            for batch in batches:
                steps = partial(decode, built, context, batch)
                recorded = {mechanism + COMPILED: partial(steps, compiled=True)} if compiled else {}
                rows = {mechanism: steps, **recorded, SOFTMAX: steps, STATIC: partial(steps, static=True)}
                measure("decode", {"context": context, "batch": batch}, rows)
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


def training(model: Any, length: int, checkpointing: bool, compiled: bool = False) -> dict[str, Any]:
    """Tokens per second of forward and backward, and peak memory with weights and gradients."""
    batch = max(1, STEP_TOKENS // length) if here() == "cuda" else 1
    ids = some_tokens(model, batch, length)
    model.train()
    set_checkpointing(model, checkpointing)
    layers = CompiledLayers(model).on if compiled else contextlib.nullcontext

    def step() -> None:
        with layers():
            model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    try:
        found = measured(step, 0, "tokens_s", batch * length)
    finally:
        model.zero_grad(set_to_none=True)
        set_checkpointing(model, False)
        model.eval()
    return {"batch": batch, **found}


# ---------------------------------------------------------------- inference


@torch.no_grad()
def prefill(model: Any, context: int) -> dict[str, Any]:
    """Time of one prompt through an empty cache, and the memory that it takes beside the weights."""
    ids = some_tokens(model, 1, context)

    def run() -> None:
        model(ids, use_cache=True, logits_to_keep=1, **with_cache(model, DynamicCache(config=model.config)))

    return measured(run, allocated())


@torch.no_grad()
def decode(model: Any, context: int, batch: int, compiled: bool = False, static: bool = False) -> dict[str, Any]:
    """Time per token after `context` tokens, the size of the cache then, and the peak beside the weights."""
    if static:
        torch.compiler.reset()  # earlier ones count: past a limit torch runs what it has not compiled
    before, run = allocated(), partial(generate, model, context, batch, compiled=compiled, static=static)
    peak = peak_mib(lambda: run(FIRST, Clock()), before)  # kernels are compiled, algorithms chosen
    clock = Clock()
    cache = run(TOKENS, clock)
    # What fills the cache is in both.
    many, few = (device_ms(lambda count=count: run(count, Clock())) for count in (TOKENS, FIRST))  # type: ignore[misc]
    device = None if many is None or few is None else (many - few) / (TOKENS - FIRST)
    steps = sorted(1e3 * (end - start) for start, end in pairwise(clock.times[FIRST:]))
    middle = {"ms": steps[len(steps) // 2], "low": steps[len(steps) // 4], "high": steps[3 * len(steps) // 4]}
    took = beside_device(middle, device)
    return {**took, "tokens_s": 1e3 * batch / middle["ms"], "cache_mib": cache, "peak_mib": peak}


class Clock:
    """A streamer of generate() that notes when each token is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to print."""


def generate(
    model: Any, context: int, batch: int, tokens: int, clock: Clock, compiled: bool = False, static: bool = False
) -> float:
    """`tokens` tokens after `context`, with `clock` for a streamer; returns MiB of the cache before."""
    cache = filled_cache(model, batch, context, static)
    ids = some_tokens(model, batch, context + 1)
    mib = sum(held_bytes(vars(layer)) for layer in cache.layers) / 2**20
    settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    if compiled:
        settings["compile_config"] = CompileConfig()
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **with_cache(model, cache), **settings)
    return mib


def filled_cache(model: Any, batch: int, context: int, static: bool = False) -> Cache:
    """A cache after `context` tokens: a state of one size, keys and values of so many. A static one has room for TOKENS
    more, whatever is asked for: a step is compiled for the size of its cache."""
    if static:
        cache: Cache = StaticCache(config=model.config.get_text_config(), max_cache_len=context + 1 + TOKENS)
    else:
        cache = DynamicCache(config=model.config)
    model(some_tokens(model, batch, PROMPT), use_cache=True, logits_to_keep=1, **with_cache(model, cache))
    layers: list[Any] = cache.layers
    for layer in layers:
        if hasattr(layer, "state"):
            layer.seen = context
        else:
            more = [
                x.new_empty(*x.shape[:2], context - PROMPT, x.shape[3]).normal_() for x in (layer.keys, layer.values)
            ]
            layer.update(*more)
    return cache
