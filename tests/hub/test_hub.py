"""The Hub, on 127.0.0.1 with the real client: push, load and convert from it, and each of its refusals."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import Command, holds
from hub_server import TOKEN, Hub, Repo, serve
from huggingface_hub import HfApi, constants, get_session, metadata_load
from models import HYBRID, Zoo, load, logits, save_source, tokens
from safetensors.torch import save_file
from training import T, base, byte_tokenizer, make_recipe, stage, train, write_recipe

import linearize.hub.push
from linearize.checkpoint import card
from linearize.checkpoint.atomic import MANIFEST
from linearize.checkpoint.write import MIXER_SHARD
from linearize.convert import convert, plan_conversion
from linearize.data.documents import open_dataset
from linearize.errors import Exit, LinearizeError
from linearize.hub.push import check_card, plan_push, push
from linearize.job.dry_run import dry_run
from linearize.recipe.recipe import load_recipe
from linearize.terminal.output import nats

REPO = "user/tiny-gsa"
LLAMA_CARD = """---
license: llama3.2
license_name: llama-licence
license_link: LICENSE
language: [en, de]
tags: [theirs]
base_model: someone/else
---
# Theirs
"""

# Runs before everything else in a process: any address but 127.0.0.1 is an error, and linearize is not there.
GUARD = """
import os, sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        host = arguments[1] if event == "socket.connect" else arguments[:1]
        if isinstance(host, tuple):
            with open(os.environ["GUARD_LOG"], "a") as log:
                print(host[0], file=log)
            if host[0] != "127.0.0.1":
                raise PermissionError(f"a request left this machine: {host}")
sys.addaudithook(watch)
for name in os.environ.get("GUARD_HIDES", "").split():
    sys.modules[name] = None
"""

LOAD = """
import sys, torch
from huggingface_hub import snapshot_download
from transformers import AutoModel, AutoModelForCausalLM
repo, ids, out = sys.argv[1], torch.load(sys.argv[2]), sys.argv[3]
folder = snapshot_download(repo)
model, report = AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True, output_loading_info=True)
assert not any(report.values()), report
bare = AutoModel.from_pretrained(repo, trust_remote_code=True).eval()
with torch.no_grad():
    found = model.eval()(input_ids=ids, use_cache=False).logits
    hidden = bare(input_ids=ids, use_cache=False).last_hidden_state
    torch.save({"logits": found, "bare": model.lm_head(hidden), "folder": folder}, out)
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub that this process takes for the real one, with an empty cache and a valid token."""
    with serve() as served:
        template = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the clean process, where something else is the point."""
    monkeypatch.setattr("linearize.verify.reload.check_keys", lambda folder, advance: 0)


@pytest.fixture
def folder(zoo: Zoo, tmp_path: Path) -> Path:
    """A converted model that a test may change."""
    return Path(shutil.copytree(zoo.folders("llama", HYBRID)[1], tmp_path / "linear"))


def put_source(hub: Hub, place: Path, name: str = "user/base", shard: str = "5GB", **files: bytes) -> Path:
    """A source repository with a tokenizer, a card and more; returns the folder that it was made of."""
    save_source(place, shard=shard)
    byte_tokenizer().save_pretrained(place)
    (place / "README.md").write_text(LLAMA_CARD)
    (place / "LICENSE").write_text("terms")
    repo = hub.repos.setdefault(name, Repo())
    repo.commit({path.name: path.read_bytes() for path in place.iterdir()} | files)
    return place


def refused(code: Exit, call: Callable[[], Any]) -> str:
    """The message of the LinearizeError with that exit code which the call raises; never with a token in it."""
    with pytest.raises(LinearizeError) as caught:
        call()
    assert caught.value.code == code, caught.value.message
    assert TOKEN not in caught.value.message
    return caught.value.message


# ---------------------------------------------------------------- there and back


