"""Feature maps of queries or keys with learned weights, in one kernel each way: with z = s W y

    relu       phi(y) = c relu(z + b)                  c = (2/D)^1/2
    hedgehog   phi(y) = c [softmax(z), softmax(-z)]    c = (D/2)^1/2

In PyTorch these are six and twelve passes in fp32 over [B,T,H,D], or [B,T,H,2D], and a product in fp32. The backward
pass, P and N the softmaxes of z and -z, dP and dN the gradients of what they are multiplied with c to:

    relu       dz = c dphi where z + b > 0             db = sum dz
    hedgehog   dz = c P (dP - sum P dP) - c N (dN - sum N dN)
    both       dy = s W^T dz        dW = s sum dz y^T

Letters: B batch, T time, H heads of queries or keys, D head dim, F features (D or 2D), R rows of a tile; N = B*T rows
of each head.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import dense, launch, scratch, unavailable, width
from ..gpu.operators import operator, own_namespace
from ..gpu.target import obstacle_of, target
from ..gpu.triton_helpers import (
    dot, dot_given, dot_given_left, dot_given_right, jit, load_rows, parts, store_rows, tl, triton,
)

# Rows of a tile, tiles of a program forward, and programs backward, each of which holds a gradient of the weights.
TILE, TILES, PROGRAMS = 64, 4, 264
LARGEST = 128


def learned_map(y: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor | None:
    """phi(y) [B,T,H,F] in y's dtype from the kernels, y [B,T,H,D], W [H,D,D] and b [H,D], which hedgehog has not; None
    where they do not take these."""
    return map_op(y, weight, bias, scale) if fits(y, weight) else None


def fits(y: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take y [B,T,H,D] and weights [H,D,D]; of other dtypes they would multiply what differs."""
    known = weight.dtype in (y.dtype, torch.float32)
    if unavailable(y.device, y.dtype) or not known or y.numel() == 0 or not 16 <= y.shape[-1] <= LARGEST:
        return False
    return not _obstacle(y.device, y.dtype, weight.dtype, y.shape[-1])


def _check(device: torch.device, dtype: torch.dtype, weights: torch.dtype, D: int) -> None:
    """Raise ValueError where the kernels do not fit a GPU."""
    gpu = target(device)
    if gpu is not None and (need := shared_bytes(gpu.capability[0], dtype, weights, D)) > gpu.shared:
        what = f"a learned feature map in {dtype} with head dim {D}"
        raise ValueError(f"{what} needs {need} of {gpu.shared} bytes of shared memory")


_obstacle = obstacle_of(_check)


def shared_bytes(major: int, dtype: torch.dtype, weights: torch.dtype, D: int) -> int:
    """Bound on the shared memory of both kernels, from the compiler's reports for 8.0, 8.9 and 9.0: the weights and
    their transposes, in two parts where they are more exact than y, and rows."""
    BD = width(D)
    if dtype != torch.bfloat16:
        return 4 * (4 * BD * BD + 2 * TILE * BD)
    copies = 4 if weights != dtype else 2
    # What wgmma of 9.0 and later multiplies, it reads there.
    return 2 * (copies * BD * BD + (4 if major >= 9 else 2) * TILE * BD)


# ---------------------------------------------------------------- kernels


@jit
def logits(b_y, b_w, b_wl, scale, SPLIT: tl.constexpr, PREC: tl.constexpr):
    """s W y of a tile [R,BD] fp32; W comes as [D,E]."""
    if SPLIT:
        b_z = scale * dot_given_left(b_y, b_w, b_wl, PREC)
    else:
        b_z = scale * dot_given(b_y, b_w, PREC)
    return b_z


@jit
def softmaxes(b_z, o_d, D: tl.constexpr):
    """Of z and -z, 0 past the last channel, [R,BD] fp32."""
    inside = (o_d < D)[None, :]
    b_p = tl.exp(b_z - tl.max(tl.where(inside, b_z, -float("inf")), 1)[:, None])
    b_n = tl.exp(tl.min(tl.where(inside, b_z, float("inf")), 1)[:, None] - b_z)
    b_p, b_n = tl.where(inside, b_p, 0.0), tl.where(inside, b_n, 0.0)
    return b_p / tl.sum(b_p, 1)[:, None], b_n / tl.sum(b_n, 1)[:, None]


