"""`linearize bench model`: time a converted model beside its softmax original, in one process, on random weights.

text.py measures models of text, vision.py models of images.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.code import SourceClasses
from ..checkpoint.source import Source, open_source
from ..convert import plan_conversion
from ..errors import LinearizeError, did_you_mean
from ..plan.plan import Plan
from .text import SHAPES as TEXT_SHAPES
from .text import bench_text
from .timing import machine
from .vision import IMAGES, bench_images
from .vision import SHAPES as IMAGE_SHAPES

# What config.json of a model of that name says.
SHAPES = IMAGE_SHAPES | TEXT_SHAPES


def bench_model(
    model: str | None,
    shape: str | None,
    mechanism: str,
    *,
    options: dict[str, Any],
    compiled: bool = False,
    batches: Sequence[int] | None = None,
    **given: Sequence[int] | None,
) -> dict[str, Any]:
    """Measure a folder or Hub id, of which only the config is read, or a shape by name, converted to `mechanism`.

    Of text `given` may have lengths to `train` at and `contexts`, of images `sizes`; `compiled` also decodes by a
    compiled step, or computes images by a compiled model. Returns plain data: `machine`, `model`, and the tables of
    `bench_text` or of `bench_images`. Raises LinearizeError: 2 unless either a model or a known shape is given, and for
    an option of the other kind of model; 3 where no step can be compiled, and whatever planning raises.
    """
    planned = plan_for(model, shape, mechanism, options)
    images = planned[2].head.main_input_name == IMAGES
    lengths = {name: value for name, value in given.items() if value is not None}
    foreign = [f"--{name}" for name in lengths if images != (name == "sizes")]
    if foreign:
        kind = "images: choose --sizes and --batches" if images else "text: choose --train, --contexts, --batches"
        raise LinearizeError(f"{shape or model}: {', '.join(foreign)} means nothing to a model of {kind}")
    if batches:
        lengths["batches"] = batches
    if images:
        again = partial(plan_for, model, shape, mechanism, options)
        built, tables = bench_images(planned, again, mechanism, compiled=compiled, **lengths)
    else:
        built, tables = bench_text(planned, mechanism, compiled=compiled, **lengths)
    plan = planned[0]
    about = {
        "name": shape or model,
        "architecture": plan.architecture,
        "dtype": plan.dtype,
        "parameters": sum(p.numel() for p in built.parameters()),
        "mechanism": mechanism,
        "options": plan.steps[0].options,
        "layers": len(plan.steps),
    }
    return {"machine": machine(), "model": about, **tables}


def plan_for(
    model: str | None, shape: str | None, mechanism: str, options: dict[str, Any], **changes: Any
) -> tuple[Plan, Source, SourceClasses]:
    """The conversion of a model, or of a shape by name; `changes` replace entries of its config.

    Raises LinearizeError: 2 unless either a model or a known shape is given, and whatever planning raises.
    """
    if (model is None) == (shape is None):
        raise LinearizeError(f"give either a model or --shape: {', '.join(SHAPES)}")
    if shape is not None and shape not in SHAPES:
        raise LinearizeError(f"--shape {shape}: choose {', '.join(SHAPES)}.{did_you_mean(shape, SHAPES)}")
    arguments: dict[str, Any] = {"options": options, "weights": False}
    if model is not None and not changes:
        return plan_conversion(model, mechanism, **arguments)
    config = SHAPES[shape] if shape else open_source(str(model), None, weights=False).config
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")
        return plan_conversion(scratch, mechanism, **arguments)


# ---------------------------------------------------------------- the report


def markdown(result: dict[str, Any]) -> str:
    """The result as the tables of docs/measurements/models.md."""
    about = result["model"]
    lines = ["; ".join(f"{key} {value}" for key, value in result["machine"].items()), ""]
    options = " ".join(f"{key}={value}" for key, value in about["options"].items())
    lines += [
        f"{about['name']}: {about['architecture']}, {about['parameters'] / 1e6:,.1f} M random parameters in "
        f"{about['dtype']}; {about['layers']} layers to {about['mechanism']} ({options})."
    ]
    heads = {
        "train": ("tokens", "batch", "checkpointing", "tokens/s", "peak GiB"),
        "prefill": ("context", "ms", "peak GiB"),
        "decode": ("context", "batch", "ms/token", "tokens/s", "cache MiB", "peak GiB"),
        "inference": ("size", "batch", "ms", "images/s", "peak GiB"),
        "training": ("size", "batch", "ms", "images/s", "peak GiB"),
    }
    for table, columns in heads.items():
        if table not in result:
            continue
        lines += ["", f"| {table} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [
            f"| {one['name']} | {' | '.join(_cell(one, column) for column in columns)} |" for one in result[table]
        ]
    return "\n".join(lines)


def _cell(record: dict[str, Any], column: str) -> str:
    if column in ("tokens", "context", "batch", "size"):
        return f"{record[column]:,}" if column in record else ""
    if column == "checkpointing":
        return "on" if record["checkpointing"] else "off"
    if "failed" in record:
        return record["failed"]
    units = {"ms/token": "ms", "cache MiB": "cache_mib", "peak GiB": "peak_mib"}
    value = record[units.get(column, column.replace("/", "_"))]
    if value is None:
        return ""
    return f"{value / 1024:.2f}" if column == "peak GiB" else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
