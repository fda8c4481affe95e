"""Pools: states of many sequences [N,..], of which a call names the rows that it reads and writes, as a server keeps them.

A row below 0 is padding. It outputs 0; nothing is read for it, and nothing written. No other two of a call's rows are
the same. Nothing here waits for the GPU, so that a call can be recorded as a CUDA graph.

Letters: N rows of a pool, B rows of a call, T time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def check_pool(rows: Tensor | None, state: Any, B: int, *apart: Tensor | None) -> None:
    """Raise ValueError unless `rows` (None: there is no pool) are integers [B] beside a state; `apart`, cu_seqlens and
    segments, do not go with them."""
    if rows is None:
        return
    if state is None or any(x is not None for x in apart):
        raise ValueError("rows are those of a pool: pass it as state, and neither cu_seqlens nor segments")
    if rows.shape != (B,) or rows.is_floating_point():
        raise ValueError(f"rows must be [{B}] integers, found {tuple(rows.shape)} {rows.dtype}")


def take(pool: Any, rows: Tensor) -> Any:
    """The named rows [B,..] of a pool, a tensor [N,..] or a state of them; zeros for padding. A copy."""
    if not isinstance(pool, Tensor):
        return pool if pool is None else type(pool)(*(take(part, rows) for part in pool))
    real = (rows >= 0).view(-1, *[1] * (pool.ndim - 1))
    return torch.where(real, pool.index_select(0, rows.clamp_min(0)), 0)


def put(pool: Any, rows: Tensor, state: Any) -> None:
    """Write a state [B,..] into the named rows of a pool."""
    # Padding repeats what the first real row writes. Where none is real, the first row of the pool keeps its own.
    real, rows = rows >= 0, rows.long()
    source = torch.where(real, torch.arange(len(rows), device=rows.device), real.int().argmax())
    _put(pool, rows[source].clamp_min(0), state, source, real.any())


def _put(pool: Any, places: Tensor, state: Any, source: Tensor, some: Tensor) -> None:
    if isinstance(pool, Tensor):
        if pool.numel():
            pool.index_copy_(0, places, torch.where(some, state.to(pool.dtype).index_select(0, source), pool[:1]))
    elif pool is not None:
        for part, new in zip(pool, state, strict=True):
            _put(part, places, new, source, some)


def on_rows(
    run: Callable[..., tuple[Any, ...]], pool: Any, rows: Tensor, padding: Tensor | None, T: int
) -> tuple[Any, ...]:
    """What `run` returns on copies of rows of a pool, given them as `state`, and `padding` [B,T] with theirs. Its last
    result, the state after the call, is written back; the pool is returned in its place."""
    real = (rows >= 0)[:, None].expand(-1, T)
    *results, state = run(state=take(pool, rows), padding=real if padding is None else padding & real)
    put(pool, rows, state)
    return (*results, pool)
