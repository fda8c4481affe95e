"""One token of decoding with the window: attention to the ring, the ring after it, and the mechanism's share, in one
launch. In PyTorch that is eighty launches a layer, of which a CUDA graph saves no time on the device.

Rings may be rows of a pool, which are changed in place (layers/pool.py). The programs of all heads read how many tokens
a ring has seen, so none of them may count the token there: a second launch does, unless the caller knows the number.

Letters: B rows, H query heads, E KV heads, G = H/E, D key dim, DV value dim, W window, S sink, R = S + W places of a
ring, BN places of a tile.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..gpu.launch import dense, in_rows, launch, scratch, width
from ..gpu.operators import operator, own_namespace
from ..gpu.triton_helpers import dot_given, jit, load_rows, store_rows, tl
from .kernels import LOG2E, LOWEST, dot_computed
from .launch import configure

# Bytes of a tile of keys: with the values, and the queries, less than the 64 KiB that every GPU since 2018 has.
TILE = 16384


@jit
def moved(p_x, p_x1, b_own, o_n, o_d, own, source, size, s_n, POOL: tl.constexpr, X: tl.constexpr):
    """Places o_n of the ring after the token, [BN,X]: from `source` in the ring before, or the token's own row. They are
    stored on their way; in a POOL, where both rings are one, tile after tile from the first."""
    m_x = (o_n < size)[:, None] & (o_d < X)[None, :]
    o_x = source.to(tl.int64)[:, None] * s_n + o_d[None, :]
    b_x = tl.load(p_x + o_x, mask=m_x & ((own == 0)[:, None]), other=0.0)
    b_x = tl.where((own != 0)[:, None], b_own[None, :], b_x)
    if POOL:
        tl.debug_barrier()  # a place is stored by other threads than those that load it for the place before
    tl.store(p_x1 + o_n.to(tl.int64)[:, None] * s_n + o_d[None, :], b_x, mask=m_x)
    return b_x


@jit
def step_kernel(p_q, p_k, p_v, p_keys, p_values, p_held, p_far, p_gate, p_theta, p_share, p_sum, p_real, p_rows,
                p_places, p_o, p_mass, p_keys1, p_values1, p_held1, scale, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_pb, s_keys, s_values,
                s_held, W, S, H, E, D: tl.constexpr, DV: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
                BN: tl.constexpr, POOL: tl.constexpr, FAR: tl.constexpr, SUM: tl.constexpr, PADDED: tl.constexpr, LOG2E: tl.constexpr,
                LOWEST: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """o [B,1,H,DV], log Z [B,1,H] and the ring after the token. FAR: o is blended with p_far, by p_gate [B,1,H], p_theta
    [H] and p_share [H], or with SUM by the mechanism's normaliser p_sum [B,1,H]. Grid (E, B)."""
    i_e, i_b, G, R = tl.program_id(0), tl.program_id(1).to(tl.int64), H // E, S + W
    o_g, o_d, o_v = tl.arange(0, BG), tl.arange(0, BD), tl.arange(0, BV)
    row, size, real = i_b, R, 1
    if PADDED:
        real = tl.load(p_real + i_b * s_pb).to(tl.int32)
    if p_rows is not None:
        row = tl.load(p_rows + i_b).to(tl.int64)
        size, real = tl.where(row >= 0, R, 0), tl.where(row >= 0, real, 0)
    if p_places is not None:
        held = tl.load(p_places + i_b)
        tl.store(p_held + row * s_held, held + real, mask=(i_e == 0) & (row >= 0))
    else:
        held = tl.load(p_held + row * s_held, mask=row >= 0, other=0)
        if p_rows is None:
            tl.store(p_held1 + i_b, held + real, mask=i_e == 0)
    b_q = load_rows(p_q + i_b * s_qb + i_e * G * s_qh, o_g, o_d, s_qh, G, D)
    b_k = tl.load(p_k + i_b * s_kb + i_e * s_kh + o_d, mask=o_d < D, other=0.0)
    b_v = tl.load(p_v + i_b * s_vb + i_e * s_vh + o_v, mask=o_v < DV, other=0.0)
    o_keys, o_values = row * s_keys + i_e * D, row * s_values + i_e * DV
    b_top, b_sum = tl.zeros([BG], tl.float32) + LOWEST, tl.zeros([BG], tl.float32)
    b_o = tl.zeros([BG, BV], tl.float32)
    for i_n in range(0, R, BN):
        o_n = i_n + tl.arange(0, BN)
        # The sink's places stay where they are; the window's move on by one, and the token takes the last.
        is_sink = o_n < S
        own = tl.where(is_sink, o_n == held, o_n == R - 1).to(tl.int32) * real
        source = tl.where(is_sink, o_n, o_n + real)
        b_key = moved(p_keys + o_keys, p_keys1 + o_keys, b_k, o_n, o_d, own, source, size, E * D, POOL, D)
        b_value = moved(p_values + o_values, p_values1 + o_values, b_v, o_n, o_v, own, source, size, E * DV, POOL, DV)
        # What is still among the last W does not count twice; padding sees something, so that no sum is empty.
        seen = tl.where(is_sink, o_n <= held - W, R - 1 - o_n <= held) & (o_n < R)
        b_s = tl.where(seen[None, :], dot_given(b_q, tl.trans(b_key), PREC) * (scale * LOG2E), -float("inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 1))
        b_p, b_keep = tl.exp2(b_s - b_new[:, None]), tl.exp2(b_top - b_new)
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_o = dot_computed(b_p, b_value, b_o * b_keep[:, None], PREC)
        b_top = b_new
    b_o, b_mass = b_o / b_sum[:, None], (b_top + tl.log2(b_sum)) / LOG2E
    o_h, head = i_e * G + o_g, i_b * H + i_e * G
    tl.store(p_mass + head + o_g, b_mass, mask=o_g < G)
    if FAR:
        b_logit = tl.load(p_gate + head + o_g, mask=o_g < G, other=0.0).to(tl.float32)
        b_logit += tl.load(p_theta + o_h, mask=o_g < G, other=0.0).to(tl.float32)
        if SUM:
            b_logit += tl.log(tl.load(p_sum + head + o_g, mask=o_g < G, other=1.0)) - b_mass
        else:
            b_logit -= tl.load(p_share + o_h, mask=o_g < G, other=0.0).to(tl.float32) * b_mass
        b_w = (1.0 / (1.0 + tl.exp(-b_logit)))[:, None]
        b_far = load_rows(p_far + head * DV, o_g, o_v, DV, G, DV).to(tl.float32)
        b_o = b_w * b_far + (1.0 - b_w) * b_o
    if PADDED or POOL:
        b_o = tl.where(real != 0, b_o, 0.0)
    store_rows(p_o + head * DV, b_o, o_g, o_v, DV, G, DV)


@jit
def count_kernel(p_held, p_real, p_rows, s_held, s_pb, PADDED: tl.constexpr):
    """The tokens of rows of a pool after one. Grid (B)."""
    i_b, real = tl.program_id(0).to(tl.int64), 1
    row = tl.load(p_rows + i_b).to(tl.int64)
    if PADDED:
        real = tl.load(p_real + i_b * s_pb).to(tl.int32)
    held = tl.load(p_held + row * s_held, mask=row >= 0, other=0)
    tl.debug_barrier()  # all threads load it, and none may do so behind the store
    tl.store(p_held + row * s_held, held + real, mask=row >= 0)


class StepCall(NamedTuple):
    """The inputs of the operators: a token, the ring before it, and what it is blended with; with `rows` the ring is a
    pool, which is changed in place.

    `far` [B,1,H,Dv] is the mechanism's output, `gate` [B,1,H] u.x, `theta` and `share` (a) [H]; `mass` [B,1,H] fp32 the
    mechanism's normaliser, in place of a share. With rows `places` [B,1] may say how many tokens each has seen.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    held: Tensor
    far: Tensor | None
    gate: Tensor | None
    theta: Tensor | None
    share: Tensor | None
    mass: Tensor | None
    padding: Tensor | None
    window: int
    sink: int
    scale: float
    rows: Tensor | None = None
    places: Tensor | None = None


def results(x: StepCall) -> tuple[Tensor, ...]:
    """Room for o [B,1,H,Dv], log Z [B,1,H] fp32 and, without rows, the ring after the token."""
    o = scratch(x.q, *x.q.shape[:3], x.v.shape[-1], dtype=x.v.dtype if x.far is None else x.far.dtype)
    before = (x.keys, x.values, x.held) if x.rows is None else ()
    ring = (scratch(y, *y.shape, dtype=y.dtype) for y in before)
    return o, scratch(x.q, *x.q.shape[:3]), *ring


def step(x: StepCall, o: Tensor, mass: Tensor, *after: Tensor) -> None:
    """One token in one launch; in two where the rings lie in a pool and nobody knows how many tokens they have seen."""
    (B, _, H, D), E, DV = x.q.shape, x.k.shape[2], x.v.shape[-1]
    q, k, v = (dense(y) for y in x[:3])
    ring = [in_rows(y, x.rows) for y in (x.keys, x.values, x.held)]
    others = (None if y is None else y.contiguous() for y in (x.far, x.gate, x.theta, x.share, x.mass))
    of_padding, wide = 0 if x.padding is None else x.padding.stride(0), max(width(D), width(DV))
    launch(
        step_kernel, (E, B), q, k, v, *ring, *others, x.padding, x.rows, x.places, o, mass, *(after or ring), x.scale,
        q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2), of_padding,
        *(y.stride(0) for y in ring), x.window, x.sink, H, E, num_warps=4, D=D, DV=DV, BG=width(H // E),
        BD=width(D), BV=width(DV), BN=max(16, min(64, TILE // (x.k.element_size() * wide))), POOL=x.rows is not None,
        FAR=x.far is not None, SUM=x.mass is not None, PADDED=x.padding is not None, LOG2E=LOG2E, LOWEST=LOWEST,
        PREC=configure(q.device, q.dtype, D, DV).precision,
    )  # fmt: skip
    if x.rows is not None and x.places is None:
        launch(
            count_kernel, (B,), ring[2], x.padding, x.rows, ring[2].stride(0), of_padding, num_warps=1,
            PADDED=x.padding is not None,
        )  # fmt: skip


NAMESPACE = own_namespace(__name__, "window_step")
step_op = operator(NAMESPACE, "window_step", StepCall, results, step, "o mass keys values held")
pool_op = operator(
    NAMESPACE, "window_step_pool", StepCall, results, step, "o mass", changed="keys values held"
)  # fmt: skip
