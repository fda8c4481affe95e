"""Decays, half-lives and biases of gates stay in float32 in models and files of a narrower dtype."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import logits, small_model, tokens
from safetensors import safe_open
from torch import Tensor, nn
from training import base, make_recipe, stage, train
from transformers import AutoConfig, AutoModelForCausalLM

from linearize.checkpoint.shards import write_shard
from linearize.checkpoint.source import read_header
from linearize.convert import convert, plan_conversion
from linearize.plan.mechanisms import build_mixer, load_mechanism, resolve_options
from linearize.serve.shards import shard
from linearize.serve.states import layout_class, state_layouts
from linearize_kernels.hf.attention_hooks import mixers_of
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite

# Mechanism and options -> what stays in float32.
CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "gdn": ("gdn", {"window": 4}, {"A_log", "decay.bias", "strength.bias", "near.far_logit", "near.near_share"}),
    "gla": ("gla", {"output_gate": True}, {"forget.bias", "output_gate.bias"}),
    "gsa": ("gsa", {"slots": 8, "clock": 4}, {"forget.bias", "clock_strength"}),
    "gsa-fixed": ("gsa", {"slots": 8, "decay": "fixed", "clock": 0}, {"forget_bias"}),
    "retnet": ("retnet", {"decay": "learned"}, {"log_half_life"}),
    "la": ("la", {"window": 4, "learn_slope": True}, {"slope_logit", "near.far_logit"}),
    "mhla": ("mhla", {}, {"block_logits"}),
    "sla": ("sla", {"base": "gla"}, {"base.forget.bias"}),
    "mamba2": ("mamba2", {}, {"A_log", "step.bias"}),
}
every_case = pytest.mark.parametrize("case", CASES)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are stored in bfloat16."""
    folder = tmp_path_factory.mktemp("precise") / "source"
    small_model("llama").to(BF16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("converted"), {}
    for name, (mechanism, options, _) in CASES.items():
        plan = plan_conversion(str(source), mechanism, options=options)
        convert(*plan, root / name, level="none", say=lambda text: None)
        found[name] = root / name
    return found


def load(folder: Path, dtype: Any = BF16) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype)
    return model.eval()


def alike(ours: Tensor, theirs: Tensor) -> float:
    """The cosine between two sets of logits."""
    return float(torch.cosine_similarity(ours.double().flatten(), theirs.double().flatten(), 0))


def precise(model: Any) -> dict[str, Tensor]:
    """The parameters of mixers that are in float32."""
    return {n: p for n, p in model.named_parameters() if ".mixer." in n and p.dtype == torch.float32}


def own(names: Any) -> set[str]:
    """By their names in the mixer."""
    return {name.split(".mixer.")[1] for name in names}


def stored(folder: Path) -> dict[str, str]:
    """The dtype of each tensor of a folder."""
    return {name: entry.dtype for path in folder.glob("*.safetensors") for name, entry in read_header(path).items()}


def value(folder: Path, name: str) -> Tensor:
    """A tensor of a folder."""
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if name in set(file.keys()):
                return file.get_tensor(name)
    raise KeyError(name)


@every_case
def test_they_are_written_loaded_and_saved_in_float32(folders: dict[str, Path], tmp_path: Path, case: str) -> None:
    expected = CASES[case][2]
    found = {name for name, dtype in stored(folders[case]).items() if ".mixer." in name and dtype == "F32"}
    assert own(found) == expected
    for dtype in (BF16, torch.float16, "auto"):
        assert own(precise(load(folders[case], dtype))) == expected
    model = load(folders[case])
    with torch.no_grad():
        for parameter in precise(model).values():
            parameter.add_(torch.rand_like(parameter) * 1e-3)  # less than bfloat16 tells apart
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    for name, parameter in precise(model).items():
        assert torch.equal(again.get_parameter(name), parameter)
        assert not torch.equal(parameter.to(BF16).float(), parameter)
    assert torch.equal(logits(again, tokens(2, 20)), logits(model, tokens(2, 20)))


