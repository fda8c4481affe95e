"""Log-decays from linear gates: g = log sigmoid(f + push) / damping, with GSA's clock as push.

In PyTorch this is a dozen passes over [B,T,E,M] in fp32 and as many launches a layer; on a GPU here it is one kernel
forward and one backward.

Letters: B batch, T time, E gate heads, M slots, C slots on the clock; R = B*T rows of E*M columns.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gpu.launch import interpreted, launch, scratch
from ..gpu.operators import operator, own_namespace
from ..gpu.triton_helpers import jit, tl, triton

# Rows of a program: of each tile, forward, and backward, where a program's part of the strength's gradient is one row.
TILE, ROWS, ROWS_BACK = 16, 16, 128


def log_decays(
    f: Tensor, damping: float, strength: Tensor | None = None, place: Tensor | None = None, *, plain: bool = False
) -> Tensor:
    """g [B,T,E,M] in fp32 (fp64 stays), <= 0, from f [B,T,E,M].

    `strength` [E,C] and `place` [B,T] int64: the first C slots take turns, slot `place % C` having its turn; -strength
    is added to f at a slot's turn and +strength at others. `plain` keeps to PyTorch.
    """
    usable = triton is not None and (f.device.type == "cuda" or interpreted()) and f.dtype != torch.float64
    if usable and not plain and f.numel():
        return gates_op(f, damping, strength, place)
    y = f if f.dtype == torch.float64 else f.float()
    if strength is not None and place is not None:
        C = strength.shape[1]
        turn = (place % C)[..., None] == torch.arange(C, device=f.device)  # [B,T,C]
        s = strength.to(y.dtype)
        y = torch.cat([y[..., :C] + torch.where(turn[:, :, None], -s, s), y[..., C:]], -1)
    return F.logsigmoid(y) / damping


def biases(half_lives: tuple[float, float], count: int, damping: float) -> Tensor:
    """Biases f with sigmoid(f)^{1/damping} = 2^{-1/half-life}, for `count` half-lives in tokens from the shortest to the
    longest, evenly in log scale; zeros where the shortest is 0. [count] float64."""
    if half_lives[0] <= 0.0:
        return torch.zeros(count, dtype=torch.float64)
    shortest, longest = (math.log10(x) for x in half_lives)
    log_sigmoid = -math.log(2.0) * damping / torch.logspace(shortest, longest, count, dtype=torch.float64)
    return log_sigmoid - torch.log(-torch.expm1(log_sigmoid))


# ---------------------------------------------------------------- kernels


@jit
def log1p(b_y):
    """log(1 + y) for 0 <= y <= 1 by 2 artanh(y / (2 + y)): the hardware's logarithm has no digit left near 1."""
    b_z = b_y / (2.0 + b_y)
    b_w = b_z * b_z
    b_p = 1.0 / 15.0 * b_w + 1.0 / 13.0
    b_p = b_p * b_w + 1.0 / 11.0
    b_p = b_p * b_w + 1.0 / 9.0
    b_p = b_p * b_w + 1.0 / 7.0
    b_p = b_p * b_w + 1.0 / 5.0
    b_p = b_p * b_w + 1.0 / 3.0
    return 2.0 * b_z * (b_p * b_w + 1.0)


