"""The one error class for users' mistakes, and the exit codes of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """Documented exit codes; stable once shipped."""

    OK = 0
    BUG = 1
    USAGE = 2
    INCOMPATIBLE = 3
    RESOURCE = 4
    HUB = 5
    CHECK_FAILED = 6
    INTERRUPTED = 130


class LinearizeError(Exception):
    """A mistake or an obstacle that the user can act on: printed as one message, never as a traceback.

    `message` names what was asked, what was found and what to do next; `code` is the exit code.
    """

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of `known`, or an empty string when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
