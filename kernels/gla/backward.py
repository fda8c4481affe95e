"""GLA on the GPU, backward: the gradients of q, k, g and of both row gates, in fixed order (no atomics).

Per chunk and block of key channels, with dA_ti = do_t.v_i, and q, k including scale and gates:

    dq_t = e^{b_t} . (S do_t) + sum_{i<=t} dA_ti e^{b_t-b_i} . k_i
    dk_i = e^{b_C-b_i} . (dS v_i) + sum_{t>=i} dA_ti e^{b_t-b_i} . q_t
    dg_t = sum_{j>=t} ( sum_heads q_j . dq_j - k_j . dk_j ) + S_end . dS
    S_end . dS = e^{b_C} . (S . dS) + sum_i k_i . e^{b_C-b_i} . (dS v_i)

S is what enters the chunk, dS the gradient of what leaves it: S_end . dS stands for all that comes after, so chunks are
independent and no sum is longer than a chunk. dA^T is computed as such, not transposed (triton_helpers.py says why).
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .forward import cast, exact, load_gate, load_scaled, middle_and_end, place
from ..gsa.triton_helpers import block_level, block_split, load_sums, reference
from ..gpu.triton_helpers import dot, dot_given, dot_given_left, jit, load_rows, segment_flow, store_rows, tl


@jit
def gla_key_kernel(p_q, p_k, p_v, p_do, p_rq, p_rk, p_seg, p_chunks, p_b, p_S, p_dS, p_dq, p_dk, p_dg, p_drq, p_drk,
                   scale, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, T: int, N: int, H, E,
                   SHARE, s_drq, s_drk, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
                   LEVELS: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr,
                   SEGMENTS: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dq [B,T,H,D], dk and dg [B,T,E,D], and per block of channels what the row gates get, [blocks,B,T,H] and
    [blocks,B,T,E]. Grid (N * blocks of K, B * E)."""
    blocks: tl.constexpr = (D + BK - 1) // BK
    i_b, i_t, i_e, i_k, size, slot = place(p_chunks, T, N, E, C, blocks, VARLEN)
    if size <= 0:
        return
    token = i_b * T + i_t
    p_q += i_b * s_qb + i_t * s_qt + i_e * G * s_qh
    p_k += i_b * s_kb + i_t * s_kt + i_e // SHARE * s_kh
    p_v += i_b * s_vb + i_t * s_vt + i_e // SHARE * s_vh
    p_do += i_b * s_ob + i_t * s_ot + i_e * G * s_oh
    p_b += (token * E + i_e) * D
    p_dk += (token * E + i_e) * D
    p_dg += (token * E + i_e) * D
    p_dq += (token * H + i_e * G) * D
    p_S += (slot * E + i_e) * (D * DV)
    p_dS += (slot * E + i_e) * (D * DV)
    if p_rq is not None:
        p_rq += token * H + i_e * G
        p_drq += i_k * s_drq + token * H + i_e * G
    if p_rk is not None:
        p_rk += token * E + i_e
        p_drk += i_k * s_drk + token * E + i_e
    strong, _, _ = reference(p_b, tl.arange(0, BD), E * D, size, D, C, RANGE)
    if strong:
        key_chunk(p_q, s_qt, s_qh, p_k, s_kt, p_v, s_vt, p_do, s_ot, s_oh, p_rq, p_rk, p_seg, i_b * T, p_b, p_S, p_dS,
                  p_dq, p_dk, p_dg, p_drq, p_drk, scale, i_t, size, i_k * BK, H, E, G, D, DV, C, LEVELS, BK, BV,
                  SEGMENTS, RANGE, True, PREC)  # fmt: skip
    else:
        key_chunk(p_q, s_qt, s_qh, p_k, s_kt, p_v, s_vt, p_do, s_ot, s_oh, p_rq, p_rk, p_seg, i_b * T, p_b, p_S, p_dS,
                  p_dq, p_dk, p_dg, p_drq, p_drk, scale, i_t, size, i_k * BK, H, E, G, D, DV, C, LEVELS, BK, BV,
                  SEGMENTS, RANGE, False, PREC)  # fmt: skip


