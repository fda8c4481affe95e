"""Stochastic depth (arXiv 1603.09382): in training, samples go past a layer at random.

A layer is what transformers checkpoints as one, with its attention and its MLP, so both are left out together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer


def layers_of(model: nn.Module) -> list[nn.Module]:
    """A model's layers in their order; of those that hold others, such as the stages of a Swin, what they hold."""

    def inside(module: nn.Module) -> list[nn.Module]:
        return [one for one in module.modules() if isinstance(one, GradientCheckpointingLayer) and one is not module]

    return [one for one in inside(model) if not inside(one)]


def chances(count: int, rate: float) -> list[float]:
    """With which chance each of `count` layers is left out: from 0 in the first, evenly up to `rate` in the last."""
    return torch.linspace(0.0, rate, count).tolist()


@contextlib.contextmanager
def dropping(model: nn.Module, rate: float) -> Iterator[None]:
    """Within, while the model trains: each sample goes past each layer by its chance (`chances`), by torch's random
    numbers. What the others' layers add is divided by the chance to stay, so its mean is that of evaluation."""
    layers = layers_of(model) if rate else []
    hooks = [
        layer.register_forward_hook(around(chance), with_kwargs=True)
        for layer, chance in zip(layers, chances(len(layers), rate), strict=True)
        if chance
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def around(chance: float) -> Any:
    """A forward hook that leads each sample past its layer by a chance. A layer whose output has another shape than its
    input has no way around it."""

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        before = args[0] if args else kwargs["hidden_states"]
        after: Tensor = output[0] if isinstance(output, tuple) else output
        if not layer.training or after.shape != before.shape:
            return output
        shape = (len(after),) + (1,) * (after.ndim - 1)
        stays = torch.rand(shape, device=after.device) >= chance
        mixed = before + (after - before) * (stays / (1 - chance)).to(after.dtype)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    return hook
