"""Attention hooks: how a mixer takes the place of softmax inside an attention module that stays where it is.

    decoder -> attention module -> its own q/k/v, norms, rotary -> attention function `linearize_<backend>`
                                                  |- module without a mixer -> softmax backend
                                                  '- module.mixer           -> mix(q, k, v, x, state) -> o

transformers looks the attention function up by the name in `config._attn_implementation`; interface.py registers
such names. This file hooks the chosen modules so that the function also learns what transformers does not pass on
(hidden states, the cache), and adds what a saved class needs. The switch between student and teacher is the name
itself: with the plain backend's name nothing of this file runs, and the model is the original, bit for bit.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import transformers.conversion_mapping as conversions
from torch import Tensor, nn
from transformers import AutoModel, DynamicCache, PreTrainedModel

from .interface import ALL, HYBRID, TRANSFER, register_backend, split_name
from ..layout import (
    Geometry,
    TokenLayout,
    adapters,
    call_geometry,
    call_layout,
    check_direction,
    check_thread,
    is_causal,
    is_own_mask,
    named_documents,
    reduce_keys,
    shown,
    this_thread,
    watch_patches,
)
from ..mixer import Mixer, AttentionSite, mixer_at, positions
from ..layers.rotary import Rotation, rotation_of
from .position_hooks import PositionHooks, places_in
from .cuda_graphs import Replayed
from .cache import (
    CACHE_NAMES,
    StateLayer,
    cache_in,
    check_documents,
    check_kind,
    check_rows,
    forgotten_in,
    record_past,
    state_slot,
)

# What attention modules call their norms of q and k.
HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
# In a config: training changed weights that came from the source.
TRAINED = "linearize_trained"
NO_TEACHER = (
    "teacher(): training changed the source's weights in this model, so softmax on them is not the model that it was "
    "converted from. To compare with that one, load it: the folder's README.md names it"
)
ROUNDED = (
    "{0}() rounds decays and the biases of gates, too. To keep them in float32, call to(torch.{1}), or load the model "
    "with dtype=torch.{1}"
)
NO_PAGES = (
    "generate_batch and continuous batching keep the keys and values of every token in pages; linear layers have a state "
    "of constant size instead. Give generate() a padded batch, or serve the model with vLLM: linearize serve DIR"
)


# ---------------------------------------------------------------- one call of one attention module


class Call:
    """What the pre-hook hands over for one call; `used` proves that the module went through the interface."""

    def __init__(self, x: Tensor, slot: StateLayer | None, places: dict[str, Any], geometry: Geometry) -> None:
        self.x, self.slot, self.places, self.geometry = x, slot, places, geometry
        self.used = False
        # The rotary embedding that was taken away from q and k.
        self.rotation: Rotation | None = None
        self.teacher_output: Tensor | None = None
        # Whether the module's norms of q and k are passed over (`skip_norm`).
        self.skip_qk_norm = False

    def arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the attention function was told, else its module, else the model."""
        return self.places | {name: value for name, value in kwargs.items() if value is not None}

    def check(self, mixer: Mixer, mask: Any, T: int, seen: int | None, causal: bool) -> None:
        """`check_direction` of a mask that transformers made; the caller's own is read whole, regions are windows'."""
        if "own_mask" not in self.places and not self.geometry.windows:
            check_direction(mixer.site, mask, T, seen, causal)


