"""The registered operators of linear attention on the GPU, which la and retnet share: torch.compile, fake tensors,
autograd and flop counts go through them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..gpu.launch import own_namespace
from .bidirectional_launch import Both, both_backward, both_forward
from .config import configure
from .launch import Call, backward, forward, state_width, step

NAMESPACE = own_namespace(__name__, "linear_forward")

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? a, Tensor? b, Tensor? log_decay, Tensor? read, Tensor? write, float scale,"
    " bool unit, str precision, Tensor? segments, Tensor? padding, Tensor? cu, Tensor? first, bool keep"
)
BOTH = "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, bool unit, str precision, Tensor? padding"
SAVED = "Tensor o, Tensor g, Tensor rq, Tensor rk, Tensor S, Tensor n"


def _outputs(count: int) -> str:
    return f" -> ({', '.join(['Tensor'] * count)})"


def _register(name: str, function: Any, schema: str) -> Any:
    return torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema=schema)


chunked_op = _register("linear_forward", forward, f"({INPUTS})" + _outputs(7))
backward_op = _register(
    "linear_backward", backward, f"(Tensor do, bool slopes, Tensor? dg, Tensor? dlast, {SAVED}, {INPUTS})" + _outputs(7)
)
both_op = _register("linear_both_forward", both_forward, f"({BOTH})" + _outputs(4))
both_backward_op = _register(
    "linear_both_backward",
    both_backward,
    f"(Tensor do, bool slopes, Tensor? dg, Tensor o, Tensor g, Tensor rq, Tensor total, {BOTH})" + _outputs(4),
)
step_op = _register(
    "linear_step",
    step,
    "(Tensor q, Tensor k, Tensor v, Tensor? a, Tensor? b, Tensor? log_decay, Tensor? read, Tensor? write, float scale,"
    " bool unit, Tensor? padding, Tensor S, Tensor? z, Tensor? u, Tensor? tokens)" + _outputs(6),
)


# ---------------------------------------------------------------- shapes


def _new(q: Tensor, *shape: int) -> Tensor:
    return q.new_empty(shape, dtype=torch.float32)


@chunked_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    x = Call(*inputs)
    (B, T, H, D), DV, normalised = x.q.shape, x.v.shape[-1], x.a is not None
    E = x.k.shape[2] if x.log_decay is None else x.log_decay.shape[0]
    rows = B if x.cu is None else x.cu.shape[0] - 1
    lengths = (_new(x.q, B, n if x.unit else 0, T) for n in (H, E))
    last = _new(x.q, rows, E, state_width(D, DV, normalised))
    stretch = configure(x.q, x.v, x.precision, normalised).stretch
    slots = (B * -(-T // stretch) if x.cu is None else T // stretch + 2 * rows) if x.keep else 0
    S = x.q.new_empty(slots, E, D * DV, dtype=torch.bfloat16 if x.q.dtype == torch.bfloat16 else torch.float32)
    n = _new(x.q, slots, E, D + DV + 4 if normalised else 0)
    return x.q.new_empty(B, T, H, DV), _new(x.q, B, T, H if normalised else 0), *lengths, last, S, n


@backward_op.register_fake
def _(
    do: Tensor,
    slopes: bool,
    dg: Any,
    dlast: Any,
    o: Tensor,
    g: Tensor,
    rq: Tensor,
    rk: Tensor,
    S: Tensor,
    n: Tensor,
    *inputs: Any,
) -> tuple[Tensor, ...]:
    x = Call(*inputs)
    return (
        *(torch.empty_like(y, memory_format=torch.contiguous_format) for y in x[:3]),
        _new(x.q, x.q.shape[2] if slopes else 0),
        *(do.new_empty(0) if y is None else torch.empty_like(y) for y in (x.read, x.write)),
        _new(x.q, *(0,) if x.first is None else x.first.shape),
    )


@both_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    x = Both(*inputs)
    (B, T, H, D), E, DV = x.q.shape, x.k.shape[2], x.v.shape[-1]
    lengths = _new(x.q, B, H if x.unit else 0, T)
    return x.q.new_empty(B, T, H, DV), _new(x.q, B, T, H), lengths, _new(x.q, B, E, state_width(D, DV, True))


@both_backward_op.register_fake
def _(
    do: Tensor, slopes: bool, dg: Any, o: Tensor, g: Tensor, rq: Tensor, total: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    x = Both(*inputs)
    leaves = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in x[:3])
    return (*leaves, _new(x.q, x.q.shape[2] if slopes else 0))


@step_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    state = (q.new_empty(0) if y is None else torch.empty_like(y) for y in rest[-4:])
    return q.new_empty(*q.shape[:3], v.shape[-1]), _new(q, *q.shape[:3]), *state


# ---------------------------------------------------------------- gradients


CONSTANTS = ("scale", "unit", "precision", "keep")
TENSORS = tuple(name for name in Call._fields if name not in CONSTANTS)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x = Call(*inputs)
    ctx.constants = {name: getattr(x, name) for name in CONSTANTS}
    ctx.save_for_backward(*output[:4], *output[5:], *(getattr(x, name) for name in TENSORS))
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, do: Any, dg: Any, drq: Any, drk: Any, dlast: Any, dS: Any, dn: Any
) -> tuple[Tensor | None, ...]:
    o, g, rq, rk, S, n, *tensors = ctx.saved_tensors
    x = Call(**dict(zip(TENSORS, tensors, strict=True)), **ctx.constants)
    do = torch.zeros_like(o) if do is None else do
    slopes, dg = any(ctx.needs_input_grad[3:5]), dg if x.a is not None else None
    dq, dk, dv, along, *others = backward_op(do, slopes, dg, dlast, o, g, rq, rk, S, n, *x)
    ends = _slopes(x.a, x.b, along, g, dg) if slopes else (None, None)
    named = dict(zip(("q", "k", "v", "a", "b", "read", "write", "first"), (dq, dk, dv, *ends, *others), strict=True))
    return tuple(
        y if wanted else None for y, wanted in zip(map(named.get, Call._fields), ctx.needs_input_grad, strict=True)
    )


def _slopes(a: Any, b: Any, along: Tensor, g: Tensor, dg: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of a and b [H] from sum q.dq = b db [H]: the output depends on b/a only, and g grows with both."""
    mass = 0.0 if dg is None else (g * dg).sum((0, 1))
    return (mass - along) / a, along / b


