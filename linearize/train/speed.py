"""How fast a stage runs, what share of a card's peak FLOP/s that is, and how long the card waits."""

from __future__ import annotations

import time
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..terminal.output import percent

# Steps of a process before its speed counts: kernels compile in them, and graphs are recorded.
FIRST = 5


class Speed:
    """The time of a stage's steps, without evaluations, checkpoints and the first steps; `flops` are the products of
    one step and `works` the ms that the device works for one, where they were counted."""

    def __init__(self) -> None:
        self.flops = 0.0
        self.works: float | None = None
        self.start: int | None = None  # of this process
        self.steps, self.seconds = 0, 0.0
        self.mark = (0, 0.0)
        self.last = 0.0  # seconds of a step, at last

    def resume(self, done: int) -> None:
        """Steps begin, after something else."""
        self.start = done if self.start is None else self.start
        self.mark = done, time.perf_counter()

    def note(self, done: int) -> None:
        """So many steps are done, and the device with them."""
        now, (before, then) = time.perf_counter(), self.mark
        self.mark = done, now
        if done == before:
            return
        self.last = (now - then) / (done - before)
        if self.start is not None and before >= self.start + FIRST:
            self.steps, self.seconds = self.steps + done - before, self.seconds + now - then

    def steps_in(self, seconds: float, most: int) -> int:
        """How many steps take that long, from 1 to `most`."""
        return max(1, min(most, int(seconds / self.last))) if self.last else 1

    def line(self, tokens_per_step: int, unit: str, how: list[str]) -> str:
        """One line on a stage that ran on a GPU; empty where it was too short."""
        if not self.steps:
            return ""
        step = self.seconds / self.steps
        products, waits = shares(step, self.flops, self.works)
        found = [f"{tokens_per_step / step:,.0f} {unit}/s"]
        found += [] if products is None else [f"{percent(products)} of the card's peak FLOP/s"]
        found += [] if waits is None else [f"the card waits {percent(waits)} of the time"]
        return ", ".join([*found, *how])


def shares(seconds: float, flops: float, works: float | None) -> tuple[float | None, float | None]:
    """Of a step of so many seconds, with its FLOPs and the ms that the device works: the share of the card's peak
    FLOP/s, and the share in which the device waits; None where they are not known."""
    rate = card_flops() if flops else None
    return flops / seconds / rate if rate else None, None if works is None else max(0.0, 1 - works / 1e3 / seconds)


class Products(TorchDispatchMode):
    """Within: the products of what runs are counted, twice each; of what is computed again, too. `flops` is 0 where
    torch's formula does not take an operation."""

    def __init__(self) -> None:
        super().__init__()
        self._flops, self._known = 0.0, True

    @property
    def flops(self) -> float:
        return self._flops * self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            try:
                self._flops += formula(*args, **(kwargs or {}), out_val=out)
            except Exception:  # such as those of attention for fewer KV heads
                self._known = False
        return out


def card_flops() -> float | None:
    """Dense bf16 products a second of the first GPU by its data sheet; None where that is not known."""
    from ..estimate.gpus import present

    return present(cpu=False).flops
