"""Norms of rows: the Triton kernels in Triton's interpreter against PyTorch."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from conftest import TOLERANCE, relative_error
from torch import Tensor
from triton_tools import gradients, interpreted

from linearize_kernels.layers.norm import head_norm, norm_op, unit_rows

# The second has more rows than a program of the backward pass takes, the third rows longer than a tile.
SHAPES = [(2, 5, 3, 16), (1, 700, 2, 200), (1, 3, 1, 5000)]
DTYPES = [torch.float32, torch.float16]


def made(shape: tuple[int, ...], dtype: torch.dtype, *names: str) -> list[Tensor]:
    """y [B,T,H,D], a weight [H,D] and a gate [B,T,H], as far as they are named."""
    torch.manual_seed(0)
    sizes = {"y": shape, "weight": shape[2:], "gate": shape[:3]}
    return [torch.randn(sizes[name]).to(dtype if name == "y" else torch.float32) for name in names]


def error(ours: list[Tensor], reference: list[Tensor]) -> float:
    return max(itertools.starmap(relative_error, zip(ours, reference, strict=True)))


def head_norms(shape: tuple[int, ...], dtype: torch.dtype, gated: bool) -> float:
    inputs, do = made(shape, dtype, "y", "weight", *["gate"] * gated), torch.randn(shape)
    turned = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)  # as q comes from a model, tokens behind heads
    ours = gradients(head_norm, [turned, *inputs[1:]], do)
    return error(ours, gradients(lambda *x: head_norm(*x, plain=True), [x.float() for x in inputs], do.to(dtype)))


def lengths(shape: tuple[int, ...], dtype: torch.dtype, swish: bool) -> float:
    inputs, do = made(shape, dtype, "y"), torch.randn(shape)
    errors = []
    for eps in (1e-12, 0.5):
        ours = gradients(partial(unit_rows, swish=swish, dtype=dtype, eps=eps), inputs, do)
        plain = partial(unit_rows, swish=swish, dtype=torch.float32, eps=eps, plain=True)
        errors.append(error(ours, gradients(plain, [inputs[0].float()], do.to(dtype))))
    return max(errors)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_kernels_norm_heads_as_pytorch_does(shape: tuple[int, ...], dtype: torch.dtype, gated: bool) -> None:
    assert interpreted(head_norms, shape, dtype, gated) < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("swish", [False, True])
def test_kernels_make_rows_of_length_1_as_pytorch_does(shape: tuple[int, ...], dtype: torch.dtype, swish: bool) -> None:
    assert interpreted(lengths, shape, dtype, swish) < TOLERANCE[dtype]


def of_nothing() -> list[float]:
    """What rows of zeros become, what no rows give their weight, the length of two rows in float64, and the error with
    a weight that all heads share, which is PyTorch's."""
    y, weight = torch.zeros(1, 2, 3, 16), torch.rand(3, 16, requires_grad=True)
    head_norm(y[:, :0], weight).sum().backward()
    assert weight.grad is not None
    exact = unit_rows(y[:, :, :1].double() + 1.0, False, torch.float64)
    y, shared = torch.randn(1, 2, 3, 16), weight[:1].detach()
    differs = (head_norm(y, shared) - head_norm(y, shared, plain=True)).abs().max()
    zeros = unit_rows(torch.zeros(1, 2, 3, 16), True, y.dtype)
    return [float(x) for x in (zeros.abs().sum(), weight.grad.abs().sum(), exact.square().sum(), differs)]


def test_rows_of_zeros_no_rows_and_weights_of_other_shapes() -> None:
    assert interpreted(of_nothing) == [0.0, 0.0, pytest.approx(2.0), 0.0]


def check_operator() -> None:
    y, weight, gate = (x.requires_grad_() for x in made((2, 5, 3, 16), torch.float32, "y", "weight", "gate"))
    torch.library.opcheck(norm_op, (y, weight, gate, True, False, y.dtype, 1e-6))
    torch.library.opcheck(norm_op, (y, None, None, False, True, torch.float16, 1e-12))


def test_the_operator_is_registered_as_it_should_be() -> None:
    interpreted(check_operator)
