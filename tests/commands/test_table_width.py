"""Every table of the command line, with values as long as real ones, wraps on 80 columns between words alone."""

from __future__ import annotations

import ast
import inspect as python_inspect
import re
from collections.abc import Callable
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import save_source
from rich.console import Console

from linearize import commands
from linearize.commands.convert import choice_table, plan_table, windows_table
from linearize.commands.doctor import doctor_table
from linearize.commands.estimate import estimate_table
from linearize.commands.eval import answers_table, comparison_table, embeddings_table, tasks_table
from linearize.commands.finetune import recipe_table, report_table
from linearize.commands.inspect import converted_table, inspection_tables
from linearize.commands.mechanisms import mechanism_table, mechanisms_table
from linearize.commands.push import files_table
from linearize.commands.recipes import presets_table
from linearize.commands.runs import runs_table
from linearize.commands.verify import checks_table
from linearize.convert import plan_conversion
from linearize.demo import tour
from linearize.demo.tour import demo_table
from linearize.plan.keep import Choice, WindowChoice
from linearize.plan.mechanisms import describe, mechanism_names, summary
from linearize.probe.inspection import inspect_model
from linearize.recipe.presets import presets
from linearize.terminal import tables
from linearize.verify.checks import Check

# A result of each kind, with names as long as real ones.
PPL = {"student_ppl": 12345.678, "teacher_ppl": 11345.678, "ppl_ratio": 1.088, "kl": 0.0912}
POSITIONS = {"rows": 12, "text": "long", "trained_length": 4096, "blocks": [{"from": 65536, "to": 131072, **PPL}]}
REPEATS = [{"from": 0, "to": 0, "tokens": 9, **PPL}, {"from": 2049, "to": None, "tokens": 9, **PPL}]
ANSWER = {"student": {"accuracy": 0.5}, "teacher": {"accuracy": 1.0}, "length": 131072, "entries": 128}
FREELY = {who: {"recall": 0.5, "repeated": 0.125} for who in ("student", "teacher")}
ANSWERED = {**{who: {"ended": 0.5, "length": 99.5} for who in ("student", "teacher")}, "asked": 32, "same_end": 0.25}
COMPARED = {
    **PPL, "top1_agreement": 0.912, "repeats": REPEATS, "recall": [ANSWER], "needle": [ANSWER], "positions": POSITIONS,
    "generated": {**FREELY, "rows": 16, "length": 4096, "texts": 32, "answers": ANSWERED},
    "text": "wikitext-103-raw-v1",
    "read": 1048576, "tokens": 1048320,
    "state": [{"length": 131072, "student": 2.5e7, "teacher": 4e9}], "seq_len": 4096,
    "state_dtype": "float32", "dtypes": {"student": "bfloat16", "teacher": "float32"},
}  # fmt: skip
ANSWERS = {
    "kind": "images", "predicts": "classes", "labelled": 50000, "asked": 50001, "student_accuracy": 0.81,
    "teacher_accuracy": 0.83, **PPL, "top1_agreement": 0.9, "data": "imagenet-1k:validation",
}  # fmt: skip
CLASS_MAPS = ANSWERS | {"predicts": "parts", "labelled": 0}
NUMBERS = CLASS_MAPS | {"predicts": "numbers", "relative_error": 0.125}
EMBEDDINGS = {"passages": 1000, "data": "sentence-transformers/all-nli", "longest": 256, "same_answer": 0.875}
EMBEDDINGS |= {f"{figure}_{what}": 0.9765 for figure in ("spearman", "cosine") for what in ("sentences", "passages")}
EMBEDDINGS |= {f"{who}_found_{n}": 0.987 for who in ("student", "teacher") for n in (1, 10)}
METRIC = {"metric": "acc_norm", "filter": "none", "student": 0.5, "student_error": 0.01}
METRIC |= {"teacher": 0.51, "teacher_error": 0.01}
TASK = {"task": "arc_challenge", "few_shot": 25, "rows": 1172, "metrics": [METRIC], "part_of": None}
STAGE = {
    "name": "attention_transfer", "kind": "attention_transfer", "train": ["mixer", "lora", "norms"],
    "parameters": 123456789, "steps": 12500, "epochs": None, "tokens": 4e8, "lr": 0.0005, "new_lr": 0.00125,
    "teacher_copy_bytes": 16e9, "data": {"seq_len": 4096},
}  # fmt: skip
REPORT = {
    "teacher_ppl": 8.123, "teacher": {"model": "meta-llama/Llama-3.2-1B"}, "positions": POSITIONS,
    "stages": [{"name": "attention_transfer", "tokens": 400000000, "ppl": 9.1, "ppl_ratio": 1.12, "kl": 0.1}],
    "layers": [{"layer": 31, "relative_mse": 0.0123, "cosine": 0.9876}],
}  # fmt: skip
RUN = {
    "run": "llama-3.2-1b-gsa", "base": "meta-llama/Llama-3.2-1B", "mechanisms": ["gsa", "gla"], "kept": [3, 7, 11, 15],
    "at": "logit_kl, step 1200 of 12500", "tokens": 4e8, "ppl_ratio": 1.0123, "changed": "2026-11-25T10:00:00",
}  # fmt: skip
CHECKS = [
    Check("left padding without position_ids", "passed", "", 1.3e-6, 1e-4),
    Check("new weights", "failed", "all mixers are finite; 44 tensors have other bytes than linearize.json recorded"),
]
KL = {"linear": {"text": 0.5}, "kept": {"text": 0.1}}
CHOICE = Choice("1", "swaps", (3,), {"3": 0.123, "12": 0.0012}, "the demo's texts", 4096, 4, KL)
LOST = {"source_ppl": 7.8, "ppl": 8.1, "kl": 0.0123, "tokens": 1024.0, "length": 8192.0}
WINDOWS = WindowChoice(
    "auto:4096", 0.01, (3,), {"3": {"text": LOST, "recall": LOST}}, {"text": LOST, "recall": LOST}, "the demo's texts"
)
LEVEL = {"level": 0.25, "error": 0.5, "cosine": 0.9}
PARTS = ("weights", "masters", "gradients", "optimizer", "teacher", "activations", "logits", "total", "device")
COST = {
    "stages": [
        {"name": name, "memory": dict.fromkeys(PARTS, 3 << 30), "tokens_per_s": 123456.0, "hours": 33.5, "fits": True,
         "uncounted": "", "host_bytes": 0, "data": {"seq_len": 4096},
         "measured": {"tokens_per_s": 123456.0, "peak": 71 << 30}}
        for name in ("attention_transfer", "logit_kl", "feature_cosine")
    ],
    "device": {"name": "h100-80g", "count": 8, "memory": 80 << 30}, "disk": {"total": 1 << 30}, "hours": None,
    "kwh": None, "price": None,
}  # fmt: skip
TOLD = [
    ("passed", "torch 2.11.0 with CUDA 13.0"),
    ("optional", "lm-eval is not installed: pip install 'linearize[eval]'"),
]


