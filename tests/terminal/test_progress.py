"""Progress: nothing for what is quick, a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys

import pytest

from linearize.terminal.progress import progress


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
