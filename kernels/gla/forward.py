"""GLA on the GPU: the chunk form of gla.py in two kernels, each of which runs forwards and, for gradients, backwards.

    scan   per head and block of the memory, over the chunks in order: what enters each chunk,
           S <- diag(e^{b_C}) S + (e^{b_C-b} k)^T v; backwards dS <- diag(e^{b_C}) dS + (e^b q)^T do.
           Where heads are too few for a GPU, pieces of a row side by side: once for what each adds, once from there
    mix    per chunk and block of value channels: o = (e^b q) S + tril(A) v; backwards dv = (e^{b_C-b} k) dS + A^T do

and the decode step in one launch. Memories: [slots,E,D,Dv] fp32, where a row (or sequence) of N chunks owns N + 1
consecutive slots, the last one idle. Read and write gates multiply the rows of q and k as they are loaded.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from ..gsa.triton_helpers import block_level, block_split, load_sums, reference
from ..gpu.triton_helpers import (
    chunk, dot, dot_given_right, jit, load_each, load_rows, parts, segment_flow, store_rows, three_parts, tl,
)


@jit
def place(p_chunks, T, N, heads, C: tl.constexpr, BLOCKS: tl.constexpr, VARLEN: tl.constexpr):
    """For grid (N * BLOCKS, B * heads): batch row, first token, head, block, tokens of the chunk, its slot."""
    i_n, i_x = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    i_b, i_h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    i_t, size, slot = chunk(p_chunks, i_n, i_b, T, N, C, VARLEN)
    return i_b, i_t, i_h, i_x, size, slot


@jit
def load_scaled(p_x, o_c, o_d, s_t, size, scale, D: tl.constexpr):
    """Rows [C,BK] in fp32 times scale."""
    return load_rows(p_x, o_c, o_d, s_t, size, D).to(tl.float32) * scale


@jit
def load_gate(p_r, o_c, s_r, size):
    """The gate of each token [C], 1 where there is none. Loaded once, ahead of the products: it is late."""
    b_r = tl.where(o_c < size, 1.0, 0.0)
    if p_r is not None:
        b_r = tl.load(p_r + o_c * s_r, mask=o_c < size, other=0.0).to(tl.float32)
    return b_r


@jit
def gate_ahead(p_r, o_t, s_r, T):
    """The gates of tokens o_t of a row, 0 outside of it."""
    return load_each(p_r, o_t, s_r, (o_t >= 0) & (o_t < T))


@jit
def running_sums(b_g, o_c, PREC: tl.constexpr):
    """Along a row of g [BK,C]: sums over the tokens up to and with each, and over those after it."""
    if PREC == "parts":
        # This product is faster than a scan in a loop.
        b_m = (o_c[:, None] <= o_c[None, :]).to(tl.bfloat16)
        b_high, b_mid, b_low = three_parts(b_g)
        b_sum = tl.dot(b_high, b_m, tl.dot(b_mid, b_m, tl.dot(b_low, b_m)))
        b_after = tl.minimum(tl.min(b_sum, 1)[:, None] - b_sum, 0.0)
    else:
        # A difference of sums would carry the rounding of all that was before.
        b_sum = tl.cumsum(b_g, 1)
        b_after = tl.cumsum(b_g, 1, reverse=True) - b_g
    return b_sum, b_after


@jit
def columns(o_c, o_k, s_t, size, D: tl.constexpr):
    """Offsets and mask of a transposed tile [BK,C]."""
    return o_k[:, None] + o_c[None, :] * s_t, (o_k < D)[:, None] & (o_c < size)[None, :]


# ---------------------------------------------------------------- factors


@jit
def cast(b_x, PREC: tl.constexpr):
    """A computed factor as operands, high and low."""
    return parts(b_x, PREC == "parts")


@jit
def exact(b_x, PREC: tl.constexpr):
    """A factor that the caller gave as an operand."""
    if PREC != "parts":
        b_x = b_x.to(tl.float32)
    return b_x


@jit
def gla_scan_kernel(p_x, p_y, p_g, p_r, p_seg, p_chunks, p_rows, p_b, p_S, p_S0, p_S1, p_sum, p_keep, scale,
                    s_xb, s_xt, s_xh, s_yb, s_yt, s_yh, T: int, N: int, H, E, SHARE, G: tl.constexpr,
                    D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                    VARLEN: tl.constexpr, SEGMENTS: tl.constexpr, REVERSE: tl.constexpr, GIVEN: tl.constexpr,
                    PREC: tl.constexpr):  # fmt: skip
    """What enters each chunk [slots,E,D,Dv], from S0 (None: 0) and into S1; forwards also b [B,T,E,D].

    REVERSE: x = q and y = do of the G heads of a memory, b is read. Grid (blocks of K * blocks of V, rows * E, pieces).
    In pieces a row takes two launches. Without S: what each adds, into sum [rows,pieces,E,D,Dv], and what it keeps of
    what enters it, into keep [rows,pieces,E,D]. With S: each starts from S0 and the sums before it.
    """
    blocks: tl.constexpr = (DV + BV - 1) // BV
    i_k, i_v = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i_row, i_e = (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    if VARLEN:
        first, count = tl.load(p_rows + 2 * i_row), tl.load(p_rows + 2 * i_row + 1)
        p_chunks += 3 * (first - i_row)
        i_b = i_row * 0
    else:
        first, count = i_row * (N + 1), N
        i_b = i_row
    o_c, o_k, o_v, s_g = tl.arange(0, C), i_k * BK + tl.arange(0, BK), i_v * BV + tl.arange(0, BV), E * D
    i_x, i_r, heads = i_e // SHARE, i_e, E
    if REVERSE:
        i_x, i_r, heads = i_e * G, i_e * G, H
    p_x += i_b * s_xb + i_x * s_xh
    p_y += i_b * s_yb + i_x * s_yh
    gate = (i_b * T * E + i_e) * D
    memory = (i_row * E + i_e) * (D * DV)
    # [BK, BV]
    b_S = tl.zeros([BK, BV], tl.float32)
    if p_S0 is not None:
        b_S += load_rows(p_S0 + memory, o_k, o_v, DV, D, DV)
    begin, end = 0, count
    if p_sum is not None:
        i_p, pieces = tl.program_id(2), tl.num_programs(2)
        own = i_row * pieces * E + i_e
        begin = i_p * tl.cdiv(count, pieces)
        end = tl.minimum(begin + tl.cdiv(count, pieces), count)
        if p_S is None:
            b_keep = tl.full([BK], 1.0, tl.float32)
            if REVERSE or not GIVEN:
                end = tl.where(i_p == pieces - 1, begin, end)
        else:
            for i in range(0, i_p):
                b_keep = tl.load(p_keep + (own + i * E) * D + o_k, mask=o_k < D, other=0.0)
                b_S = b_S * b_keep[:, None] + load_rows(p_sum + (own + i * E) * (D * DV), o_k, o_v, DV, D, DV)
    step = -C if REVERSE else C
    if p_r is not None:
        p_r += i_b * T * heads + i_r
        if G == 1:
            start = (count - 1 - begin).to(tl.int32) * C if REVERSE else begin * C
            if VARLEN:
                start += tl.load(p_chunks, mask=count > 0, other=0)
            b_ahead = gate_ahead(p_r, start + o_c, heads, T)
    for j in range(begin, end):
        i_n = j
        if REVERSE:
            i_n = count - 1 - j
        if VARLEN:
            i_t, size = tl.load(p_chunks + 3 * i_n).to(tl.int64), tl.load(p_chunks + 3 * i_n + 1)
        else:
            i_t = (i_n * C).to(tl.int64)
            size = tl.minimum(T - i_n * C, C)
        # A gate of the chunk itself would come too late: where a memory has one query head, it comes a chunk ahead.
        if p_r is not None and G == 1:
            b_gate = b_ahead
            b_ahead = gate_ahead(p_r, i_t.to(tl.int32) + step + o_c, heads, T)
        if p_S is not None:
            store_rows(p_S + ((first + i_n).to(tl.int64) * E + i_e) * (D * DV), b_S, o_k, o_v, DV, D, DV)
        # [BK, C]: the product below may not take the transpose of what comes out of another
        o_b, m_b = columns(o_c, o_k, s_g, size, D)
        if REVERSE or (GIVEN and p_S is not None):
            b_w = tl.load(p_b + gate + i_t * s_g + o_b, mask=m_b, other=0.0)
            b_end = tl.load(p_b + gate + (i_t + size - 1) * s_g + o_k, mask=o_k < D, other=0.0)
            if not REVERSE:
                b_w = tl.minimum(b_end[:, None] - b_w, 0.0)
        else:
            b_g = tl.load(p_g + gate + i_t * s_g + o_b, mask=m_b, other=0.0).to(tl.float32)
            b_g = tl.maximum(b_g, -30.0) * 1.4426950408889634
            b_b, b_w = running_sums(b_g, o_c, PREC)
            b_end = tl.sum(b_g, 1)
            if (GIVEN or p_S is not None) and i_v == 0:
                tl.store(p_b + gate + i_t * s_g + o_b, b_b, mask=m_b)
        b_w, b_decay = tl.exp2(b_w), tl.exp2(b_end)
        if SEGMENTS:
            b_seg, entered, leaves = segment_flow(p_seg + i_b * T, o_c, i_t, size)
            b_w = tl.where((b_seg == (entered if REVERSE else leaves))[None, :], b_w, 0.0)
            b_decay = tl.where(entered == leaves, b_decay, 0.0)
        b_S *= b_decay[:, None]
        if p_S is None:
            b_keep *= b_decay
        for i_g in tl.static_range(0, G):
            b_scale = scale
            if p_r is not None:
                if G > 1:
                    b_gate = load_gate(p_r + i_g + i_t * heads, o_c, heads, size)
                b_scale *= tl.where(o_c < size, b_gate, 0.0)[None, :]
            o_x, m_x = columns(o_c, o_k, s_xt, size, D)
            b_x = tl.load(p_x + i_t * s_xt + i_g * s_xh + o_x, mask=m_x, other=0.0).to(tl.float32) * b_scale * b_w
            b_x, b_x_low = cast(b_x, PREC)
            b_y = exact(load_rows(p_y + i_t * s_yt + i_g * s_yh, o_c, o_v, s_yt, size, DV), PREC)
            b_S += dot_given_right(b_x, b_x_low, b_y, PREC)
    if p_S is None:
        store_rows(p_sum + (own + i_p * E) * (D * DV), b_S, o_k, o_v, DV, D, DV)
        if i_v == 0:
            tl.store(p_keep + (own + i_p * E) * D + o_k, b_keep, mask=o_k < D)
    elif p_S1 is not None:
        ends = p_sum is None or tl.program_id(2) == tl.num_programs(2) - 1
        if ends:
            store_rows(p_S1 + memory, b_S, o_k, o_v, DV, D, DV)


@jit
def gla_mix_kernel(p_x, p_y, p_z, p_rx, p_ry, p_seg, p_chunks, p_b, p_S, p_o, scale_x, scale_y,
                   s_xb, s_xt, s_xh, s_yb, s_yt, s_yh, s_zb, s_zt, s_zh, T: int, N: int, H, E, SHARE, G: tl.constexpr,
                   D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BD: tl.constexpr,
                   BK: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, SEGMENTS: tl.constexpr,
                   RANGE: tl.constexpr, REVERSE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """o [B,T,H,Dv] from x = q, y = k, z = v and S, per query head; REVERSE: dv [B,T,E,Dv] from x = k, y = q, z = do
    and dS, per memory, summed over its G heads. Grid (N * blocks of V, B * H or B * E)."""
    blocks: tl.constexpr = (DV + BV - 1) // BV
    if REVERSE:
        i_b, i_t, i_e, i_v, size, slot = place(p_chunks, T, N, E, C, blocks, VARLEN)
        i_x, i_y, i_z, i_o, s_rx, s_ry = i_e // SHARE, i_e * G, i_e * G, i_e, E, H
        i_rx, i_ry = i_e, i_e * G
    else:
        i_b, i_t, i_o, i_v, size, slot = place(p_chunks, T, N, H, C, blocks, VARLEN)
        i_e = i_o // G
        i_x, i_y, i_z, s_rx, s_ry = i_o, i_e // SHARE, i_e // SHARE, H, E
        i_rx, i_ry = i_o, i_e
    if size <= 0:
        return
    p_x += i_b * s_xb + i_t * s_xt + i_x * s_xh
    p_y += i_b * s_yb + i_t * s_yt + i_y * s_yh
    p_z += i_b * s_zb + i_t * s_zt + i_z * s_zh
    if p_rx is not None:
        p_rx += (i_b * T + i_t) * s_rx + i_rx
    if p_ry is not None:
        p_ry += (i_b * T + i_t) * s_ry + i_ry
    p_b += ((i_b * T + i_t) * E + i_e) * D
    p_S += (slot * E + i_e) * (D * DV)
    s_ot = E * DV if REVERSE else H * DV
    p_o += (i_b * T + i_t) * s_ot + i_o * DV
    strong, _, _ = reference(p_b, tl.arange(0, BD), E * D, size, D, C, RANGE)
    if strong:
        mix_chunk(p_x, s_xt, p_y, s_yt, s_yh, p_z, s_zt, s_zh, p_rx, s_rx, p_ry, s_ry, p_seg, i_b * T, p_b, p_S, p_o,
                  s_ot, scale_x, scale_y, i_t, size, i_v * BV, E, G, D, DV, C, LEVELS, BK, BV, SEGMENTS, RANGE, REVERSE,
                  True, PREC)  # fmt: skip
    else:
        mix_chunk(p_x, s_xt, p_y, s_yt, s_yh, p_z, s_zt, s_zh, p_rx, s_rx, p_ry, s_ry, p_seg, i_b * T, p_b, p_S, p_o,
                  s_ot, scale_x, scale_y, i_t, size, i_v * BV, E, G, D, DV, C, LEVELS, BK, BV, SEGMENTS, RANGE, REVERSE,
                  False, PREC)  # fmt: skip


@jit
def mix_chunk(p_x, s_xt, p_y, s_yt, s_yh, p_z, s_zt, s_zh, p_rx, s_rx, p_ry, s_ry, p_seg, row, p_b, p_S, p_o,
              s_ot, scale_x, scale_y, i_t, size, i_v, E, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
              C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SEGMENTS: tl.constexpr,
              RANGE: tl.constexpr, REVERSE: tl.constexpr, STRONG: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """`gla_mix_kernel` for one kind of chunk; pointers at the chunk's first token."""
    o_c, o_v, s_g = tl.arange(0, C), i_v + tl.arange(0, BV), E * D
    m_flow, m_seen = o_c >= 0, o_c[:, None] >= o_c[None, :]
    if REVERSE:
        m_seen = o_c[:, None] <= o_c[None, :]
    if SEGMENTS:
        b_seg, entered, leaves = segment_flow(p_seg + row, o_c, i_t, size)
        m_flow = b_seg == (leaves if REVERSE else entered)
        m_seen = m_seen & (b_seg[:, None] == b_seg[None, :])
    # [C, BV], [C, C]
    b_o, b_A = tl.zeros([C, BV], tl.float32), tl.zeros([C, C], tl.float32)
    if p_rx is not None:
        scale_x *= load_gate(p_rx, o_c, s_rx, size)[:, None]
    own_y = scale_y
    if p_ry is not None:
        own_y *= load_gate(p_ry, o_c, s_ry, size)[:, None]
    for i_k in range(0, D, BK):
        o_k = i_k + tl.arange(0, BK)
        b_x, b_y, b_A = score_block(p_x, s_xt, p_y, s_yt, p_b, scale_x, own_y, b_A, o_c, o_k, s_g, size, D, C,
                                    LEVELS, RANGE, REVERSE, STRONG, PREC)  # fmt: skip
        b_S = load_rows(p_S, o_k, o_v, DV, D, DV)
        if not STRONG:
            b_S *= memory_factor(p_b, o_k, s_g, size, D, C, REVERSE)[:, None]
        b_S, b_S_low = cast(b_S, PREC)
        b_o += dot(b_x, b_y, b_S, b_S_low, PREC)
    if SEGMENTS:
        b_o = tl.where(m_flow[:, None], b_o, 0.0)
    b_A, b_A_low = cast(tl.where(m_seen, b_A, 0.0), PREC)
    b_o += dot_given_right(b_A, b_A_low, exact(load_rows(p_z, o_c, o_v, s_zt, size, DV), PREC), PREC)
    if REVERSE:
        for i_g in range(1, G):
            b_A = tl.zeros([C, C], tl.float32)
            other_y = scale_y
            if p_ry is not None:
                other_y *= load_gate(p_ry + i_g, o_c, s_ry, size)[:, None]
            for i_k in range(0, D, BK):
                o_k = i_k + tl.arange(0, BK)
                _, _, b_A = score_block(p_x, s_xt, p_y + i_g * s_yh, s_yt, p_b, scale_x, other_y, b_A, o_c, o_k, s_g,
                                        size, D, C, LEVELS, RANGE, REVERSE, STRONG, PREC)  # fmt: skip
            b_A, b_A_low = cast(tl.where(m_seen, b_A, 0.0), PREC)
            b_z = exact(load_rows(p_z + i_g * s_zh, o_c, o_v, s_zt, size, DV), PREC)
            b_o += dot_given_right(b_A, b_A_low, b_z, PREC)
    store_rows(p_o, b_o, o_c, o_v, s_ot, size, DV)


