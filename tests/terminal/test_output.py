"""What goes to a terminal: other people's strings are shown, never obeyed."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import Command
from models import save_source

from linearize.commands.verify import checks_table
from linearize.errors import absent, nearest, resource_error
from linearize.terminal.output import CHATTY, counted, duration, nats, print_json, printable, say, show
from linearize.terminal.tables import console
from linearize.train.device import device_name
from linearize.verify.checks import Check

RED, LINK = "\x1b[31mred", "\x1b]8;;http://evil\x1b\\here\x1b]8;;\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (RED, "\\x1b[31mred"),
        (LINK, "\\x1b]8;;http://evil\\x1b\\here\\x1b]8;;\\x07"),
        ("title\x9b2J\x9dx", "title\\x9b2J\\x9dx"),
        ("passed\rfailed\x08\x7f", "passed\\rfailed\\x08\\x7f"),
        ("user\u202etxt.exe\u2066", "user\\u202etxt.exe\\u2066"),
        ("one\n\ttwo é 漢 🙂 \u200f", "one\n\ttwo é 漢 🙂 \u200f"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(text) == shown
    say(text)
    assert capsys.readouterr().err == shown + "\n"


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 threads"), (1, "1 thread"), (2, "2 threads"), (12000, "12,000 threads")]
)
def test_one_is_singular(count: int, words: str) -> None:
    assert counted(count, "thread") == words
    assert counted(count, "process", "processes") == words.replace("thread", "process").replace("esss", "esses")


def test_a_cpu_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, name in ((1, "CPU, 1 thread"), (2, "CPU, 2 threads")):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert device_name(torch.device("cpu")) == name


def test_bars_of_other_packages_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    for tame, bars in (("", True), ("quiet_other_packages(); ", False)):
        program = (
            f"from linearize.terminal.output import quiet_other_packages; {tame}from tqdm import tqdm; [*tqdm('ab')]"
        )
        ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True)
        assert ("it/s" in ended.stderr) is bars


@pytest.mark.parametrize(("seconds", "words"), [(4.4, "4 s"), (99, "99 s"), (600, "10 min"), (7200, "2.0 h")])
def test_a_time_for_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        (2.41234, "2.4123"),
        (0.1, "0.1000"),
        (0.04123, "0.0412"),
        (0.01, "0.0100"),
        (0.001, "0.00100"),
        (2.126e-5, "2.13e-05"),
        (2.1e-5, "2.10e-05"),
        (0.0, "0"),
        (None, ""),
    ],
)
def test_a_divergence_has_three_digits_however_small_it_is(kl: float | None, words: str) -> None:
    assert nats(kl) == words


def test_a_message_between_colons_is_no_picture(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("auto:100: all")
    assert capsys.readouterr().err == "auto:100: all\n"


def test_tables_show_them_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    checks_table(RED, [Check(f"name {RED}", "passed", f"detail {LINK}")])
    console().print(f"plain {RED}", RED)
    found = capsys.readouterr().err
    assert "\x1b" not in found
    assert "\x07" not in found
    assert found.count("\\x1b[31mred") == 4


def test_text_of_a_model_is_raw_in_a_pipe_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show(RED, end="")
    assert capsys.readouterr().out == RED
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(RED, end="")
    assert capsys.readouterr().out == "\\x1b[31mred"
    print_json({"text": RED})
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert json.loads(printed) == {"text": RED}


def test_names_in_a_folder_and_a_config_are_shown(tmp_path: Path, linearize: Command) -> None:
    source = save_source(tmp_path / RED)
    (source / f"{LINK.replace('/', '_')}.txt").write_text("")
    code, _, err = linearize("convert", source, "--to", "gsa", "--dry-run")
    assert code == 0
    assert "\\x1b[31mred" in err
    assert "here\\x1b]8" in err
    config = source / "config.json"
    config.write_text(config.read_text().replace('"llama"', json.dumps(LINK)))
    for command in (["convert", source, "--to", "gsa"], ["inspect", source]):
        code, _, failed = linearize(*command)
        assert code == 3
        assert not {"\x1b", "\x07"} & {*err, *failed}


def test_what_other_packages_say_of_a_config_is_shown(tmp_path: Path, linearize: Command) -> None:
    """transformers logs the names that it does not know."""
    source = save_source(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": RED, "rope_theta": 10000.0}
    (source / "config.json").write_text(json.dumps(config))
    handler = logging.StreamHandler(heard := io.StringIO())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        for command in (["inspect", source], ["convert", source, "--to", "gsa"], ["generate", source, "a"]):
            code, _, err = linearize(*command)
            assert code == 3
            assert "\x1b" not in err
        logger.error("named %s", RED)
    finally:
        logger.removeHandler(handler)
    assert "\\x1b[31mred" in heard.getvalue()
    assert "\x1b" not in heard.getvalue()


def test_a_warning_is_shown(linearize: Command) -> None:
    linearize("--version")
    assert "\x1b" not in warnings.formatwarning(RED, UserWarning, "model.py", 1, "")
    assert "\\x1b[31mred" in warnings.formatwarning(RED, UserWarning, "model.py", 1, "")


def test_packages_that_warn_when_imported_are_silent(linearize: Command) -> None:
    linearize("--version")
    for name in CHATTY:
        assert not logging.getLogger(name).isEnabledFor(logging.WARNING)
        assert logging.getLogger(name).isEnabledFor(logging.ERROR)


def test_a_name_that_is_begun_comes_before_one_that_is_like_it() -> None:
    assert nearest("a100", ["h100", "a100-80g", "a100-40g"]) == "a100-80g"
    assert nearest("h10", ["h100", "h200"]) == "h100"
    assert nearest("", ["h100"]) is None


def test_a_link_to_nothing_is_called_one(tmp_path: Path) -> None:
    link = tmp_path / "a.txt"
    link.symlink_to(tmp_path / "gone" / "b.txt")
    message = absent(link).message
    assert message == f"no such file '{link}'. It is a link to {tmp_path / 'gone' / 'b.txt'}, which is not there."


@pytest.mark.parametrize(("number", "said"), [(errno.EFBIG, "larger than"), (errno.ENOSPC, "no space left")])
def test_a_limit_on_files_is_no_full_disk(number: int, said: str) -> None:
    found = resource_error(OSError(number, os.strerror(number), "x.bin"))
    assert found is not None
    assert said in found.message


def test_numpy_does_not_say_that_a_disk_is_full() -> None:
    found = resource_error(OSError("8224 requested and 3368 written"))
    assert found is not None
    assert "no space left" in found.message
