"""What `runtime.gradient_checkpointing: auto` becomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training import base, make_recipe, stage

from linearize.errors import LinearizeError
from linearize.estimate.advice import as_before, choose, is_open, without_auto
from linearize.estimate.estimate import estimate
from linearize.estimate.gpus import Device
from linearize.estimate.memory import Rehearsal


def test_activations_are_computed_again_where_they_do_not_fit(tmp_path: Path) -> None:
    folder = base(tmp_path, "llama", "bfloat16")
    runtime = {"device": "cpu", "precision": "bf16", "gradient_checkpointing": "auto"}
    recipe = make_recipe(tmp_path, folder, stage("logit_kl", "all"), runtime=runtime)
    assert is_open(recipe)
    kept = Rehearsal(without_auto(recipe), None, folder, "bf16", True)
    device = Device("tiny", "cuda", 1 << 40)
    (cost,) = estimate(kept, device).stages
    # Room beyond the peak, since a tenth of what grows with the rows is left free.
    enough = int(cost.needs(device) + 0.2 * (cost.memory.parts["activations"] + cost.memory.parts["logits"]))
    for memory, again in ((enough, False), (cost.needs(device) - 1, True)):
        told: list[str] = []
        found = choose(
            recipe, lambda r: Rehearsal(r, None, folder, "bf16", True), Device("tiny", "cuda", memory), told.append
        )
        assert found.runtime.gradient_checkpointing is again
        assert any("gradient_checkpointing" in line for line in told) == again
        assert not is_open(found)
        record = tmp_path / "run.json"
        record.write_text(json.dumps({"recipe": found.resolved()}))
        assert as_before(recipe, record).runtime.gradient_checkpointing is again


def test_offloading_is_of_what_is_computed_again(tmp_path: Path) -> None:
    def asked(checkpointing: object) -> object:
        runtime = {"device": "cpu", "gradient_checkpointing": checkpointing, "offload_activations": True}
        return without_auto(make_recipe(tmp_path, tmp_path, stage("logit_kl"), runtime=runtime)).runtime

    assert getattr(asked("auto"), "gradient_checkpointing") is True  # noqa: B009
    with pytest.raises(LinearizeError, match="gradient_checkpointing"):
        asked(False)
