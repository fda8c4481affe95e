"""Text that the teacher writes itself: the same for a seed, whole after a kill, in every form that is asked for."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import holds
from training import BYTES, EOS, T, base, byte_tokenizer, make_recipe, metrics, small_source, stage, write_data
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from triton_tools import interpreted

from linearize.data.packing import hashed_generator
from linearize.errors import Exit, LinearizeError
from linearize.finetune import finetune
from linearize.job.dry_run import dry_run
from linearize.measure.free_generation import continued
from linearize.recipe.data import OwnText
from linearize.recipe.recipe import Recipe
from linearize.train import own_text, step_attention
from linearize.train.own_text import find_prompts, rows_in, shards_of, write_own_text
from linearize.train.runtime import TextSource
from linearize_kernels.layers.softmax_step import softmax_step


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    base(folder, "llama")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def teacher(root: Path) -> Any:
    """A random model that ends a text now and then."""
    model = AutoModelForCausalLM.from_pretrained(base(root, "llama").parent / "source").eval()
    model.generation_config.eos_token_id = [EOS, *range(40)]
    return model


def write(teacher: Any, folder: Path, source: Path | None = None, seed: int = 1, **asked: Any) -> list[dict[str, Any]]:
    wanted = OwnText.model_validate({"tokens": 100, "length": 16, "batch": 3, "temperature": 3.0, **asked})
    text = None if source is None else TextSource(files=(source,))
    write_own_text(teacher, byte_tokenizer(), wanted, text, folder, seed, lambda line: None)
    return [row for shard in shards_of(folder) for row in rows_in(shard)]


def test_texts_are_the_models_own_and_end_where_it_ends_them(teacher: Any, tmp_path: Path) -> None:
    rows = write(teacher, tmp_path / "a")
    assert sum(row["tokens"] for row in rows) >= 100
    assert {row["ended"] for row in rows} == {True, False}
    assert all(row["tokens"] == 16 for row in rows if not row["ended"])
    assert all(0 < row["tokens"] < 16 for row in rows if row["ended"])
    assert rows == write(teacher, tmp_path / "b")
    assert rows != write(teacher, tmp_path / "c", seed=2)
    on = write(teacher, tmp_path / "d", stop="never")
    assert {(row["tokens"], row["ended"]) for row in on} == {(16, False)}


def test_what_is_sampled_is_the_models_distribution(teacher: Any) -> None:
    """First tokens behind padded prompts of two lengths, beside the model's own probabilities."""
    asked = OwnText(tokens=1, temperature=2.0, stop="never")
    author = own_text.Author(teacher, byte_tokenizer(), asked, 8, 2, 2000)
    prompts = [byte_tokenizer()(text)["input_ids"] for text in ("ab", "abcdef")]
    made = author.write(prompts * 1000, 0)
    for number, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = (teacher(torch.tensor([prompt])).logits[0, -1] / 2).softmax(-1)
        first = torch.tensor([ids[0] for ids, _ in made[number::2]])
        found = torch.bincount(first, minlength=len(expected)) / len(first)
        assert float((found - expected).abs().sum()) < 0.5  # of at most 2, with 257 tokens
        assert float((found - expected).abs().max()) < 0.05


def test_padding_and_the_room_of_the_cache_leave_no_trace(teacher: Any) -> None:
    """What is written of the likeliest tokens alone is as without both; of a second batch, too."""
    author = own_text.Author(teacher, byte_tokenizer(), OwnText(tokens=1, top_p=1e-6, stop="never"), 24, 16, 2)
    for texts in (("ab", "abcdefgh"), ("the cat sat on", "x")):
        prompts = [byte_tokenizer()(text)["input_ids"] for text in texts]
        expected = [continued(teacher, torch.tensor([prompt]), 16)[0].tolist() for prompt in prompts]
        assert [ids for ids, _ in author.write(prompts, 0)] == expected


