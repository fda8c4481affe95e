"""`python -m benchmarks.paper`, on the CPU: every row at tiny sizes, and how a claim is judged."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, holds, with_slow

from benchmarks import kernel_tables, measured, paper
from benchmarks.paper import Claim, load_claims, paper_names
from linearize.bench import timing as bench_measure
from linearize.errors import Exit


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is spent on good numbers."""
    monkeypatch.setattr(bench_measure, "SECONDS", 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run it in this process: (exit code, stdout, stderr)."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paper", *map(str, arguments)])
        code: Any = 0
        try:
            paper.main()
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", with_slow(paper_names(), "saga", "sla"))
def test_every_row_of_a_paper_is_tried(command: Command, tmp_path: Path, name: str) -> None:
    kept = tmp_path / "rows.json"
    code, out, err = command(name, "--tiny", "--save", kept)
    assert code == 0, err
    claims, rows = load_claims(name), json.loads(kept.read_text())["rows"]
    assert [row["claim"] for row in rows] == [claim.name for claim in claims]
    for claim, row in zip(claims, rows, strict=True):
        assert f"| `{claim.name}` | {claim.where} | " in out
        assert f"{claim.name} ({claim.where}): " in err
        if claim.needs:
            assert (row["status"], row["of"]) == (f"needs {claim.needs}", None)
            continue
        assert row["of"]["ms"] > 0
        if claim.quantity == "memory":
            assert row["status"] == ("not measured: memory is counted on a GPU" if not claim.name.startswith("fla") else
                                     "not measured: no flash-linear-attention here")  # fmt: skip
        elif claim.over is not None and getattr(claim.over, "whose", "") == "fla":
            assert row["status"] == "not measured: no flash-linear-attention here"
        else:
            assert row["value"] > 0
            assert row["status"] == "tried"


@pytest.mark.parametrize("name", paper_names())
def test_claims_are_whole(name: str) -> None:
    claims = load_claims(name)
    assert len({claim.name for claim in claims}) == len(claims)
    for claim in claims:
        asked = claim.published is not None, claim.at_least is not None, bool(claim.needs)
        assert sum(asked) == 1, claim.name
        assert bool(claim.needs) == (claim.of is None) == (not claim.quantity)
        assert claim.where.split()[0] in ("table", "figure", "section", "footnote")


def took(ms: float, device: float | None = None, peak: float | None = None, name: str = "ours") -> dict[str, Any]:
    return {"what": name, "ms": ms, "device_ms": device, "tokens_s": 1000.0 / ms, "peak_mib": peak}


@pytest.mark.parametrize(
    ("quantity", "published", "at_least", "value", "device", "status"),
    [
        ("speed", 2.0, None, 2.0, 4.0, "reproduced"),
        ("speed", 1.95, None, 2.0, 4.0, "reproduced"),
        ("speed", 1.0, None, 2.0, 4.0, "beaten by 100%"),
        ("speed", 4.0, None, 2.0, 4.0, "missed by 50%"),
        ("speed", None, 1.5, 2.0, 4.0, "reproduced"),
        ("speed", None, 2.5, 2.0, 4.0, "missed by 20.0%"),
        ("speed", None, 2.002, 2.0, 4.0, "missed by 0.1%"),
        ("rate", 2.0, None, 2.0, 4.0, "reproduced"),
        ("memory", 3.0, None, 3.0, None, "reproduced"),
        ("tokens/s", 400.0, None, 500.0, 1000.0, "beaten by 25%"),
    ],
)
def test_a_claim_is_judged(
    quantity: Any, published: float | None, at_least: float | None, value: float, device: float | None, status: str
) -> None:
    """Ours takes 2 ms, the device 1 of them, and 100 MiB; the peer 4, 4 and 300."""
    claim = Claim("c", "table 1", "what", quantity, published=published, at_least=at_least)
    peer = None if quantity == "tokens/s" else took(4.0, 4.0, 300.0)
    row = paper.judged(claim, took(2.0, 1.0, 100.0), peer, False)
    assert (row["value"], row["device"], row["status"]) == (value, device, status)
    assert row["share"] == pytest.approx(value / (published or at_least or 0.0))


