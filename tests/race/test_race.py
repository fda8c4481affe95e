"""`linearize race`: contestants with equal tokens on one teacher, planned, stopped, resumed, and put into one table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Command, holds
from pages import Page
from training import T, make_recipe, small_source, stage
from transformers import BertConfig, BertForMaskedLM

from linearize.commands.race import parse_tokens
from linearize.convert import convert
from linearize.errors import Exit, LinearizeError
from linearize.measure.compare import EvalRequest
from linearize.page.race import race_tables
from linearize.race import race as story
from linearize.race.methods import FEWEST, METHODS, divided
from linearize.recipe.recipe import Recipe, load_recipe

TOKENS = FEWEST * 2 * T  # the fewest steps, of two blocks
REQUEST = EvalRequest((512,), 2, 42, 8192, 2)
MEASURES = ("--lengths", "512", "--trials", "2", "--generate", "2")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a common recipe for a random model of two layers, with text beside it."""
    folder = tmp_path_factory.mktemp("race")
    source = small_source(folder / "source", "llama")
    convert = {"mechanism": "gsa", "options": {"slots": 4, "clock": 2}}
    data = {"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": T}}
    stages = [stage("attention_transfer", tokens=128), stage("logit_kl", ["all"], tokens=256)]
    make_recipe(folder, source, *stages, convert=convert, data=data, eval={"max_tokens": 1024})
    return folder / "recipe.yaml"


def words(recipe: Path, folder: Path, *more: str) -> tuple[str, ...]:
    """A race of two contestants as a person types it."""
    model = str(recipe.parent / "source")
    return (
        "race",
        model,
        "--recipe",
        str(recipe),
        "--only",
        "lolcats,progressive",
        "-o",
        str(folder),
        *MEASURES,
        *more,
    )


def plan(recipe: Recipe, folder: Path, **more: Any) -> story.Race:
    return story.plan_race(recipe, folder, REQUEST, **more)


# ---------------------------------------------------------------- the plan


