"""The picture of docs/serve.md: tokens/s in vLLM, and the cache of a request, over the tokens of its text.

python -m benchmarks.serving_plot docs/measurements/serving.json docs/serving.png

`written` are figures of `linearize bench serve`, `bytes` those that `linearize convert --dry-run` says of two lengths.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from linearize.page.charts import Axis, Series, binary, bytes_text, lines, number
from linearize.page.drawing import SERIES, stacked

COLOURS = ("ink", *SERIES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    found = json.loads(given.figures.read_text("utf-8"))
    context = found["context"]
    x = Axis("tokens of each prompt", log=True, text=binary, ticks=(512, 2048, 8192, 16384, 65536))
    written, held = [], []
    for (name, speeds), colour in zip(found["written"].items(), COLOURS, strict=False):
        written.append(Series(name, list(zip(context, speeds, strict=True)), colour, dots=True))
        (few, least), (many, most) = sorted((int(tokens), size) for tokens, size in found["bytes"][name].items())
        each = (most - least) / (many - few)
        places = [context[0] * 2**i for i in range(8)]
        held.append(Series(name, [(tokens, least + (tokens - few) * each) for tokens in places], colour))
    top = lines(
        f"{found['model']}, one H200", written, x, Axis("tokens/s written", True, number, (2000, 5000, 10000, 20000))
    )
    sizes = tuple(2.0**i for i in (24, 26, 28, 30))
    below = lines("What a request holds, bfloat16", held, x, Axis("cache and states", True, bytes_text, sizes))
    given.picture.write_bytes(stacked((top, below)).png())


if __name__ == "__main__":
    main()
