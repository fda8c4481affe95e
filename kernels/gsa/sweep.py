"""GSA on the GPU where every query head has a memory: programs that walk along a row with the memory in registers.

The chunk form of gsa.py writes the memory that enters every chunk, 8 M D bytes for both: with a memory per query head
that is more than everything else. Here a program owns one head, and a part of the slots or of the columns of one memory.
It walks over the chunks of a piece of the row and keeps its memory in fp32 registers.

    factors  per chunk: d_t = b_t - b_mid, and the write factors W_i = s_i e^{-d_i}, as operands
    carry    only where a row is cut into pieces: what a piece writes; the scan of forward.py then joins the pieces
    read     first pass, per part of the slots: l~, and dp~ in the backward
    attend   per token: p~ = e^{d_t} softmax(c l), and in the backward dl~ and p dp + l dl
    mix      second pass, per part of the columns: o from p~ and v, dq from dl~ and k
    keys     backwards along the row, per part of the columns: dv and dk
    gates    backwards along the row, per part of the slots: ds~ of values and keys
    sums     dg, which sums over what follows in the row

With a memory S and b_end = d_last + b_mid, one chunk is, for tokens t >= i:

    l~_t  = (e^{b_mid} S) x_t + sum_i (x_t.y_i) W_i           l = e^{d_t} l~_t
    o_t   = (e^{b_mid} S)^T p~_t + sum_i (p~_t.W_i) y_i
    S'    = e^{d_last} (e^{b_mid} S + sum_i W_i y_i^T)
    dy_i  = (e^{d_last} dS')^T W_i + sum_t (W_i.w~_t) x_t      ds~_i = (e^{d_last} dS') y_i + sum_t (y_i.x_t) w~_t
    dS    = e^{b_mid} (e^{d_last} dS' + sum_t w~_t x_t^T)      s ds = W ds~, ds = e^{-d} ds~

so every operand of a product is loaded as it is, or is a memory. A chunk in which some slot decays by more than
2^-RANGE is walked in steps of fewer tokens, a power of two, each with d and W of its own: the same code.

Beside bf16 inputs W, p~, dl~, the products inside a chunk and memories are rounded to bf16 once, as flash attention
rounds its weights, and so are dk and dv of the query heads that share a KV head. dg is a sum over all later tokens of
what nearly cancels: read from queries, less written by keys. So db and s ds take the factors as rounded, and what `read`
and `gates` read from a memory they read from two parts of it. (From one part, dg had errors of 1.7e-3 to 3.2e-3 of its
norm in place of 2.5e-4 to 1.1e-3.) But e^g ds = e^{g-d} ds~ takes g itself.

Where rows hold several documents (SEGMENTS), each document has chunks of its own, so that no chunk needs a mask: masks
and what they compare spill registers, and took as long as the products. A table (`tables` of launch.py) says where the
chunks of a row begin. At the first one of a further document e^{b_mid} becomes 0: nothing enters it, and nothing goes
back from it.

b and d are kept in units of log 2. Letters as in gsa.py, with H = E. w~ is p~ for the value memory and dl~ for the key
memory; x, y are do, v or q, k. N: chunks of a row of one document; P: pieces of a row; L: chunks of a piece, beside
documents those that begin within L * C tokens; SPLIT: programs that share a memory, each with BX slots or columns;
SHARE: gate heads of a KV head.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from ..gpu.triton_helpers import dot_given, dot_given_left, jit, three_parts, tl
from .triton_helpers import softmax

# Log-gates are clamped to this: e^-20 is below any rounding, and three such gates still decay by less than 2^RANGE.
FLOOR = tl.constexpr(-20.0) if tl is not None else -20.0

# ---------------------------------------------------------------- tiles


@jit
def parts(b_x, SPLIT: tl.constexpr):
    """A memory as `parts` of gpu/triton_helpers.py, rounded by hand: conversions of what is exact go two at a time."""
    if SPLIT:
        b_round = ((b_x.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000).to(tl.float32, bitcast=True)
        b_high, b_low = b_round.to(tl.bfloat16), (b_x - b_round).to(tl.bfloat16)
    else:
        b_high, b_low = b_x, b_x
    return b_high, b_low


@jit
def load_tile(p_x, o_r, o_c, s_r, rows):
    """Rows o_r of a matrix, zeros past `rows`: [R,X]."""
    return tl.load(p_x + (o_r[:, None] * s_r + o_c[None, :]), mask=(o_r < rows)[:, None], other=0.0)


@jit
def store_tile(p_x, b_x, o_r, o_c, s_r, rows):
    tl.store(p_x + (o_r[:, None] * s_r + o_c[None, :]), b_x.to(p_x.dtype.element_ty), mask=(o_r < rows)[:, None])


@jit
def given(b_x, p_w):
    """A computed factor as operand, rounded once, of the type in which such factors are stored at p_w."""
    return b_x.to(p_w.dtype.element_ty)


@jit
def place(p_first, N, L, P, SPLIT: tl.constexpr, E, SEGMENTS: tl.constexpr):
    """Which part of the memory, piece, batch row and head a program has, and the piece's first chunk and its end."""
    i_x, i_p = tl.program_id(0) % SPLIT, tl.program_id(0) // SPLIT
    i_b, i_e = (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    first, end = i_p * L, tl.minimum(i_p * L + L, N)
    if SEGMENTS:
        p_first += i_b * (N + 1)
        first, end = tl.load(p_first + first), tl.load(p_first + end)
    return i_x, i_p, i_b, i_e, first, end


@jit
def chunk_at(p_chunks, i_b, i_n, T, C: tl.constexpr, SEGMENTS: tl.constexpr):
    """Of chunk i_n of a row the first token, the tokens, and 1 where a document begins behind another with it."""
    at, fresh = i_n * C, 0
    rows = tl.minimum(C, T - at)
    if SEGMENTS:
        p_chunks += i_b * (T + 2) + i_n
        entry = tl.load(p_chunks)
        at, fresh = entry // 2, entry % 2
        rows = tl.load(p_chunks + 1) // 2 - at
    return at, rows, fresh


@jit
def step_of(p_n, i_b, i_n, i_e, T, N, E, SEGMENTS: tl.constexpr):
    """Tokens of a step of chunk i_n."""
    return tl.load(p_n + (i_b * (T if SEGMENTS else N) + i_n) * E + i_e)


@jit
def step_at(at, rows, fresh, step, i_s, REVERSE: tl.constexpr):
    """`chunk_at` of one step of a chunk, i_s tokens from the chunk's first step or, with REVERSE, back from its last."""
    if REVERSE:
        i_s = (rows - 1) // step * step - i_s
    return at + i_s, tl.minimum(step, rows - i_s), tl.where(i_s == 0, fresh, 0)


@jit
def step_edges(p_g, p_d, o_m, s_g, rows, fresh, SEGMENTS: tl.constexpr):
    """e^{b_mid} and e^{d_last} of a step: [BX] each."""
    b_g = tl.maximum(tl.load(p_g + o_m).to(tl.float32), FLOOR)
    b_start = tl.exp2(b_g * 1.4426950408889634 - tl.load(p_d + o_m))
    if SEGMENTS:
        b_start = tl.where(fresh > 0, 0.0, b_start)
    return b_start, tl.exp2(tl.load(p_d + (rows - 1) * s_g + o_m))


# ---------------------------------------------------------------- factors


@jit
def in_blocks(b_b, C: tl.constexpr, BX: tl.constexpr, SIZE: tl.constexpr, RANGE: tl.constexpr):
    """b relative to the middle of each block of SIZE tokens [C,BX], and whether none decays by more than 2^-RANGE."""
    b_blocks = tl.reshape(b_b, [C // SIZE, SIZE, BX])
    b_span = tl.max(b_blocks, 1) - tl.min(b_blocks, 1)
    m_mid = (tl.arange(0, SIZE) == (SIZE - 1) // 2)[None, :, None]
    b_mid = tl.sum(tl.where(m_mid, b_blocks, 0.0), 1)
    b_d = tl.reshape(b_blocks - b_mid[:, None, :], [C, BX])
    return b_d, (tl.max(tl.max(b_span, 1), 0) <= RANGE).to(tl.int32)


@jit
def sums_from_middle(b_g, C: tl.constexpr, HALF: tl.constexpr):
    """b relative to the middle of the chunk [C,BX], as a product with a matrix of 0, 1 and -1. HALF: each product is
    one of bf16, and exact."""
    o_t, o_i = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_m = (o_i <= o_t).to(tl.float32) - (o_i < C // 2).to(tl.float32)
    if HALF:
        b_m = b_m.to(tl.bfloat16)
        b_high, b_mid, b_low = three_parts(b_g)
        b_d = tl.dot(b_m, b_high, tl.dot(b_m, b_mid, tl.dot(b_m, b_low)))
    else:
        b_d = tl.dot(b_m, b_g, input_precision="ieee")
    return b_d * 1.4426950408889634


@jit
def strength(b_g):
    """-expm1(g) for g <= 0 up to 2e-6 of it, in fewer steps than `write_strength`."""
    b_small = tl.maximum(b_g, -0.03125)
    b_series = 1.0 + b_small * 0.5 * (1.0 + b_small * (1.0 / 3.0) * (1.0 + b_small * 0.25))
    return tl.where(b_g > -0.03125, -b_small * b_series, 1.0 - tl.exp2(b_g * 1.4426950408889634))


@jit
def factor(p_g, p_d, p_W, p_n, p_strong, o_m, rows, s_g, C: tl.constexpr, BX: tl.constexpr, LEVELS: tl.constexpr,
           RANGE: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """d and W of BX slots of one chunk. Where that decays by more than its range, its tokens of a step become 0, and its
    row has chunks of several steps; with STEPS, which takes all slots, they become as few as need be."""
    o_c = tl.arange(0, C)
    # [C, BX]
    b_g = tl.maximum(load_tile(p_g, o_c, o_m, s_g, rows).to(tl.float32), FLOOR)
    if STEPS:
        b_b = tl.cumsum(b_g, 0) * 1.4426950408889634
        b_d, step, done = b_b, C, 0
        for i in tl.static_range(LEVELS):
            b_block, fits = in_blocks(b_b, C, BX, C >> (i + 1), RANGE)
            if fits * (1 - done) > 0:
                b_d, step, done = b_block, C >> (i + 1), 1
        tl.store(p_n, step)
    else:
        b_d = sums_from_middle(b_g, C, p_W.dtype.element_ty == tl.bfloat16)
        if tl.min(tl.sum(b_g, 0), 0) * 1.4426950408889634 < -RANGE:
            tl.store(p_n, 0)
            tl.store(p_strong, 1)
    store_tile(p_d, b_d, o_c, o_m, s_g, rows)
    store_tile(p_W, strength(b_g) * tl.exp2(-b_d), o_c, o_m, s_g, rows)


@jit
def factors_kernel(p_g, p_d, p_W, p_n, p_strong, p_chunks, p_first, T: int, N: int, E, M: tl.constexpr,
                   C: tl.constexpr, BX: tl.constexpr, SPLIT: tl.constexpr, LEVELS: tl.constexpr, RANGE: tl.constexpr,
                   SEGMENTS: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """d and W [B,T,E,M], the tokens of a step of each chunk [B,N,E], which come as C, and whether a row has chunks of
    several steps [B,E], which comes as 0. With SEGMENTS rows have more chunks, and steps [B,T,E].

    Two launches. The first takes N chunks of each row, or 2 N with SEGMENTS; grid (chunks * SPLIT, B*E). The second
    (STEPS, with all slots in one program) takes those of several steps, and of many short documents the chunks that are
    left; grid (any, B*E).
    """
    i_n, i_b, i_e = tl.program_id(0) // SPLIT, (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    o_m = tl.program_id(0) % SPLIT * BX + tl.arange(0, BX)
    p_strong += i_b * E + i_e
    p_n += i_b * (T if SEGMENTS else N) * E + i_e
    count, done = N, N
    if SEGMENTS:
        count, done = tl.load(p_first + i_b * (N + 1) + N), 2 * N
    if STEPS:
        if (tl.load(p_strong) > 0) | (count > done):
            for i in range(i_n, count, tl.num_programs(0)):
                at, rows, _fresh = chunk_at(p_chunks, i_b, i, T, C, SEGMENTS)
                gate = ((i_b * T + at) * E + i_e) * M
                if i >= done:
                    factor(p_g + gate, p_d + gate, p_W + gate, p_n + i * E, p_strong, o_m, rows, E * M, C, BX, LEVELS,
                           RANGE, False)  # fmt: skip
                    # What one thread stored others load, and the same places are written below.
                    tl.debug_barrier()
                if tl.load(p_n + i * E) == 0:
                    tl.debug_barrier()
                    factor(p_g + gate, p_d + gate, p_W + gate, p_n + i * E, p_strong, o_m, rows, E * M, C, BX, LEVELS,
                           RANGE, True)  # fmt: skip
    elif i_n < count:
        at, rows, _fresh = chunk_at(p_chunks, i_b, i_n, T, C, SEGMENTS)
        gate = ((i_b * T + at) * E + i_e) * M
        factor(p_g + gate, p_d + gate, p_W + gate, p_n + i_n * E, p_strong, o_m, rows, E * M, C, BX, LEVELS, RANGE, False)


# ---------------------------------------------------------------- where rows are cut into pieces


@jit
def carry_step(p_y, p_w, p_g, p_d, b_S, b_decay, at, rows, fresh, o_c, o_m, o_x, s_t, i_b, i_e, T, E,
               M: tl.constexpr, REVERSE: tl.constexpr, SEGMENTS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """One step of `carry_kernel`: the memory [M,BX] and the decay [M] with it."""
    row = i_b * T + at
    i_t, gate = row - i_b * T, (row * E + i_e) * M
    b_before, b_after = step_edges(p_g + gate, p_d + gate, o_m, E * M, rows, fresh, SEGMENTS)
    b_decay *= b_before * b_after
    if REVERSE:
        b_before, b_after = b_after, b_before
    b_w = load_tile(p_w + gate, o_c, o_m, E * M, rows)
    b_y = load_tile(p_y + i_t * s_t, o_c, o_x, s_t, rows)
    b_S = dot_given(tl.trans(b_w), b_y, PREC, b_S * b_before[:, None]) * b_after[:, None]
    return b_S, b_decay


@jit
def carry_kernel(p_k, p_v, p_wk, p_wv, p_g, p_d, p_n, p_strong, p_chunks, p_first, p_K, p_V,
                 p_decay, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, T: int, N: int, L: int, P: int, E, SHARE, M: tl.constexpr,
                 D: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, SPLIT: tl.constexpr, REVERSE: tl.constexpr,
                 SEGMENTS: tl.constexpr, STEPS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """What a piece adds to both memories, and its decay [slots,E,M], in slot `piece + 1`, as states_kernel writes them.

    REVERSE: what its queries add to the gradients of both, in slot `piece`. Grid (P * SPLIT, B*E, 2).
    """
    i_x, i_p, i_b, i_e, first, end = place(p_first, N, L, P, SPLIT, E, SEGMENTS)
    if (tl.load(p_strong + i_b * E + i_e) > 0) != STEPS:
        return
    if tl.program_id(2) == 0:
        p_y, p_w = p_k + i_b * s_kb + i_e // SHARE * s_kh, p_wk
        p_S, s_t = p_K, s_kt
    else:
        p_y, p_w = p_v + i_b * s_vb + i_e // SHARE * s_vh, p_wv
        p_S, s_t = p_V, s_vt
    o_c, o_m, o_x = tl.arange(0, C), tl.arange(0, M), i_x * BX + tl.arange(0, BX)
    b_S, b_decay = tl.zeros([M, BX], tl.float32), tl.zeros([M], tl.float32) + 1.0
    for i in range(first, end):
        i_n = i
        if REVERSE:
            i_n = first + end - 1 - i
        at, rows, fresh = chunk_at(p_chunks, i_b, i_n, T, C, SEGMENTS)
        if STEPS:
            step = step_of(p_n, i_b, i_n, i_e, T, N, E, SEGMENTS)
            for i_s in range(0, rows, step):
                start, size, new = step_at(at, rows, fresh, step, i_s, REVERSE)
                b_S, b_decay = carry_step(p_y, p_w, p_g, p_d, b_S, b_decay, start, size, new, o_c, o_m, o_x,
                                          s_t, i_b, i_e, T, E, M, REVERSE, SEGMENTS, PREC)  # fmt: skip
        else:
            b_S, b_decay = carry_step(p_y, p_w, p_g, p_d, b_S, b_decay, at, rows, fresh, o_c, o_m, o_x, s_t,
                                      i_b, i_e, T, E, M, REVERSE, SEGMENTS, PREC)  # fmt: skip
    slot = i_b * (P + 1) + i_p + (0 if REVERSE else 1)
    store_tile(p_S + (slot * E + i_e) * (M * D), b_S, o_m, o_x, D, M)
    if not REVERSE:  # noqa: SIM102
        if (i_x == 0) & (tl.program_id(2) == 0):
            tl.store(p_decay + ((slot - 1) * E + i_e) * M + o_m, b_decay)


# ---------------------------------------------------------------- along the row


@jit
def read_step(p_x, p_y, p_W, p_g, p_d, p_out, b_S, at, rows, fresh, o_c, o_m, o_d, s_xt, s_yt, i_b, i_e, T, E,
              M: tl.constexpr, SEGMENTS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """One step of `read_kernel`: the memory S [BX,D] after it."""
    row = i_b * T + at
    i_t, gate, s_g = row - i_b * T, (row * E + i_e) * M, E * M
    b_start, b_end = step_edges(p_g + gate, p_d + gate, o_m, s_g, rows, fresh, SEGMENTS)
    b_x = load_tile(p_x + i_t * s_xt, o_c, o_d, s_xt, rows)
    b_y = load_tile(p_y + i_t * s_yt, o_c, o_d, s_yt, rows)
    b_W = load_tile(p_W + gate, o_c, o_m, s_g, rows)
    b_S *= b_start[:, None]
    b_high, b_low = parts(b_S, b_y.dtype == tl.bfloat16)
    b_l = dot_given_left(b_x, tl.trans(b_high), tl.trans(b_low), PREC)
    m_seen = o_c[:, None] >= o_c[None, :]
    b_A = given(tl.where(m_seen, dot_given(b_x, tl.trans(b_y), PREC), 0.0), p_W)
    b_l = dot_given(b_A, b_W, PREC, b_l)
    store_tile(p_out + gate, b_l, o_c, o_m, s_g, rows)
    return dot_given(tl.trans(b_W), b_y, PREC, b_S) * b_end[:, None]


@jit
def read_kernel(p_q, p_k, p_do, p_v, p_W, p_g, p_d, p_n, p_strong, p_chunks, p_first, p_K, p_V, p_K1, p_V1,
                p_l, p_dp, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_ob, s_ot, s_oh, s_vb, s_vt, s_vh, T: int, N: int, L: int,
                P: int, E, SHARE, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, SPLIT: tl.constexpr,
                CUT: tl.constexpr, START: tl.constexpr, LAST: tl.constexpr, EACH: tl.constexpr, SEGMENTS: tl.constexpr,
                STEPS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """First pass: l~ = e^{-d} K_t q_t, or with program_id(2) the same of dp = V_t do_t, [B,T,E,M].

    CUT: the memories that enter the pieces are in p_K and p_V, else (START) the one that enters the row. LAST: what
    leaves the row goes to p_K1 and p_V1. EACH: the pieces of the one row are sequences, each with a memory that enters
    and one that leaves. Grid (P * SPLIT, B*E, 1 or 2).
    """
    i_x, i_p, i_b, i_e, first, end = place(p_first, N, L, P, SPLIT, E, SEGMENTS)
    if (tl.load(p_strong + i_b * E + i_e) > 0) != STEPS:
        return
    if tl.program_id(2) == 0:
        p_x, p_y = p_q + i_b * s_qb + i_e * s_qh, p_k + i_b * s_kb + i_e // SHARE * s_kh
        p_S, p_S1, p_out, s_xt, s_yt = p_K, p_K1, p_l, s_qt, s_kt
    else:
        p_x, p_y = p_do + i_b * s_ob + i_e * s_oh, p_v + i_b * s_vb + i_e // SHARE * s_vh
        p_S, p_S1, p_out, s_xt, s_yt = p_V, p_V1, p_dp, s_ot, s_vt
    o_c, o_m, o_d = tl.arange(0, C), i_x * BX + tl.arange(0, BX), tl.arange(0, D)
    b_S = tl.zeros([BX, D], tl.float32)
    if CUT or START:
        slot = i_b * (P + 1 if CUT else 1) + i_p
        b_S += load_tile(p_S + (slot * E + i_e) * (M * D), o_m, o_d, D, M)
    for i_n in range(first, end):
        at, rows, fresh = chunk_at(p_chunks, i_b, i_n, T, C, SEGMENTS)
        if STEPS:
            step = step_of(p_n, i_b, i_n, i_e, T, N, E, SEGMENTS)
            for i_s in range(0, rows, step):
                start, size, new = step_at(at, rows, fresh, step, i_s, False)
                b_S = read_step(p_x, p_y, p_W, p_g, p_d, p_out, b_S, start, size, new, o_c, o_m, o_d, s_xt,
                                s_yt, i_b, i_e, T, E, M, SEGMENTS, PREC)  # fmt: skip
        else:
            b_S = read_step(p_x, p_y, p_W, p_g, p_d, p_out, b_S, at, rows, fresh, o_c, o_m, o_d, s_xt, s_yt,
                            i_b, i_e, T, E, M, SEGMENTS, PREC)  # fmt: skip
    if LAST:  # noqa: SIM102
        if EACH or i_p == P - 1:
            store_tile(p_S1 + ((i_b + i_p if EACH else i_b) * E + i_e) * (M * D), b_S, o_m, o_d, D, M)


@jit
def attend_kernel(p_l, p_dp, p_d, p_p, p_dl, p_db, scale, count: int, M: tl.constexpr,
                  R: tl.constexpr, BACKWARD: tl.constexpr):  # fmt: skip
    """p~ = e^{d} softmax(scale l); BACKWARD: scale dl~ and p dp + l dl, too. All [tokens*E,M].

    Grid (rows / R).
    """
    o_r, o_m = tl.arange(0, R), tl.arange(0, M)
    first = tl.program_id(0).to(tl.int64) * R
    rows, first = tl.minimum(count - first, R), first * M
    b_Q = tl.exp2(load_tile(p_d + first, o_r, o_m, M, rows))
    b_l = load_tile(p_l + first, o_r, o_m, M, rows)
    b_p = softmax(b_l * b_Q * scale, o_m, M)
    b_sent = given(b_p * b_Q, p_p)
    store_tile(p_p + first, b_sent, o_r, o_m, M, rows)
    if BACKWARD:
        b_dp = load_tile(p_dp + first, o_r, o_m, M, rows)
        # By the factors as they are stored: the sums of dg cancel against what those make elsewhere.
        b_db = b_sent.to(tl.float32) * b_dp
        b_dp *= b_Q
        b_sent = given(b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None]) * b_Q * scale, p_dl)
        store_tile(p_dl + first, b_sent, o_r, o_m, M, rows)
        store_tile(p_db + first, b_db + b_sent.to(tl.float32) * b_l, o_r, o_m, M, rows)


@jit
def mix_step(p_y, p_w, p_W, p_g, p_d, p_out, b_S, at, rows, fresh, o_c, o_m, o_x, s_yt, i_b, i_e, T,
             E, M: tl.constexpr, D: tl.constexpr, SEGMENTS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """One step of `mix_kernel`: the memory S [M,BX] after it."""
    row = i_b * T + at
    i_t, gate, s_g = row - i_b * T, (row * E + i_e) * M, E * M
    b_start, b_end = step_edges(p_g + gate, p_d + gate, o_m, s_g, rows, fresh, SEGMENTS)
    b_w = load_tile(p_w + gate, o_c, o_m, s_g, rows)
    b_W = load_tile(p_W + gate, o_c, o_m, s_g, rows)
    b_y = load_tile(p_y + i_t * s_yt, o_c, o_x, s_yt, rows)
    m_seen = o_c[:, None] >= o_c[None, :]
    b_A = given(tl.where(m_seen, dot_given(b_w, tl.trans(b_W), PREC), 0.0), p_W)
    b_S *= b_start[:, None]
    b_o = dot_given(b_A, b_y, PREC, dot_given(b_w, given(b_S, p_W), PREC))
    store_tile(p_out + (row * E + i_e) * D, b_o, o_c, o_x, E * D, rows)
    return dot_given(tl.trans(b_W), b_y, PREC, b_S) * b_end[:, None]


@jit
def mix_kernel(p_y, p_w, p_W, p_g, p_d, p_n, p_strong, p_chunks, p_first, p_S, p_S1, p_out, s_yb,
               s_yt, s_yh, T: int, N: int, L: int, P: int, E, SHARE, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
               BX: tl.constexpr, SPLIT: tl.constexpr, CUT: tl.constexpr, START: tl.constexpr, LAST: tl.constexpr,
               EACH: tl.constexpr, SEGMENTS: tl.constexpr, STEPS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """Second pass, a part of the columns of S_t^T w_t [B,T,E,D]: o where w = p~ and y = v, dq where w = dl~ and y = k.

    Grid (P * SPLIT, B*E).
    """
    i_x, i_p, i_b, i_e, first, end = place(p_first, N, L, P, SPLIT, E, SEGMENTS)
    if (tl.load(p_strong + i_b * E + i_e) > 0) != STEPS:
        return
    o_c, o_m, o_x = tl.arange(0, C), tl.arange(0, M), i_x * BX + tl.arange(0, BX)
    p_y += i_b * s_yb + i_e // SHARE * s_yh
    b_S = tl.zeros([M, BX], tl.float32)
    if CUT or START:
        slot = i_b * (P + 1 if CUT else 1) + i_p
        b_S += load_tile(p_S + (slot * E + i_e) * (M * D), o_m, o_x, D, M)
    for i_n in range(first, end):
        at, rows, fresh = chunk_at(p_chunks, i_b, i_n, T, C, SEGMENTS)
        if STEPS:
            step = step_of(p_n, i_b, i_n, i_e, T, N, E, SEGMENTS)
            for i_s in range(0, rows, step):
                start, size, new = step_at(at, rows, fresh, step, i_s, False)
                b_S = mix_step(p_y, p_w, p_W, p_g, p_d, p_out, b_S, start, size, new, o_c, o_m, o_x,
                               s_yt, i_b, i_e, T, E, M, D, SEGMENTS, PREC)  # fmt: skip
        else:
            b_S = mix_step(p_y, p_w, p_W, p_g, p_d, p_out, b_S, at, rows, fresh, o_c, o_m, o_x, s_yt,
                           i_b, i_e, T, E, M, D, SEGMENTS, PREC)  # fmt: skip
    if LAST:  # noqa: SIM102
        if EACH or i_p == P - 1:
            store_tile(p_S1 + ((i_b + i_p if EACH else i_b) * E + i_e) * (M * D), b_S, o_m, o_x, D, M)


# ---------------------------------------------------------------- back along the row


@jit
def keys_step(p_x, p_w, p_W, p_g, p_d, p_dy, b_dS, at, rows, fresh, o_c, o_m, o_x, s_xt, i_b, i_e, T,
              E, M: tl.constexpr, D: tl.constexpr, SEGMENTS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """One step of `keys_kernel`: dS [M,BX] before it."""
    row = i_b * T + at
    i_t, gate, s_g = row - i_b * T, (row * E + i_e) * M, E * M
    b_start, b_end = step_edges(p_g + gate, p_d + gate, o_m, s_g, rows, fresh, SEGMENTS)
    b_w = load_tile(p_w + gate, o_c, o_m, s_g, rows)
    b_W = load_tile(p_W + gate, o_c, o_m, s_g, rows)
    b_x = load_tile(p_x + i_t * s_xt, o_c, o_x, s_xt, rows)
    m_seen = o_c[:, None] <= o_c[None, :]
    b_A = given(tl.where(m_seen, dot_given(b_W, tl.trans(b_w), PREC), 0.0), p_W)
    b_dS *= b_end[:, None]
    b_dy = dot_given(b_A, b_x, PREC, dot_given(b_W, given(b_dS, p_W), PREC))
    store_tile(p_dy + (row * E + i_e) * D, b_dy, o_c, o_x, E * D, rows)
    return dot_given(tl.trans(b_w), b_x, PREC, b_dS) * b_start[:, None]


@jit
def keys_kernel(p_do, p_q, p_p, p_dl, p_W, p_g, p_d, p_n, p_strong, p_chunks, p_first, p_dV,
                p_dK, p_dV0, p_dK0, p_dv, p_dk, s_ob, s_ot, s_oh, s_qb, s_qt, s_qh, T: int, N: int, L: int, P: int, E,
                M: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, SPLIT: tl.constexpr,
                CUT: tl.constexpr, LAST: tl.constexpr, SEGMENTS: tl.constexpr, STEPS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """A part of the columns of dv, or with program_id(2) of dk, [B,T,E,D]. Grid (P * SPLIT, B*E, 2).

    CUT: p_dV and p_dK hold what comes back to the end of each piece, in the slot after its own. LAST: what is left at
    the start of the row goes to p_dV0 and p_dK0.
    """
    i_x, i_p, i_b, i_e, first, end = place(p_first, N, L, P, SPLIT, E, SEGMENTS)
    if (tl.load(p_strong + i_b * E + i_e) > 0) != STEPS:
        return
    if tl.program_id(2) == 0:
        p_x, p_w = p_do + i_b * s_ob + i_e * s_oh, p_p
        p_dS, p_dS0, p_dy, s_xt = p_dV, p_dV0, p_dv, s_ot
    else:
        p_x, p_w = p_q + i_b * s_qb + i_e * s_qh, p_dl
        p_dS, p_dS0, p_dy, s_xt = p_dK, p_dK0, p_dk, s_qt
    o_c, o_m, o_x = tl.arange(0, C), tl.arange(0, M), i_x * BX + tl.arange(0, BX)
    b_dS = tl.zeros([M, BX], tl.float32)
    if CUT:
        slot = i_b * (P + 1) + i_p + 1
        b_dS += load_tile(p_dS + (slot * E + i_e) * (M * D), o_m, o_x, D, M)
    for i in range(first, end):
        i_n = first + end - 1 - i
        at, rows, fresh = chunk_at(p_chunks, i_b, i_n, T, C, SEGMENTS)
        if STEPS:
            step = step_of(p_n, i_b, i_n, i_e, T, N, E, SEGMENTS)
            for i_s in range(0, rows, step):
                start, size, new = step_at(at, rows, fresh, step, i_s, True)
                b_dS = keys_step(p_x, p_w, p_W, p_g, p_d, p_dy, b_dS, start, size, new, o_c, o_m,
                                 o_x, s_xt, i_b, i_e, T, E, M, D, SEGMENTS, PREC)  # fmt: skip
        else:
            b_dS = keys_step(p_x, p_w, p_W, p_g, p_d, p_dy, b_dS, at, rows, fresh, o_c, o_m, o_x,
                             s_xt, i_b, i_e, T, E, M, D, SEGMENTS, PREC)  # fmt: skip
    if LAST:  # noqa: SIM102
        if i_p == 0:
            store_tile(p_dS0 + (i_b * E + i_e) * (M * D), b_dS, o_m, o_x, D, M)


@jit
def gates_step(p_x, p_y, p_w, p_g, p_d, p_ds, b_dS, at, rows, fresh, o_c, o_m, o_d, s_xt, s_yt, i_b, i_e, T,
               E, M: tl.constexpr, SEGMENTS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """One step of `gates_kernel`: dS [BX,D] before it."""
    row = i_b * T + at
    i_t, gate, s_g = row - i_b * T, (row * E + i_e) * M, E * M
    b_start, b_end = step_edges(p_g + gate, p_d + gate, o_m, s_g, rows, fresh, SEGMENTS)
    b_x = load_tile(p_x + i_t * s_xt, o_c, o_d, s_xt, rows)
    b_y = load_tile(p_y + i_t * s_yt, o_c, o_d, s_yt, rows)
    b_w = load_tile(p_w + gate, o_c, o_m, s_g, rows)
    b_dS *= b_end[:, None]
    b_high, b_low = parts(b_dS, b_y.dtype == tl.bfloat16)
    b_ds = dot_given_left(b_y, tl.trans(b_high), tl.trans(b_low), PREC)
    m_seen = o_c[:, None] <= o_c[None, :]
    b_A = given(tl.where(m_seen, dot_given(b_y, tl.trans(b_x), PREC), 0.0), p_w)
    b_ds = dot_given(b_A, b_w, PREC, b_ds)
    store_tile(p_ds + gate, b_ds, o_c, o_m, s_g, rows)
    return dot_given(tl.trans(b_w), b_x, PREC, b_dS) * b_start[:, None]


@jit
def gates_kernel(p_do, p_q, p_v, p_k, p_p, p_dl, p_g, p_d, p_n, p_strong, p_chunks, p_first, p_V,
                 p_K, p_dV, p_dK, p_dsv, p_dsk, p_tail, s_ob, s_ot, s_oh, s_qb, s_qt, s_qh, s_vb, s_vt, s_vh, s_kb,
                 s_kt, s_kh, T: int, N: int, L: int, P: int, E, SHARE, M: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
                 BX: tl.constexpr, SPLIT: tl.constexpr, CUT: tl.constexpr, SEGMENTS: tl.constexpr, STEPS: tl.constexpr,
                 PREC: tl.constexpr):  # fmt: skip
    """ds~ [B,T,E,M] of the values, or with program_id(2) of the keys; where rows are cut, S.dS at the end of a piece
    [2,B,P,E,M], which is the sum of the terms of dg over all later tokens. Grid (P * SPLIT, B*E, 2)."""
    i_x, i_p, i_b, i_e, first, end = place(p_first, N, L, P, SPLIT, E, SEGMENTS)
    if (tl.load(p_strong + i_b * E + i_e) > 0) != STEPS:
        return
    if tl.program_id(2) == 0:
        p_x, p_y = p_do + i_b * s_ob + i_e * s_oh, p_v + i_b * s_vb + i_e // SHARE * s_vh
        p_w, p_S, p_dS, p_ds, s_xt, s_yt = p_p, p_V, p_dV, p_dsv, s_ot, s_vt
    else:
        p_x, p_y = p_q + i_b * s_qb + i_e * s_qh, p_k + i_b * s_kb + i_e // SHARE * s_kh
        p_w, p_S, p_dS, p_ds, s_xt, s_yt = p_dl, p_K, p_dK, p_dsk, s_qt, s_kt
    o_c, o_m, o_d = tl.arange(0, C), i_x * BX + tl.arange(0, BX), tl.arange(0, D)
    b_dS = tl.zeros([BX, D], tl.float32)
    if CUT:
        memory = ((i_b * (P + 1) + i_p + 1) * E + i_e) * (M * D)
        b_dS += load_tile(p_dS + memory, o_m, o_d, D, M)
        b_tail = tl.sum(b_dS * load_tile(p_S + memory, o_m, o_d, D, M), 1)
        i_z = tl.program_id(2) * (tl.num_programs(1) // E) + i_b
        tl.store(p_tail + ((i_z * P + i_p) * E + i_e) * M + o_m, b_tail)
    for i in range(first, end):
        i_n = first + end - 1 - i
        at, rows, fresh = chunk_at(p_chunks, i_b, i_n, T, C, SEGMENTS)
        if STEPS:
            step = step_of(p_n, i_b, i_n, i_e, T, N, E, SEGMENTS)
            for i_s in range(0, rows, step):
                start, size, new = step_at(at, rows, fresh, step, i_s, True)
                b_dS = gates_step(p_x, p_y, p_w, p_g, p_d, p_ds, b_dS, start, size, new, o_c, o_m, o_d, s_xt,
                                  s_yt, i_b, i_e, T, E, M, SEGMENTS, PREC)  # fmt: skip
        else:
            b_dS = gates_step(p_x, p_y, p_w, p_g, p_d, p_ds, b_dS, at, rows, fresh, o_c, o_m, o_d, s_xt, s_yt,
                              i_b, i_e, T, E, M, SEGMENTS, PREC)  # fmt: skip


@jit
def sums_kernel(p_dsv, p_dsk, p_db, p_g, p_d, p_W, p_tail, p_dg, p_chunks, p_first, T: int, N: int, L: int, P: int, E,
                M: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, SPLIT: tl.constexpr, CUT: tl.constexpr,
                SEGMENTS: tl.constexpr):  # fmt: skip
    """dg_t = sum_{j>=t} (p dp + l dl - s ds)_j + S_end.dS_end - e^g ds, for BX slots. Grid (P * SPLIT, B*E)."""
    i_x, i_p, i_b, i_e, first, end = place(p_first, N, L, P, SPLIT, E, SEGMENTS)
    first, _rows, _fresh = chunk_at(p_chunks, i_b, first, T, C, SEGMENTS)
    end, _rows, _fresh = chunk_at(p_chunks, i_b, end, T, C, SEGMENTS)
    end = tl.minimum(end, T)
    o_c, o_m, s_g = tl.arange(0, C), i_x * BX + tl.arange(0, BX), E * M
    b_tail = tl.zeros([BX], tl.float32)
    if CUT:
        for i_z in tl.static_range(2):
            i_r = i_z * (tl.num_programs(1) // E) + i_b
            b_tail += tl.load(p_tail + ((i_r * P + i_p) * E + i_e) * M + o_m)
    for i in range(0, end - first, C):
        at = first + (end - first - 1) // C * C - i
        rows, gate = tl.minimum(C, end - at), ((i_b * T + at) * E + i_e) * M
        b_ds = load_tile(p_dsv + gate, o_c, o_m, s_g, rows) + load_tile(p_dsk + gate, o_c, o_m, s_g, rows)
        b_sds = load_tile(p_W + gate, o_c, o_m, s_g, rows).to(tl.float32) * b_ds
        b_sums = load_tile(p_db + gate, o_c, o_m, s_g, rows) - b_sds
        # Not e^{-d} - W: where a slot is overwritten the two nearly cancel, and the rounding of W stays.
        b_g = tl.maximum(load_tile(p_g + gate, o_c, o_m, s_g, rows).to(tl.float32), FLOOR) * 1.4426950408889634
        b_dg = b_ds * tl.exp2(b_g - load_tile(p_d + gate, o_c, o_m, s_g, rows))
        b_dg = b_tail[None, :] + tl.cumsum(b_sums, 0, reverse=True) - b_dg
        store_tile(p_dg + gate, b_dg, o_c, o_m, s_g, rows)
        b_tail += tl.sum(b_sums, 0)
