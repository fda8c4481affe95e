"""Models that see both sides: converted, saved, reloaded in a clean process, and what geometry and masks mean there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import SMALL_OPTIONS, small_config, small_model, survey
from conftest import TOLERANCE, relative_error
from encoders import ENCODERS, WITHOUT_GRID
from torch import Tensor

from linearize.convert import convert, plan_conversion
from linearize.inputs import auto_class, make_inputs, outcome, outputs, taller
from linearize.probe import probe
from linearize_kernels.seam import mixers_of

EXACT = TOLERANCE[torch.float32]
# They add a bias to their scores, which linear layers drop by consent.
BIASED = ("BeitForImageClassification", "SwinForImageClassification", "Swinv2ForImageClassification")
# One clean process serves several.
SHARES = [[*ENCODERS][start::3] for start in range(3)]
# Linear attention has nothing to do with the grid: those that differ in more than that.
PLAIN = ["SwinForImageClassification", "PvtForImageClassification", "SegformerForImageClassification", *WITHOUT_GRID]


def converted(folder: Path, name: str, mechanism: str = "saga", **arguments: Any) -> Any:
    """A small random model in `folder`, converted and loaded as anyone would, in eval mode."""
    if not (folder / "source").exists():
        small_model(name).save_pretrained(folder / "source")
    arguments = {"allow_drop": ["score_bias"] if name in BIASED else [], **arguments}
    options = {**SMALL_OPTIONS[mechanism], **arguments.pop("options", {})}
    plan = plan_conversion(str(folder / "source"), mechanism, options=options, **arguments)
    convert(*plan, folder / "linear", level="none", say=lambda text: None)
    return load(folder / "linear")


def load(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model, report = getattr(transformers, auto_class(config)).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def noisy(model: Any) -> Any:
    """With mixers that are not as they start: convolutions of zeros would hide a wrong grid."""
    with torch.no_grad():
        for mixer in mixers_of(model).values():
            for parameter in mixer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


# ---------------------------------------------------------------- families


@pytest.mark.parametrize("share", SHARES, ids=" ".join)
def test_families_convert_to_saga_and_reload_in_a_clean_process(tmp_path: Path, share: list[str]) -> None:
    """Logits of the source class with the same mixers, of another resolution too, and the teacher's of the source."""
    rows = survey(tmp_path, share, "saga")
    assert [(row["type"], row.get("reason")) for row in rows if row["stage"] != "converted"] == []
    for row in rows:
        assert row["checked"] == ["all", "hybrid"]
        assert row["consent"] == (["score_bias"] if row["type"] in BIASED else [])
        gradients_reach_every_mixer(load(tmp_path / f"{row['type']}.all"))


def gradients_reach_every_mixer(model: Any) -> None:
    given = make_inputs(model)
    values = model.train()(**given).values()
    sum(value.square().mean() for value in values if isinstance(value, Tensor) and value.requires_grad).backward()
    for path, mixer in mixers_of(model).items():
        for name, parameter in mixer.named_parameters():
            assert parameter.grad is not None, f"{path} {name}"
            assert parameter.grad.isfinite().all(), f"{path} {name}"


def test_families_convert_to_linear_attention(tmp_path: Path) -> None:
    rows = survey(tmp_path, PLAIN, "la")
    assert [(row["type"], row.get("reason")) for row in rows if row["stage"] != "converted"] == []


# ---------------------------------------------------------------- what mixers are given


@pytest.mark.parametrize(
    ("name", "grid", "prefix", "suffix"),
    [
        ("ViTForImageClassification", "patches", 1, 0),
        ("DeiTForImageClassification", "patches", 2, 0),
        ("Dinov2ForImageClassification", "patches", 1, 0),
        ("Dinov2WithRegistersForImageClassification", "patches", 5, 0),
        ("DINOv3ViTModel", "patches", 3, 0),
        ("BeitForImageClassification", "patches", 1, 0),
        ("CLIPVisionModel", "patches", 1, 0),
        ("SiglipVisionModel", "patches", 0, 0),
        ("YolosForObjectDetection", "patches", 1, 4),
        ("VideoMAEForVideoClassification", "patches", 0, 0),
        ("SwinForImageClassification", "window", 0, 0),
        ("Swinv2ForImageClassification", "window", 0, 0),
        ("PvtV2ForImageClassification", "arguments", 0, 0),
        ("SegformerForImageClassification", "arguments", 0, 0),
        ("WhisperForAudioClassification", "line", 0, 0),
        ("BertForMaskedLM", "line", 0, 0),
    ],
)
def test_the_probe_sees_where_tokens_lie(name: str, grid: str, prefix: int, suffix: int) -> None:
    found = probe(small_config(name), getattr(transformers, name))
    assert {(site.grid, site.prefix, site.suffix) for site in found.sites} == {(grid, prefix, suffix)}
    assert not any(site.causal for site in found.sites)


