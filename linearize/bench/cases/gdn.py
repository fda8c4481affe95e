"""Benchmark cases of Gated DeltaNet."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from linearize_kernels.gdn.eager import DeltaState
from linearize_kernels.gdn.gdn import gdn

from ..case import LONG, Case, Run, Shape, random_qkv


def shape(B: int, T: int, H: int = 16, **others: Any) -> Shape:
    return Shape(B, T, H, H, 128, **others)


class GDN(Case):
    function = staticmethod(gdn)
    memory = DeltaState
    shapes = (shape(8, 2048), *(shape(1, *size) for size in LONG))
    errors = tuple(shape(2, 1024, dtype=dtype) for dtype in ("bfloat16", "float16", "float32"))
    steps = (shape(64, 1), shape(1, 1))
    names = ("q", "k", "v", "g", "beta")

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Unit vectors q and k; half-lives around 40 tokens, writes of about a half."""
        q, k, v = random_qkv(shape, device)
        g, beta = (torch.randn(shape.B, shape.T, shape.Hkv, device=device) for _ in range(2))
        g, beta = logsigmoid(g + 4.0), beta.sigmoid()
        return [normalize(q, dim=-1), normalize(k, dim=-1), v, *(x.to(getattr(torch, shape.gates)) for x in (g, beta))]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        """With triton 3.4 to 3.7.0 on Hopper it refuses to go backward, since gradients would be wrong (its issue
        #640): there also without that check."""
        from fla import utils
        from fla.ops.common import chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        q, k, v, g, beta = inputs

        def run(checked: bool) -> Tensor:
            chunk_o.TRITON_ABOVE_3_7_1 = utils.TRITON_ABOVE_3_7_1 if checked else True
            return chunk_gated_delta_rule(q, k, v, g, beta.to(q.dtype))[0]

        name = "fla chunk_gated_delta_rule"
        refused = utils.IS_NVIDIA_HOPPER and utils.TRITON_ABOVE_3_4_0 and not utils.TRITON_ABOVE_3_7_1
        runs: dict[str, Run] = {name: partial(run, True)}
        if refused:
            runs[f"{name}, its check taken out"] = partial(run, False)
        return runs
