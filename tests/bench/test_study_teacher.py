"""benchmarks.study_teacher: the study's teacher, made again by steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import byte_tokenizer

from benchmarks import study_teacher

TINY = ("--hidden", "64", "--layers", "1", "--block", "32", "--long", "64", "--rows", "2")


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> dict[str, Any]:
    """What teacher.json says of a tiny teacher."""
    if not (folder / "text.json").exists():
        drawn = np.random.default_rng(0).integers(3, 90, 4096)
        for part in ("teacher", "heldout"):
            np.save(folder / f"{part}.npy", drawn.astype(np.uint16))
        byte_tokenizer().save_pretrained(folder / "tokenizer")
        (folder / "text.json").write_text("{}")
    paths = ("--text", str(folder), "--out", str(folder / name))
    monkeypatch.setattr(sys, "argv", ["study_teacher", *paths, *TINY, *arguments])
    study_teacher.main()
    facts: dict[str, Any] = json.loads((folder / name / "teacher.json").read_text())
    return facts


@pytest.mark.slow
def test_the_same_steps_make_the_same_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = (made(tmp_path, monkeypatch, name, "--steps", "6") for name in ("first", "again"))
    assert (first["steps"], first["tokens"]) == (6, 6 * 64)
    assert first["sha256"] == again["sha256"]
    others = (("--steps", "7"), ("--steps", "6", "--seed", "1"))
    assert first["sha256"] not in {made(tmp_path, monkeypatch, "other", *other)["sha256"] for other in others}


@pytest.mark.parametrize("budget", [(), ("--steps", "6", "--seconds", "9"), ("--steps", "0")])
def test_one_budget_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], budget: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit):
        made(tmp_path, monkeypatch, "none", *budget)
    assert "--steps" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
