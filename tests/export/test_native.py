"""`linearize export --as`: known architectures compute what converted models compute, every silent trap of a format is
found by the proof, and what is not exact is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from models import load, save_source, tokens
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from linearize.convert import convert, plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.export import native
from linearize.export.engines import engines_for, mlx_logits
from linearize.export.native import FORMATS, export_native, one_pass, prove, stepped
from linearize.serve.folder import layers_of

if TYPE_CHECKING:
    from conftest import Command

QWEN = ("qwen3", "gdn", {"native": True})
LLAMA = ("llama", "mamba2", {"eps": 1e-6})
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


Kind = tuple[str, str, dict[str, Any]]


def converted(folder: Path, kind: Kind, keep: str, dtype: str = "keep", **changes: Any) -> Path:
    """A converted model whose mixers are as if they were trained: no weight is what a conversion starts with."""
    name, mechanism, options = kind
    source = save_source(folder / "source", name, **changes)
    plan = plan_conversion(str(source), mechanism, keep_softmax=keep, options=options, dtype=dtype)
    convert(*plan, folder / "linear", level="none", say=lambda text: None)
    shard = folder / "linear" / "model-mixers.safetensors"
    torch.manual_seed(5)
    trained = {key: x + (0.3 * torch.randn(x.shape)).to(x.dtype) for key, x in load_file(shard).items()}
    save_file(trained, shard, metadata={"format": "pt"})
    return folder / "linear"


class Made:
    """An export without its last steps: the config, folded weights, rows and the logits that are expected."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.linear, self.folder = converted(folder, kind, "3"), folder
        self.model = load(self.linear)
        self.form = native.choose("auto", self.model.config, "it")
        self.config = self.form.config(self.model.config)
        weights = {name: x.detach() for name, x in self.model.state_dict().items()}
        self.tensors = self.form.fold(self.model.config, weights)
        self.rows = [tokens(1, 40)[0]]
        with torch.no_grad():
            self.expected = [one_pass(self.model, row) for row in self.rows]

    def check(self, config: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None) -> None:
        (self.folder / "config.json").write_text(json.dumps(config or self.config))
        with torch.no_grad():
            prove(self.folder, tensors or self.tensors, self.rows, self.expected)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("qwen"), QWEN)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.mark.parametrize(
    ("kind", "keep", "changes"),
    [
        (QWEN, "3", {"tie_word_embeddings": True}),
        (LLAMA, "1", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
        pytest.param(QWEN, "0,1", {}, marks=pytest.mark.slow),
        pytest.param(("qwen3", "gdn", {"native": True, "taps": 1}), "3", {}, marks=pytest.mark.slow),
        pytest.param(LLAMA, "0,2,3", {"num_key_value_heads": 1}, marks=pytest.mark.slow),
    ],
    ids=["qwen3 tied", "llama3 rope", "qwen3 irregular", "qwen3 without taps", "one key head"],
)
@torch.no_grad()
def test_engines_compute_what_the_model_computes(
    kind: Kind, keep: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Long prompts, batches with left padding, and steps behind them; MLX where it takes the placement and the norm."""
    linear = converted(tmp_path, kind, keep, **changes)
    made = export_native(str(linear), "auto", tmp_path / "out")
    assert made.differences.keys() == {engine.name for engine in made.engines if engine.takes} & {"MLX"}
    assert all(difference < 1e-4 for difference in made.differences.values())
    model, known = load(linear), transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(known).__module__.startswith("transformers.")
    row = tokens(1, 230)[0]
    want = one_pass(model, row)
    assert float((stepped(known, row) - want).abs().max() / want.abs().max()) < 1e-4
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, :9] = 0
    ours, theirs = (m(input_ids=ids, attention_mask=mask).logits for m in (model, known))
    assert float(((ours - theirs) * mask[..., None]).abs().max() / ours.abs().max()) < 1e-4


def changed(ending: str, change: Callable[[Tensor], Tensor]) -> Callable[[Made], dict[str, Tensor]]:
    """The weights with a change in all of one kind."""

    def make(made: Made) -> dict[str, Tensor]:
        found = {name: change(x) for name, x in made.tensors.items() if name.endswith(ending)}
        assert found, ending
        return {**made.tensors, **found}

    return make


def tiled(rows: Tensor, skip: int = 32) -> Tensor:
    """Key heads 0, 0, 1, 1 of keys [.., 32, ..] behind `skip` rows, in the order 0, 1, 0, 1."""
    heads = rows[skip : skip + 32].unflatten(0, (4, 8))[[0, 2, 1, 3]].flatten(0, 1)
    return torch.cat([rows[:skip], heads, rows[skip + 32 :]])


@pytest.mark.parametrize(
    "trap",
    [
        changed("input_layernorm.weight", lambda x: x + 1.0),  # norms store w - 1
        changed("q_norm.weight", lambda x: x + 1.0),
        changed("o_proj.weight", lambda x: x / 2),  # the gate of zero is 1/2
        # [q; gate] of each head, not q of all heads and then the gates
        changed("self_attn.q_proj.weight", lambda x: x.unflatten(0, (4, 2, 8)).transpose(0, 1).flatten(0, 2)),
        changed("conv1d.weight", lambda x: x.flip(-1)),  # the last tap is the token itself
        changed("in_proj_qkv.weight", tiled),  # key heads repeat in turn, not as a whole
        changed("A_log", lambda x: -x.exp()),
        changed("dt_bias", torch.zeros_like),
        changed("linear_attn.norm.weight", lambda x: x - 1.0),  # the only norm that stores w
        changed("in_proj_z.weight", lambda x: x.flip(0)),
    ],
    ids=["norms", "q norm", "o doubled", "gates by head", "taps", "key heads", "A_log", "dt", "own norm", "gate"],
)
def test_no_trap_of_qwen3_5_passes_the_proof(qwen: Made, trap: Callable[[Made], dict[str, Tensor]]) -> None:
    with pytest.raises(LinearizeError, match="computes other logits in one pass") as refused:
        qwen.check(tensors=trap(qwen))
    assert refused.value.code == Exit.CHECK_FAILED


def test_the_rotary_embedding_of_qwen3_5_turns_all_channels(qwen: Made) -> None:
    qwen.check()
    text = qwen.config["text_config"]
    assert sum(text["rope_parameters"]["mrope_section"]) == 4
    partial = {**text["rope_parameters"], "partial_rotary_factor": 0.25, "mrope_section": [1, 0, 0]}
    with pytest.raises(LinearizeError, match="computes other logits"):
        qwen.check({**qwen.config, "text_config": {**text, "rope_parameters": partial}})
    with pytest.raises(LinearizeError, match="weights do not fit"):
        qwen.check(tensors={k: x for k, x in qwen.tensors.items() if not k.endswith("A_log")})


@pytest.mark.parametrize(
    "trap",
    [
        changed("mamba.D", torch.zeros_like),
        changed("A_log", lambda x: -x.exp()),
        changed("conv1d.bias", torch.zeros_like),
        changed("shared_mlp.input_linear.weight", lambda x: x.roll(len(x) // 2, 0)),  # gate, then up
        changed("mamba.in_proj.weight", lambda x: torch.cat([x[32:64], x[:32], x[64:]])),  # z stands first
        changed("mamba.norm.weight", torch.ones_like),
    ],
    ids=["D", "A_log", "biases", "gate and up", "z first", "norm"],
)
def test_no_trap_of_granite_passes_the_proof(llama: Made, trap: Callable[[Made], dict[str, Tensor]]) -> None:
    with pytest.raises(LinearizeError, match="computes other logits in one pass"):
        llama.check(tensors=trap(llama))


@pytest.mark.parametrize(("name", "value"), [("attention_multiplier", 1.0), ("position_embedding_type", None)])
def test_multipliers_and_positions_of_granite_are_llamas(llama: Made, name: str, value: Any) -> None:
    llama.check()
    with pytest.raises(LinearizeError, match="computes other logits"):
        llama.check({**llama.config, name: value})


def test_mlx_normalises_all_groups_together_and_is_refused(llama: Made) -> None:
    """Without an error, so the list of engines has to say it."""
    named = {engine.name: engine for engine in engines_for("granitemoehybrid", llama.config)}
    assert not named["MLX"].takes
    assert "4 groups" in named["MLX"].note
    llama.check()  # writes the config
    native.save(llama.folder, llama.tensors, "float32", ())
    for logits in mlx_logits(llama.folder, llama.rows[0]):  # loads, so the config has no infinity in a form of its own
        assert float((logits - llama.expected[0]).abs().max() / llama.expected[0].abs().max()) > 0.01


def test_an_engine_that_is_off_is_told(qwen: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "compared", lambda *arguments: {"MLX": 0.5})
    with pytest.raises(LinearizeError, match=r"MLX computes other logits .* 5\.0e-01") as refused:
        export_native(str(qwen.linear), "qwen3_5", tmp_path / "out")
    assert refused.value.code == Exit.CHECK_FAILED
    assert not (tmp_path / "out").exists()


def test_decays_and_norms_stay_fp32(tmp_path: Path, linearize: Command) -> None:
    linear = converted(tmp_path, QWEN, "3", dtype="bfloat16")
    code, _, message = linearize("export", linear, "--as", "auto", "-o", tmp_path / "out")
    assert code == 0, message
    assert "as qwen3_5" in message
    assert "SGLang: yes" in message
    with safe_open(next((tmp_path / "out").glob("*.safetensors")), "pt") as file:
        kinds = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    precise = {name for name, kind in kinds.items() if kind == torch.float32}
    assert precise == {name for name in kinds if "norm" in name or name.endswith(("A_log", "dt_bias"))}
    assert set(kinds.values()) == {torch.float32, torch.bfloat16}


# ---------------------------------------------------------------- what is refused


def config_of(made: Made, **changes: Any) -> Any:
    """A model's config with changes in the first linear layer of its plan, or in itself."""
    config = type(made.model.config)(**made.model.config.to_dict())
    config.linearize = json.loads(json.dumps(made.model.config.linearize))
    layer = config.linearize["layers"][0]
    for name, value in changes.items():
        part = layer["options"] if name in layer["options"] else layer["site"] if name in layer["site"] else layer
        if name in part:
            part[name] = value
        else:
            setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "gsa"}, r"layer 0: gsa, and the format holds gdn alone \(convert with --to gdn --set nat"),
        ({"native": False}, r"layer 0: gdn with native=False"),
        ({"softmax_groups": [1]}, r"layer 0: key heads \[1\] keep softmax"),
        ({"attention_bias": True}, "biases of q, k and v"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ({"hidden_act": "gelu"}, "its MLP has gelu"),
        ({"num_hidden_layers": 3}, "no layer keeps softmax.*--restore"),
    ],
)
def test_what_qwen3_5_does_not_hold_is_named(qwen: Made, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LinearizeError, match=message) as refused:
        native.choose("qwen3_5", config_of(qwen, **changes), "it")
    assert refused.value.code == Exit.INCOMPATIBLE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps": 1e-3}, r"mamba2 with eps=0\.001 \(convert with --to mamba2 --set eps=1e-06\)"),
        ({"mlp_bias": True}, "biases of the MLP"),
        ({"head_dim": 16}, "4 heads of 16 beside a hidden size of 32"),
        ({"sliding_window": 8}, "softmax slides over 8 tokens"),
    ],
)
def test_what_granite_does_not_hold_is_named(llama: Made, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LinearizeError, match=message):
        native.choose("granitemoehybrid", config_of(llama, **changes), "it")


