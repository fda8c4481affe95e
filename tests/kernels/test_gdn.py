"""Gated DeltaNet against its definition, and what a delta rule must do."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, every_pair, relative_error
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize_kernels.gdn.gdn import DeltaState, gdn, naive_gdn
from linearize_kernels.layers.constant import ones_direction
from linearize_kernels.layers.conv import short_conv
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite

EXACT = TOLERANCE[torch.float64]


def inputs(T: int, H: int = 4, Hkv: int = 1, E: int = 2, D: int = 8, Dv: int = 6, gate: float = 1.0) -> list[Tensor]:
    """Unit q and k, v, g, beta, both gates and a state, in float64."""
    q, k = (normalize(torch.randn(2, T, heads, D, dtype=torch.float64), dim=-1) for heads in (H, Hkv))
    v, g = torch.randn(2, T, Hkv, Dv, dtype=torch.float64), torch.randn(2, T, E, dtype=torch.float64)
    beta, read, write = (torch.rand(2, T, heads, dtype=torch.float64) for heads in (E, H, E))
    beta[:, ::7] = 0.0
    return [q, k, v, gate * logsigmoid(g), beta, read, write, torch.randn(2, E, D, Dv, dtype=torch.float64)]


@pytest.mark.parametrize(
    ("T", "padded", "packed", "gate"),
    every_pair([1, 2, 31, 32, 33, 100], [False, True], [False, True], [0.0, 1.0, 8.0]),
)
def test_it_is_its_definition_with_all_gradients(T: int, padded: bool, packed: bool, gate: float) -> None:
    leaves = [y.requires_grad_() for y in inputs(T, gate=gate)]
    *rows, read, write, S = leaves
    masks = {
        "padding": torch.rand(2, T) > 0.3 if padded else None,
        "segments": (torch.rand(2, T) < 0.05).long().cumsum(1) if packed else None,
    }
    results = []
    for op, options in ((gdn, {"chunk_size": 32}), (naive_gdn, {})):
        o, (last,) = op(*rows, scale=0.7, read_gate=read, write_gate=write, state=DeltaState(S), **masks, **options)
        torch.manual_seed(1)
        loss = (o * torch.randn_like(o)).sum() + (last * torch.randn_like(last)).sum()
        results.append((o, last, *torch.autograd.grad(loss, leaves, materialize_grads=True)))
    ours, exact = results
    assert all(relative_error(x, y) < 1e-9 or float(y.abs().max()) < 1e-9 for x, y in zip(ours, exact, strict=True))


def test_weak_gates_after_strong_ones_keep_their_digits() -> None:
    rows = inputs(64)[:5]
    rows[3] = torch.full_like(rows[3], -1e-3)
    rows[3][:, :20] = -1000.0
    single = [y.float() for y in rows]
    o, _ = gdn(*single)
    assert relative_error(o, naive_gdn(*rows)[0]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("cuts", [(0, 40, 40, 41, 100), (0, 100)])
def test_sequences_end_to_end_are_sequences_apart(cuts: tuple[int, ...]) -> None:
    rows = [y[:1] for y in inputs(100)[:7]]
    S = torch.randn(len(cuts) - 1, 2, 8, 6, dtype=torch.float64)
    gates = {"read_gate": rows.pop(5), "write_gate": rows.pop(5)}
    cu = torch.tensor(cuts, dtype=torch.int32)
    o, (last,) = gdn(*rows, **gates, cu_seqlens=cu, state=DeltaState(S))
    for n, (start, end) in enumerate(pairwise(cuts)):
        own = {name: y[:, start:end] for name, y in gates.items()}
        alone, (after,) = naive_gdn(*(y[:, start:end] for y in rows), **own, state=DeltaState(S[n : n + 1]))
        assert relative_error(o[:, start:end], alone) < EXACT
        assert relative_error(last[n : n + 1], after) < EXACT
    assert torch.equal(gdn(*rows, cu_seqlens=cu)[0][:, :40], gdn(*(y[:, :40] for y in rows))[0])


def test_what_was_written_with_full_strength_is_read_back() -> None:
    """beta = 1, no decay: the value last written under a unit key replaces what was there."""
    _, k, v, g, beta, *_ = inputs(50, H=1, E=1)
    o, _ = gdn(k, k, v, 0 * g, torch.ones_like(beta), scale=1.0)
    assert relative_error(o, v) < EXACT
    same = k[:, :1].expand_as(k)
    o, (S,) = gdn(same, same, v, 0 * g, torch.ones_like(beta), scale=1.0)
    assert relative_error(o, v) < EXACT
    assert torch.linalg.matrix_rank(S[0, 0], rtol=1e-9) == 1


def test_neutral_gates_leave_the_state_alone() -> None:
    q, k, v, g, beta, *_, S = inputs(50)
    o, (last,) = gdn(q, k, v, 0 * g, 0 * beta, scale=1.0, state=DeltaState(S))
    assert torch.equal(last, S)
    assert relative_error(o.unflatten(2, (2, 2)), torch.einsum("btegd,bedv->btegv", q.unflatten(2, (2, 2)), S)) < EXACT


def test_equal_keys_do_not_blow_up_in_fp32() -> None:
    """Powers of the matrix that is inverted would reach 1e18 here."""
    q, k, v, g, beta, *_ = inputs(64)
    k = k[:, :1].expand_as(k).contiguous()
    rows = [q, k, v, 0 * g, torch.ones_like(beta)]
    o, _ = gdn(*(y.float() for y in rows))
    assert relative_error(o, naive_gdn(*rows)[0]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 9, 1, 7)}, r"equal.*dim"),
        ({"g": (2, 9, 3), "beta": (2, 9, 3)}, r"heads.*query.*heads"),
        ({"beta": (2, 9, 4)}, r"\[B,T,E\].*2.*9.*4.*E=2"),
        ({"read_gate": (2, 9, 2)}, r"read_gate.*\[B,T,H\]"),
        ({"padding": (2, 8)}, r"padding.*\[B,T\]"),
        ({"cu_seqlens": (2,)}, "cu_seqlens needs B=1"),
    ],
)
def test_shapes_that_do_not_fit_are_told(change: dict[str, tuple[int, ...]], message: str) -> None:
    given: dict[str, Any] = dict(zip(("q", "k", "v", "g", "beta"), inputs(9), strict=False))
    given |= {name: torch.zeros(shape) for name, shape in change.items()}
    with pytest.raises(ValueError, match=message):
        gdn(**given)
    if "cu_seqlens" not in change:
        with pytest.raises(ValueError, match="cannot run here"):
            gdn(*inputs(9)[:5], backend="triton")


# ---------------------------------------------------------------- the convolution


def convolved(y: Tensor, taps: Tensor) -> Tensor:
    """One document [T,heads,Y], by definition."""
    K = taps.shape[-1]
    padded = torch.cat([y.new_zeros(K - 1, *y.shape[1:]), y])
    return sum((padded[i : i + len(y)] * taps[..., i] for i in range(K)), torch.zeros_like(y))


@pytest.mark.parametrize("K", [2, 4])
def test_the_convolution_sees_real_tokens_of_one_document(K: int) -> None:
    y, taps = torch.randn(2, 20, 3, 5, dtype=torch.float64), torch.randn(3, 5, K, dtype=torch.float64)
    padding = torch.rand(2, 20) > 0.3
    segments = (torch.arange(20) // 7).expand(2, -1)
    out, tail = short_conv(y, taps, None, padding, segments)
    for row in range(2):
        for document in range(3):
            own = (segments[row] == document) & padding[row]
            assert relative_error(out[row, own], convolved(y[row, own], taps)) < EXACT
        last = torch.cat([torch.zeros(K - 1, 3, 5, dtype=torch.float64), y[row, own]])[-(K - 1) :]
        assert torch.equal(tail[row], last)


def test_the_tail_carries_the_convolution_on() -> None:
    y, taps = torch.randn(2, 20, 3, 5, dtype=torch.float64), torch.randn(3, 5, 4, dtype=torch.float64)
    whole, last = short_conv(y, taps, None, None, None)
    pieces, tail = [], None
    for part in y.split([1, 2, 9, 1, 7], 1):
        out, tail = short_conv(part, taps, tail, None, None)
        pieces.append(out)
    assert relative_error(torch.cat(pieces, 1), whole) < EXACT
    assert tail is not None
    assert torch.equal(tail, last)
    kept = short_conv(y[:, :5], taps, tail, torch.zeros(2, 5, dtype=torch.bool), None)[1]
    assert torch.equal(kept, tail)
    # A document that begins leaves the tail behind.
    fresh = short_conv(y, taps, tail, None, (torch.arange(20) > 0).long().expand(2, -1))[0]
    assert relative_error(fresh[:, 1:], short_conv(y[:, 1:], taps, None, None, None)[0]) < EXACT


def test_the_tail_is_that_of_the_last_document_and_goes_to_the_first() -> None:
    """Also where padding is all that the one has begun with, or the other ends with."""
    y, taps = torch.randn(1, 12, 3, 5, dtype=torch.float64), torch.randn(3, 5, 4, dtype=torch.float64)
    segments, padding = (torch.arange(12) // 4)[None], torch.ones(1, 12, dtype=torch.bool)
    padding[0, [4, 7]] = False
    cuts, tail, outputs = (slice(0, 5), slice(5, 7), slice(7, 12)), None, []
    for cut in cuts:
        out, tail = short_conv(y[:, cut], taps, tail, padding[:, cut], segments[:, cut])
        outputs.append(out)
    whole, last = short_conv(y, taps, None, padding, segments)
    assert relative_error(torch.cat(outputs, 1)[padding], whole[padding]) < EXACT
    assert tail is not None
    assert torch.equal(tail, last)


# ---------------------------------------------------------------- the mixer


def test_a_mixer_starts_with_the_half_lives_and_strength_asked_for() -> None:
    site = AttentionSite(0, "a", "self", 24, 6, 3, 8, 8, 8**-0.5, causal=True)
    options = {"half_life_min": 10.0, "half_life_max": 1000.0, "write": 0.2, "gate_std": 0.0}
    mixer: Any = build_mixer("gdn", site, resolve_options("gdn", options))
    mixer.reset_parameters()
    g, beta = mixer.gates(torch.randn(1, 2, 24))
    assert relative_error(torch.log(torch.tensor(0.5)) / g[0, 1], torch.tensor([10.0, 100.0, 1000.0])) < 1e-4
    strong: Any = build_mixer("gdn", site, resolve_options("gdn", options | {"half_life_min": 1e-4}))
    strong.reset_parameters()
    found = torch.log(torch.tensor(0.5)) / strong.gates(torch.randn(1, 2, 24))[0][0, 1, 0]
    assert relative_error(found, torch.tensor(1e-4)) < 1e-4
    assert relative_error(beta, torch.full_like(beta, 0.2)) < 1e-6


def test_uniform_gates_of_one_change_nothing() -> None:
    site = AttentionSite(0, "a", "self", 24, 4, 2, 8, 6, 8**-0.5, causal=True)
    mixer: Any = build_mixer("gdn", site, resolve_options("gdn", {"taps": 4}))
    mixer.reset_parameters()
    rows = [torch.randn(2, 30, heads, dim) for heads, dim in ((4, 8), (2, 8), (2, 6))]
    inputs = (*rows, torch.randn(2, 30, 24), TokenLayout())
    plain, state = mixer(*inputs)
    gated, same = mixer.mix(*inputs, None, torch.ones(2, 30, 4), torch.ones(2, 30, 2))
    assert torch.equal(plain, gated)
    assert all(torch.equal(a, b) for a, b in zip(state, same, strict=True))
    halved, _ = mixer.mix(*inputs, None, torch.full((2, 30, 4), 0.5))
    assert relative_error(halved, plain / 2) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"half_life_min": 9.0, "half_life_max": 8.0}, r">=.*half_life_min=9"),
        ({"chunk_size": 48}, r"must.*power"),
        ({"window": 8, "rope": False}, r"rotary.*embedding"),
        ({"native": True, "window": 8}, r"window=8.*native=true.*window=0"),
        ({"native": True, "rope": True, "norm": "none"}, r"rope=True.*norm=none.*native=true.*rope=False"),
        ({"native": True, "taps": 5}, r"taps=5.*native=true.*taps=4"),
        ({"memories": 2, "norm": "none"}, r"memories=2.*norm.*set norm=head"),
        ({"maps": True}, r"maps=true.*native.*set native=true"),
    ],
)
def test_options_that_do_not_fit_are_told(options: dict[str, Any], message: str) -> None:
    site = AttentionSite(0, "a", "self", 24, 4, 2, 8, 6, 8**-0.5, causal=True)
    with pytest.raises(Exception, match=message):
        build_mixer("gdn", site, resolve_options("gdn", options))


def test_calibration_finds_half_lives_and_strengths() -> None:
    site = AttentionSite(0, "a", "self", 24, 4, 2, 8, 6, 8**-0.5, causal=True)
    m = build_mixer("gdn", site, resolve_options("gdn", {}))
    m.reset_parameters()
    inputs = [torch.randn(2, 60, *shape) for shape in ((4, 8), (2, 8), (2, 6), (24,))]
    teacher = copy.deepcopy(m)
    with torch.no_grad():
        teacher.start_from("half_life", [2.0, 128.0])
        teacher.start_from("write", [0.8, 0.1])
        target, before = teacher(*inputs, TokenLayout())[0], m(*inputs, TokenLayout())[0]
        m.calibrate(*inputs, before, 3 * target, TokenLayout())
        errors = [relative_error(y, 3 * target) for y in (m(*inputs, TokenLayout())[0], 3 * before)]
    assert errors[0] < 0.3 * errors[1]
    g, beta = m.gates(inputs[3])
    assert g[..., 0].mean() < 10 * g[..., 1].mean() < 0
    assert beta[..., 0].mean() > 2 * beta[..., 1].mean()


@torch.no_grad()
@pytest.mark.parametrize("size", [1.0, 0.02])
def test_native_is_the_layer_of_qwen3_5(size: float) -> None:
    """transformers' class, whose projections make q, k and v; also where values are so small that eps counts."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    H, D, Dv = 4, 8, 6
    config = Qwen3_5TextConfig(
        hidden_size=24, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=H,
        linear_num_value_heads=H, linear_key_head_dim=D, linear_value_head_dim=Dv,
    )  # fmt: skip
    site = AttentionSite(0, "a", "self", 24, H, H, D, Dv, D**-0.5, causal=True)
    mixer: Any = build_mixer("gdn", site, resolve_options("gdn", {"native": True}))
    mixer.reset_parameters()
    layer = Qwen3_5GatedDeltaNet(config, 0).eval()
    for parameter in (*layer.parameters(), *mixer.parameters()):
        torch.nn.init.normal_(parameter, 0.0, 0.4)
    sizes = {"query": H * D, "key": H * D, "value": H * Dv}
    rows = dict(zip(sizes, layer.in_proj_qkv.weight.split([*sizes.values()]), strict=True))
    rows["value"].mul_(size)
    for role, taps in zip(sizes, layer.conv1d.weight.split([*sizes.values()]), strict=True):
        getattr(mixer, f"{role}_taps").copy_(taps.view(H, -1, 4))
    mixer.output_gate.weight.copy_(layer.in_proj_z.weight)
    mixer.strength.weight.copy_(layer.in_proj_b.weight)
    mixer.decay.weight.copy_(layer.in_proj_a.weight)
    mixer.decay.bias.copy_(layer.dt_bias)
    mixer.A_log.copy_(layer.A_log)
    mixer.norm.weight.copy_(layer.norm.weight.expand(H, Dv))
    x = torch.randn(2, 40, 24)
    q, k, v = ((x @ rows[role].T).unflatten(-1, (H, -1)) for role in sizes)
    expected = layer(x)
    assert relative_error(layer.out_proj(mixer(q, k, v, x, TokenLayout())[0].flatten(2)), expected) < 1e-5
    mixer.native = False  # lengths and outputs without what the layer adds and multiplies
    assert relative_error(layer.out_proj(mixer(q, k, v, x, TokenLayout())[0].flatten(2)), expected) > 1e-5


