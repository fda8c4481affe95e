"""Gated DeltaNet on the GPU, host side: scratch and launches.

`forward`, `backward` and `step` take the arguments of their operators in gdn_ops.py, in that order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import Launch, configure, obstacle
from .forward import output_kernel, prepare_kernel, scan_kernel, step_kernel
from .backward import back_kernel, decay_kernel, key_kernel, local_kernel, query_kernel
from ..gpu.launch import dense, entry, launch, lay_out, scratch, strides, unavailable, width


def runs_on(q: Tensor, v: Tensor, g: Tensor) -> str:
    """Why the kernels cannot take these inputs; empty when they can."""
    if reason := unavailable(q.device, q.dtype):
        return reason
    if v.dtype != q.dtype:
        return f"dtype {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head dim {q.shape[-1]} or {v.shape[-1]} exceeds 256"
    if q.shape[0] * g.shape[2] > 65535:
        return f"{q.shape[0]} rows of {g.shape[2]} states exceed a GPU's grid"
    return obstacle(q.device, q.dtype, q.shape[-1], v.shape[-1])


class Call(NamedTuple):
    """The arguments of the forward operator; the backward one has two gradients before them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    read_gate: Tensor | None
    write_gate: Tensor | None
    scale: float
    segments: Tensor | None
    cu: Tensor | None
    S0: Tensor | None


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