def planned(folder: Path) -> Any:
    save_source(folder, num_hidden_layers=12)
    return plan_conversion(str(folder), "gsa", keep_softmax="1,11", options={"slots": 32, "window": 64})[0]


# What prints each table.
SHOWN: dict[str, Callable[[Path], Any]] = {
    "plan_table": lambda folder: plan_table(planned(folder)),
    "choice_table": lambda _: choice_table(CHOICE, "--keep-softmax"),
    "windows_table": lambda _: windows_table(WINDOWS),
    "inspection_tables": lambda folder: (planned(folder), inspection_tables(inspect_model(str(folder)))),
    "converted_table": lambda folder: converted_table(SimpleNamespace(plan=planned(folder), source="llama-3.2-1b-gsa")),
    "recipe_table": lambda _: recipe_table([STAGE, STAGE | {"name": "learn from the teacher's words"}]),
    "estimate_table": lambda _: estimate_table(COST),
    "report_table": lambda _: report_table(REPORT),
    "demo_table": lambda _: demo_table(
        {
            who: {"ppl": 123.4, "ppl_ratio": 1.5, "kl": 0.2, "needle": 0.5, "dtype": "bfloat16", "cache": {32768: 4096}}
            for who in WHO
        },
        "4,5",
    ),
    "positions_table": lambda _: tables.positions_table(POSITIONS),
    "repeats_table": lambda _: tables.repeats_table(REPEATS),
    "comparison_table": lambda _: comparison_table(COMPARED),
    "answers_table": lambda _: [answers_table(one) for one in (ANSWERS, CLASS_MAPS, NUMBERS)],
    "embeddings_table": lambda _: embeddings_table(EMBEDDINGS),
    "tasks_table": lambda _: tasks_table({"tasks": [TASK], "teacher": "softmax", "harness": "0.4.9"}),
    "prediction_table": lambda _: tables.prediction_table({"before": [LEVEL], "after": [LEVEL]}),
    "checks_table": lambda _: checks_table("llama-3.2-1b-gsa", CHECKS),
    "files_table": lambda _: files_table({"model-source-00001-of-00004.safetensors": 4 << 30}, "to user/repo"),
    "runs_table": lambda _: runs_table([RUN]),
    "mechanisms_table": lambda _: mechanisms_table([summary(name) for name in mechanism_names()]),
    "mechanism_table": lambda _: [mechanism_table(describe(name)) for name in mechanism_names()],
    "presets_table": lambda _: presets_table(presets()),
    "doctor_table": lambda _: doctor_table(TOLD),
}
WHO = ("teacher", "hybrid", "linear")


