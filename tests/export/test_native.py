"""`linearize export --as`: known architectures compute what converted models compute, every silent trap of a format is
found by the proof, and what is not exact is refused by name."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import Command, holds
from models import copied, load, save_source, tokens
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from training import byte_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from linearize.convert import convert, plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.export import formats, native, to_gguf
from linearize.export import tokens as export_tokens
from linearize.export.formats import FORMATS
from linearize.export.native import engines_for, export_native, mlx_logits, one_pass, prove, stepped
from linearize.export.qwen3_5 import sections_of
from linearize.export.tokens import TEXTS, check_rule, ids, other_tokens
from linearize.serve.folder import layers_of
from linearize.verify.tolerances import NATIVE

QWEN = ("qwen3", "gdn", {"native": True})
QWEN_WIDE = ("qwen3", "gdn", {"native": True, "memories": 2, "maps": True})
LLAMA = ("llama", "mamba2", {})
WIDE = ("llama", "mamba2", {"memories": 2, "maps": True})
WINDOW = ("llama", "window", {"window": 8, "sink": 0})
SINKS = ("llama", "window", {"window": 8, "sink": 0, "sink_logit": True})
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


Kind = tuple[str, str, dict[str, Any]]


def converted(folder: Path, kind: Kind, keep: str, dtype: str = "keep", **changes: Any) -> Path:
    """A converted model whose mixers are as if they were trained: no weight is what a conversion starts with. Those of
    the window have none."""
    name, mechanism, options = kind
    source = save_source(folder / "source", name, **changes)
    plan = plan_conversion(str(source), mechanism, keep_softmax=keep, options=options, dtype=dtype)
    convert(*plan, folder / "linear", level="none", say=lambda text: None)
    torch.manual_seed(5)
    for shard in (folder / "linear").glob("model-mixers.safetensors"):
        trained = {key: x + (0.3 * torch.randn(x.shape)).to(x.dtype) for key, x in load_file(shard).items()}
        save_file(trained, shard, metadata={"format": "pt"})
    return folder / "linear"


class Made:
    """An export without its last steps: the config, folded weights, rows and the logits that are expected."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.linear, self.folder = converted(folder, kind, "3"), folder
        self.model = load(self.linear)
        self.form = formats.choose("auto", self.model.config, "it")
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


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("window"), WINDOW)


@pytest.mark.parametrize(
    ("kind", "keep", "changes"),
    [
        (QWEN, "3", {"tie_word_embeddings": True}),
        (LLAMA, "1", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
        (QWEN_WIDE, "1,3", {}),
        (WIDE, "1", {}),
        (WINDOW, "0,3", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
        (("qwen3", *WINDOW[1:]), "1", {"attention_bias": True}),
        (SINKS, "0,2", {"tie_word_embeddings": True}),
        pytest.param(
            ("mistral", *SINKS[1:]),
            "1",
            {"sliding_window": None, "head_dim": 16, "rope_parameters": LLAMA3},
            marks=pytest.mark.slow,
        ),
        pytest.param(("qwen2", *WINDOW[1:]), "0,2", {}, marks=pytest.mark.slow),
        pytest.param(("mistral", *WINDOW[1:]), "2", {"sliding_window": None, "head_dim": 16}, marks=pytest.mark.slow),
        pytest.param(WINDOW, "", {}, marks=pytest.mark.slow),
        pytest.param(WINDOW, "1", {"rope_parameters": YARN}, marks=pytest.mark.slow),
        pytest.param(QWEN, "0,1", {}, marks=pytest.mark.slow),
        pytest.param(("qwen3", "gdn", {"native": True, "taps": 1}), "3", {}, marks=pytest.mark.slow),
        pytest.param(LLAMA, "0,2,3", {"num_key_value_heads": 1}, marks=pytest.mark.slow),
        pytest.param(("qwen2", *LLAMA[1:]), "0", {}, marks=pytest.mark.slow),
        pytest.param(("qwen2", *WIDE[1:]), "0", {}, marks=pytest.mark.slow),
        pytest.param(("mistral", *LLAMA[1:]), "1", {"sliding_window": None}, marks=pytest.mark.slow),
        pytest.param(QWEN, "3", {"rope_parameters": YARN}, marks=pytest.mark.slow),
        pytest.param(("llama", "mamba2", {"taps": 1}), "0", {}, marks=pytest.mark.slow),
    ],
    ids=[
        "qwen3 tied",
        "llama3 rope",
        "qwen3 with two memories",
        "two memories",
        "window, llama3 rope",
        "window, qwen3 with biases",
        "sinks",
        "sinks, mistral with llama3 rope and wide heads",
        "window, qwen2",
        "window, mistral with wide heads",
        "window, no softmax layer",
        "window, yarn",
        "qwen3 irregular",
        "qwen3 without taps",
        "one key head",
        "qwen2",
        "qwen2 with two memories",
        "mistral",
        "qwen3 yarn",
        "no taps",
    ],
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
    row = tokens(1, 300)[0]  # more than a chunk of each format, 64 and 256
    want = one_pass(model, row)
    assert float((stepped(known, row) - want).abs().max() / want.abs().max()) < 1e-4
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, :9] = 0
    ours, theirs = (m(input_ids=ids, attention_mask=mask).logits for m in (model, known))
    exact = float(((ours - theirs) * mask[..., None]).abs().max() / ours.abs().max()) < 1e-4
    assert exact == ("left padding" not in made.engines[0].note)
    assert float((ours[0, 9:] - one_pass(model, ids[0, 9:])).abs().max() / ours.abs().max()) < 1e-4
    written = [m.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False) for m in (model, known)]
    assert torch.equal(*written) or not exact


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
        changed("post_attention_layernorm.weight", lambda x: x + 1.0),
        changed("model.norm.weight", lambda x: x + 1.0),
        changed("q_norm.weight", lambda x: x + 1.0),
        changed("k_norm.weight", lambda x: x + 1.0),
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
    ids=[
        "norms",
        "post norm",
        "last norm",
        "q norm",
        "k norm",
        "o doubled",
        "gates by head",
        "taps",
        "key heads",
        "A_log",
        "dt",
        "own norm",
        "gate",
    ],
)
def test_no_trap_of_qwen3_5_passes_the_proof(qwen: Made, trap: Callable[[Made], dict[str, Tensor]]) -> None:
    with pytest.raises(LinearizeError, match=r"computes.*logits") as refused:
        qwen.check(tensors=trap(qwen))
    assert refused.value.code == Exit.CHECK_FAILED


