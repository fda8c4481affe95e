"""The window's kernels: softmax over the band of the last W tokens and the sink, and its gradients.

With s_ti = c q_t.k_i over the keys i that t sees, Z_t = sum_i e^{s_ti}, p = e^s / Z and dm_t what arrives at log Z_t:

    forward  o_t = sum_i p_ti v_i and log Z_t, the largest score so far taken out
    queries  delta_t = do_t.o_t - dm_t, and dq_t = c sum_i ds_ti k_i, where ds_ti = p_ti (do_t.v_i - delta_t)
    sinks    for each block of C queries, what its queries beyond the reach give to the sink of their document
    gather   the sum of that over the blocks and query heads of a document
    keys     dk_i = c sum_t ds_ti q_t and dv_i = sum_t p_ti do_t over the queries within reach, and what `gather` found

The reach is R = max(W, C) tokens: whoever sees a key further back, in a block of C queries, is of the document that the
block begins in. Documents are spans of tokens in order: `begin` and `end` [B,T] int32 of each token's own, the end
excluded. Every sum has one order, so that the same input gives the same bits.

delta takes o from two numbers in half precision: beside large scores ds is a difference of what is nearly equal, where
o rounded once would double the error of dq and dk.

Letters: B batch, T time, H query heads, E KV heads, G = H/E, D key dim, DV value dim, W window, S sink, BM queries and
BN keys of a tile, C queries of a block, N blocks, X = S (D + DV) numbers of a sink.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from ..gpu.triton_helpers import dot_given, jit, load_each, load_rows, store_rows, tl

# What log Z is measured in, inside: exp2 is the instruction that there is.
LOG2E = 1.4426950408889634
# Below every score; a row of which nothing was seen yet keeps finite numbers.
LOWEST = -1e38


@jit
def dot_computed(b_x, b_y, b_z, PREC: tl.constexpr):
    """x @ y + z in fp32 where y was given: computed x is rounded as bf16 y is, as PyTorch rounds weights."""
    if b_y.dtype == tl.bfloat16:
        b_z = dot_given(b_x.to(tl.bfloat16), b_y, PREC, b_z)
    else:
        b_z = dot_given(b_x, b_y, PREC, b_z)
    return b_z


@jit
def begins(p_begin, row, o_t, T, DOCS: tl.constexpr):
    """Where the documents of tokens o_t begin; `row` is the row's first token."""
    b_begin = o_t * 0
    if DOCS:
        b_begin = tl.load(p_begin + row + o_t, mask=o_t < T, other=0)
    return b_begin


@jit
def ends(p_end, row, o_t, T, DOCS: tl.constexpr):
    """Where the documents of tokens o_t end."""
    b_end = o_t * 0 + T
    if DOCS:
        b_end = tl.load(p_end + row + o_t, mask=o_t < T, other=0)
    return b_end


@jit
def tiles_seen(i_q, begin, T, W, S, BM: tl.constexpr, BN: tl.constexpr):
    """What a block of queries from i_q, whose first document begins at `begin`, meets: the tiles of its sink before the
    band, all tiles, where the band begins."""
    low = tl.maximum(i_q - W + 1, begin)
    sinks = tl.cdiv(tl.maximum(tl.minimum(begin + S, low) - begin, 0), BN)
    return sinks, sinks + tl.cdiv(tl.minimum(i_q + BM, T) - low, BN), low


@jit
def tile_seen(i_j, sinks, begin, low, T, S, BN: tl.constexpr):
    """Of tile i_j, the first key and how many there are."""
    i_k = tl.where(i_j < sinks, begin + i_j * BN, low + (i_j - sinks) * BN)
    return i_k, tl.where(i_j < sinks, tl.minimum(begin + S, low), T) - i_k


@jit
def sees(o_t, b_begin, o_i, W, S):
    """Whether queries see keys, one a row and the other a column."""
    return (o_i <= o_t) & (o_i >= b_begin) & ((o_i > o_t - W) | (o_i < b_begin + S))


