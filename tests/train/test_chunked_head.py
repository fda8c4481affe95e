"""Logit KL some tokens at a time: the same losses and weights, and fewer logits in memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import relative_error, with_slow
from training import T, base, make_recipe, metrics, stage, tensors, train

from linearize.errors import LinearizeError
from linearize.estimate.memory import Rehearsal
from linearize.measure.evaluate import sums_of
from linearize.train import chunked_head
from linearize.train.loop import set_checkpointing
from linearize.train.runtime import check_divided
from linearize.train.save import load_converted
from linearize.train.stages import end_to_end_loss
from linearize.train.student import Student


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("llama", "all", {"kl": 1.0, "ce": 0.5, "temperature": 2.0}),  # its head is its embedding
    ("llama", ["new", "lora"], {"kl": 1.0}),
    ("gpt2", "mixer", {"kl": 0.0, "ce": 1.0}),
]


@pytest.mark.parametrize(("name", "parts", "loss"), CASES, ids=["tied", "frozen head", "ce alone"])
@pytest.mark.parametrize("checkpointing", with_slow([False, True], False))
def test_it_trains_what_all_logits_at_once_train(
    root: Path, tmp_path: Path, name: str, parts: Any, loss: dict[str, Any], checkpointing: bool
) -> None:
    runtime = {"device": "cpu", "gradient_checkpointing": checkpointing}
    for place, size in (("whole", None), ("pieces", 12)):
        one = stage("logit_kl", parts, name, loss={**loss, "chunk_size": size}, optimizer={"lr": 1e-4})
        one["batch"] = {"per_device": 2, "gradient_accumulation_steps": 2}
        torch.manual_seed(0)
        train(make_recipe(tmp_path / place, base(root, name), one, runtime=runtime))
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    if name == "llama":  # gpt2's dropout draws other numbers
        assert metrics(pieces) == pytest.approx(metrics(whole), rel=1e-5)
        assert metrics(pieces, "grad_norm") == pytest.approx(metrics(whole, "grad_norm"), rel=1e-4)
        expected = tensors(whole / "run/final")
        for key, value in tensors(pieces / "run/final").items():
            assert relative_error(value, expected[key]) < 1e-3, key
    else:
        assert metrics(pieces) == pytest.approx(metrics(whole), rel=0.05)


def test_documents_stay_apart_in_layers_that_are_computed_again(root: Path, tmp_path: Path) -> None:
    """The head runs between a layer's pass and its second one, without a word of documents."""
    folder, found = base(root, "llama", layers="1", window=8, sink=1), []
    for size in (None, 12):
        student = Student(load_converted(folder, torch.float32, False))
        recipe = make_recipe(tmp_path, folder, stage("logit_kl", "all", loss={"kl": 1.0, "chunk_size": size}))
        student.prepare(recipe.stages[0], wide=False)
        set_checkpointing(student.model.train(), True)
        torch.manual_seed(0)
        batch = {"input_ids": torch.randint(200, (2, 48)), "labels": torch.zeros(2, 48, dtype=torch.long)}
        batch |= {"position_ids": (torch.arange(48) % 16).expand(2, -1), "valid": torch.ones(2, 48).bool()}
        tokens = torch.full((3,), 96.0)
        loss, _ = end_to_end_loss(recipe.stages[0], student, batch, tokens, contextlib.nullcontext)
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in student.model.parameters() if p.grad is not None]))
    assert relative_error(*found) < 1e-5


def test_gradients_of_many_stretches_add_up_in_bfloat16() -> None:
    """A sum of 1,024 ones, which ends at 256 in bfloat16."""
    weight, hidden = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16)), torch.ones(1, 1024, 1, requires_grad=True)
    model = SimpleNamespace(get_output_embeddings=lambda: torch.nn.Linear(1, 1))

    def loss_of(piece: torch.Tensor, part: slice) -> list[torch.Tensor]:
        return [(piece * weight.float()).sum()]

    loss, _ = chunked_head._Chunks.apply(loss_of, 1, model, hidden, [weight], weight)
    loss.backward()
    assert weight.grad is not None
    assert float(weight.grad) == 1024


@pytest.mark.slow
def test_the_logits_take_less(root: Path, tmp_path: Path) -> None:
    def logits(size: int | None) -> int:
        one = stage("logit_kl", "all", loss={"chunk_size": size})
        recipe = make_recipe(tmp_path, base(root, "llama"), one)
        found = Rehearsal(recipe, None, base(root, "llama"), "no", gpu=False).stage(0)
        assert not found.reason
        return found.saved

    assert logits(T // 8) < 0.8 * logits(None)


def test_shards_of_deepspeed_are_refused(root: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, base(root, "llama"), stage("logit_kl", "new", loss={"chunk_size": 8}))
    check_divided(recipe, zero=False)
    with pytest.raises(LinearizeError, match=r"loss\.chunk_size.*DeepSpeed's.*--use_fsdp"):
        check_divided(recipe, zero=True)


def test_long_rows_are_evaluated_in_parts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scores, and never more logits than READ_AT_ONCE."""
    model = load_converted(base(root, "llama"), torch.float32, False)
    student = Student(model)
    ids = torch.randint(model.config.vocab_size, (2, T))
    places = torch.arange(T).expand(2, -1)
    batch = {"input_ids": ids, "position_ids": places, "labels": ids, "valid": torch.ones_like(ids).bool()}
    whole = sums_of(model, batch, contextlib.nullcontext, student)
    seen = []
    original = chunked_head.head
    monkeypatch.setattr(chunked_head, "head", lambda *given: (out := original(*given), seen.append(out.shape))[0])
    monkeypatch.setattr(chunked_head, "READ_AT_ONCE", 2 * 5 * model.config.vocab_size)
    parts = sums_of(model, batch, contextlib.nullcontext, student)
    assert {shape[1] for shape in seen} == {5, T % 5}
    assert torch.allclose(parts, whole, rtol=1e-5)
    assert parts[3] == 2 * (T - 1)
