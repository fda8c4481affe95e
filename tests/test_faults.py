"""What goes wrong around a command: kills, full disks, odd paths, hostile sources, secrets; nothing is half done."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import holds, with_slow
from forks import NO_MOUNT, Done, Forks, Task
from models import convert_folder, load, logits, save_source, tokens
from training import BASES, byte_tokenizer, metrics, same, stage, tensors, write_recipe

from linearize import __version__
from linearize.checkpoint.atomic import output_folder, remove_leftovers, write_atomically
from linearize.checkpoint.card import measured
from linearize.checkpoint.provenance import copying_code, open_config
from linearize.cli import main
from linearize.errors import Exit, LinearizeError, redact
from linearize.hub.push import check_secrets
from linearize.recipe.recipe import load_recipe
from linearize.train.runs import Position, Run
from linearize.train.save import load_converted
from linearize.verify.reload import result_of, started

OPTIONS = ("--to", "gsa", "--set", "slots=8", "--set", "chunk_size=16")
NOT_UTF8 = os.fsdecode(b"\xff\xfe")
CONVERT = {"mechanism": "gsa", "options": {"slots": 4, "chunk_size": 16}}


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


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_killed_convert_leaves_the_old_or_the_new(forks: Forks, source: Path, overwrite: bool) -> None:
    """Five random moments of a first conversion, five of one that replaces another."""
    before, parent, output = snapshot(source), source.parent, source.parent / "linear"
    command: list[Any] = ["convert", source, *OPTIONS, "-o", output, *["--overwrite"] * overwrite]
    old: dict[str, bytes] = {}
    if overwrite:
        assert forks("convert", source, *OPTIONS, "--layers", "1", "-o", parent / "old").code == 0
        old = contents(parent / "old")
        shutil.copytree(parent / "old", output)
    whole = forks(*command, root=str(parent))
    assert whole.code == 0, whole.output
    new, outcomes = contents(output), set()
    for moment in moments(f"convert {overwrite}", whole.moments, 5):
        shutil.rmtree(output)
        if overwrite:
            shutil.copytree(parent / "old", output)
        killed = forks(*command, root=str(parent), at=moment)
        assert killed.code == -signal.SIGKILL, killed.output
        found = contents(output) if output.exists() else None
        assert found in (None, old, new) if overwrite else found in (None, new)
        outcomes.add("none" if found is None else "new" if found == new else "old")
        assert snapshot(source) == before
        left = names(parent) - {"source", "linear", "old"}
        assert left <= {".linear.linearize.tmp", ".linear.linearize.old"}
        again = forks(*command)
        assert again.code == (Exit.USAGE if found == new and not overwrite else 0), again.output
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


RESULT = "import sys; from pathlib import Path; from linearize.checkpoint.atomic import write_result; "
RESULT += "write_result(Path(sys.argv[1]), 'new')"
SCRATCH = "import sys; from pathlib import Path; from linearize.checkpoint.atomic import scratch_beside\n"
SCRATCH += "with scratch_beside(Path(sys.argv[1])) as work: (work / 'half').write_text('x')"


@pytest.mark.parametrize("script", [RESULT, SCRATCH], ids=["result", "scratch"])
def test_what_a_killed_process_left_goes_with_the_next(forks: Forks, tmp_path: Path, script: str) -> None:
    """At each moment, the only sign of a killed process is a file that the next one removes."""
    output, what = tmp_path / "found.json", {"script": script, "root": str(tmp_path)}
    whole, left = forks(output, **what), 0
    assert whole.code == 0, whole.output
    kept = names(tmp_path)
    for moment in range(1, whole.moments + 1):
        killed = forks(output, **what, at=moment)
        assert killed.code == -signal.SIGKILL, killed.output
        left += len(names(tmp_path) - kept)
        again = forks(output, **what)
        assert (again.code, names(tmp_path)) == (0, kept), again.output
    assert left >= 1


def test_leftovers_of_others_stay(tmp_path: Path) -> None:
    """Of a process that lives, of another output, a link, and one that is locked: its process is on another machine."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    output, elsewhere = tmp_path / "found.json", tmp_path / "elsewhere"
    elsewhere.mkdir()
    others = [f".found.json.linearize.{os.getppid()}.tmp", f".other.json.linearize.{dead.pid}.tmp", "found.json.tmp"]
    others += [".found.json.linearize.tmp", f".found.json.linearize.{dead.pid}.tmp.mine", ".found.json.linearize.x.tmp"]
    for name in others:
        (tmp_path / name).write_text("theirs")
    mine = tmp_path / f".found.json.linearize.{dead.pid}.tmp"
    mine.symlink_to(elsewhere)
    remove_leftovers(output)
    assert names(tmp_path) == {*others, mine.name, "elsewhere"}
    mine.unlink()
    mine.write_text("half")
    with mine.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_leftovers(output)
        assert mine.exists()
    remove_leftovers(output)
    assert names(tmp_path) == {*others, "elsewhere"}


