"""What tests of Triton kernels share: its interpreter, compiling without a GPU, what compiled code may not do."""

from __future__ import annotations

import dataclasses
import inspect
import multiprocessing
import os
import re
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

# ---------------------------------------------------------------- the interpreter


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    make_quick(interpreter)
    seek_no_overflow(interpreter.interpreter_builder)
    multiply_bf16(interpreter)


def make_quick(interpreter: Any) -> None:
    """Put `_patch_builtin` into Triton's interpreter where that is as it was when this was written; else leave it."""
    known = {
        "_patch_builtin": ["pkg", "builder", "scope"],
        "_patch_attr": ["obj", "name", "member", "builder", "scope"],
    }
    if all(
        hasattr(interpreter, name) and list(inspect.signature(getattr(interpreter, name)).parameters) == parameters
        for name, parameters in known.items()
    ):
        interpreter._patch_builtin = _patch_builtin


def seek_no_overflow(builder: Any) -> None:
    """The interpreter computes for each sum and product of integers whether it overflowed, a third of all time, and
    says so only in a debug mode that no kernel asks for."""
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Triton's own, which at each call of a function looks at every member of its language: a third of all time.

    A function that another one calls finds them patched already, all or none.
    """
    from triton.language.core import is_builtin
    from triton.runtime.interpreter import _patch_attr

    names = _builtins(package)
    if names and is_builtin(getattr(package, names[0])):
        for name in names:
            _patch_attr(package, name, getattr(package, name), builder, scope)


@cache
def _builtins(package: Any) -> list[str]:
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


@cache
def _interpreter() -> ProcessPoolExecutor:
    """A process of its own: it must be set before triton is imported, which the process of a test may have done."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _interpret)


def interpreted(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) where Triton's interpreter runs kernels on the CPU, in a process that these tests share."""
    return _interpreter().submit(function, *arguments).result(500)


def in_forks(function: Callable[[str], None], cases: Sequence[str]) -> None:
    """function(case) in a forked child each: a process knows one driver of triton, and imports take seconds."""
    for case in cases:
        child = os.fork()
        if child == 0:
            try:
                function(case)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0, case


