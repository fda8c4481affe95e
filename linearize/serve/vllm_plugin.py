"""The plugin for vLLM: `vllm serve DIR --trust-remote-code` runs a converted model.

vLLM calls `register` in each of its processes (the entry point `linearize` of the group `vllm.general_plugins`). A
converted model brings its own architecture name, so none can be registered beforehand: `register` lets vLLM's registry
answer for every config that `linearize convert` wrote. Nothing else of linearize imports this file, or vLLM.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .folder import OPERATOR, is_converted, layer_types, layers_of

# Architecture name -> class of vllm_models.py, by whether layers or heads keep softmax and whether there are experts.
NAMES = {
    (False, False): "LinearizedForCausalLM",
    (False, True): "LinearizedMoEForCausalLM",
    (True, False): "LinearizedHybridForCausalLM",
    (True, True): "LinearizedHybridMoEForCausalLM",
}
# Projections of q, k and v in a plan of tensor parallelism, as transformers names them.
PROJECTION = re.compile(r"\.([qkv]|qkv)_proj$|query_key_value$|c_attn$")
# What the engine is asked for that linear layers do not do, and why.
PIPELINE_PARALLEL = "pipeline parallelism: not written for layers with a state. Run one engine for each GPU"
CONTEXT_PARALLEL = "context parallelism: a state is not a row of tokens that processes can divide"
KV_TRANSFER = "KV transfer or offloading: connectors move keys and values of blocks, and a state is neither"
SPECULATION = "speculative decoding: one state is kept for each sequence, and it cannot drop rejected tokens"
LORA = "LoRA adapters: vLLM's LoRA does not know mixers, which an adapter may change. Merge it into the weights first"
PREFIX_CACHING = (
    "Prefix caching is off: it needs the states at the ends of cached blocks, which vLLM keeps on GPUs alone, and only "
    "where some layers keep softmax"
)
STATES = "states in {}: mixers keep them in float32, whose digits slow decays need. Leave out --mamba-ssm-cache-dtype"
QUANTIZATION = "quantization: only fp8 weights that vLLM makes itself (--quantization fp8) were tried before a mixer"
# Whether an engine that is being made was asked for prefix caching; vLLM's default is on.
prefix_caching_asked: ContextVar[bool] = ContextVar("prefix_caching_asked", default=False)
FEWER = (
    "At most %d sequences at a time, not %d: so many states fill this GPU's memory. --kv-cache-memory-bytes or "
    "--gpu-memory-utilization give them more"
)
EARLIER = "the code of an earlier version of linearize. Bring it up to date: linearize upgrade DIR"


def register() -> None:
    """Teach vLLM's registry converted models; calling it again changes nothing."""
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    if getattr(ModelRegistry, "serves_linearized", False):
        return
    for name in NAMES.values():
        ModelRegistry.register_model(name, f"{__package__}.vllm_models:{name}")
        MODELS_CONFIG_MAP[name] = Settings
    registry: Any = ModelRegistry
    registry.inspect_model_cls = renaming(registry.inspect_model_cls)
    registry.resolve_model_cls = renaming(registry.resolve_model_cls)
    if OPERATOR not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(OPERATOR)
    arguments: Any = EngineArgs
    arguments.create_engine_config = telling(arguments.create_engine_config)
    registry.serves_linearized = True


