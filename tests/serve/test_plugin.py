"""The plugin for vLLM as far as it needs no vLLM: what it reads from a folder, and what it refuses."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import holds

from linearize.plan.mechanisms import load_mechanism, resolve_options
from linearize.serve import vllm_plugin
from linearize.serve.folder import is_converted, layer_types, layers_of
from linearize.serve.states import Place
from linearize_kernels.mixer import AttentionSite

ROOT = Path(__file__).resolve().parents[2]
SITE = {"causal": True, "routed": True}


def config_of(kind: str = "Qwen3Config", layers: tuple[int, ...] = (0, 1, 3), **changes: Any) -> Any:
    """The config of a converted model of 4 layers; `changes` are of every site."""
    config = getattr(transformers, kind)(num_hidden_layers=4)
    config.architectures = ["LinearizedQwen3ForCausalLM"]
    sites = [{**SITE, "layer": i, "path": f"model.layers.{i}.self_attn", **changes} for i in layers]
    config.linearize = {"layers": [{"site": site, "mechanism": "gsa", "options": {}} for site in sites]}
    return config


def model_config(config: Any, experts: bool = False) -> Any:
    """What vLLM knows of a model, as far as the plugin reads it."""
    return SimpleNamespace(hf_config=config, is_moe=experts, model_impl="auto")


def test_layers_are_read_from_the_config() -> None:
    layers = layers_of(config_of())
    assert layers.linear == {i: f"model.layers.{i}.self_attn" for i in (0, 1, 3)}
    assert layers.softmax == (2,)
    assert layers.heads == {}
    assert is_converted(config_of())
    assert not is_converted(transformers.Qwen3Config())
    assert not is_converted(None)


HEADS: dict[str, Any] = {"softmax_groups": [1], "extras": ["sliding_window", "softcap"]}


@pytest.mark.parametrize("experts", [False, True])
def test_a_model_whose_heads_keep_softmax_is_a_hybrid_for_vllm(experts: bool) -> None:
    """All its layers have a state; vLLM asks the config which have one."""
    config = config_of(layers=(0, 1, 2, 3), **HEADS)
    assert layers_of(config).heads == dict.fromkeys(range(4), (1,))
    assert layers_of(config).softmax == ()
    name = f"LinearizedHybrid{'MoE' if experts else ''}ForCausalLM"
    assert vllm_plugin.served_name(model_config(config, experts)) == name
    vllm_plugin.Settings.verify_and_update_model_config(model_config(config))
    assert config.layer_types == ["linear_attention"] * 4
    assert config.source_layer_types == ["full_attention"] * 4


@pytest.mark.parametrize(
    ("layers", "experts", "name"),
    [
        ((0, 1, 2, 3), False, "LinearizedForCausalLM"),
        ((0, 1, 3), False, "LinearizedHybridForCausalLM"),
        ((0, 1, 2, 3), True, "LinearizedMoEForCausalLM"),
        ((1,), True, "LinearizedHybridMoEForCausalLM"),
    ],
)
def test_a_converted_model_gets_the_class_that_fits_its_layers(
    layers: tuple[int, ...], experts: bool, name: str
) -> None:
    asked: list[Any] = []
    method = vllm_plugin.renaming(lambda architectures, config: asked.append((architectures, config.model_impl)))
    for named in ("auto", "transformers"):  # by which vLLM would take its class without states
        ours, other = model_config(config_of(layers=layers), experts), model_config(transformers.Qwen3Config())
        ours.model_impl = other.model_impl = named
        method(["LinearizedQwen3ForCausalLM"], ours)
        method(["Qwen3ForCausalLM"], other)
        assert asked[-2:] == [(name, "auto"), (["Qwen3ForCausalLM"], named)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            config_of(causal=False),
            r"LinearizedQwen3ForCausalLM.*self_attn",
        ),
        (config_of(routed=False), r"layers\.0\.self_attn"),
        (config_of(softmax_groups=[1], extras=["s_aux"]), r"model\.layers\.0\.self_attn"),
        (config_of("LlavaConfig"), r"reads.*text"),
        (config_of("T5GemmaConfig"), r"causal.*language"),
    ],
    ids=["encoder", "own softmax", "sinks of heads", "several towers", "encoder and decoder"],
)
def test_what_vllm_cannot_run_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers_of(config)


def test_vllm_reads_which_layers_are_linear_where_the_source_calls_all_of_them_full() -> None:
    """Qwen3 writes full_attention for every layer; vLLM then takes a hybrid for a model without states."""
    config = config_of()
    assert config.layer_types == ["full_attention"] * 4
    vllm_plugin.Settings.verify_and_update_model_config(model_config(config))
    vllm_plugin.Settings.verify_and_update_model_config(model_config(config))  # in each process again
    assert config.layer_types == ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    assert config.source_layer_types == ["full_attention"] * 4


def test_kept_layers_stay_of_the_kind_that_the_source_says() -> None:
    config = config_of(layers=(0,))
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    assert layer_types(config, layers_of(config))[1:] == ["full_attention", "sliding_attention", "full_attention"]
    llama = config_of("LlamaConfig", layers=(0,))
    assert layer_types(llama, layers_of(llama)) == ["linear_attention", *["full_attention"] * 3]


def test_a_model_without_softmax_keeps_its_config() -> None:
    config = config_of(layers=(0, 1, 2, 3))
    vllm_plugin.Settings.verify_and_update_model_config(model_config(config))
    assert config.layer_types == ["full_attention"] * 4


def engine(**changes: Any) -> Any:
    """What an engine was asked for; `changes` to a plain one."""
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{name: changes.pop(name, value) for name, value in parallel.items()}),
        model_config=SimpleNamespace(quantization=changes.pop("quantization", None)),
        cache_config=SimpleNamespace(
            mamba_ssm_cache_dtype=changes.pop("mamba_ssm_cache_dtype", "auto"),
            kv_offloading_size=changes.pop("kv_offloading_size", None),
        ),
        **{"speculative_config": None, "lora_config": None, "kv_transfer_config": None, **changes},
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA adapters"),
        ({"kv_transfer_config": object()}, "KV transfer or offloading"),
        ({"kv_offloading_size": 1.0}, "KV transfer or offloading"),
        ({"quantization": "awq"}, "quantization"),
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "states in bfloat16"),
    ],
)
def test_an_engine_that_asks_for_more_is_told_why_not(asked: dict[str, Any], reason: str) -> None:
    assert vllm_plugin.refusals(engine()) == vllm_plugin.refusals(engine(quantization="fp8_per_block")) == []
    (found,) = vllm_plugin.refusals(engine(**asked))
    assert found.startswith(f"{reason}: ")


def test_code_of_an_earlier_version_is_to_be_upgraded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mixers know no operator around their states, so vLLM could not compile them."""
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.config", SimpleNamespace(MambaModelConfig=None))
    earlier = SimpleNamespace(mechanisms={"gla": object})
    monkeypatch.setattr(vllm_plugin, "class_of", lambda asked: earlier)
    with pytest.raises(ValueError, match="linearize upgrade DIR"):
        vllm_plugin.Settings.verify_and_update_config(engine())


