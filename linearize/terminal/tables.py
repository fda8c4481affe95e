"""Tables for people, all in one style: on stderr beside messages, on stdout where the table is the result."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .output import counted, nats, percent, printable, ranges, short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..plan.plan import Plan, Step


def console(stderr: bool = True) -> Console:
    """The console for human text, in which brackets are brackets and `:100:` is no picture: messages may have some. It
    shows control characters of other people's strings instead of obeying them."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> Any:
            return super().render_str(printable(text), **how)

    made = Plain(stderr=stderr, highlight=False, markup=False, emoji=False)
    if made._width is not None and made._width < NARROWEST:  # some terminals and CI set COLUMNS to 0 or 1: not known
        made._width = USUAL
    return made


def results() -> Console:
    """The console for tables that are a command's result."""
    return console(stderr=False)


# Words of results, and how they are coloured.
COLOURS = {"passed": "green", "ok": "green", "failed": "red", "missing": "red"}
COLOURS |= dict.fromkeys(("warning", "skipped", "optional", "note"), "yellow")
# A column is at least as wide as its longest word, up to so many characters: words are not cut. Longer
# ones, such as paths, are cut where a line is full; where the table is too wide their column may shrink to LEAST.
LONGEST_WORD, LEAST = 20, 8
NARROWEST, USUAL = 20, 80  # characters of a line


