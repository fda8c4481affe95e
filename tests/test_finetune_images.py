"""`linearize finetune` on images and on masked text, from the command's own functions."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command
from models import save_source
from PIL import Image
from training import byte_tokenizer
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2Model,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    pipeline,
)

from linearize.convert import convert, next_step, plan_conversion
from linearize.data.images import count_images
from linearize.errors import Exit, LinearizeError
from linearize.finetune import finetune
from linearize.job.dry_run import dry_run
from linearize.recipe.data import ArraySource, DatasetSource
from linearize.recipe.recipe import load_recipe

TRUSTED = {"trust_remote_code": True}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}


def pixels(folder: Path, name: str, count: int = 24) -> None:
    """Images whose class is the sign of their mean."""
    random = np.random.default_rng(len(name))
    labels = np.arange(count) % 2
    images = random.normal(size=(count, 3, 16, 16)) + (2 * labels[:, None, None, None] - 1)
    np.savez(folder / name, images=images.astype(np.float32), labels=labels)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The converted base is not loaded in a clean process: other tests do that, and it takes seconds."""
    monkeypatch.setattr("linearize.convert.verify", lambda *arguments: "not verified")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("train.npz", "eval.npz"):
        pixels(tmp_path, name)
    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(**SMALL, intermediate_size=32)).save_pretrained(tmp_path / "vit")
    # Weights of that size make attention sharp, and what a linear layer changes large.
    sharp = Dinov2Config(**SMALL, initializer_range=0.3, layerscale_value=1.0)
    Dinov2Model(sharp).save_pretrained(tmp_path / "dino")
    save_source(tmp_path / "llama")
    tower = {key: value for key, value in SMALL.items() if key not in ("image_size", "patch_size")}
    text = {**tower, "intermediate_size": 32, "vocab_size": 60, "max_position_embeddings": 20}
    clip = CLIPConfig(text_config=text, vision_config={**SMALL, "intermediate_size": 32}, projection_dim=8)
    CLIPModel(clip).save_pretrained(tmp_path / "clip")
    CLIPVisionModelWithProjection(clip.vision_config).save_pretrained(tmp_path / "clip-images")
    return tmp_path


def recipe_of(
    place: Path, base: str, stages: list[dict[str, Any]], data: dict[str, Any] | None = None, verify: bool = False
) -> Any:
    """A recipe in `place`; stages train 3 steps of 4 samples unless they say otherwise."""
    common = {"optimizer": {"lr": 1e-2}, "batch": {"per_device": 4}}
    known = {"steps", "epochs", "tokens"}
    filled = [common | ({} if known & stage.keys() else {"steps": 3}) | stage for stage in stages]
    value = {
        "version": 1,
        "name": base,
        "output_dir": str(place / f"run-{base}"),
        "model": {"base": str(place / base)},
        "convert": {"mechanism": "la"},
        "data": data or {"train": {"arrays": "train.npz"}, "eval": {"arrays": "eval.npz"}},
        "stages": filled,
        "finish": {"verify": verify},
    }
    (place / "recipe.yaml").write_text(json.dumps(value))
    return load_recipe(place / "recipe.yaml")


TRANSFER = {"kind": "attention_transfer", "train": "new"}
KL = {"kind": "logit_kl", "train": "all"}
SFT = {"kind": "sft", "train": "all", "epochs": 5}
FEATURES = {"kind": "feature_cosine", "train": "all"}


@pytest.mark.slow
def test_a_vision_model_is_distilled_and_learns_its_classes(place: Path) -> None:
    report = finetune(recipe_of(place, "vit", [TRANSFER, KL, SFT], verify=True))
    assert [row["name"] for row in report["stages"]] == ["converted", "attention_transfer", "logit_kl", "sft"]
    assert report["stages"][-1]["accuracy"] == 1.0
    assert report["stages"][-1]["tokens"] == 3 * 4 + 3 * 4 + 5 * 24
    assert len(report["layers"]) == 2
    assert 0.0 <= report["teacher_accuracy"] <= 1.0
    model = AutoModelForImageClassification.from_pretrained(report["output"], trust_remote_code=True)
    with np.load(place / "eval.npz") as eval_set:
        answers = model(pixel_values=torch.from_numpy(eval_set["images"])).logits.argmax(-1)
        assert answers.tolist() == eval_set["labels"].tolist()


