"""The registered operators of MHLA on the GPU: torch.compile, fake tensors, autograd and flop counts use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .launch import own_namespace
from .mhla_launch import Call, backward, forward, step

NAMESPACE = own_namespace(__name__, "mhla_forward")

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor w, Tensor? table, Tensor? number, Tensor? document, int places, bool causal,"
    " bool normalise"
)
mhla_op = torch.library.custom_op(
    f"{NAMESPACE}::mhla_forward",
    forward,
    mutates_args=(),
    schema=f"({INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
backward_op = torch.library.custom_op(
    f"{NAMESPACE}::mhla_backward",
    backward,
    mutates_args=(),
    schema=f"(Tensor do, Tensor? dg, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
step_op = torch.library.custom_op(
    f"{NAMESPACE}::mhla_step",
    step,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor w, Tensor? padding, Tensor past, Tensor old, Tensor current,"
    " Tensor mixed, Tensor tokens, int places, bool normalise, bool edge)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@mhla_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    x = Call(*inputs)
    (B, T, H, F), DV, (E, M) = x.q.shape, x.v.shape[-1], x.w.shape[:2]
    o, g = x.q.new_empty(B, T, H, DV), x.q.new_empty((B, T, H) if x.normalise else 0, dtype=torch.float32)
    summaries: tuple[int, ...] = (0,)
    past: tuple[int, ...] = (0,)
    part: tuple[int, ...] = (0,)
    if x.causal and x.table is not None:
        summaries = (x.table.shape[0], E, x.table.shape[1] // x.places, F * (DV + x.normalise))
    elif x.causal:
        past, part = (B, M - 2, E, F, DV + x.normalise), (B, E, F, DV + x.normalise)
    return o, g, *(g.new_empty(shape) for shape in (summaries, past, part, part, part))


@backward_op.register_fake
def _(do: Tensor, dg: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(y, memory_format=torch.contiguous_format) for y in inputs[:4])


@step_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, w: Tensor, padding: Tensor | None, *state: Any) -> tuple[Tensor, ...]:
    past, old, current, mixed, tokens, _, normalise, edge = state
    g = q.new_empty(q.shape[:3] if normalise else 0, dtype=torch.float32)
    past1, old1, mixed1 = (torch.empty_like(x) if edge else x.new_empty(0) for x in (past, old, mixed))
    o = v.new_empty(*q.shape[:3], v.shape[-1])
    return o, g, past1, old1, torch.empty_like(current), mixed1, torch.empty_like(tokens)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.places, ctx.causal, ctx.normalise = inputs
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dg: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, _, v, *_ = tensors = ctx.saved_tensors
    do = q.new_zeros(*q.shape[:3], v.shape[-1]) if do is None else do
    dg = dg if ctx.normalise else None
    gradients = backward_op(do, dg, *tensors, ctx.places, ctx.causal, ctx.normalise)
    return (*gradients, None, None, None, None, None, None)


mhla_op.register_autograd(_differentiate, setup_context=_save)


def _forward_flops(q: Any, k: Any, v: Any, w: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Multiply-adds of the chunk form, counted twice, causal halves not discounted: mixing M^2 F Dv a memory and M
    blocks."""
    (B, T, H, F), DV, (E, M) = q, v[-1], w[:2]
    places, causal = rest[3], rest[4]
    inside = 2 * places * (F + DV) if causal else 0
    return B * T * H * (inside + 2 * F * DV) + 2 * B * T * E * F * DV + 2 * B * E * -(-T // places) * M * F * DV


def _backward_flops(do: Any, dg: Any, *inputs: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """2.5 times the forward, and the forward again."""
    return 7 * _forward_flops(*inputs) // 2


_packets = getattr(torch.ops, NAMESPACE)
register_flop_formula(_packets.mhla_forward)(_forward_flops)
register_flop_formula(_packets.mhla_backward)(_backward_flops)
