"""Converted models as vLLM runs them: its Transformers backend, with a state in place of keys for each linear layer.

vLLM builds the model from the checkpoint's own code, and calls its attention modules with all tokens of a batch in one
row. A module that keeps softmax gets vLLM's attention. A linear one gets a `StateAttention`, which hands each
sequence's state to the module's mixer. Only vLLM imports this file, through vllm_plugin.py.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.transformers import TransformersForCausalLM, TransformersMoEForCausalLM
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR
from vllm.model_executor.models.transformers.fusers.attention import VLLM_ATTN_IMPL
from vllm.model_executor.models.utils import maybe_prefix
from vllm.platforms import current_platform
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from linearize_kernels.hf.seam import bind, hidden_name, without_rotation

from .folder import layers_of
from .shards import shard, shard_spec
from .states import StateLayout, calls_of, code_of, run_call, softmax_of, state_layouts

# ---------------------------------------------------------------- one layer


class StateMetadataBuilder(LinearAttentionMetadataBuilder):
    """vLLM's description of a batch, and beside it the calls that the batch becomes, the same for all layers."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made: LinearAttentionMetadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        starts = common.query_start_loc_cpu.tolist()
        # A bound from above that is exact for sequences without a state; it saves waiting for the GPU.
        total = common.seq_lens if common.seq_lens_cpu_upper_bound is None else common.seq_lens_cpu_upper_bound
        seen = [length - (end - start) for length, start, end in zip(total.tolist(), starts, starts[1:], strict=False)]
        made.calls = calls_of(starts, seen, made.state_indices_tensor)
        return made


class StateBackend(LinearAttentionBackend):
    """Tells vLLM which builder the layers of linearize need."""

    @staticmethod
    def get_name() -> str:
        return "LINEARIZE"

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        return StateMetadataBuilder


class StateAttention(nn.Module, MambaBase):
    """Stands where a module's softmax was: reads each sequence's state from vLLM's memory, runs the mixer, writes.

    Heads that keep softmax go to an Attention of vLLM, which holds their keys and values.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(
        self, module: nn.Module, layout: StateLayout, prefix: str, options: dict[str, Any], processes: int
    ) -> None:
        """`module` is the attention module with its mixer, of these `options`; `prefix` the name under which vLLM gives
        memory; `processes` how many divide the heads."""
        super().__init__()
        self.__dict__["module"] = module  # no child: it holds this
        self.options, self.processes, self.divided = options, processes, processes == 1
        self.layout, self.prefix = layout, prefix
        self.heads = softmax_of(module.mixer)
        self.softmax: Attention | None = None
        self.hidden: Tensor | None = None
        self.rotation: Any = None
        self.kv_cache = (torch.tensor([]),)
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self
        module.register_forward_pre_hook(self.before, with_kwargs=True)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.layout.bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def get_attn_backend(self) -> type[StateBackend]:
        return StateBackend

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pre-hook of the attention module: keep the hidden states, which gates read; take rotation away if asked, and
        keep it for mixers that rotate behind their feature map."""
        bound = bind(module, args, kwargs)
        self.hidden = bound[hidden_name(module.mixer)]
        if not module.mixer.drop_rope:
            return None
        self.rotation = without_rotation(bound, True)
        return (), bound

    def own_mixer(self) -> Any:
        """The mixer of this process's heads, which is made of the whole one when that has its weights."""
        module: Any = self.__dict__["module"]
        if not self.divided:
            module.mixer = shard(module.mixer, self.options, get_tensor_model_parallel_rank(), self.processes)
            self.divided = True
        return module.mixer

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """q [T,H*D], k [T,Hkv*D], v [T,Hkv*Dv] -> [1,T,H,Dv], which is what modules of transformers expect.

        Where Dv < D, vLLM fills v up to D, and expects o so.
        """
        mixer = self.own_mixer()
        site, T, heads = mixer.site, query.shape[0], self.heads
        hidden, rotation, self.hidden, self.rotation = self.hidden, self.rotation, None, None
        assert hidden is not None, f"{site.path}: its attention ran outside its module"
        H, Hkv = (site.heads, site.kv_heads) if heads is None else (heads.heads, heads.kv_heads)
        if query.shape[1] != H * site.key_dim:
            raise ValueError(
                f"{site.path}: vLLM hands over {query.shape[1]} numbers of q for {H} heads of {site.key_dim}"
            )
        q, k, v = query.view(T, H, -1), key.view(T, Hkv, -1), value.view(T, Hkv, -1)
        if heads is not None:
            (q, own_q), (k, own_k), (v, own_v) = ((part[0] for part in heads.split(y[None])) for y in (q, k, v))
        out = q.new_zeros(T, site.heads, v.shape[-1])
        described = get_forward_context().attn_metadata
        if described is not None:  # else vLLM measures how much memory a batch takes
            inputs = q, k, v[..., : site.value_dim], hidden.reshape(T, -1)
            for call in described[self.prefix].calls:
                run_call(mixer, self.layout, self.kv_cache[0], call, inputs, rotation, out[..., : site.value_dim])
        if heads is None:
            return out[None]
        assert self.softmax is not None
        kept = self.softmax(own_q.flatten(1), own_k.flatten(1), own_v.flatten(1))
        return heads.join(out[None], kept.view(1, T, -1, out.shape[-1]))


