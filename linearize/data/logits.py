"""A teacher's predictions on disk: the likeliest tokens of each place, in safetensors shards, read as part of samples.

A folder has `logits.json`, written last, and one or more sets of rows. A set belongs to one text, packed in one way;
its `facts` say which. Row r of a training set is the r-th sample of the first epoch, in the order of the seed: a run
reads it from the front, and later epochs and other processes find the same rows. Row r of an evaluation set is block r.

A shard holds for n rows of T tokens: `values` float32 [n,T,k], log-probabilities of the likeliest tokens at the
stage's temperature; `indices` int32 [n,T,k]; `rest` float32 [n,T], that of all other tokens together; `target` float32
[n,T], the log-probability of the next token of the text at temperature 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import MALFORMED, LinearizeError, ResourceError, writing
from .packing import BlockOrder, Blocks, MixedBlocks, data_fingerprint

RECORD = "logits.json"
FORMAT = 1  # of the folder; counts what an earlier version cannot read
SHARD_BYTES = 256 * 2**20
OF_SET = ("rows", "per_shard", "shards", "blocks", "fingerprint")  # beside `facts`
# In a shard's metadata: what its rows were made from, and a CRC-32 of each row.
KEY, SUMS = "linearize_key", "linearize_crc32"
# Names of the tensors as samples have them.
VALUES, INDICES, REST, TARGET = "teacher_values", "teacher_indices", "teacher_rest", "teacher_target"
STORED = {"values": VALUES, "indices": INDICES, "rest": REST, "target": TARGET}

Facts = dict[str, Any]


def token_bytes(k: int) -> int:
    """What one token takes on disk, in bytes."""
    return 8 * k + 8


def key_of(*facts: Any) -> str:
    """A name for what rows were made from."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def rows_per_shard(seq_len: int, k: int) -> int:
    return max(1, SHARD_BYTES // (seq_len * token_bytes(k)))


def shard_name(facts: Facts, number: int) -> str:
    return f"{facts['split']}-{key_of(facts)[:12]}-{number:05d}.safetensors"


class StoredLogits:
    """A folder of `linearize logits`, opened by its record; rows are read when they are asked for.

    Raises LinearizeError (exit 2) for a folder that is none, is not complete, or was written by a newer version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            text = (folder / RECORD).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            unfinished = any(folder.glob("*-00000.safetensors")) if folder.is_dir() else False
            what = "is not complete: run linearize logits again" if unfinished else "is not of linearize logits"
            raise LinearizeError(
                f"teacher.logits: {folder} {what} ({RECORD}: {getattr(error, 'strerror', None) or error})"
            ) from error
        try:
            record = json.loads(text)
            if record["format"] > FORMAT:
                version = record["linearize"]
                raise LinearizeError(f"teacher.logits: {folder} was written by linearize {version}. Use that, or newer")
            self.teacher: dict[str, Any] = dict(record["teacher"])
            self.k, self.vocabulary = int(record["k"]), int(record["vocabulary"])
            self.sets: list[dict[str, Any]] = list(record["sets"])
            for one in self.sets:  # raises where something is missing
                _ = one["facts"]["split"], [one[name] for name in OF_SET]
        except MALFORMED as error:
            raise LinearizeError(f"{folder / RECORD} is damaged ({error}). Write the folder again") from error

    def find(self, facts: Facts, stage: str) -> dict[str, Any]:
        """The set with these facts, which are of data that a `stage` of a recipe reads.

        Raises LinearizeError (exit 2) naming what differs from the set that is nearest.
        """
        where = f"the {facts['split']} data of {stage}"
        alike = [one for one in self.sets if one["facts"]["split"] == facts["split"]]
        if not alike:
            raise LinearizeError(f"{self.folder} has no logits of {where}. {AGAIN}")
        differing = [[name for name in facts if one["facts"].get(name) != facts[name]] for one in alike]
        fewest, found = min(zip(map(len, differing), range(len(alike)), strict=True))
        if fewest:
            names = differing[found]
            old = alike[found]["facts"]
            shown = [f"another {n}" if n in HASHED else f"{n} was {old.get(n)}, is {facts[n]}" for n in names]
            raise LinearizeError(f"{self.folder} does not fit {where}: {', '.join(shown)}. {AGAIN}")
        return alike[found]

    def check_rows(self, found: Mapping[str, Any], read: int, stage: str) -> None:
        """Raise LinearizeError (exit 2) where a stage reads more blocks of a set than were written, or a shard that is
        missing, damaged or of other rows."""
        if read > found["rows"]:
            split = found["facts"]["split"]
            raise LinearizeError(
                f"{self.folder} has logits of {found['rows']} {split} blocks, and {stage} reads {read}. {AGAIN}"
            )
        key = key_of(self.teacher, self.k, self.vocabulary, found["facts"], found["fingerprint"])
        per_shard = found["per_shard"]
        for start, name in zip(range(0, read, per_shard), found["shards"], strict=False):
            path, rows = self.folder / name, min(per_shard, found["rows"] - start)
            try:
                there = is_written(path, key, rows)
            except LinearizeError:
                there = False
            if not there:
                raise LinearizeError(f"{path} is missing, damaged, or has other rows. Remove it. {AGAIN}")

    def samples(self, blocks: Blocks | MixedBlocks, facts: Facts, stage: str) -> WithLogits:
        """Packed text with the rows of these facts. Raises LinearizeError (exit 2) where it is other text, or packed
        otherwise."""
        found = self.find(facts, stage)
        if (found["blocks"], found["fingerprint"]) != (len(blocks), data_fingerprint(blocks)):
            raise LinearizeError(f"{self.folder} was made from the text of {stage} packed otherwise. {AGAIN}")
        order = BlockOrder(len(blocks), facts["seed"]) if facts["split"] == "train" else None
        return WithLogits(blocks, self.folder, found, order)


AGAIN = "Write it again with linearize logits, from this recipe"
HASHED = ("data", "tokenizer")


class WithLogits:
    """Packed text whose samples also have what a teacher predicted, under the names of STORED."""

    def __init__(
        self, blocks: Blocks | MixedBlocks, folder: Path, found: Mapping[str, Any], order: BlockOrder | None
    ) -> None:
        self.blocks, self.seq_len, self.folder = blocks, blocks.seq_len, folder
        self.names, self.per_shard, self.rows = found["shards"], found["per_shard"], found["rows"]
        self.row_of = None
        if order is not None:
            self.row_of = {order.block(row): row for row in range(self.rows)}
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, row = divmod(index if self.row_of is None else self.row_of[index], self.per_shard)
        path = self.folder / self.names[number]
        try:
            if number not in self._open:
                shard: Any = safe_open(path, "pt")
                # Shards of earlier versions have no sums.
                self._open[number] = shard, json.loads((shard.metadata() or {}).get(SUMS, "null"))
            shard, sums = self._open[number]
            rows = {old: shard.get_slice(old)[row] for old in STORED}
        except (OSError, SafetensorError, ValueError) as error:
            raise ResourceError(f"{path} cannot be read ({error}). {AGAIN}") from error
        if sums is not None and sums[row] != sum_of(rows):
            raise LinearizeError(f"{path} is damaged: row {row} is not as it was written. Remove the file. {AGAIN}")
        return {**self.blocks[index], **{new: rows[old] for old, new in STORED.items()}}


def without_logits(samples: Any) -> Any:
    """The samples alone: those that are read without a teacher may be more than the rows that were written."""
    return samples.blocks if isinstance(samples, WithLogits) else samples


def is_shard(name: str) -> bool:
    """Whether linearize gave a file this name."""
    return bool(re.fullmatch(r"(train|eval)-[0-9a-f]{12}-\d{5,}\.(safetensors|partial)", name))


def is_written(path: Path, key: str, rows: int) -> bool:
    """Whether a shard with at least so many rows is there already. Raises LinearizeError (exit 2) for one that was made
    from something else."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, "pt") as shard:
            metadata, count = shard.metadata() or {}, shard.get_slice("rest").get_shape()[0]
    except (OSError, SafetensorError) as error:
        raise ResourceError(f"{path} is damaged ({error}). Remove it, and it is written again") from error
    if metadata.get(KEY) != key:
        raise LinearizeError(
            f"{path} is there, and was made with another teacher, text or number of tokens. Choose another -o"
        )
    return bool(count >= rows)


def sum_of(row: Mapping[str, Tensor]) -> int:
    """A CRC-32 of the numbers of a row, by the names of STORED."""
    found = 0
    for name in STORED:
        found = zlib.crc32(row[name].contiguous().numpy().data, found)
    return found


def write_rows(path: Path, rows: Mapping[str, Tensor], key: str) -> None:
    """One shard, which appears complete or not at all."""
    partial = path.with_suffix(".partial")
    try:
        with writing(path):
            whole = {name: value.contiguous().cpu() for name, value in rows.items()}
            sums = [sum_of({name: whole[name][i] for name in STORED}) for i in range(len(whole["rest"]))]
            save_file(whole, partial, {"format": "pt", KEY: key, SUMS: json.dumps(sums)})
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def empty_rows(k: int, vocabulary: int, rows: int, length: int) -> dict[str, Tensor]:
    """Rows of the right shapes and dtypes that mean nothing, to count or to time a step."""
    even = torch.full((rows, length), -1.0)
    indices = torch.arange(k, dtype=torch.int32).remainder(max(vocabulary, 1)).expand(rows, length, k).contiguous()
    return {VALUES: even[..., None].repeat(1, 1, k), INDICES: indices, REST: even, TARGET: even.clone()}
