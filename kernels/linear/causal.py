"""Causal linear attention on the GPU: one kernel for the output and for every gradient, all blocks of rows in parallel.

Output and gradients are four forms of one sum, over tokens j up to i (OUT, DQ) or from i on (DK, DV):

    out_i = r_i sum_j (alpha + beta_i gamma_j x_i.y_j - delta) c_j e^{lam |i-j|} z_j

    ROLE   x   y   z   normalised: alpha, delta, c, r           decayed: c, r
    OUT    q   k   v   a, 0, 1, 1/g_i                           w_j, scale r_i
    DQ     do  v   k   0, delta_i, 1, b/g_i                     w_j, scale r_i
    DK     v   do  q   0, delta_j, b/g_j, 1                     scale r_j, w_i
    DV     k   q   do  a, 0, 1/g_j, 1                           scale r_j, w_i

`normalised` is la.py's kernel f(x) = a + b x with g_i its sum and delta_i = o_i.do_i; b multiplies x.y of OUT and DV.
UNIT takes q and k as unit vectors: their inverse lengths go into the factors, no rounded copy is made. `decayed` is
retention: lam = log gamma, r and w the read and write gates.

A row is cut into stretches of L tokens. `scan` (states.py) walks along them and leaves the state that enters
each: S = sum k v^T, z = sum k, u = sum v and n tokens; or for DK and DV its gradient, from the right. Here a program
takes C rows of x and BZ columns of z, reads the state once and goes over the tokens of its stretch that its rows see, K
of y and z after another; with decay those of its own rows last and apart.
No product takes the transpose of a product: DK's state comes transposed from memory.

Letters as in linear.py; `BX`, `BZ` columns of x and z that a program holds.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .triton_helpers import given, given_right, numbers, places, rows, stretch, times_state
from ..gpu.triton_helpers import jit, tl


@jit
def chunk_product(
    i_r, i_z, i_bh, i_t, size, slot, p_x, p_y, p_z, p_own, p_out, p_aux, p_far, p_S, p_n, p_g, p_rg, p_delta, p_a, p_b,
    p_rq, p_rk, p_lam, p_read, p_write, p_seg, p_real, p_place, batch, scale, s_xb, s_xt, s_xh, s_yb, s_yt, s_yh, s_zb, s_zt,
    s_zh, s_wb, s_wt, s_wh, s_rb, s_rt, s_rh, s_gb, s_gt, s_gh, T, H, E, SHARE, ROLE: tl.constexpr, NORM: tl.constexpr,
    UNIT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, X: tl.constexpr, Z: tl.constexpr, BX: tl.constexpr, BZ:
    tl.constexpr, C: tl.constexpr, K: tl.constexpr, G: tl.constexpr, STATE: tl.constexpr, AUX: tl.constexpr, FAR:
    tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, SEGMENTS: tl.constexpr, PADDED: tl.constexpr, GUARD:
    tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """C rows of one head, BZ columns of z. AUX: DQ also stores q.dq, in front of the read gate, and DK k.dk in front of
    the write gate, of each block of columns. FAR: what decays.py adds up, likewise: DQ its pairs of one stretch and of
    the state that enters it, DK those of the state that leaves it."""
    REVERSE: tl.constexpr = ROLE == "dk" or ROLE == "dv"
    HEADS: tl.constexpr = G if REVERSE else 1
    if REVERSE:
        i_b, i_e = (i_bh // E).to(tl.int64), i_bh % E
        i_h, i_x, i_y, i_o, heads = i_e * G, i_e // SHARE, i_e * G, i_e, E
    else:
        i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
        i_e = i_h // G
        i_x, i_y, i_o, heads = i_h, i_e // SHARE, i_h, H
    i_c = i_r * C
    p_x += i_b * s_xb + i_t * s_xt + i_x * s_xh
    p_y += i_b * s_yb + i_t * s_yt + i_y * s_yh
    p_z += i_b * s_zb + i_t * s_zt + i_y * s_zh
    token = i_b * T + i_t
    p_out += (token * heads + i_o) * Z
    if AUX:
        p_aux += token * heads + i_o
    i_w = i_e // SHARE if REVERSE else i_h
    p_own += i_b * s_wb + i_t * s_wt + i_w * s_wh
    # Numbers of tokens lie head by head, but g as the caller gets it and gates as the caller gave them.
    own_q, own_e = (i_b * H + i_h) * T + i_t, (i_b * E + i_e) * T + i_t
    if NORM and ROLE != "out":
        p_rg += own_q
        p_delta += own_q
    if UNIT:
        p_rq += own_q
        p_rk += own_e
    if READ:
        p_read += i_b * s_rb + i_t * s_rt + i_h * s_rh
    if WRITE:
        p_write += i_b * s_gb + i_t * s_gt + i_e * s_gh
    o_c, o_k, o_x, o_z = tl.arange(0, C), tl.arange(0, K), tl.arange(0, BX), i_z * BZ + tl.arange(0, BZ)
    m_c, b_seg, b_place, first, total, entered, leaves = places(
        p_seg, p_real, p_place, i_b * T + i_t, i_t, i_c + o_c, size, DECAY, SEGMENTS, PADDED
    )
    b_x = rows(p_x + i_c * s_xt, o_c, o_x, s_xt, m_c, X)
    b_mine = b_x
    if FAR:
        b_mine = rows(p_own + i_c * s_wt, o_c, o_z, s_wt, m_c, Z)
    b_o = tl.zeros([C, BZ], tl.float32)
    b_den = tl.zeros([C], tl.float32)
    lam, a, b = 0.0, 0.0, 1.0
    anchor = 0.0
    if DECAY:
        lam = tl.load(p_lam + i_e) * 1.4426950408889634
        # Weights of tokens outside the block go by the block's nearest token: no factor exceeds 1.
        if REVERSE:
            anchor = tl.max(b_place, 0)
        else:
            anchor = tl.min(b_place, 0)
    if NORM and not REVERSE:
        a, b = tl.load(p_a + i_h), tl.load(p_b + i_h)
    # What rows bring along [C]: inverse lengths, delta.
    b_rx = tl.zeros([C], tl.float32)
    if UNIT and ROLE == "out":
        b_rx = tl.rsqrt(tl.sum(b_x.to(tl.float32) * b_x.to(tl.float32), 1) + 1e-12)
        if i_z == 0:
            tl.store(p_rq + i_c + o_c, b_rx, mask=i_c + o_c < size)
    if UNIT and ROLE == "dv":
        b_rx = numbers(p_rk + i_c, o_c, 1, m_c)
    if NORM and ROLE == "dq":
        b_rx = numbers(p_delta + i_c, o_c, 1, m_c)
    if STATE:
        W: tl.constexpr = D + DV + 4
        p_S += (slot * E + i_e) * (D * DV)
        p_n += (slot * E + i_e) * W
        m_S = (o_x < X)[:, None] & (o_z < Z)[None, :]
        if ROLE == "out" or ROLE == "dv":
            o_S, o_u = o_x[:, None] * DV + o_z[None, :], D + o_z
        else:
            o_S, o_u = o_z[None, :] * DV + o_x[:, None], o_z
        b_o = times_state(b_x, tl.load(p_S + o_S, mask=m_S, other=0.0), PREC)
        b_see = tl.full([C], 1.0, tl.float32)
        if SEGMENTS:
            if REVERSE:
                b_see = (b_seg == leaves).to(tl.float32)
            else:
                b_see = (b_seg == entered).to(tl.float32)
        if UNIT and (ROLE == "out" or ROLE == "dv"):
            b_o *= (b_see * b_rx)[:, None]
        elif SEGMENTS:
            b_o *= b_see[:, None]
        if NORM:
            b_u = tl.load(p_n + o_u, mask=o_z < Z, other=0.0)
            if ROLE == "out":
                b_k = tl.load(p_n + o_x, mask=o_x < X, other=0.0)
                b_den = tl.sum(b_x.to(tl.float32) * b_k[None, :], 1)
                if UNIT:
                    b_den *= b_rx
                b_den = b_see * (b * b_den + a * tl.load(p_n + (D + DV)))
                b_o = b * b_o + (a * b_see)[:, None] * b_u[None, :]
            elif ROLE == "dq":
                b_o -= (b_rx * b_see)[:, None] * b_u[None, :]
            else:
                b_o += b_see[:, None] * b_u[None, :]
        if DECAY:
            if REVERSE:
                b_o *= tl.exp2(lam * (total - anchor))
            else:
                b_o *= tl.exp2(lam * (anchor - first))
        if FAR:
            if REVERSE:
                b_far = total - b_place
            else:
                b_far = b_place - first
            b_den = b_far * tl.sum(b_mine.to(tl.float32) * b_o, 1)
    # Decayed weights inside the block are made differently, so that its own tokens have a loop of their own.
    AT_ONCE: tl.constexpr = not DECAY
    own: tl.constexpr = C if AT_ONCE else 0
    if REVERSE:
        start, tiles = i_c + C - own, tl.cdiv(tl.maximum(size - i_c - C + own, 0), K)
    else:
        start, tiles = 0, (i_c + own) // K
    for i_n in tl.range(0, tiles * HEADS, num_stages=STAGES):
        b_o, b_den = tile(
            b_o, b_den, b_x, b_mine, b_rx, i_n // tiles, start + (i_n % tiles) * K, i_c, i_h, o_c, o_k, o_x, o_z, b_seg,
            b_place, anchor, lam, a, b, p_y, p_z, p_rg, p_delta, p_a, p_b, p_rq, p_rk, p_read, p_write, p_seg, p_real,
            p_place, i_b * T + i_t, i_t, size, scale, s_yt, s_yh, s_zt, s_zh, s_rt, s_rh, s_gt, T, ROLE, NORM, UNIT, X,
            Z, FAR, DECAY, READ, WRITE, SEGMENTS, PADDED, PREC, AT_ONCE,
        )  # fmt: skip
    if DECAY:
        if REVERSE:
            b_fall = tl.exp2(lam * (anchor - b_place))
        else:
            b_fall = tl.exp2(lam * (b_place - anchor))
        b_o *= b_fall[:, None]
        if FAR:
            b_den *= b_fall
    for i_n in tl.static_range(0, 0 if AT_ONCE else HEADS * (C // K)):
        b_o, b_den = tile(
            b_o, b_den, b_x, b_mine, b_rx, i_n // (C // K), i_c + (i_n % (C // K)) * K, i_c, i_h, o_c, o_k, o_x, o_z, b_seg,
            b_place, anchor, lam, a, b, p_y, p_z, p_rg, p_delta, p_a, p_b, p_rq, p_rk, p_read, p_write, p_seg, p_real,
            p_place, i_b * T + i_t, i_t, size, scale, s_yt, s_yh, s_zt, s_zh, s_rt, s_rh, s_gt, T, ROLE, NORM, UNIT, X,
            Z, FAR, DECAY, READ, WRITE, SEGMENTS, PADDED, PREC, True,
        )  # fmt: skip
    # What row i takes on the way out.
    m_t = i_c + o_c < size
    if ROLE == "out" and NORM:
        b_den = tl.where(tl.abs(b_den) < GUARD, tl.where(b_den < 0.0, -GUARD, GUARD), b_den)
        b_o = b_o * tl.where(m_c, 1.0 / b_den, 0.0)[:, None]
        if i_z == 0:
            tl.store(p_g + token * H + i_h + (i_c + o_c) * H, b_den, mask=m_t)
    if ROLE == "dq" and NORM:
        b_o *= (b * numbers(p_rg + i_c, o_c, 1, m_c))[:, None]
    if not NORM and not REVERSE:
        b_o *= scale
        if FAR:
            b_den *= scale
    if AUX or (UNIT and (ROLE == "dq" or ROLE == "dk")):
        b_own = rows(p_own + i_c * s_wt, o_c, o_z, s_wt, m_c, Z).to(tl.float32)
        if UNIT:
            if ROLE == "dq":
                b_ro = numbers(p_rq + i_c, o_c, 1, m_c)
            else:
                b_ro = numbers(p_rk + i_c, o_c, 1, m_c)
            b_own *= b_ro[:, None]
        b_along = tl.sum(b_own * b_o, 1)
        if UNIT:
            b_o = b_ro[:, None] * (b_o - b_own * b_along[:, None])
        if AUX:
            tl.store(p_aux + i_z * batch * T * heads + (i_c + o_c) * heads, b_along, mask=m_t)
    if not NORM:
        b_gate = tl.full([C], 1.0, tl.float32)
        if READ and not REVERSE:
            b_gate = numbers(p_read + i_c * s_rt, o_c, s_rt, m_c)
        if WRITE and REVERSE:
            b_gate = numbers(p_write + i_c * s_gt, o_c, s_gt, m_c)
        if (READ and not REVERSE) or (WRITE and REVERSE):
            b_o *= b_gate[:, None]
        if FAR:
            p_far += i_z * batch * T * heads + token * heads + i_o
            tl.store(p_far + (i_c + o_c) * heads, b_den * b_gate, mask=m_t)
    if PADDED:
        b_o = tl.where(m_c[:, None], b_o, 0.0)
    m_o = m_t[:, None] & (o_z < Z)[None, :]
    tl.store(p_out + (i_c + o_c)[:, None] * (heads * Z) + o_z[None, :], b_o.to(p_out.dtype.element_ty), mask=m_o)


@jit
def tile(b_o, b_den, b_x, b_mine, b_rx, i_g, i_k, i_c, i_h, o_c, o_k, o_x, o_z, b_seg, b_place, anchor, lam, a, b, p_y, p_z,
         p_rg, p_delta, p_a, p_b, p_rq, p_rk, p_read, p_write, p_seg, p_real, p_place, row, i_t, size, scale, s_yt,
         s_yh,
         s_zt, s_zh, s_rt, s_rh, s_gt, T, ROLE: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr, X: tl.constexpr,
         Z: tl.constexpr, FAR: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, SEGMENTS: tl.constexpr,
         PADDED: tl.constexpr, PREC: tl.constexpr, OWN: tl.constexpr):  # fmt: skip
    """Add what K tokens at i_k, of the i_g-th query head, are worth to the rows; OWN: they are rows of the block."""
    REVERSE: tl.constexpr = ROLE == "dk" or ROLE == "dv"
    m_k, b_seg_k, b_place_k, _, _, _, _ = places(
        p_seg, p_real, p_place, row, i_t, i_k + o_k, size, DECAY, SEGMENTS, PADDED
    )
    b_y = rows(p_y + i_k * s_yt + i_g * s_yh, o_k, o_x, s_yt, m_k, X)
    b_z = rows(p_z + i_k * s_zt + i_g * s_zh, o_k, o_z, s_zt, m_k, Z)
    b_w = given(b_x, tl.trans(b_y), tl.zeros([b_x.shape[0], b_y.shape[0]], tl.float32), PREC)
    if NORM:
        if ROLE == "out":
            if UNIT:
                b_w *= (b * b_rx)[:, None] * numbers(p_rk + i_k, o_k, 1, m_k)[None, :]
                b_w += a
            else:
                b_w = a + b * b_w
        elif ROLE == "dq":
            b_w -= b_rx[:, None]
            if UNIT:
                b_w *= numbers(p_rk + i_k, o_k, 1, m_k)[None, :]
        else:
            b_r = numbers(p_rg + i_g * T + i_k, o_k, 1, m_k)
            b_c = b_r * tl.load(p_b + i_h + i_g)
            if UNIT:
                b_c *= numbers(p_rq + i_g * T + i_k, o_k, 1, m_k)
            if ROLE == "dk":
                b_w = (b_w - numbers(p_delta + i_g * T + i_k, o_k, 1, m_k)[None, :]) * b_c[None, :]
            else:
                if UNIT:
                    b_w *= b_rx[:, None]
                b_w = b_w * b_c[None, :] + (b_r * tl.load(p_a + i_h + i_g))[None, :]
    else:
        b_c = tl.full([b_y.shape[0]], 1.0, tl.float32)
        if DECAY and not OWN:
            if REVERSE:
                b_c = tl.exp2(lam * tl.maximum(b_place_k - anchor, 0.0))
            else:
                b_c = tl.exp2(lam * tl.maximum(anchor - b_place_k, 0.0))
        if REVERSE:
            b_c *= scale
            if READ:
                b_c *= numbers(p_read + i_k * s_rt + i_g * s_rh, o_k, s_rt, m_k)
        elif WRITE:
            b_c *= numbers(p_write + i_k * s_gt, o_k, s_gt, m_k)
        if DECAY and OWN:
            b_w *= tl.exp2(lam * tl.abs(b_place[:, None] - b_place_k[None, :]))
        if REVERSE or WRITE or not OWN:
            b_w *= b_c[None, :]
    if OWN:
        if REVERSE:
            m_w = (i_c + o_c)[:, None] <= (i_k + o_k)[None, :]
        else:
            m_w = (i_c + o_c)[:, None] >= (i_k + o_k)[None, :]
        b_w = tl.where(m_w, b_w, 0.0)
    if SEGMENTS:
        b_w = tl.where(b_seg[:, None] == b_seg_k[None, :], b_w, 0.0)
    if PADDED:
        b_w = tl.where(m_k[None, :], b_w, 0.0)
    if NORM and ROLE == "out":
        b_den += tl.sum(b_w, 1)
    if FAR and ROLE == "dq":
        b_own = given(b_mine, tl.trans(b_z), tl.zeros([b_x.shape[0], b_y.shape[0]], tl.float32), PREC)
        b_den += tl.sum(b_w * b_own * (b_place[:, None] - b_place_k[None, :]), 1)
    return given_right(b_w, b_z, b_o, PREC), b_den


@jit
def out_kernel(p_q, p_k, p_v, p_o, p_S, p_n, p_g, p_a, p_b, p_rq, p_rk, p_lam, p_read, p_write, p_seg, p_real, p_place,
               p_stretches, scale, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_rb, s_rt, s_rh, s_gb, s_gt,
               s_gh, T: int, N: int, L, H, E, SHARE, NORM: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr,
               DV: tl.constexpr, BD: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
               STATE: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, VARLEN: tl.constexpr,
               SEGMENTS: tl.constexpr, PADDED: tl.constexpr, GUARD: tl.constexpr, PREC: tl.constexpr,
               STAGES: tl.constexpr):  # fmt: skip
    """o [B,T,H,Dv] and its normaliser g [B,T,H]. Grid (stretches * blocks of C rows * blocks of BZ columns, B*H)."""
    blocks: tl.constexpr = tl.cdiv(DV, BZ)
    i_z, i_bh, many = tl.program_id(0) % blocks, tl.program_id(1), tl.cdiv(L, C)
    i_s, i_r = tl.program_id(0) // blocks // many, tl.program_id(0) // blocks % many
    i_t, size, slot = stretch(p_stretches, i_s, (i_bh // H).to(tl.int64), T, N, L, VARLEN)
    if i_r * C >= size:
        return
    chunk_product(i_r, i_z, i_bh, i_t, size, slot, p_q, p_k, p_v, p_q, p_o, p_o, p_o, p_S, p_n, p_g, p_rq, p_rq, p_a, p_b, p_rq,
          p_rk, p_lam, p_read, p_write, p_seg, p_real, p_place, 1, scale, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb,
          s_vt, s_vh, 0, 0, 0, s_rb, s_rt, s_rh, s_gb, s_gt, s_gh, T, H, E, SHARE, "out", NORM, UNIT, D, DV, D, DV, BD,
          BZ, C, K, G, STATE, False, False, DECAY, READ, WRITE, SEGMENTS, PADDED, GUARD, PREC, STAGES)  # fmt: skip


@jit
def gradients_kernel(p_q, p_k, p_v, p_do, p_dq, p_dk, p_dv, p_da, p_dw, p_fq, p_fk, p_S, p_n, p_dS, p_dn, p_rg, p_delta, p_a,
                     p_b, p_rq, p_rk, p_lam, p_read, p_write, p_seg, p_real, p_place, p_stretches, batch, scale, s_qb,
                     s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ob, s_ot, s_oh, s_rb, s_rt, s_rh, s_gb, s_gt,
                     s_gh, T: int, N: int, L, H, E, SHARE, NORM: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr,
                     DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr,
                     K: tl.constexpr, G: tl.constexpr, STATE: tl.constexpr, LATER: tl.constexpr,
                     AUX: tl.constexpr, FAR: tl.constexpr, DECAY: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
                     VARLEN: tl.constexpr, SEGMENTS: tl.constexpr, PADDED: tl.constexpr, GUARD: tl.constexpr,
                     PREC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dq, dk and dv, which have programs of their own, side by side so that they share what they load: grid (stretches
    * blocks of C rows * blocks of BZ columns * 3, B*H). dk and dv [B,T,E,.].

    `dw`: with gates, the write gate's gradient; `da`: the read gate's, or that of a. FAR: `fq` and `fk` (decays.py).
    """
    blocks: tl.constexpr = tl.cdiv(D if D > DV else DV, BZ)
    role, i_n, i_bh, many = tl.program_id(0) % 3, tl.program_id(0) // 3, tl.program_id(1), tl.cdiv(L, C)
    i_z, i_s, i_r = i_n % blocks, i_n // blocks // many, i_n // blocks % many
    if role > 0 and i_bh >= batch * E:
        return
    heads = H
    if role > 0:
        heads = E
    i_t, size, slot = stretch(p_stretches, i_s, (i_bh // heads).to(tl.int64), T, N, L, VARLEN)
    if i_r * C >= size:
        return
    if role == 0:
        if i_z * BZ < D:
            chunk_product(
                i_r, i_z, i_bh, i_t, size, slot, p_do, p_v, p_k, p_q, p_dq, p_da, p_fq, p_S, p_n, p_rg, p_rg, p_delta, p_a,
                p_b, p_rq, p_rk, p_lam, p_read, p_write, p_seg, p_real, p_place, batch, scale, s_ob, s_ot, s_oh, s_vb,
                s_vt, s_vh, s_kb, s_kt, s_kh, s_qb, s_qt, s_qh, s_rb, s_rt, s_rh, s_gb, s_gt, s_gh, T, H, E, SHARE,
                "dq", NORM, UNIT, D, DV, DV, D, BDV, BZ, C, K, G, STATE, AUX, FAR, DECAY, READ, WRITE, SEGMENTS, PADDED,
                GUARD, PREC, STAGES,
            )  # fmt: skip
    elif role == 1:
        if i_z * BZ < D:
            chunk_product(
                i_r, i_z, i_bh, i_t, size, slot, p_v, p_do, p_q, p_k, p_dk, p_dw, p_fk, p_dS, p_dn, p_rg, p_rg, p_delta, p_a,
                p_b, p_rq, p_rk, p_lam, p_read, p_write, p_seg, p_real, p_place, batch, scale, s_vb, s_vt, s_vh, s_ob,
                s_ot, s_oh, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_rb, s_rt, s_rh, s_gb, s_gt, s_gh, T, H, E, SHARE,
                "dk", NORM, UNIT, D, DV, DV, D, BDV, BZ, C, K, G, LATER, AUX and not NORM, FAR, DECAY, READ, WRITE, SEGMENTS,
                PADDED, GUARD, PREC, STAGES,
            )  # fmt: skip
    else:
        if i_z * BZ < DV:
            chunk_product(
                i_r, i_z, i_bh, i_t, size, slot, p_k, p_q, p_do, p_v, p_dv, p_dw, p_fk, p_dS, p_dn, p_rg, p_rg, p_delta, p_a,
                p_b, p_rq, p_rk, p_lam, p_read, p_write, p_seg, p_real, p_place, batch, scale, s_kb, s_kt, s_kh, s_qb,
                s_qt, s_qh, s_ob, s_ot, s_oh, s_vb, s_vt, s_vh, s_rb, s_rt, s_rh, s_gb, s_gt, s_gh, T, H, E, SHARE,
                "dv", NORM, UNIT, D, DV, D, DV, BD, BZ, C, K, G, LATER, False, False, DECAY, READ, WRITE, SEGMENTS, PADDED,
                GUARD, PREC, STAGES,
            )  # fmt: skip
