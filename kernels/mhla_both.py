"""MHLA both ways on the GPU: two passes over the tokens as in plain linear attention, and a small product between them.

    summary  per block of tokens: S_j = sum k v^T, and sum k (mhla_triton.py)
    product  P_i = sum_j m_ij S_j, with the normaliser's column
    read     o_t = q_t P_i / g_t, g_t = q_t . z_i

Backwards, with r = 1/g, y_t = P_i do_t and u_t = dg_t - r_t^2 q_t.y_t, which is what reaches the normaliser:

    back     dq_t = r_t y_t + u_t z_i, and D_i = sum q_t [r_t do_t, u_t]^T in the same pass
    turn     R_j = sum_i m_ij D_i, and dm_ij = <D_i, S_j>; with more than 32 blocks `product` and `pairs`
             (mhla_triton_bwd.py) instead
    give     dk_t = R_j v_t + (the column of u), dv_t = R_j^T k_t

Forward keeps S, P and g for the backward pass: it makes nothing again. Where a table says so, a block has no tokens.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .mhla_tiles import load_summary, load_tile, store_tile, tile_tokens
from .tiles import dot_given, dot_given_left, jit, parts, tl


@jit
def places_used(p_table, i_r, i_n, T, N, L, B):
    """L, or 0 where the block is empty: its tokens come first."""
    first = tl.load(p_table + (i_r.to(tl.int64) * N + i_n) * L)
    return tl.where(first < B * T, L, 0)


@jit
def load_column(p_S, o_f, F: tl.constexpr, DV: tl.constexpr, NORM: tl.constexpr):
    """The normaliser's column of a summary [BF], 0 without."""
    if NORM:
        b_z = tl.load(p_S + F * DV + o_f, mask=o_f < F, other=0.0)
    else:
        b_z = o_f.to(tl.float32) * 0.0
    return b_z


