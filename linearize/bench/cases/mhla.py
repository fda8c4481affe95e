"""Benchmark cases of MHLA."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from linearize_kernels.la.la import la
from linearize_kernels.layout import Grid
from linearize_kernels.mhla.eager import MHLAState
from linearize_kernels.mhla.mhla import mhla, mhla_grid
from linearize_kernels.mhla.places import place_grid

from ..case import Case, Run, Shape, random_qkv

BLOCK = 64
# Both ways: tokens -> the grid that they are, and the blocks along its axes.
GRIDS = {4096: ((64, 64), (1, 4, 4)), 6400: ((80, 80), (1, 4, 4)), 31500: ((21, 30, 50), (3, 5, 10))}


def text(B: int, T: int, Hkv: int = 4, D: int = 64, **others: Any) -> Shape:
    return Shape(B, T, 16, Hkv, D, 32, **others)


def image(B: int, T: int, H: int, D: int, M: int, **others: Any) -> Shape:
    return Shape(B, T, H, H, D, M, causal=False, **others)


class MHLA(Case):
    # DiT-S/2 at 4096 tokens, an image of 80 x 80 patches, a video of 21 x 30 x 50 as Wan2.1 has it.
    shapes = (
        text(8, 2048),
        text(8, 2048, Hkv=16),
        text(8, 2048, D=128),
        text(1, 16384),
        text(1, 131072),
        image(32, 4096, 6, 64, 16),
        image(16, 6400, 3, 64, 16),
        image(1, 31500, 12, 128, 150),
    )
    errors = tuple(
        shape._replace(dtype=dtype)
        for shape in (text(2, 1000), image(2, 4096, 6, 64, 16))
        for dtype in ("bfloat16", "float16", "float32")
    )
    steps = (text(64, 1), text(1, 1))
    names = ("q", "k", "v", "w")
    torch_tokens = 140_000

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Positive features, and weights of pairs of blocks around one."""
        q, k, v = random_qkv(shape, device)
        w = torch.rand(shape.Hkv, shape.M, shape.M, device=device) + 0.5
        return [q.abs(), k.abs(), v, w.to(getattr(torch, shape.gates))]

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        if shape.causal:  # in one block alone nothing is mixed
            block_size = BLOCK if shape.T > BLOCK else 4
            return mhla(*inputs, block_size=block_size, backend=backend)[0]
        q, k, v, m = inputs
        size, blocks = GRIDS.get(shape.T, ((1, shape.T), (1, 1, shape.M)))
        return mhla_grid(q, k, v, m, place_grid(Grid(size), blocks, q), backend=backend)

    def peers(self, inputs: list[Tensor], shape: Shape, backend: str) -> dict[str, Run]:
        q, k, v, w = inputs
        if not shape.causal:
            return {"linear attention, linearize": lambda: la(q, k, v, a=0.0, causal=False)[0]}
        loop = shape.T <= 2048 and shape.T % BLOCK == 0
        return {"Python loop over blocks": partial(loop_over_blocks, q, k, v, w)} if loop else {}

    def state(self, shape: Shape, device: str) -> MHLAState:
        row = shape.Hkv, shape.D, shape.D + 1
        past = torch.rand(shape.B, shape.M - 2, *row, device=device)
        old, current, mixed = (torch.rand(shape.B, *row, device=device) for _ in range(3))
        return MHLAState(past, old, current, mixed, torch.full((shape.B,), 100, device=device))

    def step(self, inputs: list[Tensor], state: MHLAState, backend: Any) -> Any:
        return mhla(*inputs, block_size=BLOCK, state=state)


def loop_over_blocks(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The authors' language models: a list of summaries, mixed anew for every block. [B,T,H,D] of whole blocks."""
    G = q.shape[2] // k.shape[2]
    q, k, v = (y.transpose(1, 2).repeat_interleave(g, 1) for y, g in ((q, 1), (k, G), (v, G)))
    w = w.to(q.dtype).repeat_interleave(G, 0)
    causal = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).tril()
    summaries: list[Tensor] = []
    sums: list[Tensor] = []
    outputs = []
    for i, (Q, K, V) in enumerate(zip(*(y.split(BLOCK, 2) for y in (q, k, v)), strict=True)):
        A = w[:, i, :1, None] * (Q @ K.mT).masked_fill(~causal, 0.0)
        o, g = A @ V, A.sum(-1)
        if i:
            row = w[:, i, 1 : i + 1].flip(1)
            o = o + Q @ torch.einsum("hb,bnhkv->nhkv", row, torch.stack(summaries))
            g = g + (Q * torch.einsum("hb,bnhk->nhk", row, torch.stack(sums))[:, :, None]).sum(-1)
        outputs.append(o / g[..., None])
        summaries.append(K.mT @ V)
        sums.append(K.sum(2))
    return torch.cat(outputs, 2).transpose(1, 2)
