"""Launch configurations of the GSA kernels: shipped ones where they were measured, safe ones computed elsewhere.

Nothing is tuned at run time. `benchmarks/tune_gsa.py` measures the candidates for SHIPPED.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import width
from ..gpu.target import obstacle_of, target
from ..gpu.triton_helpers import triton


class Walk(NamedTuple):
    """What one kernel of sweep.py runs with."""

    # Slots or columns of a memory that a program owns.
    part: int
    warps: int
    # Buffers for the tiles of a chunk.
    stages: int


class Config(NamedTuple):
    """Tile sizes, warps and what the tensor cores make of fp32 operands."""

    chunk_size: int
    block_m: int
    block_d: int
    block_dv: int
    # Keep in shared memory what all query heads of one memory share.
    hold: bool
    # Query heads of one memory that the query side takes at a time, each with `warps` of its own.
    stack: int
    warps: int
    key_warps: int
    # Buffers for the tiles that the key kernel loads per query head.
    key_stages: int
    # Columns of the memories that the step kernel takes at a time.
    step_columns: int
    step_warps: int
    precision: str
    # Chunks whose slots all keep more than 2^-range take one reference instead of the halving.
    range: float = 100.0
    # For sweep.py's read, mix, keys and gates, where its kernels run in place of forward.py's and backward.py's.
    sweep: tuple[Walk, ...] = ()
    # Programs that fill the GPU: rows are cut into pieces until there are that many.
    sweep_programs: int = 132
    # Tokens times memories from where on they run: their launches are more, and below that the host is what waits.
    sweep_from: int = 0
    # Tokens of a chunk there; 0: `chunk`.
    sweep_chunk_size: int = 0
    # Warps of walk.py's kernel; 0: it does not run.
    walk: int = 0
    # Tokens times memories up to which it takes the forward pass.
    walk_to: int = 1 << 17


# triton 3.4 to 3.7 miscompile some products with the transpose of a product, which memories in sweep.py and walk.py are.
# With 3.6 they were checked against float64; with this they were not.
UNCHECKED = "3.7"

# (capability, BM, wider of BD and BDV) -> what differs from `safe` for bf16. Measured: `stack`, key_stages and step_warps
# on H200s, the sweeps on one H100, the walk on an H200. Below `sweep_from` the other kernels' fewer launches take less time.
SHIPPED: dict[tuple[tuple[int, int], int, int], dict[str, Any]] = {
    ((9, 0), 64, 64): {"stack": 2, "key_stages": 2, "step_warps": 2},
    ((9, 0), 64, 128): {
        "stack": 2, "key_stages": 2, "step_warps": 2, "sweep": (*(Walk(64, 4, 3),) * 3, Walk(64, 4, 2)),
        "sweep_from": 1 << 18,
    },
    ((9, 0), 128, 64): {"step_warps": 8, "sweep": (Walk(64, 4, 3),) * 4, "walk": 8},
    ((9, 0), 128, 128): {"step_warps": 8, "sweep": (Walk(64, 4, 2),) * 4},
    ((9, 0), 64, 256): {
        "sweep": (Walk(64, 4, 1), Walk(64, 4, 3), Walk(64, 4, 3), Walk(64, 4, 1)), "sweep_from": 1 << 17, "sweep_chunk_size": 64,
    },
    ((9, 0), 128, 256): {
        "sweep": (Walk(64, 4, 1), Walk(64, 4, 2), Walk(64, 4, 2), Walk(64, 4, 1)), "sweep_chunk_size": 64,
    },
}  # fmt: skip


def configure(q: Tensor, v: Tensor, g: Tensor) -> Config:
    """The configuration for these inputs on their device. Raises ValueError where nothing fits."""
    return _configure(q.device, q.dtype, g.shape[3], q.shape[3], v.shape[3])


@functools.cache
def _configure(device: torch.device, dtype: torch.dtype, M: int, D: int, DV: int) -> Config:
    gpu = target(device)
    if gpu is None:
        return choose((0, 0), 1 << 20, M, D, DV, dtype)._replace(chunk_size=32, stack=2, precision="ieee")
    return choose(gpu.capability, gpu.shared, M, D, DV, dtype)


obstacle = obstacle_of(_configure)


def choose(capability: tuple[int, int], shared: int, M: int, D: int, DV: int, dtype: torch.dtype) -> Config:
    """The shipped configuration for this capability and these widths, or one that fits `shared` bytes of shared memory."""
    config = safe(shared, M, D, DV, dtype)
    if dtype == torch.bfloat16:
        config = config._replace(**SHIPPED.get((capability, config.block_m, max(config.block_d, config.block_dv)), {}))
    if triton is not None and triton.__version__.startswith(UNCHECKED):
        config = config._replace(sweep=(), walk=0)
    return config


def safe(shared: int, M: int, D: int, DV: int, dtype: torch.dtype) -> Config:
    """The longest chunk whose kernels need no more than `shared` bytes.

    Raises ValueError when not even chunks of 16 tokens fit.
    """
    BM, BD, BDV = (width(x) for x in (M, D, DV))
    wide = max(BD, BDV)
    # Chunks of 64 use Hopper's wgmma. In fp32 three tf32 products through it race; with heads of 256 ptxas runs out of
    # registers; with fewer than 64 slots it gets an address wrong in the key kernel (all seen with triton 3.6).
    half = dtype != torch.float32
    longest = 64 if half and wide <= 128 and BM >= 64 else 32 if half or wide <= 128 else 16
    fitting = [C for C in (64, 32, 16) if longest >= C and shared_bytes(C, BM, wide, dtype, shared) <= shared]
    if not fitting:
        raise ValueError(f"{M} slots with head dim {max(D, DV)} need more than {shared} bytes of shared memory")
    chunk = fitting[0]
    hold = dtype == torch.bfloat16 and held_bytes(chunk, BM, wide) <= shared
    # With bf16 inputs triton_helpers.py cuts operands into parts, and only the step takes tf32. Three bf16 products
    # carry 16 bits of each factor, enough for fp16; six carry 24. Three tf32 products left twice the error (one H200).
    precision = {torch.bfloat16: "tf32", torch.float16: "bf16x3", torch.float32: "bf16x6"}[dtype]
    return Config(chunk, BM, BD, BDV, hold, 1, 4, 4, 1, min(64, wide), 4, precision)


def shared_bytes(C: int, BM: int, BD: int, dtype: torch.dtype, shared: int) -> int:
    """Bound on the shared memory of every kernel without `hold`, from the compiler's reports for 8.0 and 9.0."""
    tiles = max(C * (4 * BD + 20 * BM), 4 * BM * BD + 4 * C * (BM + BD))
    if BM >= 128:
        tiles += 3 * BM * BD // 2
    tiles *= 2 if dtype == torch.float32 else 1
    if shared < 227 * 1024:
        # Where it was not tried: room for every part of a memory in both orientations.
        tiles = max(tiles, (12 if dtype == torch.float32 else 8) * BM * BD + 2 * C * (BM + BD))
    return tiles


def held_bytes(C: int, BM: int, BD: int) -> int:
    """The same with `hold`, in bf16: keys, values and memories in every orientation that a product needs."""
    return 12 * BM * BD + 8 * C * (BM + BD)
