"""A run's folder: resolved recipe, metrics, checkpoints that survive a kill, and where to resume.

run.json          resolved recipe, versions, and hashes of what is trained on and from
.lock             held by the process that runs, whose number is in it
converted/        the converted base (absent when the base was converted already, by this version)
cache/            tokenised data
checkpoints/      <stage>-<step>/, complete or absent: written beside and renamed
best/             the weights with the lowest KL so far, where finish.keep is best
metrics.jsonl     one JSON object per step or evaluation
report.json       the figures of a finished run
final/            the finished model
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError
from safetensors import SafetensorError

from ..checkpoint.atomic import foreign_files, write_atomically
from ..checkpoint.manifest import CARD, base_hashes
from ..checkpoint.shards import file_hashes, sha256
from ..demo import DEMO, named_base
from ..errors import LinearizeError, check_file, json_object, os_error, quoted, redact, some, undamaged, writing
from ..plan.plan import Plan
from ..recipe.data import rooted, unit_of
from ..recipe.recipe import Recipe, diff_resolved, fixed, per_step, weight_settings
from ..recipe.renamed import present_keys
from ..terminal.output import finite

UNBORN = "run.json.tmp"  # all that a run leaves which was killed before it had a name
LOCK = ".lock"
WEIGHTS, OPTIMIZER, POSITION = "trained.safetensors", "optimizer.pt", "position.json"
BEST = "best.json"
# What a checkpoint consists of; anything else in its folder is somebody's own.
CHECKPOINT_FILES = (WEIGHTS, OPTIMIZER, POSITION, f"{POSITION}.tmp", BEST, f"{BEST}.tmp")
RECORDS = ("run.json", "metrics.jsonl", "report.json")
START_OVER = "Start over with `--resume never`, or choose another name or output_dir"
# How a message begins that whoever reads the figures later should know, too.
NOTES = ("note: ", "warning: ")
# Figures one of which every evaluation has: of answers with labels, of maps of classes, of maps of numbers.
EVALUATED = ("eval_ppl", "eval_agreement", "eval_error")


@dataclasses.dataclass(frozen=True)
class Position:
    """How far a run is: `step` optimizer steps of stage number `stage` are done; `done` when that stage is over."""

    stage: int
    step: int
    tokens: int
    done: bool


class Run:
    """One run's folder, not written to before `start`.

    `resume_from` is the checkpoint to continue from, None for a start from scratch. Raises LinearizeError (exit 2)
    for a folder of another recipe or of something else, and for a checkpoint that is not its own.
    """

    def __init__(self, recipe: Recipe, resume: str, max_steps: int | None = None) -> None:
        self.folder = Path(recipe.output_dir)
        self.recipe, self.max_steps = recipe, max_steps
        self.checkpoints = self.folder / "checkpoints"
        self.metrics = self.folder / "metrics.jsonl"
        self.resume, self.resume_from = resume, None
        self._lock: IO[str] | None = None
        self._notes: dict[str, None] = {}  # of this start
        self._started = False
        if self.record.exists():
            self._check_unchanged()
            self.resume_from = self._resume_point()
        elif self.folder.exists() and (
            not self.folder.is_dir() or {f.name for f in self.folder.iterdir()} - {UNBORN, LOCK}
        ):
            raise LinearizeError(f"{self.folder} exists and is no run of linearize; choose another output_dir")
        elif resume not in ("auto", "never"):
            raise LinearizeError(f"--resume {resume}: there is no run in {self.folder} yet")

    @property
    def record(self) -> Path:
        """What the run was started with."""
        return self.folder / "run.json"

    @property
    def converted(self) -> Path:
        return self.folder / "converted"

    @property
    def final(self) -> Path:
        return self.folder / "final"

    @property
    def best(self) -> Path:
        """The weights of the last stage with the lowest KL, where the recipe keeps the best."""
        return self.folder / "best"

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do, unless an earlier checkpoint is named.

        A start over leaves the finished model of before in its place until the new one is ready.
        """
        return self.resume == "auto" and self.final.exists() and self._read_record().get("finished", True)

    @property
    def has_converted(self) -> bool:
        """Whether an earlier start left the converted base, which appears only when it is complete."""
        return self.resume != "never" and self.converted.exists()

    # ------------------------------------------------------------ where to resume

    def _check_unchanged(self) -> None:
        if self.resume == "never":
            return
        with self._undamaged_record():
            record = json.loads(self.record.read_text("utf-8"))
            old = per_step(recorded(record), record["processes"])
            new = per_step(self.recipe.resolved(), processes())
            looser = diff_resolved(fixed(old), fixed(new))
            newest = max(self.complete_checkpoints(), key=order, default=None)
            place = newest if self.resume == "auto" else self._named()
            over = place is not None and self._is_end(place)  # with no step left that new values could train
            strict = self.resume == "auto" or over
            changes = diff_resolved(weight_settings(old), weight_settings(new)) if strict else looser
            if record["max_steps"] != self.max_steps:
                changes.append(f"--max-steps {record['max_steps'] or 'none'} -> {self.max_steps or 'none'}")
                looser = changes
        if changes:
            also = ""
            if not looser and newest is not None and not over:
                also = f"--resume {quoted(newest)} goes on from there with these values. "
            if self.final.exists():
                also += f"To train the finished model on: another name with model.base={self.final} convert=null. "
            raise LinearizeError(
                f"recipe changed since this run ({'; '.join(changes[:4])}{' ...' if len(changes) > 4 else ''}). "
                f"{also}{START_OVER}, or restore the recipe"
            )

    def _undamaged_record(self) -> contextlib.AbstractContextManager[None]:
        return undamaged(self.record, "Restore it, start over with --resume never, or choose a new output_dir")

    def _read_record(self) -> dict[str, Any]:
        """run.json, empty where there is none."""
        with self._undamaged_record():
            return json_object(self.record) if self.record.exists() else {}

    def _named(self) -> Path | None:
        """The checkpoint of this run that `resume` names."""
        asked = Path(self.resume).resolve()
        return next((path for path in self.complete_checkpoints() if path.resolve() == asked), None)

    def _is_end(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is that of the last stage's end."""
        position = read_position(checkpoint)
        return position.done and position.stage == len(self.recipe.stages) - 1

    def _resume_point(self) -> Path | None:
        if self.resume == "never":
            return None
        known = sorted(self.complete_checkpoints(), key=order)
        if self.resume == "auto":
            return known[-1] if known else None
        if named := self._named():
            return named
        newest = ", ".join(str(p) for p in known[-3:])
        raise LinearizeError(f"--resume {self.resume} is no checkpoint of this run. Newest here: {newest or 'none'}")

    def commit(self) -> str | None:
        """The Hub's commit that this run's base is of, as its first start noted; None of a folder."""
        return self._read_record().get("commit")

    def teacher(self) -> dict[str, Any] | None:
        """The facts of the recipe's own teacher, as the run's start noted them; None without one."""
        return self._read_record().get("teacher")

    def teacher_commit(self) -> str | None:
        """The Hub's commit of that teacher as the run began; None of a folder, and for a start from scratch."""
        return None if self.resume == "never" else (self.teacher() or {}).get("commit")

    def start(
        self,
        versions: dict[str, str],
        commit: str | None = None,
        data: Mapping[str, str] | None = None,
        base: Path | None = None,
        teacher: dict[str, Any] | None = None,
    ) -> list[str]:
        """Create the folder, and clear what lies beyond the resume point or was left by a kill. Returns notes to print.

        `data` has a hash of each source of the recipe by its name there; `base` is the folder of the model that
        training starts from, None before it is converted; `teacher` has the facts of the recipe's own. Raises
        LinearizeError (exit 2), before anything changes, when they are not those that the run began with, when the
        checkpoint to resume from is damaged, and for files to be removed that linearize did not write.
        """
        old = {} if self.resume == "never" else self._read_record()
        known = old.get("data", {}) if data is None else data
        inputs: dict[str, Any] = {"data": dict(known), "base": {} if base is None else base_hashes(base)}
        inputs["teacher"] = teacher
        with self._undamaged_record():
            changed = changes(old.get("data", {}), inputs["data"])
            if base is not None:
                changed += [str(base / name) for name in changes(old.get("base", {}), inputs["base"])]
            if old.get("teacher") is not None and old["teacher"] != teacher:
                changed.append(f"the teacher {old['teacher'].get('model')}")
        if changed:
            raise LinearizeError(
                f"changed since this run began: {some(changed)}. {START_OVER}, or restore what was there"
            )
        if self.resume_from is not None:
            check_checkpoint(self.resume_from)
        position = read_position(self.resume_from) if self.resume_from else None
        best = self.read_best()
        at = (position.stage, position.step) if position else (-1, 0)
        # Evaluated beyond the resume point: the run will come there again.
        stale = best is not None and (best[0].stage, best[0].step) > at
        if best is not None and not stale:
            check_checkpoint(self.best, BEST)
        leftovers = self._leftovers()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.resume == "never":
            shutil.rmtree(self.converted, ignore_errors=True)
        for path in leftovers:
            if path.parent == self.checkpoints:
                discard(path)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        if stale:
            discard(self.best)
        self._rewind_metrics(position)
        parts, mixed = ([], []) if position is None else self._parts(old, position)
        settings: dict[str, Any] = {
            "max_steps": self.max_steps,
            "processes": processes(),
            "folder": str(self.recipe.folder.absolute()),  # where its relative data files start
            "commit": commit,
            "finished": False,
        }
        settings["replaces"] = sorted(self.plain_files()) if self.final.exists() else []
        settings["notes"] = list(dict.fromkeys([*old.get("notes", []), *self._notes]))
        settings["parts"] = parts + mixed
        self._write_record({"recipe": self.recipe.resolved(), **settings, "versions": versions, **inputs})
        self._started = True
        told = [f"goes on with other settings: {'; '.join(one['changed'])}" for one in mixed]
        return changed_versions(old.get("versions", {}), versions) + told

    def noted(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """`say`; what begins with one of NOTES is written into run.json, too, once this process started the run."""

        def both(text: str) -> None:
            say(text)
            if text.startswith(NOTES):
                self._notes[redact(text)] = None
                if self._started:
                    record = self._read_record()
                    self._write_record({**record, "notes": list(dict.fromkeys([*record["notes"], *self._notes]))})

        return both

    def _parts(self, old: dict[str, Any], position: Position) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Where the settings changed so far: what changed beyond the resume point changes there now. And what is
        trained otherwise from there on than by the start before, as `recipe` has the settings of the last start."""
        here, at = {"stage": position.stage, "step": position.step}, (position.stage, position.step)
        parts = [one if (one["stage"], one["step"]) <= at else {**one, **here} for one in old.get("parts", [])]
        changed = diff_resolved(*(weight_settings(recipe) for recipe in (recorded(old), self.recipe.resolved())))
        return parts, [{**here, "changed": changed}] if changed else []

    def _leftovers(self) -> list[Path]:
        """What a start removes: checkpoints beyond the resume point, and what a kill left.

        Raises LinearizeError (exit 2) where files that linearize did not write would go along, or would be in the way
        of the finished model later.
        """
        folders = [path for path in self.checkpoints.iterdir() if path.is_dir()] if self.checkpoints.is_dir() else []
        kept = set()
        if self.resume_from is not None:
            kept = {path for path in self.complete_checkpoints() if order(path) <= order(self.resume_from)}
        removed = [path for path in folders if path not in kept]
        foreign = [path / name for path in removed for name in sorted(os.listdir(path)) if name not in CHECKPOINT_FILES]
        replaced = [self.final] if self.resume != "never" else [self.final, self.converted]
        known = self.plain_files()
        foreign += [path / name for path in replaced for name in foreign_files(path) if name not in known]
        if foreign:
            raise LinearizeError(
                f"{some(list(map(str, foreign)))}: linearize did not write that, and this start would remove it. Move "
                "it away, or choose a new output_dir"
            )
        halves = [self.folder / f"{name}.tmp" for name in RECORDS]
        halves += [self.folder / f".{place.name}.linearize.tmp" for place in (self.final, self.converted)]
        return removed + [path for path in (*halves, *self.folder.glob("cache/*.partial")) if path.exists()]

    def plain_files(self) -> set[str]:
        """Names of the files of a finished model that keeps its softmax, of this run or of one that it replaces: such a
        model has no linearize.json to list them."""
        record = self._read_record()
        replaced = set(record.get("replaces", []))
        asked = record.get("recipe") or {}
        plain = asked.get("convert") is None and isinstance((asked.get("model") or {}).get("base"), dict)
        return replaced | {*record.get("base", {}), CARD} if plain else replaced

    def _write_record(self, record: dict[str, Any]) -> None:
        write_atomically(self.record, json.dumps(record, indent=2))

    def note_base(self, base: Path | None) -> None:
        """Remember the files of the model that was written for this run just now; None while it is written."""
        self._write_record({**self._read_record(), "base": {} if base is None else base_hashes(base, new=True)})

    def finish(self) -> None:
        """Note that the finished model in its place is this run's, and let its copy go."""
        discard(self.best)
        self._write_record({**self._read_record(), "finished": True, "replaces": []})

    @contextlib.contextmanager
    def preparing(self, owner: bool) -> Iterator[None]:
        """Within: what fails leaves no folder behind that was not there before, unless a teacher has written text into
        it, which may have taken hours. One process is the `owner`.

        It locks the folder until `close` or its death. Raises LinearizeError (exit 2) when another process has it.
        """
        new = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        if owner:
            self._hold()
        try:
            yield
        except BaseException:
            if owner and new and not any(self.folder.glob("cache/own-*/*.jsonl")):
                shutil.rmtree(self.folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    for parent in new[1:]:
                        parent.rmdir()
            raise

    def _hold(self) -> None:
        """Lock the folder, unless it changed since this run looked where to resume."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            raise LinearizeError(
                f"{self.folder} is in use: process {self._lock.read()} runs in it. Wait for its end, or choose "
                "another output_dir"
            ) from error
        except OSError:  # a file system without locks
            return
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        if self.resume == "auto" and (self.finished or self._resume_point() != self.resume_from):
            raise LinearizeError(f"{self.folder} changed while this started: another process ran in it. Start again")

    def close(self) -> None:
        """Let the folder go."""
        if self._lock is not None:
            self._lock.close()

    # ------------------------------------------------------------ checkpoints

    def complete_checkpoints(self) -> list[Path]:
        """Checkpoints that were renamed into place; anything else is left over from a kill."""
        if not self.checkpoints.is_dir():
            return []
        return [p for p in self.checkpoints.iterdir() if (p / POSITION).exists() and not p.name.endswith(".tmp")]

    def save(self, position: Position, write: Callable[[Path], None]) -> Path:
        """A new checkpoint. Within a stage `checkpoint.save_total_limit` stay; once it is over, its end alone."""
        target = self.checkpoints / f"{self.recipe.stages[position.stage].name}-{position.step}{'-end' * position.done}"
        work = target.with_name(target.name + ".tmp")
        discard(work)
        newest = max(self.complete_checkpoints(), key=order, default="none")
        try:
            with writing(target, f". Last checkpoint: {newest}"):
                work.mkdir(parents=True)
                write(work)
                write_atomically(work / POSITION, json.dumps({**dataclasses.asdict(position), "files": hashes(work)}))
                for file in work.iterdir():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
                work.rename(target)
        finally:
            discard(work)
        within = sorted((p for p in self.complete_checkpoints() if not read_position(p).done), key=order)
        for old in within if position.done else within[: -self.recipe.checkpoint.save_total_limit]:
            discard(old)
        return target

    def save_best(self, position: Position, score: dict[str, float], write: Callable[[Path], None]) -> None:
        """The weights of the best evaluation so far, in place of those before; `score` is its line of metrics.jsonl."""
        work = self.best.with_name(f"{self.best.name}.tmp")
        discard(work)
        with writing(self.best):
            work.mkdir(parents=True)
            write(work)
            facts = {**dataclasses.asdict(position), "score": score, "files": hashes(work)}
            write_atomically(work / BEST, json.dumps(facts))
            discard(self.best)
            work.rename(self.best)

    def read_best(self) -> tuple[Position, dict[str, float]] | None:
        """How far the weights of `save_best` are, and their score; None where there are none."""
        if not (self.best / BEST).exists():
            return None
        with undamaged(self.best / BEST, f"Remove {self.best}"):
            score = dict(json_object(self.best / BEST)["score"])
        return read_position(self.best, BEST), score

    def scores(self, stage: int) -> list[dict[str, Any]]:
        """The evaluations of a stage so far, as `log` wrote them."""
        name = self.recipe.stages[stage].name
        return [line for line in self._entries() if line["stage"] == name and is_evaluation(line)]

    def last_rate(self, stage: str) -> float:
        """Tokens a second of the last step of a stage that was logged; 0 where there is none."""
        lines = [line for line in self._entries() if line["stage"] == stage]
        rates = [line["tokens_per_s"] for line in lines if isinstance(line.get("tokens_per_s"), int)]
        return float(rates[-1]) if rates else 0.0

    def steps_before(self, stage: str) -> int:
        """Optimizer steps of the stages before this one, as far as they were logged; 0 for what is no stage."""
        names = [one.name for one in self.recipe.stages]
        before = names[: names.index(stage)] if stage in names else []
        entries = self._entries()
        return sum(max((one["step"] for one in entries if one["stage"] == name), default=0) for name in before)

    def last_good(self, stage: int, step: int) -> Path | None:
        """The newest checkpoint from which training went on at least a step before that step of that stage failed."""
        good = [path for path in self.complete_checkpoints() if order(path)[:2] < (stage, step - 1)]
        return max(good, key=order, default=None)

    # ------------------------------------------------------------ metrics and report

    def report(
        self, layers: list[dict[str, float]], complete: bool, positions: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The run in figures, from metrics.jsonl: the last evaluation of each stage beside the teacher's."""
        found: dict[str, dict[str, Any]] = {}
        for entry in self._entries():
            if is_evaluation(entry):
                found[entry["stage"]] = entry
        teacher = found.pop("teacher", {})
        rows, tokens = [], 0
        for name, entry in found.items():
            tokens += entry["tokens"]
            ppl = entry.get("eval_ppl")
            row = {"name": name, "tokens": tokens, "eval_tokens": entry.get("eval_tokens"), "ppl": ppl}
            # Of the same rows; runs of earlier versions noted the first stage's alone.
            beside = entry.get("eval_teacher_ppl", teacher.get("eval_ppl"))
            row |= {"teacher_ppl": beside, "ppl_ratio": ppl / beside if beside and ppl is not None else None}
            row |= {what: entry.get(f"eval_{what}") for what in ("accuracy", "kl", "agreement", "error")}
            rows.append(row | {"calibrated": True} if entry.get("calibrated") else row)
        figures = {"teacher_ppl": teacher.get("eval_ppl"), "teacher_accuracy": teacher.get("eval_accuracy")}
        ran: dict[str, Any] = {"output": str(self.final) if complete else None, "max_steps": self.max_steps}
        ran["unit"] = unit_of(self.recipe.data.train)
        return {**ran, **figures, "stages": rows, "layers": layers, "positions": positions}

    def write_report(self, report: dict[str, Any]) -> None:
        """report.json, the figures of a finished run; `output` is a place in the run's folder, which may move."""
        stored = report | {"output": report["output"] and self.final.name}
        write_atomically(self.folder / "report.json", json.dumps(stored, indent=2))

    def read_report(self) -> dict[str, Any]:
        """report.json of a run that is finished."""
        path = self.folder / "report.json"
        with undamaged(path, f"Remove it and {self.final}, and the same command writes both again"):
            found = json_object(path)
            if "predictions" in found:  # of latents
                return {**found, "output": str(self.final)}
            # Which runs of earlier versions did not write.
            later = ("teacher_accuracy", "max_steps", "positions", "samples", "device", "teacher", "unit")
            known = {key: found[key] for key in ("teacher_ppl", "stages", "layers")}
            return {"output": str(self.final), **known, **{key: found.get(key) for key in later}}

    def log(self, **entry: Any) -> None:
        """Append one line to metrics.jsonl; what is not finite becomes null, JSON has no word for it."""
        with writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(entry)) + "\n")

    def _entries(self) -> list[dict[str, Any]]:
        """Those that `log` wrote; others may have been added by hand."""
        return [line for line in read_lines(self.metrics) if is_entry(line)]

    def _rewind_metrics(self, position: Position | None) -> None:
        """Drop lines after the resume point, so that a resumed run's metrics read as if it had never stopped."""
        if position is None:
            self.metrics.unlink(missing_ok=True)
            return
        names = [stage.name for stage in self.recipe.stages]
        kept = []
        for line in read_lines(self.metrics):
            stage = names.index(line["stage"]) if is_entry(line) and line["stage"] in names else -1
            if stage < 0 or (stage, line["step"]) <= (position.stage, position.step):
                kept.append(line)
        write_atomically(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))


