"""`linearize generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..terminal.arguments import model as model_name
from ..terminal.output import Json, counted, print_json, say, show
from ..terminal.progress import starting


def generate(
    model: Annotated[
        str, typer.Argument(help="Model: a local folder, converted or not, a Hub id, or demo.", parser=model_name)
    ],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of new tokens.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature. 0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens that have this total probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Sampling seed.")] = 0,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Dtype: keep, float32, bfloat16 or float16.")] = "keep",
    teacher: Annotated[bool, typer.Option("--teacher", help="Run the softmax teacher on the same weights.")] = False,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile the decode step. It takes about 15 s, then decoding is faster; for GPUs."
        ),
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the model that linearize did not write.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    as_json: Json = False,
) -> None:
    """Continue a text: print the prompt, then what the model writes, token by token."""
    with starting():
        from linearize_kernels.hf.attention_hooks import NO_TEACHER, TRAINED

        from ..measure.generate import Sampling, check_request, generate, load

    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    check_request(prompt, sampling)
    loaded = load(model, revision, device=device, dtype=dtype, teacher=teacher, trust_remote_code=trust_remote_code)
    if teacher and getattr(loaded.model.config, TRAINED, False):
        say(f"note: {NO_TEACHER}")

    def write(text: str) -> None:
        show(text, end="")

    result = generate(loaded, prompt, sampling, (lambda text: None) if as_json else write, compiled)
    if as_json:
        print_json(result)
    else:
        print()
        say(f"{counted(len(result['tokens']), 'token')}, {result['tokens_per_s']:.1f} a second")
