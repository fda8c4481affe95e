"""Which layers, or heads, keep softmax, by two methods. Each asks how much is lost with some kept.

restore   from all linear, give softmax back to the one that helps most, then to the next one beside it
swaps     make one linear at a time, and keep those that lose most: few passes, blind to interactions

What is lost is a share: 0 as the source, 1 as with all linear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

# A layer by its number, or a group of heads by its layer and KV head.
Unit = Any
# What is lost with each of these sets kept.
Lost = Callable[[Sequence[Collection[Unit]]], list[float]]
# Whether one more may be kept beside others.
Fits = Callable[[Collection[Unit], Unit], bool]


class Chosen(NamedTuple):
    """What is kept, and the score of all."""

    kept: list[Unit]
    scores: dict[Unit, float]


def any_fits(kept: Collection[Unit], unit: Unit) -> bool:
    """Nothing is in the way of one more."""
    return True


def best(scores: dict[Unit, float], count: int, fits: Fits) -> list[Unit]:
    """Those of the highest scores that fit, sorted."""
    kept: list[Unit] = []
    for unit in sorted(scores, key=lambda unit: -scores[unit]):
        if len(kept) < count and fits(kept, unit):
            kept.append(unit)
    return sorted(kept)


def restore(units: list[Unit], count: int, lost: Lost, fits: Fits = any_fits) -> Chosen:
    """One after the other: len(units) * count evaluations at most."""
    kept: list[Unit] = []
    scores: dict[Unit, float] = {}
    before = 1.0
    for _ in range(count):
        rest = [unit for unit in units if unit not in kept and fits(kept, unit)]
        found = dict(zip(rest, lost([{*kept, unit} for unit in rest]), strict=True))
        scores |= {unit: before - value for unit, value in found.items()}
        first = min(rest, key=lambda unit: found[unit])
        kept.append(first)
        before = found[first]
    return Chosen(sorted(kept), scores)


def swaps(units: list[Unit], count: int, lost: Lost, fits: Fits = any_fits) -> Chosen:
    """One linear at a time: len(units) evaluations."""
    found = lost([{*units} - {unit} for unit in units])
    scores = dict(zip(units, found, strict=True))
    return Chosen(best(scores, count, fits), scores)
