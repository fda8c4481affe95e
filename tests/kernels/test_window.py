"""The exact window beside a mechanism: against its definition, and inside converted models."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, every_pair, relative_error
from models import HYBRID, Zoo, logits, small_model, tokens
from torch import Tensor
from transformers import DynamicCache

from linearize.convert import plan_conversion
from linearize.errors import LinearizeError
from linearize.plan.mechanisms import build_mixer, load_mechanism, mechanism_names, resolve_options
from linearize_kernels.layout import TokenLayout, token_layout
from linearize_kernels.mixer import AttentionSite, option_types
from linearize_kernels.window.window import SinkWindow, Window, window_around
from linearize_kernels.window.window import naive_window as definition
from linearize_kernels.window.window import window as window_attention

EXACT = TOLERANCE[torch.float32]
WINDOWED: dict[str, Any] = {"window": 6, "sink": 2, "clock": 0}


def inputs(T: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, T, 4, 8), torch.randn(2, T, 2, 8), torch.randn(2, T, 2, 6)


@pytest.mark.parametrize(
    ("T", "near", "padded", "packed"),
    every_pair([1, 5, 16, 37], [(1, 0), (4, 3), (8, 0), (8, 1), (2, 5), (64, 4)], [False, True], [False, True]),
)
def test_it_is_softmax_over_first_and_last_tokens(T: int, near: tuple[int, int], padded: bool, packed: bool) -> None:
    window, sink = near
    q, k, v = inputs(T)
    padding = torch.rand(2, T) > 0.3 if padded else None
    document = (torch.rand(2, T) < 0.15).long().cumsum(1) if packed else None
    segments = None if document is None else document % 2  # a number that comes back is another document
    o, _, _ = window_attention(q, k, v, window=window, sink=sink, scale=0.3, padding=padding, segments=segments)
    assert (
        relative_error(o, definition(q, k, v, window=window, sink=sink, scale=0.3, padding=padding, segments=document))
        < EXACT
    )


def test_scores_of_long_windows_are_made_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from linearize_kernels.window import window as module

    calls, real = [], module._attend

    def attend(q: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        calls.append(q.shape[1])
        return real(q, *more)

    for name, value in {"BLOCK": 4, "SCORES": 2 * 2 * 4 * 4 * 15, "_attend": attend}.items():
        monkeypatch.setattr(module, name, value)
    q, k, v = inputs(37)
    padding, segments = torch.rand(2, 37) > 0.3, (torch.rand(2, 37) < 0.15).long().cumsum(1)
    for sink in (0, 3):
        expected = definition(q, k, v, window=8, sink=sink, scale=0.3, padding=padding, segments=segments)
        for leaf in (q, q.clone().requires_grad_()):
            o, _, _ = window_attention(leaf, k, v, window=8, sink=sink, scale=0.3, padding=padding, segments=segments)
            assert relative_error(o, expected) < EXACT
    assert calls == [2] * 5 + [10] + [2] * 5 + [10]


def test_documents_are_read_once_until_they_change() -> None:
    given = {"position_ids": torch.arange(16).repeat(2, 1)}
    document = (torch.arange(16) >= 8).long().repeat(2, 1)
    q, k, v = (y.requires_grad_() for y in inputs(16))

    def documents() -> Tensor:
        _, segments = token_layout(None, (2, 16), None, given)
        assert segments is not None
        return segments

    def near(segments: Tensor) -> Tensor:
        return window_attention(q, k, v, window=6, sink=2, scale=0.3, segments=segments)[0]

    kept = weakref.ref(documents())
    assert documents() is kept()
    near(documents())
    given["position_ids"][:, 8:] -= 8
    with torch.inference_mode():
        near(document)
    o = near(document)
    o.sum().backward()  # which takes nothing that was made in inference
    assert torch.equal(near(documents()), o)
    assert (
        relative_error(o.detach(), definition(q, k, v, window=6, sink=2, scale=0.3, segments=document).detach()) < EXACT
    )
    kept = weakref.ref(documents())
    given.clear()
    gc.collect()
    assert kept() is None


def test_gradients_are_those_of_softmax_and_of_its_normaliser() -> None:
    inputs_ = [y.double().requires_grad_() for y in inputs(13)]
    q, k, v = inputs_
    o, mass, _ = window_attention(q, k, v, window=4, sink=2, scale=0.3)
    later = torch.arange(13)[:, None] - torch.arange(13)
    seen = (later >= 0) & ((later < 4) | (torch.arange(13) < 2))
    k, v = (y.repeat_interleave(q.shape[2] // y.shape[2], 2) for y in (k, v))
    scores = (0.3 * torch.einsum("bthd,bihd->bhti", q, k)).masked_fill(~seen, -torch.inf)
    plain = torch.einsum("bhti,bihd->bthd", scores.softmax(-1), v), scores.logsumexp(-1).transpose(1, 2)
    d_o, d_mass = torch.randn_like(o), torch.randn_like(mass)
    found, expected = (torch.autograd.grad(pair, inputs_, (d_o, d_mass)) for pair in ((o, mass), plain))
    assert relative_error(mass, plain[1]) < EXACT
    assert all(relative_error(*pair) < EXACT for pair in zip(found, expected, strict=True))


def test_scores_are_not_rounded_to_half_precision() -> None:
    """Large scores of bf16 vectors: rounding them would cost ten times what rounding the output does."""
    q, k, v = (y.bfloat16() for y in inputs(37))
    o, _, _ = window_attention(4 * q, 4 * k, v, window=8, scale=0.3)
    expected = definition(4 * q.double(), 4 * k.double(), v.double(), window=8, scale=0.3)
    assert relative_error(o, expected) < 0.5 * TOLERANCE[torch.bfloat16]


def test_autocast_does_not_round_scores() -> None:
    window, (q, k, v) = Window(8, 4, 8, 1, 0.3, True), (y.bfloat16() for y in inputs(37))
    window.reset_parameters()
    torch.nn.init.constant_(window.far_logit, -1e4)
    found = []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            x = torch.zeros(2, 37, 8, dtype=torch.float32 if on else torch.bfloat16)
            found.append(window(v[:, :, :1], torch.ones(2, 37, 4), 4 * q, 4 * k, v, x, TokenLayout(), None)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize(("window", "sink"), [(3, 0), (3, 2), (8, 13), (64, 1)])
def test_a_ring_carries_it_on(window: int, sink: int, padded: bool) -> None:
    q, k, v = inputs(37)
    padding = torch.rand(2, 37) > 0.3 if padded else None
    ring, outputs = None, []
    for start, stop in ((0, 1), (1, 11), (11, 12), (12, 13), (13, 13), (13, 37)):
        own = None if padding is None else padding[:, start:stop]
        piece = (y[:, start:stop] for y in (q, k, v))
        o, _, ring = window_attention(*piece, window=window, sink=sink, scale=0.3, padding=own, state=ring)
        outputs.append(o)
    assert (
        relative_error(torch.cat(outputs, 1), definition(q, k, v, window=window, sink=sink, scale=0.3, padding=padding))
        < EXACT
    )


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("sink", [0, 2, 4])
def test_a_ring_forgets_the_documents_before_the_last(sink: int, padded: bool) -> None:
    """Also when a state is continued by the rest of its document and another."""
    q, k, v = inputs(40)
    segments = torch.tensor([0] * 15 + [1] * 15 + [2] * 10).expand(2, -1)
    padding = torch.rand(2, 40) > (0.3 if padded else -1.0)
    padding[:, [17, 27, 28, 39]] = True
    ring, outputs = None, []
    for document, (start, stop) in zip((1, 1, 2), ((0, 18), (18, 28), (28, 40)), strict=True):
        layout: dict[str, Any] = {
            "segments": segments[:, start:stop],
            "padding": padding[:, start:stop] if padded else None,
        }
        piece = (y[:, start:stop] for y in (q, k, v))
        o, _, ring = window_attention(*piece, window=8, sink=sink, scale=0.3, state=ring, **layout)
        outputs.append(o)
        assert torch.equal(ring.held, (padding & (segments == document))[:, :stop].sum(1))
    assert (
        relative_error(
            torch.cat(outputs, 1),
            definition(q, k, v, window=8, sink=sink, scale=0.3, padding=padding, segments=segments),
        )
        < EXACT
    )


@pytest.mark.parametrize("sink", [0, 2])
def test_a_document_may_begin_or_end_with_padding_where_a_state_is_handed_on(sink: int) -> None:
    """The state is that of the row's last document and goes to its next first one, whoever has a real token there."""
    q, k, v = inputs(30)
    segments = torch.tensor([0] * 9 + [1] * 11 + [2] * 10).expand(2, -1)
    padding = torch.ones(2, 30, dtype=torch.bool)
    padding[0, 9:12] = padding[1, 18:20] = False  # the first tokens of one document, and the last
    ring, outputs = None, []
    for cut in (slice(0, 10), slice(10, 18), slice(18, 30)):
        layout: dict[str, Any] = {"segments": segments[:, cut], "padding": padding[:, cut]}
        sizes: dict[str, Any] = {"window": 8, "sink": sink, "scale": 0.3}
        o, _, ring = window_attention(q[:, cut], k[:, cut], v[:, cut], **sizes, state=ring, **layout)
        outputs.append(o)
    assert (
        relative_error(
            torch.cat(outputs, 1),
            definition(q, k, v, window=8, sink=sink, scale=0.3, padding=padding, segments=segments),
        )
        < EXACT
    )


