"""AdamW in little memory: what its codes keep, how it rounds, and that it trains and resumes like the plain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training import base, make_recipe, metrics, same, stage, tensors, train

from linearize.errors import LinearizeError
from linearize.estimate.cards import Device
from linearize.estimate.choose import as_before, choose, is_open, plainly
from linearize.estimate.estimate import estimate
from linearize.estimate.memory import Rehearsal
from linearize.finetune import dry_run
from linearize.recipe.recipe import Recipe
from linearize.train.session import Finetuner
from linearize.train.small_adamw import BLOCK, SmallAdamW, fresh_state, load, rounded, slices, store

SMALL = {"lr": 1e-3, "memory": "small"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def kept(value: torch.Tensor, name: str) -> torch.Tensor:
    """`value` after it was stored as a moment."""
    state = fresh_state(value)
    ((_, *moments),) = slices(state, len(value))
    moment = moments[name == "exp_avg_sq"]
    store(moment, value, signed=name == "exp_avg")
    return load(moment, signed=name == "exp_avg")


def test_codes_keep_digits_of_large_and_small_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(5000, generator=generator) * 10 ** torch.empty(5000).uniform_(-3, 0, generator=generator)
    found = kept(value, "exp_avg")
    blocks = torch.nn.functional.pad(value, (0, -5000 % BLOCK)).view(-1, BLOCK).abs().amax(1)
    share = value.abs() / blocks.repeat_interleave(BLOCK)[:5000]
    assert (((found - value) / value).abs()[share > 0.1] < 0.03).all()
    assert (((found - value) / value).abs()[share > 1e-3] < 0.3).all()
    square = kept(value.square(), "exp_avg_sq").sqrt()
    assert ((square - value.abs()).abs() / value.abs())[share > 0.1].max() < 0.03
    # What is in the numerator of an update is in its denominator, too: (255 / 127)^2 at the least codes.
    assert (found.abs() <= 4.04 * square)[value != 0].all()
    assert not kept(torch.zeros(5000), "exp_avg").any()


def test_rounding_keeps_the_mean() -> None:
    generator = torch.Generator().manual_seed(2)
    value = torch.full((100_000,), 1.0 + 2**-10)
    found = rounded(value, torch.bfloat16, generator).float()
    assert set(found.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(found.double().mean()) == pytest.approx(1.0 + 2**-10, abs=5e-5)
    assert torch.equal(rounded(-value, torch.float32, generator), -value)
    assert float(rounded(-value, torch.bfloat16, generator).double().mean()) == pytest.approx(-1.0 - 2**-10, abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_descends_as_adamw_does(dtype: torch.dtype) -> None:
    """A quadratic bowl in 8,192 dimensions of unequal width, with weight decay."""
    widths = torch.logspace(-1, 1, 8192).view(64, 128)

    def run(make: Any) -> float:
        generator = torch.Generator().manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(64, 128, generator=generator).to(dtype))
        optimizer = make([weight], lr=3e-2, betas=(0.9, 0.95), weight_decay=0.1)
        for _ in range(60):
            weight.grad = (widths * weight.detach().float()).to(dtype)
            optimizer.step()
        return float((widths * weight.detach().float().square()).mean())

    plain, small = run(torch.optim.AdamW), run(SmallAdamW)
    assert small < 0.05
    assert small == pytest.approx(plain, rel=0.35, abs=2e-3)


def test_small_tensors_are_exact() -> None:
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2)]
    settings = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    optimizers = [torch.optim.AdamW(weights[:1], **settings), SmallAdamW(weights[1:], **settings)]
    for _ in range(5):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = weight.detach().sin()
            optimizer.step()
    assert torch.allclose(*weights, atol=1e-6)


@pytest.mark.slow
def test_a_stage_ends_close_to_the_plain_one_and_resumes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 weights without masters: the last losses within 5 % of those of float32 masters; a resumed run is equal."""
    folder, runtime = base(root, "llama", "bfloat16"), {"device": "cpu", "precision": "bf16"}

    def run(place: str, memory: str) -> Path:
        optimizer = {"lr": 5e-3, "memory": memory}
        stages = [stage("logit_kl", "all", steps=12, optimizer=optimizer, batch={"per_device": 4})]
        changes = {"runtime": runtime, "checkpoint": {"every_steps": 6, "keep": 9}}
        train(make_recipe(tmp_path / place, folder, *stages, **changes))
        return tmp_path / place

    full, small = run("full", "full"), run("small", "small")
    ends = [sum(metrics(place)[-3:]) / 3 for place in (full, small)]
    assert metrics(small)[0] == pytest.approx(metrics(full)[0], rel=5e-3)  # the residual stream is bf16, not float32
    assert ends[1] < 0.9 * metrics(small)[0]
    assert ends[1] == pytest.approx(ends[0], rel=0.05)
    save = Finetuner.save

    def killed(tuner: Finetuner, position: Any, state: Any) -> None:
        if position.step > 6:
            raise KeyboardInterrupt
        save(tuner, position, state)

    with monkeypatch.context() as patch:
        patch.setattr(Finetuner, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run("resumed", "small")
    resumed = run("resumed", "small")
    assert same(tensors(resumed / "run" / "final"), tensors(small / "run" / "final"))


def test_float16_weights_need_masters(root: Path, tmp_path: Path) -> None:
    runtime = {"device": "cpu", "precision": "bf16"}
    stages = [stage("logit_kl", "all", optimizer=SMALL)]
    recipe = make_recipe(tmp_path, base(root, "llama", "float16"), *stages, runtime=runtime)
    with pytest.raises(LinearizeError, match="float16 loses small updates"):
        dry_run(recipe, print)


def test_shards_are_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(LinearizeError, match=r"optimizer\.memory small is for whole weights"):
        train(make_recipe(tmp_path, base(root, "llama"), stage("logit_kl", "all", optimizer=SMALL)))


# ---------------------------------------------------------------- what is left to the device


def chosen(recipe: Recipe, folder: Path, memory: int) -> tuple[Recipe, list[str]]:
    told: list[str] = []
    device = Device("tiny", "cuda", memory)
    return choose(recipe, lambda r: Rehearsal(r, None, folder, "bf16", gpu=True), device, told.append), told


def open_recipe(place: Path, folder: Path) -> Recipe:
    auto = stage("logit_kl", "all", optimizer={"lr": 1e-3, "memory": "auto"}, batch={"accumulate": 6})
    return make_recipe(place, folder, auto, runtime={"device": "cpu", "precision": "bf16", "batch": "auto"})


def test_it_is_small_where_full_does_not_fit(root: Path, tmp_path: Path) -> None:
    folder = base(root, "llama", "bfloat16")
    recipe = open_recipe(tmp_path, folder)
    (full,) = estimate(Rehearsal(plainly(recipe), None, folder, "bf16", True), Device("tiny", "cuda", 1)).stages
    one = full.needs(Device("tiny", "cuda", 1))
    found, told = chosen(recipe, folder, one - 1)
    assert found.stages[0].optimizer.memory == "small"
    assert any("full needs" in line and "optimizer.memory is small" in line for line in told)
    found, told = chosen(recipe, folder, 1 << 40)
    assert found.stages[0].optimizer.memory == "full"
    assert (found.stages[0].batch.per_device, found.stages[0].batch.accumulate) == (6, 1)
    assert not is_open(found)
    room = full.memory.parts["activations"] + full.memory.parts["logits"]
    found, _ = chosen(recipe, folder, one + int(1.5 * room))
    assert (found.stages[0].batch.per_device, found.stages[0].batch.accumulate) == (2, 3)


def test_a_run_goes_on_with_what_it_chose(root: Path, tmp_path: Path) -> None:
    recipe = open_recipe(tmp_path, base(root, "llama", "bfloat16"))
    train(recipe)
    record = tmp_path / "run" / "run.json"
    values = json.loads(record.read_text())
    assert values["recipe"]["stages"][0]["optimizer"]["memory"] == "full"
    assert train(recipe)["output"]  # finished, and not another recipe
    values["recipe"]["stages"][0]["optimizer"]["memory"] = "small"
    record.write_text(json.dumps(values))
    assert as_before(recipe, record).stages[0].optimizer.memory == "small"
