"""Fits each mixer of a model just converted to its softmax, on the few thousand tokens that calibration reads.

Each is fitted apart, for a few dozen steps, on what softmax and the mixer are given in the teacher. Nothing else of the
model has a gradient. Fitting the layers in order, on what those before them put out, did not pay
(docs/measurements/start.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from linearize_kernels.layout import TokenLayout

from .losses import square_error, square_sum
from .stages import Calibration, Inputs

# Passes over the tokens, in steps of about so many, and the learning rate, which falls to a tenth.
PASSES, STEP_TOKENS, RATE = 10, 1024, 1e-2


class Fit(Calibration):
    """Calibration, and behind it `fit_mixer` where that pays."""

    @torch.no_grad()
    def on_layer(self, mixer: Any, inputs: Inputs, o: Tensor, target: Tensor, layout: Any) -> None:
        super().on_layer(mixer, inputs, o, target, layout)
        if self.is_to_be_set(mixer) and starts_far(mixer):
            fit_mixer(mixer, tuple(y.detach() for y in inputs), layout, target)


def starts_far(mixer: Any) -> bool:
    """Whether a mixer is far from softmax when it is calibrated: one memory a head (recurrent.py's `start_from`), alone
    or under SLA's gates, and no exact window. GSA starts near, and so does what stands beside a window."""
    return mixer.near is None and any(hasattr(part, "start_from") for part in mixer.modules())


@torch.no_grad()
def fit_mixer(mixer: nn.Module, inputs: Inputs, layout: TokenLayout, target: Tensor) -> None:
    """Bring what a mixer makes of `inputs` (q, k, v, x) nearer to `target` [B,T,H,Dv], by Adam on its parameters.

    They are fitted in float32 and rounded at the end. Where the error did not become smaller they stay as they were.
    """
    weights = {name: p.detach().float().clone().requires_grad_() for name, p in mixer.named_parameters()}
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rows = max(STEP_TOKENS // target.shape[1], 1)
    parts = [slice(start, start + rows) for start in range(0, len(target), rows)]
    power = square_sum(target, layout.padding).clamp_min(1e-12) / len(parts)

    def error(part: slice) -> Tensor:
        own = rows_of(layout, part, len(target))
        o, _ = functional_call(mixer, weights, (*(y[part] for y in inputs), own))
        return square_error(o, target[part], own.padding) / power

    def mean() -> float:
        return float(torch.stack([error(part) for part in parts]).mean())

    start, steps = mean(), PASSES * len(parts)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * (1.0 - 0.9 * step / steps)
        with torch.enable_grad():
            loss = error(parts[step % len(parts)])
        # Autocast may be on; a backward pass must not be under it.
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.clear_autocast_cache()  # it would go on with the weights as they were, rounded
    if mean() < start:
        for name, parameter in mixer.named_parameters():
            parameter.copy_(weights[name])


def rows_of(layout: TokenLayout, part: slice, rows: int) -> TokenLayout:
    """The layout of some rows of a call of `rows`."""
    padding, segments = (None if x is None else x[part] for x in (layout.padding, layout.segments))
    rotation = layout.rotation and type(layout.rotation)(*(x[part] if len(x) == rows else x for x in layout.rotation))
    return layout._replace(padding=padding, segments=segments, rotation=rotation)
