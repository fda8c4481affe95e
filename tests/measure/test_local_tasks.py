"""`linearize eval --tasks NAME=FILE`: well known tasks on data in files, with the harness's prompts."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import Command, holds
from training import base, byte_tokenizer, text
from transformers import AutoModelForCausalLM

from linearize.errors import Exit, LinearizeError
from linearize.measure import tasks
from linearize.measure.generate import load
from linearize.measure.tasks import Local, harness_model

QUESTION = {"question": "Which is hot?", "choices": ["ice ", "fire"], "label": 1}
# Rows as on the Hub, and the same in plain fields.
HUB: dict[str, dict[str, Any]] = {
    "lambada_openai": {"text": "He gave  the dog to Ann"},
    "piqa": {"goal": "Which is hot?", "sol1": "ice ", "sol2": "fire", "label": 1},
    "arc_easy": {
        "question": "Which is hot?", "choices": {"text": ["ice ", "fire"], "label": ["A", "B"]}, "answerKey": "B"
    },
    "hellaswag": {
        "activity_label": "Cooking", "ctx_a": "A man [title] cooks [step] one.", "ctx_b": "he",
        "endings": ["eats [substeps] it. [title] Then  rests.", " sleeps."], "label": "0",
    },
}  # fmt: skip
HUB["arc_challenge"] = HUB["arc_easy"]
PLAIN: dict[str, dict[str, Any]] = {
    "lambada_openai": {"context": "He gave  the dog to", "continuation": "Ann"},
    **dict.fromkeys(("piqa", "arc_easy", "arc_challenge"), QUESTION),
    "hellaswag": {
        **{key: HUB["hellaswag"][key] for key in ("activity_label", "endings")},
        "ctx": "A man [title] cooks [step] one. He", "label": 0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with a tokenizer of bytes, its source beside it."""
    pytest.importorskip("lm_eval")
    return base(tmp_path_factory.mktemp("local"), "llama", layers="0")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def requests(config: dict[str, Any], shots: int = 0) -> tuple[list[Any], Any, list[str]]:
    """What a task of the harness asks of its first row: prompts and answers, the right one, the metrics."""
    from lm_eval.api.task import ConfigurableTask

    task = ConfigurableTask(config={**config, "metadata": None})
    doc = next(iter(task.eval_docs))
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(1)
    made = task.construct_requests(doc, task.fewshot_context(doc, shots))
    asked = [one.args for one in (made if isinstance(made, list) else [made])]
    return asked, task.doc_to_target(doc), sorted(task.aggregation())


@pytest.mark.parametrize("name", HUB)
def test_prompts_answers_and_metrics_are_those_of_the_harness(tmp_path: Path, name: str) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from datasets import Dataset
    from lm_eval.tasks._yaml_loader import load_yaml

    path = next((Path(lm_eval.__file__).parent / "tasks").glob(f"*/{name}.yaml"))
    data = dict.fromkeys(("test", "validation", "train"), Dataset.from_list([HUB[name]]))
    theirs = requests({**load_yaml(path), "custom_dataset": lambda **_: data})
    for row in (HUB[name], PLAIN[name]):
        ours = tasks.spec(Local(name, write(tmp_path / "rows.jsonl", row)))
        assert ours is not None
        found = requests(ours)
        assert (found[0], found[2]) == (theirs[0], theirs[2])
        assert str(found[1]) == str(theirs[1])


