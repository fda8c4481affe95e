"""RetNet's retention (Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models",
arXiv 2307.08621), on its own and as a base of SLA (arXiv 2602.01744).

Per head a memory S [D,Dv] decays by a fixed gamma in (0,1) (paper eqs. 5 and 6):

    S_t = gamma S_{t-1} + k_t v_t^T        o_t = S_t^T (c q_t) = sum_{i<=t} gamma^{t-i} (c q_t.k_i) v_i

The layer ends with norm(o_t) . swish(W x_t) (eq. 8), an option here.

linear.py has the chunk form (paper eq. 7) and its gradient. A read gate r_t and a write gate w_t, one number per token
and head (SLA has them), make o_t = r_t S_t^T (c q_t) and write w_t k_t v_t^T.

Letters: B batch, T time, H query heads, Hkv KV heads, E state heads, D key dim, Dv value dim, C chunk.
Log-decays are <= 0; memories and sums of decays in fp32 (fp64 stays fp64).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import initialization as init

from ..layers.arguments import Backend, several, check_shapes, state_dtype, to_gate_heads, wants_gradients
from ..layers.recurrent import Recurrent, outer_products
from ..layers.rotary import Rope, resolve_rope
from ..layout import TokenLayout
from ..linear.linear import linear_attention
from ..linear.launch import Precision, chunked_op, pool_op, resolve_precision, step_op, use_triton
from ..mixer import Bounds, Mixer, AttentionSite, Tensors, full_precision, gated, output_gate_at
from ..layers.scan import numbered
from ..layers.pool import check_pool, each_sequence, on_rows


class RetNetState(NamedTuple):
    """Decode state: the memory [B,E,D,Dv] in fp32."""

    memory: Tensor


def retnet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    scale: float | None = None,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: RetNetState | None = None,
    rows: Tensor | None = None,
    read_gate: Tensor | None = None,
    write_gate: Tensor | None = None,
    chunk_size: int = 64,
    backend: Backend = "auto",
    precision: Precision = "auto",
) -> tuple[Tensor, RetNetState]:
    """Retention, eqs. 5 to 7, in time linear in T: o [B,T,H,Dv] in q's dtype and the state after the last token.

    q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv]; `log_decay` [E] natural logarithms of gamma, with Hkv | E | H: one
    memory per state head. `scale` multiplies q.k (default D^-1/2). `padding` [B,T] bool is True at real tokens; others
    leave the state alone, without decay, and output 0. `segments` [B,T] int: the memory restarts where it changes.
    `cu_seqlens` [S+1] int32 with B=1: S sequences laid end to end; `state` then has S rows. `rows` [B] int: `state` is a
    pool, of which those rows are the call's (below 0: padding); they are changed in place. `read_gate` [B,T,H]
    multiplies o, `write_gate` [B,T,E] what is written. `backend`: `auto` runs the Triton kernels on a GPU for what they
    know, else PyTorch; the others insist. `chunk_size` is PyTorch's, `precision` that of the kernels' products of fp32.

    Raises ValueError for shapes that do not fit, an unknown precision, or `triton` where it cannot run. T=1 takes the
    recurrent step.
    """
    fixed = {"log_decay": (log_decay, "E"), "read_gate": (read_gate, "BTH"), "write_gate": (write_gate, "BTE")}
    check_shapes(q, k, v, log_decay.shape[0], padding, segments, cu_seqlens, **fixed)
    check_pool(rows, state, q.shape[0], cu_seqlens, segments)
    cu_seqlens = several(cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    gates = read_gate, write_gate
    form: Any = {"scale": scale, "chunk_size": chunk_size, "backend": backend, "precision": precision}
    form |= {"read_gate": read_gate, "write_gate": write_gate}
    kernels = q.shape[1] > 0 and use_triton(backend, precision, q, v, log_decay.shape[0])
    if rows is not None and state is not None:
        if kernels and q.shape[1] == 1 and not wants_gradients(q, k, v, *gates, *state):
            inputs = q.to(v.dtype), k.to(v.dtype), v, None, None, log_decay, *gates, scale, False, padding
            o, _ = pool_op(*inputs, *state, None, None, None, rows)
            return o.to(q.dtype), state
        o, state = on_rows(partial(retnet, q, k, v, log_decay=log_decay, **form), state, rows, padding, q.shape[1])
        return o, state
    if wants_gradients(log_decay) and not kernels:
        return _learned(q, k, v, log_decay, padding, cu_seqlens, form | {"segments": segments, "state": state})
    if kernels:
        return _retnet_triton(q, k, v, log_decay, scale, padding, segments, cu_seqlens, state, *gates, precision)
    if cu_seqlens is not None:
        run = partial(retnet, log_decay=log_decay, scale=scale, chunk_size=chunk_size, backend="torch")
        return each_sequence(run, cu_seqlens, state, q=q, k=k, v=v, read_gate=read_gate, write_gate=write_gate)
    (S,) = fresh_state(q, k, v, log_decay) if state is None else state
    if q.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), RetNetState(S)
    E, g = log_decay.shape[0], log_decay[None, None].to(S.dtype).expand(1, q.shape[1], -1)
    x, y, z = q.to(S.dtype) * scale, *(to_gate_heads(u, E).to(S.dtype) for u in (k, v))
    if read_gate is not None:
        x = x * read_gate.to(S.dtype)[..., None]
    if write_gate is not None:
        z = z * write_gate.to(S.dtype)[..., None]
    if padding is not None:
        x, y, z = (torch.where(padding[:, :, None, None], u, 0.0) for u in (x, y, z))
        g = torch.where(padding[:, :, None], g, 0.0)
    o, S = linear_attention(x, y, z, S, segments, chunk_size, g)
    return o.to(q.dtype), RetNetState(S)


def fresh_state(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> RetNetState:
    """The empty memory for these shapes."""
    return RetNetState(q.new_zeros(q.shape[0], log_decay.shape[0], k.shape[-1], v.shape[-1], dtype=state_dtype(q)))


def _retnet_triton(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, padding: Tensor | None, segments: Tensor | None,
    cu: Tensor | None, state: RetNetState | None, read: Tensor | None, write: Tensor | None, precision: Precision,
)-> tuple[Tensor, RetNetState]:  # fmt: skip
    """The kernels of linear/; a single token without gradients is one launch."""
    dtype, sizes = q.dtype, (q.shape[-1], v.shape[-1])
    q, k = q.to(v.dtype), k.to(v.dtype)
    S = None if state is None else state.memory
    inputs, keep = (q, k, v, None, None, log_decay, read, write, scale, False), wants_gradients(q, k, v, log_decay, read, write, S)
    if q.shape[1] == 1 and segments is None and cu is None and not keep:
        S = fresh_state(q, k, v, log_decay).memory if S is None else S
        o, _, S, *_ = step_op(*inputs, padding, S, None, None, None)
        return o.to(dtype), RetNetState(S)
    if segments is not None:
        segments = numbered(segments).int()
    first = None if S is None else S.flatten(2)
    o, _, S, *_ = chunked_op(*inputs, resolve_precision(precision), segments, padding, cu, first, keep)
    return o.to(dtype), RetNetState(S.unflatten(-1, sizes))


def naive_retnet(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, scale: float | None = None, padding: Tensor | None = None,
    segments: Tensor | None = None, state: RetNetState | None = None, read_gate: Tensor | None = None, write_gate:
    Tensor | None = None,
)-> tuple[Tensor, RetNetState]:  # fmt: skip
    """Eq. 6 token by token, for checking: same arguments and results as `retnet`, in the dtype of the inputs."""
    (S,) = fresh_state(q, k, v, log_decay) if state is None else state
    g = log_decay[None, None, :, None].expand(*q.shape[:2], -1, -1)
    o, S = outer_products((q, k, v, g), scale, padding, segments, S, read_gate, write_gate)
    return o, RetNetState(S)


# ---------------------------------------------------------------- decays that are learned


class Placed(torch.autograd.Function):
    """x [B,T,heads,D] as it is. Of a gradient of x, log_decay [E] gets that of e^{place log_decay} x: with place t on
    q_t and -i on k_i it is the gradient of gamma^{t-i}. Places of one row cancel, which needs gradients in fp32: on a
    GPU linear/decays.py adds up distances."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_decay: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(x, log_decay, place)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        x, log_decay, place = ctx.saved_tensors
        dtype = state_dtype(x)
        products = (x.to(dtype) * dx.to(dtype)).unflatten(2, (log_decay.shape[0], -1)).sum((3, 4))  # [B,T,E]
        return dx, (products * place[..., None].to(dtype)).sum((0, 1)).to(log_decay.dtype), None


