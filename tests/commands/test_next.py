"""What messages tell people to run, run: every `Next:` that commands print, and every command that messages name."""

from __future__ import annotations

import ast
import html
import json
import re
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from conftest import Command
from models import convert_folder, load, save_source
from training import BASES, byte_tokenizer, killed_after, stage, write_recipe

import linearize as package
from linearize.cli import app
from linearize.errors import Exit
from linearize.job.checks import check_fit, check_packages, check_text
from linearize.job.resolve import resolve

COMMAND = re.compile(r"\blinearize ([a-z]+)((?: (?:-{1,2}[a-z][\w-]*|[A-Z][\w/:@-]*|[\w.]+=\S+))*)")


# ---------------------------------------------------------------- Next


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with text in A.txt and B.txt, beside `a model` and a recipe that is in neither."""
    place, work = tmp_path / "elsewhere", tmp_path / "there"
    place.mkdir()
    byte_tokenizer().save_pretrained(save_source(tmp_path / "a model", **BASES["llama"]))
    data = {name: {"files": [file]} for name, file in (("train", "train.jsonl"), ("eval", "heldout.txt"))}
    convert = {"mechanism": "gsa", "options": {"slots": 4, "chunk_size": 16}}
    stages = [stage("logit_kl", steps=1)]
    changes = {"convert": convert, "data": {**data, "pack": {"seq_len": 32}}, "output_dir": "runs/one"}
    write_recipe(work, Path("../a model"), *stages, **changes)
    for name in ("A.txt", "B.txt"):
        (place / name).write_text((work / "heldout.txt").read_text())
    monkeypatch.chdir(place)
    return place


def told(err: str) -> str:
    """What follows the last `Next: `."""
    return err.rpartition("Next: ")[2]


def commands(text: str) -> list[list[str]]:
    """The commands in what was told, without the name of the program."""
    lines = [words for line in text.splitlines() for words in line.split("; ") if "linearize " in words]
    return [shlex.split(words[words.index("linearize ") :])[1:] for words in lines]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`finetune` refuses what it refuses, then ends: recipes that it would have trained."""
    found = list[Any]()

    def finetune(recipe: Any, **asked: Any) -> Any:
        with resolve(recipe, resume="auto") as job:
            check_packages(recipe)
            check_fit(job, job.model)
            check_text(recipe)
        found.append(recipe)
        raise typer.Exit

    monkeypatch.setattr("linearize.finetune.finetune", finetune)
    return found


@pytest.mark.parametrize("mechanism", ["gsa", "retnet", "window"])
def test_what_follows_a_conversion(elsewhere: Path, checked: list[Any], linearize: Command, mechanism: str) -> None:
    """With own text and less of it, as the message says to add."""
    code, _, err = linearize("convert", "../a model", "--to", mechanism, "-o", "the result", "--verify", "none")
    assert code == 0, err
    (words,) = commands(told(err))
    assert "the result" in " ".join(words)
    added = shlex.split(" ".join(re.findall(r"'data[^']*'|[a-z_.]+=\d\S*", told(err))))
    code, _, err = linearize(*words, *added)
    assert code == 0, (words, added, err)
    assert bool(checked) == (words[0] == "finetune")


def test_what_follows_a_copy_of_a_recipe(elsewhere: Path, checked: list[Any], linearize: Command) -> None:
    code, _, err = linearize("recipes", "cp", "gsa", "my copy.yaml")
    assert code == 0, err
    (words,) = commands(told(err))
    words = [word.replace("DIR", "../a model") for word in words if word != "--dry-run"]
    own = ["data.train={files: A.txt}", "data.eval={files: B.txt}", "data.pack.seq_len=32"]
    code, _, err = linearize(*words, *own)
    assert (code, len(checked)) == (0, 1), err


@pytest.mark.slow
def test_what_follows_a_run(elsewhere: Path, linearize: Command) -> None:
    """The recipe lies elsewhere, and its folders are relative to the working directory."""
    recipe = "../there/recipe.yaml"
    code, _, err = linearize("finetune", recipe)
    assert code == 0, err
    found = commands(told(err))
    assert [words[0] for words in found] == ["generate", "eval", "push"]
    for words in found:
        # The default lengths are too short for a tokenizer of bytes.
        more = ["--lengths", "512", "--trials", "1"] if words[0] == "eval" else []
        code, _, err = linearize(*[word.replace("USER/NAME", "user/name") for word in words], *more)
        assert code == 0, (words, err)


# ---------------------------------------------------------------- remedies


@pytest.mark.slow
def test_the_file_that_is_named_after_save_pretrained_is_the_one_to_remove(elsewhere: Path, linearize: Command) -> None:
    folder = convert_folder(elsewhere.parent / "a model", elsewhere / "out")
    load(folder).save_pretrained(folder)
    checks = (["push", "out", "user/name", "--dry-run"], ["verify", "out"])
    for words in checks:
        code, _, err = linearize(*words)
        assert code in (Exit.INCOMPATIBLE, Exit.CHECK_FAILED)
        named = re.search(r"Remove (\S+),", err.rpartition("error: ")[2])
        assert named, err
    Path(named[1]).unlink()
    for words in checks:
        code, _, err = linearize(*words)
        assert code == 0, err


