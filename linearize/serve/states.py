"""States of many sequences in one block of memory: one row of bytes for each, and which rows a batch reads and writes.

Letters: N rows of a pool, n sequences of a call, L tokens of its longest, T tokens of a batch.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linearize_kernels.hf.cache import map_state

# Every tensor of a state begins at a multiple of this many bytes, so that a row can be viewed in its dtype.
ALIGNMENT = 16


class Part(NamedTuple):
    """One tensor of a state: its first byte in a row, and what it is for one sequence."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, pool: Tensor) -> Tensor:
        """This part of each row of a pool [N,bytes]: [N,*shape], in the same memory."""
        return pool.narrow(1, self.start, self.bytes).view(self.dtype).view(len(pool), *self.shape)


class StateLayout:
    """How one layer's state lies in a row of bytes; tensors without elements take no room."""

    def __init__(self, example: Any) -> None:
        """`example` is the state of one sequence, as the mixer returned it."""
        self.example = example
        self.parts: list[Part] = []
        self.bytes = 0
        for tensor in tensors_of(example):
            if tensor.numel():
                part = Part(self.bytes, tuple(tensor.shape[1:]), tensor.dtype)
                self.parts.append(part)
                self.bytes += -(-part.bytes // ALIGNMENT) * ALIGNMENT

    def views(self, pool: Tensor) -> Any:
        """The states of all rows of a pool [N,bytes] uint8 as one state, in the same memory."""
        parts = iter(self.parts)

        def tensor(like: Tensor) -> Tensor:
            if not like.numel():
                return torch.empty(len(pool), *like.shape[1:], dtype=like.dtype, device=pool.device)
            return next(parts).view(pool)

        return map_state(tensor, self.example)


class Pool(NamedTuple):
    """Rows of states in one block of memory [N,bytes], and the same memory as a mixer's state."""

    layout: StateLayout
    memory: Tensor
    state: Any

    @classmethod
    def of(cls, layout: StateLayout, memory: Tensor) -> Pool:
        return cls(layout, memory, layout.views(memory))


def store(pool: Any, rows: Tensor, state: Any) -> None:
    """Write a state of n sequences into rows [n] of a pool that `StateLayout.views` made."""
    for view, tensor in zip(tensors_of(pool), tensors_of(state), strict=True):
        if view.numel():
            view.index_copy_(0, rows, tensor.to(view.dtype))


def tensors_of(state: Any) -> Iterator[Tensor]:
    """The tensors of a state, which may hold other states, in order."""
    if isinstance(state, Tensor):
        yield state
    elif state is not None:
        for part in state:
            yield from tensors_of(part)


def code_of(mechanism: type) -> str:
    """The package of the files that a Mixer class was loaded with: a checkpoint's own copy of the kernels, or ours."""
    return next(kind.__module__ for kind in mechanism.__mro__ if kind.__name__ == "Mixer").rpartition(".")[0]


def layout_class(mixer: Any) -> Any:
    """TokenLayout in a mixer's own copy of the kernels."""
    return importlib.import_module(f"{code_of(type(mixer))}.layout").TokenLayout


def softmax_of(mixer: Any) -> Any:
    """Take from a mixer the heads that keep softmax (softmax_heads.py's SoftmaxHeads), None where none does. It is then
    called with the other heads alone, and the server computes these, with memory of its own for their keys."""
    heads, mixer.softmax = mixer.softmax, None
    return heads


@torch.no_grad()
def example_state(mixer: Any, dtype: torch.dtype) -> Any:
    """A mixer's state of one sequence after one token; its parameters may hold anything."""
    site = mixer.site

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(1, 1, *shape, dtype=dtype)

    q, k = zeros(site.heads, site.key_dim), zeros(site.kv_heads, site.key_dim)
    return mixer(q, k, zeros(site.kv_heads, site.value_dim), zeros(site.hidden), layout_class(mixer)())[1]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes in this thread alone. A server forks its engine, which would wait forever for OpenMP's threads
    where the process in front of it had started some."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def state_layouts(mechanisms: dict[str, Any], spec: dict[str, Any], dtype: torch.dtype) -> dict[int, StateLayout]:
    """The layout of each linear layer's state, by its number; equal layers share one.

    `mechanisms` are the Mixer classes of a checkpoint's own code, `spec` is `config.linearize`, `dtype` that of
    activations.
    """
    known: dict[str, StateLayout] = {}
    layouts: dict[int, StateLayout] = {}
    for layer in spec["layers"]:
        site = {**layer["site"], "layer": 0, "path": ""}
        key = repr((layer["mechanism"], sorted(layer["options"].items()), sorted(site.items())))
        if key not in known:
            kind = mechanisms[layer["mechanism"]]
            code = importlib.import_module(f"{code_of(kind)}.mixer")
            place, options = code.AttentionSite.from_dict(site), layer["options"]
            with torch.device("cpu"):
                mixer = code.mixer_at(kind, place, options)
                softmax_of(mixer)
                known[key] = StateLayout(example_state(mixer.to(dtype), dtype))
        layouts[layer["site"]["layer"]] = known[key]
    return layouts


class Place(NamedTuple):
    """Where a layer's state lies: from byte `begin` on in each row of the memory of layer `owner`."""

    owner: int
    begin: int


def shared_memory(layouts: dict[int, StateLayout], kept: int) -> tuple[dict[int, Place], int]:
    """The place of each linear layer's state in memories that layers share, and the bytes of a row of any of them.

    vLLM manages as many layers at a time as there are of the rarer kind, for every sequence in every step. Where `kept`
    layers are softmax, there are as many memories of states, so that it manages these twice and not once for every
    `kept` linear layers.
    """
    count = min(kept, len(layouts)) or len(layouts)
    owners, used = list(layouts)[:count], [0] * count
    places: dict[int, Place] = {}
    for i, (number, layout) in enumerate(layouts.items()):
        places[number] = Place(owners[i % count], used[i % count])
        used[i % count] += layout.bytes
    return places, max(used)
