"""Decode steps whose states are rows of a pool, changed in place, as a server keeps them: every mechanism, in PyTorch
and by the Triton kernels in the interpreter."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import relative_error
from torch import Tensor
from triton_tools import compile_kernel, interpreted

from linearize.plan.mechanisms import build_mixer, load_mechanism, mechanism_names, resolve_options
from linearize.serve.states import StateLayout, store, tensors_of
from linearize_kernels.hf.cache import map_state
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite, Mixer

SITE = AttentionSite(0, "a", "self", 24, 4, 2, 8, 8, 8**-0.5, causal=True)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gsa": ("gsa", {"slots": 20}),
    "gsa as published": ("gsa", {"faithful": True, "slots": 16}),
    "gsa, writes of ABC": ("gsa", {"decay": "none", "slots": 16}),
    "gsa read by swish": ("gsa", {"read": "swish", "slots": 16}),
    "gsa read by swish, window": ("gsa", {"read": "swish", "slots": 16, "window": 5}),
    "gla": ("gla", {}),
    "gla, window": ("gla", {"window": 5, "sink": 2, "state_heads": "query"}),
    "gsa, window of several tiles": ("gsa", {"slots": 16, "window": 70, "sink": 9}),
    "window": ("window", {"window": 5, "sink": 2}),
    "window, sinks": ("window", {"window": 5, "sink": 0, "sink_logit": True}),
    "retnet": ("retnet", {}),
    "retnet, features of both signs": ("retnet", {"feature_map": "hedgehog", "state_heads": "query"}),
    "gdn": ("gdn", {}),
    "gdn as published": ("gdn", {"faithful": True}),
    "gdn with two memories": ("gdn", {"native": True, "memories": 2, "maps": True}),
    "mamba2": ("mamba2", {}),
    "mamba2 with two memories": ("mamba2", {"memories": 2, "maps": True}),
    "sla over gla": ("sla", {"norm": "none"}),
    "sla over retnet": ("sla", {"base": "retnet", "norm": "none"}),
    "sla over gdn": ("sla", {"base": "gdn", "norm": "none"}),
    "sla over gdn with two memories": ("sla", {"base": "gdn", "memories": 2, "taps": 2, "window": 5}),
    "la": ("la", {}),
    "la, hedgehog": ("la", {"feature_map": "hedgehog", "window": 4}),
    "mhla": ("mhla", {"block_size": 16, "blocks": 4}),
    "mhla, no normaliser": ("mhla", {"block_size": 16, "blocks": 3, "normalise": False}),
    "mhla, copied": ("mhla", {"block_size": 16, "blocks": 3}),
    "mhla as published": ("mhla", {"faithful": True, "block_size": 16, "blocks": 2}),
}
# Tokens that the pool's rows hold before, by row; steps then complete a block of 16 in some and not in others.
HELD = {5: 15, 1: 30, 3: 17, 4: 47}
ROWS = 7
# The rows of a call: two of them are padding; rows 0, 2, 3 and 6 are named by none.
NAMED = (4, -1, 5, 1, -1)
STEPS = 3


def mixer_of(case: str) -> Mixer:
    name, options = CASES[case]
    torch.manual_seed(0)
    mixer = build_mixer(name, SITE, resolve_options(name, options))
    mixer.reset_parameters()
    if case.endswith("copied"):
        vars(mixer)["pools"] = False
    for part in mixer.parameters():  # zeros and ones hide what goes lost
        part.data += 0.05 * torch.randn_like(part)
    return mixer


def inputs(B: int, T: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v in a dtype, hidden states."""
    heads = (SITE.heads, SITE.key_dim), (SITE.kv_heads, SITE.key_dim), (SITE.kv_heads, SITE.value_dim)
    return *(torch.randn(B, T, *shape).to(dtype) for shape in heads), torch.randn(B, T, SITE.hidden)


@torch.no_grad()
def before(mixer: Mixer) -> dict[int, Any]:
    """The state of each row that holds one."""
    torch.manual_seed(1)
    return {row: mixer(*inputs(1, held), TokenLayout())[1] for row, held in HELD.items()}


