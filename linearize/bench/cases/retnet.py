"""Benchmark cases of retention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from linearize_kernels.linear.launch import Precision
from linearize_kernels.retnet.retnet import RetNetState, retnet

from ..case import LONG, OURS, Case, Run, Shape, random_qkv


def shape(B: int, T: int, H: int = 16, **others: Any) -> Shape:
    return Shape(B, T, H, H, 128, **others)


@functools.cache
def log_decay(heads: int, device: torch.device) -> Tensor:
    """Of the paper: gamma = 1 - 2^(-5-h)."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, device=device)))


class Retention(Case):
    memory = RetNetState
    shapes = (shape(8, 2048), *(shape(1, *size) for size in LONG))
    errors = tuple(shape(2, 1024, dtype=dtype) for dtype in ("bfloat16", "float16", "float32"))
    steps = (shape(64, 1), shape(1, 1))
    precision = "tf32"

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        return random_qkv(shape, device)

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        return self._run(inputs, shape, backend, "tf32")

    def peers(self, inputs: list[Tensor], shape: Shape, backend: str) -> dict[str, Run]:
        if shape.dtype != "float32" or backend == "torch":
            return {}
        return {f"{OURS}, bf16x6": lambda: self._run(inputs, shape, backend, "bf16x6")}

    @staticmethod
    def _run(inputs: list[Tensor], shape: Shape, backend: Any, precision: Precision) -> Tensor:
        decay = log_decay(shape.Hkv, inputs[0].device)
        return retnet(*inputs, log_decay=decay, backend=backend, precision=precision)[0]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        from fla.ops.retention import chunk_retention

        return {"fla chunk_retention": lambda: chunk_retention(*inputs)[0]}

    def step(self, inputs: list[Tensor], state: RetNetState, backend: Any) -> Any:
        decay = log_decay(state.memory.shape[1], inputs[0].device)
        return retnet(*inputs, log_decay=decay, state=state, backend=backend)
