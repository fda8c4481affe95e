"""Heads that keep softmax beside every mechanism: against softmax and the mechanism alone, in every kind of call."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, relative_error
from torch import Tensor

from linearize.errors import LinearizeError
from linearize.plan.mechanisms import build_mixer, load_mechanism, mechanism_names, resolve_options
from linearize_kernels.hf.cache import map_state
from linearize_kernels.layers.softmax_heads import ScoreOptions, softmax_heads
from linearize_kernels.layout import TokenLayout, part_of
from linearize_kernels.mixer import AttentionSite, Mixer

T = 40
GROUPS = (1, 3)
SHARED = AttentionSite(0, "a", "self", 24, 8, 4, 8, 6, 0.3, causal=True, softmax_groups=GROUPS)
ALONE = dataclasses.replace(SHARED, heads=4)  # a KV head for each head
CASES = [
    (name, site, near)
    for name in mechanism_names()
    if load_mechanism(name).causal and not load_mechanism(name).unrotated
    for site, near in ((SHARED, {}), (ALONE, {"window": 7, "sink": 2}))
]
every_case = pytest.mark.parametrize(("name", "site", "near"), CASES)

Inputs = tuple[Tensor, ...]


def make(name: str, site: AttentionSite = SHARED, near: dict[str, int] | None = None) -> Mixer:
    torch.manual_seed(0)
    small = {"slots": 8} if name == "gsa" else {}
    mixer: Mixer = build_mixer(name, site, resolve_options(name, {**small, **(near or {})}))
    mixer.reset_parameters()
    return mixer


def tokens(site: AttentionSite, length: int = T, B: int = 2) -> Inputs:
    """q, k, v and hidden states."""
    torch.manual_seed(1)
    heads = ((site.heads, site.key_dim), (site.kv_heads, site.key_dim), (site.kv_heads, site.value_dim))
    return (*(torch.randn(B, length, *shape) for shape in heads), torch.randn(B, length, site.hidden))


def cut(inputs: Inputs, start: int | None, stop: int | None) -> Inputs:
    return tuple(y[:, start:stop] for y in inputs)


def same(ours: Tensor, reference: Tensor) -> bool:
    return relative_error(ours.detach(), reference.detach()) <= TOLERANCE[torch.float32]


def brute_force(q: Tensor, k: Tensor, v: Tensor, scale: float, scores: ScoreOptions | None = None) -> Tensor:
    """Softmax token by token and head by head, as the formula says: q [B,T,H,D] -> [B,T,H,Dv]."""
    scores = scores or ScoreOptions()
    B, length, H, _ = q.shape
    o = torch.zeros(B, length, H, v.shape[-1], dtype=q.dtype)
    for h in range(H):
        group = h // (H // k.shape[2])
        for t in range(length):
            first = 0 if scores.window is None else max(0, t - scores.window + 1)
            s = scale * torch.einsum("bd,bsd->bs", q[:, t, h], k[:, first : t + 1, group])
            if scores.cap is not None:
                s = scores.cap * torch.tanh(s / scores.cap)
            if scores.sinks is not None:
                s = torch.cat([s, scores.sinks[h].expand(B, 1)], 1)
            weights = s.softmax(-1)[:, : t + 1 - first]
            o[:, t, h] = torch.einsum("bs,bsd->bd", weights, v[:, first : t + 1, group])
    return o


def heads_of(site: AttentionSite, keep: bool) -> list[int]:
    """The query heads that keep softmax, or the others."""
    size = site.heads // site.kv_heads
    return [head for head in range(site.heads) if (head // size in GROUPS) == keep]


@every_case
def test_each_head_is_softmax_or_the_mechanism(name: str, site: AttentionSite, near: dict[str, int]) -> None:
    mixer, (q, k, v, x) = make(name, site, near), tokens(site)
    o, state = mixer(q, k, v, x, TokenLayout())
    assert o.shape == (2, T, site.heads, site.value_dim)
    exact = brute_force(*(y.double() for y in (q, k, v)), site.scale)
    kept, others = heads_of(site, True), heads_of(site, False)
    assert same(o[:, :, kept], exact[:, :, kept])
    groups = [group for group in range(site.kv_heads) if group not in GROUPS]
    alone = make(name, site.linear_part(), near | _rotated(name))
    alone.load_state_dict(mixer.state_dict())
    assert same(o[:, :, others], alone(q[:, :, others], k[:, :, groups], v[:, :, groups], x, TokenLayout())[0])
    parts: list[Tensor] = []
    map_state(lambda part: parts.append(part) or part, state)
    one_row = sum(part[:1].numel() * part.element_size() for part in parts)
    assert one_row == mixer.state_bytes(T) == alone.state_bytes(T) + T * len(GROUPS) * 14 * 4


def _rotated(name: str) -> dict[str, Any]:
    """With the rotary embedding in front, as this mechanism says it, if it has the option."""
    rope = resolve_options(name, {}).get("rope")
    return {} if rope is None else {"rope": True if isinstance(rope, bool) else "before"}


@every_case
def test_steps_chunks_padding_and_documents_are_one_pass(name: str, site: AttentionSite, near: dict[str, int]) -> None:
    mixer, inputs = make(name, site, near), tokens(site)
    whole, last = mixer(*inputs, TokenLayout())
    outputs, state = [], None
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 30), (30, T)):
        o, state = mixer(*cut(inputs, start, stop), TokenLayout(), state)
        outputs.append(o)
    assert same(torch.cat(outputs, 1), whole)
    padding = torch.arange(T).expand(2, T) >= torch.tensor([[0], [11]])
    padded, after = mixer(*inputs, TokenLayout(padding))
    assert same(padded[:1], whole[:1])
    assert same(padded[1:, 11:], mixer(*(y[1:, 11:] for y in inputs), TokenLayout())[0])
    assert not padded[~padding].any()
    step = tokens(site, 1)
    rows = torch.tensor([1, 0])
    swapped = map_state(lambda part: part[rows], after)
    for told in (None, torch.ones(2, 1, dtype=torch.bool)):
        o, _ = mixer(*step, TokenLayout(told), after)
        assert same(o[:1], mixer(*step, TokenLayout(), last)[0][:1])
        turned, _ = mixer(*(y[rows] for y in step), TokenLayout(told), swapped)
        assert same(turned, o[rows])
    documents = torch.tensor([0] * 13 + [1] * 20 + [2] * 7).expand(2, T)
    packed, state = mixer(*inputs, TokenLayout(segments=documents))
    parts = [cut(inputs, start, stop) for start, stop in ((0, 13), (13, 33), (33, T))]
    alone = [mixer(*part, TokenLayout()) for part in parts]
    assert same(packed, torch.cat([o for o, _ in alone], 1))
    assert same(mixer(*step, TokenLayout(), state)[0], mixer(*step, TokenLayout(), alone[-1][1])[0])
    # A state belongs to the first document of what follows.
    following = TokenLayout(segments=documents[:, 5:20])
    o, _ = mixer(*cut(inputs, 0, 15), following, last)
    assert same(o[:, :8], mixer(*cut(inputs, 0, 8), TokenLayout(), last)[0])
    assert same(o[:, 8:], mixer(*cut(inputs, 8, 15), TokenLayout())[0])


@every_case
def test_gradients_reach_everything_and_calibration_sees_its_own_heads(
    name: str, site: AttentionSite, near: dict[str, int]
) -> None:
    mixer, inputs = make(name, site, near), tokens(site, 70, 1)  # two blocks of MHLA
    if mixer.near is not None:
        torch.nn.init.normal_(mixer.near.far_gate)
    target = brute_force(*inputs[:3], site.scale)
    mixer.calibrate_all(*inputs, mixer(*inputs, TokenLayout())[0].detach(), target, TokenLayout())
    leaves = {**dict(zip("qkvx", inputs, strict=True)), **dict(mixer.named_parameters())}
    for leaf in leaves.values():
        leaf.requires_grad_()
    o, _ = mixer(*inputs, TokenLayout())
    gradients = torch.autograd.grad((o * torch.randn_like(o)).sum(), leaves.values(), allow_unused=True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert (leaf == "x" and gradient is None) or (gradient.isfinite().all() and gradient.any()), leaf
    moved = copy.deepcopy(mixer)(*inputs, TokenLayout())[0]
    assert same(moved, o)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_heads_keep_the_dtype_of_activations(dtype: torch.dtype) -> None:
    mixer, inputs = make("gla"), tokens(SHARED)
    exact, _ = mixer(*inputs, TokenLayout())
    o, state = mixer.to(dtype)(*(y.to(dtype) for y in inputs), TokenLayout())
    assert (o.dtype, state.softmax.keys.dtype) == (dtype, dtype)
    assert relative_error(o.detach(), exact.detach()) <= 3 * max(TOLERANCE[dtype], TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "scores",
    [
        ScoreOptions(window=6),
        ScoreOptions(window=1),
        ScoreOptions(cap=0.7),
        ScoreOptions(sinks=torch.linspace(-1, 2, 8)),
        ScoreOptions(window=5, cap=0.7, sinks=torch.linspace(-1, 2, 8)),
    ],
    ids=["window", "window of one", "cap", "sinks", "all"],
)
def test_what_the_source_does_to_its_scores_is_done(scores: ScoreOptions) -> None:
    mixer, inputs = make("la"), tokens(SHARED)
    kept = heads_of(SHARED, True)
    q, k, v = (y.double() for y in inputs[:3])
    exact = brute_force(q, k, v, SHARED.scale, scores)[:, :, kept]
    layout = TokenLayout(scores=scores)
    assert same(mixer(*inputs, layout)[0][:, :, kept], exact)
    state, outputs = None, []
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 30), (30, T)):
        o, state = mixer(*cut(inputs, start, stop), part_of(layout, start, stop), state)
        outputs.append(o)
    assert same(torch.cat(outputs, 1)[:, :, kept], exact)
    if scores.window is not None:
        assert state.softmax.keys.shape[1] == scores.window - 1
    padding = torch.arange(T).expand(2, T) >= 11
    padded = mixer(*inputs, layout._replace(padding=padding))[0][:, 11:, kept]
    assert same(padded, brute_force(q[:, 11:], k[:, 11:], v[:, 11:], SHARED.scale, scores)[:, :, kept])


def test_the_plain_form_is_softmax() -> None:
    q, k, v, _ = tokens(SHARED)
    o, state = softmax_heads(q, k, v, 0.2, ScoreOptions())
    assert same(o, brute_force(q, k, v, 0.2))
    assert state.real is None


@pytest.mark.parametrize(
    ("name", "changes", "options", "message"),
    [
        (
            "gsa",
            {"softmax_groups": (0, 1, 2, 3)},
            {},
            r"\[0.*1.*2.*3\].*4.*others",
        ),
        ("gsa", {"softmax_groups": (4,)}, {}, r"heads.*\[4\].*4"),
        ("mhla", {"causal": False}, {}, r"bidirectional.*softmax"),
        ("gsa", {}, {"rope": False}, "rope=true"),
        ("gla", {}, {"rope": "after"}, "set rope=before"),
    ],
)
def test_what_cannot_be_is_refused(name: str, changes: Any, options: Any, message: str) -> None:
    site = dataclasses.replace(SHARED, **changes)
    with pytest.raises(LinearizeError, match=message):
        build_mixer(name, site, resolve_options(name, options))


def test_a_call_to_both_sides_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bidirectional.*attention"):
        make("mhla")(*tokens(SHARED), TokenLayout(causal=False))
