"""The estimate beside what a tiny model really takes on a CPU, and what it says of cards that are not here."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import holds, with_slow
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training import base, make_recipe, stage, train, write_recipe
from transformers import AutoConfig, AutoModelForCausalLM

from linearize.errors import Exit, LinearizeError
from linearize.estimate import memory, tracker
from linearize.estimate.advice import fitting_rows, written
from linearize.estimate.cards import CARDS, per_hour
from linearize.estimate.estimate import estimate, packed_tokens
from linearize.estimate.gpus import Device, card, cpu_rates, present
from linearize.estimate.memory import Rehearsal, divided
from linearize.estimate.repeated_layers import Layers, LayersDiffer, find_layers
from linearize.estimate.step import Step
from linearize.estimate.tracker import Fakes, Tracker, Work, most_of
from linearize.job import checks, resolve
from linearize.job.dry_run import dry_run
from linearize.recipe.recipe import Recipe, load_recipe
from linearize.train import runs
from linearize.train.runtime import make_optimizer
from linearize.train.save import load_converted
from linearize.train.student import Student

SHORT = {"pack": {"seq_len": 16}}
KL, TRANSFER = stage("logit_kl", "all"), stage("attention_transfer")
RECIPES: dict[str, list[dict[str, Any]]] = {
    "transfer": [TRANSFER],
    "all, after a transfer": [TRANSFER, KL],
    "accumulated": [stage("logit_kl", "all", batch={"per_device": 1, "gradient_accumulation_steps": 2})],
    "mixer": [stage("logit_kl", "mixer", batch={"per_device": 3})],
    "sft": [stage("sft", ["new", "lora"])],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


class Saved:
    """Bytes that autograd keeps of what is no parameter; within `hooks`."""

    def __init__(self, model: Any) -> None:
        self.known = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
        self.storages: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def allocated(work: Any) -> int:
    """The most bytes that torch's CPU allocator gave out at a time while `work` ran, by the profiler's records."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


@pytest.mark.parametrize("name", with_slow(RECIPES, "accumulated", "all, after a transfer", "mixer", "sft"))
def test_parts_are_those_of_a_real_step(root: Path, tmp_path: Path, name: str) -> None:
    """fp32 on a CPU: weights, gradients, optimizer and teacher exactly, what autograd saves within 10 %."""
    recipe = make_recipe(tmp_path, base(root, "llama"), *RECIPES[name])
    rehearsal = Rehearsal(recipe, None, base(root, "llama"), "no", gpu=False)
    found = [rehearsal.stage(number) for number in range(len(recipe.stages))][-1]
    assert not found.reason

    model = load_converted(base(root, "llama"), torch.float32, False)
    student = Student(model)
    for of_recipe in recipe.stages:
        step = Step(recipe, of_recipe, student, "no")
        step.prepare()
    optimizer = make_optimizer(student.groups(step.stage, step.parameters), step.stage, torch.device("cpu"))
    saved, most = Saved(model), [0]
    with saved.hooks:
        step.micro_batch(step.batch(), lambda: most.append(sum(saved.storages.values())))
    optimizer.step()
    moments = [x for values in optimizer.state.values() for key, x in values.items() if key != "step"]
    rotary = sum(buffer.nbytes for buffer in model.buffers())
    assert found.parts["weights"] == sum(p.nbytes for p in model.parameters()) + rotary
    assert found.parts["optimizer"] == sum(x.nbytes for x in moments)
    assert found.parts["teacher"] == student.teacher_bytes() == found.teacher_copy
    gradients = sum(p.grad.nbytes for p in step.parameters if p.grad is not None)
    if step.stage.batch.gradient_accumulation_steps > 1:
        assert found.parts["gradients"] == gradients
    assert found.parts["gradients"] <= gradients
    if step.transfers:  # the pass of the teacher around it keeps more
        assert found.saved > most[1]
    else:
        assert found.saved == pytest.approx(max(most), rel=0.1)
    if step.stage.batch.gradient_accumulation_steps == 1:
        optimizer.zero_grad()
    batch = step.batch()
    real = allocated(lambda: step.micro_batch(batch))
    new = (
        ("activations", "logits", "gradients")
        if step.stage.batch.gradient_accumulation_steps == 1
        else ("activations", "logits")
    )
    assert sum(found.parts[part] for part in new) == pytest.approx(real, rel=0.1)
    assert found.checkpoint == sum(tensor.nbytes for tensor in student.state().values())


