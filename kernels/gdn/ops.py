"""The registered operators of Gated DeltaNet on the GPU: torch.compile, fake tensors, autograd and flop counts go
through them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .config import configure
from .launch import Call, backward, forward, step
from ..gpu.launch import operator, own_namespace

NAMESPACE = own_namespace(__name__, "gdn_forward")

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? read_gate, Tensor? write_gate, float scale"
FORWARD = (
    f"gdn_forward({INPUTS}, Tensor? segments, Tensor? cu, Tensor? S0)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    f"gdn_backward(Tensor do, Tensor? dS1, {INPUTS}, Tensor? segments, Tensor? cu, Tensor? S0, Tensor b, Tensor b_low,"
    " Tensor Te, Tensor Te_low) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
STEP = f"gdn_step({INPUTS}, Tensor? padding, Tensor S) -> (Tensor, Tensor)"


def _fake_forward(*inputs: Any) -> tuple[Tensor, ...]:
    x = Call(*inputs)
    rows = x.q.shape[0] if x.cu is None else x.cu.shape[0] - 1
    last = x.q.new_empty(rows, x.g.shape[2], x.q.shape[-1], x.v.shape[-1], dtype=torch.float32)
    b, Te = x.g.new_empty(x.g.shape, dtype=torch.float32), (*x.g.shape, configure(x.q, x.v).chunk)
    half = x.q.dtype == torch.bfloat16
    parts = (last.new_empty(n, dtype=torch.bfloat16 if half else torch.float32) for n in (Te, Te if half else (0,)))
    return x.q.new_empty(*x.q.shape[:3], x.v.shape[-1]), last, b, torch.empty_like(b), *parts


def _fake_backward(do: Tensor, dS1: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    x = Call(*inputs[:-4])
    leaves = [torch.empty_like(y, memory_format=torch.contiguous_format) for y in x[:5]]
    leaves += [do.new_empty(0 if y is None else y.shape, dtype=torch.float32 if y is None else y.dtype) for y in x[5:7]]
    return (*leaves, do.new_empty(0 if x.S0 is None else x.S0.shape, dtype=torch.float32))


def _fake_step(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), torch.empty_like(rest[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, segments, cu, S0 = inputs
    ctx.save_for_backward(*tensors, segments, cu, S0, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dS1: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    *inputs, segments, cu, S0, b, b_low, Te, Te_low = ctx.saved_tensors
    q, v = inputs[0], inputs[2]
    if do is None:
        do = q.new_zeros(*q.shape[:3], v.shape[-1])
    *leaves, dread, dwrite, dS0 = backward_op(do, dS1, *inputs, ctx.scale, segments, cu, S0, b, b_low, Te, Te_low)
    optional = (None if y is None else dy for y, dy in zip((*inputs[5:], S0), (dread, dwrite, dS0), strict=True))
    dread, dwrite, dS0 = optional
    return (*leaves, dread, dwrite, None, None, None, dS0)


chunked_op = operator(NAMESPACE, FORWARD, forward, _fake_forward, _save, _differentiate)
backward_op = operator(NAMESPACE, BACKWARD, backward, _fake_backward)
step_op = operator(NAMESPACE, STEP, step, _fake_step)


def _forward_flops(q: Any, k: Any, v: Any, g: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Multiply-adds of the chunk form, counted twice, causal halves not discounted, without the inverse: per state
    head and token K K^T, K S, Te x and K^T u, per query head Q K^T, Q S and P u."""
    (B, T, H, D), DV, E, C = q, v[-1], g[2], 64
    return B * T * (E * (2 * C * (D + DV) + 4 * D * DV) + H * (2 * C * (D + DV) + 2 * D * DV))


def _backward_flops(do: Any, dS1: Any, *inputs: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """The states again, and two products for each of the forward's (X K and X^T K in place of those with Te)."""
    (B, T, _, D), DV, E, C = inputs[0], inputs[2][-1], inputs[3][2], 64
    again = B * T * E * (2 * C * (D + DV) + 4 * D * DV)
    return again + 2 * _forward_flops(*inputs)


_packets = getattr(torch.ops, NAMESPACE)
register_flop_formula(_packets.gdn_forward)(_forward_flops)
register_flop_formula(_packets.gdn_backward)(_backward_flops)
