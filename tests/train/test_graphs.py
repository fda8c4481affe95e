"""runtime.graphs: recorded micro batches give the losses and weights of plain ones, and steps stay plain where they
cannot be recorded. Without a GPU a recording is the same code, run when it is replayed."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import base, make_recipe, metrics, same, stage, tensors, train

from linearize.errors import LinearizeError
from linearize.finetune import finetune
from linearize.job.dry_run import dry_run
from linearize.train import graphs, loop, runtime, session, speed

STEPS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Recordings on a CPU from here on; a number for each replay."""
    counted: list[int] = []

    def record(run: Callable[[], None], x: Tensor) -> Callable[[], None]:
        return lambda: (counted.append(1), run())[1]

    @contextlib.contextmanager
    def watch() -> Iterator[list[str]]:
        yield []

    monkeypatch.setattr(loop, "GraphedSteps", functools.partial(graphs.GraphedSteps, record=record, watch=watch))
    for module in (loop, session):
        monkeypatch.setattr(module, "unrecordable", lambda *given: "")
    return counted


@pytest.mark.parametrize(
    ("model", "one"),
    [
        pytest.param("llama", stage("attention_transfer", steps=STEPS), id="transfer"),
        pytest.param(
            "llama",
            stage("logit_kl", "all", steps=STEPS, batch={"per_device": 1, "gradient_accumulation_steps": 2}),
            id="two micro batches",
        ),
        pytest.param("gpt2", stage("sft", "all", "gpt2", steps=STEPS), id="dropout"),
        pytest.param(
            "llama",
            stage("logit_kl", ["new", "lora"], steps=STEPS, loss={"kl": 1.0, "ce": 0.5, "chunk_size": 8}),
            id="lora, some tokens at a time",
        ),
    ],
)
def test_the_run_is_the_same_bit_for_bit(
    root: Path, tmp_path: Path, replayed: list[int], model: str, one: dict[str, Any]
) -> None:
    layers, options = ("1", {"window": 8, "sink": 1}) if model == "llama" else ("all", {})
    for on in (False, True):
        assert not replayed
        given = {"device": "cpu", "graphs": on}
        train(make_recipe(tmp_path / str(on), base(root, model, layers=layers, **options), one, runtime=given))
    micro = one["batch"].get("gradient_accumulation_steps", 1)
    assert len(replayed) == (STEPS - graphs.PLAIN_STEPS - 1) * micro + 1  # one replay twice
    assert metrics(tmp_path / "True") == metrics(tmp_path / "False")
    assert same(*(tensors(tmp_path / str(on) / "run" / "final") for on in (True, False)))


def test_losses_that_are_read_later_are_the_same(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "FUSED", ("cpu",))
    one = stage("logit_kl", "all", steps=STEPS, loss={"kl": 1.0, "ce": 0.5})
    for on in (False, True):
        monkeypatch.setattr(loop, "DEFERRING", ("cpu",) if on else ())
        train(make_recipe(tmp_path / str(on), base(root, "llama"), one, checkpoint={"every_steps": 4}))
    for key in ("step", "loss", "grad_norm", "lr", "kl", "ce"):
        assert metrics(tmp_path / "True", key) == metrics(tmp_path / "False", key)
    assert same(*(tensors(tmp_path / str(on) / "run" / "final") for on in (True, False)))