@pytest.mark.parametrize("shared", [False, True])
def test_a_head_and_a_token_decide_how_much_comes_through(shared: bool) -> None:
    q, k, v = inputs(37)
    o, mass, _ = window_attention(q, k, v, window=8, sink=2, scale=0.3)
    far, own, x = torch.randn_like(o), torch.randn_like(mass), torch.randn(*mass.shape[:2], 24, dtype=o.dtype)
    near = Window(24, mass.shape[-1], 8, 2, 0.3, shared).to(o.dtype)
    near.reset_parameters()
    start = torch.sigmoid(torch.tensor(-4.0 if shared else -1.0) + (own - mass if shared else 0.0))
    mixed, _ = near(far, own.exp() if shared else None, q, k, v, x, TokenLayout(), None)
    w = start[..., None]
    assert relative_error(mixed, w * far + (1 - w) * o) < EXACT
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.normal_()
    logit = near.far_logit + x @ near.far_gate.T
    logit = logit + own - mass if shared else logit - near.near_share * mass
    w = logit.sigmoid()[..., None]
    mixed, _ = near(far, own.exp() if shared else None, q, k, v, x, TokenLayout(), None)
    assert relative_error(mixed, w * far + (1 - w) * o) < EXACT


@pytest.mark.parametrize("name", ["la", "gla"])
def test_calibration_finds_how_much_came_through(name: str) -> None:
    """Also of packed documents with padding among them: what a head has mixed it mixes again, and in that size."""
    site = AttentionSite(0, "a", "self", 24, 4, 2, 8, 8, 0.3, causal=True)
    mixer = build_mixer(name, site, resolve_options(name, {"window": 5, "sink": 2}))
    mixer.reset_parameters()
    x, q, k, v = torch.randn(2, 60, 24), *(torch.randn(2, 60, heads, 8) for heads in (4, 2, 2))
    layout = TokenLayout(torch.rand(2, 60) > 0.2, (torch.rand(2, 60) < 0.05).long().cumsum(1))
    found = {"far_logit": torch.tensor([-3.0, -1.5, 0.25, 3.0])}
    if name == "gla":
        found |= {"near_share": torch.tensor([0.0, 0.5, 1.0, 0.5]), "weight": torch.tensor([0.5, 1.0, 2.0, 0.25])}
    parameters = dict(mixer.near.named_parameters()) | ({"weight": mixer.norm.weight} if name == "gla" else {})
    for key, value in found.items():
        parameters[key].data.copy_(value if key != "weight" else value[:, None])
    target, _ = mixer(q, k, v, x, layout)
    for part in (mixer.near, getattr(mixer, "norm", None)):
        if part is not None:
            part.reset_parameters()
    mixer.calibrate_window(q, k, v, x, target.detach(), layout)
    for key, value in found.items():
        torch.testing.assert_close(parameters[key] if key != "weight" else parameters[key][:, 0], value)


