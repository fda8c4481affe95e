"""benchmarks.pairs: what every pair of layers is worth, on text, lists and needles."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from models import small_model
from training import SMALL, byte_tokenizer, write_data

from benchmarks import pairs
from linearize.choose import choose


@pytest.mark.slow
def test_every_pair_is_compared_on_text_lists_and_needles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_model("llama", **SMALL).save_pretrained(tmp_path / "source")
    byte_tokenizer().save_pretrained(tmp_path / "source")
    write_data(tmp_path)
    for name, value in {"TRANSFER_STEPS": 1, "SCORE_TOKENS": 512, "RECALLS": 1}.items():
        monkeypatch.setattr(choose, name, value)
    text = ("--train", str(tmp_path / "train.jsonl"), "--held-out", str(tmp_path / "heldout.txt"))
    sizes = ("--transfer-tokens", "512", "--tokens", "512", "--length", "512", "--needles", "2")
    settings = ("--set", "slots=8", "--set", "chunk_size=16")
    arguments = ["pairs", str(tmp_path / "source"), *text, *sizes, *settings, "--methods", "swaps"]
    monkeypatch.setattr(sys, "argv", arguments)
    pairs.main()
    method, teacher, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert (method["method"], len(method["kept"])) == ("swaps", 2)
    assert (teacher["kept"], len(rows)) == ([0, 1, 2, 3], 7)
    for row in rows:
        assert min(row[f"kl_{kind}"] for kind in ("text", "recall", "needle")) > 0
        assert 0 <= row["needles"] <= 1
