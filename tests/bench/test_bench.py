"""`linearize bench`, on the CPU and with few tokens: that every case runs, and what is told of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import types
import weakref
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TOLERANCE, Command, holds, relative_error, with_slow
from models import Zoo
from torch.autograd import DeviceType

from benchmarks import kernel_tables
from linearize.bench import kernels as bench
from linearize.bench import model as bench_model
from linearize.bench import report as bench_report
from linearize.bench import text as bench_text
from linearize.bench import timing as bench_measure
from linearize.bench import vision as bench_vision
from linearize.bench.cases import case_names, load_case
from linearize.bench.layer import Layer
from linearize.errors import Exit, LinearizeError
from linearize.recipe.presets import presets
from linearize.train.save import meta_model
from linearize.verify.child.inputs import make_inputs


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is spent on good numbers: a run is timed once, and by default one precedes it."""
    on_cpu = bench_measure._on_cpu
    monkeypatch.setattr(bench_measure, "SECONDS", 0.0)
    monkeypatch.setattr(bench_measure.timed, "__defaults__", (1.0, 0, 1))  # share, warm, least
    monkeypatch.setattr(bench_measure, "_on_cpu", lambda run, count: on_cpu(run, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_every_mechanism_with_kernels_has_a_case(linearize: Command) -> None:
    told = json.loads(linearize("mechanisms", "--json")[1])
    assert {one["name"] for one in told if "triton" in one["backends"]} <= set(case_names())


@pytest.mark.parametrize("name", with_slow(case_names(), "gsa", "mhla"))
def test_a_case_is_measured(linearize: Command, name: str) -> None:
    code, out, err = linearize("bench", "kernels", "--mechanism", name, "--tokens", 16, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert list(result["mechanisms"]) == [name]
    measured, case = result["mechanisms"][name], load_case(name)
    runs = {run["name"]: run for run in measured["runs"]}
    assert {"linearize, PyTorch path", "softmax, SDPA"} <= set(runs)
    assert all(run["forward"]["ms"] > 0 and run["both"]["ms"] > 0 for run in runs.values())
    assert runs["linearize, PyTorch path"]["tflop_s"] > 0
    assert len(measured["steps"]) == len({case.shorten(shape, 16) for shape in case.steps})
    assert all(step["us"] > 0 for step in measured["steps"])
    for record, shape in zip(measured["errors"], bench.cut(case, case.errors, 16), strict=True):
        assert list(record["errors"]) == ["o", *(f"d{name}" for name in case.named(shape))]
        assert max(record["errors"].values()) < (1e-5 if "f32" in record["shape"].split(" gates")[0] else 2e-2)


def test_all_are_measured(linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "case_names", lambda: ["gsa", "la"])
    every = ("--mechanism", "all")
    code, out, err = linearize("bench", "kernels", *every, "--tokens", 8)
    assert code == 0, err
    assert "### gsa" in out
    assert "### la" in out
    assert "| B1 T8 H16/4 D128 m64 bf16 | linearize, PyTorch path |" in out


def test_layers_of_presets_are_measured(linearize: Command) -> None:
    code, out, err = linearize("bench", "kernels", "--preset", "gsa-window, gla", "--tokens", 8, "--json")
    assert code == 0, err
    measured = json.loads(out)["mechanisms"]
    assert list(measured) == ["preset gsa-window", "preset gla"]
    assert measured["preset gsa-window"]["options"].startswith(
        "gsa slots=128 state_heads=query window=64 sink=1 clock=0"
    )
    for name, table in measured.items():
        ours = [run for run in table["runs"] if run["name"] == "linearize, PyTorch path"]
        assert [run["shape"].split()[2:] for run in ours] == [["H32/8", "D128", "bf16"], ["H32/8", "D64", "bf16"]]
        assert all(run["both"]["ms"] > 0 and run["tflop_s"] > 0 for run in ours)
        assert [
            row for row in err.splitlines() if row.startswith(f"{name} {ours[0]['shape']}, softmax, SDPA: forward ")
        ]


def test_a_preset_is_measured_first(linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "case_names", lambda: ["la"])
    monkeypatch.setattr(bench, "measure_shape", lambda case, shape, ceilings: iter(()))
    monkeypatch.setattr(bench, "measure_errors", lambda case, shape: iter(()))
    for arguments, names in (
        ((), ["preset gsa-window", "la"]),
        (("--mechanism", "all"), ["la"]),
        (("--preset", "sla", "--mechanism", "la"), ["preset sla", "la"]),
    ):
        code, out, err = linearize("bench", "kernels", *arguments, "--tokens", 4, "--json")
        assert code == 0, err
        assert list(json.loads(out)["mechanisms"]) == names


def test_memories_of_query_heads_are_measured_first() -> None:
    """What the presets of GSA have, at the attention of an 8B model."""
    case = load_case("gsa")
    assert str(case.shapes[0]) == "B4 T2048 H32/8 D128 m128 bf16 32 memories"
    shape = case.shapes[0]._replace(B=2, T=3)
    assert [tuple(x.shape[:3]) for x in case.inputs(shape, "cpu")] == [(2, 3, 32), (2, 3, 8), (2, 3, 8), (2, 3, 32)]
    assert case.state(shape, "cpu").keys.shape == (2, 32, 128, 128)


def test_fla_gets_keys_for_each_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, ...]] = []

    def peer(*tensors: Any) -> tuple[Any]:
        given.append(tuple(x.shape[2] for x in tensors[:5]))
        return (tensors[0],)

    fake_fla(monkeypatch, **{"ops.gsa": {"chunk_gsa": peer}})
    case = load_case("gsa")
    for shape in (case.shapes[0]._replace(B=1, T=2), case.shapes[2]._replace(B=1, T=2)):
        case.fla(case.inputs(shape, "cpu"), shape)["fla chunk_gsa"]()
    assert given == [(32, 32, 32, 32, 32), (16, 4, 4, 4, 4)]


def test_an_unknown_mechanism_is_told_the_nearest(linearize: Command) -> None:
    code, out, err = linearize("bench", "kernels", "--mechanism", "gsaa")
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, "'gsa'")
    for command in (("kernels",), ("model", "--shape", "1b")):
        code, out, err = linearize("bench", *command, "--preset", "gsa-windw")
        assert (code, out) == (Exit.USAGE, "")
        assert holds(err, "'gsa-windw'", "'gsa-window'")


