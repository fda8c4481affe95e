"""`linearize finetune`: options that do what they say, losses that add up, and what bad input is told."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import tracking
from conftest import Command, holds, relative_error, with_slow
from training import (
    BASES,
    T,
    base,
    byte_tokenizer,
    make_recipe,
    metrics,
    recipe_values,
    same,
    stage,
    tensors,
    train,
    write_data,
    write_recipe,
)  # fmt: skip
from transformers import AutoTokenizer

from linearize import cli
from linearize.checkpoint.manifest import read_plan
from linearize.checkpoint.source import open_source
from linearize.commands.finetune import evaluation_cells, report_table
from linearize.data.batches import collate, forward, targets
from linearize.data.documents import TextSource
from linearize.data.packing import build_blocks
from linearize.demo import model_folder
from linearize.errors import CheckFailedError, Exit, LinearizeError
from linearize.finetune import finetune
from linearize.job.dry_run import dry_run as estimated
from linearize.job.notes import next_commands
from linearize.measure.evaluate import random_teacher_warning
from linearize.page.record import read_run
from linearize.recipe.data import described
from linearize.recipe.models import Data
from linearize.recipe.recipe import Recipe, load_recipe
from linearize.terminal.output import nats
from linearize.terminal.tables import note_of_rows
from linearize.train.loop import StageLoop
from linearize.train.runs import Run
from linearize.train.runtime import make_schedule
from linearize.train.save import load_converted
from linearize.train.stages import end_to_end_loss
from linearize.train.student import Student

EVAL = {"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": T}}
CHAT = {"train": {"files": ["chat.jsonl"]}, "pack": {"seq_len": T}}
KINDS = [("attention_transfer", ["new", "lora"]), ("logit_kl", ["new", "lora"]), ("sft", "all")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def command(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `linearize finetune ...`, in this process."""
    old, sys.argv = sys.argv, ["linearize", "finetune", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    finally:
        sys.argv = old
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


# ---------------------------------------------------------------- sums over micro batches and processes


@pytest.mark.parametrize(
    ("kind", "parts"), [KINDS[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in KINDS[1:])], ids=str
)
def test_micro_batches_add_up_to_the_batch(kind: str, parts: Any, root: Path, tmp_path: Path) -> None:
    """However four blocks are divided, also where they hold different numbers of targets and of padding."""
    found = []
    for per_device, accumulate in ((4, 1), (2, 2), (1, 4)):
        place = tmp_path / str(per_device)
        batch = {"per_device": per_device, "gradient_accumulation_steps": accumulate}
        # A small rate: Adam turns rounding into a full step where a gradient is next to nothing.
        one = stage(kind, parts, batch=batch, steps=3, optimizer={"lr": 1e-3})
        train(make_recipe(place, base(root, "llama"), one, data=CHAT))
        found.append((torch.tensor(metrics(place)), tensors(place / "run" / "final")))
    (losses, weights), *others = found
    for theirs, tensors_of_other in others:
        torch.testing.assert_close(theirs, losses, rtol=1e-5, atol=0)
        for name, value in weights.items():
            assert relative_error(tensors_of_other[name], value) < 1e-3, name


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"name": "constant"}, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"name": "constant", "warmup_ratio": 0.2}, [0, 0.5, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"name": "linear"}, [1 - n / 10 for n in range(10)]),
        ({"name": "cosine"}, [(1 + math.cos(math.pi * n / 10)) / 2 for n in range(10)]),
        (
            {"name": "cosine_with_min_lr", "min_lr_ratio": 0.1},
            [0.1 + 0.9 * (1 + math.cos(math.pi * n / 10)) / 2 for n in range(10)],
        ),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_schedules(
    schedule: dict[str, Any], expected: list[float], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, base(root, "llama"), stage("logit_kl", steps=10, schedule=schedule))
    factor = make_schedule(recipe.stages[0], 10)
    assert [factor(n) for n in range(10)] == pytest.approx(expected)
    used, update = [], StageLoop._update

    def watched(loop: StageLoop, *arguments: Any) -> None:
        update(loop, *arguments)
        used.append(loop.optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(StageLoop, "_update", watched)
    train(recipe)
    assert metrics(tmp_path, "lr") == used == pytest.approx([1e-2 * f for f in expected])


@pytest.mark.parametrize(
    ("option", "value"), [("max_grad_norm", 1e-3), ("weight_decay", 0.5), ("betas", [0.5, 0.5]), ("lr", 1e-3)]
)
def test_optimizer_options_reach_the_optimizer(
    option: str, value: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    update = StageLoop._update

    def watched(loop: StageLoop, *arguments: Any) -> None:
        norms = torch.stack([p.grad.norm() for p in loop.parameters if p.grad is not None])
        seen.append(float(norms.norm()))
        update(loop, *arguments)
        (group,) = loop.optimizer.param_groups
        assert option == "max_grad_norm" or group[option] == (tuple(value) if option == "betas" else value)

    monkeypatch.setattr(StageLoop, "_update", watched)
    train(make_recipe(tmp_path, base(root, "llama"), stage("logit_kl", optimizer={"lr": 1e-2, option: value})))
    clip = value if option == "max_grad_norm" else 1.0
    assert seen == pytest.approx([min(norm, clip) for norm in metrics(tmp_path, "grad_norm")], rel=1e-3)


def test_new_parameters_may_have_a_learning_rate_of_their_own(root: Path, tmp_path: Path) -> None:
    model = base(root, "llama")
    before = tensors(model)
    moved = {}
    for name, rates in (
        ("both", {"lr": 1e-3}),
        ("new", {"lr": 1e-3, "new_lr": 1e-7}),
        ("old", {"lr": 1e-7, "new_lr": 1e-3}),
    ):
        recipe = make_recipe(tmp_path / name, model, stage("logit_kl", "all", optimizer=rates))
        train(recipe)
        after = tensors(tmp_path / name / "run" / "final")
        moved[name] = {
            kind: max(
                float((after[key] - before[key]).abs().max()) for key in before if (".mixer." in key) == (kind == "new")
            )
            for kind in ("new", "old")
        }
    assert moved["both"]["new"] > 1e-4
    assert moved["both"]["old"] > 1e-4
    assert moved["new"]["new"] < 1e-5 < 1e-4 < moved["new"]["old"]
    assert moved["old"]["old"] < 1e-5 < 1e-4 < moved["old"]["new"]


@pytest.mark.parametrize("budget", [{"steps": 3}, {"tokens": 5 * T}, {"epochs": 0.1}], ids=str)
def test_budgets(budget: dict[str, Any], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    run = StageLoop.run
    monkeypatch.setattr(StageLoop, "run", lambda loop, start: (lengths.append(len(loop.blocks)), run(loop, start)))
    each = {k: v for k, v in stage("logit_kl").items() if k != "steps"}
    train(make_recipe(tmp_path, base(root, "llama"), {**each, **budget}))
    steps = {"steps": 3, "tokens": 3, "epochs": math.ceil(0.1 * lengths[0] / 2)}[next(iter(budget))]
    assert metrics(tmp_path, "step") == list(range(1, steps + 1))
    assert metrics(tmp_path, "tokens") == [2 * T * n for n in range(1, steps + 1)]


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_bit(root: Path, tmp_path: Path, recwarn: Any) -> None:
    """Dropout on: the same random numbers are drawn again, in all layers and in the first one alone."""
    for on in (False, 1, True):
        stages = [stage(kind, parts, "gpt2") for kind, parts in KINDS]
        runtime = {"device": "cpu", "gradient_checkpointing": on}
        train(make_recipe(tmp_path / str(on), base(root, "gpt2"), *stages, runtime=runtime))
    for on in (1, True):
        assert metrics(tmp_path / str(on)) == metrics(tmp_path / "False")
        assert same(*(tensors(tmp_path / str(each) / "run" / "final") for each in (on, False)))
    assert not [w for w in recwarn if "checkpointing" in str(w.message)]


def test_gradient_checkpointing_is_on_only_when_asked(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no layer, in the first of two, and in both."""
    calls, counts = [], []
    original = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", torch.utils.checkpoint.checkpoint)
    for on in (False, 1, True):
        calls.clear()
        runtime = {"device": "cpu", "gradient_checkpointing": on}
        train(make_recipe(tmp_path / str(on), base(root, "llama"), stage("logit_kl"), runtime=runtime))
        counts.append(len(calls))
    assert counts == [0, 4, 8]


def test_evaluation(root: Path, tmp_path: Path) -> None:
    kinds = ["attention_transfer", "logit_kl"]
    recipe = make_recipe(
        tmp_path, base(root, "llama"), *map(stage, kinds), data=EVAL, eval={"every_steps": 3, "max_tokens": 2 * T}
    )
    report = train(recipe)
    entries = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    evaluated = [entry for entry in entries if "eval_ppl" in entry]
    places = [(entry["stage"], entry["step"]) for entry in evaluated]
    assert places == [("teacher", 0), ("converted", 0), *((kind, step) for kind in kinds for step in (3, 4))]
    assert {entry["eval_dtype"] for entry in evaluated} == {"float32"}
    assert report["teacher_ppl"] == evaluated[0]["eval_ppl"]
    assert [row["name"] for row in report["stages"]] == ["converted", *kinds]
    assert [row["tokens"] for row in report["stages"]] == [0, 8 * T, 16 * T]
    for row in report["stages"]:
        assert row["ppl_ratio"] == row["ppl"] / report["teacher_ppl"] != 1
    assert "eval_kl" not in evaluated[0]
    assert [row["kl"] for row in report["stages"]] == [evaluated[i]["eval_kl"] for i in (1, 3, 5)]
    assert report["stages"][0]["kl"] > report["stages"][1]["kl"] > 0
    assert report["positions"]["trained_length"] == T
    assert [block["to"] for block in report["positions"]["blocks"]] == [T, 2 * T, 4 * T, 8 * T]
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["linearize_trained_length"] == T
    assert [row["layer"] for row in report["layers"]] == [0, 1]
    assert all(row["relative_mse"] > 0 and -1 <= row["cosine"] <= 1 for row in report["layers"])
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report | {"output": "final"}
    with_more = train(make_recipe(tmp_path / "more", base(root, "llama"), stage("logit_kl"), data=EVAL), max_steps=3)
    assert with_more["teacher_ppl"] != report["teacher_ppl"]  # more than two blocks
    cards = [(folder / "run" / "final" / "README.md").read_text() for folder in (tmp_path, tmp_path / "more")]
    assert ["`linearize finetune`, CPU" in card for card in cards] == [True, False]
    assert "`linearize finetune --max-steps 3`, CPU" in cards[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in cards[0].splitlines() if line.startswith("|")]
    for row in report["stages"]:  # the card has perplexity, its ratio and KL of each stage, and by position
        assert [evaluation_cells(row, "tokens")[""], f"{row['ppl_ratio']:.4g}", nats(row["kl"])] in [
            [r[0], *r[4:6]] for r in rows if len(r) > 5
        ]
    for block in report["positions"]["blocks"]:
        figures = *(f"{block[key]:.4g}" for key in ("student_ppl", "teacher_ppl", "ppl_ratio")), nats(block["kl"])
        assert [f"{block['from']:,} to {block['to']:,}", *figures] in rows


def test_a_stage_is_beside_the_teacher_on_its_own_rows(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Longer rows have a lower perplexity: the teacher's at the start, in the first stage's rows, is another."""
    short = {"data": {"pack": {"seq_len": T // 4}}, "steps": 1}
    both = stage("attention_transfer", **short), stage("logit_kl", steps=1)
    report = train(make_recipe(tmp_path, base(root, "llama"), *both, data=EVAL))
    alone = train(make_recipe(tmp_path / "alone", base(root, "llama"), both[1], data=EVAL))
    first, last = report["stages"][-2:]
    assert first["teacher_ppl"] == pytest.approx(report["teacher_ppl"], rel=1e-6)
    assert last["teacher_ppl"] == pytest.approx(alone["teacher_ppl"], rel=1e-6)
    assert last["teacher_ppl"] != pytest.approx(report["teacher_ppl"], rel=1e-3)
    assert last["ppl_ratio"] == last["ppl"] / last["teacher_ppl"]
    run = read_run(tmp_path / "run")
    assert (run.ratio(), run.teacher_ppl) == (last["ppl_ratio"], last["teacher_ppl"])
    assert [ratio for _, ratio in run.over_teacher()] == [row["ppl_ratio"] for row in report["stages"]]
    note = "teacher's", f"{last['teacher_ppl']:.4g} (logit_kl)"
    capsys.readouterr()
    report_table(report)
    assert holds(" ".join(capsys.readouterr().err.split()), *note)
    assert holds((tmp_path / "run" / "final" / "README.md").read_text(), *note)
    assert not note_of_rows(alone["stages"], alone["teacher_ppl"])


@pytest.mark.slow
def test_the_first_figures_are_called_calibrated_where_calibration_ran(root: Path, tmp_path: Path) -> None:
    """Before it `linearize eval` finds other ones; mixers that were trained are not calibrated."""
    model = base(root, "llama")
    for name, told in (("first", "converted, calibrated"), ("again", "converted")):
        (tmp_path / name).mkdir()
        row = train(make_recipe(tmp_path / name, model, stage("logit_kl"), data=EVAL))["stages"][0]
        assert evaluation_cells(row, "tokens")[""] == told
        model = tmp_path / name / "run" / "final"
        assert f"| {told} | 0 |" in (model / "README.md").read_text()


def test_a_note_says_where_training_took_a_student_away_from_its_teacher(root: Path, tmp_path: Path) -> None:
    """By KL alone: cross entropy leads elsewhere on purpose."""
    for name, loss, expected in (("kl", {"kl": 1.0}, True), ("both", {"kl": 1.0, "ce": 1.0}, False)):
        far = stage("logit_kl", loss=loss, steps=2, optimizer={"lr": 1.0})
        (tmp_path / name).mkdir()
        report = train(make_recipe(tmp_path / name, base(root, "llama"), far, data=EVAL))
        assert report["stages"][-1]["kl"] > 1.02 * report["stages"][0]["kl"]
        noted = any("took the student away" in note for note in read_run(tmp_path / name / "run").notes)
        assert noted is expected


@pytest.mark.slow
def test_loss_weights_and_temperature(root: Path, tmp_path: Path) -> None:
    first = {}
    for name, loss in {
        "kl": {"kl": 1.0},
        "ce": {"kl": 0.0, "ce": 1.0},
        "both": {"kl": 2.0, "ce": 3.0},
        "warm": {"kl": 1.0, "temperature": 2.0},
    }.items():
        train(make_recipe(tmp_path / name, base(root, "llama"), stage("logit_kl", loss=loss, steps=1)))
        first[name] = metrics(tmp_path / name)[0]
    train(make_recipe(tmp_path / "sft", base(root, "llama"), stage("sft", steps=1)))
    assert first["ce"] == metrics(tmp_path / "sft")[0]
    assert first["both"] == pytest.approx(2 * first["kl"] + 3 * first["ce"])
    assert first["warm"] != pytest.approx(first["kl"], rel=1e-2)
    entry = json.loads((tmp_path / "both" / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert (entry["kl"], entry["ce"]) == pytest.approx((first["kl"], first["ce"]))


def test_kl_of_completions_alone(root: Path, tmp_path: Path) -> None:
    """The loss is the mean over the places that predict the assistant's tokens."""
    first = {}
    for only in (False, True):
        one = stage("logit_kl", steps=1, completion_only=only)
        recipe = make_recipe(tmp_path / str(only), base(root, "llama"), one, data=CHAT)
        train(recipe)
        first[only] = metrics(tmp_path / str(only))[0]
    assert first[True] != pytest.approx(first[False], rel=1e-2)
    model = load_converted(base(root, "llama"), torch.float32, False)
    source = TextSource(files=(tmp_path / "True" / "chat.jsonl",))
    blocks = build_blocks(source, byte_tokenizer(), T, tmp_path / "cache", sft=True, max_tokens=None)
    student, batch = Student(model), collate([blocks[0], blocks[1]], torch.device("cpu"))
    asked = targets(batch) != -100
    assert 0 < asked.sum() < batch["valid"].sum()
    tokens = torch.stack([batch["valid"].sum(), asked.sum()])
    loss, _ = end_to_end_loss(recipe.stages[0], student, batch, tokens, contextlib.nullcontext)
    with torch.no_grad():
        ours = forward(model, batch).log_softmax(-1)
        with student.as_teacher():
            theirs = forward(model, batch).log_softmax(-1)
    expected = (theirs.exp() * (theirs - ours)).sum(-1)[asked].mean()
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4)


def test_conversations_in_one_row_do_not_see_each_other(root: Path, tmp_path: Path) -> None:
    """Neither the student's linear layers nor the teacher's softmax; of answers alone and of all tokens."""
    write_data(tmp_path)
    model, source = (
        load_converted(base(root, "llama"), torch.float32, False),
        TextSource(files=(tmp_path / "chat.jsonl",)),
    )
    student = Student(model)
    for sft in (False, True):
        blocks = build_blocks(source, byte_tokenizer(), 4 * T, tmp_path / "cache", sft=sft, max_tokens=None)
        row = blocks[0]
        starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
        assert len(starts) > 2
        for who in (contextlib.nullcontext, student.as_teacher):
            with torch.no_grad(), who():
                whole = forward(model, collate([row], torch.device("cpu")))
                for start, end in itertools.pairwise([*starts, 4 * T]):
                    alone = {key: value[None, start:end] for key, value in row.items()}
                    torch.testing.assert_close(whole[:, start:end], forward(model, alone), rtol=1e-4, atol=1e-4)


def test_labels_are_smoothed(root: Path, tmp_path: Path) -> None:
    """As torch does it, over the places that have a target."""
    recipe = make_recipe(tmp_path, base(root, "llama"), stage("sft", "all", steps=1, smoothing=0.2), data=CHAT)
    train(recipe)
    model = load_converted(base(root, "llama"), torch.float32, False)
    source = TextSource(files=(tmp_path / "chat.jsonl",))
    blocks = build_blocks(source, byte_tokenizer(), T, tmp_path / "cache", sft=True, max_tokens=None)
    batch = collate([blocks[0], blocks[1]], torch.device("cpu"))
    wanted = targets(batch)
    tokens = torch.stack([batch["valid"].sum(), (wanted != -100).sum()])
    loss, _ = end_to_end_loss(recipe.stages[0], Student(model), batch, tokens, contextlib.nullcontext)
    logits = forward(model, batch).transpose(1, 2)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, wanted, label_smoothing=0.2))
    assert not torch.isclose(loss, torch.nn.functional.cross_entropy(logits, wanted), rtol=1e-5)


def test_sft_learns_what_the_assistant_says(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = []
    step = StageLoop._micro_batch

    def watched(loop: StageLoop, batch: Any, tokens: Any) -> Any:
        labels.append(batch["labels"])
        return step(loop, batch, tokens)

    monkeypatch.setattr(StageLoop, "_micro_batch", watched)
    own = {"train": {"files": ["chat.jsonl"]}}
    train(make_recipe(tmp_path, base(root, "llama"), stage("sft", "all"), stage("sft", "all", name="chat", data=own)))
    text, chat = torch.cat(labels[:4]), torch.cat(labels[4:])
    assert (text != -100).float().mean() > 0.9
    learned = byte_tokenizer().decode(chat[chat != -100])
    assert "q" not in learned
    assert ":" not in learned
    assert (chat != -100).any()


@pytest.mark.slow
def test_plain_text_files_and_a_stage_of_its_own_length(root: Path, tmp_path: Path) -> None:
    data = {"train": {"files": ["heldout.txt"]}, "pack": {"seq_len": T}}
    own = {"pack": {"seq_len": 2 * T}}
    recipe = make_recipe(tmp_path, base(root, "llama"), stage("logit_kl"), stage("sft", data=own), data=data)
    train(recipe)
    assert metrics(tmp_path, "tokens")[3:5] == [8 * T, 4 * T]


@pytest.mark.slow
def test_seed_orders_the_data(root: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        train(make_recipe(tmp_path / str(seed), base(root, "llama"), stage("logit_kl"), seed=seed))
    assert metrics(tmp_path / "1") != metrics(tmp_path / "2")


@pytest.mark.slow
def test_convert_is_part_of_a_run(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a softmax model to a verified one, by the command line with overrides; stderr shows no bars."""
    convert = {"mechanism": "gsa", "options": {"slots": 4}, "keep_softmax": "1"}
    source = base(root, "llama").parent / "source"
    recipe = write_recipe(tmp_path, source, stage("logit_kl"), convert=convert, data=EVAL)
    code, out, err = command(capsys, recipe, "finish.verify=true", "stages.logit_kl.steps=2", "--json")
    assert code == 0, err
    assert metrics(tmp_path, "step")[-2:] == [2, 2]  # a step and its evaluation
    report = json.loads(out)
    assert report["output"] == str(tmp_path / "run" / "final")
    assert report["stages"][-1]["name"] == "logit_kl"
    assert str(tmp_path) not in (tmp_path / "run" / "report.json").read_text()
    assert holds(err, "model's")
    assert holds(err, "reloaded", "linearize")
    assert "logit_kl 2/2" in err
    assert re.search(r"calibrated on \d+ tokens", err)
    assert holds(err, "evaluation", "follow")
    final, run = tmp_path / "run" / "final", tmp_path / "run"
    last = err.splitlines()[-1]
    assert last.startswith("Next: linearize ")
    assert [shlex.split(words) for words in last.removeprefix("Next: ").split("; ")] == [
        ["linearize", "generate", str(final), "Once upon a time"],
        ["linearize", "eval", str(final), "--recipe", str(run), "-o", str(run / "eval.json")],
        ["linearize", "push", str(final), "USER/NAME", "--dry-run"],
    ]
    assert not any(noise in err for noise in ("Loading weights", "it/s", "Warning", "%|"))


@pytest.mark.parametrize("keep", ["1", "auto:1"])
def test_data_are_looked_for_before_layers_are_compared_and_converted(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    """Both files, and the package that a dataset needs."""
    monkeypatch.setattr("linearize.job.start.convert", lambda *given, **named: pytest.fail("converts"))
    monkeypatch.setattr(
        "linearize.job.source.choosers", lambda scoring: {"choose": lambda *given: pytest.fail("compares")}
    )
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "datasets" else find(name))
    convert = {"mechanism": "gsa", "options": {"slots": 4}, "keep_softmax": keep}
    source = base(root, "llama").parent / "source"
    for data, words, code in (
        ({"eval": {"files": ["heldot.txt"]}}, "no such file", Exit.USAGE),
        ({"train": {"path": "some/dataset"}}, r"dataset some/dataset needs: pip install", Exit.RESOURCE),
    ):
        values = recipe_values(tmp_path, source, stage("logit_kl"), convert=convert)
        values["data"] |= data
        recipe = Recipe.model_validate(values)
        recipe._folder = tmp_path
        with pytest.raises(LinearizeError, match=words) as refused:
            finetune(recipe, say=print)
        assert refused.value.code == code
        assert not (tmp_path / "run").exists()


def test_a_base_that_fails_its_check_trains_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check runs while the model loads. In a folder that was there before, the next start converts again."""

    def failed(*arguments: Any) -> str:
        raise CheckFailedError("missing keys")

    monkeypatch.setattr("linearize.job.start.verify", failed)
    convert = {"mechanism": "gsa", "options": {"slots": 4, "chunk_size": 16}}
    source, finish = base(root, "llama").parent / "source", {"verify": True}
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckFailedError):
        train(make_recipe(tmp_path, source, stage("logit_kl", steps=1), convert=convert, finish=finish))
    assert not (tmp_path / "run" / "converted").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_no_clean_process_starts_where_none_is_wanted(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*arguments: Any, **options: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("linearize.verify.reload.clean_command", started)
    source = base(root, "llama").parent / "source"
    convert = {"mechanism": "gsa", "options": {"slots": 4, "chunk_size": 16}}
    train(make_recipe(tmp_path, source, stage("logit_kl", steps=1), convert=convert, finish={"verify": False}))
    with pytest.raises(AssertionError):
        train(make_recipe(tmp_path / "other", source, stage("logit_kl", steps=1), convert=convert, finish={}))


@pytest.mark.parametrize("copy", [False, True])
def test_a_run_copies_the_source_when_asked(copy: bool, root: Path, tmp_path: Path) -> None:
    source = base(root, "llama").parent / "source"
    convert = {"mechanism": "gsa", "options": {"slots": 4, "chunk_size": 16}, "copy_weights": copy}
    train(make_recipe(tmp_path, source, stage("logit_kl", steps=1), convert=convert))
    inode = (source / "model.safetensors").stat().st_ino
    shards = (tmp_path / "run").rglob("*.safetensors")
    assert (inode in {path.stat().st_ino for path in shards}) == (not copy)


def test_a_base_is_opened_once_and_may_be_the_working_directory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch of the Hub may move while a run goes on."""
    folder, opened = shutil.copytree(base(root, "llama"), tmp_path / "base"), []

    def once(*arguments: Any, **named: Any) -> Any:
        opened.append(arguments)
        return open_source(*arguments, **named)

    monkeypatch.setattr("linearize.job.source.open_source", once)
    monkeypatch.chdir(folder)
    report = train(make_recipe(tmp_path, Path(), stage("logit_kl", steps=1), output_dir="../runs/x"))
    final = {path.name for path in Path(report["output"]).iterdir()} - {"pictures"}
    assert (final, len(opened)) == ({path.name for path in base(root, "llama").iterdir()}, 1)


def test_what_does_not_belong_to_a_model_stays_in_the_base(root: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base(root, "llama"), tmp_path / "base"))
    ours = {path.name for path in folder.iterdir()}
    others = {"pytorch_model.bin", "pytorch_model.bin.index.json", "model.onnx", "model.gguf", "optimizer.pt"}
    others |= {"trainer_state.json", ".hidden.json", "run.log", "logs/events", "custom_generate/generate.txt"}
    others |= {"tool.jinja"}
    belongs = {"LICENSE", "NOTICE", "generation_config.json", "vocab.txt", "processor_config.json"}
    belongs |= {"additional_chat_templates/rag.jinja"}
    for name in (others | belongs) - ours:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    shutil.copyfile(folder / "model-mixers.safetensors", folder / "consolidated.safetensors")
    final = Path(train(make_recipe(tmp_path, folder, stage("logit_kl", steps=1)))["output"])
    there = {path.relative_to(final).as_posix() for path in final.rglob("*") if path.is_file()}
    assert {name for name in there if not name.startswith("pictures/")} == ours | belongs


# ---------------------------------------------------------------- dry run


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[dict[str, Any]]:
    code, out, err = command(capsys, *arguments, "--dry-run", "--json")
    assert code == 0, err
    return json.loads(out)["stages"]


@pytest.mark.slow
def test_dry_run_needs_a_config_and_no_more(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "config-only"
    source.mkdir()
    shutil.copyfile(base(root, "llama").parent / "source" / "config.json", source / "config.json")
    each = {k: v for k, v in stage("sft", "all").items() if k != "steps"}
    stages = [stage("attention_transfer"), stage("logit_kl", "mixer", tokens=1000), {**each, "epochs": 2.0}]
    convert = {"mechanism": "gsa", "options": {"slots": 8, "chunk_size": 16}}
    recipe = write_recipe(tmp_path, source, *stages, convert=convert, data={"train": {"path": "no/such"}})
    transfer, kl, sft = dry_run(capsys, recipe, "data.pack.seq_len=32")
    weights = {name: t.numel() for name, t in tensors(base(root, "llama")).items()}
    new = sum(n for name, n in weights.items() if ".mixer." in name)
    attention = sum(n for name, n in weights.items() if ".self_attn." in name)
    assert [row["parameters"] for row in (transfer, kl, sft)] == [new, attention, sum(weights.values())]
    assert [(row["steps"], row["tokens"]) for row in (transfer, kl, sft)] == [(4, 256), (16, 1024), (None, None)]
    assert sft["epochs"] == 2.0
    copies = [0, 4 * (attention - new), 4 * (sum(weights.values()) - new)]
    assert [row["teacher_copy_bytes"] for row in (transfer, kl, sft)] == copies
    assert [row["steps"] for row in dry_run(capsys, recipe, "data.pack.seq_len=32", "--max-steps", 3)] == [3, 3, 3]
    assert dry_run(capsys, recipe, "data.pack.seq_len=32", "--stage", "logit_kl") == [kl]
    assert holds(refusal(capsys, recipe, "--dry-run", "--stage", "logit_kll", code=Exit.USAGE), "'logit_kl'")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_dry_run_names_the_data(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], linearize: Command
) -> None:
    mix = {"mix": [{"source": {"files": ["train.jsonl", "short.txt"]}, "weight": 3}, {"source": {"demo": "train"}}]}
    stages = [stage("attention_transfer"), {**stage("sft", "all"), "data": {"train": mix}}]
    held = {"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": 32}}
    recipe = write_recipe(tmp_path, base(root, "llama"), *stages, data=held)
    first, second = (row["data"] for row in dry_run(capsys, recipe))
    assert first == {
        "train": "train.jsonl",
        "tokens": 256,
        "seq_len": 32,
        "eval": "heldout.txt",
        "eval_tokens": 65536,
    }
    forgotten = {**held, "eval": {"path": "some/dataset"}}
    code, _, err = linearize(
        "finetune", write_recipe(tmp_path / "a", base(root, "llama"), stages[0], data=forgotten), "--dry-run"
    )
    assert (code, holds(err, "data.eval")) == (0, True), err
    long = {**held, "pack": {"seq_len": 4096}}
    twice = [stage("sft", "all", name=name, tokens="40M") for name in ("a", "b")]
    other = write_recipe(tmp_path / "long", base(root, "llama"), *twice, data=long)
    code, out, err = linearize("finetune", other, "--dry-run", "--json")
    passes = math.ceil(json.loads(out)["stages"][0]["data"]["tokens"] / (other.parent / "train.jsonl").stat().st_size)
    assert holds(err, "step", "40M", f"{passes}")
    assert holds(err, "b", "4,096")
    assert second["train"] == "75% train.jsonl, short.txt + 25% Python's standard library without the held-out part"
    for arguments in (("finetune", recipe, "--dry-run"), ("estimate", recipe)):
        code, _, err = linearize(*arguments)
        words = " ".join(err.split())
        assert code == 0
        both = [
            "trains on train.jsonl in blocks of 32, 64 tokens a step: attention_transfer 256 tokens in whole steps",
            "trains on 75% train.jsonl",
            "evaluated on heldout.txt, at most 65.5k tokens",
        ]
        places = [words.index(line) for line in both]
        assert places == sorted(places)
        assert words.count("heldout.txt") == 1  # both stages have it


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"path": "some/set", "name": "en", "split": "train[:1%]"}, "some/set (en, train[:1%])"),
        ({"path": "some/set", "data_files": ["a/*.parquet"]}, "some/set (a/*.parquet, train)"),
        ({"files": [f"{n}.txt" for n in range(5)]}, "0.txt, 1.txt, 2.txt and 2 more files"),
        ({"files": [f"{n}.txt" for n in range(4)]}, "0.txt, 1.txt, 2.txt and 1 more file"),
        ({"images": "folder"}, "folder"),
        ({"arrays": "a.npz"}, "a.npz"),
    ],
)
def test_a_source_has_a_name_for_people(source: dict[str, Any], words: str) -> None:
    assert described(Data.model_validate({"train": source}).train) == words


@pytest.mark.parametrize("dtype", with_slow(["bfloat16", "float32", None], "float32"))
def test_a_base_that_is_rounded_is_told(root: Path, tmp_path: Path, dtype: str | None) -> None:
    source, messages = base(root, "llama").parent / "source", list[str]()
    convert = {"mechanism": "gsa", "options": {"slots": 8, "chunk_size": 16}}
    path = write_recipe(tmp_path, source, stage("attention_transfer", steps=1), convert=convert)
    recipe = load_recipe(path, [f"model.dtype={dtype or 'null'}"])
    wanted = ["the source's float32 weights are stored as bfloat16; model.dtype=null keeps float32"]
    for act in (lambda: estimated(recipe, messages.append), lambda: finetune(recipe, say=messages.append)):
        act()
        assert [line for line in messages if "weights are stored as" in line] == wanted * (dtype == "bfloat16")
        messages.clear()


@pytest.mark.slow
def test_a_dry_run_asks_once_for_data_of_the_hub(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose data nobody answers for stops after it converted; an estimate may be for another machine."""
    data = {"train": {"path": "some/set"}, "eval": {"path": "some/set", "split": "test"}}
    stages = [stage("logit_kl"), stage("sft", data={"train": {"path": "other/set"}})]
    recipe, messages, asked = make_recipe(tmp_path, base(root, "llama"), *stages, data=data), list[str](), list[str]()
    answers = dict[str, Exception]()
    monkeypatch.setattr("linearize.job.notes.unanswered", lambda path, dataset: asked.append(path) or answers.get(path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    estimated(recipe, messages.append, resume="auto")
    assert (asked, [line for line in messages if "stops" in line]) == (["some/set", "other/set"], [])
    answers["some/set"] = ConnectionError("no route")
    estimated(recipe, messages.append, resume="auto")
    (note,) = [line for line in messages if "stops" in line]
    assert holds(note, "ConnectionError", "some/set")
    assert len(asked) == 3
    estimated(recipe, messages.append)
    assert len(asked) == 3


@pytest.mark.slow
def test_text_that_is_trained_on_and_evaluated_on_is_told(root: Path, tmp_path: Path) -> None:
    """By what is read, however it is written: not of a file that stands for itself."""
    steps = [stage("logit_kl", steps=1), stage("sft", steps=1)]
    for train_on, told in (("../here/heldout.txt", True), ("train.jsonl", False)):
        parts = {"mix": [{"source": {"files": [name]}} for name in (train_on, "short.txt")]}
        data = {"train": parts, "eval": {"files": ["heldout.txt"]}}
        recipe, messages = make_recipe(tmp_path / "here", base(root, "llama"), *steps, data=data), list[str]()
        estimated(recipe, messages.append)
        finetune(recipe, say=messages.append, resume="never", only="logit_kl")
        note = "note: data.train and data.eval both read heldout.txt: nothing is held out"
        assert [line for line in messages if "held out" in line] == [note] * 2 * told


def test_dry_run_of_a_converted_base(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, base(root, "llama"), stage("logit_kl", ["new", "lora"]))
    (row,) = dry_run(capsys, recipe)
    assert row["teacher_copy_bytes"] == 0
    assert row["steps"] == 4


def test_what_is_next_names_the_teacher_that_a_run_does_not(root: Path, tmp_path: Path) -> None:
    """Of a run that converts nothing; what was pushed is not pushed again."""
    recipe = make_recipe(tmp_path, base(root, "llama"), stage("sft"), data=EVAL, finish={"push": "me/mine"})
    Path(recipe.output_dir).mkdir()
    shutil.copytree(base(root, "llama"), Path(recipe.output_dir) / "final")
    _, evaluate = next_commands(recipe).split("; ")
    words = shlex.split(evaluate)
    source = read_plan(base(root, "llama")).source
    assert words[words.index("--teacher") + 1] == "MODEL"  # the plan has its name without its place
    (recipe.folder / source).mkdir()
    (recipe.folder / source / "config.json").touch()  # eval finds it by itself
    assert "--teacher" not in next_commands(recipe)
    assert next_commands(make_recipe(tmp_path / "b", base(root, "llama"), stage("sft"))).count("linearize") == 1


def test_a_dry_run_says_what_a_converted_base_is_and_in_which_dtypes(root: Path, tmp_path: Path) -> None:
    """model.dtype is that of the weights in training; the result has the folder's."""
    folder, results = base(root, "llama"), list[int]()
    for dtype in ("bfloat16", "null"):
        messages: list[str] = []
        path = write_recipe(tmp_path / dtype, folder, stage("logit_kl", "all"))
        recipe = load_recipe(path, [f"model.dtype={dtype}", "runtime.precision=bf16"])
        results.append(estimated(recipe, messages.append)["disk"]["result"])
        assert "linear: gsa in layers 0-1" in messages
        told = [line for line in messages if "(model.dtype), and the result is saved in float32" in line]
        assert len(told) == (dtype == "bfloat16")
    stored = sum(t.numel() * t.element_size() for t in tensors(folder).values())
    assert results == [stored, stored]


@pytest.mark.slow
@pytest.mark.filterwarnings("error:teacher")  # the note says it, and better
def test_a_teacher_that_was_trained_is_told(root: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    for parts in (["new"], ["new", "lora"], ["new", "lora", "mixer"]):
        place = tmp_path / str(len(parts))
        finetune(make_recipe(place, base(root, "llama"), stage("logit_kl", parts, steps=1)), say=messages.append)
        assert not [line for line in messages if "the teacher is softmax" in line]
        estimated(make_recipe(place / "again", place / "run" / "final", stage("logit_kl")), messages.append)
        told = [line for line in messages if "as logit_kl trained them, and the teacher is softmax" in line]
        assert bool(told) == (len(parts) > 1)
        messages.clear()
    finetune(make_recipe(place / "most", place / "run" / "final", stage("logit_kl", steps=1)), say=messages.append)
    assert any("the teacher is softmax" in line for line in messages)
    messages.clear()
    apart = make_recipe(
        tmp_path / "a", base(root, "llama"), stage("sft", "lora", steps=1), finish={"merge_lora": False}
    )
    finetune(apart, say=messages.append)
    assert any(holds(line, f"saved {tmp_path / 'a/run/final'}", "LoRA", "adapter") for line in messages)
    estimated(make_recipe(tmp_path / "b", tmp_path / "a/run/final", stage("logit_kl")), messages.append)
    assert any(holds(line, "final/adapter", "not merged") for line in messages)


# ---------------------------------------------------------------- bad input


def refusal(capsys: pytest.CaptureFixture[str], recipe: Path, *arguments: str, code: Exit) -> str:
    """The message, after checking the exit code and that nothing was left behind."""
    found, out, err = command(capsys, recipe, *arguments)
    assert found == code, err
    assert not out
    assert "Traceback" not in err
    assert not (recipe.parent / "run").exists()
    return err


def test_a_typo_and_a_missing_recipe(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, base(root, "llama"), stage("logit_kl", optimizer={"lrr": 1e-3}))
    err = refusal(capsys, recipe, code=Exit.USAGE)
    assert "recipe.yaml:" in err
    assert holds(err, "stages[0].optimizer.lrr", "'lr'")
    assert "no recipe file" in refusal(capsys, tmp_path / "recipes.yaml", code=Exit.USAGE)


BAD: list[tuple[str, dict[str, Any], Exit, str]] = [
    ("lora target", {"stages": [stage("logit_kl", "lora", lora={"r": 2, "alpha": 2, "target_modules": ["q_prj"]})]},
     Exit.INCOMPATIBLE, "'q_prj' is no linear layer of .* Did you mean 'q_proj'"),
    ("drift", {"stages": [stage("logit_kl", "mixer"), stage("attention_transfer")]},
     Exit.USAGE, r"stages\[1\]: .* Put attention_transfer first"),
    ("two loras", {"stages": [stage("logit_kl", "lora"), stage("sft", "lora", lora={"r": 3, "alpha": 1})]},
     Exit.USAGE, r"stages\[1\].lora: differs"),
    ("reserved name", {"stages": [stage("logit_kl", name="teacher")]}, Exit.USAGE, "stages.0..name: 'teacher'"),
    ("cuda", {"runtime": {"device": "cuda"}}, Exit.RESOURCE, "torch sees no CUDA device"),
    ("fp16", {"runtime": {"device": "cpu", "precision": "fp16"}}, Exit.RESOURCE, "fp16 needs a GPU"),
    ("data", {"data": {"train": {"files": ["tran.jsonl"]}}}, Exit.USAGE, "/train.jsonl'?"),
    ("no base", {"model": {"base": "nowhere/at/all"}}, Exit.INCOMPATIBLE, "no such folder"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_does_not_fit_is_refused_before_training(
    changes: dict[str, Any], code: Exit, message: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = write_recipe(tmp_path, base(root, "llama"), stage("logit_kl"))
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | changes))
    assert re.search(message, refusal(capsys, recipe, code=code))


def test_blocks_are_no_longer_than_the_model_takes(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = base(root, "gpt2")
    recipe = write_recipe(tmp_path, folder, stage("logit_kl"), stage("sft", data={"pack": {"seq_len": 257}}))
    message = (
        "stages[1].data.pack.seq_len is 257, and LinearizedGPT2LMHeadModel takes at most 256 tokens. Set it to 256"
    )
    assert message in refusal(capsys, recipe, code=Exit.INCOMPATIBLE)


TRACKERS = {"tensorboard": True, "wandb": False, "trackio": False, "mlflow": False}  # which wants a folder


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_is_used_or_asked_for(
    tracker: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linearize.train.runtime.get_available_trackers", lambda: [])
    recipe = write_recipe(tmp_path, base(root, "llama"), stage("logit_kl"), track={"to": tracker})
    assert f"pip install {tracker}" in refusal(capsys, recipe, code=Exit.RESOURCE)


def track_two_stages(kind: str, root: Path, folder: Path) -> list[dict[str, Any]]:
    """Train two stages, of two and one steps, with that tracker; returns the lines of metrics.jsonl."""
    stages = stage("attention_transfer", steps=2), stage("logit_kl", steps=1)
    recipe = make_recipe(folder, base(root, "llama"), *stages, data=EVAL, track={"to": kind})
    assert train(recipe)["output"]
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


# What every tracker gets of those two stages, step by step, as the lines of metrics.jsonl have it.
TRACKED = {
    0: ("teacher/eval_ppl", "converted/eval_ppl", "converted/eval_kl"),
    1: ("attention_transfer/loss", "attention_transfer/lr"),
    2: ("attention_transfer/loss", "attention_transfer/eval_kl"),
    3: ("logit_kl/loss", "logit_kl/eval_kl", "logit_kl/eval_ppl"),
}


def logged_values(lines: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """The values of TRACKED in metrics.jsonl, by name and by step of the whole run."""
    found = {}
    for step, names in TRACKED.items():
        for name in names:
            kind, key = name.split("/")
            own = step - 2 if kind == "logit_kl" else step
            found[name, step] = next(
                one[key] for one in lines if (one["stage"], one["step"]) == (kind, own) and key in one
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wandb", "trackio"])  # the others have tests of their own
def test_a_tracker_gets_the_metrics(kind: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged, steps, config = {}, [], {}

    class Recorder(tracking.GeneralTracker):
        name, requires_logging_directory, main_process_only = kind, TRACKERS[kind], True

        def __init__(self, run: str, logging_dir: str | None = None, **kwargs: Any) -> None:
            super().__init__()
            assert (run, logging_dir is not None) == ("tiny", TRACKERS[kind])

        tracker = property(lambda self: self)

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            config.update(values)

        def log(self, values: dict[str, Any], step: int, **kwargs: Any) -> None:
            steps.append(step)
            logged.update({(name, step): value for name, value in values.items()})

    monkeypatch.setattr(tracking, "get_available_trackers", lambda: [tracking.LoggerType(kind)])
    monkeypatch.setattr("linearize.train.runtime.get_available_trackers", tracking.get_available_trackers)
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, kind, Recorder)
    monkeypatch.setattr("accelerate.accelerator.LOGGER_TYPE_TO_CLASS", tracking.LOGGER_TYPE_TO_CLASS)
    wanted = logged_values(track_two_stages(kind, root, tmp_path))
    assert {key: logged[key] for key in wanted} == wanted
    assert steps == sorted(steps)  # wandb and trackio leave out what comes at a step that is past
    assert config["stages.1.kind"] == "logit_kl"
    assert config["seed"] == 42
    assert all(isinstance(value, int | float | str) for value in config.values())
    assert str(tmp_path) not in str(config)


def test_tensorboard_gets_the_metrics(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = logged_values(track_two_stages("tensorboard", root, tmp_path))
    written = EventAccumulator(str(tmp_path / "run" / "tiny"))
    written.Reload()
    found = {(name, one.step): one.value for name in written.Tags()["scalars"] for one in written.Scalars(name)}
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)


@pytest.mark.slow
def test_mlflow_gets_the_metrics(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    wanted = logged_values(track_two_stages("mlflow", root, tmp_path))
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tiny")
    (run,) = client.search_runs([experiment.experiment_id])
    names = {name for name, _ in wanted}
    found = {(name, one.step): one.value for name in names for one in client.get_metric_history(run.info.run_id, name)}
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)
    assert run.data.params["stages.1.kind"] == "logit_kl"


@pytest.mark.slow
def test_a_teacher_that_guesses_is_named(root: Path, tmp_path: Path) -> None:
    """A random model has a perplexity near the size of its vocabulary; others are not warned of."""
    words = len(byte_tokenizer())
    assert "nearly random" in random_teacher_warning(words * 0.9, words)
    assert random_teacher_warning(words * 0.4, words) == ""
    recipe = make_recipe(tmp_path, base(root, "llama"), stage("logit_kl", steps=1), data=EVAL)
    told = list[str]()
    finetune(recipe, say=told.append)
    (warning,) = [line for line in told if line.startswith("warning: the teacher's perplexity")]
    assert "nearly random" in warning


def test_a_base_that_is_not_converted(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, base(root, "llama").parent / "source", stage("logit_kl"))
    for arguments in ([], ["--dry-run"]):
        assert holds(refusal(capsys, recipe, *arguments, code=Exit.INCOMPATIBLE), "convert", "section")


@pytest.mark.parametrize("change", ["other", "more", "auto_map", "tokenizer", "processor"])
def test_foreign_code_runs_only_when_trusted(
    change: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(base(root, "llama"), tmp_path / "base")
    if change in ("other", "more"):
        path = folder / ("attention_hooks.py" if change == "other" else "extra.py")
        with path.open("a") as file:
            file.write("\n# changed\n")
    elif change == "processor":
        own = {"auto_map": {"AutoImageProcessor": "someone/else--own.Processor"}}
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": own}))
    else:
        name = "config.json" if change == "auto_map" else "tokenizer_config.json"
        values = json.loads((folder / name).read_text())
        values.setdefault("auto_map", {})["AutoTokenizer"] = ["attention_hooks.Tokenizer", None]
        (folder / name).write_text(json.dumps(values))
    recipe = write_recipe(tmp_path, folder, stage("logit_kl"))
    for arguments in ([], ["--dry-run"]):
        err = refusal(capsys, recipe, *arguments, code=Exit.INCOMPATIBLE)
        assert "carries other code" in err
        assert "model.trust_remote_code: true" in err
    if change in ("other", "more"):
        assert command(capsys, recipe, "model.trust_remote_code=true")[0] == 0


def test_a_tokenizer_with_more_tokens_than_the_model(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the surplus is an added token that the data never has."""
    folder = shutil.copytree(base(root, "llama"), tmp_path / "base")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    train(make_recipe(tmp_path / "unused", folder, stage("logit_kl")))
    recipe = write_recipe(tmp_path, folder, stage("logit_kl"))
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "an <image> of much text " * 9}))
    vocabulary = BASES["llama"]["vocab_size"]
    message = f"makes token {vocabulary}, the model's embedding has {vocabulary} rows"
    assert message in refusal(capsys, recipe, code=Exit.INCOMPATIBLE)
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(folder)
    assert holds(refusal(capsys, recipe, code=Exit.INCOMPATIBLE), "belong", "together")


def test_out_of_memory_becomes_advice(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(loop: StageLoop, *arguments: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**30))
    monkeypatch.setattr(StageLoop, "_micro_batch", full)
    with pytest.raises(LinearizeError, match=r"1.0.*GiB.*first.*checkpoint") as caught:
        train(make_recipe(tmp_path, base(root, "llama"), stage("logit_kl")))
    assert caught.value.code == Exit.RESOURCE
    assert Run(make_recipe(tmp_path, base(root, "llama"), stage("logit_kl")), "auto").resume_from is None