@pytest.mark.parametrize("name", ["sft", pytest.param("all, after a transfer", marks=pytest.mark.slow)])
def test_progress_of_a_rehearsal_ends_with_its_last_stage(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of a stage each for forward, backward and evaluation, of a transfer by layers; all where one fails."""
    recipe, told = make_recipe(tmp_path, base(root, "llama"), *RECIPES[name]), list[float]()
    made = Rehearsal(recipe, None, base(root, "llama"), "no", False, advance=told.append)
    estimate(made, card("h100"))
    assert told[0] == Rehearsal.MADE
    assert sum(told) == pytest.approx(Rehearsal.parts(recipe))
    assert len(told) > 3 * len(RECIPES[name])
    assert max(told) == 1

    def broken(step: Step, *rest: Any) -> None:
        raise ValueError("values are asked for")

    monkeypatch.setattr(Step, "micro_batch", broken)
    told.clear()
    estimate(made, card("h100"))
    assert sum(told) == pytest.approx(Rehearsal.STAGE * len(RECIPES[name]))


def test_masters_are_what_becomes_float32(root: Path, tmp_path: Path) -> None:
    folder = base(root, "llama", "bfloat16")
    recipe = make_recipe(tmp_path, folder, KL, runtime={"device": "cpu", "precision": "bf16"})
    found = Rehearsal(recipe, None, folder, "bf16", gpu=True).stage(0)
    model = load_converted(folder, "auto", False)
    parameters = sum(p.numel() for p in model.parameters())
    assert found.parts["masters"] == 4 * parameters
    assert found.parts["optimizer"] == 8 * parameters
    new = sum(p.numel() for name, p in model.named_parameters() if ".mixer." in name)
    assert found.parts["teacher"] == 2 * (parameters - new)
    assert found.parts["weights"] == sum(buffer.nbytes for buffer in model.buffers())


@pytest.mark.slow
def test_checkpointing_saves_and_keeps_no_casts(root: Path, tmp_path: Path) -> None:
    folder = base(root, "llama", "bfloat16")

    def saved(on: bool) -> int:
        runtime = {"device": "cpu", "precision": "bf16", "gradient_checkpointing": on}
        found = Rehearsal(make_recipe(tmp_path, folder, KL, runtime=runtime), None, folder, "bf16", gpu=False).stage(0)
        return found.saved

    parameters = sum(p.numel() for p in load_converted(folder, "auto", False).parameters())
    assert saved(False) - saved(True) > 2 * parameters // 2


@pytest.mark.slow
def test_a_longer_block_and_more_rows_take_more(root: Path, tmp_path: Path) -> None:
    folder = base(root, "llama")

    def growing(**batch: int) -> int:
        recipe = make_recipe(tmp_path, folder, stage("logit_kl", "all", batch=batch))
        parts = Rehearsal(recipe, None, folder, "no", gpu=False).stage(0).parts
        return parts["activations"] + parts["logits"]

    assert growing(per_device=8) == pytest.approx(2 * growing(per_device=4), rel=0.25)


@pytest.mark.slow
def test_products_are_those_of_the_weights(root: Path, tmp_path: Path) -> None:
    """Frozen: two passes forward, one backward; 2 products a weight and token, and little for attention."""
    folder = base(root, "llama")
    recipe = make_recipe(tmp_path, folder, stage("logit_kl", "all", batch={"per_device": 4}), data={
        "train": {"files": ["train.jsonl"]}, "pack": {"seq_len": 8}})  # fmt: skip
    found = Rehearsal(recipe, None, folder, "no", gpu=False).stage(0)
    model = load_converted(folder, torch.float32, False)
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and ".mixer." not in n)
    assert 4 * 8 * 2 * weights * 4 < found.work.flops < 4 * 8 * 2 * weights * 4 * 2


HYBRIDS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 10},
    "gemma3_text": {
        "num_hidden_layers": 12,
        "sliding_window": 8,
        "layer_types": 6 * ["sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.slow
def test_layers_that_are_alike_are_rehearsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A few layers say the same as all of them: peak by part, work, what waits on the host; of each kind of stage.
    All of them run on torch's own fake tensors, which know nothing of shorter keys."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(name, **shape, **heads, **HYBRIDS[name], dtype="bfloat16")
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(tmp_path / "source")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    kinds = TRANSFER, stage("logit_kl", "new", name="new"), stage("logit_kl", ["new", "lora"], name="lora"), KL
    convert = {"mechanism": "gsa", "options": {"slots": 8, "window": 4}, "keep_softmax": "auto:25%"}
    runtime = {"device": "cpu", "precision": "bf16", "gradient_checkpointing": True, "offload_activations": True}
    recipe = make_recipe(tmp_path, tmp_path / "source", *kinds, convert=convert, runtime=runtime)
    left_out: list[int] = []

    def rehearse(few: bool) -> list[Any]:
        def lists(models: Any) -> Any:
            found = find_layers(models) if few else []
            left_out.extend(len(one.stands_for) for one in found)
            return found

        monkeypatch.setattr(memory, "find_layers", lists)
        monkeypatch.setattr(memory, "Fakes", Fakes if few else FakeTensorMode)
        with resolve.resolve(recipe) as job:
            rehearsal = Rehearsal(recipe, job.base.planned, job.base.folder, "bf16", gpu=True)
            return [rehearsal.stage(number) for number in range(len(kinds))]

    of_few, of_all = rehearse(True), rehearse(False)
    assert len(left_out) == len(kinds)
    assert min(left_out) > 0
    for few, whole in zip(of_few, of_all, strict=True):
        assert not few.reason
        # The mean of a transfer's losses reads four bytes a layer.
        assert few.work.moved == pytest.approx(whole.work.moved, rel=1e-4)
        assert replace(few, work=replace(few.work, moved=whole.work.moved)) == whole


class Numbered(nn.Module):
    """A layer that knows its number, and has a 2, as layer 2 has by chance."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.number, self.groups = number, 2
        self.linear = nn.Linear(width, width)


def test_few_layers_of_each_kind_run() -> None:
    """The first of a kind, another one, and the last two of all: not one more for a number that is a layer's by chance,
    nor for the first one, before which nothing trains."""
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([Numbered(place, 8 if place % 4 == 1 else 4) for place in range(12)])}
    )
    (found,) = find_layers([model])
    assert set(range(12)) - found.stands_for.keys() == {0, 1, 2, 5, 10, 11}
    assert set(found.stands_for.values()) == {2, 5}