@jit
def product_kernel(p_S, p_m, p_P, K, N: int, E, X, BN: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr,
                   REVERSE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """P_i = sum_j m_ij S_j over the K blocks of each document; REVERSE: its transpose.

    Grid (blocks of BX, blocks of BN, R*E*documents).
    """
    i_e, o_i = tl.program_id(2) // (N // K) % E, tl.program_id(1) * BN + tl.arange(0, BN)
    o_x, base = tl.program_id(0) * BX + tl.arange(0, BX), tl.program_id(2).to(tl.int64) * K * X
    b_P = tl.zeros([BN, BX], tl.float32)
    for i_j in range(0, K, BK):
        o_j = i_j + tl.arange(0, BK)
        m_m = (o_i < K)[:, None] & (o_j < K)[None, :]
        o_m = o_j[None, :] * K + o_i[:, None] if REVERSE else o_i[:, None] * K + o_j[None, :]
        b_m = tl.load(p_m + i_e * K * K + o_m, mask=m_m, other=0.0)
        m_S = (o_j < K)[:, None] & (o_x < X)[None, :]
        b_S = tl.load(p_S + base + o_j[:, None] * X + o_x[None, :], mask=m_S, other=0.0)
        b_P = tl.dot(b_m, b_S, b_P, input_precision=PREC)
    tl.store(p_P + base + o_i[:, None] * X + o_x[None, :], b_P, mask=(o_i < K)[:, None] & (o_x < X)[None, :])


@jit
def turn_kernel(p_D, p_S, p_m, p_R, p_pairs, K, N: int, E, X, XS, BN: tl.constexpr, BX: tl.constexpr,
                PREC: tl.constexpr):  # fmt: skip
    """For at most BN blocks of a document, over XS of the X numbers: R_j = sum_i m_ij D_i, and <D_i, S_j> of those
    numbers [X/XS,R*E*documents,BN,BN]. Grid (X/XS, R*E*documents)."""
    i_e, o_n = tl.program_id(1) // (N // K) % E, tl.arange(0, BN)
    base, stop = tl.program_id(1).to(tl.int64) * K * X, tl.minimum(X, (tl.program_id(0) + 1) * XS)
    m_m = (o_n < K)[:, None] & (o_n < K)[None, :]
    b_m = tl.load(p_m + i_e * K * K + o_n[None, :] * K + o_n[:, None], mask=m_m, other=0.0)
    b_pairs = tl.zeros([BN, BN], tl.float32)
    for i_x in range(tl.program_id(0) * XS, stop, BX):
        o_x = i_x + tl.arange(0, BX)
        m_x, o_S = (o_n < K)[:, None] & (o_x < stop)[None, :], base + o_n[:, None] * X + o_x[None, :]
        b_D, b_S = tl.load(p_D + o_S, mask=m_x, other=0.0), tl.load(p_S + o_S, mask=m_x, other=0.0)
        tl.store(p_R + o_S, tl.dot(b_m, b_D, input_precision=PREC), mask=m_x)
        b_pairs = tl.dot(b_D, tl.trans(b_S), b_pairs, input_precision=PREC)
    p_pairs += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * BN * BN
    tl.store(p_pairs + o_n[:, None] * BN + o_n[None, :], b_pairs)


@jit
def read_kernel(p_q, p_table, p_P, p_o, p_g, s_qt, s_qh, T: int, N: int, L, B, H, E, X, F: tl.constexpr,
                DV: tl.constexpr, CT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr,
                PREC: tl.constexpr):  # fmt: skip
    """o [B,T,H,Dv], and g [B,T,H] with the normaliser. Grid (N, R*H)."""
    i_n, i_r, i_h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    o_f, o_v, o_c = tl.arange(0, BF), tl.arange(0, BV), tl.arange(0, CT)
    p_q += i_h * s_qh
    p_P += ((i_r * E + i_h // (H // E)).to(tl.int64) * N + i_n) * X
    if F <= BF:  # held for all tokens of the block
        b_P, b_P_low = parts(load_summary(p_P, o_f, o_v, F, DV), p_q.dtype.element_ty == tl.bfloat16)
        b_z = load_column(p_P, o_f, F, DV, NORM)
    for i_c in range(0, places_used(p_table, i_r, i_n, T, N, L, B), CT):
        o_t, m_t = tile_tokens(p_table, i_r, i_n, i_c + o_c, T, N, L, B, True)
        b_o = tl.zeros([CT, BV], tl.float32)
        b_g = tl.zeros([CT], tl.float32)
        if F <= BF:
            b_q = load_tile(p_q, o_t, m_t, o_f, s_qt, F)
            b_o = dot_given_left(b_q, b_P, b_P_low, PREC)
            b_g = tl.sum(b_q.to(tl.float32) * b_z[None, :], 1)
        else:
            for i_f in range(0, F, BF):
                b_q = load_tile(p_q, o_t, m_t, i_f + o_f, s_qt, F)
                b_P, b_P_low = parts(load_summary(p_P, i_f + o_f, o_v, F, DV), b_q.dtype == tl.bfloat16)
                b_z = load_column(p_P, i_f + o_f, F, DV, NORM)
                b_o += dot_given_left(b_q, b_P, b_P_low, PREC)
                b_g += tl.sum(b_q.to(tl.float32) * b_z[None, :], 1)
        if NORM:
            b_g = tl.maximum(b_g, 1e-6)
            b_o /= b_g[:, None]
            tl.store(p_g + o_t * H + i_h, b_g, mask=m_t)
        store_tile(p_o + i_h * DV, b_o, o_t, m_t, o_v, H * DV, DV)


@jit
def back_kernel(p_q, p_do, p_table, p_P, p_g, p_dg, p_dq, p_D, s_qt, s_qh, T: int, N: int, L, B, H, E, X,
                F: tl.constexpr, DV: tl.constexpr, CT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
                NORM: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dq [B,T,H,F] and D [R,E,N,X]; p_dg may be None. Grid (N, R*E, blocks of BF)."""
    i_n, i_r, i_e = tl.program_id(0), tl.program_id(1) // E, tl.program_id(1) % E
    i_f, o_v, o_c = tl.program_id(2), tl.arange(0, BV), tl.arange(0, CT)
    o_f = i_f * BF + tl.arange(0, BF)
    place = ((i_r * E + i_e).to(tl.int64) * N + i_n) * X
    p_P += place
    b_P, b_P_low = parts(load_summary(p_P, o_f, o_v, F, DV), p_q.dtype.element_ty == tl.bfloat16)
    b_z = load_column(p_P, o_f, F, DV, NORM)
    # [BF, BV], [BF]
    b_D, b_Dz = tl.zeros([BF, BV], tl.float32), tl.zeros([BF], tl.float32)
    stop = places_used(p_table, i_r, i_n, T, N, L, B)
    for i_h in range(i_e * (H // E), (i_e + 1) * (H // E)):
        for i_c in range(0, stop, CT):
            o_t, m_t = tile_tokens(p_table, i_r, i_n, i_c + o_c, T, N, L, B, True)
            b_q = load_tile(p_q + i_h * s_qh, o_t, m_t, o_f, s_qt, F)
            b_do = load_tile(p_do + i_h * DV, o_t, m_t, o_v, H * DV, DV)
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
                b_g = tl.load(p_g + o_t * H + i_h, mask=m_t, other=1.0)
                b_r = 1.0 / b_g
                b_u *= -b_r * b_r
                if p_dg is not None:
                    b_u += tl.load(p_dg + o_t * H + i_h, mask=m_t, other=0.0)
                # A normaliser at its guard is a constant.
                b_u = tl.where(b_g > 1e-6, b_u, 0.0)
                b_y = b_y * b_r[:, None] + b_u[:, None] * b_z[None, :]
                store_tile(p_dq + i_h * F, b_y, o_t, m_t, o_f, H * F, F)
                b_Dz += tl.sum(b_q.to(tl.float32) * b_u[:, None], 0)
                b_w, b_w_low = parts(b_do.to(tl.float32) * b_r[:, None], b_q.dtype == tl.bfloat16)
                b_D = dot_given_left(tl.trans(b_q), b_w, b_w_low, PREC, b_D)
            else:
                store_tile(p_dq + i_h * F, b_y, o_t, m_t, o_f, H * F, F)
                b_D += dot_given(tl.trans(b_q), b_do, PREC)
    p_D += place
    tl.store(p_D + o_f[:, None] * DV + o_v[None, :], b_D, mask=(o_f < F)[:, None] & (o_v < DV)[None, :])
    if NORM:
        tl.store(p_D + F * DV + o_f, b_Dz, mask=o_f < F)


@jit
def give_kernel(p_k, p_v, p_table, p_R, p_dk, p_dv, s_kt, s_kh, s_vt, s_vh, T: int, N: int, L, B, E, X,
                F: tl.constexpr, DV: tl.constexpr, CT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
                NORM: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dk [B,T,E,F] and dv [B,T,E,Dv]. Grid (N, R*E)."""
    i_n, i_r, i_e = tl.program_id(0), tl.program_id(1) // E, tl.program_id(1) % E
    o_f, o_v, o_c = tl.arange(0, BF), tl.arange(0, BV), tl.arange(0, CT)
    p_k += i_e * s_kh
    p_v += i_e * s_vh
    p_R += ((i_r * E + i_e).to(tl.int64) * N + i_n) * X
    p_dk += i_e * F
    if F <= BF:
        b_R, b_R_low = parts(load_summary(p_R, o_f, o_v, F, DV), p_k.dtype.element_ty == tl.bfloat16)
        b_z = load_column(p_R, o_f, F, DV, NORM)
    for i_c in range(0, places_used(p_table, i_r, i_n, T, N, L, B), CT):
        o_t, m_t = tile_tokens(p_table, i_r, i_n, i_c + o_c, T, N, L, B, True)
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
        store_tile(p_dv + i_e * DV, b_dv, o_t, m_t, o_v, E * DV, DV)
