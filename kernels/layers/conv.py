"""A short causal convolution along the tokens of each document, a filter per channel, with its state for decoding.

    out_t = sum_{i<K} taps_i y_{t-(K-1)+i}        the last tap weighs the token itself

Padding is left out of the count of tokens, and nothing crosses from one document to the next.

Letters: B batch, T time, K taps, Y channels of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import once
from .scan import numbered
from .sequences import splice


def short_conv(
    y: Tensor, taps: Tensor, tail: Tensor | None, padding: Tensor | None, segments: Tensor | None, cu: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out [B,T,heads,Y] in y's dtype, and the last K-1 tokens [B,K-1,heads,Y] fp32, zero where a document had fewer.

    y [B,T,heads,Y]; `taps` [heads,Y,K]; `tail` as an earlier call returned it, of a row's first document; `padding`
    [B,T] bool is True at real tokens (the output elsewhere means nothing); `segments` [B,T] int numbers documents.
    `cu` [S+1] int with B=1: S sequences laid end to end, of which `tail` has a row each, and so has the last K-1 tokens.
    """
    if cu is not None:
        return _sequences(y, taps, tail, cu)
    (B, T), K = y.shape[:2], taps.shape[-1]
    dtype, y = y.dtype, y.to(torch.promote_types(y.dtype, torch.float32))
    tail = y.new_zeros(B, K - 1, *y.shape[2:]) if tail is None else tail
    if padding is None and segments is None:
        rows = torch.cat([tail, y], 1)
        return _weighed(rows, taps).to(dtype), rows[:, T:]
    document = torch.zeros(B, T, dtype=torch.long, device=y.device) if segments is None else numbered(segments)
    order, final = None, document[:, -1:]
    if padding is not None:  # real tokens first, so that places count real tokens only
        order = padding.logical_not().long().argsort(dim=1, stable=True)
        y, document = y.take_along_dim(order[:, :, None, None], 1), document.take_along_dim(order, 1)
    # The tail belongs to document 0, of which only padding may be left.
    rows, owner = torch.cat([tail, y], 1), F.pad(document, (K - 1, 0))
    out = torch.zeros_like(y)
    for i in range(K):
        own = owner[:, i : i + T] == document
        out = out + rows[:, i : i + T] * own[:, :, None, None] * taps[..., i].to(y.dtype)
    if order is not None:
        out = out.take_along_dim(order.argsort(1)[:, :, None, None], 1)
    end = torch.full((B, 1), T, device=y.device) if padding is None else padding.long().sum(1, keepdim=True)
    place = end + torch.arange(K - 1, device=y.device)
    kept = (owner.take_along_dim(place, 1) == final)[:, :, None, None]
    return out.to(dtype), rows.take_along_dim(place[:, :, None, None], 1) * kept


def _sequences(y: Tensor, taps: Tensor, tail: Tensor | None, cu: Tensor) -> tuple[Tensor, Tensor]:
    """`short_conv` of sequences laid end to end."""
    K, dtype, y = taps.shape[-1], y.dtype, y.to(torch.promote_types(y.dtype, torch.float32))
    tail = y.new_zeros(len(cu) - 1, K - 1, *y.shape[2:]) if tail is None else tail
    at = once(cu, ("spliced", y.shape[1], K - 1), lambda: splice(cu, y.shape[1], K - 1))
    rows = at.join(tail, y)
    last = rows[0, at.ends[:, None] - (K - 1) + torch.arange(K - 1, device=y.device)]
    return _weighed(rows, taps).to(dtype).index_select(1, at.tokens - (K - 1)), last


def _weighed(rows: Tensor, taps: Tensor) -> Tensor:
    """out [B,T,heads,Y] of one document each, rows [B,K-1+T,heads,Y] with what came before it: a launch for each tap."""
    first, *others = taps.to(rows.dtype).unbind(-1)
    T = rows.shape[1] - len(others)
    out = rows[:, :T] * first
    for i, tap in enumerate(others, 1):
        out = torch.addcmul(out, rows[:, i : i + T], tap)
    return out
