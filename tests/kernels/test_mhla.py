"""MHLA against its definition, and what the mixing of blocks must satisfy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, WRONG_SHAPES, every_pair, relative_error
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from linearize.errors import LinearizeError
from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize_kernels.layers.depthwise import depthwise
from linearize_kernels.layout import Grid, TokenLayout
from linearize_kernels.mhla.eager import MHLAState
from linearize_kernels.mhla.mhla import mhla, mhla_grid, naive_mhla
from linearize_kernels.mhla.places import (
    Places,
    grid_layout,
    line_blocks,
    number_of_blocks,
    place_grid,
    place_line,
    place_rows,
)
from linearize_kernels.mixer import AttentionSite

EXACT = TOLERANCE[torch.float64]
C = 16


def inputs(T: int, H: int = 4, E: int = 2, F: int = 5, Dv: int = 3) -> list[Tensor]:
    """Positive q and k, and v, in float64."""
    q, k, v = (torch.randn(2, T, *shape, dtype=torch.float64) for shape in ((H, F), (E, F), (E, Dv)))
    return [q.abs(), k.abs(), v]


def weights(M: int, E: int = 2) -> Tensor:
    return torch.rand(E, M, M, dtype=torch.float64) + 0.05


def holes(T: int) -> Tensor:
    return torch.rand(2, T) > 0.3


def packs(T: int) -> Tensor:
    return (torch.rand(2, T) < 0.04).long().cumsum(1)


def agree(o: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Equal values, and equal gradients of all leaves."""
    assert relative_error(o, expected) < EXACT
    arrives = torch.randn_like(o)
    both = (torch.autograd.grad((y * arrives).sum(), leaves, retain_graph=True) for y in (o, expected))
    for ours, theirs in zip(*both, strict=True):
        assert relative_error(ours, theirs) < 1e-9 or float(theirs.abs().max()) < 1e-9


# ---------------------------------------------------------------- causal


@pytest.mark.parametrize(
    ("T", "M", "padded", "packed"), every_pair([1, 2, 15, 16, 17, 100], [2, 3, 8], [False, True], [False, True])
)
def test_it_is_its_definition_with_all_gradients(T: int, M: int, padded: bool, packed: bool) -> None:
    leaves = [y.requires_grad_() for y in (*inputs(T), weights(M))]
    layout: Any = {"padding": holes(T) if padded else None, "segments": packs(T) if packed else None, "block_size": C}
    for normalise in (True, False):
        o, _ = mhla(*leaves, **layout, normalise=normalise)
        agree(o, naive_mhla(*leaves, **layout, normalise=normalise), leaves)


@pytest.mark.parametrize("cuts", [(0, 40, 40, 41, 100), (0, 100)])
def test_sequences_end_to_end_are_sequences_apart(cuts: tuple[int, ...]) -> None:
    (q, k, v), w = (y[:1] for y in inputs(100)), weights(4)
    cu = torch.tensor(cuts, dtype=torch.int32)
    o, state = mhla(q, k, v, w, block_size=C, cu_seqlens=cu)
    again, after = mhla(q, k, v, w, block_size=C, cu_seqlens=cu, state=state)
    for n, (start, end) in enumerate(pairwise(cuts)):
        piece: Any = [y[:, start:end] for y in (q, k, v)]
        alone, last = mhla(*piece, w, block_size=C)
        assert relative_error(o[:, start:end], alone) < EXACT
        on, later = mhla(*piece, w, block_size=C, state=last)
        assert relative_error(again[:, start:end], on) < EXACT
        for ours, theirs in ((state, last), (after, later)):
            assert all(torch.allclose(x[n : n + 1], y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("M", [2, 3, 8])
@pytest.mark.parametrize("start", [1, 31, 32, 33, 90])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "holes"])
def test_a_state_carries_on_across_blocks_in_pieces_and_steps(M: int, start: int, padded: bool) -> None:
    T, w, (q, k, v) = 200, weights(M), inputs(200)
    padding = holes(T) if padded else None
    whole, last = mhla(q, k, v, w, block_size=C, padding=padding)

    def run(a: int, b: int, state: MHLAState | None) -> tuple[Tensor, MHLAState]:
        mask = None if padding is None else padding[:, a:b]
        return mhla(q[:, a:b], k[:, a:b], v[:, a:b], w, block_size=C, padding=mask, state=state)

    first, state = run(0, start, None)
    rest, after = run(start, T, state)
    steps, stepped = [], state
    for t in range(start, T):
        o, stepped = run(t, t + 1, stepped)
        steps.append(o)
    assert relative_error(torch.cat([first, rest], 1), whole) < EXACT
    assert relative_error(torch.cat([first, *steps], 1), whole) < EXACT
    for other in (after, stepped):
        assert all(torch.allclose(x, y) for x, y in zip(other, last, strict=True))


