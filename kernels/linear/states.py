"""The state of linear attention on the GPU: what stretches add to it, its way along a row, and the decode step.

Letters and the state's layout as in causal.py.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .triton_helpers import flow, given, given_left, given_right, numbers, pairs, part, places, rows
from ..gpu.triton_helpers import jit, load_each, tl


@jit
def scan_kernel(p_l, p_r, p_q, p_o, p_S, p_n, p_first, p_last, p_rg, p_delta, p_a, p_b, p_rq, p_rk, p_lam, p_read,
                p_write, p_seg, p_real, p_stretches, p_rows, scale, s_lb, s_lt, s_lh, s_rb, s_rt, s_rh, s_qb, s_qt,
                s_qh, s_gb, s_gt, s_gh, s_ab, s_at, s_ah, T: int, N: int, L, H, E, SHARE, P: int, REVERSE: tl.constexpr,
                NORM: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BX: tl.constexpr,
                BZ: tl.constexpr, C: tl.constexpr, R: tl.constexpr, G: tl.constexpr, OUT: tl.constexpr,
                CUT: tl.constexpr, START: tl.constexpr, LAST: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr,
                WRITE: tl.constexpr, VARLEN: tl.constexpr, SEGMENTS: tl.constexpr, PADDED: tl.constexpr,
                SPLIT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The state along a row, a block [BX,BZ] of it: l is k and r is v; or REVERSE its gradient, l is q and r is do.

    Slot n gets what enters stretch n, or REVERSE the gradient of what leaves it. START: `first` holds the first value
    (else 0); LAST: `last` gets the last one. Gates are the read gate in REVERSE, else the write gate. Grid (blocks,
    rows * E). CUT: every part of P stretches for itself, with its own `first` and `last`; grid (.., .., parts).

    OUT, forwards without a normaliser: every query head walks for itself and makes its output as it goes, BX columns of
    q hold all of them, and the first head of a memory stores its states. Grid (blocks, rows * H).
    """
    HEADS: tl.constexpr = G if REVERSE else 1
    GATED: tl.constexpr = READ if REVERSE else WRITE
    WEIGHTED: tl.constexpr = UNIT or SEGMENTS or REVERSE or DECAY or GATED
    W: tl.constexpr = D * DV + (D + DV + 4 if NORM else 0)
    blocks: tl.constexpr = tl.cdiv(DV, BZ)
    i_z, i_x = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_row, i_e = (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    i_q, leads = i_e * G, True
    if OUT:
        i_row, i_q = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
        i_e, leads = i_q // G, i_q % G == 0
    i_b, i_t, size, slot, place = part(p_stretches, p_rows, i_row, tl.program_id(2), T, N, L, P, CUT, VARLEN)
    o_c, o_x, o_z = tl.arange(0, C), i_x * BX + tl.arange(0, BX), i_z * BZ + tl.arange(0, BZ)
    i_h, token = i_e * G, i_b * T + i_t
    i_in = i_h if REVERSE else i_e // SHARE
    p_l += i_b * s_lb + i_t * s_lt + i_in * s_lh
    p_r += i_b * s_rb + i_t * s_rt + i_in * s_rh
    own_q, own_e = (i_b * H + i_h) * T + i_t, (i_b * E + i_e) * T + i_t
    if READ and REVERSE:
        p_read += i_b * s_gb + i_t * s_gt + i_h * s_gh
    if WRITE and not REVERSE:
        p_write += i_b * s_gb + i_t * s_gt + i_e * s_gh
    if OUT:
        p_q += i_b * s_qb + i_t * s_qt + i_q * s_qh
        p_o += (token * H + i_q) * DV
        if READ:
            p_read += i_b * s_ab + i_t * s_at + i_q * s_ah
    o_S, m_S = o_x[:, None] * DV + o_z[None, :], (o_x < D)[:, None] & (o_z < DV)[None, :]
    # [BX, BZ]; sums over tokens keep R partial ones, so that threads add what is theirs: [R, BX], [R, BZ].
    b_S = tl.zeros([BX, BZ], tl.float32)
    b_k = tl.zeros([R, BX], tl.float32)
    b_u = tl.zeros([R, BZ], tl.float32)
    n, lam = 0.0, 0.0
    if START:
        p_first += (place * E + i_e) * W
        b_S += tl.load(p_first + o_S, mask=m_S, other=0.0)
        if NORM:
            m_R = tl.arange(0, R)[:, None] == 0
            b_k += tl.load(p_first + D * DV + o_x[None, :], mask=m_R & (o_x < D)[None, :], other=0.0)
            b_u += tl.load(p_first + (D * DV + D) + o_z[None, :], mask=m_R & (o_z < DV)[None, :], other=0.0)
            n += tl.load(p_first + (D * DV + D + DV))
    if DECAY:
        lam = tl.load(p_lam + i_e) * 1.4426950408889634
    # Gates are loaded a chunk ahead: nothing hides how late those of the chunk itself would be.
    if WRITE and not REVERSE:
        b_next = load_each(p_write, o_c, s_gt, o_c < size)
    if READ and OUT:
        b_read_next = load_each(p_read, o_c, s_at, o_c < size)
    chunks = tl.cdiv(size, C)
    for i_n in tl.range(0, chunks, num_stages=STAGES):
        i_c = i_n * C
        if REVERSE:
            i_c = (chunks - 1 - i_n) * C
        if WRITE and not REVERSE:
            b_gate = b_next
            b_next = load_each(p_write + (i_c + C) * s_gt, o_c, s_gt, o_c < size - i_c - C)
        if READ and OUT:
            b_read = b_read_next
            b_read_next = load_each(p_read + (i_c + C) * s_at, o_c, s_at, o_c < size - i_c - C)
        at = i_c % L == 0
        if REVERSE:
            at = (i_c + C) % L == 0 or i_n == 0
        if p_S is not None and at and leads:
            p_at = (slot + i_c // L) * E + i_e
            tl.store(p_S + p_at * (D * DV) + o_S, b_S.to(p_S.dtype.element_ty), mask=m_S)
            if NORM:
                p_at *= D + DV + 4
                if i_z == 0:
                    tl.store(p_n + p_at + o_x, tl.sum(b_k, 0), mask=o_x < D)
                if i_x == 0:
                    tl.store(p_n + p_at + D + o_z, tl.sum(b_u, 0), mask=o_z < DV)
                    tl.store(p_n + p_at + (D + DV) + tl.arange(0, 4), tl.where(tl.arange(0, 4) == 0, n, 0.0))
        m_c, b_see, b_write, keep, b_seg, b_place = flow(
            p_seg, p_real, token - i_t, lam, o_c, i_t + i_c, size - i_c, C, DECAY, SEGMENTS, PADDED, REVERSE
        )
        if OUT:
            b_q = rows(p_q + i_c * s_qt, o_c, o_x, s_qt, m_c, D)
            b_o = given_left(b_q, b_S, tl.zeros([C, BZ], tl.float32), False, PREC) * b_see[:, None]
        if DECAY or SEGMENTS:
            b_S *= keep
            b_u *= keep
            b_k *= keep
            n *= keep
        for i_g in range(HEADS):
            b_l = rows(p_l + i_c * s_lt + i_g * s_lh, o_c, o_x, s_lt, m_c, D)
            b_r = rows(p_r + i_c * s_rt + i_g * s_rh, o_c, o_z, s_rt, m_c, DV)
            b_cs = b_write
            if NORM:
                b_cu = b_write
                b_ck = b_write
                if REVERSE:
                    a, b = tl.load(p_a + i_h + i_g), tl.load(p_b + i_h + i_g)
                    b_n = numbers(p_rg + own_q + i_g * T + i_c, o_c, 1, m_c) * b_write
                    b_cs, b_cu = b_n * b, b_n * a
                    if UNIT:
                        b_cs *= numbers(p_rq + own_q + i_g * T + i_c, o_c, 1, m_c)
                    b_ck = -b_cs * numbers(p_delta + own_q + i_g * T + i_c, o_c, 1, m_c)
                elif UNIT:
                    b_cs *= numbers(p_rk + own_e + i_c, o_c, 1, m_c)
                    b_ck = b_cs
                b_lf, b_rf = b_l.to(tl.float32), b_r.to(tl.float32)
                if WEIGHTED:
                    b_lf *= b_ck[:, None]
                    b_rf *= b_cu[:, None]
                b_k += tl.sum(tl.reshape(b_lf, [C // R, R, BX]), 0)
                b_u += tl.sum(tl.reshape(b_rf, [C // R, R, BZ]), 0)
                if not REVERSE:  # a count has no gradient
                    n += tl.sum(b_write, 0)
            elif REVERSE:
                b_cs *= scale
                if READ:
                    b_cs *= numbers(p_read + i_c * s_gt + i_g * s_gh, o_c, s_gt, m_c)
            elif WRITE:
                b_cs = tl.where(m_c, b_cs * b_gate, 0.0)
            if OUT:
                b_w = given(b_q, tl.trans(b_l), tl.zeros([C, C], tl.float32), PREC)
                if WRITE:
                    b_w *= b_gate[None, :]
                b_o = given_right(pairs(b_w, m_c, b_seg, b_place, lam, o_c, DECAY, SEGMENTS), b_r, b_o, PREC)
                b_r_out = tl.full([C], scale, tl.float32)
                if READ:
                    b_r_out *= b_read
                if PADDED:
                    b_r_out = tl.where(m_c, b_r_out, 0.0)
                m_o = (i_c + o_c < size)[:, None] & (o_z < DV)[None, :]
                o_o = (i_c + o_c)[:, None] * (H * DV) + o_z[None, :]
                tl.store(p_o + o_o, (b_o * b_r_out[:, None]).to(p_o.dtype.element_ty), mask=m_o)
            if WEIGHTED:
                b_S = given_left(tl.trans(b_l), b_r.to(tl.float32) * b_cs[:, None], b_S, SPLIT, PREC)
            else:
                b_S = given(tl.trans(b_l), b_r, b_S, PREC)
    if LAST:
        p_last += (place * E + i_e) * W
        if leads:
            tl.store(p_last + o_S, b_S, mask=m_S)
        if NORM:
            if i_z == 0:
                tl.store(p_last + D * DV + o_x, tl.sum(b_k, 0), mask=o_x < D)
            if i_x == 0:
                tl.store(p_last + (D * DV + D) + o_z, tl.sum(b_u, 0), mask=o_z < DV)
                if REVERSE:
                    n = 0.0
                tl.store(p_last + (D * DV + D + DV) + tl.arange(0, 4), tl.where(tl.arange(0, 4) == 0, n, 0.0))


@jit
def join_kernel(p_S, p_first, p_last, p_lam, p_seg, p_real, p_place, p_stretches, p_rows, T: int, N: int, L, P: int, E,
                W: tl.constexpr, BW: tl.constexpr, EACH: tl.constexpr, REVERSE: tl.constexpr, START: tl.constexpr,
                LAST: tl.constexpr, DECAY: tl.constexpr, VARLEN: tl.constexpr, SEGMENTS: tl.constexpr,
                PADDED: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """What the parts of a row (`part`) add to its memory, in order, REVERSE from the last one on: `last` gets the sum,
    with EACH every part what is there before it. Grid (blocks of BW, rows * E)."""
    i_row, i_e = (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    o_w, lam, parts = tl.program_id(0) * BW + tl.arange(0, BW), 0.0, tl.cdiv(N, P)
    m_w = o_w < W
    p_S += (i_row * parts * E + i_e) * W + o_w
    b_S = tl.zeros([BW], tl.float32)
    if START:
        b_S += tl.load(p_first + (i_row * E + i_e) * W + o_w, mask=m_w, other=0.0)
    if DECAY:
        lam = tl.load(p_lam + i_e) * 1.4426950408889634
    for i_n in tl.range(0, parts, num_stages=STAGES):
        i_p = i_n
        if REVERSE:
            i_p = parts - 1 - i_n
        p_own = p_S + i_p.to(tl.int64) * (E * W)
        b_own = tl.load(p_own, mask=m_w, other=0.0)
        if EACH:
            tl.store(p_own, b_S, mask=m_w)
        if DECAY or SEGMENTS:
            i_b, i_t, size, _, _ = part(p_stretches, p_rows, i_row, i_p, T, N, L, P, True, VARLEN)
            _, _, _, before, total, entered, leaves = places(
                p_seg, p_real, p_place, i_b * T + i_t, i_t, tl.arange(0, 16), size, DECAY, SEGMENTS, PADDED
            )
            if DECAY:
                b_S *= tl.exp2(lam * (total - before))
            if SEGMENTS:
                b_S = tl.where(entered == leaves, b_S, 0.0)
        b_S += b_own
    if LAST:
        tl.store(p_last + (i_row * E + i_e) * W + o_w, b_S, mask=m_w)


@jit
def lengths_kernel(p_x, p_r, s_xb, s_xt, s_xh, T: int, E, SHARE, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr):
    """Inverse lengths of rows, [B,E,T]. Grid (T/R, B*E)."""
    i_b, i_e = (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    o_t, o_d = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, BD)
    m_x, o_l = (o_t < T)[:, None] & (o_d < D)[None, :], o_t.to(tl.int64)[:, None] * s_xt
    b_x = tl.load(p_x + i_b * s_xb + i_e // SHARE * s_xh + o_l + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    tl.store(p_r + (i_b * E + i_e) * T + o_t, tl.rsqrt(tl.sum(b_x * b_x, 1) + 1e-12), mask=o_t < T)


@jit
def delta_kernel(p_o, p_do, p_g, p_dg, p_rg, p_delta, p_real, s_ob, s_ot, s_oh, s_db, s_dt, s_dh, T: int, H,
                 DV: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, MASS: tl.constexpr, PADDED: tl.constexpr,
                 GUARD: tl.constexpr):  # fmt: skip
    """1/g_t, 0 at padding, and o_t.do_t - g_t dg_t, 0 where the normaliser was guarded: there it is a constant; both
    [B,H,T]. Grid (T/R, B*H)."""
    i_b, i_h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o_t, o_v = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, BV)
    m_t = o_t < T
    m_v, o_t = m_t[:, None] & (o_v < DV)[None, :], o_t.to(tl.int64)
    b_o = tl.load(p_o + i_b * s_ob + i_h * s_oh + (o_t * s_ot)[:, None] + o_v[None, :], mask=m_v, other=0.0)
    b_do = tl.load(p_do + i_b * s_db + i_h * s_dh + (o_t * s_dt)[:, None] + o_v[None, :], mask=m_v, other=0.0)
    at, there = (i_b * T + o_t) * H + i_h, (i_b * H + i_h) * T + o_t
    b_g = tl.load(p_g + at, mask=m_t, other=1.0)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if MASS:
        b_delta -= b_g * tl.load(p_dg + at, mask=m_t, other=0.0)
    b_r = 1.0 / b_g
    if PADDED:
        b_r = tl.where(tl.load(p_real + i_b * T + o_t, mask=m_t, other=0) != 0, b_r, 0.0)
    tl.store(p_rg + there, b_r, mask=m_t)
    tl.store(p_delta + there, tl.where(tl.abs(b_g) > GUARD, b_delta, 0.0), mask=m_t)


@jit
def step_kernel(p_q, p_k, p_v, p_S, p_z, p_u, p_n, p_o, p_g, p_S1, p_z1, p_u1, p_n1, p_a, p_b, p_lam, p_read, p_write,
                p_real, p_rows, scale, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_pb, s_S, s_z, s_u, s_n, H, E, SHARE,
                NORM: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
                BZ: tl.constexpr, G: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
                PADDED: tl.constexpr, GUARD: tl.constexpr):  # fmt: skip
    """One token in the recurrent form: BZ columns of a state are read and written once. In a pool z and n, which all
    programs of a row read, are left to `sums_kernel`. Grid (E * blocks, B)."""
    blocks: tl.constexpr = tl.cdiv(DV, BZ)
    i_e, i_z, i_b = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1).to(tl.int64)
    o_d, o_z = tl.arange(0, BD), i_z * BZ + tl.arange(0, BZ)
    m_d, m_z = o_d < D, o_z < DV
    real, keep, row = tl.full([], 1.0, tl.float32), 1.0, i_b
    if PADDED:
        real = (tl.load(p_real + i_b * s_pb) != 0).to(tl.float32)
    m_row, m_col = m_d, m_z
    if p_rows is not None:
        row = tl.load(p_rows + i_b).to(tl.int64)
        real = tl.where(row >= 0, real, 0.0)
        m_row, m_col = o_d < tl.where(row >= 0, D, 0), o_z < tl.where(row >= 0, DV, 0)
    memory = i_b * E + i_e
    o_S = row * s_S + i_e * (D * DV) + o_d[:, None] * DV + o_z[None, :]
    m_S = m_row[:, None] & m_col[None, :]
    if DECAY:
        keep = tl.exp(tl.load(p_lam + i_e) * real)
    # [BD, BZ], [BD], [BZ]
    b_S = tl.load(p_S + o_S, mask=m_S, other=0.0)
    b_k = tl.load(p_k + i_b * s_kb + i_e // SHARE * s_kh + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + i_b * s_vb + i_e // SHARE * s_vh + o_z, mask=m_z, other=0.0).to(tl.float32)
    b_k = tl.where(real > 0.0, b_k, 0.0)
    b_v = tl.where(real > 0.0, b_v, 0.0)
    if UNIT:
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-12)
    if WRITE:
        b_S = keep * b_S + b_k[:, None] * (tl.load(p_write + memory).to(tl.float32) * b_v)[None, :]
    else:
        b_S = keep * b_S + b_k[:, None] * b_v[None, :]
    tl.store(p_S1 + o_S, b_S, mask=m_S)
    if NORM:
        b_z = tl.load(p_z + row * s_z + i_e * D + o_d, mask=m_row, other=0.0) + b_k
        b_u = tl.load(p_u + row * s_u + i_e * DV + o_z, mask=m_col, other=0.0) + b_v
        n = tl.load(p_n + row * s_n, mask=row >= 0, other=0)
        if p_rows is not None:
            tl.debug_barrier()  # several threads load each of few numbers, and none may do so behind the store
        elif i_z == 0:
            tl.store(p_z1 + row * s_z + i_e * D + o_d, b_z, mask=m_d)
            if i_e == 0:
                tl.store(p_n1 + row * s_n, n + real.to(tl.int64))
        tl.store(p_u1 + row * s_u + i_e * DV + o_z, b_u, mask=m_col)
        n = n.to(tl.float32) + real
    for i_g in range(G):
        i_h = i_e * G + i_g
        b_q = tl.load(p_q + i_b * s_qb + i_h * s_qh + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_o = tl.sum(b_q[:, None] * b_S, 0)
        if NORM:
            a, b = tl.load(p_a + i_h), tl.load(p_b + i_h)
            if UNIT:
                b *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-12)
            den = b * tl.sum(b_q * b_z, 0) + a * n
            den = tl.where(tl.abs(den) < GUARD, tl.where(den < 0.0, -GUARD, GUARD), den)
            b_o = (b * b_o + a * b_u) / den
            if i_z == 0:
                tl.store(p_g + i_b * H + i_h, den)
        else:
            b_o *= scale
            if READ:
                b_o *= tl.load(p_read + i_b * H + i_h).to(tl.float32)
        b_o = tl.where(real > 0.0, b_o, 0.0)
        tl.store(p_o + (i_b * H + i_h) * DV + o_z, b_o.to(p_o.dtype.element_ty), mask=m_z)


@jit
def sums_kernel(p_k, p_z, p_n, p_real, p_rows, s_kb, s_kh, s_pb, s_z, s_n, SHARE, UNIT: tl.constexpr, D: tl.constexpr,
                BD: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """z and n after the token of `step_kernel`, in their rows of a pool. Grid (E, B)."""
    i_e, i_b, o_d = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    row = tl.load(p_rows + i_b).to(tl.int64)
    real = tl.where(row >= 0, 1, 0)
    if PADDED:
        real *= tl.load(p_real + i_b * s_pb).to(tl.int32)
    m_d = o_d < D * real
    b_k = tl.load(p_k + i_b * s_kb + i_e // SHARE * s_kh + o_d, mask=m_d, other=0.0).to(tl.float32)
    if UNIT:
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-12)
    p_z += row * s_z + i_e * D
    b_z = tl.load(p_z + o_d, mask=m_d, other=0.0) + b_k
    tl.debug_barrier()  # as in `step_kernel`
    tl.store(p_z + o_d, b_z, mask=m_d)
    if i_e == 0:
        n = tl.load(p_n + row * s_n, mask=real != 0, other=0)
        tl.debug_barrier()
        tl.store(p_n + row * s_n, n + 1, mask=real != 0)
