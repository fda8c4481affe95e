"""Causal MHLA on the GPU, forward: three launches; and the decode step, one.

    summary   per block: sum k v^T, and sum k
    mix       for every number of the summaries: the small product with the weights of pairs of blocks, group by group
              of Q blocks, carrying the sum of all that is older than the group before
    output    per tile of a block's tokens: what the mixture says, and causal attention inside the block

The first also serves bidirectional attention, and the backward pass, with q and weighted gradients in place of k and v;
so does the second, run backwards.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from ..gpu.triton_helpers import dot, dot_given, dot_given_left, dot_given_right, jit, parts, tl


@jit
def locate(L, heads, CT: tl.constexpr):
    """For grid (N * tiles of a block, R * heads): block, tile, how many tiles a block has, row, head."""
    tiles = tl.cdiv(L, CT)
    i_n, i_j = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    return i_n, i_j, tiles, tl.program_id(1) // heads, tl.program_id(1) % heads


@jit
def tile_tokens(p_table, i_r, i_n, o_c, T, N, L, B, TABLE: tl.constexpr):
    """Tokens at places o_c of a block, and which exist; with TABLE they count through the batch."""
    if TABLE:
        o_t = tl.load(p_table + (i_r.to(tl.int64) * N + i_n) * L + o_c, mask=o_c < L, other=B * T)
        m_t = (o_c < L) & (o_t < B * T)
    else:
        o_t = i_n * L + o_c
        m_t = (o_c < L) & (o_t < T)
    return o_t.to(tl.int64), m_t


@jit
def load_tile(p_x, o_t, m_t, o_d, s_t, D: tl.constexpr):
    """Rows of heads, zeros where there is no token: [CT,BD]."""
    return tl.load(p_x + o_t[:, None] * s_t + o_d[None, :], mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)


@jit
def store_tile(p_x, b_x, o_t, m_t, o_d, s_t, D: tl.constexpr):
    m_x = m_t[:, None] & (o_d < D)[None, :]
    tl.store(p_x + o_t[:, None] * s_t + o_d[None, :], b_x.to(p_x.dtype.element_ty), mask=m_x)


@jit
def load_summary(p_S, o_f, o_v, F: tl.constexpr, DV: tl.constexpr):
    """[BF,BV] of one block's summary in fp32."""
    m_S = (o_f < F)[:, None] & (o_v < DV)[None, :]
    return tl.load(p_S + o_f[:, None] * DV + o_v[None, :], mask=m_S, other=0.0)


@jit
def block_numbers(p_number, p_document, i_r, o_n, N, TABLE: tl.constexpr):
    """The number of each block o_n in its document, and that document; -1 for none."""
    if TABLE:
        o_x = i_r * N + o_n
        m_n = (o_n >= 0) & (o_n < N)
        b_number = tl.load(p_number + o_x, mask=m_n, other=0)
        b_document = tl.load(p_document + o_x, mask=m_n, other=-1)
    else:
        b_number = o_n
        b_document = tl.where((o_n >= 0) & (o_n < N), 0, -1)
    return b_number, b_document


@jit
def own_weight(p_w, p_number, i_r, i_n, i_e, N, M: tl.constexpr, TABLE: tl.constexpr):
    """m_ii of a block."""
    number = i_n
    if TABLE:
        number = tl.load(p_number + i_r * N + i_n)
    return tl.load(p_w + (i_e * M + tl.minimum(number, M - 1)) * M)


@jit
def pair_weights(p_w, b_i, b_di, b_j, b_dj, M: tl.constexpr):
    """w[min(i, M-1), min(i-j, M-1)], 0 unless j is an earlier block of i's document; i and j broadcast."""
    o_w = tl.minimum(tl.maximum(b_i, 0), M - 1) * M + tl.minimum(tl.maximum(b_i - b_j, 0), M - 1)
    return tl.load(p_w + o_w, mask=(b_i > b_j) & (b_di == b_dj) & (b_di >= 0), other=0.0)


