"""`--kept-window auto`: kept layers have a window where it is measured that this changes predictions little."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, holds
from models import load, small_model
from training import SMALL, byte_tokenizer, recipe_values, stage, text, write_data

from linearize import api
from linearize.checkpoint.manifest import read_plan
from linearize.choose import choose
from linearize.choose.choose import Scoring, choosers, pricer, window_rows
from linearize.convert import convert, plan_conversion
from linearize.data.packing import TextSource
from linearize.errors import Exit, LinearizeError
from linearize.finetune import finetune
from linearize.job.dry_run import dry_run
from linearize.plan.keep import SINK, WINDOW_LIMIT, KeptWindow, WindowChoice
from linearize.plan.plan import Plan, tuples
from linearize.recipe.recipe import Recipe
from linearize.terminal.output import nats
from linearize.verify.checks import verify_folder

OPTIONS = {"slots": 8, "chunk_size": 16}
FAR = 2  # the kept layer of `place` whose attention to far tokens reaches the residual stream
WINDOW = 20


@pytest.fixture(autouse=True)
def _less_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference between the layers is large: little text shows it."""
    for name, value in {"WINDOW_TOKENS": 1024, "SCORE_TOKENS": 1024, "RECALLS": 2}.items():
        monkeypatch.setattr(choose, name, value)


def quiet(text: str) -> None:
    """Says nothing."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which layer 2 alone adds much, `long.txt` of one document, and train.jsonl of short ones."""
    folder = tmp_path_factory.mktemp("windows")
    model = small_model("llama", **SMALL)
    for number, layer in enumerate(model.model.layers):
        if number != FAR:
            layer.self_attn.o_proj.weight.data.mul_(1e-3)
    model.save_pretrained(folder / "source")
    byte_tokenizer().save_pretrained(folder / "source")
    write_data(folder)
    (folder / "long.txt").write_text(text(1500, 7))
    return folder


def scoring(place: Path, name: str = "long.txt", **changes: Any) -> Scoring:
    return Scoring(text=TextSource(files=(place / name,)), seq_len=64, **{"say": quiet, **changes})


def planned(place: Path, kept_window: str, how: Scoring | None = None, **asked: Any) -> Plan:
    """A plan that keeps softmax in layers 1 to 3, of which those get a window that a measurement finds."""
    chooser = choosers(how or scoring(place))["choose_windows"]
    asked = {"keep_softmax": "1-3", "options": OPTIONS, "kept_window": kept_window, **asked}
    return plan_conversion(str(place / "source"), "gsa", choose_windows=chooser, **asked)[0]


@pytest.mark.slow
def test_layers_get_a_window_where_it_costs_little(place: Path) -> None:
    """A layer's cost is that of the model which has this layer local and all others whole."""
    plan = planned(place, f"auto:{WINDOW}")
    windows = plan.window_choice
    assert windows is not None
    assert (windows.asked, windows.limit) == (f"auto:{WINDOW}", WINDOW_LIMIT)
    assert windows.near == (1, 3) == tuple(step.site.layer for step in plan.local)
    assert [site.layer for site in plan.kept] == [FAR]
    costs = {layer: cost["text"]["kl"] for layer, cost in windows.costs.items()}
    assert costs.keys() == {"1", "2", "3"}
    assert max(costs["1"], costs["3"]) < WINDOW_LIMIT < costs["2"]
    assert windows.together["text"]["kl"] < WINDOW_LIMIT
    assert windows.costs["2"]["text"]["length"] == 2 * (WINDOW + SINK)
    # Its memory: two windows, and keys and values of all tokens in one layer.
    row = 2 * 2 * 8 * 4
    grows = plan.cache_bytes(2000)["converted"] - plan.cache_bytes(1000)["converted"]
    assert grows == 1000 * row
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    again = plan_conversion(str(place / "source"), "gsa", keep_softmax="1-3", options=OPTIONS, kept_window="20@1,3")[0]
    assert again.steps == plan.steps
    assert planned(place, f"auto:{WINDOW}:1000").window_choice.near == (1, 2, 3)  # type: ignore[union-attr]
    assert planned(place, f"auto:{WINDOW}:0.000000001").local == ()


@pytest.mark.slow
def test_a_cost_is_that_of_the_layer_alone_past_the_window(place: Path, tmp_path: Path) -> None:
    windows = planned(place, f"auto:{WINDOW}").window_choice
    assert windows is not None
    model = load(place / "source")
    rows, lacking = window_rows(model, {"window": WINDOW, "sink": SINK}, scoring(place), byte_tokenizer())
    assert (holds(lacking, "repetition", "48 tokens"), rows.keys()) == (True, {"text"})
    plan, *rest = plan_conversion(str(place / "source"), "window", layers="2", options={"window": WINDOW, "sink": SINK})
    convert(plan, *rest, tmp_path / "local", level="none", say=quiet)
    local = load(tmp_path / "local")
    sums = []
    with torch.no_grad():
        for batch in rows["text"]:
            theirs, ours = (one(batch["input_ids"]).logits.log_softmax(-1) for one in (model, local))
            kl = (theirs.exp() * (theirs - ours)).sum(-1)
            assert kl[:, : WINDOW + SINK].max() < 1e-6  # there the window leaves nothing out
            sums.append(kl[:, WINDOW + SINK : -1].mean())
    assert windows.costs["2"]["text"]["kl"] == pytest.approx(float(torch.stack(sums).mean()), rel=1e-3)


