"""Measure launch configurations of the GSA kernels on this GPU, for the table SHIPPED in kernels/gsa/config.py.

    python -m benchmarks.tune_gsa --slots 64 --dim 128             # device time of each kernel, or of a decode step
    python -m benchmarks.tune_gsa --slots 64 --dim 128 --only 3/8  # candidates 3, 11, ...: fill triton's cache first,
                                                                   # in 8 processes, then run without --only
    python -m benchmarks.tune_gsa --slots 128 --memories query     # kernels/gsa/sweep.py, a memory per query head

Nothing is written. A candidate changes fields of the configuration that ships; others stay.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from linearize.bench.case import Shape
from linearize.bench.kernels import load_case, measure_step
from linearize.bench.timing import here, wait
from linearize_kernels.gsa import config as gsa_config

CANDIDATES: list[dict[str, Any]] = [
    *({"chunk_size": chunk} for chunk in (64, 32)),
    *({"hold": h, "stack": s, "warps": w} for h, s, w in itertools.product((True, False), (1, 2, 4), (2, 4, 8))),
    *({"key_warps": warps, "key_stages": stages} for warps, stages in itertools.product((4, 8), (1, 2, 3))),
    *({"step_columns": columns, "step_warps": warps} for columns, warps in itertools.product((32, 64, 128), (1, 2, 4))),
]

# For memories of query heads, by the kernels of sweep.py.
SWEEPS = [{"sweep": (gsa_config.Walk(*walk),) * 4} for walk in ((64, 4, 1), (64, 4, 2), (64, 4, 3))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--memories", choices=("key", "query"), default="key")
    parser.add_argument("--only", default="0/1", metavar="K/N")
    options = parser.parse_args()
    first, every = map(int, options.only.split("/"))
    chosen = gsa_config.choose
    # Query and KV heads.
    heads = (32, 32) if options.memories == "query" else (16, 4)
    for change in (SWEEPS if options.memories == "query" else CANDIDATES)[first::every]:
        gsa_config.choose = lambda *sizes, change=change: chosen(*sizes)._replace(**change)
        gsa_config._configure.cache_clear()
        try:
            if "step_warps" in change:
                step = measure_step(load_case("gsa"), Shape(64, 1, 32, 8, options.dim, options.slots))
                shown = step.get("failed") or f"step {step['us']:.1f} us, {step['share_of_copy']:.0%} of a copy"
                print(f"{change}: {shown}", flush=True)
            else:
                times = kernel_times("gsa", Shape(128 // heads[0], 2048, *heads, options.dim, options.slots))
                print(f"{change}: " + ", ".join(f"{name} {us:.0f}" for name, us in times.items()), flush=True)
        except Exception as error:  # a candidate may need more shared memory than there is
            print(f"{change}: {type(error).__name__}", flush=True)
    gsa_config.choose = chosen


def kernel_times(mechanism: str, shape: Shape, repeats: int = 5) -> dict[str, float]:
    """Device time of all kernels of a forward and backward, and of each in µs: the mean of `repeats` after one more."""
    case = load_case(mechanism)
    inputs = [x.requires_grad_() for x in case.inputs(shape, here())]
    do = torch.randn_like(inputs[0])

    def both() -> None:
        torch.autograd.grad(case.op(inputs, shape, "triton"), inputs, do)

    both()
    wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            both()
        wait()
    times = {e.key: e.device_time_total / repeats for e in profiled.key_averages() if e.key.endswith("_kernel")}
    return {"all": sum(times.values()), **times}


if __name__ == "__main__":
    main()