def test_the_row_that_is_asked_is_none_of_the_examples(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = [{**QUESTION, "question": f"Question {number}?"} for number in range(3)]
    config = tasks.spec(Local("piqa", write(tmp_path / "rows.jsonl", *rows)))
    assert config is not None
    (prompt, _), *_ = requests(config, shots=2)[0]
    assert sorted(prompt.count(row["question"]) for row in rows) == [1, 1, 1]


@pytest.mark.slow
def test_student_and_teacher_side_by_side(linearize: Command, folder: Path, tmp_path: Path) -> None:
    """No index of the harness is read, and no Hub asked; figures are those of the logits."""
    source, texts = folder.parent / "source", [text(5, seed) for seed in range(3)]
    prose = write(tmp_path / "prose.jsonl", *({"text": one} for one in texts))
    piqa = write(tmp_path / "piqa.jsonl", HUB["piqa"], QUESTION)
    (tmp_path / "hay.txt").write_text(text(100))
    asked = f"piqa={piqa}, rolling_perplexity={prose},needle={tmp_path / 'hay.txt'}"
    lambada = write(tmp_path / "lambada.jsonl", HUB["lambada_openai"], PLAIN["lambada_openai"])
    options = ("--teacher", source, "--lengths", "64,96", "--trials", "4", "--json")
    code, out, err = linearize("eval", folder, "--tasks", f"{asked},lambada_openai={lambada}", *options)
    assert code == 0, err
    assert "Traceback" not in err  # of forks that bootstrap
    told = json.loads(out)
    assert told["files"]["piqa"] == str(piqa)
    rows = {row["task"]: row for row in told["tasks"]}
    assert {name: row["rows"] for name, row in rows.items()} == {
        "piqa": 2, "rolling_perplexity": 3, "lambada_openai": 2, "needle_64": 4, "needle_96": 4
    }  # fmt: skip
    for name, wanted in (("piqa", {"acc", "acc_norm"}), ("lambada_openai", {"acc", "perplexity"})):
        assert {one["metric"] for one in rows[name]["metrics"]} == wanted
    for row in rows.values():
        for one in row["metrics"]:
            for who in ("student", "teacher"):
                assert one[f"{who}_error"] is not None, (row["task"], one)
    measured = {one["metric"]: one for one in rows["rolling_perplexity"]["metrics"]}
    for who, model in (("student", folder), ("teacher", source)):
        logs, sizes = log_likelihoods(model, texts), [len(one) for one in texts]
        one = measured["byte_perplexity"]
        assert one[who] == pytest.approx(math.exp(-sum(logs) / sum(sizes)), rel=1e-4)
        # The spread of the estimate where one document at a time is left out: the jackknife.
        left = [math.exp(-(sum(logs) - logs[out]) / (sum(sizes) - sizes[out])) for out in range(len(texts))]
        spread = math.sqrt(2 / 3 * sum((value - sum(left) / 3) ** 2 for value in left))
        assert one[f"{who}_error"] == pytest.approx(spread, rel=0.25)
    shown = [line for line in err.splitlines() if line.startswith("piqa ")]
    assert len(shown) == 2
    assert shown[0].count("±") == 2


def test_running_text_is_read_in_rows_no_longer_than_a_pass(folder: Path) -> None:
    """A row of the whole context, sixteen at a time, has filled the memory; questions still come in rows of 512."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    model, read = (
        load(str(folder), None, teacher=False, device="cpu", dtype="keep", trust_remote_code=True),
        list[tuple[int, ...]](),
    )
    hook = model.model.register_forward_pre_hook(lambda _, args: read.append(tuple(args[0].shape)))
    asked = [Instance("loglikelihood_rolling", {}, (text(60),), number) for number in range(20)]
    context = harness_model(model, 1).max_length
    for batch_tokens in (48, 4 * context):
        read.clear()
        harness = harness_model(model, batch_tokens)
        assert len(harness.loglikelihood_rolling(asked)) == 20
        assert max(length for _, length in read) == min(context, batch_tokens)
        assert max(rows * length for rows, length in read) <= batch_tokens
        assert (harness.max_length, harness.batch_size) == (context, max(1, batch_tokens // 512))
    hook.remove()


def log_likelihoods(folder: Path, texts: list[str]) -> list[float]:
    """Of whole texts, after the token that begins one."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval(), byte_tokenizer()
    found = []
    for one in texts:
        ids = [tokenizer.eos_token_id, *tokenizer(one)["input_ids"]]
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append(float(sum(scores[place, ids[place + 1]] for place in range(len(ids) - 1))))
    return found


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("lambada_openai", {"context": "a b"}, ("context", "continuation", "text")),
        ("lambada_openai", {"text": "one"}, ("space",)),
        ("piqa", {"goal": "a", "sol1": "b", "label": 0}, ("sol2", "question", "choices")),
        ("piqa", {**QUESTION, "label": 2}, ("label", "'2'", "0 to 1")),
        ("piqa", {**QUESTION, "label": -1}, ("label", "'-1'")),
        ("piqa", {**QUESTION, "label": True}, ("label", "'True'")),
        ("piqa", {**QUESTION, "choices": ["one"]}, ("two",)),
        ("piqa", {"goal": "a", "sol1": "b", "sol2": " ", "label": 0}, ("empty",)),
        ("arc_easy", {**HUB["arc_easy"], "answerKey": "E"}, ("answerKey",)),
        (
            "arc_easy",
            {"question": "a", "choices": {"text": ["b", "c", "d"], "label": ["A", "B"]}, "answerKey": "B"},
            ("length",),
        ),
        ("arc_easy", {"question": "a", "choices": ["b", "c"], "answerKey": "A"}, ("answerKey",)),
        ("hellaswag", {"activity_label": "a", "endings": ["b", "c"], "label": 0}, ("ctx_a", "ctx_b", "ctx")),
        ("hellaswag", {**PLAIN["hellaswag"], "ctx": 3}, ("ctx", "'3'")),
        ("rolling_perplexity", {"text": " "}, ("text",)),
        ("needle", {"page": "a"}, ("text", "page")),
    ],
)
def test_a_line_that_cannot_be_asked_is_named(tmp_path: Path, name: str, row: dict[str, Any], words: Any) -> None:
    good = PLAIN.get(name, {"text": "a"})
    path = write(tmp_path / "rows.jsonl", good, row)
    with pytest.raises(LinearizeError) as told:
        tasks.read_local(Local(name, path))
    assert told.value.code == Exit.USAGE
    assert holds(told.value.message, f"{path}:2", name, *words), told.value.message


