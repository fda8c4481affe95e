"""`linearize verify`: sound folders pass, and each check fails on a checkpoint that is broken for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import HYBRID, Zoo, copied, load, save_source
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from linearize import behaviours, checks
from linearize.cli import app
from linearize.errors import Exit, LinearizeError

LIMIT = checks.LIMITS["float32"]
SOURCE_SHARD = "model-source-00001-of-00001.safetensors"
runner = CliRunner()


def edit(path: Path, old: str, new: str) -> None:
    """Replace what a file says exactly once."""
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{path.name}: {old!r} is there {text.count(old)} times"
    path.write_text(text.replace(old, new), "utf-8")


def behaves(folder: Path) -> set[str]:
    """Names of the behaviours that fail, computed in this process."""
    model = load(folder)
    ids = behaviours.make_tokens(model, 3, checks.LENGTH)
    found = {name: behaviours.run(check, model, ids, LIMIT)["status"] for name, check in behaviours.CHECKS.items()}
    failed = {name for name, status in found.items() if status == "failed"}
    failed |= {"constant state"} if behaviours.constant_state(model, ids) else set()
    return failed | ({"trust"} if behaviours.loads_without_trust(str(folder)) else set())


@pytest.mark.parametrize("layers", ["all", HYBRID])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_sound_models_behave(zoo: Zoo, name: str, layers: str) -> None:
    assert not behaves(zoo.folders(name, layers)[1])


PADDING = "padding, segments = token_layout(attention_mask, (q.shape[0], q.shape[1]), seen, kwargs)\n"
# What fails -> (file, what it says, what a broken one says).
BROKEN = {
    "prefill and steps": ("seam.py", "        slot.state = state\n", "        slot.state = None\n"),
    "chunk size": (
        "gsa.py",
        "        # Autocast would run",
        "        g = g * (1 + self.chunk_size / 1000)\n        # Autocast would run",
    ),
    "left padding": (
        "seam.py",
        PADDING,
        PADDING + "    padding = padding if padding is None else padding.flip(1).cummax(1).values.flip(1)\n",
    ),
    "right padding": (
        "seam.py",
        PADDING,
        PADDING + "    padding = padding if padding is None else padding.cummax(1).values\n",
    ),
    "packed documents": ("seam.py", PADDING, PADDING + "    segments = None\n"),
    "beams": ("state.py", "self._map(lambda part: part.index_select(0, beam_idx.to(part.device)))", "pass"),
    "generate": ("layout.py", "offset=min(mask.shape[-1] - T, seen)", "offset=0"),
    "constant state": (
        "state.py",
        "        self.seen += key_states.shape[-2]\n",
        "        self.seen += key_states.shape[-2]\n        self.kept = (*getattr(self, 'kept', ()), key_states)\n",
    ),
    "trust": ("config.json", '"model_type": "linearized_llama"', '"model_type": "llama"'),
}  # fmt: skip


@pytest.mark.parametrize("check", BROKEN)
def test_each_behaviour_fails_on_its_broken_checkpoint(zoo: Zoo, tmp_path: Path, check: str) -> None:
    folder = copied(zoo.folders("llama", HYBRID)[1], tmp_path / check.replace(" ", "_"))
    file, old, new = BROKEN[check]
    edit(folder / file, old, new)
    assert check in behaves(folder)


def test_all_of_them_are_broken_once() -> None:
    assert set(BROKEN) == {*behaviours.CHECKS, "constant state", "trust"}


def test_what_the_source_does_not_do_is_not_held_against_the_mixers(zoo: Zoo) -> None:
    model = zoo.model("llama")
    ids = behaviours.make_tokens(model, 3, 40)
    result = behaviours.run(lambda model, ids: 1.0, model, ids, LIMIT)
    assert result["status"] == "passed"
    assert "so does the model with softmax" in result["detail"]


# ---------------------------------------------------------------- what is on disk


def flip(folder: Path) -> None:
    data = bytearray((folder / SOURCE_SHARD).read_bytes())
    data[-3] ^= 1
    (folder / SOURCE_SHARD).write_bytes(data)


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / "model-mixers.safetensors")
    next(iter(tensors.values())).view(-1)[-1] = torch.nan
    save_file(tensors, folder / "model-mixers.safetensors", {"format": "pt"})


def misplace(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "model-mixers.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGE: dict[str, tuple[Callable[[Path], Any], Callable[[Path], tuple[str, str]], str, str]] = {
    "flipped byte": (flip, checks.check_hashes, "failed", SOURCE_SHARD),
    "not finite": (not_finite, lambda folder: checks.check_new(folder, False), "failed", "not finite"),
    "index": (misplace, checks.check_index, "failed", "lm_head.weight is in"),
    "lost file": (lambda folder: (folder / "gsa.py").unlink(), checks.check_files, "failed", "missing: gsa.py"),
    "edited code": (lambda f: edit(f / "gsa.py", "GSA: g", "GSA, g"), checks.check_files, "warning", "gsa.py"),
    "foreign code": (lambda folder: (folder / "x.py").write_text(""), checks.check_files, "warning", "x.py"),
    "foreign file": (lambda folder: (folder / "x.txt").write_text(""), checks.check_files, "warning", "x.txt"),
    "no manifest": (lambda f: (f / "linearize.json").unlink(), checks.check_files, "warning", "no linearize.json"),
    "no hashes": (lambda f: (f / "linearize.json").unlink(), checks.check_hashes, "warning", "no hashes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_on_disk_is_named(zoo: Zoo, tmp_path: Path, damage: str) -> None:
    folder = copied(zoo.folders("llama", HYBRID)[1], tmp_path / "linear")
    harm, check, status, words = DAMAGE[damage]
    assert check(folder)[0] == "passed"
    harm(folder)
    found, detail = check(folder)
    assert (found, words in detail) == (status, True), detail


# ---------------------------------------------------------------- the command


def verify(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and what `--json` prints."""
    result = runner.invoke(app, ["verify", *arguments, "--json"])
    code = int(result.exception.code) if isinstance(result.exception, LinearizeError) else result.exit_code
    return code, json.loads(result.stdout) if result.stdout else {"error": str(result.exception)}