def before_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook: keep the hidden states, swap the cache slot for a state, take rotary embedding away if asked."""
    mixer = module.mixer
    check_thread(mixer.position_hooks.owner)
    prefix, backend = split_name(mixer.switch._attn_implementation)
    if not prefix and not mixer.position_hooks.teacher:
        # Someone wrote a backend's name into the config; as `set_attn_implementation`, that chooses the softmax of
        # the layers that keep it.
        prefix, backend = mixer.prefix, backend or "eager"
        register_backend(backend)
        mixer.switch._attn_implementation_internal = prefix + backend
    reduce_keys(module, mixer.reductions, prefix in ("", TRANSFER))
    if not prefix:
        return None
    bound = bind(module, args, kwargs)
    cache = cache_in(bound)
    recurrent = prefix != TRANSFER and cache is not None and mixer.site.causal
    slot = None
    if recurrent:  # without a cache no layer's number is read: torch.compile would compile each layer for its own
        # Modules that serve several layers are told which.
        index = next(
            i for i in (bound.get("layer_idx"), getattr(module, "layer_idx", None), mixer.site.layer) if i is not None
        )
        slot = state_slot(cache, index, alone=prefix == ALL)
    if slot is not None:
        check_kind(slot, mixer.kind)
        check_rows(slot.state, bound[hidden_name(mixer)].shape[0])
        slot.awaited = True
    x = bound[hidden_name(mixer)]
    # Images have positions, too, which say nothing of documents.
    places = mixer.position_hooks.arguments(x) if mixer.site.causal else {}
    places = places | places_in(bound) if mixer.site.causal or not mixer.site.routed else {}
    if mixer.position_hooks.own_mask():
        places["own_mask"] = True
    if "flash" in backend:
        places["flash"] = True
    call = mixer.calls[this_thread()] = Call(x, slot, places, call_geometry(mixer, x, bound))
    if prefix == TRANSFER or not mixer.drop_rope:
        return None
    call.skip_qk_norm = mixer.skip_qk_norm
    call.rotation = without_rotation(bound, mixer.site.routed)
    return tuple(bound.pop(name) for name in mixer.arguments[: len(args)]), bound


def after_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Post-hook: forget the call, and fail loudly when the module did not go through the attention interface."""
    mixer = module.mixer
    call = mixer.calls.get(this_thread())
    if call is None:
        return
    if call.teacher_output is not None:
        student_call(module, mixer, bind(module, args, kwargs), output)
    del mixer.calls[this_thread()]
    if not call.used:
        forward = getattr(module.forward, "__func__", module.forward)
        name = getattr(forward, "__qualname__", type(forward).__name__)
        raise RuntimeError(
            f"{mixer.site.path} ran without calling transformers' attention interface, so its mixer was skipped. Its "
            f"forward is {name} of {getattr(forward, '__module__', 'unknown')}: where another package put it there, "
            "load the model without that; else this transformers version may not fit"
        )


