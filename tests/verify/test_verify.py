"""`linearize verify`: sound folders pass, and each check fails on a checkpoint that is broken for it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Command, holds
from models import HYBRID, Zoo, convert_folder, copied, load, save_source, small_config
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from linearize.checkpoint import provenance
from linearize.checkpoint.write import MIXER_SHARD
from linearize.cli import app
from linearize.errors import Exit, LinearizeError
from linearize.verify import checks, tolerances
from linearize.verify.child import behaviours
from linearize.verify.reload import CGROUPS, check_tensors, clean_command, compare, free_memory, result_of, started

LIMIT = tolerances.BY_DTYPE["float32"]
SOURCE_SHARD = "model-source-00001-of-00001.safetensors"
runner = CliRunner()


def edit(path: Path, old: str, new: str) -> None:
    """Replace what a file says exactly once."""
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{path.name}: {old!r} is there {text.count(old)} times"
    path.write_text(text.replace(old, new), "utf-8")


BEHAVIOURS = {*behaviours.CHECKS, "constant state", "trust"}


@pytest.mark.parametrize(("window", "length"), [(8, 40), (60, 70)])
def test_rows_are_longer_than_the_window(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, window: int, length: int) -> None:
    """A prompt that fills it and tokens that leave it, before the single steps."""
    seen: list[int] = []

    def note(model: Any, ids: Any) -> float:
        seen.append(ids.shape[1])
        return 0.0

    monkeypatch.setattr(behaviours, "CHECKS", {"rows": note})
    assert behaviours.text_checks(zoo.model("llama", window=window, sink=1), 40, LIMIT)["rows"]["status"] == "passed"
    assert seen == [length]


def failing(folder: Path, wanted: set[str] = BEHAVIOURS) -> set[str]:
    """Names of the wanted behaviours that fail, computed in this process."""
    model = load(folder)
    ids = behaviours.make_tokens(model, 3, checks.LENGTH)
    tried = {name: check for name, check in behaviours.CHECKS.items() if name in wanted}
    failed = {name for name, check in tried.items() if behaviours.run(check, model, ids, LIMIT)["status"] == "failed"}
    if "constant state" in wanted and behaviours.constant_state(model, ids):
        failed.add("constant state")
    return failed | ({"trust"} if "trust" in wanted and behaviours.loads_without_trust(str(folder)) else set())


@pytest.mark.parametrize(("name", "layers"), [("gemma2", HYBRID), pytest.param("gpt2", "all", marks=pytest.mark.slow)])
def test_sound_models_behave(zoo: Zoo, name: str, layers: str) -> None:
    assert not failing(zoo.folders(name, layers)[1])


REAL_PLACES = "places = positions(real[:, seen:], documents, before.sum(1), (B, T))"
LAYOUT = "tokens = call_layout(call.geometry, causal, attention_mask, shape, seen, call.arguments(kwargs))\n"
HIDDEN = LAYOUT + "    if tokens.padding is not None:\n        tokens = tokens._replace(padding=tokens.padding%s)\n"
# What fails -> (file, what it says, what a broken one says).
BROKEN = {
    "prefill and steps": (
        "cache.py",
        "            o, self.state = mixer(*inputs, layout, self.state)\n            return o\n",
        "            return mixer(*inputs, layout, self.state)[0]\n",
    ),
    "chunk size": (
        "gsa.py",
        "        # Autocast would run",
        "        g = g * (1 + self.chunk_size / 1000)\n        # Autocast would run",
    ),
    "left padding": (
        "attention_hooks.py",
        LAYOUT,
        HIDDEN % ".flip(1).cummax(1).values.flip(1)",
    ),
    "left padding without position_ids": ("attention_hooks.py", REAL_PLACES, f"{REAL_PLACES} * 2"),
    "right padding": (
        "attention_hooks.py",
        LAYOUT,
        HIDDEN % ".cummax(1).values",
    ),
    "packed documents": ("attention_hooks.py", LAYOUT, LAYOUT + "    tokens = tokens._replace(segments=None)\n"),
    "beams": ("cache.py", "self._map(lambda part: part.index_select(0, beam_idx.to(part.device)))", "pass"),
    "generate": ("layout.py", "start = min(mask.shape[-1] - T, seen)", "start = 0"),
    "constant state": (
        "cache.py",
        "        self.seen += key_states.shape[-2]\n",
        "        self.seen += key_states.shape[-2]\n        self.kept = (*getattr(self, 'kept', ()), key_states)\n",
    ),
    "trust": ("config.json", '"transformers_weights"', '"other_weights"'),
}  # fmt: skip


@pytest.mark.parametrize("check", BROKEN)
def test_each_behaviour_fails_on_its_broken_checkpoint(zoo: Zoo, tmp_path: Path, check: str) -> None:
    folder = copied(zoo.folders("llama", HYBRID)[1], tmp_path / check.replace(" ", "_"))
    file, old, new = BROKEN[check]
    edit(folder / file, old, new)
    assert failing(folder, {check}) == {check}


def test_all_of_them_are_broken_once() -> None:
    assert set(BROKEN) == BEHAVIOURS


def test_what_the_source_does_not_do_is_not_held_against_the_mixers(zoo: Zoo) -> None:
    model = zoo.model("llama")
    ids = behaviours.make_tokens(model, 3, 40)
    result = behaviours.run(lambda model, ids: 1.0, model, ids, LIMIT)
    assert result["status"] == "passed"
    assert holds(result["detail"], "model", "softmax")


def test_a_check_that_raises_never_passes(zoo: Zoo) -> None:
    model = zoo.model("llama")
    ids = behaviours.make_tokens(model, 3, 40)

    def outcome(*answers: Any) -> dict[str, Any]:
        """The row of a check with these answers, of the mixers and of softmax; exceptions are raised."""
        left = iter(answers)

        def check(model: Any, ids: Any) -> float:
            answer = next(left)
            if isinstance(answer, Exception):
                raise answer
            return float(answer)

        return behaviours.run(check, model, ids, LIMIT)

    both = outcome(ValueError("no\nbeams"), ValueError("none"))
    assert both == {"status": "skipped", "detail": "raises ValueError: no beams; so does the model with softmax"}
    assert outcome(ValueError("no beams"), 0.0) == {"status": "failed", "detail": "raises ValueError: no beams"}
    assert outcome(ValueError("no beams"), 1.0)["status"] == "failed"
    assert outcome(ValueError("no beams"), KeyError("other"))["status"] == "failed"
    assert outcome(float("inf"), 1.0)["status"] == "failed"  # softmax has numbers, the mixers have none
    other = outcome(1.0, KeyError("other"))
    assert (other["status"], other["detail"]) == ("failed", "with softmax it raises KeyError: 'other'")


@pytest.mark.parametrize("positions", [9, 16, 24])
def test_models_of_few_positions_are_checked_as_far_as_they_go(tmp_path: Path, positions: int) -> None:
    folder = convert_folder(save_source(tmp_path / "source", max_position_embeddings=positions), tmp_path / "linear")
    found = behaviours.run_checks(load(folder), str(folder), checks.LENGTH, LIMIT)
    wanted = "skipped" if positions < behaviours.SHORTEST + behaviours.STEPS else "passed"
    assert {name: found[name]["status"] for name in behaviours.CHECKS} == dict.fromkeys(behaviours.CHECKS, wanted)
    assert {found[name]["status"] for name in ("finite logits", "constant state", "trust")} == {"passed"}


def test_rows_are_cut_as_far_as_they_go() -> None:
    assert behaviours.cut(100, [7, 1, 50]) == [7, 1, 50, 42]
    assert behaviours.cut(10, [7, 1, 5]) == [7, 1, 2]


@pytest.mark.parametrize("size", [1, 3, 4, 9, 97])
def test_tokens_are_of_the_vocabulary(size: int) -> None:
    model = SimpleNamespace(config=small_config("llama", vocab_size=size, pad_token_id=None))
    ids = behaviours.make_tokens(model, 3, 50)
    assert 0 <= ids.min() <= ids.max() < size


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
    "flipped byte": (flip, checks.check_hashes, "failed", f"{SOURCE_SHARD}. Where another tool trained them"),
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


def test_index_and_shards_are_compared_in_one_way(zoo: Zoo, tmp_path: Path) -> None:
    """Of the folder by `verify`, of the index by what follows a conversion."""
    folder = copied(zoo.folders("llama", HYBRID)[1], tmp_path / "linear")
    save_file({"stray": torch.zeros(2)}, folder / "z.safetensors", {"format": "pt"})
    assert checks.check_index(folder) == ("failed", "stray is in z.safetensors by the shards only")
    assert check_tensors(folder) == len(load_file(folder / SOURCE_SHARD) | load_file(folder / MIXER_SHARD))
    misplace(folder)
    told = r"lm_head.weight is in model-mixers.safetensors by the index only"
    assert checks.check_index(folder) == ("failed", told)
    with pytest.raises(LinearizeError, match=rf"verification failed: {told}"):
        check_tensors(folder)


def test_the_origin_of_a_folder_is_asked_once(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def origin(folder: Path, plan: Any) -> provenance.Origin:
        asked.append(folder)
        return provenance.Origin("0.1.0", [])

    for module in (checks, provenance):
        monkeypatch.setattr(module, "origin_of", origin)
    monkeypatch.setattr(checks, "check_behaviours", lambda folder, strict: [])
    folder = zoo.folders("llama", HYBRID)[1]
    monkeypatch.setattr(provenance, "KNOWS_CACHE", "no line has this")
    found = checks.verify_folder(str(folder))
    assert holds(found[-1].detail, "linearize", "0.1.0")
    assert asked == [folder]


# ---------------------------------------------------------------- the command


def verify(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and what `--json` prints."""
    result = runner.invoke(app, ["verify", *arguments, "--json"])
    code = int(result.exception.code) if isinstance(result.exception, LinearizeError) else result.exit_code
    if not result.stdout:
        return code, {"error": str(result.exception)}
    return code, json.loads(result.stdout, parse_constant=pytest.fail)  # which is called for Infinity and NaN


