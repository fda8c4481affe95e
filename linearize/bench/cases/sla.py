"""Benchmark cases of softmax linear attention: the cost of its gates over each base."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize_kernels.sla.sla import op_of, sla

from ..case import Case, Run, Shape, load_case
from .retnet import log_decay


def shape(base: str, B: int = 8, T: int = 2048, **others: Any) -> Shape:
    return Shape(B, T, 16, 16, 128, base=base, **others)


class SLA(Case):
    shapes = (shape("gla"), shape("gdn"), shape("retnet"))
    errors = (
        *(shape("gla", 2, 1024, dtype=dtype) for dtype in ("bfloat16", "float16", "float32")),
        *(shape(base, 2, 1024) for base in ("gdn", "retnet")),
    )
    steps = (shape("gla", 64, 1), shape("gla", 1, 1))

    def named(self, shape: Shape) -> tuple[str, ...]:
        return (*load_case(shape.base).names, "read_scores", "write_scores")

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        own = load_case(shape.base).inputs(shape, device)
        return [*own, *(torch.randn(shape.B, shape.T, heads, device=device) for heads in (shape.H, shape.Hkv))]

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        base: Any = shape.base
        return sla(**_named(inputs, shape), base=base, backend=backend)[0]

    def peers(self, inputs: list[Tensor], shape: Shape, backend: Any) -> dict[str, Run]:
        bare = _named(inputs[:-2], shape)
        base: Any = shape.base
        name = f"{shape.base} alone{', PyTorch path' if backend == 'torch' else ''}"
        return {name: lambda: op_of(base)(**bare, backend=backend)[0]}

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        """Its function for the base: the gates it has not."""
        return load_case(shape.base).fla(inputs[:-2], shape)

    def state(self, shape: Shape, device: str) -> Any:
        return load_case(shape.base).state(shape, device)

    def step(self, inputs: list[Tensor], state: Any, backend: Any) -> Any:
        return sla(**_named(inputs, self.steps[0]), base="gla", state=state, backend=backend)


def _named(inputs: list[Tensor], shape: Shape) -> dict[str, Any]:
    """What the base takes, and the scores where they are given."""
    named = dict(zip(SLA().named(shape), inputs, strict=False))
    return named | {"log_decay": log_decay(shape.Hkv, inputs[0].device)} if shape.base == "retnet" else named