def test_a_result_has_a_folder_to_go_to(linearize: Command, tmp_path: Path) -> None:
    code, out, err = linearize("bench", "kernels", "--mechanism", "la", "--tokens", 8, "--save", tmp_path / "no" / "x")
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, f"'{tmp_path / 'no'}'")


def test_what_fails_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row did not fit a GPU, the next one found what the failed one had computed still there."""
    made: list[weakref.ref[torch.Tensor]] = []

    def work() -> dict[str, Any]:
        activations = torch.ones(3)
        made.append(weakref.ref(activations))
        try:
            told = "Tried to allocate 2.50 MiB. GPU 0 has a total capacity of 79.18 GiB of which little is free."
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. {told}")
        except torch.cuda.OutOfMemoryError as error:
            held = error  # a frame that holds its own error, as those of checkpointed layers do
            raise held from None

    seen: list[bool] = []
    monkeypatch.setattr(bench, "here", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(made[0]() is None))
    failed = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 MiB"
    assert bench.attempt(work) == {"failed": failed}
    assert seen == [True]


def test_what_fails_leaves_the_rest_of_the_table(linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(inputs: list[torch.Tensor], shape: Any) -> dict[str, Any]:
        def forward() -> torch.Tensor:
            raise RuntimeError("not on this machine")

        def backward_only() -> torch.Tensor:
            return inputs[0].detach()

        return {"peer": forward, "another": backward_only}

    monkeypatch.setattr(bench, "softmax", broken)
    code, out, err = linearize("bench", "kernels", "--mechanism", "la", "--tokens", 8)
    assert code == 0, err  # a peer may fail
    assert "| peer | RuntimeError: not on this machine |" in out
    assert holds(out, "require", "grad")
    monkeypatch.setattr(type(load_case("la")), "op", lambda *arguments: broken([], None)["peer"]())
    code, out, err = linearize("bench", "kernels", "--mechanism", "la", "--tokens", 8)
    assert code == Exit.CHECK_FAILED
    assert "la B1 T8" in err


def test_the_result_is_kept_while_it_grows(linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    kept = tmp_path / "result.json"
    arguments = ("bench", "kernels", "--mechanism", "retnet, la", "--tokens", 8, "--save", kept)
    code, _, err = linearize(*arguments)
    assert code == 0, err
    assert holds(err, "retnet", "B1", "T8", "H16", "D128", "bf16")
    whole = json.loads(kept.read_text())
    assert list(whole["mechanisms"]) == ["retnet", "la"]
    monkeypatch.setattr(bench, "measure_errors", stop)
    assert linearize(*arguments)[0] == Exit.INTERRUPTED
    cut = json.loads(kept.read_text())
    assert list(cut["mechanisms"]) == ["retnet"]
    assert len(cut["mechanisms"]["retnet"]["runs"]) == len(whole["mechanisms"]["retnet"]["runs"])
    page = "A\n<!-- kernels all -->\n<!-- end -->\nB\n<!-- kernels la -->\nold\n<!-- end -->\n<!-- kernels gsa -->\nC\n"
    filled = kernel_tables.fill(page + "<!-- end -->\n", whole)
    assert "A\n<!-- kernels all -->\n\ndevice CPU" in filled
    assert "old" not in filled
    assert "| B1 T8 H16 D128 bf16 | linearize, PyTorch path |" in filled.split("kernels la")[1]
    assert filled.endswith("\n<!-- kernels gsa -->\nC\n<!-- end -->\n")
    assert kernel_tables.fill(filled, whole) == filled


def test_contenders_are_compared() -> None:
    def run(name: str, shape: str, forward: float, both: float, **others: Any) -> dict[str, Any]:
        times = {
            part: {"ms": ms, "low": ms, "high": ms, "host": 0.1}
            for part, ms in zip(bench_report.PARTS, (forward, both), strict=True)
        }
        rates = {"tflop_s": 1.0, "tflop_share": 0.1, "tb_s": 1.0, "tb_share": 0.2}
        return {"name": name, "shape": shape, **times, "forward_mib": 1.0, "both_mib": both, **rates, **others}

    least = {"forward": 0.5, "both": 1.0}
    runs = [
        run("linearize", "S", 1.0, 2.0, roofline_ms=least),
        run("gla alone", "S", 0.8, 1.6),
        run("fla chunk_gla", "S", 3.0, 5.0),
        {"name": "fla other", "shape": "S", "forward": run("", "", 4.0, 0.0)["forward"], "failed": "refused"},
    ]
    empty = {"cold_start": None, "errors": [], "steps": []}
    ceilings = dict.fromkeys(("copy_tb_s", "bf16_tflop_s", "tf32_tflop_s", "fp32_tflop_s"), 1.0)
    told = bench_report.markdown({"machine": {}, "ceilings": ceilings, "mechanisms": {"sla": {"runs": runs, **empty}}})
    assert "| sla | S | fla chunk_gla | 3.00 | 2.50 | 40% |" in told
    assert "| sla | S | fla other | 4.00 |  |  |" in told
    assert "| 2.0, 2.0 | 0.10, 0.10 |  |\n" in told  # twice the roofline, ours beside itself
    assert "S, its time compared with gla alone: +25.0%, +25.0%." in told
    assert "| S | fla other | 4.000 (4.000-4.000) | refused |  |  |  |  |  | 4.00 |" in told
    assert [bench_report.line(record, runs) for record in (runs[0], runs[3])] == [
        "S, linearize: forward 1.000 ms (CPU 0.100); forward + backward 2.000 ms (CPU 0.100)",
        "S, fla other: forward 4.000 ms (CPU 0.100); refused; 4.00 times the time of linearize",
    ]
    assert "relative error" not in told  # a result that was cut before its errors


def test_products_of_fp32_have_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    case = load_case("la")
    half, full = case.shapes[:2]
    inputs = case.inputs(case.shorten(full, 8), "cpu")
    monkeypatch.setattr(bench, "here", lambda: "cuda")
    assert list(bench.backends(case, half)) == ["linearize", "linearize, PyTorch path"]
    assert list(bench.backends(case, full)) == ["linearize, tf32", "linearize, PyTorch path"]
    assert list(case.peers(inputs, full, "triton")) == ["linearize, bf16x6"]
    assert not case.peers(inputs, half, "triton")
    failed = {"name": "linearize, bf16x6", "shape": "S", "failed": "why"}
    measured = {
        "cold_start": None,
        "errors": [failed],
        "runs": [failed | {"name": "linearize, PyTorch path, compiled"}],
    }
    assert bench.failures({"mechanisms": {"la": {**measured, "steps": []}}}) == ["la S, linearize, bf16x6: why"]


def fake_fla(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    for name, content in {"": {}, "ops": {}, "ops.common": {}, **modules}.items():
        module = types.ModuleType(f"fla.{name}".rstrip("."))
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_peer_that_refuses_is_also_measured_without_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_o = types.SimpleNamespace(TRITON_ABOVE_3_7_1=False)

    def peer(q: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor]:
        if not chunk_o.TRITON_ABOVE_3_7_1:
            raise RuntimeError("see #640")
        return (q,)

    known = {"IS_NVIDIA_HOPPER": True, "TRITON_ABOVE_3_4_0": True, "TRITON_ABOVE_3_7_1": False}
    modules = {
        "utils": known,
        "ops.common": {"chunk_o": chunk_o},
        "ops.gated_delta_rule": {"chunk_gated_delta_rule": peer},
    }
    fake_fla(monkeypatch, **modules)
    monkeypatch.setattr(sys.modules["fla"], "utils", types.SimpleNamespace(**known), raising=False)
    case = load_case("gdn")
    inputs = case.inputs(case.shorten(case.shapes[0], 8), "cpu")
    for _ in range(2):  # the second shape's check stands again
        checked, unchecked = case.fla(inputs, case.shapes[0]).values()
        with pytest.raises(RuntimeError, match="#640"):
            checked()
        assert unchecked() is inputs[0]


def test_a_peer_that_cannot_be_imported_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fla(monkeypatch, **{"ops.retention": {}})
    monkeypatch.setattr(bench, "here", lambda: "cuda")
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: True)
    case = load_case("retnet")
    found = bench.contenders(case, case.inputs(case.shorten(case.shapes[0], 8), "cpu"), case.shapes[0])
    with pytest.raises(ImportError, match="chunk_retention"):
        found["fla"]()


def test_the_queue_is_kept_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of which a run takes 2 ms, the CPU 1 ms to queue it."""
    clock = {"cpu": 0.0, "device": 0.0}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = max(clock.values())

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

    def work(cpu: float, device: float) -> None:
        clock["cpu"] += cpu
        clock["device"] = max(clock.values()) + device

    monkeypatch.setattr(bench_measure, "here", lambda: "cuda")
    monkeypatch.setattr(bench_measure, "wait", lambda: clock.update(cpu=max(clock.values())))
    monkeypatch.setattr(bench_measure.time, "perf_counter", lambda: clock["cpu"])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: work(0.0, cycles / 2e9), raising=False)
    monkeypatch.setattr(bench_measure, "SECONDS", 0.4)
    found = bench_measure.queued(lambda: work(1e-3, 2e-4))
    assert found == pytest.approx({"ms": 0.2, "low": 0.2, "high": 0.2, "host": 1.0})


