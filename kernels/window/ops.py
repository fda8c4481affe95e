"""The registered operators of the window on the GPU: torch.compile, fake tensors, autograd and flop counts use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..gpu.launch import operator, own_namespace
from .launch import backward, forward

NAMESPACE = own_namespace(__name__, "window_forward")

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? begin, Tensor? end, int window, int sink, float scale"
FORWARD = f"window_forward({INPUTS}) -> (Tensor, Tensor, Tensor)"
BACKWARD = (
    f"window_backward(Tensor do, Tensor? dmass, Tensor o, Tensor mass, Tensor low, {INPUTS})"
    " -> (Tensor, Tensor, Tensor)"
)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    o = v.new_empty(*q.shape[:3], v.shape[3])
    return o, q.new_empty(q.shape[:3], dtype=torch.float32), o.new_empty(o.shape if o.dtype.itemsize == 2 else 0)


def _backward_fake(
    do: Tensor, dmass: Tensor | None, o: Tensor, mass: Tensor, low: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(y.new_empty(y.shape) for y in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.window, ctx.sink, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dmass: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    o, *tensors = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    return (*backward_op(do, dmass, o, *tensors, ctx.window, ctx.sink, ctx.scale), None, None, None, None, None)


window_op = operator(NAMESPACE, FORWARD, forward, _forward_fake, _save, _differentiate)
backward_op = operator(NAMESPACE, BACKWARD, backward, _backward_fake)


def _forward_flops(
    q: Any, k: Any, v: Any, begin: Any, end: Any, window: int, sink: int, *rest: Any, out_shape: Any = None
) -> int:
    """Multiply-adds counted twice: every query meets a window and a sink, or all tokens where those are fewer."""
    B, T, H, D = q
    return 2 * B * T * H * min(window + sink, T) * (D + v[-1])


def _backward_flops(
    do: Any, dmass: Any, o: Any, mass: Any, low: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None
) -> int:
    """Two products for each of the forward; what is computed again does not count."""
    return 2 * _forward_flops(q, k, v, *rest)


_packets = getattr(torch.ops, NAMESPACE)
register_flop_formula(_packets.window_forward)(_forward_flops)
register_flop_formula(_packets.window_backward)(_backward_flops)
