"""Linear attention in chunks: what mechanisms with the sums S_t = sum_{i<=t} e^{c_t-c_i} k_i v_i^T share, c_t the
sum of fixed log-decays up to t (0 where nothing decays).

A chunk of C tokens, S the state that enters it, b the sum of log-decays inside it, M_ti = e^{b_t-b_i} for i <= t:

    O = e^b Q S + P V            S_out = e^{b_C} S + (e^{b_C-b} K)^T V           P = (Q K^T) . M

Backwards, with dP = (dO V^T) . M and dS the gradient of the state that leaves:

    dQ = e^b dO S^T + dP K       dK = e^{b_C-b} V dS^T + dP^T Q
    dV = e^{b_C-b} K dS + P^T dO                                dS_in = e^{b_C} dS + (e^b Q)^T dO

States are recomputed for the backward pass, so that memory is that of q, k and v.

Letters: B batch, T time, E state heads, G query heads per state head, D key dim, Dv value dim, C chunk, N chunks.
Rows of queries are [C*G], the G heads of a token side by side (scan.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layers.scan import SegmentMasks, from_chunks, into_chunks, scaled, scan_states, scan_states_back, segment_masks


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor, segments: Tensor | None, chunk_size: int, log_decay: Tensor | None =
    None,
)-> tuple[Tensor, Tensor]:  # fmt: skip
    """sum_{i<=t} e^{c_t-c_i} (q_t.k_i) v_i [B,T,E*G,Dv] over each document, and that sum of k_i v_i^T at the end of
    the last, [B,E,D,Dv].

    q [B,T,E*G,D], k [B,T,E,D], v [B,T,E,Dv] with zero rows where nothing is to be added; S [B,E,D,Dv] what came
    before, of a row's first document; `log_decay` [B or 1,T,E], <= 0, what c adds up, gets no gradient. Computed in
    S's dtype.
    """
    T, E = q.shape[1], k.shape[2]
    if T == 1:
        S = S if log_decay is None else S * log_decay[:, 0, :, None, None].to(S.dtype).exp()
        S = S + k[:, 0, :, :, None] * v[:, 0, :, None]
        return (q[:, 0].unflatten(1, (E, -1)) @ S).flatten(1, 2)[:, None], S
    C = min(chunk_size, 1 << max(T - 1, 0).bit_length())
    g = None if log_decay is None else into_chunks(log_decay[..., None], C, E, S.dtype)
    o, S = LinearChunks.apply(*(into_chunks(y, C, E, S.dtype) for y in (q, k, v)), g, S, segments)
    return from_chunks(o, C, T), S


def linear_attention_bidirectional(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, chunk_size: int) -> Tensor:
    """sum_i (q_t.k_i) v_i [B,T,E*G,Dv] over all tokens i of t's document; arguments as for `linear_attention`.

    Without `segments` there may be fewer keys than queries; with them, the tokens of a document may lie anywhere.
    """
    if segments is None:
        S = torch.einsum("bted,btev->bedv", k, v)
        return torch.einsum("btegd,bedv->btegv", q.unflatten(2, (k.shape[2], -1)), S).flatten(2, 3)
    order = segments.argsort(dim=1, stable=True)
    q, k, v = (y.take_along_dim(order[:, :, None, None], 1) for y in (q, k, v))
    segments = segments.take_along_dim(order, 1)
    # Up to and with t, from t on, and t itself was counted twice.
    S = q.new_zeros(q.shape[0], k.shape[2], k.shape[3], v.shape[3])
    before, _ = linear_attention(q, k, v, S, segments, chunk_size)
    after, _ = linear_attention(q.flip(1), k.flip(1), v.flip(1), S, segments.flip(1), chunk_size)
    own = (q.unflatten(2, (k.shape[2], -1)) * k[:, :, :, None]).sum(-1, keepdim=True) * v[:, :, :, None]
    o = before + after.flip(1) - own.flatten(2, 3)
    return o.take_along_dim(order.argsort(1)[:, :, None, None], 1)


class LinearChunks(torch.autograd.Function):
    """q [B,E,N,C*G,D], k [B,E,N,C,D], v [B,E,N,C,Dv], g [B or 1,E,N,C,1] or None, S [B,E,D,Dv], segments [B,T] or None
    -> o [B,E,N,C*G,Dv], S."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor, segments: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        flow = _flow(k, g, segments)
        states = scan_states(flow.keeps, (k * flow.writes).mT @ v, S)
        o = _scores(q, k, flow) @ v + scaled(q, flow.reads) @ states[:, :, :-1]
        ctx.save_for_backward(q, k, v, g, S, segments)
        return o, states[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, S, segments = ctx.saved_tensors
        flow = _flow(k, g, segments)
        states = scan_states(flow.keeps, (k * flow.writes).mT @ v, S)[:, :, :-1]
        dstates = scan_states_back(flow.keeps, scaled(q, flow.reads).mT @ do, dS)
        later = dstates[:, :, 1:]
        dP = _scores(do, v, flow)
        dq = dP @ k + scaled(do @ states.mT, flow.reads)
        dk = dP.mT @ q + v @ later.mT * flow.writes
        dv = _scores(q, k, flow).mT @ do + k @ later * flow.writes
        return dq, dk, dv, None, dstates[:, :, 0], None


def _flow(k: Tensor, g: Tensor | None, segments: Tensor | None) -> SegmentMasks:
    """What of every row comes through, in k's dtype: decays, and 0 between documents."""
    C = k.shape[-2]
    allowed = torch.ones(C, C, dtype=torch.bool, device=k.device).tril()
    if g is None:
        one = k.new_ones(1, 1, k.shape[2], C, 1)
        reads, writes, keeps, pairs = one, one, one[..., 0, :], allowed.to(k.dtype)
    else:
        b = g.cumsum(-2)
        pairs = (b - b.mT).masked_fill(~allowed, -torch.inf).exp()
        reads, writes, keeps = b.exp(), (b[..., -1:, :] - b).exp(), b[..., -1, :].exp()
    if segments is None:
        return SegmentMasks(reads, writes, keeps, pairs)
    return SegmentMasks(
        *(x * y for x, y in zip((reads, writes, keeps, pairs), segment_masks(segments, C), strict=True))
    )


def _scores(q: Tensor, k: Tensor, flow: SegmentMasks) -> Tensor:
    """q_t.k_i as far as i comes through to t: [B,E,N,C*G,C]."""
    return (q @ k.mT) * flow.pairs.repeat_interleave(q.shape[-2] // k.shape[-2], -2)
