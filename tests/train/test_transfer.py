"""Attention transfer: one forward of the teacher during which each mixer meets softmax on the same input."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import small_model as any_model
from conftest import TOLERANCE, relative_error
from models import ARCHITECTURES, HYBRID, Zoo, convert_folder, load, logits, save_source, small_model, tokens
from torch import Tensor, nn

from linearize.convert import convert, plan_conversion
from linearize.data import batches as samples
from linearize.train.stages import Listener, listen
from linearize.train.student import Student
from linearize_kernels.hf.attention_hooks import mixers_of

EXACT = TOLERANCE[torch.float32]


class Recorder:
    """Hears every layer; `step` is called with each loss as it arises."""

    def __init__(self, step: Callable[[Tensor], None], own_call: bool = False) -> None:
        self.step, self.own_call = step, own_call
        self.heard: dict[int, dict[str, Any]] = {}
        self.compared: dict[int, tuple[Tensor, Tensor]] = {}

    def on_layer(self, mixer: Any, inputs: tuple[Tensor, ...], o: Tensor, target: Tensor, layout: Any) -> None:
        assert torch.is_grad_enabled()
        self.heard[mixer.site.layer] = {"inputs": inputs, "o": o.detach(), "target": target}
        if not self.own_call:
            self.step(loss_of(o, target))

    def compare(self, mixer: Any, y: Tensor, target: Tensor) -> None:
        self.compared[mixer.site.layer] = (y.detach(), target)
        if self.own_call:
            self.step(loss_of(y, target))

    @contextlib.contextmanager
    def student(self, module: nn.Module) -> Iterator[None]:
        yield


def loss_of(ours: Tensor, target: Tensor) -> Tensor:
    return (ours - target).square().mean()


def backward(loss: Tensor) -> None:
    loss.backward()


def freeze_source(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mixer." in name)


def transfer(model: Any, recorder: Recorder, ids: Tensor, **arguments: Any) -> Tensor:
    """Logits of the pass during which `recorder` listens."""
    with model.transferring(recorder), torch.no_grad():
        return model(input_ids=ids, use_cache=False, **arguments).logits


def test_a_mixer_of_projections_sees_them_in_front_of_norms(tmp_path: Path) -> None:
    """Also in the second call, of the student; the teacher's own call keeps its norms of q and k."""
    source = save_source(tmp_path / "source", "qwen3")
    plan = plan_conversion(str(source), "gdn", options={"native": True})
    convert(*plan, tmp_path / "linear", level="none", say=lambda text: None)
    model, ids, recorder = load(tmp_path / "linear"), tokens(2, 12), Recorder(lambda loss: None)
    freeze_source(model)
    teacher = small_model("qwen3")
    assert relative_error(transfer(model, recorder, ids), logits(teacher, ids)) < EXACT
    inputs = recorder.heard[0]["inputs"]
    attention, x = teacher.model.layers[0].self_attn, inputs[3]
    for given, projection in zip(inputs[:2], (attention.q_proj, attention.k_proj), strict=True):
        assert relative_error(given.flatten(2), projection(x).detach()) < EXACT
    with torch.no_grad():
        calls: list[Tensor] = []
        mixer = model.model.layers[0].self_attn.mixer
        handle = mixer.register_forward_pre_hook(lambda m, args: calls.append(args[0]))
        logits(model, ids)
        handle.remove()
    assert relative_error(calls[0].flatten(2), attention.q_proj(x)) < EXACT


def two_pass_gradients(model: Any, ids: Tensor, output: str, **arguments: Any) -> dict[str, Tensor]:
    """The same gradients the plain way: the teacher's inputs and outputs first, then each module as the student.

    `output` is "o" to compare before the output projection, "y" after it.
    """
    with model.teacher(), torch.no_grad():
        calls, targets = watch(model, lambda: model(input_ids=ids, use_cache=False, **arguments))
    model.zero_grad()
    for path in mixers_of(model):
        module, (args, kwargs) = model.get_submodule(path), calls[path]
        _, outputs = watch(model, functools.partial(module, *args, **kwargs))
        loss_of(outputs[path][output], targets[path][output]).backward()
    return gradients(model)


