"""GSA on the GPU, forward: the chunk form of gsa.py in three launches, and the decode step in one.

    states   per chunk: b = cumsum(g), the chunk's decay e^{b_C}, and what it writes, sum_i e^{b_C-b_i} s_i k_i^T
    scan     over chunks, elementwise: the memories that enter each chunk, in place
    output   per chunk: first pass, softmax, second pass; the query heads of one memory one after another, so that
             keys, values, memories and decays are read once for all of them

Inside a chunk e^{b_t-b_i} must become a matrix product. Where the whole chunk decays by no more than 2^-RANGE, one
reference in its middle splits it, e^{b_t-b_mid} e^{b_mid-b_i}: exponents stay within +-RANGE/2, far from overflow.
Other chunks (strong gates) take the halving of scan.py, whose exponents never exceed 0. Tiles decide at run time.

Precision with bf16 inputs: q.k and do.v multiply what the caller gave, exactly. Where only one factor is computed here,
it goes in as two bf16 halves; where both are, as tf32 rounded to nearest. The error of a bf16 result is then that of
its own rounding. b is kept in units of log 2.

Letters as in gsa.py. Scratch: b [B,T,E,M]; memories [slots,E,M,D] fp32, where a row (or sequence) of N chunks owns
N + 1 consecutive slots: slot n holds what enters chunk n, slot N what leaves the last. `BM`, `BD`, `BDV` are M, D,
Dv rounded up to a power of two.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without triton imports this file and keeps to the PyTorch path
    triton = None


def jit(kernel: Callable[..., None]) -> Any:
    """triton.jit, or the function itself where there is no triton. T and N vary too much to compile for each."""
    if triton is None:
        return kernel
    sizes = [name for name in ("T", "N") if name in kernel.__annotations__]
    return triton.jit(kernel, do_not_specialize=sizes)


# ---------------------------------------------------------------- parts shared by forward and backward


@jit
def dot(b_x, b_y, PREC: tl.constexpr):
    """x @ y with fp32 accumulation. A bf16 factor is exact and the other goes in as two bf16 halves, 16 bits of it;
    two fp32 factors meet as PREC says."""
    if b_x.dtype == b_y.dtype:
        if b_x.dtype == tl.float32:
            b_z = tl.dot(as_operand(b_x, PREC), as_operand(b_y, PREC), input_precision=PREC)
        else:
            b_z = tl.dot(b_x, b_y)
    elif b_x.dtype == tl.bfloat16:
        b_high = b_y.to(tl.bfloat16)
        b_z = tl.dot(b_x, (b_y - b_high.to(tl.float32)).to(tl.bfloat16))
        b_z = tl.dot(b_x, b_high, b_z)
    elif b_y.dtype == tl.bfloat16:
        b_high = b_x.to(tl.bfloat16)
        b_z = tl.dot((b_x - b_high.to(tl.float32)).to(tl.bfloat16), b_y)
        b_z = tl.dot(b_high, b_y, b_z)
    else:
        b_z = tl.dot(as_operand(b_x.to(tl.float32), PREC), as_operand(b_y.to(tl.float32), PREC), input_precision=PREC)
    return b_z


@jit
def as_operand(b_x, PREC: tl.constexpr):
    """Rounded to nearest where a tf32 tensor core would cut the low 13 bits off."""
    if PREC == "tf32":
        b_x = ((b_x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return b_x


@jit
def write_strength(b_g):
    """-expm1(g) for g <= 0: a series near 0, where 1 - exp(g) would cancel."""
    b_small = tl.maximum(b_g, -0.5)
    b_sum = 1.0 + b_small * 0.125
    for i in tl.static_range(6):
        b_sum = 1.0 + b_small * b_sum * (1.0 / (7 - i))
    return tl.where(b_g > -0.5, -b_small * b_sum, 1.0 - tl.exp(b_g))


@jit
def chunk_span(p_chunks, i_n, i_b, T, N, C: tl.constexpr, VARLEN: tl.constexpr):
    """First token of chunk i_n, how many it has, and its slot."""
    if VARLEN:
        i_t = tl.load(p_chunks + 3 * i_n)
        size = tl.load(p_chunks + 3 * i_n + 1)
        slot = tl.load(p_chunks + 3 * i_n + 2)
    else:
        i_t = i_n * C
        size = tl.minimum(T - i_t, C)
        slot = i_b * (N + 1) + i_n
    return i_t, size, slot.to(tl.int64)


@jit
def gate_offset(i_b, i_t, i_e, T, E, M: tl.constexpr):
    """Where token i_t of gate head i_e lies in g, b and their gradients [B,T,E,M]."""
    return ((i_b.to(tl.int64) * T + i_t) * E + i_e) * M


@jit
def load_gates(p_g, o_c, o_m, s_g, size, M: tl.constexpr):
    """g [C,BM] in fp32, 0 outside; floored, so that sums stay precise: e^-30 is 0 beside any rounding."""
    m_g = (o_c < size)[:, None] & (o_m < M)[None, :]
    b_g = tl.load(p_g + o_c[:, None] * s_g + o_m[None, :], mask=m_g, other=0.0)
    return tl.maximum(b_g.to(tl.float32), -30.0)


@jit
def load_sums(p_b, o_r, o_m, s_g, size, M: tl.constexpr):
    """b at rows o_r of the chunk, [C,BM]; rows past the end repeat the last."""
    p_row = p_b + tl.minimum(o_r, size - 1)[:, None] * s_g
    return tl.load(p_row + o_m[None, :], mask=(o_m < M)[None, :], other=0.0)


@jit
def load_rows(p_x, o_c, o_d, s_t, size, D: tl.constexpr):
    """Rows of one head of a [B,T,heads,D] tensor: [C,BD], zeros outside."""
    m_x = (o_c < size)[:, None] & (o_d < D)[None, :]
    return tl.load(p_x + o_c.to(tl.int64)[:, None] * s_t + o_d[None, :], mask=m_x, other=0.0)


@jit
def store_rows(p_x, b_x, o_c, o_d, s_t, size, D: tl.constexpr):
    m_x = (o_c < size)[:, None] & (o_d < D)[None, :]
    tl.store(p_x + o_c.to(tl.int64)[:, None] * s_t + o_d[None, :], b_x.to(p_x.dtype.element_ty), mask=m_x)


@jit
def load_memory(p_S, o_m, o_d, M: tl.constexpr, D: tl.constexpr):
    """A memory [BM,BD] of scratch [slots,E,M,D]."""
    m_S = (o_m < M)[:, None] & (o_d < D)[None, :]
    return tl.load(p_S + o_m[:, None] * D + o_d[None, :], mask=m_S, other=0.0)


@jit
def store_memory(p_S, b_S, o_m, o_d, M: tl.constexpr, D: tl.constexpr):
    m_S = (o_m < M)[:, None] & (o_d < D)[None, :]
    tl.store(p_S + o_m[:, None] * D + o_d[None, :], b_S, mask=m_S)


@jit
def segment_flow(p_seg, o_c, i_t, size):
    """Document of each token [C], the one that entered with the chunk, the one that leaves it."""
    b_seg = tl.load(p_seg + i_t + tl.minimum(o_c, size - 1))
    return b_seg, tl.load(p_seg + tl.maximum(i_t - 1, 0)), tl.load(p_seg + i_t + size - 1)


@jit
def reference(p_b, o_m, s_g, size, M: tl.constexpr, C: tl.constexpr, RANGE: tl.constexpr):
    """Whether some slot of the chunk decays below 2^-RANGE, its b [BM] at the middle, and at the end."""
    b_mid = tl.load(p_b + tl.minimum(C // 2 - 1, size - 1) * s_g + o_m, mask=o_m < M, other=0.0)
    b_end = tl.load(p_b + (size - 1) * s_g + o_m, mask=o_m < M, other=0.0)
    return tl.min(b_end, 0) < -RANGE, b_mid, b_end


@jit
def halving_split(p_g, p_b, j, o_m, s_g, size, M: tl.constexpr, C: tl.constexpr):
    """Width h = 2^j: e^{b_t-b_ref}, e^{b_ref-b_i}, s [C,BM], each token's half [C], whether that is a right one [C]."""
    o_c = tl.arange(0, C)
    o_half = o_c >> j
    b_offset = load_sums(p_b, o_c, o_m, s_g, size, M)
    b_offset -= load_sums(p_b, (((o_half >> 1) * 2 + 1) << j) - 1, o_m, s_g, size, M)
    b_s = write_strength(load_gates(p_g, o_c, o_m, s_g, size, M))
    return tl.exp2(tl.minimum(b_offset, 0.0)), tl.exp2(tl.minimum(-b_offset, 0.0)), b_s, o_half, o_half % 2 == 1


