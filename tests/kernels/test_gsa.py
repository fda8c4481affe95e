"""GSA: three forms of one equation agree, its special cases are what the paper says, every option works."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.errors import Exit, LinearizeError
from linearize.plan.mechanisms import resolve_options
from linearize_kernels.gsa.gsa import GatedSlotAttention, GSAState, gsa, naive_gsa
from linearize_kernels.layers.scan import block_width
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite, option_types

C = 16  # chunk size of most tests: small, so that short sequences cross many boundaries
F64 = torch.float64

# (D, Dv, M, H, Hkv, E): every key and value width, slot count, grouping and kind of gate head that the tests sample.
SIZES = [
    (64, 64, 16, 4, 4, 4),
    (80, 48, 32, 8, 2, 2),
    (96, 128, 64, 4, 1, 4),
    (128, 80, 128, 8, 1, 1),
    (256, 64, 16, 8, 1, 8),
    (8, 24, 32, 8, 2, 4),
]


def problem(
    T: int,
    *,
    B: int = 2,
    size: tuple[int, int, int, int, int, int] = (8, 6, 16, 4, 2, 2),
    dtype: torch.dtype = F64,
    gates: float = 1.0,
    grad: bool = True,
) -> dict[str, Tensor]:
    """Random q, k, v and log-gates; the slots decay by up to 1e-3 .. 1 times `gates` a token."""
    D, Dv, M, H, Hkv, E = size
    g = -torch.rand(B, T, E, M, dtype=F64) * torch.logspace(-3, 0, M, dtype=F64) * gates
    tensors = {
        "q": torch.randn(B, T, H, D, dtype=F64),
        "k": torch.randn(B, T, Hkv, D, dtype=F64),
        "v": torch.randn(B, T, Hkv, Dv, dtype=F64),
        "g": g,
    }
    return {name: y.to(dtype).requires_grad_(grad) for name, y in tensors.items()}


def random_state(B: int, size: tuple[int, int, int, int, int, int]) -> GSAState:
    D, Dv, M, _, _, E = size
    parts = (torch.randn(B, E, M, dim, dtype=F64, requires_grad=True) for dim in (D, Dv))
    return GSAState(*parts, torch.arange(B) + 3)


def with_gradients(op: Callable[..., Any], x: dict[str, Tensor], **keywords: Any) -> dict[str, Tensor]:
    """What `op` returns, and the gradient of one random functional of all of it to every input."""
    o, state = op(**x, **keywords)
    torch.manual_seed(1)
    loss = sum((y.double() * torch.randn(y.shape, dtype=F64)).sum() for y in (o, state.keys, state.values))
    inputs = dict(x)
    if keywords.get("state") is not None:
        inputs |= {"K": keywords["state"].keys, "V": keywords["state"].values}
    found = dict(zip(inputs, torch.autograd.grad(loss, inputs.values()), strict=True))
    return {"o": o, "keys": state.keys, "values": state.values} | {f"d{name}": y for name, y in found.items()}


def assert_same(ours: dict[str, Tensor], reference: dict[str, Tensor], limit: float) -> None:
    """Each tensor to within `limit` of its largest value, at least of a hundredth of the largest value of all."""
    assert ours.keys() == reference.keys()
    floor = max(float(y.detach().abs().max()) for y in reference.values()) / 100
    errors = {}
    for name, y in reference.items():
        difference = float((ours[name].detach().double() - y.detach().double()).abs().max())
        errors[name] = difference / max(float(y.detach().abs().max()), floor)
    assert all(error <= limit for error in errors.values()), errors


def as_dtype(x: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: y.detach().to(dtype).requires_grad_() for name, y in x.items()}


def quadratic(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Eq. 6 as a T x T sum for all tokens at once: o [B,T,H,Dv]."""
    (T, H, D), E = q.shape[1:], g.shape[2]
    g = g.repeat_interleave(H // E, 2)
    k, v = (y.repeat_interleave(H // y.shape[2], 2) for y in (k, v))
    b = g.cumsum(1)
    later = torch.ones(T, T, dtype=torch.bool).tril()[:, :, None, None]
    decay = torch.where(later, b[:, :, None] - b[:, None], -math.inf).exp()  # [B,T,T,H,M]
    write = decay * -torch.expm1(g)[:, None]
    logits = torch.einsum("bthd,bihd,btihm->bthm", q, k, write) * D**-0.5
    return torch.einsum("bthm,btihm,bihd->bthd", logits.softmax(-1), write, v)


# ---------------------------------------------------------------- one equation, three forms


@pytest.mark.parametrize("T", [1, 2, C - 1, C, C + 1, 3 * C + 5])
def test_recurrence_is_the_quadratic_form(T: int) -> None:
    x = problem(T, grad=False)
    assert relative_error(naive_gsa(**x)[0], quadratic(**x)) <= TOLERANCE[F64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("T", [1, 2, C - 1, C, C + 1, 3 * C + 5])
def test_chunk_form_is_the_recurrence(T: int, dtype: torch.dtype) -> None:
    x = problem(T)
    reference = with_gradients(naive_gsa, x)
    ours = with_gradients(gsa, as_dtype(x, dtype), chunk_size=C)
    assert ours["o"].dtype == dtype
    assert_same(ours, reference, TOLERANCE[dtype])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_width_and_grouping(size: tuple[int, int, int, int, int, int]) -> None:
    x = problem(2 * C + 3, B=1, size=size)
    state = random_state(1, size)
    assert_same(
        with_gradients(gsa, x, state=state, chunk_size=C),
        with_gradients(naive_gsa, x, state=state),
        TOLERANCE[F64],
    )


@pytest.mark.parametrize(("gates", "width"), [(0.1, C), (3.0, C), (6.0, C // 2), (40.0, 2), (1e4, 2), (1e4, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_strong_gates_narrow_the_blocks_and_stay_exact(
    gates: float, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linearize_kernels.layers.scan.RANGE", 44.0 if width > 1 else 20.0)
    widths = set()

    def spy(b: Tensor) -> int:
        widths.add(block_width(b))
        return block_width(b)

    monkeypatch.setattr("linearize_kernels.layers.scan.block_width", spy)
    x = problem(3 * C)
    with torch.no_grad():
        x["g"].copy_(-torch.linspace(0.5, 1.0, 3 * C, dtype=F64)[:, None, None] * torch.linspace(0.1, 1, 16) * gates)
    ours = with_gradients(gsa, as_dtype(x, dtype), chunk_size=C)
    assert widths == {width}
    assert_same(ours, with_gradients(naive_gsa, x), TOLERANCE[dtype])


def test_a_shut_gate_does_not_blur_the_gates_after_it() -> None:
    """The sum of a chunk's gates may not swallow the small ones that follow a huge one."""
    x = problem(4 * C, gates=0.05)
    with torch.no_grad():
        x["g"][:, ::C] = -1e4
    ours = with_gradients(gsa, as_dtype(x, torch.float32), chunk_size=4 * C)
    assert_same(ours, with_gradients(naive_gsa, x), TOLERANCE[torch.float32])


@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 40),
    heads=st.sampled_from([(1, 1, 1), (4, 1, 1), (4, 1, 2), (8, 1, 8), (4, 2, 4)]),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    chunk=st.sampled_from([16, 32, 64]),
    gates=st.sampled_from([1e-3, 1.0, 30.0, 1e3]),
    masked=st.sampled_from(["", "padding", "segments", "both"]),
    seed=st.integers(0, 999),
)
def test_any_shape_any_mask(
    T: int,
    heads: tuple[int, int, int],
    dims: tuple[int, int, int],
    chunk: int,
    gates: float,
    masked: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    size = (*dims, *heads)
    keywords: dict[str, Any] = {"state": random_state(2, size)}
    if masked in ("padding", "both"):
        keywords["padding"] = torch.rand(2, T) < 0.7
    if masked in ("segments", "both"):
        keywords["segments"] = torch.randint(0, 3, (2, T)) // 2  # long documents whose numbers come back
    x = problem(T, size=size, gates=gates)
    reference = with_gradients(naive_gsa, x, **keywords)
    assert_same(with_gradients(gsa, x, chunk_size=chunk, **keywords), reference, TOLERANCE[F64])


def test_gradients_are_those_of_finite_differences() -> None:
    size = (3, 2, 4, 4, 1, 2)
    x = problem(20, B=1, size=size, gates=3.0)
    state = random_state(1, size)
    padding = torch.arange(20)[None] > 2
    segments = (torch.arange(20)[None] > 12).long()

    def op(*inputs: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, keys, values = inputs
        o, last = gsa(
            q, k, v, g, padding=padding, segments=segments, state=GSAState(keys, values, state.seen), chunk_size=8
        )
        return o, last.keys, last.values

    assert torch.autograd.gradcheck(op, (*x.values(), state.keys, state.values))


def test_step_is_the_recurrence_with_gradients() -> None:
    x, size = problem(1), (8, 6, 16, 4, 2, 2)
    for padding in (None, torch.tensor([[True], [False]])):
        state = random_state(2, size)
        ours = with_gradients(gsa, x, state=state, padding=padding)
        assert_same(ours, with_gradients(naive_gsa, x, state=state, padding=padding), TOLERANCE[F64])


# ---------------------------------------------------------------- cutting, packing, padding


@pytest.mark.parametrize("cut", [1, C - 1, C, 2 * C + 3])
def test_prefill_then_decode_is_one_pass(cut: int) -> None:
    x = problem(3 * C + 5, grad=False)
    whole, last = gsa(**x, chunk_size=C)
    o, state = gsa(**{name: y[:, :cut] for name, y in x.items()}, chunk_size=C)
    outputs = [o]
    for t in range(cut, 3 * C + 5):
        o, state = gsa(**{name: y[:, t : t + 1] for name, y in x.items()}, state=state)
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1), whole) <= TOLERANCE[F64]
    assert all(relative_error(a, b) <= TOLERANCE[F64] for a, b in zip(state, last, strict=True))
    assert state.seen.tolist() == [3 * C + 5] * 2


def test_state_carries_gradients_across_a_cut() -> None:
    size = (8, 6, 16, 4, 2, 2)
    x, start = problem(2 * C + 9), random_state(2, size)

    def in_two(state: GSAState, **x: Tensor) -> tuple[Tensor, GSAState]:
        first, middle = gsa(**{n: y[:, :21] for n, y in x.items()}, state=state, chunk_size=C)
        second, last = gsa(**{n: y[:, 21:] for n, y in x.items()}, state=middle, chunk_size=C)
        return torch.cat([first, second], 1), last

    whole = with_gradients(gsa, x, state=start, chunk_size=C)
    assert_same(with_gradients(in_two, x, state=start), whole, TOLERANCE[F64])


LENGTHS = [5, 1, 0, C, 2 * C + 1, 0, 1]


def test_cu_seqlens_is_each_sequence_alone() -> None:
    size = (8, 6, 16, 4, 2, 2)
    x = problem(sum(LENGTHS), B=1)
    state = random_state(len(LENGTHS), size)
    cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)

    def alone(state: GSAState, **x: Tensor) -> tuple[Tensor, GSAState]:
        parts = [
            naive_gsa(
                **{name: y[:, a:b] for name, y in x.items()}, state=GSAState(*(part[n : n + 1] for part in state))
            )
            for n, (a, b) in enumerate(itertools.pairwise(cu.tolist()))
        ]
        states = zip(*(last for _, last in parts), strict=True)
        return torch.cat([o for o, _ in parts], 1), GSAState(*(torch.cat(rows) for rows in states))

    packed = with_gradients(gsa, x, state=state, cu_seqlens=cu, chunk_size=C)
    assert_same(packed, with_gradients(alone, x, state=state), TOLERANCE[F64])
    seen = gsa(**x, state=state, cu_seqlens=cu)[1].seen
    assert seen.tolist() == [n + length for n, length in zip(state.seen.tolist(), LENGTHS, strict=True)]


def test_segments_are_separate_documents_even_when_a_number_comes_back() -> None:
    lengths = [3, C + 2, 1, 2 * C]
    x = problem(sum(lengths), B=1)
    segments = torch.repeat_interleave(torch.tensor([7, 1, 7, 1]), torch.tensor(lengths))[None]

    def alone(**x: Tensor) -> tuple[Tensor, GSAState]:
        parts = zip(*(y.split(lengths, 1) for y in x.values()), strict=True)
        outputs, states = zip(*(naive_gsa(*part) for part in parts), strict=True)
        return torch.cat(outputs, 1), states[-1]

    packed = with_gradients(gsa, x, segments=segments, chunk_size=C)
    assert_same(packed, with_gradients(alone, x), TOLERANCE[F64])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_as_if_it_were_not_there(side: str) -> None:
    pad, T = 7, 2 * C + 3
    x = problem(T + pad)
    real = slice(pad, None) if side == "left" else slice(0, T)
    padding = torch.zeros(2, T + pad, dtype=torch.bool)
    padding[:, real] = True
    o, state = gsa(**x, padding=padding, chunk_size=C)
    plain, last = gsa(**{name: y[:, real] for name, y in x.items()}, chunk_size=C)
    assert relative_error(o[:, real].detach(), plain.detach()) <= TOLERANCE[F64]
    assert all(relative_error(a.detach(), b.detach()) <= TOLERANCE[F64] for a, b in zip(state, last, strict=True))
    assert not o[~padding].any()
    for name, gradient in zip(x, torch.autograd.grad(o.square().sum(), x.values()), strict=True):
        assert not gradient[~padding].any(), name


def test_a_row_of_padding_and_an_empty_sequence_change_nothing() -> None:
    state = random_state(2, (8, 6, 16, 4, 2, 2))
    o, last = gsa(**problem(C + 3), padding=torch.zeros(2, C + 3, dtype=torch.bool), state=state, chunk_size=C)
    assert not o.any()
    assert all(torch.equal(a, b) for a, b in zip(last, state, strict=True))
    o, last = gsa(**problem(0), state=state)
    assert o.shape == (2, 0, 4, 6)
    assert all(torch.equal(a, b) for a, b in zip(last, state, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 9, 2, 8)}, "equal B, T and key dim"),
        ({"v": torch.zeros(2, 8, 1, 6)}, "equal B, T and key dim"),
        ({"g": torch.zeros(2, 8, 3, 16)}, "state heads, and those query heads"),
        ({"k": torch.zeros(2, 8, 4, 8), "v": torch.zeros(2, 8, 4, 6)}, "key heads must divide state heads"),
        ({"padding": torch.ones(2, 9, dtype=torch.bool)}, r"padding must be \[B,T\]"),
        ({"segments": torch.ones(2)}, r"segments must be \[B,T\]"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "cu_seqlens needs B=1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gsa(**{**problem(8), **change})


# ---------------------------------------------------------------- numerics


EDGES: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "zero queries": lambda x: x["q"].zero_(),
    "zero keys": lambda x: x["k"].zero_(),
    "zero values": lambda x: x["v"].zero_(),
    "open gates": lambda x: x["g"].zero_(),
    "shut gates": lambda x: x["g"].fill_(-1e4),
    "every second gate shut": lambda x: x["g"][:, ::2].fill_(-1e4),
    "huge logits": lambda x: x["q"].mul_(1e4),
    "tiny gates": lambda x: x["g"].fill_(-1e-7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_give_no_nan(edge: str, dtype: torch.dtype) -> None:
    x = problem(2 * C + 5, dtype=dtype)
    with torch.no_grad():
        EDGES[edge](x)
    padding = torch.ones(2, 2 * C + 5, dtype=torch.bool)
    padding[0] = False
    for keywords in ({}, {"padding": padding}):
        results = with_gradients(gsa, x, chunk_size=C, **keywords)
        assert [name for name, y in results.items() if not y.isfinite().all()] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_inputs_keep_dtype_and_accuracy(dtype: torch.dtype) -> None:
    x = problem(3 * C + 5, dtype=dtype)
    ours = with_gradients(gsa, x, chunk_size=C)
    assert ours["o"].dtype == dtype
    assert ours["keys"].dtype == ours["values"].dtype == torch.float32
    assert_same(ours, with_gradients(naive_gsa, as_dtype(x, F64)), TOLERANCE[dtype])


def test_long_bf16_sequence_stays_finite_and_right() -> None:
    x = problem(16384, B=1, size=(16, 16, 16, 2, 1, 1), dtype=torch.bfloat16, gates=0.1)
    o, state = gsa(**x)
    exact, _ = gsa(**as_dtype(x, torch.float32))
    assert relative_error(o.detach(), exact.detach()) <= TOLERANCE[torch.bfloat16]
    assert state.keys.isfinite().all()
    gradients = torch.autograd.grad(o.float().square().sum(), x.values())
    assert all(y.isfinite().all() for y in gradients)


@pytest.mark.parametrize("gates", [1.0, 60.0])
@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_no_bit_of_the_past_depends_on_the_future(name: str, gates: float) -> None:
    x = problem(3 * C + 5, dtype=torch.float32, gates=gates, grad=False)
    before, _ = gsa(**x, chunk_size=C)
    for t in (1, C - 1, C, 2 * C + 7):
        other = {**x, name: torch.cat([x[name][:, :t], x[name][:, t:] * 0.5], 1)}
        after, _ = gsa(**other, chunk_size=C)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t:], before[:, t:])


def test_twice_the_same_is_the_same_bit_for_bit() -> None:
    x = problem(3 * C + 5, dtype=torch.float32)
    first, second = (with_gradients(gsa, x, chunk_size=C) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def saved_bytes(T: int) -> int:
    """Bytes that the forward pass over T tokens keeps for the backward pass."""
    storages: dict[int, int] = {}

    def pack(y: Tensor) -> Tensor:
        storages[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
        return y

    x = problem(T, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        o, _ = gsa(**x, chunk_size=C)
    assert o.requires_grad
    return sum(storages.values())


def test_memory_for_the_backward_pass_is_linear_in_T_and_small() -> None:
    short, long = saved_bytes(512), saved_bytes(1024)
    assert long / short <= 2.1
    per_token = 4 * 2 * (4 * (8 + 16) + 2 * (8 + 6 + 16))  # fp32, B=2: q and logits of H heads; k, v, g of E heads
    assert long <= 1.8 * 1024 * per_token


# ---------------------------------------------------------------- special cases


def test_shut_gates_return_the_value_of_the_token() -> None:
    x = problem(C + 3, grad=False)
    x["g"] = torch.full_like(x["g"], -1e4)
    o, _ = gsa(**x, chunk_size=C)
    assert relative_error(o, x["v"].repeat_interleave(2, 2)) <= TOLERANCE[F64]


def test_open_gates_write_nothing() -> None:
    x = problem(C + 3, grad=False)
    o, state = gsa(**{**x, "g": torch.zeros_like(x["g"])}, chunk_size=C)
    assert not o.any()
    assert not state.keys.any()


def test_equal_slots_give_a_moving_average_whatever_q_and_k() -> None:
    x = problem(2 * C + 3, grad=False)
    x["g"] = x["g"][..., -1:].expand_as(x["g"])
    average, expected = torch.zeros(2, 2, 6, dtype=F64), []
    for t in range(2 * C + 3):
        alpha = x["g"][:, t, :, :1].exp()
        average = alpha * average + (1 - alpha) * x["v"][:, t]
        expected.append(average.repeat_interleave(2, 1))
    assert relative_error(gsa(**x, chunk_size=C)[0], torch.stack(expected, 1)) <= TOLERANCE[F64]


def test_one_token_per_slot_is_softmax_with_empty_slots() -> None:
    T = M = 16
    x = problem(T, B=1, size=(8, 6, M, 2, 2, 2), grad=False)
    x["g"] = torch.where(torch.eye(T, dtype=torch.bool), -1e4, 0.0)[None, :, None].expand(1, T, 2, M).double()
    o, _ = gsa(**x, chunk_size=C)
    weights = torch.einsum("bthd,bihd->bhti", x["q"], x["k"]).mul(8**-0.5).exp().tril()
    empty = M - 1 - torch.arange(T, dtype=F64)  # each of them counts e^0
    expected = torch.einsum("bhti,bihd->bthd", weights / (weights.sum(-1) + empty)[..., None], x["v"])
    assert relative_error(o, expected) <= TOLERANCE[F64]
    softmax = F.scaled_dot_product_attention(*(x[n].transpose(1, 2) for n in "qkv"), is_causal=True)
    assert relative_error(o[:, -1], softmax[:, :, -1]) <= TOLERANCE[F64]


def test_gates_of_a_cumulative_softmax_give_its_renormalised_memory() -> None:
    """g_t = z_{t-1} - z_t with z the running logsumexp of scores: each slot is the softmax-weighted mean so far."""
    T = 2 * C + 3
    x = problem(T, B=1, grad=False)
    scores = torch.randn(1, T, 2, 16, dtype=F64) * 3
    z = scores.logcumsumexp(1)
    x["g"] = torch.cat([torch.full_like(z[:, :1], -1e4), z[:, :-1] - z[:, 1:]], 1)
    weights = torch.where(
        torch.ones(T, T, dtype=torch.bool).tril()[:, :, None, None], scores[:, None] - z[:, :, None], -math.inf
    ).exp()  # [B,T,T,E,M]
    keys, values = (torch.einsum("btiem,bied->btemd", weights, x[n]) for n in "kv")
    p = (torch.einsum("btegd,btemd->btegm", x["q"].unflatten(2, (2, 2)), keys) * 8**-0.5).softmax(-1)
    expected = torch.einsum("btegm,btemd->btegd", p, values).flatten(2, 3)
    assert relative_error(gsa(**x, chunk_size=C)[0], expected) <= TOLERANCE[F64]


def test_constant_values_show_how_full_the_memory_is() -> None:
    """The effective attention is >= 0 and its rows sum to 1 - sum_m p_t e^{b_t} <= 1."""
    x = problem(2 * C + 3, grad=False)
    o, _ = gsa(**{**x, "v": torch.ones_like(x["v"])}, chunk_size=C)
    assert float(o.min()) >= 0.0
    assert float(o.max()) <= 1.0 + 1e-12
    left = x["g"].cumsum(1).exp()  # what is left of the empty memory, per slot
    expected = 1 - torch.einsum("btegm,btem->bteg", slot_logits(x).softmax(-1), left).flatten(2)
    assert relative_error(o, expected[..., None].expand_as(o)) <= TOLERANCE[F64]


def slot_logits(x: dict[str, Tensor]) -> Tensor:
    """l_t [B,T,E,G,M] by the recurrence."""
    K, logits = torch.zeros(*x["g"].shape[:1], *x["g"].shape[2:], x["k"].shape[-1], dtype=F64), []
    for t in range(x["g"].shape[1]):
        alpha = x["g"][:, t].exp()[..., None]
        K = alpha * K + (1 - alpha) * x["k"][:, t, :, None]
        logits.append(torch.einsum("bemd,begd->begm", K, x["q"][:, t].unflatten(1, (2, 2))) * 8**-0.5)
    return torch.stack(logits, 1)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_slots_have_no_order(seed: int) -> None:
    torch.manual_seed(seed)
    x = problem(2 * C + 3, grad=False)
    order = torch.randperm(16)
    o, state = gsa(**x, chunk_size=C)
    other, permuted = gsa(**{**x, "g": x["g"][..., order]}, chunk_size=C)
    assert relative_error(other, o) <= TOLERANCE[F64]
    assert relative_error(permuted.keys, state.keys[:, :, order]) <= TOLERANCE[F64]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), factor=st.floats(-3, 3))
def test_outputs_are_linear_in_values(seed: int, factor: float) -> None:
    torch.manual_seed(seed)
    x, other = problem(C + 5, grad=False), problem(C + 5, grad=False)["v"]
    mixed = gsa(**{**x, "v": x["v"] + factor * other}, chunk_size=C)[0]
    parts = gsa(**x, chunk_size=C)[0] + factor * gsa(**{**x, "v": other}, chunk_size=C)[0]
    assert relative_error(mixed, parts) <= TOLERANCE[F64]


# ---------------------------------------------------------------- the mixer and its options

SITE = AttentionSite(0, "model.layers.0.self_attn", "self", 24, 4, 2, 8, 6, 8**-0.5, causal=True)


def mixer(site: AttentionSite = SITE, **options: Any) -> GatedSlotAttention:
    torch.manual_seed(3)
    made = GatedSlotAttention(site, **options)
    made.reset_parameters()
    return made


def tokens(T: int, B: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and hidden states for SITE."""
    return torch.randn(B, T, 4, 8), torch.randn(B, T, 2, 8), torch.randn(B, T, 2, 6), torch.randn(B, T, 24)


def mix(
    m: GatedSlotAttention, inputs: tuple[Tensor, ...], state: GSAState | None = None, **layout: Any
) -> tuple[Tensor, GSAState]:
    return m(*inputs, TokenLayout(**layout), state)


def gates_at_rest(m: GatedSlotAttention) -> Tensor:
    """Log-decays of a token whose hidden state is zero: [E,M]."""
    return m.gates(m._before_gates(torch.zeros(1, 1, 24)), TokenLayout(), 0)[0, 0].detach()


def test_gates_are_damped_log_sigmoids_in_fp32() -> None:
    m, x = mixer(damping=4.0, clock=0), torch.randn(2, 5, 24)
    expected = F.logsigmoid(m.forget(x)).unflatten(-1, (2, 64)) / 4.0
    assert relative_error(m.gates(m._before_gates(x), TokenLayout(), 0), expected) <= TOLERANCE[torch.float32]
    assert m.bfloat16().gates(m._before_gates(x.bfloat16()), TokenLayout(), 0).dtype == torch.float32


def test_half_lives_are_spread_from_2_to_2048_tokens() -> None:
    for options in ({"clock": 0}, {"clock": 0, "damping": 1.0}, {"clock": 16, "slots": 80}):
        free = gates_at_rest(mixer(**options))[:, options["clock"] :]
        expected = torch.logspace(math.log10(2), math.log10(2048), 64).expand_as(free)
        assert relative_error(-math.log(2) / free, expected) <= 1e-3


def test_half_life_bounds_and_zero_for_equal_gates() -> None:
    g = gates_at_rest(mixer(slots=8, clock=0, half_life_min=4.0, half_life_max=64.0))
    assert -math.log(2) / g[0, 0] == pytest.approx(4.0, rel=1e-4)
    assert -math.log(2) / g[0, -1] == pytest.approx(64.0, rel=1e-4)
    assert torch.equal(mixer(half_life_min=0.0).forget.bias, torch.zeros(2 * 64))


def test_gate_std_is_that_of_the_new_weights() -> None:
    assert mixer(gate_std=0.5).forget.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert not mixer(gate_std=0.0).forget.weight.any()


def test_gate_rank_splits_the_map_and_keeps_its_deviation() -> None:
    m, x = mixer(gate_rank=8, gate_std=0.5, clock=0, damping=4.0), torch.randn(2, 5, 24)
    product = (m.forget.weight @ m.narrow.weight).detach()
    assert product.shape == (2 * 64, 24)
    assert float(product.std()) == pytest.approx(0.5, rel=0.15)
    expected = F.logsigmoid(x @ product.T + m.forget.bias).unflatten(-1, (2, 64)) / 4.0
    assert relative_error(m.gates(m._before_gates(x), TokenLayout(), 0), expected) <= 2e-6
    assert sum(p.numel() for p in m.parameters()) == 8 * 24 + 2 * 64 * 9
    with pytest.raises(ValueError, match="gate_rank=8: with decay=fixed no map makes the gates"):
        mixer(gate_rank=8, decay="fixed")


def test_gate_heads_make_one_memory_per_key_head_or_per_query_head() -> None:
    for state_heads, E in (("kv", 2), ("query", 4)):
        m = mixer(state_heads=state_heads, slots=16)
        o, state = mix(m, tokens(C + 2))
        assert o.shape == (2, C + 2, 4, 6)
        assert state.keys.shape == (2, E, 16, 8)
        assert state.values.shape == (2, E, 16, 6)


def test_rope_false_asks_the_hooks_to_drop_it() -> None:
    assert mixer(rope=False).drop_rope
    assert not mixer(rope=True).drop_rope


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"identity": lambda y: y, "swish": F.silu, "relu": F.relu}


@pytest.mark.parametrize("feature_map", ACTIVATIONS)
@pytest.mark.parametrize("value_act", ["identity", "swish"])
@pytest.mark.parametrize("output_act", ["identity", "swish"])
@pytest.mark.parametrize("unit_scale", [False, True])
def test_activations_and_scale(feature_map: str, value_act: str, output_act: str, unit_scale: bool) -> None:
    m = mixer(feature_map=feature_map, value_act=value_act, output_act=output_act, unit_scale=unit_scale, slots=16)
    q, k, v, x = tokens(9)
    phi, scale = ACTIVATIONS[feature_map], 1.0 if unit_scale else SITE.scale
    g = m.gates(m._before_gates(x), TokenLayout(), 0)
    o, _ = naive_gsa(phi(q), phi(k), ACTIVATIONS[value_act](v), g, scale=scale)
    assert relative_error(mix(m, (q, k, v, x))[0], ACTIVATIONS[output_act](o)) <= TOLERANCE[torch.float32]


def test_norms_over_a_head_and_over_all() -> None:
    inputs = tokens(9)
    plain, _ = mix(mixer(), inputs)
    for norm, dims in (("head", (-1,)), ("hidden", (-2, -1))):
        m = mixer(norm=norm)
        with torch.no_grad():
            m.norm_weight.copy_(torch.rand(4, 6))
        expected = plain / (plain.square().mean(dims, keepdim=True) + 1e-6).sqrt() * m.norm_weight
        assert relative_error(mix(m, inputs)[0], expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("norm", ["head", "hidden", "none"])
def test_calibrate_brings_each_head_near_to_the_teacher_by_a_factor(norm: str) -> None:
    m, inputs = mixer(norm=norm), tokens(40)
    if norm != "none":
        torch.nn.init.constant_(m.norm_weight, 5.0)
    before = {name: p.clone() for name, p in m.named_parameters()}
    made = mix(m, inputs)[0].detach()
    teacher = (made + made.std() * torch.randn_like(made)) * torch.tensor([0.1, 1.0, 3.0, 10.0])[:, None]
    m.calibrate(*inputs, made, teacher)
    changed = {name for name, p in m.named_parameters() if not torch.equal(p, before[name])}
    assert changed == (set() if norm == "none" else {"norm_weight"})
    if norm != "none":  # what is left points nowhere along the output
        ours = mix(m, inputs)[0].detach()
        along = (ours * (teacher - ours)).sum((0, 1, 3)) / ours.square().sum((0, 1, 3))
        assert torch.allclose(along, torch.zeros(4), atol=1e-4)


def test_calibrate_gives_the_teachers_power_beside_a_window() -> None:
    importlib.import_module("linearize_kernels.window.window")
    m, inputs = mixer(norm="head", window=8), tokens(40)
    teacher = torch.randn(2, 40, 4, 6) * torch.tensor([0.1, 1.0, 3.0, 10.0])[:, None]
    m.calibrate(*inputs, mix(m, inputs)[0], teacher)
    size = teacher.square().mean((0, 1, 3)).sqrt()[:, None].expand(4, 6)
    assert relative_error(m.norm_weight, size) <= 1e-6


def test_chunk_size_is_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(*args: Any, **keywords: Any) -> Any:
        seen.append(keywords["chunk_size"])
        return gsa(*args, **keywords)

    monkeypatch.setattr("linearize_kernels.gsa.gsa.gsa", spy)
    small, large = (mix(mixer(chunk_size=size), inputs)[0] for inputs in [tokens(70)] for size in (16, 256))
    assert seen == [16, 256]
    assert relative_error(small, large) <= TOLERANCE[torch.float32]


def ring(W: int, **options: Any) -> GatedSlotAttention:
    """A mixer that is nothing but a hard clock of W slots."""
    m = mixer(slots=W, clock=W, gate_std=0.0, **options)
    with torch.no_grad():
        m.clock_strength.fill_(1e4)
    return m


@pytest.mark.parametrize("state_heads", ["kv", "query"])
def test_a_hard_clock_is_softmax_over_the_last_tokens(state_heads: str) -> None:
    W, T = 8, 50
    q, k, v, x = tokens(T)
    o, _ = mix(ring(W, state_heads=state_heads), (q, k, v, x))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    exact = F.scaled_dot_product_attention(
        *(y.transpose(1, 2) for y in (q, k, v)), (distance >= 0) & (distance < W), enable_gqa=True
    ).transpose(1, 2)
    assert relative_error(o[:, W - 1 :], exact[:, W - 1 :]) <= TOLERANCE[torch.float32]


def test_the_clock_keeps_its_turns_across_decode_padding_and_documents() -> None:
    T, pad = 30, 5
    m, inputs = mixer(slots=20, clock=8), tokens(T)
    with torch.no_grad():
        m.clock_strength.copy_(torch.linspace(2, 60, 8))  # slots that differ, so that it matters whose turn it is
    whole, _ = mix(m, inputs)
    o, state = mix(m, tuple(y[:, :13] for y in inputs))
    outputs = [o]
    for t in range(13, T):
        o, state = mix(m, tuple(y[:, t : t + 1] for y in inputs), state=state)
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1), whole) <= TOLERANCE[torch.float32]

    padding = torch.arange(T + pad).expand(2, -1) >= pad
    padded = tuple(torch.cat([torch.randn_like(y[:, :pad]), y], 1) for y in inputs)
    o, state = mix(m, tuple(y[:, :-1] for y in padded), padding=padding[:, :-1])
    assert relative_error(o[:, pad:], whole[:, :-1]) <= TOLERANCE[torch.float32]
    o, _ = mix(m, tuple(y[:, -1:] for y in padded), state=state, padding=padding[:, -1:])
    assert relative_error(o, whole[:, -1:]) <= TOLERANCE[torch.float32]

    twice = tuple(torch.cat([y, y], 1) for y in inputs)
    segments = (torch.arange(2 * T) >= T).long().expand(2, -1)
    o, _ = mix(m, twice, segments=segments)
    assert relative_error(o, torch.cat([whole, whole], 1)) <= TOLERANCE[torch.float32]


def test_a_fresh_clock_writes_mostly_its_turn_and_has_gradients() -> None:
    m = mixer(slots=20, clock=4)
    g = m.gates(m._before_gates(torch.zeros(1, 8, 24)), TokenLayout(), 0)[0, :, 0, :4]
    turn = (torch.arange(8) % 4)[:, None] == torch.arange(4)
    assert float(g[turn].max()) < -2.9
    assert float(g[~turn].min()) > -1e-6
    mix(m, tokens(9))[0].square().sum().backward()
    assert m.clock_strength.grad is not None
    assert m.clock_strength.grad.any()


@pytest.mark.parametrize("options", [{}, {"slots": 16, "state_heads": "query"}, {"slots": 32, "clock": 8}], ids=str)
def test_state_bytes_are_those_of_the_state(options: dict[str, Any]) -> None:
    m = mixer(**options)
    for T in (1, 40):
        _, state = mix(m, tokens(T, B=1))
        assert sum(part.numel() * part.element_size() for part in state) == m.state_bytes(T)


def test_faithful_is_the_published_layer() -> None:
    options = resolve_options("gsa", {"faithful": "true", "slots": "16"})
    assert options["slots"] == 16
    assert {name: options[name] for name in GatedSlotAttention.published} == GatedSlotAttention.published
    m, (q, k, v, x) = mixer(**options), tokens(9)
    assert m.drop_rope
    g = F.logsigmoid(m.forget(x)).unflatten(-1, (2, 16)) / 8
    o = F.silu(naive_gsa(F.silu(q), F.silu(k), F.silu(v), g, scale=1.0)[0])
    expected = F.rms_norm(o.flatten(2), (24,), m.norm_weight.flatten(), 1e-6).view_as(o)
    assert relative_error(mix(m, (q, k, v, x))[0], expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clock": 65}, "clock=65: must be <= slots=64"),
        ({"half_life_min": 8.0, "half_life_max": 4.0}, "half_life_max=4.0: must be >= half_life_min=8.0"),
        ({"chunk_size": 48}, "chunk_size=48: must be a power of two"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedSlotAttention(SITE, **options)


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"slot": 8}, "slot: gsa has no such option. Did you mean 'slots'?"),
        ({"zzz": 1}, "zzz: gsa has no such option. Known: slots"),
        ({"slots": 0}, "slots=0: must be >= 1 and <= 1024"),
        ({"slots": "2000"}, "slots=2000: must be >= 1 and <= 1024"),
        ({"slots": "many"}, "slots=many: must be a whole number"),
        ({"slots": 2.5}, "slots=2.5: must be a whole number"),
        ({"slots": True}, "slots=True: must be a whole number"),
        ({"damping": "strong"}, "damping=strong: must be a number"),
        ({"damping": "nan"}, "damping=nan: must be >= 0.1 and <= 1024"),
        ({"rope": "maybe"}, "rope=maybe: must be true or false"),
        ({"norm": "heads"}, "norm=heads: must be one of none, head, hidden. Did you mean 'head'?"),
        ({"faithful": 3}, "faithful=3: must be true or false"),
    ],
)
def test_options_are_checked_before_anything_is_built(given_options: dict[str, Any], message: str) -> None:
    with pytest.raises(LinearizeError) as caught:
        resolve_options("gsa", given_options)
    assert caught.value.code == Exit.USAGE
    assert caught.value.message.startswith(message)


def test_options_come_from_strings_as_from_values() -> None:
    texts = {"slots": "32", "damping": "4", "rope": "False", "norm": "head"}
    values = {"slots": 32, "damping": 4.0, "rope": False, "norm": "head"}
    assert resolve_options("gsa", texts) == resolve_options("gsa", values)
    assert resolve_options("gsa", {}) == {n: default for n, (_, _, default) in option_types(GatedSlotAttention).items()}


def test_the_sites_own_scale_is_used() -> None:
    loud = dataclasses.replace(SITE, scale=3.0)
    q, k, v, x = tokens(9)
    expected, _ = mix(mixer(), (q * 3.0 / SITE.scale, k, v, x))
    assert relative_error(mix(mixer(loud), (q, k, v, x))[0], expected) <= TOLERANCE[torch.float32]
