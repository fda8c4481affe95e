"""Small maps of hidden states as one product: what a mixer computes stays, and biases in float32 keep their digits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from linearize.plan.mechanisms import load_mechanism, resolve_options
from linearize.serve.merge import Part, merged
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite

SITE = AttentionSite(0, "", "", 32, 4, 2, 8, 8, 8**-0.5, True)


@pytest.mark.parametrize("mechanism", ["gdn", "gsa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_maps_compute_the_same(mechanism: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mixer = load_mechanism(mechanism)(SITE, **resolve_options(mechanism, {"window": "4"} | {"rope": "true"}))
    mixer.reset_parameters()
    mixer.to(dtype)
    for name in mixer.fp32_names():
        parameter = mixer.get_parameter(name)
        parameter.data = parameter.data.float() + 7.6
    q, k, v = (torch.randn(1, 6, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    x = torch.randn(1, 6, 32, dtype=dtype)
    owner = nn.Module()
    with torch.no_grad():
        expected = mixer(q, k, v, x, TokenLayout())[0]
        made = merged(owner, mixer)
        assert made is not None
        weight, bias = made
        owner.made = nn.functional.linear(x, weight, bias)
        found = mixer(q, k, v, x, TokenLayout())[0]
    assert any(isinstance(part, Part) and part.linear is not None for part in mixer.modules())
    assert torch.allclose(found, expected, atol=1e-6 if dtype == torch.float32 else 1e-2)