@jit
def key_chunk(p_q, s_qt, s_qh, p_k, s_kt, p_v, s_vt, p_do, s_ot, s_oh, p_rq, p_rk, p_seg, row, p_b, p_S, p_dS,
              p_dq, p_dk, p_dg, p_drq, p_drk, scale, i_t, size, i_k, H, E, G: tl.constexpr, D: tl.constexpr,
              DV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
              SEGMENTS: tl.constexpr, RANGE: tl.constexpr, STRONG: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """`gla_key_kernel` for one kind of chunk; pointers at the chunk's first token and the memory's first head."""
    o_c, o_k, s_g = tl.arange(0, C), i_k + tl.arange(0, BK), E * D
    m_enter, m_leave, keeps, m_seen = o_c >= 0, o_c >= 0, 1.0, o_c[:, None] >= o_c[None, :]
    m_seen_by = o_c[:, None] <= o_c[None, :]
    if SEGMENTS:
        b_seg, entered, leaves = segment_flow(p_seg + row, o_c, i_t, size)
        m_enter, m_leave = b_seg == entered, b_seg == leaves
        keeps = tl.where(entered == leaves, 1.0, 0.0)
        m_seen = m_seen & (b_seg[:, None] == b_seg[None, :])
        m_seen_by = m_seen_by & (b_seg[:, None] == b_seg[None, :])
    b_mid, b_end = middle_and_end(p_b, o_k, s_g, size, D, C)
    # The references of both factors of a decay: that of queries, that of keys.
    b_ref, b_ref_key, level = b_mid, b_mid, 0
    if STRONG:
        b_ref, b_ref_key = b_mid * 0.0, b_end
        level = block_level(p_b, o_c, o_k, s_g, size, D, LEVELS, RANGE)
    # What a gate and the scale make of a row is one factor of it.
    own_k, own_q = 1.0, scale
    if p_rk is not None:
        b_rk = load_gate(p_rk, o_c, E, size)
        own_k *= b_rk[:, None]
    # [C, BK], [BK]
    b_dk, b_db, b_tail = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([BK], tl.float32)
    for i_g in tl.static_range(0, G):
        if p_rq is not None:
            b_rq = load_gate(p_rq + i_g, o_c, H, size)
            own_q = scale * b_rq[:, None]
        # Queries first, then keys: together they need more registers than there are.
        b_x, b_A, _ = value_loop(p_do + i_g * s_oh, s_ot, p_v, s_vt, p_S, p_S, b_ref, o_c, o_k, size, D, DV, C, BK, BV,
                                 True, False, PREC)  # fmt: skip
        if SEGMENTS:
            b_x = tl.where(m_enter[:, None], b_x, 0.0)
        b_k, b_b = load_scaled(p_k, o_c, o_k, s_kt, size, own_k, D), load_sums(p_b, o_c, o_k, s_g, size, D)
        b_x = inside(b_x, tl.where(m_seen, b_A, 0.0), b_k, b_b - b_ref[None, :], b_ref_key[None, :] - b_b, p_b, level,
                     o_c, o_k, s_g, size, D, LEVELS, RANGE, STRONG, False, PREC)  # fmt: skip
        b_q = load_scaled(p_q + i_g * s_qh, o_c, o_k, s_qt, size, scale, D)
        b_flow = b_q * b_x
        if p_rq is not None:
            tl.store(p_drq + i_g + o_c * H, tl.sum(b_flow, 1), mask=o_c < size)
            b_flow *= b_rq[:, None]
        b_db += b_flow
        store_rows(p_dq + i_g * D, b_x * own_q, o_c, o_k, H * D, size, D)

        b_x, b_A, b_states = value_loop(p_v, s_vt, p_do + i_g * s_oh, s_ot, p_dS, p_S, b_end - b_ref_key, o_c, o_k,
                                        size, D, DV, C, BK, BV, i_g == 0, i_g == 0, PREC)  # fmt: skip
        b_b = load_sums(p_b, o_c, o_k, s_g, size, D)
        if i_g == 0:
            if SEGMENTS:
                b_x = tl.where(m_leave[:, None], b_x, 0.0)
            b_k = load_scaled(p_k, o_c, o_k, s_kt, size, own_k, D) * tl.exp2(b_ref_key[None, :] - b_b)
            b_tail = b_states * tl.exp2(b_end) * keeps + tl.sum(b_k * b_x, 0)
        b_q = load_scaled(p_q + i_g * s_qh, o_c, o_k, s_qt, size, own_q, D)
        b_dk += inside(b_x, tl.where(m_seen_by, b_A, 0.0), b_q, b_ref_key[None, :] - b_b, b_b - b_ref[None, :], p_b,
                       level, o_c, o_k, s_g, size, D, LEVELS, RANGE, STRONG, True, PREC)  # fmt: skip
    b_k = load_scaled(p_k, o_c, o_k, s_kt, size, 1.0, D)
    if p_rk is not None:
        tl.store(p_drk + o_c * E, tl.sum(b_k * b_dk, 1), mask=o_c < size)
        b_dk *= b_rk[:, None]
    b_db -= b_k * b_dk
    store_rows(p_dg, tl.cumsum(b_db, 0, reverse=True) + b_tail[None, :], o_c, o_k, s_g, size, D)
    store_rows(p_dk, b_dk, o_c, o_k, s_g, size, D)


@jit
def value_loop(p_x, s_xt, p_y, s_yt, p_M, p_S, b_shift, o_c, o_k, size, D: tl.constexpr, DV: tl.constexpr,
               C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, READS: tl.constexpr, FLOW: tl.constexpr,
               PREC: tl.constexpr):  # fmt: skip
    """x M^T e^shift [C,BK] if READS, x y^T [C,C], and if FLOW the rows of S . M [BK]."""
    b_x_M, b_A, b_flow = tl.zeros([C, BK], tl.float32), tl.zeros([C, C], tl.float32), tl.zeros([BK], tl.float32)
    for i_v in range(0, DV, BV):
        o_v = i_v + tl.arange(0, BV)
        b_x = exact(load_rows(p_x, o_c, o_v, s_xt, size, DV), PREC)
        b_y = exact(load_rows(p_y, o_c, o_v, s_yt, size, DV), PREC)
        b_A += dot_given(b_x, tl.trans(b_y), PREC)
        if READS:
            b_M = load_rows(p_M, o_k, o_v, DV, D, DV)
            if FLOW:
                b_flow += tl.sum(b_M * load_rows(p_S, o_k, o_v, DV, D, DV), 1)
            b_M, b_M_low = cast(b_M * tl.exp2(b_shift)[:, None], PREC)
            b_x_M += dot_given_left(b_x, tl.trans(b_M), tl.trans(b_M_low), PREC)
    return b_x_M, b_A, b_flow


@jit
def inside(b_acc, b_A, b_y, b_own, b_other, p_b, level, o_c, o_k, s_g, size, D: tl.constexpr, LEVELS: tl.constexpr,
           RANGE: tl.constexpr, STRONG: tl.constexpr, KEYS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """e^own . (acc + A (e^other . y)): what comes over the chunk's edge and, from A, from inside it."""
    if STRONG:
        b_acc *= tl.exp2(b_own)
        for i in range(level, LEVELS + 1):
            b_mine, b_theirs, m_pair = block_split(p_b, i, level, o_c, o_c, o_k, s_g, size, D, RANGE)
            if KEYS:
                b_mine, b_theirs = b_theirs, b_mine
            b_x, b_x_low = cast(tl.where(m_pair, b_A, 0.0), PREC)
            b_z, b_z_low = cast(b_y * b_theirs, PREC)
            b_acc += b_mine * dot(b_x, b_x_low, b_z, b_z_low, PREC)
    else:
        b_x, b_x_low = cast(b_A, PREC)
        b_z, b_z_low = cast(b_y * tl.exp2(b_other), PREC)
        b_acc = (b_acc + dot(b_x, b_x_low, b_z, b_z_low, PREC)) * tl.exp2(b_own)
    return b_acc
