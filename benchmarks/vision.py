"""Blocks of diffusion transformers and DeiT-T, attention and MLP: mechanisms beside SDPA, random bf16 weights.

python -m benchmarks.vision --mechanisms saga mhla la:feature_map=hedgehog --shapes dit-1024 dit-4096 wan
python -m benchmarks.vision --mechanisms saga mhla --shapes dit-1024 deit-t --compile

`--compile` measures each contender by torch.compile as well: on a GPU with CUDA graphs, where Python does not wait. A
row of `over_softmax` has SDPA's time over each mechanism's, both compiled or both not.

The shapes are those of benchmarks/blocks.py.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch

from benchmarks.blocks import BLOCKS, BlockShape, block_inputs, make_blocks
from linearize.bench.kernels import attempt
from linearize.bench.timing import here, machine
from linearize.bench.vision import inference, training
from linearize.plan.mechanisms import parse_settings

SDPA = "softmax, SDPA"


WORKS = {"inference": inference, "training": training}


def measure(shape: BlockShape, mechanism: str | None, compiled: bool) -> dict[str, Any]:
    """Inference and training of one contender, `mechanism:option=value,..` or SDPA; each compiled too on demand."""
    name, _, settings = (mechanism or "").partition(":")
    blocks = make_blocks(shape, name or None, parse_settings(settings.split(",") if settings else []))
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
