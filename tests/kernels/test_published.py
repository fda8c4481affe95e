"""What papers publish and what they leave out to see its worth: options, each against a literal form in float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import small_model
from conftest import TOLERANCE, relative_error
from models import load, tokens
from torch import Tensor, nn

from linearize.convert import convert, plan_conversion
from linearize.errors import LinearizeError
from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize_kernels.gsa.gsa import gsa, naive_gsa
from linearize_kernels.hf.attention_hooks import mixers_of
from linearize_kernels.la.la import naive_la
from linearize_kernels.layers.rotary import Rotation
from linearize_kernels.layout import Grid, TokenLayout
from linearize_kernels.mhla.mhla import naive_mhla
from linearize_kernels.mhla.places import grid_layout
from linearize_kernels.mixer import AttentionSite, Mixer
from linearize_kernels.retnet.retnet import naive_retnet
from linearize_kernels.saga.saga import naive_saga

EXACT = TOLERANCE[torch.float64]
TEXT = AttentionSite(0, "a", "self", 24, 4, 2, 8, 6, 8**-0.5, causal=True)
IMAGE = dataclasses.replace(TEXT, causal=False, grid="patches")
T = 50
# Two documents in a row, and padding on one side of another.
SEGMENTS = (torch.arange(T) >= 23).long() + torch.tensor([[0], [0]])
PADDING = torch.arange(T) >= torch.tensor([[0], [9]])


def made(name: str, site: AttentionSite = TEXT, **options: Any) -> Mixer:
    """A mixer in float64 whose weights are not those that it starts with."""
    torch.manual_seed(0)
    mixer = build_mixer(name, site, resolve_options(name, options, site)).double()
    mixer.reset_parameters()
    for parameter in mixer.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return mixer


def inputs(length: int = T, requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = (4, 8), (2, 8), (2, 6), (24,)
    return [torch.randn(2, length, *s, dtype=torch.float64, requires_grad=requires_grad) for s in shapes]


def agree(ours: Tensor, literal: Tensor, leaves: list[Tensor]) -> None:
    """Equal values, and equal gradients."""
    assert relative_error(ours.detach(), literal.detach()) < EXACT
    weight = torch.randn_like(literal)
    pairs = (torch.autograd.grad((o * weight).sum(), leaves, allow_unused=True) for o in (ours, literal))
    for mine, theirs in zip(*pairs, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or relative_error(mine, theirs) < 1e-9


def in_pieces(mixer: Mixer, given: list[Tensor], cuts: list[int]) -> Tensor:
    """What a mixer computes of pieces, the state handed on."""
    outputs, state = [], None
    for piece in zip(*(y.split(cuts, 1) for y in given), strict=True):
        o, state = mixer(*piece, TokenLayout(), state)
        outputs.append(o)
    return torch.cat(outputs, 1)


# ---------------------------------------------------------------- GSA, table 2


@pytest.mark.parametrize("read", ["identity", "swish", "relu", "relu2"])
def test_slots_read_without_softmax(read: Any) -> None:
    q, k, v, _ = inputs(requires_grad=True)
    g = (-torch.rand(2, T, 2, 5, dtype=torch.float64)).requires_grad_()
    for where in ({}, {"segments": SEGMENTS}, {"padding": PADDING}):
        o, last = gsa(q, k, v, g, read=read, chunk_size=16, **where)
        literal, end = naive_gsa(q, k, v, g, read=read, **where)
        agree(o, literal, [q, k, v, g])
        assert all(torch.allclose(x, y) for x, y in zip(last, end, strict=True))
    with pytest.raises(ValueError, match=f"cannot run here: slots are read by {read}"):
        gsa(q, k, v, g, read=read, backend="triton")
    mixer = made("gsa", read=read, slots=5)
    given = inputs()
    assert relative_error(in_pieces(mixer, given, [17, 1, 1, 31]), mixer(*given, TokenLayout())[0]) < EXACT


def test_slots_that_forget_at_learned_rates() -> None:
    mixer, given = made("gsa", decay="fixed", slots=5, clock=0), inputs(requires_grad=True)
    q, k, v, _ = given
    g = torch.log(torch.sigmoid(mixer.forget_bias)).view(2, 5).expand(2, T, 2, 5) / 8
    literal, _ = naive_gsa(q, k, v, g, scale=TEXT.scale)
    agree(mixer(*given, TokenLayout())[0], literal, [q, k, v, mixer.forget_bias])
    assert "forget.weight" not in mixer.state_dict()


@pytest.mark.parametrize("where", [{}, {"segments": SEGMENTS}, {"padding": PADDING}], ids=lambda where: " ".join(where))
def test_slots_that_never_forget_are_those_of_abc(where: dict[str, Tensor]) -> None:
    """Each slot is the mean of its document's keys and values by weights e^(W x)."""
    mixer, given = made("gsa", decay="none", slots=5), inputs(requires_grad=True)
    q, k, v, x = given
    weight = mixer.forget(x).unflatten(-1, (2, 5)).exp()
    rows = []
    for b in range(2):
        for t in range(T):
            seen = [i for i in range(t + 1) if where.get("padding", PADDING | True)[b, i]
                    and (SEGMENTS[b, i] == SEGMENTS[b, t] or "segments" not in where)]  # fmt: skip
            if not where.get("padding", PADDING | True)[b, t]:
                rows.append(torch.zeros(4, 6, dtype=torch.float64))
                continue
            w = weight[b, seen] / weight[b, seen].sum(0)  # [i,E,M]
            slots = [torch.einsum("iem,ied->emd", w, y[b, seen]).repeat_interleave(2, 0) for y in (k, v)]
            p = torch.softmax(TEXT.scale * torch.einsum("hd,hmd->hm", q[b, t], slots[0]), -1)
            rows.append(torch.einsum("hm,hmd->hd", p, slots[1]))
    literal = torch.stack(rows).view(2, T, 4, 6)
    o, state = mixer(*given, TokenLayout(**where))
    agree(o, literal, [*given, *mixer.parameters()])
    if not where:
        assert relative_error(in_pieces(mixer, given, [17, 1, 1, 31]).detach(), literal.detach()) < EXACT
        bytes_held = sum(y.numel() * y.element_size() for y in state.slots[:2]) + state.total.numel() * 8
        assert mixer.state_bytes(T) == bytes_held // 2 // 2 + 8  # of one row, in fp32