def multiply_bf16(interpreter: Any) -> None:
    """Let the interpreter multiply bf16, and round to it: it keeps bf16 as integers, multiplies those, and cuts digits
    off. What else a kernel computes in bf16 stays wrong."""
    from triton.language import bfloat16, float32

    convert, multiply = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def converted(x: Any, source: Any, target: Any, *mode: Any) -> Any:
        if (source, target) == (bfloat16, float32):
            return (x.astype(np.uint32) << 16).view(np.float32)
        if (source, target) != (float32, bfloat16):
            return convert(x, source, target, *mode)
        bits = x.view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(x), 0x7FFF, nearest).astype(np.uint16)

    def product(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [self.cast_impl(x, float32) if x.dtype.scalar == bfloat16 else x for x in (a, b)]
        return multiply(self, *wide, *rest)

    interpreter._convert_float = converted
    interpreter.InterpreterBuilder.create_dot = product


# ---------------------------------------------------------------- cases


def complaints(
    compare: Callable[[dict[str, Any]], dict[str, float]], cases: list[dict[str, Any]], tolerance: dict[str, float]
) -> list[str]:
    """Cases whose largest error, interpreted, is beyond the tolerance of their `dtype` times their `slack`."""
    bad = []
    for case, errors in zip(cases, interpreted(_each, compare, cases), strict=True):
        most = tolerance[case.get("dtype", "float32")] * case.get("slack", 1)
        bad += [] if max(errors.values()) <= most else [f"{case}: {errors}"]
    return bad


def _each(function: Callable[..., Any], cases: list[Any]) -> list[Any]:
    return [function(case) for case in cases]


def masks(case: dict[str, Any], B: int, T: int) -> dict[str, torch.Tensor]:
    """`padding` left, right, all of a row, or a row of each; `segments` of so many tokens, whose numbers come back;
    `cu_seqlens`."""
    made = {}
    if "padding" in case:
        made["padding"] = padding = torch.ones(B, T, dtype=torch.bool)
        ways = {"left": [(0, slice(T // 3 + 1))], "right": [(-1, slice(T // 2, T))], "all": [(0, slice(T))]}
        ways["each"] = [*ways["left"], (1, slice(T)), *ways["right"]]
        for hidden in ways[case["padding"]]:
            padding[hidden] = False
    if "segments" in case:
        made["segments"] = torch.arange(T).expand(B, T) // case["segments"] % 2
    if "cu" in case:
        made["cu_seqlens"] = torch.tensor(case["cu"], dtype=torch.int32)
    return made


def largest_errors(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest error over largest reference value (never below 0.1: exact zeros count absolutely); inf: NaN."""
    errors = {}
    for name, value in reference.items():
        error = float((ours[name].double() - value.double()).abs().max() / value.abs().max().clamp_min(0.1))
        errors[name] = error if ours[name].double().isfinite().all() else float("inf")
    return errors


def gradients(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], arrives: torch.Tensor
) -> list[torch.Tensor]:
    """Output of a function, and what its inputs get when `arrives`, cast to its dtype, arrives at it."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, arrives.to(o.dtype))]


def flops_whichever_way(loss: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> int:
    """What FlopCounterMode counts forward and backward.

    Raises AssertionError unless the gradients compiled without a break and under checkpointing are the same bits.
    """
    from torch.utils.checkpoint import checkpoint
    from torch.utils.flop_counter import FlopCounterMode

    plain = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    again = torch.autograd.grad(checkpoint(loss, *inputs, use_reentrant=False), inputs)
    for a, b, c in zip(plain, compiled, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    with FlopCounterMode(display=False) as counter:
        loss(*inputs).backward()
    return counter.get_total_flops()


# ---------------------------------------------------------------- compiled for real, without a GPU


def compile_kernel(
    kernel: Any, capability: int, constants: dict[str, Any], kinds: dict[str, str], warps: int, stages: int = 1
) -> Any:
    """A kernel compiled for a capability; triton brings its own assembler.

    `constants` may hold more than the kernel takes; `kinds` are types of arguments, fp32 pointers (p_...) and i32 else.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {key: "*fp32" if key.startswith("p_") else "i32" for key in kernel.arg_names}
    types |= {key: kind for key, kind in kinds.items() if key in types}
    types |= dict.fromkeys(constants, "constexpr")
    places = {key: (kernel.arg_names.index(key),) for key in kernel.arg_names}
    aligned = [key for key in types if key.startswith(("p_", "s_")) and key not in constants]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={places[key]: value for key, value in constants.items()},
        attrs={places[key]: [["tt.divisibility", 16]] for key in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    return compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)


def transposed_products(compiled: Any) -> list[str]:
    """Transposes of what comes out of a product, which triton 3.4 to 3.7 miscompile in some products on Hopper.

    Raises AssertionError when there are no transposes at all: then nothing was looked at.
    """
    made: dict[str, tuple[str, list[str]]] = {}
    transposes, bad = 0, []
    # Line by line: the two sides of an `if` may use the same names.
    for line in compiled.asm["ttir"].splitlines():
        made |= dict.fromkeys(re.findall(r"(%\w+) = %", line.partition("iter_args(")[2]), ("block argument", []))
        found = re.match(r"\s*(%[\w#]+)(?::\d+)? = (?:\"?)([\w.]+)(.*)", line)
        if not found:
            continue
        made[found[1]] = found[2], re.findall(r"%[\w]+", found[3].split(" loc(")[0])
        if found[2] == "tt.trans":
            transposes += 1
            bad += [found[1]] * _comes_from_a_product(found[1], made)
    assert transposes
    return bad


def _comes_from_a_product(value: str, made: dict[str, tuple[str, list[str]]]) -> bool:
    queue, seen = [value], {value}
    while queue:
        kind, operands = made.get(queue.pop(), ("block argument", []))
        if kind == "tt.dot":
            return True
        if kind not in ("tt.load", "scf.for", "scf.if"):
            queue += [x for x in operands if x not in seen]
            seen.update(operands)
    return False
