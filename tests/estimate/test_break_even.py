"""Where a linear encoder is faster than softmax, and who says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Command
from transformers import BertConfig, BertModel, SwinConfig, ViTConfig, ViTModel

from linearize.convert import plan_conversion, slower
from linearize.estimate.break_even import PAYS, break_even_tokens

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def vit(folder: Path, pixels: int) -> Path:
    ViTModel(ViTConfig(**SMALL, image_size=pixels, patch_size=16)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("where", PAYS)
@pytest.mark.parametrize("mechanism", ["la", "mhla", "saga"])
def test_the_ratio_passes_1_where_it_breaks_even(mechanism: str, where: str) -> None:
    points = PAYS[where][mechanism]
    most = break_even_tokens(mechanism, where)
    before = max(tokens for tokens, ratio in points if ratio < 1)
    after = min(tokens for tokens, ratio in points if ratio >= 1)
    assert before < most < after
    assert most % 100 == 0


def test_short_images_and_texts_are_faster_with_softmax(tmp_path: Path) -> None:
    note = slower(*plan_conversion(str(vit(tmp_path / "small", 224)), "saga"))
    assert "reads 197 tokens at most" in note
    assert "faster on a CPU and an H200: saga is faster from about 600 on a CPU and 2,300 on an H200" in note
    assert "faster on an H200: la" in slower(*plan_conversion(str(vit(tmp_path / "middle", 512)), "la"))
    assert slower(*plan_conversion(str(vit(tmp_path / "large", 1280)), "saga")) == ""
    BertModel(BertConfig(**SMALL, vocab_size=30, max_position_embeddings=512)).save_pretrained(tmp_path / "bert")
    assert "reads 512 tokens at most" in slower(*plan_conversion(str(tmp_path / "bert"), "mhla"))


def test_windows_and_causal_models_have_no_note(tmp_path: Path, zoo: object) -> None:
    from models import save_source
    from transformers import SwinModel

    sizes = {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2, "image_size": 16, "patch_size": 4}
    SwinModel(SwinConfig(**sizes)).save_pretrained(tmp_path / "swin")
    assert slower(*plan_conversion(str(tmp_path / "swin"), "la", allow_drop=["score_bias"])) == ""
    assert slower(*plan_conversion(str(save_source(tmp_path / "llama")), "la")) == ""


def test_convert_and_estimate_say_it(tmp_path: Path, linearize: Command) -> None:
    folder = vit(tmp_path / "vit", 224)
    assert "softmax reads them faster" in "".join(linearize("convert", folder, "--to", "saga", "--dry-run")[1:])
