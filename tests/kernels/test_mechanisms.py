"""What every mechanism owes, at the level of its mixer. A file of kernels/ that defines one is tested by existing."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import typing
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, relative_error
from torch import Tensor

from linearize.errors import LinearizeError
from linearize.plan.mechanisms import build_mixer, load_mechanism, mechanism_names, published_options, resolve_options
from linearize_kernels.hf.cache import map_state
from linearize_kernels.layers.rotary import Rotation, resolve_rope
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import (
    AttentionSite,
    Bounds,
    Mixer,
    WindowedState,
    as_autocast,
    option_types,
    own_mixer,
)
from linearize_kernels.window.window import Ring

HIDDEN = 24
SITES = {
    "heads share keys": AttentionSite(0, "a", "self", HIDDEN, 4, 2, 8, 8, 8**-0.5, causal=True),
    "one KV head, narrow values": AttentionSite(0, "a", "self", HIDDEN, 8, 1, 16, 6, 0.3, causal=True),
    "a KV head each": AttentionSite(0, "a", "self", HIDDEN, 3, 3, 8, 8, 8**-0.5, causal=True),
}
LONG = 150  # crosses chunks and blocks of 64

every_mechanism = pytest.mark.parametrize("name", mechanism_names())
every_site = pytest.mark.parametrize("site", SITES.values(), ids=SITES.keys())
# Options that every mechanism has; a window of 48 fits no block of 64.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "faithful": {"faithful": True},
    "window": {"window": 48, "sink": 3},
}
# What an option asks for beside it.
NEEDS: dict[Any, dict[str, Any]] = {"sink": {"window": 48}, ("mhla", "rope"): {"normalise": False}}
NEEDS |= {("gdn", "maps"): {"native": True}}
# A mechanism with each variant for which it has the options; of those that decode, which keep a state.
CASES = [
    (n, v)
    for n in mechanism_names()
    for v in VARIANTS
    if VARIANTS[v].keys() <= {"faithful", *option_types(load_mechanism(n))}
]
every_variant = pytest.mark.parametrize(("name", "variant"), CASES)
every_state = pytest.mark.parametrize(("name", "variant"), [case for case in CASES if load_mechanism(case[0]).causal])

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def make(name: str, site: AttentionSite = SITES["heads share keys"], variant: str = "default", **options: Any) -> Mixer:
    torch.manual_seed(0)
    site = dataclasses.replace(site, causal=site.causal and load_mechanism(name).causal)
    mixer = build_mixer(name, site, resolve_options(name, {**VARIANTS[variant], **options}))
    mixer.reset_parameters()
    return mixer


def tokens(site: AttentionSite, T: int, B: int = 2) -> Inputs:
    """q, k, v and hidden states for a site."""
    torch.manual_seed(1)
    return (
        torch.randn(B, T, site.heads, site.key_dim),
        torch.randn(B, T, site.kv_heads, site.key_dim),
        torch.randn(B, T, site.kv_heads, site.value_dim),
        torch.randn(B, T, site.hidden),
    )


def cut(inputs: Inputs, start: int | None, stop: int | None) -> Inputs:
    q, k, v, x = (y[:, start:stop] for y in inputs)
    return q, k, v, x


def mix(mixer: Mixer, inputs: Inputs, state: Any = None, **layout: Any) -> tuple[Tensor, Any]:
    return mixer(*inputs, TokenLayout(**{"causal": mixer.site.causal, **layout}), state)


def parts(state: Any) -> list[Tensor]:
    """The tensors of a state, which may hold other states."""
    return [state] if isinstance(state, Tensor) else [tensor for part in state or () for tensor in parts(part)]


def same(ours: Tensor, reference: Tensor) -> bool:
    return relative_error(ours.detach(), reference.detach()) <= TOLERANCE[torch.float32]


# ---------------------------------------------------------------- the registry and the options


def test_there_are_mechanisms_and_an_unknown_one_is_told() -> None:
    assert "gsa" in mechanism_names()
    with pytest.raises(LinearizeError, match=r"'gas'.*'gsa'"):
        load_mechanism("gas")


@every_mechanism
def test_its_file_defines_one_mixer_an_op_and_a_reference(name: str) -> None:
    module = importlib.import_module(f"linearize_kernels.{name}.{name}")
    assert own_mixer(module) is load_mechanism(name)
    assert callable(getattr(module, name))
    assert callable(getattr(module, f"naive_{name}"))
    assert load_mechanism(name).title
    assert load_mechanism(name).paper


@every_mechanism
def test_its_options_are_described_by_their_types(name: str) -> None:
    kinds = option_types(load_mechanism(name))
    for option, (kind, bounds, default) in kinds.items():
        if kind in (int, float):
            assert isinstance(bounds, Bounds), option
            assert bounds.low <= default <= bounds.high, option
        else:
            assert kind is bool or default in typing.get_args(kind), option
    resolved = resolve_options(name, {})
    assert json.loads(json.dumps(resolved)) == resolved
    published = published_options(load_mechanism(name))
    assert published.keys() <= kinds.keys()
    assert resolve_options(name, {"faithful": True}) == {**resolved, **published}


def other_values(kind: Any, bounds: Bounds | None, default: Any) -> list[Any]:
    """Values of an option that differ from its default, and fit beside the defaults of the others."""
    if kind is bool:
        return [not default]
    if bounds is None:
        return [choice for choice in typing.get_args(kind) if choice not in (default, resolve_rope(default, 0))]
    larger = default * 2 if default > 0 else kind(8)
    return [larger if larger <= bounds.high else kind(default / 2)]


def behaviour(mixer: Mixer) -> list[Tensor]:
    """Everything an option may influence: parameters, the output, the state, the request to drop RoPE."""
    inputs = tokens(mixer.site, LONG)
    angle = torch.arange(LONG)[None, :, None] * torch.linspace(1.0, 0.1, mixer.site.key_dim // 2)
    layout = {"causal": mixer.site.causal, "rotation": Rotation(angle.cos(), angle.sin())}
    o, state = mix(mixer, inputs, **layout)
    mixer.calibrate(*inputs, o.detach(), 2 * o.detach() + 1)
    memory = [] if state is None else parts(state)
    return [torch.tensor(float(mixer.drop_rope)), *mixer.state_dict().values(), o.detach(), *memory]


@every_mechanism
def test_no_option_is_stored_and_never_read(name: str) -> None:
    images = dataclasses.replace(SITES["heads share keys"], causal=False, grid="patches")
    # An option of grids has a meaning there alone, a window where there is a past.
    sites = [SITES["heads share keys"], *([images] if load_mechanism(name).bidirectional else [])]
    default = [behaviour(make(name, site)) for site in sites]
    for option, (kind, bounds, value) in option_types(load_mechanism(name)).items():
        for other in other_values(kind, bounds, value):
            needed = NEEDS.get((name, option), NEEDS.get(option, {}))
            for site, plain in zip(sites[: 1 if option in ("window", "sink") else None], default, strict=False):
                before = behaviour(make(name, site, **needed)) if needed else plain
                changed = behaviour(make(name, site, **needed, **{option: other}))
                shapes = [y.shape for y in changed] == [y.shape for y in before]
                # chunk_size shows in the rounding alone
                if not shapes or any(not torch.equal(a, b) for a, b in zip(changed, before, strict=True)):
                    break
            else:
                pytest.fail(f"{option}={other} changes nothing")


# ---------------------------------------------------------------- parameters


@every_site
@every_variant
def test_reset_writes_every_parameter_unless_it_was_loaded(name: str, site: AttentionSite, variant: str) -> None:
    with torch.device("meta"):
        empty = build_mixer(name, site, resolve_options(name, VARIANTS[variant]))
    mixer = empty.to_empty(device="cpu")
    for parameter in mixer.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    mixer.reset_parameters()
    assert [n for n, p in mixer.named_parameters() if not p.isfinite().all()] == []
    assert list(mixer.buffers()) == [], "a buffer that is not saved comes back as uninitialised memory"

    loaded = make(name, site, variant)
    for parameter in loaded.parameters():
        torch.nn.init.constant_(parameter, 7.0)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    loaded.reset_parameters()
    assert all(bool((p == 7.0).all()) for p in loaded.parameters())


@every_variant
def test_gradients_reach_every_parameter_and_every_input(name: str, variant: str) -> None:
    mixer = make(name, variant=variant)
    if mixer.near is not None:  # begins at zero, which hides x from the window
        torch.nn.init.normal_(mixer.near.far_gate)
    inputs = tokens(mixer.site, 70)
    leaves = {**dict(zip("qkvx", inputs, strict=True)), **dict(mixer.named_parameters())}
    for leaf in leaves.values():
        leaf.requires_grad_()
    o, _ = mix(mixer, inputs)
    gradients = torch.autograd.grad((o * torch.randn_like(o)).sum(), leaves.values(), allow_unused=True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if leaf == "x" and gradient is None:  # a mechanism without gates may ignore the hidden states
            continue
        assert gradient.isfinite().all(), leaf
        assert gradient.any(), leaf


# ---------------------------------------------------------------- outputs and states


@every_site
@every_variant
def test_shapes_and_dtypes(name: str, site: AttentionSite, variant: str) -> None:
    inputs = tokens(site, 70)
    exact, _ = mix(make(name, site, variant), inputs)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cast: Any = tuple(y.to(dtype) for y in inputs)
        o, state = mix(make(name, site, variant).to(dtype), cast)
        assert o.shape == (2, 70, site.heads, site.value_dim)
        assert o.dtype == dtype
        assert all(part.shape[0] == 2 for part in parts(state))
        memory = state.far if isinstance(state, WindowedState) else state
        memory = () if isinstance(memory, Ring) else memory  # a window holds activations
        assert all(part.dtype in (torch.float32, torch.int64) for part in parts(memory))
        # Gates computed in half precision are within a few roundings of the exact ones.
        assert relative_error(o.detach(), exact.detach()) <= 3 * TOLERANCE[dtype]


@every_site
@every_state
def test_state_bytes_are_those_of_the_state(name: str, site: AttentionSite, variant: str) -> None:
    mixer = make(name, site, variant)
    for T in (1, 64, LONG):
        _, state = mix(mixer, tokens(site, T, B=1))
        assert sum(part.numel() * part.element_size() for part in parts(state)) == mixer.state_bytes(T)


@every_site
@every_state
def test_prefill_then_decode_is_one_pass(name: str, site: AttentionSite, variant: str) -> None:
    """Single steps across the border of a chunk of 64, from it on, and within a chunk; then the rest in one pass."""
    mixer, inputs = make(name, site, variant), tokens(site, 90)
    whole, last = mix(mixer, inputs)
    for prefill, end in ((1, 66), (64, 66), (67, 69)):
        o, state = mix(mixer, cut(inputs, None, prefill))
        outputs = [o]
        for t in range(prefill, end):
            o, state = mix(mixer, cut(inputs, t, t + 1), state=state)
            outputs.append(o)
        o, state = mix(mixer, cut(inputs, end, None), state=state)
        assert same(torch.cat([*outputs, o], 1), whole)
        assert all(same(a, b) for a, b in zip(parts(state), parts(last), strict=True))


@every_state
def test_states_follow_their_rows(name: str, variant: str) -> None:
    """Beam search reorders states along the batch."""
    mixer = make(name, variant=variant)
    inputs, order = tokens(mixer.site, 71, B=3), torch.tensor([2, 0, 0])
    _, state = mix(mixer, cut(inputs, None, 70))
    step: Any = tuple(y[order, 70:] for y in inputs)
    o, _ = mix(mixer, step, state=map_state(lambda part: part[order], state))
    expected, _ = mix(mixer, cut(inputs, 70, None), state=state)
    assert same(o, expected[order])


@every_site
@every_variant
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_as_if_it_were_not_there(name: str, site: AttentionSite, variant: str, side: str) -> None:
    mixer, T, pad = make(name, site, variant), 70, 9
    inputs = tokens(site, T + pad)
    start, stop = (pad, None) if side == "left" else (None, T)
    padding = torch.zeros(2, T + pad, dtype=torch.bool)
    padding[:, start:stop] = True
    for y in inputs:
        y.requires_grad_()
    o, state = mix(mixer, inputs, padding=padding)
    plain, last = mix(mixer, cut(inputs, start, stop))
    assert same(o[:, start:stop], plain)
    assert not o[~padding].any()
    assert all(same(a, b) for a, b in zip(parts(state), parts(last), strict=True))
    for y, gradient in zip("qkvx", torch.autograd.grad(o.square().sum(), inputs, allow_unused=True), strict=True):
        assert gradient is None or not gradient[~padding].any(), y
    step = tokens(site, 1)
    assert same(mix(mixer, step, state=state)[0], mix(mixer, step, state=last)[0])


@every_variant
def test_rows_of_one_batch_do_not_meet(name: str, variant: str) -> None:
    mixer = make(name, variant=variant)
    inputs = tokens(mixer.site, 70)
    padding = torch.arange(70)[None] >= torch.tensor([[0], [23]])
    o, _ = mix(mixer, inputs, padding=padding)
    alone: Any = tuple(y[:1] for y in inputs)
    assert same(o[:1], mix(mixer, alone)[0])


@every_site
@every_variant
def test_packed_documents_do_not_meet(name: str, site: AttentionSite, variant: str) -> None:
    mixer, inputs = make(name, site, variant), tokens(site, LONG)
    lengths = [1, 66, 5, LONG - 72]
    # Tokens of one number are one document where attention is bidirectional, wherever they are.
    numbers = [4, 0, 4, 1] if mixer.site.causal else [4, 0, 2, 1]
    segments = torch.repeat_interleave(torch.tensor(numbers), torch.tensor(lengths)).expand(2, -1)
    packed, _ = mix(mixer, inputs, segments=segments)
    documents = zip(*(y.split(lengths, 1) for y in inputs), strict=True)
    alone = [mix(mixer, document)[0] for document in documents]
    assert same(packed, torch.cat(alone, 1))


@every_state
def test_no_bit_of_the_past_depends_on_the_future(name: str, variant: str) -> None:
    mixer = make(name, variant=variant)
    inputs = tokens(mixer.site, LONG)
    before, _ = mix(mixer, inputs)
    for t in (1, 63, 64, 130):
        changed: Any = tuple(torch.cat([y[:, :t], -y[:, t:]], 1) for y in inputs)
        after, _ = mix(mixer, changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t:], before[:, t:])


@every_variant
def test_it_sees_both_sides_or_says_that_it_looks_back(name: str, variant: str) -> None:
    mixer = make(name, variant=variant)
    assert mixer.causal or mixer.bidirectional
    inputs = tokens(mixer.site, 70)
    if mixer.bidirectional and (mixer.near is None or not mixer.site.causal):
        whole, _ = mix(mixer, inputs, causal=False)
        changed: Any = tuple(torch.cat([y[:, :-1], -y[:, -1:]], 1) for y in inputs)
        assert not torch.equal(mix(mixer, changed, causal=False)[0][:, 0], whole[:, 0])
    else:
        with pytest.raises(ValueError, match=r"a.*bidirectional"):
            mix(mixer, inputs, causal=False)
        assert mix(mixer, cut(inputs, 0, 1), causal=False)[0].isfinite().all()


# ---------------------------------------------------------------- numerics


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_nan_for_any_size_of_input(name: str, variant: str, dtype: torch.dtype) -> None:
    mixer = make(name, variant=variant).to(dtype)
    for T, size in itertools.product((1, 70), (0.0, 1.0, 1e4)):
        inputs: Any = tuple((y * size).to(dtype).requires_grad_() for y in tokens(mixer.site, T))
        padding = torch.ones(2, T, dtype=torch.bool)
        padding[0] = False
        for layout in ({}, {"padding": padding}):
            o, state = mix(mixer, inputs, **layout)
            gradients = [y for y in torch.autograd.grad(o.float().sum(), inputs, allow_unused=True) if y is not None]
            assert all(bool(y.isfinite().all()) for y in (o, *parts(state), *gradients))


@every_variant
def test_twice_the_same_is_the_same_bit_for_bit(name: str, variant: str) -> None:
    mixer = make(name, variant=variant)
    inputs = tokens(mixer.site, LONG)
    first, second = (mix(mixer, inputs)[0] for _ in range(2))
    assert torch.equal(first, second)


@every_variant
def test_memory_for_the_backward_pass_is_linear(name: str, variant: str) -> None:
    mixer = make(name, variant=variant)

    def saved_bytes(T: int) -> int:
        storages: dict[int, int] = {}

        def pack(y: Tensor) -> Tensor:
            storages[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
            return y

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            q, *others = tokens(mixer.site, T)
            o, _ = mix(mixer, (q.requires_grad_(), *others))
        assert o.requires_grad
        return sum(storages.values())

    assert saved_bytes(2048) / saved_bytes(1024) <= 2.1


# A window meets its mechanism in one of two ways. Each takes seconds to trace; one mechanism a way is enough.
WINDOWED = {load_mechanism(n).normalised: n for n in reversed(mechanism_names()) if load_mechanism(n).causal}


COMPILED = [(n, v) for n, v in CASES if v == "default" or (v == "window" and n in WINDOWED.values())]


# Not as published: GSA's gradients there are 6e-5 from float64 with or without the compiler.
@pytest.mark.parametrize(
    ("name", "variant"),
    [pytest.param(n, v, marks=pytest.mark.slow if n not in ("la", "window") else ()) for n, v in COMPILED],
)
def test_compiles_as_one_graph_with_gradients(name: str, variant: str) -> None:
    mixer = make(name, variant=variant)
    inputs = tokens(mixer.site, 70)
    inputs[0].requires_grad_()
    padding = torch.arange(70)[None] >= torch.tensor([[0], [23]])
    torch._dynamo.reset()  # it takes so many mixers in one process, and refuses the next
    results, weight = [], torch.randn(inputs[0].shape)  # not o: what a norm leaves has no gradient in its square
    for run in (mixer, torch.compile(mixer, fullgraph=True, backend="aot_eager")):
        o, state = run(*inputs, TokenLayout(padding, causal=mixer.site.causal))
        results.append((o, *parts(state), *torch.autograd.grad((o * weight).sum(), [inputs[0], *mixer.parameters()])))
    assert all(same(ours, eager) for eager, ours in zip(*results, strict=True))


@pytest.mark.parametrize("name", mechanism_names())
def test_autocast_reaches_keys_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, seen = make(name), []
    inputs = tokens(mixer.site, 8)
    method = "mix_with_mass" if mixer.normalised else "mix"
    inner = getattr(mixer, method)
    monkeypatch.setattr(mixer, method, lambda *a, **k: seen.append({x.dtype for x in a[:3]}) or inner(*a, **k))
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = mix(mixer, (*inputs[:2], inputs[2].bfloat16(), inputs[3]))
        assert as_autocast(inputs[0].double())[0].dtype == torch.float64  # which autocast leaves alone
    assert seen == [{torch.bfloat16}]
    assert o.isfinite().all()


@every_variant
def test_a_mixer_has_shapes_on_the_meta_device(name: str, variant: str) -> None:
    mixer = make(name, variant=variant)
    inputs = tokens(mixer.site, 70)
    o, _ = mix(mixer, inputs)
    found, _ = mix(mixer.to("meta"), [x.to("meta") for x in inputs])
    assert found.is_meta
    assert (found.shape, found.dtype) == (o.shape, o.dtype)


@every_variant
def test_calibrate_keeps_outputs_finite(name: str, variant: str) -> None:
    mixer = make(name, variant=variant)
    inputs = tokens(mixer.site, 70)
    o, _ = mix(mixer, inputs)
    mixer.calibrate(*inputs, o.detach(), torch.zeros_like(o))
    assert mix(mixer, inputs)[0].isfinite().all()


def test_a_site_survives_json() -> None:
    for site in SITES.values():
        assert AttentionSite.from_dict(json.loads(json.dumps(dataclasses.asdict(site)))) == site
