"""Measure the time and memory of a piece of work, and the device's limits."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable
from datetime import date
from functools import partial
from typing import Any

import torch
import transformers
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..train.device import device_name

# Of repeated runs, for each number.
SECONDS = 0.4
# At most, in which the CPU may get ahead of the device.
AHEAD = 0.06


def here() -> str:
    """Where it is measured."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def machine() -> dict[str, str]:
    """Hardware, versions, date."""
    return {
        "device": device_name(torch.device(here())),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": _version("triton"),
        "fla": _version("fla-core"),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def wait() -> None:
    """Until the device has done what was asked of it."""
    if here() == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], Any], share: float = 1.0, warm: int = 3, least: int = 9) -> dict[str, float]:
    """Median and middle half of the run's time in ms, over `share` of SECONDS and at least `least` runs after `warm`
    others. On a GPU runs are queued without waiting, as a training loop does, between events."""
    for _ in range(warm):
        run()
    wait()
    begun = time.perf_counter()
    run()
    wait()
    count = max(least, min(200, round(share * SECONDS / (time.perf_counter() - begun))))
    return _middle(_on_gpu(run, count)[0] if here() == "cuda" else _on_cpu(run, count))


def queued(run: Callable[[], Any]) -> dict[str, float]:
    """As `timed`, with runs queued while the device is kept busy, so that it never waits: its own time, and `host`, the
    ms that the CPU takes to queue one run. On a CPU there is no queue, and no `host`."""
    if here() == "cpu":
        return timed(run)
    for _ in range(3):
        run()
    wait()
    begun = time.perf_counter()
    run()
    wait()
    once = time.perf_counter() - begun
    # More than about a thousand kernels do not fit the queue.
    count = max(7, min(50, round(SECONDS / 2 / once)))
    torch.cuda._sleep(round(2e9 * min(AHEAD, count * once)))  # cycles
    times, hosts = _on_gpu(run, count)
    return _middle(times) | {"host": sorted(hosts[:5])[2]}


def device_ms(run: Callable[[], Any]) -> float | None:
    """ms in which the device works for one run, however long Python takes to ask for it: kernels and copies as torch's
    profiler sees them, overlapping ones once. None on a CPU, and where the profiler sees no device."""
    if here() == "cpu":
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would tell that it begins and ends
    wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        wait()
    return working_ms(profiled.events())


def working_ms(events: Iterable[Any] | None) -> float | None:
    """ms that a profile's device events cover; None where there is none."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    covered, until = 0.0, 0.0
    for start, end in spans:  # in us
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / 1e3 if spans else None


def beside_device(took: dict[str, float], device: float | None) -> dict[str, Any]:
    """A measured time with the device's part of it, ms, and the share in which the device waits for Python."""
    waits = None if device is None else max(0.0, 1 - device / took["ms"])
    return {**took, "device_ms": device, "device_waits": waits}


def measured(run: Callable[[], Any], before: int, rate: str = "", count: int = 0) -> dict[str, Any]:
    """A run's time, the device's part of it, its peak of memory beyond the bytes `before`, and by the name `rate` how
    many of the `count` things in it are done in a second."""
    took = beside_device(timed(run, warm=2, least=3), device_ms(run))
    rates = {rate: 1e3 * count / took["ms"]} if rate else {}
    return {**took, **rates, "peak_mib": peak_mib(run, before)}


def faster(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """`faster`: how many times as fast ours is as the other; nothing for ours itself, and where one failed."""
    both = "ms" in ours and "ms" in other and ours["name"] != other["name"]
    return {"faster": other["ms"] / ours["ms"]} if both else {}


def _middle(times: list[float]) -> dict[str, float]:
    times, count = sorted(times), len(times)
    return {"ms": times[count // 2], "low": times[count // 4], "high": times[3 * count // 4]}


def _on_gpu(run: Callable[[], Any], count: int) -> tuple[list[float], list[float]]:
    """Of each run: the device's ms, and those that the CPU took to queue it."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    hosts = []
    for start, end in events:
        begun = time.perf_counter()
        start.record()
        run()
        end.record()
        hosts.append(1e3 * (time.perf_counter() - begun))
    wait()
    return [start.elapsed_time(end) for start, end in events], hosts


def _on_cpu(run: Callable[[], Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def allocated() -> int:
    """Bytes of GPU memory held by tensors; 0 on a CPU."""
    if here() == "cpu":
        return 0
    gc.collect()  # or cycles of compiled code give back later what is counted now
    return torch.cuda.memory_allocated()


def peak_mib(run: Callable[[], Any], before: int) -> float | None:
    """Peak of allocated memory while it runs, inputs included, less the bytes that were allocated `before`; None on a
    CPU, where nothing counts them."""
    if here() == "cpu":
        return None
    wait()
    torch.cuda.reset_peak_memory_stats()
    run()
    wait()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_ceilings() -> dict[str, float]:
    """What this device does at best: bytes per second of a copy, flop per second of a product of bf16, of fp32 with its
    factors rounded to tf32 (where the device has that), and of fp32."""
    device = here()
    numbers, side = (2**29, 8192) if device == "cuda" else (2**24, 512)
    x = torch.randn(numbers, device=device)
    y = torch.empty_like(x)
    found = {"copy_tb_s": 2 * x.nbytes / timed(lambda: y.copy_(x))["ms"] / 1e9}
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    kept = torch.get_float32_matmul_precision()
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, kept),
        ("tf32", torch.float32, "high"),
        ("fp32", torch.float32, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        found[f"{name}_tflop_s"] = 2 * side**3 / timed(partial(torch.mm, a.to(dtype), b.to(dtype)))["ms"] / 1e9
    torch.set_float32_matmul_precision(kept)
    return found


def captured_us(runs: list[Callable[[], Any]]) -> float:
    """Median time of one of the runs in µs: of the device alone, over replays of a CUDA graph of all of them; on a CPU
    as they come."""
    for run in runs:
        run()
    if here() == "cpu":
        return 1e3 * timed(lambda: [run() for run in runs], 0.25)["ms"] / len(runs)
    wait()
    graph = torch.cuda.CUDAGraph()
    kept: list[Any] = []
    with torch.cuda.graph(graph):
        kept.extend(run() for run in runs)
    return 1e3 * timed(graph.replay, 0.25)["ms"] / len(runs)