@pytest.mark.usefixtures("unverified")
def test_images_are_counted_as_images_and_accuracy_comes_first(place: Path, linearize: Command) -> None:
    recipe_of(place, "vit", [KL])
    code, out, err = linearize("finetune", place / "recipe.yaml", "--dry-run", "--json")
    assert code == 0, err
    assert "images/s" in err
    beside = "note: this model reads", "compared with softmax"  # lengths of inputs are tokens, of images as well
    lines = [line for line in err.splitlines() if not any(words in line for words in beside)]
    assert "tokens" not in "\n".join(lines)

    code, out, err = linearize("finetune", place / "recipe.yaml", "--json")
    assert (code, json.loads(out)["unit"]) == (0, "images"), err
    assert re.search(r"teacher: held-out accuracy [\d.]+%, perplexity", err)
    assert re.search(r"held-out accuracy *\n", err), "the title of the table"
    assert re.search(r"training images +accuracy +perplexity +x teacher +KL, nats an image", err)
    assert "images/s" in err
    assert "tokens" not in err

    run = place / "run-vit"
    card = (run / "final" / "README.md").read_text()
    assert "|  | training images | held-out images | accuracy | perplexity | x teacher | KL, nats an image |" in card
    assert "| logit_kl | 12 | 24 | " in card
    page = (run / "report.html").read_text()
    words = re.sub("<[^>]+>", " ", page)
    assert re.search(r"After 12 images its held-out accuracy is [\d.]+%, its teacher(&#x27;|')s", words)
    assert "Held-out accuracy" in page
    assert page.index("Held-out accuracy") < page.index("Held-out perplexity")
    assert "held-out images" in page
    assert "an image" in page
    assert "training tokens" not in page
    assert "tokens/s" not in page

    code, out, err = linearize("runs", run)
    assert code == 0, err
    assert "12 images" in out
    assert "accuracy (teacher's)" in " ".join(out.split())
    compared = place / "compared.html"
    code, out, err = linearize("compare", run, "-o", compared)
    assert code == 0, err
    rows = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert "images" in out.split()
    assert "training" in rows
    assert rows.index("accuracy") < rows.index("perplexity")
    assert not {"needles", "state", "tokens"} & {*rows}
    text = compared.read_text()
    assert "Highest accuracy" in text
    assert "training images" in text
    assert text.index('id="accuracy"') < text.index('id="perplexity"')


@pytest.mark.usefixtures("unverified")
def test_a_report_shows_what_eval_found_of_images(place: Path, linearize: Command) -> None:
    recipe_of(place, "vit", [KL])
    run = place / "run-vit"
    assert linearize("finetune", place / "recipe.yaml")[0] == 0
    asked = ["--teacher", place / "vit", "--recipe", place / "recipe.yaml", "-o", run / "eval.json"]
    code, _, err = linearize("eval", run / "final", *asked)
    assert code == 0, err
    code, _, err = linearize("report", run)
    assert code == 0, err
    page = (run / "report.html").read_text()
    assert "same class" in page
    assert "linearize eval, 24 of" in page


@pytest.mark.usefixtures("unverified")
def test_attention_transfer_brings_every_layer_of_a_vision_model_closer(place: Path) -> None:
    errors = []
    for number, steps in enumerate((1, 40)):
        recipe = recipe_of(place, "vit", [TRANSFER | {"steps": steps}])
        recipe = recipe.model_copy(update={"output_dir": str(place / f"r{number}")})
        errors.append([layer["relative_mse"] for layer in finetune(recipe)["layers"]])
    assert all(after < before for before, after in zip(*errors, strict=True))