def _learned(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, padding: Tensor | None, cu: Tensor | None, form: dict[str, Any]
) -> tuple[Tensor, RetNetState]:
    """`retnet` in PyTorch for decays that need a gradient; `form` are its other arguments."""
    T, E = q.shape[1], log_decay.shape[0]
    place = torch.arange(1, T + 1, device=q.device)[None] if padding is None else padding.cumsum(1)
    last = place[:, -1:]
    if cu is not None:
        starts = cu[:-1].long()
        own = torch.searchsorted(cu.long(), torch.arange(T, device=q.device), right=True) - 1
        place, last = place - starts[own], (cu[1:].long() - starts)[:, None]
    k, v = to_gate_heads(k, E), to_gate_heads(v, E)  # memories that share a key decay apart
    q, k = Placed.apply(q, log_decay, place), Placed.apply(k, log_decay, -place)
    o, (S,) = retnet(q, k, v, log_decay=log_decay.detach(), padding=padding, cu_seqlens=cu, **form)
    S = Placed.apply(S.flatten(2)[:, None], log_decay, last)[:, 0].view(S.shape)
    return o, RetNetState(S)


# ---------------------------------------------------------------- the mixer


class RetNet(Recurrent, Mixer):
    """Retention in place of the softmax of one attention module. A decay is one number a memory, whatever the text, so
    hardly a weight is new."""

    title = "RetNet's retention"
    paper = "arXiv 2307.08621"
    state_formula = (
        "4 E F Dv: E memories (KV heads, or query heads), value dim Dv, F features (2 D for hedgehog, else D)"
    )
    about = {
        "rope": "rotate q and k before the feature map, after it, or not; auto: before beside a window, else after",
        "decay": "half-lives of the heads: learned, from half_life_min to half_life_max at the start; fixed and spread "
        "evenly in log scale between them; or the paper's gamma = 1 - 2^(-5-h)",
        "half_life_min": "shortest half-life of the memory, in tokens; where it is learned, without a window, finetune "
        "fits its start to the teacher",
        "half_life_max": "longest half-life of the memory, in tokens; fitted likewise",
    }
    tried: ClassVar[dict[str, tuple[Any, ...]]] = {"half_life": tuple(2.0**n for n in range(12))}
    # Behind features that are the identity the rotation is the paper's, and SLA reads q and k without it.
    in_fp32 = ("log_half_life",)
    published = {"decay": "paper", "feature_map": "identity", "rope": "after", "output_gate": True}

    def __init__(
        self,
        site: AttentionSite,
        *,
        decay: Literal["learned", "spread", "paper"] = "learned",
        half_life_min: Annotated[float, Bounds(0.5, 1e6)] = 2.0,
        half_life_max: Annotated[float, Bounds(0.5, 1e9)] = 355.0,
        state_heads: Literal["kv", "query"] = "kv",
        feature_map: Literal["identity", "elu", "relu", "plain_relu", "hedgehog"] = "relu",
        norm: Literal["head", "none"] = "head",
        output_gate: bool = False,
        rope: Rope = "auto",
        chunk_size: Annotated[int, Bounds(16, 256)] = 64,
        **near: int,
    ) -> None:
        """Raises ValueError when half_life_max < half_life_min, or chunk_size is no power of two."""
        place = resolve_rope(rope, near.get("window", 0))
        super().__init__(site, place == "before", **near)
        self.rope = place
        self.build(state_heads, feature_map, norm, (half_life_min, half_life_max), chunk_size)
        self.decay = decay
        if decay == "learned":  # logarithms to base 2 of half-lives in tokens
            self.log_half_life = nn.Parameter(torch.empty(self.state_count))
        self.output_gate = output_gate_at(site, output_gate)

    @classmethod
    def parts(cls, site: AttentionSite, options: dict[str, Any]) -> dict[str, str]:
        found = super().parts(site, options)
        return found | ({"layers/output_gate": "OutputGate"} if options["output_gate"] else {})

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.decay == "learned":
            init.copy_(self.log_half_life, self._spread(self.log_half_life.device).to(self.log_half_life))

    def _spread(self, device: torch.device) -> Tensor:
        """Logarithms to base 2 of half-lives, evenly from the shortest to the longest, [E]."""
        shortest, longest = (math.log2(x) for x in self.half_lives)
        return torch.linspace(shortest, longest, self.state_count, device=device)

    def starts(self) -> dict[str, tuple[Any, ...]]:
        return self.tried if self.decay == "learned" else {}

    def start_from(self, name: str, values: list[float]) -> None:
        self.log_half_life.copy_(torch.tensor(values).log2())

    def log_decay(self, device: torch.device) -> Tensor:
        """log gamma [E] in fp32 (fp64 stays). One that is not learned is made anew: a buffer would have to be saved."""
        if self.decay == "paper":
            return torch.log1p(-torch.exp2(-5.0 - torch.arange(self.state_count, device=device)))
        y = self.log_half_life if self.decay == "learned" else self._spread(device)
        return -math.log(2.0) * torch.exp2(-y.to(state_dtype(y)))

    def project(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, read_gate: Tensor | None = None,
        write_gate: Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:  # fmt: skip
        """`Mixer.project`, with SLA's gates."""
        if self.features is not None:
            with full_precision(q.device):
                q, k = self.features(q, "query"), self.features(k, "key")
        inputs = self.turn(q, layout), self.turn(k, layout), v, None if self.norm else read_gate, write_gate
        return inputs, (read_gate if self.norm else None, x, v)

    def scan(self, inputs: Tensors, layout: TokenLayout, state: RetNetState | None) -> tuple[tuple[Tensor], RetNetState]:
        *x, read_gate, write_gate = inputs
        form: Any = {"read_gate": read_gate, "write_gate": write_gate}
        form |= {"log_decay": self.log_decay(inputs[0].device), "scale": self.site.scale if self.features is None else 1.0}
        o, state = self.recur(retnet, layout, state, *x, **form)
        return (o,), state

    def finish(self, outputs: tuple[Tensor, ...], beside: Tensors, layout: TokenLayout) -> tuple[Tensor, None]:
        read_gate, x, v = beside
        return gated(self.normed(outputs[0], read_gate, layout).to(v.dtype), x, self.output_gate), None
