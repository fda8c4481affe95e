"""A converted checkpoint is the source plus mixers: what is on disk, what loads, what it computes, what it saves."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.conversion_mapping as conversions
from conftest import TOLERANCE, Command, holds, relative_error, with_slow
from models import (
    ARCHITECTURES,
    HYBRID,
    Zoo,
    convert_folder,
    copied,
    load,
    logits,
    save_source,
    small_model,
    source_with_mixers,
    tokens,
)
from safetensors.torch import load_file

from linearize.convert import convert, plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.verify.reload import check_keys, check_logits
from linearize_kernels.hf.attention_hooks import mixers_of

# A hybrid of each, which has both kinds of layers; tests/architectures.py has all types of transformers, both ways.
MODELS = [*((name, HYBRID) for name in ARCHITECTURES), ("llama", "all"), ("gemma2", "all")]
EXACT = TOLERANCE[torch.float32]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    return {k: v for shard in sorted(folder.glob("*.safetensors")) for k, v in load_file(shard).items()}


@pytest.mark.parametrize(("name", "layers"), MODELS)
def test_the_result_is_the_source_with_mixers(zoo: Zoo, name: str, layers: str) -> None:
    source, folder = zoo.folders(name, layers)
    model, original = load(folder), small_model(name)
    ours, theirs = model.state_dict(), original.state_dict()
    new = {key for key in ours if ".mixer." in key}
    assert set(ours) - new == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    sites = range(4) if layers == "all" else (0, 2)
    assert [mixer.site.layer for mixer in mixers_of(model).values()] == list(sites)
    assert new == {f"{path}.mixer.{key}" for path, mixer in mixers_of(model).items() for key in mixer.state_dict()}

    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :5] = 0
    softmax = logits(original, ids, attention_mask=mask)[mask.bool()]
    linear = logits(model, ids, attention_mask=mask)[mask.bool()]
    reference = logits(source_with_mixers(source, folder), ids, attention_mask=mask)[mask.bool()]
    assert torch.isfinite(linear).all()
    assert relative_error(linear, softmax) > 1e-2
    assert relative_error(linear, reference) < EXACT
    with model.teacher():
        assert torch.equal(logits(model, ids, attention_mask=mask), logits(original, ids, attention_mask=mask))
    assert torch.equal(logits(model, ids, attention_mask=mask)[mask.bool()], linear)


@pytest.mark.parametrize(("name", "layers"), MODELS)
def test_every_mixer_parameter_gets_a_gradient(zoo: Zoo, name: str, layers: str) -> None:
    model = zoo.model(name, layers).train()
    model(tokens(2, 20), labels=tokens(2, 20), use_cache=False).loss.backward()
    for path, mixer in mixers_of(model).items():
        for key, parameter in mixer.named_parameters():
            assert parameter.grad is not None, f"{path} {key}"
            assert parameter.grad.abs().max() > 0, f"{path} {key}"


@pytest.mark.slow
@pytest.mark.usefixtures("real_processes")
def test_convert_proves_its_result(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "gemma2")
    messages: list[str] = []
    plan = plan_conversion(str(source), "gsa", layers=HYBRID, options={"slots": 8})
    result = convert(*plan, tmp_path / "linear", level="full", say=messages.append)
    assert messages == [result]
    assert holds(result, "missing", "unexpected")
    assert holds(result, "logits", "source")
    assert holds(result, "single", "equal")


@pytest.mark.slow
@pytest.mark.parametrize(("window", "proved"), [(40, "50 tokens"), (900, "206 tokens")])
def test_the_proof_goes_beyond_the_window(tmp_path: Path, window: int, proved: str) -> None:
    """As far as its rows may be long; the sentence says where a window held all of them."""
    source = save_source(tmp_path / "source", max_position_embeddings=1024)
    plan = plan_conversion(str(source), "gla", layers="0", options={"window": window, "sink": 1})
    message = convert(*plan, tmp_path / "linear", level="full", say=lambda text: None)
    assert holds(message, f"{proved}")
    assert holds(message, "window of 901") == (window == 900)


def test_a_proof_by_keys_says_what_it_leaves_out(tmp_path: Path) -> None:
    plan = plan_conversion(str(save_source(tmp_path / "source")), "gla")
    message = convert(*plan, tmp_path / "linear", level="keys", say=lambda text: None)
    assert holds(message, "names and shapes", "verify", "finetune")


@pytest.mark.slow
def test_steps_beyond_the_window_that_go_wrong_are_found(tmp_path: Path) -> None:
    """They are right as long as the window holds all tokens."""
    source, folder = save_source(tmp_path / "source"), tmp_path / "linear"
    plan, opened, natives = plan_conversion(str(source), "window", options={"window": 40})
    convert(plan, opened, natives, folder, level="none", say=lambda text: None)
    right, step = (folder / "cache.py").read_text(), "o, self.state = mixer(*inputs, layout, self.state)"
    wrong = right.replace(step, f"{step} if self.seen < 44 else (mixer(*inputs, layout, self.state)[0], self.state)")
    assert wrong != right
    (folder / "cache.py").write_text(wrong)
    with pytest.raises(LinearizeError, match=r"single.*differ"):
        check_logits(folder, opened, plan, False)


def test_the_proof_includes_cached_steps(zoo: Zoo, tmp_path: Path) -> None:
    """One pass is right, on both sides; what a cache gives on is not."""
    source, linear = zoo.folders("llama", HYBRID)
    folder = copied(linear, tmp_path / "linear")
    code = (folder / "cache.py").read_text()
    forgets = code.replace("o, self.state = mixer(", "o, _ = mixer(")
    assert forgets != code
    (folder / "cache.py").write_text(forgets)
    plan, opened, _ = plan_conversion(str(source), "gsa", layers=HYBRID, options={"slots": 8, "chunk_size": 16})
    with pytest.raises(LinearizeError, match=r"single.*differ") as caught:
        check_logits(folder, opened, plan, False)
    assert caught.value.code == Exit.CHECK_FAILED


@pytest.mark.parametrize(
    "damage", with_slow(["lost", "source", "extra", "shape", "nan", "index"], "source", "extra", "shape")
)
def test_verification_refuses_a_wrong_checkpoint(zoo: Zoo, tmp_path: Path, damage: str) -> None:
    from safetensors.torch import save_file

    folder = copied(zoo.folders("llama")[1], tmp_path / "linear")
    shard, index = folder / "model-mixers.safetensors", folder / "model.safetensors.index.json"
    tensors, listed = load_file(shard), json.loads(index.read_text())
    name = sorted(tensors)[0]
    if damage == "lost":
        del tensors[name], listed["weight_map"][name]
    elif damage == "source":
        shard = folder / "model-source-00001-of-00001.safetensors"
        tensors = load_file(shard)
        del tensors["lm_head.weight"], listed["weight_map"]["lm_head.weight"]
    elif damage == "extra":
        tensors["model.layers.0.self_attn.mixer.stray"] = torch.zeros(1)
        listed["weight_map"]["model.layers.0.self_attn.mixer.stray"] = shard.name
    elif damage == "shape":
        tensors[name] = torch.zeros(3)
    elif damage == "nan":
        tensors[name] = torch.full_like(tensors[name], torch.nan)
    else:
        listed["weight_map"][name] = "model-source-00001-of-00001.safetensors"
    save_file(tensors, shard, {"format": "pt"})
    index.write_text(json.dumps(listed))
    with pytest.raises(LinearizeError, match="verification failed") as caught:
        check_keys(folder)
    assert caught.value.code == Exit.CHECK_FAILED


# ---------------------------------------------------------------- source formats


@pytest.mark.parametrize("shards", [1, 5])
def test_source_weights_are_linked_byte_for_byte(tmp_path: Path, shards: int) -> None:
    source = save_source(tmp_path / "source", shard="5GB" if shards == 1 else "20KB")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(source.iterdir())}
    folder = convert_folder(source, tmp_path / "linear", HYBRID)
    inodes = {path.stat().st_ino for path in source.glob("*.safetensors")}
    linked = {path.stat().st_ino for path in folder.glob("*.safetensors")} & inodes
    assert linked == inodes
    assert not [path.name for path in folder.iterdir() if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", path.name)]
    assert len(inodes) >= shards
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(source.iterdir())} == before
    same_as_source(folder, "llama")


def same_as_source(folder: Path, name: str, **changes: Any) -> None:
    """The folder's model, with softmax switched on, is the small model of that name."""
    ids = tokens(2, 12)
    model = load(folder)
    with model.teacher():
        assert torch.equal(logits(model, ids), logits(small_model(name, **changes), ids))


