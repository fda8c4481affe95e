"""Memory does not grow with a checkpoint: the benchmark of large conversions, on a small one in one shard."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from linearize.checkpoint import shards
from linearize.checkpoint.source import read_header

ROOT = Path(__file__).resolve().parents[1]
# Source of 196 MB, whose largest tensor has 82; held whole, either in float32 is over the limit.
LIMIT = 160 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("how", ["copy", "cast", "pickle"])
def test_a_shard_is_never_held_whole(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-m", "benchmarks.convert", f"tiny-{how}", "--at", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads(done.stdout)
    assert found["peak_bytes"] < LIMIT
    assert found["written_bytes"] > (2 if how == "cast" else 1) * 180_000_000
    assert list(tmp_path.iterdir()) == []


def test_blocks_are_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BLOCK", 64)
    tensors = {"a": torch.randn(50, 3), "b": torch.arange(7), "c": torch.zeros(0, 2), "d": torch.tensor(True)}
    save_file(tensors, tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    blocks = [b.clone() for b in shards.read_tensor(tmp_path / "a.safetensors", header["a"])]
    assert [len(b) for b in blocks] == [16] * 9 + [6]
    assert torch.equal(torch.cat(blocks).view(50, 3), tensors["a"])
    hashes = shards.write_shard(
        tmp_path / "b.safetensors", header, lambda name: shards.read_tensor(tmp_path / "a.safetensors", header[name])
    )
    again = load_file(tmp_path / "b.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert hashes["b"] == hashlib.sha256(tensors["b"].numpy().tobytes()).hexdigest()
    with pytest.raises(ValueError, match=r"b.*0.*bytes.*56"):
        shards.write_shard(tmp_path / "b.safetensors", header, lambda name: [])


def test_hashing_tells_how_many_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, amounts = [], list[float]()

    @contextlib.contextmanager
    def progress(what: str, total: float) -> Iterator[Any]:
        told.append((what, total))
        yield amounts.append

    monkeypatch.setattr(shards, "progress", progress)
    sizes = {"large": 2 * shards.BLOCK + 5, "small": 3, "empty": 0}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    found = shards.file_hashes(tmp_path, [tmp_path / name for name in sizes])
    assert found == {name: hashlib.sha256(b"x" * size).hexdigest() for name, size in sizes.items()}
    assert told == [("hashing", sum(sizes.values()))]
    assert sum(amounts) == sum(sizes.values())
    assert amounts.count(shards.BLOCK) == 2  # as they are read, not when a file is done
    amounts.clear()
    blob = tmp_path / "blobs" / ("0123456789abcdef" * 4)
    blob.parent.mkdir()
    (tmp_path / "large").rename(blob)
    shards.file_hashes(tmp_path, [blob], shards.known_sha256)
    assert [amount for amount in amounts if amount] == [sizes["large"]]  # its name is its hash


def test_a_blob_of_the_hub_is_not_read_for_its_hash(tmp_path: Path) -> None:
    name = "0123456789abcdef" * 4
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / name).write_bytes(b"weights")
    (tmp_path / "link").symlink_to(tmp_path / "blobs" / name)
    assert shards.place_shard(tmp_path / "link", tmp_path / "out") == name
    assert shards.place_shard(tmp_path / "out", tmp_path / "copy") == hashlib.sha256(b"weights").hexdigest()