@pytest.mark.usefixtures("unverified")
def test_a_model_without_a_head_learns_its_teachers_features(place: Path) -> None:
    recipe = recipe_of(place, "dino", [FEATURES | {"steps": 30, "optimizer": {"lr": 1e-3}}])
    before, after = finetune(recipe)["stages"]
    assert after["error"] < before["error"]
    lines = [json.loads(line) for line in (place / "run-dino" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.usefixtures("unverified")
def test_a_backbone_learns_its_map_and_goes_below_a_segmenter(place: Path, linearize: Command) -> None:
    sharp = Dinov2Config(**SMALL, initializer_range=0.3, layerscale_value=1.0, out_features=["stage1", "stage2"])
    config = UperNetConfig(
        backbone_config=sharp, hidden_size=8, num_labels=3, use_auxiliary_head=False, pool_scales=[1]
    )
    torch.manual_seed(0)
    segmenter = UperNetForSemanticSegmentation(config).eval()
    segmenter.backbone.save_pretrained(place / "backbone")
    recipe_of(place, "backbone", [FEATURES | {"steps": 20, "optimizer": {"lr": 1e-3}}])
    code, out, err = linearize("finetune", place / "recipe.yaml", "--json")
    assert code == 0, err
    before, after = json.loads(out)["stages"]
    assert after["error"] < before["error"]
    final = place / "run-backbone" / "final"
    data = [f"data.eval={{arrays: {place / 'eval.npz'}}}", "--teacher", place / "backbone", "--json"]
    found = json.loads(linearize("eval", final, *data)[1])
    with np.load(place / "eval.npz") as held, torch.no_grad():
        pixels = torch.from_numpy(held["images"])
    linear = AutoModel.from_pretrained(final, **TRUSTED).eval()
    with torch.no_grad():
        vectors = [one(pixels).feature_maps[-1].mean((2, 3)) for one in (segmenter.backbone, linear)]
        expected = segmenter(pixel_values=pixels).logits
        segmenter.backbone = linear
        assert segmenter(pixel_values=pixels).logits.shape == expected.shape
    assert found["pooling"] == "mean"
    assert found["cosine_images"] == pytest.approx(float(torch.cosine_similarity(*vectors).mean()), abs=1e-5)


def test_eval_compares_two_encoders_of_images(place: Path, linearize: Command) -> None:
    """By their vectors: the class token, and which other image is nearest."""
    plan = plan_conversion(str(place / "dino"), "la")
    convert(*plan, place / "la", level="none", say=lambda text: None)
    command = shlex.split(next_step(plan[0], place / "la", plan[2]).splitlines()[0])
    assert [stage.kind for stage in load_recipe(command[4], command[5:]).stages][-1] == "feature_cosine"
    data = [f"data.eval={{arrays: {place / 'eval.npz'}}}", "--teacher", place / "dino", "--json"]
    found = json.loads(linearize("eval", place / "la", *data)[1])
    assert (found["kind"], found["images"], found["pooling"]) == ("embeddings", 24, "first")
    with np.load(place / "eval.npz") as held, torch.no_grad():
        images = torch.from_numpy(held["images"])
        models = [Dinov2Model.from_pretrained(place / "dino"), AutoModel.from_pretrained(place / "la", **TRUSTED)]
        vectors = [model.eval()(pixel_values=images).last_hidden_state[:, 0] for model in models]
    assert found["cosine_images"] == pytest.approx(float(torch.cosine_similarity(*vectors).mean()), abs=1e-5)
    assert 0.0 < found["spearman_images"] < 1.0
    itself = json.loads(linearize("eval", place / "dino", *data)[1])
    assert (itself["same_answer"], itself["spearman_images"]) == (1.0, pytest.approx(1.0))
    assert itself["student_nearest_class"] == itself["teacher_nearest_class"]


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("base", "stage", "data", "message"),
    [
        ("vit", FEATURES, None, "has a head; use logit_kl"),
        ("dino", KL, None, "has no head; use feature_cosine"),
        ("vit", KL, {"train": {"files": ["a.txt"]}}, r"^data.train holds text, .* learns from images: give images: F"),
        ("vit", KL | {"data": {"eval": {"demo": "heldout"}}}, None, r"^stages\[0\].data.eval holds text"),
        ("llama", KL, {"train": {"images": "photos"}}, "holds images, .*LlamaForCausalLM learns from text: give files"),
        ("vit", KL, {"train": {"arrays": "trian.npz"}}, "no such file .*Did you mean '.*/train.npz'"),
        ("vit", KL, {"train": {"images": "photo"}}, "no such folder .*Did you mean '.*/photos'"),
        ("llama", KL, {"train": {"files": "b.txt"}}, "no such file .*Did you mean '.*/a.txt'"),
        ("llama", KL, {"train": {"files": "a.txt"}}, "no tokenizer can be loaded"),
        ("clip", TRANSFER, None, "LinearizedCLIPModel takes input_ids and pixel_values together"),
        ("clip", TRANSFER, {"train": {"files": "a.txt"}}, "LinearizedCLIPModel takes input_ids and pixel_values tog"),
        ("clip-images", KL, None, "LinearizedCLIPVisionModelWithProjection has no head; use feature_cosine"),
    ],
)
def test_what_a_model_cannot_learn_is_refused_before_it_is_converted(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    base: str,
    stage: dict[str, Any],
    data: dict[str, Any] | None,
    message: str,
) -> None:
    monkeypatch.setattr("linearize.job.start.convert", lambda *arguments, **named: pytest.fail("converts"))
    (place / "a.txt").write_text("text")
    (place / "photos").mkdir()
    recipe = recipe_of(place, base, [stage], data)
    with pytest.raises(LinearizeError, match=message) as refused:
        finetune(recipe)
    assert refused.value.code == (Exit.USAGE if "Did you mean" in message else Exit.INCOMPATIBLE)
    assert not (place / f"run-{base}").exists()
    if "tokenizer" not in message:
        with pytest.raises(LinearizeError, match=message):
            dry_run(recipe, print)


@pytest.mark.usefixtures("unverified")
def test_a_tower_with_a_projection_learns_its_teachers_features(place: Path) -> None:
    report = finetune(recipe_of(place, "clip-images", [TRANSFER, FEATURES], {"train": {"arrays": "train.npz"}}))
    assert (report["stages"], len(report["layers"])) == ([], 0)


def folders(place: Path, names: list[str]) -> dict[str, Any]:
    """The data of a recipe: three pictures for each class."""
    random = np.random.default_rng(0)
    for name in names:
        (place / "pictures" / name).mkdir(parents=True)
        for number in range(3):
            pixels = random.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "pictures" / name / f"{number}.png")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(place / "vit")
    return {"train": {"images": "pictures"}, "eval": {"images": "pictures"}}


