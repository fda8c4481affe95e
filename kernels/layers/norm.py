"""Norms of each head's row: by its root mean square for mechanisms whose outputs are sums rather than means, by its
length for keys of length 1.

    out = x f w r        x = y or swish(y), f = (share sum x^2 + eps)^-1/2, share 1/D (root mean square) or 1 (length)

w [H,D] and r [B,T,H] where they are given. In PyTorch that is six to ten passes over [B,T,H,D]; on a GPU it is one
kernel each way. Backwards, with g = do w r:

    dx = f g - f^3 share x sum g x        dw = sum do x f r        dr = sum do x f w

Letters: B batch, T time, H heads, D numbers of a row; N = B*T rows of each head.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..gpu.launch import dense, launch, scratch, unavailable
from ..gpu.operators import operator, own_namespace
from ..gpu.triton_helpers import jit, tl, triton

# Numbers of a program's tile, and tiles of a program backward, whose part of dw is one row.
TILE, TILES = 4096, 16
# What `head_norm` adds to the mean square by itself.
EPS = 1e-6


def head_norm(
    o: Tensor, weight: Tensor, gate: Tensor | None = None, *, eps: float = EPS, plain: bool = False
) -> Tensor:
    """o / rms(o) over the value dim of each head, times weight [H,Dv]; o [B,T,H,Dv], in its dtype.

    `gate` [B,T,H] multiplies what comes out: in front, the norm would cancel it. `eps` is added to the mean square.
    `plain` keeps to PyTorch.
    """
    if not plain and _takes(o, weight, gate):
        out: Tensor = norm_op(o, weight, gate, True, False, o.dtype, eps)
        return out
    y = o.to(torch.promote_types(o.dtype, torch.float32))
    factor = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if gate is not None:
        factor = factor * gate.to(y.dtype)[..., None]
    return (y * factor * weight.to(y.dtype)).to(o.dtype)


def unit_rows(y: Tensor, swish: bool, dtype: torch.dtype, *, eps: float = 1e-12, plain: bool = False) -> Tensor:
    """y [B,T,H,D], or swish(y), over the length of each row in `dtype`, zero where it vanishes: `eps` is added to the
    squared length. `plain` keeps to PyTorch."""
    if not plain and _takes(y) and dtype != torch.float64:
        out: Tensor = norm_op(y, None, None, False, swish, dtype, eps)
        return out
    y = F.silu(y) if swish else y
    y = y.to(torch.promote_types(y.dtype, torch.float32))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(dtype)


def _takes(y: Tensor, weight: Tensor | None = None, gate: Tensor | None = None) -> bool:
    """Whether the kernels take rows of y, and what is beside them, in full."""
    kinds = [x.dtype for x in (y, weight, gate) if x is not None]
    whole = (weight is None or weight.shape == y.shape[2:]) and (gate is None or gate.shape == y.shape[:3])
    return whole and y.numel() > 0 and not any(unavailable(y.device, kind) for kind in kinds)


@torch.no_grad()
def give_size(weight: Tensor, o_teacher: Tensor) -> None:
    """Set the weight [H,Dv] of a norm so that each head's output has the teacher's root mean square [B,T,H,Dv]."""
    rms = o_teacher.float().square().mean((0, 1, 3)).sqrt()
    weight.copy_(rms[:, None].expand_as(weight))


@torch.no_grad()
def fit_size(weight: Tensor, o: Tensor, o_teacher: Tensor) -> None:
    """Scale the weight [H,Dv] of a norm, so that each head's output o [B,T,H,Dv] under it comes as near to the teacher's
    as a factor can bring it: by least squares, and at least a tenth of what gives it the teacher's root mean square."""
    y, target = o.float(), o_teacher.float()
    power = y.square().sum((0, 1, 3)).clamp_min(1e-12)
    least = 0.1 * (target.square().sum((0, 1, 3)) / power).sqrt()
    factor = torch.maximum((y * target).sum((0, 1, 3)) / power, least)
    weight.mul_(factor[:, None].to(weight.dtype))


class HeadNorm(nn.Module):
    """`head_norm` with its weight."""

    def __init__(self, heads: int, dim: int, eps: float = EPS) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(heads, dim)), eps

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.ones_(self.weight)

    def forward(self, o: Tensor, gate: Tensor | None = None, *, plain: bool = False) -> Tensor:
        return head_norm(o, self.weight, gate, eps=self.eps, plain=plain)

    def calibrate(self, o_teacher: Tensor) -> None:
        give_size(self.weight, o_teacher)


# ---------------------------------------------------------------- kernels