def pool_of(states: dict[int, Any]) -> tuple[StateLayout, Tensor]:
    """A server's memory, with NaN wherever nothing is held."""
    layout = StateLayout(next(iter(states.values())))
    pool = torch.full((ROWS, layout.bytes), 255, dtype=torch.uint8)
    for row, state in states.items():
        store(layout.views(pool), torch.tensor([row]), state)
    return layout, pool


@torch.no_grad()
def in_pool(case: str, named: Tensor, dtype: torch.dtype, layout: StateLayout, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [B,STEPS,H,Dv] of steps in a copy of a pool, and its bytes after them."""
    mixer, pool = mixer_of(case), pool.clone()
    torch.manual_seed(2)
    outputs = []
    for _ in range(STEPS):
        state = layout.views(pool)
        o, after = mixer(*inputs(len(named), 1, dtype), TokenLayout(rows=named), state)
        assert [x.data_ptr() for x in tensors_of(after)] == [x.data_ptr() for x in tensors_of(state)]
        outputs.append(o)
    return torch.cat(outputs, 1), pool


@torch.no_grad()
def served(
    case: str, named: Tensor, dtype: torch.dtype, layout: StateLayout, pool: Tensor
) -> tuple[Tensor, Tensor, int]:
    """The same as a server makes its steps, which knows places and gives room for results; and how many it copied."""
    mixer, pool = mixer_of(case), pool.clone()
    torch.manual_seed(2)
    outputs, copied, made, core = [], 0, [], mixer.core

    def noted(*given: Any) -> Any:
        found, state = core(*given)
        made.append(found)
        return found, state

    vars(mixer)["core"] = noted
    places = torch.tensor([[HELD.get(row, 0)] for row in named.tolist()])
    for n in range(STEPS):
        q, k, v, x = inputs(len(named), 1, dtype)
        given, beside = mixer.prepare(q, k, v, x, TokenLayout(plain=True))
        own = mixer.empty_outputs(given, v)
        mixer.core_into(own, given, TokenLayout(rows=named, places=places + n), layout.views(pool))
        copied += sum(y.data_ptr() != out.data_ptr() for y, out in zip(made.pop(), own, strict=True))
        outputs.append(mixer.complete(own, beside, TokenLayout(plain=True)))
    return torch.cat(outputs, 1), pool, copied


@torch.no_grad()
def apart(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same, each row with a state of its own."""
    mixer = mixer_of(case)
    states = before(mixer)
    torch.manual_seed(2)
    outputs = []
    for _ in range(STEPS):
        given, row_outputs = inputs(len(NAMED), 1, dtype), []
        for i, row in enumerate(NAMED):
            one = tuple(x[i : i + 1] for x in given)
            o = torch.zeros(1, 1, SITE.heads, SITE.value_dim, dtype=dtype)
            if row >= 0:
                o, states[row] = mixer(*one, TokenLayout(), states[row])
            row_outputs.append(o)
        outputs.append(torch.cat(row_outputs))
    return torch.cat(outputs, 1), pool_of(states)[1]


def test_every_causal_mechanism_is_here() -> None:
    assert {name for name, _ in CASES.values()} == {n for n in mechanism_names() if load_mechanism(n).causal}


@pytest.mark.parametrize("run", ["PyTorch", "kernels", "server"])
@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_pool_step_as_states_of_their_own(case: str, run: str) -> None:
    layout, untouched = pool_of(before(mixer_of(case)))
    # The kernels of linear/ take half precision alone, unless told otherwise.
    half = (run != "PyTorch" and CASES[case][0] in ("retnet", "la")) or case == "sla over retnet"
    dtype, most = (torch.float16, 2e-3) if half else (torch.float32, 2e-5)
    if run == "PyTorch":
        o, pool = in_pool(case, torch.tensor(NAMED), dtype, layout, untouched)
    elif run == "kernels":
        o, pool = interpreted(in_pool, case, torch.tensor(NAMED).int(), dtype, layout, untouched)
    else:
        o, pool, copied = interpreted(served, case, torch.tensor(NAMED).int(), dtype, layout, untouched)
        assert copied == 0 or CASES[case][0] not in ("gsa", "gdn", "gla") or "swish" in case
        o = o * (torch.tensor(NAMED) >= 0)[:, None, None, None]
    expected, expected_pool = apart(case, dtype)
    real = [row >= 0 for row in NAMED]
    assert torch.equal(o[[not x for x in real]].flatten(), expected[[not x for x in real]].flatten())
    assert relative_error(o[real], expected[real]) < most
    rows = torch.tensor([row for row in NAMED if row >= 0])
    read = [list(tensors_of(layout.views(memory[rows]))) for memory in (pool, expected_pool)]
    for ours, theirs in zip(*read, strict=True):
        assert relative_error(ours, theirs) < most
        assert ours.dtype.is_floating_point or torch.equal(ours, theirs)
    # What no row names stays as it was, bit by bit; most of it is NaN.
    others = [row for row in range(ROWS) if row not in NAMED]
    assert torch.equal(pool[others], untouched[others])


@torch.no_grad()
def prompts(case: str, seen: bool) -> tuple[float, float, int]:
    """How far prompts laid end to end are from single ones where a server gives room for results: outputs and states;
    and how many results were copied."""
    mixer, lengths = mixer_of(case), (3, 9, 5)
    starts, state = torch.tensor([0, 3, 12, 17], dtype=torch.int32), None
    torch.manual_seed(1)
    held = [mixer(*inputs(1, n), TokenLayout())[1] if seen else None for n in (2, 7, 30)]
    if seen:
        layout, memory = pool_of(dict(enumerate(held)))
        state = layout.views(memory[:3])
    given = inputs(1, 17)
    parts, beside = mixer.prepare(*given, TokenLayout(plain=True))
    own = mixer.empty_outputs(parts, given[2])
    copies, copy = [], Tensor.copy_
    with mock.patch.object(Tensor, "copy_", lambda *y: copies.append(1) or copy(*y)):
        after = mixer.core_into(own, parts, TokenLayout(cu_seqlens=starts), state)
    o, alone = mixer.complete(own, beside, TokenLayout(plain=True)), []
    for one, before_it in zip(zip(*(y.split(lengths, 1) for y in given), strict=True), held, strict=True):
        alone.append(mixer(*one, TokenLayout(), before_it))
    wanted = [torch.cat(y) for y in zip(*(tensors_of(after) for _, after in alone), strict=True)]
    pairs = zip(tensors_of(after), wanted, strict=True)
    return (
        relative_error(o, torch.cat([y for y, _ in alone], 1)),
        max(relative_error(ours, theirs) for ours, theirs in pairs if ours.numel()),
        len(copies),
    )


@pytest.mark.parametrize(("case", "copied"), [("gla, window", 0), ("gsa read by swish, window", 1)])
@pytest.mark.parametrize("seen", [False, True])
def test_prompts_are_written_where_a_server_wants_them(case: str, copied: int, seen: bool) -> None:
    """Rows with a ring before them are longer, and their two results are copied."""
    of_outputs, of_states, copies = interpreted(prompts, case, seen)
    assert (of_outputs < 2e-5, of_states < 2e-5, copies) == (True, True, copied + 2 * seen)


@pytest.mark.parametrize("run", ["PyTorch", "kernels"])
def test_a_call_of_padding_alone_changes_nothing(run: str) -> None:
    for case in CASES:
        given = case, torch.tensor([-1, -1]), torch.float16, *pool_of(before(mixer_of(case)))
        o, pool = in_pool(*given) if run == "PyTorch" else interpreted(in_pool, *given)
        assert not o.any(), case
        assert torch.equal(pool, given[-1]), case


def test_rows_that_fit_no_pool_are_refused() -> None:
    mixer = mixer_of("gla")
    given, state = inputs(2, 1), mixer(*inputs(4, 3), TokenLayout())[1]
    with pytest.raises(ValueError, match=r"pass.*state"):
        mixer(*given, TokenLayout(rows=torch.tensor([0, 1])), None)
    with pytest.raises(ValueError, match="cu_seqlens"):
        mixer(*given, TokenLayout(segments=torch.zeros(2, 1, dtype=torch.long), rows=torch.tensor([0, 1])), state)
    with pytest.raises(ValueError, match=r"\[2\].*integers.*\(3,\)"):
        mixer(*given, TokenLayout(rows=torch.tensor([0, 1, 2])), state)


def test_rows_beside_heads_that_keep_softmax_are_refused() -> None:
    """Their keys grow with the text, and a row of a pool has one size."""
    mixer = build_mixer("gla", dataclasses.replace(SITE, softmax_groups=(1,)), resolve_options("gla", {}))
    mixer.reset_parameters()
    given, state = inputs(2, 1), mixer(*inputs(4, 3), TokenLayout())[1]
    with pytest.raises(ValueError, match=r"a.*softmax"):
        mixer(*given, TokenLayout(rows=torch.tensor([0, 1])), state)


def test_rows_whose_numbers_are_not_dense_are_refused_by_the_kernels() -> None:
    with pytest.raises(ValueError, match=r"states.*dense"):
        interpreted(step_in_a_turned_pool)


@torch.no_grad()
def step_in_a_turned_pool() -> None:
    mixer = mixer_of("gla")
    state = map_state(lambda x: x.mT.contiguous().mT, mixer(*inputs(4, 3), TokenLayout())[1])
    mixer(*inputs(2, 1), TokenLayout(rows=torch.tensor([0, 1])), state)


# ---------------------------------------------------------------- compiled for real, without a GPU

# File, kernel, warps, and constants at heads of 128.
HEAD: dict[str, Any] = {"D": 128, "DV": 128, "BD": 128, "PADDED": True, "READ": False, "WRITE": False}
NORM: dict[str, Any] = {**HEAD, "NORM": True, "UNIT": True, "DECAY": False, "GUARD": 1e-6}
BLOCKS: dict[str, Any] = {**HEAD, "M": 32, "F": 256, "NORM": True, "EDGE": True, "START": 0, "END": 128}
RING: dict[str, Any] = {**HEAD, "BV": 128, "BG": 16, "BN": 64, "POOL": True, "LOG2E": 1.4427, "LOWEST": -1e30}
KERNELS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("gsa.forward", "step_kernel", 2, {**HEAD, "M": 128, "BM": 128, "BX": 32, "BG": 16, "PREC": "tf32"}),
    ("gla.forward", "gla_step_kernel", 2, {**HEAD, "G": 4, "BV": 16, "p_rq": None, "p_rk": None, "p_real": None}),
    ("gdn.forward", "step_kernel", 4, {**HEAD, "BV": 32, "p_read": None, "p_write": None}),
    ("linear.states", "step_kernel", 4, {**NORM, "BZ": 32, "G": 4}),
    ("linear.states", "sums_kernel", 1, NORM),
    ("mhla.forward", "step_kernel", 4, {**BLOCKS, "BF": 64, "BY": 32, "BG": 16, "PREC": "bf16x3"}),
    ("window.step", "step_kernel", 4, {**RING, "FAR": True, "SUM": False, "PREC": "bf16x3"}),
    ("window.step", "count_kernel", 1, {"PADDED": True}),
]


@pytest.mark.parametrize(("file", "name", "warps", "constants"), KERNELS, ids=lambda x: x if isinstance(x, str) else "")
def test_steps_compile(file: str, name: str, warps: int, constants: dict[str, Any]) -> None:
    kernel = getattr(importlib.import_module(f"linearize_kernels.{file}"), name)
    kinds = {"p_rows": "*i32", "p_seen": "*i64", "p_seen1": "*i64", "p_n": "*i64", "p_n1": "*i64", "scale": "fp32"}
    kinds |= {"p_tokens": "*i64", "p_tokens1": "*i64", "p_real": "*u8", "p_padding": "*i1"}
    kinds |= {"p_held": "*i64", "p_held1": "*i64"}
    rings = ("p_keys", "p_keys1", "p_values", "p_values1")
    kinds |= dict.fromkeys(("p_q", "p_k", "p_v", "p_o", *rings), "*bf16")
    assert compile_kernel(kernel, 90, constants, kinds, warps).metadata.shared <= 48 * 1024
