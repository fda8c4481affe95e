"""From how many tokens a linear encoder is faster than SDPA: blocks of DeiT-S, attention and MLP, on random weights; or
models, given as folders, the first of which is the one that the others are compared with. Of models of images
`--tokens` are sides of a square image, in pixels.

OMP_NUM_THREADS=1 python -m benchmarks.encoder_lengths --mechanisms la:feature_map=hedgehog mhla saga
OMP_NUM_THREADS=1 python -m benchmarks.encoder_lengths --models MINILM MINILM-LA --tokens 128 256 512
python -m benchmarks.encoder_lengths --compile --together 131072

One row, or as many as make `--together` tokens; bidirectional, inference. On a CPU float32, and seconds of processor
time, so that other programs on the machine count for little. On a GPU bfloat16 and seconds that pass; with `--compile`
those of the compiled block in a CUDA graph, where Python does not wait. `linearize/estimate/break_even.py` has the
result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModel

from benchmarks.vision import BlockShape, block_inputs, make_blocks
from linearize.bench.timing import captured_us, here, machine

PATCHES = (196, 1024, 4096, 16384)
# Passes in one CUDA graph: replaying one takes a few microseconds, too.
PASSES = 12


def dtype_here() -> torch.dtype:
    return torch.bfloat16 if here() == "cuda" else torch.float32


@torch.no_grad()
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


@torch.no_grad()
def of_block(mechanism: str | None, tokens: int, repeats: int, together: int = 0, compiled: bool = False) -> float:
    """Seconds of a pass of a block on squares of patches, with `mechanism:option=value,..` or SDPA."""
    torch.compiler.reset()  # earlier ones count: past a limit torch runs what it has not compiled
    side = round(tokens**0.5)
    shape = BlockShape(max(1, together // tokens), (side, side), 6, 64, 1536, 1)
    blocks: Any = make_blocks(shape, mechanism).to(dtype_here()).eval()
    x = block_inputs(shape).to(dtype_here())
    run = partial(torch.compile(blocks, dynamic=False) if compiled else blocks, x)
    return captured_us([run] * PASSES) / 1e6 if compiled and here() == "cuda" else seconds(run, repeats)


def of_model(folder: str, size: int, repeats: int) -> float:
    """A model of text on a row of one token, repeated, or a model of images on a square one."""
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=dtype_here()).to(here()).eval()
    if model.main_input_name == "pixel_values":
        image = torch.zeros(1, 3, size, size, device=here(), dtype=dtype_here())
        return seconds(lambda: model(pixel_values=image), repeats)
    ids = torch.ones(1, size, dtype=torch.long, device=here())
    return seconds(lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids)), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", default=["la:feature_map=hedgehog", "mhla", "saga"])
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--tokens", nargs="+", type=int, default=PATCHES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--together", type=int, default=0, help="tokens of a pass of blocks; one row by default")
    parser.add_argument("--compile", action="store_true", help="blocks by torch.compile, on a GPU in a CUDA graph")
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    of_blocks = partial(of_block, together=arguments.together, compiled=arguments.compile)
    timed: Any = of_model if arguments.models else of_blocks
    first, *others = arguments.models or [None, *arguments.mechanisms]
    for tokens in arguments.tokens:
        softmax = timed(first, tokens, arguments.repeats)
        row: dict[str, Any] = {"tokens": tokens, "softmax_ms": round(1e3 * softmax, 2)}
        row |= {one: round(softmax / timed(one, tokens, arguments.repeats), 2) for one in others}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
