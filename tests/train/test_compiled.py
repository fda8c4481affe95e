"""runtime.compile: the same run, one compilation for all layers that are alike, and Python outside of the steps."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from models import convert_folder, small_model
from torch import nn
from training import BASES, base, byte_tokenizer, make_recipe, metrics, stage, tensors, train

from linearize import api
from linearize.estimate.memory import Rehearsal
from linearize.estimate.step import measure_stages
from linearize.recipe.recipe import Recipe
from linearize.train.compiled import CompiledLayers, compiles
from linearize.train.save import load_converted

KL = stage("logit_kl", "all")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What torch.compile is asked to do from here on, by its own counts; graphs are run and not turned into kernels,
    which takes a CPU a minute."""
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


def near(first: Path, second: Path) -> None:
    """Two runs have the same losses and weights, but for the order of sums."""
    assert metrics(first) == pytest.approx(metrics(second), rel=1e-4)
    ours, theirs = (tensors(folder / "run" / "final") for folder in (first, second))
    for name, weight in ours.items():
        # Adam makes whole steps of gradients that are rounding.
        assert (weight - theirs[name]).abs().max() < 5e-3, name


@pytest.mark.parametrize(
    ("change", "sharded", "tokens", "expected"),
    [
        ({}, False, 30_000_000, True),
        ({}, False, 3_000_000, False),
        ({}, True, 30_000_000, False),
        ({"compile": False}, False, 30_000_000, False),
        ({"compile": True}, True, 1, True),
        ({"device": "cpu"}, False, 30_000_000, False),
        ({"drop_path": 0.1}, False, 30_000_000, False),
        ({"kind": "attention_transfer", "compile": True}, False, 30_000_000, False),
    ],
)
def test_auto_compiles_where_a_long_stage_on_one_gpu_wins_it_back(
    change: dict[str, Any], sharded: bool, tokens: int, expected: bool
) -> None:
    """Of a model with 30 layers of 576."""
    kind = change.get("kind", "sft")
    own = {"drop_path": change["drop_path"]} if "drop_path" in change else {}
    made = {
        "kind": kind,
        "train": ["new"] if kind == "attention_transfer" else ["all"],
        "tokens": "1M",
        "optimizer": {"lr": 1e-4},
        **own,
    }
    recipe = Recipe.model_validate(
        {"version": 1, "name": "r", "model": {"base": "m"}, "convert": {"mechanism": "gla"},
         "data": {"train": {"demo": "packages"}}, "stages": [made],
         "runtime": {"compile": change.get("compile", "auto")}}
    )  # fmt: skip
    config = transformers.LlamaConfig(num_hidden_layers=30, hidden_size=576)
    device = torch.device(change.get("device", "cuda"))
    model = SimpleNamespace(config=config, main_input_name="input_ids", can_generate=lambda: True)
    assert compiles(recipe, recipe.stages[0], model, device, sharded, tokens) is expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "options", "one", "checkpointing"),
    [
        pytest.param("1", {"window": 8, "sink": 1}, stage("logit_kl", ["mixer"]), True, id="hybrid"),
        pytest.param("all", {}, stage("logit_kl", ["new", "lora"]), False, id="lora, stored activations"),
        pytest.param("all", {}, stage("sft", "all"), True, id="sft of all weights"),
    ],
)
def test_it_is_the_same_run(
    root: Path, tmp_path: Path, graphs: Any, layers: str, options: dict[str, Any], one: dict[str, Any],
    checkpointing: bool,
) -> None:  # fmt: skip
    folder = base(root, "llama", layers=layers, **options)
    for on in (False, True):
        assert not graphs["stats"]
        runtime = {"device": "cpu", "gradient_checkpointing": checkpointing, "compile": on}
        train(make_recipe(tmp_path / str(on), folder, stage("attention_transfer"), one, runtime=runtime))
    assert graphs["stats"]["unique_graphs"] > 0
    assert not graphs["graph_break"]
    near(tmp_path / "True", tmp_path / "False")


@pytest.mark.slow
def test_layers_that_are_alike_share_one_compilation(tmp_path: Path, graphs: Any) -> None:
    small_model("llama", **{**BASES["llama"], "num_hidden_layers": 4}).save_pretrained(tmp_path / "four")
    byte_tokenizer().save_pretrained(tmp_path / "four")
    model = load_converted(convert_folder(tmp_path / "four", tmp_path / "linear"), torch.float32, False).train()
    given = {"input_ids": torch.arange(40)[None] % 7, "use_cache": False}
    layers = CompiledLayers(model)
    model(**given)
    assert not graphs["stats"]
    with layers.on():
        for _ in range(2):
            model(**given).logits.sum().backward()
    assert graphs["stats"]["unique_graphs"] == 1
    with torch.no_grad():  # another shape, as an evaluation has it
        model(input_ids=torch.zeros(1, 9, dtype=torch.long), use_cache=False)
    assert graphs["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "faithful"), [("gdn", False), ("gsa", False), ("sla", False), ("mhla", True)])
def test_documents_can_be_compiled(tmp_path: Path, graphs: Any, mechanism: str, faithful: bool) -> None:
    """Rows of one document and of two, which MHLA counts outside of a graph: torch 2.11 found fault with that. Each
    mechanism by itself is compiled in tests/kernels/test_mechanisms.py."""
    small_model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    options = {"faithful": True} if faithful else {}
    api.convert(tmp_path / "model", mechanism, tmp_path / "linear", options=options, verify="none")
    model = load_converted(tmp_path / "linear", torch.float32, False).train()
    ids = torch.arange(80).view(2, 40) % 7
    layers = CompiledLayers(model)
    for places in (None, torch.cat([torch.arange(25), torch.arange(15)]).expand(2, -1)):
        found = []
        for on in (False, True):
            model.zero_grad()
            with layers.on() if on else contextlib.nullcontext():
                model(input_ids=ids, position_ids=places, use_cache=False).logits.square().sum().backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert (found[1] - found[0]).norm() < 1e-5 * found[0].norm()
    assert graphs["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_an_estimate_measures_it(root: Path, tmp_path: Path, graphs: Any) -> None:
    folder = base(root, "llama")
    recipe = make_recipe(tmp_path, folder, KL, runtime={"device": "cpu", "compile": True})
    rehearsal = Rehearsal(recipe, None, folder, "no", gpu=False)
    rehearsal.stage(0)
    assert not graphs["stats"]
    assert measure_stages(rehearsal, list(recipe.stages))[0]["tokens_per_s"] > 0
    assert graphs["stats"]["unique_graphs"] > 0
