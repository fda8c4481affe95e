"""Which code linearize wrote: the hash of every kernel file that ever travelled in a checkpoint, by version.

The hashes lie in known_code.txt, a line for each file: version, name in the checkpoint, sha256. A converted folder is
trusted when its files have the names and hashes of one version; what the folder says of itself is not asked.

    python -m linearize.checkpoint.known_code

adds the lines of the present version that are missing, from the kernels folder. Run it after each change of a kernel
file or of a template. Lines stay: whatever wrote a folder once, released or not, such folders exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from .. import __version__
from ..errors import LinearizeError
from .flatten import travelling_files
from .templates import DEVELOPED, TEMPLATES, number

PATH = Path(__file__).with_name("known_code.txt")
COMMAND = "python -m linearize.checkpoint.known_code"
# Versions that users have -> sha256 of their lines.
RELEASED = {
    "0.1.0": "2b1411f1e898c5542f258ac91db5f62cbbcfc3d442a141f1076d6584d2c224d8",
    "0.2.0": "7d6a724787c436145cc0023c09a49c10ddd78ff76dbc93589de660dca6d1e9cf",
}

Row = tuple[str, str, str]  # version, name, sha256


def sha256_of(text: str) -> str:
    """The hash of a file with this text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_rows() -> set[Row]:
    """Every line of known_code.txt."""
    return {(version, name, value) for version, name, value in map(str.split, PATH.read_text("utf-8").splitlines())}


def present_rows() -> set[Row]:
    """The lines that the present version must have: its kernel files, and its templates if it has its own."""
    rows = {(__version__, name, sha256_of(text)) for name, text in travelling_files().items()}
    if __version__ in TEMPLATES:
        templates = TEMPLATES[__version__]._asdict()
        rows |= {(__version__, f"template:{name}", sha256_of(text)) for name, text in templates.items() if text}
    return rows


def known_files() -> dict[str, dict[str, set[str]]]:
    """Version -> name -> each sha256 that kernel files of this name had there, newest version first.

    Of the present version it is the files themselves: while they are changed, the lines may be behind. What it wrote
    before they were so has DEVELOPED behind its number.
    """
    present = {name: {sha256_of(text)} for name, text in travelling_files().items()}
    found = {__version__: present, __version__ + DEVELOPED: {name: {*values} for name, values in present.items()}}
    for version, name, value in read_rows():
        label = version + DEVELOPED if version == __version__ else version
        found.setdefault(label, {}).setdefault(name, set()).add(value)
    return dict(sorted(found.items(), key=lambda item: number(item[0]), reverse=True))


def as_text(rows: Iterable[Row]) -> str:
    """Lines as the file has them, sorted by version and name."""
    return "".join(f"{' '.join(row)}\n" for row in sorted(rows, key=lambda row: (number(row[0]), *row)))


def update() -> int:
    """Add the lines of the present version; returns how many are new.

    Raises LinearizeError (exit 2) where the version is released and its files changed since.
    """
    rows, present = read_rows(), present_rows()
    if __version__ in RELEASED:
        raise LinearizeError(f"linearize {__version__} is released, and its lines stay. Set a newer __version__ first")
    PATH.write_text(as_text(rows | present), "utf-8")
    return len(present - rows)


if __name__ == "__main__":
    print(f"{PATH.name}: {update()} new lines of version {__version__}")
