"""What goes wrong around a command: kills, full disks, odd paths, hostile sources, secrets; nothing is half done."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from forks import Forks, Task
from models import convert_folder, load, save_source
from training import BASES, byte_tokenizer, metrics, same, stage, tensors, write_recipe

from linearize.atomic import output_folder
from linearize.errors import Exit, LinearizeError
from linearize.recipe import load_recipe
from linearize.runs import Run

OPTIONS = ("--to", "gsa", "--set", "slots=8", "--set", "chunk_size=16")
CONVERT = {"mechanism": "gsa", "options": {"slots": 4, "chunk_size": 16}}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    started = Forks()
    yield started
    started.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source with a tokenizer, in two shards, that tests only read."""
    folder = save_source(tmp_path_factory.mktemp("faults") / "source", shard="60KB", **BASES["llama"])
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def source(shared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared, tmp_path / "source"))


def snapshot(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Bytes, mode and time of every file below `folder`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            facts = path.stat()
            found[str(path.relative_to(folder))] = (path.read_bytes(), facts.st_mode, facts.st_mtime_ns)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {name: data for name, (data, _, _) in snapshot(folder).items()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------- killed, interrupted


def moments(kind: str, total: int, count: int) -> list[int]:
    """`count` random moments of `total`, the same at each run, spread over all of them."""
    generator = random.Random(kind)
    bounds = [1 + total * i // count for i in range(count + 1)]
    return [generator.randrange(low, max(high, low + 1)) for low, high in pairwise(bounds)]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_killed_convert_leaves_the_old_or_the_new(forks: Forks, source: Path, overwrite: bool) -> None:
    """Ten random moments of a first conversion, ten of one that replaces another."""
    before, parent, output = snapshot(source), source.parent, source.parent / "linear"
    command: list[Any] = ["convert", source, *OPTIONS, "-o", output, *["--overwrite"] * overwrite]
    old: dict[str, bytes] = {}
    if overwrite:
        assert forks("convert", source, *OPTIONS, "--layers", "1", "-o", parent / "old").code == 0
        old = contents(parent / "old")
        shutil.copytree(parent / "old", output)
    whole = forks(*command, root=str(parent))
    assert whole.code == 0, whole.said
    new, outcomes = contents(output), set()
    for moment in moments(f"convert {overwrite}", whole.moments, 10):
        shutil.rmtree(output)
        if overwrite:
            shutil.copytree(parent / "old", output)
        killed = forks(*command, root=str(parent), at=moment)
        assert killed.code == -signal.SIGKILL, killed.said
        found = contents(output) if output.exists() else None
        assert found in (None, old, new) if overwrite else found in (None, new)
        outcomes.add("none" if found is None else "new" if found == new else "old")
        assert snapshot(source) == before
        left = names(parent) - {"source", "linear", "old"}
        assert left <= {".linear.linearize.tmp", ".linear.linearize.old"}
        again = forks(*command)
        assert again.code == (Exit.USAGE if found == new and not overwrite else 0), again.said
        assert contents(output) == new
        assert names(parent) - {"old"} == {"source", "linear"}
    assert outcomes >= ({"old"} if overwrite else {"none"})
    assert snapshot(source) == before


@pytest.mark.parametrize("left", ["old", "both", "empty"])
def test_a_replacement_that_was_cut_short_is_finished(forks: Forks, source: Path, left: str) -> None:
    """Between the two renames, and after them: the only two moments at which two outputs exist."""
    parent, output, old = source.parent, source.parent / "linear", source.parent / ".linear.linearize.old"
    forks("convert", source, *OPTIONS, "-o", output)
    first = contents(output)
    (shutil.copytree if left == "both" else shutil.move)(output, old)
    if left == "empty":
        output.mkdir()
    refused = forks("convert", source, *OPTIONS, "-o", output)
    if left == "both":
        assert refused.code == Exit.USAGE
    else:
        assert (refused.code, contents(output)) == (Exit.USAGE, first)
    assert forks("convert", source, *OPTIONS, "-o", output, "--overwrite", "--layers", "0").code == 0
    assert contents(output) != first
    assert names(parent) == {"source", "linear"}


def test_all_is_on_disk_before_it_has_its_name(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses power must not find the name and not the bytes: each file, each folder, then the parent."""
    synced, fsync, rename = [], os.fsync, Path.rename
    (source / "assets").mkdir()
    (source / "assets" / "vocab.txt").write_text("a")

    def record(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def check(path: Path, target: Path) -> Path:
        due = {str(p) for p in [path, *path.rglob("*")] if p.is_dir() or p.stat().st_nlink == 1}
        assert due <= set(synced)
        synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "rename", check)
    convert_folder(source, source.parent / "linear")
    assert synced == [str(source.parent)]


def test_a_run_killed_before_it_had_a_name_can_start(shared: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_in(tmp_path, shared))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json.tmp").write_text("{")
    Run(recipe, "auto").start({})
    assert names(tmp_path / "run") == {"run.json"}
    for name in ("checkpoints/x-1.tmp", ".converted.linearize.tmp", "cache"):
        (tmp_path / "run" / name).mkdir(parents=True)
    for name in ("cache/blocks.77.partial", "metrics.jsonl.tmp", "checkpoints/x-1.tmp/position.json"):
        (tmp_path / "run" / name).write_text("{")
    Run(recipe, "auto").start({})
    assert {path.name for path in (tmp_path / "run").rglob("*")} == {"run.json", "checkpoints", "cache"}


def test_ctrl_c_leaves_nothing_of_a_conversion(forks: Forks, source: Path) -> None:
    before, parent, output = snapshot(source), source.parent, source.parent / "new" / "linear"
    command = ("convert", source, *OPTIONS, "-o", output)
    total = forks(*command, root=str(parent)).moments
    shutil.rmtree(parent / "new")
    for moment in moments("interrupt", total - 2, 6):  # the last two are after the rename
        stopped = forks(*command, root=str(parent), at=moment, signal=signal.SIGINT)
        assert stopped.code == Exit.INTERRUPTED, stopped.said
        assert "interrupted" in stopped.said
        assert "Traceback" not in stopped.said
        assert names(parent) == {"source"}
    assert snapshot(source) == before


@pytest.fixture(scope="module")
def trained(forks: Forks, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Folder of a run that nothing disturbed, and the number of its moments."""
    folder = tmp_path_factory.mktemp("trained")
    done = forks("finetune", recipe_in(folder, shared), root=str(folder))
    assert done.code == 0, done.said
    return folder, done.moments


def recipe_in(folder: Path, source: Path, **changes: Any) -> Path:
    stages = [stage("attention_transfer", steps=2), stage("logit_kl", ["new", "mixer"], steps=2)]
    return write_recipe(folder, source, *stages, **{"convert": CONVERT, "checkpoint": {"every_steps": 1}, **changes})


def assert_as_undisturbed(folder: Path, whole: Path) -> None:
    for key in ("stage", "step", "loss", "grad_norm"):
        assert metrics(folder, key) == metrics(whole, key), key
    assert same(tensors(folder / "run" / "final"), tensors(whole / "run" / "final"))
    left = [path.name for path in (folder / "run").rglob("*") if re.search(r"\.(tmp|partial|old)$", path.name)]
    assert not left


@pytest.mark.parametrize("part", range(2))
def test_a_killed_finetune_continues(
    forks: Forks, shared: Path, trained: tuple[Path, int], tmp_path: Path, part: int
) -> None:
    """Twenty random moments, in two halves so that two workers share them."""
    whole, total = trained
    before = snapshot(shared)
    for moment in moments("finetune", total, 20)[part::2]:
        folder = tmp_path / str(moment)
        recipe = recipe_in(folder, shared)
        killed = forks("finetune", recipe, root=str(folder), at=moment)
        assert killed.code == -signal.SIGKILL, killed.said
        final = folder / "run" / "final"
        assert not final.exists() or same(tensors(final), tensors(whole / "run" / "final"))
        again = forks("finetune", recipe)
        assert again.code == 0, (moment, again.said)
        assert_as_undisturbed(folder, whole)
    assert snapshot(shared) == before


def test_ctrl_c_in_finetune_is_130_and_the_command_continues(
    forks: Forks, shared: Path, trained: tuple[Path, int], tmp_path: Path
) -> None:
    whole, total = trained
    for moment in moments("interrupt", total - 2, 5):
        folder = tmp_path / str(moment)
        recipe = recipe_in(folder, shared)
        stopped = forks("finetune", recipe, root=str(folder), at=moment, signal=signal.SIGINT)
        assert stopped.code == Exit.INTERRUPTED, stopped.said
        assert "Traceback" not in stopped.said
        assert not (folder / "run" / "final").exists()
        assert forks("finetune", recipe).code == 0
        assert_as_undisturbed(folder, whole)


# ---------------------------------------------------------------- two at once


def test_of_conversions_to_one_place_one_wins(forks: Forks, source: Path) -> None:
    output = source.parent / "linear"
    command = ["convert", str(source), *OPTIONS, "-o", str(output)]
    ended = forks.together([Task(command) for _ in range(3)])
    assert sorted(done.code for done in ended) == [0, Exit.USAGE, Exit.USAGE], [done.said for done in ended]
    assert all(re.search("is in use|--overwrite", done.said) for done in ended if done.code)
    load(output)
    assert names(source.parent) == {"source", "linear"}


@pytest.mark.parametrize("locks", [True, False])
def test_an_output_in_use_is_left_alone(source: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    """Also where the file system knows no locks."""
    if not locks:

        def no_locks(*arguments: Any) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr("fcntl.flock", no_locks)
    output = source.parent / "linear"
    with output_folder(output, overwrite=False) as work:
        (work / "first.txt").write_text("first")
        with pytest.raises(LinearizeError, match="another linearize writes this output") as caught:
            convert_folder(source, output)
        assert caught.value.code == Exit.USAGE
    assert contents(output) == {"first.txt": b"first"}
    assert names(source.parent) == {"source", "linear"}


def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    output = tmp_path / "linear"

    def write() -> None:
        with output_folder(output, overwrite=False) as work:
            (work / "ours.txt").write_text("ours")
            output.mkdir()
            (output / "thesis.txt").write_text("theirs")

    with pytest.raises(LinearizeError, match="linear has 1 files"):
        write()
    assert contents(tmp_path) == {"linear/thesis.txt": b"theirs"}


def test_a_folder_of_another_user_is_not_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder for all, such as that of temporary files, anybody can make what looks like a leftover."""
    trap = tmp_path / ".linear.linearize.tmp"
    trap.mkdir()
    (trap / "theirs.txt").write_text("theirs")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(LinearizeError, match="is in use"), output_folder(tmp_path / "linear", overwrite=False):
            pass
    trap.rename(tmp_path / "elsewhere")
    trap.symlink_to("elsewhere")
    with pytest.raises(LinearizeError, match="cannot write") as caught:  # noqa: SIM117
        with output_folder(tmp_path / "linear", overwrite=False):
            pass
    assert caught.value.code == Exit.RESOURCE
    assert contents(tmp_path / "elsewhere") == {"theirs.txt": b"theirs"}
