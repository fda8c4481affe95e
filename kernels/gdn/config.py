"""Launch configurations of the kernels of Gated DeltaNet: shipped ones where they were measured, safe ones elsewhere.

Nothing is tuned at run time.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import said_once, width


class Launch(NamedTuple):
    """How one kernel runs."""

    # Columns that one program takes: of values (scan, back, output, local) or of keys (query, key).
    columns: int
    warps: int = 4
    # Buffers for the tiles of a loop over chunks.
    stages: int = 1
    # Registers a thread, where fewer than the compiler would take leave room for more programs.
    registers: int | None = None


class Config(NamedTuple):
    """Tile sizes, the precision of fp32 operands, and how each kernel runs."""

    chunk: int
    block_d: int
    block_dv: int
    precision: str
    prepare: Launch
    scan: Launch
    output: Launch
    local: Launch
    back: Launch
    query: Launch
    key: Launch


# (capability, BD, BDV) -> what differs from `safe` for bf16. Measured: one H200, B8 T2048 H16.
SHIPPED: dict[tuple[tuple[int, int], int, int], dict[str, Any]] = {
    ((9, 0), 128, 128): {"scan": Launch(64, stages=2), "query": Launch(128)},
}


def configure(q: Tensor, v: Tensor) -> Config:
    """The configuration for these inputs on their device. Raises ValueError where nothing fits."""
    # Where shapes are symbols, head dims become numbers.
    return _configure(q.device, q.dtype, int(q.shape[3]), int(v.shape[3]))


def _configure(device: torch.device, dtype: torch.dtype, D: int, DV: int) -> Config:
    if device.type != "cuda":  # the interpreter, whose tiles are numpy arrays
        return choose((0, 0), 1 << 20, D, DV, dtype)._replace(chunk=32, precision="ieee")
    properties = torch.cuda.get_device_properties(device)
    # A property that torch has and its type stub has not.
    shared = getattr(properties, "shared_memory_per_block_optin")  # noqa: B009
    return choose((properties.major, properties.minor), shared, D, DV, dtype)


@torch.compiler.assume_constant_result
def obstacle(device: torch.device, dtype: torch.dtype, D: int, DV: int) -> str:
    """Why no configuration fits; empty when one does."""
    try:
        _configure(device, dtype, D, DV)
    except ValueError as error:
        return said_once(str(error))
    return ""


@functools.cache
def choose(capability: tuple[int, int], shared: int, D: int, DV: int, dtype: torch.dtype) -> Config:
    """The shipped configuration for (capability, D), or one that fits `shared` bytes of shared memory."""
    config = safe(shared, D, DV, dtype)
    if dtype == torch.bfloat16:
        config = config._replace(**SHIPPED.get((capability, config.block_d, config.block_dv), {}))
    return config


def safe(shared: int, D: int, DV: int, dtype: torch.dtype) -> Config:
    """The longest chunk whose kernels need no more than `shared` bytes.

    Raises ValueError when not even chunks of 16 tokens fit.
    """
    half = dtype == torch.bfloat16
    # Hopper's wgmma went wrong on tiles narrower than 64 beside chunks of 64 (docs/measurements/kernel-notes.md).
    BD, BDV = (max(64 if half else 16, width(x)) for x in (D, DV))
    wide = max(BD, BDV)
    # fp32 operands stay off wgmma, where three tf32 products race (seen with triton 3.6).
    longest = 64 if half and wide <= 128 else 32 if half or wide <= 128 else 16
    precision = {torch.bfloat16: "tf32", torch.float16: "bf16x3", torch.float32: "bf16x6"}[dtype]
    for C, block_k, along in ((64, 64, 64), (32, 64, 32), (16, 16, 16)):
        along, block_k, columns = min(along, BDV), min(block_k, BD), BDV if C > 16 else min(32, BDV)
        need = shared_elements(C, BD, BDV, block_k, along, columns) * (2 if half else 4)
        if longest >= C and need <= shared:
            launches = (Launch(n) for n in (C, along, columns, columns, along, block_k, block_k))
            return Config(C, BD, BDV, precision, *launches)
    raise ValueError(f"head dims {D} and {DV} need more than {shared} bytes of shared memory")


def shared_elements(C: int, BD: int, BDV: int, block_k: int, along: int, columns: int) -> int:
    """Bound on the shared memory of every kernel: all tiles of its products at once."""
    keys = 3 * C * BDV + 2 * block_k * BDV + 2 * C * block_k
    rows = 2 * C * BD + 2 * BD * along + 4 * C * along
    outputs = 2 * C * BD + C * columns + BD * columns
    return max(keys, rows, outputs) + 2 * C * C
