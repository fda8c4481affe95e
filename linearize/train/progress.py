"""Progress of a stage: a bar on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import resource
import sys
import time
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ..recipe.recipe import AttentionTransfer, Stage, trains_source

LINE_EVERY = 30.0


def pace(stage: Stage) -> float:
    """Tokens of attention transfer that take about as long as one of this stage.

    Logit KL took 2.1 to 4.8 times as long, by eight models on a GPU (docs/cost.md).
    """
    if isinstance(stage, AttentionTransfer):
        return 1.0
    return 3.0 if trains_source(stage.train) else 2.5


class StageProgress:
    """Shows stage, step, loss, tokens or images (`unit`) per second, memory and the time that is left; use as a context
    manager."""

    def __init__(self, stage: Stage, steps: int, start: int, quiet: bool = False, unit: str = "tokens") -> None:
        self.unit, self.loss = unit, stage.loss_name
        self.stage, self.steps = stage.name, steps
        self.console = Console(stderr=True, quiet=quiet)
        self.last_line = time.monotonic()
        columns = ("[bold]{task.description}", "{task.completed}/{task.total}", "{task.fields[text]}")
        self.bar = Progress(
            *(TextColumn(c) for c in columns[:1]),
            BarColumn(bar_width=None),
            *(TextColumn(c) for c in columns[1:]),
            console=self.console,
            disable=quiet or not sys.stderr.isatty(),
        )
        self.task = self.bar.add_task(stage.name, total=steps, completed=start, text="")

    def __enter__(self) -> StageProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def update(self, step: int, loss: float, rate: float, left: str) -> None:
        """After an optimizer step: loss, tokens or images per second over this session, and the time that is left."""
        text = f"{self.loss} {loss:.4g}  {rate:,.0f} {self.unit}/s  {memory_bytes() / 2**30:.1f} GiB  {left}"
        self.bar.update(self.task, completed=step, text=text)
        now = time.monotonic()
        if self.bar.disable and (now - self.last_line > LINE_EVERY or step == self.steps):
            self.last_line = now
            self.console.print(f"{self.stage} {step}/{self.steps}  {text}", highlight=False, soft_wrap=True)


def forget_peak() -> None:
    """Let the CUDA allocator's peak begin anew: a stage shall report its own, not that of the stage before or of the
    start, which gathers weights and evaluates."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def memory_bytes() -> int:
    """Peak memory: of the CUDA allocator since `forget_peak` where there is one, else of the process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
