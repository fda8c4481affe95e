"""Bidirectional models: converted, saved, reloaded in a clean process, and what geometry and masks mean there."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import PIL.Image
import pytest
import torch
import transformers
from architectures import SMALL_OPTIONS, small_config, small_model, survey
from conftest import TOLERANCE, Command, relative_error, with_slow
from encoders import ENCODERS, WITHOUT_GRID
from torch import Tensor

from linearize.convert import convert, plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.probe.inspection import inspect_model
from linearize.probe.probe import _shared, model_class_of, probe
from linearize.verify.child.inputs import auto_class, make_inputs, outcome, outputs, taller_images
from linearize_kernels.hf.attention_hooks import mixers_of
from linearize_kernels.layout import TokenLayout, token_padding, window_regions

EXACT = TOLERANCE[torch.float32]
# They add a bias to their scores, which linear layers drop by consent.
BIASED = ("BeitForImageClassification", "SwinForImageClassification", "Swinv2ForImageClassification")
# Of these, every second layer is converted as well.
HYBRIDS = ("ViTForImageClassification", "CLIPModel", "SwinForImageClassification", "SegformerForImageClassification")
HYBRIDS += ("BertForMaskedLM", "WhisperForConditionalGeneration")
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
# One clean process serves several; the first has one of images and one of text.
FIRST = ["ViTForImageClassification", "BertForMaskedLM"]
SHARES = [FIRST, *([name for name in ENCODERS if name not in FIRST][start::3] for start in range(3))]
# Linear attention has nothing to do with the grid: those that differ in more than that.
PLAIN = ["SwinForImageClassification", "PvtForImageClassification", "SegformerForImageClassification", *WITHOUT_GRID]

# MHLA has blocks of its own: registers, a film, a class token of the last stage alone, tokens after the patches, text.
BLOCKS = ["Dinov2WithRegistersForImageClassification", "VideoMAEForVideoClassification", "PvtForImageClassification"]
BLOCKS += ["YolosForObjectDetection", "BertForMaskedLM"]


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


@pytest.mark.parametrize("share", with_slow(SHARES, *SHARES[1:]), ids=" ".join)
def test_families_convert_to_saga_and_reload_in_a_clean_process(tmp_path: Path, share: list[str]) -> None:
    """Logits of the source class with the same mixers, of another resolution too, and the teacher's of the source."""
    rows = survey(tmp_path, share, "saga", HYBRIDS)
    assert [(row["type"], row.get("reason")) for row in rows if row["stage"] != "converted"] == []
    for row in rows:
        assert row["checked"] == (["all", "hybrid"] if row["type"] in HYBRIDS else ["all"])
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


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "names"), [("la", PLAIN), ("mhla", BLOCKS)], ids=["la", "mhla"])
def test_families_convert_to_other_mechanisms(tmp_path: Path, mechanism: str, names: list[str]) -> None:
    rows = survey(tmp_path, names, mechanism, HYBRIDS)
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
        ("ASTForAudioClassification", "patches", 2, 0),
        ("BertForMaskedLM", "line", 0, 0),
    ],
)
def test_the_probe_sees_where_tokens_lie(name: str, grid: str, prefix: int, suffix: int) -> None:
    found = probe(small_config(name), getattr(transformers, name))
    assert {(site.grid, site.prefix, site.suffix) for site in found.sites} == {(grid, prefix, suffix)}
    assert not any(site.causal for site in found.sites)


