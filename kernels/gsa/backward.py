"""GSA on the GPU, backward: every gradient, analytic, in fixed order (no atomics). Saved from the forward: its inputs.

    states, scan     of forward.py again: the memories that enter each chunk
    logit gradients  per chunk: l, p, dp, dl = p (dp - p.dp), and sum_heads (p dp + l dl), the query side of dg
    query gradients  per chunk: dq
    writes           per chunk: what reaches dS, (p e^b)^T do and c (dl e^b)^T q, summed over heads
    scan, reversed   dS at the end of each chunk
    key gradients    per chunk: dv, ds, then dk, ds; dg_t = sum_{j>=t}(query side - s ds)_j + S_end.dS_end - e^g ds

The last line makes chunks independent: S_end.dS_end stands for everything after the chunk. In the first pass dl is
what do is in the second, so one kernel serves the key sides of both. No product takes the transpose of another
product's result: p and dl travel through memory instead, and A^T is computed as such (triton 3.4 to 3.7 get some of
those transposes wrong on Hopper). triton_helpers.py has the parts and the letters.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .triton_helpers import (
    block_level,
    block_split,
    load_gates,
    load_memory,
    load_side,
    load_sums,
    load_write,
    locate,
    mix_slots,
    read_side,
    read_slots,
    reference,
    softmax,
    store_memory,
    write_strength,
)
from ..gpu.triton_helpers import (
    dot,
    dot_given,
    dot_given_left,
    dot_given_right,
    jit,
    load_rows,
    parts,
    segment_flow,
    store_rows,
    tl,
)


@jit
def logits_kernel(p_q, p_k, p_v, p_g, p_do, p_seg, p_chunks, p_b, p_K, p_V, p_p, p_dl, p_db, scale,
                  s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, T: int, N: int, H, E, SHARE,
                  M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
                  BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VARLEN: tl.constexpr,
                  SEGMENTS: tl.constexpr, RANGE: tl.constexpr, STACK: tl.constexpr, HOLD: tl.constexpr,
                  PREC: tl.constexpr):  # fmt: skip
    """p and scale dl [B,T,H,M], times e^{b_t-b_mid} unless the chunk is strong; and what the queries send to g, the
    sum over heads and over the rest of the chunk of p dp + l dl [B,T,E,M]. Grid (N, B*E)."""
    i_b, i_t, i_e, size, slot, gate = locate(p_chunks, tl.program_id(0), T, N, E, M, C, VARLEN)
    if size <= 0:
        return
    p_g, p_b, p_db, i_h, i_q, row = p_g + gate, p_b + gate, p_db + gate, i_e // SHARE, i_e * (H // E), i_b * T
    p_q += i_b * s_qb + i_t * s_qt + i_q * s_qh
    p_do += i_b * s_ob + i_t * s_ot + i_q * s_oh
    p_k += i_b * s_kb + i_t * s_kt + i_h * s_kh
    p_v += i_b * s_vb + i_t * s_vt + i_h * s_vh
    p_K += (slot * E + i_e) * (M * D)
    p_V += (slot * E + i_e) * (M * DV)
    p_p += ((row + i_t) * H + i_q) * M
    p_dl += ((row + i_t) * H + i_q) * M
    strong, b_mid, _ = reference(p_b, tl.arange(0, BM), E * M, size, M, C, RANGE)
    if strong:
        logits_chunk(p_q, s_qt, s_qh, p_do, s_ot, s_oh, p_k, s_kt, p_v, s_vt, p_g, p_seg, row, p_b, p_K, p_V, p_p, p_dl,
                     p_db, scale, b_mid * 0.0, i_t, size, H, E, M, D, DV, C, LEVELS, BM, BD, BDV, SEGMENTS, RANGE,
                     STACK, HOLD, True, PREC)  # fmt: skip
    else:
        logits_chunk(p_q, s_qt, s_qh, p_do, s_ot, s_oh, p_k, s_kt, p_v, s_vt, p_g, p_seg, row, p_b, p_K, p_V, p_p, p_dl,
                     p_db, scale, b_mid, i_t, size, H, E, M, D, DV, C, LEVELS, BM, BD, BDV, SEGMENTS, RANGE,
                     STACK, HOLD, False, PREC)  # fmt: skip


@jit
def logits_chunk(p_q, s_qt, s_qh, p_do, s_ot, s_oh, p_k, s_kt, p_v, s_vt, p_g, p_seg, row, p_b, p_K, p_V, p_p, p_dl,
                 p_db, scale, b_mid, i_t, size, H, E, M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                 C: tl.constexpr, LEVELS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
                 SEGMENTS: tl.constexpr, RANGE: tl.constexpr, STACK: tl.constexpr, HOLD: tl.constexpr,
                 STRONG: tl.constexpr,
                 PREC: tl.constexpr):  # fmt: skip
    """`logits_kernel` for one kind of chunk; pointers at the chunk's first token, heads at the memory's first."""
    o_c, o_r, o_m = tl.arange(0, C), tl.arange(0, STACK * C), tl.arange(0, BM)
    o_d, o_dv = tl.arange(0, BD), tl.arange(0, BDV)
    o_t, o_h, s_g = o_r % C, (o_r // C)[:, None], E * M
    b_query, m_enter, m_seen, level = read_side(p_b, p_seg, row, b_mid, o_t, o_c, o_m, s_g, i_t, size,
                                                M, LEVELS, RANGE, SEGMENTS, STRONG)  # fmt: skip
    b_write, b_write_low = load_write(p_g, p_b, b_mid, o_c, o_m, s_g, size, M, STRONG, p_k.dtype.element_ty)
    if HOLD:
        b_k, b_K, b_K_low = load_side(p_k, s_kt, p_K, b_mid, o_c, o_m, o_d, size, M, D)
        b_v, b_V, b_V_low = load_side(p_v, s_vt, p_V, b_mid, o_c, o_m, o_dv, size, M, DV)
    # [R, BM]
    b_db = tl.zeros([STACK * C, BM], tl.float32)
    for i_g in range(0, H // E, STACK):
        if not HOLD:
            b_k, b_K, b_K_low = load_side(p_k, s_kt, p_K, b_mid, o_c, o_m, o_d, size, M, D)
        b_q = load_rows(p_q + (i_g + o_h) * s_qh, o_t, o_d, s_qt, size, D)
        b_l = scale * read_slots(b_q, b_k, b_K, b_K_low, b_query, b_write, b_write_low, m_enter, m_seen, p_g, p_b,
                                 level, o_t, o_c, o_m, s_g, size, M, LEVELS, RANGE, SEGMENTS, STRONG,
                                 PREC)  # fmt: skip
        if not HOLD:
            b_v, b_V, b_V_low = load_side(p_v, s_vt, p_V, b_mid, o_c, o_m, o_dv, size, M, DV)
        b_do = load_rows(p_do + (i_g + o_h) * s_oh, o_t, o_dv, s_ot, size, DV)
        b_dp = read_slots(b_do, b_v, b_V, b_V_low, b_query, b_write, b_write_low, m_enter, m_seen, p_g, p_b, level,
                          o_t, o_c, o_m, s_g, size, M, LEVELS, RANGE, SEGMENTS, STRONG, PREC)  # fmt: skip
        b_p = softmax(b_l, o_m, M)
        b_dl = b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None])
        b_db += b_p * b_dp + b_l * b_dl
        b_dl *= scale
        if not STRONG:
            b_p *= b_query
            b_dl *= b_query
        store_rows(p_p + (i_g + o_h) * M, b_p, o_t, o_m, H * M, size, M)
        store_rows(p_dl + (i_g + o_h) * M, b_dl, o_t, o_m, H * M, size, M)
    if STACK > 1:
        b_db = tl.sum(tl.reshape(b_db, [STACK, C, BM]), 0)
    b_db = tl.where((o_c < size)[:, None], b_db, 0.0)
    store_rows(p_db, tl.cumsum(b_db, 0, reverse=True), o_c, o_m, s_g, size, M)


@jit
def query_kernel(p_k, p_g, p_seg, p_chunks, p_b, p_K, p_dl, p_dq, s_kb, s_kt, s_kh, T: int, N: int, H, E, SHARE,
                 M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
                 BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VARLEN: tl.constexpr,
                 SEGMENTS: tl.constexpr, RANGE: tl.constexpr, STACK: tl.constexpr, HOLD: tl.constexpr,
                  PREC: tl.constexpr):  # fmt: skip
    """dq [B,T,H,D]. Grid (N, B*E)."""
    i_b, i_t, i_e, size, slot, gate = locate(p_chunks, tl.program_id(0), T, N, E, M, C, VARLEN)
    if size <= 0:
        return
    p_g, p_b, i_q, row = p_g + gate, p_b + gate, i_e * (H // E), i_b * T
    p_k += i_b * s_kb + i_t * s_kt + i_e // SHARE * s_kh
    p_K += (slot * E + i_e) * (M * D)
    p_dl += ((row + i_t) * H + i_q) * M
    p_dq += ((row + i_t) * H + i_q) * D
    strong, b_mid, _ = reference(p_b, tl.arange(0, BM), E * M, size, M, C, RANGE)
    if strong:
        query_chunk(p_k, s_kt, p_g, p_seg, row, p_b, p_K, p_dl, p_dq, b_mid * 0.0, i_t, size, H, E, M, D, C, LEVELS, BM,
                    BD, SEGMENTS, RANGE, STACK, HOLD, True, PREC)  # fmt: skip
    else:
        query_chunk(p_k, s_kt, p_g, p_seg, row, p_b, p_K, p_dl, p_dq, b_mid, i_t, size, H, E, M, D, C, LEVELS, BM,
                    BD, SEGMENTS, RANGE, STACK, HOLD, False, PREC)  # fmt: skip


@jit
def query_chunk(p_k, s_kt, p_g, p_seg, row, p_b, p_K, p_dl, p_dq, b_mid, i_t, size, H, E, M: tl.constexpr,
                D: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
                SEGMENTS: tl.constexpr, RANGE: tl.constexpr, STACK: tl.constexpr, HOLD: tl.constexpr,
                 STRONG: tl.constexpr,
                PREC: tl.constexpr):  # fmt: skip
    """`query_kernel` for one kind of chunk."""
    o_c, o_r, o_m, o_d = tl.arange(0, C), tl.arange(0, STACK * C), tl.arange(0, BM), tl.arange(0, BD)
    o_t, o_h, s_g = o_r % C, (o_r // C)[:, None], E * M
    b_query, m_enter, m_seen, level = read_side(p_b, p_seg, row, b_mid, o_t, o_c, o_m, s_g, i_t, size,
                                                M, LEVELS, RANGE, SEGMENTS, STRONG)  # fmt: skip
    b_write, b_write_low = load_write(p_g, p_b, b_mid, o_c, o_m, s_g, size, M, STRONG, p_k.dtype.element_ty)
    if HOLD:
        b_k, b_K, b_K_low = load_side(p_k, s_kt, p_K, b_mid, o_c, o_m, o_d, size, M, D)
    for i_g in range(0, H // E, STACK):
        b_dl = load_rows(p_dl + (i_g + o_h) * M, o_t, o_m, H * M, size, M)
        if not HOLD:
            b_k, b_K, b_K_low = load_side(p_k, s_kt, p_K, b_mid, o_c, o_m, o_d, size, M, D)
        b_dq = mix_slots(b_dl, b_k, b_K, b_K_low, b_query, b_write, b_write_low, m_enter, m_seen, p_g, p_b, level,
                         o_t, o_c, o_m, s_g, size, M, LEVELS, RANGE, SEGMENTS, STRONG, PREC)  # fmt: skip
        store_rows(p_dq + (i_g + o_h) * D, b_dq, o_t, o_d, H * D, size, D)


@jit
def writes_kernel(p_q, p_do, p_seg, p_chunks, p_b, p_p, p_dl, p_dK, p_dV,
                  s_qb, s_qt, s_qh, s_ob, s_ot, s_oh, T: int, N: int, H, E, SHARE,
                  M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
                  BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VARLEN: tl.constexpr,
                  SEGMENTS: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """What a chunk's reads send back to the memories that entered it, to its own slot: grid (N, B*E, 2), values
    then keys."""
    i_b, i_t, i_e, size, slot, gate = locate(p_chunks, tl.program_id(0), T, N, E, M, C, VARLEN)
    if size <= 0:
        return
    p_b, row, i_q, G = p_b + gate, (i_b * T + i_t) * H, i_e * (H // E), H // E
    if tl.program_id(2) == 0:
        p_do += i_b * s_ob + i_t * s_ot + i_q * s_oh
        write_back(p_do, s_ot, s_oh, p_p + (row + i_q) * M, p_dV + (slot * E + i_e) * (M * DV), p_seg, i_b * T, p_b,
                   i_t, size, G, H, E, M, DV, C, BM, BDV, SEGMENTS, RANGE, PREC)  # fmt: skip
    else:
        p_q += i_b * s_qb + i_t * s_qt + i_q * s_qh
        write_back(p_q, s_qt, s_qh, p_dl + (row + i_q) * M, p_dK + (slot * E + i_e) * (M * D), p_seg, i_b * T, p_b,
                   i_t, size, G, H, E, M, D, C, BM, BD, SEGMENTS, RANGE, PREC)  # fmt: skip


@jit
def write_back(p_x, s_xt, s_xh, p_w, p_dS, p_seg, i_row, p_b, i_t, size, G, H, E, M: tl.constexpr,
               D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SEGMENTS: tl.constexpr,
               RANGE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """`writes_kernel` for one memory: sum over heads and tokens of (w_t e^{b_t}) x_t^T."""
    o_c, o_m, o_d = tl.arange(0, C), tl.arange(0, BM), tl.arange(0, BD)
    strong, b_mid, _ = reference(p_b, o_m, E * M, size, M, C, RANGE)
    m_w = (o_c < size)[:, None] & (o_m < M)[None, :]
    if SEGMENTS:
        b_seg, entered, _ = segment_flow(p_seg + i_row, o_c, i_t, size)
        m_w = m_w & (b_seg == entered)[:, None]
    # [BM, BD]
    b_dS = tl.zeros([BM, BD], tl.float32)
    for i_g in range(G):
        b_x = load_rows(p_x + i_g * s_xh, o_c, o_d, s_xt, size, D)
        b_w = tl.load(p_w + i_g * M + (o_c[:, None] * (H * M) + o_m[None, :]), mask=m_w, other=0.0)
        if strong:
            b_w *= tl.exp2(load_sums(p_b, o_c, o_m, E * M, size, M))
        b_w, b_w_low = parts(tl.trans(b_w), b_x.dtype == tl.bfloat16)
        b_dS = dot_given_right(b_w, b_w_low, b_x, PREC, b_dS)
    b_start = tl.exp2(tl.where(strong, 0.0, b_mid))
    store_memory(p_dS, b_dS * b_start[:, None], o_m, o_d, M, D)


@jit
def key_kernel(p_x, p_y, p_g, p_w, p_seg, p_chunks, p_b, p_S, p_dS, p_before, p_dy, p_dg, s_xb, s_xt, s_xh,
               s_yb, s_yt, s_yh, T: int, N: int, H, E, SHARE, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
               LEVELS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, VARLEN: tl.constexpr,
               SEGMENTS: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """Key side of one pass: dy [B,T,E,D], which is dv for x = do, y = v, w = p and dk for x = q, y = k, w = scale dl,
    and dg [B,T,E,M], which gains what this pass adds to `before`. Grid (2 N, B*E).

    Each has a program of its own, side by side, since both share x and w, but not the registers that a program has.
    """
    i_b, i_t, i_e, size, slot, gate = locate(p_chunks, tl.program_id(0) // 2, T, N, E, M, C, VARLEN)
    if size <= 0:
        return
    p_g, p_b, p_before, p_dg = p_g + gate, p_b + gate, p_before + gate, p_dg + gate
    token, end, i_q, row = i_b * T + i_t, (slot + 1) * E + i_e, i_e * (H // E), i_b * T
    p_x += i_b * s_xb + i_t * s_xt + i_q * s_xh
    p_y += i_b * s_yb + i_t * s_yt + i_e // SHARE * s_yh
    p_w += (token * H + i_q) * M
    p_S += end * (M * D)
    p_dS += end * (M * D)
    p_dy += (token * E + i_e) * D
    strong, b_mid, b_end = reference(p_b, tl.arange(0, BM), E * M, size, M, C, RANGE)
    if tl.program_id(0) % 2 == 0:
        if strong:
            key_chunk(p_x, s_xt, s_xh, p_g, p_w, p_seg, row, p_b, p_dS, p_dy, b_end, b_end, i_t, size, H, E, M, D, C,
                      LEVELS, BM, BD, SEGMENTS, RANGE, True, PREC)  # fmt: skip
        else:
            key_chunk(p_x, s_xt, s_xh, p_g, p_w, p_seg, row, p_b, p_dS, p_dy, b_mid, b_end, i_t, size, H, E, M, D, C,
                      LEVELS, BM, BD, SEGMENTS, RANGE, False, PREC)  # fmt: skip
    else:
        if strong:
            gate_chunk(p_x, s_xt, s_xh, p_y, s_yt, p_g, p_w, p_seg, row, p_b, p_S, p_dS, p_before, p_dg, b_end, b_end,
                       i_t, size, H, E, M, D, C, LEVELS, BM, BD, SEGMENTS, RANGE, True, PREC)  # fmt: skip
        else:
            gate_chunk(p_x, s_xt, s_xh, p_y, s_yt, p_g, p_w, p_seg, row, p_b, p_S, p_dS, p_before, p_dg, b_mid, b_end,
                       i_t, size, H, E, M, D, C, LEVELS, BM, BD, SEGMENTS, RANGE, False, PREC)  # fmt: skip


@jit
def key_chunk(p_x, s_xt, s_xh, p_g, p_w, p_seg, row, p_b, p_dS, p_dy, b_ref, b_end, i_t, size, H, E, M: tl.constexpr,
              D: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
              SEGMENTS: tl.constexpr, RANGE: tl.constexpr, STRONG: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dy of `key_kernel` for one kind of chunk; pointers at the chunk's first token, heads at the memory's first.

    Inside the chunk, per head: A^T_it = sum_m w_t e^{b_t-b_i} s_i, dy_i = sum_{t>=i} A^T_it x_t.
    """
    o_c, o_m, o_d, s_g = tl.arange(0, C), tl.arange(0, BM), tl.arange(0, BD), E * M
    m_leave, m_seen, level = key_side(p_seg, row, p_b, o_c, o_m, s_g, i_t, size, M, LEVELS, RANGE, SEGMENTS, STRONG)
    # [C, BM], [BM, BD], [C, BD]
    b_key, b_s = key_factors(p_g, p_b, b_ref, o_c, o_m, s_g, size, M)
    b_write, b_write_low = parts(b_key * b_s, p_x.dtype.element_ty == tl.bfloat16)
    b_dS = load_memory(p_dS, o_m, o_d, M, D) * tl.exp2(b_end - b_ref)[:, None]
    b_dS, b_dS_low = parts(b_dS, p_x.dtype.element_ty == tl.bfloat16)
    b_dy = tl.where(m_leave[:, None], dot(b_write, b_write_low, b_dS, b_dS_low, PREC), 0.0)
    for i_g in range(H // E):
        b_x = load_rows(p_x + i_g * s_xh, o_c, o_d, s_xt, size, D)
        b_w = load_rows(p_w + i_g * M, o_c, o_m, H * M, size, M)
        if STRONG:
            b_A = tl.zeros([C, C], tl.float32)
            for i in range(level, LEVELS + 1):
                b_q, b_k, m_pair = block_split(p_b, i, level, o_c, o_c, o_m, s_g, size, M, RANGE)
                b_q, b_q_low = parts(b_q * b_w, b_x.dtype == tl.bfloat16)
                b_ks, b_ks_low = parts(b_k * b_s, b_x.dtype == tl.bfloat16)
                b_A += tl.where(m_pair, dot(b_ks, b_ks_low, tl.trans(b_q), tl.trans(b_q_low), PREC), 0.0)
        else:
            b_w, b_w_low = parts(b_w, b_x.dtype == tl.bfloat16)
            b_A = dot(b_write, b_write_low, tl.trans(b_w), tl.trans(b_w_low), PREC)
        b_A, b_A_low = parts(tl.where(m_seen, b_A, 0.0), b_x.dtype == tl.bfloat16)
        b_dy = dot_given_right(b_A, b_A_low, b_x, PREC, b_dy)
    store_rows(p_dy, b_dy, o_c, o_d, E * D, size, D)


@jit
def gate_chunk(p_x, s_xt, s_xh, p_y, s_yt, p_g, p_w, p_seg, row, p_b, p_S, p_dS, p_before, p_dg, b_ref, b_end, i_t,
               size, H, E, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BM: tl.constexpr,
               BD: tl.constexpr, SEGMENTS: tl.constexpr, RANGE: tl.constexpr, STRONG: tl.constexpr,
               PREC: tl.constexpr):  # fmt: skip
    """dg of `key_kernel` for one kind of chunk; per head, ds_i = sum_{t>=i} (y_i.x_t) w_t e^{b_t-b_i}."""
    o_c, o_m, o_d, s_g = tl.arange(0, C), tl.arange(0, BM), tl.arange(0, BD), E * M
    m_leave, m_seen, level = key_side(p_seg, row, p_b, o_c, o_m, s_g, i_t, size, M, LEVELS, RANGE, SEGMENTS, STRONG)
    # [C, BD], [BM, BD], [C, BM]
    b_y = load_rows(p_y, o_c, o_d, s_yt, size, D)
    b_dS = load_memory(p_dS, o_m, o_d, M, D) * tl.exp2(b_end - b_ref)[:, None]
    b_dS, b_dS_low = parts(b_dS, b_y.dtype == tl.bfloat16)
    b_ds = tl.where(m_leave[:, None], dot_given_left(b_y, tl.trans(b_dS), tl.trans(b_dS_low), PREC), 0.0)
    if STRONG:
        b_ds *= tl.exp2(b_ref[None, :] - load_sums(p_b, o_c, o_m, s_g, size, M))
    for i_g in range(H // E):
        b_x = load_rows(p_x + i_g * s_xh, o_c, o_d, s_xt, size, D)
        b_w = load_rows(p_w + i_g * M, o_c, o_m, H * M, size, M)
        b_B = tl.where(m_seen, dot_given(b_y, tl.trans(b_x), PREC), 0.0)
        if STRONG:
            for i in range(level, LEVELS + 1):
                b_q, b_k, m_pair = block_split(p_b, i, level, o_c, o_c, o_m, s_g, size, M, RANGE)
                b_q, b_q_low = parts(b_q * b_w, b_y.dtype == tl.bfloat16)
                b_B_i, b_B_i_low = parts(tl.where(m_pair, b_B, 0.0), b_y.dtype == tl.bfloat16)
                b_ds += b_k * dot(b_B_i, b_B_i_low, b_q, b_q_low, PREC)
        else:
            b_w, b_w_low = parts(b_w, b_y.dtype == tl.bfloat16)
            b_B, b_B_low = parts(b_B, b_y.dtype == tl.bfloat16)
            b_ds = dot(b_B, b_B_low, b_w, b_w_low, PREC, b_ds)
    if not STRONG:
        b_ds *= tl.exp2(b_ref[None, :] - load_sums(p_b, o_c, o_m, s_g, size, M))
    # [BM]: stands for all that comes after the chunk
    b_tail = tl.sum(load_memory(p_S, o_m, o_d, M, D) * load_memory(p_dS, o_m, o_d, M, D), 1)
    b_s = write_strength(load_gates(p_g, o_c, o_m, s_g, size, M))
    b_dg = b_tail[None, :] - tl.cumsum(b_s * b_ds, 0, reverse=True) - (1.0 - b_s) * b_ds
    b_dg += load_rows(p_before, o_c, o_m, s_g, size, M)
    store_rows(p_dg, b_dg, o_c, o_m, s_g, size, M)


@jit
def key_side(p_seg, row, p_b, o_c, o_m, s_g, i_t, size, M: tl.constexpr, LEVELS: tl.constexpr, RANGE: tl.constexpr,
             SEGMENTS: tl.constexpr, STRONG: tl.constexpr):  # fmt: skip
    """Whether the document of a key leaves with the chunk [C], which queries see a key [C keys, C queries], and the
    block level of a strong chunk."""
    m_leave, m_seen, level = o_c >= 0, o_c[:, None] <= o_c[None, :], 0
    if SEGMENTS:
        b_seg, _, leaves = segment_flow(p_seg + row, o_c, i_t, size)
        m_leave = b_seg == leaves
        m_seen = m_seen & (b_seg[:, None] == b_seg[None, :])
    if STRONG:
        level = block_level(p_b, o_c, o_m, s_g, size, M, LEVELS, RANGE)
    return m_leave, m_seen, level


@jit
def key_factors(p_g, p_b, b_ref, o_c, o_m, s_g, size, M: tl.constexpr):
    """e^{b_ref-b_i} and s_i, [C,BM] each."""
    b_key = tl.exp2(b_ref[None, :] - load_sums(p_b, o_c, o_m, s_g, size, M))
    return b_key, write_strength(load_gates(p_g, o_c, o_m, s_g, size, M))
