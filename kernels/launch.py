"""What the host side of every mechanism's kernels shares: chunks, strides, and the namespace of operators."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from .tiles import load_rows


def interpreted() -> bool:
    """Whether triton runs its kernels on the CPU (TRITON_INTERPRET=1, for tests)."""
    return type(load_rows).__name__ == "InterpretedFunction"


class Layout(NamedTuple):
    """How rows or sequences fall into chunks; a row of N chunks owns N + 1 slots."""

    chunks: int  # grid size: chunks per row, or a bound on all chunks of all sequences
    rows: int
    slots: int
    per_chunk: Tensor | None  # cu_seqlens: [chunks,3] first token, tokens, slot
    per_row: Tensor | None  # cu_seqlens: [rows,2] first slot, chunks


def lay_out(q: Tensor, cu: Tensor | None, C: int) -> Layout:
    """The chunks of q [B,T,H,D]. With cu_seqlens their number is only bounded, so that nothing waits for the GPU."""
    B, T = q.shape[:2]
    if cu is None:
        N = -(-T // C)
        return Layout(N, B, B * (N + 1), None, None)
    S, N = cu.shape[0] - 1, T // C + cu.shape[0] - 1
    cu = cu.long()
    counts = (cu[1:] - cu[:-1] + C - 1) // C
    ends = counts.cumsum(0)
    index = torch.arange(N, device=q.device)
    row = torch.searchsorted(ends, index, right=True).clamp(max=S - 1)
    token = cu[row] + (index - (ends - counts)[row]) * C
    size = torch.where(index < ends[-1], (cu[row + 1] - token).clamp(max=C), 0)
    per_chunk = torch.stack([token, size, index + row], -1).int()
    per_row = torch.stack([ends - counts + torch.arange(S, device=q.device), counts], -1).int()
    return Layout(N, S, N + S, per_chunk, per_row)


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Batch, time and head strides of [B,T,heads,D] tensors, whose last dimension is dense."""
    return tuple(step for tensor in tensors for step in tensor.stride()[:3])


def dense(x: Tensor) -> Tensor:
    """x, copied where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def own_namespace(module: str, operator: str) -> str:
    """An operator namespace that no other module object has taken; the module's name makes it stable across processes.

    When several copies of a file meet in one process (the package, checkpoints, versions), each keeps its own
    `operator`, whatever the order of imports.
    """
    name = "linearize_" + hashlib.sha256(module.encode()).hexdigest()[:12]
    taken = 0
    while hasattr(getattr(torch.ops, f"{name}_{taken}"), operator):
        taken += 1
    return f"{name}_{taken}"