# ---------------------------------------------------------------- SAGA, table 4


@pytest.mark.parametrize(
    "off", [{"gates": "key"}, {"gates": "value"}, {"gates": "none"}, {"output_gate": False}, {"dwc": 0}], ids=str
)
def test_each_gate_off(off: dict[str, Any]) -> None:
    mixer, given = made("saga", IMAGE, faithful=True, **off), inputs(requires_grad=True)
    q, k, v, x = given
    grid = Grid((7, 7), prefix=1)
    gates = {"key": "both key", "value": "both value"}
    key, value = (
        getattr(mixer, f"{name}_gate")(x).unflatten(-1, (2, -1))
        if off.get("gates", "both") in known.split()
        else torch.full_like(y, torch.inf)
        for (name, known), y in zip(gates.items(), (k, v), strict=True)
    )
    last = torch.ones(2, T, 4, 6) if mixer.output_gate is None else mixer.output_gate(x).unflatten(-1, (4, 6))
    local = None
    if "dwc" not in off:
        image = v[:, 1:].reshape(2, 7, 7, 12).movedim(-1, 1)
        image = nn.functional.conv2d(image, mixer.taps.reshape(12, 1, 5, 5), padding=2, groups=12)
        local = nn.functional.pad(image.movedim(1, -1).reshape(2, 49, 2, 6), (0, 0, 0, 0, 1, 0))
    literal = naive_saga(q * 8**-0.5, k, v, key, value, last.double(), local=local)
    agree(mixer(*given, TokenLayout(causal=False, grid=grid))[0], literal, given)


# ---------------------------------------------------------------- LA, the Taylor form


@pytest.mark.parametrize("causal", [True, False])
def test_the_exponential_to_first_order(causal: bool) -> None:
    site = dataclasses.replace(TEXT, causal=causal)
    mixer, given = made("la", site, feature_map="taylor", slope=1.0, learn_slope=False), inputs(requires_grad=True)
    q, k, v, _ = given
    literal = naive_la(q, k, v, a=1.0, b=8**-0.5, causal=causal)
    agree(mixer(*given, TokenLayout(causal=causal))[0], literal, [q, k, v])
    with pytest.raises(LinearizeError, match="feature_map=taylor: a window shares the sum of weights"):
        made("la", feature_map="taylor", window=8)


# ---------------------------------------------------------------- MHLA, eq. 4, section 4.2 and table 7a


def first_weights(n: int) -> Tensor:
    """Section 4.2 in a corner and in full, of n x n blocks."""
    place = torch.tensor([(i, j) for i in range(n) for j in range(n)], dtype=torch.float64)
    distance = (place[:, None] - place).square().sum(-1).sqrt()
    weights = 1.0 - distance / distance.max(1, keepdim=True).values
    return weights / weights.sum(1, keepdim=True)


