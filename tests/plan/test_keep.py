"""Which layers keep softmax, as users write it, and the choice that a plan stores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Command, holds
from models import save_source

from linearize.convert import plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.plan.keep import Choice, auto_count
from linearize.plan.plan import Plan


@pytest.mark.parametrize(
    ("asked", "layers", "count"),
    [("auto:2", 8, 2), ("auto:25%", 16, 4), ("auto:12.5%", 16, 2), ("auto:1%", 8, 1), (" auto:99% ", 3, 2)],
)
def test_auto_counts_layers(asked: str, layers: int, count: int) -> None:
    if "99" in asked:  # rounds to all of them
        with pytest.raises(LinearizeError, match=r"3.*3.*convert"):
            auto_count(asked, layers)
    else:
        assert auto_count(asked, layers) == count


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("auto", r"auto:2.*auto:25%"),
        ("auto:", "write auto:2"),
        ("auto:two", "write auto:2"),
        ("auto:1.5", "write auto:2"),
        ("auto:-1", "write auto:2"),
        ("auto:0", "auto:0"),
        ("auto:0%", "auto:0%"),
        ("auto:4", r"4.*4.*layers"),
        ("auto:9", r"9.*4.*layers"),
    ],
)
def test_what_auto_cannot_mean_is_refused(asked: str, message: str) -> None:
    with pytest.raises(LinearizeError, match=message) as caught:
        auto_count(asked, 4)
    assert caught.value.code == Exit.USAGE


@pytest.mark.parametrize(
    ("layers", "asked", "kept"),
    [("all", "auto:2", [1, 3]), ("all", "auto:1", [2]), ("1-3", "auto:1", [2]), ("all", "every:3", [0, 3])],
)
def test_without_weights_a_plan_has_layers_that_stand_in(
    tmp_path: Path, layers: str, asked: str, kept: list[int]
) -> None:
    folder = save_source(tmp_path / "source")
    plan = plan_conversion(str(folder), "gsa", layers=layers, keep_softmax=asked, weights=False)[0]
    linear = set(range(4)) if layers == "all" else {1, 2, 3}
    assert [step.site.layer for step in plan.steps] == sorted(linear - set(kept))
    assert plan.choice == (Choice(asked, "none", tuple(kept)) if "auto" in asked else None)


def test_a_plan_stores_its_choice(tmp_path: Path) -> None:
    plan = plan_conversion(str(save_source(tmp_path / "source")), "gsa", keep_softmax="2", weights=False)[0]
    kl = {"linear": {"text": 0.5}, "kept": {"text": 0.1}}
    choice = Choice("auto:1", "restore", (2,), {"0": 0.1, "2": 0.7}, "a.txt", 64, 0, kl)
    chosen = replace(plan, choice=choice)
    assert Plan.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen
    before = {key: value for key, value in plan.to_json().items() if key != "choice"}  # of an earlier version
    assert Plan.from_json(before) == plan


def test_options_of_auto_are_checked(tmp_path: Path, linearize: Command) -> None:
    folder = save_source(tmp_path / "source")
    convert = ("convert", folder, "--to", "gsa", "--keep-softmax", "auto:1", "--dry-run")
    for options, message in (
        (("--score-by", "swap"), ("--score-by", "swap", "'swaps'")),
        (("--score-text", "a.csv"), ("--score-text", "a.csv")),
        (("--score-text", "none.txt"), ("none.txt",)),
    ):
        code, _, err = linearize(*convert, *options)
        assert code == Exit.USAGE, err
        assert holds(err, *message)