def recorded(record: dict[str, Any]) -> dict[str, Any]:
    """The resolved recipe in run.json."""
    values = present_keys(record["recipe"])
    with contextlib.suppress(ValidationError):  # keys that an earlier version did not have get their defaults
        return Recipe.model_validate(values).resolved()
    return values


def heldout_of(run: Path, plan: Plan | None = None) -> tuple[list[str], str]:
    """Overrides by which `linearize eval` reads the data that a run is measured on, none where it names none, and the
    model that it converts, empty where that has no name. Where the run began from a converted model, that is what the
    student's `plan` says was converted.

    Raises LinearizeError (exit 2) for a run.json that is damaged.
    """
    with undamaged(run / "run.json", "Restore it"):
        settings = json_object(run / "run.json")
        recipe, start = settings["recipe"], Path(settings.get("folder", ""))
        base = model_from(recipe["model"]["base"], start) if recipe["convert"] else converted_from(plan, start)
        held, pack, most = recipe["data"]["eval"], recipe["data"]["pack"], recipe["eval"]["max_tokens"]
        read = {"data.eval": rooted(held, start), "data.pack": pack, "eval.max_tokens": most} if held else {}
    return [f"{key}={json.dumps(value)}" for key, value in read.items()], base if isinstance(base, str) else ""