@jit
def strong_slots(b_A, p_g, p_b, o_m, s_g, size, M: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
                 PREC: tl.constexpr):  # fmt: skip
    """sum_{i<=t} A_ti e^{b_t-b_i} s_i by halving: [C,C] -> [C,BM]."""
    o_c = tl.arange(0, C)
    b_s = write_strength(load_gates(p_g, o_c, o_m, s_g, size, M))
    b_out = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_A, 0.0), 1)[:, None] * b_s
    for j in range(LEVELS):
        b_query, b_key, b_s, o_half, right = halving_split(p_g, p_b, j, o_m, s_g, size, M, C)
        m_pair = (o_half[:, None] == o_half[None, :] + 1) & right[:, None]
        b_out += b_query * dot(tl.where(m_pair, b_A, 0.0), b_key * b_s, PREC)
    return b_out


@jit
def strong_pairs(b_p, p_g, p_b, o_m, s_g, size, M: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
                 PREC: tl.constexpr):  # fmt: skip
    """A_ti = sum_m p_t e^{b_t-b_i} s_i for i <= t by halving: [C,BM] -> [C,C]."""
    o_c = tl.arange(0, C)
    b_s = write_strength(load_gates(p_g, o_c, o_m, s_g, size, M))
    b_A = tl.where(o_c[:, None] == o_c[None, :], tl.sum(b_p * b_s, 1)[:, None], 0.0)
    for j in range(LEVELS):
        b_query, b_key, b_s, o_half, right = halving_split(p_g, p_b, j, o_m, s_g, size, M, C)
        m_pair = (o_half[:, None] == o_half[None, :] + 1) & right[:, None]
        b_A += tl.where(m_pair, dot(b_p * b_query, tl.trans(b_key * b_s), PREC), 0.0)
    return b_A


