"""Softmax of rows: the kernels in Triton's interpreter, in a process of their own, against PyTorch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import TOLERANCE, relative_error
from triton_tools import run_script

from linearize_kernels.row_softmax import row_softmax

DTYPES = (torch.float32, torch.float16)


def results(dtype: torch.dtype, M: int, triangle: bool, plain: bool) -> dict[str, torch.Tensor]:
    """w and the gradient of its scores, for two rows of M x M."""
    torch.manual_seed(M)
    s = (3 * torch.randn(2, M, M)).to(dtype)
    s = (s.double() if plain else s).requires_grad_()
    w = row_softmax(s, 5.0, triangle, plain=plain)
    return {"w": w, "ds": torch.autograd.grad(w, s, torch.randn(2, M, M, dtype=torch.float64).to(w.dtype))[0]}


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return run_script(__file__).splitlines()


def test_kernels_compute_what_pytorch_does(lines: list[str]) -> None:
    cases = [line.split() for line in lines if line.startswith("case")]
    assert len(cases) == 2 * 3 * 2 * 2
    for case in cases:
        assert float(case[-1]) < (1e-6 if case[1] == "torch.float32" else TOLERANCE[torch.float16]), case


def test_the_operator_is_registered_as_it_should_be(lines: list[str]) -> None:
    assert lines[-1] == "operator fine"


def test_a_triangle_has_nothing_above_it() -> None:
    w = results(torch.float32, 5, True, True)["w"]
    assert not w.triu(1).any()
    assert torch.allclose(w.sum(-1), 5.0 * torch.arange(1.0, 6.0).double())


def main() -> None:
    for dtype, M, triangle in itertools.product(DTYPES, (1, 7, 33), (False, True)):
        ours, reference = (results(dtype, M, triangle, plain) for plain in (False, True))
        for name, value in reference.items():
            print("case", dtype, M, triangle, name, float(relative_error(ours[name].double(), value)))
    from linearize_kernels.row_softmax import forward_op

    torch.library.opcheck(forward_op, (torch.randn(2, 33, 6, requires_grad=True), 6.0, False))
    print("operator fine")


if __name__ == "__main__":
    main()
