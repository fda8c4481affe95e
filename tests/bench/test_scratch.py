"""benchmarks.scratch: mechanisms and softmax from random weights, on the same rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import holds
from training import byte_tokenizer

from benchmarks import scratch

TINY = ("--hidden", "64", "--layers", "1", "--heads", "2", "--block", "256", "--rows", "2", "--tokens", "1024")


def rows(folder: Path, monkeypatch: pytest.MonkeyPatch, work: str, *arguments: str) -> list[dict[str, Any]]:
    """What a call writes, of text whose tokens follow each other."""
    if not (folder / "text.json").exists():
        for part in ("teacher", "heldout"):
            np.save(folder / f"{part}.npy", (np.arange(4096) % 80 + 3).astype(np.uint16))
        byte_tokenizer().save_pretrained(folder / "tokenizer")
        (folder / "text.json").write_text("{}")
    paths = ("--text", str(folder), "--work", str(folder / work), "--out", str(folder / f"{work}.jsonl"))
    monkeypatch.setattr(sys, "argv", ["scratch", *paths, *TINY, *arguments])
    scratch.main()
    out = folder / f"{work}.jsonl"
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


@pytest.mark.slow
def test_each_variant_has_a_row_and_the_same_call_the_same_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rows(tmp_path, monkeypatch, "first", "softmax", "gla", "gsa@1 slots=8", "gla")
    assert [(row["variant"], row["seed"]) for row in first] == [("softmax", 0), ("gla", 0), ("gsa@1 slots=8", 1)]
    assert [row["steps"] for row in first] == [2, 2, 2]
    assert len({row["parameters"] for row in first}) == 3
    assert first[2]["options"] == {"slots": 8}
    assert all(row["perplexity"].keys() == {"256"} for row in first)
    (again,) = rows(tmp_path, monkeypatch, "again", "gla")
    assert (again["loss"], again["perplexity"]) == (first[1]["loss"], first[1]["perplexity"])
    (longer,) = rows(tmp_path, monkeypatch, "longer", "gla", "--tokens", "20480", "--micro", "1")
    assert longer["loss"] < again["loss"] - 1


def test_what_would_not_end_in_time_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rows(tmp_path, monkeypatch, "late", "softmax", "--start", "0", "--seconds", "1") == []
    assert holds(capsys.readouterr().out, "time", "softmax")
