"""`linearize bench`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..terminal.arguments import Overrides, Revision, Trust, check_base, path, split_values
from ..terminal.arguments import model as model_name
from ..terminal.output import Json, finite, print_json, say, show
from ..terminal.progress import starting

bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory.")


def tell_result(result: dict[str, Any], markdown: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    """A result on stdout, as JSON or as the tables that a bench makes of it."""
    if as_json:
        print_json(result)
    else:
        show(markdown(result))


@bench.command("kernels")
def bench_kernels(
    preset: Annotated[
        str,
        typer.Option(
            help="Measure one layer with the options of these recipe presets, for example gsa-window,gla. Without "
            "--preset and --mechanism: gsa-window, then all mechanisms."
        ),
    ] = "",
    mechanism: Annotated[str, typer.Option(help="Measure these mechanisms, for example la,gla, or all.")] = "",
    tokens: Annotated[int | None, typer.Option(min=1, help="Shorten every shape to this many tokens.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="JSON file for the results. It is written after every row.", parser=path)
    ] = None,
    as_json: Json = False,
) -> None:
    """Time the kernels of each mechanism against PyTorch, SDPA and, where it is installed, flash-linear-attention.

    Each row is printed on stderr when it is measured, and the tables on stdout at the end.
    """
    with starting():
        from ..bench.kernels import bench_kernels as measure
        from ..bench.kernels import failures
        from ..bench.report import markdown
        from ..checkpoint.atomic import check_result, write_result
        from ..errors import CheckFailedError, absent

    def tell(row: str, result: dict[str, Any]) -> None:
        say(row)
        if save is not None and result["mechanisms"]:
            write_result(save, json.dumps(finite(result)))

    if save is not None:  # it takes an hour to get there
        if not save.absolute().parent.is_dir():
            raise absent(save.absolute().parent, "no such folder")
        check_result(save, '{"machine": ', "bench kernels")
    result = measure(mechanism, tokens, tell, presets=preset)
    tell_result(result, markdown, as_json)
    if failed := failures(result):
        raise CheckFailedError("; ".join(failed))


@bench.command("model")
def bench_model(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|KEY=VALUE",
            help="Model: a local folder, a Hub id, or demo. Only its config is read. Then mechanism options as "
            "key=value, which override the preset's.",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Shape in place of a model: 1b, 3b (Llama 3.2), 8b (Llama 3.1), llama-1.3b, llama-340m, pythia-1.4b, "
            "deit-t, deit-s, pvt-t, pvt-s, pvtv2-b0, pvtv2-b1, swin-t, swin-s or swin-b."
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Recipe preset whose mechanism, options and choice of layers are measured. "
            "Default: gsa-window, unless --to is given."
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Mechanism that replaces softmax, in place of a preset.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="The same as an option without --set.")] = None,
    train: Annotated[str | None, typer.Option(help="Text: row lengths for training, for example 2048,8192.")] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Text: context lengths before decoding, for example 2048,32768.")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Images: sizes in pixels, for example 224,512.")] = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes: sequences decoded together, or images.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Also measure torch.compile.")] = False,
    as_json: Json = False,
) -> None:
    """Time a converted model and its softmax original, on random weights: training, prefill, decode, images.

    Each row is printed on stderr when it is measured, and the tables on stdout at the end.
    """
    with starting():
        from ..bench.model import bench_model as measure
        from ..bench.model import markdown
        from ..errors import LinearizeError
        from ..measure.compare import parse_lengths
        from ..plan.mechanisms import parse_settings

    given = {"train": train, "contexts": contexts, "sizes": sizes, "batches": batches}
    numbers = {n: parse_lengths(text, f"--{n}") if text else () for n, text in given.items() if text is not None}
    models, options = split_values(words or [])
    if len(models) > 1:
        raise LinearizeError(f"{' '.join(models)}: one model is measured at a time. Name one")
    model = model_name(models[0]) if models else None
    asked = parse_settings([*options, *(settings or [])])
    result = measure(model, shape, to, preset=preset, options=asked, compiled=compiled, tell=say, **numbers)
    tell_result(result, markdown, as_json)


@bench.command("train")
def bench_train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a preset (list: linearize recipes ls).")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Time the steps of a recipe's stages, on random weights and tokens, and those of a student that keeps softmax.

    It prints tokens/s, the share of the card's peak FLOP/s, and the share of a step in which the card waits for Python.
    """
    check_base(overrides or [])
    from ..recipe.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    with starting():
        from ..bench.train import bench_train as measure
        from ..bench.train import markdown

    result = measure(loaded, say)
    tell_result(result, markdown, as_json)


@bench.command("serve")
def bench_serve(
    model: Annotated[str, typer.Argument(help="Folder of a converted model, or any model that vLLM serves.")],
    source: Annotated[
        str, typer.Option(help="Model to measure first, in the same way: the source, or another converted one.")
    ] = "",
    loads: Annotated[
        str, typer.Option(help="Requests at a time x tokens of each prompt. Default: 1x128,64x512,32x16384,8x65536.")
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Decode steps to time after all prompts are read.")] = 256,
    options: Annotated[
        list[str] | None, typer.Option("--engine", help="Option of vLLM's engine as key=value. Repeatable.")
    ] = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Compare a converted model with its source in vLLM: prefill and decode tokens/s, ms a token, sequences that fit.

    Each engine has a process of its own. Weights may be random; tokens are not compared.
    """
    with starting():
        from ..bench.serve import LOADS, markdown, parse_loads, parse_options
        from ..bench.serve import bench_serve as measure

    models = [model_name(name) for name in ([source] if source else []) + [model]]
    wanted = parse_loads(loads) if loads else LOADS
    engine = parse_options(options or [])
    how: dict[str, Any] = {"revision": revision, "options": engine, "trust_remote_code": trust_remote_code}
    result = measure(models, wanted, steps=steps, tell=say, **how)
    tell_result(result, markdown, as_json)
