"""`linearize bench`, on the CPU and with few tokens: that every case runs, and what is told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from models import Zoo

from linearize import bench, bench_measure, bench_model, bench_report
from linearize.bench_case import case_names, load_case
from linearize.errors import Exit


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
    for record in measured["errors"]:
        assert list(record["errors"]) == ["o", *(f"d{name}" for name in case.names)]
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
    assert "tiny: LlamaForCausalLM, 0.00 B random parameters in bfloat16; 2 layers to gsa (slots=64" in out
    assert len([line for line in out.splitlines() if line.startswith(("| softmax, SDPA | 8", "| gsa | 8"))]) == 4


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
    ],
)
def test_a_wrong_question_is_told(linearize: Command, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = linearize("bench", "model", *arguments)
    assert (code, out) == (Exit.USAGE, "")
    assert said in err