def test_a_dry_run_prints_the_plan_and_writes_nothing(linearize: Command, recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "race"
    code, out, err = linearize(*words(recipe, folder, "--tokens", "1k", "--dry-run", "--json"))
    assert code == 0, err
    assert not folder.exists()
    assert "LoLCATs" in err
    planned = json.loads(out)
    steps = -(-1000 // (2 * T))
    assert planned["tokens"] == steps * 2 * T
    ones = {one["name"]: one for one in planned["contestants"]}
    assert list(ones) == list(METHODS)
    assert [name for name in ones if ones[name]["chosen"]] == ["lolcats", "progressive"]
    assert {one["tokens"] for one in ones.values()} == {planned["tokens"]}
    assert all(one["hours"] > 0 for one in ones.values())
    assert all(
        sum(s["steps"] * s["batch"]["per_device"] for r in one["recipes"] for s in r["stages"]) > 0
        for one in ones.values()
    )


def test_without_a_recipe_a_race_is_that_of_the_demo(
    linearize: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(story, "estimated", lambda race: dict.fromkeys(METHODS))
    code, out, err = linearize("race", "demo", "--dry-run", "--json")
    assert code == 0, err
    assert "no --recipe" not in err
    planned = json.loads(out)
    assert (planned["race"], planned["tokens"]) == ("runs/race-demo", 40_960)
    assert all(one["chosen"] and one["hours"] is None for one in planned["contestants"])
    code, _, err = linearize("race", str(recipe.parent / "source"), "--dry-run")
    assert code == 0, err
    assert holds(err, "--recipe", "linearize")


def test_each_method_changes_what_it_is_about(recipe: Path, tmp_path: Path) -> None:
    race = plan(load_recipe(recipe), tmp_path / "race", tokens=14 * 2 * T)
    recipes = {one.name: [leg.recipe for leg in one.legs] for one in race.contestants}
    (lolcats,) = recipes["lolcats"]
    assert lolcats.convert is not None
    assert (lolcats.convert.mechanism, lolcats.convert.options["window"]) == ("la", 64)
    assert lolcats.stages[0].loss.weight == 500  # 1000 over two layers
    assert [(one.kind, one.train, one.steps) for one in lolcats.stages] == [
        ("attention_transfer", ("new",), 7),
        ("sft", ("lora",), 7),
    ]
    (radlads,), (guided,) = recipes["radlads"], recipes["kl-guided"]
    assert [(one.name, one.steps) for one in radlads.stages] == [("align", 2), ("distil", 10), ("extend", 2)]
    assert radlads.data_for(radlads.stages[2]).pack.seq_len == 2 * T  # one block in place of two
    assert radlads.stages[2].batch.blocks == 1
    assert radlads.stages == guided.stages
    (hybrid,), (linear,) = recipes["hybrid"], recipes["linear"]
    assert [one.convert and one.convert.keep_softmax for one in (radlads, linear, guided, hybrid)] == [
        "",
        "",
        "auto:25%",
        "auto:25%",
    ]
    assert [one.steps for one in hybrid.stages] == [one.steps for one in linear.stages] == [5, 9]  # 128 to 256 tokens
    first, last = recipes["progressive"]
    assert [one.convert and one.convert.layers for one in (first, last)] == ["0", "1"]
    assert first.seed == lolcats.seed != last.seed  # a round does not read what the one before has read
    assert last.model.base == str(Path(first.output_dir) / "final")
    assert last.teacher is not None
    assert last.teacher.model == str(recipe.parent / "source")


def test_hybrids_keep_the_layers_that_the_recipe_names(recipe: Path, tmp_path: Path) -> None:
    race = plan(load_recipe(recipe, ["convert.keep_softmax=1"]), tmp_path / "race")
    kept = {
        one.name: leg.recipe.convert and leg.recipe.convert.keep_softmax for one in race.contestants for leg in one.legs
    }
    assert {name for name, layers in kept.items() if layers == "1"} == {"kl-guided", "hybrid"}
    race = plan(load_recipe(recipe, ["convert.keep_heads=auto:1"]), tmp_path / "race")
    found = {one.name: one.legs[0].recipe.convert for one in race.contestants}
    assert {(one.keep_softmax, one.keep_heads) for one in (found["hybrid"], found["kl-guided"]) if one} == {
        ("", "auto:1")
    }
    assert found["linear"] is not None
    assert found["linear"].keep_heads == ""


def test_a_student_without_finite_numbers_is_no_result(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = plan(load_recipe(recipe), tmp_path / "race")
    opened = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(story, "opened", lambda *given: opened)
    monkeypatch.setattr(story, "device_name", lambda device: "a CPU")
    monkeypatch.setattr(story, "compare", lambda *given: {"kl": math.nan, "student_ppl": 2.0})
    with pytest.raises(LinearizeError, match="lolcats") as told:
        story.measured(race.contestants[0], race, story.opened(race, "x"), None, None)
    assert told.value.code == Exit.CHECK_FAILED
    assert not (tmp_path / "race").exists()


def test_a_contestant_that_fails_may_be_left_out(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names it, and the others as --only takes them."""
    race = plan(load_recipe(recipe), tmp_path / "race", only=["lolcats", "progressive", "hybrid"])

    def finetune(recipe: Recipe, **more: Any) -> None:
        if "progressive" in recipe.output_dir:
            raise LinearizeError("the loss is NaN", Exit.CHECK_FAILED)

    for name, value in {"opened": None, "check_measures": None, "measured": {}}.items():
        monkeypatch.setattr(story, name, lambda *given, value=value: value)
    monkeypatch.setattr(story, "finetune", finetune)
    with pytest.raises(LinearizeError, match=r"progressive.*NaN.*--only lolcats,hybrid") as told:
        story.run_race(race, lambda text: None)
    assert told.value.code == Exit.CHECK_FAILED


@pytest.mark.parametrize("steps", [FEWEST, 7, 20, 1001])
def test_steps_are_divided_whole(steps: int) -> None:
    for shares in ((1, 1), (100, 500, 100), (1, 1000), (1, 1, 1)):
        found = divided(steps, shares)
        assert sum(found) == steps
        assert min(found) >= 1
        assert all(abs(one - steps * share / sum(shares)) <= 1 for one, share in zip(found, shares, strict=True))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "lolcat"), ("'lolcats'",)),
        (("--only", "lolcats,"), ("Known",)),
        (("--tokens", "many"), ("--tokens", "many", "0")),
        (("--tokens", str(TOKENS - 2 * T)), (f"{TOKENS}",)),
        (("teacher=demo",), ("contestants", "converted")),
        (("convert=null",), ("convert", "null")),
        (("stages.logit_kl.kind=sft",), ("attention_transfer",)),
        (("stages[0].tokens=null", "stages[0].epochs=1"), ("lasts", "epochs")),
        (("eval.every_steps=1", "eval.patience=1"), ("eval.patience",)),
        (("finish.push=user/repo",), ("finish.push",)),
        (("data.eval=null",), ("no data.eval",)),
        (("-o", "SOURCE/race"), ("separate", "folders")),
        (("--lengths", "64"), ("--lengths", "64", "8", "questions")),
        (("--lengths", "4096"), ("raise eval.max_tokens",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_raced_is_refused_before_anything_is_written(
    linearize: Command, recipe: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    source = str(recipe.parent / "source")
    given = [word.replace("SOURCE", source) for word in arguments]
    code, _, err = linearize("race", source, "--recipe", str(recipe), "-o", str(tmp_path / "race"), *given)
    assert code == Exit.USAGE
    assert holds(err, *message)
    assert not list(tmp_path.iterdir())


def test_a_model_among_the_values_is_told_where_it_goes(linearize: Command) -> None:
    code, _, err = linearize("race", "gsa", "model.base=some/model")
    assert code == Exit.USAGE
    assert "linearize race some/model --recipe gsa" in err


def test_a_race_runs_in_one_process(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LinearizeError, match="without a launcher"):
        plan(load_recipe(recipe), tmp_path / "race")


def test_a_model_that_writes_no_text_is_refused(recipe: Path, tmp_path: Path) -> None:
    config = BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    common = load_recipe(recipe, [f"model.base={tmp_path / 'bert'}", "convert={mechanism: la}"])
    with pytest.raises(LinearizeError, match=r"models.*write") as refused:
        plan(common, tmp_path / "race")
    assert refused.value.code == Exit.INCOMPATIBLE


def test_unequal_tokens_are_refused() -> None:
    story.check_tokens({"a": 640, "b": 640})
    with pytest.raises(LinearizeError, match=r"640.*1,280"):
        story.check_tokens({"a": 640, "b": 1280})


def test_tokens_are_written_as_in_recipes() -> None:
    assert [parse_tokens(text) for text in ("", "40k", "65536")] == [None, 40_000, 65_536]


# ---------------------------------------------------------------- the race


@pytest.mark.slow
def test_a_race_that_was_stopped_goes_on_and_ends_with_one_table_and_one_page(
    linearize: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "race"
    # Tests of convert look at what it writes, each time in a process of its own.
    monkeypatch.setattr("linearize.job.start.convert", lambda *given, **how: convert(*given, **how | {"level": "none"}))
    finetune, begun = story.finetune, list[str]()

    def stopped(leg: Recipe, **how: Any) -> dict[str, Any]:
        begun.append(leg.name)
        if leg.name == "progressive":
            raise LinearizeError("interrupted", Exit.INTERRUPTED)
        return finetune(leg, **how)

    monkeypatch.setattr(story, "finetune", stopped)
    code, _, err = linearize(*words(recipe, folder))
    assert code == Exit.INTERRUPTED, err
    assert begun == ["lolcats", "progressive-1", "progressive"]
    assert not (folder / "race.json").exists()
    before = {name: (folder / name / "final" / "linearize.json").stat().st_mtime_ns for name in begun[:2]}

    monkeypatch.setattr(story, "finetune", finetune)
    code, out, err = linearize(*words(recipe, folder, "--json"))
    assert code == 0, err
    assert before == {name: (folder / name / "final" / "linearize.json").stat().st_mtime_ns for name in begun[:2]}
    found = json.loads(out)
    assert found == json.loads((folder / "race.json").read_text())
    ones = {one["name"]: one for one in found["contestants"]}
    assert list(ones) == ["lolcats", "progressive"]
    assert {one["tokens"] for one in ones.values()} == {found["tokens"]} == {TOKENS}
    assert [one["mechanisms"] for one in ones.values()] == [["la"], ["gsa"]]
    assert ones["lolcats"]["all_s"] > ones["lolcats"]["train_s"] > 0
    assert ones["progressive"]["all_s"] is None  # it ran in two goes
    assert all(one["kl"] > 0 and one["ppl_ratio"] > 0 and set(one["needle"]) == {"512"} for one in ones.values())
    assert found["teacher"]["written"].keys() == ones["lolcats"]["written"].keys() == {"recall", "python", "repeated"}
    assert ones["lolcats"]["state"]["32768"] < found["teacher"]["state"]["32768"]
    trained = json.loads((folder / "progressive" / "final" / "linearize.json").read_text())
    assert {one["mechanism"] for one in trained["plan"]["steps"]} == {"gsa"}
    assert len(trained["plan"]["steps"]) == 2

    page = Page((folder / "race.html").read_text())
    assert page.sections == ["table", "perplexity", "kl", "memory", "methods"]
    assert not page.loads
    assert "arXiv 2410.10254" in page.words
    assert "progressive, round 2" in page.words
    for made in race_tables(found):
        assert [row[0] for row in made.rows] == ["teacher", "lolcats", "progressive"]
        assert all(len(row) == len(made.columns) for row in made.rows)

    later(linearize, recipe, folder)


def later(linearize: Command, recipe: Path, folder: Path) -> None:
    """What the same folder says afterwards: to the same race, to other measures, and to another race."""
    at = (folder / "lolcats" / "eval.json").stat().st_mtime_ns
    spent = json.loads((folder / "lolcats" / "eval.json").read_text())["seconds"]
    code, out, err = linearize(*words(recipe, folder), "--only", "lolcats")
    assert code == 0, err
    assert (folder / "lolcats" / "eval.json").stat().st_mtime_ns == at
    assert "progressive" in out  # it is finished, and stays in the table
    code, out, err = linearize(*words(recipe, folder, "--only", "lolcats", "--generate", "0", "--json"))
    assert code == 0, err
    assert (folder / "lolcats" / "eval.json").stat().st_mtime_ns > at
    found = json.loads(out)
    assert [one["name"] for one in found["contestants"]] == ["lolcats"]  # the other one has other measures
    assert found["teacher"]["written"] is None
    assert found["contestants"][0]["all_s"] == spent  # other measures are no other training

    for given, message in (
        (("--tokens", str(2 * TOKENS)), (f"{TOKENS:,}", f"{2 * TOKENS:,}")),
        (("stages.logit_kl.optimizer.lr=1e-4",), ("stages[1].optimizer.lr", "1e-2", "->", "1e-4")),
    ):
        code, _, err = linearize(*words(recipe, folder, "--only", "linear", *given))
        assert code == Exit.USAGE
        assert holds(err, *message)
    assert not (folder / "linear").exists()

    code, _, err = linearize(*words(recipe, folder, "stages.logit_kl.optimizer.memory=auto"))
    assert code == 0, err  # "full", which the runs have, is what was chosen for it
    text = recipe.parent / "train.jsonl"
    before = text.read_text()
    text.write_text(before + before.splitlines()[0])
    code, _, err = linearize(*words(recipe, folder, "--only", "linear"))
    text.write_text(before)
    assert code == Exit.USAGE
    assert holds(err, f"{folder / 'lolcats'}", "text", "data.train")

    lines = (folder / "progressive-1" / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["stage"] != "logit_kl"]
    (folder / "progressive-1" / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    code, _, err = linearize(*words(recipe, folder))
    assert code == Exit.USAGE
    assert holds(err, "equal", "tokens")
