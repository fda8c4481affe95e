"""Batches of decode steps and prompts, in any cut and order, give what single sequences give."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import relative_error
from serve.test_states import CASES, LIMIT, SITE, make, nan_pool, rotation_by, tokens
from torch import Tensor, nn

from linearize.serve import batch as batches
from linearize.serve.batch import Batch, grouped, prompts_of, rehearse, run
from linearize.serve.merge import Part, merged
from linearize.serve.states import Pool, StateLayout, example_state
from linearize_kernels.layout import TokenLayout


def described(rows: Tensor, chosen: list[int], sizes: list[int], done: list[int]) -> Batch:
    """The batch of sequences `chosen`, in order: steps first. The caller clears rows of steps that begin."""
    n = sum(size == 1 for size in sizes)
    steps = Batch(rows[chosen[:n]].int(), torch.tensor([[done[i]] for i in chosen[:n]], dtype=torch.long).view(n, 1))
    if n < len(chosen):
        starts, before = torch.tensor([0, *accumulate(sizes[n:])]) + n, torch.tensor([done[i] for i in chosen[n:]])
        steps.prompts = prompts_of(sizes[n:], before.tolist(), n, starts, before, rows[chosen[n:]])
    return steps


@pytest.mark.parametrize("long", [4, 1024])
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
@torch.no_grad()
def test_ragged_batches_equal_single_sequences(
    name: str, options: dict[str, Any], long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`long`: prompts of so many tokens have calls of their own."""
    monkeypatch.setattr(batches, "LONG", long)
    monkeypatch.setattr(batches, "FRESH", 5 * long)
    mixer, chance = make(name, options), random.Random(5)
    layout, lengths = StateLayout(example_state(mixer, torch.float64)), [1, 2, 9, 30, 30, 5, 1, 17]
    sequences = [tokens(T) for T in lengths]
    angles = torch.randn(max(lengths), SITE.key_dim // 2, dtype=torch.float64) if mixer.drop_rope else None

    def turned(places: Tensor) -> Any:
        return None if angles is None else rotation_by(angles[places])

    expected = [
        mixer(*(y[None] for y in sequence), TokenLayout(rotation=turned(torch.arange(len(sequence[0])))))[0][0]
        for sequence in sequences
    ]
    memory, rows = nan_pool(len(lengths) + 3, layout), torch.randperm(len(lengths) + 3)[: len(lengths)]
    untouched = sorted({*range(len(memory))} - {*rows.tolist()})
    pool, done = Pool.of(layout, memory), [0] * len(lengths)
    got: list[list[Tensor]] = [[] for _ in lengths]
    while any(length > n for length, n in zip(lengths, done, strict=True)):
        chosen = [i for i, length in enumerate(lengths) if done[i] < length and chance.random() < 0.7]
        sizes = {i: min(chance.choice((1, 1, 4, 13)), lengths[i] - done[i]) for i in chosen}
        chosen.sort(key=lambda i: sizes[i] > 1)
        own = [sizes[i] for i in chosen]
        if not chosen:
            continue
        memory[[int(rows[i]) for i in chosen if done[i] == 0 and sizes[i] == 1]] = 0
        places = torch.cat([torch.arange(done[i], done[i] + sizes[i]) for i in chosen])
        parts = [[y[done[i] : done[i] + sizes[i]] for y in sequences[i]] for i in chosen]
        given = [torch.cat(pieces)[None] for pieces in zip(*parts, strict=True)]
        told = TokenLayout(rotation=turned(places), plain=True)
        inputs, beside = mixer.prepare(*given, told)
        outputs = [y.fill_(torch.nan) for y in mixer.empty_outputs(inputs, given[2])]
        run(mixer, TokenLayout, pool, described(rows, chosen, own, done), inputs, outputs)
        o = mixer.complete(tuple(outputs), beside, told)[0]
        for i, part in zip(chosen, o.split(own), strict=True):
            got[i].append(part)
            done[i] += sizes[i]
    for ours, reference in zip(got, expected, strict=True):
        assert relative_error(torch.cat(ours), reference) <= LIMIT
    assert bool((memory[untouched] == 255).all())


def test_a_long_prompt_has_a_call_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LONG", 10)
    assert grouped([3, 4, 12, 5, 5, 30, 40, 2], [0] * 8) == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 7), (7, 8)]
    starts, before, rows = torch.tensor([7, 10, 14, 26]), torch.tensor([0, 5, 0]), torch.tensor([4, 2, 9])
    first, second = prompts_of([3, 4, 12], [0, 5, 0], 7, starts, before, rows)
    assert (first.first, first.tokens, first.rows.tolist(), first.starts.tolist()) == (7, 7, [4, 2], [0, 3, 7])
    assert (second.first, second.tokens, second.rows.tolist(), second.starts.tolist()) == (14, 12, [9], [0, 12])
    assert [first.fresh, second.fresh] == [False, True]


