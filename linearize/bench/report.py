"""Tables of what `linearize bench kernels` measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..terminal.output import markdown_table

# Of a run: forward alone; forward and backward.
PARTS = ("forward", "both")
TITLES = ("forward", "forward + backward")


def markdown(result: dict[str, Any]) -> str:
    """The result as the tables of docs/measurements/kernels.md."""
    lines = [*overview(result)]
    for name, measured in result["mechanisms"].items():
        lines += ["", f"### {name}", *tables(measured)]
    return "\n".join(lines)


def tables(measured: dict[str, Any]) -> Iterator[str]:
    """Of one mechanism or preset: its options, the first call, times, errors, decode steps."""
    if "options" in measured:
        yield from ("", f"One layer with its gates, window and norm: {measured['options']}.")
    if measured["cold_start"] is not None:
        yield from ("", f"{first_line(measured['cold_start'])}.")
    yield from _runs(measured["runs"])
    yield from _errors(measured["errors"])
    yield from _steps(measured["steps"])


def overview(result: dict[str, Any]) -> Iterator[str]:
    """The machine, and ours beside flash-linear-attention."""
    ceilings = result["ceilings"]
    products = ", ".join(f"{name} {ceilings[f'{name}_tflop_s']:.3g}" for name in ("bf16", "tf32", "fp32"))
    yield "; ".join(f"{key} {value}" for key, value in result["machine"].items())
    yield ""
    yield f"Ceilings measured in the same run: copy {ceilings['copy_tb_s']:.2f} TB/s, TFLOP/s of a product {products}."
    yield from _beside_fla(result["mechanisms"])


def first_line(record: dict[str, Any]) -> str:
    """What the first call took."""
    took = record["failed"] if "failed" in record else f"{record['seconds']:.1f} s"
    return f"First forward + backward, empty cache: {took}"


def line(record: dict[str, Any], before: list[dict[str, Any]]) -> str:
    """One row as a line of text, for a person who waits; `before` has the rows of its table so far, itself included."""
    parts = [f"{title} {_with_host(record[part])}" for part, title in zip(PARTS, TITLES, strict=True) if part in record]
    if "us" in record:
        parts += [f"decode step {record['us']:.1f} µs, {record['share_of_copy']:.0%} of the speed of a copy"]
    parts += [f"error of {name} {value:.1e}" for name, value in record.get("errors", {}).items()]
    parts += [record["failed"]] if "failed" in record else []
    if PARTS[0] in record and (ours := _ours(before, record)) is not record:
        parts += [f"{', '.join(filter(None, _ratios(ours, record)))} times the time of {ours['name']}"]
    return f"{record['shape']}, {record['name']}: {'; '.join(parts)}"


def _with_host(record: dict[str, float]) -> str:
    """A time, on a GPU that of the device and what the CPU takes to ask for it."""
    return f"{record['ms']:.3f} ms" + (f" (CPU {record['host']:.3f})" if "host" in record else "")


def _beside_fla(mechanisms: dict[str, Any]) -> Iterator[str]:
    rows = []
    for mechanism, measured in mechanisms.items():
        for run in measured["runs"]:
            if run["name"].startswith("fla"):
                ours = _ours(measured["runs"], run)
                peaks = ours.get("both_mib"), run.get("both_mib")
                share = f"{peaks[0] / peaks[1]:.0%}" if all(peaks) else ""
                rows.append([mechanism, run["shape"], run["name"], *_ratios(ours, run), share])
    if rows:
        columns = ("mechanism", "shape", "compared with", "times faster forward", "forward + backward", "of its memory")
        yield from ("", *markdown_table(columns, rows))


def _ours(records: list[dict[str, Any]], other: dict[str, Any]) -> dict[str, Any]:
    """The first contender at the shape of another."""
    return next(record for record in records if record["shape"] == other["shape"])


def _ratios(ours: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """How many times as long the other takes, forward and both; empty where one was not measured."""
    measured = [part in ours and part in other for part in PARTS]
    return [f"{other[p]['ms'] / ours[p]['ms']:.2f}" if has else "" for p, has in zip(PARTS, measured, strict=True)]


def _runs(records: list[dict[str, Any]]) -> Iterator[str]:
    columns = ("forward ms", "forward + backward ms", "peak MiB", "TFLOP/s", "TB/s", "times the roofline", "CPU ms")
    rows = []
    for run in records:
        times = [run[part] for part in PARTS if part in run]
        cells = [run["shape"], run["name"], *(f"{t['ms']:.3f} ({t['low']:.3f}-{t['high']:.3f})" for t in times)]
        cells += [run["failed"]] if "failed" in run else _rates(run)
        ours = _ours(records, run)
        beside = [] if run is ours else filter(None, _ratios(ours, run))
        rows.append([*cells, *[""] * (9 - len(cells)), ", ".join(beside)])
    yield from ("", *markdown_table(("shape", "kernel", *columns, "times linearize's time"), rows))
    for run in records:
        if run["name"].endswith(" alone") and "both" in run:
            ours = _ours(records, run)
            costs = (f"{ours[part]['ms'] / run[part]['ms'] - 1:+.1%}" for part in PARTS if part in ours)
            yield from ("", f"{run['shape']}, its time compared with {run['name']}: {', '.join(costs)}.")


def _rates(run: dict[str, Any]) -> list[str]:
    peaks = ("" if run[key] is None else f"{run[key]:.0f}" for key in ("forward_mib", "both_mib"))
    # A kernel that torch does not know has no operations to count.
    rate = f"{run['tflop_s']:.3g} ({run['tflop_share']:.0%})" if run["tflop_s"] else ""
    cells = [", ".join(filter(None, peaks)), rate, f"{run['tb_s']:.3g} ({run['tb_share']:.0%})"]
    least = run.get("roofline_ms")
    cells += [", ".join(f"{run[part]['ms'] / least[part]:.1f}" for part in PARTS) if least else ""]
    return [*cells, ", ".join(f"{run[part]['host']:.2f}" for part in PARTS if "host" in run[part])]


def _errors(records: list[dict[str, Any]]) -> Iterator[str]:
    if not records:
        return
    names = list(dict.fromkeys(name for record in records for name in record.get("errors", ())))
    rows = []
    for record in records:
        errors = {name: f"{value:.1e}" for name, value in record.get("errors", {}).items()}
        values = [record["failed"]] if "failed" in record else [errors.get(name, "") for name in names]
        rows.append([record["shape"], record["name"], *values])
    yield from ("", *markdown_table(("relative error against float64", "path", *names), rows))


def _steps(records: list[dict[str, Any]]) -> Iterator[str]:
    if not records:
        return
    rows = []
    for step in records:
        cells = [step["shape"], step["name"]]
        if "failed" in step:
            cells += [step["failed"]]
        else:
            cells += [f"{step['us']:.1f}", f"{step['copy_us']:.1f}", f"{step['tb_s']:.3g}"]
            cells += [f"{step['share_of_copy']:.0%}"]
        rows.append(cells)
    columns = ("decode step", "path", "µs", "copy of the same bytes µs", "TB/s", "share of copy")
    yield from ("", *markdown_table(columns, rows))
