"""The cache layer of a linearized attention module: a state of constant size in place of keys and values.

`generate()` builds its own cache; attention_hooks.py swaps the slot of each converted layer for a StateLayer on first
touch, so beams, sampling, continuation and hybrids go through the code that transformers already has.

A state cannot forget its last tokens. Assisted decoding asks for that, so a cache that records its past
(`activate_past_recording`, which generate() calls) also keeps the inputs of the last UNDO tokens and three states at
most: two that are UNDO tokens apart or more, and the one before the last call, of which tokens go most often. `crop`
takes the nearest state and folds the tokens that stay into it again. The model itself does not run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache
from transformers.utils.import_utils import is_tracing

from ..layout import TokenLayout, is_traced, joined, once, part_of, shown

# How many of the last tokens can be removed from a cache that records its past.
UNDO = 128
# What a call's arguments name the cache; transformers the first from 5.24 on, the second before.
CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call, by any of its names; None where there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


class Recorded(NamedTuple):
    """One call of a mixer: its inputs q, k, v and x, [B,T,...] each, and, where it is `kept`, the state before it (as
    `earlier` has it)."""

    inputs: tuple[Tensor, ...]
    layout: TokenLayout
    before: Any
    kept: bool = True

    @property
    def tokens(self) -> int:
        """T."""
        return self.inputs[0].shape[1]


class StateLayer(CacheLayerMixin):
    """Holds one mixer's state, a NamedTuple of batch-first tensors, and how many tokens it has absorbed."""

    is_sliding = False
    # Left False so that generate() keeps handing the 2D padding mask to the model.
    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.seen = 0
        # How many tokens of each row [B] are of earlier documents than the state's; None: none is.
        self.forgotten: Tensor | None = None
        # Which mechanism, with which options, wrote the state; None where a version wrote it that did not say.
        self.kind: str | None = None
        # Set by attention_hooks.py for one call of a layer with a mixer: nothing else can read a state.
        self.awaited = False
        # [B] int64 0, 1, .. while a step is recorded: the state is then changed where it lies (layers/pool.py).
        self.rows: Tensor | None = None
        self.is_initialized = True
        # Whether calls are recorded, those that were, oldest first, and the mixer that made them. A weak reference: a
        # copy of a cache has no copy of the model's weights.
        self.record_past = False
        self.past: list[Recorded] = []
        self.mixer: Any = None

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the last tokens can be removed again."""
        return self.record_past

    def activate_past_recording(self) -> None:
        """From now on the last UNDO tokens can be removed again."""
        self.record_past = True

    def absorb(self, mixer: Any, inputs: tuple[Tensor, ...], layout: TokenLayout) -> Tensor:
        """The mixer's output [B,T,H,Dv] for new tokens, which go into the state; `inputs` are q, k, v and x."""
        self.forgotten = forgotten_after(layout.segments, self.seen - inputs[0].shape[1], self.forgotten)
        if not self.record_past:
            self.past.clear()
            o, self.state = mixer(*inputs, layout, self.state)
            return o
        self.mixer, outputs, first = weakref.ref(mixer), [], 0
        T = inputs[0].shape[1]
        if T > UNDO and layout.segments is None:
            # Only the last tokens of a long call can be removed, so only they are kept, as copies of their own.
            first = T - UNDO
            self.past.clear()
            head = tuple(x[:, :first] for x in inputs)
            o, self.state = mixer(*head, part_of(layout, 0, first), self.state)
            outputs.append(o)
            inputs, layout = tuple(x[:, first:].clone() for x in inputs), part_of(layout, first, T)
        before = self.state
        o, self.state = mixer(*inputs, layout, before)
        self._record(Recorded(inputs, layout, earlier(before, layout)))
        return torch.cat([*outputs, o], 1) if outputs else o

    def _record(self, call: Recorded) -> None:
        """Append a call, forget the state before the last one where an earlier one is near, and calls too far back."""
        tokens = 0
        for other in reversed(self.past[:-1]):
            tokens += other.tokens
            if other.kept:
                break
        if 0 < tokens < UNDO:
            self.past[-1] = self.past[-1]._replace(before=None, kept=False)
        self.past.append(call)
        tokens = 0
        for n in reversed(range(len(self.past))):
            tokens += self.past[n].tokens
            if self.past[n].kept and tokens >= UNDO:
                del self.past[:n]
                break

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate: the mixer makes the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and return their keys and values unchanged; the mixer folds them in.

        Raises ValueError when softmax attention asks (the teacher, or another model): it would see no earlier token.
        """
        if not self.awaited:
            raise ValueError(
                "this cache holds the states of linear layers, and softmax attention cannot read the earlier tokens "
                "from them. Give the teacher, or the other model, a DynamicCache() of its own"
            )
        self.awaited = False
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    # Name of the same question before transformers 5.23.
    get_max_cache_shape = get_max_length

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state, self.forgotten = map_state(change, self.state), map_state(change, self.forgotten)
        self.past.clear()  # of other rows

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda part: part[indices.to(part.device)])

    def reset(self) -> None:
        self.state, self.seen, self.forgotten = None, 0, None
        self.past.clear()

    def offload(self) -> None:
        """The state is small; it stays where it is."""

    def prefetch(self) -> None:
        """Never offloaded."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens, at most those that were recorded.

        Raises ValueError for more, and for a number above 0, as transformers does.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass -n to remove the last n tokens")
        left, known = -tokens_to_remove, sum(call.tokens for call in self.past)
        if left > known:
            raise ValueError(
                f"crop(-{left}): a linear layer keeps a state in place of its tokens, and {known} of the last ones "
                "were recorded. Call activate_past_recording() of the cache after the prompt and before the tokens "
                f"that may be removed, at most {UNDO}; or keep a copy.deepcopy of the cache, whose size does not grow"
            )
        self.seen -= left
        tokens = 0
        calls: list[Recorded] = []
        while tokens < left or (calls and not calls[0].kept):
            calls.insert(0, self.past.pop())
            tokens += calls[0].tokens
        if not left:
            return
        self.state, stay = restored(calls[0].before, self.state), tokens - left
        if stay:
            layout = part_of(joined([call.layout for call in calls], [call.inputs[0] for call in calls]), 0, stay)
            inputs = tuple(torch.cat(parts, 1)[:, :stay] for parts in zip(*(call.inputs for call in calls), strict=True))
            self.past.append(Recorded(inputs, layout, calls[0].before))
            _, self.state = self.mixer()(*inputs, layout, self.state)


