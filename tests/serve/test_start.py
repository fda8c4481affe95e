"""`linearize serve`: which server it starts, with what, and what it refuses before."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import holds
from models import copied

from linearize.errors import Exit, LinearizeError
from linearize.serve import start, with_transformers

if TYPE_CHECKING:
    from conftest import Command
    from models import Zoo


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The servers that are installed, to be filled by a test."""
    names: list[str] = []
    monkeypatch.setattr(start, "is_installed", lambda name: name in names)
    return names


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would take the place of this process."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    return commands


def test_the_first_server_that_is_installed_is_chosen(installed: list[str]) -> None:
    with pytest.raises(LinearizeError, match=r"installed.*\[vllm\]\".*many.*transformers\[serving\]") as none:
        start.choose("auto")
    assert none.value.code == Exit.RESOURCE
    installed += ["transformers"]
    assert start.choose("auto") == "transformers"
    installed += ["vllm"]
    assert start.choose("auto") == "vllm"
    assert start.choose("transformers") == "transformers"


def test_an_address_that_is_taken_is_refused_before_the_model_is_read(
    installed: list[str], started: list[list[str]], linearize: Command
) -> None:
    installed += ["transformers"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for words in (["--port", str(port)], ["--", "--port", str(port)]):
            code, _, err = linearize("serve", "absent", *words)
            assert code == Exit.RESOURCE
            assert f"127.0.0.1, port {port}: " in err
            assert holds(err, "--port", "--host")
    start.check_address("127.0.0.1", str(port))
    assert started == []


def test_what_the_server_of_transformers_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["torch>=2", "openai; extra == 'serving'", "typer; extra == 'serving'", "rouge; extra == 'testing'"]
    monkeypatch.setattr("importlib.metadata.Distribution.requires", needs)
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "openai":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    assert start.lacks() == ["openai"]
    assert start.remedies().endswith("(one at a time, without openai)")


def test_a_server_that_is_absent_or_unknown_is_refused(installed: list[str]) -> None:
    installed += ["transformers"]
    with pytest.raises(LinearizeError, match=r"--server.*vllm.*one") as absent:
        start.choose("vllm")
    assert absent.value.code == Exit.RESOURCE
    with pytest.raises(LinearizeError, match=r"--server.*vlm.*'vllm'") as unknown:
        start.choose("vlm")
    assert unknown.value.code == Exit.USAGE


def test_whether_vllm_is_installed_is_asked_without_importing_it() -> None:
    assert start.is_installed("vllm") in (True, False)
    assert "vllm" not in sys.modules


def test_the_command_line_starts_vllm(
    linearize: Command, zoo: Zoo, installed: list[str], started: list[list[str]]
) -> None:
    _, folder = zoo.folders("llama")
    installed += ["vllm", "transformers"]
    code, _, message = linearize("serve", str(folder), "--port", "8123", "--", "--max-model-len", "128")
    assert code == 0, message
    assert "Once the server is up:\ncurl " in message
    (command,) = started
    assert command[:5] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    assert command[5:] == [
        *("--trust-remote-code", "--served-model-name", str(folder)),
        *("--host", "127.0.0.1", "--port", "8123", "--max-model-len", "128"),
    ]


def test_the_command_line_starts_transformers(
    linearize: Command, zoo: Zoo, installed: list[str], started: list[list[str]]
) -> None:
    _, folder = zoo.folders("llama")
    installed += ["vllm", "transformers"]
    assert linearize("serve", str(folder), "--server", "transformers", "--host", "0.0.0.0")[0] == 0
    assert started == [
        [sys.executable, "-m", "linearize.serve.with_transformers", str(folder), "--host", "0.0.0.0", "--port", "8000"]
    ]


@pytest.mark.parametrize(
    ("file", "text"),
    [("", ""), ("chat_template.jinja", "{{ x }}"), ("tokenizer_config.json", '{"chat_template": "x"}')],
)
def test_a_model_without_a_template_for_chats_is_told(
    linearize: Command, zoo: Zoo, installed: list[str], started: list[list[str]], tmp_path: Path, file: str, text: str
) -> None:
    folder = copied(zoo.folders("llama")[1], tmp_path / "linear")
    installed += ["vllm"]
    if file:
        (folder / file).write_text(text)
    code, _, told = linearize("serve", folder)
    assert code == 0, told
    assert ("note: the model has no chat template" in told) == (not file)
    assert "no chat template" not in linearize("serve", folder, "--", "--chat-template", "x.jinja")[2]
    assert len(started) == 2


@pytest.mark.parametrize(
    ("server", "given", "place", "named"),
    [
        ("vllm", ["--port", "8123"], "http://127.0.0.1:8123", "{}"),
        ("vllm", ["--host", "0.0.0.0", "--", "--served-model-name=mine"], "http://127.0.0.1:8000", "mine"),
        ("transformers", ["--host", "::", "--", "--port", "81"], "http://[::1]:81", "{}"),
    ],
)
def test_a_request_to_the_server_can_be_pasted(
    linearize: Command,
    zoo: Zoo,
    installed: list[str],
    started: list[list[str]],
    tmp_path: Path,
    server: str,
    given: list[str],
    place: str,
    named: str,
) -> None:
    """It names the model as it is served, and the place that takes what the model can do."""
    folder = copied(zoo.folders("llama")[1], tmp_path / "it's linear")
    installed += [server]
    for path, key in (("completions", "prompt"), ("chat/completions", "messages")):
        code, _, told = linearize("serve", folder, *given)
        assert code == 0, told
        name = named.format(folder)
        assert f"the model's name, {name}." in told
        words = shlex.split(next(line for line in told.splitlines() if line.startswith("curl ")))
        assert words[:5] == ["curl", f"{place}/v1/{path}", "-H", "Content-Type: application/json", "-d"]
        body = json.loads(words[5])
        assert body["model"] == name
        assert key in body
        assert f"starting {shlex.join(started[-1])}" in told
        (folder / "chat_template.jinja").write_text("{{ x }}")


def test_a_model_that_is_not_converted_is_refused(linearize: Command, zoo: Zoo, installed: list[str]) -> None:
    source, _ = zoo.folders("llama")
    installed += ["vllm"]
    code, _, message = linearize("serve", str(source))
    assert code == Exit.INCOMPATIBLE
    assert holds(message, "linearize", "vllm", "transformers")


def test_code_that_linearize_did_not_write_needs_trust(
    linearize: Command, zoo: Zoo, installed: list[str], started: list[list[str]], tmp_path: Path
) -> None:
    from models import copied

    folder = copied(zoo.folders("llama")[1], tmp_path / "changed")
    path = folder / "attention_hooks.py"
    path.write_text(path.read_text("utf-8") + "# mine\n", "utf-8")
    installed += ["vllm"]
    code, _, message = linearize("serve", str(folder))
    assert code == Exit.INCOMPATIBLE
    assert "attention_hooks.py" in message
    assert started == []
    assert linearize("serve", str(folder), "--trust-remote-code")[0] == 0
    assert len(started) == 1


def test_what_vllm_cannot_run_is_told_with_the_other_server(
    linearize: Command, zoo: Zoo, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: object) -> None:
        raise ValueError(f"{type(config).__name__} computes softmax in its own code")

    monkeypatch.setattr(start, "layers_of", refuse)
    installed += ["vllm"]
    code, _, message = linearize("serve", str(zoo.folders("llama")[1]))
    assert code == Exit.INCOMPATIBLE
    assert holds(message, "LinearizedLlamaConfig", "--server", "transformers")


def test_a_lora_apart_from_the_weights_is_not_left_out(
    linearize: Command, zoo: Zoo, installed: list[str], tmp_path: Path
) -> None:
    installed += ["vllm"]
    folder = copied(zoo.folders("llama")[1], tmp_path / "run")
    recipe = {"finish": {"merge_lora": False}, "stages": [{"lora": {"r": 4}}]}
    manifest = json.loads((folder / "linearize.json").read_text())
    (folder / "linearize.json").write_text(json.dumps(manifest | {"recipe": recipe}))
    code, _, message = linearize("serve", str(folder))
    assert code == Exit.INCOMPATIBLE
    assert holds(message, "LoRA", "apart", "finish.merge_lora=true")


def test_the_class_of_a_folder_is_put_where_transformers_serve_looks(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    module = with_transformers.transformers
    monkeypatch.setattr(module, "LinearizedLlamaForCausalLM", None, raising=False)
    found = with_transformers.register(str(zoo.folders("llama")[1]))
    assert module.LinearizedLlamaForCausalLM is found
    assert found.__name__ == "LinearizedLlamaForCausalLM"


def test_transformers_lists_the_folder_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own list is that of the Hub's cache, and an error where there is none."""
    from transformers.cli.serving.model_manager import ModelManager

    monkeypatch.setattr(with_transformers, "register", lambda folder: None)
    seen: list[Any] = []

    def serve(command: list[str], prog_name: str) -> None:
        seen.append((command, [model["id"] for model in ModelManager.get_gen_models()]))

    monkeypatch.setattr("transformers.cli.transformers.app", serve)
    with_transformers.main("demo-gla", ["--port", "1"])
    assert seen == [(["serve", "demo-gla", "--trust-remote-code", "--port", "1"], ["demo-gla"])]
