"""The Triton kernels of the exact window against the PyTorch path in float64, in Triton's interpreter.

Few cases have bf16 (see triton_tools.py); the rest of it is proved on a GPU (tests/gpu/test_window_gpu.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import with_slow
from triton_tools import (
    compile_kernel,
    complaints,
    flops_whichever_way,
    interpreted,
    largest_errors,
    masks,
    transposed_products,
)

# Largest error over the largest reference value.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}

# group -> cases; unset sizes are B1 T70 H2 E1 D16 DV16 W24 S1. The interpreter's blocks have 16 queries or 32.
CASES: dict[str, list[dict[str, Any]]] = {
    "sizes": [
        *({"T": T, "H": 1} for T in (1, 16, 17)),
        {"B": 2, "H": 4, "E": 2, "T": 40},
        {"H": 3, "D": 20, "DV": 40},
    ],
    "windows_and_sinks": [
        *({"W": W, "S": S, "H": 1} for W, S in ((1, 0), (1, 3), (16, 17), (17, 40), (40, 2), (69, 1), (500, 80))),
        {"W": 3, "S": 18, "T": 130, "H": 4},
    ],
    "documents_and_padding": [
        *({"W": W, "S": S, "segments": n, "B": 2, "H": 1} for W, S, n in ((1, 2, 5), (4, 3, 33), (24, 20, 50))),
        {"W": 4, "S": 2, "padding": "each", "B": 4, "T": 40},
        {"W": 18, "S": 3, "padding": "each", "B": 4, "T": 50, "segments": 27, "H": 1},
        {"padding": "all"},
    ],
    "half_precision_and_what_arrives": [
        {"dtype": "bfloat16"},
        {"dtype": "float16", "S": 4},
        {"arrives": "o"},
        {"arrives": "mass"},
        {"size": 8.0},
        {"strided": True, "B": 2, "E": 2},
    ],
}


@pytest.mark.parametrize(
    "group", with_slow(CASES, "documents_and_padding", "half_precision_and_what_arrives", "windows_and_sinks")
)
def test_kernels_match_the_reference(group: str) -> None:
    assert complaints(compare, CASES[group], TOLERANCE) == []


@pytest.mark.slow
def test_operators_compile_checkpoint_and_count() -> None:
    interpreted(check_operators)


def test_a_mixer_takes_the_kernels_and_its_state_goes_on_without() -> None:
    interpreted(check_mixer)


def test_cpu_tensors_and_states_take_pytorch_unless_told_otherwise() -> None:
    from linearize_kernels.window.window import window as window_attention

    q = torch.rand(1, 5, 2, 16)
    sizes: dict[str, Any] = {"window": 3, "scale": 0.3}
    o, _, ring = window_attention(q, q, q, **sizes)
    assert torch.equal(o, window_attention(q, q, q, **sizes, backend="torch")[0])
    with pytest.raises(ValueError, match="on cpu"):
        window_attention(q, q, q, **sizes, backend="triton")
    with pytest.raises(ValueError, match=r"state.*goes"):
        window_attention(q, q, q, **sizes, state=ring, backend="triton")


# ---------------------------------------------------------------- compiled for real, without a GPU

KERNELS = ("forward_kernel", "queries_kernel", "sinks_kernel", "keys_kernel")


def compiled(name: str, capability: int, config: Any, D: int, dtype: str = "bf16") -> Any:
    """A kernel compiled with a configuration, for documents and sinks."""
    from linearize_kernels.gpu.launch import width
    from linearize_kernels.window import kernels as window_triton
    from linearize_kernels.window.launch import Tiles

    tiles = {"sinks": Tiles(config.block, 16, 4, 1)}.get(name.removesuffix("_kernel"))
    tiles = tiles or getattr(config, name.removesuffix("_kernel"))
    values = {"D": D, "DV": D, "BD": width(D), "BV": width(D), "BM": tiles.queries, "BN": tiles.keys, "BS": 16}
    values |= {"C": config.block, "DOCS": True, "FAR": True, "PREC": config.precision}
    values |= {"LOG2E": window_triton.LOG2E, "LOWEST": window_triton.LOWEST}
    kinds = {f"p_{x}": f"*{dtype}" for x in ("q", "k", "v", "o", "do", "dq", "dk", "dv")} | {"scale": "fp32"}
    kinds |= {"p_begin": "*i32", "p_end": "*i32"}
    kernel = getattr(window_triton, name)
    return compile_kernel(kernel, capability, values, kinds, tiles.warps, tiles.stages)


@pytest.mark.parametrize(("budget", "D", "dtype"), [(48, 32, "float32"), (99, 128, "bfloat16"), (227, 64, "bfloat16")])
def test_safe_configurations_fit_their_budget(budget: int, D: int, dtype: str) -> None:
    from linearize_kernels.window.launch import safe

    config = safe(budget * 1024, D, D, getattr(torch, dtype))
    for name in ("queries_kernel", "keys_kernel"):
        short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
        kernel = compiled(name, 90 if budget > 164 else 80, config, D, short)
        assert kernel.metadata.shared <= budget * 1024, (name, config)


@pytest.mark.parametrize("name", KERNELS)
def test_no_product_takes_the_transpose_of_a_product(name: str) -> None:
    from linearize_kernels.window.launch import safe

    assert transposed_products(compiled(name, 90, safe(227 * 1024, 64, 64, torch.bfloat16), 64)) == []


# ---------------------------------------------------------------- in the interpreter


def build(case: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v, and the other arguments of one case."""
    torch.manual_seed(0)
    size = {"B": 1, "T": 70, "H": 2, "E": 1, "D": 16, "DV": 16, "W": 24, "S": 1, "size": 1.0, **case}
    B, T, H, E, D, DV = (size[name] for name in ("B", "T", "H", "E", "D", "DV"))
    inputs = [torch.randn(B, T, *shape) for shape in ((H, D), (E, D), (E, DV))]
    if case.get("strided"):
        inputs = [torch.stack([x.transpose(1, 2)] * 2, -2).transpose(1, 2)[..., 1, :] for x in inputs]
    inputs = [(x * size["size"]).to(getattr(torch, case.get("dtype", "float32"))) for x in inputs]
    return inputs, {"window": size["W"], "sink": size["S"], "scale": D**-0.5, **masks(case, B, T)}


