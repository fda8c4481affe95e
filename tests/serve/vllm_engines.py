"""Converted models in vLLM: an engine writes what generate() writes, whatever shares its batches and its memory.

`make serving` runs this with pytest, in an environment that has vLLM; the other tests do without.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from engines import Case, alike, converted, differences, engine, expected, fill_with_nan, load, prompts_of, write

import linearize.demo
from linearize.convert import convert, plan_conversion
from linearize.export import formats, native

DEMO = Path(linearize.demo.__file__).parent / "model"
# Of tokens: shorter and longer than a chunk of 64, one that is a chunk, and one token.
LENGTHS = (1, 2, 130, 7, 64, 33, 1, 90, 65, 17)
NEW = 8
CHUNK = {"max_num_batched_tokens": 64}
MIXED = Case("olmo2", (("gsa", {}), ("gla", {"window": 8, "sink": 1}), ("gdn", {"faithful": True}), ("gla", {})))
# All layers are linear, and heads keep softmax: one of four, three of them, two apart, none.
HEADS = Case(
    "qwen3",
    (("gla", {"heads": "1"}), ("gsa", {"heads": "0,1,3"}), ("gdn", {"heads": "0,2", "window": 8}), ("gla", {})),
)
# Each mechanism and each architecture; chunked or whole.
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    # The source writes full_attention for every layer, which vLLM reads.
    "qwen3 gdn hybrid": (alike("qwen3", "gdn", keep=(1, 2)), CHUNK),
    "granite gla window": (alike("granite", "gla", window=16, sink=1), CHUNK),
    "gpt_neox retnet": (alike("gpt_neox", "retnet"), {}),
    "phi3 sla": (alike("phi3", "sla", base="gdn"), CHUNK),
    # By this option vLLM would take its own class, which knows no states.
    "qwen2 la, tied embeddings": (alike("qwen2", "la"), {"model_impl": "transformers"}),
    # A sliding window in every layer of the source, and so in the layer and the head that keep softmax.
    "mistral mhla, a layer and a head kept": (
        Case("mistral", (("mhla", {}), None, ("mhla", {"heads": "1"}), ("mhla", {}))),
        CHUNK,
    ),
    # Soft caps; windows in every other layer of the source.
    "gemma2 gla without rope, layers and a head kept": (
        Case("gemma2", (("gla", {"heads": "0"}), ("gla", {"rope": False}), None, None)),
        {},
    ),
    "qwen3, kept heads of different number": (HEADS, CHUNK),
    "olmo2, layers of different states": (MIXED, CHUNK),
    # The last layer is what `--kept-window` makes of a kept one.
    "llama, different states, hybrid, a window alone": (
        Case("llama", (None, *MIXED.layers[1:3], ("window", {"window": 12, "sink": 4}))),
        {},
    ),
    "gpt2 gsa, a layer kept": (alike("gpt2", "gsa", keep=(1,)), CHUNK),
    "mixtral gdn": (alike("mixtral", "gdn"), CHUNK),
    "qwen3_moe gsa hybrid": (alike("qwen3_moe", "gsa", keep=(0,)), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_writes_what_generate_writes(name: str, tmp_path: Path) -> None:
    case, settings = CASES[name]
    folder = converted(tmp_path, case)
    prompts = prompts_of(LENGTHS)
    references = expected(load(folder), prompts, NEW)
    with engine(folder, **settings) as llm:
        assert len(engines.state_layers(llm)) == sum(layer is not None for layer in case.layers)
        fill_with_nan(llm)
        assert differences(write(llm, prompts, NEW), references) == []
        # Again, in rows that others used, or that hold NaN.
        fill_with_nan(llm)
        alone = [output for prompt in prompts[:3] for output in write(llm, [prompt], NEW)]
        assert differences(alone, references[:3]) == []


def test_a_compiled_engine_writes_what_generate_writes(tmp_path: Path) -> None:
    """vLLM compiles what is around the operator of each layer: small maps as one product, features, gates, blends."""
    layers = (("gdn", {"window": 8}), ("gsa", {"norm": "hidden"}), None, ("la", {"feature_map": "hedgehog"}))
    folder, prompts = converted(tmp_path, Case("llama", layers)), prompts_of(LENGTHS)
    references = expected(load(folder), prompts, NEW)
    with engine(folder, enforce_eager=False, **CHUNK) as llm:
        assert [layer.maps is not None for layer in engines.state_layers(llm)] == [True, False, False]
        fill_with_nan(llm)
        assert differences(write(llm, prompts, NEW), references) == []
    with engine(folder, dtype="bfloat16") as llm:
        mixers = [layer.module.mixer for layer in engines.state_layers(llm)]
        kept = [mixer.get_parameter(name) for mixer in mixers for name in mixer.fp32_names()]
        assert {parameter.dtype for parameter in kept} == {torch.float32}  # and not rounded as the others


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "options", "differs"),
    [
        ("LlamaConfig", {}, {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}}),
        ("Qwen2Config", {"memories": 2, "maps": True}, {"tie_word_embeddings": True}),  # with biases of q, k and v
    ],
)
def test_vllms_own_class_writes_what_an_export_computes(
    kind: str, options: dict[str, Any], differs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GraniteMoeHybrid without our plugin and without trust, placed irregularly, in float32.

    The build for CPUs stops at a prefix cache of Mamba-2. `prove` is left out, for transformers before 5.24 normalises
    all groups of this format together. Qwen3.5 has a kernel for bfloat16 alone here, and asks for torchvision.
    """
    sizes = {"head_dim": None, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    monkeypatch.setitem(engines.ARCHITECTURES, "a", (kind, {**sizes, **differs}))
    monkeypatch.setenv("VLLM_PLUGINS", "")
    layer = ("mamba2", {"eps": 1e-6, **options})
    model, out = load(converted(tmp_path, Case("a", (layer, None, None, layer)))), tmp_path / "out"
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".mixer." in name:  # as if it were trained
            parameter.data += 0.3 * torch.randn(parameter.shape)
    form = formats.choose("auto", model.config, "it")
    out.mkdir()
    (out / "config.json").write_text(json.dumps(form.config(model.config)))
    weights = {name: x.detach() for name, x in model.state_dict().items()}
    native.save(out, form.fold(model.config, weights), "float32", form.precise)
    prompts = prompts_of(LENGTHS)
    with engine(out, trust_remote_code=False, enable_prefix_caching=False, **CHUNK) as llm:
        assert differences(write(llm, prompts, NEW), expected(model, prompts, NEW), 1e-4) == []


def class_of(llm: Any) -> str:
    """The name of the class of the model in an engine."""
    return type(llm.llm_engine.model_executor.driver_worker.worker.model_runner.model).__name__


def test_vllm_writes_what_windows_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our plugin and without trust, in transformers' class and in its own. The first changes that class for the
    whole process, so the models that other tests use are left out here."""
    monkeypatch.setenv("VLLM_PLUGINS", "")
    folder, prompts = converted(tmp_path, alike("llama", "window", keep=(1,), window=16, sink=0)), prompts_of(LENGTHS)
    out, references = tmp_path / "out", expected(load(folder), prompts, NEW)
    native.export_native(str(folder), "auto", out)
    own = {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}}
    for kind, settings in {"TransformersForCausalLM": {}, "LlamaForCausalLM": own}.items():
        with engine(out, trust_remote_code=False, **settings, **CHUNK) as llm:
            assert class_of(llm) == kind
            assert differences(write(llm, prompts, NEW), references, 1e-5) == []


def test_vllm_writes_what_windows_with_sinks_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own Granite-SWA."""
    monkeypatch.setenv("VLLM_PLUGINS", "")
    made = alike("llama", "window", keep=(1,), window=16, sink=0, sink_logit=True)
    folder, prompts = converted(tmp_path, made), prompts_of(LENGTHS)
    native.export_native(str(folder), "auto", tmp_path / "out")
    with engine(tmp_path / "out", trust_remote_code=False, **CHUNK) as llm:
        assert class_of(llm) == "GraniteForCausalLM"
        assert differences(write(llm, prompts, NEW), expected(load(folder), prompts, NEW), 1e-5) == []


def test_vllms_own_qwen3_stops_at_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    folder = converted(tmp_path, alike("qwen3", "window", keep=(1,), window=16, sink=0))
    native.export_native(str(folder), "auto", tmp_path / "out")
    with pytest.raises(AssertionError, match="max_window_layers"), engine(tmp_path / "out", trust_remote_code=False):
        pass


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, a trained one with a tokenizer, as a hybrid of kept layers and kept heads."""
    folder = tmp_path_factory.mktemp("demo") / "linear"
    plan = plan_conversion(str(DEMO), "gla", layers="0,1,3,4", keep_heads="0:1;3:0", options={"window": 32, "sink": 1})
    convert(*plan, folder, level="none", say=lambda text: None)
    return folder


def test_32_requests_in_random_order_stop_sampling_and_preemption(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    from linearize.serve.vllm_models import StateManager

    asked: list[int] = []
    own = StateManager.get_num_blocks_to_allocate

    def as_vllm(self: Any, *args: Any, **more: Any) -> int:
        asked.append(own(self, *args, **more))
        assert asked[-1] == MambaManager.get_num_blocks_to_allocate(self, *args, **more)
        return asked[-1]

    monkeypatch.setattr(StateManager, "get_num_blocks_to_allocate", as_vllm)
    preempted: list[str] = []
    plain = Scheduler._preempt_request

    def noted(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        plain(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", noted)
    chance = random.Random(2)
    prompts = prompts_of(tuple(chance.randint(1, 150) for _ in range(32)), 2000)
    references = expected(load(demo), prompts, 24)
    order = list(range(32))
    chance.shuffle(order)
    # Eight rows for 32 requests; blocks of keys for a few of them, so that some must give theirs back.
    with engine(demo, max_num_seqs=8, max_num_batched_tokens=128, num_gpu_blocks_override=13) as llm:
        fill_with_nan(llm)
        outputs = write(llm, [prompts[i] for i in order], 24)
        assert differences(outputs, [references[i] for i in order]) == []
        assert preempted
        assert {*asked} == {0, 1}
        tokens, _ = references[3]
        stop = tokens[5]
        (stopped,) = write(llm, [prompts[3]], 24, stop_token_ids=[stop])
        assert list(stopped.outputs[0].token_ids) == tokens[: tokens.index(stop) + 1]
        assert stopped.outputs[0].finish_reason == "stop"
        (several,) = write(llm, [prompts[4]], 12, temperature=1.0, n=3)
        assert len({tuple(one.token_ids) for one in several.outputs}) == 3
        (likely,) = write(llm, [prompts[5]], 4, logprobs=3)
        assert all(len(step) >= 3 for step in likely.outputs[0].logprobs)


# ---------------------------------------------------------------- several processes


def test_two_processes_divide_the_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two processes of two cores
    case = Case("qwen3", (("gsa", {}), ("gla", {"window": 8, "sink": 1}), ("retnet", {}), None))
    folder = converted(tmp_path, case)
    prompts = prompts_of(LENGTHS)
    references = expected(load(folder), prompts, NEW)
    with engine(folder, tensor_parallel_size=2, distributed_executor_backend="mp", **CHUNK) as llm:
        assert differences(write(llm, prompts, NEW), references) == []


# ---------------------------------------------------------------- what is refused


def refusal(folder: Path, **settings: Any) -> str:
    """What vLLM says of an engine that cannot be."""
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ValueError) as raised:
        EngineArgs(str(folder), trust_remote_code=True, **settings).create_engine_config()
    return str(raised.value)


def test_what_linear_layers_do_not_do_is_refused(demo: Path, tmp_path: Path) -> None:
    together = converted(tmp_path, alike("llama", "sla"))
    assert "(sla): its heads are computed from each other" in refusal(
        together, tensor_parallel_size=2, distributed_executor_backend="mp"
    )
    assert "speculative decoding" in refusal(
        demo, speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    )
    assert "LoRA adapters" in refusal(demo, enable_lora=True)
    assert "KV transfer" in refusal(demo, kv_offloading_size=1.0)


def test_an_encoder_is_refused_by_name(tmp_path: Path) -> None:
    import transformers

    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained(tmp_path / "source")
    plan = plan_conversion(str(tmp_path / "source"), "la")
    convert(*plan, tmp_path / "linear", level="none", say=lambda text: None)
    assert "LinearizedBertForMaskedLM is no causal language model" in refusal(tmp_path / "linear")


@pytest.mark.parametrize("asked", [True, None])
def test_prefix_caching_is_off_with_a_reason_where_it_was_asked_for(
    demo: Path, asked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    messages: list[str] = []
    log = logging.getLogger("vllm.linearize")
    monkeypatch.setattr(log, "warning", messages.append)  # what vLLM prints goes where stdout was when it was imported
    made = EngineArgs(str(demo), trust_remote_code=True, enable_prefix_caching=asked).create_engine_config()
    assert made.cache_config.enable_prefix_caching is False
    assert made.model_config.is_hybrid
    assert ("Prefix caching is off" in "".join(messages)) == bool(asked)


# ---------------------------------------------------------------- over HTTP


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server in a child process, asked over loopback."""

    def __init__(self, port: int, name: str) -> None:
        self.port, self.name = port, name

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.get("/health")[0] == 200
        return False

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def open(self, path: str, **asked: Any) -> http.client.HTTPResponse:
        """The answer to a request, not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = json.dumps({"model": self.name, **asked})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection.getresponse()

    def post(self, path: str, **asked: Any) -> dict[str, Any]:
        answer = self.open(path, **asked)
        text = answer.read().decode()
        assert answer.status == 200, text
        return json.loads(text)

    def stream(self, path: str, **asked: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer."""
        lines = self.open(path, stream=True, **asked).read().decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(one) for one in data if one != "[DONE]"]