class ClearedAttention(Attention):
    """Attention of vLLM whose output has its heads apart, and which holds whole documents on a CPU, where it would hold
    a sliding window alone.

    A page that held states may have bytes that are NaN as keys, and so are their scores, seen or not. vLLM clears pages
    before they hold keys; on a CPU it leaves out those of sliding windows.
    """

    def forward(self, *inputs: Any, **settings: Any) -> Tensor:
        """[1,T,H,Dv], where vLLM gives [T,H*Dv]: GPT-2 joins the last two dimensions, whatever they are."""
        out: Tensor = super().forward(*inputs, **settings)
        return out.view(1, len(out), self.num_heads, -1)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)
        if not current_platform.is_cpu() or not isinstance(spec, SlidingWindowSpec):
            return spec
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=spec.dtype,
            kv_quant_mode=spec.kv_quant_mode,
            sliding_window=spec.sliding_window,
        )


# ---------------------------------------------------------------- the model


@functools.cache
def model_layouts(code: str, model: str, revision: str | None, spec: str, dtype: torch.dtype) -> dict[int, StateLayout]:
    """The layouts of a checkpoint's states by layer; `code` names its class, `spec` is `config.linearize` as JSON."""
    kind: Any = get_class_from_dynamic_module(code, model, revision=revision)
    return state_layouts(kind.mechanisms, json.loads(spec), dtype)


def layouts_of(vllm_config: Any) -> dict[int, StateLayout]:
    """`model_layouts` of what an engine was started with."""
    asked = vllm_config.model_config
    config = asked.hf_config
    code = config.auto_map.get("AutoModelForCausalLM") or config.auto_map["AutoModel"]
    spec = shard_spec(config.linearize, vllm_config.parallel_config.tensor_parallel_size)
    return model_layouts(code, asked.model, asked.revision, json.dumps(spec), asked.dtype)


def source_config(config: Any) -> Any:
    """A copy of a config with the kinds of layers that the model's own code reads (`vllm_plugin.Settings`)."""
    config = copy.deepcopy(config)
    if hasattr(config, "source_layer_types"):
        own = config.__dict__.pop("source_layer_types")
        if own is None:
            del config.layer_types
        else:
            config.layer_types = own
    return config


