"""Which of a call's new tokens are real, and where packed documents begin, from what transformers passes to attention.

Letters: B batch, T new tokens. Masks are the caller's 2D padding mask or the 4D mask of a softmax backend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def token_layout(
    mask: Tensor | None, shape: tuple[int, int], seen: int | None, kwargs: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """Padding [B,T] bool (None: all real) and document numbers [B,T] int64 (None: one document a row).

    `seen` is how many tokens a cache holds already (None: no cache); `kwargs` are those of the attention function.
    Documents follow `cu_seq_lens_q` (B=1), else the restarts of `position_ids`. With a 2D mask or a cache those
    restarts mean nothing and transformers ignores them; a 4D mask may come from packing or from padding.
    """
    B, T = shape
    padding = None if mask is None else token_padding(mask, B, T, seen or 0)
    cu, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if cu is not None and B == 1:
        index = torch.arange(T, device=cu.device)
        return padding, torch.bucketize(index, cu[1:].to(index.dtype), right=True)[None]
    masked = mask is not None and mask.ndim == 2
    if positions is None or positions.ndim != 2 or masked or seen is not None or T == 1:
        return padding, None
    return padding, document_numbers(positions, padding).expand(B, T)


def document_numbers(positions: Tensor, padding: Tensor | None) -> Tensor:
    """A document starts where the position does not go on from the token before, both of them real: [B,T] int64.

    The positions of padding are filler (left padding counts 0, 0, 0, 1, ..), hence the second condition.
    """
    starts = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    if padding is not None:
        starts = starts & padding & torch.cat([padding[:, :1], padding[:, :-1]], 1)
    return starts.long().cumsum(-1)


def token_padding(mask: Tensor, B: int, T: int, seen: int) -> Tensor:
    """Which of the T new tokens are real, [B,T] bool: the end of a 2D mask, the diagonal of a 4D one.

    Raises NotImplementedError for masks that are no tensor.
    """
    if not isinstance(mask, Tensor):
        raise NotImplementedError(f"{type(mask).__name__} masks have no diagonal to read; use sdpa")
    if mask.ndim == 2:
        return mask[:, -T:].bool()
    # A static cache has more columns than tokens seen so far, a sliding one fewer.
    diagonal = mask[:, 0].diagonal(offset=min(mask.shape[-1] - T, seen), dim1=-2, dim2=-1)
    real = diagonal > torch.finfo(diagonal.dtype).min / 2 if diagonal.is_floating_point() else diagonal.bool()
    return real.expand(B, T)


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """What the architecture says for this call, else for this module."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)