@pytest.mark.slow
@pytest.mark.usefixtures("real_processes")
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


@pytest.mark.slow
def test_a_broken_folder_fails_with_every_reason(zoo: Zoo, tmp_path: Path) -> None:
    folder = copied(zoo.folders("llama", HYBRID)[1], tmp_path / "linear")
    shard = folder / "model-mixers.safetensors"
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, shard, {"format": "pt"})
    flip(folder)
    edit(folder / "cache.py", *BROKEN["beams"][1:])
    code, found = verify(str(folder))
    assert code == Exit.INCOMPATIBLE
    assert "other code" in found["error"]
    assert "--trust-remote-code" in found["error"]
    code, found = verify(str(folder), "--trust-remote-code")
    assert code == Exit.CHECK_FAILED
    details = {check["name"]: check["detail"] for check in found["checks"] if check["status"] == "failed"}
    assert details.keys() == {"index", "untouched weights", "new weights", "reload", "beams"}
    assert details["new weights"] == f"not the recorded bytes: {lost} (missing)"
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


@pytest.mark.slow
@pytest.mark.usefixtures("real_processes")
def test_code_that_raises_fails_or_is_skipped_with_its_words(zoo: Zoo, tmp_path: Path) -> None:
    folder = copied(zoo.folders("llama", HYBRID)[1], tmp_path / "linear")
    old = "self._map(lambda part: part.index_select("
    edit(folder / "cache.py", old, "raise KeyError('lost')\n        " + old)
    (folder / "custom_generate").mkdir()
    code = "def generate(*args, **kwargs):\n    raise RuntimeError('this model writes nothing')\n"
    (folder / "custom_generate" / "generate.py").write_text(code)
    exit_code, found = verify(str(folder), "--trust-remote-code")
    rows = {check["name"]: (check["status"], check["detail"]) for check in found["checks"]}
    assert exit_code == Exit.CHECK_FAILED
    assert rows["reload"][0] == "passed"
    assert rows["beams"] == ("failed", "raises KeyError: 'lost'")
    words = "raises RuntimeError: this model writes nothing; so does the model with softmax"
    assert rows["generate"] == ("skipped", words)


