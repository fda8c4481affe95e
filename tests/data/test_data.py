"""Text to packed blocks: what a block promises, in which order blocks come, and what bad input is told."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import linearize.data.documents
import linearize.data.packing
from linearize.data.packing import BlockOrder, Blocks, TextSource, build_blocks, data_fingerprint
from linearize.errors import Exit, LinearizeError
from linearize.train.losses import cross_entropy, next_token_targets

SPECIAL = ["<eos>", "<bos>", "<user>", "<bot>", "<end>"]
MARKED = """{% for m in messages %}{% if m.role == 'assistant' -%}
<bot>{% generation %}{{ m.content }}<end>{% endgeneration %}
{%- else %}<user>{{ m.content }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"""
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LAST_TURN_DIFFERS = PLAIN.replace("<bot>{{", "<bot>{% if loop.last %}!{% endif %}{{")
Build = Callable[..., Blocks]


def byte_tokenizer(*, bos: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, so that every expectation can be written as text."""
    backend = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", bos_token="<bos>")
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def jsonl(folder: Path, *rows: Any, name: str = "data.jsonl") -> TextSource:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TextSource(files=(path,))


def texts(folder: Path, *documents: str) -> TextSource:
    return jsonl(folder, *({"text": text} for text in documents))


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def call(
        source: TextSource, seq_len: int = 8, tokenizer: Any = TOKENIZER, sft: bool = False, **options: Any
    ) -> Blocks:
        return build_blocks(
            source, tokenizer, seq_len, tmp_path / "cache", sft=sft, max_tokens=options.get("max_tokens")
        )

    return call


def segments(blocks: Blocks, *, padding: bool = False) -> list[list[tuple[int, int]]]:
    """(input id, label) of each segment, told apart by position_ids as a model does."""
    found: list[list[tuple[int, int]]] = []
    for i in range(len(blocks)):
        block = blocks[i]
        columns = (block[name].tolist() for name in ("input_ids", "labels", "position_ids", "valid"))
        for token, label, position, valid in zip(*columns, strict=True):
            if valid or padding:
                if position == 0:
                    found.append([])
                assert position == len(found[-1])
                found[-1].append((token, label))
    return found


def learned(blocks: Blocks) -> list[str]:
    """The text of each segment, with what is no target in lower case."""
    return [
        "".join((str.lower if label < 0 else str.upper)(str(TOKENIZER.decode([token]))) for token, label in segment)
        for segment in segments(blocks)
    ]


# What a block holds


def test_a_block_in_full(build: Build, tmp_path: Path) -> None:
    blocks = build(texts(tmp_path, "abc", "de", "fghijk"))
    eos = TOKENIZER.eos_token_id
    a, b, c, d, e, f, g, h, i, j, k = ids("abcdefghijk")
    assert len(blocks) == 2
    assert {name: x.tolist() for name, x in blocks[0].items()} == {
        "input_ids": [a, b, c, eos, d, e, eos, f],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 0],
        "labels": [-100, b, c, eos, -100, e, eos, -100],
        "valid": [True] * 8,
    }
    assert {name: x.tolist() for name, x in blocks[1].items()} == {
        "input_ids": [g, h, i, j, k, eos, eos, eos],
        "position_ids": [0, 1, 2, 3, 4, 5, 0, 1],
        "labels": [-100, h, i, j, k, eos, -100, -100],
        "valid": [True] * 6 + [False] * 2,
    }
    assert (blocks.n_tokens, blocks.n_targets, blocks.skipped) == (14, 10, 0)
    assert [x.dtype for x in blocks[0].values()] == [torch.int64] * 3 + [torch.bool]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    documents=st.lists(st.text("ab\n é", min_size=1, max_size=20), min_size=1, max_size=8), seq_len=st.integers(2, 9)
)
def test_packing_loses_and_invents_nothing(build: Build, tmp_path: Path, documents: list[str], seq_len: int) -> None:
    documents = [text for text in documents if text.strip()] or ["a"]
    blocks = build(texts(tmp_path, *documents), seq_len)
    stream = [token for text in documents for token in [*ids(text), TOKENIZER.eos_token_id]]
    pieces = segments(blocks)
    assert [token for piece in pieces for token, _ in piece] == stream
    assert len(blocks) == -(-len(stream) // seq_len)
    for piece in pieces:
        assert [label for _, label in piece] == [-100, *(token for token, _ in piece[1:])]
    assert sum(map(len, segments(blocks, padding=True))) == len(blocks) * seq_len
    starts = {sum(len(ids(t)) + 1 for t in documents[:n]) for n in range(len(documents))}
    cuts = {*starts, *range(0, len(stream), seq_len)}
    lengths = torch.tensor([0, *map(len, pieces)]).cumsum(0)[:-1]
    assert set(lengths.tolist()) == cuts, "a segment begins at a document or at a block, nowhere else"


def test_packed_blocks_train_like_separate_documents(build: Build, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), **shape)).double().eval()
    blocks = build(texts(tmp_path, "hello there", "general", "k", "a document longer than a block of tokens"), 16)

    def loss(ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        logits = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits
        return cross_entropy(logits, next_token_targets(labels[None]), num_tokens=1)

    packed = sum(
        loss(b["input_ids"], b["labels"], b["position_ids"][None]) for b in (blocks[i] for i in range(len(blocks)))
    )
    alone = sum(loss(*torch.tensor(piece).T) for piece in segments(blocks))
    torch.testing.assert_close(packed, alone)


def test_what_the_tokenizer_puts_in_front_starts_each_document_once(build: Build, tmp_path: Path) -> None:
    blocks = build(texts(tmp_path, "abc", "d"), 3, byte_tokenizer(bos=True))
    assert learned(blocks) == ["<bos>AB", "c<EOS>", "<bos>", "d<EOS>"]


def test_long_documents_are_tokenised_in_slabs(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one\ntwo\n" * 4 + "x" * 40 + "\nend"
    whole = segments(build(texts(tmp_path, text), 200, byte_tokenizer(bos=True)))
    monkeypatch.setattr(linearize.data.documents, "_SLAB", 9)
    (tmp_path / "a.txt").write_text(text)
    assert segments(build(TextSource(files=(tmp_path / "a.txt",)), 200, byte_tokenizer(bos=True))) == whole


def test_text_files_are_one_document_each_and_blank_ones_none(build: Build, tmp_path: Path) -> None:
    files = []
    for name, text in {"a.txt": "one\n\ntwo", "b.txt": "  \n", "c.txt": "\ufeffthree"}.items():
        files.append(tmp_path / name)
        files[-1].write_text(text, encoding="utf-8")
    assert learned(build(TextSource(files=tuple(files)), 20)) == ["oNE\n\nTWO<EOS>", "tHREE<EOS>"]


def test_another_text_key(build: Build, tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"body": "abc", "text": 3})
    assert learned(build(TextSource(files=source.files, text_key="body"))) == ["aBC<EOS>"]


def test_demo_documents(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = {"train": ["abc"], "heldout": ["x", "yz"]}
    monkeypatch.setattr(
        "linearize.demo.corpus.documents", lambda split: [SimpleNamespace(name=t, text=t) for t in corpus[split]]
    )
    assert learned(build(TextSource(demo="heldout"))) == ["x<EOS>", "yZ<EOS>"]
    assert learned(build(TextSource(demo="train"))) == ["aBC<EOS>"]


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    (folder := tmp_path / "corpus").mkdir()
    texts(folder, "abc", "de")
    source = TextSource(path=str(folder), streaming=streaming)
    assert learned(build(source, max_tokens=100)) == ["aBC<EOS>", "dE<EOS>"]
    texts(folder, "changed")
    assert learned(build(source, max_tokens=100)) == ["cHANGED<EOS>"], "a local folder is known by its content"


def test_max_tokens_ends_the_reading(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f'{{"text": "{i:07}"}}' for i in range(10)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "not JSON, but beyond the end"]))
    source = TextSource(files=(tmp_path / "a.jsonl",))
    monkeypatch.setattr(linearize.data.documents, "_SLAB", 7)  # one document in each batch
    blocks = build(source, max_tokens=17)
    assert len(blocks) == 3
    assert [piece[-2][0] for piece in segments(blocks)] == ids("012")
    assert len(build(texts(tmp_path, "a" * 100), max_tokens=17)) == 3, "also in the middle of a document"
    conversations = jsonl(tmp_path, *({"prompt": "p", "completion": "abcdef"} for _ in range(9)))
    assert len(build(conversations, max_tokens=17, sft=True)) == 3