@pytest.mark.parametrize("model_type", ["bart", "t5"])
def test_attention_to_what_an_encoder_made_keeps_softmax(model_type: str) -> None:
    """Also where a call gives the decoder as many tokens as the encoder."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_layers": 1, "num_heads": 2}
    config = transformers.AutoConfig.for_model(model_type, vocab_size=97, **sizes)
    found = probe(config, transformers.AutoModelForSeq2SeqLM._model_mapping[type(config)])
    assert ["decoder" in site.path for site in found.sites] == [False]
    assert {other.reason for other in found.others} == {
        "is in a decoder that reads an encoder",
        "takes keys from elsewhere",
    }


def test_a_decoder_that_does_not_say_so_looks_back() -> None:
    """LED computes its softmax itself, and neither its modules nor its config say which way it looks."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "attention_window": [4]}
    config = transformers.LEDConfig(vocab_size=97, encoder_attention_heads=2, decoder_attention_heads=2, **sizes)
    with pytest.raises(LinearizeError, match=r"decoder.layers.0.self_attn"):
        probe(config, transformers.LEDModel)


def test_a_reduction_is_known_by_its_ratio() -> None:
    found = probe(small_config("glpn"), transformers.GLPNModel)
    assert ("sr_ratio",) in {site.reduction for site in found.sites}
    assert found.others == ()


@pytest.mark.parametrize("name", ["MoonshineModel", "NllbMoeModel"])
def test_a_decoder_that_says_otherwise_looks_back(name: str) -> None:
    """It says that its attention is not causal, and its mask that it is."""
    head = getattr(transformers, name)
    found = probe(small_config(head.config_class.model_type), head)
    assert all(site.path.startswith("encoder.") for site in found.sites)
    assert "is in a decoder that reads an encoder" in {other.reason for other in found.others}


def test_a_decoder_alone_that_says_otherwise_is_refused() -> None:
    config = small_config("bigbird_pegasus")
    config.is_encoder_decoder = False
    with pytest.raises(LinearizeError, match=r"decoder\.layers\.0\.self_attn"):
        probe(config, transformers.BigBirdPegasusForCausalLM)


def test_layers_that_share_their_weights_share_a_mixer_where_it_keeps_no_state() -> None:
    path = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention"
    for changes, shared in (({}, 4), ({"causal": True}, 0), ({"keys": 5}, 0)):
        once = {"path": path, "causal": False, "keys": 8, "queries": 8, "grid": "line", "prefix": 0, "suffix": 0}
        records = [once | {"extras": ()} | (changes if number < 2 else {}) for number in range(4)]
        assert _shared(records) == Counter({path: shared} if shared else {})
    found = probe(small_config("AlbertForMaskedLM"), transformers.AlbertForMaskedLM)
    assert [site.path for site in found.sites] == [path]


def test_an_encoder_of_images_before_a_decoder_of_text() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = transformers.ViTConfig(**sizes, image_size=48, patch_size=8)
    text = transformers.BertConfig(vocab_size=97, **sizes, is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(images, text)
    (site,) = probe(config, transformers.VisionEncoderDecoderModel).sites
    assert (site.path, site.grid, site.prefix) == ("encoder.layers.0.attention", "patches", 1)


def test_what_there_are_no_inputs_for_is_named() -> None:
    config = transformers.VJEPA2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(LinearizeError, match=r"VJEPA2Model.*pixel_values_videos") as refused:
        probe(config, transformers.VJEPA2Model)
    assert refused.value.code == Exit.INCOMPATIBLE


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("DebertaModel", RELATIVE, "what it computes itself has another form: scores go through gather"),
        (
            "DebertaV2Model",
            RELATIVE,
            "what it computes itself has another form: scores go through gather .* seen: DisentangledSelfAttention",
        ),
        ("SamVisionModel", {}, "computes no softmax over keys of its own.* seen: SamVisionSdpaAttention"),
    ],
)
def test_attention_of_another_form_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    head = getattr(transformers, name)
    config = small_config(head.config_class.model_type)
    config.update(changes)
    with pytest.raises(LinearizeError, match="no attention found: " + name + ".*" + message):
        probe(config, head)


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
    mixer.register_forward_pre_hook(lambda m, args: grids.append(args[4].grid))
    given = make_inputs(model)
    outcome(model, given)
    higher = taller_images(model, given)
    assert (higher is None) == (tall is None)
    if higher is not None:
        grids.clear()
        outcome(model, higher)
        assert grids == [tall]
        grids.clear()
        outcome(model, given)
    assert grids[-1:] == [grid]


