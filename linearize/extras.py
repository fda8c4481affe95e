"""What a package and its extras require, and the commands that add an extra of linearize, as it is installed here."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import Requirement


def required(distribution: importlib.metadata.Distribution, extra: str = "") -> Iterator[Requirement]:
    """The requirements of a package itself, or only those that an extra adds."""
    for requirement in map(Requirement, distribution.requires or ()):
        marker = requirement.marker
        applies = marker is None or marker.evaluate({"extra": extra})
        if applies and bool(extra) == (marker is not None and not marker.evaluate({"extra": ""})):
            yield requirement


def checkout(distribution: importlib.metadata.Distribution) -> str | None:
    """The folder that `pip install -e` was given; None where the package itself was installed."""
    about = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not about.get("dir_info", {}).get("editable"):
        return None
    return url2pathname(urlsplit(about["url"]).path)


def with_extra(extra: str, checkout: str | None) -> str:
    """The command that adds an extra."""
    if checkout is None:
        return f'pip install "linearize[{extra}]"'
    place = "." if Path(checkout).resolve() == Path.cwd() else checkout
    return f'pip install -e "{place}[{extra}]"'
