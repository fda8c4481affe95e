"""The rules of the house: sizes, names and paths, what the README promises, what the wheel holds."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from linearize.plan.mechanisms import mechanism_names
from linearize.recipe.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SOURCES = sorted([*ROOT.glob("linearize/**/*.py"), *ROOT.glob("kernels/**/*.py")])
RECIPES = sorted(ROOT.glob("recipes/*.yaml"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """The files under version control that exist."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


# ---------------------------------------------------------------- sources


def test_no_file_names_a_place_of_one_machine(tracked: list[Path]) -> None:
    place = re.compile(r"(?<![\w.])/(?:home|root|Users|work|tmp|opt|mnt)/\w")
    found = []
    for path in tracked:
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{name_of(path)}:{number}" for number, line in enumerate(lines, 1) if place.search(line)]
    assert not found


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_parses_and_says_how_it_was_measured(path: Path) -> None:
    assert load_recipe(path, ["model.base=demo"]).stages
    keys = re.findall(r"^# (command|hardware|duration|result) ", path.read_text("utf-8"), re.MULTILINE)
    assert keys == ["command", "hardware", "duration", "result"]


@pytest.mark.slow
def test_transformers_runs_in_a_folder_named_as_its_optional_package_is() -> None:
    """`kernels` is also the import name of a package that transformers looks for; ours is a folder, not a package."""
    code = (
        "import importlib.util, transformers.integrations.hub_kernels, linearize_kernels.gsa.gsa\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "assert spec is None or spec.origin is None or 'site-packages' in spec.origin, spec\n"
        "transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=8, intermediate_size=8,"
        " num_hidden_layers=1, num_attention_heads=1, vocab_size=8))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# ---------------------------------------------------------------- README


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_readme_names_every_mechanism_as_done_or_planned() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (done|planned)\b", README, re.MULTILINE)
    assert sorted(name for name, status in rows if status == "done") == [*mechanism_names()]


# ---------------------------------------------------------------- package


def expected_files() -> set[str]:
    """What the wheel must hold beside its metadata."""
    data = (*ROOT.glob("linearize/demo/model/*"), ROOT / "linearize/checkpoint/known_code.txt")
    data += (ROOT / "linearize/py.typed", *ROOT.glob("linearize/measure/task_files/*.yaml"))
    data += (*ROOT.glob("linearize/*/card.md"), ROOT / "linearize/page/style.css")
    files = {name_of(path) for path in (*SOURCES, *RECIPES, *data)}
    return {re.sub(r"^(kernels|recipes)/", r"linearize_\1/", name) for name in files}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel), the wheel built from the sdist; from a copy, for the build writes beside its sources."""
    copy = tmp_path_factory.mktemp("package") / "source"
    copy.mkdir()
    for name in ("linearize", "kernels", "recipes"):
        copytree(ROOT / name, copy / name, ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist")]
    done = subprocess.run(build, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return next(copy.glob("dist/*.tar.gz")), next(copy.glob("dist/*.whl"))


def test_the_wheel_holds_all_of_the_package_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        held = set(wheel.namelist())
        metadata = wheel.read(next(name for name in held if name.endswith("/METADATA"))).decode()
    package = {name for name in held if ".dist-info/" not in name}
    assert package == expected_files()
    assert any(name.endswith("/licenses/LICENSE") for name in held)
    assert "License-Expression: Apache-2.0" in metadata
    assert "Classifier: Typing :: Typed" in metadata
    assert "Keywords: " in metadata
    assert f"Requires-Python: {PROJECT['project']['requires-python']}" in metadata


def test_the_sdist_holds_no_more_than_it_needs(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as sdist:
        held = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    sources = {re.sub("^linearize_(kernels|recipes)/", r"\1/", name) for name in expected_files()}
    extra = {name for name in held - sources if ".egg-info/" not in name}
    assert sources <= held
    assert extra == {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "setup.cfg"}


def test_the_lowest_transformers_is_the_one_that_is_tested() -> None:
    lowest = next(
        r.partition(">=")[2].partition(",")[0]
        for r in PROJECT["project"]["dependencies"]
        if r.startswith("transformers>=")
    )
    assert f"transformers=={lowest}.0\n" in (ROOT / "Makefile").read_text("utf-8")
