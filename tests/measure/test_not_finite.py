"""Weights so large that nothing they predict is a number: told, never shown as figures or trained on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import Command
from safetensors.torch import load_file, save_file
from training import base, stage, write_recipe

from linearize.errors import Exit


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`source` and `linear`, and the same broken; tests only read them."""
    place = tmp_path_factory.mktemp("broken")
    linear = base(place, "llama")
    for folder in (linear.parent / "source", linear):
        shutil.copytree(folder, place / f"broken-{folder.name}")
        shutil.copytree(folder, place / folder.name)
    for name, size in (("source", 1e308), ("linear", 3e38)):
        key = "model.layers.0.self_attn.q_proj.weight"
        file = next(file for file in (place / f"broken-{name}").glob("*.safetensors") if key in load_file(file))
        weights = {key: tensor.clone() for key, tensor in load_file(file).items()}
        dtype = torch.float64 if name == "source" else torch.float32
        weights[key] = torch.full_like(weights[key], size, dtype=dtype)
        file.unlink()  # it is linked
        save_file(weights, file, metadata={"format": "pt"})
    return place


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("teacher", ["eval", "linear", "--teacher", "broken-source", "--lengths", "512", "--trials", "1"]),
        ("student", ["eval", "broken-linear", "--teacher", "source", "--lengths", "512", "--trials", "1"]),
        ("source", ["convert", "broken-source", "--to", "gsa", "-o", "out", "--keep-softmax", "auto:1"]),
        ("teacher", ["finetune", "recipe.yaml", "model.base=broken-source", "convert.mechanism=gsa"]),
    ],
)
def test_who_predicts_no_numbers_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, linearize: Command, who: str, words: list[str]
) -> None:
    data = {name: {"files": [file]} for name, file in (("train", "train.jsonl"), ("eval", "heldout.txt"))}
    write_recipe(place, place / "linear", stage("logit_kl", steps=1), data={**data, "pack": {"seq_len": 32}})
    monkeypatch.chdir(place)
    text = ["--score-text", "heldout.txt"] if words[0] == "convert" else []
    text = ["data.eval={files: [heldout.txt]}", "data.pack.seq_len=32"] if words[0] == "eval" else text
    code, out, err = linearize(*words, *text)
    assert (code, f"the {who} predicts no finite numbers" in " ".join(err.split())) == (Exit.CHECK_FAILED, True), err
    assert "nanx" not in out + err
    assert not (place / "out").exists()


@pytest.mark.slow
def test_a_conversion_of_such_weights_is_not_left(place: Path, tmp_path: Path, linearize: Command) -> None:
    code, _, err = linearize("convert", place / "broken-source", "--to", "gsa", "-o", tmp_path / "out")
    assert (code, "Traceback" in err) == (Exit.CHECK_FAILED, False), err
    assert not [*tmp_path.iterdir()]
