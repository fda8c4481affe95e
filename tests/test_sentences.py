"""Sentence encoders: sentence-transformers loads what `linearize` writes, and `finetune` teaches embeddings."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizerFast

from linearize.checkpoint.carried import carried_files, left_behind
from linearize.convert import convert, next_step, plan_conversion
from linearize.data.batches import by_length
from linearize.data.packing import MaskedBlocks, TextSource, build_blocks, sentences, texts
from linearize.errors import LinearizeError
from linearize.finetune import finetune
from linearize.measure.embeddings import passages, pooling_of, spearman
from linearize.page.record import read_evaluation
from linearize.recipe.recipe import load_recipe
from linearize.train.loop import set_training
from linearize.train.losses import embedding_distance, pooled, similarity_error
from linearize.train.session import stage_notes

TEXTS = ["a small cat sat. it was warm", "rain fell all night on the roof of the barn", "go"]
MODULES = ("Transformer", "Pooling", "Normalize")


def sentence_encoder(folder: Path, pooling: str = "mean_tokens") -> Path:
    """A small random BERT with the files of sentence-transformers: pooling, then vectors of length 1."""
    folder.mkdir()
    letters = "abcdefghijklmnopqrstuvwxyz.,"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    sharp = BertConfig(**size, vocab_size=len(words), max_position_embeddings=64, initializer_range=0.4)
    BertModel(sharp).save_pretrained(folder)
    kinds = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    settings = {f"pooling_mode_{kind}": kind == pooling for kind in kinds}
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{name}" * bool(n), "type": f"sentence_transformers.models.{name}"}
        for n, name in enumerate(MODULES)
    ]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **settings}))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48, "do_lower_case": False}))
    return folder


def write(file: Path, documents: list[str]) -> None:
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))


def embedded(folder: Path, texts: list[str]) -> torch.Tensor:
    """Mean of the last hidden states of real tokens, of length 1, by transformers alone."""
    model, tokenizer = AutoModel.from_pretrained(folder, trust_remote_code=True), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt")
    with torch.no_grad():
        hidden = model.eval()(**batch).last_hidden_state
    real = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def test_sentence_transformers_loads_the_result(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source")
    folder = tmp_path / "la"
    planned = plan_conversion(str(source), "la")
    convert(*planned, folder, level="none", say=lambda text: None)
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card
    assert "SentenceTransformer(name, trust_remote_code=True)" in card
    command = shlex.split(next_step(planned[0], folder, planned[2]).splitlines()[0])
    assert [stage.kind for stage in load_recipe(command[4], command[5:]).stages][-1] == "feature_cosine"
    model = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    assert [type(module).__name__ for module in model] == list(MODULES)
    assert model.max_seq_length == 48
    ours = model.encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(ours, embedded(folder, TEXTS), rtol=1e-4, atol=1e-5)
    assert (ours - embedded(source, TEXTS)).abs().max() > 1e-3  # it runs the mixers


def test_only_modules_of_sentence_transformers_go_along(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source")

    def along() -> set[str]:
        names = {path.relative_to(source).as_posix() for path in carried_files(source)}
        return {name for name in names if "odul" in name or "sentence" in name or "/" in name}

    every = {"modules.json", "sentence_bert_config.json", "1_Pooling/config.json"}
    assert along() == every
    (source / "1_Pooling" / "notes.txt").write_text("mine")
    assert along() == every
    text = (source / "modules.json").read_text()
    for found, instead in (("sentence_transformers.models.Pooling", "my_code.Pooling"), ("1_Pooling", "../other")):
        (source / "modules.json").write_text(text.replace(found, instead))
        assert along() == set()
    (source / "modules.json").write_text(text)
    (source / "1_Pooling" / "pytorch_model.bin").write_bytes(b"")
    assert along() == set()


def test_an_empty_folder_of_a_module_is_not_left_behind(tmp_path: Path) -> None:
    """sentence-transformers makes one for `Normalize`."""
    folder = sentence_encoder(tmp_path / "source")
    (folder / "2_Normalize").mkdir()
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").touch()
    assert left_behind(folder, [folder / "model.safetensors"]) == ["onnx/"]


def test_a_text_is_some_sentences_and_each_sentence_comes_once() -> None:
    document = " ".join(f"Sentence number {n} of this document." for n in range(20)) + "\n\nA heading without an end"
    found = list(texts(document))
    assert [len(sentences(text)) for text in found[:5]] == [1, 2, 4, 8, 1]
    assert " ".join(found) == " ".join(sentences(document))
    assert sentences(document)[-1] == "A heading without an end"
    assert list(texts("short.\n\n12")) == []


def test_rows_of_texts_have_special_tokens_padding_and_no_neighbours(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sentence_encoder(tmp_path / "source"))
    documents = ["the first sentence is here. the second sentence is longer than the first one.", "another document."]
    write(tmp_path / "a.jsonl", documents)
    source = TextSource(files=(tmp_path / "a.jsonl",))
    made = {"sft": False, "max_tokens": None}
    blocks = build_blocks(source, tokenizer, 24, tmp_path, texts=True, **made)
    assert len(blocks) == 3
    for row, text in zip(range(3), [text for one in documents for text in texts(one)], strict=True):
        block, expected = blocks[row], tokenizer(text, truncation=True, max_length=24)["input_ids"]
        assert block["input_ids"][block["valid"]].tolist() == expected
        assert not block["valid"][len(expected) :].any()
    assert len(build_blocks(source, tokenizer, 24, tmp_path, **made)) != 3  # not the same file of the cache
    item = MaskedBlocks(blocks, tokenizer, 0, hide=False)[0]
    assert torch.equal(item["input_ids"], blocks[0]["input_ids"])
    assert (item["labels"] == -100).all()
    assert torch.equal(item["attention_mask"].bool(), blocks[0]["valid"])
    write(tmp_path / "short.jsonl", ["a cat.", "short."])
    with pytest.raises(LinearizeError, match=r"short\.jsonl.*no sentence.*12 characters.*data\.pack\.rows"):
        build_blocks(TextSource(files=(tmp_path / "short.jsonl",)), tokenizer, 24, tmp_path, texts=True, **made)


def test_rows_of_a_step_are_sorted_by_length_and_lose_padding_alone() -> None:
    lengths = [[5, 2], [3, 8]]
    made = []
    for some in lengths:
        mask = (torch.arange(10) < torch.tensor(some)[:, None]).long()
        ids = mask * (torch.tensor(some)[:, None] * 100 + torch.arange(10))
        made.append({"input_ids": ids, "attention_mask": mask, "valid": mask.bool()})
    found = by_length(made)
    assert [batch["attention_mask"].sum(1).tolist() for batch in found] == [[2, 3], [5, 8]]
    assert [batch["valid"].shape for batch in found] == [(2, 3), (2, 8)]
    assert sum(int(batch["input_ids"].sum()) for batch in found) == sum(int(batch["input_ids"].sum()) for batch in made)
    packed = [{"input_ids": torch.ones(2, 4), "position_ids": torch.ones(2, 4), "valid": torch.ones(2, 4)}]
    assert by_length(packed) is packed


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_one_vector_is_made_of_real_tokens(pooling: Any) -> None:
    hidden, real = torch.randn(3, 5, 4), torch.tensor([[1, 1, 0, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]).bool()
    expected = (
        hidden[:, 0] if pooling == "first" else torch.stack([h[m].mean(0) for h, m in zip(hidden, real, strict=True)])
    )
    hidden = hidden.masked_fill(~real[..., None], torch.nan)
    torch.testing.assert_close(pooled(hidden, real, pooling), expected)
    if pooling == "mean":
        torch.testing.assert_close(pooled(torch.ones(2, 3, 4), None, pooling), torch.ones(2, 4))


def test_losses_of_vectors() -> None:
    ours, theirs = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    cosines = torch.cosine_similarity(ours, theirs)
    torch.testing.assert_close(embedding_distance(ours, theirs, 8), (1 - cosines).sum() / 8)
    a, b = (torch.cosine_similarity(x[:, None], x[None], dim=-1) for x in (ours, theirs))
    error = sum((a[i, j] - b[i, j]) ** 2 for i in range(4) for j in range(4) if i != j) / 3 / 8
    torch.testing.assert_close(similarity_error(ours, theirs, 8), error)
    turned = torch.linalg.qr(torch.randn(6, 6))[0]
    assert similarity_error(theirs @ turned, theirs, 4) < 1e-10  # not of a rotation of all vectors
    (embedding_distance(ours, theirs, 8) + similarity_error(ours, theirs, 8)).backward()
    assert theirs.grad is None
    assert similarity_error(ours[:1], theirs[:1], 1) < 1e-10


def test_spearman_is_that_of_scipy() -> None:
    ours, theirs = torch.randn(200), torch.randn(200)
    assert spearman(ours, theirs + ours) == pytest.approx(spearmanr(ours, theirs + ours).statistic)
    assert spearman(ours, ours.exp()) == pytest.approx(1.0)


def test_eval_compares_two_sentence_encoders(tmp_path: Path, linearize: Command) -> None:
    source, folder = sentence_encoder(tmp_path / "source"), tmp_path / "la"
    convert(*plan_conversion(str(source), "la"), folder, level="none", say=lambda text: None)
    words = ["cat", "sat", "rain", "fell", "roof", "barn", "warm", "night", "small", "all"]
    generator = random.Random(0)
    documents = [". ".join(" ".join(generator.choices(words, k=12)) for _ in range(40)) for _ in range(3)]
    write(tmp_path / "b.jsonl", documents)
    text = ["data.eval={files: " + str(tmp_path / "b.jsonl") + "}", "data.pack.seq_len=48"]
    found = json.loads(linearize("eval", str(folder), *text, "--teacher", str(source), "--json")[1])
    assert found["kind"] == "embeddings"
    assert (found["pooling"], found["longest"]) == ("mean", 48)
    assert 0.0 < found["spearman_sentences"] < 1.0
    rows = list(passages(iter(documents)))
    assert found["passages"] == len(rows)
    ours = embedded(folder, [first for first, _ in rows])
    theirs = embedded(source, [first for first, _ in rows])
    assert found["cosine_sentences"] == pytest.approx(float((ours * theirs).sum(1).mean()), abs=1e-4)
    (tmp_path / "eval.json").write_text(json.dumps(found))
    with pytest.raises(LinearizeError, match=r"vectors.*encoders"):
        read_evaluation(tmp_path, tmp_path / "eval.json")
    itself = json.loads(linearize("eval", str(source), *text, "--teacher", str(source), "--json")[1])
    assert itself["spearman_passages"] == pytest.approx(1.0)
    assert itself["same_answer"] == 1.0


def test_pooling_is_read_from_the_folder(tmp_path: Path) -> None:
    assert pooling_of(sentence_encoder(tmp_path / "a")) == "mean"
    assert pooling_of(sentence_encoder(tmp_path / "b", "cls_token")) == "first"
    assert pooling_of(tmp_path) == "mean"
    with pytest.raises(LinearizeError, match=r"max_tokens.*linearize.*mean_tokens"):
        pooling_of(sentence_encoder(tmp_path / "c", "max_tokens"))


def student_of(place: Path, source: Path, **changes: Any) -> Any:
    """A recipe of both stages for a small sentence encoder, in `place`."""
    words = ["cat", "sat", "rain", "fell", "roof", "barn", "warm", "night", "small", "all"]
    generator = random.Random(0)
    for name in ("a", "b"):
        documents = [". ".join(" ".join(generator.choices(words, k=9)) for _ in range(30)) for _ in range(8)]
        write(place / f"{name}.jsonl", documents)
    batch = {"per_device": 4, "gradient_accumulation_steps": 2}
    stages = [
        {"kind": "attention_transfer", "train": "new", "optimizer": {"lr": 1e-2}, "steps": 10, "batch": batch},
        {
            "kind": "feature_cosine",
            "train": "all",
            "loss": {"cosine": 1.0, "embedding": 0.5, "similarity": 2.0, "pooling": "mean"},
            "optimizer": {"lr": 1e-3, "new_lr": 3e-3},
            "steps": 20,
            "batch": batch,
            **changes,
        },
    ]
    value = {
        "version": 1,
        "name": "sentences",
        "output_dir": str(place / "run"),
        "model": {"base": str(source)},
        "convert": {"mechanism": "la", "options": {"feature_map": "hedgehog"}},
        "data": {"train": {"files": "a.jsonl"}, "eval": {"files": "b.jsonl"}, "pack": {"seq_len": 40, "rows": "texts"}},
        "stages": stages,
        "eval": {"every_steps": 10, "max_tokens": 400},
        "finish": {"verify": False, "keep": "best"},
    }
    (place / "recipe.yaml").write_text(json.dumps(value))
    return load_recipe(place / "recipe.yaml")


@pytest.mark.parametrize(("pooling", "named"), [("cls_token", True), ("mean_tokens", False), ("max_tokens", False)])
def test_another_pooling_than_the_models_is_noted(tmp_path: Path, pooling: str, named: bool) -> None:
    folder = sentence_encoder(tmp_path / "source", pooling)
    recipe = load_recipe("sentence", [f"model.base={folder}", "data.pack.seq_len=32"])
    stages = [(stage, 16) for stage in recipe.stages]
    notes = stage_notes(BertModel.from_pretrained(folder), recipe, stages, folder)
    assert any("stages.feature_cosine.loss.pooling=first" in note for note in notes) == named
    assert stage_notes(BertModel.from_pretrained(folder), recipe, stages[:1], folder) == []


def test_an_encoder_learns_its_teachers_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.convert.verify", lambda *arguments: "not verified")
    source = sentence_encoder(tmp_path / "source")
    report = finetune(student_of(tmp_path, source))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in lines if row.get("stage") == "feature_cosine" and "embedding" in row]
    assert len(rows) == 20
    for row in rows:
        terms = row["cosine"] + 0.5 * row["embedding"] + 2.0 * row["similarity"]
        assert row["loss"] == pytest.approx(terms, rel=1e-4)
    assert sum(row["loss"] for row in rows[-5:]) < 0.8 * sum(row["loss"] for row in rows[:5])
    errors = [row["eval_error"] for row in lines if "eval_error" in row]
    assert len(errors) == 5  # of the converted model, the first stage, two of the second, and what is kept
    assert errors[-1] == min(errors) < 0.8 * errors[0]
    final = Path(report["output"])
    ours = embedded(final, TEXTS)
    model = SentenceTransformer(str(final), trust_remote_code=True, device="cpu")
    torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), ours, rtol=1e-4, atol=1e-5)


def test_features_are_learned_without_the_sources_dropout() -> None:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(**size, vocab_size=30))
    ids = torch.arange(10)[None]

    def noisy() -> bool:
        return not torch.equal(model(ids).last_hidden_state, model(ids).last_hidden_state)

    set_training(model)
    assert noisy()
    set_training(model, dropout=False)
    assert not noisy()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    set_training(model, dropout=False)
    assert not noisy()
    assert any(module.training for module in model.modules())


def test_a_loss_without_terms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LinearizeError, match=r"similarity.*0"):
        student_of(tmp_path, tmp_path, loss={"cosine": 0.0})
