"""The recipes that ship: they are what their schema says, they run, and the command hands them out."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import yaml
from conftest import Command, holds, with_slow
from models import small_model
from training import BASES, VOCAB, T, byte_tokenizer, make_recipe, metrics, stage, train, write_data
from training import base as converted
from transformers import BertConfig, BertModel, ViTConfig, ViTForImageClassification

from linearize.commands.finetune import recipe_table
from linearize.errors import Exit, LinearizeError
from linearize.recipe.data import holds_images
from linearize.recipe.presets import Preset, copy, presets, recipe_path
from linearize.recipe.recipe import load_recipe
from linearize.recipe.schema import recipe_schema
from linearize.recipe.yaml import Document
from linearize.terminal.tables import short
from linearize.train.save import load_converted
from linearize.train.stages import error_scale, transfer_loss
from linearize.train.student import Student

PRESETS = presets()
by_name = pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)


def test_what_a_header_says_was_measured_is_read_to_its_end() -> None:
    measured = {preset.name: preset.measured for preset in PRESETS}
    assert measured["gsa"]["result"].endswith("(docs/measurements/study.md)")
    for preset in PRESETS:
        header = preset.path.read_text("utf-8").split("\n\n")[0]
        figures = header[header.index("# command") :].replace("#", " ").split()
        assert figures == " ".join(f"{key} {text}" for key, text in preset.measured.items()).split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small unconverted model in `source` and text beside it."""
    folder = tmp_path_factory.mktemp("presets")
    small_model("llama", **BASES["llama"]).save_pretrained(folder / "source")
    byte_tokenizer().save_pretrained(folder / "source")
    write_data(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4)).save_pretrained(folder / "vit")
    BertModel(BertConfig(**sizes, vocab_size=VOCAB)).save_pretrained(folder / "bert")
    byte_tokenizer().save_pretrained(folder / "bert")
    random = np.random.default_rng(0)
    np.savez(folder / "images", images=random.normal(size=(8, 3, 16, 16)).astype(np.float32), labels=np.arange(8) % 2)
    return folder


def of_images(preset: Preset) -> bool:
    return holds_images(load_recipe(preset.path, ["model.base=demo"]).data.train)


def source_of(preset: Preset) -> str:
    """The folder of the small model that a preset runs on."""
    if of_images(preset):
        return "vit"
    return "bert" if preset.name == "sentence" else "source"


def tiny(preset: Preset, folder: Path) -> list[str]:
    """Overrides by which a preset runs on the small model and its text, in no time."""
    recipe = load_recipe(preset.path, ["model.base=demo"])
    assert recipe.convert is not None
    small = ["convert.options.slots=8"] if recipe.convert.mechanism == "gsa" else []
    small += ["convert.options.clock=6"] if recipe.convert.options.get("clock", 0) > 8 else []
    small += ["convert.keep_softmax=every:2:1"] if recipe.convert.keep_softmax == "every:4:3" else []
    stages = recipe.stages
    text = ["data.train={files: [train.jsonl]}", "data.eval={files: [heldout.txt]}", f"data.pack.seq_len={T}"]
    images = ["data.train={arrays: images.npz}", "data.eval={arrays: images.npz}"]
    images += ["data.augment=null", "runtime.workers=0", *(f"stages.{s.name}.batch.per_device=4" for s in stages)]
    return [
        f"model.base={folder / source_of(preset)}",
        "model.dtype=null",
        f"output_dir={folder / preset.name}",
        *(images if of_images(preset) else text),
        "eval.max_tokens=128",
        *small,
        "runtime.device=cpu",
        *(f"stages.{s.name}.batch.gradient_accumulation_steps=1" for s in stages),
        *(f"stages.{s.name}.data=" + "{}" for s in stages),
    ]


# ---------------------------------------------------------------- what ships


QUICK = ("gsa-window",)


def kinds_of(preset: Preset) -> tuple[Any, ...]:
    """What training can tell apart, on bases that are converted the same way: the data and the kinds of stages."""
    stages = load_recipe(preset.path, ["model.base=demo"]).stages
    return of_images(preset), *((one.kind, tuple(one.train)) for one in stages)


# One preset of each kind of run, a quick one where there is one.
TRAINED = {kinds_of(preset): preset.name for preset in sorted(PRESETS, key=lambda preset: preset.name in QUICK)}


