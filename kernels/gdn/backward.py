"""Gated DeltaNet on the GPU, backward: the gradient of eager.py in five launches, after `prepare` and `scan`.

    local    per chunk: what its own queries send to u
    back     over the chunks of a row, from the last: dx, which is dv without its gate, and the gradient of each state;
             where the forward pass cut rows into pieces, once for what each adds, and from what `join` makes of that
    query    per chunk: dq, and with it the gradient of the read gate
    key      per chunk: dk, dbeta, the gradient of the write gate
    decay    per chunk: dg, of which query and key make parts

No operand is the transpose of a product's result: R^T and X^T are products of their own, with the factors of R and X
exchanged. And none is made before a loop and used in it (docs/measurements/kernel-notes.md says what goes wrong).
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .forward import (
    chunk_decay, chunk_edges, load_parts, load_state, load_tokens, locate, locate_row, piece_of, store_parts,
    store_state, within_reach,
)  # fmt: skip
from ..gpu.triton_helpers import (
    dot, dot_given, dot_given_left, dot_given_right, jit, load_each, load_rows, parts, segment_flow, store_rows, tl,
)  # fmt: skip


@jit
def local_kernel(p_q, p_k, p_do, p_gate, p_seg, p_chunks, p_b, p_b_low, p_du, scale, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh,
                 s_ob, s_ot, s_oh, T: int, N: int, H, E, SHARE, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                 C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, SEGMENTS: tl.constexpr,
                 READ: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """du [B,T,E,DV] fp32, as far as it comes from the chunk itself. Grid (N, B*E, blocks of BV)."""
    i_b, i_t, i_e, size, _, place = locate(p_chunks, T, N, E, C, VARLEN)
    if size <= 0:
        return
    o_c, o_d, o_v = tl.arange(0, C), tl.arange(0, BD), tl.program_id(2) * BV + tl.arange(0, BV)
    i_q, row = i_e * G, (i_b * T + i_t) * H
    b_k = load_rows(p_k + i_b * s_kb + i_t * s_kt + i_e // SHARE * s_kh, o_c, o_d, s_kt, size, D)
    b_decay = chunk_decay(p_b + place, p_b_low + place, p_seg, i_b * T, o_c, i_t, E, size, SEGMENTS, True) * scale
    b_du = tl.zeros([C, BV], tl.float32)
    for i_g in range(G):
        if READ:
            b_gate = load_each(p_gate + row + i_q + i_g, o_c, H, o_c < size)
        b_q = load_rows(p_q + i_b * s_qb + i_t * s_qt + (i_q + i_g) * s_qh, o_c, o_d, s_qt, size, D)
        b_do = load_rows(p_do + i_b * s_ob + i_t * s_ot + (i_q + i_g) * s_oh, o_c, o_v, s_ot, size, DV)
        b_P = dot_given(b_k, tl.trans(b_q), PREC) * b_decay
        if READ:
            b_P *= b_gate[None, :]
        b_P, b_P_low = parts(b_P, b_k.dtype == tl.bfloat16)
        b_du += dot_given_right(b_P, b_P_low, b_do, PREC)
    store_rows(p_du + place * DV, b_du, o_c, o_v, E * DV, size, DV)


@jit
def back_kernel(p_q, p_k, p_do, p_beta, p_gate, p_seg, p_rows, p_cu, p_b, p_b_low, p_Te, p_Te_low, p_du, p_dS1, p_dS,
                p_dx, p_dx_low, p_dS0, p_A, scale, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_ob, s_ot, s_oh, T: int, N: int,
                H, E, SHARE, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
                BV: tl.constexpr, BITS: tl.constexpr, VARLEN: tl.constexpr, SEGMENTS: tl.constexpr,
                READ: tl.constexpr, START: tl.constexpr, LAST: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dx [B,T,E,DV], and dS [slots,E,D,DV] of the state that leaves each chunk; that of the first state to p_dS0.
    START: p_dS1 [rows,pieces,E,D,DV] holds the gradient of what leaves each piece. Without p_dS only what each piece
    adds to the gradient of what enters it, A [rows,pieces,E,D,DV]; the first is wanted nowhere.
    Grid (blocks of BV, rows*E, pieces)."""
    i_s, i_b, first, length, slot, count, i_e = locate_row(p_rows, p_cu, T, N, E, VARLEN)
    i_p, pieces, begin, end = piece_of(count)
    own = (i_s // E * pieces + i_p) * E + i_e
    o_c, o_d, o_v = tl.arange(0, C), tl.arange(0, BD), tl.program_id(0) * BV + tl.arange(0, BV)
    i_q = i_e * G
    p_k += i_b * s_kb + i_e // SHARE * s_kh
    p_q += i_b * s_qb + i_q * s_qh
    p_do += i_b * s_ob + i_q * s_oh
    b_dS = tl.zeros([BD, BV], tl.float32)
    if p_dS is None:
        start = (i_b * T + first) * E + i_e
        near, _ = within_reach(p_b + start, p_b_low + start, p_seg + i_b * T if SEGMENTS else p_seg, first, begin, end,
                               length, E, C, BITS, SEGMENTS, True)  # fmt: skip
        end = begin + tl.where(i_p == 0, 0, near)
    elif START:
        b_dS += load_state(p_dS1 + own * (D * DV), o_d, o_v, D, DV)
    for i in range(0, end - begin):
        i_n = end - 1 - i
        i_t = first + i_n * C
        size = tl.minimum(length - i_n * C, C)
        place, row = (i_b * T + i_t) * E + i_e, (i_b * T + i_t) * H + i_q
        b_k = load_rows(p_k + i_t * s_kt, o_c, o_d, s_kt, size, D)
        b_T, b_T_low = load_parts(p_Te + place * C, p_Te_low + place * C, o_c, o_c, E * C, size, C)
        b_du = load_rows(p_du + place * DV, o_c, o_v, E * DV, size, DV)
        b_start, b_end, through = chunk_edges(p_b + place, p_b_low + place, p_seg, i_b * T, o_c, i_t, E, size, SEGMENTS)
        b_beta = tl.maximum(load_tokens(p_beta + place, o_c, E, size), 8e-28)
        b_high, b_low = parts(b_dS, b_k.dtype == tl.bfloat16)
        if p_dS is not None:
            store_state(p_dS + ((slot + i_n) * E + i_e) * (D * DV), b_high, o_d, o_v, D, DV)
        b_du += b_end[:, None] * dot_given_left(b_k, b_high, b_low, PREC)
        b_du, b_du_low = parts(b_du * b_beta[:, None], b_k.dtype == tl.bfloat16)
        b_dx = dot(tl.trans(b_T), tl.trans(b_T_low), b_du, b_du_low, PREC)
        if p_dS is not None:
            p_low = p_dx_low
            if p_dx_low is not None:
                p_low += place * DV
            store_parts(p_dx + place * DV, p_low, b_dx, o_c, o_v, E * DV, size, DV)
        b_dx, b_dx_low = parts(b_dx * -b_start[:, None], b_k.dtype == tl.bfloat16)
        b_dS = b_dS * through + dot_given_left(tl.trans(b_k), b_dx, b_dx_low, PREC)
        for i_g in range(G):
            b_read = b_start * scale
            if READ:
                b_read *= load_each(p_gate + row + i_g, o_c, H, o_c < size)
            b_q = load_rows(p_q + i_t * s_qt + i_g * s_qh, o_c, o_d, s_qt, size, D)
            b_do = load_rows(p_do + i_t * s_ot + i_g * s_oh, o_c, o_v, s_ot, size, DV).to(tl.float32)
            b_do *= b_read[:, None]
            b_do, b_do_low = parts(b_do, b_k.dtype == tl.bfloat16)
            b_dS += dot_given_left(tl.trans(b_q), b_do, b_do_low, PREC)
    if p_dS is None:
        store_state(p_A + own * (D * DV), b_dS, o_d, o_v, D, DV)
    elif LAST:
        ends = i_p == 0
        if ends:
            store_state(p_dS0 + i_s * (D * DV), b_dS, o_d, o_v, D, DV)


@jit
def query_kernel(p_q, p_k, p_do, p_beta, p_gate, p_seg, p_chunks, p_b, p_b_low, p_S, p_e, p_e_low, p_dq, p_dread, scale,
                 s_part, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_ob, s_ot, s_oh, T: int, N: int, H, E, SHARE,
                 G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr, VARLEN: tl.constexpr, SEGMENTS: tl.constexpr, READ: tl.constexpr,
                 PREC: tl.constexpr):  # fmt: skip
    """dq [B,T,H,D], and q_t.dq_t / r_t [parts,B,T,H], a part for each block of BK key columns. Grid (N, B*E, parts)."""
    i_b, i_t, i_e, size, slot, place = locate(p_chunks, T, N, E, C, VARLEN)
    if size <= 0:
        return
    i_part, i_q, row = tl.program_id(2), i_e * G, (i_b * T + i_t) * H
    o_c, o_d, o_v = tl.arange(0, C), i_part * BK + tl.arange(0, BK), tl.arange(0, BV)
    b_start, _, _ = chunk_edges(p_b + place, p_b_low + place, p_seg, i_b * T, o_c, i_t, E, size, SEGMENTS)
    b_decay = chunk_decay(p_b + place, p_b_low + place, p_seg, i_b * T, o_c, i_t, E, size, SEGMENTS, False)
    b_decay *= load_tokens(p_beta + place, o_c, E, size)[None, :]
    # [C, BV], [C, BK], [BK, BV]
    b_e, b_e_low = load_parts(p_e + place * DV, p_e_low + place * DV, o_c, o_v, E * DV, size, DV)
    b_k = load_rows(p_k + i_b * s_kb + i_t * s_kt + i_e // SHARE * s_kh, o_c, o_d, s_kt, size, D)
    b_S = load_state(p_S + (slot * E + i_e) * (D * DV), o_d, o_v, D, DV)
    for i in range(G):
        i_g = i_q + i
        if READ:
            b_gate = load_tokens(p_gate + row + i_g, o_c, H, size)
        b_do = load_rows(p_do + i_b * s_ob + i_t * s_ot + i_g * s_oh, o_c, o_v, s_ot, size, DV)
        b_R, b_R_low = parts(
            dot_given_left(b_do, tl.trans(b_e), tl.trans(b_e_low), PREC) * b_decay, b_e.dtype == tl.bfloat16
        )
        b_dq = b_start[:, None] * dot_given(b_do, tl.trans(b_S), PREC)
        b_dq = scale * (b_dq + dot_given_right(b_R, b_R_low, b_k, PREC))
        b_q = load_rows(p_q + i_b * s_qb + i_t * s_qt + i_g * s_qh, o_c, o_d, s_qt, size, D)
        b_dread = tl.sum(b_dq * b_q.to(tl.float32), 1)
        tl.store(p_dread + i_part * s_part + row + i_g + o_c * H, b_dread, mask=o_c < size)
        if READ:
            b_dq *= b_gate[:, None]
        store_rows(p_dq + (row + i_g) * D, b_dq, o_c, o_d, H * D, size, D)


@jit
def whole(b_x, b_low):
    """What two parts stand for, in fp32."""
    b_sum = b_x.to(tl.float32)
    if b_x.dtype == tl.bfloat16:
        b_sum += b_low.to(tl.float32)
    return b_sum


@jit
def key_kernel(p_q, p_k, p_v, p_do, p_beta, p_read, p_write, p_seg, p_chunks, p_b, p_b_low, p_S, p_dS, p_e, p_e_low,
               p_dx, p_dx_low, p_dk, p_dv, p_db, p_tail, p_dbeta, p_dwrite, scale, s_part, s_slot, s_qb, s_qt, s_qh,
               s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, T: int, N: int, H, E, SHARE, G: tl.constexpr,
               D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               VARLEN: tl.constexpr, SEGMENTS: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
               PREC: tl.constexpr):  # fmt: skip
    """dk [B,T,E,D], dbeta [B,T,E], with a write gate its gradient and dv [B,T,E,DV]. Grid (N, B*E, parts).

    db [parts,B,T,E], what keys send to b, and tail [parts,slots,E], what comes after the chunk, are sums over key
    columns, a part for each block of BK. Letters as in eager.py; Y is X + X^T.
    """
    i_b, i_t, i_e, size, slot, place = locate(p_chunks, T, N, E, C, VARLEN)
    if size <= 0:
        return
    i_part, i_q, row = tl.program_id(2), i_e * G, (i_b * T + i_t) * H
    o_c, o_d, o_v = tl.arange(0, C), i_part * BK + tl.arange(0, BK), tl.arange(0, BV)
    b_start, b_end, through = chunk_edges(p_b + place, p_b_low + place, p_seg, i_b * T, o_c, i_t, E, size, SEGMENTS)
    b_beta = load_tokens(p_beta + place, o_c, E, size)
    # [C, BV]
    b_e, b_e_low = load_parts(p_e + place * DV, p_e_low + place * DV, o_c, o_v, E * DV, size, DV)
    b_dx, b_dx_low = load_parts(p_dx + place * DV, p_dx_low + place * DV, o_c, o_v, E * DV, size, DV)
    if i_part == 0:
        if WRITE:
            b_gate = load_each(p_write + place, o_c, E, o_c < size)
            b_v = load_rows(p_v + i_b * s_vb + i_t * s_vt + i_e // SHARE * s_vh, o_c, o_v, s_vt, size, DV)
        b_dv = whole(b_dx, b_dx_low)
        b_dbeta = tl.sum(whole(b_e, b_e_low) * b_dv, 1) / tl.maximum(b_beta, 8e-28)
        tl.store(p_dbeta + place + o_c * E, b_dbeta.to(p_dbeta.dtype.element_ty), mask=o_c < size)
        if WRITE:
            b_dw = tl.sum(b_v.to(tl.float32) * b_dv, 1)
            tl.store(p_dwrite + place + o_c * E, b_dw.to(p_dwrite.dtype.element_ty), mask=o_c < size)
            b_dv *= b_gate[:, None]
            store_rows(p_dv + place * DV, b_dv, o_c, o_v, E * DV, size, DV)
    # [C, C]: X, how it weighs on b through k k^T, and Y
    m_own = o_c[:, None] == o_c[None, :]
    b_X = tl.where(m_own, 0.0, dot(b_dx, b_dx_low, tl.trans(b_e), tl.trans(b_e_low), PREC)) * b_beta[None, :]
    b_X *= chunk_decay(p_b + place, p_b_low + place, p_seg, i_b * T, o_c, i_t, E, size, SEGMENTS, False)
    b_k = load_rows(p_k + i_b * s_kb + i_t * s_kt + i_e // SHARE * s_kh, o_c, o_d, s_kt, size, D)
    b_K = dot_given(b_k, tl.trans(b_k), PREC) * b_X
    b_db = tl.sum(b_K, 0) - tl.sum(b_K, 1)
    b_decay = chunk_decay(p_b + place, p_b_low + place, p_seg, i_b * T, o_c, i_t, E, size, SEGMENTS, True)
    b_decay *= b_beta[:, None]
    b_Y = b_X + tl.where(m_own, 0.0, dot(b_e, b_e_low, tl.trans(b_dx), tl.trans(b_dx_low), PREC) * b_decay)
    b_Y, b_Y_low = parts(b_Y, b_e.dtype == tl.bfloat16)
    # [BK, BV], [C, BK]
    b_S = load_state(p_S + (slot * E + i_e) * (D * DV), o_d, o_v, D, DV)
    b_dk = -b_start[:, None] * dot_given_right(b_dx, b_dx_low, tl.trans(b_S), PREC)
    b_db += tl.sum(b_dk * b_k.to(tl.float32), 1)
    b_dk -= dot_given_right(b_Y, b_Y_low, b_k, PREC)
    b_dS = load_state(p_dS + (slot * E + i_e) * (D * DV), o_d, o_v, D, DV)
    tail = tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32)) * through
    b_write = (b_end * b_beta)[:, None] * dot_given_right(b_e, b_e_low, tl.trans(b_dS), PREC)
    tail += tl.sum(b_write * b_k.to(tl.float32))
    for i in range(G):
        i_g = i_q + i
        b_read = tl.full([C], scale, tl.float32)
        if READ:
            b_read *= load_each(p_read + row + i_g, o_c, H, o_c < size)
        b_do = load_rows(p_do + i_b * s_ob + i_t * s_ot + i_g * s_oh, o_c, o_v, s_ot, size, DV)
        b_q = load_rows(p_q + i_b * s_qb + i_t * s_qt + i_g * s_qh, o_c, o_d, s_qt, size, D)
        b_R = dot_given_right(b_e, b_e_low, tl.trans(b_do), PREC) * (b_decay * b_read[None, :])
        b_R, b_R_low = parts(b_R, b_e.dtype == tl.bfloat16)
        b_write += dot_given_right(b_R, b_R_low, b_q, PREC)
    b_db -= tl.sum(b_write * b_k.to(tl.float32), 1)
    store_rows(p_dk + place * D, b_dk + b_write, o_c, o_d, E * D, size, D)
    tl.store(p_db + i_part * s_part + place + o_c * E, b_db, mask=o_c < size)
    tl.store(p_tail + i_part * s_slot + slot * E + i_e, tail)


@jit
def decay_kernel(p_db, p_tail, p_dread, p_gate, p_seg, p_chunks, p_dg, s_part, s_slot, s_query, T: int, N: int, H, E,
                 G: tl.constexpr, C: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, VARLEN: tl.constexpr,
                 SEGMENTS: tl.constexpr, READ: tl.constexpr):  # fmt: skip
    """dg [B,T,E] from what queries and keys send to b, and what comes after. Grid (N, B*E)."""
    i_b, i_t, i_e, size, slot, place = locate(p_chunks, T, N, E, C, VARLEN)
    if size <= 0:
        return
    o_c, row, tail = tl.arange(0, C), (i_b * T + i_t) * H, 0.0
    b_db = tl.zeros([C], tl.float32)
    for i in tl.static_range(KEYS):
        b_db += load_tokens(p_db + i * s_part + place, o_c, E, size)
        tail += tl.load(p_tail + i * s_slot + slot * E + i_e)
    for i in tl.static_range(QUERIES):
        for i_g in range(i_e * G, i_e * G + G):
            b_query = load_tokens(p_dread + i * s_query + row + i_g, o_c, H, size)
            if READ:
                b_query *= load_tokens(p_gate + row + i_g, o_c, H, size)
            b_db += b_query
    if SEGMENTS:  # a gate acts inside its own document
        b_seg, _, leaves = segment_flow(p_seg + i_b * T, o_c, i_t, size)
        m_after = (o_c[:, None] <= o_c[None, :]) & (b_seg[:, None] == b_seg[None, :])
        b_dg = tl.sum(tl.where(m_after, b_db[None, :], 0.0), 1) + tl.where(b_seg == leaves, tail, 0.0)
    else:
        b_dg = tl.cumsum(b_db, 0, reverse=True) + tail
    tl.store(p_dg + place + o_c * E, b_dg.to(p_dg.dtype.element_ty), mask=o_c < size)
