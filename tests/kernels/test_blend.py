"""The blend of a mechanism with its window: the kernels in Triton's interpreter against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from conftest import TOLERANCE, relative_error
from triton_tools import gradients, interpreted

from linearize_kernels.window.blend import blend, blend_op


def errors(dtype: torch.dtype, shape: tuple[int, ...], turned: bool) -> list[float]:
    """Of the output and of each gradient; `turned` inputs lie in memory as [B,H,T,Dv]."""
    torch.manual_seed(0)
    far, near, arrives = (torch.randn(*shape) for _ in range(3))
    if turned:
        far, near, arrives = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (far, near, arrives))
    w = torch.rand(shape[:3])
    far, near = far.to(dtype), near.to(dtype)
    ours = gradients(blend, (far, near, w), arrives)
    exact = (far.double(), near.double(), w.double())
    reference = gradients(lambda *x: blend(*x, plain=True), exact, arrives.to(dtype).double())
    return [relative_error(a, b) for a, b in zip(ours, reference, strict=True)]


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 3, 40), (1, 70, 2, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_compute_what_pytorch_does(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    most = 1e-6 if dtype == torch.float32 else TOLERANCE[dtype]
    for turned in (False, True):
        assert max(interpreted(errors, dtype, shape, turned)) < most


def test_the_operator_is_registered_as_it_should_be() -> None:
    interpreted(check_operator)


def check_operator() -> None:
    far, near = (torch.randn(2, 3, 2, 5, requires_grad=True) for _ in range(2))
    torch.library.opcheck(blend_op, (far, near, torch.rand(2, 3, 2, requires_grad=True)))
