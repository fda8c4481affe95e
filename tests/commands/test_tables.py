"""Tables and messages of the command line: one style, no word cut, colour where a terminal shows it."""

from __future__ import annotations

import re
import sys
from io import StringIO

import pytest
from conftest import Command, holds
from rich.console import Console

from linearize.commands.convert import choice_table, cost_lines
from linearize.commands.estimate import estimate_table
from linearize.commands.eval import tasks_table
from linearize.commands.finetune import report_table
from linearize.commands.runs import runs_table
from linearize.commands.verify import FOUND, checks_table
from linearize.demo.tour import demo_table
from linearize.measure.repeats import Repeats
from linearize.plan.keep import Choice
from linearize.plan.mechanisms import mechanism_names, summary
from linearize.terminal.output import say_error
from linearize.terminal.tables import positions_table, repeats_table, table, task_rows
from linearize.verify.checks import Check
from linearize.verify.child import behaviours


def shown(columns: dict[str, str], rows: list[tuple[str, ...]], width: int = 80) -> list[str]:
    out = StringIO()
    Console(file=out, width=width).print(table(columns, rows))
    return out.getvalue().splitlines()


def test_words_are_not_cut_where_there_is_room() -> None:
    rows = [("la", "a causal language model", "because it is not a vision model with a long reason " * 3)]
    lines = shown({"name": "short", "what": "text", "why": "text"}, rows)
    assert all(len(line) <= 80 for line in lines)
    words = {word for row in rows for cell in row for word in cell.split()}
    assert set(" ".join(lines[2:]).split()) == words


def test_what_is_longer_than_a_line_is_folded_and_all_of_it_shown() -> None:
    name = "x" * 100
    assert re.sub(r"\s", "", "".join(shown({"module": "text"}, [(name,)], 40)[2:])) == name


def test_numbers_stand_to_the_right() -> None:
    lines = shown({"n": "number"}, [("1",), ("100",)])
    assert [line.rstrip().rjust(3) for line in lines[2:]] == ["  1", "100"]


def test_mechanisms_have_whole_words(linearize: Command) -> None:
    code, out, _ = linearize("mechanisms")
    assert code == 0
    titles = {word for name in mechanism_names() for word in summary(name)["title"].split()}
    assert titles <= set(out.split())


def test_the_demo_puts_both_students_beside_the_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        who: {"ppl": 9 * ratio, "ppl_ratio": ratio, "kl": kl, "needle": 0.5, "cache": {512: size, 32768: 64 * size}}
        | {"dtype": "float32"}
        for who, ratio, kl, size in (("teacher", 1.0, 0.0, 4096), ("hybrid", 1.5, 0.25, 2048), ("linear", 2.0, 0.5, 16))
    }
    demo_table(found, "4,5")
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert ["teacher", "softmax", "in", "4,5", "all", "linear"] in lines
    assert ["perplexity", "9.000", "13.500", "18.000"] in lines
    assert ["KL", "from", "the", "teacher,", "nats", "a", "token", "0.2500", "0.5000"] in lines
    assert ["cache", "at", "32,768", "tokens,", "float32", "256.0", "KiB", "128.0", "KiB", "1.0", "KiB"] in lines


def test_every_divergence_has_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    """Once a table, in its heading or its title; in a sentence beside the number."""
    found = {"linear": {"text": 0.5}, "kept": {"text": 0.1}}
    kept = Choice("auto:1", "swaps", (3,), {"3": 0.5}, "text", 4096, 0, found)
    lost = {"text": {"source_ppl": 7.8, "ppl": 8.1, "kl": 0.0123, "tokens": 1024.0, "length": 8192.0}}
    ppl = {"student_ppl": 9.0, "teacher_ppl": 8.0, "ppl_ratio": 1.1, "kl": 0.1}
    blocks = {"rows": 2, "text": "joined", "trained_length": 64, "blocks": [{"from": 0, "to": 64, **ppl}]}
    stages = [{"name": "logit_kl", "tokens": 9, "ppl": 9.0, "ppl_ratio": 1.1, "kl": 0.1, "accuracy": None}]
    for show, words in (
        (lambda: choice_table(kept, "--keep-softmax"), ("KL", "text", "0.5000")),
        (lambda: print(*cost_lines(lost, "text"), file=sys.stderr), ("KL", "0.0123")),
        (lambda: positions_table(blocks), ("KL", "token")),
        (lambda: report_table({"teacher_ppl": None, "stages": stages, "layers": []}), ("KL", "token")),
    ):
        show()
        assert holds(capsys.readouterr().err, *words)


