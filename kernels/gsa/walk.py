"""GSA on the GPU, forward in one launch: a program walks along one sequence with both memories of one query head.

The maths of sweep.py, in one launch in place of seven, so it runs where the host is what waits: for a server's prompts.
Gates' sums, logits and weights, which sweep.py hands over through memory, stay in registers, and so do both memories.
Sequences have to be short, since one program reads a whole one.

A step has C tokens, or as many as no slot decays by more than 2^-RANGE in. Letters as in sweep.py.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .sweep import FLOOR, given, load_tile, parts, store_tile, strength
from ..gpu.triton_helpers import dot_given, dot_given_right, jit, tl


@jit
def load_columns(p_g, o_m, o_c, s_g, rows):
    """Log-gates [M,C] of tokens o_c, 0 past `rows`."""
    b_g = tl.load(p_g + o_m[:, None] + o_c[None, :] * s_g, mask=(o_c < rows)[None, :], other=0.0)
    return tl.maximum(b_g.to(tl.float32), FLOOR)


@jit
def store_columns(p_x, b_x, o_d, o_c, s_x, rows):
    """b_x [D,C] of tokens o_c."""
    tl.store(p_x + o_d[:, None] + o_c[None, :] * s_x, b_x.to(p_x.dtype.element_ty), mask=(o_c < rows)[None, :])


@jit
def walk_kernel(p_q, p_k, p_v, p_g, p_cu, p_K0, p_V0, p_K1, p_V1, p_o, scale, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb,
                s_vt, s_vh, T: int, E, SHARE, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, RANGE: tl.constexpr,
                VARLEN: tl.constexpr, START: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """o [B,T,E,D], and the memories after each row or sequence. Grid (E, rows)."""
    i_e, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, at, end = i_r, T * 0, T
    if VARLEN:
        i_b, at, end = i_r * 0, tl.load(p_cu + i_r).to(tl.int32), tl.load(p_cu + i_r + 1).to(tl.int32)
    p_q += i_b * s_qb + i_e * s_qh
    p_k += i_b * s_kb + i_e // SHARE * s_kh
    p_v += i_b * s_vb + i_e // SHARE * s_vh
    o_c, o_m, o_d = tl.arange(0, C), tl.arange(0, M), tl.arange(0, D)
    m_seen = o_c[:, None] <= o_c[None, :]
    memory = (i_r * E + i_e) * (M * D)
    b_K, b_V = tl.zeros([M, D], tl.float32), tl.zeros([M, D], tl.float32)
    if START:
        b_K += load_tile(p_K0 + memory, o_m, o_d, D, M)
        b_V += load_tile(p_V0 + memory, o_m, o_d, D, M)
    while at < end:
        rows, token = tl.minimum(C, end - at), (i_b * T + at) * E + i_e
        b_g = load_columns(p_g + token * M, o_m, o_c, E * M, rows)
        if tl.min(tl.sum(b_g, 1), 0) * 1.4426950408889634 < -RANGE:
            b_lowest = tl.min(tl.cumsum(b_g, 1), 0) * 1.4426950408889634
            rows = tl.minimum(rows, tl.maximum(tl.sum((b_lowest >= -RANGE).to(tl.int32), 0), 1))
            b_g = tl.where((o_c < rows)[None, :], b_g, 0.0)
        b_mid = tl.sum(tl.where((o_c < C // 2)[None, :], b_g, 0.0), 1) * 1.4426950408889634
        b_last = tl.sum(tl.where((o_c < C // 2)[None, :], 0.0, b_g), 1) * 1.4426950408889634
        b_d = tl.cumsum(b_g, 1) * 1.4426950408889634 - b_mid[:, None]
        b_W = given(strength(b_g) * tl.exp2(-b_d), p_q)
        b_start, b_end = tl.exp2(b_mid)[:, None], tl.exp2(b_last)[:, None]
        b_q = load_tile(p_q + at * s_qt, o_c, o_d, s_qt, rows)
        b_k = load_tile(p_k + at * s_kt, o_c, o_d, s_kt, rows)
        b_v = load_tile(p_v + at * s_vt, o_c, o_d, s_vt, rows)
        b_K *= b_start
        b_high, b_low = parts(b_K, p_q.dtype.element_ty == tl.bfloat16)
        b_l = dot_given_right(b_high, b_low, tl.trans(b_q), PREC)
        b_A = given(tl.where(m_seen, dot_given(b_k, tl.trans(b_q), PREC), 0.0), p_q)
        b_l = dot_given(b_W, b_A, PREC, b_l)
        b_K = dot_given(b_W, b_k, PREC, b_K) * b_end
        b_Q = tl.exp2(b_d)
        b_l *= b_Q * scale
        b_l = tl.exp(b_l - tl.max(b_l, 0)[None, :])
        b_p = given(b_l / tl.sum(b_l, 0)[None, :] * b_Q, p_q)
        b_A = given(tl.where(m_seen, dot_given(tl.trans(b_W), b_p, PREC), 0.0), p_q)
        b_V *= b_start
        b_o = dot_given(tl.trans(given(b_V, p_q)), b_p, PREC)
        b_o = dot_given(tl.trans(b_v), b_A, PREC, b_o)
        store_columns(p_o + token * D, b_o, o_d, o_c, E * D, rows)
        b_V = dot_given(b_W, b_v, PREC, b_V) * b_end
        at += rows
    store_tile(p_K1 + memory, b_K, o_m, o_d, D, M)
    store_tile(p_V1 + memory, b_V, o_m, o_d, D, M)