def test_tokens_that_are_not_those_of_the_grid_are_told(tmp_path: Path) -> None:
    model = converted(tmp_path, "ViTForImageClassification")
    model.vit.layers[1].register_forward_pre_hook(lambda module, args: (args[0][:, :-1], *args[1:]))
    with pytest.raises(RuntimeError, match=r"layers\.1\.attention.*16.*Grid\(size=\(4.*4.*prefix=1"):
        outcome(model, make_inputs(model))


def softmax(mixer: Any) -> Any:
    """Attention by softmax, told what a mixer is told."""

    def mix(q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, state: Any = None) -> Any:
        padding, segments, causal, *_ = layout
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


# One of each way in which tokens lie, and of each modality. The others differ from these in little but their names, and
# the surveys above compare their logits with those of the source class.
UNLIKE = {*FIRST, "Dinov2WithRegistersForImageClassification", "CLIPModel", "SwinForImageClassification"}
UNLIKE |= {"PvtForImageClassification", "SegformerForImageClassification", "VideoMAEForVideoClassification"}
UNLIKE |= {"BeitForImageClassification", "WhisperForConditionalGeneration"}
UNLIKE |= {"ModernBertForMaskedLM", "LayoutLMForMaskedLM"}


@pytest.mark.parametrize("name", [name for name in ENCODERS if name in UNLIKE])
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
    higher = taller_images(original, make_inputs(original))
    if higher is not None:
        assert relative_error(outcome(model, higher), outcome(original, higher)) < 10 * EXACT


def test_regions_of_a_shifted_window_are_those_of_its_mask() -> None:
    block = small_model("SwinForImageClassification").swin.encoder.layers[0].blocks[1]
    mask = block.get_attn_mask(8, 12, torch.float32, torch.device("cpu"))
    regions = window_regions(mask, 3 * len(mask))
    assert regions.shape == (3 * 6, 16)
    assert torch.equal(regions[:, :, None] == regions[:, None, :], (mask == 0).repeat(3, 1, 1))
    assert regions.max() == 3
    assert window_regions(None, 4) is None


def test_regions_do_not_meet(tmp_path: Path) -> None:
    """What is changed in one region of a shifted window shows in that region alone."""
    model, seen = noisy(converted(tmp_path, "SwinForImageClassification")), []
    mixer = [*mixers_of(model).values()][1]

    mixer.register_forward_pre_hook(lambda module, args: seen.append(args))
    outcome(model, make_inputs(model))
    *inputs, layout = seen[0]
    row = int(layout.segments.amax(1).argmax())  # of a window with several regions
    first = layout.segments[row] == 0
    assert not first.all()
    changed = [tensor.clone() for tensor in inputs]
    for tensor in changed[1:]:
        tensor[row, first] += 1.0
    before, after = (mixer(*given, layout)[0][row] for given in (inputs, changed))
    assert torch.equal(before[~first], after[~first])
    assert not torch.equal(before[first], after[first])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("mechanism", ["saga", "la", "mhla"])
def test_padding_of_text_changes_nothing(tmp_path: Path, mechanism: str, backend: str) -> None:
    model = noisy(converted(tmp_path, "BertForMaskedLM", mechanism, layers="every:2"))
    model.set_attn_implementation(backend)
    ids = make_inputs(model, 2, 20)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask).logits
        assert relative_error(padded[1, :13], model(input_ids=ids[1:, :13]).logits[0]) < EXACT
        assert relative_error(padded[0], model(input_ids=ids[:1]).logits[0]) < EXACT


