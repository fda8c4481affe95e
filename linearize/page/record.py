"""A run as its folder tells it, finished or not: a value that pages, tables and cards are made of."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..checkpoint.manifest import read_plan
from ..errors import MALFORMED, LinearizeError, absent, check_file, json_object, no_such_run, quoted, undamaged
from ..plan.plan import Plan
from ..recipe.data import unit_of
from ..recipe.recipe import Recipe, portable
from ..train.runs import is_entry, read_lines

RUN, EVAL, FINAL = "run.json", "eval.json", "final"
PATH = re.compile(r"(?<![\w.~/])~?/[^\s'\",:;)]+")  # of this machine, in a sentence


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """`settings` is run.json; `entries` are the lines of metrics.jsonl; `report` is empty until the run is finished;
    `plan` is None where no converted model is left; `evaluation` is what `linearize eval -o` wrote."""

    folder: Path
    settings: dict[str, Any]
    recipe: Recipe | None
    entries: list[dict[str, Any]]
    report: dict[str, Any]
    plan: Plan | None
    evaluation: dict[str, Any] | None

    teacher = False  # of a model beside runs

    @property
    def name(self) -> str:
        return str(self.values.get("name", self.folder.name))

    @property
    def values(self) -> dict[str, Any]:
        """The resolved recipe; empty where run.json was cut short."""
        return dict(self.settings.get("recipe") or {})

    @property
    def base(self) -> str:
        """The model that the run started from, without a path of this machine; empty where run.json was cut short."""
        base = portable(self.values.get("model", {}).get("base", ""))
        if not isinstance(base, dict):
            return str(base)
        config = base["config"]
        return f"random {config['model_type'] if isinstance(config, dict) else config}"

    @property
    def unit(self) -> str:
        """What the run counts: images or tokens."""
        return unit_of((self.values.get("data") or {}).get("train"))

    def of_teacher(self, key: str) -> float | None:
        """A figure of the teacher on held-out data, as the run began."""
        return next((entry.get(f"eval_{key}") for entry in self.entries if entry["stage"] == "teacher"), None)

    def of_student(self, key: str) -> float | None:
        """The same figure of the run's last evaluation that has it."""
        curve = self.curve(f"eval_{key}")
        return curve[-1][1] if curve else None

    @property
    def teacher_accuracy(self) -> float | None:
        """The share of held-out targets that the teacher put first."""
        return self.of_teacher("accuracy")

    @property
    def accuracy(self) -> float | None:
        """That of the student."""
        return self.of_student("accuracy")

    @property
    def plain(self) -> bool:
        """Whether a random model was trained that keeps its softmax."""
        return self.recipe is not None and self.recipe.plain

    @property
    def finished(self) -> bool:
        return bool(self.settings.get("finished", True)) and bool(self.report)

    @property
    def teacher_ppl(self) -> float | None:
        """The teacher's held-out perplexity, on the rows of the last evaluation where that notes it."""
        last = self.rated()[-1:]
        return (last[0].get("eval_teacher_ppl") if last else None) or self.of_teacher("ppl")

    @property
    def notes(self) -> list[str]:
        """What whoever reads the figures should know, as the run and `linearize eval` told it when they were made; of
        paths on this machine the last part."""
        found = []
        if few := self.settings.get("max_steps"):
            found.append(f"--max-steps {few} ended each stage after {few} steps at most")
        for part in self.settings.get("parts") or ():
            name, changed = self.stages[part["stage"]]["name"], "; ".join(part["changed"])
            found.append(f"after step {part['step']} of {name} the run went on with other settings: {changed}")
        measured = (self.evaluation or {}).get("notes") or ()
        told = [note.removeprefix("note: ") for note in [*found, *(self.settings.get("notes") or ())]]
        told += [f"linearize eval: {note.removeprefix('note: ')}" for note in measured]
        return [PATH.sub(lambda path: Path(path[0]).name, note) for note in told]

    @property
    def stages(self) -> list[dict[str, Any]]:
        """The recipe's stages."""
        return list(self.values.get("stages") or [])

    def begins(self) -> dict[str, int]:
        """How many tokens the run had trained on when each stage began."""
        found, total = {}, 0
        for stage in self.stages:
            found[stage["name"]] = total
            total += max((entry["tokens"] for entry in self.entries if entry["stage"] == stage["name"]), default=0)
        return {"converted": 0, **found}

    @property
    def tokens(self) -> int:
        """Tokens that the run has trained on."""
        begins = self.begins()
        return max((begins[one["stage"]] + one["tokens"] for one in self.entries if one["stage"] in begins), default=0)

    def curve(self, key: str, stage: str | None = None) -> list[tuple[float, float]]:
        """(tokens since the run began, value) of a key in metrics.jsonl, of one stage or of all."""
        begins, found = self.begins(), []
        for entry in self.entries:
            value = entry.get(key)
            known = entry["stage"] in begins and stage in (None, entry["stage"])
            if known and isinstance(value, int | float):
                found.append((float(begins[entry["stage"]] + entry["tokens"]), float(value)))
        return found

    def same_blocks(self, stage: str) -> bool:
        """Whether a stage is evaluated on the text that the teacher was, in blocks of the same length: on those of the
        first stage."""
        own = {one["name"]: one.get("data") or {} for one in self.stages}
        first = next(iter(own), stage)
        if stage not in own or stage == first:  # `teacher` and `converted` are on those, too
            return True
        return own[stage].get("eval") == own[first].get("eval") and self.block(stage) == self.block(first)

    def block(self, stage: str = "") -> int | None:
        """Tokens of a block, by a stage's own data or by those of all stages; None where the run did not note them."""
        own = next((one.get("data") or {} for one in self.stages if one["name"] == stage), {})
        shared = self.values.get("data", {}).get("pack", {}).get("seq_len")
        return (own.get("pack") or {}).get("seq_len") or shared

    def seconds(self, stage: str) -> float | None:
        """Seconds of a stage from its first step to its last, with the evaluations between; None before its first.

        A rate is that of the process that noted it, `since` the step from which it went on."""
        rated = [entry for entry in self.entries if entry["stage"] == stage and entry.get("tokens_per_s")]
        ends = {entry.get("since", 0): entry for entry in rated}  # the last step of each process
        took = (e["tokens"] * (1 - since / e["step"]) / e["tokens_per_s"] for since, e in ends.items())
        return sum(took) if rated else None

    def layers(self, when: str) -> dict[int, float]:
        """Relative squared error of each layer's output: `before`, as converted, or `after`."""
        rows = self.report.get("layers") if when == "after" else None
        if when == "before":
            rows = next((entry["layers"] for entry in self.entries if entry.get("layers")), None)
        return {row["layer"]: row["relative_mse"] for row in rows or ()}

    @property
    def ppl(self) -> float | None:
        """Held-out perplexity at the last evaluation."""
        return self.of_student("ppl")

    @property
    def needles(self) -> float | None:
        """The share of needles found in `linearize eval`, mean over lengths."""
        return mean_needles(self.evaluation, "student")

    def bytes_at(self, tokens: int) -> int | None:
        """Bytes of state and cache of one sequence after `tokens` tokens; None without a plan."""
        return self.plan.cache_bytes(tokens)["converted"] if self.plan else None

    def ratio(self) -> float | None:
        """Held-out perplexity over the teacher's, at the last evaluation; None where that saw other blocks of text."""
        rated = self.rated()
        beside = self.beside(rated[-1]) if rated else None
        return float(rated[-1]["eval_ppl"]) / beside if beside else None

    def rated(self) -> list[dict[str, Any]]:
        """The student's evaluations that have a perplexity."""
        known = self.begins()
        return [entry for entry in self.entries if entry["stage"] in known and entry.get("eval_ppl")]

    def beside(self, entry: dict[str, Any]) -> float | None:
        """The teacher's perplexity on the rows of an evaluation; None where the run noted that of other rows alone, as
        earlier versions did."""
        own = entry.get("eval_teacher_ppl")
        return own or (self.of_teacher("ppl") if self.same_blocks(entry["stage"]) else None)

    def over_teacher(self) -> list[tuple[float, float]]:
        """(tokens since the run began, held-out perplexity over the teacher's on the same rows)."""
        begins = self.begins()
        found = [(begins[one["stage"]] + one["tokens"], one["eval_ppl"], self.beside(one)) for one in self.rated()]
        return [(float(tokens), float(ppl) / beside) for tokens, ppl, beside in found if beside]


