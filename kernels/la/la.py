"""LA: linear attention with the normalised kernel f(x) = a + b x (Gerami & Duraiswami, arXiv 2510.21956).

    o_t = sum_{i<=t} f(q_t.k_i) v_i / g_t        g_t = sum_{i<=t} f(q_t.k_i)                    (paper eqs. 4, 5)

Per KV head the state is S = sum k_i v_i^T, z = sum k_i, u = sum v_i and the number n of tokens:

    o_t = (a u + b S^T q_t) / g_t                g_t = a n + b z.q_t

which is linear attention without normaliser for the longer vectors q' = [b q, a], k' = [k, 1], v' = [v, 1]: the last
entry of its output is g, and its state [[S, z], [u, n]]. Padding must leave all of k' and v' out, for f(0) = a.

The paper takes unit vectors q and k, so that x is in [-1, 1], and a = b = 1. Only b/a matters.

Letters: B batch, T time, H query heads, Hkv KV heads, D key (feature) dim, Dv value dim, C chunk.
"""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..layers.arguments import Backend, several, check_shapes, state_dtype, wants_gradients
from ..layout import TokenLayout
from ..linear.linear import linear_attention, linear_attention_bidirectional
from ..linear.bidirectional_launch import both_op
from ..linear.launch import GUARD, Precision, chunked_op, fits_unit, pool_op, resolve_precision, step_op, use_triton
from ..mixer import Bounds, Mixer, AttentionSite, Tensors, check_power_of_two, feature_parts, full_precision
from ..layers.pool import check_pool, each_sequence, on_rows
from ..layers.scan import document_tokens, numbered


class LAState(NamedTuple):
    """S [B,Hkv,D,Dv], z [B,Hkv,D], u [B,Hkv,Dv] in fp32, and `tokens` [B] int64: n of the document."""

    products: Tensor
    keys: Tensor
    values: Tensor
    tokens: Tensor


def la(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    a: Tensor | float = 1.0,
    b: Tensor | float = 1.0,
    causal: bool = True,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: LAState | None = None,
    rows: Tensor | None = None,
    unit: bool = False,
    chunk_size: int = 64,
    backend: Backend = "auto",
    precision: Precision = "auto",
) -> tuple[Tensor, LAState]:
    """Normalised linear attention, eq. 5: o [B,T,H,Dv] in q's dtype and the state after the last token.

    q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv], Hkv dividing H, as the kernel is to see them (features), or with `unit`
    as their unit vectors; `a`, `b` numbers or [H], not 0 where they have gradients. `padding` [B,T] bool is True at
    real tokens; others add nothing and output 0. `segments` [B,T] int: sums restart where it changes. `cu_seqlens`
    [S+1] int32 with B=1: S sequences end to end; `state` then has S rows. `rows` [B] int: `state` is a pool, of
    which those rows are the call's (below 0: padding); they are changed in place. Without `causal` every token sees its
    whole document, and no state goes in. `backend`: `auto` runs the Triton kernels on a GPU for what they know, else PyTorch;
    the others insist. `chunk_size` is PyTorch's, `precision` that of the kernels' products of fp32.

    Raises ValueError for shapes that do not fit, a state without `causal`, an unknown precision, or `triton` where it
    cannot run.
    """
    check_shapes(q, k, v, k.shape[2], padding, segments, cu_seqlens)
    check_pool(rows, state, q.shape[0], cu_seqlens, segments)
    if state is not None and not causal:
        raise ValueError("a state has no meaning where every token sees all others; pass causal=True")
    way: Any = {"causal": causal, "unit": unit, "backend": backend, "precision": precision, "chunk_size": chunk_size}
    o, _, last = la_with_mass(q, k, v, a, b, padding, segments, cu_seqlens, state, rows=rows, **way)
    return o, fresh_state(q, k, v) if last is None else last


