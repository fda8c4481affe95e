"""Recall tasks: texts that ask a language model to repeat something from its context.

recall   a list of pairs of random words, then some of the pairs again, in another order; second words are asked for
needle   one such pair among ordinary text, asked for at the end

A value counts as recalled when every one of its tokens is the likeliest after those before it, which is what greedy
decoding would write. Entries are put together from tokens, so that a word is cut the same way wherever it stands.
Of fourteen ways to write a pair this is the one that a small model of Python recalls best.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batches import keeps_logits
from ..errors import LinearizeError
from ..terminal.progress import Advance, silent

QUERIES = 8  # of a row of recall
DEPTHS = 5  # into which needles are sorted by where they lie
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"
_MADE_UP = (len(_CONSONANTS) * len(_VOWELS)) ** 2

Entry = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True)
class Row:
    """One text: its tokens, the places of the values asked for, how many entries it holds; of a needle its depth, 0
    to 1."""

    ids: list[int]
    asked: list[range]
    entries: int
    depth: float | None = None


class Writer:
    """Words, entries and rows in the tokens of one tokenizer, all from one seed."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer, self.random = tokenizer, random.Random(seed)
        self.known: dict[str, list[int]] = {}
        self.start = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
        found = (re.fullmatch("[\u0120\u2581]([a-z]{3,10})", token) for token in tokenizer.get_vocab())
        self.words = sorted(word[1] for word in found if word)

    def tokens(self, text: str) -> list[int]:
        """Token ids of a stretch of text."""
        if text not in self.known:
            self.known[text] = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self.known[text]

    def names(self, count: int) -> list[str]:
        """Different words: those that are one token with the space before them, then made up ones (`bodi`)."""
        names = self.random.sample(self.words, min(count, len(self.words)))
        made_up = self.random.sample(range(_MADE_UP), count - len(names))
        return names + [_syllables(number) for number in made_up]

    def entry(self, key: str, value: str) -> Entry:
        """`    ( key, value),` and its line end: what comes before the value, the value, the rest."""
        before = [token for part in ("    (", f" {key}", ",") for token in self.tokens(part)]
        return before, self.tokens(f" {value}"), self.tokens("),\n")

    def ask(self, ids: list[int], entry: Entry) -> range:
        """Append an entry; the places of its value."""
        before, value, after = entry
        ids += before
        place = range(len(ids), len(ids) + len(value))
        ids += [*value, *after]
        return place

    def recall(self, length: int) -> Row:
        """As many entries as fit into `length` tokens with the questions after them; keys differ, values may not."""
        ids, turn = self.start + self.tokens("first = [\n"), self.tokens("]\nagain = [\n")
        keys = self.names(min(_MADE_UP, max(length // 6, QUERIES)))
        entries = [self.entry(key, self.random.choice(keys)) for key in keys]
        sizes = [sum(map(len, entry)) for entry in entries]
        around, largest = len(ids) + len(turn), max(sizes)
        room = length - around - QUERIES * largest
        kept = entries[: sum(total <= room for total in itertools.accumulate(sizes))]
        if len(kept) < QUERIES:
            message = f"--lengths {length}: too short for {QUERIES} pairs and {QUERIES} questions: from about "
            raise LinearizeError(f"{message}{around + 2 * QUERIES * largest} tokens")
        ids += [token for entry in kept for part in entry for token in part] + turn
        return Row(ids, [self.ask(ids, entry) for entry in self.random.sample(kept, QUERIES)], len(kept))

    def needle(self, length: int, text: Sequence[int], depth: float) -> Row:
        """An entry at `depth` (0 to 1) of ordinary text, asked for at the end; `length` tokens in all."""
        key, value = self.names(2)
        entry = self.entry(key, value)
        needle = [*self.tokens("\n"), *(token for part in entry for token in part)]
        room = length - len(self.start) - 2 * len(needle)
        if room < 1:
            least = length - room + 1
            raise LinearizeError(f"--lengths {length}: too short for text and an entry: from {least} tokens")
        if len(text) < room:
            raise LinearizeError(f"--lengths {length}: the text has {len(text)} tokens; raise eval.max_tokens")
        first = self.random.randrange(len(text) - room + 1)
        filler, cut = list(text[first : first + room]), round(depth * room)
        ids = self.start + filler[:cut] + needle + filler[cut:] + self.tokens("\n")
        return Row(ids, [self.ask(ids, entry)], 1, depth)


def _syllables(number: int) -> str:
    """A word of two syllables for each number below _MADE_UP."""
    letters = ""
    for sounds in (_VOWELS, _CONSONANTS) * 2:
        number, sound = divmod(number, len(sounds))
        letters = sounds[sound] + letters
    return letters


def rows_of(task: str, writer: Writer, length: int, trials: int, text: Sequence[int]) -> list[Row]:
    """`trials` rows of `recall` or `needle`; needles lie at depths spread evenly."""
    if task == "recall":
        return [writer.recall(length) for _ in range(trials)]
    return [writer.needle(length, text, (trial + 0.5) / trials) for trial in range(trials)]


def logits_at(model: Any, ids: Tensor, row: Tensor, place: Tensor) -> Tensor:
    """The logits [N,V] at N places of rows of tokens [B,T]; of no other places where the model can leave them out."""
    if not keeps_logits(getattr(type(model), "forward", model)):
        return model(input_ids=ids, use_cache=False).logits[row, place]
    kept, index = place.unique(return_inverse=True)
    return model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[row, index]


@torch.no_grad()
def score(model: Any, rows: Sequence[Row], size: int, advance: Advance = silent) -> dict[str, Any]:
    """Share of values recalled, and the mean loss of a value in nats, over all that is asked in `rows`.

    Of needles also `depths`: the share found in each of DEPTHS parts of the text, None where none lies.
    `size` rows go through the model at a time, shorter ones filled up at the right, where no causal model looks;
    `advance` gets the number of tokens done since its last call.
    """
    right, loss, count = 0.0, 0.0, 0
    by_depth: list[list[float]] = [[] for _ in range(DEPTHS)]
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        longest = max(len(row.ids) for row in part)
        ids = torch.tensor([row.ids + row.ids[:1] * (longest - len(row.ids)) for row in part], device=model.device)
        places = [(number, place) for number, row in enumerate(part) for place in row.asked]
        # One token each: its row, its place, and the number of the value that it belongs to.
        tokens = [(number, t, value) for value, (number, place) in enumerate(places) for t in place]
        row, place, value = torch.tensor(tokens, device=model.device).T
        found, wanted = logits_at(model, ids, row, place - 1).float(), ids[row, place]
        missed = torch.zeros(len(places), device=model.device)
        missed.index_add_(0, value, (found.argmax(-1) != wanted).float())
        for number, (row_number, _) in enumerate(places):
            depth = part[row_number].depth
            if depth is not None:
                by_depth[min(DEPTHS - 1, int(depth * DEPTHS))].append(float(missed[number] == 0))
        sums = torch.stack([(missed == 0).sum(), F.cross_entropy(found, wanted, reduction="sum")]).tolist()
        advance(ids.numel())
        right, loss, count = right + sums[0], loss + sums[1], count + len(places)
    scores: dict[str, Any] = {"accuracy": right / count, "loss": loss / count}
    if any(by_depth):
        scores["depths"] = [sum(found) / len(found) if found else None for found in by_depth]
    return scores
