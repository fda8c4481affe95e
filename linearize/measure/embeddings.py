"""`linearize eval` of models without a head: how near the vectors are that a student makes of texts, and of images.

A sentence encoder is used by its similarities, so these are compared, and what a search finds by them: the first
sentence of a passage asks for the rest of it, among the rests of all passages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize_kernels.hf.attention_hooks import evaluating

from ..checkpoint.carried import modules_of
from ..data.batches import check_source, kind_of, open_processor, run
from ..data.documents import plain_texts
from ..data.texts import sentences
from ..errors import Exit, LinearizeError
from ..recipe.recipe import Recipe
from ..terminal.progress import progress
from ..train.losses import Pooling, pooled
from ..train.runtime import to_source
from .generate import Opened, device_memory, watch_tokens

WORDS = 100  # of a passage, at least
PASSAGES = 1000
# What sentence-transformers calls its poolings, in files of several versions.
POOLINGS: dict[str, Pooling] = {"mean_tokens": "mean", "mean": "mean", "cls_token": "first", "cls": "first"}
FOUND = (1, 10)  # places in which a search's answer counts


def pooling_of(folder: Path) -> Pooling:
    """How the sentence encoder in `folder` makes one vector of its last hidden states; `mean` where it does not say.

    Raises LinearizeError (exit 3) for another way than the mean or the first token.
    """
    for module in modules_of(folder):
        path = folder / module["path"] / "config.json"
        if module["type"].endswith("Pooling") and path.is_file():
            settings = json.loads(path.read_text("utf-8"))
            switched = [key.removeprefix("pooling_mode_") for key, on in settings.items() if on is True]
            kind = str(settings.get("pooling_mode", "+".join(one for one in switched if one != "include_prompt")))
            if kind not in POOLINGS:
                message = f"{path} pools by {kind or 'nothing'}; linearize knows {', '.join(POOLINGS)}"
                raise LinearizeError(message, Exit.INCOMPATIBLE)
            return POOLINGS[kind]
    return "mean"


def passages(documents: Iterator[str]) -> Iterator[tuple[str, str]]:
    """First sentences, and what follows: stretches of at least WORDS words of one document each."""
    for document in documents:
        own, words = list[str](), 0
        for sentence in sentences(document):
            own.append(sentence)
            words += len(sentence.split())
            if words >= WORDS and len(own) > 1:
                yield own[0], " ".join(own[1:])
                own, words = [], 0


@device_memory()
def compare_embeddings(
    student: Opened, teacher: Opened, recipe: Recipe, batch_tokens: int, longest: int | None = None
) -> dict[str, Any]:
    """Similarities and searches of two encoders on the passages of a recipe's data.eval, PASSAGES at most, which are
    read up to eval.max_tokens tokens; what `--json` prints.

    Raises LinearizeError: 2 for data that is not there or holds too few passages, 3 for models that do not embed text.
    """
    ours, theirs = student.model, teacher.model
    if {kind_of(ours), kind_of(theirs)} != {"masked"}:
        raise LinearizeError(
            f"{type(ours).__name__} and {type(theirs).__name__} have no head, and eval compares vectors of text alone. "
            "Give models with heads, and the one that the student was converted from",
            Exit.INCOMPATIBLE,
        )
    source = recipe.data.eval
    check_source(source, ours, recipe.folder, "data.eval")
    text = to_source(source, recipe.data.pack.text_key, recipe.folder)
    tokenizer, pooling = open_processor(student.folder, "masked"), pooling_of(teacher.folder)
    for model in (ours, theirs):
        watch_tokens(model, tokenizer)
    length = longest or recipe.data.pack.seq_len
    rows, read = list[tuple[str, str]](), 0
    for first, rest in passages(plain_texts(text)):
        rows.append((first, rest))
        read += len(first.split()) + len(rest.split())
        if len(rows) == PASSAGES or read >= recipe.eval.max_tokens:
            break
    if len(rows) < 3:
        raise LinearizeError(f"{text} has {len(rows)} passages of {WORDS} words; give a text with more of them")
    asks, answers = [first for first, _ in rows], [rest for _, rest in rows]
    vectors: dict[str, Any] = {}
    with progress("eval", 4 * len(rows)) as advance:
        for who, model in (("student", ours), ("teacher", theirs)):
            vectors[who] = []
            for some in (asks, answers):
                vectors[who].append(embed(model, tokenizer, some, pooling, length, batch_tokens))
                advance(len(some))
    similar = {who: [own @ own.T for own in found] for who, found in vectors.items()}
    pairs = torch.triu_indices(len(rows), len(rows), 1)
    rank = [
        spearman(mine[pairs[0], pairs[1]], other[pairs[0], pairs[1]])
        for mine, other in zip(similar["student"], similar["teacher"], strict=True)
    ]
    cosine = [float((mine * other).sum(1).mean()) for mine, other in zip(*vectors.values(), strict=True)]
    result: dict[str, Any] = {"kind": "embeddings", "data": str(text), "passages": len(rows), "pooling": pooling}
    result |= {"longest": length, "pairs": pairs.shape[1], "spearman_sentences": rank[0], "spearman_passages": rank[1]}
    result |= {"cosine_sentences": cosine[0], "cosine_passages": cosine[1]}
    order = {
        who: (found[0] @ found[1].T).argsort(dim=1, descending=True, stable=True) for who, found in vectors.items()
    }
    own = torch.arange(len(rows))[:, None]
    for who, found in order.items():
        result |= {f"{who}_found_{n}": float((found[:, :n] == own).any(1).float().mean()) for n in FOUND}
    result["same_answer"] = float((order["student"][:, 0] == order["teacher"][:, 0]).float().mean())
    return result


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: list[str], pooling: Pooling, length: int, batch_tokens: int) -> Tensor:
    """Vectors of length 1 of texts, of which the first `length` tokens are read: [N,hidden] float32 on the CPU."""
    ids = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found: list[Tensor] = [torch.empty(0)] * len(ids)
    with evaluating(model):
        for some in within(order, ids, batch_tokens):
            wide = len(ids[some[-1]])
            rows = torch.zeros(len(some), wide, dtype=torch.long)
            real = torch.zeros(len(some), wide, dtype=torch.bool)
            for row, number in enumerate(some):
                rows[row, : len(ids[number])] = torch.tensor(ids[number])
                real[row, : len(ids[number])] = True
            batch = {"input_ids": rows.to(model.device), "attention_mask": real.long().to(model.device)}
            hidden = run(model, batch).last_hidden_state
            for number, vector in zip(some, pooled(hidden, real.to(hidden.device), pooling).cpu(), strict=True):
                found[number] = vector
    return F.normalize(torch.stack(found), dim=-1)


def within(order: list[int], ids: list[list[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Batches of numbers in `order`, shortest first, of at most `batch_tokens` tokens with padding, or of one text."""
    some = list[int]()
    for number in order:
        if some and (len(some) + 1) * len(ids[number]) > batch_tokens:
            yield some
            some = []
        some.append(number)
    yield some


def spearman(ours: Tensor, theirs: Tensor) -> float:
    """Spearman's rank correlation of two rows of numbers: the correlation of their places; ties are rare here, and get
    places by their order."""
    places = torch.stack([numbers.argsort(stable=True).argsort().double() for numbers in (ours, theirs)])
    return float(torch.corrcoef(places)[0, 1])
