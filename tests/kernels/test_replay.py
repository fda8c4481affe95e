"""Decode steps that generate() replays. A CPU has no CUDA graphs: there the recorded function itself is called again,
which shows what goes into a recording and comes out of it; that a GPU replays it is checked by test_replay_gpu."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, Command, relative_error
from models import ARCHITECTURES, HYBRID, Zoo, tokens
from torch import Tensor
from training import base
from transformers import CompileConfig, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from linearize.bench.model import plan_for
from linearize.errors import Exit
from linearize.measure import generate as command
from linearize.plan.mechanisms import load_mechanism, mechanism_names
from linearize.train.save import meta_model
from linearize_kernels.hf.cache import cache_in
from linearize_kernels.hf.static_layers import StaticLayers

NEW = 7


class Recorder:
    """Stands for CUDA graphs; counts recordings and replays."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def capture(self, run: Callable[[], None], x: Tensor) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


def replay_file(model: Any) -> ModuleType:
    """The model's own copy of kernels/hf/cuda_graphs.py."""
    return sys.modules[next(c.__module__ for c in type(model).__mro__ if c.__name__ == "Replayed")]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Recorder]:
    """Make a model on the CPU record."""

    def start(model: Any) -> Recorder:
        recorder, own = Recorder(), replay_file(model)
        monkeypatch.setattr(own, "capture", recorder.capture)
        monkeypatch.setattr(own, "DEVICES", ("cpu",))
        return recorder

    return start


def generate(model: Any, ids: Tensor, **arguments: Any) -> Any:
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    mask = torch.ones_like(ids)
    mask[-1, : ids.shape[1] // 2] = 0
    return model.generate(ids, **{"attention_mask": mask, "pad_token_id": 0, **settings, **arguments})


def assert_same(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_replayed_steps_are_the_plain_ones(zoo: Zoo, record: Callable[[Any], Recorder], name: str) -> None:
    model, ids = zoo.model(name), tokens(3, 12)
    plain = generate(model, ids)
    recorder = record(model)
    found = generate(model, ids)
    # One token comes from the prompt, three plain steps, the third of which is compared with a replay.
    assert (recorder.recorded, recorder.replayed) == (1, 1 + NEW - 4)
    assert_same(found, plain)
    cache, other = found.past_key_values, plain.past_key_values
    assert cache.get_seq_length() == other.get_seq_length() == ids.shape[1] + NEW - 1
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one.state, two.state, strict=True))


@pytest.mark.parametrize("options", [{"window": 4, "sink": 2}, {"clock": 0, "norm": "head"}, {"rope": False}])
def test_options_of_the_mechanism_replay(zoo: Zoo, record: Callable[[Any], Recorder], options: dict[str, Any]) -> None:
    model, ids = zoo.model("llama", **options), tokens(2, 9)
    plain, recorder = generate(model, ids), record(model)
    assert_same(generate(model, ids), plain)
    assert recorder.replayed == NEW - 3


@pytest.mark.parametrize("name", [name for name in mechanism_names() if load_mechanism(name).causal])
def test_every_mechanism_replays(zoo: Zoo, record: Callable[[Any], Recorder], name: str) -> None:
    planned = plan_for(str(zoo.folders("llama")[0]), None, name, {})
    model, ids = meta_model(None, planned, None, False, "cpu").eval(), tokens(2, 9)
    plain, recorder = generate(model, ids, max_new_tokens=2 * NEW), record(model)
    assert_same(generate(model, ids, max_new_tokens=2 * NEW), plain)
    assert recorder.replayed == 2 * NEW - 3