@pytest.mark.parametrize("name", ["BlipModel", "BlipTextModel"])
def test_masks_that_are_moved_to_where_scores_are(tmp_path: Path, name: str) -> None:
    head = getattr(transformers, name)
    torch.manual_seed(11)
    original = head(small_config(head.config_class.model_type)).eval()
    original.save_pretrained(tmp_path / "source")
    model = converted(tmp_path, name, "la")
    for mixer in mixers_of(model).values():
        mixer.forward = softmax(mixer)
    given = make_inputs(original)
    mask = torch.ones_like(given["input_ids"])
    mask[1, 10:] = 0
    assert relative_error(outcome(model, given, mask), outcome(original, given, mask)) < 10 * EXACT


# ---------------------------------------------------------------- what is refused, and what is chosen


@pytest.mark.parametrize("mechanism", ["saga", "la", "mhla"])
def test_padding_in_front_of_text_changes_nothing_where_it_is_rotated(tmp_path: Path, mechanism: str) -> None:
    """Features see how far queries and keys are rotated, so tokens have the places that they have alone."""
    model = noisy(converted(tmp_path, "ModernBertForMaskedLM", mechanism))
    ids = torch.randint(1, model.config.vocab_size, (2, 20))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask).logits
        alone = [model(input_ids=row).logits[0] for row in (ids[:1], ids[1:, 7:])]
    assert relative_error(padded[0], alone[0]) < EXACT
    assert relative_error(padded[1, 7:], alone[1]) < EXACT


def test_padding_is_read_from_masks_of_one_row_and_of_any_low_number() -> None:
    real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    for low in (-1e4, torch.finfo(torch.float32).min, -torch.inf):
        row = torch.where(real, 0.0, low)[:, None, None]
        for mask in (row, row.expand(-1, -1, 5, -1), row == 0):
            assert torch.equal(token_padding(mask, 2, 5, 0), real)


def reason(folder: Path, name: str, mechanism: str, **arguments: Any) -> str:
    """Why a conversion is refused, with exit code 3; from the config alone."""
    config = small_config(name)
    config.architectures = [name] if name[0].isupper() else None  # else the class of the model type
    config.save_pretrained(folder)
    with pytest.raises(LinearizeError) as caught:
        plan_conversion(str(folder), mechanism, weights=False, **arguments)
    assert caught.value.code == Exit.INCOMPATIBLE
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "mechanism", "message"),
    [
        ("llama", "saga", r"layers\.0\.self_attn is causal; 'saga' is not\. Choose .*gsa.* or "),
        ("clip_text_model", "saga", r"self_attn is causal; 'saga' is not"),
        ("BertForMaskedLM", "gsa", r"is bidirectional; 'gsa' is not\. Choose la or mhla or saga"),
        ("ViTForImageClassification", "retnet", r"is bidirectional; 'retnet' is not"),
        ("ViTForImageClassification", "sla", r"is bidirectional; 'sla' is not\. Choose la or mhla or saga"),
        (
            "timesformer",
            "saga",
            r"its grid is not known: its \d+ tokens are not the 2x2 patches of embeddings.* before .*\. Choose la",
        ),
        (
            "Siglip2VisionModel",
            "saga",
            r"its grid is not known: each image .* \(NaFlex\)\. Choose la",
        ),
        ("ViTMAEModel", "saga", r"its tokens are shuffled or left out \(masked\).*Choose la"),
        ("HieraForImageClassification", "saga", r"its grid is not known: its \d+ tokens are not the .*Choose la"),
        ("SwinForImageClassification", "mhla", r"not fit 'mhla': windows have too few .* own\. Choose la or saga$"),
        ("SwinForImageClassification", "saga", r"score_bias at layers 0-3: .* Pass --allow-drop score_bias"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, name: str, mechanism: str, message: str) -> None:
    assert re.search(message, reason(tmp_path, name, mechanism))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ViTForImageClassification", {"frames": "3"}, "frames=3 has no effect in this model: images have no frames"),
        ("PvtV2ForImageClassification", {"frames": "3"}, "images have no frames"),
        ("ViTForImageClassification", {"rows": "2", "blocks": "8"}, "blocks=8 has no effect .* frames x rows x col"),
        ("VideoMAEForVideoClassification", {"frames": "3"}, None),
        ("BertForMaskedLM", {"rows": "3"}, "rows=3 has no effect in this model: tokens on a line are cut into `bl"),
        ("llama", {"columns": "3"}, "columns=3 has no effect in this model: causal attention has blocks of block_size"),
    ],
)
def test_options_without_effect_are_refused(
    tmp_path: Path, name: str, options: dict[str, str], message: str | None
) -> None:
    config = small_config(name)
    config.architectures = [name] if name[0].isupper() else None
    config.save_pretrained(tmp_path)
    if message is None:
        assert plan_conversion(str(tmp_path), "mhla", weights=False, options=options)[0].steps
        return
    with pytest.raises(LinearizeError, match=message) as refused:
        plan_conversion(str(tmp_path), "mhla", weights=False, options=options)
    assert refused.value.code == Exit.USAGE