@pytest.mark.parametrize(("mechanism", "why"), [("gla", None), ("sla", "its heads are computed from each other")])
def test_tensor_parallelism_is_refused_where_heads_do_not_divide(
    monkeypatch: pytest.MonkeyPatch, mechanism: str, why: str | None
) -> None:
    site = AttentionSite(3, "layers.3.attn", "Attention", 32, 4, 2, 8, 8, 8**-0.5, True)
    layer = {"mechanism": mechanism, "options": resolve_options(mechanism, {}), "site": dataclasses.asdict(site)}
    config = SimpleNamespace(auto_map={"AutoModelForCausalLM": "x"}, linearize={"layers": [layer]})
    asked = engine(tensor_parallel_size=2)
    asked.model_config = SimpleNamespace(hf_config=config, model="x", revision=None, quantization=None)
    kind = SimpleNamespace(mechanisms={mechanism: load_mechanism(mechanism)})
    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_from_dynamic_module", lambda *a, **k: kind)
    found = vllm_plugin.refusals(asked)
    if why is None:
        assert found == []
    else:
        assert found[0].startswith(f"tensor parallelism of 2 processes: layers.3.attn (sla): {why}")
    config.auto_map = {"AutoModel": "x"}  # a model without a head
    assert vllm_plugin.refusals(asked) == found


@pytest.mark.parametrize(("name", "projection"), [("phi3", "qkv_proj"), ("olmo2", "q_proj")])
def test_tensor_parallelism_is_refused_where_every_process_has_all_of_q(name: str, projection: str) -> None:
    asked = engine(tensor_parallel_size=2)
    config = transformers.AutoConfig.for_model(name)
    asked.model_config = SimpleNamespace(hf_config=config, model="x", revision=None, quantization=None)
    (found,) = vllm_plugin.refusals(asked)
    assert holds(found, f"layers.*.self_attn.{projection}", "(colwise_gather_output)")


