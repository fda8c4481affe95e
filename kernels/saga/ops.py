"""The registered operators of SAGA on the GPU: torch.compile, fake tensors, autograd and flop counts use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..gpu.launch import operator, own_namespace
from .launch import Call, backward, forward, state_width

NAMESPACE = own_namespace(__name__, "saga_forward")

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor key_gate, Tensor value_gate, Tensor output_gate, Tensor? local,"
    " Tensor? query_map, Tensor? key_map, Tensor? weight, Tensor? padding, str phi, float scale, str norm"
)
# Of the inputs, those with gradients.
LEAVES = 10


def _forward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    x = Call(*inputs)
    (B, T, H, D), E, DV = x.q.shape, x.k.shape[2], x.v.shape[3]
    S = x.q.new_empty(B * E, state_width(D, DV, x.phi, x.norm), dtype=torch.float32)
    return x.v.new_empty(B, T, H, DV), S, S.new_empty((B, T, H, DV) if x.norm == "head" else 0)


def _backward_fake(do: Tensor, S: Tensor, y: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(do.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape) for x in inputs[:LEAVES])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.phi, ctx.scale, ctx.norm = inputs
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    S, y, *tensors = ctx.saved_tensors
    if do is None:
        return (None,) * (LEAVES + 4)
    gradients = backward_op(do, S, y, *tensors, ctx.phi, ctx.scale, ctx.norm)
    found = (None if x is None else dx for x, dx in zip(tensors, gradients, strict=False))
    return (*found, None, None, None, None)


saga_op = operator(
    NAMESPACE, f"saga_forward({INPUTS}) -> (Tensor, Tensor, Tensor)", forward, _forward_fake, _save, _differentiate
)
backward_op = operator(
    NAMESPACE,
    f"saga_backward(Tensor do, Tensor S, Tensor y, {INPUTS}) -> ({', '.join(['Tensor'] * LEAVES)})",
    backward,
    _backward_fake,
)


def _forward_flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Multiply-adds counted twice: what tokens add, what they read, and their maps."""
    (B, T, H, D), E, DV, two = q, k[2], v[-1], rest[8] == "hedgehog"
    return 2 * B * T * (E + H) * D * ((1 + two) * DV + two * D)


def _backward_flops(do: Any, S: Any, y: Any, *inputs: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two products for each of the forward, and those of the output again."""
    return 5 * _forward_flops(*inputs) // 2


_packets = getattr(torch.ops, NAMESPACE)
register_flop_formula(_packets.saga_forward)(_forward_flops)
register_flop_formula(_packets.saga_backward)(_backward_flops)
