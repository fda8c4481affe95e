"""A decode step whose states lie in a server's memory: by kernels that read and write rows there, against copying the
states out, stepping, and copying them back.

python -m benchmarks.serving                              # presets in attention of Llama 3.1 8B, 64 and 256 sequences
python -m benchmarks.serving --preset gsa gla --sequences 64
python -m benchmarks.serving --tiny                       # tries itself on a CPU

The memory is laid out as the plugin for vLLM does it: a row of bytes for each sequence, more rows than a call names, in
random order, and in the call rows of padding. For each preset, with its window and without:

1. errors: of the output and of the states after the step, against PyTorch in fp32 on the CPU, for 32 sequences; NaN
   lies in all rows that the call does not name, and must stay there bit by bit. It ends with 1 if an error is larger
   than --limit.
2. µs of the device for one step, replayed as a CUDA graph, both ways; and the time in which a copy moves the bytes that
   the step has to: the states read and written once.
3. one step of a model of four layers (--layers), replayed as a CUDA graph, both ways.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from linearize.bench.layer import conversion, recipe_of
from linearize.bench.timing import captured_us, here, machine, timed
from linearize.plan.mechanisms import build_mixer, load_mechanism, resolve_options
from linearize.serve.states import StateLayout, tensors_of
from linearize_kernels.hf.attention_hooks import attach
from linearize_kernels.hf.cache import StateLayer, map_state
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite

PRESETS = ("gsa", "gsa-window", "gla", "retnet", "gdn", "sla", "la", "mhla")
EIGHT = {"hidden": 4096, "heads": 32, "kv_heads": 8, "dim": 128, "mlp": 14336, "vocabulary": 128256}
TINY = {"hidden": 64, "heads": 4, "kv_heads": 2, "dim": 16, "mlp": 64, "vocabulary": 97}
# Tokens that the sequences hold, at least and at most.
HELD = (1, 200)
PADDING = 2  # rows of a call
CHECKED = 32
# Tensors of a state that a step does not read, or does not write, nearly always.
KEPT = {"past": 0, "old": 0, "mixed": 1}


def site_of(shape: dict[str, int], layer: int = 0) -> AttentionSite:
    path, heads, kv_heads, dim = f"model.layers.{layer}.self_attn", shape["heads"], shape["kv_heads"], shape["dim"]
    return AttentionSite(
        layer, path, "LlamaAttention", shape["hidden"], heads, kv_heads, dim, dim, dim**-0.5, causal=True
    )


def inputs(shape: dict[str, int], B: int, T: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and hidden states."""
    heads = shape["heads"], shape["kv_heads"], shape["kv_heads"]
    made = (torch.randn(B, T, n, shape["dim"], device=here(), dtype=dtype) for n in heads)
    return *made, torch.randn(B, T, shape["hidden"], device=here(), dtype=dtype)


