"""Mamba-2: the operator beside its equations, the layer beside transformers' own, and where a conversion starts."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, relative_error
from torch import Tensor
from triton_tools import interpreted

from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mamba2.mamba2 import mamba2, naive_mamba2
from linearize_kernels.mixer import AttentionSite

EXACT = TOLERANCE[torch.float64]
SITE = AttentionSite(0, "a", "self", 24, 6, 3, 8, 4, 8**-0.5, causal=True)
SHAPES = [(1, 1, 2, 2, 4, 4), (2, 70, 4, 2, 8, 6), (1, 130, 3, 1, 16, 8)]


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """q, k, v, g, step and skip."""
    B, T, H, Hkv, D, Dv = shape
    torch.manual_seed(0)
    q, k, v = torch.randn(B, T, H, D), torch.randn(B, T, Hkv, D), torch.randn(B, T, Hkv, Dv)
    step = torch.nn.functional.softplus(torch.randn(B, T, H) - 1.0)
    rate = torch.linspace(0.1, 4.0, H)
    return tuple(y.to(dtype) for y in (q, k, v, -rate * step, step, torch.randn(H)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "padding", "segments"])
def test_it_computes_its_equations_and_their_gradients(shape: tuple[int, ...], layout: str) -> None:
    inputs, (B, T) = made(shape), shape[:2]
    places: dict[str, Any] = {}
    if layout == "padding":
        places["padding"] = torch.arange(T) >= torch.tensor([T // 3, 0])[:B, None]
    if layout == "segments":
        places["segments"] = (torch.arange(T) // 27).expand(B, -1)
    results = []
    for run in (mamba2, naive_mamba2):
        leaves = [y.clone().requires_grad_() for y in inputs]
        o, (S,) = run(*leaves, **places)
        torch.manual_seed(1)
        loss = (o * torch.randn(o.shape)).sum() + (S * torch.randn(S.shape)).sum()
        results.append([o, S, *torch.autograd.grad(loss, leaves)])
    for a, b in zip(*results, strict=True):  # the gate of a single token has no gradient
        assert float((a - b).detach().abs().max()) < EXACT * float(b.detach().abs().max().clamp_min(1.0))


def test_a_prompt_and_steps_and_sequences_laid_end_to_end_are_one_pass() -> None:
    inputs = made((1, 40, 4, 2, 8, 6))
    whole, last = mamba2(*inputs)
    state, parts = None, []
    for cut in (slice(0, 20), *(slice(t, t + 1) for t in range(20, 40))):
        o, state = mamba2(*(y[:, cut] for y in inputs[:5]), inputs[5], state=state)
        parts.append(o)
    assert state is not None
    assert relative_error(torch.cat(parts, 1), whole) < EXACT
    assert relative_error(state.memory, last.memory) < EXACT
    cu = torch.tensor([0, 13, 40], dtype=torch.int32)
    o, (S,) = mamba2(*inputs, cu_seqlens=cu)
    alone = [mamba2(*(y[:, a:b] for y in inputs[:5]), inputs[5]) for a, b in ((0, 13), (13, 40))]
    assert relative_error(o, torch.cat([part for part, _ in alone], 1)) < EXACT
    assert relative_error(S, torch.cat([found.memory for _, found in alone])) < EXACT


def in_kernels(T: int) -> float:
    """The largest error of GLA's kernels here beside the reference: outputs, the state and all gradients."""
    inputs, results = made((1, T, 2, 1, 16, 16), torch.float32), []
    for run, form in ((mamba2, {"backend": "triton"}), (naive_mamba2, {})):
        leaves = [y.clone().requires_grad_() for y in inputs]
        o, (S,) = run(*leaves, **form)  # type: ignore[operator]
        torch.manual_seed(1)
        gradients = torch.autograd.grad((o * torch.randn(o.shape)).sum() + S.sum(), leaves)
        results.append([o.detach(), S.detach(), *gradients])
    return max(relative_error(a, b) for a, b in zip(*results, strict=True))


def test_the_kernels_compute_the_same() -> None:
    assert interpreted(in_kernels, 37) < 5 * TOLERANCE[torch.float32]


def test_shapes_that_do_not_fit_are_told() -> None:
    *inputs, skip = made((2, 5, 4, 2, 8, 6))
    with pytest.raises(ValueError, match="skip must be"):
        mamba2(*inputs, skip[:3])
    with pytest.raises(ValueError, match="step must be"):
        mamba2(*inputs[:4], inputs[4][:, :, :2], skip)


# ---------------------------------------------------------------- the mixer


def mixer_with(**options: Any) -> Any:
    torch.manual_seed(0)
    mixer: Any = build_mixer("mamba2", SITE, resolve_options("mamba2", options))
    mixer.reset_parameters()
    return mixer


