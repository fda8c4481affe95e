"""SAGA: the operator against the paper's equations, its convolution, and how close a conversion starts."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, relative_error
from torch import Tensor

from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize_kernels.layers.depthwise import depthwise
from linearize_kernels.layers.features import Features
from linearize_kernels.layout import Grid, TokenLayout
from linearize_kernels.linear.linear import linear_attention_bidirectional
from linearize_kernels.mixer import AttentionSite
from linearize_kernels.saga.saga import naive_saga, saga

F64 = TOLERANCE[torch.float64]
SITE = AttentionSite(0, "a", "self", 24, 4, 2, 8, 6, 8**-0.5, causal=False, grid="patches")


def inputs(T: int = 12, B: int = 2, H: int = 4, E: int = 2, width: int = 5, Dv: int = 6) -> dict[str, Tensor]:
    """Arguments of the operator in float64; q and k are positive, so that weights are."""
    torch.manual_seed(1)
    wide = {"q": (H, width), "k": (E, width), "v": (E, Dv), "key_gate": (E, width), "value_gate": (E, Dv)}
    wide |= {"output_gate": (H, Dv), "local": (E, Dv)}
    made = {name: torch.randn(B, T, *size, dtype=torch.float64) for name, size in wide.items()}
    return made | {"q": made["q"].abs(), "k": made["k"].abs(), "norm_weight": torch.rand(H, Dv, dtype=torch.float64)}


def masks(T: int = 12) -> dict[str, dict[str, Tensor]]:
    """Padding on each side, and documents whose tokens do not lie side by side."""
    padding = torch.ones(2, T, dtype=torch.bool)
    padding[0, :3], padding[1, -5:] = False, False
    segments = torch.tensor([[0, 1, 2] * (T // 3), [5] * T])
    both = {"padding": padding, "segments": segments}
    return {"none": {}, "padding": {"padding": padding}, "segments": {"segments": segments}, "both": both}


@pytest.mark.parametrize("norm", ["none", "mass", "count", "head"])
@pytest.mark.parametrize("layout", masks())
def test_the_operator_is_equation_5(norm: Any, layout: str) -> None:
    given, where = inputs(), masks()[layout]
    for tensor in given.values():
        tensor.requires_grad_()
    used = {name: tensor for name, tensor in given.items() if name != "norm_weight" or norm == "head"}
    ours, literal = (op(**given, norm=norm, **where) for op in (saga, naive_saga))
    assert relative_error(ours, literal) < F64
    weights = torch.randn_like(literal)
    gradients = [torch.autograd.grad((o * weights).sum(), used.values()) for o in (ours, literal)]
    for name, mine, reference in zip(used, *gradients, strict=True):
        assert relative_error(mine, reference) < F64, name


def test_a_closed_gate_is_a_token_that_is_not_there() -> None:
    given = inputs() | {"local": None}
    closed = given | {"key_gate": given["key_gate"].index_fill(1, torch.tensor([4]), -1e4)}
    kept = [t for t in range(12) if t != 4]
    without = {name: value[:, kept] for name, value in given.items() if name not in ("local", "norm_weight")}
    for norm in ("none", "mass"):
        assert relative_error(saga(**closed, norm=norm)[:, kept], saga(**without, norm=norm)) < F64


def test_open_gates_are_linear_attention() -> None:
    given = inputs() | {"local": None}
    given |= {name: torch.full_like(given[name], 1e4) for name in ("key_gate", "value_gate")}
    given["output_gate"] = torch.ones_like(given["output_gate"])
    plain = linear_attention_bidirectional(given["q"], given["k"], given["v"], None, 64)
    assert relative_error(saga(**given), plain) < F64


@pytest.mark.parametrize("name", ["k", "v", "key_gate", "value_gate", "output_gate"])
def test_shapes_that_do_not_fit_are_told(name: str) -> None:
    given = inputs()
    with pytest.raises(ValueError, match=f"{'must be'}.*found"):
        saga(**given | {name: given[name][..., :-1] if name != "v" else given[name][:, :-1]})
    with pytest.raises(ValueError, match="key heads must divide query heads"):
        saga(**inputs(H=3))


# ---------------------------------------------------------------- the convolution


def convolved(v: Tensor, weight: Tensor, size: tuple[int, int], segments: Tensor | None) -> Tensor:
    """DWC on a grid without prefix, place by place: v [B,h*w,E,Dv], weight [E,Dv,K,K]."""
    (h, w), K = size, weight.shape[-1]
    o = torch.zeros_like(v)
    for b, y, x, i, j in itertools.product(range(len(v)), range(h), range(w), range(K), range(K)):
        row, column = y + i - (K - 1) // 2, x + j - (K - 1) // 2
        inside = 0 <= row < h and 0 <= column < w
        if inside and (segments is None or segments[b, row * w + column] == segments[b, y * w + x]):
            o[b, y * w + x] += weight[..., i, j] * v[b, row * w + column]
    return o


@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("K", [1, 3, 4, 5])
def test_the_convolution_is_over_the_grid_and_stays_in_its_region(K: int, regions: bool) -> None:
    torch.manual_seed(2)
    v, weight = torch.randn(2, 12, 2, 3, dtype=torch.float64), torch.randn(2, 3, K, K, dtype=torch.float64)
    segments = torch.tensor([[0, 0, 1, 1] * 3, [0] * 4 + [1] * 8]) if regions else None
    ours = depthwise(v, weight, Grid((3, 4)), segments=segments)
    assert relative_error(ours, convolved(v, weight, (3, 4), segments)) < F64


def test_tokens_without_a_place_take_no_part_in_the_convolution() -> None:
    torch.manual_seed(2)
    v, weight = torch.randn(2, 15, 2, 3), torch.randn(2, 3, 3, 3)
    grid = Grid((3, 4), prefix=2, suffix=1)
    assert grid.tokens == 15
    o = depthwise(v, weight, grid)
    assert torch.equal(o[:, 2:14], depthwise(v[:, 2:14], weight, Grid((3, 4))))
    assert not o[:, [0, 1, 14]].any()


def test_a_film_is_convolved_frame_by_frame_and_a_line_on_its_line() -> None:
    torch.manual_seed(2)
    v, square, line = torch.randn(1, 24, 2, 3), torch.randn(2, 3, 3, 3), torch.randn(2, 3, 3)
    film = depthwise(v, square, Grid((2, 3, 4)))
    frames = [depthwise(half, square, Grid((3, 4))) for half in v.split(12, 1)]
    assert torch.equal(film, torch.cat(frames, 1))
    padding = torch.ones(1, 24, dtype=torch.bool)
    padding[:, 20:] = False
    short = depthwise(v[:, :20], line, None)
    assert torch.allclose(depthwise(v, line, None, padding)[:, :20], short)
    wide = torch.zeros(2, 3, 3, 3)
    wide[:, :, 1] = line  # an image of one row
    assert torch.allclose(depthwise(v, wide, Grid((24,))), depthwise(v, line, Grid((24,))), atol=1e-6)


# ---------------------------------------------------------------- the mixer


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    mixer = build_mixer("saga", SITE, resolve_options("saga", options))
    mixer.reset_parameters()
    return mixer


def tokens(T: int = 13) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    site = SITE
    return (
        torch.randn(2, T, site.heads, site.key_dim),
        torch.randn(2, T, site.kv_heads, site.key_dim),
        torch.randn(2, T, site.kv_heads, site.value_dim),
        torch.randn(2, T, site.hidden),
    )


def mix(mixer: Any, given: tuple[Tensor, ...], **layout: Any) -> Tensor:
    return mixer(*given, TokenLayout(**{"causal": False, "grid": Grid((3, 4), prefix=1), **layout}))[0].detach()


def test_a_conversion_starts_as_linear_attention_with_its_features() -> None:
    """Gates are open but for a fiftieth, in nearly the same way for all tokens."""
    q, k, v, x = tokens()
    mixer = made()
    features = Features("hedgehog", SITE.heads, SITE.kv_heads, SITE.key_dim, SITE.scale, causal=False)
    features.reset_parameters()
    fq, fk = features(q, "query"), features(k, "key")
    o = linear_attention_bidirectional(fq, fk, torch.cat([v, torch.ones_like(v[..., :1])], -1), None, 64)
    assert relative_error(mix(mixer, (q, k, v, x)), (o[..., :-1] / o[..., -1:]).detach()) < 0.03


@pytest.mark.parametrize(
    "option", [{"dwc": 0}, {"dwc": 3}, {"gate_rank": 4}, {"feature_map": "identity"}, {"norm": "head"}]
)
def test_options_of_the_paper(option: dict[str, Any]) -> None:
    mixer, given = made(**option), tokens()
    assert mix(mixer, given).isfinite().all()
    shapes = {name: tuple(p.shape) for name, p in mixer.named_parameters()}
    assert shapes.get("taps") == {0: None, 3: (2, 6, 3, 3)}.get(option.get("dwc", 5), (2, 6, 5, 5))
    if "gate_rank" in option:
        assert shapes["key_gate.down.weight"] == (4, 24)
        assert shapes["key_gate.up.weight"] == (2 * 16, 4)


def test_the_mean_of_identity_features_is_over_tokens() -> None:
    """Without an image's worth of tokens more, nothing grows."""
    given = tokens()
    twice: Any = tuple(torch.cat([y, y], 1) for y in given)
    mixer = made(feature_map="identity", dwc=0)
    assert relative_error(mix(mixer, twice, grid=Grid((26,)))[:, :13], mix(mixer, given)) < TOLERANCE[torch.float32]
    summed = made(faithful=True, dwc=0)
    assert relative_error(mix(summed, twice, grid=Grid((26,)))[:, :13], 2 * mix(summed, given)) < 1e-5


