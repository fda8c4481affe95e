"""`linearize bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..terminal.output import Json, finite, print_json, say

bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory.")


@bench.command("kernels")
def bench_kernels(
    mechanism: Annotated[str, typer.Option(help="Measure the kernels of these mechanisms only: la,gla.")] = "all",
    tokens: Annotated[int | None, typer.Option(min=1, help="Cut every shape to at most this many tokens.")] = None,
    save: Annotated[Path | None, typer.Option(help="Keep the result in this JSON file, from the first row on.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Also draw the times into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Each mechanism beside PyTorch, scaled dot product attention and, where installed, flash-linear-attention."""
    from ..bench.kernels import bench_kernels as measure
    from ..bench.kernels import failures
    from ..bench.report import check_plot, markdown, plot
    from ..checkpoint.atomic import write_atomically
    from ..errors import Exit, LinearizeError, absent

    def tell(measured: str, result: dict[str, Any]) -> None:
        say(measured)
        if save is not None:
            write_atomically(save, json.dumps(finite(result)))

    for path in (save, picture):  # it takes an hour to get there
        if path is not None and not path.absolute().parent.is_dir():
            raise absent(path.absolute().parent, "no such folder:")
    if picture is not None:
        check_plot()
    result = measure(mechanism, tokens, tell)
    if as_json:
        print_json(result)
    else:
        print(markdown(result))
    if picture is not None:
        plot(result, picture)
    if failed := failures(result):
        raise LinearizeError("; ".join(failed), Exit.CHECK_FAILED)


@bench.command("model")
def bench_model(
    model: Annotated[str | None, typer.Argument(help="A folder or Hub id; only its config is read.")] = None,
    shape: Annotated[str | None, typer.Option(help="Instead of a model: 1b (Llama 3.2's), pvt-t, deit-s.")] = None,
    to: Annotated[str, typer.Option("--to", help="Mechanism.")] = "gsa",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Mechanism option, key=value; repeatable.")
    ] = None,
    train: Annotated[str | None, typer.Option(help="Text: lengths to train at (2048,8192).")] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Text: tokens before decoding starts (2048,8192,32768,131072).")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Images: pixels of a side (224,384,512,1024,1280).")] = None,
    batches: Annotated[
        str | None, typer.Option(help="Sequences decoded together (1,16); images together (by their size).")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also decode by a compiled step; images: also compiled inference.")
    ] = False,
    as_json: Json = False,
) -> None:
    """A converted model beside its softmax original, on random weights: training, and prefill and decode of text or
    inference on images."""
    from ..bench.model import bench_model as measure
    from ..bench.model import markdown
    from ..measure.compare import parse_lengths
    from ..plan.mechanisms import parse_settings

    given = {"train": train, "contexts": contexts, "sizes": sizes, "batches": batches}
    numbers = {n: parse_lengths(text, f"--{n}") if text else () for n, text in given.items() if text is not None}
    result = measure(model, shape, to, options=parse_settings(settings or []), compiled=compiled, **numbers)
    if as_json:
        print_json(result)
    else:
        print(markdown(result))