@jit
def forward_kernel(p_q, p_k, p_v, p_begin, p_o, p_low, p_mass, scale, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt,
                   s_vh, T: int, N: int, W, S, H, G, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
                   BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DOCS: tl.constexpr, LOG2E: tl.constexpr,
                   LOWEST: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """o [B,T,H,DV], what its rounding left out, and log Z [B,T,H]; p_low may be None. Grid (B*H * N blocks of BM
    queries)."""
    i_q, i_bh = tl.program_id(0) % N * BM, tl.program_id(0) // N
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_m, o_n, o_d, o_v = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    row, first = i_b * T, i_q.to(tl.int64)
    p_k += i_b * s_kb + i_h // G * s_kh
    p_v += i_b * s_vb + i_h // G * s_vh
    b_q = load_rows(p_q + i_b * s_qb + i_h * s_qh + first * s_qt, o_m, o_d, s_qt, T - i_q, D)
    b_begin, begin = begins(p_begin, row, i_q + o_m, T, DOCS), begins(p_begin, row, i_q, T, DOCS)
    sinks, tiles, low = tiles_seen(i_q, begin, T, W, S, BM, BN)
    b_top, b_sum = tl.zeros([BM], tl.float32) + LOWEST, tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BV], tl.float32)
    for i_j in range(0, tiles):
        i_k, size = tile_seen(i_j, sinks, begin, low, T, S, BN)
        b_k = load_rows(p_k + i_k.to(tl.int64) * s_kt, o_n, o_d, s_kt, size, D)
        b_v = load_rows(p_v + i_k.to(tl.int64) * s_vt, o_n, o_v, s_vt, size, DV)
        m_s = sees((i_q + o_m)[:, None], b_begin[:, None], (i_k + o_n)[None, :], W, S) & (o_n < size)[None, :]
        b_s = tl.where(m_s, dot_given(b_q, tl.trans(b_k), PREC) * (scale * LOG2E), -float("inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 1))
        b_p, b_keep = tl.exp2(b_s - b_new[:, None]), tl.exp2(b_top - b_new)
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_o = dot_computed(b_p, b_v, b_o * b_keep[:, None], PREC)
        b_top = b_new
    own, b_o = (row + first) * H + i_h, b_o / b_sum[:, None]
    store_rows(p_o + own * DV, b_o, o_m, o_v, H * DV, T - i_q, DV)
    if p_low is not None:
        b_o -= b_o.to(p_o.dtype.element_ty).to(tl.float32)
        store_rows(p_low + own * DV, b_o, o_m, o_v, H * DV, T - i_q, DV)
    tl.store(p_mass + own + o_m * H, (b_top + tl.log2(b_sum)) / LOG2E, mask=o_m < T - i_q)


@jit
def queries_kernel(p_q, p_k, p_v, p_begin, p_o, p_low, p_mass, p_do, p_dmass, p_delta, p_dq, scale, s_qb, s_qt, s_qh,
                   s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, T: int, N: int, W, S, H, G, D: tl.constexpr, DV: tl.constexpr,
                   BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DOCS: tl.constexpr,
                   LOG2E: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dq [B,T,H,D] and delta [B,T,H]; p_low and p_dmass may be None. Grid (B*H * N blocks of BM queries)."""
    i_q, i_bh = tl.program_id(0) % N * BM, tl.program_id(0) // N
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_m, o_n, o_d, o_v = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    row, first = i_b * T, i_q.to(tl.int64)
    size_q, own = T - i_q, (row + first) * H + i_h
    p_k += i_b * s_kb + i_h // G * s_kh
    p_v += i_b * s_vb + i_h // G * s_vh
    b_do = load_rows(p_do + own * DV, o_m, o_v, H * DV, size_q, DV)
    b_o = load_rows(p_o + own * DV, o_m, o_v, H * DV, size_q, DV).to(tl.float32)
    if p_low is not None:
        b_o += load_rows(p_low + own * DV, o_m, o_v, H * DV, size_q, DV).to(tl.float32)
    b_delta = tl.sum(b_do.to(tl.float32) * b_o, 1)
    if p_dmass is not None:
        b_delta -= tl.load(p_dmass + own + o_m * H, mask=o_m < size_q, other=0.0)
    tl.store(p_delta + own + o_m * H, b_delta, mask=o_m < size_q)
    b_mass = tl.load(p_mass + own + o_m * H, mask=o_m < size_q, other=0.0) * LOG2E
    b_q = load_rows(p_q + i_b * s_qb + i_h * s_qh + first * s_qt, o_m, o_d, s_qt, size_q, D)
    b_begin, begin = begins(p_begin, row, i_q + o_m, T, DOCS), begins(p_begin, row, i_q, T, DOCS)
    sinks, tiles, low = tiles_seen(i_q, begin, T, W, S, BM, BN)
    b_dq = tl.zeros([BM, BD], tl.float32)
    for i_j in range(0, tiles):
        i_k, size = tile_seen(i_j, sinks, begin, low, T, S, BN)
        b_k = load_rows(p_k + i_k.to(tl.int64) * s_kt, o_n, o_d, s_kt, size, D)
        b_v = load_rows(p_v + i_k.to(tl.int64) * s_vt, o_n, o_v, s_vt, size, DV)
        m_s = sees((i_q + o_m)[:, None], b_begin[:, None], (i_k + o_n)[None, :], W, S) & (o_n < size)[None, :]
        b_s = dot_given(b_q, tl.trans(b_k), PREC) * (scale * LOG2E)
        b_p = tl.exp2(tl.where(m_s, b_s - b_mass[:, None], -float("inf")))
        b_ds = b_p * (dot_given(b_do, tl.trans(b_v), PREC) - b_delta[:, None])
        b_dq = dot_computed(b_ds, b_k, b_dq, PREC)
    store_rows(p_dq + own * D, b_dq * scale, o_m, o_d, H * D, size_q, D)


@jit
def from_queries(p_q, p_do, p_mass, p_delta, b_k, b_v, m_s, o_m, o_d, o_v, scale, s_qt, H, size, D: tl.constexpr,
                 DV: tl.constexpr, LOG2E: tl.constexpr, PREC: tl.constexpr, b_dk, b_dv):  # fmt: skip
    """What a tile of queries gives to keys, which see them where m_s [keys,queries], added to dk / c and dv."""
    b_q = load_rows(p_q, o_m, o_d, s_qt, size, D)
    b_do = load_rows(p_do, o_m, o_v, H * DV, size, DV)
    b_mass, b_delta = load_each(p_mass, o_m, H, o_m < size) * LOG2E, load_each(p_delta, o_m, H, o_m < size)
    # Keys are rows from the start: products whose results are transposed go wrong on Hopper.
    b_s = dot_given(b_k, tl.trans(b_q), PREC) * (scale * LOG2E)
    b_p = tl.exp2(tl.where(m_s, b_s - b_mass[None, :], -float("inf")))
    b_dv = dot_computed(b_p, b_do, b_dv, PREC)
    b_ds = b_p * (dot_given(b_v, tl.trans(b_do), PREC) - b_delta[None, :])
    b_dk = dot_computed(b_ds, b_q, b_dk, PREC)
    return b_dk, b_dv


@jit
def sinks_kernel(p_q, p_k, p_v, p_begin, p_end, p_mass, p_do, p_delta, p_part, scale, s_qb, s_qt, s_qh, s_kb, s_kt,
                 s_kh, s_vb, s_vt, s_vh, T: int, N: int, R, S, H, G, D: tl.constexpr, DV: tl.constexpr,
                 BD: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, BS: tl.constexpr, DOCS: tl.constexpr,
                 LOG2E: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """[B*H,N,S,D+DV] fp32, not written where no query is beyond the reach. Grid (B*H * N, tiles of BS of the sink)."""
    i_q, i_bh = tl.program_id(0) % N * C, tl.program_id(0) // N
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    o_m, o_n, o_d, o_v = tl.arange(0, C), tl.arange(0, BS), tl.arange(0, BD), tl.arange(0, BV)
    row, first, i_s = i_b * T, i_q.to(tl.int64), tl.program_id(1) * BS
    begin, end = begins(p_begin, row, i_q, T, DOCS), ends(p_end, row, i_q, T, DOCS)
    if begin + R < i_q + C:
        i_k, size, own = begin + i_s, tl.minimum(S - i_s, T - begin - i_s), (row + first) * H + i_h
        p_k += i_b * s_kb + i_h // G * s_kh + i_k.to(tl.int64) * s_kt
        p_v += i_b * s_vb + i_h // G * s_vh + i_k.to(tl.int64) * s_vt
        b_k, b_v = load_rows(p_k, o_n, o_d, s_kt, size, D), load_rows(p_v, o_n, o_v, s_vt, size, DV)
        o_t, o_i = (i_q + o_m)[None, :], (i_k + o_n)[:, None]
        m_s = (o_i <= o_t - R) & (o_t < end) & (o_n < size)[:, None]
        b_dk, b_dv = from_queries(
            p_q + i_b * s_qb + i_h * s_qh + first * s_qt, p_do + own * DV, p_mass + own, p_delta + own, b_k, b_v, m_s,
            o_m, o_d, o_v, scale, s_qt, H, T - i_q, D, DV, LOG2E, PREC, tl.zeros([BS, BD], tl.float32),
            tl.zeros([BS, BV], tl.float32),
        )  # fmt: skip
        p_part += (tl.program_id(0).to(tl.int64) * S + i_s) * (D + DV)
        store_rows(p_part, b_dk, o_n, o_d, D + DV, S - i_s, D)
        store_rows(p_part + D, b_dv, o_n, o_v, D + DV, S - i_s, DV)


@jit
def gather_kernel(p_part, p_begin, p_end, p_sum, T: int, N: int, R, X, H, G, C: tl.constexpr, BR: tl.constexpr,
                  BX: tl.constexpr, DOCS: tl.constexpr):  # fmt: skip
    """[B*E,N,X] fp32, at the first block that begins in each document; the others are not written. Grid (B*E * N,
    tiles of BX numbers)."""
    i_n, i_be = tl.program_id(0) % N, tl.program_id(0) // N
    i_b, i_e = (i_be // (H // G)).to(tl.int64), i_be % (H // G)
    o_r, o_x = tl.arange(0, BR), tl.program_id(1) * BX + tl.arange(0, BX)
    begin, end = begins(p_begin, i_b * T, i_n * C, T, DOCS), ends(p_end, i_b * T, i_n * C, T, DOCS)
    if i_n == tl.cdiv(begin, C):
        # From the first block with a query beyond the reach; G heads of each.
        start = tl.maximum(i_n, tl.cdiv(begin + R + 1 - C, C))
        rows = (tl.cdiv(end, C) - start) * G
        b_sum = tl.zeros([BR, BX], tl.float32)
        for i_r in range(0, rows, BR):
            o_h, o_n = i_e * G + (i_r + o_r) % G, start + (i_r + o_r) // G
            o_p = ((i_b * H + o_h) * N + o_n) * X
            m_p = (i_r + o_r < rows)[:, None] & (o_x < X)[None, :]
            b_sum += tl.load(p_part + o_p[:, None] + o_x[None, :], mask=m_p, other=0.0)
        tl.store(p_sum + tl.program_id(0).to(tl.int64) * X + o_x, tl.sum(b_sum, 0), mask=o_x < X)


@jit
def keys_kernel(p_q, p_k, p_v, p_begin, p_end, p_mass, p_do, p_delta, p_sum, p_dk, p_dv, scale, s_qb, s_qt, s_qh, s_kb,
                s_kt, s_kh, s_vb, s_vt, s_vh, T: int, N: int, W, R, S, NC, H, G, D: tl.constexpr, DV: tl.constexpr,
                BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
                DOCS: tl.constexpr, FAR: tl.constexpr, LOG2E: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """dk [B,T,E,D] and dv [B,T,E,DV]; p_sum is read with FAR, and has NC blocks of C a row. Grid (B*E * N blocks of BN
    keys)."""
    i_k, i_be, E = tl.program_id(0) % N * BN, tl.program_id(0) // N, H // G
    i_b, i_e = (i_be // E).to(tl.int64), i_be % E
    o_m, o_n, o_d, o_v = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    row, first = i_b * T, i_k.to(tl.int64)
    size, o_i = T - i_k, i_k + o_n
    b_k = load_rows(p_k + i_b * s_kb + i_e * s_kh + first * s_kt, o_n, o_d, s_kt, size, D)
    b_v = load_rows(p_v + i_b * s_vb + i_e * s_vh + first * s_vt, o_n, o_v, s_vt, size, DV)
    b_begin, b_end = begins(p_begin, row, o_i, T, DOCS), ends(p_end, row, o_i, T, DOCS)
    stop = tl.minimum(i_k + BN - 1 + R, ends(p_end, row, tl.minimum(i_k + BN, T) - 1, T, DOCS))
    # A key of the sink is seen by all behind it, but further back than the reach by `sinks_kernel`.
    b_last = tl.minimum(tl.where(o_i < b_begin + S, o_i + R, o_i + W), b_end)
    b_dk, b_dv = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BV], tl.float32)
    for i_g in range(0, G):
        i_h = i_e * G + i_g
        for i_t in range(i_k, stop, BM):
            token = first + (i_t - i_k)
            own, o_t = (row + token) * H + i_h, (i_t + o_m)[None, :]
            b_dk, b_dv = from_queries(
                p_q + i_b * s_qb + i_h * s_qh + token * s_qt, p_do + own * DV, p_mass + own, p_delta + own, b_k, b_v,
                (o_t >= o_i[:, None]) & (o_t < b_last[:, None]), o_m, o_d, o_v, scale, s_qt, H, T - i_t, D, DV, LOG2E,
                PREC, b_dk, b_dv,
            )  # fmt: skip
    if FAR:
        o_c, o_s = tl.cdiv(b_begin, C), o_i - b_begin
        m_s = (o_s < S) & (o_c * C < b_end)
        p_x = p_sum + ((i_be.to(tl.int64) * NC + o_c) * S + o_s)[:, None] * (D + DV)
        b_dk += tl.load(p_x + o_d[None, :], mask=m_s[:, None] & (o_d < D)[None, :], other=0.0)
        b_dv += tl.load(p_x + (D + o_v)[None, :], mask=m_s[:, None] & (o_v < DV)[None, :], other=0.0)
    store_rows(p_dk + ((row + first) * E + i_e) * D, b_dk * scale, o_n, o_d, E * D, size, D)
    store_rows(p_dv + ((row + first) * E + i_e) * DV, b_dv, o_n, o_v, E * DV, size, DV)
