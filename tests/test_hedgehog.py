"""Hedgehog's map: the Triton kernels in Triton's interpreter, in a process of their own, against PyTorch in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, relative_error
from triton_tools import run_script

from linearize_kernels.features import Features
from linearize_kernels.hedgehog import hedgehog_op

DTYPES = (torch.float32, torch.float16)
SHAPES = [(2, 5, 3, 16), (1, 150, 2, 24)]


def gradients(function: Any, inputs: list[torch.Tensor], do: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of the inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    o = function(*leaves)
    return [o, *torch.autograd.grad(o, leaves, do.to(o.dtype))]


def mapped(shape: tuple[int, ...], dtype: torch.dtype, weights: torch.dtype) -> float:
    """The largest error of the features of y of a shape [B,T,H,D], and of the gradients of y and W."""
    torch.manual_seed(shape[1])
    H, D = shape[2:]
    inputs = [torch.randn(shape).to(dtype), (torch.eye(D) + 0.3 * torch.randn(H, D, D)).to(weights)]
    df = torch.randn(*shape[:3], 2 * D)

    def plain(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        z = torch.einsum("bthd,hed->bthe", y * D**-0.25, weight)
        return torch.cat([z.softmax(-1), (-z).softmax(-1)], -1) * (D / 2) ** 0.5

    ours = gradients(lambda y, weight: hedgehog_op(y, weight, D**-0.25), inputs, df)
    reference = gradients(plain, [x.double() for x in inputs], df.to(dtype))
    return max(itertools.starmap(relative_error, zip(ours, reference, strict=True)))


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return run_script(__file__).splitlines()


def test_kernels_compute_what_pytorch_does(lines: list[str]) -> None:
    cases = [line.split() for line in lines if line.startswith("map")]
    assert len(cases) == (1 + len(DTYPES)) * len(SHAPES)
    for case in cases:
        assert float(case[-1]) < TOLERANCE[getattr(torch, case[1].removeprefix("torch."))], case


def test_the_operator_is_registered_as_it_should_be(lines: list[str]) -> None:
    assert lines[-1] == "operator fine"


def test_features_of_both_paths_are_the_same(lines: list[str]) -> None:
    assert float(next(line for line in lines if line.startswith("features")).split()[1]) < TOLERANCE[torch.float32]


def feature_paths() -> float:
    """The difference between what a mixer's features are with kernels, and in PyTorch."""
    features, y = Features("hedgehog", 2, 1, 16, 0.2), torch.randn(2, 9, 2, 16)
    features.reset_parameters()
    exact = features.double()(y.double(), "query")
    return relative_error(features.float()(y, "query"), exact)


def main() -> None:
    for dtype in DTYPES:
        for shape, weights in itertools.product(SHAPES, {dtype, torch.float32}):
            print("map", dtype, shape, mapped(shape, dtype, weights))
    print("features", feature_paths())
    inputs = [x.requires_grad_() for x in (torch.randn(2, 5, 2, 16), torch.randn(2, 16, 16))]
    torch.library.opcheck(hedgehog_op, (*inputs, 0.5))
    print("operator fine")


if __name__ == "__main__":
    main()