def test_time_is_up_for_later_rows(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = command("la", "--tiny", "--seconds", 0, "--claims", "speed,loss", "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["status"] for row in rows] == [
        "not measured: not reached: --seconds was over",
        "needs Wiki-40B, 8 GPUs",
    ]


def test_a_file_of_something_else_is_not_replaced(command: Command, tmp_path: Path) -> None:
    arguments = ("la", "--tiny", "--seconds", 0, "--claims", "speed", "--save")
    for text in ("my notes", '{"machine": 1}'):
        (tmp_path / "found.json").write_text(text)
        code, out, err = command(*arguments, tmp_path / "found.json")
        assert (code, out) == (Exit.USAGE, ""), err
        assert (tmp_path / "found.json").read_text() == text
    (tmp_path / "found.json").unlink()
    for _ in range(2):  # its own result is replaced
        assert command(*arguments, tmp_path / "found.json")[0] == 0


def test_what_of_ours_fails_is_told_and_a_peer_may(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> dict[str, Any]:
        if self.whose == "softmax" or not peer:
            raise RuntimeError("out of memory")
        return took(1.0)

    monkeypatch.setattr(measured.Operator, "measure", broken)
    arguments = ("la", "--tiny", "--claims", "softmax")
    peer = True
    code, out, _ = command(*arguments)
    assert code == 0
    assert "| not measured: RuntimeError: out of memory |" in out
    peer = False
    code, _, err = command(*arguments)
    assert code == Exit.CHECK_FAILED
    assert holds(err, "la", "B1", "T16", "H2", "D64", "bf16", "linearize", "forward", "RuntimeError")


def test_a_result_fills_its_place_in_a_page() -> None:
    rows = [paper.judged(load_claims("la")[0], took(1.0, 1.0), took(3.3, 3.3), False)]
    result = {"paper": "la", "machine": {"device": "a GPU"}, "tiny": False, "rows": rows}
    page = "A\n<!-- paper la -->\nold\n<!-- end -->\nB\n<!-- paper gsa -->\nkept\n<!-- end -->\n"
    filled = kernel_tables.fill(page, result)
    assert "device a GPU\n" in filled
    assert (
        "| `speed` | table 1 | forward, 10,000 tokens, over Gated LA | 3.30 | 3.30 | 3.30 | 1.00 | reproduced |"
        in filled
    )
    assert "old" not in filled
    assert "kept" in filled
    assert kernel_tables.fill(filled, result) == filled


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("gsaa",), Exit.USAGE, ("'gsa'",)),
        (("la", "--tiny", "--claims", "sped"), Exit.USAGE, ("'speed'",)),
        (("la",), Exit.RESOURCE, ("GPU", "--tiny", "CPU")),
        (("la", "--tiny", "--save", ""), Exit.USAGE, ("is empty",)),
        (("la", "--tiny", "--save", "/nowhere/at/all.json"), Exit.USAGE, ("'/nowhere/at",)),
    ],
)
def test_a_wrong_question_is_told(command: Command, arguments: tuple[str, ...], code: int, message: str) -> None:
    found, out, err = command(*arguments)
    assert (found, out) == (code, "")
    assert holds(err, *message)


def test_every_row_of_the_page_has_a_status_a_cause_or_a_command() -> None:
    """A row that is missed has its cause, one that needs data its command; the rest is measured by its name."""
    page = (Path(__file__).parents[2] / "docs" / "papers.md").read_text()
    causes = page[page.index("### Why rows are missed") : page.index("One row is measured again")].splitlines()
    commands = page[page.index("The rows that need data:") : page.index("### LA (arXiv")]
    commands = [line for line in commands.splitlines() if line.startswith("| ") and not line.startswith("| rows")]

    def named(lines: list[str], paper: str, claim: str) -> bool:
        """Whether a first cell has that claim of that paper, as `LA `a`, SAGA `b``."""
        for line in lines:
            cell, of = line.split(" | ")[0], ""
            for word in re.findall(r"[A-Z]{2,}|`[\w-]+`", cell):
                of = of if word.startswith("`") else word
                if (of, word) == (paper.upper(), f"`{claim}`"):
                    return True
        return False

    for name in paper_names():
        table = page[page.index(f"<!-- paper {name} -->") :].partition("<!-- end -->")[0]
        rows = dict(re.findall(r"^\| `([\w-]+)` \|.*\| ([^|]+) \|$", table, re.MULTILINE))
        assert {*rows} == {claim.name for claim in load_claims(name)}, name
        for claim, status in rows.items():
            kind = re.match("reproduced$|beaten by|missed by|needs |not measured", status)
            assert kind, (name, claim, status)
            if kind[0] == "missed by":
                assert named(causes, name, claim), (name, claim, "has no cause")
            if kind[0] == "needs ":
                assert named(commands, name, claim), (name, claim, "has no command")
