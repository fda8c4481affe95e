"""The short convolution: its Triton kernels in Triton's interpreter against PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, relative_error
from torch import Tensor
from triton_tools import interpreted

from linearize_kernels.layers.conv import conv_in_pool, conv_op, pool_op, short_conv

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "swish": {"swish": True, "bias": True},
    "two documents": {"segments": True, "swish": True, "bias": True},
    "goes on": {"tail": True, "segments": True, "bias": True},
    "a token": {"tail": True, "T": 1, "swish": True, "bias": True},
    "two tokens": {"tail": True, "T": 2},
    "sequences": {"cu": True, "swish": True, "bias": True},
    "sequences that go on": {"cu": True, "tail": True},
    "long rows": {"T": 700, "H": 1, "D": 200, "K": 2, "segments": True, "swish": True},
    "many taps": {"K": 7, "segments": True},
}


def results(case: dict[str, Any], dtype: torch.dtype, plain: bool) -> list[Tensor]:
    """Output, last tokens, and gradients of both through y, taps and bias."""
    torch.manual_seed(0)
    (B, T, H, D, K), cu = (case.get(name, n) for name, n in zip("BTHDK", (2, 45, 3, 20, 4), strict=True)), None
    segments = (torch.arange(T) // 19 % 2).expand(B, T) if case.get("segments") else None
    if case.get("cu"):
        B, cu = 1, torch.tensor([0, 1, 1, 3, T - 9, T], dtype=torch.int32)
    y = torch.randn(B, H, T, D).to(dtype).transpose(1, 2).requires_grad_()  # as q comes from a model
    taps, bias = torch.randn(H, D, K, requires_grad=True), torch.randn(H, D, requires_grad=True)
    tail = torch.randn(B if cu is None else len(cu) - 1, K - 1, H, D) if case.get("tail") else None
    leaves = [y, taps] + [bias] * bool(case.get("bias"))
    given = y.float() if plain else y
    out, last = short_conv(
        given, taps, tail, None, segments, cu, bias=bias if case.get("bias") else None, swish=bool(case.get("swish")),
        plain=plain,
    )  # fmt: skip
    sent = torch.randn(out.shape).to(dtype), torch.randn(last.shape)
    found = torch.autograd.grad([out, last], leaves, [sent[0].to(out.dtype), sent[1]])
    return [out.detach(), last.detach(), *found]


def errors(case: dict[str, Any], dtype: torch.dtype) -> list[float]:
    pairs = zip(results(case, dtype, False), results(case, dtype, True), strict=True)
    return list(itertools.starmap(relative_error, ((x.float(), y) for x, y in pairs)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_convolve_as_pytorch_does(name: str, dtype: torch.dtype) -> None:
    assert max(interpreted(errors, CASES[name], dtype)) < TOLERANCE[dtype]


def check_operator() -> None:
    y, taps, bias = torch.randn(2, 9, 3, 16), torch.randn(3, 16, 4), torch.randn(3, 16)
    number = (torch.arange(9) // 5).expand(2, -1)
    leaves = [x.requires_grad_() for x in (y, taps, bias)]
    torch.library.opcheck(conv_op, (*leaves, None, number, None, True))
    torch.library.opcheck(conv_op, (*leaves[:2], None, torch.randn(2, 3, 3, 16), None, None, False))
    one, tap = [torch.randn(2, 1, 3, 16)] * 3, [torch.randn(3, 16, 4)] * 3
    pools = [torch.randn(5, 3, 3, 16) for _ in range(3)]
    torch.library.opcheck(pool_op, (*one, *tap, None, None, None, *pools, torch.tensor([1, 4], dtype=torch.int32)))


def test_the_operator_is_registered_as_it_should_be() -> None:
    interpreted(check_operator)


def pool_errors(bias: bool) -> list[float]:
    """Outputs and pools after one token of four rows, one of them padding, by the kernel and by PyTorch on copies."""
    torch.manual_seed(0)
    K, rows, real = 4, torch.tensor([3, -1, 0, 5], dtype=torch.int32), torch.tensor([0, 2, 3])
    sizes = (4, 20), (2, 20), (2, 12)
    inputs = tuple(torch.randn(4, H, 2, D)[:, :, :1].transpose(1, 2) for H, D in sizes)
    taps = tuple(torch.randn(H, D, K) for H, D in sizes)
    tails = tuple(torch.randn(7, K - 1, H, D) for H, D in sizes)
    biases = tuple(torch.randn(H, D) for H, D in sizes) if bias else ()
    expected = []
    for y, tap, tail, b in zip(inputs, taps, tails, biases or (None,) * 3, strict=True):
        held = tail[rows.clamp_min(0).long()]
        out, last = short_conv(y, tap, held, None, None, bias=b, swish=bias, plain=True)
        expected += [out[real], tail.index_copy(0, rows[real].long(), last[real])]
    made = conv_in_pool(inputs, taps, tails, rows, biases)
    assert made is not None
    found = [x for out, tail in zip(made, tails, strict=True) for x in (out[real], tail)]
    return list(itertools.starmap(relative_error, zip(found, expected, strict=True)))


@pytest.mark.parametrize("bias", [False, True])
def test_one_token_of_rows_of_a_pool(bias: bool) -> None:
    assert max(interpreted(pool_errors, bias)) < TOLERANCE[torch.float32]
