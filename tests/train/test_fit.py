"""What is fitted to the teacher before the first stage, one mixer at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training import VOCAB, T, make_recipe, metrics, small_source, stage, train

from linearize.convert import convert, plan_conversion
from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize.train import loop, session
from linearize.train import stages as fitting
from linearize.train.save import load_converted
from linearize.train.session import Finetuner
from linearize.train.stages import Calibration, Fit, Listener, fit_mixer, listen
from linearize.train.student import Student
from linearize_kernels.layers.rotary import Rotation
from linearize_kernels.layout import TokenLayout
from linearize_kernels.mixer import AttentionSite

HIDDEN = 24
LAYOUTS = {
    "whole": TokenLayout(),
    "packed": TokenLayout(segments=torch.arange(3)[:, None] + torch.arange(20) // 7),
    "padded": TokenLayout(padding=torch.arange(20) >= torch.tensor([[0], [4], [9]])),
}


def mixer(mechanism: str) -> Any:
    site = AttentionSite(0, "a", "self", HIDDEN, 4, 2, 8, 6, 8**-0.5, causal=True)
    made = build_mixer(mechanism, site, resolve_options(mechanism, {}))
    made.reset_parameters()
    return made


def given(layout: TokenLayout) -> tuple[tuple[Tensor, ...], TokenLayout]:
    """Inputs of three rows of 20 tokens, each with angles of its own."""
    angles = torch.rand(3, 20, 4)
    q, k, v = (torch.randn(3, 20, *shape) for shape in ((4, 8), (2, 8), (2, 6)))
    return (q, k, v, torch.randn(3, 20, HIDDEN)), layout._replace(rotation=Rotation(angles.cos(), angles.sin()))


def converted(root: Path, mechanism: str, dtype: str = "float32", **options: Any) -> Path:
    """A small Llama of two layers, converted."""
    plan = plan_conversion(str(small_source(root / "source", "llama", dtype)), mechanism, options=options)
    convert(*plan, root / "linear", level="none", trust_remote_code=False, say=lambda text: None)
    return root / "linear"


def relative(o: Tensor, target: Tensor) -> float:
    return float((o - target).square().sum() / target.square().sum())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mechanism", ["gla", "gdn", "sla", "retnet"])
@torch.no_grad()
def test_a_mixer_comes_nearer_to_what_another_one_put_out(mechanism: str, layout: TokenLayout) -> None:
    torch.manual_seed(0)
    inputs, layout = given(layout)
    own = mixer(mechanism)
    other = copy.deepcopy(own)
    for parameter in other.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    target, before = other(*inputs, layout)[0], own(*inputs, layout)[0]
    fit_mixer(own, inputs, layout, target)
    assert relative(own(*inputs, layout)[0], target) < 0.7 * relative(before, target)


@torch.no_grad()
def test_what_does_not_come_nearer_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "RATE", 1e3)
    inputs, layout = given(TokenLayout())
    own = mixer("gla")
    before = copy.deepcopy(own.state_dict())
    fit_mixer(own, inputs, layout, 1.01 * own(*inputs, layout)[0])
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_not_trained_before_are_fitted_and_no_source_weight_changes(dtype: str, tmp_path: Path) -> None:
    model = load_converted(converted(tmp_path, "sla", dtype), getattr(torch, dtype), True)
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    batch = {"input_ids": torch.randint(1, VOCAB, (4, T)), "position_ids": torch.arange(T).expand(4, T)}
    errors: list[float] = []

    class Watch(Listener):
        def on_layer(self, mixer: Any, inputs: Any, o: Tensor, target: Tensor, layout: Any) -> None:
            errors.append(relative(o.detach().float(), target.float()))

    for listener in (Calibration, Watch, Fit, Watch):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            untrained = ({"model.layers.1.self_attn"},) if issubclass(listener, Calibration) else ()
            listen(Student(model), listener(Student(model), *untrained), batch)
    before, after = errors[:2], errors[2:]
    assert after[0] == before[0]
    assert after[1] < 0.9 * before[1]
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, start[name])}
    assert changed
    assert all(name.startswith("model.layers.1.self_attn.mixer.") for name in changed)


@pytest.mark.parametrize(
    ("mechanism", "options"), [("retnet", {}), ("sla", {"base": "retnet"})], ids=["retnet", "sla over retnet"]
)
@torch.no_grad()
def test_decays_follow_the_teacher_and_are_saved_with_the_weights(
    mechanism: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = load_converted(converted(tmp_path, mechanism, **options), torch.float32, True)
    start = {name: value.clone() for name, value in model.named_parameters() if "half_life" in name}
    ids = torch.randint(1, VOCAB, (4, T))
    listen(Student(model), Fit(Student(model)), {"input_ids": ids, "position_ids": torch.arange(T).expand(4, T)})
    assert len(start) == 2
    assert all(not torch.equal(model.get_parameter(name), value) for name, value in start.items())
    model.save_pretrained(tmp_path / "saved")
    saved = load_converted(tmp_path / "saved", torch.float32, True)
    whole = model(ids).logits
    assert torch.equal(saved(ids).logits, whole)
    first = saved(ids[:, :-1], use_cache=True)
    step = saved(ids[:, -1:], past_key_values=first.past_key_values).logits
    assert relative(step[:, 0], whole[:, -1]) < 1e-8


@pytest.mark.parametrize(
    ("mechanism", "options", "kind", "changes", "fitted"),
    [
        ("gla", {}, "attention_transfer", {}, True),
        ("retnet", {}, "logit_kl", {}, True),
        ("gdn", {}, "logit_kl", {"loss": {"kl": 0.0, "ce": 1.0}}, False),
        ("sla", {}, "sft", {}, False),
        ("sla", {"window": 4}, "attention_transfer", {}, False),
        ("gsa", {"slots": 8}, "attention_transfer", {}, False),
    ],
)
def test_only_what_starts_far_and_learns_from_the_teacher_is_fitted_to_it(
    mechanism: str,
    options: dict[str, Any],
    kind: str,
    changes: dict[str, Any],
    fitted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[int] = []
    monkeypatch.setattr(fitting, "fit_mixer", lambda mixer, *given: called.append(mixer.site.layer))
    folder = converted(tmp_path, mechanism, **options)
    recipe = make_recipe(tmp_path, folder, stage(kind, ["new"], steps=1, **changes))
    with monkeypatch.context() as patch:
        patch.setattr(Finetuner, "fidelity", lambda tuner: pytest.fail("far enough"))
        with pytest.raises(pytest.fail.Exception):
            train(recipe)
    assert called == ([0, 1] if fitted else [])


def test_long_rows_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row longer than the tokens that are enough, as many are read."""
    seen: list[torch.Size] = []

    def told(student: Student, listener: Listener, batch: dict[str, Tensor]) -> None:
        seen.extend({value.shape for value in batch.values()})
        pytest.fail("far enough")

    monkeypatch.setattr(session, "CALIBRATION_TOKENS", T // 4)
    monkeypatch.setattr(session, "listen", told)
    recipe = make_recipe(tmp_path, converted(tmp_path, "gla"), stage("logit_kl", ["new"], steps=1))
    with pytest.raises(pytest.fail.Exception):
        train(recipe)
    assert seen == [(1, T // 4)]


@pytest.mark.slow
def test_each_stage_tells_its_own_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(loop, "forget_peak", lambda: begun.append(True))
    monkeypatch.setattr(loop, "memory_bytes", lambda: len(begun))
    folder = converted(tmp_path, "gla")
    train(make_recipe(tmp_path, folder, *(stage("logit_kl", ["new"], steps=1, name=name) for name in ("one", "two"))))
    assert metrics(tmp_path, "memory") == [1, 2]
