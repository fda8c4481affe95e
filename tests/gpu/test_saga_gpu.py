"""SAGA's kernels on a GPU: against float64, no worse than the PyTorch path in the same dtype, and the same bits twice.

Skipped without a GPU. `python tests/gpu/test_saga_gpu.py` prints the errors and needs no pytest.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_errors import checked, masks

from linearize_kernels.saga.saga import Maps, saga

BASE: dict[str, Any] = {
    "B": 2, "T": 300, "H": 4, "E": 2, "D": 64, "DV": 64, "phi": "hedgehog", "norm": "mass", "dtype": "bfloat16",
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    {},
    {"T": 5000},
    {"phi": "identity", "positive": True},
    {"phi": "elu"},
    *({"norm": norm} for norm in ("none", "count", "head")),
    *({"dtype": kind} for kind in ("float16", "float32")),
    *({"D": D, "DV": D} for D in (16, 24, 32, 48)),
    *({"D": D, "DV": D, "phi": "elu"} for D in (32, 80, 96, 128)),
    {"D": 64, "DV": 32},
    # One token sees itself alone: gradients of q and k are 0, the rounding of what cancels (measured 1.4e-5, 2e-5).
    {"T": 1, "factor": 400},
    *({"T": T} for T in (49, 63, 65, 1000, 20000)),
    *({"H": H, "E": E} for H, E in ((8, 8), (6, 2), (8, 1))),
    {"phi": "identity", "norm": "count"},
    {"phi": "identity", "norm": "head", "D": 128, "DV": 128},
    {"phi": "identity", "norm": "none", "dtype": "float16"},
    {"phi": "elu", "norm": "head", "dtype": "float32"},
    {"local": False},
    {"padding": True},
    {"padding": True, "norm": "count", "phi": "elu"},
    {"padding": True, "norm": "head", "dtype": "float16"},
    # Sums over 34,300 tokens: the fp32 gradients of the maps are off by 5.7e-5 of their norm.
    {"B": 700, "T": 49, "D": 32, "DV": 32, "H": 3, "E": 3, "slack": 1.5},
]


def build(case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor]:
    """Leaves by name, other arguments, and the gradient that arrives."""
    c = case
    torch.manual_seed(0)
    B, T, H, E, D, DV = (c[name] for name in ("B", "T", "H", "E", "D", "DV"))
    F, dtype = 2 * D if c["phi"] == "hedgehog" else D, getattr(torch, c["dtype"])
    wide = {"q": (H, D), "k": (E, D), "v": (E, DV), "key_gate": (E, F), "value_gate": (E, DV), "output_gate": (H, DV)}
    wide |= {"local": (E, DV)} if c.get("local", True) else {}
    made = {name: torch.randn(B, T, *shape, device="cuda") for name, shape in wide.items()}
    if c.get("positive"):
        made |= {name: made[name].abs() for name in ("q", "k")}
    made = {name: x.to(dtype) for name, x in made.items()}
    if c["phi"] == "hedgehog":
        maps = {f"{role}_map": torch.randn(n, D, D, device="cuda") * D**-0.5 for role, n in (("query", H), ("key", E))}
        made |= maps
    if c["norm"] == "head":
        made["norm_weight"] = torch.rand(H, DV, device="cuda") + 0.5
    arguments = {"norm": c["norm"], "phi": c["phi"], "scale": 1.0 if c.get("positive") else D**-0.5, **masks(c)}
    return made, arguments, torch.randn(B, T, H, DV, device="cuda").to(dtype)


def results(case: dict[str, Any], backend: Any, exact: bool = False) -> dict[str, torch.Tensor]:
    """Output and every gradient."""
    tensors, arguments, sent = build(case)
    leaves = {name: (x.double() if exact else x).requires_grad_() for name, x in tensors.items()}
    given = dict(leaves)
    maps = Maps(arguments.pop("phi"), arguments.pop("scale"), given.pop("query_map", None), given.pop("key_map", None))
    o = saga(**given, **arguments, maps=maps, backend=backend)
    gradients = torch.autograd.grad(o, list(leaves.values()), sent.to(o.dtype))
    return {"o": o.detach(), **{f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}}


test_kernels_are_no_worse_than_pytorch = checked(__name__, results, BASE, CASES)
