"""Sources of text: packed files and parquet, files of a dataset, several with weights, lines that cannot be read."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from training import (
    T,
    base,
    byte_tokenizer,
    make_recipe,
    metrics,
    recipe_values,
    stage,
    text,
    train,
    write_data,
    write_recipe,
)

from linearize.data import documents
from linearize.data.batches import source_hash
from linearize.data.documents import TextSource, rows_of
from linearize.data.packing import Blocks, MixedBlocks, build_blocks, identity
from linearize.errors import Exit, LinearizeError
from linearize.job.checks import check_text
from linearize.recipe.data import DatasetSource, FileSource, MixSource
from linearize.recipe.recipe import load_recipe

ROWS = [{"text": f"document {number}"} for number in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def packed(file: Path, data: bytes) -> Path:
    """A file with these bytes, packed as its name says."""
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(data))
    elif file.suffix == ".zst":
        with pyarrow.CompressedOutputStream(pyarrow.OSFile(str(file), "wb"), "zstd") as out:
            out.write(data)
    elif file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in data.splitlines()]), file)
    else:
        file.write_bytes(data)
    return file


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = list(rows_of(TextSource(files=(packed(tmp_path / name, LINES),))))
    assert [dict(row.fields) for row in rows] == ROWS
    assert rows[2].where == f"{tmp_path / name}{' row 2' if name.endswith('parquet') else ':3'}"
    FileSource(files=(name,))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a\xff"}', r":3:12: not UTF-8 \(byte 0xff\)"),
        (b'{"text": ', r":3:\d+: not JSON"),
        (b'{"text": "a", "id": ' + b"9" * 5000 + b"}", r":3: a number"),
    ],
    ids=["bytes", "cut", "digits"],
)
def test_an_unreadable_line_names_itself(tmp_path: Path, name: str, line: bytes, words: str) -> None:
    lines = LINES.splitlines()
    file = packed(tmp_path / name, b"\n".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(LinearizeError, match=name.replace(".", r"\.") + words):
        list(rows_of(TextSource(files=(file,))))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_damaged_file_says_where(tmp_path: Path, name: str) -> None:
    file = packed(tmp_path / name, LINES * 2000)
    file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2])
    with pytest.raises(LinearizeError, match=name.replace(".", r"\.")):
        list(rows_of(TextSource(files=(file,))))


def test_files_of_a_dataset_are_read_alone(tmp_path: Path) -> None:
    for number in range(2):
        packed(tmp_path / f"part-{number}.jsonl", json.dumps({"text": f"of {number}"}).encode() + b"\n")
    one = TextSource(path=str(tmp_path), data_files=("part-1.jsonl",))
    assert [row.fields["text"] for row in rows_of(one)] == ["of 1"]
    both = [source_hash(DatasetSource(path=str(tmp_path), data_files=x), Path()) for x in ((), ("part-1.jsonl",))]
    assert both[0] != both[1]


# ---------------------------------------------------------------- before the conversion


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "folder"])
def test_text_is_read_before_the_conversion(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training could not read is told by its file and line before anything is written, whatever comes after."""
    monkeypatch.setattr("linearize.job.start.convert", lambda *given, **named: pytest.fail("converts"))
    rows = [{"text": "a b c"}] * 400
    (tmp_path / "folder").mkdir()
    file, data, where = tmp_path / name, {"files": [name]}, f"{name}:301:10: not JSON"
    broken = "".join('{"text": }\n' if number == 300 else json.dumps(row) + "\n" for number, row in enumerate(rows))
    if name == "a.parquet":
        packed(file, "\n".join(json.dumps({"text": "a" if n != 300 else None, "id": n}) for n in range(400)).encode())
        where = "a.parquet row 300: 'text' is null"
    elif name == "folder":
        packed(file / "part.jsonl", broken.encode())
        data, where = {"path": str(file)}, "dataset .*folder"
    else:
        packed(file, b"\xff" if name == "a.txt" else broken.encode())
        where = "a.txt is not UTF-8" if name == "a.txt" else where
    convert = {"mechanism": "gsa", "options": {"slots": 4}, "keep_softmax": "1"}
    source = base(root, "llama").parent / "source"
    with pytest.raises(LinearizeError, match=where):
        train(make_recipe(tmp_path, source, stage("logit_kl"), convert=convert, data={"train": data}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(("name", "content"), [("a.txt", ""), ("a.jsonl", '{"text": " \\n\\t"}'), ("a.txt", "a")])
def test_text_with_nothing_to_predict_is_refused_before_the_conversion(
    root: Path, tmp_path: Path, split: str, name: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, white space alone, a single token."""
    monkeypatch.setattr("linearize.job.start.convert", lambda *given, **named: pytest.fail("converts"))
    (tmp_path / name).write_text(content)
    data = {"train": {"files": ["train.jsonl"]}, split: {"files": [name]}}
    source = base(root, "llama").parent / "source"
    with pytest.raises(LinearizeError, match=f"{name} has (no text|one token)") as refused:
        train(make_recipe(tmp_path, source, stage("logit_kl"), convert={"mechanism": "gsa"}, data=data))
    assert refused.value.code == Exit.USAGE
    assert not (tmp_path / "run").exists()
    with pytest.raises(LinearizeError, match=f"{name} has (no text|one token)"):  # of a model that is converted
        train(make_recipe(tmp_path, base(root, "llama"), stage("logit_kl"), data=data))
    assert not (tmp_path / "run").exists()


def test_a_row_of_one_token_is_refused_by_the_recipe(root: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, base(root, "llama"), stage("logit_kl"))
    for value in ("data.pack.seq_len=1", "stages[0].data.pack.seq_len=1"):
        with pytest.raises(LinearizeError, match=r"seq_len.*must be >= 2"):
            load_recipe(recipe, [value])


def test_a_text_to_score_by_is_read_before_weights(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linearize: Any
) -> None:
    """Of layers that are chosen, and of the cost of a window."""
    monkeypatch.setattr("linearize.choose.choose.load_source", lambda *given: pytest.fail("reads weights"))
    source = base(root, "llama").parent / "source"
    command = ["convert", source, "--to", "gsa", "-o", tmp_path / "out", "--score-text"]
    chosen, priced = ["--keep-softmax", "auto:1"], ["--keep-softmax", "1", "--kept-window", "8"]
    for name, content, words in (
        ("a.txt", "", "a.txt has no text"),
        ("b.txt", "b", "b.txt has one token"),
        ("c.jsonl", '{"body": "some text"}', "no 'text'"),
    ):
        (tmp_path / name).write_text(content)
        for asked in (chosen, priced):
            code, _, err = linearize(*command, tmp_path / name, *asked)
            assert (code, words in err, "text_key" in err) == (Exit.USAGE, True, False), err
    assert not (tmp_path / "out").exists()


def test_rows_are_read_as_the_stage_reads_them(root: Path, tmp_path: Path) -> None:
    """A row may be sound as text and useless as a conversation; and the held-out text is looked at, too."""
    (tmp_path / "both.jsonl").write_text(json.dumps({"text": "a", "messages": "b"}))
    (tmp_path / "body.jsonl").write_text(json.dumps({"body": "a"}))
    both, held_out = {"train": {"files": ["both.jsonl"]}}, {"train": mix(("train.jsonl", 1.0), ("body.jsonl", 1.0))}
    linear = base(root, "llama")
    check_text(make_recipe(tmp_path, linear, stage("logit_kl"), data=both))
    for recipe_stage, data, words in (
        (stage("logit_kl", completion_only=True), both, "both.jsonl:1: `messages` is not a list"),
        (stage("sft"), both, "both.jsonl:1: `messages` is not a list"),
        (stage("logit_kl"), held_out, "body.jsonl:1: no 'text'"),
        (stage("logit_kl"), {"train": {"files": ["short.txt"]}, "eval": {"files": ["body.jsonl"]}}, "body.jsonl:1: no"),
        (
            stage("logit_kl", data={"pack": {"text_key": "body"}}),
            {"train": {"files": ["train.jsonl"]}},
            "train.jsonl:1: no 'body'",
        ),
    ):
        with pytest.raises(LinearizeError, match=words):
            check_text(make_recipe(tmp_path, linear, recipe_stage, data=data))


@pytest.mark.parametrize(
    ("row", "message", "word"), [({"tools": [{}]}, {}, "'tools'"), ({}, {"weight": 0}, "'weight'")]
)
def test_what_a_conversation_says_and_nobody_heeds_is_refused(
    root: Path, tmp_path: Path, row: dict[str, Any], message: dict[str, Any], word: str
) -> None:
    def check(row: dict[str, Any], message: dict[str, Any]) -> None:
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **message}]
        (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages, **row}))
        data = {"train": {"files": ["chat.jsonl"]}}
        check_text(make_recipe(tmp_path, base(root, "llama"), stage("sft"), data=data))

    check({"tools": None}, {"weight": 1})
    with pytest.raises(LinearizeError, match=rf"chat.jsonl:1: .*{word}"):
        check(row, message)


def test_conversations_without_an_answer_are_refused_before_the_conversion(root: Path, tmp_path: Path) -> None:
    """As prompts of the teacher they are what is asked for, and among others they are passed over."""
    for name, role in (("asked", "user"), ("large", "Assistant"), ("small", "assistant")):
        messages = [{"role": "user", "content": "q"}, {"role": role, "content": "a"}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": messages}))

    def check(train: Any, **changes: Any) -> None:
        check_text(make_recipe(tmp_path, base(root, "llama"), stage("logit_kl", **changes), data={"train": train}))

    for name, words in (("asked", "'assistant'.*Found: user$"), ("large", "'assistant'.*Found: Assistant, user$")):
        check({"files": [f"{name}.jsonl"]})
        check({"files": [f"{name}.jsonl", "small.jsonl"]}, completion_only=True)
        check({"teacher": {"tokens": 100, "prompts": f"{name}.jsonl"}}, completion_only=True)
        with pytest.raises(LinearizeError, match=words):
            check({"files": [f"{name}.jsonl"]}, completion_only=True)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_dry_run_reads_the_first_row_alone(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = packed(tmp_path / name, LINES * 2000)
    with pytest.raises(LinearizeError, match=rf"{name}(:1| row 0).*'txt'.*'text'"):
        documents.check_first_rows(TextSource(files=(file,), text_key="txt"), sft=False)
    read, row = list[Any](), documents._text
    monkeypatch.setattr(documents, "_text", lambda *given: read.append(given) or row(*given))
    documents.check_first_rows(TextSource(files=(file,)), sft=False)
    documents.check_first_rows(TextSource(files=(file,)), sft=True)
    assert len(read) == 2
    monkeypatch.setattr(documents, "open_dataset", lambda *given: pytest.fail("opens a dataset"))
    documents.check_first_rows(TextSource(path=str(tmp_path)), sft=False)
    documents.check_first_rows(TextSource(demo="train"), sft=False)
    (tmp_path / "zero.txt").touch()
    with pytest.raises(LinearizeError, match=r"zero\.txt has no text"):
        documents.check_first_rows(TextSource(files=(tmp_path / "zero.txt",)), sft=False)
    for null in ("null.jsonl", "null.parquet"):
        file = packed(tmp_path / null, b'{"text": null, "n": 1}\n')
        with pytest.raises(LinearizeError, match=rf"{null}.*'text' is null.*row"):
            documents.check_first_rows(TextSource(files=(file,)), sft=False)


@pytest.mark.slow
def test_a_dry_run_says_of_text_what_the_run_says(root: Path, tmp_path: Path, linearize: Any) -> None:
    """Of training and held-out text; an estimate reads none."""
    (tmp_path / "txt.jsonl").write_text(json.dumps({"txt": "a"}))
    for train_on, held, words in (
        ("train.jsonl", "heldout.txt", "train.jsonl:1: no 'txt'"),
        ("txt.jsonl", "train.jsonl", "train.jsonl:1: no 'txt'"),
        ("txt.jsonl", "heldout.txt", ""),
    ):
        data = {"train": {"files": [train_on]}, "eval": {"files": [held]}}
        recipe = write_recipe(tmp_path, base(root, "llama"), stage("logit_kl"), data=data)
        key = "data.pack.text_key=txt"
        code, _, err = linearize("finetune", recipe, key, "--dry-run")
        assert (code, words in err) == (2 * bool(words), True), err
        assert ("Did you mean 'text'?" in " ".join(err.split())) == bool(words)
        if words and held == "heldout.txt":
            assert linearize("estimate", recipe, key)[0] == 0
            assert linearize("finetune", recipe, key)[0] == 2


def test_of_very_long_text_each_file_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LOOKED_AT", 300)
    good = packed(tmp_path / "good.jsonl", LINES * 2000)
    for at, told in ((2, True), (5000, False)):
        lines = (LINES * 2000).splitlines()
        file = packed(tmp_path / "bad.jsonl", b"\n".join([*lines[:at], b"{", *lines[at:]]))
        with pytest.raises(LinearizeError, match=r"bad\.jsonl:3") if told else contextlib.nullcontext():
            documents.check_rows(TextSource(files=(good, file)), sft=False)


def test_of_a_dataset_of_the_hub_one_row_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its split is streamed, and without what datasets cannot stream: a slice, or a sum."""
    asked, rows = list[Any](), iter([{"body": "a"}, {"text": "b"}])
    monkeypatch.setattr(documents, "open_dataset", lambda *given: asked.append(given) or rows)
    with pytest.raises(LinearizeError, match=r"some/set.*0.*'text'"):
        documents.check_rows(TextSource(path="some/set", split="test[:1%]+train"), sft=False)
    assert asked == [("some/set", None, "test", True, ())]
    documents.check_rows(TextSource(path="some/set"), sft=False)
    assert next(rows, None) is None

    def cannot(*given: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(documents, "open_dataset", cannot)
    documents.check_rows(TextSource(path="some/set"), sft=False)  # its download says more


# ---------------------------------------------------------------- several sources


def blocks(folder: Path, name: str, words: int) -> Blocks:
    (folder / name).write_text(text(words, len(name)))
    source = TextSource(files=(folder / name,))
    return build_blocks(source, byte_tokenizer(), T, folder / "cache", sft=False, max_tokens=None)


def test_every_field_of_a_source_names_its_cache(tmp_path: Path) -> None:
    """Or two texts would share the packed blocks of one."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    of_files, of_a_dataset = TextSource(files=(tmp_path / "a.txt",)), TextSource(path="some/dataset")
    changes: list[tuple[TextSource, dict[str, Any]]] = [
        (of_files, {"files": (tmp_path / "b.txt",)}),
        (of_files, {"text_key": "body"}),
        (of_a_dataset, {"path": "another/dataset"}),
        *((of_a_dataset, {key: "other"}) for key in ("name", "split")),
        (of_a_dataset, {"data_files": ("a.txt",)}),
        (of_a_dataset, {"streaming": True}),
        (TextSource(demo="heldout"), {"demo": "train"}),
    ]
    names = {field.name for field in dataclasses.fields(TextSource)} - {"set_key"}  # which is a word for messages
    assert {key for _, change in changes for key in change} == names
    for source, change in changes:
        assert identity(dataclasses.replace(source, **change)) != identity(source), change


def test_shares_are_those_of_the_weights_everywhere(tmp_path: Path) -> None:
    many, few = blocks(tmp_path, "many.txt", 2000), blocks(tmp_path, "few.txt", 100)
    mixed = MixedBlocks([many, few], [0.75, 0.25])
    assert len(mixed) == pytest.approx(len(many) / 0.75, abs=1)
    seen = Counter(tuple(mixed[i]["input_ids"].tolist()) for i in range(len(mixed)))
    assert set(seen) == {tuple(b[i]["input_ids"].tolist()) for b in (many, few) for i in range(len(b))}
    of_few = {tuple(few[i]["input_ids"].tolist()) for i in range(len(few))}
    for count in (40, len(mixed) // 2, len(mixed)):  # also of the first blocks alone
        share = sum(tuple(mixed[i]["input_ids"].tolist()) in of_few for i in range(count)) / count
        assert share == pytest.approx(0.25, abs=0.03)
    once = MixedBlocks([many, few], [0.5, 0.5])
    assert len(once) == 2 * len(many)
    with pytest.raises(LinearizeError, match=r"mix\[1\].*1.0e-12"):
        MixedBlocks([many, few], [1 - 1e-12, 1e-12])  # whose order no memory holds


def mix(*parts: Any) -> dict[str, Any]:
    return {"mix": [{"source": {"files": [name]}, "weight": weight} for name, weight in parts]}


def test_a_run_on_several_sources(root: Path, tmp_path: Path) -> None:
    data = {"train": mix(("train.jsonl", 3.0), ("short.txt", 1.0)), "pack": {"seq_len": T}}
    train(make_recipe(tmp_path, base(root, "llama"), stage("logit_kl"), data=data))
    assert len(metrics(tmp_path)) == 4
    assert len(list((tmp_path / "run/cache").glob("blocks-*"))) == 2
    hashes = [
        source_hash(MixSource.model_validate(mix(("short.txt", w), ("train.jsonl", 1.0))), tmp_path) for w in (1.0, 2.0)
    ]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (mix(("absent.txt", 1.0)), r"absent\.txt"),
        ({"mix": [{"source": {"files": "train.jsonl"}, "weight": 0}]}, r"data\.train\.mix\[0\]\.weight.*>.*0"),
        ({"mix": [{"source": {"images": "photos"}}]}, r"mix\[0\]\.source"),
        ({"mix": []}, r"data\.train\.mix.*1"),
    ],
)
def test_mistakes_in_a_mix(root: Path, tmp_path: Path, given: dict[str, Any], words: str) -> None:
    write_data(tmp_path)
    values = recipe_values(tmp_path, base(root, "llama"), stage("logit_kl"), data={"train": given})
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    with pytest.raises(LinearizeError, match=words):
        train(load_recipe(tmp_path / "recipe.yaml"))
