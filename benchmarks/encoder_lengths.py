"""From how many tokens a linear encoder is faster than SDPA: blocks of DeiT-S, attention and MLP, on random weights; or
models of text, given as folders, the first of which is the one that the others are compared with.

OMP_NUM_THREADS=1 python -m benchmarks.encoder_lengths --mechanisms la:feature_map=hedgehog mhla saga
OMP_NUM_THREADS=1 python -m benchmarks.encoder_lengths --models MINILM MINILM-LA --tokens 128 256 512

One row, bidirectional, inference. On a CPU float32, and seconds of processor time, so that other programs on the
machine count for little; on a GPU bfloat16 and seconds that pass. `linearize/estimate/break_even.py` has the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModel

from benchmarks.blocks import BlockShape, block_inputs, make_blocks
from linearize.bench.timing import here, machine
from linearize.plan.mechanisms import parse_settings

PATCHES = (196, 1024, 4096, 16384)


def dtype_here() -> torch.dtype:
    return torch.bfloat16 if here() == "cuda" else torch.float32


@torch.inference_mode()
def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The median time of a pass, after two that are not counted."""
    clock = time.perf_counter if here() == "cuda" else time.process_time
    found = []
    for _ in range(repeats + 2):
        start = clock()
        run()
        if here() == "cuda":
            torch.cuda.synchronize()
        found.append(clock() - start)
    return statistics.median(found[2:])


def of_block(mechanism: str | None, tokens: int, repeats: int) -> float:
    """A block on a square of patches, with `mechanism:option=value,..` or SDPA."""
    name, _, settings = (mechanism or "").partition(":")
    options = parse_settings(settings.split(",") if settings else [])
    side = round(tokens**0.5)
    shape = BlockShape(1, (side, side), 6, 64, 1536, 1)
    blocks, x = make_blocks(shape, name or None, options).to(dtype_here()).eval(), block_inputs(shape)
    x = x.to(dtype_here())
    return seconds(lambda: blocks(x), repeats)


def of_model(folder: str, tokens: int, repeats: int) -> float:
    """A model of text on a row of one token, repeated."""
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=dtype_here()).to(here()).eval()
    ids = torch.ones(1, tokens, dtype=torch.long, device=here())
    return seconds(lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids)), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", default=["la:feature_map=hedgehog", "mhla", "saga"])
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--tokens", nargs="+", type=int, default=PATCHES)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    timed: Any = of_model if arguments.models else of_block
    first, *others = arguments.models or [None, *arguments.mechanisms]
    for tokens in arguments.tokens:
        softmax = timed(first, tokens, arguments.repeats)
        row: dict[str, Any] = {"tokens": tokens, "softmax_ms": round(1e3 * softmax, 2)}
        row |= {one: round(softmax / timed(one, tokens, arguments.repeats), 2) for one in others}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