def test_a_folder_of_links_passes_strictly(zoo: Zoo, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    copied(zoo.folders("llama", HYBRID)[1], blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    code, found = verify(str(snapshot), "--strict")
    assert (code, found["passed"]) == (0, True), found
    assert {check["status"] for check in found["checks"]} == {"passed"}
    assert set(behaviours.CHECKS) < {check["name"] for check in found["checks"]}


def test_a_broken_folder_fails_with_every_reason(zoo: Zoo, tmp_path: Path) -> None:
    folder = copied(zoo.folders("llama", HYBRID)[1], tmp_path / "linear")
    shard = folder / "model-mixers.safetensors"
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, shard, {"format": "pt"})
    flip(folder)
    edit(folder / "state.py", *BROKEN["beams"][1:])
    code, found = verify(str(folder))
    assert code == Exit.INCOMPATIBLE
    assert "other code" in found["error"]
    assert "--trust-remote-code" in found["error"]
    code, found = verify(str(folder), "--trust-remote-code")
    assert code == Exit.CHECK_FAILED
    details = {check["name"]: check["detail"] for check in found["checks"] if check["status"] == "failed"}
    assert details.keys() == {"index", "untouched weights", "reload", "beams"}
    assert lost in details["index"]
    assert lost in details["reload"]


def test_warnings_fail_when_strict(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = copied(zoo.folders("llama", HYBRID)[1], tmp_path / "linear")
    (folder / "notes.txt").write_text("")
    monkeypatch.setattr(checks, "free_memory", lambda: 0)
    code, found = verify(str(folder))
    assert (code, found["passed"]) == (0, True)
    assert [c["status"] for c in found["checks"] if c["name"] in ("files", "reload")] == ["warning", "skipped"]
    code, found = verify(str(folder), "--strict")
    assert (code, found["passed"]) == (Exit.CHECK_FAILED, False)
    assert [c["name"] for c in found["checks"] if c["status"] == "failed"] == ["files", "reload"]


def test_a_model_with_softmax_is_named(tmp_path: Path) -> None:
    code, found = verify(str(save_source(tmp_path / "source")))
    assert code == Exit.INCOMPATIBLE
    assert "LlamaForCausalLM (llama)" in found["error"]
    assert "linearize convert" in found["error"]
    (tmp_path / "empty").mkdir()
    code, found = verify(str(tmp_path / "empty"))
    assert code == Exit.INCOMPATIBLE
    assert "no model folder" in found["error"]