def skip_norm(mixer: Mixer, norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Hook of an attention module's norm of q or k: its input, where the mixer takes that, else its output."""
    call = mixer.calls.get(this_thread())
    given: Tensor = args[0]
    return output if call is None or not call.skip_qk_norm else given


def hidden_name(mixer: Mixer) -> str:
    """What the attention module calls the hidden states that it is given."""
    return "hidden_states" if "hidden_states" in mixer.arguments else mixer.arguments[0]


def bind(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the module's forward by name."""
    return {**dict(zip(module.mixer.arguments, args, strict=False)), **kwargs}


def without_rotation(bound: dict[str, Any], routed: bool) -> Rotation | None:
    """Replace the rotary embedding among a call's arguments by the one that does nothing; returns what was there."""
    rotation = bound.get("position_embeddings")
    taken = rotation_of(rotation)
    if isinstance(rotation, Tensor):  # complex form
        bound["position_embeddings"] = torch.ones_like(rotation)
    elif rotation is not None:
        cos, sin = rotation
        bound["position_embeddings"] = (torch.ones_like(cos), torch.zeros_like(sin))
    elif not routed and bound.get("position_ids") is not None:
        # Its own code rotates, by nothing at position 0.
        bound["position_ids"] = torch.zeros_like(bound["position_ids"])
    return taken


def mixer_attention(
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
    call = mixer.calls.get(this_thread())
    if call is None:
        raise RuntimeError(f"{mixer.site.path}: its mixer was called outside its attention module")
    call.used = True
    if prefix == TRANSFER:
        return transfer(mixer, call, softmax, module, query, key, value, attention_mask, **kwargs), None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if k.shape[1] != q.shape[1] and not mixer.site.reduction:
        raise RuntimeError(
            f"{mixer.site.path}: {k.shape[1]} keys for {q.shape[1]} queries: its cache slot was not replaced by a state"
        )
    slot = call.slot
    seen = None if slot is None else slot.seen - q.shape[1]
    causal = is_causal(module, kwargs, mixer.site.causal)
    call.check(mixer, attention_mask, q.shape[1], seen, causal)
    check_documents(slot, attention_mask, own="own_mask" in call.places, alone=prefix == ALL)
    rows = getattr(slot, "rows", None) if mixer.pools else None  # an earlier version's slot knows no rows
    layout = layout_of_call(mixer, call, causal, attention_mask, (q.shape[0], q.shape[1]), seen, kwargs, rows)
    inputs = (q, k, v, call.x.to(q.device))
    o = mixer(*inputs, layout)[0] if slot is None else slot.absorb(mixer, inputs, layout)
    return o.to(query.dtype), None


def layout_of_call(
    mixer: Mixer,
    call: Call,
    causal: bool,
    attention_mask: Tensor | None,
    shape: tuple[int, int],
    seen: int | None,
    kwargs: dict[str, Any],
    rows: Tensor | None = None,
) -> TokenLayout:
    """The layout that a mixer gets for a call of `shape` (B, T): what the module and the cache know of its tokens."""
    tokens = call_layout(call.geometry, causal, attention_mask, shape, seen, call.arguments(kwargs))
    scores = mixer.softmax and mixer.softmax.score_options(kwargs)
    # Not `_replace`: torch 2.11 cannot make its tuple again where a compiled graph ends, as before MHLA's blocks.
    return TokenLayout(tokens.padding, tokens.segments, tokens.causal, tokens.grid, call.rotation, scores, rows)


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
    if key.shape[2] != query.shape[2] and not mixer.site.reduction:
        raise RuntimeError(f"{mixer.site.path}: attention transfer needs whole sequences; use an empty cache or none")
    target, listener = call.teacher_output, mixer.transfer
    second = target is not None
    if target is None:
        with torch.no_grad():
            target, _ = softmax(module, query, key, value, attention_mask, **kwargs)
        if mixer.drop_rope or mixer.reductions or listener.own_call:
            call.teacher_output = target
            return target
        query, key, value = query.detach(), key.detach(), value.detach()
    causal = is_causal(module, kwargs, mixer.site.causal)
    shape = query.shape[0], query.shape[2]
    call.check(mixer, attention_mask, shape[1], None, causal)
    layout = layout_of_call(mixer, call, causal, attention_mask, shape, None, kwargs)
    inputs = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), call.x.detach())
    with torch.enable_grad():
        o, _ = mixer(*inputs, layout)
        listener.on_layer(mixer, inputs, o, target, layout)
    return o.to(query.dtype) if second else target


def student_call(module: nn.Module, mixer: Mixer, bound: dict[str, Any], teacher_output: Any) -> None:
    """The second, differentiable call of a module whose student needs q and k of its own; past the hooks."""
    bound[hidden_name(mixer)] = mixer.calls[this_thread()].x.detach()
    bound |= {name: None for name in CACHE_NAMES if name in bound}  # its keys went into the cache the first time
    if mixer.drop_rope:
        call = mixer.calls[this_thread()]
        call.skip_qk_norm, call.rotation = mixer.skip_qk_norm, without_rotation(bound, mixer.site.routed)
    reduce_keys(module, mixer.reductions, False)
    with torch.enable_grad():
        with mixer.transfer.student(module):
            output = module.forward(**bound)
        y, target = (out if isinstance(out, Tensor) else out[0] for out in (output, teacher_output))
        mixer.transfer.compare(mixer, y, target)


# ---------------------------------------------------------------- attaching mixers to a model


class Switch:
    """Stands for a config where the model's own must keep the plain name, since the architecture's code reads it."""

    _attn_implementation_internal = "eager"

    @property
    def _attn_implementation(self) -> str:
        return self._attn_implementation_internal


def attach(
    model: PreTrainedModel,
    spec: dict[str, Any],
    mechanisms: dict[str, type[Mixer]],
    capture: Callable[[nn.Module], None] | None = None,
) -> None:
    """Give each module named in `spec["layers"]` its mixer and hooks, and switch the model to them.

    `capture` serves modules that do not call the attention interface (capture.py); None if there are none.
    Raises ValueError when the model lacks a module of the plan.
    """
    switch, position_hooks = Switch() if capture else None, PositionHooks()
    precise: list[str] = []
    for layer in spec["layers"]:
        site = AttentionSite.from_dict(layer["site"])
        module = _module_of(model, site)
        mixer = mixer_at(mechanisms[layer["mechanism"]], site, layer["options"])
        if all(p.numel() for p in mixer.parameters()):  # not where ZeRO-3 has divided them: none is left here
            mixer.keep_in_fp32()
            if not any(p.is_meta for p in mixer.parameters()):
                mixer.reset_parameters()
        precise += [f"{re.escape(f'{_own_path(model, site.path)}.mixer.{name}')}$" for name in mixer.fp32_names()]
        mixer.switch = switch or getattr(module, "config", model.config)
        mixer.attention_function, mixer.position_hooks, mixer.prefix = mixer_attention, position_hooks, prefix_for(spec)
        options = ", ".join(f"{name}={value}" for name, value in sorted(layer["options"].items()))
        exact = f", softmax in KV heads {[*site.softmax_groups]}" if site.softmax_groups else ""
        mixer.kind = f"{layer['mechanism']}({options}){exact}"
        mixer.arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
        mixer.reductions = {name: getattr(module, name) for name in site.reduction if site.sr == "drop"}
        if site.grid == "patches":
            mixer.patches = watch_patches(model.get_submodule(_own_path(model, site.grid_from)))
        module.mixer = mixer
        position_hooks.mixers.append(mixer)
        if mixer.skip_qk_norm:
            for norm in (getattr(module, name, None) for name in HEAD_NORMS):
                if isinstance(norm, nn.Module):
                    norm.register_forward_hook(functools.partial(skip_norm, mixer))
        before, after = before_attention, after_attention
        if capture:
            before, after = torch.compiler.disable(before), torch.compiler.disable(after)
            capture(module)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)
    others: list[Any] = [part for part in model.modules() if "Attention" in type(part).__name__]
    for other in others:
        other.linearize_position_hooks = position_hooks
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *precise}
    parts: list[Any] = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in parts:
        part.linearize_switch, part.linearize_position_hooks = switch, position_hooks
        part.register_forward_pre_hook(refuse_attention_maps, with_kwargs=True)
        if makes_places(part):
            part.linearize_grids = any(hasattr(module, "get_rope_index") for module in part.modules())
            part.linearize_counts = rotates(part) and not part.linearize_grids
            part.linearize_captures, part.linearize_causal = capture is not None, has_causal(part)
            part.register_forward_pre_hook(place_tokens, with_kwargs=True)
        position_hooks.watch(part)
    set_names(model, lambda name: name if split_name(name)[0] else prefix_for(spec) + name)


