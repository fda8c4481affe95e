"""GLA: gated linear attention (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training",
arXiv 2312.06635, ICML 2024).

Per head a memory S [D,Dv] forgets each key channel at its own rate, alpha_t = exp(g_t) in (0,1]^D (paper eq. 3):

    S_t = diag(alpha_t) S_{t-1} + k_t v_t^T        o_t = S_t^T (c q_t)

Chunk form (paper section 4.1, in log space). b is the cumulative sum of g inside a chunk, S_in the memory that enters
it, b_C its last b:

    o_t   = S_in^T (e^{b_t} . c q_t) + sum_{i<=t} ( sum_d c q_t[d] e^{b_t-b_i}[d] k_i[d] ) v_i
    S_out = diag(e^{b_C}) S_in + sum_i (e^{b_C-b_i} . k_i) v_i^T

The sums with e^{b_t-b_i} become matrix products in scan.py; gla_torch.py holds the chunk form and its gradient.
A read gate r_t and a write gate w_t, one number per token and head (SLA has them), make o_t = r_t S_t^T (c q_t) and
write w_t k_t v_t^T.

Letters: B batch, T time, H query heads, E gate (state) heads, G = H/E, D key dim, Dv value dim, C chunk, N chunks.
Gates are log-space, <= 0; memories and gate sums in fp32 (fp64 stays fp64).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..layers.arguments import Backend, check_shapes, to_gate_heads, use_kernels, wants_gradients
from ..layers.features import Features
from ..layers.gates import log_decays
from .launch import runs_on
from .ops import chunked_op, step_op
from .eager import GLAState, Inputs, fresh_state, gla_chunked, gla_step
from ..layout import TokenLayout
from ..mixer import Bounds, Mixer, Site, check_half_lives, check_power_of_two
from ..layers.norm import HeadNorm
from ..layers.scan import each_sequence, numbered


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: GLAState | None = None,
    read_gate: Tensor | None = None,
    write_gate: Tensor | None = None,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> tuple[Tensor, GLAState]:
    """Gated linear attention, eq. 3, in time linear in T: o [B,T,H,Dv] in q's dtype and the state after the last token.

    q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv]; g [B,T,E,D] log-gates (natural log, <= 0) with Hkv | E | H: one
    memory per gate head. `scale` multiplies q.k (default D^-1/2). `padding` [B,T] bool is True at real tokens;
    others leave the state alone and output 0. `segments` [B,T] int: the memory restarts where it changes.
    `cu_seqlens` [S+1] int32 with B=1: S sequences laid end to end; `state` then has S rows. `read_gate` [B,T,H]
    multiplies o, `write_gate` [B,T,E] what is written. `backend`: `auto` runs the Triton kernels on a GPU for the
    sizes and dtypes that they know, else PyTorch; the others insist. `chunk_size` is PyTorch's; the kernels bring
    their own.

    Raises ValueError for shapes that do not fit, or `triton` where it cannot run. T=1 takes the recurrent step.
    """
    gates = {"g": (g, "BTED"), "read_gate": (read_gate, "BTH"), "write_gate": (write_gate, "BTE")}
    check_shapes(q, k, v, g.shape[2], padding, segments, cu_seqlens, **gates)
    x = Inputs(q, k, v, g, read_gate, write_gate)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.shape[1] > 0 and use_kernels(backend, runs_on(q, v, g)):
        return _gla_triton(x, scale, padding, segments, cu_seqlens, state)
    if cu_seqlens is not None:

        def run(state: GLAState | None, **rows: Any) -> tuple[Tensor, GLAState]:
            part = Inputs(**rows)
            return gla_chunked(part, scale, None, None, fresh_state(part) if state is None else state, chunk_size)

        return each_sequence(run, cu_seqlens, state, **x._asdict())
    state = fresh_state(x) if state is None else state
    if q.shape[1] == 1 and segments is None:
        return gla_step(x, scale, padding, state)
    return gla_chunked(x, scale, padding, segments, state, chunk_size)


# ---------------------------------------------------------------- literal reference


def gla_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    state: GLAState | None = None,
    read_gate: Tensor | None = None,
    write_gate: Tensor | None = None,
) -> tuple[Tensor, GLAState]:
    """Eq. 3 token by token, for checking: same arguments and results as `gla`, in the dtype of the inputs."""
    (B, T, H, D), E = q.shape, g.shape[2]
    (S,) = fresh_state(Inputs(q, k, v, g)) if state is None else state
    scale, outputs = D**-0.5 if scale is None else scale, []
    read = torch.ones(B, T, H, dtype=S.dtype) if read_gate is None else read_gate.to(S.dtype)
    write = torch.ones(B, T, E, dtype=S.dtype) if write_gate is None else write_gate.to(S.dtype)
    for t in range(T):
        if segments is not None and t > 0:
            S = S * (segments[:, t] == segments[:, t - 1]).to(S.dtype)[:, None, None, None]
        real = torch.ones(B, dtype=torch.bool) if padding is None else padding[:, t]
        k_t, v_t = (to_gate_heads(y[:, t : t + 1], E)[:, 0].to(S.dtype) for y in (k, v))  # [B,E,D], [B,E,Dv]
        added = write[:, t, :, None, None] * k_t[..., None] * v_t[:, :, None]
        S = torch.where(real[:, None, None, None], g[:, t].to(S.dtype).exp()[..., None] * S + added, S)
        o_t = scale * torch.einsum("begd,bedv->begv", q[:, t].unflatten(1, (E, -1)).to(S.dtype), S)
        outputs.append(o_t.flatten(1, 2) * (read[:, t] * real[:, None])[..., None])
    o = torch.stack(outputs, 1) if outputs else q.new_zeros(B, 0, H, v.shape[-1])
    return o.to(q.dtype), GLAState(S)


# ---------------------------------------------------------------- Triton kernels


def _gla_triton(
    x: Inputs, scale: float, padding: Tensor | None, segments: Tensor | None, cu: Tensor | None, state: GLAState | None
) -> tuple[Tensor, GLAState]:
    """The kernels of gla_triton.py: one launch for a single token without gradients, else the chunk form."""
    single = x.q.shape[1] == 1 and segments is None and cu is None
    if single and not wants_gradients(*x, *(state or ())):
        (S,) = fresh_state(x) if state is None else state
        o, S = step_op(*x[:4], scale, padding, S, *x[4:])
        return o, GLAState(S)
    if padding is not None:
        k, g = (torch.where(padding[:, :, None, None], y, 0.0) for y in (x.k, x.g))
        x = x._replace(k=k, g=g)
    if segments is not None:
        segments = numbered(segments).int()
    o, S = chunked_op(*x[:4], scale, segments, cu, None if state is None else state.memory, *x[4:])
    return o if padding is None else o * padding[:, :, None, None], GLAState(S)


# ---------------------------------------------------------------- the mixer


class GatedLinearAttention(Mixer):
    """GLA in place of the softmax of one attention module. New weights make the gates, and norm the output.

    alpha_t = sigmoid(W_2 W_1 x_t + bias)^{1/damping}, W_1 of low rank (paper section 4.4). The biases start with
    half-lives spread evenly in log scale over the pairs of channels that a rotary embedding turns together, the
    slowest for the longest: where both of a pair forget alike, q.k depends on their distance alone.
    """

    title = "Gated linear attention"
    paper = "arXiv 2312.06635"
    state_formula = (
        "4 E F Dv: E memories (key heads, or query heads), value dim Dv, F features (2 D for hedgehog, else D)"
    )
    # The paper's layer without its output gate, which a converted model has no weights for.
    published = {"rope": False, "feature_map": "identity", "half_life_min": 0.0}

    def __init__(
        self,
        site: Site,
        *,
        state_heads: Literal["kv", "query"] = "kv",
        gate_rank: Annotated[int, Bounds(1, 1024)] = 16,
        damping: Annotated[float, Bounds(0.1, 1024.0)] = 16.0,
        half_life_min: Annotated[float, Bounds(0.0, 1e9)] = 2.0,
        half_life_max: Annotated[float, Bounds(0.0, 1e9)] = 2048.0,
        gate_std: Annotated[float, Bounds(0.0, 1.0)] = 0.02,
        feature_map: Literal["identity", "elu", "relu", "hedgehog"] = "relu",
        rope: bool = True,
        norm: Literal["none", "head"] = "head",
        chunk_size: Annotated[int, Bounds(16, 256)] = 64,
        **near: int,
    ) -> None:
        """`state_heads`: one memory per key head or per query head; `gate_rank` of W_2 W_1; `damping` of the gates, as
        above; `half_life_min` and `half_life_max` at the start in tokens, 0 as minimum for zero biases; `gate_std` of
        W_2 at the start; `feature_map` of q and k (features.py); `rope`: keep the rotary embedding on q and k; `norm`:
        RMS norm of each head's output; `chunk_size`: tokens of a chunk in PyTorch.

        Raises ValueError when half_life_max < half_life_min, or chunk_size is no power of two.
        """
        super().__init__(site, rope, **near)
        check_half_lives(half_life_min, half_life_max)
        check_power_of_two(chunk_size=chunk_size)
        self.damping, self.gate_std, self.half_lives = damping, gate_std, (half_life_min, half_life_max)
        self.chunk_size = chunk_size
        self.state_count = site.heads if state_heads == "query" else site.kv_heads
        shape = (site.heads, site.kv_heads, site.key_dim, site.scale)
        self.features = None if feature_map == "identity" else Features(feature_map, *shape)
        self.key_dim = site.key_dim if self.features is None else self.features.size
        self.narrow = nn.Linear(site.hidden, gate_rank, bias=False)
        self.forget = nn.Linear(gate_rank, self.state_count * self.key_dim)
        self.norm = HeadNorm(site.heads, site.value_dim) if norm == "head" else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.normal_(self.narrow.weight, 0.0, self.site.hidden**-0.5)
        init.normal_(self.forget.weight, 0.0, self.gate_std)
        init.copy_(self.forget.bias, self._spread_half_lives().to(self.forget.bias))
        for part in (self.features, self.norm):
            if part is not None:
                part.reset_parameters()

    def _spread_half_lives(self) -> Tensor:
        """Biases f with sigmoid(f)^{1/damping} = 2^{-1/half-life}; [E*F]."""
        bias = torch.zeros(self.site.key_dim, dtype=torch.float64)
        if self.half_lives[0] > 0:
            shortest, longest = (math.log10(x) for x in self.half_lives)
            pairs = (self.site.key_dim + 1) // 2
            half_life = torch.logspace(shortest, longest, pairs, dtype=torch.float64).repeat(2)[: self.site.key_dim]
            log_sigmoid = -math.log(2.0) * self.damping / half_life
            bias = log_sigmoid - torch.log(-torch.expm1(log_sigmoid))
        return bias.repeat(self.state_count * self.key_dim // self.site.key_dim)

    def gates(self, x: Tensor) -> Tensor:
        """Log-decays g = log sigmoid(W_2 W_1 x + bias) / damping, [B,T,E,F] fp32, <= 0."""
        return log_decays(self.forget(self.narrow(x)).unflatten(-1, (self.state_count, self.key_dim)), self.damping)

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        layout: TokenLayout,
        state: GLAState | None,
        read_gate: Tensor | None = None,
        write_gate: Tensor | None = None,
    ) -> tuple[Tensor, GLAState]:
        """`Mixer.mix`; SLA's gates: `read_gate` [B,T,H] on the output, `write_gate` [B,T,E] on what is written."""
        g, scale = self.gates(x), self.site.scale
        if self.features is not None:
            q, k, scale = self.features(q, "query").to(v.dtype), self.features(k, "key").to(v.dtype), 1.0
        # Autocast would run the fp32 memories' products in half precision.
        with torch.autocast(q.device.type, enabled=False):
            o, state = gla(
                q,
                k,
                v,
                g,
                scale=scale,
                padding=layout.padding,
                segments=layout.segments,
                state=state,
                read_gate=None if self.norm else read_gate,
                write_gate=write_gate,
                chunk_size=self.chunk_size,
            )
        return o if self.norm is None else self.norm(o, read_gate), state

    def state_bytes(self, tokens: int, item: int = 4) -> int:
        own = 4 * self.state_count * self.key_dim * self.site.value_dim
        return super().state_bytes(tokens, item) + own
