"""Blocks of diffusion transformers and DeiT-T, attention and MLP: mechanisms beside SDPA, random bf16 weights.

python -m benchmarks.vision --mechanisms saga mhla la:feature_map=hedgehog --shapes dit-1024 dit-4096 wan
python -m benchmarks.vision --mechanisms saga mhla --shapes dit-1024 deit-t --compile

`--compile` measures each contender by torch.compile as well: on a GPU with CUDA graphs, where Python does not wait. A
row of `over_softmax` has SDPA's time over each mechanism's, both compiled or both not.

What conditions a block (a step of time, text) and rotary embedding are left out. encoder_lengths.py takes its blocks
from here.
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
from linearize.plan.mechanisms import build_mixer, parse_mechanism
from linearize_kernels.layout import Grid, TokenLayout
from linearize_kernels.mixer import AttentionSite, Mixer


class BlockShape(NamedTuple):
    """B rows of a grid of tokens through `blocks` blocks of `heads` heads of `dim`, their MLP `inner` wide."""

    B: int
    grid: tuple[int, ...]
    heads: int
    dim: int
    inner: int
    blocks: int


# The twelve blocks of DiT-S/2 for 256, 1,024 and 4,096 tokens (256, 512 and 1,024 pixels), 32 images; a block of
# Wan2.1-1.3B for 81 frames of 480x800; the twelve blocks of DeiT-T at 224 pixels, 256 images, without its class token.
BLOCKS = {
    "dit-256": BlockShape(32, (16, 16), 6, 64, 1536, 12),
    "dit-1024": BlockShape(32, (32, 32), 6, 64, 1536, 12),
    "dit-4096": BlockShape(32, (64, 64), 6, 64, 1536, 12),
    "wan": BlockShape(1, (21, 30, 50), 12, 128, 8960, 1),
    "deit-t": BlockShape(256, (14, 14), 3, 64, 768, 12),
}


class Block(nn.Module):
    """Attention and MLP, each with its norm and residual; without a mixer the attention is SDPA."""

    def __init__(self, shape: BlockShape, mixer: Mixer | None) -> None:
        super().__init__()
        width = shape.heads * shape.dim
        self.shape, self.mixer = shape, mixer
        self.grid = None if mixer is not None and mixer.site.grid == "line" else Grid(shape.grid)
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


def make_blocks(shape: BlockShape, mechanism: str | None) -> Blocks:
    """The blocks of a shape with a mechanism, `NAME:option=value,..`, in the place of softmax, or with SDPA."""
    width = shape.heads * shape.dim
    mixers: list[Mixer | None] = [None] * shape.blocks
    with torch.device(here()):
        if mechanism is not None:
            name, own = parse_mechanism(mechanism)
            grid = "line" if own["window"] else "patches"  # bidirectional attention has windows on a line alone
            site = AttentionSite(0, "block", "self", width, shape.heads, shape.heads, shape.dim, shape.dim,
                                 shape.dim**-0.5, False, grid=grid)  # fmt: skip
            mixers = [build_mixer(name, site, own) for _ in range(shape.blocks)]
        blocks = Blocks(*(Block(shape, mixer) for mixer in mixers))
    for mixer in mixers:
        if mixer is not None:
            mixer.reset_parameters()
    return blocks.to(torch.bfloat16)


def block_inputs(shape: BlockShape) -> Tensor:
    """Hidden states [B,T,width]."""
    size = shape.B, Grid(shape.grid).tokens, shape.heads * shape.dim
    return torch.randn(size, device=here(), dtype=torch.bfloat16)


SDPA = "softmax, SDPA"


WORKS = {"inference": inference, "training": training}


def measure(shape: BlockShape, mechanism: str | None, compiled: bool) -> dict[str, Any]:
    """Inference and training of one contender, `mechanism:option=value,..` or SDPA; each compiled too on demand."""
    blocks = make_blocks(shape, mechanism)
    x = block_inputs(shape)
    found = {work: attempt(partial(run, blocks, x)) for work, run in WORKS.items()}
    for work, run in WORKS.items() if compiled else ():
        torch.compiler.reset()  # earlier ones count: past a limit torch runs what it has not compiled
        mode = "reduce-overhead" if here() == "cuda" else None
        found[f"{work}, compiled"] = attempt(partial(run, torch.compile(blocks, mode=mode), x))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", default=["la", "saga", "mhla"])
    parser.add_argument("--shapes", nargs="+", default=["dit-1024", "dit-4096", "wan"], choices=[*BLOCKS])
    parser.add_argument("--divide", type=int, default=1, help="sides and rows of a grid are that much smaller")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile as well")
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    for name in arguments.shapes:
        shape = BLOCKS[name]
        small = tuple(max(1, side // arguments.divide) for side in shape.grid)
        shape = shape._replace(B=max(1, shape.B // arguments.divide), grid=small)
        softmax: dict[str, Any] = {}
        for mechanism in (None, *arguments.mechanisms):
            found = measure(shape, mechanism, arguments.compile)
            softmax = softmax or found
            over = {
                work: round(softmax[work]["ms"] / one["ms"], 3)
                for work, one in found.items()
                if "ms" in one and "ms" in softmax[work]
            }
            print(json.dumps({"shape": name, "name": mechanism or SDPA, "over_softmax": over, **found}), flush=True)


if __name__ == "__main__":
    main()