@pytest.mark.slow
def test_what_is_pushed_loads_elsewhere_and_nothing_leaves_this_machine(folder: Path, tmp_path: Path) -> None:
    """Every process is watched: an audit hook sees Python's sockets, and a proxy would catch those of native code."""
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "sitecustomize.py").write_text(GUARD)
    log = tmp_path / "addresses"
    torch.save(tokens(2, 20), tmp_path / "ids.pt")
    with serve() as hub, serve() as proxy:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": TOKEN,
            "PYTHONPATH": os.pathsep.join([str(tmp_path / "guard"), os.environ.get("PYTHONPATH", "")]),
            "GUARD_LOG": str(log),
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), proxy.endpoint),
            "NO_PROXY": "127.0.0.1",
        }
        environment.pop("HF_MODULES_CACHE")

        def run(*arguments: Any, **more: str) -> str:
            done = subprocess.run(
                [sys.executable, *map(str, arguments)], env=environment | more, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert TOKEN not in done.stdout + done.stderr
            return done.stdout

        pushed = json.loads(run("-m", "linearize", "push", folder, REPO, "--json", "--message", "mine"))
        repo = hub.repos[REPO]
        assert pushed["commit"] == repo.refs["main"]
        assert repo.messages == ["mine"]
        assert hub.blobs
        listed = json.loads((folder / MANIFEST).read_text())["files"]
        assert set(repo.files()) == {*listed, ".gitattributes"}
        for name in listed:
            if name != "README.md":
                assert repo.files()[name] == (folder / name).read_bytes()
        assert f'name = "{REPO}"'.encode() in repo.files()["README.md"]

        hides = {"GUARD_HIDES": "linearize linearize_kernels triton peft"}
        run("-c", LOAD, REPO, tmp_path / "ids.pt", tmp_path / "out.pt", HF_TOKEN="", **hides)
        assert not proxy.requests
    found = torch.load(tmp_path / "out.pt")
    assert torch.equal(found["logits"], logits(load(folder), tokens(2, 20)))
    assert torch.equal(found["bare"], found["logits"])
    assert set(log.read_text().split()) == {"127.0.0.1"}
    assert {path.name for path in Path(found["folder"]).iterdir()} == set(repo.files())


def test_the_guard_sees_a_request_that_leaves(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 1)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "GUARD_LOG": str(tmp_path / "log")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert holds(done.stderr, "request", "machine")
    assert "192.0.2.1" in (tmp_path / "log").read_text()


def test_an_interrupted_push_goes_on(hub: Hub, tmp_path: Path, unverified: None) -> None:
    source = save_source(tmp_path / "source", shard="20KB")
    output = tmp_path / "linear"
    convert(*plan_conversion(str(source), "gsa"), output, level="none", say=lambda text: None)
    large = {path.read_bytes() for path in output.glob("*.safetensors")}
    assert len(large) > 3
    upload = plan_push(output, REPO)
    hub.accept_uploads = 2
    message = refused(Exit.HUB, lambda: push(upload, lambda text: None))
    assert "403" in message
    assert set(hub.repos[REPO].files()) == {".gitattributes"}  # never half a model
    hub.accept_uploads = -1
    sent = len(hub.paths("PUT"))
    push(plan_push(output, REPO), lambda text: None)
    assert len(hub.blobs) == len(large)
    assert len(hub.paths("PUT")) - sent == len(large) - 2
    assert set(upload.files) < set(hub.repos[REPO].files())


@pytest.mark.parametrize("lfs", [True, False], ids=["lfs", "regular"])
def test_a_push_replaces_the_one_before(hub: Hub, folder: Path, unverified: None, lfs: bool) -> None:
    hub.lfs = lfs
    manifest = json.loads((folder / MANIFEST).read_text())
    old = folder / "model-source-00002-of-00002.safetensors"
    save_file({"before": torch.zeros(1)}, old)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "files": [*manifest["files"], old.name]}))
    push(plan_push(folder, REPO), lambda text: None)
    repo = hub.repos[REPO]
    repo.commit({**repo.files(), "picture.png": b"of a person"})
    old.unlink()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    push(plan_push(folder, REPO), lambda text: None)
    assert old.name not in repo.files()
    assert repo.files()["picture.png"] == b"of a person"
    for name in manifest["files"]:
        assert name == "README.md" or repo.files()[name] == (folder / name).read_bytes()
    assert bool(hub.blobs) == lfs
    commits = len(repo.commits)
    push(plan_push(folder, REPO), lambda text: None)
    assert len(repo.commits) == commits  # nothing has changed


# ---------------------------------------------------------------- the command


def test_a_dry_run_prints_what_would_be_uploaded(linearize: Command, hub: Hub, folder: Path, unverified: None) -> None:
    (folder / "notes.txt").write_text("my own")
    code, out, err = linearize("push", folder, REPO, "--dry-run", "--json", "--private", "--pr", "--message", "mine")
    assert code == 0, err
    upload = json.loads(out)["upload"]
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    card = upload["files"].pop("README.md")  # as it is uploaded: it loads the model by the repository's name
    assert 0 < card < (folder / "README.md").stat().st_size + len(REPO)
    assert upload["files"] == {name: (folder / name).stat().st_size for name in listed if name != "README.md"}
    assert (upload["repo"], upload["private"], upload["pr"], upload["message"]) == (REPO, True, True, "mine")
    total = f"{sum(upload['files'].values()) + card:,}"
    assert f"to {REPO}: mine" in err
    assert holds(err.splitlines()[-1], "nothing", "--dry-run")
    assert ["sum", total] in [line.split() for line in err.splitlines()]
    for message in (*listed, f'name = "{REPO}"', "for linearize did not write them: notes.txt", "names no license"):
        assert message in err
    assert hub.requests == []


def test_what_a_card_lacks_can_be_pasted(folder: Path) -> None:
    """Where it has metadata, and where somebody wrote a card without."""
    path = folder / "README.md"
    first, *others = check_card(path)
    begin, *lines = first.splitlines()
    assert holds(begin, "no license", "no base_model", "README.md", "---")
    path.write_text("\n".join(["---", *lines, path.read_text("utf-8").removeprefix("---\n")]), "utf-8")
    assert (check_card(path), others) == ([], [])
    assert {"license": "other", "library_name": "transformers"}.items() <= (metadata_load(path) or {}).items()

    path.write_text("# mine\n", "utf-8")
    for note in check_card(path):
        assert "Add to README.md" in note.splitlines()[0]
        added, old = "\n".join(note.splitlines()[1:]), path.read_text("utf-8")
        path.write_text(f"{added}\n{old}" if "at its top" in note else f"{old}\n{added}\n", "utf-8")
    assert check_card(path) == []
    assert (metadata_load(path) or {})["base_model"] == "USER/NAME"


