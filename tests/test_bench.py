"""`linearize bench`, on the CPU and with few tokens: that every case runs, and what is told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command

from linearize import bench, bench_measure, bench_report
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