def test_positions_name_a_trained_length_that_is_recorded_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """`finetune` measures what it trained itself, and does not say whether the length is recorded."""
    ppl = {"student_ppl": 9.0, "teacher_ppl": 8.0, "ppl_ratio": 1.1, "kl": 0.1}
    found = {"rows": 2, "text": "joined", "trained_length": 64, "blocks": [{"from": 0, "to": 64, **ppl}]}
    for more, trained in (({}, True), ({"recorded": True}, True), ({"recorded": False}, False)):
        positions_table(found | more)
        shown = " ".join(capsys.readouterr().err.split())
        assert ("trained in rows of 64 tokens" in shown) == trained
        told = "no trained length is recorded: the first stretch is a row of the text, 64 tokens"
        assert (told in shown) != trained


def test_a_text_without_a_target_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as documents of one token each."""
    repeats_table(Repeats().rows())
    assert capsys.readouterr() == ("", "")


def test_a_task_in_which_the_teacher_is_never_right_has_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"task": "words", "few_shot": 0, "rows": 12, "part_of": None}
    for metric, better, teacher, told in (("acc", True, 0.0, 1), ("acc", True, 0.25, 0), ("ppl", False, 9.0, 0)):
        one = {"metric": metric, "filter": "none", "higher_is_better": better, "student": 0.5, "teacher": teacher}
        errors = {"student_error": 0.1, "teacher_error": 0.1}
        tasks_table({"tasks": [row | {"metrics": [one | errors]}], "teacher": "source", "harness": "0.4"})
        shown = " ".join(capsys.readouterr().err.split())
        assert shown.count("note: words compares nothing here: the teacher itself is right in no row") == told


def test_examples_before_a_question_are_headed_few_shot() -> None:
    """They stand beside the rows, which are examples, too."""
    row = {"task": "words", "few_shot": 5, "rows": 12, "part_of": None}
    row["metrics"] = [{"metric": "acc", "filter": "none", "student": 0.5}]
    headings, (cells,) = task_rows({"tasks": [row], "teacher": None})
    assert dict(zip(headings, cells, strict=True))["few-shot"] == "5"


def test_a_perplexity_below_the_teachers_is_told_where_it_is_no_noise(capsys: pytest.CaptureFixture[str]) -> None:
    for ratio, told in ((1.02, False), (0.999, False), (None, False), (0.97, True)):
        stages = [{"name": "logit_kl", "tokens": 9, "ppl": 9.0, "ppl_ratio": ratio, "kl": 0.1, "accuracy": None}]
        report_table({"teacher_ppl": None, "stages": stages, "layers": []})
        assert ("makes no better model" in " ".join(capsys.readouterr().err.split())) == told


def test_the_share_of_tokens_that_are_right_is_headed_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stages = [{"name": "logit_kl", "tokens": 9, "ppl": 9.0, "ppl_ratio": 0.9, "kl": 0.1, "accuracy": 0.4}]
    report_table({"teacher_ppl": None, "stages": stages, "layers": []})
    shown = capsys.readouterr().err
    assert "tokens right" in shown
    assert "top-1" not in shown
    assert holds(shown, "teacher's", "KL says")


def test_a_check_says_what_it_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check of the clean processes has its words; what neither passed nor failed is counted."""
    monkeypatch.setenv("COLUMNS", "120")
    assert {*behaviours.CHECKS, *behaviours.ENCODER_CHECKS} <= FOUND.keys()
    checks = [Check("trust", "passed"), Check("beams", "failed", "raises"), Check("generate", "skipped", "too short")]
    checks_table("llama-gsa", checks)
    lines = capsys.readouterr().err.splitlines()
    assert any(holds(line, "trust", "passed", "trust_remote_code") for line in lines)
    assert not any("states follow" in line or "equals one pass" in line for line in lines)
    assert holds(lines[-1], "1 check of 3", "--strict")
    checks_table("llama-gsa", checks[:2])
    assert "--strict" not in capsys.readouterr().err
    checks_table("llama-gsa", [checks[0], Check("beams", "passed", "", 1e-6, 1e-4)])
    lines = capsys.readouterr().err.splitlines()
    assert holds(lines[-2], "difference", "largest")
    assert holds(lines[-1], "all 2 checks")