def _module_of(model: PreTrainedModel, site: AttentionSite) -> Any:
    """The attention module of a site. Raises ValueError where the config has fewer layers than the plan in it."""
    try:
        return model.get_submodule(_own_path(model, site.path))
    except AttributeError as error:
        raise ValueError(
            f"the plan in config.json (linearize.layers) names {site.path}, and this {type(model).__name__} has no "
            "such module: another value in the config, such as num_hidden_layers, does not fit the plan. Load it with "
            "the config that was saved, or convert the smaller source"
        ) from error


def _own_path(model: PreTrainedModel, path: str) -> str:
    """A path of the model with a head, as seen from the model that is being built (which may be the bare one)."""
    bare = path.removeprefix(model.base_model_prefix + ".")
    return bare if model.base_model is model else path


def prefix_for(spec: dict[str, Any]) -> str:
    """The name prefix for a plan: ALL when no softmax layer is left, else HYBRID."""
    return ALL if spec["all_linear"] else HYBRID


def set_names(model: Any, change: Callable[[str], str]) -> list[tuple[Any, str]]:
    """Rename the attention implementation in every config of the model; returns (config, old name) pairs."""
    found: list[Any] = [
        m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")
    ]
    if model.linearize_switch:
        found = [model.linearize_switch]
    configs = {id(config): config for config in found}
    old = [(config, config._attn_implementation) for config in configs.values()]
    for config, name in old:
        if name is not None:
            new = change(name)
            register_backend(split_name(new)[1])
            config._attn_implementation_internal = new
    return old