# ---------------------------------------------------------------- in a model

some_models = pytest.mark.parametrize(
    ("name", "layers"), [("llama", "all"), ("llama", HYBRID), ("mistral", "1,3"), ("gpt2", "all")]
)


@some_models
def test_prefill_and_steps_are_one_forward(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers, **WINDOWED), tokens(2, 24)
    cache, pieces = DynamicCache(), []
    for piece in ids.split([13, 7, 1, 1, 1, 1], 1):
        with torch.no_grad():
            pieces.append(model(input_ids=piece, past_key_values=cache, use_cache=True).logits)
    assert relative_error(torch.cat(pieces, 1), logits(model, ids)) < EXACT


@some_models
def test_left_padding_and_packing_change_nothing(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers, **WINDOWED), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = logits(model, ids, attention_mask=mask, position_ids=places)
    alone = logits(model, ids[1:, 7:])
    assert relative_error(padded[1, 7:], alone[0]) < EXACT
    row = torch.cat([ids[:1], ids[1:, 7:]], 1)
    packed = logits(model, row, position_ids=torch.cat([torch.arange(20), torch.arange(13)])[None])
    assert relative_error(packed[:, 20:], alone) < EXACT


@some_models
def test_beams_reorder_the_ring(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers, **WINDOWED), tokens(2, 9)
    search = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    scores = [
        model.generate(ids, **search, output_scores=True, use_cache=cached, pad_token_id=0).sequences_scores
        for cached in (True, False)
    ]
    assert relative_error(*scores) < EXACT


