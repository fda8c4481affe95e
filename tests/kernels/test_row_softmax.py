"""Softmax of rows: the kernels in Triton's interpreter against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from conftest import TOLERANCE, relative_error
from triton_tools import gradients, interpreted

from linearize_kernels.layers.row_softmax import forward_op, row_softmax


def weights(s: torch.Tensor, triangle: bool, arrives: torch.Tensor, plain: bool) -> list[torch.Tensor]:
    """The softmax of scores s [2,M,M], times 5, and the gradient of s."""
    return gradients(lambda s: row_softmax(s, 5.0, triangle, plain=plain), [s], arrives)


def errors(dtype: torch.dtype, M: int, triangle: bool) -> list[float]:
    torch.manual_seed(M)
    s, arrives = (3 * torch.randn(2, M, M)).to(dtype), torch.randn(2, M, M, dtype=torch.float64)
    ours, reference = weights(s, triangle, arrives, False), weights(s.double(), triangle, arrives, True)
    return [relative_error(a, b) for a, b in zip(ours, reference, strict=True)]


@pytest.mark.parametrize("triangle", [False, True])
@pytest.mark.parametrize("M", [1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_compute_what_pytorch_does(dtype: torch.dtype, M: int, triangle: bool) -> None:
    most = 1e-6 if dtype == torch.float32 else TOLERANCE[dtype]
    assert max(interpreted(errors, dtype, M, triangle)) < most


def test_the_operator_is_registered_as_it_should_be() -> None:
    interpreted(check_operator)


def check_operator() -> None:
    torch.library.opcheck(forward_op, (torch.randn(2, 33, 6, requires_grad=True), 6.0, False))


def test_a_triangle_has_nothing_above_it() -> None:
    w, _ = weights(torch.randn(2, 5, 5).double(), True, torch.ones(2, 5, 5), True)
    assert not w.triu(1).any()
    assert torch.allclose(w.sum(-1), 5.0 * torch.arange(1.0, 6.0).double())
