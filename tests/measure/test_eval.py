"""`linearize eval`: a student beside its teacher."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import pytest
import torch
from conftest import Command, holds
from models import small_model
from torch import Tensor
from training import BASES, base, byte_tokenizer, stage, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_outputs import CausalLMOutputWithPast

from linearize.checkpoint.manifest import read_plan
from linearize.commands.eval import remarks
from linearize.convert import convert, plan_conversion
from linearize.data.documents import TextSource
from linearize.demo import corpus, model_folder
from linearize.errors import Exit, LinearizeError
from linearize.measure.compare import state_bytes, text_recipe
from linearize.measure.evaluate import Score, note_farther, note_of_little
from linearize.measure.free_generation import (
    ANSWER,
    answered,
    answers,
    compare_answers,
    continued,
    end_in,
    free_generation,
    questions,
    repetition,
)
from linearize.measure.positions import by_position, edges_of, long_rows, longest_text, positions, reader, warning_of
from linearize.measure.recall import DEPTHS, QUERIES, Row, Writer, rows_of, score
from linearize.recipe.data import rooted
from linearize.recipe.recipe import load_recipe
from linearize.train.runs import converted_from, heldout_of
from linearize.train.save import load_converted
from linearize.verify.child.inputs import most_tokens
from linearize_kernels.hf.attention_hooks import mixers_of

LENGTH = 448
SMALL = ("--lengths", str(LENGTH), "--trials", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with a tokenizer of bytes, its source beside it, and a recipe with text."""
    root = tmp_path_factory.mktemp("eval")
    student = base(root, "llama", layers="0", window=8)
    write_recipe(root, student, stage("logit_kl"), data=data())
    return student


def data(**changes: Any) -> dict[str, Any]:
    return {"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": 64}, **changes}


def recipe(folder: Path) -> Path:
    return folder.parent.parent / "recipe.yaml"


def measured(linearize: Command, folder: Path, *options: str | Path, student: Path | None = None) -> dict[str, Any]:
    source = folder.parent / "source"
    given = ("--teacher", source, "--recipe", recipe(folder), *SMALL, *options)
    code, out, err = linearize("eval", student or folder, *given, "--json")
    assert code == 0, err
    return json.loads(out)


# ---------------------------------------------------------------- text


def test_the_measures_are_those_of_the_logits(linearize: Command, folder: Path, tmp_path: Path) -> None:
    told = measured(linearize, folder, "-o", tmp_path / "new" / "eval.json")
    assert json.loads((tmp_path / "new" / "eval.json").read_text()) == told
    for row in told["needle"]:
        shares = row["student"]["depths"]
        assert len(shares) == DEPTHS
        assert min(share for share in shares if share is not None) <= row["student"]["accuracy"]
    ids = byte_tokenizer()((folder.parent.parent / "heldout.txt").read_text(), return_tensors="pt")["input_ids"]
    ids = ids.view(-1, 64)
    student = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    teacher = AutoModelForCausalLM.from_pretrained(folder.parent / "source")
    with torch.no_grad():
        ours, theirs = (model(ids).logits[:, :-1].double().log_softmax(-1) for model in (student, teacher))
    losses = [-log_p.gather(-1, ids[:, 1:, None]).mean().item() for log_p in (ours, theirs)]
    assert told["tokens"] == ids[:, 1:].numel()
    assert told["read"] == ids.numel() + 64  # the last block has what ends the text
    assert told["student_ppl"] == pytest.approx(math.exp(losses[0]), rel=1e-4)
    assert told["teacher_ppl"] == pytest.approx(math.exp(losses[1]), rel=1e-4)
    assert told["ppl_ratio"] == pytest.approx(math.exp(losses[0] - losses[1]), rel=1e-4)
    assert told["kl"] == pytest.approx((theirs.exp() * (theirs - ours)).sum(-1).mean().item(), rel=1e-3)
    assert told["top1_agreement"] == pytest.approx((ours.argmax(-1) == theirs.argmax(-1)).double().mean().item())
    assert told["kl"] > 0.01
    assert told["top1_agreement"] < 1


def test_a_teacher_is_its_own_best_student(linearize: Command, folder: Path) -> None:
    told = measured(linearize, folder, student=folder.parent / "source")
    assert (told["ppl_ratio"], told["top1_agreement"]) == (1.0, 1.0)
    assert abs(told["kl"]) < 1e-6
    assert all(row["student"] == row["teacher"] for task in ("recall", "needle", "state") for row in told[task])


def test_a_student_without_a_converted_layer_is_named(linearize: Command, folder: Path) -> None:
    """In the terminal and in the result, as is a teacher that guesses."""
    source = folder.parent / "source"
    for student, told in ((source, True), (folder, False)):
        given = ("--teacher", source, "--recipe", recipe(folder), *SMALL, "--json")
        code, out, err = linearize("eval", student, *given)
        assert code == 0, err
        notes = " ".join(json.loads(out)["notes"])
        for words in (err, notes):
            assert (f"note: {student} has no converted layer" in words) == told
            assert "nearly random" in words


