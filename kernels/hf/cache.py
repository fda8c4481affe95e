"""The cache layer of a linearized attention module: a state of constant size in place of keys and values.

`generate()` builds its own cache; the seam swaps the slot of each converted layer for a StateLayer on first
touch, so beams, sampling, continuation and hybrids go through the code that transformers already has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache


class StateLayer(CacheLayerMixin):
    """Holds one mixer's state, a NamedTuple of batch-first tensors, and how many tokens it has absorbed."""

    is_sliding = False
    # Left False so that generate() keeps handing the 2D padding mask to the model.
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.seen = 0
        # Set by the seam for one call of a layer with a mixer: nothing else can read a state.
        self.awaited = False
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate: the mixer makes the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and return their keys and values unchanged; the mixer folds them in.

        Raises ValueError when softmax attention asks (the teacher, or another model): it would see no earlier token.
        """
        if not self.awaited:
            raise ValueError(
                "this cache holds the states of linear layers, and softmax attention cannot read the earlier tokens "
                "from them. Give the teacher, or the other model, a cache of its own: past_key_values=DynamicCache()"
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
        self.state = map_state(change, self.state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda part: part[indices.to(part.device)])

    def reset(self) -> None:
        self.state, self.seen = None, 0

    def offload(self) -> None:
        """The state is small; it stays where it is."""

    def prefetch(self) -> None:
        """Never offloaded."""

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a recurrent state cannot forget its last tokens (crop(0) is called and does nothing)."""
        if tokens_to_remove != 0:
            raise NotImplementedError(
                "a linearized layer cannot drop tokens from its state, so assisted decoding and cache cropping "
                "are not possible; generate without an assistant model"
            )


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
            "repeat its rows first: past_key_values.batch_repeat_interleave(n)"
        )


def state_slot(cache: Any, layer_idx: int, *, alone: bool) -> StateLayer:
    """The StateLayer at `layer_idx` of a transformers cache, swapped in on first touch.

    `alone`: no layer keeps softmax. Raises TypeError for something that is not a layered cache, ValueError when the
    slot already holds keys, or when kept layers have static slots: their masks would follow the state's length.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        raise TypeError(f"past_key_values is {type(cache).__name__}; pass a transformers Cache, such as DynamicCache()")
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
        layer = layers[layer_idx] = StateLayer()
    return layer
