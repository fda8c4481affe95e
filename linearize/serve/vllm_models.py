"""Converted models as vLLM runs them: its Transformers backend, with a state in place of keys for each linear layer.

vLLM builds the model from the checkpoint's own code, and calls its attention modules with all tokens of a batch in one
row. A module that keeps softmax gets vLLM's attention. A linear one gets a `StateAttention`, which hands each
sequence's state to the module's mixer. Only vLLM imports this file, through vllm_plugin.py.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.transformers import TransformersForCausalLM, TransformersMoEForCausalLM
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR
from vllm.model_executor.models.transformers.fusers.attention import VLLM_ATTN_IMPL
from vllm.model_executor.models.utils import maybe_prefix
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name, direct_register_custom_op
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend, LinearAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    mamba_get_block_table_tensor,
    split_decodes_and_prefills,
)
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from linearize_kernels.hf.attention_hooks import bind, hidden_name, without_rotation

from .batch import Batch, prompts_of, rehearse, run
from .folder import OPERATOR, layer_types, layers_of
from .merge import merged
from .shards import shard, shard_spec
from .states import Place, Pool, StateLayout, code_of, layout_class, shared_memory, softmax_of, state_layouts

# ---------------------------------------------------------------- one layer


class StateMetadataBuilder(LinearAttentionMetadataBuilder):
    """Makes of vLLM's description of a step the `Batch` that all layers of a group share.

    What decode steps read lies in tensors of fixed address, so that a CUDA graph of a step can be replayed.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self.layers: list[StateAttention] = [layers[name] for name in layer_names]
        # Groups differ in rows alone; vLLM's second model runner also shares a step's metadata when it records graphs.
        self.supports_update_block_table = vllm_config.use_v2_model_runner and device.type == "cuda"
        most = vllm_config.scheduler_config.max_num_seqs
        self.rows = torch.empty(most, dtype=torch.int32, device=device)
        self.places = torch.zeros(most, 1, dtype=torch.long, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        m = common_attn_metadata
        rows = self.rows_of(m.block_table_tensor, m.seq_lens)
        starts = m.query_start_loc_cpu
        lengths = starts[1:] - starts[:-1]
        # A bound from above that is exact for prompts; it saves waiting for the GPU.
        total = m.seq_lens.cpu() if m.seq_lens_cpu_upper_bound is None else m.seq_lens_cpu_upper_bound
        seen = total[: len(lengths)] - lengths
        n, _, first, _ = split_decodes_and_prefills(m, decode_threshold=1)
        made = Batch(self.decode_rows(rows[:n]), self.places[:n], lengths=m.seq_lens)
        made.places[:, 0].copy_(m.seq_lens[:n] - 1)
        # A prompt of one token is a step, too.
        fresh = ((lengths[:n] == 1) & (seen[:n] <= 0)).nonzero()[:, 0]
        made.fresh = fresh.to(rows.device) if len(fresh) else None
        self.clear(made)
        prompts = [length for length in lengths[n:].tolist() if length]  # behind them stands padding
        if prompts:
            own = slice(n, n + len(prompts))
            came, begun = m.compute_num_computed_tokens()[own], m.query_start_loc[n : n + len(prompts) + 1]
            named = rows[own].clamp_min(NULL_BLOCK_ID)
            made.prompts = prompts_of(prompts, seen[own].tolist(), first, begun, came, named)
        return made

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Batch:
        """Steps of no sequence: none of their rows is read or written."""
        n = common_attn_metadata.num_reqs
        return Batch(self.rows[:n].fill_(PAD_SLOT_ID), self.places[:n], lengths=common_attn_metadata.seq_lens)

    def update_block_table(self, metadata: Batch, blk_table: Tensor, slot_mapping: Tensor) -> Batch:
        """A group's batch, given that of another group in the same step."""
        assert metadata.lengths is not None
        rows = self.rows_of(blk_table, metadata.lengths)
        n = len(metadata.rows)
        prompts, own = [], rows[n:].long().clamp_min(NULL_BLOCK_ID)
        for one in metadata.prompts:
            prompts.append(one._replace(rows=own[: len(one.rows)]))
            own = own[len(one.rows) :]
        made = dataclasses.replace(metadata, rows=self.decode_rows(rows[:n]), prompts=prompts)
        self.clear(made)
        return made

    def rows_of(self, table: Tensor, lengths: Tensor) -> Tensor:
        """The row of each sequence, below 0 where there is none: vLLM's block 0 is no sequence's."""
        mode = self.vllm_config.cache_config.mamba_cache_mode
        rows = mamba_get_block_table_tensor(table, lengths, self.kv_cache_spec, mode)[:, 0]
        return torch.where((rows == NULL_BLOCK_ID) | (lengths == 0), PAD_SLOT_ID, rows)

    def decode_rows(self, rows: Tensor) -> Tensor:
        """Rows of decode steps, at their fixed address."""
        return self.rows[: len(rows)].copy_(rows)

    def clear(self, made: Batch) -> None:
        """Zeros in the rows of steps that nothing came before."""
        if made.fresh is not None:
            rows = made.rows[made.fresh].clamp_min(NULL_BLOCK_ID).long()
            for layer in self.layers:
                layer.kv_cache[0].index_fill_(0, rows, 0)


@dataclasses.dataclass(frozen=True)
class StateSpec(MambaSpec):
    """What vLLM's scheduler knows of a group's states, where prefixes are not cached."""


class StateManager(MambaManager):
    """Gives each sequence its one row. In every step vLLM's scheduler asks for each of them three times what it needs;
    here the answer is short: nothing more than what it has, and nothing goes before its end."""

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **more: Any) -> int:
        if self.req_to_blocks.get(request_id):
            return 0
        return super().get_num_blocks_to_allocate(request_id, *args, **more)

    def allocate_new_blocks(self, request_id: str, *args: Any, **more: Any) -> list[Any]:
        if self.req_to_blocks.get(request_id):
            return []
        return super().allocate_new_blocks(request_id, *args, **more)

    def remove_skipped_blocks(self, request_id: str, *args: Any, **more: Any) -> None:
        """A state has read all tokens; there is none behind a window."""