@pytest.mark.parametrize(
    ("asked", "config", "told"),
    [(True, config_of(), True), (None, config_of(), False), (True, transformers.Qwen3Config(), False)],
)
def test_prefix_caching_that_is_asked_for_is_off_with_its_reason(
    asked: bool | None, config: Any, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As a warning, by a logger that vLLM prints; its own default says nothing."""
    made = SimpleNamespace(model_config=model_config(config), cache_config=SimpleNamespace(enable_prefix_caching=False))
    create = vllm_plugin.telling(lambda arguments, context: made)
    assert create(SimpleNamespace(enable_prefix_caching=asked), "context") is made
    found = [(one.name, one.levelname, one.getMessage()) for one in caplog.records]
    assert found == [("vllm.linearize", "WARNING", vllm_plugin.PREFIX_CACHING)] * told


def test_the_entry_point_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["linearize"].partition(":")
    assert getattr(importlib.import_module(module), name) is vllm_plugin.register


def test_nothing_but_the_plugin_imports_vllm() -> None:
    files = {
        path.name
        for path in ROOT.glob("linearize/**/*.py")
        if "import vllm" in path.read_text("utf-8").replace("from vllm", "import vllm")
    }
    assert files == {"vllm_plugin.py", "vllm_models.py", "serve_engine.py"}
    code = "import sys, linearize.serve.vllm_plugin; assert 'vllm' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_more_sequences_are_admitted_than_states_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses to start where its default of 256 or 1,024 sequences has no room for their states."""
    gpu = SimpleNamespace(is_cuda_alike=lambda: True, get_device_total_memory=lambda: 100_000)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=gpu))
    places = {0: Place(0, 0), 2: Place(2, 0), 3: Place(0, 50)}
    models = SimpleNamespace(memory_of=lambda config: (places, 100))
    monkeypatch.setitem(sys.modules, "linearize.serve.vllm_models", models)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    cache = SimpleNamespace(gpu_memory_utilization=0.5, kv_cache_memory_bytes=None, enable_prefix_caching=False)
    asked = engine()
    asked.cache_config = cache
    tokens = {"get_num_kv_heads": lambda parallel: 1, "get_head_size": lambda: 4, "dtype": torch.bfloat16}
    asked.model_config = SimpleNamespace(model=str(tmp_path), **tokens)
    block = 128 * 2 * 4 * 2  # a state of 100 bytes takes a block of keys and values
    assert vllm_plugin.most_sequences(asked) == int(0.75 * (50_000 - 1000)) // (2 * block) - 1
    cache.kv_cache_memory_bytes = 100_000
    assert vllm_plugin.most_sequences(asked) == 100_000 // (2 * block) - 1
    cache.enable_prefix_caching = True
    assert vllm_plugin.most_sequences(asked) == 100_000 // (4 * block) - 1
    gpu.is_cuda_alike = lambda: False
    assert vllm_plugin.most_sequences(asked) is None


@pytest.mark.parametrize(
    ("asked", "layers", "gpu", "cached"),
    [
        (True, (0, 1, 3), True, True),
        (False, (0, 1, 3), True, False),
        (True, (0, 1, 2, 3), True, False),  # all linear: vLLM has no block of keys for a state to stand beside
        (True, (0, 1, 3), False, False),
    ],
)
def test_prefixes_are_cached_where_asked_and_where_vllm_can(
    asked: bool, layers: tuple[int, ...], gpu: bool, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = SimpleNamespace(is_cuda_alike=lambda: gpu)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    cache = SimpleNamespace(enable_prefix_caching=True, mamba_cache_mode="none")
    made = SimpleNamespace(cache_config=cache, model_config=model_config(config_of(layers=layers)))

    def create(arguments: Any) -> Any:
        cache.enable_prefix_caching = vllm_plugin.caches_prefixes(made)
        return made

    vllm_plugin.telling(create)(SimpleNamespace(enable_prefix_caching=asked or None))
    assert cache.enable_prefix_caching == cached
    cache.mamba_cache_mode, cache.enable_prefix_caching = "align", True  # an engine's config is made again
    assert vllm_plugin.caches_prefixes(made) == (gpu and len(layers) < 4)