def test_private_pull_request_and_message(linearize: Command, hub: Hub, folder: Path, unverified: None) -> None:
    assert linearize("push", folder, REPO, "--private")[0] == 0
    assert hub.repos[REPO].private
    (folder / "generation_config.json").write_text("{}")
    main = hub.repos[REPO].refs["main"]
    code, out, err = linearize("push", folder, REPO, "--pr", "--message", "proposed", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["pr"].endswith("/discussions/1")
    assert hub.repos[REPO].refs == {"main": main, "refs/pr/1": result["commit"]}
    assert hub.repos[REPO].messages[-1] == "proposed"


@pytest.mark.slow
def test_convert_pushes(linearize: Command, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put_source(hub, tmp_path / "base")
    call = ("convert", "user/base", "--to", "gsa", "--set", "slots=8", "--verify", "none", "--push", REPO, "--json")
    code, out, err = linearize(*call)
    assert code == 0, err
    assert json.loads(out)["pushed"]["commit"] == hub.repos[REPO].refs["main"]
    assert b"base_model: user/base" in hub.repos[REPO].files()["README.md"]

    shutil.rmtree("base-gsa")
    monkeypatch.setenv("HF_TOKEN", "hf_wrongWrongWrongWrongWrongWrong12")
    code, _, err = linearize(*call)
    assert (code, Path("base-gsa").exists()) == (Exit.HUB, False)  # before the work, not after it
    assert holds(err, "accept", "token")
    assert "wrongWrong" not in err
    code, _, err = linearize(*call[:-2], "tiny", "--dry-run")
    assert (code, holds(err, "'tiny'")) == (Exit.USAGE, True)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("token", "repo", "message"),
    [
        ("", REPO, ("token", "HF_TOKEN")),
        ("hf_wrongWrongWrongWrongWrongWrong12", REPO, ("(401)",)),
        (TOKEN, "others/model", ("others/model", "(403)")),
    ],
)
def test_a_push_without_the_right_is_refused(
    hub: Hub, folder: Path, unverified: None, monkeypatch: pytest.MonkeyPatch, token: str, repo: str, message: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    upload = plan_push(folder, repo)
    assert holds(refused(Exit.HUB, lambda: push(upload)), *message)
    assert not hub.repos


def test_a_push_needs_the_hub(hub: Hub, folder: Path, unverified: None, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = plan_push(folder, REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert holds(refused(Exit.HUB, lambda: push(upload)), "offline")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", nowhere())
    assert holds(refused(Exit.HUB, lambda: push(upload)), "ConnectError")


def nowhere() -> str:
    """An address on this machine where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_a_push_leaves_other_models_alone(hub: Hub, folder: Path, unverified: None) -> None:
    hub.repos[REPO] = repo = Repo()
    repo.commit({"config.json": b"{}", "README.md": b"theirs"})
    assert holds(refused(Exit.USAGE, lambda: push(plan_push(folder, REPO))), "linearize", "(config.json)")
    assert repo.files() == {"config.json": b"{}", "README.md": b"theirs"}
    push(plan_push(folder, REPO, pr=True), lambda text: None)
    assert repo.files() == {"config.json": b"{}", "README.md": b"theirs"}


def test_a_push_does_not_undo_what_came_between(
    hub: Hub, folder: Path, unverified: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone pushes after the repository was looked at."""
    push(plan_push(folder, REPO), lambda text: None)
    repo = hub.repos[REPO]
    look = linearize.hub.push.check_remote

    def looked(*arguments: Any) -> Any:
        found = look(*arguments)
        repo.commit({**repo.files(), "theirs.py": b""})
        return found

    monkeypatch.setattr("linearize.hub.push.check_remote", looked)
    (folder / "generation_config.json").write_text("{}")
    message = refused(Exit.HUB, lambda: push(plan_push(folder, REPO), lambda text: None))
    assert holds(message, "(412)")
    assert repo.files()["generation_config.json"] != b"{}"


@pytest.mark.parametrize("mute", ["/whoami", "/repos/create", "/api/models/", "/commit/"])
def test_a_push_does_not_wait_for_a_silent_hub(
    hub: Hub, folder: Path, unverified: None, monkeypatch: pytest.MonkeyPatch, mute: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    monkeypatch.setattr("linearize.hub.push.UPLOAD_SECONDS", 0.3)
    upload, hub.mute = plan_push(folder, REPO), mute
    end = threading.Timer(5, hub.over.set)
    end.start()
    assert holds(refused(Exit.HUB, lambda: push(upload, lambda text: None)), "ReadTimeout")
    assert not hub.over.is_set()
    end.cancel()


def test_a_hub_has_longer_for_files_and_its_client_is_left_as_it_was(
    hub: Hub, folder: Path, unverified: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    known = HfApi.create_commit

    def watched(*arguments: Any, **named: Any) -> Any:
        limits.append(get_session().timeout.read)
        return known(*arguments, **named)

    monkeypatch.setattr(HfApi, "create_commit", watched)
    before = get_session().timeout
    push(plan_push(folder, REPO), lambda text: None)
    assert limits == [120]
    assert get_session().timeout == before


def test_a_conversion_asks_before_it_works_whether_another_model_is_there(
    linearize: Command, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put_source(hub, tmp_path / "base")
    hub.repos[REPO] = Repo()
    hub.repos[REPO].commit({"config.json": b"{}", "README.md": b"theirs"})
    code, _, err = linearize("convert", "base", "--to", "gsa", "--set", "slots=8", "--verify", "none", "--push", REPO)
    assert (code, Path("base-gsa").exists()) == (Exit.USAGE, False)
    assert holds(err, "linearize", "(config.json)")


def test_a_private_push_never_goes_to_a_public_repository(hub: Hub, folder: Path, unverified: None) -> None:
    hub.repos[REPO] = Repo()
    assert holds(refused(Exit.HUB, lambda: push(plan_push(folder, REPO, private=True))), "exists", "public")
    assert set(hub.repos[REPO].files()) == {".gitattributes"}


def test_the_hub_refuses_a_card(hub: Hub, folder: Path, unverified: None) -> None:
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text.replace("---\n", "---\nlicense: nonsense\n", 1))
    message = refused(Exit.HUB, lambda: push(plan_push(folder, REPO)))
    assert holds(message, '"license"')


def lead_out(folder: Path) -> None:
    """What the link leads to would be uploaded under its name."""
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to("/etc/hostname")


def spoil_mixers(folder: Path) -> None:
    """The plan and the config agree, and ask for other mixers than there are."""
    config, manifest = (json.loads((folder / name).read_text()) for name in ("config.json", MANIFEST))
    config["linearize"]["layers"][0]["options"]["slots"] += 1
    manifest["plan"]["steps"][0]["options"]["slots"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    (folder / MANIFEST).write_text(json.dumps(manifest))


def link_as_weights(folder: Path) -> None:
    """A file of another folder that calls itself weights, and that linearize.json lists."""
    (folder / "notes").mkdir()
    (folder / "notes" / "secret.safetensors").symlink_to("/etc/passwd")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"].append("notes/secret.safetensors")
    (folder / MANIFEST).write_text(json.dumps(manifest))


def index_elsewhere(folder: Path) -> None:
    """An index that names a file of the machine."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "/etc/passwd"
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (lambda f: (f / MANIFEST).unlink(), Exit.INCOMPATIBLE, ("linearize.json",)),
        (lambda f: (f / "attention_hooks.py").write_text("import os"), Exit.INCOMPATIBLE, ("carries", "code")),
        (link_as_weights, Exit.INCOMPATIBLE, ("secret.safetensors",)),
        (index_elsewhere, Exit.INCOMPATIBLE, ("'/etc/passwd'",)),
        (lambda f: (f / MIXER_SHARD).unlink(), Exit.CHECK_FAILED, (f"lacks {MIXER_SHARD}",)),
        (lambda f: (f / "config.json").unlink(), Exit.CHECK_FAILED, ("lacks config.json",)),
        pytest.param(spoil_mixers, Exit.CHECK_FAILED, ("verification failed",), marks=pytest.mark.slow),
        (lead_out, Exit.INCOMPATIBLE, ("generation_config.json", "/etc/hostname")),
        (lambda f: (f / "README.md").write_text("---\nbase_model: a b\n---\n"), Exit.CHECK_FAILED, ("'a b'",)),
        (lambda f: (f / "README.md").write_text("---\n- [\n---\n"), Exit.CHECK_FAILED, ("metadata", "cannot")),
        (lambda f: (f / "generation_config.json").write_text(f"\n{TOKEN}"), Exit.CHECK_FAILED, ("json:2",)),
        (
            lambda f: (f / "generation_config.json").write_text("https://me:secret@host"),
            Exit.CHECK_FAILED,
            ("json:1",),
        ),
    ],
)
def test_a_folder_that_should_not_be_pushed_is_not(
    hub: Hub, folder: Path, spoil: Callable[[Path], Any], code: Exit, message: str
) -> None:
    spoil(folder)
    assert holds(refused(code, lambda: plan_push(folder, REPO)), *message)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["tiny", "user/", "user/a/b", "user/a--b", "us er/x"])
def test_names_are_checked_first(tmp_path: Path, name: str) -> None:
    assert holds(refused(Exit.USAGE, lambda: plan_push(tmp_path, name)), "name", "repository")


# ---------------------------------------------------------------- sources


def source_weights(hub: Hub) -> set[str]:
    """Weight files that were asked for."""
    names = {path.rpartition("/")[2] for path in hub.paths("GET") if "/resolve/" in path}
    return {name for name in names if name.endswith((".safetensors", ".bin", ".onnx", ".pt"))}


@pytest.mark.slow
def test_a_source_comes_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    others = {"pytorch_model.bin": b"same in bin", "consolidated.safetensors": b"same again", "x.onnx": b"and again"}
    nested = {"original/model.safetensors": b"again", "onnx/model.onnx": b"again", "curve.csv": b"1,2"}
    nested |= {"custom_generate/generate.py": b"raise SystemExit('ran')"}
    place = put_source(hub, tmp_path / "base", shard="20KB", **others, **nested)
    plan, source, natives = plan_conversion("user/base", "gsa", options={"slots": 8})
    wanted = {path.name for path in place.glob("*.safetensors")}
    assert source_weights(hub) == wanted
    assert not {"original", "onnx", "curve.csv", "custom_generate"} & {path.name for path in source.folder.iterdir()}
    assert all(path.is_symlink() for path in source.folder.glob("*.safetensors"))
    assert (plan.source, plan.revision) == ("user/base", hub.repos["user/base"].refs["main"])

    output = tmp_path / "linear"
    messages: list[str] = []
    convert(plan, source, natives, output, level="full", say=messages.append)
    assert "logits equal" in messages[-1]
    for number, name in enumerate(sorted(wanted), 1):
        linked = output / f"model-source-{number:05d}-of-{len(wanted):05d}.safetensors"
        assert not linked.is_symlink()
        assert linked.samefile(source.folder / name)
        assert linked.read_bytes() == (place / name).read_bytes()
    assert (output / "LICENSE").read_text() == "terms"
    assert (output / "tokenizer.json").exists()
    facts = metadata_load(output / "README.md")
    assert (facts["base_model"], facts["base_model_relation"]) == ("user/base", "finetune")
    inherited = {key: facts[key] for key in ("license", "license_name", "license_link", "language")}
    assert inherited == {
        "license": "llama3.2",
        "license_name": "llama-licence",
        "license_link": "LICENSE",
        "language": ["en", "de"],
    }
    assert "theirs" not in facts["tags"]
    assert f"`user/base` at `{plan.revision}`" in (output / "README.md").read_text()
    assert "huggingface.co/user/base" in (output / "README.md").read_text()


def test_a_dry_run_fetches_no_weights(hub: Hub, tmp_path: Path) -> None:
    put_source(hub, tmp_path / "base")
    plan, source, _ = plan_conversion("user/base", "gsa", weights=False)
    assert source_weights(hub) == set()
    assert {path.name for path in source.folder.iterdir()} == {"config.json", "README.md"}
    assert plan.source_bytes > 0
    put_source(hub, tmp_path / "adapted", "user/adapted", **{"adapter_config.json": b"{}"})
    message = refused(Exit.INCOMPATIBLE, lambda: plan_conversion("user/adapted", "gsa", weights=False))
    assert holds(message, "adapter", "first")


def test_a_dry_run_of_a_converted_base_fetches_no_weights(hub: Hub, root: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in base(root, "llama").iterdir()}
    hub.repos.setdefault("user/linear", Repo()).commit(files)
    recipe = write_recipe(tmp_path, Path("user/linear"), stage("logit_kl"))
    (row,) = dry_run(load_recipe(recipe), print)["stages"]
    assert row["parameters"] > 0
    assert source_weights(hub) == set()


def test_pickled_weights_are_fetched_where_there_are_no_others(hub: Hub, tmp_path: Path) -> None:
    place = put_source(hub, tmp_path / "base")
    from safetensors.torch import load_file

    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    files = hub.repos["user/base"].files()
    del files["model.safetensors"]
    hub.repos["user/base"].commit({**files, "pytorch_model.bin": (place / "pytorch_model.bin").read_bytes()})
    assert plan_conversion("user/base", "gsa")[0].pickled
    assert source_weights(hub) == {"pytorch_model.bin"}


def test_a_revision_is_that_revision(hub: Hub, tmp_path: Path) -> None:
    put_source(hub, tmp_path / "base")
    repo = hub.repos["user/base"]
    old = repo.refs["main"]
    repo.commit({**repo.files(), "LICENSE": b"new terms"})
    assert plan_conversion("user/base", "gsa")[0].revision == repo.refs["main"] != old
    plan, source, _ = plan_conversion("user/base", "gsa", revision=old)
    assert plan.revision == old
    assert (source.folder / "LICENSE").read_text() == "terms"
    message = refused(Exit.HUB, lambda: plan_conversion("user/base", "gsa", revision="v9"))
    assert holds(message, "user/base", "'v9'", "http://127.0.0.1")


def test_verify_takes_a_revision(linearize: Command, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.verify.checks.check_behaviours", lambda folder, strict: [])
    repo = hub.repos.setdefault(REPO, Repo())
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    earlier = repo.commit(files)
    repo.commit({name: data for name, data in files.items() if name != "gsa.py"})
    code, _, err = linearize("verify", REPO, "--revision", earlier)
    assert code == 0, err
    code, _, err = linearize("verify", REPO, "--trust-remote-code")
    assert (code, "missing: gsa.py" in err) == (Exit.CHECK_FAILED, True)
    assert holds(linearize("verify", REPO, "--revision", "v9")[2], "revision", "'v9'")


def test_a_dataset_out_of_reach_is_told_at_once(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` alone would ask again for 23 seconds."""
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(constants, "ENDPOINT", nowhere())
    template = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    for name, value in (("HF_HUB_OFFLINE", False), ("HF_ENDPOINT", constants.ENDPOINT)):
        monkeypatch.setattr(config, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))
    message = refused(Exit.HUB, lambda: open_dataset("user/corpus", None, "train"))
    assert holds(message, "user/corpus", "it", f"{constants.ENDPOINT}")
    assert config.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("away", ["offline", "unreachable"])
def test_a_cached_source_needs_no_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: str) -> None:
    put_source(hub, tmp_path / "base", shard="20KB")

    def leave() -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", away == "offline")
        monkeypatch.setattr(constants, "ENDPOINT", nowhere() if away == "unreachable" else hub.endpoint)

    leave()
    message = refused(Exit.HUB, lambda: plan_conversion("user/base", "gsa"))
    assert {"offline": "Fetch it once: hf download user/base", "unreachable": "cannot be reached (ConnectError: "}[
        away
    ] in message
    monkeypatch.chdir(tmp_path)
    near = refused(Exit.HUB, lambda: plan_conversion("bsae", "gsa"))
    assert {"offline": "cached. Did you mean 'base'? Fetch", "unreachable": "folder. Did you mean 'base'? Check"}[
        away
    ] in near
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    plan = plan_conversion("user/base", "gsa", weights=False)[0]
    leave()
    assert plan_conversion("user/base", "gsa", weights=False)[0] == plan
    refused(Exit.HUB, lambda: plan_conversion("user/base", "gsa"))  # only its config is here
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    plan = plan_conversion("user/base", "gsa")[0]
    leave()
    asked = len(hub.requests)
    assert plan_conversion("user/base", "gsa")[0] == plan
    assert len(hub.requests) == asked


def test_a_silent_hub_is_not_waited_for(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that drops what it does not let through."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
        end = threading.Timer(5, silent.shutdown, [socket.SHUT_RDWR])
        end.start()
        began = time.monotonic()
        assert holds(refused(Exit.HUB, lambda: plan_conversion("user/base", "gsa")), "ReadTimeout")
        assert time.monotonic() - began < 4
        end.cancel()


@pytest.mark.parametrize(
    ("repo", "token", "wanted"),
    [
        (None, TOKEN, ("'user/base'", "http://127.0.0.1")),
        (Repo(private=True), "", ("'user/base'", "http://127.0.0.1")),
        (Repo(gated=True), "", ("1", "http://127.0.0.1")),
        (Repo(gated=True), TOKEN, ("1", "http://127.0.0.1")),
        (Repo(), "hf_wrongWrongWrongWrongWrongWrong12", ("(401)",)),
    ],
    ids=["none", "private", "gated, no token", "gated, no access", "wrong token"],
)
def test_a_source_that_the_hub_does_not_give(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: Repo | None, token: str, wanted: str
) -> None:
    if repo is not None:
        hub.repos["user/base"] = repo
        put_source(hub, tmp_path / "base")
    monkeypatch.setenv("HF_TOKEN", token)
    message = refused(Exit.HUB, lambda: plan_conversion("user/base", "gsa"))
    assert holds(message, *wanted)
    assert holds(message, "HF_TOKEN")


@pytest.mark.slow
def test_a_loop_of_generation_does_not_travel(tmp_path: Path, zoo: Zoo) -> None:
    """transformers would run it when the converted model is loaded, though nobody trusted the source's code."""
    source = Path(shutil.copytree(zoo.folders("llama")[0], tmp_path / "source"))
    (source / "custom_generate").mkdir()
    (source / "custom_generate" / "generate.py").write_text("raise SystemExit('ran')")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    for name in ("curve.csv", "trainer_state.json", "picture.png", "run.log"):
        (source / name).write_text("{}")
    output = tmp_path / "linear"
    convert(*plan_conversion(str(source), "gsa"), output, level="keys", say=lambda text: None)
    found = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    assert "additional_chat_templates/tools.jinja" in found
    assert not {"custom_generate/generate.py", "curve.csv", "trainer_state.json", "picture.png", "run.log"} & found


# ---------------------------------------------------------------- after training


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.mark.slow
def test_a_recipe_pushes_what_it_measured(hub: Hub, root: Path, tmp_path: Path) -> None:
    data = {"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": T}}
    llama = Path(shutil.copytree(base(root, "llama"), tmp_path / "linear"))
    text = (llama / "README.md").read_text()
    (llama / "README.md").write_text(text.replace("---\n", "---\nlicense: apache-2.0\n", 1))
    recipe = make_recipe(
        tmp_path, llama, stage("logit_kl"), data=data, finish={"verify": False, "push": REPO}, eval={"max_tokens": 100}
    )
    report = train(recipe)
    assert report["pushed"]["commit"] == hub.repos[REPO].refs["main"]
    text = hub.repos[REPO].files()["README.md"].decode()
    assert "license: apache-2.0" in text
    assert f"| teacher (softmax) |  | 96 | {report['teacher_ppl']:.4g} | 1 |  | " in text
    for row in report["stages"]:
        assert row["eval_tokens"] == 96  # three blocks of 32
        figures = f"{row['ppl']:.4g} | {row['ppl_ratio']:.4g} | {nats(row['kl'])}"
        name = "converted, calibrated" if row["name"] == "converted" else row["name"]
        line = f"| {name} | {row['tokens']:,} | 96 | {figures} |"
        assert line in text
    assert "untrained" not in text
    for block in report["positions"]["blocks"]:
        assert f"| {block['from']} to {block['to']} | {block['student_ppl']:.4g} | {block['teacher_ppl']:.4g} |" in text
    shown = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert shown["model"] == {"base": "linear"}
    assert shown["stages"][0]["optimizer"]["lr"] == 1e-2
    for name, content in hub.repos[REPO].files().items():
        if not name.endswith(".safetensors"):
            assert str(tmp_path).encode() not in content, name  # nothing of this machine


@pytest.mark.slow
def test_a_run_goes_on_from_the_commit_it_began_with(hub: Hub, root: Path, tmp_path: Path) -> None:
    repo = hub.repos.setdefault("user/linear", Repo())
    began = repo.commit({path.name: path.read_bytes() for path in base(root, "llama").iterdir()})
    stages = stage("attention_transfer", steps=1), stage("logit_kl", steps=1)
    recipe = make_recipe(tmp_path, Path("user/linear"), *stages)
    train(recipe, only="attention_transfer")
    repo.commit({**repo.files(), "model-mixers.safetensors": b"another"})
    assert train(recipe)["output"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["commit"] == began
    with pytest.raises(LinearizeError, match=r"damaged.*short"):
        train(recipe, resume="never")


@pytest.mark.slow
def test_a_teacher_is_compared_before_any_weights_are_fetched(hub: Hub, root: Path, tmp_path: Path) -> None:
    """At the revision that the recipe names; neither those of the base, converted or not, nor the teacher's own."""
    linear, source = base(root, "llama"), base(root, "llama").parent / "source"
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    for name, folder in (("user/base", source), ("user/linear", linear)):
        hub.repos.setdefault(name, Repo()).commit({path.name: path.read_bytes() for path in folder.iterdir()})
    tokens = json.loads(files["tokenizer.json"])
    vocabulary = tokens["model"]["vocab"]
    vocabulary |= dict(zip(list(vocabulary)[70:72], list(vocabulary.values())[71:69:-1], strict=True))
    teacher = hub.repos.setdefault("user/teacher", Repo())
    fitting = teacher.commit(files, "v1")
    teacher.commit({**files, "tokenizer.json": json.dumps(tokens).encode()})
    section = {"mechanism": "gsa", "options": {"slots": 8}}
    one = stage("logit_kl", steps=1)
    for start in ({"model": Path("user/base"), "convert": section}, {"model": Path("user/linear")}):
        recipe = make_recipe(tmp_path, start.pop("model"), one, teacher="user/teacher", **start)
        assert "token 70 is" in refused(Exit.INCOMPATIBLE, lambda asked=recipe: train(asked))
    named = {"model": "user/teacher", "revision": "v1"}
    assert source_weights(hub) == set()
    assert not (tmp_path / "run").exists()
    train(make_recipe(tmp_path, linear, one, teacher=named))
    facts = json.loads((tmp_path / "run" / "run.json").read_text())["teacher"]
    assert (facts["commit"], len(facts["sha256"])) == (fitting, 64)
    assert source_weights(hub) == {"model.safetensors"}


def test_a_recipe_asks_before_it_trains(
    linearize: Command, hub: Hub, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = {"verify": False, "push": REPO}
    recipe = write_recipe(tmp_path, base(root, "llama"), stage("logit_kl"), finish=finish)
    monkeypatch.setenv("HF_TOKEN", "")
    code, _, err = linearize("finetune", recipe)
    assert (code, (tmp_path / "run").exists()) == (Exit.HUB, False)
    assert holds(err, "no", "token")
    assert linearize("finetune", recipe, "finish.push=tiny")[0] == Exit.USAGE


@pytest.mark.slow
def test_a_model_is_kept_when_its_push_fails(
    linearize: Command, hub: Hub, root: Path, tmp_path: Path, unverified: None
) -> None:
    hub.accept_uploads = 0
    finish = {"verify": False, "push": REPO}
    recipe = write_recipe(tmp_path, base(root, "llama"), stage("logit_kl"), finish=finish)
    code, _, err = linearize("finetune", recipe)
    final = tmp_path / "run" / "final"
    assert code == Exit.HUB
    assert load(final)
    hub.accept_uploads = -1
    later = shlex.split(err.rpartition("later: linearize ")[2].splitlines()[0])
    code, _, err = linearize(*later)
    assert code == 0, (later, err)
    assert "config.json" in hub.repos[REPO].files()


BOOKS = {"path": "someone/books", "name": "small", "split": "test"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (BOOKS, {"name": "someone/books", "type": "someone/books", "config": "small", "split": "test"}),
        ({"files": ["heldout.txt"]}, {"name": "heldout.txt", "type": "text"}),
        ({"files": ["books/a.jsonl.gz", "b.jsonl"]}, {"name": "a.jsonl.gz, b.jsonl", "type": "json"}),
        ({"demo": "heldout"}, {"name": "Python's standard library, part heldout of linearize", "type": "text"}),
        (None, None),
    ],
)
def test_results_name_the_text_that_was_read(
    root: Path, tmp_path: Path, text: dict[str, Any] | None, named: dict[str, str] | None
) -> None:
    data = {"train": {**BOOKS, "split": "train"}, "eval": text}
    folder = base(root, "llama")
    recipe = make_recipe(tmp_path, folder, stage("logit_kl"), data={**data, "pack": {"seq_len": T}})
    row = {"name": "logit_kl", "tokens": 10, "eval_tokens": 96, "ppl": 12.5, "ppl_ratio": None, "kl": 0.25}
    report = {"teacher_ppl": None, "stages": [row]}
    plan = plan_conversion(str(folder.parent / "source"), "gsa")[0]
    (tmp_path / "README.md").write_text(card.model_card(plan, folder, recipe, report))
    facts = metadata_load(tmp_path / "README.md")
    assert facts["datasets"] == ["someone/books"]
    assert ("model-index" in facts) == (named is not None)
    if named:
        (result,) = facts["model-index"][0]["results"]
        assert result["dataset"] == named
        metrics = {one["type"]: one for one in result["metrics"]}
        assert {kind: one["value"] for kind, one in metrics.items()} == {"perplexity": 12.5, "kl_divergence": 0.25}
        assert metrics["kl_divergence"]["name"] == f"KL from the teacher, nats a token, 96 tokens in rows of {T}"
    assert "base_model" not in facts  # a local folder has no name on the Hub


def test_the_result_of_images_is_their_accuracy(root: Path, tmp_path: Path) -> None:
    pictures = {"path": "someone/pictures", "split": "test", "image_key": "image", "label_key": "label"}
    folder = base(root, "llama")  # the card does not ask what its model reads
    recipe = make_recipe(tmp_path, folder, stage("logit_kl"), data={"train": pictures, "eval": pictures})
    row = {"name": "logit_kl", "tokens": 10, "eval_tokens": 96, "ppl": 1.5, "ppl_ratio": None, "accuracy": 0.75}
    (result,) = card.evaluations(recipe, {"teacher_ppl": None, "stages": [row]})
    assert (result.task_type, result.metric_type, result.metric_value) == ("image-classification", "accuracy", 0.75)
    assert (result.metric_name, result.dataset_type) == ("accuracy, 96 images", "someone/pictures")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("   Apache License\n   Version 2.0, January 2004", {"license": "apache-2.0"}),
        ("MIT License\n\nCopyright", {"license": "mit"}),
        ("A licence of our own", {"license": "other", "license_link": "LICENSE.txt"}),
    ],
)
def test_a_licence_file_names_the_licence_where_the_source_s_card_does_not(
    tmp_path: Path, text: str, facts: dict[str, str]
) -> None:
    assert card.inherited(tmp_path) == {}
    (tmp_path / "LICENSE.txt").write_text(text)
    assert card.inherited(tmp_path) == facts
    (tmp_path / "README.md").write_text("---\nlicense: gemma\n---\n")
    assert card.inherited(tmp_path) == {"license": "gemma"}


def test_a_card_explains_the_code_in_the_folder(root: Path) -> None:
    folder = base(root, "llama")
    text = (folder / "README.md").read_text()
    about = text[text.index("`trust_remote_code=True` loads") : text.index("| source |")]
    assert about.count("\n- ") == 2
    assert "`modeling_linearized.py`" in about
    assert (folder / "modeling_linearized.py").is_file()


def test_a_card_names_the_device_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"name": "kl", "tokens": 64, "eval_tokens": 8, "ppl": 8.0, "ppl_ratio": 2.0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    for device, name in (("cpu", "CPU"), ("auto", "a GPU")):
        recipe = load_recipe("demo", [f"runtime.device={device}"])
        assert f"`linearize finetune`, {name}, torch" in card.measured(recipe, {"stages": [row], "teacher_ppl": 4.0})


def test_secrets_stay_out_of_cards(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that no pattern knows and that the recipe was read without."""
    recipe = make_recipe(tmp_path, base(root, "llama"), stage("logit_kl", name="stage-keyOfSomeone"))
    plan = plan_conversion(str(base(root, "llama").parent / "source"), "gsa")[0]
    monkeypatch.setenv("WANDB_API_KEY", "keyOfSomeone")
    text = card.model_card(plan, tmp_path, recipe, {"teacher_ppl": None, "stages": []})
    assert "stage-***" in text
    assert "keyOfSomeone" not in text