# ---------------------------------------------------------------- model


def test_a_model_is_measured_beside_its_original(linearize: Command, zoo: Zoo) -> None:
    source = zoo.folders("llama")[0]
    sizes = ("--train", "8", "--contexts", "6,12", "--batches", "1,2")
    code, out, err = linearize("bench", "model", source, "--to", "la", "--set", "slope=0.5", *sizes, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["model"]["mechanism"], result["model"]["options"]["slope"]) == ("la", 0.5)
    assert all("failed" not in one for table in ("train", "prefill", "decode") for one in result[table])
    assert [(one["tokens"], one["checkpointing"]) for one in result["train"]] == [
        (8, on) for on in (False, False, True, True)
    ]
    for table in ("train", "prefill", "decode"):
        ours = {}
        for one in result[table]:
            ours = one if one["name"] == "la" else ours
            assert ("faster" in one) == (one is not ours)
            assert one.get("faster", 1.0) == pytest.approx(one["ms"] / ours["ms"])
    cache = {(one["name"], one["context"], one["batch"]): one["cache_mib"] for one in result["decode"]}
    grows = cache["softmax, SDPA", 12, 1] / cache["softmax, SDPA", 6, 1]
    assert grows == pytest.approx(2)
    assert cache["la", 12, 1] == cache["la", 6, 1] == cache["la", 6, 2] / 2
    assert cache["softmax, SDPA, static cache", 12, 1] > cache["softmax, SDPA", 12, 1]
    assert holds(err, "SDPA", "cache", "12", "2", "ms/token")


