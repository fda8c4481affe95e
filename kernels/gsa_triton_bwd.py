"""GSA on the GPU, backward: every gradient, analytic, in fixed order (no atomics). Saved from the forward: its inputs.

    states, scan     of gsa_triton.py again: the memories that enter each chunk
    query gradients  per chunk: l, p, dp, dl = p (dp - p.dp), dq, and sum_heads (p dp + l dl), the query side of dg
    writes           per chunk: what reaches dS, (p e^b)^T do and c (dl e^b)^T q, summed over heads
    scan, reversed   dS at the end of each chunk
    key gradients    per chunk: dk, dv, ds, then dg = cumsum_{j>=t}(query side - s ds)_j + S_end.dS_end - e^g ds

The last line makes chunks independent: S_end.dS_end stands for everything after the chunk. In the first pass dl is
what do is in the second, so both go through the same functions. No product takes the transpose of another product's
result: p and dl travel through memory instead, and A^T is computed as such (triton 3.4 to 3.7 get some of those
transposes wrong on Hopper).
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .gsa_triton import (
    chunk_span,
    dot,
    gate_offset,
    halving_split,
    jit,
    load_gates,
    load_memory,
    load_rows,
    load_side,
    load_sums,
    mix_slots,
    read_slots,
    reference,
    segment_flow,
    softmax,
    store_memory,
    store_rows,
    write_strength,
)

try:
    import triton.language as tl
except ImportError:
    tl = None


@jit
def query_kernel(p_q, p_k, p_v, p_g, p_do, p_seg, p_chunks, p_b, p_K, p_V, p_dq, p_p, p_dl, p_db, scale,
                 s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, T: int, N: int, H, E, SHARE,
                 M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
                 BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VARLEN: tl.constexpr,
                 SEGMENTS: tl.constexpr, RANGE: tl.constexpr, HOLD: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dq [B,T,H,D]; for the key side p and dl [B,T,H,M], times e^{b_t-b_mid} unless the chunk is strong, and
    the sum over heads of p dp + l dl [B,T,E,M]. Grid (N, B*E)."""
    i_n, i_b, i_e = tl.program_id(0), tl.program_id(1) // E, tl.program_id(1) % E
    i_t, size, slot = chunk_span(p_chunks, i_n, i_b, T, N, C, VARLEN)
    if size <= 0:
        return
    o_c, o_m, o_d, o_dv, s_g = tl.arange(0, C), tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV), E * M
    gate, G = gate_offset(i_b, i_t, i_e, T, E, M), H // E
    i_b, i_t, i_h = i_b.to(tl.int64), i_t.to(tl.int64), i_e // SHARE
    p_g, p_b = p_g + gate, p_b + gate
    strong, b_mid, _ = reference(p_b, o_m, s_g, size, M, C, RANGE)
    b_mid = tl.where(strong, 0.0, b_mid)
    m_enter, m_seen = o_c >= 0, o_c[:, None] >= o_c[None, :]
    if SEGMENTS:
        b_seg, entered, _ = segment_flow(p_seg + i_b * T, o_c, i_t, size)
        m_enter = b_seg == entered
        m_seen = m_seen & (b_seg[:, None] == b_seg[None, :])
    b_query = tl.exp2(load_sums(p_b, o_c, o_m, s_g, size, M) - b_mid[None, :])
    p_k += i_b * s_kb + i_t * s_kt + i_h * s_kh
    p_v += i_b * s_vb + i_t * s_vt + i_h * s_vh
    p_K += (slot * E + i_e) * (M * D)
    p_V += (slot * E + i_e) * (M * DV)
    if HOLD:
        b_k, b_K, b_write = load_side(p_k, s_kt, p_K, p_g, p_b, b_mid, o_c, o_m, o_d, s_g, size, M, D)
        b_v, b_V, b_write = load_side(p_v, s_vt, p_V, p_g, p_b, b_mid, o_c, o_m, o_dv, s_g, size, M, DV)
    # [C, BM]
    b_db = tl.zeros([C, BM], tl.float32)
    for i_g in range(G):
        i_q = i_e * G + i_g
        row = (i_b * T + i_t) * H + i_q
        if not HOLD:
            b_k, b_K, b_write = load_side(p_k, s_kt, p_K, p_g, p_b, b_mid, o_c, o_m, o_d, s_g, size, M, D)
        b_q = load_rows(p_q + i_b * s_qb + i_t * s_qt + i_q * s_qh, o_c, o_d, s_qt, size, D)
        b_l = scale * read_slots(b_q, b_k, b_K, b_query, b_write, m_enter, m_seen, strong, p_g, p_b, o_m, s_g, size,
                                 M, C, LEVELS, SEGMENTS, PREC)  # fmt: skip
        b_p = softmax(b_l, o_m, M)
        if not HOLD:
            b_v, b_V, b_write = load_side(p_v, s_vt, p_V, p_g, p_b, b_mid, o_c, o_m, o_dv, s_g, size, M, DV)
        b_do = load_rows(p_do + i_b * s_ob + i_t * s_ot + i_q * s_oh, o_c, o_dv, s_ot, size, DV)
        b_dp = read_slots(b_do, b_v, b_V, b_query, b_write, m_enter, m_seen, strong, p_g, p_b, o_m, s_g, size,
                          M, C, LEVELS, SEGMENTS, PREC)  # fmt: skip
        b_dl = b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None])
        b_db += b_p * b_dp + b_l * b_dl
        store_rows(p_p + row * M, tl.where(strong, b_p, b_p * b_query), o_c, o_m, H * M, size, M)
        store_rows(p_dl + row * M, tl.where(strong, b_dl, b_dl * b_query), o_c, o_m, H * M, size, M)
        # [C, BD]
        if not HOLD:
            b_k, b_K, b_write = load_side(p_k, s_kt, p_K, p_g, p_b, b_mid, o_c, o_m, o_d, s_g, size, M, D)
        b_dq = mix_slots(b_dl, b_k, b_K, b_query, b_write, m_enter, m_seen, strong, p_g, p_b, o_m, s_g, size,
                         M, C, LEVELS, SEGMENTS, PREC)  # fmt: skip
        store_rows(p_dq + row * D, b_dq * scale, o_c, o_d, H * D, size, D)
    store_rows(p_db + gate, b_db, o_c, o_m, s_g, size, M)


