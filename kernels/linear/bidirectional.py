"""Linear attention where every token sees all others, on the GPU: the normalised kernel f(x) = a + b x of la.py.

    scan    per stretch: its part of S = sum k v^T, z = sum k, u = sum v, n (states.py)
    join    over the stretches, in order (states.py)
    read    o_i = (b S^T q_i + a u) / g_i, g_i = b z.q_i + a n

Backwards, with delta_i = o_i.do_i - g_i dg_i:

    read    dq_i = b/g_i (S do_i - delta_i z)
    scan, join     R = sum b/g_i q_i do_i^T, r = -sum b/g_i delta_i q_i, y = sum a/g_i do_i
    read    dk_j = R v_j + r        dv_j = R^T k_j + y

Each input is read once or twice, each output written once; sums are deterministic.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .triton_helpers import rows
from ..gpu.triton_helpers import as_operand, jit, tl


@jit
def halves(b_S, kind: tl.constexpr, PREC: tl.constexpr):
    """A computed S as operands for rows of `kind`, once for all rows."""
    if kind == tl.bfloat16:
        b_high = b_S.to(tl.bfloat16)
        b_low = (b_S - b_high.to(tl.float32)).to(tl.bfloat16)
    else:
        b_high = as_operand(b_S, PREC)
        b_low = b_high
    return b_high, b_low


@jit
def times(b_x, b_high, b_low, SPLIT: tl.constexpr, PREC: tl.constexpr):
    """x @ S in fp32 for what `halves` returned."""
    if b_x.dtype == tl.bfloat16:
        b_z = tl.dot(b_x, b_high)
        if SPLIT:
            b_z = tl.dot(b_x, b_low, b_z)
    else:
        b_z = tl.dot(b_x.to(tl.float32), b_high, input_precision=PREC)
    return b_z


@jit
def read_kernel(p_x, p_own, p_other, p_out, p_S, p_g, p_rg, p_delta, p_dg, p_along, p_a, p_b, p_rq, p_real,
                s_xb, s_xt, s_xh, s_wb, s_wt, s_wh, s_vb, s_vt, s_vh, T: int, L, H, E, ROLE: tl.constexpr,
                UNIT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, X: tl.constexpr,
                Z: tl.constexpr, BX: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
                MASS: tl.constexpr, AUX: tl.constexpr, PADDED: tl.constexpr, GUARD: tl.constexpr, SPLIT: tl.constexpr,
                PREC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """L rows of x times the state of all tokens: ROLE as in causal.py. Grid (stretches * blocks, B * heads).

    `own`: what the output is the gradient of; `other`: o for DQ, which also stores 1/g, delta and with AUX q.dq.
    """
    BACK: tl.constexpr = ROLE == "dk" or ROLE == "dv"
    blocks: tl.constexpr = tl.cdiv(Z, BZ)
    i_z, i_t = tl.program_id(0) % blocks, (tl.program_id(0) // blocks * L).to(tl.int64)
    heads = E if BACK else H
    i_b, i_h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    i_e = i_h if BACK else i_h // G
    size = tl.minimum(T - i_t, L)
    o_c, o_x, o_z = tl.arange(0, C), tl.arange(0, BX), i_z * BZ + tl.arange(0, BZ)
    p_x += i_b * s_xb + i_t * s_xt + i_h * s_xh
    token = (i_b * T + i_t) * heads + i_h
    p_out += token * Z
    p_S += (i_b * E + i_e) * W
    if ROLE == "out" or ROLE == "dv":
        o_S, o_u, o_k = o_x[:, None] * DV + o_z[None, :], D * DV + D + o_z, D * DV + o_x
    else:
        o_S, o_u, o_k = o_z[None, :] * DV + o_x[:, None], D * DV + o_z, D * DV + D + o_x
    # [BX, BZ], [BZ], [BX]
    b_S = tl.load(p_S + o_S, mask=(o_x < X)[:, None] & (o_z < Z)[None, :], other=0.0)
    b_u = tl.load(p_S + o_u, mask=o_z < Z, other=0.0)
    b_high, b_low = halves(b_S, p_x.dtype.element_ty, PREC)
    if not BACK:
        a, b = tl.load(p_a + i_h), tl.load(p_b + i_h)
    if ROLE == "out":
        b_k = tl.load(p_S + o_k, mask=o_x < X, other=0.0)
        n = tl.load(p_S + (D * DV + D + DV))
    for i_n in tl.range(0, tl.cdiv(size, C), num_stages=STAGES):
        i_c = i_n * C
        m_c = o_c < size - i_c
        m_r = m_c
        if PADDED:
            m_r = m_c & (tl.load(p_real + i_b * T + i_t + i_c + o_c, mask=m_c, other=0) != 0)
        b_x = rows(p_x + i_c * s_xt, o_c, o_x, s_xt, m_r, X)
        b_o = times(b_x, b_high, b_low, SPLIT, PREC)
        p_n = token + (i_c + o_c) * heads
        p_h = (i_b * heads + i_h) * T + i_t + i_c + o_c
        if ROLE == "out":
            b_den = tl.sum(b_x.to(tl.float32) * b_k[None, :], 1)
        if ROLE == "out":
            if UNIT:
                b_r = tl.rsqrt(tl.sum(b_x.to(tl.float32) * b_x.to(tl.float32), 1) + 1e-12)
                b_o *= b_r[:, None]
                b_den *= b_r
                if i_z == 0:
                    tl.store(p_rq + p_h, b_r, mask=m_c)
            b_den = b * b_den + a * n
            b_den = tl.where(tl.abs(b_den) < GUARD, tl.where(b_den < 0.0, -GUARD, GUARD), b_den)
            b_o = (b * b_o + a * b_u[None, :]) / b_den[:, None]
            if i_z == 0:
                tl.store(p_g + p_n, b_den, mask=m_c)
        elif ROLE == "dq":
            b_other = rows(p_other + (i_b * s_vb + i_t * s_vt + i_h * s_vh) + i_c * s_vt, o_c, o_x, s_vt, m_r, X)
            b_g = tl.load(p_g + p_n, mask=m_c, other=1.0)
            b_d = tl.sum(b_x.to(tl.float32) * b_other.to(tl.float32), 1)
            if MASS:
                b_d -= b_g * tl.load(p_dg + p_n, mask=m_c, other=0.0)
            b_d = tl.where(tl.abs(b_g) > GUARD, b_d, 0.0)
            if i_z == 0:
                tl.store(p_delta + p_h, b_d, mask=m_c)
                tl.store(p_rg + p_h, tl.where(m_r, 1.0 / b_g, 0.0), mask=m_c)
            b_o = (b_o - b_d[:, None] * b_u[None, :]) * tl.where(m_r, b / b_g, 0.0)[:, None]
            if UNIT:
                b_r = tl.load(p_rq + p_h, mask=m_c, other=0.0)
        elif ROLE == "dv":
            if UNIT:
                b_r = tl.rsqrt(tl.sum(b_x.to(tl.float32) * b_x.to(tl.float32), 1) + 1e-12)
                b_o *= b_r[:, None]
            b_o += b_u[None, :]
        else:
            b_o += b_u[None, :]
        if (UNIT and (ROLE == "dq" or ROLE == "dk")) or (AUX and ROLE == "dq"):
            b_own = rows(p_own + (i_b * s_wb + i_t * s_wt + i_h * s_wh) + i_c * s_wt, o_c, o_z, s_wt, m_r, Z)
            b_own = b_own.to(tl.float32)
            if UNIT:
                if ROLE == "dk":
                    b_r = tl.rsqrt(tl.sum(b_own * b_own, 1) + 1e-12)
                b_own *= b_r[:, None]
            b_along = tl.sum(b_own * b_o, 1)
            if UNIT:
                b_o = b_r[:, None] * (b_o - b_own * b_along[:, None])
            if AUX and ROLE == "dq":
                batch = tl.num_programs(1) // heads
                tl.store(p_along + i_z * batch * T * heads + p_n, b_along, mask=m_c)
        if PADDED:
            b_o = tl.where(m_r[:, None], b_o, 0.0)
        m_o = m_c[:, None] & (o_z < Z)[None, :]
        tl.store(p_out + (i_c + o_c)[:, None] * (heads * Z) + o_z[None, :], b_o.to(p_out.dtype.element_ty), mask=m_o)
