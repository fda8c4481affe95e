"""benchmarks.study: what a variant's text makes of its recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.study import parse, recipe_of


def test_keys_of_the_stages_are_set() -> None:
    """Those of one stage do not reach the other, though both begin with one schedule."""
    text = (
        "gsa-window slots=64 lr=3e-4 last.loss.temperature=2 last.optimizer.betas=[0.9,0.99] "
        "last.schedule.min_lr_ratio=0.5 first.schedule.name=constant first.schedule.min_lr_ratio=null"
    )
    name, variant = parse(text)
    arguments = argparse.Namespace(
        teacher=Path("demo"), text=Path(), work=Path("work"), seq_len=512, rows=4, seed=1, held_out=8192
    )
    recipe = recipe_of(variant, "one", arguments, 100_000)
    first, last = recipe.stages
    assert name == text
    assert recipe.convert is not None
    assert recipe.convert.options["slots"] == 64
    assert last.kind == "logit_kl"
    assert (last.loss.temperature, last.optimizer.betas, last.optimizer.lr) == (2.0, (0.9, 0.99), 3e-4)
    assert (last.schedule.name, last.schedule.min_lr_ratio) == ("cosine_with_min_lr", 0.5)
    assert (first.schedule.name, first.schedule.min_lr_ratio) == ("constant", None)
    assert (first.batch.per_device, last.batch.per_device) == (4, 4)