def renaming(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of vLLM's registry that gets our architecture name in place of a converted model's own."""

    def call(architectures: str | list[str], model_config: Any) -> Any:
        if not is_converted(getattr(model_config, "hf_config", None)):
            return method(architectures, model_config)
        if model_config.model_impl == "transformers":  # ours are, and vLLM would take its own class, without states
            model_config.model_impl = "auto"
        return method(served_name(model_config), model_config)

    return call


def telling(create: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_engine_config` that gives a converted model the prefix caching that was asked for, or says why
    not: vLLM's own default, which is on, is off without a word."""

    @functools.wraps(create)
    def call(arguments: Any, *args: Any, **kwargs: Any) -> Any:
        asked = bool(arguments.enable_prefix_caching)
        token = prefix_caching_asked.set(asked)
        try:
            made = create(arguments, *args, **kwargs)
        finally:
            prefix_caching_asked.reset(token)
        if asked and not made.cache_config.enable_prefix_caching and is_converted(made.model_config.hf_config):
            logging.getLogger("vllm.linearize").warning(PREFIX_CACHING)  # below the logger that vLLM prints
        return made

    return call


def served_name(model_config: Any) -> str:
    """The architecture name under which vLLM serves a converted model.

    Raises ValueError for one that it cannot serve (`folder.layers_of`).
    """
    layers = layers_of(model_config.hf_config)
    return NAMES[layers.hybrid, bool(model_config.is_moe)]


class Settings:
    """What vLLM asks of an architecture before it builds the model (its class VerifyAndUpdateConfig)."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Write the kinds of layers into the config of a hybrid; `vllm_models.source_config` takes them out again."""
        config = model_config.hf_config
        layers = layers_of(config)
        if layers.hybrid and not hasattr(config, "source_layer_types"):
            config.source_layer_types = getattr(config, "layer_types", None)
            config.layer_types = layer_types(config, layers)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse what linear layers do not do, and choose what they need.

        Raises ValueError with all the reasons.
        """
        from vllm.model_executor.models.config import MambaModelConfig

        earlier = not all(hasattr(kind, "core_into") for kind in class_of(vllm_config).mechanisms.values())
        reasons = [EARLIER] * earlier + refusals(vllm_config)
        if reasons:
            raise ValueError("vLLM does not serve this converted model with " + "; ".join(reasons))
        if not caches_prefixes(vllm_config):
            vllm_config.cache_config.enable_prefix_caching = False
        # A sliding window that every layer of the source has. vLLM looks for one where no layer is of another kind.
        own = getattr(vllm_config.model_config.hf_config, "source_layer_types", None) or ()
        if all(kind == "sliding_attention" for kind in own):
            vllm_config.cache_config.sliding_window = vllm_config.model_config.get_sliding_window()
        MambaModelConfig.verify_and_update_config(vllm_config)
        scheduler, most = vllm_config.scheduler_config, most_sequences(vllm_config)
        if most is not None and most < scheduler.max_num_seqs:
            logging.getLogger("vllm.linearize").warning(FEWER, most, scheduler.max_num_seqs)
            scheduler.max_num_seqs = most


def caches_prefixes(vllm_config: Any) -> bool:
    """Whether an engine keeps states at the ends of blocks, for prompts that begin alike."""
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    asked = prefix_caching_asked.get() or cache.mamba_cache_mode == "align"  # the latter where a config is made again
    hybrid = layers_of(vllm_config.model_config.hf_config).hybrid
    return bool(cache.enable_prefix_caching and asked and hybrid and current_platform.is_cuda_alike())


# Of a GPU's memory beside the weights, what states may take; the rest is for activations, graphs and keys.
FOR_STATES = 0.75
# The largest block of vLLM's attention kernels; most take 16 tokens.
BLOCK_TOKENS = 128


def most_sequences(vllm_config: Any) -> int | None:
    """The states of how many sequences fit on a GPU; None where nothing is known of its memory."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return None
    from .vllm_models import memory_of

    cache, folder = vllm_config.cache_config, Path(vllm_config.model_config.model)
    room = getattr(cache, "kv_cache_memory_bytes", None)
    if room is None:
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        weights //= vllm_config.parallel_config.tensor_parallel_size
        room = FOR_STATES * (cache.gpu_memory_utilization * current_platform.get_device_total_memory() - weights)
    places, size = memory_of(vllm_config)
    # vLLM fills a state up to whole blocks of the keys and values that a kept layer has of so many tokens.
    asked = vllm_config.model_config
    heads = asked.get_num_kv_heads(vllm_config.parallel_config)
    block = BLOCK_TOKENS * 2 * heads * asked.get_head_size() * asked.dtype.itemsize
    size = -(-size // block) * block
    size *= len({place.owner for place in places.values()})
    if cache.enable_prefix_caching:  # a sequence has two of each while it goes from one block to the next
        size *= 2
    return max(1, int(room) // size - 1)


def refusals(vllm_config: Any) -> list[str]:
    """Why an engine cannot be what it was asked to be; empty where it can."""
    parallel, states = vllm_config.parallel_config, vllm_config.cache_config.mamba_ssm_cache_dtype
    asked = {
        PIPELINE_PARALLEL: parallel.pipeline_parallel_size > 1,
        CONTEXT_PARALLEL: getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        KV_TRANSFER: vllm_config.kv_transfer_config is not None
        or bool(getattr(vllm_config.cache_config, "kv_offloading_size", None)),
        SPECULATION: vllm_config.speculative_config is not None,
        LORA: vllm_config.lora_config is not None,
        STATES.format(states): states not in ("auto", "float32"),
        QUANTIZATION: not (vllm_config.model_config.quantization or "fp8").startswith("fp8"),
    }
    reasons = [reason for reason, found in asked.items() if found]
    size = parallel.tensor_parallel_size
    why = undivided(vllm_config, size) if size > 1 else ""
    if why:
        advice = "Run one engine for each GPU: --data-parallel-size"
        reasons.insert(0, f"tensor parallelism of {size} processes: {why}. {advice}")
    return reasons


def class_of(vllm_config: Any) -> Any:
    """The model class of a converted folder's own code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    asked = vllm_config.model_config
    named = asked.hf_config.auto_map
    code = named.get("AutoModelForCausalLM") or named["AutoModel"]
    return get_class_from_dynamic_module(code, asked.model, revision=asked.revision)


def undivided(vllm_config: Any, size: int) -> str:
    """Why the heads of a converted model cannot be divided among `size` processes; empty where they can."""
    from .shards import divides

    config = vllm_config.model_config.hf_config
    plan = getattr(config, "base_model_tp_plan", None) or {}
    gathered = next((name for name, how in plan.items() if PROJECTION.search(name) and how != "colwise"), None)
    if gathered is not None:
        return (
            f"the architecture hands the whole of {gathered} to every process ({plan[gathered]}), and a mixer takes "
            "the heads of its own"
        )
    kind = class_of(vllm_config)
    tried: dict[str, str] = {}
    for layer in config.linearize["layers"]:
        site, options = layer["site"], layer["options"]
        key = repr((layer["mechanism"], options, {**site, "layer": 0, "path": ""}))
        if key not in tried:
            tried[key] = divides(kind.mechanisms[layer["mechanism"]], site, options, size)
        if tried[key]:
            return f"{site['path']} ({layer['mechanism']}): {tried[key]}"
    return ""