@jit
def middle_and_end(p_b, o_k, s_g, size, D: tl.constexpr, C: tl.constexpr):
    """b [BK] at the middle of the chunk and at its end."""
    b_mid = tl.load(p_b + tl.minimum(C // 2 - 1, size - 1) * s_g + o_k, mask=o_k < D, other=0.0)
    return b_mid, tl.load(p_b + (size - 1) * s_g + o_k, mask=o_k < D, other=0.0)


@jit
def memory_factor(p_b, o_k, s_g, size, D: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr):
    """e^{b_mid} for what entered, e^{b_C-b_mid} for the gradient of what leaves."""
    b_mid, b_end = middle_and_end(p_b, o_k, s_g, size, D, C)
    if REVERSE:
        b_mid = b_end - b_mid
    return tl.exp2(b_mid)


@jit
def score_block(p_x, s_xt, p_y, s_yt, p_b, scale_x, scale_y, b_A, o_c, o_k, s_g, size, D: tl.constexpr,
                C: tl.constexpr, LEVELS: tl.constexpr, RANGE: tl.constexpr, REVERSE: tl.constexpr,
                STRONG: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """Rows that meet the memory, as operands, and A gains the products of BK channels."""
    b_x, b_y = load_scaled(p_x, o_c, o_k, s_xt, size, scale_x, D), load_scaled(p_y, o_c, o_k, s_yt, size, scale_y, D)
    b_b = load_sums(p_b, o_c, o_k, s_g, size, D)
    b_mid, b_end = middle_and_end(p_b, o_k, s_g, size, D, C)
    if STRONG:
        level = block_level(p_b, o_c, o_k, s_g, size, D, LEVELS, RANGE)
        for i in range(level, LEVELS + 1):
            b_q, b_k, m_pair = block_split(p_b, i, level, o_c, o_c, o_k, s_g, size, D, RANGE)
            if REVERSE:
                b_xe, b_xe_low = cast(b_x * b_k, PREC)
                b_ye, b_ye_low = cast(b_y * b_q, PREC)
            else:
                b_xe, b_xe_low = cast(b_x * b_q, PREC)
                b_ye, b_ye_low = cast(b_y * b_k, PREC)
            b_A += tl.where(m_pair, dot(b_xe, b_xe_low, tl.trans(b_ye), tl.trans(b_ye_low), PREC), 0.0)
        if REVERSE:
            b_b = b_end[None, :] - b_b
        b_xe, b_xe_low = cast(b_x * tl.exp2(b_b), PREC)
    else:
        b_ref = b_b - b_mid[None, :]
        if REVERSE:
            b_ref = -b_ref
        b_xe, b_xe_low = cast(b_x * tl.exp2(b_ref), PREC)
        b_ye, b_ye_low = cast(b_y * tl.exp2(-b_ref), PREC)
        b_A += dot(b_xe, b_xe_low, tl.trans(b_ye), tl.trans(b_ye_low), PREC)
    return b_xe, b_xe_low, b_A


# ---------------------------------------------------------------- decode step


@jit
def gla_step_kernel(p_q, p_k, p_v, p_g, p_rq, p_rk, p_real, p_rows, p_S, p_o, p_S1, scale, s_qb, s_qh, s_kb, s_kh,
                    s_vb, s_vh, s_pb, s_S, H, E, SHARE, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                    BD: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One token, eq. 3 as it stands: BV columns of a memory read and written once. Grid (blocks of V, E, B)."""
    i_e, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_k, o_v = tl.arange(0, BD), tl.program_id(0) * BV + tl.arange(0, BV)
    m_k, m_v, row, held, real = o_k < D, o_v < DV, i_b, D, 1
    if p_real is not None:
        real = tl.load(p_real + i_b * s_pb).to(tl.int32)
    if p_rows is not None:
        row = tl.load(p_rows + i_b).to(tl.int64)
        held, real = tl.where(row >= 0, D, 0), tl.where(row >= 0, real, 0)
    memory = row * s_S + i_e * (D * DV)
    b_g = tl.load(p_g + (i_b * E + i_e) * D + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + i_b * s_kb + i_e // SHARE * s_kh + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + i_b * s_vb + i_e // SHARE * s_vh + o_v, mask=m_v, other=0.0).to(tl.float32)
    if p_rk is not None:
        b_k *= tl.load(p_rk + i_b * E + i_e).to(tl.float32)
    # [BD, BV]
    b_S = load_rows(p_S + memory, o_k, o_v, DV, held, DV)
    b_S1 = b_S * tl.exp(b_g)[:, None] + b_k[:, None] * b_v[None, :]
    b_S1 = tl.where(real != 0, b_S1, b_S)
    store_rows(p_S1 + memory, b_S1, o_k, o_v, DV, held, DV)
    for i_g in range(0, G):
        b_q = tl.load(p_q + i_b * s_qb + (i_e * G + i_g) * s_qh + o_k, mask=m_k, other=0.0).to(tl.float32) * scale
        if p_rq is not None:
            b_q *= tl.load(p_rq + i_b * H + i_e * G + i_g).to(tl.float32)
        b_o = tl.where(real != 0, tl.sum(b_q[:, None] * b_S1, 0), 0.0)
        tl.store(p_o + (i_b * H + i_e * G + i_g) * DV + o_v, b_o.to(p_o.dtype.element_ty), mask=m_v)
