"""`--keep-softmax auto`: mixtures are what they say, and every method finds the layer that matters."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TOLERANCE, Command, holds, relative_error, with_slow
from models import SMALL, convert_folder, load, save_source, small_model
from training import SMALL as TRAINED
from training import byte_tokenizer, recipe_values, stage, write_data

from linearize.checkpoint.manifest import read_plan
from linearize.choose import choose, methods
from linearize.choose.choose import (
    PACKAGES,
    STAND_IN,
    Scorer,
    Scoring,
    batches_of,
    choosers,
    pricer,
    recall_batches,
    scored_plan,
)
from linearize.choose.methods import restore, swaps
from linearize.choose.mixture import Mixture
from linearize.commands.convert import choice_table
from linearize.convert import convert, plan_conversion
from linearize.data.batches import run
from linearize.data.packing import TextSource
from linearize.errors import Exit, LinearizeError
from linearize.finetune import finetune
from linearize.job.dry_run import dry_run
from linearize.job.source import plan_base
from linearize.plan import keep
from linearize.plan.keep import METHODS, Choice, leaves_one, named, unscored_heads
from linearize.plan.plan import Plan
from linearize.recipe.recipe import Recipe
from linearize_kernels.hf.attention_hooks import mixers_of

OPTIONS = {"slots": 8, "chunk_size": 16}
MATTERS = 2  # the one layer of `place` whose attention reaches the residual stream


def quiet(text: str) -> None:
    """Says nothing."""


def only_one_matters(model: Any) -> Any:
    """A model of which every other layer adds next to nothing."""
    for number, layer in enumerate(model.model.layers):
        if number != MATTERS:
            layer.self_attn.o_proj.weight.data.mul_(1e-3)
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in which layer 2 alone matters, and text."""
    folder = tmp_path_factory.mktemp("choose")
    model = small_model("llama", **TRAINED, max_position_embeddings=1024)
    only_one_matters(model).save_pretrained(folder / "source")
    byte_tokenizer().save_pretrained(folder / "source")
    write_data(folder)
    return folder


# ---------------------------------------------------------------- mixtures


@pytest.mark.parametrize(
    ("name", "to", "options"),
    [
        ("llama", "gsa", OPTIONS),
        ("llama", "mamba2", {}),  # these have q and k of their own
        ("qwen3", "gdn", {"native": True}),
        ("llama", "gla", {"rope": "after"}),
    ],
    ids=["gsa", "mamba2", "native gdn", "gla"],
)
def test_a_mixture_is_the_hybrid_that_would_be_saved(
    tmp_path: Path, name: str, to: str, options: dict[str, Any]
) -> None:
    """With documents in one row: gates of 0 and 1 give the converted model, all open the source, bit for bit."""
    source = save_source(tmp_path / "source", name)
    convert(
        *plan_conversion(str(source), to, options=options, keep_softmax="0,2"),
        tmp_path / "hybrid",
        level="none",
        say=quiet,
    )
    hybrid = load(tmp_path / "hybrid")
    plan = plan_conversion(str(source), to, options=options)[0]
    mixture = Mixture(small_model(name), plan)
    for path, mixer in mixers_of(hybrid).items():
        mixture.mixers[int(path.split(".")[2])].load_state_dict(mixer.state_dict())
    batch = {
        "input_ids": torch.arange(2 * 24).view(2, 24) % 97,
        "position_ids": torch.cat([torch.arange(10), torch.arange(14)]).expand(2, 24),
    }
    with torch.no_grad():
        ours, theirs = mixture.logits(batch, mixture.hybrid({0, 2})), run(hybrid, batch).logits
        assert relative_error(ours, theirs) < TOLERANCE[torch.float32]
        assert torch.equal(mixture.logits(batch, mixture.hybrid(range(4))), mixture.teacher(batch))
        sets = [(), {0, 2}, {1}, {(1, 1), (3, 0)}]  # the last are heads; all in one pass
        rows = {key: value.repeat(len(sets), 1) for key, value in batch.items()}
        together = mixture.logits(rows, mixture.hybrids(sets, 2)).split(2)
        for kept, found in zip(sets, together, strict=True):
            assert relative_error(found, mixture.logits(batch, mixture.hybrid(kept))) < TOLERANCE[torch.float32]
    assert torch.equal(mixture.teacher(batch), run(small_model(name), batch).logits)