def test_a_layer_of_another_form_is_rehearsed_with_all(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where layers that look alike cannot be left out, the model is rehearsed whole."""
    recipe = make_recipe(tmp_path, base(root, "llama"), KL)
    asked: list[int] = []
    count = Rehearsal._count

    def counted(self: Rehearsal, step: Step, models: Any, lists: Any) -> Any:
        asked.append(len(lists))
        if lists:
            raise LayersDiffer("passes on more")
        return count(self, step, models, lists)

    monkeypatch.setattr(memory, "find_layers", lambda models: [Layers(0, [], {})])
    monkeypatch.setattr(Rehearsal, "_count", counted)
    assert not Rehearsal(recipe, None, base(root, "llama"), "no", gpu=False).stage(0).reason
    assert asked == [1, 0]


@pytest.mark.slow
def test_a_stage_is_rehearsed_again_only_where_something_of_it_changed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rows in the last stage: that one alone. What an earlier stage trains changes the later ones."""
    counted: list[str] = []
    count = Rehearsal._count
    monkeypatch.setattr(
        Rehearsal, "_count", lambda self, step, *rest: counted.append(step.stage.name) or count(self, step, *rest)
    )
    first = Rehearsal(make_recipe(tmp_path, base(root, "llama"), TRANSFER, KL), None, base(root, "llama"), "no", False)

    def counts(before: dict[str, Any], last: dict[str, Any]) -> list[str]:
        counted.clear()
        again = first.changed(make_recipe(tmp_path, base(root, "llama"), before, last), lambda done: None)
        assert not any(again.stage(number).reason for number in range(2))
        return list(counted)

    fewer = KL | {"batch": {"per_device": 1, "gradient_accumulation_steps": 2}}
    assert counts(TRANSFER, KL) == ["attention_transfer", "logit_kl"]
    assert counts(TRANSFER, fewer) == ["logit_kl"]
    assert counts(TRANSFER, KL) == []
    assert counts(KL | {"name": "before"}, KL) == ["before", "logit_kl"]


def test_bytes_are_those_that_operations_move() -> None:
    """A product's are in its flops; of a table only the rows that are taken count, and a view moves nothing."""
    with FakeTensorMode(), Tracker() as tracker:
        a, table, rows = torch.empty(4, 8), torch.empty(1000, 8), torch.zeros(3, dtype=torch.long)
        tracker.restart()
        a.view(8, 4).t()
        assert tracker.work == Work()
        torch.exp(a)
        assert tracker.work == Work(0, 1, 2 * a.nbytes)
        a.add_(a)
        assert tracker.work.launches == 2
        tracker.restart()
        torch.nn.functional.embedding(rows, table)
        assert tracker.work == Work(0, 1, 3 * 3 * 8 * 4)
        tracker.restart()
        a @ a.t()
        assert tracker.work == Work(2 * 4 * 8 * 4, 1, 0)


# ---------------------------------------------------------------- the time around the steps


def timed(start: Path, folder: Path, device: Device | None = None, **changes: Any) -> dict[str, float]:
    """Hours of the parts of a run of 9 steps that starts from a model, on a device whose rates are known."""
    stages = stage("attention_transfer", steps=9), stage("logit_kl", "all", steps=9)
    recipe = make_recipe(folder, start, *stages, **changes)
    with resolve.resolve(recipe) as job:
        rehearsal = Rehearsal(recipe, job.base.planned, job.base.folder, "no", gpu=False)
        return estimate(rehearsal, device or small(1 << 40)).summary()["hours_of"]


HELD = {"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": 32}}


