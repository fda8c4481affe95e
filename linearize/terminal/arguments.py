"""What words of the command line become."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..demo import named_base
from ..errors import (
    Exit,
    LinearizeError,
    absent,
    check_choice,
    holds_model,
    in_repository,
    near_path,
    no_model,
    no_such_run,
)

# What the Hub takes as user/repo, or as one of the first models there.
HUB_ID = re.compile(r"\w[\w.-]{,95}(/\w[\w.-]{,95})?")


def path(word: str | Path) -> Path:
    """A file or a folder. Raises LinearizeError (exit 2) for an empty word, which Path would read as this folder: a
    variable of the shell without a value becomes one."""
    if not str(word).strip():
        raise LinearizeError("the name of a file or folder is empty. Give a name; . is this folder")
    return Path(word)


def there(word: str | Path) -> Path:
    """A folder that is there. Raises LinearizeError (exit 2) for one that is not, before torch is imported."""
    if not os.path.lexists(path(word)):
        raise absent(path(word), "no such folder")
    return path(word)


def run(word: str | Path) -> Path:
    """The folder of a run, or a file with figures. Raises LinearizeError (exit 2) for one that is not there."""
    if not os.path.lexists(path(word)):
        raise no_such_run(path(word))
    return path(word)


def non_empty(word: str) -> str:
    """The value of an option that is left out where it has none. Raises LinearizeError (exit 2) for an empty one."""
    if not word.strip():
        raise LinearizeError("the value of an option is empty. Give one, or leave the option out")
    return word


def model(word: str) -> str:
    """The folder or Hub id of a model. Raises LinearizeError: 2 for an empty word, 3 for a folder without a model, and
    for a name that no folder here has and no repository can have. That is known before torch is imported."""
    name = named_base(word)
    folder = Path(os.path.expanduser(name))
    if not name.strip():
        raise LinearizeError("the name of the model is empty. Give a folder, or the Hub's user/repo")
    if not os.path.lexists(folder) and not HUB_ID.fullmatch(name):
        near = near_path(folder, "*/") or in_repository(name)
        message = f"no such folder {name!r}, and it is no Hub id (user/repo){near and '.'}{near}"
        raise LinearizeError(message, Exit.INCOMPATIBLE)
    if os.path.isdir(folder) and not holds_model(folder):
        raise no_model(folder)
    return name


def one_of(option: str, choices: Sequence[str]) -> Callable[[str | None], str | None]:
    """What typer calls to refuse another value of an option than one of its choices, before torch is imported."""
    return lambda value: value and check_choice(option, value, choices)


# Arguments and options that several commands have.
Model = Annotated[str, typer.Argument(help="Model: a local folder, a Hub id, or demo.", parser=model)]
Converted = Annotated[str, typer.Argument(help="Converted model: a local folder or a Hub id.", parser=model)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Recipe values as key.sub=value, for example model.base=DIR.")
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code of the model that linearize did not write.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")]
DEVICES, DTYPES = ("auto", "cpu", "cuda"), ("keep", "float32", "bfloat16", "float16")
LEVELS = ("auto", "full", "keys", "none")  # of verification
Device = Annotated[str, typer.Option(help="Device: auto, cpu or cuda.", callback=one_of("--device", DEVICES))]
Dtype = Annotated[
    str, typer.Option(help="Dtype: keep, float32, bfloat16 or float16.", callback=one_of("--dtype", DTYPES))
]


def check_base(overrides: Iterable[str]) -> None:
    """Raise LinearizeError (exit 3) where overrides of a recipe name a base that is no model: see `model`. The recipe's
    own checks import torch."""
    for override in overrides:
        key, _, value = override.partition("=")
        # An address may hold a password: the recipe's own checks do not repeat it.
        if key == "model.base" and "://" not in value and not value.startswith(("{", "'", '"')):
            model(value)


def split_values(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words that name something, and values as key=value; a file whose name has a `=` is a file."""
    values = [word for word in words if "=" in word and not os.path.exists(word)]
    return [word for word in words if word not in values], values
