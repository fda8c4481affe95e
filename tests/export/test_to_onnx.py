"""`linearize export`: graphs compute what their models compute, at other lengths and batches than they were written
with; and what is refused."""

from __future__ import annotations

import copy
import errno
import importlib.metadata
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from conftest import holds, relative_error
from models import copied, load, save_source, tokens

from linearize.errors import Exit, LinearizeError
from linearize.export import to_onnx
from linearize.export.ring import ring_attention
from linearize.export.to_onnx import prove
from linearize_kernels.window.window import empty_ring, window

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
        code, _, message = linearize("convert", source, "-o", tmp_path / "linear", "--verify", "none", *arguments)
        assert code == 0, message
        return tmp_path / "linear"

    return make


def proved_and_disproved(graph: Any, path: Path, rows: Any, expected: list[torch.Tensor]) -> None:
    """`prove`, after it refused other logits."""
    with pytest.raises(LinearizeError, match=r"computes.*logits") as refused:
        prove(graph, path, rows, [logits + 0.01 for logits in expected])
    assert refused.value.code == Exit.CHECK_FAILED
    prove(graph, path, rows, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "arguments", "operators"),
    [
        # Slides, and caps.
        ("gemma2", ("--to", "gla", "--keep-softmax", "0"), {"LinearAttention": 1, "Attention": 1}),
        (
            "llama",
            ("--to", "retnet", "--set", "state_heads=query", "--set", "window=6", "--set", "sink=2"),
            {"LinearAttention": 2, "Attention": 0},
        ),
        ("qwen3", ("--to", "gdn", "--keep-softmax", "1"), {"LinearAttention": 1, "Attention": 1}),
        ("llama", ("--to", "window", "--set", "window=64", "--layers", "1"), {"LinearAttention": 0, "Attention": 1}),
        ("llama", ("--to", "gla", "--keep-heads", "1:0"), {"LinearAttention": 2, "Attention": 1}),
        (
            "gemma2",
            ("--to", "gdn", "--set", "window=6", "--keep-heads", "0:1;1:0"),
            {"LinearAttention": 2, "Attention": 2},
        ),
    ],
    ids=["gla", "retnet with a window", "gdn", "window", "heads", "heads that slide and cap"],
)
def test_a_graph_computes_what_its_model_computes(
    converted: Any,
    linearize: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    arguments: tuple[str, ...],
    operators: Any,
) -> None:
    onnx, reference = pytest.importorskip("onnx"), pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    folder = converted(architecture, *arguments)
    monkeypatch.setattr(to_onnx, "prove", proved_and_disproved)
    code, _, message = linearize("export", folder, "-o", tmp_path / "graph")
    assert code == 0, message
    assert f"wrote {tmp_path / 'graph' / 'model.onnx'}" in message
    graph = onnx.load(str(tmp_path / "graph" / "model.onnx"))
    names = [node.op_type for node in graph.graph.node]
    assert {name: names.count(name) for name in operators} == operators
    assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", 27)]

    rows = tokens(3, 20)
    with torch.no_grad():
        expected = load(folder)(rows).logits.numpy()
    evaluator, outputs, states = reference.ReferenceEvaluator(graph), [], None
    empty = {}
    for name in graph.graph.input:
        kind = np.int64 if name.type.tensor_type.elem_type == onnx.TensorProto.INT64 else np.float32
        empty[name.name] = np.zeros((3, *[dim.dim_value for dim in name.type.tensor_type.shape.dim][1:]), kind)
    for begin, end in ((0, 1), (1, 12), (12, 20)):  # a token alone, then a chunk behind a state, then another
        feed = {"input_ids": rows[:, begin:end].numpy(), "attention_mask": np.ones((3, end), np.int64)}
        past = [name for name in empty if name.startswith("past_")]
        states = states or [empty[name] for name in past]
        logits, *states = evaluator.run(None, feed | dict(zip(past, states, strict=True)))
        outputs.append(logits)
    assert np.abs(np.concatenate(outputs, 1) - expected).max() < 1e-4


