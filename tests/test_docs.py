"""The documentation says what is so: its commands parse, its recipes load, its links lead somewhere, its example works.

`make docs` builds the site strictly; what is tested here needs no mkdocs.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
import transformers
import typer
import yaml
from conftest import Command
from pages import made_up_run
from training import text

from linearize import api
from linearize.cli import app
from linearize.data.batches import FEW_IMAGES
from linearize.demo import model_folder
from linearize.diffusion.recipe import holds_latents, load_latents_recipe
from linearize.errors import LinearizeError
from linearize.plan.mechanisms import (
    EXAMPLE,
    load_mechanism,
    mechanism_names,
    parse_settings,
    resolve_options,
)
from linearize.plan.plan import make_steps
from linearize.recipe.data import holds_images
from linearize.recipe.presets import Preset, is_recipe, presets
from linearize.recipe.recipe import load_recipe
from linearize.recipe.schema import recipe_schema

ROOT = Path(__file__).resolve().parents[1]
BASE = "model.base=demo"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
# A page as messages, comments and recipes name it.
PAGE = re.compile(r"\bdocs/[\w/-]+\.(?:md|py|png)\b")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def shell_commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of a page: lines of shell blocks, and code in the text that starts as one does."""
    text = page.read_text("utf-8")
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    sentences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    inline = re.findall(r"`((?:linearize|python -m|accelerate launch) [^`]+)`", sentences)
    for line in [*lines, *inline]:
        words = shlex.split(" ".join(line.split()), comments=True)
        if words:
            yield words


def linearize_commands(page: Path) -> list[list[str]]:
    """The arguments of each call of linearize, also of those behind `-m linearize`."""
    found = []
    for words in shell_commands(page):
        if words[0] == "linearize":
            found.append(words[1:])
        elif "linearize" in words and words[words.index("linearize") - 1] == "-m":
            found.append(words[words.index("linearize") + 1 :])
    return [[word for word in words if word != "..."] for words in found]


