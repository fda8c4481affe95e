"""Mamba-2: a state space layer as linear attention with one decay for each head and token (Dao & Gu, "Transformers are
SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality", arXiv 2405.21060).

With the paper's names in brackets: q [C], k [B] and v [X] come from a causal convolution and SiLU, and per head a step
dt_t > 0 and a rate A < 0 make the decay of a memory S [D,Dv] and the weight of what is written (eq. 1, discretised):

    S_t = e^{A dt_t} S_{t-1} + dt_t k_t v_t^T        y_t = S_t^T q_t + skip v_t

The sum over i <= t is the dual form (section 3): q_t.k_i e^{A (dt_{i+1} + .. + dt_t)} dt_i, a masked product. It is GLA's
recurrence (arXiv 2312.06635, eq. 3) with the same gate e^{A dt_t} for every channel of a head and dt as write gate, so
gla/ computes it, in PyTorch and in its kernels. The layer ends with a gate and a norm of each group (section 7.1), the
norm behind the gate:

    o_t = RMSNorm_group(y_t . swish(W_z x_t))

Groups: heads that share q and k are normalised together. Here every query head has q and k of its own, so a group is
a head. transformers, vLLM and llama.cpp normalise by group, too; MLX normalises all heads together.

The paper's layer is twice as wide as the model. So is this one with two memories for each query head, whose normalised
outputs add up: the recurrence then has M H heads, those of the first memories in front.

Letters: B batch, T time, H heads, Hkv key heads, M memories of a head, D key dim (state size), Dv value dim, K taps.
Decays are log-space, <= 0; memories, steps and norms in fp32 (fp64 stays fp64).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..gla.eager import GLAState
from ..gla.gla import gla
from ..layers.arguments import Backend, check_shapes, state_dtype
from ..layers.constant import OPEN, ones_direction
from ..layers.gate_linear import DecayLinear, before_softplus
from ..layers.norm import HeadNorm
from ..layers.recurrent import Recurrent, outer_products
from ..layout import TokenLayout
from ..mixer import Bounds, Mixer, AttentionSite, Tensors


def mamba2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    step: Tensor,
    skip: Tensor,
    *,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: GLAState | None = None,
    rows: Tensor | None = None,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> tuple[Tensor, GLAState]:
    """The state space form above in time linear in T: y [B,T,H,Dv] in q's dtype and the state after the last token.

    q [B,T,H,D], k [B,T,Hkv,D] and v [B,T,Hkv,Dv] behind convolution and SiLU, Hkv | H; g = A dt [B,T,H] log-decays
    (natural log, <= 0), `step` dt [B,T,H], `skip` [H]. The other arguments are those of `gla`, which computes it; it
    says what `backend` is. Padding outputs 0.

    Raises ValueError for shapes that do not fit, or `triton` where it cannot run.
    """
    H, D = q.shape[2:]
    check_shapes(q, k, v, H, padding, segments, cu_seqlens, g=(g, "BTE"), step=(step, "BTE"), skip=(skip, "E"))
    o, state = gla(
        q, k, v, g[..., None].expand(*g.shape, D), scale=1.0, padding=padding, segments=segments, cu_seqlens=cu_seqlens,
        state=state, rows=rows, write_gate=step, chunk_size=chunk_size, backend=backend,
    )  # fmt: skip
    if rows is not None:  # below 0: a row of padding
        padding = (rows >= 0)[:, None] if padding is None else padding & (rows >= 0)[:, None]
    return _passed(o, v, skip, padding), state


def _passed(o: Tensor, v: Tensor, skip: Tensor, padding: Tensor | None) -> Tensor:
    """o [B,T,H,Dv] and skip v_t of every head, 0 at padding; the sum in fp32 at least, in one launch."""
    E = v.shape[2]
    v = v if padding is None else torch.where(padding[:, :, None, None], v, 0.0)
    factor = skip.to(torch.promote_types(v.dtype, torch.float32)).view(E, -1, 1)
    return torch.addcmul(o.unflatten(2, (E, -1)), v[:, :, :, None], factor).flatten(2, 3).to(o.dtype)


def naive_mamba2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor, skip: Tensor, *, padding: Tensor | None = None, segments:
    Tensor | None = None, state: GLAState | None = None,
)-> tuple[Tensor, GLAState]:  # fmt: skip
    """The equations above token by token, for checking: same arguments and results as `mamba2`."""
    (B, _, H, D), dtype = q.shape, state_dtype(q)
    S = q.new_zeros(B, H, D, v.shape[-1], dtype=dtype) if state is None else state.memory
    o, S = outer_products((q, k, v, g[..., None]), 1.0, padding, segments, S, None, step)
    return _passed(o, v, skip, padding), GLAState(S)


# ---------------------------------------------------------------- the mixer


class Mamba2State(NamedTuple):
    """The memories S [B,M*H,D,Dv] fp32, and what the convolutions go on from: the last K - 1 tokens of q [B,K-1,M*H,D],
    k [B,K-1,M*Hkv,D] and v [B,K-1,M*Hkv,Dv], K taps, in fp32."""

    memory: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


class Mamba2(Recurrent, Mixer):
    """Mamba-2 in place of the softmax of one attention module, as engines compute it for Granite 4 and others: q, k and
    v are the module's projections, without its norms of q and k and without rotary embedding.

    dt = softplus(W x + bias), g = -exp(A_log) dt. With `maps` each memory's q and k are y + D^-1/2 W y of those. A
    conversion starts with the same half-lives for all tokens, spread over the heads, and with convolution and maps as the
    identity.
    """

    title = "Mamba-2"
    unrotated = True
    paper = "arXiv 2405.21060"
    state_formula = (
        "4 M (H D Dv + (K - 1) (H D + Hkv (D + Dv))): M memories, H query heads, Hkv key heads, key and value dims D, Dv, "
        "K taps"
    )
    about = {
        "memories": "memories of each query head, with half-lives, convolutions, gates and norms of their own",
        "maps": "linear maps of q and k for each memory, the identity at first; export folds them into the projections",
        "taps": "taps of the causal convolution over q, k and v, which starts as the identity (1: none)",
        "half_life_min": "shortest half-life of the memory at the start, in tokens; finetune fits it to the teacher "
        "(0: steps and rates as published, not fitted)",
        "half_life_max": "longest half-life of the memory at the start, in tokens; finetune fits it",
        "eps": "added to the mean square in the norm; for `linearize export` the model's own rms_norm_eps",
    }
    tried: ClassVar[dict[str, tuple[Any, ...]]] = {
        "half_life": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 512.0, 2048.0),
        "skip": (0.0, 0.1, 0.3, 1.0, 3.0, 10.0),
    }
    in_fp32 = ("A_log",)
    published = {"half_life_min": 0.0}

    def __init__(
        self,
        site: AttentionSite,
        *,
        memories: Annotated[int, Bounds(1, 2)] = 1,
        maps: bool = False,
        taps: Annotated[int, Bounds(1, 4)] = 4,
        half_life_min: Annotated[float, Bounds(0.0, 1e9)] = 8.0,
        half_life_max: Annotated[float, Bounds(0.0, 1e9)] = 512.0,
        gate_std: Annotated[float, Bounds(0.0, 1.0)] = 0.02,
        eps: Annotated[float, Bounds(1e-12, 1e-2)] = 1e-5,
        chunk_size: Annotated[int, Bounds(16, 256)] = 64,
    ) -> None:
        """Raises ValueError when half_life_max < half_life_min, or chunk_size is no power of two."""
        super().__init__(site, rope=False)
        self.build("query", "identity", "none", (half_life_min, half_life_max), chunk_size)
        self.gate_std, self.skip_qk_norm, self.memories = gate_std, True, memories
        H, Hkv = memories * site.heads, memories * site.kv_heads
        self.norm = HeadNorm(H, site.value_dim, eps)
        self.step = DecayLinear(site.hidden, H)
        self.A_log = nn.Parameter(torch.empty(H))
        self.skip = nn.Parameter(torch.empty(H))
        self.output_gate = nn.Linear(site.hidden, H * site.value_dim, bias=False)
        widths = {"query": (H, site.key_dim), "key": (Hkv, site.key_dim), "value": (Hkv, site.value_dim)}
        for role, width in widths.items():
            self.register_parameter(f"{role}_bias", nn.Parameter(torch.empty(width)))
        self.build_maps(maps)
        self.build_taps(taps)

    @classmethod
    def parts(cls, site: AttentionSite, options: dict[str, Any]) -> dict[str, str]:
        return super().parts(site, {**options, "feature_map": "identity"})

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.normal_(self.step.weight, 0.0, self.gate_std)
        init.normal_(self.output_gate.weight, 0.0, 0.02)
        rate, step = self._start()
        init.copy_(self.A_log, rate.log().to(self.A_log))
        init.copy_(self.step.bias, before_softplus(step).to(self.step.bias))
        init.ones_(self.skip)
        for role in ("query", "key", "value"):
            init.zeros_(getattr(self, f"{role}_bias"))
        self.reset_maps()
        self.reset_taps()

    def _start(self) -> tuple[Tensor, Tensor]:
        """-A and dt [M*H], whose product is -g at the start. With -A = 1 the weights dt of a memory add up to about 1."""
        H, (shortest, longest) = self.memories * self.state_count, self.half_lives
        if shortest == 0.0:  # -A uniform in (1, 16), dt log-uniform in (0.001, 0.1)
            return 1.0 + 15.0 * torch.rand(H), torch.exp(math.log(1e-3) + math.log(100.0) * torch.rand(H))
        spread = torch.logspace(math.log10(shortest), math.log10(longest), H, dtype=torch.float64)
        return torch.ones(H), math.log(2.0) / spread

    def start_from(self, name: str, values: list[float]) -> None:
        given, own = torch.tensor(values, dtype=torch.float64), self.fitted
        if name == "skip":
            self.skip[own] = given.to(self.skip)
        else:
            self.A_log[own] = 0.0
            self.step.bias[own] = before_softplus(math.log(2.0) / given).to(self.step.bias)

    @torch.no_grad()
    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, o: Tensor, o_teacher: Tensor, layout: TokenLayout | None = None,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """As for others, the half-lives before the skip. The output gate, which has no bias, becomes about 1 for all
        tokens first."""
        self.output_gate.weight.copy_(OPEN * ones_direction(x).expand_as(self.output_gate.weight))
        if self.half_lives[0] > 0.0:
            self.skip.zero_()
        super().calibrate(q, k, v, x, o, o_teacher, layout, gates)

    def project(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, *_: None
    ) -> tuple[Tensors, Tensors]:
        step = F.softplus(self.step(x).float())
        g = -self.A_log.float().exp() * step
        q, k, v = self.for_memories(q, k, v)
        if self.taps == 1:
            q, k, v = self._activated(q, k, v)
        return (q, k, v, g, step), (F.silu(self.output_gate(x)).unflatten(-1, (g.shape[-1], -1)),)

    def scan(self, inputs: Tensors, layout: TokenLayout, state: Mamba2State | None) -> tuple[tuple[Tensor], Mamba2State]:
        q, k, v, g, step = inputs
        assert q is not None
        assert k is not None
        assert v is not None
        memory, *tails = (None,) * 4 if state is None else state
        biases: Any = self.query_bias, self.key_bias, self.value_bias
        (q, k, v), ends = self.convolved((q, k, v), layout, tails, *biases)
        before = None if memory is None else GLAState(memory)
        y, (memory,) = self.recur(mamba2, layout, before, q, k, v, g, step, self.skip)
        return (y,), Mamba2State(memory, *ends)

    def finish(self, outputs: tuple[Tensor, ...], beside: Tensors, layout: TokenLayout) -> tuple[Tensor, None]:
        y, (z,) = outputs[0], beside
        return self.of_memories(self.normed(y * z.to(y.dtype), None, layout)), None

    def _activated(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """SiLU of what the convolutions gave and their biases."""
        biases: Any = self.query_bias, self.key_bias, self.value_bias
        q, k, v = (F.silu(y + bias.to(y.dtype)) for y, bias in zip((q, k, v), biases, strict=True))
        return q, k, v
