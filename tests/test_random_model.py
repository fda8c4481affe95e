"""Recipes that start from random weights: any architecture and size, converted and trained like any other base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Command, holds
from training import EOS, VOCAB, T, byte_tokenizer, same, stage, tensors, write_recipe

from linearize.checkpoint.manifest import read_plan
from linearize.errors import LinearizeError
from linearize.job.source import write_random
from linearize.recipe.recipe import load_recipe
from linearize.train.session import check_model

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
            ("model.base.config", "model_type", "'lama'", "transformers", "'llama'"),
        ),
        ({"hiden_size": 8}, ("model.base.config", "llama", "hiden_size", "'hidden_size'")),
        ({"vocab_size": 9}, (f"{VOCAB}", "vocab_size=9")),
        ({"num_attention_heads": 5}, ("model.base.config",)),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_written(
    tmp_path: Path, linearize: Command, change: dict[str, Any], message: str
) -> None:
    path = recipe(tmp_path, {**LLAMA, **change})
    code, _, err = linearize("finetune", path)
    assert (code, holds(err, *message)) == (2, True), err
    assert not (tmp_path / "run" / "converted").exists()


def test_random_batch_norms_are_refused(tmp_path: Path) -> None:
    """Their statistics would stay those of no data."""
    sizes: dict[str, Any] = {"hidden_sizes": [16, 16, 16], "num_attention_heads": [1, 1, 1], "depths": [1, 1, 1]}
    with torch.device("meta"):
        model = transformers.LevitForImageClassification(transformers.LevitConfig(**sizes, key_dim=[8, 8, 8]))
    config = "model.base={config: {model_type: levit}}"
    loaded = load_recipe("vit-saga-pretrain", [config, "stages.sft.drop_path=0", f"output_dir={tmp_path}"])
    with pytest.raises(LinearizeError, match=r"batch_norm.*LevitForImageClassification"):
        check_model(model, loaded)
    check_model(model, loaded.model_copy(update={"model": loaded.model.model_copy(update={"base": "levit"})}))


def test_recipes_say_what_a_base_may_be(tmp_path: Path) -> None:
    path = recipe(tmp_path, LLAMA)
    for override, message in (
        ("model.base={confg: {}}", "confg: unknown key. Did you mean 'config'"),
        ("model.base=3", ": must be text, not 3"),
    ):
        with pytest.raises(LinearizeError, match=message):
            load_recipe(path, [override])
    assert load_recipe(path, [f"model.base={tmp_path}"]).model.base == str(tmp_path)


# ---------------------------------------------------------------- its softmax twin

EVALUATED = {
    "data": {"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": T}},
    "eval": {"every_steps": 1, "max_tokens": 4 * T},
    "finish": {"keep": "best"},
}


def twin(folder: Path, *overrides: str) -> list[Any]:
    """What trains the same random model without a conversion, beside `recipe`'s."""
    return ["finetune", recipe(folder, LLAMA, **EVALUATED), "convert=null", "name=twin", *overrides]


def test_convert_null_trains_the_same_random_model_with_softmax(tmp_path: Path, linearize: Command) -> None:
    command = twin(tmp_path)
    code, out, err = linearize(*command, "--json")
    assert code == 0, err
    assert holds(err, "softmax")
    run, report = tmp_path / "run", json.loads(out)
    assert (report["teacher_ppl"], report["layers"], report["positions"]) == (None, [], None)
    assert [(row["name"], row["kl"], row["ppl_ratio"]) for row in report["stages"]] == [("sft", None, None)]
    assert [set(sample) for sample in report["samples"]] == [{"prompt", "student", "text"}] * 3

    model = transformers.AutoModelForCausalLM.from_pretrained(run / "final", trust_remote_code=False)
    assert type(model) is transformers.LlamaForCausalLM
    names = {path.name for path in (run / "final").iterdir()}
    assert not {name for name in names if name.endswith(".py") or name == "linearize.json"}
    assert transformers.AutoTokenizer.from_pretrained(run / "final").eos_token == "<eos>"

    (tmp_path / "start").mkdir()
    start = tensors(write_random(load_recipe(tmp_path / "recipe.yaml"), tmp_path / "start", weights=True))
    assert same(tensors(run / "converted"), start), "it begins as the model that is converted does"
    final = tensors(run / "final")
    assert start.keys() == final.keys()
    assert not same(start, final)
    assert (run / "final" / "README.md").read_text().startswith("# twin\n\nA model of transformers with softmax")


