"""The seam: how a mixer takes the place of softmax inside an attention module that stays where it is.

    decoder -> attention module -> its own q/k/v, norms, rotary -> attention function `linearize_<backend>`
                                                  |- module without a mixer -> softmax backend
                                                  '- module.mixer           -> mix(q, k, v, x, state) -> o

transformers looks the attention function up by the name in `config._attn_implementation`. This file registers
such names, hooks the chosen modules so that the function also learns what transformers does not pass on (hidden
states, the cache), and adds what a saved class needs. The switch between student and teacher is the name itself:
with the plain backend's name nothing of this file runs, and the model is the original, bit for bit.

Several copies of this file meet in one process (the package, checkpoints, versions). Registered names are shared
by all of them, so what is registered only dispatches to `module.mixer`, whose class belongs to its own copy.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers.conversion_mapping as conversions
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .mixer import Mixer, Site
from .state import StateLayer, state_slot

# linearize_sdpa: some layers keep softmax, through sdpa. linearize_all_sdpa: none does, so no T x T mask is built.
# linearize_transfer_sdpa: softmax runs everywhere, and each mixer is compared with it on the same input.
HYBRID, ALL, TRANSFER = "linearize_", "linearize_all_", "linearize_transfer_"


# ---------------------------------------------------------------- names in transformers' interfaces


def split_name(name: str | None) -> tuple[str, str]:
    """`linearize_all_sdpa` -> (`linearize_all_`, `sdpa`); a foreign name -> (``, name)."""
    for prefix in (ALL, TRANSFER, HYBRID):
        if name and name.startswith(prefix):
            return prefix, name.removeprefix(prefix)
    return "", name or ""


def register_backend(backend: str) -> None:
    """Make the `linearize_*` names known for one softmax backend, both to attention and to masks."""
    for prefix in (HYBRID, ALL, TRANSFER):
        AttentionInterface.register(prefix + backend, functools.partial(dispatch, prefix, backend))
        AttentionMaskInterface.register(prefix + backend, functools.partial(make_mask, prefix, backend))


def dispatch(prefix: str, backend: str, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The registered attention function: softmax without a mixer, else whatever the mixer's own copy does."""
    mixer = getattr(module, "mixer", None)
    softmax = softmax_function(backend, module)
    if mixer is None:
        return softmax(module, *args, **kwargs)
    return mixer.seam(mixer, prefix, softmax, module, *args, **kwargs)


def softmax_function(backend: str, module: nn.Module) -> Callable[..., Any]:
    """The softmax attention function called `backend`; eager ones live in the architecture's own file."""
    if backend == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[backend]


def make_mask(prefix: str, backend: str, *args: Any, **kwargs: Any) -> Any:
    """The registered mask function: the backend's mask, or just the 2D padding mask when no layer needs more."""
    if prefix == ALL:
        return kwargs.get("attention_mask")
    return ALL_MASK_ATTENTION_FUNCTIONS[backend](*args, **kwargs)


# ---------------------------------------------------------------- one call of one attention module


class Call:
    """What the pre-hook hands over for one call; `used` proves that the module went through the interface."""

    def __init__(self, x: Tensor, slot: StateLayer | None) -> None:
        self.x, self.slot = x, slot
        self.used = False
        self.teacher_output: Tensor | None = None