@pytest.mark.slow
def test_evaluations_take_time(root: Path, tmp_path: Path) -> None:
    few = {"max_tokens": 64}
    once = timed(base(root, "llama"), tmp_path, data=HELD, eval=few)["evaluation"]
    often = timed(base(root, "llama"), tmp_path, data=HELD, eval={**few, "every_steps": 2})["evaluation"]
    assert 0 < once < often
    more = timed(base(root, "llama"), tmp_path, data=HELD, eval={"max_tokens": 640})["evaluation"]
    written = timed(base(root, "llama"), tmp_path, data=HELD, eval={"max_tokens": 1})["evaluation"]
    assert more - written == pytest.approx(10 * (once - written), rel=0.05)
    # heldout.txt has fewer tokens than the default asks for: no more than its bytes are read.
    size = (tmp_path / "heldout.txt").stat().st_size
    full = timed(base(root, "llama"), tmp_path, data=HELD)["evaluation"]
    assert full == timed(base(root, "llama"), tmp_path, data=HELD, eval={"max_tokens": size})["evaluation"]


@pytest.mark.slow
@pytest.mark.parametrize("device", [None, Device("cpu", "cpu", 1 << 40)], ids=["card", "cpu"])
def test_choosing_layers_takes_time(root: Path, tmp_path: Path, device: Device | None) -> None:
    def choosing(**convert: Any) -> float:
        asked = {"mechanism": "gsa", "options": {"slots": 8, "chunk_size": 16}, **convert}
        return timed(base(root, "llama").parent / "source", tmp_path, device, data=HELD, convert=asked)["choosing"]

    assert choosing(keep_softmax="0") == 0
    by_restoring, by_swaps = choosing(keep_softmax="auto:1"), choosing(keep_softmax="auto:1", score_by="swaps")
    assert by_swaps > 0
    assert by_restoring > 0
    assert choosing(keep_softmax="auto:1", keep_heads="auto:1") > by_restoring
    assert choosing(keep_softmax="0", kept_window="auto:64") > 0
    assert choosing(keep_softmax="auto:1", kept_window="auto:64") > by_restoring
    assert choosing(keep_softmax="0", kept_window="auto:4096") == 0  # the model knows 256 tokens: nothing is measured


