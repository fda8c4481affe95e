"""What a model writes by itself: recall without help, repetition, answers and where they end.

Likelihoods are read with the true text in front of each token. A student that is close by them may still be far behind
where it goes on from its own tokens (arXiv 2603.26556).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..data.chat import asked_of, end_tokens, prompt_ids, template_of
from ..data.documents import TextSource, documents_of, pieces
from ..probe.trace import quiet
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


# ---------------------------------------------------------------- answers to conversations


ANSWER = 256  # tokens of an answer at most


def questions(source: TextSource, tokenizer: Any, count: int, most: float = math.inf) -> list[list[int]]:
    """The conversations among the first `count` documents of a source, as tokens up to the assistant's first message;
    none without a chat template, and none that leaves a model of `most` tokens no room for an answer."""
    if template_of(tokenizer) is None:
        return []
    found = list[list[int]]()
    for where, messages in islice(documents_of(source), count):
        asked = [] if isinstance(messages, str) else asked_of(messages)
        found += [prompt_ids(tokenizer, asked, where)] if asked else []
    return [prompt for prompt in found if len(prompt) + ANSWER <= most]


@torch.no_grad()
def answers(model: Any, prompts: Sequence[list[int]], ends: Sequence[int]) -> list[list[int]]:
    """What a model answers greedily, up to and with the token that ends it."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[ends[0]] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    style: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "pad_token_id": ends[0]}
    with quiet():
        made = model.generate(ids, attention_mask=mask, max_new_tokens=ANSWER, eos_token_id=list(ends), **style)
    rows = made[:, longest:].tolist()
    return [row[: end + 1] if (end := first_end(row, ends)) is not None else row for row in rows]


def first_end(tokens: Sequence[int], ends: Sequence[int]) -> int | None:
    """Where the first of these tokens is that ends an answer."""
    return next((place for place, token in enumerate(tokens) if token in ends), None)


@torch.no_grad()
def end_in(model: Any, prompt: list[int], answer: list[int], ends: Sequence[int]) -> int | None:
    """Where a model would end an answer that stands there already."""
    ids = torch.tensor([prompt + answer], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return first_end(logits.argmax(-1).tolist(), ends)


def compare_answers(student: Any, teacher: Any, tokenizer: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """For each model the share of answers that `ended` within ANSWER tokens, and their mean `length`; `same_end`: the
    share of the teacher's answers that the student, reading them, would end just where the teacher does."""
    ends = end_tokens(teacher, tokenizer)
    found: dict[str, Any] = {"asked": len(prompts)}
    theirs = answers(teacher, prompts, ends)
    for who, rows in (("student", answers(student, prompts, ends)), ("teacher", theirs)):
        ended = [first_end(row, ends) is not None for row in rows]
        found[who] = {"ended": sum(ended) / len(rows), "length": sum(map(len, rows)) / len(rows)}
    same = [
        end_in(student, prompt, row, ends) == first_end(row, ends) for prompt, row in zip(prompts, theirs, strict=True)
    ]
    return found | {"same_end": sum(same) / len(same)}
