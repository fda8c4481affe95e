"""MHLA's kernels on a GPU: against float64, no worse than the PyTorch path in the same dtype, and the same bits twice.

Skipped without a GPU. `python tests/gpu/test_mhla_gpu.py` prints the errors and needs no pytest.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_errors import checked, masks

from linearize_kernels.layout import Grid
from linearize_kernels.mhla.mhla import mhla, mhla_grid
from linearize_kernels.mhla.places import number_of_blocks, place_grid, place_line

BASE: dict[str, Any] = {
    "B": 2, "T": 300, "H": 4, "E": 2, "F": 64, "D": 64, "M": 8, "C": 64, "dtype": "bfloat16", "normalise": True,
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    *({"F": F, "D": D} for F, D in ((16, 16), (32, 32), (48, 32), (64, 64), (128, 64), (80, 80), (128, 128))),
    *({"F": F, "D": D} for F, D in ((256, 128), (256, 256), (512, 256))),
    *({"dtype": kind, "D": D, "F": D} for kind in ("float16", "float32") for D in (64, 128, 256)),
    # In one block alone the gradient of weights is 0, the rounding of what cancels (measured 1.7e-4 to 5.2e-4).
    *({"T": T, "slack": 15} for T in (2, 63, 64)),
    *({"T": T} for T in (65, 1000, 3000)),
    *({"H": H, "E": E} for H, E in ((8, 8), (6, 2), (8, 1))),
    *({"M": M, "C": C, "T": 1500} for M, C in ((2, 16), (3, 32), (32, 16), (32, 128), (100, 16), (8, 256))),
    {"normalise": False},
    {"segments": 37, "slack": 15},
    {"padding": True},
    {"padding": True, "segments": 37, "dtype": "float32", "factor": 3},
    {"cu": [0, 1, 1, 90, 300], "B": 1},
    {"special": "zero"},
    *({"size": size, "blocks": b} for size, b in (([300], [1, 1, 8]), ([15, 20], [1, 4, 4]), ([5, 6, 10], [3, 2, 5]))),
    *({"size": [15, 20], "blocks": [1, 4, 4], **more} for more in ({"D": 128, "F": 256}, {"dtype": "float32"},
      {"normalise": False}, {"padding": True}, {"segments": 150}, {"dtype": "float16", "H": 6, "E": 6})),
    {"size": [15, 20], "blocks": [1, 4, 4], "outside": [1, 2], "T": 303},
    *({"size": [40, 40], "T": 1600, "blocks": [1, n, n]} for n in (2, 8, 10)),
    *({"size": [40, 40], "T": 1600, "blocks": [1, n, n], "D": 128, "F": 128} for n in (4, 10)),
    {"size": [10, 30, 50], "T": 15000, "blocks": [3, 5, 10], "D": 128, "F": 128, "B": 1},
]  # fmt: skip


def build(case: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any], torch.Tensor]:
    """Leaves (q, k, v, weights), other arguments, and the gradient that arrives."""
    c = case
    torch.manual_seed(0)
    B, T, H, E, D = (c[name] for name in ("B", "T", "H", "E", "D"))
    dtype = getattr(torch, c["dtype"])
    q, k, v = (torch.randn(B, T, heads, x, device="cuda") for heads, x in ((H, c["F"]), (E, c["F"]), (E, D)))
    q, k, v = q.abs().to(dtype), k.abs().to(dtype), v.to(dtype)
    if c.get("special") == "zero":
        q, k = 0 * q, 0 * k
    arguments: dict[str, Any] = {"normalise": c["normalise"], **masks(c)}
    M = c["M"]
    if "size" in c:
        grid, blocks = Grid(tuple(c["size"]), *c.get("outside", ())), tuple(c["blocks"])
        M = number_of_blocks(grid, blocks)
        padding, segments = arguments.pop("padding", None), arguments.pop("segments", None)
        if len(c["size"]) == 1:
            arguments["places"] = place_line(q, M, M, (0, 0), padding, segments)
        else:
            arguments["places"] = place_grid(grid, blocks, q, padding, segments)
    else:
        arguments["block_size"] = c["C"]
    w = torch.rand(E, M, M, device="cuda") + 0.05
    return [q, k, v, w], arguments, torch.randn(B, T, H, D, device="cuda").to(dtype)


def results(case: dict[str, Any], backend: Any, exact: bool = False) -> dict[str, torch.Tensor]:
    """Output, last state and every gradient; of grids also the output where no gradients are wanted."""
    inputs, arguments, sent = build(case)
    leaves = [(x.double() if exact else x).requires_grad_() for x in inputs]
    out = {}
    if "size" in case:
        o = mhla_grid(*leaves, **arguments, backend=backend)
        with torch.no_grad():
            out = {"o alone": mhla_grid(*leaves, **arguments, backend=backend)}
    else:
        o, state = mhla(*leaves, **arguments, backend=backend)
        out = {f"state {name}": x.detach().double() for name, x in state._asdict().items() if x.numel()}
    gradients = torch.autograd.grad(o, leaves, sent.to(o.dtype))
    return {"o": o.detach(), **dict(zip(("dq", "dk", "dv", "dw"), gradients, strict=True)), **out}


test_kernels_are_no_worse_than_pytorch = checked(__name__, results, BASE, CASES)