def test_sets_are_compared_in_few_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As further rows of a batch, each as if it were alone; as many as the memory for logits allows."""
    source = save_source(tmp_path / "source")
    mixture = Mixture(small_model("llama"), plan_conversion(str(source), "gsa", options=OPTIONS)[0])
    asked = torch.arange(24).expand(2, 24) > 7
    batch = {"input_ids": torch.arange(2 * 24).view(2, 24) % 97, "asked": asked}
    scorer, sets = Scorer(mixture, [batch], [batch]), [{0}, {1}, {0, 3}, {2}, ()]
    rows, own = list[int](), mixture.logits
    monkeypatch.setattr(
        mixture, "logits", lambda batch, gates: rows.append(len(batch["input_ids"])) or own(batch, gates)
    )
    few = scorer.kl(sets)
    logits = mixture.teacher(batch)
    monkeypatch.setattr("linearize.choose.choose.LOGITS_TOGETHER", (3 * logits.nbytes, 0))
    more = scorer.kl(sets)
    assert rows == 2 * [10] + 2 * [6, 4]
    monkeypatch.setattr("linearize.choose.choose.LOGITS_TOGETHER", (0, 0))
    for each in (few, more):
        assert [one["text"] for one in each] == pytest.approx([one["text"] for one in scorer.kl(sets)], rel=1e-4)


def test_a_kept_layer_is_scored_with_its_window(tmp_path: Path) -> None:
    """As the hybrid that would be saved, whose kept softmax sees 6 tokens and the first 4."""
    source = save_source(tmp_path / "source")
    hybrid = load(convert_folder(source, tmp_path / "hybrid", keep_softmax="0,2", kept_window=6))
    plan = plan_conversion(str(source), "gsa", options=OPTIONS)[0]
    near = plan_conversion(str(source), "gsa", options=OPTIONS, keep_softmax="0,2", kept_window=6)[0].local
    mixture = Mixture(small_model("llama"), plan, near)
    for layer in (1, 3):
        own = mixers_of(hybrid)[f"model.layers.{layer}.self_attn"]
        mixture.mixers[layer].load_state_dict(own.state_dict())
    batch = {"input_ids": torch.arange(2 * 24).view(2, 24) % 97}
    with torch.no_grad():
        ours, theirs = mixture.logits(batch, mixture.hybrid({0, 2})), run(hybrid, batch).logits
        assert relative_error(ours, theirs) < TOLERANCE[torch.float32]
        assert torch.equal(mixture.logits(batch, mixture.hybrid({0, 2}), 5), ours[:, -5:])
        whole = Mixture(small_model("llama"), plan).logits(batch, mixture.hybrid(range(4)))
        assert relative_error(mixture.logits(batch, mixture.hybrid(range(4))), whole) > 1e-3


def handed(source: Path, to: str = "gsa", **asked: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What is given to a chooser, that keeps the first of what it may keep, and the conversion that follows."""
    given: dict[str, Any] = {}

    def first(plan: Any, source: Any, natives: Any, asked: str, count: int, units: Any, local: Any = ()) -> Choice:
        given.update(plan=plan, units=units, local=local)
        return Choice(asked, "none", (units[0] if isinstance(units[0], int) else named(units[0]),))

    return given, plan_conversion(str(source), to, choose=first, **asked)


def test_layers_are_scored_beside_windows_and_heads_that_are_settled(tmp_path: Path) -> None:
    """As in the hybrid that would be saved: layer 3 is left out, so it has a window; a head of layer 1 is named."""
    source = save_source(tmp_path / "source")
    asked: dict[str, Any] = {"layers": "0-2", "keep_softmax": "auto:1", "kept_window": 6, "keep_heads": "1:0"}
    given, planned = handed(source, options=OPTIONS, **asked)
    assert given["units"] == [0, 2]  # a layer whose heads are named becomes linear
    convert(*planned, tmp_path / "hybrid", level="none", say=quiet)
    hybrid, mixture = load(tmp_path / "hybrid"), Mixture(small_model("llama"), given["plan"], given["local"])
    assert mixture.layers == [0, 1, 2]
    for layer in (1, 2):
        mixture.mixers[layer].load_state_dict(mixers_of(hybrid)[f"model.layers.{layer}.self_attn"].state_dict())
    batch = {"input_ids": torch.arange(2 * 24).view(2, 24) % 97}
    with torch.no_grad():
        theirs = run(hybrid, batch).logits
        assert relative_error(mixture.logits(batch, mixture.hybrid({0})), theirs) < TOLERANCE[torch.float32]


