"""`linearize bench model`: a converted model beside its softmax original, in one process, on random weights.

Of models of text (of images: bench_vision.py) training is forward and backward of the next-token loss, without an
optimizer. Prefill is one pass over a prompt that fills the cache. Decode is `generate()`, greedy: the median time from
one token to the next, past the first ones; the cache before it is filled with random numbers rather than computed.
Softmax is the same model under `teacher()`, through SDPA, with transformers' dynamic cache.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache

from .bench import attempt
from .bench_measure import allocated, here, machine, peak_mib, timed
from .bench_vision import IMAGES, bench_images
from .bench_vision import SHAPES as IMAGE_SHAPES
from .convert import plan_conversion
from .errors import LinearizeError, did_you_mean
from .export import meta_model
from .generate import check_compiles
from .plan import Plan
from .render import Natives
from .source import Source, open_source

# What config.json of a model of that size says; 1b is Llama 3.2 1B.
SHAPES: dict[str, dict[str, Any]] = IMAGE_SHAPES | {
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


def bench_model(
    model: str | None,
    shape: str | None,
    mechanism: str,
    *,
    options: dict[str, Any],
    compiled: bool = False,
    batches: list[int] | None = None,
    **given: list[int] | None,
) -> dict[str, Any]:
    """Measure a folder or Hub id, of which only the config is read, or a shape by name, converted to `mechanism`.

    Of text `given` may have lengths to `train` at and `contexts`; `compiled` decodes by a compiled step as well. Of
    images it may have `sizes`. Returns plain data: `machine`, `model`, and the tables of `bench_text` or of
    `bench_images`. Raises LinearizeError: 2 unless either a model or a known shape is given, and for an option of the
    other kind of model; 3 where no step can be compiled, and whatever planning raises.
    """
    planned = plan_for(model, shape, mechanism, options)
    images = planned[2].head.main_input_name == IMAGES
    lengths = {name: value for name, value in given.items() if value is not None}
    foreign = [f"--{name}" for name in [*lengths, *(["compile"] if compiled else [])] if images != (name == "sizes")]
    if foreign:
        kind = "images: choose --sizes and --batches" if images else "text: choose --train, --contexts, --batches"
        raise LinearizeError(f"{shape or model}: {', '.join(foreign)} means nothing to a model of {kind}")
    if images:
        again = partial(plan_for, model, shape, mechanism, options)
        built, tables = bench_images(planned, again, mechanism, batches=batches or (), **lengths)
    else:
        built = meta_model(None, planned, None, False, here()).eval()
        tables = bench_text(built, mechanism, compiled=compiled, batches=batches or [1, 16], **lengths)
    plan = planned[0]
    about = {
        "name": shape or model,
        "architecture": plan.architecture,
        "dtype": plan.dtype,
        "parameters": sum(p.numel() for p in built.parameters()),
        "mechanism": mechanism,
        "options": plan.steps[0].options,
        "layers": len(plan.steps),
    }
    return {"machine": machine(), "model": about, **tables}


def plan_for(
    model: str | None, shape: str | None, mechanism: str, options: dict[str, Any], **changes: Any
) -> tuple[Plan, Source, Natives]:
    """The conversion of a model, or of a shape by name; `changes` replace entries of its config.

    Raises LinearizeError: 2 unless either a model or a known shape is given, and whatever planning raises.
    """
    if (model is None) == (shape is None):
        raise LinearizeError("give either a model or --shape")
    if shape is not None and shape not in SHAPES:
        raise LinearizeError(f"--shape {shape}: choose {', '.join(SHAPES)}.{did_you_mean(shape, SHAPES)}")
    arguments: dict[str, Any] = {"options": options, "weights": False}
    if model is not None and not changes:
        return plan_conversion(model, mechanism, **arguments)
    config = SHAPES[shape] if shape else open_source(str(model), None, weights=False).config
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")
        return plan_conversion(scratch, mechanism, **arguments)


# ---------------------------------------------------------------- text


def bench_text(
    built: Any,
    mechanism: str,
    *,
    train: Sequence[int] = (2048, 8192),
    contexts: Sequence[int] = (2048, 8192, 32768, 131072),
    batches: Sequence[int] = (1, 16),
    compiled: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """`train` by length, `prefill` by context, `decode` by context and batch, also by a compiled step."""
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
    return result


def some_tokens(model: Any, batch: int, length: int) -> Tensor:
    return torch.randint(0, model.config.get_text_config().vocab_size, (batch, length), device=model.device)


# ---------------------------------------------------------------- training


def training(model: Any, length: int, checkpointing: bool) -> dict[str, Any]:
    """Tokens per second of forward and backward, and peak memory with weights and gradients."""
    batch = max(1, STEP_TOKENS // length) if here() == "cuda" else 1
    ids = some_tokens(model, batch, length)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    try:
        took = timed(step, warm=2, least=3)
        peak = peak_mib(step, 0)
    finally:
        model.zero_grad(set_to_none=True)
        model.gradient_checkpointing_disable()
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
    mib = sum(part.nbytes for layer in cache.layers for part in held(vars(layer))) / 2**20
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


def held(value: Any) -> list[Tensor]:
    """The tensors in a value."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [part for item in inner for part in held(item)]


# ---------------------------------------------------------------- the report


def markdown(result: dict[str, Any]) -> str:
    """The result as the tables of docs/performance.md."""
    about = result["model"]
    lines = ["; ".join(f"{key} {value}" for key, value in result["machine"].items()), ""]
    options = " ".join(f"{key}={value}" for key, value in about["options"].items())
    lines += [
        f"{about['name']}: {about['architecture']}, {about['parameters'] / 1e6:,.1f} M random parameters in "
        f"{about['dtype']}; {about['layers']} layers to {about['mechanism']} ({options})."
    ]
    heads = {
        "train": ("tokens", "batch", "checkpointing", "tokens/s", "peak GiB"),
        "prefill": ("context", "ms", "peak GiB"),
        "decode": ("context", "batch", "ms/token", "tokens/s", "cache MiB", "peak GiB"),
        "inference": ("size", "batch", "ms", "images/s", "peak GiB"),
        "training": ("size", "batch", "ms", "images/s", "peak GiB"),
    }
    for table, columns in heads.items():
        if table not in result:
            continue
        lines += ["", f"| {table} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [
            f"| {one['name']} | {' | '.join(_cell(one, column) for column in columns)} |" for one in result[table]
        ]
    return "\n".join(lines)


def _cell(record: dict[str, Any], column: str) -> str:
    if column in ("tokens", "context", "batch", "size"):
        return f"{record[column]:,}" if column in record else ""
    if column == "checkpointing":
        return "on" if record["checkpointing"] else "off"
    if "failed" in record:
        return record["failed"]
    units = {"ms/token": "ms", "cache MiB": "cache_mib", "peak GiB": "peak_mib"}
    value = record[units.get(column, column.replace("/", "_"))]
    if value is None:
        return ""
    return f"{value / 1024:.2f}" if column == "peak GiB" else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
