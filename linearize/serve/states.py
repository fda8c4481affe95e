"""States of many sequences in one block of memory: one row of bytes for each, and which rows a batch reads and writes.

Letters: N rows of a pool, n sequences of a call, L tokens of its longest, T tokens of a batch.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linearize_kernels.hf.cache import map_state
from linearize_kernels.layers.pool import take

# Every tensor of a state begins at a multiple of this many bytes, so that a row can be viewed in its dtype.
ALIGNMENT = 16
# Sequences of different length share a call while filling them up costs at most as many tokens as there are.
PADDED = 2


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

    def read(self, pool: Tensor, rows: Tensor) -> Any:
        """The states of rows [n] of a pool, as a mixer takes them; a copy. Of a row below 0 it is that of no token."""
        return self.views(take(pool, rows))

    def write(self, pool: Tensor, rows: Tensor, state: Any) -> None:
        """Store a state of n sequences in rows [n] of a pool."""
        store(self.views(pool), rows, state)


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


def rotation_class(mixer: Any) -> Any:
    """Rotation in a mixer's own copy of the kernels."""
    code = code_of(type(mixer))
    found = importlib.import_module(f"{code}.layers.rotary" if code == "linearize_kernels" else f"{code}.rotary")
    return found.Rotation


def softmax_of(mixer: Any) -> Any:
    """Take from a mixer the heads that keep softmax (softmax_heads.py's SoftmaxHeads), None where none does. It is then
    called with the other heads alone, and the server computes these, with memory of its own for their keys."""
    heads = getattr(mixer, "softmax", None)  # code of 0.1.0 knows none
    mixer.softmax = None
    return heads


@torch.no_grad()
def example_state(mixer: Any, dtype: torch.dtype) -> Any:
    """A mixer's state of one sequence after one token; its parameters may hold anything."""
    site = mixer.site

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(1, 1, *shape, dtype=dtype)

    q, k = zeros(site.heads, site.key_dim), zeros(site.kv_heads, site.key_dim)
    return mixer(q, k, zeros(site.kv_heads, site.value_dim), zeros(site.hidden), layout_class(mixer)())[1]


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
                # Code of 0.1.0 has no mixer_at.
                mixer = code.mixer_at(kind, place, options) if site.get("softmax_groups") else kind(place, **options)
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


# ---------------------------------------------------------------- which tokens share a call


class Call(NamedTuple):
    """Sequences that one call of a mixer serves; they are all `fresh` (without a state), or none is."""

    tokens: Tensor  # [n,L] int64 places in the batch; those behind the end of a sequence are its last
    padding: Tensor | None  # [n,L] bool, True at real tokens; None: all are
    real: Tensor | None  # [m] int64 the real ones among the n*L; None: all are
    rows: Tensor  # [n] int64 of the pool
    fresh: bool


def calls_of(starts: list[int], seen: list[int], rows: Tensor) -> list[Call]:
    """How a batch becomes calls: sequence i has the tokens from `starts[i]` to `starts[i+1]`, and had `seen[i]` before.

    `rows` [n] are the rows of their states, on the device of the batch. Sequences that go on by one token are one call.
    Longer ones share calls by length, filled up on the right.
    """
    lengths = [end - start for start, end in pairwise(starts)]
    order = [i for i, length in enumerate(lengths) if length > 0]
    order.sort(key=lambda i: (seen[i] > 0, lengths[i]))
    groups: list[list[int]] = []
    kind, real = (False, False), 0
    for i in order:
        own = (seen[i] > 0, lengths[i] > 1)  # with a state or without, one token or several
        if groups and own == kind and (len(groups[-1]) + 1) * lengths[i] <= PADDED * (real + lengths[i]):
            groups[-1].append(i)
            real += lengths[i]
        else:
            groups.append([i])
            kind, real = own, lengths[i]
    return [_call(group, starts, lengths, seen[group[0]] == 0, rows) for group in groups]


def _call(group: list[int], starts: list[int], lengths: list[int], fresh: bool, rows: Tensor) -> Call:
    own = torch.tensor([lengths[i] for i in group])
    places = torch.arange(int(own.max()))
    first = torch.tensor([starts[i] for i in group])
    tokens = first[:, None] + places.minimum(own[:, None] - 1)
    padding, real, device = None, None, rows.device
    if bool((own != own[0]).any()):
        padding = places < own[:, None]
        real = padding.flatten().nonzero()[:, 0].to(device)
        padding = padding.to(device)
    return Call(tokens.to(device), padding, real, rows[torch.tensor(group, device=device)].long(), fresh)


def run_call(
    mixer: Any,
    layout: StateLayout,
    pool: Tensor,
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    rotation: Any,
    out: Tensor,
) -> None:
    """One call of a mixer on a batch of tokens: changes the states in `pool`, writes o into `out` [T,H,Dv].

    `inputs` are q [T,H,D], k [T,Hkv,D], v [T,Hkv,Dv] and hidden states [T,hidden]; `rotation`, cos and sin [1,T,R/2],
    is for mixers that rotate q and k themselves, else None.
    """
    q, k, v, x = (tensor[call.tokens] for tensor in inputs)
    tokens = layout_class(mixer)(padding=call.padding)
    if rotation is not None:
        tokens = tokens._replace(rotation=type(rotation)(*(part[0, call.tokens] for part in rotation)))
    # Code of checkpoints from before 2026-11-23 knows no rows.
    if not call.fresh and q.shape[1] == 1 and "rows" in tokens._fields:
        o, _ = mixer(q, k, v, x, tokens._replace(rows=call.rows), layout.views(pool))
    else:
        o, state = mixer(q, k, v, x, tokens, None if call.fresh else layout.read(pool, call.rows))
        layout.write(pool, call.rows, state)
    o, places = o.flatten(0, 1), call.tokens.flatten()
    if call.real is not None:
        o, places = o[call.real], places[call.real]
    out[places] = o.to(out.dtype)
