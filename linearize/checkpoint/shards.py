"""Read and write safetensors files block by block, and hash them.

Memory stays at a few blocks however large a tensor, a shard or a model is. Files are read, not mapped: the pages of
a mapping would count as memory of the process.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from ..errors import IncompatibleError
from ..terminal.progress import Advance, progress, silent
from .source import Entry, read_header

BLOCK = 16 * 2**20  # bytes; a multiple of the size of every dtype
TORCH_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
T = TypeVar("T")
R = TypeVar("R")


def described(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Entry:
    """The header entry of a tensor that is to be written, as `dtype` where given."""
    dtype = dtype or tensor.dtype
    if dtype not in NAMES:
        raise IncompatibleError(f"{name} is {dtype}, which safetensors does not know")
    return Entry(NAMES[dtype], tuple(tensor.shape))


def write_shard(
    path: Path, entries: Mapping[str, Entry], values: Callable[[str], Iterable[torch.Tensor]]
) -> dict[str, str]:
    """Write a safetensors file; `values(name)` gives the tensor in blocks. Returns the sha256 of each tensor's bytes.

    Raises ValueError when the blocks of a tensor are not as many bytes as its entry says.
    """
    # Large items first, so that every tensor is aligned; else in the order given.
    names = sorted(entries, key=lambda name: -TORCH_DTYPES[entries[name].dtype].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = entries[name].dtype, entries[name].shape
        start, end = end, end + torch.Size(shape).numel() * TORCH_DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hashes = {}
    with path.open("wb", buffering=0) as file:
        _write(file, struct.pack("<Q", len(text)) + text)
        for name in names:
            digest, written = hashlib.sha256(), file.tell()
            for block in values(name):
                if block.numel():
                    data = block.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
                    _write(file, data)
                    digest.update(data)
            start, end = header[name]["data_offsets"]  # type: ignore[index]
            if file.tell() - written != end - start:
                raise ValueError(f"{name}: {file.tell() - written} bytes for an entry of {end - start}")
            hashes[name] = digest.hexdigest()
    return hashes


def _write(file: object, data: bytes | memoryview) -> None:
    while data:
        data = data[file.write(data) :]  # type: ignore[attr-defined]


def torch_dtype(shard: Path, entry: Entry) -> torch.dtype:
    """Raises LinearizeError (exit 3) for a dtype that cannot be rewritten, such as packed 4-bit numbers."""
    if entry.dtype not in TORCH_DTYPES:
        message = f"{shard} holds {entry.dtype}: surgery needs float weights; use the model's float version"
        raise IncompatibleError(message)
    return TORCH_DTYPES[entry.dtype]


def read_tensor(shard: Path, entry: Entry) -> Iterator[torch.Tensor]:
    """The numbers of one tensor as flat blocks; each is valid until the next one is asked for."""
    dtype = torch_dtype(shard, entry)
    for block in read_bytes(shard, entry.start, entry.size):
        yield torch.frombuffer(block, dtype=dtype)


def read_bytes(path: Path, start: int, size: int) -> Iterator[memoryview]:
    """`size` bytes from `start`, in blocks of one buffer. Raises EOFError when the file is shorter."""
    buffer = memoryview(bytearray(min(BLOCK, size)))
    with path.open("rb") as file:
        file.seek(start)
        while size:
            block = buffer[: min(BLOCK, size)]
            if file.readinto(block) != len(block):
                raise EOFError(f"{path} ended early")
            size -= len(block)
            yield block


# ---------------------------------------------------------------- whole files


def place_shard(source: Path, target: Path, copy: bool = False, advance: Advance = silent) -> str:
    """A hard link where the file system allows one and no `copy` is asked for, else a copy, byte for byte; returns the
    file's sha256. `advance` gets the bytes as they are read.

    The cache of the Hub names large files by it: then it is the hash of what the Hub has, and nothing need be read.
    """
    source = source.resolve()
    named = _hub_hash(source)
    if named and not copy:
        link_or_copy(source, target)
        return named
    if not copy and _linked(source, target):
        return sha256(source, advance)
    digest = hashlib.sha256()
    with target.open("wb", buffering=0) as file:
        for block in read_bytes(source, 0, source.stat().st_size):
            _write(file, block)
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link, or a byte-for-byte copy where the file system does not allow one."""
    if not _linked(source.resolve(), target):
        shutil.copyfile(source, target)


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
            raise
        return False
    return True


def index_fault(index: Mapping[str, str], shards: Iterable[Path]) -> str:
    """The first tensor that `index` (tensor -> name of its shard) and `shards` do not both have there, as a sentence;
    empty where there is none."""
    held = {(tensor, path.name) for path in shards for tensor in read_header(path)}
    for tensor, name in sorted(held ^ set(index.items())):
        return f"{tensor} is in {name} by the {'shards' if (tensor, name) in held else 'index'} only"
    return ""


def sha256(path: Path, advance: Advance = silent) -> str:
    """The hash of a file, as `sha256sum` prints it; `advance` gets the bytes as they are read."""
    return _sha256(path, 0, path.stat().st_size, advance)


def _sha256(path: Path, start: int, size: int, advance: Advance) -> str:
    digest = hashlib.sha256()
    for block in read_bytes(path, start, size):
        digest.update(block)
        advance(len(block))
    return digest.hexdigest()


def file_hashes(folder: Path, files: Collection[Path], work: Callable[[Path, Advance], str] = sha256) -> dict[str, str]:
    """The hash of each of these files, by its name from `folder` on, in their order."""
    names = [file.relative_to(folder).as_posix() for file in files]
    return dict(zip(names, in_parallel(work, files, "hashing", file_size), strict=True))


def file_size(path: Path) -> int:
    """Bytes of a file, where a link leads to."""
    return path.stat().st_size


def combined_sha256(hashes: Mapping[str, str]) -> str:
    """One hash of names and hashes, in their order."""
    return hashlib.sha256(json.dumps([*hashes.items()]).encode()).hexdigest()


def known_sha256(path: Path, advance: Advance = silent) -> str:
    """`sha256`, of a large file in the cache of the Hub by its name there."""
    return _hub_hash(path.resolve()) or sha256(path, advance)


def _hub_hash(path: Path) -> str | None:
    named = re.fullmatch("[0-9a-f]{64}", path.name) if path.parent.name == "blobs" else None
    return named and named[0]


def tensor_sha256(path: Path, entry: Entry, advance: Advance = silent) -> str:
    """The hash of one tensor's bytes; `advance` gets them as they are read."""
    return _sha256(path, entry.start, entry.size, advance)


def in_parallel(work: Callable[[T, Advance], R], items: Collection[T], what: str, size: Callable[[T], int]) -> list[R]:
    """`work` on each item, in threads: hashing, reading and writing all let other threads run.

    `what` that is tells a person who waits, with the share of all bytes: `size` gives those of an item, and `work`
    calls what it is given with those that it has read. What an error or an interrupt finds waiting is not begun.
    """
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        with progress(what, sum(map(size, items))) as advance:

            def counted(item: T) -> R:
                left = size(item)

                def some(amount: float) -> None:
                    nonlocal left
                    left -= int(amount)
                    advance(amount)

                result = work(item, some)
                advance(left)  # of what was known without reading it
                return result

            return list(pool.map(counted, items))
    finally:
        pool.shutdown(cancel_futures=True)
