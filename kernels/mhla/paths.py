"""MHLA's two paths: which one takes a call, and the same results from either."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.arguments import Backend, check_shapes, use_kernels, wants_gradients
from .bidirectional_launch import exceeds_offsets
from .launch import exceeds_grid, runs_on
from .ops import grid_op, mhla_op, step_op
from .places import Places, place_rows, place_sequences
from .eager import (
    GUARD,
    MHLAState,
    after,
    divided,
    fresh_state,
    may_wait,
    mhla_both_ways,
    mhla_causal,
    mhla_step,
    recomputed,
    with_one,
)

# A decode step copies summaries of so many numbers rather than wait to hear whether a block is complete: 64 MB, 30 µs.
COPIED = 1 << 24


def mix_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    C: int,
    normalise: bool,
    padding: Tensor | None,
    segments: Tensor | None,
    cu: Tensor | None,
    state: MHLAState | None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, MHLAState]:
    """`mhla`, and the normaliser [B,T,H] beside its results (1 without `normalise`)."""
    check_shapes(q, k, v, k.shape[2], padding, segments, cu)
    check_weights(k.shape[2], w)
    dtype, T = torch.promote_types(v.dtype, torch.float32), q.shape[1]
    w = w.to(dtype)
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
    rows = q.shape[2] * (q.shape[0] if cu is None else cu.shape[0] - 1)
    obstacle = exceeds_grid(rows) if state is None else "a state goes in"
    triton = _use_triton(backend, q, v, w, True, obstacle)
    if triton and padding is None and segments is None and cu is None:
        inputs = q.to(v.dtype), k.to(v.dtype), v, w.float()
        o, g, _, past, old, current, mixed = mhla_op(*inputs, None, None, None, C, normalise)
        tokens = torch.full((q.shape[0],), T, dtype=torch.long, device=q.device)
        return o, g if normalise else w.new_ones(q.shape[:3]), MHLAState(past, old, current, mixed, tokens)
    seen = None if state is None else state.tokens
    places = place_rows(padding, segments, seen, q, C) if cu is None else place_sequences(cu, seen, T, C)
    if triton:
        o, g, S = _kernels(q, k, v, w, places, normalise)
        return o, g, _after(S.detach(), w.detach(), places, q.shape[-1], v.shape[-1], normalise)

    def form(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, MHLAState]:
        return mhla_causal(q, k, with_one(v, normalise, dtype), w, places, state)

    sums, last = recomputed(form, q, k, v, w)
    return *divided(sums, normalise, padding, v.dtype), last


def mix_both_ways(
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
        o, g, *_ = grid_op(*inputs, places.table, places.size, places.covered, normalise)
        return o, g if normalise else m.new_ones(q.shape[:3])

    def form(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return mhla_both_ways(q, k, with_one(v, normalise, dtype), m.to(dtype), places)

    return divided(recomputed(form, q, k, v, m), normalise, None, v.dtype)


def check_weights(E: int, weights: Tensor) -> None:
    """Raise ValueError unless `weights` are those of E key heads and two blocks at least."""
    M = weights.shape[-1]
    if weights.shape != (E, M, M) or M < 2:
        raise ValueError(f"weights must be [E,M,M] with M >= 2, found {tuple(weights.shape)} for {E} key heads")


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
