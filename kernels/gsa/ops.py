"""The registered operators of GSA on the GPU: torch.compile, fake tensors, autograd and flop counts go through them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .launch import Call, backward, forward, step, step_pool
from ..gpu.launch import operator
from ..gpu.operators import own_namespace

NAMESPACE = own_namespace(__name__, "gsa_forward")

FORWARD = (
    "gsa_forward(Tensor q, Tensor k, Tensor v, Tensor g, float scale, Tensor? segments, Tensor? cu, Tensor? K0,"
    " Tensor? V0) -> (Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "gsa_backward(Tensor do, Tensor? dK1, Tensor? dV1, Tensor q, Tensor k, Tensor v, Tensor g, float scale,"
    " Tensor? segments, Tensor? cu, Tensor? K0, Tensor? V0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
STEP = (
    "gsa_step(Tensor q, Tensor k, Tensor v, Tensor g, float scale, Tensor? padding, Tensor K, Tensor V, Tensor seen)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
STEP_POOL = (
    "gsa_step_pool(Tensor q, Tensor k, Tensor v, Tensor g, float scale, Tensor? padding, Tensor(a!) K, Tensor(b!) V,"
    " Tensor(c!) seen, Tensor rows) -> Tensor"
)


def _fake_forward(*inputs: Any) -> tuple[Tensor, ...]:
    x = Call(*inputs)
    rows, (E, M) = x.q.shape[0] if x.cu is None else x.cu.shape[0] - 1, x.g.shape[2:]
    last = (x.q.new_empty(rows, E, M, dim, dtype=torch.float32) for dim in (x.q.shape[-1], x.v.shape[-1]))
    return (x.q.new_empty(*x.q.shape[:3], x.v.shape[-1]), *last)


def _fake_backward(do: Tensor, dK1: Tensor | None, dV1: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    x = Call(*inputs)
    leaves = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in x[:4])
    return (*leaves, *(do.new_empty(0 if y is None else y.shape, dtype=torch.float32) for y in (x.K0, x.V0)))


def _fake_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, padding: Tensor | None, *state: Tensor
) -> tuple[Tensor, ...]:
    return (q.new_empty(*q.shape[:3], v.shape[-1]), *(torch.empty_like(x) for x in state))


def _fake_step_pool(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, g, ctx.scale, segments, cu, K0, V0 = inputs
    ctx.save_for_backward(q, k, v, g, segments, cu, K0, V0)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dK1: Tensor | None, dV1: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, g, segments, cu, K0, V0 = ctx.saved_tensors
    if do is None:
        do = q.new_zeros(*q.shape[:3], v.shape[-1])
    *inputs, dK0, dV0 = backward_op(do, dK1, dV1, q, k, v, g, ctx.scale, segments, cu, K0, V0)
    return (*inputs, None, None, None, None if K0 is None else dK0, None if V0 is None else dV0)


chunked_op = operator(NAMESPACE, FORWARD, forward, _fake_forward, _save, _differentiate)
backward_op = operator(NAMESPACE, BACKWARD, backward, _fake_backward)
step_op = operator(NAMESPACE, STEP, step, _fake_step)
pool_op = operator(NAMESPACE, STEP_POOL, step_pool, _fake_step_pool)


def _forward_flops(q: Any, k: Any, v: Any, g: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Multiply-adds of the chunk form, counted twice, causal halves not discounted: 4 C (D + M) + 8 D M a token."""
    (B, T, H, D), DV, M, C = q, v[-1], g[-1], 64
    return B * T * H * (2 * C * (D + DV + 2 * M) + 4 * M * (D + DV))


def _backward_flops(do: Any, dK1: Any, dV1: Any, *inputs: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """2.5 times the forward, and the forward's logits again."""
    return 3 * _forward_flops(*inputs)


_packets = getattr(torch.ops, NAMESPACE)
register_flop_formula(_packets.gsa_forward)(_forward_flops)
register_flop_formula(_packets.gsa_backward)(_backward_flops)