def table(columns: dict[str, str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """A table of `rows`. `columns`: heading -> `text` (wrapped between words), `short` or `number`; the last two are
    wrapped only where the table is wider than the terminal otherwise."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left")
    cells = [list(row) for row in rows]
    kinds, texts = [*columns.values()], [[heading, *(r[n] for r in cells)] for n, heading in enumerate(columns)]
    words = [[len(word) for text in own for word in text.split()] or [0] for own in texts]
    least = [min(LONGEST_WORD, max(own)) for own in words]
    whole = [max(len(line) for text in own for line in text.split("\n")) for own in texts]
    width = console().width - 2 * len(columns)
    fixed = None
    if sum(n if kind == "text" else full for n, full, kind in zip(least, whole, kinds, strict=True)) > width:
        # Where it is too narrow for words, each column gets its share: rich would leave some out.
        fixed = divided(width, words, whole) or [max(1, width // len(columns))] * len(columns)
    for place, (heading, kind) in enumerate(columns.items()):
        made.add_column(
            heading,
            justify="right" if kind == "number" else "left",
            no_wrap=kind != "text" and not fixed,
            overflow="fold",
            min_width=least[place] if kind == "text" and not fixed else None,
            width=fixed[place] if fixed else None,
        )
    for row in cells:
        made.add_row(*(Text(printable(cell), COLOURS.get(cell, "")) for cell in row))
    return made


def divided(width: int, words: list[list[int]], whole: list[int]) -> list[int] | None:
    """Widths of columns that fill `width`, each wide enough for its words, by the lengths of these and of the `whole`
    lines; None where LEAST does not fit. Where words do not fit, those of the widest columns are cut."""
    widths = [max([n for n in own if n <= LONGEST_WORD] + [LEAST] * (max(own) > LONGEST_WORD)) for own in words]
    while sum(widths) > width:
        if max(widths) <= LEAST:
            return None
        widths[widths.index(max(widths))] -= 1
    for _ in range(min(width, sum(whole)) - sum(widths)):
        lacking = [full - width for full, width in zip(whole, widths, strict=True)]
        widths[lacking.index(max(lacking))] += 1
    return widths


def attention(plan: Plan, step: Step) -> str:
    """What a layer has after the conversion, in a column of a table."""
    return f"softmax\n(last {step.options['window']:,})" if step in plan.local else step.mechanism


def alike(rows: list[tuple[int, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Rows of (layer, (path, other cells)): those that differ in numbers of the path become one, its layers first."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for layer, (path, *cells) in sorted(rows):
        groups.setdefault((any_layer(path), *cells), []).append(layer)
    return [(ranges(layers), *cells) for cells, layers in groups.items()]


def any_layer(text: str) -> str:
    """`model.layers.3.self_attn` -> `model.layers.*.self_attn`, also within a sentence."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", text)


def chosen_options(step: Step) -> str:
    """The options of a layer that are not the mechanism's defaults: `slots=32 window=64`."""
    from ..plan.mechanisms import resolve_options, to_settings

    base = {"base": step.options["base"]} if "base" in step.options else {}
    defaults = resolve_options(step.mechanism, base) | {"base": None}
    chosen = {key: value for key, value in step.options.items() if defaults.get(key) != value}
    return " ".join(to_settings(chosen)) or "defaults"


def unit_of_stages(plans: list[dict[str, Any]]) -> str:
    """What the stages of a dry run count: an image is a row of one token."""
    return "images" if all(plan["data"]["seq_len"] == 1 for plan in plans) else "tokens"


def asked_for(count: int, images: bool) -> str:
    """So many tokens, or images."""
    return f"{short(count)} {'images' if images else 'tokens'}"


def row_name(stage: str, calibrated: bool | None) -> str:
    """What a table calls an evaluation: that of the converted model is often made after the run has calibrated it."""
    return f"{stage}, calibrated" if calibrated else stage


def evaluation_figures(row: dict[str, Any], unit: str, form: str) -> dict[str, str]:
    """The figures of an evaluation by their headings, in order; `form` is that of perplexities. Of maps of classes the
    share of patches or pixels that have the teacher's class, and of numbers the error relative to the teacher's."""
    if row.get("agreement") is not None:
        return {"same class": percent(row["agreement"]), "KL, nats a patch or pixel": nats(row.get("kl"))}
    if row.get("error") is not None:
        return {"relative squared error": nats(row["error"])}
    figures = [
        ("perplexity", format(row["ppl"], form)),
        ("x teacher", "" if row.get("ppl_ratio") is None else format(row["ppl_ratio"], form)),
        (f"KL, nats {'an image' if unit == 'images' else 'a token'}", nats(row.get("kl"))),
    ]
    accuracy = ("accuracy" if unit == "images" else "tokens right", percent(row.get("accuracy")))
    return dict([accuracy, *figures] if unit == "images" else [*figures, accuracy])


# By which share the teacher's perplexity differs where it read other rows; less is rounding.
OTHER_ROWS = 1e-3
# Headings of `compared`.
COMPARED = ("student", "teacher", "x teacher", "KL, nats a token")


def compared(row: dict[str, Any], form: str) -> tuple[str, ...]:
    """Perplexities of student and teacher and their ratio in that `form`, and KL."""
    return *(format(row[key], form) for key in ("student_ppl", "teacher_ppl", "ppl_ratio")), nats(row.get("kl"))


def position_rows(blocks: Iterable[dict[str, Any]], form: str) -> list[tuple[str, ...]]:
    """Stretches of long texts, and what was `compared` there."""
    return [(f"{b['from']:,} to {b['to']:,}", *compared(b, form)) for b in blocks]


def positions_table(found: dict[str, Any] | None) -> None:
    """Perplexity and KL by position in long texts, where there were any. A student whose training is not `recorded` has
    no trained length: the first stretch is then a block of the text."""
    if not found or not found["blocks"]:
        return
    columns = {"tokens": "short"} | dict.fromkeys(COMPARED, "number")
    rows = position_rows(found["blocks"], ".3f")
    origin = "documents joined" if found["text"] == "joined" else "long documents"
    title = f"perplexity by position in {counted(found['rows'], 'row')} of {origin}"
    length = found["trained_length"]
    unknown = f"; no trained length is recorded: the first stretch is a row of the text, {length:,} tokens"
    recorded = found.get("recorded", True)  # `finetune` says nothing of it: it measures what it trained
    console().print(
        table(columns, rows, f"{title}, trained in rows of {length:,} tokens" if recorded else title + unknown)
    )


# Headings of `repeat_rows`.
REPEATED = ("tokens back", "of all tokens", *COMPARED, "of all KL")


def repeat_rows(found: Sequence[dict[str, Any]], form: str) -> list[tuple[str, ...]]:
    """What was `compared` of targets by how far back the same two tokens stood together, with shares of all."""
    sizes = [(row["tokens"], row["tokens"] * row["kl"]) for row in found]
    totals = [sum(column) or 1.0 for column in zip(*sizes, strict=True)]
    rows = []
    for row, own in zip(found, sizes, strict=True):
        back = f"{row['from']:,} to {row['to']:,}" if row["to"] else f"over {row['from'] - 1:,}"
        tokens, kl = (percent(size / total) for size, total in zip(own, totals, strict=True))
        rows.append((back if row["from"] else "new", tokens, *compared(row, form), kl))
    return rows


def repeats_table(found: Sequence[dict[str, Any]]) -> None:
    """`repeat_rows`, where there are any."""
    if found:
        first, *others = REPEATED
        columns = {first: "short"} | dict.fromkeys(others, "number")
        title = "perplexity by how far back the same two tokens last stood together"
        console().print(table(columns, repeat_rows(found, ".3f"), title))


# What models write by themselves, as `linearize eval --generate` measures it.
WRITTEN_FREELY = {"recall": "recall written freely", "repeated": "written tokens that repeat (runs of 4)"}


def note_below(ppl_ratio: float | None) -> str:
    """A note where a student has less perplexity than its teacher; empty where it has not."""
    if ppl_ratio is None or ppl_ratio > 0.995:  # nearer to 1 is noise
        return ""
    return (
        "note: a perplexity below the teacher's makes no better model. A weak teacher may gain from a window by "
        "itself, and training on text more like this one lowers it, too. How close the student is, the KL says"
    )


def note_of_rows(stages: list[dict[str, Any]], teacher_ppl: float | None) -> str:
    """A note where stages were measured on other rows than the teacher at the start; empty where none was."""
    others = [
        f"{row['teacher_ppl']:.4g} ({row['name']})"
        for row in stages
        if teacher_ppl and row.get("teacher_ppl") and abs(row["teacher_ppl"] / teacher_ppl - 1) > OTHER_ROWS
    ]
    if not others:
        return ""
    return f"note: in the rows of other stages the teacher's perplexity is {', '.join(others)}; x teacher is over that"


def empty_tasks(result: dict[str, Any] | None) -> list[str]:
    """Tasks of a result of `linearize eval` of which the teacher finds 0 % at every length, as tables round it."""
    asked = {task: (result or {}).get(task) or [] for task in ("recall", "needle")}
    return [
        task for task, rows in asked.items() if rows and not any(round(100 * r["teacher"]["accuracy"]) for r in rows)
    ]


def empty_tasks_note(result: dict[str, Any] | None) -> str:
    """That such tasks compare nothing; empty where there are none."""
    tasks = empty_tasks(result)
    compare = "compares" if len(tasks) == 1 else "compare"
    return f"{' and '.join(tasks)} {compare} nothing here: the teacher itself finds 0 %" if tasks else ""


def asked_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What student and teacher were asked, and what they wrote by themselves: name, student, teacher."""
    rows = []
    for task in ("recall", "needle"):
        for row in result.get(task) or ():
            entries = f", {row['entries']} entries" if task == "recall" else ""
            student, teacher = (percent(row[who]["accuracy"]) for who in ("student", "teacher"))
            rows.append((f"{task} at {row['length']:,} tokens{entries}", student, teacher))
    free: dict[str, Any] = result.get("generated") or {}
    for key, words in WRITTEN_FREELY.items() if free else ():
        if free["teacher"][key] is not None:
            lists = f"{counted(free['rows'], 'list')} of {free['length']:,} tokens"
            count = lists if key == "recall" else counted(free["texts"], "text")
            rows.append((f"{words}, {count}", percent(free["student"][key]), percent(free["teacher"][key])))
    if answers := free.get("answers"):
        count = counted(answers["asked"], "question")
        ended = {who: percent(answers[who]["ended"]) for who in ("student", "teacher")}
        rows.append((f"answers that end, {count}", ended["student"], ended["teacher"]))
        rows.append(("ends an answer where the teacher ends it", percent(answers["same_end"]), ""))
    return rows


def written_dtypes(dtypes: dict[str, str]) -> str:
    """In which dtype student and teacher were measured: `float32`, or each apart."""
    if len({*dtypes.values()}) == 1:
        return next(iter(dtypes.values()))
    return ", ".join(f"{who} in {dtype}" for who, dtype in dtypes.items())


def task_rows(result: dict[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Headings and rows, one a metric, of a result of `linearize eval --tasks`; of a group its means alone."""
    who = ["student", *(["teacher"] if result["teacher"] else [])]
    rows: list[tuple[str, ...]] = []
    for row in result["tasks"]:
        numbers = ["" if row[key] is None else f"{row[key]:,}" for key in ("few_shot", "rows")]
        for one in row["metrics"] if row["part_of"] is None else ():
            name = one["metric"] if one["filter"] == "none" else f"{one['metric']}, {one['filter']}"
            rows.append((row["task"], name, *numbers, *(with_error(one, which) for which in who)))
    return ["task", "metric", "few-shot", "rows", *who], rows


def with_error(metric: dict[str, Any], who: str) -> str:
    """A value of a task's metric, with its standard error where the harness has one."""
    value, error = metric.get(who), metric.get(f"{who}_error")
    if value is None:
        return ""
    if error is None or abs(value) >= 1e6:  # a perplexity of an untrained model has twenty digits
        return f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")
    return f"{value:.3f} ± {error:.3f}"


def prediction_table(predictions: dict[str, list[dict[str, float]]]) -> None:
    """Errors of a diffusion transformer's predictions against its teacher's, by noise level."""
    columns = {"noise level": "number", **{f"error, {name}": "number" for name in predictions}, "cosine": "number"}
    last = list(predictions.values())[-1]
    rows: list[tuple[str, ...]] = []
    for number, row in enumerate(last):
        errors = [f"{one[number]['error']:.3f}" for one in predictions.values()]
        rows.append((f"{row['level']:g}", *errors, f"{row['cosine']:.3f}"))
    console().print(table(columns, rows, "predictions: |student - teacher| / |teacher|"))
