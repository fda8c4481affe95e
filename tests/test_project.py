"""The files around the package: notebook, container, citation, hooks. What they name exists, and the notebook runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import typer
import yaml
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from linearize import __version__
from linearize.cli import app

ROOT = Path(__file__).resolve().parents[1]


def cells() -> list[str]:
    """The code cells of the notebook."""
    notebook = json.loads((ROOT / "examples" / "demo.ipynb").read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) >= (4, 5)
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_runs_without_a_network(tmp_path: Path) -> None:
    """Its cells one after the other, with budgets of a few steps."""
    code = "\n".join(cells())
    for budget, less in (
        ("16_384", "2048"),
        ("32_768", "2048"),
        ("8192", "1024"),
        ("4096", "1024"),
        ("trials=8", "trials=1"),
    ):
        assert budget in code
        code = code.replace(budget, less)
    code = code.replace(
        '"eval.max_tokens": 1024,\n    }', '"eval.max_tokens": 1024,\n        "finish.verify": False,\n    }'
    )
    assert "finish.verify" in code
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "kept: [4, 5]" in done.stdout
    assert "x the teacher's perplexity" in done.stdout
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()


def test_the_container_copies_what_there_is() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert {"pyproject.toml", "linearize", "kernels", "recipes"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    make = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r'^ARG TORCH="(.+)"$', text, re.MULTILINE)[1] in make  # type: ignore[index]


def test_the_container_installs_and_runs_what_the_package_has() -> None:
    """All that can be checked without building it: Python, extras, entry point and default command."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    said = dict(re.findall(r"^(FROM|ENTRYPOINT|CMD) (.+)$", text, re.MULTILINE))
    python = re.fullmatch(r"python:([\d.]+)-slim", said["FROM"])
    assert python is not None
    assert SpecifierSet(project["project"]["requires-python"]).contains(python[1])
    assert f"Programming Language :: Python :: {python[1]}" in project["project"]["classifiers"]
    (extras,) = re.findall(r'"\.\[(.+)\]"', text)
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert {project["tool"]["setuptools"]["package-dir"].get(name, name) for name in packages} <= copied
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= copied
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert not any(fnmatch(name, pattern.strip("/")) for name in copied for pattern in ignored)
    (entry,) = json.loads(said["ENTRYPOINT"])
    assert project["project"]["scripts"][entry] == "linearize.cli:run"
    done = CliRunner().invoke(app, json.loads(said["CMD"]))
    assert (done.exit_code, "Usage" in done.output) == (0, True)
    (example,) = re.findall(r"docker run --rm linearize (\w+)", text)
    assert typer.main.get_command(app).get_command(None, example) is not None  # type: ignore[attr-defined]


def test_the_citation_has_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_hooks_are_targets_of_make() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert {hook["entry"] for hook in hooks} == {"make lint", "make types", "make test"}
    assert all(hook["entry"].split()[1] in targets for hook in hooks)


def test_both_parts_of_the_tests_are_all_of_them_and_ci_runs_both() -> None:
    """A test is marked slow or it is not, and a marker that is misspelt is an error."""
    make = (ROOT / "Makefile").read_text("utf-8")
    rules = dict(re.findall(r"^([\w-]+):(.*\n(?:\t.*\n)*)", make, re.MULTILINE))
    assert re.findall(r"-m pytest (.*)", rules["unit"]) == ['-m "not slow"']
    assert re.findall(r"-m pytest (.*)", rules["test-slow"]) == ["-m slow"]
    assert "unit" in rules["test"].split()
    ran = re.findall(r"^part .*\b(make [\w-]+)$", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
    assert {"make test", "make test-slow"} <= set(ran)
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    assert "--strict-markers" in options["addopts"].split()
    assert not {"-m", "-k", "--deselect", "--ignore"} & set(options["addopts"].split())
    assert options["testpaths"] == ["tests"]
