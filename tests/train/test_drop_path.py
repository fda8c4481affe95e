"""Stochastic depth: which layers are left out, how often, and what that does to the mean and to gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import small_model
from training import base, make_recipe, metrics, stage, train
from transformers import SwinConfig, SwinForImageClassification, ViTConfig, ViTForImageClassification

from linearize.errors import Exit, LinearizeError
from linearize.train.drop_path import chances, dropping, layers_of
from linearize.train.save import load_converted
from linearize.train.session import check_model

SIZES: dict[str, Any] = {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.0}


def vit(layers: int = 4) -> Any:
    torch.manual_seed(0)
    width = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": layers}
    return ViTForImageClassification(ViTConfig(**SIZES, **width))


def test_layers_are_found_without_names() -> None:
    assert len(layers_of(vit())) == 4
    assert len(layers_of(small_model("llama"))) == small_model("llama").config.num_hidden_layers
    swin = SwinForImageClassification(SwinConfig(**SIZES, embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=2))
    assert [type(layer).__name__ for layer in layers_of(swin)] == ["SwinLayer"] * 3


def test_chances_grow_evenly() -> None:
    assert chances(3, 0.5) == [0.0, 0.25, 0.5]
    assert chances(0, 0.5) == []


def test_each_sample_goes_past_layers_by_its_chance_and_the_mean_stays() -> None:
    model = vit(2)
    layer = layers_of(model)[1]
    x = torch.randn(1, 5, 16).expand(4000, 5, 16)
    added = layer(x) - x
    with dropping(model.train(), 0.25):
        found = layer(x) - x
        assert torch.equal(layers_of(model)[0](x), layers_of(model)[0](x))  # the first always stays
    past = (found == 0).all(-1).all(-1)
    assert float(past.float().mean()) == pytest.approx(0.25, abs=0.03)
    torch.testing.assert_close(found[~past], added[~past] / 0.75, rtol=1e-4, atol=1e-4)
    assert torch.equal(layer(x) - x, added)  # the hooks are gone


def test_evaluation_leaves_nothing_out() -> None:
    model = vit().eval()
    pixels = torch.randn(2, 3, 16, 16)
    plain = model(pixels).logits
    with dropping(model, 0.9):
        assert torch.equal(model(pixels).logits, plain)
        assert not torch.equal(model.train()(pixels).logits, plain)


def test_what_is_computed_again_leaves_out_the_same() -> None:
    model, pixels = vit().train(), torch.randn(8, 3, 16, 16)
    found = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(3)
        with dropping(model, 0.5):
            model(pixels).logits.square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_model_with_a_rate_of_its_own_or_without_layers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = base(tmp_path, "llama")
    recipe = make_recipe(tmp_path, folder, stage("sft", "all", drop_path=0.1))
    model = load_converted(folder, torch.float32, False)
    check_model(model, recipe)
    with monkeypatch.context() as change:
        change.setattr("linearize.train.session.layers_of", lambda model: [])
        with pytest.raises(LinearizeError, match="drop_path") as caught:
            check_model(model, recipe)
    assert caught.value.code == Exit.INCOMPATIBLE
    model.config.drop_path_rate = 0.2
    with pytest.raises(LinearizeError, match=r"drop_path_rate.*0\.2.*drop_path.*0"):
        check_model(model, recipe)


@pytest.mark.slow
def test_a_run_trains_with_it_and_is_the_same_again(tmp_path: Path) -> None:
    folder, losses = base(tmp_path, "llama"), {}
    for name, rate in {"plain": 0.0, "dropped": 0.5, "again": 0.5}.items():
        place = tmp_path / name
        place.mkdir()
        recipe = make_recipe(place, folder, stage("sft", "all", steps=2, drop_path=rate))
        train(recipe)
        losses[name] = metrics(place)
    assert losses["dropped"] == losses["again"] != losses["plain"]
