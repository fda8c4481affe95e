"""What makes tests quick and changes nothing that they look at; for this process, and for those that tests start."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import clean_env
from transformers import dynamic_module_utils

from linearize.checkpoint import carried


def be_quick() -> None:
    """The disk outlives the tests, so none waits until files have reached it."""
    os.fsync = lambda handle: None  # type: ignore[assignment]
    clean_env.remember_imports()
    carried.get_relative_imports = dynamic_module_utils.get_relative_imports


def without_full_collections() -> None:
    """accelerate asks for one at the start of each stage, which takes as long as the stage of a tiny model."""
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.gc = SimpleNamespace(collect=lambda: 0)  # type: ignore[attr-defined]