def parse(words: list[str]) -> tuple[Any, dict[str, Any]]:
    """The command and its parameters that the command line makes of these words; raises what a wrong call raises."""
    context = typer.main.get_command(app).make_context("linearize", list(words))
    while hasattr(context.command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return context.command, context.params


def check_command(words: list[str]) -> None:
    """Raise for a call that the command line, the recipe or the mechanism refuses. Nothing runs."""
    if not words or words[0].isupper():  # `linearize COMMAND --help`
        return
    if words[0].startswith("-"):  # its own options act while they are parsed: --install-completion writes files
        assert words[0] in {name for one in typer.main.get_command(app).params for name in one.opts}, words
        words = words[1:]
    if not words:
        return
    command, given = parse(words)
    bare = [word for word in [*(given.get("values") or []), *(given.get("words") or [])] if "=" in word]
    options = [*bare, *(given.get("settings") or [])]
    recipe = given.get("recipe") if command.name in ("finetune", "eval") else None
    if command.name == "convert" and is_recipe(given["model"], bare):
        recipe = given["model"]
    elif given.get("to") in mechanism_names() and options:
        build(given["to"], parse_settings(options))
    if recipe in {one.name for one in presets()}:
        overrides = bare if command.name == "convert" else list(given["overrides"] or [])
        base = [] if any(one.startswith("model.base=") for one in overrides) else ["model.base=demo"]
        convert = load_recipe(recipe, [*base, *overrides]).convert
        if convert is not None:
            build(convert.mechanism, convert.options)


def build(mechanism: str, options: dict[str, Any]) -> None:
    """Raise where a mechanism refuses these options, together too."""
    from linearize_kernels.mixer import AttentionSite

    causal = load_mechanism(mechanism).causal
    make_steps([AttentionSite(**EXAMPLE | {"layer": layer}, causal=causal) for layer in range(2)], mechanism, options)


def test_a_command_that_does_not_exist_is_found() -> None:
    check_command(shlex.split("convert MODEL --to gsa --set slots=64"))
    check_command(shlex.split("convert MODEL --to gsa slots=64"))
    check_command(shlex.split("convert hybrid model.base=MODEL convert.options.slots=64"))
    check_command(shlex.split("finetune gsa model.base=MODEL stages[0].tokens=5M"))
    with pytest.raises(Exception, match="No such option"):
        check_command(shlex.split("convert MODEL --to gsa --slots 64"))
    with pytest.raises(AssertionError, match="--ofline"):
        check_command(shlex.split("--ofline doctor"))
    with pytest.raises(Exception, match="No such command"):
        check_command(shlex.split("distill MODEL"))
    with pytest.raises(LinearizeError, match="slot: gsa has no such option"):
        check_command(shlex.split("convert MODEL --to gsa --set slot=64"))
    with pytest.raises(LinearizeError, match="slot: gsa has no such option"):
        check_command(shlex.split("convert MODEL --to gsa slot=64"))
    with pytest.raises(LinearizeError, match="unknown key"):
        check_command(shlex.split("convert hybrid model.base=MODEL convert.option.slots=64"))
    with pytest.raises(LinearizeError, match="clock"):
        check_command(shlex.split("finetune gsa model.base=MODEL convert.options.slots=64"))
    with pytest.raises(LinearizeError, match="unknown key"):
        check_command(shlex.split("finetune gsa model.base=MODEL stages[0].token=5M"))


@every_page
def test_commands_of_linearize_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.lexists", lambda path: True)  # the folders of the examples
    wrong = []
    for words in linearize_commands(page):
        try:
            check_command(words)
        except Exception as error:
            named = f"linearize {words[0]}" in page.read_text("utf-8") and type(error).__name__ == "MissingParameter"
            if not (named and len(words) == 1):  # `linearize finetune` in a sentence
                wrong.append(f"linearize {shlex.join(words)}: {type(error).__name__}: {error}")
    assert not wrong


def test_the_readme_converts_finetunes_and_makes() -> None:
    assert {words[0] for words in linearize_commands(PAGES[0])} >= {"convert", "finetune"}
    assert {words[1] for words in shell_commands(PAGES[0]) if words[0] == "make"} >= {"demo", "test"}


# Commands of seconds, where they neither choose layers nor name what a reader has to put there.
QUICK = ("doctor", "inspect", "convert", "generate", "mechanisms", "recipes")


def runs_here(words: list[str]) -> bool:
    """Whether a command takes seconds and needs nothing that is not in this folder: no model of the Hub, no DIR."""
    if words[0] not in QUICK or any(word.isupper() or "auto:" in word or "=MODEL" in word for word in words[1:]):
        return False
    if words[0] not in ("inspect", "convert", "generate"):
        return True
    return len(words) > 1 and (words[1] == "demo" or Path(words[1]).exists())


@pytest.mark.slow
def test_commands_that_need_no_network_run(linearize: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of README and the site, page after page, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    done = list[list[str]]()
    for words in (words for page in PAGES for words in linearize_commands(page)):
        if words and words not in done and runs_here(words):
            code, _, err = linearize(*words)
            assert code == 0, (words, err)
            done.append(words)
    assert {words[0] for words in done} == {*QUICK}


# What stands for a model of the Hub or of the reader, for one that linearize made of it, for a run, and for a text.
SOURCES = re.compile(r"\b(?:meta-llama|Qwen)/[\w.-]+|\b(?:MODEL|TEACHER|BASE)\b|linearize/demo/model|[\w.-]+\.gguf")
CONVERTED = re.compile(r"runs/[\w-]+/final|RUN/final|\bDIR\b|\bat/final|(?<!/)\b(?:demo|llama)-(?:gsa|gla)(?:-3)?\b")
RUNS = re.compile(r"runs/[\w-]+$|RUN$")
TEXTS = re.compile(r"[\w/-]+\.(?:jsonl|txt)\b")
# Commands that take seconds on a small model of text; what trains says what it would do.
SMALL = (
    "inspect", "convert", "generate", "finetune", "report", "eval", "recipes", "verify", "push",
    "estimate", "upgrade",
)  # fmt: skip
DRY = ("finetune",)
# Why a command is parsed and its recipe checked, but not run: the first pattern that is found in it, with its page.
REASONS = {
    r"^\S+ (?:\S+|recipes \w+|--\S+|COMMAND --help|bench \w+|mechanisms NAME|\w+ RECIPE)$": "a name in a sentence",
    r" serve ": "a server: tests/serve, and `make serving`",
    r" demo(?: -o demo-run)?$": "minutes: .ci/run runs it from the wheel",
    r" bench (?:kernels|model) ": "minutes, or a GPU: tests/bench",
    r" runtime.compile=true --measure": "a minute of compiled C++: tests/train/test_compiled.py",
    r" finetune sla-pretrain\b": "the memory of a whole size, half a minute each: tests/recipe plans it small",
    r" export ": "a minute, and the packages of ONNX: tests/export",
    r" eval .*--recipe runs/": "a run with text of its own: tests/measure/test_eval.py",
    r"--tasks": "data sets of the Hub: tests/company runs lm-evaluation-harness on a task of its own",
    r"auto:|(?:finetune|estimate|convert) hybrid": "chooses layers, half a minute each: tests/choose",
    r"images:|\bvit\b|vit-|wan|pictures|to mhla": "images, or a pipeline: test_finetune_images.py, tests/diffusion",
    r"compare ": "several runs: tests/page/test_compare.py",
    r"32768|7,15|4,5|3:0|4:1|--layers|--restore": "more layers, tokens or files than the small model has",
    r"push DIR user/repo$": "an upload: tests/hub",
    r"bench train ": "stages of a recipe, timed: tests/bench",
    r" push sft/final ": "a folder that TRL saved: tests/company",
    r"^(?!README|install|distil|evaluate|serve|how-it-works|works-with|python).* (?:finetune|eval|"
    r"generate) ": "differs from those of the guides in numbers, and each takes seconds",
}
FEW = ("--lengths", "256", "--trials", "1", "data.pack.seq_len=64", "eval.max_tokens=512")


def left_out(page: Path, words: list[str]) -> str:
    """Why the command of a page is not run; empty where it is."""
    place = f"{page.stem} {shlex.join(words)}"
    return "" if runs_here(words) else next((why for found, why in REASONS.items() if re.search(found, place)), "")


def on_small_model(words: list[str]) -> list[str]:
    """The command with small models and texts in place of those that it names."""
    changed = [RUNS.sub("run", CONVERTED.sub("converted", SOURCES.sub("source", word))) for word in words]
    changed += {"eval": FEW, "convert": ("--verify", "none"), "generate": ("--max-new-tokens", "2")}.get(words[0], ())
    return [*changed, *(["--dry-run"] if words[0] in DRY and "--dry-run" not in words else [])]


def test_every_command_is_run_or_left_out_for_a_reason() -> None:
    given = [(page, words) for page in PAGES for words in linearize_commands(page) if words]
    assert [
        words for page, words in given if not (runs_here(words) or left_out(page, words) or words[0] in SMALL)
    ] == []
    assert {left_out(page, words) for page, words in given} - {""} == {*REASONS.values()}  # and no reason is left over


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test works: a small model in `source`, what became of it in `converted`, and a run in `run`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder())
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=4, max_position_embeddings=65536, **shape
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    how: Any = {"keep_softmax": "1", "verify": "none", "say": lambda message: None}
    api.convert(tmp_path / "source", "gsa", tmp_path / "converted", **how)
    made_up_run(tmp_path / "made", tmp_path).rename(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_commands_run_on_a_small_model(linearize: Command, place: Path) -> None:
    """Those of README and the site that need the reader's model, with a small one; each once."""
    rows = [{"text": text(200, seed), "content": text(200, seed)} for seed in range(40)]
    asked = [(page, words) for page in PAGES for words in linearize_commands(page) if words and not runs_here(words)]
    small = [on_small_model(words) for page, words in asked if not left_out(page, words)]
    done = {shlex.join(words): words for words in small}
    assert linearize("recipes", "cp", "gsa-window", "mine.yaml")[0] == 0
    mine = yaml.safe_load(Path("mine.yaml").read_text("utf-8"))
    mine["data"] |= {"train": {"files": ["a.jsonl"]}, "eval": {"files": ["b.jsonl"]}, "pack": {"seq_len": 64}}
    mine["stages"] = [one | {"tokens": "4k"} for one in mine["stages"]]
    Path("mine.yaml").write_text(yaml.safe_dump(mine), "utf-8")
    for number, words in enumerate(done.values()):
        for name in map(Path, ["a.jsonl", "b.jsonl", *TEXTS.findall(" ".join(words))]):
            name.parent.mkdir(parents=True, exist_ok=True)
            name.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if "-o" in words:
            output = words.index("-o") + 1
            words[output] = f"out-{number}{Path(words[output]).suffix}"
        code, _, err = linearize(*words)
        assert code == 0, (words, err)
    assert {words[0] for words in done.values()} == {*SMALL}
    assert len(done) >= 15


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_commands_in_the_headers_of_recipes_parse(preset: Preset) -> None:
    words = shlex.split(preset.measured["command"])
    assert words[0] == "linearize"
    check_command(words[1:])


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_first_pages_convert_as_their_recipe_does(name: str) -> None:
    """Or a reader wonders which of the two is right."""
    commands = {words[0]: words for words in reversed(linearize_commands(ROOT / name)) if words[1:]}
    given = parse(commands["convert"])[1]
    asked = load_recipe(commands["finetune"][1], commands["finetune"][2:]).convert
    assert asked is not None
    if is_recipe(given["model"], given["values"] or []):
        assert load_recipe(given["model"], given["values"] or []).convert == asked
        return
    assert (given["to"], given["keep_softmax"]) == (asked.mechanism, asked.keep_softmax)
    options = (parse_settings([*(given["values"] or []), *(given["settings"] or [])]), asked.options)
    assert resolve_options("gsa", options[0]) == resolve_options("gsa", options[1])


# How a page says which commit has its scripts.
OLDER = re.compile(r"git worktree add \S+ [0-9a-f]{7}|index\.md#scripts-of-earlier-commits")


@every_page
def test_other_commands_name_what_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    older = OLDER.search(page.read_text("utf-8"))
    for words in shell_commands(page):
        if words[0] == "make":
            assert words[1] in targets, words
        module = words[words.index("-m") + 1] if "-m" in words else ""
        files = [f"{module.replace('.', '/')}.py"] if module.startswith("benchmarks.") else []
        for name in [*files, *(word for word in words if re.match(r"(tests|benchmarks|recipes|linearize)/", word))]:
            assert (ROOT / name).exists() or (older and name.startswith("benchmarks/")), words


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_of_the_repository_that_a_page_names_exist(page: Path) -> None:
    code = re.findall(r"`((?:linearize|kernels|tests|benchmarks|recipes|docs)/[\w./-]+)`", page.read_text("utf-8"))
    missing = [name for name in code if "NAME" not in name and not (ROOT / name).exists()]
    assert not missing


def test_pages_that_code_names_exist() -> None:
    folders = ("linearize", "kernels", "recipes", "tests", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    named = {(path, name) for path in files for name in PAGE.findall(path.read_text("utf-8"))}
    assert not [f"{path.name}: {name}" for path, name in named if not (ROOT / name).exists()]


@every_page
def test_blocks_of_python_and_recipes_are_whole(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)
    for block in blocks(page, "yaml"):
        if "stages" in yaml.safe_load(block):
            file = tmp_path / "recipe.yaml"
            file.write_text(block, "utf-8")
            load = load_latents_recipe if holds_latents(file) else load_recipe
            assert load(file).stages


def test_a_step_of_images_sees_many_of_them(tmp_path: Path) -> None:
    """With one a step, as is the default, a layer's error ended at 46.8 instead of 0.13."""
    (tmp_path / "recipe.yaml").write_text(blocks(ROOT / "docs/vision.md", "yaml")[0], "utf-8")
    recipes = [load_recipe(tmp_path / "recipe.yaml"), *(load_recipe(one.path, [BASE]) for one in presets())]
    of_images = [recipe for recipe in recipes if holds_images(recipe.data.train)]
    assert len(of_images) >= 4
    for recipe in of_images:
        seen = {
            stage.name: (stage.batch.per_device or 0) * (stage.batch.gradient_accumulation_steps or 0)
            for stage in recipe.stages
        }
        assert all(count >= FEW_IMAGES for count in seen.values()), (recipe.name, seen)


@every_page
def test_links_lead_to_pages_and_their_sections(page: Path) -> None:
    made = generated()
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)):
        if re.match(r"\w+:", target):
            continue
        path, _, section = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        inside = file.relative_to(ROOT / "docs").as_posix() if file.is_relative_to(ROOT / "docs") else ""
        text = made.get(inside) or (file.read_text("utf-8") if file.suffix == ".md" and file.exists() else None)
        assert text is not None or file.exists(), target
        if section:
            assert section in sections(text or ""), target


def sections(text: str) -> set[str]:
    """The names of a page's headings, as links have them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


# ---------------------------------------------------------------- generated pages


def generator() -> Any:
    """docs/generate.py."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generated(made: dict[str, str] = {}) -> dict[str, str]:  # noqa: B006
    """Its pages, made once."""
    if not made:
        made |= generator().pages()
    return made


def test_every_command_and_option_has_its_row() -> None:
    page = generated()["reference/cli.md"]
    for words, command in generator().commands():
        assert f"\n## {words}\n" in page
        part = page.split(f"\n## {words}\n")[1].split("\n## ")[0]
        assert "\n" not in (command.help or "").replace("\n\n", ""), words  # `--help` would break lines there
        for one in command.params:
            if not getattr(one, "hidden", False):
                assert (one.name.upper() if one.param_type_name == "argument" else one.opts[0]) in part, (words, one)
                assert one.help, (words, one.name)


def test_every_mechanism_and_option_has_its_row() -> None:
    for name in mechanism_names():
        page = generated()[f"reference/mechanisms/{name}.md"]
        assert all(f"| `{option}` |" in page for option in resolve_options(name, {}))
        assert f"({name}.md)" in generated()["reference/mechanisms/index.md"]


def test_every_key_of_recipes_and_every_preset_has_its_row() -> None:
    page = generated()["reference/recipes.md"]
    for name, definition in recipe_schema()["$defs"].items():
        part = page.split(f"\n### {name}\n")[1].split("\n### ")[0]
        assert all(f"| `{key}` |" in part for key in definition.get("properties", {}))
    assert all(f"### {one.name}\n" in page for one in presets())


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """mkdocs.yml may have tags of mkdocs."""

    site = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    module = generator()

    def paths(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for one in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from paths(one)

    listed = {path for path in paths([site["nav"], module.nav()]) if path.endswith(".md")}
    written = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
    assert listed == written | set(generated())


# ---------------------------------------------------------------- the example


@pytest.mark.slow
def test_the_mechanism_of_the_docs_passes_the_tests_of_mechanisms(tmp_path: Path) -> None:
    """It is the `plain` of docs/add-a-mechanism.md, put into a copy of the kernels."""
    (block, *_) = blocks(ROOT / "docs/add-a-mechanism.md", "python")
    copytree(ROOT / "kernels", tmp_path / "linearize_kernels", ignore=ignore_patterns("__pycache__"))
    folder = tmp_path / "linearize_kernels/plain"
    folder.mkdir()
    (folder / "plain.py").write_text(block, "utf-8")
    tests = ["tests/kernels/test_mechanisms.py", "-n", "0", "-k", "plain and not compiles"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    assert passed is not None
    assert int(passed[1]) > 60
