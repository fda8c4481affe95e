"""The small maps of hidden states in a mixer as one product: in a decode step each would be a launch of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .states import layout_class


class Part(nn.Module):
    """Stands where a map of hidden states was: its columns of the product that `owner` made of them. `linear` is a map
    that adds its bias in float32 (gate_linear.py's DecayLinear)."""

    def __init__(self, owner: nn.Module, begin: int, end: int, linear: Any = None) -> None:
        super().__init__()
        self.__dict__["owner"] = owner  # no child: it holds this
        self.begin, self.end, self.linear = begin, end, linear

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.__dict__["owner"].made
        part = made[..., self.begin : self.end]
        return part if self.linear is None else self.linear.with_bias(part)


@torch.no_grad()
def merged(owner: nn.Module, mixer: Any) -> tuple[Tensor, Tensor | None] | None:
    """The weight [outputs,hidden] and the bias of one map in place of those that `mixer` has of hidden states; None
    where it has fewer than two. `owner.made` has to be the product whenever the mixer runs."""
    maps: list[tuple[nn.Module, str, nn.Linear]] = []
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    near = mixer.near
    for parent, name, linear in of_hidden(mixer):
        maps.append((parent, name, linear))
        weights.append(linear.weight)
        biases.append(None if adds_wide(linear) else linear.bias)
    if near is not None:
        weights.append(near.far_gate.to(weights[0].dtype if weights else near.far_gate.dtype))
        biases.append(None)
    if len(weights) < 2 or len({weight.dtype for weight in weights}) > 1:
        return None
    begin = 0
    for parent, name, linear in maps:
        wide = adds_wide(linear)
        setattr(parent, name, Part(owner, begin, begin + linear.out_features, linear if wide else None))
        if wide:
            linear.register_parameter("weight", None)  # it is in the product
        begin += linear.out_features
    if near is not None:
        near.__dict__["gate"] = Part(owner, begin, begin + len(weights[-1]))
    if all(bias is None for bias in biases):
        return torch.cat(weights), None
    filled = [w.new_zeros(len(w)) if b is None else b.to(w.dtype) for w, b in zip(weights, biases, strict=True)]
    return torch.cat(weights), torch.cat(filled)


def adds_wide(part: nn.Module) -> bool:
    """Whether a map adds its bias in float32 to a product in its weight's dtype."""
    return hasattr(type(part), "with_bias")


def of_hidden(mixer: Any) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The Linear layers that `project` applies to hidden states themselves, with their parents: found by a token."""
    site = mixer.site
    kept = {*mixer.fp32_names()}
    parameters = (parameter for name, parameter in mixer.named_parameters() if name not in kept)
    some = next(parameters, torch.empty(0))

    def token(*shape: int) -> Tensor:
        return some.new_zeros(1, 1, *shape)

    x, hooks = token(site.hidden), []
    seen: list[tuple[nn.Module, str, nn.Linear]] = []
    places = {id(child): (parent, name) for parent in mixer.modules() for name, child in parent.named_children()}

    def note(linear: Any, given: tuple[Any, ...]) -> None:
        if given[0] is x:
            seen.append((*places[id(linear)], linear))

    for part in mixer.modules():
        plain = type(part) is nn.Linear and (part.bias is None or part.bias.dtype == part.weight.dtype)
        if plain or adds_wide(part):
            hooks.append(part.register_forward_pre_hook(note))
    heads = (site.heads, site.key_dim), (site.kv_heads, site.key_dim), (site.kv_heads, site.value_dim)
    mixer.project(*(token(*shape) for shape in heads), x, layout_class(mixer)(plain=True))
    for hook in hooks:
        hook.remove()
    return seen