@jit
def rows(p_y, i_h, o_r, o_d, N, T, H, s_b, s_t, s_h, D: tl.constexpr, SWISH: tl.constexpr):
    """Offsets of rows o_r of one head in a dense tensor, which of their numbers exist, and y and x of them, [BR,BD]
    fp32."""
    o_y = (o_r.to(tl.int64)[:, None] * H + i_h) * D + o_d[None, :]
    m_y = (o_r < N)[:, None] & (o_d < D)[None, :]
    o_x = (o_r // T).to(tl.int64) * s_b + (o_r % T).to(tl.int64) * s_t + i_h.to(tl.int64) * s_h
    b_y = tl.load(p_y + o_x[:, None] + o_d[None, :], mask=m_y, other=0.0).to(tl.float32)
    b_x = b_y
    if SWISH:
        b_x = b_y * tl.sigmoid(b_y)
    return o_y, m_y, b_y, b_x


@jit
def beside(p_w, p_gate, b_x, i_h, o_r, o_d, N, H, D: tl.constexpr):
    """x times the weight and the gate of each number, where they are given."""
    if p_w is not None:
        b_x *= tl.load(p_w + i_h * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    if p_gate is not None:
        b_x *= tl.load(p_gate + o_r.to(tl.int64) * H + i_h, mask=o_r < N, other=0.0).to(tl.float32)[:, None]
    return b_x


@jit
def forward_kernel(p_y, p_w, p_gate, p_out, share, eps, N: int, T: int, H, s_b, s_t, s_h, D: tl.constexpr,
                   SWISH: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Grid (rows / BR, H)."""
    i_h, o_r, o_d = tl.program_id(1), tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)
    o_y, m_y, _, b_x = rows(p_y, i_h, o_r, o_d, N, T, H, s_b, s_t, s_h, D, SWISH)
    b_f = tl.rsqrt(share * tl.sum(b_x * b_x, 1) + eps)
    b_x = beside(p_w, p_gate, b_x * b_f[:, None], i_h, o_r, o_d, N, H, D)
    tl.store(p_out + o_y, b_x.to(p_out.dtype.element_ty), mask=m_y)


@jit
def backward_kernel(p_do, p_y, p_w, p_gate, p_dy, p_dw, p_dgate, share, eps, N: int, T: int, H, s_b, s_t, s_h,
                    D: tl.constexpr, SWISH: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
                    TILES: tl.constexpr):  # fmt: skip
    """dy, of TILES tiles dw, and dr. Grid (rows / (BR * TILES), H)."""
    i_h, o_d = tl.program_id(1), tl.arange(0, BD)
    b_dw = tl.zeros([BD], tl.float32)
    for tile in range(TILES):
        o_r = (tl.program_id(0) * TILES + tile) * BR + tl.arange(0, BR)
        o_y, m_y, b_y, b_x = rows(p_y, i_h, o_r, o_d, N, T, H, s_b, s_t, s_h, D, SWISH)
        b_f = tl.rsqrt(share * tl.sum(b_x * b_x, 1) + eps)
        b_do = tl.load(p_do + o_y, mask=m_y, other=0.0).to(tl.float32)
        b_g = beside(p_w, p_gate, b_do, i_h, o_r, o_d, N, H, D)
        b_along = tl.sum(b_g * b_x, 1)
        b_dx = b_f[:, None] * (b_g - (b_f * b_f * share * b_along)[:, None] * b_x)
        if SWISH:
            b_s = tl.sigmoid(b_y)
            b_dx *= b_s * (1.0 + b_y * (1.0 - b_s))
        tl.store(p_dy + o_y, b_dx.to(p_dy.dtype.element_ty), mask=m_y)
        if p_w is not None:
            b_dw += tl.sum(beside(None, p_gate, b_do * b_x * b_f[:, None], i_h, o_r, o_d, N, H, D), 0)
        if p_gate is not None:
            b_dr = tl.sum(beside(p_w, None, b_do * b_x * b_f[:, None], i_h, o_r, o_d, N, H, D), 1)
            tl.store(p_dgate + o_r.to(tl.int64) * H + i_h, b_dr, mask=o_r < N)
    if p_w is not None:
        tl.store(p_dw + (tl.program_id(0).to(tl.int64) * H + i_h) * D + o_d, b_dw, mask=o_d < D)


# ---------------------------------------------------------------- host side


class Call(NamedTuple):
    """The inputs of the operator. `mean`: the root mean square, else the length; `kind` is the result's dtype; `eps` is
    added to the mean square, or to the square."""

    y: Tensor
    weight: Tensor | None
    gate: Tensor | None
    mean: bool
    swish: bool
    kind: torch.dtype
    eps: float


def _inputs(x: Call) -> tuple[list[Tensor | None], tuple[Any, ...], dict[str, Any]]:
    """Tensors, of which y may be a view; what kernels take behind their tensors; their constants."""
    B, T, H, D = x.y.shape
    BD, y = triton.next_power_of_2(D), dense(x.y)
    constants = {"D": D, "SWISH": x.swish, "BD": BD, "BR": max(1, TILE // BD), "TILES": TILES}
    tensors = [y, *(None if z is None else z.contiguous() for z in x[1:3])]
    return tensors, (1.0 / D if x.mean else 1.0, x.eps, B * T, T, H, *y.stride()[:3]), constants


def _forward(x: Call, out: Tensor) -> None:
    tensors, numbers, constants = _inputs(x)
    grid = triton.cdiv(numbers[2], constants["BR"]), x.y.shape[2]
    launch(forward_kernel, grid, *tensors, out, *numbers, num_warps=4, **constants)


def _backward(x: Call, do: Tensor) -> tuple[Tensor, ...]:
    """dy, dw and dr."""
    tensors, numbers, constants = _inputs(x)
    _, _, H, D = x.y.shape
    grid = triton.cdiv(numbers[2], constants["BR"] * TILES), H
    dy, dw = scratch(x.y, *x.y.shape, dtype=x.y.dtype), scratch(x.y, grid[0], H, 0 if x.weight is None else D)
    dgate = scratch(x.y, *((0,) if x.gate is None else x.gate.shape))
    launch(backward_kernel, grid, do.contiguous(), *tensors, dy, dw, dgate, *numbers, num_warps=4,
           **constants)  # fmt: skip
    return dy, dw.sum(0), dgate


NAMESPACE = own_namespace(__name__, "row_norm")
norm_op = operator(
    NAMESPACE, "row_norm", Call, lambda x: [scratch(x.y, *x.y.shape, dtype=x.kind)], _forward, "out",
    backward=_backward, leaves="y weight gate",
)  # fmt: skip
