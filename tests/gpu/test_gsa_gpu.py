"""GSA's kernels on a GPU: against float64, no worse than the PyTorch path in the same dtype, and the same bits twice.

Skipped without a GPU. `python tests/gpu/test_gsa_gpu.py` prints the errors and needs no pytest.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_errors import checked, masks
from torch.nn.functional import logsigmoid

from linearize_kernels.gsa.gsa import GSAState, gsa

BASE: dict[str, Any] = {"B": 2, "T": 200, "H": 4, "Hkv": 2, "E": 2, "D": 64, "M": 64, "dtype": "bfloat16"}
# A memory for each query head, in programs that walk along rows (sweep.py).
SWEPT: list[dict[str, Any]] = [
    *(
        {"E": 4, "M": M, "D": D, "T": 1000, **more}
        for M, D in ((128, 64), (128, 128), (128, 256))
        for more in ({}, {"segments": 37}, {"segments": 150, "state": True})
    ),
    # 64 slots of heads of 256 take it from 2^17 tokens of heads on, of heads of 128 from 2^18.
    *({"B": 8, "H": 8, "Hkv": 4, "E": 8, "M": 64, "D": 256, "T": 2100, "segments": n} for n in (37, 3000)),
    {"B": 8, "H": 16, "Hkv": 4, "E": 16, "M": 64, "D": 128, "T": 2100},
    # More chunks of a row than the first launch of `factors` takes.
    {"E": 4, "M": 128, "D": 128, "segments": 5, "gate": 30.0},
    *({"E": 4, "M": 128, "D": 128, "B": 40, "segments": n, "state": True} for n in (1, 64, 90)),
    *({"E": 4, "M": 128, "D": 128, "T": 700, "segments": n, "gate": gate} for n in (37, 300) for gate in (8.0, 30.0)),
    {"E": 4, "M": 128, "D": 128, "T": 3000, "segments": 700, "padding": True},
    # Slots that hold single tokens average no rounding away, and little of dg is left where they are overwritten.
    *({"E": 4, "M": 128, "D": 128, "T": T, "special": "turns", "rounded": 8e-3} for T in (1000, 4096)),
    # Sequences are the pieces of a row, and their gradients other kernels' business.
    *(
        {"E": 4, "M": 128, "D": D, "B": 1, "T": 2000, "cu": [0, 1, 1, 700, 1024, 2000], **more}
        for D in (64, 128)
        for more in ({}, {"state": True}, {"state": True, "gate": 30.0})
    ),
    # Short rows and sequences: walk.py. Beyond 1,024 tokens, sweep.py again.
    *(
        {"E": 4, "M": 128, "D": 64, "gate": gate, **more}
        for gate in (1.0, 30.0)
        for more in ({"T": 70, "state": True}, {"T": 1030}, {"B": 1, "T": 700, "cu": [0, 1, 1, 65, 700], "state": True})
    ),
    # In a long row what rounding leaves of dg could add up.
    *({"E": 4, "M": 128, "D": 128, "B": 1, "T": 8192, "gate": gate} for gate in (0.02, 1.0, 30.0)),
]
CASES: list[dict[str, Any]] = [
    *({"D": D, "M": M} for D in (64, 80, 96, 128, 256) for M in (16, 32, 64, 128)),
    *({"D": D, "M": 64, "dtype": kind} for D in (64, 128, 256) for kind in ("float16", "float32")),
    *({"T": T} for T in (2, 63, 64, 65, 1000)),
    *({"H": H, "Hkv": Hkv, "E": E} for H, Hkv, E in ((8, 8, 8), (6, 2, 2), (8, 1, 1), (8, 2, 4))),
    *({"gate": gate, "dtype": kind} for gate in (8.0, 30.0) for kind in ("bfloat16", "float32")),
    *({"special": s} for s in ("open", "infinite", "zero")),
    # All of dg cancels, and logits of hundreds: what 16 bits leave over counts more (measured 1.6e-4 and 1.3e-4).
    {"special": "closed", "slack": 5},
    {"special": "huge", "slack": 5},
    {"state": True},
    {"state": True, "segments": 37},
    {"cu": [0, 1, 1, 90, 200], "B": 1, "state": True},
    {"padding": True},
    {"gates": "bfloat16"},
    *({"rounded": True, **case} for case in SWEPT),
]


def build(case: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any], list[torch.Tensor]]:
    """Leaves (q, k, v, g and perhaps memories), other arguments, and the gradients that arrive."""
    c = BASE | case
    torch.manual_seed(0)
    B, T, H, Hkv, E, D, M = (c[name] for name in ("B", "T", "H", "Hkv", "E", "D", "M"))
    dtype, rows = getattr(torch, c["dtype"]), len(c["cu"]) - 1 if "cu" in c else B
    q, k, v = (torch.randn(B, T, heads, D, device="cuda").to(dtype) for heads in (H, Hkv, Hkv))
    g = c.get("gate", 1.0) * logsigmoid(torch.randn(B, T, E, M, device="cuda") + torch.linspace(-2, 8, M).cuda()) / 8
    special = c.get("special")
    g = {"closed": torch.full_like(g, -1e4), "open": torch.zeros_like(g)}.get(special, g)
    if special == "infinite":
        g[:, ::7] = -torch.inf
    if special == "turns":
        g = torch.where(torch.arange(M).cuda() == torch.arange(T).cuda()[:, None, None] % M, -3.0, 1e-2 * g)
    q, k = (0 * q, 0 * k) if special == "zero" else (300 * q, k) if special == "huge" else (q, k)
    g = g.to(getattr(torch, c.get("gates", "float32")))
    memories = [torch.randn(rows, E, M, D, device="cuda") for _ in range(2)] if c.get("state") else []
    sent = [torch.randn_like(q), *(torch.randn(rows, E, M, D, device="cuda") for _ in range(2))]
    return [q, k, v, g, *memories], masks(c), sent


def results(case: dict[str, Any], backend: Any, exact: bool = False) -> dict[str, torch.Tensor]:
    """Output, last memories and every gradient."""
    inputs, arguments, sent = build(case)
    leaves = [(x.double() if exact else x).requires_grad_() for x in inputs]
    state = GSAState(*leaves[4:], torch.zeros(len(leaves[4]), device="cuda").long()) if leaves[4:] else None
    o, last = gsa(*leaves[:4], **arguments, state=state, backend=backend)
    outputs = (o, last.keys, last.values)
    gradients = torch.autograd.grad(outputs, leaves, [x.to(y.dtype) for x, y in zip(sent, outputs, strict=True)])
    names = ("o", "keys", "values", "dq", "dk", "dv", "dg", "dkeys", "dvalues")
    found = dict(zip(names, (x.detach() for x in (*outputs, *gradients)), strict=False))
    if case.get("special") == "turns":
        found["dg at turns"] = found["dg"][leaves[3] == -3.0]
    return found


test_kernels_are_no_worse_than_pytorch = checked(__name__, results, BASE, CASES)
