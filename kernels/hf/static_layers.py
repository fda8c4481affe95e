"""Keys and values with room for more tokens, for the layers that keep softmax while decode steps are recorded.

Such a layer's keys grow with every token, and a recording has tensors of one size. So for recorded steps they lie in
buffers with empty places, and how many are filled is a number on the device. The token's own key lies at the next free
place, and again at the last one: there the masks of transformers, and linear layers that read them, expect the newest
token. Between steps the cache holds its usual layers, whose keys are the filled part of a buffer, so whatever else is
done with it (beams, other calls, more text) goes on as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..layout import shown
from ..layers.softmax_step import obstacle, softmax_step
from .cache import grows

# Room for so many tokens more, in all and as a part of those that are there.
MORE, PART = 1024, 16
# What else an attention function may be told of its scores; the kernel follows none of it.
OTHER_SCORES = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias", "head_mask")


class Places:
    """What the static layers of a cache share. `size` is N; `count` [1] int64 tells the device how many tokens came before the
    step's; `real` [B,N] bool which places a token sees: those of the real tokens before it, and the last one, its own.
    """

    def __init__(self, keys: Tensor, held: int) -> None:
        self.size = -(-(held + held // PART) // MORE) * MORE + MORE
        self.count = torch.zeros(1, dtype=torch.long, device=keys.device)
        self.real = torch.zeros(len(keys), self.size, dtype=torch.bool, device=keys.device)
        # Whether masks are read and compared: in the first step, which is not recorded.
        self.trial = True


class StaticLayer(CacheLayerMixin):
    """Stands for a layer of the cache within a recorded step: keys [B,E,N,D] and values of N places."""

    keys: Tensor
    values: Tensor
    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, places: Places, layer: Any) -> None:
        super().__init__()
        self.places, self.is_initialized = places, True
        self.keys, self.values = (_enlarged(x, places.size) for x in (layer.keys, layer.values))
        self.shown: Any = None
        # For `dispatch` of interface.py, to which the module hands what `update` returns. A reference in a circle would
        # keep the buffers until Python collects garbage.
        self.keys.linearize_room = weakref.ref(self)  # type: ignore[attr-defined]
        # Whether attention has come here in the trial, with a mask that says what `places.real` says.
        self.attended = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The buffers are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Put the token's key and value [B,E,1,D] into their places; returns the buffers."""
        for buffer, x in ((self.keys, key_states), (self.values, value_states)):
            buffer.index_copy_(2, self.places.count, x)
            buffer[:, :, -1:] = x
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.places.size, 0

    def get_seq_length(self) -> int:
        return self.places.size - 1

    def get_max_length(self) -> int:
        return -1

    # Name of the same question before transformers 5.23.
    get_max_cache_shape = get_max_length

    def attend(self, softmax: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """The registered attention function of a module whose keys lie here: by the kernels where they can, else by
        `softmax`, which reads all places.

        Raises ValueError in a trial where the mask hides or shows another place than the padding does.
        """
        query, places = args[0], self.places
        if places.trial:
            self._check(args[3] if len(args) > 3 else kwargs.get("attention_mask"))
        asked = [name for name in OTHER_SCORES if kwargs.get(name) is not None]
        scale = kwargs.get("scaling")
        if asked or scale is None or obstacle(query, self.values):
            return softmax(module, *args, **kwargs)
        return softmax_step(query, self.keys, self.values, places.real, places.count, scale), None

    def _check(self, mask: Any) -> None:
        if not isinstance(mask, Tensor) or mask.ndim != 4:
            raise ValueError("a layer that keeps softmax has no mask to read")
        if not bool((shown(mask) == self.places.real[:, None, None]).all()):
            raise ValueError("a layer that keeps softmax sees other tokens than padding leaves")
        self.attended = True


class StaticLayers:
    """Static layers for a cache's layers that keep softmax."""

    def __init__(self, layers: list[Any]) -> None:
        """Raises ValueError where these hold different numbers of tokens."""
        keys = [layer.keys for layer in layers if grows(layer)]
        held = keys[0].shape[2]
        if any(x.shape[2] != held for x in keys):
            raise ValueError("layers that keep softmax hold different numbers of tokens")
        self.places = Places(keys[0], held)
        self.static_layers = {i: StaticLayer(self.places, layer) for i, layer in enumerate(layers) if grows(layer)}

    def fit(self, layers: list[Any]) -> bool:
        """Whether the next token finds a free place beside the last one."""
        return all(grows(layers[i]) for i in self.static_layers) and self.held(layers) < self.places.size - 1

    def held(self, layers: list[Any]) -> int:
        """n, how many tokens the cache's layers hold."""
        return layers[min(self.static_layers)].keys.shape[2]

    def enter(self, layers: list[Any], mask: Tensor | None) -> None:
        """Before a step: what the cache's layers hold, and the padding `mask` [B,n+1] of all tokens (None: none)."""
        n = self.held(layers)
        for i, static in self.static_layers.items():
            layer = layers[i]
            if layer.keys is not static.shown:  # someone reordered, or wrote, this cache
                static.keys[:, :, :n] = layer.keys
                static.values[:, :, :n] = layer.values
        self.places.count.fill_(n)
        real = self.places.real.zero_()
        real[:, :n] = True if mask is None else mask[:, :n]
        real[:, -1:] = True if mask is None else mask[:, n:]

    def leave(self, layers: list[Any]) -> None:
        """After a step: the cache's layers hold one token more."""
        n = self.held(layers) + 1
        for i, static in self.static_layers.items():
            layer = layers[i]
            layer.keys = static.shown = static.keys[:, :, :n]
            layer.values = static.values[:, :, :n]

    def end_trial(self) -> None:
        """Raises ValueError where a layer that keeps softmax does not attend by transformers' interface."""
        self.places.trial = False
        if not all(static.attended for static in self.static_layers.values()):
            raise ValueError("a layer that keeps softmax does not call transformers' attention interface")

    def stand_in(self, layers: list[Any]) -> list[Any]:
        """The layers of a cache with static ones in their places; linear ones have seen as many tokens as those have places,
        but one."""
        return [self.static_layers.get(i, layer) for i, layer in enumerate(layers)]


def _enlarged(x: Tensor, places: int) -> Tensor:
    """Zeros [B,E,places,D] of the kind of x [B,E,n,D]; what no token has written must be a number, for masked sums."""
    return x.new_zeros(*x.shape[:2], places, x.shape[3])
