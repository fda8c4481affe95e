"""Models with sliding windows, and with experts, from `--keep-softmax auto` to text that they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Command, holds
from models import SMALL as SIZES
from training import SMALL, byte_tokenizer, stage, text, write_data, write_recipe

from linearize.checkpoint.manifest import read_plan
from linearize.choose import choose
from linearize.convert import plan_conversion

WINDOWS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "query_pre_attn_scalar": 16,
}
SETTINGS = ("--set", "slots=8", "--set", "chunk_size=16", "--set", "window=4", "--set", "clock=0")


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def save(folder: Path, config: Any) -> Path:
    """A random model, its tokenizer, and text beside it."""
    torch.manual_seed(11)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "source")
    byte_tokenizer().save_pretrained(folder / "source")
    write_data(folder)
    (folder / "long.txt").write_text(text(1500, 7))
    return folder / "source"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Gemma 3 of four layers, two of which have windows of their own."""
    return save(tmp_path, transformers.Gemma3TextConfig(**{**SIZES, **SMALL, **WINDOWS}))


@pytest.mark.slow
def test_layers_and_windows_of_a_model_with_experts(
    tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe leaves both to linearize: its run stops after a stage and goes on, is verified and writes text."""
    for name, value in {"TRANSFER_STEPS": 3, "SCORE_TOKENS": 512, "BATCH_TOKENS": 256, "RECALLS": 1}.items():
        monkeypatch.setattr(choose, name, value)
    source = save(tmp_path, transformers.Qwen3MoeConfig(**{**SIZES, **SMALL, **EXPERTS}))
    stages = stage("attention_transfer", steps=2), stage("logit_kl", "all", steps=2)
    asked = {"mechanism": "gsa", "options": {"slots": 8}, "keep_softmax": "auto:2", "kept_window": "auto:20:10"}
    data = {"train": {"files": [str(tmp_path / "long.txt")]}}
    recipe = write_recipe(tmp_path, source, *stages, convert=asked | {"score_by": "swaps"}, finish={"verify": False})
    written = json.loads(recipe.read_text())
    recipe.write_text(json.dumps(written | {"data": written["data"] | data}))
    for more in (("--stage", "attention_transfer"), ()):
        code, _, err = linearize("finetune", recipe, *more)
        assert code == 0, err
    plan = read_plan(tmp_path / "run" / "final")
    assert plan.choice is not None
    assert plan.window_choice is not None
    assert list(plan.choice.kept) == sorted(plan.window_choice.near) == [step.site.layer for step in plan.local]
    assert (len(plan.linear), plan.kept) == (2, ())
    code, out, err = linearize("verify", tmp_path / "run" / "final", "--json")
    assert code == 0, err
    assert {check["status"] for check in json.loads(out)["checks"]} == {"passed"}
    code, out, err = linearize("generate", tmp_path / "run" / "final", "ab", "--max-new-tokens", "4")
    assert (code, bool(out)) == (0, True), err


@pytest.mark.slow
def test_auto_goes_to_the_end(source: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TRANSFER_STEPS": 3, "SCORE_TOKENS": 512, "BATCH_TOKENS": 256, "RECALLS": 1}.items():
        monkeypatch.setattr(choose, name, value)
    folder = source.parent
    asked = ("--keep-softmax", "auto:1", "--score-by", "swaps", "--score-text", folder / "train.jsonl")
    output = ("-o", folder / "hybrid", "--verify", "none")
    code, out, err = linearize("convert", source, "--to", "gsa", *SETTINGS, *asked, *output, "--json")
    assert code == 0, err
    plan = json.loads(out)["plan"]
    assert plan["choice"]["kept"] == [site["layer"] for site in plan["kept"]]
    assert sorted(plan["choice"]["scores"]) == ["0", "1", "2", "3"]
    stages = stage("attention_transfer", steps=2), stage("logit_kl", "all", steps=2)
    recipe = write_recipe(folder, folder / "hybrid", *stages, finish={"verify": False})
    code, _, err = linearize("finetune", recipe)
    assert code == 0, err
    final = folder / "run" / "final"
    assert len(read_plan(final).steps) == 3
    code, out, err = linearize("verify", final, "--json")
    assert code == 0, err
    checks = {check["name"]: check["status"] for check in json.loads(out)["checks"]}
    assert {"prefill and steps", "left padding", "packed documents", "generate"} <= checks.keys()
    assert set(checks.values()) == {"passed"}
    code, out, err = linearize("generate", final, "ab", "--max-new-tokens", "4")
    assert code == 0, err
    assert out


def test_a_kept_window_leaves_layers_with_windows_of_their_own(source: Path) -> None:
    plan = plan_conversion(str(source), "gsa", keep_softmax="2-3", kept_window=9)[0]
    assert [step.site.layer for step in plan.local] == [3]
    assert plan.softmax_layers == [2, 3]
    assert plan.cache_bytes(10_000)["converted"] == plan.cache_bytes(1_000)["converted"]


def test_a_kept_window_for_chosen_layers_may_have_nothing_to_do(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_conversion(str(source), "gsa", keep_softmax="auto:1", kept_window=9, weights=False)[0]
    assert plan.softmax_layers == [2]
    assert plan.local == ()
    assert holds(capsys.readouterr().err, "--kept-window", "9", "2")
