"""The registered operators of GLA on the GPU: torch.compile, fake tensors, autograd and flop counts go through them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .launch import Call, backward, forward, step
from ..gpu.launch import operator, own_namespace

NAMESPACE = own_namespace(__name__, "gla_forward")

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, float scale, Tensor? segments, Tensor? cu, Tensor? S0, Tensor? read_gate,"
    " Tensor? write_gate"
)
FORWARD = f"gla_forward({INPUTS}) -> (Tensor, Tensor)"
BACKWARD = f"gla_backward(Tensor do, Tensor? dS1, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
STEP = (
    "gla_step(Tensor q, Tensor k, Tensor v, Tensor g, float scale, Tensor? padding, Tensor S, Tensor? read_gate,"
    " Tensor? write_gate) -> (Tensor, Tensor)"
)


def _fake_forward(*inputs: Any) -> tuple[Tensor, ...]:
    x = Call(*inputs)
    rows, (E, D), DV = x.q.shape[0] if x.cu is None else x.cu.shape[0] - 1, x.g.shape[2:], x.v.shape[-1]
    return x.q.new_empty(*x.q.shape[:3], DV), x.q.new_empty(rows, E, D, DV, dtype=torch.float32)


def _fake_backward(do: Tensor, dS1: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    x = Call(*inputs)
    leaves = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in x[:4])
    dS0 = do.new_empty(0 if x.S0 is None else x.S0.shape, dtype=torch.float32)
    gates = (do.new_empty(0, dtype=torch.float32) if y is None else torch.empty_like(y) for y in x[8:])
    return (*leaves, dS0, *gates)


def _fake_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, padding: Tensor | None, S: Tensor,
      *gates: Tensor | None) -> tuple[Tensor, ...]:  # fmt: skip
    return q.new_empty(*q.shape[:3], v.shape[-1]), torch.empty_like(S)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, g, ctx.scale, *rest = inputs
    ctx.save_for_backward(q, k, v, g, *rest)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dS1: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, g, segments, cu, S0, read, write = ctx.saved_tensors
    if do is None:
        do = q.new_zeros(*q.shape[:3], v.shape[-1])
    *inputs, dS0, dread, dwrite = backward_op(do, dS1, q, k, v, g, ctx.scale, segments, cu, S0, read, write)
    optional = ((S0, dS0), (read, dread), (write, dwrite))
    return (*inputs, None, None, None, *(None if x is None else dx for x, dx in optional))


chunked_op = operator(NAMESPACE, FORWARD, forward, _fake_forward, _save, _differentiate)
backward_op = operator(NAMESPACE, BACKWARD, backward, _fake_backward)
step_op = operator(NAMESPACE, STEP, step, _fake_step)


def _forward_flops(q: Any, k: Any, v: Any, g: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Multiply-adds of the chunk form, counted twice, causal halves not discounted: 2 C (D + Dv) + 4 D Dv a token."""
    (B, T, H, D), DV, C = q, v[-1], 64
    return B * T * H * (2 * C * (D + DV) + 4 * D * DV)


def _backward_flops(do: Any, dS1: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """2 C (3 D + 2 Dv) + 10 D Dv a token."""
    (B, T, H, D), DV, C = q, v[-1], 64
    return B * T * H * (2 * C * (3 * D + 2 * DV) + 10 * D * DV)


_packets = getattr(torch.ops, NAMESPACE)
register_flop_formula(_packets.gla_forward)(_forward_flops)
register_flop_formula(_packets.gla_backward)(_backward_flops)