def la_with_mass(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | float, b: Tensor | float, padding: Tensor | None, segments: Tensor |
    None, cu: Tensor | None, state: LAState | None, *, causal: bool, unit: bool, backend: Backend, precision: Precision,
    chunk_size: int, rows: Tensor | None = None,
)-> tuple[Tensor, Tensor, LAState | None]:  # fmt: skip
    """`la`, and the normaliser g [B,T,H] beside its results; without `causal` the state is what came."""
    entered, dtype, cu = state, q.dtype, several(cu)
    if causal and state is None:
        state = fresh_state(q, k, v, None if cu is None else cu.shape[0] - 1)
    if q.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3]), state
    obstacle = "" if causal or segments is None else "documents in one row, and every token sees its own"
    kernels = use_triton(backend, precision, q, v, k.shape[2], obstacle)
    if cu is not None and not (kernels and causal):
        return _each_with_mass(q, k, v, a, b, cu, state, causal, unit, chunk_size)
    slopes = [y for y in (a, b) if isinstance(y, Tensor)]
    apart = not kernels or q.shape[1] != 1 or wants_gradients(q, k, v, *slopes, *(state or ())[:3])
    if rows is not None and state is not None and apart:
        way: Any = {"causal": causal, "unit": unit, "backend": backend, "precision": precision}
        run = partial(la_with_mass, q, k, v, a, b, segments=None, cu=None, chunk_size=chunk_size, **way)
        o, g, state = on_rows(run, state, rows, padding, q.shape[1])
        return o, g, state
    if unit and not (kernels and fits_unit(q, v)):
        q, k, unit = unit_vectors(q), unit_vectors(k), False
    if kernels:
        a, b = (_per_head(y, q) for y in (a, b))
        if rows is not None and state is not None:
            inputs = q.to(v.dtype), k.to(v.dtype), v, a, b, None, None, None, 1.0, unit, padding
            o, g = pool_op(*inputs, *state, rows)
            return o.to(dtype), g, state
        first = None if entered is None else _pack(entered)
        o, g, state = _la_triton(q, k, v, a, b, causal, padding, segments, cu, state, first, unit, precision)
        return o.to(dtype), g, state
    q1, k1, v1 = _longer(q, k, v, a, b, padding, state_dtype(q))
    last = state
    if causal:
        assert state is not None
        sums, memory = linear_attention(q1, k1, v1, _join(state), segments, chunk_size)
        last = _split(memory, document_tokens(state.tokens, padding, segments, (q.shape[0], q.shape[1])))
    else:
        sums = linear_attention_bidirectional(q1, k1, v1, segments, chunk_size)
    g = _guarded(sums[..., -1:])
    o = sums[..., :-1] / g
    if padding is not None:
        o = o * padding[:, :, None, None]
    return o.to(dtype), g[..., 0], last


def _each_with_mass(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | float, b: Tensor | float, cu: Tensor, state: LAState | None, causal: bool,
    unit: bool, chunk_size: int,
)-> tuple[Tensor, Tensor, LAState | None]:  # fmt: skip
    """`la_with_mass` of sequences laid end to end, one after the other in PyTorch."""
    way: Any = {"causal": causal, "unit": unit, "backend": "torch", "precision": "auto", "chunk_size": chunk_size}

    def run(q: Tensor, k: Tensor, v: Tensor, state: LAState | None) -> tuple[Tensor, Tensor, LAState]:
        o, g, last = la_with_mass(q, k, v, a, b, None, None, None, state if causal else None, **way)
        return o, g, fresh_state(q, k, v) if last is None else last

    found: tuple[Tensor, Tensor, LAState] = each_sequence(run, cu, state, q=q, k=k, v=v)
    return found


def _la_triton(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, causal: bool, padding: Tensor | None, segments: Tensor |
    None, cu: Tensor | None, state: LAState | None, first: Tensor | None, unit: bool, precision: Precision,
)-> tuple[Tensor, Tensor, LAState | None]:  # fmt: skip
    """The kernels of linear/; a single token without gradients is one launch."""
    D, DV = q.shape[-1], v.shape[-1]
    q, k = q.to(v.dtype), k.to(v.dtype)
    if not causal:
        o, g, *_ = both_op(q, k, v, a, b, unit, resolve_precision(precision), padding)
        return o, g, state
    assert state is not None
    keep = wants_gradients(q, k, v, a, b, *state[:3])
    if q.shape[1] == 1 and segments is None and cu is None and not keep:
        o, g, *after = step_op(q, k, v, a, b, None, None, None, 1.0, unit, padding, *state)
        return o, g, LAState(*after)
    if segments is not None:
        segments = numbered(segments).int()
    inputs = q, k, v, a, b, None, None, None, 1.0, unit, resolve_precision(precision)
    o, g, last, *_ = chunked_op(*inputs, segments, padding, cu, first, keep)
    S, z, u, _ = last.split([D * DV, D, DV, 4], -1)
    n = state.tokens
    count = n + cu.diff() if cu is not None else document_tokens(n, padding, segments, (q.shape[0], q.shape[1]))
    return o, g, LAState(S.unflatten(-1, (D, DV)), z, u, count)


def _pack(state: LAState) -> Tensor:
    """The state as the kernels have it, [rows,Hkv,W]: S, z, u, n and three numbers that fill up."""
    S, z, u, n = state
    return torch.cat([S.flatten(2), z, u, n.float()[:, None, None].expand(-1, S.shape[1], 4)], -1)