def refuse_attention_maps(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-hook: a linear layer has no T x T attention map to return."""
    asked = kwargs.get("output_attentions")
    asked = getattr(model.config, "output_attentions", False) if asked is None else asked
    if asked and not model.linearize_position_hooks.teacher:
        raise ValueError(
            "output_attentions=True: linearized layers compute no attention maps. Softmax does, where its code is eager: "
            "call model.set_attn_implementation('eager'), then ask under `with model.teacher():`"
        )


def rotates(model: Any) -> bool:
    """Whether a model has a rotary embedding: a module named so, or the settings of one."""
    settings = vars(model.config.get_text_config(decoder=True))
    keys = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_pct", "rotary_emb_base")
    named = any("Rotary" in type(part).__name__ for part in model.modules())
    return named or any(settings.get(key) for key in keys)


def makes_places(part: Any) -> bool:
    """Whether a model, or a model in it, takes position_ids and a mask, and its mixers are causal or see rotations."""
    names = inspect.signature(type(part).forward).parameters
    return {"position_ids", "attention_mask"} <= {*names} and (has_causal(part) or rotates(part))


def has_causal(part: Any) -> bool:
    """Whether a model has causal mixers."""
    return any(mixer.site.causal for mixer in mixers_of(part).values())


def place_tokens(part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of a model: number the real tokens of each row, or of each document, from 0 where no position_ids say
    otherwise, as generate() does.

    Softmax sees rotated queries and keys through their distance alone. Feature maps and gates of channels see how far
    each is rotated, so a row that padding shifts, or a document behind another, would compute something else.

    Models with learned positions count padding, too, as their source does, and models of images that number rows and
    columns as well (`get_rope_index`) read the padding mask for that themselves; of documents they know nothing. Raises
    ValueError for documents with images in such a model, and for layers with a softmax of their own: those see documents
    in the mask that an architecture makes, and not every one makes it of position_ids.
    """
    given = {**dict(zip(part.linearize_arguments, args, strict=False)), **kwargs}
    mask, x = given.get("attention_mask"), given.get("input_ids")
    x = given.get("inputs_embeds") if x is None else x
    prefix, _ = split_name((part.linearize_switch or part.config)._attn_implementation)
    hooks = part.linearize_position_hooks
    if hooks.teacher or prefix == TRANSFER or given.get("position_ids") is not None or x is None:
        return None
    B, T = x.shape[:2]
    cache = cache_in(given)
    forgotten, documents = forgotten_in(cache), named_documents(given, (B, T))
    if documents is None and forgotten is None and not part.linearize_counts:
        return None
    images = any(value is not None and ("pixel" in name or "grid_thw" in name) for name, value in given.items())
    if part.linearize_grids and images:
        raise ValueError(
            "cu_seq_lens_q or seq_idx with images, and no position_ids: the model numbers the rows and columns of an "
            "image as if the documents were one. Pass position_ids that restart with each document"
        )
    if documents is not None and part.linearize_captures and prefix == HYBRID:
        raise ValueError(
            "cu_seq_lens_q or seq_idx, and no position_ids: the layers that keep softmax compute it in their own code, which "
            "knows no documents. Pass position_ids that restart with each document, use_cache=False and no attention_mask; "
            "the model then keeps them apart if its source does"
        )
    seen = 0 if cache is None else cache.get_seq_length()
    mask = mask if isinstance(mask, Tensor) and mask.shape[-1] == seen + T else None
    if mask is not None and mask.ndim == 2:
        real = mask != 0  # some say 2 of the second document
        before = real[:, :seen]
        if forgotten is not None:
            before = before & (torch.arange(seen, device=before.device) >= forgotten[:, None])
        places = positions(real[:, seen:], documents, before.sum(1), (B, T))
    elif part.linearize_causal and mask is not None and is_own_mask(mask) and mask.shape[-2] == T and _sees_all(part.config):
        # A token sees those of its document up to itself.
        places = shown(mask[:, 0]).sum(-1).expand(B, -1) - 1
    elif documents is not None or forgotten is not None:
        places = positions(None, documents, seen if forgotten is None else seen - forgotten, (B, T))
    else:
        return None
    return (), {**given, "position_ids": places.clamp_min(0)}


def _sees_all(config: Any) -> bool:
    """Whether no window of the architecture's hides tokens of the same document."""
    return getattr(config, "sliding_window", None) is None


@contextmanager
def known_to_auto(config: type, bare: type | None) -> Iterator[None]:
    """Within: AutoModel makes a `bare` model of that class of config. Afterwards it does not: that has softmax."""
    known: dict[type, Any] = AutoModel._model_mapping._extra_content
    if bare is not None:
        known[config] = bare
    try:
        yield
    finally:
        known.pop(config, None)


class Linearized(Replayed, PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixin before a native model class: builds the mixers of `config.linearize`, and keeps transformers honest.

    `mechanisms` maps names in the plan to Mixer classes; the rendered modeling file sets it.
    """

    mechanisms: dict[str, type[Mixer]]
    capture: Callable[[nn.Module], None] | None = None
    bare: type | None = None  # the source's bare model, where the class asks AutoModel for it

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        with known_to_auto(type(config), self.bare):
            super().__init__(config, *args, **kwargs)
        attach(self, config.linearize, self.mechanisms, self.capture)

    def initialize_weights(self) -> None:
        """Initialise mixers first; the native initialiser of the inner model does not know them.

        Weights of integers were quantized while they were loaded, so they need no initial value, and take none.
        """
        for mixer in mixers_of(self).values():
            if all(p.is_floating_point() for p in mixer.parameters()):
                mixer.reset_parameters()
            parts: list[Any] = list(mixer.modules())
            for part in parts:
                part._is_hf_initialized = True
        super().initialize_weights()

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """A softmax backend chosen by the user serves the layers that keep softmax; mixers stay on."""
        backend = split_name(attn_implementation)[1] or None
        backend = super()._check_and_adjust_attn_implementation(backend, *args, **kwargs)
        if self.capture:
            return backend
        register_backend(backend)
        return prefix_for(self.config.linearize) + backend

    def half(self, *args: Any) -> Any:
        """Everything in float16, as some sharding needs it, with a warning of what `to(torch.float16)` would keep."""
        warnings.warn(ROUNDED.format("half", "float16"), stacklevel=2)
        return super().half(*args)

    def bfloat16(self, *args: Any) -> Any:
        """Everything in bfloat16, as `half`."""
        warnings.warn(ROUNDED.format("bfloat16", "bfloat16"), stacklevel=2)
        return super().bfloat16(*args)

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        """It removes tokens that the model would not have written."""
        record_past(cache_in(kwargs))
        return super()._assisted_decoding(*args, **kwargs)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        """An assistant's cache loses the tokens that its model would not have written."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if generation_config.is_assistant:
            record_past(cache_in(model_kwargs))

    def _prepare_static_cache(self, *args: Any, **kwargs: Any) -> DynamicCache:
        """A static cache would make kept softmax layers read slots that nothing wrote."""
        return DynamicCache(config=self.config.get_text_config(decoder=True))

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, and with it `generate_batch`: it has no place for a state."""
        raise NotImplementedError(NO_PAGES)

    @contextmanager
    def teacher(self) -> Iterator[None]:
        """Within: the softmax model on the same weights, with dropout off.

        It is the original, bit for bit, as long as the source's weights are: adapters are off. Where `linearize
        finetune` has trained the weights, this warns: the config says so. The switch is in the model, so a call of it
        in another thread meanwhile raises RuntimeError, and so does `teacher()` there.
        """
        if getattr(self.config, TRAINED, False):
            warnings.warn(NO_TEACHER, stacklevel=3)
        hooks: Any = self.linearize_position_hooks
        with (
            hooks.switched(True),
            evaluating(self),
            adapters(self, enabled=False),
            renamed(self, lambda name: split_name(name)[1]),
        ):
            yield

    @contextmanager
    def transferring(self, listener: Any) -> Iterator[None]:
        """Within: the residual stream is the teacher's, dropout off; for each layer, with gradients from o to the
        mixer, `listener.on_layer(mixer, (q, k, v, x), o, o_teacher, layout)` gets what `Mixer.mix` got, its output and
        softmax's, and the layout of the call.

        `listener.own_call` asks for a second run of each attention module, as the student, under
        `listener.student(module)`. It also happens where the mixer drops the rotary embedding. At its end
        `listener.compare(mixer, y, y_teacher)` gets both outputs of the module, [B,T,hidden].
        """
        hooks: Any = self.linearize_position_hooks
        with hooks.switched(hooks.teacher), evaluating(self):
            for mixer in mixers_of(self).values():
                mixer.transfer = listener
            try:
                with renamed(self, lambda name: TRANSFER + split_name(name)[1]):
                    yield
            finally:
                for mixer in mixers_of(self).values():
                    mixer.calls.clear()
                    mixer.transfer = None


@contextmanager
def renamed(model: Any, change: Callable[[str], str]) -> Iterator[None]:
    """Rename the attention implementation of every config for the duration."""
    old = set_names(model, change)
    try:
        yield
    finally:
        for config, name in old:
            config._attn_implementation_internal = name


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within: dropout off; each module gets its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def mixers_of(model: nn.Module) -> dict[str, Mixer]:
    """Every mixer by the name of its attention module."""
    # Not by class, which may be another copy's, nor by name alone: architectures have mixers of their own.
    named = ((name, m) for name, m in model.named_modules() if name.endswith(".mixer") and hasattr(m, "site"))
    return {name.removesuffix(".mixer"): m for name, m in named}


def carry_conversions(*pairs: tuple[str, str]) -> None:
    """Give our model type and classes the checkpoint conversions of the native ones.

    transformers keys them by model type and class name and skips custom code; without this a mixture-of-experts
    model reloads with random experts and only a report.
    """
    for native, own in pairs:
        mapping = conversions.get_checkpoint_conversion_mapping(native)
        if mapping is not None:
            conversions.register_checkpoint_conversion_mapping(own, mapping, overwrite=True)
