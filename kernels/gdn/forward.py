"""Gated DeltaNet on the GPU, forward: the chunk form of eager.py in three launches, and the decode step in one.

    prepare  per chunk: b, and the inverse Te
    scan     over the chunks of a row, a block of value columns each: e, and the state that enters every chunk
    output   per chunk: o, for the query heads of one state one after another

Where heads are too few for a GPU, rows are cut into pieces that are scanned side by side. A piece maps the state that
enters it to M S + A. `scan` runs twice: once for A, from zero, and for M, whose columns start as the identity and meet
no values; then from what `join` makes of those. What decays by more than 2^-BITS on its way is not followed: chunks
that far from the end of a piece are left out of A, and M counts as zero.

Scratch is bf16 for bf16 inputs, where each tensor costs one rounding and counts as given afterwards, else fp32; Te, and
for gradients e and dx, keep 16 bits as two bf16 parts: dk and the gates have products of two of them. Slots: a row of N
chunks owns N + 1, slot n for what enters chunk n (launch.py).
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from ..gpu.triton_helpers import (
    chunk, dot, dot_given, dot_given_left, dot_given_right, jit, load_rows, parts, segment_flow, store_rows, tl,
)  # fmt: skip


@jit
def locate(p_chunks, T, N, E, C, VARLEN: tl.constexpr):
    """For grid (N, B*E): batch row, first token of the chunk, state head, tokens in it, its slot, and the place of
    its first token in [B,T,E]."""
    i_n, i_b, i_e = tl.program_id(0), (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    i_t, size, slot = chunk(p_chunks, i_n, i_b, T, N, C, VARLEN)
    return i_b, i_t, i_e, size, slot, (i_b * T + i_t) * E + i_e


@jit
def locate_row(p_rows, p_cu, T, N, E, VARLEN: tl.constexpr):
    """For grid (.., rows*E): state number, batch row, first token, tokens, first slot, chunks, state head."""
    i_r, i_e = (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    if VARLEN:
        i_b = i_r * 0
        first = tl.load(p_cu + i_r).to(tl.int64)
        length = (tl.load(p_cu + i_r + 1) - first).to(tl.int32)
        slot, count = tl.load(p_rows + 2 * i_r).to(tl.int64), tl.load(p_rows + 2 * i_r + 1)
    else:
        i_b, first, length, slot, count = i_r, i_r * 0, T, i_r * (N + 1), N
    return i_r * E + i_e, i_b, first, length, slot, count, i_e


@jit
def piece_of(count):
    """For grid (.., rows*E, pieces): number of the piece, pieces, its first chunk and the one after its last."""
    i_p, pieces = tl.program_id(2), tl.num_programs(2)
    begin = tl.minimum(i_p * tl.cdiv(count, pieces), count)
    return i_p, pieces, begin, tl.minimum(begin + tl.cdiv(count, pieces), count)


@jit
def within_reach(p_b, p_b_low, p_seg, first, begin, end, length, E, C: tl.constexpr, BITS: tl.constexpr,
                 SEGMENTS: tl.constexpr, REVERSE: tl.constexpr):  # fmt: skip
    """Chunks of a piece that keep more than 2^-BITS on their way to its end (REVERSE: from its start), and whether all
    of it keeps no more. b is that of the row and state head, the documents those of the batch row."""
    o_n, near = tl.arange(0, 64), 0 * end
    total = near.to(tl.float32)
    for i in range(0, tl.cdiv(end - begin, 64)):
        o_away = i * 64 + o_n
        m_n = o_away < end - begin
        if REVERSE:
            i_n = begin + o_away
        else:
            i_n = end - 1 - o_away
        o_last = tl.minimum((i_n + 1) * C, length) - 1
        b_sum = tl.load(p_b + o_last * E, mask=m_n, other=0.0) + tl.load(p_b_low + o_last * E, mask=m_n, other=0.0)
        if SEGMENTS:
            entered = tl.load(p_seg + tl.maximum(first + i_n * C - 1, 0), mask=m_n, other=0)
            leaves = tl.load(p_seg + first + o_last, mask=m_n, other=0)
            b_sum = tl.where(entered == leaves, b_sum, -1e4)
        b_between = total + tl.cumsum(b_sum, 0) - b_sum
        near += tl.sum((m_n & (b_between > -BITS)).to(tl.int32))
        total += tl.sum(b_sum)
    return near, total <= -BITS


@jit
def load_tokens(p_x, o_c, s_t, size):
    """One number a token [C] in fp32, 0 outside."""
    return tl.load(p_x + o_c * s_t, mask=o_c < size, other=0.0).to(tl.float32)


@jit
def load_sums(p_b, p_b_low, o_c, E, size):
    """b as two numbers, the first a multiple of 1/256; rows past the end repeat the last."""
    o_b = tl.minimum(o_c, size - 1) * E
    return tl.load(p_b + o_b), tl.load(p_b_low + o_b)


@jit
def chunk_edges(p_b, p_b_low, p_seg, i_row, o_c, i_t, E, size, SEGMENTS: tl.constexpr):
    """e^{b_t} and e^{b_C-b_t} [C], e^{b_C}: 0 where documents part."""
    b_high, b_low = load_sums(p_b, p_b_low, o_c, E, size)
    end_high, end_low = tl.load(p_b + (size - 1) * E), tl.load(p_b_low + (size - 1) * E)
    b_start = tl.exp2(b_high + b_low)
    b_end = tl.exp2((end_high - b_high) + (end_low - b_low))
    through = tl.exp2(end_high + end_low)
    if SEGMENTS:
        b_seg, entered, leaves = segment_flow(p_seg + i_row, o_c, i_t, size)
        b_start = tl.where(b_seg == entered, b_start, 0.0)
        b_end = tl.where(b_seg == leaves, b_end, 0.0)
        through = tl.where(entered == leaves, through, 0.0)
    return b_start, b_end, through


@jit
def chunk_decay(p_b, p_b_low, p_seg, i_row, o_c, i_t, E, size, SEGMENTS: tl.constexpr, TURNED: tl.constexpr):
    """e^{b_i-b_j} for j <= i of one document, else 0: [C,C] by i and j, TURNED by j and i."""
    b_high, b_low = load_sums(p_b, p_b_low, o_c, E, size)
    b_d = (b_high[:, None] - b_high[None, :]) + (b_low[:, None] - b_low[None, :])
    m_d = o_c[:, None] >= o_c[None, :]
    if TURNED:
        b_d = -b_d
        m_d = o_c[:, None] <= o_c[None, :]
    if SEGMENTS:
        b_seg, _, _ = segment_flow(p_seg + i_row, o_c, i_t, size)
        m_d = m_d & (b_seg[:, None] == b_seg[None, :])
    return tl.exp2(tl.where(m_d, b_d, -float("inf")))


@jit
def load_parts(p_x, p_low, o_c, o_v, s_t, size, D: tl.constexpr):
    """Rows [C,BV] in two bf16 parts (fp32: one, twice), as operands; zero outside."""
    b_x = load_rows(p_x, o_c, o_v, s_t, size, D)
    if b_x.dtype == tl.bfloat16:
        b_low = load_rows(p_low, o_c, o_v, s_t, size, D)
    else:
        b_low = b_x
    return b_x, b_low


@jit
def store_parts(p_x, p_low, b_x, o_c, o_v, s_t, size, D: tl.constexpr):
    """Rows [C,BV]; what their rounding leaves out to p_low unless that is None."""
    store_rows(p_x, b_x, o_c, o_v, s_t, size, D)
    if p_low is not None:
        store_rows(p_low, b_x - b_x.to(p_x.dtype.element_ty).to(tl.float32), o_c, o_v, s_t, size, D)


@jit
def load_state(p_S, o_d, o_v, D: tl.constexpr, DV: tl.constexpr):
    """A state [BD,BV] of [..,D,DV]."""
    return load_rows(p_S, o_d, o_v, DV, D, DV)


@jit
def store_state(p_S, b_S, o_d, o_v, D: tl.constexpr, DV: tl.constexpr):
    store_rows(p_S, b_S, o_d, o_v, DV, D, DV)


@jit
def inverse(b_N, o_c, C: tl.constexpr, LEVELS: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr):
    """(I + N)^-1 for N [C,C] with nothing on and above the diagonal; C is 8 * 2^LEVELS."""
    BLOCKS: tl.constexpr = C // 8
    o_b, o_r = tl.arange(0, BLOCKS), tl.arange(0, 8)
    m_own = o_b[:, None, None, None] == o_b[None, None, :, None]
    # [BLOCKS, 8, 8]: the blocks on the diagonal
    b_n = tl.sum(tl.where(m_own, tl.reshape(b_N, [BLOCKS, 8, BLOCKS, 8]), 0.0), 2)
    b_X = (o_r[:, None] == o_r[None, :])[None, :, :].to(tl.float32) + b_n * 0.0
    for i in tl.static_range(7):
        b_row = tl.sum(tl.where((o_r == i)[None, :, None], b_X, 0.0), 1)
        b_column = tl.sum(tl.where((o_r == i)[None, None, :], b_n, 0.0), 2)
        b_X -= b_column[:, :, None] * b_row[:, None, :]
    b_T = tl.reshape(tl.where(m_own, b_X[:, :, None, :], 0.0), [C, C])
    for i in tl.static_range(LEVELS):
        o_w = o_c // (8 << i)
        m_pair = (o_w[:, None] % 2 == 1) & (o_w[:, None] == o_w[None, :] + 1)
        b_off, b_off_low = parts(tl.where(m_pair, b_N, 0.0), SPLIT)
        b_left, b_left_low = parts(b_T, SPLIT)
        b_x, b_x_low = parts(dot(b_off, b_off_low, b_left, b_left_low, PREC), SPLIT)
        b_T -= dot(b_left, b_left_low, b_x, b_x_low, PREC)
    return b_T


@jit
def prepare_kernel(p_k, p_g, p_beta, p_seg, p_chunks, p_b, p_b_low, p_Te, p_Te_low, s_kb, s_kt, s_kh,
                   T: int, N: int, E, SHARE, D: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BD: tl.constexpr,
                   VARLEN: tl.constexpr, SEGMENTS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """b [B,T,E] in two parts, and the rows of Te [B,T,E,C]. Grid (N, B*E)."""
    i_b, i_t, i_e, size, _, place = locate(p_chunks, T, N, E, C, VARLEN)
    if size <= 0:
        return
    o_c, o_d = tl.arange(0, C), tl.arange(0, BD)
    b_k = load_rows(p_k + i_b * s_kb + i_t * s_kt + i_e // SHARE * s_kh, o_c, o_d, s_kt, size, D)
    # fp64: a weak gate after a strong one keeps its digits; e^-30 is 0 beside any rounding
    b_g = tl.maximum(load_tokens(p_g + place, o_c, E, size), -30.0).to(tl.float64)
    b_sum = tl.cumsum(b_g, 0) * 1.4426950408889634
    b_high = tl.floor(b_sum.to(tl.float32) * 256.0) * 0.00390625
    b_low = (b_sum - b_high.to(tl.float64)).to(tl.float32)
    tl.store(p_b + place + o_c * E, b_high, mask=o_c < size)
    tl.store(p_b_low + place + o_c * E, b_low, mask=o_c < size)
    m_pair = o_c[:, None] > o_c[None, :]
    if SEGMENTS:
        b_seg, _, _ = segment_flow(p_seg + i_b * T, o_c, i_t, size)
        m_pair = m_pair & (b_seg[:, None] == b_seg[None, :])
    b_d = (b_high[:, None] - b_high[None, :]) + (b_low[:, None] - b_low[None, :])
    b_beta = tl.maximum(load_tokens(p_beta + place, o_c, E, size), 8e-28)
    b_N = dot_given(b_k, tl.trans(b_k), PREC) * tl.exp2(tl.where(m_pair, b_d, -float("inf"))) * b_beta[None, :]
    b_T = inverse(b_N, o_c, C, LEVELS, b_k.dtype == tl.bfloat16, PREC)
    b_T, b_T_low = parts(b_T, b_k.dtype == tl.bfloat16)
    store_rows(p_Te + place * C, b_T, o_c, o_c, E * C, size, C)
    if b_k.dtype == tl.bfloat16:
        store_rows(p_Te_low + place * C, b_T_low, o_c, o_c, E * C, size, C)


@jit
def scan_kernel(p_k, p_v, p_beta, p_gate, p_seg, p_rows, p_cu, p_b, p_b_low, p_Te, p_Te_low, p_S0, p_S, p_e, p_e_low,
                p_S1, p_A, p_M, p_M_low, p_dead, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, T: int, N: int, E, SHARE,
                D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
                BITS: tl.constexpr, VARLEN: tl.constexpr, SEGMENTS: tl.constexpr, WRITE: tl.constexpr,
                START: tl.constexpr, LAST: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """S [slots,E,D,DV] and e [B,T,E,DV]; the last state to p_S1 [rows,E,D,DV]. Grid (blocks of BV, rows*E, pieces).
    START: p_S0 [rows,pieces,E,D,DV] holds what enters each piece.

    Without p_S only A [rows,pieces,E,D,DV], M [rows,pieces,E,D,D] and whether M counts as zero, [rows,pieces,E]. Grid
    (blocks of BV in DV and in D, rows*E, pieces). The last A is wanted nowhere; the first M only with START.
    """
    i_s, i_b, first, length, slot, count, i_e = locate_row(p_rows, p_cu, T, N, E, VARLEN)
    i_p, pieces, begin, end = piece_of(count)
    own = (i_s // E * pieces + i_p) * E + i_e
    BLOCKS: tl.constexpr = (DV + BV - 1) // BV
    i_v = tl.program_id(0)
    o_c, o_d = tl.arange(0, C), tl.arange(0, BD)
    p_k += i_b * s_kb + i_e // SHARE * s_kh
    p_v += i_b * s_vb + i_e // SHARE * s_vh
    o_v = i_v * BV + tl.arange(0, BV)
    b_S = tl.zeros([BD, BV], tl.float32)
    if p_S is None:
        moves = i_v >= BLOCKS
        o_v -= tl.where(moves, BLOCKS * BV, 0)
        b_S += (moves & (o_d[:, None] == o_v[None, :])).to(tl.float32)
        row = (i_b * T + first) * E + i_e
        near, dead = within_reach(p_b + row, p_b_low + row, p_seg + i_b * T if SEGMENTS else p_seg, first, begin, end,
                                  length, E, C, BITS, SEGMENTS, False)  # fmt: skip
        if not START:
            dead = dead | (i_p == 0)
        if i_v == 0:
            tl.store(p_dead + own, dead.to(tl.int32))
        near = tl.where(tl.where(moves, dead, i_p == pieces - 1), 0, near)
        begin = end - near
    elif START:
        b_S += load_state(p_S0 + own * (D * DV), o_d, o_v, D, DV)
    if WRITE:
        p_gate += (i_b * T + first) * E + i_e
        b_gate = load_tokens(p_gate + begin * C * E, o_c, E, length - begin * C)
    for i_n in range(begin, end):
        i_t = first + i_n * C
        size = tl.minimum(length - i_n * C, C)
        place = (i_b * T + i_t) * E + i_e
        b_k = load_rows(p_k + i_t * s_kt, o_c, o_d, s_kt, size, D)
        if p_S is None:
            b_v = load_rows(p_v + i_t * s_vt, o_c, o_v, s_vt, tl.where(moves, 0, size), DV)
        else:
            b_v = load_rows(p_v + i_t * s_vt, o_c, o_v, s_vt, size, DV)
        b_T, b_T_low = load_parts(p_Te + place * C, p_Te_low + place * C, o_c, o_c, E * C, size, C)
        b_start, b_end, through = chunk_edges(p_b + place, p_b_low + place, p_seg, i_b * T, o_c, i_t, E, size, SEGMENTS)
        b_end *= load_tokens(p_beta + place, o_c, E, size)
        b_high, b_low = parts(b_S, b_k.dtype == tl.bfloat16)
        if p_S is not None:
            store_state(p_S + ((slot + i_n) * E + i_e) * (D * DV), b_high, o_d, o_v, D, DV)
        b_x = b_v.to(tl.float32)
        if WRITE:
            b_x *= b_gate[:, None]
            # Of the next chunk: a load of this one would be buffered in shared memory, of which two programs have none
            # left, and they would no longer fit a multiprocessor together.
            b_gate = load_tokens(p_gate + (i_n + 1) * C * E, o_c, E, length - (i_n + 1) * C)
        b_x -= b_start[:, None] * dot_given_left(b_k, b_high, b_low, PREC)
        b_x, b_x_low = parts(b_x, b_k.dtype == tl.bfloat16)
        b_e = dot(b_T, b_T_low, b_x, b_x_low, PREC)
        if p_S is not None:
            p_low = p_e_low
            if p_e_low is not None:
                p_low += place * DV
            store_parts(p_e + place * DV, p_low, b_e, o_c, o_v, E * DV, size, DV)
        b_u, b_u_low = parts(b_e * b_end[:, None], b_k.dtype == tl.bfloat16)
        b_S = b_S * through + dot_given_left(tl.trans(b_k), b_u, b_u_low, PREC)
    if p_S is None:
        if moves:
            if not dead:
                p_low = p_M_low
                if p_M_low is not None:
                    p_low += own * (D * D)
                store_parts(p_M + own * (D * D), p_low, b_S, o_d, o_v, D, D, D)
        else:
            store_state(p_A + own * (D * DV), b_S, o_d, o_v, D, DV)
    elif LAST:
        ends = i_p == pieces - 1
        if ends:
            store_state(p_S1 + i_s * (D * DV), b_S, o_d, o_v, D, DV)


@jit
def join_kernel(p_A, p_M, p_M_low, p_dead, p_S0, p_S, E, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
                BV: tl.constexpr, START: tl.constexpr, REVERSE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """What enters each piece, [rows,pieces,E,D,DV]: M S + A over those before it, the first from p_S0 [rows,E,D,DV].
    REVERSE: the gradient of what leaves each piece, M^T dS + A over those after it.
    Grid (blocks of BV, rows*E, pieces).

    Every program goes its way from the last piece before its own that keeps nothing.
    """
    i_s, i_e, i_p, pieces = tl.program_id(1).to(tl.int64), tl.program_id(1) % E, tl.program_id(2), tl.num_programs(2)
    own = i_s // E * pieces * E + i_e
    o_d, o_v, o_p = tl.arange(0, BD), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, 64)
    # Steps of the walk, and the piece of step j: origin + j * step.
    if REVERSE:
        steps, origin, step, s_i, s_j = pieces - 1 - i_p, pieces - 1, -1, 1, D
    else:
        steps, origin, step, s_i, s_j = i_p, 0, 1, D, 1
    m_p = o_p < steps
    b_dead = tl.load(p_dead + own + (origin + o_p * step) * E, mask=m_p, other=0)
    start = tl.max(tl.where(m_p & (b_dead != 0), o_p + 1, 0), 0)
    i_a = own + (origin + tl.maximum(start - 1, 0) * step) * E
    b_S = load_rows(p_A + i_a * (D * DV), o_d, o_v, DV, tl.where(start > 0, D, 0), DV)
    if START:
        b_S += load_rows(p_S0 + i_s * (D * DV), o_d, o_v, DV, tl.where(start > 0, 0, D), DV)
    m_M = (o_d < D)[:, None] & (o_d < D)[None, :]
    o_M = o_d[:, None] * s_i + o_d[None, :] * s_j
    for j in range(start, steps):
        place = own + (origin + j * step) * E
        b_M = tl.load(p_M + place * (D * D) + o_M, mask=m_M, other=0.0)
        if b_M.dtype == tl.bfloat16:
            b_M_low = tl.load(p_M_low + place * (D * D) + o_M, mask=m_M, other=0.0)
        else:
            b_M_low = b_M
        b_high, b_low = parts(b_S, b_M.dtype == tl.bfloat16)
        b_S = dot(b_M, b_M_low, b_high, b_low, PREC) + load_state(p_A + place * (D * DV), o_d, o_v, D, DV)
    store_state(p_S + (own + i_p * E) * (D * DV), b_S, o_d, o_v, D, DV)


@jit
def output_kernel(p_q, p_k, p_beta, p_gate, p_seg, p_chunks, p_b, p_b_low, p_S, p_e, p_o, scale,
                  s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, T: int, N: int, H, E, SHARE, G: tl.constexpr, D: tl.constexpr,
                  DV: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr,
                  SEGMENTS: tl.constexpr, READ: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """o [B,T,H,DV]. Grid (N, B*E, blocks of BV)."""
    i_b, i_t, i_e, size, slot, place = locate(p_chunks, T, N, E, C, VARLEN)
    if size <= 0:
        return
    o_c, o_d, o_v = tl.arange(0, C), tl.arange(0, BD), tl.program_id(2) * BV + tl.arange(0, BV)
    i_q, row = i_e * G, (i_b * T + i_t) * H
    b_k = load_rows(p_k + i_b * s_kb + i_t * s_kt + i_e // SHARE * s_kh, o_c, o_d, s_kt, size, D)
    b_e = load_rows(p_e + place * DV, o_c, o_v, E * DV, size, DV)
    b_S = load_state(p_S + (slot * E + i_e) * (D * DV), o_d, o_v, D, DV)
    b_start, _, _ = chunk_edges(p_b + place, p_b_low + place, p_seg, i_b * T, o_c, i_t, E, size, SEGMENTS)
    b_decay = chunk_decay(p_b + place, p_b_low + place, p_seg, i_b * T, o_c, i_t, E, size, SEGMENTS, False)
    b_decay *= load_tokens(p_beta + place, o_c, E, size)[None, :]
    for i_g in range(G):
        # Gates come with everything else, here and below: behind a product they would be waited for.
        b_scale = tl.full([C], scale, tl.float32)
        if READ:
            b_scale *= load_tokens(p_gate + row + i_q + i_g, o_c, H, size)
        b_q = load_rows(p_q + i_b * s_qb + i_t * s_qt + (i_q + i_g) * s_qh, o_c, o_d, s_qt, size, D)
        b_P, b_P_low = parts(dot_given(b_q, tl.trans(b_k), PREC) * b_decay, b_k.dtype == tl.bfloat16)
        b_o = b_start[:, None] * dot_given(b_q, b_S, PREC) + dot_given_right(b_P, b_P_low, b_e, PREC)
        store_rows(p_o + (row + i_q + i_g) * DV, b_o * b_scale[:, None], o_c, o_v, H * DV, size, DV)


@jit
def step_kernel(p_q, p_k, p_v, p_g, p_beta, p_read, p_write, p_padding, p_rows, p_S, p_o, p_S1, scale, s_qb, s_qh,
                s_kb, s_kh, s_vb, s_vh, s_pb, s_S, H, E, SHARE, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
                BV: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """One token of every row: o [B,1,H,DV] and the new state. Grid (blocks of BV, E, B)."""
    i_e, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_d, o_v, place = tl.arange(0, BD), tl.program_id(0) * BV + tl.arange(0, BV), i_b * E + i_e
    g, beta = tl.load(p_g + place).to(tl.float32), tl.load(p_beta + place).to(tl.float32)
    real, row, held = 1.0, i_b, D
    if PADDED:
        real = tl.load(p_padding + i_b * s_pb).to(tl.float32)
    if p_rows is not None:
        row = tl.load(p_rows + i_b).to(tl.int64)
        real, held = tl.where(row >= 0, real, 0.0), tl.where(row >= 0, D, 0)
    memory = row * s_S + i_e * (D * DV)
    # [BD], [BV], [BD, BV]
    b_k = tl.load(p_k + i_b * s_kb + i_e // SHARE * s_kh + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + i_b * s_vb + i_e // SHARE * s_vh + o_v, mask=o_v < DV, other=0.0).to(tl.float32)
    if WRITE:
        b_v *= tl.load(p_write + place).to(tl.float32)
    b_S = load_rows(p_S + memory, o_d, o_v, DV, held, DV) * tl.exp(tl.maximum(g, -30.0) * real)
    b_e = (b_v - tl.sum(b_k[:, None] * b_S, 0)) * (beta * real)
    b_S += b_k[:, None] * b_e[None, :]
    store_rows(p_S1 + memory, b_S, o_d, o_v, DV, held, DV)
    for i_q in range(i_e * (H // E), (i_e + 1) * (H // E)):
        b_q = tl.load(p_q + i_b * s_qb + i_q * s_qh + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        b_o = tl.sum(b_q[:, None] * b_S, 0) * (scale * real)
        if READ:
            b_o *= tl.load(p_read + i_b * H + i_q).to(tl.float32)
        tl.store(p_o + (i_b * H + i_q) * DV + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < DV)