def by_the_kernel(folder: str) -> tuple[list[Any], list[int]]:
    """What is written of the likeliest tokens, by a converted model as its teacher, and at which places the kernel took
    a token."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    places: list[int] = []

    def counted(*arguments: Any) -> torch.Tensor:
        places.append(int(arguments[4]))
        return softmax_step(*arguments)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(step_attention, "softmax_step", counted)
        with model.teacher() if hasattr(model, "teacher") else contextlib.nullcontext():
            made = likeliest(model)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    return made, places


def likeliest(model: Any) -> list[Any]:
    author = own_text.Author(model, byte_tokenizer(), OwnText(tokens=1, top_p=1e-6, stop="never"), 24, 8, 2)
    return author.write([byte_tokenizer()(text)["input_ids"] for text in ("ab", "abcdefgh")], 0)


def test_the_kernel_writes_the_same_tokens(root: Path, teacher: Any) -> None:
    made, places = interpreted(by_the_kernel, str(base(root, "llama")))
    assert made == likeliest(teacher)
    assert places == [place for place in range(24, 31) for _ in range(teacher.config.num_hidden_layers)]


def test_an_architecture_that_asks_for_the_name_of_its_softmax_writes_the_same(tmp_path: Path) -> None:
    """Falcon adds masks to its scores where the name is not sdpa, and calls PyTorch itself where it is."""
    torch.manual_seed(0)
    config = FalconConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = FalconForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    made, places = interpreted(by_the_kernel, str(tmp_path))
    assert (made, places) == (likeliest(model), [])


def interrupting(patch: pytest.MonkeyPatch) -> list[int]:
    """Interrupt the writing of the second batch; the seeds of all batches."""
    real, calls = own_text.Author.write, list[int]()

    def write_one(self: Any, prompts: Any, seed: int) -> Any:
        calls.append(seed)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, prompts, seed)

    patch.setattr(own_text.Author, "write", write_one)
    return calls


def test_a_writer_that_was_killed_goes_on(teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(teacher, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupting(patch)
        with pytest.raises(KeyboardInterrupt):
            write(teacher, tmp_path / "part", batch=3)
    assert len(shards_of(tmp_path / "part")) == 1
    (tmp_path / "part" / "00001.jsonl.tmp").write_text("half")
    # The batch of the first shard stays, whatever fits now.
    assert write(teacher, tmp_path / "part", batch=7) == whole
    shard = shards_of(tmp_path / "part")[0]
    shard.write_text(shard.read_text()[:-9])
    with pytest.raises(LinearizeError) as caught:
        write(teacher, tmp_path / "part")
    assert holds(str(caught.value), str(shard))


def test_prompts_of_every_kind(root: Path, teacher: Any, tmp_path: Path) -> None:
    chats = write(teacher, tmp_path / "chats", root / "chat.jsonl", tokens=20)
    assert [row["messages"][0] for row in chats[:2]] == [{"role": "user", "content": f"q{i}"} for i in range(2)]
    assert {row["messages"][-1]["role"] for row in chats} == {"assistant"}
    own = write(teacher, tmp_path / "own", prompts="chat", tokens=20, batch=8)
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in own)
    assert all(row["messages"][0]["content"] for row in own)
    text = TextSource(files=(root / "heldout.txt",))
    (prompt,) = find_prompts(OwnText(tokens=1, prompt_tokens=5), text, byte_tokenizer())
    assert byte_tokenizer().decode(prompt.ids) == (root / "heldout.txt").read_text()[:5]
    (alone,) = find_prompts(OwnText(tokens=1), None, byte_tokenizer())
    assert alone.ids == [EOS]


def test_what_cannot_be_written_is_named(root: Path, teacher: Any, tmp_path: Path) -> None:
    short = AutoModelForCausalLM.from_pretrained(small_source(tmp_path / "gpt2", "gpt2"))  # a table of places
    with pytest.raises(LinearizeError) as caught:
        write(short, tmp_path / "a", length=5000)
    assert holds(str(caught.value), "length is 5000", str(short.config.n_positions))
    plain = byte_tokenizer()
    plain.chat_template = None
    with pytest.raises(LinearizeError) as caught:
        find_prompts(OwnText(tokens=1, prompts="chat"), None, plain)
    assert (caught.value.code, holds(str(caught.value), "chat template", "prompts")) == (Exit.INCOMPATIBLE, True)
    ends = list(range(len(BYTES) + 1))
    before, teacher.generation_config.eos_token_id = teacher.generation_config.eos_token_id, ends
    for name, prompts, remedy in (("b", None, "stop=never"), ("c", "chat", "in a file")):
        with pytest.raises(LinearizeError) as caught:
            write(teacher, tmp_path / name, prompts=prompts)
        assert (caught.value.code, holds(str(caught.value), "prompts", remedy)) == (Exit.CHECK_FAILED, True)
    teacher.generation_config.eos_token_id = before
    (tmp_path / "greeting.jsonl").write_text('{"messages": [{"role": "assistant", "content": "hi"}]}\n')
    with pytest.raises(LinearizeError) as caught:
        find_prompts(OwnText(tokens=1), TextSource(files=(tmp_path / "greeting.jsonl",)), plain)
    assert holds(str(caught.value), "greeting.jsonl", "answers")


def test_a_batch_is_no_larger_than_what_is_asked_for(teacher: Any, tmp_path: Path) -> None:
    assert len(write(teacher, tmp_path, batch=1000, stop="never")) == -(-100 // 16)


def test_texts_longer_than_the_model_was_made_for_have_a_note(root: Path, tmp_path: Path) -> None:
    told = list[str]()
    data = {"train": {"teacher": {"tokens": 600, "length": 300}}, "pack": {"seq_len": T}}
    dry_run(recipe_of(tmp_path, root, stage("logit_kl", steps=1), data=data, finish={"verify": False}), told.append)
    assert any(holds(line, "note", "300", "256", "data.train.teacher.length=256") for line in told)


# ---------------------------------------------------------------- in a run


def recipe_of(place: Path, root: Path, *stages: dict[str, Any], data: Any = None, **changes: Any) -> Recipe:
    train = {"teacher": {"tokens": 300, "length": 40, "batch": 4, "stop": "never"}}
    values = {"train": train, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": T}} if data is None else data
    chosen = stages or (stage("attention_transfer", steps=1), stage("logit_kl", "all", steps=1))
    return make_recipe(place, base(root, "llama"), *chosen, data=values, eval={"max_tokens": T}, **changes)


def test_a_run_without_data(root: Path, tmp_path: Path) -> None:
    """Written once, by softmax: a run that starts over finds it."""
    told = list[str]()
    report = finetune(recipe_of(tmp_path, root), say=told.append)
    assert report["stages"]
    assert len([line for line in told if "the teacher wrote" in line]) == 1
    (folder,) = (tmp_path / "run" / "cache").glob("own-*")
    rows = [row for shard in shards_of(folder) for row in rows_in(shard)]
    source = AutoModelForCausalLM.from_pretrained(base(root, "llama").parent / "source").eval()
    asked = {"tokens": 300, "length": 40, "batch": 4, "stop": "never", "temperature": 1.0}
    assert rows == write(source, tmp_path / "alone", seed=42, **asked)
    first = metrics(tmp_path)
    again = list[str]()
    finetune(recipe_of(tmp_path, root), resume="never", say=again.append)
    assert not [line for line in again if "the teacher wrote" in line]
    assert metrics(tmp_path) == first


def test_a_shard_that_was_lost_is_written_again_and_no_more(teacher: Any, tmp_path: Path) -> None:
    rows = write(teacher, tmp_path)
    shards = shards_of(tmp_path)
    assert len(shards) > 2
    shards[1].unlink()
    assert write(teacher, tmp_path) == rows
    assert shards_of(tmp_path) == shards


ROWS = ['{"tokens": 5}', '{"text": 7, "tokens": 5}', '{"text": "a", "tokens": 1e400}', '{"text": "a", "tokens": true}']


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("00000.jsonl", f"{row}\n\n") for row in [*ROWS, "[1]", '{"te']),
        *(("00000.jsonl", cut) for cut in ("", '{"text": "a", "tokens": 1}\n')),
        ("batch.json", '{"batch": 0}'),
    ],
    ids=str,
)
def test_a_damaged_file_is_named(teacher: Any, tmp_path: Path, name: str, text: str) -> None:
    write(teacher, tmp_path, tokens=20)
    (tmp_path / name).write_text(text)
    with pytest.raises(LinearizeError) as error:
        write(teacher, tmp_path, tokens=200)
    assert holds(error.value.message, str(tmp_path), "damaged", "Delete")


def test_what_was_written_stays_where_the_run_is_interrupted(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = interrupting(monkeypatch)
    recipe = recipe_of(tmp_path, root, stage("logit_kl", steps=1))
    with pytest.raises(KeyboardInterrupt):
        finetune(recipe, say=lambda line: None)
    finetune(recipe_of(tmp_path, root, stage("logit_kl", steps=1)), say=lambda line: None)
    (folder,) = (tmp_path / "run" / "cache").glob("own-*")
    assert len(shards_of(folder)) == 2
    assert calls == [hashed_generator(42, number).initial_seed() for number in (0, 1, 1)]


def test_the_estimate_knows_what_is_written(root: Path, tmp_path: Path) -> None:
    found = dry_run(recipe_of(tmp_path, root), lambda line: None)
    assert found["hours_of"]["the teacher's text"] > 0
    assert found["stages"][0]["data"]["train"] == "300 tokens that the teacher writes"


@pytest.mark.parametrize("train", [{"files": ["chat.jsonl"]}, {"teacher": {"tokens": 9, "prompts": "chat"}},
                                   {"teacher": {"tokens": 9, "prompts": "chat.jsonl"}}], ids=str)  # fmt: skip
def test_chats_without_a_template_are_refused_before_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Any
) -> None:
    monkeypatch.setattr("linearize.job.start.convert", lambda *_, **__: pytest.fail("converted"))
    source = small_source(tmp_path / "source", "llama")
    (source / "chat_template.jinja").unlink()
    how = {"mechanism": "gsa", "options": {"slots": 8}}
    data = {"train": train, "pack": {"seq_len": T}}
    recipe = make_recipe(tmp_path, source, stage("attention_transfer", steps=1), data=data, convert=how)
    with pytest.raises(LinearizeError) as caught:
        finetune(recipe, say=print)
    assert (caught.value.code, holds(str(caught.value), "template")) == (Exit.INCOMPATIBLE, True)
    assert not (tmp_path / "run").exists()


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"teacher": {"tokens": 5, "prompts": "none.jsonl"}}, {}, "none.jsonl"),
    ({"teacher": {"tokens": 5, "prompts": "chat", "stop": "never"}}, {}, "stop"),
    ({"teacher": {"tokens": 5, "prompts": "a.csv"}}, {}, "a.csv"),
    ({"teacher": {"token": 5}}, {}, "tokens"),
]


@pytest.mark.parametrize(("train", "changes", "name"), WRONG, ids=lambda value: str(value)[:30])
def test_bad_values_are_named_before_anything_is_written(
    root: Path, tmp_path: Path, train: Any, changes: Any, name: str
) -> None:
    with pytest.raises(LinearizeError) as caught:
        finetune(recipe_of(tmp_path, root, data={"train": train, "pack": {"seq_len": T}}, **changes), say=print)
    assert (caught.value.code, holds(str(caught.value), name)) == (Exit.USAGE, True)
    assert not (tmp_path / "run").exists()