class Linearized:
    """Mixin before a class of vLLM's Transformers backend.

    vLLM reads the class variables. It has protocols of them, whose `__init__` would hide that of the backend.
    """

    # Of the backend.
    config: Any
    text_config: Any
    model: Any
    cache_config: Any
    attention_fusers: dict[int, tuple[str, Any]]
    vllm_config: Any

    has_inner_state: ClassVar[bool] = True
    is_attention_free: ClassVar[bool] = False
    is_hybrid: ClassVar[bool] = False
    supports_lora: ClassVar[bool] = False

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """The largest state, in bytes: vLLM makes its pages as large."""
        return ((max(layout.bytes for layout in layouts_of(vllm_config).values()),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        raise NotImplementedError("vLLM copies states for prefix caching alone, which is off for converted models")

    def _patch_config(self) -> None:
        self.config = source_config(self.config)
        self.text_config = self.config.get_text_config()
        super()._patch_config()  # type: ignore[misc]

    def _create_hf_to_vllm_mapper(self) -> None:
        """How weights are named. Patterns of weights to leave out may fit a parameter, as GPT-2's `attn.bias` fits its
        c_attn.bias: transformers leaves out only what no parameter takes."""
        model = self.model
        patterns, names = model._keys_to_ignore_on_load_unexpected or [], [name for name, _ in model.named_parameters()]
        kept = [pattern for pattern in patterns if not any(re.search(pattern, name) for name in names)]
        model._keys_to_ignore_on_load_unexpected = kept
        super()._create_hf_to_vllm_mapper()  # type: ignore[misc]

    def recursive_replace(self) -> None:
        """Put vLLM's layers in place of the model's, and leave mixers as they are.

        The hooks of the checkpoint's own code go: vLLM finds the attention function by a name, and calls it itself.
        """
        model = self.model
        mixers: dict[str, Any] = {
            name.removesuffix(".mixer"): part
            for name, part in model.named_modules()
            if name.endswith(".mixer") and hasattr(part, "site")
        }
        code = code_of(type(next(iter(mixers.values()))))
        for part in model.modules():
            remove_hooks(part, code)
            if hasattr(getattr(part, "config", None), "_attn_implementation"):
                part.config._attn_implementation_internal = VLLM_ATTN_IMPL
        for name in mixers:
            del model.get_submodule(name).mixer
        super().recursive_replace()  # type: ignore[misc]
        for name, mixer in mixers.items():
            model.get_submodule(name).mixer = mixer

    def _create_attention_instances(self, prefix: str = "") -> None:
        """Attention of vLLM for the layers and heads that keep softmax, a `StateAttention` for each linear layer.

        Raises ValueError for a linear layer that vLLM does not find.
        """
        layers, found = layers_of(self.config), self.attention_fusers
        lost = [path for number, path in layers.linear.items() if number not in found]
        if lost:
            raise ValueError(f"{lost[0]}: vLLM's Transformers backend does not find the attention call of this module")
        if layers.hybrid:
            super()._create_attention_instances(prefix)  # type: ignore[misc]
        layouts, processes = layouts_of(self.vllm_config), self.vllm_config.parallel_config.tensor_parallel_size
        options = {layer["site"]["layer"]: layer["options"] for layer in self.config.linearize["layers"]}
        for number in layers.linear:
            name, _ = found[number]
            module: Any = self.get_submodule(name)  # type: ignore[attr-defined]
            named = maybe_prefix(prefix, f"{name}.{VLLM_ATTN_ATTR}")
            layer = StateAttention(module, layouts[number], named, options[number], processes)
            if layer.heads is not None:
                whole = getattr(module, VLLM_ATTN_ATTR)
                layer.softmax = self.attention_of(layer.heads, whole, f"{layer.prefix}.softmax")
            setattr(module, VLLM_ATTN_ATTR, layer)

    def _get_attn_cls(self) -> Any:
        kind = super()._get_attn_cls()  # type: ignore[misc]
        return ClearedAttention if kind is Attention else kind

    def attention_of(self, heads: Any, whole: Attention, prefix: str) -> Attention:
        """Attention of vLLM for the `heads` of a layer that keep softmax, with the window and the soft cap of `whole`,
        which vLLM made for all of them."""
        count = len(heads.groups)
        return ClearedAttention(
            count * (heads.heads // heads.kv_heads),
            whole.head_size,
            heads.scale,
            count,
            cache_config=self.cache_config,
            logits_soft_cap=getattr(self.text_config, "attn_logit_softcapping", None),
            per_layer_sliding_window=whole.sliding_window,
            prefix=prefix,
        )


def remove_hooks(module: Any, code: str) -> None:
    """Take off the forward hooks that functions of a package of files registered."""
    before = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    after = module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called
    for tables in (before, after):
        for number, hook in list(tables[0].items()):
            if (getattr(hook, "__module__", None) or "").startswith(f"{code}."):
                for table in tables:
                    table.pop(number, None)


class LinearizedForCausalLM(Linearized, TransformersForCausalLM):
    """Every layer is linear."""

    is_attention_free = True


class LinearizedHybridForCausalLM(Linearized, TransformersForCausalLM):
    """Some layers, or some heads of linear ones, keep softmax."""

    is_hybrid = True


class LinearizedMoEForCausalLM(Linearized, TransformersMoEForCausalLM):
    """Every layer is linear; there are experts."""

    is_attention_free = True


class LinearizedHybridMoEForCausalLM(Linearized, TransformersMoEForCausalLM):
    """Some layers, or some heads of linear ones, keep softmax; there are experts."""

    is_hybrid = True
