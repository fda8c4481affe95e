"""Linear attention on the GPU, host side: scratch and launches.

`forward` and `backward` take the arguments of their operators in linear_ops.py, in that order.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..layers.arguments import use_kernels
from ..gpu.launch import Layout, dense, entry, interpreted, launch, lay_out, scratch, strides, width
from .config import Tiles, configure, obstacle
from .states import delta_kernel, join_kernel, lengths_kernel, scan_kernel, step_kernel
from .causal import gradients_kernel, out_kernel
from ..gpu.tiles import triton

# The normaliser is at least this share of what it is for f = 1: only signed kernels come near.
GUARD = 1e-6

# What becomes of fp32 factors in the kernels.
Precision = Literal["tf32", "bf16x3", "ieee"]


def use_triton(backend: str, q: Tensor, v: Tensor, heads: int, obstacle: str = "") -> bool:
    """Whether the kernels take inputs of such dtypes and shapes, q in v's dtype, `heads` memories a row. `auto` leaves
    fp32 to PyTorch: tf32 would surprise, and how fast precision="ieee" is was not measured.

    Raises ValueError where `triton` is asked for and they do not.
    """
    if backend == "auto" and v.dtype == torch.float32:
        return False
    return use_kernels(backend, obstacle or runs_on(q, v, heads))


def fits_unit(q: Tensor, v: Tensor) -> bool:
    """Whether a program holds whole rows of q and k: only then the kernels find their lengths."""
    return max(q.shape[-1], v.shape[-1]) <= 128


def runs_on(q: Tensor, v: Tensor, heads: int) -> str:
    """Why the kernels cannot take these inputs; empty when they can."""
    if triton is None:
        return "triton is not installed"
    if q.device.type != "cuda" and not interpreted():
        return f"the tensors are on {q.device}"
    if v.dtype not in (torch.bfloat16, torch.float16, torch.float32) or q.dtype == torch.float64:
        return f"dtypes {q.dtype} and {v.dtype}"
    if q.is_cuda and min(q.shape[-1], v.shape[-1]) < 64:  # triton 3.6 and narrow tiles on Hopper: docs/measurements/kernel-notes.md
        return f"head dim {q.shape[-1]} or {v.shape[-1]} is below 64"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head dim {q.shape[-1]} or {v.shape[-1]} exceeds 256"
    if q.shape[0] * max(heads, q.shape[2]) > 65535:
        return f"{q.shape[0]} rows of {q.shape[2]} heads exceed a GPU's grid"
    return obstacle(q.device, v.dtype, q.shape[-1], v.shape[-1])


class Call(NamedTuple):
    """The arguments of the forward operator. a, b [H]: normalised. Else log_decay [E] or none, and gates. `keep`: a
    backward pass will want the states."""

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


class Problem:
    """One call, made dense, and what every launch derives from it; `number` is what `entry` gives it."""

    def __init__(self, number: int, call: Call) -> None:
        self.number, self.call = number, call
        self.q, self.k, self.v = (dense(x) for x in call[:3])
        (self.B, self.T, self.H, self.D), self.Hkv, self.DV = call.q.shape, call.k.shape[2], call.v.shape[3]
        self.E = self.Hkv if call.log_decay is None else call.log_decay.shape[0]
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

    def _cut(self) -> tuple[Layout, int]:
        """The scan leaves a state every L tokens."""
        return lay_out(self.q, self.call.cu, self.config.stretch), self.config.stretch

    def pieces(self, alone: int, wanted: int, step: int) -> int:
        """Tokens of a stretch, a multiple of `step`: `wanted` programs run, where a row's stretch takes `alone`."""
        L = -(-self.T // max(1, wanted // (self.B * alone)))
        return max(4 * step, -(-L // step) * step)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return scratch(self.q, *shape, dtype=dtype)

    def states(self, slots: int) -> tuple[Tensor, Tensor]:
        """Of so many stretches: S in the dtype that products take [slots,E,D*Dv], and z, u, n [slots,E,D+Dv+4]."""
        kind = torch.bfloat16 if self.q.dtype == torch.bfloat16 else torch.float32
        S = self.new(slots, self.E, self.D * self.DV, dtype=kind)
        return S, self.new(slots, self.E, self.D + self.DV + 4 if self.normalised else 0)

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
            "C": tiles.chunk,
            "K": min(tiles.chunk, self.config.keys),
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
            "call": self.number,
            "num_warps": tiles.warps,
        }

    def enters(self, first: Tensor | None) -> bool:
        """Whether a state can enter a stretch."""
        return first is not None or self.layout.chunks > 1 or self.call.cu is not None

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.T, self.layout.chunks, self.L, self.H, self.E, self.E // self.Hkv


def scan(x: Problem, tiles: Tiles, left: Tensor, right: Tensor, coefficients: tuple[Any, ...],
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


def walk(x: Problem, tiles: Tiles, left: Tensor, right: Tensor, coefficients: tuple[Any, ...],
         lengths: tuple[Tensor, Tensor], first: Tensor | None, last: Tensor | None, back: bool,
         states: tuple[Tensor | None, Tensor | None], o: Tensor | None = None) -> None:  # fmt: skip
    """Run `scan_kernel` over all parts, each with memories of its own in `first` and `last`."""
    c = x.constants(tiles, x.config.split_sums or not back)
    BX = c["BD"] if o is not None else min(x.config.scan_rows, c["BD"])
    BZ, gate = min(tiles.block, c["BDV"]), x.read if back else x.write
    heads = x.E if o is None else x.H
    grid = (-(-x.D // BX) * -(-x.DV // BZ), x.layout.rows * heads, x.parts)
    c |= {"BX": BX, "BZ": BZ, "R": min(16, tiles.chunk), "CUT": x.parts > 1, "OUT": o is not None}
    launch(
        scan_kernel, grid, left, right, x.q, o, *states, first, last, *coefficients, x.a, x.b, *lengths, x.lam, x.read,
        x.write, x.segments, x.real, x.layout.per_chunk, x.layout.per_row, x.call.scale, *strides(left, right, x.q),
        *x.gates(gate, x.read), *x.sizes, x.part, REVERSE=back, START=first is not None, LAST=last is not None, **c,
    )  # fmt: skip


def join(x: Problem, ends: Tensor, first: Tensor | None, last: Tensor | None, back: bool, each: bool) -> None:
    """Into `last` the memory after all parts, which add `ends`; with `each` into `ends` what enters them."""
    c = x.constants(x.config.scan) | {"BW": 128, "STAGES": 4, "num_warps": 1}
    launch(
        join_kernel, (-(-x.W // c["BW"]), x.layout.rows * x.E), ends, first, last, x.lam, x.segments, x.real, x.places,
        x.layout.per_chunk, x.layout.per_row, x.T, x.layout.chunks, x.L, x.part, x.E, EACH=each, REVERSE=back,
        START=first is not None, LAST=last is not None, **c,
    )  # fmt: skip


def lengths(x: Problem) -> Tensor:
    """Of k, inverse, where its unit vectors are wanted: [B,E,T]."""
    r = x.new(x.B, x.E if x.call.unit else 0, x.T)
    if x.call.unit:
        launch(
            lengths_kernel, (-(-x.T // 32), x.B * x.E), x.k, r, *strides(x.k), x.T, x.E, x.E // x.Hkv, call=x.number,
            num_warps=4, D=x.D, BD=width(x.D), R=32,
        )  # fmt: skip
    return r


def run_forward(number: int, *inputs: Any) -> tuple[Tensor, ...]:
    """o [B,T,H,Dv], g [B,T,H], inverse lengths of q and k, the memories after the last token [rows,E,W]; and, if the
    backward pass wants them, the states that entered stretches."""
    x = Problem(number, Call(*inputs))
    o, last = x.new(x.B, x.T, x.H, x.DV, dtype=x.q.dtype), x.new(x.rows, x.E, x.W)
    g = x.new(x.B, x.T, x.H if x.normalised else 0)
    rq, rk = x.new(x.B, x.H if x.call.unit else 0, x.T), lengths(x)
    if x.walks:
        states = x.states(x.slots) if x.call.keep else (None, None)
        scan(x, x.config.walk, x.k, x.v, (None, None), (rq, rk), x.first, last, False, states, o)
        return o, g, rq, rk, last, *(states if x.call.keep else x.states(0))
    S, n = x.states(x.slots)
    scan(x, x.config.scan, x.k, x.v, (None, None), (rq, rk), x.first, last, False, (S, n))
    c = x.constants(x.config.out)
    rows = -(-x.L // c["C"])
    launch(
        out_kernel, (x.layout.chunks * rows * -(-x.DV // c["BZ"]), x.B * x.H), x.q, x.k, x.v, o, S, n, g, x.a, x.b, rq,
        rk, x.lam, x.read, x.write, x.segments, x.real, x.places, x.layout.per_chunk, x.call.scale,
        *strides(x.q, x.k, x.v), *x.gates(x.read, x.write), *x.sizes, STATE=x.enters(x.first), **c,
    )  # fmt: skip
    return o, g, rq, rk, last, *((S, n) if x.call.keep else x.states(0))


def run_backward(
    number: int, do: Tensor, slopes: bool, dg: Tensor | None, dlast: Tensor | None, o: Tensor, g: Tensor,
    rq: Tensor, rk: Tensor, S: Tensor, n: Tensor, *inputs: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k and v, with `slopes` the sum of q.dq [H], gradients of both gates and of the entering memories;
    empty tensors where there is nothing."""
    x, do = Problem(number, Call(*inputs)), dense(do)
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
            call=number, num_warps=4, DV=x.DV, BV=c["BDV"], R=32, MASS=dg is not None, PADDED=x.real is not None,
            GUARD=GUARD,
        )  # fmt: skip
    dfirst = None if x.first is None else x.new(x.rows, x.E, x.W)
    dlast = None if dlast is None else dlast.float().contiguous()
    dS, dn = x.states(x.slots)
    scan(x, x.config.scan, x.q, do, (rg, delta), (rq, rk), dlast, dfirst, True, (dS, dn))
    shared = x.Hkv < x.E
    dq = x.new(x.B, x.T, x.H, x.D, dtype=x.q.dtype)
    dk, dv = (x.new(x.B, x.T, x.E, n, dtype=torch.float32 if shared else x.q.dtype) for n in (x.D, x.DV))
    blocks, rows = -(-max(x.D, x.DV) // c["BZ"]), -(-x.L // c["C"])
    gates, blocks_d = x.read is not None or x.write is not None, -(-x.D // c["BZ"])
    aux = gates or slopes
    along = x.new(blocks_d * aux, x.B, x.T, x.H)
    dw = x.new(blocks_d * gates, x.B, x.T, x.E)
    launch(
        gradients_kernel, (x.layout.chunks * rows * blocks * 3, x.B * x.H), x.q, x.k, x.v, do, dq, dk, dv, along, dw, S,
        n, dS, dn, rg, delta, x.a, x.b, rq, rk, x.lam, x.read, x.write, x.segments, x.real, x.places,
        x.layout.per_chunk, x.B, x.call.scale, *strides(x.q, x.k, x.v, do), *x.gates(x.read, x.write), *x.sizes,
        STATE=x.enters(x.first), LATER=x.enters(dlast), AUX=aux, **c,
    )  # fmt: skip
    if shared:
        dk, dv = (y.unflatten(2, (x.Hkv, -1)).sum(3).to(x.q.dtype) for y in (dk, dv))
    dread = x.new(0) if x.read is None else along.sum(0).to(x.read.dtype)
    dwrite = x.new(0) if x.write is None else dw.sum(0).to(x.write.dtype)
    total = along.sum((0, 1, 2)) if slopes else x.new(0)
    return dq, dk, dv, total, dread, dwrite, x.new(0) if dfirst is None else dfirst


backward = entry(run_backward)
forward = entry(run_forward)


# ---------------------------------------------------------------- decode


def run_step(number: int, *inputs: Any) -> tuple[Tensor, ...]:
    """One token in one launch: o [B,1,H,Dv], g [B,1,H], and the new S, z, u and token counts (empty without them)."""
    q, k, v, a, b, log_decay, read, write, scale, unit, padding, *state = inputs
    (B, _, H, D), DV, E = q.shape, v.shape[-1], state[0].shape[1]
    q, k, v = dense(q), dense(k), dense(v)
    state = [None if y is None else y.contiguous() for y in state]
    after = [scratch(q, 0) if y is None else scratch(q, *y.shape, dtype=y.dtype) for y in state]
    o, g = scratch(q, B, 1, H, DV, dtype=q.dtype), scratch(q, B, 1, H)
    numbers = [None if y is None else y.float().contiguous() for y in (a, b)]
    lam = None if log_decay is None else log_decay.float().contiguous()
    gates = [None if y is None else y.contiguous() for y in (read, write)]
    BD, BZ = width(D), min(32, width(DV))
    real = None if padding is None else padding.view(torch.uint8)
    launch(
        step_kernel, (E * -(-DV // BZ), B), q, k, v, *state, o, g, *after, *numbers, lam, *gates, real, scale,
        q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
        0 if real is None else real.stride(0), H, E, E // k.shape[2], call=number, num_warps=4, NORM=a is not None,
        UNIT=unit, D=D, DV=DV, BD=BD, BZ=BZ, G=H // E, DECAY=lam is not None, READ=read is not None,
        WRITE=write is not None, PADDED=real is not None, GUARD=GUARD,
    )  # fmt: skip
    return o, g, *after


step = entry(run_step)
