"""Perplexity and KL by position in long texts: what a student is worth past the length that it was trained at."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..data.documents import TextSource, pieces
from ..recipe.recipe import Recipe
from ..terminal.progress import Advance, progress, silent
from ..train.losses import IGNORED, cross_entropy, logit_kl, shared
from ..verify.child.inputs import cache_of, most_tokens, with_cache

# Read so many times the trained length; where the ratio to the teacher grows by more than GROWTH, say so.
REACH, GROWTH = 8, 1.1
# In config.json of a model that `finetune` wrote: tokens in a row of the longest stage.
TRAINED_LENGTH = "linearize_trained_length"
# Tokens of a row that are read at once, at most.
PART = 8192
# Of a text whose documents are long enough, no more than so many times what is needed is read to find them.
SEARCH = 64

# The logits [B,T,V] of T more tokens [B,T] and the cache after them, from the cache before them (None: empty).
Read = Callable[[Tensor, Any], tuple[Tensor, Any]]


def trained_length(recipe: Recipe) -> int:
    """Tokens in a row of the stage of a recipe with the longest rows."""
    return max(recipe.data_for(stage).pack.seq_len for stage in recipe.stages)


def longest_text(*models: Any) -> int | None:
    """The most tokens that all of these models take and were made for; None where none says."""
    stated = [getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) for model in models]
    known = [most for most in (*map(most_tokens, models), *stated) if most is not None and most > 0]
    return min(known, default=None)


def edges_of(trained: int, longest: int | None) -> list[int]:
    """0, the trained length and its doubles up to REACH times it, as far as models take texts of that length."""
    edges = [0, trained]
    while edges[-1] * 2 <= min(REACH * trained, edges[-1] * 2 if longest is None else longest):
        edges.append(edges[-1] * 2)
    return edges


def long_rows(source: TextSource, tokenizer: Any, length: int, count: int) -> tuple[list[list[int]], str]:
    """Up to `count` rows of `length` tokens, and where they come from: `documents` of that length, or `joined` ones.

    A row is a part of one document. Where a text has no document so long (a row of many datasets is a line), rows
    are cut from all documents, laid end to end.
    """
    whole: list[list[int]] = []
    joined: list[int] = []
    document: list[int] = []
    read = 0
    for piece in pieces(source, tokenizer, sft=False):
        document = [*([] if piece.first else document), *piece.ids]
        while len(document) >= length:
            whole.append(document[:length])
            document = document[length:]
        joined += piece.ids[: max(0, length * count - len(joined))]
        read += len(piece.ids)
        if len(whole) >= count or read >= SEARCH * length * count:
            break
    if whole:
        return whole[:count], "documents"
    return [joined[i : i + length] for i in range(0, len(joined) - length + 1, length)], "joined"


def reader(model: Any, inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> Read:
    """How a model reads on from a cache, `inside` a context of its own."""

    def read(ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        with inside():
            out = model(input_ids=ids, use_cache=True, **with_cache(model, cache))
        return out.logits, cache_of(out)

    return read


@torch.no_grad()
def by_position(
    student: Read, teacher: Read, rows: Tensor, edges: list[int], size: int, advance: Advance = silent
) -> list[dict[str, Any]]:
    """Perplexities and KL of the tokens between each two of `edges`, over rows [N,T] of `size` at a time.

    Texts are read in parts of at most the first edge's length and PART, each going on from the cache, so that few
    logits are held. `advance` gets the number of tokens done since its last call.
    """
    sums, counts = torch.zeros(len(edges) - 1, 3, dtype=torch.float64), [0] * (len(edges) - 1)
    step = next(edges[1] // n for n in range(-(-edges[1] // PART), edges[1] + 1) if edges[1] % n == 0)
    for part in rows.split(size):
        following = torch.nn.functional.pad(part[:, 1:], (0, 1), value=IGNORED)
        caches: list[Any] = [None, None]
        for start in range(0, edges[-1], step):
            block = next(i for i, edge in enumerate(edges[1:]) if start < edge)
            ids, wanted = part[:, start : start + step], following[:, start : start + step]
            ours, caches[0] = student(ids, caches[0])
            theirs, caches[1] = teacher(ids, caches[1])
            sums[block] += pair_sums(ours, theirs, wanted)
            counts[block] += int((wanted != IGNORED).sum())
            advance(ids.numel())
    rows_of = zip(edges, edges[1:], counts, sums, strict=False)
    return [{"from": start, "to": end, "tokens": count, **figures(row, count)} for start, end, count, row in rows_of]


def pair_sums(ours: Tensor, theirs: Tensor, wanted: Tensor) -> Tensor:
    """Over the targets of some tokens the sums of student's and teacher's losses, and of KL: float64 [3] on the CPU."""
    losses = [cross_entropy(logits, wanted, num_tokens=1.0) for logits in (ours, theirs)]
    kl = logit_kl(*shared(ours, theirs), wanted != IGNORED, num_tokens=1.0)
    return torch.stack([*losses, kl]).double().cpu()


def figures(sums: Tensor, count: int) -> dict[str, float]:
    """Both perplexities, at most 1e304, their ratio, and KL in nats a token, of `pair_sums` over `count` targets."""
    ours, theirs, kl = (sums / max(count, 1)).tolist()
    ppl = {"student_ppl": ours, "teacher_ppl": theirs, "ppl_ratio": ours - theirs}
    return {name: math.exp(min(loss, 700.0)) for name, loss in ppl.items()} | {"kl": kl}


def positions(
    student: Read,
    teacher: Read,
    source: TextSource,
    tokenizer: Any,
    device: torch.device,
    *,
    trained: int,
    longest: int | None,
    tokens: int,
    batch_tokens: int,
) -> dict[str, Any]:
    """`by_position` on `tokens` tokens of a text, as far past the `trained` length as models and text reach.

    `grows` is the largest ratio of perplexities past the trained length over the ratio within it, None where there is
    no text so long.
    """
    trained = trained if longest is None else min(trained, longest)
    edges, rows, origin = edges_of(trained, longest), list[list[int]](), ""
    while not rows and len(edges) > 1:
        rows, origin = long_rows(source, tokenizer, edges[-1], max(1, tokens // edges[-1]))
        edges = edges if rows else edges[:-1]
    if not rows:
        return {"trained_length": trained, "rows": 0, "text": origin, "blocks": [], "grows": None}
    given = torch.tensor(rows, device=device)
    with progress("perplexity by position", given.numel()) as advance:
        blocks = by_position(student, teacher, given, edges, max(1, batch_tokens // trained), advance)
    later = [block["ppl_ratio"] / blocks[0]["ppl_ratio"] for block in blocks[1:]]
    return {
        "trained_length": trained,
        "rows": len(rows),
        "text": origin,
        "blocks": blocks,
        "grows": max(later, default=None),
    }


def warning_of(found: dict[str, Any]) -> str | None:
    """What to say where a student is farther from its teacher past its trained length than within it. Where `recorded`
    is false, that length is a block of the text, and nobody knows of a training."""
    if found["grows"] is None or found["grows"] <= GROWTH:
        return None
    length, first = found["trained_length"], found["blocks"][0]["ppl_ratio"]
    worst = max(found["blocks"][1:], key=lambda block: block["ppl_ratio"])
    beyond = f"and {worst['ppl_ratio']:.3f} times at tokens {worst['from']} to {worst['to']}"
    if not found.get("recorded", True):
        return (
            f"warning: the student has {first:.3f} times the teacher's perplexity in the first {length} tokens, "
            f"{beyond}. No trained length is recorded: train it with a data.pack.seq_len of the length that you need"
        )
    return (
        f"warning: trained on rows of {length} tokens, the student has {first:.3f} times the teacher's perplexity "
        f"there, {beyond}. Use it no farther than it was trained, or train it with a larger data.pack.seq_len"
    )
