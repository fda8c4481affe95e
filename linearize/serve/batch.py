"""One batch of a server: decode steps first, then prompts laid end to end, each with its row of a pool of states.

Nothing here waits for the device. Decode steps run on the pool itself, and can be recorded as a CUDA graph. Prompts go
on from states that are copied out of their rows, several in one call, and their last states are copied back.

Letters: N rows of a pool, n decode steps, S prompts of a call, T tokens of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .states import Pool, StateLayout, store

# A prompt of so many tokens fills a GPU by itself; as the only sequence of a call it has the choice of all kernels.
LONG = 1024
# Prompts that begin have a call of their own from so many tokens on: beside those that go on they would read zeros.
FRESH = 4096


class Prompts(NamedTuple):
    """Prompts that one call reads: tokens `first` to `first + tokens` of the batch."""

    first: int
    tokens: int
    rows: Tensor  # [S] int64
    starts: Tensor  # [S+1] int32, from 0
    begun: Tensor | None  # [S,1] which go on from earlier tokens; None: all do, or none
    fresh: bool  # whether none does

    def part(self, y: Tensor) -> Tensor:
        """Their own tokens of y [1,tokens,..]."""
        return y if y.shape[1] == self.tokens else y.narrow(1, self.first, self.tokens)

    def read(self, pool: Pool) -> Any:
        """The states that they go on from; None where there are none."""
        if self.fresh:
            return None
        memory = pool.memory.index_select(0, self.rows)
        if self.begun is not None:  # a word at a time: rows are multiples of 16 bytes
            memory = torch.where(self.begun, memory.view(torch.int64), 0).view(torch.uint8)
        return pool.layout.views(memory)


@dataclasses.dataclass
class Batch:
    """What the layers of one group of a server's memory do with the tokens of a step."""

    # Decode steps: rows [n] int32, below 0 for places that no sequence has, and the index of each token [n,1] int64.
    rows: Tensor
    places: Tensor
    prompts: list[Prompts] = dataclasses.field(default_factory=list)
    # Which steps are prompts of one token, whose states begin as zeros; None: none.
    fresh: Tensor | None = None
    # Tokens of each sequence, those of the step among them, [sequences].
    lengths: Tensor | None = None


def grouped(lengths: Sequence[int], seen: Sequence[int]) -> list[tuple[int, int]]:
    """Prompts of these lengths, of which `seen` tokens came before, as ranges of them, one for each call: a long one
    has a call of its own, and so have the last ones if they all begin and are many."""
    begin = max((i + 1 for i, n in enumerate(seen) if n > 0), default=0)
    if sum(lengths[begin:]) < FRESH:
        begin = 0
    ranges: list[tuple[int, int]] = []
    for i, length in enumerate(lengths):
        if ranges and i != begin and length < LONG and lengths[i - 1] < LONG:
            ranges[-1] = ranges[-1][0], i + 1
        else:
            ranges.append((i, i + 1))
    return ranges


def prompts_of(
    lengths: Sequence[int], seen: Sequence[int], first: int, starts: Tensor, before: Tensor, rows: Tensor
) -> list[Prompts]:
    """Prompts of these lengths, of which `seen` tokens came before, as calls. `starts` [S+1], `before` and `rows` [S]
    are on the device; `first` is the first token of the first prompt, from which `starts` count."""
    found = []
    for begin, end in grouped(lengths, seen):
        tokens = sum(lengths[begin:end])
        own = (starts[begin : end + 1] - starts[begin]).int()
        # All layers of the step see these sequences, and the CPU knows where they begin (layout.py's `of_starts`).
        own.memo, own.host = {}, torch.tensor([0, *accumulate(lengths[begin:end])], dtype=torch.int32, device="cpu")  # type: ignore[attr-defined]
        fresh, all_begun = (not any(seen[begin:end])), all(seen[begin:end])
        begun = None if fresh or all_begun else before[begin:end, None] > 0
        found.append(Prompts(first, tokens, rows[begin:end].long(), own, begun, fresh))
        first += tokens
    return found


def run(
    mixer: Any, kind: Any, pool: Pool, batch: Batch, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]
) -> None:
    """`mixer.core` on a batch: `inputs` [1,tokens,..] as `prepare` made them, results into `outputs` [1,tokens,..], the
    states in `pool` changed. `kind` is TokenLayout in the mixer's own copy of the kernels."""
    n = len(batch.rows)
    if n:
        steps = tuple(None if y is None else y[0, :n, None] for y in inputs)
        tokens = kind(rows=batch.rows, places=batch.places)
        mixer.core_into(tuple(out[0, :n, None] for out in outputs), steps, tokens, pool.state)
    for one in batch.prompts:
        given = tuple(None if y is None else one.part(y) for y in inputs)
        into = tuple(map(one.part, outputs))
        state = mixer.core_into(into, given, kind(cu_seqlens=one.starts), one.read(pool))
        store(pool.state, one.rows, state)


def rehearse(
    mixer: Any, kind: Any, layout: StateLayout, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]
) -> None:
    """Run batches of every form on tokens of no sequence. So kernels are compiled before the first request, and the
    memory that prompts take is known. Outputs mean nothing."""
    given = inputs[0]
    assert given is not None
    device, total = given.device, given.shape[1]
    pool = Pool.of(layout, torch.zeros(4, layout.bytes, dtype=torch.uint8, device=device))
    rows = torch.tensor([0, 1, -1], dtype=torch.int32, device=device)
    for n in (1, 2, 3):
        if n <= total:
            run(mixer, kind, pool, Batch(rows[:n], rows.new_zeros(n, 1).long()), inputs, outputs)
    for lengths in forms(total):
        for seen in (0, 5):
            # Behind a step, tensors need not begin at a multiple of 16 bytes, for which triton compiles apart.
            for n in (0, 1) if sum(lengths) < total else (0,):
                starts = torch.tensor([0, *lengths], device=device).cumsum(0)
                before = torch.full((len(lengths),), seen, device=device)
                own = torch.arange(len(lengths), device=device) % 2
                prompts = prompts_of(lengths, [seen] * len(lengths), n, starts, before, own)
                run(mixer, kind, pool, Batch(rows[:n], rows.new_zeros(n, 1).long(), prompts), inputs, outputs)


def forms(total: int) -> list[list[int]]:
    """Lengths of prompts, `total` tokens at most, that together have all that kernels are chosen and compiled by: one
    prompt and several, of all orders of length, multiples of 16 tokens and others."""
    found = [[2], [16], [19], [16, 16], [17, 20]]
    for length in (*(40 << n for n in range(total.bit_length())), total):
        found += [[length], [max(2, length - 3)]]
        for parts in (2, 5):
            one = max(2, min(length // parts, LONG - 1))
            found.append([one] * (length // one))
    # Long ones are cut alike, into whatever number of parts.
    return [[*lengths] for lengths in dict.fromkeys(map(tuple, found)) if sum(lengths) <= total]
