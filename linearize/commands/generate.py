"""`linearize generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..terminal.arguments import Device, Dtype, Revision, Trust
from ..terminal.arguments import model as model_name
from ..terminal.output import Json, counted, print_json, say, show
from ..terminal.progress import starting


def generate(
    model: Annotated[
        str, typer.Argument(help="Model: a local folder, converted or not, a Hub id, or demo.", parser=model_name)
    ],
    prompt: Annotated[str, typer.Argument(help="Text to continue, or with --chat a message to answer.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask by the model's chat template, and print the answer alone.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of new tokens.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature. 0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens that have this total probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Sampling seed.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "keep",
    teacher: Annotated[bool, typer.Option("--teacher", help="Run the softmax teacher on the same weights.")] = False,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="On a GPU, compile the decode step: takes about 15 s, then decoding is faster."),
    ] = False,
    trust_remote_code: Trust = False,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Continue a text: print the prompt, then what the model writes, token by token. With --chat answer a message."""
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

    result = generate(loaded, prompt, sampling, (lambda text: None) if as_json else write, compiled, chat)
    if as_json:
        print_json(result)
    else:
        print()
        say(f"{counted(len(result['tokens']), 'token')}, {result['tokens_per_s']:.1f} a second")
