"""From how many tokens a linear encoder is faster than SDPA: blocks of DeiT-S, attention and MLP, on random weights.

OMP_NUM_THREADS=1 python -m benchmarks.encoder_lengths --mechanisms la:feature_map=hedgehog mhla saga

One row, bidirectional, inference. On a CPU float32, and seconds of processor time, so that other programs on the
machine count for little; on a GPU bfloat16 and seconds that pass. `linearize/estimate/pays.py` has the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from linearize.bench.blocks import BlockShape, block_inputs, make_blocks
from linearize.bench.timing import here, machine
from linearize.plan.mechanisms import parse_settings

SIDES = (14, 32, 64, 128)  # patches: 196, 1,024, 4,096 and 16,384 tokens


@torch.inference_mode()
def seconds(shape: BlockShape, mechanism: str | None, repeats: int) -> float:
    """The median time of a pass, `mechanism:option=value,..` or SDPA."""
    name, _, settings = (mechanism or "").partition(":")
    options = parse_settings(settings.split(",") if settings else [])
    dtype, clock = (torch.bfloat16, time.perf_counter) if here() == "cuda" else (torch.float32, time.process_time)
    blocks, x = make_blocks(shape, name or None, options).to(dtype).eval(), block_inputs(shape).to(dtype)
    found = []
    for _ in range(repeats + 2):
        start = clock()
        blocks(x)
        if here() == "cuda":
            torch.cuda.synchronize()
        found.append(clock() - start)
    return statistics.median(found[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", default=["la:feature_map=hedgehog", "mhla", "saga"])
    parser.add_argument("--sides", nargs="+", type=int, default=SIDES)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    for side in arguments.sides:
        shape = BlockShape(1, (side, side), 6, 64, 1536, 1)
        softmax = seconds(shape, None, arguments.repeats)
        row: dict[str, Any] = {"tokens": side * side, "softmax_ms": round(1e3 * softmax, 2)}
        for mechanism in arguments.mechanisms:
            row[mechanism] = round(softmax / seconds(shape, mechanism, arguments.repeats), 2)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