def test_a_cpu_has_a_rate_for_products_bytes_and_launches() -> None:
    rates = cpu_rates(torch.float32)
    assert min(rates) > 0
    assert rates.seconds(Work(1e9, 0, 0)) == pytest.approx(1e9 * rates.flop)
    assert rates.seconds(Work(1e9, 100, 1e6)) > rates.seconds(Work(1e9, 100, 0)) > rates.seconds(Work(1e9, 0, 0))


# ---------------------------------------------------------------- a card that is not here


def small(memory: int) -> Device:
    return Device("tiny", "cuda", memory, flops=1e12, bandwidth=1e11, watts=100.0)


def test_hours_energy_and_price_add_up(root: Path, tmp_path: Path) -> None:
    folder = base(root, "llama")
    recipe = make_recipe(tmp_path, folder, {**TRANSFER, "steps": 100}, {**KL, "steps": 50})
    cost = estimate(Rehearsal(recipe, None, folder, "bf16", gpu=True), small(1 << 40))
    found = cost.summary(price=2.5)
    assert found["hours_of"]["training"] == pytest.approx(sum(c.tokens / c.tokens_per_s / 3600 for c in cost.stages))
    assert found["hours"] == pytest.approx(sum(found["hours_of"].values()))
    assert found["hours_of"].keys() == {"training", "choosing", "evaluation", "start and checks"}
    assert [found["hours_of"][part] for part in ("choosing", "evaluation")] == [0, 0]  # the base is converted
    assert found["kwh"] == pytest.approx(found["hours"] * 0.1)
    assert found["price"] == pytest.approx(found["hours"] * 2.5)
    assert [c.tokens for c in cost.stages] == [100 * 2 * 32, 50 * 2 * 32]
    unknown = Device("other", "cuda", 1 << 40)
    assert estimate(Rehearsal(recipe, None, folder, "bf16", gpu=True), unknown).summary()["hours"] is None


def test_recorded_steps_wait_less_for_the_host(root: Path, tmp_path: Path) -> None:
    folder = base(root, "llama")

    def rate(**runtime: Any) -> float | None:
        recipe = make_recipe(tmp_path, folder, KL, runtime=runtime)
        return estimate(Rehearsal(recipe, None, folder, "bf16", gpu=True), small(1 << 40)).stages[0].tokens_per_s

    auto, plain = rate(), rate(graphs=False)
    assert auto is not None
    assert plain is not None
    assert auto > 2 * plain
    assert rate(gradient_checkpointing=True) < auto  # those are not recorded


def test_compiled_layers_and_faster_memory_take_less_time(root: Path, tmp_path: Path) -> None:
    folder = base(root, "llama")

    def rate(compiled: bool, device: Device) -> float:
        recipe = make_recipe(tmp_path, folder, KL, runtime={"compile": compiled})
        found = estimate(Rehearsal(recipe, None, folder, "bf16", gpu=True), device).stages[0].tokens_per_s
        assert found is not None
        return found

    slow = replace(small(1 << 40), flops=1e15, bandwidth=1e7)  # a card that waits for its memory
    assert rate(True, slow) > 1.5 * rate(False, slow)
    assert rate(False, replace(slow, bandwidth=2e7)) == pytest.approx(2 * rate(False, slow), rel=0.01)


@pytest.mark.parametrize(("given", "found"), [("2.5/h", 2.5), ("3", 3.0), (None, None)])
def test_a_price(given: str | None, found: float | None) -> None:
    assert per_hour(given) == found


@pytest.mark.parametrize(("given", "words"), [("h20", "'h200'"), ("tpu", "Known: a100-40g")])
def test_unknown_cards(given: str, words: str) -> None:
    with pytest.raises(LinearizeError, match=words):
        card(given)


def test_cards_have_every_figure() -> None:
    for name in CARDS:
        one = card(name)
        assert None not in (one.flops, one.bandwidth, one.watts)
        assert one.memory > one.reserved > 0