def test_blocks_of_some_layers(tmp_path: Path) -> None:
    """As VLT has them, 7 x 7 and 4 x 4 blocks; an option that some layers cannot use is refused for those alone."""
    name = "ViTForImageClassification"
    model = converted(tmp_path, name, "mhla", options={"rows@0": 2, "columns@0": 3})
    assert [mixer.block_logits.shape[-1] for mixer in mixers_of(model).values()][:2] == [7, 17]
    assert model(**make_inputs(model)).logits.isfinite().all()
    with pytest.raises(LinearizeError, match=r"blocks@0=4.*model"):
        plan_conversion(str(tmp_path / "source"), "mhla", options={"blocks@0": 4})


def test_stages_that_pool_their_queries_are_named(tmp_path: Path) -> None:
    small_model("HieraForImageClassification").save_pretrained(tmp_path)
    plan = plan_conversion(str(tmp_path), "la")[0]
    assert any("pools its queries, so that fewer tokens come out than go in" in line for line in plan.others)


def test_a_reduction_of_keys_is_kept_or_dropped(tmp_path: Path) -> None:
    name = "PvtForImageClassification"
    message = reason(tmp_path / "config", name, "saga", options={"sr": "keep"})
    assert re.search(r"sr=keep: .* fewer keys than queries, and 'saga' needs one for each", message)
    lengths: dict[str, Any] = {}
    for mechanism, sr in (("saga", None), ("la", None), ("la", "drop")):
        place = tmp_path / f"{mechanism}-{sr}"
        model = converted(place, name, mechanism, options={} if sr is None else {"sr": sr})
        mixer = next(iter(mixers_of(model).values()))
        assert mixer.site.sr == (sr or ("drop" if mechanism == "saga" else "keep"))
        seen: list[Any] = []
        mixer.register_forward_pre_hook(lambda m, args, seen=seen: seen.append((args[0].shape[1], args[1].shape[1])))
        outcome(model, make_inputs(model))
        lengths[f"{mechanism} {sr}"] = seen[0]
        with model.teacher():
            assert torch.equal(outputs(model), outputs(small_model(name)))
    assert lengths == {"saga None": (64, 64), "la None": (64, 16), "la drop": (64, 64)}
    with pytest.raises(LinearizeError, match="sr=both"):
        plan_conversion(str(tmp_path / "la-None" / "source"), "la", options={"sr": "both"})
    small_model("ViTForImageClassification").save_pretrained(tmp_path / "vit")
    with pytest.raises(LinearizeError, match=r"attention.*computes"):
        plan_conversion(str(tmp_path / "vit"), "la", options={"sr": "drop"})


def test_the_plan_names_what_is_lost(tmp_path: Path) -> None:
    for name in ("BeitForImageClassification", "PvtForImageClassification"):
        small_model(name).save_pretrained(tmp_path / name)
    plan = plan_conversion(str(tmp_path / "BeitForImageClassification"), "la", allow_drop=["score_bias"])[0]
    assert plan.notes == ["score_bias: the source adds a bias to its scores, the linear layer does not (layers 0-3)"]
    plan = plan_conversion(str(tmp_path / "PvtForImageClassification"), "saga")[0]
    assert [note.partition(":")[0] for note in plan.notes] == ["reduction"]
    assert not any(plan.cache_bytes(4096).values())


