"""Image models in `linearize bench model`: training and inference at several image sizes.

Inference is one pass without gradients; training is forward and backward of the mean of what comes out, without an
optimizer. Softmax is the same model under `teacher()`, as transformers computes it: through SDPA, or by the
architecture's own code. In the latter case SDPA is beside it as well, in the place of that code. On demand inference is
also that of torch.compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize_kernels.hf.attention_hooks import mixers_of
from linearize_kernels.layout import reduce_keys, this_thread

from ..checkpoint.code import SourceClasses
from ..checkpoint.source import Source
from ..plan.plan import Plan
from ..terminal.progress import progress
from ..train.save import meta_model
from ..verify.child.inputs import make_inputs
from .kernels import attempt
from .text import Tell
from .timing import allocated, faster, here, measured

DEIT: dict[str, Any] = {
    "model_type": "deit", "architectures": ["DeiTForImageClassification"], "dtype": "bfloat16", "num_hidden_layers": 12,
    "patch_size": 16,
}  # fmt: skip
PVT: dict[str, Any] = {"model_type": "pvt", "architectures": ["PvtForImageClassification"], "dtype": "bfloat16"}
PVT2: dict[str, Any] = {"model_type": "pvt_v2", "architectures": ["PvtV2ForImageClassification"], "dtype": "bfloat16"}
SWIN: dict[str, Any] = {"model_type": "swin", "architectures": ["SwinForImageClassification"], "dtype": "bfloat16"}
# What config.json says of the classifiers in the papers of SAGA and MHLA that transformers has: DeiT (2012.12877 on
# arXiv), Pyramid Vision Transformer (2102.12122) and its second version (2106.13797), Swin (2103.14030).
SHAPES: dict[str, dict[str, Any]] = {
    "deit-t": {**DEIT, "hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3},
    "deit-s": {**DEIT, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6},
    "pvt-t": PVT,
    "pvt-s": {**PVT, "depths": [3, 4, 6, 3]},
    "pvtv2-b0": {**PVT2, "hidden_sizes": [32, 64, 160, 256]},
    "pvtv2-b1": {**PVT2, "hidden_sizes": [64, 128, 320, 512]},
    "swin-t": SWIN,
    "swin-s": {**SWIN, "depths": [2, 2, 18, 2]},
    "swin-b": {**SWIN, "depths": [2, 2, 18, 2], "embed_dim": 128, "num_heads": [4, 8, 16, 32]},
}
# What the linear layers of a shape lack (--allow-drop), by type; a benchmark saves nothing.
DROPPED = {"swin": ("score_bias",)}
# The main input of models of images.
IMAGES = "pixel_values"
SIZES = (224, 384, 512, 1024, 1280)
OWN, SDPA = "softmax, the architecture's own", "softmax, SDPA"
# Images of a batch: a power of two with at most so many pixels in all, and at most so many images.
PIXELS, MOST = 16 * 1280**2, 256


def bench_images(
    planned: tuple[Plan, Source, SourceClasses],
    again: Callable[..., tuple[Plan, Source, SourceClasses]],
    mechanism: str,
    *,
    compiled: bool = False,
    sizes: Sequence[int] = SIZES,
    batches: Sequence[int] = (),
    tell: Tell = lambda *_: None,
) -> tuple[Any, dict[str, list[dict[str, Any]]]]:
    """The model of the last size, and its tables `inference` and `training` by size and batch.

    `again(**changes)` plans the conversion `planned` for a changed config, for many architectures take one size of
    image alone. Without `batches` they follow from the size. With `compiled` inference is measured compiled as well.
    `tell` gets a table's name and each row when it is measured; rows of the model called `mechanism` come before those
    of its peers.
    """
    works = [("inference", "", inference), ("inference", ", compiled", compiled_inference), ("training", "", training)]
    works = works if compiled else works[::2]
    tables: dict[str, list[dict[str, Any]]] = {"inference": [], "training": []}
    built: Any = None
    with progress("bench model", len(sizes) * (1 + max(1, len(batches)) * len(works))) as advance:
        for size in sizes:
            built = None  # before there are two
            built = meta_model(None, again(**sized(planned[1].config, size)), None, False, here()).eval()
            advance(1)
            for batch in batches or [batch_for(size)]:
                images = make_inputs(built, batch)[IMAGES].to(here(), built.dtype)
                for table, how, work in works:
                    ours: dict[str, Any] = {}
                    for name, within in contenders(built, mechanism).items():
                        with within():
                            found = attempt(partial(work, built, images))
                        record = {"name": name + how, "size": images.shape[-1], "batch": batch, **found}
                        ours = ours or record
                        tables[table].append(record | faster(ours, record))
                        tell(table, tables[table][-1])
                    advance(1)
    return built, tables


def sized(config: dict[str, Any], size: int) -> dict[str, Any]:
    """What a config must say for images of that size."""
    now = config.get("image_size", size)
    return {"image_size": [size] * len(now) if isinstance(now, list) else size}


def batch_for(size: int) -> int:
    """How many images of that size are computed together."""
    fits = min(MOST, max(1, PIXELS // size**2)) if here() == "cuda" else 1
    return 1 << fits.bit_length() - 1


def contenders(built: Any, mechanism: str) -> dict[str, Callable[[], Any]]:
    """Name -> context in which the model is that, ours first."""
    ours: dict[str, Callable[[], Any]] = {mechanism: contextlib.nullcontext}
    if built.capture is None:
        return {**ours, SDPA: built.teacher}
    fits = not any(mixer.site.extras for mixer in mixers_of(built).values())
    return {**ours, OWN: built.teacher, **({SDPA: partial(fused, built)} if fits else {})}


@contextlib.contextmanager
def fused(model: Any) -> Iterator[None]:
    """Within: the softmax model, with SDPA where the architecture's code computes softmax(q k) v."""
    mixers = mixers_of(model)
    kept = {path: (mixer.attention_function, mixer.reductions) for path, mixer in mixers.items()}
    for path, mixer in mixers.items():
        reduce_keys(model.get_submodule(path), mixer.reductions, True)
        mixer.attention_function, mixer.reductions = sdpa, {}
    try:
        yield
    finally:
        for path, mixer in mixers.items():
            mixer.attention_function, mixer.reductions = kept[path]


