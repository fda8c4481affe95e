"""`linearize bench train`: time the steps of a recipe's stages, in one process, on random weights and tokens.

A stage's steps are those of a run: with its batch, its teacher, its optimizer, and as CUDA graphs where a run would
record them. Beside each stage behind attention transfer stands the same loop with a student that keeps its softmax.
"""

from __future__ import annotations

from typing import Any

from ..estimate.step import measure_stages
from ..job.resolve import resolve
from ..recipe.recipe import Recipe
from ..terminal.output import markdown_table
from ..train.runtime import Say
from .timing import machine

COLUMNS = ("batch", "tokens/s", "of peak FLOP/s", "device waits", "CUDA graphs", "peak GiB", "of softmax's speed")


def bench_train(recipe: Recipe, say: Say) -> dict[str, Any]:
    """`machine`, and `stages` with their names, batches and what `measure_stages` found. Raises LinearizeError as
    `resolve` does."""
    with resolve(recipe, say=say) as job:
        job.resolve_auto()
        rehearsal, stages = job.rehearse(), job.recipe.stages
        for number in range(len(stages)):  # which adapters of a stage need
            rehearsal.stage(number)
        found = measure_stages(rehearsal, [*stages], softmax=True)
    rows = []
    for stage, one in zip(stages, found, strict=True):
        batch = f"{stage.batch.per_device} x {stage.batch.gradient_accumulation_steps}"
        rows.append({"name": stage.name, "batch": batch, **one})
        for row in (one, one.get("softmax", {})):
            if row.get("note"):
                say(f"note: {stage.name}: {row['note']}")
    return {"machine": machine(), "stages": rows}


def markdown(result: dict[str, Any]) -> str:
    """The result as a table."""
    rows = []
    for one in result["stages"]:
        softmax = one.get("softmax")
        rows.append((one["name"], *cells(one, softmax)))
        if softmax is not None:
            rows.append((f"{one['name']}, softmax", *cells({"batch": one["batch"], **softmax}, None)))
    head = "; ".join(f"{key} {value}" for key, value in result["machine"].items())
    return "\n".join([head, "", *markdown_table(("stage", *COLUMNS), rows)])


def cells(one: dict[str, Any], softmax: dict[str, Any] | None) -> list[str]:
    """A row behind its name."""
    shares = [one.get("products"), one.get("device_waits")]
    faster = "" if softmax is None else f"{one['tokens_per_s'] / softmax['tokens_per_s']:.2f}"
    said = ["" if share is None else f"{share:.0%}" for share in shares]
    graphs = {True: "yes", False: "no", None: ""}[one.get("graphs")]
    return [one["batch"], f"{one['tokens_per_s']:,.0f}", *said, graphs, f"{one['peak'] / 2**30:.1f}", faster]
