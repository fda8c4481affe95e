"""Continue rows of tokens by a model, from its cache: for measures, and for training on what it writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..verify.child.inputs import cache_of, with_cache


@torch.no_grad()
def continued(model: Any, ids: Tensor, count: int, temperature: float = 0.0) -> Tensor:
    """`count` more tokens of each row of ids [B,T], [B,count]: the likeliest ones, or sampled at a temperature above 0.

    Rows go on past an end of text, so that all have the same length. Dropout is the caller's business.
    """
    found: list[Tensor] = []
    cache, given = None, ids
    while len(found) < count:
        out = model(input_ids=given, use_cache=True, **with_cache(model, cache))
        cache, logits = cache_of(out), out.logits[:, -1].float()
        if temperature > 0:
            given = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            given = logits.argmax(-1, keepdim=True)
        found.append(given)
    return torch.cat(found, 1) if found else ids[:, :0]
