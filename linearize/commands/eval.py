"""`linearize eval`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..terminal.output import Json, print_json


def evaluate(
    student: Annotated[str, typer.Argument(help="A converted model's folder, or a Hub id.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value of the recipe, for the text.")] = None,
    teacher: Annotated[str, typer.Option(help="The model that it was converted from.")] = "",
    recipe: Annotated[
        str, typer.Option(help="A recipe or preset, for its data.eval, data.pack and eval.max_tokens.")
    ] = "demo",
    lengths: Annotated[str, typer.Option(help="Tokens of recall and needle texts, 256,1024.")] = "256,512,1024",
    trials: Annotated[int, typer.Option(min=1, help="Texts of each task and length.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of names and places in those texts.")] = 0,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens that go through a model at a time.")] = 8192,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="keep, float32, bfloat16 or float16.")] = "keep",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the models ship.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare a model with its teacher: perplexity, KL, agreement, recall, state."""
    from ..errors import LinearizeError
    from ..recipe.recipe import load_recipe

    if not teacher:
        raise LinearizeError("--teacher is missing: give the model that the student was converted from")
    text = load_recipe(recipe, [f"model.base={json.dumps(teacher)}", *(overrides or [])])
    from ..measure.compare import Request, check_text, compare, parse_lengths
    from ..measure.generate import load
    from ..terminal.tables import comparison_table

    check_text(text)
    request = Request(parse_lengths(lengths), trials, seed, batch_tokens)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    ours, theirs = (load(name, None, teacher=False, **options) for name in (student, teacher))
    result = {"student": student, "teacher": teacher, "seed": seed, **compare(ours, theirs, text, request)}
    comparison_table(result)
    if as_json:
        print_json(result)
