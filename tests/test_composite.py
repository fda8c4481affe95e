"""Checkpoints in which the language model is a part: its layers become linear in place, the vision tower stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import OPTIONS, shrunk
from conftest import TOLERANCE, relative_error
from models import load, logits, source_with_mixers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from linearize.convert import convert, plan_conversion
from linearize_kernels.seam import mixers_of

IMAGE = 100  # the token that stands for a piece of an image
COMPOSITES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", {"image_token_id": IMAGE, "mm_tokens_per_image": 4}),
    "llama4": ("Llama4ForConditionalGeneration", {}),
    "llava": ("LlavaForConditionalGeneration", {"image_token_id": IMAGE}),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", {}),
}
# head_dim 8, of which rotation uses halves: for time, height and width.
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def save_composite(folder: Path, name: str) -> Any:
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
    return model


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Text, with an image of four pieces in it where the model needs no processor for that."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (2, 20), generator=generator)
    if IMAGE not in COMPOSITES[name][1].values():
        return {"ids": ids}
    ids[:, 2:6] = IMAGE
    return {"ids": ids, "pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}


@pytest.mark.parametrize("layers", ["all", "every:2"])
@pytest.mark.parametrize("name", COMPOSITES)
def test_text_layers_become_linear_in_place(tmp_path: Path, name: str, layers: str) -> None:
    original = save_composite(tmp_path / "source", name)
    plan = plan_conversion(str(tmp_path / "source"), "gsa", layers=layers, options=OPTIONS)
    assert all("does not run on text" in line for line in plan[0].others)
    level = "full" if layers == "all" else "none"
    convert(*plan, tmp_path / "linear", level=level, say=lambda text: None)
    model, given = load(tmp_path / "linear"), inputs(name)
    assert len(mixers_of(model)) == (4 if layers == "all" else 2)
    assert all("language_model" in path for path in mixers_of(model))
    linear, softmax = logits(model, **given), logits(original, **given)
    reference = source_with_mixers(tmp_path / "source", tmp_path / "linear")
    assert relative_error(linear, logits(reference, **given)) < TOLERANCE[torch.float32]
    assert relative_error(linear, softmax) > 1e-2
    with model.teacher():
        assert torch.equal(logits(model, **given), softmax)
    if "pixel_values" in given:
        blank = {**given, "pixel_values": torch.zeros_like(given["pixel_values"])}
        assert relative_error(logits(model, **blank), linear) > 1e-3
