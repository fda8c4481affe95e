"""A run that was killed, interrupted or changed: what the same command does next."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Done, Forks
from training import AT, LORA, base, make_recipe, metrics, same, stage, tensors, train, write_recipe

from linearize.errors import Exit, LinearizeError
from linearize.finetune import finetune
from linearize.train.loop import StageLoop
from linearize.train.runs import Run

STEPS = 5


def stages() -> list[dict[str, Any]]:
    """Three stages with dropout in model and adapters, so that lost random numbers show."""
    return [
        stage("attention_transfer", "new", "gpt2", steps=STEPS),
        stage("logit_kl", ["new", "lora"], "gpt2", steps=STEPS, lora={**LORA["gpt2"], "dropout": 0.2}),
        stage("sft", "mixer", "gpt2", steps=STEPS, schedule={"name": "cosine", "warmup_ratio": 0.2}),
    ]


CHECKPOINTS = {"checkpoint": {"every_steps": 2, "keep": 1}}


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
    ("step", 1, [0, 0, 0]),
    ("step", 9, [2, 0]),
    ("write", 2, [2, 0, 0]),
    ("write", 6, [4, 0]),
    ("end", 1, []),
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


@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupt_saves_and_the_same_command_continues(
    kind: str, root: Path, whole: Path, tmp_path: Path, forks: Forks
) -> None:
    recipe = write_recipe(tmp_path, base(root, "gpt2"), *stages(), **CHECKPOINTS)
    stopped = run_until(forks, kind, "step", 8, recipe)
    assert stopped.code == Exit.INTERRUPTED, stopped.said
    assert "state saved in" in stopped.said
    assert "Traceback" not in stopped.said
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


@pytest.mark.parametrize(("before", "code"), [(CLOSING, Exit.INTERRUPTED), (IGNORING, Exit.OK)], ids=["closed", "nohup"])
def test_a_closed_terminal_saves_unless_that_is_ignored(
    before: str, code: Exit, root: Path, tmp_path: Path, forks: Forks
) -> None:
    """Writing to a terminal that is gone fails, which must not end the run before it is saved."""
    recipe = write_recipe(tmp_path, base(root, "gpt2"), *stages(), **CHECKPOINTS)
    done = forks("SIGHUP", "step", 8, recipe, script=before + AT)
    assert done.code == code, done.said
    assert (tmp_path / "run" / "final").exists() == (code == Exit.OK)
    assert (tmp_path / "run" / "checkpoints" / "logit_kl-4").exists() == (code == Exit.INTERRUPTED)


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
    recipe = recipe_in(folder, root, checkpoint={"every_steps": 1, "keep": 2})
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
    with pytest.raises(LinearizeError, match="no checkpoint of this run"):
        train(recipe, resume=str(tmp_path))


def test_a_named_checkpoint_takes_another_learning_rate(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = halfway(tmp_path, root, monkeypatch)
    changed = stages()
    changed[1]["optimizer"] = {"lr": 1e-3}
    recipe = make_recipe(tmp_path, base(root, "gpt2"), *changed, checkpoint={"every_steps": 1, "keep": 2})
    with pytest.raises(LinearizeError, match=r"recipe changed.*stages\[1\].optimizer.lr 1e-2 -> 1e-3") as caught:
        train(recipe)
    assert caught.value.code == Exit.USAGE
    train(recipe, resume=str(checkpoints / "logit_kl-2"))
    assert metrics(tmp_path, "lr")[:10] == [1e-2] * 7 + [1e-3] * 3
    changed[1]["steps"] = 9
    with pytest.raises(LinearizeError, match=r"stages\[1\].steps 5 -> 9"):
        train(make_recipe(tmp_path, base(root, "gpt2"), *changed), resume=str(checkpoints / "logit_kl-2"))


def test_never_starts_over(root: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halfway(tmp_path, root, monkeypatch)
    train(recipe_in(tmp_path, root), resume="never")
    assert_as_undisturbed(tmp_path, whole)


def test_a_finished_run_says_so(root: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    recipe = recipe_in(tmp_path, root)
    shutil.copyfile(whole / "run" / "run.json", tmp_path / "run" / "run.json")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["recipe"]["output_dir"] = recipe.output_dir
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    said: list[str] = []
    report = finetune(recipe, say=said.append)
    assert "finished already" in said[0]
    assert report == json.loads((tmp_path / "run" / "report.json").read_text())
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_foreign_folder_is_left_alone(root: Path, tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, root)
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "thesis.txt").write_text("mine")
    for resume in ("auto", "never"):
        with pytest.raises(LinearizeError, match="no run of linearize"):
            train(recipe, resume=resume)
    assert (tmp_path / "run" / "final" / "thesis.txt").read_text() == "mine"


def test_stages_one_by_one_are_the_whole_run(root: Path, whole: Path, tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, root)
    with pytest.raises(LinearizeError, match="--stage sft needs attention_transfer, which is not finished"):
        train(recipe, only="sft")
    with pytest.raises(LinearizeError, match="the recipe has attention_transfer, logit_kl, sft"):
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
    with pytest.raises(LinearizeError, match="--max-steps 2 -> none"):
        train(recipe)


# ---------------------------------------------------------------- NaN


def test_nan_names_the_last_good_checkpoint(root: Path, tmp_path: Path) -> None:
    wild = stage("logit_kl", "new", "gpt2", steps=6, name="wild", optimizer={"lr": 1e30, "clip": 1e30})
    calm = stage("attention_transfer", "new", "gpt2", steps=2)
    recipe = make_recipe(tmp_path, base(root, "gpt2"), calm, wild, checkpoint={"every_steps": 1, "keep": 4})
    with pytest.raises(LinearizeError, match=r"last good checkpoint: .*(wild-|transfer-2-end)") as caught:
        train(recipe)
    assert caught.value.code == Exit.CHECK_FAILED
    assert "stages[1].optimizer.lr (now 1e+30)" in caught.value.message
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
    recipe = recipe_in(tmp_path, root, checkpoint={"every_steps": 1, "keep": 9})
    with pytest.raises(LinearizeError, match=r"not finite|gradient's norm is nan") as caught:
        train(recipe)
    assert caught.value.code == Exit.CHECK_FAILED
    good = {"weight": "attention_transfer-2", "gradient": "attention_transfer-1"}[where]
    assert caught.value.message.endswith(good)
    assert_finite_checkpoints(tmp_path)
