"""LA against its definition, and what the paper's kernel must satisfy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, WRONG_SHAPES, relative_error
from torch import Tensor

from linearize.errors import LinearizeError
from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize_kernels.la.la import LAState, la, naive_la
from linearize_kernels.layers.features import featured
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite

EXACT = TOLERANCE[torch.float64]
HIDDEN = 24
every_direction = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def inputs(T: int, H: int = 4, Hkv: int = 2, D: int = 8, Dv: int = 6) -> list[Tensor]:
    """Unit q and k, and v, in float64."""
    q, k, v = (torch.randn(2, T, *shape, dtype=torch.float64) for shape in ((H, D), (Hkv, D), (Hkv, Dv)))
    return [torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1), v]


def ratios() -> list[Tensor]:
    return [torch.rand(4, dtype=torch.float64) + 0.5, torch.rand(4, dtype=torch.float64) * 0.5]


@every_direction
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
def test_it_is_its_definition_with_all_gradients(causal: bool, T: int, padded: bool, packed: bool) -> None:
    leaves = [y.requires_grad_() for y in (*inputs(T), *ratios())]
    q, k, v, a, b = leaves
    padding = torch.rand(2, T) > 0.3 if padded else None
    segments = (torch.rand(2, T) < 0.05).long().cumsum(1) if packed else None
    o, _ = la(q, k, v, a=a, b=b, causal=causal, padding=padding, segments=segments)
    expected = naive_la(q, k, v, a=a, b=b, causal=causal, padding=padding, segments=segments)
    assert relative_error(o, expected) < EXACT
    weight = torch.randn_like(o)
    ours = torch.autograd.grad((o * weight).sum(), leaves)
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    assert all(relative_error(x, y) < 1e-9 or float(y.abs().max()) < 1e-9 for x, y in zip(ours, theirs, strict=True))
    # Only b/a matters, so the gradient is orthogonal to (a, b).
    assert float((a * ours[3] + b * ours[4]).detach().abs().max()) < 1e-9


@pytest.mark.parametrize("cuts", [(0, 40, 40, 41, 150), (0, 150)])
def test_sequences_end_to_end_are_sequences_apart(cuts: tuple[int, ...]) -> None:
    q, k, v = (y[:1] for y in inputs(150))
    o, state = la(q, k, v, cu_seqlens=torch.tensor(cuts, dtype=torch.int32))
    for n, (start, end) in enumerate(pairwise(cuts)):
        alone, last = la(*(y[:, start:end] for y in (q, k, v)))
        assert relative_error(o[:, start:end], alone) < EXACT
        assert all(torch.allclose(x[n : n + 1], y) for x, y in zip(state, last, strict=True))
    again, _ = la(q, k, v, cu_seqlens=torch.tensor(cuts, dtype=torch.int32), state=state)
    assert not torch.equal(again, o)


def test_a_state_carries_on_and_has_gradients() -> None:
    q, k, v = inputs(90)
    whole, last = la(q, k, v)
    _, state = la(q[:, :50], k[:, :50], v[:, :50])
    state = LAState(*(y.requires_grad_() if y.is_floating_point() else y for y in map(torch.clone, state)))
    o, after = la(q[:, 50:], k[:, 50:], v[:, 50:], state=state)
    assert relative_error(o, whole[:, 50:]) < EXACT
    assert all(torch.allclose(x, y) for x, y in zip(after, last, strict=True))
    assert all(y.any() for y in torch.autograd.grad(o.square().sum(), state[:3]))


@every_direction
def test_weights_sum_to_one(causal: bool) -> None:
    q, k, v = inputs(70)
    o, _ = la(q, k, torch.full_like(v, 3.0), causal=causal)
    assert relative_error(o, torch.full_like(o, 3.0)) < EXACT


def test_a_constant_kernel_is_the_running_mean() -> None:
    q, k, v = inputs(70)
    o, _ = la(q, k, v, b=0.0)
    mean = v.cumsum(1) / torch.arange(1, 71)[None, :, None, None]
    assert relative_error(o, mean.repeat_interleave(2, 2)) < EXACT


def test_the_order_of_tokens_is_nothing_to_bidirectional_attention() -> None:
    q, k, v = inputs(70)
    order = torch.randperm(70)
    o, _ = la(q, k, v, causal=False)
    shuffled, _ = la(q[:, order], k[:, order], v[:, order], causal=False)
    assert relative_error(shuffled, o[:, order]) < EXACT


def test_opposite_vectors_do_not_divide_by_zero() -> None:
    """f(q.k) = 1 - 1 = 0 for the only key: no weight at all."""
    q, _, v = inputs(1, H=2)
    q = q.requires_grad_()
    o, _ = la(q, -q, v)
    assert o.isfinite().all()
    assert all(y.isfinite().all() for y in torch.autograd.grad(o.sum(), q))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *WRONG_SHAPES,
        ({"k": torch.zeros(2, 5, 3, 8), "v": torch.zeros(2, 5, 3, 6)}, "key heads must divide"),
    ],
)
def test_wrong_shapes_are_told(change: dict[str, Any], message: str) -> None:
    q, k, v = inputs(5)
    with pytest.raises(ValueError, match=message):
        la(**{"q": q, "k": k, "v": v, **change})


def test_a_state_needs_a_direction() -> None:
    q, k, v = inputs(5)
    _, state = la(q, k, v)
    with pytest.raises(ValueError, match="pass causal=True"):
        la(q, k, v, state=state, causal=False)


def test_it_counts_past_what_fp32_can() -> None:
    q, k, v = (y.float() for y in inputs(3))
    _, state = la(q, k, v)
    _, state = la(q, k, v, state=state._replace(tokens=torch.tensor([2**24, 2**24])))
    assert state.tokens.tolist() == [2**24 + 3] * 2


def test_it_counts_the_real_tokens_of_the_last_document() -> None:
    q, k, v = inputs(8)
    segments = torch.tensor([[5, 5, 5, 5, 5, 5, 5, 5], [0, 0, 1, 1, 1, 0, 0, 0]])
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0]]).bool()
    _, state = la(q, k, v, segments=segments, padding=padding)
    assert state.tokens.tolist() == [6, 2]
    _, state = la(q, k, v, segments=segments, padding=padding, state=state)
    assert state.tokens.tolist() == [12, 2]


def test_no_tokens_no_change() -> None:
    q, k, v = inputs(5)
    _, state = la(q, k, v)
    o, same = la(q[:, :0], k[:, :0], v[:, :0], state=state)
    assert o.shape == (2, 0, 4, 6)
    assert same is state


# ---------------------------------------------------------------- the mixer


def mixer(**options: Any) -> Any:
    site = AttentionSite(0, "a", "self", HIDDEN, 4, 2, 8, 6, 8**-0.5, causal=True)
    made = build_mixer("la", site, resolve_options("la", options))
    made.reset_parameters()
    return made


@pytest.mark.parametrize("features", ["hedgehog", "relu"])
def test_learned_features_are_positive_with_products_of_about_one(features: str) -> None:
    m = mixer(feature_map=features)
    y = torch.randn(2, 50, 4, 8)
    phi = m.feature_map(y, "query")
    assert phi.shape[-1] == (16 if features == "hedgehog" else 8)
    assert (phi >= 0).all()
    products = torch.einsum("bthd,bihd->bhti", phi, phi).mean()
    assert 0.1 < products.item() < 10.0


@pytest.mark.parametrize("features", ["hedgehog", "relu"])
def test_features_of_float64_are_as_exact(features: str) -> None:
    m, y = mixer(feature_map=features).double(), torch.randn(2, 9, 4, 8, dtype=torch.float64)
    weights = [getattr(m.features, f"query_{part}", None) for part in ("map", "bias")]
    assert torch.equal(m.feature_map(y, "query"), featured(y, features, m.site.scale, *weights))


def test_hedgehog_starts_as_published_where_attention_is_causal() -> None:
    """softmax(q), softmax(-q) of what softmax attention would scale."""
    m, y = mixer(feature_map="hedgehog"), torch.randn(2, 9, 4, 8)
    expected = torch.cat([y.softmax(-1), (-y).softmax(-1)], -1) * (8 / 2) ** 0.5
    assert relative_error(m.feature_map(y, "query"), expected) < TOLERANCE[torch.float32]


def test_attention_to_both_sides_makes_no_state() -> None:
    q, k, v = (y.float() for y in inputs(20))
    assert mixer()(q, k, v, torch.zeros(2, 20, HIDDEN), TokenLayout(causal=False))[1] is None


@pytest.mark.parametrize("features", ["hedgehog", "relu"])
def test_every_feature_map_learns(features: str) -> None:
    m = mixer(feature_map=features)
    q, k, v = (y.float() for y in inputs(20))
    o, _ = m(q, k, v, torch.zeros(2, 20, HIDDEN), TokenLayout())
    gradients = torch.autograd.grad(o.square().sum(), list(m.parameters()))
    assert len(gradients) == {"hedgehog": 3, "relu": 5}[features]
    assert all(y.any() for y in gradients)


def test_as_published_it_has_no_parameters_and_a_fixed_ratio() -> None:
    m = mixer(faithful=True)
    assert list(m.parameters()) == []
    assert m.kernel() == (1.0, 1.0)


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_a_learned_slope_needs_room(slope: float) -> None:
    with pytest.raises(LinearizeError, match="a learned slope starts between 0 and 1; or set learn_slope=false"):
        mixer(slope=slope)
    assert mixer(slope=slope, learn_slope=False).kernel() == (1.0, slope)


def test_a_chunk_is_a_power_of_two() -> None:
    with pytest.raises(LinearizeError, match="chunk_size=48: must be a power of two"):
        mixer(chunk_size=48)