def mean_needles(evaluation: dict[str, Any] | None, who: str) -> float | None:
    """The share of needles that `who`, student or teacher, found in an evaluation, mean over lengths."""
    found = [row[who]["accuracy"] for row in (evaluation or {}).get("needle") or ()]
    return sum(found) / len(found) if found else None


def progress(run: RunRecord) -> str:
    """`finished`, or the stage and step that a run is at; of a finished run also that its model is not there now."""
    if run.finished:
        few = f" with --max-steps {run.settings['max_steps']}" if run.settings.get("max_steps") else ""
        return f"finished{few}" + ("" if (run.folder / FINAL).is_dir() else f", but {FINAL}/ is gone")
    names = [stage["name"] for stage in run.stages]
    steps = [entry for entry in run.entries if entry["stage"] in names]
    return f"{steps[-1]['stage']} step {steps[-1]['step']}" if steps else "begun"


@dataclasses.dataclass(frozen=True)
class ModelRecord(RunRecord):
    """A model beside runs: a student that `linearize eval` measured, or a `teacher` as a run or an evaluation saw it.

    It has no training. `evaluation` has the figures of both; `taught` is a run that saw its teacher.
    """

    named: str = ""
    teacher: bool = False
    taught: RunRecord | None = None

    @property
    def name(self) -> str:
        return self.named

    @property
    def base(self) -> str:
        known = (self.evaluation or {}).get("teacher") or (self.plan.source if self.plan else "")
        return "" if self.teacher else str(portable(known))

    @property
    def finished(self) -> bool:
        return True

    @property
    def unit(self) -> str:
        kind = (self.evaluation or {}).get("kind")
        return self.taught.unit if self.taught and not kind else "images" if kind == "images" else "tokens"

    def of_teacher(self, key: str) -> float | None:
        seen = self.taught.of_teacher(key) if self.taught else None
        return (self.evaluation or {}).get(f"teacher_{key}") if seen is None else seen

    def of_student(self, key: str) -> float | None:
        return self.of_teacher(key) if self.teacher else (self.evaluation or {}).get(f"student_{key}")

    @property
    def needles(self) -> float | None:
        return mean_needles(self.evaluation, "teacher" if self.teacher else "student")

    def bytes_at(self, tokens: int) -> int | None:
        return self.plan.cache_bytes(tokens)["source" if self.teacher else "converted"] if self.plan else None

    def ratio(self) -> float | None:
        return self.ppl / self.teacher_ppl if self.ppl and self.teacher_ppl else None


