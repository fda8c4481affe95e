"""Several processes on one run, and two commands on one folder. On a CPU they talk through gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import relative_error
from forks import Done, Forks, Task
from safetensors.torch import load_file
from training import (
    AT,
    BASES,
    T,
    base,
    byte_tokenizer,
    make_recipe,
    metrics,
    stage,
    tensors,
    train,
    write_recipe,
)
from transformers import AutoModelForCausalLM, LlamaForCausalLM, ViTConfig, ViTModel

from linearize.errors import Exit, LinearizeError
from linearize.recipe.recipe import load_recipe
from linearize.train import loop
from linearize.train.fsdp import shard
from linearize.train.loop import StageLoop
from linearize.train.runs import Run

DATA = {"train": {"files": ["chat.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": T}}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
STEPS = 3
FINETUNE = ("-m", "linearize", "finetune", "--json")


def stages(per_device: int, accumulate: int) -> list[dict[str, Any]]:
    """Backward within forward; adapters in a teacher that stays; a teacher whose weights are kept, in shards too."""
    # A small rate: Adam turns rounding into a full step where a gradient is next to nothing.
    shared = {
        "steps": STEPS,
        "optimizer": {"lr": 1e-4},
        "batch": {"per_device": per_device, "gradient_accumulation_steps": accumulate},
    }
    return [
        stage("attention_transfer", ["new", "lora"], **shared),
        stage("sft", ["new", "lora"], **shared),
        stage("logit_kl", ["all"], **shared),
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("bases"), "llama")


def recipe_in(folder: Path, model: Path, per_device: int, accumulate: int, **changes: Any) -> Path:
    """A recipe whose step is four blocks if `per_device` x `accumulate` x processes is."""
    changes = {"data": DATA, "checkpoint": {"every_steps": 1}, "eval": {"max_tokens": 3 * T}, **changes}
    return write_recipe(folder, model, *stages(per_device, accumulate), **changes)


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the run of one process."""
    folder = tmp_path_factory.mktemp("one")
    recipe_in(folder, model, 2, 2)
    train(make_recipe(folder, model, *stages(2, 2), **json_rest(folder)))
    return folder


def json_rest(folder: Path) -> dict[str, Any]:
    """What the recipe in a folder says besides its stages and its model."""
    values = json.loads((folder / "recipe.yaml").read_text())
    return {key: values[key] for key in ("data", "checkpoint", "eval", "runtime")}


def together(forks: Forks, *arguments: Any, script: str = "", environment: Mapping[str, str] = FSDP) -> list[Done]:
    """Two processes with FSDP, or other settings, and the variables that a launcher sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **environment,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    return forks.together([Task([*map(str, arguments)], environment=rank, script=script) for rank in ranks])


def assert_same_run(folder: Path, one: Path) -> None:
    """Losses, gradients, evaluations, fidelity and weights of one process, each line once."""
    for key in ("stage", "step", "tokens", "lr"):
        assert metrics(folder, key) == metrics(one, key), key
    for key in ("loss", "grad_norm", "eval_ppl"):
        ours, theirs = (torch.tensor(metrics(place, key)) for place in (folder, one))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    reports = [json.loads((place / "run" / "report.json").read_text())["layers"] for place in (folder, one)]
    for ours, theirs in zip(*reports, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    trained, expected = (tensors(place / "run" / "final") for place in (folder, one))
    assert trained.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(trained[name], value) < 1e-3, name


# The command line, where micro batches are recorded from the first step on, and replayed.
RECORDED = """
import contextlib, functools, sys
from linearize import cli
from linearize.train import graphs, loop, session
graphs.PLAIN_STEPS = loop.PLAIN_STEPS = 0
loop.LEAST_STEPS = 1
replayed = []
def record(run, x):
    return lambda: (replayed.append(1), run())
loop.GraphedSteps = functools.partial(
    graphs.GraphedSteps, record=record, watch=lambda: contextlib.nullcontext([])
)
loop.unrecordable = session.unrecordable = lambda *given: ""
sys.argv = ["linearize", *sys.argv[1:]]
cli.main()
assert len(replayed) > 3
"""


@pytest.mark.slow
def test_two_processes_train_what_one_does(model: Path, one: Path, tmp_path: Path, forks: Forks) -> None:
    """With whole weights in each, as CUDA graphs, on one node; the next test has torch's own launcher."""
    recipe = recipe_in(tmp_path, model, 1, 2)
    ended = together(forks, "finetune", recipe, "--json", script=RECORDED, environment={})
    assert [done.code for done in ended] == [0, 0], ended
    assert sorted('"stages"' in done.output for done in ended) == [False, True]  # one of them speaks
    assert_same_run(tmp_path, one)


