"""Rehearse one layer of those that are alike, and count it for the others.

A pass runs the first two layers of each kind, and the last two of all, since the output of the last but one is freed
when the layers are over. Every other layer is left out: it gives back its input, and its place on the tracker's
timeline gets a copy of what the second layer of its kind did there, forward and backward. So memory and work are those
of the whole model, and the passes are those of a few layers. Where layers cannot be left out, all are rehearsed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .tracker import Span, Tracker

# A layer of a model: the number of its list, and its place there.
Place = tuple[int, int]
FORWARD, BACKWARD = "forward", "backward"


class LayersDiffer(Exception):
    """A layer cannot be left out: the model has to be rehearsed whole."""


@dataclass
class Call:
    """How a layer was called in one pass: whether its input has a gradient, and what it put out beside the tensor."""

    differentiable: bool
    rest: tuple[Any, ...] | None


@dataclass
class Layers:
    """One list of layers: `stands_for[i]` is the layer whose copy stands in the place of layer i that is left out.

    `calls` are those of the pass of now; None for a layer whose output has another form than its input.
    """

    number: int
    modules: list[nn.Module]
    stands_for: dict[int, int]
    passes: int = 0
    calls: dict[int, Call | None] = field(default_factory=dict)

    def weights(self) -> dict[Place, int]:
        """How many layers each one counts for, of those that count for several."""
        copies = Counter(self.stands_for.values())
        return {(self.number, place): 1 + count for place, count in copies.items()}


def signature(module: nn.Module, place: int) -> tuple[Any, ...]:
    """What makes a layer do what it does to memory: classes, plain attributes, shapes, mixers. Its own number in the
    list means nothing."""
    found: list[Any] = []
    for name, part in module.named_modules():
        plain = {
            key: "place" if value == place and isinstance(value, int) and not isinstance(value, bool) else value
            for key, value in vars(part).items()
            if isinstance(value, bool | int | float | str | tuple | torch.dtype | None) and key not in ("site", "path")
        }
        tensors = [
            (key, tuple(x.shape), x.dtype, x.requires_grad)
            for key, x in (*part._parameters.items(), *part._buffers.items())
            if x is not None
        ]
        found.append((name, type(part), tuple(sorted((k, repr(v)) for k, v in plain.items())), tuple(tensors)))
    return tuple(found)


def find_layers(models: Iterable[nn.Module]) -> list[Layers]:
    """The lists of layers of these models, outermost ones alone, in which some can be left out."""
    found: list[Layers] = []
    for model in models:
        inside = tuple[str, ...]()
        for path, part in model.named_modules():
            if not isinstance(part, nn.ModuleList) or path.startswith(inside):
                continue
            inside += (f"{path}.",)
            modules = list(part)
            kinds: dict[Any, list[int]] = {}
            trains = False
            for place, layer in enumerate(modules):
                # Where nothing before it trains, a layer's input has no gradient.
                kinds.setdefault((trains, signature(layer, place)), []).append(place)
                trains = trains or any(p.requires_grad for p in layer.parameters())
            left_out = {
                place: places[1]
                for places in kinds.values()
                for place in places[2:]
                if place < len(modules) - 2 and len(set(map(id, modules))) == len(modules)
            }
            if left_out:
                found.append(Layers(len(found), modules, left_out))
    return found


@contextlib.contextmanager
def rehearsed_once(lists: list[Layers], tracker: Tracker) -> Iterator[None]:
    """Within: passes leave out layers of these lists that are like others; the tracker's spans say which are whose."""
    before = [(layer, layer.__class__) for layers in lists for layer in layers.modules]
    tracker.weights = {place: weight for layers in lists for place, weight in layers.weights().items()}
    kinds: dict[type, type] = {}
    try:
        for layers in lists:
            for place, layer in enumerate(layers.modules):
                own = layer.__class__
                if own not in kinds:
                    kinds[own] = type(own.__name__, (own,), {"__call__": called, "__module__": own.__module__})
                layer.__dict__["_rehearsal"] = layers, place, tracker, own
                layer.__class__ = kinds[own]
        yield
    finally:
        tracker.weights = {}
        for layer, own in before:
            layer.__class__ = own
            layer.__dict__.pop("_rehearsal", None)


def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The call of a layer within `rehearsed_once`."""
    layers, place, tracker, own = layer._rehearsal
    if torch._C._current_graph_task_id() != -1:  # computed again for a backward pass, of which it is a part
        return own.__call__(layer, *args, **kwargs)
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, Tensor):
        raise LayersDiffer("a layer whose first argument is no tensor")
    if place == 0:
        layers.passes += 1
        layers.calls = {}
        if x.requires_grad and torch.is_grad_enabled():
            x.register_hook(lambda gradient: tracker.begin(None))
    differentiable = x.requires_grad and torch.is_grad_enabled()
    key = layers.number, layers.passes
    tracker.begin((FORWARD, *key, place))
    if place in layers.stands_for:
        return left_out(x, differentiable, layers.calls.get(layers.stands_for[place]), args, kwargs)
    if place in layers.calls:
        raise LayersDiffer("a layer that a pass calls twice")
    layers.calls[place] = None
    out = own.__call__(layer, *args, **kwargs)
    first, *rest = out if isinstance(out, tuple) else (out,)
    form = ("shape", "dtype", "requires_grad")
    if isinstance(first, Tensor) and all(getattr(first, name) == getattr(x, name) for name in form):
        layers.calls[place] = Call(differentiable, tuple(rest) if isinstance(out, tuple) else None)
    if place == len(layers.modules) - 1:
        tracker.begin(None)
    if isinstance(first, Tensor) and first.requires_grad and torch.is_grad_enabled():
        following = list[int]()
        while place + 1 + len(following) in layers.stands_for:
            following.append(place + 1 + len(following))

        def start(gradient: Tensor) -> None:
            for one in (*reversed(following), place):
                tracker.begin((BACKWARD, *key, one))

        first.register_hook(start)
    return out


def left_out(x: Tensor, differentiable: bool, model: Call | None, args: Any, kwargs: Any) -> Any:
    """What a layer that is left out gives back: its input, in the form in which the one like it gave its output."""
    if model is None or model.differentiable != differentiable:
        raise LayersDiffer("a layer whose output has another form than its input")
    if model.rest is None:
        return x
    given = {id(value) for value in (*args, *kwargs.values())}
    if any(value is not None and id(value) not in given for value in model.rest):
        raise LayersDiffer("a layer that passes on more than its output")
    return x, *model.rest


def whole(spans: list[Span], lists: list[Layers]) -> list[Span]:
    """The timeline of the whole model: where a layer was left out, what the one like it did in the same pass."""
    done = {span.owner: span for span in spans if span.owner is not None}
    stands_for = {(layers.number, place): model for layers in lists for place, model in layers.stands_for.items()}
    found = []
    for span in spans:
        if span.owner is not None:
            way, number, count, place = span.owner
            model = stands_for.get((number, place))
            span = span if model is None else done[way, number, count, model]
        found.append(span)
    return found
