"""`linearize eval --tasks`: lm-evaluation-harness measures, and `push` tells its results in the card."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import yaml
from conftest import Command, holds
from huggingface_hub import EvalResult, ModelCard, ModelCardData, constants, metadata_load
from training import base, byte_tokenizer, text
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from linearize.checkpoint.card import with_tasks
from linearize.checkpoint.manifest import identity
from linearize.errors import Exit, LinearizeError
from linearize.hub.push import results_of
from linearize.measure import tasks
from linearize.recipe.recipe import load_recipe

ROWS = [{"q": text(6, seed), "choices": text(4, 100 + seed).split()[:2], "a": seed % 2} for seed in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with a tokenizer of bytes, its source beside it."""
    pytest.importorskip("lm_eval")
    return base(tmp_path_factory.mktemp("tasks"), "llama", layers="0")


def task(place: Path, name: str = "words", **changes: Any) -> Path:
    """A file with a task whose data lie beside it."""
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    config = {"task": name, "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "choices"}
    config |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(place / "rows.jsonl")}}}
    config |= {"test_split": "test", "doc_to_target": "a", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    path = place / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return path


def accuracy(folder: Path, rows: list[dict[str, Any]], before: str = "") -> float:
    """How often a model finds the right one of two answers the likelier."""
    model, encode = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval(), byte_tokenizer()

    def log_likelihood(question: str, answer: str) -> float:
        context, whole = (encode(one)["input_ids"] for one in (question, f"{question} {answer}"))
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
        return float(sum(scores[place - 1, whole[place]] for place in range(len(context), len(whole))))

    found = [[log_likelihood(before + row["q"], answer) for answer in row["choices"]] for row in rows]
    return sum(scores[row["a"]] == max(scores) for scores, row in zip(found, rows, strict=True)) / len(rows)


@pytest.mark.slow
def test_the_results_are_those_of_the_logits(
    linearize: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(
        "lm_eval.loggers.utils.subprocess.check_output", lambda command, **_: asked.append(command) or b""
    )
    output, source, run = tmp_path / "new" / "tasks.json", folder.parent / "source", tmp_path / "run"
    run.mkdir()
    settings = {"recipe": load_recipe("demo", [f"model.base={source}"]).resolved(), "folder": str(tmp_path)}
    (run / "run.json").write_text(json.dumps(settings))  # a run names its teacher
    code, out, err = linearize("eval", folder, "--tasks", task(tmp_path), "--recipe", run, "-o", output, "--json")
    assert code == 0, err
    assert not [command for command in asked if command[0] == "git"]  # it prints an error outside a repository
    told = json.loads(out)
    assert json.loads(output.read_text()) == told
    assert told["model"] == identity(folder)
    (row,) = told["tasks"]
    assert (row["task"], row["rows"], row["of_rows"], row["few_shot"], row["dataset"]) == ("words", 12, 12, 0, None)
    metric = next(one for one in row["metrics"] if one["metric"] == "acc")
    assert metric["student"] == pytest.approx(accuracy(folder, ROWS))
    assert metric["teacher"] == pytest.approx(accuracy(source, ROWS))
    assert metric["student_error"] > 0
    shown = next(line.split() for line in err.splitlines() if line.startswith("words  acc "))
    figures = [f"{metric[who]:.3f} ± {metric[f'{who}_error']:.3f}" for who in ("student", "teacher")]
    assert shown[2:] == ["0", "12", *" ".join(figures).split()]


def test_some_rows_behind_examples(
    linearize: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of two tasks: its mean is shown, its parts are in the JSON."""
    from lm_eval.tasks import TaskManager

    (tmp_path / "one.jsonl").write_text(json.dumps(ROWS[0]))
    files = {"test": str(tmp_path / "rows.jsonl"), "train": str(tmp_path / "one.jsonl")}
    for name in ("left", "right"):
        task(tmp_path, name, dataset_kwargs={"data_files": files}, fewshot_split="train")
    group = {"group": "both", "task": ["left", "right"], "aggregate_metric_list": [{"metric": "acc"}]}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(group))
    known = TaskManager(include_path=tmp_path, include_defaults=False)
    monkeypatch.setattr(tasks, "index", lambda own: known)
    options = ("--limit", "5", "--few-shot", "1", "--batch-tokens", "1024", "--json")
    code, out, err = linearize("eval", folder, "--tasks", "both", *options)
    assert code == 0, err
    told = json.loads(out)
    assert (told["limit"], told["teacher"]) == (5, None)
    assert {row["task"]: row["part_of"] for row in told["tasks"]} == {"both": None, "left": "both", "right": "both"}
    shown = [line.split()[0] for line in err.splitlines() if " acc " in line]
    assert shown == ["both"]
    example = f"{ROWS[0]['q']} {ROWS[0]['choices'][ROWS[0]['a']]}\n\n"
    row = next(row for row in told["tasks"] if row["task"] == "left")
    assert (row["rows"], row["of_rows"], row["few_shot"]) == (5, 12, 1)
    assert row["metrics"][0]["student"] == pytest.approx(accuracy(folder, ROWS[:5], example))
    assert "\r" not in err  # what draws a bar
    assert "teacher" not in row["metrics"][0]


@pytest.mark.slow
def test_tasks_that_cannot_be_run(linearize: Command, folder: Path, tmp_path: Path) -> None:
    unsafe, images = task(tmp_path, "unsafe", unsafe_code=True), task(tmp_path, "images", doc_to_image="q")
    damaged = task(tmp_path, "damaged", test_split="nothing")
    gone = task(tmp_path, "gone", dataset_kwargs={"data_files": {"test": "no/rows.jsonl"}})
    for names, code, message in (
        ("arc_esy", Exit.USAGE, ("'arc_easy'",)),
        ("zzz_*", Exit.USAGE, ("lm_eval",)),
        (" , ", Exit.USAGE, ("--tasks",)),
        (tmp_path / "unsaef.yaml", Exit.USAGE, ("/unsafe.yaml'",)),
        (unsafe, Exit.USAGE, ("model", "wrote")),
        (images, Exit.INCOMPATIBLE, ("about", "images")),
        (gone, Exit.USAGE, ("no/rows.jsonl'",)),
        (damaged, Exit.USAGE, ("lm-evaluation-harness", "cannot")),
        ("hellaswa[g]", Exit.HUB, ("offline", "hellaswa[g]")),
    ):
        found, _, err = linearize("eval", folder, "--tasks", names)
        assert (found, holds(err, *message)) == (code, True), err


@pytest.mark.parametrize("error", [ConnectionError("no route"), OSError("no such dataset")], ids=["network", "data"])
@pytest.mark.parametrize("offline", [True, False])
def test_without_the_hub_a_task_of_ones_own_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception, offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    words = r"arc_easy.*\. A task of your own needs no Hub: --tasks words\.yaml"
    with pytest.raises(LinearizeError, match=words) as told, tasks.task_errors("arc_easy"):
        raise error
    assert told.value.code == Exit.HUB


def test_without_a_network_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` would ask again and again; why the Hub was not reached is said."""
    asked = []

    def away(repo: str, **_: Any) -> Exception:
        asked.append(repo)
        return ConnectionError("no route to host")

    def load(specs: list[str]) -> Any:
        assert datasets.config.HF_HUB_OFFLINE
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(tasks, "unanswered", away)
    found = SimpleNamespace(all_tasks=["arc_easy"], match_tasks=list, load=load)
    monkeypatch.setattr(tasks, "index", lambda own: found)
    with pytest.raises(LinearizeError, match=r"route.*your") as told:
        tasks.find_tasks("arc_easy", 1024, None, None)
    assert told.value.code == Exit.HUB
    assert asked == [tasks.ASKED]


def test_a_data_file_of_ones_own_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    gone = FileNotFoundError(f"Unable to find '{tmp_path}/row.jsonl'")  # as the package datasets says it
    words = (
        rf"--tasks own\.yaml: no such data file '{tmp_path}/row\.jsonl'\. Did you mean '{tmp_path}/rows\.jsonl'\? "
        "Relative paths"
    )
    with pytest.raises(LinearizeError, match=words) as told, tasks.task_errors("arc_easy, own.yaml"):
        raise gone
    assert told.value.code == Exit.USAGE
    assert holds(told.value.message, f"{Path.cwd()}")
    with pytest.raises(LinearizeError, match=r"task.*your") as told, tasks.task_errors("arc_easy"):
        raise gone
    assert told.value.code == Exit.HUB


def test_the_task_of_ones_own_in_the_error_is_that_of_the_page() -> None:
    about, lines = tasks.OWN_TASK.split("\n\n")
    page = (Path(__file__).parents[2] / "docs/evaluate.md").read_text("utf-8")
    assert f"```yaml\n{lines}\n```" in page
    assert f"`{about[about.index('{') :]}`" in page


@pytest.mark.slow
def test_a_task_that_fails_while_it_runs(
    linearize: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its questions, in its metric; what the model raises, and what the machine refuses, is not the task's."""
    short = task(tmp_path, "short", doc_to_text="{{q.split()[2].upper()}}")
    rows = [ROWS[0], {**ROWS[1], "q": "a b"}]  # the harness tries the first when it loads a task
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, _, err = linearize("eval", folder, "--tasks", short)
    assert (code, holds(err, "--tasks", "short", "UndefinedError")) == (Exit.USAGE, True), err
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    whole = task(tmp_path)
    with monkeypatch.context() as patched:  # as of a prompt of spaces alone, with some tokenizers
        patched.setattr("lm_eval.models.huggingface.HFLM._encode_pair", lambda *given: ([], [1]))
        code, _, err = linearize("eval", folder, "--tasks", whole)
    assert (code, holds(err, "--tasks", "words", "AssertionError")) == (Exit.USAGE, True), err

    def fails(error: Exception) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            raise error

        return run

    for place, error, found in (
        ("lm_eval.api.task.ConfigurableTask.process_results", ValueError("no answer"), Exit.USAGE),
        ("lm_eval.api.task.ConfigurableTask.process_results", MemoryError(), Exit.RESOURCE),
        ("lm_eval.models.huggingface.HFLM._model_call", ValueError("a shape"), Exit.BUG),
        ("lm_eval.models.huggingface.HFLM._model_call", torch.OutOfMemoryError("out of memory"), Exit.RESOURCE),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, fails(error))
            code, _, err = linearize("eval", folder, "--tasks", whole, "--limit", "2")
        assert code == found, err
        assert ("--tasks words: it fails on its rows (ValueError: no answer)" in err) is (found == Exit.USAGE), err


@pytest.mark.slow
def test_what_goes_with_tasks(linearize: Command, folder: Path, tmp_path: Path) -> None:
    for options, message in (
        (("--tasks", "arc_easy", "--trials", "2"), ("--trials", "--tasks")),
        (("--tasks", "arc_easy", "--recipe", "gsa"), ("teacher", "Leave")),
        (("--tasks", "arc_easy", "data.eval=null"), ("values", "choose")),
        (("--limit", "3", "--teacher", folder), ("--limit", "--tasks")),
        (("--few-shot", "0", "--teacher", folder), ("--few-shot", "--tasks")),
    ):
        code, _, err = linearize("eval", folder, *options)
        assert (code, holds(err, *message)) == (Exit.USAGE, True), err
    code, _, err = linearize("eval", folder, "--tasks", task(tmp_path), "--teacher", tmp_path / "nobody")
    assert (code, "no such folder" in err) == (Exit.INCOMPATIBLE, True), err
    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    code, _, err = linearize("eval", tmp_path / "bert", "--tasks", task(tmp_path))
    assert (code, "writes no text" in err) == (Exit.INCOMPATIBLE, True), err


@pytest.mark.parametrize("version", [None, "0.4.9"])
def test_a_harness_that_is_not_there_or_too_old(
    linearize: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    known = importlib.metadata.version

    def installed(name: str) -> str:
        if name != "lm_eval":
            return known(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    code, _, err = linearize("eval", folder, "--tasks", "arc_easy")
    assert code == Exit.RESOURCE
    assert 'pip install "lm-eval>=0.4.12"' in err
    assert ("Installed is 0.4.9" in err) is (version is not None)


def test_code_that_linearize_did_not_write_does_not_run(linearize: Command, folder: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(folder, tmp_path / "changed")
    ran = tmp_path / "ran"
    with (changed / "modeling_linearized.py").open("a") as file:
        file.write(f"\nopen({str(ran)!r}, 'w')\n")
    code, _, err = linearize("eval", changed, "--tasks", task(tmp_path))
    assert (code, ran.exists()) == (Exit.INCOMPATIBLE, False), err
    code, _, err = linearize("eval", changed, "--tasks", task(tmp_path), "--limit", "2", "--trust-remote-code")
    assert (code, ran.exists()) == (Exit.OK, True), err


# ---------------------------------------------------------------- in the card

METRIC = {"metric": "acc", "filter": "none", "higher_is_better": True, "student": 0.25, "student_error": 0.01}
ROW = {"task": "arc_easy", "version": 1.0, "part_of": None, "dataset": "allenai/ai2_arc", "config": "ARC-Easy"}
ROW |= {"split": "test", "few_shot": 0, "rows": 2376, "of_rows": 2376, "metrics": [METRIC]}
FOUND = {"student": "x", "teacher": "/srv/source", "harness": "0.4.13", "limit": None, "tasks": [ROW]}


@pytest.mark.slow
def test_a_card_tells_the_results(linearize: Command, folder: Path, tmp_path: Path) -> None:
    local = {**ROW, "task": "own", "dataset": None, "metrics": [{**METRIC, "teacher": 0.5, "teacher_error": None}]}
    part = {**ROW, "task": "part", "part_of": "mmlu", "config": "other"}
    path = tmp_path / "found.json"
    path.write_text(json.dumps({**FOUND, "model": identity(folder), "tasks": [ROW, part, local]}))
    code, out, err = linearize("push", folder, "user/repo", "--dry-run", "--json", "--eval", path)
    assert code == 0, err
    card = json.loads(out)["upload"]["card"]
    assert json.loads(out)["upload"]["files"]["README.md"] == len(card.encode())
    assert "| arc_easy | acc | 0 | 2,376 | 0.250 ± 0.010 |  |" in card
    assert "| own | acc | 0 | 2,376 | 0.250 ± 0.010 | 0.5 |" in card
    assert "| part |" not in card
    assert "Teacher: `source`" in card
    (tmp_path / "README.md").write_text(card)
    (model,) = metadata_load(tmp_path / "README.md")["model-index"]
    assert model["name"] == "repo"
    assert [one["dataset"]["name"] for one in model["results"]] == ["arc_easy", "part"]
    first = model["results"][0]
    where = {"name": "arc_easy", "type": "allenai/ai2_arc", "config": "ARC-Easy", "split": "test"}
    assert first["dataset"] == where
    assert (first["metrics"][0]["type"], first["metrics"][0]["value"]) == ("acc", 0.25)


def test_results_join_what_a_card_has(folder: Path) -> None:
    """Its own entries and text stay; the recipe stays last."""
    own = EvalResult("text-generation", "some/text", "some/text", "perplexity", 9.5)
    head = ModelCardData(license="mit", model_name="mine", eval_results=[own]).to_yaml()
    text = f"---\n{head}\n---\n\n# Mine\n\nWords.\n\n## Recipe\n\nversion: 1\n"
    joined = ModelCard(with_tasks(text, FOUND, "repo"))
    assert (joined.data.model_name, joined.data.license) == ("mine", "mit")
    assert [one.dataset_name for one in joined.data.eval_results] == ["some/text", "arc_easy"]
    assert joined.text.index("Words.") < joined.text.index("## Tasks") < joined.text.index("## Recipe\n\nversion: 1")


def test_a_run_has_its_results_beside_its_model(linearize: Command, folder: Path, tmp_path: Path) -> None:
    """RUN/tasks.json is found; with results of other weights, or of some rows, it is named and left out."""
    run = tmp_path / "run"
    final = shutil.copytree(folder, run / "final")
    assert results_of(final, None) == (None, "")
    for model, limit, reason in (
        (identity(final), None, ""),
        ("other", None, "other weights"),
        (identity(final), 9, "it has 9 rows of each task"),
    ):
        (run / "tasks.json").write_text(json.dumps({**FOUND, "model": model, "limit": limit}))
        (run / "run.json").unlink(missing_ok=True)
        assert results_of(final, None) == (None, "")  # no run
        (run / "run.json").write_text("{}")
        result, note = results_of(final, None)
        assert (result is None) is bool(reason)
        assert reason in note
        if reason:
            code, _, err = linearize("push", final, "user/repo", "--dry-run", "--eval", run / "tasks.json")
            assert (code, reason in err) == (Exit.USAGE, True), err
    code, _, err = linearize("push", run / "finl", "user/repo", "--dry-run")  # it has no weights to compare with
    assert (code, holds(err, f"'{run}/finl'", f"'{final}'")) == (Exit.INCOMPATIBLE, True), err
    part = {**FOUND, "model": identity(final), "without": "memory"}
    (tmp_path / "part.json").write_text(json.dumps(part))
    with pytest.raises(LinearizeError, match=r"part\.json: .*without its memory"):
        results_of(final, tmp_path / "part.json")
    (tmp_path / "text.json").write_text('{"student": "x", "student_ppl": 9.0}')
    with pytest.raises(LinearizeError, match=r"text\.json has what eval measured without --tasks.*report"):
        results_of(final, tmp_path / "text.json")
    for wrong in ("{}", '{"student": "x", "tasks": [{}]}', "[]", '{"tasks": []}'):
        (tmp_path / "wrong.json").write_text(wrong)
        with pytest.raises(LinearizeError, match="is damaged"):
            results_of(final, tmp_path / "wrong.json")
    with pytest.raises(LinearizeError, match=rf"'{tmp_path}/wrong\.json'"):
        results_of(final, tmp_path / "worng.json")


def test_a_model_is_known_by_its_weights(folder: Path, tmp_path: Path) -> None:
    """Also one that transformers saved: that has no linearize.json."""
    saved = tmp_path / "saved"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.save_pretrained(saved)
    first = identity(saved)
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(saved)
    assert identity(saved) == first
    with torch.no_grad():
        next(model.parameters()).add_(1)
    model.save_pretrained(saved)
    assert identity(saved) != first


def test_a_report_is_about_other_measures(linearize: Command, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "eval.json").write_text(json.dumps({"student": "x", "tasks": []}))
    code, _, err = linearize("report", tmp_path)
    assert (code, holds(err, "linearize", "push")) == (Exit.USAGE, True), err