def watch(model: Any, run: Callable[[], Any]) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """(arguments, outputs before and after the output projection) of each converted module during `run`."""
    calls: dict[str, Any] = {}
    outputs: dict[str, dict[str, Tensor]] = {path: {} for path in mixers_of(model)}
    with contextlib.ExitStack() as hooks:
        for path in mixers_of(model):
            module = model.get_submodule(path)
            projection = module.c_proj if hasattr(module, "c_proj") else module.o_proj

            def before(m: Any, args: Any, kwargs: Any, path: str = path) -> None:
                calls[path] = (args, kwargs)

            def middle(m: Any, args: Any, path: str = path) -> None:
                outputs[path]["o"] = args[0]

            def after(m: Any, args: Any, result: Any, path: str = path) -> None:
                outputs[path]["y"] = result[0]

            for handle in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                projection.register_forward_pre_hook(middle),
                module.register_forward_hook(after),
            ):
                hooks.callback(handle.remove)
        run()
    return calls, outputs


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of the parameters that have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name in ours:
        assert relative_error(ours[name], theirs[name]) < 10 * EXACT, name


@pytest.mark.parametrize("layers", ["all", HYBRID])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_stream_is_the_teachers_and_gradients_are_those_of_two_passes(zoo: Zoo, name: str, layers: str) -> None:
    model, original = zoo.model(name, layers), small_model(name)
    ids, mask = tokens(2, 18), torch.ones(2, 18, dtype=torch.long)
    mask[1, :5] = 0
    freeze_source(model)
    model.train()  # dropout must not reach the teacher
    recorder = Recorder(backward)
    assert torch.equal(transfer(model, recorder, ids, attention_mask=mask), logits(original, ids, attention_mask=mask))
    assert sorted(recorder.heard) == sorted(mixer.site.layer for mixer in mixers_of(model).values())
    ours = gradients(model)
    assert set(ours) == {key for key, _ in model.named_parameters() if ".mixer." in key}
    assert all(gradient.abs().max() > 0 for gradient in ours.values())
    model.eval()
    same_gradients(ours, two_pass_gradients(model, ids, "o", attention_mask=mask))
    with model.teacher():
        assert torch.equal(logits(model, ids), logits(original, ids))


def test_backward_at_once_is_backward_of_the_sum(zoo: Zoo) -> None:
    found = []
    for checkpointing in (False, True):
        model, losses = zoo.model("llama"), []
        freeze_source(model)
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        transfer(model, Recorder(losses.append), tokens(2, 18))
        assert len(losses) == 4
        torch.stack(losses).sum().backward()
        found.append(gradients(model))
    model = zoo.model("llama")
    with model.transferring(Recorder(backward)):  # neither frozen nor without gradients: only mixers get any
        model(tokens(2, 18), use_cache=False)
    for gradient in found:
        same_gradients(gradient, gradients(model))


@pytest.mark.parametrize(("name", "rope"), [("llama", False), ("gemma2", False), ("llama", True), ("gpt2", True)])
def test_a_second_run_is_the_student(zoo: Zoo, name: str, rope: bool) -> None:
    """Without rotary embedding, or when the listener asks for it, each attention module runs again on its input."""
    model, ids = zoo.model(name, HYBRID, rope=rope), tokens(2, 18)
    freeze_source(model)
    recorder = Recorder(backward, own_call=rope)
    assert torch.equal(transfer(model, recorder, ids), logits(small_model(name), ids))
    ours = gradients(model)
    assert set(recorder.compared) == set(recorder.heard) == {0, 2}
    same_gradients(ours, two_pass_gradients(model, ids, "y" if rope else "o"))
    with torch.no_grad():
        calls, _ = watch(model, lambda: transfer(model, Recorder(lambda loss: None), ids))
        for path, mixer in mixers_of(model).items():
            args, kwargs = calls[path]
            _, outputs = watch(model, functools.partial(model.get_submodule(path), *args, **kwargs))
            y, taught = recorder.compared[mixer.site.layer]
            assert relative_error(y, outputs[path]["y"]) < EXACT
            assert relative_error(y, taught) > 1e-2