@every_case
def test_models_in_every_dtype_compute(folders: dict[str, Path], case: str) -> None:
    """Forward, backward and decoding; about what float32 gives."""
    ids, expected = tokens(2, 20), CASES[case][2]
    whole = logits(load(folders[case], torch.float32), ids)
    config = AutoConfig.from_pretrained(folders[case], trust_remote_code=True)
    fresh = AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=BF16)
    assert own(precise(fresh)) == expected
    for dtype in (BF16, torch.float16):
        cast = load(folders[case], torch.float32).to(dtype=dtype)
        assert own(precise(cast)) == expected
        assert {p.dtype for n, p in cast.named_parameters() if n not in precise(cast)} == {dtype}
        for model in (cast, load(folders[case], dtype)):
            found = logits(model, ids)
            assert found.dtype == dtype
            assert alike(found, whole) > 0.98
    with torch.autocast("cpu", BF16):
        assert alike(logits(load(folders[case], torch.float32), ids), whole) > 0.98
    model = load(folders[case]).train()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype, name
    out = load(folders[case]).generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape == (2, 24)


@pytest.mark.parametrize("hold", [lambda model: model.model, nn.Sequential], ids=["its inner model", "a wrapper"])
def test_a_cast_of_what_holds_the_layers_keeps_them(folders: dict[str, Path], hold: Any) -> None:
    """As PEFT, sentence-transformers and others cast, which do not call `to` of the model."""
    model = load(folders["gdn"], torch.float32)
    before = {name: p.clone() for name, p in precise(model).items()}
    hold(model).to(BF16)
    assert own(precise(model)) == CASES["gdn"][2]
    assert all(torch.equal(p, before[name]) for name, p in precise(model).items())


@pytest.mark.parametrize("case", ["gdn", "gsa"])
def test_half_says_what_it_rounds(folders: dict[str, Path], case: str) -> None:
    for call, dtype in (("half", torch.float16), ("bfloat16", BF16)):
        model = load(folders[case], torch.float32)
        name = str(dtype).removeprefix("torch.")
        with pytest.warns(UserWarning, match=rf"{call}\(\).*to\(torch.{name}"):
            getattr(model, call)()
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert logits(model, tokens(1, 9)).isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folders[case], BF16).to(BF16).float().to(torch.float64)


def test_what_was_rounded_before_a_move_stays_so(folders: dict[str, Path]) -> None:
    """DeepSpeed casts the data of all parameters and calls `to(device)`: all have one dtype, as its buffers need."""
    model = load(folders["gdn"])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16)
    assert {p.dtype for p in model.to("cpu").parameters()} == {BF16}


