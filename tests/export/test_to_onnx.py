"""`linearize export`: graphs compute what their models compute, at other lengths and batches than they were written
with; and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from models import load, save_source, tokens

from linearize.errors import Exit, LinearizeError
from linearize.export import to_onnx

if TYPE_CHECKING:
    from conftest import Command
    from models import Zoo

# What a layer of gla may say of itself that fits ONNX.
LAYER = {
    "mechanism": "gla",
    "options": {"window": 0},
    "site": {"path": "model.layers.0.self_attn", "causal": True, "routed": True, "softmax_groups": []},
}


@pytest.fixture
def converted(linearize: Command, tmp_path: Path) -> Any:
    """Convert a small model of two layers; arguments of `linearize convert` follow its architecture."""

    def make(architecture: str, *arguments: str) -> Path:
        source = save_source(tmp_path / "source", architecture, num_hidden_layers=2)
        code, _, said = linearize("convert", source, "-o", tmp_path / "linear", "--verify", "none", *arguments)
        assert code == 0, said
        return tmp_path / "linear"

    return make


@pytest.mark.parametrize(
    ("architecture", "arguments", "operators"),
    [
        ("gemma2", ("--to", "gla", "--keep-softmax", "0"), {"LinearAttention": 1, "Attention": 1}),  # slides, and caps
        ("llama", ("--to", "retnet", "--set", "state_heads=query"), {"LinearAttention": 2, "Attention": 0}),
        ("qwen3", ("--to", "gdn", "--keep-softmax", "1"), {"LinearAttention": 1, "Attention": 1}),
    ],
    ids=["gla", "retnet", "gdn"],
)
def test_a_graph_computes_what_its_model_computes(
    converted: Any, linearize: Command, tmp_path: Path, architecture: str, arguments: tuple[str, ...], operators: Any
) -> None:
    onnx, reference = pytest.importorskip("onnx"), pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    folder = converted(architecture, *arguments)
    code, _, said = linearize("export", folder, "-o", tmp_path / "graph")
    assert code == 0, said
    assert f"wrote {tmp_path / 'graph' / 'model.onnx'}" in said
    graph = onnx.load(str(tmp_path / "graph" / "model.onnx"))
    names = [node.op_type for node in graph.graph.node]
    assert {name: names.count(name) for name in operators} == operators
    assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", 27)]

    rows = tokens(3, 20)
    with torch.no_grad():
        expected = load(folder)(rows).logits.numpy()
    evaluator, outputs, states = reference.ReferenceEvaluator(graph), [], None
    sizes = {name.name: [dim.dim_value for dim in name.type.tensor_type.shape.dim][1:] for name in graph.graph.input}
    for begin, end in ((0, 1), (1, 12), (12, 20)):  # a token alone, then a chunk behind a state, then another
        feed = {"input_ids": rows[:, begin:end].numpy(), "attention_mask": np.ones((3, end), np.int64)}
        past = [name for name in sizes if name.startswith("past_")]
        states = states or [np.zeros((3, *sizes[name]), np.float32) for name in past]
        logits, *states = evaluator.run(None, feed | dict(zip(past, states, strict=True)))
        outputs.append(logits)
    assert np.abs(np.concatenate(outputs, 1) - expected).max() < 1e-4


def test_a_graph_that_computes_something_else_is_not_written(
    converted: Any, linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    folder = converted("llama", "--to", "gla")
    monkeypatch.setattr(to_onnx, "TOLERANCE", 0.0)
    code, _, said = linearize("export", folder, "-o", tmp_path / "graph")
    assert code == Exit.CHECK_FAILED, said
    assert "the graph computes other logits than the model" in said
    assert not (tmp_path / "graph").exists()


def config_of(changes: dict[str, dict[str, Any]]) -> Any:
    """The config of a model of one layer, LAYER but for `changes` by part."""
    layer: dict[str, Any] = copy.deepcopy(LAYER)
    for part, values in changes.items():
        layer[part] = layer[part] | values if isinstance(values, dict) else values
    config = SimpleNamespace(auto_map={"AutoModelForCausalLM": "x"}, linearize={"layers": [layer]})
    config.get_text_config = lambda: config
    return config


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mechanism": "gsa"}, "gsa: slots are read by softmax"),
        ({"mechanism": "la"}, "la: .* no normaliser"),
        ({"mechanism": "mhla"}, "mhla: summaries of blocks"),
        ({"mechanism": "sla"}, "sla: gates between heads"),
        ({"mechanism": "another"}, "another: LinearAttention has no rule for it"),
        ({"options": {"window": 64}}, "window: "),
        ({"mechanism": "gdn", "options": {"taps": 4}}, "taps: "),
        ({"site": {"softmax_groups": [1]}}, "heads that keep softmax"),
        ({"site": {"routed": False}}, "in the architecture's own code"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(
        LinearizeError, match=rf"model.layers.0.self_attn, .*{reason}.*can be gla, retnet, gdn"
    ) as refused:
        to_onnx.check(config_of(changes), "DIR")
    assert refused.value.code == Exit.INCOMPATIBLE


def test_an_encoder_is_refused() -> None:
    config = config_of({})
    config.auto_map = {"AutoModel": "x"}
    with pytest.raises(LinearizeError, match="no language model of text alone"):
        to_onnx.check(config, "DIR")


def test_onnx_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_onnx.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LinearizeError, match=r'pip install "linearize\[onnx\]"') as refused:
        to_onnx.check(config_of({}), "DIR")
    assert refused.value.code == Exit.RESOURCE


def test_a_refusal_comes_before_anything_is_written(zoo: Zoo, linearize: Command, tmp_path: Path) -> None:
    source, linear = zoo.folders("llama")
    code, _, said = linearize("export", linear, "-o", tmp_path / "graph")
    assert code == Exit.INCOMPATIBLE
    assert "model.layers.0.self_attn and 3 more, gsa: slots are read by softmax" in " ".join(said.split())
    code, _, said = linearize("export", source, "-o", tmp_path / "graph")
    assert code == Exit.INCOMPATIBLE
    assert "is not linearized. Export it without linearize" in " ".join(said.split())
    assert not (tmp_path / "graph").exists()


def test_other_formats_are_refused(linearize: Command, tmp_path: Path) -> None:
    code, _, said = linearize("export", tmp_path, "--to", "gguf")
    assert code == Exit.INCOMPATIBLE
    assert "llama.cpp" in said
    assert "--to onnx" in said
    code, _, said = linearize("export", tmp_path, "--to", "onxx")
    assert code == Exit.USAGE
    assert "Did you mean 'onnx'" in said
