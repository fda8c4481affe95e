"""A rotary embedding behind the feature map, where the architecture's own is in front of it.

phi(R q).phi(R k) depends on how far each of q and k is rotated, so a mechanism that is distilled on rows of 256 tokens
has never seen what follows. (R phi(q)).(R phi(k)) depends on their distance alone, as softmax does (with GLA's decays,
as far as both channels of a pair are forgotten alike). The angles are those
of the architecture (Su et al., arXiv 2104.09864). Which channels make a pair is free here: i and i + D/2 of each D.

Letters: B batch, T time, D head dim, F features, R channels that the architecture rotates.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# Where q and k are rotated: `before` the feature map (as in the softmax model), `after` it, or not at all (`off`).
# `auto` is settled when a conversion is planned.
Rope = Literal["auto", "before", "after", "off"]


class Rotation(NamedTuple):
    """cos and sin of the angles of R/2 pairs of channels, [B or 1,T,R/2]."""

    cos: Tensor
    sin: Tensor


def settled(rope: str | bool, window: int) -> str:
    """What `auto` stands for: exact attention to a window needs q and k as the softmax model has them. Earlier versions
    wrote true for `before` and false for `off`."""
    if isinstance(rope, bool):
        return "before" if rope else "off"
    return rope if rope != "auto" else "before" if window else "after"


def rotation_of(given: Any) -> Rotation | None:
    """The rotation that an attention module is given: cos and sin [..,T,R], or complex numbers [..,T,R/2]; None where it
    is given none.

    Architectures that give each angle twice in a row have R/4 angles here, each twice: those of the faster pairs.
    """
    if given is None:
        return None
    cos, sin = (given.real, given.imag) if isinstance(given, Tensor) else given
    half = cos.shape[-1] if isinstance(given, Tensor) else cos.shape[-1] // 2
    parts = [part[..., :half] for part in (cos, sin)]
    parts = [part[0] if part.ndim == 4 else part[None] if part.ndim == 2 else part for part in parts]
    return Rotation(*parts)


def rotated(y: Tensor, rotation: Rotation, dim: int) -> Tensor:
    """Features y [B,T,heads,F] with the first R/2 pairs of each `dim` D channels rotated, in y's dtype."""
    cos, sin = (part[:, :, None, None].to(torch.promote_types(y.dtype, torch.float32)) for part in rotation)
    n = cos.shape[-1]
    left, right = y.unflatten(-1, (-1, dim)).split((dim // 2, dim - dim // 2), -1)
    a, b = left[..., :n].to(cos.dtype), right[..., :n].to(cos.dtype)
    n = a.shape[-1]
    cos, sin = cos[..., :n], sin[..., :n]
    turned = [(a * cos - b * sin).to(y.dtype), left[..., n:], (a * sin + b * cos).to(y.dtype), right[..., n:]]
    return torch.cat(turned, -1).flatten(-2)