@torch.no_grad()
def test_native_calibrates_gates_without_a_bias() -> None:
    """By the direction that all hidden states share."""
    site = AttentionSite(0, "a", "self", 24, 4, 2, 8, 6, 8**-0.5, causal=True)
    m: Any = build_mixer("gdn", site, resolve_options("gdn", {"native": True}))
    m.reset_parameters()
    inputs = [torch.randn(2, 60, *shape) for shape in ((4, 8), (2, 8), (2, 6), (24,))]
    inputs[3] = 0.1 * inputs[3] + torch.randn(24)
    teacher = copy.deepcopy(m)
    teacher.calibrate(*inputs, *2 * [m(*inputs, TokenLayout())[0]], TokenLayout())
    teacher.ones = ones_direction(inputs[3])
    teacher.start_from("half_life", [2.0, 2.0, 128.0, 128.0])
    teacher.start_from("write", [0.8, 0.8, 0.1, 0.1])
    target = 3 * teacher(*inputs, TokenLayout())[0]
    m.calibrate(*inputs, m(*inputs, TokenLayout())[0], target, TokenLayout())
    assert relative_error(m(*inputs, TokenLayout())[0], target) < 0.3
    beta = m.gates(inputs[3])[1]
    assert beta[..., 0].mean() > 2 * beta[..., 3].mean()
    assert float((torch.nn.functional.silu(m.output_gate(inputs[3])) - 1.0).abs().mean()) < 0.2
