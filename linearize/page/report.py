"""The page of one run, and its pictures for the model card.

`pictures` draws what a run has; `report_page` puts the same drawings between words.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from .. import __version__
from ..plan.plan import Plan
from ..recipe.recipe import portable
from ..terminal import tables
from ..terminal.output import counted, duration, nats, percent, ranges, short, size
from ..train.runs import converted_from, is_evaluation
from ..train.terms import TERMS
from . import html
from .charts import Axis, Series, binary, bytes_text, lines, smoothed
from .drawing import SERIES, Drawing, stacked
from .html import Section
from .record import EVAL, FINAL, RunRecord, progress

PAGE = "report.html"
CONTEXTS = tuple(2**power for power in range(9, 21))  # tokens: 512 to 1M
LONGEST_SAMPLE = 4000  # characters
WHITE = "(white space alone)"
# What a stage's loss is, by its kind.
LOSSES = {
    "attention_transfer": "error of a mixer's output, mean over layers",
    "logit_kl": "loss, nats a token",
    "feature_cosine": "1 - cosine of the last hidden states",
    "sft": "cross entropy, nats",
}


def loss_of(kind: str, run: RunRecord) -> str:
    """What the loss of a kind of stage is, in words."""
    if kind == "logit_kl" and run.curve("eval_error"):
        return "squared error relative to the teacher's own square"
    return LOSSES.get(kind, "loss").replace("nats a token", divergence_unit(run))


def divergence_unit(run: RunRecord) -> str:
    """The unit of a divergence, by what a run compares."""
    if run.curve("eval_agreement"):
        return "nats a patch or pixel"
    return "nats an image" if run.unit == "images" else "nats a token"


def times(ours: float, theirs: float) -> str:
    """A perplexity over another, `1.023x`; `not finite` where there is no such number."""
    ratio = ours / theirs if theirs else math.nan
    return f"{ratio:.3f}x" if math.isfinite(ratio) else "not finite"


def report_page(run: RunRecord) -> str:
    """The whole HTML file of a run, finished or not; what was not measured says how to measure it."""
    drawn = pictures(run)
    sections = [Section(name, title, make(run, drawn.get(name))) for name, (title, make, _) in SECTIONS.items()]
    return html.page(
        run.name, summary(run), _tiles(run), sections, f"Written by linearize {__version__}: linearize report."
    )


def pictures(run: RunRecord) -> dict[str, Drawing]:
    """What can be drawn of a run, by the name of its section."""
    found = dict[str, Drawing]()
    for name, (_, _, draw) in SECTIONS.items():
        with contextlib.suppress(ValueError):  # there is nothing to show
            found |= {name: draw(run)} if draw is not None else {}
    return found


def card_pictures(run: RunRecord) -> dict[str, tuple[bytes, str]]:
    """(PNG, what it shows) by file name, for a model card; empty without Pillow."""
    try:
        drawn = pictures(run)
        return {f"{name}.png": (drawn[name].png(), drawn[name].about) for name in drawn}
    except ImportError:
        return {}


# ---------------------------------------------------------------- words


def mechanisms(plan: Plan) -> str:
    """`GSA`, or `GDN and GSA`."""
    return " and ".join(sorted({step.mechanism.upper() for step in plan.linear}))


def summary(run: RunRecord) -> str:
    """What became of what, in a sentence or two."""
    plan, parts = run.plan, [f"{run.base}: all layers keep softmax."] if run.plain else []
    if plan is not None:
        kept = f"; {plan.softmax}" if plan.softmax else ""
        layers = f"{len(plan.linear)} of {len(plan.steps) + len(plan.kept)} softmax layers"
        source = run.base or portable(plan.source)
        parts.append(f"{source}: {layers} became {mechanisms(plan)}{kept}.")
    ratio = run.ratio()
    if run.unit == "images" and run.accuracy is not None:
        beside = "" if run.teacher_accuracy is None else f", its teacher's {percent(run.teacher_accuracy)}"
        parts.append(f"After {short(run.tokens)} images its held-out accuracy is {percent(run.accuracy)}{beside}.")
    elif maps := _maps(run):
        figures = ", ".join(f"{value} {what}" for value, what in maps)
        parts.append(f"After {short(run.tokens)} images, on held-out ones: {figures}.")
    elif ratio is not None:
        parts.append(f"After {short(run.tokens)} tokens its held-out perplexity is {ratio:.3f} times its teacher's.")
    if not run.finished:
        parts.append("The run is not finished.")
    parts += [f"Note: {note}." for note in run.notes]
    return " ".join(parts)


def _tiles(run: RunRecord) -> html.Tiles:
    """Figures of the run's last evaluation, and apart from them those of `linearize eval`, which read another text."""
    own, caption, ratio = list[tuple[str, str]](), "The run", run.ratio()
    for entry in [entry for entry in run.entries if is_evaluation(entry)][-1:]:
        read, length = entry.get("eval_tokens"), run.block(entry["stage"])
        caption += "'s last evaluation" + (f", {read:,} held-out {run.unit}" if read else "")
        caption += f" in rows of {length:,}" if read and length and run.unit == "tokens" else ""
        caption += f", {entry['eval_dtype']}" if "eval_dtype" in entry else ""  # earlier versions did not say
    own += _maps(run)
    for _, ppl in run.curve("eval_ppl")[-1:]:
        if run.unit == "images" and run.accuracy is not None:
            other = "" if run.teacher_accuracy is None else f" (teacher {percent(run.teacher_accuracy)})"
            own.append((percent(run.accuracy), f"held-out accuracy{other}"))
        beside = "" if ratio is None else f" (teacher {run.teacher_ppl:.4g})"
        own += [] if ratio is None else [(times(ratio, 1.0), "perplexity over the teacher's")]
        own.append((f"{ppl:.4g}", f"held-out perplexity{beside}"))
    own += [(nats(kl), f"KL from the teacher, {divergence_unit(run)}") for _, kl in run.curve("eval_kl")[-1:]]
    own.append((short(run.tokens), f"training {run.unit}"))
    if run.plan is not None and run.plan.cache_bytes(1)["source"]:
        cache = run.plan.cache_bytes(32768)
        own.append(
            (size(cache["converted"]), f"state at 32k tokens, {run.plan.dtype} (softmax {size(cache['source'])})")
        )
    found = run.evaluation
    if found is None:
        return {caption: own}
    if found.get("kind"):
        return {caption: own, f"linearize eval, {found['asked']:,} of {portable(found['data'])}": _answers(found)}
    heading = "linearize eval"
    if found.get("text"):
        read = found.get("read", found["tokens"])  # earlier versions did not say
        heading += f", {read:,} tokens of {', '.join(portable(found['text'].split(', ')))}"
        heading += f" in rows of {found['seq_len']:,}" if found.get("seq_len") else ""
    heading += f", {tables.written_dtypes(found['dtypes'])}" if "dtypes" in found else ""
    theirs = [
        (times(found["student_ppl"], found["teacher_ppl"]), "perplexity over the teacher's"),
        (f"{found['student_ppl']:.4g}", f"perplexity (teacher {found['teacher_ppl']:.4g})"),
        (nats(found["kl"]), "KL from the teacher, nats a token"),
        (percent(found["top1_agreement"]), "same prediction (likeliest token)"),
    ]
    return {caption: own, heading: theirs}


