"""torch.compile of a model's layers, one by one: layers that are alike share one compilation, which takes seconds where
the whole model would take minutes. Mixers' kernels stay what they are; what lies between them is fused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..data.kinds import kind_of
from ..recipe.recipe import SFT, AttentionTransfer, LogitKL, Recipe, Stage
from .drop_path import layers_of

# Layers with softmax and with each mechanism, those before the first that trains, student and teacher: torch's 8 are
# soon used up, and what is over runs uncompiled without a word.
COMPILATIONS = 64
# Seconds that a compiled layer saves for each token and each number of its width on an H100 or H200: 1.8e-10 to 2.7e-10
# in models of 24M, 135M and 8B parameters (docs/cost.md); and those that compiling takes.
SAVED, COSTS = 2e-10, 60.0


def compiles(recipe: Recipe, stage: Stage, model: Any, device: torch.device, sharded: bool, tokens: int) -> bool:
    """Whether a stage of so many tokens a process compiles its layers. `runtime.compile: auto` does so on GPUs that
    hold whole weights, where batches have one shape and the run is long enough to win back what compiling takes."""
    asked = recipe.runtime.compile
    if asked != "auto":
        return asked and not isinstance(stage, AttentionTransfer)
    if not isinstance(stage, LogitKL | SFT) or (isinstance(stage, SFT) and stage.drop_path):
        return False
    varied = recipe.runtime.offload_activations or getattr(model, "hf_quantizer", None) is not None
    if device.type != "cuda" or sharded or varied or kind_of(model) != "text":
        return False
    config = model.config.get_text_config()
    return tokens * config.num_hidden_layers * config.hidden_size * SAVED > COSTS


class CompiledLayers:
    """A model whose layers can be switched between torch.compile and plain Python."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[tuple[Any, Any]] = []
        for layer in layers_of(model) or [model]:  # a model may have none that transformers would checkpoint
            layer.compile(dynamic=False)
            self.layers.append((layer, layer._compiled_call_impl))
        self._switch(False)

    def _switch(self, on: bool) -> None:
        for layer, compiled in self.layers:
            layer._compiled_call_impl = compiled if on else None

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Within: layers are compiled. Each shape of their inputs is compiled anew, so what runs in here has one."""
        # A mixer notes its call and forgets it afterwards, which needs no second time where activations are computed
        # again.
        known = {"recompile_limit": COMPILATIONS, "skip_fwd_side_effects_in_bwd_under_checkpoint": True}
        self._switch(True)
        try:
            with torch._dynamo.config.patch(known):
                yield
        finally:
            self._switch(False)
