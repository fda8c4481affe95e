"""One token's exact softmax over keys and values in buffers, of which a number on the device says how much is filled.

    o = sum_{i <= n} softmax_i(c q.k_i) v_i        over the real tokens i < n of a row, and the token n itself

A recorded decode step (hf/cuda_graphs.py) launches the same programs for every token, so how many keys there are must
be read where the programs run. The keys are cut into pieces, each with a program for every KV head, so that one row
fills a GPU; a second launch joins the pieces.

Letters: B rows, H query heads, E KV heads, G = H/E, D key dim, DV value dim, N places of a buffer, P pieces, BN places
of a tile.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import dense, interpreted, launch, scratch, width
from ..gpu.operators import operator, own_namespace
from ..gpu.target import refusal, target
from ..gpu.triton_helpers import dot_given, jit, load_rows, store_rows, tl

# exp is taken as a power of two; a score that no real one reaches, and with which sums stay numbers.
LOG2E, LOWEST = 1.4426950408889634, -1e30
# The widest head, and bytes of a tile of keys: two of them and as many values fit every GPU since 2020.
WIDEST, TILE = 256, 16384
# Pieces of a row at most, and programs for each multiprocessor that the pieces of all rows make.
MOST, PROGRAMS = 64, 2


@jit
def pieces_kernel(p_q, p_k, p_v, p_real, p_count, p_part, p_top, p_sum, scale, s_qb, s_qh, s_kb, s_kh, s_kn, s_vb, s_vh,
                  s_vn, s_real, H, E, D: tl.constexpr, DV: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
                  BV: tl.constexpr, BN: tl.constexpr, PC: tl.constexpr, LOG2E: tl.constexpr, LOWEST: tl.constexpr,
                  PREC: tl.constexpr):  # fmt: skip
    """Of each piece: its sum of values [B,H,PC,DV], the largest score and the sum of weights [B,H,PC]. Grid (PC, E, B)."""
    i_p, i_e, i_b, G = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64), H // E
    o_g, o_d, o_v = tl.arange(0, BG), tl.arange(0, BD), tl.arange(0, BV)
    n = tl.load(p_count).to(tl.int32)
    per = tl.cdiv(tl.cdiv(n + 1, BN), PC) * BN
    last = tl.minimum(n + 1, (i_p + 1) * per)
    b_q = load_rows(p_q + i_b * s_qb + i_e * G * s_qh, o_g, o_d, s_qh, G, D)
    p_keys, p_values = p_k + i_b * s_kb + i_e * s_kh, p_v + i_b * s_vb + i_e * s_vh
    b_top, b_sum = tl.zeros([BG], tl.float32) + LOWEST, tl.zeros([BG], tl.float32)
    b_o = tl.zeros([BG, BV], tl.float32)
    for i_n in range(i_p * per, last, BN):
        o_n = tl.arange(0, BN)
        b_k = load_rows(p_keys + i_n * s_kn, o_n, o_d, s_kn, last - i_n, D)
        b_v = load_rows(p_values + i_n * s_vn, o_n, o_v, s_vn, last - i_n, DV)
        b_real = tl.load(p_real + i_b * s_real + i_n + o_n, mask=i_n + o_n < n, other=0)
        seen = (b_real != 0) | (i_n + o_n == n)
        b_s = tl.where(seen[None, :], dot_given(b_q, tl.trans(b_k), PREC) * (scale * LOG2E), -float("inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 1))
        b_p, b_keep = tl.exp2(b_s - b_new[:, None]), tl.exp2(b_top - b_new)
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_o = dot_given(b_p.to(b_v.dtype), b_v, PREC, b_o * b_keep[:, None])
        b_top = b_new
    head = (i_b * H + i_e * G) * PC + i_p
    tl.store(p_top + head + o_g * PC, b_top, mask=o_g < G)
    tl.store(p_sum + head + o_g * PC, b_sum, mask=o_g < G)
    store_rows(p_part + head * DV, b_o, o_g, o_v, PC * DV, G, DV)


@jit
def join_kernel(p_part, p_top, p_sum, p_o, DV: tl.constexpr, BV: tl.constexpr, PC: tl.constexpr):
    """o [B,1,H,DV] of the pieces; an empty one has weight 0. Grid (B H)."""
    i_h, o_p, o_v = tl.program_id(0).to(tl.int64), tl.arange(0, PC), tl.arange(0, BV)
    b_top, b_sum = tl.load(p_top + i_h * PC + o_p), tl.load(p_sum + i_h * PC + o_p)
    b_w = tl.exp2(b_top - tl.max(b_top, 0))
    b_part = tl.load(p_part + i_h * PC * DV + o_p[:, None] * DV + o_v[None, :], mask=(o_v < DV)[None, :], other=0.0)
    b_o = tl.sum(b_part * b_w[:, None], 0) / tl.sum(b_sum * b_w, 0)
    tl.store(p_o + i_h * DV + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < DV)


class StepCall(NamedTuple):
    """The inputs of the operator: q [B,H,1,D], keys [B,E,N,D] and values [B,E,N,Dv] with the token's own at place
    `filled` [1] int64, and which places before it hold real tokens, `real` [B,N] bool."""

    q: Tensor
    keys: Tensor
    values: Tensor
    real: Tensor
    filled: Tensor
    scale: float
    pieces: int


def results(x: StepCall) -> tuple[Tensor]:
    """Room for o [B,1,H,Dv]."""
    return (scratch(x.q, x.q.shape[0], 1, x.q.shape[1], x.values.shape[-1], dtype=x.values.dtype),)


def forward(x: StepCall, o: Tensor) -> None:
    """The pieces, and the launch that joins them."""
    (B, H, _, D), (_, E, _, DV), P = x.q.shape, x.values.shape, x.pieces
    q, keys, values = (dense(y) for y in x[:3])
    part, top, total = scratch(q, B, H, P, DV), scratch(q, B, H, P), scratch(q, B, H, P)
    wide, BG = max(width(D), width(DV)), width(H // E)
    # More queries beside wide tiles would go through Hopper's wgmma, which goes wrong (window/launch.py).
    most = 128 if BG < 64 else 32
    launch(
        pieces_kernel, (P, E, B), q, keys, values, x.real, x.filled, part, top, total, x.scale, q.stride(0), q.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        x.real.stride(0), H, E, num_warps=4, num_stages=2, D=D, DV=DV, BG=BG, BD=width(D), BV=width(DV),
        BN=max(16, min(most, TILE // (q.element_size() * wide))), PC=P, LOG2E=LOG2E, LOWEST=LOWEST,
        PREC="ieee" if interpreted() else "bf16x6" if q.dtype == torch.float32 else "bf16x3",
    )  # fmt: skip
    launch(join_kernel, (B * H,), part, top, total, o, num_warps=4, DV=DV, BV=width(DV), PC=P)


NAMESPACE = own_namespace(__name__, "softmax_step")
step_op = operator(NAMESPACE, "softmax_step", StepCall, results, forward, "o")


def obstacle(q: Tensor, values: Tensor) -> str:
    """Why the kernels cannot take q [B,H,1,D] and values [B,E,N,Dv]; empty when they can."""
    return refusal(q.transpose(1, 2), values.transpose(1, 2), WIDEST, 1)


@functools.lru_cache(None)
def pieces(device: torch.device, programs: int) -> int:
    """Into how many pieces rows are cut where each piece has so many programs: a power of two."""
    gpu = target(device)
    wanted = 2 if gpu is None else max(1, PROGRAMS * gpu.processors // programs)
    return min(MOST, 1 << (wanted.bit_length() - 1))


def softmax_step(q: Tensor, keys: Tensor, values: Tensor, real: Tensor, filled: Tensor, scale: float) -> Tensor:
    """Softmax of one token in each row, [B,1,H,Dv], by the kernels; the arguments are those of `StepCall`."""
    return step_op(q, keys, values, real, filled, scale, pieces(q.device, keys.shape[0] * keys.shape[1]))