@torch.no_grad()
def test_it_is_the_layer_of_granite() -> None:
    """transformers' class, whose projections make q, k and v, with a group of its norm for each head."""
    from transformers import GraniteMoeHybridConfig
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

    site = dataclasses.replace(SITE, kv_heads=6, value_dim=4)
    H, D, Dv = site.heads, site.key_dim, site.value_dim
    config = GraniteMoeHybridConfig(
        hidden_size=24, mamba_n_heads=H, mamba_n_groups=H, mamba_d_head=Dv, mamba_d_state=D, mamba_expand=1,
        num_hidden_layers=1, rms_norm_eps=1e-5, layer_types=["linear_attention"],
    )  # fmt: skip
    mixer: Any = build_mixer("mamba2", site, resolve_options("mamba2", {}))
    mixer.reset_parameters()
    layer = GraniteMoeHybridMambaLayer(config, 0).eval()
    for parameter in (*layer.parameters(), *mixer.parameters()):
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    rows = layer.in_proj.weight.split([H * Dv, H * Dv, H * D, H * (D + 1)])
    parts = {"value": rows[1], "key": rows[2], "query": rows[3][: H * D]}
    mixer.output_gate.weight.copy_(rows[0])
    mixer.step.weight.copy_(rows[3][H * D :])
    mixer.step.bias.copy_(layer.dt_bias)
    mixer.A_log.copy_(layer.A_log)
    mixer.skip.copy_(layer.D)
    mixer.norm.weight.copy_(layer.norm.weight.view(H, Dv))
    sizes = [H * Dv, H * D, H * D]
    for role, taps, bias in zip(parts, layer.conv1d.weight.split(sizes), layer.conv1d.bias.split(sizes), strict=True):
        getattr(mixer, f"{role}_taps").copy_(taps.view(H, -1, 4))
        getattr(mixer, f"{role}_bias").copy_(bias.view(H, -1))
    x = torch.randn(2, 30, 24)
    q, k, v = ((x @ parts[role].T).unflatten(-1, (H, -1)) for role in ("query", "key", "value"))
    ours = layer.out_proj(mixer(q, k, v, x, TokenLayout())[0].flatten(2))
    assert relative_error(ours, layer(x)) < 10 * TOLERANCE[torch.float32]
    together = layer.norm
    together.group_size = H * Dv  # what MLX computes
    assert relative_error(ours, layer(x)) > 0.05


def test_it_starts_with_the_half_lives_asked_for_and_keeps_its_eps() -> None:
    mixer = mixer_with(half_life_min=10.0, half_life_max=1000.0, gate_std=0.0, eps=1e-3)
    (_, _, _, g, step), _ = mixer.project(*rows_of(mixer), TokenLayout())
    lives = torch.logspace(1.0, 3.0, 6)
    assert relative_error(torch.log(torch.tensor(0.5)) / g[0, 1], lives) < 1e-4
    assert relative_error(step[0, 1], -g[0, 1]) < 1e-5
    assert mixer.norm.eps == 1e-3


def rows_of(mixer: Any) -> list[Tensor]:
    site = mixer.site
    torch.manual_seed(2)
    heads = ((site.heads, site.key_dim), (site.kv_heads, site.key_dim), (site.kv_heads, site.value_dim))
    return [torch.randn(2, 60, *width) for width in (*heads, (site.hidden,))]


@torch.no_grad()
def test_calibration_finds_half_lives_and_opens_the_gate() -> None:
    mixer, constant = mixer_with(), torch.randn(24)
    inputs = rows_of(mixer)
    inputs[3] = inputs[3] * 0.1 + constant  # hidden states behind a norm have a direction that is always there
    teacher = copy.deepcopy(mixer)
    teacher.calibrate(*inputs, *2 * [mixer(*inputs, TokenLayout())[0]], TokenLayout())
    teacher.start_from("half_life", [2.0, 2.0, 2.0, 128.0, 128.0, 128.0])
    teacher.start_from("skip", [0.3] * 6)
    before, target = mixer(*inputs, TokenLayout())[0], 3 * teacher(*inputs, TokenLayout())[0]
    mixer.calibrate(*inputs, before, target, TokenLayout())
    errors = [relative_error(y, target) for y in (mixer(*inputs, TokenLayout())[0], 3 * before)]
    assert errors[0] < 0.3 * errors[1]
    gate = torch.nn.functional.silu(mixer.output_gate(inputs[3]))
    assert float((gate - 1.0).abs().mean()) < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"half_life_min": 9.0, "half_life_max": 8.0}, r">=.*half_life_min=9"),
        ({"chunk_size": 48}, r"must.*power"),
        ({"window": 8}, "no such option"),
    ],
)
def test_options_that_do_not_fit_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        mixer_with(**options)