@pytest.mark.usefixtures("unverified")
def test_a_folder_of_images_makes_a_classifier_for_a_pipeline(place: Path, linearize: Command) -> None:
    """As its user goes: folders named after classes, finetune, eval beside the teacher, a pipeline, the card."""
    model = ViTForImageClassification.from_pretrained(place / "vit")
    model.config.id2label, model.config.label2id = {0: "dog", 1: "cat"}, {"dog": 0, "cat": 1}
    model.save_pretrained(place / "vit")
    recipe_of(place, "vit", [TRANSFER, KL], folders(place, ["cat", "dog"]))
    assert linearize("finetune", place / "recipe.yaml")[0] == 0
    final = place / "run-vit" / "final"
    code, out, err = linearize("eval", final, "--teacher", place / "vit", "--recipe", place / "recipe.yaml", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert {"student_accuracy", "teacher_accuracy", "top1_agreement", "kl"} <= found.keys()
    classify = pipeline("image-classification", model=str(final), trust_remote_code=True)
    picture = Image.open(next((place / "pictures" / "cat").glob("*.png")))
    assert {row["label"] for row in classify(picture)} == {"cat", "dog"}
    card = (final / "README.md").read_text()
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", card)
    assert pictures
    assert all((final / one).is_file() for one in pictures)


@pytest.mark.usefixtures("unverified")
def test_classes_that_no_stage_learns_may_have_any_name(place: Path) -> None:
    """ImageNet's folders do not have the names that models give its classes."""
    data, messages = folders(place, ["n01440764", "n01443537", "n01484850"]), list[str]()
    report = finetune(recipe_of(place, "vit", [TRANSFER, KL], data), say=messages.append)
    assert (report["stages"], report["teacher_ppl"]) == ([], None)
    notes = [line for line in messages if "has the class 'n01440764'" in line]
    assert notes
    assert all("runs without, and its predictions are not evaluated" in line for line in notes)
    assert len(notes) == len(set(notes))
    with pytest.raises(LinearizeError, match=r"'n01440764'.*2"):
        finetune(recipe_of(place, "vit", [SFT], data), resume="never")


@pytest.mark.usefixtures("unverified")
def test_how_classes_are_numbered_is_said_once(place: Path) -> None:
    messages = list[str]()
    finetune(recipe_of(place, "vit", [KL, SFT | {"name": "b"}], folders(place, ["1", "0"])), say=messages.append)
    assert [line for line in messages if line.startswith("classes of")] == [
        f"classes of {place / 'pictures'}: 0 is 0, 1 is 1"
    ]


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"per_device": 1}, "1 image,"),
        pytest.param({"per_device": 3, "gradient_accumulation_steps": 4}, "12 images", marks=pytest.mark.slow),
    ],
)
def test_a_step_of_few_images_is_noted(place: Path, batch: dict[str, int], words: str) -> None:
    messages = list[str]()
    recipe = recipe_of(place, "vit", [TRANSFER | {"batch": batch}, KL | {"batch": {"per_device": 16}}])
    finetune(recipe, max_steps=1, say=messages.append)
    (note,) = [line for line in messages if "a step sees" in line]
    assert note.startswith(f"note: attention_transfer: a step sees {words}")
    assert "batch.per_device: 64" in note
    planned = list[str]()
    dry_run(recipe, planned.append)
    assert note in planned


