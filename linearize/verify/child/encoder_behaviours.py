"""Checks of a model that does not generate text; behaviours.py calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .inputs import difference, taller_images


def heads(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What one pass puts out, by name: tensors with a row for each of the inputs'."""
    B = len(next(iter(inputs.values())))
    with torch.no_grad():
        found = model(**inputs)
    values = {name: value for name, value in found.items() if isinstance(value, Tensor) and value.is_floating_point()}
    # Two towers are compared with each other, each row with all.
    return {n: value for n, value in values.items() if value.shape[:1] == (B,) and not n.startswith("logits_per_")}


def alone(model: Any, inputs: dict[str, Any]) -> float:
    """Rows of a batch are the rows alone."""
    whole, worst = heads(model, inputs), 0.0
    for row in range(len(next(iter(inputs.values())))):
        own = heads(model, {n: x[row : row + 1] if isinstance(x, Tensor) else x for n, x in inputs.items()})
        worst = max([worst, *(difference(own[name], whole[name][row : row + 1]) for name in own)])
    return worst


def padded_text(model: Any, inputs: dict[str, Any]) -> float | None:
    """Padding after a text changes nothing of it."""
    if [*inputs] != ["input_ids"]:
        return None
    ids = inputs["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, -ids.shape[1] // 3 :] = 0
    whole = heads(model, {"input_ids": ids, "attention_mask": mask})
    T = int(mask[0].sum())
    own = heads(model, {"input_ids": ids[:, :T]})
    return max(difference(value, whole[name][:, :T] if value.ndim == 3 else whole[name]) for name, value in own.items())


def other_size(model: Any, inputs: dict[str, Any]) -> float | None:
    """Images twice as high as those that the model was made for, where it takes them."""
    found = taller_images(model, inputs)
    return None if found is None else alone(model, found)


ENCODER_CHECKS: dict[str, Callable[[Any, Any], float | None]] = {
    "rows alone": alone,
    "padding": padded_text,
    "another size": other_size,
}
