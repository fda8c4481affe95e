"""Device time of kernels, for the programs beside this one that tune them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from linearize.bench_measure import wait


def kernel_times(run: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Device time of all kernels of a run, and of each, in µs; the mean of `repeats` runs after one more."""
    run()
    wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            run()
        wait()
    times = {e.key: e.device_time_total / repeats for e in profiled.key_averages() if e.key.endswith("_kernel")}
    return {"all": sum(times.values()), **times}