def results(case: dict[str, Any], backend: Any) -> dict[str, torch.Tensor]:
    """Output, mass and state where they count, and every gradient; `torch` in float64."""
    from linearize_kernels.window.window import window as window_attention

    inputs, arguments = build(case)
    leaves = [(x.double() if backend == "torch" else x).detach().requires_grad_() for x in inputs]
    o, mass, ring = window_attention(*leaves, **arguments, backend=backend)
    real = arguments.get("padding", torch.ones(o.shape[:2], dtype=torch.bool))
    mass = mass * real[:, :, None]
    torch.manual_seed(1)
    sent = {"o": torch.randn(o.shape), "mass": torch.randn(mass.shape)}
    loss = sum((x * sent[n].to(x.dtype)).sum() for n, x in (("o", o), ("mass", mass)) if case.get("arrives", n) == n)
    assert isinstance(loss, torch.Tensor)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    S, W = arguments["sink"], arguments["window"]
    place = torch.arange(S + W)
    filled = (place < ring.held[:, None].clamp_max(S)) | (place >= S + W - ring.held[:, None].clamp_max(W))
    state = [(x * filled[:, :, None, None]).detach() for x in ring[:2]]
    named = zip(("dq", "dk", "dv", "keys", "values"), (*gradients, *state), strict=True)
    return {"o": o.detach(), "mass": mass.detach(), "held": ring.held, **dict(named)}


def compare(case: dict[str, Any]) -> dict[str, float]:
    """Name -> largest error, relative to the largest value."""
    return largest_errors(*(results(case, backend) for backend in ("triton", "torch")))


def check_operators() -> None:
    """torch.library's own checks, fullgraph compilation, gradient checkpointing, flop counts."""
    from linearize_kernels.window.launch import window_op
    from linearize_kernels.window.window import window as window_attention

    inputs, arguments = build({"T": 17, "W": 5})
    leaves = [x.requires_grad_() for x in inputs]
    begin = torch.zeros(1, 17, dtype=torch.int32)
    for documents in ((None, None), (begin, begin + 17)):
        torch.library.opcheck(window_op, (*leaves, *documents, 5, 1, 0.25))

    def loss(*values: torch.Tensor) -> torch.Tensor:
        o, mass, _ = window_attention(*values, **arguments, backend="triton")
        return o.square().sum() + mass.square().sum()

    assert flops_whichever_way(loss, leaves) == 3 * 2 * 17 * 2 * 6 * 32


def check_mixer() -> None:
    """A window computes with kernels what it does without, a state is as good, and its next call goes on in PyTorch."""
    from unittest.mock import patch

    from linearize_kernels.layout import TokenLayout
    from linearize_kernels.window import window

    torch.manual_seed(0)
    near = window.Window(24, 2, 6, 2, 0.3, False)
    near.reset_parameters()
    torch.nn.init.constant_(near.near_share, 0.5)
    q, k, v, x, far = (torch.randn(2, 21, *shape) for shape in ((2, 16), (1, 16), (1, 16), (24,), (2, 16)))
    found = []
    for calls, runs_on in ((1, window.runs_on), (0, lambda *_: "not now")):
        with patch.object(window, "runs_on", runs_on), patch.object(window, "window_op", wraps=window.window_op) as op:
            leaves = [y[:, :20].clone().requires_grad_() for y in (far, q, k, v, x)]
            far_, q_, k_, v_, x_ = leaves
            o, ring = near(far_, None, q_, k_, v_, x_, TokenLayout(), None)
            gradients = torch.autograd.grad(o.square().sum(), [*leaves, *near.parameters()])
            last, _ = near(*(None if y is None else y[:, 20:] for y in (far, None, q, k, v, x)), TokenLayout(), ring)
            assert op.call_count == calls
        found.append(dict(enumerate((o.detach(), last.detach(), *gradients))))
    assert max(largest_errors(*found).values()) < 1e-4  # type: ignore[arg-type]
