"""The best weights instead of the last ones, ending early, and what a run says when it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import holds
from training import base, killed_after, make_recipe, metrics, recipe_values, same, stage, tensors, train, write_data

from linearize.errors import LinearizeError
from linearize.finetune import finetune
from linearize.measure.evaluate import Score
from linearize.recipe.recipe import Recipe, load_recipe
from linearize.terminal import output
from linearize.train import loop
from linearize.train.progress import StageProgress
from linearize.train.session import Finetuner

DATA = {"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": 32}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Evaluations with these KLs, after those of the teacher and of the converted model."""

    def make(*kls: float) -> None:
        scores: Iterator[Score] = iter([Score(2.0, 0.5), Score(9.0, 0.1, 5.0), *(Score(2 + kl, 0.4, kl) for kl in kls)])
        monkeypatch.setattr(Finetuner, "evaluate", lambda *args, **named: next(scores))

    return make


def recipe(place: Path, root: Path, steps: int, **changes: Any) -> Recipe:
    changes = {"data": DATA, "eval": {"every_steps": 2, "max_tokens": 64}, **changes}
    return make_recipe(place, base(root, "llama"), stage("logit_kl", "mixer", steps=steps), **changes)


def test_the_best_weights_are_kept(root: Path, tmp_path: Path, scripted: Any) -> None:
    scripted(3.0, 1.0, 2.0, 2.5)
    report = train(recipe(tmp_path / "best", root, 8, finish={"verify": False, "keep": "best"}))
    scripted(3.0, 1.0)
    train(recipe(tmp_path / "four", root, 4))
    assert same(tensors(tmp_path / "best/run/final"), tensors(tmp_path / "four/run/final"))
    (row,) = [row for row in report["stages"] if row["name"] == "logit_kl"]
    assert (row["ppl"], row["tokens"]) == (3.0, 4 * 2 * 32)
    assert not (tmp_path / "best/run/best").exists()


