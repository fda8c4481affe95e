"""Progress of what takes longer than a few seconds: a bar on a terminal, a line now and then elsewhere.

Of what cannot tell its share, a terminal shows the time that it has taken.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from .output import DRAWN, duration, say

SHOWN_AFTER = 5.0  # seconds: what is done sooner says nothing
LINE_EVERY = 30.0
SECOND = 1.0  # how often the time that has passed is drawn
WIDTH = 24

Advance = Callable[[float], None]

_bars = 0  # that are drawn


def silent(amount: float) -> None:
    """Progress that nobody looks at."""


@contextlib.contextmanager
def progress(what: str, total: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """Yields what to call, from any thread, with each amount of `total` that is done. Both kinds say how long it will
    take in all."""
    global _bars
    began, shown, done, drawn = clock(), clock(), 0.0, 0
    terminal = sys.stderr.isatty()

    def advance(amount: float) -> None:
        with DRAWN.lock:
            add(amount)

    def add(amount: float) -> None:
        global _bars
        nonlocal shown, done, drawn
        done += amount
        now = clock()
        share = min(1.0, done / max(total, 1e-9))
        if now - began < SHOWN_AFTER or share <= 0:
            return
        whole = (now - began) / share
        times = f"{share:.0%}, {whole - (now - began):.0f} s of {whole:.0f} s left"
        if terminal:
            _bars, drawn = _bars + 1 - drawn, 1
            filled = round(WIDTH * share)
            DRAWN.draw(f"{what} [{'#' * filled}{'.' * (WIDTH - filled)}] {times}")
        elif now - shown >= LINE_EVERY:
            shown = now
            say(f"{what}: {times}")

    try:
        yield advance
    finally:
        _bars -= drawn
        DRAWN.clear()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows on a terminal how long the block has taken, once that is SHOWN_AFTER; a bar within it takes its place as
    soon as it knows a share."""
    if not sys.stderr.isatty():
        yield
        return
    began, over = time.monotonic(), threading.Event()

    def show() -> None:
        rest = SHOWN_AFTER
        while not over.wait(rest):
            rest = SECOND
            if not _bars:
                DRAWN.draw(f"{what}, {duration(time.monotonic() - began)}")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        DRAWN.clear()
