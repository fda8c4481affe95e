"""The command line as a person and a script meet it: speed, streams, colours, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, holds
from models import SMALL, convert_folder, save_source
from transformers import Olmo2Config

from linearize import __version__, cli
from linearize.errors import Exit, LinearizeError

ROOT = Path(__file__).resolve().parents[2]
COLOUR = re.compile(r"\x1b\[(\d+;)*[39][0-8][;\d]*m")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("cli") / "tiny", "mistral")


# ---------------------------------------------------------------- help


def processor_time(*words: str) -> float:
    """The seconds of processor time that a command of Python takes; other work of the machine lengthens it little."""
    child = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_help_answers_at_once(tmp_path: Path) -> None:
    """Beside the help of an empty app, since the machines that run this differ; importing torch alone takes ten."""
    empty = tmp_path / "empty.py"
    empty.write_text("import typer\napp = typer.Typer()\napp.command()(lambda: None)\napp()\n", "utf-8")
    pairs = [(processor_time("-m", "linearize", "--help"), processor_time(str(empty), "--help")) for _ in range(3)]
    assert min(ours for ours, _ in pairs) < 2.5 * min(theirs for _, theirs in pairs), pairs


# Runs each command in this process and says which packages it has imported then; the last is what a model class needs.
IMPORTS = """
import contextlib, json, sys
from linearize.cli import main
HEAVY = ["torch", "transformers", "transformers.modeling_utils", "accelerate", "torchao", "peft", "bitsandbytes",
         "datasets", "diffusers", "deepspeed", "linearize.train.runtime", "linearize.checkpoint.card"]
found = []
for words in json.loads(sys.argv[1]):
    if words is None:
        import transformers.modeling_utils
    else:
        sys.argv = ["linearize", *words]
        with contextlib.redirect_stdout(sys.stderr):
            try: main()
            except SystemExit as ended: assert not ended.code, (words, ended.code)
    found.append([name for name in HEAVY if name in sys.modules])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_commands_import_no_more_than_they_need(source: Path, tmp_path: Path) -> None:
    linear, run = convert_folder(source, tmp_path / "linear"), tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"recipe": {"name": "first", "model": {"base": str(linear)}}}), "utf-8")
    quick = [["--version"], ["--help"], ["convert", "--help"], ["mechanisms"], ["recipes", "ls"]]
    listing = [["runs", str(run.parent)]]
    models = [["inspect", str(source)], ["inspect", str(linear)]]
    models += [["convert", str(source), "--to", "gsa", "-o", str(tmp_path / "again"), "--verify", "none"]]
    commands = [*quick, *listing, None, *models]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, json.dumps(commands)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for words in ("--keep-softmax", "retnet", "first"):  # they did run
        assert words in done.stderr
    found = json.loads(done.stdout)
    assert found[: len(quick)] == [[]] * len(quick)
    assert found[len(quick)] == ["torch", "transformers"]
    # transformers imports accelerate and torchao with its model classes, where they are installed.
    needed, *later = found[len(quick) + 1 :]
    assert not {"peft", "bitsandbytes", "datasets", "linearize.train.runtime"} & set(needed)
    # Who writes a model writes a card, which imports recipes.
    assert later == [needed, needed, [*needed, "linearize.checkpoint.card"]]


