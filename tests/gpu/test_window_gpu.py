"""The window's kernels on a GPU: against float64, no worse than the PyTorch path in the same dtype, and the same bits
twice.

Skipped without a GPU. `python tests/gpu/test_window_gpu.py` prints the errors and needs no pytest.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_errors import checked, masks, queries

from linearize_kernels.window.window import window as window_attention

BASE: dict[str, Any] = {
    "B": 2, "T": 300, "H": 4, "Hkv": 2, "D": 64, "DV": 64, "W": 64, "S": 1, "dtype": "bfloat16",
}  # fmt: skip
DIMS = ((16, 16), (24, 40), (32, 32), (48, 64), (64, 64), (80, 80), (64, 128), (128, 128), (256, 128), (256, 256))
SIZES = ((1, 0), (1, 3), (2, 20), (16, 16), (33, 100), (64, 0), (100, 4), (299, 1), (999, 9))
CASES: list[dict[str, Any]] = [
    *({"D": D, "DV": DV} for D, DV in DIMS),
    *({"dtype": kind, "D": D, "DV": D} for kind in ("float16", "float32") for D in (16, 64, 128, 256)),
    {"T": 1, "factor": 2.0},  # 256 numbers: dk 2.1e-3, as with more tokens, but the PyTorch path happens to have 1.4e-3
    *({"T": T} for T in (2, 63, 64, 65, 1000, 3000)),
    *({"H": H, "Hkv": E} for H, E in ((8, 8), (6, 2), (8, 1))),
    *({"W": W, "S": S} for W, S in SIZES),
    *({"W": W, "S": S, "T": 3000, "D": 128, "DV": 128} for W, S in ((64, 0), (64, 4), (500, 1), (2048, 64))),
    *({"segments": n, "W": W, "S": 4} for n, W in ((1, 8), (37, 8), (37, 64), (130, 16), (130, 64))),
    {"segments": 37, "dtype": "float32", "S": 4},
    {"padding": True, "S": 4},
    {"padding": True, "segments": 130, "S": 4},
    *({"size": 6.0, "dtype": kind} for kind in ("bfloat16", "float32")),
    *({"arrives": name} for name in ("o", "mass")),
    {"strided": True},
    {"B": 5, "T": 2048, "H": 16, "Hkv": 4},
]  # fmt: skip


def results(case: dict[str, Any], backend: Any, exact: bool = False) -> dict[str, torch.Tensor]:
    """Output, logarithm of the normaliser, and every gradient."""
    c, arguments = case, masks(case)
    dtype = getattr(torch, c["dtype"])
    *inputs, sent = (c.get("size", 1.0) * y.to(dtype) for y in queries(c))
    if c.get("strided"):  # heads before tokens in memory
        inputs = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in inputs]
    leaves = [(y.double() if exact else y).requires_grad_() for y in inputs]
    sizes: dict[str, Any] = {"window": c["W"], "sink": c["S"], "scale": c["D"] ** -0.5}
    o, mass, ring = window_attention(*leaves, **sizes, **arguments, backend=backend)
    if "padding" in arguments:  # what stands at padding is anything
        mass = mass * arguments["padding"][:, :, None]
    weights = torch.randn(mass.shape, device=mass.device)
    arriving = {"o": (o, sent.to(o.dtype)), "mass": (mass, weights.to(mass.dtype))}
    if "arrives" in c:
        arriving = {c["arrives"]: arriving[c["arrives"]]}
    outputs, gradients = zip(*arriving.values(), strict=True)
    found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, materialize_grads=True)
    out = {"o": o.detach(), "mass": mass.detach(), **dict(zip(("dq", "dk", "dv"), found, strict=True))}
    return {**out, "held": ring.held.double()}


test_kernels_are_no_worse_than_pytorch = checked(__name__, results, BASE, CASES)
