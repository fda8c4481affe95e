"""Options of single layers, and of a stage of a vision network, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Command, holds
from transformers import AutoModelForImageClassification, PvtConfig, PvtForImageClassification

from linearize.checkpoint.manifest import read_plan
from linearize.errors import Exit

PYRAMID = {
    "image_size": 32, "num_encoder_blocks": 2, "depths": [2, 2], "sequence_reduction_ratios": [1, 1],
    "hidden_sizes": [8, 16], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}  # fmt: skip


def test_options_of_the_layers_of_a_stage_are_set_on_the_command_line(
    tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage of PVT is a range of layers: layers 0 and 1 see a grid of 8x8, 2 and 3 one of 4x4."""
    monkeypatch.setattr("linearize.convert.verify", lambda *arguments: "not verified")
    PvtForImageClassification(PvtConfig(**PYRAMID)).save_pretrained(tmp_path / "pvt")
    given = ["--set", "rows=2", "--set", "columns=2", "--set", "rows@0-1=4", "--set", "columns@1=8", "--set", "dwc@3=3"]
    code, _, err = linearize("convert", tmp_path / "pvt", "--to", "mhla", *given, "-o", tmp_path / "linear")
    assert code == 0, err
    options = [step.options for step in read_plan(tmp_path / "linear").steps]
    assert [one["rows"] for one in options] == [4, 4, 2, 2]
    assert [one["columns"] for one in options] == [2, 8, 2, 2]
    assert [one["dwc"] for one in options] == [0, 0, 0, 3]
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "linear", trust_remote_code=True)
    assert model(pixel_values=torch.zeros(1, 3, 32, 32)).logits.isfinite().all()
    code, out, err = linearize("inspect", tmp_path / "linear")
    assert code == 0, err
    assert "dwc=3" in out + err

    for wrong, words in (
        ("rows@0-9=4", ("layers", "4-9")),
        ("rows@stage=4", ("layer", "number")),
        ("row@0=4", ("rows",)),
    ):
        code, _, err = linearize("convert", tmp_path / "pvt", "--to", "mhla", "--set", wrong, "-o", tmp_path / "no")
        assert code == Exit.USAGE
        assert holds(err, *words)
        assert not (tmp_path / "no").exists()
