"""Runs and models side by side: what `linearize runs` lists, and the table and the page of `linearize compare`."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..checkpoint.manifest import is_linearized, read_plan, recipes_of
from ..demo import TEXTS
from ..errors import MALFORMED, LinearizeError, check_runs, quoted, reason_of, resource_error
from ..plan.keep import written
from ..plan.plan import Plan
from ..recipe.data import LOCAL, rooted
from ..recipe.recipe import portable
from ..terminal.output import counted, nats, percent, ranges, size
from ..terminal.tables import empty_tasks, short
from . import html
from .charts import Axis, Series, binary, lines
from .drawing import SERIES, Drawing
from .html import Section
from .record import (
    EVAL,
    FINAL,
    RUN,
    ModelRecord,
    RunRecord,
    find_runs,
    no_run,
    progress,
    read_evaluation,
    read_run,
    whole,
)
from .report import CONTEXTS, bytes_axis, measuring, mechanisms

# Runs and models by the names of `labels`.
Named = Mapping[str, RunRecord]
MEMORY_AT = 32768  # tokens of a table's column


def read_rows(places: Sequence[Path]) -> list[RunRecord]:
    """What `linearize compare` was given, each under a name of its own, in that order.

    A place is a run or its `final`, a file that `linearize eval -o` wrote, a converted folder, which may hold such a
    file as eval.json, or the name of a model that one of the others was measured beside: its teacher.

    Raises LinearizeError (exit 2) for what is none of these, for damaged files, and for what is named twice.
    """
    runs = [_run_of(place) for place in places]
    resolved = [place.resolve() for place in runs]
    twice = next((places[at] for at, place in enumerate(resolved) if place in resolved[:at]), None)
    if twice is not None:
        raise LinearizeError(f"{twice} is named twice. Name each run and model once")
    found: list[RunRecord | None] = [_measured(place) for place in runs]
    known = [one for one in found if one is not None]
    rows = [one or _seen(place, known) for place, one in zip(runs, found, strict=True)]
    for row in rows:
        with whole(row.folder):
            compare_page([row])  # each alone, so that the damaged one is named
    return rows


def _run_of(place: Path) -> Path:
    """The run whose finished model `place` is; any other place as it is."""
    run = place.resolve().parent
    return place.parent if place.name == FINAL and (run / RUN).is_file() else place


def _measured(place: Path) -> RunRecord | None:
    """What has its figures, or its plan, in its own files; None for any other model."""
    if (place / RUN).is_file():
        return read_run(place)
    if place.is_file():
        evaluation = read_evaluation(place.parent, place) or {}
        student = str(evaluation.get("student", place.stem))
        return ModelRecord(place, {}, None, [], {}, _plan(Path(student)), evaluation, str(portable(student)))
    if is_linearized(place) and not (place.resolve().parent / RUN).is_file():
        return ModelRecord(place, {}, None, [], {}, _plan(place), read_evaluation(place, None), place.name)
    return None


def _plan(folder: Path) -> Plan | None:
    with contextlib.suppress(LinearizeError):
        return read_plan(folder)
    return None


def _seen(place: Path, beside: Sequence[RunRecord]) -> RunRecord:
    """A model whose figures are in what it is named `beside`. Raises LinearizeError (exit 2) where they are in none."""
    for one in beside:
        seen, run = one.evaluation, None
        teacher = (one.values.get("teacher") or {}).get("model")
        source = one.plan.source if one.plan is not None else None
        taught = [teacher] if teacher else [one.values.get("model", {}).get("base"), source]
        if any(_same(place, name) for name in taught):
            run = one
        elif seen is not None and _same(place, seen.get("student")):
            return ModelRecord(place, {}, None, [], {}, _plan(place), seen, str(portable(str(place))))
        elif seen is None or not _same(place, seen.get("teacher")):
            continue
        return ModelRecord(place, {}, None, [], {}, one.plan, seen, str(portable(str(place))), True, run)
    if not (place / "config.json").is_file() or (place.resolve().parent / RUN).is_file():
        raise no_run(place)
    others = ", ".join(one.name for one in beside)
    raise LinearizeError(
        f"{place} is a model, and {f'none of {others} was' if others else 'nothing else is named that was'} measured "
        f"against it. Name a run that it taught, or measure a student: linearize eval STUDENT --teacher "
        f"{quoted(place)} -o {EVAL}, then linearize compare {EVAL} {quoted(place)}"
    )


def _same(place: Path, name: Any) -> bool:
    """Whether a record's `name` of a model means `place`."""
    return isinstance(name, str) and (str(place) == name or place.resolve() == Path(name).resolve())


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run or model: its own; where several have the same, the folder, from the one that holds all of
    these on."""
    names = [run.name for run in runs]
    places = {run.folder.absolute() for name, run in zip(names, runs, strict=True) if names.count(name) > 1}
    start = os.path.commonpath([place.parent for place in places]) if places else ""
    return [
        name if names.count(name) == 1 else os.path.relpath(run.folder.absolute(), start)
        for name, run in zip(names, runs, strict=True)
    ]


def figures(run: RunRecord) -> dict[str, Any]:
    """One run or model in numbers, None where something was not measured: a row of the table, and of `--json`.

    KL is of the evaluation that the perplexity is of. What a run did not measure itself is that of `linearize eval`.
    """
    teacher = run.teacher
    found = {} if teacher else run.evaluation or {}
    last = {key: curve[-1][1] for key in ("eval_kl", "eval_agreement", "eval_error") if (curve := run.curve(key))}
    cache = run.plan.cache_bytes(MEMORY_AT)["source"] if run.plan else None
    plan = None if teacher else run.plan
    return {
        "run": str(run.folder),
        "kind": "teacher" if teacher else "student" if isinstance(run, ModelRecord) else "run",
        "name": run.name,
        "finished": run.finished,
        "base": run.base,
        "mechanisms": sorted({step.mechanism for step in plan.linear}) if plan else ["softmax"] * run.plain,
        "kept": plan.softmax_layers if plan else [],
        "kept_heads": written(plan.softmax_groups) if plan else "",
        "unit": run.unit,
        "tokens": run.tokens,
        "accuracy": run.accuracy,
        "teacher_accuracy": run.teacher_accuracy,
        "ppl": run.ppl,
        "teacher_ppl": run.teacher_ppl,
        "ppl_ratio": run.ratio(),
        "kl": last.get("eval_kl", found.get("kl")),
        "top1_agreement": last.get("eval_agreement", found.get("top1_agreement")),
        "relative_error": last.get("eval_error", found.get("relative_error")),
        "needles": run.needles,
        "state_bytes": run.bytes_at(MEMORY_AT) or None,
        "cache_bytes": cache or None,
    }


def columns(runs: Sequence[RunRecord]) -> dict[str, str]:
    """The columns of a table of these runs: of images accuracy comes first, and there is no text to find needles in."""
    units = {run.unit for run in runs}
    names = [f"training {units.pop()}" if len(units) == 1 else "trained on"]
    images = [run.unit == "images" for run in runs]
    names += ["accuracy", "teacher's accuracy"] if any(images) else []
    names += ["perplexity", "teacher's", "x teacher", "KL, nats", "same prediction"]
    names += ["relative error"] if any(figures(run)["relative_error"] is not None for run in runs) else []
    names += [] if all(images) else ["needles", "state at 32k"]
    return dict.fromkeys(("run", "base", "attention", "kept"), "text") | dict.fromkeys(names, "number")


def table_rows(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """The rows of that table."""
    found = []
    for run, label in zip(runs, labels(runs), strict=True):
        row = cells(run, label)
        found.append(tuple(row[name] for name in columns(runs)))
    return found


def cells(run: RunRecord, label: str) -> dict[str, str]:
    """What a table says of a run, by the headings of `columns`."""
    row = figures(run)

    def written(key: str, form: str) -> str:
        return "" if row[key] is None else format(row[key], form)

    softmax = row["kind"] == "teacher" or run.plain
    images, count = run.unit == "images", short(row["tokens"]) if row["kind"] == "run" else ""
    return {
        "run": label if run.finished else f"{label} (not finished)",
        "base": row["base"],
        "attention": "softmax" if softmax else mechanisms(run.plan) if run.plan else "",
        "kept": ", ".join(filter(None, (ranges(row["kept"]), row["kept_heads"]))),
        f"training {run.unit}": count,
        "trained on": f"{count} {run.unit}" if count else "",
        "accuracy": percent(row["accuracy"]) if images else "",
        "teacher's accuracy": percent(row["teacher_accuracy"]) if images else "",
        "perplexity": written("ppl", ".4g"),
        "teacher's": written("teacher_ppl", ".4g"),
        "x teacher": written("ppl_ratio", ".4f"),
        "KL, nats": nats(row["kl"]),
        "same prediction": percent(row["top1_agreement"]),
        "relative error": nats(row["relative_error"]),
        "needles": percent(row["needles"]),
        "state at 32k": size(row["state_bytes"]) if row["state_bytes"] else "",
    }


def notes(runs: Sequence[RunRecord], shown: Callable[[str], str] = str) -> list[str]:
    """What to know before reading the table; `shown` is how folders are written."""
    students = _students(runs)
    lacking = [(shown(str(run.folder)), run) for run in students if _unmeasured(run)]
    found = [f"{place} was not measured: {_measure(place, run.base)}" for place, run in lacking]
    if not all(a.base == b.base or _original(a) == _original(b) for a, b in itertools.combinations(students, 2)):
        found.append("the runs have different teachers: x teacher and KL are against each run's own")
    rated = [run for run in students if not _unmeasured(run)]
    if not all(_same_text(*pair) for pair in itertools.combinations(rated, 2)):
        images = all(run.unit == "images" for run in students)
        others = "images: compare each run with its teacher, not accuracies" if images else ""
        others = others or "text, or on other amounts of it: compare x teacher, not perplexities"
        found.append(f"the runs were evaluated on different {others}")
    blocks = list(dict.fromkeys(block for run in students if (block := _block(run))))
    if len(blocks) > 1:
        found.append(f"blocks of {' and '.join(f'{block:,}' for block in blocks)} tokens: perplexities do not compare")
    dtypes = {run.plan.dtype: run.name for run in runs if run.plan is not None and run.bytes_at(MEMORY_AT)}
    if len(dtypes) > 1:
        each = ", ".join(f"{dtype} of {name}" for dtype, name in dtypes.items())
        found.append(f"states are counted in the dtype of each model ({each}): their sizes do not compare")
    return found


def notes_below(runs: Sequence[RunRecord], shown: Callable[[str], str] = str) -> list[str]:
    """What to know of cells of the table that are empty, or that compare nothing."""
    found = []
    students = [(run, label) for run, label in zip(runs, labels(runs), strict=True) if not run.teacher]
    for run in (run for run, _ in students if _lacks_eval(run)):
        what = "same predictions" + " and needles" * (run.unit == "tokens")
        found.append(f"not measured: {measuring(run, Path(shown(str(run.folder))))} measures {what}")
    for run, label in students:
        if run.evaluation and not isinstance(run, ModelRecord) and not _same_text(run, seen := _beside(run)):
            read = next((f"{amount:,} {run.unit} of " for amount in _amounts(seen).values()), "")
            text = str(run.evaluation.get("data") or run.evaluation.get("text") or "other data")
            named = ", ".join(str(portable(name)) for name in text.split(", "))
            found.append(f"same prediction of {label} is that of linearize eval, on {read}{named}")
    for run, label in zip(runs, labels(runs), strict=True):
        found += [f"{label}: {note}" for note in run.notes if not run.teacher]
    nothing = [label for run, label in students if "needle" in empty_tasks(run.evaluation)]
    if nothing:
        found.append(f"needles of {', '.join(nothing)} compare nothing: the teacher itself finds 0 %")
    return found


def _beside(run: RunRecord) -> ModelRecord:
    """A run's model as `linearize eval` measured it."""
    return ModelRecord(run.folder, {}, None, [], {}, run.plan, run.evaluation, run.name)