def test_all_layers_with_a_window_together_stay_below_the_limit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs add up here: layers 1 and 3 cost 0.4 each, layer 2 0.3, and two of them are more than 0.65."""
    alone, measured = {1: 0.4, 2: 0.3, 3: 0.39}, []

    def costs(mixture: Any, sets: Any, *_: Any) -> list[dict[str, dict[str, float]]]:
        measured.extend(sets)
        return [{"text": {"kl": sum(alone[layer] for layer in layers), "length": 48}} for layers in sets]

    monkeypatch.setattr(choose, "window_costs", costs)
    windows = planned(place, f"auto:{WINDOW}:0.75").window_choice
    assert windows is not None
    assert windows.near == (2, 3)
    assert measured == [[1], [2], [3], [2, 3, 1], [2, 3]]
    assert windows.together == {"text": {"kl": pytest.approx(0.69), "length": 48}}


def test_without_a_document_longer_than_the_window_no_layer_gets_one(
    place: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the plan says why; a model that knows no more tokens than the window cannot be asked, either."""
    for asked, name, why in (
        ("auto:300", "long.txt", ("305", "256")),
        ("auto:100", "train.jsonl", ("train.jsonl", "208")),
    ):
        command = ("convert", place / "source", "--to", "gsa", "--keep-softmax", "1-3", "--kept-window", asked)
        code, out, err = linearize(*command, "--score-text", place / name, "--dry-run", "--json")
        assert code == 0, err
        plan = json.loads(out)["plan"]
        assert (plan["window_choice"]["near"], plan["window_choice"]["costs"]) == ([], {})
        assert [site["layer"] for site in plan["kept"]] == [1, 2, 3]
        assert holds(err, "--kept-window", f"{asked}")
        assert holds(err, *why)
    monkeypatch.setattr(choose, "LONGEST", 100)
    windows = planned(place, "auto:100").window_choice
    assert windows is not None
    assert holds(windows.lacking, "105 tokens", "100")


@pytest.mark.parametrize("window", [500, 507])
def test_a_window_nearly_as_long_as_the_rows_is_measured_on_text_alone(
    place: Path, tmp_path: Path, window: int
) -> None:
    """Texts that ask for a repetition are a little shorter than the rows, which are no longer than the model takes. In
    a row with one token past the window no prediction counts."""
    shutil.copytree(place / "source", tmp_path / "source")
    config = tmp_path / "source" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 512}))
    messages: list[str] = []
    how, measured = scoring(place, say=messages.append), {"text"} if window == 500 else set()
    windows = planned(tmp_path, f"auto:{window}", how).window_choice
    assert windows is not None
    assert {kind for cost in windows.costs.values() for kind in cost} == measured
    assert windows.lacking == ("" if measured else "it takes rows of more than 512 tokens, and the model knows 512")
    asked = {"keep_softmax": "1-3", "options": OPTIONS, "kept_window": f"{window}@1", "price": pricer(how)}
    choice = plan_conversion(str(tmp_path / "source"), "gsa", **asked)[0].choice  # type: ignore[arg-type]
    assert choice is not None
    assert choice.window.keys() == measured
    said = "measured on text alone: a text of 512 tokens asks for no repetition past the window"
    assert [said in message for message in messages].count(True) == 2 * len(measured)


@pytest.mark.slow
def test_the_command_prints_each_cost_and_the_folder_keeps_the_decision(
    place: Path, tmp_path: Path, linearize: Command
) -> None:
    command = ("convert", place / "source", "--to", "gsa", "--keep-softmax", "1-3", "--set", "slots=8")
    command += ("--kept-window", f"auto:{WINDOW}", "--score-text", place / "long.txt")
    code, out, err = linearize(*command, "-o", tmp_path / "hybrid", "--json")
    assert code == 0, err
    plan, words = read_plan(tmp_path / "hybrid"), " ".join(err.split())
    assert plan.window_choice == WindowChoice(**tuples(json.loads(out)["plan"]["window_choice"]))
    assert plan.window_choice is not None
    for layer, cost in plan.window_choice.costs.items():
        sees = "all tokens" if int(layer) == FAR else f"the last {WINDOW}"
        assert f"{layer} {nats(cost['text']['kl'])} {sees}" in words
    for said in (f"--kept-window {WINDOW}@1,3 repeats this without measuring", "cost of the window in the kept layers"):
        assert said in words
    assert holds(words, "2", "1,3", f"{WINDOW}")
    found = {check.name: check.status for check in verify_folder(str(tmp_path / "hybrid"), strict=True)}
    assert set(found.values()) == {"passed"}
    # Converted again: layer 3 becomes linear, and layer 1 keeps its window.
    code, _, err = linearize("convert", tmp_path / "hybrid", "--layers", "3", "-o", tmp_path / "more")
    assert code == 0, err
    more = read_plan(tmp_path / "more")
    assert [step.mechanism for step in more.steps] == ["gsa", "window", "gsa"]
    assert [site.layer for site in more.kept] == [FAR]
    assert more.window_choice is None