def test_a_stage_ends_when_patience_is_over(root: Path, tmp_path: Path, scripted: Any) -> None:
    scripted(1.0, 2.0, 3.0, 0.5)
    told: list[str] = []
    evaluation = {"every_steps": 2, "max_tokens": 64, "patience": 2}
    finetune(recipe(tmp_path, root, 8, eval=evaluation), say=told.append)
    assert any(holds(line, "logit_kl", "after step 6 of 8", "2 evaluations") for line in told)
    assert len(metrics(tmp_path)) == 6
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["logit_kl-6-end"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval": {"patience": 2}}, "every_steps"),
        ({"finish": {"keep": "best"}}, r"eval.every_steps"),
    ],
)
def test_what_needs_evaluations_says_so(root: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_data(tmp_path)
    values = recipe_values(tmp_path, base(root, "llama"), stage("logit_kl"), **{"data": DATA, **changes})
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    with pytest.raises(LinearizeError, match=words):
        load_recipe(tmp_path / "recipe.yaml")


def halfway(place: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of 8 steps that was killed after step 5, with a checkpoint of step 4."""
    with killed_after(4, monkeypatch), pytest.raises(KeyboardInterrupt):
        train(recipe(place, root, 8, checkpoint={"every_steps": 4}))


@pytest.mark.slow
def test_what_changes_no_weight_may_change_and_the_start_says_what_is_left(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halfway(tmp_path, root, monkeypatch)
    told: list[str] = []
    other = {"eval": {"every_steps": 3, "max_tokens": 64}, "checkpoint": {"every_steps": 3, "save_total_limit": 1}}
    finetune(recipe(tmp_path, root, 8, **other), say=told.append)
    assert holds(told[0], f"{tmp_path / 'run'}", "step 4 of logit_kl", "256 tokens", "tokens/s")
    train(recipe(tmp_path / "whole", root, 8))
    assert same(tensors(tmp_path / "run/final"), tensors(tmp_path / "whole/run/final"))


@pytest.mark.parametrize("when", ["before it goes on", "while it trains"])
def test_best_weights_with_a_flipped_bit_are_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    asked = recipe(tmp_path, root, 4, finish={"verify": False, "keep": "best"}, checkpoint={"every_steps": 2})
    weights, take = tmp_path / "run/best/trained.safetensors", Finetuner.take_best
    kept = []

    def flip() -> None:
        kept.append(weights.read_bytes())
        weights.write_bytes(kept[0][:-2] + bytes([kept[0][-2] ^ 64]) + kept[0][-1:])

    def flipped(tuner: Finetuner) -> None:
        flip()
        take(tuner)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if when == "while it trains":
            patch.setattr(Finetuner, "take_best", flipped)
        else:
            patch.setattr("linearize.finetune.save_final", killed)
            with pytest.raises(KeyboardInterrupt):
                train(asked)
            flip()
        with pytest.raises(LinearizeError) as refused:
            train(asked)
    assert holds(refused.value.message, f"{weights}", "ValueError")
    assert holds(refused.value.message, f"{weights.parent}")
    assert not (tmp_path / "run/final").exists()
    weights.write_bytes(kept[0])
    assert Path(train(asked)["output"]).is_dir()


@pytest.mark.slow
def test_what_is_left_is_of_all_stages(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of logit KL of all weights counts as three of attention transfer; --stage leaves no later ones."""
    shown: list[float] = []

    def update(bar: Any, step: int, loss: float, rate: float, left: str) -> None:
        seconds, _, of_all = ("0", "", "") if left == "evaluation and saving follow" else left.partition(" left")
        assert of_all == (" in all" if bar.stage == "attention_transfer" and whole else "")
        shown.append(round(float(seconds) * rate))  # in tokens of this stage

    monkeypatch.setattr(StageProgress, "update", update)
    monkeypatch.setattr(loop, "duration", lambda seconds: f"{seconds:.12f}")
    stages = stage("attention_transfer", steps=3), stage("logit_kl", "all", steps=2)
    whole = True
    train(make_recipe(tmp_path, base(root, "llama"), *stages))
    assert shown == [64 * 2 + 384, 64 + 384, 384, 64, 0]
    whole = False
    shown.clear()
    twice = make_recipe(tmp_path / "two", base(root, "llama"), *stages)
    train(twice, only="attention_transfer")
    assert shown == [128, 64, 0]
    told: list[str] = []
    finetune(twice, say=told.append)
    last = metrics(tmp_path / "two", "tokens_per_s")[2]
    time = output.duration(384 / last)
    assert holds(told[0], "two/run", "step 3 of attention_transfer", "128 tokens", time, f"{last:,} tokens/s")


def test_another_learning_rate_is_offered(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halfway(tmp_path, root, monkeypatch)
    slower = stage("logit_kl", "mixer", steps=8, optimizer={"lr": 1e-3})
    changes = {"data": DATA, "eval": {"every_steps": 2, "max_tokens": 64}, "checkpoint": {"every_steps": 4}}
    changed = make_recipe(tmp_path, base(root, "llama"), slower, **changes)
    offer = f"--resume {tmp_path / 'run/checkpoints/logit_kl-4'} goes on from there with these values"
    with pytest.raises(LinearizeError) as refused:
        train(changed)
    assert offer in refused.value.message
    longer = make_recipe(tmp_path, base(root, "llama"), {**slower, "steps": 9}, **changes)
    with pytest.raises(LinearizeError) as refused:
        train(longer)
    assert "goes on from there" not in refused.value.message
    train(changed, resume=str(tmp_path / "run/checkpoints/logit_kl-4"))
    assert metrics(tmp_path, "lr") == [1e-2] * 4 + [1e-3] * 4

    # Nothing is left that another rate could train: the record would name a rate that trained nothing.
    written = (tmp_path / "run/final/linearize.json").read_bytes()
    faster = make_recipe(tmp_path, base(root, "llama"), {**slower, "optimizer": {"lr": 2e-3}}, **changes)
    for resume in ("auto", str(tmp_path / "run/checkpoints/logit_kl-8-end")):
        with pytest.raises(LinearizeError, match=r"lr 1e-3 -> 2e-3.*another name") as refused:
            train(faster, resume=resume)
        assert "goes on from there" not in refused.value.message
    assert (tmp_path / "run/final/linearize.json").read_bytes() == written
    quiet = make_recipe(tmp_path, base(root, "llama"), slower, **changes, finish={"verify": False})
    train(quiet, resume=str(tmp_path / "run/checkpoints/logit_kl-8-end"))
