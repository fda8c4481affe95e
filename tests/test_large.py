"""Memory does not grow with a checkpoint, and the bytes of its weights are read once."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from linearize.checkpoint import shards
from linearize.checkpoint.source import read_header

# Source of 196 MB, whose largest tensor has 82; held whole, either in float32 is over the limit.
SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 40000}
LIMIT = 160 * 2**20
CONVERSION = """
import resource, sys, torch, transformers
from pathlib import Path
from linearize.convert import convert, plan_conversion
from linearize.verify.reload import check_keys
transformers.LlamaForCausalLM  # imported when it is asked for; every process that loads a model has such a class
def peak(who): return resource.getrusage(who).ru_maxrss * 1024
before, source, output, how = peak(resource.RUSAGE_SELF), *sys.argv[1:]
planned = plan_conversion(source, "gsa", dtype="float32" if how == "cast" else "keep", copy=how == "copy")
convert(*planned, Path(output), level="none", say=lambda text: None)
check_keys(Path(output))
print(max(peak(resource.RUSAGE_SELF), peak(resource.RUSAGE_CHILDREN)) - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["copy", "cast", "pickle"])
def test_a_shard_is_never_held_whole(tmp_path: Path, how: str) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    config = LlamaConfig(num_hidden_layers=2, num_key_value_heads=8, dtype="bfloat16", **SIZES)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(source)
    if how == "pickle":
        (source / "model.safetensors").unlink()
        torch.save(model.state_dict(), source / "pytorch_model.bin")
    command = [sys.executable, "-c", CONVERSION, str(source), str(output), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.splitlines()[-1]) < LIMIT
    written = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    assert written > (2 if how == "cast" else 1) * 180_000_000


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
