"""The mechanism's output and the window's, blended per token and query head: o = w far + (1 - w) near.

In PyTorch that is four passes in fp32 over [B,T,H,Dv] forward and ten backward; on a GPU it is one kernel each way.

Letters: R = B*T*H rows of Dv numbers.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..gpu.launch import launch, scratch, unavailable
from ..gpu.operators import operator, own_namespace
from ..gpu.triton_helpers import jit, tl, triton

# Numbers of a program's tile.
TILE = 4096


def blend(far: Tensor, near: Tensor, w: Tensor, *, plain: bool = False) -> Tensor:
    """w far + (1 - w) near, in far's dtype: far, near [B,T,H,Dv], w [B,T,H] in fp32 (fp64 stays).

    `plain` keeps to PyTorch.
    """
    if not plain and far.numel() and not any(unavailable(far.device, y.dtype) for y in (far, near, w)):
        out: Tensor = blend_op(far, near, w)
        return out
    w = w[..., None]
    return (w * far + (1.0 - w) * near).to(far.dtype)


@jit
def rows(o_r, o_d, N, D: tl.constexpr):
    """Offsets of a tile and which of its places exist."""
    return o_r.to(tl.int64)[:, None] * D + o_d[None, :], (o_r < N)[:, None] & (o_d < D)[None, :]


@jit
def forward_kernel(p_far, p_near, p_w, p_o, N: int, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Grid (rows / BR)."""
    o_r, o_d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)
    o_x, m_x = rows(o_r, o_d, N, D)
    b_w = tl.load(p_w + o_r, mask=o_r < N, other=0.0)[:, None]
    b_far = tl.load(p_far + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_near = tl.load(p_near + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(p_o + o_x, (b_w * b_far + (1.0 - b_w) * b_near).to(p_o.dtype.element_ty), mask=m_x)


@jit
def backward_kernel(p_do, p_far, p_near, p_w, p_dfar, p_dnear, p_dw, N: int, D: tl.constexpr, BR: tl.constexpr,
                    BD: tl.constexpr):  # fmt: skip
    """dfar = w do, dnear = (1 - w) do, dw = do . (far - near). Grid (rows / BR)."""
    o_r, o_d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)
    o_x, m_x = rows(o_r, o_d, N, D)
    b_w = tl.load(p_w + o_r, mask=o_r < N, other=0.0)[:, None]
    b_do = tl.load(p_do + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_far = tl.load(p_far + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_near = tl.load(p_near + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(p_dfar + o_x, (b_w * b_do).to(p_dfar.dtype.element_ty), mask=m_x)
    tl.store(p_dnear + o_x, ((1.0 - b_w) * b_do).to(p_dnear.dtype.element_ty), mask=m_x)
    tl.store(p_dw + o_r, tl.sum(b_do * (b_far - b_near), 1), mask=o_r < N)


class Call(NamedTuple):
    """The inputs of the operator."""

    far: Tensor
    near: Tensor
    w: Tensor


def _run(kernel: Any, x: Call, *tensors: Tensor) -> None:
    D, N = x.far.shape[-1], x.w.numel()
    BD = triton.next_power_of_2(D)
    BR = max(1, TILE // BD)
    launch(kernel, (triton.cdiv(N, BR),), *tensors, N, num_warps=8, D=D, BR=BR, BD=BD)


def _forward(x: Call, o: Tensor) -> None:
    _run(forward_kernel, x, *(y.contiguous() for y in x), o)


def _backward(x: Call, do: Tensor) -> tuple[Tensor, ...]:
    made = tuple(scratch(y, *y.shape, dtype=y.dtype) for y in x)
    _run(backward_kernel, x, do.contiguous(), *(y.contiguous() for y in x), *made)
    return made


NAMESPACE = own_namespace(__name__, "blend")
blend_op = operator(
    NAMESPACE, "blend", Call, lambda x: [scratch(x.far, *x.far.shape, dtype=x.far.dtype)], _forward, "o",
    backward=_backward, leaves="far near w",
)  # fmt: skip