def test_a_process_that_may_take_a_part_of_a_card_plans_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SimpleNamespace(name="NVIDIA H200", total_memory=139 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: whole)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 0.5)
    found = present(cpu=False)
    assert found.memory == whole.total_memory // 2
    assert found.flops == card("h200").flops
    assert present(cpu=True).kind == "cpu"


def test_shards_divide_the_source_and_not_the_mixers(root: Path, tmp_path: Path) -> None:
    folder = base(root, "llama", "bfloat16")
    recipe = make_recipe(tmp_path, folder, KL, runtime={"device": "cpu", "precision": "bf16"})
    one = Rehearsal(recipe, None, folder, "bf16", gpu=True).stage(0)
    two = divided(one, 2, sharded=True)
    whole = one.whole["optimizer"]
    assert two.parts["optimizer"] == whole + (one.parts["optimizer"] - whole) // 2
    assert two.parts["activations"] == one.parts["activations"] + two.gathered > one.parts["activations"]
    alone = divided(one, 1, sharded=True)
    assert (alone.parts, alone.gathered) == (one.parts, 0)
    assert divided(one, 2, sharded=False).parts == one.parts


def test_scratch_memory_of_operators_counts(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer of a model of 0.6B took a GiB more than was estimated: what GSA's backward pass holds meanwhile."""
    folder = base(root, "llama", "bfloat16")
    runtime = {"device": "cpu", "precision": "bf16"}
    recipe = make_recipe(tmp_path, folder, {**TRANSFER, "batch": {"per_device": 64}}, runtime=runtime)
    held: list[int] = []

    def peak(share: float) -> int:
        def most(host: Any, inputs: Any) -> int:
            held.append(most_of(host, inputs))
            return int(share * held[-1])

        monkeypatch.setattr(tracker, "most_of", most)
        return Rehearsal(recipe, None, folder, "bf16", gpu=True).stage(0).peak

    without, as_it_is = peak(0.0), peak(1.0)
    assert len(held) % 2 == 0  # the same calls in both, each followed once however many layers there are
    assert held[: len(held) // 2] == held[len(held) // 2 :]
    assert without < as_it_is <= without + max(held)


def test_shards_have_the_masters_of_later_stages_from_the_start(root: Path, tmp_path: Path) -> None:
    """Shards have one dtype: two cards took 28.5 GiB for a transfer that was estimated at 21."""
    folder = base(root, "llama", "bfloat16")

    def masters(memory: str) -> int:
        last = {**KL, "optimizer": {"lr": 1e-3, "memory": memory}}
        stages = stage("attention_transfer", ["new"]), last
        recipe = make_recipe(tmp_path, folder, *stages, runtime={"device": "cpu", "precision": "bf16"})
        found = Rehearsal(recipe, None, folder, "bf16", gpu=True).stage(0)
        two = divided(found, 2, sharded=True)
        return two.parts["masters"] - divided(replace(found, early=0), 2, sharded=True).parts["masters"]

    model = load_converted(folder, torch.bfloat16, False)
    source = sum(p.nbytes for name, p in model.named_parameters() if ".mixer." not in name)
    assert masters("full") == source // 2
    assert masters("small") == 0


def test_what_is_gathered_does_not_grow_with_the_rows(root: Path, tmp_path: Path) -> None:
    """Two cards of 80 GB took two rows of an 8B model where eight fit: seven gathered GiB counted as rows."""
    folder = base(root, "llama", "bfloat16")
    recipe = make_recipe(tmp_path, folder, {**KL, "batch": {"per_device": 1, "gradient_accumulation_steps": 8}})
    device = small(1 << 40)
    (alone,) = estimate(Rehearsal(recipe, None, folder, "bf16", gpu=True), device).stages
    gathered = 10 * alone.memory.peak
    parts = {**alone.memory.parts, "activations": alone.memory.parts["activations"] + gathered}
    sharded = replace(alone, memory=replace(alone.memory, parts=parts, gathered=gathered))
    of_row = alone.memory.parts["activations"] + alone.memory.parts["logits"]
    for rows in (1, 2, 4, 8):
        room = int(alone.needs(device) + (1.1 * rows - 1) * of_row) + 9
        more = int(sharded.needs(device) - alone.needs(device))
        assert fitting_rows(alone, small(room), 8) == fitting_rows(sharded, small(room + more), 8) == rows


# ---------------------------------------------------------------- refusals


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device with so many bytes, for every model."""

    def make(memory: int) -> None:
        monkeypatch.setattr(resolve, "SMALL", 0.0)
        monkeypatch.setattr(resolve, "present", lambda cpu: Device("tiny", "cuda", memory))

    return make


def needs(recipe: Recipe, folder: Path) -> int:
    return max(c.needs(small(1)) for c in estimate(Rehearsal(recipe, None, folder, "no", gpu=True), small(1)).stages)


ALONE = """
import sys
from pathlib import Path
from linearize.estimate.memory import Rehearsal
from linearize.recipe.recipe import load_recipe
recipe = load_recipe(sys.argv[1])
found = [Rehearsal(recipe, None, Path(recipe.model.base), "no", gpu=False).stage(0) for _ in range(2)]
assert found[0] == found[1], found
from bitsandbytes.backends.utils import CODE
CODE["nf4"].tolist()
"""


@pytest.mark.slow
def test_nothing_is_imported_while_tensors_are_fake(root: Path, tmp_path: Path) -> None:
    """Tables that a package makes when it is imported are real, and no part of an estimate: peft's of bitsandbytes."""
    recipe = write_recipe(tmp_path, base(root, "llama"), KL)
    subprocess.run([sys.executable, "-c", ALONE, str(recipe)], check=True)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_change_that_fits(root: Path, tmp_path: Path, crowded: Any) -> None:
    folder = base(root, "llama")
    recipe = make_recipe(tmp_path, folder, stage("logit_kl", "all", batch={"per_device": 8}))
    smaller = make_recipe(tmp_path / "b", folder, stage("logit_kl", "all", batch={"per_device": 2}))
    crowded((needs(recipe, folder) + needs(smaller, folder)) // 2)
    with pytest.raises(LinearizeError, match="logit_kl") as refused:
        train(recipe)
    assert refused.value.code == Exit.RESOURCE
    assert not (tmp_path / "run").exists()
    advice = refused.value.message.partition("This fits: ")[2]
    assert advice
    path = write_recipe(tmp_path, folder, stage("logit_kl", "all", batch={"per_device": 8}))
    train(load_recipe(path, shlex.split(advice)))


@pytest.mark.slow
def test_what_nothing_makes_fit_says_so(root: Path, tmp_path: Path, crowded: Any) -> None:
    crowded(1000)
    with pytest.raises(LinearizeError, match=r"change.*linearize"):
        train(make_recipe(tmp_path, base(root, "llama"), KL))


@pytest.mark.slow
def test_a_source_is_not_converted_for_nothing(root: Path, tmp_path: Path, crowded: Any) -> None:
    crowded(1000)
    convert = {"mechanism": "gsa", "options": {"slots": 8, "chunk_size": 16}}
    recipe = make_recipe(tmp_path, base(root, "llama").parent / "source", TRANSFER, convert=convert)
    with pytest.raises(LinearizeError, match="attention_transfer needs"):
        train(recipe)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_told_before(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(tmp_path, base(root, "llama"), KL)
    monkeypatch.setattr(resolve, "SMALL", 0.0)
    usage = checks.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(LinearizeError, match=r"needs.*checkpoints") as refused:
        train(recipe)
    assert refused.value.code == Exit.RESOURCE


@pytest.mark.parametrize("every", with_slow([1, 200], 1))
def test_disk_is_what_a_run_writes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """All of the training text, however little the stages ask for; and checkpoints within stages that write some."""
    stages = [stage("attention_transfer"), stage("logit_kl", "all", data=SHORT)]
    data = {"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": 32}}
    more: dict[str, Any] = {"checkpoint": {"every_steps": every, "save_total_limit": 1}, "eval": {"max_tokens": 64}}
    recipe = make_recipe(tmp_path, base(root, "llama"), *stages, data=data, **more)
    found = dry_run(recipe, print)["disk"]
    place, fullest, drop = tmp_path / "run", list[int](), runs.discard

    def held(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def look(checkpoint: Path) -> None:
        fullest.append(held(place / "checkpoints"))
        drop(checkpoint)

    monkeypatch.setattr(runs, "discard", look)
    train(recipe)
    packed = held(place / "cache") - 4096 * len([*(place / "cache").iterdir()])  # without headers
    assert packed == pytest.approx(found["tokens"], rel=0.2)
    assert found["tokens"] > 2 * 4 * (tmp_path / "train.jsonl").stat().st_size  # once for each length of rows
    assert max(fullest) == pytest.approx(found["checkpoints"], rel=0.2)
    assert (max(fullest) > 2 * held(place / "checkpoints")) == (every == 1)


@pytest.mark.parametrize(
    ("words", "source", "tokens"),
    [
        (257, {"files": ["a.txt"]}, 3008),
        (2048, {"files": ["a.txt"]}, 1008),
        (2048, {"files": ["a.txt", "a.parquet"]}, 4000),
        (2048, {"mix": [{"source": {"files": ["a.txt"]}}, {"source": {"demo": "packages"}}]}, 1008 + 64),
        (2048, {"demo": "train"}, 2_666_672),
        (2048, {"path": "some/set"}, 128),
        (2048, {"path": "some/set", "streaming": True}, 128),
    ],
)
def test_packed_text_is_counted_by_bytes(
    root: Path, tmp_path: Path, words: int, source: dict[str, Any], tokens: int
) -> None:
    for name in ("a.txt", "a.parquet"):
        (tmp_path / name).write_bytes(b"a" * 3000)
    recipe = make_recipe(tmp_path, base(root, "llama"), KL, KL | {"name": "again"}, data={"train": source} | SHORT)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=words))
    model = SimpleNamespace(config=config, main_input_name="input_ids", can_generate=lambda: True)
    rehearsal: Any = SimpleNamespace(recipe=recipe, model=model)
    costs: Any = [SimpleNamespace(stage=one, tokens=128) for one in recipe.stages]
    assert packed_tokens(rehearsal, costs, None) == tokens


def test_a_missing_package_is_told_before(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    convert = {"mechanism": "gsa", "options": {"slots": 8, "chunk_size": 16}}
    source = base(root, "llama").parent / "source"
    recipe = make_recipe(tmp_path, source, TRANSFER, convert=convert, data={"train": {"path": "some/set"}})
    with pytest.raises(LinearizeError, match=r"some/set.*needs"):
        train(recipe)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- the command


def test_the_command_prints_and_measures(linearize: Any, root: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, base(root, "llama"), TRANSFER, KL)
    code, out, err = linearize("estimate", str(recipe), "--price", "2.5/h", "--measure", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [row["measured"]["tokens_per_s"] > 0 for row in found["stages"]] == [True, True]
    for row in found["stages"]:  # the time is that of what was measured
        assert row["hours"] == pytest.approx(row["tokens"] / row["measured"]["tokens_per_s"] / 3600, rel=0.01)
    assert found["hours_of"]["training"] == pytest.approx(sum(row["hours"] for row in found["stages"]), rel=0.01)
    assert found["price"] > 0
    assert found["disk"]["total"] > 0
    assert re.search(r"disk [\d.]+ \w+ when it is fullest \(checkpoints ", " ".join(err.split()))
    assert all(part in err for part in ("weights", "optimizer", "teacher", "logits"))
    assert holds(err, "CPU")
    assert re.search(r"price [\d.]+ at 2.5 an hour$", " ".join(err.split()))
    code, out, err = linearize("estimate", str(recipe), "--gpu", "h100", "--json")
    assert (code, json.loads(out)["device"]["name"]) == (0, "h100"), err
    assert "whole process" not in err
    code, _, err = linearize("estimate", str(recipe), "--gpu", "h100", "--measure")
    assert (code, "leave out --gpu" in err) == (Exit.USAGE, True)


def test_advice_is_yaml() -> None:
    assert written({"per_device": 1, "on": True, "r": 32.0, "of": ["a"]}) == "{per_device: 1, on: true, r: 32, of: [a]}"
