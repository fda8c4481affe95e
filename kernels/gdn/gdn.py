"""GDN: Gated DeltaNet (Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
arXiv 2412.06464), on its own and as a base of SLA (arXiv 2602.01744).

Per state head a memory S [D,Dv] maps keys to values. A token lets it decay by alpha_t = exp(g_t) in (0,1], looks up
what is stored under k_t, and moves that towards its own value by beta_t in (0,1):

    S'  = alpha_t S_{t-1}        e_t = w_t v_t - S'^T k_t
    S_t = S' + k_t (beta_t e_t)^T        o_t = r_t c S_t^T q_t

(2412.06464 eq. 10, written for rows). Keys and queries are unit vectors. r_t and w_t are SLA's gates (2602.01744 eqs.
14 to 16, which as printed leave out alpha_t and so are DeltaNet's): w on v and not on k, which has to stay a unit
vector. Without them both are 1. eager.py has the chunk form and its gradient.

Letters: B batch, T time, H query heads, Hkv key heads, E state heads, G = H/E, D key dim, Dv value dim, C chunk.
Gates are log-space, <= 0; states, gate sums and inverses are fp32 (fp64 stays fp64).
"""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..layers.arguments import Backend, several, check_shapes, to_gate_heads, use_kernels, wants_gradients
from ..layers.gate_linear import DecayLinear, before_softplus
from ..layers.norm import unit_rows
from ..layers.recurrent import Recurrent
from .launch import chunked_op, runs_on, pool_op, step_op
from .eager import DeltaState, Inputs, fresh_state, gated_output, gdn_chunked, gdn_step, neutral, written_values
from ..layout import TokenLayout
from ..mixer import Bounds, Mixer, AttentionSite, Tensors, check_implied
from ..layers.scan import numbered
from ..layers.pool import check_pool, each_sequence, on_rows


def gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: DeltaState | None = None,
    rows: Tensor | None = None,
    read_gate: Tensor | None = None,
    write_gate: Tensor | None = None,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> tuple[Tensor, DeltaState]:
    """Gated delta rule in time linear in T: o [B,T,H,Dv] in q's dtype and the state after the last token.

    q [B,T,H,D] and k [B,T,Hkv,D] as the memory is to see them (unit vectors), v [B,T,Hkv,Dv]; g [B,T,E] log-decays
    (natural log, <= 0), beta [B,T,E] write strengths in [0,1], with Hkv | E | H: one memory per state head. `scale`
    multiplies q (default D^-1/2). `read_gate` [B,T,H] multiplies o, `write_gate` [B,T,E] multiplies v. `padding`
    [B,T] bool is True at real tokens; others leave the state alone and output 0. `segments` [B,T] int: the memory
    restarts where it changes. `cu_seqlens` [S+1] int32 with B=1: S sequences laid end to end; `state` then has S rows.
    `rows` [B] int: `state` is a pool, of which those rows are the call's (below 0: padding); they are changed in place.
    `backend`: `auto` runs the Triton kernels on a GPU for the sizes and dtypes that they know, else PyTorch; the
    others insist. `chunk_size` is PyTorch's; the kernels bring their own.

    Raises ValueError for shapes that do not fit, or `triton` where it cannot run. T=1 takes the recurrent step.
    """
    gates = {"g": (g, "BTE"), "beta": (beta, "BTE"), "read_gate": (read_gate, "BTH"), "write_gate": (write_gate, "BTE")}
    check_shapes(q, k, v, g.shape[2], padding, segments, cu_seqlens, **gates)
    check_pool(rows, state, q.shape[0], cu_seqlens, segments)
    cu_seqlens = several(cu_seqlens)
    x = Inputs(q, k, v, g, beta, read_gate, write_gate)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernels = q.shape[1] > 0 and use_kernels(backend, runs_on(q, v, g))
    if rows is not None and state is not None:
        if kernels and q.shape[1] == 1 and not wants_gradients(*x, *state):
            return pool_op(*x, scale, padding, *state, rows), state
        form: Any = {"scale": scale, "chunk_size": chunk_size, "backend": backend}
        o, state = on_rows(partial(gdn, **x._asdict(), **form), state, rows, padding, q.shape[1])
        return o, state
    if kernels:
        return _gdn_triton(x, scale, padding, segments, cu_seqlens, state)
    if cu_seqlens is not None:
        run = partial(gdn, scale=scale, chunk_size=chunk_size, backend="torch")
        return each_sequence(run, cu_seqlens, state, **x._asdict())
    (S,) = fresh_state(q, v, g) if state is None else state
    if q.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), DeltaState(S)
    if q.shape[1] == 1 and segments is None:
        o, S = gdn_step(x, scale, padding, S)
    else:
        o, S = gdn_chunked(x, scale, S, padding, segments, chunk_size)
    return o, DeltaState(S)


