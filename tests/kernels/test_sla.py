"""SLA over each of its bases: against its equations, and what competition between heads must satisfy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TOLERANCE, relative_error
from test_mechanisms import NEEDS, behaviour, make, mix, other_values, parts, same, tokens
from torch import Tensor

from linearize.errors import LinearizeError
from linearize.plan.mechanisms import load_mechanism, resolve_options
from linearize_kernels.mixer import option_types
from linearize_kernels.sla.sla import SoftmaxLinearAttention, head_softmax, naive_sla, op_of, sla

EXACT = TOLERANCE[torch.float64]
BASES = list(SoftmaxLinearAttention.bases)
every_base = pytest.mark.parametrize("base", BASES)


def inputs(base: str, T: int = 70, H: int = 4, Hkv: int = 1, E: int = 2) -> dict[str, Tensor]:
    """Arguments of `sla` in float64, with gradients where there are any."""
    shapes = {"q": (H, 8), "k": (Hkv, 8), "v": (Hkv, 6), "read_scores": (H,), "write_scores": (E,)}
    shapes |= {"gla": {"g": (E, 8)}, "retnet": {}, "gdn": {"g": (E,), "beta": (E,)}}[base]
    made = {name: torch.randn(2, T, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    if base == "gdn":
        made |= {name: torch.nn.functional.normalize(made[name], dim=-1) for name in "qk"}
        made["beta"] = made["beta"].sigmoid()
    if "g" in made:
        made["g"] = torch.nn.functional.logsigmoid(made["g"]) / 4
    made = {name: y.requires_grad_() for name, y in made.items()}
    return made | ({"log_decay": -torch.rand(E, dtype=torch.float64)} if base == "retnet" else {})


def without_gates(made: dict[str, Any]) -> dict[str, Any]:
    return {name: y for name, y in made.items() if not name.endswith("scores")}


@every_base
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("rescale", [True, False])
def test_it_is_its_equations_with_all_gradients(base: str, T: int, rescale: bool) -> None:
    made, results, weight = inputs(base, T), [], None
    leaves = [y for y in made.values() if y.requires_grad]
    for run in (sla, naive_sla):
        o, state = run(base=base, rescale=rescale, **made)
        memory = state if isinstance(state, Tensor) else state.memory
        weight = torch.randn_like(o) if weight is None else weight
        results.append([o, memory, *torch.autograd.grad((o * weight).sum() + memory.sum(), leaves)])
    for ours, expected in zip(*results, strict=True):
        assert float((ours - expected).detach().abs().max()) <= EXACT * max(1.0, float(expected.detach().abs().max()))


@every_base
def test_equal_scores_are_the_base(base: str) -> None:
    made = inputs(base)
    equal = {name: torch.full_like(made[name], 3.0) for name in ("read_scores", "write_scores")}
    plain, _ = op_of(base)(**without_gates(made))
    rescaled, _ = sla(base=base, **(made | equal))
    as_printed, _ = sla(base=base, rescale=False, **(made | equal))
    assert torch.equal(rescaled, plain)
    assert relative_error(as_printed * 4 * 2, plain) < EXACT


@every_base
def test_adding_to_all_scores_of_a_token_changes_nothing(base: str) -> None:
    made = inputs(base)
    moved = {name: made[name] + torch.randn(2, 70, 1, dtype=torch.float64) for name in ("read_scores", "write_scores")}
    assert relative_error(sla(base=base, **(made | moved))[0], sla(base=base, **made)[0]) < EXACT


@every_base
def test_one_head_has_no_rival(base: str) -> None:
    made = inputs(base, H=1, E=1)
    assert relative_error(sla(base=base, **made)[0], op_of(base)(**without_gates(made))[0]) < EXACT


@every_base
def test_the_winner_takes_all(base: str) -> None:
    """With scores far apart one head reads and one memory is written; the others stay at 0."""
    made = inputs(base)
    won = {
        "read_scores": torch.tensor([0.0, 1e4, 0.0, 0.0]).double().expand(2, 70, 4),
        "write_scores": torch.tensor([1e4, 0.0]).double().expand(2, 70, 2),
    }
    o, state = sla(base=base, **(made | won))
    memory = state if isinstance(state, Tensor) else state.memory
    assert not o[:, :, [0, 2, 3]].any()
    assert o[:, :, 1].any()
    assert not memory[:, 1].any()
    assert memory[:, 0].any()


def test_gates_share_one_out_among_the_heads() -> None:
    scores = torch.randn(2, 5, 7, dtype=torch.bfloat16)
    assert torch.allclose(head_softmax(scores, False).sum(-1), torch.ones(2, 5))
    assert torch.allclose(head_softmax(scores, True).sum(-1), torch.full((2, 5), 7.0))
    assert head_softmax(scores, True).dtype == torch.float32


# ---------------------------------------------------------------- the mixer


@every_base
@pytest.mark.parametrize("faithful", [False, True])
def test_a_conversion_starts_as_its_base(base: str, faithful: bool) -> None:
    options = {"base": base, "faithful": faithful, "gate_rescale": True}
    ours, plain = make("sla", **options), make(base, faithful=faithful)
    ours.base.load_state_dict(plain.state_dict())  # some draw their weights
    inputs = tokens(ours.site, 70)
    assert torch.equal(mix(ours, inputs)[0], mix(plain, inputs)[0])


@every_base
@pytest.mark.parametrize("gate_input", ["hidden", "qk"])
@pytest.mark.parametrize("norm", ["none", "head"])
def test_a_read_gate_scales_what_its_head_says(base: str, gate_input: str, norm: str) -> None:
    """A norm of each head's output would undo a gate in front of it."""
    ours = make("sla", base=base, gate_input=gate_input, norm=norm)
    inputs = tokens(ours.site, 20)
    plain, _ = mix(ours, inputs)
    torch.nn.init.normal_(ours.read.weight)
    gated, _ = mix(ours, inputs)
    x = inputs[3] if gate_input == "hidden" else inputs[0].flatten(2)
    gate = 4 * torch.softmax(x @ ours.read.weight.T, -1)
    assert same(gated, plain * gate[..., None])