@pytest.mark.parametrize("sink", [0, 3])
def test_the_window_of_a_graph_is_that_of_the_kernels(sink: int) -> None:
    """In chunks, with padding anywhere: outputs of real tokens, and what later ones see."""
    sizes: dict[str, Any] = {"window": 5, "sink": sink, "scale": 0.4}
    q, k, v = torch.randn(2, 30, 4, 8), torch.randn(2, 30, 2, 8), torch.randn(2, 30, 2, 6)
    padding = torch.rand(2, 30) > 0.3
    expected, ours = None, empty_ring(k, v, 5 + sink)
    for part in (slice(0, 2), slice(2, 3), slice(3, 19), slice(19, 30)):
        inputs = q[:, part], k[:, part], v[:, part]
        want, want_mass, expected = window(*inputs, **sizes, padding=padding[:, part], state=expected)
        o, mass, ours = ring_attention(*inputs, **sizes, padding=padding[:, part], state=ours)
        real = padding[:, part]
        assert relative_error(o[real], want[real]) < 1e-5
        assert relative_error(mass[real], want_mass[real]) < 1e-5
        assert torch.equal(ours.held, expected.held)


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
        ({"mechanism": "gdn", "options": {"taps": 4}}, "taps: "),
        ({"mechanism": "gdn", "options": {"memories": 2}}, "memories: "),
        ({"site": {"routed": False}}, "in the architecture's own code"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(LinearizeError, match=rf"model.layers.0.self_attn.*{reason}.*gla.*retnet.*gdn") as refused:
        to_onnx.check(config_of(changes), "DIR")
    assert refused.value.code == Exit.INCOMPATIBLE


def test_an_encoder_is_refused() -> None:
    config = config_of({})
    config.auto_map = {"AutoModel": "x"}
    with pytest.raises(LinearizeError, match=r"language.*alone"):
        to_onnx.check(config, "DIR")


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
@pytest.mark.parametrize("version", [None, "0.6.9"])
def test_onnx_that_is_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None) -> None:
    def installed(name: str) -> str:
        if name == package and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == package and version is not None else "9"

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(LinearizeError, match=r'pip install "linearize\[onnx\]"') as refused:
        to_onnx.check(config_of({}), "DIR")
    assert refused.value.code == Exit.RESOURCE
    message = f"{package} is not installed" if version is None else "Installed is 0.6.9"
    assert message in refused.value.message


def test_the_versions_are_those_of_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    needed = [f"{package}>={oldest}" for package, oldest in to_onnx.OLDEST.items()]
    assert project["optional-dependencies"]["onnx"] == needed


@pytest.mark.parametrize(
    ("options", "places", "tokens"),
    [
        ({"window": 0}, 256, 33),
        ({"window": 64}, 256, 67),
        ({"window": 64, "sink": 4}, 256, 71),
        ({"window": 4096}, 8192, 200),
        ({"window": 64}, 48, 46),
    ],
)
def test_a_row_of_the_proof_goes_beyond_the_window(options: dict[str, int], places: int, tokens: int) -> None:
    """Where the model has so many positions and it is not too long; steps follow."""
    config = config_of({"options": options})
    config.vocab_size, config.max_position_embeddings = 97, places
    short, long = to_onnx.proof_rows(config)
    assert (len(short), len(long)) == (5 + 2, tokens + 2)


