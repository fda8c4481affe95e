"""A student with one of its two parts switched off, which tells what the other is worth."""

from __future__ import annotations

from typing import Any

import torch

from linearize_kernels.hf.attention_hooks import mixers_of

from ..errors import IncompatibleError

# Of what share the memory has: a sigmoid of this is 0 or 1 in float32, whatever stands beside it.
CERTAIN = 1e6


def switch_off(model: Any, part: str, name: str) -> None:
    """Give all weight to the other part where a layer has both: an exact window, and a linear memory beside it
    (`w` of kernels/window/window.py). Raises IncompatibleError where no layer of the model `name` has both."""
    parts = (part for mixer in mixers_of(model).values() for part in mixer.modules())
    blended: list[Any] = [window for window in parts if hasattr(window, "far_logit")]
    if not blended:
        message = f"--without {part}: no layer of {name} has a linear memory and an exact window, so one of them"
        raise IncompatibleError(f"{message} is all it has. Leave it out")
    with torch.no_grad():
        for window in blended:
            window.far_logit.fill_(-CERTAIN if part == "memory" else CERTAIN)