@pytest.mark.slow
def test_a_compiled_step_replays(zoo: Zoo, record: Callable[[Any], Recorder]) -> None:
    model, ids = zoo.model("llama"), tokens(2, 9)
    plain, recorder = generate(model, ids), record(model)
    config = CompileConfig(fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the second call has it compiled
        found = generate(model, ids, compile_config=config)
        assert torch.equal(found.sequences, plain.sequences)
        assert relative_error(torch.stack(found.logits), torch.stack(plain.logits)) < TOLERANCE[torch.float32]
    assert recorder.replayed == 2 * (NEW - 3)


def test_sampling_and_whole_prompts_replay(zoo: Zoo, record: Callable[[Any], Recorder]) -> None:
    model, ids = zoo.model("llama"), tokens(2, 9)
    style = {"do_sample": True, "top_k": 5, "attention_mask": torch.ones_like(ids)}
    torch.manual_seed(3)
    plain, recorder = generate(model, ids, **style), record(model)
    torch.manual_seed(3)
    assert_same(generate(model, ids, **style), plain)
    assert recorder.replayed == NEW - 3


def test_a_cache_goes_on_after_its_recording(zoo: Zoo, record: Callable[[Any], Recorder]) -> None:
    model, ids = zoo.model("llama"), tokens(1, 9)
    ones = {"attention_mask": torch.ones(1, 9 + NEW, dtype=torch.long)}
    first, second = (generate(model, ids, attention_mask=ones["attention_mask"][:, :9]) for _ in range(2))
    plain = generate(model, first.sequences, past_key_values=first.past_key_values, **ones)
    record(model)
    assert_same(generate(model, second.sequences, past_key_values=second.past_key_values, **ones), plain)


def assert_close(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    assert relative_error(torch.stack(one.logits), torch.stack(other.logits)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("name", "masked"), [("llama", True), ("llama", False), ("qwen3", True), ("gemma2", True), ("gpt2", True)]
)
def test_hybrids_replay(zoo: Zoo, record: Callable[[Any], Recorder], name: str, masked: bool) -> None:
    model, ids = zoo.model(name, HYBRID), tokens(3, 12)
    style = {} if masked else {"attention_mask": torch.ones_like(ids)}
    plain, recorder = generate(model, ids, **style), record(model)
    found = generate(model, ids, **style)
    assert (recorder.recorded, recorder.replayed) == (1, 1 + NEW - 4)
    assert_close(found, plain)
    for one, two in zip(found.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert type(one) is type(two)
        pairs = zip(one.state, two.state, strict=True) if hasattr(one, "state") else [(one.keys, two.keys)]
        assert all(relative_error(a, b) < TOLERANCE[torch.float32] for a, b in pairs if a is not None)


def test_a_hybrid_without_room_is_recorded_again(
    zoo: Zoo, record: Callable[[Any], Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = zoo.model("llama", HYBRID), tokens(2, 9)
    plain, recorder = generate(model, ids, max_new_tokens=3 * NEW), record(model)
    static_layers = sys.modules[replay_file(model).__name__.replace("cuda_graphs", "static_layers")]
    monkeypatch.setattr(static_layers, "MORE", 4)
    monkeypatch.setattr(static_layers, "PART", 10**6)
    assert_close(generate(model, ids, max_new_tokens=3 * NEW), plain)
    assert recorder.recorded > 2
    assert recorder.replayed == 3 * NEW - 3  # a step that is recorded again is replayed once, too


def test_a_hybrids_cache_is_a_usual_one_afterwards(zoo: Zoo, record: Callable[[Any], Recorder]) -> None:
    """More text goes on with other rows."""
    model, ids = zoo.model("llama", HYBRID), tokens(2, 9)
    ones, longer = torch.ones_like(ids), torch.ones(2, 9 + NEW, dtype=torch.long)
    results = []
    for recorded in (False, True):
        if recorded:
            record(model)
        first = generate(model, ids, attention_mask=ones)
        cache = first.past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        turned = first.sequences.flip(0)
        results.append(generate(model, turned, past_key_values=cache, attention_mask=longer))
    assert_close(results[1], results[0])


def test_rooms_are_freed_at_once() -> None:
    """They are gigabytes of a GPU, and Python collects garbage when it likes."""
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    static_layers = StaticLayers(cache.layers)
    static_layers.enter(cache.layers, None)
    static_layers.leave(cache.layers)
    buffer = weakref.ref(static_layers.static_layers[0].keys)
    del static_layers, cache
    assert buffer() is None


def test_hybrids_whose_softmax_forgets_stay_plain(zoo: Zoo, record: Callable[[Any], Recorder]) -> None:
    model, ids = zoo.model("mistral", HYBRID), tokens(2, 9)
    plain, recorder = generate(model, ids), record(model)
    assert_same(generate(model, ids), plain)
    assert recorder.replayed == 0


def test_a_mask_that_hides_more_than_padding_stays_plain(
    zoo: Zoo, record: Callable[[Any], Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an architecture whose cache keeps what its masks hide."""
    model, ids = zoo.model("llama", HYBRID), tokens(2, 9)
    made = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def hiding(*args: Any, **kwargs: Any) -> Tensor:
        mask = made(*args, **kwargs | {"allow_is_causal_skip": False}).clone()
        mask[..., 1] = False
        return mask

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "sdpa", hiding)
    plain, recorder = generate(model, ids), record(model)
    assert_same(generate(model, ids), plain)
    assert recorder.recorded == 0


@pytest.mark.parametrize(
    "reason", ["hybrid compiled", "teacher", "disabled", "hook", "beams", "hidden states", "training", "another call"]
)
def test_what_a_recording_would_miss_stays_plain(zoo: Zoo, record: Callable[[Any], Recorder], reason: str) -> None:
    model, ids = zoo.model("llama", HYBRID if reason == "hybrid compiled" else "all"), tokens(2, 9)
    arguments = {
        "hybrid compiled": {"compile_config": CompileConfig(backend="aot_eager")},
        "disabled": {"disable_compile": True},
        "beams": {"num_beams": 2},
        "hidden states": {"output_hidden_states": True},
    }.get(reason, {})
    heard: list[Any] = []
    if reason == "hook":
        model.model.norm.register_forward_hook(lambda *call: heard.append(call))
    recorder = record(model)
    with another_call(model) if reason == "another call" else contextlib.nullcontext():
        if reason == "teacher":
            with model.teacher():
                generate(model, ids)
        else:
            generate(model.train(reason == "training"), ids, **arguments)
    assert recorder.recorded == 0
    assert len(heard) == (NEW if reason == "hook" else 0)


@contextlib.contextmanager
def another_call(model: Any) -> Iterator[None]:
    """Within, another thread has begun to generate."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(model.get_compiled_call, None).result()
        yield
        assert type(other).__name__ == "Replay"


def test_calls_that_are_over_hinder_none(zoo: Zoo, record: Callable[[Any], Recorder]) -> None:
    """Whatever still refers to them: a traceback, a record of a log."""
    model, ids = zoo.model("llama"), tokens(2, 9)
    recorder = record(model)
    with another_call(model):
        pass
    over = model.get_compiled_call(None)
    generate(model, ids)
    assert recorder.replayed == NEW - 3
    assert over.step is None


def test_a_step_that_depends_on_more_than_its_inputs_stays_plain(
    zoo: Zoo, record: Callable[[Any], Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = zoo.model("llama"), tokens(2, 9)
    forward = model.model.forward

    def by_length(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state + cache_in(kwargs).get_seq_length()
        return out

    monkeypatch.setattr(model.model, "forward", by_length)
    plain, recorder = generate(model, ids), record(model)
    assert_same(generate(model, ids), plain)
    assert (recorder.recorded, recorder.replayed) == (1, 1)


def test_a_failed_recording_leaves_the_plain_steps(
    zoo: Zoo, record: Callable[[Any], Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = zoo.model("llama"), tokens(2, 9)
    plain, recorder = generate(model, ids), record(model)

    def refused(run: Callable[[], None], x: Tensor) -> Callable[[], None]:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay_file(model), "capture", refused)
    assert_same(generate(model, ids), plain)
    assert recorder.replayed == 0


def test_a_softmax_model_keeps_what_transformers_does(zoo: Zoo) -> None:
    model = zoo.model("llama", HYBRID)
    called = model.get_compiled_call(model.generation_config.compile_config)
    assert type(called).__name__ != "Replay"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_replay_gpu(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, ids = zoo.model(name).cuda(), tokens(3, 12).cuda()
    plain = generate(model, ids, disable_compile=True)
    replays: list[Any] = []
    own, real = replay_file(model), torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), real(graph)))
    assert_same(generate(model, ids), plain)
    assert own.PLAIN_STEPS == 2
    assert len(replays) == NEW - 3


# ---------------------------------------------------------------- linearize generate --compile


@pytest.mark.slow
def test_generate_compiles_on_request(
    linearize: Command, tmp_path: Path, record: Callable[[Any], Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = base(tmp_path, "llama")
    words = ("generate", folder, "def f", "--max-new-tokens", NEW, "--device", "cpu", "--json")
    plain = json.loads(linearize(*words)[1])
    code, out, err = linearize(*words, "--compile")
    assert (code, out) == (Exit.INCOMPATIBLE, "")
    assert "on a GPU" in err
    recorders: list[Recorder] = []
    real = command.load

    def load(*arguments: Any, **others: Any) -> Any:
        loaded = real(*arguments, **others)
        recorders.append(record(loaded.model))
        return loaded

    monkeypatch.setattr(command, "load", load)
    monkeypatch.setattr(command, "CompileConfig", lambda: CompileConfig(backend="aot_eager"))
    code, out, err = linearize(*words, "--compile")
    assert code == 0, err
    assert json.loads(out)["tokens"] == plain["tokens"]
    assert recorders[0].replayed == NEW - 3
