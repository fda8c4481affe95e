"""Benchmark cases of the exact window."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from linearize_kernels.window.window import window as window_attention

from ..case import Case, Run, Shape, random_qkv

SINK = 1


def shape(B: int, T: int, H: int, Hkv: int, D: int, W: int = 64, **others: Any) -> Shape:
    return Shape(B, T, H, Hkv, D, W, **others)


class Window(Case):
    # A small model's training step, an 8B model's, a long row, a wide window.
    shapes = (
        shape(16, 1024, 8, 4, 64),
        shape(8, 2048, 32, 8, 128),
        shape(1, 16384, 32, 8, 128),
        shape(8, 2048, 32, 8, 128, 512),
    )
    errors = tuple(shape(2, 1024, 16, 4, 128, dtype=dtype) for dtype in ("bfloat16", "float16", "float32"))

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        return random_qkv(shape, device)

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        return window_attention(*inputs, window=shape.M, sink=SINK, scale=shape.D**-0.5, backend=backend)[0]

    def peers(self, inputs: list[Tensor], shape: Shape, backend: str) -> dict[str, Run]:
        """The same tokens seen by torch's flex_attention, compiled."""
        if backend == "torch" or shape.dtype == "float32":
            return {}
        return {"flex_attention, compiled": lambda: flex(inputs, _mask(shape.T, shape.M), shape.Hkv < shape.H)}


@cache
def _mask(T: int, W: int) -> BlockMask:
    def sees(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & ((i - j < W) | (j < SINK))

    return create_block_mask(sees, None, None, T, T, device="cuda")


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def flex(inputs: list[Tensor], mask: BlockMask, grouped: bool) -> Tensor:
    """Softmax of q [B,T,H,D] over what `mask` lets it see of k, v [B,T,Hkv,D]."""
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return _compiled()(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)
