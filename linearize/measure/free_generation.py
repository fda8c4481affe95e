"""What a model writes by itself: recall without help, repetition.

Likelihoods are read with the true text in front of each token. A student that is close by them may still be far behind
where it goes on from its own tokens (arXiv 2603.26556).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.documents import TextSource, pieces
from ..terminal.progress import Advance, silent
from ..verify.child.inputs import cache_of, with_cache
from .recall import Row

# Tokens of a document's beginning that a model goes on from, and tokens that it writes.
PROMPT, WRITTEN = 64, 64
GRAM = 4


def beginnings(source: TextSource, tokenizer: Any, count: int) -> list[list[int]]:
    """The first PROMPT tokens of the first `count` documents that have so many."""
    found: list[list[int]] = []
    for piece in pieces(source, tokenizer, sft=False):
        if len(found) == count:
            break
        if piece.first and len(piece.ids) >= PROMPT:
            found.append(piece.ids[:PROMPT])
    return found


def steps_of(prompts: Sequence[list[int]], rows: Sequence[Row]) -> int:
    """Tokens in a row that `free_generation` writes: all prompts go on at once."""
    return WRITTEN * bool(prompts) + sum(len(place) for row in rows for place in row.asked)


def free_generation(
    model: Any, prompts: Sequence[list[int]], rows: Sequence[Row], advance: Advance = silent
) -> dict[str, float | None]:
    """Shares, each None where nothing asked for it. `advance` gets the number of `steps_of` done since its last call.

    `recall`    values of `rows` that are written as they stand in the list, each behind the model's own earlier answers
    `repeated`  runs of GRAM tokens that the model wrote before, of all that it wrote after `prompts`
    """
    ids = torch.tensor(prompts, device=model.device)
    own = continued(model, ids, WRITTEN).tolist() if prompts else []
    advance(steps_of(prompts, ()))
    answers: list[bool] = []
    for row in rows:
        answers += answered(model, row)
        advance(steps_of((), [row]))
    return {"recall": mean(answers), "repeated": mean([repetition(text) for text in own])}


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def answered(model: Any, row: Row) -> list[bool]:
    """Which values of a row the model writes right, in order, where its own answers stay in the text."""
    ids, found = list(row.ids), []
    for place in row.asked:
        before = torch.tensor([ids[: place.start]], device=model.device)
        ids[place.start : place.stop] = continued(model, before, len(place))[0].tolist()
        found.append(ids[place.start : place.stop] == row.ids[place.start : place.stop])
    return found


def repetition(tokens: Sequence[int]) -> float:
    """The share of runs of GRAM tokens that stand in `tokens` before, 0 where there is none."""
    runs = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


@torch.no_grad()
def continued(model: Any, ids: Tensor, count: int) -> Tensor:
    """The `count` likeliest next tokens of each row of ids [B,T], [B,count], which go on past an end of text."""
    found: list[Tensor] = []
    cache, given = None, ids
    while len(found) < count:
        out = model(input_ids=given, use_cache=True, **with_cache(model, cache))
        cache, given = cache_of(out), out.logits[:, -1].argmax(-1, keepdim=True)
        found.append(given)
    return torch.cat(found, 1) if found else ids[:, :0]
