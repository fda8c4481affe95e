"""What `linearize bench kernels` measured, as a table and as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .errors import Exit, LinearizeError


def markdown(result: dict[str, Any]) -> str:
    """The result as the tables of docs/performance.md."""
    lines = ["; ".join(f"{key} {value}" for key, value in result["machine"].items()), ""]
    lines += [
        f"Ceilings measured in the same run: copy {result['ceilings']['copy_tb_s']:.2f} TB/s, "
        f"bf16 product {result['ceilings']['bf16_tflop_s']:.0f} TFLOP/s. "
        f"First forward + backward, empty cache: {result['cold_start_s']:.1f} s.",
        "",
        "| shape | kernel | forward ms | forward + backward ms | peak MiB f, f+b | TFLOP/s | TB/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        f, b = run["forward"], run["both"]
        # A kernel that torch does not know has no operations to count.
        rate = f"{run['tflop_s']:.0f} ({run['tflop_share']:.0%})" if run["tflop_s"] else ""
        lines.append(
            f"| {run['shape']} | {run['name']} | {f['ms']:.3f} ({f['low']:.3f}-{f['high']:.3f}) "
            f"| {b['ms']:.3f} ({b['low']:.3f}-{b['high']:.3f}) | {run['forward_mib']:.0f}, {run['both_mib']:.0f} "
            f"| {rate} | {run['tb_s']:.2f} ({run['tb_share']:.0%}) |"
        )
    lines += ["", "| inputs | gates | path | o | dq | dk | dv | dg |", "|---|---|---|---|---|---|---|---|"]
    for record in result["errors"]:
        cells = " | ".join(f"{value:.1e}" for value in record["errors"].values())
        lines.append(f"| {record['dtype']} | {record['gates']} | {record['backend']} | {cells} |")
    lines += ["", "| decode step | µs | copy of the same bytes µs | TB/s | share of copy |", "|---|---|---|---|---|"]
    for step in result["steps"]:
        lines.append(
            f"| {step['shape']} | {step['us']:.1f} | {step['copy_us']:.1f} | {step['tb_s']:.2f} "
            f"| {step['share_of_copy']:.0%} |"
        )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Forward + backward time per shape and kernel, as a PNG. Raises LinearizeError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise LinearizeError("--plot needs matplotlib: pip install matplotlib", Exit.RESOURCE)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(run["shape"] for run in result["runs"]))
    names = list(dict.fromkeys(run["name"] for run in result["runs"]))
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for i, name in enumerate(names):
        own = [run for run in result["runs"] if run["name"] == name]
        places = [shapes.index(run["shape"]) + (i - len(names) / 2 + 0.5) * 0.8 / len(names) for run in own]
        bars = axes.bar(places, [run["both"]["ms"] for run in own], 0.8 / len(names), label=name)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set(yscale="log", ylabel="forward + backward, ms", title=result["machine"]["gpu"])
    axes.set_xticks(range(len(shapes)), shapes)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
