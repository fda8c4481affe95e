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
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from linearize_kernels.hf.static_layers import OTHER_SCORES
from linearize_kernels.layers.softmax_step import obstacle, softmax_step

PLAIN = "sdpa"


@contextlib.contextmanager
def step_attention(model: Any) -> Iterator[None]:
    """Let the kernel take single tokens of a model on a GPU whose softmax is PyTorch's; leave other models alone.

    The function changes, and its name stays: some architectures do something else beside another name.
    """
    before = ALL_ATTENTION_FUNCTIONS[PLAIN]
    usual = model.config._attn_implementation == PLAIN and before is sdpa_attention_forward
    if not usual or obstacle(*2 * [torch.empty(1, 1, 1, 16, device=model.device)]):
        yield
        return
    ALL_ATTENTION_FUNCTIONS[PLAIN] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[PLAIN] = before


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, **kwargs:
    Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The attention function: q [B,H,T,D], keys and values [B,E,N,D] of all places, a mask [B,1,T,N] of bool. The
    kernel shows each row its newest token, which an indexer of a sparse architecture may hide."""
    masked = isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1
    other = hasattr(module, "indexer") or any(kwargs.get(name) is not None for name in OTHER_SCORES)
    if query.shape[2] > 1 or not masked or scaling is None or other or obstacle(query, value):
        found: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return found
    seen = attention_mask[:, 0, 0].expand(len(query), -1)
    places = torch.arange(seen.shape[1], device=seen.device)
    newest = torch.where(seen.any(0), places, 0).amax(0, keepdim=True)
    return softmax_step(query, key, value, seen, newest, scaling), None