@contextlib.contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[Server]:
    """`linearize serve` on a folder, until it answers; ended afterwards."""
    port = free_port()
    command = [sys.executable, "-m", "linearize", "serve", str(folder), "--port", str(port), *options]
    with log.open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            server, deadline = Server(port, str(folder)), time.monotonic() + 200
            while not server.answers():
                assert child.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
            yield server
        finally:
            child.terminate()
            child.wait(60)


def misused(server: Server, folder: Path, wanted: dict[str, Any], reference: str) -> None:
    """The server answers malformed requests with an error, a client that leaves with nothing, and afterwards, without
    its folder, as before."""
    for body in (b'{"model": ', b"[]", b"\xff"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert 400 <= connection.getresponse().status < 500
    left = server.open("/v1/completions", stream=True, **{**wanted, "max_tokens": 900})
    assert left.readline().startswith(b"data: ")
    left.close()
    second = [sys.executable, "-m", "linearize", "serve", str(folder), "--port", str(server.port)]
    taken = subprocess.run(second, capture_output=True, text=True, timeout=120)
    assert (taken.returncode, str(server.port) in taken.stderr) == (4, True), taken.stderr
    away = folder.rename(folder.with_name("away"))
    assert server.post("/v1/completions", **wanted)["choices"][0]["text"] == reference
    away.rename(folder)


PROMPT = "import os\n\n\ndef main():\n"


def greedy(folder: Path, new: int, messages: list[dict[str, str]] | None = None) -> str:
    """What generate() adds to PROMPT, or answers in a chat."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = tokenizer(PROMPT).input_ids
    if messages is not None:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids
    tokens, _ = expected(load(folder), [ids], new)[0]
    return tokenizer.decode(tokens)


def test_vllm_over_http_streams_and_survives_a_request_that_is_cancelled(demo: Path, tmp_path: Path) -> None:
    options = ("--dtype", "float32", "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "1024")
    options += ("--enforce-eager",)
    wanted = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    with serving(demo, tmp_path / "log", "--server", "vllm", "--", *options) as server:
        reference = greedy(demo, 16)
        assert server.post("/v1/completions", **wanted)["choices"][0]["text"] == reference
        events = server.stream("/v1/completions", **wanted)
        assert len(events) > 3
        assert "".join(event["choices"][0]["text"] for event in events) == reference
        long = server.open("/v1/completions", stream=True, **{**wanted, "max_tokens": 900})
        assert long.readline().startswith(b"data: ")
        long.close()
        cancelled = time.monotonic()
        while "vllm:num_requests_running{" in (metrics := server.get("/metrics")[1]):
            (running,) = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running{")]
            if float(running.split()[-1]) == 0:
                break
            assert time.monotonic() - cancelled < 30
            time.sleep(0.1)
        assert server.post("/v1/completions", **wanted)["choices"][0]["text"] == reference
        misused(server, demo, wanted, reference)
        assert server.open("/v1/completions", **{**wanted, "prompt": "def main(): pass\n" * 14500}).status == 400
        chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "def"}], max_tokens=4)
        assert chat["choices"][0]["message"]["role"] == "assistant"


def test_transformers_serves_the_same_text(demo: Path, tmp_path: Path) -> None:
    with serving(demo, tmp_path / "log", "--server", "transformers", "--", "--dtype", "float32") as server:
        wanted = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        text = server.post("/v1/completions", **wanted)["choices"][0]["text"]
        assert greedy(demo, 8).startswith(text)
        assert text
        events = server.stream("/v1/completions", **wanted)
        assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == text
        misused(server, demo, wanted, text)
        asked = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 8, "temperature": 0}
        message = server.post("/v1/chat/completions", **asked)["choices"][0]["message"]
        assert message["role"] == "assistant"
        assert message["content"]
        assert greedy(demo, 8, asked["messages"]).startswith(message["content"])
        events = server.stream("/v1/chat/completions", **asked)
        parts = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
        assert "".join(parts) == message["content"]
