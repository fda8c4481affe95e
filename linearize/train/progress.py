"""Progress of a stage: its last line on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import resource
import sys
import time

import torch

from ..recipe.recipe import AttentionTransfer, Stage, trains_source
from ..terminal.output import DRAWN, say
from ..terminal.progress import LINE_EVERY


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
        self.unit, self.loss, self.stage, self.steps, self.quiet = unit, stage.loss_name, stage.name, steps, quiet
        self.last_line = time.monotonic()

    def __enter__(self) -> StageProgress:
        return self

    def __exit__(self, *error: object) -> None:
        DRAWN.clear()

    def update(self, step: int, loss: float, rate: float, left: str) -> None:
        """After an optimizer step: loss, tokens or images per second over this session, and the time that is left."""
        if self.quiet:
            return
        text = f"{self.loss} {loss:.4g}  {rate:,.0f} {self.unit}/s  {memory_bytes() / 2**30:.1f} GiB  {left}"
        line, now = f"{self.stage} {step}/{self.steps}  {text}", time.monotonic()
        if step == self.steps or (not sys.stderr.isatty() and now - self.last_line > LINE_EVERY):
            self.last_line = now
            say(line)
        elif sys.stderr.isatty():
            DRAWN.draw(line)


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
