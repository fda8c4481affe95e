"""Registered operators: torch.compile, fake tensors, autograd and flop counts go through them.

A mechanism describes an operator by the NamedTuple of its inputs, whose annotations give the schema, and four functions
on it, x:

    results(x)                          room for the outputs; on fake tensors the whole of what torch.compile asks
    forward(x, *outputs)          launches that fill them
    backward(x, *gradients, *kept outputs)    gradients of the leaves, anything where an input is None
    flops(x of shapes)                  multiply-adds of forward and backward, counted twice
"""

from __future__ import annotations

import hashlib
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .launch import entry, scratch

KINDS = {Tensor: "Tensor", float: "float", int: "int", bool: "bool", str: "str", torch.dtype: "ScalarType"}
# References: torch removes a library's operators when the library is collected.
_libraries: list[torch.library.Library] = []
# Operator -> its host side, run(*inputs), which makes room and launches: to look at both without a GPU.
HOSTS: dict[str, Callable[..., Any]] = {}
# Tensors that wait for what operators return (`results_into`).
_waiting: ContextVar[list[Tensor] | None] = ContextVar("waiting", default=None)


@contextmanager
def results_into(outputs: Sequence[Tensor]) -> Iterator[None]:
    """In this block operators whose first result is called o write into `outputs` (dense tensors) what has the shape and
    dtype of one; the first goes first. So a server copies nothing."""
    token = _waiting.set(list(outputs))
    try:
        yield
    finally:
        _waiting.reset(token)


def last_results(count: int) -> None:
    """What follows in a block of `results_into` makes the last `count` of its outputs."""
    if waiting := _waiting.get():
        del waiting[:-count]


def _placed(made: Sequence[Tensor], count: int) -> Sequence[Tensor]:
    """Room for results, that of the first `count` in a tensor that waits for one like it where there is any."""
    waiting = _waiting.get()
    if not waiting:
        return made
    found = [*made]
    for n, y in enumerate(found[:count]):
        for i, out in enumerate(waiting):
            if out.shape == y.shape and out.dtype == y.dtype and out.device == y.device:
                found[n] = waiting.pop(i)
                break
    return found


def own_namespace(module: str, operator: str) -> str:
    """An operator namespace that no other module object has taken; the module's name makes it stable across processes.

    When several copies of a file meet in one process (the package, checkpoints, versions), each keeps its own
    `operator`, whatever the order of imports.
    """
    name = "linearize_" + hashlib.sha256(module.encode()).hexdigest()[:12]
    taken = 0
    while hasattr(getattr(torch.ops, f"{name}_{taken}"), operator):
        taken += 1
    return f"{name}_{taken}"


