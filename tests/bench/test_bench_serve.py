"""`linearize bench serve` without vLLM: what it asks an engine, the table of the answers, messages of failures."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Command, holds
from models import HYBRID, copied

from linearize.bench import serve
from linearize.errors import Exit, LinearizeError

if TYPE_CHECKING:
    from models import Zoo

# What stands for serve_engine.py: it writes the result that its arguments ask for.
ENGINE = """
import json, subprocess, sys, time
asked = json.loads(sys.argv[1])
if asked["options"].get("sleep"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    sys.stdout.buffer.write(b"child %d of half a letter \\xe2\\x96" % child.pid); sys.stdout.flush(); time.sleep(60)
if code := asked["options"].get("fail"):
    print("WARNING OSError: slow"); print("(Worker) ERROR ModuleNotFoundError: no vision"); print("line" * 2000)
    print("a traceback"); print("bench serve: the card is full"); sys.exit(code)
quick = 2.0 if "linear" in asked["model"] else 1.0
figures = {"step_ms": 3.0 / quick, "written_tokens_s": 1000 * quick, "read_tokens_s": 5e4}
result = {"start_s": 60.0, "first_request_s": 0.02, "tenth_request_s": 0.01, "fits": {"32768": 100 * quick}}
result["loads"] = {f"{n} x {t}": figures for n, t in asked["loads"]}
result |= {"trusted": asked["options"]["trust_remote_code"], "options": asked["options"]}
result["machine"] = {"device": "a card", "vllm": "0", "torch": "2"}
open(asked["result"], "w").write(json.dumps(result))
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run ENGINE in place of vLLM; the models that were looked for before."""
    sources: list[str] = []
    script, start = tmp_path / "engine.py", subprocess.Popen
    script.write_text(ENGINE)
    monkeypatch.setattr(serve, "is_installed", lambda name: True)

    def opened(model: str, *more: Any, **_: Any) -> Any:
        sources.append(model)
        return SimpleNamespace(folder=Path(model), revision=more[0] or "f00d" if model.startswith("hub/") else None)

    monkeypatch.setattr(serve, "open_source", opened)
    monkeypatch.setattr(
        serve.subprocess, "Popen", lambda command, **more: start([sys.executable, str(script), command[-1]], **more)
    )
    return sources


@pytest.mark.usefixtures("engine")
def test_a_model_stands_beside_its_source(linearize: Command) -> None:
    asked = ("bench", "serve", "a/linear", "--source", "a/source", "--loads", "2x16,1x8", "--engine", "dtype=bfloat16")
    shown = linearize(*asked)[1]
    assert "| 2 x 16 | source | 3.00 | 1,000 | 50,000 |" in shown
    assert "| 2 x 16 | linear | 1.50 (0.50x) | 2,000 (2.00x) | 50,000 (1.00x) |" in shown
    assert "| linear | 60 s | 20 ms | 10 ms | 200 (2.00x) |" in shown
    result = json.loads(linearize(*asked, "--steps", "8", "--json")[1])
    assert result["steps"] == 8
    assert list(result["models"]) == ["a/source", "a/linear"]


@pytest.mark.parametrize("code", [Exit.USAGE, Exit.INCOMPATIBLE, Exit.CHECK_FAILED])
def test_a_failed_engine_says_how_its_log_ends(engine: list[str], code: Exit) -> None:
    """And nothing else, where it gave its reason; else what went wrong first, however long ago."""
    with pytest.raises(LinearizeError) as raised:
        serve.bench_serve(["m", "other"], options={"fail": int(code)})
    assert raised.value.code == code
    assert holds(raised.value.message, "m:", "card", "full")
    for told in ("traceback", "ModuleNotFoundError: no vision"):
        assert (told in raised.value.message) == (code == Exit.CHECK_FAILED)
    assert engine == ["m", "other"]


def test_models_are_looked_for_before_the_first_is_measured(
    linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "is_installed", lambda name: True)
    monkeypatch.setattr(serve, "run_engine", lambda *_: pytest.fail("an engine was started"))
    code, _, err = linearize("bench", "serve", tmp_path / "absent", "--source", "demo")
    assert (code, "absent" in err) == (Exit.INCOMPATIBLE, True), err


def test_without_vllm_the_message_names_it(linearize: Command) -> None:
    code, _, message = linearize("bench", "serve", "m")
    assert code == Exit.RESOURCE
    assert "vLLM" in message
    assert linearize("bench", "serve", "")[0] == Exit.USAGE


@pytest.mark.parametrize("given", ["64", "64x", "0x5", "ax5", "²x5", f"1x{'9' * 5000}"])
def test_loads_are_requests_by_tokens(given: str) -> None:
    assert serve.parse_loads("64x512, 1x8") == (serve.Load(64, 512), serve.Load(1, 8))
    with pytest.raises(LinearizeError) as raised:
        serve.parse_loads(given)
    assert raised.value.code == Exit.USAGE


@pytest.mark.usefixtures("engine")
def test_code_of_a_model_runs_in_the_engine_only_when_trusted(zoo: Zoo, tmp_path: Path) -> None:
    """That of a converted folder is known; what vLLM may do with any other model is for the person to say."""
    folder = copied(zoo.folders("llama", HYBRID)[1], tmp_path / "folder")
    models = [str(tmp_path), str(folder)]

    def trusted(**how: bool) -> list[bool]:
        return [one["trusted"] for one in serve.bench_serve(models, **how)["models"].values()]

    assert trusted() == [False, True]
    assert trusted(trust_remote_code=True) == [True, True]
    with (folder / "gsa.py").open("a") as file:
        file.write("print(1)\n")
    assert trusted(trust_remote_code=True) == [True, True]
    with pytest.raises(LinearizeError) as raised:
        trusted()
    assert (raised.value.code, holds(raised.value.message, "gsa.py", "--trust-remote-code")) == (3, True)


@pytest.mark.usefixtures("engine")
def test_an_engine_takes_the_commit_that_was_looked_at(linearize: Command, tmp_path: Path) -> None:
    """Meanwhile the Hub may have other code under the name."""
    asked = ("bench", "serve", "hub/linear", "--source", "hub/source", "--loads", "1x8", "--json")
    for more, wanted in (((), "f00d"), (("--revision", "v1"), "v1")):
        found = json.loads(linearize(*asked, *more)[1])["models"]
        for name, commit in (("hub/source", "f00d"), ("hub/linear", wanted)):
            assert {found[name]["options"][key] for key in serve.PINNED} == {commit}
    (tmp_path / "config.json").write_text("{}")
    here = json.loads(linearize("bench", "serve", tmp_path, "--loads", "1x8", "--json")[1])["models"]
    assert not here[str(tmp_path)]["options"].keys() & {*serve.PINNED}
    code, _, err = linearize(*asked, "--engine", "code_revision=v1")
    assert (code, holds(err, "code_revision=v1", "--revision")) == (Exit.USAGE, True), err


@pytest.mark.usefixtures("engine")
def test_an_engine_that_takes_too_long_ends_with_all_that_it_started() -> None:
    with pytest.raises(LinearizeError) as raised:
        serve.bench_serve(["m"], options={"sleep": True}, timeout=1.5)
    assert raised.value.code == Exit.CHECK_FAILED
    child = re.search(r"child (\d+) of half a letter", raised.value.message)
    assert child
    state, until = Path("/proc", child[1], "stat"), time.monotonic() + 20
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while ") Z " not in state.read_text():
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize(
    "given",
    [
        *("dtype", "=1", "a b=1", "dtype={", "dtype=!!python/object:os.system x"),
        *("model=other", "seed=2026-01-31", "seed=2026-13-31"),
    ],
)
def test_options_of_the_engine_are_key_and_value(given: str) -> None:
    assert serve.parse_options(["a=1", "b=x", "c={d: 2}"]) == {"a": 1, "b": "x", "c": {"d": 2}}
    with pytest.raises(LinearizeError) as raised:
        serve.parse_options([given])
    assert raised.value.code == Exit.USAGE
