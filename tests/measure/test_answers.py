"""`linearize eval` of models of images and of masked text, against what their logits say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command, holds
from PIL import Image
from training import VOCAB, byte_tokenizer, text
from transformers import (
    AutoModelForImageClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from linearize.convert import convert, plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.page.record import read_evaluation

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT and a BERT with sharp attention, both converted, with images in folders of classes, and text."""
    folder = tmp_path_factory.mktemp("answers")
    torch.manual_seed(0)
    names = {0: "cat", 1: "dog"}
    config = ViTConfig(**SMALL, image_size=16, patch_size=4, initializer_range=0.3, id2label=names)
    ViTForImageClassification(config).save_pretrained(folder / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "vit")
    BertForMaskedLM(BertConfig(**SMALL, vocab_size=VOCAB + 1, initializer_range=0.3)).save_pretrained(folder / "bert")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(folder / "bert")
    random = np.random.default_rng(0)
    for number in range(10):
        path = folder / "pictures" / names[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    (folder / "heldout.txt").write_text(text(300, 99))
    for name in ("vit", "bert"):
        plan = plan_conversion(str(folder / name), "la", options={"feature_map": "hedgehog"})
        convert(*plan, folder / f"{name}-la", level="none", say=lambda line: None)
    return folder


def test_images_are_counted_as_images_and_accuracy_comes_first(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    given = ("data.eval={images: pictures}", "--device", "cpu")
    code, out, err = linearize("eval", "vit-la", "--teacher", "vit", *given, "--trials", "9", "--seed", "2")
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, "--trials", "--seed", "LinearizedViTForImageClassification")
    monkeypatch.setattr("linearize.terminal.progress.SHOWN_AFTER", 0.0)
    monkeypatch.setattr("linearize.terminal.progress.LINE_EVERY", 0.0)
    code, out, err = linearize("eval", "vit-la", "--teacher", "vit", *given, "--json")
    assert code == 0, err
    assert holds(err, "eval", "100%", "0")
    found = json.loads(out)
    assert (found["kind"], found["asked"], found["labelled"]) == ("images", 10, 10)
    assert "10 images of" in err
    assert err.index("accuracy") < err.index("same class") < err.index("nats per image")
    files = sorted((place / "pictures").rglob("*.png"))
    processor = ViTImageProcessor.from_pretrained(place / "vit")
    pixels = processor([Image.open(file).convert("RGB") for file in files], return_tensors="pt")["pixel_values"]
    labels = torch.tensor([file.parent.name == "dog" for file in files]).long()
    logits = {}
    for who, name in (("student", "vit-la"), ("teacher", "vit")):
        model = AutoModelForImageClassification.from_pretrained(place / name, trust_remote_code=True).eval()
        with torch.no_grad():
            logits[who] = model(pixel_values=pixels).logits.double()
        accuracy = (logits[who].argmax(-1) == labels).double().mean()
        assert found[f"{who}_accuracy"] == pytest.approx(float(accuracy))
    ours, theirs = (y.log_softmax(-1) for y in logits.values())
    assert found["kl"] == pytest.approx(float((theirs.exp() * (theirs - ours)).sum(-1).mean()), rel=1e-3)
    assert found["top1_agreement"] == pytest.approx(float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()))


def test_hidden_tokens_of_masked_text(linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    given = ("data.eval={files: [heldout.txt]}", "data.pack.seq_len=32", "--device", "cpu")
    code, out, err = linearize("eval", "bert-la", "--teacher", "bert", *given, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["kind"] == "masked"
    assert found["labelled"] == found["asked"] > 50
    assert holds(err, "heldout.txt")
    assert found["kl"] > 0
    again = json.loads(linearize("eval", "bert", "--teacher", "bert", *given, "--json")[1])
    written = place / "eval.json"
    assert linearize("eval", "bert-la", "--teacher", "bert", *given, "-o", written)[0] == 0
    assert (read_evaluation(place, written) or {})["student_accuracy"] == found["student_accuracy"]
    written.write_text(json.dumps({name: value for name, value in found.items() if name != "kl"}))
    with pytest.raises(LinearizeError, match=r"linearize.*-o.*writes"):
        read_evaluation(place, written)
    assert (again["kl"], again["top1_agreement"]) == (pytest.approx(0.0, abs=1e-6), 1.0)
    assert again["student_accuracy"] == again["teacher_accuracy"] == found["teacher_accuracy"]


def test_texts_of_more_tokens_than_a_model_takes_are_refused(linearize: Command, place: Path, tmp_path: Path) -> None:
    BertModel(BertConfig(**SMALL, vocab_size=VOCAB + 1)).save_pretrained(tmp_path / "bert")
    byte_tokenizer().save_pretrained(tmp_path / "bert")
    plan = plan_conversion(str(tmp_path / "bert"), "la")
    convert(*plan, tmp_path / "bert-la", level="none", say=lambda line: None)
    for folder in (place, tmp_path):
        given = (f"data.eval={{files: ['{place / 'heldout.txt'}']}}", "data.pack.seq_len=513")
        code, _, err = linearize("eval", folder / "bert-la", "--teacher", folder / "bert", *given)
        assert code == Exit.USAGE, err
        assert holds(err, "data.pack.seq_len=513", "at most 512 tokens")


def test_what_cannot_be_compared_is_refused(linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    code, _, err = linearize("eval", "vit-la", "--teacher", "bert", "data.eval={images: pictures}")
    assert (code, holds(err, "answer", "question")) == (Exit.INCOMPATIBLE, True), err
    code, _, err = linearize("eval", "vit-la", "--teacher", "vit", "data.eval={files: [heldout.txt]}")
    assert (code, holds(err, "data.eval")) == (Exit.INCOMPATIBLE, True), err
    code, _, err = linearize("eval", "vit-la", "--teacher", "vit", "data.eval={images: nowhere}")
    assert (code, "nowhere" in err) == (Exit.USAGE, True), err