def test_runs_lose_nothing_on_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where even the words need more room; a layer that keeps softmax alone is one."""
    monkeypatch.setenv("COLUMNS", "80")
    run = {"run": "llama-gsa-hybrid-long", "base": "Llama-3.2-1B-again-2", "mechanisms": ["gsa"], "kept": [2]}
    run |= {"at": "attention_transfer step 40 of 1200", "tokens": 6e5, "unit": "tokens", "ppl_ratio": 1.0123}
    runs_table([run | {"changed": "2026-11-25T10:00:00"}])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].split()[-1] == "changed"
    assert not any("layers" in line for line in lines)
    for words in ("2026-11-25", "10:00", "(UTC)", "1.012"):
        assert any(words in line for line in lines), words


def test_an_estimate_has_every_part_and_stage_on_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parts = ("weights", "masters", "gradients", "optimizer", "teacher", "activations", "logits", "total", "device")
    memory = {part: (n + 1) << 30 for n, part in enumerate(parts)}
    names, host = ("attention_transfer", "logit_kl", "feature_cosine"), {"host_bytes": 0}
    data = {"data": {"seq_len": 2048}}
    stages = [
        {
            "name": name,
            "memory": memory,
            "tokens_per_s": 1e4,
            "hours": 0.5,
            "fits": True,
            "uncounted": "",
            **host,
            **data,
        }
        for name in names
    ]
    device = {"name": "a100-80g", "count": 1, "memory": 80 << 30}
    found = {"stages": stages, "device": device, "disk": {"total": 1 << 30}, "hours": None, "kwh": None, "price": None}
    estimate_table(found)
    lines = capsys.readouterr().err.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].split() == ["part", *names]
    rows = {name: sizes for name, *sizes in (re.split("  +", line.strip()) for line in lines[3:11])}
    assert [*rows] == ["weights", "float32 weights", *parts[2:7], "sum"]
    assert rows["sum"] == ["8.0 GiB"] * 3
    assert holds(" ".join(lines), "needs", "sum", "CUDA")
    memory["weights"] = 128  # buffers: every weight trains in float32
    estimate_table(found)
    assert next(line for line in capsys.readouterr().err.splitlines() if "weights" in line).split()[1:] == ["0"] * 3


@pytest.mark.parametrize(("terminal", "variable", "red"), [(True, "", True), (True, "1", False), (False, "", False)])
def test_errors_are_red_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, variable: str, red: bool
) -> None:
    out = StringIO()
    out.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("NO_COLOR", variable)
    say_error("", "no such folder")
    assert out.getvalue().startswith("\033[") == red
    assert re.sub("\033\\[[0-9;]*m", "", out.getvalue()) == "error: no such folder\n"


def test_shell_completion_can_be_installed(linearize: Command) -> None:
    code, out, _ = linearize("--help")
    assert code == 0
    assert "--install-completion" in out