def test_of_two_towers_a_mechanism_takes_the_one_that_it_fits(tmp_path: Path) -> None:
    small_model("CLIPModel").save_pretrained(tmp_path)
    towers = {}
    for mechanism in ("saga", "gsa", "la"):
        plan = plan_conversion(str(tmp_path), mechanism)[0]
        towers[mechanism] = sorted({step.site.path.partition(".")[0] for step in plan.steps})
        assert len({step.site.layer for step in plan.steps}) == len(plan.steps)
    assert towers == {"saga": ["vision_model"], "gsa": ["text_model"], "la": ["text_model", "vision_model"]}
    with pytest.raises(LinearizeError, match=r"--layers.*5.*CLIPAttention.*'saga'"):
        plan_conversion(str(tmp_path), "saga", layers="5")


def test_towers_that_both_count_from_0_are_counted_on() -> None:
    found = probe(small_config("blip"), transformers.BlipModel)
    assert [site.layer for site in found.sites] == list(range(8))
    assert [site.grid for site in found.sites] == ["patches"] * 4 + ["line"] * 4


@pytest.mark.parametrize(
    ("kind", "ways"),
    [("blip", {"patches": False, "line": False}), ("align", {"line": False}), ("layoutlm", {"line": False})],
)
def test_attention_that_does_not_say_so_is_not_causal(kind: str, ways: dict[str, bool]) -> None:
    """Of models that write no text: those that do look back, as Doge, which says nothing either."""
    config = transformers.AutoConfig.for_model(kind)
    found = probe(config, model_class_of(config))
    assert {site.grid: site.causal for site in found.sites} == ways
    assert all(site.causal for site in probe(small_config("doge"), transformers.DogeForCausalLM).sites)


def test_inspect_says_what_fits(tmp_path: Path) -> None:
    config = small_config("ViTMAEModel")
    config.architectures = ["ViTMAEModel"]
    config.save_pretrained(tmp_path)
    fits = {fit.mechanism: fit for fit in inspect_model(str(tmp_path)).fits}
    assert fits["la"].layers == (0, 1, 2, 3)
    assert fits["saga"].layers == ()
    assert "shuffled" in fits["saga"].obstacles[0][1]


def test_a_window_is_one_of_text(tmp_path: Path) -> None:
    small_model("ViTForImageClassification").save_pretrained(tmp_path)
    with pytest.raises(LinearizeError, match=r"window=64.*bidirectional"):
        plan_conversion(str(tmp_path), "la", options={"window": 64})


# ---------------------------------------------------------------- saved models


PROCESSOR = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}, "do_normalize": False}


def test_an_image_classifier_works_in_a_pipeline(tmp_path: Path) -> None:
    """With the processor and the labels of its source, and as a bare model too."""
    original = small_model("ViTForImageClassification")
    original.config.id2label, original.config.label2id = {0: "cat", 1: "dog"}, {"cat": 0, "dog": 1}
    original.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    try:
        transformers.AutoImageProcessor.from_pretrained(tmp_path / "source")
    except ImportError as error:  # of transformers 5.17, for torchvision
        pytest.skip(str(error))
    model = converted(tmp_path, "ViTForImageClassification")
    folder = tmp_path / "linear"
    assert json.loads((folder / "preprocessor_config.json").read_text()) == PROCESSOR
    assert model.config.id2label == {0: "cat", 1: "dog"}
    image = PIL.Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=numpy.uint8))
    classify = transformers.pipeline("image-classification", model=str(folder), trust_remote_code=True)
    found = {row["label"]: row["score"] for row in classify(image)}
    processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        expected = model(**processor(image, return_tensors="pt")).logits.softmax(-1)[0]
    assert [found["cat"], found["dog"]] == pytest.approx(expected.tolist(), rel=1e-4)
    bare = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    pixels = make_inputs(model)["pixel_values"]
    with torch.no_grad():
        states = model(pixels, output_hidden_states=True).hidden_states
        assert relative_error(bare(pixels, output_hidden_states=True).hidden_states[-1], states[-1]) < EXACT


