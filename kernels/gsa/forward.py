"""GSA on the GPU, forward: the chunk form of gsa.py in three launches, and the decode step in one.

    states   per chunk: b = cumsum(g), the chunk's decay e^{b_C}, and what it writes, sum_i e^{b_C-b_i} s_i k_i^T
    scan     over chunks, elementwise: the memories that enter each chunk, in place
    output   per chunk: first pass, softmax, second pass; the query heads of one memory one tile after another, so
             that keys, values, memories and decays are read once for all of them

Scratch: b [B,T,E,M]; memories [slots,E,M,D] fp32, where a row (or sequence) of N chunks owns N + 1 consecutive
slots: slot n holds what enters chunk n, slot N what leaves the last. triton_helpers.py has the parts and the letters.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .triton_helpers import (
    load_gates, load_memory, load_side, load_write, locate, mix_slots, read_side, read_slots, reference, softmax,
    store_memory, write_strength,
)  # fmt: skip
from ..gpu.triton_helpers import (
    as_operand, dot_given_left, dot_given_right, jit, load_rows, parts, segment_flow, store_rows, tl,
)


@jit
def states_kernel(p_k, p_v, p_g, p_seg, p_chunks, p_b, p_decay, p_K, p_V, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh,
                  T: int, N: int, H, E, SHARE, M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                  C: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VARLEN: tl.constexpr,
                  SEGMENTS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """b, e^{b_C}, and what the chunk writes into both memories (to the slot after its own). Grid (N, B*E)."""
    i_b, i_t, i_e, size, slot, gate = locate(p_chunks, tl.program_id(0), T, N, E, M, C, VARLEN)
    if size <= 0:
        return
    o_c, o_m, o_d, o_dv, s_g = tl.arange(0, C), tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV), E * M
    # [C, BM]
    b_g = load_gates(p_g + gate, o_c, o_m, s_g, size, M)
    b_b = tl.cumsum(b_g, 0) * 1.4426950408889634
    store_rows(p_b + gate, b_b, o_c, o_m, s_g, size, M)
    # [BM]; the smallest sum is the last one, and rows past the end repeat it
    b_end = tl.min(b_b, 0)
    b_decay = tl.exp2(b_end)
    b_w = write_strength(b_g) * tl.exp2(b_end[None, :] - b_b)
    if SEGMENTS:
        b_seg, entered, leaves = segment_flow(p_seg + i_b * T, o_c, i_t, size)
        b_w = tl.where((b_seg == leaves)[:, None], b_w, 0.0)
        b_decay = tl.where(entered == leaves, b_decay, 0.0)
    tl.store(p_decay + (slot * E + i_e) * M + o_m, b_decay, mask=o_m < M)
    b_w, b_w_low = parts(tl.trans(b_w), p_k.dtype.element_ty == tl.bfloat16)
    i_h = i_e // SHARE
    # [C, BD], [C, BDV]
    b_k = load_rows(p_k + i_b * s_kb + i_t * s_kt + i_h * s_kh, o_c, o_d, s_kt, size, D)
    b_v = load_rows(p_v + i_b * s_vb + i_t * s_vt + i_h * s_vh, o_c, o_dv, s_vt, size, DV)
    store_memory(p_K + ((slot + 1) * E + i_e) * (M * D), dot_given_right(b_w, b_w_low, b_k, PREC), o_m, o_d, M, D)
    store_memory(p_V + ((slot + 1) * E + i_e) * (M * DV), dot_given_right(b_w, b_w_low, b_v, PREC), o_m, o_dv, M, DV)


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
                  s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, T: int, N: int, H, E, SHARE,
                  M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
                  BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VARLEN: tl.constexpr,
                  SEGMENTS: tl.constexpr, RANGE: tl.constexpr, STACK: tl.constexpr, HOLD: tl.constexpr,
                  PREC: tl.constexpr):  # fmt: skip
    """o of one chunk for the query heads of one memory, STACK of them at a time. Grid (N, B*E).

    HOLD keeps what all heads share in shared memory; without it each tile loads it again, in less space.
    """
    i_b, i_t, i_e, size, slot, gate = locate(p_chunks, tl.program_id(0), T, N, E, M, C, VARLEN)
    if size <= 0:
        return
    p_g, p_b, i_h, i_q, row = p_g + gate, p_b + gate, i_e // SHARE, i_e * (H // E), i_b * T
    p_q += i_b * s_qb + i_t * s_qt + i_q * s_qh
    p_k += i_b * s_kb + i_t * s_kt + i_h * s_kh
    p_v += i_b * s_vb + i_t * s_vt + i_h * s_vh
    p_K += (slot * E + i_e) * (M * D)
    p_V += (slot * E + i_e) * (M * DV)
    p_o += ((row + i_t) * H + i_q) * DV
    strong, b_mid, _ = reference(p_b, tl.arange(0, BM), E * M, size, M, C, RANGE)
    if strong:
        output_chunk(p_q, s_qt, s_qh, p_k, s_kt, p_v, s_vt, p_g, p_seg, row, p_b, p_K, p_V, p_o, scale, b_mid * 0.0,
                     i_t, size, H, E, M, D, DV, C, LEVELS, BM, BD, BDV, SEGMENTS, RANGE, STACK, HOLD,
                     True, PREC)  # fmt: skip
    else:
        output_chunk(p_q, s_qt, s_qh, p_k, s_kt, p_v, s_vt, p_g, p_seg, row, p_b, p_K, p_V, p_o, scale, b_mid,
                     i_t, size, H, E, M, D, DV, C, LEVELS, BM, BD, BDV, SEGMENTS, RANGE, STACK, HOLD,
                     False, PREC)  # fmt: skip


@jit
def output_chunk(p_q, s_qt, s_qh, p_k, s_kt, p_v, s_vt, p_g, p_seg, row, p_b, p_K, p_V, p_o, scale, b_mid, i_t, size,
                 H, E, M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
                 BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, SEGMENTS: tl.constexpr, RANGE: tl.constexpr,
                 STACK: tl.constexpr, HOLD: tl.constexpr, STRONG: tl.constexpr,
                 PREC: tl.constexpr):  # fmt: skip
    """`output_kernel` for one kind of chunk; pointers at the chunk's first token, heads at the memory's first."""
    o_c, o_r, o_m = tl.arange(0, C), tl.arange(0, STACK * C), tl.arange(0, BM)
    o_d, o_dv = tl.arange(0, BD), tl.arange(0, BDV)
    o_t, o_h, s_g = o_r % C, (o_r // C)[:, None], E * M
    b_query, m_enter, m_seen, level = read_side(p_b, p_seg, row, b_mid, o_t, o_c, o_m, s_g, i_t, size,
                                                M, LEVELS, RANGE, SEGMENTS, STRONG)  # fmt: skip
    b_write, b_write_low = load_write(p_g, p_b, b_mid, o_c, o_m, s_g, size, M, STRONG, p_k.dtype.element_ty)
    if HOLD:
        b_k, b_K, b_K_low = load_side(p_k, s_kt, p_K, b_mid, o_c, o_m, o_d, size, M, D)
        b_v, b_V, b_V_low = load_side(p_v, s_vt, p_V, b_mid, o_c, o_m, o_dv, size, M, DV)
    for i_g in range(0, H // E, STACK):
        if not HOLD:
            b_k, b_K, b_K_low = load_side(p_k, s_kt, p_K, b_mid, o_c, o_m, o_d, size, M, D)
        b_q = load_rows(p_q + (i_g + o_h) * s_qh, o_t, o_d, s_qt, size, D)
        b_l = read_slots(b_q, b_k, b_K, b_K_low, b_query, b_write, b_write_low, m_enter, m_seen, p_g, p_b, level,
                         o_t, o_c, o_m, s_g, size, M, LEVELS, RANGE, SEGMENTS, STRONG, PREC)  # fmt: skip
        b_p = softmax(b_l * scale, o_m, M)
        if not STRONG:
            b_p *= b_query
        if not HOLD:
            b_v, b_V, b_V_low = load_side(p_v, s_vt, p_V, b_mid, o_c, o_m, o_dv, size, M, DV)
        b_o = mix_slots(b_p, b_v, b_V, b_V_low, b_query, b_write, b_write_low, m_enter, m_seen, p_g, p_b, level,
                        o_t, o_c, o_m, s_g, size, M, LEVELS, RANGE, SEGMENTS, STRONG, PREC)  # fmt: skip
        store_rows(p_o + (i_g + o_h) * DV, b_o, o_t, o_dv, H * DV, size, DV)


# ---------------------------------------------------------------- decode step


@jit
def step_kernel(p_q, p_k, p_v, p_g, p_real, p_rows, p_K, p_V, p_seen, p_o, p_K1, p_V1, p_seen1, scale,
                s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_gb, s_pb, s_K, s_V, s_n, H, E, SHARE, M: tl.constexpr,
                D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BX: tl.constexpr, BG: tl.constexpr,
                PADDED: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """One token, eq. 6 as it stands: both memories read and written once, BX columns at a time. BG >= G rows of
    queries. Grid (E, B)."""
    i_e, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_m, o_g, G = tl.arange(0, BM), tl.arange(0, BG), H // E
    # [BM]
    b_g = tl.load(p_g + i_b * s_gb + i_e * M + o_m, mask=o_m < M, other=0.0).to(tl.float32)
    real, row, held = 1, i_b, M
    if p_real is not None:
        real = tl.load(p_real + i_b * s_pb).to(tl.int32)
    if p_rows is not None:
        row = tl.load(p_rows + i_b).to(tl.int64)
        real, held = tl.where(row >= 0, real, 0), tl.where(row >= 0, M, 0)
    if PADDED:
        b_g = tl.where(real != 0, b_g, 0.0)
    b_alpha, b_s = tl.exp(b_g)[:, None], write_strength(b_g)[:, None]
    if i_e == 0:
        seen = tl.load(p_seen + row * s_n, mask=row >= 0, other=0)
        tl.debug_barrier()  # all threads load it, and none may do so behind the store
        tl.store(p_seen1 + row * s_n, seen + real, mask=row >= 0)
    p_K, p_K1 = p_K + row * s_K + i_e * (M * D), p_K1 + row * s_K + i_e * (M * D)
    p_V, p_V1 = p_V + row * s_V + i_e * (M * DV), p_V1 + row * s_V + i_e * (M * DV)
    # [BG, BM]
    b_l = tl.zeros([BG, BM], tl.float32)
    for i_d in tl.static_range(0, D, BX):
        o_d = i_d + tl.arange(0, BX)
        # [BM, BX], [BX], [BG, BX]
        b_K = load_memory(p_K, o_m, o_d, held, D)
        b_k = tl.load(p_k + i_b * s_kb + i_e // SHARE * s_kh + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        b_q = load_rows(p_q + i_b * s_qb + i_e * G * s_qh, o_g, o_d, s_qh, G, D)
        b_K = b_alpha * b_K + b_s * b_k[None, :]
        store_memory(p_K1, b_K, o_m, o_d, held, D)
        b_K, b_K_low = parts(b_K, b_q.dtype == tl.bfloat16)
        b_l += dot_given_left(b_q, tl.trans(b_K), tl.trans(b_K_low), PREC)
    b_p = softmax(b_l * scale, o_m, M)
    if PADDED:
        b_p = tl.where(real != 0, b_p, 0.0)
    for i_d in tl.static_range(0, DV, BX):
        o_d = i_d + tl.arange(0, BX)
        # [BM, BX], [BX]
        b_V = load_memory(p_V, o_m, o_d, held, DV)
        b_v = tl.load(p_v + i_b * s_vb + i_e // SHARE * s_vh + o_d, mask=o_d < DV, other=0.0).to(tl.float32)
        b_V = b_alpha * b_V + b_s * b_v[None, :]
        store_memory(p_V1, b_V, o_m, o_d, held, DV)
        b_o = tl.dot(as_operand(b_p, PREC), as_operand(b_V, PREC), input_precision=PREC)
        store_rows(p_o + (i_b * H + i_e * G) * DV, b_o, o_g, o_d, DV, G, DV)
