"""MHLA: linear attention over blocks of tokens, whose summaries are mixed for each block of queries (Zhang et al.,
"MHLA: Restoring Expressivity of Linear Attention via Token-Level Multi-Head", arXiv 2601.07832).

With features q, k >= 0, S_b = sum_{j in b} k_j v_j^T and z_b = sum_{j in b} k_j the summaries of block b, and m_ib >= 0
learned, a token t of block i outputs (paper eq. 4)

    bidirectional   o_t = q_t S~_i / (q_t . z~_i)        S~_i = sum_b m_ib S_b        z~_i = sum_b m_ib z_b
    causal          o_t = [ q_t P_i + m_ii sum_{j<=t, j in i} (q_t.k_j) v_j ] / [ same of z ], P_i = sum_{b<i} m_ib S_b

so that the weight of token j is m_{block t, block j} q_t.k_j. The printed causal form (appendix C) takes row i - 1 of
m for P_i and leaves the diagonal's index open; the authors' code agrees with the above. Their vision code's
normaliser is not eq. 4: it mixes products q.z of other blocks' queries.

Causal weights are kept by row and distance, m_ij = w[min(i, M-1), min(i-j, M-1)]: the M trained rows are the paper's
matrix, later rows repeat the last one, and all blocks at M - 1 or more share a weight and thus one summary. The state
is bounded: M - 2 summaries, one of everything older, one of the block that is not complete, and their mixture.

Both ways the number of blocks is fixed, along each axis of a grid, and blocks grow with the input; tokens without a
place (a class token, registers) are one more block.

The paper's best images come with two additions (table 12), o_t . swish(W x_t) and there DWC(V), a convolution of values
over the grid (its CPE). It does not print their order; as in its code's model of images, both join the output in full:

    y = (norm(o) + DWC(V)) . swish(W X + b)

Letters: B batch, T time, H query heads, E KV heads, G = H/E, F features, Dv value dim, M blocks, C tokens of a block.
"""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..layers.arguments import Backend, check_shapes, use_kernels, wants_gradients
from ..layers.features import Features
from ..layout import TokenLayout, in_pass, once
from .places import Places, number_of_blocks, place_grid, place_line, place_rows, place_sequences
from .eager import (
    GUARD, MHLAState, after, divided, fresh_state, may_wait, mhla_bidirectional, mhla_causal, mhla_step, recomputed,
    with_one,
)  # fmt: skip
from ..mixer import (
    LEARNED, Bounds, Mixer, AttentionSite, Tensors, check_power_of_two, full_precision, gated, output_gate_at,
)  # fmt: skip
from ..layers.norm import fit_size, give_size, head_norm
from ..layers.pool import check_pool, on_rows
from ..layers.rotary import rotated, resolve_rope
from ..layers.row_softmax import row_softmax
from .bidirectional_launch import exceeds_offsets, grid_op
from .launch import exceeds_grid, mhla_op, pool_op, runs_on, step_op


def mhla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    *,
    block_size: int = 64,
    normalise: bool = True,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: MHLAState | None = None,
    rows: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, MHLAState]:
    """Causal MHLA in time linear in T: o [B,T,H,Dv] in v's dtype and the state after the last token.

    q [B,T,H,F], k [B,T,E,F] features, v [B,T,E,Dv], E dividing H; w [E,M,M] weights by row and distance, M >= 2;
    blocks of `block_size` tokens, a power of two. `padding` [B,T] bool is True at real tokens; the others count for
    nothing and output 0. `segments` [B,T] int: a document ends where it changes, and so does its block. `cu_seqlens`
    [S+1] int32 with B=1: S sequences end to end; `state` then has S rows. `rows` [B] int: `state` is a pool, of which
    those rows are the call's (below 0: padding); they are changed in place. Without `normalise`, only the numerator.
    `backend`: `auto` runs the Triton kernels on a GPU for the sizes and dtypes that they know, else PyTorch, as for a
    state that goes in before several tokens; the others insist. The kernels take features in v's dtype, and the state
    that they return has no gradient.

    Raises ValueError for shapes that do not fit, or `triton` where it cannot run.
    """
    o, _, state = mix_causal(q, k, v, w, block_size, normalise, padding, segments, cu_seqlens, state, backend, rows)
    return o, state


