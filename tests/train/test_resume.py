"""A run that was killed, interrupted or changed: what the same command does next."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import holds
from forks import Done, Forks
from training import AT, LORA, base, make_recipe, metrics, same, stage, tensors, train, write_recipe

from linearize.errors import Exit, LinearizeError
from linearize.finetune import finetune
from linearize.job.dry_run import dry_run
from linearize.train import session
from linearize.train.loop import StageLoop, Stream
from linearize.train.runs import Run
from linearize.train.runtime import make_optimizer

STEPS = 5


def stages() -> list[dict[str, Any]]:
    """Three stages with dropout in model and adapters, so that lost random numbers show."""
    return [
        stage("attention_transfer", "new", "gpt2", steps=STEPS),
        stage("logit_kl", ["new", "lora"], "gpt2", steps=STEPS, lora={**LORA["gpt2"], "dropout": 0.2}),
        stage("sft", "mixer", "gpt2", steps=STEPS, schedule={"name": "cosine", "warmup_ratio": 0.2}),
    ]


CHECKPOINTS = {"checkpoint": {"every_steps": 2, "save_total_limit": 1}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    train(make_recipe(folder, base(root, "gpt2"), *stages(), **CHECKPOINTS))
    return folder


def recipe_in(folder: Path, root: Path, **changes: Any) -> Any:
    return make_recipe(folder, base(root, "gpt2"), *stages(), **{**CHECKPOINTS, **changes})


def run_until(forks: Forks, kind: str, place: str, number: int, recipe: Path) -> Done:
    """`linearize finetune recipe` in a process of its own, which gets a signal at the given call."""
    return forks(kind, place, number, recipe, script=AT)


def assert_as_undisturbed(folder: Path, whole: Path) -> None:
    """Same losses in the same order, each step once, same weights to the last bit."""
    for key in ("stage", "step", "loss", "lr", "grad_norm"):
        assert metrics(folder, key) == metrics(whole, key), key
    assert same(tensors(folder / "run" / "final"), tensors(whole / "run" / "final"))


# Where the signal comes, and the first step of each stage that runs afterwards: no more than was lost.
KILLS = [
    ("step", 9, [2, 0]),
    pytest.param("write", 2, [2, 0, 0], marks=pytest.mark.slow),
    pytest.param("end", 1, [], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("place", "number", "starts"), KILLS, ids=str)
def test_a_killed_run_continues_as_if_nothing_had_happened(
    place: str,
    number: int,
    starts: list[int],
    root: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forks: Forks,
) -> None:
    recipe = write_recipe(tmp_path, base(root, "gpt2"), *stages(), **CHECKPOINTS)
    assert run_until(forks, "SIGKILL", place, number, recipe).code == -signal.SIGKILL
    assert not (tmp_path / "run" / "final").exists()
    began, run = [], StageLoop.run
    monkeypatch.setattr(StageLoop, "run", lambda loop, start: (began.append(start), run(loop, start)))
    train(recipe_in(tmp_path, root))
    assert began == starts
    assert_as_undisturbed(tmp_path, whole)
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_an_interrupt_saves_and_the_same_command_continues(
    root: Path, whole: Path, tmp_path: Path, forks: Forks
) -> None:
    """SIGTERM and SIGHUP are sent below."""
    recipe = write_recipe(tmp_path, base(root, "gpt2"), *stages(), **CHECKPOINTS)
    stopped = run_until(forks, "SIGINT", "step", 8, recipe)
    assert stopped.code == Exit.INTERRUPTED, stopped.output
    assert "state saved in" in stopped.output
    assert "Traceback" not in stopped.output
    assert any(path.name.startswith("logit_kl-") for path in (tmp_path / "run" / "checkpoints").iterdir())
    train(recipe_in(tmp_path, root))
    assert_as_undisturbed(tmp_path, whole)


# Output goes to a terminal, which is closed where the signal comes; the signal then comes twice.
CLOSING = """
import os
terminal, ours = os.openpty()
for descriptor in (1, 2):
    os.dup2(ours, descriptor)
