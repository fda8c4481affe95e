"""The kernel of a decode step beside the exact window, in Triton's interpreter, against the PyTorch path in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_tools import compile_kernel, complaints, interpreted, largest_errors, transposed_products

# Largest error over the largest reference value.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3}

# Unset sizes are B2 H4 E2 D16 DV16 W6 S2; `before` tokens fill the ring, `beside` is what stands beside the window.
CASES: list[dict[str, Any]] = [
    *({"before": before, "beside": beside} for before, beside in ((1, None), (5, "share"), (7, "mass"), (30, "share"))),
    {"before": 3, "W": 1, "S": 0, "H": 3, "E": 1, "D": 20, "DV": 40, "beside": "share"},
    {"before": 90, "W": 70, "S": 9, "H": 2, "beside": "mass"},
    {"before": 6, "padding": True, "beside": "share"},
    {"before": 9, "padding": True, "S": 12},
    {"before": 9, "dtype": "float16", "beside": "share"},
]


def test_steps_match_the_reference() -> None:
    assert complaints(compare, CASES, TOLERANCE) == []


def test_the_operator_is_one_of_torch() -> None:
    interpreted(check_operator)


@pytest.mark.parametrize(("D", "dtype"), [(128, "bf16"), (256, "fp32")])
def test_it_compiles_for_a_gpu_and_fits_the_smallest(D: int, dtype: str) -> None:
    from linearize_kernels.gpu.launch import width
    from linearize_kernels.window import step

    bytes_each = {"bf16": 2, "fp32": 4}[dtype]
    values = {"D": D, "DV": D, "BD": D, "BV": D, "BG": width(4), "BN": max(16, min(64, step.TILE // (bytes_each * D)))}
    values |= {"POOL": False, "p_rows": None}
    values |= {"FAR": True, "SUM": False, "PADDED": True, "LOG2E": step.LOG2E, "LOWEST": step.LOWEST}
    values |= {"PREC": {"bf16": "bf16x3", "fp32": "bf16x6"}[dtype]}
    tensors = ("q", "k", "v", "keys", "values", "far", "gate", "theta", "share", "o", "keys1", "values1")
    kinds = {f"p_{name}": f"*{dtype}" for name in tensors} | {"scale": "fp32"}
    kinds |= {"p_held": "*i64", "p_held1": "*i64", "p_real": "*i1"}
    kernel = compile_kernel(step.step_kernel, 80, values, kinds, 4, 1)
    assert kernel.metadata.shared <= 64 * 1024
    assert transposed_products(kernel) == []


# ---------------------------------------------------------------- in the interpreter


def compare(case: dict[str, Any]) -> dict[str, float]:
    """Name -> largest error, relative to the largest value."""
    return largest_errors(*(steps(case, kernels) for kernels in (True, False)))


def steps(case: dict[str, Any], kernels: bool) -> dict[str, torch.Tensor]:
    """Four decode steps behind a ring, as `Window` makes them, and the ring after them."""
    from unittest.mock import patch

    from linearize_kernels.layout import TokenLayout
    from linearize_kernels.window import window

    torch.manual_seed(0)
    size = {"B": 2, "H": 4, "E": 2, "D": 16, "DV": 16, "W": 6, "S": 2, "beside": None, **case}
    B, H, E, D, DV, W, S = (size[name] for name in ("B", "H", "E", "D", "DV", "W", "S"))
    T, beside = case["before"] + 4, size["beside"]
    q, k, v, x, far = (torch.randn(B, T, *shape) for shape in ((H, D), (E, D), (E, DV), (24,), (H, DV)))
    mass = torch.rand(B, T, H) + 0.1
    near = window.Window(24, H, W, S, D**-0.5, beside == "mass")
    for parameter in near.parameters():
        torch.nn.init.normal_(parameter)
    dtype = getattr(torch, case.get("dtype", "float32"))
    q, k, v, x, far = (y.to(dtype) for y in (q, k, v, x, far))
    near.to(dtype)
    if not kernels:
        q, k, v, x, far = (y.double() for y in (q, k, v, x, far))
        near.double()
    padding = torch.ones(B, T, dtype=torch.bool)
    if case.get("padding"):
        padding[0, -2] = False
        far = far * padding[:, :, None, None]  # as every mechanism does
    form: dict[str, Any] = {"window": W, "sink": S, "scale": D**-0.5}
    _, _, ring = window.window(*(y[:, :-4] for y in (q, k, v)), **form, backend="torch")
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad(), patch.object(window, "step_op", wraps=window.step_op) as op:
        for t in range(T - 4, T):
            one = [y[:, t : t + 1] for y in (q, k, v)]
            real = padding[:, t : t + 1] if case.get("padding") else None
            if beside is None:
                o, own, ring = window.window(
                    *one, **form, padding=real, state=ring, backend="triton" if kernels else "torch"
                )
                found[f"mass {t}"] = own * padding[:, t : t + 1, None]
            else:
                of = mass[:, t : t + 1] if beside == "mass" else None
                chosen = window.runs_on if kernels else (lambda *_: "not now")
                with patch.object(window, "runs_on", chosen):
                    o, ring = near(far[:, t : t + 1], of, *one, x[:, t : t + 1], TokenLayout(padding=real), ring)
            found[f"o {t}"] = o
        assert op.call_count == 4 * kernels
    place = torch.arange(S + W)
    filled = (place < ring.held[:, None].clamp_max(S)) | (place >= S + W - ring.held[:, None].clamp_max(W))
    named = zip(("keys", "values"), (y * filled[:, :, None, None] for y in ring[:2]), strict=True)
    return {**found, "held": ring.held, **dict(named)}


def check_operator() -> None:
    """torch.library's own checks."""
    from linearize_kernels.window.step import pool_op, step_op

    q, k, ring = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 7, 2, 16)
    held = torch.tensor([3, 9])
    torch.library.opcheck(step_op, (q, k, k, ring, ring, held, *[None] * 6, 6, 1, 0.25))
    rows = torch.tensor([1, 0])
    torch.library.opcheck(pool_op, (q, k, k, ring, ring.clone(), held, *[None] * 6, 6, 1, 0.25, rows))
