"""What `runtime.gradient_checkpointing: auto` becomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import convert_folder
from training import base, byte_tokenizer, make_recipe, stage
from transformers import LlamaConfig, LlamaForCausalLM

from linearize.errors import LinearizeError
from linearize.estimate.advice import as_before, choose, is_open, without_auto
from linearize.estimate.estimate import estimate
from linearize.estimate.gpus import Device
from linearize.estimate.memory import Rehearsal
from linearize.recipe.recipe import Recipe


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
        assert bool(found.runtime.gradient_checkpointing) == again
        assert any("gradient_checkpointing" in line for line in told) == again
        assert not is_open(found)
        record = tmp_path / "run.json"
        record.write_text(json.dumps({"recipe": found.resolved(), "processes": 1}))
        assert as_before(recipe, record).runtime.gradient_checkpointing is found.runtime.gradient_checkpointing


def test_as_many_layers_as_do_not_fit_compute_again(tmp_path: Path) -> None:
    """A device between those that hold all activations and none gets a number of layers, and holds the others'."""
    source = tmp_path / "source"
    shape = {"num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**shape, intermediate_size=512, vocab_size=64, dtype="bfloat16")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    folder = convert_folder(source, tmp_path / "linear")
    recipe = make_recipe(tmp_path, folder, stage("logit_kl", "all", batch={"per_device": 256}))

    def rehearse(recipe: Recipe) -> Rehearsal:
        return Rehearsal(recipe, None, folder, "bf16", True)

    def asked(on: bool | int | str) -> Recipe:
        values = recipe.resolved()
        values["runtime"] |= {"precision": "bf16", "gradient_checkpointing": on}
        return recipe.changed(values)

    tiny = Device("tiny", "cuda", 1 << 40)
    needs = [estimate(rehearse(asked(on)), tiny).stages[0].needs(tiny) for on in (True, 9, 6, 3, False)]
    assert needs == sorted(needs)
    found = []
    for share in (0.3, 0.6):
        told: list[str] = []
        device = Device("tiny", "cuda", int(needs[0] + share * (needs[-1] - needs[0])))
        chosen = choose(asked("auto"), rehearse, device, told.append)
        assert not estimate(rehearse(chosen), device).too_large
        found.append(chosen.runtime.gradient_checkpointing)
        assert f"activations of {found[-1]} of 12 layers" in told[-1]
    assert 12 > found[0] > found[1] > 0


def test_offloading_is_of_what_is_computed_again(tmp_path: Path) -> None:
    def asked(checkpointing: object) -> object:
        runtime = {"device": "cpu", "gradient_checkpointing": checkpointing, "offload_activations": True}
        return without_auto(make_recipe(tmp_path, tmp_path, stage("logit_kl"), runtime=runtime)).runtime

    assert getattr(asked("auto"), "gradient_checkpointing") is True  # noqa: B009
    for other in (False, 1):
        with pytest.raises(LinearizeError, match="gradient_checkpointing"):
            asked(other)