@jit
def read_slots(b_x, b_y, b_S, b_query, b_write, m_enter, m_seen, strong, p_g, p_b, o_m, s_g, size, M: tl.constexpr,
               C: tl.constexpr, LEVELS: tl.constexpr, SEGMENTS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """First pass, x_t . S_t per slot: e^{b_t} (S_in x_t) + sum_{i<=t} (x_t.y_i) e^{b_t-b_i} s_i, [C,BM]."""
    b_out = dot(b_x, tl.trans(b_S), PREC)
    if SEGMENTS:
        b_out = tl.where(m_enter[:, None], b_out, 0.0)
    b_A = tl.where(m_seen, dot(b_x, tl.trans(b_y), PREC), 0.0)
    if strong:
        b_out = b_out * b_query + strong_slots(b_A, p_g, p_b, o_m, s_g, size, M, C, LEVELS, PREC)
    else:
        b_out = (b_out + dot(b_A, b_write, PREC)) * b_query
    return b_out


@jit
def mix_slots(b_p, b_y, b_S, b_query, b_write, m_enter, m_seen, strong, p_g, p_b, o_m, s_g, size, M: tl.constexpr,
              C: tl.constexpr, LEVELS: tl.constexpr, SEGMENTS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """Second pass, S_t^T p_t: S_in^T (e^{b_t} . p_t) + sum_{i<=t} A_ti y_i, [C,BD]."""
    b_pq = b_p * b_query
    if strong:
        b_A = strong_pairs(b_p, p_g, p_b, o_m, s_g, size, M, C, LEVELS, PREC)
    else:
        b_A = dot(b_pq, tl.trans(b_write), PREC)
    if SEGMENTS:
        b_pq = tl.where(m_enter[:, None], b_pq, 0.0)
    return dot(b_pq, b_S, PREC) + dot(tl.where(m_seen, b_A, 0.0), b_y, PREC)


# ---------------------------------------------------------------- forward kernels


@jit
def states_kernel(p_k, p_v, p_g, p_seg, p_chunks, p_b, p_decay, p_K, p_V, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh,
                  T: int, N: int, E, SHARE, M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
                  BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VARLEN: tl.constexpr,
                  SEGMENTS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """b, e^{b_C}, and what the chunk writes into both memories (to the slot after its own). Grid (N, B*E)."""
    i_n, i_b, i_e = tl.program_id(0), tl.program_id(1) // E, tl.program_id(1) % E
    i_t, size, slot = chunk_span(p_chunks, i_n, i_b, T, N, C, VARLEN)
    if size <= 0:
        return
    o_c, o_m, o_d, o_dv, s_g = tl.arange(0, C), tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV), E * M
    gate = gate_offset(i_b, i_t, i_e, T, E, M)
    # [C, BM]
    b_g = load_gates(p_g + gate, o_c, o_m, s_g, size, M)
    b_b = tl.cumsum(b_g, 0) * 1.4426950408889634
    store_rows(p_b + gate, b_b, o_c, o_m, s_g, size, M)
    # [BM]; the smallest sum is the last one, and rows past the end repeat it
    b_end = tl.min(b_b, 0)
    b_decay = tl.exp2(b_end)
    b_w = write_strength(b_g) * tl.exp2(b_end[None, :] - b_b)
    if SEGMENTS:
        b_seg, entered, leaves = segment_flow(p_seg + i_b.to(tl.int64) * T, o_c, i_t, size)
        b_w = tl.where((b_seg == leaves)[:, None], b_w, 0.0)
        b_decay = tl.where(entered == leaves, b_decay, 0.0)
    tl.store(p_decay + (slot * E + i_e) * M + o_m, b_decay, mask=o_m < M)
    b_wt = tl.trans(b_w)
    i_h = i_e // SHARE
    # [C, BD], [C, BDV]
    b_k = load_rows(p_k + i_b.to(tl.int64) * s_kb + i_t.to(tl.int64) * s_kt + i_h * s_kh, o_c, o_d, s_kt, size, D)
    b_v = load_rows(p_v + i_b.to(tl.int64) * s_vb + i_t.to(tl.int64) * s_vt + i_h * s_vh, o_c, o_dv, s_vt, size, DV)
    store_memory(p_K + ((slot + 1) * E + i_e) * (M * D), dot(b_wt, b_k, PREC), o_m, o_d, M, D)
    store_memory(p_V + ((slot + 1) * E + i_e) * (M * DV), dot(b_wt, b_v, PREC), o_m, o_dv, M, DV)


@jit
def compose(b_a, b_x, b_a_next, b_x_next):
    """One affine map after another: S -> a S + x."""
    return b_a * b_a_next, b_x * b_a_next + b_x_next


@jit
def scan_kernel(p_K, p_V, p_decay, p_K0, p_V0, p_K1, p_V1, p_rows, N: int, E, M: tl.constexpr, D: tl.constexpr,
                DV: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, REVERSE: tl.constexpr, VARLEN: tl.constexpr,
                START: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """S_{n+1} = decay_n S_n + written_n over the chunks of a row, in place; REVERSE runs gradients backwards.

    Forward finds written_n in slot n + 1, REVERSE finds it in slot n. START: p_*0 hold the first value (else 0).
    LAST: the last value also goes to p_*1. Grid (M * blocks of BX columns, rows * E, 2): keys, then values.
    """
    blocks = tl.cdiv(tl.maximum(D, DV), BX)
    i_m, i_r, i_e = tl.program_id(0) // blocks, tl.program_id(1) // E, tl.program_id(1) % E
    if tl.program_id(2) == 0:
        p_S, p_S0, p_S1, width = p_K, p_K0, p_K1, D
    else:
        p_S, p_S0, p_S1, width = p_V, p_V0, p_V1, DV
    if VARLEN:
        first, count = tl.load(p_rows + 2 * i_r), tl.load(p_rows + 2 * i_r + 1)
    else:
        first, count = i_r * (N + 1), N
    o_d, o_n = tl.program_id(0) % blocks * BX + tl.arange(0, BX), tl.arange(0, BN)
    m_d, o_x = o_d < width, i_m * width + o_d
    o_flat = (i_r.to(tl.int64) * E + i_e) * (M * width) + o_x
    # [BX]
    b_S = tl.zeros([BX], tl.float32)
    if START:
        b_S += tl.load(p_S0 + o_flat, mask=m_d, other=0.0)
    edge = first + (count if REVERSE else 0)
    tl.store(p_S + (edge.to(tl.int64) * E + i_e) * (M * width) + o_x, b_S, mask=m_d)
    for i_n in range(0, count, BN):
        o_j = i_n + o_n
        if REVERSE:
            o_decay = first + count - 1 - o_j
            o_slot = o_decay
        else:
            o_decay = first + o_j
            o_slot = o_decay + 1
        # [BN, BX], [BN]
        m_S = (o_j < count)[:, None] & m_d[None, :]
        p_tile = p_S + (o_slot.to(tl.int64) * E + i_e)[:, None] * (M * width) + o_x[None, :]
        b_x = tl.load(p_tile, mask=m_S, other=0.0)
        b_decay = tl.load(p_decay + (o_decay.to(tl.int64) * E + i_e) * M + i_m, mask=o_j < count, other=1.0)
        b_a, b_x = tl.associative_scan((tl.broadcast_to(b_decay[:, None], [BN, BX]), b_x), 0, compose)
        b_x += b_a * b_S[None, :]
        tl.store(p_tile, b_x, mask=m_S)
        b_S = tl.sum(tl.where((o_n == BN - 1)[:, None], b_x, 0.0), 0)
    if LAST:
        tl.store(p_S1 + o_flat, b_S, mask=m_d)


@jit
def output_kernel(p_q, p_k, p_v, p_g, p_seg, p_chunks, p_b, p_K, p_V, p_o, scale,
                  s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, T: int, N: int, H, E, SHARE, HEADS,
                  M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
                  BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VARLEN: tl.constexpr,
                  SEGMENTS: tl.constexpr, RANGE: tl.constexpr, HOLD: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """o of one chunk for HEADS query heads of one memory. Grid (N, B*E, G / HEADS).

    HOLD keeps what all heads share in shared memory; without it each head loads it again, in a third of the space.
    """
    i_n, i_b, i_e = tl.program_id(0), tl.program_id(1) // E, tl.program_id(1) % E
    i_t, size, slot = chunk_span(p_chunks, i_n, i_b, T, N, C, VARLEN)
    if size <= 0:
        return
    o_c, o_m, o_d, o_dv, s_g = tl.arange(0, C), tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV), E * M
    gate, G = gate_offset(i_b, i_t, i_e, T, E, M), H // E
    i_b, i_t, i_h = i_b.to(tl.int64), i_t.to(tl.int64), i_e // SHARE
    p_g, p_b = p_g + gate, p_b + gate
    # A strong chunk counts its `query` from its own start and does without `write`.
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
    first = tl.program_id(2) * HEADS
    for i_g in range(first, tl.minimum(first + HEADS, G)):
        i_q = i_e * G + i_g
        if not HOLD:
            b_k, b_K, b_write = load_side(p_k, s_kt, p_K, p_g, p_b, b_mid, o_c, o_m, o_d, s_g, size, M, D)
        b_q = load_rows(p_q + i_b * s_qb + i_t * s_qt + i_q * s_qh, o_c, o_d, s_qt, size, D)
        b_l = read_slots(b_q, b_k, b_K, b_query, b_write, m_enter, m_seen, strong, p_g, p_b, o_m, s_g, size,
                         M, C, LEVELS, SEGMENTS, PREC)  # fmt: skip
        b_p = softmax(b_l * scale, o_m, M)
        if not HOLD:
            b_v, b_V, b_write = load_side(p_v, s_vt, p_V, p_g, p_b, b_mid, o_c, o_m, o_dv, s_g, size, M, DV)
        b_o = mix_slots(b_p, b_v, b_V, b_query, b_write, m_enter, m_seen, strong, p_g, p_b, o_m, s_g, size,
                        M, C, LEVELS, SEGMENTS, PREC)  # fmt: skip
        store_rows(p_o + ((i_b * T + i_t) * H + i_q) * DV, b_o, o_c, o_dv, H * DV, size, DV)


@jit
def load_side(p_y, s_yt, p_S, p_g, p_b, b_mid, o_c, o_m, o_d, s_g, size, M: tl.constexpr, D: tl.constexpr):
    """Keys or values [C,BD], the memory that enters, times e^{b_mid} [BM,BD], and s_i e^{b_mid-b_i} [C,BM]."""
    b_y = load_rows(p_y, o_c, o_d, s_yt, size, D)
    b_S = load_memory(p_S, o_m, o_d, M, D) * tl.exp2(b_mid)[:, None]
    b_write = write_strength(load_gates(p_g, o_c, o_m, s_g, size, M))
    return b_y, b_S, b_write * tl.exp2(b_mid[None, :] - load_sums(p_b, o_c, o_m, s_g, size, M))


@jit
def softmax(b_l, o_m, M: tl.constexpr):
    """Over the slots, padded ones excluded."""
    b_l = tl.where((o_m < M)[None, :], b_l, -float("inf"))
    b_p = tl.exp(b_l - tl.max(b_l, 1)[:, None])
    return b_p / tl.sum(b_p, 1)[:, None]


# ---------------------------------------------------------------- decode step


@jit
def step_kernel(p_q, p_k, p_v, p_g, p_real, p_K, p_V, p_seen, p_o, p_K1, p_V1, p_seen1, scale,
                s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_gb, s_pb, H, E, SHARE, M: tl.constexpr, D: tl.constexpr,
                DV: tl.constexpr, BM: tl.constexpr, BX: tl.constexpr, BG: tl.constexpr, PADDED: tl.constexpr,
                PREC: tl.constexpr):  # fmt: skip
    """One token, eq. 6 as it stands: both memories read and written once, BX columns at a time. BG >= G rows of
    queries. Grid (E, B)."""
    i_e, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_m, o_g, G = tl.arange(0, BM), tl.arange(0, BG), H // E
    memory = (i_b * E + i_e) * M
    # [BM]
    b_g = tl.load(p_g + i_b * s_gb + i_e * M + o_m, mask=o_m < M, other=0.0).to(tl.float32)
    real = 1
    if PADDED:
        real = tl.load(p_real + i_b * s_pb).to(tl.int32)
        b_g = tl.where(real != 0, b_g, 0.0)
    b_alpha, b_s = tl.exp(b_g)[:, None], write_strength(b_g)[:, None]
    if i_e == 0:
        tl.store(p_seen1 + i_b, tl.load(p_seen + i_b) + real)
    # [BG, BM]
    b_l = tl.zeros([BG, BM], tl.float32)
    for i_d in tl.static_range(0, D, BX):
        o_d = i_d + tl.arange(0, BX)
        # [BM, BX], [BX], [BG, BX]
        b_K = load_memory(p_K + memory * D, o_m, o_d, M, D)
        b_k = tl.load(p_k + i_b * s_kb + i_e // SHARE * s_kh + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        b_q = load_rows(p_q + i_b * s_qb + i_e * G * s_qh, o_g, o_d, s_qh, G, D)
        b_K = b_alpha * b_K + b_s * b_k[None, :]
        store_memory(p_K1 + memory * D, b_K, o_m, o_d, M, D)
        b_l += dot(b_q, tl.trans(b_K), PREC)
    b_p = softmax(b_l * scale, o_m, M)
    if PADDED:
        b_p = tl.where(real != 0, b_p, 0.0)
    for i_d in tl.static_range(0, DV, BX):
        o_d = i_d + tl.arange(0, BX)
        # [BM, BX], [BX]
        b_V = load_memory(p_V + memory * DV, o_m, o_d, M, DV)
        b_v = tl.load(p_v + i_b * s_vb + i_e // SHARE * s_vh + o_d, mask=o_d < DV, other=0.0).to(tl.float32)
        b_V = b_alpha * b_V + b_s * b_v[None, :]
        store_memory(p_V1 + memory * DV, b_V, o_m, o_d, M, DV)
        store_rows(p_o + (i_b * H + i_e * G) * DV, dot(b_p, b_V, PREC), o_g, o_d, DV, G, DV)