def test_many_prompts_that_begin_are_read_apart_from_those_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "FRESH", 10)
    assert grouped([3, 4, 5, 6], [9, 0, 0, 0]) == [(0, 1), (1, 4)]
    assert grouped([3, 4, 5, 6], [0, 9, 0, 0]) == [(0, 2), (2, 4)]
    assert grouped([3, 4, 5], [9, 0, 0]) == [(0, 3)]
    assert grouped([3, 4, 5, 6], [9, 0, 0, 1]) == [(0, 4)]
    starts, rows = torch.tensor([0, 3, 7, 13]), torch.tensor([4, 2, 9])
    first, second = prompts_of([3, 4, 6], [9, 0, 0], 0, starts, torch.tensor([9, 0, 0]), rows)
    assert (first.fresh, first.begun, second.fresh, second.begun) == (False, None, True, None)


@torch.no_grad()
def test_a_rehearsal_runs_batches_of_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = make("gdn", {"window": 4})
    given = [y[None] for y in tokens(40)]
    inputs, _ = mixer.prepare(*given, TokenLayout(plain=True))
    seen: list[tuple[int, ...]] = []
    plain = mixer.core

    def noted(inputs: Any, layout: Any, state: Any) -> Any:
        prompts = None if layout.cu_seqlens is None else layout.cu_seqlens.diff().tolist()
        seen.append((len(layout.rows) if prompts is None else 0, len(prompts or ()), state is None))
        return plain(inputs, layout, state)

    monkeypatch.setattr(mixer, "core", noted)
    layout = StateLayout(example_state(mixer, torch.float64))
    rehearse(mixer, TokenLayout, layout, inputs, mixer.empty_outputs(inputs, given[2]))
    assert {(1, 0, False), (3, 0, False), (0, 1, True), (0, 1, False), (0, 2, True), (0, 2, False)} <= {*seen}


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("gdn", {"window": 4, "output_gate": True}, 3),
        ("gla", {"window": 4}, 1),
        ("sla", {"base": "gdn", "norm": "none"}, 4),
        ("sla", {"base": "gla", "gate_input": "qk", "window": 2}, 1),
        ("gsa", {"window": 4}, 1),
    ],
)
@torch.no_grad()
def test_small_maps_are_one_product(name: str, options: dict[str, Any], parts: int) -> None:
    mixer, owner = make(name, options), nn.Module()
    for part in mixer.parameters():
        part += 0.1 * torch.randn_like(part)
    given, told = [y[None] for y in tokens(9)], TokenLayout(plain=True)
    expected = mixer(*given, TokenLayout())[0]
    found = merged(owner, mixer)
    assert found is not None
    owner.made = nn.functional.linear(given[3], *found)
    assert sum(isinstance(part, Part) for part in mixer.modules()) == parts
    inputs, beside = mixer.prepare(*given, told)
    outputs, _ = mixer.core(inputs, TokenLayout(), None)
    assert relative_error(mixer.complete(outputs, beside, told), expected) <= LIMIT


def test_one_map_alone_stays() -> None:
    assert merged(nn.Module(), make("retnet", {})) is None


@pytest.mark.slow
def test_a_rehearsal_compiles_all_that_batches_need() -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (root, root / "tests", root / "tests" / "kernels")))
    command = [sys.executable, str(root / "tests" / "serve" / "rehearsed.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-3000:]
