"""`linearize bench model`: time a converted model beside its softmax original, in one process, on random weights.

text.py measures models of text, vision.py models of images.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint.code import SourceClasses
from ..checkpoint.source import Source, open_source
from ..convert import plan_conversion
from ..errors import LinearizeError, check_choice
from ..plan.plan import Plan
from ..terminal.output import markdown_table
from .layer import FIRST, conversion, recipe_of
from .text import SHAPES as TEXT_SHAPES
from .text import bench_text
from .timing import machine
from .vision import DROPPED, IMAGES, bench_images
from .vision import SHAPES as IMAGE_SHAPES

# What config.json of a model of that name says.
SHAPES = TEXT_SHAPES | IMAGE_SHAPES

# Columns of the tables after the name: what is measured, then the results.
FASTER = "speed of ours / of this"
TIMES = ("device ms", "device waits", FASTER)
HEADS = {
    "train": ("tokens", "batch", "checkpointing", "ms", *TIMES, "tokens/s", "peak GiB"),
    "prefill": ("context", "ms", *TIMES, "peak GiB"),
    "decode": ("context", "batch", "ms/token", *TIMES, "tokens/s", "cache MiB", "peak GiB"),
    "inference": ("size", "batch", "ms", *TIMES, "images/s", "peak GiB"),
    "training": ("size", "batch", "ms", *TIMES, "images/s", "peak GiB"),
}
WHAT = ("tokens", "context", "batch", "size", "checkpointing")


def bench_model(
    model: str | None,
    shape: str | None,
    mechanism: str | None = None,
    *,
    preset: str | None = None,
    options: dict[str, Any] | None = None,
    compiled: bool = False,
    batches: Sequence[int] | None = None,
    tell: Callable[[str], None] = lambda _: None,
    **given: Sequence[int] | None,
) -> dict[str, Any]:
    """Measure a folder or Hub id, of which only the config is read, or a shape by name, converted to `mechanism` or as
    a recipe's `preset` does; `options` override the preset's. Without both it is the preset FIRST.

    Of text `given` may have lengths to `train` at and `contexts`, of images `sizes`; `compiled` also trains and decodes
    by compiled steps, or computes images by a compiled model. `tell` gets each row as a line of text when it is
    measured. Returns plain data: `machine`, `model`, and the tables of `bench_text` or of `bench_images`. Raises
    LinearizeError: 2 unless either a model or a known shape is given, for a mechanism beside a preset, an unknown
    preset, and an option of the other kind of model; 3 where no step can be compiled, and whatever planning raises.
    """
    asked = resolve_request(mechanism, preset, options or {})
    planned = plan_for(model, shape, asked.mechanism, asked.options, asked.layers)
    images = planned[2].head.main_input_name == IMAGES
    lengths = {name: value for name, value in given.items() if value is not None}
    foreign = [f"--{name}" for name in lengths if images != (name == "sizes")]
    if foreign:
        kind = "images: choose --sizes and --batches" if images else "text: choose --train, --contexts, --batches"
        raise LinearizeError(f"{shape or model}: {', '.join(foreign)} means nothing to a model of {kind}")
    if batches:
        lengths["batches"] = batches
    plan, machine_here = planned[0], machine()
    tell("; ".join(f"{key} {value}" for key, value in machine_here.items()))
    tell(f"building {shape or model}, {plan.architecture}, with random weights in {plan.dtype}")

    def row(table: str, record: dict[str, Any]) -> None:
        tell(line(table, record))

    if images:
        again = partial(plan_for, model, shape, asked.mechanism, asked.options, asked.layers)
        built, tables = bench_images(planned, again, asked.name, compiled=compiled, tell=row, **lengths)
    else:
        built, tables = bench_text(planned, asked.name, compiled=compiled, tell=row, **lengths)
    about = {
        "name": shape or model,
        "architecture": plan.architecture,
        "dtype": plan.dtype,
        "parameters": sum(p.numel() for p in built.parameters()),
        "preset": asked.preset,
        "mechanism": asked.mechanism,
        "options": plan.linear[0].options,
        "layers": len(plan.linear),
    }
    return {"machine": machine_here, "model": about, **tables}


class Asked(NamedTuple):
    """What softmax is replaced by: the preset, if it is one, mechanism and options, and in which layers."""

    preset: str | None
    mechanism: str
    options: dict[str, Any]
    layers: dict[str, Any]

    @property
    def name(self) -> str:
        """Of rows in tables."""
        return self.preset or self.mechanism


def resolve_request(mechanism: str | None, preset: str | None, options: dict[str, Any]) -> Asked:
    """What --to, --preset and --set ask for. Raises LinearizeError (exit 2) for a mechanism beside a preset, and for an
    unknown preset."""
    if mechanism is not None and preset is not None:
        raise LinearizeError(
            f"--to {mechanism}: --preset {preset} says what replaces softmax. Give one of them; --set changes options"
        )
    if mechanism is not None:
        return Asked(None, mechanism, options, {})
    name = preset or FIRST
    convert = conversion(recipe_of(name))
    names = ("layers", "keep_softmax", "keep_heads", "kept_window", "allow_drop")
    layers = {field: getattr(convert, field) for field in names}
    return Asked(name, convert.mechanism, convert.options | options, layers)


def plan_for(
    model: str | None,
    shape: str | None,
    mechanism: str,
    options: dict[str, Any],
    layers: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Plan, Source, SourceClasses]:
    """The conversion of a model, or of a shape by name; `layers` are fields of a `Request` that say which layers, and
    `changes` replace entries of the config. With keep_softmax `auto` other layers stay than a conversion would choose,
    and as many.

    Raises LinearizeError: 2 unless either a model or a known shape is given, and whatever planning raises.
    """
    if (model is None) == (shape is None):
        raise LinearizeError(f"give either a model or --shape: {', '.join(SHAPES)}")
    if shape is not None:
        check_choice("--shape", shape, list(SHAPES))
    arguments: dict[str, Any] = {"options": options, "weights": False, **(layers or {})}
    if model is not None and not changes:
        return plan_conversion(model, mechanism, **arguments)
    config = SHAPES[shape] if shape else open_source(str(model), None, weights=False).config
    if shape:
        arguments["allow_drop"] = (*arguments.get("allow_drop", ()), *DROPPED.get(config["model_type"], ()))
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")
        return plan_conversion(scratch, mechanism, **arguments)


# ---------------------------------------------------------------- the report


def markdown(result: dict[str, Any]) -> str:
    """The result as the tables of docs/measurements/models.md."""
    about = result["model"]
    lines = ["; ".join(f"{key} {value}" for key, value in result["machine"].items()), ""]
    options = " ".join(f"{key}={value}" for key, value in about["options"].items())
    to = about["mechanism"] + f" as in the preset {about['preset']}" * bool(about["preset"]) + f" ({options})"
    lines += [
        f"{about['name']}: {about['architecture']}, {about['parameters'] / 1e6:,.1f} M random parameters in "
        f"{about['dtype']}; {about['layers']} layers to {to}."
    ]
    for table, columns in HEADS.items():
        if table not in result:
            continue
        lines += [
            "",
            *markdown_table((table, *columns), [(one["name"], *_cells(one, columns)) for one in result[table]]),
        ]
    return "\n".join(lines)


def _cells(record: dict[str, Any], columns: tuple[str, ...]) -> list[str]:
    """A row without its name; of what could not run the reason, once, behind what was to be measured."""
    if "failed" not in record:
        return [_cell(record, column) for column in columns]
    return [*(_cell(record, column) for column in columns if column in WHAT), record["failed"]]


def line(table: str, record: dict[str, Any]) -> str:
    """One row of a table as a line of text, for a person who waits."""
    cells = {column: _cell(record, column) for column in HEADS[table] if column in WHAT or "failed" not in record}
    parts = [f"{column} {cell}" for column, cell in cells.items() if cell]
    return f"{table}, {record['name']}: {', '.join([*parts, *([record['failed']] if 'failed' in record else [])])}"


def _cell(record: dict[str, Any], column: str) -> str:
    if column in WHAT:
        value = record.get(column, "")
        return ("on" if value else "off") if isinstance(value, bool) else f"{value:,}" if value != "" else ""
    units = {"ms/token": "ms", "peak GiB": "peak_mib", FASTER: "faster"}
    value = record.get(units.get(column, column.replace("/", "_").replace(" ", "_").lower()))
    if value is None:
        return ""
    if column == "device waits":
        return f"{value:.0%}"
    return f"{value / 1024:.2f}" if column == "peak GiB" else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
