"""One token's softmax over buffers that are not full: the kernels in Triton's interpreter against float64."""

from __future__ import annotations

import pytest
import torch
from conftest import TOLERANCE, holds, relative_error
from torch import Tensor
from triton_tools import interpreted

from linearize_kernels.layers import softmax_step as own


def buffers(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """q, keys, values, which places are real and how many are filled, of B rows, H and E heads of D and Dv, N places
    and n tokens before the new one; places beyond are not numbers."""
    B, H, E, D, DV, N, n = sizes
    torch.manual_seed(n)
    q, k, v = torch.randn(B, H, 1, D), torch.randn(B, E, N, D), torch.randn(B, E, N, DV)
    k[:, :, n + 1 :], v[:, :, n + 1 :] = torch.nan, torch.nan
    real = torch.rand(B, N) > 0.3
    real[:, n:] = False
    return *(x.to(dtype) for x in (q, k, v)), real, torch.tensor([n])


def expected(q: Tensor, k: Tensor, v: Tensor, real: Tensor, count: Tensor, scale: float) -> Tensor:
    """The same from the definition, in float64."""
    n = int(count)
    q, k, v = q.double(), k[:, :, : n + 1].double(), v[:, :, : n + 1].double()
    seen = real[:, : n + 1].clone()
    seen[:, n] = True
    scores = scale * torch.einsum("begd,bend->begn", q[:, :, 0].unflatten(1, (k.shape[1], -1)), k)
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("begn,bend->begd", weights, v).flatten(1, 2)[:, None]


def error(dtype: torch.dtype, sizes: tuple[int, ...], pieces: int) -> float:
    x = buffers(dtype, sizes)
    return relative_error(own.step_op(*x, 0.3, pieces), expected(*x, 0.3))


@pytest.mark.parametrize("pieces", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(1, 8, 2, 64, 64, 300, 260), (2, 4, 4, 48, 80, 64, 3), (3, 16, 1, 32, 32, 300, 298), (2, 4, 2, 16, 16, 9, 0)],
)
def test_kernels_compute_the_definition(dtype: torch.dtype, sizes: tuple[int, ...], pieces: int) -> None:
    assert interpreted(error, dtype, sizes, pieces) < TOLERANCE[dtype]


def test_rows_are_cut_so_that_one_fills_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 6)
    properties = type("Properties", (), {"processors": 132})
    monkeypatch.setattr(own, "target", lambda device: properties)
    assert [own.pieces(gpu, programs) for programs in (8, 128, 4096)] == [32, 2, 1]


def test_what_kernels_cannot_take_is_said() -> None:
    q, v = torch.randn(1, 2, 1, 512), torch.randn(1, 2, 4, 512)
    assert holds(own.obstacle(q, v), "tensors", "cpu")
