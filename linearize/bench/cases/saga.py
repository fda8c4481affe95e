"""Benchmark cases of SAGA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize_kernels.saga.saga import Maps, saga

from ..case import Case, Shape, random_qkv


def image(B: int, T: int, H: int, D: int, base: str = "", **others: Any) -> Shape:
    return Shape(B, T, H, H, D, causal=False, base=base, **others)


class SAGA(Case):
    """Over `hedgehog` the features are made from q and k, otherwise q and k are positive and are features."""

    # DiT-S/2 at 4096 tokens, three heads, the stages of PVT-T at 1280 px; Wan 2.1 at 21 x 30 x 50.
    shapes = (
        image(32, 4096, 6, 64),
        image(16, 6400, 3, 64),
        image(1, 31500, 12, 128),
        image(32, 4096, 6, 64, "hedgehog"),
        image(16, 102400, 1, 64, "hedgehog"),
        image(16, 25600, 2, 64, "hedgehog"),
        image(16, 6400, 5, 64, "hedgehog"),
        image(16, 1601, 8, 64, "hedgehog"),
    )
    errors = tuple(image(2, 4096, 6, 64, "hedgehog", dtype=dtype) for dtype in ("bfloat16", "float16", "float32"))
    names = ("q", "k", "v", "key_gate", "value_gate", "output_gate", "local", "query_map", "key_map")
    torch_tokens = 2_000_000

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Gates as a conversion starts them, nearly open, and where there are maps, near the identity."""
        q, k, v = random_qkv(shape, device)
        if not shape.base:
            q, k = q.abs(), k.abs()
        width = shape.D if not shape.base else 2 * shape.D
        made = [q, k, v, torch.randn(*k.shape[:3], width, device=device).to(q.dtype) + 4, torch.randn_like(v) + 4]
        made += [torch.randn_like(q), torch.randn_like(v)]
        if shape.base:
            near = torch.eye(shape.D, device=device)
            made += [near + 0.05 * torch.randn(heads, *near.shape, device=device) for heads in (shape.H, shape.Hkv)]
        return made

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        *given, local = inputs[:7]
        maps = Maps("hedgehog", shape.D**-0.5, *inputs[7:]) if shape.base else Maps()
        return saga(*given, local=local, norm="mass", maps=maps, backend=backend)