# Conversations


def turns(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "unmarked"])
def test_only_the_assistant_is_learned(build: Build, tmp_path: Path, template: str) -> None:
    source = jsonl(tmp_path, turns("hi", "yo", "so", "ok"), {"prompt": "q", "completion": "abc"})
    blocks = build(source, 32, byte_tokenizer(template=template), sft=True)
    assert learned(blocks) == ["<user>hi<end><bot>YO<END><user>so<end><bot>OK<END>", "<user>q<end><bot>ABC<END>"]


def test_a_system_message_is_not_learned(build: Build, tmp_path: Path) -> None:
    row = turns("hi", "yo")
    row["messages"].insert(0, {"role": "system", "content": "be"})
    blocks = build(jsonl(tmp_path, row), 32, byte_tokenizer(template=PLAIN), sft=True)
    assert learned(blocks) == ["<user>be<end><user>hi<end><bot>YO<END>"]


def test_an_assistant_that_speaks_first(build: Build, tmp_path: Path) -> None:
    row = {"messages": [{"role": "assistant", "content": "yo"}, *turns("hi", "ok")["messages"]]}
    blocks = build(jsonl(tmp_path, row), 32, byte_tokenizer(template=PLAIN), sft=True)
    assert learned(blocks) == ["<bot>YO<END><user>hi<end><bot>OK<END>"]