# vLLM leaves its own kinds out where another is registered before them.
register_all_kvcache_specs(None)
KVCacheSpecRegistry.register(StateSpec, StateManager, uniform_type_base_spec=MambaSpec)


class StateBackend(LinearAttentionBackend):
    """Tells vLLM which builder the layers of linearize need."""

    @staticmethod
    def get_name() -> str:
        return "LINEARIZE"

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        return StateMetadataBuilder


def state_core(inputs: list[Tensor | None], outputs: list[Tensor], layer_name: LayerNameType) -> None:
    """What one layer's states give and become: the one operator at which vLLM splits its graph. Everything around it is
    compiled. `inputs` [1,tokens,..] and `outputs`, which it fills, are those of `Mixer.core`."""
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    described = context.attn_metadata
    if described is None:  # vLLM measures how much memory a batch takes
        layer.rehearse(inputs, outputs)
        for out in outputs:
            out.zero_()
    else:
        layer.on_states(described[layer.owner.prefix], inputs, outputs)


def no_core(inputs: list[Tensor | None], outputs: list[Tensor], layer_name: LayerNameType) -> None:
    """`state_core` where vLLM traces."""


# vllm_plugin.py tells vLLM to split graphs there.
LIBRARY = Library(OPERATOR.partition("::")[0], "FRAGMENT")
direct_register_custom_op(OPERATOR.partition("::")[2], state_core, ["outputs"], no_core, LIBRARY)
operator = getattr(torch.ops, OPERATOR.partition("::")[0]).state_core


# What `StateAttention.rehearse` has seen in this process.
REHEARSED: set[str] = set()