def test_where_tokens_lie_matters_to_the_convolution_alone() -> None:
    mixer, given = made(), tokens()
    order = torch.cat([torch.zeros(1, dtype=torch.long), torch.randperm(12) + 1])
    shuffled: Any = tuple(y[:, order] for y in given)
    assert relative_error(mix(mixer, shuffled), mix(mixer, given)[:, order]) < TOLERANCE[torch.float32]
    torch.nn.init.normal_(mixer.taps)
    assert relative_error(mix(mixer, shuffled), mix(mixer, given)[:, order]) > 0.1
    other = mix(mixer, given, grid=Grid((4, 3), prefix=1))
    assert relative_error(other, mix(mixer, given)) > 0.1
    assert torch.equal(other[:, 0], mix(mixer, given)[:, 0])


def test_it_is_refused_as_causal() -> None:
    with pytest.raises(ValueError, match="is bidirectional"):
        mix(made(), tokens(), causal=True)


def test_calibration_gives_heads_the_teachers_size() -> None:
    mixer, given = made(norm="head", dwc=0), tokens()
    mixer.calibrate(*given, mix(mixer, given), torch.full((2, 13, 4, 6), 3.0))
    assert mix(mixer, given).square().mean().sqrt().item() == pytest.approx(3.0, rel=1e-3)


def test_a_site_on_a_line_has_taps_on_a_line() -> None:
    mixer = build_mixer("saga", dataclasses.replace(SITE, grid="line"), resolve_options("saga", {}))
    assert tuple(mixer.taps.shape) == (2, 6, 5)
