"""The demo corpus: standard library sources and pydoc topics, split into train and held-out text.

The split is decided by name alone, so that it is the same on every CPython, whatever that version's text.
"""

from __future__ import annotations

import functools
import importlib.util
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from linearize.errors import ResourceError

Split = Literal["train", "heldout"]

HELD_OUT = ("email", "json", "logging", "sqlite3")
HELD_OUT_TOPICS = 10  # one topic in this many is held out

# Absent from many distributions (the first row), not text of the library itself, or generated tables.
SKIPPED_FOLDERS = frozenset(
    {"idlelib", "lib2to3", "tkinter", "turtledemo", "turtle.py"}
    | {"site-packages", "dist-packages", "ensurepip", "pydoc_data", "__pycache__", "lib-dynload"}
)
SKIPPED_FILES = frozenset({"html/entities.py", "stringprep.py"})
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # the build's own paths
TEST_FOLDERS = frozenset({"test", "tests"})


# Packages that are there wherever linearize is. The teacher has never seen their sources, so what it predicts
# there is what it predicts on held-out text; its own training text it knows by heart.
PACKAGES = ("torch", "transformers", "accelerate", "peft")
PACKAGE_FILE_CHARACTERS = range(500, 60_000)


@dataclass(frozen=True)
class Document:
    """One source file (`json/decoder.py`) or pydoc topic (`topics/with`)."""

    name: str
    text: str


def documents(split: Split) -> list[Document]:
    """The running Python's documents of one split, sorted by name."""
    return [document for document in _installed() if split_of(document.name) == split]


@functools.cache  # a run reads them for each stage and each hash, which takes a second
def package_documents() -> tuple[Document, ...]:
    """Sources of the installed PACKAGES, in an order by hash, so that any beginning of it is a fair sample."""
    found: dict[str, Document] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            for document in _sources(Path(root), tests=True):
                if len(document.text) in PACKAGE_FILE_CHARACTERS:
                    found.setdefault(document.text, Document(f"{package}/{document.name}", document.text))
    return tuple(sorted(found.values(), key=lambda document: zlib.crc32(document.name.encode())))


def split_of(name: str) -> Split:
    """The split of a document by its name: a held-out package goes with its tests."""
    top, _, rest = name.partition("/")
    if top == "topics":
        return "train" if zlib.crc32(rest.encode()) % HELD_OUT_TOPICS else "heldout"
    if top == "test":
        top = rest.partition("/")[0].removeprefix("test_")
    stem = top.removesuffix(".py")
    held_out = any(stem == package or stem.startswith(f"{package}_") for package in HELD_OUT)
    return "heldout" if held_out else "train"


def is_test(name: str) -> bool:
    """Whether a document belongs to a test suite, which many distributions leave out."""
    return not TEST_FOLDERS.isdisjoint(name.split("/"))


@functools.cache
def _installed() -> tuple[Document, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {document.name: document for document in [*_sources(root), *_topics()]}
    if not any(name.endswith(".py") for name in found):
        raise ResourceError(
            f"The demo trains on the standard library's sources, and {root} holds none that can be read. "
            "Use a Python whose standard library is a folder of .py files."
        )
    unique: dict[str, Document] = {}
    for name in sorted(found):
        unique.setdefault(found[name].text, found[name])
    return tuple(unique.values())


def _sources(root: Path, tests: bool = False) -> Iterator[Document]:
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if _is_skipped(name) or (is_test(name) and not tests):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        is_table = name.startswith("encodings/") and "decoding_table" in text
        if text.strip() and not is_table:
            yield Document(name, text)


def _is_skipped(name: str) -> bool:
    in_skipped_folder = not SKIPPED_FOLDERS.isdisjoint(name.split("/"))
    return in_skipped_folder or name in SKIPPED_FILES or name.startswith(SKIPPED_PREFIXES)


def _topics() -> Iterator[Document]:
    """Each topic once: the short ones that a longer topic quotes whole would leak across the split."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for name, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        paragraphs = text.strip().split("\n\n")
        fresh = [paragraph for paragraph in paragraphs if paragraph not in seen]
        seen.update(fresh)
        if 2 * len(fresh) > len(paragraphs):
            yield Document(f"topics/{name}", "\n\n".join(fresh) + "\n")
