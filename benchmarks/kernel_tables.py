"""Tables of `linearize bench kernels --save RESULT`, put into a page.

python -m benchmarks.kernel_tables RESULT PAGE

The page has a pair of comments for each, `<!-- kernels la -->` and `<!-- end -->`; what is between them is replaced.
`all` stands for the machine and the comparison with flash-linear-attention. Mechanisms that the result has not, stay.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from linearize.bench.report import overview, tables

PLACE = re.compile(r"(<!-- (\w+ \w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, result: dict[str, Any]) -> str:
    """The page with the result's tables."""
    found = {"all": overview(result)} | {name: tables(one) for name, one in result["mechanisms"].items()}
    text = {f"kernels {name}": "\n".join(lines).strip("\n") for name, lines in found.items()}

    def put(place: re.Match[str]) -> str:
        return f"{place[1]}\n{text[place[2]]}\n\n{place[3]}" if place[2] in text else place[0]

    return PLACE.sub(put, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("page", type=Path)
    arguments = parser.parse_args()
    page = arguments.page.read_text("utf-8")
    arguments.page.write_text(fill(page, json.loads(arguments.result.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
