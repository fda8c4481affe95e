"""One batch of a server: decode steps first, then prompts laid end to end, each with its row of a pool of states.

Nothing here waits for the device. Decode steps run on the pool itself, and can be recorded as a CUDA graph. Prompts go
on from states that are copied out of their rows, all in one call, and their last states are copied back.

Letters: N rows of a pool, n decode steps, S prompts, T tokens of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .states import Call, StateLayout


@dataclasses.dataclass
class Batch:
    """What the layers of one group of a server's memory do with the tokens of a step."""

    # Decode steps: rows [n] int32, below 0 for places that no sequence has, and the index of each token [n,1] int64.
    rows: Tensor
    places: Tensor
    # Prompts: rows [S] int64; the rows to read, below 0 where nothing came before, and where something came [S] bool
    # (None: nowhere); where they begin [S+1] int32; the index of each token [1,T] int64.
    prompt_rows: Tensor | None = None
    before: Tensor | None = None
    came: Tensor | None = None
    starts: Tensor | None = None
    prompt_places: Tensor | None = None
    tokens: int = 0
    # Tokens of each sequence, those of the step among them, [sequences].
    lengths: Tensor | None = None
    # All tokens instead, for the code of earlier checkpoints, which takes no prompts laid end to end.
    calls: list[Call] | None = None

    @property
    def decodes(self) -> int:
        return len(self.rows)


def run(
    mixer: Any, kind: Any, layout: StateLayout, pool: Tensor, batch: Batch, inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
) -> None:
    """`mixer.core` on a batch: `inputs` [1,tokens,..] as `prepare` made them, results into `outputs` [1,tokens,..], the
    states in `pool` [N,bytes] changed. `kind` is TokenLayout in the mixer's own copy of the kernels."""
    n = batch.decodes
    if n:
        steps = tuple(None if y is None else y[0, :n, None] for y in inputs)
        made, _ = mixer.core(steps, kind(rows=batch.rows, places=batch.places), layout.views(pool))
        for out, y in zip(outputs, made, strict=True):
            out[0, :n].copy_(y[:, 0])
    if batch.prompt_rows is not None:
        prompts = tuple(None if y is None else y[:, n : n + batch.tokens] for y in inputs)
        places = kind(cu_seqlens=batch.starts, places=batch.prompt_places)
        state = None if batch.before is None else layout.read(pool, batch.before)
        made, state = mixer.core(prompts, places, state)
        layout.write(pool, batch.prompt_rows, state)
        for out, y in zip(outputs, made, strict=True):
            out[:, n : n + batch.tokens].copy_(y)
