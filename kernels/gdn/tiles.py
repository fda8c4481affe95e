"""What the kernels of Gated DeltaNet share: where a program is, decays of one chunk, rows and states, the inverse.

The inverse: blocks of 8 by elimination in fp32, then pairs of blocks become one,
[[A, 0], [N, B]]^-1 = [[A', 0], [-B' N A', B']], by products. Keys that repeat make powers of N grow without bound, so
nothing here sums powers.

Letters as in gdn_torch.py.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from ..gpu.tiles import chunk, dot, jit, load_rows, parts, segment_flow, store_rows, tl


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