def mhla_grid(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, places: Places, *, normalise: bool = True, backend: Backend = "auto"
)-> Tensor:
    """Bidirectional MHLA: o [B,T,H,Dv] in v's dtype.

    m [E,K,K] are the weights of query block and key block. `places` (places.py: `place_grid`, `place_line`) say
    which block each token of a document is in; those in none, padding, output 0. Otherwise as `mhla`.
    """
    return mix_bidirectional(q, k, v, m, places, normalise, backend)[0]


def naive_mhla(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, *, block: Tensor | None = None, block_size: int = 64, normalise:
    bool = True, padding: Tensor | None = None, segments: Tensor | None = None,
)-> Tensor:  # fmt: skip
    """Eq. 4 with its T x T weights, for checking: o [B,T,H,Dv] in the dtype of the inputs.

    Causal with `weights` by row and distance, or with `block` [B,T] bidirectional with `weights` by block and block.
    """
    (B, T, H, _), G, M = q.shape, q.shape[2] // k.shape[2], weights.shape[-1]
    k, v, m = k.repeat_interleave(G, 2), v.repeat_interleave(G, 2), weights.repeat_interleave(G, 0)
    factor = q.new_zeros(B, H, T, T)
    for b in range(B):
        real = [padding is None or bool(padding[b, t]) for t in range(T)]
        document, number = [0] * T, [0] * T
        for t in range(T):
            if segments is not None and block is not None:
                document[t] = int(segments[b, t])
            elif segments is not None and t > 0:
                document[t] = document[t - 1] + int(segments[b, t] != segments[b, t - 1])
            number[t] = sum(real[i] and document[i] == document[t] for i in range(t)) // block_size
        for t in range(T):
            for i in range(T if block is not None else t + 1):
                if real[t] and real[i] and document[t] == document[i]:
                    if block is not None:
                        factor[b, :, t, i] = m[:, block[b, t], block[b, i]]
                    else:
                        factor[b, :, t, i] = m[:, min(number[t], M - 1), min(number[t] - number[i], M - 1)]
    attention = factor * torch.einsum("bthd,bihd->bhti", q, k)
    if normalise:
        attention = attention / attention.sum(-1, keepdim=True).clamp_min(GUARD)
    return torch.einsum("bhti,bihd->bthd", attention, v)


# ---------------------------------------------------------------- which path takes a call

# A decode step copies summaries of so many numbers rather than wait to hear whether a block is complete: 64 MB, 30 µs.
COPIED = 1 << 24


