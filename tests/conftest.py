"""Shared fixtures and the one table of tolerances."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch is imported anywhere: two workers on two cores must not start four threads each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# One folder per worker, before transformers is imported: the code of checkpoints is copied there, and nothing may be
# left of an earlier run.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modules-")

import pytest
import quick
import torch
from forks import Forks
from zygote import Zygotes

from linearize.cli import main
from linearize.page import drawing
from linearize.verify import reload

if TYPE_CHECKING:
    from models import Zoo

Command = Callable[..., tuple[int, str, str]]

# Largest difference over the largest reference value, by dtype of the fast path; the reference is float64.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


# Arguments that fit no q [2,5,H,D] with k [2,5,2,D], and what an operator says of them.
WRONG_SHAPES: list[tuple[dict[str, torch.Tensor], str]] = [
    ({"k": torch.zeros(2, 5, 2, 7)}, "equal B, T and key dim"),
    ({"padding": torch.ones(2, 4, dtype=torch.bool)}, r"padding must be \[B,T\]"),
    ({"segments": torch.ones(2, 4, dtype=torch.long)}, r"segments must be \[B,T\]"),
    ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens needs B=1"),
]


def every_pair(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of a matrix in which each value of a factor meets each of every other: fewer than the whole product, where
    what can go wrong is one value or two together."""
    rows = list(itertools.product(*(range(len(values)) for values in factors)))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return [tuple(values[i] for values, i in zip(factors, row, strict=True)) for row in chosen]


def with_slow(values: Iterable[Any], *slow: Any) -> list[Any]:
    """`values` as parameters of a test, those of `slow` marked slow."""
    found = list(values)
    assert all(one in found for one in slow), slow
    return [pytest.param(one, marks=pytest.mark.slow) if one in slow else one for one in found]


def holds(text: str, *names: str) -> bool:
    """Whether a message has each of these names and values, however it is worded and broken into lines."""
    found = " ".join(text.split())
    return all(" ".join(name.split()) in found for name in names)


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """max |ours - reference| / max |reference|, in float64; NaN when either has one."""
    a, b = ours.detach().double(), reference.detach().double()
    if a.numel() == 0:
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))


def pytest_configure() -> None:
    quick.be_quick()
    drawing.SCALE = 1  # fewer pixels in the pictures of cards


def pytest_collection_finish() -> None:
    """Modules stay for good, so the garbage collector need not go through them; nor look so often for what is new."""
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_unconfigure() -> None:
    """Remove the copied code, and let modules go as they would."""
    gc.unfreeze()
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Small converted models of several architectures, made on first use."""
    from models import Zoo

    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Commands in children of a process that has imported everything already."""
    started = Forks()
    yield started
    started.close()


@pytest.fixture(scope="session")
def zygotes() -> Iterator[Zygotes]:
    """What forks clean processes."""
    started = Zygotes()
    yield started
    started.close()


@pytest.fixture
def real_processes() -> None:
    """For a test whose clean processes shall not be forked."""


@pytest.fixture(autouse=True)
def _forked_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, zygotes: Zygotes) -> None:
    """Clean processes are forked from a warm one, but in tests that ask for real ones."""
    if "real_processes" not in request.fixturenames:
        monkeypatch.setattr(reload, "subprocess", zygotes.patched())


@pytest.fixture
def linearize(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["linearize", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return code or 0, *capsys.readouterr()

    return run


@pytest.fixture(autouse=True)
def _no_full_collections() -> None:
    quick.without_full_collections()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