def test_images_begin_with_the_papers_weights() -> None:
    mixer = build_mixer("mhla", IMAGE, resolve_options("mhla", {"faithful": True}, IMAGE))
    mixer.reset_parameters()
    start = mixer.block_logits[0, :16, :16].detach()
    assert torch.allclose(start, first_weights(4).float(), atol=1e-6)
    assert [round(float(y), 3) for y in start[0, [0, 15]]] == [0.144, 0.0]
    assert mixer.weights().shape == (2, 17, 17)


@pytest.mark.parametrize("start", ["local", "paper", "uniform"])
@pytest.mark.parametrize("weighting", ["softmax", "clipped"])
@pytest.mark.parametrize("by_distance", [False, True])
def test_weights_that_are_not_learned_are_those_of_the_start(start: str, weighting: str, by_distance: bool) -> None:
    options = {"start": start, "weighting": weighting, "by_distance": by_distance, "blocks": 5}
    for site in (TEXT, IMAGE):
        learned = build_mixer("mhla", site, resolve_options("mhla", options))
        learned.reset_parameters()
        frozen = build_mixer("mhla", site, resolve_options("mhla", {**options, "learn_weights": False}))
        assert "block_logits" not in frozen.state_dict()
        assert torch.allclose(frozen.weights(), learned.weights(), atol=1e-6)
        if start == "uniform":
            w = learned.weights()[0, :4, :4]
            assert (
                torch.allclose(w, w[:1, :1] * (torch.ones(4, 4).tril() if site.causal else 1.0), atol=1e-5)
                or by_distance
            )


def test_images_as_published_are_equation_4() -> None:
    """The normaliser stays, features are relu, weights are clipped, the convolution joins the sum."""
    mixer, given = made("mhla", IMAGE, faithful=True, rows=2, columns=2, dwc=0), inputs(requires_grad=True)
    mixer.block_logits.data[0, 0, 1], mixer.block_logits.data[0, 1, 0] = -0.4, 1.7  # clipped
    q, k, v, _ = given
    grid = Grid((7, 7), prefix=1)
    block = grid_layout(grid, (1, 2, 2), torch.device("cpu"))[0].expand(2, -1)
    features = [y.clamp_min(0) * 8**-0.25 for y in (q, k)]
    m = mixer.block_logits.clamp(0, 1).expand(2, -1, -1)
    literal = naive_mhla(*features, v, m, block=block)
    agree(mixer(*given, TokenLayout(causal=False, grid=grid))[0], literal, [q, k, v])


def test_language_as_published() -> None:
    """Without normaliser, relu before the rotation, the norm of heads, the swish gate; in pieces, too."""
    mixer, given = made("mhla", faithful=True, blocks=3, block_size=16), inputs()
    q, k, v, x = given
    angle = torch.linspace(0, 3, T, dtype=torch.float64)[None, :, None] * torch.tensor([1.0, 0.5, 0.2, 0.1]).double()

    def rotate(*both: Tensor) -> list[Tensor]:
        cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
        halves = [y.chunk(2, -1) for y in both]
        return [torch.cat([a * cos - b * sin, a * sin + b * cos], -1) for a, b in halves]

    features = rotate(*(y.clamp_min(0) * 8**-0.25 for y in (q, k)))
    m = mixer.block_logits.clamp(0, 1).tril().expand(2, -1, -1)
    o = naive_mhla(*features, v, m, block_size=16, normalise=False)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm_weight
    z = (x @ mixer.output_gate.weight.T + mixer.output_gate.bias).view(2, T, 4, 6)
    literal = o * z / (1 + (-z).exp())
    rotation = Rotation(angle.cos(), angle.sin())
    ours = mixer(*given, TokenLayout(rotation=rotation))[0]  # the norm is in fp32
    assert relative_error(ours.detach(), literal.detach()) < 1e-5
    assert mixer.drop_rope
    with pytest.raises(LinearizeError, match=r"rope=after: products of rotated features .* Set normalise=false"):
        made("mhla", rope="after")


def test_a_weight_outside_moves_only_back_in() -> None:
    y = torch.tensor([-0.1, -0.1, 0.5, 1.0, 1.2], requires_grad=True)
    from linearize_kernels.mhla.mhla import Clipped

    clipped = Clipped.apply(y)
    assert clipped.tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])
    (gradient,) = torch.autograd.grad(clipped, y, torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]))
    assert gradient.tolist() == [0.0, -1.0, 1.0, 0.0, 1.0]