@pytest.mark.parametrize("part", ["memory", "window"])
def test_one_of_two_parts_can_be_switched_off(linearize: Command, tmp_path: Path, part: str) -> None:
    """Without its memory a student is the window alone; without its window it is the mechanism alone."""
    source = tmp_path / "source"
    small_model("llama", **BASES["llama"]).save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    alone = ("window", {"window": 8, "sink": 1}) if part == "memory" else ("la", {})
    both, other = tmp_path / "both", tmp_path / "other"
    for target, name, options in ((both, "la", {"window": 8, "sink": 1}), (other, *alone)):
        convert(*plan_conversion(str(source), name, options=options), target, level="none", say=lambda text: None)
    (tmp_path / "held.txt").write_text("abc def ghi. " * 60)
    text = ("--teacher", str(source), f"data.eval={{files: {tmp_path / 'held.txt'}}}", "data.pack.seq_len=64", *SMALL)
    done = linearize("eval", str(both), *text, "--without", part, "--json")
    assert done[0] == 0, done[2]
    off = json.loads(done[1])
    expected = json.loads(linearize("eval", str(other), *text, "--json")[1])
    assert off["student_ppl"] == pytest.approx(expected["student_ppl"], rel=1e-5)
    assert off["kl"] == pytest.approx(expected["kl"], rel=1e-4)
    assert off["without"] == part
    code, _, errors = linearize("eval", str(other), *text, "--without", part, "--json")
    assert code == Exit.INCOMPATIBLE
    assert "--without" in errors


def test_a_teacher_may_have_any_name(linearize: Command, folder: Path, tmp_path: Path) -> None:
    """It becomes a value of YAML, where 123 is a number."""
    for name, code in {"123": Exit.HUB, "a: b #c": Exit.INCOMPATIBLE}.items():
        found, _, err = linearize("eval", folder, "--teacher", name, "--recipe", recipe(folder))
        assert (found, holds(err, f"'{name}'")) == (code, True)


def test_the_text_is_the_recipes(linearize: Command, folder: Path, tmp_path: Path) -> None:
    """Its data.eval, data.pack and eval.max_tokens, whatever model the recipe is about."""
    some = measured(linearize, folder, "eval.max_tokens=512", "data.pack.seq_len=32")
    assert (some["read"], some["tokens"]) == (512, 16 * 31)
    (tmp_path / "other.jsonl").write_text(json.dumps({"body": "abc" * 500}))
    far = f"{tmp_path}/../{tmp_path.name}/other.jsonl"
    other = measured(linearize, folder, f"data.eval={{files: [{far}]}}", "data.pack.text_key=body")
    assert other["text"] == str(tmp_path / "other.jsonl")
    assert other["tokens"] == 23 * 63 + 28
    assert other["teacher_ppl"] != some["teacher_ppl"]
    code, _, err = linearize("eval", folder, "data.eval=null", "--teacher", folder, "--recipe", recipe(folder))
    assert code == Exit.USAGE
    assert "no data.eval" in err
    code, _, err = linearize("eval", folder, "data.evil=null", "--teacher", folder, "--recipe", recipe(folder))
    assert code == Exit.USAGE
    assert holds(err, "'eval'")


# ---------------------------------------------------------------- recall


class Oracle:
    """Predicts what followed the longest of a few contexts that stood in the text before: a perfect memory."""

    device = torch.device("cpu")

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary, self.widths = vocabulary, list[int]()

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        self.widths.append(len(input_ids))
        logits = torch.zeros(*input_ids.shape, self.vocabulary)
        for row, ids in enumerate(input_ids.tolist()):
            follows: dict[tuple[int, ...], int] = {}
            for t, token in enumerate(ids):
                contexts = [tuple(ids[t - size : t]) for size in (12, 3) if size <= t]
                found = next((follows[context] for context in contexts if context in follows), None)
                if found is not None:
                    logits[row, t - 1, found] = 9.0
                follows |= dict.fromkeys(contexts, token)
        return SimpleNamespace(logits=logits)


def words_tokenizer(kind: str) -> Any:
    return byte_tokenizer() if kind == "bytes" else AutoTokenizer.from_pretrained(model_folder())


@pytest.mark.parametrize("kind", ["bytes", "words"])
@pytest.mark.parametrize("task", ["recall", "needle"])
def test_a_memory_is_what_recall_takes(task: str, kind: str) -> None:
    tokenizer = words_tokenizer(kind)
    filler = tokenizer("def read(self):\n    return 7\n" * 100, add_special_tokens=False)["input_ids"]
    rows = rows_of(task, Writer(tokenizer, 3), LENGTH, 3, filler)
    memory = Oracle(len(tokenizer))
    found = score(memory, rows, 2)
    assert found["accuracy"] == 1.0
    assert found["loss"] < len(rows[0].asked[0])
    assert memory.widths == [2, 1]
    for row in rows:
        assert len(row.ids) <= LENGTH
        assert len(row.ids) > 0.9 * LENGTH
        assert len(row.asked) == (QUERIES if task == "recall" else 1)
        for place in row.asked:
            check_question(tokenizer, row, place)

    def distracted(input_ids: Tensor, use_cache: bool) -> Any:
        """The last token of each value is lost."""
        out = memory(input_ids, use_cache)
        for row in rows:
            for place in row.asked:
                out.logits[:, place.stop - 2] = 0.0
        return out

    distracted.device = torch.device("cpu")  # type: ignore[attr-defined]
    assert score(distracted, rows, 3)["accuracy"] == 0.0

    def forgetful(input_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, len(tokenizer)))

    forgetful.device = torch.device("cpu")  # type: ignore[attr-defined]
    nothing = score(forgetful, rows, 2)
    assert nothing["accuracy"] == 0.0
    tokens = sum(len(place) for row in rows for place in row.asked) / sum(len(row.asked) for row in rows)
    assert nothing["loss"] == pytest.approx(tokens * math.log(len(tokenizer)), rel=1e-4)


