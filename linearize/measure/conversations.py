"""Whether a student answers as an instruct model does, and stops where its teacher stops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from ..data.chat import asked_of, end_tokens, prompt_ids, template_of
from ..data.documents import TextSource, documents_of
from ..probe.trace import quiet

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