def test_completion_without_a_chat_template(build: Build, tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "ab", "completion": "cd"})
    assert learned(build(source, 8, byte_tokenizer(bos=True), sft=True)) == ["<bos>abCD<EOS>"]


def test_plain_text_in_sft_is_next_token(build: Build, tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"text": "abc"}, {"text": "unused", **turns("q", "a")}, {"text": "de", "messages": None})
    blocks = build(source, 8, byte_tokenizer(template=PLAIN), sft=True)
    assert sorted(learned(blocks)) == ["<user>q<end><bot>A<END>", "aBC<EOS>", "dE<EOS>"]


def test_without_sft_a_conversation_is_text(build: Build, tmp_path: Path) -> None:
    source = jsonl(tmp_path, turns("hi", "yo"), turns("a", "b"))
    blocks = build(source, 10, byte_tokenizer(template=MARKED))
    assert learned(blocks) == ["<user>HI<END><BOT>YO<END>", "<user>A", "<end><BOT>B<END>"]


def test_another_template_makes_other_blocks(build: Build, tmp_path: Path) -> None:
    source = jsonl(tmp_path, turns("hi", "yo"))
    first = learned(build(source, 10, byte_tokenizer(template=PLAIN)))
    assert learned(build(source, 10, byte_tokenizer(template=PLAIN.replace("<bot>", "<eos>")))) != first


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=200), seq_len=st.integers(4, 16))
def test_conversations_stay_whole(build: Build, tmp_path: Path, lengths: list[int], seq_len: int) -> None:
    source = jsonl(tmp_path, *({"prompt": "p", "completion": "a" * n} for n in lengths))
    blocks = build(source, seq_len, sft=True)
    expected = ["p" + "A" * n + "<EOS>" if n + 2 <= seq_len else "p" + "A" * (seq_len - 1) for n in lengths]
    assert sorted(learned(blocks)) == sorted(expected)
    assert len(blocks) <= 2 * blocks.n_tokens / seq_len + 1, "first fit leaves less than half of the blocks empty"


def test_a_conversation_cut_before_the_answer_is_skipped(build: Build, tmp_path: Path) -> None:
    long = {"prompt": "p" * 9, "completion": "a"}
    blocks = build(jsonl(tmp_path, long, {"prompt": "p", "completion": "abcdefghij"}), 8, sft=True)
    assert (learned(blocks), blocks.skipped) == (["pABCDEFG"], 1)
    with pytest.raises(LinearizeError, match=r"2.*conversations.*8"):
        build(jsonl(tmp_path, long, long), 8, sft=True)


# The cache


def test_the_second_build_reads_the_first_ones_file(build: Build, tmp_path: Path) -> None:
    first = build(texts(tmp_path, "abc", "def"))
    written = first.path.stat().st_mtime_ns
    second = build(texts(tmp_path, "abc", "def"))
    assert second.path == first.path
    assert second.path.stat().st_mtime_ns == written
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [first.path.name]