@pytest.mark.parametrize(
    ("name", "of", "output"),
    [
        ("CLIPVisionModelWithProjection", "CLIPVisionModel", "image_embeds"),
        ("Dinov2Backbone", "Dinov2ForImageClassification", "feature_maps"),
        ("SiglipTextModel", "siglip_text_model", "pooler_output"),
    ],
)
def test_what_no_class_for_a_task_serves_is_loaded_by_automodel(
    tmp_path: Path, name: str, of: str, output: str
) -> None:
    head = getattr(transformers, name)
    head(small_config(of)).save_pretrained(tmp_path / "source")
    model = converted(tmp_path, name)
    assert model.config.auto_map["AutoModel"].endswith(f".Linearized{name}")
    assert "AutoModelForCausalLM" not in model.config.auto_map
    assert output in model(**make_inputs(model))
    assert relative_error(outputs(noisy(model)), outputs(head.from_pretrained(tmp_path / "source"))) > 1e-3
    assert "model = AutoModel.from" in (tmp_path / "linear" / "README.md").read_text()


@pytest.mark.parametrize("name", ["ViTForImageClassification", "ElectraForMaskedLM"])
def test_copies_and_backends_compute_the_same(tmp_path: Path, name: str) -> None:
    model = noisy(converted(tmp_path, name))
    expected = outputs(model)
    model.save_pretrained(tmp_path / "again")  # by transformers, under the names of its checkpoints
    assert relative_error(outputs(load(tmp_path / "again")), expected) < EXACT
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    assert relative_error(outputs(other), expected) < EXACT
    with other.teacher():
        assert relative_error(outputs(other), outputs(small_model(name))) < EXACT
    assert torch.equal(outputs(model), expected)
    with pytest.raises(ValueError, match="no attention maps"):
        model(**make_inputs(model), output_attentions=True)


@pytest.mark.parametrize(
    ("name", "natives"),
    [
        ("ViTForImageClassification", ["ViTForImageClassification", "ViTModel"]),
        ("CLIPModel", ["CLIPModel", "CLIPVisionModel", "CLIPTextModelWithProjection"]),
        ("BertForMaskedLM", ["BertForMaskedLM", "BertModel"]),
    ],
)
def test_the_native_classes_refuse_a_converted_folder(tmp_path: Path, name: str, natives: list[str]) -> None:
    """They would run softmax, and only report the mixers as unused."""
    model = converted(tmp_path, name, "la")
    model.save_pretrained(tmp_path / "again")
    for folder in ("linear", "again"):
        for native in natives:
            with pytest.raises(ValueError, match="layers"):
                getattr(transformers, native).from_pretrained(tmp_path / folder)
    assert relative_error(outputs(load(tmp_path / "again")), outputs(model)) < EXACT


def test_maps_of_attention_come_as_the_error_says(tmp_path: Path) -> None:
    model = converted(tmp_path, "ViTForImageClassification")
    inputs = make_inputs(model)
    with pytest.raises(ValueError, match=r"model.set_attn_implementation.'eager'"):
        model(**inputs, output_attentions=True)
    model.set_attn_implementation("eager")
    with model.teacher(), torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    original = small_model("ViTForImageClassification")
    original.set_attn_implementation("eager")
    with torch.no_grad():
        expected = original(**inputs, output_attentions=True).attentions
    assert len(maps) == len(expected) == 4
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(maps, expected, strict=True))


