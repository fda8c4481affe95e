"""Launch configurations of the kernels of Gated DeltaNet: shipped ones where they were measured, safe ones elsewhere.

Nothing is tuned at run time.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Config(NamedTuple):
    """Tile sizes, warps, buffers for the tiles of the two loops over chunks, and the precision of fp32 operands."""

    chunk: int
    block_d: int
    block_dv: int
    # Value columns of a state that one program takes along a row.
    columns: int
    scan_warps: int
    scan_stages: int
    back_warps: int
    back_stages: int
    warps: int
    prepare_warps: int
    # Key columns that the gradients take at a time.
    block_k: int
    grads_warps: int
    precision: str


# (capability, wider of BD and BDV) -> what differs from `safe` for bf16.
SHIPPED: dict[tuple[tuple[int, int], int], dict[str, Any]] = {}


def configure(q: Tensor, v: Tensor) -> Config:
    """The configuration for these inputs on their device. Raises ValueError where nothing fits."""
    return _configure(q.device, q.dtype, q.shape[3], v.shape[3])


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
        return str(error)
    return ""


@functools.cache
def choose(capability: tuple[int, int], shared: int, D: int, DV: int, dtype: torch.dtype) -> Config:
    """The shipped configuration for (capability, D), or one that fits `shared` bytes of shared memory."""
    config = safe(shared, D, DV, dtype)
    if dtype == torch.bfloat16:
        config = config._replace(**SHIPPED.get((capability, max(config.block_d, config.block_dv)), {}))
    return config


def safe(shared: int, D: int, DV: int, dtype: torch.dtype) -> Config:
    """The longest chunk whose kernels need no more than `shared` bytes.

    Raises ValueError when not even chunks of 16 tokens fit.
    """
    BD, BDV = (max(16, 1 << (x - 1).bit_length()) for x in (D, DV))
    wide, half = max(BD, BDV), dtype == torch.bfloat16
    # fp32 operands stay off Hopper's wgmma, where three tf32 products race (seen with triton 3.6).
    longest = 64 if half and wide <= 128 else 32
    columns = max(16, min(64, BDV, (8192 if half else 4096) // BD))
    precision = {torch.bfloat16: "tf32", torch.float16: "bf16x3", torch.float32: "bf16x6"}[dtype]
    return Config(longest, BD, BDV, columns, 4, 1, 4, 1, 4, 4, min(64, BD), 8 if half else 4, precision)
