"""Activations that wait in the host's memory: the same run, and what an estimate says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training import T, base, make_recipe, metrics, same, stage, tensors, train

from linearize.errors import LinearizeError
from linearize.estimate.memory import Rehearsal
from linearize.train import offload

KL = stage("logit_kl", "all", loss={"kl": 1.0, "chunk_size": T // 4})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.mark.parametrize(
    "one", [pytest.param(stage("logit_kl", "all"), marks=pytest.mark.slow), KL], ids=["whole", "pieces"]
)
def test_it_changes_no_bit(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: dict[str, Any]) -> None:
    monkeypatch.setattr(offload, "LEAST", 1)
    moved, brought = [0], [0]
    away, back = offload.Host.away, offload.Host.back

    def count_away(host: Any, tensor: torch.Tensor) -> Any:
        assert tensor.untyped_storage().data_ptr() not in host.own()
        moved[0] += 1
        return away(host, tensor)

    def count_back(host: Any, kept: Any) -> Any:
        brought[0] += 1
        return back(host, kept)

    monkeypatch.setattr(offload.Host, "away", count_away)
    monkeypatch.setattr(offload.Host, "back", count_back)
    for on in (False, True):
        assert not moved[0]
        runtime = {"device": "cpu", "gradient_checkpointing": True, "offload_activations": on}
        train(make_recipe(tmp_path / str(on), base(root, "llama"), one, runtime=runtime))
    assert moved[0]
    assert brought[0]
    assert metrics(tmp_path / "True") == metrics(tmp_path / "False")
    assert same(*(tensors(tmp_path / str(on) / "run" / "final") for on in (True, False)))


def test_an_estimate_counts_them_in_the_host(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.estimate.memory.LEAST", 1)
    folder = base(root, "llama")

    def found(on: bool) -> Any:
        runtime = {"device": "cpu", "gradient_checkpointing": True, "offload_activations": on}
        recipe = make_recipe(tmp_path, folder, KL, runtime=runtime)
        return Rehearsal(recipe, None, folder, "no", gpu=False).stage(0)

    kept, moved = found(False), found(True)
    assert not moved.reason
    assert not kept.host
    assert 0 < kept.saved - moved.saved <= moved.host  # a tensor that two operations keep goes twice


def test_it_needs_checkpointing(root: Path, tmp_path: Path) -> None:
    with pytest.raises(LinearizeError, match="offload_activations: needs gradient_checkpointing: true"):
        make_recipe(tmp_path, base(root, "llama"), KL, runtime={"device": "cpu", "offload_activations": True})
