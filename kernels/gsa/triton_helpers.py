"""What the forward and backward kernels of GSA share: tiles of one chunk, loaded, multiplied and stored.

Inside a chunk e^{b_t-b_i} must become a matrix product. Where the whole chunk decays by no more than 2^-RANGE, one
reference in its middle splits it, e^{b_t-b_mid} e^{b_mid-b_i}: no factor exceeds 2^RANGE. A chunk with a stronger
gate is cut into blocks of 2^level tokens that do not decay by more, each with a reference in its middle; between
blocks the left half of a pair meets the right half as in scan.py, and no exponent is above 0. Such chunks have
launches of their own (STRONG), so that the common ones need not carry the registers of the others.

b is kept in units of log 2.

Letters as in gsa.py. Rows of queries [R] are those of STACK heads of one memory, one head after another: o_t is the
token of a row. `BM`, `BD`, `BDV` are M, D, Dv rounded up to a power of two.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

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
def softmax(b_l, o_m, M: tl.constexpr):
    """Over the slots, padded ones excluded."""
    b_l = tl.where((o_m < M)[None, :], b_l, -float("inf"))
    b_p = tl.exp(b_l - tl.max(b_l, 1)[:, None])
    return b_p / tl.sum(b_p, 1)[:, None]


@jit
def write_strength(b_g):
    """-expm1(g) for g <= 0: a series near 0, where 1 - exp(g) would cancel."""
    b_small = tl.maximum(b_g, -0.5)
    b_sum = 1.0 + b_small * 0.125
    for i in tl.static_range(6):
        b_sum = 1.0 + b_small * b_sum * (1.0 / (7 - i))
    return tl.where(b_g > -0.5, -b_small * b_sum, 1.0 - tl.exp(b_g))


# ---------------------------------------------------------------- where a program is, loads and stores


@jit
def locate(p_chunks, i_n, T, N, E, M: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr):
    """For chunk i_n and program_id(1) = b E + e: batch row, first token of the chunk, gate head, tokens in it, its
    slot, and where its first token lies in g, b and their gradients [B,T,E,M]."""
    i_b, i_e = (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    if VARLEN:
        i_t = tl.load(p_chunks + 3 * i_n)
        size = tl.load(p_chunks + 3 * i_n + 1)
        slot = tl.load(p_chunks + 3 * i_n + 2).to(tl.int64)
    else:
        i_t = i_n * C
        size = tl.minimum(T - i_t, C)
        slot = i_b * (N + 1) + i_n
    i_t = i_t.to(tl.int64)
    return i_b, i_t, i_e, size, slot, ((i_b * T + i_t) * E + i_e) * M


@jit
def load_gates(p_g, o_c, o_m, s_g, size, M: tl.constexpr):
    """g [C,BM] in fp32, 0 outside; floored, so that sums stay precise: e^-30 is 0 beside any rounding."""
    m_g = (o_c < size)[:, None] & (o_m < M)[None, :]
    b_g = tl.load(p_g + o_c[:, None] * s_g + o_m[None, :], mask=m_g, other=0.0)
    return tl.maximum(b_g.to(tl.float32), -30.0)


@jit
def load_sums(p_b, o_r, o_m, s_g, size, M: tl.constexpr):
    """b at rows o_r of the chunk, [R,BM]; rows past the end repeat the last."""
    o_b = tl.minimum(o_r, size - 1)[:, None] * s_g + o_m[None, :]
    return tl.load(p_b + o_b, mask=(o_m < M)[None, :], other=0.0)


@jit
def load_memory(p_S, o_m, o_d, M, D: tl.constexpr):
    """A memory [BM,BD] of scratch [slots,E,M,D]."""
    return load_rows(p_S, o_m, o_d, D, M, D)


@jit
def store_memory(p_S, b_S, o_m, o_d, M, D: tl.constexpr):
    store_rows(p_S, b_S, o_m, o_d, D, M, D)


# ---------------------------------------------------------------- decays inside a chunk


@jit
def reference(p_b, o_m, s_g, size, M: tl.constexpr, C: tl.constexpr, RANGE: tl.constexpr):
    """Whether some slot of the chunk decays below 2^-RANGE, its b [BM] at the middle, and at the end."""
    b_mid = tl.load(p_b + tl.minimum(C // 2 - 1, size - 1) * s_g + o_m, mask=o_m < M, other=0.0)
    b_end = tl.load(p_b + (size - 1) * s_g + o_m, mask=o_m < M, other=0.0)
    return tl.min(b_end, 0) < -RANGE, b_mid, b_end


@jit
def block_level(p_b, o_c, o_m, s_g, size, M: tl.constexpr, LEVELS: tl.constexpr, RANGE: tl.constexpr):
    """The largest level at which no block of 2^level tokens decays by more than 2^-RANGE."""
    level = 0
    for i in range(1, LEVELS):
        o_first = o_c >> i << i
        b_first = load_sums(p_b, o_first, o_m, s_g, size, M)
        b_span = b_first - load_sums(p_b, o_first + (1 << i) - 1, o_m, s_g, size, M)
        level += (tl.max(tl.max(b_span, 1), 0) <= RANGE).to(tl.int32)
    return level


@jit
def block_split(p_b, i, level, o_t, o_c, o_m, s_g, size, M: tl.constexpr, RANGE: tl.constexpr):
    """e^{b_t-b_ref} [R,BM], e^{b_ref-b_i} [C,BM], and which pairs [R,C] they serve: those inside a block of 2^i
    tokens for i = level, between its two halves for i > level."""
    halved = (i > level).to(tl.int32)
    limit = tl.where(i > level, 0.0, RANGE)
    o_ref = (1 << i >> 1) - halved
    b_query = load_sums(p_b, o_t, o_m, s_g, size, M) - load_sums(p_b, (o_t >> i << i) + o_ref, o_m, s_g, size, M)
    b_key = load_sums(p_b, (o_c >> i << i) + o_ref, o_m, s_g, size, M) - load_sums(p_b, o_c, o_m, s_g, size, M)
    o_apart = o_t[:, None] ^ o_c[None, :]
    m_pair = (o_apart >> i == 0) & ((halved == 0) | (o_apart >> (i - halved) != 0))
    return tl.exp2(tl.minimum(b_query, limit)), tl.exp2(tl.minimum(b_key, limit)), m_pair


@jit
def read_side(p_b, p_seg, row, b_mid, o_t, o_c, o_m, s_g, i_t, size, M: tl.constexpr, LEVELS: tl.constexpr,
              RANGE: tl.constexpr, SEGMENTS: tl.constexpr, STRONG: tl.constexpr):  # fmt: skip
    """For rows of queries: e^{b_t-b_mid} [R,BM], whether the document of a row entered with the chunk [R], which
    keys a row sees [R,C], and the block level of a strong chunk."""
    m_enter, m_seen = o_t >= 0, o_t[:, None] >= o_c[None, :]
    if SEGMENTS:
        b_seg, entered, _ = segment_flow(p_seg + row, o_t, i_t, size)
        m_enter = b_seg == entered
        b_keys, _, _ = segment_flow(p_seg + row, o_c, i_t, size)
        m_seen = m_seen & (b_seg[:, None] == b_keys[None, :])
    level = 0
    if STRONG:
        level = block_level(p_b, o_c, o_m, s_g, size, M, LEVELS, RANGE)
    return tl.exp2(load_sums(p_b, o_t, o_m, s_g, size, M) - b_mid[None, :]), m_enter, m_seen, level


@jit
def load_side(p_y, s_yt, p_S, b_mid, o_c, o_m, o_d, size, M: tl.constexpr, D: tl.constexpr):
    """Keys or values [C,BD], and as parts the memory that enters, times e^{b_mid} [BM,BD]."""
    b_y = load_rows(p_y, o_c, o_d, s_yt, size, D)
    b_S, b_S_low = parts(load_memory(p_S, o_m, o_d, M, D) * tl.exp2(b_mid)[:, None], b_y.dtype == tl.bfloat16)
    return b_y, b_S, b_S_low


@jit
def load_write(p_g, p_b, b_mid, o_c, o_m, s_g, size, M: tl.constexpr, STRONG: tl.constexpr, KIND: tl.constexpr):
    """s_i e^{b_mid-b_i} [C,BM] as parts; a strong chunk splits its decays elsewhere."""
    b_write = write_strength(load_gates(p_g, o_c, o_m, s_g, size, M))
    if not STRONG:
        b_write *= tl.exp2(b_mid[None, :] - load_sums(p_b, o_c, o_m, s_g, size, M))
    b_write, b_write_low = parts(b_write, tl.bfloat16 == KIND)
    return b_write, b_write_low


# ---------------------------------------------------------------- the two passes


@jit
def read_slots(b_x, b_y, b_S, b_S_low, b_query, b_write, b_write_low, m_enter, m_seen, p_g, p_b, level, o_t, o_c, o_m,
               s_g, size, M: tl.constexpr, LEVELS: tl.constexpr, RANGE: tl.constexpr, SEGMENTS: tl.constexpr,
               STRONG: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """First pass, x_t . S_t per slot: e^{b_t} (S_in x_t) + sum_{i<=t} (x_t.y_i) e^{b_t-b_i} s_i, [R,BM]."""
    b_A = tl.where(m_seen, dot_given(b_x, tl.trans(b_y), PREC), 0.0)
    b_out = dot_given_left(b_x, tl.trans(b_S), tl.trans(b_S_low), PREC)
    if SEGMENTS:
        b_out = tl.where(m_enter[:, None], b_out, 0.0)
    if STRONG:
        b_out *= b_query
        b_s = write_strength(load_gates(p_g, o_c, o_m, s_g, size, M))
        for i in range(level, LEVELS + 1):
            b_q, b_k, m_pair = block_split(p_b, i, level, o_t, o_c, o_m, s_g, size, M, RANGE)
            b_A_i, b_A_i_low = parts(tl.where(m_pair, b_A, 0.0), b_y.dtype == tl.bfloat16)
            b_k, b_k_low = parts(b_k * b_s, b_y.dtype == tl.bfloat16)
            b_out += b_q * dot(b_A_i, b_A_i_low, b_k, b_k_low, PREC)
    else:
        b_A, b_A_low = parts(b_A, b_y.dtype == tl.bfloat16)
        b_out = dot(b_A, b_A_low, b_write, b_write_low, PREC, b_out) * b_query
    return b_out


@jit
def mix_slots(b_p, b_y, b_S, b_S_low, b_query, b_write, b_write_low, m_enter, m_seen, p_g, p_b, level, o_t, o_c, o_m,
              s_g, size, M: tl.constexpr, LEVELS: tl.constexpr, RANGE: tl.constexpr, SEGMENTS: tl.constexpr,
              STRONG: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """Second pass, S_t^T p_t: S_in^T (e^{b_t} . p_t) + sum_{i<=t} A_ti y_i, [R,BD]; b_p comes times e^{b_t-b_mid},
    and without that factor in a strong chunk."""
    if STRONG:
        b_A = tl.zeros(m_seen.shape, tl.float32)
        b_s = write_strength(load_gates(p_g, o_c, o_m, s_g, size, M))
        for i in range(level, LEVELS + 1):
            b_q, b_k, m_pair = block_split(p_b, i, level, o_t, o_c, o_m, s_g, size, M, RANGE)
            b_q, b_q_low = parts(b_p * b_q, b_y.dtype == tl.bfloat16)
            b_k, b_k_low = parts(b_k * b_s, b_y.dtype == tl.bfloat16)
            b_A += tl.where(m_pair, dot(b_q, b_q_low, tl.trans(b_k), tl.trans(b_k_low), PREC), 0.0)
        b_p *= b_query
    b_pq, b_pq_low = parts(b_p, b_y.dtype == tl.bfloat16)
    if not STRONG:
        b_A = dot(b_pq, b_pq_low, tl.trans(b_write), tl.trans(b_write_low), PREC)
    if SEGMENTS:
        b_pq, b_pq_low = parts(tl.where(m_enter[:, None], b_p, 0.0), b_y.dtype == tl.bfloat16)
    b_A, b_A_low = parts(tl.where(m_seen, b_A, 0.0), b_y.dtype == tl.bfloat16)
    return dot(b_pq, b_pq_low, b_S, b_S_low, PREC, dot_given_right(b_A, b_A_low, b_y, PREC))
