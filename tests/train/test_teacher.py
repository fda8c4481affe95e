"""A teacher that the recipe names: another model of the same tokenizer."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import holds
from models import convert_folder, small_model
from training import EOS, SMALL, VOCAB, T, base, byte_tokenizer, make_recipe, metrics, stage, train
from transformers import AutoModelForCausalLM, ViTConfig, ViTForImageClassification

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
    """Through a transfer, which keeps the source, and a stage of all weights."""
    loss = {"kl": 1.0, "ce": 0.5, "temperature": 2.0, "chunk_size": 12}
    stages = [
        stage("attention_transfer", steps=2),
        stage("logit_kl", "all", loss=loss, steps=2, completion_only=True),
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
    with pytest.raises(LinearizeError, match=r"began.*--resume"):
        train(recipe)
    weights.write_bytes(kept)
    train(recipe)
    with pytest.raises(LinearizeError, match=r"teacher\.model"):
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
    with pytest.raises(LinearizeError, match=r".*\(mixer\.py\)"):
        meta_teacher(plain)
    assert type(meta_teacher(own)).__name__ == "LinearizedLlamaForCausalLM"


def test_models_that_cannot_teach_are_refused_before_the_conversion(root: Path, tmp_path: Path) -> None:
    gpt2 = base(root, "gpt2").parent / "source"
    long = {**DATA, "pack": {"seq_len": 512}}
    convert_it = {"convert": {"mechanism": "gsa", "options": {"slots": 8}}}
    recipe = make_recipe(tmp_path, source(root), stage("logit_kl"), data=long, teacher=str(gpt2), **convert_it)
    with pytest.raises(LinearizeError, match=r"seq_len.*512.*256"):
        train(recipe)
    vit = ViTForImageClassification(
        ViTConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    )
    vit.save_pretrained(tmp_path / "vit")
    recipe = make_recipe(tmp_path, source(root), stage("logit_kl"), teacher=str(tmp_path / "vit"), **convert_it)
    with pytest.raises(LinearizeError, match=r"writes.*text"):
        train(recipe)
    few = small_model("llama", **{**SMALL, "vocab_size": EOS - 20, "eos_token_id": 0, "bos_token_id": 0})
    few.save_pretrained(tmp_path / "few")
    byte_tokenizer().save_pretrained(tmp_path / "few")
    recipe = make_recipe(tmp_path, source(root), stage("logit_kl"), teacher=str(tmp_path / "few"), **convert_it)
    with pytest.raises(LinearizeError, match=f"{EOS}"):
        train(recipe)
    assert not (tmp_path / "run").exists()


RULES = [
    ([stage("sft")], {"model": "x"}, r"recipe.yaml.*teacher.*teacher's"),
    ([stage("logit_kl", loss={"kl": 0.0, "ce": 1.0})], "x", r"teacher.*teacher's"),
    ([stage("logit_kl")], {"dtype": "float32"}, r"teacher.*teacher"),
    ([stage("logit_kl")], {"model": "x", "k": 3}, "teacher.k: unknown key"),
    ([stage("logit_kl"), stage("feature_cosine")], "x", r"stages\[1\].*source's"),
    ([stage("logit_kl")], {"logits": "x"}, r"teacher\.logits.*teacher\.model"),
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
    told: list[str] = []
    result = dry_run(recipe_of(tmp_path, root, teacher=str(root / "large")), told.append)
    assert any(line.startswith("the teacher is large: ") and line.endswith("in float32") for line in told)
    assert result["stages"][0]["memory"]["teacher"] > 0


ITSELF = "is the model that training starts from: .* the loss of logit_kl is 0 from its first step"


def test_the_model_that_training_starts_from_does_not_teach_itself(root: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base(root, "llama"), tmp_path / "copy"))
    with pytest.raises(LinearizeError, match=f"teacher: copy {ITSELF}") as refused:
        train(recipe_of(tmp_path, root, teacher=str(copy)))
    assert refused.value.code == Exit.USAGE
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_student_may_be_held_to_its_beginning_beside_another_loss(root: Path, tmp_path: Path) -> None:
    """Not where nothing else is learned, by a dry run's words either."""
    copy = Path(shutil.copytree(base(root, "llama"), tmp_path / "copy"))
    with pytest.raises(LinearizeError, match=ITSELF):
        dry_run(recipe_of(tmp_path, root, teacher=str(copy)), print)
    for stages in ([stage("logit_kl", loss={"kl": 1.0, "ce": 0.5})], [stage("sft"), stage("logit_kl")]):
        assert dry_run(recipe_of(tmp_path, root, *stages, teacher=str(copy)), print)["stages"]
    other = convert_folder(source(root), tmp_path / "other", "0")
    assert dry_run(recipe_of(tmp_path, root, teacher=str(other)), print)["stages"]


def test_a_run_does_not_replace_its_teacher(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "large", tmp_path / "run" / "final")
    with pytest.raises(LinearizeError, match=r"teacher\.model"):
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
    assert holds(note, "Attention", "compared")
    assert report["teacher_ppl"] == pytest.approx(perplexity(source(root), tmp_path), rel=1e-4)
    alone = train(make_recipe(tmp_path / "drifted", tmp_path / "more", *still, data=DATA, eval=SHORT))
    assert alone["teacher_ppl"] != pytest.approx(report["teacher_ppl"], rel=1e-3)
    manifest = json.loads((tmp_path / "second/run/final" / MANIFEST).read_text())
    assert manifest["teacher"]["model"] == "source"
