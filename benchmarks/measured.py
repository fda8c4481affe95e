"""What benchmarks.paper measures for a claim: an operator, a text model, an image model, or diffusion blocks.

Each kind of measurement is a NamedTuple, so that claims which need the same numbers share one measurement, and has the
methods `tiny` (the same at sizes that a CPU takes in a moment), `about` (one line), and `measure`: ms, device_ms (the
device's part of them), device_waits, tokens_s or images_s, peak_mib.
"""

from __future__ import annotations

import contextlib
import functools
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.blocks import BLOCKS, block_inputs, make_blocks
from linearize.bench import text, vision
from linearize.bench.case import OURS, Run, Shape, load_case
from linearize.bench.kernels import attempt, contenders
from linearize.bench.model import plan_for
from linearize.bench.timing import allocated, here, peak_mib, queued
from linearize.plan.mechanisms import parse_settings
from linearize.train.save import meta_model
from linearize.verify.child.inputs import make_inputs

# Tokens of text, sides of an image in pixels, and sides of a grid of tokens in a tiny measurement.
TINY_TOKENS, TINY_PIXELS, TINY_SIDE = 16, 64, 8
# What a tiny model has in place of its config.
TINY_TEXT = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
}  # fmt: skip
TINY_IMAGES: dict[str, dict[str, Any]] = {
    "deit": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2},
    "pvt": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]},
    "pvt_v2": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]},
    # With more tokens on a side, so that its windows fit.
    "swin": {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "patch_size": 1},
}


class Operator(NamedTuple):
    """A case of `linearize bench kernels` at a shape: of its contenders the first that runs and whose name starts with
    `whose`; forward alone, or with the backward pass. Its ms are the device's, however long Python takes."""

    case: str
    shape: Shape
    whose: str = OURS
    backward: bool = False

    def tiny(self) -> Operator:
        shape = self.shape
        small = shape._replace(B=1, H=2, Hkv=2, D=min(shape.D, 64), T=min(shape.T, TINY_TOKENS))
        return self._replace(shape=small)

    def about(self) -> str:
        passes = "forward + backward" if self.backward else "forward"
        return f"{self.case} {self.shape}, {self.whose}, {passes}"

    def measure(self) -> dict[str, Any]:
        before = allocated()
        case = load_case(self.case)
        inputs = [x.requires_grad_(self.backward) for x in case.inputs(self.shape, here())]
        found: dict[str, Any] = {"failed": f"no {'flash-linear-attention' if self.whose == 'fla' else self.whose} here"}
        for name, forward in contenders(case, inputs, self.shape).items():
            if name.startswith(self.whose):
                found = {"name": name, **attempt(partial(self._time, forward, inputs, before))}
                if "failed" not in found:
                    break
        return found

    def _time(self, forward: Run, inputs: list[Any], before: int) -> dict[str, Any]:
        def step() -> None:
            torch.autograd.grad(forward(), inputs, torch.ones_like(inputs[0]), allow_unused=True)

        run, within = (step, contextlib.nullcontext()) if self.backward else (forward, torch.no_grad())
        with within:
            run()
            took = queued(run)
            waits = max(0.0, 1 - took["ms"] / took["host"]) if "host" in took else None
            rate = 1e3 * self.shape.B * self.shape.T / took["ms"]
            device = {"device_ms": took["ms"] if "host" in took else None, "device_waits": waits}
            return {**took, **device, "tokens_s": rate, "peak_mib": peak_mib(run, before)}


class Text(NamedTuple):
    """A shape of `linearize bench model`: a training step on rows of `tokens` (16,384 in all on a GPU), or a decode
    step behind so many at batch 1. Options are written as for --set."""

    shape: str
    tokens: int
    mechanism: str
    options: str = ""
    softmax: bool = False
    decode: bool = False
    small: bool = False

    def tiny(self) -> Text:
        return self._replace(tokens=TINY_TOKENS, small=True)

    def about(self) -> str:
        whose = f"softmax beside {self.mechanism}" if self.softmax else " ".join([self.mechanism, self.options]).strip()
        what = f"decode after {self.tokens:,}" if self.decode else f"training on rows of {self.tokens:,}"
        return f"{self.shape}, {whose}, {what} tokens"

    def measure(self) -> dict[str, Any]:
        built = _text_model(self.shape, self.mechanism, self.options, self.small)
        with built.teacher() if self.softmax else contextlib.nullcontext():
            if self.decode:
                return text.decode(built, self.tokens, 1)
            return text.training(built, self.tokens, False)