def naive_gdn(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None = None, padding: Tensor | None =
    None, segments: Tensor | None = None, state: DeltaState | None = None, read_gate: Tensor | None = None, write_gate:
    Tensor | None = None,
)-> tuple[Tensor, DeltaState]:  # fmt: skip
    """The equations above token by token, for checking: same arguments and results as `gdn`."""
    E, x = g.shape[2], Inputs(q, k, v, g, beta, read_gate, write_gate)
    (S,) = fresh_state(q, v, g) if state is None else state
    keys, values, outputs = to_gate_heads(k.to(S.dtype), E), written_values(x, S.dtype), []
    for t in range(q.shape[1]):
        if segments is not None and t > 0:
            S = S * (segments[:, t] == segments[:, t - 1]).to(S.dtype)[:, None, None, None]
        decayed = g[:, t, :, None, None].to(S.dtype).exp() * S
        e_t = values[:, t] - torch.einsum("bed,bedv->bev", keys[:, t], decayed)
        written = decayed + torch.einsum("bed,be,bev->bedv", keys[:, t], beta[:, t].to(S.dtype), e_t)
        S = written if padding is None else torch.where(padding[:, t, None, None, None], written, S)
        q_t = q[:, t].unflatten(1, (E, -1)).to(S.dtype)
        outputs.append(torch.einsum("begd,bedv->begv", q_t, S).flatten(1, 2))
    o = torch.stack(outputs, 1) if outputs else q.new_zeros(*q.shape[:3], v.shape[-1])
    o = o * (q.shape[-1] ** -0.5 if scale is None else scale)
    return gated_output(x, o, padding), DeltaState(S)


# ---------------------------------------------------------------- Triton kernels


def _gdn_triton(
    x: Inputs, scale: float, padding: Tensor | None, segments: Tensor | None, cu: Tensor | None, state: DeltaState |
    None,
)-> tuple[Tensor, DeltaState]:  # fmt: skip
    """The kernels of forward.py: one launch for a single token without gradients, else the chunk form."""
    S = None if state is None else state.memory
    single = x.q.shape[1] == 1 and segments is None and cu is None
    if single and not wants_gradients(*x, S):
        o, S = step_op(*x, scale, padding, fresh_state(x.q, x.v, x.g).memory if S is None else S)
        return o, DeltaState(S)
    x = neutral(x, padding)
    if segments is not None:
        segments = numbered(segments).int()
    o, S, *_ = chunked_op(*x, scale, segments, cu, S)
    return o if padding is None else o * padding[:, :, None, None], DeltaState(S)


# ---------------------------------------------------------------- the mixer


class GDNState(NamedTuple):
    """The memories S [B,M*E,F,Dv] fp32, and what the convolutions go on from: the last K - 1 tokens of q [B,K-1,M*H,D],
    k [B,K-1,M*Hkv,D] and v [B,K-1,M*Hkv,Dv], K taps, in fp32; M memories of a head."""

    memory: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


