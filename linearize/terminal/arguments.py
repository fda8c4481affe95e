"""What words of the command line become."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import LinearizeError


def path(word: str | Path) -> Path:
    """A file or a folder. Raises LinearizeError (exit 2) for an empty word, which Path would read as this folder: a
    variable of the shell without a value becomes one."""
    if not str(word).strip():
        raise LinearizeError("the name of a file or folder is empty. Give a name; . is this folder")
    return Path(word)


def split_values(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words that name something, and values as key=value; a file whose name has a `=` is a file."""
    values = [word for word in words if "=" in word and not os.path.exists(word)]
    return [word for word in words if word not in values], values
