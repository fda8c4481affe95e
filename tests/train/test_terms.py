"""A new term of the loss is one function: every place that has to know of it reads the registry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training import base, metrics, stage, write_recipe

# Runs in a process of its own, for the schema is built when recipes are first imported.
NEW_TERM = """
import json, sys
from pathlib import Path
from linearize.train.terms import term

@term(weight=0.0, teacher=None, about="Factor of the logits' mean square, which is a sum over tokens.")
def square(at):
    places = (at.targets != -100)[..., None]
    return (at.ours.float().square() * places).mean(-1).sum() / at.counts[1]

from linearize.finetune import finetune
from linearize.page.record import read_run
from linearize.page.report import draw_training
from linearize.recipe.recipe import load_recipe
from linearize.recipe.schema import recipe_schema

shown = []
for path in map(Path, sys.argv[1:]):
    finetune(load_recipe(path), say=lambda text: None)
    shown.append("square" in draw_training(read_run(path.parent / "run")).svg())
print(json.dumps([recipe_schema()["$defs"]["LogitLoss"]["properties"]["square"], shown]))
"""


@pytest.mark.slow
def test_a_term_that_is_one_function_reaches_recipe_loss_metrics_and_page(tmp_path: Path) -> None:
    model = base(tmp_path / "bases", "llama")
    paths = []
    for name, size in (("whole", None), ("parts", 12)):
        loss = {"kl": 1.0, "square": 0.5, "chunk_size": size}
        paths.append(write_recipe(tmp_path / name, model, stage("logit_kl", "all", loss=loss, steps=2)))
    done = subprocess.run(
        [sys.executable, "-c", NEW_TERM, *map(str, paths)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    schema, shown = json.loads(done.stdout.splitlines()[-1])
    assert (schema["default"], shown) == (0.0, [True, True])
    assert "mean square" in schema["description"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert len(metrics(whole, "square")) == 2
    for key in ("loss", "kl", "square"):
        assert metrics(parts, key) == pytest.approx(metrics(whole, key), rel=1e-5)
    total = [kl + 0.5 * square for kl, square in zip(metrics(whole, "kl"), metrics(whole, "square"), strict=True)]
    assert metrics(whole)[:2] == pytest.approx(total)