@pytest.mark.slow
def test_all_that_is_fast_ends_within_the_noise_of_a_seed(
    root: Path, tmp_path: Path, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded, compiled, with a fused optimizer and losses read later, in bf16: not half as far from the plain run as
    another seed is, in the mean of all steps."""
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="aot_eager"))
    monkeypatch.setattr(loop, "device_ms", lambda work: work())
    monkeypatch.setattr(speed, "card_flops", lambda: None)
    one = stage("logit_kl", "all", steps=12, batch={"gradient_accumulation_steps": 2})
    found = dict[str, Tensor]()
    for name, seed in (("plain", 42), ("other", 43), ("fast", 42)):
        fast = name == "fast"
        if fast:
            monkeypatch.setattr(runtime, "FUSED", ("cpu",))
            monkeypatch.setattr(loop, "DEFERRING", ("cpu",))
        given = {"device": "cpu", "precision": "bf16", "graphs": fast, "compile": fast}
        train(make_recipe(tmp_path / name, base(root, "llama", layers="1"), one, runtime=given, seed=seed))
        found[name] = torch.tensor(metrics(tmp_path / name))
    assert replayed
    fast, other = ((found[name] - found["plain"]).abs().mean() for name in ("fast", "other"))
    assert fast < other / 2


def test_a_stage_ends_with_its_speed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that is watched trains like the others, and each figure is in the line."""

    def watched(work: Callable[[], Any]) -> float:
        work()
        return 0.0

    monkeypatch.setattr(runtime, "FUSED", ("cpu",))
    monkeypatch.setattr(loop, "device_ms", watched)
    monkeypatch.setattr(speed, "card_flops", lambda: 1e6)
    one, said = stage("logit_kl", "all", steps=loop.WATCHED + 4), list[str]()
    for on in (False, True):
        monkeypatch.setattr(loop, "DEFERRING", ("cpu",) if on else ())
        finetune(make_recipe(tmp_path / str(on), base(root, "llama"), one), say=said.append)
    assert metrics(tmp_path / "True") == metrics(tmp_path / "False")
    (line,) = [text for text in said if "tokens/s" in text]
    share = re.search(r"([\d.]+)% of the card's peak FLOP/s", line)
    assert share
    assert float(share[1]) > 0
    assert "waits 100" in line


def test_a_step_that_is_not_finite_changes_nothing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is read after later ones have run."""
    monkeypatch.setattr(runtime, "FUSED", ("cpu",))
    monkeypatch.setattr(loop, "DEFERRING", ("cpu",))
    monkeypatch.setattr(loop, "READ_SECONDS", 1e9)
    plain, seen = loop.StageLoop._micro_batch, list[Tensor]()

    def spoiled(self: loop.StageLoop, batch: Any, tokens: Any) -> Any:
        found, terms = plain(self, batch, tokens)
        seen.append(torch.cat([p.detach().flatten() for p in self.parameters]))
        if len(seen) == 3:
            self.parameters[0].grad.fill_(torch.nan)  # type: ignore[union-attr]
        return found, terms

    monkeypatch.setattr(loop.StageLoop, "_micro_batch", spoiled)
    with pytest.raises(LinearizeError, match=r"norm is nan at step 3 of logit_kl"):
        train(make_recipe(tmp_path, base(root, "llama"), stage("logit_kl", "all", steps=STEPS)))
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], seen[3])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"device": torch.device("cpu")}, "GPU"),
        ({"sharded": True}, "shards"),
        ({"kind": "images"}, "images"),
        ({"runtime": {"gradient_checkpointing": True}}, "gradient_checkpointing"),
        ({"runtime": {"precision": "fp16"}}, "fp16"),
        ({"stage": {"optimizer": {"lr": 1e-3, "memory": "small"}}}, "optimizer.memory"),
        ({"stage": {"drop_path": 0.1}}, "drop_path"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_recorded(root: Path, tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    one = stage("sft", "all", **changed.pop("stage", {}))
    recipe = make_recipe(tmp_path, root, one, runtime=changed.pop("runtime", {}))
    given = {"device": torch.device("cuda"), "sharded": False, "kind": "text", **changed}
    found = graphs.unrecordable(recipe, recipe.stages[0], **given)
    assert why in found
    assert bool(found) == bool(why)


def test_what_is_asked_for_and_cannot_be_is_refused(root: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, base(root, "llama"), stage("logit_kl"), runtime={"device": "cpu", "graphs": True})
    with pytest.raises(LinearizeError, match=r"logit_kl: runtime\.graphs.*GPU.*auto"):
        train(recipe)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_it_is_refused_before_the_conversion_and_told_by_a_dry_run(root: Path, tmp_path: Path) -> None:
    how = {"convert": {"mechanism": "la"}, "runtime": {"device": "cpu", "graphs": True}}
    recipe = make_recipe(tmp_path, base(root, "llama").parent / "source", stage("logit_kl"), **how)
    with pytest.raises(LinearizeError, match=r"runtime\.graphs"):
        train(recipe)
    assert not (tmp_path / "run").exists()
    told = list[str]()
    dry_run(recipe, told.append)
    assert any("refused" in line and "runtime.graphs" in line for line in told)


def test_checkpointing_is_none_of_a_transfer(root: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, root, stage("attention_transfer"), runtime={"gradient_checkpointing": True})
    assert not graphs.unrecordable(recipe, recipe.stages[0], torch.device("cuda"), False, "text")


class Line:
    """A model of one weight whose micro batches are recorded, and what was said."""

    def __init__(self, **given: Any) -> None:
        self.weight, self.said, self.plain_calls = nn.Parameter(torch.ones(3)), list[str](), 0
        self.steps = graphs.GraphedSteps(self.plain, [self.weight], 1, self.said.append, **given)

    def plain(self, batch: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.plain_calls += 1
        loss = (self.weight * batch["x"]).sum() / tokens
        loss.backward()
        return loss.detach(), {}

    def run(self, count: int) -> list[Tensor]:
        """The gradient of each of so many steps."""
        found = []
        for number in range(count):
            self.steps({"x": torch.arange(3.0) + number}, torch.tensor(2.0))
            found.append(self.weight.grad.clone())  # type: ignore[union-attr]
            self.weight.grad.zero_()  # type: ignore[union-attr]
        return found


@contextlib.contextmanager
def watched(*places: str) -> Iterator[list[str]]:
    yield [*places]


def fails(run: Callable[[], None], x: Tensor) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


def stale(run: Callable[[], None], x: Tensor) -> Callable[[], None]:
    """A recording that fixed what came from the host: it adds the same gradient each time."""
    run()
    return lambda: None


@pytest.mark.parametrize(
    ("record", "places", "why"),
    [
        (fails, (), "RuntimeError: operation not permitted"),
        (stale, (), "differs"),
        (lambda run, x: run, ("moe.py:7", "moe.py:7"), "moe.py:7 waits"),
    ],
    ids=["recording fails", "another result", "waits for the GPU"],
)
def test_steps_stay_plain(record: Any, places: tuple[str, ...], why: str) -> None:
    def recording(run: Callable[[], None], x: Tensor) -> Any:
        before = one.weight.grad.clone()  # type: ignore[union-attr]
        replay = record(run, x)
        one.weight.grad.copy_(before)  # type: ignore[union-attr]  # a recording computes nothing
        return replay

    one = Line(record=recording, watch=lambda: watched(*places))
    found = one.run(6)
    assert len(one.said) == 1
    assert why in one.said[0]
    assert [x.tolist() for x in found] == [((torch.arange(3.0) + n) / 2).tolist() for n in range(6)]
    assert one.steps.over
    assert not one.steps.checked


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    sizes = {"memory_allocated": 20, "max_memory_allocated": 60, "memory_reserved": 62}
    for name, value in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value * gib)
    for free, fits in ((60, True), (40, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * gib, 140 * gib))
        assert bool(graphs.no_room(torch.device("cuda"))) != fits


def test_plain_where_it_is_off(root: Path, tmp_path: Path, replayed: list[int]) -> None:
    """auto leaves a stage alone that is over before a recording pays."""
    recipe = make_recipe(tmp_path, base(root, "llama"), stage("logit_kl", steps=STEPS))
    finetune(recipe, say=lambda line: None)
    assert not replayed
