"""Pack text into blocks of tokens. It is tokenized once and read at random; the order is a function of the seed.

Legend: T = seq_len. Each piece of a document is a segment of its own: `position_ids` restart at 0 where it
starts, and its first token is no target. So nothing is predicted across a boundary, and no attention mask is
needed. Text is one stream, cut every T tokens; a conversation stays in one block, cut off after T tokens.

On disk a block is T little-endian uint32 words: the token id in the low 29 bits, and three flags. Ids,
positions, labels and padding together cost 4 bytes a token, and there is one file to write, map and rename.

For sentence encoders a row has one short text, as their users embed them: a document is cut at the ends of sentences
and at blank lines, and its texts have 1, 2, 4 and 8 sentences in turn (LENGTHS), so that a student sees short ones and
long ones. A text has the tokenizer's special tokens and is cut at seq_len.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checkpoint.shards import file_size, in_parallel, sha256
from ..errors import IncompatibleError, LinearizeError, ResourceError, absent, check_file
from ..recipe.data import unreadable
from ..terminal.output import counted
from ..terminal.progress import Advance, silent
from ..train.losses import IGNORED
from .documents import Piece, TextSource, end_token, pieces, plain_texts, rows_of

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


__all__ = ["BlockOrder", "Blocks", "MixedBlocks", "TextSource", "build_blocks", "data_fingerprint"]

Words = npt.NDArray[np.uint32]

_START, _TARGET, _PAD = (np.uint32(1 << bit) for bit in (31, 30, 29))
_TOKEN = np.uint32((1 << 29) - 1)
_HEADER = 4096  # bytes of JSON before the words: one page, so that the words stay aligned to pages
_FORMAT = 1  # part of the cache key: raise it whenever the same text would be packed differently
_OPEN_BINS = 64  # a conversation goes to the first of this many unfinished blocks that holds it


class Blocks:
    """The packed blocks of one cache file, memory-mapped. Item i is a dict of tensors [T]:

    `input_ids`, `position_ids`, `labels` (int64; not shifted, -100 where nothing is learned) and `valid`
    (bool; False on padding, the only positions that a loss without labels must leave out).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        damaged = ResourceError(f"{path} is damaged. Delete it, the text makes it again")
        with path.open("rb") as file:
            try:
                header = json.loads(file.read(_HEADER))
            except ValueError as error:
                raise damaged from error
        self.seq_len: int = header["seq_len"]
        self.n_tokens: int = header["n_tokens"]  # without padding
        self.n_targets: int = header["n_targets"]  # labels other than -100
        self.skipped: int = header["skipped"]  # conversations with no target among their first T tokens
        self.sha256: str = header["sha256"]
        shape = (header["n_blocks"], self.seq_len)
        if path.stat().st_size != _HEADER + 4 * shape[0] * shape[1]:
            raise damaged
        self._words: Words = np.memmap(path, dtype="<u4", mode="r", offset=_HEADER, shape=shape)

    def __reduce__(self) -> tuple[type[Blocks], tuple[Path]]:
        return Blocks, (self.path,)  # another process maps the file instead of receiving its bytes

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = np.asarray(self._words[index])
        ids, time = (words & _TOKEN).astype(np.int64), np.arange(self.seq_len)
        piece_start = np.maximum.accumulate(np.where(words & _START, time, 0))
        arrays = {
            "input_ids": ids,
            "position_ids": time - piece_start,
            "labels": np.where(words & _TARGET, ids, IGNORED),
            "valid": (words & _PAD) == 0,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


# Of a mix, which holds the order of an epoch in memory: 16 bytes a block, and several times that while it is made.
LONGEST_EPOCH = 10**8


class MixedBlocks:
    """Blocks of several sources in the shares of their weights, as one.

    An epoch is so long that each source comes once at least: those with little text for their share come more often.
    The order is fixed and even, so that the first blocks are a mix, too. Raises LinearizeError (exit 2) where an epoch
    would have more than LONGEST_EPOCH blocks.
    """

    def __init__(self, parts: Sequence[Blocks], shares: Sequence[float]) -> None:
        self.parts, self.seq_len = list(parts), parts[0].seq_len
        needed = [len(blocks) / share for blocks, share in zip(parts, shares, strict=True)]
        total = max(needed)
        if total > LONGEST_EPOCH:
            least = needed.index(total)
            raise LinearizeError(
                f"data.train.mix[{least}]: its share of {shares[least]:.1e} is too small for its {len(parts[least]):,} "
                f"blocks: an epoch in which all of them come once has {total:.1e} blocks, and {LONGEST_EPOCH:,} is the "
                "most. Give it a larger weight or less text, or leave it out"
            )
        counts = [max(round(share * total), len(blocks)) for blocks, share in zip(parts, shares, strict=True)]
        places = [(np.arange(count) + 0.5) / count for count in counts]
        which = np.concatenate([np.full(count, number, np.int64) for number, count in enumerate(counts)])
        within = np.concatenate([np.arange(count) % len(blocks) for count, blocks in zip(counts, parts, strict=True)])
        order = np.argsort(np.concatenate(places), kind="stable")
        self._which, self._within = which[order], within[order]

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.parts[self._which[index]][int(self._within[index])]

    def order_sha256(self) -> str:
        """A hash of which block of which source each item is."""
        return hashlib.sha256(self._which.tobytes() + self._within.tobytes()).hexdigest()


def data_fingerprint(blocks: Blocks | MixedBlocks) -> str:
    """A hash of what is trained on: tokens, boundaries, targets, padding, and how sources are mixed; not of where it
    came from."""
    if isinstance(blocks, MixedBlocks):
        parts = [data_fingerprint(part) for part in blocks.parts]
        return hashlib.sha256(json.dumps([*parts, blocks.order_sha256()]).encode()).hexdigest()[:16]
    return hashlib.sha256(f"{_FORMAT}/{blocks.seq_len}/{blocks.sha256}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class BlockOrder:
    """An endless stream over blocks, reshuffled every epoch.

    Sample k is a function of (n_blocks, seed, k) alone: a run resumes anywhere, and processes need not talk. Each block
    of an epoch comes `repeats` times in a row, and the epoch ends after n_blocks samples as before.
    """

    n_blocks: int
    seed: int
    repeats: int = 1

    def block(self, k: int) -> int:
        """The block that is the k-th sample of the stream."""
        epoch, position = divmod(k, self.n_blocks)
        return int(_permutation(self.n_blocks, self.seed, epoch)[position // self.repeats])

    @staticmethod
    def samples(step: int, micro: int, rank: int, world: int, per_device: int, accumulate: int) -> range:
        """The places in the stream of the `per_device` samples of micro batch `micro` (< accumulate) of a rank: what is
        random about a sample depends on its place.

        Step s owns the samples [s * G, (s + 1) * G), G = per_device * accumulate * world: while G stays the
        same, a step sees the same blocks however they are divided.
        """
        micro_batch = (step * accumulate + micro) * world + rank
        return range(micro_batch * per_device, (micro_batch + 1) * per_device)


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(n, generator=hashed_generator(seed, epoch))


def hashed_generator(seed: int, number: int) -> torch.Generator:
    """Random numbers of a seed and an epoch, or a block: with their sum, 1 of one seed would be 0 of the next."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def build_blocks(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    cache_dir: Path,
    *,
    sft: bool,
    max_tokens: int | None,
    texts: bool = False,
) -> Blocks:
    """The blocks of `source`: from the cache file that the same input left behind, in this run or in one beside it, or
    tokenised into it now.

    `sft` learns what the assistant writes (and all of plain text); otherwise every token is a target.
    `max_tokens` ends the reading at that many tokens, rounded up to blocks; a streaming dataset needs it.
    With `texts` a block is one text of `text_pieces` and padding, and `sft` plays no part.
    With several processes let one call this first: the others then find its file. Raises LinearizeError for
    input that cannot be used.
    """
    if seq_len < 2:
        raise LinearizeError(f"seq_len={seq_len}: must be >= 2, the first token of a block predicts nothing")
    if source.streaming and max_tokens is None:
        raise LinearizeError(f"{source} is streamed, its end is unknown: give the stage `tokens` or `steps`")
    documents = text_pieces(source, tokenizer, seq_len) if texts else pieces(source, tokenizer, sft=sft)
    facts = [_FORMAT, identity(source), fingerprint(tokenizer, chat=True), seq_len, sft, max_tokens]
    key = json.dumps([*facts, *(["texts"] if texts else [])])
    path = cache_dir / f"blocks-{hashlib.sha256(key.encode()).hexdigest()[:24]}.bin"
    hashed = source.path is None or Path(source.path).is_dir()  # else its address alone, of what may change
    if path.exists() or (hashed and _linked(path)):
        return Blocks(path)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            writer = _Writer(file, seq_len, end_token(tokenizer), max_tokens, alone=texts)
            for piece in documents:
                writer.add(piece)
                if writer.full:
                    break
            writer.finish()
        if writer.n_blocks == 0:
            without = counted(writer.skipped, "conversation has", "conversations have")
            why = f": {without} no target in the first {seq_len} tokens" if writer.skipped else ""
            why = f": no sentence has {SHORTEST} characters, which data.pack.rows=texts reads" if texts else why
            raise LinearizeError(f"nothing to train or measure on in {source}{why}")
        os.replace(partial, path)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return Blocks(path)


def _linked(path: Path) -> bool:
    """Whether a run beside the one whose `cache` the file belongs to had the same text: both have the file then, which
    nobody writes into."""
    runs = path.parent.parent.parent if path.parent.name == "cache" else None
    for other in sorted(runs.glob(f"*/cache/{path.name}")) if runs else ():
        with suppress(OSError, LinearizeError):  # a disk without hard links, a damaged file
            Blocks(other)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(other, path)
            return True
    return False


class _Bin:
    """Words that wait for a block to be full."""

    def __init__(self, room: int) -> None:
        self.room, self.pieces = room, list[Words]()

    def add(self, words: Words) -> None:
        self.room -= len(words)
        self.pieces.append(words)


class _Writer:
    """Packs pieces into blocks and writes them behind a header, which also serves as the statistics."""

    def __init__(self, file: BinaryIO, seq_len: int, eos: int, max_tokens: int | None, alone: bool = False) -> None:
        self.file, self.seq_len, self.eos, self.alone = file, seq_len, eos, alone
        self.limit = None if max_tokens is None else -(-max_tokens // seq_len)
        self.stream = _Bin(seq_len)  # the end of the text so far
        self.bins: list[_Bin] = []  # unfinished blocks of conversations
        self.n_blocks = self.n_tokens = self.n_targets = self.skipped = 0
        self.sha256 = hashlib.sha256()
        file.write(b" " * _HEADER)

    @property
    def full(self) -> bool:
        return self.limit is not None and self.n_blocks >= self.limit

    def add(self, piece: Piece) -> None:
        words = np.array(piece.ids, np.uint32)
        words[slice(None) if piece.learned is None else np.array(piece.learned, bool)] |= _TARGET
        if piece.first:
            words[:1] = _as_start(words[:1])
        if piece.whole:
            self._place(words[: self.seq_len])
        else:
            self._append(words)

    def _append(self, words: Words) -> None:
        self.stream.add(words)
        if self.stream.room <= 0:
            joined = np.concatenate(self.stream.pieces)
            cut = len(joined) - len(joined) % self.seq_len
            self._write(joined[:cut])
            self.stream = _Bin(self.seq_len)
            self.stream.add(joined[cut:])

    def _place(self, words: Words) -> None:
        """First fit, or each piece `alone`. A block is written once it is full; the fullest, when too many are open."""
        if not (words & _TARGET).any():
            self.skipped += 1
            return
        chosen = None if self.alone else next((block for block in self.bins if len(words) <= block.room), None)
        if chosen is None:
            self.bins.append(chosen := _Bin(self.seq_len))
        chosen.add(words)
        if self.alone or len(self.bins) > _OPEN_BINS or chosen.room == 0:
            fullest = min(range(len(self.bins)), key=lambda i: self.bins[i].room)
            self._write(self._padded(self.bins.pop(fullest)))

    def finish(self) -> None:
        for unfinished in [*self.bins, self.stream]:
            if unfinished.room < self.seq_len:
                self._write(self._padded(unfinished))
        names = ("seq_len", "n_blocks", "n_tokens", "n_targets", "skipped")
        header = {name: getattr(self, name) for name in names} | {"sha256": self.sha256.hexdigest()}
        self.file.seek(0)
        self.file.write(json.dumps(header).encode())
        self.file.flush()
        os.fsync(self.file.fileno())

    def _padded(self, block: _Bin) -> Words:
        """One block, filled up with a segment of eos that is neither a target nor valid."""
        padding = np.full(block.room, self.eos | int(_PAD), np.uint32)
        padding[:1] = _as_start(padding[:1])
        return np.concatenate([*block.pieces, padding])

    def _write(self, words: Words) -> None:
        blocks = words.reshape(-1, self.seq_len)
        if self.limit is not None:
            blocks = blocks[: self.limit - self.n_blocks]
        blocks = blocks.astype("<u4")
        blocks[:, 0] = _as_start(blocks[:, 0])  # a document that was cut goes on as a new piece
        self.n_blocks += len(blocks)
        self.n_tokens += int(((blocks & _PAD) == 0).sum())
        self.n_targets += int(((blocks & _TARGET) != 0).sum())
        self.sha256.update(content := blocks.tobytes())
        self.file.write(content)


def _as_start(words: Words) -> Words:
    return (words | _START) & ~_TARGET


# ---------------------------------------------------------------- masked text

# For bidirectional models some tokens of a block are hidden: of 15 % of them 80 % become the mask, 10 % another token
# and 10 % stay (BERT, arXiv 1810.04805, section 3.1). Which ones is a function of the seed and the block, the same in
# every epoch and process. A model without a head predicts no tokens, so none are hidden from it.


CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1


class MaskedBlocks:
    """Item i, each [T]: `input_ids` with masks, `attention_mask`, `labels` (the hidden tokens, else -100), `valid`.
    Without `hide` no token is hidden."""

    def __init__(self, blocks: Blocks | MixedBlocks, tokenizer: Any, seed: int, hide: bool = True) -> None:
        self.hide = hide
        if hide and tokenizer.mask_token_id is None:
            raise IncompatibleError("the tokenizer has no mask token. Name one in the model's tokenizer_config.json")
        self.blocks, self.seed, self.seq_len = blocks, seed, blocks.seq_len
        self.mask, self.vocabulary = tokenizer.mask_token_id, tokenizer.vocab_size
        self.special = torch.tensor(tokenizer.all_special_ids)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self.blocks[index]
        ids, valid = block["input_ids"], block["valid"]
        if not self.hide:
            labels = torch.full_like(ids, IGNORED)
            return {"input_ids": ids, "attention_mask": valid.long(), "labels": labels, "valid": valid}
        generator = hashed_generator(self.seed, index)
        chance, kind = (torch.rand(len(ids), generator=generator) for _ in range(2))
        others = torch.randint(self.vocabulary, (len(ids),), generator=generator)
        chosen = (chance < CHOSEN) & valid & ~torch.isin(ids, self.special)
        hidden = torch.where(kind < MASKED, self.mask, torch.where(kind < MASKED + REPLACED, others, ids))
        return {
            "input_ids": torch.where(chosen, hidden, ids),
            "attention_mask": valid.long(),
            "labels": torch.where(chosen, ids, IGNORED),
            "valid": valid,
        }


# ---------------------------------------------------------------- the name of the cache


PROBE = "a B1, 2\n\u00e9  <s>"  # how a tokenizer cuts this stands in for what its vocabulary does not say


def identity(source: TextSource) -> list[Any]:
    """What the text depends on, for a cache key: content where it is at hand, else the dataset's address."""
    address: list[Any] = [source.path, source.name, source.split, source.streaming, source.text_key]
    address += [list(source.data_files)] if source.data_files else []
    if source.demo:
        texts = "\0".join(row.fields[source.text_key] for row in rows_of(source))
        return [*address, source.demo, hashlib.sha256(texts.encode()).hexdigest()]
    files = list(source.files)
    for file in files:
        if reason := unreadable(file.name):
            raise LinearizeError(f"{file}: {reason}")
    if source.path and (folder := Path(source.path)).is_dir():
        files = sorted(file for file in folder.rglob("*") if file.is_file())
    elif source.path and folder.is_file():
        raise LinearizeError(f"{folder} is a file: give it as files: [{folder}], not as path")
    hashes = in_parallel(digest, files, "hashing text", lambda file: file_size(file) if file.is_file() else 0)
    return [*address, [[file.name, value] for file, value in zip(files, hashes, strict=True)]]


def fingerprint(tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> str:
    """A hash of all that decides which ids a document gets; with `chat` a conversation, too."""
    if tokenizer.is_fast:
        rules: Any = json.loads(tokenizer.backend_tokenizer.to_str())
        rules |= {"truncation": None, "padding": None}  # left behind by whoever called it last
    else:
        rules = sorted(tokenizer.get_vocab().items())
    facts = [type(tokenizer).__name__, tokenizer.eos_token_id, tokenizer(PROBE)["input_ids"], rules]
    return hashlib.sha256(json.dumps([*facts, tokenizer.chat_template if chat else None]).encode()).hexdigest()


def digest(file: Path, advance: Advance = silent) -> str:
    """The hash of a file's bytes. Raises LinearizeError: 2 where there is no file, 4 where it cannot be read."""
    check_file(file)
    try:
        return sha256(file, advance)
    except FileNotFoundError as error:
        raise absent(file) from error
    except OSError as error:
        raise ResourceError(f"cannot read {file}: {error}") from error
