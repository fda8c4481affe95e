"""Converting again what is converted: further layers become linear, others get softmax back, trained weights stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import holds
from models import convert_folder, small_model
from safetensors.torch import load_file, save_file
from training import SMALL, T, byte_tokenizer, make_recipe, same, stage, tensors, train
from transformers import AutoModelForCausalLM

from linearize import api
from linearize.checkpoint.adopt import adopt
from linearize.checkpoint.manifest import read_plan
from linearize.checkpoint.provenance import trained_before, untrained_mixers
from linearize.checkpoint.write import MANIFEST
from linearize.convert import convert, plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.export.native import export_native
from linearize.export.to_onnx import export_onnx
from linearize.measure.generate import load_any
from linearize.verify.checks import verify_folder

Command = Callable[..., tuple[int, str, str]]


def path(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"


def mixers(folder: Path, *layers: int) -> dict[str, torch.Tensor]:
    """Tensors of the mixers of these layers."""
    return {n: v for n, v in tensors(folder).items() if n.startswith(tuple(f"{path(i)}.mixer." for i in layers))}


def own(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors that the source has, too."""
    return {name: value for name, value in tensors(folder).items() if ".mixer." not in name}


def logits(folder: Path, *, teacher: bool = False) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        if teacher:
            with model.teacher():
                return model(input_ids=ids).logits
        return model(input_ids=ids).logits