@pytest.mark.parametrize(
    "preset",
    with_slow(PRESETS, *(preset for preset in PRESETS if preset.name not in QUICK)),
    ids=lambda preset: preset.name,
)
def test_a_preset_is_planned_and_trains(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, preset: Preset
) -> None:
    """By name, on a base and text given as overrides: files there start at the working directory. All are planned, one
    of each kind trains."""
    monkeypatch.chdir(place)
    command = ("finetune", preset.name, *tiny(preset, place), "--max-steps", "1", "--json")
    code, out, err = linearize(*command, "--dry-run")
    assert code == 0, err
    planned = json.loads(out)["stages"]
    assert all(plan["parameters"] > 0 for plan in planned)
    assert not (place / preset.name).exists()
    if preset.name not in TRAINED.values():
        return
    # The conversion is planned above; made once for all, since each ends with a clean process.
    ready = ["finish.verify=false"]
    ready += ["convert=null", f"model.base={converted(place, 'llama')}"] if source_of(preset) == "source" else []
    code, out, err = linearize(*command, *ready)
    assert code == 0, err
    trained = [row["name"] for row in json.loads(out)["stages"]]
    assert trained == ["converted", *(plan["name"] for plan in planned)]
    assert (place / preset.name / "final" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsa", "gsa-window"])
def test_one_step_of_a_model_in_half_precision_passes_its_checks(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Rounding what was trained in float32 moves single logits by more than any limit, and no prediction."""
    monkeypatch.chdir(place)
    half = place / "half"
    if not half.exists():
        model = small_model("llama", **BASES["llama"])
        model.to(torch.bfloat16).save_pretrained(half)
        byte_tokenizer().save_pretrained(half)
    (preset,) = (one for one in PRESETS if one.name == name)
    given = (*tiny(preset, place), f"model.base={half}", f"output_dir={place / 'half-runs' / name}")
    code, out, err = linearize("finetune", name, *given, "--max-steps", "1", "--json")
    assert code == 0, err
    final = place / "half-runs" / name / "final"
    assert torch.bfloat16 == load_converted(final, "auto", False).dtype
    assert json.loads(out)["stages"][0]["name"] == "converted"


@by_name
def test_a_preset_is_what_the_schema_says(preset: Preset) -> None:
    data = Document(preset.path, ["model.base=some/model"]).data
    jsonschema.Draft202012Validator(recipe_schema()).validate(data)


def test_the_schema_refuses_what_recipes_refuse() -> None:
    checker = jsonschema.Draft202012Validator(recipe_schema())
    checker.check_schema(recipe_schema())
    path = next(preset.path for preset in PRESETS if preset.name == "demo")
    for mistake in (
        "stages[0].optimizer.lrr=1",
        "stages[0].kind=distil",
        "stages[0].train=[mixer]",
        "stages[0].loss={error: l1}",
        "stages[1].schedule.warmup_steps=0",
        "stages=[]",
        "data.train={file: a.txt}",
        "version=2",
        "seed=-1",
    ):
        assert list(checker.iter_errors(Document(path, [mistake]).data)), mistake


@by_name
def test_a_preset_says_where_it_was_measured(preset: Preset) -> None:
    assert preset.about.endswith(".")
    assert list(preset.measured) == ["command", "hardware", "duration", "result"]
    assert preset.measured["command"].startswith("linearize finetune ")
    assert all(source.model_dump().get("files") is None for source in sources(preset)), "no files beside a preset"


def sources(preset: Preset) -> list[Any]:
    recipe = load_recipe(preset.path, ["model.base=demo"])
    data = [recipe.data_for(stage) for stage in recipe.stages]
    return [source for one in data for source in (one.train, one.eval) if source is not None]


# ---------------------------------------------------------------- what they need of a recipe


@pytest.mark.parametrize("weight", [1.0, 31.25])
def test_the_error_of_a_transfer_can_be_absolute(tmp_path: Path, weight: float) -> None:
    """`mse` is the mean over tokens, heads and dims, times the weight; `relative` divides by the teacher's power."""
    folder = converted(tmp_path, "llama")
    student = Student(load_converted(folder, torch.float32, False))
    batch = {
        "input_ids": torch.arange(2 * T).reshape(2, T) % 250,
        "position_ids": torch.arange(T).expand(2, T),
        "valid": torch.ones(2, T, dtype=torch.bool),
    }
    found, heard = {}, []

    class Reference:
        own_call = False

        def on_layer(self, mixer: Any, inputs: Any, o: torch.Tensor, target: torch.Tensor, layout: Any) -> None:
            heard.append(((o - target).square().mean(), (o - target).square().sum() / target.square().sum()))

    with torch.no_grad(), student.model.transferring(Reference()):
        student.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    for error in ("mse", "relative"):
        loss = {"error": error, "weight": weight}
        recipe = make_recipe(tmp_path / error, folder, stage("attention_transfer", loss=loss))
        scale = error_scale(recipe.stages[0], student, [batch])
        found[error] = transfer_loss(student, batch, torch.tensor(2 * T), scale, lambda loss: None)
    for error, expected in zip(found, zip(*heard, strict=True), strict=True):
        torch.testing.assert_close(found[error], weight * torch.stack(expected).mean(), rtol=1e-4, atol=0)


def test_a_warmup_can_be_counted_in_steps(tmp_path: Path) -> None:
    counted = stage("sft", "new", steps=4, optimizer={"lr": 1e-2}, schedule={"warmup_steps": 4})
    train(make_recipe(tmp_path, converted(tmp_path, "llama"), counted))
    assert metrics(tmp_path, "lr") == pytest.approx([0.0, 2.5e-3, 5e-3, 7.5e-3])


# ---------------------------------------------------------------- linearize recipes


@by_name
def test_a_copy_of_a_preset_is_valid_as_it_is(linearize: Command, tmp_path: Path, preset: Preset) -> None:
    assert linearize("recipes", "cp", preset.name, tmp_path / "mine.yaml")[0] == 0
    code, _, err = linearize("recipes", "validate", tmp_path / "mine.yaml")
    assert code == 0, err
    assert len(err.splitlines()) == 1
    assert ("mine.yaml: fine, apart from model.base. Give" in err and "model.base=DIR" in err) == (
        "base:" not in preset.path.read_text("utf-8").split("convert:")[0]
    )


def test_what_a_preset_lacks_is_told_without_a_place_in_the_package(tmp_path: Path) -> None:
    """Nobody can edit it there; a copy is the person's own."""
    with pytest.raises(LinearizeError) as refused:
        load_recipe("hybrid")
    add = "add model.base=MODEL (or copy the preset: linearize recipes cp hybrid mine.yaml)"
    assert refused.value.message == f"hybrid names no model: {add}"
    copy("hybrid", tmp_path / "mine.yaml")
    with pytest.raises(LinearizeError, match=r"/mine\.yaml:\d+:\d+.*model\.base"):
        load_recipe(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("mechanism", "start", "kept"),
    [
        ("gdn", "Start from the preset gdn, or replace", {"window": 64, "sink": 1}),
        ("window", "Start from the preset window, or replace", {"window": 64, "sink": 1}),
        ("mamba2", "Replace", {"half_life_min": 32}),
    ],
)
def test_the_options_of_another_mechanism_are_replaced_together(
    mechanism: str, start: str, kept: dict[str, int]
) -> None:
    given = ["model.base=demo", f"convert.mechanism={mechanism}"]
    with pytest.raises(LinearizeError) as refused:
        load_recipe("hybrid", given)
    begin, _, override = refused.value.message.partition(f". {start} all options: ")
    assert begin.startswith(f"preset hybrid: convert.options: {mechanism} does not take slots, ")
    options = load_recipe("hybrid", [*given, override.strip("'")]).convert.options
    assert options.items() >= kept.items()
    assert "slots" not in options
    with pytest.raises(LinearizeError, match=r"'convert.options.slots=3'"):
        load_recipe("hybrid", [*given, "convert.options={}", "convert.options.slots=3"])


def test_presets_are_listed_and_shown(linearize: Command) -> None:
    code, out, _ = linearize("recipes", "ls")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:] if line[0] != " "] == [preset.name for preset in PRESETS]
    code, out, _ = linearize("recipes", "ls", "--json")
    every = {
        "demo",
        "gsa",
        "gsa-window",
        "hybrid",
        "hybrid-eighth",
        "hybrid-heads",
        "hybrid-native",
        "hybrid-native-qwen3",
        "hybrid-sla",
        "hybrid-window",
        "lolcats-style",
        "radlads-style",
        "sentence",
        "gsa-t2r",
        "gla-t2r",
        "retnet-t2r",
    }
    every |= {
        "vit-la",
        "vit-mhla",
        "vit-saga",
        "vit-mhla-pretrain",
        "vit-saga-pretrain",
        "gsa-pretrain",
        "mhla-pretrain",
        "sla-pretrain",
    }
    assert [preset.name for preset in PRESETS[:3]] == ["hybrid-window", "hybrid-eighth", "window"]
    assert {row["name"] for row in json.loads(out)} == every | {"la", "retnet", "gla", "gdn", "mhla", "sla", "window"}
    assert all(row["result"] for row in json.loads(out))
    for preset in PRESETS:
        assert linearize("recipes", "show", preset.name) == (0, preset.path.read_text("utf-8"), "")
    code, out, err = linearize("recipes", "show", "lolcat-style")
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, "'lolcat-style'", "'lolcats-style'")


