"""What a stage says of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import make_recipe, stage

from linearize.train.progress import StageProgress


def test_errors_of_layers_and_losses_of_models_have_names_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path, Path("model"), *map(stage, ("attention_transfer", "logit_kl")))
    for told in recipe.stages:
        with StageProgress(told, 4, 0) as bar:
            bar.update(4, 0.25, 1000.0, "0 s left")
    transfer, kl = capsys.readouterr().err.splitlines()
    assert transfer.startswith("attention_transfer 4/4  attention error 0.25  1,000 tokens/s")
    assert kl.startswith("logit_kl 4/4  loss 0.25  1,000 tokens/s")
