"""Progress of what takes longer than a few seconds: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from .output import say

SHOWN_AFTER = 5.0  # seconds: what is done sooner says nothing
LINE_EVERY = 30.0
WIDTH = 24

Advance = Callable[[float], None]


def silent(amount: float) -> None:
    """Progress that nobody looks at."""


@contextlib.contextmanager
def progress(what: str, total: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """Yields what to call with each amount of `total` that is done. Both kinds say how long it will take in all."""
    began, shown, done = clock(), clock(), 0.0
    terminal = sys.stderr.isatty()
    drawn = False

    def advance(amount: float) -> None:
        nonlocal shown, done, drawn
        done += amount
        now = clock()
        share = min(1.0, done / max(total, 1e-9))
        if now - began < SHOWN_AFTER or share <= 0:
            return
        whole = (now - began) / share
        times = f"{share:.0%}, {whole - (now - began):.0f} s of {whole:.0f} s left"
        if terminal:
            drawn = True
            filled = round(WIDTH * share)
            print(
                f"\r{what} [{'#' * filled}{'.' * (WIDTH - filled)}] {times}\033[K", end="", file=sys.stderr, flush=True
            )
        elif now - shown >= LINE_EVERY:
            shown = now
            say(f"{what}: {times}")

    try:
        yield advance
    finally:
        if drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
