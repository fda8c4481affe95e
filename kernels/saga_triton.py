"""The Triton kernels of SAGA (saga.py), letters as there: two passes over the tokens each way.

    summary    per stretch: its part of S = sum k~ v~^T, z = sum k~, with k~ = phi(k) sigmoid(key gate), v~ alike
    output     o = (y + local) G, y = S^T phi(q) over its norm

Backwards, with dt = do G, N what y was divided by, dn = dt/N, dm = -dn.y for a mass and 0 else:

    queries    dG = do (y + local), dlocal = dt, dphi(q) = S dn + dm z, and per stretch R = sum phi(q) dn^T,
               r = sum dm phi(q)
    keys       dk~ = R v~ + r, dv~ = R^T k~, and through gates and features

Features are computed where q and k are loaded, those of hedgehog in two halves of D: softmax(W k) and softmax(-W k).
Gradients of W are summed per stretch. Sums of stretches are taken in order. Every input is read once, every output
written once; the only thing kept between the passes is S (and y for the norm of a head).

S lies transposed: part p at [p, Dv, D], then z at [p, D]; P parts, W numbers in all. Where a transpose goes into a
product, it is of something loaded and scaled, not of a product (tiles.py says what triton makes of those).
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from .linear_tiles import rows
from .tiles import jit, parts, tl

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
def features(b_y, b_W, b_Wl, scale, m_d, D: tl.constexpr, PHI: tl.constexpr, PREC: tl.constexpr):
    """Two halves of phi(y), or twice the same, [C,BD] in fp32; W is there transposed."""
    if PHI == "hedgehog":
        b_z = product(b_y, b_y, b_W, b_Wl, None, False, True, PREC) * scale
        b_top = tl.max(tl.where(m_d[None, :], b_z, float("-inf")), 1)
        b_low = tl.min(tl.where(m_d[None, :], b_z, float("inf")), 1)
        b_p = tl.where(m_d[None, :], tl.exp(b_z - b_top[:, None]), 0.0)
        b_m = tl.where(m_d[None, :], tl.exp(b_low[:, None] - b_z), 0.0)
        b_p *= ((D / 2) ** 0.5 / tl.sum(b_p, 1))[:, None]
        b_m *= ((D / 2) ** 0.5 / tl.sum(b_m, 1))[:, None]
    else:
        b_p = b_y.to(tl.float32) * scale
        if PHI == "elu":
            b_p = tl.where(b_p > 0.0, b_p + 1.0, tl.exp(tl.minimum(b_p, 0.0))) * (D**-0.5)
        b_m = b_p
    return b_p, b_m


@jit
def features_back(b_p, b_m, b_dp, b_dm, b_W, b_Wl, scale, D: tl.constexpr, PHI: tl.constexpr, HALF: tl.constexpr,
                  FINE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """The gradient of y from those of both halves, and what W's is made of, y^T times it."""
    if PHI == "hedgehog":
        root = (2 / D) ** 0.5
        b_dz = b_p * (b_dp - root * tl.sum(b_p * b_dp, 1)[:, None])
        b_dz -= b_m * (b_dm - root * tl.sum(b_m * b_dm, 1)[:, None])
        b_dz *= scale
        b_h, b_l = parts(b_dz, HALF)
        b_dy = product(b_h, b_l, tl.trans(b_W), tl.trans(b_Wl), None, FINE & 64 > 0, True, PREC)
    else:
        b_dz = b_dp * scale
        if PHI == "elu":
            b_dz *= tl.minimum(b_p, D**-0.5)
        b_dy = b_dz
    return b_dy, b_dz


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


# ---------------------------------------------------------------- forward


