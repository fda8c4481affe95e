"""Keys of recipes that had another name once: files, overrides and records of runs that have them mean the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import holds

from linearize.errors import Exit, LinearizeError
from linearize.recipe.recipe import Recipe, load_recipe
from linearize.recipe.renamed import RENAMED, present_keys

# By their present names.
VALUES = {
    "gradient_accumulation_steps": 3,
    "save_total_limit": 5,
    "target_modules": ["q_proj"],
    "chunk_size": 16,
    "max_grad_norm": 0.5,
}
STAGE = {
    "kind": "logit_kl",
    "train": ["lora"],
    "steps": 1,
    **{around: {} for around in ("batch", "loss")},
    "lora": {"r": 2, "alpha": 2},
    "optimizer": {"lr": 0.1},
}


def values(*, old: bool) -> dict[str, Any]:
    """A recipe with every key that was renamed, by its old name or its present one."""
    stage = {key: dict(value) if isinstance(value, dict) else value for key, value in STAGE.items()}
    recipe: dict[str, Any] = {
        "version": 1,
        "name": "old",
        "model": {"base": "demo"},
        "data": {"train": {"demo": "train"}},
    }
    recipe |= {"stages": [stage], "checkpoint": {}}
    for (around, before), now in RENAMED.items():
        (recipe if around in recipe else stage)[around][before if old else now] = VALUES[now]
    return recipe


def written(folder: Path, recipe: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def test_a_file_and_a_record_with_old_names_are_the_recipe_with_present_ones(tmp_path: Path) -> None:
    present = Recipe.model_validate(values(old=False)).resolved()
    assert load_recipe(written(tmp_path, values(old=True))).resolved() == present
    assert Recipe.model_validate(values(old=True)).resolved() == present
    assert present_keys(values(old=True)) == values(old=False)


def test_an_override_by_an_old_name_replaces_the_present_key(tmp_path: Path) -> None:
    path = written(tmp_path, values(old=False))
    for (around, before), now in RENAMED.items():
        at = around if around == "checkpoint" else f"stages.logit_kl.{around}"
        value = ["k_proj"] if now == "target_modules" else 7
        found = load_recipe(path, [f"{at}.{before}={json.dumps(value)}"]).resolved()
        assert (found if around == "checkpoint" else found["stages"][0])[around][now] == value


@pytest.mark.parametrize(("around", "before"), RENAMED)
def test_both_names_of_a_key_are_one_too_many(tmp_path: Path, around: str, before: str) -> None:
    recipe = values(old=False)
    (recipe if around == "checkpoint" else recipe["stages"][0])[around][before] = VALUES[RENAMED[around, before]]
    with pytest.raises(LinearizeError, match=f"{RENAMED[around, before]} and {before} are one"):
        load_recipe(written(tmp_path, recipe))
    with pytest.raises(ValueError, match=before):
        Recipe.model_validate(recipe)


@pytest.mark.parametrize("layers", ["", "@0-3"])
def test_options_of_a_mechanism_have_one_name_too(tmp_path: Path, layers: str) -> None:
    old, other, present = (name + layers for name in ("phi", "features", "feature_map"))

    def read(options: dict[str, Any], *overrides: str) -> Any:
        convert = {"mechanism": "gla", "options": options}
        return load_recipe(written(tmp_path, values(old=False) | {"convert": convert}), overrides)

    assert read({old: "elu"}).convert.options == {present: "elu"}
    if not layers:
        assert read({old: "elu"}, "convert.options.feature_map=relu").convert.options == {present: "relu"}
    for one, another in ((old, present), (present, old), (old, other)):
        with pytest.raises(LinearizeError, match=f"{one} and {another} are one"):
            read({one: "elu", another: "relu"})


def test_a_list_is_no_value_of_an_option_whose_values_were_renamed(tmp_path: Path) -> None:
    convert = {"mechanism": "gla", "options": {"rope": ["off"]}}
    with pytest.raises(LinearizeError, match="rope: must be one of"):
        load_recipe(written(tmp_path, values(old=False) | {"convert": convert}))


def test_what_is_gone_is_answered_by_what_to_do(tmp_path: Path) -> None:
    for changes, names in (
        ({"teacher": {"model": "x", "logits": "y"}}, ("teacher.logits", "teacher.model")),
        ({"stages": [{**STAGE, "kind": "on_policy_kl", "loss": {"prompt": 4}}]}, ("on_policy_kl", "logit_kl")),
    ):
        with pytest.raises(LinearizeError) as caught:
            load_recipe(written(tmp_path, {**values(old=False), **changes}))
        assert (caught.value.code, holds(caught.value.message, *names)) == (Exit.USAGE, True)


def test_a_record_of_a_run_that_did_not_use_what_is_gone_is_read(tmp_path: Path) -> None:
    recipe = {**values(old=False), "teacher": {"model": "x"}}
    recorded = Recipe.model_validate(recipe).resolved()
    recorded["teacher"]["logits"] = None
    assert load_recipe(written(tmp_path, recorded)).resolved() == Recipe.model_validate(recipe).resolved()
