"""Count the memory of code that runs on fake tensors: bytes alive at each moment, by part, and the products.

Fake tensors (torch's FakeTensorMode) have shapes, dtypes and storages without memory. Every storage that an operation
makes counts from then until nothing refers to it, as with an allocator: so what is counted is what the code really
keeps, autograd's saved tensors included, and no formula of an architecture is written anywhere.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

aten = torch.ops.aten
# The CPU's names of operations for which torch has a formula under the GPU's.
OF_CPU: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


TAKES_ROWS = (aten.embedding, aten.index, aten.index_select, aten.gather)


@dataclass(frozen=True)
class Work:
    """What code computes: `flops`, products counted twice; `launches`, operations; `moved`, bytes that operations other
    than products read and write."""

    flops: float = 0.0
    launches: float = 0
    moved: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.launches + other.launches, self.moved + other.moved)

    def times(self, count: float) -> Work:
        """That work so often."""
        return Work(self.flops * count, self.launches * count, self.moved * count)


class Tracker(TorchDispatchMode):
    """Within: storages are counted. Entered inside of FakeTensorMode, of which it answers questions about values.

    `parts` are the bytes alive now, `peak` those at the moment with the largest sum since `restart`, `work` what was
    computed since then, `highest` that sum. `room` may say what an operation holds at most while it runs, its outputs
    included. New storages are `activations`, or `logits` where
    the last of three or more dimensions is one of `vocabularies`; `label` says otherwise.
    """

    def __init__(self, vocabularies: Collection[int] = ()) -> None:
        super().__init__()
        self.vocabularies = vocabularies
        self.parts: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.work = Work()
        self.room: Callable[[Any, Any], int] | None = None
        self.highest = self._now = 0
        self._known: dict[int, tuple[Any, str, int]] = {}

    def restart(self) -> None:
        """Forget the peak and the work so far; what is alive stays counted."""
        self.peak, self.highest, self.work = Counter(self.parts), self._now, Work()

    def label(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """Count the storages of these tensors as `part`, known before or not."""
        for tensor in tensors:
            if tensor is not None:
                self._add(tensor, part, again=True)

    def part_of(self, tensor: Tensor) -> str:
        """What a tensor's storage counts as; empty where it is not counted."""
        known = self._known.get(id(tensor.untyped_storage()))
        return known[1] if known else ""

    def _add(self, tensor: Tensor, part: str, again: bool = False) -> None:
        storage = tensor.untyped_storage()
        key, count = id(storage), storage.nbytes()
        if key in self._known:
            if again:
                reference, before, _ = self._known[key]
                self.parts[before] -= count
                self.parts[part] += count
                self._known[key] = reference, part, count
            return
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key)), part, count
        self.parts[part] += count
        self._now += count
        if self._now > self.highest:
            self.highest, self.peak = self._now, Counter(self.parts)

    def _gone(self, key: int) -> None:
        _, part, count = self._known.pop(key)
        self.parts[part] -= count
        self._now -= count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:  # the code asks for a value, which fake tensors do not have
            return False if args[0].dtype == torch.bool else 0
        kwargs = kwargs or {}
        if self.room is not None and (held := self.room(func, args)) and self._now + held > self.highest:
            self.highest, self.peak = self._now + held, self.parts + Counter({"activations": held})
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        count, flops = flop_registry.get(packet), 0.0
        if count is not None:
            flops = count(*args, **kwargs, out_val=out)
        elif packet in OF_CPU:
            flops = OF_CPU[packet](*args, out_val=out)
        before = len(self._known)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                logits = leaf.ndim >= 3 and leaf.shape[-1] in self.vocabularies
                self._add(leaf, "logits" if logits else "activations")
        if func._schema.is_mutable or len(self._known) > before:  # a view is no launch
            self.work += Work(flops, 1, 0 if flops else moved(packet, args, out))
        return out


def moved(packet: Any, args: Any, out: Any) -> int:
    """Bytes that an operation reads and writes; of a table from which it takes rows, those rows."""
    written, read = (sum(x.nbytes for x in tree_leaves(part) if isinstance(x, Tensor)) for part in (out, args))
    return written + (min(read, 2 * written) if packet in TAKES_ROWS else read)
