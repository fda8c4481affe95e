"""Recipes that start from random weights: any architecture and size, converted and trained like any other base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Command
from training import EOS, VOCAB, byte_tokenizer, same, stage, tensors, write_recipe

from linearize.checkpoint.manifest import read_plan
from linearize.errors import LinearizeError
from linearize.recipe.recipe import load_recipe
from linearize.train.random_model import write_random

LLAMA = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": EOS, "eos_token_id": EOS,
}  # fmt: skip


def recipe(folder: Path, config: Any, **changes: Any) -> Path:
    """A recipe that trains all of a random model on text; its tokenizer lies beside it."""
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    base = {"config": config, "tokenizer": str(folder / "tokenizer")}
    convert = {"mechanism": "gla", "options": {"faithful": True}}
    path = write_recipe(folder, folder, stage("sft", "all", steps=2), convert=convert, **changes)
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": {"base": base}}))
    return path


@pytest.mark.slow
def test_a_random_model_is_planned_trained_and_saved(tmp_path: Path, linearize: Command) -> None:
    path = recipe(tmp_path / "one", LLAMA)
    code, out, err = linearize("finetune", path, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["stages"][0]["parameters"] > 10_000
    assert not (tmp_path / "one" / "run").exists()
    assert linearize("finetune", path, "--json")[0] == 0
    run = tmp_path / "one" / "run"
    assert read_plan(run / "final").source == "random-llama"
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "final", trust_remote_code=True)
    assert model(torch.arange(9)[None]).logits.shape == (1, 9, VOCAB)
    assert not list(tmp_path.rglob(".linearize-*")), "what was made for the conversion is gone"
    page = (run / "report.html").read_text()
    assert "random llama: 2 of 2 softmax layers became GLA" in page
    assert "--teacher MODEL" in page
    code, out, err = linearize("runs", tmp_path / "one", "--json")
    assert code == 0, err
    assert [row["base"] for row in json.loads(out)] == ["random llama"]


def test_the_seed_decides_the_weights_and_a_folder_may_name_the_size(tmp_path: Path) -> None:
    written = {}
    for name, config, seed in (
        ("one", LLAMA, 0),
        ("two", str(save_config(tmp_path / "config")), 0),
        ("other", LLAMA, 1),
    ):
        (tmp_path / name).mkdir()
        loaded = load_recipe(recipe(tmp_path / name, config), [f"seed={seed}"])
        written[name] = tensors(write_random(loaded, tmp_path / name, weights=True))
    assert same(written["one"], written["two"])
    assert not same(written["one"], written["other"])


def save_config(folder: Path) -> Path:
    """The same architecture and size, as a folder."""
    settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
    transformers.LlamaConfig(**settings, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "lama"},
            "model.base.config: model_type is 'lama', no type of transformers. Did you mean 'llama'",
        ),
        ({"hiden_size": 8}, "model.base.config: llama has no hiden_size. Did you mean 'hidden_size'"),
        ({"vocab_size": 9}, f"the tokenizer has {VOCAB} tokens, the config vocab_size=9"),
        ({"num_attention_heads": 5}, "model.base.config"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_written(
    tmp_path: Path, linearize: Command, change: dict[str, Any], message: str
) -> None:
    path = recipe(tmp_path, {**LLAMA, **change})
    code, _, err = linearize("finetune", path)
    assert (code, message in err) == (2, True), err
    assert not (tmp_path / "run" / "converted").exists()


def test_recipes_say_what_a_base_may_be(tmp_path: Path) -> None:
    path = recipe(tmp_path, LLAMA)
    for override, message in (
        ("model.base={confg: {}}", "model.base.confg: unknown key. Did you mean 'config'"),
        ("model.base=3", "model.base: must be text, not 3"),
        ("convert=null", "model.base: a random model has no linear layers yet: add convert"),
    ):
        with pytest.raises(LinearizeError, match=message):
            load_recipe(path, [override])
    assert load_recipe(path, [f"model.base={tmp_path}"]).model.base == str(tmp_path)