@jit
def writes_kernel(p_q, p_do, p_seg, p_chunks, p_b, p_p, p_dl, p_dK, p_dV, scale,
                  s_qb, s_qt, s_qh, s_ob, s_ot, s_oh, T: int, N: int, H, E,
                  M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
                  BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VARLEN: tl.constexpr,
                  SEGMENTS: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """What a chunk's reads send back to the memories that entered it, to its own slot. Grid (N, B*E)."""
    i_n, i_b, i_e = tl.program_id(0), tl.program_id(1) // E, tl.program_id(1) % E
    i_t, size, slot = chunk_span(p_chunks, i_n, i_b, T, N, C, VARLEN)
    if size <= 0:
        return
    o_c, o_m, o_d, o_dv, G = tl.arange(0, C), tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV), H // E
    gate = gate_offset(i_b, i_t, i_e, T, E, M)
    i_b, i_t = i_b.to(tl.int64), i_t.to(tl.int64)
    p_b += gate
    strong, b_mid, _ = reference(p_b, o_m, E * M, size, M, C, RANGE)
    m_enter = o_c < size
    if SEGMENTS:
        b_seg, entered, _ = segment_flow(p_seg + i_b * T, o_c, i_t, size)
        m_enter = m_enter & (b_seg == entered)
    # [BM, BD], [BM, BDV]
    b_dK = tl.zeros([BM, BD], tl.float32)
    b_dV = tl.zeros([BM, BDV], tl.float32)
    for i_g in range(G):
        i_q = i_e * G + i_g
        row = ((i_b * T + i_t) * H + i_q) * M
        b_q = load_rows(p_q + i_b * s_qb + i_t * s_qt + i_q * s_qh, o_c, o_d, s_qt, size, D)
        b_do = load_rows(p_do + i_b * s_ob + i_t * s_ot + i_q * s_oh, o_c, o_dv, s_ot, size, DV)
        m_w = m_enter[:, None] & (o_m < M)[None, :]
        b_p = tl.load(p_p + row + o_c[:, None] * (H * M) + o_m[None, :], mask=m_w, other=0.0)
        b_dl = tl.load(p_dl + row + o_c[:, None] * (H * M) + o_m[None, :], mask=m_w, other=0.0)
        if strong:
            b_start = tl.exp2(load_sums(p_b, o_c, o_m, E * M, size, M))
            b_p *= b_start
            b_dl *= b_start
        b_dV += dot(tl.trans(b_p), b_do, PREC)
        b_dK += dot(tl.trans(b_dl), b_q, PREC)
    b_start = tl.exp2(tl.where(strong, 0.0, b_mid))[:, None]
    store_memory(p_dK + (slot * E + i_e) * (M * D), b_dK * (b_start * scale), o_m, o_d, M, D)
    store_memory(p_dV + (slot * E + i_e) * (M * DV), b_dV * b_start, o_m, o_dv, M, DV)


