"""Launch configurations of the linear attention kernels: shipped ones where they were measured, safe ones elsewhere.

Nothing is tuned at run time.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import said_once, width


class Tiles(NamedTuple):
    """Of one kernel: tokens of a chunk, columns of a program, warps, buffers for what the loop loads."""

    chunk: int
    block: int
    warps: int
    stages: int


class Config(NamedTuple):
    """Tiles of every kernel; how long stretches are; what becomes of operands."""

    out: Tiles
    gradients: Tiles
    # `block` are columns of the state; so many rows.
    scan: Tiles
    scan_rows: int
    # So many programs of it fill the GPU; parts of rows have so many tokens at least.
    programs: int
    part: int
    # The scan leaves a state every so many tokens, a multiple of all chunks; a program looks at `keys` at a time.
    stretch: int
    keys: int
    # bf16: factors that the scan computes for gradients go in as two parts. Memories are outputs: theirs always do.
    split_sums: bool
    # Without a normaliser the scan makes the output, too, where it runs so many programs.
    walk: Tiles
    walk_from: float
    # Where every token sees all others; bf16: the state is read as two parts, 16 bits of it.
    sums_both: Tiles
    read: Tiles
    programs_both: int
    split_out: bool
    split_gradients: bool
    precision: str


# (capability, wider head dim, dtype, normalised) -> what differs from `safe`. Measured: one H200.
SHIPPED: dict[tuple[tuple[int, int], int, torch.dtype, bool], dict[str, Any]] = {
    ((9, 0), 128, torch.bfloat16, True): {
        "out": Tiles(64, 128, 4, 2),
        "gradients": Tiles(64, 128, 4, 2),
        "scan": Tiles(128, 64, 4, 3),
        "split_sums": False,
        "sums_both": Tiles(64, 128, 4, 3),
        "read": Tiles(64, 128, 4, 3),
    },
    ((9, 0), 64, torch.bfloat16, True): {
        "sums_both": Tiles(128, 64, 4, 3),
        "read": Tiles(64, 64, 4, 3),
    },
    ((9, 0), 128, torch.bfloat16, False): {
        "out": Tiles(64, 128, 4, 2),
        "gradients": Tiles(64, 128, 4, 2),
        "scan": Tiles(64, 64, 4, 3),
        "programs": 4 * 132,
        "stretch": 128,
        "split_sums": False,
        "walk": Tiles(32, 64, 4, 3),
        "walk_from": 256,
    },
    ((9, 0), 128, torch.float32, True): {
        "out": Tiles(64, 64, 4, 1),
        "gradients": Tiles(64, 64, 4, 1),
        "scan": Tiles(32, 64, 4, 3),
    },
}


def configure(q: Tensor, v: Tensor, precision: str, normalised: bool) -> Config:
    """The configuration for these inputs on their device. Raises ValueError where nothing fits."""
    config = _configure(q.device, q.dtype, q.shape[3], v.shape[3], normalised)
    if q.dtype != torch.float32 or not q.is_cuda:
        return config
    if precision == "ieee":  # without tensor cores small tiles are as good
        config = config._replace(out=config.scan, gradients=config.scan)
    return config._replace(precision=precision)


def _configure(device: torch.device, dtype: torch.dtype, D: int, DV: int, normalised: bool) -> Config:
    if device.type != "cuda":  # the interpreter, whose tiles are numpy arrays
        small = Tiles(16, 16, 4, 1)
        scan = small, 16, 12, 32, 48, 16, True, small, 5
        return Config(small, small, *scan, small, small._replace(block=64), 6, True, True, "ieee")
    properties = torch.cuda.get_device_properties(device)
    # A property that torch has and its type stub has not.
    shared = getattr(properties, "shared_memory_per_block_optin")  # noqa: B009
    return choose(
        (properties.major, properties.minor), shared, properties.multi_processor_count, D, DV, dtype, normalised
    )


@torch.compiler.assume_constant_result
def obstacle(device: torch.device, dtype: torch.dtype, D: int, DV: int) -> str:
    """Why no configuration fits; empty when one does."""
    try:
        _configure(device, dtype, D, DV, True)
    except ValueError as error:
        return said_once(str(error))
    return ""


@functools.cache
def choose(
    capability: tuple[int, int], shared: int, processors: int, D: int, DV: int, dtype: torch.dtype, normalised: bool
) -> Config:
    """The shipped configuration for (capability, D, dtype), or one that fits `shared` bytes of shared memory."""
    wide = width(max(D, DV))
    config = safe(shared, processors, wide, dtype)
    return config._replace(**SHIPPED.get((capability, wide, dtype, normalised), {}))


def safe(shared: int, processors: int, wide: int, dtype: torch.dtype) -> Config:
    """The largest tiles whose kernels need no more than `shared` bytes; `wide` is the wider head dim.

    Raises ValueError when not even the smallest fit.
    """
    item, columns = dtype.itemsize, min(wide, 64 if wide <= 128 else 32)
    longest = 64 if item == 2 and wide <= 128 else 32
    candidates = [Tiles(C, columns, 4, stages) for C in (64, 32, 16) if longest >= C for stages in (2, 1)]
    fitting = [tiles for tiles in candidates if shared_bytes(tiles, wide, item) <= shared]
    if not fitting:
        raise ValueError(f"head dim {wide} needs more than {shared} bytes of shared memory")
    tiles = fitting[0]
    read = tiles._replace(block=wide if wide <= 128 else 64)
    # Two programs of the scan a processor.
    scan = tiles, columns, 2 * processors, 1024, 256, 64, True, tiles, math.inf
    # fp16 and its sums: three bf16 products carry 16 bits of each factor.
    return Config(tiles, tiles, *scan, tiles, read, 4 * processors, False, True, "bf16x3")


def shared_bytes(tiles: Tiles, wide: int, item: int) -> int:
    """Bound on the shared memory of every kernel: what the loop loads, and computed factors in two parts."""
    C, BZ = tiles.chunk, tiles.block
    return item * (tiles.stages * C * (2 * wide + BZ) + 2 * (wide * BZ + C * C + C * BZ))
