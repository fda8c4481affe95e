"""What words of the command line become."""

from __future__ import annotations

from pathlib import Path

from ..errors import LinearizeError


def path(word: str | Path) -> Path:
    """A file or a folder. Raises LinearizeError (exit 2) for an empty word, which Path would read as this folder: a
    variable of the shell without a value becomes one."""
    if not str(word).strip():
        raise LinearizeError("the name of a file or folder is empty. Give a name; . is this folder")
    return Path(word)