def test_each_row_is_printed_when_it_is_measured(linearize: Command, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_text, "decode", stop)
    code, out, err = linearize("bench", "model", zoo.folders("llama")[0], "--train", "4", "--contexts", "6")
    assert (code, out) == (Exit.INTERRUPTED, "")
    rows = [row.split(":")[0] for row in err.splitlines() if ": tokens 4, " in row or ": context 6, " in row]
    assert rows == ["train, gsa-window", "train, softmax, SDPA"] * 2 + ["prefill, gsa-window", "prefill, softmax, SDPA"]
    assert err.index("building ") < err.index("train, gsa-window")


def test_a_preset_decides_mechanism_options_and_layers(linearize: Command, zoo: Zoo) -> None:
    brief = (zoo.folders("llama")[0], "--train", "", "--contexts", "")
    told = {}
    for name, arguments in {
        "gsa-window": (),
        "hybrid": ("--preset", "hybrid", "--set", "slots=16"),
        "la": ("--to", "la"),
    }.items():
        code, out, err = linearize("bench", "model", *brief, *arguments, "--json")
        assert code == 0, err
        told[name] = json.loads(out)["model"]
    assert [one["preset"] for one in told.values()] == ["gsa-window", "hybrid", None]
    assert [one["mechanism"] for one in told.values()] == ["gsa", "gsa", "la"]
    assert [(told[name]["options"]["slots"], told[name]["options"]["window"]) for name in ("gsa-window", "hybrid")] == [
        (128, 64),
        (16, 64),
    ]
    assert told["hybrid"]["layers"] == told["gsa-window"]["layers"] - 1