def again(folder: Path, output: Path, mechanism: str | None = None, level: Any = "none", **asked: Any) -> str:
    return convert(*plan_conversion(str(folder), mechanism, **asked), output, level=level, say=lambda line: None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one source of four layers: `linear`, whose first two are GSA, and `trained`, that after a training."""
    root = tmp_path_factory.mktemp("again")
    small_model("llama", **SMALL).save_pretrained(root / "source")
    byte_tokenizer().save_pretrained(root / "source")
    convert_folder(root / "source", root / "linear", "0-1", options={"window": 4})
    train(make_recipe(root, root / "linear", stage("attention_transfer"), stage("logit_kl")))
    (root / "run" / "final").rename(root / "trained")
    return root


# ---------------------------------------------------------------- what it does


@pytest.mark.slow
def test_one_more_layer_becomes_linear_and_the_others_stay_as_trained(place: Path, tmp_path: Path) -> None:
    message = again(place / "trained", tmp_path / "more", layers="3", level="full")
    assert holds(message, "source", "mixers")
    assert holds(message, "single", "equal")
    assert same(own(tmp_path / "more"), own(place / "source"))
    assert same(mixers(tmp_path / "more", 0, 1), mixers(place / "trained", 0, 1))
    assert not same(mixers(place / "trained", 0, 1), mixers(place / "linear", 0, 1))
    plan, old = read_plan(tmp_path / "more"), read_plan(place / "trained")
    assert [step.site.layer for step in plan.steps] == [0, 1, 3]
    assert plan.steps[:2] == old.steps
    assert plan.steps[2].options == old.steps[0].options
    assert [site.layer for site in plan.kept] == [2]
    assert (plan.source, plan.choice) == ("source", None)
    done = plan.reconversions[-1]
    assert (done.folder, done.added, done.restored, done.untrained) == ("trained", (path(3),), (), (path(3),))
    assert done.recipe is not None
    assert done.recipe["name"] == "tiny"
    assert {check.status for check in verify_folder(str(tmp_path / "more"))} <= {"passed", "skipped"}
    assert torch.equal(logits(tmp_path / "more", teacher=True), logits(place / "linear", teacher=True))
    card = (tmp_path / "more" / "README.md").read_text()
    assert holds(card, "`trained`", "recipe tiny", "layer 3 are untrained")


def test_a_layer_gets_softmax_back_and_linear_again(place: Path, tmp_path: Path) -> None:
    again(place / "trained", tmp_path / "one", restore="0")
    assert [step.site.layer for step in read_plan(tmp_path / "one").steps] == [1]
    assert not mixers(tmp_path / "one", 0)
    assert same(mixers(tmp_path / "one", 1), mixers(place / "trained", 1))
    again(tmp_path / "one", tmp_path / "two", "gla", layers="2")
    again(tmp_path / "two", tmp_path / "back", restore="2")
    assert torch.equal(logits(tmp_path / "back"), logits(tmp_path / "one"))
    passes = read_plan(tmp_path / "back").reconversions
    assert [one.folder for one in passes] == ["trained", "one", "two"]
    assert [one.restored for one in passes] == [(path(0),), (), (path(2),)]
    assert passes[1].untrained == (path(2),)
    assert passes[2].untrained == ()


@pytest.mark.slow
def test_layers_may_have_several_mechanisms(place: Path, tmp_path: Path) -> None:
    again(place / "trained", tmp_path / "two", "gla", layers="2-3", restore="0", options={"window": 4}, level="full")
    found = {step.site.layer: step.mechanism for step in read_plan(tmp_path / "two").steps}
    assert found == {1: "gsa", 2: "gla", 3: "gla"}
    with pytest.raises(LinearizeError, match=r"gla.*gsa.*become.*--to.*gla"):
        plan_conversion(str(tmp_path / "two"), None, layers="0")


def test_what_transformers_saved_and_linearize_took_back(place: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(place / "trained", trust_remote_code=True)
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(LinearizeError, match=r"linearize\.json"):
        plan_conversion(str(tmp_path / "saved"), None, layers="3")
    adopt(tmp_path / "saved", tmp_path / "whole")
    again(tmp_path / "whole", tmp_path / "more", layers="3", level="keys")
    assert same(mixers(tmp_path / "more", 0, 1), mixers(place / "trained", 0, 1))
    assert same(own(tmp_path / "more"), own(tmp_path / "saved"))


@pytest.mark.slow
def test_a_second_training_keeps_what_the_first_one_learned(place: Path, tmp_path: Path) -> None:
    """Calibration sets gates and norms of the new layer alone, and the teacher is the source still."""
    again(place / "trained", tmp_path / "more", layers="3")
    assert untrained_mixers(place / "linear", read_plan(place / "linear")) == {path(0), path(1)}
    assert untrained_mixers(place / "trained", read_plan(place / "trained")) == set()
    assert untrained_mixers(tmp_path / "more", read_plan(tmp_path / "more")) == {path(3)}
    still = stage("logit_kl", optimizer={"lr": 1e-30})
    recipe = make_recipe(tmp_path, tmp_path / "more", still, data=with_eval())
    report = train(recipe)
    final = tmp_path / "run" / "final"
    assert same(mixers(final, 0, 1), mixers(place / "trained", 0, 1))
    assert not same(mixers(final, 3), mixers(tmp_path / "more", 3))
    assert same(own(final), own(place / "source"))
    assert untrained_mixers(final, read_plan(final)) == set()
    assert read_plan(final).reconversions == read_plan(tmp_path / "more").reconversions
    recipe = make_recipe(tmp_path / "first", place / "linear", still, data=with_eval())
    assert report["teacher_ppl"] == pytest.approx(train(recipe)["teacher_ppl"], rel=1e-6)
    assert not trained_before(tmp_path / "more")


def test_what_an_upgrade_noted_stays(place: Path, tmp_path: Path) -> None:
    """Through a training, and through a conversion of what is converted."""
    folder = Path(shutil.copytree(place / "linear", tmp_path / "upgraded"))
    manifest = json.loads((folder / MANIFEST).read_text())
    past = [{"linearize": "0.1.0", "versions": {"torch": "2.6.0"}}]
    (folder / MANIFEST).write_text(json.dumps({**manifest, "upgraded_from": past}))
    train(make_recipe(tmp_path, folder, stage("sft", steps=1)))
    final = tmp_path / "run" / "final"
    assert json.loads((final / MANIFEST).read_text())["upgraded_from"] == past
    again(final, tmp_path / "more", layers="3")
    assert json.loads((tmp_path / "more" / MANIFEST).read_text())["upgraded_from"] == past
    assert "upgraded_from" not in json.loads((place / "trained" / MANIFEST).read_text())


def with_eval() -> dict[str, Any]:
    return {"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": T}}


def test_a_recipe_converts_again_and_trains(place: Path, tmp_path: Path) -> None:
    section = {"mechanism": "gsa", "layers": "3", "options": {"slots": 8}}
    train(make_recipe(tmp_path, place / "trained", stage("attention_transfer"), convert=section))
    plan = read_plan(tmp_path / "run" / "final")
    assert [step.site.layer for step in plan.steps] == [0, 1, 3]
    assert plan.reconversions[-1].added == (path(3),)


def test_a_hybrid_of_another_mechanism_becomes_one_that_engines_know(place: Path, tmp_path: Path) -> None:
    """As the preset hybrid-native starts from a student of the preset hybrid: its weights stay, its mixers are new."""
    section = {"mechanism": "mamba2", "layers": "0-1"}
    train(make_recipe(tmp_path, place / "trained", stage("attention_transfer"), convert=section))
    final = tmp_path / "run" / "final"
    plan = read_plan(final)
    assert [(step.site.layer, step.mechanism) for step in plan.steps] == [(0, "mamba2"), (1, "mamba2")]
    assert plan.reconversions[-1].added == plan.reconversions[-1].untrained == (path(0), path(1))
    assert same(own(final), own(place / "trained"))
    assert export_native(str(final), "auto", tmp_path / "out").form == "granitemoehybrid"
    plan = plan_conversion(str(place / "trained"), None, layers="1,3", options={"slots": 4})[0]
    assert [(step.site.layer, step.options["slots"]) for step in plan.steps] == [(0, 8), (1, 4), (3, 4)]


def test_a_second_training_says_that_source_weights_were_trained(place: Path, tmp_path: Path) -> None:
    train(make_recipe(tmp_path, place / "linear", stage("logit_kl", "all")))
    final = tmp_path / "run" / "final"
    assert holds(trained_before(final), "logit_kl")
    again(final, tmp_path / "more", layers="3")
    assert holds(trained_before(tmp_path / "more"), "logit_kl")
    named = "name it:\n    teacher.model=DIR    # DIR: the folder source that was converted first"
    assert named in trained_before(tmp_path / "more")
    manifest = json.loads((tmp_path / "more" / MANIFEST).read_text())
    manifest["plan"] |= {"source": "user/repo", "revision": "abc"}  # as of the Hub
    (tmp_path / "more" / MANIFEST).write_text(json.dumps(manifest))
    assert "name it:\n    teacher.model=user/repo teacher.revision=abc" in trained_before(tmp_path / "more")
    config = json.loads((tmp_path / "more" / "config.json").read_text())
    assert config["linearize_trained"]


@pytest.mark.slow
def test_the_command_line_converts_again(place: Path, tmp_path: Path, linearize: Command) -> None:
    before = sorted(file.name for file in place.rglob("*"))
    code, _, err = linearize("convert", place / "trained", "--layers", "3", "--restore", "0", "--dry-run")
    words = " ".join(err.split())
    assert code == 0
    for part in (
        "trained is converted already: layer 3 becomes gsa; layer 0 gets softmax back, and its mixer is dropped",
        "all other weights stay as they are",
        "(given back)",
        "(as it is)",
    ):
        assert part in words
    assert sorted(file.name for file in place.rglob("*")) == before
    code, out, err = linearize("convert", place / "trained", "--restore", "0", "-o", tmp_path / "out", "--json")
    assert code == 0, err
    plan = json.loads(out.splitlines()[-1])["plan"]
    assert plan["reconversions"][-1]["restored"] == [path(0)]
    assert read_plan(tmp_path / "out").steps == read_plan(place / "trained").steps[1:]


def test_python_converts_again(place: Path, tmp_path: Path) -> None:
    assert [s.site.layer for s in api.plan(place / "trained", None, layers="3", restore="0").steps] == [1, 3]
    folder = api.convert(place / "trained", None, tmp_path / "out", restore="1", verify="none", say=lambda line: None)
    assert [step.site.layer for step in read_plan(folder).steps] == [0]


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("mechanism", "asked", "code", "message"),
    [
        (
            "gsa",
            {},
            Exit.INCOMPATIBLE,
            r"'gsa'.*0-1.*convert=null.*--layers.*2-3.*--restore",
        ),
        (
            None,
            {"layers": "1"},
            Exit.USAGE,
            r"--layers.*1.*1.*2-3",
        ),
        (None, {"layers": "0-2"}, Exit.USAGE, r"--layers.*0-2.*0-1"),
        (None, {"restore": "3"}, Exit.USAGE, r"--restore.*3.*3.*0-1"),
        (None, {"restore": "0-1"}, Exit.USAGE, r"trained.*source"),
        (None, {"restore": "9"}, Exit.USAGE, r"--restore.*9.*9.*4"),
        (None, {"restore": "x"}, Exit.USAGE, r"--restore.*x.*'x'.*0-3,7"),
        ("saga", {"layers": "3"}, Exit.INCOMPATIBLE, r"layers\.3\.self_attn.*'saga'"),
        ("gla", {"layers": "3", "options": {"slots": 8}}, Exit.USAGE, r"slots.*gla"),
        (None, {"layers": "3", "options": {"slotz": 8}}, Exit.USAGE, r"slotz.*gsa"),
        ("gla", {"restore": "0"}, Exit.USAGE, r"--to.*gla.*--restore.*0"),
        (None, {"restore": "0", "options": {"slots": 8}}, Exit.USAGE, "--set"),
        ("gsa", {"layers": "3", "keep_softmax": "2"}, Exit.USAGE, r"--keep-softmax.*2.*--restore"),
        ("gsa", {"layers": "3", "keep_softmax": "auto:1"}, Exit.USAGE, "auto:1"),
        (
            "gsa",
            {"layers": "3", "dtype": "bfloat16"},
            Exit.USAGE,
            r"--dtype.*bfloat16.*float32",
        ),
    ],
)
def test_what_cannot_be_converted_again(
    place: Path, tmp_path: Path, mechanism: str | None, asked: dict[str, Any], code: Exit, message: str
) -> None:
    with pytest.raises(LinearizeError, match=message) as caught:
        again(place / "trained", tmp_path / "out", mechanism, **asked)
    assert caught.value.code == code
    assert not list(tmp_path.iterdir())


def test_a_source_has_nothing_to_restore_and_needs_a_mechanism(place: Path) -> None:
    with pytest.raises(LinearizeError, match=r"--restore.*1"):
        plan_conversion(str(place / "source"), "gsa", restore="1")
    for layers in ("all", "0-1"):
        with pytest.raises(LinearizeError, match=r"--to.*missing") as caught:
            plan_conversion(str(place / "source"), None, layers=layers)
        assert caught.value.code == Exit.USAGE


def test_layers_of_several_options_need_a_word(place: Path, tmp_path: Path) -> None:
    again(place / "trained", tmp_path / "more", layers="3", options={"slots": 4})
    assert [step.options["slots"] for step in read_plan(tmp_path / "more").steps] == [8, 8, 4]
    with pytest.raises(LinearizeError, match=r"have.*--to.*gsa.*--set.*key=value"):
        plan_conversion(str(tmp_path / "more"), None, layers="2")


def test_lora_that_lies_apart(place: Path, tmp_path: Path) -> None:
    recipe = make_recipe(
        tmp_path, place / "linear", stage("logit_kl", ["new", "lora"]), finish={"merge_lora": False, "verify": False}
    )
    train(recipe)
    final = str(tmp_path / "run" / "final")
    for use in (
        lambda: plan_conversion(final, None, layers="3"),
        lambda: export_onnx(final, tmp_path / "graph"),
        lambda: export_native(final, "auto", tmp_path / "engines"),
    ):
        with pytest.raises(LinearizeError, match=r"LoRA.*merge_lora=true") as caught:
            use()
        assert caught.value.code == Exit.INCOMPATIBLE
    shutil.rmtree(Path(final) / "adapter")
    with pytest.raises(LinearizeError, match=r"LoRA apart.*adapter does not load.*Download") as caught:
        load_any(final, None, device="cpu", dtype="keep", teacher=False, trust_remote_code=False)
    assert caught.value.code == Exit.INCOMPATIBLE


@pytest.mark.parametrize("which", ["model-mixers", "model-source"])
def test_weights_that_changed_since_they_were_written(place: Path, tmp_path: Path, which: str) -> None:
    folder = Path(shutil.copytree(place / "trained", tmp_path / "damaged"))
    shard = next(folder.glob(f"{which}*.safetensors"))
    values = load_file(shard)
    name = min(values)
    values[name] = values[name] + 1.0
    save_file(values, shard, {"format": "pt"})
    with pytest.raises(LinearizeError, match=rf"{shard.name}.*{MANIFEST}") as caught:
        again(folder, tmp_path / "out", layers="3")
    assert caught.value.code == Exit.CHECK_FAILED
    assert [file.name for file in tmp_path.iterdir()] == ["damaged"]


def test_edited_code_is_not_replaced_unseen(place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "trained", tmp_path / "edited"))
    with (folder / "gsa.py").open("a") as file:
        file.write("# edited\n")
    with pytest.raises(LinearizeError, match=r"gsa\.py.*--trust-remote-code"):
        again(folder, tmp_path / "out", layers="3")
    again(folder, tmp_path / "out", layers="3", trust_remote_code=True)
    assert "# edited" not in (tmp_path / "out" / "gsa.py").read_text()


def test_half_a_folder_is_not_converted_again(place: Path, tmp_path: Path) -> None:
    """What goes along must be there; of the Hub the card's pictures are not downloaded, and nobody needs them."""
    folder = tmp_path / "half"
    shutil.copytree(place / "trained", folder)
    manifest = json.loads((folder / "linearize.json").read_text())
    manifest["files"] += ["pictures/curve.png"]
    (folder / "linearize.json").write_text(json.dumps(manifest))
    assert plan_conversion(str(folder), "gsa", layers="3")[0].steps
    (folder / "generation_config.json").unlink()
    with pytest.raises(LinearizeError, match=r"generation_config.json.*linearize.json"):
        plan_conversion(str(folder), "gsa", layers="3")