def check_question(tokenizer: Any, row: Row, place: range) -> None:
    """The key of a value that is asked for stands once before, with that value."""
    value = tokenizer.decode(row.ids[place.start : place.stop])
    before = tokenizer.decode(row.ids[: place.start])
    key = before[before.rindex("(") :]
    assert before.count(f"{key}{value})") == 1
    assert before.count(key) == 2


def test_needles_lie_at_all_depths_and_values_do_not_tell_each_other(linearize: Command) -> None:
    tokenizer = words_tokenizer("words")
    filler = tokenizer("x = 1\n" * 400, add_special_tokens=False)["input_ids"]
    rows = rows_of("needle", Writer(tokenizer, 0), 256, 4, filler)
    texts = [tokenizer.decode(row.ids) for row in rows]
    depths = [text.index("(") / len(text) for text in texts]
    assert depths == sorted(depths)
    assert depths[0] < 0.25
    assert depths[-1] > 0.75
    assert len({text[text.index("(") :][:20] for text in texts}) == 4


def test_the_seed_decides_the_texts(linearize: Command, folder: Path) -> None:
    tokenizer = words_tokenizer("words")
    same, other = (rows_of("recall", Writer(tokenizer, seed), 256, 2, []) for seed in (1, 2))
    assert same == rows_of("recall", Writer(tokenizer, 1), 256, 2, [])
    assert same != other
    first, again, second = (measured(linearize, folder, "--seed", seed)["recall"] for seed in ("1", "1", "2"))
    assert first == again != second


def test_lengths_trials_and_batches_are_as_asked(linearize: Command, folder: Path) -> None:
    wide = measured(linearize, folder, "--lengths", "448,512", "--trials", "3")
    assert [row["length"] for task in ("recall", "needle", "state") for row in wide[task]] == [448, 512] * 3
    assert wide["recall"][0]["entries"] < wide["recall"][1]["entries"]
    narrow = measured(linearize, folder, "--lengths", "448,512", "--trials", "3", "--batch-tokens", "1")
    for task in ("recall", "needle"):
        for ours, theirs in zip(wide[task], narrow[task], strict=True):
            for who in ("student", "teacher"):
                assert ours[who]["loss"] == pytest.approx(theirs[who]["loss"], rel=1e-4)
    fewer = measured(linearize, folder, "--lengths", "448", "--trials", "1")
    assert fewer["recall"][0]["teacher"] != wide["recall"][0]["teacher"]


# ---------------------------------------------------------------- state


def test_the_state_is_what_the_cache_holds(linearize: Command, folder: Path) -> None:
    told = {row["length"]: row for row in measured(linearize, folder, "--lengths", "448,896")["state"]}
    model = load_converted(folder, torch.float32, False)
    own = {tokens: sum(mixer.state_bytes(tokens) for mixer in mixers_of(model).values()) for tokens in (448, 896)}
    config = model.config
    row = 2 * config.num_key_value_heads * config.head_dim * 4
    for tokens in (448, 896):
        assert told[tokens]["teacher"] == 2 * row * tokens
        assert told[tokens]["student"] == own[tokens] + row * tokens
    half = measured(linearize, folder, "--dtype", "bfloat16")["state"][0]
    assert half["teacher"] == told[448]["teacher"] // 2


@pytest.mark.parametrize("narrow", ["student", "teacher"])
def test_states_of_models_in_two_dtypes_are_counted_in_one(
    linearize: Command, folder: Path, tmp_path: Path, narrow: str
) -> None:
    known = measured(linearize, folder, "--dtype", "float32")["state"]
    pair = {"student": folder, "teacher": folder.parent / "source"}
    half = AutoModelForCausalLM.from_pretrained(pair[narrow], trust_remote_code=True, dtype=torch.bfloat16)
    pair[narrow] = shutil.copytree(pair[narrow], tmp_path / narrow)
    half.save_pretrained(pair[narrow])
    given = ("--teacher", pair["teacher"], "--recipe", recipe(folder), *SMALL, "--trust-remote-code")
    code, out, err = linearize("eval", pair["student"], *given, "--json")
    told = json.loads(out)
    assert (code, told["dtypes"][narrow], told["state_dtype"]) == (0, "bfloat16", "float32"), err
    assert told["state"] == known
    assert holds(err, "448", "float32")
    _, _, err = linearize("eval", folder, "--teacher", folder.parent / "source", "--recipe", recipe(folder), *SMALL)
    assert holds(err, "448", "float32")


