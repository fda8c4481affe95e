"""Progress: nothing for what is quick, a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import Command
from models import Zoo

import linearize.terminal.progress
from linearize.estimate.gpus import CARDS
from linearize.terminal.output import DRAWN, say
from linearize.terminal.progress import progress, waiting


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(seconds: float, steps: int = 10) -> None:
    """Work of so many seconds in equal steps."""
    clock = Clock()
    with progress("eval", steps, clock) as advance:
        for _ in range(steps):
            clock.now += seconds / steps
            advance(1)


def test_what_is_quick_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run(4)
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_a_line_every_half_minute_with_the_whole_time(capsys: pytest.CaptureFixture[str]) -> None:
    run(100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["eval: 30%, 70 s of 100 s left", "eval: 60%, 40 s of 100 s left", "eval: 90%, 10 s of 100 s left"]


def test_a_terminal_gets_a_bar_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(10)
    shown = capsys.readouterr().err
    assert "eval [############............] 50%, 5 s of 10 s left" in shown
    assert shown.endswith("\r\033[K")
    assert "\n" not in shown


def test_the_time_is_shown_until_a_bar_knows_its_share(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    with waiting("bench"):
        with progress("rows", 2) as advance:
            time.sleep(0.1)
            before = capsys.readouterr().err
            advance(1)
            time.sleep(0.1)
            after = capsys.readouterr().err
        time.sleep(0.1)
    assert before.startswith("\rbench, 0 s")
    # The last one may have been drawn while the bar was: it is overwritten.
    assert after.rpartition("\r")[2].startswith("rows [############............] 50%")
    assert "\rbench, 0 s" in capsys.readouterr().err


def test_a_bar_counts_what_many_threads_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    with progress("hashing", 800) as advance, ThreadPoolExecutor(8) as pool:
        time.sleep(0.02)
        list(pool.map(lambda _: [advance(1) for _ in range(100)], range(8)))
    assert "100%, 0 s" in capsys.readouterr().err


def test_a_failure_leaves_no_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    def fail() -> None:
        clock = Clock()
        with progress("eval", 2, clock) as advance:
            clock.now += 10
            advance(1)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert capsys.readouterr().err.endswith("\r\033[K")


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error is a terminal, and what takes a moment counts as long. Not a fixture: pytest opens another
    standard error for the test itself."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(linearize.terminal.progress, "SHOWN_AFTER", 0.01)
    monkeypatch.setattr(linearize.terminal.progress, "SECOND", 0.01)


def test_what_cannot_tell_its_share_shows_its_time_below_messages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    with waiting("estimate"):
        time.sleep(0.1)
        say("a note")
        time.sleep(0.1)
    shown = capsys.readouterr().err
    assert shown.startswith("\restimate, 0 s\033[K")
    assert "\r\033[Ka note\n" in shown
    assert shown.endswith("\r\033[K")


def test_a_signal_may_speak_while_a_line_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """Its handler runs in the thread that draws."""
    with DRAWN.lock:
        say("interrupted")
    assert capsys.readouterr().err == "interrupted\n"


def test_time_is_for_terminals_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linearize.terminal.progress, "SHOWN_AFTER", 0.01)
    with waiting("estimate"):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("command", "label"),
    [
        ("doctor", "doctor"),
        ("inspect MODEL", "inspect"),
        pytest.param("estimate hybrid model.base=MODEL", "estimate", marks=pytest.mark.slow),
        pytest.param("push FOLDER user/repo --dry-run", "push: checking the folder", marks=pytest.mark.slow),
        ("bench paper saga --claims pvt-t-1280-memory --tiny", "bench paper"),
    ],
)
def test_commands_that_take_long_show_their_time(
    command: str, label: str, linearize: Command, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    source, folder = zoo.folders("llama")
    _, out, err = linearize(*command.replace("MODEL", str(source)).replace("FOLDER", str(folder)).split(), "--json")
    assert re.search(rf"\r{label}, \d+ s", err)
    assert json.loads(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ([], ["estimate"]),
        # On a card that is small, batch and optimizer are tried first, and then what makes the recipe fit.
        (["--gpu", "tiny"], ["trying batch and optimizer", "looking for what fits", "estimate"]),
    ],
)
def test_an_estimate_shows_its_share(
    changes: list[str], labels: list[str], linearize: Command, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    monkeypatch.setitem(CARDS, "tiny", (0.1, 312, 1555, 400))
    source, _ = zoo.folders("llama")
    command = ["estimate", "gsa-window", f"model.base={source}", "data.pack.seq_len=128", *changes]
    code, _, err = linearize(*command, "--json")
    assert code == 0, err
    for label in labels:
        assert re.search(rf"\r{label} \[#+\.*\] \d+%, \d+ s of \d+ s left", err), label


@pytest.mark.parametrize(
    ("command", "label"),
    [
        ("bench paper saga --claims pvt-t-1280-memory --tiny", "bench paper"),
        pytest.param("bench kernels --mechanism saga --tokens 16", "bench kernels", marks=pytest.mark.slow),
        pytest.param(
            "bench model MODEL --to la --train 16 --contexts 16 --batches 1", "bench model", marks=pytest.mark.slow
        ),
    ],
)
def test_benchmarks_show_how_many_of_their_rows_are_done(
    command: str, label: str, linearize: Command, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    source, _ = zoo.folders("llama")
    _, _, err = linearize(*command.replace("MODEL", str(source)).split(), "--json")
    assert re.search(rf"\r{label} \[#{{24}}\] 100%, 0 s of \d+ s left", err)
