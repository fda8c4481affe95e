"""Several memories of a head, and maps of q and k for each in the layers that engines know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TOLERANCE, relative_error
from torch import Tensor

from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite

SITE = AttentionSite(0, "a", "self", 24, 6, 3, 8, 4, 8**-0.5, causal=True)
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", {}),
    "native gdn": ("gdn", {"native": True}),
    "gdn": ("gdn", {"feature_map": "hedgehog", "state_heads": "query", "taps": 3}),
    "gdn, heads share": ("gdn", {}),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def mixer_with(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    mechanism, own = LAYERS[name]
    mixer: Any = build_mixer(mechanism, SITE, resolve_options(mechanism, {**own, **options}))
    mixer.reset_parameters()
    return mixer


def rows() -> list[Tensor]:
    """q, k, v and hidden states."""
    torch.manual_seed(2)
    heads = ((SITE.heads, SITE.key_dim), (SITE.kv_heads, SITE.key_dim), (SITE.kv_heads, SITE.value_dim))
    return [torch.randn(2, 60, *width) for width in (*heads, (SITE.hidden,))]


def outputs(mixer: Any, *inputs: Tensor) -> Tensor:
    return mixer(*inputs, TokenLayout())[0]


@every_layer
@torch.no_grad()
def test_two_memories_of_a_head_are_two_layers_that_add_up(name: str) -> None:
    both, alone = mixer_with(name, memories=2), [mixer_with(name), mixer_with(name)]
    for parameter in both.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    for key, parameter in both.named_parameters():
        for mixer, part in zip(alone, parameter.chunk(2), strict=True):
            mixer.get_parameter(key).copy_(part)
    o = sum(outputs(mixer, *rows()) for mixer in alone)
    assert relative_error(outputs(both, *rows()), o) < 10 * TOLERANCE[torch.float32]
    assert both.state_bytes(9) == 2 * alone[0].state_bytes(9)


@pytest.mark.parametrize("name", [name for name, (_, own) in LAYERS.items() if name == "mamba2" or own.get("native")])
@torch.no_grad()
def test_maps_are_the_identity_at_first_and_linear(name: str) -> None:
    mapped, plain = mixer_with(name, maps=True), mixer_with(name)
    for key, parameter in plain.named_parameters():
        parameter.copy_(mapped.get_parameter(key))
    q, k, *rest = rows()
    assert torch.equal(outputs(mapped, q, k, *rest), outputs(plain, q, k, *rest))
    for weight in (mapped.query_map, mapped.key_map):
        torch.nn.init.normal_(weight)
    turned = [
        torch.einsum("bthd,hed->bthe", y, torch.eye(8) + 8**-0.5 * weight)
        for y, weight in ((q, mapped.query_map), (k, mapped.key_map))
    ]
    o = outputs(plain, *turned, *rest)
    assert relative_error(outputs(mapped, q, k, *rest), o) < 10 * TOLERANCE[torch.float32]


@every_layer
@torch.no_grad()
def test_the_second_memory_is_fitted_to_what_the_first_leaves(name: str) -> None:
    alone, both = mixer_with(name), mixer_with(name, memories=2)
    published = mixer_with(name, memories=2, half_life_min=0.0)
    inputs, teachers = rows(), [mixer_with(name), mixer_with(name)]
    inputs[3] = inputs[3] * 0.1 + torch.randn(24)  # hidden states behind a norm have a direction that is always there
    for teacher, half_life in zip(teachers, (1.0, 512.0), strict=True):
        teacher.calibrate(*inputs, *2 * [outputs(teacher, *inputs)], TokenLayout())
        teacher.start_from("half_life", [half_life] * teacher.state_count)
    target, errors = sum(outputs(teacher, *inputs) for teacher in teachers), []
    for mixer in (alone, both):
        mixer.calibrate(*inputs, target, target, TokenLayout())
        errors.append(float((outputs(mixer, *inputs) - target).square().mean()))
    assert errors[1] < 0.9 * errors[0]
    published.calibrate(*inputs, target, target, TokenLayout())
    size = outputs(published, *inputs).square().mean() / target.square().mean()
    assert 0.3 < float(size) < 3.0


@pytest.mark.parametrize("mechanism", ["gdn", "sla"])
@torch.no_grad()
def test_two_memories_beside_a_window_start_nearer_to_softmax(mechanism: str) -> None:
    base = {"base": "gdn"} if mechanism == "sla" else {}
    torch.manual_seed(0)
    mixer: Any = build_mixer(mechanism, SITE, resolve_options(mechanism, {**base, "memories": 2, "window": 8}))
    mixer.reset_parameters()
    q, k, v, x = rows()
    keys, values = (y.repeat_interleave(2, 2).transpose(1, 2) for y in (k, v))
    softmax = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True)
    target, errors = softmax.transpose(1, 2), []
    for _ in range(2):
        o = outputs(mixer, q, k, v, x)
        errors.append(float((o - target).square().mean()))
        mixer.calibrate_all(q, k, v, x, o, target, TokenLayout())
    assert errors[1] < 0.7 * errors[0]
