"""Causal linear attention on the GPU, host side: configurations, scratch, launches and the registered operators, which
la and retnet share."""

from __future__ import annotations

import functools
import math
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..layers.arguments import use_kernels
from ..gpu.launch import ChunkLayout, Problem, dense, in_rows, launch, lay_out, scratch, strides, unavailable, width
from ..gpu.operators import operator, own_namespace
from ..gpu.target import obstacle_of, target
from .states import delta_kernel, join_kernel, lengths_kernel, scan_kernel, step_kernel, sums_kernel
from .causal import gradients_kernel, out_kernel
from .decays import far_through
from .slopes import slope_gradients, sums_so_far


class Tiles(NamedTuple):
    """Of one kernel: tokens of a chunk, columns of a program, warps, buffers for what the loop loads."""

    chunk_size: int
    block: int
    warps: int
    stages: int


class Config(NamedTuple):
    """Tiles of every kernel; how long stretches are; what becomes of operands."""

    out: Tiles
    gradients: Tiles
    # `block` are columns of the state; so many rows.
    scan: Tiles
    scan_rows: int
    # So many programs of it fill the GPU; parts of rows have so many tokens at least.
    programs: int
    part: int
    # The scan leaves a state every so many tokens, a multiple of all chunks; a program looks at `keys` at a time.
    stretch: int
    keys: int
    # bf16: factors that the scan computes for gradients go in as two parts. Memories are outputs: theirs always do.
    split_sums: bool
    # Without a normaliser the scan makes the output, too, where it runs so many programs.
    walk: Tiles
    walk_from: float
    # Where every token sees all others; bf16: the state is read as two parts, 16 bits of it.
    sums_both: Tiles
    read: Tiles
    programs_both: int
    split_out: bool
    split_gradients: bool
    precision: str


# (capability, wider head dim, dtype, normalised) -> what differs from `safe`. Measured: one H200.
SHIPPED: dict[tuple[tuple[int, int], int, torch.dtype, bool], dict[str, Any]] = {
    ((9, 0), 128, torch.bfloat16, True): {
        "out": Tiles(64, 128, 4, 2),
        "gradients": Tiles(64, 128, 4, 2),
        "scan": Tiles(128, 64, 4, 3),
        "split_sums": False,
        "sums_both": Tiles(64, 128, 4, 3),
        "read": Tiles(64, 128, 4, 3),
    },
    ((9, 0), 64, torch.bfloat16, True): {
        "sums_both": Tiles(128, 64, 4, 3),
        "read": Tiles(64, 64, 4, 3),
    },
    ((9, 0), 128, torch.bfloat16, False): {
        "out": Tiles(64, 128, 4, 2),
        "gradients": Tiles(64, 128, 4, 2),
        "scan": Tiles(64, 64, 4, 3),
        "programs": 4 * 132,
        "stretch": 128,
        "split_sums": False,
        "walk": Tiles(32, 64, 4, 3),
        "walk_from": 256,
    },
    ((9, 0), 128, torch.float32, True): {
        "out": Tiles(128, 128, 8, 1),
        "gradients": Tiles(128, 128, 8, 1),
        "scan": Tiles(64, 64, 4, 1),
        "sums_both": Tiles(64, 128, 4, 2),
        "read": Tiles(64, 128, 4, 2),
    },
    ((9, 0), 128, torch.float32, False): {
        "out": Tiles(64, 128, 4, 1),
        "gradients": Tiles(64, 128, 4, 1),
        "scan": Tiles(64, 64, 4, 1),
    },
    ((9, 0), 64, torch.float32, True): {
        "out": Tiles(64, 64, 4, 1),
        "gradients": Tiles(64, 64, 4, 1),
        "scan": Tiles(64, 64, 4, 1),
        "sums_both": Tiles(64, 64, 4, 2),
        "read": Tiles(64, 64, 4, 2),
    },
    ((9, 0), 64, torch.float32, False): {
        "out": Tiles(64, 64, 4, 1),
        "gradients": Tiles(64, 64, 4, 1),
    },
}