class GatedDeltaNet(Recurrent, Mixer):
    """Gated DeltaNet in place of the softmax of one attention module; q and k get length 1.

    alpha = exp(-exp(A_log) softplus(W_a x + bias)), beta = sigmoid(W_b x + bias). A conversion starts with the same
    half-lives for all tokens, spread over the heads.

    `native` is the layer of Qwen3-Next and Qwen3.5, which engines for those models know: q, k and v are the module's
    projections, in front of its norms of q and k; SiLU follows their convolution; beta has no bias; q is multiplied by
    D^-1/2; 1e-6 is added to squared lengths. A head of it may have two memories, whose normalised outputs add up. With
    `maps` each memory's q and k are y + D^-1/2 W y of those, W = 0 at first.
    """

    title = "Gated DeltaNet"
    paper = "arXiv 2412.06464"
    state_formula = (
        "4 M (E F Dv + (K - 1) (H D + Hkv (D + Dv))): M memories of each of E heads (key heads, "
        "or query heads), H query heads, Hkv key heads, key and value dims D, Dv, F features (2 D for hedgehog, else D), K "
        "taps"
    )
    about = {
        "taps": "taps of the causal convolution over q, k and v, which starts as the identity (1: none)",
        "feature_map": "function of q and k before they get length 1",
        "half_life_min": "shortest half-life of the memory at the start, in tokens; without a window finetune fits it to "
        "the teacher (0: gates as published, not fitted)",
        "half_life_max": "longest half-life of the memory at the start, in tokens; without a window finetune fits it",
        "write": "strength beta of a write at the start; without a window finetune fits it to the teacher",
        "native": "exactly the layer of Qwen3.5, for `linearize export --as qwen3_5`; taps is free up to 4",
        "memories": "memories of each head, with half-lives, features, convolutions, gates and norms of their own, whose "
        "outputs add up",
        "maps": "of a native layer: linear maps of q and k for each memory, the identity at first; export folds them into "
        "the projections",
    }
    # Half-life in tokens and strength of a write, for each memory.
    tried: ClassVar[dict[str, tuple[Any, ...]]] = {
        "half_life": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 512.0, 2048.0),
        "write": (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95),
    }
    in_fp32 = ("A_log",)
    implied: ClassVar[dict[str, dict[str, Any]]] = {
        "native": {
            "state_heads": "query",
            "taps": 4,
            "feature_map": "swish",
            "value_act": "swish",
            "rope": False,
            "norm": "head",
            "output_gate": True,
        }
    }
    switched = ("maps",)
    published = {
        "taps": 4,
        "value_act": "swish",
        "rope": False,
        "output_gate": True,
        "half_life_min": 0.0,
    }

    def __init__(
        self,
        site: AttentionSite,
        *,
        state_heads: Literal["kv", "query"] = "kv",
        taps: Annotated[int, Bounds(1, 16)] = 1,
        feature_map: Literal["identity", "swish", "elu", "relu", "hedgehog"] = "swish",
        value_act: Literal["identity", "swish"] = "identity",
        rope: bool = True,
        norm: Literal["none", "head"] = "head",
        output_gate: bool = False,
        half_life_min: Annotated[float, Bounds(0.0, 1e9)] = 8.0,
        half_life_max: Annotated[float, Bounds(0.0, 1e9)] = 512.0,
        write: Annotated[float, Bounds(0.01, 0.99)] = 0.5,
        gate_std: Annotated[float, Bounds(0.0, 1.0)] = 0.02,
        chunk_size: Annotated[int, Bounds(16, 256)] = 64,
        native: bool = False,
        memories: Annotated[int, Bounds(1, 2)] = 1,
        maps: bool = False,
        **near: int,
    ) -> None:
        """Raises ValueError when half_life_max < half_life_min, chunk_size is no power of two, an option is not that of
        the native layer, where that is asked for, or is of that layer alone, where it is not."""
        if native:
            own: dict[str, Any] = {"state_heads": state_heads, "feature_map": feature_map, "value_act": value_act}
            own |= {"rope": rope}
            own |= {"taps": max(4, taps), "norm": norm, "output_gate": output_gate, "window": near.get("window", 0)}
            check_implied("native", {**self.implied["native"], "window": 0}, own)
        elif maps:
            raise ValueError("maps=true: of the native layer alone; set native=true")
        if memories > 1 and norm == "none":
            raise ValueError(f"memories={memories}: each memory has a norm of its own; set norm=head")
        super().__init__(site, rope, **near)
        self.native = self.skip_qk_norm = native
        self.ones: Tensor | None = None  # while `calibrate` runs: hidden states times it are about 1
        if native:
            constant = import_module("..layers.constant", __package__)
            self.ones_direction, self.open = constant.ones_direction, constant.OPEN
        self.memories = memories
        self.build(state_heads, feature_map, norm, (half_life_min, half_life_max), chunk_size)
        self.feature_map, self.value_act = feature_map, value_act
        self.write, self.gate_std = write, gate_std

        E = memories * self.state_count
        self.decay = DecayLinear(site.hidden, E)
        self.A_log = nn.Parameter(torch.empty(E))
        self.strength = DecayLinear(site.hidden, E, bias=not native)
        self.build_maps(maps)
        self.build_taps(taps)
        if output_gate:
            self.output_gate = nn.Linear(site.hidden, memories * site.heads * site.value_dim, bias=False)

    @classmethod
    def parts(cls, site: AttentionSite, options: dict[str, Any]) -> dict[str, str]:
        return super().parts(site, options) | ({"layers/constant": "ones_direction"} if options.get("native") else {})

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        for linear in (self.decay, self.strength):
            init.normal_(linear.weight, 0.0, self.gate_std)
        if not self.native:
            init.constant_(self.strength.bias, math.log(self.write / (1.0 - self.write)))
        A, step = self._start()
        init.copy_(self.A_log, A.log().to(self.A_log))
        init.copy_(self.decay.bias, before_softplus(step).to(self.decay.bias))
        self.reset_maps()
        self.reset_taps()
        if hasattr(self, "output_gate"):
            init.normal_(self.output_gate.weight, 0.0, 0.02)

    def _start(self) -> tuple[Tensor, Tensor]:
        """A and softplus(bias) [M*E], whose product is -g at the start."""
        E, (shortest, longest) = self.memories * self.state_count, self.half_lives
        if shortest == 0.0:  # A uniform in (0, 16), the step log-uniform in (0.001, 0.1)
            return 16.0 * torch.rand(E).clamp_min(1e-4), torch.exp(math.log(1e-3) + math.log(100.0) * torch.rand(E))
        spread = torch.logspace(math.log10(shortest), math.log10(longest), E, dtype=torch.float64)
        return torch.ones(E), math.log(2.0) / spread

    def start_from(self, name: str, values: list[float]) -> None:
        given, own = torch.tensor(values, dtype=torch.float64), self.fitted
        if name == "write":
            logits = (given / (1.0 - given)).log().to(self.strength.weight)
            if self.ones is None:
                self.strength.bias[own] = logits
            else:
                self.strength.weight[own] = torch.outer(logits, self.ones.to(logits))
        else:
            self.A_log[own] = 0.0
            self.decay.bias[own] = before_softplus(math.log(2.0) / given).to(self.decay.bias)

    @torch.no_grad()
    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, o: Tensor, o_teacher: Tensor, layout: TokenLayout | None = None,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """As for others. Gates without a bias become about the same for all tokens first: swish(W x) about 1."""
        if self.native:
            self.ones = self.ones_direction(x)
            self.output_gate.weight.copy_(self.open * self.ones.expand_as(self.output_gate.weight))
        super().calibrate(q, k, v, x, o, o_teacher, layout, gates)
        self.ones = None

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log-decays g <= 0 and write strengths beta, [B,T,M*E] fp32."""
        g = -self.A_log.float().exp() * F.softplus(self.decay(x).float())
        return g, torch.sigmoid(self.strength(x).float())

    def project(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, read_gate: Tensor | None = None,
        write_gate: Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:  # fmt: skip
        """`Mixer.project`, with SLA's gates. Behind a convolution, which looks back, features are `scan`'s business."""
        g, beta = self.gates(x)
        q, k, v = self.for_memories(q, k, v)
        if self.taps == 1:
            q, k, v = self._features(q, k, v, layout.plain)
        gate = F.silu(self.output_gate(x)).unflatten(-1, (q.shape[2], -1)) if hasattr(self, "output_gate") else None
        return (q, k, v, g, beta, None if self.norm else read_gate, write_gate), (read_gate if self.norm else None, gate)

    def scan(self, inputs: Tensors, layout: TokenLayout, state: GDNState | None) -> tuple[tuple[Tensor], GDNState]:
        q, k, v, g, beta, read_gate, write_gate = inputs
        memory, *tails = (None,) * 4 if state is None else state
        (q, k, v), ends = self.convolved((q, k, v), layout, tails)
        if self.taps > 1:
            q, k, v = self._features(q, k, v, False)
        before = None if memory is None else DeltaState(memory)
        gates = {"read_gate": read_gate, "write_gate": write_gate}
        scale = self.site.key_dim**-0.5 if self.native else 1.0  # a norm follows, whose eps it meets
        o, (memory,) = self.recur(gdn, layout, before, q, k, v, g, beta, scale=scale, **gates)
        return (o,), GDNState(memory, *ends)

    def finish(self, outputs: tuple[Tensor, ...], beside: Tensors, layout: TokenLayout) -> tuple[Tensor, None]:
        read_gate, gate = beside
        o = self.normed(outputs[0], read_gate, layout)
        return self.of_memories(o if gate is None else o * gate), None

    def _features(self, q: Tensor, k: Tensor, v: Tensor, plain: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as the memory sees them: features of q and k of length 1 in their dtype, zero where they vanish."""
        swish, found = self.feature_map == "swish", []
        for y, role in ((q, "query"), (k, "key")):
            z = y if self.features is None else self.features(y, role)
            found.append(unit_rows(z, swish, y.dtype, eps=1e-6 if self.native else 1e-12, plain=plain))
        return found[0], found[1], F.silu(v) if self.value_act == "swish" else v
