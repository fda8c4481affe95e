"""The distillation losses against their formulas, and what they promise about memory and empty batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linearize.train.losses import (
    cross_entropy,
    logit_kl,
    next_token_targets,
    relative_mse,
    shared,
)

B, T, V = 2, 5, 11
CHUNKS = [1, 4, V, 2 * V, None]  # one entry, ragged, exact, larger than the vocabulary, default


def next_token_ce(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """`cross_entropy` of logits [B, T, V] with labels [B, T] that are not shifted."""
    return cross_entropy(logits, next_token_targets(labels), **options)


def logits(seed: int, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(B, T, V, generator=generator, dtype=torch.float64)).to(dtype)


def some_valid() -> Tensor:
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[0, 3:] = False
    valid[1, 0] = False
    return valid


def literal_kl(student: Tensor, teacher: Tensor, valid: Tensor, tau: float) -> Tensor:
    p, q = (teacher / tau).softmax(-1), (student / tau).softmax(-1)
    per_token = tau**2 * (p * (p.log() - q.log())).sum(-1)
    return per_token[valid].sum() / valid.sum()


def assert_same_gradient(loss: Tensor, expected: Tensor, x: Tensor) -> None:
    ours, theirs = torch.autograd.grad(loss, x), torch.autograd.grad(expected, x)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("tau", [1.0, 2.0, 0.7])
def test_kl_is_the_literal_formula(tau: float, chunk: int | None) -> None:
    student, teacher, valid = logits(0).requires_grad_(), logits(1), some_valid()
    loss = logit_kl(student, teacher, valid, temperature=tau, chunk_size=chunk)
    expected = literal_kl(student, teacher, valid, tau)
    torch.testing.assert_close(loss, expected)
    assert_same_gradient(loss, expected, student)


@pytest.mark.parametrize("chunk", [3, None])
def test_kl_gradcheck(chunk: int | None) -> None:
    student, teacher, valid = logits(0).requires_grad_(), logits(1), some_valid()

    def thrice(s: Tensor) -> Tensor:  # so that the incoming gradient is not 1
        return 3 * logit_kl(s, teacher, valid, temperature=1.5, chunk_size=chunk)

    assert torch.autograd.gradcheck(thrice, student)


def test_padding_of_vocabularies_is_cut_to_what_both_have() -> None:
    wide = torch.cat([logits(1), torch.full((B, T, 3), 9.0, dtype=torch.float64)], -1)
    ours, theirs = shared(logits(0), wide)
    assert torch.equal(logit_kl(ours, theirs, some_valid()), logit_kl(logits(0), logits(1), some_valid()))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_cross_entropy_is_torchs_on_shifted_labels(chunk: int | None) -> None:
    z = logits(0).requires_grad_()
    labels = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(2))
    labels[0, 2] = labels[1, 0] = -100
    loss = next_token_ce(z, labels, chunk_size=chunk)
    expected = F.cross_entropy(z[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(loss, expected)
    assert_same_gradient(loss, expected, z)
    assert torch.autograd.gradcheck(lambda x: next_token_ce(x, labels, chunk_size=chunk), z)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(0.0, 30.0))
def test_kl_of_equal_logits_is_zero_and_never_negative(seed: int, scale: float) -> None:
    student, teacher, valid = logits(seed, scale=scale), logits(seed + 1, scale=scale), some_valid()
    assert logit_kl(student, teacher, valid).item() >= -1e-12
    shifted = student + 7.0  # the same distribution
    assert abs(logit_kl(student, shifted, valid).item()) < 1e-12


def losses_of(z: Tensor) -> dict[str, Callable[..., Tensor]]:
    """The losses over [B, T, V] as functions of (tokens taken, normaliser)."""
    teacher, labels = logits(1, z.dtype), torch.randint(V, (B, T), generator=torch.Generator().manual_seed(2))
    return {
        "kl": lambda taken, **kw: logit_kl(z, teacher, taken, temperature=2.0, **kw),
        "ce": lambda taken, **kw: next_token_ce(z, torch.where(taken, labels, -100), **kw),
    }


@pytest.mark.parametrize("name", ["kl", "ce"])
def test_micro_batches_add_up_to_the_mean_over_the_step(name: str) -> None:
    z = logits(0).requires_grad_()
    loss = losses_of(z)[name]
    first = torch.zeros(B, T, dtype=torch.bool)
    first[0] = True
    whole = torch.autograd.grad(loss(torch.ones_like(first)), z)[0]
    for count in (tokens := B * (T - 1) if name == "ce" else B * T), float(tokens), torch.tensor(tokens):
        parts = loss(first, num_tokens=count) + loss(~first, num_tokens=count)
        torch.testing.assert_close(torch.autograd.grad(parts, z)[0], whole)


@pytest.mark.parametrize("num_tokens", [None, 0, 6.0])
@pytest.mark.parametrize("name", ["kl", "ce"])
def test_no_valid_token_is_zero_with_zero_gradient(name: str, num_tokens: float | None) -> None:
    z = logits(0, torch.float32).fill_(float("nan")).requires_grad_()
    loss = losses_of(z)[name](torch.zeros(B, T, dtype=torch.bool), num_tokens=num_tokens)
    loss.backward()
    assert loss.item() == 0.0
    assert z.grad is not None
    assert z.grad.eq(0).all()


def test_invalid_positions_do_not_leak_even_nan() -> None:
    clean, teacher, valid = logits(0), logits(1), some_valid()
    dirty = clean.masked_fill(~valid[..., None], float("nan")).requires_grad_()
    loss = logit_kl(dirty, teacher, valid)
    torch.testing.assert_close(loss, logit_kl(clean, teacher, valid))
    assert torch.autograd.grad(loss, dirty)[0][~valid].eq(0).all()


def test_nan_at_a_valid_token_is_not_hidden() -> None:
    z = logits(0)
    z[1, 2, 3] = float("nan")
    assert logit_kl(z, logits(1), some_valid()).isnan()
    assert next_token_ce(z, torch.ones(B, T, dtype=torch.int64)).isnan()


@pytest.mark.parametrize("chunk", [2, None])
def test_masked_vocabulary_is_as_if_it_were_not_there(chunk: int | None) -> None:
    student, teacher, valid = logits(0), logits(1), some_valid()
    banned = torch.zeros(V, dtype=torch.bool)
    banned[[0, 1, 6]] = True  # with chunks of two the first holds nothing else
    full = student.masked_fill(banned, -torch.inf).requires_grad_()
    loss = logit_kl(full, teacher.masked_fill(banned, -torch.inf), valid, chunk_size=chunk)
    torch.testing.assert_close(loss, literal_kl(student[..., ~banned], teacher[..., ~banned], valid, 1.0))
    (grad,) = torch.autograd.grad(loss, full)
    assert grad.isfinite().all()
    assert grad[..., banned].eq(0).all()


@pytest.mark.parametrize("name", ["kl", "ce"])
def test_low_precision_logits_are_reduced_in_float32(name: str) -> None:
    low = logits(0, torch.bfloat16).requires_grad_()
    wide = low.detach().double().requires_grad_()
    every = torch.ones(B, T, dtype=torch.bool)
    teacher = logits(1, torch.bfloat16)
    labels = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(2))
    results = []
    for z in (low, wide):
        loss = logit_kl(z, teacher.to(z.dtype), every) if name == "kl" else next_token_ce(z, labels)
        loss.backward()
        results.append(loss)
    assert results[0].dtype == torch.float32
    torch.testing.assert_close(results[0].double(), results[1], rtol=1e-5, atol=1e-6)
    assert low.grad is not None
    assert low.grad.dtype == torch.bfloat16
    torch.testing.assert_close(low.grad.double(), wide.grad, rtol=2**-8, atol=1e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2.*5.*11.*2.*5.*10"):
        logit_kl(logits(0), logits(0)[..., 1:], some_valid())
    with pytest.raises(ValueError, match="targets"):
        next_token_ce(logits(0), torch.zeros(B, T + 1, dtype=torch.int64))


class MemoryMeter(TorchDispatchMode):
    """The most bytes alive at once of what is made under it, and the largest tensor wider than 16 bit."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.inputs = {x.untyped_storage().data_ptr() for x in inputs}
        self.alive: dict[int, int] = {}
        self.peak = self.widest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self._meet(x)
        return result

    def _meet(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address = storage.data_ptr()
        if address in self.alive or address in self.inputs:
            return
        self.alive[address] = storage.nbytes()
        weakref.finalize(storage, self.alive.pop, address, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        if x.dtype not in (torch.bfloat16, torch.bool):
            self.widest = max(self.widest, storage.nbytes())


@pytest.mark.parametrize("name", ["kl", "ce"])
def test_float32_exists_only_by_the_chunk(name: str) -> None:
    tokens, vocabulary, chunk = 64, 4096, 128
    student = torch.randn(1, tokens, vocabulary, dtype=torch.bfloat16).requires_grad_()
    teacher = torch.randn(1, tokens, vocabulary, dtype=torch.bfloat16)
    valid, labels = torch.ones(1, tokens, dtype=torch.bool), torch.randint(vocabulary, (1, tokens))
    ours: dict[str, Callable[[], Tensor]] = {
        "kl": lambda: logit_kl(student, teacher, valid, temperature=2.0, chunk_size=chunk),
        "ce": lambda: next_token_ce(student, labels, chunk_size=chunk),
    }
    with MemoryMeter(student, teacher) as meter:
        ours[name]().backward()
    with MemoryMeter(student, teacher) as naive:
        literal_kl(student.float(), teacher.float(), valid, 2.0).backward()
    gradient, chunk_bytes = 2 * tokens * vocabulary, 4 * tokens * chunk
    assert meter.widest <= chunk_bytes
    assert gradient <= meter.peak <= gradient + 6 * chunk_bytes
    assert naive.widest == 2 * gradient, "the meter sees what it should catch"
    assert naive.peak > 6 * gradient


def test_relative_mse_is_the_literal_formula() -> None:
    torch.manual_seed(0)
    student = torch.randn(B, T, 3, 4, dtype=torch.float64, requires_grad=True)
    teacher, valid = torch.randn(B, T, 3, 4, dtype=torch.float64), some_valid()
    expected = (student - teacher)[valid].square().sum() / (teacher[valid].square().sum() + 1e-6)
    torch.testing.assert_close(relative_mse(student, teacher, valid), expected)
    torch.testing.assert_close(relative_mse(1e3 * student, 1e3 * teacher, valid), expected)
    every = torch.ones_like(valid)
    torch.testing.assert_close(relative_mse(student, teacher), relative_mse(student, teacher, every))
    assert torch.autograd.gradcheck(lambda s: relative_mse(s, teacher, valid), student)


def test_relative_mse_ignores_padding_and_survives_its_absence_of_tokens() -> None:
    student = torch.full((B, T, 3, 4), float("nan"), requires_grad=True)
    teacher = torch.full((B, T, 3, 4), float("nan"), requires_grad=True)
    loss = relative_mse(student, teacher, torch.zeros(B, T, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0
    assert teacher.grad is None
    assert student.grad is not None
    assert student.grad.eq(0).all()


def test_relative_mse_accumulates_in_float32() -> None:
    student = torch.full((1, 4096, 2, 8), 1.0, dtype=torch.bfloat16)
    assert relative_mse(student, student * 2).item() == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.01, 100.0])
def test_at_the_temperatures_that_a_recipe_may_have_nothing_overflows(temperature: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    student, teacher = (30 * torch.randn(2, 5, 50, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    valid = torch.ones(2, 5, dtype=torch.bool)
    exact = logit_kl(student, teacher, valid, temperature=temperature)
    (wanted,) = torch.autograd.grad(exact, student)
    ours = student.detach().to(dtype).requires_grad_()
    loss = logit_kl(ours, teacher.to(dtype), valid, temperature=temperature)
    loss.backward()
    assert ours.grad is not None
    assert loss.isfinite()
    if dtype == torch.float32:  # logits in bf16 are others
        assert abs(loss.item() - exact.item()) < 1e-3 * exact.item()
        assert relative_error(ours.grad, wanted) < 1e-3
