"""`linearize generate`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..terminal.output import Json, print_json


def generate(
    model: Annotated[str, typer.Argument(help="A model folder, linearized or not, or a Hub id.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most this many tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample among the likeliest tokens of this total probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Of the sampling.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="keep, float32, bfloat16 or float16.")] = "keep",
    teacher: Annotated[bool, typer.Option("--teacher", help="Run softmax on the weights of this folder.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the decode step: faster after a quarter of a minute, on a GPU.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the model ships.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    as_json: Json = False,
) -> None:
    """Continue a text, printed as it is written."""
    from ..measure.generate import Sampling, check_request, generate, load

    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    check_request(prompt, sampling)
    loaded = load(model, revision, device=device, dtype=dtype, teacher=teacher, trust_remote_code=trust_remote_code)

    def write(text: str) -> None:
        print(text, end="", flush=True)

    result = generate(loaded, prompt, sampling, (lambda text: None) if as_json else write, compiled)
    if as_json:
        print_json(result)
    else:
        print()
        print(f"{len(result['tokens'])} tokens, {result['tokens_per_s']:.1f} a second", file=sys.stderr)
