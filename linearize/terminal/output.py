"""Print messages on stderr and results on stdout."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from ..errors import redact

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


# Characters that a terminal obeys instead of showing: those of its escapes, and those that change the order of others.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` with control characters, other than ends of lines and tabs, written out: `\\x1b`.

    Whatever goes to a person passes here: names in folders, configs and tokenizers are of people who are not trusted.
    """
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PrintableRecord(logging.LogRecord):
    """What any package logs, `printable`."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


_formatwarning = warnings.formatwarning


# What warns whenever it is imported, of parts that nothing here asks for.
CHATTY = ("torchao", "bitsandbytes.backends.cpu.ops", "torch.utils._pytree")


def quiet_other_packages() -> None:
    """From now on log records and warnings of other packages, which quote configs and paths, are `printable`, and
    those that CHATTY packages give when they are imported are silent. So are their bars where no terminal shows them:
    `tqdm` reads the variable when it is imported, here and in child processes."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    logging.setLogRecordFactory(PrintableRecord)
    warnings.formatwarning = lambda *given, **named: printable(_formatwarning(*given, **named))
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


class Drawn:
    """The last line of the terminal, while it shows progress. A message takes its place."""

    def __init__(self) -> None:
        self.there, self.lock = False, threading.RLock()  # a signal's handler may speak while a line is drawn

    def unlock(self) -> None:
        """In a process that was forked while a thread, which it does not have, drew."""
        self.lock = threading.RLock()

    def draw(self, text: str) -> None:
        with self.lock:
            shown = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps could not be drawn again
            print(f"\r{shown}\033[K", end="", file=sys.stderr, flush=True)
            self.there = True

    def clear(self) -> None:
        with self.lock:
            if self.there:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            self.there = False


DRAWN = Drawn()
os.register_at_fork(after_in_child=DRAWN.unlock)


def say(text: str) -> None:
    """One message for a person, without secrets."""
    with DRAWN.lock:  # nothing is drawn between the two
        DRAWN.clear()
        print(printable(redact(text)), file=sys.stderr, flush=True)


def show(text: str, end: str = "\n") -> None:
    """A result on stdout: as it is where a program or a file takes it, `printable` on a terminal."""
    with DRAWN.lock:
        DRAWN.clear()
        print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def say_error(where: str, message: str) -> None:
    """A message about an error; its first word is red on a terminal."""
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    word = "\033[1;31merror\033[0m" if coloured else "error"
    print(f"{word}{where}: {printable(redact(message))}", file=sys.stderr, flush=True)


def print_json(value: Any, indent: int | None = None) -> None:
    """A result as JSON; what is not finite becomes null, JSON has no word for it."""
    print(json.dumps(finite(value), indent=indent, allow_nan=False))


def finite(value: Any) -> Any:
    """The same value, None in place of each number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def size(count: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def short(count: float, digits: int = 3) -> str:
    """A count for people, in three digits: 20.5M."""
    for unit in ("", "k", "M", "B"):
        if abs(count) < 999.5:
            return f"{count:.{digits}g}{unit}"
        count /= 1000
    return f"{count:.{digits}g}T"


def duration(seconds: float) -> str:
    """A time for people: `48 s`, `12 min`, `3.4 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown; a row that lacks cells gets empty ones at its end."""
    filled = [[*row, *[""] * (len(columns) - len(row))] for row in (columns, *rows)]
    first, *others = [f"| {' | '.join(row)} |" for row in filled]
    return [first, "|---" * len(columns) + "|", *others]


def counted(count: int, one: str, many: str = "") -> str:
    """A count with its noun: `1 thread`, `2,000 threads`; `many` is the plural where an s is not enough."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def percent(share: float | None) -> str:
    """Runs of earlier versions did not measure it."""
    return "" if share is None else f"{share:.1%}"


def nats(kl: float | None) -> str:
    """A KL divergence for people, at least three digits of it however small it is: 0.4123, 0.00810, 2.10e-05. Runs of
    earlier versions did not measure it."""
    if not kl:
        return "" if kl is None else "0"
    return f"{kl:.4f}" if kl >= 0.1 else f"{kl:#.3g}"


def unwrapped(text: str) -> str:
    """A docstring whose paragraphs are one line each: a terminal has its own width."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def layers_named(numbers: Iterable[int]) -> str:
    """`layer 2`, or `layers 0-1,3`."""
    found = sorted(set(numbers))
    return f"layer{'s' * (len(found) > 1)} {ranges(found)}"


def ranges(numbers: list[int]) -> str:
    """`[0,1,2,5]` -> `0-2,5`."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