def test_faithful_follows_the_kind_of_site() -> None:
    text, image, line = (
        resolve_options("mhla", {"faithful": "true"}, site)
        for site in (TEXT, IMAGE, dataclasses.replace(TEXT, causal=False))
    )
    names = "normalise", "norm", "output_gate", "rope", "dwc"
    assert [text[n] for n in names] == [False, "head", True, "after", 0]
    assert [image[n] for n in names] == [True, "none", False, "before", 3]
    assert [line[n] for n in names] == [True, "none", False, "before", 0]


# ---------------------------------------------------------------- RetNet, GLA


@pytest.mark.parametrize("name", ["retnet", "gla"])
def test_the_swish_gate_stands_behind_the_norm(name: str) -> None:
    mixer, given = made(name, faithful=True), inputs()
    x = given[3]
    z = (x @ mixer.output_gate.weight.T + mixer.output_gate.bias).view(2, T, 4, 6)
    ours = mixer(*given, TokenLayout())[0]
    gate, mixer.output_gate = mixer.output_gate, None
    assert relative_error(ours.detach(), (mixer(*given, TokenLayout())[0] * z / (1 + (-z).exp())).detach()) < EXACT
    if name == "retnet":
        o, _ = naive_retnet(
            *given[:3], log_decay=torch.log1p(-(2.0 ** -torch.tensor([5.0, 6.0]).double())), scale=8**-0.5
        )
        o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight * z / (1 + (-z).exp())
        mixer.output_gate = gate
        assert relative_error(mixer(*given, TokenLayout())[0].detach(), o.detach()) < 1e-5


# ---------------------------------------------------------------- in a model


def converted(folder: Path, mechanism: str, label: str, **options: Any) -> Any:
    """A small Llama, converted and loaded anew."""
    if not (folder / "source").exists():
        small_model("llama").save_pretrained(folder / "source")
    plan = plan_conversion(str(folder / "source"), mechanism, options=options)
    convert(*plan, folder / label, level="none", say=lambda text: None)
    return load(folder / label)


def test_scores_of_sla_come_from_what_is_not_rotated(tmp_path: Path) -> None:
    """As published over RetNet: with equal scores it is RetNet with its rotation; decoding and cropping, too."""
    told = {"base": "retnet", "faithful": True, "gate_rescale": True}
    model = converted(tmp_path, "sla", "published", **told)
    plain = converted(tmp_path, "sla", "hidden", **told, gate_input="hidden", rope="before")
    bare = converted(tmp_path, "sla", "bare", **told, rope="off")
    ours, theirs, without = (list(mixers_of(m).values()) for m in (model, plain, bare))
    for mixer, like, last in zip(ours, theirs, without, strict=True):
        like.base.load_state_dict(mixer.base.state_dict())
        last.base.load_state_dict(mixer.base.state_dict())
    given, heard = tokens(2, 21), []
    gates = ours[0].gates
    ours[0].gates = lambda q, k, x, plain=False: heard.append((q, k)) or gates(q, k, x)
    without[0].gates = lambda q, k, x, plain=False: heard.append((q, k)) or gates(q, k, x)
    with torch.no_grad():
        expected = plain(given).logits
        assert relative_error(model(given).logits, expected) < 1e-5
        assert relative_error(bare(given).logits, expected) > 1e-3
        for mine, unrotated in zip(*heard, strict=True):
            assert torch.equal(mine, unrotated)
        cache = model(given[:, :11], use_cache=True).past_key_values
        cache.activate_past_recording()
        model(torch.cat([given[:, 11:15], given[:, :3]], 1), past_key_values=cache)
        cache.crop(-3)
        assert relative_error(model(given[:, 15:], past_key_values=cache).logits, expected[:, 15:]) < 1e-5


def test_language_as_published_decodes_and_leaves_the_teacher_alone(tmp_path: Path) -> None:
    model, heard = converted(tmp_path, "mhla", "published", faithful=True), []

    class Listener:
        own_call = False

        def on_layer(self, mixer: Any, inputs: Any, o: Tensor, target: Tensor, layout: TokenLayout) -> None:
            heard.append((layout.rotation is not None, o.requires_grad))

        def student(self, module: Any) -> Any:
            return torch.enable_grad()

        def compare(self, mixer: Any, y: Tensor, target: Tensor) -> None:
            pass

    given = tokens(1, 90)
    with torch.no_grad():
        whole = model(given).logits
        cache = model(given[:, :70], use_cache=True).past_key_values
        steps = [model(given[:, t : t + 1], past_key_values=cache).logits for t in range(70, 90)]
        assert relative_error(torch.cat(steps, 1), whole[:, 70:]) < 1e-4
        with model.teacher():
            teacher = model(given).logits
    with model.transferring(Listener()):
        streamed = model(given).logits
    assert torch.equal(streamed.detach(), teacher)
    assert heard == [(True, True)] * len(mixers_of(model))