@jit
def strong_keys(b_B, b_w, p_g, p_b, o_m, s_g, size, M: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
                PREC: tl.constexpr):  # fmt: skip
    """`key_pass` inside a strong chunk, by halving: A^T [C,C] and ds [C,BM] of one head."""
    o_c = tl.arange(0, C)
    m_same = o_c[:, None] == o_c[None, :]
    b_s = write_strength(load_gates(p_g, o_c, o_m, s_g, size, M))
    b_A = tl.where(m_same, tl.sum(b_w * b_s, 1)[:, None], 0.0)
    b_ds = tl.sum(tl.where(m_same, b_B, 0.0), 1)[:, None] * b_w
    for j in range(LEVELS):
        b_query, b_key, b_s, o_half, right = halving_split(p_g, p_b, j, o_m, s_g, size, M, C)
        m_pair = (o_half[:, None] + 1 == o_half[None, :]) & right[None, :]
        b_wq = b_w * b_query
        b_A += tl.where(m_pair, dot(b_key * b_s, tl.trans(b_wq), PREC), 0.0)
        b_ds += b_key * dot(tl.where(m_pair, b_B, 0.0), b_wq, PREC)
    return b_A, b_ds


@jit
def key_factors(p_g, p_b, b_ref, o_c, o_m, s_g, size, M: tl.constexpr):
    """e^{b_ref-b_i} and s_i, [C,BM] each."""
    b_key = tl.exp2(b_ref[None, :] - load_sums(p_b, o_c, o_m, s_g, size, M))
    return b_key, write_strength(load_gates(p_g, o_c, o_m, s_g, size, M))