def test_the_rotary_embedding_of_qwen3_5_turns_all_channels(qwen: Made) -> None:
    text = qwen.config["text_config"]
    qwen.check(text)  # as SGLang reads it: without the config around it, and with the factor beside the parameters
    assert text["partial_rotary_factor"] == 1.0
    assert sum(text["rope_parameters"]["mrope_section"]) == 4
    partial = {**text["rope_parameters"], "partial_rotary_factor": 0.25, "mrope_section": [1, 0, 0]}
    with pytest.raises(LinearizeError, match="computes other logits"):
        qwen.check({**qwen.config, "text_config": {**text, "rope_parameters": partial}})
    with pytest.raises(LinearizeError, match=r"weights.*fit"):
        qwen.check(tensors={k: x for k, x in qwen.tensors.items() if not k.endswith("A_log")})


@pytest.mark.parametrize("D", [8, 64, 96, 128, 256])
def test_every_pair_of_channels_lies_in_its_section(D: int) -> None:
    """Pair n turns by position n % 3. llama.cpp leaves a pair behind the end of its section unturned, without an error:
    1e-2 of the largest logit after 200 tokens for one pair of 32."""
    sections = sections_of(D // 2)
    assert sum(sections) == D // 2
    assert all(n // 3 < sections[n % 3] for n in range(D // 2))


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
    with pytest.raises(LinearizeError, match=r"computes.*logits"):
        llama.check(tensors=trap(llama))


class Amplifying(torch.nn.Module):
    """Logits are embeddings; those of the token at place 3 are the difference from what it is, many times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.token = 5

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embed

    def forward(self, inputs_embeds: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        logits = inputs_embeds.clone()
        logits[:, 3] = (inputs_embeds[:, 3] - self.embed.weight[self.token]) * 1e5
        return SimpleNamespace(logits=logits)


def test_a_token_may_differ_as_far_as_rounding_moves_it() -> None:
    model, row = Amplifying().requires_grad_(False), torch.tensor([0, 1, 2, 5, 4])
    want = model.embed(row)
    largest = float(want.abs().max())

    def at(place: int, by: float) -> float:
        other = want.clone()
        other[place, 0] += by * largest
        return native.apart(other, want, model, row)

    assert at(3, 1e-2) == 0 < at(3, 1e-5) < NATIVE
    assert at(3, 1.0) == pytest.approx(1.0)
    assert at(2, 1e-3) == pytest.approx(1e-3, rel=1e-2)
    assert math.isnan(at(3, math.nan))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_multiplier", 1.0),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("logits_scaling", 8.0),
        ("position_embedding_type", None),
    ],
)
def test_multipliers_and_positions_of_granite_are_llamas(llama: Made, name: str, value: Any) -> None:
    llama.check()
    assert llama.config["rope_theta"] == llama.config["rope_parameters"]["rope_theta"]  # SGLang reads the first
    with pytest.raises(LinearizeError, match="computes other logits"):
        llama.check({**llama.config, name: value})


@pytest.mark.parametrize(
    "trap",
    [
        {"model_type": "llama"},  # transformers' own reads no `layer_types`
        {"sliding_window": 7},
        {"sliding_window": 9},
        {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
    ],
)
def test_no_trap_of_windows_passes_the_proof(window: Made, trap: dict[str, Any]) -> None:
    window.check()
    with pytest.raises(LinearizeError, match=r"computes.*logits"):
        window.check({**window.config, **trap})


def test_a_window_is_proved_by_rows_that_are_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """230 tokens, more than the rows of other proofs have."""
    linear = converted(tmp_path, ("llama", "window", {"window": 230, "sink": 0}), "3")
    form = FORMATS["ministral"]
    longer = form._replace(config=lambda config: {**form.config(config), "sliding_window": 231})
    monkeypatch.setitem(FORMATS, "ministral", longer)
    with pytest.raises(LinearizeError, match=r"computes.*logits"):
        export_native(str(linear), "auto", tmp_path / "out")


def test_engines_that_know_no_windows_are_named(window: Made, tmp_path: Path) -> None:
    """Without an error of theirs, so the list has to say it; vLLM's own Qwen3 stops at `max_window_layers`."""
    named = {engine.name: engine for engine in engines_for("ministral", window.config)}
    assert "LlamaForCausalLM" in named["vLLM"].note
    assert "model_type llama" in named["MLX"].note
    unkept = {**window.config, "layer_types": ["sliding_attention"] * 4}
    assert not {engine.name: engine for engine in engines_for("ministral", unkept)}["MLX"].takes
    scaled = {**window.config, "rope_parameters": {"rope_type": "dynamic"}}
    assert all("dynamic" in e.note for e in engines_for("ministral", scaled) if e.name in ("vLLM", "MLX", "llama.cpp"))
    made = Made(tmp_path, ("qwen3", *WINDOW[1:]))
    assert made.config["max_window_layers"] != made.config["num_hidden_layers"]
    named = {engine.name: engine for engine in engines_for("qwen3", made.config)}
    assert (named["vLLM"].takes, "--model-impl transformers" in named["vLLM"].note) == (True, True)
    assert not named["MLX"].takes
    made.check()  # writes the config
    native.save(made.folder, made.tensors, "float32", ())
    for logits in mlx_logits(made.folder, made.rows[0]):
        assert float((logits - made.expected[0]).abs().max() / made.expected[0].abs().max()) > 0.01


def test_mlx_normalises_all_groups_together_and_is_refused(llama: Made) -> None:
    """Without an error, so the list of engines has to say it."""
    named = {engine.name: engine for engine in engines_for("granitemoehybrid", llama.config)}
    assert not named["MLX"].takes
    assert "4 groups" in named["MLX"].note
    llama.check()  # writes the config
    native.save(llama.folder, llama.tensors, "float32", ())
    for logits in mlx_logits(llama.folder, llama.rows[0]):  # loads, so the config has no infinity in a form of its own
        assert float((logits - llama.expected[0]).abs().max() / llama.expected[0].abs().max()) > 0.01


@pytest.mark.parametrize("words", [("inspect",), ("convert", "--to", "gsa")])
def test_an_export_is_no_model_to_convert(
    qwen: Made, tmp_path: Path, linearize: Command, words: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(qwen.config))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    code, _, err = linearize(words[0], tmp_path, *words[1:])
    assert code == Exit.INCOMPATIBLE
    assert "Qwen3_5Config" in err
    assert "linearize export" in err


def test_an_engine_that_is_off_is_told(qwen: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "compared", lambda *arguments: {"MLX": 0.5})
    with pytest.raises(LinearizeError, match=r"MLX.*5\.0e-01") as refused:
        export_native(str(qwen.linear), "qwen3_5", tmp_path / "out")
    assert refused.value.code == Exit.CHECK_FAILED
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "form", "ends"),
    [
        (QWEN, "qwen3_5", ("A_log", "dt_bias", "norm.weight")),
        (WIDE, "granitemoehybrid", ("A_log", "dt_bias", "mamba.D", "norm.weight")),
        (SINKS, "granite_swa", ("self_attn.sinks",)),
    ],
)
def test_decays_and_norms_stay_fp32(
    tmp_path: Path, linearize: Command, kind: Kind, form: str, ends: tuple[str, ...]
) -> None:
    linear = converted(tmp_path, kind, "3", dtype="bfloat16")
    code, _, message = linearize("export", linear, "--as", "auto", "-o", tmp_path / "out")
    assert code == 0, message
    assert f"as {form}" in message
    assert ("SGLang: yes" in message) == (form != "granite_swa")
    with safe_open(next((tmp_path / "out").glob("*.safetensors")), "pt") as file:
        kinds = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    precise = {name for name, kind in kinds.items() if kind == torch.float32}
    final = {"model.norm.weight"} - precise  # of formats whose layers alone have precise norms
    assert precise == {name for name in kinds if name.endswith(ends)} - final
    assert set(kinds.values()) == {torch.float32, torch.bfloat16}


