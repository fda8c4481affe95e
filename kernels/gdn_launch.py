"""Gated DeltaNet on the GPU, host side: chunks, scratch and launches. Each function takes the arguments of its operator
in gdn_ops.py, in that order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gdn_config import configure, obstacle
from .gdn_triton import output_kernel, prepare_kernel, scan_kernel, step_kernel
from .gdn_triton_bwd import back_kernel, grads_kernel, local_kernel
from .launch import dense, interpreted, lay_out, strides
from .tiles import triton


def runs_on(q: Tensor, v: Tensor, g: Tensor) -> str:
    """Why the kernels cannot take these inputs; empty when they can."""
    if triton is None:
        return "triton is not installed"
    if q.device.type != "cuda" and not interpreted():
        return f"the tensors are on {q.device}"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or v.dtype != q.dtype:
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
    """One call, made dense, and what every launch derives from it."""

    def __init__(self, call: Call) -> None:
        self.q, self.k, self.v = (dense(x) for x in call[:3])
        self.g, self.beta, self.scale = call.g.contiguous(), call.beta.contiguous(), call.scale
        self.read, self.write, self.segments = map(_contiguous, (call.read_gate, call.write_gate, call.segments))
        self.cu, self.S0 = call.cu, None if call.S0 is None else call.S0.float().contiguous()
        (self.B, self.T, self.H, self.D), self.DV, self.E = call.q.shape, call.v.shape[-1], call.g.shape[2]
        self.config = c = configure(call.q, call.v)
        self.layout = lay_out(call.q, call.cu, c.chunk)
        self.scratch = torch.bfloat16 if call.q.dtype == torch.bfloat16 else torch.float32

        varlen, share = self.layout.per_chunk is not None, self.E // self.k.shape[2]
        self.grid = self.layout.chunks, self.B * self.E
        self.rows = -(-self.DV // c.columns), self.layout.rows * self.E
        # Keyword arguments that all chunk kernels take.
        self.sizes: dict[str, Any] = {
            "T": self.T, "N": self.layout.chunks, "E": self.E, "SHARE": share, "D": self.D, "C": c.chunk,
            "BD": c.block_d, "VARLEN": varlen, "SEGMENTS": self.segments is not None, "PREC": c.precision,
        }  # fmt: skip

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=self.q.device, dtype=dtype)

    def states(self) -> Tensor:
        return self.new(self.layout.slots, self.E, self.D, self.DV, dtype=self.scratch)

    def per_token(self) -> Tensor:
        return self.new(self.B, self.T, self.E, self.DV, dtype=self.scratch)


class Solved(NamedTuple):
    """Scratch of one call: b in two parts [2,B,T,E], Te in its parts [1 or 2,B,T,E,C], states, and e."""

    b: Tensor
    Te: Tensor
    S: Tensor
    e: Tensor


def solve(x: Problem, last: Tensor | None) -> Solved:
    """Everything up to the states that enter the chunks; the state after the last token goes to `last`."""
    c, parts = x.config, 2 if x.scratch == torch.bfloat16 else 1
    out = Solved(
        x.new(2, x.B, x.T, x.E), x.new(parts, x.B, x.T, x.E, c.chunk, dtype=x.scratch), x.states(), x.per_token()
    )
    prepare_kernel[x.grid](
        x.k, x.g, x.beta, x.segments, x.layout.per_chunk, *out.b, out.Te[0], out.Te[-1], *strides(x.k),
        LEVELS=(c.chunk // 16).bit_length() - 1, **x.sizes, num_warps=c.prepare_warps, num_stages=1,
    )  # fmt: skip
    scan_kernel[x.rows](
        x.k, x.v, x.beta, x.write, x.segments, x.layout.per_row, x.cu, *out.b, out.Te[0], out.Te[-1], x.S0, out.S,
        out.e, last, *strides(x.k, x.v), DV=x.DV, BV=c.columns, GATED=x.write is not None, START=x.S0 is not None,
        LAST=last is not None, **x.sizes, num_warps=c.scan_warps, num_stages=c.scan_stages,
    )  # fmt: skip
    return out


def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """o [B,T,H,Dv] and the state after the last token [rows,E,D,Dv] in fp32."""
    x = Problem(Call(*inputs))
    c, o, S1 = x.config, x.new(x.B, x.T, x.H, x.DV, dtype=x.q.dtype), x.new(x.layout.rows, x.E, x.D, x.DV)
    s = solve(x, S1)
    output_kernel[x.grid](
        x.q, x.k, x.beta, x.read, x.segments, x.layout.per_chunk, *s.b, s.S, s.e, o, x.scale, *strides(x.q, x.k),
        H=x.H, DV=x.DV, BV=c.block_dv, GATED=x.read is not None, **x.sizes, num_warps=c.warps, num_stages=1,
    )  # fmt: skip
    return o, S1


def backward(do: Tensor, dS1: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta, of both gates and of the first state (empty tensors where there was none)."""
    call = Call(*inputs)
    x, do = Problem(call), dense(do)
    c, s, heads = x.config, solve(x, None), {"H": x.H, "DV": x.DV}
    du = x.new(x.B, x.T, x.E, x.DV)
    local_kernel[x.grid](
        x.q, x.k, do, x.read, x.segments, x.layout.per_chunk, *s.b, du, x.scale, *strides(x.q, x.k, do),
        BV=c.block_dv, GATED=x.read is not None, **heads, **x.sizes, num_warps=c.warps, num_stages=1,
    )  # fmt: skip
    dS, dx = x.states(), x.per_token()
    dS0 = None if x.S0 is None else torch.empty_like(x.S0)
    last = None if dS1 is None else dS1.float().contiguous()
    back_kernel[x.rows](
        x.q, x.k, do, x.beta, x.read, x.segments, x.layout.per_row, x.cu, *s.b, s.Te[0], s.Te[-1], du, last, dS, dx,
        dS0, x.scale, *strides(x.q, x.k, do), BV=c.columns, GATED=x.read is not None, START=last is not None,
        LAST=dS0 is not None, **heads, **x.sizes, num_warps=c.back_warps, num_stages=c.back_stages,
    )  # fmt: skip
    # States that share a key head each make their own part of its gradients; the sum is below.
    shared = x.k.shape[2] < x.E
    dq = x.new(x.B, x.T, x.H, x.D, dtype=x.q.dtype)
    dk = x.new(x.B, x.T, x.E, x.D, dtype=torch.float32 if shared else x.k.dtype)
    dv = dx if x.write is None else x.new(x.B, x.T, x.E, x.DV, dtype=torch.float32 if shared else x.v.dtype)
    dg, dbeta = torch.empty_like(x.g), torch.empty_like(x.beta)
    dread = x.new(0) if x.read is None else x.new(-(-x.D // c.block_k), x.B, x.T, x.H)
    dwrite = x.new(0) if x.write is None else torch.empty_like(x.write)
    grads_kernel[x.grid](
        x.q, x.k, x.v, do, x.beta, x.read, x.write, x.segments, x.layout.per_chunk, *s.b, s.S, dS, s.e, dx, dq, dk, dv,
        dg, dbeta, dread, dwrite, x.scale, x.B * x.T * x.H, *strides(x.q, x.k, x.v, do), BK=c.block_k, BV=c.block_dv,
        READ=x.read is not None, WRITE=x.write is not None, **heads,
        **{name: value for name, value in x.sizes.items() if name != "BD"}, num_warps=c.grads_warps, num_stages=1,
    )  # fmt: skip
    if x.read is not None:
        dread = dread.sum(0).to(x.read.dtype)
    if shared:
        dk, dv = (y.unflatten(2, (x.k.shape[2], -1)).sum(3, dtype=torch.float32) for y in (dk, dv))
    return dq, dk.to(x.k.dtype), dv.to(x.v.dtype), dg, dbeta, dread, dwrite, x.new(0) if dS0 is None else dS0


def step(*inputs: Any) -> tuple[Tensor, Tensor]:
    """One token in one launch: o [B,1,H,Dv] and the new state."""
    q, k, v, g, beta, read, write, scale, padding, S = inputs
    (B, _, H, D), DV, E = q.shape, v.shape[-1], g.shape[2]
    q, k, v, g, beta, S = dense(q), dense(k), dense(v), g.contiguous(), beta.contiguous(), S.contiguous()
    o, S1 = q.new_empty(B, 1, H, DV), torch.empty_like(S)
    BD = max(16, 1 << (D - 1).bit_length())
    BV = 16 if BD > 128 else 32
    step_kernel[(-(-DV // BV), E, B)](
        q, k, v, g, beta, _contiguous(read), _contiguous(write), padding, S, o, S1, scale, q.stride(0), q.stride(2),
        k.stride(0), k.stride(2), v.stride(0), v.stride(2), 0 if padding is None else padding.stride(0), H, E,
        E // k.shape[2], D=D, DV=DV, BD=BD, BV=BV, READ=read is not None, WRITE=write is not None,
        PADDED=padding is not None, num_warps=4, num_stages=1,
    )  # fmt: skip
    return o, S1