@jit
def key_pass(p_x, s_xt, s_xh, p_y, s_yt, p_w, p_S, p_dS, p_dy, s_dyt, factor, G, H, m_leave, m_seen, strong,
             b_ref, b_rest, p_g, p_b, o_c, o_m, s_g, size, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
             BM: tl.constexpr, BD: tl.constexpr, LEVELS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """Key side of one pass, with w = p or dl per head. Stores dy (dk or dv); returns ds [C,BM] and S_end.dS_end [BM].

    Inside the chunk: A^T_it = sum_m w_t e^{b_t-b_i} s_i, dy_i = sum_{t>=i} A^T_it x_t,
    ds_i = sum_{t>=i} (y_i.x_t) w_t e^{b_t-b_i}.
    """
    o_d = tl.arange(0, BD)
    # [C, BD], [BM, BD], [C, BM]
    b_y = load_rows(p_y, o_c, o_d, s_yt, size, D)
    b_dS = load_memory(p_dS, o_m, o_d, M, D)
    b_tail = tl.sum(load_memory(p_S, o_m, o_d, M, D) * b_dS, 1)
    b_dS *= b_rest[:, None]
    b_key, b_s = key_factors(p_g, p_b, b_ref, o_c, o_m, s_g, size, M)
    b_write = b_key * b_s
    b_dy = tl.where(m_leave[:, None], dot(b_write, b_dS, PREC), 0.0)
    b_ds = tl.where(m_leave[:, None], dot(b_y, tl.trans(b_dS), PREC), 0.0)
    if strong:
        b_ds *= b_key
    for i_g in range(G):
        b_x = load_rows(p_x + i_g * s_xh, o_c, o_d, s_xt, size, D)
        b_w = load_rows(p_w + i_g * M, o_c, o_m, H * M, size, M) * factor
        b_B = tl.where(m_seen, dot(b_y, tl.trans(b_x), PREC), 0.0)
        if strong:
            b_A, b_ds_head = strong_keys(b_B, b_w, p_g, p_b, o_m, s_g, size, M, C, LEVELS, PREC)
            b_ds += b_ds_head
        else:
            b_A = dot(b_write, tl.trans(b_w), PREC)
            b_ds += dot(b_B, b_w, PREC)
        b_dy += dot(tl.where(m_seen, b_A, 0.0), b_x, PREC)
    store_rows(p_dy, b_dy, o_c, o_d, s_dyt, size, D)
    if not strong:
        b_key, b_s = key_factors(p_g, p_b, b_ref, o_c, o_m, s_g, size, M)
        b_ds *= b_key
    return b_ds, b_tail


@jit
def key_kernel(p_q, p_k, p_v, p_g, p_do, p_seg, p_chunks, p_b, p_K, p_V, p_dK, p_dV, p_p, p_dl, p_db, p_dk, p_dv, p_dg,
               scale, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, T: int, N: int, H, E,
               SHARE, M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
               BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VARLEN: tl.constexpr,
               SEGMENTS: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dk [B,T,E,D], dv [B,T,E,Dv], dg [B,T,E,M]. Grid (N, B*E)."""
    i_n, i_b, i_e = tl.program_id(0), tl.program_id(1) // E, tl.program_id(1) % E
    i_t, size, slot = chunk_span(p_chunks, i_n, i_b, T, N, C, VARLEN)
    if size <= 0:
        return
    o_c, o_m, s_g, G = tl.arange(0, C), tl.arange(0, BM), E * M, H // E
    gate = gate_offset(i_b, i_t, i_e, T, E, M)
    i_b, i_t, i_h = i_b.to(tl.int64), i_t.to(tl.int64), i_e // SHARE
    p_g, p_b = p_g + gate, p_b + gate
    strong, b_ref, b_end = reference(p_b, o_m, s_g, size, M, C, RANGE)
    b_ref = tl.where(strong, b_end, b_ref)
    b_rest = tl.exp2(b_end - b_ref)
    m_leave, m_seen = o_c >= 0, o_c[:, None] <= o_c[None, :]
    if SEGMENTS:
        b_seg, _, leaves = segment_flow(p_seg + i_b * T, o_c, i_t, size)
        m_leave = b_seg == leaves
        m_seen = m_seen & (b_seg[:, None] == b_seg[None, :])
    token, end, i_q = i_b * T + i_t, (slot + 1) * E + i_e, i_e * G
    b_ds, b_tail = key_pass(
        p_do + i_b * s_ob + i_t * s_ot + i_q * s_oh, s_ot, s_oh, p_v + i_b * s_vb + i_t * s_vt + i_h * s_vh, s_vt,
        p_p + (token * H + i_q) * M, p_V + end * (M * DV), p_dV + end * (M * DV), p_dv + (token * E + i_e) * DV,
        E * DV, 1.0, G, H, m_leave, m_seen, strong, b_ref, b_rest, p_g, p_b, o_c, o_m, s_g, size,
        M, DV, C, BM, BDV, LEVELS, PREC)  # fmt: skip
    b_ds_keys, b_tail_keys = key_pass(
        p_q + i_b * s_qb + i_t * s_qt + i_q * s_qh, s_qt, s_qh, p_k + i_b * s_kb + i_t * s_kt + i_h * s_kh, s_kt,
        p_dl + (token * H + i_q) * M, p_K + end * (M * D), p_dK + end * (M * D), p_dk + (token * E + i_e) * D,
        E * D, scale, G, H, m_leave, m_seen, strong, b_ref, b_rest, p_g, p_b, o_c, o_m, s_g, size,
        M, D, C, BM, BD, LEVELS, PREC)  # fmt: skip
    # [C, BM]
    b_ds += b_ds_keys
    b_g = load_gates(p_g, o_c, o_m, s_g, size, M)
    b_db = load_rows(p_db + gate, o_c, o_m, s_g, size, M) - write_strength(b_g) * b_ds
    b_dg = tl.cumsum(b_db, 0, reverse=True) + (b_tail + b_tail_keys)[None, :] - tl.exp(b_g) * b_ds
    store_rows(p_dg + gate, b_dg, o_c, o_m, s_g, size, M)