def test_runs_beside_each_other_share_packed_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hard links, where the file is sound and the key knows the text itself."""
    source, own = texts(tmp_path, "some text", "and more"), linearize.data.packing.pieces

    def pack(run: str, source: TextSource = source) -> Blocks:
        cache = tmp_path / "runs" / run / "cache"
        return build_blocks(source, byte_tokenizer(), 8, cache, sft=False, max_tokens=None)

    first, second = pack("one"), pack("two")
    assert second.path.samefile(first.path)
    first.path.unlink()
    second.path.write_bytes(b"x")
    third = pack("three")
    assert (third.sha256, third.path.samefile(second.path)) == (first.sha256, False)
    monkeypatch.setattr(linearize.data.packing, "pieces", lambda _, tokenizer, sft: own(source, tokenizer, sft=sft))
    known_by_name = TextSource(path="somebody/text")
    assert not pack("four", known_by_name).path.samefile(pack("five", known_by_name).path)


def test_every_ingredient_names_another_file(build: Build, tmp_path: Path) -> None:
    source = texts(tmp_path, "abc def")
    built = [
        build(source),
        build(source, 9),
        build(source, sft=True),
        build(source, max_tokens=3),
        build(source, tokenizer=byte_tokenizer(bos=True)),
        build(source, tokenizer=byte_tokenizer(template=PLAIN), sft=True),
        build(texts(tmp_path, "abc deg")),
        build(jsonl(tmp_path, {"text": "abc def"}, name="other.jsonl")),
    ]
    assert len({blocks.path for blocks in built}) == len(built)
    prints = [data_fingerprint(blocks) for blocks in built]
    assert prints[0] == prints[2] == prints[7], "the same blocks, whatever they were made from"
    assert len({*prints[:2], prints[4], prints[6]}) == 4


def test_tokenizer_state_left_by_others_does_not_matter(build: Build, tmp_path: Path) -> None:
    source, used = texts(tmp_path, "abc def"), byte_tokenizer()
    used(["abc", "d"], truncation=True, max_length=2)
    assert build(source, tokenizer=used).path == build(source).path
    assert learned(build(source, tokenizer=used)) == ["aBC DEF<EOS>"]


def test_an_interrupted_build_leaves_nothing_behind(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, calls = texts(tmp_path, *("abc" * 9 for _ in range(9))), iter(range(100))

    def interrupted(*args: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return write(*args)

    write = linearize.data.packing._Writer.add
    monkeypatch.setattr(linearize.data.packing._Writer, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(source)
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "cache" / "blocks-0.1.partial").write_bytes(b"left by a process that was killed")
    assert build(source).n_tokens == 9 * 28


@pytest.mark.parametrize("end", [-4, 50, 0])
def test_a_damaged_cache_file_is_named(build: Build, tmp_path: Path, end: int) -> None:
    source = texts(tmp_path, "abc def")
    path = build(source).path
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(LinearizeError, match=f"{path} is damaged") as caught:
        build(source)
    assert caught.value.code == Exit.RESOURCE


def test_blocks_travel_to_another_process_by_name(build: Build, tmp_path: Path) -> None:
    blocks = build(texts(tmp_path, "abc" * 1000))
    sent = pickle.dumps(blocks)
    assert len(sent) < 1000
    assert segments(pickle.loads(sent)) == segments(blocks)


# The order


@settings(deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_an_epoch_visits_every_block_once(n: int, seed: int, epoch: int) -> None:
    order = BlockOrder(n, seed)
    assert sorted(order.block(k) for k in range(epoch * n, (epoch + 1) * n)) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 9), k=st.integers(0, 200))
def test_the_order_has_no_memory(n: int, seed: int, k: int) -> None:
    from linearize.data.packing import _permutation

    walked = [BlockOrder(n, seed).block(i) for i in range(k + 3)]
    _permutation.cache_clear()
    assert [BlockOrder(n, seed).block(i) for i in range(k, k + 3)] == walked[k:]


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, e: int) -> tuple[int, ...]:
        return tuple(BlockOrder(50, seed).block(k) for k in range(50 * e, 50 * (e + 1)))

    assert len({epoch(seed, e) for seed in range(3) for e in range(3)}) == 9


@settings(deadline=None)
@given(step=st.integers(0, 30), n=st.integers(1, 50))
def test_a_step_sees_the_same_blocks_however_they_are_divided(step: int, n: int) -> None:
    order = BlockOrder(n, seed=1)
    expected = sorted(order.block(k) for k in range(step * 8, (step + 1) * 8))
    for world in (1, 2, 4, 8):
        for per_device in (size for size in (1, 2, 4, 8) if size * world <= 8):
            accumulate = 8 // (world * per_device)
            taken = [
                [order.block(k) for k in order.samples(step, micro, rank, world, per_device, accumulate)]
                for micro in range(accumulate)
                for rank in range(world)
            ]
            assert {len(batch) for batch in taken} == {per_device}
            assert sorted(block for batch in taken for block in batch) == expected


# What users get wrong


def written(name: str, content: str | bytes) -> Callable[[Path], TextSource]:
    def make(folder: Path) -> TextSource:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return TextSource(files=(folder / name,))

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: TextSource(files=(folder / "tran.jsonl",)),
            r"no such file '(.*/)tran.jsonl'. Did you mean '\1train.jsonl'\?",
        ),
        (written("a.csv", "x"), r"a.csv"),
        (written("a.jsonl", '{"text": "a"}\n\n{"text": }\n'), r"a.jsonl:3:10: not JSON"),
        (written("a.jsonl", '["a"]'), r"a.jsonl:1"),
        (written("a.jsonl", '{"txt": "a", "id": 1}'), r"a.jsonl:1.*'text'.*'txt'.*Found"),
        (written("a.jsonl", '{"txt": "a", "b": "c"}'), r"data.pack.text_key=txt.*data.train.*data.eval"),
        (written("a.jsonl", '{"body": "a", "id": 1}'), r"Found.*data.pack.text_key=body"),
        (written("a.jsonl", '{"head": "a", "body": "b"}'), r"Found.*data.pack.text_key=KEY"),
        (written("a.jsonl", '{"text": 5}'), r"a.jsonl:1.*'text'"),
        (written("a.jsonl", '{"text": "\\ud800"}'), r"a.jsonl:1"),
        (written("a.jsonl", f'{{"text": {"1" * 5000}}}'), r"a.jsonl:1"),
        (written("a.jsonl", '{"messages": "hello"}'), r"a.jsonl:1.*`messages`"),
        (written("a.jsonl", '{"messages": [{"role": "user"}]}'), r"a.jsonl:1.*`messages`"),
        (written("a.jsonl", '{"prompt": "a", "completion": ["b"]}'), r"a.jsonl:1.*'completion'"),
        (written("a.txt", b"\xff\xfe\x00"), r"a.txt.*UTF-8"),
        (written("a.jsonl", ""), r"a.jsonl"),
        (written("a.txt", "   \n"), r"a.txt"),
        (lambda folder: TextSource(path=str(folder / "train.jsonl")), r"train.jsonl.*file"),
        (lambda folder: TextSource(path=str(folder), split="dev"), r"dataset .*dev"),
        (lambda folder: TextSource(path="x", streaming=True), r"streamed.*unknown"),
        (lambda folder: TextSource(), r"`files`.*`path`.*`demo`"),
    ],
)
def test_bad_input_is_named(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], TextSource], message: str
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    texts(tmp_path, "abc").files[0].rename(tmp_path / "train.jsonl")
    with pytest.raises(LinearizeError, match=message) as caught:
        build(make(tmp_path))
    assert caught.value.code == Exit.USAGE
    assert not list((tmp_path / "cache").glob("*"))


def test_messages_need_a_chat_template(build: Build, tmp_path: Path) -> None:
    with pytest.raises(LinearizeError, match=r"data.jsonl:1.*`messages`.*`chat_template`") as caught:
        build(jsonl(tmp_path, turns("a", "b")), sft=True)
    assert caught.value.code == Exit.INCOMPATIBLE


def test_a_template_that_rewrites_earlier_turns_is_refused(build: Build, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(template=LAST_TURN_DIFFERS)
    assert learned(build(jsonl(tmp_path, turns("a", "b")), 8, tokenizer, sft=True)) == ["<user>a<end><bot>!B<END>"]
    with pytest.raises(LinearizeError, match=r"data.jsonl:1.*1"):
        build(jsonl(tmp_path, turns("a", "b", "c", "d")), 8, tokenizer, sft=True)


def test_a_conversation_that_the_template_refuses(build: Build, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(LinearizeError, match=r"data.jsonl:1"):
        build(jsonl(tmp_path, turns("a", "b")), sft=True, tokenizer=tokenizer)


def test_a_tokenizer_without_eos(build: Build, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(LinearizeError, match="no eos token") as caught:
        build(texts(tmp_path, "abc"), tokenizer=tokenizer)
    assert caught.value.code == Exit.INCOMPATIBLE


def test_blocks_of_one_token(build: Build, tmp_path: Path) -> None:
    with pytest.raises(LinearizeError, match=r"seq_len=1.*>=.*2"):
        build(texts(tmp_path, "abc"), 1)


def test_datasets_is_an_extra(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LinearizeError, match=r'needs.*"linearize\[train\]"') as caught:
        build(TextSource(path="some/corpus"))
    assert caught.value.code == Exit.RESOURCE


def test_a_dataset_out_of_reach(build: Build) -> None:
    with pytest.raises(LinearizeError, match=r"no/such-corpus.*'data\.train=\{files") as caught:
        build(TextSource(path="no/such-corpus"))
    assert caught.value.code == Exit.HUB


def test_a_cache_that_cannot_be_written(build: Build, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    with pytest.raises(LinearizeError, match=r"cannot write .*cache") as caught:
        build(texts(tmp_path, "abc"))
    assert caught.value.code == Exit.RESOURCE
