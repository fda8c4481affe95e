"""SAGA: linear attention in which each token gates what it adds to the summary of keys and values (Cao & Wang, "SAGA:
Selective Adaptive Gating for Efficient and Expressive Linear Attention", arXiv 2509.12817).

Every token has a gate matrix of rank one, alpha_i^T beta_i, on its k_i^T v_i (paper eqs. 5 to 7), so that

    K~ = K . A        V~ = V . B        A = sigmoid(X W_A), B = sigmoid(X W_B)          (eqs. 8, 9)
    O = [ Q (K~^T V~) + DWC(V) ] . G    G = X W_G, linear                              (eq. 10, its K~ V~ transposed)

DWC is a depthwise convolution of the ungated values over the grid on which tokens lie; tokens without a place (a class
token, registers) have none. The paper's sum is not normalised, which a converted model does not survive: `mean`
divides by Q (K~^T 1), so that weights sum to 1, or where features have signs by the number of tokens; `head` takes the
RMS norm of each head. Both come before DWC and G.

The paper leaves open which feature map Q and K have (eq. 3 implies none), and the size of the convolution.

Letters: B batch, T tokens, H query heads, E KV heads, G = H/E, F features, Dv value dim, K size of the convolution.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..layers.arguments import Backend, use_kernels
from ..layers.features import Features, featured
from ..layers.gate_linear import GateLinear
from ..layout import TokenLayout
from ..linear.linear import linear_attention_bidirectional
from ..mixer import Bounds, Mixer, AttentionSite, full_precision
from ..layers.norm import HeadNorm
from .launch import GUARD, runs_on, saga_op

# What divides the sum over tokens: nothing, its weights, their number, or the root mean square of a head.
Norm = Literal["none", "mass", "count", "head"]


class Maps(NamedTuple):
    """How features.py makes features of q and k: each takes the root of `scale`; W [H,D,D], [E,D,D] and b [H,D], [E,D]
    where there are any."""

    feature_map: Literal["identity", "elu", "relu", "hedgehog"] = "identity"
    scale: float = 1.0
    query_map: Tensor | None = None
    key_map: Tensor | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """[B,T,H,F] and [B,T,E,F], in fp32 at least."""
        query = featured(q, self.feature_map, self.scale, self.query_map, self.query_bias)
        return query, featured(k, self.feature_map, self.scale, self.key_map, self.key_bias)


# A gate before the sigmoid that is exactly 1 behind it, in every dtype.
OPEN = 100.0
# q and k are features.
GIVEN = Maps()


def saga(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_gate: Tensor,
    value_gate: Tensor,
    output_gate: Tensor,
    *,
    local: Tensor | None = None,
    norm: Norm = "none",
    norm_weight: Tensor | None = None,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    maps: Maps = GIVEN,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> Tensor:
    """Eq. 10, every token seeing its whole document: o [B,T,H,Dv] in v's dtype.

    q [B,T,H,D], k [B,T,E,D], of which `maps` makes F features each (themselves by default), v [B,T,E,Dv], E dividing
    H; gates before the sigmoid, `key_gate` [B,T,E,F] and `value_gate` [B,T,E,Dv], and `output_gate` [B,T,H,Dv]; `local`
    [B,T,E,Dv] is DWC(V).
    `norm`: what divides the sum, see Norm; `norm_weight` [H,Dv] belongs to `head`. `padding` [B,T] bool is True at
    real tokens; others add nothing and output 0. `segments` [B,T] int: tokens of one number see each other.
    `backend`: `auto` runs the Triton kernels on a GPU for what they know, else PyTorch; the others insist.

    Raises ValueError for shapes that do not fit, and where `triton` is asked for and cannot run.
    """
    _check(q, k, v, key_gate, value_gate, output_gate, maps)
    kernels, fused = _use_triton(backend, q, v, segments, maps)
    if not fused:
        q, k = maps.features(q, k)
    if kernels:
        _, scale, *weights = (maps if fused else GIVEN)[:4]
        feature_map = maps.feature_map if fused else "identity"
        inputs = q.to(v.dtype), k.to(v.dtype), v, key_gate, value_gate, output_gate, local
        weight = norm_weight if norm == "head" else None
        return saga_op(*inputs, *weights, weight, padding, feature_map, scale**0.5, norm)[0]
    exact = q.dtype
    keys, values = k * key_gate.to(exact).sigmoid(), v.to(exact) * value_gate.to(exact).sigmoid()
    if padding is not None:
        keys = torch.where(padding[:, :, None, None], keys, 0.0)
    one = torch.ones_like(values[..., :1])
    if norm == "mass":
        values = torch.cat([values, one], -1)
    y = linear_attention_bidirectional(q.to(exact), keys, values, segments, chunk_size)
    if norm == "mass":
        y = y[..., :-1] / y[..., -1:].clamp_min(GUARD)
    elif norm == "count":
        one = one[:, :, :1]
        real = one if padding is None else one * padding[:, :, None, None]
        y = y / linear_attention_bidirectional(one, real, one, segments, chunk_size).clamp_min(1.0)
    elif norm == "head":
        assert norm_weight is not None
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * norm_weight.to(exact)
    if local is not None:
        y = y + local.to(exact).repeat_interleave(q.shape[2] // v.shape[2], 2)
    y = y * output_gate.to(exact)
    if padding is not None:
        y = y * padding[:, :, None, None]
    return y.to(v.dtype)


def _use_triton(backend: Backend, q: Tensor, v: Tensor, segments: Tensor | None, maps: Maps) -> tuple[bool, bool]:
    """Whether the kernels run, and whether they make the features too."""
    if backend == "torch":
        return False, False
    where, (D, DV) = (v.device, v.dtype), (q.shape[-1], v.shape[-1])
    obstacle = "segments" if segments is not None else runs_on(*where, D, DV, maps.feature_map)
    fused = not obstacle
    if obstacle and segments is None:
        obstacle = runs_on(*where, 2 * D if maps.feature_map == "hedgehog" else D, DV, "identity")
    return use_kernels(backend, obstacle), fused


def _check(
    q: Tensor, k: Tensor, v: Tensor, key_gate: Tensor, value_gate: Tensor, output_gate: Tensor, maps: Maps
) -> None:
    """Raise ValueError, with the shapes found, unless the arguments of `saga` fit together."""
    (B, T, H, D), (E, Dv) = q.shape, v.shape[2:]
    width = 2 * D if maps.feature_map == "hedgehog" else D
    wanted = {"k": (k, (B, T, E, D)), "v": (v, (B, T, E, Dv)), "key_gate": (key_gate, (B, T, E, width))}
    wanted |= {"value_gate": (value_gate, (B, T, E, Dv)), "output_gate": (output_gate, (B, T, H, Dv))}
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)} beside q {list(q.shape)}, found {list(tensor.shape)}")
    if H % E:
        raise ValueError(f"KV heads must divide query heads, found {E} and {H}")


def naive_saga(
    q: Tensor, k: Tensor, v: Tensor, key_gate: Tensor, value_gate: Tensor, output_gate: Tensor, *, local: Tensor | None
    = None, norm: Norm = "none", norm_weight: Tensor | None = None, padding: Tensor | None = None, segments: Tensor |
    None = None,
)-> Tensor:  # fmt: skip
    """Eq. 5 as it is written, a gate matrix for each pair of tokens, for checking: o in the dtype of the inputs."""
    B, T, G = *q.shape[:2], q.shape[2] // k.shape[2]
    k, v, alpha, beta = (y.repeat_interleave(G, 2) for y in (k, v, key_gate.sigmoid(), value_gate.sigmoid()))
    sees = torch.ones(B, T, T, dtype=torch.bool)
    if padding is not None:
        sees = sees & padding[:, None, :] & padding[:, :, None]
    if segments is not None:
        sees = sees & (segments[:, None, :] == segments[:, :, None])
    gates = alpha[..., :, None] * beta[..., None, :]  # G_i: [B,T,H,F,Dv]
    added = gates * (k[..., :, None] * v[..., None, :])
    y = torch.einsum("bti,bihfd,bthf->bthd", sees.to(q.dtype), added, q)
    if norm == "mass":
        mass = torch.einsum("bti,bthf,bihf->bth", sees.to(q.dtype), q, alpha * k)
        y = y / mass[..., None].clamp_min(GUARD)
    elif norm == "count":
        y = y / sees.sum(-1).clamp_min(1)[:, :, None, None]
    elif norm == "head":
        assert norm_weight is not None
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight
    y = (y if local is None else y + local.repeat_interleave(G, 2)) * output_gate
    return y if padding is None else y * padding[:, :, None, None]


# ---------------------------------------------------------------- the mixer


class Gate(nn.Module):
    """x [B,T,hidden] -> gates [B,T,heads*dim] before any sigmoid, through one matrix, or two of `rank`.

    At first they are `bias`, and in one matrix `spread` the standard deviation around it for a normal x.
    """

    def __init__(self, hidden: int, width: int, rank: int, bias: float, spread: float) -> None:
        super().__init__()
        self.down = nn.Linear(hidden, rank, bias=False) if rank else None
        self.up = GateLinear(rank or hidden, width)
        self.bias, self.spread = bias, spread

    @torch.no_grad()
    def reset_parameters(self) -> None:
        std = self.up.in_features**-0.5
        if self.down is None and self.spread:
            init.normal_(self.up.weight, 0.0, self.spread * std)
        else:
            init.zeros_(self.up.weight)
        if self.down is not None:
            init.normal_(self.down.weight, 0.0, self.down.in_features**-0.5)
        init.constant_(self.up.bias, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x if self.down is None else self.down(x))


class SelectiveGates(Mixer):
    """SAGA in place of the softmax of one bidirectional attention module.

    The gates are nearly open, the output gate 1 and the convolution 0 at first, so that a conversion starts as linear
    attention with the same features.
    """

    title = "Linear attention with gated summaries"
    paper = "arXiv 2509.12817"
    state_formula = "none: bidirectional attention keeps no state"
    causal = False
    bidirectional = True
    geometric = True
    about = {
        "norm": "divide by the sum of weights (mean), norm each head (head), or neither (none)",
        "gate_rank": "rank of the maps from hidden states to gates (0: full)",
        "gates": "which of keys and values have gates",
        "output_gate": "multiply the output by W x + b",
        "gate_bias": "bias of the key and value gates before the sigmoid, at the start",
    }
    published = {"feature_map": "identity", "norm": "none", "gate_bias": 0.0}

    def __init__(
        self,
        site: AttentionSite,
        *,
        feature_map: Literal["hedgehog", "elu", "relu", "identity"] = "hedgehog",
        norm: Literal["mean", "head", "none"] = "mean",
        dwc: Annotated[int, Bounds(0, 15)] = 5,
        gate_rank: Annotated[int, Bounds(0, 1024)] = 0,
        gate_bias: Annotated[float, Bounds(-10.0, 10.0)] = 4.0,
        gates: Literal["both", "key", "value", "none"] = "both",
        output_gate: bool = True,
        rope: bool = True,
        **near: int,
    ) -> None:
        super().__init__(site, rope, **near)
        self.feature_map = feature_map
        self.norm: Norm = norm if norm != "mean" else "count" if feature_map == "identity" else "mass"
        E, Dv = site.kv_heads, site.value_dim
        if feature_map != "identity":
            self.features = Features(feature_map, site.heads, E, site.key_dim, site.scale, site.causal)
        self.width = width = site.key_dim if feature_map == "identity" else self.features.size
        # Enough of a difference to tell tokens apart, and for gradients.
        key, value = (Gate(site.hidden, E * n, gate_rank, gate_bias, 0.1) for n in (width, Dv))
        self.key_gate = key if gates in ("both", "key") else None
        self.value_gate = value if gates in ("both", "value") else None
        self.output_gate = Gate(site.hidden, site.heads * Dv, gate_rank, 1.0, 0.0) if output_gate else None
        if norm == "head":
            self.head_norm = HeadNorm(site.heads, Dv)
        if dwc:
            self.taps = nn.Parameter(torch.empty(E, Dv, *(dwc,) * (1 if site.grid == "line" else 2)))
            self.depthwise = import_module("..layers.depthwise", __package__).depthwise

    @classmethod
    def parts(cls, site: AttentionSite, options: dict[str, Any]) -> dict[str, str]:
        found = super().parts(site, options)
        return found | ({"layers/depthwise": "depthwise"} if options["dwc"] else {})

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "taps"):
            init.zeros_(self.taps)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, state: Any) -> tuple[Tensor, None]:
        if layout.causal:
            raise ValueError(f"{self.site.path}: SAGA is bidirectional, and was called as causal")
        E, H, Dv = self.site.kv_heads, self.site.heads, v.shape[-1]
        layers = (self.key_gate, E * self.width, OPEN), (self.value_gate, E * Dv, OPEN), (self.output_gate, H * Dv, 1.0)
        gates = [x.new_full((*x.shape[:2], n), one) if gate is None else gate(x) for gate, n, one in layers]
        with full_precision(q.device):
            names = "query_map", "key_map", "query_bias", "key_bias"
            weights = (getattr(getattr(self, "features", None), name, None) for name in names)
            maps = Maps(self.feature_map, self.site.scale, *weights)
            widths = (self.width, v.shape[-1], v.shape[-1])
            gated = (y.unflatten(-1, (-1, width)) for y, width in zip(gates, widths, strict=True))
            local = self.depthwise(v, self.taps, layout.grid, *layout[:2]) if hasattr(self, "taps") else None
            weight = self.head_norm.weight if self.norm == "head" else None
            o = saga(
                q, k, v, *gated, local=local, norm=self.norm, norm_weight=weight, padding=layout.padding,
                segments=layout.segments, maps=maps,
            )  # fmt: skip
        return o, None