@every_base
@pytest.mark.parametrize("rescale", [True, False])
def test_calibration_minds_the_gates(base: str, rescale: bool) -> None:
    """Published ones divide by the number of heads what the norm has made."""
    ours = make("sla", base=base, norm="head", gate_rescale=rescale)
    inputs = tokens(ours.site, 50)
    before = mix(ours, inputs)[0].detach()
    target = before * torch.tensor([0.1, 1.0, 3.0, 9.0])[:, None] + 0.01 * torch.randn_like(before)
    ours.calibrate(*inputs, before, target)
    o = mix(ours, inputs)[0].detach()
    assert torch.allclose((o * (target - o)).sum((0, 1, 3)) / o.square().sum((0, 1, 3)), torch.zeros(4), atol=1e-4)


@every_base
def test_a_write_gate_reaches_the_memory(base: str) -> None:
    ours = make("sla", base=base)
    inputs = tokens(ours.site, 20)
    before = mix(ours, inputs)[1]
    torch.nn.init.normal_(ours.write.weight)
    after = mix(ours, inputs)[1]
    assert not same(parts(after)[0], parts(before)[0])


@every_base
@pytest.mark.parametrize("variant", ["default", "window"])
def test_prefill_then_decode_with_padding_is_one_pass(base: str, variant: str) -> None:
    ours = make("sla", variant=variant, base=base)
    torch.nn.init.normal_(ours.read.weight)
    torch.nn.init.normal_(ours.write.weight)
    inputs = tokens(ours.site, 90)
    padding = torch.arange(90)[None] >= torch.tensor([[0], [23]])
    whole, last = mix(ours, inputs, padding=padding)
    pieces, state = [], None
    for start, stop in ((0, 67), (67, 68), (68, 69), (69, 90)):
        q, k, v, x = (y[:, start:stop] for y in inputs)
        o, state = mix(ours, (q, k, v, x), padding=padding[:, start:stop], state=state)
        pieces.append(o)
    assert same(torch.cat(pieces, 1), whole)
    assert all(same(a, b) for a, b in zip(parts(state), parts(last), strict=True))


@every_base
def test_every_option_of_the_base_is_read(base: str) -> None:
    plain = behaviour(make("sla", base=base))
    for option, (kind, bounds, value) in option_types(load_mechanism("sla"), base).items():
        needed = NEEDS.get(option, {})
        default = behaviour(make("sla", base=base, **needed)) if needed else plain
        for other in other_values(kind, bounds, value) if option != "base" else []:
            changed = behaviour(make("sla", base=base, **needed, **{option: other}))
            shapes = [y.shape for y in changed] == [y.shape for y in default]
            assert not shapes or any(not torch.equal(a, b) for a, b in zip(changed, default, strict=True)), option


@every_base
def test_options_are_those_of_the_base_as_well(base: str) -> None:
    def of_base(given: dict[str, Any]) -> dict[str, Any]:
        # A switch that names a whole layer, such as gdn's `native`, and what needs it are not options of SLA.
        switches = {*load_mechanism(base).implied, *load_mechanism(base).switched}
        return {name: value for name, value in resolve_options(base, given).items() if name not in switches}

    ours = resolve_options("sla", {"base": base})
    assert ours == {**of_base({}), "base": base, "gate_input": "hidden", "gate_rescale": True}
    faithful = resolve_options("sla", {"base": base, "faithful": True})
    assert faithful == {**of_base({"faithful": True}), "base": base, "gate_input": "qk", "gate_rescale": False}


def test_options_of_another_base_are_told() -> None:
    with pytest.raises(LinearizeError, match=r"gate_rank.*sla.*retnet.*base=gla"):
        resolve_options("sla", {"base": "retnet", "gate_rank": 8})
    with pytest.raises(LinearizeError, match=r"gate_rnk.*sla.*gla.*'gate_rank'"):
        resolve_options("sla", {"gate_rnk": 8})
    with pytest.raises(LinearizeError, match=r"base=glaa.*retnet.*gla"):
        resolve_options("sla", {"base": "glaa"})


def test_options_that_do_not_fit_are_told() -> None:
    with pytest.raises(LinearizeError, match="set rope=true"):
        make("sla", window=8, rope=False)
    with pytest.raises(LinearizeError, match="chunk_size=48"):
        make("sla", base="retnet", chunk_size=48)
