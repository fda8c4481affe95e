"""Benchmark cases of gated linear attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from linearize_kernels.gla.gla import GLAState, gla

from ..case import LONG, Case, Run, Shape, random_qkv


def shape(B: int, T: int, H: int = 16, **others: Any) -> Shape:
    return Shape(B, T, H, H, 128, **others)


class GLA(Case):
    function = staticmethod(gla)
    memory = GLAState
    shapes = (shape(8, 2048), shape(8, 2048, gates="bfloat16"), *(shape(1, *size) for size in LONG))
    errors = (
        shape(2, 1024),
        shape(2, 1024, gates="bfloat16"),
        shape(2, 1024, dtype="float16"),
        shape(2, 1024, dtype="float32"),
    )
    steps = (shape(64, 1), shape(1, 1))
    names = ("q", "k", "v", "g")

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Gates as the paper's start: half-lives around 16 tokens."""
        qkv = random_qkv(shape, device)
        g = logsigmoid(torch.randn(shape.B, shape.T, shape.Hkv, shape.D, device=device)) / 16.0
        return [*qkv, g.to(getattr(torch, shape.gates))]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        from fla.ops.gla import chunk_gla

        return {"fla chunk_gla": lambda: chunk_gla(*inputs)[0]}
