"""Measure launch configurations of the GSA kernels on this GPU, for the table SHIPPED in kernels/gsa_config.py.

    python benchmarks/tune_gsa.py --slots 64 --dim 128

Prints the device time of each kernel under each candidate; nothing is written. Compilation is not measured.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from linearize.bench import measure_step
from linearize.bench_case import Shape, load_case
from linearize_kernels import gsa_config
from linearize_kernels.gsa import gsa

CHUNK_CANDIDATES: list[dict[str, Any]] = [
    {"chunk": chunk, "hold": hold, "warps": warps, "key_stages": stages}
    for chunk, hold, warps, stages in itertools.product((64, 32), (True, False), (4, 8), (1, 2))
]
STEP_CANDIDATES: list[dict[str, Any]] = [
    {"step_columns": columns, "step_warps": warps} for columns, warps in itertools.product((32, 64, 128), (2, 4, 8))
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    chosen = gsa_config.choose
    for change in CHUNK_CANDIDATES + STEP_CANDIDATES:
        gsa_config.choose = lambda *sizes, change=change: chosen(*sizes)._replace(**change)
        try:
            if "step_warps" in change:
                step = measure_step(load_case("gsa"), Shape(64, 1, 32, 8, options.dim, options.slots))
                print(f"{change}: step {step['us']:.1f} us, {step['share_of_copy']:.0%} of a copy", flush=True)
            else:
                times = kernel_times(Shape(8, 2048, 16, 4, options.dim, options.slots))
                print(f"{change}: " + ", ".join(f"{name} {us:.0f}" for name, us in times.items()), flush=True)
        except Exception as error:  # a candidate may need more shared memory than there is
            print(f"{change}: {type(error).__name__}", flush=True)
    gsa_config.choose = chosen


def kernel_times(shape: Shape, repeats: int = 5) -> dict[str, float]:
    """Device time of each kernel in a forward and backward, in µs."""
    inputs = [x.requires_grad_() for x in load_case("gsa").inputs(shape, "cuda")]
    do = torch.randn_like(inputs[0])

    def both() -> None:
        torch.autograd.grad(gsa(*inputs, backend="triton")[0], inputs, do)

    both()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            both()
        torch.cuda.synchronize()
    return {e.key: e.device_time_total / repeats for e in profiled.key_averages() if e.key.endswith("_kernel")}


if __name__ == "__main__":
    main()
