"""GLA: gated linear attention (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training",
arXiv 2312.06635, ICML 2024).

Per head a memory S [D,Dv] forgets each key channel at its own rate, alpha_t = exp(g_t) in (0,1]^D (paper eq. 3):

    S_t = diag(alpha_t) S_{t-1} + k_t v_t^T        o_t = S_t^T (c q_t)

Chunk form (paper section 4.1, in log space). b is the cumulative sum of g inside a chunk, S_in the memory that enters
it, b_C its last b:

    o_t   = S_in^T (e^{b_t} . c q_t) + sum_{i<=t} ( sum_d c q_t[d] e^{b_t-b_i}[d] k_i[d] ) v_i
    S_out = diag(e^{b_C}) S_in + sum_i (e^{b_C-b_i} . k_i) v_i^T

The sums with e^{b_t-b_i} become matrix products in scan.py; eager.py holds the chunk form and its gradient.
A read gate r_t and a write gate w_t, one number per token and head (SLA has them), make o_t = r_t S_t^T (c q_t) and
write w_t k_t v_t^T.

The paper's layer ends with a swish gate of its own, RMSNorm(o_t) . swish(W x_t + b) (section 4.4), an option here.

Letters: B batch, T time, H query heads, E gate (state) heads, G = H/E, D key dim, Dv value dim, C chunk, N chunks.
Gates are log-space, <= 0; memories and gate sums in fp32 (fp64 stays fp64).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..layers.arguments import Backend, several, check_shapes, use_kernels, wants_gradients
from ..layers.gates import biases, log_decays
from ..layers.gate_linear import DecayLinear
from ..layers.recurrent import Recurrent, outer_products
from ..layers.rotary import Rope, resolve_rope
from .launch import chunked_op, runs_on, pool_op, step_op
from .eager import GLAState, Inputs, fresh_state, gla_chunked, gla_step
from ..layout import TokenLayout
from ..mixer import Bounds, Mixer, AttentionSite, Tensors, gated, output_gate_at
from ..layers.scan import numbered
from ..layers.pool import check_pool, each_sequence, on_rows


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
    rows: Tensor | None = None,
    read_gate: Tensor | None = None,
    write_gate: Tensor | None = None,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> tuple[Tensor, GLAState]:
    """Gated linear attention, eq. 3, in time linear in T: o [B,T,H,Dv] in q's dtype and the state after the last token.

    q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv]; g [B,T,E,D] log-gates (natural log, <= 0) with Hkv | E | H: one
    memory per gate head. `scale` multiplies q.k (default D^-1/2). `padding` [B,T] bool is True at real tokens;
    others leave the state alone and output 0. `segments` [B,T] int: the memory restarts where it changes.
    `cu_seqlens` [S+1] int32 with B=1: S sequences laid end to end; `state` then has S rows. `rows` [B] int: `state` is a
    pool, of which those rows are the call's (below 0: padding); they are changed in place. `read_gate` [B,T,H]
    multiplies o, `write_gate` [B,T,E] what is written. `backend`: `auto` runs the Triton kernels on a GPU for the
    sizes and dtypes that they know, else PyTorch; `triton` and `torch` force one. `chunk_size` is that of the
    PyTorch path alone.

    Raises ValueError for shapes that do not fit, or `triton` where it cannot run. T=1 takes the recurrent step.
    """
    gates = {"g": (g, "BTED"), "read_gate": (read_gate, "BTH"), "write_gate": (write_gate, "BTE")}
    check_shapes(q, k, v, g.shape[2], padding, segments, cu_seqlens, **gates)
    check_pool(rows, state, q.shape[0], cu_seqlens, segments)
    cu_seqlens = several(cu_seqlens)
    x = Inputs(q, k, v, g, read_gate, write_gate)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernels = q.shape[1] > 0 and use_kernels(backend, runs_on(q, v))
    if rows is not None and state is not None:
        if kernels and q.shape[1] == 1 and not wants_gradients(*x, *state):
            return pool_op(*x[:4], scale, padding, *state, *x[4:], rows), state
        form: Any = {"scale": scale, "chunk_size": chunk_size, "backend": backend}
        o, state = on_rows(partial(gla, **x._asdict(), **form), state, rows, padding, q.shape[1])
        return o, state
    if kernels:
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


# ---------------------------------------------------------------- naive form


def naive_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None, padding: Tensor | None = None, segments:
    Tensor | None = None, state: GLAState | None = None, read_gate: Tensor | None = None, write_gate: Tensor | None =
    None,
)-> tuple[Tensor, GLAState]:  # fmt: skip
    """Eq. 3 token by token, for checking: same arguments and results as `gla`, in the dtype of the inputs."""
    (S,) = fresh_state(Inputs(q, k, v, g)) if state is None else state
    o, S = outer_products((q, k, v, g), scale, padding, segments, S, read_gate, write_gate)
    return o, GLAState(S)


# ---------------------------------------------------------------- Triton kernels


def _gla_triton(
    x: Inputs, scale: float, padding: Tensor | None, segments: Tensor | None, cu: Tensor | None, state: GLAState | None
) -> tuple[Tensor, GLAState]:
    """The kernels of forward.py: one launch for a single token without gradients, else the chunk form."""
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


class GatedLinearAttention(Recurrent, Mixer):
    """GLA in place of the softmax of one attention module. New weights make the gates, and norm the output.

    alpha_t = sigmoid(W_2 W_1 x_t + bias)^{1/damping}, W_1 of low rank (paper section 4.4). The biases start with
    half-lives spread evenly in log scale over the pairs of channels that a rotary embedding turns together, the
    slowest for the longest: where both of a pair forget alike, q.k depends on their distance alone.
    """

    title = "Gated linear attention"
    paper = "arXiv 2312.06635"
    state_formula = (
        "4 E F Dv: E memories (KV heads, or query heads), value dim Dv, F features (2 D for hedgehog, else D)"
    )
    about = {
        "half_life_min": "shortest half-life of the memory at the start, in tokens; without a window finetune fits it to "
        "the teacher (0: gates as published, not fitted)",
        "half_life_max": "longest half-life of the memory at the start, in tokens; without a window finetune fits it",
        "rope": "rotate q and k before the feature map, after it, or not; auto: before beside a window, else after",
    }
    # Shortest and longest half-life of a memory's channels, in tokens.
    tried: ClassVar[dict[str, tuple[Any, ...]]] = {
        "half_lives": tuple((low, high) for low in (0.5, 2.0, 8.0, 32.0) for high in (4 * low, 32 * low, 1024 * low))
    }
    # Its bias starts open, so that a conversion begins nearly as without the gate (layers/output_gate.py).
    published = {"rope": "off", "feature_map": "identity", "half_life_min": 0.0, "output_gate": True}

    def __init__(
        self,
        site: AttentionSite,
        *,
        state_heads: Literal["kv", "query"] = "kv",
        gate_rank: Annotated[int, Bounds(1, 1024)] = 16,
        damping: Annotated[float, Bounds(0.1, 1024.0)] = 16.0,
        half_life_min: Annotated[float, Bounds(0.0, 1e9)] = 2.0,
        half_life_max: Annotated[float, Bounds(0.0, 1e9)] = 2048.0,
        gate_std: Annotated[float, Bounds(0.0, 1.0)] = 0.02,
        feature_map: Literal["identity", "elu", "relu", "plain_relu", "hedgehog"] = "relu",
        rope: Rope = "auto",
        norm: Literal["none", "head"] = "head",
        output_gate: bool = False,
        chunk_size: Annotated[int, Bounds(16, 256)] = 64,
        **near: int,
    ) -> None:
        """Raises ValueError when half_life_max < half_life_min, or chunk_size is no power of two."""
        place = resolve_rope(rope, near.get("window", 0))
        super().__init__(site, place == "before", **near)
        self.rope = place
        self.build(state_heads, feature_map, norm, (half_life_min, half_life_max), chunk_size)
        self.damping, self.gate_std = damping, gate_std
        self.narrow = nn.Linear(site.hidden, gate_rank, bias=False)
        self.forget = DecayLinear(gate_rank, self.state_count * self.key_dim)
        self.output_gate = output_gate_at(site, output_gate)

    @classmethod
    def parts(cls, site: AttentionSite, options: dict[str, Any]) -> dict[str, str]:
        found = super().parts(site, options)
        return found | ({"layers/output_gate": "OutputGate"} if options["output_gate"] else {})

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.normal_(self.narrow.weight, 0.0, self.site.hidden**-0.5)
        init.normal_(self.forget.weight, 0.0, self.gate_std)
        init.copy_(self.forget.bias, self._spread(self.half_lives).repeat(self.state_count).to(self.forget.bias))

    def _spread(self, half_lives: tuple[float, float]) -> Tensor:
        """The gates' biases of one memory, [F]."""
        bias = biases(half_lives, (self.site.key_dim + 1) // 2, self.damping).repeat(2)[: self.site.key_dim]
        return bias.repeat(self.key_dim // self.site.key_dim)

    def start_from(self, name: str, values: list[tuple[float, float]]) -> None:
        self.forget.bias.copy_(torch.cat([self._spread(value) for value in values]).to(self.forget.bias))

    def gates(self, x: Tensor, plain: bool = False) -> Tensor:
        """Log-decays g = log sigmoid(W_2 W_1 x + bias) / damping, [B,T,E,F] fp32, <= 0."""
        f = self.forget(self.narrow(x)).unflatten(-1, (self.state_count, self.key_dim))
        return log_decays(f, self.damping, plain=plain)

    def project(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, read_gate: Tensor | None = None,
        write_gate: Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:  # fmt: skip
        """`Mixer.project`, with SLA's gates."""
        g = self.gates(x, layout.plain)
        if self.features is not None:
            q, k = self.features(q, "query").to(v.dtype), self.features(k, "key").to(v.dtype)
        inputs = self.turn(q, layout), self.turn(k, layout), v, g, None if self.norm else read_gate, write_gate
        return inputs, (read_gate if self.norm else None, x)

    def scan(self, inputs: Tensors, layout: TokenLayout, state: GLAState | None) -> tuple[tuple[Tensor], GLAState]:
        *x, read_gate, write_gate = inputs
        scale = self.site.scale if self.features is None else 1.0
        o, state = self.recur(gla, layout, state, *x, scale=scale, read_gate=read_gate, write_gate=write_gate)
        return (o,), state

    def finish(self, outputs: tuple[Tensor, ...], beside: Tensors, layout: TokenLayout) -> tuple[Tensor, None]:
        read_gate, x = beside
        return gated(self.normed(outputs[0], read_gate, layout), x, self.output_gate), None
