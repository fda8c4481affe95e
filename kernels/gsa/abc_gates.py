"""Slots without decay: the writes of ABC (Peng et al., "ABC: Attention with Bounded-memory Control", arXiv 2110.02488),
an ablation in table 2 of GSA's paper.

A slot holds the mean of the tokens of its document by weights e^{f}, f = W x. With z_t = log sum_{i<=t} e^{f_i} that
is GSA with a decay of its own, so that its forms serve it:

    K~_t = e^{z_{t-1} - z_t} K~_{t-1} + e^{f_t - z_t} k_t^T        g_t = z_{t-1} - z_t        s_t = 1 - e^{g_t}

Letters: as in gsa.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.scan import FLOOR, numbered
from ..layers.sequences import splice
from .eager import GSAState

# The logarithm of no weight at all.
NOTHING = -1e30


class ABCState(NamedTuple):
    """Decode state: what GSA has, and z [B,E,M] in fp32."""

    slots: GSAState
    total: Tensor


def abc_gates(
    f: Tensor, padding: Tensor | None, segments: Tensor | None, before: Tensor | None, cu: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-decays g [B,T,E,M], <= 0, and the last z [B,E,M], in fp32 at least, of f [B,T,E,M].

    `before` is z of what came before a row's first document. `padding`, `segments` and `cu` (cu_seqlens) as for `gsa`.
    The sums take log2 T passes over f.
    """
    if cu is not None:
        at = splice(cu, f.shape[1], 1)
        first = f.new_full((len(cu) - 1, 1, *f.shape[2:]), NOTHING) if before is None else before[:, None]
        z = at.join(first, f.to(torch.promote_types(f.dtype, torch.float32)))
        sums = _sums(z, at.held.new_zeros(z.shape[1]).index_fill_(0, at.held[:, 0], 1).cumsum(0)[None])
        earlier = sums[:, at.tokens - 1]
        return (earlier - sums[:, at.tokens]).clamp(FLOOR, 0.0), sums[0, at.ends - 1]
    f = f.to(torch.promote_types(f.dtype, torch.float32))
    (B, T), first = f.shape[:2], f.new_full((f.shape[0], 1, *f.shape[2:]), NOTHING)
    if padding is not None:
        f = torch.where(padding[:, :, None, None], f, NOTHING)
    document = torch.zeros(B, T, dtype=torch.long, device=f.device) if segments is None else numbered(segments)
    document = F.pad(document.expand(B, T), (1, 0))  # what came before belongs to the first
    z = _sums(torch.cat([first if before is None else before[:, None].to(f), f], 1), document)
    earlier = torch.where((document[:, 1:] == document[:, :-1])[:, :, None, None], z[:, :-1], NOTHING)
    return (earlier - z[:, 1:]).clamp(FLOOR, 0.0), z[:, -1]


def _sums(z: Tensor, document: Tensor) -> Tensor:
    """log sum of e^z over the tokens so far of the same document, [B,N,..] for `document` [B,N]."""
    step = 1
    while step < z.shape[1]:
        own = (document[:, step:] == document[:, :-step])[:, :, None, None]
        z = torch.cat([z[:, :step], torch.logaddexp(z[:, step:], torch.where(own, z[:, :-step], NOTHING))], 1)
        step *= 2
    return z
