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


Run = Callable[[], Any]


@torch.no_grad()
def seconds(runs: list[Run], repeats: int) -> list[float]:
    """The median time of a pass of each, after two that are not counted. They take turns, since what else runs on the
    machine changes."""
    clock = time.perf_counter if here() == "cuda" else time.process_time
    found = []
    for _ in range(repeats + 2):
        times = []
        for run in runs:
            start = clock()
            run()
            if here() == "cuda":
                torch.cuda.synchronize()
            times.append(clock() - start)
        found.append(times)
    return [statistics.median(times) for times in zip(*found[2:], strict=True)]


def of_block(mechanism: str | None, tokens: int, together: int = 0) -> tuple[Any, Any]:
    """A block on squares of patches, with `mechanism:option=value,..` or SDPA, and its input."""
    side = round(tokens**0.5)
    shape = BlockShape(max(1, together // tokens), (side, side), 6, 64, 1536, 1)
    return make_blocks(shape, mechanism).to(dtype_here()).eval(), block_inputs(shape).to(dtype_here())


@torch.no_grad()
def compiled_seconds(block: Any, x: Any, repeats: int) -> float:
    """The time of a pass of the compiled block, on a GPU in a CUDA graph."""
    torch.compiler.reset()  # earlier ones count: past a limit torch runs what it has not compiled
    run = partial(torch.compile(block, dynamic=False), x)
    return captured_us([run] * PASSES) / 1e6 if here() == "cuda" else seconds([run], repeats)[0]


def of_model(folder: str, size: int) -> Run:
    """A model of text on a row of one token, repeated, or a model of images on a square one."""
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=dtype_here()).to(here()).eval()
    if model.main_input_name == "pixel_values":
        return partial(model, pixel_values=torch.zeros(1, 3, size, size, device=here(), dtype=dtype_here()))
    ids = torch.ones(1, size, dtype=torch.long, device=here())
    return partial(model, input_ids=ids, attention_mask=torch.ones_like(ids))


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
    names = arguments.models or [None, *arguments.mechanisms]
    for tokens in arguments.tokens:
        blocks = [of_block(one, tokens, arguments.together) for one in names if not arguments.models]
        if arguments.compile and blocks:
            times = [compiled_seconds(*one, arguments.repeats) for one in blocks]
        else:
            runs = [partial(*one) for one in blocks] or [of_model(one, tokens) for one in arguments.models]
            times = seconds(runs, arguments.repeats)
        row: dict[str, Any] = {"tokens": tokens, "softmax_ms": round(1e3 * times[0], 2)}
        row |= {str(one): round(times[0] / own, 2) for one, own in zip(names[1:], times[1:], strict=True)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
