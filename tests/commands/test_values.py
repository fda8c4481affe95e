"""One way to say options: key=value in every command, and a recipe or a preset in front of them for convert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from models import save_source

from linearize.errors import Exit
from linearize.recipe.presets import is_recipe, preset

OPTIONS = {"slots": 8, "window": 4, "sink": 1, "clock": 0}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("values") / "tiny", "mistral")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(linearize: Command, *arguments: str | Path) -> Any:
    code, out, err = linearize("convert", *arguments, "--dry-run", "--json")
    assert code == 0, err
    return json.loads(out)["plan"]


def test_a_preset_a_file_of_it_and_flags_plan_the_same(linearize: Command, source: Path, place: Path) -> None:
    flags = [f"{key}={value}" for key, value in OPTIONS.items()]
    expected = planned(linearize, source, "--to", "gsa", "--keep-softmax", "1,3", *flags)
    assert expected == planned(
        linearize, source, "--to", "gsa", "--keep-softmax=1,3", *(word for one in flags for word in ("--set", one))
    )
    values = [f"model.base={source}", f"convert.options={json.dumps(OPTIONS)}", "convert.keep_softmax=1,3"]
    values.append("model.dtype=null")  # the preset asks for bfloat16
    (place / "mine.yaml").write_text(preset("hybrid").path.read_text("utf-8"))
    for recipe in ("hybrid", "mine.yaml"):
        assert planned(linearize, recipe, *values) == expected


def test_a_model_below_the_top_of_a_repository_is_named(linearize: Command) -> None:
    for words in (["inspect", "user/repo/sub/one"], ["verify", "user/repo/sub/one"]):
        code, _, err = linearize(*words)
        assert code == Exit.INCOMPATIBLE
        assert "hf download user/repo --include 'sub/one/*' --local-dir DIR" in err
        assert "DIR/sub/one" in err


def test_options_of_the_command_line_come_before_the_recipes(linearize: Command, source: Path) -> None:
    recipe = ["hybrid", f"model.base={source}", "convert.keep_softmax=1"]
    own = planned(linearize, *recipe)
    assert (own["dtype"], own["steps"][0]["options"]["slots"]) == ("bfloat16", 128)
    assert [one["layer"] for one in own["kept"]] == [1]
    other = planned(linearize, *recipe, "--to", "gla", "convert.options={}")
    assert {step["mechanism"] for step in other["steps"]} == {"gla"}
    given = ["--keep-softmax", "0,2", "--dtype", "keep", "--set", "slots=16"]
    changed = planned(linearize, *recipe, *given)
    assert (changed["dtype"], changed["steps"][0]["options"]["slots"]) == ("float32", 16)
    assert [one["layer"] for one in changed["kept"]] == [0, 2]
    assert changed["steps"][0]["options"]["window"] == 64  # the rest stays


def test_a_recipe_converts_with_its_seed(linearize: Command, source: Path, place: Path) -> None:
    recipe = ["hybrid", f"model.base={source}", "convert.keep_softmax=1", "model.dtype=null", "seed=7"]
    recipe.append(f"convert.options={json.dumps(OPTIONS)}")
    code, _, err = linearize("convert", *recipe, "-o", "out", "--verify", "keys")
    assert code == 0, err
    assert (place / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["convert", "hybird", "model.base=demo"], ["hybrid"]),
        (["convert", "hybrid"], ["model.base"]),
        (["convert", "hybrid", "model.base=demo", "convert.slots=8"], ["convert.slots"]),
        (["convert", "hybrid", "model.base=demo", "convert=null"], ["convert", "--to"]),
        (["convert", "hybrid", "model.base=demo", "--restore", "3"], ["--restore"]),
        (["convert", "gsa-pretrain"], ["model.base", "finetune"]),
        (["convert", "SOURCE", "--to", "gsa", "slot=8"], ["slot", "slots"]),
        (["convert", "SOURCE", "--to", "gsa", "slots=8", "--set", "slots=9"], ["slots", "twice"]),
        (["convert", "SOURCE", "--to", "gsa", "slots"], ["slots", "key=value"]),
        (["convert", "SOURCE", "hybrid"], ["convert hybrid model.base="]),
        (["convert", "SOURCE", "--to", "gla", "phi=elu", "feature_map=relu"], ["phi", "feature_map", "once"]),
        (["convert", "SOURCE", "--to", "gla", "phi=elu", "features=relu"], ["phi", "features", "feature_map", "once"]),
        (["convert", "SOURCE", "--to", "gla", "phi@0=elu", "feature_map@0=elu"], ["phi@0", "feature_map@0", "once"]),
        (["convert", "SOURCE", "--to", "gla", "--score-by", "gates"], ["gates", "restore", "swaps"]),
        (["recipes", "validate", "seed=1"], ["seed=1", "recipes ls"]),
        (["recipes", "validate", "gsa", "sed=1"], ["sed", "seed"]),
        (["bench", "model", "--shape", "1b", "slotz=3"], ["slotz", "slots"]),
        (["bench", "model", "a", "b"], ["a b"]),
    ],
)
def test_mistakes_are_named(linearize: Command, source: Path, arguments: list[str], names: list[str]) -> None:
    code, _, err = linearize(*(str(source) if word == "SOURCE" else word for word in arguments))
    assert code == Exit.USAGE
    assert [name for name in names if name not in " ".join(err.split())] == []


def test_what_is_a_recipe(place: Path) -> None:
    assert is_recipe("hybrid")
    assert is_recipe("runs/mine.yaml")
    assert is_recipe("hybird", ["model.base=M"])
    assert not is_recipe("demo")  # the model of that name
    assert not is_recipe("user/model", ["slots=8"])
    (place / "hybrid").mkdir()
    assert not is_recipe("hybrid")
