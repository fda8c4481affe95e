"""Softmax of one token of each row over a static cache, for a model that writes many texts at a time.

In a compiled step transformers copies the keys and values of all rows for every query head, and attends to all places
of the cache, filled or not. The kernel of kept heads reads what is filled, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from linearize_kernels.layers.softmax_heads import FOLLOWED
from linearize_kernels.layers.softmax_step import obstacle, softmax_step

NAME, PLAIN = "softmax_step", "sdpa"


@contextlib.contextmanager
def step_attention(model: Any) -> Iterator[None]:
    """Let the kernel take single tokens of a model on a GPU whose softmax is PyTorch's; leave other models alone."""
    if model.config._attn_implementation != PLAIN or obstacle(*2 * [torch.empty(1, 1, 1, 16, device=model.device)]):
        yield
        return
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[PLAIN])
    # Not by `set_attn_implementation`: of a converted model that answers as its teacher it turns linear layers on.
    found: list[Any] = [part.config for part in model.modules() if hasattr(part, "config")]
    configs = {id(config): config for config in found if getattr(config, "_attn_implementation", None) == PLAIN}
    for config in configs.values():
        config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        for config in configs.values():
            config._attn_implementation_internal = PLAIN


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, **kwargs:
    Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The registered attention function: q [B,H,T,D], keys and values [B,E,N,D] of all places, a mask [B,1,T,N] of
    bool."""
    masked = isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1
    other = [name for name in FOLLOWED if kwargs.get(name) is not None]
    if query.shape[2] > 1 or not masked or scaling is None or other or obstacle(query, value):
        softmax = ALL_ATTENTION_FUNCTIONS[PLAIN]
        given = {"scaling": scaling, **kwargs}
        found: tuple[Tensor, Tensor | None] = softmax(module, query, key, value, attention_mask, **given)
        return found
    seen = attention_mask[:, 0, 0].expand(len(query), -1)
    places = torch.arange(seen.shape[1], device=seen.device)
    newest = torch.where(seen.any(0), places, 0).amax(0, keepdim=True)
    return softmax_step(query, key, value, seen, newest, scaling), None