os.close(ours)
kill = os.kill
os.kill = lambda *arguments: (os.close(terminal), kill(*arguments), kill(*arguments))
"""
# As nohup starts a command.
IGNORING = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "code"), [(CLOSING, Exit.INTERRUPTED), (IGNORING, Exit.OK)], ids=["closed", "nohup"]
)
def test_a_closed_terminal_saves_unless_that_is_ignored(
    before: str, code: Exit, root: Path, tmp_path: Path, forks: Forks
) -> None:
    """Writing to a terminal that is gone fails, which must not end the run before it is saved."""
    recipe = write_recipe(tmp_path, base(root, "gpt2"), *stages(), **CHECKPOINTS)
    done = forks("SIGHUP", "step", 8, recipe, script=before + AT)
    assert done.code == code, done.output
    assert (tmp_path / "run" / "final").exists() == (code == Exit.OK)
    assert (tmp_path / "run" / "checkpoints" / "logit_kl-4").exists() == (code == Exit.INTERRUPTED)


# ---------------------------------------------------------------- processes that read ahead

# Before AT: a group of processes of its own, which gets every signal; and a file named like each worker's number.
GROUP = """
import os
from pathlib import Path
from linearize.train import loop
os.setpgrp()
ignore_stop_signals = loop.ignore_stop_signals
def noted(over, worker):
    ignore_stop_signals(over, worker)
    Path(f"worker-{os.getpid()}").touch()
