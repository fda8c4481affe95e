"""A depthwise convolution of values over the places of their tokens: what SAGA calls DWC and MHLA CPE.

Letters: B batch, T tokens, E KV heads, Dv value dim, K size of the convolution.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import Grid


def depthwise(
    v: Tensor, weight: Tensor, grid: Grid | None, padding: Tensor | None = None, segments: Tensor | None = None
) -> Tensor:
    """DWC(V): v [B,T,E,Dv] convolved channel by channel over its grid, 0 for tokens without a place, same shape.

    `weight` [E,Dv,K] for a line, [E,Dv,K,K] for a grid, of a film each frame by itself; outside all is 0. Padding
    counts as outside, and so do tokens of another segment.
    """
    B, T, E, Dv = v.shape
    grid = Grid((T,)) if grid is None else grid
    if padding is not None:
        v = torch.where(padding[:, :, None, None], v, 0.0)
    axes, end = weight.ndim - 2, T - grid.suffix
    size = (1,) * (axes + 1 - len(grid.size)) + grid.size  # a line may be an image of one row
    size = (math.prod(size[:-axes]), *size[-axes:])
    inner = v[:, grid.prefix : end].reshape(B * size[0], *size[1:], E * Dv).movedim(-1, 1)
    taps = weight.reshape(E * Dv, 1, *weight.shape[2:]).to(v.dtype)
    if segments is None:
        convolve, K = F.conv1d if axes == 1 else F.conv2d, weight.shape[-1]
        inner = inner if K % 2 else F.pad(inner, (0, 1) * axes)
        local = convolve(inner, taps, padding=(K - 1) // 2, groups=E * Dv)
    else:
        local = _apart(inner, taps, segments[:, grid.prefix : end].reshape(B * size[0], 1, *size[1:]))
    local = local.movedim(1, -1).reshape(B, end - grid.prefix, E, Dv)
    return F.pad(local, (0, 0, 0, 0, grid.prefix, grid.suffix)) if grid.prefix or grid.suffix else local


def _apart(inner: Tensor, taps: Tensor, segments: Tensor) -> Tensor:
    """The convolution of inner [B,C,..] tap by tap, neighbours of another segment [B,1,..] left out."""
    K, sizes = taps.shape[-1], inner.shape[2:]
    around = ((K - 1) // 2, K // 2) * len(sizes)
    wide, numbers = F.pad(inner, around), F.pad(segments, around, value=-1)
    total = torch.zeros_like(inner)
    for tap, offset in enumerate(itertools.product(range(K), repeat=len(sizes))):
        values, own = wide, numbers
        for axis, (start, length) in enumerate(zip(offset, sizes, strict=True), 2):
            values, own = values.narrow(axis, start, length), own.narrow(axis, start, length)
        weight = taps.flatten(2)[:, 0, tap].reshape(-1, *(1 for _ in sizes))
        total = total + torch.where(own == segments, values, 0.0) * weight
    return total
