"""`linearize export`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import Exit, LinearizeError, did_you_mean
from ..terminal.arguments import path
from ..terminal.output import say
from ..terminal.progress import starting

NO_GGUF = (
    "--to gguf: llama.cpp computes linear layers inside architectures that it knows. Convert a Qwen3 with --to gdn "
    "--set native=true --keep-softmax every:4:3, then: linearize export DIR --as auto -o OUT, and give OUT to "
    "llama.cpp's converter (docs/native.md). For other mechanisms there is --to onnx"
)


def export(
    model: Annotated[str, typer.Argument(help="Converted model: a local folder or a Hub id.")],
    to: Annotated[str, typer.Option("--to", help="Format of a graph: onnx.")] = "onnx",
    form: Annotated[
        str | None,
        typer.Option("--as", help="Architecture that engines know: qwen3_5, granitemoehybrid, or auto."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder. Default: ./NAME-FORMAT.", parser=path)
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the model that linearize did not write.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
) -> None:
    """Write a converted model for another runtime, and check it against the model: as an architecture that vLLM, MLX
    and others know (--as), or as a graph of gla, retnet, gdn or window (--to onnx)."""
    if "gguf" in (to, form):
        raise LinearizeError(NO_GGUF, Exit.INCOMPATIBLE)
    if to != "onnx":
        raise LinearizeError(f"--to {to}: choose onnx.{did_you_mean(to, ('onnx',))}")
    here = os.path.expanduser(model)
    name = os.path.basename(os.path.realpath(here) if os.path.isdir(here) else model.rstrip("/"))
    if form is not None:
        with starting():
            from ..export.native import export_native

        made = export_native(
            model, form, output or Path(f"{name}-{form}"), revision=revision, trust_remote_code=trust_remote_code
        )
        say(f"wrote {made.folder} as {made.form}: transformers computes the same logits, in one pass and step by step")
        for engine, difference in made.differences.items():
            say(f"{engine} ran it: {difference:.0e} of the largest logit apart")
        for one in made.engines:
            say(f"{one.name}: {'yes' if one.takes else 'no'}{f', {one.note}' if one.note else ''}")
        return
    with starting():
        from ..export.to_onnx import export_onnx

    folder = output or Path(f"{name}-onnx")
    say(f"wrote {export_onnx(model, folder, revision=revision, trust_remote_code=trust_remote_code)}")
