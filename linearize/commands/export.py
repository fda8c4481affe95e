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
    "--to gguf: llama.cpp computes GLA and Gated DeltaNet inside architectures of its own (RWKV6-Qwen2, Qwen3-Next and "
    "others), which have other projections and gates around them than a converted model, and it has no architecture "
    "that takes them in place of softmax. Use --to onnx, or linearize serve"
)


def export(
    model: Annotated[str, typer.Argument(help="Converted model: a local folder or a Hub id.")],
    to: Annotated[str, typer.Option("--to", help="Format: onnx.")] = "onnx",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder. Default: ./NAME-onnx.", parser=path)
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the model that linearize did not write.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
) -> None:
    """Write a converted model of gla, retnet, gdn or window for another runtime, and check it against the model."""
    if to == "gguf":
        raise LinearizeError(NO_GGUF, Exit.INCOMPATIBLE)
    if to != "onnx":
        raise LinearizeError(f"--to {to}: choose onnx.{did_you_mean(to, ('onnx',))}")
    with starting():
        from ..export.to_onnx import export_onnx

    here = os.path.expanduser(model)
    name = os.path.basename(os.path.realpath(here) if os.path.isdir(here) else model.rstrip("/"))
    folder = output or Path(f"{name}-onnx")
    say(f"wrote {export_onnx(model, folder, revision=revision, trust_remote_code=trust_remote_code)}")
