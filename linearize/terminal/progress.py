"""Progress of what takes longer than a few seconds: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from .output import DRAWN, duration, say

SHOWN_AFTER = 5.0  # seconds: what is done sooner says nothing
LINE_EVERY = 30.0
SECOND = 1.0  # how often a bar is drawn while nothing advances
WIDTH = 24

Advance = Callable[[float], None]

_bars: list[Bar] = []  # that are open: the innermost one draws


@dataclasses.dataclass(eq=False)
class Bar:
    """One of the bars that are open; it began then, or as much later as bars within it took."""

    began: float


def silent(amount: float) -> None:
    """Progress that nobody looks at."""


@contextlib.contextmanager
def progress(what: str, total: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """Yields what to call, from any thread, with each amount of `total` that is done. Both kinds say how long it will
    take in all, as soon as a share of it is done; where that is not known, a bar says how long it has taken."""
    terminal, over, began = sys.stderr.isatty(), threading.Event(), clock()
    bar, shown = Bar(began), began
    done = share = whole = 0.0

    def advance(amount: float) -> None:
        nonlocal done, share, whole, shown
        with DRAWN.lock:
            done += amount
            now = clock()
            share = min(1.0, done / max(total, 1e-9))
            if share <= 0:
                return
            whole = (now - bar.began) / share
            if terminal:
                draw(now)
            elif now - bar.began >= SHOWN_AFTER and now - shown >= LINE_EVERY:
                shown = now
                say(f"{what}: {times(now)}")

    def times(now: float) -> str:
        passed = now - bar.began
        if passed > whole:  # nothing is done yet, or the last part is slower than those before it
            return f"{share:.0%}, {duration(passed)} so far"
        return f"{share:.0%}, {whole - passed:.0f} s left"

    def draw(now: float) -> None:
        if now - bar.began >= SHOWN_AFTER and _bars[-1:] == [bar]:
            filled = round(WIDTH * share)
            DRAWN.draw(f"{what} [{'#' * filled}{'.' * (WIDTH - filled)}] {times(now)}")

    def show() -> None:
        rest = SHOWN_AFTER
        while not over.wait(rest):
            rest = SECOND
            with DRAWN.lock:
                if not over.is_set():
                    draw(clock())

    _bars.append(bar)
    thread = threading.Thread(target=show, daemon=True)
    if terminal:
        thread.start()
    try:
        yield advance
    finally:
        over.set()
        if terminal:
            thread.join()
        _bars.remove(bar)
        for other in _bars[-1:]:  # which waited meanwhile
            other.began += clock() - began
        DRAWN.clear()


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around the imports with which a command begins, whose share nobody knows. Of several processes the first one
    speaks."""
    if not sys.stderr.isatty() or int(os.environ.get("RANK", "0")):
        with uncollected():
            yield
        return
    with progress("starting", 1), uncollected():
        yield


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within: no garbage is collected, and what is there at the end never is. Modules stay: to look through the million
    objects of torch and transformers again and again as they are imported takes more than a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or packages in C++ say at the end that they were not cleaned up
        gc.enable()
