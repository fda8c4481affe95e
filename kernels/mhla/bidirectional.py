"""Bidirectional MHLA on the GPU: two passes over the tokens as in plain linear attention, and a small product between them.

    sum      per block of tokens: S_j = sum k v^T, and sum k
    product  P_i = sum_j m_ij S_j, with the normaliser's column
    read     o_t = q_t P_i / g_t, g_t = q_t . z_i

Backwards, with r = 1/g, y_t = P_i do_t and u_t = dg_t - r_t^2 q_t.y_t, which is what reaches the normaliser:

    back     dq_t = r_t y_t + u_t z_i, and D_i = sum q_t [r_t do_t, u_t]^T in the same pass
    turn     R_j = sum_i m_ij D_i, and dm_ij = <D_i, S_j>; with more than 32 blocks `product` and `pairs`
             (backward.py) instead
    give     dk_t = R_j v_t + (the column of u), dv_t = R_j^T k_t

Forward keeps S, P and g for the backward pass: it makes nothing again. Without one, S and P of bf16 inputs are bf16,
too. Where a table says so, a block has no tokens.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .forward import load_summary, load_tile, operands, store_tile, times
from ..gpu.triton_helpers import dot_given, dot_given_left, dot_given_right, jit, parts, tl


@jit
def place(heads, N, blocks):
    """Row, head, block of tokens and block of features of a program of the grid (R * heads * N * blocks)."""
    i_p = tl.program_id(0)
    i_row = i_p // (N * blocks)
    return i_row // heads, i_row % heads, i_p // blocks % N, i_p % blocks


@jit
def block_tokens(p_table, i_r, i_n, o_c, T, N, L, B):
    """Tokens at places o_c of a block, counted from the first of its row, and which exist."""
    o_t = tl.load(p_table + (i_r.to(tl.int64) * N + i_n) * L + o_c, mask=o_c < L, other=B * T)
    return o_t - i_r * T, (o_c < L) & (o_t < B * T)


@jit
def places_used(p_table, i_r, i_n, T, N, L, B):
    """L, or 0 where the block is empty: its tokens come first."""
    first = tl.load(p_table + (i_r.to(tl.int64) * N + i_n) * L)
    return tl.where(first < B * T, L, 0)


@jit
def load_column(p_S, o_f, F: tl.constexpr, DV: tl.constexpr, NORM: tl.constexpr):
    """The normaliser's column of a summary [BF], 0 without."""
    if NORM:
        b_z = tl.load(p_S + F * DV + o_f, mask=o_f < F, other=0.0).to(tl.float32)
    else:
        b_z = o_f.to(tl.float32) * 0.0
    return b_z


@jit
def times_summary(b_x, b_P, b_P_low, b_z, HALF: tl.constexpr, PREC: tl.constexpr):
    """x @ P + z in fp32; HALF: P is bf16 in memory, and nothing is left for its second part."""
    if HALF:
        b_z = tl.dot(b_x, b_P, b_z)
    else:
        b_z = dot_given_left(b_x, b_P, b_P_low, PREC, b_z)
    return b_z


@jit
def sum_kernel(p_k, p_v, p_table, p_S, s_kt, s_kh, s_vt, s_vh, T: int, N: int, L, B, E, X, F: tl.constexpr,
               DV: tl.constexpr, CT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr,
               PREC: tl.constexpr):  # fmt: skip
    """S_j = sum k v^T and sum k over the tokens of each block [R,E,N,X]. Grid (R*E * N * blocks of BF)."""
    i_r, i_e, i_n, i_f = place(E, N, tl.cdiv(F, BF))
    o_f, o_v, o_c = i_f * BF + tl.arange(0, BF), tl.arange(0, BV), tl.arange(0, CT)
    row = i_r.to(tl.int64) * T
    p_k += row * s_kt + i_e * s_kh
    p_v += row * s_vt + i_e * s_vh
    b_S, b_z = tl.zeros([BF, BV], tl.float32), tl.zeros([CT, BF], tl.float32)
    o_n, m_n = block_tokens(p_table, i_r, i_n, o_c, T, N, L, B)
    for i_c in range(0, places_used(p_table, i_r, i_n, T, N, L, B), CT):
        o_t, m_t = o_n, m_n
        o_n, m_n = block_tokens(p_table, i_r, i_n, i_c + CT + o_c, T, N, L, B)
        b_k, b_v = load_tile(p_k, o_t, m_t, o_f, s_kt, F), load_tile(p_v, o_t, m_t, o_v, s_vt, DV)
        b_S = dot_given(tl.trans(b_k), b_v, PREC, b_S)
        b_z += b_k.to(tl.float32)
    p_S += ((i_r * E + i_e).to(tl.int64) * N + i_n) * X
    kind: tl.constexpr = p_S.dtype.element_ty
    tl.store(p_S + o_f[:, None] * DV + o_v[None, :], b_S.to(kind), mask=(o_f < F)[:, None] & (o_v < DV)[None, :])
    if NORM:
        tl.store(p_S + F * DV + o_f, tl.sum(b_z, 0).to(kind), mask=o_f < F)