def mix_causal(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, C: int, normalise: bool, padding: Tensor | None, segments: Tensor |
    None, cu: Tensor | None, state: MHLAState | None, backend: Backend = "auto", rows: Tensor | None = None,
)-> tuple[Tensor, Tensor, MHLAState]:  # fmt: skip
    """`mhla`, and the normaliser [B,T,H] beside its results (1 without `normalise`)."""
    check_shapes(q, k, v, k.shape[2], padding, segments, cu)
    check_pool(rows, state, q.shape[0], cu, segments)
    check_weights(k.shape[2], w)
    dtype, T = torch.promote_types(v.dtype, torch.float32), q.shape[1]
    w = w.to(dtype)
    if rows is not None and state is not None:
        if T == 1 and _steps_on(backend, q, k, v, w, state):
            o, g = pool_op(q, k, v, w.float(), padding, *state, C, normalise, True, rows)
            return o, g if normalise else w.new_ones(q.shape[:3]), state
        way: Any = {"segments": None, "cu": None, "backend": backend}
        o, g, state = on_rows(partial(mix_causal, q, k, v, w, C, normalise, **way), state, rows, padding, T)
        return o, g, state
    start = fresh_state(k, w.shape[-1], v.shape[-1] + normalise, dtype) if state is None and T < 2 else state
    if T == 0 and start is not None:
        return v.new_zeros(*q.shape[:3], v.shape[-1]), w.new_zeros(q.shape[:3]), start
    if T == 1 and start is not None and segments is None and cu is None:
        if _steps_on(backend, q, k, v, w, start):
            return _step(q, k, v, w, padding, start, C, normalise)
        real = 1 if padding is None else padding[:, :, None, None]
        sums, last = mhla_step(
            q.to(dtype), k.to(dtype) * real, with_one(v, normalise, dtype) * real, w, start, padding, C
        )
        return *divided(sums, normalise, padding, v.dtype), last
    programs = q.shape[2] * (q.shape[0] if cu is None else cu.shape[0] - 1)
    obstacle = exceeds_grid(programs) if state is None else "a state goes in"
    triton = _use_triton(backend, q, v, w, True, obstacle)
    if triton and padding is None and segments is None and cu is None:
        inputs = q.to(v.dtype), k.to(v.dtype), v, w.float()
        o, g, _, past, old, current, mixed = mhla_op(*inputs, None, None, None, C, normalise)
        tokens = torch.full((q.shape[0],), T, dtype=torch.long, device=q.device)
        return o, g if normalise else w.new_ones(q.shape[:3]), MHLAState(past, old, current, mixed, tokens)
    seen = None if state is None else state.tokens
    if cu is not None:
        places = in_pass(cu, ("blocks", T, C, seen is None), lambda: place_sequences(cu, seen, T, C))
    else:  # documents alone decide: one layer of a pass waits for their number of blocks
        shared = segments if padding is None and seen is None else None
        places = once(shared, ("blocks", C), lambda: place_rows(padding, segments, seen, q, C))
    if triton:
        o, g, S = _kernels(q, k, v, w, places, normalise)
        return o, g, _after(S.detach(), w.detach(), places, q.shape[-1], v.shape[-1], normalise)

    def form(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, MHLAState]:
        return mhla_causal(q, k, with_one(v, normalise, dtype), w, places, state)

    sums, last = recomputed(form, q, k, v, w)
    return *divided(sums, normalise, padding, v.dtype), last


