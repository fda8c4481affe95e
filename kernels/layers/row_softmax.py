"""Softmax over the last dimension times a number, in fp32: SLA's gates over heads, MHLA's weights of blocks.

In PyTorch that is two passes forward and two backward, with a triangle five; on a GPU it is one kernel each way.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import interpreted, launch, scratch
from ..gpu.operators import operator, own_namespace
from ..gpu.triton_helpers import jit, tl, triton


def row_softmax(scores: Tensor, factor: float = 1.0, triangle: bool = False, *, plain: bool = False) -> Tensor:
    """factor softmax(scores) over the last dimension, in fp32 (fp64 stays).

    `triangle`: of scores [..,M,M] row i has the columns 0 to i, the others become 0, and is multiplied by i + 1 too.
    `plain` keeps to PyTorch.
    """
    usable = triton is not None and (scores.is_cuda or interpreted()) and scores.dtype != torch.float64
    if usable and not plain and scores.numel() and scores.shape[-1] <= 1024:
        return forward_op(scores, factor, triangle)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if not triangle:
        return scores.softmax(-1) * factor if factor != 1.0 else scores.softmax(-1)
    M = scores.shape[-1]
    later = torch.ones(M, M, dtype=torch.bool, device=scores.device).triu(1)
    count = torch.arange(1, M + 1, device=scores.device)[:, None]
    return scores.masked_fill(later, -torch.inf).softmax(-1) * (factor * count)


@jit
def place(o_r, o_h, factor, N, H: tl.constexpr, TRIANGLE: tl.constexpr):
    """Offsets of rows, which of their numbers count, and what each row is multiplied by."""
    o_x, m_x = o_r.to(tl.int64)[:, None] * H + o_h[None, :], (o_r < N)[:, None] & (o_h < H)[None, :]
    m_seen, b_factor = m_x, o_r * 0.0 + factor
    if TRIANGLE:
        m_seen = m_x & (o_h[None, :] <= (o_r % H)[:, None])
        b_factor *= (o_r % H + 1).to(tl.float32)
    return o_x, m_x, m_seen, b_factor


@jit
def forward_kernel(p_s, p_w, factor, N: int, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr,
                   TRIANGLE: tl.constexpr):  # fmt: skip
    """Grid (rows / BR)."""
    o_r, o_h = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BH)
    o_x, m_x, m_seen, b_factor = place(o_r, o_h, factor, N, H, TRIANGLE)
    b_s = tl.load(p_s + o_x, mask=m_x, other=0.0).to(tl.float32)
    # Rows that do not exist have something to divide by.
    b_s = tl.where(m_seen | (o_h == 0)[None, :], b_s, -float("inf"))
    b_w = tl.exp(b_s - tl.max(b_s, 1)[:, None])
    tl.store(p_w + o_x, b_w * (b_factor / tl.sum(b_w, 1))[:, None], mask=m_x)


@jit
def backward_kernel(p_dw, p_w, p_ds, factor, N: int, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr,
                    TRIANGLE: tl.constexpr):  # fmt: skip
    """ds = w (dw - sum w dw / factor). Grid (rows / BR)."""
    o_r, o_h = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BH)
    o_x, m_x, _, b_factor = place(o_r, o_h, factor, N, H, TRIANGLE)
    b_w, b_dw = tl.load(p_w + o_x, mask=m_x, other=0.0), tl.load(p_dw + o_x, mask=m_x, other=0.0)
    b_ds = b_w * (b_dw - (tl.sum(b_w * b_dw, 1) / b_factor)[:, None])
    tl.store(p_ds + o_x, b_ds.to(p_ds.dtype.element_ty), mask=m_x)


class Call(NamedTuple):
    """The inputs of the operator."""

    scores: Tensor
    factor: float
    triangle: bool


def _run(kernel: Any, x: Call, out: Tensor, *tensors: Tensor) -> None:
    H, N = out.shape[-1], out.numel() // out.shape[-1]
    BH = triton.next_power_of_2(H)
    BR = max(1, 2048 // BH)
    launch(kernel, (triton.cdiv(N, BR),), *tensors, out, x.factor, N, num_warps=4, H=H, BR=BR, BH=BH,
           TRIANGLE=x.triangle)  # fmt: skip


def _forward(x: Call, w: Tensor) -> None:
    _run(forward_kernel, x, w, x.scores.contiguous())


def _backward(x: Call, dw: Tensor, w: Tensor) -> list[Tensor]:
    ds = scratch(w, *w.shape, dtype=x.scores.dtype)
    _run(backward_kernel, x, ds, dw.contiguous(), w)
    return [ds]


NAMESPACE = own_namespace(__name__, "rows")
forward_op = operator(
    NAMESPACE, "rows", Call, lambda x: [scratch(x.scores, *x.scores.shape)], _forward, "w",
    kept="w", backward=_backward, leaves="scores",
)  # fmt: skip
