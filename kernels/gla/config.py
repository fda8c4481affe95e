"""Launch configurations of GLA's kernels: shipped where they were measured, safe ones computed elsewhere.

Nothing is tuned at run time. Blocks are never narrower than 64 channels: with 16 or 32, triton 3.6 compiled some
kernels for Hopper to wrong results or to accesses outside of memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Launch(NamedTuple):
    """Block of key channels, block of value channels, warps and stages of one kernel."""

    block_k: int
    block_v: int
    warps: int
    stages: int


class Config(NamedTuple):
    """One launch per kernel, two of the scan where it cuts rows, and what the tensor cores make of computed factors."""

    chunk: int
    scan: Launch
    sums: Launch
    mix: Launch
    key: Launch
    precision: str
    # Chunks whose channels all keep more than 2^-range take one reference instead of the halving.
    range: float = 100.0
    # Programs of the scan that run at once, and the fewest chunks that make a piece of a row.
    programs: int = 0
    piece: int = 4
    # Of two launches the second reads the sums of gates that the first one made: differences of them are what it wants,
    # exact enough beside bf16.
    given: bool = False
    # Bytes of shared memory that a program may have.
    shared: int = 48 * 1024

    def over(self, how: Launch, heads: int) -> Launch:
        """A launch of the scan with as many of its stages as fit where it walks over so many heads of a memory."""
        fitting = [n for n in range(how.stages, 1, -1) if scan_bytes(self.chunk, how, heads, n) <= self.shared]
        return how._replace(stages=fitting[0] if fitting else 1)

    def pieces(self, programs: int, chunks: int) -> int:
        """Into how many pieces the scan cuts rows where it has `programs` without, and a row so many chunks.

        Pieces are walked twice: two of them gain nothing.
        """
        most = min(self.programs // programs, chunks // self.piece)
        return most if most > 2 else 1


# (capability, value dim above 64) -> what differs from `safe` for bf16. Measured: one H200, heads of 128.
SHIPPED: dict[tuple[tuple[int, int], bool], dict[str, Any]] = {
    ((9, 0), False): {"scan": Launch(64, 64, 4, 2), "mix": Launch(64, 64, 4, 2)},
    ((9, 0), True): {"scan": Launch(64, 128, 4, 2), "sums": Launch(64, 128, 4, 3), "mix": Launch(64, 128, 4, 2)},
}


def scan_bytes(chunk: int, how: Launch, heads: int, stages: int) -> int:
    """Bound on the shared memory of the scan in bf16, pipelined: the rows of all heads in as many buffers as there are
    stages, and a factor in two parts."""
    return 2 * chunk * (stages * heads * (how.block_k + how.block_v) + 2 * how.block_k)


def configure(q: Tensor, v: Tensor) -> Config:
    """The configuration for these inputs on their device."""
    if q.device.type != "cuda":  # the interpreter, whose tiles are numpy arrays
        small = Launch(16, 16, 4, 1)
        return Config(32, small, small, small, small, "ieee", programs=12, piece=1, given=q.dtype == torch.float16)
    properties = torch.cuda.get_device_properties(q.device)
    # A property that torch has and its type stub has not.
    shared = getattr(properties, "shared_memory_per_block_optin")  # noqa: B009
    capability = (properties.major, properties.minor)
    return choose(capability, shared, properties.multi_processor_count, v.shape[-1], q.dtype)


@functools.cache
def choose(capability: tuple[int, int], shared: int, processors: int, DV: int, dtype: torch.dtype) -> Config:
    """The shipped configuration, or a safe one. Registers allow two programs of the scan a multiprocessor."""
    config = safe(dtype)._replace(programs=2 * processors, shared=shared)
    if dtype == torch.bfloat16:
        config = config._replace(**SHIPPED.get((capability, DV > 64), {}))
    return config


def safe(dtype: torch.dtype) -> Config:
    """Tiles of 64 by 64, whose kernels need no more than 48 KiB of shared memory whatever the size of the heads."""
    one = Launch(64, 64, 4, 1)
    # In fp32, chunks of 64 would use Hopper's wgmma: three tf32 products through it race (seen with triton 3.6).
    # With bf16 inputs gla_tiles.py cuts operands into parts. Three bf16 products carry 16 bits of each factor, enough
    # for fp16; six carry 24.
    precision = {torch.bfloat16: "parts", torch.float16: "bf16x3", torch.float32: "bf16x6"}[dtype]
    half = dtype == torch.bfloat16
    return Config(64 if half else 32, one, one, one, one, precision, given=half)