def mix_bidirectional(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, places: Places, normalise: bool, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """`mhla_grid`, and the normaliser [B,T,H] beside its result (1 without `normalise`)."""
    check_shapes(q, k, v, k.shape[2], None, None, None)
    check_weights(k.shape[2], m)
    if places.number.shape[1] % m.shape[-1]:
        raise ValueError(f"weights are {tuple(m.shape)}, but documents have {places.number.shape[1]} blocks in all")
    dtype = torch.promote_types(v.dtype, torch.float32)
    if _use_triton(backend, q, v, m, False, exceeds_offsets(q, k, v)):
        assert places.table is not None
        inputs = q.to(v.dtype), k.to(v.dtype), v, m.float()
        keep = wants_gradients(q, k, v, m)
        o, g, *_ = grid_op(*inputs, places.table, places.size, places.covered, normalise, keep)
        return o, g if normalise else m.new_ones(q.shape[:3])

    def form(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return mhla_bidirectional(q, k, with_one(v, normalise, dtype), m.to(dtype), places)

    return divided(recomputed(form, q, k, v, m), normalise, None, v.dtype)


def check_weights(E: int, weights: Tensor) -> None:
    """Raise ValueError unless `weights` are those of E KV heads and two blocks at least."""
    M = weights.shape[-1]
    if weights.shape != (E, M, M) or M < 2:
        raise ValueError(f"weights must be [E,M,M] with M >= 2, found {tuple(weights.shape)} for {E} KV heads")


# ---------------------------------------------------------------- Triton kernels


def _use_triton(backend: Backend, q: Tensor, v: Tensor, w: Tensor, causal: bool, obstacle: str) -> bool:
    reason = obstacle or runs_on(v.device, v.dtype, q.shape[-1], v.shape[-1], w.shape[-1], causal)
    return use_kernels(backend, reason)


def _steps_on(backend: Backend, q: Tensor, k: Tensor, v: Tensor, w: Tensor, state: MHLAState) -> bool:
    """Whether the step kernel takes these: it has no gradient."""
    obstacle = exceeds_grid(k.shape[0] * k.shape[2])
    return not wants_gradients(q, k, v, w, *state[:4]) and _use_triton(backend, q, v, w, True, obstacle)


def _step(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, padding: Tensor | None, state: MHLAState, C: int, normalise: bool
) -> tuple[Tensor, Tensor, MHLAState]:
    """`mix_causal` for one token, in one launch."""
    edge = state.past.numel() <= COPIED or not may_wait(q)
    if not edge:
        tokens = state.tokens + (1 if padding is None else padding[:, 0].long())
        edge = bool((tokens % C == 0).any())
    o, g, past, old, current, mixed, tokens = step_op(q, k, v, w.float(), padding, *state, C, normalise, edge)
    if not edge:
        past, old, mixed = state.past, state.old, state.mixed
    return o, g if normalise else w.new_ones(q.shape[:3]), MHLAState(past, old, current, mixed, tokens)


def _kernels(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, places: Places, normalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B,T,H,Dv], the normaliser [B,T,H], and the summaries of all blocks [R,E,N,X]."""
    inputs = q.to(v.dtype), k.to(v.dtype), v, w.float()
    number, document = places.number.int(), places.document.int()
    o, g, S, *_ = mhla_op(*inputs, places.table, number, document, places.size, normalise)
    return o, g.clamp_min(GUARD) if normalise else w.new_ones(q.shape[:3]), S


def _after(S: Tensor, w: Tensor, places: Places, D: int, DV: int, normalise: bool) -> MHLAState:
    """The state after the last document of each row, from the summaries of all blocks."""
    last = after(S[..., None], w, places.number, places.document, places, None)

    def summary(x: Tensor) -> Tensor:
        products = x[..., : D * DV, 0].unflatten(-1, (D, DV))
        return torch.cat([products, x[..., D * DV :, :]], -1) if normalise else products

    return MHLAState(summary(last.past), summary(last.old), summary(last.current), summary(last.mixed), last.tokens)


# ---------------------------------------------------------------- the mixer


class Clipped(torch.autograd.Function):
    """y clipped to [0, 1]; of its gradient passes what does not lead further out. As clipping y after each step does,
    and without a step of its own."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.clamp(0.0, 1.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return dy.masked_fill(((y <= 0.0) & (dy > 0.0)) | ((y >= 1.0) & (dy < 0.0)), 0.0)


class MultiHeadLinearAttention(Mixer):
    """MHLA in place of the softmax of one attention module; the new weights are those of blocks and of the features.

    The weights of a query block are a softmax over key blocks times their number, so that equal ones make plain linear
    attention. They start falling with the distance between blocks (paper section 4.2), the far ones not quite at zero.
    The paper learns the weights themselves, clipped to [0, 1], and starts the farthest at zero (`weighting=clipped`,
    `start=paper`).
    """

    title = "Multi-head linear attention: mixed summaries of blocks"
    paper = "arXiv 2601.07832"
    pools = True
    state_formula = (
        "4 E F (Dv + 1) (M + 1) + 8: E KV heads, F features (2 D for hedgehog, else D), value dim Dv, M blocks;"
        " Dv without normaliser"
    )
    bidirectional = True
    geometric = True
    about = {
        "blocks": "number of blocks M with weights of their own",
        "block_size": "tokens in a block of causal attention",
        "frames": "blocks along time, on a grid with bidirectional attention",
        "rows": "blocks from top to bottom, on a grid with bidirectional attention",
        "columns": "blocks from left to right, on a grid with bidirectional attention",
        "shared": "one matrix of block weights for all heads",
        "by_distance": "causal block weights depend on the distance alone",
        "normalise": "divide by the sum of weights",
        "start": "block weights at the start: falling with distance (to 0: paper; not quite: local), or uniform",
        "weighting": "block weights of a row are a softmax, or numbers clipped to 0 .. 1",
        "learn_weights": "learn the block weights",
        "rope": "rotate q and k before the feature map, after it (without the normaliser alone), or not",
    }
    # What all of its models have, and its language model; `published_at` says what its images have instead.
    in_fp32 = ("block_logits",)
    published = {
        "feature_map": "plain_relu", "normalise": False, "norm": "head", "shared": True, "output_gate": True,
        "start": "uniform", "weighting": "clipped", "rope": "after",
    }  # fmt: skip

    def __init__(
        self,
        site: AttentionSite,
        *,
        feature_map: Literal["hedgehog", "elu", "relu", "plain_relu"] = "hedgehog",
        blocks: Annotated[int, Bounds(2, 1024)] = 32,
        block_size: Annotated[int, Bounds(16, 256)] = 64,
        frames: Annotated[int, Bounds(1, 64)] = 1,
        rows: Annotated[int, Bounds(1, 64)] = 4,
        columns: Annotated[int, Bounds(1, 64)] = 4,
        shared: bool = False,
        by_distance: bool = False,
        normalise: bool = True,
        norm: Literal["none", "head"] = "none",
        dwc: Annotated[int, Bounds(0, 15)] = 0,
        output_gate: bool = False,
        start: Literal["local", "paper", "uniform"] = "local",
        weighting: Literal["softmax", "clipped"] = "softmax",
        learn_weights: bool = True,
        rope: Literal["before", "after", "off"] = "before",
        **near: int,
    ) -> None:
        """Raises ValueError when block_size is no power of two, a grid has one block, or the normaliser would be one of
        rotated features, whose products have signs."""
        # Read by what Mixer makes of the window: what a gate has multiplied is no mean.
        self.normalised = normalise and not output_gate
        self.rope = resolve_rope(rope, near.get("window", 0))
        super().__init__(site, self.rope == "before", **near)
        check_power_of_two(block_size=block_size)
        self.norm, self.normalise, self.block_size = norm, normalise, block_size
        self.layout = (1, 1, blocks) if site.causal or site.grid == "line" else (frames, rows, columns)
        self.blocks = math.prod(self.layout)
        if self.blocks < 2:
            raise ValueError("frames=1 rows=1 columns=1: one block is plain linear attention; use la")
        self.features = Features.at(site, feature_map)
        if self.rope == "after" and normalise:
            raise ValueError("rope=after: products of rotated features have signs, and so has their sum. Set normalise=false")
        self.start, self.weighting, self.by_distance = start, weighting, by_distance and site.causal
        if learn_weights:
            # One more block where attention is bidirectional, for tokens without a place.
            count = self.blocks if site.causal else self.blocks + 1
            pairs = (count,) * (2 - self.by_distance)
            self.block_logits = nn.Parameter(torch.empty(1 if shared else site.kv_heads, *pairs))
        if norm != "none":
            self.norm_weight = nn.Parameter(torch.empty(site.heads, site.value_dim))
        if dwc and not site.causal:
            axes = 1 if site.grid == "line" else 2
            self.taps = nn.Parameter(torch.empty(site.kv_heads, site.value_dim, *(dwc,) * axes))
            self.depthwise = import_module("..layers.depthwise", __package__).depthwise
        self.output_gate = output_gate_at(site, output_gate)

    @classmethod
    def published_at(cls, site: AttentionSite | None) -> dict[str, Any]:
        """Its images keep the normaliser, without a norm, and start local; DeiT has a convolution of 3 on v."""
        if site is None or site.causal:
            return cls.published
        images = {"start": "paper", "normalise": True, "norm": "none", "output_gate": False, "rope": "before"}
        return cls.published | images | ({} if site.grid == "line" else {"dwc": 3})

    @classmethod
    def parts(cls, site: AttentionSite, options: dict[str, Any]) -> dict[str, str]:
        found = super().parts(site, options)
        found |= {"layers/learned_maps": "learned_map"} if options["feature_map"] in LEARNED else {}
        found |= {"layers/depthwise": "depthwise"} if options["dwc"] and not site.causal else {}
        return found | ({"layers/output_gate": "OutputGate"} if options["output_gate"] else {})

    @classmethod
    def obstacle(cls, site: AttentionSite) -> str | None:
        if site.grid == "window":
            return "windows have too few tokens for blocks of their own"
        return super().obstacle(site)

    @classmethod
    def unused_options(cls, site: AttentionSite, flat: bool) -> dict[str, str]:
        if site.causal:
            found = dict.fromkeys(("frames", "rows", "columns"), "causal attention has blocks of block_size tokens")
            return found | {"dwc": "its convolution is bidirectional, and attention here is causal"}
        found = dict.fromkeys(("block_size", "by_distance"), "attention here is not causal")
        if site.grid == "line":
            return found | dict.fromkeys(("frames", "rows", "columns"), "tokens on a line are cut into `blocks`")
        found |= {"blocks": "tokens on a grid are cut into frames x rows x columns"}
        return found | ({"frames": "images have no frames"} if flat else {})

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "block_logits"):
            init.copy_(self.block_logits, self._start(self.block_logits.device).expand_as(self.block_logits))
        if self.norm != "none":
            init.ones_(self.norm_weight)
        if hasattr(self, "taps"):
            init.zeros_(self.taps)

    def _start(self, device: torch.device) -> Tensor:
        """Weights that fall with the distance of two blocks, or their logarithms for a softmax: [M,M] by row and
        distance (of the last row alone, [M]), or [M+1,M+1] by place. Rows of the M blocks sum to 1."""
        M = self.blocks
        if self.site.causal:
            row, distance = torch.arange(M, device=device)[:, None], torch.arange(M, device=device)
            weights = self._fall(distance.expand(M, M), row) * (distance <= row)
        else:
            ticks = (torch.arange(n, dtype=torch.float32, device=device) for n in self.layout)
            centres = torch.stack([axis.flatten() for axis in torch.meshgrid(*ticks, indexing="ij")], -1)
            distance = torch.cdist(centres, centres)
            weights = self._fall(distance, distance.amax(1, keepdim=True))
        weights = weights / weights.sum(1, keepdim=True)
        if not self.site.causal:  # tokens without a place count like any other block
            outside = torch.full((M + 1, M + 1), 1.0 / M, device=device)
            outside[:M, :M] = weights
            weights = outside
        weights = weights[-1] if self.by_distance else weights
        return weights if self.weighting == "clipped" else weights.clamp_min(1e-5).log()

    def _fall(self, distance: Tensor, farthest: Tensor) -> Tensor:
        """1 - distance / farthest, which the paper starts with, to 0 at the farthest; `local` stays above 0."""
        if self.start == "uniform":
            return torch.ones_like(distance, dtype=torch.float32)
        return (1.0 - distance / (farthest + 1.0 if self.start == "local" else farthest.clamp_min(1))).clamp_min(0.0)

    def weights(self, device: torch.device | None = None) -> Tensor:
        """Causal weights by row and distance [E,M,M], or of block pairs [E,M+1,M+1], in fp32: their mean is 1, or 1/M
        without the normaliser. Those that are not learned are made anew on `device`: a buffer would have to be saved."""
        M, E, learned = self.blocks, self.site.kv_heads, getattr(self, "block_logits", None)
        logits = self._start(device or torch.device("cpu"))[None] if learned is None else learned
        if self.site.causal:
            logits = (logits[:, None] if logits.ndim == 2 else logits).expand(-1, M, M)
        if self.weighting == "clipped":
            w = Clipped.apply(logits.to(torch.promote_types(logits.dtype, torch.float32)))
            if self.site.causal:
                w = w.tril()
            if self.normalise:
                w = w * (torch.arange(1, M + 1, device=w.device)[:, None] if self.site.causal else float(M))
        else:
            total = 1.0 if self.site.causal or not self.normalise else M + 1.0
            w = row_softmax(logits, total, triangle=self.site.causal)
            if self.site.causal and not self.normalise:
                w = w / torch.arange(1, M + 1, device=w.device)[:, None]
        return w.expand(E, -1, -1)

    def _mixed(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, state: MHLAState | None
    ) -> tuple[Tensor, Tensor, MHLAState | None]:
        """`mix`, and the normaliser beside its results."""
        if layout.causal and not self.site.causal:
            raise ValueError(f"{self.site.path}: converted as bidirectional attention, called as causal")
        (q, k, _), beside = self.project(q, k, v, x, layout)
        if layout.causal:
            o, g, state = self._causal(q, k, v, layout, state)
        else:
            o, g = self._bidirectional(q, k, v, layout)
        return self._finished(o, beside, layout), g, state

    def project(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout) -> tuple[Tensors, Tensors]:
        with full_precision(q.device):
            q, k = self._turned(self.features(q, "query"), layout), self._turned(self.features(k, "key"), layout)
        return (q, k, v), (x, v)

    def scan(
        self, inputs: Tensors, layout: TokenLayout, state: MHLAState | None
    ) -> tuple[tuple[Tensor, ...], MHLAState]:
        q, k, v = inputs
        o, g, state = self._causal(q, k, v, layout, state)
        o = o.to(inputs[0].dtype)
        return (o, g) if self.normalised else (o,), state

    def finish(
        self, outputs: tuple[Tensor, ...], beside: Tensors, layout: TokenLayout
    ) -> tuple[Tensor, Tensor | None]:
        o = outputs[0].to(beside[1].dtype)
        return self._finished(o, beside, layout), outputs[1] if self.normalised else None

    def _causal(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, state: MHLAState | None
    ) -> tuple[Tensor, Tensor, MHLAState]:
        """`mix_causal` of features."""
        # Autocast would run the fp32 sums in half precision.
        with full_precision(q.device):
            way: Any = {"C": self.block_size, "normalise": self.normalise, "rows": layout.rows}
            places: Any = {"padding": layout.padding, "segments": layout.segments, "cu": layout.cu_seqlens}
            return mix_causal(q, k, v, self.weights(q.device), **way, **places, state=state)

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """`mix_bidirectional` of features."""
        with full_precision(q.device):
            w = self.weights(q.device)
            if self.site.causal:  # a decoder called as bidirectional: what it has is weights by distance
                index = torch.arange(self.blocks, device=q.device)
                w = w[:, -1, (index[:, None] - index).abs()]
            places, K = self._places(q, layout)
            return mix_bidirectional(q, k, v, w[:, :K, :K], places, self.normalise)

    def _finished(self, o: Tensor, beside: Tensors, layout: TokenLayout) -> Tensor:
        """The norm, the convolution and the gate of o [B,T,H,Dv], where there are any."""
        x, v = beside
        with full_precision(o.device):
            if self.norm == "head":
                o = head_norm(o, self.norm_weight, plain=layout.plain)
            if hasattr(self, "taps"):
                o = o + self._local(v, layout)
        return gated(o, x, self.output_gate)

    def _turned(self, y: Tensor, layout: TokenLayout) -> Tensor:
        """Features [B,T,heads,F], rotated here where that comes after them."""
        rotation = layout.rotation
        if self.rope != "after" or rotation is None:
            return y
        return rotated(y, rotation, self.site.key_dim, plain=layout.plain)

    def _local(self, v: Tensor, layout: TokenLayout) -> Tensor:
        """DWC(V), [B,T,H,Dv], nothing at padding."""
        local: Tensor = self.depthwise(v, self.taps, layout.grid, *layout[:2])
        if layout.padding is not None:
            local = local * layout.padding[:, :, None, None]
        return local.repeat_interleave(self.site.heads // self.site.kv_heads, 2)

    def mix_with_mass(self, *call: Any) -> tuple[Tensor, Tensor, MHLAState | None]:
        o, g, state = self._mixed(*call)
        return o, g, state

    def mix(self, *call: Any) -> tuple[Tensor, Any]:
        o, _, state = self._mixed(*call)
        return o, state

    def _places(self, x: Tensor, layout: TokenLayout) -> tuple[Places, int]:
        """The blocks of tokens x [B,T,..] of bidirectional attention, and how many a document has."""
        padding, segments, grid = layout.padding, layout.segments, layout.grid
        if grid is not None and len(grid.size) > 1:
            return place_grid(grid, self.layout, x, padding, segments), number_of_blocks(grid, self.layout)
        outside = (0, 0) if grid is None else (grid.prefix, grid.suffix)
        K = self.blocks + (not self.site.causal and sum(outside) > 0)
        return place_line(x, self.blocks, K, outside, padding, segments), K

    def state_bytes(self, tokens: int, item: int = 4) -> int:
        Y = self.site.value_dim + self.normalise
        numbers = self.site.kv_heads * self.features.size * Y * (self.blocks + 1)
        return super().state_bytes(tokens, item) + 4 * numbers + 8

    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, o: Tensor, o_teacher: Tensor, layout: TokenLayout | None = None
    ) -> None:
        """Scale the output norm: each head's output comes as near to the teacher's as a factor can bring it. Beside a
        window, whose share is found afterwards, it gets the teacher's root mean square."""
        if self.norm != "none" and self.near is not None:
            give_size(self.norm_weight, o_teacher)
        elif self.norm != "none":
            fit_size(self.norm_weight, o, o_teacher)