def test_heads_are_scored_beside_the_windows_of_named_layers(tmp_path: Path) -> None:
    source, batch = save_source(tmp_path / "source"), {"input_ids": torch.arange(2 * 24).view(2, 24) % 97}
    given, _ = handed(source, options=OPTIONS, keep_softmax="3", kept_window=6, keep_heads="auto:1")
    local = plan_conversion(str(source), "window", layers="3", options={"window": 6, "sink": 4})
    convert(*local, tmp_path / "local", level="none", say=quiet)
    mixture = Mixture(small_model("llama"), given["plan"], given["local"])
    with torch.no_grad():
        ours, theirs = (
            mixture.logits(batch, mixture.hybrid(given["units"])),
            run(load(tmp_path / "local"), batch).logits,
        )
    assert relative_error(ours, theirs) < TOLERANCE[torch.float32]
    assert mixture.layers == [0, 1, 2]


@pytest.mark.parametrize("asked", [{"keep_softmax": "auto:1"}, {"keep_heads": "auto:1"}])
@pytest.mark.parametrize("to", ["gla", "retnet", "sla"])
def test_mixers_are_scored_with_the_rotation_of_softmax(tmp_path: Path, to: str, asked: dict[str, str]) -> None:
    """They are given its q and k; what is saved rotates behind the features, as it does without a choice."""
    given, (plan, *_) = handed(save_source(tmp_path), to, **asked)
    mixers = Mixture(small_model("llama"), given["plan"]).mixers.values()
    assert not any(mixer.drop_rope for mixer in mixers)
    assert {step.options["rope"] for step in plan.steps if not step.site.softmax_groups} == {"after"}


@pytest.mark.parametrize(
    ("name", "to", "options", "stands_in"),
    [
        ("llama", "mamba2", {"memories": 2, "maps": True}, True),
        ("qwen3", "gdn", {"native": True}, True),
        ("qwen3", "gdn", {}, False),
        ("llama", "gla", {"rope": "after"}, False),  # rotated, behind the features
        ("mistral", "mamba2", {}, False),  # softmax has a window of its own, which `window` would ignore
    ],
)
def test_a_window_stands_in_for_mixers_that_start_far_from_softmax(
    tmp_path: Path, name: str, to: str, options: dict[str, Any], stands_in: bool
) -> None:
    plan = plan_conversion(str(save_source(tmp_path, name)), to, options=options, layers="0-2")[0]
    scored, words = scored_plan(plan)
    assert ("128" in words) is stands_in
    if not stands_in:
        assert scored is plan
        return
    assert {step.mechanism for step in scored.steps} == {"window"}
    assert all(step.options.items() >= STAND_IN.items() for step in scored.steps)
    assert [step.site for step in scored.linear] == [step.site for step in plan.linear]
    assert scored.kept == plan.kept


@pytest.mark.parametrize(("to", "options"), [("window", {"sink": 1}), ("sla", {"base": "gla"}), ("gsa", {"slots": 16})])
def test_no_wider_window_is_scored_than_one_that_leaves_much_out(
    tmp_path: Path, to: str, options: dict[str, Any]
) -> None:
    """One as long as the texts would leave nothing out, and the choice would be of noise."""
    for window, narrowed in ((928, True), (128, False), (64, False)):
        plan = plan_conversion(str(save_source(tmp_path)), to, options=options | {"window": window}, layers="0-2")[0]
        scored, words = scored_plan(plan)
        assert ("window of 128" in words, scored is plan) == (narrowed, not narrowed)
        for one, own in zip(scored.steps, plan.steps, strict=True):
            assert (one.site, one.options) == (own.site, own.options | {"window": min(128, window)})


