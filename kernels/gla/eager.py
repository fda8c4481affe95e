"""GLA in PyTorch: the decode step, and the chunk form of gla.py with its gradient, derived by hand.

Inside the chunk it is the second pass of GSA (scan.py), q being the slot probabilities and k the write strengths.
Each decay e^{b_t-b_i} counts b_t once and b_i once, so b needs no pass of its own:

    db_t = q_t . dq_t - k_t . dk_t        db_C += sum_Dv ( S_out . dS_out )        dg = reverse cumulative sum of db

with sums inside one chunk, whose end stands for all that comes after it: rounding does not pile up over T.

Letters as in gla.py; rows of queries and outputs are [C*G], the G heads of a token side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layers.arguments import state_dtype, to_gate_heads
from ..layers.scan import (
    FLOOR,
    chunk_decays,
    from_chunks,
    into_chunks,
    scan_states,
    scan_states_back,
    values_back,
    values_pass,
)


class GLAState(NamedTuple):
    """Decode state: the memory [B,E,D,Dv] in fp32."""

    memory: Tensor


class Inputs(NamedTuple):
    """What a call brings for each token: tensors as `gla` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    read_gate: Tensor | None = None
    write_gate: Tensor | None = None


def fresh_state(x: Inputs) -> GLAState:
    """The empty memory for these shapes."""
    return GLAState(x.q.new_zeros(x.q.shape[0], *x.g.shape[2:], x.v.shape[-1], dtype=state_dtype(x.q)))


def ready(x: Inputs, scale: float, padding: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q times scale and read gate, k times the write gate and v for each memory, g; nothing is written or read at
    padding."""
    E = x.g.shape[2]
    q, k, v, g = (y.to(dtype) for y in (x.q, to_gate_heads(x.k, E), to_gate_heads(x.v, E), x.g))
    q = q * scale
    if x.read_gate is not None:
        q = q * x.read_gate.to(dtype)[..., None]
    if x.write_gate is not None:
        k = k * x.write_gate.to(dtype)[..., None]
    if padding is not None:
        q, k, g = (torch.where(padding[:, :, None, None], y, 0.0) for y in (q, k, g))
    return q, k, v, g


def gla_step(x: Inputs, scale: float, padding: Tensor | None, state: GLAState) -> tuple[Tensor, GLAState]:
    """One token, T=1: eq. 3 as it stands. Reads and writes the state once."""
    (S,) = state
    q, k, v, g = (y[:, 0] for y in ready(x, scale, padding, S.dtype))
    S = g.exp()[..., None] * S + k[..., None] * v[:, :, None]
    o = (q.unflatten(1, (S.shape[1], -1)) @ S).flatten(1, 2)[:, None]  # [B,1,H,Dv]
    return o.to(x.q.dtype), GLAState(S)


def gla_chunked(
    x: Inputs, scale: float, padding: Tensor | None, segments: Tensor | None, state: GLAState, chunk_size: int
) -> tuple[Tensor, GLAState]:
    (S,), (B, T, H, _), E = state, x.q.shape, x.g.shape[2]
    if T == 0:
        return x.q.new_zeros(B, 0, H, x.v.shape[-1]), state
    C = min(chunk_size, 1 << max(T - 1, 0).bit_length())
    inputs = (into_chunks(y, C, E, S.dtype) for y in ready(x, scale, padding, S.dtype))
    o, S = GLAChunks.apply(*inputs, S, segments)
    return from_chunks(o, C, T).to(x.q.dtype), GLAState(S)


class GLAChunks(torch.autograd.Function):
    """q [B,E,N,C*G,D], k [B,E,N,C,D], v [B,E,N,C,Dv], g [B,E,N,C,D], memory S [B,E,D,Dv] and segments [B,T] or None
    -> o [B,E,N,C*G,Dv] and the memory after the last chunk. The scale is in q.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor, segments: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        decays = chunk_decays(g.clamp_min(FLOOR), segments)
        states = scan_states(decays.through, (k * decays.to_end).mT @ v, S)
        o = values_pass(q, v, k, states[:, :, :-1], decays)
        ctx.save_for_backward(q, k, v, g, S, segments)
        return o, states[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, S, segments = ctx.saved_tensors
        decays = chunk_decays(g.clamp_min(FLOOR), segments)
        write = k * decays.to_end
        states = scan_states(decays.through, write.mT @ v, S)
        dq, dv, dk, dS_in = values_back(do.contiguous(), q, v, k, states[:, :, :-1], decays)
        dstates = scan_states_back(decays.through, dS_in, dS)
        later = dstates[:, :, 1:]
        dv += write @ later
        dk += decays.to_end * (v @ later.mT)
        db = (q * dq).unflatten(-2, (g.shape[-2], -1)).sum(-2) - k * dk
        db[..., -1, :] += (states[:, :, 1:] * later).sum(-1)
        return dq, dk, dv, db.flip(-2).cumsum(-2).flip(-2), dstates[:, :, 0], None
