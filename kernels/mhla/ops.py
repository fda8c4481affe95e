"""The registered operators of MHLA on the GPU: torch.compile, fake tensors, autograd and flop counts use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..gpu.launch import operator, own_namespace
from .bidirectional_launch import GridCall, grid_backward, grid_forward
from .launch import Call, backward, forward, step

NAMESPACE = own_namespace(__name__, "mhla_forward")

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor w, Tensor? table, Tensor? number, Tensor? document, int places"
FORWARD = f"mhla_forward({INPUTS}, bool normalise) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
BACKWARD = f"mhla_backward(Tensor do, Tensor? dg, {INPUTS}, bool normalise) -> (Tensor, Tensor, Tensor, Tensor)"
GRID = "Tensor q, Tensor k, Tensor v, Tensor m, Tensor table, int places, bool covered, bool normalise"
GRID_FORWARD = f"mhla_grid_forward({GRID}) -> (Tensor, Tensor, Tensor, Tensor)"
GRID_BACKWARD = (
    f"mhla_grid_backward(Tensor do, Tensor? dg, {GRID}, Tensor g, Tensor S, Tensor P)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
STEP = (
    "mhla_step(Tensor q, Tensor k, Tensor v, Tensor w, Tensor? padding, Tensor past, Tensor old, Tensor current,"
    " Tensor mixed, Tensor tokens, int places, bool normalise, bool edge)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _fake_forward(*inputs: Any) -> tuple[Tensor, ...]:
    x = Call(*inputs)
    (B, T, H, F), DV, (E, M) = x.q.shape, x.v.shape[-1], x.w.shape[:2]
    o, g = x.q.new_empty(B, T, H, DV), x.q.new_empty((B, T, H) if x.normalise else 0, dtype=torch.float32)
    summaries: tuple[int, ...] = (0,)
    past: tuple[int, ...] = (0,)
    part: tuple[int, ...] = (0,)
    if x.table is not None:
        summaries = (x.table.shape[0], E, x.table.shape[1] // x.places, F * (DV + x.normalise))
    else:
        past, part = (B, M - 2, E, F, DV + x.normalise), (B, E, F, DV + x.normalise)
    return o, g, *(g.new_empty(shape) for shape in (summaries, past, part, part, part))


def _fake_grid(*inputs: Any) -> tuple[Tensor, ...]:
    x = GridCall(*inputs)
    (B, T, H, F), DV, (R, places) = x.q.shape, x.v.shape[-1], x.table.shape
    o, g = x.v.new_empty(B, T, H, DV), x.q.new_empty((B, T, H) if x.normalise else 0, dtype=torch.float32)
    shape = R, x.m.shape[0], places // x.places, F * (DV + x.normalise)
    return o, g, g.new_empty(shape), g.new_empty(shape)


def _fake_backward(do: Tensor, dg: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(y, memory_format=torch.contiguous_format) for y in inputs[:4])


def _fake_step(q: Tensor, k: Tensor, v: Tensor, w: Tensor, padding: Tensor | None, *state: Any) -> tuple[Tensor, ...]:
    past, old, current, mixed, tokens, _, normalise, edge = state
    g = q.new_empty(q.shape[:3] if normalise else 0, dtype=torch.float32)
    past1, old1, mixed1 = (torch.empty_like(x) if edge else x.new_empty(0) for x in (past, old, mixed))
    o = v.new_empty(*q.shape[:3], v.shape[-1])
    return o, g, past1, old1, torch.empty_like(current), mixed1, torch.empty_like(tokens)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.places, ctx.normalise = inputs
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dg: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    do, dg = _arriving(do, dg, tensors[0], tensors[2], ctx.normalise)
    return (*backward_op(do, dg, *tensors, ctx.places, ctx.normalise), None, None, None, None, None)


def _save_grid(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.places, ctx.covered, ctx.normalise = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _differentiate_grid(ctx: Any, do: Tensor | None, dg: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    *tensors, g, S, P = ctx.saved_tensors
    do, dg = _arriving(do, dg, tensors[0], tensors[2], ctx.normalise)
    gradients = grid_backward_op(do, dg, *tensors, ctx.places, ctx.covered, ctx.normalise, g, S, P)
    return (*gradients, None, None, None, None)


def _arriving(
    do: Tensor | None, dg: Tensor | None, q: Tensor, v: Tensor, normalise: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of o, 0 where none came, and of the normaliser where there is one."""
    return v.new_zeros(*q.shape[:3], v.shape[-1]) if do is None else do, dg if normalise else None


mhla_op = operator(NAMESPACE, FORWARD, forward, _fake_forward, _save, _differentiate)
backward_op = operator(NAMESPACE, BACKWARD, backward, _fake_backward)
grid_op = operator(NAMESPACE, GRID_FORWARD, grid_forward, _fake_grid, _save_grid, _differentiate_grid)
grid_backward_op = operator(NAMESPACE, GRID_BACKWARD, grid_backward, _fake_backward)
step_op = operator(NAMESPACE, STEP, step, _fake_step)


def _forward_flops(q: Any, k: Any, v: Any, w: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Multiply-adds of the chunk form, counted twice, causal halves not discounted: mixing M^2 F Dv a memory and M
    blocks."""
    (B, T, H, F), DV, places = q, v[-1], rest[3]
    return B * T * H * 2 * places * (F + DV) + _grid_flops(q, k, v, w, None, places)


def _grid_flops(q: Any, k: Any, v: Any, w: Any, table: Any, places: int, *rest: Any, out_shape: Any = None) -> int:
    """The same with nothing inside of blocks."""
    (B, T, H, F), DV, (E, M) = q, v[-1], w[:2]
    return B * T * H * 2 * F * DV + 2 * B * T * E * F * DV + 2 * B * E * -(-T // places) * M * F * DV


def _backward_flops(do: Any, dg: Any, *inputs: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """2.5 times the forward, and the forward again."""
    return 7 * _forward_flops(*inputs) // 2


def _grid_backward_flops(do: Any, dg: Any, *inputs: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two and a half times the forward: P do, D, R v and R^T k, mixing, and the weights' gradient."""
    return 5 * _grid_flops(*inputs[:6]) // 2


_packets = getattr(torch.ops, NAMESPACE)
register_flop_formula(_packets.mhla_forward)(_forward_flops)
register_flop_formula(_packets.mhla_backward)(_backward_flops)
register_flop_formula(_packets.mhla_grid_forward)(_grid_flops)
register_flop_formula(_packets.mhla_grid_backward)(_grid_backward_flops)
