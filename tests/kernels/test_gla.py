"""GLA against its recurrence, and what a memory with a decay per channel must satisfy."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, every_pair, relative_error
from torch import Tensor

from linearize.errors import LinearizeError
from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize_kernels.gla.gla import GLAState, gla, naive_gla
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite

EXACT = TOLERANCE[torch.float64]
HIDDEN = 24


def inputs(T: int, H: int = 4, Hkv: int = 1, E: int = 2, D: int = 8, Dv: int = 6, gate: float = 1.0) -> list[Tensor]:
    """q, k, v, g, read gate, write gate and memory in float64."""
    shapes = ((H, D), (Hkv, D), (Hkv, Dv), (E, D))
    q, k, v, g = (torch.randn(2, T, *shape, dtype=torch.float64) for shape in shapes)
    read, write = (torch.rand(2, T, heads, dtype=torch.float64) + 0.5 for heads in (H, E))
    g = gate * torch.nn.functional.logsigmoid(g) / 4
    return [q, k, v, g, read, write, torch.randn(2, E, D, Dv, dtype=torch.float64)]


@pytest.mark.parametrize(  # usual gates and strong ones
    ("T", "gate", "padded", "packed"), every_pair([1, 2, 63, 64, 65, 150], [1.0, 40.0], [False, True], [False, True])
)
def test_it_is_its_recurrence_with_all_gradients(T: int, gate: float, padded: bool, packed: bool) -> None:
    leaves = [y.requires_grad_() for y in inputs(T, gate=gate)]
    masks = {
        "padding": torch.rand(2, T) > 0.3 if padded else None,
        "segments": (torch.rand(2, T) < 0.05).long().cumsum(1) if packed else None,
    }
    results, weights = [], None
    for run in (gla, naive_gla):
        q, k, v, g, read, write, memory = leaves
        o, state = run(q, k, v, g, **masks, read_gate=read, write_gate=write, state=GLAState(memory))
        weights = [torch.randn_like(y) for y in (o, state.memory)] if weights is None else weights
        loss = sum((x * y).sum() for x, y in zip((o, state.memory), weights, strict=True))
        results.append([o, state.memory, *torch.autograd.grad(loss, leaves)])
    for ours, expected in zip(*results, strict=True):
        assert float((ours - expected).detach().abs().max()) <= EXACT * max(1.0, float(expected.detach().abs().max()))


@pytest.mark.parametrize("cuts", [(0, 40, 40, 41, 150), (0, 150)])
def test_sequences_end_to_end_are_sequences_apart(cuts: tuple[int, ...]) -> None:
    q, k, v, g, read, write, _ = (y[:1] for y in inputs(150))
    gates = {"read_gate": read, "write_gate": write}
    o, state = gla(q, k, v, g, **gates, cu_seqlens=torch.tensor(cuts, dtype=torch.int32))
    for n, (start, end) in enumerate(pairwise(cuts)):
        q_n, k_n, v_n, g_n, read_n, write_n = (y[:, start:end] for y in (q, k, v, g, read, write))
        alone, last = gla(q_n, k_n, v_n, g_n, read_gate=read_n, write_gate=write_n)
        assert relative_error(o[:, start:end], alone) < EXACT
        assert torch.allclose(state.memory[n : n + 1], last.memory)
    again, _ = gla(q, k, v, g, **gates, cu_seqlens=torch.tensor(cuts, dtype=torch.int32), state=state)
    assert not torch.equal(again, o)


def test_open_gates_add_up_all_that_was_written() -> None:
    q, k, v, g, *_ = inputs(70, H=2, Hkv=2, E=2)
    o, _ = gla(q, k, v, 0 * g, scale=1.0)
    scores = torch.einsum("bthd,bihd->bhti", q, k).tril()
    assert relative_error(o, torch.einsum("bhti,bihd->bthd", scores, v)) < EXACT


@pytest.mark.parametrize("closed", [-1e4, -torch.inf])
def test_closed_gates_leave_the_token_alone(closed: float) -> None:
    q, k, v, g, *_ = inputs(70, H=2, Hkv=2, E=2)
    g = torch.full_like(g, closed).requires_grad_()
    o, _ = gla(q, k, v, g, scale=1.0)
    assert relative_error(o, (q * k).sum(-1, keepdim=True) * v) < EXACT
    assert torch.autograd.grad(o.sum(), g)[0].isfinite().all()


def test_a_write_gate_of_zero_deletes_the_token() -> None:
    q, k, v, g, *_ = inputs(70)
    write = torch.ones(2, 70, 2, dtype=torch.float64)
    write[:, 20] = 0.0
    gated, _ = gla(q, k, v, g, write_gate=write)
    without, _ = gla(q, k, torch.where(torch.arange(70)[None, :, None, None] == 20, 0.0, v), g)
    assert torch.allclose(gated, without)


def test_no_tokens_no_change() -> None:
    q, k, v, g, _, _, memory = inputs(5)
    o, state = gla(*(y[:, :0] for y in (q, k, v, g)), state=GLAState(memory))
    assert o.shape == (2, 0, 4, 6)
    assert torch.equal(state.memory, memory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"g": torch.zeros(2, 5, 2, 7)}, r"\[B,T,E,D\]"),
        ({"g": torch.zeros(2, 5, 3, 8)}, r"heads.*query.*heads"),
        ({"padding": torch.ones(2, 4, dtype=torch.bool)}, r"padding.*\[B,T\]"),
        ({"read_gate": torch.ones(2, 5, 2)}, r"read_gate.*\[B,T,H\]"),
        ({"write_gate": torch.ones(2, 5, 4)}, r"write_gate.*\[B,T,E\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens needs B=1"),
    ],
)
def test_wrong_shapes_are_told(change: dict[str, Any], message: str) -> None:
    q, k, v, g, *_ = inputs(5)
    with pytest.raises(ValueError, match=message):
        gla(**{"q": q, "k": k, "v": v, "g": g, **change})


# ---------------------------------------------------------------- the mixer


def mixer(**options: Any) -> Any:
    site = AttentionSite(0, "a", "self", HIDDEN, 4, 2, 8, 6, 8**-0.5, causal=True)
    made = build_mixer("gla", site, resolve_options("gla", options))
    made.reset_parameters()
    return made


def half_lives(m: Any) -> Tensor:
    """Of each channel, where the hidden state is zero."""
    return -math.log(2.0) / m.gates(torch.zeros(1, 1, HIDDEN))[0, 0].detach()


def test_half_lives_are_spread_over_rotary_pairs() -> None:
    for row in half_lives(mixer(half_life_min=4.0, half_life_max=500.0)):
        assert torch.allclose(row[:4], row[4:])
        assert torch.allclose(row[[0, 3]], torch.tensor([4.0, 500.0]), rtol=1e-3)
        assert (row[:4].diff() > 0).all()


def test_as_published_gates_start_in_the_middle() -> None:
    assert torch.allclose(half_lives(mixer(faithful=True)), torch.full((2, 8), 16.0))


def test_a_read_gate_is_not_undone_by_the_norm() -> None:
    m, T = mixer(), 20
    q, k, v = (torch.randn(2, T, *shape) for shape in ((4, 8), (2, 8), (2, 6)))
    inputs, gate = (q, k, v, torch.zeros(2, T, HIDDEN), TokenLayout()), torch.rand(2, T, 4) + 0.5
    plain, _ = m(*inputs)
    gated, _ = m.mix(*inputs, None, gate)
    assert relative_error(gated, plain * gate[..., None]) < TOLERANCE[torch.float32]


def test_calibration_finds_the_memories_that_made_the_teacher() -> None:
    """Each with half-lives of its own, and heads of different sizes."""
    m = mixer(state_heads="kv")
    q, k, v = (torch.randn(2, 50, *shape) for shape in ((4, 8), (2, 8), (2, 6)))
    inputs = (q, k, v, torch.randn(2, 50, HIDDEN))
    teacher, known = copy.deepcopy(m), type(m).tried["half_lives"]
    with torch.no_grad():
        teacher.start_from("half_lives", [known[1], known[-2]])
        teacher.norm.weight.mul_(torch.tensor([0.1, 1.0, 3.0, 9.0])[:, None])
        target, before = teacher(*inputs, TokenLayout())[0], m(*inputs, TokenLayout())[0]
        m.calibrate(*inputs, before, target, TokenLayout())
        assert relative_error(m(*inputs, TokenLayout())[0], target) < 1e-4
    assert relative_error(half_lives(m), half_lives(teacher)) < 1e-4


def test_calibration_leaves_published_gates_alone() -> None:
    m = mixer(faithful=True)
    q, k, v = (torch.randn(2, 50, *shape) for shape in ((4, 8), (2, 8), (2, 6)))
    teacher = torch.randn(2, 50, 4, 6) * torch.tensor([0.1, 1.0, 3.0, 9.0])[:, None]
    m.calibrate(q, k, v, torch.randn(2, 50, HIDDEN), teacher, teacher)
    assert torch.allclose(half_lives(m), torch.full((2, 8), 16.0))
    assert torch.allclose(m.norm.weight[:, 0], teacher.square().mean((0, 1, 3)).sqrt())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"half_life_min": 9.0, "half_life_max": 8.0}, r"half_life_max=8\.0.*>=.*half_life_min=9\.0"),
        ({"chunk_size": 48}, "chunk_size=48"),
        ({"window": 8, "rope": False}, "set rope=true"),
    ],
)
def test_options_that_do_not_fit_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LinearizeError, match=message):
        mixer(**options)