@pytest.mark.usefixtures("_less_text")
def test_a_choice_for_such_mixers_is_that_for_a_window(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scoring = Scoring(text=TextSource(files=(place / "train.jsonl",)), seq_len=512, say=quiet)
    own, wide, by_window = (
        plan_conversion(
            str(place / "source"), to, options=options, keep_softmax="auto:1", choose=choosers(scoring)["choose"]
        )
        for to, options in (("mamba2", {}), ("window", STAND_IN | {"window": 600}), ("window", STAND_IN))
    )
    ours, theirs = own[0].choice, by_window[0].choice
    assert wide[0].choice is not None
    assert ours is not None
    assert theirs is not None
    assert (ours.scores, ours.kl) == (theirs.scores, theirs.kl)
    assert (wide[0].choice.scores, wide[0].choice.kl) == (theirs.scores, theirs.kl)
    assert {step.options["window"] for step in wide[0].linear} == {600}
    assert (own[0].steps[0].mechanism, theirs.stand_in) == ("mamba2", "")
    choice_table(ours, "--keep-softmax")
    assert holds(" ".join(capsys.readouterr().err.split()), "window", "128", "other")
    assert holds(ours.scored(), "window", "128")
    assert Plan.from_json(own[0].to_json()).choice == ours


@pytest.mark.parametrize("name", ["GPTJ", "Gemma2", "Qwen3Moe"])
def test_a_mixture_learns_in_other_architectures(tmp_path: Path, name: str) -> None:
    """One that computes softmax itself, one with windows of its own, one with experts."""
    sizes: dict[str, Any] = {
        "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
        "Gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 16},
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    }[name]
    common = {"vocab_size": 97, "initializer_range": 0.3} if name == "GPTJ" else {**SMALL, "num_hidden_layers": 2}
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**common, **sizes))
    model.save_pretrained(tmp_path)
    mixture = Mixture(model.eval(), plan_conversion(str(tmp_path), "gsa", options=OPTIONS)[0])
    valid = torch.ones(2, 16, dtype=torch.bool)
    batch = {
        "input_ids": torch.arange(32).view(2, 16),
        "position_ids": torch.arange(16).expand(2, 16),
        "valid": valid,
    }
    mixture.calibrate(batch)
    mixture.train_mixers([batch], 1e-2)
    with torch.no_grad():
        whole = mixture.logits(batch, mixture.hybrid(mixture.layers))
    assert relative_error(whole, mixture.teacher(batch)) < TOLERANCE[torch.float32]


# ---------------------------------------------------------------- methods


def test_methods_on_a_loss_with_an_interaction() -> None:
    """Layers 0 and 1 do the same; alone linear each is made up for by the other, so that swaps overlook both."""
    alone = {0: 0.5, 1: 0.5, 2: 0.3, 3: 0.2}

    def lost(sets: Any) -> list[float]:
        return [0.5 * (not {0, 1} & set(kept)) + sum(alone[n] for n in (2, 3) if n not in kept) for kept in sets]

    assert swaps([0, 1, 2, 3], 2, lost).kept == [2, 3]
    found = restore([0, 1, 2, 3], 2, lost)
    assert found.kept == [0, 2]
    assert found.scores == pytest.approx({0: 0.5, 1: 0.0, 2: 0.3, 3: 0.2})


# ---------------------------------------------------------------- the whole


@pytest.fixture
def _less_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps on less text: the difference between the layers is large."""
    less = {"TRANSFER_STEPS": 6, "SCORE_TOKENS": 1024, "BATCH_TOKENS": 512, "RECALLS": 2}
    for name, value in less.items():
        monkeypatch.setattr(choose, name, value)


def planned(linearize: Command, place: Path, flag: str, method: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The plan of a conversion that chooses one by `flag`, and what was said; restore's is written into `folder`."""
    arguments = [flag, "auto:1", "--score-by", method, "--score-text", place / "train.jsonl"]
    settings = [part for name, value in OPTIONS.items() for part in ("--set", f"{name}={value}")]
    output = ("--dry-run",) if method != "restore" else ("-o", folder, "--verify", "none")
    code, out, err = linearize("convert", place / "source", "--to", "gsa", *arguments, *settings, *output, "--json")
    assert code == 0, err
    plan: dict[str, Any] = json.loads(out)["plan"]
    return plan, err


