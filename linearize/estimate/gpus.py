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

from .cards import CARDS, figures
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


# What the operations of a model take beside those that `cpu_rates` measures: moving a byte, most being simpler than
# exp, and starting one, from modules and for autograd. By three recipes of 1M and 4M parameters; see docs/cost.md.
SIMPLER, IN_A_MODEL = 0.7, 8.0
# Of torch and the kernels' code on a GPU.
CONTEXT = int(0.7 * GIB)


def card(name: str) -> Device:
    """The card of that name. Raises LinearizeError (exit 2) with the nearest one."""
    memory, flops, bandwidth, watts = figures(name)
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