def test_weights_that_zero_3_divides_while_a_model_is_built_are_left_to_it(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`from_pretrained` under a DeepSpeed config of ZeRO-3 leaves 0 elements of what a module has, once it is built."""
    kind = type(load(folders["gdn"]))
    hooks = sys.modules[next(part.__module__ for part in kind.__mro__ if part.__name__ == "Linearized")]
    plain = hooks.mixer_at

    def divided(*args: Any) -> Any:
        mixer = plain(*args)
        for parameter in mixer.parameters():
            parameter.data = parameter.data.new_empty(0, dtype=BF16)
        return mixer

    monkeypatch.setattr(hooks, "mixer_at", divided)
    model = kind(AutoConfig.from_pretrained(folders["gdn"], trust_remote_code=True))
    assert {(p.numel(), p.dtype) for mixer in mixers_of(model).values() for p in mixer.parameters()} == {(0, BF16)}


def test_gates_add_up_in_float32(folders: dict[str, Path]) -> None:
    """A bias of 7.6 is a half-life of 1,400 tokens; 7.625, which bfloat16 has for it, is one of 1,420."""
    mixer = next(iter(mixers_of(load(folders["gla"])).values()))
    x = torch.randn(1, 5, mixer.forget.in_features, dtype=BF16)
    with torch.no_grad():
        mixer.forget.bias.fill_(7.6)
        mixer.forget.weight.zero_()
        assert torch.equal(mixer.forget(x), torch.full_like(mixer.forget(x), 7.6))


@every_case
def test_serving_takes_them(folders: dict[str, Path], case: str) -> None:
    """Layouts of states, and the part of a mixer that one of two processes has."""
    mechanism, _, expected = CASES[case]
    spec = json.loads((folders[case] / "config.json").read_text())["linearize"]
    layouts = state_layouts({mechanism: load_mechanism(mechanism)}, spec, BF16)
    assert {layout.bytes for layout in layouts.values()} != {0}
    whole = next(iter(mixers_of(load(folders[case])).values()))
    part = shard(whole, spec["layers"][0]["options"], 1, 2)
    assert set(part.fp32_names()) == expected
    assert all(part.get_parameter(name).dtype == torch.float32 for name in expected)
    site = part.site
    q, k, v = (torch.randn(1, 5, n, 8, dtype=BF16) for n in (site.heads, site.kv_heads, site.kv_heads))
    o, _ = part(q, k, v, torch.randn(1, 5, site.hidden, dtype=BF16), layout_class(part)())
    assert o.isfinite().all()


@pytest.mark.parametrize("narrow", [False, True])
def test_training_keeps_their_digits(tmp_path: Path, narrow: bool) -> None:
    """Also where an earlier version, or `upgrade` of its folder, left them in bfloat16."""
    folder = base(tmp_path / "bases", "llama", "bfloat16")
    if narrow:
        shards = folder / "model-mixers.safetensors"
        with safe_open(shards, "pt") as file:
            values = {name: file.get_tensor(name).to(BF16) for name in read_header(shards)}
        header = {name: type(entry)("BF16", entry.shape) for name, entry in read_header(shards).items()}
        write_shard(shards, header, lambda name: [values[name]])
    train(make_recipe(tmp_path, folder, stage("attention_transfer", ["new"], steps=2)))
    final = tmp_path / "run" / "final"
    names = [name for name, dtype in stored(final).items() if dtype == "F32"]
    assert own(names) == {"forget.bias", "clock_strength"}
    for name in names:
        assert not torch.equal(value(final, name).to(BF16).float(), value(final, name))
        assert torch.equal(load(final).get_parameter(name), value(final, name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "half_life"), [("gdn", 1e-9), ("gla", 1e-3), ("gsa", 0.1)])
def test_memories_of_less_than_a_token_train_in_bf16(name: str, half_life: float) -> None:
    options = {"half_life_min": half_life, "half_life_max": half_life, "chunk_size": 16}
    site = AttentionSite(0, "attn", "Attention", 32, 4, 2, 8, 8, 0.35, True)
    mixer = build_mixer(name, site, resolve_options(name, options))
    mixer.reset_parameters()
    for key, parameter in mixer.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if key in mixer.fp32_names() else BF16)
    optimizer = torch.optim.AdamW(mixer.parameters(), lr=1e-2)
    q, k, v = (torch.randn(2, 24, heads, 8, dtype=BF16) for heads in (4, 2, 2))
    x, found = torch.randn(2, 24, 32, dtype=BF16), []
    for _ in range(500):
        o, _ = mixer(q, k, v, x, TokenLayout(causal=True))
        loss = (o.float() - v.repeat_interleave(2, 2).float()).square().mean()
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters() if parameter.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < found[0]


def test_layers_of_the_source_with_such_names_keep_their_dtype(tmp_path: Path) -> None:
    """Only mixers of the plan; Mamba's layers are called `mixer` and have an A_log, too."""
    from architectures import small_model as any_model

    any_model("nemotron_h").to(BF16).save_pretrained(tmp_path / "source")
    plan = plan_conversion(str(tmp_path / "source"), "gdn", options={})
    convert(*plan, tmp_path / "linear", level="none", say=lambda text: None)
    model, native = load(tmp_path / "linear"), AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=BF16)
    ours = {f"{path}.mixer.{name}" for path, mixer in mixers_of(model).items() for name in mixer.fp32_names()}
    same = {name: p.dtype for name, p in native.named_parameters()}
    assert {name: p.dtype for name, p in model.named_parameters() if name in same} == same
    assert {model.get_parameter(name).dtype for name in ours} == {torch.float32}
