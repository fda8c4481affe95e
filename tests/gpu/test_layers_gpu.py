"""Norms of rows, learned feature maps and rotations on a GPU: against float64, no worse than the PyTorch path in the
same dtype, and the same bits twice.

Skipped without a GPU. `python tests/gpu/test_layers_gpu.py` prints the errors and needs no pytest.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_errors import checked

from linearize_kernels.layers.conv import short_conv
from linearize_kernels.layers.features import featured
from linearize_kernels.layers.learned_maps import learned_map
from linearize_kernels.layers.norm import head_norm, unit_rows
from linearize_kernels.layers.rotary import Rotation, rotated

BASE: dict[str, Any] = {"of": "norm", "B": 2, "T": 300, "H": 4, "D": 64, "dtype": "bfloat16", "weights": "float32"}
KINDS = ("bfloat16", "float16", "float32")
CASES: list[dict[str, Any]] = [
    *({"of": of, "D": D, "dtype": kind} for of in ("norm", "gated", "unit") for D in (64, 80, 256) for kind in KINDS),
    *({"of": "norm", "D": D, "H": 1} for D in (2048, 8192)),  # of all heads at once
    *({"of": of, "T": T, "slack": 40} for of in ("norm", "unit", "relu") for T in (1, 63, 5000)),
    *({"of": of, "D": D, "weights": "bfloat16"} for of in ("relu", "hedgehog") for D in (64, 80, 128)),
    # Products have 16 bits of such weights, so that relu turns elsewhere for a share of 1e-5 to 1e-6 of all numbers.
    *({"of": "relu", "D": D, "slack": 40} for D in (64, 80, 128)),
    *({"of": "hedgehog", "D": D, "factor": 4} for D in (64, 80, 128)),
    *({"of": of, "dtype": "float32", "factor": 4} for of in ("relu", "hedgehog")),
    *({"of": "rotary", "D": D, "dtype": kind} for D in (64, 80, 256) for kind in KINDS),
    {"of": "rotary", "T": 5000},
    *({"of": "convolution", "D": D, "dtype": kind} for D in (64, 80, 256) for kind in KINDS),
]


def results(case: dict[str, Any], backend: Any, exact: bool = False) -> dict[str, torch.Tensor]:
    """Output and every gradient."""
    torch.manual_seed(0)
    B, T, H, D = (case[name] for name in ("B", "T", "H", "D"))
    dtype, weights, of = getattr(torch, case["dtype"]), getattr(torch, case["weights"]), case["of"]
    y = torch.randn(B, H, T, D, device="cuda").to(dtype).transpose(1, 2)  # as q comes from a model
    others = {
        "norm": [torch.rand(H, D, device="cuda")],
        "gated": [torch.rand(H, D, device="cuda"), torch.rand(B, T, H, device="cuda")],
        "relu": [torch.eye(D, device="cuda") + 0.1 * torch.randn(H, D, D, device="cuda"), torch.randn(H, D).cuda()],
        "hedgehog": [torch.eye(D, device="cuda") + 0.1 * torch.randn(H, D, D, device="cuda")],
        "convolution": [torch.randn(H, D, 4, device="cuda"), torch.randn(H, D, device="cuda")],
    }.get(of, [])
    others = [x.to(weights) if of in ("relu", "hedgehog") else x for x in others]
    leaves = [(x.double() if exact else x).requires_grad_() for x in (y, *others)]
    plain = backend == "torch"
    if of in ("norm", "gated"):
        o = head_norm(*leaves, plain=plain)
    elif of == "rotary":  # half of the channels, and of two blocks of features
        angle = torch.arange(T, device="cuda", dtype=leaves[0].dtype if exact else torch.float32)[:, None] / (
            1.0 + torch.arange(D // 8, device="cuda")
        )
        o = rotated(leaves[0], Rotation(angle.cos()[None], angle.sin()[None]), D // 2, plain=plain)
    elif of == "convolution":
        number = (torch.arange(T, device="cuda") // 100).expand(B, T)
        o = short_conv(leaves[0], leaves[1], None, None, number, bias=leaves[2], swish=True, plain=plain)[0]
    elif of == "unit":
        o = unit_rows(*leaves, True, leaves[0].dtype, plain=plain)
    elif plain:
        o = featured(leaves[0], of, D**-0.5, *leaves[1:]).to(leaves[0].dtype)
    else:
        made = learned_map(leaves[0], leaves[1], leaves[2] if of == "relu" else None, D**-0.25)
        assert made is not None, "the kernels do not take this"
        o = made
    sent = torch.randn(o.shape, device="cuda").to(dtype).to(o.dtype)
    names = ("dq", "dw", "dgate" if of == "gated" else "db")  # `dq` is what gpu_errors.py calls a gradient in dtype
    return {"o": o.detach(), **dict(zip(names, torch.autograd.grad(o, leaves, sent), strict=False))}


test_kernels_are_no_worse_than_pytorch = checked(__name__, results, BASE, CASES)
