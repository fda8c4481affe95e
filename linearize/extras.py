"""The commands that add an extra of the package, as it is installed here."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


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