@pytest.mark.usefixtures("_less_text")
@pytest.mark.parametrize("method", METHODS)
def test_convert_chooses_what_matters_and_says_why(
    place: Path, tmp_path: Path, linearize: Command, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals, done = list[float](), list[float]()

    @contextlib.contextmanager
    def counting(what: str, total: float) -> Iterator[Any]:
        totals.append(total)
        yield done.append

    monkeypatch.setattr(choose, "progress", counting)
    plan, err = planned(linearize, place, "--keep-softmax", method, tmp_path / "hybrid")
    choice = plan["choice"]
    # What the estimate counts is what is read; texts that ask for a repetition are shorter than they may be.
    assert sum(done) == pytest.approx(totals[0], rel=0.15)
    assert choice["kept"] == [MATTERS] == [site["layer"] for site in plan["kept"]]
    assert choice["method"] == method
    assert choice["asked"] == "auto:1"
    assert max(choice["scores"], key=choice["scores"].get) == str(MATTERS)
    assert choice["text"].endswith("train.jsonl")
    assert choice["kl"]["kept"]["text"] < 0.2 * choice["kl"]["linear"]["text"]
    for message in (f"scored by {method}", "repeats this without scoring", "layer 2 keeps softmax"):
        assert message in err
    assert holds(err, "KL", "share")
    if method == "restore":
        assert json.loads(json.dumps(read_plan(tmp_path / "hybrid").to_json())) == plan


@pytest.mark.usefixtures("_less_text")
def test_the_plan_says_what_a_window_of_kept_softmax_costs(
    place: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On texts of twice the window; where there is none so long there is nothing to say."""
    arguments = ["--keep-softmax", "auto:1", "--score-by", "swaps", "--score-text", place / "heldout.txt", "--dry-run"]
    settings = [part for name, value in OPTIONS.items() for part in ("--set", f"{name}={value}")]
    found = {}
    for longest in (choose.LONGEST, 300):
        monkeypatch.setattr(choose, "LONGEST", longest)
        command = ("convert", place / "source", "--to", "gsa", *settings, *arguments, "--kept-window", "300")
        code, out, err = linearize(*command, "--json")
        assert code == 0, err
        found[longest] = json.loads(out)["plan"]["choice"]["window"]
        assert holds(err, "window in the kept layers") == (longest > 300)
    assert found.pop(300) == {}
    (measured,) = found.values()
    for kind in ("text", "recall"):
        assert 560 < measured[kind]["length"] <= 608
        assert measured[kind]["kl"] > 1e-6
        assert measured[kind]["ppl"] != measured[kind]["source_ppl"]
    assert holds(err, "measured", "16,384")


def test_the_window_of_layers_that_are_named_is_measured_where_a_text_is_given(
    place: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of layers that are chosen: of the same layer, the same figures; it is written into the plan."""

    def plan_of(*asked: Any) -> tuple[Any, str]:
        command = ("convert", place / "source", "--to", "la", *asked, "--dry-run", "--json")
        code, out, err = linearize(*command)
        assert code == 0, err
        return json.loads(out)["plan"], " ".join(err.split())

    window, text = ("--kept-window", "300"), ("--score-text", place / "heldout.txt")
    plan, message = plan_of("--keep-softmax", str(MATTERS), *window)
    assert plan["choice"] is None
    assert holds(message, "measured", "--score-text", "FILE")
    plan, message = plan_of("--keep-softmax", str(MATTERS), *window, *text)
    assert (plan["choice"]["method"], plan["choice"]["kept"], plan["choice"]["scores"]) == ("named", [MATTERS], {})
    assert holds(message, "heldout.txt", "608", "tokens")
    assert Plan.from_json(plan).choice is not None
    asked = {"keep_softmax": "auto:1", "kept_window": 300}
    scoring = Scoring(text=TextSource(files=(place / "heldout.txt",)), say=quiet)
    monkeypatch.setattr(choose, "by_method", lambda *args: methods.Chosen([MATTERS], dict.fromkeys(range(4), 0.0)))
    monkeypatch.setattr(choose, "TRANSFER_STEPS", 1)
    chosen = plan_conversion(str(place / "source"), "la", choose=choosers(scoring)["choose"], **asked)[0].choice
    assert chosen is not None
    for kind, cost in plan["choice"]["window"].items():
        assert cost == pytest.approx(chosen.window[kind], rel=1e-4)
    assert plan["choice"]["window"].keys() == {"text", "recall"}


def test_a_text_on_which_nothing_is_measured_is_refused(place: Path, linearize: Command) -> None:
    text = ("--score-text", place / "heldout.txt")
    code, _, err = linearize("convert", place / "source", "--to", "la", "--keep-softmax", "2", *text, "--dry-run")
    assert (code, holds(err, "measured", "it")) == (Exit.USAGE, True), err


@pytest.mark.usefixtures("_less_text")
def test_the_choice_is_the_same_each_time(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scoring = Scoring(text=TextSource(files=(place / "train.jsonl",)), seq_len=64, say=quiet)
    arguments: dict[str, Any] = {"options": OPTIONS, "keep_softmax": "auto:25%", "choose": choosers(scoring)["choose"]}
    first, second = (plan_conversion(str(place / "source"), "gsa", **arguments)[0] for _ in range(2))
    assert first == second
    assert first.choice is not None
    assert first.choice.scores.keys() == {"0", "1", "2", "3"}
    # Blocks that short have no room for recall, and the plan says so.
    assert (first.choice.recalls, first.choice.kl["linear"].keys()) == (0, {"text"})
    assert holds(first.choice.lacking, "repetition", "64 tokens")
    choice_table(first.choice, "--keep-softmax")
    printed = capsys.readouterr().err
    for name, score in first.choice.scores.items():
        kept = " softmax (kept)" * (name in map(str, first.choice.kept))
        assert f"{name} {score:.3f}{kept}" in [" ".join(line.split()) for line in printed.splitlines()]
    shown = " ".join(printed.split())
    assert holds(shown, "tokens", "64")
    assert holds(shown, "train.jsonl", "64")


@pytest.mark.usefixtures("_less_text")
def test_a_recipe_chooses_as_convert_does_on_the_same_text(place: Path) -> None:
    """Whatever the recipe's seed, which is that of training."""
    convert = {"mechanism": "gsa", "options": OPTIONS, "keep_softmax": "auto:1", "score_by": "swaps"}
    values = recipe_values(place, place / "source", stage("logit_kl", steps=1), convert=convert, seed=7)
    recipe = Recipe.model_validate(values)
    recipe._folder = place
    scoring = Scoring("swaps", TextSource(files=(place / "train.jsonl",)), values["data"]["pack"]["seq_len"], say=quiet)
    arguments: dict[str, Any] = {"options": OPTIONS, "keep_softmax": "auto:1", "choose": choosers(scoring)["choose"]}
    theirs = plan_conversion(str(place / "source"), "gsa", **arguments)[0].choice
    ours = plan_base(recipe, say=quiet)[0].choice
    assert ours == theirs
    assert ours.seq_len == values["data"]["pack"]["seq_len"]


@pytest.mark.slow
@pytest.mark.usefixtures("_less_text")
def test_a_recipe_chooses_on_its_own_text_and_once(place: Path) -> None:
    convert = {"mechanism": "gsa", "options": OPTIONS, "keep_softmax": "auto:1", "score_by": "swaps"}
    values = recipe_values(place, place / "source", stage("logit_kl", steps=1), convert=convert)
    recipe = Recipe.model_validate(values)
    recipe._folder = place
    messages: list[str] = []
    dry_run(recipe, messages.append)
    assert holds(messages[-1], "softmax", "1 of 4 layers", "auto:1", "measures")
    finetune(recipe, say=messages.append)
    plan = read_plan(place / "run" / "final")
    assert [site.layer for site in plan.kept] == [MATTERS]
    assert plan.choice is not None
    assert plan.choice.scored() in messages
    assert plan.choice.text.endswith("train.jsonl")
    told = sum("choosing 1 of layers 0-3" in text for text in messages)
    finetune(recipe.model_copy(update={"eval": recipe.eval}), resume="auto", say=messages.append)
    assert told == sum("choosing 1 of layers 0-3" in text for text in messages) == 1


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    video = transformers.VideoMAEConfig(**sizes, image_size=16, patch_size=4, num_frames=2)
    transformers.VideoMAEForVideoClassification(video).save_pretrained(tmp_path)
    with pytest.raises(LinearizeError, match=r"VideoMAEForVideoClassification .*video") as caught:  # without weights
        plan_conversion(str(tmp_path), "la", keep_softmax="auto:1", weights=False)
    assert caught.value.code == Exit.INCOMPATIBLE
    priced = {"keep_softmax": "1", "kept_window": 5, "price": pricer(Scoring())}
    transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes, vocab_size=97)).save_pretrained(tmp_path / "clip")
    with pytest.raises(LinearizeError, match=r"--score-text.*CLIPTextModel") as caught:
        plan_conversion(str(tmp_path / "clip"), "gsa", **priced)
    assert caught.value.code == Exit.INCOMPATIBLE


# ---------------------------------------------------------------- heads

HEAD = (1, 0)  # the one of `heads_place` whose output reaches the residual stream


@pytest.fixture(scope="module")
def heads_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in which the query heads of KV head 0 of layer 1 alone matter, and text."""
    folder, model = tmp_path_factory.mktemp("heads"), small_model("llama", **TRAINED)
    for number, layer in enumerate(model.model.layers):
        weight = layer.self_attn.o_proj.weight.data
        half = weight.shape[1] // 2
        weight[:, half if number == HEAD[0] else 0 :] *= 1e-3
    model.save_pretrained(folder / "source")
    byte_tokenizer().save_pretrained(folder / "source")
    write_data(folder)
    return folder


def test_a_mixture_opens_heads_one_by_one(tmp_path: Path) -> None:
    source = save_source(tmp_path)
    mixture = Mixture(small_model("llama"), plan_conversion(str(source), "gsa", options=OPTIONS)[0])
    batch = {"input_ids": torch.arange(48).view(2, 24) % 97, "position_ids": torch.arange(24).expand(2, 24)}
    every = [(layer, head) for layer in range(4) for head in range(2)]
    with torch.no_grad():
        whole, linear = (mixture.logits(batch, mixture.hybrid(kept)) for kept in (every, ()))
        assert relative_error(whole, mixture.teacher(batch)) < TOLERANCE[torch.float32]
        one = mixture.logits(batch, mixture.hybrid([(2, 1)]))
        weights = [layer.self_attn.o_proj.weight for layer in mixture.model.model.layers]
        weights[2].data[:, 16:] = 0.0  # its query heads
        closed, opened = (mixture.logits(batch, mixture.hybrid(kept)) for kept in ((), [(2, 1)]))
    assert relative_error(one, linear) > 1e-3
    assert relative_error(opened, closed) < TOLERANCE[torch.float32]


def test_heads_are_checked_first_and_layers_of_named_ones_become_linear(heads_place: Path) -> None:
    def unasked(*_: Any, **__: Any) -> Choice:
        raise AssertionError("layers were scored")

    source, asked = str(heads_place / "source"), {"keep_softmax": "auto:1", "options": OPTIONS}
    refused = {"2:99": "99 is none of them", "2:0,1": "all 2 KV heads", "2": "Write", "auto:4": "3 leave one"}
    for heads, problem in refused.items():
        with pytest.raises(LinearizeError, match=problem):
            plan_conversion(source, "gsa", keep_heads=heads, choose=unasked, **asked)
    # The layer that an even spread would keep, which a recipe's dry run and `estimate` plan with.
    plan = plan_conversion(source, "gsa", keep_heads="2:0", weights=False, **asked)[0]
    assert plan.softmax_groups == [(2, 0)]
    assert len(plan.kept) == 1
    three = plan_conversion(source, "gsa", keep_heads="2:0", weights=False, **asked | {"keep_softmax": "auto:3"})[0]
    assert [site.layer for site in three.kept] == [0, 1, 3]
    with pytest.raises(LinearizeError, match=r"auto:3.*3.*--keep-heads.*2.*4"):
        plan_conversion(source, "gsa", keep_heads="2:0;3:1", choose=unasked, **asked | {"keep_softmax": "auto:3"})


@pytest.mark.usefixtures("_less_text")
@pytest.mark.parametrize("method", with_slow(METHODS[:2], METHODS[1]))
def test_convert_chooses_the_head_that_matters(
    heads_place: Path, tmp_path: Path, linearize: Command, method: str
) -> None:
    plan, err = planned(linearize, heads_place, "--keep-heads", method, tmp_path / "heads")
    choice = plan["heads_choice"]
    assert choice["kept"] == ["1:0"] == [max(choice["scores"], key=choice["scores"].get)]
    assert [step["site"]["softmax_groups"] for step in plan["steps"]] == [[], [0], [], []]
    assert choice["scores"].keys() == {f"{layer}:{head}" for layer in range(4) for head in range(2)}
    assert choice["kl"]["kept"]["text"] < 0.2 * choice["kl"]["linear"]["text"]
    for message in (
        "choosing 1 of 8 KV heads",
        "--keep-heads '1:0' repeats this without scoring",
        "with no head kept",
    ):
        assert message in err
    if method == "restore":
        assert json.loads(json.dumps(read_plan(tmp_path / "heads").to_json())) == plan
        assert load(tmp_path / "heads")(torch.arange(9)[None]).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.usefixtures("_less_text")
def test_heads_are_chosen_beside_layers_whose_softmax_has_a_window(heads_place: Path, linearize: Command) -> None:
    """Such a layer has none to choose, and nothing to train."""
    arguments = ["--keep-softmax", "3", "--kept-window", "300", "--keep-heads", "auto:1", "--score-by", "swaps"]
    settings = [part for name, value in OPTIONS.items() for part in ("--set", f"{name}={value}")]
    read = ("--score-text", heads_place / "train.jsonl", "--dry-run", "--json")
    code, out, err = linearize("convert", heads_place / "source", "--to", "gsa", *arguments, *settings, *read)
    assert code == 0, err
    plan = json.loads(out)["plan"]
    assert plan["heads_choice"]["kept"] == ["1:0"]
    assert plan["heads_choice"]["scores"].keys() == {f"{layer}:{head}" for layer in range(3) for head in range(2)}
    assert [step["mechanism"] for step in plan["steps"]] == ["gsa", "gsa", "gsa", "window"]


@pytest.mark.slow
@pytest.mark.usefixtures("_less_text")
def test_a_recipe_chooses_layers_then_heads_and_trains_the_rest(heads_place: Path) -> None:
    convert = {"mechanism": "gsa", "options": OPTIONS, "keep_softmax": "auto:1", "keep_heads": "auto:20%"}
    stages = [stage(kind, steps=2) for kind in ("attention_transfer", "logit_kl")]
    values = recipe_values(heads_place, heads_place / "source", *stages, convert=convert | {"score_by": "swaps"})
    recipe = Recipe.model_validate(values)
    recipe._folder = heads_place
    messages: list[str] = []
    dry_run(recipe, messages.append)
    assert holds(messages[-1], "softmax", "1 KV head", "auto:20%", "measures")
    finetune(recipe, say=messages.append)
    plan = read_plan(heads_place / "run" / "final")
    assert [site.layer for site in plan.kept] == [HEAD[0]]
    assert len(plan.softmax_groups) == 1
    assert plan.choice is not None
    assert plan.heads_choice is not None
    assert len(plan.heads_choice.scores) == 6
    assert {plan.choice.scored(), plan.heads_choice.scored()} <= {*messages}
    assert "keep softmax" in (heads_place / "run" / "final" / "README.md").read_text()
    ids = torch.arange(24)[None] % 90
    model = load(heads_place / "run" / "final")
    assert sum(bool(mixer.softmax) for mixer in mixers_of(model).values()) == 1
    assert model(ids).logits.isfinite().all()


def test_scores_are_told_from_the_highest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"0": 0.25, "1": 0.0, "2": 0.5, "3": 0.25}
    choice = Choice("auto:2", "swaps", (2, 3), scores)
    start = "auto:2, scored by swaps (share of the loss that making it alone linear brings): "
    assert choice.scored() == start + "2: 0.500 (kept), 3: 0.250 (kept), 0: 0.250, 1: 0.000"
    monkeypatch.setattr(keep, "SCORES_SHOWN", 2)
    assert choice.scored() == start + "2: 0.500 (kept), 3: 0.250 (kept), and 2 more in linearize.json"


def test_one_head_of_each_layer_is_left_to_its_mechanism() -> None:
    groups = [(layer, head) for layer in (0, 3) for head in range(3)]
    weights = dict(zip(groups, (0.3, 0.2, 0.1, 0.05, 0.04, 0.01), strict=True))

    def lost(sets: Any) -> list[float]:
        return [sum(weight for group, weight in weights.items() if group not in kept) for kept in sets]

    wanted = [(0, 0), (0, 1), (3, 0)]
    assert restore(groups, 3, lost, leaves_one(groups)).kept == wanted
    assert swaps(groups, 3, lost, leaves_one(groups)).kept == wanted
    assert unscored_heads("auto:4", groups).kept == ("0:0", "0:2", "3:0", "3:2")
    with pytest.raises(LinearizeError, match=r"keeps.*5.*4"):
        unscored_heads("auto:5", groups)


# ---------------------------------------------------------------- what is read


def test_text_for_training_is_not_what_is_scored(place: Path) -> None:
    source = TextSource(files=(place / "train.jsonl",))
    train, text = batches_of(Scoring(), source, small_model("llama", **TRAINED), byte_tokenizer(), 64)
    assert all(batch["asked"].equal(batch["valid"]) for batch in text)
    blocks = [{tuple(row) for batch in part for row in batch["input_ids"].tolist()} for part in (train, text)]
    assert not blocks[0] & blocks[1]
    assert all(blocks)


def test_recalls_ask_for_values_alone() -> None:
    batch = recall_batches(byte_tokenizer(), 512, 0, torch.device("cpu"))[0][0]
    tokenizer = byte_tokenizer()
    for ids, asked in zip(batch["input_ids"], batch["asked"], strict=True):
        values = ids[asked.nonzero()[:, 0] + 1]
        words = re.split("[ ,()]+", tokenizer.decode(ids))
        assert {*tokenizer.decode(values).split()} <= {*words}
    none, lacking = recall_batches(byte_tokenizer(), 32, 0, torch.device("cpu"))  # no room for the questions
    assert (none, holds(lacking, "32", "tokens")) == ([], True)


def test_without_a_text_python_sources_are_read() -> None:
    assert Scoring().text == PACKAGES
    assert str(PACKAGES) == "the source code of torch, transformers, accelerate and peft"
