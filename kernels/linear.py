"""Linear attention in chunks, without decay: what mechanisms with the sums S_t = sum_{i<=t} k_i v_i^T share.

A chunk of C tokens, S the state that enters it, P = tril(Q K^T):

    O = Q S + P V                S_out = S + K^T V

Backwards, with dP = tril(dO V^T) and dS the gradient of the state that leaves:

    dQ = dO S^T + dP K           dK = V dS^T + dP^T Q         dV = K dS + P^T dO         dS_in = dS + Q^T dO

States are recomputed for the backward pass, so that memory is that of q, k and v.

Letters: B batch, T time, E state heads, G query heads per state head, D key dim, Dv value dim, C chunk, N chunks.
Rows of queries are [C*G], the G heads of a token side by side (scan.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .scan import SegmentMasks, from_chunks, into_chunks, scan_states, scan_states_back, segment_masks


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor, segments: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """sum_{i<=t} (q_t.k_i) v_i [B,T,E*G,Dv] over each document, and the sum of k_i v_i^T of the last, [B,E,D,Dv].

    q [B,T,E*G,D], k [B,T,E,D], v [B,T,E,Dv] with zero rows where nothing is to be added; S [B,E,D,Dv] what came
    before, of a row's first document. Computed in S's dtype.
    """
    T, E = q.shape[1], k.shape[2]
    if T == 1:
        S = S + k[:, 0, :, :, None] * v[:, 0, :, None]
        return (q[:, 0].unflatten(1, (E, -1)) @ S).flatten(1, 2)[:, None], S
    C = min(chunk_size, 1 << max(T - 1, 0).bit_length())
    o, S = LinearChunks.apply(*(into_chunks(y, C, E, S.dtype) for y in (q, k, v)), S, segments)
    return from_chunks(o, C, T), S


def linear_attention_both_ways(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, chunk_size: int) -> Tensor:
    """sum_i (q_t.k_i) v_i [B,T,E*G,Dv] over all tokens i of t's document; arguments as for `linear_attention`."""
    if segments is None:
        S = torch.einsum("bted,btev->bedv", k, v)
        return torch.einsum("btegd,bedv->btegv", q.unflatten(2, (k.shape[2], -1)), S).flatten(2, 3)
    # Up to and with t, from t on, and t itself was counted twice.
    S = q.new_zeros(q.shape[0], k.shape[2], k.shape[3], v.shape[3])
    before, _ = linear_attention(q, k, v, S, segments, chunk_size)
    after, _ = linear_attention(q.flip(1), k.flip(1), v.flip(1), S, segments.flip(1), chunk_size)
    own = (q.unflatten(2, (k.shape[2], -1)) * k[:, :, :, None]).sum(-1, keepdim=True) * v[:, :, :, None]
    return before + after.flip(1) - own.flatten(2, 3)


class LinearChunks(torch.autograd.Function):
    """q [B,E,N,C*G,D], k [B,E,N,C,D], v [B,E,N,C,Dv], S [B,E,D,Dv], segments [B,T] or None -> o [B,E,N,C*G,Dv], S."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, S: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor]:
        masks = None if segments is None else segment_masks(segments, k.shape[-2])
        states = _states(k, v, S, masks)
        o = _scores(q, k, masks) @ v + _reading(q, masks) @ states[:, :, :-1]
        ctx.save_for_backward(q, k, v, S, segments)
        return o, states[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, S, segments = ctx.saved_tensors
        masks = None if segments is None else segment_masks(segments, k.shape[-2])
        states = _states(k, v, S, masks)[:, :, :-1]
        keeps = _keeps(k, masks)
        reading = _reading(q, masks)
        dstates = scan_states_back(keeps, reading.mT @ do, dS)
        later = dstates[:, :, 1:]
        dP = _scores(do, v, masks)
        dq = dP @ k + _reading(do @ states.mT, masks)
        dk = dP.mT @ q + _writing(v @ later.mT, masks)
        dv = _scores(q, k, masks).mT @ do + _writing(k @ later, masks)
        return dq, dk, dv, dstates[:, :, 0], None


def _states(k: Tensor, v: Tensor, S: Tensor, masks: SegmentMasks | None) -> Tensor:
    """The state that enters each chunk, and the last: [B,E,N+1,D,Dv]."""
    added = _writing(k, masks).mT @ v
    return scan_states(_keeps(k, masks), added, S)


def _keeps(k: Tensor, masks: SegmentMasks | None) -> Tensor:
    """1 where the state that enters a chunk also leaves it: [B or 1,1,N,1]."""
    return k.new_ones(1, 1, k.shape[2], 1) if masks is None else masks.keeps.to(k.dtype)


def _scores(q: Tensor, k: Tensor, masks: SegmentMasks | None) -> Tensor:
    """q_t.k_i for i <= t of one document, else 0: [B,E,N,C*G,C]."""
    C = k.shape[-2]
    allowed = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    allowed = allowed if masks is None else allowed & masks.pairs
    return (q @ k.mT) * allowed.repeat_interleave(q.shape[-2] // C, -2)


def _reading(y: Tensor, masks: SegmentMasks | None) -> Tensor:
    """Rows of y [B,E,N,C*G,Y] whose token belongs to the document that entered the chunk, the others 0."""
    return y if masks is None else y * masks.reads.repeat_interleave(y.shape[-2] // masks.reads.shape[-2], -2)


def _writing(y: Tensor, masks: SegmentMasks | None) -> Tensor:
    """Rows of y [B,E,N,C,Y] whose token belongs to the document that leaves the chunk, the others 0."""
    return y if masks is None else y * masks.writes
