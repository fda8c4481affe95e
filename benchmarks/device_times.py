"""Device time of kernels, for the programs beside this one that tune them."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from linearize.bench.case import Shape
from linearize.bench.kernels import load_case
from linearize.bench.timing import here, wait


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