def test_configs_say_what_engines_need(qwen: Made, llama: Made) -> None:
    """vLLM and SGLang keep the state of Qwen3.5 in the dtype that its config names; JSON has no infinity."""
    assert qwen.config["text_config"]["mamba_ssm_dtype"] == "float32"
    low, high = llama.config["time_step_limit"]
    assert (low, type(high)) == (0.0, float)
    assert 1e6 < high < math.inf


def test_tokens_that_another_class_makes_are_told(qwen: Made, tmp_path: Path, linearize: Command) -> None:
    """transformers reads the tokenizer of a Qwen3.5 by a class with a rule of its own for splitting text."""
    assert other_tokens(qwen.folder, qwen.folder, trust_remote_code=False) == ""  # none there
    folder = copied(qwen.linear, tmp_path / "linear")
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=" ").save_pretrained(folder)
    code, _, message = linearize("export", folder, "--as", "auto", "-o", tmp_path / "out")
    assert code == 0, message
    theirs, ours = (AutoTokenizer.from_pretrained(place) for place in (folder, tmp_path / "out"))
    differ = [name for name, text in TEXTS.items() if ids(theirs, text) != ids(ours, text)]
    words = ("warning", "other tokens", type(ours).__name__, *differ, "PreTrainedTokenizerFast", "'out'")
    assert holds(message, *words) == bool(differ)
    assert ("MLX: no, it reads text" in message) == bool(differ)
    if "qwen3_5" in TOKENIZER_MAPPING_NAMES:  # transformers 5.24
        assert differ