class StateAttention(nn.Module, MambaBase):
    """Stands where a module's softmax was: reads each sequence's state from vLLM's memory, runs the mixer, writes.

    Heads that keep softmax go to an Attention of vLLM, which holds their keys and values.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR
    owner: StateAttention

    def __init__(
        self,
        module: nn.Module,
        layout: StateLayout,
        prefix: str,
        options: dict[str, Any],
        processes: int,
        owner: StateAttention | None,
        begin: int,
        size: int,
    ) -> None:
        """`module` is the attention module with its mixer, of these `options`; `prefix` the name under which vLLM gives
        memory; `processes` how many divide the heads. The state begins at byte `begin` of the rows of the memory of
        `owner`, which have `size` bytes each; None: this layer's own."""
        super().__init__()
        self.__dict__["owner"] = self if owner is None else owner  # no child
        self.begin, self.size = begin, size
        self.__dict__["module"] = module  # no child: it holds this
        self.options, self.processes, self.divided = options, processes, processes == 1
        self.layout, self.prefix = layout, prefix
        self.heads = softmax_of(module.mixer)
        self.softmax: Attention | None = None
        self.hidden: Tensor | None = None
        self.rotation: Any = None
        self.kv_cache = (torch.tensor([]),)
        # The memory that vLLM gave, and the same with its rows as states.
        self.bound: tuple[Tensor | None, Any] = (None, None)
        # One map for the small ones that the mixer has of hidden states, and what it made of them.
        self.maps: tuple[Tensor, Tensor | None] | None = None
        self.made: Tensor | None = None
        self.tokens = layout_class(module.mixer)
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self
        module.register_forward_pre_hook(self.before, with_kwargs=True)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.size,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def get_attn_backend(self) -> type[StateBackend]:
        return StateBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """vLLM asks for it when weights are loaded and nothing has run: now a mixer of some heads can be made. None:
        another layer has the memory."""
        module: Any = self.__dict__["module"]
        if not self.divided:
            module.mixer = shard(module.mixer, self.options, get_tensor_model_parallel_rank(), self.processes)
            self.divided = True
        if self.maps is None:
            self.maps = merged(self, module.mixer)
        if self.owner is not self:
            return None
        found = super().get_kv_cache_spec(vllm_config)
        if found.mamba_cache_mode != "none":
            return found
        return StateSpec(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pre-hook of the attention module: keep the hidden states, which gates read; take rotation away if asked, and
        keep it for mixers that rotate behind their feature map."""
        bound = bind(module, args, kwargs)
        self.hidden = bound[hidden_name(module.mixer)]
        if not module.mixer.drop_rope:
            return None
        self.rotation = without_rotation(bound, True)
        return (), bound

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """q [T,H*D], k [T,Hkv*D], v [T,Hkv*Dv] -> [1,T,H,Dv], which is what modules of transformers expect.

        Where Dv < D, vLLM fills v up to D, and expects o so.
        """
        mixer = self.__dict__["module"].mixer
        site, T, heads = mixer.site, query.shape[0], self.heads
        hidden, rotation, self.hidden, self.rotation = self.hidden, self.rotation, None, None
        assert hidden is not None, f"{site.path}: its attention ran outside its module"
        H, Hkv = (site.heads, site.kv_heads) if heads is None else (heads.heads, heads.kv_heads)
        if query.shape[1] != H * site.key_dim:
            raise ValueError(
                f"{site.path}: vLLM hands over {query.shape[1]} numbers of q for {H} heads of {site.key_dim}"
            )
        q, k, v = query.view(1, T, H, -1), key.view(1, T, Hkv, -1), value.view(1, T, Hkv, -1)
        if heads is not None:
            (q, own_q), (k, own_k), (v, own_v) = (heads.split(y) for y in (q, k, v))
        o = self.mixed(mixer, q, k, v[..., : site.value_dim], hidden.reshape(1, T, -1), rotation)
        if v.shape[-1] != site.value_dim:
            o = F.pad(o, (0, v.shape[-1] - site.value_dim))
        if heads is None:
            return o
        assert self.softmax is not None
        kept = self.softmax(own_q[0].flatten(1), own_k[0].flatten(1), own_v[0].flatten(1))
        return heads.join(o, kept.view(1, T, -1, o.shape[-1]))

    def mixed(self, mixer: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, rotation: Any) -> Tensor:
        """o [1,T,H,Dv] in v's dtype, by what vLLM compiles and the operator between."""
        name = _encode_layer_name(self.prefix)
        if self.maps is not None:
            self.made = F.linear(x, *self.maps)
        layout = self.tokens(rotation=rotation, plain=True)
        inputs, beside = mixer.prepare(q, k, v, x, layout)
        outputs = mixer.empty_outputs(inputs, v)
        operator([*inputs], [*outputs], name)
        o = mixer.complete(outputs, beside, layout).to(v.dtype)
        self.made = None
        return o

    def rehearse(self, inputs: list[Tensor | None], outputs: list[Tensor]) -> None:
        """Compile kernels for batches of every form, once for all layers that are alike."""
        mixer = self.__dict__["module"].mixer
        shapes = [None if y is None else (y.shape[2:], y.dtype, y.stride()[2:]) for y in inputs]
        alike = repr((type(mixer), sorted(self.options.items()), shapes))
        if inputs[0] is None or not inputs[0].is_cuda or alike in REHEARSED:
            return
        REHEARSED.add(alike)
        rehearse(mixer, self.tokens, self.layout, inputs, outputs)

    def on_states(self, batch: Batch, inputs: list[Tensor | None], outputs: list[Tensor]) -> None:
        """`state_core` on the states of a batch."""
        mixer, memory = self.__dict__["module"].mixer, self.owner.kv_cache[0]
        if self.bound[0] is not memory:
            self.bound = memory, Pool.of(self.layout, memory[:, self.begin : self.begin + self.layout.bytes])
        run(mixer, self.tokens, self.bound[1], batch, inputs, outputs)


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


def memory_of(vllm_config: Any) -> tuple[dict[int, Place], int]:
    """`shared_memory` of an engine's layers. Kept heads have memory of their own, and then layers share none."""
    config = vllm_config.model_config.hf_config
    layers = layers_of(config)
    kinds = [kind for number, kind in enumerate(layer_types(config, layers)) if number in layers.softmax]
    kept = 0 if layers.heads else min((kinds.count(kind) for kind in kinds), default=0)
    return shared_memory(layouts_of(vllm_config), kept)


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
        """A row of a memory of states, in bytes: vLLM makes its pages as large."""
        return ((memory_of(vllm_config)[1],),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """For prefix caching: a row of a memory is copied as it is."""
        return (get_temporal_copy_spec,)

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: Any) -> dict[Any, Any]:
        return dict.fromkeys(mamba_types, cls.get_mamba_state_copy_func())

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

    def keep_in_fp32(self, module: nn.Module) -> None:
        """Decays, half-lives and biases of gates, too: vLLM gives all parameters the engine's dtype, and then looks for
        names where transformers takes patterns."""
        super().keep_in_fp32(module)  # type: ignore[misc]
        for part in module.modules():
            keep: Any = getattr(part, "keep_in_fp32", None)
            if keep is not None:
                keep()

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
        places, size = memory_of(self.vllm_config)
        made: dict[int, StateAttention] = {}
        for number in layouts:
            name, _ = found[number]
            module: Any = self.get_submodule(name)  # type: ignore[attr-defined]
            named = maybe_prefix(prefix, f"{name}.{VLLM_ATTN_ATTR}")
            owner, begin = places[number]
            shared = layouts[number], named, options[number], processes, made.get(owner), begin, size
            made[number] = layer = StateAttention(module, *shared)
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
