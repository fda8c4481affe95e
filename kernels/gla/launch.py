"""GLA on the GPU, host side: chunks, scratch and launches. Each function takes the arguments of its operator in
gla_ops.py, in that order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import Config, Launch, configure
from .forward import gla_mix_kernel, gla_scan_kernel, gla_step_kernel
from .backward import gla_key_kernel
from ..gpu.launch import dense, entry, launch, lay_out, scratch, strides, unavailable, width


def runs_on(q: Tensor, v: Tensor, g: Tensor) -> str:
    """Why the kernels cannot take these inputs; empty when they can."""
    if reason := unavailable(q.device, q.dtype):
        return reason
    if v.dtype != q.dtype:
        return f"dtype {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > 512:
        return f"head dim {q.shape[-1]} or {v.shape[-1]} exceeds 512"
    if q.shape[0] * q.shape[2] > 65535:
        return f"{q.shape[0]} rows of {q.shape[2]} heads exceed a GPU's grid"
    return ""


class Call(NamedTuple):
    """The arguments of the forward operator; the backward one has two gradients before them."""

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
        "C": config.chunk,
        "LEVELS": config.chunk.bit_length() - 1,
        "BD": width(D),
        "BK": how.block_k,
        "BV": how.block_v,
        "RANGE": config.range,
        "PREC": config.precision,
    }


class Problem:
    """One call, made dense, and what every launch derives from it; `number` is what `entry` gives it."""

    def __init__(self, number: int, call: Call) -> None:
        self.q, self.k, self.v = (dense(x) for x in call[:3])
        self.g, self.scale, self.segments = call.g.contiguous(), call.scale, call.segments
        self.S0 = None if call.S0 is None else call.S0.float().contiguous()
        self.read, self.write = (None if x is None else x.contiguous() for x in (call.read_gate, call.write_gate))
        (self.B, self.T, self.H, self.D), self.DV, self.E = call.q.shape, call.v.shape[-1], call.g.shape[2]
        self.share = self.E // call.k.shape[2]
        self.number, self.config = number, configure(call.q, call.v)
        self.layout = lay_out(call.q, call.cu, self.config.chunk)
        # What chunk kernels take after their tensors and strides.
        self.counts = self.T, self.layout.chunks, self.H, self.E, self.share
        self.masks = {"VARLEN": self.layout.per_chunk is not None, "SEGMENTS": self.segments is not None}

    def launch(self, kernel: Any, how: Launch, grid: tuple[int, ...], *arguments: Any, **changed: Any) -> None:
        own = constants(self.config, how, self.H // self.E, self.D, self.DV) | self.masks | changed
        launch(kernel, grid, *arguments, call=self.number, num_warps=how.warps, num_stages=how.stages, **own)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return scratch(self.q, *shape, dtype=dtype)

    def memories(self, count: int) -> Tensor:
        return self.new(count, self.E, self.D, self.DV)


def blocks(x: Problem, how: Launch) -> int:
    """Of a memory, one for each program."""
    return -(-x.D // how.block_k) * -(-x.DV // how.block_v)


def scan(x: Problem, xs: Tensor, ys: Tensor, gate: Tensor | None, b: Tensor, first: Tensor | None, last: Tensor | None,
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


def _forward(number: int, *inputs: Any) -> tuple[Tensor, Tensor]:
    """o [B,T,H,Dv] and the memory after the last token, [rows,E,D,Dv] in fp32."""
    x = Problem(number, Call(*inputs))
    o, last, b = x.new(x.B, x.T, x.H, x.DV, dtype=x.q.dtype), x.memories(x.layout.rows), x.new(x.B, x.T, x.E, x.D)
    S, how = scan(x, x.k, x.v, x.write, b, x.S0, last, 1.0, False), x.config.mix
    x.launch(
        gla_mix_kernel, how, (x.layout.chunks * -(-x.DV // how.block_v), x.B * x.H), x.q, x.k, x.v, x.read, x.write,
        x.segments, x.layout.per_chunk, b, S, o, x.scale, 1.0, *strides(x.q, x.k, x.v), *x.counts, REVERSE=False,
    )  # fmt: skip
    return o, last


def _backward(number: int, do: Tensor, dS1: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, the entering memory and both row gates (empty tensors where there was none)."""
    x, do = Problem(number, Call(*inputs)), dense(do)
    b, dS0 = x.new(x.B, x.T, x.E, x.D), x.new(0) if x.S0 is None else x.memories(x.layout.rows)
    S = scan(x, x.k, x.v, x.write, b, x.S0, None, 1.0, False)
    last = None if dS1 is None else dS1.float().contiguous()
    dS = scan(x, x.q, do, x.read, b, last, None if x.S0 is None else dS0, x.scale, True)

    # Gate heads that share a key head each make their own part of its gradient; the sum is below.
    dtype, how = torch.float32 if x.share > 1 else x.k.dtype, x.config.mix
    dk, dv = x.new(x.B, x.T, x.E, x.D, dtype=dtype), x.new(x.B, x.T, x.E, x.DV, dtype=dtype)
    x.launch(
        gla_mix_kernel, how, (x.layout.chunks * -(-x.DV // how.block_v), x.B * x.E), x.k, x.q, do, x.write, x.read,
        x.segments, x.layout.per_chunk, b, dS, dv, 1.0, x.scale, *strides(x.k, x.q, do), *x.counts, REVERSE=True,
    )  # fmt: skip

    how = x.config.key
    blocks = -(-x.D // how.block_k)
    dq, dg = x.new(x.B, x.T, x.H, x.D, dtype=x.q.dtype), x.new(x.B, x.T, x.E, x.D, dtype=x.g.dtype)
    dread, dwrite = (x.new(0) if gate is None else x.new(blocks, *gate.shape) for gate in (x.read, x.write))
    x.launch(
        gla_key_kernel, how, (x.layout.chunks * blocks, x.B * x.E), x.q, x.k, x.v, do, x.read, x.write, x.segments,
        x.layout.per_chunk, b, S, dS, dq, dk, dg, dread, dwrite, x.scale, *strides(x.q, x.k, x.v, do), *x.counts,
        x.B * x.T * x.H, x.B * x.T * x.E,
    )  # fmt: skip
    if x.share > 1:
        dk, dv = (y.unflatten(2, (x.k.shape[2], -1)).sum(3).to(x.k.dtype) for y in (dk, dv))
    dread, dwrite = (y if gate is None else y.sum(0).to(gate.dtype) for y, gate in ((dread, x.read), (dwrite, x.write)))
    return dq, dk, dv, dg, dS0, dread, dwrite


def _step(number: int, *inputs: Any) -> tuple[Tensor, Tensor]:
    """One token in one launch: o [B,1,H,Dv] and the new memory."""
    q, k, v, g, scale, padding, S, read, write = inputs
    (B, _, H, D), DV, E = q.shape, v.shape[-1], g.shape[2]
    q, k, v, g, S = dense(q), dense(k), dense(v), g.contiguous(), S.contiguous()
    read, write = (None if x is None else x.contiguous() for x in (read, write))
    o, S1 = scratch(q, B, 1, H, DV, dtype=q.dtype), scratch(S, *S.shape)
    BD = width(D)
    BV = max(16, min(2048 // BD, width(DV)))
    launch(
        gla_step_kernel, (-(-DV // BV), E, B), q, k, v, g, read, write, padding, S, o, S1, scale, q.stride(0),
        q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2), 0 if padding is None else padding.stride(0),
        H, E, E // k.shape[2], call=number, num_warps=2, G=H // E, D=D, DV=DV, BD=BD, BV=BV,
    )  # fmt: skip
    return o, S1


def _rehearse(number: int, *inputs: Any) -> None:
    """The backward of a call, before its gradients are there."""
    q, _, v, *_ = inputs
    _backward(number, q.new_empty(*q.shape[:3], v.shape[-1], device="meta"), None, *inputs)


forward, backward, step = entry(_forward, _rehearse), entry(_backward), entry(_step)