# ---------------------------------------------------------------- gguf


def gguf_of(made: Made, folder: Path, form: str = "gguf", **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What gguf's own reader finds in a file: metadata, and tensors in fp32. `changes` are the config's."""
    import gguf

    config = made.config["text_config"] if made.form.name == "qwen3_5" else made.config
    to_gguf.write(
        folder / "model.gguf", made.form.name, {**config, **changes}, made.tensors, made.folder, to_gguf.FORMS[form]
    )
    reader = gguf.GGUFReader(folder / "model.gguf")
    tensors = {one.name: torch.from_numpy(gguf.dequantize(one.data, one.tensor_type).copy()) for one in reader.tensors}
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def test_gguf_of_qwen3_5_has_its_weights(qwen: Made, tmp_path: Path) -> None:
    known, found = gguf_of(qwen, tmp_path)
    assert known["general.architecture"] == "qwen35"
    assert known["qwen35.attention.recurrent_layers"] == [True, True, True, False]
    assert sum(known["qwen35.rope.dimension_sections"]) == 4
    assert (known["qwen35.ssm.inner_size"], known["qwen35.ssm.group_count"]) == (32, 4)
    ours = qwen.tensors
    assert len(found) == len(ours)
    layer = "model.layers.0.linear_attn."
    assert torch.equal(found["blk.0.ssm_a"], -ours[f"{layer}A_log"].exp())
    assert torch.equal(found["blk.0.ssm_conv1d.weight"], ours[f"{layer}conv1d.weight"][:, 0])
    assert torch.equal(found["blk.0.attn_norm.weight"], ours["model.layers.0.input_layernorm.weight"] + 1.0)
    assert torch.equal(found["blk.0.ssm_norm.weight"], ours[f"{layer}norm.weight"])  # the only norm that stores w
    assert torch.equal(found["blk.3.attn_q.weight"], ours["model.layers.3.self_attn.q_proj.weight"])


def test_gguf_of_granite_has_its_weights_twice_and_filled_up(llama: Made, tmp_path: Path) -> None:
    known, found = gguf_of(llama, tmp_path, rope_parameters=LLAMA3)
    assert known["general.architecture"] == "granitehybrid"
    assert known["granitehybrid.attention.head_count_kv"] == [0, 0, 0, 2]
    assert known["granitehybrid.ssm.inner_size"] == 2 * known["granitehybrid.embedding_length"]
    assert known["granitehybrid.ssm.state_size"] == 128  # 8 as it is trained; llama.cpp's CUDA scan has 128 and 256
    assert known["granitehybrid.rope.scaling.finetuned"] is True
    ours, layer = llama.tensors, "model.layers.0.mamba."
    z, v, k, q, step = found["blk.0.ssm_in.weight"].split([64, 64, 4 * 128, 4 * 128, 4])
    whole = ours[f"{layer}in_proj.weight"].split([32, 32, 32, 32, 4])
    for part, own in ((z, whole[0]), (v, whole[1])):
        assert torch.equal(part.view(4, 2, 8, 32), own.view(4, 1, 8, 32).expand(4, 2, 8, 32))
    for part, own in ((k, whole[2]), (q, whole[3])):
        assert torch.equal(part.view(4, 128, 32)[:, :8], own.view(4, 8, 32))
        assert not part.view(4, 128, 32)[:, 8:].any()
    assert torch.equal(step, whole[4])
    out = found["blk.0.ssm_out.weight"].view(32, 4, 2, 8)
    assert torch.equal(out[:, :, 0], ours[f"{layer}out_proj.weight"].view(32, 4, 8))
    assert not out[:, :, 1].any()
    paired = ours["model.layers.3.self_attn.q_proj.weight"].view(4, 2, 4, 32).transpose(1, 2)
    assert torch.equal(found["blk.3.attn_q.weight"], paired.reshape(32, 32))
    inverse = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=LLAMA3)
    waves = 10000.0 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(1.0 / (found["rope_freqs.weight"] * waves), inverse(config, "cpu")[0])


def test_gguf_of_two_memories_is_as_wide_as_it_is(tmp_path: Path) -> None:
    made = Made(tmp_path, WIDE)
    known, found = gguf_of(made, tmp_path)
    assert known["granitehybrid.ssm.inner_size"] == 2 * known["granitehybrid.embedding_length"]
    assert known["granitehybrid.ssm.time_step_rank"] == known["granitehybrid.ssm.group_count"] == 8
    ours, layer = made.tensors, "model.layers.0.mamba."
    assert torch.equal(found["blk.0.ssm_out.weight"], ours[f"{layer}out_proj.weight"])
    assert torch.equal(found["blk.0.ssm_norm.weight"], ours[f"{layer}norm.weight"].view(8, 8))
    assert torch.equal(found["blk.0.ssm_in.weight"][:128], ours[f"{layer}in_proj.weight"][:128])


def test_gguf_of_windows_has_its_weights_and_no_sinks(tmp_path: Path) -> None:
    made = Made(tmp_path, ("qwen2", *WINDOW[1:]))
    known, found = gguf_of(made, tmp_path, rope_parameters=LLAMA3)
    assert known["general.architecture"] == "granite_swa"
    assert known["granite_swa.attention.sliding_window"] == 8
    assert known["granite_swa.attention.sliding_window_pattern"] == [True, True, True, False]
    assert known["granite_swa.logit_scale"] == 1.0  # llama.cpp insists on it
    assert "rope_freqs.weight" in found
    layer = "model.layers.0.self_attn."
    for kind, rest in {"weight": (32,), "bias": ()}.items():
        paired = made.tensors[f"{layer}q_proj.{kind}"].view(4, 2, 4, *rest).transpose(1, 2)
        assert torch.equal(found[f"blk.0.attn_q.{kind}"], paired.reshape(32, *rest))
        assert torch.equal(found[f"blk.0.attn_v.{kind}"], made.tensors[f"{layer}v_proj.{kind}"])
    assert all(float(found[f"blk.{n}.attn_sinks.weight"].exp().max()) == 0.0 for n in range(4))
    made = Made(tmp_path / "sinks", SINKS)
    _, found = gguf_of(made, tmp_path / "sinks")
    assert torch.equal(found["blk.0.attn_sinks.weight"], made.tensors["model.layers.0.self_attn.sinks"].float())
    assert float(found["blk.3.attn_sinks.weight"].exp().max()) == 0.0


@pytest.mark.parametrize(("form", "error"), [("gguf", 2**-8), ("gguf-q8_0", 2**-6)])
def test_gguf_rounds_matrices_alone(qwen: Made, tmp_path: Path, form: str, error: float) -> None:
    _, exact = gguf_of(qwen, tmp_path)
    _, found = gguf_of(qwen, tmp_path, form, dtype="bfloat16")
    rounded = {name for name, x in found.items() if not torch.equal(x, exact[name])}
    assert {"token_embd.weight", "blk.0.ssm_out.weight", "blk.0.attn_qkv.weight", "blk.3.attn_q.weight"} <= rounded
    assert not {name for name in rounded if "norm" in name or "conv1d" in name or found[name].ndim == 1}
    assert all(float((found[name] - x).abs().max() / x.abs().max()) < error for name, x in exact.items())


def test_gguf_has_the_tokenizer(llama: Made, linearize: Command, tmp_path: Path) -> None:
    """Of a folder that has one, by the command; one with more tokens than the model is refused."""
    import gguf

    folder = tmp_path / "linear"
    shutil.copytree(llama.linear, folder)
    byte_tokenizer().save_pretrained(folder)
    whole = json.loads((folder / "tokenizer.json").read_text())
    code, _, message = linearize("export", folder, "--as", "gguf", "-o", tmp_path / "out")
    assert code == Exit.INCOMPATIBLE
    assert "257 tokens beside 97 embeddings" in message
    for damaged in ("{", "{}"):
        (folder / "tokenizer.json").write_text(damaged)
        code, _, message = linearize("export", folder, "--as", "gguf", "-o", tmp_path / "out")
        assert (code, "tokenizer.json" in message) == (Exit.INCOMPATIBLE, True), message
    whole["model"]["vocab"] = {token: i for token, i in whole["model"]["vocab"].items() if i < 90}
    whole["added_tokens"][0]["id"] = 95
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    code, _, message = linearize("export", folder, "--as", "gguf", "-o", tmp_path / "out")
    assert code == 0, message
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.gguf"]
    code, _, message = linearize("inspect", tmp_path / "out")
    assert (code, str(tmp_path / "out" / "model.gguf") in message) == (Exit.INCOMPATIBLE, True), message
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    found, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    assert len(found) == 97
    assert all(found[i] == token for token, i in whole["model"]["vocab"].items())
    assert (found[95], kinds[95], kinds[96]) == ("<eos>", gguf.TokenType.CONTROL, gguf.TokenType.UNUSED)
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 95
    assert fields["tokenizer.chat_template"].contents()


def test_tokenizers_that_llama_cpp_splits_otherwise_are_refused(llama: Made, tmp_path: Path) -> None:
    def written(*parts: dict[str, Any], model: str = "BPE") -> Path:
        whole = {
            "model": {"type": model, "vocab": {"a": 0}},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
        return tmp_path

    byte = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    plain = {**byte, "use_regex": False}
    digits = {"type": "Digits", "individual_digits": True}
    splits = [({"type": "Split", "pattern": {"Regex": regex}}, name) for regex, name in to_gguf.SPLITS.items()]
    assert [to_gguf.pre_tokenizer(written(split, plain)) for split, _ in splits] == ["llama-bpe", "qwen2"]
    assert to_gguf.pre_tokenizer(written(byte)) == "gpt-2"
    assert to_gguf.pre_tokenizer(written(digits, byte)) == "smollm"
    for other in (written(splits[0][0], byte), written(byte, model="Unigram"), written({"type": "Metaspace"})):
        assert to_gguf.pre_tokenizer(other) is None
    with pytest.raises(LinearizeError, match="a tokenizer that does not split") as refused:
        to_gguf.check("granitemoehybrid", llama.config, tmp_path, "it")
    assert refused.value.code == Exit.INCOMPATIBLE


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"mamba_proj_bias": True}, "biases of q, k and v"), ({"rope_parameters": {"rope_type": "yarn"}}, "yarn scaling")],
)
def test_what_llama_cpp_does_not_hold_is_named(
    llama: Made, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Also among the engines: who is sent to --as gguf is not refused there."""
    with pytest.raises(LinearizeError, match=message):
        to_gguf.check("granitemoehybrid", {**llama.config, **changes}, tmp_path, "it")
    notes = [
        {engine.name: engine.note for engine in engines_for("granitemoehybrid", {**llama.config, **more})}["llama.cpp"]
        for more in (changes, {})
    ]
    assert (message in notes[0], "--as gguf" in notes[0], "--as gguf" in notes[1]) == (True, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_value_head_dim": 16}, "values and keys differ"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "llama3 scaling"),
    ],
)
def test_what_llama_cpp_does_not_hold_of_qwen3_5_is_named(
    qwen: Made, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(LinearizeError, match=message):
        to_gguf.check("qwen3_5", {"text_config": qwen.config["text_config"] | changes}, tmp_path, "it")


def test_tokens_that_gguf_would_not_make_are_refused(llama: Made, tmp_path: Path, monkeypatch: Any) -> None:
    """As those of a Qwen2 are whose tokenizer is not Qwen's: transformers reads it by the rule of Qwen's."""
    folder = copied(llama.linear, tmp_path / "linear")
    byte_tokenizer().save_pretrained(folder)
    check_rule(folder, "it", trust_remote_code=False)
    (tmp_path / "none").mkdir()
    check_rule(tmp_path / "none", "it", trust_remote_code=False)
    monkeypatch.setattr(to_gguf, "check", lambda *arguments: None)  # the model has fewer embeddings
    monkeypatch.setattr(export_tokens, "load_tokenizer", lambda *arguments: lambda *text, **options: {"input_ids": [0]})
    with pytest.raises(LinearizeError, match=r"not exact as gguf.*another rule") as refused:
        export_native(str(folder), "gguf", tmp_path / "out")
    assert refused.value.code == Exit.INCOMPATIBLE
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_sentencepiece_alone_is_refused(llama: Made, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(LinearizeError, match=r"without tokenizer\.json"):
        to_gguf.check("granitemoehybrid", llama.config, tmp_path, "it")


def test_windows_that_llama_cpp_does_not_hold_are_named(window: Made, tmp_path: Path) -> None:
    with pytest.raises(LinearizeError, match=r"norms of q and k.*windows"):
        to_gguf.check("qwen3", window.config, tmp_path, "it")
    with pytest.raises(LinearizeError, match="yarn scaling"):
        to_gguf.check("ministral", {**window.config, "rope_parameters": YARN}, tmp_path, "it")


def test_without_the_package_gguf_its_name_is_told(
    llama: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LinearizeError, match=r"linearize\[gguf\]") as refused:
        to_gguf.check("granitemoehybrid", llama.config, tmp_path, "it")
    assert refused.value.code == Exit.RESOURCE


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
        ({"mechanism": "gsa"}, r"0.*gsa.*gdn.*--to.*gdn.*--set"),
        ({"native": False}, r"0.*gdn.*native=False"),
        ({"softmax_groups": [1]}, r"0.*\[1\].*softmax"),
        ({"attention_bias": True}, r"biases.*and"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ({"hidden_act": "gelu"}, "MLP"),
        ({"num_hidden_layers": 3}, "softmax.*--restore"),
    ],
)
def test_what_qwen3_5_does_not_hold_is_named(qwen: Made, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LinearizeError, match=message) as refused:
        formats.choose("qwen3_5", config_of(qwen, **changes), "it")
    assert refused.value.code == Exit.INCOMPATIBLE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps": 1e-3}, r"mamba2.*eps=0\.001.*--to.*mamba2.*--set.*eps=1e-06"),
        ({"mlp_bias": True}, "MLP"),
        ({"head_dim": 16}, r"4.*16.*beside.*32"),
        ({"memories": 2}, "one and with two memories"),
        ({"sliding_window": 8}, r"softmax.*8"),
        ({"options": {"eps": 1e-6, "window": 8}}, r"a window of 8 tokens beside mamba2"),
    ],
)
def test_what_granite_does_not_hold_is_named(llama: Made, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LinearizeError, match=message):
        formats.choose("granitemoehybrid", config_of(llama, **changes), "it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "gsa"}, r"0.*gsa.*window.*--to.*window.*--set.*sink=0"),
        ({"sink": 4}, r"0.*window.*sink=4.*--set.*sink=0"),
        ({"window": 4}, r"windows.*4, 8"),
        ({"softmax_groups": [1]}, r"0.*\[1\].*softmax"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"sliding_window": 16}, r"softmax.*16"),
        ({"sink_logit": True, "sink": 4}, r"0.*window.*sink=4"),
    ],
)
def test_what_windows_do_not_hold_is_named(window: Made, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LinearizeError, match=message) as refused:
        formats.choose("auto", config_of(window, **changes), "it")
    assert refused.value.code == Exit.INCOMPATIBLE


