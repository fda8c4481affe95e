"""From how many tokens a linear encoder is faster than SDPA, as measured, and what `convert` and `estimate` say of it.

A bidirectional encoder has no cache to save, so it is converted for speed on long inputs, and short ones become slower.
`python -m benchmarks.encoder_lengths` measures the ratios, of a block of DeiT-S: on a CPU of one row, on a GPU of
131,072 tokens at once, both sides compiled and in CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..checkpoint.source import read_json
from ..plan.mechanisms import parse_mechanism, to_settings
from ..plan.plan import Plan
from ..terminal.output import layers_named

# Where, and with which mechanism and options: tokens, and SDPA's time over the mechanism's.
PAYS: dict[str, dict[str, tuple[tuple[int, float], ...]]] = {
    "a CPU": {
        "la:feature_map=hedgehog": ((196, 0.87), (529, 1.05), (1024, 1.23), (2025, 1.61), (4096, 2.39), (16384, 7.12)),
        "la": ((196, 0.97), (529, 1.18), (1024, 1.38), (2025, 1.83), (4096, 2.80), (16384, 8.15)),
        "mhla": ((196, 0.61), (529, 0.96), (1024, 1.13), (2025, 1.48), (4096, 2.14), (16384, 6.12)),
        "saga": ((196, 0.68), (529, 0.82), (1024, 0.96), (2025, 1.28), (4096, 1.89), (16384, 5.48)),
        "la:feature_map=hedgehog,window=32,sink=1": (
            (196, 0.71),
            (529, 0.86),
            (1024, 1.02),
            (2025, 1.34),
            (4096, 2.04),
            (16384, 5.90),
        ),
        "mhla:window=32,sink=1": ((196, 0.41), (529, 0.75), (1024, 0.94), (2025, 1.23), (4096, 1.92), (16384, 5.34)),
        "saga:window=32,sink=1": ((196, 0.57), (529, 0.70), (1024, 0.82), (2025, 1.08), (4096, 1.66), (16384, 4.40)),
    },
    "an H200": {
        "la:feature_map=hedgehog": ((196, 0.83), (1024, 1.08), (4096, 1.82), (16384, 4.96)),
        "mhla": ((196, 0.37), (1024, 0.89), (4096, 1.73), (16384, 4.69)),
        "saga": ((196, 0.63), (1024, 0.78), (4096, 1.29), (16384, 3.62)),
    },
}


def break_even_tokens(points: tuple[tuple[int, float], ...]) -> int:
    """Tokens from which a mechanism is faster, in hundreds: between two measurements on a line through their
    logarithms."""
    logarithms = [(math.log(tokens), math.log(ratio)) for tokens, ratio in points]
    for (x0, y0), (x1, y1) in pairwise(logarithms):
        if y0 < 0.0 <= y1:
            return 100 * round(math.exp(x0 - y0 * (x1 - x0) / (y1 - y0)) / 100)
    raise ValueError(f"these do not break even: {points}")


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurement that is nearest to a plan on one device: `name` as in PAYS, and which of the plan's options were
    `other` ones there; the window, which costs time, may have been a smaller one or none (`narrower`)."""

    where: str
    name: str
    points: tuple[tuple[int, float], ...]
    other: dict[str, Any]
    narrower: bool

    def __str__(self) -> str:
        settings = ", ".join(to_settings(self.other))
        return self.name.replace(":", " with ") + (f" (this plan's {settings} was not measured)" if settings else "")


def measured_rows(plan: Plan) -> list[Row]:
    """For each device the measurement of a bidirectional plan's mechanism that has most of its options; none of a
    mechanism that was not measured, nor of causal attention."""
    step, found = plan.linear[0], list[Row]()
    for where, rows in PAYS.items():
        near: list[Row] = []
        for name, points in () if step.site.causal else rows.items():
            if name.partition(":")[0] == step.mechanism:
                _, then = parse_mechanism(name)
                other = {key: value for key, value in step.options.items() if then[key] != value}
                near.append(Row(where, name, points, other, then["window"] < step.options["window"]))
        found += sorted(near, key=lambda row: len(row.other))[:1]
    return found


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


def speeds(plan: Plan) -> list[str]:
    """How fast a bidirectional plan's mechanism was beside SDPA, a line for each device; none for other plans."""
    return [
        f"{row} compared with softmax on {row.where}, a block of DeiT-S: "
        + ", ".join(f"{ratio:g}x as fast with {tokens:,} tokens" for tokens, ratio in row.points)
        for row in measured_rows(plan)
    ]


def slower(plan: Plan, config: Any, folder: Path) -> str:
    """A note on a bidirectional plan whose tokens softmax reads faster, on a CPU or on a GPU; empty for others."""
    rows, (most, of_what) = measured_rows(plan), tokens_read(plan, config, folder) or (math.inf, "")
    reduced = [step.site for step in plan.linear if step.site.reduction]
    least = {row.where: break_even_tokens(row.points) for row in rows}
    short = [row.where for row in rows if most < least[row.where] + row.narrower]
    if not rows or not (reduced or short):
        return ""
    unit, faster = "keys" if reduced else "tokens", list[str]()
    for name in dict.fromkeys(map(str, rows)):
        alike = [row for row in rows if str(row) == name]
        figures = " and ".join(f"{least[row.where]:,} {unit} on {row.where}" for row in alike)
        faster.append(f"{name} is faster from {'more than' if alike[0].narrower else 'about'} {figures}")
    if reduced:  # softmax's time for a query is that of the keys, a linear mechanism's hardly depends on them
        layers = layers_named(site.layer for site in reduced)
        why = f"this model's softmax reads fewer keys than tokens ({layers}: {reduced[0].reduction[0]}), which is fast"
    else:
        why = f"this model reads {most:,} {of_what}, and softmax reads them faster on {' and '.join(short)}"
    return f"note: {why}: {'; '.join(faster)}. Convert it to read more {unit} than these, or keep softmax"