def _maps(run: RunRecord) -> list[tuple[str, str]]:
    """Figures of the last evaluation of maps of images, beside KL."""
    found = [(percent(share), "same class as the teacher") for _, share in run.curve("eval_agreement")[-1:]]
    errors = run.curve("eval_error")[-1:]
    return found + [(nats(error), "squared error relative to the teacher's own square") for _, error in errors]


def _answers(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Figures of what `linearize eval` wrote of images or masked text, accuracy first."""
    what = "class" if found["kind"] == "images" else "token"
    theirs = []
    if found.get("labelled"):
        beside = f" (teacher {percent(found['teacher_accuracy'])})"
        theirs.append((percent(found["student_accuracy"]), f"accuracy{beside}"))
    if found.get("relative_error") is not None:
        return [(nats(found["relative_error"]), "squared error relative to the teacher's own square")]
    theirs.append((percent(found["top1_agreement"]), f"same {what}"))
    theirs.append((nats(found["kl"]), "KL from the teacher, nats each"))
    return theirs


# ---------------------------------------------------------------- what was converted


def _converted(run: RunRecord, drawn: Drawing | None) -> str:
    plan = run.plan
    if run.plain:
        return html.paragraph("No layer: the recipe trains a random model with its softmax.")
    if plan is None:
        return html.paragraph("No converted model of this run is left in its folder, so its layers are not known.")
    rows: list[tuple[int, tuple[str, ...]]] = []
    for step in plan.steps:
        heads = step.site.softmax_groups
        state = (size(step.state_bytes) if step.site.causal else "none") + (" and a cache" if heads else "")
        what = tables.attention(plan, step).replace("\n", " ")
        what += f", softmax in KV heads {ranges([*heads])}" if heads else ""
        cost = (f"{step.new_parameters:,}", state, tables.chosen_options(step))
        rows.append((step.site.layer, (step.site.path, what, *cost)))
    for site in plan.kept:
        rows.append((site.layer, (site.path, "softmax (kept)", "", "cache" if site.causal else "none", "")))
    columns = {"layers": "text", "module": "text", "attention": "text", "new parameters": "number", "state": "number"}
    notes = "".join(html.paragraph(f"Dropped: {note}") for note in plan.notes)
    notes += "".join(html.paragraph(f"Stays as it is: {other}") for other in plan.others)
    return html.table(columns | {"options": "text"}, tables.alike(rows)) + notes


# ---------------------------------------------------------------- training


def level(found: list[tuple[float, float]], value: float | None) -> list[tuple[float, float]]:
    """A line at a value below or above what was found; empty where one of them is not there."""
    return [(at, value) for at, _ in (found[0], found[-1])] if found and value is not None else []


def draw_training(run: RunRecord) -> Drawing:
    """Held-out perplexity over all tokens, of images accuracy before it, then the loss of each stage, and the parts
    that a loss has."""
    drawings, x = [], Axis(f"training {run.unit}")
    curve, distances, besides = run.curve("eval_ppl"), run.curve("eval_kl"), run.curve("eval_teacher_ppl")
    values = [value for _, value in curve]
    wide = bool(curve) and max(values) > 5 * min(values)
    hits = run.curve("eval_accuracy") if run.unit == "images" else []
    # It is another in rows of another length; earlier versions noted that of the first rows alone.
    teacher_ppl = besides if len(besides) == len(curve) else level(curve, run.teacher_ppl)
    for found, title, factor, teacher, axis in (
        (hits, "Held-out accuracy", 100, level(hits, run.teacher_accuracy), Axis("%")),
        (run.curve("eval_agreement"), "Held-out parts with the teacher's class", 100, [], Axis("%")),
        (run.curve("eval_error"), "Held-out squared error relative to the teacher's own square", 1, [], Axis("")),
        (curve, "Held-out perplexity", 1, teacher_ppl, Axis("perplexity", wide)),
    ):
        points, theirs = ([(at, factor * value) for at, value in one] for one in (found, teacher))
        marked = [Series("student", points, "blue", dots=True)]
        if theirs:
            marked.append(Series("teacher", theirs, "soft", True))
        drawings += [lines(title, marked, x, axis)] if points else []
    if distances:
        series = [Series("student", distances, "blue", dots=True)]
        drawings.append(lines("Held-out KL from the teacher", series, x, Axis(divergence_unit(run)), height=210))
    for stage in run.stages:
        series = []
        curves = {key: points for key in ("loss", *TERMS) if (points := run.curve(key, stage["name"]))}
        for colour, (key, points) in zip(SERIES, curves.items(), strict=False):  # of a stage's own terms
            series += [Series(key, points, colour, faint=True), Series(key, smoothed(points), colour)]
        if series:
            values = [value for one in series for _, value in one.points if value > 0]
            label, log = loss_of(stage["kind"], run), max(values, default=1) > 8 * min(values, default=1)
            drawings.append(lines(f"{stage['name']}: {label}", series, x, Axis("", log), height=210))
    if not drawings:
        raise ValueError("no metrics")
    return stacked(drawings, 22)


def _training(run: RunRecord, drawn: Drawing | None) -> str:
    if drawn is None:
        return html.paragraph("The run has no metrics yet.")
    rows = []
    begins = run.begins()
    last, names = {entry["stage"]: entry for entry in run.entries if is_evaluation(entry)}, list[str]()
    for name, entry in last.items():
        found = {what: entry.get(f"eval_{what}") for what in ("ppl", "accuracy", "kl", "agreement", "error")}
        if found["ppl"] is not None and (teacher := run.beside(entry)):
            found["ppl_ratio"] = found["ppl"] / teacher
        figures = tables.evaluation_figures(found, run.unit, ".4f")
        names = [*figures]
        named = tables.row_name(name, entry.get("calibrated"))
        rows.append((named, f"{begins.get(name, 0) + entry['tokens']:,}", *figures.values()))
    columns = {"": "text"} | dict.fromkeys((f"training {run.unit}", *names), "number")
    held = next((entry.get("eval_tokens") for entry in last.values()), None)
    first = "Accuracies and perplexities" if run.unit == "images" else "Perplexities"
    first = "Figures" if last and not run.curve("eval_ppl") else first
    words = f"{first} are over {held:,} held-out {run.unit}. " if held else ""
    words += "Faint lines are single steps, strong ones running means over 4 % of a stage."
    if run.unit == "tokens" and (note := tables.note_below(run.ratio())):
        words += f" {note[0].upper()}{note[1:]}."
    return html.paragraph(words) + _figure(drawn) + (html.table(columns, rows) if rows else "")


def draw_fidelity(run: RunRecord) -> Drawing:
    """Relative squared error of each layer's attention output, before and after; of layers with softmax none."""
    found = (("as converted", run.layers("before"), "orange"), ("after training", run.layers("after"), "blue"))
    series = [
        Series(name, [(float(layer), error) for layer, error in sorted(errors.items())], colour, dots=True)
        for name, errors, colour in found
    ]
    layers = sorted({point[0] for one in series for point in one.points})
    axis = Axis("layer", ticks=tuple(layers[:: math.ceil(len(layers) / 24)] if layers else ()))
    log = all(value > 0 for one in series for _, value in one.points)
    return lines("Error of each layer's output", series, axis, Axis("squared error / softmax's power", log))


def _fidelity(run: RunRecord, drawn: Drawing | None) -> str:
    if drawn is None and run.plain:
        return html.paragraph("Nothing to compare: all layers are softmax.")
    if drawn is None:
        return html.paragraph("Not measured: the recipe has no data.eval, or the run began with an earlier version.")
    words = (
        "The output of each attention module against softmax's, both on the teacher's hidden states of held-out text: "
        "0 is equal, 1 is as far away as no output at all. Later stages train the whole model, which may move a layer "
        "away from softmax while the model's predictions come nearer."
    )
    before, after = run.layers("before"), run.layers("after")
    cosine = {row["layer"]: row["cosine"] for row in run.report.get("layers") or ()}
    rows = [
        (layer, *(f"{one[layer]:.4f}" if layer in one else "" for one in (before, after, cosine)))
        for layer in sorted({*before, *after})
    ]
    columns = dict.fromkeys(("layer", "error as converted", "error after", "cosine after"), "number")
    return html.paragraph(words) + _figure(drawn) + html.folded("The numbers", html.table(columns, rows))


# ---------------------------------------------------------------- what linearize eval measures


def position_blocks(run: RunRecord) -> tuple[list[dict[str, Any]], int | None, str]:
    """Stretches of long texts with their perplexities, the length of a row in training, where the model recorded it,
    and what measured them: `linearize eval` comes before the end of finetune."""
    for found, origin in ((run.evaluation, "by linearize eval"), (run.report, "at the end of finetune")):
        positions = (found or {}).get("positions")
        if positions and positions.get("blocks"):
            trained = positions.get("trained_length") if positions.get("recorded", True) else None
            return list(positions["blocks"]), trained, origin
    return [], None, ""


def draw_positions(run: RunRecord) -> Drawing:
    """Perplexity by position, of student and teacher: a level for each stretch of the text."""
    blocks, *_ = position_blocks(run)
    series = []
    for who, colour in (("student", "blue"), ("teacher", "soft")):
        points = [(float(block[end]), block[f"{who}_ppl"]) for block in blocks for end in ("from", "to")]
        series.append(Series(who, points, colour, dashed=who == "teacher"))
    edges = tuple(dict.fromkeys(float(block[end]) for block in blocks for end in ("from", "to")))
    return lines(
        "Perplexity by position in long texts",
        series,
        Axis("tokens into the text", False, binary, edges),
        Axis("perplexity"),
    )


def _positions(run: RunRecord, drawn: Drawing | None) -> str:
    if drawn is None:
        return not_measured(run)
    blocks, trained, origin = position_blocks(run)
    columns = {"position": "text"} | dict.fromkeys(("student", "teacher", "ratio", "KL"), "number")
    words = f"Training had rows of {trained:,} tokens; what lies further right was never seen. " if trained else ""
    words += f"Measured {origin}; KL is in nats a token."
    return html.paragraph(words) + _figure(drawn) + html.table(columns, tables.position_rows(blocks, ".4f"))


def draw_needles(run: RunRecord) -> Drawing:
    """The share of needles found by depth, the teacher's above the student's: a line for each length of the text."""
    found = (run.evaluation or {}).get("needle") or []
    drawn = []
    for who in ("teacher", "student"):
        series = []
        for row, colour in zip(found, SERIES * len(found), strict=False):
            shares = row[who].get("depths") or [row[who]["accuracy"]]
            middles = (100 * (place + 0.5) / len(shares) for place in range(len(shares)))
            points = [(at, 100 * share) for at, share in zip(middles, shares, strict=True) if share is not None]
            series.append(Series(f"{binary(row['length'])} tokens", points, colour, dots=True))
        drawn.append(lines(f"Needles found by the {who}, %", series, Axis("% of the text before it"), Axis("%")))
    return stacked(drawn, 22)


def _needles(run: RunRecord, drawn: Drawing | None) -> str:
    if drawn is None:
        return not_measured(run)
    words = (
        "A needle is a pair of words within ordinary text, asked for at the end. Lines are of texts of one length in "
        "tokens; 0 % is the beginning."
    )
    if "needle" in tables.empty_tasks(run.evaluation):
        words += f" Note: {tables.empty_tasks_note(run.evaluation)}."
    lists = "Recall asks for the second words of a list of pairs by the first. By linearize eval, student and teacher:"
    columns = {"": "text", "student": "number", "teacher": "number"}
    asked = html.table(columns, tables.asked_rows(run.evaluation or {}))
    page = html.paragraph(words) + _figure(drawn) + html.paragraph(lists) + asked
    if found := (run.evaluation or {}).get("repeats"):
        first, *others = tables.REPEATED
        repeated = html.table({first: "text"} | dict.fromkeys(others, "number"), tables.repeat_rows(found, ".4f"))
        told = "In ordinary text a model can look up what followed the same token before. By how far back that was:"
        page += html.paragraph(told) + repeated
    return page


def not_measured(run: RunRecord) -> str:
    """What to run so that a page has what `linearize eval` measures. A page may be published: it has no paths of this
    machine, and `linearize eval` takes those of the teacher and of the text from the run."""
    if run.unit == "latents":
        return html.paragraph("Not measured: the model writes no text. report.json has its predictions by noise level.")
    folder, where = as_typed(run)
    command = f"{measuring(run, folder)}\nlinearize report {shlex.quote(str(folder))}"
    begin = "Not measured. These commands"
    if not (run.folder / FINAL).is_dir():
        state = progress(run) if run.finished else f"not finished ({progress(run)})"
        begin = f"Not measured: the run is {state}. Once {FINAL}/ is there, these commands"
    return html.missing(f"{begin}{where} measure it and write this page again:", command)


def measuring(run: RunRecord, folder: Path) -> str:
    """The command that measures the finished model of a run in `folder`."""
    model, data = run.values.get("model") or {}, run.values.get("data") or {}
    words = ["linearize", "eval", str(folder / FINAL), "--recipe", str(folder)]
    named = isinstance(model.get("base"), str)
    if not run.values.get("convert"):
        named = bool(converted_from(run.plan, Path(run.settings.get("folder", ""))))
    words += [] if named else ["--teacher", "MODEL"]
    words += ["--trust-remote-code"] if model.get("trust_remote_code") else []
    words += [] if data.get("eval") else ["data.eval={files: [FILE.txt]}"]
    return shlex.join([*words, "-o", str(folder / EVAL)])


def as_typed(run: RunRecord) -> tuple[Path, str]:
    """The folder of a run as commands on its page name it, and where these are for, empty where that is here."""
    typed, place = Path(run.values.get("output_dir", "/")), run.folder.absolute()
    above = place.parents[len(typed.parts) - 1 : len(typed.parts)]
    if not typed.is_absolute() and above and above[0] / typed == place:
        # From there relative names in its recipe are read, such as that of the teacher.
        return typed, "" if above[0] == Path.cwd() else ", in the folder where the run was started,"
    folder = Path(portable(str(run.folder)))
    return folder, "" if folder == run.folder else ", in the folder that holds the run,"


# ---------------------------------------------------------------- memory, samples, cost


def draw_memory(run: RunRecord) -> Drawing:
    """Bytes that a sequence holds while decoding, over its length: the source's cache, the converted model's state."""
    plan = run.plan
    if plan is None or not plan.cache_bytes(1)["source"]:
        raise ValueError("no cache")
    found = {key: [(float(n), float(plan.cache_bytes(n)[key])) for n in CONTEXTS] for key in ("source", "converted")}
    kept = " and the cache of kept layers" if plan.kept else ""
    series = [
        Series("source: cache", found["source"], "soft", True),
        Series(f"converted: state{kept}", found["converted"], "blue"),
    ]
    x = Axis("tokens of context", True, binary, tuple(float(n) for n in CONTEXTS[::2]))
    return lines("Memory of a sequence while decoding", series, x, bytes_axis(series))


def bytes_axis(series: Sequence[Series]) -> Axis:
    """An axis of bytes that is marked at powers of two, as sizes are written."""
    values = [value for one in series for _, value in one.points]
    powers = range(math.floor(math.log2(min(values)) / 2) * 2, math.ceil(math.log2(max(values))) + 1, 2)
    marks = tuple(2.0**power for power in powers)[:: 1 if len(powers) < 9 else 2]
    return Axis("bytes", True, bytes_text, marks)


def _memory(run: RunRecord, drawn: Drawing | None) -> str:
    if drawn is None or run.plan is None:
        return html.paragraph("Attention of this model reads no cache, so there is nothing to compare.")
    rows = []
    for tokens in (4096, 32768, 131072):
        cache = run.plan.cache_bytes(tokens)
        less = cache["source"] / max(1, cache["converted"])
        rows.append((f"{tokens:,}", size(cache["source"]), size(cache["converted"]), f"{less:.1f}x"))
    columns = {"context, tokens": "number", "source": "number", "converted": "number", "less": "number"}
    words = (
        f"Computed from the plan, for one sequence in {run.plan.dtype}, also at lengths that the model was not made "
        "for. How far it is good, the perplexity by position says."
    )
    return html.paragraph(words) + _figure(drawn) + html.table(columns, rows)


def _samples(run: RunRecord, drawn: Drawing | None) -> str:
    found = run.report.get("samples") or []
    if not found:
        return html.paragraph("None: a run writes samples at its end, when it has held-out text and writes text.")
    words = "Held-out texts, continued with the likeliest token each time. A loop is what small models do there."
    parts = []
    for sample in found:
        pieces = [("Prompt", "prompt"), ("The text itself", "text"), ("Teacher", "teacher"), ("Student", "student")]
        shown = {key: text[:LONGEST_SAMPLE] if text.strip() else WHITE for key, text in sample.items()}
        boxes = (
            f"<div><h3>{name}</h3><pre>{html.text(shown[key])}</pre></div>" for name, key in pieces if key in shown
        )
        parts.append(f'<div class="samples">{"".join(boxes)}</div>')
    return html.paragraph(words) + "".join(parts)


def _cost(run: RunRecord, drawn: Drawing | None) -> str:
    rows = []
    for stage in run.stages:
        steps = [entry for entry in run.entries if entry["stage"] == stage["name"] and entry.get("tokens_per_s")]
        if steps:
            last, seconds = steps[-1], run.seconds(stage["name"]) or 0.0
            most = max(entry.get("memory") or 0 for entry in steps)
            rate = f"{last['tokens'] / seconds:,.0f}" if seconds else ""
            cells = (f"{last['step']:,}", f"{last['tokens']:,}", rate, duration(seconds), size(most) if most else "")
            rows.append((stage["name"], ", ".join(stage["train"]), *cells))
    if not rows:
        return html.paragraph("No step was trained yet.")
    columns = {"stage": "text", "trained": "text"}
    columns |= dict.fromkeys(("steps", run.unit, f"{run.unit}/s", "time", "peak memory"), "number")
    where = run.report.get("device") or "a device that this run did not note"
    count = run.settings.get("processes") or 1
    words = f"On {where}, {counted(count, 'process', 'processes')}. "
    words += "Time is that of steps, without evaluation and start-up."
    return html.paragraph(words) + html.table(columns, rows)


def _recipe(run: RunRecord, drawn: Drawing | None) -> str:
    values = run.values if run.recipe is None else run.recipe.model_dump(mode="json", exclude_defaults=True)
    few = run.settings.get("max_steps")
    words = (
        f"`linearize finetune` with --max-steps {few}."
        if few
        else "What differs from the defaults; of absolute paths the last name."
    )
    return html.paragraph(words) + f"<pre>{html.text(yaml.safe_dump(portable(values), sort_keys=False))}</pre>"


def _versions(run: RunRecord, drawn: Drawing | None) -> str:
    rows = sorted((run.settings.get("versions") or {}).items())
    return html.table({"package": "text", "version": "text"}, rows)


def _figure(drawn: Drawing) -> str:
    return f"<figure>{drawn.svg()}</figure>"


# Of a page, by name: the title, what writes the section, and what draws its picture, where it has one.
SECTIONS: dict[str, tuple[str, Callable[[RunRecord, Any], str], Callable[[RunRecord], Drawing] | None]] = {
    "converted": ("What was converted", _converted, None),
    "training": ("Training", _training, draw_training),
    "fidelity": ("Each layer against softmax", _fidelity, draw_fidelity),
    "positions": ("Perplexity by position", _positions, draw_positions),
    "needles": ("Needles, recall and free writing", _needles, draw_needles),
    "memory": ("State against cache", _memory, draw_memory),
    "samples": ("Samples", _samples, None),
    "cost": ("Cost", _cost, None),
    "recipe": ("Recipe", _recipe, None),
    "versions": ("Versions", _versions, None),
}