def _per_head(y: Tensor | float, q: Tensor) -> Tensor:
    """A number, or one per query head, as [H] fp32."""
    if isinstance(y, Tensor):
        return y.float().expand(q.shape[2])
    return torch.full((q.shape[2],), float(y), device=q.device)


def unit_vectors(y: Tensor) -> Tensor:
    """y over its length, in fp32 at least."""
    y = y.to(torch.promote_types(y.dtype, torch.float32))
    return y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-12)


def fresh_state(q: Tensor, k: Tensor, v: Tensor, rows: int | None = None) -> LAState:
    """Empty sums for these shapes."""
    (B, _, Hkv, D), Dv = k.shape, v.shape[-1]
    B = B if rows is None else rows
    dtype = state_dtype(q)
    return LAState(
        q.new_zeros(B, Hkv, D, Dv, dtype=dtype),
        q.new_zeros(B, Hkv, D, dtype=dtype),
        q.new_zeros(B, Hkv, Dv, dtype=dtype),
        torch.zeros(B, dtype=torch.long, device=q.device),
    )


def _longer(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | float, b: Tensor | float, padding: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """[b q, a], [k, 1] and [v, 1] in the dtype of the sums, with nothing at padding."""
    a, b = (torch.as_tensor(y, device=q.device, dtype=dtype).expand(q.shape[2])[:, None] for y in (a, b))
    one = torch.ones(*k.shape[:3], 1, device=k.device, dtype=dtype)
    q1 = torch.cat([b * q.to(dtype), a.expand(*q.shape[:3], 1)], -1)
    k1, v1 = (torch.cat([y.to(dtype), one], -1) for y in (k, v))
    if padding is not None:
        real = padding[:, :, None, None]
        k1, v1 = torch.where(real, k1, 0.0), torch.where(real, v1, 0.0)
    return q1, k1, v1


def _join(state: LAState) -> Tensor:
    """[[S, z], [u, n]]: [B,Hkv,D+1,Dv+1]."""
    S, z, u, n = state
    count = n.to(S.dtype)[:, None, None, None].expand(-1, S.shape[1], 1, 1)
    return torch.cat([torch.cat([S, z[..., None]], -1), torch.cat([u[:, :, None], count], -1)], -2)


def _split(memory: Tensor, tokens: Tensor) -> LAState:
    """The inverse of `_join`; the count comes apart from it, for fp32 counts only to 2^24."""
    S, z, u = memory[..., :-1, :-1], memory[..., :-1, -1], memory[..., -1, :-1]
    return LAState(S.contiguous(), z.contiguous(), u.contiguous(), tokens)


def _guarded(g: Tensor) -> Tensor:
    """g, or where it all but vanishes the guard with its sign, as a constant."""
    return torch.where(g.abs() < GUARD, torch.where(g < 0, -GUARD, GUARD), g)


def naive_la(
    q: Tensor, k: Tensor, v: Tensor, *, a: Tensor | float = 1.0, b: Tensor | float = 1.0, causal: bool = True, padding:
    Tensor | None = None, segments: Tensor | None = None,
)-> Tensor:  # fmt: skip
    """Eq. 5 with its T x T weights, for checking: o [B,T,H,Dv] in the dtype of the inputs."""
    (B, T, H, _), G = q.shape, q.shape[2] // k.shape[2]
    k, v = (y.repeat_interleave(G, 2) for y in (k, v))
    a, b = (torch.as_tensor(y, dtype=q.dtype).expand(H)[:, None, None] for y in (a, b))
    f = a + b * torch.einsum("bthd,bihd->bhti", q, k)
    allowed = torch.ones(B, T, T, dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if padding is not None:
        allowed = allowed & padding[:, None, :] & padding[:, :, None]
    if segments is not None:
        allowed = allowed & (segments[:, None, :] == segments[:, :, None])
    f = f * allowed[:, None]
    return torch.einsum("bhti,bihd->bthd", f, v) / _guarded(f.sum(-1)).transpose(1, 2)[..., None]


# ---------------------------------------------------------------- the mixer


class LinearAttention(Mixer):
    """LA in place of the softmax of one attention module.

    `unit` features are the paper's: q and k normalised to length 1, f(x) = 1 + slope x. `hedgehog` and `relu`
    (features.py) learn a map per head; their features are positive, f(x) = 1 - slope + slope x. `taylor` is that of
    e^x to first order, with q and k as they are, f(x) = 1 + slope c x, c being softmax's factor: it may be negative.
    """

    title = "Linear attention, kernel a + b x"
    paper = "arXiv 2510.21956"
    pools = True
    state_formula = "4 E (F Dv + F + Dv) + 8: E KV heads, value dim Dv, F features (2 D for hedgehog, else D)"
    bidirectional = True
    normalised = True
    square = False
    about = {
        "feature_map": "features of q and k: unit (the paper's: length 1), none (taylor), or learned and positive",
        "slope": "share of the weight that depends on q.k, at the start",
        "learn_slope": "learn the slope, one number a head",
    }
    in_fp32 = ("slope_logit",)
    published = {"slope": 1.0, "learn_slope": False}

    def __init__(
        self,
        site: AttentionSite,
        *,
        feature_map: Literal["unit", "taylor", "hedgehog", "relu"] = "unit",
        slope: Annotated[float, Bounds(0.0, 1.0)] = 0.9,
        learn_slope: bool = True,
        rope: bool = True,
        chunk_size: Annotated[int, Bounds(16, 256)] = 64,
        **near: int,
    ) -> None:
        """Raises ValueError when a learned slope starts at 0 or 1, where it has no gradient, chunk_size is no power of two,
        or weights that may be negative stand beside a window."""
        super().__init__(site, rope, **near)
        if feature_map == "taylor" and self.near is not None:
            raise ValueError("feature_map=taylor: a window shares the sum of weights, which may be negative. Set window=0")
        if learn_slope and not 0.0 < slope < 1.0:
            raise ValueError(f"slope={slope:g}: a learned slope starts between 0 and 1; or set learn_slope=false")
        check_power_of_two(chunk_size=chunk_size)
        self.slope, self.chunk_size = slope, chunk_size
        if learn_slope:
            self.slope_logit = nn.Parameter(torch.empty(site.heads))
        self.unit = feature_map == "unit"
        self.features: Any = None
        if feature_parts(feature_map):
            self.features = import_module("..layers.features", __package__).Features.at(site, feature_map)
        self.factor = site.scale if feature_map == "taylor" else 1.0

    @classmethod
    def parts(cls, site: AttentionSite, options: dict[str, Any]) -> dict[str, str]:
        return super().parts(site, options) | feature_parts(options["feature_map"])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "slope_logit"):
            init.constant_(self.slope_logit, math.log(self.slope / (1.0 - self.slope)))

    def kernel(self) -> tuple[Tensor | float, Tensor | float]:
        """a and b of f(x) = a + b x, per query head."""
        slope = torch.sigmoid(self.slope_logit.float()) if hasattr(self, "slope_logit") else self.slope
        return 1.0 if self.features is None else 1.0 - slope, self.factor * slope

    def feature_map(self, y: Tensor, role: Literal["query", "key"]) -> Tensor:
        """Features in fp32 of queries or keys y [B,T,heads,D]; unit vectors are the kernel's business."""
        return y if self.features is None else self.features(y, role)

    def mix_with_mass(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, state: LAState | None
    ) -> tuple[Tensor, Tensor, LAState | None]:
        inputs, _ = self.project(q, k, v, x, layout)
        (o, g), state = self.scan(inputs, layout, state)
        return o.to(v.dtype), g, state

    def project(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout) -> tuple[Tensors, Tensors]:
        with full_precision(q.device):
            return (self.feature_map(q, "query"), self.feature_map(k, "key"), v), (v,)

    def scan(
        self, inputs: Tensors, layout: TokenLayout, state: LAState | None
    ) -> tuple[tuple[Tensor, Tensor], LAState | None]:
        q, k, v = inputs
        a, b = self.kernel()
        # Autocast would run the fp32 sums in half precision.
        with full_precision(q.device):
            o, g, state = la_with_mass(
                q, k, v, a, b, layout.padding, layout.segments, layout.cu_seqlens, state, causal=layout.causal,
                unit=self.unit, backend="auto", precision="auto", chunk_size=self.chunk_size, rows=layout.rows,
            )  # fmt: skip
        return (o, g.clamp_min(GUARD)), state

    def finish(
        self, outputs: tuple[Tensor, ...], beside: Tensors, layout: TokenLayout
    ) -> tuple[Tensor, Tensor | None]:
        o, g = outputs
        (v,) = beside
        return o.to(v.dtype), g

    def state_bytes(self, tokens: int, item: int = 4) -> int:
        D, Dv = self.site.key_dim if self.features is None else self.features.size, self.site.value_dim
        return super().state_bytes(tokens, item) + 4 * self.site.kv_heads * (D * Dv + D + Dv) + 8