loop.ignore_stop_signals = noted
"""
READING = {"runtime": {"device": "cpu", "workers": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGTERM", "SIGINT"])
def test_a_signal_to_all_of_a_group_saves_the_run_that_reads_ahead(
    kind: str, root: Path, tmp_path: Path, forks: Forks
) -> None:
    recipe = write_recipe(tmp_path, base(root, "gpt2"), stage("sft", model="gpt2", steps=9), **READING)
    script = GROUP + AT.replace("os.kill(os.getpid(),", "os.killpg(0,")
    done = forks(kind, "step", 2, recipe, script=script, folder=str(tmp_path))
    assert done.code == Exit.INTERRUPTED, done.output
    assert "state saved in" in done.output
    assert all_gone(tmp_path) == 1


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_that_reads_ahead(root: Path, tmp_path: Path, forks: Forks) -> None:
    recipe = write_recipe(tmp_path, base(root, "gpt2"), stage("sft", model="gpt2", steps=9), **READING)
    done = forks("SIGKILL", "step", 2, recipe, script=GROUP + AT, folder=str(tmp_path))
    assert done.code == -signal.SIGKILL, done.output
    assert all_gone(tmp_path) == 1


def all_gone(folder: Path) -> int:
    """How many workers there were; fails where one still runs after a minute."""
    workers = [Path("/proc") / path.name.removeprefix("worker-") for path in folder.glob("worker-*")]
    end = time.monotonic() + 60
    while any(worker.exists() for worker in workers):  # they look every five seconds
        assert time.monotonic() < end
        time.sleep(0.1)
    return len(workers)


def test_pythons_exit_ends_a_process_that_reads_ahead(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends SIGTERM and waits, where a traceback holds the reader: torch ends no process then."""
    held, others = [], multiprocessing.active_children()

    def failing(loop: StageLoop, *arguments: Any) -> None:
        held.append(loop.reader)
        raise Stop

    monkeypatch.setattr(StageLoop, "_update", failing)
    with pytest.raises(Stop):
        train(make_recipe(tmp_path, base(root, "gpt2"), stage("sft", model="gpt2"), **READING))
    (worker,) = [child for child in multiprocessing.active_children() if child not in others]
    worker.terminate()
    worker.join(30)
    code = worker.exitcode
    worker.kill()  # or this process would wait for it
    assert code == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(LinearizeError("a cat is no text", Exit.INCOMPATIBLE), 3), (PermissionError(errno.EACCES, "no cat for you"), 4)],
    ids=str,
)
def test_what_a_worker_cannot_read_is_told_like_any_other_mistake(
    error: Exception, code: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, read = iter(range(10**6)), Stream.__getitem__

    def failing(stream: Stream, place: int) -> dict[str, torch.Tensor]:
        if next(calls) == 5:  # of the third step
            raise error
        return read(stream, place)

    monkeypatch.setattr(Stream, "__getitem__", failing)
    with pytest.raises(LinearizeError, match=r"^(a cat is no text|no cat for you)$") as caught:
        train(make_recipe(tmp_path, base(root, "gpt2"), stage("sft", model="gpt2"), **READING))
    assert caught.value.code == code
    assert metrics(tmp_path, "step") == [1, 2]


class Stop(BaseException):
    """Ends a run from within, as abruptly as an exception can."""


def stop_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the run in this process die after that many optimizer steps."""
    calls, update = iter(range(1, 10**6)), StageLoop._update

    def dying(loop: StageLoop, *arguments: Any) -> None:
        update(loop, *arguments)
        if next(calls) == number:
            raise Stop

    monkeypatch.setattr(StageLoop, "_update", dying)


def halfway(folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 8) -> Path:
    """A run that died in its second stage; returns its checkpoints."""
    recipe = recipe_in(folder, root, checkpoint={"every_steps": 1, "save_total_limit": 2})
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(Stop):
            train(recipe)
    return folder / "run" / "checkpoints"


def test_checkpoints_are_few_and_ends_of_stages_stay(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {path.name for path in halfway(tmp_path, root, monkeypatch).iterdir()} == {
        "attention_transfer-5-end",
        "logit_kl-1",
        "logit_kl-2",
    }


@pytest.mark.slow
def test_a_named_checkpoint_drops_what_came_after(
    root: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = halfway(tmp_path, root, monkeypatch)
    recipe = recipe_in(tmp_path, root, checkpoint={"every_steps": 50})
    run = Run(recipe, str(checkpoints / "logit_kl-1"))
    run.start({})
    assert sorted(path.name for path in checkpoints.iterdir()) == ["attention_transfer-5-end", "logit_kl-1"]
    assert len(metrics(tmp_path)) == 6
    train(recipe, resume=str(checkpoints / "logit_kl-1"))
    assert_as_undisturbed(tmp_path, whole)
    with pytest.raises(LinearizeError, match=r"checkpoint.*this"):
        train(recipe, resume=str(tmp_path))


@pytest.mark.slow
def test_a_named_checkpoint_takes_another_learning_rate(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = halfway(tmp_path, root, monkeypatch)
    changed = stages()
    changed[1]["optimizer"] = {"lr": 1e-3}
    recipe = make_recipe(tmp_path, base(root, "gpt2"), *changed, checkpoint={"every_steps": 1, "save_total_limit": 2})
    with pytest.raises(LinearizeError, match=r"changed.*stages\[1\].optimizer.lr.*1e-2.*->.*1e-3") as caught:
        train(recipe)
    assert caught.value.code == Exit.USAGE
    train(recipe, resume=str(checkpoints / "logit_kl-2"))
    assert metrics(tmp_path, "lr")[:10] == [1e-2] * 7 + [1e-3] * 3
    changed[1]["steps"] = 9
    with pytest.raises(LinearizeError, match=r"stages\[1\].steps 5 -> 9"):
        train(make_recipe(tmp_path, base(root, "gpt2"), *changed), resume=str(checkpoints / "logit_kl-2"))


def test_settings_that_changed_on_the_way_stay_in_the_record(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the step from which each part was trained by others."""
    checkpoints = halfway(tmp_path, root, monkeypatch)
    parts = []
    for step, lr in ((2, 1e-3), (2, 1e-3), (1, 1e-4)):
        changed = stages()
        changed[1]["optimizer"] = {"lr": lr}
        Run(recipe_of(tmp_path, root, changed), str(checkpoints / f"logit_kl-{step}")).start({})
        parts.append(json.loads((tmp_path / "run" / "run.json").read_text())["parts"])
    first, again, last = ([(part["stage"], part["step"], len(part["changed"])) for part in found] for found in parts)
    assert first == again == [(1, 2, 1)]
    assert last == [(1, 1, 1), (1, 1, 1)]  # what came after step 2 is trained again


def recipe_of(folder: Path, root: Path, changed: list[dict[str, Any]]) -> Any:
    return make_recipe(folder, base(root, "gpt2"), *changed, checkpoint={"every_steps": 1, "save_total_limit": 2})


def test_what_a_run_told_stays_in_the_record(root: Path, tmp_path: Path) -> None:
    data = {"train": {"files": ["heldout.txt"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": 32}}
    train(make_recipe(tmp_path, base(root, "gpt2"), stage("sft", model="gpt2", steps=1), data=data))
    told = " ".join(json.loads((tmp_path / "run" / "run.json").read_text())["notes"])
    assert "nothing is held out" in told
    assert "nearly random" in told  # which is known after the start
    for page in ("report.html", "final/README.md"):
        assert "nothing is held out" in (tmp_path / "run" / page).read_text()


def test_a_run_stands_a_clock_that_jumps(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`time.time` goes where it likes; `time.monotonic` moves in steps of 16 ms on Windows, and a step takes less."""
    jumps = itertools.cycle((0.0, 4e9, -5.0, 1e9))
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    train(make_recipe(tmp_path, base(root, "gpt2"), stage("sft", model="gpt2", steps=2), checkpoint={"every_steps": 1}))
    assert all(rate > 0 for rate in metrics(tmp_path, "tokens_per_s"))


def test_a_run_goes_on_with_another_number_of_workers(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stage("sft", model="gpt2")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stop):
            train(make_recipe(tmp_path, base(root, "gpt2"), one, checkpoint={"every_steps": 1}))
    train(make_recipe(tmp_path, base(root, "gpt2"), one, **READING))
    assert metrics(tmp_path, "step")[-1] == 4


# ---------------------------------------------------------------- inputs that changed


def flip(path: Path) -> None:
    """Change one bit of a file's last byte, in place; of lines of JSON of the last letter, so that they stay JSON."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b'"') - 1 if path.suffix == ".jsonl" else -1] ^= 1
    with path.open("r+b") as file:
        file.write(content)


@pytest.mark.slow
def test_what_changed_since_a_run_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit of a checkpoint, the text, the base: each by its name, before anything is removed; put back, it goes on."""
    held = {"data": {"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": 32}}}
    recipe = recipe_in(tmp_path, tmp_path, **held, checkpoint={"every_steps": 1, "save_total_limit": 2})
    with monkeypatch.context() as patch:
        stop_after(patch, 8)
        with pytest.raises(Stop):
            train(recipe)
    linear, newest = base(tmp_path, "gpt2"), tmp_path / "run" / "checkpoints" / "logit_kl-2"
    again = f"not the bytes that were saved.*Remove {newest}, and the run goes on from an earlier"
    refusals = {
        newest / "trained.safetensors": again,
        newest / "optimizer.pt": again,
        tmp_path / "train.jsonl": "changed since this run began: data.train.* `--resume never`",
        tmp_path / "heldout.txt": "changed since this run began: data.eval",
        linear / "model-mixers.safetensors": "changed since this run began: .*model-mixers.safetensors",
        linear / "tokenizer.json": "changed since this run began: .*tokenizer.json",
    }
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for resume in ("auto", str(newest)):
        for path, message in refusals.items():
            kept = path.read_bytes()
            flip(path)
            with pytest.raises(LinearizeError, match=message) as caught:
                train(recipe, resume=resume)
            assert caught.value.code == Exit.USAGE
            path.write_bytes(kept)
            now = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
            assert {**now, tmp_path / "run" / ".lock": b""} == {**before, tmp_path / "run" / ".lock": b""}
    train(recipe)
    assert metrics(tmp_path, "step")[-1] == STEPS


def test_a_source_changed_through_its_link_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converted base shares the bytes of the source; a source replaced by a new file does not change it."""
    source = Path(shutil.copytree(base(root, "gpt2").parent / "source", tmp_path / "source"))
    options = {"slots": 4, "chunk_size": 16}
    values = {"convert": {"mechanism": "gsa", "options": options}, "checkpoint": {"every_steps": 1}}
    recipe = make_recipe(tmp_path, source, stage("logit_kl", "new", "gpt2", steps=3), **values)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stop):
            train(recipe)
    shard = source / "model.safetensors"
    flip(shard)
    with pytest.raises(LinearizeError, match=r"began.*converted/model-source-00001"):
        train(recipe)
    flip(shard)
    shard.write_bytes((shard.unlink(), b"other weights")[1])
    assert train(recipe)["output"]


@pytest.mark.slow
def test_other_versions_are_noted(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halfway(tmp_path, root, monkeypatch)
    record = tmp_path / "run" / "run.json"
    values = json.loads(record.read_text())
    values["versions"] |= {"torch": "2.0.0", "transformers": "4.0.0"}
    record.write_text(json.dumps(values))
    messages: list[str] = []
    finetune(recipe_in(tmp_path, root, checkpoint={"every_steps": 1, "save_total_limit": 2}), say=messages.append)
    note = f"torch 2.0.0, now {torch.__version__}; transformers 4.0.0, now {transformers.__version__}"
    assert [line for line in messages if line.startswith("note: this run began with")] == [
        f"note: this run began with {note}: losses may differ a little"
    ]
    assert json.loads(record.read_text())["versions"]["torch"] == torch.__version__


def test_a_checkpoint_that_was_cut_short_is_told_without_hashes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions recorded none. Without the checkpoint the run goes on."""
    newest = halfway(tmp_path, root, monkeypatch) / "logit_kl-2"
    position = json.loads((newest / "position.json").read_text())
    del position["files"]
    (newest / "position.json").write_text(json.dumps(position))
    recipe = recipe_in(tmp_path, root, checkpoint={"every_steps": 1, "save_total_limit": 2})
    for name, keep in (("trained.safetensors", 0), ("optimizer.pt", 0.5)):
        content = (newest / name).read_bytes()
        os.truncate(newest / name, int(len(content) * keep))
        with pytest.raises(LinearizeError) as caught:
            train(recipe)
        assert caught.value.code == Exit.USAGE
        assert f"{newest / name} is damaged" in caught.value.message
        (newest / name).write_bytes(content)
    os.truncate(newest / name, 0)
    shutil.rmtree(newest)
    train(recipe)


FOREIGN = [
    b'{"note": "the learning rate was my idea"}\n',
    b"7\n",
    b'{"stage": 3, "step": "x", "eval_ppl": "low"}\n',
    b'{"eval_ppl": 3.0}\n',
    b"\xff\xfe\n",
    b"[" * 10**5 + b"\n",
]


@pytest.mark.slow
def test_foreign_lines_among_the_metrics_do_no_harm(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects stay, as somebody's notes; what is no object goes when a run continues."""
    halfway(tmp_path, root, monkeypatch)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.writelines(FOREIGN)
    train(recipe_in(tmp_path, root, checkpoint={"every_steps": 1, "save_total_limit": 2}))
    assert metrics(tmp_path, "step").count(1) == 3
    assert metrics(tmp_path, "note") == ["the learning rate was my idea"]


# ---------------------------------------------------------------- starting over


def short(folder: Path, root: Path, **changes: Any) -> Any:
    """A recipe of one stage, with a conversion."""
    source = base(root, "gpt2").parent / "source"
    convert = {"mechanism": "gsa", "options": {"slots": 4, "chunk_size": 16}}
    steps = stage("logit_kl", "new", "gpt2", steps=2, **changes)
    return make_recipe(folder, source, steps, convert=convert, checkpoint={"every_steps": 1})


@pytest.mark.slow
def test_a_finished_model_stays_until_the_new_one_is_ready(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of another recipe. The start over is then the run: it goes on, and replaces the model at its end."""
    final = tmp_path / "run" / "final"
    train(short(tmp_path, root))
    old = tensors(final)
    other = short(tmp_path, root, optimizer={"lr": 3e-2})
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stop):
            train(other, resume="never")
    assert same(tensors(final), old)
    with monkeypatch.context() as patch:
        patch.setattr("linearize.finetune.save_final", lambda *arguments: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            train(other)
    assert same(tensors(final), old)
    train(other)
    assert not same(tensors(final), old)
    messages: list[str] = []
    finetune(other, say=messages.append)
    assert "finished already" in messages[0]


def test_starting_over_removes_nothing_that_linearize_did_not_write(root: Path, tmp_path: Path) -> None:
    recipe = short(tmp_path, root)
    train(recipe)
    (tmp_path / "run" / "notes.tmp").write_text("mine, too")
    for place in ("final", "converted", "checkpoints/logit_kl-2-end"):
        thesis = tmp_path / "run" / place / "thesis.txt"
        thesis.write_text("mine")
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        with pytest.raises(LinearizeError, match=re.escape(str(thesis))) as caught:
            train(recipe, resume="never")
        assert caught.value.code == Exit.USAGE
        assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        thesis.unlink()
    train(recipe, resume="never")
    assert (tmp_path / "run" / "notes.tmp").read_text() == "mine, too"


@pytest.mark.slow
def test_never_starts_over(root: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halfway(tmp_path, root, monkeypatch)
    train(recipe_in(tmp_path, root), resume="never")
    assert_as_undisturbed(tmp_path, whole)


def test_a_run_whose_folder_was_moved_goes_on(
    root: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halfway(tmp_path / "before", root, monkeypatch)
    recipe = recipe_in(tmp_path / "now", root)
    shutil.move(tmp_path / "before" / "run", tmp_path / "now" / "run")
    train(recipe)
    assert_as_undisturbed(tmp_path / "now", whole)


def test_a_finished_run_says_so(root: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    recipe = recipe_in(tmp_path, root)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    messages: list[str] = []
    report = finetune(recipe, say=messages.append)
    assert "finished already" in messages[0]
    assert report["output"] == str(tmp_path / "run" / "final")  # not in the folder that this one is a copy of
    assert report | {"output": "final"} == json.loads((tmp_path / "run" / "report.json").read_text())
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_foreign_folder_is_left_alone(root: Path, tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, root)
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "thesis.txt").write_text("mine")
    for resume in ("auto", "never"):
        with pytest.raises(LinearizeError, match=r"run.*linearize"):
            train(recipe, resume=resume)
    assert (tmp_path / "run" / "final" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_run_lies_apart_from_its_base(root: Path, tmp_path: Path, where: str) -> None:
    """A run replaces what it wrote, and final/ of an earlier one may be the base."""
    folder = tmp_path / "models" / "base"
    shutil.copytree(base(root, "llama"), folder)
    output = folder / "run" if where == "inside" else folder.parent
    before = sorted(path for path in tmp_path.rglob("*") if "recipe" not in path.name)
    recipe = make_recipe(tmp_path / "data", folder, stage("attention_transfer"), output_dir=str(output))
    for act in (train, lambda given: dry_run(given, lambda line: None)):
        with pytest.raises(LinearizeError, match="folders") as caught:
            act(recipe)
        assert caught.value.code == Exit.USAGE
    left = sorted(path for path in tmp_path.rglob("*") if (tmp_path / "data") not in (path, *path.parents))
    assert left == before


@pytest.mark.slow
def test_a_dry_run_tells_what_becomes_of_the_run_that_is_there(root: Path, tmp_path: Path) -> None:
    """By the checks of the real run; nothing of it is written."""
    run = tmp_path / "run"

    def notes(recipe: Any, resume: str | None = "auto", **more: Any) -> list[str]:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        messages = list[str]()
        dry_run(recipe, messages.append, resume=resume, **more)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        return [line for line in messages if line.startswith("note: ")]

    def of(steps: int) -> Any:
        parts = [stage(kind, "new", "gpt2", steps=steps) for kind in ("attention_transfer", "logit_kl")]
        return make_recipe(tmp_path, base(root, "gpt2"), *parts)

    recipe = of(2)
    assert notes(recipe) == []
    train(recipe, only="attention_transfer")
    (note,) = notes(recipe)
    assert holds(note, "note", f"{run}", "step 2 of attention_transfer", "128")
    (note,) = notes(recipe, "never")
    assert holds(note, "note", f"{run}", "--resume never", "over")
    (note,) = notes(recipe, "never", only="logit_kl")
    assert holds(note, "refused", "--stage", "logit_kl", "attention_transfer")
    (note,) = notes(recipe, str(tmp_path / "other"))
    assert holds(note, "here")
    train(recipe)
    (note,) = notes(recipe)
    assert holds(note, f"note: {run / 'final'}", "finished", "nothing", "Start over")
    (note,) = notes(recipe := of(3))
    assert notes(recipe, None) == []
    with pytest.raises(LinearizeError) as refused:
        train(recipe)
    assert note == f"note: a real run in {run} is refused: {refused.value.message}"
    assert holds(note, "stages[0].steps", "2", "->", "3", "stages[1].steps")
    assert holds(note, "`--resume", "never`")
    assert holds(note, "on", f"model.base={run / 'final'}", "convert=null")
    (run / "run.json").write_text("{")
    assert "run.json" in notes(recipe)[0]


@pytest.mark.slow
def test_stages_one_by_one_are_the_whole_run(root: Path, whole: Path, tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, root)
    with pytest.raises(LinearizeError, match=r"--stage.*attention_transfer"):
        train(recipe, only="sft")
    assert not (tmp_path / "run").exists()
    with pytest.raises(LinearizeError, match=r"attention_transfer.*logit_kl"):
        train(recipe, only="kl")
    for name in ("attention_transfer", "logit_kl"):
        assert train(recipe, only=name)["output"] is None
        assert not (tmp_path / "run" / "final").exists()
    assert train(recipe, only="attention_transfer")["output"] is None  # done already, nothing happens
    assert train(recipe, only="sft")["output"] == str(tmp_path / "run" / "final")
    assert_as_undisturbed(tmp_path, whole)


def test_max_steps_bounds_every_stage_and_is_part_of_the_run(root: Path, tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, root)
    train(recipe, max_steps=2)
    assert metrics(tmp_path, "step") == [1, 2] * 3
    with pytest.raises(LinearizeError, match=r"--max-steps.*2.*->"):
        train(recipe)


# ---------------------------------------------------------------- NaN


def test_nan_names_the_last_good_checkpoint(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wilder(groups: list[dict[str, Any]], stage: Any, *arguments: Any) -> Any:
        """At a learning rate that no recipe may have."""
        faster = 1e30 if stage.name == "wild" else 1.0
        return make_optimizer([{**group, "factor": faster} for group in groups], stage, *arguments)

    monkeypatch.setattr(session, "make_optimizer", wilder)
    wild = stage("logit_kl", "new", "gpt2", steps=6, name="wild", optimizer={"lr": 1.0, "max_grad_norm": 1e30})
    calm = stage("attention_transfer", "new", "gpt2", steps=2)
    recipe = make_recipe(tmp_path, base(root, "gpt2"), calm, wild, checkpoint={"every_steps": 1, "save_total_limit": 4})
    with pytest.raises(LinearizeError, match=r"checkpoint.*.*(wild-|transfer-2-end)") as caught:
        train(recipe)
    assert caught.value.code == Exit.CHECK_FAILED
    assert "stages[1].optimizer.lr (now 1)" in caught.value.message
    assert_finite_checkpoints(tmp_path)
    named = caught.value.message.partition("--resume ")[2]
    wild["optimizer"] = {"lr": 1e-3}
    train(make_recipe(tmp_path, base(root, "gpt2"), calm, wild), resume=named)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def assert_finite_checkpoints(folder: Path) -> None:
    """Every tensor of every checkpoint is a number."""
    checkpoints = list((folder / "run" / "checkpoints").iterdir())
    assert checkpoints
    assert all(torch.isfinite(t).all() for path in checkpoints for t in tensors(path).values())


@pytest.mark.parametrize("where", ["gradient", "weight"])
def test_what_is_not_finite_is_never_saved(
    where: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, step, calls = StageLoop._update, StageLoop._micro_batch, iter(range(1, 99))

    def spoil_weight(loop: StageLoop, *arguments: Any) -> None:
        update(loop, *arguments)
        if arguments[-1] == 2:
            loop.parameters[0].data.view(-1)[0] = float("inf")

    def spoil_gradient(loop: StageLoop, batch: Any, tokens: Any) -> Any:
        loss = step(loop, batch, tokens)
        if next(calls) == 3:
            loop.parameters[0].grad.view(-1)[0] = float("nan")
        return loss

    if where == "weight":
        monkeypatch.setattr(StageLoop, "_update", spoil_weight)
    else:
        monkeypatch.setattr(StageLoop, "_micro_batch", spoil_gradient)
    recipe = recipe_in(tmp_path, root, checkpoint={"every_steps": 1, "save_total_limit": 9})
    with pytest.raises(LinearizeError, match=r"not finite|gradient's norm is nan") as caught:
        train(recipe)
    assert caught.value.code == Exit.CHECK_FAILED
    good = {"weight": "attention_transfer-2", "gradient": "attention_transfer-1"}[where]
    assert caught.value.message.endswith(good)
    assert_finite_checkpoints(tmp_path)
