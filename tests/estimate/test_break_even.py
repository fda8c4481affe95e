"""Where a linear encoder is faster than softmax, and who says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, holds
from transformers import (
    BertConfig,
    BertModel,
    PvtConfig,
    PvtModel,
    SwinConfig,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from linearize.convert import plan_conversion, slower
from linearize.estimate.break_even import PAYS, break_even_tokens, measured_rows, speeds

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def vit(folder: Path, pixels: int) -> Path:
    ViTModel(ViTConfig(**SMALL, image_size=pixels, patch_size=16)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("where", "name"), [(where, name) for where, rows in PAYS.items() for name in rows])
def test_the_ratio_passes_1_where_it_breaks_even(where: str, name: str) -> None:
    points = PAYS[where][name]
    most = break_even_tokens(points)
    before = max(tokens for tokens, ratio in points if ratio < 1)
    after = min(tokens for tokens, ratio in points if ratio >= 1)
    assert before < most < after
    assert most % 100 == 0


def test_short_images_and_texts_are_faster_with_softmax(tmp_path: Path) -> None:
    note = slower(*plan_conversion(str(vit(tmp_path / "small", 224)), "saga"))
    assert holds(note, "197")
    assert holds(note, "CPU", "H200", "saga", *(f"{break_even_tokens(PAYS[where]['saga']):,}" for where in PAYS))
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


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    BertModel(BertConfig(**SMALL, vocab_size=30, max_position_embeddings=512)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("options", "cpu", "h200", "unmeasured_there"),
    [
        ({"feature_map": "hedgehog"}, "la:feature_map=hedgehog", "la:feature_map=hedgehog", {}),
        ({}, "la", "la:feature_map=hedgehog", {"feature_map": "unit"}),
        (
            {"feature_map": "hedgehog", "window": 32, "sink": 1},
            "la:feature_map=hedgehog,window=32,sink=1",
            "la:feature_map=hedgehog",
            {"window": 32, "sink": 1},
        ),
    ],
)
def test_figures_are_those_of_the_options_or_say_which_were_not_measured(
    bert: str, options: dict[str, object], cpu: str, h200: str, unmeasured_there: dict[str, object]
) -> None:
    plan = plan_conversion(bert, "la", options=options)[0]
    assert [(row.name, row.other) for row in measured_rows(plan)] == [(cpu, {}), (h200, unmeasured_there)]
    here, there = speeds(plan)
    assert holds(here, *(f"{ratio:g}x" for _, ratio in PAYS["a CPU"][cpu]))
    assert holds(there, *(f"{name}={value}" for name, value in unmeasured_there.items()))
    assert holds(there, "not measured") == bool(unmeasured_there)


def test_a_window_of_exact_tokens_costs_time(bert: str) -> None:
    """The figures of less window are no more than a bound."""
    windowed = plan_conversion(bert, "la", options={"feature_map": "hedgehog", "window": 32, "sink": 1})
    assert holds(slower(*windowed), "512", "window=32", "more than 600 tokens on an H200")


def test_softmax_of_fewer_keys_is_told_in_keys(tmp_path: Path) -> None:
    """However large the image is: what counts is the keys that a reduction leaves."""
    sizes: dict[str, object] = {
        "depths": [1, 1],
        "num_attention_heads": [1, 1],
        "hidden_sizes": [8, 8],
        "mlp_ratios": [1, 1],
    }
    sizes |= {"num_encoder_blocks": 2, "patch_sizes": [4, 2], "strides": [4, 2], "image_size": 64}
    for ratio, said in ((2, True), (1, False)):
        PvtModel(PvtConfig(**sizes, sequence_reduction_ratios=[ratio, 1])).save_pretrained(tmp_path / str(ratio))
        note = slower(*plan_conversion(str(tmp_path / str(ratio)), "saga"))
        assert holds(note, "layer 0", "fewer keys", "sequences_reduction_ratio", "keys on a CPU", "H200") == said


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
    assert holds(out + err, "saga", "16,384", "H200", "0.63", "0.68")
