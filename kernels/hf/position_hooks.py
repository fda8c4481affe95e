"""What a model was told of places, for architectures that tell it to their masks but not to attention.

Llama 4, GPT-BigCode, GPT-Neo and others keep packed documents apart by the mask alone, which linear layers do without:
position_ids end at the model, or at its layers. Hooks of the model note them for its mixers.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..layout import LAST, check_thread, is_own_mask, this_thread

# Arguments that say where tokens and documents are.
PLACE_NAMES = ("position_ids", "cu_seq_lens_q", "seq_idx")


class PositionHooks:
    """What the calls of one model were told of places, by thread."""

    def __init__(self) -> None:
        self.passes: dict[int, dict[str, Any]] = {}
        self.mixers: list[Any] = []
        # Whether the mask of a call is its caller's own, which compiled passes note as well.
        self.own_masks: dict[int, bool] = {}
        # Whether the model runs as its softmax teacher, and the thread that switched it, to that or to transfer.
        self.teacher = False
        self.owner: int | None = None

    @contextmanager
    def switched(self, teacher: bool) -> Iterator[None]:
        """Within: the model is switched, and calls of this thread alone are allowed. Raises RuntimeError where another
        thread has switched it."""
        check_thread(self.owner)
        outer = self.teacher, self.owner
        self.teacher, self.owner = teacher, threading.get_ident()
        try:
            yield
        finally:
            self.teacher, self.owner = outer

    def watch(self, model: Any) -> None:
        """Note what each call of `model`, or of a model in it, is told."""
        # Kept at the model, for FSDP2 changes its class.
        model.linearize_arguments = [*inspect.signature(type(model).forward).parameters][1:]
        model.register_forward_pre_hook(self.note, with_kwargs=True)
        model.register_forward_hook(self.forget)

    def note(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of a model."""
        given = {**dict(zip(model.linearize_arguments, args, strict=False)), **kwargs}
        self.own_masks[this_thread()] = self.own_masks[LAST] = is_own_mask(given.get("attention_mask"))
        if torch.compiler.is_compiling():
            return
        self.passes[this_thread()] = self.passes[LAST] = places_in(given)
        # A pass that failed may have left a call, with hidden states and so what autograd kept of all layers before.
        for mixer in self.mixers:
            mixer.calls.pop(this_thread(), None)

    def forget(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: behind the pass it means nothing, unless checkpointed layers run again."""
        if not torch.compiler.is_compiling() and not (model.training and torch.is_grad_enabled()):
            for thread in (this_thread(), LAST):
                self.passes.pop(thread, None)
                self.own_masks.pop(thread, None)

    def own_mask(self) -> bool:
        """Whether the mask that attention gets now may be the caller's own, as where no model called it."""
        return self.own_masks.get(this_thread(), self.own_masks.get(LAST, True))

    def arguments(self, x: Tensor) -> dict[str, Any]:
        """What the pass of x [B,T,hidden] was told; nothing where it is compiled."""
        if torch.compiler.is_compiling():
            return {}
        # A checkpointed layer may run again in a thread of autograd's.
        places = self.passes.get(this_thread(), self.passes.get(LAST, {}))
        positions = places.get("position_ids")
        if positions is not None and positions.shape[-1] != x.shape[1]:
            return {}
        # Layers may lie on several devices.
        return {name: place.to(x.device) for name, place in places.items()}


def places_in(given: dict[str, Any]) -> dict[str, Any]:
    """What arguments by name say of places."""
    return {name: given[name] for name in PLACE_NAMES if given.get(name) is not None}