def test_a_window_as_long_as_the_text_is_the_teacher(zoo: Zoo) -> None:
    model, ids = zoo.model("llama", window=64), tokens(2, 24)
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if n.endswith("far_logit")):
            parameter.fill_(-100.0)
    student = logits(model, ids)
    with model.teacher():
        assert relative_error(student, logits(model, ids)) < EXACT


@pytest.mark.parametrize(
    "name", [n for n in mechanism_names() if "rope" in option_types(load_mechanism(n)) and load_mechanism(n).causal]
)
def test_a_window_needs_rotary_embedding(name: str) -> None:
    site = AttentionSite(0, "a", "self", 24, 4, 2, 8, 8, 0.3, causal=True)
    with pytest.raises(LinearizeError, match=r"window=8.*rope=true"):
        build_mixer(name, site, resolve_options(name, {"window": 8, "rope": False}))


@pytest.mark.parametrize("name", ["gsa", "sla"])
def test_a_sink_needs_a_window(name: str) -> None:
    site = AttentionSite(0, "a", "self", 24, 4, 2, 8, 8, 0.3, causal=True)
    with pytest.raises(LinearizeError, match="sink=4"):
        build_mixer(name, site, resolve_options(name, {"sink": 4}))


@pytest.mark.parametrize(("grid", "words"), [("patches", "window=8"), ("unknown", "window=8"), ("line", "sink=9")])
def test_a_window_around_is_one_of_text_and_holds_the_sink(grid: Any, words: str) -> None:
    site = AttentionSite(0, "a", "self", 24, 4, 2, 8, 8, 0.3, causal=False, grid=grid)
    with pytest.raises(LinearizeError, match=words):
        build_mixer("la", site, resolve_options("la", {"window": 8, "sink": 9}))


def around(q: Tensor, k: Tensor, v: Tensor, window: int, sink: int, scale: float, document: Tensor) -> Tensor:
    """Softmax over the same document's tokens at most `window` away, and its first `sink` ones, query by query;
    `document` [B,T] is -1 at padding."""
    o = v.new_zeros(*q.shape[:3], v.shape[-1])
    for b, t in (document >= 0).nonzero().tolist():
        own = (document[b] == document[b, t]).nonzero()[:, 0].tolist()
        at = own.index(t)
        seen = sorted({*own[:sink], *own[max(at - window, 0) : at + window + 1]})
        for h in range(q.shape[2]):
            e = h * k.shape[2] // q.shape[2]
            o[b, t, h] = torch.softmax(scale * k[b, seen, e] @ q[b, t, h], 0) @ v[b, seen, e]
    return o


@pytest.mark.parametrize(("T", "window", "sink"), [(1, 4, 1), (5, 1, 1), (37, 8, 3), (70, 3, 0)])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
def test_without_a_direction_it_lies_around_each_token(
    T: int, window: int, sink: int, padded: bool, packed: bool
) -> None:
    q, k, v = inputs(T)
    padding = torch.rand(2, T) > 0.3 if padded else None
    document = (torch.rand(2, T) < 0.15 * packed).long().cumsum(1)
    segments = document % 2 if packed else None  # a number that comes back is another document
    o, _ = window_around(q, k, v, window=window, sink=sink, scale=0.3, padding=padding, segments=segments)
    real = document if padding is None else document.masked_fill(~padding, -1)
    assert relative_error(o, around(q, k, v, window, sink, 0.3, real)) < EXACT


