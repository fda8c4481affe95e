"""`linearize eval` of models without a head: how near the vectors are that a student makes of texts, and of images.

An encoder is used by its similarities, so these are compared, and what a search finds by them: the first sentence of a
passage asks for the rest of it, among the rests of all passages; an image asks for the nearest other one.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize_kernels.hf.attention_hooks import evaluating, mixers_of

from ..checkpoint.carried import modules_of
from ..data.batches import check_source, collate, forward, open_processor, run
from ..data.documents import plain_texts
from ..data.images import Images, Labelled, find_images
from ..data.kinds import kind_of
from ..data.packing import sentences
from ..errors import Exit, LinearizeError
from ..recipe.recipe import Recipe
from ..terminal.output import counted
from ..terminal.progress import progress
from ..train.losses import Pooling, pooled
from ..train.runtime import to_source
from .generate import Opened, device_memory, watch_tokens

WORDS = 100  # of a passage, at least
PASSAGES = 1000  # or images, at most
IMAGES = 32  # in one pass
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


def known_pooling(folder: Path) -> Pooling | None:
    """The same; None where the folder is none of a sentence encoder, and for another way."""
    with contextlib.suppress(LinearizeError):
        return pooling_of(folder) if modules_of(folder) else None
    return None


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
    read up to eval.max_tokens tokens, or on its images; what `--json` prints.

    Raises LinearizeError: 2 for data that is not there or holds too few passages or images, 3 for models that do not
    belong together.
    """
    ours, theirs = student.model, teacher.model
    kinds = {kind_of(ours), kind_of(theirs)}
    if len(kinds) > 1 or "text" in kinds:
        raise LinearizeError(
            f"{type(ours).__name__} and {type(theirs).__name__} make no vectors of the same inputs. Give the model "
            "that the student was converted from",
            Exit.INCOMPATIBLE,
        )
    source: Any = recipe.data.eval
    check_source(source, ours, recipe.folder, "data.eval")
    if kinds == {"images"}:
        return compare_images(student, teacher, find_images(source, recipe.folder), recipe.eval.max_tokens)
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
    result: dict[str, Any] = {"kind": "embeddings", "data": str(text), "passages": len(rows), "pooling": pooling}
    result["longest"] = length
    for what, mine, other in zip(("sentences", "passages"), vectors["student"], vectors["teacher"], strict=True):
        result |= likeness(mine, other, what)
    order = {
        who: (found[0] @ found[1].T).argsort(dim=1, descending=True, stable=True) for who, found in vectors.items()
    }
    own = torch.arange(len(rows))[:, None]
    for who, found in order.items():
        result |= {f"{who}_found_{n}": float((found[:, :n] == own).any(1).float().mean()) for n in FOUND}
    result["same_answer"] = float((order["student"][:, 0] == order["teacher"][:, 0]).float().mean())
    return result


def compare_images(student: Opened, teacher: Opened, found: Labelled, most: int) -> dict[str, Any]:
    """Similarities of the vectors that two encoders make of images, PASSAGES and `most` of them at most, evenly over
    all; and to which other image, and class, each is nearest. The vector is the class token where there is one, else
    the mean."""
    images = Images(found, open_processor(student.folder, "images"), None, learns=False)
    count = min(len(images), most, PASSAGES)
    if count < 3:
        raise LinearizeError(f"{found.where} has {counted(len(images), 'image')}; give at least three")
    chosen = [number * len(images) // count for number in range(count)]
    first = any(mixer.site.prefix for mixer in mixers_of(student.model).values())
    pooling: Pooling = "first" if first and not hasattr(student.model, "out_features") else "mean"  # a map has none
    vectors: dict[str, Tensor] = {}
    with progress("eval", 2 * count) as advance, torch.no_grad():
        for who, model in (("student", student.model), ("teacher", teacher.model)):
            parts: list[Tensor] = []
            with evaluating(model):
                for start in range(0, count, IMAGES):
                    batch = collate([images[number] for number in chosen[start : start + IMAGES]], model.device)
                    parts.append(pooled(forward(model, batch), None, pooling).cpu())
                    advance(len(parts[-1]))
            vectors[who] = F.normalize(torch.cat(parts), dim=-1)
    nearest = {who: (own @ own.T).fill_diagonal_(-2.0).argmax(1).tolist() for who, own in vectors.items()}
    result: dict[str, Any] = {"kind": "embeddings", "data": found.where, "images": count, "pooling": pooling}
    result |= likeness(vectors["student"], vectors["teacher"], "images")
    result["same_answer"] = _share(a == b for a, b in zip(*nearest.values(), strict=True))
    classes = [found.labels[number] for number in chosen]
    if None not in classes and len({*classes}) > 1:
        for who, others in nearest.items():
            result[f"{who}_nearest_class"] = _share(own == classes[n] for own, n in zip(classes, others, strict=True))
    return result


def likeness(ours: Tensor, theirs: Tensor, what: str) -> dict[str, Any]:
    """How alike two encoders' vectors [N,D] of length 1 are: how they order all pairs, and each with its own other."""
    pairs = torch.triu_indices(len(ours), len(ours), 1)
    rank = spearman(*((own @ own.T)[pairs[0], pairs[1]] for own in (ours, theirs)))
    cosine = float((ours * theirs).sum(1).mean())
    return {"pairs": pairs.shape[1], f"spearman_{what}": rank, f"cosine_{what}": cosine}


def _share(hits: Iterable[bool]) -> float:
    """How many of them are true."""
    return statistics.fmean(map(float, hits))


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