def test_what_goes_wrong_with_a_graph_is_told(
    converted: Any, linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99")
    folder = converted("llama", "--to", "gla")

    def wrapped(cause: Exception | None) -> Exception:
        error = RuntimeError("Failed to export")
        error.__cause__ = cause
        return error

    full, kept = OSError(errno.ENOSPC, "No space left on device"), LinearizeError("kept sinks", Exit.INCOMPATIBLE)
    for place, error, expected, message in (
        ("write", full, Exit.RESOURCE, "no space left on the disk"),
        ("write", MemoryError(), Exit.RESOURCE, "out of memory"),
        ("write", wrapped(MemoryError()), Exit.RESOURCE, "out of memory"),
        ("write", wrapped(kept), Exit.INCOMPATIBLE, "error: kept sinks"),
        ("write", wrapped(ValueError()), Exit.INCOMPATIBLE, "could not write its graph (RuntimeError: ValueError)"),
        ("compare", full, Exit.RESOURCE, "no space left on the disk"),
        (
            "compare",
            ValueError("No such operator"),
            Exit.CHECK_FAILED,
            "onnx cannot run the graph (ValueError: No ",
        ),
    ):

        def fails(*args: Any, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(to_onnx, "write", lambda graph, path: None)
            patched.setattr(to_onnx, place, fails)
            code, _, messages = linearize("export", folder, "-o", tmp_path / "graph")
        assert (code, message in " ".join(messages.split())) == (expected, True), messages
        assert not (tmp_path / "graph").exists()


def test_experts_are_named_where_torch_gives_up(
    converted: Any, linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not in hundreds of lines: torch prints the whole graph."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99")
    read = to_onnx.open_config

    def with_experts(folder: Path) -> Any:
        config = read(folder)
        config.num_experts = 4
        return config

    def gives_up(graph: Any, path: Path) -> None:
        print("def forward(self, ..):", file=sys.stderr)
        raise RuntimeError("data-dependent expression")

    monkeypatch.setattr(to_onnx, "write", gives_up)
    monkeypatch.setattr(to_onnx, "open_config", with_experts)
    code, _, messages = linearize("export", converted("llama", "--to", "gla"), "-o", tmp_path / "graph")
    assert (code, "Which experts" in messages, "def forward" in messages) == (Exit.INCOMPATIBLE, True, False), messages


def test_a_model_that_transformers_saved_is_exported(
    converted: Any, linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """save_pretrained leaves out linearize.json."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99")
    monkeypatch.setattr(to_onnx, "write", lambda graph, path: path.write_text("graph"))
    monkeypatch.setattr(to_onnx, "compare", lambda *args: None)
    load(converted("llama", "--to", "gla")).save_pretrained(tmp_path / "saved")
    code, _, messages = linearize("export", tmp_path / "saved", "-o", tmp_path / "graph")
    assert code == 0, messages
    assert (tmp_path / "graph" / "model.onnx").read_text() == "graph"
    monkeypatch.setattr(to_onnx, "behind", lambda *args: "0.1.0")
    code, _, messages = linearize("export", tmp_path / "saved", "-o", tmp_path / "other")
    assert code == Exit.INCOMPATIBLE
    assert "linearize finetune and push write it" in " ".join(messages.split())


def test_options_and_the_default_folder(
    zoo: Zoo, linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the model's folder as the working directory."""
    linear = copied(zoo.folders("llama")[1], tmp_path / "mine")
    before = sorted(path.name for path in linear.iterdir())
    (tmp_path / "mine-onnx").mkdir()
    (tmp_path / "mine-onnx" / "somebody's").touch()
    for place, arguments, expected, message in (
        (tmp_path, (f"{linear}/",), Exit.USAGE, "mine-onnx has 1 file already. Choose another -o"),
        (linear, (".",), Exit.USAGE, "mine-onnx and the model . must be separate folders. Choose another -o"),
        (linear, (".", "-o", "inside/graph"), Exit.USAGE, "inside/graph and the model . must be separate folders"),
        (linear, (".", "-o", "../mine-onnx"), Exit.USAGE, "mine-onnx has 1 file already. Choose another -o"),
        (tmp_path, ("mine", "-o", "new", "--revision", "main"), Exit.USAGE, "a revision (main) is a branch, tag or"),
    ):
        monkeypatch.chdir(place)
        code, _, messages = linearize("export", *arguments)
        assert (code, message in " ".join(messages.split())) == (expected, True), messages
    assert sorted(path.name for path in linear.iterdir()) == before
    with (linear / "modeling_linearized.py").open("a") as file:
        file.write("\nchanged = True\n")
    for options, message in (((), "pass --trust-remote-code"), (("--trust-remote-code",), "does not fit ONNX")):
        code, _, messages = linearize("export", linear, "-o", tmp_path / "new", *options)
        assert (code, message in " ".join(messages.split())) == (Exit.INCOMPATIBLE, True), messages


def test_a_refusal_comes_before_anything_is_written(zoo: Zoo, linearize: Command, tmp_path: Path) -> None:
    source, linear = zoo.folders("llama")
    code, _, messages = linearize("export", linear, "-o", tmp_path / "graph")
    assert code == Exit.INCOMPATIBLE
    assert "model.layers.0.self_attn and 3 more, gsa: slots are read by softmax" in " ".join(messages.split())
    code, _, messages = linearize("export", source, "-o", tmp_path / "graph")
    assert code == Exit.INCOMPATIBLE
    assert "is not linearized" in " ".join(messages.split())
    assert not (tmp_path / "graph").exists()


def test_a_link_to_a_file_elsewhere_is_refused(converted: Any, linearize: Command, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root")
    folder = converted("llama", "--to", "gla")
    (folder / "vocab.txt").symlink_to(tmp_path / "secret")
    code, _, messages = linearize("export", folder, "-o", tmp_path / "graph")
    assert (code, "vocab.txt is a link to" in " ".join(messages.split())) == (Exit.INCOMPATIBLE, True), messages
    assert not (tmp_path / "graph").exists()


def test_other_formats_are_refused(linearize: Command) -> None:
    code, _, message = linearize("export", "demo", "--to", "gguf")
    assert code == Exit.USAGE
    assert "--as gguf" in message
    code, _, message = linearize("export", "demo", "--to", "onxx")
    assert code == Exit.USAGE
    assert holds(message, "'onnx'")
    code, _, message = linearize("export", "demo", "--to", "onnx", "--as", "auto")
    assert code == Exit.USAGE
    assert holds(message, "--to", "--as", "out")