ANSWERS: dict[str, tuple[list[str], int, str]] = {
    "help": (["--help"], 0, "convert"),
    "flag": (["convert", "--hepl"], Exit.USAGE, "--help"),
    "preset": (["finetune", "hybird"], Exit.USAGE, "'hybrid'"),
    "key": (["estimate", "hybrid", "model.bsae=demo"], Exit.USAGE, "'base'"),
    "folder": (["inspect", "./nowhere"], Exit.INCOMPATIBLE, "'./nowhere'"),
    "folder of a recipe": (["finetune", "hybrid", "model.base=./nowhere"], Exit.INCOMPATIBLE, "'./nowhere'"),
    "base of a conversion": (["convert", "hybrid", "model.base=./nowhere"], Exit.INCOMPATIBLE, "'./nowhere'"),
    "output": (["convert", "demo", "--to", "gsa", "-o", str(Path(__file__).parent)], Exit.USAGE, "--overwrite"),
    "dtype": (["generate", "demo", "Hi", "--dtype", "float31"], Exit.USAGE, "'float32'"),
    "device": (["eval", "demo", "--device", "cud"], Exit.USAGE, "'cuda'"),
    "part": (["eval", "demo", "--without", "windw"], Exit.USAGE, "'window'"),
    "check": (["convert", "demo", "--to", "gsa", "--verify", "kes"], Exit.USAGE, "'keys'"),
    "score": (["convert", "demo", "--to", "gsa", "--score-by", "swap"], Exit.USAGE, "'swaps'"),
    "mechanism": (["convert", "demo", "--to", "gas"], Exit.USAGE, "'gsa'"),
    "mechanism to show": (["mechanisms", "gas"], Exit.USAGE, "'gsa'"),
    "card": (["estimate", "hybrid", "model.base=demo", "--gpu", "h1000"], Exit.USAGE, "'h100'"),
    "price": (["estimate", "hybrid", "model.base=demo", "--price", "much"], Exit.USAGE, "--price"),
    "recipe of an evaluation": (["eval", "demo", "--recipe", "hybird"], Exit.USAGE, "'hybrid'"),
    "teacher": (["eval", "demo", "--teacher", "./nowhere"], Exit.INCOMPATIBLE, "'./nowhere'"),
    **{name: ([name, "./nowhere"], Exit.INCOMPATIBLE, "'./nowhere'") for name in ("eval", "verify", "serve")},
    "folder of no model": (["verify", str(Path(__file__).parent)], Exit.INCOMPATIBLE, "config.json"),
    "server": (["serve", "demo", "--server", "vlm"], Exit.USAGE, "'vllm'"),
    "export": (["export", "./nowhere", "--as", "gla"], Exit.INCOMPATIBLE, "'./nowhere'"),
    "push": (["push", "nowhere", "me/mine"], Exit.INCOMPATIBLE, "'nowhere'"),
    **{name: ([name, "nowhere"], Exit.USAGE, "nowhere") for name in ("upgrade", "report", "compare", "runs")},
}
ASK = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from linearize.cli import main
found = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:], out = words, io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    found.append([code, out.getvalue(), [name for name in ("torch", "transformers", "rich") if name in sys.modules]])
print(json.dumps(found))
"""


def test_what_is_wrong_at_once_is_told_without_torch() -> None:
    """Help, and a wrong flag, preset, key, folder or mechanism, need a tenth of the time that torch takes to import."""
    given = json.dumps([words for words, _, _ in ANSWERS.values()])
    done = subprocess.run([sys.executable, "-c", ASK, given], capture_output=True, text=True, check=True)
    for (name, (_, code, words)), (found, text, imported) in zip(ANSWERS.items(), json.loads(done.stdout), strict=True):
        assert (name, found, imported) == (name, code, [])
        assert words in text, text


def test_version(linearize: Command) -> None:
    assert linearize("--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convrt"], ("'convert'",)),
        (["convert", "model"], ("--to",)),
        (["convert", "model", "--to", "gsa", "--layer", "0"], ("--layers",)),
        (["finetune", "a.yaml", "--max-steps", "0"], ("--max-steps",)),
    ],
)
def test_wrong_usage_is_told_on_stderr(linearize: Command, arguments: list[str], message: str) -> None:
    code, out, err = linearize(*arguments)
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, *message)


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "demo", "--to", "la", "-o", ""],
        ["convert", "", "--to", "la"],
        ["convert", "demo", "--to", "la", "--keep-softmax", "auto:1", "--score-text", ""],
        ["verify", ""],
        ["upgrade", ""],
        ["upgrade", "x", "-o", " "],
        ["push", "", "user/repo"],
        ["runs", ""],
        ["report", ""],
        ["report", ".", "--eval", ""],
        ["compare", ".", ""],
        ["eval", "x", "--teacher", "y", "-o", ""],
        ["demo", "-o", ""],
        ["recipes", "cp", "gsa", ""],
        ["recipes", "validate", ""],
        ["finetune", ""],
        ["bench", "kernels", "--save", ""],
        *(["eval", "x", option, ""] for option in ("--teacher", "--recipe", "--tasks")),
    ],
    ids=" ".join,
)
def test_an_empty_name_is_not_this_folder(
    linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """A variable of the shell without a value becomes one, and Path reads it as the working directory."""
    monkeypatch.chdir(tmp_path)
    code, out, err = linearize(*arguments)
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, "empty", "Give")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- exit codes


@pytest.mark.parametrize("expected", [code for code in Exit if code not in (Exit.OK, Exit.INTERRUPTED)])
def test_an_error_is_one_message_and_its_exit_code(
    linearize: Command, monkeypatch: pytest.MonkeyPatch, expected: Exit
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise LinearizeError("the cause; the remedy", expected)

    monkeypatch.setattr("linearize.convert.plan_conversion", fail)
    assert linearize("convert", "model", "--to", "gsa") == (expected, "", "error: the cause; the remedy\n")


def test_an_interrupt_is_130(linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("linearize.convert.plan_conversion", interrupt)
    assert linearize("convert", "model", "--to", "gsa")[:2] == (Exit.INTERRUPTED, "")


# ---------------------------------------------------------------- threads


@pytest.mark.slow
@pytest.mark.parametrize(("given", "spins"), [({}, "0"), ({"GOMP_SPINCOUNT": "77"}, "77")])
def test_threads_that_wait_leave_the_core_unless_told_otherwise(given: dict[str, str], spins: str) -> None:
    """As the OpenMP of torch for Linux says when torch is imported."""
    code = "import sys; from linearize import cli; sys.argv[1:] = ['--version']\n"
    code += "try: cli.main()\nexcept SystemExit: import torch"
    environment = {name: value for name, value in os.environ.items() if name not in cli.WAITING}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **given}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    found = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if not found:
        pytest.skip("another OpenMP")
    assert found == [spins]


@pytest.mark.parametrize(
    ("arguments", "expected", "message"),
    [
        (["convert", "SOURCE", "--to", "gsaa"], Exit.USAGE, "unknown mechanism 'gsaa'. Did you mean 'gsa'?"),
        (["convert", "SOURCE", "--to", "gsa", "--set", "slot=8"], Exit.USAGE, "Did you mean 'slots'?"),
        (["convert", "SOURCE", "--to", "gsa", "--set", "slots=0"], Exit.USAGE, "slots=0: must be >= 1"),
        (["convert", "SOURCE", "--to", "gsa", "--layers", "0-9"], Exit.USAGE, "0-3"),
        (["convert", "SOURCE", "--to", "gsa", "--verify", "often"], Exit.USAGE, "auto, full, keys, none"),
        (["convert", "SOURCE", "--to", "gsa", "--dtype", "int8"], Exit.USAGE, "--dtype int8"),
        (["convert", "SOURCE", "--to", "gsa", "-o", "SOURCE"], Exit.USAGE, "SOURCE"),
        (["convert", "EMPTY", "--to", "gsa"], Exit.INCOMPATIBLE, "EMPTY"),
        (["finetune", "EMPTY/none.yaml"], Exit.USAGE, "none.yaml"),
    ],
)
def test_mistakes_leave_nothing_behind(
    linearize: Command, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], expected: Exit, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").mkdir()
    places = {"SOURCE": str(source)}
    before = sorted(path.name for path in source.iterdir())
    code, out, err = linearize(*(places.get(word, word) for word in arguments))
    assert (code, out) == (expected, "")
    assert places.get(message, message) in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["EMPTY"]
    assert sorted(path.name for path in source.iterdir()) == before


# ---------------------------------------------------------------- streams


def test_stdout_is_for_results_and_stderr_for_people(linearize: Command, source: Path, tmp_path: Path) -> None:
    plan = ("convert", source, "--to", "gsa", "--dry-run")
    code, out, err = linearize(*plan)
    assert (code, out) == (0, "")
    assert holds(err, "128k")
    code, out, told = linearize(*plan, "--json")
    assert code == 0
    assert told == err
    assert [step["mechanism"] for step in json.loads(out)["plan"]["steps"]] == ["gsa"] * 4

    output = tmp_path / "linear"
    code, out, err = linearize("convert", source, "--to", "gsa", "-o", output, "--verify", "keys", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["output"] == str(output)
    assert result["verified"] in err


@pytest.mark.parametrize("command", [("convert", "--to", "gsa", "--dry-run", "--keep-softmax", "1"), ("inspect",)])
def test_tables_of_layers_fit_a_terminal(
    linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """A name of every kind is whole, and layers that are alike share a row."""
    monkeypatch.setenv("COLUMNS", "80")
    olmo = Olmo2Config(**SMALL | {"num_hidden_layers": 16}, architectures=["Olmo2ForCausalLM"])
    olmo.save_pretrained(tmp_path / "olmo2")
    code, _, err = linearize(command[0], str(tmp_path / "olmo2"), *command[1:])
    assert code == 0, err
    assert "…" not in err
    assert all(len(line) <= 80 for line in err.splitlines() if "─" in line or "Olmo2Attention" in line)
    rows = [line for line in err.splitlines() if "Olmo2Attention" in line]
    assert all("model.layers.*.self_attn" in line for line in rows)
    assert err.count("'saga' is not") == (command[0] == "inspect")  # why it does not fit: once, not for each layer
    assert [row.split()[0] for row in rows] == (["0,2-15", "1"] if command[0] == "convert" else ["0-15"])


@pytest.mark.slow
def test_a_recipe_is_planned_without_training(linearize: Command, tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "demo.yaml"
    code, out, err = linearize("finetune", recipe, f"output_dir={tmp_path / 'run'}", "--dry-run", "--json")
    assert code == 0, err
    assert "teacher copy" in " ".join(err.split())
    stages = json.loads(out)["stages"]
    assert stages[0]["kind"] == "attention_transfer"
    assert all(stage["parameters"] > 0 for stage in stages)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("off", [None, "NO_COLOR", "--no-color"])
def test_colours_can_be_turned_off(
    linearize: Command, source: Path, monkeypatch: pytest.MonkeyPatch, off: str | None
) -> None:
    """The sliding windows that a linear layer drops are told in yellow."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1" if off == "NO_COLOR" else "")
    flags = [off] if off == "--no-color" else []
    code, _, err = linearize(*flags, "convert", source, "--to", "gsa", "--dry-run")
    assert code == 0, err
    assert "sliding" in err
    assert bool(COLOUR.search(err)) == (off is None)
