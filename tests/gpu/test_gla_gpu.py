"""GLA's kernels on a GPU: against float64, no worse than the PyTorch path in the same dtype, and the same bits twice.

Skipped without a GPU. `python tests/gpu/test_gla_gpu.py` prints the errors and needs no pytest.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_errors import checked, masks, queries, special_gates, with_the_rest
from torch.nn.functional import logsigmoid

from linearize_kernels.gla.gla import GLAState, gla

BASE: dict[str, Any] = {"B": 2, "T": 200, "H": 4, "Hkv": 2, "E": 2, "D": 64, "DV": 64, "dtype": "bfloat16"}
LONG: dict[str, Any] = {"T": 1400, "D": 128, "DV": 128}
CASES: list[dict[str, Any]] = [
    *({"D": D, "DV": DV} for D in (16, 32, 64, 80, 96, 128, 256) for DV in (D, 64)),
    *({"D": D, "DV": D, "dtype": kind} for D in (32, 64, 80, 128, 256) for kind in ("float16", "float32")),
    *({"T": T, "D": 128, "DV": 128} for T in (2, 63, 64, 65, 1000)),
    *({"H": H, "Hkv": Hkv, "E": E} for H, Hkv, E in ((8, 8, 8), (6, 2, 2), (8, 1, 1), (8, 2, 4))),
    *({"gate": gate, "dtype": kind} for gate in (10.0, 300.0) for kind in ("bfloat16", "float16", "float32")),
    *({"special": s} for s in ("open", "infinite", "zero")),
    # All of dg cancels: what 16 bits leave over counts more (measured 2.9e-4).
    {"special": "closed", "slack": 8},
    {"special": "huge"},
    {"state": True},
    {"state": True, "segments": 37},
    {"state": True, "segments": 37, "gate": 300.0, "heads": True},
    {"cu": [0, 1, 1, 90, 200], "B": 1, "state": True},
    {"padding": True},
    {"gates": "bfloat16"},
    {"heads": True},
    {"heads": True, "dtype": "float32", "state": True, "padding": True},
    # Long enough for the scan to cut rows into pieces.
    *(LONG | {"dtype": kind, "state": True, "heads": True} for kind in ("bfloat16", "float16", "float32")),
    *(LONG | {"gate": 300.0, "segments": 37, "dtype": kind} for kind in ("bfloat16", "float16", "float32")),
    LONG | {"segments": 700, "state": True},
    LONG | {"special": "infinite", "state": True},
    LONG | {"special": "open", "state": True},
    LONG | {"B": 1, "T": 4000, "cu": [0, 1, 1, 2900, 4000], "state": True, "heads": True},
    LONG | {"padding": True, "T": 1000, "H": 8, "E": 4},
    LONG | {"gates": "bfloat16", "D": 64, "DV": 64},
    LONG | {"B": 1, "T": 16384, "H": 16, "Hkv": 16, "E": 16},
]


def build(case: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Leaves (q, k, v, g, and perhaps both gates of the heads and a memory), and the gradients that arrive."""
    q, k, v, do = (y.to(getattr(torch, case["dtype"])) for y in queries(case))
    B, T, E, D, special = *(case[name] for name in ("B", "T", "E", "D")), case.get("special")
    f = torch.randn(B, T, E, D, device="cuda") + torch.linspace(-2, 8, D).cuda()
    g = special_gates(case, case.get("gate", 1.0) * logsigmoid(f) / 16)
    q, k = (0 * q, 0 * k) if special == "zero" else (300 * q, k) if special == "huge" else (q, k)
    leaves = [q, k, v, g.to(getattr(torch, case.get("gates", "float32")))]
    return with_the_rest(case, leaves, do, 1.0)


def results(case: dict[str, Any], backend: Any, exact: bool = False) -> dict[str, torch.Tensor]:
    """Output, last memory and every gradient."""
    inputs, sent = build(case)
    leaves = [(x.double() if exact else x).requires_grad_() for x in inputs]
    names = ["q", "k", "v", "g", *(["read_gate", "write_gate"] if case.get("heads") else [])]
    arguments: dict[str, Any] = dict(zip(names, leaves, strict=False))
    state = GLAState(leaves[-1]) if case.get("state") else None
    o, last = gla(**arguments, **masks(case), state=state, backend=backend)
    gradients = torch.autograd.grad(
        (o, last.memory), leaves, [x.to(y.dtype) for x, y in zip(sent, (o, *last), strict=True)]
    )
    found = [
        ("o", o),
        ("memory", last.memory),
        *zip([f"d{name}" for name in (*names, "memory")], gradients, strict=False),
    ]
    return {name: x.detach() for name, x in found}


test_kernels_are_no_worse_than_pytorch = checked(__name__, results, BASE, CASES)