def configure(q: Tensor, v: Tensor, precision: str, normalised: bool) -> Config:
    """The configuration for these inputs on their device. Raises ValueError where nothing fits."""
    config = _configure(q.device, q.dtype, q.shape[3], v.shape[3], normalised)
    return config._replace(precision=precision) if q.dtype == torch.float32 and q.is_cuda else config


def _configure(device: torch.device, dtype: torch.dtype, D: int, DV: int, normalised: bool) -> Config:
    gpu = target(device)
    if gpu is None:
        small = Tiles(16, 16, 4, 1)
        scan = small, 16, 12, 32, 48, 16, True, small, 5
        return Config(small, small, *scan, small, small._replace(block=64), 6, True, True, "ieee")
    return choose(*gpu, D, DV, dtype, normalised)


obstacle = obstacle_of(_configure)


@functools.cache
def choose(
    capability: tuple[int, int], shared: int, processors: int, D: int, DV: int, dtype: torch.dtype, normalised: bool
) -> Config:
    """The shipped configuration for (capability, D, dtype), or one that fits `shared` bytes of shared memory."""
    wide = width(max(D, DV))
    config = safe(shared, processors, wide, dtype)
    return config._replace(**SHIPPED.get((capability, wide, dtype, normalised), {}))


def safe(shared: int, processors: int, wide: int, dtype: torch.dtype) -> Config:
    """The largest tiles whose kernels need no more than `shared` bytes; `wide` is the wider head dim.

    Raises ValueError when not even the smallest fit.
    """
    item, columns = dtype.itemsize, min(wide, 64 if wide <= 128 else 32)
    longest = 64 if item == 2 and wide <= 128 else 32
    candidates = [Tiles(C, columns, 4, stages) for C in (64, 32, 16) if longest >= C for stages in (2, 1)]
    fitting = [tiles for tiles in candidates if shared_bytes(tiles, wide, item) <= shared]
    if not fitting:
        raise ValueError(f"head dim {wide} needs more than {shared} bytes of shared memory")
    tiles = fitting[0]
    read = tiles._replace(block=wide if wide <= 128 else 64)
    # Two programs of the scan a processor.
    scan = tiles, columns, 2 * processors, 1024, 256, 64, True, tiles, math.inf
    # fp16 and its sums: three bf16 products carry 16 bits of each factor.
    return Config(tiles, tiles, *scan, tiles, read, 4 * processors, False, True, "bf16x3")


def shared_bytes(tiles: Tiles, wide: int, item: int) -> int:
    """Bound on the shared memory of every kernel: what the loop loads, and computed factors in two parts."""
    C, BZ = tiles.chunk_size, tiles.block
    return item * (tiles.stages * C * (2 * wide + BZ) + 2 * (wide * BZ + C * C + C * BZ))


# The normaliser is at least this share of what it is for f = 1: only signed kernels come near.
GUARD = 1e-6

# What becomes of fp32 factors in the kernels: one product of 10 bits, or six of bf16 that carry 24. `auto` is tf32 where
# torch's own products may be, else bf16x6.
Precision = Literal["auto", "tf32", "bf16x6"]
PRECISIONS = get_args(Precision)


def use_triton(backend: str, precision: Precision, q: Tensor, v: Tensor, heads: int, obstacle: str = "") -> bool:
    """Whether the kernels take inputs of such dtypes and shapes, q in v's dtype, `heads` memories a row.

    Raises ValueError where `triton` is asked for and they do not, and for a precision that is not known.
    """
    obstacle = obstacle or runs_on(q, v, heads)
    if resolve_precision(precision) == "bf16x6" and v.dtype == torch.float32 and not obstacle:
        obstacle = six_products(q.device, max(q.shape[-1], v.shape[-1]))
    return use_kernels(backend, obstacle)


