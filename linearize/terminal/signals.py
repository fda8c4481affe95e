"""What ends a command from outside: Ctrl-C, SIGTERM, and SIGHUP of a terminal that was closed."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Callable, Iterable, Iterator

Action = Callable[[int], None]
END = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def caught(kinds: Iterable[signal.Signals], action: Action) -> Iterator[None]:
    """Within: each of these signals calls `action` with its number.

    A signal that the parent process ignores stays ignored, as SIGHUP under nohup. Outside of the main thread, which
    alone receives signals, nothing changes.
    """

    def handler(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        action(number)

    before = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for kind in kinds:
            if signal.getsignal(kind) is not signal.SIG_IGN:
                before[kind] = signal.signal(kind, handler)
    try:
        yield
    finally:
        for kind, old in before.items():
            signal.signal(kind, old or signal.SIG_DFL)


def end_or_stop(interrupted: bool, number: int, say: Callable[[str], None]) -> None:
    """What a signal means to a run that saves: the first one, to finish a step and save; another one, to stop at once,
    unless it is SIGHUP, which a closing terminal sends more than once. Raises KeyboardInterrupt."""
    if interrupted and number != signal.SIGHUP:
        raise KeyboardInterrupt
    if not interrupted:
        say("interrupted: finishing this step, then saving (again to stop at once)")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within: the first SIGTERM or SIGHUP raises KeyboardInterrupt, as Ctrl-C does, so that temporary folders are
    removed and child processes end. Those that follow must not disturb that: a closing terminal sends several.

    Of several processes the launcher is in charge: a signal that waits for a collective operation ends nothing.
    """
    ended = False

    def interrupt(number: int) -> None:
        nonlocal ended
        if not ended:
            ended = True
            raise KeyboardInterrupt

    with caught(() if "RANK" in os.environ else END, interrupt):
        yield


def leave_terminal() -> None:
    """Send what would be printed on a terminal that is gone to nowhere: writing there is an error."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
