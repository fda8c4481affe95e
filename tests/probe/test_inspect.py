"""`linearize inspect`: what is found in a config, and what is said of what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from architectures import small_config
from conftest import Command
from models import HYBRID, Zoo, load
from rich.panel import Panel

from linearize.commands.convert import plan_table
from linearize.commands.verify import checks_table
from linearize.convert import plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.plan import mechanisms
from linearize.probe.inspection import inspect_model
from linearize.terminal.output import ranges
from linearize.terminal.tables import console
from linearize.verify.checks import Check


def config_only(folder: Path, model_type: str, **changes: object) -> Path:
    """A folder that holds nothing but the config of a small model."""
    config = small_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    return folder


def test_a_config_is_enough(tmp_path: Path) -> None:
    inspection = inspect_model(str(config_only(tmp_path / "tiny", "gemma2"))).to_json()
    assert json.loads(json.dumps(inspection)) is not None
    sites = inspection["sites"]
    assert [site["layer"] for site in sites] == [0, 1, 2, 3]
    assert {(site["kind"], site["heads"], site["kv_heads"], site["key_dim"], site["value_dim"]) for site in sites} == {
        ("Gemma2Attention", 4, 2, 8, 8)
    }
    assert sites[1]["path"] == "model.layers.1.self_attn"
    assert sites[1]["scale"] == pytest.approx(256**-0.5)
    assert [site["extras"] for site in sites[:2]] == [("sliding_window", "softcap"), ("softcap",)]
    assert inspection["others"] == ()
    assert {fit["mechanism"]: fit["layers"] for fit in inspection["mechanisms"]}["gsa"] == (0, 1, 2, 3)


def test_every_mechanism_is_tried_and_its_obstacle_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms.load_mechanism("gsa"), "causal", False)
    inspection = inspect_model(str(config_only(tmp_path / "tiny", "llama")))
    assert [fit.mechanism for fit in inspection.fits] == [*mechanisms.mechanism_names()]
    fit = next(fit for fit in inspection.fits if fit.mechanism == "gsa")
    assert fit.layers == ()
    assert fit.obstacles[2] == (2, "model.layers.2.self_attn is causal; 'gsa' is not")


def test_layers_that_are_linear_already_are_named_and_kept(tmp_path: Path) -> None:
    folder = config_only(tmp_path / "tiny", "qwen3_next")
    found = inspect_model(str(folder)).found
    assert [site.path for site in found.sites] == ["model.layers.3.self_attn"]
    assert [(other.layer, other.kind) for other in found.others] == [(n, "Qwen3NextGatedDeltaNet") for n in range(3)]
    plan = plan_conversion(str(folder), "gsa", weights=False)[0]
    assert [step.site.layer for step in plan.steps] == [3]
    assert plan.others == ("Qwen3NextGatedDeltaNet in layers 0-2: no softmax(q k) v over its tokens was seen in it",)
    assert not plan.spec()["all_linear"]
    message = r"--layers 1,3: model\.layers\.1\.linear_attn is Qwen3NextGatedDeltaNet: .* layers 3$"
    with pytest.raises(LinearizeError, match=message) as caught:
        plan_conversion(str(folder), "gsa", layers="1,3", weights=False)
    assert caught.value.code == Exit.INCOMPATIBLE


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("mamba", r"found.*MambaForCausalLM.*seen.*MambaMixer"),
        ("rwkv", r"found.*RwkvForCausalLM.*seen.*RwkvSelfAttention"),
        ("diffllama", r"layers\.0\.self_attn.*DiffLlamaAttention.*2"),
        ("falcon_h1", r"FalconH1Attention.*LinearAttentionAndFullAttentionLayer"),
        ("deepseek_v32", r"DeepseekV32Attention.*DynamicIndexedLayer"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, model_type: str, message: str) -> None:
    with pytest.raises(LinearizeError, match=message) as caught:
        inspect_model(str(config_only(tmp_path / "tiny", model_type)))
    assert caught.value.code == Exit.INCOMPATIBLE


def test_masks_that_the_architecture_reads_are_made(tmp_path: Path) -> None:
    for model_type, reads, drops in (("llama", False, ()), ("doge", True, ("score_bias",))):
        folder = config_only(tmp_path / model_type, model_type)
        plan = plan_conversion(str(folder), "gsa", weights=False, allow_drop=drops)[0]
        assert plan.reads_masks == reads
        assert plan.spec()["all_linear"] == (not reads)


def test_long_names_leave_room_for_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal of 80 columns shows every column; a module's name goes on in the next line."""
    folder = config_only(tmp_path / "tiny", "llama")
    plan = plan_conversion(str(folder), "gsa", keep_softmax="1", weights=False)[0]
    long = [replace(step, site=replace(step.site, path="x" * 60, kind="y" * 40)) for step in plan.steps]
    plan_table(replace(plan, steps=tuple(long)))
    message = capsys.readouterr().err
    for part in ("layers", "params", "state", f"{plan.steps[0].new_parameters:,}", "KV", "cache", "softmax"):
        assert part in message
    assert (message.count("x"), message.count("y")) >= (60, 40)


def test_brackets_in_names_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor in what a model writes: the demo shows Python side by side."""
    checks_table("old[i]", [Check("reload", "failed", "raises KeyError: '[/INST]'")])
    console().print(Panel("for i in x: y[i]"))
    message = capsys.readouterr().err
    assert all(part in message for part in ("old[i]", "failed", "[/INST]", "y[i]"))


def test_the_command_prints_tables_and_json(zoo: Zoo, linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = linearize("inspect", zoo.folders("llama")[0], "--json")
    assert code == 0, err
    assert [site["layer"] for site in json.loads(out)["sites"]] == [0, 1, 2, 3]
    for word in ("LlamaAttention", "model.layers.*.self_attn", "Gated slot attention", "0-3"):
        assert word in err


def test_a_converted_model_is_shown(zoo: Zoo, linearize: Command, tmp_path: Path) -> None:
    """By its plan; also as save_pretrained wrote it, where softmax layers have no record."""
    folder = zoo.folders("llama", HYBRID)[1]
    code, out, err = linearize("inspect", folder, "--json")
    assert code == 0, err
    layers = [step["site"]["layer"] for step in json.loads(out)["converted"]["steps"]]
    rows = {line.split()[2]: line.split()[0] for line in err.splitlines()[3:]}
    assert rows["gsa"] == ranges(layers)
    assert "softmax" in rows
    load(folder).save_pretrained(tmp_path / "again")
    code, out, err = linearize("inspect", tmp_path / "again", "--json")
    assert code == 0, err
    assert [step["site"]["layer"] for step in json.loads(out)["converted"]["steps"]] == layers
