"""The demo model and its corpus: what ships is small, loads, and is as good as its card says."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import linearize.demo
from linearize.demo import tour
from linearize.demo.corpus import HELD_OUT, Document, documents, is_test, split_of
from linearize.errors import Exit, LinearizeError

MODEL = Path(linearize.demo.__file__).parent / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def library() -> list[Document]:
    return documents("train")


@pytest.fixture(scope="module")
def heldout_library() -> list[Document]:
    return documents("heldout")


def test_splits_are_disjoint_and_deterministic(library, heldout_library):
    assert library == documents("train")
    assert [d.name for d in library] == sorted(d.name for d in library)
    assert {d.text for d in library}.isdisjoint(d.text for d in heldout_library)
    assert {d.name.split("/")[0] for d in heldout_library} >= {*HELD_OUT, "topics"}
    train_size, heldout_size = (sum(len(d.text) for d in split) for split in (library, heldout_library))
    assert 0.04 < heldout_size / (train_size + heldout_size) < 0.10


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("json/decoder.py", "heldout"),
        ("test/test_json/test_tool.py", "heldout"),
        ("test/test_logging.py", "heldout"),
        ("test/test_email/__init__.py", "heldout"),
        ("topics/formatstrings", "heldout"),
        ("topics/with", "train"),
        ("jsonify.py", "train"),
        ("argparse.py", "train"),
        ("xml/dom/json.py", "train"),
    ],
)
def test_split_goes_by_name(name, split):
    assert split_of(name) == split


def test_suites_are_left_out(library):
    assert not any(is_test(document.name) for document in library)


def test_model_folder_is_small():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 8_000_000


def test_tokenizer_keeps_text_and_marks_its_ends(tokenizer, model):
    text = "def  f(a):\n\n\treturn 'é ✓', 1234567\n    "
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert len(tokenizer) == model.config.vocab_size


def test_chat_template_masks_what_the_assistant_says(tokenizer):
    chat = [{"role": "user", "content": "ready?"}, {"role": "assistant", "content": "yes"}]
    options = {"return_dict": True, "return_tensors": "pt", "return_assistant_tokens_mask": True}
    rows = tokenizer.apply_chat_template(chat, **options)
    spoken = rows["input_ids"][0][rows["assistant_masks"][0].bool()]
    assert tokenizer.decode(spoken) == f"yes{tokenizer.eos_token}"


def test_heldout_perplexity_is_the_recorded_one(model, tokenizer, heldout_library):
    with (MODEL / "curve.csv").open() as file:
        recorded = min(float(row["heldout_ppl"]) for row in csv.DictReader(file))
    texts = tokenizer([document.text for document in heldout_library], verbose=False)["input_ids"]
    rows = torch.cat([torch.tensor(text).unfold(0, 512, 512) for text in texts if len(text) >= 512])[::50]
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    assert loss.exp() < 1.15 * recorded


def test_generation_gives_text(model, tokenizer):
    prompt = tokenizer("class Stack:\n    def __init__(self):\n", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    written = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert "self." in written
    assert "\ufffd" not in written


@pytest.mark.slow
def test_a_student_that_does_not_load_fails_a_check(tmp_path, monkeypatch):
    monkeypatch.setattr(tour, "NEW_TOKENS", 2)
    with pytest.raises(LinearizeError, match="nothing") as error:
        tour.side_by_side({"student": tmp_path / "nothing"}, "def f", print)
    assert error.value.code == Exit.CHECK_FAILED


@pytest.mark.parametrize("keep", [False, True], ids=["temporary", "kept"])
def test_the_demo_says_what_becomes_of_its_folder(tmp_path, monkeypatch, keep):
    """Without -o its folder is gone at the end, and the last message says so and how to keep it."""
    plan = SimpleNamespace(kept=(), to_json=lambda: {"choice": {}})
    monkeypatch.setattr(tour, "plan_base", lambda recipe, say: (plan,))
    monkeypatch.setattr(tour, "plan_table", lambda plan: None)
    monkeypatch.setattr(tour, "side_by_side", lambda folders, prompt, say: {})
    monkeypatch.setattr(tour, "compared", lambda recipe, folders, reports: {})
    monkeypatch.setattr(tour, "demo_table", lambda found, kept: None)

    def distil(recipe, say):
        Path(recipe.output_dir).mkdir(parents=True)

    monkeypatch.setattr(tour, "finetune", distil)
    monkeypatch.setattr(tour.tempfile, "tempdir", str(tmp_path))
    messages = []
    tour.tour(tmp_path / "kept" if keep else None, "x", messages.append)
    folders = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("hybrid")]
    assert folders == (["kept/hybrid"] if keep else [])
    gone = [line for line in messages if "is temporary and is removed now. linearize demo -o DIR keeps" in line]
    assert gone == ([] if keep else [messages[-1]])
