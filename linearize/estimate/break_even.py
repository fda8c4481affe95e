"""From how many tokens a linear encoder is faster than SDPA, as measured, and what `convert` and `estimate` say of it.

A bidirectional encoder has no cache to save, so it is converted for speed on long inputs, and short ones become slower.
`python -m benchmarks.encoder_lengths` measures the ratios, of a block of DeiT-S: on a CPU of one row, on a GPU of
131,072 tokens at once, both sides compiled and in CUDA graphs.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..checkpoint.source import read_json
from ..plan.plan import Plan

# Where, and by mechanism: tokens, and SDPA's time over the mechanism's.
PAYS: dict[str, dict[str, tuple[tuple[int, float], ...]]] = {
    "a CPU": {
        "la": ((196, 0.74), (1024, 1.37), (4096, 2.05), (16384, 6.40)),
        "mhla": ((196, 0.51), (1024, 1.32), (4096, 2.34), (16384, 5.75)),
        "saga": ((196, 0.57), (1024, 1.36), (4096, 1.93), (16384, 5.46)),
    },
    "an H200": {
        "la": ((196, 0.83), (1024, 1.08), (4096, 1.82), (16384, 4.96)),
        "mhla": ((196, 0.37), (1024, 0.89), (4096, 1.73), (16384, 4.69)),
        "saga": ((196, 0.63), (1024, 0.78), (4096, 1.29), (16384, 3.62)),
    },
}
# Tokens with which all-MiniLM was slower than SDPA on a CPU, with each of the three and a window of 16 or 32 tokens.
WINDOWED = 512


def break_even_tokens(mechanism: str, where: str) -> int:
    """Tokens from which the mechanism is faster there, in hundreds: between two measurements on a line through their
    logarithms."""
    points = [(math.log(tokens), math.log(ratio)) for tokens, ratio in PAYS[where][mechanism]]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 < 0.0 <= y1:
            return 100 * round(math.exp(x0 - y0 * (x1 - x0) / (y1 - y0)) / 100)
    raise ValueError(f"{mechanism} does not break even on {where}")


def tokens_read(plan: Plan, config: Any, folder: Path) -> tuple[int, str] | None:
    """The most tokens that the plan's linear layers read at once, and of what: an image's patches, at the size that the
    image processor in `folder` makes, else the config's, with what stands before and after them; a window; or text.
    None where nothing says it."""
    site = plan.linear[0].site
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    if site.grid == "line":
        most = getattr(config, "max_position_embeddings", None)
        return (most, "tokens at most") if isinstance(most, int) else None
    for part in parts:
        side = _side(getattr(part, "window_size", None))
        if site.grid == "window" and side:
            return side[0] * side[1], "tokens in each window, however large the image is"
        image, patch = (
            _made(folder) or _side(getattr(part, "image_size", None)),
            _side(getattr(part, "patch_size", None)),
        )
        if site.grid == "patches" and image and patch:
            patches = (image[0] // patch[0]) * (image[1] // patch[1])
            return patches + site.prefix + site.suffix, f"tokens of an image of {image[0]} x {image[1]} pixels"
    return None


def _made(folder: Path) -> tuple[int, int] | None:
    """Height and width of what a folder's image processor makes of each image; None where they differ or none says."""
    path = folder / "preprocessor_config.json"
    settings = read_json(path) if path.is_file() else {}
    size = settings.get("crop_size" if settings.get("do_center_crop") else "size")
    return _side([size.get("height"), size.get("width")] if isinstance(size, dict) else size)


def _side(size: Any) -> tuple[int, int] | None:
    """A size of an image, a patch or a window as height and width; None for what is none."""
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None


def measured_mechanism(plan: Plan) -> str | None:
    """The mechanism of a bidirectional plan, where it was measured beside SDPA."""
    step = plan.linear[0]
    return None if step.site.causal or step.mechanism not in PAYS["a CPU"] else step.mechanism


def speeds(plan: Plan) -> list[str]:
    """How fast a bidirectional plan's mechanism was beside SDPA, a line for each device; none for other plans."""
    mechanism = measured_mechanism(plan)
    return [
        f"{mechanism}{_window(plan)} compared with softmax on {where}, a block of DeiT-S: "
        + ", ".join(f"{ratio:g}x as fast with {tokens:,} tokens" for tokens, ratio in found[mechanism])
        for where, found in PAYS.items()
        if mechanism is not None
    ]


def _window(plan: Plan) -> str:
    """What is said of a mechanism whose plan adds exact neighbours, which cost time and were not measured."""
    return " without its window" if plan.linear[0].options.get("window") else ""


def slower(plan: Plan, config: Any, folder: Path) -> str:
    """A note on a bidirectional plan whose tokens softmax reads faster, on a CPU or on a GPU; empty for others."""
    mechanism, read = measured_mechanism(plan), tokens_read(plan, config, folder)
    if mechanism is None or read is None:
        return ""
    # With a window of 16 or 32 tokens none of the three was faster yet at WINDOWED tokens on a CPU.
    window = _window(plan)
    least = {where: max(break_even_tokens(mechanism, where), WINDOWED if window else 0) for where in PAYS}
    short = [where for where, tokens in least.items() if read[0] < tokens + bool(window)]
    if not short:
        return ""
    figures = " and ".join(f"{tokens:,} on {where}" for where, tokens in least.items())
    faster = f"with its window {mechanism} is faster from more than" if window else f"{mechanism} is faster from about"
    return (
        f"note: this model reads {read[0]:,} {read[1]}, and softmax reads them faster on "
        f"{' and '.join(short)}: {faster} {figures}. Convert it to read more tokens than these, or keep softmax"
    )
