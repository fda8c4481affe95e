"""GSA: gated slot attention (Zhang et al., "Gated Slot Attention for Efficient Linear-Time Sequence Modeling",
arXiv 2409.07146, NeurIPS 2024).

Per head, M slots hold a compressed key memory K~ [M,D] and value memory V~ [M,Dv]. With slot decays
alpha_t = exp(g_t) in (0,1]^M and write strengths s_t = 1 - alpha_t (paper eq. 6, its transposes corrected):

    K~_t = diag(alpha_t) K~_{t-1} + s_t k_t^T        V~_t = diag(alpha_t) V~_{t-1} + s_t v_t^T
    l_t  = c K~_t q_t        p_t = softmax(l_t)      o_t  = V~_t^T p_t

Chunk form. b is the cumulative sum of g inside a chunk, K_in and V_in the memories that enter it, b_C its last b:

    l_t = c [ e^{b_t} . (K_in q_t) + sum_{i<=t} (q_t.k_i) e^{b_t-b_i} . s_i ]
    o_t = V_in^T (e^{b_t} . p_t) + sum_{i<=t} ( sum_m p_t[m] e^{b_t-b_i}[m] s_i[m] ) v_i
    K_out = diag(e^{b_C}) K_in + sum_i (e^{b_C-b_i} . s_i) k_i^T        (V_out alike)

The sums with e^{b_t-b_i} become matrix products in scan.py; chunks.py holds the chunk form and its gradient.

Letters: B batch, T time, H query heads, E gate (state) heads, G = H/E, D key dim, Dv value dim, M slots, C chunk,
N chunks. Gates are log-space, <= 0; memories, gate sums, softmax in fp32 (fp64 stays fp64).
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..layers.arguments import Backend, several, check_shapes, to_gate_heads, use_kernels, wants_gradients
from ..layers.gates import biases, log_decays
from ..layers.gate_linear import DecayLinear
from .launch import chunk_tables, chunked_op, pool_op, runs_on, step_op
from .chunks import Read
from .eager import (
    GSAState, fresh_state, gsa_chunked, gsa_step, real_tokens, write_strength,
)  # fmt: skip
from ..layout import TokenLayout, in_pass, of_starts, once
from ..mixer import Bounds, Mixer, AttentionSite, Tensors, check_half_lives, check_power_of_two, full_precision, positions
from ..layers.norm import fit_size, give_size, head_norm
from ..layers.scan import document_tokens, numbered
from ..layers.sequences import sequence_places
from ..layers.pool import check_pool, each_sequence, on_rows, put, take


def gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: GSAState | None = None,
    rows: Tensor | None = None,
    read: Read = "softmax",
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> tuple[Tensor, GSAState]:
    """Gated slot attention, eq. 6, in time linear in T: o [B,T,H,Dv] in q's dtype and the state after the last token.

    q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv]; g [B,T,E,M] log-gates (natural log, <= 0) with Hkv | E | H: one
    memory per gate head. `scale` multiplies q.k (default D^-1/2). `padding` [B,T] bool is True at real tokens;
    others leave the state alone and output 0. `segments` [B,T] int: both memories restart where it changes.
    `cu_seqlens` [S+1] int32 with B=1: S sequences laid end to end; `state` then has S rows. `rows` [B] int: `state` is a
    pool, of which those rows are the call's (below 0: padding); they are changed in place. `read` makes p of l.
    `backend`: `auto` runs the Triton kernels on a GPU for the sizes and dtypes that they know and for softmax, else
    PyTorch; `triton` and `torch` force one. `chunk_size` is that of the PyTorch path alone.

    Raises ValueError for shapes that do not fit, or `triton` where it cannot run. T=1 takes the recurrent step.
    """
    check_shapes(q, k, v, g.shape[2], padding, segments, cu_seqlens, g=(g, "BTEM"))
    check_pool(rows, state, q.shape[0], cu_seqlens, segments)
    cu_seqlens = several(cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    obstacle = runs_on(q, v, g) if read == "softmax" else f"slots are read by {read}"
    kernels = q.shape[1] > 0 and use_kernels(backend, obstacle)
    if rows is not None and state is not None:
        if kernels and q.shape[1] == 1 and not wants_gradients(q, k, v, g, *state):
            return pool_op(q, k, v, g, scale, padding, *state, rows), state
        form: Any = {"scale": scale, "read": read, "chunk_size": chunk_size, "backend": backend}
        o, state = on_rows(partial(gsa, q, k, v, g, **form), state, rows, padding, q.shape[1])
        return o, state
    if kernels:
        return _gsa_triton(q, k, v, g, scale, padding, segments, cu_seqlens, state)
    if cu_seqlens is not None:
        run = partial(gsa, scale=scale, read=read, chunk_size=chunk_size, backend="torch")
        return each_sequence(run, cu_seqlens, state, q=q, k=k, v=v, g=g)
    if q.shape[1] == 1 and segments is None:
        return gsa_step(q, k, v, g, scale=scale, padding=padding, state=state, read=read)
    return gsa_chunked(q, k, v, g, scale, padding, segments, state, chunk_size, read)


# ---------------------------------------------------------------- naive form


def naive_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    state: GSAState | None = None,
    read: Read = "softmax",
) -> tuple[Tensor, GSAState]:
    """Eq. 6 token by token, for checking: same arguments and results as `gsa`, in the dtype of the inputs."""
    E = g.shape[2]
    form: dict[str, Any] = {"softmax": lambda y: torch.softmax(y, -1), "identity": lambda y: y}
    form |= {"swish": lambda y: y / (1 + (-y).exp()), "relu": lambda y: y.clamp_min(0)}
    form |= {"relu2": lambda y: y.clamp_min(0) ** 2}
    state = fresh_state(q, k, v, g) if state is None else state
    K, V, outputs = state.keys, state.values, []
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for t in range(q.shape[1]):
        if segments is not None and t > 0:
            same = (segments[:, t] == segments[:, t - 1]).to(K.dtype)[:, None, None, None]
            K, V = K * same, V * same
        real = torch.ones(q.shape[0], dtype=torch.bool, device=q.device) if padding is None else padding[:, t]
        g_t = torch.where(real[:, None, None], g[:, t].to(K.dtype), 0.0)  # [B,E,M]
        s_t = write_strength(g_t)
        k_t, v_t = (to_gate_heads(y[:, t : t + 1], E)[:, 0].to(K.dtype) for y in (k, v))  # [B,E,D]
        K = g_t.exp()[..., None] * K + s_t[..., None] * k_t[:, :, None]
        V = g_t.exp()[..., None] * V + s_t[..., None] * v_t[:, :, None]
        q_t = q[:, t].unflatten(1, (E, -1)).to(K.dtype)  # [B,E,G,D]
        p_t = form[read](scale * torch.einsum("bemd,begd->begm", K, q_t))
        outputs.append((torch.einsum("begm,bemd->begd", p_t, V) * real[:, None, None, None]).flatten(1, 2))
    o = torch.stack(outputs, 1) if outputs else q.new_zeros(*q.shape[:3], v.shape[-1])
    return o.to(q.dtype), GSAState(K, V, state.seen + real_tokens(q, padding))


# ---------------------------------------------------------------- Triton kernels


def _gsa_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    padding: Tensor | None,
    segments: Tensor | None,
    cu: Tensor | None,
    state: GSAState | None,
) -> tuple[Tensor, GSAState]:
    """Run the Triton kernels (launch.py): one launch for a single token without gradients, else the chunk form."""
    single = q.shape[1] == 1 and segments is None and cu is None
    if single and not wants_gradients(q, k, v, g, *(state or ())):
        o, *last = step_op(q, k, v, g, scale, padding, *(fresh_state(q, k, v, g) if state is None else state))
        return o, GSAState(*last)
    if padding is not None:
        g = torch.where(padding[:, :, None, None], g, 0.0)
    tables: tuple[Tensor | None, Tensor | None] = None, None
    if segments is not None:
        documents, tables = segments, chunk_tables(q, v, g, segments, cu)
        segments = once(documents, "numbered as int32", lambda: numbered(documents).int())
    K0, V0 = (None, None) if state is None else state[:2]
    o, K, V = chunked_op(q, k, v, g, scale, segments, cu, K0, V0, *tables)
    if padding is not None:
        o = o * padding[:, :, None, None]
    if cu is None:
        absorbed = real_tokens(q, padding)
    else:
        absorbed = of_starts(cu, "lengths", lambda starts: starts.diff().long())
    return o, GSAState(K, V, absorbed if state is None else state.seen + absorbed)


# ---------------------------------------------------------------- the mixer


class GatedSlotAttention(Mixer):
    """GSA in place of the softmax of one attention module; the only new weights make the slot gates.

    alpha_t = sigmoid(W_f x_t + bias)^{1/damping} (paper section 3.1). The biases start with half-lives spread
    evenly in log scale: with equal gates every slot would hold the same average, whatever q and k are.
    """

    title = "Gated slot attention"
    paper = "arXiv 2409.07146"
    pools = True
    state_formula = (
        "4 E M (D + Dv) + 8: E memories (KV heads, or query heads) of M slots, key and value dims D, Dv; 4 E M more with"
        " decay=none"
    )
    about = {
        "slots": "number of memory slots M",
        "clock": "slots that take turns and hold the last `clock` tokens (-1: three quarters of the slots)",
        "feature_map": "function of q and k",
        "output_act": "function of the output, before the norm",
        "norm": "RMS norm of the output over each head, or over all heads (hidden)",
        "unit_scale": "use 1 as the factor on q.k, not the architecture's",
        "decay": "slots forget as each token says (data), at learned rates (fixed), or not: writes of ABC (none)",
        "read": "function of q.k that reads the slots",
        "gate_rank": "rank of the map from hidden states to gates (0: full)",
    }
    # What the paper's Mistral-7B conversion code does (flash-linear-attention's GSA layer).
    in_fp32 = ("forget_bias", "clock_strength")
    published = {
        "rope": False,
        "feature_map": "swish",
        "value_act": "swish",
        "output_act": "swish",
        "norm": "hidden",
        "unit_scale": True,
        "half_life_min": 0.0,
        "clock": 0,
    }

    def __init__(
        self,
        site: AttentionSite,
        *,
        slots: Annotated[int, Bounds(1, 1024)] = 64,
        damping: Annotated[float, Bounds(0.1, 1024.0)] = 8.0,
        state_heads: Literal["kv", "query"] = "kv",
        clock: Annotated[int, Bounds(-1, 1024)] = -1,
        rope: bool = True,
        feature_map: Literal["identity", "swish", "relu"] = "identity",
        value_act: Literal["identity", "swish"] = "identity",
        output_act: Literal["identity", "swish"] = "identity",
        norm: Literal["none", "head", "hidden"] = "none",
        unit_scale: bool = False,
        decay: Literal["data", "fixed", "none"] = "data",
        read: Read = "softmax",
        half_life_min: Annotated[float, Bounds(0.0, 1e9)] = 2.0,
        half_life_max: Annotated[float, Bounds(0.0, 1e9)] = 2048.0,
        gate_std: Annotated[float, Bounds(0.0, 1.0)] = 0.02,
        gate_rank: Annotated[int, Bounds(0, 1024)] = 0,
        chunk_size: Annotated[int, Bounds(16, 256)] = 64,
        **near: int,
    ) -> None:
        """Raises ValueError when clock > slots, half_life_max < half_life_min, chunk_size is no power of two, slots that do
        not decay have a clock, or fixed decays a rank."""
        super().__init__(site, rope, **near)
        if decay == "fixed" and gate_rank:
            raise ValueError(f"gate_rank={gate_rank}: with decay=fixed no map makes the gates. Set gate_rank=0")
        if decay == "none" and clock > 0:
            raise ValueError(f"clock={clock}: slots on a clock forget at their turn, and decay=none. Set clock=0")
        clock = (0 if decay == "none" else slots * 3 // 4) if clock < 0 else clock
        if clock > slots:
            raise ValueError(f"clock={clock}: must be <= slots={slots}")
        check_half_lives(half_life_min, half_life_max)
        check_power_of_two(chunk_size=chunk_size)
        self.slots, self.damping, self.clock, self.chunk_size = slots, damping, clock, chunk_size
        self.gate_count = site.heads if state_heads == "query" else site.kv_heads
        self.feature_map, self.value_act, self.output_act = feature_map, value_act, output_act
        self.norm, self.scale = norm, 1.0 if unit_scale else site.scale
        self.half_lives, self.gate_std = (half_life_min, half_life_max), gate_std

        self.decay, self.read = decay, read
        # Gates that need no state are made of hidden states alone, where a server compiles.
        self.gates_early = not clock and decay != "none"
        if decay == "none":
            abc = import_module(".abc_gates", __package__)
            self.abc_gates, self.abc_state, self.nothing = abc.abc_gates, abc.ABCState, abc.NOTHING
        if decay == "fixed":
            self.forget_bias = nn.Parameter(torch.empty(self.gate_count * slots))
        else:
            # One more weight for all tokens changes no mean.
            self.narrow = nn.Linear(site.hidden, gate_rank, bias=False) if gate_rank else None
            self.forget = DecayLinear(gate_rank or site.hidden, self.gate_count * slots, bias=decay != "none")
        if clock:
            self.clock_strength = nn.Parameter(torch.empty(self.gate_count, clock))
        if norm != "none":
            self.norm_weight = nn.Parameter(torch.empty(site.heads, site.value_dim))

    @classmethod
    def parts(cls, site: AttentionSite, options: dict[str, Any]) -> dict[str, str]:
        return super().parts(site, options) | ({"gsa/abc_gates": "abc_gates"} if options["decay"] == "none" else {})

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        bias = self.forget_bias if self.decay == "fixed" else self.forget.bias
        if bias is not None:
            init.copy_(bias, self._spread_half_lives().to(bias))
        if self.decay != "fixed":
            init.normal_(self.forget.weight, 0.0, self.gate_std)
            if self.narrow is not None:  # the product of both has the full map's deviation
                init.normal_(self.narrow.weight, 0.0, self.narrow.out_features**-0.5)
        if self.clock:
            # Decay e^-3 at a slot's turn and next to none between: nearly a ring buffer, yet with gradients.
            init.constant_(self.clock_strength, 3.0 * self.damping)
        if self.norm != "none":
            init.ones_(self.norm_weight)

    def _spread_half_lives(self) -> Tensor:
        """Biases f with sigmoid(f)^{1/tau} = 2^{-1/half-life}, log-spaced; 0 for slots on the clock. [E*M]."""
        free = self.slots - self.clock
        bias = F.pad(biases(self.half_lives, free, self.damping), (self.clock, 0))
        return bias.repeat(self.gate_count)

    def gates(self, f: Tensor, layout: TokenLayout, seen: Tensor | int) -> Tensor:
        """Log-decays g = log sigmoid(f) / tau, f = W x + bias, [B,T,E,M] fp32, <= 0; `seen` as for `positions`."""
        if not self.clock:
            return log_decays(f, self.damping, plain=layout.plain)
        place = layout.places
        if place is None and layout.cu_seqlens is not None:
            cu = layout.cu_seqlens
            place = in_pass(cu, ("places", f.shape[1]), lambda: sequence_places(cu, f.shape[1], seen))
        elif place is None:
            place = positions(layout.padding, layout.segments, seen, (f.shape[0], f.shape[1])).to(f.device)
        return log_decays(f, self.damping, self.clock_strength, place)

    def _before_gates(self, x: Tensor) -> Tensor:
        """What gates are made of, [B,T,E,M] from x [B,T,hidden]: W_f x + bias, W_f = W_2 W_1 where it has a rank."""
        if self.decay == "fixed":
            f = self.forget_bias.expand(*x.shape[:2], -1)
        else:
            f = self.forget(x if self.narrow is None else self.narrow(x))
        return f.unflatten(-1, (self.gate_count, self.slots))

    def project(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout) -> tuple[Tensors, Tensors]:
        f = self._before_gates(x)
        if self.gates_early:
            f = self.gates(f, layout, 0)
        elif layout.plain:  # what torch.compile makes of a product alone may have strides of its own
            f = f.float()
        return (_act(q, self.feature_map), _act(k, self.feature_map), _act(v, self.value_act), f), ()

    def scan(self, inputs: Tensors, layout: TokenLayout, state: Any) -> tuple[tuple[Tensor], Any]:
        q, k, v, f = inputs
        padding, segments, rows, total, pool = layout.padding, layout.segments, layout.rows, None, None
        cu, seen = layout.cu_seqlens, None
        if self.decay == "none":
            state, pool = (None, None) if state is None else state
        if state is not None and (layout.places is None or self.decay == "none"):
            seen = state.seen if rows is None else take(state.seen, rows)
        if self.decay == "none":
            before = None
            if seen is not None:  # a row of zeros stands for a state that has seen nothing
                held: Any = pool if rows is None else take(pool, rows)
                before = torch.where(seen[:, None, None] > 0, held, self.nothing)
            g, total = self.abc_gates(f, padding, segments, before, cu)
        else:
            # Gates that were made early come in place of f.
            g = f if self.gates_early else self.gates(f, layout, 0 if seen is None else seen)
        # Autocast would run the fp32 memories' products in half precision.
        with full_precision(q.device):
            o, state = gsa(
                q,
                k,
                v,
                g,
                scale=self.scale,
                padding=padding,
                segments=segments,
                cu_seqlens=cu,
                state=state,
                rows=rows,
                read=self.read,
                chunk_size=self.chunk_size,
            )
        if rows is not None and total is not None:
            put(pool, rows, total)
            total = pool
        if segments is not None:  # the clock counts the tokens of one document
            seen = torch.zeros_like(state.seen) if seen is None else seen
            state = state._replace(seen=document_tokens(seen, padding, segments, (q.shape[0], q.shape[1])))
        return (o,), state if total is None else self.abc_state(state, total)

    def finish(self, outputs: tuple[Tensor, ...], beside: Tensors, layout: TokenLayout) -> tuple[Tensor, None]:
        """The RMS norm of o [B,T,H,Dv] over one head or over all of them, where there is one."""
        o = _act(outputs[0], self.output_act)
        if self.norm == "none":
            return o, None
        if self.norm == "head":
            return head_norm(o, self.norm_weight, plain=layout.plain), None
        all_heads, weight = o.flatten(2).unsqueeze(2), self.norm_weight.flatten()[None]
        return head_norm(all_heads, weight, plain=layout.plain).view_as(o), None

    def state_bytes(self, tokens: int, item: int = 4) -> int:
        return (
            super().state_bytes(tokens, item)
            + 4 * self.gate_count * self.slots * (self.site.key_dim + self.site.value_dim)
            + 8
            + 4 * self.gate_count * self.slots * (self.decay == "none")
        )

    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, o: Tensor, o_teacher: Tensor, layout: TokenLayout | None = None
    ) -> None:
        """Scale the output norm: each head's output comes as near to the teacher's as a factor can bring it. Beside a
        window, whose share is found afterwards, it gets the teacher's root mean square."""
        if self.norm != "none" and self.near is not None:
            give_size(self.norm_weight, o_teacher)
        elif self.norm != "none":
            fit_size(self.norm_weight, o, o_teacher)


def _act(y: Tensor, name: str) -> Tensor:
    return {"identity": lambda z: z, "swish": F.silu, "relu": F.relu}[name](y)
