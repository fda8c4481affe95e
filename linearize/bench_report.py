"""What `linearize bench kernels` measured, as tables and as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import Exit, LinearizeError


def markdown(result: dict[str, Any]) -> str:
    """The result as the tables of docs/performance.md."""
    lines = ["; ".join(f"{key} {value}" for key, value in result["machine"].items()), ""]
    ceilings = result["ceilings"]
    lines += [
        f"Ceilings measured in the same run: copy {ceilings['copy_tb_s']:.2f} TB/s, "
        f"bf16 product {ceilings['bf16_tflop_s']:.3g} TFLOP/s."
    ]
    for name, measured in result["mechanisms"].items():
        lines += ["", f"### {name}", *_first_call(measured["cold_start"]), *_runs(measured["runs"])]
        lines += [*_errors(measured["errors"]), *_steps(measured["steps"])]
    return "\n".join(lines)


def _first_call(record: dict[str, Any] | None) -> Iterator[str]:
    if record is not None:
        told = record.get("failed") or f"{record['seconds']:.1f} s"
        yield from ("", f"First forward + backward, empty cache: {told}.")


def _table(*columns: str) -> Iterator[str]:
    yield from ("", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")


def _runs(records: list[dict[str, Any]]) -> Iterator[str]:
    yield from _table("shape", "kernel", "forward ms", "forward + backward ms", "peak MiB f, f+b", "TFLOP/s", "TB/s")
    for run in records:
        cells = [run["shape"], run["name"]]
        cells += [_time(run["forward"])] if "forward" in run else []
        cells += [_time(run["both"])] if "both" in run else []
        if "failed" in run:
            cells += [run["failed"]]
        else:
            peaks = ("" if run[key] is None else f"{run[key]:.0f}" for key in ("forward_mib", "both_mib"))
            # A kernel that torch does not know has no operations to count.
            rate = f"{run['tflop_s']:.3g} ({run['tflop_share']:.0%})" if run["tflop_s"] else ""
            cells += [", ".join(filter(None, peaks)), rate, f"{run['tb_s']:.3g} ({run['tb_share']:.0%})"]
        yield _row(cells, 7)


def _time(record: dict[str, float]) -> str:
    return f"{record['ms']:.3f} ({record['low']:.3f}-{record['high']:.3f})"


def _row(cells: list[str], columns: int) -> str:
    return f"| {' | '.join(cells + [''] * (columns - len(cells)))} |"


def _errors(records: list[dict[str, Any]]) -> Iterator[str]:
    names = list(dict.fromkeys(name for record in records for name in record.get("errors", ())))
    yield from _table("relative error against float64", "path", *names)
    for record in records:
        values = [f"{value:.1e}" for value in record["errors"].values()] if "errors" in record else [record["failed"]]
        yield _row([record["shape"], record["name"], *values], 2 + len(names))


def _steps(records: list[dict[str, Any]]) -> Iterator[str]:
    if not records:
        return
    yield from _table("decode step", "path", "µs", "copy of the same bytes µs", "TB/s", "share of copy")
    for step in records:
        cells = [step["shape"], step["name"]]
        if "failed" in step:
            cells += [step["failed"]]
        else:
            cells += [f"{step['us']:.1f}", f"{step['copy_us']:.1f}", f"{step['tb_s']:.3g}"]
            cells += [f"{step['share_of_copy']:.0%}"]
        yield _row(cells, 6)


def plot(result: dict[str, Any], path: Path) -> None:
    """Forward + backward time per shape and kernel, one panel a mechanism, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = result["mechanisms"]
    figure, grid = pyplot.subplots(len(measured), figsize=(9, 4 * len(measured)), layout="constrained", squeeze=False)
    figure.suptitle(result["machine"]["device"])
    for (name, records), axes in zip(measured.items(), grid[:, 0], strict=True):
        _panel(axes, name, [run for run in records["runs"] if "both" in run])
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axes: Any, mechanism: str, runs: list[dict[str, Any]]) -> None:
    shapes, names = (list(dict.fromkeys(run[key] for run in runs)) for key in ("shape", "name"))
    for i, name in enumerate(names):
        own = [run for run in runs if run["name"] == name]
        places = [shapes.index(run["shape"]) + (i - len(names) / 2 + 0.5) * 0.8 / len(names) for run in own]
        bars = axes.bar(places, [run["both"]["ms"] for run in own], 0.8 / len(names), label=name)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set(yscale="log", ylabel="forward + backward, ms", title=mechanism)
    axes.set_xticks(range(len(shapes)), shapes, fontsize=7)
    axes.legend(fontsize=7)


def check_plot() -> None:
    """Raise LinearizeError (exit 4) where no picture can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise LinearizeError("--plot needs matplotlib: pip install matplotlib", Exit.RESOURCE)