@pytest.mark.slow
def test_every_preset_can_be_measured() -> None:
    for one in presets():
        asked, images = bench_model.resolve_request(None, one.name, {}), one.name.startswith("vit-")
        shape = "deit-s" if images else "1b"
        plan = bench_model.plan_for(None, shape, asked.mechanism, asked.options, asked.layers)[0]
        assert (asked.name, plan.steps[0].mechanism) == (one.name, asked.mechanism)
        if images:
            with pytest.raises(LinearizeError, match=rf"--preset.*{one.name}.*--shape"):
                Layer(one.name)
        else:
            assert Layer(one.name).mechanism == asked.mechanism


def test_softmax_with_a_static_cache_is_compiled_where_transformers_does(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU transformers compiles the step by itself; here it is asked to, and the graph is run as it is."""
    planned = bench_model.plan_for(str(zoo.folders("llama")[0]), None, "gsa", {})
    model = meta_model(None, planned, None, False, "cpu").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.compile_config = compile_config = transformers.CompileConfig(backend="eager", mode=None)
    compile_config._compile_all_devices = True
    graphs, clocks = torch._dynamo.utils.counters["stats"], []
    monkeypatch.setattr(bench_text.Clock, "end", lambda clock: clocks.append(len(clock.times)))
    monkeypatch.setattr(bench_text, "peak_mib", lambda run, before: run())  # as on a GPU
    with model.teacher(), torch.no_grad():
        graphs.clear()
        assert bench_text.decode(model, 6, 2)["ms"] > 0
        assert graphs["unique_graphs"] == 0
        assert bench_text.decode(model, 6, 2, static=True)["ms"] > 0
    assert clocks == [bench_text.FIRST + 1, bench_text.TOKENS + 1] * 2  # the prompt is put, too
    assert graphs["unique_graphs"] == 1  # for both calls of generate()


@pytest.mark.slow
def test_compiled_training_is_measured_on_demand(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours beside softmax, each compiled by layers; the graphs are run as they are."""
    monkeypatch.setattr(bench_text, "check_compiles", lambda model: None)
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    planned = bench_model.plan_for(str(zoo.folders("llama")[0]), None, "gsa", {})
    graphs, counts = torch._dynamo.utils.counters["stats"], list[int]()
    torch._dynamo.reset()
    graphs.clear()
    result = bench_text.bench_text(
        planned, "gsa", train=(6,), contexts=(), compiled=True, tell=lambda *_: counts.append(graphs["unique_graphs"])
    )[1]
    names = ["gsa", "softmax, SDPA", "gsa, compiled", "softmax, SDPA, compiled"]
    assert [one["name"] for one in result["train"]] == names * 2
    assert all(one["ms"] > 0 for one in result["train"])
    assert counts == sorted(counts)
    assert counts[1] == 0 < counts[2] < counts[3] == counts[5] < counts[6] < counts[7]


def test_the_device_is_told_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 10 ms in which kernels of 2 and 3 ms overlap by one."""

    def event(start: float, end: float, kind: Any = DeviceType.CUDA, note: bool = False) -> Any:
        span = types.SimpleNamespace(start=start, end=end)
        return types.SimpleNamespace(device_type=kind, is_user_annotation=note, time_range=span)

    class Profile:
        def __init__(self, activities: Any) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self) -> Profile:
            return self

        start = stop = __exit__ = lambda *_: None

        def events(self) -> list[Any]:
            kernels = [event(4000, 7000), event(1000, 3000), event(3000, 5000)]
            return [*kernels, event(0, 9000, DeviceType.CPU), event(0, 9000, note=True)]

    monkeypatch.setattr(bench_measure, "profile", Profile)
    assert bench_measure.device_ms(lambda: None) is None  # on a CPU
    monkeypatch.setattr(bench_measure, "here", lambda: "cuda")
    monkeypatch.setattr(bench_measure, "wait", lambda: None)
    took = bench_measure.beside_device({"ms": 10.0}, bench_measure.device_ms(lambda: None))
    assert took == {"ms": 10.0, "device_ms": 6.0, "device_waits": pytest.approx(0.4)}
    assert bench_measure.working_ms([event(0, 9000, DeviceType.CPU)]) is None
    row = bench_model.line("prefill", {"name": "gsa", "context": 2048, **took, "faster": 2.0, "peak_mib": 1024.0})
    assert row == "prefill, gsa: context 2,048, ms 10.00, device ms 6.00, device waits 40%, " + (
        "speed of ours / of this 2.00, peak GiB 1.00"
    )
    failed = {"name": "gsa", "context": 8, "batch": 1, "failed": "why"}
    assert bench_model.line("decode", failed) == "decode, gsa: context 8, batch 1, why"
    about = {"mechanism": "gsa", "preset": None, "options": {}, "name": "8b", "architecture": "Llama", "layers": 1}
    result = {"machine": {}, "model": {**about, "parameters": 1, "dtype": "bfloat16"}, "decode": [failed]}
    assert bench_model.markdown(result).endswith("\n| gsa | 8 | 1 | why |  |  |  |  |  |  |")


@pytest.mark.parametrize(
    ("shape", "mechanism", "millions"),
    [
        ("1b", "gsa", 1235.8), ("3b", "gsa", 3212.7), ("8b", "gsa", 8030.3),
        ("llama-1.3b", "gsa", 1364.30), ("llama-340m", "sla", 373.87), ("pythia-1.4b", "la", 1414.65),
        ("deit-t", "saga", 5.7),
        ("deit-s", "mhla", 22), ("pvt-t", "saga", 13.2), ("pvt-s", "la", 24.5), ("pvtv2-b0", "saga", 3.7),
        ("pvtv2-b1", "mhla", 14.0), ("swin-t", "saga", 28.3), ("swin-s", "la", 49.6), ("swin-b", "saga", 87.8),
    ],
)  # fmt: skip
def test_shapes_are_those_of_their_models(shape: str, mechanism: str, millions: float) -> None:
    """The papers' numbers of parameters; a head here has two classes, theirs a thousand."""
    config = bench_model.SHAPES[shape]
    kind = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = kind(transformers.AutoConfig.for_model(**config))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(
        millions, rel=0.08 if millions < 100 else 1e-4
    )
    fewer = {"num_hidden_layers": 2} if "num_hidden_layers" in config else {}  # equal layers are planned alike
    plan = bench_model.plan_for(None, shape, mechanism, {}, **fewer)[0]
    assert {step.mechanism for step in plan.steps} == {mechanism}


def test_a_shape_is_measured(linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64}
    tiny |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(bench_model.SHAPES, "tiny", bench_model.SHAPES["1b"] | tiny)
    sizes = ("--to", "gsa", "--train", "", "--contexts", "8", "--batches", "1")
    code, out, err = linearize("bench", "model", "--shape", "tiny", *sizes)
    assert code == 0, err
    assert holds(out, "tiny", "LlamaForCausalLM", "0.0", "bfloat16", "2", "gsa", "slots=64")
    rows = [row.split(" | ")[0] for row in out.splitlines() if " | 8 | " in row]
    assert rows == ["| gsa", "| softmax, SDPA", "| gsa", "| softmax, SDPA", "| softmax, SDPA, static cache"]


def test_no_more_tokens_than_the_model_takes(linearize: Command, zoo: Zoo) -> None:
    code, out, err = linearize("bench", "model", zoo.folders("gpt2")[0], "--train", "", "--contexts", "8,217")
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, "256", "tokens", "--train", "--contexts", "216")