@jit
def summary_kernel(p_k, p_v, p_kg, p_vg, p_W, p_real, p_S, scale, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, T: int, L, E,
                   PHI: tl.constexpr, NORM: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                   W: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
                   FINE: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """What a stretch of L tokens adds to the state. Grid (B * E, stretches)."""
    TWO: tl.constexpr = PHI == "hedgehog"
    F: tl.constexpr = 2 * D if TWO else D
    i_b, i_e, i_t = (tl.program_id(0) // E).to(tl.int64), tl.program_id(0) % E, (tl.program_id(1) * L).to(tl.int64)
    o_c, o_d, o_v = tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BV)
    size, token = tl.minimum(T - i_t, L), i_b * T + i_t
    p_k += i_b * s_kb + i_t * s_kt + i_e * s_kh
    p_v += i_b * s_vb + i_t * s_vt + i_e * s_vh
    p_kg += (token * E + i_e) * F
    p_vg += (token * E + i_e) * DV
    b_W, b_Wl = map_of(p_W, i_e, o_d, D, PHI, HALF)
    b_S0 = tl.zeros([BV, BD], tl.float32)
    b_S1 = b_S0
    b_z0 = tl.zeros([BD], tl.float32)
    b_z1 = b_z0
    for i_n in tl.range(0, tl.cdiv(size, C), num_stages=STAGES):
        i_c = i_n * C
        m_c = real_rows(p_real, token + i_c, o_c, size - i_c, PADDED)
        b_k = rows(p_k + i_c * s_kt, o_c, o_d, s_kt, m_c, D)
        b_v = rows(p_v + i_c * s_vt, o_c, o_v, s_vt, m_c, DV).to(tl.float32)
        b_v *= opened(p_vg + i_c * E * DV, o_c, o_v, E * DV, m_c, DV)
        b_p, b_m = features(b_k, b_W, b_Wl, scale, o_d < D, D, PHI, PREC)
        b_p *= opened(p_kg + i_c * E * F, o_c, o_d, E * F, m_c, D)
        b_vh, b_vl = parts(b_v, HALF)
        b_h, b_l = parts(b_p, HALF)
        b_S0 = product(tl.trans(b_vh), tl.trans(b_vl), b_h, b_l, b_S0, True, FINE & 2 > 0, PREC)
        b_z0 += tl.sum(b_p, 0)
        if TWO:
            b_m *= opened(p_kg + D + i_c * E * F, o_c, o_d, E * F, m_c, D)
            b_h, b_l = parts(b_m, HALF)
            b_S1 = product(tl.trans(b_vh), tl.trans(b_vl), b_h, b_l, b_S1, True, FINE & 2 > 0, PREC)
            b_z1 += tl.sum(b_m, 0)
    p_S += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * W
    put_sums(p_S, b_S0, b_S1, b_z0, b_z1, o_v, o_d, D, DV, TWO, NORM == "mass")


@jit
def summed(b_p, b_m, b_S0, b_S0l, b_S1, b_S1l, b_z0, b_z1, TWO: tl.constexpr, MASS: tl.constexpr,
           HALF: tl.constexpr, FINE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """S^T phi(q) [C,BV] and z.phi(q) [C]."""
    b_h, b_l = parts(b_p, HALF)
    b_y = product(b_h, b_l, tl.trans(b_S0), tl.trans(b_S0l), None, FINE & 1 > 0, True, PREC)
    b_den = tl.sum(b_p * b_z0[None, :], 1)
    if TWO:
        b_h, b_l = parts(b_m, HALF)
        b_y = product(b_h, b_l, tl.trans(b_S1), tl.trans(b_S1l), b_y, FINE & 1 > 0, True, PREC)
        b_den += tl.sum(b_m * b_z1[None, :], 1)
    return b_y, b_den


@jit
def output_kernel(p_q, p_og, p_local, p_S, p_W, p_norm, p_real, p_y, p_o, scale, s_qb, s_qt, s_qh, T: int, L, H, E,
                  PHI: tl.constexpr, NORM: tl.constexpr, LOCAL: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr,
                  DV: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
                  GUARD: tl.constexpr, HALF: tl.constexpr, FINE: tl.constexpr, PREC: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """o of L tokens; `norm` is w [H,Dv] of a head's norm or 1/count [B]. Grid (B * H, stretches)."""
    TWO: tl.constexpr = PHI == "hedgehog"
    MASS: tl.constexpr = NORM == "mass"
    i_b, i_h, i_t = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, (tl.program_id(1) * L).to(tl.int64)
    i_e = i_h // (H // E)
    o_c, o_d, o_v = tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BV)
    size, token = tl.minimum(T - i_t, L), i_b * T + i_t
    p_q += i_b * s_qb + i_t * s_qt + i_h * s_qh
    own, shared = (token * H + i_h) * DV, (token * E + i_e) * DV
    b_W, b_Wl = map_of(p_W, i_h, o_d, D, PHI, HALF)
    b_S0, b_S0l, b_S1, b_S1l, b_z0, b_z1 = get_sums(p_S + (i_b * E + i_e) * W, o_v, o_d, D, DV, TWO, MASS, HALF)
    if NORM == "head":
        b_w = tl.load(p_norm + i_h * DV + o_v, mask=o_v < DV, other=0.0)
    if NORM == "count":
        once = tl.load(p_norm + i_b)
    for i_n in tl.range(0, tl.cdiv(size, C), num_stages=STAGES):
        i_c = i_n * C
        m_c = o_c < size - i_c
        m_r = real_rows(p_real, token + i_c, o_c, size - i_c, PADDED)
        b_q = rows(p_q + i_c * s_qt, o_c, o_d, s_qt, m_r, D)
        b_p, b_m = features(b_q, b_W, b_Wl, scale, o_d < D, D, PHI, PREC)
        b_y, b_den = summed(b_p, b_m, b_S0, b_S0l, b_S1, b_S1l, b_z0, b_z1, TWO, MASS, HALF, FINE, PREC)
        if MASS:
            b_y /= tl.maximum(b_den, GUARD)[:, None]
        elif NORM == "count":
            b_y *= once
        elif NORM == "head":
            put(p_y + own + i_c * H * DV, b_y, o_c, o_v, H * DV, m_c, DV)
            b_y *= tl.rsqrt(tl.sum(b_y * b_y, 1) / DV + 1e-6)[:, None] * b_w[None, :]
        if LOCAL:
            b_y += rows(p_local + shared + i_c * E * DV, o_c, o_v, E * DV, m_r, DV).to(tl.float32)
        # Rows of padding have no gate, and so no output.
        b_y *= rows(p_og + own + i_c * H * DV, o_c, o_v, H * DV, m_r, DV).to(tl.float32)
        put(p_o + own + i_c * H * DV, b_y, o_c, o_v, H * DV, m_c, DV)


# ---------------------------------------------------------------- backward


@jit
def queries_kernel(p_q, p_og, p_local, p_S, p_W, p_norm, p_real, p_y, p_do, p_dq, p_dog, p_dlocal, p_R, p_dW, p_dnorm,
                   scale, s_qb, s_qt, s_qh, T: int, L, H, E, PHI: tl.constexpr, NORM: tl.constexpr,
                   LOCAL: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
                   BD: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, GUARD: tl.constexpr, HALF: tl.constexpr,
                   FINE: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Gradients of q, output gate and local, and what L tokens add to those of S and z, W and w. Grid as forward."""
    TWO: tl.constexpr = PHI == "hedgehog"
    MASS: tl.constexpr = NORM == "mass"
    i_b, i_h, i_t = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, (tl.program_id(1) * L).to(tl.int64)
    i_e = i_h // (H // E)
    o_c, o_d, o_v = tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BV)
    size, token = tl.minimum(T - i_t, L), i_b * T + i_t
    p_q += i_b * s_qb + i_t * s_qt + i_h * s_qh
    p_dq += (token * H + i_h) * D
    own, shared = (token * H + i_h) * DV, (token * E + i_e) * DV
    b_W, b_Wl = map_of(p_W, i_h, o_d, D, PHI, HALF)
    if TWO:
        b_dW = tl.zeros([BD, BD], tl.float32)
    b_S0, b_S0l, b_S1, b_S1l, b_z0, b_z1 = get_sums(p_S + (i_b * E + i_e) * W, o_v, o_d, D, DV, TWO, MASS, HALF)
    if NORM == "head":
        b_w = tl.load(p_norm + i_h * DV + o_v, mask=o_v < DV, other=0.0)
        b_dw = tl.zeros([BV], tl.float32)
    once = 1.0
    if NORM == "count":
        once = tl.load(p_norm + i_b)
    b_R0 = tl.zeros([BV, BD], tl.float32)
    b_R1 = b_R0
    b_r0 = tl.zeros([BD], tl.float32)
    b_r1 = b_r0
    for i_n in tl.range(0, tl.cdiv(size, C), num_stages=STAGES):
        i_c = i_n * C
        m_c = o_c < size - i_c
        m_r = real_rows(p_real, token + i_c, o_c, size - i_c, PADDED)
        b_q = rows(p_q + i_c * s_qt, o_c, o_d, s_qt, m_r, D)
        b_do = rows(p_do + own + i_c * H * DV, o_c, o_v, H * DV, m_r, DV).to(tl.float32)
        b_dt = b_do * rows(p_og + own + i_c * H * DV, o_c, o_v, H * DV, m_r, DV).to(tl.float32)
        b_p, b_m = features(b_q, b_W, b_Wl, scale, o_d < D, D, PHI, PREC)
        # dn = dt * once: what does not come out of a product, and a factor per row.
        b_once = tl.zeros([C], tl.float32) + once
        if NORM == "head":
            b_y = rows(p_y + own + i_c * H * DV, o_c, o_v, H * DV, m_r, DV)
            b_once = tl.rsqrt(tl.sum(b_y * b_y, 1) / DV + 1e-6)
            b_y *= b_once[:, None]
            b_dw += tl.sum(b_dt * b_y, 0)
            b_local = b_y * b_w[None, :]
            b_dn = b_dt * b_w[None, :]
            b_dn -= b_y * (tl.sum(b_dn * b_y, 1) / DV)[:, None]
        else:
            b_y, b_den = summed(b_p, b_m, b_S0, b_S0l, b_S1, b_S1l, b_z0, b_z1, TWO, MASS, HALF, FINE, PREC)
            if MASS:
                b_once = 1.0 / tl.maximum(b_den, GUARD)
            b_y *= b_once[:, None]
            b_local = b_y
            b_dn = b_dt
        if LOCAL:
            b_local += rows(p_local + shared + i_c * E * DV, o_c, o_v, E * DV, m_r, DV).to(tl.float32)
            put(p_dlocal + own + i_c * H * DV, b_dt, o_c, o_v, H * DV, m_c, DV)
        put(p_dog + own + i_c * H * DV, b_do * b_local, o_c, o_v, H * DV, m_c, DV)
        b_h, b_l = parts(b_dn, HALF)
        b_dp = product(b_h, b_l, b_S0, b_S0l, None, FINE & 4 > 0, True, PREC)
        b_dm = b_dp
        if TWO:
            b_dm = product(b_h, b_l, b_S1, b_S1l, None, FINE & 4 > 0, True, PREC)
        if MASS:
            b_mass = tl.where(b_den >= GUARD, -tl.sum(b_dn * b_y, 1), 0.0)
            b_dp += b_mass[:, None] * b_z0[None, :]
            b_r0 += tl.sum(b_p * (b_mass * b_once)[:, None], 0)
            if TWO:
                b_dm += b_mass[:, None] * b_z1[None, :]
                b_r1 += tl.sum(b_m * (b_mass * b_once)[:, None], 0)
        b_dy, b_dz = features_back(
            b_p, b_m, b_dp * b_once[:, None], b_dm * b_once[:, None], b_W, b_Wl, scale, D, PHI, HALF, FINE, PREC
        )
        put(p_dq + i_c * H * D, b_dy, o_c, o_d, H * D, m_c, D)
        b_ph, b_pl = parts(b_p * b_once[:, None], HALF)
        b_R0 = product(tl.trans(b_h), tl.trans(b_l), b_ph, b_pl, b_R0, True, FINE & 8 > 0, PREC)
        if TWO:
            b_ph, b_pl = parts(b_m * b_once[:, None], HALF)
            b_R1 = product(tl.trans(b_h), tl.trans(b_l), b_ph, b_pl, b_R1, True, FINE & 8 > 0, PREC)
            b_ph, b_pl = parts(b_dz, HALF)
            b_dW = product(tl.trans(b_q), tl.trans(b_q), b_ph, b_pl, b_dW, False, FINE & 128 > 0, PREC)
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    put_sums(p_R + place * W, b_R0, b_R1, b_r0, b_r1, o_v, o_d, D, DV, TWO, MASS)
    if TWO:
        put(p_dW + place * D * D, b_dW, o_d, o_d, D, o_d < D, D)
    if NORM == "head":
        tl.store(p_dnorm + place * DV + o_v, b_dw, mask=o_v < DV)


@jit
def keys_kernel(p_k, p_v, p_kg, p_vg, p_R, p_W, p_real, p_dk, p_dv, p_dkg, p_dvg, p_dW, scale, s_kb, s_kt, s_kh, s_vb,
                s_vt, s_vh, T: int, L, E, PHI: tl.constexpr, NORM: tl.constexpr, PADDED: tl.constexpr,
                D: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
                C: tl.constexpr, HALF: tl.constexpr, FINE: tl.constexpr, PREC: tl.constexpr,
                STAGES: tl.constexpr):  # fmt: skip
    """Gradients of k, v and their gates, and what L tokens add to W's. Grid (B * E, stretches)."""
    TWO: tl.constexpr = PHI == "hedgehog"
    F: tl.constexpr = 2 * D if TWO else D
    i_b, i_e, i_t = (tl.program_id(0) // E).to(tl.int64), tl.program_id(0) % E, (tl.program_id(1) * L).to(tl.int64)
    o_c, o_d, o_v = tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BV)
    size, token = tl.minimum(T - i_t, L), i_b * T + i_t
    p_k += i_b * s_kb + i_t * s_kt + i_e * s_kh
    p_v += i_b * s_vb + i_t * s_vt + i_e * s_vh
    narrow, wide, value = (token * E + i_e) * D, (token * E + i_e) * F, (token * E + i_e) * DV
    b_W, b_Wl = map_of(p_W, i_e, o_d, D, PHI, HALF)
    if TWO:
        b_dW = tl.zeros([BD, BD], tl.float32)
    b_R0, b_R0l, b_R1, b_R1l, b_r0, b_r1 = get_sums(
        p_R + (i_b * E + i_e) * W, o_v, o_d, D, DV, TWO, NORM == "mass", HALF
    )
    for i_n in tl.range(0, tl.cdiv(size, C), num_stages=STAGES):
        i_c = i_n * C
        m_c = o_c < size - i_c
        m_r = real_rows(p_real, token + i_c, o_c, size - i_c, PADDED)
        b_k = rows(p_k + i_c * s_kt, o_c, o_d, s_kt, m_r, D)
        b_v = rows(p_v + i_c * s_vt, o_c, o_v, s_vt, m_r, DV).to(tl.float32)
        b_g = opened(p_vg + value + i_c * E * DV, o_c, o_v, E * DV, m_r, DV)
        b_p, b_m = features(b_k, b_W, b_Wl, scale, o_d < D, D, PHI, PREC)
        b_a = opened(p_kg + wide + i_c * E * F, o_c, o_d, E * F, m_r, D)
        b_h, b_l = parts(b_p * b_a, HALF)
        b_dv = product(b_h, b_l, tl.trans(b_R0), tl.trans(b_R0l), None, FINE & 32 > 0, True, PREC)
        b_vh, b_vl = parts(b_v * b_g, HALF)
        b_dp = product(b_vh, b_vl, b_R0, b_R0l, None, FINE & 16 > 0, True, PREC) + b_r0[None, :]
        b_dp *= b_a
        put(p_dkg + wide + i_c * E * F, b_dp * b_p * (1.0 - b_a), o_c, o_d, E * F, m_c, D)
        b_dm = b_dp
        if TWO:
            b_a = opened(p_kg + wide + D + i_c * E * F, o_c, o_d, E * F, m_r, D)
            b_h, b_l = parts(b_m * b_a, HALF)
            b_dv = product(b_h, b_l, tl.trans(b_R1), tl.trans(b_R1l), b_dv, FINE & 32 > 0, True, PREC)
            b_dm = product(b_vh, b_vl, b_R1, b_R1l, None, FINE & 16 > 0, True, PREC) + b_r1[None, :]
            b_dm *= b_a
            put(p_dkg + wide + D + i_c * E * F, b_dm * b_m * (1.0 - b_a), o_c, o_d, E * F, m_c, D)
        b_dv *= b_g
        put(p_dv + value + i_c * E * DV, b_dv, o_c, o_v, E * DV, m_c, DV)
        put(p_dvg + value + i_c * E * DV, b_dv * b_v * (1.0 - b_g), o_c, o_v, E * DV, m_c, DV)
        b_dk, b_dz = features_back(b_p, b_m, b_dp, b_dm, b_W, b_Wl, scale, D, PHI, HALF, FINE, PREC)
        put(p_dk + narrow + i_c * E * D, b_dk, o_c, o_d, E * D, m_c, D)
        if TWO:
            b_h, b_l = parts(b_dz, HALF)
            b_dW = product(tl.trans(b_k), tl.trans(b_k), b_h, b_l, b_dW, False, FINE & 128 > 0, PREC)
    if TWO:
        place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        put(p_dW + place * D * D, b_dW, o_d, o_d, D, o_d < D, D)
