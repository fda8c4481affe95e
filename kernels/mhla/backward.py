"""Causal MHLA on the GPU, backward. With the normaliser g, the gradients that arrive at numerator and normaliser are

    W_t = do_t r_t        r_t = 1 / g_t        u_t = dg_t - do_t.o_t r_t

and v' = [v, 1], w' = [W, u]; D_i = sum_{t in i} q_t w'_t^T, R_j = sum_{i>j} m_ij D_i. With A = tril(Q K^T) and
dA = tril(w' v'^T) inside a block:

    dq = w' P^T + m_ii dA K        dk = v' R^T + m_ii dA^T Q        dv = K R + m_ii A^T W
    dm_ij = <D_i, S_j>             dm_ii = <A, dA> = sum_t q_t.(dA K)_t

    output   r and u, with the kernel of the forward pass: o as it was rounded would spoil dm
    summary  D, likewise, which mix then turns into R
    query    dq, and dm_ii
    key      dk
    value    dv
    pairs    dm_ij for pairs of groups of blocks
    weights  sums of them by row and distance
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .forward import (
    block_numbers, load_summary, load_tile, locate, operands, own_weight, store_tile, tile_tokens, times,
)  # fmt: skip
from ..gpu.triton_helpers import dot_given, dot_given_left, dot_given_right, jit, parts, tl


@jit
def load_weights(p_r, p_u, head, o_t, m_t, s_t, NORM: tl.constexpr):
    """r and u of tokens of a head; without the normaliser 1 and 0."""
    if NORM:
        b_r = tl.load(p_r + head + o_t * s_t, mask=m_t, other=0.0)
        b_u = tl.load(p_u + head + o_t * s_t, mask=m_t, other=0.0)
    else:
        b_r = m_t.to(tl.float32)
        b_u = b_r * 0.0
    return b_r, b_u


@jit
def query_kernel(p_q, p_k, p_v, p_do, p_r, p_u, p_w, p_table, p_number, p_P, p_dq, p_own, s_qb, s_qt, s_qh, s_kb, s_kt,
                 s_kh, s_vb, s_vt, s_vh, T: int, N: int, L, B, H, E, X, M: tl.constexpr, F: tl.constexpr,
                 DV: tl.constexpr, CT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, TABLE: tl.constexpr,
                 NORM: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dq [B,T,H,F], and dm_ii of each tile [R*H,N * tiles,F blocks]. Grid (N * tiles of a block, R*H, blocks of BF)."""
    i_n, i_j, _, i_r, i_h = locate(L, H, CT)
    i_e, o_c, o_v, o_f = i_h // (H // E), tl.arange(0, CT), tl.arange(0, BV), tl.program_id(2) * BF + tl.arange(0, BF)
    row = i_r.to(tl.int64) * (0 if TABLE else 1)
    o_t, m_t = tile_tokens(p_table, i_r, i_n, i_j * CT + o_c, T, N, L, B, TABLE)
    head = row * T * H + i_h
    b_r, b_u = load_weights(p_r, p_u, head, o_t, m_t, H, NORM)
    b_do = load_tile(p_do + head * DV, o_t, m_t, o_v, H * DV, DV)
    # [CT, BF]
    b_dq = tl.zeros([CT, BF], tl.float32)
    p_k += row * s_kb + i_e * s_kh
    p_v += row * s_vb + i_e * s_vh
    for j in range(i_j + 1):
        o_s, m_s = tile_tokens(p_table, i_r, i_n, j * CT + o_c, T, N, L, B, TABLE)
        b_v = load_tile(p_v, o_s, m_s, o_v, s_vt, DV)
        b_A = dot_given(b_do, tl.trans(b_v), PREC) * b_r[:, None] + b_u[:, None]
        b_A = tl.where((i_j * CT + o_c)[:, None] >= (j * CT + o_c)[None, :], b_A, 0.0)
        b_k = load_tile(p_k, o_s, m_s, o_f, s_kt, F)
        b_A, b_A_low = parts(b_A, b_k.dtype == tl.bfloat16)
        b_dq += dot_given_right(b_A, b_A_low, b_k, PREC)
    b_q = load_tile(p_q + row * s_qb + i_h * s_qh, o_t, m_t, o_f, s_qt, F)
    i_own = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(p_own + i_own, tl.sum(tl.sum(b_q.to(tl.float32) * b_dq, 1), 0))
    b_dq *= own_weight(p_w, p_number, i_r, i_n, i_e, N, M, TABLE)
    p_P += ((i_r * E + i_e).to(tl.int64) * N + i_n) * X
    b_P, b_P_low = parts(load_summary(p_P, o_f, o_v, F, DV), b_do.dtype == tl.bfloat16)
    b_dq += dot_given_left(b_do, tl.trans(b_P), tl.trans(b_P_low), PREC) * b_r[:, None]
    if NORM:
        b_dq += b_u[:, None] * tl.load(p_P + F * DV + o_f, mask=o_f < F, other=0.0)[None, :]
    store_tile(p_dq + head * F, b_dq, o_t, m_t, o_f, H * F, F)