def _save_both(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.unit, ctx.precision, padding = inputs
    ctx.save_for_backward(*output, *tensors, padding)
    ctx.set_materialize_grads(False)


def _differentiate_both(ctx: Any, do: Any, dg: Any, drq: Any, dtotal: Any) -> tuple[Tensor | None, ...]:
    o, g, rq, total, *tensors, padding = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    wanted = ctx.needs_input_grad
    slopes = any(wanted[3:5])
    *found, along = both_backward_op(do, slopes, dg, o, g, rq, total, *tensors, ctx.unit, ctx.precision, padding)
    found += _slopes(tensors[3], tensors[4], along, g, dg) if slopes else (None, None)
    return (*(y if want else None for y, want in zip(found, wanted, strict=False)), None, None, None)


chunked_op.register_autograd(_differentiate, setup_context=_save)
both_op.register_autograd(_differentiate_both, setup_context=_save_both)


# ---------------------------------------------------------------- multiply-adds, counted twice


def _forward_flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Of the chunk form, causal halves not discounted: 2 C (D + Dv) + 4 D Dv a token and head."""
    (B, T, H, D), DV, C = q, v[-1], 64
    return B * T * H * (2 * C * (D + DV) + 4 * D * DV)


def _backward_flops(*inputs: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """2 C (3 D + 2 Dv) + 10 D Dv."""
    q, _, v = inputs[10:13]
    (B, T, H, D), DV, C = q, v[-1], 64
    return B * T * H * (2 * C * (3 * D + 2 * DV) + 10 * D * DV)


def _both_flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """4 D Dv a token and head."""
    return 4 * q[0] * q[1] * q[2] * q[3] * v[-1]


def _both_backward_flops(do: Any, slopes: Any, dg: Any, o: Any, g: Any, rq: Any, total: Any, q: Any, k: Any, v: Any,
                         *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:  # fmt: skip
    """Twice that: four products for two."""
    return 2 * _both_flops(q, k, v)


_packets = getattr(torch.ops, NAMESPACE)
register_flop_formula(_packets.linear_forward)(_forward_flops)
register_flop_formula(_packets.linear_backward)(_backward_flops)
register_flop_formula(_packets.linear_both_forward)(_both_flops)
register_flop_formula(_packets.linear_both_backward)(_both_backward_flops)
