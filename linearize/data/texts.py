"""Rows of one short text each, for sentence encoders: single sentences and passages, as their users embed them.

A document is cut at the ends of sentences and at blank lines. Its texts have 1, 2, 4 and 8 sentences in turn (LENGTHS),
so that a student sees short texts and long ones. A text has the tokenizer's special tokens and is cut at seq_len.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import cycle, islice
from typing import TYPE_CHECKING

from .documents import Piece, TextSource, plain_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTHS = (1, 2, 4, 8)
SHORTEST = 12  # characters of a sentence: what is shorter is a number, a bracket, a word of a list
END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
AT_ONCE = 1024  # texts in one call of the tokenizer


def sentences(document: str) -> list[str]:
    """The sentences of a document, in order."""
    return [part.strip() for part in END.split(document) if len(part.strip()) >= SHORTEST]


def texts(document: str) -> Iterator[str]:
    """A document's texts, each sentence in one of them."""
    found, start = sentences(document), 0
    for length in cycle(LENGTHS):
        if start >= len(found):
            return
        yield " ".join(found[start : start + length])
        start += length


def text_pieces(source: TextSource, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> Iterator[Piece]:
    """Each text of `source` as a piece that fills a row alone."""
    every = (text for document in plain_texts(source) for text in texts(document))
    while some := list(islice(every, AT_ONCE)):
        for ids in tokenizer(some, truncation=True, max_length=seq_len)["input_ids"]:
            yield Piece(ids, None, first=True, whole=True)
