"""`linearize serve`: choose a server that is installed, check the model, and make the command that starts it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.import_utils import is_serve_available

from ..checkpoint.manifest import is_linearized
from ..checkpoint.provenance import check_code, check_merged, open_config, outdated
from ..checkpoint.source import open_source, read_header, read_json
from ..errors import IncompatibleError, ResourceError, check_choice, reason_of
from ..extras import checkout, required, with_extra
from ..terminal.output import say
from .folder import layers_of

SERVERS = ("vllm", "transformers")


def server_command(
    model: str,
    revision: str | None,
    *,
    server: str,
    host: str,
    port: int,
    trust_remote_code: bool,
    options: Sequence[str] = (),
) -> list[str]:
    """The command that serves a converted model of a folder or of the Hub; `options` go to the server as they are.
    Says what a request looks like.

    Raises LinearizeError: 2 for an unknown server, 3 for a model that is not converted, that needs trust, or that the
    server cannot run, 4 for a server that is not installed and for an address that is taken, 5 for the Hub.
    """
    chosen = choose(server)
    listening = ["--host", host, "--port", str(port), *options]
    check_address(value_of(listening, "--host") or host, value_of(listening, "--port") or str(port))
    source = open_source(model, revision)
    folder = str(source.folder)
    if not is_linearized(source.folder):
        message = f"{model} is not linearized. Serve it without linearize: vllm serve, or transformers serve"
        raise IncompatibleError(message)
    plan = check_code(source.folder, trust_remote_code)
    check_merged(source.folder, model)
    for shard in source.shards:
        read_header(shard)  # one that is cut short is named here, and not in the midst of a server's start
    config = open_config(source.folder)
    if "AutoModelForCausalLM" not in config.auto_map:
        message = f"{config.architectures[0]} writes no text, which is what servers are for. Load it in Python"
        raise IncompatibleError(message)
    if chosen == "transformers":
        if reason := outdated(source.folder, plan):
            raise IncompatibleError(reason)
        name = folder
        command = [sys.executable, "-m", "linearize.serve.with_transformers", folder, *listening]
    else:
        try:
            layers_of(config)
        except ValueError as error:
            raise IncompatibleError(f"{error}. Or add --server transformers") from error
        name = value_of(options, "--served-model-name") or model
        named = ["--trust-remote-code", "--served-model-name", model]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, *named, *listening]
    chats = has_chat_template(source.folder) or value_of(options, "--chat-template") is not None
    if not chats:
        say("note: the model has no chat template, so the server answers /v1/chat/completions with an error")
    say(f"requests give the model's name, {name}. Once the server is up:\n{request(name, listening, chats)}")
    return command


def check_address(host: str, port: str) -> None:
    """Raise LinearizeError (exit 4) where nothing can listen there: a server says so only when the model is loaded."""
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that a server has just left is free
            trial.bind(address)
    except OSError as error:
        message = f"{host}, port {port}: {reason_of(error)}. Choose another with --port, or --host"
        raise ResourceError(message) from error


def has_chat_template(folder: Path) -> bool:
    """Whether a model's folder says how a chat is written."""
    settings = folder / "tokenizer_config.json"
    known = settings.is_file() and read_json(settings).get("chat_template")
    return bool(known) or any(folder.glob("chat_template*"))


def request(name: str, options: Sequence[str], chats: bool) -> str:
    """A request to a server with these options, as a command: a chat, or text to continue."""
    host, port = (value_of(options, option) or "" for option in ("--host", "--port"))
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # all addresses; a request goes to one
    place = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1/{'chat/' if chats else ''}completions"
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if chats else {"prompt": "Hello"}
    body = json.dumps({"model": name, **asked, "max_tokens": 40}, ensure_ascii=False)
    return shlex.join(["curl", place, "-H", "Content-Type: application/json", "-d", body])


def value_of(options: Sequence[str], name: str) -> str | None:
    """The value of a server's option, the last where it stands twice, as servers take it; None where it is absent."""
    found = None
    for option, after in zip(options, [*options[1:], ""], strict=False):
        if option == name or option.startswith(f"{name}="):
            found = after if option == name else option.partition("=")[2]
    return found


def choose(server: str) -> str:
    """The server that `auto` stands for here, or the one that was asked for.

    Raises LinearizeError: 2 for an unknown one, 4 where it, or for `auto` any, is not installed.
    """
    check_choice("--server", server, ("auto", *SERVERS))
    found = [name for name in SERVERS if is_installed(name)]
    if server == "auto" and found:
        return found[0]
    if server not in found:
        what = "no server is installed" if server == "auto" else f"--server {server}: it is not installed"
        raise ResourceError(f"{what}. Install one: {remedies()}")
    return server


def remedies() -> str:
    """The commands that install a server."""
    place = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        place = checkout(importlib.metadata.distribution("linearize"))
    many = f"{with_extra('vllm', place)} (many requests at a time)"
    lacking = f", without {', '.join(missing)}" if (missing := lacks()) else ""
    return f'{many}, or pip install "transformers[serving]" (one at a time{lacking})'


def lacks() -> list[str]:
    """The packages of transformers' own extra for its server that are not installed."""
    found = []
    for requirement in required(importlib.metadata.distribution("transformers"), "serving"):
        try:
            importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(requirement.name)
    return found


def is_installed(server: str) -> bool:
    """Whether a server can be started here; vLLM is not imported for that."""
    return importlib.util.find_spec("vllm") is not None if server == "vllm" else bool(is_serve_available())
