"""What tests of Triton kernels share: clean processes, compiling without a GPU, what compiled code may not do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def run_script(*arguments: str, interpret: bool = True) -> str:
    """A file, or code given by -c, in a clean process: TRITON_INTERPRET must be set before triton is first imported."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]),
        "TRITON_INTERPRET": "1" if interpret else "0",
    }
    done = subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


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


# ---------------------------------------------------------------- cases, on the script side


def masks(case: dict[str, Any], B: int, T: int) -> dict[str, torch.Tensor | None]:
    """`padding` left, right, or all of a row; `segments` of so many tokens, numbers coming back; `cu_seqlens`."""
    padding = torch.ones(B, T, dtype=torch.bool)
    if case.get("padding") == "left":
        padding[0, : T // 3 + 1] = False
    elif case.get("padding") == "right":
        padding[-1, T // 2 :] = False
    elif case.get("padding") == "all":
        padding[0] = False
    return {
        "padding": padding if "padding" in case else None,
        "segments": torch.arange(T).expand(B, T) // case["segments"] % 2 if "segments" in case else None,
        "cu_seqlens": torch.tensor(case["cu"], dtype=torch.int32) if "cu" in case else None,
    }


def largest_errors(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest error over largest reference value (never below 0.1: exact zeros count absolutely); inf: NaN."""
    errors = {}
    for name, value in reference.items():
        error = float((ours[name].double() - value.double()).abs().max() / value.abs().max().clamp_min(0.1))
        errors[name] = error if ours[name].double().isfinite().all() else float("inf")
    return errors
