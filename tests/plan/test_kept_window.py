"""`--kept-window`: kept softmax over the last tokens and the first four, whose memory is bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TOLERANCE, Command, holds, relative_error
from models import convert_folder, load, logits, save_source, small_model, tokens
from training import SMALL, byte_tokenizer, make_recipe, stage, train
from transformers import DynamicCache

from linearize.checkpoint.manifest import read_plan
from linearize.convert import convert, plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.plan.plan import Plan
from linearize.verify.checks import verify_folder
from linearize_kernels.window.window import naive_window

EXACT = TOLERANCE[torch.float32]
ROW = 2 * 2 * 8 * 4  # bytes of a token's keys and values in the small llama


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, and `local`: layers 0 and 2 are GSA, 1 and 3 keep softmax over the last 5 tokens."""
    root = tmp_path_factory.mktemp("kept")
    small_model("llama", **SMALL).save_pretrained(root / "source")
    byte_tokenizer().save_pretrained(root / "source")
    convert_folder(root / "source", root / "local", keep_softmax="1,3", kept_window=5)
    return root


def planned(folder: Path, **asked: Any) -> Plan:
    return plan_conversion(str(folder), "gsa", options={"slots": 8, "chunk_size": 16}, **asked)[0]


def test_the_plan_says_so_and_its_memory_does_not_grow(place: Path) -> None:
    plan = planned(place / "source", keep_softmax="1,3", kept_window=5)
    assert [step.site.layer for step in plan.linear] == [0, 2]
    assert [step.site.layer for step in plan.local] == [1, 3] == plan.softmax_layers
    assert plan.kept == ()
    assert plan.softmax == "layers 1,3 keep softmax over the last 5 tokens and the first 4"
    assert [step.new_parameters for step in plan.local] == [0, 0]
    assert [step.state_bytes for step in plan.local] == [9 * ROW + 8] * 2
    whole = planned(place / "source", keep_softmax="1,3")
    state = sum(step.state_bytes for step in plan.linear)
    assert whole.cache_bytes(10_000)["converted"] == state + 2 * 10_000 * ROW
    assert plan.cache_bytes(10_000)["converted"] == plan.cache_bytes(1)["converted"] == state + 2 * (9 * ROW + 8)
    assert plan.cache_bytes(10_000)["source"] == whole.cache_bytes(10_000)["source"]
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.spec()["all_linear"]  # no layer needs a mask
    card = (place / "local" / "README.md").read_text()
    assert "GSA in layers 0,2; layers 1,3 keep softmax over the last 5 tokens and the first 4" in card


def test_a_window_as_long_as_the_text_is_the_hybrid_and_a_shorter_one_is_not(place: Path, tmp_path: Path) -> None:
    long = convert_folder(place / "source", tmp_path / "long", keep_softmax="1,3", kept_window=40)
    whole = convert_folder(place / "source", tmp_path / "whole", keep_softmax="1,3")
    ids = tokens(2, 40)
    hybrid, near = logits(load(whole), ids), logits(load(place / "local"), ids)
    assert relative_error(logits(load(long), ids), hybrid) < EXACT
    assert relative_error(near[:, :9], hybrid[:, :9]) < EXACT
    assert relative_error(near[:, 9:], hybrid[:, 9:]) > 100 * EXACT


def test_it_computes_softmax_over_those_tokens(place: Path) -> None:
    model = load(place / "local")
    heard: list[Any] = []

    def hear(mixer: Any, given: Any, made: Any) -> None:
        heard.append((mixer.site, given[:3], made[0]))

    model.model.layers[3].self_attn.mixer.register_forward_hook(hear)
    logits(model, tokens(2, 30))
    ((site, (q, k, v), o),) = heard
    assert relative_error(o, naive_window(q, k, v, window=5, sink=4, scale=site.scale)) < EXACT


@pytest.mark.slow
def test_a_cache_is_bounded_and_verify_passes(place: Path) -> None:
    cache = DynamicCache()
    with torch.no_grad():
        load(place / "local")(input_ids=tokens(1, 70), past_key_values=cache, use_cache=True)
    assert cache.layers[1].state.keys.shape[1] == 9
    found = {check.name: check.status for check in verify_folder(str(place / "local"), strict=True)}
    assert set(found.values()) == {"passed"}
    assert {"prefill and steps", "left padding", "packed documents", "beams", "constant state"} <= found.keys()


@pytest.mark.slow
def test_it_is_trained_like_any_hybrid(place: Path) -> None:
    """With attention transfer, in which a window has nothing to learn."""
    values = {"mechanism": "gsa", "options": {"slots": 8}, "keep_softmax": "1,3", "kept_window": 7}
    stages = stage("attention_transfer", steps=2), stage("logit_kl", "all", steps=2)
    train(make_recipe(place, place / "source", *stages, convert=values, finish={"verify": False}))
    plan = read_plan(place / "run" / "final")
    assert [step.options["window"] for step in plan.local] == [7, 7]
    assert load(place / "run" / "final").generate(tokens(1, 12), max_new_tokens=4).shape == (1, 16)


def test_a_stage_that_would_train_nothing_is_refused(place: Path, tmp_path: Path) -> None:
    values = {"mechanism": "window", "options": {"window": 8}}
    recipe = make_recipe(tmp_path, place / "source", stage("attention_transfer", steps=2), convert=values)
    with pytest.raises(LinearizeError, match="attention_transfer") as caught:
        train(recipe)
    assert caught.value.code == Exit.INCOMPATIBLE