@jit
def pushed(p_f, p_s, p_place, o_r, o_x, N, M, C, COLUMNS: tl.constexpr, CLOCK: tl.constexpr):
    """f + push of rows o_r and columns o_x, and the sign of each push, [rows,columns] fp32."""
    inside = (o_r < N)[:, None] & (o_x < COLUMNS)[None, :]
    b_f = tl.load(p_f + o_r.to(tl.int64)[:, None] * COLUMNS + o_x[None, :], mask=inside, other=0.0).to(tl.float32)
    b_sign = tl.zeros_like(b_f)
    if CLOCK:
        o_m = o_x % M
        on_clock = (o_m < C) & (o_x < COLUMNS)
        b_s = tl.load(p_s + (o_x // M) * C + o_m, mask=on_clock, other=0.0).to(tl.float32)
        b_turn = tl.load(p_place + o_r, mask=o_r < N, other=0) % C
        b_sign = tl.where(on_clock[None, :], tl.where(b_turn[:, None] == o_m[None, :], -1.0, 1.0), 0.0)
        b_f += b_sign * b_s[None, :]
    return b_f, b_sign, inside


@jit
def forward_kernel(p_f, p_s, p_place, p_g, damping, N: int, M, C, COLUMNS: tl.constexpr, CLOCK: tl.constexpr,
                   BR: tl.constexpr, BX: tl.constexpr):  # fmt: skip
    """Grid (rows / BR, columns / BX)."""
    o_r, o_x = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BX + tl.arange(0, BX)
    b_f, _, inside = pushed(p_f, p_s, p_place, o_r, o_x, N, M, C, COLUMNS, CLOCK)
    b_g = (tl.minimum(b_f, 0.0) - log1p(tl.exp(-tl.abs(b_f)))) / damping
    tl.store(p_g + o_r.to(tl.int64)[:, None] * COLUMNS + o_x[None, :], b_g, mask=inside)


@jit
def backward_kernel(p_dg, p_f, p_s, p_place, p_df, p_ds, damping, N: int, M, C, COLUMNS: tl.constexpr,
                    CLOCK: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """df, and of `ROWS` rows the strength's gradient. Grid (rows / ROWS, columns / BX)."""
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    b_ds = tl.zeros([BX], tl.float32)
    for start in range(0, ROWS, BR):
        o_r = tl.program_id(0) * ROWS + start + tl.arange(0, BR)
        b_f, b_sign, inside = pushed(p_f, p_s, p_place, o_r, o_x, N, M, C, COLUMNS, CLOCK)
        place = o_r.to(tl.int64)[:, None] * COLUMNS + o_x[None, :]
        b_y = tl.exp(-tl.abs(b_f))
        b_df = tl.load(p_dg + place, mask=inside, other=0.0) * tl.where(b_f >= 0.0, b_y, 1.0) / ((1.0 + b_y) * damping)
        tl.store(p_df + place, b_df.to(p_df.dtype.element_ty), mask=inside)
        b_ds += tl.sum(b_df * b_sign, 0)
    if CLOCK:
        tl.store(p_ds + tl.program_id(0) * COLUMNS + o_x, b_ds, mask=o_x < COLUMNS)


# ---------------------------------------------------------------- host side


class Call(NamedTuple):
    """The inputs of the operator."""

    f: Tensor
    damping: float
    strength: Tensor | None
    place: Tensor | None


def _made(x: Call) -> tuple[Call, tuple[int, int, int], dict[str, Any]]:
    """The inputs made dense, and what both kernels take last: (rows, M, C), and constants."""
    (B, T, E, M), clock = x.f.shape, x.strength is not None
    dense = (None if y is None else y.contiguous() for y in (x.strength, x.place))
    constants = {"COLUMNS": E * M, "CLOCK": clock, "BR": TILE, "BX": min(128, 1 << (E * M - 1).bit_length())}
    sizes = B * T, M, x.strength.shape[1] if x.strength is not None else 0
    return Call(x.f.contiguous(), x.damping, *dense), sizes, constants


def _forward(x: Call, g: Tensor) -> None:
    (f, damping, strength, place), sizes, constants = _made(x)
    grid = -(-sizes[0] // ROWS), -(-constants["COLUMNS"] // constants["BX"])
    launch(forward_kernel, grid, f, strength, place, g, damping, *sizes, num_warps=4, **constants)


def _backward(x: Call, dg: Tensor) -> tuple[Tensor, Tensor]:
    """df, and the gradient of the strength."""
    (f, damping, strength, place), sizes, constants = _made(x)
    grid = -(-sizes[0] // ROWS_BACK), -(-constants["COLUMNS"] // constants["BX"])
    df, ds = scratch(f, *f.shape, dtype=f.dtype), scratch(f, grid[0], *f.shape[2:])
    launch(backward_kernel, grid, dg.contiguous(), f, strength, place, df, ds, damping, *sizes, num_warps=4,
           ROWS=ROWS_BACK, **constants)  # fmt: skip
    return df, ds if strength is None else ds.sum(0)[:, : sizes[2]]


NAMESPACE = own_namespace(__name__, "gates")
gates_op = operator(
    NAMESPACE, "gates", Call, lambda x: [scratch(x.f, *x.f.shape)], _forward, "g",
    backward=_backward, leaves="f strength",
)  # fmt: skip
