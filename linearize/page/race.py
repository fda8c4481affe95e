"""`linearize race`: the figures of its contestants, one table, and one page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import __version__
from ..terminal.output import duration, nats, percent, ranges, size
from ..terminal.tables import WRITTEN_FREELY
from . import html
from .compare import drawn_sections
from .html import Section
from .record import RunRecord

CACHED = (512, 32768)  # tokens of a text whose state is in the table
TASKS = {"recall": "recall", "needle": "needles"}


@dataclasses.dataclass(frozen=True)
class Lane:
    """A contestant as its folders tell it: `runs` one after the other, and its method in words."""

    name: str
    runs: tuple[RunRecord, ...]
    about: Mapping[str, str]

    @property
    def last(self) -> RunRecord:
        """The run that ended with the student."""
        return self.runs[-1]

    @property
    def tokens(self) -> int:
        """Tokens that it trained on in all runs, as their metrics say."""
        return sum(run.tokens for run in self.runs)

    @property
    def evaluation(self) -> dict[str, Any]:
        """What `compare` measured."""
        return self.last.evaluation or {}


def results(lanes: Sequence[Lane]) -> dict[str, Any]:
    """What race.json has of contestants and their teacher, whose figures are those beside the first one."""
    rows = [row(lane) for lane in lanes]
    return {"tokens": rows[0]["tokens"], "teacher": teacher_row(lanes[0]), "contestants": rows}


def row(lane: Lane) -> dict[str, Any]:
    """One contestant in numbers.

    `train_s` are seconds of training steps, `all_s` those of the whole contestant: conversion, choice of layers,
    training and its evaluations; None where it ran in several goes.
    """
    found, plan = lane.evaluation, lane.last.plan
    spent = [run.seconds(stage["name"]) or 0.0 for run in lane.runs for stage in run.stages]
    return {
        "name": lane.name,
        **lane.about,
        "mechanisms": sorted({step.mechanism for step in plan.linear}) if plan else [],
        "kept": plan.softmax_layers if plan else [],
        "tokens": lane.tokens,
        "train_s": sum(spent),
        "all_s": found.get("seconds"),
        **{key: found[key] for key in ("ppl_ratio", "kl", "top1_agreement")},
        **measures(found, "student"),
        "state": {str(n): plan.cache_bytes(n)["converted"] for n in CACHED} if plan else {},
    }


def teacher_row(lane: Lane) -> dict[str, Any]:
    """The teacher in the same numbers."""
    plan = lane.last.plan
    state = {str(n): plan.cache_bytes(n)["source"] for n in CACHED} if plan else {}
    dtype = plan.dtype if plan else None
    return {"name": lane.last.base, **measures(lane.evaluation, "teacher"), "state": state, "state_dtype": dtype}


def measures(found: Mapping[str, Any], who: str) -> dict[str, Any]:
    """What is measured of student and teacher alike: perplexity, tasks by length, and what they write."""
    tasks = {task: {str(one["length"]): one[who]["accuracy"] for one in found[task]} for task in TASKS}
    return {"ppl": found[f"{who}_ppl"], **tasks, "written": (found.get("generated") or {}).get(who)}


# ---------------------------------------------------------------- the table


class Table(NamedTuple):
    """A row for the teacher and for each contestant."""

    title: str
    columns: dict[str, str]
    rows: Sequence[tuple[str, ...]]


def race_tables(found: Mapping[str, Any]) -> list[Table]:
    """How near the students are and what they cost, then what they recall, write and hold."""
    teacher, ones = found["teacher"], found["contestants"]
    near = [("teacher", "softmax", "all", f"{teacher['ppl']:.3f}", "1", "0", "", "", "")]
    for one in ones:
        kept = ranges(one["kept"]) or "none"
        figures = (f"{one['ppl']:.3f}", f"{one['ppl_ratio']:.4f}", nats(one["kl"]), percent(one["top1_agreement"]))
        times = (duration(one["train_s"]), duration(one["all_s"]) if one["all_s"] else "")
        near.append((one["name"], " and ".join(one["mechanisms"]).upper(), kept, *figures, *times))
    columns = {"": "short", "attention": "text", "kept": "text"}
    columns |= dict.fromkeys(("ppl", "x teacher", "KL", "same token", "train", "in all"), "number")
    does = []
    for one in ({**teacher, "name": "teacher"}, *ones):
        tasks = (" ".join(f"{100 * share:.0f}" for share in one[task].values()) for task in TASKS)
        free = (percent((one["written"] or {}).get(key)) for key in WRITTEN_FREELY)
        sizes = (size(one["state"][str(tokens)]) if one["state"] else "" for tokens in CACHED)
        does.append((one["name"], *tasks, *free, *sizes))
    titles = ("recall", "needles", "unaided", "Python", "repeats", *(f"at {count:,}" for count in CACHED))
    lengths = ", ".join(teacher["recall"])
    about = f"recall and needles in % at {lengths} tokens; what each writes by itself; bytes of state by tokens"
    about += f", {teacher['state_dtype']}" if teacher["state_dtype"] else ""
    return [
        Table(f"{title(found)}; KL in nats a token", columns, near),
        Table(about, {"": "short"} | dict.fromkeys(titles, "number"), does),
    ]


def title(found: Mapping[str, Any]) -> str:
    """What was raced, in a sentence."""
    return f"{found['teacher']['name']}, {found['tokens']:,} training tokens each"


# ---------------------------------------------------------------- the page


def race_page(lanes: Sequence[Lane], found: Mapping[str, Any]) -> str:
    """The HTML file of a race."""
    first, devices = lanes[0].evaluation, " and ".join(sorted({lane.evaluation["device"] for lane in lanes}))
    read = first.get("read", first["tokens"])  # earlier versions did not say
    words = (
        f"Each is measured beside the teacher on {read:,} held-out tokens, on {devices}. Train is the time of steps; "
        "in all has conversion, the choice of layers and evaluations, too. Unaided is recall where its own answers "
        "stay in the text, Python is what still parses, repeats are runs of four tokens that were written before. "
        "Samples and recipes are on the pages of the runs: linearize report."
    )
    tables = "".join(html.paragraph(f"{one.title}.") + html.table(one.columns, one.rows) for one in race_tables(found))
    sections = [
        Section("table", "Results", html.paragraph(words) + tables),
        *drawn_sections({lane.name: lane.runs for lane in lanes}),
        Section("methods", "Methods", methods(lanes)),
    ]
    foot = f"Written by linearize {__version__}: linearize race."
    return html.page("Methods of conversion compared", f"{title(found)}.", {}, sections, foot)


def methods(lanes: Sequence[Lane]) -> str:
    """What each contestant does, from where, and what stands in for what."""
    told = ((one.name, *(one.about[key] for key in ("source", "about", "differs"))) for one in lanes)
    words = "".join(html.paragraph(f"{name} ({source}): {about}. {differs}") for name, source, about, differs in told)
    columns = {"contestant": "text", "stage": "text", "trained": "text"} | dict.fromkeys(("tokens", "time"), "number")
    rows = []
    for lane in lanes:
        for number, run in enumerate(lane.runs, 1):
            where = f"{lane.name}, round {number}" if len(lane.runs) > 1 else lane.name
            for stage in run.stages:
                tokens = max((one["tokens"] for one in run.entries if one["stage"] == stage["name"]), default=0)
                spent = duration(run.seconds(stage["name"]) or 0.0)
                rows.append((where, stage["name"], ", ".join(stage["train"]), f"{tokens:,}", spent))
    return words + html.table(columns, rows)