def earlier(before: Any, layout: TokenLayout) -> Any:
    """A state as it is recorded: without what later ones hold as well, where it has such (softmax_heads.py)."""
    return before.earlier(layout) if hasattr(before, "earlier") else before


def restored(before: Any, now: Any) -> Any:
    """The inverse of `earlier`, with any state that came after it."""
    return before.restored(now) if hasattr(before, "restored") else before


def grows(layer: Any) -> bool:
    """Whether a layer of a cache holds the keys of all tokens, in the order in which they came."""
    return type(layer) is DynamicLayer and layer.is_initialized


def map_state(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """`change` applied to every tensor of a state, which may hold other states."""
    if state is None or isinstance(state, Tensor):
        return state if state is None else change(state)
    return type(state)(*(map_state(change, part) for part in state))


def check_rows(state: Any, rows: int) -> None:
    """Raise ValueError unless a state (None: of no token yet) has as many rows as the input; it would broadcast."""
    while state is not None and not isinstance(state, Tensor):
        state = state[0]
    if state is not None and state.shape[0] != rows:
        raise ValueError(
            f"the cache holds {state.shape[0]} sequences and the input has {rows}. Use one cache for each batch, or "
            "repeat its rows first: batch_repeat_interleave(n) of the cache"
        )


def check_kind(slot: Any, kind: str) -> None:
    """Raise ValueError for the state of another mechanism, or of other options, and note whose it becomes: states of
    equal shape would be taken for one's own."""
    # The slot may belong to an earlier version's copy of this file, which noted nothing.
    found = getattr(slot, "kind", None)
    if slot.state is not None and found is not None and found != kind:
        raise ValueError(
            f"the cache holds the state of {found}, and this layer is {kind}: another model made it. Give each model a "
            "DynamicCache() of its own"
        )
    slot.kind = kind


def forgotten_after(documents: Tensor | None, seen: int, before: Tensor | None) -> Tensor | None:
    """`StateLayer.forgotten` after a call with these documents [B,T]; a cache held `seen` tokens, and forgot `before`."""
    if documents is None:
        return before

    def made() -> Tensor | None:
        last = documents == documents[:, -1:]
        starts = torch.where(last[:, 0], 0, seen + last.int().argmax(1))
        return starts if is_traced(starts) or bool(starts.any()) else None

    starts = once(documents, ("forgotten", seen), made)
    return starts if before is None or starts is None else torch.where(starts > 0, starts, before)


def forgotten_in(cache: Any) -> Tensor | None:
    """`StateLayer.forgotten` of a cache, the same in all its states."""
    found = (getattr(layer, "forgotten", None) for layer in getattr(cache, "layers", ()))
    return next((one for one in found if one is not None), None)


def check_documents(slot: Any, mask: Any, *, own: bool, alone: bool) -> None:
    """Raise ValueError where a call goes on with a state that has forgotten tokens of the cache, and layers that keep
    softmax see them: always (not `alone`), but for a mask of the caller's `own` that hides them, which must."""
    forgotten = getattr(slot, "forgotten", None)  # the slot may belong to an earlier version's copy of this file
    own = own and isinstance(mask, Tensor) and mask.ndim == 4
    if forgotten is None or (alone and not own):
        return
    wrong = forgotten > 0
    if own:
        hidden = torch.arange(mask.shape[-1], device=mask.device) < forgotten[:, None, None]
        wrong = shown(mask[:, 0]) & hidden
    message = (
        "the cache holds several documents in one row: linear layers go on in the last one, and softmax would see all. "
        "Fill a cache with the last document alone, or pass a 4D attention_mask that hides the tokens of the others"
    )
    if is_tracing(wrong):
        torch._assert_async(~wrong.any(), message)
    elif bool(wrong.any()):
        raise ValueError(message)


def state_slot(cache: Any, layer_idx: int, *, alone: bool) -> StateLayer:
    """The StateLayer at `layer_idx` of a transformers cache, swapped in on first touch.

    `alone`: no layer keeps softmax. Raises TypeError for something that is not a layered cache, ValueError when the
    slot already holds keys, or when kept layers have static slots: their masks would follow the state's length.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        raise TypeError(f"the cache is {type(cache).__name__}; pass a transformers Cache, such as DynamicCache()")
    layers: list[Any] = cache.layers
    while len(layers) <= layer_idx:
        layers.append(cache.layer_class_to_replicate())  # type: ignore[misc]
    layer = layers[layer_idx]
    # Not by class: the slot may belong to another copy of this file.
    if not hasattr(layer, "state") or not hasattr(layer, "seen"):
        if layer.get_seq_length():
            raise ValueError(f"cache slot {layer_idx} already holds softmax keys; start from an empty cache")
        if layer.is_compileable and not alone:
            raise ValueError("a static cache does not work beside linear layers; pass DynamicCache()")
        recorded = getattr(layer, "record_past", False)
        layer = layers[layer_idx] = StateLayer()
        layer.record_past = recorded
    layer.record_past |= getattr(cache, "linearize_records_past", False)
    return layer


def record_past(cache: Any) -> None:
    """Let a cache, whose states may not be there yet, record its past."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if cache is not None:
        cache.linearize_records_past = True
