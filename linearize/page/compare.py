"""Several runs side by side: what `linearize runs` lists, and the table and the page of `linearize compare`."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import LinearizeError, reason_of, resource_error
from ..plan.heads import written
from ..terminal.output import counted, nats, percent, ranges, size
from ..terminal.tables import short
from . import html
from .charts import Axis, Series, binary, bytes_text, lines
from .drawing import SERIES, Drawing
from .html import Section
from .record import RUN, RunRecord, find_runs, read_run, whole
from .report import CONTEXTS, mechanisms

# Students by name, each the runs that made it, one after the other.
Lanes = Mapping[str, Sequence[RunRecord]]
MEMORY_AT = 32768  # tokens of a table's column
COLUMNS = {
    "run": "text",
    "base": "text",
    "attention": "text",
    "kept": "text",
    "tokens": "number",
    "perplexity": "number",
    "teacher's": "number",
    "x teacher": "number",
    "KL": "number",
    "same top-1": "number",
    "needles": "number",
    "state at 32k": "number",
}


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """The runs in these folders, each under a name of its own.

    Raises LinearizeError (exit 2) for a folder that is no run, for a damaged one, and for one that is named twice.
    """
    resolved = [folder.resolve() for folder in folders]
    twice = next((folder for place, folder in enumerate(folders) if resolved[place] in resolved[:place]), None)
    if twice is not None:
        raise LinearizeError(f"{twice} is named twice. Name each run once")
    found = [read_run(folder) for folder in folders]
    for run in found:
        with whole(run.folder):
            compare_page([run])  # each alone, so that the damaged one is named
    return found


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run: the recipe's, or the folder where several have the same."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.folder) for name, run in zip(names, runs, strict=True)]


def figures(run: RunRecord) -> dict[str, Any]:
    """One run in numbers, None where something was not measured: a row of the table, and of `--json`.

    KL and the share of equal tokens are those of `linearize eval` where it ran, else KL is the last one of training.
    """
    curve, distances, found = run.curve("eval_ppl"), run.curve("eval_kl"), run.evaluation or {}
    needles = [row["student"]["accuracy"] for row in found.get("needle") or ()]
    cache = run.plan.cache_bytes(MEMORY_AT) if run.plan else {"converted": 0, "source": 0}
    return {
        "run": str(run.folder),
        "name": run.name,
        "finished": run.finished,
        "base": run.base,
        "mechanisms": sorted({step.mechanism for step in run.plan.linear}) if run.plan else [],
        "kept": run.plan.softmax_layers if run.plan else [],
        "kept_heads": written(run.plan.softmax_groups) if run.plan else "",
        "tokens": run.tokens,
        "ppl": curve[-1][1] if curve else None,
        "teacher_ppl": run.teacher_ppl,
        "ppl_ratio": run.ratio(),
        "kl": found.get("kl", distances[-1][1] if distances else None),
        "top1_agreement": found.get("top1_agreement"),
        "needles": sum(needles) / len(needles) if needles else None,
        "state_bytes": cache["converted"] or None,
        "cache_bytes": cache["source"] or None,
    }


def cells(run: RunRecord, label: str) -> tuple[str, ...]:
    """The row of a run in the columns COLUMNS."""
    row = figures(run)

    def written(key: str, form: str) -> str:
        return "" if row[key] is None else format(row[key], form)

    return (
        label if run.finished else f"{label} (not finished)",
        row["base"],
        mechanisms(run.plan) if run.plan else "",
        ", ".join(filter(None, (ranges(row["kept"]), row["kept_heads"]))),
        short(row["tokens"]),
        *(written(key, ".4g") for key in ("ppl", "teacher_ppl")),
        written("ppl_ratio", ".4f"),
        nats(row["kl"]),
        *(percent(row[key]) for key in ("top1_agreement", "needles")),
        size(row["state_bytes"]) if row["state_bytes"] else "",
    )


def notes(runs: Sequence[RunRecord]) -> list[str]:
    """What to know before reading the table."""
    found = []
    if len({figures(run)["base"] for run in runs}) > 1:
        found.append("the runs have different teachers: x teacher and KL are against each run's own")
    held = {entry.get("eval_tokens") for run in runs for entry in run.entries if entry["stage"] == "teacher"}
    texts = {str(run.values.get("data", {}).get("eval")) for run in runs}
    if len(held) > 1 or len(texts) > 1:
        found.append("the runs were evaluated on different text: compare x teacher, not perplexities")
    return found


def compare_page(runs: Sequence[RunRecord]) -> str:
    """The HTML file of `linearize compare`."""
    names = labels(runs)
    words = "".join(html.paragraph(f"Note: {note}.") for note in notes(runs))
    sections = [Section("table", "Runs", words + html.table(COLUMNS, map(cells, runs, names)))]
    sections += drawn_sections({name: [run] for name, run in zip(names, runs, strict=True)})
    best = min((run for run in runs if run.ratio() is not None), key=lambda run: run.ratio() or 0, default=None)
    about = f"{counted(len(runs), 'run')}."
    if best is not None:
        about += f" Nearest to its teacher in perplexity: {names[list(runs).index(best)]}, {best.ratio():.4f} times."
    return html.page("Runs compared", about, {}, sections, f"Written by linearize {__version__}: linearize compare.")


def _colours(count: int) -> list[tuple[str, bool]]:
    """A colour for each run, dashed where the colours begin again."""
    return [(SERIES[place % len(SERIES)], place >= len(SERIES)) for place in range(count)]


def curves(lanes: Lanes, key: str) -> Drawing | None:
    """Held-out perplexity over the teacher's (`eval_ppl`), or KL (`eval_kl`), over the tokens of each student; None
    where none was measured."""
    series = []
    for (name, runs), (colour, dashed) in zip(lanes.items(), _colours(len(lanes)), strict=True):
        points, before = list[tuple[float, float]](), 0
        for run in runs:
            over = run.teacher_ppl if key == "eval_ppl" else 1.0
            if over:
                stages = filter(run.same_blocks, run.begins())
                points += [(before + x, y / over) for stage in stages for x, y in run.curve(key, stage)]
            before += run.tokens
        if points:
            series.append(Series(name, points, colour, dashed, dots=True))
    values = [y for one in series for _, y in one.points]
    if not values:
        return None
    ratio = key == "eval_ppl"
    y = Axis("x teacher" if ratio else "nats a token", max(values) > 5 * max(min(values), 1e-9))
    title = "Held-out perplexity over the teacher's" if ratio else "Held-out KL from the teacher"
    return lines(title, series, Axis("training tokens"), y, height=300)


def memory(lanes: Lanes) -> Drawing | None:
    """Bytes of state and cache of each student over the length of its text; None where none has any."""
    series = []
    for (name, runs), (colour, dashed) in zip(lanes.items(), _colours(len(lanes)), strict=True):
        plan = runs[-1].plan
        if plan is not None and plan.cache_bytes(1)["source"]:
            series.append(
                Series(name, [(float(n), float(plan.cache_bytes(n)["converted"])) for n in CONTEXTS], colour, dashed)
            )
    if not series:
        return None
    x = Axis("context, tokens", True, binary, tuple(float(n) for n in CONTEXTS[::2]))
    return lines("State and cache while decoding", series, x, Axis("bytes", True, bytes_text), height=300)


def drawn_sections(lanes: Lanes) -> list[Section]:
    """Perplexity, KL and memory of students, a section each."""
    found = []
    for name, title, drawn in (
        ("perplexity", "Perplexity over the teacher's", curves(lanes, "eval_ppl")),
        ("kl", "KL from the teacher", curves(lanes, "eval_kl")),
        ("memory", "Memory of a sequence", memory(lanes)),
    ):
        body = html.paragraph("Not measured by these runs.") if drawn is None else f"<figure>{drawn.svg()}</figure>"
        found.append(Section(name, title, body))
    return found


# ---------------------------------------------------------------- linearize runs


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs below a folder, the newest first: `figures`, `at` (how far it is) and `changed` (when).

    Raises LinearizeError (exit 2) for a folder that is not there or holds no run.
    """
    if not folder.is_dir():
        raise LinearizeError(
            f"{folder} is no folder. Give the one that holds your runs; linearize finetune makes runs/"
        )
    folders = [folder] if (folder / RUN).exists() else find_runs(folder)
    if not folders:
        raise LinearizeError(f"{folder} holds no run of linearize finetune, which writes {RUN} into its folder")
    rows = []
    for path in folders:
        try:
            run = read_run(path)
            with whole(path):
                row = {**figures(run), "at": progress(run)}
        except (LinearizeError, OSError) as error:  # one that may not be read hides no other
            refused = error if isinstance(error, LinearizeError) else resource_error(error)
            rows.append({"run": str(path), "error": refused.message if refused else reason_of(error)})
            continue
        when = max((path / name).stat().st_mtime for name in (RUN, "metrics.jsonl") if (path / name).exists())
        changed = datetime.datetime.fromtimestamp(when, datetime.UTC).isoformat(timespec="seconds")
        rows.append({**row, "changed": changed})
    return rows


def progress(run: RunRecord) -> str:
    """`finished`, or the stage and step that a run is at."""
    if run.finished:
        return "finished"
    names = [stage["name"] for stage in run.stages]
    steps = [entry for entry in run.entries if entry["stage"] in names]
    return f"{steps[-1]['stage']} step {steps[-1]['step']}" if steps else "begun"
