"""Perplexity and KL by how far back the same two tokens stood together: what a student still looks up in its text.

Softmax finds what followed a token the last time, however far back that was. A window does so as far as it reaches, and
a linear memory as far as it remembers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..train.losses import IGNORED
from .positions import figures, pair_sums

# Tokens back: up to each of these, and farther; what is new comes first.
EDGES = (32, 128, 512, 2048)


def tokens_back(ids: Tensor, wanted: Tensor, positions: Tensor | None = None) -> Tensor:
    """How many tokens back a token was followed by the same target as now, in its document: [B,T] int64, 0 where never.

    ids [B,T]; targets `wanted` [B,T], -100 where nothing is predicted; `positions` [B,T] start at 0 with each document.
    """
    B, T = ids.shape
    place = torch.arange(T, device=ids.device).expand(B, T)
    document = torch.zeros_like(ids) if positions is None else (positions == 0).cumsum(1)
    document = document + (T + 1) * torch.arange(B, device=ids.device)[:, None]
    keys = [y.flatten() for y in (place, wanted, ids, document)]
    order = torch.arange(B * T, device=ids.device)
    for key in keys[1:]:
        order = order[key[order].argsort(stable=True)]
    place, *same = (key[order] for key in keys)
    known = torch.stack([key[1:] == key[:-1] for key in same]).all(0) & (same[0][1:] != IGNORED)
    found = torch.zeros_like(place)
    found[1:] = (place[1:] - place[:-1]) * known
    return torch.empty_like(found).scatter_(0, order, found).view(B, T)


class Repeats:
    """Sums over the targets of a text, apart for those that are new and for those that stood so far back."""

    def __init__(self) -> None:
        kinds = len(EDGES) + 2
        self.sums, self.counts = torch.zeros(kinds, 3, dtype=torch.float64), [0] * kinds
        self.edges = torch.tensor([0, *EDGES])

    def add(self, ours: Tensor, theirs: Tensor, wanted: Tensor, back: Tensor) -> None:
        """Logits [B,t,V] of student and teacher at targets [B,t], which stood so many tokens `back`."""
        kind = torch.bucketize(back.contiguous(), self.edges.to(back.device)).masked_fill(wanted == IGNORED, -1)
        for number in kind.unique().tolist():
            if number >= 0:
                here = kind == number
                self.sums[number] += pair_sums(*(y[here][None] for y in (ours, theirs, wanted)))
                self.counts[number] += int(here.sum())

    def totals(self) -> tuple[Tensor, int]:
        """What `figures` takes, over all targets."""
        return self.sums.sum(0), sum(self.counts)

    def rows(self) -> list[dict[str, Any]]:
        """Figures of each kind that there is, with its tokens: `from` to `to` tokens back, 0 to 0 for what is new, None
        without an end."""
        ends = [(0, 0), *((start + 1, end) for start, end in zip((0, *EDGES), (*EDGES, None), strict=True))]
        rows = zip(ends, self.counts, self.sums, strict=True)
        return [
            {"from": start, "to": end, "tokens": count, **figures(sums, count)}
            for (start, end), count, sums in rows
            if count
        ]