MEASURE = ("--lengths", "512", "--trials", "1")  # the default lengths are too short for a tokenizer of bytes
DATA = ("data.train={files: A.txt}", "data.eval={files: B.txt}", "data.pack.seq_len=32")
# What provokes a message, the commands in it, and what these need beside it here.
REMEDIES: list[tuple[list[str], list[str], tuple[str, ...]]] = [
    (["verify", "../a model"], [r"convert \S.* --to gsa"], ("-o", "new", "--verify", "none")),
    (["finetune", ""], ["recipes ls"], ()),
    (["recipes", "validate", "seed=1"], ["recipes ls"], ()),
    (["recipes", "validate", "my copy.yaml"], [r"finetune '\S* \S*' model.base=DIR"], (*DATA, "--dry-run")),
    (["finetune", "gsa"], [r"recipes cp gsa mine\.yaml"], ()),
    (["compare", "the result"], [r"eval 'the result' .*? -o '.*?'", r"compare '.*?'"], MEASURE),
    (["compare", "../a model"], [r"eval STUDENT .*? -o eval\.json", r"compare eval\.json '.*?'"], MEASURE),
    (["report", "runs/one", "--eval", "cut short.json"], [r"eval STUDENT .*? -o '.*?'"], MEASURE),
    (["report", "runs/none"], ["runs"], ()),
    (["generate", "the result", "x", "--device", "cuda"], ["doctor"], ()),
    (["verify", "an old one"], [r"upgrade '.*?'"], ()),
    (
        ["push", "the result", "user/name", "--dry-run", "--eval", "of another.json"],
        [r"eval 'the result' --tasks NAMES -o '.*?'"],
        (),
    ),
    (["report", "runs/one"], [r"eval \S+ --recipe .*? -o \S+\.json", r"report runs/one"], MEASURE),
]


@pytest.mark.slow
def test_commands_in_messages_run_as_they_are_printed(elsewhere: Path, linearize: Command) -> None:
    """With names that have a space in them; capital words stand for what only a person knows."""
    convert_folder(elsewhere.parent / "a model", elsewhere / "the result")
    for words in (["finetune", "../there/recipe.yaml"], ["recipes", "cp", "gsa", "my copy.yaml"]):
        code, _, err = linearize(*words)
        assert code == 0, err
    (elsewhere / "cut short.json").write_text('{"student": "x", "tea')
    (elsewhere / "rows.jsonl").write_text('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n')
    measured = {"student": "x", "model": "0" * 64, "limit": None, "harness": "0.4", "teacher": None, "tasks": []}
    (elsewhere / "of another.json").write_text(json.dumps(measured))
    with tarfile.open(Path(__file__).parents[1] / "checkpoint" / "data" / "written-by-0.1.0.tar.xz") as archive:
        archive.extractall(elsewhere, filter="data")
    (elsewhere / "llama-gsa").rename(elsewhere / "an old one")
    known = {"STUDENT": "the result", "MODEL": "../a model", "model.base=DIR": "model.base=../a model"}
    known["NAMES"] = "piqa=rows.jsonl"
    wrong = []
    for provoking, patterns, more in REMEDIES:
        code, out, err = linearize(*provoking)
        told = f"{out} {err}" + html.unescape((elsewhere / "runs" / "one" / "report.html").read_text()) * (not code)
        for pattern in patterns:
            found = re.search(f"linearize ({pattern})", " ".join(told.split()))
            words = [known.get(word, word) for word in shlex.split(found[1])] if found else []
            code, _, err = linearize(*words, *(more if pattern == patterns[0] else ())) if found else (1, "", told)
            wrong += [(provoking, words, err[-1000:])] * bool(code)
    assert not wrong, wrong


@pytest.mark.slow
def test_the_checkpoint_that_is_named_takes_other_values(
    elsewhere: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["finetune", "../there/recipe.yaml", "output_dir=some runs/one", "stages.logit_kl.steps=2"]
    words.append("checkpoint.every_steps=1")
    with killed_after(1, monkeypatch):
        assert linearize(*words)[0] == Exit.INTERRUPTED
    code, _, err = linearize(*words, "stages.logit_kl.optimizer.lr=1e-4")
    assert code == Exit.USAGE
    named = re.search(r"--resume '.*?'", err)
    assert named, err
    code, _, err = linearize(*words, "stages.logit_kl.optimizer.lr=1e-4", *shlex.split(named[0]))
    assert code == 0, err


def literals(node: ast.AST) -> Iterator[str]:
    """Each string of a module, X where it holds a value; no docstrings."""
    documented = {
        id(one.body[0].value)
        for one in ast.walk(node)
        if isinstance(one, ast.Module | ast.FunctionDef | ast.ClassDef)
        and one.body
        and isinstance(one.body[0], ast.Expr)
    }
    parts = {
        id(part) for one in ast.walk(node) if isinstance(one, ast.JoinedStr) for part in ast.walk(one)
    } - documented
    for one in ast.walk(node):
        if isinstance(one, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in one.values)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in parts | documented:
            yield one.value


def remedies() -> list[str]:
    """What messages, help texts and cards tell people to run."""
    found = set[str]()
    for path in Path(package.__file__).parent.rglob("*.py"):
        for text in literals(ast.parse(path.read_text("utf-8"))):
            found |= {match[0] for match in COMMAND.finditer(text)}
    return sorted(found)


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """Options of each command; of a group those of all in it."""
    group: Any = typer.main.get_command(app)
    flags = {}
    for name, command in group.commands.items():
        parts = [command, *getattr(command, "commands", {}).values()]
        flags[name] = {
            flag for part in parts for option in part.params for flag in (*option.opts, *option.secondary_opts)
        }
    return flags


def test_commands_that_messages_name_exist(known: dict[str, set[str]]) -> None:
    """With the options that they name."""
    found = [(remedy, *remedy.split()[1:]) for remedy in remedies()]
    assert len({name for _, name, *_ in found if name in known}) > 12
    wrong = []
    for remedy, name, *words in found:  # a sentence may go on after the name: linearize writes, converts, did not
        flags = [word.rstrip(":'\")") for word in words if word.startswith("-")]
        wrong += [remedy for flag in flags if flag not in known.get(name, ())]
    assert not wrong, wrong
