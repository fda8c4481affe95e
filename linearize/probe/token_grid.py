"""Find where the tokens of an attention module lie: in a line, in windows, or on a grid of patches.

A convolution makes patches; what is put before and after them is counted as it happens. No architecture is known by
name.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

LINE: dict[str, Any] = {"grid": "line", "grid_from": "", "prefix": 0, "suffix": 0, "flat": False}
# Functions that choose or reorder tokens.
MOVING = {"gather", "index_select", "take_along_dim"}


@dataclasses.dataclass
class Patches:
    """What became of the patches that the convolution at `path` made last."""

    path: str
    size: tuple[int, ...]
    prefix: int = 0
    suffix: int = 0
    moved: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.size)


class PatchTracer(TorchFunctionMode):
    """Follows patches, within, from their convolution to the attention modules. `inputs` are those of the model."""

    def __init__(self, model: nn.Module, inputs: dict[str, Tensor]) -> None:
        super().__init__()
        sound = inputs.get("input_values")  # spectrograms [B,frames,bins] are images, waves [B,samples] are not
        self.images = sound if sound is not None and sound.ndim == 3 else inputs.get("pixel_values")
        self.inputs, self.decoder = inputs, is_decoder(model)
        self.patches: Patches | None = None
        self.hooks: list[Any] = []
        if self.images is not None:
            convolutions = ((p, m) for p, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Conv3d))
            for path, module in convolutions:
                self.hooks.append(module.register_forward_hook(lambda m, a, out, path=path: self.made(path, out)))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def made(self, path: str, output: Tensor) -> None:
        """A convolution ran."""
        self.patches = Patches(path, tuple(output.shape[2:]))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if self.patches and name in MOVING and isinstance(result, Tensor) and result.ndim > 2:
            self.patches.moved = True
        if self.patches and function in (torch.cat, torch.concat) and result.ndim == 3:
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            self.joined(self.patches, [part.shape[1] for part in args[0]] if dim in (1, -2) else [])
        return result

    def joined(self, patches: Patches, lengths: list[int]) -> None:
        """Tokens were put beside the patches, or beside the patches and what is around them already."""
        whole = patches.prefix + patches.count + patches.suffix
        for length, prefix, suffix in ((whole, patches.prefix, patches.suffix), (patches.count, 0, 0)):
            if lengths.count(length) == 1:
                at = lengths.index(length)
                patches.prefix, patches.suffix = prefix + sum(lengths[:at]), suffix + sum(lengths[at + 1 :])
                return

    def place(self, shape: tuple[int, ...], module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        """The fields of an AttentionSite for a module called with `given` on x of `shape` [B,T,..], and `flat`: whether
        its tokens lie on a grid of rows and columns alone."""
        if self.images is None:
            return LINE
        B, T = shape[:2]
        patches, rows = self.patches, len(self.images)
        height, width = given.get("height"), given.get("width")
        if isinstance(height, int) and isinstance(width, int) and height * width <= T:
            return {**LINE, "grid": "arguments", "prefix": T - height * width, "flat": True}
        if patches and not patches.moved and rows == B and patches.prefix + patches.count + patches.suffix == T:
            around = {"prefix": patches.prefix, "suffix": patches.suffix}
            return {"grid": "patches", "grid_from": patches.path, **around, "flat": len(patches.size) == 2}
        text = self.inputs.get("input_ids")
        if text is not None and tuple(text.shape) == (B, T):
            return LINE
        # What hides parts of a shifted window from each other is an argument, None where nothing is shifted.
        windows = any(hasattr(one, "window_size") for one in (module, getattr(module, "config", None)))
        if windows and "attention_mask" in given and B % rows == 0 and math.isqrt(T) ** 2 == T:
            return {**LINE, "grid": "window"}
        return {**LINE, "grid": "unknown", "grid_from": self.reason(T)}

    def decodes(self, queries: int) -> bool:
        """Whether so many queries are a decoder's own tokens, which `make_inputs` gives fewer of than its encoder."""
        own = self.inputs.get("decoder_input_ids")
        return self.decoder if own is None else queries == own.shape[1]

    def reason(self, T: int) -> str:
        """Why nobody knows where tokens lie."""
        if "spatial_shapes" in self.inputs:
            return "each image of a batch has a grid of its own (NaFlex)"
        if self.patches is None:
            return "no convolution makes its patches"
        if self.patches.moved:
            return "its tokens are shuffled or left out (masked), so they lie on no grid"
        size = "x".join(map(str, self.patches.size))
        return f"its {T} tokens are not the {size} patches of {self.patches.path} with tokens before and after"


def is_decoder(model: Any) -> bool:
    """Whether a model without an encoder writes text; BLIP's are told in the call, whatever their config says."""
    asked = inspect.signature(model.forward).parameters.get("is_decoder")
    return bool(getattr(model.config, "is_decoder", False) if asked is None else asked.default)


def looks_back(stated: bool | None, model: Any, where: dict[str, Any]) -> bool:
    """Whether attention sees no later token: as `stated`, else so on the line of a model that writes text,
    and only there, but not among what a decoder reads; `where` is from `place`.
    """
    if stated is None:
        writes = model.can_generate() or type(model.config) in AutoModelForCausalLM._model_mapping
        return writes and where["grid"] == "line" and not model.config.is_encoder_decoder
    return stated