def test_the_mechanism_and_the_softmax_choose_a_format(window: Made, llama: Made, qwen: Made) -> None:
    assert formats.choose("auto", window.model.config, "it").name == "ministral"
    assert formats.choose("auto", llama.model.config, "it").name == "granitemoehybrid"
    with pytest.raises(LinearizeError, match=r"granitemoehybrid.*2.*window"):
        formats.choose("granitemoehybrid", window.model.config, "it")
    other = config_of(window)
    for source, name in {"mistral": "ministral", "qwen2": "qwen2", "qwen3": "qwen3"}.items():
        other.model_type = source
        assert formats.choose("auto", other, "it").name == name
    with pytest.raises(LinearizeError, match=r"ministral.*qwen3.*--as.*qwen3"):
        formats.choose("ministral", other, "it")
    with pytest.raises(LinearizeError, match=r"no sink_logit.*--as.*ministral"):
        formats.choose("granite_swa", window.model.config, "it")
    sinks = config_of(window, sink_logit=True)
    for layer in sinks.linearize["layers"]:
        layer["options"]["sink_logit"] = True
    assert formats.choose("auto", sinks, "it").name == "granite_swa"
    sinks.model_type = "qwen2"  # whose format has none
    with pytest.raises(LinearizeError, match=r"qwen2.*window.*sink_logit=True"):
        formats.choose("qwen2", sinks, "it")
    sinks.model_type = "llama"
    with pytest.raises(LinearizeError, match=r"have sink_logit.*--as.*granite_swa"):
        formats.choose("ministral", sinks, "it")
    mixed = config_of(llama, mechanism="window")
    mixed.linearize["layers"][0]["options"]["window"] = 8
    with pytest.raises(LinearizeError, match=r"granitemoehybrid.*0.*window.*8"):
        formats.choose("auto", mixed, "it")


