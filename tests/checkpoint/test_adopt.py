"""A folder that transformers saved comes back: finetune, eval and push take it as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from training import base, byte_tokenizer, make_recipe, stage, tensors, train
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from linearize.checkpoint.adopt import adopt, adopted
from linearize.checkpoint.manifest import read_plan
from linearize.cli import app
from linearize.errors import Exit, LinearizeError
from linearize.verify.reload import check_keys


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model whose second layer keeps softmax."""
    return base(tmp_path_factory.mktemp("bases"), "llama", layers="0")


@pytest.fixture
def saved(hybrid: Path, tmp_path: Path) -> Path:
    """The same as save_pretrained leaves it, one weight changed."""
    model = AutoModelForCausalLM.from_pretrained(hybrid, trust_remote_code=True)
    with torch.no_grad():
        model.model.norm.weight.fill_(2.0)
    model.save_pretrained(tmp_path / "saved")
    byte_tokenizer().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    return model(input_ids=torch.arange(20)[None]).logits


@pytest.mark.slow
def test_an_adopted_folder_has_the_same_weights_and_a_whole_plan(hybrid: Path, saved: Path, tmp_path: Path) -> None:
    plan = adopt(saved, tmp_path / "whole")
    assert read_plan(tmp_path / "whole") == plan
    before = read_plan(hybrid)
    assert plan.steps == before.steps
    assert plan.kept == before.kept
    assert plan.cache_bytes(4096) == before.cache_bytes(4096)
    assert check_keys(tmp_path / "whole") == len(tensors(saved))
    assert torch.equal(logits(tmp_path / "whole"), logits(saved))
    assert not torch.equal(logits(tmp_path / "whole"), logits(hybrid))
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["linearize_trained"]  # softmax on these weights is not the source
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "whole")]).exit_code == 0


def test_what_was_saved_is_trained_on(saved: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, saved, stage("attention_transfer"))
    result = CliRunner().invoke(app, ["finetune", str(tmp_path / "recipe.yaml"), "--dry-run"])
    assert result.exit_code == 0, result.output
    train(recipe)
    trained = tensors(tmp_path / "run" / "final")
    assert torch.equal(trained["model.norm.weight"], tensors(saved)["model.norm.weight"])
    mixers = [name for name in trained if ".mixer." in name]
    assert any(not torch.equal(trained[name], tensors(saved)[name]) for name in mixers)
    assert read_plan(tmp_path / "run" / "final").kept


@pytest.mark.slow
def test_what_was_saved_is_pushed_whole_and_left_as_it_is(saved: Path) -> None:
    before = sorted(path.name for path in saved.parent.rglob("*"))
    result = CliRunner().invoke(app, ["push", str(saved), "user/repo", "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    upload = json.loads(result.stdout.splitlines()[-1])["upload"]
    assert {"linearize.json", "README.md", "config.json", "modeling_linearized.py", "tokenizer.json"} <= set(
        upload["files"]
    )
    assert upload["folder"] == str(saved)
    assert sorted(path.name for path in saved.parent.rglob("*")) == before


def test_a_folder_that_linearize_wrote_is_pushed_as_it_is(hybrid: Path, tmp_path: Path) -> None:
    with adopted(hybrid) as folder:
        assert folder == hybrid
    with adopted(tmp_path / "nothing") as folder:  # the push says what is wrong
        assert folder == tmp_path / "nothing"


def test_checkpoints_within_the_folder_are_no_other_code(saved: Path, tmp_path: Path) -> None:
    """As a Trainer leaves it that saves the model where it saved its checkpoints."""
    shutil.copytree(saved, tmp_path / "checkpoint")
    (tmp_path / "checkpoint").rename(saved / "checkpoint-3")
    adopt(saved, tmp_path / "whole")
    assert not (tmp_path / "whole" / "checkpoint-3").exists()
    (saved / "checkpoint-3" / "mixer.py").write_text("raise SystemExit('ran')")
    with pytest.raises(LinearizeError, match=r"checkpoint-3/mixer\.py"):
        adopt(saved, tmp_path / "again")


def test_other_code_is_not_adopted(saved: Path, tmp_path: Path) -> None:
    (saved / "mixer.py").write_text("raise SystemExit('ran')")
    with pytest.raises(LinearizeError, match=r"mixer\.py") as refused:
        adopt(saved, tmp_path / "whole")
    assert refused.value.code == Exit.INCOMPATIBLE
    assert not (tmp_path / "whole").exists()
