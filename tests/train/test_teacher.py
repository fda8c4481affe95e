"""A teacher that the recipe names: another model of the same tokenizer, or its likeliest tokens read from disk."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forks import Forks, Task
from models import convert_folder, small_model
from safetensors.torch import load_file
from training import EOS, SMALL, VOCAB, T, base, byte_tokenizer, make_recipe, metrics, same, stage, tensors, train
from training import write_recipe as recipe_file
from transformers import AutoModelForCausalLM, ViTConfig, ViTForImageClassification

import linearize.logits as writer
from linearize.checkpoint.write import MANIFEST
from linearize.convert import convert, plan_conversion
from linearize.data.batches import collate, targets
from linearize.data.packing import TextSource, build_blocks
from linearize.errors import Exit, LinearizeError
from linearize.estimate.memory import Rehearsal
from linearize.finetune import finetune
from linearize.job.dry_run import dry_run
from linearize.recipe.recipe import Recipe
from linearize.train.loop import StageLoop
from linearize.train.losses import cross_entropy, logit_kl
from linearize.train.runtime import in_turns
from linearize.train.teacher import find_teacher, meta_teacher

Command = Callable[..., tuple[int, str, str]]

DATA: dict[str, Any] = {
    "train": {"files": ["train.jsonl"]},
    "eval": {"files": ["heldout.txt"]},
    "pack": {"seq_len": T},
}
PADDED = VOCAB + 7  # rows of the larger teacher's embedding
SHORT = {"max_tokens": 4 * T}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`large`: a model of other sizes with the same tokenizer and a padded vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    large = {**SMALL, "vocab_size": PADDED, "hidden_size": 48, "num_hidden_layers": 3}
    small_model("llama", **large).save_pretrained(folder / "large")
    byte_tokenizer().save_pretrained(folder / "large")
    base(folder, "llama")
    return folder


def source(root: Path) -> Path:
    return base(root, "llama").parent / "source"


def recipe_of(place: Path, root: Path, *stages: dict[str, Any], **changes: Any) -> Recipe:
    """A recipe for the converted small model."""
    chosen = stages or (stage("logit_kl", "all"),)
    return make_recipe(place, base(root, "llama"), *chosen, **{"data": DATA, "eval": SHORT, **changes})


def written(recipe: Recipe, output: Path, top: int, **named: Any) -> dict[str, Any]:
    return writer.write_logits(recipe, output, top, say=lambda line: None, **named)


def record(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "run" / "run.json").read_text())
    return found


# ---------------------------------------------------------------- another model


def test_a_larger_teacher_with_a_padded_vocabulary(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses by hand on the tokens that both have; its name and hash in what is written; no copies of the base."""
    seen: list[Any] = []
    step = StageLoop.step

    def first(loop: StageLoop, number: int) -> Any:
        if not seen:
            student, batch = loop.owner.student, loop.batch(number, 0)
            assert student.originals == {}
            with torch.no_grad():
                ours, theirs = (m(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
                                for m in (loop.owner.model, large))  # fmt: skip
            assert theirs.logits.shape[-1] == PADDED
            seen.append(logit_kl(ours.logits, theirs.logits[..., :VOCAB], batch["valid"]).item())
        return step(loop, number)

    large = AutoModelForCausalLM.from_pretrained(root / "large").eval()
    monkeypatch.setattr(StageLoop, "step", first)
    told: list[str] = []
    recipe = recipe_of(tmp_path, root, teacher=str(root / "large"))
    report = finetune(recipe, say=told.append)
    assert metrics(tmp_path)[0] == pytest.approx(seen[0], rel=1e-5)
    facts = record(tmp_path)["teacher"]
    assert (facts["model"], facts["commit"], len(facts["sha256"])) == ("large", None, 64)
    assert json.loads((tmp_path / "run/final" / MANIFEST).read_text())["teacher"] == facts == report["teacher"]
    card = (tmp_path / "run/final/README.md").read_text()
    assert f"Logits are those of `large` (sha256 `{facts['sha256'][:16]}`)" in card
    assert "| teacher (large) |" in card
    assert any(line.startswith("the teacher is large: ") for line in told)
    assert report["positions"]["blocks"]
    assert {"teacher", "student"} <= report["samples"][0].keys()
    assert report["layers"] == []
    assert report["teacher_ppl"] == pytest.approx(perplexity(root / "large", tmp_path), rel=1e-4)


def perplexity(model: Path, place: Path) -> float:
    """Of the first blocks of the held-out text, by the model alone."""
    text = TextSource(files=(place / "heldout.txt",))
    blocks = build_blocks(text, byte_tokenizer(), T, place / "own", sft=False, max_tokens=4 * T)
    batch = collate([blocks[i] for i in range(4)], torch.device("cpu"))
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        logits = loaded(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return float(cross_entropy(logits, targets(batch)).exp())


@pytest.mark.slow
def test_the_source_by_name_is_the_teacher_that_it_is_anyway(root: Path, tmp_path: Path) -> None:
    """Through a transfer, which keeps the source, a stage of all weights, and one on the student's own text."""
    loss = {"kl": 1.0, "ce": 0.5, "temperature": 2.0, "chunk_size": 12}
    stages = [
        stage("attention_transfer", steps=2),
        stage("logit_kl", "all", loss=loss, steps=2, completion_only=True),
        stage("on_policy_kl", "mixer", loss={"prompt": 28}, steps=1),
    ]
    data = {**DATA, "train": {"files": ["chat.jsonl"]}}
    for name, key in (("own", None), ("named", {"model": str(source(root))})):
        train(recipe_of(tmp_path / name, root, *stages, teacher=key, data=data))
    own, named = tmp_path / "own", tmp_path / "named"
    assert metrics(named) == pytest.approx(metrics(own), rel=1e-5)
    assert metrics(named, "eval_kl") == pytest.approx(metrics(own, "eval_kl"), rel=1e-4)
    assert metrics(named, "eval_ppl") == pytest.approx(metrics(own, "eval_ppl"), rel=1e-5)


def test_completions_alone_are_learned_some_tokens_at_a_time_too(root: Path, tmp_path: Path) -> None:
    data = {**DATA, "train": {"files": ["chat.jsonl"]}}
    for name, chunk in (("whole", None), ("pieces", 8)):
        one = stage("logit_kl", "all", loss={"chunk_size": chunk}, completion_only=True, steps=1)
        train(recipe_of(tmp_path / name, root, one, data=data))
    assert metrics(tmp_path / "pieces") == pytest.approx(metrics(tmp_path / "whole"), rel=1e-5)


def test_a_changed_teacher_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = Path(shutil.copytree(root / "large", tmp_path / "teacher"))
    recipe = recipe_of(tmp_path, root, teacher={"model": str(teacher), "dtype": "bfloat16"})
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stop):
            train(recipe)
    weights = teacher / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(LinearizeError, match=r"changed since this run began: the teacher teacher.*--resume never"):
        train(recipe)
    weights.write_bytes(kept)
    train(recipe)
    with pytest.raises(LinearizeError, match=r"recipe changed since this run \(teacher\.model"):
        train(recipe_of(tmp_path, root, teacher=str(root / "large")), resume="auto")


class Stop(Exception):
    """Ends a run where a kill would."""


def stop_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Let a run die after so many optimizer steps."""
    step, done = StageLoop.step, [0]

    def counted(loop: StageLoop, number: int) -> Any:
        if done[0] == steps:
            raise Stop
        done[0] += 1
        return step(loop, number)

    patch.setattr(StageLoop, "step", counted)


def other_tokenizer(place: Path) -> Path:
    """The large model with two tokens in each other's place."""
    tokens = json.loads((place / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    (first, a), (second, b) = sorted(vocabulary.items(), key=lambda item: item[1])[70:72]
    vocabulary |= {first: b, second: a}
    (place / "tokenizer.json").write_text(json.dumps(tokens))
    return place


def test_another_tokenizer_is_refused_by_its_first_token(root: Path, tmp_path: Path) -> None:
    teacher = other_tokenizer(Path(shutil.copytree(root / "large", tmp_path / "teacher")))
    names = {place: token for token, place in byte_tokenizer().get_vocab().items()}
    recipe = make_recipe(
        tmp_path / "place",
        source(root),
        stage("logit_kl"),
        convert={"mechanism": "gsa", "options": {"slots": 8}},
        teacher=str(teacher),
    )
    message = rf"teacher has another tokenizer: token 70 is {names[70]!r} in the base's, {names[71]!r} in the"
    for act in (train, lambda one: dry_run(one, say=lambda line: None)):
        with pytest.raises(LinearizeError, match=message) as caught:
            act(recipe)
        assert caught.value.code == Exit.INCOMPATIBLE
    assert not (tmp_path / "place" / "run").exists()


def test_code_of_a_teacher_runs_where_it_is_trusted(root: Path, tmp_path: Path) -> None:
    teacher = Path(shutil.copytree(base(root, "llama"), tmp_path / "teacher"))
    with (teacher / "mixer.py").open("a") as file:
        file.write("# mine\n")
    asked = recipe_of(tmp_path, root, teacher=str(teacher))
    trusted = recipe_of(tmp_path, root, teacher={"model": str(teacher), "trust_remote_code": True})
    plain, own = map(find_teacher, (asked, trusted))
    assert plain
    assert own
    with pytest.raises(LinearizeError, match=r"carries other code .*\(mixer\.py\)"):
        meta_teacher(plain)
    assert type(meta_teacher(own)).__name__ == "LinearizedLlamaForCausalLM"


def test_models_that_cannot_teach_are_refused_before_the_conversion(root: Path, tmp_path: Path) -> None:
    gpt2 = base(root, "gpt2").parent / "source"
    long = {**DATA, "pack": {"seq_len": 512}}
    convert_it = {"convert": {"mechanism": "gsa", "options": {"slots": 8}}}
    recipe = make_recipe(tmp_path, source(root), stage("logit_kl"), data=long, teacher=str(gpt2), **convert_it)
    with pytest.raises(LinearizeError, match=r"seq_len is 512, and the teacher source takes 256 tokens"):
        train(recipe)
    vit = ViTForImageClassification(
        ViTConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    )
    vit.save_pretrained(tmp_path / "vit")
    recipe = make_recipe(tmp_path, source(root), stage("logit_kl"), teacher=str(tmp_path / "vit"), **convert_it)
    with pytest.raises(LinearizeError, match=r"vit .*writes no text"):
        train(recipe)
    few = small_model("llama", **{**SMALL, "vocab_size": EOS - 20, "eos_token_id": 0, "bos_token_id": 0})
    few.save_pretrained(tmp_path / "few")
    byte_tokenizer().save_pretrained(tmp_path / "few")
    recipe = make_recipe(tmp_path, source(root), stage("logit_kl"), teacher=str(tmp_path / "few"), **convert_it)
    with pytest.raises(LinearizeError, match=rf"the tokenizer has {EOS} tokens, but the base or few has logits"):
        train(recipe)
    assert not (tmp_path / "run").exists()


RULES = [
    ([stage("sft")], {"model": "x"}, "recipe.yaml:.*teacher: no stage learns a teacher's logits"),
    ([stage("logit_kl", loss={"kl": 0.0, "ce": 1.0})], "x", "teacher: no stage learns a teacher's logits"),
    ([stage("logit_kl")], {"dtype": "float32"}, "teacher: names no teacher: give model, logits, or both"),
    ([stage("logit_kl")], {"model": "x", "k": 3}, "teacher.k: unknown key"),
    ([stage("logit_kl"), stage("feature_cosine")], "x", r"stages\[1\]: compares hidden states with the source's own"),
    (
        [stage("logit_kl"), stage("on_policy_kl", loss={"prompt": 4})],
        {"logits": "x"},
        r"stages\[1\]: the teacher scores what the student writes, and teacher.logits has none of that",
    ),
]


@pytest.mark.parametrize(("stages", "teacher", "message"), RULES)
def test_teachers_that_make_no_sense(root: Path, tmp_path: Path, stages: Any, teacher: Any, message: str) -> None:
    with pytest.raises(LinearizeError, match=message) as caught:
        make_recipe(tmp_path, base(root, "llama"), *stages, teacher=teacher)
    assert caught.value.code == Exit.USAGE


@pytest.mark.slow
def test_the_estimate_counts_the_teacher(root: Path, tmp_path: Path) -> None:
    folder = base(root, "llama")

    def found(**changes: Any) -> Any:
        recipe = recipe_of(tmp_path, root, **changes)
        memory = Rehearsal(recipe, None, folder, "no", gpu=False).stage(0)
        assert not memory.reason
        return memory

    own, large = found(), found(teacher={"model": str(root / "large"), "dtype": "bfloat16"})
    model = AutoModelForCausalLM.from_pretrained(root / "large", dtype=torch.bfloat16)
    weights = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert large.parts["teacher"] == large.whole["teacher"] == weights
    assert (own.parts["teacher"], large.teacher_copy) == (own.teacher_copy, 0)
    assert large.work.flops > own.work.flops
    assert large.parts["logits"] > own.parts["logits"] / 2
    written(recipe_of(tmp_path, root, teacher=str(root / "large")), tmp_path / "logits", 4)
    rows = found(teacher={"logits": str(tmp_path / "logits")})
    assert (rows.parts["teacher"], rows.teacher_copy) == (0, 0)
    assert rows.work.flops < own.work.flops
    told: list[str] = []
    result = dry_run(recipe_of(tmp_path, root, teacher=str(root / "large")), told.append)
    assert any(line.startswith("the teacher is large: ") and line.endswith("in float32") for line in told)
    assert result["stages"][0]["memory"]["teacher"] > 0


# ---------------------------------------------------------------- stored


@pytest.mark.slow
def test_all_tokens_stored_are_the_teacher_itself(root: Path, tmp_path: Path) -> None:
    """More than an epoch, cross entropy beside it, two stages of one text, evaluations; fewer tokens bound the KL."""
    loss = {"kl": 1.0, "ce": 0.5}
    stages = [
        stage("logit_kl", name="first", loss=loss, steps=3),
        stage("logit_kl", "all", name="second", loss={**loss, "chunk_size": 12}, epochs=1.2),
    ]
    stages[1]["data"] = {"train": {"files": ["short.txt"]}}
    live = recipe_of(tmp_path / "live", root, *stages, teacher=str(root / "large"))
    train(live)
    found = written(live, tmp_path / "logits", VOCAB)
    blocks = [one["blocks"] for one in json.loads((tmp_path / "logits/logits.json").read_text())["sets"]]
    assert found["tokens"] == (6 + 2 + 4) * T
    assert blocks[1:] == [4, 2]
    stored = recipe_of(tmp_path / "stored", root, *stages, teacher={"logits": str(tmp_path / "logits")})
    told: list[str] = []
    report = finetune(stored, say=told.append)
    assert f"learns from {tmp_path / 'logits'} the {VOCAB} likeliest tokens of large" in told
    for key in ("loss", "kl", "ce", "eval_ppl", "eval_kl", "eval_accuracy"):
        assert metrics(tmp_path / "stored", key) == pytest.approx(metrics(tmp_path / "live", key), rel=2e-4), key
    assert report["positions"] is None
    assert report["samples"] == []
    facts = json.loads((tmp_path / "stored/run/final" / MANIFEST).read_text())["teacher"]
    assert facts["sha256"] == record(tmp_path / "live")["teacher"]["sha256"]
    assert facts["top"] == VOCAB
    card = (tmp_path / "stored/run/final/README.md").read_text()
    assert f"Logits are those of `large` (sha256 `{facts['sha256'][:16]}`), of whose predictions the {VOCAB}" in card
    written(live, tmp_path / "few", 8)
    train(recipe_of(tmp_path / "bound", root, *stages, teacher={"logits": str(tmp_path / "few")}))
    bound, whole = metrics(tmp_path / "bound", "eval_kl"), metrics(tmp_path / "live", "eval_kl")
    assert bound[0] < whole[0]
    assert metrics(tmp_path / "bound", "eval_ppl")[0] == pytest.approx(metrics(tmp_path / "live", "eval_ppl")[0])


@pytest.mark.slow
def test_a_base_is_its_own_teacher_on_disk(root: Path, tmp_path: Path, linearize: Command) -> None:
    """By the command line: counted, written, read; the model named beside the rows is compared with who wrote them."""
    section = {"mechanism": "gsa", "options": {"slots": 8}}
    path = recipe_file(tmp_path, source(root), stage("logit_kl", "all"), convert=section, data=DATA, eval=SHORT)
    out = tmp_path / "logits"
    code, message, err = linearize("logits", path, "-o", out, "--top", "4", "--dry-run", "--json")
    assert code == 0, err
    tokens = json.loads(message.splitlines()[-1])["tokens"]
    assert json.loads(message.splitlines()[-1])["bytes"] == tokens * 40
    assert not out.exists()
    assert linearize("logits", path, "-o", out, "--top", "4")[0] == 0
    taken = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert 0 <= taken - tokens * 40 < 2000
    code, _, err = linearize("finetune", path, f"teacher.logits={out}", f"teacher.model={source(root)}")
    assert code == 0, err
    code, _, err = linearize(
        "finetune", path, f"teacher.logits={out}", f"teacher.model={root / 'large'}", f"output_dir={tmp_path / 'x'}"
    )
    assert code == Exit.USAGE
    assert "was written by another teacher than large: source," in " ".join(err.split())
    assert not (tmp_path / "x").exists()


def test_a_writer_that_was_stopped_goes_on(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.data.logits.SHARD_BYTES", 3 * T * 40)  # three rows each
    recipe = recipe_of(tmp_path, root, teacher=str(root / "large"))
    out = tmp_path / "logits"
    write, calls = writer.write_rows, [0]

    def stopped(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_rows", stopped)
        with pytest.raises(KeyboardInterrupt):
            written(recipe, out, 4)
    left = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert len(left) == 2
    stored = recipe_of(tmp_path, root, teacher={"logits": str(out)})
    with pytest.raises(LinearizeError, match="is not complete: run linearize logits again"):
        train(stored)
    with pytest.raises(LinearizeError, match="was made with another teacher, text or number of tokens"):
        written(recipe, out, 5)
    written(recipe, out, 4)
    assert all(path.stat().st_mtime_ns == at for path, at in left.items())
    assert {path.name for path in out.iterdir()} == {
        "logits.json",
        *(name for one in json.loads((out / "logits.json").read_text())["sets"] for name in one["shards"]),
    }
    written(recipe, tmp_path / "whole", 4)
    for path in out.glob("*.safetensors"):
        assert same(load_file(path), load_file(tmp_path / "whole" / path.name))
    before = (out / "logits.json").read_bytes()
    written(recipe, out, 4)
    assert (out / "logits.json").read_bytes() == before
    (out / "notes.txt").write_text("mine")
    with pytest.raises(LinearizeError, match=r"holds what linearize logits did not write \(notes\.txt\)"):
        written(recipe, out, 4)


@pytest.mark.slow
def test_a_run_on_stored_logits_goes_on(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "logits"
    written(recipe_of(tmp_path, root, teacher=str(root / "large")), folder, 4)
    changes: dict[str, Any] = {"teacher": {"logits": str(folder)}, "checkpoint": {"every_steps": 1}}
    train(recipe_of(tmp_path / "whole", root, **changes))
    broken = recipe_of(tmp_path / "broken", root, **changes)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stop):
            train(broken)
    shutil.rmtree(folder)
    written(recipe_of(tmp_path, root, teacher=str(root / "large")), folder, 3)
    with pytest.raises(LinearizeError, match="changed since this run began: the teacher large"):
        train(broken)
    shutil.rmtree(folder)
    # More rows beside them change no row that was there.
    written(recipe_of(tmp_path, root, stage("logit_kl", "all", steps=9), teacher=str(root / "large")), folder, 4)
    train(broken)
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    assert same(tensors(tmp_path / "broken/run/final"), tensors(tmp_path / "whole/run/final"))


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 7}, "seed was 42, is 7"),
    ({"data": {**DATA, "pack": {"seq_len": 16}}}, "seq_len was 32, is 16"),
    ({"data": {**DATA, "train": {"files": ["short.txt"]}}}, "train data of logit_kl: another data"),
    ({"data": {**DATA, "eval": {"files": ["short.txt"]}}}, "eval data of logit_kl: another data"),
    ({"eval": {"max_tokens": 2 * T}}, "max_tokens was 128, is 64"),
    ({"stages": [stage("logit_kl", "all", loss={"temperature": 2.0})]}, r"temperature was 1\.0, is 2\.0"),
    ({"stages": [stage("logit_kl", "all", steps=9)]}, "has logits of 8 train blocks, and logit_kl reads 18"),
    ({"stages": [stage("logit_kl", "all", completion_only=True)]}, "completion_only was False, is True"),
]


def test_logits_of_something_else_are_refused_by_name(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "logits"
    written(recipe_of(tmp_path, root, teacher=str(root / "large")), folder, 4)
    for changes, message in MISFITS:
        stages = changes.get("stages", [])
        rest = {key: value for key, value in changes.items() if key != "stages"}
        section = {"mechanism": "gsa", "options": {"slots": 8}}
        values = {"data": DATA, "eval": SHORT, "convert": section, "teacher": {"logits": str(folder)}, **rest}
        recipe = make_recipe(tmp_path, source(root), *(stages or [stage("logit_kl", "all")]), **values)
        with pytest.raises(LinearizeError, match=message) as caught:
            train(recipe)
        assert caught.value.code == Exit.USAGE
        assert not (tmp_path / "run").exists()


def test_what_cannot_be_written(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"teacher": str(root / "large")}
    cases: list[tuple[Recipe, int, str]] = [
        (recipe_of(tmp_path, root, **large), VOCAB + 1, rf"--top {VOCAB + 1}: the models have {VOCAB} tokens"),
        (recipe_of(tmp_path, root), 4, r"names no model whose logits could be written. Add teacher\.model=MODEL"),
        (recipe_of(tmp_path, root, stage("attention_transfer")), 4, "the recipe has no logit_kl stage"),
        (
            recipe_of(tmp_path, root, stage("logit_kl"), stage("on_policy_kl", loss={"prompt": 4}), **large),
            4,
            "on_policy_kl: its text is written while it trains",
        ),
    ]
    for recipe, top, message in cases:
        with pytest.raises(LinearizeError, match=message):
            written(recipe, tmp_path / "out", top)
    monkeypatch.setattr("linearize.logits.shutil.disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(LinearizeError, match=r"would take .* more, 9 B are free|would take .* more") as caught:
        written(recipe_of(tmp_path, root, **large), tmp_path / "out", 4)
    assert caught.value.code == Exit.RESOURCE
    assert not (tmp_path / "out").exists()


def test_a_teacher_that_overflows_is_not_stored(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflowing(*arguments: Any) -> Any:
        logits = forward(*arguments)
        logits[-1, -1, 3] = torch.inf
        return logits

    forward = writer.forward
    monkeypatch.setattr(writer, "forward", overflowing)
    with pytest.raises(LinearizeError, match=r"not finite in torch\.float32\. Set teacher\.dtype") as caught:
        written(recipe_of(tmp_path, root, teacher=str(root / "large")), tmp_path / "out", 4)
    assert caught.value.code == Exit.CHECK_FAILED
    assert not (tmp_path / "out").exists()


def test_two_calls_do_not_write_one_folder(root: Path, tmp_path: Path) -> None:
    recipe, out = recipe_of(tmp_path, root, teacher=str(root / "large")), tmp_path / "out"
    with writer.text_folder(out, False, True):
        with pytest.raises(LinearizeError, match="another linearize writes this output"):
            written(recipe, out, 4)
        assert (out / writer.CACHE).is_dir()
    assert not out.exists()
    written(recipe, out, 4)


def test_no_file_of_others_is_removed(root: Path, tmp_path: Path) -> None:
    recipe, out = recipe_of(tmp_path, root, teacher=str(root / "large")), tmp_path / "out"
    out.mkdir()
    written(recipe, out, 4, dry_run=True)
    assert [*out.iterdir()] == []
    (out / "cache").mkdir()
    for dry in (True, False):
        with pytest.raises(LinearizeError, match=r"holds what linearize logits did not write \(cache\)"):
            written(recipe, out, 4, dry_run=dry)
    assert (out / "cache").is_dir()


def test_a_run_may_stop_early_on_stored_logits(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of text that is read only as far as a run needs, which is less with max_steps."""
    monkeypatch.setattr("linearize.data.batches.is_long", lambda source: True)
    written(recipe_of(tmp_path, root, teacher=str(root / "large")), tmp_path / "logits", 4)
    report = finetune(recipe_of(tmp_path, root, teacher={"logits": str(tmp_path / "logits")}), max_steps=1)
    assert report["max_steps"] == 1


@pytest.mark.slow
def test_a_flipped_bit_in_a_row_is_found_when_it_is_read(root: Path, tmp_path: Path) -> None:
    """In any of its numbers, which safetensors does not look at."""
    folder = tmp_path / "logits"
    written(recipe_of(tmp_path, root, teacher=str(root / "large")), folder, 4)
    shard, stored = max(folder.glob("train-*.safetensors")), recipe_of(tmp_path, root, teacher={"logits": str(folder)})
    whole = shard.read_bytes()
    begins = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begins])
    for name in ("values", "indices", "rest", "target"):
        damaged = bytearray(whole)
        damaged[begins + header[name]["data_offsets"][0] + 1] ^= 1
        shard.write_bytes(damaged)
        with pytest.raises(LinearizeError, match=rf"{shard.name} is damaged: row 0 is not as it was written"):
            finetune(stored)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_shards_are_looked_at_before_a_run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.data.logits.SHARD_BYTES", 3 * T * 40)  # three rows each
    folder = tmp_path / "logits"
    written(recipe_of(tmp_path, root, teacher=str(root / "large")), folder, 4)
    last = max(folder.glob("train-*.safetensors"))
    whole, stored = last.read_bytes(), recipe_of(tmp_path, root, teacher={"logits": str(folder)})
    for broken in (b"", whole[:40], max(folder.glob("eval-*.safetensors")).read_bytes()):
        last.write_bytes(broken)
        with pytest.raises(LinearizeError, match=rf"{last.name} is missing, damaged, or has other rows"):
            train(stored)
    last.unlink()
    with pytest.raises(LinearizeError, match=rf"{last.name} is missing, damaged, or has other rows"):
        train(stored)
    for record in (b"\xff", b'{"format": 1, "teacher": {}, "k": 4, "vocabulary": 9, "sets": [{}]}'):
        (folder / "logits.json").write_bytes(record)
        with pytest.raises(LinearizeError, match=r"logits\.json"):
            train(stored)
    assert not (tmp_path / "run").exists()


ITSELF = "is the model that training starts from: .* the loss of logit_kl is 0 from its first step"


def test_the_model_that_training_starts_from_does_not_teach_itself(root: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base(root, "llama"), tmp_path / "copy"))
    with pytest.raises(LinearizeError, match=f"teacher: copy {ITSELF}") as refused:
        train(recipe_of(tmp_path, root, teacher=str(copy)))
    assert refused.value.code == Exit.USAGE
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_student_may_be_held_to_its_beginning_beside_another_loss(root: Path, tmp_path: Path) -> None:
    """Not where nothing else is learned, by a dry run's words either, nor from what it predicted."""
    copy = Path(shutil.copytree(base(root, "llama"), tmp_path / "copy"))
    with pytest.raises(LinearizeError, match=ITSELF):
        dry_run(recipe_of(tmp_path, root, teacher=str(copy)), print)
    written(recipe_of(tmp_path, root, teacher=str(copy)), tmp_path / "logits", 4)
    with pytest.raises(LinearizeError, match=ITSELF):
        dry_run(recipe_of(tmp_path, root, teacher={"logits": str(tmp_path / "logits")}), print)
    for stages in ([stage("logit_kl", loss={"kl": 1.0, "ce": 0.5})], [stage("sft"), stage("logit_kl")]):
        assert dry_run(recipe_of(tmp_path, root, *stages, teacher=str(copy)), print)["stages"]
    other = convert_folder(source(root), tmp_path / "other", "0")
    assert dry_run(recipe_of(tmp_path, root, teacher=str(other)), print)["stages"]


def test_a_run_does_not_replace_its_teacher(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "large", tmp_path / "run" / "final")
    with pytest.raises(LinearizeError, match=r"teacher\.model .* must be separate folders"):
        train(recipe_of(tmp_path, root, teacher=str(tmp_path / "run" / "final")))
    assert (tmp_path / "run" / "final" / "config.json").is_file()


def test_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of each of two machines: those of one machine never at the same time."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    everyone, inside, seen = Barrier(4), list[tuple[str, int]](), list[list[tuple[str, int]]]()

    def work(machine: str, place: int) -> None:
        accelerator: Any = SimpleNamespace(local_process_index=place, wait_for_everyone=everyone.wait, num_processes=4)
        with in_turns(accelerator):
            inside.append((machine, place))
            time.sleep(0.05)
            seen.append(list(inside))
            inside.remove((machine, place))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, "aabb", (0, 1, 0, 1)))
    assert len(seen) == 4
    assert all(len({machine for machine, _ in one}) == len(one) for one in seen)


@pytest.mark.slow
def test_two_processes_write_and_read_what_one_does(root: Path, tmp_path: Path, forks: Forks) -> None:
    one = stage("logit_kl", "all", batch={"per_device": 2, "gradient_accumulation_steps": 2}, optimizer={"lr": 1e-4})
    two = {**one, "batch": {"per_device": 2}}
    large = str(root / "large")
    written(recipe_of(tmp_path / "one", root, one, teacher=large), tmp_path / "logits", 4)
    train(recipe_of(tmp_path / "one", root, one, teacher={"logits": str(tmp_path / "logits")}))
    recipe_of(tmp_path / "two", root, two, teacher=large)

    def together(*arguments: Any) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
        done = forks.together([Task([*map(str, arguments)], environment=rank) for rank in ranks])
        assert [result.code for result in done] == [0, 0], done
        return [result.output for result in done]

    told = together("logits", tmp_path / "two" / "recipe.yaml", "-o", tmp_path / "pair", "--top", "4", "--json")
    assert ['"tokens": ' in one for one in told] == [True, False]
    for path in (tmp_path / "logits").glob("*.safetensors"):
        ours, theirs = (load_file(folder / path.name) for folder in (tmp_path / "pair", tmp_path / "logits"))
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value)
    recipe_of(tmp_path / "two", root, two, teacher={"logits": str(tmp_path / "pair")})
    together("finetune", tmp_path / "two" / "recipe.yaml")
    for key in ("loss", "eval_ppl", "eval_kl"):
        assert metrics(tmp_path / "two", key) == pytest.approx(metrics(tmp_path / "one", key), rel=1e-4)


# ---------------------------------------------------------------- a second pass


@pytest.mark.slow
def test_a_second_pass_learns_from_the_original(root: Path, tmp_path: Path) -> None:
    """All weights of a hybrid were trained; converted further, it is trained towards the model that it began as."""
    linear = convert_folder(source(root), tmp_path / "hybrid", "0")
    train(make_recipe(tmp_path, linear, stage("logit_kl", "all"), data=DATA, eval=SHORT))
    trained = tmp_path / "run" / "final"
    convert(*plan_conversion(str(trained), None, layers="1"), tmp_path / "more", level="none", say=lambda line: None)
    still = [stage("attention_transfer", steps=1), stage("logit_kl", "all", optimizer={"lr": 1e-30})]
    told: list[str] = []
    recipe = make_recipe(
        tmp_path / "second", tmp_path / "more", *still, data=DATA, eval=SHORT, teacher=str(source(root))
    )
    report = finetune(recipe, say=told.append)
    (note,) = [line for line in told if line.startswith("note: ") and "trained them" in line]
    assert "logits are learned from source. Attention outputs are compared with softmax on those weights" in note
    assert report["teacher_ppl"] == pytest.approx(perplexity(source(root), tmp_path), rel=1e-4)
    alone = train(make_recipe(tmp_path / "drifted", tmp_path / "more", *still, data=DATA, eval=SHORT))
    assert alone["teacher_ppl"] != pytest.approx(report["teacher_ppl"], rel=1e-3)
    manifest = json.loads((tmp_path / "second/run/final" / MANIFEST).read_text())
    assert manifest["teacher"]["model"] == "source"


def test_a_shard_that_was_cut_short_goes_with_the_next_call(tmp_path: Path) -> None:
    """Also one of another text, whose name nobody writes again; a dry run leaves it."""
    half, whole = tmp_path / "train-0123456789ab-00000.partial", tmp_path / "train-0123456789ab-00001.safetensors"
    foreign = tmp_path / "notes.partial"
    for path in (half, whole, foreign):
        path.write_text("x")
    with writer.text_folder(tmp_path, dry_run=True, main=True):
        assert half.exists()
    with writer.text_folder(tmp_path, dry_run=False, main=True):
        assert not half.exists()
    assert whole.exists()
    assert foreign.exists()