class Problem:
    """One call, made dense, and what every launch derives from it; `number` is what `entry` gives it."""

    def __init__(self, number: int, call: Call) -> None:
        self.q, self.k, self.v = (dense(x) for x in call[:3])
        self.g, self.beta, self.scale = call.g.contiguous(), call.beta.contiguous(), call.scale
        self.read, self.write, self.segments = map(_contiguous, (call.read_gate, call.write_gate, call.segments))
        self.cu, self.S0 = call.cu, None if call.S0 is None else call.S0.float().contiguous()
        (self.B, self.T, self.H, self.D), self.DV, self.E = call.q.shape, call.v.shape[-1], call.g.shape[2]
        self.number, self.config = number, configure(call.q, call.v)
        self.layout = lay_out(call.q, call.cu, self.config.chunk)
        self.scratch = torch.bfloat16 if call.q.dtype == torch.bfloat16 else torch.float32
        self.split = self.scratch == torch.bfloat16
        self.grid = self.layout.chunks, self.B * self.E
        # What kernels take after their tensors and strides; those of the query side take all.
        self.counts = self.T, self.layout.chunks, self.E, self.E // self.k.shape[2]
        self.all_counts = self.T, self.layout.chunks, self.H, *self.counts[2:]
        self.constants: dict[str, Any] = {
            "G": self.H // self.E,
            "D": self.D,
            "DV": self.DV,
            "C": self.config.chunk,
            "LEVELS": (self.config.chunk // 8).bit_length() - 1,
            "BD": self.config.block_d,
            "VARLEN": self.layout.per_chunk is not None,
            "SEGMENTS": self.segments is not None,
            "READ": self.read is not None,
            "WRITE": self.write is not None,
            "PREC": self.config.precision,
        }

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, how: Launch, **changed: Any) -> None:
        options: dict[str, Any] = {"num_warps": how.warps, "num_stages": how.stages, "maxnreg": how.registers}
        launch(kernel, grid, *arguments, call=self.number, **options, **(self.constants | changed))

    def along_rows(self, columns: int) -> tuple[int, int]:
        """The grid of a kernel that takes so many value columns of a state through all chunks of its row."""
        return -(-self.DV // columns), self.layout.rows * self.E

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return scratch(self.q, *shape, dtype=dtype)

    def states(self) -> Tensor:
        return self.new(self.layout.slots, self.E, self.D, self.DV, dtype=self.scratch)

    def per_token(self) -> Tensor:
        return self.new(self.B, self.T, self.E, self.DV, dtype=self.scratch)


class Solved(NamedTuple):
    """Scratch of one call, in two parts each (fp32: one, twice): b [B,T,E], Te [B,T,E,C], e; and states."""

    b: tuple[Tensor, Tensor]
    Te: tuple[Tensor, Tensor]
    S: Tensor
    e: tuple[Tensor, Tensor]


def prepare(x: Problem) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """b and Te."""
    b, high = (x.new(x.B, x.T, x.E), x.new(x.B, x.T, x.E)), x.new(x.B, x.T, x.E, x.config.chunk, dtype=x.scratch)
    Te = high, torch.empty_like(high) if x.split else high
    x.launch(
        prepare_kernel, x.grid, x.k, x.g, x.beta, x.segments, x.layout.per_chunk, *b, *Te, *strides(x.k),
        *x.counts, how=x.config.prepare,
    )  # fmt: skip
    return b, Te


def solve(
    x: Problem, b: tuple[Tensor, Tensor], Te: tuple[Tensor, Tensor], last: Tensor | None, *, exact: bool
) -> Solved:
    """Everything up to the states that enter the chunks; the state after the last token goes to `last`. `exact` keeps
    both parts of e."""
    how, high = x.config.scan, x.per_token()
    low = torch.empty_like(high) if x.split and exact else None
    out = Solved(b, Te, x.states(), (high, high if low is None else low))
    x.launch(
        scan_kernel, x.along_rows(how.columns), x.k, x.v, x.beta, x.write, x.segments, x.layout.per_row, x.cu, *b,
        *Te, x.S0, out.S, high, low, last, *strides(x.k, x.v), *x.counts, how=how,
        BV=how.columns, START=x.S0 is not None, LAST=last is not None,
    )  # fmt: skip
    return out


def _forward(number: int, *inputs: Any) -> tuple[Tensor, ...]:
    """o [B,T,H,Dv], the state after the last token [rows,E,D,Dv] in fp32, and for the backward pass both parts of b
    and Te (of Te in fp32 one, and nothing)."""
    x = Problem(number, Call(*inputs))
    c, o, S1 = x.config, x.new(x.B, x.T, x.H, x.DV, dtype=x.q.dtype), x.new(x.layout.rows, x.E, x.D, x.DV)
    s = solve(x, *prepare(x), S1, exact=False)
    x.launch(
        output_kernel, (*x.grid, -(-x.DV // c.output.columns)), x.q, x.k, x.beta, x.read, x.segments,
        x.layout.per_chunk, *s.b, s.S, s.e[0], o, x.scale, *strides(x.q, x.k), *x.all_counts, how=c.output,
        BV=c.output.columns,
    )  # fmt: skip
    return o, S1, *s.b, s.Te[0], s.Te[1] if x.split else x.new(0, dtype=x.scratch)


def _backward(number: int, do: Tensor, dS1: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta, of both gates and of the first state (empty tensors where there was none);
    `inputs` are the forward's, and its b and Te."""
    *own, b, b_low, Te, Te_low = inputs
    x, do = Problem(number, Call(*own)), dense(do)
    c, du = x.config, x.new(x.B, x.T, x.E, x.DV)
    s = solve(x, (b, b_low), (Te, Te_low if x.split else Te), None, exact=True)
    x.launch(
        local_kernel, (*x.grid, -(-x.DV // c.local.columns)), x.q, x.k, do, x.read, x.segments, x.layout.per_chunk,
        *s.b, du, x.scale, *strides(x.q, x.k, do), *x.all_counts, how=c.local, BV=c.local.columns,
    )  # fmt: skip
    dS, dx, dS0 = x.states(), x.per_token(), None if x.S0 is None else torch.empty_like(x.S0)
    last = None if dS1 is None else dS1.float().contiguous()
    dx_low = torch.empty_like(dx) if x.split else None
    x.launch(
        back_kernel, x.along_rows(c.back.columns), x.q, x.k, do, x.beta, x.read, x.segments, x.layout.per_row, x.cu,
        *s.b, *s.Te, du, last, dS, dx, dx_low, dS0, x.scale, *strides(x.q, x.k, do), *x.all_counts,
        how=c.back, BV=c.back.columns, START=last is not None, LAST=dS0 is not None,
    )  # fmt: skip
    both = dx, dx if dx_low is None else dx_low
    return *_gradients(x, s, do, dS, both), x.new(0) if dS0 is None else dS0


def _gradients(x: Problem, s: Solved, do: Tensor, dS: Tensor, dx: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """What follows chunk by chunk: gradients of q, k, v, g, beta and of both gates."""
    # States that share a key head each make their own part of its gradients; the sum is below.
    c, shared = x.config, x.k.shape[2] < x.E
    of_queries, of_keys = (-(-x.D // how.columns) for how in (c.query, c.key))
    dq, dread = x.new(x.B, x.T, x.H, x.D, dtype=x.q.dtype), x.new(of_queries, x.B, x.T, x.H)
    x.launch(
        query_kernel, (*x.grid, of_queries), x.q, x.k, do, x.beta, x.read, x.segments, x.layout.per_chunk, *s.b, s.S,
        *s.e, dq, dread, x.scale, dread.stride(0), *strides(x.q, x.k, do), *x.all_counts, how=c.query,
        BK=c.query.columns, BV=c.block_dv,
    )  # fmt: skip
    dk = x.new(x.B, x.T, x.E, x.D, dtype=torch.float32 if shared else x.k.dtype)
    dv = dx[0] if x.write is None else x.new(x.B, x.T, x.E, x.DV, dtype=torch.float32 if shared else x.v.dtype)
    db, tail = x.new(of_keys, x.B, x.T, x.E), x.new(of_keys, x.layout.slots, x.E)
    dg, dbeta = torch.empty_like(x.g), torch.empty_like(x.beta)
    dwrite = x.new(0) if x.write is None else torch.empty_like(x.write)
    x.launch(
        key_kernel, (*x.grid, of_keys), x.q, x.k, x.v, do, x.beta, x.read, x.write, x.segments, x.layout.per_chunk,
        *s.b, s.S, dS, *s.e, *dx, dk, dv, db, tail, dbeta, dwrite, x.scale, db.stride(0), tail.stride(0),
        *strides(x.q, x.k, x.v, do), *x.all_counts, how=c.key, BK=c.key.columns, BV=c.block_dv,
    )  # fmt: skip
    x.launch(
        decay_kernel, x.grid, db, tail, dread, x.read, x.segments, x.layout.per_chunk, dg, db.stride(0), tail.stride(0),
        dread.stride(0), *x.all_counts[:4], how=Launch(0, warps=1), QUERIES=of_queries, KEYS=of_keys,
    )  # fmt: skip
    dread = x.new(0) if x.read is None else dread.sum(0).to(x.read.dtype)
    if shared:
        dk, dv = (y.unflatten(2, (x.k.shape[2], -1)).sum(3, dtype=torch.float32) for y in (dk, dv))
    return dq, dk.to(x.k.dtype), dv.to(x.v.dtype), dg, dbeta, dread, dwrite


def _step(number: int, *inputs: Any) -> tuple[Tensor, Tensor]:
    """One token in one launch: o [B,1,H,Dv] and the new state."""
    q, k, v, g, beta, read, write, scale, padding, S = inputs
    (B, _, H, D), DV, E = q.shape, v.shape[-1], g.shape[2]
    q, k, v, g, beta, S = dense(q), dense(k), dense(v), g.contiguous(), beta.contiguous(), S.contiguous()
    o, S1 = q.new_empty(B, 1, H, DV), torch.empty_like(S)
    BD = width(D)
    BV = 16 if BD > 128 else 32
    launch(
        step_kernel, (-(-DV // BV), E, B), q, k, v, g, beta, _contiguous(read), _contiguous(write), padding, S, o, S1,
        scale, q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
        0 if padding is None else padding.stride(0), H, E, E // k.shape[2], call=number, num_warps=4, D=D, DV=DV, BD=BD,
        BV=BV, READ=read is not None, WRITE=write is not None, PADDED=padding is not None,
    )  # fmt: skip
    return o, S1


def _rehearse(number: int, *inputs: Any) -> None:
    """The backward of a call, before its gradients are there."""
    q, _, v, *_ = inputs
    x = Problem(number, Call(*inputs))
    b, (Te, Te_low) = prepare(x)
    _backward(number, q.new_empty(*q.shape[:3], v.shape[-1], device="meta"), None, *inputs, *b, Te, Te_low)


forward, backward, step = entry(_forward, _rehearse), entry(_backward), entry(_step)
