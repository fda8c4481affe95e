"""`linearize export`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import LinearizeError, did_you_mean
from ..terminal.arguments import Converted, Revision, Trust, path
from ..terminal.output import say
from ..terminal.progress import starting


def export(
    model: Converted,
    to: Annotated[str | None, typer.Option("--to", help="Format of a graph: onnx, which is the default.")] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="What engines know: qwen3_5, granitemoehybrid, granite_swa, ministral, qwen3, qwen2, or auto; "
            "gguf, gguf-q8_0.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder. Default: ./NAME-FORMAT.", parser=path)
    ] = None,
    trust_remote_code: Trust = False,
    revision: Revision = None,
) -> None:
    """Write a converted model for another runtime, and check it against the model: as an architecture that vLLM, MLX,
    llama.cpp and others know (--as), or as a graph of gla, retnet, gdn or window (--to onnx)."""
    if to not in (None, "onnx"):
        from ..export.formats import CHOICES

        near = f" Formats of engines are --as: --as {to}" if to in CHOICES else did_you_mean(to, ("onnx",))
        raise LinearizeError(f"--to {to}: choose onnx.{near}")
    if to is not None and form is not None:
        raise LinearizeError(f"--to {to} writes a graph, --as {form} a model for engines. Leave one of them out")
    here = os.path.expanduser(model)
    name = os.path.basename(os.path.realpath(here) if os.path.isdir(here) else model.rstrip("/"))
    if form is not None:
        with starting():
            from ..export.native import export_native

        made = export_native(
            model, form, output or Path(f"{name}-{form}"), revision=revision, trust_remote_code=trust_remote_code
        )
        say(f"wrote {made.folder} as {made.form}: transformers computes the same logits, in one pass and step by step")
        if made.tokens:
            say(f"warning: {made.tokens}")
        for engine, difference in made.differences.items():
            say(f"{engine} ran it: {difference:.0e} of the largest logit apart")
        for one in made.engines:
            say(f"{one.name}: {'yes' if one.takes else 'no'}{f', {one.note}' if one.note else ''}")
        return
    with starting():
        from ..export.to_onnx import export_onnx

    folder = output or Path(f"{name}-onnx")
    say(f"wrote {export_onnx(model, folder, revision=revision, trust_remote_code=trust_remote_code)}")