def test_converted_again_it_becomes_linear_or_softmax_over_all(place: Path, tmp_path: Path) -> None:
    folder, quiet = str(place / "local"), {"level": "none", "say": lambda line: None}
    more = plan_conversion(folder, None, layers="1")
    assert [step.mechanism for step in more[0].steps] == ["gsa", "gsa", "gsa", "window"]
    assert more[0].steps[1].options["slots"] == 8  # as the other linear layers
    convert(*more, tmp_path / "more", **quiet)
    back = plan_conversion(folder, None, restore="3")
    assert [site.layer for site in back[0].kept] == [3]
    convert(*back, tmp_path / "back", **quiet)
    for name in ("more", "back"):
        assert logits(load(tmp_path / name), tokens(1, 20)).isfinite().all()
    for asked, message in (
        ({"restore": "0,2"}, "leaves no linear layer in local"),
        ({"layers": "0"}, "layer 0 is linear in local already. Choose among layers 1,3"),
        ({"layers": "1", "kept_window": 9}, "--kept-window 9 is for a source, and local is converted already"),
        ({"kept_window": 9}, "--kept-window 9 is for a source, and local is converted already"),
    ):
        with pytest.raises(LinearizeError, match=message):
            plan_conversion(folder, None, **asked)


def test_the_command_line_prints_it(place: Path, tmp_path: Path, linearize: Command) -> None:
    asked = ("--to", "gsa", "--keep-softmax", "0-1", "--kept-window", "4096", "--dry-run")
    code, _, err = linearize("convert", place / "source", *asked)
    assert code == 0, err
    words = " ".join(err.split())
    assert holds(words, "0-1", "4,096", "4")
    assert "(last 4,096)" in words
    assert "in 2 layers" in words  # new parameters
    code, _, err = linearize("inspect", place / "local")
    assert code == 0
    assert "softmax" in err


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        ({"kept_window": 8}, Exit.USAGE, r"--kept-window.*8"),
        ({"kept_window": 0, "keep_softmax": "1"}, Exit.USAGE, r"--kept-window.*0.*>=.*1.*<=.*65536"),
        ({"kept_window": 65537, "keep_softmax": "1"}, Exit.USAGE, r"--kept-window.*65537"),
    ],
)
def test_what_means_nothing_is_refused(place: Path, asked: Any, code: Exit, message: str) -> None:
    with pytest.raises(LinearizeError, match=message) as caught:
        planned(place / "source", **asked)
    assert caught.value.code == code


@pytest.mark.parametrize("window", [8, "auto:8", "auto:8:0.02", "8@1"])
def test_a_window_beside_windows_is_refused(place: Path, window: int | str) -> None:
    """What to do instead can be done: --set takes a number."""
    with pytest.raises(LinearizeError, match=r"--to.*--set.*window@1,3=8") as caught:
        plan_conversion(str(place / "source"), "window", keep_softmax="1", kept_window=window)
    assert caught.value.code == Exit.USAGE


def test_heads_of_the_other_layers_may_keep_softmax_too(place: Path, tmp_path: Path) -> None:
    """Over all tokens; layers that keep softmax have no heads to choose."""
    asked: dict[str, Any] = {"keep_softmax": "1,3", "kept_window": 5}
    folder = convert_folder(place / "source", tmp_path / "both", keep_heads="0:1", **asked)
    plan = read_plan(folder)
    assert (plan.softmax_groups, plan.softmax_layers) == ([(0, 1)], [1, 3])
    assert plan.cache_bytes(1000)["converted"] - plan.cache_bytes(0)["converted"] == 1000 * ROW // 2
    message = "GSA in layers 0,2, but for the KV heads (layer:head) `0:1`, which keep softmax; layers 1,3 keep softmax"
    assert f"{message} over the last 5" in (folder / "README.md").read_text()
    model, ids, cache, parts = load(folder), tokens(2, 30), DynamicCache(), []
    for part in ids.split([17, 1, 12], 1):
        with torch.no_grad():
            parts.append(model(part, past_key_values=cache, use_cache=True).logits)
    assert relative_error(torch.cat(parts, 1), logits(model, ids)) < 2 * EXACT
    assert planned(place / "source", **asked, keep_heads="auto:2", weights=False).softmax_groups == [(0, 1), (2, 1)]
    with pytest.raises(LinearizeError, match=r"3.*become.*0,2"):
        planned(place / "source", **asked, keep_heads="3:0")


def test_a_softmax_with_more_in_it_is_refused_and_a_window_of_its_own_stays(tmp_path: Path) -> None:
    capped = save_source(tmp_path / "gemma2", "gemma2", sliding_window=6)
    with pytest.raises(LinearizeError, match=r"layers\.\d\.self_attn") as caught:
        planned(capped, keep_softmax="0-1", kept_window=8)
    assert caught.value.code == Exit.INCOMPATIBLE
    convert_folder(capped, tmp_path / "one", layers="0")
    again = plan_conversion(str(tmp_path / "one"), "window", layers="1")[0]  # asked for by name, it drops the cap
    assert any(note.startswith("softcap") and note.endswith("(layers 0-1)") for note in again.notes)
    sliding = save_source(tmp_path / "mistral", "mistral", sliding_window=6)
    with pytest.raises(LinearizeError, match=r"have.*windows"):
        planned(sliding, keep_softmax="1", kept_window=8)