def _students(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """All but the teachers."""
    return [run for run in runs if not run.teacher]


def _original(run: RunRecord) -> str:
    """The model that was converted first, where its softmax is the teacher; else what `base` says. A model that an
    earlier run trained may teach as it was trained."""
    if run.plan is None or not run.plan.source:
        return run.base
    if isinstance(run, ModelRecord):
        beside = (run.evaluation or {}).get("teacher")
        return run.base if beside and Path(beside).name != Path(run.plan.source).name else run.plan.source
    base = run.values.get("model", {}).get("base")
    with contextlib.suppress(LinearizeError, OSError, *MALFORMED):
        if isinstance(base, str) and recipes_of(Path(base)):
            return run.base
    return run.plan.source


def _block(run: RunRecord) -> int | None:
    """Tokens of a block in the evaluation that a perplexity is of; None where there is none or nothing says it."""
    if run.unit != "tokens" or run.ppl is None:
        return None
    if isinstance(run, ModelRecord):
        return (run.evaluation or {}).get("seq_len")
    rated = [entry["stage"] for entry in run.entries if entry["stage"] != "teacher" and entry.get("eval_ppl")]
    return run.block(rated[-1]) if rated else None


def _unmeasured(run: RunRecord) -> bool:
    return isinstance(run, ModelRecord) and run.evaluation is None


def _lacks_eval(run: RunRecord) -> bool:
    """Whether cells of a finished run are empty that `linearize eval` fills; a random model has no teacher for it, and
    of latents it measures other things."""
    measured = isinstance(run, ModelRecord) or run.evaluation is not None
    if run.unit == "latents" or measured or not (run.folder / FINAL).is_dir():
        return False
    row, base = figures(run), run.values.get("model", {}).get("base")
    return isinstance(base, str) and row["top1_agreement"] is None and row["relative_error"] is None


def _measure(place: str, teacher: str) -> str:
    known = "/" in teacher or Path(teacher).exists()
    what = "" if known or not teacher else f" (MODEL: the folder {teacher} that was converted)"
    result = quoted(f"{place}.json")
    command = f"linearize eval {quoted(place)} --teacher {quoted(teacher) if known else 'MODEL'} -o {result}"
    return f"{command}, then linearize compare {result}{what}"


def _same_text(one: RunRecord, other: RunRecord) -> bool:
    """Whether two were evaluated on the same text or images, and on as much of it, as far as both say: in blocks of two
    lengths that differs by less than a block."""
    recipes = not any(isinstance(run, ModelRecord) for run in (one, other))
    if _text(one, recipes) != _text(other, recipes):
        return False
    ours, theirs = _amounts(one), _amounts(other)
    key = next((key for key in ours if key in theirs), "")
    blocks = {block for run in (one, other) if (block := _block(run))}
    if len(blocks) > 1:
        return key != "read" or abs(ours[key] - theirs[key]) < max(blocks)
    return not key or ours[key] == theirs[key]


def _text(run: RunRecord, recipes: bool) -> Any:
    """The text or the images that a run or a measured student was evaluated on, by absolute paths: with `recipes` all
    that a recipe says of it, else what `linearize eval` writes of it, which has no split of a dataset."""
    if isinstance(run, ModelRecord):
        found = run.evaluation or {}
        return _absolute(str(found.get("data" if found.get("kind") else "text")).split(", "))
    source = rooted(run.values.get("data", {}).get("eval") or {}, Path(run.settings.get("folder", "")))
    if recipes:
        local = {key: _absolute([source[key]]) for key in LOCAL if source.get(key)}
        return {**source, **local, "files": _absolute(source.get("files", ()))}
    if "demo" in source:
        return _absolute(TEXTS[source["demo"]].split(", "))
    return _absolute(
        source.get("files") or [str(source.get(key)) for key in ("images", "arrays", "path") if key in source]
    )


def _amounts(run: RunRecord) -> dict[str, int]:
    """How much of that was read, by what is counted."""
    if not isinstance(run, ModelRecord):
        read = [entry.get("eval_tokens") for entry in run.entries if entry["stage"] == "teacher"]
        return {"read": read[0]} if read and read[0] is not None else {}
    return {key: run.evaluation[key] for key in ("read", "tokens", "asked") if run.evaluation and key in run.evaluation}


def _absolute(names: Iterable[str]) -> list[str]:
    """Names of files, each in one spelling; names of anything else stay apart from each other, too."""
    return [os.path.abspath(name) for name in names]


def compare_page(runs: Sequence[RunRecord]) -> str:
    """The HTML file of `linearize compare`."""
    names = labels(runs)
    above, below = (
        "".join(html.paragraph(f"Note: {note}.") for note in some(runs, portable)) for some in (notes, notes_below)
    )
    sections = [Section("table", "Runs and models", above + html.table(columns(runs), table_rows(runs)) + below)]
    sections += drawn_sections(dict(zip(names, runs, strict=True)))
    students = _students(runs)
    rated = [run for run in students if run.ratio() is not None]
    best = min(rated, key=lambda run: run.ratio() or 0, default=None)
    models = sum(isinstance(run, ModelRecord) for run in runs)
    counts = ((len(runs) - models, "run"), (models, "model"))
    about = " and ".join(counted(count, what) for count, what in counts if count) + "."
    if students and all(run.unit == "images" and run.accuracy is not None for run in students):
        best = max(students, key=lambda run: run.accuracy or 0)
        about += f" Highest accuracy: {names[list(runs).index(best)]}, {percent(best.accuracy)}."
    elif best is not None:
        about += f" Nearest to its teacher in perplexity: {names[list(runs).index(best)]}, {best.ratio():.4f} times."
    return html.page("Runs compared", about, {}, sections, f"Written by linearize {__version__}: linearize compare.")


def _colours(count: int) -> list[tuple[str, bool]]:
    """A colour for each run, dashed where the colours begin again."""
    return [(SERIES[place % len(SERIES)], place >= len(SERIES)) for place in range(count)]


def curves(named: Named, key: str) -> Drawing | None:
    """Held-out perplexity over the teacher's (`eval_ppl`; itself where a run has no teacher), accuracy of images
    (`eval_accuracy`) or KL (`eval_kl`), over the tokens or images of each student; None where none was measured."""
    every = named.values()
    ratio = key == "eval_ppl" and all(run.teacher_ppl for run in every if run.curve(key))
    images = bool(every) and all(run.unit == "images" for run in every)
    series = []
    for (name, run), (colour, dashed) in zip(named.items(), _colours(len(named)), strict=True):
        if key == "eval_accuracy" and run.unit != "images":
            continue
        over = 0.01 if key == "eval_accuracy" else 1.0
        stages = [] if ratio else filter(run.same_blocks, run.begins())
        points = [(x, y / over) for stage in stages for x, y in run.curve(key, stage)]
        if points := run.over_teacher() if ratio else points:
            series.append(Series(name, points, colour, dashed, dots=True))
    values = [y for one in series for _, y in one.points]
    if not values:
        return None
    label = {"eval_ppl": "perplexity", "eval_kl": f"nats {'an image' if images else 'a token'}", "eval_accuracy": "%"}
    wide = key != "eval_accuracy" and max(values) > 5 * max(min(values), 1e-9)
    title = {
        "eval_ppl": "Held-out perplexity" + " over the teacher's" * ratio,
        "eval_kl": "Held-out KL from the teacher",
        "eval_accuracy": "Held-out accuracy",
    }
    x = Axis(f"training {'images' if images else 'tokens'}")
    return lines(title[key], series, x, Axis("x teacher" if ratio else label[key], wide), height=300)


def memory(named: Named) -> Drawing | None:
    """Bytes of state and cache of each student over the length of its text; None where none has any."""
    series = []
    for (name, run), (colour, dashed) in zip(named.items(), _colours(len(named)), strict=True):
        if run.plan is not None and run.plan.cache_bytes(1)["source"]:
            points = [(float(n), float(run.bytes_at(n) or 0)) for n in CONTEXTS]
            series.append(Series(name, points, colour, dashed))
    if not series:
        return None
    x = Axis("tokens of context", True, binary, tuple(float(n) for n in CONTEXTS[::2]))
    return lines("State and cache while decoding", series, x, bytes_axis(series), height=300)


def drawn_sections(named: Named) -> list[Section]:
    """Perplexity, KL and memory of students, a section each, and accuracy before them where some learned images."""
    found = []
    accuracy, held = curves(named, "eval_accuracy"), memory(named)
    for name, title, drawn in (
        *([] if accuracy is None else [("accuracy", "Accuracy", accuracy)]),
        ("perplexity", "Perplexity", curves(named, "eval_ppl")),
        ("kl", "KL from the teacher", curves(named, "eval_kl")),
        *([] if accuracy is not None and held is None else [("memory", "Memory of a sequence", held)]),
    ):
        body = html.paragraph("Not measured by these runs.") if drawn is None else f"<figure>{drawn.svg()}</figure>"
        found.append(Section(name, title, body))
    return found


# ---------------------------------------------------------------- linearize runs


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs below a folder, the newest first: `figures`, `at` (how far it is) and `changed` (when).

    Raises LinearizeError (exit 2) for a folder that is not there or holds no run.
    """
    check_runs(folder)
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
