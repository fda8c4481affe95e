"""`--keep-softmax auto` of models of images and of bidirectional text: mixtures are the hybrids that would be saved,
and the layer that matters is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from architectures import SMALL_OPTIONS, small_model
from conftest import TOLERANCE, relative_error
from training import byte_tokenizer, write_data

from linearize.choose.choose import Scoring, choosers
from linearize.choose.mixture import Mixture
from linearize.convert import convert, plan_conversion
from linearize.data.batches import forward
from linearize.data.packing import TextSource
from linearize.errors import Exit, LinearizeError
from linearize.recipe.data import ArraySource
from linearize.verify.child.inputs import make_inputs
from linearize_kernels.hf.attention_hooks import mixers_of

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE = {"image_size": 16, "patch_size": 4}
SHARP = {"initializer_range": 0.3}  # attention that a linear layer changes much
MATTERS = 1  # the one layer whose attention reaches the residual stream


@pytest.mark.parametrize(
    ("name", "mechanism", "options"),
    [
        ("ViTForImageClassification", "mhla", {}),
        ("SwinForImageClassification", "saga", {}),  # windows are rows of a batch
        ("PvtForImageClassification", "saga", {}),  # softmax has fewer keys
        ("BertForMaskedLM", "la", {"window": 2, "sink": 1}),
    ],
)
def test_a_mixture_is_the_hybrid_that_would_be_saved(
    tmp_path: Path, name: str, mechanism: str, options: dict[str, Any]
) -> None:
    small_model(name).save_pretrained(tmp_path / "source")
    asked = {"options": {**SMALL_OPTIONS[mechanism], **options}, "allow_drop": ["score_bias"] if "Swin" in name else []}
    whole = plan_conversion(str(tmp_path / "source"), mechanism, **asked)[0]
    layers = [step.site.layer for step in whole.steps]
    kept, paths = layers[1:2], {step.site.layer: step.site.path for step in whole.steps}
    plan = plan_conversion(str(tmp_path / "source"), mechanism, keep_softmax=str(kept[0]), **asked)
    convert(*plan, tmp_path / "hybrid", level="none", say=lambda text: None)
    kind = transformers.AutoModelForMaskedLM if "Bert" in name else transformers.AutoModelForImageClassification
    hybrid = kind.from_pretrained(tmp_path / "hybrid", trust_remote_code=True).eval()
    mixture = Mixture(small_model(name), whole)
    for layer in layers:
        if layer not in kept:
            mixture.mixers[layer].load_state_dict(mixers_of(hybrid)[paths[layer]].state_dict())
    batch = make_inputs(hybrid, 2)
    with torch.no_grad():
        theirs = forward(hybrid, batch)
        assert relative_error(mixture.logits(batch, mixture.hybrid(kept)), theirs) < TOLERANCE[torch.float32]
        assert relative_error(mixture.teacher(batch), theirs) > 1e-4
        sets = [kept, layers, layers[:1]]
        rows = {key: value.repeat(len(sets), *[1] * (value.ndim - 1)) for key, value in batch.items()}
        together = mixture.logits(rows, mixture.hybrids(sets, 2)).split(2)
        for one, found in zip(sets, together, strict=True):
            assert relative_error(found, mixture.logits(batch, mixture.hybrid(one))) < TOLERANCE[torch.float32]


def tokenizer() -> Any:
    """One that can hide tokens."""
    made = byte_tokenizer()
    made.add_special_tokens({"mask_token": "<mask>"})
    return made


def place(folder: Path, model: Any) -> Path:
    """A source of which one layer alone matters, with data."""
    for path, module in model.named_modules():
        if path.endswith(("attention.output.dense", "o_proj")) and f".{MATTERS}." not in path:
            module.weight.data.mul_(1e-3)
    model.save_pretrained(folder / "source")
    tokenizer().save_pretrained(folder / "source")
    write_data(folder)
    images = np.random.default_rng(0).normal(size=(24, 3, 16, 16)).astype(np.float32)
    np.savez(folder / "images.npz", images=images, labels=np.zeros(24, int))
    return folder


@pytest.fixture(autouse=True)
def _less_data(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TRANSFER_STEPS": 2, "TRANSFER_TOKENS": 128, "SCORE_TOKENS": 256, "IMAGE": 32}.items():
        monkeypatch.setattr(f"linearize.choose.choose.{name}", value)


def source_of(name: str) -> Any:
    torch.manual_seed(0)
    if name.startswith("ViT"):
        return getattr(transformers, name)(transformers.ViTConfig(**SIZES, **IMAGE, **SHARP))
    words = {"vocab_size": len(tokenizer()), "max_position_embeddings": 64}
    return getattr(transformers, name)(transformers.BertConfig(**SIZES, **SHARP, **words))


@pytest.mark.parametrize(
    ("name", "measured", "read"),
    [
        ("ViTForImageClassification", ("KL", "an image"), 8),
        ("ViTModel", ("error", "hidden states"), 8),
        ("BertForMaskedLM", ("KL", "a token"), 256),
        ("BertModel", ("error", "hidden states"), 256),
    ],
)
def test_the_layer_that_matters_is_found(tmp_path: Path, name: str, measured: tuple[str, str], read: int) -> None:
    """On images, or on text of which some tokens are hidden; without a head by the last hidden states."""
    folder = place(tmp_path, source_of(name))
    text: Any = TextSource(files=(folder / "train.jsonl",))
    if name.startswith("ViT"):
        text = ArraySource(arrays="images.npz")
    scoring = Scoring(text=text, seq_len=64, folder=folder, say=lambda text: None)
    plan = plan_conversion(str(folder / "source"), "la", keep_softmax="auto:1", **choosers(scoring))[0]
    assert [site.layer for site in plan.kept] == [MATTERS]
    assert plan.choice is not None
    assert all(word in plan.choice.measured for word in measured)
    assert (plan.choice.tokens, plan.choice.recalls, plan.choice.lacking) == (read, 0, "")
    assert plan.choice.text.endswith(("images.npz", "train.jsonl"))
    assert [*plan.choice.kl["kept"]] == ["images" if name.startswith("ViT") else "text"]
    assert sum(plan.choice.scores.values()) > 0.5


def test_images_are_not_compared_on_text(tmp_path: Path) -> None:
    source_of("ViTForImageClassification").save_pretrained(tmp_path)
    with pytest.raises(LinearizeError, match=r"ViTForImageClassification.*images: FOLDER") as caught:
        plan_conversion(str(tmp_path), "la", keep_softmax="auto:1", **choosers(Scoring(say=lambda text: None)))
    assert caught.value.code == Exit.USAGE