def test_sequences_laid_end_to_end_are_documents_of_a_window_around() -> None:
    q, k, v = (y[:1] for y in inputs(20))
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    o, _ = window_around(q, k, v, window=3, sink=1, scale=0.3, cu_seqlens=cu)
    document = (torch.arange(20) >= 7).long()[None]
    assert relative_error(o, around(q, k, v, 3, 1, 0.3, document)) < EXACT


@pytest.mark.parametrize("name", ["la", "mhla", "saga"])
def test_a_window_around_a_whole_text_is_the_teacher(name: str) -> None:
    """Where the mechanism's share is nothing: the encoder's own softmax."""
    options = {"window": 16, "sink": 1} | ({"feature_map": "hedgehog"} if name == "la" else {})
    site = AttentionSite(0, "a", "self", 24, 4, 4, 8, 8, 0.3, causal=False)
    mixer = build_mixer(name, site, resolve_options(name, options))
    mixer.reset_parameters()
    torch.nn.init.constant_(mixer.near.far_logit, -60.0)
    q, k, v = (torch.randn(2, 12, 4, 8) for _ in range(3))
    padding = torch.arange(12) < torch.tensor([[12], [9]])
    o, state = mixer(q, k, v, torch.randn(2, 12, 24), TokenLayout(padding=padding, causal=False))
    seen = padding[:, None, None].expand(-1, -1, 12, -1)
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=0.3).transpose(1, 2)
    assert state is None
    assert relative_error(o[padding], softmax[padding]) < EXACT


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_the_plan_counts_its_bytes(tmp_path: Any, dtype: str, item: int) -> None:
    source = tmp_path / "source"
    small_model("llama").save_pretrained(source)
    plain, windowed = (
        plan_conversion(str(source), "gsa", options={"window": window, "sink": sink}, dtype=dtype)[0].steps[0]
        for window, sink in ((0, 0), (10, 3))
    )
    site = windowed.site
    ring = 13 * site.kv_heads * (site.key_dim + site.value_dim) * item + 8
    assert windowed.state_bytes - plain.state_bytes == ring
    assert windowed.new_parameters - plain.new_parameters == site.heads * (site.hidden + 2)


def test_a_sink_takes_its_share_and_calibration_finds_it() -> None:
    """By definition e^s in the denominator, in one pass and step by step. Calibration finds the sinks that made what it
    sees, to half a step of what it tries."""
    site = AttentionSite(0, "a", "self", 12, 4, 2, 8, 8, 8**-0.5, causal=True)
    torch.manual_seed(0)
    plain, own = (SinkWindow(site, window=5, sink=0, sink_logit=on).double() for on in (False, True))
    assert own.sinks is not None
    q, k, v = (torch.randn(2, 20, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    x, layout = torch.randn(2, 20, 12, dtype=torch.float64), TokenLayout()
    own.sinks.data = torch.tensor([-1.0, 0.5, 2.0, 40.0], dtype=torch.float64)
    o, _ = own.mix(q, k, v, x, layout, None)
    keys, values = (y.repeat_interleave(2, 2) for y in (k, v))
    for t in range(20):
        near = slice(max(0, t - 4), t + 1)
        scores = torch.einsum("bhd,bihd->bhi", q[:, t], keys[:, near]) * site.scale
        weights = scores.exp() / (own.sinks.exp()[:, None] + scores.exp().sum(-1, keepdim=True))
        want = torch.einsum("bhi,bihd->bhd", weights, values[:, near])
        assert torch.allclose(o[:, t], want, rtol=1e-5, atol=1e-7)
    state, steps = None, []
    for t in range(20):
        one, state = own.mix(*(y[:, t : t + 1] for y in (q, k, v, x)), layout, state)
        steps.append(one)
    assert torch.allclose(torch.cat(steps, 1), o, rtol=1e-5, atol=1e-7)
    own.reset_parameters()
    assert own.sinks.abs().sum() == 0
    own.calibrate(q, k, v, x, o, o)
    assert torch.allclose(own.sinks[:3], torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64), atol=0.13)
    alone = plain.mix(q, k, v, x, layout, None)[0]
    own.calibrate(q, k, v, x, o, alone)
    assert relative_error(own.mix(q, k, v, x, layout, None)[0].detach(), alone) < 1e-3