def sdpa(mixer: Any, prefix: str, softmax: Any, module: Any, *inputs: Any, **places: Any) -> tuple[Tensor, None]:
    """What kernels/hf/capture.py calls in place of a mixer: `inputs` q, k [B,H,T,D], v [B,H,T,Dv] -> [B,T,H,Dv]."""
    q, k, v, _ = inputs
    mixer.calls[this_thread()].used = True
    return F.scaled_dot_product_attention(q, k, v, scale=mixer.site.scale).transpose(1, 2), None


# ---------------------------------------------------------------- measurements


@torch.no_grad()
def inference(model: Any, images: Tensor) -> dict[str, Any]:
    """Images per second of one pass, and the peak of memory beside the weights."""
    return measured(lambda: model(images), allocated() - images.nbytes, "images_s", len(images))


def compiled_inference(model: Any, images: Tensor) -> dict[str, Any]:
    """The same of the compiled model."""
    torch.compiler.reset()  # earlier ones count: past a limit torch runs what it has not compiled
    return inference(torch.compile(model), images)


def training(model: Any, images: Tensor) -> dict[str, Any]:
    """Images per second of forward and backward, and the peak of memory with weights and gradients."""

    def step() -> None:
        model(images)[0].float().mean().backward()
        model.zero_grad(set_to_none=True)

    model.train()
    try:
        return measured(step, 0, "images_s", len(images))
    finally:
        model.zero_grad(set_to_none=True)
        model.eval()