class Images(NamedTuple):
    """A shape of images in `linearize bench model`: one pass without gradients over a batch. `beside` is empty for the
    mechanism, else how the name of its peer starts (`softmax, SDPA`, or `softmax` for what transformers runs)."""

    shape: str
    pixels: int
    batch: int
    mechanism: str
    options: str = ""
    beside: str = ""
    small: bool = False

    def tiny(self) -> Images:
        return self._replace(pixels=TINY_PIXELS, batch=1, small=True)

    def about(self) -> str:
        whose = self.beside or " ".join([self.mechanism, self.options]).strip()
        return f"{self.shape}, {whose}, {self.batch} images of {self.pixels} pixels"

    def measure(self) -> dict[str, Any]:
        built = _image_model(self.shape, self.pixels, self.mechanism, self.options, self.small)
        images = make_inputs(built, self.batch)[vision.IMAGES].to(here(), built.dtype)
        sides = vision.contenders(built, self.mechanism)
        name = next(name for name in sides if name.startswith(self.beside or self.mechanism))
        with sides[name]():
            return {"name": name, **vision.inference(built, images)}


class Diffusion(NamedTuple):
    """Blocks of a diffusion transformer: one pass without gradients. Without a mechanism they are SDPA's; with
    `softmax_every=3` every third block is."""

    shape: str
    mechanism: str = ""
    options: str = ""
    softmax_every: int = 0
    blocks: int = 0
    small: bool = False

    def tiny(self) -> Diffusion:
        return self._replace(small=True, blocks=self.blocks or 1)

    def about(self) -> str:
        whose = " ".join([self.mechanism, self.options]).strip() or "softmax, SDPA"
        kept = f", softmax in one of {self.softmax_every}" * bool(self.softmax_every)
        return f"blocks of {self.shape}, {whose}{kept}"

    def measure(self) -> dict[str, Any]:
        shape = BLOCKS[self.shape]
        shape = shape._replace(blocks=self.blocks or shape.blocks)
        if self.small:
            grid = tuple(min(TINY_SIDE, n) for n in shape.grid)
            shape = shape._replace(B=1, grid=grid, heads=2, dim=16, inner=32)
        blocks = make_blocks(shape, self.mechanism or None, _settings(self.options), self.softmax_every)
        return vision.inference(blocks, block_inputs(shape))


Measurement = Operator | Text | Images | Diffusion


def _settings(options: str) -> dict[str, Any]:
    return dict(parse_settings(options.split()))


@functools.lru_cache(maxsize=1)
def _text_model(shape: str, mechanism: str, options: str, small: bool) -> Any:
    """Built with random weights; kept for the next measurement, which often takes the same."""
    _image_model.cache_clear()
    changes: dict[str, Any] = dict(TINY_TEXT) if small else {}
    if small and "llama" in shape:
        changes |= {"num_key_value_heads": 2, "head_dim": 32}
    built = meta_model(None, plan_for(None, shape, mechanism, _settings(options), **changes), None, False, here())
    built.generation_config.eos_token_id = None  # no text ends early
    return built.eval()


@functools.lru_cache(maxsize=1)
def _image_model(shape: str, pixels: int, mechanism: str, options: str, small: bool) -> Any:
    _text_model.cache_clear()
    config = vision.SHAPES[shape]
    changes: dict[str, Any] = vision.sized(config, pixels) | (TINY_IMAGES[config["model_type"]] if small else {})
    return meta_model(None, plan_for(None, shape, mechanism, _settings(options), **changes), None, False, here()).eval()


def forget() -> None:
    """Give the memory of the last model back."""
    _text_model.cache_clear()
    _image_model.cache_clear()