def resolve_precision(precision: Precision) -> str:
    """The precision that `auto` stands for, or the one that was asked for. Raises ValueError for another."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: must be one of {', '.join(PRECISIONS)}")
    return precision if precision != "auto" else "tf32" if allows_tf32() else "bf16x6"


@torch.compiler.assume_constant_result
def six_products(device: torch.device, wide: int) -> str:
    """Why products of fp32 in six of bf16 cannot run with heads up to `wide`; empty when they can."""
    gpu = target(device)
    if gpu is None:
        return ""
    if gpu.capability < (8, 0):
        return "a GPU of compute capability below 8.0 has no tensor cores for bf16, which exact fp32 needs"
    return f"exact fp32 of head dim {wide} needs more registers than there are" if wide > 128 else ""


@torch.compiler.assume_constant_result
def allows_tf32() -> bool:
    """Whether torch was told that products of fp32 may round their factors to tf32."""
    products: Any = torch.backends.cuda.matmul
    return str(products.fp32_precision) == "tf32"


def fits_unit(q: Tensor, v: Tensor) -> bool:
    """Whether a program holds whole rows of q and k: only then the kernels find their lengths."""
    return max(q.shape[-1], v.shape[-1]) <= 128


def runs_on(q: Tensor, v: Tensor, heads: int) -> str:
    """Why the kernels cannot take these inputs; empty when they can."""
    if reason := unavailable(q.device, v.dtype):
        return reason
    if q.dtype == torch.float64:
        return f"dtypes {q.dtype} and {v.dtype}"
    if q.is_cuda and min(q.shape[-1], v.shape[-1]) < 64:  # triton 3.6 and narrow tiles on Hopper: docs/measurements/kernel-notes.md
        return f"head dim {q.shape[-1]} or {v.shape[-1]} is below 64"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head dim {q.shape[-1]} or {v.shape[-1]} exceeds 256"
    if q.shape[0] * max(heads, q.shape[2]) > 65535:
        return f"{q.shape[0]} rows of {q.shape[2]} heads exceed a GPU's grid"
    return obstacle(q.device, v.dtype, q.shape[-1], v.shape[-1], True)


class Call(NamedTuple):
    """The inputs of the operator for several tokens. a, b [H]: normalised. Else log_decay [E] or none, and gates. `keep`:
    a backward pass will want the states."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor | None
    b: Tensor | None
    log_decay: Tensor | None
    read: Tensor | None
    write: Tensor | None
    scale: float
    unit: bool
    precision: str
    segments: Tensor | None
    padding: Tensor | None
    cu: Tensor | None
    first: Tensor | None
    keep: bool


def state_width(D: int, DV: int, normalised: bool) -> int:
    """Numbers of one memory: S [D,Dv]; normalised also z [D], u [Dv], n and three that fill up."""
    return D * DV + (D + DV + 4 if normalised else 0)


def stretch_states(x: Call, slots: int, E: int) -> tuple[Tensor, Tensor]:
    """Of so many stretches: S in the dtype that products take [slots,E,D*Dv], and z, u, n [slots,E,D+Dv+4]."""
    kind, D, DV = torch.bfloat16 if x.q.dtype == torch.bfloat16 else torch.float32, x.q.shape[3], x.v.shape[3]
    return scratch(x.q, slots, E, D * DV, dtype=kind), scratch(x.q, slots, E, 0 if x.a is None else D + DV + 4)


def count_memories(x: Call) -> int:
    """E: of KV heads, or with decays one for each of them."""
    return x.k.shape[2] if x.log_decay is None else x.log_decay.shape[0]