def test_other_logits_are_refused_with_what_to_do_next() -> None:
    logits = torch.ones(1, 4)
    assert compare(logits, logits, "logits differ by") == 0
    for other in (2 * logits, logits * torch.nan):
        with pytest.raises(LinearizeError, match=r"linearize.*please") as caught:
            compare(other, logits, "logits differ by")
        assert caught.value.code == Exit.CHECK_FAILED


def test_a_child_says_whether_it_came_to_load() -> None:
    for code, words in {
        "print('loaded', flush=True); 1 / 0": "loads it and then fails",
        "1 / 0": "cannot load it",
        "import os; os.kill(os.getpid(), 15)": "ended by signal 15",
        "import os; os.kill(os.getpid(), 9)": "ran out of memory",  # nobody else kills without a word
    }.items():
        with started([sys.executable, "-c", code], {}) as child, pytest.raises(LinearizeError, match=words):
            result_of(child)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("modeling_linearized.py", "AttributeError: module 'modeling_linearized' has no attribute"),
        pytest.param(
            "gsa.py",
            "ImportError: cannot import name 'GatedSlotAttention' from 'gsa' (modeling_linearized.py, line ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_code_that_was_emptied_is_named_without_a_traceback(
    file: str, words: str, zoo: Zoo, tmp_path: Path, linearize: Command
) -> None:
    folder = copied(zoo.folders("llama")[1], tmp_path / "emptied")
    (folder / file).write_text("")
    for command in (("verify", folder), ("push", folder, "user/repo", "--dry-run")):
        code, _, err = linearize(*command, "--trust-remote-code")
        last = err[err.index("error: ") :]
        assert code == Exit.CHECK_FAILED, err
        assert holds(last, "it", f"{words}"), err
        assert holds(last, "convert", "download"), err
        assert len(last.splitlines()) == 1, err
        assert "Traceback" not in err


