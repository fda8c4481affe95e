"""Rotation behind the feature map: what it makes of positions, and which conversions get it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, relative_error
from models import load, logits, save_source, small_config, tokens
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from triton_tools import compile_kernel, gradients, interpreted

from linearize.convert import convert, plan_conversion
from linearize.errors import LinearizeError
from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize.plan.plan import make_steps, resolve_rotation
from linearize.probe.probe import probe
from linearize_kernels.layers.rotary import Rotation, resolve_rope, rotary_kernel, rotary_op, rotated, rotation_of

MOVED = ("gla", "retnet")


def angles(T: int, R: int, start: int = 0) -> Rotation:
    """Of a rotary embedding with R rotated channels, from position `start` on."""
    angle = (torch.arange(T) + start)[:, None] * 100.0 ** -torch.linspace(0, 1, R // 2, dtype=torch.float64)
    return Rotation(angle.cos()[None], angle.sin()[None])


@pytest.mark.parametrize(("R", "F"), [(8, 8), (8, 16), (4, 8), (4, 10)])
def test_products_depend_on_the_distance_alone(R: int, F: int) -> None:
    """Of all channels or of a part, of features as wide as a head or twice as wide."""
    D = 8 if F != 10 else 5
    q, k = torch.randn(1, 9, 2, F, dtype=torch.float64), torch.randn(1, 9, 2, F, dtype=torch.float64)
    near, far = ([rotated(y, angles(9, R, start), D) for y in (q, k)] for start in (0, 1000))
    scores = [torch.einsum("bthf,bihf->bhti", *pair) for pair in (near, far, (q, k))]
    torch.testing.assert_close(scores[0], scores[1])
    assert relative_error(scores[0], scores[2]) > 0.1
    torch.testing.assert_close(near[0].norm(dim=-1), q.norm(dim=-1))


def rotations(R: int, F: int, rows: int, dtype: torch.dtype) -> float:
    """The largest difference of features, and of their gradients, from PyTorch's; angles of one row or of two."""
    D = 8 if F % 8 == 0 else 5
    y = torch.randn(2, 3, 9, F).to(dtype).transpose(1, 2)  # tokens behind heads, as q comes from a model
    rotation = Rotation(*(x.float().expand(rows, -1, -1).clone() for x in angles(9, R, 5)))
    if rows == 2:
        rotation = Rotation(rotation.cos.cumsum(0), rotation.sin.cumsum(0))
    do = torch.randn(2, 9, 3, F)
    ours = gradients(lambda x: rotated(x, rotation, D), [y], do)
    plain = gradients(lambda x: rotated(x, rotation, D, plain=True), [y], do)
    return max(relative_error(a, b.float()) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize(("R", "F"), [(8, 8), (8, 16), (4, 8), (4, 10), (4, 5)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernel_rotates_as_pytorch_does(R: int, F: int, rows: int, dtype: torch.dtype) -> None:
    assert interpreted(rotations, R, F, rows, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_for_a_gpu(capability: int) -> None:
    kinds = dict.fromkeys(("p_y", "p_out"), "*bf16") | {"sign": "fp32"}
    kernel = compile_kernel(rotary_kernel, capability, {"D": 128, "F": 256, "BR": 32, "BD": 64}, kinds, 4)
    assert kernel.metadata.shared < 48 * 1024


def check_operator() -> None:
    y = torch.randn(2, 9, 3, 16, requires_grad=True)
    torch.library.opcheck(rotary_op, (y, *(x.float() for x in angles(9, 4)), 8, False))


def test_the_operator_is_registered_as_it_should_be() -> None:
    interpreted(check_operator)


def test_every_form_of_a_rotation_is_read() -> None:
    angle = torch.rand(2, 5, 3)
    cos, sin = (torch.cat([part, part], -1) for part in (angle.cos(), angle.sin()))
    for given in ((cos, sin), (cos[None].expand(3, -1, -1, -1), sin[None]), torch.polar(torch.ones_like(angle), angle)):
        found = rotation_of(given)
        assert found is not None
        torch.testing.assert_close(found, Rotation(angle.cos(), angle.sin()))
    flat = rotation_of((cos[0], sin[0]))
    assert flat is not None
    assert flat.cos.shape == (1, 5, 3)
    assert rotation_of(None) is None


def linear(root: Path, mechanism: str, **options: Any) -> Any:
    """A small Llama converted with these options, as a user loads it."""
    plan = plan_conversion(str(save_source(root / "source")), mechanism, options=options)
    convert(*plan, root / "linear", level="none", say=lambda text: None)
    return load(root / "linear")


@pytest.mark.parametrize("mechanism", [*MOVED, "sla"])
def test_positions_far_away_change_nothing(mechanism: str, tmp_path: Path) -> None:
    """Softmax sees distances alone; so does a mechanism that rotates behind its feature map, and no other.

    GLA's do where both channels of a pair are forgotten alike, as by gates that are the same for all tokens.
    """
    same = {} if mechanism == "retnet" else {"gate_std": 0.0}
    ids, places, found = tokens(2, 24), torch.arange(24)[None], {}
    for rope in ("after", "before", "off"):
        model = linear(tmp_path / rope, mechanism, rope=rope, **same)
        with torch.no_grad():
            near, far = (logits(model, ids, position_ids=places + start) for start in (0, 5000))
            stretched = logits(model, ids, position_ids=places * 3, attention_mask=torch.ones_like(ids))
            cache = model(ids[:, :20], use_cache=True).past_key_values
            last = model(ids[:, 20:], past_key_values=cache, use_cache=True).logits
        found[rope] = (relative_error(far, near), relative_error(stretched, near))
        assert relative_error(last, near[:, 20:]) < 1e-4
    assert found["after"][0] < 1e-3 < found["after"][1]
    assert found["before"][0] > 1e-3
    assert found["off"] == (0.0, 0.0)


class Outputs:
    """What attention transfer hears of each layer."""

    own_call = False

    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}

    def on_layer(self, mixer: Any, inputs: Any, o: torch.Tensor, target: Any, layout: Any) -> None:
        self.found[mixer.site.layer] = o.detach()

    def student(self, module: Any) -> Any:
        return contextlib.nullcontext()

    def compare(self, mixer: Any, y: Any, target: Any) -> None: ...


def test_attention_transfer_trains_what_runs(tmp_path: Path) -> None:
    model, ids, listener = linear(tmp_path, "gla"), tokens(2, 24), Outputs()
    with model.transferring(listener):
        model(ids, use_cache=False)
    ran = []
    first = model.model.layers[0].self_attn.mixer  # whose input is the teacher's
    first.register_forward_hook(lambda module, inputs, output: ran.append(output[0]))
    logits(model, ids)
    torch.testing.assert_close(listener.found[0], ran[0])


def test_tokens_that_are_taken_back_keep_their_rotation(tmp_path: Path) -> None:
    """What stays of a call is folded into the state again, rotated as it was; also of one longer than is recorded."""
    model, ids = linear(tmp_path, "gla"), tokens(1, 160)
    with torch.no_grad():
        whole = logits(model, ids)
        cache = model(ids[:, :10], use_cache=True).past_key_values
        cache.activate_past_recording()
        long = model(ids[:, 10:155], past_key_values=cache, use_cache=True).logits
        cache.crop(-9)
        rest = model(ids[:, 146:], past_key_values=cache, use_cache=True).logits
    assert relative_error(long, whole[:, 10:155]) < 1e-4
    assert relative_error(rest, whole[:, 146:]) < 1e-4


def test_auto_is_behind_the_map_where_there_is_no_window(tmp_path: Path) -> None:
    source = str(save_source(tmp_path / "source"))
    for mechanism in (*MOVED, "sla"):
        for options, place in (({}, "after"), ({"window": 8}, "before"), ({"rope": "off"}, "off")):
            plan = plan_conversion(source, mechanism, options=options)[0]
            assert {step.options["rope"] for step in plan.steps} == {place}
    plan = plan_conversion(source, "gdn", options={})[0]
    assert {step.options["rope"] for step in plan.steps} == {True}
    assert resolve_rope("auto", 0) == "after"
    assert (resolve_rope("auto", 8), resolve_rope("off", 8)) == ("before", "off")
    assert (resolve_rope(True, 0), resolve_rope(False, 0)) == ("before", "off")


@pytest.mark.parametrize(
    ("name", "model", "place"), [("llama", LlamaForCausalLM, "after"), ("gpt2", GPT2LMHeadModel, "before")]
)
def test_auto_moves_no_rotation_that_attention_is_not_given(name: str, model: Any, place: str) -> None:
    found = probe(small_config(name), model)
    steps = resolve_rotation(found, make_steps(list(found.sites), "gla", {}))
    assert {step.options["rope"] for step in steps} == {place}


@pytest.mark.parametrize(("old", "new"), [(True, "before"), (False, "off"), ("true", "before"), ("False", "off")])
def test_what_rope_was_means_what_it_did(old: Any, new: str) -> None:
    """Configs and recipes of earlier versions say rope=true or false."""
    for mechanism in (*MOVED, "sla"):
        assert resolve_options(mechanism, {"rope": old})["rope"] == new
    assert resolve_options("gsa", {"rope": "false"})["rope"] is False
    with pytest.raises(LinearizeError, match="rope=maybe: must be one of auto, before, after, off"):
        resolve_options("gla", {"rope": "maybe"})


@pytest.mark.parametrize("mechanism", [*MOVED, "sla"])
def test_a_window_refuses_what_takes_its_rotation(mechanism: str) -> None:
    site = probe(small_config("llama"), LlamaForCausalLM).sites[0]
    for rope in ("after", "off"):
        with pytest.raises(LinearizeError, match="window=8: exact attention needs the rotary embedding"):
            build_mixer(mechanism, site, resolve_options(mechanism, {"window": 8, "rope": rope}))
    assert not build_mixer(mechanism, site, resolve_options(mechanism, {"window": 8})).drop_rope