def test_softmax_of_another_kind_is_refused_and_the_format_for_it_named(llama: Made, qwen: Made) -> None:
    with pytest.raises(LinearizeError, match=r"this is a llama\. For this one: --as granitemoehybrid"):
        native.choose("qwen3_5", llama.model.config, "it")
    other = config_of(qwen)
    other.model_type = "gemma2"
    with pytest.raises(LinearizeError, match=r"gemma2, and no format holds .* qwen3_5 holds qwen3; granite"):
        native.choose("auto", other, "it")
    window = config_of(qwen, mechanism="window")
    window.linearize["layers"][0]["options"]["window"] = 8
    with pytest.raises(LinearizeError, match="layer 0: softmax over a window of 8 tokens"):
        native.choose("auto", window, "it")


def test_formats_and_folders_that_are_not_there_are_told(qwen: Made, tmp_path: Path) -> None:
    with pytest.raises(LinearizeError, match=r"--as qwen35: choose .* Did you mean 'qwen3_5'"):
        export_native(str(qwen.linear), "qwen35", tmp_path / "out")
    with pytest.raises(LinearizeError, match="is not linearized"):
        export_native(str(qwen.folder / "source"), "auto", tmp_path / "out")
    with pytest.raises(LinearizeError, match="must be separate folders"):
        export_native(str(qwen.linear), "auto", qwen.linear / "out")
    assert {*FORMATS} == {"qwen3_5", "granitemoehybrid"}


def test_our_plugin_leaves_them_to_vllm(qwen: Made, llama: Made) -> None:
    for made, what in ((qwen, "gdn"), (llama, "mamba2")):
        with pytest.raises(ValueError, match=rf"{what} as vLLM knows it, without this plugin.* linearize export"):
            layers_of(made.model.config)


def test_engines_that_know_intervals_alone_are_named(qwen: Made) -> None:
    whole = {engine.name: engine for engine in engines_for("qwen3_5", qwen.config)}
    assert whole["SGLang"].takes
    text = {name: value for name, value in qwen.config["text_config"].items() if name != "full_attention_interval"}
    named = {engine.name: engine for engine in engines_for("qwen3_5", {"text_config": text})}
    assert [name for name, engine in named.items() if not engine.takes] == ["SGLang", "MLX"]
    assert "every:4:3" in named["MLX"].note
    assert "28208" in named["llama.cpp"].note