def test_a_save_in_place_leaves_the_source_alone(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", shard="20KB")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    folder = convert_folder(source, tmp_path / "linear")
    model = load(folder)
    for parameter in model.parameters():
        parameter.data.zero_()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert not any(parameter.any() for parameter in load(folder).parameters())


def test_a_copy_where_links_are_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def refuse(*args: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    source = save_source(tmp_path / "source")
    monkeypatch.setattr(os, "link", refuse)
    folder = convert_folder(source, tmp_path / "linear")
    copied = folder / "model-source-00001-of-00001.safetensors"
    assert copied.read_bytes() == (source / "model.safetensors").read_bytes()
    assert copied.stat().st_nlink == 1


@pytest.mark.parametrize("copy", [False, True])
def test_shards_share_their_bytes_with_the_source_unless_copied(tmp_path: Path, linearize: Command, copy: bool) -> None:
    """The plan says which it is, counts the room, and what is written into a copy leaves the source alone."""
    source, output = save_source(tmp_path / "source"), tmp_path / "linear"
    command = ["convert", source, "--to", "gsa", "-o", output, "--verify", "none", "--json", *["--copy"] * copy]
    code, out, err = linearize(*command)
    assert code == 0, err
    message = " ".join(err.split())
    assert ("hard links" in message) == ("(--copy makes copies)" in message) == (not copy)
    plan = json.loads(out)["plan"]
    weights = (source / "model.safetensors").stat().st_size
    assert plan["needed_bytes"] == 4 * plan["new_parameters"] + weights * copy
    with (output / "model-source-00001-of-00001.safetensors").open("r+b") as file:
        file.write(b"changed!")
    assert ((source / "model.safetensors").read_bytes()[:8] == b"changed!") == (not copy)


@pytest.mark.parametrize("order", ["embedding first", "head first"])
@pytest.mark.parametrize("tie", [True, False])
def test_pickled_weights_become_safetensors(tmp_path: Path, tie: bool, order: str) -> None:
    source = tmp_path / "source"
    model = small_model("llama", tie_word_embeddings=tie)
    model.config.save_pretrained(source)
    state = dict(sorted(model.state_dict().items(), reverse=order == "embedding first"))
    torch.save(state, source / "pytorch_model.bin")
    folder = convert_folder(source, tmp_path / "linear")
    assert not list(folder.glob("*.bin"))
    assert ("lm_head.weight" in stored(folder)) != tie
    same_as_source(folder, "llama", tie_word_embeddings=tie)


def test_sharded_pickles_of_either_format(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = small_model("gpt2")
    model.config.save_pretrained(source)
    names = sorted(model.state_dict())
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-0000{number + 1}-of-00002.bin"
        # The format from before torch 1.6 cannot be mapped into memory.
        tensors = {key: model.state_dict()[key].clone() for key in part}
        torch.save(tensors, source / file, _use_new_zipfile_serialization=bool(number))
        weight_map |= dict.fromkeys(part, file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    same_as_source(convert_folder(source, tmp_path / "linear", HYBRID), "gpt2")


def test_tied_embeddings_stay_tied(zoo: Zoo) -> None:
    model = zoo.model("qwen2")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in stored(zoo.folders("qwen2")[1])


@pytest.mark.parametrize("shard", with_slow(["5GB", "20KB"], "5GB"))
def test_a_cast_rewrites_shard_by_shard(tmp_path: Path, shard: str) -> None:
    source = save_source(tmp_path / "source", shard=shard)
    level = "full" if shard == "20KB" else "none"
    folder = convert_folder(source, tmp_path / "linear", dtype="bfloat16", level=level)
    ours, theirs = stored(folder), stored(source)
    assert all(torch.equal(ours[key], theirs[key].bfloat16()) for key in theirs)
    wide = {key for key, tensor in ours.items() if tensor.dtype != torch.bfloat16}
    assert {key.split(".mixer.")[1] for key in wide} == {"forget.bias", "clock_strength"}  # Mixer.fp32_names
    assert len(list(folder.glob("model-source*"))) == len(list(source.glob("*.safetensors")))
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    model = load(folder, dtype="auto")
    assert {name for name, p in model.named_parameters() if p.dtype != torch.bfloat16} == wide
    assert torch.isfinite(logits(model, tokens(2, 12))).all()


def test_a_cast_rounds_weights_and_nothing_else(tmp_path: Path) -> None:
    """Not the scale of Gemma's embeddings, sqrt(32): verification would compare it with a rounded one."""
    convert_folder(save_source(tmp_path / "source", "gemma2"), tmp_path / "linear", dtype="bfloat16", level="full")


# ---------------------------------------------------------------- loading and saving again


def test_the_window_travels_where_a_layer_has_one(zoo: Zoo) -> None:
    folders = {window: zoo.folders("llama", HYBRID, window=window)[1] for window in (0, 4)}
    with_window = {path.stem for path in folders[4].glob("window*.py")}
    assert with_window == {"window", "window_blend", "window_kernels", "window_launch", "window_step"}
    assert not [*folders[0].glob("window*.py")]
    assert [mixer.near is None for folder in folders.values() for mixer in mixers_of(load(folder)).values()] == [
        *(True, True),
        *(False, False),
    ]


def test_saved_again_it_is_the_same(zoo: Zoo, tmp_path: Path) -> None:
    model, ids = zoo.model("qwen3", HYBRID), tokens(2, 12)
    expected = logits(model, ids)
    for generation in ("first", "second"):
        model.save_pretrained(tmp_path / generation)
        model = load(tmp_path / generation)
        assert {"attention_hooks.py", "gsa.py", "modeling_linearized.py"} <= {
            path.name for path in (tmp_path / generation).iterdir()
        }
        assert "linearize_sdpa" not in (tmp_path / generation / "config.json").read_text()
        assert torch.equal(logits(model, ids), expected)


RENAMED = {
    "mixtral": {"num_local_experts": 3},  # experts are stored one by one, used as one tensor
    "gpt_neox": {"num_attention_heads": 4},  # the head has another name on disk
}


@pytest.mark.parametrize("name", RENAMED)
def test_names_that_transformers_converts_survive(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {"mixtral": "MixtralConfig", "gpt_neox": "GPTNeoXConfig"}[name]
    monkeypatch.setitem(ARCHITECTURES, name, (kind, RENAMED[name]))
    source = save_source(tmp_path / "source", name)
    folder = convert_folder(source, tmp_path / "linear", HYBRID)
    same_as_source(folder, name)
    load(folder).save_pretrained(tmp_path / "again")
    same_as_source(tmp_path / "again", name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_the_bare_model_loads(zoo: Zoo, name: str) -> None:
    folder = zoo.folders(name, HYBRID)[1]
    bare, report = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not report["missing_keys"]
    assert len(mixers_of(bare)) == 2
    ids = tokens(2, 12)
    with torch.no_grad():
        hidden = bare.eval()(ids, use_cache=False).last_hidden_state
        expected = load(folder).base_model(ids, use_cache=False).last_hidden_state
    assert torch.equal(hidden, expected)


def test_without_trust_it_fails_loudly(zoo: Zoo) -> None:
    folder = zoo.folders("llama")[1]
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


def test_a_module_that_left_the_interface_is_not_skipped_in_silence(zoo: Zoo) -> None:
    model = zoo.model("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    words = r"model\.layers\.1\.self_attn .* its mixer was skipped.*<lambda> of .*test_roundtrip"
    with pytest.raises(RuntimeError, match=words):
        model(tokens(1, 4))


@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModel"])
def test_fewer_layers_than_the_plan_are_refused_by_name(zoo: Zoo, auto: str) -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.2\.self_attn.*num_hidden_layers"):
        getattr(transformers, auto).from_pretrained(
            zoo.folders("llama", HYBRID)[1], trust_remote_code=True, num_hidden_layers=2
        )


def test_mixers_of_a_new_model_are_initialised(zoo: Zoo) -> None:
    folder = zoo.folders("llama", HYBRID)[1]
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    fresh = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    bias = {path: mixer.forget.bias for path, mixer in mixers_of(load(folder)).items()}
    for path, mixer in mixers_of(fresh).items():
        assert torch.equal(mixer.forget.bias, bias[path])
        assert 0.01 < mixer.forget.weight.std() < 0.03


def test_lost_mixers_are_initialised_not_left_to_chance(zoo: Zoo, tmp_path: Path) -> None:
    folder = copied(zoo.folders("llama")[1], tmp_path / "linear")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if ".mixer." not in k}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-mixers.safetensors").unlink()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    bias = {path: mixer.forget.bias for path, mixer in mixers_of(zoo.model("llama")).items()}
    for path, mixer in mixers_of(model).items():
        assert torch.equal(mixer.forget.bias, bias[path])
        assert 0.01 < mixer.forget.weight.std() < 0.03


def registered_conversions() -> dict[str, list[Any]]:
    """Every checkpoint conversion that this transformers knows, by model type or class; in both directions."""
    table = {}
    for key, entries in conversions._build_checkpoint_conversion_mapping().items():
        table[key] = [*entries, *(reverse for entry in entries if (reverse := reversed_or_none(entry)))]
    return table


def reversed_or_none(entry: Any) -> Any:
    """What saving would do; a few conversions only go one way."""
    try:
        return entry.reverse_transform()
    except ValueError:
        return None


def test_no_conversion_of_transformers_renames_a_mixer(zoo: Zoo) -> None:
    table = registered_conversions()
    assert len(table) > 20
    mixers = mixers_of(zoo.model("llama", HYBRID, norm="head", clock=2))
    names = {name for mixer in mixers.values() for name, _ in mixer.named_parameters()}
    assert len(names) == 4
    paths = ("model.layers.3.self_attn", "transformer.h.0.attn", "gpt_neox.layers.1.attention", "layer.0.attention")
    for architecture, entries in table.items():
        for entry in entries:
            for path in paths:
                for name in names:
                    renamed, _ = entry.rename_source_key(f"{path}.mixer.{name}")
                    assert renamed.endswith(f".mixer.{name}"), f"{architecture} renames {name}: {entry}"
