"""`linearize bench`, on the CPU and with few tokens: that every case runs, and what is told of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TOLERANCE, Command, relative_error
from models import Zoo

from benchmarks import kernel_tables
from linearize.bench import kernels as bench
from linearize.bench import model as bench_model
from linearize.bench import report as bench_report
from linearize.bench import timing as bench_measure
from linearize.bench import vision as bench_vision
from linearize.bench.case import case_names, load_case
from linearize.errors import Exit
from linearize.train.save import meta_model
from linearize.verify.child.inputs import make_inputs


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is spent on good numbers."""
    monkeypatch.setattr(bench_measure, "SECONDS", 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_every_mechanism_with_kernels_has_a_case(linearize: Command) -> None:
    told = json.loads(linearize("mechanisms", "--json")[1])
    assert {one["name"] for one in told if "triton" in one["backends"]} <= set(case_names())


@pytest.mark.parametrize("name", case_names())
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


def test_all_are_measured_and_drawn(linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "case_names", lambda: ["gsa", "la"])
    code, out, err = linearize("bench", "kernels", "--tokens", 8, "--plot", tmp_path / "times.png")
    assert code == 0, err
    assert "### gsa" in out
    assert "### la" in out
    assert "| B1 T8 H16/4 D128 m64 bf16 | linearize, PyTorch path |" in out
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_mechanism_is_told_the_nearest(linearize: Command) -> None:
    code, out, err = linearize("bench", "kernels", "--mechanism", "gsaa")
    assert (code, out) == (Exit.USAGE, "")
    assert "Did you mean 'gsa'?" in err


def test_a_picture_needs_matplotlib(linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_report.importlib.util, "find_spec", lambda name: None)
    code, out, err = linearize("bench", "kernels", "--plot", tmp_path / "times.png")
    assert (code, out) == (Exit.RESOURCE, "")
    assert "pip install matplotlib" in err


@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_a_result_has_a_folder_to_go_to(linearize: Command, tmp_path: Path, option: str) -> None:
    code, out, err = linearize("bench", "kernels", "--mechanism", "la", "--tokens", 8, option, tmp_path / "no" / "x")
    assert (code, out) == (Exit.USAGE, "")
    assert f"no such folder: {tmp_path / 'no'}" in err


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
    assert "does not require grad" in out
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
    assert "retnet B1 T8 H16 D128 bf16" in err
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
    assert "S, its time beside gla alone: +25.0%, +25.0%." in told
    assert "| S | fla other | 4.000 (4.000-4.000) | refused |  |  |  |  |  | 4.00 |" in told
    assert "relative error" not in told  # a result that was cut before its errors


def test_products_of_fp32_have_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    case = load_case("la")
    half, full = case.shapes[:2]
    inputs = case.inputs(case.shorten(full, 8), "cpu")
    monkeypatch.setattr(bench, "here", lambda: "cuda")
    assert list(bench.backends(case, half)) == ["linearize", "linearize, PyTorch path"]
    assert list(bench.backends(case, full)) == ["linearize, tf32", "linearize, PyTorch path"]
    assert list(case.peers(inputs, full, "triton")) == ["linearize, ieee"]
    assert not case.peers(inputs, half, "triton")
    failed = {"name": "linearize, ieee", "shape": "S", "failed": "why"}
    measured = {
        "cold_start": None,
        "errors": [failed],
        "runs": [failed | {"name": "linearize, PyTorch path, compiled"}],
    }
    assert bench.failures({"mechanisms": {"la": {**measured, "steps": []}}}) == ["la S, linearize, ieee: why"]


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
    cache = {(one["name"], one["context"], one["batch"]): one["cache_mib"] for one in result["decode"]}
    grows = cache["softmax, SDPA", 12, 1] / cache["softmax, SDPA", 6, 1]
    assert grows == pytest.approx(2)
    assert cache["la", 12, 1] == cache["la", 6, 1] == cache["la", 6, 2] / 2


def test_a_shape_is_measured(linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64}
    tiny |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(bench_model.SHAPES, "tiny", bench_model.SHAPES["1b"] | tiny)
    sizes = ("--train", "", "--contexts", "8", "--batches", "1")
    code, out, err = linearize("bench", "model", "--shape", "tiny", *sizes)
    assert code == 0, err
    assert "tiny: LlamaForCausalLM, 0.0 M random parameters in bfloat16; 2 layers to gsa (slots=64" in out
    assert len([line for line in out.splitlines() if line.startswith(("| softmax, SDPA | 8", "| gsa | 8"))]) == 4


def test_no_more_tokens_than_the_model_takes(linearize: Command, zoo: Zoo) -> None:
    code, out, err = linearize("bench", "model", zoo.folders("gpt2")[0], "--train", "", "--contexts", "8,217")
    assert (code, out) == (Exit.USAGE, "")
    assert "takes at most 256 tokens: give --train up to 256 and --contexts up to 216" in err


def test_steps_are_compiled_where_they_can_be(linearize: Command, zoo: Zoo) -> None:
    code, out, err = linearize("bench", "model", zoo.folders("llama")[0], "--compile")
    assert (code, out) == (Exit.INCOMPATIBLE, "")
    assert "can be compiled on a GPU" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "either a model or --shape"),
        (("somewhere", "--shape", "1b"), "either a model or --shape"),
        (("--shape", "1bb"), "Did you mean '1b'?"),
        (("--shape", "1b", "--contexts", "2k"), "--contexts 2k: give whole numbers"),
        (("--shape", "1b", "--to", "gsaa"), "Did you mean 'gsa'?"),
        (("--shape", "1b", "--sizes", "224"), "--sizes means nothing to a model of text"),
        (("--shape", "pvt-t", "--to", "saga", "--train", "8"), "--train means nothing to a model of images"),
    ],
)
def test_a_wrong_question_is_told(linearize: Command, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = linearize("bench", "model", *arguments)
    assert (code, out) == (Exit.USAGE, "")
    assert said in err


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
        ("vit", ["softmax, SDPA", "saga"]),
        ("pvt", ["softmax, the architecture's own", "softmax, SDPA", "saga"]),
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


def test_compiled_inference_is_measured_on_demand(
    linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    arguments = ("--to", "saga", "--sizes", "64", "--compile", "--json")
    code, out, err = linearize("bench", "model", vision_folder(tmp_path, "vit"), *arguments)
    assert code == 0, err
    tables = {name: [one["name"] for one in json.loads(out)[name] if one["ms"] > 0] for name in TABLES}
    plain = ["softmax, SDPA", "saga"]
    assert tables == {"inference": plain + [f"{name}, compiled" for name in plain], "training": plain}


@pytest.mark.parametrize("mechanism", ["la", "mhla", "saga"])
def test_a_shape_of_images_is_measured(linearize: Command, monkeypatch: pytest.MonkeyPatch, mechanism: str) -> None:
    monkeypatch.setitem(bench_model.SHAPES, "deit-s", bench_model.SHAPES["deit-s"] | TINY["vit"])
    code, out, err = linearize("bench", "model", "--shape", "deit-s", "--to", mechanism, "--sizes", "32")
    assert code == 0, err
    assert "deit-s: DeiTForImageClassification, " in out
    assert f" M random parameters in bfloat16; 2 layers to {mechanism}" in out
    rows = [line.split(" | ") for line in out.splitlines() if " | 32 | 1 | " in line]
    assert [row[0] for row in rows] == ["| softmax, SDPA", f"| {mechanism}"] * 2
    assert all(float(row[3].replace(",", "")) > 0 for row in rows)


def test_sdpa_in_the_place_of_an_architectures_own_code_is_the_same_model(tmp_path: Path) -> None:
    planned = bench_model.plan_for(str(vision_folder(tmp_path, "pvt")), None, "saga", {})
    model = meta_model(None, planned, None, False, "cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
        images, sides = make_inputs(model), bench_vision.contenders(model, "saga")
        own, fused, saga = (_logits(model, images, within) for within in sides.values())
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