def test_gradients_add_up_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that this process has not, and another has; one that nobody has stays without."""

    def reduce(x: torch.Tensor, how: Any = None) -> None:  # the other process has twice our gradients
        x.copy_(torch.tensor([1, 1, 1, 0]) if how is torch.distributed.ReduceOp.MAX else 3 * x)

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(loop, "BUCKET", 3)
    dtypes = torch.float32, torch.bfloat16, torch.float32, torch.float32
    parameters = [torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype)) for dtype in dtypes]
    for parameter in parameters[:2]:
        parameter.grad = torch.full_like(parameter, 2.0)
    before = [parameter.grad for parameter in parameters]
    loop.add_up(parameters, torch.device("cpu"), mean=True)
    assert [parameter.grad is None for parameter in parameters] == [False, False, False, True]
    assert [parameter.grad is grad for parameter, grad in zip(parameters[:2], before, strict=False)] == [True, True]
    assert [float(parameter.grad.mean()) for parameter in parameters[:3]] == [3.0, 3.0, 0.0]


@pytest.mark.slow
def test_two_nodes_train_what_one_process_does(model: Path, one: Path, tmp_path: Path) -> None:
    """torchrun twice, as on two machines that share a disk; over loopback, with gloo."""
    recipe = recipe_in(tmp_path, model, 1, 2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = [
        subprocess.Popen([*command, "--node_rank", str(rank), *FINETUNE, str(recipe)], **pipes) for rank in range(2)
    ]
    try:
        told = [node.communicate(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told
    assert [len(out.splitlines()) for out, _ in told] == [1, 0]  # the first node speaks
    assert_same_run(tmp_path, one)


class Stop(BaseException):
    """Ends a run from within, as abruptly as an exception can."""


@pytest.mark.slow
def test_shards_train_the_same_and_resume_on_another_number_of_processes(
    model: Path, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks
) -> None:
    """Two with FSDP2 until one of them is told to end; then one alone, which dies; then two again."""
    steps = STEPS + 1  # SIGTERM comes after the first step of sft, is noticed in the second, which is saved
    stopped = together(forks, "SIGTERM", "step", steps, recipe_in(tmp_path, model, 1, 2), script=AT)
    assert [done.code for done in stopped] == [Exit.INTERRUPTED] * 2, stopped
    assert all("state saved in" in done.output for done in stopped)
    assert metrics(tmp_path, "step")[-1] == 2

    with pytest.raises(LinearizeError, match=r"stages\[0\].blocks_per_step 4 -> 2") as caught:
        train(make_recipe(tmp_path, model, *stages(1, 2), **json_rest(tmp_path)))
    assert caught.value.code == Exit.USAGE
    update = StageLoop._update

    def dying(loop: StageLoop, loss: float, norm: float, lr: float, step: int) -> None:
        update(loop, loss, norm, lr, step)
        if loop.number == 2 and step == 1:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(StageLoop, "_update", dying)
        with pytest.raises(Stop):
            train(make_recipe(tmp_path, model, *stages(2, 2), **json_rest(tmp_path)))
    assert metrics(tmp_path, "stage")[-1] == "logit_kl"

    ended = together(forks, "finetune", recipe_in(tmp_path, model, 1, 2))
    assert [done.code for done in ended] == [0, 0], ended
    assert_same_run(tmp_path, one)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["full", "small"])
def test_shards_in_mixed_precision(memory: str, model: Path, tmp_path: Path, forks: Forks) -> None:
    """Nothing of the source trains at first, so FSDP's first pass sees no gradients; float32 masters come later, or
    none."""
    folder = base(model.parent.parent, "llama", "bfloat16")
    shared = {"steps": 2, "optimizer": {"lr": 1e-4}}
    last = {"steps": 2, "optimizer": {"lr": 1e-4, "memory": memory}, "loss": {"chunk_size": 12}}
    two = [stage("attention_transfer", **shared), stage("logit_kl", ["all"], **last)]
    runtime = {"device": "cpu", "precision": "bf16"}
    train(make_recipe(tmp_path / "one", folder, *two, runtime=runtime))
    two = [{**each, "batch": {"per_device": 1}} for each in two]
    ended = together(forks, "finetune", write_recipe(tmp_path / "two", folder, *two, runtime=runtime))
    assert [done.code for done in ended] == [0, 0], ended
    # FSDP computes norms with weights in bf16, one process with their float32 masters, rounded afterwards.
    assert metrics(tmp_path / "two") == pytest.approx(metrics(tmp_path / "one"), rel=2e-2)
    (saved,) = (tmp_path / "two").glob("run/checkpoints/logit_kl-*/trained.safetensors")
    kinds = {value.dtype for name, value in load_file(saved).items() if ".mixer." not in name}
    assert kinds == {torch.bfloat16 if memory == "small" else torch.float32}


@pytest.mark.slow
def test_shards_train_a_random_model_that_keeps_its_softmax(tmp_path: Path, forks: Forks) -> None:
    """As one process does; the saved model is an ordinary one of transformers."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, **BASES["llama"]}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    random = {"config": config, "tokenizer": str(tmp_path / "tokenizer")}

    def recipe(name: str, per_device: int) -> Path:
        batch = {"per_device": per_device, "gradient_accumulation_steps": 2}
        one = stage("sft", ["all"], steps=STEPS, optimizer={"lr": 1e-4}, batch=batch)
        path = write_recipe(tmp_path / name, tmp_path, one, data=DATA, eval={"max_tokens": 3 * T})
        path.write_text(json.dumps({**json.loads(path.read_text()), "model": {"base": random}}))
        return path

    train(load_recipe(recipe("one", 2)))
    ended = together(forks, "finetune", recipe("two", 1))
    assert [done.code for done in ended] == [0, 0], ended
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "run" / "final")) is LlamaForCausalLM


