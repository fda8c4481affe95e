"""The study's text: Python sources of installed packages and of the standard library, split by package.

The teacher, its students and the evaluation each have packages of their own: what a teacher knows by heart is a poor
place to learn from it. `python -m benchmarks.study_text FOLDER` writes the tokenizer, the teacher's tokens, and the
other documents as JSON lines. `pip install --no-deps --target MORE -r benchmarks/study_packages.txt` and `--also MORE`
add packages that are read and never imported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from benchmarks.demo_tokenizer import EOS, train_tokenizer
from linearize.demo.corpus import Document

Split = Literal["heldout", "distil", "teacher"]
SPLITS: tuple[Split, ...] = ("heldout", "distil", "teacher")

HELD_OUT = ("networkx", "xarray", "skimage", "flax", "rich", "aiohttp", "seaborn", "email", "asyncio", "unittest")
DISTIL = ("transformers", "scipy", "sklearn", "statsmodels", "jax", "torch_geometric", "numba", "timm", "xml", "http")
DISTIL += ("astropy", "sqlalchemy", "django", "mne", "twisted")
# Copies of other packages, which would leak across the split; data in the shape of code.
SKIPPED_FOLDERS = frozenset(
    {"_vendor", "vendor", "vendored", "_vendored", "extern", "externals", "third_party", "pytorch_lightning"}
    | {"site-packages", "dist-packages", "__pycache__", "ensurepip", "pydoc_data", "lib2to3", "idlelib", "nvidia"}
)
CHARACTERS = range(400, 100_000)
TOKENIZER_CHARACTERS = 40_000_000
VOCABULARY = 8192
LENGTH = 2048  # of a document that the tokenizer takes without a warning, and of the teacher's positions


def roots() -> tuple[Path, Path]:
    """Installed packages, and the standard library."""
    paths = sysconfig.get_paths()
    return Path(paths["purelib"]), Path(paths["stdlib"])


def split_of(package: str) -> Split:
    """Who reads a package."""
    return "heldout" if package in HELD_OUT else "distil" if package in DISTIL else "teacher"


def paths(also: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Every source file with its name, `package/...`; files beside packages have the package of their own stem."""
    for root in (*roots(), *also):
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            if SKIPPED_FOLDERS.isdisjoint(parts):
                yield "/".join(parts), path


def package_of(name: str) -> str:
    """A test of the standard library, `test/test_email/...`, goes with what it tests."""
    first, _, rest = name.partition("/")
    if first == "test" and rest:
        first = rest.partition("/")[0].removeprefix("test_")
    return first.removesuffix(".py")


def read(entry: tuple[str, Path]) -> Document | None:
    """A document, unless it is too short or long, is not UTF-8, or holds tables."""
    name, path = entry
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    if len(text) not in CHARACTERS:
        return None
    size, digits, lines = len(text), sum(map(text.count, "0123456789")), text.count("\n") + 1
    table = digits > 0.12 * size or size > 120 * lines or len(text.encode()) > 1.1 * size
    return None if table else Document(name, text)


def documents(
    splits: tuple[Split, ...] = SPLITS, limit: int | None = None, also: tuple[Path, ...] = ()
) -> dict[Split, list[Document]]:
    """The documents of each split in an order by hash, every text once: in the first split that has it.

    `limit` takes so many files of each split at most; `also` are further folders of packages.
    """
    chosen: dict[Split, list[tuple[str, Path]]] = {split: [] for split in splits}
    for name, path in paths(also):
        split = split_of(package_of(name))
        if split in chosen:
            chosen[split].append((name, path))
    seen: set[str] = set()
    found: dict[Split, list[Document]] = {}
    with ThreadPoolExecutor(32) as pool:
        for split, entries in chosen.items():
            entries.sort(key=lambda entry: (zlib.crc32(entry[0].encode()), entry[0]))
            read_now = [document for document in pool.map(read, entries[:limit]) if document is not None]
            found[split] = [document for document in read_now if document.text not in seen]
            seen.update(document.text for document in read_now)
    return found


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """bos, text, eos, document after document: uint16."""
    parts = []
    for start in range(0, len(texts), 2048):
        rows = tokenizer.backend_tokenizer.encode_batch_fast([text + EOS for text in texts[start : start + 2048]])
        parts.extend(np.array(row.ids, np.uint16) for row in rows)
    return np.concatenate(parts)


def prepare(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast | None = None,
    limit: int | None = None,
    also: tuple[Path, ...] = (),
) -> None:
    """Write distil.jsonl, heldout.jsonl and, unless a tokenizer is given, it and its tokens; at last text.json."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = documents(SPLITS if tokenizer is None else SPLITS[:2], limit, also)
    facts: dict[str, object] = {}
    for split, found in splits.items():
        digest = hashlib.sha256("".join(document.text for document in found).encode()).hexdigest()[:16]
        packages = sorted({package_of(document.name) for document in found})
        characters = sum(len(document.text) for document in found)
        facts[split] = {"documents": len(found), "characters": characters, "sha256": digest, "packages": packages}
        if split != "teacher":
            lines = (json.dumps({"name": document.name, "text": document.text}) + "\n" for document in found)
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    if tokenizer is None:
        texts = [document.text for document in splits["teacher"]]
        average = max(1, sum(map(len, texts)) // len(texts))
        tokenizer = train_tokenizer(texts[: TOKENIZER_CHARACTERS // average], VOCABULARY, LENGTH)
        tokenizer.save_pretrained(folder / "tokenizer")
        np.save(folder / "teacher.npy", encode(tokenizer, texts))
        np.save(folder / "heldout.npy", encode(tokenizer, [document.text for document in splits["heldout"]]))
    (folder / "text.tmp").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "text.tmp").rename(folder / "text.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a folder; without it one is trained")
    parser.add_argument("--also", type=Path, action="append", default=[], help="a folder of further packages")
    parser.add_argument("--limit", type=int, help="files of each split at most, to try things out")
    arguments = parser.parse_args()
    given = arguments.tokenizer and PreTrainedTokenizerFast.from_pretrained(arguments.tokenizer)
    prepare(arguments.folder, given, arguments.limit, tuple(arguments.also))


if __name__ == "__main__":
    main()
