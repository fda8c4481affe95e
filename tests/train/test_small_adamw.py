"""AdamW in little memory: what its codes keep, how it rounds, and that it trains and resumes like the plain one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from training import base, killed_after, make_recipe, metrics, same, stage, tensors, train

from linearize.errors import LinearizeError
from linearize.estimate import advice
from linearize.estimate.advice import as_before, choose, is_open, without_auto
from linearize.estimate.estimate import estimate
from linearize.estimate.gpus import Device
from linearize.estimate.memory import Rehearsal
from linearize.job.dry_run import dry_run
from linearize.job.resolve import as_resumed
from linearize.recipe.recipe import Recipe
from linearize.train import runs, small_adamw
from linearize.train.runs import Run
from linearize.train.runtime import check_divided, clip
from linearize.train.small_adamw import BLOCK, SmallAdamW, fresh_state, load, rounded, slices, store

SMALL = {"lr": 1e-3, "memory": "small"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def kept(value: torch.Tensor, name: str) -> torch.Tensor:
    """`value` after it was stored as a moment."""
    ((_, *moments),) = slices(fresh_state(value), *value.shape)
    moment = moments[name == "exp_avg_sq"]
    store(moment, value, signed=name == "exp_avg")
    return load(moment, signed=name == "exp_avg")


def test_codes_keep_digits_of_large_and_small_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(1, 5000, generator=generator) * 10 ** torch.empty(1, 5000).uniform_(-3, 0, generator=generator)
    found = kept(value, "exp_avg")
    blocks = torch.nn.functional.pad(value[0], (0, -5000 % BLOCK)).view(-1, BLOCK).abs().amax(1)
    share = value.abs() / blocks.repeat_interleave(BLOCK)[:5000]
    assert (((found - value) / value).abs()[share > 0.1] < 0.03).all()
    assert (((found - value) / value).abs()[share > 1e-3] < 0.3).all()
    square = kept(value.square(), "exp_avg_sq").sqrt()
    assert ((square - value.abs()).abs() / value.abs())[share > 0.1].max() < 0.03
    # What is in the numerator of an update is in its denominator, too: (255 / 127)^2 at the least codes.
    assert (found.abs() <= 4.04 * square)[value != 0].all()
    assert not kept(torch.zeros(1, 5000), "exp_avg").any()


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
        changes = {"runtime": runtime, "checkpoint": {"every_steps": 6, "save_total_limit": 9}}
        train(make_recipe(tmp_path / place, folder, *stages, **changes))
        return tmp_path / place

    full, small = run("full", "full"), run("small", "small")
    ends = [sum(metrics(place)[-3:]) / 3 for place in (full, small)]
    assert metrics(small)[0] == pytest.approx(metrics(full)[0], rel=5e-3)  # the residual stream is bf16, not float32
    assert ends[1] < 0.9 * metrics(small)[0]
    assert ends[1] == pytest.approx(ends[0], rel=0.05)
    with killed_after(6, monkeypatch), pytest.raises(KeyboardInterrupt):
        run("resumed", "small")
    resumed = run("resumed", "small")
    assert same(tensors(resumed / "run" / "final"), tensors(small / "run" / "final"))


def test_float16_weights_need_masters(root: Path, tmp_path: Path) -> None:
    runtime = {"device": "cpu", "precision": "bf16"}
    stages = [stage("logit_kl", "all", optimizer=SMALL)]
    recipe = make_recipe(tmp_path, base(root, "llama", "float16"), *stages, runtime=runtime)
    with pytest.raises(LinearizeError, match="float16"):
        dry_run(recipe, print)


def test_shards_that_cannot_are_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = stage("logit_kl", "mixer", name="first")
    small = stage("logit_kl", "all", name="last", optimizer=SMALL)
    recipe = make_recipe(tmp_path, base(root, "llama"), full, small)
    with pytest.raises(LinearizeError, match=r"last.*optimizer\.memory.*DeepSpeed's"):
        check_divided(recipe, zero=True)
    with pytest.raises(LinearizeError, match=r"optimizer\.memory.*memory=small"):
        check_divided(recipe, zero=False)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    for asked in (lambda: dry_run(recipe, print), lambda: train(recipe)):
        with pytest.raises(LinearizeError, match=r"optimizer\.memory"):
            asked()
    alike = {**full, "optimizer": SMALL}
    check_divided(make_recipe(tmp_path, base(root, "llama"), stage("logit_kl", "new"), alike, small), zero=False)


def test_blocks_end_with_rows() -> None:
    """So that rows may lie in several processes: 3 rows of 3,000 numbers have 3 x 12 scales, and codes of their own."""
    generator = torch.Generator().manual_seed(4)
    value = torch.randn(3, 3000, generator=generator) * torch.tensor([[1.0], [1e-4], [1e-8]])
    state = fresh_state(value)
    assert state["exp_avg_scale"].shape == (3, 12)
    found = kept(value, "exp_avg")
    for row in range(3):
        alone = fresh_state(value[row : row + 1].expand(2, -1))
        ((_, moment, _),) = slices(alone, 2, 3000)
        store(moment, value[row : row + 1].expand(2, -1), signed=True)
        assert torch.equal(load(moment, signed=True)[0], found[row])


@pytest.mark.parametrize("shape", [(5000,), (3, 3000), (40, 256)], ids=str)
def test_states_of_earlier_versions_are_read(shape: tuple[int, ...]) -> None:
    """Their blocks were those of the flattened parameter, whatever its shape."""
    count, generator = math.prod(shape), torch.Generator().manual_seed(6)
    value = torch.randn(1, count, generator=generator)
    (one,) = slices(fresh_state(value), 1, count)
    for moment, signed in ((one[1], True), (one[2], False)):
        store(moment, value if signed else value.square(), signed=signed)
    earlier = {"step": torch.tensor(7.0)}
    for name, (codes, scale) in zip(("exp_avg", "exp_avg_sq"), one[1:], strict=True):
        earlier |= {name: codes.view(-1), f"{name}_scale": scale.view(-1)}
    weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = SmallAdamW([weight], lr=1e-2)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: earlier}})
    state = optimizer.state[weight]
    assert {name: kind.shape for name, kind in state.items()} == {n: x.shape for n, x in fresh_state(weight).items()}
    assert float(state["step"]) == 7
    moments = [
        load((state[n], state.get(f"{n}_scale")), signed=n == "exp_avg").flatten() for n in ("exp_avg", "exp_avg_sq")
    ]
    for found, expected in zip(moments, (value[0], value[0].square()), strict=True):
        assert ((found - expected).abs().mean() / expected.abs().mean()) < 0.01


@pytest.mark.parametrize("shape", [(3, 3000), (40, 130), (6, 7, 200)], ids=str)
def test_long_rows_take_turns(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of at most SLICE numbers change nothing."""
    ends = []
    for most in (1 << 24, 512):
        monkeypatch.setattr(small_adamw, "SLICE", most)
        weight = torch.nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape))
        optimizer = SmallAdamW([weight], lr=1e-2)
        for _ in range(3):
            weight.grad = weight.detach().sin()
            optimizer.step()
        ends.append(weight.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_gradients_of_two_dtypes_are_clipped_as_torch_does(scale: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(40, 30, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    parameters.append(torch.nn.Parameter(torch.zeros(3)))  # without a gradient
    found = []
    for clipped in (clip, torch.nn.utils.clip_grad_norm_):
        generator = torch.Generator().manual_seed(0)
        for parameter in parameters[:2]:
            parameter.grad = scale * torch.randn(40, 30, generator=generator).to(parameter.dtype)
        norm = clipped(parameters, 1.0)
        found.append([norm, *(parameter.grad for parameter in parameters[:2])])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-2, atol=0)


# ---------------------------------------------------------------- what is left to the device


def chosen(recipe: Recipe, folder: Path, memory: int) -> tuple[Recipe, list[str]]:
    told: list[str] = []
    device = Device("tiny", "cuda", memory)
    return choose(recipe, lambda r: Rehearsal(r, None, folder, "bf16", gpu=True), device, told.append), told


def open_recipe(place: Path, folder: Path) -> Recipe:
    auto = stage("logit_kl", "all", optimizer={"lr": 1e-3, "memory": "auto"}, batch={"gradient_accumulation_steps": 6})
    return make_recipe(place, folder, auto, runtime={"device": "cpu", "precision": "bf16", "batch": "auto"})


def test_what_is_open_is_small_beside_small_shards(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 has one dtype for the source's weights, in all stages."""
    stages = [
        stage("logit_kl", "mixer", name="first", optimizer=SMALL),
        stage("logit_kl", "all", name="last", optimizer={"lr": 1e-3, "memory": "auto"}),
        stage("logit_kl", "new", name="new", optimizer={"lr": 1e-3, "memory": "auto"}),
    ]
    recipe = make_recipe(tmp_path, base(root, "llama"), *stages)
    assert [one.optimizer.memory for one in without_auto(recipe).stages] == ["small", "full", "full"]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert [one.optimizer.memory for one in without_auto(recipe).stages] == ["small", "small", "full"]


@pytest.mark.slow
def test_all_stages_are_small_where_one_shard_is_too_large(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = {"optimizer": {"lr": 1e-3, "memory": "auto"}}
    folder = base(root, "llama", "bfloat16")
    stages = [stage("logit_kl", "mixer", name="first", **auto), stage("logit_kl", "all", name="last", **auto)]
    recipe = make_recipe(tmp_path, folder, *stages, runtime={"device": "cpu", "precision": "bf16"})
    device = Device("tiny", "cuda", 1)
    first, last = (
        one.needs(device)
        for one in estimate(Rehearsal(without_auto(recipe), None, folder, "bf16", True), device).stages
    )
    assert first < last
    found, _ = chosen(recipe, folder, last - 1)
    assert [one.optimizer.memory for one in found.stages] == ["full", "small"]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    found, told = chosen(recipe, folder, last - 1)
    assert [one.optimizer.memory for one in found.stages] == ["small", "small"]
    assert "first: optimizer.memory is small as in last: FSDP2 shards weights once for all stages" in told


def test_it_is_small_where_full_does_not_fit(root: Path, tmp_path: Path) -> None:
    folder = base(root, "llama", "bfloat16")
    recipe = open_recipe(tmp_path, folder)
    (full,) = estimate(Rehearsal(without_auto(recipe), None, folder, "bf16", True), Device("tiny", "cuda", 1)).stages
    one = full.needs(Device("tiny", "cuda", 1))
    found, told = chosen(recipe, folder, one - 1)
    assert found.stages[0].optimizer.memory == "small"
    assert any("full needs" in line and "optimizer.memory is small" in line for line in told)
    found, told = chosen(recipe, folder, 1 << 40)
    assert found.stages[0].optimizer.memory == "full"
    assert (found.stages[0].batch.per_device, found.stages[0].batch.gradient_accumulation_steps) == (6, 1)
    assert not is_open(found)
    room = full.memory.parts["activations"] + full.memory.parts["logits"]
    found, _ = chosen(recipe, folder, one + int(1.5 * room))
    assert (found.stages[0].batch.per_device, found.stages[0].batch.gradient_accumulation_steps) == (2, 3)


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


def test_a_run_goes_on_with_the_blocks_of_a_step_that_its_recipe_says(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` chose the rows of a micro batch alone: another number of blocks is another recipe."""
    folder = base(root, "llama", "bfloat16")

    def asking(rows: int, steps: int) -> Recipe:
        batch = {"per_device": rows, "gradient_accumulation_steps": steps}
        runtime = {"device": "cpu", "precision": "bf16", "batch": "auto"}
        return make_recipe(tmp_path, folder, stage("logit_kl", steps=1, batch=batch), runtime=runtime)

    def split(recipe: Recipe) -> tuple[int, int]:
        batch = as_before(recipe, record).stages[0].batch
        return batch.per_device, batch.gradient_accumulation_steps

    train(asking(1, 4))
    record = tmp_path / "run" / "run.json"
    values = json.loads(record.read_text())
    values["recipe"]["stages"][0]["batch"] |= {"per_device": 2, "gradient_accumulation_steps": 2}
    record.write_text(json.dumps(values))
    assert (split(asking(1, 4)), split(asking(4, 1)), split(asking(1, 3))) == ((2, 2), (2, 2), (1, 3))
    Run(as_resumed(asking(1, 4), "auto"), "auto")
    with pytest.raises(LinearizeError, match="blocks_per_step 4 -> 3"):
        Run(as_resumed(asking(1, 3), "auto"), "auto")
    for module in (advice, runs):  # two processes that take as many blocks together
        monkeypatch.setattr(module, "processes", lambda: 2)
    assert split(asking(1, 2)) == (2, 1)
    Run(as_resumed(asking(1, 2), "auto"), "auto")
    with pytest.raises(LinearizeError, match="blocks_per_step 4 -> 8"):
        Run(as_resumed(asking(1, 4), "auto"), "auto")