def test_a_child_says_how_much_is_done_and_may_write_more_than_a_pipe_holds() -> None:
    code = "import sys; print('done 0.25', flush=True); sys.stderr.write('x' * 10**6); print('done 0.75'); print('[1]')"
    shares: list[float] = []
    with started([sys.executable, "-c", code], {}) as child:
        assert result_of(child, shares.append) == [1]
    assert shares == [0.25, 0.75]


@pytest.mark.slow
@pytest.mark.usefixtures("real_processes")
def test_a_clean_process_tells_all_of_its_work(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr("linearize.verify.checks.progress", lambda what, total: contextlib.nullcontext(shares.append))
    found = checks.check_behaviours(zoo.folders("llama", HYBRID)[1], strict=False)
    assert {check.status for check in found} == {"passed"}
    assert len(shares) > 5
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize("group", CGROUPS, ids=["2", "1"])
def test_a_containers_limit_of_memory_counts(
    group: tuple[Path, str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, limit, used, cached = group
    monkeypatch.setattr("linearize.verify.reload.CGROUPS", ((tmp_path, limit, used, cached),))
    unlimited = free_memory()
    (tmp_path / "memory.stat").write_text(f"anon 500\n{cached} 200\n")
    (tmp_path / used).write_text("700\n")
    (tmp_path / limit).write_text("1000\n")
    assert free_memory() == 500
    (tmp_path / limit).write_text("max\n")
    assert free_memory() > 0.5 * unlimited


def test_json_has_null_for_what_is_not_finite(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    row = checks.Check("beams", "failed", "", float("inf"), LIMIT)
    monkeypatch.setattr(checks, "check_behaviours", lambda folder, strict: [row])
    found = verify(str(zoo.folders("llama", HYBRID)[1]))[1]
    assert [check["difference"] for check in found["checks"] if check["name"] == "beams"] == [None]


def test_a_model_with_softmax_is_named(tmp_path: Path) -> None:
    code, found = verify(str(save_source(tmp_path / "source")))
    assert code == Exit.INCOMPATIBLE
    assert "LlamaForCausalLM (llama)" in found["error"]
    assert "linearize convert" in found["error"]
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "linearize": {"layers": [{}]}}))
    code, found = verify(str(tmp_path / "source"))
    assert (code, holds(found["error"], "KeyError", "'site'")) == (Exit.INCOMPATIBLE, True)
    code, found = verify(str(tmp_path / "source"), "--revision", "main")
    assert (code, holds(found["error"], "revision", "branch")) == (Exit.USAGE, True)
    (tmp_path / "empty").mkdir()
    code, found = verify(str(tmp_path / "empty"))
    assert code == Exit.INCOMPATIBLE
    assert holds(found["error"], "config.json")


def test_no_code_cache_of_this_process_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints' code would be looked for in the first one, as it was where diffusers had a cache of its own."""
    (tmp_path / "cache/transformers_modules").mkdir(parents=True)
    (tmp_path / "packages/other").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "cache"), str(tmp_path / "packages")])
    with clean_command("", []) as (command, _):
        assert str(tmp_path / "cache") not in command[3]
        assert str(tmp_path / "packages") in command[3]
