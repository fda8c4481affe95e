"""Where a linear encoder is faster than softmax, and who says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, holds
from transformers import BertConfig, BertModel, SwinConfig, ViTConfig, ViTForImageClassification, ViTModel

from linearize.convert import plan_conversion, slower
from linearize.estimate.break_even import PAYS, break_even_tokens, speeds

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def vit(folder: Path, pixels: int) -> Path:
    ViTModel(ViTConfig(**SMALL, image_size=pixels, patch_size=16)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("where", PAYS)
@pytest.mark.parametrize("mechanism", ["la", "mhla", "saga"])
def test_the_ratio_passes_1_where_it_breaks_even(mechanism: str, where: str) -> None:
    points = PAYS[where][mechanism]
    most = break_even_tokens(mechanism, where)
    before = max(tokens for tokens, ratio in points if ratio < 1)
    after = min(tokens for tokens, ratio in points if ratio >= 1)
    assert before < most < after
    assert most % 100 == 0


def test_short_images_and_texts_are_faster_with_softmax(tmp_path: Path) -> None:
    note = slower(*plan_conversion(str(vit(tmp_path / "small", 224)), "saga"))
    assert holds(note, "197")
    assert holds(note, "CPU", "H200", "saga", "600", "2,000")
    assert holds(slower(*plan_conversion(str(vit(tmp_path / "middle", 512)), "mhla")), "H200", "mhla")
    assert slower(*plan_conversion(str(vit(tmp_path / "large", 1280)), "saga")) == ""
    BertModel(BertConfig(**SMALL, vocab_size=30, max_position_embeddings=512)).save_pretrained(tmp_path / "bert")
    assert holds(slower(*plan_conversion(str(tmp_path / "bert"), "mhla")), "512")


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"size": {"height": 224, "width": 224}}, "197"),
        ({"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}}, "197"),
        ({"size": 224}, "197"),  # as old files have it
        ({"size": {"shortest_edge": 800, "longest_edge": 1333}}, "1,025"),  # the config's
    ],
)
def test_an_image_has_the_size_that_the_processor_makes(tmp_path: Path, settings: object, tokens: str) -> None:
    folder = vit(tmp_path / "vit", 512)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    assert holds(slower(*plan_conversion(str(folder), "saga")), tokens)


def test_a_window_of_exact_tokens_costs_time(tmp_path: Path) -> None:
    """The figures are those of the mechanism alone, so what is said of it with a window is no more than a bound."""
    BertModel(BertConfig(**SMALL, vocab_size=30, max_position_embeddings=512)).save_pretrained(tmp_path / "bert")
    alone, beside = ({"feature_map": "hedgehog"} | more for more in ({}, {"window": 32, "sink": 1}))
    plain, windowed = (plan_conversion(str(tmp_path / "bert"), "la", options=options) for options in (alone, beside))
    assert holds(slower(*plain), "400", "600")
    assert holds(slower(*windowed), "512 on a CPU", "600 on an H200", "window")
    assert not holds(slower(*windowed), "400")
    assert all(holds(line, "without its window") for line in speeds(windowed[0]))
    assert not any(holds(line, "without its window") for line in speeds(plain[0]))


def test_windows_stay_short_and_causal_models_have_no_note(tmp_path: Path, zoo: object) -> None:
    from models import save_source
    from transformers import SwinModel

    sizes = {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2, "image_size": 16, "patch_size": 4}
    SwinModel(SwinConfig(**sizes)).save_pretrained(tmp_path / "swin")
    note = slower(*plan_conversion(str(tmp_path / "swin"), "la", allow_drop=["score_bias"]))
    assert holds(note, "4 tokens", "window", "CPU", "H200")
    assert slower(*plan_conversion(str(save_source(tmp_path / "llama")), "la")) == ""


def test_speeds_name_each_device_and_length(tmp_path: Path, zoo: object) -> None:
    from models import save_source

    lines = speeds(plan_conversion(str(vit(tmp_path / "vit", 224)), "saga")[0])
    assert len(lines) == len(PAYS)
    for line, (where, found) in zip(lines, PAYS.items(), strict=True):
        assert holds(line, "saga", where, *(f"{tokens:,}" for tokens, _ in found["saga"]))
    assert speeds(plan_conversion(str(save_source(tmp_path / "llama")), "la")[0]) == []


def test_convert_and_estimate_say_it(tmp_path: Path, linearize: Command) -> None:
    folder = vit(tmp_path / "vit", 224)
    assert holds("".join(linearize("convert", folder, "--to", "saga", "--dry-run")[1:]), "softmax", "faster")
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 224, 224, 3), np.uint8), labels=np.arange(4) % 2)
    ViTForImageClassification(ViTConfig(**SMALL)).save_pretrained(folder)
    data = [f"data.{part}={{arrays: {tmp_path / 'a.npz'}}}" for part in ("train", "eval")]
    code, out, err = linearize("estimate", "vit-saga", f"model.base={folder}", *data)
    assert code == 0
    assert holds(out + err, "saga", "16,384", "H200", "0.57")