def test_refusals_before_a_model_is_loaded(
    linearize: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    # An index of the harness's names takes seconds: none here is looked for there but `needle` alone.
    found = tasks.index(False)
    monkeypatch.setattr(tasks, "index", lambda own: found)
    path, empty, prose = write(tmp_path / "rows.jsonl", QUESTION), tmp_path / "none.jsonl", tmp_path / "prose.txt"
    empty.touch()
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "rows.jsonl.xz").write_bytes(lzma.compress(path.read_bytes()))
    prose.write_text("Words.")
    for names, message in (
        (f"lambada={path}", ("'lambada_openai'",)),
        (f"winogrande={path}", ("winogrande", ".yaml")),
        (f"piqa={tmp_path / 'row.jsonl'}", ("no such file", "/rows.jsonl'")),
        (f"piqa={tmp_path}", ("no such file",)),
        ("piqa=", ("piqa=FILE",)),
        (f"piqa={path},piqa={tmp_path / 'rows.jsonl.gz'}", ("piqa", "twice")),
        (f"piqa={tmp_path / 'rows.jsonl.xz'}", (".jsonl.gz", "compressed", "unpack")),
        (f"piqa={empty}", ("no rows",)),
        (f"piqa={prose}", ("question, choices and label",)),
        (f"arc_easy={path},hellaswag={path}", (f"{path}:1", "hellaswag", "ctx")),
        ("needle", ("needle=FILE",)),
    ):
        code, _, err = linearize("eval", folder, "--tasks", names)
        assert (code, holds(err, *message)) == (Exit.USAGE, True), err
    code, _, err = linearize("eval", folder, "--tasks", f"piqa={path}", "--trials", "2")
    assert (code, holds(err, "--trials")) == (Exit.USAGE, True), err
    code, _, err = linearize("eval", folder, "--tasks", f"piqa={path}", "--few-shot", "1")
    assert (code, holds(err, "--few-shot", "piqa", "1 row")) == (Exit.USAGE, True), err
    code, _, err = linearize("eval", folder, "--tasks", f"needle={prose}", "--generate", "2")
    assert (code, holds(err, "--generate")) == (Exit.USAGE, True), err


def test_a_text_too_short_for_needles(linearize: Command, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "hay.txt").write_text("Words.")
    code, _, err = linearize("eval", folder, "--tasks", f"needle={tmp_path / 'hay.txt'}", "--lengths", "64")
    assert (code, holds(err, "hay.txt", "64", "longer")) == (Exit.USAGE, True), err


def test_every_task_but_needles_has_its_file() -> None:
    files = {path.stem: yaml.safe_load(path.read_text()) for path in Path(tasks.__file__).parent.glob("*/*.yaml")}
    assert {name: config["task"] for name, config in files.items()} == {
        name: name for name in tasks.FORMS if name != tasks.NEEDLE
    }


def test_the_page_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs/evaluate.md").read_text("utf-8")
    for name, forms in tasks.FORMS.items():
        (row,) = [line for line in page.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1]]
        for field in (field for form in forms for field in form):
            assert f"`{field}`" in row, (name, field)
