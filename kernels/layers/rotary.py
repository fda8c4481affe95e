"""A rotary embedding behind the feature map, where the architecture's own is in front of it.

phi(R q).phi(R k) depends on how far each of q and k is rotated, so a mechanism that is distilled on rows of 256 tokens
has never seen what follows. (R phi(q)).(R phi(k)) depends on their distance alone, as softmax does (with GLA's decays,
as far as both channels of a pair are forgotten alike). The angles are those
of the architecture (Su et al., arXiv 2104.09864). Which channels make a pair is free here: i and i + D/2 of each D.

In PyTorch that is a dozen passes over [B,T,heads,F], half of them in fp32; on a GPU it is one kernel, whose backward
pass is itself with the opposite angle.

Letters: B batch, T time, H heads, D head dim, F features, R channels that the architecture rotates; N = B*T rows.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import dense, launch, scratch, unavailable
from ..gpu.operators import operator, own_namespace
from ..gpu.triton_helpers import jit, tl, triton

# Where q and k are rotated: `before` the feature map (as in the softmax model), `after` it, or not at all (`off`).
# `auto` is resolved when a conversion is planned.
Rope = Literal["auto", "before", "after", "off"]


class Rotation(NamedTuple):
    """cos and sin of the angles of R/2 pairs of channels, [B or 1,T,R/2]."""

    cos: Tensor
    sin: Tensor


def resolve_rope(rope: str | bool, window: int) -> str:
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


# Numbers of a program's tile.
TILE = 4096


def rotated(y: Tensor, rotation: Rotation, dim: int, *, plain: bool = False) -> Tensor:
    """Features y [B,T,heads,F] with the first R/2 pairs of each `dim` D channels rotated, in y's dtype. `plain` keeps to
    PyTorch."""
    fixed = all(part.shape[:2] in ((1, y.shape[1]), y.shape[:2]) and not part.requires_grad for part in rotation)
    usable = y.numel() > 0 and not any(unavailable(y.device, x.dtype) for x in (y, *rotation))
    if usable and fixed and not plain:
        out: Tensor = rotary_op(y, *rotation, dim, False)
        return out
    cos, sin = (part[:, :, None, None].to(torch.promote_types(y.dtype, torch.float32)) for part in rotation)
    n = cos.shape[-1]
    left, right = y.unflatten(-1, (-1, dim)).split((dim // 2, dim - dim // 2), -1)
    a, b = left[..., :n].to(cos.dtype), right[..., :n].to(cos.dtype)
    n = a.shape[-1]
    cos, sin = cos[..., :n], sin[..., :n]
    turned = [(a * cos - b * sin).to(y.dtype), left[..., n:], (a * sin + b * cos).to(y.dtype), right[..., n:]]
    return torch.cat(turned, -1).flatten(-2)


# ---------------------------------------------------------------- the kernel


@jit
def rotary_kernel(p_y, p_cos, p_sin, p_out, sign, N: int, T: int, H, s_b, s_t, s_h, s_cb, s_ct, s_sb, s_st, pairs,
                  D: tl.constexpr, F: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """D channels of one head and BR rows: their halves a and b to a cos - b sin and a sin + b cos, sin times `sign`.
    Grid (rows / BR, H * F / D)."""
    i_h, i_c = tl.program_id(1) // (F // D), tl.program_id(1) % (F // D)
    o_r, o_i = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)[None, :]
    i_b, i_t, m_r = (o_r // T).to(tl.int64), (o_r % T).to(tl.int64), (o_r < N)[:, None]
    HALF: tl.constexpr = D // 2
    m_a, m_b, m_n = m_r & (o_i < HALF), m_r & (o_i < D - HALF), m_r & (o_i < pairs)
    p_y += (i_b * s_b + i_t * s_t + i_h.to(tl.int64) * s_h + i_c * D)[:, None]
    b_a = tl.load(p_y + o_i, mask=m_a, other=0.0).to(tl.float32)
    b_b = tl.load(p_y + HALF + o_i, mask=m_b, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + (i_b * s_cb + i_t * s_ct)[:, None] + o_i, mask=m_n, other=0.0).to(tl.float32)
    b_sin = sign * tl.load(p_sin + (i_b * s_sb + i_t * s_st)[:, None] + o_i, mask=m_n, other=0.0).to(tl.float32)
    p_out += ((o_r.to(tl.int64) * H + i_h) * F + i_c * D)[:, None]
    kind: tl.constexpr = p_out.dtype.element_ty
    tl.store(p_out + o_i, tl.where(m_n, b_a * b_cos - b_b * b_sin, b_a).to(kind), mask=m_a)
    tl.store(p_out + HALF + o_i, tl.where(m_n, b_a * b_sin + b_b * b_cos, b_b).to(kind), mask=m_b)


class Call(NamedTuple):
    """The inputs of the operator; `back`: by the opposite angle."""

    y: Tensor
    cos: Tensor
    sin: Tensor
    dim: int
    back: bool


def _forward(x: Call, out: Tensor) -> None:
    (B, T, H, F), D = x.y.shape, x.dim
    y, cos, sin = dense(x.y), dense(x.cos), dense(x.sin)
    BD = triton.next_power_of_2(D - D // 2)
    BR = max(1, TILE // (2 * BD))
    steps = [step for part in (cos, sin) for step in (part.stride(0) if part.shape[0] > 1 else 0, part.stride(1))]
    grid = triton.cdiv(B * T, BR), H * (F // D)
    launch(rotary_kernel, grid, y, cos, sin, out, -1.0 if x.back else 1.0, B * T, T, H, *y.stride()[:3], *steps,
           min(cos.shape[-1], D // 2), num_warps=4, D=D, F=F, BR=BR, BD=BD)  # fmt: skip


def _backward(x: Call, do: Tensor) -> tuple[Tensor]:
    """dy."""
    dy = scratch(x.y, *x.y.shape, dtype=x.y.dtype)
    _forward(Call(do.contiguous(), x.cos, x.sin, x.dim, not x.back), dy)
    return (dy,)


NAMESPACE = own_namespace(__name__, "rotary")
rotary_op = operator(
    NAMESPACE, "rotary", Call, lambda x: [scratch(x.y, *x.y.shape, dtype=x.y.dtype)], _forward, "out",
    backward=_backward, leaves="y",
)  # fmt: skip