@pytest.mark.slow
def test_a_recipe_measures_on_its_own_text_and_once(place: Path) -> None:
    asked = {"mechanism": "gsa", "options": OPTIONS, "keep_softmax": "1-3", "kept_window": f"auto:{WINDOW}"}
    data = {"train": {"files": [str(place / "long.txt")]}}
    stages = stage("attention_transfer", steps=1), stage("logit_kl", "all", steps=1)
    values = recipe_values(place, place / "source", *stages, convert=asked)
    values["data"] |= data
    recipe = Recipe.model_validate(values)
    recipe._folder = place
    assert recipe.convert is not None
    assert recipe.resolved()["convert"]["kept_window"] == f"auto:{WINDOW}"
    messages: list[str] = []
    dry_run(recipe, messages.append)
    assert holds(messages[-1], f"convert.kept_window=auto:{WINDOW}", "measures", "kept layers")
    first = recipe.stages[0].name
    finetune(recipe, only=first, say=messages.append)
    finetune(recipe, say=messages.append)
    assert sum(holds(one, "window of 20 tokens", "each of layers 1-3") for one in messages) == 1
    plan = read_plan(place / "run" / "final")
    assert plan.window_choice is not None
    assert plan.window_choice.measured() in messages
    assert [step.site.layer for step in plan.local] == [1, 3]


def test_layers_that_are_chosen_have_all_tokens_while_they_are(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the window of the kept ones is measured, then heads of the others are chosen beside it."""
    given: dict[str, Any] = {}

    def first(plan: Any, source: Any, natives: Any, asked: str, count: int, units: Any, local: Any = ()) -> Any:
        given[asked] = {"local": local, "near": [step.site.layer for step in plan.local]}
        kept = (1,) if isinstance(units[0], int) else ("0:0",)
        return choose.Choice(asked, "none", kept)

    asked = {"keep_softmax": "auto:1", "keep_heads": "auto:2", "choose": first}
    plan = planned(place, f"auto:{WINDOW}", **asked)
    assert given == {"auto:1": {"local": (), "near": []}, "auto:2": {"local": (), "near": [1]}}
    assert [step.site.layer for step in plan.local] == [1]
    assert plan.softmax_groups == [(0, 0)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kept_window": "auto:0"}, r"--kept-window.*auto:0.*>=.*1.*<=.*65536"),
        ({"kept_window": "auto:8:0"}, r"--kept-window.*auto:8:0.*>.*0"),
        ({"kept_window": "auto"}, r"--kept-window.*auto.*4096.*4096@1,3.*auto:4096.*auto:4096:0.02"),
        ({"kept_window": "8:0.1"}, "must be 4096"),
        ({"kept_window": "8@0"}, r"--kept-window.*8@0.*0.*1-3"),
        ({"kept_window": "8@1-9"}, r"--kept-window.*8@1-9.*4-9.*1-3"),
        ({"kept_window": "8@1", "keep_softmax": "auto:1"}, r"8@1.*--keep-softmax.*auto:1"),
        ({"kept_window": "auto:8", "keep_softmax": ""}, r"--kept-window.*auto:8"),
        ({"kept_window": "auto:8:0.25", "keep_softmax": ""}, r"--kept-window.*auto:8:0.25"),
        ({"kept_window": "8@1", "keep_softmax": ""}, r"--kept-window.*8@1"),
    ],
)
def test_what_means_nothing_is_refused(place: Path, asked: dict[str, str], message: str) -> None:
    with pytest.raises(LinearizeError, match=message) as caught:
        planned(place, **{"keep_softmax": "1-3", **asked})
    assert caught.value.code == Exit.USAGE


def test_a_window_is_read_as_it_is_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KeptWindow.parse(4096) == KeptWindow.parse("4096") == KeptWindow(4096)
    assert KeptWindow.parse("8@0-2,5") == KeptWindow(8, "0-2,5")
    assert KeptWindow.parse("auto:8") == KeptWindow(8, limit=WINDOW_LIMIT)
    assert KeptWindow.parse("auto:8:0.25") == KeptWindow(8, limit=0.25)
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        choose, "choose_windows", lambda how, plan, *_: given.setdefault("is", WindowChoice("auto:8", 1))
    )
    api.plan(place / "source", "gsa", keep_softmax="1-3", kept_window="auto:8")
    assert given["is"].asked == "auto:8"