def before_attention(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook: keep the hidden states, swap the cache slot for a state, take rotary embedding away if asked."""
    mixer = module.mixer
    prefix, _ = split_name(mixer.switch._attn_implementation)
    if not prefix:
        return None
    bound = bind(module, args, kwargs)
    cache = next((bound[n] for n in ("past_key_values", "past_key_value", "layer_past") if bound.get(n) is not None), None)
    recurrent = prefix != TRANSFER and cache is not None
    mixer.call = Call(bound["hidden_states"], state_slot(cache, module.layer_idx) if recurrent else None)
    if prefix == TRANSFER or not mixer.drop_rope:
        return None
    without_rotation(bound)
    return tuple(bound.pop(name) for name in _parameter_names(type(module))[: len(args)]), bound


def after_attention(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Post-hook: forget the call, and fail loudly when the module did not go through the attention interface."""
    mixer = module.mixer
    call = mixer.call
    if call is None:
        return
    if call.teacher_output is not None:
        student_call(module, mixer, bind(module, args, kwargs))
    mixer.call = None
    if not call.used:
        raise RuntimeError(
            f"{mixer.site.path} ({type(module).__name__}) ran without calling transformers' attention interface, so "
            "its mixer was skipped. This transformers version may not fit this checkpoint"
        )


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the module's forward by name."""
    return {**dict(zip(_parameter_names(type(module)), args, strict=False)), **kwargs}


@functools.cache
def _parameter_names(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def without_rotation(bound: dict[str, Any]) -> None:
    """Replace the rotary embedding among a call's arguments by the one that does nothing."""
    rotation = bound.get("position_embeddings")
    if isinstance(rotation, Tensor):  # complex form
        bound["position_embeddings"] = torch.ones_like(rotation)
    elif rotation is not None:
        cos, sin = rotation
        bound["position_embeddings"] = (torch.ones_like(cos), torch.zeros_like(sin))


def seam(
    mixer: Mixer,
    prefix: str,
    softmax: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A mixer's side of the attention function; query [B,H,T,D], key and value [B,Hkv,T,D] -> [B,T,H,Dv]."""
    call = mixer.call
    if call is None:
        raise RuntimeError(f"{mixer.site.path}: its mixer was called outside its attention module")
    call.used = True
    if prefix == TRANSFER:
        return transfer(mixer, call, softmax, module, query, key, value, attention_mask, **kwargs), None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if k.shape[1] != q.shape[1]:
        raise RuntimeError(
            f"{mixer.site.path}: {k.shape[1]} keys for {q.shape[1]} queries: its cache slot was not replaced by a state"
        )
    slot = call.slot
    padding, segments = token_layout(attention_mask, q.shape[:2], slot, kwargs)
    o, state = mixer.mix(
        q,
        k,
        v,
        call.x.to(q.device),
        padding=padding,
        segments=segments,
        state=None if slot is None else slot.state,
        causal=is_causal(module, kwargs),
    )
    if slot is not None:
        slot.state = state
    return o.to(query.dtype), None


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """What the architecture says for this call, else for this module."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def token_layout(
    mask: Tensor | None, shape: tuple[int, int], slot: StateLayer | None, kwargs: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """Padding [B,T] bool and document numbers [B,T] for this call, from what transformers passes to attention.

    The diagonal of any self-attention mask says which of the new tokens are real. Documents follow
    `cu_seq_lens_q`, else the restarts of `position_ids`; with a mask or a cache those restarts mean nothing
    (left padding fills them with zeros), and transformers itself ignores them then.
    """
    B, T = shape
    padding = None if mask is None else token_padding(mask, B, T, 0 if slot is None else slot.seen - T)
    cu, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if cu is not None and B == 1:
        index = torch.arange(T, device=cu.device)
        return padding, torch.bucketize(index, cu[1:].to(index.dtype), right=True)[None]
    if positions is None or positions.ndim != 2 or mask is not None or slot is not None or T == 1:
        return padding, None
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return padding, (steps != 1).cumsum(-1).expand(B, T)


def token_padding(mask: Tensor, B: int, T: int, seen: int) -> Tensor:
    """Which of the T new tokens are real, [B,T] bool, from a 2D mask or the diagonal of a 4D one."""
    if not isinstance(mask, Tensor):
        raise NotImplementedError(f"{type(mask).__name__} masks have no diagonal to read; use attn_implementation='sdpa'")
    if mask.ndim == 2:
        return mask[:, -T:].bool()
    # A static cache has more columns than tokens seen so far, a sliding one fewer.
    diagonal = mask[:, 0].diagonal(offset=min(mask.shape[-1] - T, seen), dim1=-2, dim2=-1)
    real = diagonal if diagonal.dtype == torch.bool else diagonal > torch.finfo(diagonal.dtype).min / 2
    return real.expand(B, T)


# ---------------------------------------------------------------- attention transfer


def transfer(
    mixer: Mixer,
    call: Call,
    softmax: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    """Softmax goes on through the network; the mixer sees the same q, k, v, x and its output goes to the listener.

    A mixer without rotary embedding, or behind adapters that must be off for the teacher, needs q and k of its
    own: then the attention module runs a second time on the same hidden states, and this is called again.
    """
    target, listener = call.teacher_output, mixer.transfer
    if target is None:
        with torch.no_grad():
            target, _ = softmax(module, query, key, value, attention_mask, **kwargs)
        if mixer.drop_rope or listener.own_call:
            call.teacher_output = target
            return target
        query, key, value = query.detach(), key.detach(), value.detach()
    padding, segments = token_layout(attention_mask, (query.shape[0], query.shape[2]), None, kwargs)
    with torch.enable_grad():
        inputs = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), call.x.detach())
        listener.hear(mixer, inputs, target, padding=padding, segments=segments)
    return target


def student_call(module: nn.Module, mixer: Mixer, bound: dict[str, Any]) -> None:
    """The second, differentiable call of a module whose student needs q and k of its own; past the hooks."""
    bound["hidden_states"] = mixer.call.x.detach()
    if mixer.drop_rope:
        without_rotation(bound)
    with torch.enable_grad(), mixer.transfer.student(module):
        module.forward(**bound)


# ---------------------------------------------------------------- attaching mixers to a model


def attach(model: PreTrainedModel, spec: dict[str, Any], mechanisms: dict[str, type[Mixer]]) -> None:
    """Give each module named in `spec["layers"]` its mixer and hooks, and switch the model to them.

    Raises AttributeError when the model lacks a module of the plan.
    """
    for layer in spec["layers"]:
        site = Site.from_dict(layer["site"])
        module = model.get_submodule(_own_path(model, site.path))
        mixer = mechanisms[layer["mechanism"]](site, **layer["options"])
        if next(mixer.parameters()).device.type != "meta":
            mixer.reset_parameters()
        mixer.switch = getattr(module, "config", model.config)
        mixer.seam = seam
        module.mixer = mixer
        module.register_forward_pre_hook(before_attention, with_kwargs=True)
        module.register_forward_hook(after_attention, with_kwargs=True)
    model.register_forward_pre_hook(refuse_attention_maps, with_kwargs=True)
    set_names(model, lambda name: name if split_name(name)[0] else prefix_for(spec) + name)


def _own_path(model: PreTrainedModel, path: str) -> str:
    """A path of the model with a head, as seen from the model that is being built (which may be the bare one)."""
    bare = path.removeprefix(model.base_model_prefix + ".")
    return bare if model.base_model is model else path


def prefix_for(spec: dict[str, Any]) -> str:
    """The name prefix for a plan: ALL when no softmax layer is left, else HYBRID."""
    return ALL if spec["all_linear"] else HYBRID


def set_names(model: PreTrainedModel, change: Callable[[str], str]) -> list[tuple[Any, str]]:
    """Rename the attention implementation in every config of the model; returns (config, old name) pairs."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config") and hasattr(m.config, "_attn_implementation")}
    old = [(config, config._attn_implementation) for config in configs.values()]
    for config, name in old:
        if name is not None:
            new = change(name)
            register_backend(split_name(new)[1])
            config._attn_implementation_internal = new
    return old


def refuse_attention_maps(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-hook: a linear layer has no T x T attention map to return."""
    asked = kwargs.get("output_attentions")
    if getattr(model.config, "output_attentions", False) if asked is None else asked:
        raise ValueError("output_attentions=True: linearized layers compute no attention maps; ask the source model for them")


class Linearized:
    """Mixin before a native model class: builds the mixers of `config.linearize`, and keeps transformers honest.

    `mechanisms` maps names in the plan to Mixer classes; the rendered modeling file sets it.
    """

    mechanisms: dict[str, type[Mixer]]
    # The state cannot be rolled back; this refuses assisted decoding at once instead of at the first rejection.
    _is_stateful = True

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        attach(self, config.linearize, self.mechanisms)

    def initialize_weights(self) -> None:
        """Initialise mixers first; the native initialiser of the inner model does not know them."""
        for mixer in mixers_of(self).values():
            mixer.reset_parameters()
            for module in mixer.modules():
                module._is_hf_initialized = True
        super().initialize_weights()

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """A softmax backend chosen by the user serves the layers that keep softmax; mixers stay on."""
        backend = split_name(attn_implementation)[1] or None
        backend = super()._check_and_adjust_attn_implementation(backend, *args, **kwargs)
        register_backend(backend)
        return prefix_for(self.config.linearize) + backend

    def _prepare_static_cache(self, *args: Any, **kwargs: Any) -> DynamicCache:
        """A static cache would make kept softmax layers read slots that nothing wrote."""
        return DynamicCache(config=self.config.get_text_config(decoder=True))

    @contextmanager
    def teacher(self) -> Iterator[None]:
        """Within: the original softmax model, bit for bit, on the same weights."""
        with renamed(self, lambda name: split_name(name)[1]):
            yield

    @contextmanager
    def transferring(self, listener: Any) -> Iterator[None]:
        """Within: the residual stream is the teacher's; `listener.hear(mixer, (q, k, v, x), o_teacher, ...)` is
        called for each layer with inputs as for `Mixer.mix` and gradients enabled. `listener.own_call` asks for
        a second call of each attention module under `listener.student(module)`.
        """
        for mixer in mixers_of(self).values():
            mixer.transfer = listener
        try:
            with renamed(self, lambda name: TRANSFER + split_name(name)[1]):
                yield
        finally:
            for mixer in mixers_of(self).values():
                mixer.call, mixer.transfer = None, None


@contextmanager
def renamed(model: Any, change: Callable[[str], str]) -> Iterator[None]:
    """Rename the attention implementation of every config for the duration."""
    old = set_names(model, change)
    try:
        yield
    finally:
        for config, name in old:
            config._attn_implementation_internal = name


def mixers_of(model: nn.Module) -> dict[str, Mixer]:
    """Every mixer by the name of its attention module."""
    return {name.removesuffix(".mixer"): m for name, m in model.named_modules() if name.endswith(".mixer")}


def carry_conversions(*pairs: tuple[str, str]) -> None:
    """Give our model type and classes the checkpoint conversions of the native ones.

    transformers keys them by model type and class name and skips custom code; without this a mixture-of-experts
    model reloads with random experts and only a report.
    """
    for native, own in pairs:
        mapping = conversions.get_checkpoint_conversion_mapping(native)
        if mapping is not None:
            conversions.register_checkpoint_conversion_mapping(own, mapping, overwrite=True)
