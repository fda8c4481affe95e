"""Learned feature maps: the Triton kernels in Triton's interpreter against PyTorch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import TOLERANCE, relative_error
from triton_tools import gradients, interpreted

from linearize_kernels.layers.features import Features
from linearize_kernels.layers.learned_maps import fits, map_op
from linearize_kernels.mixer import AttentionSite

SHAPES = [(2, 5, 3, 16), (1, 150, 2, 24)]
HALF, FULL = torch.float16, torch.float32


def mapped(kind: str, shape: tuple[int, ...], dtype: torch.dtype, weights: torch.dtype) -> float:
    """The largest error of the features of y of a shape [B,T,H,D], and of the gradients of y, W and b."""
    torch.manual_seed(shape[1])
    H, D = shape[2:]
    inputs = [torch.randn(shape).to(dtype), (torch.eye(D) + 0.3 * torch.randn(H, D, D)).to(weights)]
    inputs += [(0.3 * torch.randn(H, D)).to(weights)] * (kind == "relu")
    df = torch.randn(*shape[:3], D if kind == "relu" else 2 * D)

    def kernels(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = map_op(y, weight, bias, D**-0.25)
        return out

    def plain(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        z = torch.einsum("bthd,hed->bthe", y * D**-0.25, weight)
        if bias is not None:
            return (z + bias).relu() * (2 / D) ** 0.5
        return torch.cat([z.softmax(-1), (-z).softmax(-1)], -1) * (D / 2) ** 0.5

    turned = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)  # as q comes from a model, tokens behind heads
    ours = gradients(kernels, [turned, *inputs[1:]], df)
    reference = gradients(plain, [x.double() for x in inputs], df.to(dtype))
    return max(itertools.starmap(relative_error, zip(ours, reference, strict=True)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "weights"), [(FULL, FULL), (HALF, FULL), (HALF, HALF)], ids=str)
@pytest.mark.parametrize("kind", ["relu", "hedgehog"])
def test_kernels_compute_what_pytorch_does(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, weights: torch.dtype
) -> None:
    assert interpreted(mapped, kind, shape, dtype, weights) < TOLERANCE[dtype]


def taken(dtype: torch.dtype, weights: torch.dtype) -> bool:
    return fits(torch.zeros(1, 5, 2, 16, dtype=dtype), torch.zeros(2, 16, 16, dtype=weights))


@pytest.mark.parametrize("dtype", [FULL, HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [FULL, HALF, torch.bfloat16, torch.float64], ids=str)
def test_kernels_take_weights_in_the_dtype_of_y_or_in_fp32(dtype: torch.dtype, weights: torch.dtype) -> None:
    """A product of fp32 and bf16 does not compile, as of a q that was rotated in fp32 in a model in bf16."""
    assert interpreted(taken, dtype, weights) == (weights in (dtype, FULL))


def of_no_tokens(kind: str) -> tuple[int, ...]:
    """The shape of features of no tokens; their weights get a gradient, too."""
    site = AttentionSite(0, "", "", 32, 2, 1, 16, 16, 0.2, True)
    features = Features.at(site, kind)
    features.reset_parameters()
    out = features(torch.randn(1, 0, 2, 16), "query")
    out.sum().backward()
    assert features.query_map.grad is not None
    return tuple(out.shape)


@pytest.mark.parametrize(("kind", "size"), [("relu", 16), ("hedgehog", 32)])
def test_no_tokens_have_no_features(kind: str, size: int) -> None:
    assert interpreted(of_no_tokens, kind) == (1, 0, 2, size)


def check_operator() -> None:
    y, weight, bias = (
        x.requires_grad_() for x in (torch.randn(2, 5, 2, 16), torch.randn(2, 16, 16), torch.randn(2, 16))
    )
    torch.library.opcheck(map_op, (y, weight, None, 0.5))
    torch.library.opcheck(map_op, (y, weight, bias, 0.5))


def test_the_operator_is_registered_as_it_should_be() -> None:
    interpreted(check_operator)


def feature_paths(kind: str) -> float:
    """The difference between what a mixer's features are with kernels, and in PyTorch."""
    torch.manual_seed(0)
    site = AttentionSite(0, "", "", 32, 2, 1, 16, 16, 0.2, True)
    features, y = Features.at(site, kind), torch.randn(2, 9, 2, 16)
    assert features.kernel is not None
    features.reset_parameters()
    exact = features.double()(y.double(), "query")
    return relative_error(features.float()(y, "query"), exact)


@pytest.mark.parametrize("kind", ["relu", "hedgehog"])
def test_features_of_both_paths_are_the_same(kind: str) -> None:
    assert interpreted(feature_paths, kind) < TOLERANCE[torch.float32]
