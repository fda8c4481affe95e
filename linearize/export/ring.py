"""Exact softmax over the last W tokens and the first S, by operators that ONNX has: what kernels/window/ computes, but
without blocks, whose number a graph would fix. Each new token is compared with the state and with all new tokens.

Letters: B batch, T new tokens, S sink, W window, H query heads, Hkv key heads, G = H/Hkv, D key dim, Dv value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, sink: int, scale: float, padding: Tensor, state: Any
) -> tuple[Tensor, Tensor, Any]:
    """o [B,T,H,Dv], log sum_i e^{c q.k_i} [B,T,H], and the state after the tokens, a tuple of the type of `state`.

    q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv]; `padding` [B,T] is True at real tokens; `state` has the first S and the
    last W keys and values [B,S+W,Hkv,.], and how many tokens came before, [B].
    """
    T, S, W, held = q.shape[1], sink, window, state.held[:, None]
    # Places of tokens in their rows: of the state's first ones, of its last ones, and of the new ones.
    first, last = torch.arange(S)[None], held - W + torch.arange(W)
    place = held + padding.long().cumsum(1) - 1
    query = place[:, :, None]
    visible = torch.cat(
        [
            ((first < held) & (first >= 0))[:, None] & (first[:, None] <= query - W),  # else it is among the last ones
            (last >= 0)[:, None] & (last[:, None] > query - W),
            padding[:, None] & (place[:, None] <= query) & ((place[:, None] > query - W) | (place[:, None] < S))
            # A token of padding sees itself, so that no sum is 0.
            | (torch.arange(T)[:, None] == torch.arange(T))[None],
        ],
        2,
    )
    keys, values = torch.cat([state.keys, k], 1), torch.cat([state.values, v], 1)
    scores = scale * torch.einsum("btkgd,bskd->btkgs", q.unflatten(2, (k.shape[2], -1)), keys)
    scores = scores.masked_fill(~visible[:, :, None, None], -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    o = torch.einsum("btkgs,bskd->btkgd", weights / total, values).flatten(2, 3)
    mass = (largest + total.log()).flatten(2)

    # The last W real tokens in their order, behind whatever else there is.
    real = torch.cat([last >= 0, padding], 1)
    order = real.long() * (W + T) + torch.arange(W + T)
    recent = order.argsort(1)[:, -W:]
    # Among the tokens of all rows: the reference evaluator chooses in a dimension (GatherElements) among 64 at most.
    recent = (recent + torch.arange(k.shape[0])[:, None] * (W + T)).flatten()
    # New tokens among the first S of their row.
    chosen = (padding[:, None] & (place[:, None] == first[:, :, None])).to(k.dtype)  # [B,S,T]
    after = []
    for old, new, both in ((state.keys, k, keys), (state.values, v, values)):
        begun = torch.where((first < held)[:, :, None, None], old[:, :S], torch.einsum("bst,btkd->bskd", chosen, new))
        last_ones = both[:, S:].flatten(0, 1).index_select(0, recent).unflatten(0, (k.shape[0], W))
        after.append(torch.cat([begun, last_ones], 1))
    return o, mass, type(state)(*after, state.held + padding.long().sum(1))