@pytest.mark.parametrize("made", ["qwen", "llama"])
def test_a_model_without_softmax_is_refused(made: str, request: pytest.FixtureRequest) -> None:
    """transformers' classes do not decode then: their cache has no length."""
    config = config_of(request.getfixturevalue(made), num_hidden_layers=3)
    with pytest.raises(LinearizeError, match="no layer keeps softmax"):
        formats.choose("auto", config, "it")


def test_softmax_of_another_kind_is_refused_and_the_format_for_it_named(llama: Made, qwen: Made) -> None:
    with pytest.raises(LinearizeError, match=r"llama.*one.*--as") as refused:
        formats.choose("qwen3_5", llama.model.config, "it")
    assert "convert with" not in str(refused.value)  # which would give a Llama that no format holds
    with pytest.raises(LinearizeError, match=r"mamba2") as refused:
        formats.choose("granite_swa", llama.model.config, "it")
    assert "sink_logit: --as" not in str(refused.value)  # it has no windows
    other = config_of(qwen)
    other.model_type = "gemma2"
    with pytest.raises(LinearizeError, match=r"gemma2.*qwen3_5.*qwen3"):
        formats.choose("auto", other, "it")
    window = config_of(qwen, mechanism="window")
    window.linearize["layers"][0]["options"]["window"] = 8
    with pytest.raises(LinearizeError, match=r"0.*softmax.*8"):
        formats.choose("auto", window, "it")