def test_a_preset_is_copied_and_nothing_is_overwritten(
    linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = linearize("recipes", "cp", "gsa")
    assert code == 0
    assert "gsa.yaml" in err
    shipped = recipe_path("demo").read_bytes()
    (tmp_path / "gsa.yaml").write_text("mine")
    code, _, err = linearize("recipes", "cp", "demo", "gsa.yaml")
    assert code == Exit.USAGE
    assert "--overwrite" in err
    assert (tmp_path / "gsa.yaml").read_text() == "mine"
    assert linearize("recipes", "cp", "demo", "gsa.yaml", "--overwrite")[0] == 0
    assert linearize("recipes", "cp", "demo", "new/other.yml")[0] == 0
    assert (tmp_path / "gsa.yaml").read_bytes() == (tmp_path / "new" / "other.yml").read_bytes() == shipped
    with pytest.raises(LinearizeError) as refused:
        copy("demo", tmp_path / "gsa.yaml" / "x.yaml")
    assert refused.value.code == Exit.RESOURCE


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_copy_names_its_schema_once(tmp_path: Path, preset: Preset) -> None:
    text = copy(preset.name, tmp_path).read_text("utf-8")
    assert text.count("\n# yaml-language-server: $schema=recipe.schema.json\n") == 1
    assert yaml.safe_load(text) == yaml.safe_load(preset.path.read_text("utf-8"))


def test_the_schema_knows_recipes_of_latents() -> None:
    checker = jsonschema.Draft202012Validator(recipe_schema())
    stages = [{"kind": "prediction", "optimizer": {"lr": 1e-3}, "steps": 5}]
    data = {"train": {"latents": "latents", "prompts": "prompts"}}
    recipe = {"version": 1, "name": "film", "model": {"base": "wan"}, "data": data, "stages": stages}
    checker.validate(recipe)
    for mistake in (
        {"noise": "sine"},
        {"stages": [{**stages[0], "kind": "logit_kl"}]},
        {"data": {"train": {"latents": "latents", "images": "images"}}},
        {"data": {"train": {"images": "latents", "prompts": "prompts"}}},
        {"teacher": "demo"},
    ):
        assert list(checker.iter_errors(recipe | mistake)), mistake


def test_a_preset_without_the_line_for_editors_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "demo.yaml"
    bare.write_text("\n".join(line for line in recipe_path("demo").read_text().splitlines() if "language" not in line))
    monkeypatch.setattr("linearize.recipe.presets.preset", lambda name: Preset(name, bare, "", {}))
    text = copy("demo", tmp_path / "mine.yaml").read_text()
    assert text.count("# yaml-language-server: $schema=recipe.schema.json") == 1
    assert load_recipe(tmp_path / "mine.yaml").stages


def test_a_copy_has_its_schema_beside_it_and_leaves_other_schemas(tmp_path: Path) -> None:
    schema = tmp_path / "recipe.schema.json"
    copy("demo", tmp_path, schema=recipe_schema())
    assert json.loads(schema.read_text()) == recipe_schema()
    schema.write_text('{"$id": "urn:linearize:recipe:1", "old": true}')
    copy("gsa", tmp_path, schema=recipe_schema())
    assert json.loads(schema.read_text()) == recipe_schema()
    schema.write_text("mine")
    copy("gla", tmp_path, schema=recipe_schema())
    assert schema.read_text() == "mine"


def test_mistakes_are_coloured_as_other_errors(
    linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("linearize.commands.recipes.say_error", lambda where, message: told.append(message))
    (tmp_path / "bad.yaml").write_text("seed: x")
    assert linearize("recipes", "validate", tmp_path / "bad.yaml")[0] == Exit.USAGE
    assert holds(told[0], "seed")


def test_every_mistake_of_every_file_is_told(linearize: Command, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    copy("demo", good)
    text = good.read_text()
    bad.write_text(text.replace("seed: 42", "seed: x").replace("slots: 64", "slot: 64").replace("tokens: 120k", ""))
    code, out, err = linearize("recipes", "validate", good, bad, "gsa-t2r")
    assert (code, out) == (Exit.USAGE, "")
    line = {key: number for number, row in enumerate(text.splitlines(), 1) for key in ("seed", "slots") if key in row}
    told = err.splitlines()
    assert told[0] == f"{good}: fine"
    assert told[1].startswith(f"error: {bad}:{line['seed']}:7 seed: must be a whole number")
    assert told[2].startswith(f"{bad}:")
    assert holds(told[2], "exactly", "tokens")
    assert told[3] == "gsa-t2r: fine"
    code, out, _ = linearize("recipes", "validate", bad, "--set", "seed=1", "--set", "stages[0].steps=3", "--json")
    assert code == Exit.USAGE
    (mistake,) = json.loads(out)["mistakes"][str(bad)]
    assert holds(mistake, "slot", "gsa")
    assert linearize("recipes", "validate", good)[0] == 0


def test_the_schema_is_printed(linearize: Command) -> None:
    code, out, err = linearize("recipes", "schema")
    assert (code, err) == (0, "")
    assert json.loads(out) == recipe_schema()


def test_a_recipe_is_a_file_or_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe_path("demo").name == "demo.yaml"
    with pytest.raises(LinearizeError, match="'demo'"):
        recipe_path("deom")
    Path("mine.yaml").write_text("")
    with pytest.raises(LinearizeError, match=r"'mine\.yaml'"):
        recipe_path("mine")
    Path("demo").write_text("")
    assert recipe_path("demo") == Path("demo")  # a file comes first
    assert recipe_path("folder/demo") == Path("folder/demo")
    assert recipe_path("demo.yaml") == Path("demo.yaml")


@pytest.mark.parametrize(("name", "key"), [("gsa", " model.base=DIR"), ("gsa-t2r", "")])
def test_the_hint_after_a_copy_has_the_key_that_lacks(linearize: Command, tmp_path: Path, name: str, key: str) -> None:
    target = tmp_path / "mine.yaml"
    code, _, err = linearize("recipes", "cp", name, str(target))
    assert (code, holds(err.replace("\n", ""), "Next", "linearize", f"{target}{key}", "--dry-run")) == (0, True), err


def test_the_table_of_stages_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    recipe_table(
        [
            {"name": "attention_transfer", "kind": "attention_transfer", "train": ["new", "mixer", "lora"],
             "parameters": 8_012_345_678, "steps": 100_000, "epochs": None, "tokens": 20_000_538_624, "lr": 2.5e-4,
             "new_lr": 1e-3, "teacher_copy_bytes": 1000 << 20, "data": {"seq_len": 2048}},
            {"name": "end", "kind": "sft", "train": ["all"], "parameters": 999_999, "steps": None, "epochs": 2.5,
             "tokens": None, "lr": 1e-5, "new_lr": None, "teacher_copy_bytes": 0, "data": {"seq_len": 2048}},
        ]
    )  # fmt: skip
    told = capsys.readouterr().err
    assert "…" not in told
    assert all(len(line) <= 80 for line in told.splitlines())
    words = ("attention_transfer", "8.01B", "100,000", "20B", "0.00025", "1M", "2.5 epochs", "1000.0", "none")
    words += ("0.001 new",)
    assert all(word in told for word in words)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (999_600, "1M"), (2e9, "2B"), (5e12, "5T")]
)
def test_counts_for_people(count: float, text: str) -> None:
    assert short(count) == text


def test_a_full_disk_leaves_no_half_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LinearizeError) as caught:
        copy(presets()[0].name, tmp_path)
    assert caught.value.code == Exit.RESOURCE
    assert not [*tmp_path.iterdir()]
