"""Sequences laid end to end, each with a row of the state; and a call in three parts, as a server makes it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_tools import interpreted

from linearize.plan.mechanisms import build_mixer, load_mechanism, mechanism_names, resolve_options
from linearize.serve.states import StateLayout, store, tensors_of
from linearize_kernels.hf.cache import map_state
from linearize_kernels.layers.conv import short_conv
from linearize_kernels.layers.sequences import sequence_places, splice
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite, Mixer
from linearize_kernels.window.window import window

SITE = AttentionSite(0, "attn", "Attention", 24, 4, 2, 8, 8, 8**-0.5, True)
# Tokens before, and in the call.
SEEN, NEW = (0, 5, 0, 40, 3), (9, 1, 1, 20, 6)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gsa": ("gsa", {"slots": 8, "norm": "hidden", "output_act": "swish"}),
    "gsa without decay": ("gsa", {"slots": 8, "decay": "none"}),
    "gsa, window": ("gsa", {"slots": 8, "window": 8, "sink": 2}),
    "gla": ("gla", {"output_gate": True}),
    "gla, window": ("gla", {"window": 8}),
    "gdn": ("gdn", {"output_gate": True}),
    "gdn, convolution": ("gdn", {"taps": 4, "value_act": "swish", "window": 8, "sink": 1}),
    "gdn, native": ("gdn", {"native": True}),
    "gdn, native with two memories": ("gdn", {"native": True, "memories": 2, "maps": True}),
    "mamba2": ("mamba2", {}),
    "mamba2 without a convolution": ("mamba2", {"taps": 1}),
    "mamba2 with two memories": ("mamba2", {"memories": 2, "maps": True}),
    "retnet": ("retnet", {"output_gate": True}),
    "la": ("la", {}),
    "la, window": ("la", {"feature_map": "hedgehog", "window": 8}),
    "mhla": ("mhla", {"blocks": 2, "block_size": 16}),
    "mhla, window": ("mhla", {"blocks": 2, "block_size": 16, "window": 8}),
    "sla over gla": ("sla", {"base": "gla"}),
    "sla over gdn": ("sla", {"base": "gdn", "norm": "none", "window": 8}),
    "sla over gdn with two memories": (
        "sla",
        {"base": "gdn", "memories": 2, "feature_map": "hedgehog", "taps": 2, "window": 8},
    ),
    "sla over retnet": ("sla", {"base": "retnet", "gate_input": "qk"}),
    "window": ("window", {"window": 8, "sink": 2}),
}


def made(case: str, dtype: torch.dtype = torch.float64) -> Mixer:
    name, options = CASES[case]
    torch.manual_seed(0)
    mixer = build_mixer(name, SITE, resolve_options(name, options))
    mixer.reset_parameters()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer.to(dtype)


def tokens(T: int, dtype: torch.dtype, B: int = 1) -> tuple[Tensor, ...]:
    heads, width = (SITE.heads, SITE.kv_heads, SITE.kv_heads), (SITE.key_dim, SITE.key_dim, SITE.value_dim)
    q, k, v = (torch.randn(B, T, H, D, dtype=dtype) for H, D in zip(heads, width, strict=True))
    return q, k, v, torch.randn(B, T, SITE.hidden, dtype=dtype)


def apart(mixer: Mixer, rows: tuple[Tensor, ...], cu: list[int], states: list[Any]) -> tuple[Tensor, list[Any]]:
    """Outputs and states of the sequences of a row, one call each."""
    found = [
        mixer(*(y[:, start:end] for y in rows), TokenLayout(), state)
        for (start, end), state in zip(pairwise(cu), states, strict=True)
    ]
    return torch.cat([o for o, _ in found], 1), [state for _, state in found]


def before(mixer: Mixer, dtype: torch.dtype) -> list[Any]:
    """A state for each sequence; None of those that had no token."""
    return [mixer(*tokens(n, dtype), TokenLayout())[1] if n else None for n in SEEN]


def stacked(states: list[Any]) -> Any:
    """One state with a row for each of those, zeros for None: what a server reads from rows that it names."""
    some = next(state for state in states if state is not None)
    filled = [map_state(torch.zeros_like, some) if state is None else state for state in states]
    return filled[0] if len(filled) == 1 else _joined(filled)


def _joined(states: list[Any]) -> Any:
    if isinstance(states[0], Tensor):
        return torch.cat(states)
    return None if states[0] is None else type(states[0])(*(_joined([*parts]) for parts in zip(*states, strict=True)))


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9)
    assert error <= tolerance, float(error)


def same_states(found: Any, expected: list[Any], tolerance: float) -> None:
    for i, state in enumerate(expected):
        for x, y in zip(tensors_of(found), tensors_of(state), strict=True):
            close(x[i : i + 1], y, tolerance)


def test_every_causal_mechanism_is_here() -> None:
    assert {name for name, _ in CASES.values()} == {n for n in mechanism_names() if load_mechanism(n).causal}


# A state that is no NamedTuple of tensors is a mechanism's own business.
ALONE = [(case, alone) for case in CASES for alone in (False, True) if (case, alone) != ("gsa without decay", True)]


@pytest.mark.parametrize(("case", "alone"), ALONE)
def test_sequences_laid_end_to_end_are_separate_calls(case: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a mechanism that knows no more than one sequence a row."""
    dtype, mixer = torch.float64, made(case)
    if alone:
        scan = mixer.scan

        def one_sequence(inputs: Any, layout: TokenLayout, state: Any) -> Any:
            assert layout.cu_seqlens is None
            return scan(inputs, layout, state)

        monkeypatch.setattr(mixer, "scan", one_sequence)
        monkeypatch.setattr(type(mixer), "pools", False)
    with torch.no_grad():
        states, rows = before(mixer, dtype), tokens(sum(NEW), dtype)
        cu = [0, *torch.tensor(NEW).cumsum(0).tolist()]
        expected, after = apart(mixer, rows, cu, states)
        o, state = mixer(*rows, TokenLayout(cu_seqlens=torch.tensor(cu, dtype=torch.int32)), stacked(states))
    close(o, expected, 1e-6)
    same_states(state, after, 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_same_starts_serve_the_next_call(case: str) -> None:
    """What is kept of them says nothing of the states."""
    dtype, mixer = torch.float64, made(case)
    cu = [0, *torch.tensor(NEW).cumsum(0).tolist()]
    layout = TokenLayout(cu_seqlens=torch.tensor(cu, dtype=torch.int32))
    with torch.no_grad():
        states = before(mixer, dtype)
        state = stacked(states)
        for _ in range(2):
            rows = tokens(sum(NEW), dtype)
            expected, states = apart(mixer, rows, cu, states)
            o, state = mixer(*rows, layout, state)
            close(o, expected, 1e-6)
            same_states(state, states, 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_three_parts_are_the_whole(case: str) -> None:
    """Prompts with starting states, then steps in a pool whose other rows are NaN, each in three parts."""
    dtype, mixer = torch.float32, made(case, torch.float32)
    with torch.no_grad():
        states, rows = before(mixer, dtype), tokens(sum(NEW), dtype)
        cu = [0, *torch.tensor(NEW).cumsum(0).tolist()]
        expected, after = apart(mixer, rows, cu, states)
        layout = TokenLayout(cu_seqlens=torch.tensor(cu, dtype=torch.int32))
        inputs, beside = mixer.prepare(*rows, layout._replace(plain=True))
        outputs, _ = mixer.core(inputs, layout, stacked(states))
        room = mixer.empty_outputs(inputs, rows[2])
        assert [(x.shape, x.dtype) for x in outputs] == [(x.shape, x.dtype) for x in room]
        close(mixer.complete(outputs, beside, layout._replace(plain=True)), expected, 1e-4)

        memory = StateLayout(after[0])
        pool = torch.full((9, memory.bytes), 255, dtype=torch.uint8)
        named = torch.tensor([7, 2, -1, 4, 8])
        real = [0, 1, 3, 4]
        for i in real:
            store(memory.views(pool), named[i : i + 1], after[i])
        rows = tokens(1, dtype, B=5)
        expected = torch.cat([mixer(*(y[i : i + 1] for y in rows), TokenLayout(), after[i])[0] for i in real])
        places = torch.tensor([a + b for a, b in zip(SEEN, NEW, strict=True)])[:, None]
        layout = TokenLayout(rows=named, places=places)
        inputs, beside = mixer.prepare(*rows, layout._replace(plain=True))
        outputs, _ = mixer.core(inputs, layout, memory.views(pool))
        close(mixer.complete(outputs, beside, layout)[real], expected, 1e-4)
        assert bool((pool[[0, 1, 3, 5, 6]] == 255).all())


def window_in_one_launch(held: int, sink: int) -> list[tuple[Tensor, Tensor]]:
    """What the kernel and separate calls give, in pairs, for rings that have seen `held` tokens, none, 5 and 12."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"window": 7, "sink": sink, "scale": 0.4}
    states, rows, cu = [], tokens(sum(NEW), torch.float32)[:3], [0, *torch.tensor(NEW).cumsum(0).tolist()]
    for n in (held, 0, 5, held, 12):
        states.append(window(*tokens(n, torch.float32)[:3], **sizes, backend="torch")[2])
    found = [
        window(*(y[:, start:end] for y in rows), **sizes, state=state, backend="torch")
        for (start, end), state in zip(pairwise(cu), states, strict=True)
    ]
    starts = torch.tensor(cu, dtype=torch.int32)
    o, mass, ring = window(*rows, **sizes, cu_seqlens=starts, state=stacked(states), backend="triton")
    with torch.no_grad():
        onward = window(*rows, **sizes, cu_seqlens=starts, state=ring, backend="triton")[0]
        parts = [(x[2], slice(*ends)) for x, ends in zip(found, pairwise(cu), strict=True)]
        alone = [window(*(y[:, own] for y in rows), **sizes, state=state, backend="torch")[0] for state, own in parts]
    # Whatever reads the rings next sees what they hold.
    again = tokens(1, torch.float32, B=len(NEW))[:3]
    sizes["backend"] = "torch"
    steps = [window(*(y[i : i + 1] for y in again), **sizes, state=x[2])[0] for i, x in enumerate(found)]
    pairs = [(o, torch.cat([x[0] for x in found], 1)), (mass, torch.cat([x[1] for x in found], 1))]
    pairs.append((onward, torch.cat(alone, 1)))
    pairs.append((window(*again, **sizes, state=ring)[0], torch.cat(steps)))
    if held == 0:  # without a state that goes in
        first = [window(*(y[:, start:end] for y in rows), **sizes) for start, end in pairwise(cu)]
        o, mass, ring = window(*rows, **(sizes | {"backend": "triton"}), cu_seqlens=starts)
        pairs += [(o, torch.cat([x[0] for x in first], 1)), (ring.held, torch.cat([x[2].held for x in first]))]
    return [*pairs, (ring.held, torch.cat([x[2].held for x in (first if held == 0 else found)]))]


@pytest.mark.parametrize("held", [0, 3, 6, 7, 8, 9, 30])
@pytest.mark.parametrize("sink", [0, 2])
def test_window_of_sequences_in_one_launch(held: int, sink: int) -> None:
    """Rings that are empty, filling up, as long as window and sink, and long past both."""
    for found, expected in interpreted(window_in_one_launch, held, sink):
        close(found, expected, 1e-5)


def test_a_convolution_starts_where_a_sequence_does() -> None:
    y, taps = torch.randn(1, 7, 2, 3, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    cu = torch.tensor([0, 2, 7])
    out, tail = short_conv(y, taps, None, None, None, cu)
    for i, (start, end) in enumerate(pairwise(cu.tolist())):
        own, last = short_conv(y[:, start:end], taps, None, None, None)
        close(out[:, start:end], own, 1e-12)
        close(tail[i : i + 1], last, 1e-12)


def test_places() -> None:
    cu = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    assert sequence_places(cu, 6, torch.tensor([4, 0, 1])).tolist() == [[4, 5, 0, 1, 2, 3]]
    at = splice(cu, 6, 2)
    assert at.tokens.tolist() == [2, 3, 6, 9, 10, 11]
    assert at.held.tolist() == [[0, 1], [4, 5], [7, 8]]
    assert at.ends.tolist() == [4, 7, 12]
