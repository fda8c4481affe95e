"""`linearize serve`."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

from ..terminal.arguments import Converted, Revision, Trust, one_of
from ..terminal.output import say
from ..terminal.progress import starting


def serve(
    model: Converted,
    options: Annotated[
        list[str] | None, typer.Argument(help="Options of the server, after --: -- --max-model-len 4096")
    ] = None,
    server: Annotated[
        str,
        typer.Option(
            help="Server: vllm, transformers, or auto, the first that is installed.",
            callback=one_of("--server", ("auto", "vllm", "transformers")),
        ),
    ] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    trust_remote_code: Trust = False,
    revision: Revision = None,
) -> None:
    """Serve a converted model over HTTP with OpenAI's API, by vLLM or transformers. The exit code is the server's."""
    with starting():
        from ..serve.start import server_command

    command = server_command(
        model, revision, server=server, host=host, port=port, trust_remote_code=trust_remote_code, options=options or ()
    )
    say(f"starting {shlex.join(command)}")
    os.execv(command[0], command)  # signals then reach the server itself