def test_a_trained_projection_gets_its_gradient_in_a_second_run(zoo: Zoo) -> None:
    model, ids = zoo.model("llama"), tokens(2, 18)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".self_attn." in name)
    assert torch.equal(transfer(model, Recorder(backward, own_call=True), ids), logits(small_model("llama"), ids))
    ours = gradients(model)
    assert set(ours) == {name for name, _ in model.named_parameters() if ".self_attn." in name}
    same_gradients(ours, two_pass_gradients(model, ids, "y"))


@pytest.mark.parametrize("rope", [True, False])
def test_packed_documents_stay_apart(zoo: Zoo, rope: bool) -> None:
    model, lengths = zoo.model("llama", rope=rope), (7, 1, 10)
    ids, places = tokens(1, 18), torch.cat([torch.arange(n) for n in lengths])[None]
    together = Recorder(lambda loss: None)
    transfer(model, together, ids, position_ids=places)
    apart = []
    for part in ids.split(lengths, 1):
        apart.append(Recorder(lambda loss: None))
        transfer(model, apart[-1], part)
    for layer, heard in together.heard.items():
        for key in ("o", "target"):
            assert relative_error(heard[key], torch.cat([one.heard[layer][key] for one in apart], 1)) < EXACT


@pytest.mark.parametrize("rope", [True, False])
def test_a_cache_is_no_obstacle_and_holds_each_key_once(zoo: Zoo, rope: bool) -> None:
    model, ids = zoo.model("llama", rope=rope), tokens(2, 9)
    recorder = Recorder(backward, own_call=rope)
    with model.transferring(recorder), torch.no_grad():
        out = model(ids, use_cache=True)
        assert torch.equal(out.logits, logits(small_model("llama"), ids))
        assert out.past_key_values.get_seq_length() == 9
        with pytest.raises(RuntimeError, match="whole sequences"):
            model(ids, past_key_values=out.past_key_values)


def test_nothing_is_left_behind(zoo: Zoo) -> None:
    model, ids = zoo.model("gpt2"), tokens(2, 9)
    expected = logits(model, ids)
    model.train()

    def fail(loss: Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer(model, Recorder(fail), ids)
    assert all(not mixer.calls and mixer.transfer is None for mixer in mixers_of(model).values())
    assert all(module.training for module in model.modules())
    assert torch.equal(logits(model.eval(), ids), expected)


def test_listening_makes_logits_of_one_token_alone(zoo: Zoo) -> None:
    model, ids, seen = zoo.model("llama"), tokens(2, 9), []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    recorder = Recorder(lambda loss: None)
    listen(Student(model), recorder, {"input_ids": ids, "position_ids": torch.arange(9).expand(2, -1)})  # type: ignore[arg-type]
    assert seen == [1]
    assert sorted(recorder.heard) == sorted(mixer.site.layer for mixer in mixers_of(model).values())


def test_a_step_does_not_read_the_signature_of_the_model_again(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    student = Student(zoo.model("llama", HYBRID))
    batch = {"input_ids": tokens(1, 8)}
    samples.keeps_logits.cache_clear()
    read: list[Any] = []
    known = inspect.signature
    monkeypatch.setattr(samples.inspect, "signature", lambda code: read.append(code.__qualname__) or known(code))
    for _ in range(2):
        listen(student, Listener(student), batch)
    assert sum(name.endswith("LlamaForCausalLM.forward") for name in read) == 1


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_a_pass_that_fails_keeps_no_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, copied: bool
) -> None:
    """A batch that does not fit a GPU is tried again with fewer rows, and needs the room of the first."""
    any_model(name).save_pretrained(tmp_path / "source")
    model = load(convert_folder(tmp_path / "source", tmp_path / "linear")).train()
    model = copy.deepcopy(model) if copied else model
    seen: list[weakref.ref[Tensor]] = []
    *_, last = mixers_of(model).values()

    def fail(*arguments: Any) -> Any:
        seen.append(weakref.ref(arguments[3]))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch, contextlib.suppress(torch.OutOfMemoryError):
        patch.setattr(last, "mix", fail)
        model(tokens(2, 9))
    copy.deepcopy(model)
    there: list[bool] = []

    def look(*_: Any) -> None:
        gc.collect()
        there.append(seen[0]() is not None)

    model.get_input_embeddings().register_forward_hook(look)
    model(tokens(1, 9))
    assert there == [False]
