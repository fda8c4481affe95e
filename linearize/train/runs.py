"""A run's folder: resolved recipe, metrics, checkpoints that survive a kill, and where to resume.

run.json          resolved recipe and versions
.lock             held by the process that runs, whose number is in it
converted/        the converted base (absent when the base was converted already, by this version)
cache/            tokenised data
checkpoints/      <stage>-<step>/, complete or absent: written beside and renamed
metrics.jsonl     one JSON object per step or evaluation
report.json       the figures of a finished run
final/            the finished model
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ..checkpoint.atomic import write_atomically
from ..errors import LinearizeError, undamaged, writing
from ..recipe.recipe import Recipe, diff_resolved, fixed, per_step
from ..terminal.output import finite

UNBORN = "run.json.tmp"  # all that a run leaves which was killed before it had a name
LOCK = ".lock"


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
    def finished(self) -> bool:
        """Whether nothing is left to do, unless an earlier checkpoint is named."""
        return self.resume == "auto" and self.final.exists()

    @property
    def has_converted(self) -> bool:
        """Whether an earlier start left the converted base, which appears only when it is complete."""
        return self.resume != "never" and self.converted.exists()

    # ------------------------------------------------------------ where to resume

    def _check_unchanged(self) -> None:
        if self.resume == "never":
            return
        with undamaged(self.record, "Restore it, start over with --resume never, or choose a new output_dir"):
            record = json.loads(self.record.read_text("utf-8"))
            old = per_step(record["recipe"], record["processes"])
            new = per_step(self.recipe.resolved(), processes())
            if self.resume != "auto":
                old, new = fixed(old), fixed(new)
            changes = diff_resolved(old, new)
            if record["max_steps"] != self.max_steps:
                changes.append(f"--max-steps {record['max_steps'] or 'none'} -> {self.max_steps or 'none'}")
        if changes:
            raise LinearizeError(
                f"recipe changed since this run ({'; '.join(changes[:4])}{' ...' if len(changes) > 4 else ''}). "
                "--resume never starts over, or choose a new output_dir, or restore the recipe"
            )

    def _resume_point(self) -> Path | None:
        if self.resume == "never":
            return None
        known = sorted(self.complete_checkpoints(), key=order)
        if self.resume == "auto":
            return known[-1] if known else None
        for path in known:
            if path.resolve() == Path(self.resume).resolve():
                return path
        newest = ", ".join(str(p) for p in known[-3:])
        raise LinearizeError(f"--resume {self.resume} is no checkpoint of this run. Newest here: {newest or 'none'}")

    def commit(self) -> str | None:
        """The Hub's commit that this run's base is of, as its first start noted; None of a folder."""
        return json.loads(self.record.read_text("utf-8")).get("commit") if self.record.exists() else None

    def start(self, versions: dict[str, str], commit: str | None = None) -> None:
        """Create the folder, and clear what lies beyond the resume point or was left by a kill."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.finished:
            shutil.rmtree(self.final, ignore_errors=True)
        if self.resume == "never":
            shutil.rmtree(self.converted, ignore_errors=True)
        left = [self.folder.glob("*.tmp"), self.checkpoints.glob("*.tmp"), self.folder.glob("cache/*.partial")]
        for path in itertools.chain(*left):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        position = read_position(self.resume_from) if self.resume_from else None
        for path in self.complete_checkpoints():
            if self.resume_from is None or order(path) > order(self.resume_from):
                shutil.rmtree(path, ignore_errors=True)
        self._rewind_metrics(position)
        settings = {"max_steps": self.max_steps, "processes": processes(), "commit": commit}
        record = {"recipe": self.recipe.resolved(), **settings, "versions": versions}
        write_atomically(self.record, json.dumps(record, indent=2))

    @contextlib.contextmanager
    def preparing(self, owner: bool) -> Iterator[None]:
        """Within: what fails leaves no folder behind that was not there before. One process is the `owner`.

        It locks the folder until `close` or its death. Raises LinearizeError (exit 2) when another process has it.
        """
        new = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        if owner:
            self._hold()
        try:
            yield
        except BaseException:
            if owner and new:
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
        return [p for p in self.checkpoints.iterdir() if (p / "position.json").exists() and not p.name.endswith(".tmp")]

    def save(self, position: Position, write: Callable[[Path], None]) -> Path:
        """A new checkpoint. Of those within a stage `checkpoint.keep` stay, none once it is over; its end stays."""
        target = self.checkpoints / f"{self.recipe.stages[position.stage].name}-{position.step}{'-end' * position.done}"
        work = target.with_name(target.name + ".tmp")
        shutil.rmtree(work, ignore_errors=True)
        newest = max(self.complete_checkpoints(), key=order, default="none")
        try:
            with writing(target, f". Last checkpoint: {newest}"):
                work.mkdir(parents=True)
                write(work)
                write_atomically(work / "position.json", json.dumps(dataclasses.asdict(position)))
                for file in work.iterdir():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
                work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        within = sorted((p for p in self.complete_checkpoints() if not read_position(p).done), key=order)
        for old in within if position.done else within[: -self.recipe.checkpoint.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def last_good(self, stage: int, step: int) -> Path | None:
        """The newest checkpoint from which training went on at least a step before that step of that stage failed."""
        good = [path for path in self.complete_checkpoints() if order(path)[:2] < (stage, step - 1)]
        return max(good, key=order, default=None)

    # ------------------------------------------------------------ metrics and report

    def report(self, layers: list[dict[str, float]], complete: bool) -> dict[str, Any]:
        """The run in figures, from metrics.jsonl: the last evaluation of each stage beside the teacher's."""
        found: dict[str, dict[str, Any]] = {}
        for entry in self._entries():
            if entry.get("eval_ppl") is not None:
                found[entry["stage"]] = entry
        teacher = found.pop("teacher", {})
        rows, tokens = [], 0
        for name, entry in found.items():
            tokens += entry["tokens"]
            ppl = entry["eval_ppl"]
            row = {"name": name, "tokens": tokens, "eval_tokens": entry.get("eval_tokens"), "ppl": ppl}
            ratio = ppl / teacher["eval_ppl"] if teacher else None
            rows.append({**row, "ppl_ratio": ratio, "accuracy": entry.get("eval_accuracy")})
        figures = {"teacher_ppl": teacher.get("eval_ppl"), "teacher_accuracy": teacher.get("eval_accuracy")}
        said = {"output": str(self.final) if complete else None, "max_steps": self.max_steps}
        return {**said, **figures, "stages": rows, "layers": layers}

    def write_report(self, report: dict[str, Any]) -> None:
        """report.json, the figures of a finished run."""
        write_atomically(self.folder / "report.json", json.dumps(report, indent=2))

    def read_report(self) -> dict[str, Any]:
        """report.json of a run that is finished."""
        path = self.folder / "report.json"
        with undamaged(path, f"Remove it and {self.final}, and the same command writes both again"):
            found = json.loads(path.read_text("utf-8"))
            later = ("teacher_accuracy", "max_steps")  # which runs of earlier versions did not write
            known = {key: found[key] for key in ("output", "teacher_ppl", "stages", "layers")}
            return known | {key: found.get(key) for key in later}

    def log(self, **entry: Any) -> None:
        """Append one line to metrics.jsonl; what is not finite becomes null, JSON has no word for it."""
        with writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(entry)) + "\n")

    def _entries(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without one cut short by a kill."""
        entries = []
        for line in self.metrics.read_text("utf-8").splitlines() if self.metrics.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                entries.append(json.loads(line))
        return entries

    def _rewind_metrics(self, position: Position | None) -> None:
        """Drop lines after the resume point, so that a resumed run's metrics read as if it had never stopped."""
        if position is None:
            self.metrics.unlink(missing_ok=True)
            return
        names = [stage.name for stage in self.recipe.stages]
        kept = []
        for entry in self._entries():
            stage = names.index(entry["stage"]) if entry["stage"] in names else -1
            if (stage, entry["step"]) <= (position.stage, position.step):
                kept.append(entry)
        write_atomically(self.metrics, "".join(json.dumps(entry) + "\n" for entry in kept))


def processes() -> int:
    """How many processes train together, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def read_position(checkpoint: Path) -> Position:
    """How far a checkpoint is."""
    path = checkpoint / "position.json"
    with undamaged(path, f"Remove {checkpoint}, and the run goes on from an earlier checkpoint"):
        return Position(**json.loads(path.read_text("utf-8")))


def order(checkpoint: Path) -> tuple[int, int, bool]:
    """Sort key of checkpoints: the order in which a run writes them."""
    position = read_position(checkpoint)
    return position.stage, position.step, position.done
