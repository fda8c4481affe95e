"""Presets of recipes in `linearize bench`: what they convert to, and the case of one layer with their options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite

from ..errors import LinearizeError
from ..plan.mechanisms import build_mixer, resolve_options
from ..recipe.data import holds_images
from ..recipe.models import Convert, Recipe
from ..recipe.presets import preset
from ..recipe.recipe import later_base, load_recipe
from .case import Case, Shape, random_qkv
from .timing import here

# What is measured first where nothing is named.
FIRST = "gsa-window"
# Attention of Llama 3.1 8B and of Llama 3.2 1B.
SHAPES = (Shape(4, 2048, 32, 8, 128), Shape(1, 16384, 32, 8, 128), Shape(8, 2048, 32, 8, 64))


def recipe_of(name: str) -> Recipe:
    """The preset `name`, without a model. Raises LinearizeError (exit 2) with the nearest name."""
    path = preset(name).path
    return load_recipe(path, later_base(path, ()))


def conversion(recipe: Recipe) -> Convert:
    """What a preset converts to."""
    assert recipe.convert is not None, recipe.name  # a preset begins with a conversion
    return recipe.convert


class Layer(Case):
    """The mixer of one layer with a preset's options, as `finetune` builds it: gates, mechanism, window and norm. Its
    inputs are q, k, v, the layer's hidden states [B,T,H*D], and the parameters."""

    shapes = SHAPES
    errors = ()

    def __init__(self, name: str) -> None:
        """Raises LinearizeError (exit 2) for an unknown preset, and for one of images, whose shapes are other ones."""
        recipe = recipe_of(name)
        if holds_images(recipe.data.train):
            message = f"--preset {name} converts models of images, and this measures layers of text"
            raise LinearizeError(f"{message}. Use linearize bench model --preset {name} --shape deit-s")
        convert = conversion(recipe)
        self.mechanism, self.options = convert.mechanism, resolve_options(convert.mechanism, convert.options)
        # A mixer chooses its kernels by itself.
        self.backends = ("triton",) if here() == "cuda" else ("torch",)
        self.about = " ".join([self.mechanism, *(f"{option}={value}" for option, value in convert.options.items())])

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """The parameters are those of the mixer that `op` calls, until the next inputs are made."""
        hidden, dtype = shape.H * shape.D, getattr(torch, shape.dtype)
        site = AttentionSite(
            0, "attention", "LlamaAttention", hidden, shape.H, shape.Hkv, shape.D, shape.D, shape.D**-0.5, causal=True
        )
        qkv = random_qkv(shape, device)
        with torch.device(device):
            self.mixer = build_mixer(self.mechanism, site, self.options).to(dtype)
            self.mixer.reset_parameters()
            x = torch.randn(shape.B, shape.T, hidden, dtype=dtype)
        return [*qkv, x, *self.mixer.parameters()]

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        return self.mixer(*inputs[:4], TokenLayout())[0]
