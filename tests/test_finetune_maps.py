"""`linearize finetune` and `eval` of models that predict maps of images: classes of pixels or patches, depths, hidden
patches. All are small and random."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command
from safetensors.torch import load_file
from transformers import (
    BeitConfig,
    BeitForMaskedImageModeling,
    BeitForSemanticSegmentation,
    DPTConfig,
    DPTForDepthEstimation,
    DPTForSemanticSegmentation,
    GLPNConfig,
    GLPNForDepthEstimation,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SwinConfig,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    YolosConfig,
    YolosForObjectDetection,
)

from linearize.data.batches import hidden_patches, prediction
from linearize.data.images import Images, find_images
from linearize.errors import Exit, LinearizeError
from linearize.finetune import finetune
from linearize.job.dry_run import dry_run
from linearize.recipe.data import ArraySource
from linearize.recipe.recipe import load_recipe
from linearize.train.loop import set_training
from linearize.train.losses import logit_kl, row_error
from linearize.train.predictions import apart

SIDE = 32
# Weights of that size make attention sharp, and what a linear layer changes large.
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "image_size": SIDE, "patch_size": 8,
    "initializer_range": 0.3,
}  # fmt: skip
DPT = SMALL | {
    "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8,
    "is_hybrid": False, "num_labels": 3,
}  # fmt: skip
PYRAMID = {
    "hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2], "sr_ratios": [2, 1, 1, 1],
    "decoder_hidden_size": 8, "initializer_range": 0.3,
}  # fmt: skip
SWIN = {
    "embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 1, 2, 2], "window_size": 4, "patch_size": 2, "image_size": SIDE,
    "out_features": ["stage1", "stage2", "stage3", "stage4"], "initializer_range": 0.3,
}  # fmt: skip
BEIT = SMALL | {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3], "use_auxiliary_head": False, "num_labels": 3}
TWO = SMALL | {"num_hidden_layers": 2}
UPERNET = {"hidden_size": 16, "num_labels": 3, "use_auxiliary_head": False, "initializer_range": 0.3}
MODELS: dict[str, Any] = {
    "segformer": lambda: SegformerForSemanticSegmentation(SegformerConfig(**PYRAMID, num_labels=3)),
    "beit": lambda: BeitForSemanticSegmentation(BeitConfig(**BEIT, pool_scales=[1, 2])),
    "dpt": lambda: DPTForSemanticSegmentation(DPTConfig(**DPT)),
    "upernet": lambda: UperNetForSemanticSegmentation(UperNetConfig(backbone_config=SwinConfig(**SWIN), **UPERNET)),
    "beit-patches": lambda: BeitForMaskedImageModeling(BeitConfig(**TWO, vocab_size=50, use_mask_token=True)),
    "depth": lambda: DPTForDepthEstimation(DPTConfig(**DPT)),
    "glpn": lambda: GLPNForDepthEstimation(GLPNConfig(**PYRAMID)),
    "vit-patches": lambda: ViTForMaskedImageModeling(ViTConfig(**TWO, encoder_stride=8)),
    "age": lambda: ViTForImageClassification(ViTConfig(**TWO, num_labels=1)),
    "vit": lambda: ViTForImageClassification(ViTConfig(**TWO)),
    "yolos": lambda: YolosForObjectDetection(YolosConfig(**(TWO | {"image_size": [SIDE, SIDE]}))),
    "mae": lambda: ViTMAEForPreTraining(ViTMAEConfig(**TWO, decoder_hidden_size=16, decoder_num_hidden_layers=1)),
}
TRANSFER = {"kind": "attention_transfer", "train": "new", "optimizer": {"lr": 1e-2}, "steps": 5}
KL = {"kind": "logit_kl", "train": "new", "optimizer": {"lr": 1e-2}, "steps": 40}
SFT = KL | {"kind": "sft"}


def recipe_of(place: Path, name: str, stages: list[dict[str, Any]], mechanism: str = "saga", **more: Any) -> Any:
    """A recipe that trains one of MODELS on 12 images of noise, without labels, and evaluates on the same: noise has
    nothing to learn for others. Its file is recipe.yaml."""
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(place / name)
    random = np.random.default_rng(0)
    np.savez(place / "images", images=random.normal(size=(12, 3, SIDE, SIDE)).astype(np.float32))
    drop = ["score_bias"] if name == "upernet" else []
    value = {
        "version": 1,
        "name": name,
        "output_dir": str(place / "run"),
        "model": {"base": str(place / name)},
        "convert": {"mechanism": mechanism, "allow_drop": drop},
        "data": {"train": {"arrays": "images.npz"}, "eval": {"arrays": "images.npz"}},
        "stages": [{"batch": {"per_device": 6}} | stage for stage in stages],
        "finish": {"verify": False},
    } | more
    (place / "recipe.yaml").write_text(json.dumps(value))
    return load_recipe(place / "recipe.yaml")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The converted base is not loaded in a clean process: other tests do that, and it takes seconds."""
    monkeypatch.setattr("linearize.convert.verify", lambda *arguments: "not verified")


