"""Copy kernel files into a checkpoint: they are nested at home and flat in a checkpoint.

transformers copies the code of a checkpoint from one flat folder. So `kernels/gsa/launch.py` travels as
`gsa_launch.py`, `kernels/gsa/gsa.py` as `gsa.py` and `kernels/hf/attention_hooks.py` as `attention_hooks.py`; the relative imports at the
start of their lines are rewritten on the way, and so are those by `import_module`. Only the first kind is followed: a
file of the second kind travels where an option needs it (`Mixer.parts`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

# An import of another kernel file, at home (`from ..gpu.launch import`) or flat (`from .launch import`).
RELATIVE_IMPORT = re.compile(r"^from (\.+)([\w.]+)(?= import)", re.MULTILINE)
# One of a part that an option switches on: `import_module("..gla.gla", __package__)`. transformers does not see it.
PART_IMPORT = re.compile(r"(?<=\bimport_module\(\")(\.+)([\w.]+)(?=\", __package__\))")
# Folders of what mechanisms share: their files travel under their own names.
SHARED = ("", "hf", "gpu", "layers")


def kernels_folder() -> Path:
    """The folder of `linearize_kernels`."""
    import linearize_kernels

    return Path(next(iter(linearize_kernels.__path__)))


@functools.cache
def kernel_files() -> dict[str, Path]:
    """Flat name, without `.py`, -> path of every kernel file."""
    folder = kernels_folder()
    paths = sorted(path for path in folder.rglob("*.py"))
    return {flat_name(path.relative_to(folder).with_suffix("").as_posix()): path for path in paths}


def flat_name(place: str) -> str:
    """The name on the road, without `.py`, of a file at `place` in the kernels folder, such as `gsa/launch`."""
    folder, _, stem = place.rpartition("/")
    return stem if folder in SHARED or stem == folder else f"{folder}_{stem}"


def flattened(path: Path) -> str:
    """The text of a kernel file as it travels."""
    return _flattened(path.relative_to(kernels_folder()).as_posix(), path.read_text("utf-8"))


@functools.cache
def _flattened(place: str, text: str) -> str:
    """`text` of the kernel file at `place` as it travels. Kept: each look at a folder's code asks for every file."""
    folder = PurePosixPath(place).parent

    def flat(found: re.Match[str]) -> str:
        dots, module = found.groups()
        above = folder.parents[len(dots) - 2] if len(dots) > 1 else folder
        return f".{flat_name((above / module.replace('.', '/')).as_posix())}"

    return RELATIVE_IMPORT.sub(lambda found: f"from {flat(found)}", PART_IMPORT.sub(flat, text))


def flat_files(roots: Iterable[str]) -> dict[str, str]:
    """File name -> text, both as they travel, of the kernel files with flat names `roots` and all that they import."""
    files = travelling_files()
    return {name: files[name] for name in reached(roots, files)}


def reached(roots: Iterable[str], files: Mapping[str, str]) -> set[str]:
    """Those of `files` (name -> text) that are `roots`, flat names without `.py`, or that these import."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = f"{waiting.pop()}.py"
        if name in files and name not in found:
            found.add(name)
            waiting += imported(files[name])
    return found


def travelling_files() -> dict[str, str]:
    """File name -> text of every kernel file, both as they travel."""
    return {f"{name}.py": flattened(path) for name, path in kernel_files().items()}


@functools.lru_cache(1024)
def imported(text: str) -> tuple[str, ...]:
    """Flat names of the kernel files that a flat file imports."""
    return tuple(module for _, module in RELATIVE_IMPORT.findall(text))
