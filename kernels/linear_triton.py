"""Causal linear attention on the GPU: one kernel that weaves rows through a running state, for the output and for
every gradient.

Output and gradients are four forms of one sum, over tokens j up to i (OUT, DQ) or from i on (DK, DV):

    out_i = r_i sum_j (alpha + beta_i gamma_j x_i.y_j - delta) c_j e^{lam |i-j|} z_j

    ROLE   x   y   z   normalised: alpha, delta, c, r           decayed: c, r
    OUT    q   k   v   a, 0, 1, 1/g_i                           w_j, scale r_i
    DQ     do  v   k   0, delta_i, 1, b/g_i                     w_j, scale r_i
    DK     v   do  q   0, delta_j, b/g_j, 1                     scale r_j, w_i
    DV     k   q   do  a, 0, 1/g_j, 1                           scale r_j, w_i

`normalised` is la.py's kernel f(x) = a + b x with g_i its sum and delta_i = o_i.do_i; b multiplies x.y of OUT and DV.
UNIT takes q and k as unit vectors: their inverse lengths go into the factors, no rounded copy is made. `decayed` is
retention: lam = log gamma, r and w the read and write gates. The state is [[S, z], [u, n]], S = sum k v^T, z = sum k,
u = sum v, and n tokens; DK and DV carry its gradient, from the right. Each program takes a stretch of L tokens, a
chunk of C after another, and BZ columns of z. Where a row is more than one stretch,

    sums    per stretch: what it adds to the state
    carry   over the stretches of a row: the state that enters each, in place

come first. A row of N stretches owns N + 1 slots; slot n holds what enters stretch n, slot N what leaves the last.
No product takes the transpose of a product: DK's state comes transposed from memory and stays so.

Letters as in linear.py; `BX`, `BZ` columns of x and z that a program holds.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .linear_tiles import flow, given, given_left, given_right, numbers, pairs, rows, stretch
from .tiles import jit, tl


@jit
def weave(i_s, i_z, i_bh, p_x, p_y, p_z, p_own, p_out, p_aux, p_S, p_last, p_g, p_delta, p_a, p_b, p_rq, p_rk,
          p_lam, p_read, p_write, p_seg, p_real, p_stretches, batch, scale, s_xb, s_xt, s_xh, s_yb, s_yt, s_yh, s_zb,
          s_zt, s_zh, s_wb, s_wt, s_wh, T, N, L, H, E, SHARE, ROLE: tl.constexpr, NORM: tl.constexpr,
          UNIT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, X: tl.constexpr, Z: tl.constexpr,
          BX: tl.constexpr,
          BZ: tl.constexpr, C: tl.constexpr, G: tl.constexpr, STATE: tl.constexpr, CUT: tl.constexpr,
          LAST: tl.constexpr, AUX: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
          VARLEN: tl.constexpr, SEGMENTS: tl.constexpr, PADDED: tl.constexpr, GUARD: tl.constexpr, SPLIT: tl.constexpr,
          PREC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One stretch of one head, BZ columns of z: the sum above, chunk by chunk.

    CUT: states lie in slots; else a row is one stretch, whose state comes from outside and with LAST leaves. AUX: DQ
    also stores q.dq, in front of the read gate, and DK k.dk in front of the write gate, of each block of columns.
    """
    REVERSE: tl.constexpr = ROLE == "dk" or ROLE == "dv"
    HEADS: tl.constexpr = G if REVERSE else 1
    TALLY: tl.constexpr = NORM and ROLE == "out"
    WEIGHTED: tl.constexpr = UNIT or SEGMENTS or REVERSE or not NORM
    if REVERSE:
        i_b, i_e = (i_bh // E).to(tl.int64), i_bh % E
        i_h, i_x, i_y, i_o, heads = i_e * G, i_e // SHARE, i_e * G, i_e, E
    else:
        i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
        i_e = i_h // G
        i_x, i_y, i_o, heads = i_h, i_e // SHARE, i_h, H
    i_t, size, slot = stretch(p_stretches, i_s, i_b, T, N, L, VARLEN)
    token = i_b * T + i_t
    p_x += i_b * s_xb + i_t * s_xt + i_x * s_xh
    p_y += i_b * s_yb + i_t * s_yt + i_y * s_yh
    p_z += i_b * s_zb + i_t * s_zt + i_y * s_zh
    p_out += (token * heads + i_o) * Z
    if AUX:
        p_aux += token * heads + i_o
    p_rows_q, p_rows_e = token * H + i_h, token * E + i_e
    o_c, o_x, o_z = tl.arange(0, C), tl.arange(0, BX), i_z * BZ + tl.arange(0, BZ)
    m_S = (o_x < X)[:, None] & (o_z < Z)[None, :]
    # Where x.y columns of the state lie: S is [D,DV], then z [D], u [DV], n.
    if ROLE == "out" or ROLE == "dv":
        o_S, o_u, o_k = o_x[:, None] * DV + o_z[None, :], D * DV + D + o_z, D * DV + o_x
    else:
        o_S, o_u, o_k = o_z[None, :] * DV + o_x[:, None], D * DV + o_z, D * DV + D + o_x
    # [BX, BZ], [BZ], [BX]
    b_S = tl.zeros([BX, BZ], tl.float32)
    b_u = tl.zeros([BZ], tl.float32)
    b_k = tl.zeros([BX], tl.float32)
    n = 0.0
    if STATE:
        if not CUT:
            p_S += (i_b * E + i_e) * W
        elif REVERSE:
            p_S += ((slot + 1) * E + i_e) * W
        else:
            p_S += (slot * E + i_e) * W
        b_S += tl.load(p_S + o_S, mask=m_S, other=0.0)
        if NORM:
            b_u += tl.load(p_S + o_u, mask=o_z < Z, other=0.0)
        if TALLY:
            b_k += tl.load(p_S + o_k, mask=o_x < X, other=0.0)
            n += tl.load(p_S + (D * DV + D + DV))
    lam, a, b = 0.0, 0.0, 1.0
    if DECAY:
        lam = tl.load(p_lam + i_e) * 1.4426950408889634
    if NORM and not REVERSE:
        a, b = tl.load(p_a + i_h), tl.load(p_b + i_h)
    count = tl.cdiv(size, C)
    for i_n in tl.range(0, count, num_stages=STAGES):
        i_c = i_n * C
        if REVERSE:
            i_c = (count - 1 - i_n) * C
        m_c, b_see, b_write, keep, b_seg, b_place = flow(
            p_seg, p_real, i_b * T, lam, o_c, i_t + i_c, size - i_c, C, DECAY, SEGMENTS, PADDED, REVERSE
        )
        b_x = rows(p_x + i_c * s_xt, o_c, o_x, s_xt, m_c, X)
        b_o = given_left(b_x, b_S, tl.zeros([C, BZ], tl.float32), SPLIT, PREC)
        if TALLY:
            b_den = tl.sum(b_x.to(tl.float32) * b_k[None, :], 1)
        b_rx = b_see
        if UNIT and ROLE == "out":
            b_rx = tl.rsqrt(tl.sum(b_x.to(tl.float32) * b_x.to(tl.float32), 1) + 1e-12)
        if UNIT and ROLE == "dv":
            b_rx = numbers(p_rk + (p_rows_e + i_c * E), o_c, E, m_c)
        if UNIT and (ROLE == "out" or ROLE == "dv"):
            b_o *= b_rx[:, None]
        if DECAY or SEGMENTS:
            b_o *= b_see[:, None]
        if ROLE == "out" and NORM:
            b_o = b * b_o + (a * b_see)[:, None] * b_u[None, :]
            if UNIT:
                b_den *= b_rx
            b_den = b_see * (b * b_den + a * n)
        if ROLE == "dq" and NORM:
            b_d = numbers(p_delta + (p_rows_q + i_c * H), o_c, H, m_c)
            b_o -= (b_d * b_see)[:, None] * b_u[None, :]
        if REVERSE and NORM:
            b_o += b_see[:, None] * b_u[None, :]
        if DECAY or SEGMENTS:
            b_S *= keep
            b_u *= keep
            b_k *= keep
            n *= keep
        for i_g in range(HEADS):
            b_y = rows(p_y + i_c * s_yt + i_g * s_yh, o_c, o_x, s_yt, m_c, X)
            b_z = rows(p_z + i_c * s_zt + i_g * s_zh, o_c, o_z, s_zt, m_c, Z)
            p_rows_h = p_rows_q + i_c * H + i_g
            b_w = given(b_x, tl.trans(b_y), tl.zeros([C, C], tl.float32), PREC)
            # What column j carries [C]: into the weights, into S (there times b_write), into u.
            if NORM:
                if ROLE == "out":
                    b_cs = b_write
                    if UNIT:
                        b_ry = tl.rsqrt(tl.sum(b_y.to(tl.float32) * b_y.to(tl.float32), 1) + 1e-12)
                        b_cs *= b_ry
                        b_w *= b_rx[:, None] * b_ry[None, :]
                        if i_z == 0:
                            tl.store(p_rq + p_rows_q + i_c * H + o_c * H, b_rx, mask=o_c < size - i_c)
                            if i_h % G == 0:
                                tl.store(p_rk + p_rows_e + i_c * E + o_c * E, b_ry, mask=o_c < size - i_c)
                    b_w = pairs(a + b * b_w, m_c, b_seg, b_place, lam, o_c, DECAY, SEGMENTS, REVERSE)
                    b_den += tl.sum(b_w, 1)
                    b_cu = b_write
                elif ROLE == "dq":
                    b_w = pairs(b_w - b_d[:, None], m_c, b_seg, b_place, lam, o_c, DECAY, SEGMENTS, REVERSE)
                    b_cs = b_write
                    if UNIT:
                        b_ry = numbers(p_rk + (p_rows_e + i_c * E), o_c, E, m_c)
                        b_w *= b_ry[None, :]
                        b_cs *= b_ry
                    b_cu = b_cs
                else:
                    a, b = tl.load(p_a + i_h + i_g), tl.load(p_b + i_h + i_g)
                    b_r = tl.where(m_c, 1.0 / tl.load(p_g + p_rows_h + o_c * H, mask=m_c, other=1.0), 0.0)
                    b_cs = b_r * b
                    if UNIT:
                        b_cs *= numbers(p_rq + p_rows_h, o_c, H, m_c)
                    if ROLE == "dk":
                        b_d = numbers(p_delta + p_rows_h, o_c, H, m_c)
                        b_w = (b_w - b_d[None, :]) * b_cs[None, :]
                        b_cu = -b_d * b_cs * b_write
                    else:
                        if UNIT:
                            b_w *= b_rx[:, None]
                        b_w = b_w * b_cs[None, :] + (a * b_r)[None, :]
                        b_cu = a * b_r * b_write
                    b_cs *= b_write
                    b_w = pairs(b_w, m_c, b_seg, b_place, lam, o_c, DECAY, SEGMENTS, REVERSE)
                if WEIGHTED:
                    b_u += tl.sum(b_z.to(tl.float32) * b_cu[:, None], 0)
                else:
                    b_u += tl.sum(b_z.to(tl.float32), 0)
                if TALLY:
                    if WEIGHTED:
                        b_k += tl.sum(b_y.to(tl.float32) * b_cs[:, None], 0)
                    else:
                        b_k += tl.sum(b_y.to(tl.float32), 0)
                    n += tl.sum(b_write, 0)
            else:
                b_cs = b_write
                if REVERSE:
                    b_w *= scale
                    b_cs *= scale
                    if READ:
                        b_gate = numbers(p_read + p_rows_h, o_c, H, m_c)
                        b_w *= b_gate[None, :]
                        b_cs *= b_gate
                elif WRITE:
                    b_gate = numbers(p_write + (p_rows_e + i_c * E), o_c, E, m_c)
                    b_w *= b_gate[None, :]
                    b_cs *= b_gate
                b_w = pairs(b_w, m_c, b_seg, b_place, lam, o_c, DECAY, SEGMENTS, REVERSE)
            b_o = given_right(b_w, b_z, b_o, PREC)
            if WEIGHTED:
                b_S = given_left(tl.trans(b_y), b_z.to(tl.float32) * b_cs[:, None], b_S, True, PREC)
            else:
                b_S = given(tl.trans(b_y), b_z, b_S, PREC)
        # What row i takes on the way out.
        if ROLE == "out" and NORM:
            b_den = tl.where(tl.abs(b_den) < GUARD, tl.where(b_den < 0.0, -GUARD, GUARD), b_den)
            b_o = tl.where(m_c[:, None], b_o / b_den[:, None], 0.0)
            if i_z == 0:
                tl.store(p_g + p_rows_q + (i_c + o_c) * H, b_den, mask=o_c < size - i_c)
        if ROLE == "dq" and NORM:
            b_r = tl.where(m_c, 1.0 / tl.load(p_g + p_rows_q + (i_c + o_c) * H, mask=m_c, other=1.0), 0.0)
            b_o *= (b * b_r)[:, None]
        if not NORM and not REVERSE:
            b_o *= scale
        if AUX or (UNIT and (ROLE == "dq" or ROLE == "dk")):
            i_w = i_e // SHARE if REVERSE else i_h
            b_own = rows(p_own + (i_b * s_wb + i_t * s_wt + i_w * s_wh) + i_c * s_wt, o_c, o_z, s_wt, m_c, Z)
            b_own = b_own.to(tl.float32)
            if UNIT:
                if ROLE == "dq":
                    b_rx = numbers(p_rq + (p_rows_q + i_c * H), o_c, H, m_c)
                else:
                    b_rx = numbers(p_rk + (p_rows_e + i_c * E), o_c, E, m_c)
                b_own *= b_rx[:, None]
            b_along = tl.sum(b_own * b_o, 1)
            if UNIT:
                b_o = b_rx[:, None] * (b_o - b_own * b_along[:, None])
            if AUX:
                tl.store(p_aux + i_z * batch * T * heads + (i_c + o_c) * heads, b_along, mask=o_c < size - i_c)
        if not NORM:
            if READ and not REVERSE:
                b_o *= numbers(p_read + (p_rows_q + i_c * H), o_c, H, m_c)[:, None]
            if WRITE and REVERSE:
                b_o *= numbers(p_write + (p_rows_e + i_c * E), o_c, E, m_c)[:, None]
        if PADDED:
            b_o = tl.where(m_c[:, None], b_o, 0.0)
        m_o = (o_c < size - i_c)[:, None] & (o_z < Z)[None, :]
        tl.store(p_out + (i_c + o_c)[:, None] * (heads * Z) + o_z[None, :], b_o.to(p_out.dtype.element_ty), mask=m_o)
    if LAST:  # noqa: SIM102
        if i_h == i_e * G:
            p_last += (i_b * E + i_e) * W
            if ROLE == "out" or ROLE == "dv":
                tl.store(p_last + o_S, b_S, mask=m_S)
            if NORM:
                tl.store(p_last + o_u, b_u, mask=o_z < Z)
            if ROLE == "dv" and NORM and i_z == 0:  # a count has no gradient
                tl.store(p_last + (D * DV + D + DV) + tl.arange(0, 4), tl.zeros([4], tl.float32))
            if TALLY and i_z == 0:
                tl.store(p_last + o_k, b_k, mask=o_x < X)
                tl.store(p_last + (D * DV + D + DV) + tl.arange(0, 4), tl.where(tl.arange(0, 4) == 0, n, 0.0))


@jit
def out_kernel(p_q, p_k, p_v, p_o, p_S, p_last, p_g, p_a, p_b, p_rq, p_rk, p_lam, p_read, p_write, p_seg, p_real,
               p_stretches, scale, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, T: int, N: int, L, H, E, SHARE,
               NORM: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
               BD: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr, G: tl.constexpr, STATE: tl.constexpr,
               CUT: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, VARLEN: tl.constexpr,
               SEGMENTS: tl.constexpr, PADDED: tl.constexpr, GUARD: tl.constexpr, SPLIT: tl.constexpr,
               PREC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """o [B,T,H,Dv] and its normaliser g [B,T,H]. Grid (stretches * blocks of BZ, B*H)."""
    blocks: tl.constexpr = tl.cdiv(DV, BZ)
    i_s, i_z, i_bh = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1)
    if VARLEN:  # noqa: SIM102
        if tl.load(p_stretches + 3 * i_s + 1) <= 0:
            return
    weave(i_s, i_z, i_bh, p_q, p_k, p_v, p_q, p_o, p_o, p_S, p_last, p_g, p_g, p_a, p_b, p_rq, p_rk, p_lam, p_read,
          p_write, p_seg, p_real, p_stretches, 1, scale, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, 0, 0, 0,
          T, N, L, H, E, SHARE, "out", NORM, UNIT, D, DV, W, D, DV, BD, BZ, C, G, STATE, CUT, not CUT, False, DECAY,
          READ, WRITE, VARLEN, SEGMENTS, PADDED, GUARD, SPLIT, PREC, STAGES)  # fmt: skip


@jit
def gradients_kernel(p_q, p_k, p_v, p_do, p_dq, p_dk, p_dv, p_da, p_dw, p_S, p_dS, p_dfirst, p_g, p_delta, p_a,
                     p_b, p_rq, p_rk, p_lam, p_read, p_write, p_seg, p_real, p_stretches, batch, scale, s_qb, s_qt,
                     s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, T: int, N: int, L, H, E, SHARE,
                     NORM: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
                     BD: tl.constexpr, BDV: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
                     FROM: tl.constexpr, CUT: tl.constexpr, STATE: tl.constexpr, LATER: tl.constexpr,
                     FIRST: tl.constexpr, AUX: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr,
                     WRITE: tl.constexpr, VARLEN: tl.constexpr, SEGMENTS: tl.constexpr, PADDED: tl.constexpr,
                     GUARD: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dq, dk and dv, which have programs of their own: grid (stretches * blocks, B*H, 3). dk and dv [B,T,E,.].

    `dw`: with gates, the write gate's gradient; `da`: the read gate's, or that of a.
    """
    blocks: tl.constexpr = tl.cdiv(D if D > DV else DV, BZ)
    i_s, i_z, i_bh, role = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1), tl.program_id(2)
    role += FROM
    if VARLEN:  # noqa: SIM102
        if tl.load(p_stretches + 3 * i_s + 1) <= 0:
            return
    if role == 0:
        if i_z * BZ < D:
            weave(i_s, i_z, i_bh, p_do, p_v, p_k, p_q, p_dq, p_da, p_S, p_S, p_g, p_delta, p_a, p_b, p_rq, p_rk,
                  p_lam, p_read, p_write, p_seg, p_real, p_stretches, batch, scale, s_ob, s_ot, s_oh, s_vb, s_vt, s_vh,
                  s_kb, s_kt, s_kh, s_qb, s_qt, s_qh, T, N, L, H, E, SHARE, "dq", NORM, UNIT, D, DV, W, DV, D, BDV, BZ,
                  C, G, STATE, CUT, False, AUX, DECAY, READ, WRITE, VARLEN, SEGMENTS, PADDED, GUARD, SPLIT, PREC,
                  STAGES)  # fmt: skip
    elif i_bh < batch * E:
        if role == 1:
            if i_z * BZ < D:
                weave(i_s, i_z, i_bh, p_v, p_do, p_q, p_k, p_dk, p_dw, p_dS, p_dfirst, p_g, p_delta, p_a, p_b,
                      p_rq, p_rk, p_lam, p_read, p_write, p_seg, p_real, p_stretches, batch, scale, s_vb, s_vt, s_vh,
                      s_ob, s_ot, s_oh, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, T, N, L, H, E, SHARE, "dk", NORM, UNIT, D,
                      DV, W, DV, D, BDV, BZ, C, G, LATER, CUT, FIRST, AUX and not NORM, DECAY, READ, WRITE, VARLEN,
                      SEGMENTS, PADDED, GUARD, SPLIT, PREC, STAGES)  # fmt: skip
        else:
            if i_z * BZ < DV:
                weave(i_s, i_z, i_bh, p_k, p_q, p_do, p_v, p_dv, p_dw, p_dS, p_dfirst, p_g, p_delta, p_a, p_b,
                      p_rq, p_rk, p_lam, p_read, p_write, p_seg, p_real, p_stretches, batch, scale, s_kb, s_kt, s_kh,
                      s_qb, s_qt, s_qh, s_ob, s_ot, s_oh, s_vb, s_vt, s_vh, T, N, L, H, E, SHARE, "dv", NORM, UNIT, D,
                      DV, W, D, DV, BD, BZ, C, G, LATER, CUT, FIRST, False, DECAY, READ, WRITE, VARLEN, SEGMENTS,
                      PADDED, GUARD, SPLIT, PREC, STAGES)  # fmt: skip
