"""Blocks of diffusion transformers, attention and MLP: linear mechanisms beside SDPA, on random weights in bf16.

python -m benchmarks.vision --mechanisms saga mhla la:feature_map=hedgehog --shapes dit-1024 dit-4096 wan

`dit-N` are the twelve blocks of DiT-S/2 for N tokens, 32 images; `wan` is a block of Wan2.1-1.3B for 81 frames of
480x800. What conditions a block (a step of time, text) and rotary embedding are left out.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.bench.kernels import attempt
from linearize.bench.timing import here, machine
from linearize.bench.vision import inference, training
from linearize.plan.mechanisms import build_mixer, parse_settings, resolve_options
from linearize_kernels.layout import Grid, TokenLayout
from linearize_kernels.mixer import Mixer, Site


class Shape(NamedTuple):
    """B rows of a grid of tokens through `blocks` blocks of `heads` heads of `dim`, their MLP `inner` wide."""

    B: int
    grid: tuple[int, ...]
    heads: int
    dim: int
    inner: int
    blocks: int


SHAPES = {
    "dit-1024": Shape(32, (32, 32), 6, 64, 1536, 12),
    "dit-4096": Shape(32, (64, 64), 6, 64, 1536, 12),
    "wan": Shape(1, (21, 30, 50), 12, 128, 8960, 1),
}
SDPA = "softmax, SDPA"


class Block(nn.Module):
    """Attention and MLP, each with its norm and residual; without a mixer the attention is SDPA."""

    def __init__(self, shape: Shape, mixer: Mixer | None) -> None:
        super().__init__()
        width = shape.heads * shape.dim
        self.shape, self.mixer, self.grid = shape, mixer, Grid(shape.grid)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, shape.inner), nn.GELU("tanh"), nn.Linear(shape.inner, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (part(y).unflatten(-1, (self.shape.heads, -1)) for part in (self.q, self.k, self.v))
        if self.mixer is None:
            o = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2)
        else:
            o, _ = self.mixer(q, k, v, y, TokenLayout(causal=False, grid=self.grid))
        x = x + self.o(o.to(x.dtype).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Blocks(nn.Sequential):
    """Blocks that answer as a model of transformers does, with a tuple."""

    def forward(self, x: Tensor) -> Any:
        return (super().forward(x),)


def make(shape: Shape, mechanism: str | None) -> Blocks:
    """The blocks of a shape with `mechanism:option=value,..` in the place of softmax, or with SDPA."""
    width = shape.heads * shape.dim
    site = Site(0, "block", "self", width, shape.heads, shape.heads, shape.dim, shape.dim, shape.dim**-0.5, False,
                grid="patches")  # fmt: skip
    mixers: list[Mixer | None] = [None] * shape.blocks
    if mechanism is not None:
        name, _, settings = mechanism.partition(":")
        options = resolve_options(name, parse_settings(settings.split(",") if settings else []))
        with torch.device(here()):
            mixers = [build_mixer(name, site, options) for _ in range(shape.blocks)]
    with torch.device(here()):
        blocks = Blocks(*(Block(shape, mixer) for mixer in mixers))
    for mixer in mixers:
        if mixer is not None:
            mixer.reset_parameters()
    return blocks.to(torch.bfloat16)


def measure(shape: Shape, mechanism: str | None) -> dict[str, Any]:
    """Inference and training of one contender."""
    blocks = make(shape, mechanism)
    T = Grid(shape.grid).tokens
    x = torch.randn(shape.B, T, shape.heads * shape.dim, device=here(), dtype=torch.bfloat16)
    return {"inference": attempt(partial(inference, blocks, x)), "training": attempt(partial(training, blocks, x))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", default=["la", "saga", "mhla"])
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--divide", type=int, default=1, help="sides and rows of a grid are that much smaller")
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    for name in arguments.shapes:
        shape = SHAPES[name]
        small = tuple(max(1, side // arguments.divide) for side in shape.grid)
        shape = shape._replace(B=max(1, shape.B // arguments.divide), grid=small)
        for mechanism in (None, *arguments.mechanisms):
            found = measure(shape, mechanism)
            print(json.dumps({"shape": name, "name": mechanism or SDPA, **found}), flush=True)


if __name__ == "__main__":
    main()
