"""States of many sequences in one block of memory: ragged batches, in any cut, give what single sequences give."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from typing import Any

import torch
from conftest import TOLERANCE
from torch import Tensor

from linearize.plan.mechanisms import build_mixer, load_mechanism, mechanism_names, resolve_options
from linearize.serve.states import (
    ALIGNMENT,
    StateLayout,
    example_state,
    shared_memory,
    state_layouts,
    store,
)
from linearize_kernels.layers.rotary import Rotation
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite, Mixer

SITE = AttentionSite(0, "a", "self", 12, 4, 2, 8, 6, 8**-0.5, causal=True)
CAUSAL = [name for name in mechanism_names() if load_mechanism(name).causal]
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in CAUSAL]
CASES += [("gla", {"window": 4, "sink": 2}), ("gdn", {"faithful": True}), ("sla", {"base": "gdn", "window": 3})]
CASES += [("window", {"window": 4, "sink": 0, "sink_logit": True})]
CASES += [("mhla", {"faithful": True}), ("gsa", {"decay": "none", "slots": 5}), ("gsa", {"read": "relu", "slots": 5})]
# gdn makes its features in float32, whatever the dtype.
LIMIT = TOLERANCE[torch.float32]


def make(name: str, options: dict[str, Any]) -> Mixer:
    torch.manual_seed(0)
    mixer = build_mixer(name, SITE, resolve_options(name, options))
    mixer.reset_parameters()
    return mixer.double().eval()


def tokens(T: int) -> list[Tensor]:
    """q, k, v and hidden states of one sequence, [T,..]."""
    shapes = (SITE.heads, SITE.key_dim), (SITE.kv_heads, SITE.key_dim), (SITE.kv_heads, SITE.value_dim), (SITE.hidden,)
    return [torch.randn(T, *shape, dtype=torch.float64) for shape in shapes]


def nan_pool(rows: int, layout: StateLayout) -> Tensor:
    """Memory whose bytes are NaN in every float dtype: what nobody wrote, and what another request left."""
    return torch.full((rows, layout.bytes), 255, dtype=torch.uint8)


def rotation_by(angles: Tensor) -> Rotation:
    """[T,R/2] as an attention module is given it."""
    return Rotation(angles.cos()[None], angles.sin()[None])


def test_a_state_is_read_back_as_it_was_written() -> None:
    mixer = make("gdn", {"taps": 4, "window": 4, "sink": 1})
    layout = StateLayout(example_state(mixer, torch.float64))
    assert all(part.start % ALIGNMENT == 0 for part in layout.parts)
    assert layout.bytes % ALIGNMENT == 0
    _, state = mixer(*(torch.stack([y, y + 1, y * 2]) for y in tokens(7)), TokenLayout())
    pool, rows = nan_pool(6, layout), torch.tensor([4, 0, 3])
    store(layout.views(pool), rows, state)
    read = layout.views(pool[rows])
    assert type(read) is type(state)
    assert torch.equal(read.near.held, state.near.held)
    assert torch.equal(read.near.keys, state.near.keys)
    assert torch.equal(read.far.memory, state.far.memory)
    assert bool((pool[[1, 2, 5]] == 255).all())


def test_tensors_without_elements_take_no_room_and_come_back() -> None:
    mixer = make("gdn", {})
    state = example_state(mixer, torch.float64)
    empty = [tensor for tensor in state if not tensor.numel()]
    layout = StateLayout(state)
    assert empty
    assert len(layout.parts) == len(state) - len(empty)
    read = layout.views(nan_pool(3, layout))
    assert [part.shape[0] for part in read] == [3] * len(state)


def test_equal_layers_share_a_layout_and_others_have_their_own() -> None:
    site = {**SITE.__dict__}
    layers = [
        {"site": {**site, "layer": 0, "path": "a.0"}, "mechanism": "gsa", "options": {"slots": 8}},
        {"site": {**site, "layer": 2, "path": "a.2"}, "mechanism": "gsa", "options": {"slots": 8}},
        {"site": {**site, "layer": 3, "path": "a.3"}, "mechanism": "gla", "options": {"window": 4}},
    ]
    mechanisms = {name: load_mechanism(name) for name in ("gsa", "gla")}
    layouts = state_layouts(mechanisms, {"layers": layers}, torch.bfloat16)
    assert sorted(layouts) == [0, 2, 3]
    assert layouts[0] is layouts[2]
    ring = [part for part in layouts[3].parts if part.dtype is torch.bfloat16]
    assert [part.shape for part in ring] == [(4, 2, 8), (4, 2, 6)]


def test_the_state_of_a_layer_is_that_of_the_heads_without_softmax() -> None:
    """vLLM holds the keys and values of the others in memory of its own."""
    mechanisms = {"gla": load_mechanism("gla")}
    whole = {**SITE.__dict__, "heads": 6, "kv_heads": 3}

    def layout(**site: Any) -> StateLayout:
        layer = {"site": {**whole, **site}, "mechanism": "gla", "options": {"window": 4}}
        return state_layouts(mechanisms, {"layers": [layer]}, torch.float32)[0]

    kept = layout(softmax_groups=(1,))
    assert kept.parts == layout(heads=4, kv_heads=2).parts
    assert kept.bytes < layout().bytes


def test_layers_share_as_many_memories_as_layers_keep_softmax() -> None:
    """vLLM manages memories for every sequence in every step, as many at a time as there are kept layers."""
    state = namedtuple("state", "bytes")
    layouts: Any = {number: state(16 * (number + 1)) for number in (0, 2, 3, 4, 6, 7)}
    places, size = shared_memory(layouts, 2)
    assert places == {0: (0, 0), 2: (2, 0), 3: (0, 16), 4: (2, 48), 6: (0, 80), 7: (2, 128)}
    assert size == max(16 + 64 + 112, 48 + 80 + 128)
    for number, place in places.items():
        assert place.begin + layouts[number].bytes <= size
    # None keeps softmax, or more do than are linear: a memory for each.
    for kept in (0, 6, 9):
        assert shared_memory(layouts, kept) == ({number: (number, 0) for number in layouts}, 128)


FORKED = """
import os, sys, torch
from linearize_kernels.mixer import AttentionSite
from linearize.plan.mechanisms import load_mechanism
from linearize.serve.states import state_layouts

site = AttentionSite(0, "a", "self", 1024, 16, 16, 64, 64, 0.125, causal=True).__dict__
layer = {"site": site, "mechanism": "gla", "options": {}}
state_layouts({"gla": load_mechanism("gla")}, {"layers": [layer]}, torch.float32)
if (child := os.fork()) == 0:
    torch.zeros(1000, 1000).cos()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_server_can_fork_behind_the_layouts() -> None:
    """A child of a process that has OpenMP's threads would wait for them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60, env=environment)