# The command line, with an evaluation that makes the logits of 31 of 32 tokens at a time where a batch has two rows.
# What autograd keeps goes away, all but weights; an adapter's may have an activation's shape. When weights are divided,
# nobody holds the whole ones.
FEW = """
import sys, weakref
from linearize import cli
from linearize.train import chunked_head, fsdp, offload
chunked_head.READ_AT_ONCE = 1 << 14
offload.LEAST = 1
away = offload.Host.away
def checked(host, tensor):
    weights = [p for name, p in host.model.named_parameters() if p.dim() == 2 and ".lora_" not in name]
    assert {tensor.shape, tensor.mT.shape}.isdisjoint(p.shape for p in weights)
    return away(host, tensor)
offload.Host.away = checked
prepare = fsdp.fsdp2_prepare_model
def watched(accelerator, model):
    whole = [weakref.ref(p) for name, p in model.named_parameters() if ".mixer." not in name]
    prepare(accelerator, model)
    assert not [one for one in whole if one() is not None]
fsdp.fsdp2_prepare_model = watched
sys.argv = ["linearize", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts"), [("llama", ["all"]), ("qwen3", ["new", "lora"])], ids=str)
def test_shards_make_the_logits_of_some_tokens_at_a_time(
    name: str, parts: list[str], model: Path, tmp_path: Path, forks: Forks
) -> None:
    """As one process that makes them all at once. The head is llama's embedding, and qwen3's own with adapters.
    Activations wait in the host's memory."""
    folder = base(model.parent.parent, name)
    changes = {"data": DATA, "eval": {"max_tokens": 7 * T}}  # two rows for each process, then two and one

    def run(place: str, per_device: int, size: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
        loss = {"kl": 1.0, "ce": 0.5, "temperature": 2.0, "chunk_size": size}
        batch = {"per_device": per_device, "gradient_accumulation_steps": 2}
        one = stage("logit_kl", parts, name, steps=STEPS, loss=loss, batch=batch, optimizer={"lr": 1e-4})
        memory = dict.fromkeys(("gradient_checkpointing", "offload_activations"), size is not None)
        return one, {**changes, "runtime": {"device": "cpu", **memory}}

    one, settings = run("one", 4, None)
    train(make_recipe(tmp_path / "one", folder, one, **settings))
    one, settings = run("two", 2, 12)
    ended = together(forks, "finetune", write_recipe(tmp_path / "two", folder, one, **settings), script=FEW)
    assert [done.code for done in ended] == [0, 0], ended
    assert_same_run(tmp_path / "two", tmp_path / "one")


# The command line with torch.compile, whose graphs are run as they are: to make kernels of them takes a CPU minutes.
GRAPHS = """
import functools, sys
import torch
from linearize import cli
torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
sys.argv = ["linearize", *sys.argv[1:]]
cli.main()
assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
assert not torch._dynamo.utils.counters["graph_break"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, FSDP], ids=["ddp", "fsdp"])
def test_compiled_layers_in_two_processes(
    environment: dict[str, str], model: Path, tmp_path: Path, forks: Forks
) -> None:
    settings = {"data": DATA, "eval": {"max_tokens": 3 * T}}

    def run(per_device: int, on: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        batch = {"per_device": per_device, "gradient_accumulation_steps": 2}
        one = stage("logit_kl", ["all"], steps=STEPS, batch=batch, optimizer={"lr": 1e-4})
        return one, {**settings, "runtime": {"device": "cpu", "gradient_checkpointing": on, "compile": on}}

    one, plain = run(2, False)
    train(make_recipe(tmp_path / "one", model, one, **plain))
    one, compiled = run(1, True)
    recipe = write_recipe(tmp_path / "two", model, one, **compiled)
    ended = together(forks, "finetune", recipe, script=GRAPHS, environment=environment)
    assert [done.code for done in ended] == [0, 0], ended
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_shards_with_small_moments_go_on_in_another_number_of_processes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks
) -> None:
    """Weights of float32 and moments of 8 bits: as in one process, step by step; a checkpoint of either continues."""
    last = stage("logit_kl", ["all"], steps=4, optimizer={"lr": 1e-3, "memory": "small"})

    def batch(per_device: int) -> dict[str, Any]:
        return {**last, "batch": {"per_device": per_device}}

    settings = {"data": DATA, "checkpoint": {"every_steps": 1}, "eval": {"max_tokens": 3 * T}}
    train(make_recipe(tmp_path / "one", model, batch(2), **settings))
    update = StageLoop._update

    def dying(loop: StageLoop, loss: float, norm: float, lr: float, step: int) -> None:
        if step == 2:
            raise Stop
        update(loop, loss, norm, lr, step)

    with monkeypatch.context() as patch:
        patch.setattr(StageLoop, "_update", dying)
        with pytest.raises(Stop):
            train(make_recipe(tmp_path / "two", model, batch(2), **settings))
    command = "SIGTERM", "step", 1, write_recipe(tmp_path / "two", model, batch(1), **settings)
    stopped = together(forks, *command, script=AT)  # after the third step
    assert [done.code for done in stopped] == [Exit.INTERRUPTED] * 2, stopped
    train(make_recipe(tmp_path / "two", model, batch(2), **settings))
    for key in ("loss", "grad_norm", "eval_ppl"):
        ours, theirs = (torch.tensor(metrics(tmp_path / place, key)) for place in ("two", "one"))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)
    trained, expected = (tensors(tmp_path / place / "run" / "final") for place in ("two", "one"))
    for name, value in expected.items():
        assert relative_error(trained[name], value) < 1e-2, name


FSDP_REFUSED = [
    ({"FSDP_VERSION": "1"}, {}, "--fsdp_version 2"),
    ({"FSDP_OFFLOAD_PARAMS": "true"}, {}, "--fsdp_offload_params false"),
    ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "runtime.gradient_checkpointing: true"),
]


@pytest.mark.parametrize(("environment", "runtime", "message"), FSDP_REFUSED, ids=str)
def test_fsdp_settings_that_are_refused(
    environment: dict[str, str], runtime: dict[str, Any], message: str, model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in {**FSDP, **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LinearizeError, match=message) as caught:
        train(make_recipe(tmp_path, model, stage("logit_kl"), runtime={"device": "cpu", **runtime}))
    assert caught.value.code == Exit.INCOMPATIBLE
    assert not (tmp_path / "run").exists()


def test_fsdp_is_for_models_that_write_text() -> None:
    with pytest.raises(LinearizeError, match=r"FSDP.*ViTModel"):
        shard(ViTModel(ViTConfig(hidden_size=4, num_hidden_layers=0, num_attention_heads=1)), None, [])


def test_a_folder_has_one_command_at_a_time(model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, model, stage("logit_kl"))
    first = Run(recipe, "auto")
    with first.preparing(True):
        pass
    with pytest.raises(LinearizeError, match=rf"use.*{os.getpid()}") as caught:
        train(recipe)
    assert caught.value.code == Exit.USAGE
    first.close()
    late = Run(recipe, "auto")  # looked before the other was done
    train(recipe)
    with pytest.raises(LinearizeError, match=r"changed.*started"), late.preparing(True):
        pass
    assert (tmp_path / "run" / "final").exists()