def test_a_twin_is_listed_compared_and_scored_like_its_linear_sister(tmp_path: Path, linearize: Command) -> None:
    assert linearize(*twin(tmp_path))[0] == 0
    run = tmp_path / "run"
    code, out, err = linearize("runs", run, "--json")
    assert code == 0, err
    assert [(row["mechanisms"], row["at"], row["ppl_ratio"]) for row in json.loads(out)] == [
        (["softmax"], "finished", None)
    ]
    code, out, err = linearize("compare", run)
    assert (code, "softmax" in out) == (0, True), err
    page = (run / "report.html").read_text()
    assert holds(page, "random llama: all layers", "Nothing to compare")
    code, _, err = linearize("verify", run / "final")
    assert (code, holds(err, "linearize", "converted")) == (3, True), err
    asked = ["--teacher", run / "converted", "--recipe", tmp_path / "recipe.yaml"]
    for command in (
        ["eval", run / "final", *asked, "--lengths", 700, "--trials", 1, "eval.max_tokens=1024"],
        ["generate", run / "final", "some", "--max-new-tokens", 2],
    ):
        code, out, err = linearize(*command)
        assert code == 0, err


def test_a_twin_goes_on_where_it_stopped_and_starts_over(tmp_path: Path, linearize: Command) -> None:
    assert linearize(*twin(tmp_path))[0] == 0
    final = tmp_path / "run" / "final"
    whole = tensors(final)
    shutil.rmtree(final)
    code, _, err = linearize(*twin(tmp_path))
    assert (code, holds(err, "after", "step")) == (0, True), err
    assert same(whole, tensors(final))
    assert linearize(*twin(tmp_path), "--resume", "never")[0] == 0
    assert same(whole, tensors(final))
    (final / "mine.txt").write_text("mine")
    code, _, err = linearize(*twin(tmp_path), "--resume", "never")
    assert (code, "mine.txt" in err) == (2, True), err


@pytest.mark.slow
def test_a_conversion_starts_over_where_a_twin_was(
    tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linearize.convert.verify", lambda *arguments: "not verified")
    assert linearize(*twin(tmp_path), "finish.verify=false")[0] == 0
    recipe(tmp_path, LLAMA, finish={"verify": False})
    code, _, err = linearize("finetune", tmp_path / "recipe.yaml", "--resume", "never")
    assert code == 0, err
    assert read_plan(tmp_path / "run" / "final").source == "random-llama"


def test_a_twin_learns_from_another_teacher_alone(tmp_path: Path, linearize: Command) -> None:
    teacher = tmp_path / "teacher"
    assert linearize(*twin(teacher))[0] == 0
    folder = tmp_path / "student"
    path = recipe(folder, LLAMA)
    value = json.loads(path.read_text()) | EVALUATED | {"stages": [stage("logit_kl", "all")], "convert": None}
    path.write_text(json.dumps(value))
    code, out, err = linearize("finetune", path, f"teacher={teacher / 'run' / 'final'}", "--json")
    assert code == 0, err
    assert json.loads(out)["stages"][-1]["kl"] is not None


def test_what_a_twin_cannot_do_is_refused(tmp_path: Path) -> None:
    path = recipe(tmp_path, LLAMA)
    for kind, train, message in (
        ("attention_transfer", "new", r"stages\[0\]: compares with the base's softmax, which this model keeps"),
        ("logit_kl", "all", r"stages\[0\]: a random model that keeps its softmax has no teacher: use sft, or name"),
        ("sft", "mixer", r"stages\[0\].train: must be all"),
    ):
        value = json.loads(path.read_text()) | {"stages": [stage(kind, train, steps=2)], "convert": None}
        path.write_text(json.dumps(value))
        with pytest.raises(LinearizeError, match=message):
            load_recipe(path)
    with pytest.raises(LinearizeError, match=r"finish\.push="):
        load_recipe(recipe(tmp_path, LLAMA), ["convert=null", "finish.push=me/model"])


def test_a_twin_is_estimated_before_it_trains(tmp_path: Path, linearize: Command) -> None:
    code, out, err = linearize(*twin(tmp_path), "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["stages"][0]["parameters"] > 10_000
    assert not (tmp_path / "run").exists()
