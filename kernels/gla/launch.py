"""GLA on the GPU, host side: launch configurations, scratch, launches and the registered operators.

Configurations are shipped where they were measured, safe ones computed elsewhere; nothing is tuned at run time. Blocks
are never narrower than 64 channels: with 16 or 32, triton 3.6 compiled some kernels for Hopper to wrong results or to
accesses outside of memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .forward import gla_mix_kernel, gla_scan_kernel, gla_step_kernel
from .backward import gla_key_kernel
from ..gpu.launch import Problem, dense, in_rows, launch, lay_out, scratch, strides, width
from ..gpu.operators import operator, own_namespace
from ..gpu.target import refusal, target


class Launch(NamedTuple):
    """Block of key channels, block of value channels, warps and stages of one kernel."""

    block_k: int
    block_v: int
    warps: int
    stages: int


class Config(NamedTuple):
    """One launch per kernel, two of the scan where it cuts rows, and what the tensor cores make of computed factors."""

    chunk_size: int
    scan: Launch
    sums: Launch
    mix: Launch
    key: Launch
    precision: str
    # Chunks whose channels all keep more than 2^-range take one reference instead of the halving.
    range: float = 100.0
    # Programs of the scan that run at once, and the fewest chunks that make a piece of a row.
    programs: int = 0
    piece: int = 4
    # Of two launches the second reads the sums of gates that the first one made: differences of them are what it wants,
    # exact enough beside bf16.
    given: bool = False
    # Bytes of shared memory that a program may have.
    shared: int = 48 * 1024

    def over(self, how: Launch, heads: int) -> Launch:
        """A launch of the scan with as many of its stages as fit where it walks over so many heads of a memory."""
        fitting = [n for n in range(how.stages, 1, -1) if scan_bytes(self.chunk_size, how, heads, n) <= self.shared]
        return how._replace(stages=fitting[0] if fitting else 1)

    def pieces(self, programs: int, chunks: int) -> int:
        """Into how many pieces the scan cuts rows where it has `programs` without, and a row so many chunks.

        Pieces are walked twice: two of them gain nothing.
        """
        most = min(self.programs // programs, chunks // self.piece)
        return most if most > 2 else 1


# (capability, value dim above 64) -> what differs from `safe` for bf16. Measured: one H200, heads of 128.
SHIPPED: dict[tuple[tuple[int, int], bool], dict[str, Any]] = {
    ((9, 0), False): {"scan": Launch(64, 64, 4, 2), "mix": Launch(64, 64, 4, 2)},
    ((9, 0), True): {"scan": Launch(64, 128, 4, 2), "sums": Launch(64, 128, 4, 3), "mix": Launch(64, 128, 4, 2)},
}


def scan_bytes(chunk: int, how: Launch, heads: int, stages: int) -> int:
    """Bound on the shared memory of the scan in bf16, pipelined: the rows of all heads in as many buffers as there are
    stages, and a factor in two parts."""
    return 2 * chunk * (stages * heads * (how.block_k + how.block_v) + 2 * how.block_k)


def configure(q: Tensor, v: Tensor) -> Config:
    """The configuration for these inputs on their device."""
    gpu = target(q.device)
    if gpu is None:
        small = Launch(16, 16, 4, 1)
        return Config(32, small, small, small, small, "ieee", programs=12, piece=1, given=q.dtype == torch.float16)
    return choose(*gpu, v.shape[-1], q.dtype)


@functools.cache
def choose(capability: tuple[int, int], shared: int, processors: int, DV: int, dtype: torch.dtype) -> Config:
    """The shipped configuration, or a safe one. Registers allow two programs of the scan a multiprocessor."""
    config = safe(dtype)._replace(programs=2 * processors, shared=shared)
    if dtype == torch.bfloat16:
        config = config._replace(**SHIPPED.get((capability, DV > 64), {}))
    return config


def safe(dtype: torch.dtype) -> Config:
    """Tiles of 64 by 64, whose kernels need no more than 48 KiB of shared memory whatever the size of the heads."""
    one = Launch(64, 64, 4, 1)
    # In fp32, chunks of 64 would use Hopper's wgmma: three tf32 products through it race (seen with triton 3.6).
    # With bf16 inputs forward.py cuts operands into parts. Three bf16 products carry 16 bits of each factor, enough
    # for fp16; six carry 24.
    precision = {torch.bfloat16: "parts", torch.float16: "bf16x3", torch.float32: "bf16x6"}[dtype]
    half = dtype == torch.bfloat16
    return Config(64 if half else 32, one, one, one, one, precision, given=half)


def runs_on(q: Tensor, v: Tensor) -> str:
    """Why the kernels cannot take these inputs; empty when they can."""
    return refusal(q, v, 512, q.shape[2])


class Call(NamedTuple):
    """The inputs of the operator for several tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float
    segments: Tensor | None
    cu: Tensor | None
    S0: Tensor | None
    read_gate: Tensor | None
    write_gate: Tensor | None


