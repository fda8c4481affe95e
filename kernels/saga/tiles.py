"""What the kernels of SAGA share: products, features and their gradients, gates, and states in memory.

Letters as in saga_triton.py.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from ..linear.tiles import rows
from ..gpu.tiles import jit, parts, tl

# ---------------------------------------------------------------- products and features


@jit
def product(b_x, b_xl, b_y, b_yl, b_z, X: tl.constexpr, Y: tl.constexpr, PREC: tl.constexpr):
    """x @ y + z in fp32 for factors as `parts` returns them; with X what x leaves out counts, with Y what y does."""
    if b_y.dtype == tl.bfloat16:
        if Y:
            b_z = tl.dot(b_x, b_yl, b_z)
        if X:
            b_z = tl.dot(b_xl, b_y, b_z)
        b_z = tl.dot(b_x, b_y, b_z)
    else:
        b_z = tl.dot(b_x.to(tl.float32), b_y.to(tl.float32), b_z, input_precision=PREC)
    return b_z


@jit
def matrix(p_x, o_r, o_c, R: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr):
    """A dense fp32 matrix [R,C] as a factor."""
    return parts(rows(p_x, o_r, o_c, C, o_r < R, C), HALF)


@jit
def map_of(p_W, i_h, o_d, D: tl.constexpr, PHI: tl.constexpr, HALF: tl.constexpr):
    """A head's W, transposed, as a factor; anything where there is none."""
    if PHI == "hedgehog":
        b_W, b_Wl = matrix(p_W + i_h * D * D, o_d, o_d, D, D, HALF)
        b_W, b_Wl = tl.trans(b_W), tl.trans(b_Wl)
    else:
        b_W, b_Wl = o_d, o_d
    return b_W, b_Wl


@jit
def mapped(b_y, b_W, b_Wl, scale, m_d, D: tl.constexpr, PHI: tl.constexpr, PREC: tl.constexpr):
    """What features are made of, [C,BD] in fp32: y, for hedgehog W y to base 2, and the logarithms [C] of what either
    half is divided by. W is there transposed."""
    if PHI == "hedgehog":
        b_z = product(b_y, b_y, b_W, b_Wl, None, False, True, PREC) * (scale * 1.4426950408889634)
        b_top = tl.max(tl.where(m_d[None, :], b_z, float("-inf")), 1)
        b_low = tl.min(tl.where(m_d[None, :], b_z, float("inf")), 1)
        b_p = tl.sum(tl.where(m_d[None, :], tl.exp2(b_z - b_top[:, None]), 0.0), 1)
        b_m = tl.sum(tl.where(m_d[None, :], tl.exp2(b_low[:, None] - b_z), 0.0), 1)
        b_p, b_m = b_top + tl.log2(b_p * (2 / D) ** 0.5), tl.log2(b_m * (2 / D) ** 0.5) - b_low
    else:
        b_z = b_y.to(tl.float32) * scale
        b_p = tl.sum(b_z, 1)
        b_m = b_p
    return b_z, b_p, b_m


@jit
def half(b_z, b_l, m_d, SIGN: tl.constexpr, AGAIN: tl.constexpr, D: tl.constexpr, PHI: tl.constexpr):
    """One half of the features. AGAIN: another way to the same, so that they are not kept in registers from before."""
    if PHI == "hedgehog":
        b_p = b_z * SIGN - b_l[:, None]
        if AGAIN:
            b_p = tl.exp(b_p * 0.6931471805599453)
        else:
            b_p = tl.exp2(b_p)
        b_p = tl.where(m_d[None, :], b_p, 0.0)
    elif PHI == "elu":
        b_p = tl.where(b_z > 0.0, b_z + 1.0, tl.exp(tl.minimum(b_z, 0.0))) * (D**-0.5)
    else:
        b_p = b_z
    return b_p


@jit
def half_back(b_p, b_dp, D: tl.constexpr, PHI: tl.constexpr):
    """The gradient of W y, or of y, from that of one half."""
    if PHI == "hedgehog":
        b_dp = b_p * (b_dp - (2 / D) ** 0.5 * tl.sum(b_p * b_dp, 1)[:, None])
    elif PHI == "elu":
        b_dp *= tl.minimum(b_p, D**-0.5)
    return b_dp


@jit
def unmapped(b_h, b_l, b_dz, b_W, b_Wl, PHI: tl.constexpr, PREC: tl.constexpr):
    """The gradient of y from that of W y, [C,BD], which is there in parts too."""
    if PHI == "hedgehog":
        b_dz = product(b_h, b_l, tl.trans(b_W), tl.trans(b_Wl), None, True, True, PREC)
    return b_dz


@jit
def opened(p_gate, o_c, o_d, s_t, m_c, D: tl.constexpr):
    """sigmoid of a gate's rows, 0 outside."""
    return tl.where(m_c[:, None], tl.sigmoid(rows(p_gate, o_c, o_d, s_t, m_c, D).to(tl.float32)), 0.0)


@jit
def put(p_x, b_x, o_c, o_d, s_t, m_c, D: tl.constexpr):
    m_x = m_c[:, None] & (o_d < D)[None, :]
    tl.store(p_x + (o_c[:, None] * s_t + o_d[None, :]), b_x.to(p_x.dtype.element_ty), mask=m_x)


@jit
def put_sums(p_S, b_S0, b_S1, b_z0, b_z1, o_v, o_d, D: tl.constexpr, DV: tl.constexpr, TWO: tl.constexpr,
             MASS: tl.constexpr):  # fmt: skip
    """A state, where it lies."""
    P: tl.constexpr = 2 if TWO else 1
    put(p_S, b_S0, o_v, o_d, D, o_v < DV, D)
    if TWO:
        put(p_S + DV * D, b_S1, o_v, o_d, D, o_v < DV, D)
    if MASS:
        tl.store(p_S + P * DV * D + o_d, b_z0, mask=o_d < D)
        if TWO:
            tl.store(p_S + (P * DV * D + D) + o_d, b_z1, mask=o_d < D)


@jit
def get_sums(p_S, o_v, o_d, D: tl.constexpr, DV: tl.constexpr, TWO: tl.constexpr, MASS: tl.constexpr,
             HALF: tl.constexpr):  # fmt: skip
    """Of a state S in parts, [BV,BD] each, and z [BD], of both halves."""
    P: tl.constexpr = 2 if TWO else 1
    b_S0, b_S0l = matrix(p_S, o_v, o_d, DV, D, HALF)
    b_S1, b_S1l = b_S0, b_S0l
    if TWO:
        b_S1, b_S1l = matrix(p_S + DV * D, o_v, o_d, DV, D, HALF)
    b_z0 = tl.zeros_like(o_d).to(tl.float32)
    b_z1 = b_z0
    if MASS:
        b_z0 = tl.load(p_S + P * DV * D + o_d, mask=o_d < D, other=0.0)
        if TWO:
            b_z1 = tl.load(p_S + (P * DV * D + D) + o_d, mask=o_d < D, other=0.0)
    return b_S0, b_S0l, b_S1, b_S1l, b_z0, b_z1


@jit
def real_rows(p_real, token, o_c, left, PADDED: tl.constexpr):
    """Which rows of the chunk at `token` are real."""
    m_c = o_c < left
    if PADDED:
        m_c = m_c & (tl.load(p_real + token + o_c, mask=m_c, other=0) != 0)
    return m_c
