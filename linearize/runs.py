"""A run's folder: resolved recipe, metrics, checkpoints that survive a kill at any moment, and where to resume.

    run.json          resolved recipe and versions
    converted/        the converted base (or absent when the base was converted already)
    cache/            tokenised data
    checkpoints/      <stage>-<step>/, complete or absent: written beside and renamed
    metrics.jsonl     one JSON object per step or evaluation
    final/            the finished model
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import LinearizeError
from .recipe import Recipe, diff_resolved


@dataclasses.dataclass(frozen=True)
class Position:
    """How far a run is: `step` optimizer steps of stage number `stage` are done; `done` when that stage is over."""

    stage: int
    step: int
    tokens: int
    done: bool


class Run:
    """One run's folder. Raises LinearizeError (exit 2) when it holds a run of another recipe."""

    def __init__(self, recipe: Recipe, resume: str) -> None:
        self.folder = Path(recipe.output_dir)
        self.recipe = recipe
        self.checkpoints = self.folder / "checkpoints"
        self.metrics = self.folder / "metrics.jsonl"
        self.resume_from = self._resume_point(resume)

    @property
    def converted(self) -> Path:
        return self.folder / "converted"

    @property
    def final(self) -> Path:
        return self.folder / "final"

    def _resume_point(self, resume: str) -> Path | None:
        """The checkpoint to continue from, None for a start from scratch."""
        record = self.folder / "run.json"
        if resume == "never" or not record.exists():
            if resume not in ("never", "auto"):
                return self._given_checkpoint(Path(resume))
            return None
        old = json.loads(record.read_text("utf-8"))["recipe"]
        changes = diff_resolved(old, self.recipe.resolved())
        if changes:
            raise LinearizeError(
                f"recipe changed since this run ({'; '.join(changes[:4])}{' ...' if len(changes) > 4 else ''}). "
                "--resume never starts over, or choose a new output_dir, or restore the recipe"
            )
        if resume != "auto":
            return self._given_checkpoint(Path(resume))
        found = sorted(self.complete_checkpoints(), key=order)
        return found[-1] if found else None

    def _given_checkpoint(self, path: Path) -> Path:
        if not (path / "position.json").exists():
            known = ", ".join(str(p) for p in sorted(self.complete_checkpoints(), key=order)[-3:])
            raise LinearizeError(f"--resume {path} is no checkpoint of a run. Newest here: {known or 'none'}")
        return path

    def start(self, versions: dict[str, str]) -> None:
        """Create the folder, or clear what an earlier run left when starting over."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.resume_from is None:
            for old in (self.checkpoints, self.converted, self.final):
                shutil.rmtree(old, ignore_errors=True)
            self.metrics.unlink(missing_ok=True)
        write_atomically(
            self.folder / "run.json", json.dumps({"recipe": self.recipe.resolved(), "versions": versions}, indent=2)
        )

    def complete_checkpoints(self) -> list[Path]:
        """Checkpoints that were renamed into place; anything else is left over from a kill."""
        if not self.checkpoints.is_dir():
            return []
        return [p for p in self.checkpoints.iterdir() if (p / "position.json").exists() and not p.name.endswith(".tmp")]

    def save(self, position: Position, write: Callable[[Path], None]) -> Path:
        """A new checkpoint; the oldest beyond `checkpoint.keep` go, ends of stages stay until the run is finished."""
        target = self.checkpoints / f"{self.recipe.stages[position.stage].name}-{position.step}{'-end' * position.done}"
        work = target.with_name(target.name + ".tmp")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write(work)
        write_atomically(work / "position.json", json.dumps(dataclasses.asdict(position)))
        for file in work.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
        within = sorted((p for p in self.complete_checkpoints() if not read_position(p).done), key=order)
        for old in within[: -self.recipe.checkpoint.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def end_of_stage(self, stage: int) -> Path | None:
        """The checkpoint at the end of a stage, if that stage was finished."""
        for path in self.complete_checkpoints():
            position = read_position(path)
            if position.stage == stage and position.done:
                return path
        return None

    def report(self, layers: list[dict[str, float]]) -> dict[str, Any]:
        """The run in figures, from metrics.jsonl: the last evaluation of each stage beside the teacher's."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.metrics.read_text("utf-8").splitlines():
            entry = json.loads(line)
            if "eval_ppl" in entry:
                found[entry["stage"]] = entry
        teacher = found.pop("teacher", {}).get("eval_ppl")
        rows, tokens = [], 0
        for name, entry in found.items():
            tokens += entry["tokens"]
            ppl = entry["eval_ppl"]
            rows.append({"name": name, "tokens": tokens, "ppl": ppl, "ppl_ratio": ppl / teacher if teacher else None})
        return {"output": str(self.final), "teacher_ppl": teacher, "stages": rows, "layers": layers}

    def write_report(self, report: dict[str, Any]) -> None:
        """report.json, the figures of a finished run."""
        write_atomically(self.folder / "report.json", json.dumps(report, indent=2))

    def read_report(self) -> dict[str, Any]:
        """report.json of a run that is finished."""
        return json.loads((self.folder / "report.json").read_text("utf-8"))

    def log(self, **entry: Any) -> None:
        """Append one line to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def rewind_metrics(self, position: Position) -> None:
        """Drop lines after the resume point, so that a resumed run's metrics read as if it had never stopped."""
        if not self.metrics.exists():
            return
        names = [stage.name for stage in self.recipe.stages]
        kept = []
        for line in self.metrics.read_text("utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut short by a kill
            stage = names.index(entry["stage"]) if entry["stage"] in names else -1
            if (stage, entry["step"]) <= (position.stage, position.step):
                kept.append(line)
        write_atomically(self.metrics, "".join(line + "\n" for line in kept))


def read_position(checkpoint: Path) -> Position:
    """How far a checkpoint is."""
    return Position(**json.loads((checkpoint / "position.json").read_text("utf-8")))


def order(checkpoint: Path) -> tuple[int, int, bool]:
    """Sort key of checkpoints: the order in which a run writes them."""
    position = read_position(checkpoint)
    return position.stage, position.step, position.done


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename, so that the file is old or new, never half."""
    work = path.with_name(path.name + ".tmp")
    with work.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    work.rename(path)