def test_layers_that_were_linear_before_count_too() -> None:
    model = architectures.small_model("qwen3_next").eval()
    config = model.config
    row = 2 * config.num_key_value_heads * config.head_dim * 4 * config.layer_types.count("full_attention")
    sizes = [state_bytes(model, tokens) for tokens in (12, 24)]
    assert sizes[0] > 12 * row == sizes[1] - sizes[0]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--lengths", "64,x"), Exit.USAGE, ("--lengths", "64,x")),
        (("--lengths", "64"), Exit.USAGE, ("--lengths", "64", "8", "questions")),
        (("--lengths", "4000"), Exit.USAGE, ("text", "has")),
        (("--lengths", f"{LENGTH},99999999"), Exit.USAGE, ("--lengths", "99999999")),
        (("data.eval={images: .}",), Exit.USAGE, ("data.eval",)),
        (("data.eval={files: hedlout.txt}",), Exit.USAGE, ("/heldout.txt'?",)),
        (("--trials", "1000000000000"), Exit.USAGE, ("--trials",)),
        (("--generate", "1000000000000"), Exit.USAGE, ("--generate",)),
        (("--device", "tpu"), Exit.USAGE, ("choose", "cuda")),
        (("--dtype", "int8"), Exit.USAGE, ("choose keep",)),
    ],
)
def test_mistakes_are_told(linearize: Command, folder: Path, options: tuple[str, ...], code: Exit, words: str) -> None:
    given = ("--teacher", folder.parent / "source", "--recipe", recipe(folder), *SMALL, *options)
    found, out, err = linearize("eval", folder, *given)
    assert (found, out) == (code, "")
    assert holds(err, *words)


def test_a_teacher_that_guesses_is_named(linearize: Command, folder: Path) -> None:
    """The source here has random weights."""
    given = ("--teacher", folder.parent / "source", "--recipe", recipe(folder), *SMALL)
    code, _, err = linearize("eval", folder, *given)
    assert code == 0
    assert "nearly random" in err