def test_gradients_pass_through_a_state() -> None:
    leaves = [y.requires_grad_() for y in (*inputs(90), weights(4))]
    *tokens, w = leaves
    whole, _ = mhla(*leaves, block_size=C)
    for size in (1, 40):
        outputs, state = [], None
        for pieces in zip(*(y.split([50, *[size] * (40 // size)], 1) for y in tokens), strict=True):
            o, state = mhla(*pieces, w, block_size=C, state=state)
            outputs.append(o)
        agree(torch.cat(outputs, 1), whole, leaves)


def test_documents_after_a_state_start_anew() -> None:
    q, k, v = inputs(60)
    w = weights(4)
    _, state = mhla(q, k, v, w, block_size=C)
    segments = torch.arange(60).expand(2, -1) // 25
    o, last = mhla(q, k, v, w, block_size=C, segments=segments, state=state)
    goes_on, _ = mhla(q[:, :25], k[:, :25], v[:, :25], w, block_size=C, state=state)
    anew, ended = mhla(q[:, 50:], k[:, 50:], v[:, 50:], w, block_size=C)
    assert relative_error(o[:, :25], goes_on) < EXACT
    assert relative_error(o[:, 50:], anew) < EXACT
    assert all(torch.allclose(x, y) for x, y in zip(last, ended, strict=True))


def test_documents_are_placed_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number of blocks is what a GPU is waited for."""
    placed: list[int] = []

    def noted(*given: Any) -> Any:
        placed.append(given[-1])
        return place_rows(*given)

    monkeypatch.setattr("linearize_kernels.mhla.mhla.place_rows", noted)
    (q, k, v), w, segments = inputs(100), weights(4), packs(100)
    for size in (C, C, 2 * C, C):
        o, _ = mhla(q, k, v, w, block_size=size, segments=segments)
        assert relative_error(o, naive_mhla(q, k, v, w, block_size=size, segments=segments)) < EXACT
    assert placed == [C, 2 * C]
    segments[:, 50:] += 1
    o, _ = mhla(q, k, v, w, block_size=C, segments=segments)
    assert relative_error(o, naive_mhla(q, k, v, w, block_size=C, segments=segments)) < EXACT
    assert placed == [C, 2 * C, C]


def test_padding_alone_changes_no_state() -> None:
    q, k, v = inputs(40)
    w = weights(4)
    _, state = mhla(q, k, v, w, block_size=C)
    padding = torch.arange(40).expand(2, -1) >= torch.tensor([[40], [5]])
    _, last = mhla(q, k, v, w, block_size=C, padding=padding, state=state)
    assert all(torch.equal(x[0], y[0]) for x, y in zip(last, state, strict=True))
    assert last.tokens.tolist() == [40, 75]


def test_its_state_does_not_grow() -> None:
    w = weights(4)
    sizes = [sum(y.numel() for y in mhla(*inputs(T), w, block_size=C)[1]) for T in (1, 100, 1000)]
    assert sizes[0] == sizes[1] == sizes[2]


def test_no_tokens_no_change() -> None:
    q, k, v = inputs(5)
    w = weights(4)
    _, state = mhla(q, k, v, w)
    o, same = mhla(q[:, :0], k[:, :0], v[:, :0], w, state=state)
    assert o.shape == (2, 0, 4, 3)
    assert same is state


# ---------------------------------------------------------------- what mixing must satisfy


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Linear attention, normalised, with its T x T weights."""
    a = torch.einsum("bthd,bihd->bhti", q, k.repeat_interleave(2, 2))
    a = a.tril() if causal else a
    return torch.einsum("bhti,bihd->bthd", a / a.sum(-1, keepdim=True), v.repeat_interleave(2, 2))


def sixths(q: Tensor) -> Places:
    return place_line(q, 6, 6, (0, 0), None, None)


def test_equal_weights_make_linear_attention() -> None:
    q, k, v = inputs(150)
    ones = torch.ones(2, 6, 6, dtype=torch.float64)
    assert relative_error(mhla(q, k, v, ones, block_size=C)[0], plain(q, k, v, causal=True)) < EXACT
    assert relative_error(mhla_grid(q, k, v, ones, sixths(q)), plain(q, k, v, causal=False)) < EXACT


def test_weights_of_the_own_block_alone_make_it_local() -> None:
    q, k, v = inputs(150)
    w = torch.zeros(2, 6, 6, dtype=torch.float64)
    w[:, :, 0] = 1.0
    alone = [plain(*piece, causal=True) for piece in zip(*(y.split(C, 1) for y in (q, k, v)), strict=True)]
    assert relative_error(mhla(q, k, v, w, block_size=C)[0], torch.cat(alone, 1)) < EXACT
    own = mhla_grid(q, k, v, torch.eye(6, dtype=torch.float64).expand(2, -1, -1), sixths(q))
    alone = [plain(*piece, causal=False) for piece in zip(*(y.split(25, 1) for y in (q, k, v)), strict=True)]
    assert relative_error(own, torch.cat(alone, 1)) < EXACT


def test_a_row_of_weights_has_no_scale_under_the_normaliser() -> None:
    q, k, v = inputs(150)
    w, scale = weights(6).requires_grad_(), torch.rand(2, 6, 1, dtype=torch.float64) + 0.5
    o, _ = mhla(q, k, v, w, block_size=C)
    assert relative_error(mhla(q, k, v, w * scale, block_size=C)[0], o) < EXACT
    (gradient,) = torch.autograd.grad((o * torch.randn_like(o)).sum(), w)
    assert float((w * gradient).sum(-1).detach().abs().max()) < 1e-9


def test_blocks_raise_the_rank_of_attention() -> None:
    q, k, _ = (y[:1, :, :1] for y in inputs(64, F=4))
    identity = torch.eye(64, dtype=torch.float64)[None, :, None]
    places = place_line(q, 8, 8, (0, 0), None, None)
    for m, rank in ((torch.ones(1, 8, 8).double(), 4), (weights(8, E=1), 32)):
        attention = mhla_grid(q, k, identity, m, places, normalise=False)[0, :, 0]
        assert int(torch.linalg.matrix_rank(attention)) == rank


def test_features_that_are_zero_read_nothing() -> None:
    q, k, v = inputs(40)
    o, _ = mhla(0 * q, k, v, weights(4), block_size=C)
    assert not o.any()


# ---------------------------------------------------------------- bidirectional


@pytest.mark.parametrize(
    ("grid", "blocks"),
    [
        (Grid((6, 4)), (1, 3, 2)),
        (Grid((5, 7), 1, 2), (1, 2, 3)),
        (Grid((3, 3), 1), (1, 4, 4)),
        (Grid((3, 4, 5)), (2, 2, 2)),
        (Grid((4, 5), 0, 1), (2, 2, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("regions", [False, True], ids=["one", "regions"])
def test_grids_are_their_definition_with_all_gradients(grid: Grid, blocks: Any, padded: bool, regions: bool) -> None:
    T, (block, _) = grid.tokens, grid_layout(grid, blocks, torch.device("cpu"))
    leaves = [y.requires_grad_() for y in (*inputs(T), weights(number_of_blocks(grid, blocks)))]
    own = block.expand(2, -1)
    layout: Any = {"padding": holes(T) if padded else None, "segments": torch.randint(3, (2, T)) if regions else None}
    places = place_grid(grid, blocks, leaves[0], **layout)
    for normalise in (True, False):
        o = mhla_grid(*leaves, places, normalise=normalise)
        agree(o, naive_mhla(*leaves, block=own, **layout, normalise=normalise), leaves)


def test_a_grid_first_met_in_inference_mode_trains_later() -> None:
    leaves = [y.requires_grad_() for y in (*inputs(42), weights(4))]

    def run() -> torch.Tensor:
        return mhla_grid(*leaves, place_grid(Grid((6, 7)), (1, 2, 2), leaves[0]))

    with torch.inference_mode():
        run()
    run().sum().backward()
    assert all(y.grad is not None for y in leaves)


def test_a_grid_first_met_in_an_estimate_runs_later() -> None:
    """An estimate runs the code on fake tensors, in the process that trains."""
    grid, blocks = Grid((3, 14)), (1, 3, 2)  # of no other test
    with FakeTensorMode():
        assert isinstance(place_grid(grid, blocks, torch.empty(2, 42, 4)).source, FakeTensor)
    found = place_grid(grid, blocks, torch.empty(2, 42, 4))
    assert not any(isinstance(value, FakeTensor) for value in found)


def test_blocks_of_a_grid_are_where_they_should_be() -> None:
    block, longest = grid_layout(Grid((4, 6), 1, 1), (1, 2, 3), torch.device("cpu"))
    assert block[1:-1].view(4, 6)[:2].tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    assert block[1:-1].view(4, 6)[2:].tolist() == [[3, 3, 4, 4, 5, 5]] * 2
    assert block[[0, -1]].tolist() == [6, 6]
    assert longest == 4
    uneven, longest = grid_layout(Grid((5, 5)), (1, 2, 2), torch.device("cpu"))
    assert sorted(uneven.bincount().tolist()) == [4, 6, 6, 9]
    assert longest == 9
    cut = grid_layout(Grid((5, 1)), (1, 4, 1), torch.device("cpu"))[0]
    assert cut.tolist() == [0, 0, 1, 2, 3]  # no block is empty


@pytest.mark.parametrize("T", [3, 8, 50])
@pytest.mark.parametrize("outside", [(0, 0), (1, 1)])
def test_lines_are_cut_evenly_document_by_document(T: int, outside: tuple[int, int]) -> None:
    q, _, _ = inputs(T)
    padding, segments = (
        torch.arange(T).expand(2, -1) < torch.tensor([[T], [T // 2]]),
        torch.arange(T).expand(2, -1) // 30,
    )
    block = line_blocks(q, 8, padding, segments, outside)
    for b in range(2):
        for document in (0, 1):
            own = block[b][padding[b] & (segments[b] == document) & (block[b] < 8)]
            assert own.tolist() == [n * 8 // len(own) for n in range(len(own))]
    assert (block == 8)[:, T - outside[1] :].all()
    assert (block == 8)[:, : outside[0]].all()


# ---------------------------------------------------------------- the mixer


def mixer(causal: bool = True, grid: str = "line", **options: Any) -> Any:
    site = AttentionSite(0, "a", "self", 24, 4, 2, 8, 6, 8**-0.5, causal=causal, grid=grid)
    made = build_mixer("mhla", site, resolve_options("mhla", options))
    made.reset_parameters()
    return made


def call(m: Any, T: int, causal: bool, **layout: Any) -> Tensor:
    q, k, v = (torch.randn(2, T, *shape) for shape in ((4, 8), (2, 8), (2, 6)))
    return m(q, k, v, torch.zeros(2, T, 24), TokenLayout(causal=causal, **layout))[0]


def test_weights_start_local_and_average_one() -> None:
    for made in (mixer(), mixer(causal=False), mixer(causal=False, grid="patches", rows=3, columns=5)):
        w = made.weights()
        assert (w >= 0).all()
        seen = torch.arange(1, len(w[0]) + 1) if made.site.causal else torch.tensor(float(len(w[0])))
        assert torch.allclose(w.sum(-1), seen.float().expand_as(w[..., 0]), atol=1e-4)
    assert torch.allclose(mixer().weights()[0, 3, :4] / 4, torch.tensor([4.0, 3.0, 2.0, 1.0]) / 10)
    assert (mixer().weights()[0].triu(1) == 0).all()
    near = mixer(causal=False, grid="patches").weights()[0, :16, :16]
    assert (near.argmax(1) == torch.arange(16)).all()
    assert near[0, 1] > near[0, 2] > near[0, 3] > 0
    assert float(near[0, 1] / near[0, 0]) == pytest.approx(1 - 1 / (18**0.5 + 1))


def test_weights_by_distance_depend_on_nothing_else() -> None:
    w = mixer(by_distance=True).weights()[0]
    ratio = w[1:, 1] / w[1:, 0]
    assert torch.allclose(ratio, ratio[0].expand_as(ratio))


def test_without_the_normaliser_weights_sum_to_one_and_the_norm_is_calibrated() -> None:
    m = mixer(faithful=True)
    assert torch.allclose(m.weights().sum(-1), torch.ones(2, 32))
    o = call(m, 70, causal=True)
    assert 0.9 < float(o.square().mean(-1).median()) < 1.01
    m.calibrate(o, o, o, o, o.detach(), 3 * o.detach())
    assert 8.1 < float(call(m, 70, causal=True).square().mean(-1).median()) < 9.1


def test_calibration_fits_the_size_by_least_squares() -> None:
    m = mixer(faithful=True)
    torch.manual_seed(2)
    before = call(m, 70, causal=True).detach()
    target = 2 * before + before.std() * torch.randn_like(before)
    m.calibrate(before, before, before, before, before, target)
    torch.manual_seed(2)  # the same tokens
    o = call(m, 70, causal=True).detach()
    assert torch.allclose((o * (target - o)).sum((0, 1, 3)) / o.square().sum((0, 1, 3)), torch.zeros(4), atol=1e-4)


def test_grids_of_any_size_meet_the_same_weights() -> None:
    m = mixer(causal=False, grid="patches")
    for grid in (Grid((4, 4), 1), Grid((7, 9), 1), Grid((2, 3)), Grid((30, 20), 0, 2), Grid((2, 6, 6))):
        assert call(m, grid.tokens, causal=False, grid=grid).isfinite().all()


def test_a_decoder_may_be_bidirectional_and_an_encoder_not_back() -> None:
    assert call(mixer(), 70, causal=False).isfinite().all()
    with pytest.raises(ValueError, match="called as causal"):
        call(mixer(causal=False), 70, causal=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 48}, "block_size=48"),
        ({"window": 8, "rope": False}, r"attention.*embedding"),
    ],
)
def test_options_that_do_not_fit_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LinearizeError, match=message):
        mixer(**options)


@pytest.mark.parametrize(
    ("site", "flat", "idle"),
    [
        ({}, False, {"frames", "rows", "columns", "dwc"}),
        ({"causal": False}, False, {"frames", "rows", "columns", "block_size", "by_distance"}),
        ({"causal": False, "grid": "patches"}, False, {"blocks", "block_size", "by_distance"}),
        ({"causal": False, "grid": "arguments"}, True, {"blocks", "block_size", "by_distance", "frames"}),
    ],
)
def test_options_without_effect_change_nothing(site: dict[str, Any], flat: bool, idle: set[str]) -> None:
    """And are those that a conversion refuses; any other changes the weights, or what is computed."""
    changed = {"blocks": 4, "block_size": 16, "frames": 2, "rows": 3, "columns": 3, "by_distance": True, "dwc": 3}

    def result(**options: Any) -> Any:
        torch.manual_seed(0)
        m, causal = mixer(**site, **options), site.get("causal", True)
        if hasattr(m, "taps"):  # begin at zero
            torch.nn.init.ones_(m.taps)
        size = (6, 6) if flat else (2, 3, 6)
        grid = Grid(size) if "grid" in site else None
        return m.block_logits.shape, call(m, 36, causal=causal, grid=grid)

    assert set(mixer(**site).unused_options(mixer(**site).site, flat)) == idle
    shape, plain = result()
    if flat:
        changed.pop("frames")  # adds weights that no token meets, and moves the start of the others
    for name, value in changed.items():
        other, found = result(**{name: value})
        assert (torch.equal(found, plain) and other == shape) == (name in idle), name


@pytest.mark.parametrize("grid", [None, Grid((5, 6), prefix=1), Grid((2, 3, 5), suffix=1)], ids=str)
@pytest.mark.parametrize("normalise", [True, False])
def test_images_with_the_papers_convolution_and_gate(grid: Grid | None, normalise: bool) -> None:
    """(norm(MHLA) + DWC(V)) . swish(W X + b) in float64, token by token, with padding and documents."""
    torch.manual_seed(3)
    kind = "line" if grid is None else "patches"
    m = mixer(False, kind, dwc=3, output_gate=True, feature_map="elu", norm="head", normalise=normalise).double()
    for parameter in m.parameters():
        torch.nn.init.normal_(parameter)
    T = 31
    q, k, v, x = (torch.randn(2, T, *s, dtype=torch.float64) for s in ((4, 8), (2, 8), (2, 6), (24,)))
    padding, segments = holes(T), torch.randint(2, (2, T))
    layout = TokenLayout(padding, segments, causal=False, grid=grid)
    plain = mixer(False, kind, feature_map="elu", norm="head", normalise=normalise).double()
    plain.load_state_dict({n: y for n, y in m.state_dict().items() if n in plain.state_dict()})
    o, _ = m(q, k, v, x, layout)
    local = depthwise(v, m.taps, grid, padding, segments).repeat_interleave(2, 2)
    z = (x @ m.output_gate.weight.T + m.output_gate.bias).view(2, T, 4, 6)
    expected = (plain(q, k, v, x, layout)[0] + local * padding[:, :, None, None]) * z / (1 + (-z).exp())
    assert relative_error(o.detach(), expected.detach()) < EXACT
    assert not o[~padding].any()


def test_a_conversion_with_the_gate_starts_nearly_without() -> None:
    torch.manual_seed(0)
    gated, plain = mixer(output_gate=True), mixer()
    given = [torch.randn(2, 20, *shape) for shape in ((4, 8), (2, 8), (2, 6), (24,))]
    ours, theirs = (m(*given, TokenLayout())[0].detach() for m in (gated, plain))
    assert 0.01 < relative_error(ours, theirs) < 0.3
    torch.nn.init.zeros_(gated.output_gate.weight)
    assert relative_error(gated(*given, TokenLayout())[0].detach(), theirs) < 1e-5


def test_a_grid_of_one_block_is_refused() -> None:
    with pytest.raises(LinearizeError, match=r"linear.*attention"):
        mixer(causal=False, grid="patches", rows=1, columns=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *WRONG_SHAPES,
        ({"w": torch.zeros(2, 3, 4)}, r"\[E,M,M\]"),
        ({"w": torch.zeros(2, 1, 1)}, "M >= 2"),
    ],
)
def test_wrong_shapes_are_told(change: dict[str, Any], message: str) -> None:
    q, k, v = inputs(5)
    with pytest.raises(ValueError, match=message):
        mhla(**{"q": q, "k": k, "v": v, "w": weights(4), **change})
