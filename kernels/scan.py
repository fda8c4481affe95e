"""Chunk scans with a decay per channel: what gated mechanisms share (GSA's two passes, GLA).

A chunk of C tokens with log-decays g <= 0 and b their cumulative sum inside the chunk couples query t, key i and
channel m by e^{b_t[m]-b_i[m]}. That is no plain matrix product, and splitting it as e^{b_t} e^{-b_i} overflows
under strong decay. `halvings` splits the pairs i < t instead: at width h the keys of a left half meet the queries
of the right half beside it, with the boundary b_ref between them as reference, so that e^{b_t-b_ref} and
e^{b_ref-b_i} both have exponents <= 0, and log2(C) widths cover every pair once.

Letters: B batch, T time, E gate (state) heads, M decayed channels, D the other dim, C chunk, N chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def into_chunks(y: Tensor, C: int, heads: int, dtype: torch.dtype) -> Tensor:
    """[B,T,E*X,Y] -> [B,E,X,N,C,Y] in `dtype`, the tail filled with zeros (log-decay 0, nothing written)."""
    y = F.pad(y, (0, 0, 0, 0, 0, -y.shape[1] % C)).to(dtype)
    return y.unflatten(1, (-1, C)).unflatten(3, (heads, -1)).permute(0, 3, 4, 1, 2, 5)


def scan_states(decay: Tensor, added: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_{n+1} = diag(decay_n) S_n + added_n over chunks: the states that enter each chunk [B,E,N,M,D], and the last."""
    entering = []
    for n in range(added.shape[2]):
        entering.append(S)
        S = decay[:, :, n, :, None] * S + added[:, :, n]
    return torch.stack(entering, 2), S


class SegmentMasks(NamedTuple):
    """Where packed documents allow the flow; each broadcasts over heads and slots."""

    reads: Tensor  # [B,1,N,C,1] the token belongs to the document that entered the chunk
    writes: Tensor  # [B,1,N,C,1] the token belongs to the document that leaves it
    keeps: Tensor  # [B,1,N,1] one document entered and leaves
    pairs: Tensor  # [B,1,1,N,C,C] both tokens belong to one document


def segment_masks(segments: Tensor | None, C: int) -> SegmentMasks | None:
    """The masks for `segments` [B,T] (None: none needed). A state that is handed in belongs to a row's first one."""
    if segments is None:
        return None
    first = segments[:, :1]
    seg = torch.cat([segments, segments[:, -1:].expand(-1, -segments.shape[1] % C)], 1).unflatten(1, (-1, C))
    entered = torch.cat([first, seg[:, :-1, -1]], 1)  # [B,N]
    reads = (seg == entered[..., None])[:, None, ..., None]
    writes = (seg == seg[..., -1:])[:, None, ..., None]
    keeps = (seg[..., -1] == entered)[:, None, :, None]
    return SegmentMasks(reads, writes, keeps, (seg[..., :, None] == seg[..., None, :])[:, None, None])


class Halving(NamedTuple):
    """One width of the halving: pairs (t, i) of a [w,w] block with t in a right half and i in the left half beside it."""

    width: int
    query_decay: Tensor  # e^{b_t - b_ref} at right halves, 0 elsewhere: [B,E,N*C/w,w,M]
    key_write: Tensor  # s_i e^{b_ref - b_i} at left halves, 0 elsewhere: [B,E,N*C/w,w,M]
    allowed: Tensor  # [.., N*C/w,w,w]


def halvings(b: Tensor, s: Tensor, masks: SegmentMasks | None) -> list[Halving]:
    """All widths for b [B,E,N,C,M], the cumulative log-decay, and s [B,E,N,C,M], what each token writes."""
    C, halves = b.shape[-2], []
    h = 1
    while h < C:
        # Below 16 rows a block holds several pairs of halves: fewer, larger products.
        w = min(max(2 * h, 16), C)
        paired = b.unflatten(-2, (-1, 2, h))  # [B,E,N,C/2h,2,h,M]
        offset = (paired - paired[..., :1, -1:, :]).flatten(-4, -2)  # b - b_ref: <= 0 right, >= 0 left
        right = (torch.arange(C, device=b.device) // h % 2 == 1)[:, None]
        query_decay = torch.where(right, torch.where(right, offset, 0.0).exp(), 0.0)
        key_write = torch.where(right, 0.0, torch.where(right, 0.0, -offset).exp()) * s
        pair = torch.arange(w, device=b.device) // (2 * h)
        allowed = pair[:, None] == pair[None, :]
        if masks is not None:
            allowed = allowed & diagonal_blocks(masks.pairs, w)
        halves.append(Halving(w, into_blocks(query_decay, w), into_blocks(key_write, w), allowed))
        h *= 2
    return halves


def into_blocks(y: Tensor, w: int) -> Tensor:
    """[..., N, C, M] -> [..., N*C/w, w, M]."""
    return y.unflatten(-2, (-1, w)).flatten(-4, -3)


def diagonal_blocks(y: Tensor, w: int) -> Tensor:
    """The [w,w] blocks on the diagonal of [..., N, C, C]: [..., N*C/w, w, w]."""
    C = y.shape[-1]
    y = y.unflatten(-1, (C // w, w)).unflatten(-3, (C // w, w))  # [..., N, C/w, w, C/w, w]
    return y.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).flatten(-4, -3)