def test_steps_are_compiled_where_they_can_be(linearize: Command, zoo: Zoo) -> None:
    code, out, err = linearize("bench", "model", zoo.folders("llama")[0], "--compile")
    assert (code, out) == (Exit.INCOMPATIBLE, "")
    assert holds(err, "compiled", "GPU")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), ("--shape",)),
        (("somewhere", "--shape", "1b"), ("--shape",)),
        (("--shape", "1bb"), ("mean", "'1b'")),
        (("--shape", "1b", "--contexts", "2k"), ("--contexts", "2k")),
        (("--shape", "1b", "--to", "gsaa"), ("'gsa'",)),
        (("--shape", "1b", "--to", "gsa", "--preset", "gsa"), ("--to", "gsa", "--preset")),
        (("--shape", "1b", "--set", "slotz=3"), ("'slots'",)),
        (("--shape", "3b", "--sizes", "224"), ("--sizes",)),
        (("--shape", "pvt-t", "--to", "saga", "--train", "8"), ("--train",)),
    ],
)
def test_a_wrong_question_is_told(linearize: Command, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = linearize("bench", "model", *arguments)
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, *message)


# ---------------------------------------------------------------- images

TABLES = ("inference", "training")
TINY: dict[str, dict[str, Any]] = {
    "vit": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8},
    "pvt": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]},
}


