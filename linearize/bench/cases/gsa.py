"""Benchmark cases of GSA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from linearize_kernels.gsa.gsa import GSAState, gsa

from ..case import LONG, Case, Run, Shape, random_qkv


def shape(B: int, T: int, H: int = 16, Hkv: int = 4, **others: Any) -> Shape:
    return Shape(B, T, H, Hkv, 128, 64, **others)


# The presets' options in Llama 3.1 8B: 128 slots, a memory for each query head.
PRESET = Shape(4, 2048, 32, 8, 128, 128, memories=32)


class GSA(Case):
    function = staticmethod(gsa)
    shapes = (
        PRESET,
        PRESET._replace(B=1, T=16384),
        shape(8, 2048),
        *(shape(1, T) for T in (8192, 16384, 65536)),
        *(shape(1, T, H, H) for T, H in LONG if H < 16),
    )
    errors = (
        PRESET._replace(B=2, T=1024),
        shape(2, 1024),
        shape(2, 1024, gates="bfloat16"),
        shape(2, 1024, dtype="float16"),
        shape(2, 1024, dtype="float32"),
    )
    steps = (
        *(PRESET._replace(B=B, T=1) for B in (16, 1)),
        *(shape(B, 1, 32, 8) for B in (64, 16, 1)),
    )
    names = ("q", "k", "v", "g")

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Half-lives of the slots spread from a few tokens to thousands, as at conversion."""
        qkv = random_qkv(shape, device)
        bias = torch.linspace(-2.0, 8.0, shape.M, device=device)
        size = shape.B, shape.T, shape.memories or shape.Hkv, shape.M
        g = logsigmoid(torch.randn(size, device=device) + bias) / 8.0
        return [*qkv, g.to(getattr(torch, shape.gates))]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        from fla.ops.gsa import chunk_gsa

        q, g = inputs[0], inputs[3]

        def run() -> Tensor:
            copies = g.shape[2] // inputs[1].shape[2]  # its memories have keys of their own
            k, v = (x if copies == 1 else x.repeat_interleave(copies, 2) for x in inputs[1:3])
            return chunk_gsa(q, k, v, -torch.expm1(g).to(q.dtype), g.to(q.dtype), q.shape[-1] ** -0.5)[0]

        return {"fla chunk_gsa": run}

    def state(self, shape: Shape, device: str) -> GSAState:
        size = shape.B, shape.memories or shape.Hkv, shape.M, shape.D
        keys, values = (torch.randn(size, device=device) for _ in range(2))
        return GSAState(keys, values, torch.zeros(shape.B, device=device).long())