def test_a_result_takes_no_place_but_that_of_a_result(
    linearize: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before models are loaded, and what is there stays."""
    student = shutil.copytree(folder, tmp_path / "student")
    notes = tmp_path / "notes.json"
    notes.write_text('{"students": ["mine"]}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr("linearize.measure.generate.load_any", lambda *arguments, **named: pytest.fail("loaded"))
    for place, code, message in (
        (student / "config.json", Exit.USAGE, ("linearize", "write")),
        (student / "model.safetensors.index.json", Exit.USAGE, ("is there already",)),
        (notes, Exit.USAGE, ("Choose", "away")),
        (student, Exit.USAGE, ("folder", "file")),
        (Path("/dev/null"), Exit.USAGE, ("not", "file")),
        (notes / "eval.json", Exit.RESOURCE, ("Not", "directory")),
    ):
        given = ("--teacher", folder.parent / "source", "--recipe", recipe(folder), *SMALL)
        found, out, err = linearize("eval", student, *given, "-o", place)
        assert (found, out) == (code, ""), (place, err)
        assert holds(err, *message)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--lengths", "64,300"), ("--lengths", "300", "LinearizedGPT2LMHeadModel", "256")),
        (("data.pack.seq_len=257",), ("data.pack.seq_len=256",)),
    ],
)
def test_no_more_tokens_than_a_model_takes(
    linearize: Command, folder: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    student = base(tmp_path, "gpt2")
    given = ("--teacher", student.parent / "source", "--recipe", recipe(folder), *SMALL, *options)
    code, out, err = linearize("eval", student, *given)
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, *words)


@pytest.mark.parametrize(
    ("kind", "most"),
    [("gpt2", 256), ("opt", 256), ("bert", 256), ("roberta", 254), ("gptj", 256), ("llama", None)],
)
def test_tables_of_positions_end(kind: str, most: int | None) -> None:
    model = architectures.small_model(kind)
    assert most_tokens(model) == most
    model(torch.full((1, most or 300), 5))
    if most is not None:
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, most + 1), 5))


def test_a_teacher_is_needed_and_must_be_the_students(linearize: Command, folder: Path, tmp_path: Path) -> None:
    code, _, err = linearize("eval", folder)
    assert code == Exit.USAGE
    assert "--teacher is missing" in err
    code, _, err = linearize("eval", folder, "--teacher", model_folder(), "--recipe", recipe(folder), *SMALL)
    assert code == Exit.INCOMPATIBLE
    assert "different tokenizers" in err
    small_model("llama", vocab_size=300).save_pretrained(tmp_path / "wide")
    byte_tokenizer().save_pretrained(tmp_path / "wide")
    code, _, err = linearize("eval", folder, "--teacher", tmp_path / "wide", "--recipe", recipe(folder), *SMALL)
    assert code == Exit.INCOMPATIBLE
    assert "300" in err


def test_other_code_runs_only_when_trusted(linearize: Command, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, other := tmp_path / "other")
    (other / "mixer.py").write_text((other / "mixer.py").read_text() + "\n# mine\n")
    given = ("--teacher", folder.parent / "source", "--recipe", recipe(folder), *SMALL)
    code, _, err = linearize("eval", other, *given)
    assert code == Exit.INCOMPATIBLE
    assert "--trust-remote-code" in err
    assert linearize("eval", other, *given, "--trust-remote-code")[0] == 0


def test_the_table_has_every_measure(linearize: Command, folder: Path) -> None:
    code, out, err = linearize(
        "eval", folder, "--teacher", folder.parent / "source", "--recipe", recipe(folder), *SMALL
    )
    assert (code, out) == (0, "")
    for words in (
        "heldout.txt, in rows of 64; 1,386 of them are predicted; float32",
        "perplexity",
        "KL from the teacher",
        "same prediction (likeliest token)",
        "recall at 448",
        "needle",
        "state at 448",
        "perplexity by how far back the same two tokens last stood together",
        "1 to 32",
        "perplexity by position in",
        "128 to 256",
    ):
        assert words in " ".join(err.split())


# ---------------------------------------------------------------- by position


def test_positions_are_those_of_whole_texts(linearize: Command, folder: Path) -> None:
    """In parts of the trained length that go on from a cache, what one pass over each text gives."""
    told = measured(linearize, folder)["positions"]
    edges = [0, 64, 128, 256]  # the teacher was made for 256 tokens
    assert (told["trained_length"], told["recorded"], told["text"]) == (64, False, "documents")
    assert [(block["from"], block["to"]) for block in told["blocks"]] == [*itertools.pairwise(edges)]
    ids = byte_tokenizer()((folder.parent.parent / "heldout.txt").read_text(), return_tensors="pt")["input_ids"]
    ids = ids[:, : ids.shape[1] // 256 * 256].view(-1, 256)
    assert told["rows"] == len(ids) > 1
    student = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    teacher = AutoModelForCausalLM.from_pretrained(folder.parent / "source")
    with torch.no_grad():
        ours, theirs = (model(ids).logits[:, :-1].double().log_softmax(-1) for model in (student, teacher))
    losses = [-log_p.gather(-1, ids[:, 1:, None])[..., 0] for log_p in (ours, theirs)]
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    for block in told["blocks"]:
        part = slice(block["from"], block["to"])
        assert block["tokens"] == losses[0][:, part].numel()
        assert block["student_ppl"] == pytest.approx(losses[0][:, part].mean().exp().item(), rel=1e-3)
        assert block["teacher_ppl"] == pytest.approx(losses[1][:, part].mean().exp().item(), rel=1e-3)
        assert block["kl"] == pytest.approx(kl[:, part].mean().item(), rel=1e-2, abs=1e-5)
    ratios = [block["ppl_ratio"] for block in told["blocks"]]
    assert told["grows"] == pytest.approx(max(ratios[1:]) / ratios[0])


def test_rows_are_of_one_document_where_they_can_be(tmp_path: Path) -> None:
    lines = [json.dumps({"text": letter * size}) for letter, size in (("a", 10), ("b", 90), ("c", 30), ("d", 40))]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    source, tokenizer = TextSource(files=(tmp_path / "text.jsonl",)), byte_tokenizer()
    rows, origin = long_rows(source, tokenizer, 40, 9)
    assert [tokenizer.decode(row) for row in rows] == ["b" * 40, "b" * 40, "d" * 40]
    assert origin == "documents"
    rows, origin = long_rows(source, tokenizer, 100, 9)
    assert [set(tokenizer.decode(row, skip_special_tokens=True)) for row in rows] == [{"a", "b"}]
    assert origin == "joined"
    assert [len(row) for row in long_rows(source, tokenizer, 40, 2)[0]] == [40, 40]
    assert long_rows(source, tokenizer, 400, 1)[0] == []


def test_positions_end_where_models_and_text_do(folder: Path, tmp_path: Path) -> None:
    assert edges_of(64, None) == [0, 64, 128, 256, 512]
    assert edges_of(64, 300) == [0, 64, 128, 256]
    assert edges_of(64, 64) == [0, 64]
    assert longest_text(small_model("gpt2"), small_model("llama", max_position_embeddings=96)) == 96
    (tmp_path / "short.txt").write_text("ab" * 50)
    student = load_converted(folder, torch.float32, False)
    source, how = TextSource(files=(tmp_path / "short.txt",)), {"longest": None, "tokens": 999, "batch_tokens": 64}
    found = positions(reader(student), reader(student), source, byte_tokenizer(), student.device, trained=32, **how)
    assert [block["to"] for block in found["blocks"]] == [32, 64]
    assert all(block["ppl_ratio"] == 1.0 for block in found["blocks"])
    found = positions(reader(student), reader(student), source, byte_tokenizer(), student.device, trained=200, **how)
    assert (found["blocks"], found["grows"], warning_of(found)) == ([], None, None)


def test_a_student_that_forgets_past_its_length_is_warned_about() -> None:
    """One whose predictions are the teacher's for 8 tokens and noise behind them."""
    torch.manual_seed(0)
    table = torch.randn(20, 20) * 3

    def teacher(ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        return table[ids], (cache or 0) + ids.shape[1]

    def student(ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        logits, seen = teacher(ids, cache)
        return (logits if seen <= 8 else torch.zeros_like(logits)), seen

    ids = [[0]]
    while len(ids[0]) < 64:
        ids[0].append(int(table[ids[0][-1]].softmax(-1).multinomial(1)))
    blocks = by_position(student, teacher, torch.tensor(ids), [0, 8, 16, 64], 4)
    assert [block["ppl_ratio"] == pytest.approx(1.0) for block in blocks] == [True, False, False]
    grows = max(block["ppl_ratio"] for block in blocks[1:])
    told = warning_of({"trained_length": 8, "blocks": blocks, "grows": grows})
    assert told is not None
    assert holds(told, "trained on rows of 8 tokens", "1.000 times")
    assert warning_of({"trained_length": 8, "blocks": blocks, "grows": 1.09}) is None
    untrained = warning_of({"trained_length": 8, "recorded": False, "blocks": blocks, "grows": grows})
    assert untrained is not None
    assert "trained on" not in untrained
    assert holds(untrained, "1.000", "teacher's", "8")
    assert holds(untrained, "trained", "recorded")


def test_figures_that_are_easily_misread_have_a_note() -> None:
    some, none = ({"accuracy": value} for value in (0.5, 0.0))
    found = [{"student": none, "teacher": some}]
    assert remarks({"ppl_ratio": 1.1, "recall": found, "needle": []}) == []
    assert remarks({"ppl_ratio": 0.999, "recall": found, "needle": []}) == []  # noise
    teacher = Score(100.0, 0.5)
    for far in (Score(102.0, 0.5, 0.001), Score(100.0, 0.5, 0.02), Score(None, None, 0.001)):
        assert note_of_little(far, teacher) == ""
    near = note_of_little(Score(99.9, 0.5, 0.0018), teacher)
    assert holds(near, "note", "before any training", "0.999 times")
    stages = [{"name": name, "kl": kl} for name, kl in (("converted", 0.0033), ("logit_kl", 0.0066))]
    assert holds(note_farther(stages), "note", "0.0066", "0.0033 as converted", "Learning rates")
    unmeasured = {"name": "teacher", "kl": None}
    for nearer in (stages[::-1], [stages[0], stages[0]], stages[1:], [unmeasured, *stages[1:]], []):
        assert note_farther(nearer) == ""
    nothing = [{"student": none, "teacher": none}]
    below, recall = remarks({"ppl_ratio": 0.9, "recall": nothing, "needle": found})
    assert holds(below, "note", "below the teacher's")
    assert holds(recall, "note: recall", "0 %")
    shown_as_none = [{"student": {"accuracy": 2 / 256}, "teacher": {"accuracy": 1 / 256}}]
    for rows in (nothing, shown_as_none):
        (both,) = remarks({"ppl_ratio": 1.1, "recall": rows, "needle": nothing})
        assert holds(both, "note: recall and needle", "0 %")


def test_text_without_a_recipe_is_named(
    linearize: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_installed", lambda: [corpus.Document("json/a.py", "def f(x):\n    x\n" * 200)])
    given = ("--teacher", folder.parent / "source", *SMALL, "data.pack.seq_len=64", "eval.max_tokens=512")
    code, out, err = linearize("eval", folder, *given, "--json")
    assert code == 0, err
    assert json.loads(out)["text"] == "the held-out part of Python's standard library"
    assert holds(err, "--recipe", "Python's")
    assert holds(err, "Python's")
    own = tmp_path / "own.txt"
    own.write_text("def f(x):\n    return x\n" * 100)
    run = tmp_path / "run"
    shutil.copytree(folder, run / "final")
    recipe = load_recipe("demo", ["model.base=demo", f"data.eval={{files: [{own}]}}", "data.pack.seq_len=64"])
    (run / "run.json").write_text(json.dumps({"recipe": recipe.resolved()}))
    code, _, err = linearize("eval", run / "final", *given)
    assert holds(err, "run", "--recipe", f"{run}")
    code, out, err = linearize("eval", folder, *given, f"data.eval={{files: [{own}]}}", "--json")
    assert code == 0, err
    assert json.loads(out)["text"] == str(own)
    assert "no --recipe" not in err


def test_a_run_names_its_text_and_its_teacher(linearize: Command, folder: Path, tmp_path: Path) -> None:
    """Also where its recipe, whose folder its relative paths begin at, is elsewhere."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.txt").write_text("def f(x):\n    return x\n" * 100)
    run, source = tmp_path / "run", folder.parent / "source"
    run.mkdir()
    words = [f"model.base={source}", "data.eval={files: [own.txt]}", "data.pack.seq_len=32", "eval.max_tokens=512"]
    settings = {"recipe": load_recipe("demo", words).resolved(), "folder": str(tmp_path / "data")}
    (run / "run.json").write_text(json.dumps(settings))
    code, out, err = linearize("eval", folder, "--recipe", run, *SMALL, "--json")
    assert code == 0, err
    kept = f"not saved: with -o {run / 'eval.json'} it is for linearize report and compare, too"
    assert kept in " ".join(err.split())
    told = json.loads(out)
    assert told["text"] == str(tmp_path / "data" / "own.txt")
    assert (told["teacher"], told["seq_len"]) == (str(source), 32)
    assert told["tokens"] <= 512
    settings["recipe"]["data"]["eval"] = None
    (run / "run.json").write_text(json.dumps(settings))
    code, _, err = linearize("eval", folder, "--recipe", run)
    assert (code, holds(err, "--recipe", f"{run}", "data.eval=")) == (2, True)
    (run / "run.json").write_text("{}")
    assert "run.json is damaged" in linearize("eval", folder, "--recipe", run)[2]
    for other, near in ((tmp_path / "rum", f" Did you mean '{run}'?"), (folder, "")):  # told before a missing teacher
        code, _, err = linearize("eval", folder, "--recipe", other)
        told = f"--recipe {other}: no run and no recipe file is there.{near}"
        assert (code, told in " ".join(err.split())) == (2, True), err


@pytest.mark.parametrize("named", ["demo", "models/source", "Qwen/Qwen3-0.6B"])
def test_the_teacher_of_a_run_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """As `Next:` of a run prints it: the demo by its name, a folder by a path relative to where the run began."""
    run, start = tmp_path / "run", tmp_path / "start"
    run.mkdir()
    (start / "models" / "source").mkdir(parents=True)
    (start / "models" / "source" / "config.json").write_text("{}")
    recipe = {"model": {"base": named}, "convert": {}, "data": {"eval": None, "pack": {}}, "eval": {"max_tokens": 1}}
    recipe["convert"] = {"to": "gsa"}
    (run / "run.json").write_text(json.dumps({"recipe": recipe, "folder": str(start)}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = heldout_of(run)[1]
    expected = {"demo": str(model_folder()), "models/source": str(start / "models" / "source")}
    assert found == expected.get(named, named)


def test_a_run_from_a_converted_model_has_the_teacher_that_its_student_names(
    linearize: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student has the name of that folder alone, which lies where the run's data do, or here."""
    run, source = tmp_path / "run", folder.parent / "source"
    run.mkdir()
    text = folder.parent.parent / "heldout.txt"
    words = [f"model.base={folder}", f"data.eval={{files: [{text}]}}", "data.pack.seq_len=32", "eval.max_tokens=512"]
    settings = {"recipe": load_recipe("demo", words).resolved() | {"convert": None}, "folder": str(source.parent)}
    for place, start, teacher in ((tmp_path, source.parent, source), (source.parent, tmp_path, "source")):
        monkeypatch.chdir(place)
        (run / "run.json").write_text(json.dumps(settings | {"folder": str(start)}))
        code, out, err = linearize("eval", folder, "--recipe", run, *SMALL, "--json")
        assert code == 0, err
        assert json.loads(out)["teacher"] == str(teacher)
    monkeypatch.chdir(tmp_path)
    (run / "run.json").write_text(json.dumps(settings | {"folder": str(tmp_path)}))
    code, _, err = linearize("eval", folder, "--recipe", run, *SMALL)
    assert (code, "--teacher is missing" in err, holds(err, "linearize.json")) == (2, True, True)


def test_what_a_plan_converted_is_a_folder_or_a_model_of_the_hub(folder: Path, tmp_path: Path) -> None:
    plan = read_plan(folder)
    assert converted_from(plan, folder.parent) == str(folder.parent / "source")
    assert converted_from(plan, tmp_path) == converted_from(None, tmp_path) == ""
    on_hub = dataclasses.replace(plan, source="user/model", revision="abc")
    assert converted_from(on_hub, tmp_path) == "user/model"
    assert converted_from(dataclasses.replace(plan, source="demo"), tmp_path) == str(model_folder())


def test_a_teacher_that_is_converted_itself_is_noted(linearize: Command, folder: Path) -> None:
    given = ("--recipe", recipe(folder), *SMALL)
    code, _, err = linearize("eval", folder, "--teacher", folder, *given)
    assert code == 0, err
    assert holds(err, "--teacher", f"{folder}")
    assert "itself converted" not in linearize("eval", folder, "--teacher", folder.parent / "source", *given)[2]


def test_a_run_notes_where_its_data_files_start(tmp_path: Path) -> None:
    recipe = load_recipe("demo", ["model.base=x", f"data.eval={{files: [{tmp_path}/a.txt, ~/b.txt, c/d.txt]}}"])
    found = rooted(recipe.resolved()["data"]["eval"], tmp_path)
    assert found == {"files": [f"{tmp_path}/a.txt", str(Path("~/b.txt").expanduser()), f"{tmp_path}/c/d.txt"]}
    assert rooted({"images": "a", "classes": None, "seed": 1}, tmp_path) == {
        "images": f"{tmp_path}/a",
        "classes": None,
        "seed": 1,
    }


def test_a_text_of_ones_own_is_read_as_far_as_finetune_reads_it() -> None:
    own, demo = "data.eval={files: [own.txt]}", load_recipe("demo", ["model.base=demo"]).eval.max_tokens
    usual = load_recipe("gsa", ["model.base=demo", own]).eval.max_tokens
    assert demo < usual
    for recipe, given, tokens in (
        ("", [], demo),
        ("", [own], usual),
        ("", [own, "eval.max_tokens=512"], 512),
        ("demo", [own], demo),
    ):
        assert text_recipe(recipe, "demo", given).eval.max_tokens == tokens


# ---------------------------------------------------------------- what models write


class Writes:
    """Writes what `follows` says of the text so far; its cache is that text."""

    device = torch.device("cpu")

    def __init__(self, follows: Any, vocabulary: int = 300) -> None:
        self.follows, self.vocabulary = follows, vocabulary

    def forward(self, input_ids: Tensor, past_key_values: Any, use_cache: bool) -> Any:
        text = input_ids if past_key_values is None else torch.cat([past_key_values, input_ids], 1)
        logits = torch.zeros(len(text), 1, self.vocabulary)
        for row, ids in enumerate(text.tolist()):
            logits[row, 0, self.follows(ids)] = 9.0
        return CausalLMOutputWithPast(logits=logits, past_key_values=text)

    __call__ = forward


def test_values_are_answered_behind_the_models_own_answers() -> None:
    row = Row([1, 2, 3, 4, 5, 6, 7, 8], [range(2, 4), range(5, 7)], 2)
    assert answered(Writes(lambda ids: row.ids[len(ids)]), row) == [True, True]
    model = Writes(lambda ids: 9 if len(ids) == 3 or 9 in ids else row.ids[len(ids)])
    assert answered(model, row) == [False, False]  # the first answer is wrong, and the second follows it
    assert row.ids == [1, 2, 3, 4, 5, 6, 7, 8]


def test_repetition_is_told() -> None:
    good = [5, 6, 7, 8, 9]
    told = free_generation(Writes(lambda ids: good[(len(ids) - 3) % len(good)]), [[1, 2, 3]], [])
    assert told["recall"] is None
    assert told["repeated"] == pytest.approx(1 - len(good) / 61)  # 61 runs of 4 among 64 tokens
    assert repetition([1, 2, 3, 4, 5]) == 0.0
    assert repetition([1, 1, 1, 1, 1, 1]) == pytest.approx(2 / 3)


@pytest.mark.slow
def test_texts_are_written_where_they_are_asked_for(
    linearize: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured(linearize, folder)["generated"] is None
    (tmp_path / "code.jsonl").write_text("\n".join(json.dumps({"text": f"x{i} = {i}\n" * 90}) for i in range(5)))
    own = f"data.eval={{files: [{tmp_path / 'code.jsonl'}]}}"
    monkeypatch.setattr("linearize.terminal.progress.SHOWN_AFTER", 0.0)
    monkeypatch.setattr("linearize.terminal.progress.LINE_EVERY", 0.0)
    given = ("--teacher", folder.parent / "source", "--recipe", recipe(folder), *SMALL, own, "--generate", "3")
    code, out, err = linearize("eval", folder, *given, "--json")
    assert code == 0, err
    assert all(f"{what}: 100%, 0 s left" in err for what in ("eval", "perplexity by position", "texts of their own"))
    told = json.loads(out)["generated"]
    assert (told["texts"], told["rows"], told["length"]) == (3, 3, LENGTH)
    keys = ("recall", "repeated")
    assert all(0.0 <= told[who][key] <= 1.0 for who in ("student", "teacher") for key in keys)
    same = measured(linearize, folder, own, "--generate", "3", student=folder.parent / "source")["generated"]
    assert same["student"] == same["teacher"] == told["teacher"]


def test_answers_end_and_the_student_ends_them_where_the_teacher_does(folder: Path, tmp_path: Path) -> None:
    """Rows of different lengths go together; of a file of text nothing is asked."""
    source, tokenizer = folder.parent / "source", byte_tokenizer()
    teacher = AutoModelForCausalLM.from_pretrained(source)
    chats = [[{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a"}] for n in (3, 9)]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    prompts = questions(TextSource(files=(tmp_path / "chat.jsonl",)), tokenizer, 5)
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["u:qqq\na:", "u:qqqqqqqqq\na:"]
    assert questions(TextSource(files=(tmp_path / "chat.jsonl",)), tokenizer, 5, ANSWER + 8) == prompts[:1]
    assert questions(TextSource(files=(recipe(folder).parent / "train.jsonl",)), tokenizer, 5) == []
    alone = [continued(teacher, torch.tensor([prompt]), ANSWER)[0].tolist() for prompt in prompts]
    end = alone[0][5]
    expected = [row[: row.index(end) + 1] if end in row else row for row in alone]
    assert answers(teacher, prompts, [end]) == expected
    assert [end_in(teacher, *pair, [end]) for pair in zip(prompts, expected, strict=True)] == [
        row.index(end) if end in row else None for row in expected
    ]

    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    teacher.generation_config.eos_token_id = None
    told = compare_answers(teacher, teacher, tokenizer, prompts)
    assert told["student"] == told["teacher"]
    assert (told["asked"], told["same_end"]) == (2, 1.0)
    assert told["teacher"]["ended"] == sum(end in row for row in alone) / 2
    with torch.no_grad():
        teacher.get_input_embeddings().weight[end] = 0.0  # tied: the student never ends
    assert end_in(teacher, prompts[0], expected[0], [end]) is None


def test_continued_is_what_generate_writes(folder: Path) -> None:
    model = load_converted(folder, torch.float32, False)
    ids = torch.randint(1, 200, (2, 20), generator=torch.Generator().manual_seed(0))
    theirs = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(continued(model, ids, 6), theirs[:, 20:])


def test_demo_is_a_teacher_by_name(linearize: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def opened(name: str, *rest: Any, **options: Any) -> Any:
        asked.append(name)
        if len(asked) == 2:
            raise LinearizeError("enough")

    monkeypatch.setattr("linearize.measure.generate.load_any", opened)
    assert linearize("eval", str(folder), "--teacher", "demo")[0] == Exit.USAGE
    assert asked == [str(folder), str(model_folder())]