def vision_folder(folder: Path, kind: str) -> Path:
    config = transformers.AutoConfig.for_model(kind, **TINY[kind], image_size=64, num_labels=3)
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForImageClassification"]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("vit", ["saga", "softmax, SDPA"]),
        ("pvt", ["saga", "softmax, the architecture's own", "softmax, SDPA"]),
    ],
)
def test_a_model_of_images_is_measured_at_each_size(
    linearize: Command, tmp_path: Path, kind: str, names: list[str]
) -> None:
    sizes = ("--sizes", "64,96", "--batches", "1,2")
    code, out, err = linearize("bench", "model", vision_folder(tmp_path, kind), "--to", "saga", *sizes, "--json")
    assert code == 0, err
    result = json.loads(out)
    for table in TABLES:
        assert not [one["failed"] for one in result[table] if "failed" in one]
        assert all(one["ms"] > 0 and one["images_s"] > 0 for one in result[table])
        found = [(one["size"], one["batch"], one["name"]) for one in result[table]]
        assert found == list(itertools.product((64, 96), (1, 2), names))


@pytest.mark.slow
def test_compiled_inference_is_measured_on_demand(
    linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    arguments = ("--to", "saga", "--sizes", "64", "--compile", "--json")
    code, out, err = linearize("bench", "model", vision_folder(tmp_path, "vit"), *arguments)
    assert code == 0, err
    tables = {name: [one["name"] for one in json.loads(out)[name] if one["ms"] > 0] for name in TABLES}
    plain = ["saga", "softmax, SDPA"]
    assert tables == {"inference": plain + [f"{name}, compiled" for name in plain], "training": plain}


@pytest.mark.parametrize("mechanism", ["la", "mhla", "saga"])
def test_a_shape_of_images_is_measured(linearize: Command, monkeypatch: pytest.MonkeyPatch, mechanism: str) -> None:
    monkeypatch.setitem(bench_model.SHAPES, "deit-s", bench_model.SHAPES["deit-s"] | TINY["vit"])
    code, out, err = linearize("bench", "model", "--shape", "deit-s", "--to", mechanism, "--sizes", "32")
    assert code == 0, err
    assert "deit-s: DeiTForImageClassification, " in out
    assert holds(out, "bfloat16", "2", f"{mechanism}")
    rows = [line.split(" | ") for line in out.splitlines() if " | 32 | 1 | " in line]
    assert [row[0] for row in rows] == [f"| {mechanism}", "| softmax, SDPA"] * 2
    assert all(float(row[3].replace(",", "")) > 0 for row in rows)


def test_sdpa_in_the_place_of_an_architectures_own_code_is_the_same_model(tmp_path: Path) -> None:
    planned = bench_model.plan_for(str(vision_folder(tmp_path, "pvt")), None, "saga", {})
    model = meta_model(None, planned, None, False, "cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
        images, sides = make_inputs(model), bench_vision.contenders(model, "saga")
        saga, own, fused = (_logits(model, images, within) for within in sides.values())
    assert relative_error(fused, own) < TOLERANCE[torch.float32]
    assert relative_error(saga, own) > 1e-2
    assert torch.equal(_logits(model, images, contextlib.nullcontext), saga)  # nothing of SDPA stays behind


def _logits(model: Any, images: dict[str, torch.Tensor], within: Any) -> torch.Tensor:
    with within(), torch.no_grad():
        return model(**images).logits


def test_batches_follow_from_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_vision.batch_for(1280) == 1  # on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [bench_vision.batch_for(size) for size in (64, 224, 384, 1280, 8000)] == [256, 256, 128, 16, 1]