@jit
def product_kernel(p_S, p_m, p_P, K, N: int, E, X, BN: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr,
                   REVERSE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """P_i = sum_j m_ij S_j over the K blocks of each document; REVERSE: its transpose.

    Grid (R*E*documents * blocks of BN * blocks of BX), the last row first: its summaries are still in the L2 cache.
    """
    i_p, wide = tl.num_programs(0) - 1 - tl.program_id(0), tl.cdiv(X, BX)
    high = tl.cdiv(K, BN)
    i_row = i_p // (wide * high)
    i_e, o_i = i_row // (N // K) % E, i_p // wide % high * BN + tl.arange(0, BN)
    o_x, base = i_p % wide * BX + tl.arange(0, BX), i_row.to(tl.int64) * K * X
    b_P = tl.zeros([BN, BX], tl.float32)
    for i_j in range(0, K, BK):
        o_j = i_j + tl.arange(0, BK)
        m_S = (o_j < K)[:, None] & (o_x < X)[None, :]
        b_S = tl.load(p_S + base + (o_j[:, None] * X + o_x[None, :]), mask=m_S, other=0.0)
        m_m = (o_i < K)[:, None] & (o_j < K)[None, :]
        o_m = o_j[None, :] * K + o_i[:, None] if REVERSE else o_i[:, None] * K + o_j[None, :]
        b_m = tl.load(p_m + i_e * K * K + o_m, mask=m_m, other=0.0)
        if b_S.dtype == tl.bfloat16:
            b_m, b_m_low = parts(b_m, True)
            b_P = dot_given_right(b_m, b_m_low, b_S, PREC, b_P)
        else:
            b_m, b_m_low = operands(b_m, PREC)
            b_S, b_S_low = operands(b_S, PREC)
            b_P = times(b_m, b_m_low, b_S, b_S_low, b_P, PREC)
    m_P = (o_i < K)[:, None] & (o_x < X)[None, :]
    tl.store(p_P + base + (o_i[:, None] * X + o_x[None, :]), b_P.to(p_P.dtype.element_ty), mask=m_P)


@jit
def turn_kernel(p_D, p_S, p_m, p_R, p_pairs, K, N: int, E, X, XS, BN: tl.constexpr, BX: tl.constexpr,
                PREC: tl.constexpr):  # fmt: skip
    """For at most BN blocks of a document, over XS of the X numbers: R_j = sum_i m_ij D_i, and <D_i, S_j> of those
    numbers [X/XS,R*E*documents,BN,BN]. Grid (R*E*documents * X/XS), the last row first as in `product_kernel`."""
    i_p, splits = tl.num_programs(0) - 1 - tl.program_id(0), tl.cdiv(X, XS)
    i_row, i_s = i_p // splits, i_p % splits
    i_e, o_n = i_row // (N // K) % E, tl.arange(0, BN)
    base, stop = i_row.to(tl.int64) * K * X, tl.minimum(X, (i_s + 1) * XS)
    m_m = (o_n < K)[:, None] & (o_n < K)[None, :]
    b_m = tl.load(p_m + i_e * K * K + o_n[None, :] * K + o_n[:, None], mask=m_m, other=0.0)
    b_m, b_m_low = operands(b_m, PREC)
    b_pairs = tl.zeros([BN, BN], tl.float32)
    for i_x in range(i_s * XS, stop, BX):
        o_x = i_x + tl.arange(0, BX)
        m_x, o_S = (o_n < K)[:, None] & (o_x < stop)[None, :], o_n[:, None] * X + o_x[None, :]
        b_D, b_S = tl.load(p_D + base + o_S, mask=m_x, other=0.0), tl.load(p_S + base + o_S, mask=m_x, other=0.0)
        b_D, b_D_low = operands(b_D, PREC)
        b_S, b_S_low = operands(b_S, PREC)
        b_R = times(b_m, b_m_low, b_D, b_D_low, tl.zeros([BN, BX], tl.float32), PREC)
        tl.store(p_R + base + o_S, b_R, mask=m_x)
        b_pairs = times(b_D, b_D_low, tl.trans(b_S), tl.trans(b_S_low), b_pairs, PREC)
    p_pairs += (i_s * (tl.num_programs(0) // splits) + i_row).to(tl.int64) * BN * BN
    tl.store(p_pairs + o_n[:, None] * BN + o_n[None, :], b_pairs)


@jit
def read_kernel(p_q, p_table, p_P, p_o, p_g, s_qt, s_qh, T: int, N: int, L, B, H, E, X, F: tl.constexpr,
                DV: tl.constexpr, CT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr,
                PREC: tl.constexpr):  # fmt: skip
    """o [B,T,H,Dv], and g [B,T,H] with the normaliser. Grid (R*H * N)."""
    HALF: tl.constexpr = p_P.dtype.element_ty == tl.bfloat16
    i_r, i_h, i_n, _ = place(H, N, 1)
    o_f, o_v, o_c = tl.arange(0, BF), tl.arange(0, BV), tl.arange(0, CT)
    row = i_r.to(tl.int64) * T
    p_q += row * s_qt + i_h * s_qh
    p_o += (row * H + i_h) * DV
    p_g += row * H + i_h
    p_P += ((i_r * E + i_h // (H // E)).to(tl.int64) * N + i_n) * X
    if F <= BF:  # held for all tokens of the block
        b_P, b_P_low = parts(load_summary(p_P, o_f, o_v, F, DV), p_q.dtype.element_ty == tl.bfloat16)
        b_z = load_column(p_P, o_f, F, DV, NORM)
    o_n, m_n = block_tokens(p_table, i_r, i_n, o_c, T, N, L, B)
    for i_c in range(0, places_used(p_table, i_r, i_n, T, N, L, B), CT):
        o_t, m_t = o_n, m_n
        o_n, m_n = block_tokens(p_table, i_r, i_n, i_c + CT + o_c, T, N, L, B)
        b_o = tl.zeros([CT, BV], tl.float32)
        b_g = tl.zeros([CT], tl.float32)
        if F <= BF:
            b_q = load_tile(p_q, o_t, m_t, o_f, s_qt, F)
            b_o = times_summary(b_q, b_P, b_P_low, b_o, HALF, PREC)
            b_g = tl.sum(b_q.to(tl.float32) * b_z[None, :], 1)
        else:
            for i_f in range(0, F, BF):
                b_q = load_tile(p_q, o_t, m_t, i_f + o_f, s_qt, F)
                b_P, b_P_low = parts(load_summary(p_P, i_f + o_f, o_v, F, DV), b_q.dtype == tl.bfloat16)
                b_z = load_column(p_P, i_f + o_f, F, DV, NORM)
                b_o = times_summary(b_q, b_P, b_P_low, b_o, HALF, PREC)
                b_g += tl.sum(b_q.to(tl.float32) * b_z[None, :], 1)
        if NORM:
            b_g = tl.maximum(b_g, 1e-6)
            b_o /= b_g[:, None]
            tl.store(p_g + o_t * H, b_g, mask=m_t)
        store_tile(p_o, b_o, o_t, m_t, o_v, H * DV, DV)


@jit
def back_kernel(p_q, p_do, p_table, p_P, p_g, p_dg, p_dq, p_D, s_qt, s_qh, T: int, N: int, L, B, H, E, X,
                G: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, CT: tl.constexpr, BF: tl.constexpr,
                BV: tl.constexpr, NORM: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dq [B,T,H,F] and D [R,E,N,X]; p_dg may be None. Grid (R*E * N * blocks of BF)."""
    i_r, i_e, i_n, i_f = place(E, N, tl.cdiv(F, BF))
    o_f, o_v, o_c = i_f * BF + tl.arange(0, BF), tl.arange(0, BV), tl.arange(0, CT)
    own = ((i_r * E + i_e).to(tl.int64) * N + i_n) * X
    p_P += own
    b_P, b_P_low = parts(load_summary(p_P, o_f, o_v, F, DV), p_q.dtype.element_ty == tl.bfloat16)
    b_z = load_column(p_P, o_f, F, DV, NORM)
    # [BF, BV], [BF]
    b_D, b_Dz = tl.zeros([BF, BV], tl.float32), tl.zeros([BF], tl.float32)
    stop, row = places_used(p_table, i_r, i_n, T, N, L, B), i_r.to(tl.int64) * T
    p_q += row * s_qt
    p_do += row * H * DV
    p_dq += row * H * F
    for i_g in range(G):
        i_h = i_e * G + i_g
        o_n, m_n = block_tokens(p_table, i_r, i_n, o_c, T, N, L, B)
        for i_c in range(0, stop, CT):
            o_t, m_t = o_n, m_n
            o_n, m_n = block_tokens(p_table, i_r, i_n, i_c + CT + o_c, T, N, L, B)
            b_q = load_tile(p_q + i_h * s_qh, o_t, m_t, o_f, s_qt, F)
            b_do = load_tile(p_do + i_h * DV, o_t, m_t, o_v, H * DV, DV)
            if NORM:
                b_g = tl.load(p_g + (row * H + i_h) + o_t * H, mask=m_t, other=1.0)
                b_r = 1.0 / b_g
                b_w, b_w_low = parts(b_do.to(tl.float32) * b_r[:, None], b_q.dtype == tl.bfloat16)
                b_D = dot_given_left(tl.trans(b_q), b_w, b_w_low, PREC, b_D)
            b_y = dot_given_left(b_do, tl.trans(b_P), tl.trans(b_P_low), PREC)
            if NORM:
                b_u = tl.sum(b_q.to(tl.float32) * b_y, 1)
                if F > BF:
                    for j in range(0, tl.cdiv(F, BF)):
                        if j != i_f:  # the features of other programs
                            o_j = j * BF + tl.arange(0, BF)
                            b_x = load_tile(p_q + i_h * s_qh, o_t, m_t, o_j, s_qt, F)
                            b_Pj, b_Pj_low = parts(load_summary(p_P, o_j, o_v, F, DV), b_x.dtype == tl.bfloat16)
                            b_yj = dot_given_left(b_do, tl.trans(b_Pj), tl.trans(b_Pj_low), PREC)
                            b_u += tl.sum(b_x.to(tl.float32) * b_yj, 1)
                b_u *= -b_r * b_r
                if p_dg is not None:
                    b_u += tl.load(p_dg + (row * H + i_h) + o_t * H, mask=m_t, other=0.0)
                # A normaliser at its guard is a constant.
                b_u = tl.where(b_g > 1e-6, b_u, 0.0)
                b_y = b_y * b_r[:, None] + b_u[:, None] * b_z[None, :]
                store_tile(p_dq + i_h * F, b_y, o_t, m_t, o_f, H * F, F)
                b_Dz += tl.sum(b_q.to(tl.float32) * b_u[:, None], 0)
            else:
                store_tile(p_dq + i_h * F, b_y, o_t, m_t, o_f, H * F, F)
                b_D += dot_given(tl.trans(b_q), b_do, PREC)
    p_D += own
    tl.store(p_D + o_f[:, None] * DV + o_v[None, :], b_D, mask=(o_f < F)[:, None] & (o_v < DV)[None, :])
    if NORM:
        tl.store(p_D + F * DV + o_f, b_Dz, mask=o_f < F)


@jit
def give_kernel(p_k, p_v, p_table, p_R, p_dk, p_dv, s_kt, s_kh, s_vt, s_vh, T: int, N: int, L, B, E, X,
                F: tl.constexpr, DV: tl.constexpr, CT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
                NORM: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dk [B,T,E,F] and dv [B,T,E,Dv]. Grid (R*E * N)."""
    i_r, i_e, i_n, _ = place(E, N, 1)
    o_f, o_v, o_c = tl.arange(0, BF), tl.arange(0, BV), tl.arange(0, CT)
    row = i_r.to(tl.int64) * T
    p_k += row * s_kt + i_e * s_kh
    p_v += row * s_vt + i_e * s_vh
    p_R += ((i_r * E + i_e).to(tl.int64) * N + i_n) * X
    p_dk += (row * E + i_e) * F
    p_dv += (row * E + i_e) * DV
    if F <= BF:
        b_R, b_R_low = parts(load_summary(p_R, o_f, o_v, F, DV), p_k.dtype.element_ty == tl.bfloat16)
        b_z = load_column(p_R, o_f, F, DV, NORM)
    o_n, m_n = block_tokens(p_table, i_r, i_n, o_c, T, N, L, B)
    for i_c in range(0, places_used(p_table, i_r, i_n, T, N, L, B), CT):
        o_t, m_t = o_n, m_n
        o_n, m_n = block_tokens(p_table, i_r, i_n, i_c + CT + o_c, T, N, L, B)
        b_v = load_tile(p_v, o_t, m_t, o_v, s_vt, DV)
        b_dv = tl.zeros([CT, BV], tl.float32)
        if F <= BF:
            b_k = load_tile(p_k, o_t, m_t, o_f, s_kt, F)
            b_dk = dot_given_left(b_v, tl.trans(b_R), tl.trans(b_R_low), PREC) + b_z[None, :]
            store_tile(p_dk, b_dk, o_t, m_t, o_f, E * F, F)
            b_dv = dot_given_left(b_k, b_R, b_R_low, PREC)
        else:
            for i_f in range(0, F, BF):
                b_R, b_R_low = parts(load_summary(p_R, i_f + o_f, o_v, F, DV), b_v.dtype == tl.bfloat16)
                b_z = load_column(p_R, i_f + o_f, F, DV, NORM)
                b_dk = dot_given_left(b_v, tl.trans(b_R), tl.trans(b_R_low), PREC) + b_z[None, :]
                store_tile(p_dk, b_dk, o_t, m_t, i_f + o_f, E * F, F)
                b_k = load_tile(p_k, o_t, m_t, i_f + o_f, s_kt, F)
                b_dv += dot_given_left(b_k, b_R, b_R_low, PREC)
        store_tile(p_dv, b_dv, o_t, m_t, o_v, E * DV, DV)