def constants(config: Config, how: Launch, G: int, D: int, DV: int) -> dict[str, Any]:
    """What chunk kernels are compiled for, besides masks and direction: G query heads a memory, heads of D and DV."""
    return {
        "G": G,
        "D": D,
        "DV": DV,
        "C": config.chunk_size,
        "LEVELS": config.chunk_size.bit_length() - 1,
        "BD": width(D),
        "BK": how.block_k,
        "BV": how.block_v,
        "RANGE": config.range,
        "PREC": config.precision,
    }


class GLAProblem(Problem):
    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.g, self.scale, self.segments = call.g.contiguous(), call.scale, call.segments
        self.S0 = None if call.S0 is None else call.S0.float().contiguous()
        self.read, self.write = (None if x is None else x.contiguous() for x in (call.read_gate, call.write_gate))
        self.E, self.share = call.g.shape[2], call.g.shape[2] // call.k.shape[2]
        self.config = configure(call.q, call.v)
        self.layout = lay_out(call.q, call.cu, self.config.chunk_size)
        # What chunk kernels take after their tensors and strides.
        self.counts = self.T, self.layout.chunks, self.H, self.E, self.share
        self.masks = {"VARLEN": self.layout.per_chunk is not None, "SEGMENTS": self.segments is not None}

    def launch(self, kernel: Any, how: Launch, grid: tuple[int, ...], *arguments: Any, **changed: Any) -> None:
        own = constants(self.config, how, self.H // self.E, self.D, self.DV) | self.masks | changed
        launch(kernel, grid, *arguments, num_warps=how.warps, num_stages=how.stages, **own)

    def memories(self, count: int) -> Tensor:
        return self.new(count, self.E, self.D, self.DV)


def blocks(x: GLAProblem, how: Launch) -> int:
    """Of a memory, one for each program."""
    return -(-x.D // how.block_k) * -(-x.DV // how.block_v)


def scan(x: GLAProblem, xs: Tensor, ys: Tensor, gate: Tensor | None, b: Tensor, first: Tensor | None, last: Tensor | None,
         scale: float, reverse: bool) -> Tensor:  # fmt: skip
    """What enters each chunk, or with `reverse` the gradient of what leaves it, [slots,E,D,Dv]."""
    S, rows, how = x.memories(x.layout.slots), x.layout.rows, x.config.scan
    chunks = x.layout.chunks // (1 if x.layout.per_row is None else rows)
    pieces = x.config.pieces(blocks(x, how) * rows * x.E, chunks)
    sums = keep = None
    heads = x.H // x.E if reverse else 1

    def walk(how: Launch, *memories: Tensor | None) -> None:
        x.launch(
            gla_scan_kernel, x.config.over(how, heads), (blocks(x, how), rows * x.E, pieces), xs, ys, x.g, gate, x.segments,
            x.layout.per_chunk, x.layout.per_row, b, *memories, sums, keep, scale, *strides(xs, ys), *x.counts,
            REVERSE=reverse, G=heads, GIVEN=pieces > 1 and x.config.given,
        )  # fmt: skip

    if pieces > 1:
        sums, keep = x.memories(rows * pieces), x.new(rows * pieces, x.E, x.D)
        walk(x.config.sums, None, None, None)
    walk(how, S, first, last)
    return S


def results(x: Call) -> tuple[Tensor, Tensor]:
    """Room for o [B,T,H,Dv] and the memory after the last token, [rows,E,D,Dv] in fp32."""
    (B, T, H, D), E, DV, rows = x.q.shape, x.g.shape[2], x.v.shape[-1], len(x.q) if x.cu is None else len(x.cu) - 1
    return scratch(x.q, B, T, H, DV, dtype=x.q.dtype), scratch(x.q, rows, E, D, DV)


def forward(call: Call, o: Tensor, last: Tensor) -> None:
    x = GLAProblem(call)
    b = x.new(x.B, x.T, x.E, x.D)
    S, how = scan(x, x.k, x.v, x.write, b, x.S0, last, 1.0, False), x.config.mix
    x.launch(
        gla_mix_kernel, how, (x.layout.chunks * -(-x.DV // how.block_v), x.B * x.H), x.q, x.k, x.v, x.read, x.write,
        x.segments, x.layout.per_chunk, b, S, o, x.scale, 1.0, *strides(x.q, x.k, x.v), *x.counts, REVERSE=False,
    )  # fmt: skip


def backward(call: Call, do: Tensor, dS1: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, g, the entering memory and both row gates."""
    x, do = GLAProblem(call), dense(do)
    b, dS0 = x.new(x.B, x.T, x.E, x.D), None if x.S0 is None else x.memories(x.layout.rows)
    S = scan(x, x.k, x.v, x.write, b, x.S0, None, 1.0, False)
    last = None if dS1 is None else dS1.float().contiguous()
    dS = scan(x, x.q, do, x.read, b, last, dS0, x.scale, True)

    # Gate heads that share a KV head each make their own part of its gradient; the sum is below.
    dtype, how = torch.float32 if x.share > 1 else x.k.dtype, x.config.mix
    dk, dv = x.new(x.B, x.T, x.E, x.D, dtype=dtype), x.new(x.B, x.T, x.E, x.DV, dtype=dtype)
    x.launch(
        gla_mix_kernel, how, (x.layout.chunks * -(-x.DV // how.block_v), x.B * x.E), x.k, x.q, do, x.write, x.read,
        x.segments, x.layout.per_chunk, b, dS, dv, 1.0, x.scale, *strides(x.k, x.q, do), *x.counts, REVERSE=True,
    )  # fmt: skip

    how = x.config.key
    blocks = -(-x.D // how.block_k)
    dq, dg = x.new(x.B, x.T, x.H, x.D, dtype=x.q.dtype), x.new(x.B, x.T, x.E, x.D, dtype=x.g.dtype)
    dread, dwrite = (None if gate is None else x.new(blocks, *gate.shape) for gate in (x.read, x.write))
    x.launch(
        gla_key_kernel, how, (x.layout.chunks * blocks, x.B * x.E), x.q, x.k, x.v, do, x.read, x.write, x.segments,
        x.layout.per_chunk, b, S, dS, dq, dk, dg, dread, dwrite, x.scale, *strides(x.q, x.k, x.v, do), *x.counts,
        x.B * x.T * x.H, x.B * x.T * x.E,
    )  # fmt: skip
    if x.share > 1:
        dk, dv = (y.unflatten(2, (x.k.shape[2], -1)).sum(3) for y in (dk, dv))
    return dq, dk, dv, dg, dS0, *(None if y is None else y.sum(0) for y in (dread, dwrite))


def flops(x: Any) -> tuple[int, int]:
    """Of the chunk form, causal halves not discounted: 2 C (D + Dv) + 4 D Dv a token forward."""
    (B, T, H, D), DV, C = x.q, x.v[-1], 64
    return B * T * H * (2 * C * (D + DV) + 4 * D * DV), B * T * H * (2 * C * (3 * D + 2 * DV) + 10 * D * DV)


class StepCall(NamedTuple):
    """The inputs of the operators for one token; with rows S is a pool, which is changed in place."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float
    padding: Tensor | None
    S: Tensor
    read_gate: Tensor | None
    write_gate: Tensor | None
    rows: Tensor | None = None


def step_results(x: StepCall) -> tuple[Tensor, ...]:
    """Room for o [B,1,H,Dv] and, without rows, the new memory."""
    o = scratch(x.q, *x.q.shape[:3], x.v.shape[-1], dtype=x.q.dtype)
    return (o, scratch(x.S, *x.S.shape)) if x.rows is None else (o,)


def step(x: StepCall, o: Tensor, S1: Tensor | None = None) -> None:
    """One token in one launch."""
    q, k, v, g, scale, padding, S, read, write, rows = x
    (B, _, H, D), DV, E = q.shape, v.shape[-1], g.shape[2]
    q, k, v, g, S = dense(q), dense(k), dense(v), g.contiguous(), in_rows(S, rows)
    read, write = (None if y is None else y.contiguous() for y in (read, write))
    BD = width(D)
    BV = max(16, min(2048 // BD, width(DV)))
    launch(
        gla_step_kernel, (-(-DV // BV), E, B), q, k, v, g, read, write, padding, rows, S, o, S if S1 is None else S1,
        scale, q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
        0 if padding is None else padding.stride(0), S.stride(0), H, E, E // k.shape[2], num_warps=2,
        G=H // E, D=D, DV=DV, BD=BD, BV=BV,
    )  # fmt: skip


NAMESPACE = own_namespace(__name__, "gla")
chunked_op = operator(
    NAMESPACE, "gla", Call, results, forward, "o S1",
    backward=backward, leaves="q k v g S0 read_gate write_gate", flops=flops,
)  # fmt: skip
step_op = operator(NAMESPACE, "gla_step", StepCall, step_results, step, "o S1")
pool_op = operator(NAMESPACE, "gla_step_pool", StepCall, step_results, step, "o", changed="S")
