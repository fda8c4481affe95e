"""What makes tests quick and changes nothing that they look at; for this process, and for those that tests start."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from types import SimpleNamespace

import clean_env
import torch._library.utils
import typer.main
from transformers import dynamic_module_utils

from linearize.checkpoint import carried


def be_quick() -> None:
    """The disk outlives the tests, so none waits until files have reached it."""
    os.fsync = lambda handle: None  # type: ignore[assignment]
    clean_env.remember_imports()
    clean_env.remember_code()
    remember_blocks()
    torch._library.utils.get_source = caller
    typer.main.get_command = functools.cache(typer.main.get_command)  # builds the whole tree of commands each time
    carried.get_relative_imports = dynamic_module_utils.get_relative_imports


def remember_blocks() -> None:
    """Triton asks for the lines of each kernel of each copy of a checkpoint's code; tokenize is slow to find them."""
    search, known = inspect.getblock, dict[str, int]()

    def getblock(lines: list[str]) -> list[str]:
        text = "".join(lines)
        if text not in known:
            known[text] = len(search(lines))
        return lines[: known[text]]

    inspect.getblock = getblock


def caller(stacklevel: int) -> str:
    """As torch's `get_source`, without the search through all modules that inspect begins with."""
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def without_full_collections() -> None:
    """accelerate asks for one at the start of each stage, which takes as long as the stage of a tiny model."""
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.gc = SimpleNamespace(collect=lambda: 0)  # type: ignore[attr-defined]