def test_formats_and_folders_that_are_not_there_are_told(qwen: Made, tmp_path: Path) -> None:
    with pytest.raises(LinearizeError, match=r"--as.*qwen35.*'qwen3_5'"):
        export_native(str(qwen.linear), "qwen35", tmp_path / "out")
    with pytest.raises(LinearizeError, match="is not linearized"):
        export_native(str(qwen.folder / "source"), "auto", tmp_path / "out")
    with pytest.raises(LinearizeError, match=r"separate.*folders"):
        export_native(str(qwen.linear), "auto", qwen.linear / "out")
    assert {*FORMATS} == {"qwen3_5", "granitemoehybrid", "ministral", "granite_swa", "qwen3", "qwen2"}


@pytest.mark.parametrize("how", [("--as", "gguf"), ("--to", "onnx")])
def test_half_a_folder_is_not_exported(llama: Made, linearize: Command, tmp_path: Path, how: tuple[str, str]) -> None:
    """Nobody would miss in the result what was not copied."""
    half = copied(llama.linear, tmp_path / "half")
    (half / "generation_config.json").unlink()
    code, _, err = linearize("export", half, *how, "-o", tmp_path / "out")
    assert (code, holds(err, "generation_config.json", "linearize.json")) == (3, True), err
    assert not (tmp_path / "out").exists()