def operator(
    namespace: str,
    name: str,
    arguments: type[Any],
    results: Callable[[Any], Sequence[Tensor]],
    forward: Callable[..., None],
    outputs: str,
    *,
    leaves: str = "",
    kept: str = "",
    backward: Callable[..., Sequence[Tensor | None]] | None = None,
    usual: int = 1,
    flops: Callable[[Any], tuple[int, int]] | None = None,
    changed: str = "",
) -> Any:
    """Register `name`, and with a backward pass `name`_backward, for a GPU and the interpreter's CPU; returns the first.

    `outputs="o S1 | lse"` are names; those after the bar get no gradient. `leaves="q k g?"` are the inputs that get
    gradients; that of one with a question mark is computed only if it is wanted, and `backward` gets a bool for each
    of those after the gradients. `kept` outputs go to the backward pass, as all inputs do. Its kernels compile
    with those of the forward pass, for the gradients of the first `usual` outputs (0: they compile at the first
    backward pass). The gradient of the first output always arrives. `changed` inputs are written in place.
    """
    wanted, free = (part.split() for part in (outputs + "|").split("|")[:2])
    kinds = typing.get_type_hints(arguments)
    marks = {field: f"Tensor({letter}!)" for field, letter in zip(changed.split(), "abcdefgh", strict=False)}
    fields_as = {field: _kind(kind).replace("Tensor", marks.get(field, "Tensor")) for field, kind in kinds.items()}
    last = dict.fromkeys(arguments._field_defaults, "=None")
    schema = ", ".join(f"{kind} {field}{last.get(field, '')}" for field, kind in fields_as.items())
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)

    def run(*values: Any) -> Any:
        x = arguments(*values)
        made = _placed(results(x), len(wanted)) if wanted[0] == "o" else results(x)
        forward(x, *made)
        return _plain(made)

    def fake(*values: Any) -> Any:
        return _plain(results(arguments(*values)))

    if backward is None:
        return _register(library, f"{name}({schema})", len(wanted + free), fake, run)

    names, asked = [leaf.rstrip("?") for leaf in leaves.split()], [x[:-1] for x in leaves.split() if x.endswith("?")]
    fields = list(kinds)
    # Indices among the inputs: of leaves, of leaves on demand, of tensors, of others; then of kept outputs.
    of_leaves, of_asked = ([fields.index(leaf) for leaf in chosen] for chosen in (names, asked))
    tensors = [i for i, kind in enumerate(kinds.values()) if _kind(kind).startswith("Tensor")]
    rest = [i for i in range(len(fields)) if i not in tensors]
    saved, first = [(wanted + free).index(x) for x in kept.split()], len(asked) + len(wanted)
    end = first + len(fields)

    def rehearse(*values: Any) -> None:
        """Run the backward pass on placeholder gradients, only to collect its kernels for compilation."""
        x = arguments(*values)
        made = results(x)
        demands = (x[i] is not None and x[i].requires_grad for i in of_asked)
        sent = (made[i] if i < usual else None for i in range(len(wanted)))
        back(x, *sent, *demands, *(made[i] for i in saved))

    def differentiated(values: tuple[Any, ...]) -> list[Tensor | None]:
        """The leaves, None where a gradient is not wanted."""
        found = [values[first + i] for i in of_leaves]
        for i, demand in zip(of_asked, values[len(wanted) : first], strict=True):
            if not demand:
                found[of_leaves.index(i)] = None
        return found

    def run_back(*values: Any) -> Any:
        x = arguments(*values[first:end])
        pairs = zip(back(x, *values[:first], *values[end:]), differentiated(values), strict=True)
        return _plain([scratch(x[0], 0) if y is None else _like(dy, y) for dy, y in pairs])

    def fake_back(*values: Any) -> Any:
        of, dense = differentiated(values), torch.contiguous_format
        none = values[first]
        return _plain([scratch(none, 0) if y is None else torch.empty_like(y, memory_format=dense) for y in of])

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        made = output if isinstance(output, tuple) else (output,)
        ctx.rest = [inputs[i] for i in rest]
        ctx.save_for_backward(*[made[i] for i in saved], *[inputs[i] for i in tensors])
        if free:
            ctx.mark_non_differentiable(*made[len(wanted) :])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        values, demands, x = ctx.saved_tensors, ctx.needs_input_grad, [None] * len(fields)
        for i, value in (*zip(tensors, values[len(saved) :], strict=True), *zip(rest, ctx.rest, strict=True)):
            x[i] = value
        do = results(arguments(*x))[0].zero_() if gradients[0] is None else gradients[0]
        sent = (do, *gradients[1 : len(wanted)], *[demands[i] for i in of_asked])
        found = backward_op(*sent, *x, *values[: len(saved)])
        out: list[Tensor | None] = [None] * len(fields)
        for i, dy in zip(of_leaves, found if len(names) > 1 else (found,), strict=True):
            if demands[i] and x[i] is not None:
                out[i] = dy
        return tuple(out)

    back = backward
    later = [rehearse] if usual else []
    forward_op = _register(library, f"{name}({schema})", len(wanted + free), fake, run, *later)
    sent_kinds = [f"Tensor d_{wanted[0]}", *(f"Tensor? d_{x}" for x in wanted[1:]), *(f"bool want_{x}" for x in asked)]
    whole = ", ".join([*sent_kinds, schema, *(f"Tensor out_{x}" for x in kept.split())])
    backward_op = _register(library, f"{name}_backward({whole})", len(names), fake_back, run_back)
    # torch.library.custom_op does the same with more Python around it: 87 instead of 69 us for a forward and backward
    # that do nothing, on one core.
    torch.library.register_autograd(f"{namespace}::{name}", differentiate, setup_context=save, lib=library)
    if flops is not None:
        count = flops
        packets = getattr(torch.ops, namespace)
        register_flop_formula(getattr(packets, name))(lambda *shapes, **_: count(arguments(*shapes))[0])
        of_inputs = slice(first, end)
        register_flop_formula(getattr(packets, f"{name}_backward"))(
            lambda *shapes, **_: count(arguments(*shapes[of_inputs]))[1]
        )
    return forward_op


def _kind(annotation: Any) -> str:
    """An annotation as torch's schemas have it."""
    if isinstance(annotation, types.UnionType):
        return KINDS[typing.get_args(annotation)[0]] + "?"
    return KINDS[annotation]


def _like(dy: Any, y: Tensor) -> Tensor:
    """A gradient in the dtype of what it is of, and dense."""
    return (dy if dy.dtype == y.dtype else dy.to(y.dtype)).contiguous()


def _plain(made: Sequence[Tensor]) -> Any:
    """What an operator returns: its tensors, or its only one."""
    return made[0] if len(made) == 1 else tuple(made)


def _register(library: torch.library.Library, signature: str, count: int, fake: Any, run: Any, *later: Any) -> Any:
    """The operator of a signature that returns so many tensors."""
    name = signature.partition("(")[0]
    library.define(f"{signature} -> ({', '.join(['Tensor'] * count)})")
    HOSTS[f"{library.ns}::{name}"] = run
    for device in ("CUDA", "CPU"):
        library.impl(name, entry(run, *later), device)
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, library.ns), name).default
