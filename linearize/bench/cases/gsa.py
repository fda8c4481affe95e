"""Benchmark cases of GSA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from linearize_kernels.gsa.gsa import GSAState, gsa

from ..case import Case, Run, Shape, random_qkv


def shape(B: int, T: int, H: int = 16, Hkv: int = 4, **others: Any) -> Shape:
    return Shape(B, T, H, Hkv, 128, 64, **others)


class GSA(Case):
    shapes = (shape(8, 2048), shape(1, 8192), shape(1, 16384), shape(1, 65536))
    errors = (
        shape(2, 1024),
        shape(2, 1024, gates="bfloat16"),
        shape(2, 1024, dtype="float16"),
        shape(2, 1024, dtype="float32"),
    )
    steps = (shape(64, 1, 32, 8), shape(16, 1, 32, 8), shape(1, 1, 32, 8))
    names = ("q", "k", "v", "g")

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Half-lives of the slots spread from a few tokens to thousands, as at conversion."""
        qkv = random_qkv(shape, device)
        bias = torch.linspace(-2.0, 8.0, shape.M, device=device)
        g = logsigmoid(torch.randn(shape.B, shape.T, shape.Hkv, shape.M, device=device) + bias) / 8.0
        return [*qkv, g.to(getattr(torch, shape.gates))]

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        return gsa(*inputs, backend=backend)[0]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        from fla.ops.gsa import chunk_gsa

        q, k, v, g = inputs

        def run() -> Tensor:
            return chunk_gsa(q, k, v, -torch.expm1(g).to(q.dtype), g.to(q.dtype), q.shape[-1] ** -0.5)[0]

        return {"fla chunk_gsa": run}

    def state(self, shape: Shape, device: str) -> GSAState:
        keys, values = (torch.randn(shape.B, shape.Hkv, shape.M, shape.D, device=device) for _ in range(2))
        return GSAState(keys, values, torch.zeros(shape.B, device=device).long())

    def step(self, inputs: list[Tensor], state: GSAState, backend: Any) -> Any:
        return gsa(*inputs, state=state, backend=backend)
