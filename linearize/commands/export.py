"""`linearize export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import LinearizeError, did_you_mean
from ..terminal.output import say


def export(
    model: Annotated[str, typer.Argument(help="Converted model: a local folder or a Hub id.")],
    to: Annotated[str, typer.Option("--to", help="Format: onnx.")] = "onnx",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder. Default: ./NAME-onnx.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow the model's own Python code to run.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
) -> None:
    """Write a converted model of gla, retnet or gdn for another runtime."""
    if to == "gguf":
        raise LinearizeError(
            "--to gguf: no architecture of llama.cpp has these layers. It computes Gated DeltaNet only as part of "
            "Qwen3-Next, and has no GLA, RetNet or GSA in a model of another architecture. Use --to onnx"
        )
    if to != "onnx":
        raise LinearizeError(f"--to {to}: choose onnx.{did_you_mean(to, ('onnx',))}")
    from ..export.to_onnx import export_onnx

    written = export_onnx(
        model,
        output or Path(f"{model.rstrip('/').rpartition('/')[2]}-onnx"),
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    say(f"wrote {written}")