class LinearProblem(Problem):
    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.Hkv, self.E = call.k.shape[2], count_memories(call)
        self.config = configure(call.q, call.v, call.precision, call.a is not None)
        self.normalised = call.a is not None
        self.W = state_width(self.D, self.DV, self.normalised)
        slopes: Any = [None if x is None else x.float().contiguous() for x in (call.a, call.b)]
        self.a, self.b = slopes
        self.lam = None if call.log_decay is None else call.log_decay.float().contiguous()
        self.read, self.write = call.read, call.write
        self.first = None if call.first is None else call.first.float().contiguous()
        self.real = None if call.padding is None else call.padding.contiguous().view(torch.uint8)
        self.segments = call.segments
        self.rows = self.B if call.cu is None else call.cu.shape[0] - 1
        self.layout, self.L = self._cut()
        self.slots = self.layout.slots if call.cu is not None else self.B * self.layout.chunks

    def _cut(self) -> tuple[ChunkLayout, int]:
        """The scan leaves a state every L tokens."""
        return lay_out(self.q, self.call.cu, self.config.stretch), self.config.stretch

    def pieces(self, alone: int, wanted: int, step: int) -> int:
        """Tokens of a stretch, a multiple of `step`: `wanted` programs run, where a row's stretch takes `alone`."""
        L = -(-self.T // max(1, wanted // (self.B * alone)))
        return max(4 * step, -(-L // step) * step)

    def states(self) -> tuple[Tensor, Tensor]:
        """Room for those that enter stretches."""
        return stretch_states(self.call, self.slots, self.E)

    @property
    def walks(self) -> bool:
        """Whether the scan makes the output on its way: where heads and parts of rows fill the GPU."""
        programs = self.layout.rows * self.H * -(-self.DV // self.config.walk.block) * self.parts
        return not self.normalised and programs >= self.config.walk_from

    @cached_property
    def part(self) -> int:
        """Stretches of a part: where few programs would walk along whole rows, more of them walk along parts, twice.
        That is worth it from three parts on."""
        c = self.config
        alone = self.layout.rows * self.E * -(-self.D // c.scan_rows) * -(-self.DV // c.scan.block)
        parts = min(c.programs // alone, self.T // c.part)
        return max(1, -(-self.layout.chunks // (parts if parts > 2 else 1)))

    @property
    def parts(self) -> int:
        return -(-self.layout.chunks // self.part)

    @cached_property
    def places(self) -> Tensor | None:
        """Real tokens up to each, where decays count them."""
        if self.call.padding is None or self.lam is None:
            return None
        return self.call.padding.cumsum(1, dtype=torch.int32)

    def gates(self, *gates: Tensor | None) -> tuple[int, ...]:
        return tuple(step for gate in gates for step in ((0, 0, 0) if gate is None else gate.stride()))

    def constants(self, tiles: Tiles, split: bool = False) -> dict[str, Any]:
        """The constexpr arguments of the kernels."""
        call, wide = self.call, [width(x) for x in (self.D, self.DV)]
        return {
            "NORM": self.normalised,
            "UNIT": call.unit,
            "D": self.D,
            "DV": self.DV,
            "W": self.W,
            "BD": wide[0],
            "BDV": wide[1],
            "BZ": min(tiles.block, max(wide)),
            "C": tiles.chunk_size,
            "K": min(tiles.chunk_size, self.config.keys),
            "G": self.H // self.E,
            "DECAY": self.lam is not None,
            "READ": self.read is not None,
            "WRITE": self.write is not None,
            "VARLEN": call.cu is not None,
            "SEGMENTS": self.segments is not None,
            "PADDED": self.real is not None,
            "GUARD": GUARD,
            "SPLIT": split,
            "PREC": self.config.precision,
            "STAGES": tiles.stages,
            "num_warps": tiles.warps,
        }

    def enters(self, first: Tensor | None) -> bool:
        """Whether a state can enter a stretch."""
        return first is not None or self.layout.chunks > 1 or self.call.cu is not None

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.T, self.layout.chunks, self.L, self.H, self.E, self.E // self.Hkv


def scan(x: LinearProblem, tiles: Tiles, left: Tensor, right: Tensor, coefficients: tuple[Any, ...],
         lengths: tuple[Tensor, Tensor], first: Tensor | None, last: Tensor | None, back: bool,
         states: tuple[Tensor | None, Tensor | None], o: Tensor | None = None) -> None:  # fmt: skip
    """Walk along rows into `states` and `last`, and `o` if wanted; in parts, what enters them is found before."""
    inputs = left, right, coefficients, lengths
    if x.parts > 1:
        ends = x.new(x.layout.rows * x.parts, x.E, x.W)
        walk(x, x.config.scan, *inputs, None, ends, back, (None, None))
        join(x, ends, first, last, back, True)
        first, last = ends, None
    walk(x, tiles, *inputs, first, last, back, states, o)


def walk(x: LinearProblem, tiles: Tiles, left: Tensor, right: Tensor, coefficients: tuple[Any, ...],
         lengths: tuple[Tensor, Tensor], first: Tensor | None, last: Tensor | None, back: bool,
         states: tuple[Tensor | None, Tensor | None], o: Tensor | None = None) -> None:  # fmt: skip
    """Run `scan_kernel` over all parts, each with memories of its own in `first` and `last`."""
    c = x.constants(tiles, x.config.split_sums or not back)
    BX = c["BD"] if o is not None else min(x.config.scan_rows, c["BD"])
    BZ, gate = min(tiles.block, c["BDV"]), x.read if back else x.write
    heads = x.E if o is None else x.H
    grid = (-(-x.D // BX) * -(-x.DV // BZ), x.layout.rows * heads, x.parts)
    c |= {"BX": BX, "BZ": BZ, "R": min(16, tiles.chunk_size), "CUT": x.parts > 1, "OUT": o is not None}
    launch(
        scan_kernel, grid, left, right, x.q, o, *states, first, last, *coefficients, x.a, x.b, *lengths, x.lam, x.read,
        x.write, x.segments, x.real, x.layout.per_chunk, x.layout.per_row, x.call.scale, *strides(left, right, x.q),
        *x.gates(gate, x.read), *x.sizes, x.part, REVERSE=back, START=first is not None, LAST=last is not None, **c,
    )  # fmt: skip


def join(x: LinearProblem, ends: Tensor, first: Tensor | None, last: Tensor | None, back: bool, each: bool) -> None:
    """Into `last` the memory after all parts, which add `ends`; with `each` into `ends` what enters them."""
    c = x.constants(x.config.scan) | {"BW": 128, "STAGES": 4, "num_warps": 1}
    launch(
        join_kernel, (-(-x.W // c["BW"]), x.layout.rows * x.E), ends, first, last, x.lam, x.segments, x.real, x.places,
        x.layout.per_chunk, x.layout.per_row, x.T, x.layout.chunks, x.L, x.part, x.E, EACH=each, REVERSE=back,
        START=first is not None, LAST=last is not None, **c,
    )  # fmt: skip


def find_lengths(x: LinearProblem, r: Tensor) -> None:
    """Of k, inverse, where its unit vectors are wanted: into r [B,E,T]."""
    if x.call.unit:
        launch(
            lengths_kernel, (-(-x.T // 32), x.B * x.E), x.k, r, *strides(x.k), x.T, x.E, x.E // x.Hkv,
            num_warps=4, D=x.D, BD=width(x.D), R=32,
        )  # fmt: skip


def results(x: Call) -> tuple[Tensor, ...]:
    """Room for o [B,T,H,Dv], g [B,T,H], the memories after the last token [rows,E,W], inverse lengths of q and k; and, if
    the backward pass wants them, the states that entered stretches."""
    (B, T, H, D), DV, E, normalised = x.q.shape, x.v.shape[3], count_memories(x), x.a is not None
    rows, stretch = B if x.cu is None else len(x.cu) - 1, configure(x.q, x.v, x.precision, normalised).stretch
    slots = (B * -(-T // stretch) if x.cu is None else T // stretch + 2 * rows) if x.keep else 0
    return (
        scratch(x.q, B, T, H, DV, dtype=x.q.dtype),
        scratch(x.q, B, T, H if normalised else 0),
        scratch(x.q, rows, E, state_width(D, DV, normalised)),
        *(scratch(x.q, B, n if x.unit else 0, T) for n in (H, E)),
        *stretch_states(x, slots, E),
    )


def forward(call: Call, o: Tensor, g: Tensor, last: Tensor, rq: Tensor, rk: Tensor, S: Tensor,
            n: Tensor) -> None:  # fmt: skip
    x = LinearProblem(call)
    find_lengths(x, rk)
    if x.walks:
        states = (S, n) if call.keep else (None, None)
        scan(x, x.config.walk, x.k, x.v, (None, None), (rq, rk), x.first, last, False, states, o)
        return
    S, n = (S, n) if call.keep else x.states()
    scan(x, x.config.scan, x.k, x.v, (None, None), (rq, rk), x.first, last, False, (S, n))
    c = x.constants(x.config.out)
    rows = -(-x.L // c["C"])
    launch(
        out_kernel, (x.layout.chunks * rows * -(-x.DV // c["BZ"]), x.B * x.H), x.q, x.k, x.v, o, S, n, g, x.a, x.b, rq,
        rk, x.lam, x.read, x.write, x.segments, x.real, x.places, x.layout.per_chunk, x.call.scale,
        *strides(x.q, x.k, x.v), *x.gates(x.read, x.write), *x.sizes, STATE=x.enters(x.first), **c,
    )  # fmt: skip


def backward(
    call: Call, do: Tensor, dg: Tensor | None, dlast: Tensor | None, want_a: bool, want_b: bool,
    want_decay: bool, o: Tensor, g: Tensor, rq: Tensor, rk: Tensor, S: Tensor, n: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v, a, b, log_decay, of both gates and of the entering memories."""
    slopes, dg = want_a or want_b, dg if call.a is not None else None
    x, do = LinearProblem(call), dense(do)
    dg = None if dg is None else dg.contiguous()
    tiles = x.config.gradients
    if x.call.unit:  # lengths want whole rows
        tiles = tiles._replace(block=width(max(x.D, x.DV)))
    c = x.constants(tiles)
    rg = delta = None
    if x.normalised:
        rg, delta = x.new(x.B, x.H, x.T), x.new(x.B, x.H, x.T)
        launch(
            delta_kernel, (-(-x.T // 32), x.B * x.H), o, do, g, dg, rg, delta, x.real, *strides(o, do), x.T, x.H,
            num_warps=4, DV=x.DV, BV=c["BDV"], R=32, MASS=dg is not None, PADDED=x.real is not None,
            GUARD=GUARD,
        )  # fmt: skip
    dfirst = None if x.first is None else x.new(x.rows, x.E, x.W)
    dlast = None if dlast is None else dlast.float().contiguous()
    dS, dn = x.states()
    scan(x, x.config.scan, x.q, do, (rg, delta), (rq, rk), dlast, dfirst, True, (dS, dn))
    shared = x.Hkv < x.E
    dq = x.new(x.B, x.T, x.H, x.D, dtype=x.q.dtype)
    dk, dv = (x.new(x.B, x.T, x.E, n, dtype=torch.float32 if shared else x.q.dtype) for n in (x.D, x.DV))
    blocks, rows = -(-max(x.D, x.DV) // c["BZ"]), -(-x.L // c["C"])
    gates, blocks_d = x.read is not None or x.write is not None, -(-x.D // c["BZ"])
    aux = gates or slopes
    along = x.new(blocks_d * aux, x.B, x.T, x.H)
    dw = x.new(blocks_d * gates, x.B, x.T, x.E)
    far_q, far_k = (x.new(blocks_d * want_decay, x.B, x.T, heads) for heads in (x.H, x.E))
    launch(
        gradients_kernel, (x.layout.chunks * rows * blocks * 3, x.B * x.H), x.q, x.k, x.v, do, dq, dk, dv, along, dw,
        far_q, far_k, S, n, dS, dn, rg, delta, x.a, x.b, rq, rk, x.lam, x.read, x.write, x.segments, x.real, x.places,
        x.layout.per_chunk, x.B, x.call.scale, *strides(x.q, x.k, x.v, do), *x.gates(x.read, x.write), *x.sizes,
        STATE=x.enters(x.first), LATER=x.enters(dlast), AUX=aux, FAR=want_decay, **c,
    )  # fmt: skip
    if shared:
        dk, dv = (y.unflatten(2, (x.Hkv, -1)).sum(3) for y in (dk, dv))
    ends: tuple[Tensor | None, Tensor | None] = None, None
    if slopes and rg is not None and delta is not None:
        begin = x.D * x.DV + x.D
        first = None if x.first is None else (x.first[..., begin : begin + x.DV], x.first[..., begin + x.DV])
        u, n = sums_so_far(x.v, x.call.padding, x.segments, x.call.cu, first)
        ends = slope_gradients(x.a, x.b, do, u, n, g, rg, delta, along, dg, GUARD)
    ddecay = None
    if want_decay and x.lam is not None:
        passed = far_through(S, dS, x.lam, x.T, x.L, x.layout.per_chunk, x.places, x.segments)
        ddecay = far_q.sum((0, 1, 2)).unflatten(0, (x.E, -1)).sum(1) + far_k.sum((0, 1, 2)) + passed
    dread, dwrite = (None if gate is None else y.sum(0) for gate, y in ((x.read, along), (x.write, dw)))
    return dq, dk, dv, *ends, ddecay, dread, dwrite, dfirst


def flops(x: Any) -> tuple[int, int]:
    """Of the chunk form, causal halves not discounted: 2 C (D + Dv) + 4 D Dv a token and head forward."""
    (B, T, H, D), DV, C = x.q, x.v[-1], 64
    return B * T * H * (2 * C * (D + DV) + 4 * D * DV), B * T * H * (2 * C * (3 * D + 2 * DV) + 10 * D * DV)


# ---------------------------------------------------------------- decode


class StepCall(NamedTuple):
    """The inputs of the operators for one token; with rows S, z, u and tokens are pools, changed in place."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor | None
    b: Tensor | None
    log_decay: Tensor | None
    read: Tensor | None
    write: Tensor | None
    scale: float
    unit: bool
    padding: Tensor | None
    S: Tensor
    z: Tensor | None
    u: Tensor | None
    tokens: Tensor | None
    rows: Tensor | None = None


def step_results(x: StepCall) -> tuple[Tensor, ...]:
    """Room for o [B,1,H,Dv], g [B,1,H] and, without rows, the new S, z, u and token counts (empty without them)."""
    state = x[11:15] if x.rows is None else ()
    after = (scratch(x.q, 0) if y is None else scratch(x.q, *y.shape, dtype=y.dtype) for y in state)
    o = scratch(x.q, *x.q.shape[:3], x.v.shape[-1], dtype=x.q.dtype)
    return o, scratch(x.q, *x.q.shape[:3]), *after


def step(x: StepCall, o: Tensor, g: Tensor, *after: Tensor) -> None:
    """One token in one launch; in two where sums of keys lie in a pool."""
    q, k, v, a, b, log_decay, read, write, scale, unit, padding, *state, rows = x
    (B, _, H, D), DV, E = q.shape, v.shape[-1], x.S.shape[1]
    q, k, v = dense(q), dense(k), dense(v)
    state = [None if y is None else in_rows(y, rows) for y in state]
    steps = [0 if y is None else y.stride(0) for y in state]
    numbers = [None if y is None else y.float().contiguous() for y in (a, b)]
    lam = None if log_decay is None else log_decay.float().contiguous()
    gates = [None if y is None else y.contiguous() for y in (read, write)]
    BD, BZ = width(D), min(32, width(DV))
    real = None if padding is None else padding.view(torch.uint8)
    launch(
        step_kernel, (E * -(-DV // BZ), B), q, k, v, *state, o, g, *(after or state), *numbers, lam, *gates, real,
        rows, scale, q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
        0 if real is None else real.stride(0), *steps, H, E, E // k.shape[2], num_warps=4,
        NORM=a is not None,
        UNIT=unit, D=D, DV=DV, BD=BD, BZ=BZ, G=H // E, DECAY=lam is not None, READ=read is not None,
        WRITE=write is not None, PADDED=real is not None, GUARD=GUARD,
    )  # fmt: skip
    if rows is not None and a is not None:
        launch(
            sums_kernel, (E, B), k, state[1], state[3], real, rows, k.stride(0), k.stride(2),
            0 if real is None else real.stride(0), steps[1], steps[3], E // k.shape[2], num_warps=1,
            UNIT=unit, D=D, BD=BD, PADDED=real is not None,
        )  # fmt: skip


NAMESPACE = own_namespace(__name__, "linear")
chunked_op = operator(
    NAMESPACE, "linear", Call, results, forward, "o g last | rq rk S n", kept="o g rq rk S n",
    backward=backward, leaves="q k v a? b? log_decay? read write first", usual=0, flops=flops,
)  # fmt: skip
step_op = operator(NAMESPACE, "linear_step", StepCall, step_results, step, "o g S z u tokens")
pool_op = operator(
    NAMESPACE, "linear_step_pool", StepCall, step_results, step, "o g", changed="S z u tokens"
)  # fmt: skip