def model_from(name: Any, start: Path) -> Any:
    """A model as a recipe names it, for another working directory than `start`, where its run began."""
    if not isinstance(name, str):
        return name
    folder = start / os.path.expanduser(named_base(name))
    return str(folder) if (folder / "config.json").is_file() else named_base(name)


def converted_from(plan: Plan | None, start: Path) -> str:
    """The model that a plan says was converted, as `--teacher` takes it: of a folder the plan has the name alone, which
    is looked for in `start` and here. Empty where it is in neither, and on the Hub neither."""
    if plan is None or not plan.source:
        return ""
    for place in (start / plan.source, Path(plan.source)):
        if (place / "config.json").is_file():
            return str(place)
    return named_base(plan.source) if plan.revision or plan.source == DEMO else ""


def read_lines(metrics: Path) -> list[dict[str, Any]]:
    """The objects in metrics.jsonl, without a line cut short by a kill. Raises LinearizeError (exit 2) for a pipe."""
    check_file(metrics)
    lines = []
    for line in metrics.read_text("utf-8", errors="replace").splitlines() if metrics.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]


def is_evaluation(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of metrics.jsonl has figures of held-out data: perplexity, or those of maps of images."""
    return any(entry.get(key) is not None for key in EVALUATED)


def is_entry(line: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl has what every line of `Run.log` has."""
    figures = [line[key] for key in EVALUATED if line.get(key) is not None]
    numbers = [line.get("step"), line.get("tokens"), *figures]
    return isinstance(line.get("stage"), str) and all(type(number) in (int, float) for number in numbers)


def changes(old: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of what has another hash than before, or none."""
    return sorted(name for name, value in old.items() if now.get(name) != value)


def changed_versions(old: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A note where packages were replaced since a run began; it may go on."""
    other = [f"{name} {version}, now {now.get(name)}" for name, version in old.items() if now.get(name) != version]
    return [f"note: this run began with {'; '.join(other)}: losses may differ a little"] if other else []


def hashes(folder: Path) -> dict[str, str]:
    """The hash of each file in a folder, by name."""
    return file_hashes(folder, sorted(folder.iterdir()))


def check_checkpoint(checkpoint: Path, record: str = POSITION) -> None:
    """Raise LinearizeError (exit 2) unless a checkpoint's files are as its `record` says that they were saved.

    Checkpoints of earlier versions have no hashes.
    """
    with undamaged(checkpoint / record, earlier(checkpoint)):
        saved = dict(**json.loads((checkpoint / record).read_text("utf-8")).get("files", {}))
    for name, value in saved.items():
        with reading(checkpoint / name):
            if sha256(checkpoint / name) != value:
                raise ValueError("not the bytes that were saved")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within: a file of a checkpoint is read; raises LinearizeError (exit 2) when it is damaged."""
    try:
        with undamaged(path, earlier(path.parent)):
            yield
    except (SafetensorError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        # torch.load seeks to places that a file cut short does not have: EINVAL.
        refused = os_error(error)
        if refused is not None and refused.errno != errno.EINVAL:
            raise
        message = str(error).splitlines()[0]
        raise LinearizeError(f"{path} is damaged ({message}). {earlier(path.parent)}") from error


def earlier(checkpoint: Path) -> str:
    """What to do about a damaged checkpoint."""
    if checkpoint.name == "best":
        return f"Remove {checkpoint}, and the run keeps the best weights that it measures from here on, else its last"
    return f"Remove {checkpoint}, and the run goes on from an earlier checkpoint"


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint, whole or in part; a file that linearize did not write stays."""
    with contextlib.suppress(FileNotFoundError):
        for name in reversed(CHECKPOINT_FILES):  # its position first: then it counts as a checkpoint no longer
            (checkpoint / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            checkpoint.rmdir()


def processes() -> int:
    """How many processes train together, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def read_position(checkpoint: Path, record: str = POSITION) -> Position:
    """How far a checkpoint is."""
    with undamaged(checkpoint / record, earlier(checkpoint)):
        saved = json_object(checkpoint / record)
        return Position(**{name: value for name, value in saved.items() if name not in ("files", "score")})


def order(checkpoint: Path) -> tuple[int, int, bool]:
    """Sort key of checkpoints: the order in which a run writes them."""
    position = read_position(checkpoint)
    return position.stage, position.step, position.done
