"""Progress: nothing for what is quick, a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Command
from models import Zoo

import linearize.commands
import linearize.terminal.progress
from linearize.estimate.cards import CARDS
from linearize.terminal.output import DRAWN, say
from linearize.terminal.progress import progress, starting


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
    assert lines == ["eval: 30%, 70 s left", "eval: 60%, 40 s left", "eval: 90%, 10 s left"]


def test_a_terminal_gets_a_bar_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(10)
    shown = capsys.readouterr().err
    assert "eval [############............] 50%, 5 s left" in shown
    assert shown.endswith("\r\033[K")
    assert "\n" not in shown


def last(shown: str) -> str:
    """The line that was drawn last."""
    return shown.rpartition("\r")[2].removesuffix("\033[K")


def test_the_time_is_shown_until_a_bar_knows_its_share(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    with progress("rows", 2) as advance:
        time.sleep(0.1)
        before = capsys.readouterr().err
        time.sleep(0.5)
        advance(1)
        after = capsys.readouterr().err
        time.sleep(0.1)
    assert before.startswith("\rrows [........................] 0%, 0 s so far")
    assert last(after) == "rows [############............] 50%, 1 s left"
    assert capsys.readouterr().err.endswith("\r\033[K")


def test_a_bar_names_no_total_that_is_over(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two shares the time that is left goes down to 0; then the part is slower than those before it."""
    impatient(monkeypatch)
    clock = Clock()
    with progress("rows", 2, clock) as advance:
        clock.now += 10
        advance(1)
        for now, line in ((118, "50%, 2 s left"), (130, "50%, 30 s so far")):
            clock.now = now
            time.sleep(0.1)
            assert last(capsys.readouterr().err).endswith(line)


def test_a_bar_waits_for_those_within_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    clock = Clock()
    with progress("estimate", 4, clock) as advance:
        clock.now += 10
        advance(1)
        with progress("trying", 2, clock) as within:
            clock.now += 100
            within(1)
            assert last(capsys.readouterr().err).startswith("trying [")
            advance(0)
            assert capsys.readouterr().err == ""
        clock.now += 10
        advance(1)
        assert last(capsys.readouterr().err).endswith("50%, 20 s left")


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


def test_a_message_stands_above_the_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    with progress("estimate", 2):
        time.sleep(0.1)
        say("a note")
        time.sleep(0.1)
    shown = capsys.readouterr().err
    assert shown.startswith("\restimate [")
    assert "\r\033[Ka note\n\restimate [" in shown
    assert shown.endswith("\r\033[K")


def test_a_signal_may_speak_while_a_line_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """Its handler runs in the thread that draws."""
    with DRAWN.lock:
        say("interrupted")
    assert capsys.readouterr().err == "interrupted\n"


def test_a_forked_process_may_speak_whatever_was_drawn_meanwhile() -> None:
    """It has the lock as it was and not the thread that would release it."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with DRAWN.lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        os._exit(not DRAWN.lock.acquire(timeout=1))
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_what_is_not_counted_is_for_terminals_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    threads = threading.active_count()
    with starting(), progress("estimate", 2):
        time.sleep(0.1)
        assert threading.active_count() == threads
    assert capsys.readouterr() == ("", "")


def test_a_start_shows_how_long_it_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    with starting():
        time.sleep(0.1)
        assert last(capsys.readouterr().err).startswith("starting [........................] 0%, 0 s so far")
    assert capsys.readouterr().err.endswith("\r\033[K")


def test_of_several_processes_the_first_one_shows_its_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    with starting():
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_nothing_is_collected_while_a_command_starts() -> None:
    """And what it imported never is: all that torch and transformers hold would be looked through again and again."""
    found = list[str]()
    gc.callbacks.append(lambda phase, info: found.append(phase))
    try:
        with starting():
            kept = [[number] for number in range(20_000)]
        assert (len(kept), found, gc.isenabled()) == (20_000, [], True)
        assert gc.get_freeze_count() > 20_000
    finally:
        gc.callbacks.pop()
        gc.unfreeze()


COMMANDS = sorted(Path(linearize.commands.__file__).parent.glob("*.py"))


def test_every_command_that_imports_much_says_that_it_starts() -> None:
    """These bring no torch: the commands for recipes and mechanisms. What doctor imports, it counts as its checks."""
    said = {path.stem for path in COMMANDS if "with starting()" in path.read_text("utf-8")}
    assert {path.stem for path in COMMANDS} - said == {"__init__", "doctor", "mechanisms", "recipes"}


@pytest.mark.parametrize(
    ("command", "label"),
    [
        ("doctor", "doctor"),
        ("inspect MODEL", "inspect"),
        pytest.param("push FOLDER user/repo --dry-run", "push: checking the folder", marks=pytest.mark.slow),
    ],
)
def test_commands_that_take_long_show_their_share(
    command: str, label: str, linearize: Command, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    source, folder = zoo.folders("llama")
    _, out, err = linearize(*command.replace("MODEL", str(source)).replace("FOLDER", str(folder)).split(), "--json")
    assert re.search(rf"\r{label} \[#+\.*\] \d+%, \d+ s left", err)
    assert json.loads(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        # On a card that is small, batch and optimizer are tried first, and then what makes the recipe fit.
        (["--gpu", "tiny"], ["trying batch and optimizer", "looking for what fits", "estimate"]),
        (["--measure"], ["estimate", "measuring"]),
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
        assert re.search(rf"\r{label} \[#+\.*\] \d+%, \d+ s left", err), label


@pytest.mark.parametrize(
    ("command", "label"),
    [
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
    assert re.search(rf"\r{label} \[#{{24}}\] 100%, 0 s left", err)