def test_a_class_token_of_the_last_stage_alone() -> None:
    found = probe(small_config("PvtForImageClassification"), transformers.PvtForImageClassification)
    assert [(site.grid, site.prefix, site.reduction) for site in found.sites] == [
        ("arguments", 0, ("sequences_reduction_ratio",)),
        ("arguments", 1, ()),
        ("arguments", 1, ()),
    ]


@pytest.mark.parametrize(
    ("name", "grid", "tall"),
    [
        ("ViTForImageClassification", ((4, 4), 1, 0), ((8, 4), 1, 0)),
        ("Dinov2WithRegistersForImageClassification", ((4, 4), 5, 0), ((8, 4), 5, 0)),
        ("DINOv3ViTModel", ((4, 4), 3, 0), ((8, 4), 3, 0)),
        ("SiglipVisionModel", ((4, 4), 0, 0), ((8, 4), 0, 0)),
        ("YolosForObjectDetection", ((4, 6), 1, 4), ((8, 6), 1, 4)),
        ("SwinForImageClassification", ((4, 4), 0, 0), ((4, 4), 0, 0)),
        ("SegformerForImageClassification", ((16, 16), 0, 0), ((32, 16), 0, 0)),
        ("VideoMAEForVideoClassification", ((2, 4, 4), 0, 0), None),
        ("BertForMaskedLM", ((24,), 0, 0), None),
    ],
)
def test_the_grid_is_that_of_the_input(tmp_path: Path, name: str, grid: Any, tall: Any) -> None:
    model, grids = converted(tmp_path, name), []
    mixer = next(iter(mixers_of(model).values()))
    mixer.register_forward_pre_hook(lambda m, args, kwargs: grids.append(kwargs["grid"]), with_kwargs=True)
    given = make_inputs(model)
    outcome(model, given)
    higher = taller(model, given)
    assert (higher is None) == (tall is None)
    if higher is not None:
        grids.clear()
        outcome(model, higher)
        assert grids == [tall]
        grids.clear()
        outcome(model, given)
    assert grids[-1:] == [grid]


def softmax(mixer: Any) -> Any:
    """Attention by softmax, told what a mixer is told."""

    def mix(q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, padding: Any, segments: Any, causal: bool, **_: Any) -> Any:
        k, v = (y.repeat_interleave(q.shape[2] // y.shape[2], 2) for y in (k, v))
        scores = torch.einsum("bthd,bihd->bhti", q, k) * mixer.site.scale
        if padding is not None:
            scores = scores.masked_fill(~padding[:, None, None, :], -torch.inf)
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        if segments is not None:
            scores = scores.masked_fill((segments[:, :, None] != segments[:, None, :])[:, None], -torch.inf)
        return torch.einsum("bhti,bihd->bthd", scores.softmax(-1).nan_to_num(), v), None

    return mix


@pytest.mark.parametrize("name", ENCODERS)
def test_softmax_in_place_of_each_mixer_is_the_original(tmp_path: Path, name: str) -> None:
    """So queries, keys, scales, padding and the regions of shifted windows reach it as they should."""
    original = small_model(name)
    with torch.no_grad():
        for key, parameter in original.named_parameters():
            if "position_bias" in key:  # which linear layers drop
                parameter.zero_()
        for module in original.modules():
            if hasattr(module, "continuous_position_bias_mlp"):  # 16 sigmoid of it: the same for all scores
                module.continuous_position_bias_mlp[-1].weight.zero_()
    original.save_pretrained(tmp_path / "source")
    # ModernBERT's other layers have sliding windows, which linear layers drop.
    model = converted(tmp_path, name, "la", keep_softmax="1,2" if "Modern" in name else "")
    expected = outputs(original)
    assert relative_error(outputs(model), expected) > 1e-3
    for mixer in mixers_of(model).values():
        mixer.forward = softmax(mixer)
    assert relative_error(outputs(model), expected) < 10 * EXACT
    higher = taller(original, make_inputs(original))
    if higher is not None:
        assert relative_error(outcome(model, higher), outcome(original, higher)) < 10 * EXACT