@jit
def key_kernel(p_q, p_k, p_v, p_do, p_r, p_u, p_w, p_table, p_number, p_R, p_dk, s_qb, s_qt, s_qh, s_vb, s_vt, s_vh,
               T: int, N: int, L, B, H, E, X, M: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, CT: tl.constexpr,
               BF: tl.constexpr, BV: tl.constexpr, TABLE: tl.constexpr, NORM: tl.constexpr,
               PREC: tl.constexpr):  # fmt: skip
    """dk [B,T,E,F]. Grid (N * tiles of a block, R*E, blocks of BF)."""
    i_n, i_j, tiles, i_r, i_e = locate(L, E, CT)
    o_c, o_v, o_f = tl.arange(0, CT), tl.arange(0, BV), tl.program_id(2) * BF + tl.arange(0, BF)
    row = i_r.to(tl.int64) * (0 if TABLE else 1)
    o_t, m_t = tile_tokens(p_table, i_r, i_n, i_j * CT + o_c, T, N, L, B, TABLE)
    b_v = load_tile(p_v + row * s_vb + i_e * s_vh, o_t, m_t, o_v, s_vt, DV)
    # [CT, BF]
    b_dk = tl.zeros([CT, BF], tl.float32)
    for i_h in range(i_e * (H // E), (i_e + 1) * (H // E)):
        head = row * T * H + i_h
        for j in range(i_j, tiles):
            o_s, m_s = tile_tokens(p_table, i_r, i_n, j * CT + o_c, T, N, L, B, TABLE)
            b_r, b_u = load_weights(p_r, p_u, head, o_s, m_s, H, NORM)
            b_do = load_tile(p_do + head * DV, o_s, m_s, o_v, H * DV, DV)
            b_A = dot_given(b_v, tl.trans(b_do), PREC) * b_r[None, :] + b_u[None, :]
            b_A = tl.where((i_j * CT + o_c)[:, None] <= (j * CT + o_c)[None, :], b_A, 0.0)
            b_q = load_tile(p_q + row * s_qb + i_h * s_qh, o_s, m_s, o_f, s_qt, F)
            b_A, b_A_low = parts(b_A, b_q.dtype == tl.bfloat16)
            b_dk += dot_given_right(b_A, b_A_low, b_q, PREC)
    b_dk *= own_weight(p_w, p_number, i_r, i_n, i_e, N, M, TABLE)
    p_R += ((i_r * E + i_e).to(tl.int64) * N + i_n) * X
    b_R, b_R_low = parts(load_summary(p_R, o_f, o_v, F, DV), b_v.dtype == tl.bfloat16)
    b_dk += dot_given_left(b_v, tl.trans(b_R), tl.trans(b_R_low), PREC)
    if NORM:
        b_dk += tl.load(p_R + F * DV + o_f, mask=o_f < F, other=0.0)[None, :]
    store_tile(p_dk + (row * T * E + i_e) * F, b_dk, o_t, m_t, o_f, E * F, F)


@jit
def value_kernel(p_q, p_k, p_v, p_do, p_r, p_u, p_w, p_table, p_number, p_R, p_dv, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh,
                 T: int, N: int, L, B, H, E, X, M: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, CT: tl.constexpr,
                 BF: tl.constexpr, BV: tl.constexpr, TABLE: tl.constexpr, NORM: tl.constexpr,
                 PREC: tl.constexpr):  # fmt: skip
    """dv [B,T,E,Dv]. Grid (N * tiles of a block, R*E)."""
    i_n, i_j, tiles, i_r, i_e = locate(L, E, CT)
    o_c, o_v = tl.arange(0, CT), tl.arange(0, BV)
    row = i_r.to(tl.int64) * (0 if TABLE else 1)
    o_t, m_t = tile_tokens(p_table, i_r, i_n, i_j * CT + o_c, T, N, L, B, TABLE)
    p_k += row * s_kb + i_e * s_kh
    # [CT, BV]
    b_dv = tl.zeros([CT, BV], tl.float32)
    for i_h in range(i_e * (H // E), (i_e + 1) * (H // E)):
        head = row * T * H + i_h
        for j in range(i_j, tiles):
            o_s, m_s = tile_tokens(p_table, i_r, i_n, j * CT + o_c, T, N, L, B, TABLE)
            b_A = tl.zeros([CT, CT], tl.float32)
            for i_f in range(0, F, BF):
                o_f = i_f + tl.arange(0, BF)
                b_q = load_tile(p_q + row * s_qb + i_h * s_qh, o_s, m_s, o_f, s_qt, F)
                b_A += dot_given(load_tile(p_k, o_t, m_t, o_f, s_kt, F), tl.trans(b_q), PREC)
            b_r, _ = load_weights(p_r, p_u, head, o_s, m_s, H, NORM)
            b_A = tl.where((i_j * CT + o_c)[:, None] <= (j * CT + o_c)[None, :], b_A * b_r[None, :], 0.0)
            b_do = load_tile(p_do + head * DV, o_s, m_s, o_v, H * DV, DV)
            b_A, b_A_low = parts(b_A, b_do.dtype == tl.bfloat16)
            b_dv += dot_given_right(b_A, b_A_low, b_do, PREC)
    b_dv *= own_weight(p_w, p_number, i_r, i_n, i_e, N, M, TABLE)
    p_R += ((i_r * E + i_e).to(tl.int64) * N + i_n) * X
    for i_f in range(0, F, BF):
        o_f = i_f + tl.arange(0, BF)
        b_k = load_tile(p_k, o_t, m_t, o_f, s_kt, F)
        b_R, b_R_low = parts(load_summary(p_R, o_f, o_v, F, DV), b_k.dtype == tl.bfloat16)
        b_dv += dot_given_left(b_k, b_R, b_R_low, PREC)
    store_tile(p_dv + (row * T * E + i_e) * DV, b_dv, o_t, m_t, o_v, E * DV, DV)


@jit
def pairs_kernel(p_D, p_S, p_far, p_pairs, p_old, N: int, X, XS, count, Q: tl.constexpr, BX: tl.constexpr,
                 CAUSAL: tl.constexpr, KEEP: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """<D_i, S_j> for pairs of groups, over XS of the X numbers: [X/XS,rows,pairs,Q,Q]. Grid (rows * pairs, X/XS).

    CAUSAL: each group with itself and with the one before, and <D_i, older> [X/XS,rows,groups,Q]; else all with all.
    """
    i_row, i_c, groups = tl.program_id(0) // count, tl.program_id(0) % count, tl.cdiv(N, Q)
    if CAUSAL:
        i_s, i_p = i_c // 2, i_c // 2 - i_c % 2
    else:
        i_s, i_p = i_c // groups, i_c % groups
    if i_p < 0:
        return
    base, cell = i_row.to(tl.int64) * N * X, tl.program_id(1) * (tl.num_programs(0) // count) + i_row
    o_i, o_j = i_s * Q + tl.arange(0, Q), i_p * Q + tl.arange(0, Q)
    b_pairs = tl.zeros([Q, Q], tl.float32)
    b_old = tl.zeros([Q], tl.float32)
    stop = tl.minimum(X, (tl.program_id(1) + 1) * XS)
    for i_x in range(tl.program_id(1) * XS, stop, BX):
        o_x = i_x + tl.arange(0, BX)
        m_x = (o_x < stop)[None, :]
        b_D = tl.load(
            p_D + base + o_i.to(tl.int64)[:, None] * X + o_x[None, :], mask=(o_i < N)[:, None] & m_x, other=0.0
        )
        b_S = tl.load(
            p_S + base + o_j.to(tl.int64)[:, None] * X + o_x[None, :], mask=(o_j < N)[:, None] & m_x, other=0.0
        )
        b_high, b_low = operands(b_D, PREC)
        b_S, b_S_low = operands(b_S, PREC)
        b_pairs = times(b_high, b_low, tl.trans(b_S), tl.trans(b_S_low), b_pairs, PREC)
        if KEEP:
            p_row = p_far + (i_row.to(tl.int64) * groups + i_s) * X
            b_old += tl.sum(b_D * tl.load(p_row + o_x, mask=o_x < stop, other=0.0)[None, :], 1)
    p_pairs += (cell.to(tl.int64) * count + i_c) * Q * Q
    tl.store(p_pairs + tl.arange(0, Q)[:, None] * Q + tl.arange(0, Q)[None, :], b_pairs)
    if CAUSAL:
        o_old = (cell * groups + i_s) * Q + tl.arange(0, Q)
        tl.store(p_old + o_old, b_old, mask=o_i // Q == i_p)


@jit
def weights_kernel(p_pairs, p_old, p_own, p_number, p_document, p_dw, R, N: int, E, M: tl.constexpr, Q: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, TABLE: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    """dw [E,M,M] by row and distance, from `pairs_kernel` and dm_ii [R,E,N]. Grid (M, E)."""
    i_row, i_e, groups = tl.program_id(0), tl.program_id(1), tl.cdiv(N, Q)
    o_d, o_c = tl.arange(0, BM), tl.arange(0, Q)
    start, stop = i_row, tl.minimum(N, i_row + 1)
    if i_row == M - 1:
        stop = N
    if TABLE:
        start = start * 0
        stop = N
    # [BM]
    b_dw = tl.zeros([BM], tl.float32)
    for i_r in range(R):
        for i_n in range(start, stop, BN):
            o_n = i_n + tl.arange(0, BN)
            b_i, b_d = block_numbers(p_number, p_document, i_r, o_n, N, TABLE)
            m_n = (o_n < stop) & (b_d >= 0) & (tl.minimum(b_i, M - 1) == i_row)
            cell, o_q = (i_r * E + i_e) * groups + o_n // Q, (o_n % Q)[:, None]
            p_row = p_pairs + cell.to(tl.int64)[:, None] * (2 * Q * Q) + o_q * Q
            # The blocks at each distance, which are in the own group or in the one before.
            m_d = m_n[:, None] & (o_d >= 1)[None, :] & (o_d < M - 1)[None, :] & (o_d[None, :] <= b_i[:, None])
            o_j = o_q - o_d[None, :]
            b_x = tl.load(p_row + o_j, mask=m_d & (o_j >= 0), other=0.0)
            b_x += tl.load(p_row + Q * Q + Q + o_j, mask=m_d & (o_j < 0) & (o_j >= -Q), other=0.0)
            b_dw += tl.sum(b_x, 0)
            # Those too far to have a weight of their own.
            o_j = o_q - o_c[None, :]
            m_far = m_n[:, None] & (o_j >= M - 1) & (o_j <= b_i[:, None])
            b_far = tl.sum(tl.load(p_row + o_c[None, :], mask=m_far, other=0.0), 1)
            m_far = m_n[:, None] & (o_j + Q >= M - 1) & (o_j + Q <= b_i[:, None])
            b_far += tl.sum(tl.load(p_row + Q * Q + o_c[None, :], mask=m_far, other=0.0), 1)
            if KEEP:
                b_far += tl.load(p_old + cell * Q + o_n % Q, mask=m_n & (b_i > o_n % Q + Q), other=0.0)
            b_own = tl.load(p_own + (i_r * E + i_e) * N + o_n, mask=m_n, other=0.0)
            b_dw += tl.where(o_d == M - 1, tl.sum(b_far, 0), 0.0) + tl.where(o_d == 0, tl.sum(b_own, 0), 0.0)
    tl.store(p_dw + (i_e * M + i_row) * M + o_d, b_dw, mask=o_d < M)