@pytest.mark.parametrize("kind", ["ViT", "Pvt", "Swin"])
def test_checkpointing_changes_no_gradient(tmp_path: Path, kind: str) -> None:
    found, name = [], f"{kind}ForImageClassification"
    for checkpointing in (False, True):
        torch.manual_seed(5)
        model = noisy(converted(tmp_path / str(checkpointing), name))
        model.train()
        for module in model.modules():
            if hasattr(module, "drop_prob"):  # of whole branches, as chance has it
                module.drop_prob = 0.0
        if checkpointing and model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model(**make_inputs(model)).logits.square().sum().backward()
        found.append({key: parameter.grad for key, parameter in model.named_parameters()})
    for key, gradient in found[0].items():
        assert (gradient is None) == (found[1][key] is None), key
        assert gradient is None or relative_error(found[1][key], gradient) < EXACT, key


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        pytest.param("ViTForImageClassification", "saga", marks=pytest.mark.slow),
        pytest.param("DeiTForImageClassification", "mhla", marks=pytest.mark.slow),
        pytest.param("SegformerForImageClassification", "saga", marks=pytest.mark.slow),
    ],
)
def test_it_compiles_as_one_graph(tmp_path: Path, name: str, mechanism: str) -> None:
    """The grid is noted, blocks are laid out, and the reduction of keys is left out, without a break; teacher() has a
    graph of its own, whichever is first."""
    model = noisy(converted(tmp_path, name, mechanism))
    given = make_inputs(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    student = model(**given).logits
    with model.teacher():
        teacher = model(**given).logits
    assert relative_error(student, teacher) > 1e-3
    with torch.no_grad():
        for _ in range(2):
            with model.teacher():
                assert relative_error(compiled(**given).logits, teacher) < EXACT
            assert relative_error(compiled(**given).logits, student) < EXACT


@pytest.mark.parametrize("name", ["SwinForImageClassification", "PvtForImageClassification", "BertForMaskedLM"])
def test_attention_transfer_keeps_the_teachers_stream(tmp_path: Path, name: str) -> None:
    model, original = converted(tmp_path, name), small_model(name)
    heard: list[int] = []

    class Listener:
        own_call = False

        def on_layer(self, mixer: Any, inputs: Any, o: Tensor, target: Tensor, layout: Any) -> None:
            if not mixer.reductions:
                assert o.shape == target.shape
                (o - target).square().mean().backward()
                heard.append(mixer.site.layer)

        def student(self, module: Any) -> Any:
            return contextlib.nullcontext()

        def compare(self, mixer: Any, y: Tensor, target: Tensor) -> None:
            assert y.shape == target.shape
            (y - target).square().mean().backward()
            heard.append(mixer.site.layer)

    with model.transferring(Listener()):
        stream = outputs(model)
    assert relative_error(stream, outputs(original)) < EXACT
    assert sorted(heard) == [mixer.site.layer for mixer in mixers_of(model).values()]
    for path, mixer in mixers_of(model).items():
        assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters()), path


@pytest.mark.slow
def test_verify_and_the_card_of_an_image_model(tmp_path: Path, linearize: Command) -> None:
    small_model("DeiTForImageClassification").save_pretrained(tmp_path / "source")
    code, out, _ = linearize("convert", tmp_path / "source", "--to", "saga", "-o", tmp_path / "linear", "--json")
    assert code == 0
    assert "logits equal" in json.loads(out)["verified"]
    code, out, err = linearize("verify", tmp_path / "linear", "--strict", "--json")
    assert code == 0, err
    names = [check["name"] for check in json.loads(out)["checks"]]
    assert names[-4:] == ["finite outputs", "rows alone", "another size", "trust"]
    card = (tmp_path / "linear" / "README.md").read_text()
    assert "AutoImageProcessor, AutoModelForImageClassification" in card
    assert "pipeline_tag: image-classification" in card
    assert "decode state" not in card
    code, _, err = linearize("generate", tmp_path / "linear", "a text")
    assert code == Exit.INCOMPATIBLE
    assert "writes no text" in err