class Memory:
    """States of B sequences in rows of a pool, as a server holds them."""

    def __init__(self, mixer: Any, shape: dict[str, int], B: int, dtype: torch.dtype) -> None:
        self.mixer, self.layout = mixer, StateLayout(mixer(*inputs(shape, 1, 1, dtype), TokenLayout())[1])
        self.pool = torch.full((B + B // 8 + 2, self.layout.bytes), 255, dtype=torch.uint8, device=here())
        self.rows = torch.randperm(len(self.pool), device=here())[:B].int()
        self.rows[torch.randperm(B)[:PADDING]] = -1
        self.real = self.rows >= 0
        self.named = self.rows[self.real].long()
        # By few sequences at a time: their keys and values are as large as the states.
        for part in self.named.split(32):
            lengths = torch.randint(*HELD, (len(part),), device=here())
            padding = torch.arange(int(lengths.max()), device=here()) < lengths[:, None]
            given = inputs(shape, *padding.shape, dtype)
            self.layout.write(self.pool, part, mixer(*given, TokenLayout(padding=padding))[1])

    def in_place(self, given: tuple[Tensor, ...]) -> Tensor:
        return self.mixer(*given, TokenLayout(rows=self.rows), self.layout.views(self.pool))[0]

    def copied(self, given: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """Without padding, which copying back cannot leave out."""
        o, state = self.mixer(*given, TokenLayout(), self.layout.read(self.pool, rows))
        self.layout.write(self.pool, rows, state)
        return o

    def least_bytes(self) -> int:
        """Of the states that a step reads and writes."""
        return len(self.named) * sum(part.nbytes * times for part, times in self.parts(self.layout.example))

    def parts(self, state: Any, times: int = 2) -> list[tuple[Tensor, int]]:
        if isinstance(state, Tensor):
            return [(state, times)]
        # A window is read, and one token of it written.
        names = {**KEPT, **({"keys": 1, "values": 1} if "held" in state._fields else {})}
        pairs = zip(state._fields, state, strict=True)
        return [one for name, part in pairs if part is not None for one in self.parts(part, names.get(name, times))]

    def errors(self, given: tuple[Tensor, ...]) -> dict[str, float]:
        """Largest errors of one step, over the largest reference value."""
        before, few = self.pool.clone(), self.named[:CHECKED]
        state = map_state(lambda x: x.cpu(), self.layout.read(before, few))
        state = map_state(lambda x: x.float() if x.dtype.is_floating_point else x, state)
        exact = copy.deepcopy(self.mixer).cpu().float()
        o = self.in_place(given)
        expected, after = exact(*(x[self.real][:CHECKED].cpu().float() for x in given), TokenLayout(), state)
        others = torch.ones(len(self.pool), dtype=torch.bool, device=here())
        others[self.named] = False
        assert torch.equal(self.pool[others], before[others]), "a row changed that was not named"
        assert not o[~self.real].any(), "padding has an output"
        found = {"output": error(o[self.real][:CHECKED].cpu(), expected)}
        ours = tensors_of(map_state(lambda x: x.cpu(), self.layout.read(self.pool, few)))
        found["state"] = max(error(x, y) for x, y in zip(ours, tensors_of(after), strict=True) if x.numel())
        self.pool.copy_(before)
        return found


def error(ours: Tensor, expected: Tensor) -> float:
    worst = float((ours.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-9))
    return worst if worst == worst else float("inf")


@functools.cache
def copy_speed() -> float:
    """Bytes a second that a copy reads and writes."""
    x = torch.empty(2**30 if here() == "cuda" else 2**24, dtype=torch.uint8, device=here())
    y = torch.empty_like(x)
    return 2 * x.nbytes / timed(lambda: y.copy_(x))["ms"] * 1e3


def bench_layer(preset: str, window: bool, B: int, shape: dict[str, int], dtype: torch.dtype, limit: float) -> bool:
    """A row of the table; whether it is right."""
    asked = conversion(recipe_of(preset))
    options = {name: value for name, value in asked.options.items() if window or name not in ("window", "sink")}
    torch.manual_seed(0)
    with torch.device(here()):
        mixer = build_mixer(asked.mechanism, site_of(shape), resolve_options(asked.mechanism, options)).to(dtype)
        mixer.reset_parameters()
    memory = Memory(mixer, shape, B, dtype)
    given = inputs(shape, B, 1, dtype)
    errors = memory.errors(given)
    # Times without padding, so that both do the same work.
    memory.rows = memory.rows[memory.real].contiguous()
    memory.real = memory.real[memory.real]
    given = tuple(x[: len(memory.rows)] for x in given)
    runs: dict[str, Callable[[], Any]] = {
        "in place": lambda: memory.in_place(given),
        "copied": lambda: memory.copied(given, memory.named),
    }
    took = {name: captured_us([run] * 4) for name, run in runs.items()}
    least = 1e6 * memory.least_bytes() / copy_speed()
    right = all(x <= limit for x in errors.values())
    print(
        f"| {preset}{'' if window else ', no window'} | {B} | {memory.layout.bytes / 2**20:.2f} | {least:.1f} | "
        f"{took['in place']:.1f} | {took['copied']:.1f} | {took['copied'] / took['in place']:.2f} | "
        f"{errors['output']:.1e} | {errors['state']:.1e} |{'' if right else ' WRONG'}",
        flush=True,
    )
    return right


# ---------------------------------------------------------------- a model


class PoolLayer(StateLayer):
    """A layer of a cache whose states are rows of a pool."""

    def __init__(self, memory: Memory, copied: bool) -> None:
        super().__init__()
        self.memory, self.copied, self.state = memory, copied, None

    def absorb(self, mixer: Any, given: tuple[Tensor, ...], layout: TokenLayout) -> Tensor:
        return self.memory.copied(given, self.memory.named) if self.copied else self.memory.in_place(given)


def bench_model(preset: str, B: int, layers: int, shape: dict[str, int], dtype: torch.dtype, limit: float) -> bool:
    """A row of the table: one step of a model of so many layers."""
    asked = conversion(recipe_of(preset))
    config = LlamaConfig(
        vocab_size=shape["vocabulary"], hidden_size=shape["hidden"], intermediate_size=shape["mlp"],
        num_hidden_layers=layers, num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"],
        head_dim=shape["dim"], max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    options = resolve_options(asked.mechanism, asked.options)
    sites = [vars(site_of(shape, layer)) for layer in range(layers)]
    spec = [{"mechanism": asked.mechanism, "options": options, "site": site} for site in sites]
    with torch.device(here()):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        attach(model, {"all_linear": True, "layers": spec}, {asked.mechanism: load_mechanism(asked.mechanism)})
    mixers = [layer.self_attn.mixer.to(dtype) for layer in model.model.layers]
    memories = [Memory(mixer, shape, B, dtype) for mixer in mixers]
    for memory in memories:
        memory.rows = memory.rows[memory.real].contiguous()
        memory.real = memory.real[memory.real]
    B = len(memories[0].rows)
    ids = torch.randint(shape["vocabulary"], (B, 1), device=here())
    places = torch.randint(*HELD, (B, 1), device=here())

    def step(copied: bool) -> Tensor:
        cache = DynamicCache()
        cache.layers = [PoolLayer(memory, copied) for memory in memories]
        return model(ids, position_ids=places, past_key_values=cache, use_cache=True).logits

    before = [memory.pool.to("cpu", copy=True) for memory in memories]
    logits = {}
    for copied in (False, True):
        logits[copied] = step(copied)
        for memory, pool in zip(memories, before, strict=True):
            memory.pool.copy_(pool)
    apart = error(logits[False], logits[True])
    took = {copied: captured_us([functools.partial(step, copied)]) for copied in (False, True)}
    right = apart <= limit
    print(
        f"| {preset} | {B} | {layers} | {took[False] / 1e3:.3f} | {took[True] / 1e3:.3f} | "
        f"{took[True] / took[False]:.2f} | {apart:.1e} |{'' if right else ' WRONG'}",
        flush=True,
    )
    return right


def row(preset: str, bench: Callable[..., bool], *arguments: Any) -> bool:
    """A row of a table; one that memory does not hold says so."""
    try:
        return bench(*arguments)
    except torch.OutOfMemoryError as error:
        print(f"| {preset} | {arguments} | {error} |", flush=True)
        return True
    finally:
        gc.collect()
        if here() == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=PRESETS)
    parser.add_argument("--sequences", nargs="+", type=int, default=(64, 256))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit", type=float, default=2e-2, help="largest relative error")
    parser.add_argument("--tiny", action="store_true", help="a small shape in fp16")
    asked = parser.parse_args()
    shape, dtype = (TINY, torch.float16) if asked.tiny else (EIGHT, torch.bfloat16)
    print("; ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    print(f"a copy moves {copy_speed() / 1e12:.2f} TB/s\n", flush=True)
    columns = ("preset", "sequences", "MiB each", "least µs", "in place µs", "copied µs", "times", "error", "of states")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    right = []
    for preset in asked.preset:
        windows = [True, False] if conversion(recipe_of(preset)).options.get("window") else [True]
        for window in windows:
            for B in asked.sequences:
                right.append(row(preset, bench_layer, preset, window, B, shape, dtype, asked.limit))
    columns = ("preset", "sequences", "layers", "in place ms", "copied ms", "times", "logits differ")
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for preset in asked.preset:
        for B in asked.sequences:
            right.append(row(preset, bench_model, preset, B, asked.layers, shape, dtype, asked.limit))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
