"""Count the memory of code that runs on fake tensors: bytes alive at each moment, by part, and the products.

Fake tensors (torch's FakeTensorMode) have shapes, dtypes and storages without memory. Every storage that an operation
makes counts from then until nothing refers to it, as with an allocator: so what is counted is what the code really
keeps, autograd's saved tensors included, and no formula of an architecture is written anywhere. `as_on_gpu` lets a
model take the paths there that it takes on a GPU: its registered operators instead of PyTorch's.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from linearize_kernels.hf.attention_hooks import mixers_of

aten = torch.ops.aten
# The CPU's names of operations for which torch has a formula under the GPU's.
OF_CPU: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


# Attributes that Python asks a fake tensor for by an operation: half of all that it dispatches.
DEVICE = torch.ops.prim.device.default
# Arguments that are hashed as they are.
PLAIN = {int, float, bool, str, torch.dtype, type(None)}
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


@dataclass(frozen=True)
class Span:
    """What happened between two moments, as changes since the first of them: bytes by part at its end, and when most
    were alive (`highest` is their sum); the most that a look saw of activations and logits; bytes sent to the host."""

    owner: Any
    change: Counter[str]
    peak: Counter[str]
    highest: int
    work: Work
    seen: int | None
    hosted: int


@dataclass(frozen=True)
class Total:
    """A timeline as one: bytes by part at its peak, whose sum is `highest`, and at its end; `seen` is the most of any
    look."""

    peak: Counter[str]
    highest: int
    end: Counter[str]
    work: Work
    seen: int
    hosted: int


def total(spans: Iterable[Span], start: Counter[str]) -> Total:
    """These spans one after another, where so many bytes are alive at the start."""
    now, alive = Counter(start), sum(start.values())
    peak, highest, work, seen, hosted = Counter(start), alive, Work(), 0, 0
    for span in spans:
        if alive + span.highest > highest:
            highest, peak = alive + span.highest, merged(now, span.peak)
        if span.seen is not None:
            seen = max(seen, now["activations"] + now["logits"] + span.seen)
        now = merged(now, span.change)
        alive = sum(now.values())
        work, hosted = work + span.work, hosted + span.hosted
    return Total(peak, highest, now, work, seen, hosted)


def merged(one: Counter[str], other: Counter[str]) -> Counter[str]:
    """Their sum; unlike `+` of counters it may be negative."""
    found = Counter(one)
    found.update(other)
    return found


class Tracker(TorchDispatchMode):
    """Within: storages are counted. Entered inside of FakeTensorMode, of which it answers questions about values.

    `parts` are the bytes alive now, `peak` those at the moment with the largest sum, `highest` that sum, and `work`
    what was computed, since the last `begin` or `restart`. `workspace` may say what an operation holds at most while it
    runs, its outputs included. New storages are `activations`, or `logits` where the last of three or more dimensions
    is one of `vocabularies`; `label` says otherwise.

    `begin` divides time into spans, each with an owner. A storage that is made in the span of a layer which counts for
    several, by `weights`, and is freed in a span that no layer owns, is freed so many times.
    """

    def __init__(self, vocabularies: Collection[int] = ()) -> None:
        super().__init__()
        self.vocabularies = vocabularies
        self.parts: Counter[str] = Counter()
        self.workspace: Callable[[Any, Any], int] | None = None
        self.weights: dict[Any, int] = {}
        self._now = 0
        self._known: dict[int, tuple[Any, str, int, Any]] = {}
        self._spans: list[Span] = []
        self._open(None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled within, and each call would ask for it
        return False

    def _open(self, owner: Any) -> None:
        self.owner, self._start = owner, Counter(self.parts)
        self._place = None if owner is None else (owner[1], owner[3])
        self.peak, self.highest = Counter(self.parts), self._now
        self._seen: int | None = None
        self._hosted = 0
        self._flops, self._launches, self._moved = 0.0, 0, 0

    @property
    def work(self) -> Work:
        return Work(self._flops, self._launches, self._moved)

    def restart(self) -> None:
        """Forget the peak, the work and the spans so far; what is alive stays counted."""
        self._spans = []
        self._open(None)

    def begin(self, owner: Any) -> None:
        """End the span of now, and begin another: of (way, list, pass, layer), or of None."""
        change, peak = Counter(self.parts), Counter(self.peak)
        change.subtract(self._start)
        peak.subtract(self._start)
        before = sum(self._start.values())
        self._spans.append(Span(self.owner, change, peak, self.highest - before, self.work, self._seen, self._hosted))
        self._open(owner)

    def cut(self) -> list[Span]:
        """The spans since `restart`, or since the last cut."""
        self.begin(None)
        spans, self._spans = self._spans, []
        return spans

    def look(self) -> None:
        """Note what is alive of activations and logits."""
        now = sum(self.parts[part] - self._start[part] for part in ("activations", "logits"))
        self._seen = now if self._seen is None else max(self._seen, now)

    def host(self, count: int) -> None:
        """Note bytes that went to the host's memory."""
        self._hosted += count

    def label(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """Count the storages of these tensors as `part`, known before or not."""
        for tensor in tensors:
            if tensor is not None:
                self._add(tensor, part, again=True)

    def part_of(self, tensor: Tensor) -> str:
        """What a tensor's storage counts as; empty where it is not counted."""
        known = self._known.get(id(tensor.untyped_storage()))
        return known[1] if known else ""

    def _add(self, tensor: Tensor, part: str, again: bool = False) -> bool:
        """Count a tensor's storage; whether it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            if again:
                count = storage.nbytes()
                reference, before, _, place = self._known[key]
                self.parts[before] -= count
                self.parts[part] += count
                self._known[key] = reference, part, count, place
            return False
        count = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key)), part, count, self._place
        self.parts[part] += count
        self._now += count
        if self._now > self.highest:
            self.highest, self.peak = self._now, Counter(self.parts)
        return True

    def _gone(self, key: int) -> None:
        _, part, count, place = self._known.pop(key)
        if self.owner is None and place is not None:
            count *= self.weights.get(place, 1)
        self.parts[part] -= count
        self._now -= count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        if func is aten._local_scalar_dense.default:  # the code asks for a value, which fake tensors do not have
            return False if args[0].dtype == torch.bool else 0
        kwargs = kwargs or {}
        if self.workspace is not None and (held := self.workspace(func, args)) and self._now + held > self.highest:
            self.highest, self.peak = self._now + held, merged(self.parts, Counter({"activations": held}))
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        count, flops = flop_registry.get(packet), 0.0
        if count is not None:
            flops = count(*args, **kwargs, out_val=out)
        elif packet in OF_CPU:
            flops = OF_CPU[packet](*args, out_val=out)
        made = False
        for leaf in tensors_in(out):
            logits = leaf.ndim >= 3 and leaf.shape[-1] in self.vocabularies
            made |= self._add(leaf, "logits" if logits else "activations")
        if made or func._schema.is_mutable:  # a view is no launch
            self._flops += flops
            self._launches += 1
            self._moved += 0 if flops else moved(packet, args, out)
        return out


class Fakes(FakeTensorMode):
    """torch's fake tensors, at a third of the time: results of operations are remembered by shorter keys, and made with
    less around them. torch walks through 17 fields of each tensor and every number of its shape, and sets 18 attributes
    of a result one by one."""

    def __init__(self) -> None:
        super().__init__()
        self._attributes = dict[torch.device, dict[str, Any]]()  # of every fake tensor there

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs or {})

    def _prep_args_for_hash(self, result: list[Any], args: Any, *more: Any) -> None:
        if isinstance(args, dict):
            super()._prep_args_for_hash(result, args, *more)
            return
        result.append(len(args))
        for x in args:
            if type(x) in PLAIN:
                result.append((type(x), x))
            elif type(x) is FakeTensor and x.fake_mode is self and x.constant is None and x.layout is torch.strided:
                place = x.fake_device, x.storage_offset(), x.untyped_storage().nbytes()
                marks = x.requires_grad, x.is_conj(), x.is_neg(), x.is_inference()
                result.append((x.dtype, x.shape, x.stride(), place, marks))
            else:
                super()._prep_args_for_hash(result, (x,), *more)

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
        form = entry.metadata
        attributes = None if form is None else self._attributes.get(form.device)
        usual = entry.inplace_idx is None and form is not None and form.layout is torch.strided
        if attributes is None or not usual or form.is_conj or form.is_neg:
            made = super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
            if type(made) is FakeTensor and made.constant is None:
                self._attributes.setdefault(made.fake_device, dict(vars(made)))
            return made
        with in_kernel_invocation_manager(self):
            empty = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
            if entry.view_idx is not None:
                empty.set_(args[entry.view_idx].untyped_storage(), form.storage_offset, form.shape, form.stride)
        made = Tensor._make_subclass(
            FakeTensor, empty, form.requires_grad, dispatch_device=True, device_for_backend_keys=form.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(attributes)
        return made


def tensors_in(values: Any) -> Iterable[Tensor]:
    """The tensors among an operation's arguments or results."""
    if isinstance(values, Tensor):
        return (values,)
    if not isinstance(values, tuple | list):
        return ()
    return [tensor for value in values for tensor in tensors_in(value)]


def moved(packet: Any, args: Any, out: Any) -> int:
    """Bytes that an operation reads and writes; of a table from which it takes rows, those rows."""
    written, read = (sum(x.nbytes for x in tensors_in(part)) for part in (out, args))
    return written + (min(read, 2 * written) if packet in TAKES_ROWS else read)


# ---------------------------------------------------------------- as on a GPU


KNOWN = (torch.bfloat16, torch.float16, torch.float32)
# Capability, shared memory and multiprocessors of an H100 or H200, for which launches are configured: what other cards
# choose changes tiles more than memory.
HOPPER = ((9, 0), 232448, 132)

Workspace = Callable[[Any, Any], int]


@contextlib.contextmanager
def as_on_gpu(model: Any) -> Iterator[Workspace]:
    """Within: the mixers of `model` call their Triton operators, of whose results fake tensors know the shapes.

    Otherwise they would run PyTorch's path, which keeps more for its backward pass, and whose loops over chunks take
    seconds a layer to follow. The model's code was copied for it alone, so nothing else in the process is changed.

    Yields what says of an operator and its inputs how many bytes its host side has at most, outputs and scratch memory
    together; 0 for operators of others.
    """
    packages = {type(mixer).__module__.rpartition(".")[0] + "." for mixer in mixers_of(model).values()}
    modules = [module for name, module in list(sys.modules.items()) if any(map(name.startswith, packages))]
    (kind,) = {module.Target for module in modules if hasattr(module, "Target")} or {tuple}

    def unavailable(device: torch.device, dtype: torch.dtype) -> str:
        return "" if dtype in KNOWN else f"dtype {dtype}"

    def target(device: torch.device) -> Any:
        return kind(*HOPPER)

    with contextlib.ExitStack() as stack:
        for module in modules:
            for function in (unavailable, target):
                if callable(getattr(module, function.__name__, None)):
                    stack.enter_context(mock.patch.object(module, function.__name__, function))
        yield workspace_of(modules)


def workspace_of(modules: list[ModuleType]) -> Workspace:
    """Of the operators that these modules register. The same call is followed once: layers are alike."""
    hosts = {name: host for module in modules for name, host in getattr(module, "HOSTS", {}).items()}
    known: dict[Any, int] = {}

    def workspace(function: Any, inputs: Any) -> int:
        host = hosts.get(function.name())
        if host is None:
            return 0
        key = function.name(), *((x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else x for x in inputs)
        if key not in known:
            with launching_nothing(modules):
                known[key] = most_of(host, inputs)
        return known[key]

    return workspace


def most_of(host: Callable[..., Any], inputs: Any) -> int:
    """The most bytes alive while a host side runs, beside its inputs."""
    given = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    tracker = Tracker()
    tracker.label(given, "inputs")
    tracker.restart()
    # In folders of before 2026-11-28 a host side gets a number first.
    first = (0,) if "call" in inspect.signature(host).parameters else ()
    with tracker:
        host(*first, *inputs)
    return tracker.highest - tracker.peak["inputs"]


class Dropped(dict[Any, Any]):
    """Collects no launch."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@contextlib.contextmanager
def launching_nothing(modules: list[ModuleType]) -> Iterator[None]:
    """Within: host sides of these modules allocate, and launch nothing."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value=0))
        for module in modules:
            if hasattr(module, "_collected"):
                stack.callback(module._collected.reset, module._collected.set(Dropped()))
        yield
