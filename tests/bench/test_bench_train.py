"""`bench train`: each stage of a recipe, and beside it a student with softmax."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import base, make_recipe, stage

from linearize.bench.train import bench_train, markdown


@pytest.mark.slow
def test_bench_train(tmp_path: Path) -> None:
    stages = stage("attention_transfer"), stage("logit_kl", "all")
    recipe = make_recipe(tmp_path, base(tmp_path, "llama", layers="1"), *stages, runtime={"device": "cpu"})
    result = bench_train(recipe, print)
    transfer, kl = result["stages"]
    assert [transfer["name"], kl["name"]] == ["attention_transfer", "logit_kl"]
    assert "softmax" not in transfer
    assert min(transfer["tokens_per_s"], kl["tokens_per_s"], kl["softmax"]["tokens_per_s"]) > 0
    assert "products" not in kl
    assert sum(line.startswith("| logit_kl") for line in markdown(result).splitlines()) == 2
    assert not (tmp_path / "run").exists()
