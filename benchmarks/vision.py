"""Blocks of diffusion transformers, attention and MLP: linear mechanisms beside SDPA, on random weights in bf16.

python -m benchmarks.vision --mechanisms saga mhla la:feature_map=hedgehog --shapes dit-1024 dit-4096 wan

The shapes are those of benchmarks/blocks.py.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from benchmarks.blocks import BLOCKS, BlockShape, block_inputs, make_blocks
from linearize.bench.kernels import attempt
from linearize.bench.timing import machine
from linearize.bench.vision import inference, training
from linearize.plan.mechanisms import parse_settings

SDPA = "softmax, SDPA"


def measure(shape: BlockShape, mechanism: str | None) -> dict[str, Any]:
    """Inference and training of one contender, `mechanism:option=value,..` or SDPA."""
    name, _, settings = (mechanism or "").partition(":")
    blocks = make_blocks(shape, name or None, parse_settings(settings.split(",") if settings else []))
    x = block_inputs(shape)
    return {"inference": attempt(partial(inference, blocks, x)), "training": attempt(partial(training, blocks, x))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", default=["la", "saga", "mhla"])
    parser.add_argument("--shapes", nargs="+", default=["dit-1024", "dit-4096", "wan"], choices=[*BLOCKS])
    parser.add_argument("--divide", type=int, default=1, help="sides and rows of a grid are that much smaller")
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    for name in arguments.shapes:
        shape = BLOCKS[name]
        small = tuple(max(1, side // arguments.divide) for side in shape.grid)
        shape = shape._replace(B=max(1, shape.B // arguments.divide), grid=small)
        for mechanism in (None, *arguments.mechanisms):
            found = measure(shape, mechanism)
            print(json.dumps({"shape": name, "name": mechanism or SDPA, **found}), flush=True)


if __name__ == "__main__":
    main()
