"""Checkpoints in which the language model is a part: its layers become linear in place, the vision tower stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import clean_env
import pytest
import torch
import transformers
from architectures import OPTIONS, shrunk
from conftest import TOLERANCE, holds, relative_error, with_slow
from models import copied, load, logits, source_with_mixers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from linearize.checkpoint.provenance import check_code
from linearize.convert import convert, plan_conversion
from linearize.errors import LinearizeError
from linearize.verify.reload import FIRST, numbers, verify
from linearize_kernels.hf.attention_hooks import mixers_of

IMAGE = 100  # the token that stands for a piece of an image
COMPOSITES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", {"image_token_id": IMAGE, "mm_tokens_per_image": 4}),
    "llama4": ("Llama4ForConditionalGeneration", {}),
    "llava": ("LlavaForConditionalGeneration", {"image_token_id": IMAGE}),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", {}),
}
# head_dim 8, of which rotation uses halves: for time, height and width.
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def save_composite(folder: Path, name: str) -> None:
    """A small random model of text and images, saved."""
    class_name, changes = COMPOSITES[name]
    arguments = {**shrunk(CONFIG_MAPPING[name]), **changes}
    if name == "qwen2_vl":
        arguments["text_config"]["rope_parameters"] = MROPE
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**arguments)
    model = getattr(transformers, class_name)._from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # gemma3's projection of images starts at zero, which would hide them
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Text, with an image of four pieces in it where the model needs no processor for that."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (2, 20), generator=generator)
    if IMAGE not in COMPOSITES[name][1].values():
        return {"ids": ids}
    ids[:, 2:6] = IMAGE
    return {"ids": ids, "pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}


class Folders:
    """Source and converted folder of each composite, made once; one of them is verified in full."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, name: str, layers: str = "all") -> tuple[Path, Path]:
        if name == "llama4" and transformers.__version__ == "5.24.0":
            pytest.skip("transformers 5.24.0: Llama4ForConditionalGeneration without images raises AttributeError")
        place = self.root / f"{name}-{layers.replace(':', '-')}"
        if not place.exists():
            save_composite(place / "source", name)
            plan = plan_conversion(str(place / "source"), "gsa", layers=layers, options=OPTIONS)
            assert all("does not run on text" in line for line in plan[0].others)
            level = "full" if (name, layers) == ("gemma3", "all") else "none"
            convert(*plan, place / "linear", level=level, say=lambda text: None)
        return place / "source", place / "linear"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("composites"))


@pytest.mark.parametrize("layers", with_slow(["all", "every:2"], "all"))
@pytest.mark.parametrize("name", COMPOSITES)
def test_text_layers_become_linear_in_place(folders: Folders, name: str, layers: str) -> None:
    source, converted = folders(name, layers)
    original = getattr(transformers, COMPOSITES[name][0]).from_pretrained(source).eval()
    model, given = load(converted), inputs(name)
    assert len(mixers_of(model)) == (4 if layers == "all" else 2)
    assert all("language_model" in path for path in mixers_of(model))
    linear, softmax = logits(model, **given), logits(original, **given)
    assert relative_error(linear, logits(source_with_mixers(source, converted), **given)) < TOLERANCE[torch.float32]
    assert relative_error(linear, softmax) > 1e-2
    with model.teacher():
        assert torch.equal(logits(model, **given), softmax)
    if "pixel_values" in given:
        blank = {**given, "pixel_values": torch.zeros_like(given["pixel_values"])}
        assert relative_error(logits(model, **blank), linear) > 1e-3


def test_scripts_for_images_with_text_find_the_model(folders: Folders, tmp_path: Path) -> None:
    """Folders of before had no class for them, and stay trusted."""
    _, folder = folders("llava")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == "LinearizedLlavaForConditionalGeneration"
    earlier = copied(folder, tmp_path / "earlier")
    config = json.loads((folder / "config.json").read_text())
    entries = config["auto_map"]
    del entries["AutoModelForImageTextToText"]
    (earlier / "config.json").write_text(json.dumps(config))
    assert check_code(earlier, False)
    entries["AutoModelForImageTextToText"] = "other.Model"
    (earlier / "config.json").write_text(json.dumps(config))
    with pytest.raises(LinearizeError, match=r"config\.json.*--trust-remote-code"):
        check_code(earlier, False)


@pytest.mark.slow
def test_first_layers_prove_a_conversion(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tower for images stays whole, and so do its weights in the count."""
    source, folder = folders("gemma3", "every:2")
    plan, opened, _ = plan_conversion(str(source), "gsa", layers="every:2", options=OPTIONS)
    monkeypatch.setattr("linearize.verify.reload.free_memory", lambda: 3.99 * numbers([folder]))
    message = verify(folder, "auto", opened, plan, False)
    assert holds(message, "source", "mixers")
    assert message.endswith(FIRST.format(2))


@pytest.mark.slow
def test_clean_processes_agree(folders: Folders, tmp_path: Path) -> None:
    for name in COMPOSITES:
        clean_env.lay_out(tmp_path / name, *folders(name))
    assert len(clean_env.in_clean_process(tmp_path)) == len(COMPOSITES)
