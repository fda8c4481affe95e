"""A GGUF file as a source: what transformers reads of it, one tensor at a time; what it would leave out is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from conftest import holds
from models import logits, small_model, tokens
from safetensors.torch import load_file
from training import BYTES, TEMPLATE, T, byte_tokenizer, make_recipe, stage
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from linearize.checkpoint.from_gguf import check_config
from linearize.checkpoint.source import open_source
from linearize.errors import Exit, LinearizeError
from linearize.export.to_gguf import llama3_factors
from linearize.finetune import finetune

if TYPE_CHECKING:
    from conftest import Command

TOKENS = [*BYTES, "th", "he", "<eos>"]
LLAMA3 = {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
Facts = dict[str, Any]


def write_gguf(
    path: Path, name: str = "llama", kind: str = "F32", drop: str = "", more: Facts | None = None, **facts: Any
) -> Path:
    """A small random model as llama.cpp's converter writes one; without tensors that have `drop` in their name, and
    with `more` of them. `facts` are metadata, whose names may have _ in place of a dot."""
    size = len(TOKENS)
    model = small_model(name, vocab_size=size, intermediate_size=64, eos_token_id=size - 1, bos_token_id=size - 1)
    config = model.config
    writer = gguf.GGUFWriter(path, facts.pop("architecture", name))
    writer.add_block_count(facts.pop("layers", config.num_hidden_layers))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(500000.0 if more else 10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(facts.pop("pre", "llama-bpe"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * (size - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["t h", "h e"])
    writer.add_eos_token_id(size - 1)
    writer.add_bos_token_id(size - 1)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name_of, value in facts.items():
        key = name_of if "." in name_of else name_of.replace("_", ".")
        (writer.add_string if isinstance(value, str) else writer.add_uint16)(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.num_hidden_layers)
    for key, value in model.state_dict().items():
        place, x = names.get_name(key, (".weight", ".bias")), value
        if place is None or (config.tie_word_embeddings and key.startswith("lm_head")) or (drop and drop in place):
            continue
        if name == "llama" and (".attn_q." in place or ".attn_k." in place):  # rotated in pairs of neighbours
            heads = config.num_attention_heads if "_q" in place else config.num_key_value_heads
            x = x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        stored = gguf.GGMLQuantizationType[kind if x.ndim == 2 else "F32"]
        writer.add_tensor(place, gguf.quants.quantize(x.contiguous().numpy(), stored), raw_dtype=stored)
    for key, x in (more or {}).items():
        writer.add_tensor(key, x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("name", "kind", "level"), [("llama", "F32", "full"), ("qwen2", "Q8_0", "none")])
def test_a_file_is_converted_as_transformers_reads_it(
    tmp_path: Path, linearize: Command, name: str, kind: str, level: str
) -> None:
    path = write_gguf(tmp_path / "small.gguf", name, kind)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    (tmp_path / "sha256-1f").symlink_to(path)  # as Ollama keeps files
    assert open_source(str(tmp_path / "sha256-1f"), None, weights=False).name == "sha256-1f"
    source = open_source(str(path), None)
    assert source.name == "small"
    assert (source.config["rms_norm_eps"], source.config["dtype"]) == (1e-6, "float32")
    ours = AutoModelForCausalLM.from_pretrained(source.folder)
    theirs = expected.state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    assert not [key for key, x in ours.state_dict().items() if not torch.equal(x, theirs[key])]
    torch.testing.assert_close(logits(ours, tokens(2, 20)), logits(expected, tokens(2, 20)), rtol=1e-5, atol=1e-5)

    code, _, err = linearize("convert", path, "slots=8", "--to", "gsa", "--verify", level, "-o", tmp_path / "linear")
    assert code == Exit.OK, err
    found: dict[str, torch.Tensor] = {}
    for shard in (tmp_path / "linear").glob("model-source-*"):
        found |= load_file(shard)
    assert len(found) >= 4 * 9
    assert not [key for key, x in found.items() if not torch.equal(x, theirs[key])]


def test_tokenizer_and_template_come_along(tmp_path: Path, linearize: Command) -> None:
    path = write_gguf(tmp_path / "small.gguf", general_license="apache-2.0")
    byte_tokenizer().save_pretrained(tmp_path)  # of another model
    code, _, err = linearize("convert", path, "slots=8", "--to", "gsa", "--verify", "none", "-o", tmp_path / "linear")
    assert code == Exit.OK, err
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "linear")
    ids = tokenizer("the 12<eos>", add_special_tokens=False)["input_ids"]
    assert [TOKENS[i] for i in ids] == ["th", "e", "Ġ", "1", "2", "<eos>"]
    assert tokenizer.decode(ids) == "the 12<eos>"
    assert (tokenizer.chat_template, tokenizer.eos_token) == (TEMPLATE, "<eos>")
    assert "license: apache-2.0" in (tmp_path / "linear" / "README.md").read_text()


def test_digits_of_smollm_and_ways_that_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_source(str(write_gguf(tmp_path / "a.gguf", pre="smollm")), None, weights=False).folder
    split = json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]
    assert [part["type"] for part in split["pretokenizers"]] == ["Digits", "ByteLevel"]
    assert not capsys.readouterr().err
    open_source(str(write_gguf(tmp_path / "b.gguf", pre="viking")), None, weights=False)
    assert holds(capsys.readouterr().err, "note", "viking")


def test_llama_3s_rotary_embedding_comes_along(tmp_path: Path) -> None:
    more = {"rope_freqs.weight": llama3_factors(LLAMA3, 8).float()}
    source = open_source(str(write_gguf(tmp_path / "a.gguf", more=more)), None)
    assert source.config["rope_parameters"] == {**LLAMA3, "rope_type": "llama3"}


@pytest.mark.slow
def test_inspect_and_estimate_take_a_file(tmp_path: Path, linearize: Command) -> None:
    path = write_gguf(tmp_path / "small.gguf", kind="F16")
    before = set(os.listdir(tmp_path))
    code, out, _ = linearize("inspect", path, "--json")
    assert (code, json.loads(out)["source"]) == (Exit.OK, "small")
    code, out, err = linearize("estimate", "gsa", f"model.base={path}", "data.pack.seq_len=64", "--json")
    assert code == Exit.OK, err
    assert json.loads(out)["stages"]
    assert set(os.listdir(tmp_path)) == before


MORE = {"rope_factors_long.weight": torch.ones(4)}
REFUSED: list[tuple[Facts, tuple[str, ...]]] = [
    ({"architecture": "granitehybrid"}, ("granitehybrid", "llama", "qwen3")),
    ({"layers": 10**9}, ("1,000,000,000", "Download")),
    ({"split_count": 3}, ("3", "llama-gguf-split --merge")),
    ({"llama_rope_scaling_type": "yarn"}, ("yarn",)),
    ({"more": MORE}, ("rope_factors_long.weight",)),
    ({"more": {"rope_freqs.weight": torch.arange(1.0, 5.0)}}, ("rope_freqs.weight", "Llama 3")),
    ({"name": "qwen3"}, ("q_proj.weight", "512")),  # whose heads are 8 wide, which transformers does not read
    ({"name": "qwen2", "qwen2.attention.sliding_window": 6}, ("attention.sliding_window is 6",)),
    ({"drop": "blk.1.ffn_up"}, ("layers.1.mlp.up_proj.weight",)),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED, ids=lambda value: "-".join(map(str, value))[:30])
def test_what_would_be_left_out_is_refused(tmp_path: Path, changes: Facts, named: tuple[str, ...]) -> None:
    path = write_gguf(tmp_path / "small.gguf", **changes)
    with pytest.raises(LinearizeError) as error:
        open_source(str(path), None)
    assert error.value.code == Exit.INCOMPATIBLE
    assert holds(error.value.message, str(path), *named)
    assert os.listdir(tmp_path) == ["small.gguf"]


@pytest.mark.parametrize(
    ("kind", "fact", "wrong", "right"),
    [
        ("starcoder2", "rope.freq_base", 999999.4375, 10000.0),
        ("stablelm", "rope.dimension_count", 80, 20),
        ("phi3", "attention.sliding_window", 2047, 0),
        ("gemma2", "attn_logit_softcapping", 30.0, 50.0),
    ],
)
def test_what_transformers_does_not_read_must_be_its_default(kind: str, fact: str, wrong: float, right: float) -> None:
    config = AutoConfig.for_model(kind)
    check_config(Path("a.gguf"), kind, {f"{kind}.{fact}": right}, config)
    with pytest.raises(LinearizeError, match=rf"a\.gguf.*{fact} is {wrong:g}"):
        check_config(Path("a.gguf"), kind, {f"{kind}.{fact}": wrong}, config)


def test_the_scale_of_the_largest_gemmas_is_not_in_their_file() -> None:
    config = AutoConfig.for_model("gemma2", head_dim=128)
    with pytest.raises(LinearizeError, match=r"heads of 128.*256"):
        check_config(Path("a.gguf"), "gemma2", {}, config)


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, revision: str | None = None) -> LinearizeError:
        with pytest.raises(LinearizeError) as error:
            open_source(str(tmp_path / name), revision)
        return error.value

    path = write_gguf(tmp_path / "small.gguf")
    whole = path.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.gguf").write_bytes(b"no weights")
    for name in ("cut.gguf", "text.gguf"):
        error = refused(name)
        assert (error.code, holds(error.message, name, "GGUF")) == (Exit.INCOMPATIBLE, True)
    error = refused("smal.gguf")
    assert (error.code, holds(error.message, "small.gguf")) == (Exit.INCOMPATIBLE, True)
    assert refused("small.gguf", "main").code == Exit.USAGE
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = refused("small.gguf")
    assert (error.code, holds(error.message, 'pip install "linearize[gguf]"')) == (Exit.RESOURCE, True)


@pytest.mark.slow
def test_nothing_stays_beside_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf")
    code = f"from linearize.checkpoint.source import open_source; print(open_source({str(path)!r}, None).folder)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert Path(out.strip()).parent == tmp_path
    assert os.listdir(tmp_path) == ["small.gguf"]


def test_a_recipe_takes_files_as_base_and_as_teacher(tmp_path: Path) -> None:
    """Conversations are read by the template that came with the file."""
    student, teacher = (write_gguf(tmp_path / f"{name}.gguf") for name in ("small", "other"))
    how = {"mechanism": "gsa", "options": {"slots": 8}}
    data = {"train": {"files": ["chat.jsonl"]}, "pack": {"seq_len": T}}
    stages = stage("attention_transfer", steps=1), stage("logit_kl", "all", steps=1, completion_only=True)
    recipe = make_recipe(tmp_path, student, *stages, data=data, convert=how, teacher=str(teacher))
    told = list[str]()
    finetune(recipe, say=told.append)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())["teacher"]
    assert (facts["model"], len(facts["sha256"])) == ("other", 64)
    assert [line for line in told if "the teacher is other" in line]
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "final").chat_template == TEMPLATE
