"""Log-decays: the Triton kernels in Triton's interpreter against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from conftest import TOLERANCE, relative_error
from triton_tools import interpreted

from linearize_kernels.layers.gates import gates_op, log_decays


def results(dtype: torch.dtype, rows: int, clock: int, strong: float, plain: bool) -> dict[str, torch.Tensor]:
    """g and its gradients, for B 2, E 3, M 20, a clock that starts anywhere."""
    torch.manual_seed(rows)
    f = (strong * torch.randn(2, rows, 3, 20)).to(dtype)
    s = torch.full((3, clock), 24.0) + torch.randn(3, clock)
    dg = torch.randn(2, rows, 3, 20)
    place = torch.arange(rows) + torch.tensor([[0], [7]])
    if plain:
        f, s, dg = f.double(), s.double(), dg.double()
    leaves = [f.requires_grad_(), *([s.requires_grad_()] if clock else [])]
    g = log_decays(f, 8.0, *((s, place) if clock else ()), plain=plain)
    return {"g": g, **dict(zip(("df", "ds"), torch.autograd.grad(g, leaves, dg), strict=False))}


def error(dtype: torch.dtype, rows: int, clock: int, strong: float) -> float:
    """The largest, of kernels beside PyTorch in float64."""
    ours, reference = (results(dtype, rows, clock, strong, plain) for plain in (False, True))
    for name, value in reference.items():
        assert ours[name].isfinite().all()
        assert ours[name].shape == value.shape
    return max(relative_error(ours[name], x) for name, x in reference.items())


@pytest.mark.parametrize("strong", [2.0, 30.0])
@pytest.mark.parametrize("clock", [0, 7, 20])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_compute_what_pytorch_does(dtype: torch.dtype, rows: int, clock: int, strong: float) -> None:
    assert interpreted(error, dtype, rows, clock, strong) < (1e-6 if dtype == torch.float32 else TOLERANCE[dtype])


def slow_slots() -> float:
    f = torch.linspace(-40.0, 40.0, 2 * 3 * 20).view(1, 2, 3, 20)
    return float((log_decays(f, 8.0).double() / log_decays(f.double(), 8.0, plain=True) - 1.0).abs().max())


def test_slow_slots_keep_their_digits() -> None:
    """Where sigmoid is 1 up to rounding, g is about -exp(-f) / damping: the smallest value has its digits too."""
    assert interpreted(slow_slots) < 1e-6


def check_operator() -> None:
    f, s, place = torch.randn(1, 3, 2, 8, requires_grad=True), torch.randn(2, 4, requires_grad=True), torch.arange(3)
    torch.library.opcheck(gates_op, (f, 8.0, s, place[None]))
    torch.library.opcheck(gates_op, (f, 8.0, None, None))


def test_the_operator_is_registered_as_it_should_be() -> None:
    interpreted(check_operator)


@pytest.mark.parametrize("clock", [0, 4])
def test_float64_stays(clock: int) -> None:
    assert results(torch.float32, 5, clock, 1.0, True)["g"].dtype == torch.float64