def test_our_plugin_leaves_them_to_vllm(qwen: Made, llama: Made) -> None:
    for made, what in ((qwen, "gdn"), (llama, "mamba2")):
        with pytest.raises(ValueError, match=rf"{what}.*vLLM.*linearize"):
            layers_of(made.model.config)


def test_vllm_is_told_to_keep_granites_memories_in_fp32(llama: Made) -> None:
    for dtype, told in {"bfloat16": True, "float32": False}.items():
        (vllm,) = [e for e in engines_for("granitemoehybrid", {**llama.config, "dtype": dtype}) if e.name == "vLLM"]
        assert vllm.takes
        assert ("--mamba-ssm-cache-dtype float32" in vllm.note) == told


def test_sglang_takes_llama_3s_rotary_embedding_and_no_other_is_promised(llama: Made) -> None:
    for rope, takes in (("default", True), ("llama3", True), ("yarn", False)):
        config = {**llama.config, "rope_parameters": {**LLAMA3, "rope_type": rope}}
        (sglang,) = [engine for engine in engines_for("granitemoehybrid", config) if engine.name == "SGLang"]
        assert (sglang.takes, "yarn" in sglang.note) == (takes, not takes)


def test_mlx_drops_granites_scaled_rotary_embedding(llama: Made) -> None:
    config = {**llama.config, "mamba_n_groups": 1}
    for rope, takes in (("default", True), ("llama3", False)):
        config |= {"rope_parameters": {**LLAMA3, "rope_type": rope}}
        named = {one.name: one for one in engines_for("granitemoehybrid", config)}
        assert (named["MLX"].takes, "llama3" in named["MLX"].note) == (takes, not takes)


def test_heads_that_llama_cpp_has_no_kernel_for_are_told(qwen: Made) -> None:
    for D, Dv, told in ((64, 64, False), (48, 48, True), (64, 32, True)):
        text = qwen.config["text_config"] | {"linear_key_head_dim": D, "linear_value_head_dim": Dv}
        named = {one.name: one for one in engines_for("qwen3_5", {"text_config": text})}
        assert ("on a GPU not with heads" in named["llama.cpp"].note) == told


def test_a_scaled_rotary_embedding_of_qwen3_5_is_promised_where_it_was_tried(qwen: Made) -> None:
    text = {**qwen.config["text_config"], "full_attention_interval": 4}
    for rope, takes in {"default": True, "yarn": False}.items():
        config = {**text, "rope_parameters": {**text["rope_parameters"], "rope_type": rope}}
        named = {engine.name: engine for engine in engines_for("qwen3_5", config)}
        assert all(named[name].takes for name in ("transformers", "vLLM", "MLX"))
        assert named["SGLang"].takes == named["llama.cpp"].takes == takes
        assert all((rope in named[name].note) != takes for name in ("vLLM", "SGLang", "llama.cpp"))


def test_engines_that_know_intervals_alone_are_named(qwen: Made) -> None:
    whole = {engine.name: engine for engine in engines_for("qwen3_5", qwen.config)}
    assert whole["SGLang"].takes
    assert "text_config" in whole["SGLang"].note
    text = {name: value for name, value in qwen.config["text_config"].items() if name != "full_attention_interval"}
    named = {engine.name: engine for engine in engines_for("qwen3_5", {"text_config": text})}
    assert [name for name, engine in named.items() if not engine.takes] == ["SGLang", "MLX"]
    assert "every:4:3" in named["MLX"].note
    assert "28208" in named["llama.cpp"].note