@pytest.mark.parametrize("held", ["arrays", "images"])
def test_a_dry_run_counts_the_held_out_images_that_there_are(place: Path, held: str) -> None:
    """Not as many as eval.max_tokens allows."""
    data = folders(place, ["0", "1"]) if held == "images" else None
    count = 6 if held == "images" else 24
    recipe = recipe_of(place, "vit", [KL], data)
    hours = []
    for limit in (count // 2, count, 65536):
        own = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"max_tokens": limit})})
        found = dry_run(own, lambda text: None)
        assert found["stages"][0]["data"]["eval_tokens"] == min(limit, count)
        hours.append(found["hours_of"]["evaluation"])
    assert 0 < hours[0] < hours[1] == hours[2]


def test_images_are_counted_without_reading_one(tmp_path: Path) -> None:
    source = ArraySource(arrays="a.npz")
    assert count_images(source, tmp_path) is None, "what is not there is told where it is read"
    np.savez_compressed(tmp_path / "a", images=np.zeros((7, 3, 4, 4), np.float32), labels=np.zeros(7))
    assert count_images(source, tmp_path) == 7
    (tmp_path / "a.npz").write_bytes(b"PK")
    assert count_images(source, tmp_path) is None
    assert count_images(DatasetSource(path="p", image_key="image"), tmp_path) is None


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("train", ["new", "all", "lora"])
def test_a_saved_model_says_where_it_is_no_longer_its_teacher(place: Path, train: str) -> None:
    lora = {"lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj"]}} if train == "lora" else {}
    recipe = recipe_of(place, "vit", [KL | {"train": train} | lora])
    report = finetune(recipe)
    model = AutoModelForImageClassification.from_pretrained(report["output"], trust_remote_code=True).eval()
    model.save_pretrained(place / "again")
    original = ViTForImageClassification.from_pretrained(place / "vit").eval()
    pixels = torch.ones(1, 3, 16, 16)
    for copy in (model, AutoModelForImageClassification.from_pretrained(place / "again", trust_remote_code=True)):
        with warnings.catch_warnings(record=True) as found, torch.no_grad():
            warnings.simplefilter("always")
            with copy.teacher():
                same = torch.equal(copy(pixels).logits, original(pixels).logits)
        assert same == (train == "new")
        assert ["is not the model that it was converted from" in str(one.message) for one in found] == [True] * (
            not same
        )


@pytest.mark.usefixtures("unverified")
def test_sft_needs_classes(place: Path) -> None:
    np.savez(place / "bare.npz", images=np.zeros((8, 3, 16, 16), np.float32))
    with pytest.raises(LinearizeError, match=r"bare\.npz"):
        finetune(recipe_of(place, "vit", [SFT], {"train": {"arrays": "bare.npz"}}))


def test_a_dry_run_counts_images(place: Path) -> None:
    (row,) = dry_run(recipe_of(place, "vit", [KL | {"steps": 7}]), print)["stages"]
    assert row["tokens"] == 7 * 4


@pytest.mark.slow
@pytest.mark.usefixtures("unverified")
def test_an_encoder_learns_hidden_tokens(place: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    BertForMaskedLM(config).save_pretrained(place / "bert")
    tokenizer.save_pretrained(place / "bert")
    (place / "a.txt").write_text("abcdefgh" * 400)
    data = {"train": {"files": ["a.txt"]}, "eval": {"files": ["a.txt"]}, "pack": {"seq_len": 32}}
    report = finetune(recipe_of(place, "bert", [TRANSFER, KL, SFT], data, verify=True))
    first, *_, last = report["stages"]
    assert last["ppl"] < 0.5 * first["ppl"]
    AutoModelForMaskedLM.from_pretrained(report["output"], trust_remote_code=True)
