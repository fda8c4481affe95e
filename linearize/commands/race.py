"""`linearize race`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ..terminal.arguments import model as model_name
from ..terminal.arguments import path
from ..terminal.output import Json, counted, print_json, say
from ..terminal.progress import starting
from ..terminal.tables import console, results, table

USUAL = "demo"
# Beside what the demo changes in its preset: the evaluation loads every result.
FEW = ("finish.verify=false",)
DEFAULT_TEXT = (
    "no --recipe: text, layer and rates are those of linearize demo, for models that write Python. For another model, "
    "give a recipe, for example --recipe gsa-window"
)


def race(
    model: Annotated[str, typer.Argument(help="The teacher: a local folder, a Hub id, or demo.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Values of the common recipe as key.sub=value.")] = None,
    recipe: Annotated[
        str,
        typer.Option(
            help="Recipe or preset that all contestants share: layers, text, blocks, learning rates, and the stages "
            "attention_transfer and logit_kl. Default: the recipe of linearize demo."
        ),
    ] = "",
    only: Annotated[str, typer.Option(help="Contestants to run, separated by commas. Default: all.")] = "",
    tokens: Annotated[
        str, typer.Option(help="Training tokens of each contestant: 40k, 7.8M. Default: those of the recipe.")
    ] = "",
    lengths: Annotated[str, typer.Option(help="Lengths of recall and needle texts in tokens.")] = "256",
    trials: Annotated[int, typer.Option(min=1, help="Number of texts for each task and length.")] = 32,
    generate: Annotated[int, typer.Option(min=0, help="Texts that each model generates.")] = 16,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the race. Default: runs/race-MODEL.", parser=path),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what each contestant will do, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Race methods of conversion on one teacher with equal tokens: LoLCATs, RADLADS, KL-guided hybrids, progressive
    conversion and ours. Ends with one table and one page; the same command goes on after a stop."""
    model_name(model)
    from ..recipe.presets import recipe_path

    recipe_path(recipe or USUAL)
    with starting():
        from ..demo.tour import SETTINGS
        from ..errors import LinearizeError, quoted
        from ..measure.compare import EvalRequest, parse_lengths
        from ..recipe.recipe import load_recipe

    if base := next((one for one in overrides or [] if one.startswith("model.base=")), None):
        other = f"linearize race {quoted(base.partition('=')[2])} --recipe {quoted(recipe or model)}"
        raise LinearizeError(f"{base}: a race takes its model as the first word: {other}")
    ours = () if recipe else (*SETTINGS, *FEW)
    given = [*ours, *(overrides or []), f"model.base={json.dumps(model)}"]
    common = load_recipe(recipe or USUAL, given)
    if not recipe and model != USUAL and not any(one.startswith("data.") for one in overrides or []):
        say(DEFAULT_TEXT)
    from ..page.race import race_tables
    from ..race.race import estimated, plan_race, run_race

    folder = output or Path("runs") / f"race-{re.sub(r'[^A-Za-z0-9._-]+', '-', Path(model).name) or 'model'}"
    request = EvalRequest(parse_lengths(lengths), trials, common.seed, 8192, generate)
    names = [name.strip() for name in only.split(",")] if only else []
    planned = plan_race(common, folder, request, names, parse_tokens(tokens))
    if dry_run:
        plan: dict[str, Any] = planned.to_json()
        hours = estimated(planned)
        for one in plan["contestants"]:
            one["hours"] = hours[one["name"]]
        race_table(plan)
        if as_json:
            print_json(plan)
        return
    found = run_race(planned, say)
    if as_json:
        print_json(found)
        return
    for one in race_tables(found):
        results().print(table(one.columns, one.rows, one.title))


def parse_tokens(text: str) -> int | None:
    """`40k` -> 40000, as in recipes; nothing -> None. Raises LinearizeError (exit 2)."""
    from pydantic import TypeAdapter, ValidationError

    from ..errors import LinearizeError
    from ..recipe.types import Tokens

    try:
        found: int | None = TypeAdapter(Tokens).validate_python(text or None)
    except ValidationError:
        raise LinearizeError(f"--tokens {text}: give a whole number above 0, such as 40k, 7.8M or 65536") from None
    return found


def race_table(plan: dict[str, Any]) -> None:
    """What the contestants of a race will do."""
    columns = {"contestant": "short", "what it does": "text", "softmax in": "short", "stages": "text"}
    columns |= {"minutes": "number"}
    rows = []
    for one in plan["contestants"]:
        if not one["chosen"]:
            continue
        stages = []
        for recipe in one["recipes"]:
            turned = f"layers {recipe['convert']['layers']}: " if len(one["recipes"]) > 1 else ""
            steps = ", ".join(f"{stage['name']} {counted(stage['steps'], 'step')}" for stage in recipe["stages"])
            stages.append(f"{turned}{steps}")
        minutes = "" if one["hours"] is None else f"{60 * one['hours']:.1f}"
        kept = one["recipes"][-1]["convert"]["keep_softmax"] or "none"
        rows.append((one["name"], f"{one['about']} ({one['source']})", kept, "\n".join(stages), minutes))
    out = console()
    out.print(table(columns, rows, f"{plan['race']}: {plan['tokens']:,} training tokens each"))
    out.print("minutes: training steps at the rates of the two stages of the common recipe, estimated from configs")