@jit
def load_bias(p_b, i_h, o_d, D: tl.constexpr):
    """b of one head [BD] fp32."""
    return tl.load(p_b + i_h * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)


@jit
def load_heads(p_y, i_r, i_h, o_r, o_d, size, T, s_b, s_t, s_h, D: tl.constexpr):
    """R rows of one head of y, [R,BD], zeros outside."""
    o_n = i_r + o_r
    o_y = o_n // T * s_b + o_n % T * s_t + i_h.to(tl.int64) * s_h
    return tl.load(p_y + o_y[:, None] + o_d[None, :], mask=(o_r < size)[:, None] & (o_d < D)[None, :], other=0.0)


@jit
def forward_kernel(p_y, p_w, p_b, p_f, scale, c, N: int, T: int, H, s_b, s_t, s_h, D: tl.constexpr, F: tl.constexpr,
                   SPLIT: tl.constexpr, PREC: tl.constexpr, BD: tl.constexpr, R: tl.constexpr,
                   TILES: tl.constexpr):  # fmt: skip
    """Grid (rows / (R * TILES), heads)."""
    i_h, o_r, o_d = tl.program_id(1), tl.arange(0, R), tl.arange(0, BD)
    m_w = (o_d < D)[:, None] & (o_d < D)[None, :]
    b_w, b_wl = parts(tl.load(p_w + i_h * D * D + o_d[None, :] * D + o_d[:, None], mask=m_w, other=0.0), SPLIT)
    for tile in range(TILES):
        i_r = (tl.program_id(0) * TILES + tile).to(tl.int64) * R
        size = tl.minimum(tl.maximum(N - i_r, 0), R).to(tl.int32)
        b_y = load_heads(p_y, i_r, i_h, o_r, o_d, size, T, s_b, s_t, s_h, D)
        b_z = logits(b_y, b_w, b_wl, scale, SPLIT, PREC)
        p_to = p_f + (i_r * H + i_h) * F
        if p_b is not None:
            b_z = tl.maximum(b_z + load_bias(p_b, i_h, o_d, D)[None, :], 0.0)
            store_rows(p_to, c * b_z, o_r, o_d, H * F, size, D)
        else:
            b_p, b_n = softmaxes(b_z, o_d, D)
            store_rows(p_to, c * b_p, o_r, o_d, H * F, size, D)
            store_rows(p_to + D, c * b_n, o_r, o_d, H * F, size, D)


@jit
def backward_kernel(p_df, p_y, p_w, p_b, p_dy, p_dw, p_db, scale, c, N: int, T: int, H, s_b, s_t, s_h, tiles,
                    D: tl.constexpr, F: tl.constexpr, SPLIT: tl.constexpr, HALVES: tl.constexpr, PREC: tl.constexpr,
                    BD: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """dy, and of `tiles` tiles dW, with its columns first, and db. Grid (programs, heads)."""
    i_p, i_h, o_r, o_d = tl.program_id(0), tl.program_id(1), tl.arange(0, R), tl.arange(0, BD)
    m_w = (o_d < D)[:, None] & (o_d < D)[None, :]
    b_w, b_wl = parts(tl.load(p_w + i_h * D * D + o_d[None, :] * D + o_d[:, None], mask=m_w, other=0.0), SPLIT)
    b_u, b_ul = parts(tl.load(p_w + i_h * D * D + o_d[:, None] * D + o_d[None, :], mask=m_w, other=0.0), SPLIT)
    b_dw, b_db = tl.zeros([BD, BD], tl.float32), tl.zeros([BD], tl.float32)
    for tile in range(tiles):
        i_r = (i_p * tiles + tile).to(tl.int64) * R
        size = tl.minimum(tl.maximum(N - i_r, 0), R).to(tl.int32)
        b_y = load_heads(p_y, i_r, i_h, o_r, o_d, size, T, s_b, s_t, s_h, D)
        b_z = logits(b_y, b_w, b_wl, scale, SPLIT, PREC)
        p_from = p_df + (i_r * H + i_h) * F
        if p_b is not None:
            b_df = load_rows(p_from, o_r, o_d, H * F, size, D).to(tl.float32)
            b_dz = c * tl.where(b_z + load_bias(p_b, i_h, o_d, D)[None, :] > 0.0, b_df, 0.0)
            b_db += tl.sum(b_dz, 0)
        else:
            b_p, b_n = softmaxes(b_z, o_d, D)
            b_dp = load_rows(p_from, o_r, o_d, H * F, size, D).to(tl.float32)
            b_dn = load_rows(p_from + D, o_r, o_d, H * F, size, D).to(tl.float32)
            b_dz = b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None]) - b_n * (b_dn - tl.sum(b_n * b_dn, 1)[:, None])
            b_dz *= c
        b_dz, b_dzl = parts(scale * b_dz, HALVES)
        if SPLIT:
            b_dy = dot(b_dz, b_dzl, b_u, b_ul, PREC)
        else:
            b_dy = dot_given_right(b_dz, b_dzl, b_u, PREC)
        store_rows(p_dy + (i_r * H + i_h) * D, b_dy, o_r, o_d, H * D, size, D)
        b_dw = dot_given_left(tl.trans(b_y), b_dz, b_dzl, PREC, b_dw)
    tl.store(p_dw + (i_p * H + i_h) * D * D + o_d[:, None] * D + o_d[None, :], b_dw, mask=m_w)
    if p_b is not None:
        tl.store(p_db + (i_p * H + i_h) * D + o_d, b_db, mask=o_d < D)


