"""Layers that read other layers' keys and values keep softmax, and so do the layers that they read."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import small_config
from conftest import holds, relative_error, with_slow
from models import convert_folder, load, logits, tokens
from models import small_config as small
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

from linearize.convert import plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.probe.probe import model_class_of, probe
from linearize_kernels.hf.cache import CACHE_NAMES, cache_in


def stepwise(model: Any, ids: torch.Tensor, prefill: int) -> torch.Tensor:
    """Logits of a prefill and single steps through one cache."""
    cache, found = None, []
    for part in ids.split([prefill] + [1] * (ids.shape[1] - prefill), 1):
        with torch.no_grad():
            out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("layers", with_slow(["all", "1"], "1"))
@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keep_softmax(tmp_path: Path, name: str, layers: str) -> None:
    """Of six layers the last two read the keys of the third and the fourth."""
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(small_config(name)).eval()
    model.save_pretrained(tmp_path / "source")
    plan, *_ = plan_conversion(str(tmp_path / "source"), "gsa", layers=layers)
    assert {step.site.layer for step in plan.steps} | {site.layer for site in plan.kept} == {0, 1}
    reasons = " ".join(plan.others)
    assert holds(reasons, "2", "values", "4")
    assert holds(reasons, "5", "model.layers.3.self_attn")
    linear, ids = load(convert_folder(tmp_path / "source", tmp_path / "linear", layers)), tokens(2, 24)
    assert relative_error(stepwise(linear, ids, 9), logits(linear, ids)) < 1e-5


@pytest.mark.parametrize(
    ("layers", "message"), [("2", "serve layer 4 as well"), ("4-5", "takes its keys and values from")]
)
def test_layers_that_share_are_refused_by_name(tmp_path: Path, layers: str, message: str) -> None:
    transformers.AutoModelForCausalLM.from_config(small_config("gemma3n_text")).save_pretrained(tmp_path)
    with pytest.raises(LinearizeError, match=rf"{message}.*0-1") as caught:
        plan_conversion(str(tmp_path), "gla", layers=layers)
    assert caught.value.code == Exit.INCOMPATIBLE


class Reading(LlamaAttention):
    """Projects what the second layer cached for its own keys and values, as decoders of decoders do (YOCO)."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.expand = torch.nn.Linear(config.head_dim, config.head_dim, bias=False)

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
        q = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = (self.expand(part) for part in self.shared[0].kept)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        o, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(o.flatten(-2)), weights


class Keeping(LlamaAttention):
    """Leaves what it cached for others."""

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
        cache, own = cache_in(kwargs), self
        if cache is None:
            name = next(name for name in inspect.signature(super().forward).parameters if name in CACHE_NAMES)
            cache = kwargs[name] = transformers.DynamicCache()
        update = cache.update

        def kept(*args: Any, **more: Any) -> Any:
            own.kept = update(*args, **more)
            return own.kept

        cache.update = kept
        try:
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        finally:
            cache.update = update


class Yoco(transformers.LlamaForCausalLM):
    """Four layers, of which the last two read the cache of the second through projections of their own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers: Any = self.model.layers
        layers[1].self_attn = Keeping(config, 1)
        for number in (2, 3):
            layers[number].self_attn = Reading(config, number)
            layers[number].self_attn.shared = (layers[1].self_attn,)


def test_sharing_is_seen_through_projections() -> None:
    found = probe(small("llama"), Yoco)
    assert [site.layer for site in found.sites] == [0]
    reasons = {other.layer: other.reason for other in found.others}
    assert reasons[1] == "its keys and values serve layers 2-3 as well, and a state has none to give"
    assert reasons[2] == reasons[3] == "takes its keys and values from model.layers.1.self_attn"


@pytest.mark.parametrize("name", ["llama", "falcon", "deepseek_v3"])
def test_others_share_nothing(name: str) -> None:
    config = small_config(name)
    found = probe(config, model_class_of(config))
    assert not any("keys and values" in other.reason for other in found.others)


def test_nothing_is_left_where_all_share() -> None:
    config = small_config("gemma3n_text")
    config = type(config)(**{**config.to_dict(), "intermediate_size": 48, "num_kv_shared_layers": 4})
    with pytest.raises(LinearizeError, match=r"nothing to convert: .* serve layers 2, ?4") as caught:
        probe(config, model_class_of(config))
    assert caught.value.code == Exit.INCOMPATIBLE
