"""Sources in FP8 with block scales are converted as float models; other quantized ones say how to make one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import holds, with_slow
from models import convert_folder, load, save_source
from safetensors.torch import load_file, save_file

from linearize.checkpoint.source import quantized
from linearize.convert import plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.verify.reload import CUT, FIRST, numbers, verify

BLOCK = (16, 32)
SCHEME = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*BLOCK]}


def in_fp8(
    folder: Path, split: bool = False, block: tuple[int, int] = BLOCK, **changes: Any
) -> dict[str, torch.Tensor]:
    """Turn a saved model's linear layers into FP8 with scales, in a file of their own if `split`; returns the float
    weights that they stand for."""
    path = folder / "model.safetensors"
    weights, scales, expected = load_file(path), {}, {}
    for name, value in list(weights.items()):
        if not name.endswith("proj.weight"):
            continue
        rows, columns = (math.ceil(size / part) for size, part in zip(value.shape, block, strict=True))
        padded = torch.zeros(rows * block[0], columns * block[1])
        padded[: value.shape[0], : value.shape[1]] = value
        blocks = padded.view(rows, block[0], columns, block[1])
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        whole = (codes.float() * scale[:, None, :, None]).view(padded.shape)
        expected[name] = whole[: value.shape[0], : value.shape[1]]
        weights[name] = codes.view(padded.shape)[: value.shape[0], : value.shape[1]].contiguous()
        scales[f"{name}_scale_inv"] = scale
    if split:
        path.unlink()
        files = {"model-00001-of-00002.safetensors": weights, "model-00002-of-00002.safetensors": scales}
        index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        files = {path.name: weights | scales}
    for file, held in files.items():
        save_file(held, folder / file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    scheme = SCHEME | {"weight_block_size": [*block]} | changes
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "quantization_config": scheme}))
    return expected


@pytest.mark.parametrize("split", with_slow([False, True], False), ids=["one file", "scales in another"])
def test_weights_are_dequantised_while_converting(tmp_path: Path, split: bool) -> None:
    source = save_source(tmp_path / "source", hidden_size=48, intermediate_size=40)
    expected = in_fp8(source, split)
    folder = convert_folder(source, tmp_path / "linear", level="full")  # which compares no logits of cut blocks
    found: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        found |= load_file(shard)
    assert not [name for name in found if name.endswith("_scale_inv")]
    assert len(expected) == 4 * 7
    for name, value in expected.items():
        assert torch.equal(found[name], value.bfloat16()), name
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert load(folder).dtype == torch.bfloat16


@pytest.mark.slow
def test_the_result_is_what_transformers_dequantises(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", num_hidden_layers=2)
    # In whole blocks: of others, transformers 5.23 takes scales for blocks of another size.
    in_fp8(source, block=(16, 16))
    convert_folder(source, tmp_path / "linear", level="full")


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source")
    in_fp8(source, weight_block_size=[8, 8])
    with pytest.raises(LinearizeError, match=r"FP8.*\[8.*8\]") as refused:
        convert_folder(source, tmp_path / "linear")
    assert refused.value.code == Exit.INCOMPATIBLE
    assert not (tmp_path / "linear").exists()


@pytest.mark.parametrize("changes", [{"weight_block_size": None}, {"fmt": "e5m2"}])
def test_other_fp8_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    in_fp8(save_source(tmp_path / "source"), **changes)
    with pytest.raises(LinearizeError, match=r"is quantized \(fp8\)"):
        plan_conversion(str(tmp_path / "source"), "gsa")


@pytest.mark.parametrize(
    ("method", "card", "words"),
    [
        ("gptq", "---\nbase_model: meta-llama/Llama-3.1-8B\n---\n", ("linearize", "meta-llama/Llama-3.1-8B")),
        ("awq", "---\nbase_model:\n- Qwen/Qwen3-8B\n---\n", ("linearize", "Qwen/Qwen3-8B")),
        ("awq", "", ("convert", "model")),
        ("mxfp4", "", ("Mxfp4Config(dequantize=True)).save_pretrained('float')",)),
        ("bitsandbytes", "", (".dequantize().save_pretrained('float')",)),
    ],
)
def test_other_schemes_say_how_to_get_a_float_model(tmp_path: Path, method: str, card: str, words: str) -> None:
    (tmp_path / "README.md").write_text(card)
    error = quantized(tmp_path, {"quant_method": method})
    assert holds(error.message, *words)
    assert error.code == Exit.INCOMPATIBLE


@pytest.mark.parametrize("share", with_slow([8.1, 3.9], 3.9))
def test_steps_are_proved_where_the_source_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """transformers does not dequantize blocks that an edge cuts; what was written is float, and decodes."""
    source, folder = save_source(tmp_path / "source", hidden_size=48, intermediate_size=40), tmp_path / "linear"
    in_fp8(source)
    convert_folder(source, folder, "0,2")
    plan, opened, _ = plan_conversion(str(source), "gsa", layers="0,2", options={"slots": 8, "chunk_size": 16})
    monkeypatch.setattr("linearize.verify.reload.free_memory", lambda: share * numbers([folder]))
    message = verify(folder, "auto", opened, plan, False)
    assert holds(message, "single", "equal")
    assert "logits equal" not in message
    assert message.endswith(CUT)
    assert (FIRST.format(2) in message) == (share < 4)
    code = (folder / "cache.py").read_text()
    (folder / "cache.py").write_text(code.replace("o, self.state = mixer(", "o, _ = mixer("))
    with pytest.raises(LinearizeError, match=r"single.*differ"):
        verify(folder, "auto", opened, plan, False)
