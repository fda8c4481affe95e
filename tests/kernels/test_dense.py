"""Heads of dense tasks around a converted backbone: UperNet over Swin, and DETR, whose cross attention stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from linearize.convert import convert, plan_conversion
from linearize.verify.child.inputs import auto_class
from linearize_kernels.hf.attention_hooks import mixers_of

SWIN = {
    "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4, "patch_size": 4,
    "image_size": 64, "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "out_features": ["stage2"]}
SIDES = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (
    ("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip


def upernet() -> Any:
    config = transformers.UperNetConfig(
        backbone_config=transformers.SwinConfig(**SWIN), hidden_size=16, num_labels=3, use_auxiliary_head=False
    )
    return transformers.UperNetForSemanticSegmentation(config)


def detr() -> Any:
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=transformers.ResNetConfig(**RESNET),
        d_model=16,
        num_queries=5,
        num_labels=3,
        **SIDES,
    )
    return transformers.DetrForObjectDetection(config)


@pytest.mark.parametrize(
    ("make", "dropped", "sites", "shape"),
    [
        (upernet, ["score_bias"], [f"backbone.swin.encoder.layers.{n}.blocks.0.attention" for n in range(4)], (3, 64)),
        (detr, [], ["model.encoder.layers.0.self_attn"], (5, 4)),
    ],
)
def test_a_head_of_a_dense_task_keeps_its_outputs_over_a_converted_backbone(
    tmp_path: Path, make: Any, dropped: list[str], sites: list[str], shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    source = make().eval()
    source.save_pretrained(tmp_path / "source")
    planned = plan_conversion(str(tmp_path / "source"), "saga", allow_drop=dropped)
    assert [step.site.path for step in planned[0].linear] == sites
    convert(*planned, tmp_path / "linear", level="none", say=lambda text: None)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "linear", trust_remote_code=True)
    loader = getattr(transformers, auto_class(config))
    model = loader.from_pretrained(tmp_path / "linear", trust_remote_code=True).eval()
    assert sorted(mixers_of(model)) == sites
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        found, expected = model(pixel_values=pixels).logits, source(pixel_values=pixels).logits
        assert found.shape[1:3] == shape
        assert found.isfinite().all()
        assert not torch.equal(found, expected)
        with model.teacher():
            torch.testing.assert_close(model(pixel_values=pixels).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_converted_backbone_takes_its_place_in_a_segmenter(tmp_path: Path) -> None:
    """Converted alone, and put below a head by hand: AutoBackbone asks the Hub for whatever folder it is given."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    own = transformers.Dinov2Config(**sizes, out_features=["stage1", "stage2"])
    config = transformers.UperNetConfig(
        backbone_config=own, hidden_size=8, num_labels=3, use_auxiliary_head=False, pool_scales=[1]
    )
    segmenter = transformers.UperNetForSemanticSegmentation(config).eval()
    segmenter.backbone.save_pretrained(tmp_path / "backbone")
    planned = plan_conversion(str(tmp_path / "backbone"), "saga")
    convert(*planned, tmp_path / "linear", level="none", say=lambda text: None)
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = segmenter(pixel_values=pixels).logits
        segmenter.backbone = transformers.AutoModel.from_pretrained(tmp_path / "linear", trust_remote_code=True).eval()
        assert len(mixers_of(segmenter.backbone)) == 2
        assert not torch.equal(segmenter(pixel_values=pixels).logits, expected)
        with segmenter.backbone.teacher():
            torch.testing.assert_close(segmenter(pixel_values=pixels).logits, expected, rtol=1e-4, atol=1e-5)