CLASSES = ["segformer", "beit", "dpt", "upernet", "beit-patches"]
NUMBERS = ["depth", "glpn", "vit-patches", "age"]
QUICK = {"beit-patches", "age"}
EVERY = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in [*CLASSES, *NUMBERS]]


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("name", EVERY)
def test_a_map_is_learned_from_the_teacher_and_compared_with_its_own(
    tmp_path: Path, linearize: Command, name: str
) -> None:
    report = finetune(recipe_of(tmp_path, name, [TRANSFER, KL]), say=lambda text: None)
    assert [row["name"] for row in report["stages"]] == ["converted", "attention_transfer", "logit_kl"]
    kept, other = ("kl", "error") if name in CLASSES else ("error", "kl")
    values = [row[kept] for row in report["stages"]]
    assert values[2] < 0.9 * values[0], values
    assert [row[other] for row in report["stages"]] == [None] * 3
    assert [row["ppl"] for row in report["stages"]] == [None] * 3
    agreement = [row["agreement"] for row in report["stages"]]
    assert 0.5 < agreement[2] <= 1 if name in CLASSES else agreement == [None] * 3
    heading = "same class" if name in CLASSES else "relative squared error"
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert f"|  | training images | held-out images | {heading} |" in card
    page = re.sub("<[^>]+>", " ", (tmp_path / "run" / "report.html").read_text())
    assert ("same class as the teacher" in page) == (name in CLASSES)
    assert ("relative to the teacher" in page) == (name in NUMBERS)
    assert "held-out perplexity" not in page.lower()

    source, final = weights_of(tmp_path / name), weights_of(tmp_path / "run" / "final")
    statistics = [key for key in source if "running_" in key]
    assert statistics or name != "segformer"
    assert all(torch.equal(source[key], final[key]) for key in statistics), "the teacher would have changed with them"

    asked = ["--teacher", tmp_path / name, "--recipe", tmp_path / "recipe.yaml", "--json"]
    code, out, err = linearize("eval", tmp_path / "run" / "final", *asked)
    assert code == 0, err
    found = json.loads(out)
    assert (found["asked"], found["labelled"]) == (12, 0)
    figure = {"kl": "kl", "error": "relative_error"}[kept]
    assert found[figure] == pytest.approx(values[2], rel=1e-3)
    assert found["top1_agreement"] == (pytest.approx(agreement[2], abs=1e-6) if name in CLASSES else None)
    assert ("same class of a patch or pixel" in err) == (name in CLASSES)
    assert ("squared error relative" in err) == (name in NUMBERS)


@pytest.mark.slow
@pytest.mark.usefixtures("unverified")
def test_runs_report_and_compare_read_a_run_of_maps(tmp_path: Path, linearize: Command) -> None:
    for name, figure in (("segformer", "same prediction"), ("age", "relative error")):
        place = tmp_path / name
        place.mkdir()
        finetune(recipe_of(place, name, [KL | {"steps": 2}]), say=lambda text: None)
        run = place / "run"
        evaluated = ["--teacher", place / name, "--recipe", place / "recipe.yaml", "-o", run / "eval.json"]
        for command in (["eval", run / "final", *evaluated], ["report", run], ["runs", run]):
            code, _, err = linearize(*command)
            assert code == 0, err
        assert "linearize eval, 12 of" in (run / "report.html").read_text()
        code, out, err = linearize("compare", run, "-o", place / "compared.html")
        assert code == 0, err
        (line,) = [line for line in out.splitlines() if line.strip().startswith(figure)]
        assert re.search(r"\d", line)


@pytest.mark.usefixtures("unverified")
def test_an_evaluation_of_numbers_ends_a_stage_and_keeps_the_best(tmp_path: Path) -> None:
    own = {"eval": {"every_steps": 1, "patience": 2}, "finish": {"verify": False, "keep": "best"}}
    messages = list[str]()
    report = finetune(recipe_of(tmp_path, "age", [KL | {"optimizer": {"lr": 1.0}}], **own), say=messages.append)
    assert any("2 evaluations without a lower KL" in line for line in messages)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    errors = [line["eval_error"] for line in lines if line["stage"] == "logit_kl" and "eval_error" in line]
    assert report["stages"][-1]["error"] == min(errors)


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("name", "stage", "words"),
    [
        ("segformer", SFT, "sft"),
        ("segformer", KL | {"loss": {"ce": 1.0}}, r"loss.ce.*0"),
        ("age", SFT, "sft"),
        ("age", KL | {"loss": {"temperature": 2.0}}, r"loss.temperature"),
        ("yolos", KL, r"pred_boxes.*attention_transfer.*data.eval"),
        ("mae", KL, "ids_restore"),
    ],
)
def test_what_has_no_labels_or_several_maps_is_refused_before_anything_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stage: dict[str, Any], words: str
) -> None:
    recipe = recipe_of(tmp_path, name, [stage], "la")
    with monkeypatch.context() as patched:
        patched.setattr("linearize.job.start.convert", lambda *arguments, **named: pytest.fail("converts"))
        with pytest.raises(LinearizeError, match=words) as refused:
            finetune(recipe)
    assert refused.value.code == Exit.INCOMPATIBLE
    assert not (tmp_path / "run").exists()
    with pytest.raises(LinearizeError, match=words):
        dry_run(recipe, print)


