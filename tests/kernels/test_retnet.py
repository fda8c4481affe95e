"""Retention against its definition, and what the mixer around it owes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TOLERANCE, every_pair, relative_error
from torch import Tensor

from linearize.errors import LinearizeError
from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite
from linearize_kernels.retnet.retnet import RetNetState, naive_retnet, retnet

EXACT = TOLERANCE[torch.float64]
HIDDEN = 24


def inputs(T: int, E: int = 2, B: int = 2) -> dict[str, Tensor]:
    """q, k, v, both gates and log-decays in float64: 4 query heads, 2 KV heads, E memories."""
    shapes = {"q": (4, 8), "k": (2, 8), "v": (2, 6), "read_gate": (4,), "write_gate": (E,)}
    made = {name: torch.randn(B, T, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    return {**made, "log_decay": -torch.rand(E, dtype=torch.float64) / 2}


@pytest.mark.parametrize(  # memories per KV head and per query head
    ("T", "layout", "E", "learned"),
    every_pair([1, 2, 63, 64, 65, 150], ["whole", "holes", "packed", "packed with holes"], [2, 4], [False, True]),
)
def test_it_is_its_definition_with_all_gradients(T: int, E: int, layout: str, learned: bool) -> None:
    given = inputs(T, E)
    memory = torch.randn(2, E, 8, 6, dtype=torch.float64)
    leaves = [y.requires_grad_() for name, y in given.items() if learned or name != "log_decay"]
    leaves.append(memory.requires_grad_())
    masks: dict[str, Any] = {}
    if "holes" in layout:
        masks["padding"] = torch.rand(2, T) > 0.3
    if "packed" in layout:
        masks["segments"] = (torch.rand(2, T) < 0.05).long().cumsum(1)
    results, weight = [], torch.randn(2, T, 4, 6)
    for run in (retnet, naive_retnet):
        o, (S,) = run(**given, **masks, scale=0.3, state=RetNetState(memory))
        loss = (o * weight).sum() + (S * memory.detach()).sum()
        results.append((o, S, *torch.autograd.grad(loss, leaves)))
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < EXACT or float(theirs.detach().abs().max()) < EXACT


def test_it_is_the_sum_with_powers_of_gamma() -> None:
    """Eq. 6, right side."""
    q, k, v = (inputs(40)[name] for name in "qkv")
    log_decay = torch.tensor([-0.1, -0.02], dtype=torch.float64)
    o, _ = retnet(q, k, v, log_decay=log_decay)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    gamma = torch.where(distance >= 0, (distance * log_decay[:, None, None]).exp(), 0.0)  # [E,T,T]
    scores = torch.einsum("btegd,bied->begti", q.unflatten(2, (2, 2)), k) * 8**-0.5 * gamma[:, None]
    assert relative_error(o, torch.einsum("begti,biev->btegv", scores, v).flatten(2, 3)) < EXACT


def test_sequences_end_to_end_are_sequences_apart() -> None:
    given, cuts = inputs(150, B=1), (0, 40, 40, 41, 150)
    log_decay = given.pop("log_decay").requires_grad_()
    memory = torch.randn(4, 2, 8, 6, dtype=torch.float64)
    bounds = torch.tensor(cuts, dtype=torch.int32)
    o, last = retnet(**given, log_decay=log_decay, cu_seqlens=bounds, state=RetNetState(memory))
    gradient = torch.autograd.grad(o.square().sum() + last.memory.square().sum(), log_decay)[0]
    apart = torch.zeros(2, dtype=torch.float64)
    for n in range(4):
        own = {name: y[:, cuts[n] : cuts[n + 1]] for name, y in given.items()}
        alone, end = retnet(**own, log_decay=log_decay, state=RetNetState(memory[n : n + 1]))
        assert relative_error(o[:, cuts[n] : cuts[n + 1]], alone) < EXACT
        assert torch.allclose(last.memory[n : n + 1], end.memory)
        apart += torch.autograd.grad(alone.square().sum() + end.memory.square().sum(), log_decay)[0]
    assert relative_error(gradient, apart) < EXACT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 5, 2, 7)}, r"equal.*dim"),
        ({"log_decay": torch.zeros(3)}, r"heads.*query.*heads"),
        ({"read_gate": torch.zeros(2, 5, 2)}, r"read_gate.*\[B,T,H\]"),
        ({"write_gate": torch.zeros(2, 5, 4)}, r"write_gate.*\[B,T,E\]"),
        ({"padding": torch.ones(2, 4, dtype=torch.bool)}, r"padding.*\[B,T\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens needs B=1"),
    ],
)
def test_wrong_shapes_are_told(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retnet(**{**inputs(5), **change})


# ---------------------------------------------------------------- the mixer


def mixer(**options: Any) -> Any:
    site = AttentionSite(0, "a", "self", HIDDEN, 4, 2, 8, 6, 8**-0.5, causal=True)
    made = build_mixer("retnet", site, resolve_options("retnet", options))
    made.reset_parameters()
    return made


@torch.no_grad()
def test_decays_are_the_papers_or_spread_by_half_life() -> None:
    device = torch.device("cpu")
    paper = 1 - mixer(faithful=True, state_heads="query").log_decay(device).exp()
    assert torch.allclose(paper, 2.0 ** -torch.arange(5.0, 9.0), rtol=1e-4)
    for decay in ("spread", "learned"):
        spread = mixer(decay=decay, half_life_min=10, half_life_max=1000, state_heads="query").log_decay(device)
        assert torch.allclose(0.5 ** (1 / torch.tensor([10.0, 46.42, 215.44, 1000.0])), spread.exp(), rtol=1e-5)
    assert mixer(decay="learned", half_life_min=10, half_life_max=1000).log_half_life.shape == (2,)
    assert "log_half_life" not in mixer(decay="spread").state_dict()


@torch.no_grad()
def test_calibration_chooses_a_half_life_for_each_memory() -> None:
    """That of another one, whose memories forget at other rates; fixed decays stay."""
    torch.manual_seed(0)
    own, other, fixed = mixer(), mixer(), mixer(decay="spread")
    other.start_from("half_life", [64.0, 4.0])
    x = [torch.randn(2, 200, *shape) for shape in ((4, 8), (2, 8), (2, 6), (HIDDEN,))]
    target = 3.0 * other(*x, TokenLayout())[0]
    own.calibrate(*x, own(*x, TokenLayout())[0], target)
    assert own.log_half_life.tolist() == [6.0, 2.0]
    assert relative_error(own(*x, TokenLayout())[0], target) < TOLERANCE[torch.float32]
    decays = fixed.log_decay(torch.device("cpu"))
    fixed.calibrate(*x, fixed(*x, TokenLayout())[0], target)
    assert torch.equal(fixed.log_decay(torch.device("cpu")), decays)


@pytest.mark.parametrize("norm", ["head", "none"])
def test_the_read_gate_scales_the_output_and_the_write_gate_the_value(norm: str) -> None:
    m = mixer(norm=norm)
    torch.manual_seed(0)
    q, k, v, x = (torch.randn(2, 20, *shape) for shape in ((4, 8), (2, 8), (2, 6), (HIDDEN,)))
    read, write = torch.rand(2, 20, 4), torch.rand(2, 20, 2)
    gated, _ = m.mix(q, k, v, x, TokenLayout(), None, read, write)
    plain, _ = m(q, k, v * write[..., None], x, TokenLayout())
    assert relative_error(gated, plain * read[..., None]) < TOLERANCE[torch.float32]


def test_calibration_fits_the_size_by_least_squares() -> None:
    m = mixer(feature_map="identity", decay="spread")
    inputs = [torch.randn(2, 20, *shape) for shape in ((4, 8), (2, 8), (2, 6), (HIDDEN,))]
    sizes = torch.tensor([0.1, 1.0, 3.0, 9.0])[:, None]
    before = m(*inputs, TokenLayout())[0].detach()
    target = sizes * (before + 0.5 * torch.randn_like(before))
    m.calibrate(*inputs, before, target)
    o = m(*inputs, TokenLayout())[0].detach()
    assert torch.allclose((o * (target - o)).sum((0, 1, 3)) / o.square().sum((0, 1, 3)), torch.zeros(4), atol=1e-4)
    m.calibrate(*inputs, before, -before)  # what no positive factor makes better
    assert torch.allclose(m(*inputs, TokenLayout())[0], 0.1 * before, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 48}, "chunk_size=48"),
        ({"half_life_min": 50.0, "half_life_max": 20.0}, r"half_life_max=20\.0.*>=.*half_life_min=50\.0"),
        ({"window": 16, "rope": False}, "set rope=true"),
    ],
)
def test_options_that_do_not_fit_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LinearizeError, match=message):
        mixer(**options)
