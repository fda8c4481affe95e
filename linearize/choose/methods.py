"""Which layers keep softmax, by three methods. Each asks how much is lost with some layers kept.

restore   from all layers linear, give softmax back to the layer that helps most, then to the next one beside it
swaps     make one layer linear at a time, and keep those that lose most: few passes, blind to interactions
gates     train a gate in each layer between softmax and its mixer, with a penalty until as many as asked stay open
          (arXiv 2606.30562)

What is lost is a share: 0 as the source, 1 as with every layer linear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GATE_STEPS = 40
GATE_LR = 0.15

# What is lost with each of these sets of layers kept.
Lost = Callable[[Sequence[Collection[int]]], list[float]]
# What is lost at one gate a layer, on the batches of one step, with a gradient.
LostAt = Callable[[Tensor, int], Tensor]


class Chosen(NamedTuple):
    """Layers to keep, and the score of every layer."""

    kept: list[int]
    scores: dict[int, float]


def restore(layers: list[int], count: int, lost: Lost) -> Chosen:
    """One layer after the other: len(layers) * count evaluations at most."""
    kept: list[int] = []
    scores: dict[int, float] = {}
    before = 1.0
    for _ in range(count):
        rest = [layer for layer in layers if layer not in kept]
        found = dict(zip(rest, lost([{*kept, layer} for layer in rest]), strict=True))
        scores |= {layer: before - value for layer, value in found.items()}
        best = min(rest, key=lambda layer: found[layer])
        kept.append(best)
        before = found[best]
    return Chosen(sorted(kept), scores)


def swaps(layers: list[int], count: int, lost: Lost) -> Chosen:
    """One layer linear at a time: len(layers) evaluations."""
    found = lost([{*layers} - {layer} for layer in layers])
    scores = dict(zip(layers, found, strict=True))
    return Chosen(sorted(sorted(layers, key=lambda layer: -scores[layer])[:count]), scores)


def gates(layers: list[int], count: int, lost_at: LostAt) -> Chosen:
    """All gates together, from half open: the loss asks them to open, a growing penalty on their sum to close."""
    logits = torch.zeros(len(layers), requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=GATE_LR, betas=(0.8, 0.95))
    weight = 0.0
    for step in range(GATE_STEPS):
        opened = logits.sigmoid()
        excess = float(opened.sum().detach()) - count
        # A multiplier that grows while more than `count` are open and falls while fewer are.
        weight = max(0.0, weight + excess / len(layers) / 10)
        loss = lost_at(opened, step) + weight * opened.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scores = dict(zip(layers, logits.detach().sigmoid().tolist(), strict=True))
    return Chosen(sorted(sorted(layers, key=lambda layer: -scores[layer])[:count]), scores)
