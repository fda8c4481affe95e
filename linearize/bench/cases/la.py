"""Benchmark cases of linear attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from linearize_kernels.la.la import LAState, la

from ..case import OURS, Case, Run, Shape, random_qkv


def shape(dtype: str, B: int = 4, T: int = 10_000, **others: Any) -> Shape:
    return Shape(B, T, 16, 16, 128, dtype=dtype, **others)


BOTH = ((32, 4096, 6, 64), (16, 6400, 3, 64), (1, 31500, 12, 128))


class LA(Case):
    function = staticmethod(la)
    shapes = (
        shape("bfloat16"),
        shape("float32"),
        # Diffusion transformers: DiT-S/2 at 4096 tokens, three heads, Wan 2.1 at 21 x 30 x 50.
        *(Shape(B, T, H, H, D, causal=False) for B, T, H, D in BOTH),
    )
    errors = tuple(
        shape(dtype, 2, 1000, causal=causal) for causal in (True, False) for dtype in ("bfloat16", "float16", "float32")
    )
    steps = (shape("bfloat16", 64, 1), shape("bfloat16", 1, 1))
    torch_tokens = 140_000
    precision = "tf32"

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Unit vectors q and k, as the paper's."""
        q, k, v = random_qkv(shape, device)
        return [normalize(q, dim=-1), normalize(k, dim=-1), v]

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        return la(*inputs, causal=shape.causal, backend=backend, precision="tf32")[0]

    def peers(self, inputs: list[Tensor], shape: Shape, backend: str) -> dict[str, Run]:
        if shape.dtype != "float32" or backend == "torch":
            return {}
        return {f"{OURS}, bf16x6": lambda: la(*inputs, causal=shape.causal, backend="triton", precision="bf16x6")[0]}

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        """Its kernel is b q.k, without the constant a; its products of fp32 are triton's default."""
        from fla.ops.linear_attn import chunk_linear_attn

        if not shape.causal:
            return {}
        name = "fla chunk_linear_attn" + ", tf32" * (shape.dtype == "float32")
        return {name: lambda: chunk_linear_attn(*inputs, scale=1.0, normalize=True)[0]}

    def state(self, shape: Shape, device: str) -> LAState:
        sizes = ((shape.D, shape.D), (shape.D,), (shape.D,))
        products, keys, values = (torch.rand(shape.B, shape.Hkv, *size, device=device) for size in sizes)
        return LAState(products, keys, values, torch.full((shape.B,), 100, device=device))
