"""Converting where memory is short: the proof is made of one side after the other, or of the first layers."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import HYBRID, Zoo, copied

from linearize.checkpoint import upgrade
from linearize.convert import plan_conversion
from linearize.errors import LinearizeError
from linearize.verify.reload import FIRST, TOO_LARGE, Fits, numbers, verify, what_fits

STEPS = "; single steps through a cache equal one pass"
LOGITS = "; logits equal the source class with mixers"


def planned(source: Path, layers: str) -> Any:
    """The plan with which `Zoo` converts."""
    return plan_conversion(str(source), "gsa", layers=layers, options={"slots": 8, "chunk_size": 16})


def left(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """So many bytes of memory are free."""
    monkeypatch.setattr("linearize.verify.reload.free_memory", lambda: size)


def forgetful(folder: Path, target: Path) -> Path:
    """A copy of a converted folder whose states forget what came before, step by step."""
    copied(folder, target)
    code = (target / "cache.py").read_text()
    forgets = code.replace("o, self.state = mixer(", "o, _ = mixer(")
    assert forgets != code
    (target / "cache.py").write_text(forgets)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_one_side_after_the_other(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source, folder = zoo.folders(name, HYBRID)
    plan, opened, _ = planned(source, HYBRID)
    left(monkeypatch, 5 * numbers([folder]))
    assert what_fits(folder, plan) == Fits(0, False)
    message = verify(folder, "auto", opened, plan, False)
    assert LOGITS in message
    assert STEPS in message
    assert "compared on" not in message


# The proof takes two clean processes. Layers of gemma2 slide in turn.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "needed", "proved"),
    [
        ("llama", "all", 1, False),
        ("llama", HYBRID, 2, True),
        ("llama", "1,2,3", 2, False),
        ("gemma2", HYBRID, 2, False),
        ("gemma2", "1,2,3", 3, True),
        ("gpt2", "all", 1, True),
    ],
)
def test_the_first_layers_of_each_kind(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, name: str, layers: str, needed: int, proved: bool
) -> None:
    source, folder = zoo.folders(name, layers)
    plan, opened, _ = planned(source, layers)
    left(monkeypatch, 3.9 * numbers([folder]))
    fits = what_fits(folder, plan)
    assert fits is not None
    assert fits.layers == needed
    if not proved:
        return
    message = verify(folder, "auto", opened, plan, False)
    assert LOGITS in message
    assert STEPS in message
    assert message.endswith(FIRST.format(needed))


@pytest.mark.slow
def test_a_wrong_step_is_found_in_the_first_layers(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, linear = zoo.folders("llama", HYBRID)
    folder = forgetful(linear, tmp_path / "linear")
    plan, opened, _ = planned(source, HYBRID)
    left(monkeypatch, 3.9 * numbers([folder]))
    assert what_fits(folder, plan) == Fits(2, False)
    with pytest.raises(LinearizeError, match=r"single.*differ"):
        verify(folder, "auto", opened, plan, False)


@pytest.mark.slow
def test_too_little_for_any_is_said(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder = zoo.folders("llama", HYBRID)
    plan, opened, _ = planned(source, HYBRID)
    left(monkeypatch, 4 * numbers([folder], 2))
    assert verify(folder, "auto", opened, plan, False).endswith(TOO_LARGE + " (--verify full forces it)")
    # One that needs all of its layers to have one of each kind.
    plan, opened, _ = planned(source, "3")
    left(monkeypatch, 3.9 * numbers([folder]))
    assert what_fits(folder, plan) is None


@pytest.mark.slow
@pytest.mark.parametrize(("share", "layers", "most"), [(9, 0, 2), (5, 0, 1), (3.9, 2, 1), (0, None, 0)])
def test_an_upgrade_compares_what_fits(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, share: float, layers: int | None, most: int
) -> None:
    """Both folders at once, one after the other, or their first layers; `most` is how many are in memory at a time."""
    source, folder = zoo.folders("llama", HYBRID)
    plan, _, _ = planned(source, HYBRID)
    left(monkeypatch, share * numbers([folder]))
    asked, running, highest, meeting = list[int](), list[int](), [0], threading.Barrier(2)

    def reload(path: Path, first: int, padded: bool = True) -> Any:
        asked.append(first)
        running.append(1)
        highest.append(sum(running))
        with contextlib.suppress(threading.BrokenBarrierError):  # where the other does not come
            meeting.wait(60 if most == 2 else 0.2)
        running.pop()
        return 9, torch.ones(3), {}

    monkeypatch.setattr(upgrade, "reload_logits", reload)
    monkeypatch.setattr(upgrade, "check_steps", lambda child: STEPS)
    message = upgrade.compared(folder, folder, plan)
    assert max(highest) == most
    assert asked == ([] if layers is None else [layers, layers])
    assert ("logits equal those of before" in message) == (layers is not None)
    assert message.endswith(TOO_LARGE) == (layers is None)
    assert ("compared on the first 2 layers" in message) == (layers == 2)


@pytest.mark.slow
def test_an_upgrade_compares_first_layers(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder = zoo.folders("llama", HYBRID)
    plan, _, _ = planned(source, HYBRID)
    left(monkeypatch, 3.9 * numbers([folder]))
    assert "(largest difference 0.0e+00)" in upgrade.compared(folder, folder, plan)
    with pytest.raises(LinearizeError, match=r"single.*differ"):
        upgrade.compared(folder, forgetful(folder, tmp_path / "linear"), plan)
