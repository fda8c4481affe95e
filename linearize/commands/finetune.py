"""`linearize finetune`."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from ..terminal import tables
from ..terminal.arguments import Overrides, check_base
from ..terminal.output import Json, print_json, say, short, size
from ..terminal.progress import starting, uncollected
from .estimate import data_lines, estimate_table


def finetune(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a preset (list: linearize recipes ls).")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what each stage will do, and stop.")] = False,
    resume: Annotated[
        str,
        typer.Option(
            help="Resume: auto (the last checkpoint, if any), never (start over), or the folder of a checkpoint."
        ),
    ] = "auto",
    stage: Annotated[str | None, typer.Option(help="Run only the stage with this name.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop each stage after this many steps.")] = None,
    as_json: Json = False,
) -> None:
    """Convert a model and train it by a recipe's stages: attention transfer, logit KL, finetuning."""
    check_base(overrides or [])
    from ..diffusion.recipe import DiffusionRecipe, load_either

    with uncollected():  # a mechanism's options are checked by its code, which imports torch
        loaded: Any = load_either(recipe, overrides or [])
    latents = isinstance(loaded, DiffusionRecipe)
    if latents and max_steps is not None:
        loaded, max_steps = loaded.shortened(max_steps), None
    with starting():
        from .. import finetune as story
        from ..job.dry_run import dry_run as estimated
        from ..job.notes import next_commands

    result: dict[str, Any]
    if dry_run:
        result = estimated(loaded, say, max_steps, stage, resume=resume)
        if not latents:
            recipe_table(result["stages"])
            data_lines(result["stages"])
            estimate_table(result)
    else:
        result = story.finetune(loaded, resume=resume, only=stage, max_steps=max_steps, say=say)
        if int(os.environ.get("RANK", "0")):
            return  # of several processes the first one speaks
        if latents:
            tables.prediction_table(result["predictions"])
        else:
            report_table(result)
            if result["output"] is not None:
                say(f"Next: {next_commands(loaded)}")
    if as_json:
        print_json(result)


def recipe_table(plans: list[dict[str, Any]]) -> None:
    """What each stage will do, within 80 columns; `--json` has the exact numbers."""
    columns = {"stage": "short", "trains": "text"}
    unit = tables.unit_of_stages(plans)
    columns |= dict.fromkeys(("parameters", "steps", unit, "lr"), "number") | {"teacher copy": "text"}
    rows = []
    for plan in plans:
        named = plan["name"] != plan["kind"]
        rows.append(
            (
                f"{plan['name']}\n({plan['kind']})" if named else plan["name"],
                ", ".join(plan["train"]),
                short(plan["parameters"]),
                f"{plan['steps']:,}" if plan["steps"] else f"{plan['epochs']:g} epochs",
                short(plan["tokens"]) if plan["tokens"] else "",
                f"{plan['lr']:g}" + (f"\n{plan['new_lr']:g} new" if plan["new_lr"] else ""),
                size(plan["teacher_copy_bytes"]) if plan["teacher_copy_bytes"] else "none",
            )
        )
    tables.console().print(tables.table(columns, rows, "stages"))


def report_table(report: dict[str, Any]) -> None:
    """Held-out perplexity along the run, of images accuracy before it, of maps what `evaluation_figures` has, and how
    close each layer came."""
    out = tables.console()
    unit = report.get("unit") or "tokens"
    rows: list[dict[str, str]] = []
    if report["teacher_ppl"] is not None:
        who = f"teacher ({report['teacher']['model']})" if report.get("teacher") else "teacher (softmax)"
        teacher = {"name": who, "ppl": report["teacher_ppl"], "accuracy": report.get("teacher_accuracy")}
        rows.append(evaluation_cells(teacher | {"ppl_ratio": 1.0}, unit))
    rows += [evaluation_cells(row, unit) for row in report["stages"]]
    if rows:
        columns = {name: "number" if name else "text" for name in rows[0]}
        out.print(tables.table(columns, [tuple(row.values()) for row in rows], f"held-out {[*rows[0]][2]}"))
    if unit == "tokens" and report["stages"]:
        below = tables.note_below(report["stages"][-1].get("ppl_ratio"))
        for note in filter(None, (tables.note_of_rows(report["stages"], report["teacher_ppl"]), below)):
            out.print(note)
    tables.positions_table(report.get("positions"))
    if report["layers"]:
        columns = dict.fromkeys(("layer", "relative squared error", "cosine"), "number")
        layers = [(str(row["layer"]), f"{row['relative_mse']:.4f}", f"{row['cosine']:.4f}") for row in report["layers"]]
        out.print(tables.table(columns, layers, "attention output against the teacher's, per layer"))


def evaluation_cells(row: dict[str, Any], unit: str) -> dict[str, str]:
    """A row of a report in cells, by their headings."""
    named = tables.row_name(row["name"], row.get("calibrated"))
    trained = f"{row['tokens']:,}" if "tokens" in row else ""
    return {"": named, f"training {unit}": trained} | tables.evaluation_figures(row, unit, ".3f")
