"""Random changes of pictures: what a seed decides, what a run sees of them, and the library that one of them needs."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command, holds
from PIL import Image
from torch.nn.functional import one_hot
from transformers import PvtConfig, PvtForImageClassification, SwinConfig, SwinForImageClassification, ViTImageProcessor

from linearize.data.augment import OTHERS, SHARE, augmentation, crop, erase, mixed
from linearize.data.images import Images, find_images
from linearize.data.packing import BlockOrder
from linearize.errors import Exit, LinearizeError
from linearize.recipe.data import ArraySource, ImageSource
from linearize.recipe.recipe import load_recipe
from linearize.train.loop import Stream
from linearize.train.predictions import label_loss

SIZE = 32
PROCESSOR = ViTImageProcessor(size={"height": SIZE, "width": SIZE})


def pictures(folder: Path, count: int = 4) -> Path:
    """A folder of two classes, each of so many pictures of noise."""
    random = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(random.integers(0, 256, (40, 48, 3), np.uint8)).save(folder / name / f"{number}.png")
    return folder


def test_a_seed_decides_a_crop_and_crops_differ_in_size_shape_place_and_side() -> None:
    columns = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (100, 1)))
    parts = [np.asarray(crop(columns, seed)) for seed in range(200)]
    assert all(np.array_equal(part, crop(columns, seed)) for seed, part in enumerate(parts[:20]))
    shares = [part.size / (100 * 200) for part in parts]
    assert 0.07 < min(shares) < 0.15
    assert 0.6 < max(shares) <= 1.0
    shapes = [part.shape[1] / part.shape[0] for part in parts]
    assert 0.7 < min(shapes) < 0.85
    assert 1.2 < max(shapes) < 1.4
    mirrored = [bool(part[0, 0] > part[0, -1]) for part in parts]
    assert 70 < sum(mirrored) < 130
    assert len({int(part.min()) for part in parts}) > 50


def test_a_picture_that_has_room_for_no_crop_gives_its_middle() -> None:
    line = Image.fromarray(np.arange(400, dtype=np.int32).astype(np.uint8)[None])
    assert crop(line, 0).size == (1, 1)


def test_randaugment_is_torchvisions_of_two_operations_and_its_random_numbers_are_the_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def rand_augment(operations: int, strength: int) -> Any:
        asked.append((operations, strength))
        return lambda picture: (picture.size, float(torch.rand(())))

    library = types.ModuleType("torchvision.transforms")
    library.RandAugment = rand_augment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.transforms", library)
    change = augmentation("randaugment")
    assert change is not None
    picture, state = Image.new("RGB", (40, 40)), torch.random.get_rng_state()
    assert change(picture, 1) == change(picture, 1)
    assert change(picture, 1) != change(picture, 2)
    assert change(picture, 1)[0] == crop(picture, 1).size
    assert torch.equal(state, torch.random.get_rng_state()), "dropout's random numbers are as without it"
    assert asked == [(2, 9)]


def test_every_pass_over_the_images_changes_them_otherwise_and_evaluation_does_not(tmp_path: Path) -> None:
    found = find_images(ImageSource(images=str(pictures(tmp_path / "p"))), Path())
    images, plain = (Images(found, PROCESSOR, None, False, change) for change in (crop, None))
    order = BlockOrder(len(images), 0)
    places = [place for place in range(4 * len(images)) if order.block(place) == 3]
    seen = [Stream(images, order, 5)[place]["pixel_values"] for place in places]
    again = [Stream(images, order, 5)[place]["pixel_values"] for place in places]
    assert all(map(torch.equal, seen, again))
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(images[3]["pixel_values"], plain[3]["pixel_values"])
    assert torch.equal(Stream(plain, order, 5)[places[0]]["pixel_values"], plain[3]["pixel_values"])


def test_copies_of_an_image_follow_one_another_and_are_changed_otherwise(tmp_path: Path) -> None:
    found = find_images(ImageSource(images=str(pictures(tmp_path / "p"))), Path())
    images = Images(found, PROCESSOR, None, False, crop)
    n = len(images)
    order = BlockOrder(n, 0, repeats=3)
    first, second = ([order.block(k) for k in range(e * n, (e + 1) * n)] for e in (0, 1))
    once = [BlockOrder(n, 0).block(k) for k in range(n)]
    assert first == [once[k // 3] for k in range(n)]  # an epoch is as long as before
    assert first != second
    one, other = (Stream(images, order, 5)[place]["pixel_values"] for place in (0, 1))
    assert one.shape == other.shape
    assert not torch.equal(one, other)
    with pytest.raises(LinearizeError, match=r"data\.repeats=2.*data\.train"):
        load_recipe("demo", ["data.repeats=2"])
    assert load_recipe("demo", ["data.repeats=1"]).data.repeats == 1


def test_what_is_no_picture_is_not_augmented(tmp_path: Path) -> None:
    np.savez(tmp_path / "a", images=np.zeros((2, 3, 8, 8), np.float32))
    found = find_images(ArraySource(arrays=str(tmp_path / "a.npz")), Path())
    with pytest.raises(LinearizeError, match=r"data\.augment") as caught:
        Images(found, None, None, False, crop)
    assert caught.value.code == Exit.INCOMPATIBLE
    with pytest.raises(LinearizeError, match=r"data\.augment=crop.*data\.train"):
        load_recipe("demo", ["data.augment=crop"])


# ---------------------------------------------------------------- runs

SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4, "patch_size": 4, "image_size": SIZE}
PVT = {
    "image_size": SIZE, "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1],
    "hidden_sizes": [8, 16], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}  # fmt: skip
MODELS = {
    "swin": (SwinForImageClassification, SwinConfig, SWIN),
    "pvt": (PvtForImageClassification, PvtConfig, PVT),
}


def words(folder: Path, preset: str, name: str, *more: str) -> list[Any]:
    """The command that trains a small model by a preset on a folder of images."""
    kind, config, sizes = MODELS[name]
    base = folder / name
    if not base.exists():
        torch.manual_seed(0)
        kind(config(**sizes, num_labels=2)).save_pretrained(base)
        PROCESSOR.save_pretrained(base)
        pictures(folder / "pictures")
    drop = ["convert.allow_drop=[score_bias]"] if name == "swin" else []
    drop += ["stages.sft.drop_path=0"] * (preset == "vit-saga-pretrain")  # both have their own
    return [
        "finetune", preset, *drop, f"model.base={base}", f"output_dir={folder / 'run'}",
        f"data.train={{images: {folder / 'pictures'}}}", f"data.eval={{images: {folder / 'pictures'}}}",
        "runtime={device: cpu}", "finish.verify=false", "--json", *more,
    ]  # fmt: skip


def small_steps(*stages: str) -> list[str]:
    return [text for one in stages for text in (f"stages.{one}.batch={{per_device: 4}}",)]


@pytest.mark.parametrize("name", [pytest.param("swin", marks=pytest.mark.slow), "pvt"])
def test_the_preset_that_distils_runs_a_step_of_swin_and_pvt_on_a_folder_of_images(
    tmp_path: Path, linearize: Command, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linearize.convert.verify", lambda *arguments: "not verified")
    steps = small_steps("attention_transfer", "logit_kl")
    code, out, err = linearize(*words(tmp_path, "vit-saga", name, *steps, "--max-steps", "1"))
    assert code == 0, err
    assert [row["name"] for row in json.loads(out)["stages"]] == ["converted", "attention_transfer", "logit_kl"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin", "pvt"])
def test_the_preset_that_pretrains_runs_a_step_of_random_swin_and_pvt_with_crops_and_workers(
    tmp_path: Path, linearize: Command, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linearize.convert.verify", lambda *arguments: "not verified")
    command = words(tmp_path, "vit-saga-pretrain", name, *small_steps("sft"), "--max-steps", "2")
    command = [word for word in command if not str(word).startswith("model.base=")]
    _, _, sizes = MODELS[name]
    config = json.dumps({"model_type": name, "architectures": [MODELS[name][0].__name__], "num_labels": 2, **sizes})
    base = f"model.base={{config: {config}, processor: {tmp_path / name}}}"
    random = [*command, base, "data.augment=crop", "runtime.workers=1"]
    code, out, err = linearize(*random)
    assert code == 0, err
    report = json.loads(out)
    assert report["unit"] == "images"
    assert report["stages"][-1]["tokens"] == 8
    assert (tmp_path / "run" / "final" / "preprocessor_config.json").exists()

    code, out, err = linearize(*random, "convert=null", f"output_dir={tmp_path / 'twin'}")
    assert code == 0, err
    model = MODELS[name][0].from_pretrained(tmp_path / "twin" / "final")
    assert model.config.num_labels == 2


@pytest.mark.slow
def test_workers_change_no_number_and_augmentation_does(
    tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linearize.convert.verify", lambda *arguments: "not verified")
    losses = {}
    for run, given in {
        "alone": ["data.augment=crop"],
        "workers": ["data.augment=crop", "runtime.workers=2"],
        "plain": ["data.augment=null"],
    }.items():
        steps = [*small_steps("sft"), "convert.allow_drop=[score_bias]", f"output_dir={tmp_path / run}", *given]
        code, _, err = linearize(*words(tmp_path, "vit-saga-pretrain", "swin", *steps, "--max-steps", "4"))
        assert code == 0, err
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        losses[run] = [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]
    assert len(losses["alone"]) == 4
    assert losses["alone"] == losses["workers"]
    assert losses["alone"] != losses["plain"]


def test_a_library_that_is_missing_is_named_before_anything_is_written(
    tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    for more in ([], ["--dry-run"]):
        code, _, err = linearize(*words(tmp_path, "vit-saga-pretrain", "pvt", *small_steps("sft"), *more))
        assert code == Exit.RESOURCE
        assert holds(err, "data.augment", "needs", '"linearize[augment]"')
        assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- erased and mixed


def test_erasing_makes_one_rectangle_noise_by_its_chance_and_a_seed_decides() -> None:
    plain = torch.full((3, 40, 50), 7.0)
    found = [erase(plain, 0.25, seed) for seed in range(400)]
    changed = [one for one in found if not torch.equal(one, plain)]
    assert 70 < len(changed) < 130
    assert all(torch.equal(one, erase(plain, 0.25, seed)) for seed, one in enumerate(found[:30]))
    assert plain.eq(7.0).all(), "what it is given stays"
    shares = []
    for one in changed:
        rows, columns = (one[0] != 7.0).nonzero(as_tuple=True)
        box = one[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert box.ne(7.0).all()
        shares.append(box[0].numel() / 2000)
    assert 0.01 < min(shares) < 0.05
    assert 0.28 < max(shares) < 0.36
    noise = torch.cat([one[one != 7.0] for one in changed])
    assert abs(float(noise.mean())) < 0.02
    assert float(noise.std()) == pytest.approx(1.0, abs=0.02)


def numbered(count: int = 4) -> dict[str, torch.Tensor]:
    """A batch of which image i has the value i and the label i."""
    values = torch.arange(count)
    pixels = values.float()[:, None, None, None].expand(-1, 3, 20, 30)
    return {"pixel_values": pixels, "labels": values[:, None], "valid": torch.ones(count, 1, dtype=torch.bool)}


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0)])
def test_a_share_of_each_image_and_of_its_label_is_anothers(mixup: float, cutmix: float) -> None:
    shares = []
    for seed in range(100):
        batch = mixed(numbered(), mixup, cutmix, seed)
        assert batch["labels"][:, 0].tolist() == [0, 1, 2, 3]
        assert batch[OTHERS][:, 0].tolist() == [3, 2, 1, 0]
        share = float(batch[SHARE])
        expected = [share * own + (1 - share) * other for own, other in ((0, 3), (1, 2), (2, 1), (3, 0))]
        means = batch["pixel_values"].mean((1, 2, 3)).tolist()
        assert means == pytest.approx(expected, abs=1e-5)
        if cutmix:
            assert {*batch["pixel_values"][0].unique().tolist()} <= {0.0, 3.0}
        else:
            assert len(batch["pixel_values"][0].unique()) == 1
        shares.append(share)
        assert torch.equal(batch["pixel_values"], mixed(numbered(), mixup, cutmix, seed)["pixel_values"])
    assert min(shares) < 0.2
    assert max(shares) > 0.9


def test_where_both_are_asked_for_each_has_half_of_the_batches() -> None:
    found = [mixed(numbered(), 0.8, 1.0, seed)["pixel_values"][0].unique().tolist() for seed in range(200)]
    blended = [len(values) == 1 and values[0] not in (0.0, 3.0) for values in found]
    assert 70 < sum(blended) < 130


def test_the_loss_of_a_mixed_batch_is_that_of_soft_labels() -> None:
    torch.manual_seed(0)
    batch, logits = mixed(numbered(), 0.8, 0.0, 3), torch.randn(4, 1, 5)
    share = batch[SHARE]
    soft = share * one_hot(batch["labels"][:, 0], 5) + (1 - share) * one_hot(batch[OTHERS][:, 0], 5)
    expected = torch.nn.functional.cross_entropy(logits[:, 0], soft)
    torch.testing.assert_close(label_loss(logits, batch["labels"], batch, torch.tensor(4.0)), expected)
    expected = torch.nn.functional.cross_entropy(logits[:, 0], soft, label_smoothing=0.1)
    torch.testing.assert_close(label_loss(logits, batch["labels"], batch, torch.tensor(4.0), 0.1), expected)
    del batch[OTHERS]
    hard = torch.nn.functional.cross_entropy(logits[:, 0], batch["labels"][:, 0])
    torch.testing.assert_close(label_loss(logits, batch["labels"], batch, torch.tensor(4.0)), hard)


@pytest.mark.slow
def test_a_run_erases_and_mixes_images_and_goes_on_with_the_same(
    tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linearize.convert.verify", lambda *arguments: "not verified")
    none = ["data.augment=crop", "data.erase=0", "data.mixup=0", "data.cutmix=0", "data.repeats=1"]
    losses = {}
    for run, given in {
        "plain": none,
        "erased": [*none, "data.erase=1"],
        "blended": [*none, "data.mixup=0.8"],
        "cut": [*none, "data.cutmix=1"],
        "again": [*none, "data.cutmix=1"],
        "copies": [*none, "data.repeats=4"],
    }.items():
        steps = [*small_steps("sft"), f"output_dir={tmp_path / run}", *given]
        code, _, err = linearize(*words(tmp_path, "vit-saga-pretrain", "pvt", *steps, "--max-steps", "2"))
        assert code == 0, err
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        losses[run] = tuple(json.loads(line)["loss"] for line in lines if "loss" in json.loads(line))
    assert losses["cut"] == losses.pop("again")
    assert len({*losses.values()}) == 5, losses


def test_mixing_needs_two_images_a_pass_and_images(tmp_path: Path) -> None:
    one = ["model.base=m", "data.augment=null", "stages.sft.batch.per_device=1"]
    with pytest.raises(LinearizeError, match=r"per_device=1.*>=.*2.*data\.mixup.*data\.cutmix"):
        load_recipe("vit-saga-pretrain", one)
    load_recipe("vit-saga-pretrain", [*one, "data.mixup=0", "data.cutmix=0"])
    with pytest.raises(LinearizeError, match=r"data\.erase=0.1.*data\.train"):
        load_recipe("demo", ["data.erase=0.1"])
    for wrong in ("data.mixup=-1", "data.mixup=101", "data.cutmix=1e-9", "data.erase=1.1"):
        with pytest.raises(LinearizeError, match=wrong.partition("=")[0]):
            load_recipe("vit-saga-pretrain", [wrong])


@pytest.mark.parametrize("preset", ["vit-saga-pretrain", "vit-mhla-pretrain"])
def test_the_presets_have_the_augmentation_of_deit(preset: str) -> None:
    data = load_recipe(preset).data
    assert (data.augment, data.erase, data.mixup, data.cutmix, data.repeats) == ("randaugment", 0.25, 0.8, 1.0, 3)