@pytest.mark.usefixtures("unverified")
def test_a_model_of_several_maps_transfers_attention_without_an_evaluation(tmp_path: Path) -> None:
    data = {"data": {"train": {"arrays": "images.npz"}}}
    report = finetune(recipe_of(tmp_path, "yolos", [TRANSFER], **data))
    assert (Path(report["output"]).name, report["stages"]) == ("final", [])


def test_batch_norms_keep_their_statistics_in_training() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(3)).eval()
    set_training(model)
    assert [module.training for module in model] == [False, True, False]


@pytest.mark.slow
@pytest.mark.usefixtures("unverified")
def test_a_base_that_was_converted_before_is_refused_at_its_first_step(tmp_path: Path) -> None:
    done = finetune(recipe_of(tmp_path, "age", [KL | {"steps": 1}]))
    again = {"convert": None, "model": {"base": done["output"]}, "output_dir": str(tmp_path / "again")}
    with pytest.raises(LinearizeError, match=r"loss\.temperature"):
        finetune(recipe_of(tmp_path, "age", [KL | {"loss": {"temperature": 2.0}}], **again))


def test_the_kind_of_an_output_follows_from_the_output_alone() -> None:
    def shape(**tensors: torch.Tensor) -> tuple[int, ...]:
        return tuple(prediction(tensors, "Model").shape)

    assert shape(loss=torch.zeros(()), logits=torch.zeros(2, 5)) == (2, 1, 5)
    assert shape(logits=torch.zeros(2, 5), cls_logits=torch.zeros(2, 5)) == (2, 1, 5)
    assert shape(logits=torch.zeros(2, 7, 5)) == (2, 7, 5)
    assert shape(logits=torch.zeros(2, 5, 3, 4)) == (2, 12, 5)
    for one in (torch.zeros(2, 1), torch.zeros(2, 7, 1), torch.zeros(2, 1, 3, 4)):
        assert prediction({"logits": one}, "Model").ndim == 2
    assert shape(predicted_depth=torch.zeros(2, 3, 4)) == (2, 12)
    assert shape(reconstruction=torch.zeros(2, 3, 4, 4)) == (2, 48)
    maps = torch.arange(2 * 5 * 3 * 4).reshape(2, 5, 3, 4)
    assert torch.equal(prediction({"logits": maps}, "Model")[1, 1 * 4 + 2], maps[1, :, 1, 2])


def test_the_loss_of_maps_is_the_mean_over_images_however_a_step_is_divided() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 4, 12, 5).unbind()
    valid = torch.tensor([True, True, True, False])[:, None]
    expected = logit_kl(ours[:3], theirs[:3], torch.ones(3, 12, dtype=torch.bool))
    whole = apart(ours, theirs, valid, 3.0)
    torch.testing.assert_close(whole, expected)
    parts = [apart(ours[i : i + 2], theirs[i : i + 2], valid[i : i + 2], 3.0) for i in (0, 2)]
    torch.testing.assert_close(torch.stack(parts).sum(), expected)

    rows, due = ours.flatten(1).requires_grad_(), theirs.flatten(1)
    terms = [(rows[i] - due[i]).square().sum() / due[i].square().sum() for i in range(3)]
    found = apart(rows, due, valid, 3.0)
    torch.testing.assert_close(found, torch.stack(terms).mean())
    torch.testing.assert_close(row_error(7 * rows, 7 * due, valid[:, 0], 3.0), found)
    (gradient,) = torch.autograd.grad(found, rows)
    assert gradient[3].count_nonzero() == 0
    with pytest.raises(ValueError, match=r"must.*\[B.*P\]"):
        row_error(rows, due[:, 1:], valid[:, 0], 3.0)


def test_hidden_patches_follow_from_the_seed_and_the_image(tmp_path: Path) -> None:
    np.savez(tmp_path / "a", images=np.zeros((3, 3, SIDE, SIDE), np.float32))
    found = find_images(ArraySource(arrays=str(tmp_path / "a.npz")), Path())

    def masks_of(seed: int) -> list[torch.Tensor]:
        return [Images(found, None, None, hidden=16, seed=seed)[i]["bool_masked_pos"] for i in range(3)]

    masks = [masks_of(0), masks_of(1)]
    assert [int(mask.sum()) for mask in masks[0]] == [10] * 3
    assert all(map(torch.equal, masks[0], masks_of(0)))
    assert not torch.equal(masks[0][0], masks[0][1])
    assert not torch.equal(masks[0][0], masks[1][0])
    assert "bool_masked_pos" not in Images(found, None, None)[0]
    assert hidden_patches(MODELS["vit-patches"]()) == hidden_patches(MODELS["beit-patches"]()) == 16
    assert hidden_patches(MODELS["vit"]()) == 0
