"""The device that an estimate is for: one that is here, or a card by its name with the figures of its data sheet."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import LinearizeError, did_you_mean
from .tracker import Work

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """`memory` in bytes, dense bf16 `flops` a second, `bandwidth` in bytes a second, board power in watts.

    What is not known is None. `reserved` bytes of the memory are not for tensors: the CUDA context.
    """

    name: str
    kind: str
    memory: int
    flops: float | None = None
    bandwidth: float | None = None
    watts: float | None = None
    reserved: int = 0


# Name -> GiB that torch sees, TFLOP/s of dense bf16 products with sums in fp32, GB/s, watts: the makers' data sheets,
# but for the memory of H200, which is measured.
CARDS: dict[str, tuple[float, float, float, float]] = {
    "a100-40g": (39.4, 312, 1555, 400),
    "a100-80g": (79.2, 312, 2039, 400),
    "h100": (79.2, 989, 3350, 700),
    "h200": (139.8, 989, 4800, 700),
    "b200": (178.0, 2250, 8000, 1000),
    "l40s": (44.4, 362, 864, 350),
    "l4": (22.0, 121, 300, 72),
    "a10g": (22.1, 70, 600, 300),
    "a6000": (47.5, 155, 768, 300),
    "3090": (23.6, 71, 936, 350),
    "4090": (23.6, 165, 1008, 450),
    "5090": (31.4, 210, 1792, 575),
}
# What the operations of a model take beside those that `cpu_rates` measures: moving a byte, most being simpler than
# exp, and starting one, from modules and for autograd. By three recipes of 1M and 4M parameters; see docs/cost.md.
SIMPLER, IN_A_MODEL = 0.7, 8.0
# Of torch and the kernels' code on a GPU.
CONTEXT = int(0.7 * GIB)


def card(name: str) -> Device:
    """The card of that name. Raises LinearizeError (exit 2) with the nearest one."""
    known = CARDS.get(name.lower())
    if known is None:
        raise LinearizeError(f"--gpu {name}: not known.{did_you_mean(name, CARDS)} Known: {', '.join(CARDS)}")
    memory, flops, bandwidth, watts = known
    return Device(name.lower(), "cuda", int(memory * GIB), flops * 1e12, bandwidth * 1e9, watts, CONTEXT)


def present(cpu: bool) -> Device:
    """The device that training takes here: the first GPU, or the CPU where there is none or `cpu` is asked for. Of a
    GPU's memory what the process may take, where torch holds it to a fraction."""
    if cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device("cpu", "cpu", memory)
    properties = torch.cuda.get_device_properties(0)
    written = re.sub(r"[^a-z0-9]+", "-", properties.name.lower())
    fits = [name for name in CARDS if name.partition("-")[0] in written.split("-")]
    fits = [name for name in fits if abs(CARDS[name][0] * GIB / properties.total_memory - 1) < 0.1] or fits[:0]
    memory = int(properties.total_memory * torch.cuda.get_per_process_memory_fraction(0))
    if not fits:
        return Device(properties.name, "cuda", memory, reserved=CONTEXT)
    _, flops, bandwidth, watts = CARDS[fits[0]]
    return Device(fits[0], "cuda", memory, flops * 1e12, bandwidth * 1e9, watts, CONTEXT)


def per_hour(price: str | None) -> float | None:
    """`2.5/h` as a number. Raises LinearizeError (exit 2)."""
    if price is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/h)?", price)
    if found is None:
        raise LinearizeError(f"--price {price}: give what one device costs in an hour, for example 2.5/h")
    return float(found[1])


class Rates(NamedTuple):
    """Seconds of this CPU for a FLOP of a product, for a byte that another operation moves, and to start one."""

    flop: float
    byte: float
    launch: float

    def seconds(self, work: Work) -> float:
        """What that work takes."""
        return work.flops * self.flop + work.moved * self.byte + work.launches * self.launch


@functools.cache
def cpu_rates(dtype: torch.dtype) -> Rates:
    """Measured on this CPU now, in less than a second, on matrices of the sizes that small models have."""
    a, wide, few = torch.randn(512, 128).to(dtype), torch.randn(1 << 20), torch.randn(64)
    product = best_of(lambda: a @ a.T) / (2 * 512 * 512 * 128)
    moved = best_of(lambda: torch.exp(wide)) / (2 * wide.nbytes)
    return Rates(product, moved * SIMPLER, best_of(lambda: few + few) * IN_A_MODEL)


def best_of(work: Callable[[], Any], seconds: float = 0.1) -> float:
    """Seconds of the fastest of many runs, which nothing else on the machine held up."""
    ends, best = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < ends:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
