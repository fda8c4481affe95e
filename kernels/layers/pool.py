"""Calls of several sequences, for code that knows one sequence a row and a state of its own for each.

`on_sequences` runs sequences that are laid end to end, one after the other. `on_rows` runs on a pool: states of many
sequences [N,..], of which a call names the rows that it reads and writes, as a server keeps them.

A row below 0 is padding. It outputs 0; nothing is read for it, and nothing written. No other two of a call's rows are
the same. Nothing of pools waits for the GPU, so that a call can be recorded as a CUDA graph.

Letters: N rows of a pool, B rows of a call, T time, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
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


def on_sequences(run: Callable[[slice, Any], tuple[Any, ...]], cu: Tensor, state: Any) -> tuple[Any, ...]:
    """What `run` returns, given the place of each sequence in the row and its state: outputs [1,T,..], joined to the row,
    and last the state, which `state` [S,..] (a NamedTuple, or None) was before. Sequences begin at `cu` [S+1]."""
    found = []
    for n, (start, end) in enumerate(pairwise(cu.tolist())):
        own = None if state is None else type(state)(*(part[n : n + 1] for part in state))
        found.append(run(slice(start, end), own))
    *outputs, states = zip(*found, strict=True)
    after = type(states[0])(*(torch.cat(parts) for parts in zip(*states, strict=True)))
    return (*(torch.cat(parts, 1) for parts in outputs), after)


def each_sequence(run: Callable[..., tuple[Any, ...]], cu: Tensor, state: Any, **rows: Tensor | None) -> Any:
    """`on_sequences` with the own part of each of `rows` [1,T,..], by name, and `state`."""

    def alone(own: slice, state: Any) -> tuple[Any, ...]:
        return run(**{name: None if y is None else y[:, own] for name, y in rows.items()}, state=state)

    return on_sequences(alone, cu, state)