COMMANDS = [path.stem for path in Path(str(commands.__file__)).parent.glob("[a-z]*.py")]
# Files whose functions make tables.
FILES = [tables, tour, *(import_module(f"linearize.commands.{name}") for name in COMMANDS)]


def test_each_function_that_makes_a_table_is_here() -> None:
    functions = [node for file in FILES for node in ast.parse(python_inspect.getsource(file)).body]
    functions = [node for node in functions if isinstance(node, ast.FunctionDef) and node.name not in COMMANDS]
    makers = {
        one.name for one in functions if re.search(r"table\(columns|\.print\((tables\.)?table\(", ast.unparse(one))
    }
    assert makers - {"table", "compare"} == SHOWN.keys()


def test_no_other_file_makes_a_table_of_its_own() -> None:
    package = Path(tables.__file__).resolve().parents[1]
    makers = [path for path in package.rglob("*.py") if "rich.table" in path.read_text("utf-8")]
    assert makers == [Path(tables.__file__).resolve()]


@pytest.mark.parametrize("name", SHOWN)
def test_lines_end_between_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made: list[tuple[Any, set[str]]] = []
    real = tables.table

    def table(columns: dict[str, str], rows: Any, title: str | None = None) -> Any:
        cells = [list(row) for row in rows]
        words = {word for row in [list(columns), *cells] for cell in row for word in cell.split()}
        made.append((real(columns, cells), words))
        return real(columns, cells, title)

    for file in FILES:
        monkeypatch.setattr(file, "table", table, raising=False)
    SHOWN[name](tmp_path / "llama-3.2-1b")
    assert made
    for one, words in made:
        out = StringIO()
        Console(file=out, width=80).print(one)
        lines = out.getvalue().splitlines()
        assert all(len(line) <= 80 for line in lines)
        shown = {word for line in lines for word in line.split() if set(word) != {"─"}}
        assert {word for word in shown - words if not any(word in long for long in words if long_word(long))} == set()


def long_word(word: str) -> bool:
    """Whether a word, such as a path, may be cut."""
    return len(word) > tables.LONGEST_WORD


@pytest.mark.parametrize("columns", ["0", "1"])
def test_a_width_of_nothing_is_not_known(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some terminals and CI set such a one, of which tables were empty."""
    monkeypatch.setenv("COLUMNS", columns)
    assert tables.console().width == tables.results().width == 80
    presets_table(presets())
    assert "gsa" in "".join(capsys.readouterr())


def test_a_narrow_table_leaves_no_column_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells are broken instead."""
    monkeypatch.setenv("COLUMNS", "30")
    kinds = dict(zip("ABCDEF", ("text", "number", "short") * 2, strict=True))
    tables.results().print(tables.table(kinds, [tuple(letter * 7 for letter in "abcdef")]))
    shown = capsys.readouterr().out
    assert [shown.count(letter) for letter in "abcdefABCDEF"] == [7] * 6 + [1] * 6