@jit
def operands(b_x, PREC: tl.constexpr):
    """fp32 x as `times` takes it: in two parts, or as it is, twice."""
    return parts(b_x, PREC == "bf16x3")


@jit
def times(b_x, b_x_low, b_y, b_y_low, b_z, PREC: tl.constexpr):
    """x @ y + z. Triton's own bf16x3 keeps three products apart, and cleans each of NaN: more registers."""
    if PREC == "bf16x3":
        b_z = dot(b_x, b_x_low, b_y, b_y_low, PREC, b_z)
    else:
        b_z = tl.dot(b_x, b_y, b_z, input_precision=PREC)
    return b_z


@jit
def summary_kernel(p_x, p_y, p_r, p_u, p_table, p_S, s_xb, s_xt, s_xh, s_yb, s_yt, s_yh, T: int, N: int, L, B, E, G,
                   X, F: tl.constexpr, DV: tl.constexpr, CT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
                   TABLE: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """sum x y^T and sum x over the tokens of a block. Grid (N, R*E, blocks of BF).

    KIND 0 is for k and v, 1 and 2 for queries and gradients, summed over the G heads of a memory: with 2, sum r x y^T
    and sum u x, with r and u [B,T,heads] in fp32.
    """
    i_n, i_r, i_e = tl.program_id(0), tl.program_id(1) // E, tl.program_id(1) % E
    o_f, o_v = tl.program_id(2) * BF + tl.arange(0, BF), tl.arange(0, BV)
    row = i_r.to(tl.int64) * (0 if TABLE else 1)
    b_S = tl.zeros([BF, BV], tl.float32)
    b_z = tl.zeros([CT, BF], tl.float32)
    for i_g in range(G):
        p_xh = p_x + row * s_xb + (i_e * G + i_g) * s_xh
        p_yh = p_y + row * s_yb + (i_e * G + i_g) * s_yh
        for i_c in range(0, L, CT):
            o_t, m_t = tile_tokens(p_table, i_r, i_n, i_c + tl.arange(0, CT), T, N, L, B, TABLE)
            b_x, b_y = load_tile(p_xh, o_t, m_t, o_f, s_xt, F), load_tile(p_yh, o_t, m_t, o_v, s_yt, DV)
            if KIND == 2:
                o_w = (row * T + o_t) * (E * G) + i_e * G + i_g
                b_r = tl.load(p_r + o_w, mask=m_t, other=0.0)
                b_u = tl.load(p_u + o_w, mask=m_t, other=0.0)
                b_xr, b_xr_low = parts(tl.trans(b_x.to(tl.float32) * b_r[:, None]), b_y.dtype == tl.bfloat16)
                b_S += dot_given_right(b_xr, b_xr_low, b_y, PREC)
                b_z += b_x.to(tl.float32) * b_u[:, None]
            else:
                b_S += dot_given(tl.trans(b_x), b_y, PREC)
                b_z += b_x.to(tl.float32)
    p_S += ((i_r * E + i_e).to(tl.int64) * N + i_n) * X
    tl.store(p_S + o_f[:, None] * DV + o_v[None, :], b_S, mask=(o_f < F)[:, None] & (o_v < DV)[None, :])
    if NORM:
        tl.store(p_S + F * DV + o_f, tl.sum(b_z, 0), mask=o_f < F)


@jit
def mix_kernel(p_S, p_w, p_number, p_document, p_P, p_far, N: int, E, X, M: tl.constexpr, Q: tl.constexpr,
               BX: tl.constexpr, TABLE: tl.constexpr, REVERSE: tl.constexpr, KEEP: tl.constexpr,
               PREV: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """P_i = sum_j w_ij S_j over earlier blocks; REVERSE: its transpose. Grid (blocks of BX, R*E).

    KEEP: the sums of what is older than the group before go to p_far [R,E,groups,X]. PREV: there are several groups.
    """
    i_r, i_e, o_x, o_q = tl.program_id(1) // E, tl.program_id(1) % E, tl.program_id(0) * BX, tl.arange(0, Q)
    o_x += tl.arange(0, BX)
    m_x, groups = o_x < X, tl.cdiv(N, Q)
    base = tl.program_id(1).to(tl.int64) * N * X
    p_w += i_e * M * M
    b_far = tl.zeros([BX], tl.float32)
    b_next = tl.zeros([BX], tl.float32)
    b_near = tl.zeros([Q, BX], tl.float32)
    for i in range(groups):
        i_s = groups - 1 - i if REVERSE else i
        o_n = i_s * Q + o_q
        b_i, b_di = block_numbers(p_number, p_document, i_r, o_n, N, TABLE)
        m_S = (o_n < N)[:, None] & m_x[None, :]
        b_S = tl.load(p_S + base + o_n.to(tl.int64)[:, None] * X + o_x[None, :], mask=m_S, other=0.0)
        # The sum belongs to the document of the first block that it does not hold.
        _, b_owner = block_numbers(p_number, p_document, i_r, o_n * 0 + (i_s - 1) * Q, N, TABLE)
        _, b_after = block_numbers(p_number, p_document, i_r, o_n * 0 + i_s * Q, N, TABLE)
        _, b_later = block_numbers(p_number, p_document, i_r, o_n * 0 + (i_s + 1) * Q, N, TABLE)
        b_weight = tl.load(p_w + tl.minimum(b_i, M - 1) * M + M - 1, mask=(b_di == b_owner) & (b_di >= 0), other=0.0)
        if REVERSE:
            # b_near: of the group after; b_far, b_next: gradients of the sums of the two groups after
            o_m = o_n + Q
            b_j, b_dj = block_numbers(p_number, p_document, i_r, o_m, N, TABLE)
            b_A = pair_weights(p_w, b_i[None, :], b_di[None, :], b_i[:, None], b_di[:, None], M)
            b_out = tl.dot(b_A, b_S, input_precision=PREC)
            if PREV:
                b_A = pair_weights(p_w, b_j[None, :], b_dj[None, :], b_i[:, None], b_di[:, None], M)
                b_out = tl.dot(b_A, b_near, b_out, input_precision=PREC)
            b_out += tl.where((b_di == b_later) & (b_di >= 0), 1.0, 0.0)[:, None] * b_next[None, :]
            b_keep = tl.max(tl.where(b_owner == b_after, 1.0, 0.0), 0)
            b_new = tl.sum(b_weight[:, None] * b_S, 0) + b_keep * b_far
            b_next = b_far
            b_far = b_new
        else:
            o_m = o_n - Q
            b_j, b_dj = block_numbers(p_number, p_document, i_r, o_m, N, TABLE)
            b_A = pair_weights(p_w, b_i[:, None], b_di[:, None], b_i[None, :], b_di[None, :], M)
            b_out = tl.dot(b_A, b_S, input_precision=PREC)
            if PREV:
                b_A = pair_weights(p_w, b_i[:, None], b_di[:, None], b_j[None, :], b_dj[None, :], M)
                b_out = tl.dot(b_A, b_near, b_out, input_precision=PREC)
            if KEEP:
                tl.store(p_far + (tl.program_id(1).to(tl.int64) * groups + i_s) * X + o_x, b_far, mask=m_x)
            b_out += b_weight[:, None] * b_far[None, :]
            b_keep = tl.max(tl.where(b_owner == b_after, 1.0, 0.0), 0)
            b_joins = tl.where((b_dj == b_after) & (b_dj >= 0), 1.0, 0.0)
            b_far = b_keep * b_far + tl.sum(b_joins[:, None] * b_near, 0)
        b_near = b_S
        tl.store(p_P + base + o_n.to(tl.int64)[:, None] * X + o_x[None, :], b_out, mask=m_S)


@jit
def output_kernel(p_q, p_k, p_v, p_w, p_table, p_number, p_P, p_o, p_g, p_dg, p_u, s_qb, s_qt, s_qh, s_kb, s_kt,
                  s_kh, s_vb, s_vt, s_vh, T: int, N: int, L, B, H, E, X, M: tl.constexpr, F: tl.constexpr,
                  DV: tl.constexpr, CT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, TABLE: tl.constexpr,
                  NORM: tl.constexpr, BACK: tl.constexpr, MASS: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """o [B,T,H,Dv] and its normaliser g [B,T,H]. Grid (N * tiles of a block, R*H).

    BACK: p_o holds do, and what is written is r = 1/g to p_g, and u = dg - (do.o) r to p_u; MASS: there is a dg.
    """
    i_n, i_j, _, i_r, i_h = locate(L, H, CT)
    i_e, o_c, o_v = i_h // (H // E), tl.arange(0, CT), tl.arange(0, BV)
    row = i_r.to(tl.int64) * (0 if TABLE else 1)
    o_t, m_t = tile_tokens(p_table, i_r, i_n, i_j * CT + o_c, T, N, L, B, TABLE)
    p_q += row * s_qb + i_h * s_qh
    p_k += row * s_kb + i_e * s_kh
    p_v += row * s_vb + i_e * s_vh
    p_P += ((i_r * E + i_e).to(tl.int64) * N + i_n) * X
    # [CT, BV], [CT]
    b_o = tl.zeros([CT, BV], tl.float32)
    b_g = tl.zeros([CT], tl.float32)
    for i_f in range(0, F, BF):
        o_f = i_f + tl.arange(0, BF)
        b_q = load_tile(p_q, o_t, m_t, o_f, s_qt, F)
        b_P, b_P_low = parts(load_summary(p_P, o_f, o_v, F, DV), b_q.dtype == tl.bfloat16)
        b_o += dot_given_left(b_q, b_P, b_P_low, PREC)
        if NORM:
            b_g += tl.sum(b_q.to(tl.float32) * tl.load(p_P + F * DV + o_f, mask=o_f < F, other=0.0)[None, :], 1)
    own = own_weight(p_w, p_number, i_r, i_n, i_e, N, M, TABLE)
    for j in range(i_j + 1):
        o_s, m_s = tile_tokens(p_table, i_r, i_n, j * CT + o_c, T, N, L, B, TABLE)
        b_A = tl.zeros([CT, CT], tl.float32)
        for i_f in range(0, F, BF):
            o_f = i_f + tl.arange(0, BF)
            b_q, b_k = load_tile(p_q, o_t, m_t, o_f, s_qt, F), load_tile(p_k, o_s, m_s, o_f, s_kt, F)
            b_A += dot_given(b_q, tl.trans(b_k), PREC)
        b_A = tl.where((i_j * CT + o_c)[:, None] >= (j * CT + o_c)[None, :], b_A * own, 0.0)
        b_g += tl.sum(b_A, 1)
        b_v = load_tile(p_v, o_s, m_s, o_v, s_vt, DV)
        b_A, b_A_low = parts(b_A, b_v.dtype == tl.bfloat16)
        b_o += dot_given_right(b_A, b_A_low, b_v, PREC)
    o_g = (row * T + o_t) * H + i_h
    if NORM:
        b_g = tl.maximum(b_g, 1e-6)
        b_o = b_o / b_g[:, None]
    p_o += (row * T * H + i_h) * DV
    if BACK:
        b_u = -tl.sum(load_tile(p_o, o_t, m_t, o_v, H * DV, DV).to(tl.float32) * b_o, 1) / b_g
        if MASS:
            b_u += tl.load(p_dg + o_g, mask=m_t, other=0.0)
        # A normaliser at its guard is a constant.
        tl.store(p_u + o_g, tl.where(b_g > 1e-6, b_u, 0.0), mask=m_t)
        tl.store(p_g + o_g, 1.0 / b_g, mask=m_t)
    else:
        if NORM:
            tl.store(p_g + o_g, b_g, mask=m_t)
        store_tile(p_o, b_o, o_t, m_t, o_v, H * DV, DV)


@jit
def state_kernel(p_S, p_w, p_past, p_old, p_current, p_mixed, N: int, done: int, E, X, M: tl.constexpr, F: tl.constexpr,
                 DV: tl.constexpr, Q: tl.constexpr, BX: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """The state after `done` complete blocks of one document a row, as MHLAState has it. Grid (blocks of BX, R*E)."""
    Y: tl.constexpr = DV + (1 if NORM else 0)
    o_x = tl.program_id(0) * BX + tl.arange(0, BX)
    m_x, o_f, o_y = o_x < F * Y, o_x // Y, o_x % Y
    p_S += tl.program_id(1).to(tl.int64) * N * X + tl.where(o_y < DV, o_f * DV + o_y, F * DV + o_f)
    i_r, i_e = (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    p_past += (i_r * (M - 2) * E + i_e) * (F * Y) + o_x
    first, base = tl.maximum(0, done - (M - 2)), tl.program_id(1).to(tl.int64) * (F * Y) + o_x
    p_w += (i_e * M + tl.minimum(done, M - 1)) * M
    b_old = tl.zeros([BX], tl.float32)
    for i_n in range(0, first, Q):
        o_n = (i_n + tl.arange(0, Q)).to(tl.int64)
        b_old += tl.sum(
            tl.load(p_S[None, :] + o_n[:, None] * X, mask=(o_n < first)[:, None] & m_x[None, :], other=0.0), 0
        )
    b_mixed = tl.load(p_w + M - 1) * b_old
    for i_d in range(1, M - 1):
        i_n = tl.maximum(done - i_d, 0)
        b_S = tl.load(p_S + i_n * X, mask=m_x & (o_x * 0 + i_d <= done), other=0.0)
        tl.store(p_past + (i_d - 1) * E * (F * Y), b_S, mask=m_x)
        b_mixed += tl.load(p_w + i_d) * b_S
    tl.store(p_old + base, b_old, mask=m_x)
    tl.store(p_mixed + base, b_mixed, mask=m_x)
    b_S = tl.load(p_S + done * X, mask=m_x & (o_x * 0 + done < N), other=0.0)
    tl.store(p_current + base, b_S, mask=m_x)


@jit
def step_kernel(p_q, p_k, p_v, p_w, p_padding, p_rows, p_past, p_old, p_current, p_mixed, p_tokens, p_o, p_g, p_past1,
                p_old1, p_current1, p_mixed1, p_tokens1, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_pb, s_past, s_old,
                s_current, s_mixed, s_n, C, H, E, M: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr,
                BY: tl.constexpr, BG: tl.constexpr, NORM: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr,
                START: tl.constexpr, END: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """One token: its output, and the new state, columns START to END of it. EDGE: a block may be complete now, else only
    `current` and `tokens` change. In a pool, whose rows are changed in place, `p_tokens` are copies of the rows.
    Grid (blocks of BY of the columns, B*E)."""
    Y: tl.constexpr = DV + (1 if NORM else 0)
    i_b, i_e, G = tl.program_id(1) // E, tl.program_id(1) % E, H // E
    o_y, o_g = START + tl.program_id(0) * BY + tl.arange(0, BY), tl.arange(0, BG)
    tokens, row = tl.load(p_tokens + i_b), i_b.to(tl.int64)
    real, held = tokens * 0 + 1, F
    if PADDED:
        real = (tl.load(p_padding + i_b * s_pb) != 0).to(tl.int64)
    if p_rows is not None:
        row = tl.load(p_rows + i_b).to(tl.int64)
        real, held = tl.where(row >= 0, real, 0), tl.where(row >= 0, F, 0)
        tokens = tl.where(row >= 0, tokens, 0)  # padding has those of row 0, which may be any, and they index w
    full = (real > 0) & ((tokens + real) % C == 0)
    p_w += i_e * M * M
    p_next = p_w + tl.minimum((tokens + real) // C, M - 1) * M
    own = tl.load(p_w + tl.minimum(tokens // C, M - 1) * M)
    b_v = tl.load(p_v + i_b * s_vb + i_e * s_vh + o_y, mask=o_y < DV, other=0.0).to(tl.float32)
    b_v = tl.where(o_y == DV, 1.0, b_v) * real
    head, stride = i_e * (F * Y), E * (F * Y)
    p_past, p_past1 = p_past + row * s_past + head, p_past1 + row * s_past + head
    p_old, p_old1 = p_old + row * s_old + head, p_old1 + row * s_old + head
    p_current, p_current1 = p_current + row * s_current + head, p_current1 + row * s_current + head
    p_mixed, p_mixed1 = p_mixed + row * s_mixed + head, p_mixed1 + row * s_mixed + head
    # [BG, BY], [BG]
    b_o = tl.zeros([BG, BY], tl.float32)
    b_g = tl.zeros([BG], tl.float32)
    for i_f in range(0, F, BF):
        o_f = i_f + tl.arange(0, BF)
        m_f = o_f < held
        b_k = tl.load(p_k + i_b * s_kb + i_e * s_kh + o_f, mask=o_f < F, other=0.0).to(tl.float32) * real
        m_q = (o_g < G)[:, None] & (o_f < F)[None, :]
        b_q = tl.load(p_q + i_b * s_qb + (i_e * G + o_g)[:, None] * s_qh + o_f[None, :], mask=m_q, other=0.0)
        b_q = b_q.to(tl.float32)
        o_S, m_S = o_f[:, None] * Y + o_y[None, :], m_f[:, None] & (o_y < END)[None, :]
        b_current = tl.load(p_current + o_S, mask=m_S, other=0.0) + b_k[:, None] * b_v[None, :]
        b_mixed = tl.load(p_mixed + o_S, mask=m_S, other=0.0)
        b_o += tl.dot(b_q, b_mixed + own * b_current, input_precision=PREC)
        if NORM and START == 0:
            b_z = own * (tl.load(p_current + o_f * Y + DV, mask=m_f, other=0.0) + b_k)
            b_z += tl.load(p_mixed + o_f * Y + DV, mask=m_f, other=0.0)
            b_g += tl.sum(b_q * b_z[None, :], 1)
        if EDGE:
            m_edge, count = m_S, M - 2
            if p_rows is not None:  # what does not change is neither read nor written
                m_edge = (o_f < tl.where(full, held, 0))[:, None] & (o_y < END)[None, :]
                count = tl.where(full, M - 2, 0)
            b_next = tl.zeros([BF, BY], tl.float32)
            b_newer = b_current
            for i_d in range(count):
                b_older = tl.load(p_past + i_d * stride + o_S, mask=m_edge, other=0.0)
                tl.store(p_past1 + i_d * stride + o_S, tl.where(full, b_newer, b_older), mask=m_edge)
                b_next += tl.load(p_next + i_d + 1) * b_newer
                b_newer = b_older
            b_old = tl.load(p_old + o_S, mask=m_edge, other=0.0) + tl.where(full, b_newer, 0.0)
            b_next += tl.load(p_next + M - 1) * b_old
            tl.store(p_old1 + o_S, b_old, mask=m_edge)
            tl.store(p_mixed1 + o_S, tl.where(full, b_next, b_mixed), mask=m_edge)
            b_current = tl.where(full, 0.0, b_current)
        tl.store(p_current1 + o_S, b_current, mask=m_S)
    if START == 0:
        o_h = i_b * H + i_e * G + o_g
        if NORM:
            b_g = tl.maximum(b_g, 1e-6)
            b_o = b_o / b_g[:, None]
            tl.store(p_g + o_h, b_g, mask=o_g < G)
        m_o = (o_g < G)[:, None] & (o_y < DV)[None, :]
        tl.store(p_o + o_h[:, None] * DV + o_y[None, :], (b_o * real).to(p_o.dtype.element_ty), mask=m_o)
        tl.store(p_tokens1 + row * s_n, tokens + real, mask=row >= 0)
