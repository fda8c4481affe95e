"""Mixers without rotary embedding are refused where it cannot be taken away from the attention module."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from models import save_source, small_config
from torch import nn
from transformers import GPT2LMHeadModel, GPTJConfig, GPTJForCausalLM, LlamaForCausalLM
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.llama.modeling_llama import LlamaAttention

from linearize import convert as story
from linearize.errors import Exit, LinearizeError
from linearize.plan.plan import check_rotation, make_steps
from linearize.probe.found import Found
from linearize.probe.probe import probe

WITHOUT = {"slots": 8, "rope": False}


class Renamed(LlamaAttention):
    """As remote code may have it: the rotation has another name."""

    def forward(self, hidden_states: Any, rotation: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(hidden_states, position_embeddings=rotation, **kwargs)


class Caller(nn.Module):
    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.inner = Renamed(*arguments)

    def forward(self, hidden_states: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        return self.inner(hidden_states, rotation=position_embeddings, **kwargs)


class OwnModel(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = Caller(config, number)


def test_a_rotation_under_another_name_is_refused() -> None:
    found = probe(small_config("llama"), OwnModel)
    assert found.fixed_rotation == tuple(f"model.layers.{number}.self_attn.inner" for number in range(4))
    check_rotation(found, make_steps(list(found.sites), "gsa", {"slots": 8}))
    with pytest.raises(LinearizeError, match=r"rope=false.*0-3") as caught:
        check_rotation(found, make_steps(list(found.sites), "gsa", WITHOUT))
    assert caught.value.code == Exit.INCOMPATIBLE
    with pytest.raises(LinearizeError, match=r"mamba2.*embedding"):
        check_rotation(found, make_steps(list(found.sites), "mamba2", {}))


@pytest.mark.parametrize(("name", "model"), [("llama", LlamaForCausalLM), ("gpt2", GPT2LMHeadModel)])
def test_a_rotation_by_its_usual_name_can_be_taken_away_and_none_need_not(name: str, model: Any) -> None:
    assert not probe(small_config(name), model).fixed_rotation


@pytest.mark.parametrize("name", ["retnet", "mhla"])
def test_a_rotation_that_is_made_from_positions_is_not_moved(name: str) -> None:
    """It can be taken away; behind the features of the published form there would be none."""
    if "position_embeddings" in inspect.signature(GPTJAttention.forward).parameters:
        pytest.skip("GPT-J is given its rotation since transformers 5.24")
    found = probe(GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4), GPTJForCausalLM)
    assert not found.fixed_rotation
    steps = make_steps(list(found.sites), name, {"faithful": True})
    with pytest.raises(LinearizeError, match=r"rope=after.*GPTJAttention.*rope=before"):
        check_rotation(found, steps)
    for rope in ("before", "off"):
        check_rotation(found, make_steps(list(found.sites), name, {"faithful": True, "rope": rope}))
    found = probe(small_config("gpt2"), GPT2LMHeadModel)  # which has no rotation to lose
    check_rotation(found, make_steps(list(found.sites), name, {"faithful": True}))


def test_a_conversion_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(save_source(tmp_path / "source"))
    story.plan_conversion(source, "gsa", options=WITHOUT)

    def fixed(*arguments: Any) -> Found:
        found = probe(*arguments)
        return dataclasses.replace(found, fixed_rotation=tuple(site.path for site in found.sites))

    monkeypatch.setattr(story, "found_in", fixed)
    with pytest.raises(LinearizeError, match="rope=false"):
        story.plan_conversion(source, "gsa", options=WITHOUT)
