"""The kernels of linear attention on a GPU: against float64, no worse than the PyTorch path in the same dtype, and the
same bits twice.

Skipped without a GPU. `python tests/gpu/test_linear_gpu.py` prints the errors and needs no pytest. fp32 is as torch
has it by default, exact (precision="bf16x6" in la's and retnet's words).
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_errors import checked
from test_linear_triton import build
from test_linear_triton import results as computed

# Weights inside a chunk are rounded to bf16 like the output: o up to 1.6 times PyTorch's error, of two tokens 2.6.
BASE: dict[str, Any] = {"B": 2, "T": 200, "H": 4, "Hkv": 2, "D": 64, "DV": 64, "dtype": "bfloat16", "factor": 1.7}
KINDS = ("la", "retnet", "both")
CASES: list[dict[str, Any]] = [
    *({"of": of, "D": D, "DV": D} for of in KINDS for D in (64, 80, 96, 128, 256)),
    *({"of": of, "D": 128, "DV": 64, "dtype": kind} for of in KINDS for kind in ("float16", "float32")),
    *({"T": T, "D": 128, "DV": 128} for T in (1, 63, 64, 65, 3000)),
    {"T": 2, "D": 128, "DV": 128, "factor": 3},
    *({"of": of, "H": 8, "Hkv": Hkv} for of in KINDS for Hkv in (8, 1)),
    # The write gate's gradient is 1.9 times as far off as PyTorch's.
    {"of": "retnet", "H": 8, "Hkv": 2, "E": 4, "gates": True, "D": 128, "DV": 128, "factor": 2},
    *({"of": of, "unit": True, "D": D, "DV": D, "factor": 2.2} for of in ("la", "both") for D in (64, 128)),
    *({"of": of, "state": True, "segments": 37, "T": 700} for of in ("la", "retnet")),
    *({"of": of, "cu": [0, 1, 1, 90, 700], "T": 700, "B": 1, "state": True} for of in ("la", "retnet")),
    *({"of": of, "padding": "left", "gates": True} for of in KINDS),
    {"mass": True, "unit": True, "factor": 2.2},
    {"of": "both", "mass": True},
    {"special": "zero", "unit": True},
    # Enough heads that retention's scan makes the output.
    *({"of": "retnet", "B": 4, "T": 300, "H": 32, "Hkv": n, "D": 128, "DV": 128, "state": True} for n in (32, 16)),
    {"of": "retnet", "B": 4, "T": 300, "H": 32, "D": 128, "DV": 128, "padding": "left", "gates": True, "factor": 2},
    {"of": "retnet", "B": 4, "T": 300, "H": 32, "D": 128, "DV": 128, "segments": 37},
    # Several stretches.
    *({"of": of, "T": 700, "D": 128, "DV": 128, "H": 4, "Hkv": 1} for of in ("la", "retnet")),
    *({"of": of, "T": 700, "D": 128, "DV": 128, "padding": "left", "gates": True} for of in ("la", "retnet")),
    *({"of": of, "T": 700, "D": 128, "DV": 128, "dtype": "float32"} for of in ("la", "retnet")),
    {"T": 700, "D": 128, "DV": 128, "unit": True, "factor": 2.2},
    {"of": "both", "T": 5000, "D": 128, "DV": 128, "H": 2, "Hkv": 2},
    {"T": 5000, "D": 128, "DV": 128, "H": 1, "Hkv": 1, "B": 1},
    # The scan walks in parts, three or four of a row.
    *({"of": of, "D": 128, "DV": 128, "T": 4200, "state": True} for of in ("la", "retnet")),
    *({"of": of, "dtype": kind, "T": 3100} for of in ("la", "retnet") for kind in ("float16", "float32")),
    *({"of": of, "T": 4200, "padding": "left", "gates": True, "factor": 2} for of in ("la", "retnet")),
    {"of": "la", "T": 4200, "segments": 997, "state": True, "factor": 2},  # dz, a state that meets one document of five
    {"of": "retnet", "T": 4200, "segments": 997, "state": True},
    *({"of": of, "cu": [0, 1, 1, 4100, 4200], "T": 4200, "B": 1, "state": True} for of in ("la", "retnet")),
    {"T": 3100, "D": 128, "DV": 128, "H": 8, "Hkv": 1, "unit": True, "factor": 2.2},
    {"T": 3100, "mass": True},
    *({"of": "retnet", "T": 4200, "H": 16, "Hkv": n, "D": 128, "DV": 128, "state": True} for n in (16, 8)),
    {"of": "retnet", "T": 4200, "H": 16, "D": 128, "DV": 128, "padding": "left", "gates": True, "factor": 2},
]


def results(case: dict[str, Any], backend: Any, exact: bool = False) -> dict[str, torch.Tensor]:
    """Outputs, last states and every gradient, in half precision not those of a and b: sums over all tokens that all
    but cancel, with errors up to 8e-3 of their norm (two tokens: 1.5e-2)."""
    if case["dtype"] == "float32" and backend == "auto":
        backend = "triton"
    found = computed(case, build(case, "cuda"), backend, exact)
    left_out = ("tokens",) if case["dtype"] == "float32" else ("tokens", "da", "db")
    return {name: y.detach() for name, y in found.items() if name not in left_out}


test_kernels_are_no_worse_than_pytorch = checked(__name__, results, BASE, CASES)
