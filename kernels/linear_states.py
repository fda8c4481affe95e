"""The state of linear attention on the GPU: what stretches add to it, its way along a row, and the decode step.

Letters and the state's layout as in linear_triton.py.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .linear_tiles import flow, given, given_left, numbers, rows, stretch
from .tiles import jit, tl


@jit
def sums_kernel(p_l, p_r, p_S, p_keep, p_g, p_delta, p_a, p_b, p_lam, p_read, p_write, p_seg, p_real,
                p_stretches, scale, s_lb, s_lt, s_lh, s_rb, s_rt, s_rh, T: int, N: int, L, H, E, SHARE,
                REVERSE: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                W: tl.constexpr, BD: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
                DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, VARLEN: tl.constexpr,
                SEGMENTS: tl.constexpr, PADDED: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """What one stretch adds to the state: from k and v, or REVERSE to its gradient from q and do. Grid (stretches *
    blocks of BZ, B*E)."""
    HEADS: tl.constexpr = G if REVERSE else 1
    WEIGHTED: tl.constexpr = UNIT or SEGMENTS or REVERSE or not NORM
    blocks: tl.constexpr = tl.cdiv(DV, BZ)
    i_z, i_s = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_b, i_e = (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    i_t, size, slot = stretch(p_stretches, i_s, i_b, T, N, L, VARLEN)
    if size <= 0:
        return
    o_c, o_d, o_z = tl.arange(0, C), tl.arange(0, BD), i_z * BZ + tl.arange(0, BZ)
    i_h, token = i_e * G, i_b * T + i_t
    i_in = i_h if REVERSE else i_e // SHARE
    p_l += i_b * s_lb + i_t * s_lt + i_in * s_lh
    p_r += i_b * s_rb + i_t * s_rt + i_in * s_rh
    # [BD, BZ], [BZ], [BD]
    b_S = tl.zeros([BD, BZ], tl.float32)
    b_u = tl.zeros([BZ], tl.float32)
    b_k = tl.zeros([BD], tl.float32)
    n, lam, through = 0.0, 0.0, 1.0
    if DECAY:
        lam = tl.load(p_lam + i_e) * 1.4426950408889634
    count = tl.cdiv(size, C)
    for i_n in tl.range(0, count, num_stages=STAGES):
        i_c = i_n * C
        if REVERSE:
            i_c = (count - 1 - i_n) * C
        m_c, _, b_write, keep, _, _ = flow(
            p_seg, p_real, i_b * T, lam, o_c, i_t + i_c, size - i_c, C, DECAY, SEGMENTS, PADDED, REVERSE
        )
        if DECAY or SEGMENTS:
            through *= keep
            b_S *= keep
            b_u *= keep
            b_k *= keep
            n *= keep
        for i_g in range(HEADS):
            b_l = rows(p_l + i_c * s_lt + i_g * s_lh, o_c, o_d, s_lt, m_c, D)
            b_r = rows(p_r + i_c * s_rt + i_g * s_rh, o_c, o_z, s_rt, m_c, DV)
            p_rows_h = (token + i_c) * H + i_h + i_g
            b_cs = b_write
            if NORM:
                b_cu = b_write
                b_sign = 1.0
                if REVERSE:
                    a, b = tl.load(p_a + i_h + i_g), tl.load(p_b + i_h + i_g)
                    b_n = tl.where(m_c, 1.0 / tl.load(p_g + p_rows_h + o_c * H, mask=m_c, other=1.0), 0.0)
                    b_sign = -numbers(p_delta + p_rows_h, o_c, H, m_c)
                    b_cs, b_cu = b_write * b_n * b, a * b_n * b_write
                if UNIT:
                    b_cs *= tl.rsqrt(tl.sum(b_l.to(tl.float32) * b_l.to(tl.float32), 1) + 1e-12)
                b_u += tl.sum(b_r.to(tl.float32) * b_cu[:, None], 0)
                b_k += tl.sum(b_l.to(tl.float32) * (b_cs * b_sign)[:, None], 0)
                if not REVERSE:  # a count has no gradient
                    n += tl.sum(b_write, 0)
            elif REVERSE:
                b_cs *= scale
                if READ:
                    b_cs *= numbers(p_read + p_rows_h, o_c, H, m_c)
            elif WRITE:
                b_cs *= numbers(p_write + (token + i_c) * E + i_e, o_c, E, m_c)
            if WEIGHTED:
                b_S = given_left(tl.trans(b_l), b_r.to(tl.float32) * b_cs[:, None], b_S, True, PREC)
            else:
                b_S = given(tl.trans(b_l), b_r, b_S, PREC)
    if DECAY or SEGMENTS:
        tl.store(p_keep + slot * E + i_e, through)
    p_S += (slot * E + i_e) * W
    if not REVERSE:
        p_S += E * W
    tl.store(p_S + o_d[:, None] * DV + o_z[None, :], b_S, mask=(o_d < D)[:, None] & (o_z < DV)[None, :])
    if NORM:
        tl.store(p_S + (D * DV + D) + o_z, b_u, mask=o_z < DV)
        if i_z == 0:
            tl.store(p_S + D * DV + o_d, b_k, mask=o_d < D)
            tl.store(p_S + (D * DV + D + DV) + tl.arange(0, 4), tl.where(tl.arange(0, 4) == 0, n, 0.0))


@jit
def carry_kernel(p_S, p_keep, p_first, p_last, p_rows, N: int, E, W: tl.constexpr, BW: tl.constexpr,
                 REVERSE: tl.constexpr, KEEP: tl.constexpr, VARLEN: tl.constexpr, START: tl.constexpr,
                 LAST: tl.constexpr):  # fmt: skip
    """S_{n+1} = keep_n S_n + added_n over the stretches of a row, in place, or REVERSE. Grid (blocks of BW, rows*E).

    Forward finds added_n in slot n + 1, REVERSE in slot n. START: `first` holds the first value (else 0); LAST: the
    last one also goes to `last`.
    """
    i_r, i_e = (tl.program_id(1) // E).to(tl.int64), tl.program_id(1) % E
    if VARLEN:
        slot, count = tl.load(p_rows + 2 * i_r).to(tl.int64), tl.load(p_rows + 2 * i_r + 1)
    else:
        slot, count = i_r * (N + 1), N
    o_w = tl.program_id(0) * BW + tl.arange(0, BW)
    m_w = o_w < W
    b_S = tl.zeros([BW], tl.float32)
    if START:
        b_S += tl.load(p_first + (i_r * E + i_e) * W + o_w, mask=m_w, other=0.0)
    if REVERSE:
        slot += count
    tl.store(p_S + (slot * E + i_e) * W + o_w, b_S, mask=m_w)
    for _ in range(count):
        if REVERSE:
            slot -= 1
        if KEEP:
            b_S *= tl.load(p_keep + slot * E + i_e)
        if not REVERSE:
            slot += 1
        b_S += tl.load(p_S + (slot * E + i_e) * W + o_w, mask=m_w, other=0.0)
        tl.store(p_S + (slot * E + i_e) * W + o_w, b_S, mask=m_w)
    if LAST:
        tl.store(p_last + (i_r * E + i_e) * W + o_w, b_S, mask=m_w)


@jit
def delta_kernel(p_o, p_do, p_g, p_dg, p_delta, s_ob, s_ot, s_oh, s_db, s_dt, s_dh, T: int, H, DV: tl.constexpr,
                 BV: tl.constexpr, R: tl.constexpr, MASS: tl.constexpr, GUARD: tl.constexpr):  # fmt: skip
    """o_t.do_t - g_t dg_t [B,T,H], 0 where the normaliser was guarded: there it is a constant. Grid (T*H/R, B)."""
    i_b = tl.program_id(1).to(tl.int64)
    o_r, o_v = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, BV)
    o_t, o_h, m_t = (o_r // H).to(tl.int64), o_r % H, o_r < T * H
    m_v = m_t[:, None] & (o_v < DV)[None, :]
    b_o = tl.load(p_o + i_b * s_ob + (o_t * s_ot + o_h * s_oh)[:, None] + o_v[None, :], mask=m_v, other=0.0)
    b_do = tl.load(p_do + i_b * s_db + (o_t * s_dt + o_h * s_dh)[:, None] + o_v[None, :], mask=m_v, other=0.0)
    b_g = tl.load(p_g + i_b * T * H + o_r, mask=m_t, other=1.0)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if MASS:
        b_delta -= b_g * tl.load(p_dg + i_b * T * H + o_r, mask=m_t, other=0.0)
    tl.store(p_delta + i_b * T * H + o_r, tl.where(tl.abs(b_g) > GUARD, b_delta, 0.0), mask=m_t)


@jit
def step_kernel(p_q, p_k, p_v, p_S, p_z, p_u, p_n, p_o, p_g, p_S1, p_z1, p_u1, p_n1, p_a, p_b, p_lam, p_read, p_write,
                p_real, scale, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_pb, H, E, SHARE, NORM: tl.constexpr,
                UNIT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BZ: tl.constexpr,
                G: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, PADDED: tl.constexpr,
                GUARD: tl.constexpr):  # fmt: skip
    """One token in the recurrent form: BZ columns of a state are read and written once. Grid (E * blocks, B)."""
    blocks: tl.constexpr = tl.cdiv(DV, BZ)
    i_e, i_z, i_b = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1).to(tl.int64)
    o_d, o_z = tl.arange(0, BD), i_z * BZ + tl.arange(0, BZ)
    m_d, m_z = o_d < D, o_z < DV
    memory = i_b * E + i_e
    o_S, m_S = memory * (D * DV) + o_d[:, None] * DV + o_z[None, :], m_d[:, None] & m_z[None, :]
    real, keep = tl.full([], 1.0, tl.float32), 1.0
    if PADDED:
        real = (tl.load(p_real + i_b * s_pb) != 0).to(tl.float32)
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
        b_z = tl.load(p_z + memory * D + o_d, mask=m_d, other=0.0) + b_k
        b_u = tl.load(p_u + memory * DV + o_z, mask=m_z, other=0.0) + b_v
        n = tl.load(p_n + i_b)
        tl.store(p_u1 + memory * DV + o_z, b_u, mask=m_z)
        if i_z == 0:
            tl.store(p_z1 + memory * D + o_d, b_z, mask=m_d)
            if i_e == 0:
                tl.store(p_n1 + i_b, n + real.to(tl.int64))
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