@pytest.mark.slow
def test_a_killed_push_of_a_saved_model_leaves_nothing_for_good(forks: Forks, source: Path) -> None:
    """It writes the missing files into a folder beside the model, with its weights."""
    parent, saved = source.parent, source.parent / "saved"
    assert forks("convert", source, *OPTIONS, "-o", parent / "linear").code == 0
    shutil.copytree(parent / "linear", saved)
    (saved / "linearize.json").unlink()
    command = ["push", saved, "user/repo", "--dry-run"]
    kept = names(parent)
    whole = forks(*command, root=str(parent))
    assert (whole.code, names(parent)) == (0, kept), whole.output
    killed = forks(*command, root=str(parent), at=whole.moments // 2)
    assert killed.code == -signal.SIGKILL, killed.output
    assert len(names(parent) - kept) == 1
    assert forks(*command).code == 0
    assert names(parent) == kept


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


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_bug() -> None:
    """`linearize mechanisms --json | head -c 0` ended with the exit code of a bug."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "linearize", "mechanisms", "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (Exit.CLOSED, "")


def test_metrics_that_do_not_say_how_many_tokens_were_held_out(shared: Path, tmp_path: Path) -> None:
    """Runs of earlier versions."""
    run = Run(load_recipe(recipe_in(tmp_path, shared)), "auto")
    run.start({})
    run.log(stage="teacher", step=0, tokens=0, eval_ppl=4.0)
    run.log(stage="logit_kl", step=2, tokens=64, eval_ppl=8.0)
    report = run.report([], complete=False)
    assert report["stages"][0] == {
        "name": "logit_kl",
        "tokens": 64,
        "eval_tokens": None,
        "kl": None,
        "ppl": 8.0,
        "teacher_ppl": 4.0,
        "ppl_ratio": 2.0,
        "accuracy": None,
        "agreement": None,
        "error": None,
    }
    assert "| logit_kl | 64 |  | 8 | 2 |" in measured(run.recipe, report)


def test_an_interrupt_leaves_nothing_of_a_conversion(forks: Forks, source: Path) -> None:
    """By each signal at two moments."""
    before, parent, output = snapshot(source), source.parent, source.parent / "new" / "linear"
    command = ("convert", source, *OPTIONS, "-o", output)
    total = forks(*command, root=str(parent)).moments
    shutil.rmtree(parent / "new")
    kinds = cycle([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    for moment, kind in zip(moments("interrupt", total - 2, 6), kinds, strict=False):  # two more are after the rename
        stopped = forks(*command, root=str(parent), at=moment, signal=kind)
        assert stopped.code == Exit.INTERRUPTED, stopped.output
        assert "interrupted" in stopped.output
        assert "Traceback" not in stopped.output
        assert names(parent) == {"source"}
    assert snapshot(source) == before


@pytest.mark.slow
def test_no_child_outlives_a_conversion(source: Path) -> None:
    """Ended while clean processes check the result: they end too, and their temporary folders are removed."""
    parent, scratch = source.parent, source.parent / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "linearize", "convert", source, *OPTIONS, "-o", parent / "linear"]
    environment = {**os.environ, "TMPDIR": str(scratch)}

    def heed() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heed) as tool:
        children: list[psutil.Process] = []
        while tool.poll() is None and len(children) < 2:
            children = psutil.Process(tool.pid).children(recursive=True)
            time.sleep(0.05)
        tool.send_signal(signal.SIGHUP)
        message = tool.communicate()[1]
    assert len(children) == 2, message
    assert tool.returncode == Exit.INTERRUPTED, message
    assert message.endswith("interrupted\n")
    assert "Traceback" not in message
    # What has ended and waits for init to notice still counts as running.
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert names(parent) == {"source", "scratch"}
    assert not names(scratch)


@pytest.fixture(scope="module")
def trained(forks: Forks, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Folder of a run that nothing disturbed, and the number of its moments."""
    folder = tmp_path_factory.mktemp("trained")
    done = forks("finetune", recipe_in(folder, shared), root=str(folder))
    assert done.code == 0, done.output
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


@pytest.mark.parametrize("part", with_slow(range(2), 1))
def test_a_killed_finetune_continues(
    forks: Forks, shared: Path, trained: tuple[Path, int], tmp_path: Path, part: int
) -> None:
    """Four random moments, two for each part."""
    whole, total = trained
    before = snapshot(shared)
    for moment in moments("finetune", total, 4)[part::2]:
        folder = tmp_path / str(moment)
        recipe = recipe_in(folder, shared)
        killed = forks("finetune", recipe, root=str(folder), at=moment)
        assert killed.code == -signal.SIGKILL, killed.output
        final = folder / "run" / "final"
        assert not final.exists() or same(tensors(final), tensors(whole / "run" / "final"))
        again = forks("finetune", recipe)
        assert again.code == 0, (moment, again.output)
        assert_as_undisturbed(folder, whole)
    assert snapshot(shared) == before


@pytest.mark.slow
def test_ctrl_c_in_finetune_is_130_and_the_command_continues(
    forks: Forks, shared: Path, trained: tuple[Path, int], tmp_path: Path
) -> None:
    whole, total = trained
    for moment in moments("interrupt", total // 3, 5):  # by then all is trained, and the model is written
        folder = tmp_path / str(moment)
        recipe = recipe_in(folder, shared)
        stopped = forks("finetune", recipe, root=str(folder), at=moment, signal=signal.SIGINT)
        assert stopped.code == Exit.INTERRUPTED, stopped.output
        assert "Traceback" not in stopped.output
        assert not (folder / "run" / "final").exists()
        assert forks("finetune", recipe).code == 0
        assert_as_undisturbed(folder, whole)


DAMAGE = [b"", b'{"recipe": ', b"[]", b"{}", b'"run"', b"\xff", b"[" * 10**5]
RECORDS = {
    "run.json": ("--resume never", [*DAMAGE, b'{"recipe": {}}']),
    "checkpoints/logit_kl-2-end/position.json": ("an earlier checkpoint", DAMAGE[:-1]),
    "report.json": ("writes both again", [*DAMAGE, None]),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_damaged_record_of_a_run_is_told(
    forks: Forks, shared: Path, trained: tuple[Path, int], tmp_path: Path, name: str
) -> None:
    """Which file, and what to do about it, which then works."""
    recipe, (remedy, damages) = recipe_in(tmp_path, shared), RECORDS[name]
    shutil.copytree(trained[0] / "run", tmp_path / "run")
    path, record = tmp_path / "run" / name, tmp_path / "run" / "run.json"
    record.write_text(record.read_text().replace(str(trained[0]), str(tmp_path)))  # the recipe names its place
    if name.startswith("checkpoints"):
        shutil.rmtree(tmp_path / "run" / "final")
    for damage in damages:
        path.unlink(missing_ok=True) if damage is None else path.write_bytes(damage)
        before = contents(tmp_path)
        done = forks("finetune", recipe)
        refused(done, Exit.USAGE, f"{re.escape(str(path))} is damaged .*{remedy}", tmp_path, names(tmp_path))
        assert contents(tmp_path) == before
    if name.startswith("checkpoints"):
        shutil.rmtree(path.parent)
    elif name == "report.json":
        shutil.rmtree(tmp_path / "run" / "final")
    done = forks("finetune", recipe, *["--resume", "never"] * (name == "run.json"))
    assert done.code == 0, done.output
    assert_as_undisturbed(tmp_path, trained[0])


# ---------------------------------------------------------------- two at once


def test_of_conversions_to_one_place_one_wins(forks: Forks, source: Path) -> None:
    output = source.parent / "linear"
    command = ["convert", str(source), *OPTIONS, "-o", str(output)]
    ended = forks.together([Task(command) for _ in range(3)])
    assert sorted(done.code for done in ended) == [0, Exit.USAGE, Exit.USAGE], [done.output for done in ended]
    assert all(re.search("is in use|--overwrite", done.output) for done in ended if done.code)
    load(output)
    assert names(source.parent) == {"source", "linear"}


# Arguments: a folder, and one in which all say that they are there: transformers has no copy of the code yet.
LOAD = """
import os, sys, time
from pathlib import Path
import torch
from models import logits, tokens
from linearize.train.save import load_converted
begin = Path(sys.argv[2])
(begin / str(os.getpid())).touch()
while len([*begin.iterdir()]) < 8:
    time.sleep(0.01)
print("found", float(logits(load_converted(Path(sys.argv[1]), torch.float32, False), tokens(1, 12)).abs().sum()))
"""


@pytest.mark.slow
def test_eight_processes_load_a_folder_at_once(forks: Forks, source: Path) -> None:
    folder, begin = convert_folder(source, source.parent / "eight"), source.parent / "begin"
    begin.mkdir()
    ended = forks.together([Task([str(folder), str(begin)], script=LOAD) for _ in range(8)])
    wanted = float(logits(load(folder), tokens(1, 12)).abs().sum())
    for done in ended:
        assert (done.code, f"found {wanted}" in done.output) == (0, True), done.output


@pytest.mark.parametrize("opened", [open_config, lambda folder: load_converted(folder, torch.float32, False)])
def test_code_is_copied_by_one_process_at_a_time(source: Path, opened: Callable[[Path], Any]) -> None:
    """transformers writes it in place, and of eight processes one imported half a file now and then."""
    folder = convert_folder(source, source.parent / "one")
    done = threading.Event()
    with copying_code():
        thread = threading.Thread(target=lambda: (opened(folder), done.set()))
        thread.start()
        assert not done.wait(1.0)
    thread.join(60)
    assert done.is_set()


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
        with pytest.raises(LinearizeError, match=r"linearize.*writes") as caught:
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

    with pytest.raises(LinearizeError, match=r"linear.*1"):
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


@pytest.mark.timeout(20)
def test_a_folder_that_cannot_be_told_from_others_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that follows the link, or knows no inodes, each attempt finds another folder."""
    monkeypatch.setattr(os, "O_NOFOLLOW", 0)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".linear.linearize.tmp").symlink_to("elsewhere")
    with pytest.raises(LinearizeError, match="is in use"), output_folder(tmp_path / "linear", overwrite=False):
        pass
    (tmp_path / "elsewhere").rmdir()
    with pytest.raises(LinearizeError, match="is in use"), output_folder(tmp_path / "linear", overwrite=False):
        pass
    assert names(tmp_path) == {".linear.linearize.tmp"}


# ---------------------------------------------------------------- the disk


def refused(done: Done, code: Exit, message: str, parent: Path, left: set[str]) -> None:
    """The documented exit code, a message, and nothing that was not there before."""
    if done.code == NO_MOUNT:
        pytest.skip("mounting is not allowed here")
    assert done.code == code, done.output
    assert re.search(message, " ".join(done.output.split())), done.output
    assert "Traceback" not in done.output
    assert names(parent) == left


@pytest.mark.parametrize(
    ("limit", "more"),
    [(3_000, []), (10_000, []), (20_000, ["--dtype", "bfloat16"]), (60_000, ["--dtype", "float64"])],
    ids=str,
)
def test_a_disk_that_fills_while_converting(forks: Forks, source: Path, limit: int, more: list[str]) -> None:
    """A limit on the size of files fails in Python's writes and in those of safetensors."""
    before = snapshot(source)
    done = forks("convert", source, *OPTIONS, *more, "-o", source.parent / "linear", file_bytes=limit)
    refused(done, Exit.RESOURCE, "cannot write .*linear: the file is larger than", source.parent, {"source"})
    assert snapshot(source) == before


@pytest.mark.parametrize(
    ("options", "message"), [("size=160k", "no space left on the disk"), ("ro", "Read-only file system")]
)
def test_a_small_disk_and_one_that_is_read_only(forks: Forks, source: Path, options: str, message: str) -> None:
    """Real ones, on which the shards cannot be linked either."""
    before, disk = snapshot(source), source.parent / "disk"
    disk.mkdir()
    done = forks("convert", source, *OPTIONS, "-o", disk / "linear", mount=(str(disk), options))
    refused(done, Exit.RESOURCE, message, source.parent, {"source", "disk"})
    assert snapshot(source) == before


@pytest.mark.slow
def test_a_disk_that_fills_while_training(forks: Forks, shared: Path, tmp_path: Path) -> None:
    """Before the data, at it, at a checkpoint's weights and at its optimizer, at the end; with room again the run goes
    on."""
    base = convert_folder(shared, tmp_path / "base", options={"slots": 16, "chunk_size": 16})

    def recipe(name: str) -> Path:
        steps = stage("attention_transfer", steps=2)
        data = {"train": {"files": ["short.txt"]}, "pack": {"seq_len": 32}}
        written = write_recipe(tmp_path / name, base, steps, checkpoint={"every_steps": 1}, data=data)
        (tmp_path / name / "short.txt").write_text("some words of a text " * 30)
        return written

    assert forks("finetune", recipe("whole")).code == 0
    # Larger than what is written before them; a limit of their own size lets them pass, and the optimizer is larger.
    weights = (tmp_path / "whole/run/checkpoints/attention_transfer-2-end/trained.safetensors").stat().st_size
    limits = {4_000: "run.json:", 6_500: "blocks-", weights - 1: "attention_transfer-1:"}
    limits |= {weights: "attention_transfer-1:", 25_000: "final:"}
    assert sorted(limits) == list(limits)
    for limit, where in limits.items():
        done = forks("finetune", recipe(str(limit)), file_bytes=limit)
        assert done.code == Exit.RESOURCE, done.output
        assert re.search(f"cannot write .*{where}", done.output), done.output
        assert "Traceback" not in done.output
        assert not (tmp_path / str(limit) / "run" / "final").exists()
        again = forks("finetune", recipe(str(limit)))
        assert again.code == 0, again.output
        assert_as_undisturbed(tmp_path / str(limit), tmp_path / "whole")


# The warm process leaves verification out.
VERIFYING = """
import tempfile
import linearize.convert
from linearize import cli
from linearize.verify.reload import verify
tempfile.tempdir = None
linearize.convert.verify = verify
cli.main()
"""


FULL = [("convert", "16k"), ("convert", "120k"), ("verify", "120k"), ("finetune", "120k")]


@pytest.mark.parametrize("full", with_slow(FULL, FULL[1], FULL[3]), ids="-".join)
def test_a_full_folder_of_temporary_files_is_no_failed_check(
    forks: Forks, source: Path, tmp_path_factory: pytest.TempPathFactory, full: tuple[str, str]
) -> None:
    """Its own code is copied there, then the model's. The message says how to keep the result all the same."""
    command, room = full
    parent, scratch = source.parent, tmp_path_factory.mktemp("scratch")
    arguments: dict[str, list[Any]] = {
        "convert": [source, *OPTIONS, "-o", parent / "linear"],
        "verify": [parent / "ours"],
        "finetune": [parent / "ours" / ".." / "recipe.yaml"],
    }
    if command != "convert":
        convert_folder(source, parent / "ours", options=CONVERT["options"])
    if command == "finetune":
        recipe_in(parent, parent / "ours", convert=None, finish={"verify": True})
    there = names(parent)
    environment, mount = {"TMPDIR": str(scratch)}, (str(scratch), f"size={room}")
    done = forks(command, *arguments[command], script=VERIFYING, environment=environment, mount=mount)
    message = f"could not be checked: .*{re.escape(str(scratch))}.*no space left.* TMPDIR .* --verify none"
    refused(done, Exit.RESOURCE, message, parent, there | ({"run"} if command == "finetune" else set()))


@pytest.mark.parametrize("lack", ["disk", "memory"])
def test_what_a_child_lacks_is_told_from_what_it_finds_wrong(lack: str) -> None:
    lines = {
        "disk": "raise OSError(28, 'No space left on device', '/somewhere/own.py')",
        "memory": "raise RuntimeError('[enforce fail] DefaultCPUAllocator: can\\'t allocate memory')",
    }
    with started([sys.executable, "-c", lines[lack]], {}) as child, pytest.raises(LinearizeError) as caught:
        result_of(child)
    assert caught.value.code == Exit.RESOURCE
    assert holds(caught.value.message, "not", "checked")
    assert "--verify none" in caught.value.message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json", "SHARD", "."])
def test_a_source_that_may_not_be_read(forks: Forks, source: Path, name: str) -> None:
    path = next(source.glob("model-*")) if name == "SHARD" else source / name
    path.chmod(0)
    done = forks("convert", source, *OPTIONS, "-o", source.parent / "linear", as_user=True)
    path.chmod(0o755)
    message = f"cannot read .*{path.name}: Permission denied"
    refused(done, Exit.RESOURCE, message, source.parent, {"source"})


def test_a_source_that_fails_while_it_is_copied(tmp_path: Path) -> None:
    """What is read is named, not the output; with a full disk it is the output."""
    work = output_folder(tmp_path / "linear", overwrite=False)
    with pytest.raises(LinearizeError, match=r"/source/LICENSE.*Input/output") as caught, work:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/source/LICENSE")
    assert caught.value.code == Exit.RESOURCE
    for number, name in ((errno.EIO, "file"), (errno.ENOSPC, "/source/LICENSE")):
        work = output_folder(tmp_path / "linear", overwrite=False)
        with pytest.raises(LinearizeError, match=r"^cannot write .*/linear: ") as caught, work as folder:
            raise OSError(number, os.strerror(number), str(folder / name))
        assert ("Make room" in caught.value.message) == (number == errno.ENOSPC)


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one_alone(tmp_path: Path) -> None:
    write_atomically(tmp_path / "result.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "result.json", "half of a character: \ud83d")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"result.json": "old"}


def test_room_is_asked_for_when_there_is_none(shared: Path, tmp_path: Path) -> None:
    run = Run(load_recipe(recipe_in(tmp_path, shared)), "auto")
    run.start({})
    for number in (errno.ENOSPC, errno.EACCES):

        def refuse(folder: Path, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with pytest.raises(LinearizeError, match="checkpoint") as caught:
            run.save(Position(0, 1, 1, False), refuse)
        assert ("Make room" in caught.value.message) == (number == errno.ENOSPC)


def test_an_output_that_may_not_be_written(forks: Forks, source: Path) -> None:
    place = source.parent / "place"
    place.mkdir(mode=0o555)
    done = forks("convert", source, *OPTIONS, "-o", place / "linear", as_user=True)
    refused(done, Exit.RESOURCE, "cannot write .*linear: Permission denied", source.parent, {"source", "place"})
    assert not names(place)


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize("name", ["Gewürz 模型 🚀", "a\nb", "é" * 127, "-v"], ids=range(4))
def test_paths_in_any_script(forks: Forks, source: Path, name: str) -> None:
    folder = source.rename(source.parent / name)
    files = {"LICENSE " + name[:50], "LICENSE " + NOT_UTF8}
    for file in files:
        (folder / file).write_text("a file of that name")
    output = source.parent / "out" / name
    done = forks("convert", *OPTIONS, "-o", output, "--", folder)
    assert done.code == 0, done.output
    load(output)
    assert files <= set(json.loads((output / "linearize.json").read_text())["files"])
    assert forks("convert", *OPTIONS, "-o", output, "--overwrite", "--", folder).code == 0


def test_paths_that_safetensors_cannot_open(forks: Forks, source: Path) -> None:
    folder = source.rename(source.parent / NOT_UTF8)
    done = forks("convert", folder, *OPTIONS, "-o", source.parent / "linear")
    refused(done, Exit.INCOMPATIBLE, "is not valid UTF-8", source.parent, {NOT_UTF8})
    folder = folder.rename(source)
    done = forks("convert", source, *OPTIONS, "-o", source.parent / NOT_UTF8)
    refused(done, Exit.INCOMPATIBLE, "is not valid UTF-8", source.parent, {"source"})


def test_paths_that_are_too_long(forks: Forks, source: Path) -> None:
    long = "x" * 300
    done = forks("convert", source, *OPTIONS, "-o", source.parent / long)
    refused(done, Exit.RESOURCE, "File name too long", source.parent, {"source"})
    done = forks("convert", source, *OPTIONS, "-o", source.parent / Path(*["y" * 200] * 25))
    refused(done, Exit.RESOURCE, "File name too long", source.parent, {"source"})
    done = forks("convert", source.parent / long, *OPTIONS, "-o", source.parent / "linear")
    refused(done, Exit.INCOMPATIBLE, "no such folder", source.parent, {"source"})


# ---------------------------------------------------------------- links


def test_links_to_a_source_are_followed(forks: Forks, source: Path) -> None:
    """A linked folder, and linked files as in the cache of the Hub."""
    parent = source.parent
    blobs, snapshots = parent / "blobs", parent / "snapshots" / "abc"
    blobs.mkdir()
    snapshots.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(number))
        (snapshots / path.name).symlink_to(f"../../blobs/{number}")
    (parent / "link").symlink_to("snapshots/abc")
    before = snapshot(blobs)
    assert forks("convert", parent / "link", *OPTIONS, "-o", parent / "linear").code == 0
    assert not any(path.is_symlink() for path in (parent / "linear").rglob("*"))
    load(parent / "linear")
    assert snapshot(blobs) == before


@pytest.mark.parametrize(
    ("name", "target", "code", "message"),
    [
        ("tokenizer.json", "gone", Exit.INCOMPATIBLE, "tokenizer.json is a link to .*gone: not a file"),
        ("config.json", "gone", Exit.INCOMPATIBLE, "no config.json"),
        ("config.json", "config.json", Exit.INCOMPATIBLE, "no config.json"),
        ("model.safetensors.index.json", "gone", Exit.INCOMPATIBLE, "has no weights"),
        ("SHARD", "gone", Exit.INCOMPATIBLE, "index.json names model-.*, which is missing"),
        ("vocab.txt", "/dev/zero", Exit.INCOMPATIBLE, "vocab.txt is a link to /dev/zero: not a file"),
    ],
)
def test_links_that_lead_nowhere_or_too_far(
    forks: Forks, source: Path, name: str, target: str, code: Exit, message: str
) -> None:
    path = next(source.glob("model-*")) if name == "SHARD" else source / name
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    done = forks("convert", source, *OPTIONS, "-o", source.parent / "linear")
    refused(done, code, message, source.parent, {"source"})


def test_linked_folders_are_left_out(forks: Forks, source: Path) -> None:
    for name, target in (("assets.txt", "/"), ("loop.json", ".")):
        (source / name).symlink_to(target)
    done = forks("convert", source, *OPTIONS, "-o", source.parent / "linear")
    assert done.code == 0, done.output
    assert not {"assets.txt", "loop.json"} & names(source.parent / "linear")


def test_an_output_that_meets_the_source_by_a_link(forks: Forks, source: Path) -> None:
    parent = source.parent
    for name, target in (("same", "source"), ("up", "."), ("loop", "loop")):
        (parent / name).symlink_to(target)
    converted = convert_folder(source, parent / "linear")
    view = parent / "view"  # a source whose files are links into the output
    view.mkdir()
    (view / "config.json").symlink_to(source / "config.json")
    (view / "model.safetensors").symlink_to(converted / "model-source-00001-of-00002.safetensors")
    before, there = snapshot(source), names(parent)
    separate = "must be separate folders"
    for model, output, message in [
        (source, parent / "same", separate),
        (source, parent / "same" / "inside", separate),
        (source, parent / "up" / "source" / "inside", separate),
        (source, parent / "up", separate),
        (parent / "same", source, separate),
        (parent / "up" / "source", source / "a" / ".." / "b", separate),
        (view, converted, separate),
    ]:
        done = forks("convert", model, *OPTIONS, "-o", output, "--overwrite")
        refused(done, Exit.USAGE, message, parent, there)
    done = forks("convert", source, *OPTIONS, "-o", parent / "loop")
    refused(done, Exit.RESOURCE, "cannot write", parent, there)
    assert snapshot(source) == before


def test_an_output_that_is_a_link_stays_one(forks: Forks, source: Path) -> None:
    parent = source.parent
    (parent / "disk" / "real").mkdir(parents=True)
    (parent / "linear").symlink_to("disk/real")
    for more in ([], ["--overwrite", "--layers", "0"]):
        assert forks("convert", source, *OPTIONS, "-o", parent / "linear", *more).code == 0
        assert (parent / "linear").is_symlink()
        load(parent / "disk" / "real")
        assert names(parent / "disk") == {"real"}
    assert names(parent) == {"source", "linear", "disk"}


# ---------------------------------------------------------------- sources that mean harm


def rewrite_index(folder: Path, name: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = name
    path.write_text(json.dumps(index))


def write_header(folder: Path, header: bytes) -> None:
    shard = next(folder.glob("model-*"))
    shard.write_bytes(len(header).to_bytes(8, "little") + header)


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


HARM: dict[str, tuple[Any, str]] = {
    "index names the parent": (lambda f: rewrite_index(f, ".."), "leaves the folder"),
    "index names nothing": (lambda f: rewrite_index(f, ""), "leaves the folder"),
    "index names a root path": (lambda f: rewrite_index(f, "/etc/hostname"), "leaves the folder"),
    "index names a subfolder": (lambda f: rewrite_index(f, "sub/x.safetensors"), "leaves the folder"),
    "index names no path": (lambda f: rewrite_index(f, "a\0b"), "is missing"),
    "index names too much": (lambda f: rewrite_index(f, "x" * 5000), "is missing"),
    "index names the config": (lambda f: rewrite_index(f, "config.json"), "damaged or cut short"),
    "header is deep": (lambda f: write_header(f, b"[" * 10**6), "damaged or cut short"),
    "header is infinite": (
        lambda f: write_header(f, b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,0]}}'),
        "damaged or cut short",
    ),
    "header is a list": (lambda f: write_header(f, b"[]"), "damaged or cut short"),
    "header is huge": (lambda f: next(f.glob("model-*")).write_bytes(b"\xff" * 99), "its header claims"),
    "config is deep": (lambda f: (f / "config.json").write_text('{"a":' * 10**5), "is not valid JSON"),
    "config has many layers": (lambda f: configure(f, num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "config has many experts": (
        lambda f: configure(f, text_config={"sizes": [{"num_experts": 10**30}]}),
        "text_config.sizes.num_experts is 1000000000",
    ),
    "config has a huge number": (lambda f: (f / "config.json").write_text("9" * 10**5), "is not valid JSON"),
}


@pytest.mark.parametrize("name", HARM)
def test_a_source_that_lies_is_refused(forks: Forks, source: Path, name: str) -> None:
    damage, message = HARM[name]
    damage(source)
    done = forks("convert", source, *OPTIONS, "-o", source.parent / "linear")
    refused(done, Exit.INCOMPATIBLE, message, source.parent, {"source"})


def test_half_a_character_is_carried_over(forks: Forks, source: Path) -> None:
    """JSON can escape what UTF-8 cannot say."""
    path = source / "config.json"
    path.write_text(path.read_text().replace("{", '{"note": "\\ud800", ', 1))
    done = forks("convert", source, *OPTIONS, "-o", source.parent / "linear")
    assert done.code == 0, done.output
    assert json.loads((source.parent / "linear" / "config.json").read_text())["note"] == "\ud800"


class Bomb:
    """Unpickled with trust, this makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_not_executed(forks: Forks, source: Path, zipped: bool) -> None:
    """In the format of today, and in that from before torch 1.6, which is read on another path."""
    for path in source.glob("model*"):
        path.unlink()
    trap = {"lm_head.weight": Bomb(source.parent / "executed")}
    torch.save(trap, source / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    done = forks("convert", source, *OPTIONS, "-o", source.parent / "linear")
    refused(done, Exit.INCOMPATIBLE, "not a plain pickle of tensors .* It was not executed", source.parent, {"source"})


CANARY = """
import pathlib
pathlib.Path({flag!r}).mkdir()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class Own{kind}({base}):
    pass
"""
KINDS = {
    "Config": ("AutoConfig", "LlamaConfig", "config.json"),
    "ForCausalLM": ("AutoModelForCausalLM", "LlamaForCausalLM", "config.json"),
    "Tokenizer": ("AutoTokenizer", "PreTrainedTokenizerFast", "tokenizer_config.json"),
}


def plant(folder: Path, kind: str, flag: Path) -> None:
    """Code in a model folder that makes `flag` when it runs, and the entry that asks for it."""
    entry, parent_class, file = KINDS[kind]
    (folder / "own.py").write_text(CANARY.format(flag=str(flag), kind=kind, base=parent_class))
    values = json.loads((folder / file).read_text())
    where: Any = [None, f"own.Own{kind}"] if kind == "Tokenizer" else f"own.Own{kind}"
    (folder / file).write_text(json.dumps({**values, "auto_map": {**values.get("auto_map", {}), entry: where}}))


@pytest.mark.parametrize("kind", with_slow(KINDS, "Tokenizer"))
def test_code_of_a_source_runs_only_when_trusted(forks: Forks, source: Path, kind: str) -> None:
    parent, flag = source.parent, source.parent / "executed"
    ours = convert_folder(source, parent / "ours", options=CONVERT["options"])
    for folder in (source, ours):
        plant(folder, kind, flag)
    recipe = recipe_in(parent / "ft", source)
    refusing: list[list[Any]] = [
        ["finetune", recipe],
        ["generate", ours, "a"],
        ["verify", ours],
        ["push", ours, "user/repo", "--dry-run"],
        ["push", ours, "user/repo"],
    ]
    # These ask for no tokenizer of its own.
    with_models: list[list[Any]] = [
        ["convert", source, *OPTIONS, "-o", parent / "linear"],
        ["convert", source, *OPTIONS, "--dry-run"],
        ["finetune", recipe, "--dry-run"],
        ["inspect", source],
        ["generate", source, "a"],
    ]
    for command in refusing + with_models:
        done = forks(*command)
        assert not flag.exists(), command
        expected = 0 if kind == "Tokenizer" and command in with_models else Exit.INCOMPATIBLE
        assert done.code == expected, (command, done.output)
        assert not expected or re.search("trust.remote.code", done.output), done.output
    for command in (["verify", source], ["push", source, "user/repo"]):
        done = forks(*command)
        assert (done.code, flag.exists()) == (Exit.INCOMPATIBLE, False), done.output
    shutil.rmtree(parent / "linear", ignore_errors=True)
    trusting = [recipe, "model.trust_remote_code=true"] if kind == "Tokenizer" else [source, *OPTIONS]
    verb = "finetune" if kind == "Tokenizer" else "convert"
    flags = [] if kind == "Tokenizer" else ["--trust-remote-code", "-o", parent / "linear"]
    forks(verb, *trusting, *flags)
    assert flag.exists()


@pytest.mark.parametrize("linked", [False, True])
def test_a_loop_of_generation_runs_only_when_trusted(forks: Forks, source: Path, linked: bool) -> None:
    """transformers runs custom_generate/generate.py of a folder whose other code is trusted."""
    parent, flag = source.parent, source.parent / "executed"
    ours = convert_folder(source, parent / "ours", options=CONVERT["options"])
    loop = parent / "elsewhere" if linked else ours / "custom_generate"
    loop.mkdir()
    (loop / "generate.py").write_text(f"open({str(flag)!r}, 'w')\ndef generate(*args, **kwargs): pass\n")
    if linked:
        (ours / "custom_generate").symlink_to(loop)
    recipe = recipe_in(parent / "ft", ours, convert=None)
    commands: list[list[Any]] = [
        ["generate", ours, "a"],
        ["verify", ours],
        ["finetune", recipe],
        ["finetune", recipe, "--dry-run"],
        ["push", ours, "user/repo", "--dry-run"],
    ]
    for command in commands:
        done = forks(*command)
        assert not flag.exists(), command
        assert done.code == Exit.INCOMPATIBLE, (command, done.output)
        assert "custom_generate/generate.py" in done.output
    forks("generate", ours, "a", "--trust-remote-code")
    assert flag.exists()


# ---------------------------------------------------------------- secrets

TOKEN = "hf_" + "CanaryCanaryCanaryCanaryCanary1234"
PASSWORD = "canary-password"


def assert_no_secret(done: Done, *folders: Path) -> None:
    for secret in (TOKEN, PASSWORD):
        assert secret not in done.output
        for folder in folders:
            for path in folder.rglob("*"):
                assert not path.is_file() or secret.encode() not in path.read_bytes(), path
                assert secret not in path.name


def test_tokens_reach_no_log_and_no_card(forks: Forks, source: Path) -> None:
    """From the environment, a config of old, a remote of git, a recipe, an address on the command line."""
    parent, environment = source.parent, {"HF_TOKEN": TOKEN, "WANDB_API_KEY": PASSWORD}
    path = source / "config.json"
    clean = path.read_text()
    path.write_text(json.dumps({**json.loads(clean), "task_specific_params": {"use_auth_token": TOKEN}}))
    done = forks("convert", source, *OPTIONS, "-o", parent / "linear", environment=environment)
    message = "config.json: task_specific_params.use_auth_token holds an access token or a password"
    refused(done, Exit.INCOMPATIBLE, message, parent, {"source"})
    assert_no_secret(done)
    path.write_text(clean)
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text(f"url = https://user:{PASSWORD}@huggingface.co/a/b\n")
    done = forks("convert", source, *OPTIONS, "-o", parent / "linear", "--json", environment=environment)
    assert done.code == 0, done.output
    assert_no_secret(done, parent / "linear")
    recipe = recipe_in(parent / "ft", source)
    done = forks("finetune", recipe, "--json", environment=environment)
    assert done.code == 0, done.output
    assert_no_secret(done, parent / "ft")
    address = f"https://user:{PASSWORD}@huggingface.co/a/b"
    for model in (address, TOKEN):
        done = forks("convert", model, *OPTIONS, "-o", parent / "none", environment=environment)
        assert done.code in (Exit.INCOMPATIBLE, Exit.HUB), done.output
        assert "***" in done.output
        assert_no_secret(done)


def test_a_key_that_is_part_of_a_name_changes_no_file(forks: Forks, source: Path) -> None:
    outputs = [source.parent / "a", source.parent / "b"]
    for output, key in zip(outputs, ("", "LlamaFor"), strict=True):
        done = forks("convert", source, *OPTIONS, "-o", output, environment={"WANDB_API_KEY": key})
        assert done.code == 0, done.output
    a, b = ({name: data for name, data in contents(o).items() if name != "README.md"} for o in outputs)
    assert a == b
    done = forks("generate", outputs[1], "a", "--max-new-tokens", "1")
    assert done.code == 0, done.output


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (TOKEN, True),
        (f"https://user:{PASSWORD}@host/a", True),
        ("https://ghp_alone@github.com/a", True),
        ("git+ssh://git@github.com/a", False),
        ("hf_LlamaForCausalLMModel", False),
    ],
)
def test_what_is_redacted_is_not_pushed(tmp_path: Path, text: str, secret: bool) -> None:
    (tmp_path / "file").write_text(text)
    assert (redact(text) != text) == secret
    with pytest.raises(LinearizeError, match=r"access.*token") if secret else contextlib.nullcontext():
        check_secrets(tmp_path / "file")


@pytest.mark.parametrize("key", ["model.base", "data.train.path", "name", "output_dir"])
def test_a_secret_in_a_recipe_is_refused(forks: Forks, shared: Path, tmp_path: Path, key: str) -> None:
    recipe = recipe_in(tmp_path, shared)
    value = TOKEN if key == "name" else f"https://user:{PASSWORD}@host/x"
    done = forks("finetune", recipe, f"{key}={value}", folder=str(tmp_path))
    assert done.code == Exit.USAGE, done.output
    assert re.search(rf"override '{re.escape(key)}=.*\*\*\*.*': holds an access token or a password", done.output)
    assert_no_secret(done, tmp_path)


def test_a_bug_says_what_to_report(forks: Forks, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1: the traceback, versions and command; no values of variables, for they may be secret."""

    def fail(*arguments: Any, **options: Any) -> None:
        secret = "value of a variable"
        raise AssertionError(f"{TOKEN} is odd", len(secret))

    monkeypatch.setattr("linearize.convert.plan_conversion", fail)
    monkeypatch.setattr(sys, "argv", ["linearize", "convert", "someone/model", "--to", "gsa"])
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with pytest.raises(SystemExit) as ended:
        main()
    message = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert ended.value.code == Exit.BUG
    versions = (f"linearize {__version__}", f"torch {torch.__version__}", "transformers", "Python")
    command = "command: linearize convert someone/model --to gsa"
    for part in ("Traceback", "in fail", "AssertionError", "open an issue", command, *versions):
        assert part in message, message
    assert "value of a variable" not in message.replace('secret = "value of a variable"', "")
    assert TOKEN not in message
