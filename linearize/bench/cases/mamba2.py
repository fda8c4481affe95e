"""Benchmark cases of Mamba-2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from linearize_kernels.gla.eager import GLAState
from linearize_kernels.mamba2.mamba2 import mamba2

from ..case import LONG, Case, Run, Shape, random_qkv


def shape(B: int, T: int, H: int = 32, **others: Any) -> Shape:
    return Shape(B, T, H, H, 64, **others)


class Mamba2(Case):
    function = staticmethod(mamba2)
    memory = GLAState
    shapes = (shape(8, 2048), *(shape(1, *size) for size in LONG))
    errors = tuple(shape(2, 1024, dtype=dtype) for dtype in ("bfloat16", "float16", "float32"))
    steps = (shape(64, 1), shape(1, 1))
    names = ("q", "k", "v", "g", "step", "skip")

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Steps around 0.02 at a rate of 1: half-lives around 35 tokens."""
        q, k, v = random_qkv(shape, device)
        step = softplus(torch.randn(shape.B, shape.T, shape.H, device=device) - 4.0)
        skip, kind = torch.ones(shape.H, device=device), getattr(torch, shape.gates)
        return [q, k * shape.D**-0.5, v, (-step).to(kind), step.to(kind), skip]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        """Its simple GLA is the same recurrence; dt goes into k."""
        from fla.ops.simple_gla import chunk_simple_gla

        q, k, v, g, step, _ = inputs

        def run() -> Tensor:
            return chunk_simple_gla(q, (k * step[..., None]).to(k.dtype), v, g=g, scale=1.0)[0]

        return {"fla chunk_simple_gla": partial(run)}