# ---------------------------------------------------------------- host side


class Call(NamedTuple):
    """The inputs of the operator: y [B,T,H,D], W [H,D,D], for relu b [H,D], and s."""

    y: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float


def _constants(x: Call) -> dict[str, Any]:
    """The constants of both kernels."""
    D, half = x.y.shape[-1], x.y.dtype == torch.bfloat16
    constants = {"D": D, "F": _size(x), "BD": triton.next_power_of_2(D), "R": TILE, "HALVES": half, "PREC": "tf32x3"}
    return {**constants, "SPLIT": half and x.weight.dtype != x.y.dtype}


def _size(x: Call) -> int:
    """F."""
    return x.y.shape[-1] * (2 if x.bias is None else 1)


def _inputs(x: Call) -> tuple[list[Tensor | None], tuple[int, ...]]:
    """y, which may be a view, W and b; then N, T, H and the steps of y."""
    y, (B, T, H, _) = dense(x.y), x.y.shape
    tensors = [y, x.weight.contiguous(), None if x.bias is None else x.bias.contiguous()]
    return tensors, (B * T, T, H, *y.stride()[:3])


def _factor(x: Call) -> float:
    """c."""
    D = x.y.shape[-1]
    return float((D / 2.0) ** (0.5 if x.bias is None else -0.5))


def _features(x: Call) -> list[Tensor]:
    """Room for phi(y) [B,T,H,F]."""
    return [scratch(x.y, *x.y.shape[:3], _size(x), dtype=x.y.dtype)]


def _forward(x: Call, features: Tensor) -> None:
    tensors, sizes = _inputs(x)
    grid = triton.cdiv(sizes[0], TILE * TILES), sizes[2]
    launch(forward_kernel, grid, *tensors, features, x.scale, _factor(x), *sizes, num_warps=4, TILES=TILES,
           **_constants(x))  # fmt: skip


def _backward(x: Call, df: Tensor) -> tuple[Tensor, ...]:
    """dy, dW and db."""
    tensors, sizes = _inputs(x)
    rows, H, D = sizes[0], sizes[2], x.y.shape[-1]
    tiles = triton.cdiv(triton.cdiv(rows, TILE), max(1, PROGRAMS // H))
    grid = triton.cdiv(rows, TILE * tiles), H
    dy, dw = scratch(x.y, *x.y.shape, dtype=x.y.dtype), scratch(x.y, grid[0], H, D, D)
    db = scratch(x.y, grid[0], H, D if x.bias is not None else 0)
    launch(backward_kernel, grid, df.contiguous(), *tensors, dy, dw, db, x.scale, _factor(x), *sizes, tiles,
           num_warps=4, **_constants(x))  # fmt: skip
    return dy, dw.mT.sum(0), db.sum(0)


NAMESPACE = own_namespace(__name__, "learned_map")
# phi(y) [B,T,H,F] in y's dtype.
map_op = operator(
    NAMESPACE, "learned_map", Call, _features, _forward, "features", backward=_backward, leaves="y weight bias"
)  # fmt: skip