def read_run(folder: Path, evaluation: Path | None = None, plan: Plan | None = None) -> RunRecord:
    """The run in `folder`; `evaluation` is a file that `linearize eval -o` wrote, else the folder's eval.json.
    `plan` is by what its model was converted, where the caller knows.

    Raises LinearizeError (exit 2) for a folder that is no run, and for files that are damaged.
    """
    path = folder / RUN
    if not path.is_file():
        raise no_run(folder)
    with undamaged(path, "Restore it"):
        settings = json_object(path)
    recipe = None
    with contextlib.suppress(ValidationError):  # of a version that had other keys
        recipe = Recipe.model_validate(settings.get("recipe"))
    report: dict[str, Any] = {}
    if (folder / "report.json").is_file():
        with undamaged(folder / "report.json", "Restore it"):
            report = json_object(folder / "report.json")
    entries = [line for line in read_lines(folder / "metrics.jsonl") if is_entry(line)]
    with whole(folder):
        plan = plan or find_plan(folder, settings)
    return RunRecord(folder, settings, recipe, entries, report, plan, read_evaluation(folder, evaluation))


def whole(run: Path) -> contextlib.AbstractContextManager[None]:
    """Within: what the files of a run say is used, and they may say anything. Raises LinearizeError (exit 2)."""
    return undamaged(run, f"Restore its {RUN}, metrics.jsonl, report.json and {EVAL}")


def no_run(folder: Path) -> LinearizeError:
    """What to say of a folder that is no run: where it may be instead."""
    if not folder.exists():
        return no_such_run(folder)
    for parent in folder.resolve().parents[:1]:
        if (parent / RUN).exists():
            return LinearizeError(f"{folder} is a part of a run; give the run itself: {parent}")
    known = [str(path) for path in find_runs(folder)]
    listed = f" It holds the runs {', '.join(known[:5])}." if known else ""
    what = f"{folder} is no run of linearize finetune: it has no {RUN}"
    return LinearizeError(f"{what}.{listed} linearize runs lists runs")


def find_runs(folder: Path) -> list[Path]:
    """Folders of runs below `folder`, the newest first; folders within runs are not looked at."""
    found = [path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{RUN}")]
    return sorted(found, key=lambda path: (path / RUN).stat().st_mtime, reverse=True)


def find_plan(folder: Path, settings: dict[str, Any]) -> Plan | None:
    """By what a run's model was converted: as its own folders say, or its base's where that is a folder."""
    base = (settings.get("recipe") or {}).get("model", {}).get("base", "")
    for place in (folder / "converted", folder / FINAL, *([Path(base)] if isinstance(base, str) else [])):
        with contextlib.suppress(LinearizeError, OSError, *MALFORMED):
            return read_plan(place)
    return None


def read_evaluation(folder: Path, path: Path | None) -> dict[str, Any] | None:
    """What `linearize eval -o` wrote. None where no file was named and a run has no eval.json, or one of a student with
    a part switched off, whose figures are not those of its model."""
    if path is None and not (folder / EVAL).is_file():
        return None
    named, path = path is not None, path or folder / EVAL
    if not path.is_file():
        raise absent(path)
    check_file(path)
    with undamaged(path, f"Write it again: linearize eval STUDENT --teacher MODEL -o {quoted(path)}"):
        found = json.loads(path.read_text("utf-8"))
        if "tasks" in found:
            raise LinearizeError(
                f"{path} has what eval --tasks measured, which linearize push puts into the card. For the page, "
                "measure perplexity and KL: linearize eval STUDENT --teacher MODEL -o ANOTHER"
            )
        if found.get("without") and not named:
            return None
        if found.get("kind") == "embeddings":
            raise LinearizeError(f"{path} compares vectors of encoders, and a page has no place for that")
        if found.get("kind") in ("images", "masked"):
            if "kl" not in found:
                raise ValueError("no kl, which linearize eval -o writes")
            return dict(found)
        if "student_ppl" not in found or "teacher_ppl" not in found:
            raise ValueError("no student_ppl and teacher_ppl, which linearize eval -o writes")
        return dict(found)
