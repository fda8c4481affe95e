"""Recipes: what they accept, what they become, and that every mistake is told at its place."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import holds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linearize.errors import Exit, LinearizeError
from linearize.recipe.presets import recipe_path
from linearize.recipe.recipe import LogitKL, Recipe, diff_resolved, load_recipe
from linearize.recipe.schema import recipe_schema
from linearize.recipe.yaml import Document

PRESETS = Path(__file__).parents[2] / "recipes"

MINIMAL = """\
version: 1
name: tiny
model:
  base: demo
data:
  train: {demo: train}
stages:
  - kind: attention_transfer
    train: [new]
    optimizer: {lr: 1e-3}
    tokens: 20M
  - kind: logit_kl
    train: all
    optimizer: {lr: 1e-4}
    steps: 10
"""


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    (folder / "r.yaml").write_text(text, encoding="utf-8")
    return load_recipe(folder / "r.yaml", overrides)


def errors(folder: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the message, with the folder cut off."""
    with pytest.raises(LinearizeError) as caught:
        load(folder, text, *overrides)
    assert caught.value.code == Exit.USAGE
    return caught.value.message.replace(f"{folder}/", "").split("\n")


def edited(old: str, new: str) -> str:
    assert MINIMAL.count(old) == 1
    return MINIMAL.replace(old, new)


def test_minimal_recipe_gets_every_default(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL)
    assert recipe.output_dir == "runs/tiny"
    assert recipe.convert is None
    assert recipe.seed == 42
    assert recipe.folder == tmp_path
    transfer, kl = recipe.stages
    assert (transfer.name, transfer.train, transfer.tokens) == ("attention_transfer", ("new",), 20_000_000)
    assert isinstance(kl, LogitKL)
    assert (kl.name, kl.train, kl.steps, kl.loss.kl) == ("logit_kl", ("all",), 10, 1.0)
    assert transfer.optimizer.lr == 1e-3
    assert transfer.optimizer.betas == (0.9, 0.95)


# A module that counts how often something looks for its file, as `inspect` does in all modules for a class it misses.
LOOKED_AT = """
import sys, types
class Seen(types.ModuleType):
    times = 0
    def __getattribute__(self, name):
        Seen.times += name == "__file__"
        return super().__getattribute__(name)
sys.modules["seen"] = Seen("seen")
import linearize.recipe.recipe
print(Seen.times)
"""


def test_no_class_of_a_recipe_is_looked_for_in_all_modules() -> None:
    """That took seconds where torch and transformers were imported before."""
    done = subprocess.run([sys.executable, "-c", LOOKED_AT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10


def test_recipe_is_frozen(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path, MINIMAL).seed = 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20M", 20_000_000),
        ("1.5B", 1_500_000_000),
        ("300k", 300_000),
        ("0.25m", 250_000),
        ("1_000", 1000),
        ("2e7", 20_000_000),
        ("12", 12),
    ],
)
def test_token_budgets(tmp_path: Path, text: str, count: int) -> None:
    assert load(tmp_path, edited("20M", text)).stages[0].tokens == count


@pytest.mark.parametrize("text", ["20X", "1.5", "1.2345k", "-3", "0", "true", "[1]", "'M'", "1e999"])
def test_bad_token_budgets(tmp_path: Path, text: str) -> None:
    (line,) = errors(tmp_path, edited("20M", text))
    assert line.startswith("r.yaml:11:13 stages[0].tokens: must be ")


@pytest.mark.parametrize("text", ["7,15", "[7, 15]", "['7', 15]"])
def test_layers_have_one_spelling(tmp_path: Path, text: str) -> None:
    recipe = load(tmp_path, MINIMAL + f"convert:\n  mechanism: gsa\n  keep_softmax: {text}\n")
    assert recipe.convert is not None
    assert recipe.convert.keep_softmax == "7,15"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        *((text, "") for text in ("4096", "4096@1,3", "auto:4096", "auto:4096:0.02", "null")),
        ("0", "must be >= 1 and <= 65536"),
        ("true", "must be 4096"),
        ("auto:64:0", "the limit must be > 0"),
    ],
)
def test_a_window_of_kept_layers_is_checked_in_the_recipe(tmp_path: Path, written: str, problem: str) -> None:
    text = MINIMAL + f"convert:\n  mechanism: gsa\n  kept_window: {written}\n"
    if problem:
        with pytest.raises(LinearizeError, match=f"convert.kept_window: {problem}"):
            load(tmp_path, text)
        return
    recipe = load(tmp_path, text)
    assert recipe.convert is not None
    assert str(recipe.convert.kept_window).replace("None", "null") == written


def test_one_file_needs_no_list(tmp_path: Path) -> None:
    recipe = load(tmp_path, edited("demo: train", "files: a.txt"))
    assert recipe.data.train.files == ("a.txt",)
    assert recipe.resolved()["data"]["train"] == {"files": ["a.txt"]}


def test_yaml_is_the_core_schema(tmp_path: Path) -> None:
    options = "{a: 1e-3, b: no, c: 2024-01-01, d: '5', e: 0x10, f: ~, g: TRUE, h: 12:30, i: -1.5E+2}"
    (tmp_path / "r.yaml").write_text(options)
    assert list(Document(tmp_path / "r.yaml").data.values()) == [
        1e-3, "no", "2024-01-01", "5", "0x10", None, True, "12:30", -150.0,
    ]  # fmt: skip


def test_stage_inherits_data(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        edited("{demo: train}", "{demo: train}\n  eval: {demo: heldout}\n  pack: {text_key: body}"),
        "stages.logit_kl.data={train: {files: [a.txt, b.jsonl]}, pack: {seq_len: 64}}",
    )
    transfer, kl = (recipe.data_for(stage).model_dump(exclude_none=True) for stage in recipe.stages)
    heldout, unchanged = {"demo": "heldout"}, {"erase": 0.0, "mixup": 0.0, "cutmix": 0.0, "repeats": 1}
    assert transfer == unchanged | {
        "train": {"demo": "train"}, "eval": heldout, "pack": {"seq_len": 2048, "text_key": "body", "rows": "packed"},
    }  # fmt: skip
    assert kl == unchanged | {
        "train": {"files": ("a.txt", "b.jsonl")},
        "eval": heldout,
        "pack": {"seq_len": 64, "text_key": "body", "rows": "packed"},
    }  # fmt: skip


def test_name_is_substituted(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL + "output_dir: out/${name}/${name}-1\n", "name=other")
    assert recipe.output_dir == "out/other/other-1"


# What is written, where the message points, and what it says.
MISTAKES = [
    (
        edited("lr: 1e-3", "lr: 1e-3, lrr: 2"),
        "r.yaml:10:27 stages[0].optimizer.lrr: unknown key. Did you mean 'lr'?",
    ),
    (
        MINIMAL + "finish: {report: null}\n",
        "r.yaml:16:10 finish.report: unknown key. Known: keep, merge_lora, verify, push",
    ),
    (edited("base: demo", "base: demo\n  base: x"), "r.yaml:5:3 model.base: duplicate key, first at 4:3"),
    (edited("name: tiny\n", ""), "r.yaml:1:1 name: missing; set it in the file or with name=..."),
    (
        edited("{lr: 1e-3}", "{max_grad_norm: 2}"),
        "r.yaml:10:16 stages[0].optimizer.lr: missing; set it in the file or with stages[0].optimizer.lr=...",
    ),
    (edited("version: 1", "version: 2"), "r.yaml:1:10 version: must be 1, not 2"),
    (edited("name: tiny", "name: 3"), "r.yaml:2:7 name: must be text, not 3 (quote it)"),
    (
        edited("name: tiny", "name: a b"),
        "r.yaml:2:7 name: must match ^[A-Za-z0-9][A-Za-z0-9._-]*$, not 'a b'",
    ),
    (edited("base: demo", "base: ''"), "r.yaml:4:9 model.base: must be some text, not ''"),
    (
        edited("base: demo", "dtype: float23\n  base: demo"),
        "r.yaml:4:10 model.dtype: must be float32 | bfloat16 | float16, not 'float23'. Did you mean 'float32'?",
    ),
    (edited("steps: 10", "steps: '10'"), "r.yaml:15:12 stages[1].steps: must be a whole number, not '10'"),
    (edited("steps: 10", "steps: 1.5"), "r.yaml:15:12 stages[1].steps: must be a whole number, not 1.5"),
    (edited("steps: 10", "steps: 0"), "r.yaml:15:12 stages[1].steps: must be > 0, not 0"),
    (edited("lr: 1e-4", "lr: fast"), "r.yaml:14:21 stages[1].optimizer.lr: must be a number, not 'fast'"),
    (
        MINIMAL + "finish: {verify: yes}\n",
        "r.yaml:16:18 finish.verify: must be true or false, not 'yes'",
    ),
    (MINIMAL + "runtime: [cpu]\n", "r.yaml:16:10 runtime: must be a mapping, not a list"),
    (MINIMAL + "seed:\n", "r.yaml:16:6 seed: must be a whole number, not null"),
    (
        MINIMAL + "convert: {mechanism: gsa, options: 3}\n",
        "r.yaml:16:36 convert.options: must be a mapping, not 3",
    ),
    (
        edited("lr: 1e-3", "lr: 1e-3, betas: [0.9, 0.95, 1]"),
        "r.yaml:10:34 stages[0].optimizer.betas: must be a list of 2, not one of 3",
    ),
    (edited("lr: 1e-3", "lr: 1e-3, betas: [0.9, 1]"), "r.yaml:10:40 stages[0].optimizer.betas[1]: must be < 1, not 1"),
    (
        edited("lr: 1e-3", "lr: 1e-3, betas: [1.0, 0]"),
        "r.yaml:10:35 stages[0].optimizer.betas[0]: must be < 1, not 1.0",
    ),
    (edited("lr: 1e-3", "lr: 30"), "r.yaml:10:21 stages[0].optimizer.lr: must be <= 1, not 30"),
    (
        edited("lr: 1e-3", "lr: 1e-3, new_lr: 1.5"),
        "r.yaml:10:35 stages[0].optimizer.new_lr: must be <= 1, not 1.5",
    ),
    (
        edited("lr: 1e-3", "lr: 1e-3, max_grad_norm: 1e-20"),
        "r.yaml:10:42 stages[0].optimizer.max_grad_norm: must be >= 1e-06, not 1e-20",
    ),
    (
        edited("lr: 1e-3", "lr: 1e-3, weight_decay: -1"),
        "r.yaml:10:41 stages[0].optimizer.weight_decay: must be >= 0, not -1",
    ),
    (
        edited("lr: 1e-3", "lr: 1e-3, new_lr: 1e-2, weight_decay: 100"),
        "r.yaml:10:55 stages[0].optimizer.weight_decay: must be < 100, not 100.0: at lr 0.01 a step takes away all "
        "of a weight",
    ),
    (
        edited("kind: logit_kl", "kind: logit_kl\n    loss: {temperature: 1e30}"),
        "r.yaml:13:25 stages[1].loss.temperature: must be <= 100, not 1e+30",
    ),
    (
        edited("kind: logit_kl", "kind: logit_kl\n    loss: {temperature: 1e-30}"),
        "r.yaml:13:25 stages[1].loss.temperature: must be >= 0.01, not 1e-30",
    ),
    (
        edited("kind: logit_kl", "kind: logit_kl\n    loss: {kl: 1e300}"),
        "r.yaml:13:16 stages[1].loss.kl: must be <= 1e+06, not 1e+300",
    ),
    (
        edited("kind: logit_kl", "kind: logit_kl\n    loss: {ce: 1e-30}"),
        "r.yaml:13:16 stages[1].loss.ce: must be 0 or >= 1e-06, not 1e-30",
    ),
    (
        edited("train: [new]", "train: [new]\n    loss: {weight: 1e20}"),
        "r.yaml:10:20 stages[0].loss.weight: must be <= 1e+06, not 1e+20",
    ),
    (
        edited("train: all", "train: lora\n    lora: {r: 8, alpha: 1e30}"),
        "r.yaml:14:25 stages[1].lora.alpha: must be <= 1e+06, not 1e+30",
    ),
    (
        edited("kind: logit_kl", "kind: logit-kl"),
        "r.yaml:12:11 stages[1].kind: must be attention_transfer | logit_kl | feature_cosine | sft, "
        "not 'logit-kl'. Did you mean 'logit_kl'?",
    ),
    (
        edited("kind: logit_kl", "name: x"),
        "r.yaml:12:5 stages[1].kind: missing; set it in the file or with stages[1].kind=...",
    ),
    (
        edited("kind: logit_kl", "kind: null"),
        "r.yaml:12:11 stages[1].kind: must be attention_transfer | logit_kl | feature_cosine | sft, not null",
    ),
    (
        edited("train: [new]", "train: mixer"),
        "r.yaml:9:12 stages[0].train[0]: must be new | lora, not 'mixer'",
    ),
    (edited("train: all", "train: [new, new]"), "r.yaml:13:12 stages[1].train: names a part twice"),
    (
        edited("train: all", "train: [all, mixer]"),
        "r.yaml:13:12 stages[1].train: 'all' already includes the others",
    ),
    (
        edited("train: all", "train: []"),
        "r.yaml:13:12 stages[1].train: must be a list of at least 1, not one of 0",
    ),
    (edited("train: all", "train: lora"), "r.yaml:12:5 stages[1].lora: missing; train has lora"),
    (
        edited("train: all", "train: all\n    lora: {r: 8, alpha: 16}"),
        "r.yaml:14:11 stages[1].lora: train does not have lora",
    ),
    (
        edited("    steps: 10\n", ""),
        "r.yaml:12:5 stages[1]: needs exactly one of tokens, steps, epochs",
    ),
    (
        edited("steps: 10", "steps: 10\n    epochs: 0.5"),
        "r.yaml:12:5 stages[1]: needs exactly one of tokens, steps, epochs, not steps and epochs: set the rest to null",
    ),
    (
        edited("steps: 10", "steps: 10\n    schedule: {name: cosine_with_min_lr}"),
        "r.yaml:16:15 stages[1].schedule.min_lr_ratio: missing; cosine_with_min_lr needs it",
    ),
    (
        edited("steps: 10", "steps: 10\n    schedule: {min_lr_ratio: 0.1}"),
        "r.yaml:16:30 stages[1].schedule.min_lr_ratio: is for cosine_with_min_lr",
    ),
    (
        edited("steps: 10", "steps: 10\n    loss: {kl: 0}"),
        "r.yaml:16:11 stages[1].loss: kl and ce are all 0: nothing to learn from",
    ),
    (
        edited("kind: logit_kl", "kind: attention_transfer").replace("all", "new"),
        "r.yaml:12:5 stages[1].name: 'attention_transfer' names stages[0] already; give each stage its own",
    ),
    (
        edited("demo: train", "file: [a.txt]"),
        "r.yaml:6:11 data.train.file: unknown key. Did you mean 'files'?",
    ),
    (
        edited("demo: train", "files: [a.csv]"),
        "r.yaml:6:19 data.train.files[0]: must be a .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet file, not 'a.csv'",
    ),
    (
        edited("demo: train", "path: x, demo: train"),
        "r.yaml:6:10 data.train: must be a mapping with exactly one of files, path, demo, images, arrays, teacher, "
        "mix, such as {files: [a.txt]}, not path and demo. Replace it whole: data.train={demo: ...}",
    ),
    (
        edited("{demo: train}", "a.txt"),
        "r.yaml:6:10 data.train: must be a mapping with exactly one of files, path, demo, images, arrays, teacher, "
        "mix, such as {files: [a.txt]}",
    ),
    (
        MINIMAL + "output_dir: runs/${nmae}\n",
        "r.yaml:16:13 output_dir: unknown substitution '${nmae}'; the only one is ${name}",
    ),
    (
        MINIMAL + "output_dir: runs/${name\n",
        "r.yaml:16:13 output_dir: unknown substitution '${name'; the only one is ${name}",
    ),
    (
        edited("steps: 10", "steps: 10\n    schedule: {warmup_ratio: 0.1, warmup_steps: 5}"),
        "r.yaml:16:15 stages[1].schedule: needs at most one of warmup_ratio, warmup_steps",
    ),
    (
        edited("steps: 10", "steps: 10\n    name: teacher"),
        "r.yaml:16:11 stages[1].name: 'teacher' is what metrics call the start of a run",
    ),
    (
        MINIMAL + "  - {kind: attention_transfer, name: late, train: new, optimizer: {lr: 1}, steps: 1}\n",
        "r.yaml:16:5 stages[2]: transfers attention after logit_kl trained source weights: the residual stream is no "
        "longer the teacher's. Put attention_transfer first",
    ),
    (
        edited("[new]", "[new, lora]\n    lora: {r: 8, alpha: 8}").replace("all", "lora\n    lora: {r: 4, alpha: 8}"),
        "r.yaml:15:11 stages[1].lora: differs from an earlier stage's; a run has one set of adapters",
    ),
    (
        MINIMAL + 'output_dir: "run\\0"\n',
        "r.yaml:16:13 output_dir: must be text without the character NUL, which no file's name may have",
    ),
    (
        edited("{demo: train}", '{files: ["a\\0.jsonl"]}'),
        "r.yaml:6:19 data.train.files[0]: must be text without the character NUL, which no file's name may have",
    ),
    (
        edited("base: demo", 'base: "a/\\0"'),
        "r.yaml:4:9 model.base: must be text without the character NUL, which no file's name may have",
    ),
    (MINIMAL + "eval: {every_steps: 5}\n", "r.yaml:16:7 eval: every_steps is set, but data.eval is not"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistakes_are_told_at_their_place(tmp_path: Path, text: str, message: str) -> None:
    lines = errors(tmp_path, text)
    assert message in lines
    # A typo in a required key is also a missing key; nothing else brings a second line.
    assert len(lines) == 1 or all("missing" in line for line in lines if line != message)


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        ("{mechanism: gsaa}", "r.yaml:16:22 convert.mechanism: unknown mechanism 'gsaa'. Did you mean 'gsa'?"),
        (
            "{mechanism: gsa, options: {slot: 8}}",
            "r.yaml:16:43 convert.options.slot: gsa has no such option. Did you mean 'slots'? Known: ",
        ),
        ("{mechanism: gsa, options: {slots: 0}}", "r.yaml:16:44 convert.options.slots: must be >= 1 and <= "),
        ("{mechanism: gsa, options: {norm: none, rope: 3}}", "r.yaml:16:55 convert.options.rope: must be true or "),
        ("{mechanism: gsa, options: {norm: heads}}", "r.yaml:16:43 convert.options.norm: must be one of none, head, "),
        ("{mechanism: la, options: {sr: kep}}", "r.yaml:16:40 convert.options.sr: must be keep or drop"),
        (
            "{mechanism: sla, options: {base: gdm}}",
            "r.yaml:16:43 convert.options.base: must be one of retnet, gla, gdn",
        ),
        (
            "{mechanism: sla, options: {gate_rank: 8, base: gdn}}",
            "r.yaml:16:48 convert.options.gate_rank: sla over gdn has no such option. It belongs to base=gla.",
        ),
    ],
)
def test_mechanisms_and_their_options_are_checked(tmp_path: Path, convert: str, message: str) -> None:
    (line,) = errors(tmp_path, f"{MINIMAL}convert: {convert}\n")
    assert line.startswith(message)


@pytest.mark.parametrize(
    "convert", ["{mechanism: sla, options: {taps: 4, base: gdn}}", "{mechanism: la, options: {sr: drop}}"]
)
def test_options_that_the_command_line_takes_are_taken(tmp_path: Path, convert: str) -> None:
    (tmp_path / "r.yaml").write_text(f"{MINIMAL}convert: {convert}\n")
    assert load_recipe(tmp_path / "r.yaml").convert


def test_a_folder_of_text_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    told = errors(tmp_path, MINIMAL, "data.train={files: [docs]}")
    assert holds(told[0], "'docs'")


def test_all_mistakes_at_once_in_order(tmp_path: Path) -> None:
    text = (
        MINIMAL.replace("version: 1", "version: 3")
        .replace("base: demo", "base: demo\n  base: demo\n  dytpe: float32")
        .replace("{lr: 1e-4}", "{lr: 0}")
        .replace("kind: logit_kl", "kind: attention_transfer")
        .replace("tokens: 20M", "tokens: 20M\n    name: ${x}")
        .replace("train: [new]", "train: [nwe]")
    )
    assert [line.split(": ")[0] for line in errors(tmp_path, text, "seed=-1", "sed=1", "oops")] == [
        "r.yaml:1:10 version",
        "r.yaml:5:3 model.base",
        "r.yaml:6:3 model.dytpe",
        "r.yaml:11:13 stages[0].train[0]",
        "r.yaml:14:11 stages[0].name",
        "r.yaml:14:11 stages[0].name",
        "r.yaml:16:12 stages[1].train[0]",
        "r.yaml:17:21 stages[1].optimizer.lr",
        "override 'seed=-1'",
        "override 'sed=1'",
        "override 'oops'",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml: the recipe is empty"),
        ("# only a comment\n", "r.yaml: the recipe is empty"),
        ("- a\n", "r.yaml:1:1: a recipe is a mapping of keys to values, not a list"),
        ("\n  hello\n", "r.yaml:2:3: a recipe is a mapping of keys to values, not 'hello'"),
        (
            "name: [1\nseed: 2\n",
            "r.yaml:2:5: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got ':'",
        ),
        (
            "a: 1\n---\nb: 1\n",
            "r.yaml:2:1: not valid YAML: expected a single document in the stream, but found another document",
        ),
        (
            "a: &x 1\nb: *x\n",
            "r.yaml:2:4: not valid YAML: aliases (*name) are not supported: write the value out",
        ),
        ("a: !!int 1\n", "r.yaml:1:4: not valid YAML: tags are not supported: tag:yaml.org,2002:int"),
        ("a: " + "[" * 5000, "r.yaml:1:35: not valid YAML: nested too deeply"),
        ('a: "\\UFFFFFFFF"\n', "r.yaml:1:7: not valid YAML: an escape that is no character"),
        ('a: "\\ud800"\n', "r.yaml:1:4: not valid YAML: half of a surrogate pair"),
        ("a: 1\nb: \a\n", "r.yaml:2:4: not valid YAML: the character '\\x07' is not allowed"),
    ],
)
def test_text_that_is_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    assert errors(tmp_path, text) == [message]


def test_keys_must_be_text(tmp_path: Path) -> None:
    assert holds("\n".join(errors(tmp_path, MINIMAL + "[1, 2]: 3\n")), "r.yaml:16:1")
    (line,) = errors(tmp_path, MINIMAL + "'odd key': 3\n")
    assert line.startswith("r.yaml:16:1 ['odd key']: unknown key. Known: version, name, seed, ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    load(tmp_path, MINIMAL)
    with pytest.raises(LinearizeError) as missing:
        load_recipe(tmp_path / "q.yaml")
    assert missing.value.message == f"no recipe file '{tmp_path}/q.yaml'. Did you mean '{tmp_path}/r.yaml'?"
    assert missing.value.code == Exit.USAGE
    with pytest.raises(LinearizeError, match=r"demo\.yaml'.*name"):
        load_recipe(tmp_path / "recipes" / "demo.yaml")
    with pytest.raises(LinearizeError, match=r"folder.*recipe"):
        load_recipe(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("name: caf\xe9".encode("latin-1"))
    with pytest.raises(LinearizeError, match=r"latin\.yaml.*UTF-8.*9"):
        load_recipe(tmp_path / "latin.yaml")
    with pytest.raises(LinearizeError) as unreadable:
        load_recipe(tmp_path / "r.yaml" / "x.yaml")
    assert unreadable.value.code == Exit.RESOURCE


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_recipe(tmp_path / "r.yaml").name == "tiny"


def test_overrides(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        MINIMAL,
        "stages.logit_kl.optimizer.lr=1e-2",
        "stages[0].optimizer.lr=5e-3",
        "stages.0.tokens=1M",
        "stages[0].name=first",
        "stages.first.batch.gradient_accumulation_steps=8",  # an override sees those before it
        "convert={mechanism: gsa, layers: [0, 3]}",
        "convert.options.slots=32",
        "eval.max_tokens=128",  # creates the mapping
        "model.revision=null",
        "model.dtype=",
        "output_dir=a=b/${name}",
    )
    first, kl = recipe.stages
    assert (first.name, first.optimizer.lr, first.tokens, first.batch.gradient_accumulation_steps) == (
        "first",
        5e-3,
        10**6,
        8,
    )
    assert kl.optimizer.lr == 1e-2
    assert recipe.convert is not None
    assert (recipe.convert.layers, recipe.convert.options) == ("0,3", {"slots": 32})
    assert (recipe.eval.max_tokens, recipe.output_dir) == (128, "a=b/tiny")
    assert recipe.model.revision is recipe.model.dtype is None


def test_override_repairs_the_file(tmp_path: Path) -> None:
    text = edited("{lr: 1e-4}", "{lr: fast, x: 1}")
    assert load(tmp_path, text, "stages[1].optimizer={lr: 1}").stages[1].optimizer.lr == 1.0
    assert len(errors(tmp_path, text, "stages[1].optimizer={lr: 1, y: 1}")) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages[1].optimizer.lrr=1", ": unknown key. Did you mean 'lr'?"),
        ("stages.logit_kl.optimizer={lr: 1, lrr: 1}", ": lrr: unknown key. Did you mean 'lr'?"),  # not stages[1]
        ("stage.logit_kl.steps=1", ": stage: unknown key. Did you mean 'stages'?"),
        ("seed=x", ": must be a whole number, not 'x'"),
        ("runtime.graphs=maybe", ": must be auto | true | false, not 'maybe'"),
        ("model.dtype={a: 1}", ": must be float32 | bfloat16 | float16, not a mapping"),
        ("seed", ": expected key.sub=value"),
        ("=3", ": expected key.sub=value"),
        ("a..b=3", ": expected key.sub=value"),
        (
            "seed=[1",
            ": not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'",
        ),
        ("version.x=1", ": version is 1 and has no keys"),
        (
            "stages.logit.steps=1",
            ": stages has no entry 'logit'. Did you mean 'logit_kl'? Entries: attention_transfer, logit_kl",
        ),
        ("stages[2].steps=1", ": stages has no entry '2'. Entries: attention_transfer, logit_kl"),
        ("stages.0.train.4=new", ": stages[0].train has no entry '4'. Entries: 1, counted from 0"),
        ("name=${name}", ": must match ^[A-Za-z0-9][A-Za-z0-9._-]*$, not '${name}'"),
    ],
)
def test_mistaken_overrides(tmp_path: Path, override: str, message: str) -> None:
    assert errors(tmp_path, MINIMAL, override) == [f"override {override!r}{message}"]


def test_a_bare_option_names_its_place(tmp_path: Path) -> None:
    """As `linearize convert --set` takes it."""
    (message,) = errors(tmp_path, MINIMAL, "eps=1e-6")
    assert "convert.options.eps" in message


def test_spelling_changes_no_value(tmp_path: Path) -> None:
    one = load(tmp_path, MINIMAL).resolved()
    same = load(tmp_path, edited("20M", "20000000") + "seed: 42\n").resolved()
    assert one == same != load(tmp_path, MINIMAL, "seed=43").resolved()


def test_diff_names_what_changed(tmp_path: Path) -> None:
    old = load(tmp_path, MINIMAL).resolved()
    new = load(
        tmp_path,
        MINIMAL,
        "stages[0].optimizer.lr=1e-2",
        "stages[1].optimizer.lr=2.5e-5",
        "stages[1].train=[new, mixer]",
        "stages[1].optimizer.weight_decay=0.1",
        "convert={mechanism: gsa, options: {slots: 32, clock: 1}}",
    ).resolved()
    assert diff_resolved(old, old) == []
    assert diff_resolved(old, new) == [
        'convert null -> {"mechanism": "gsa", "options": {"slots": 32, "clock": 1}...',
        "stages[0].optimizer.lr 1e-3 -> 1e-2",
        'stages[1].train ["all"] -> ["new", "mixer"]',
        "stages[1].optimizer.lr 1e-4 -> 2.5e-5",
        "stages[1].optimizer.weight_decay 0.0 -> 0.1",
    ]
    shorter = {**old, "stages": old["stages"][:1]}
    assert diff_resolved(old, shorter) == [
        'stages[1] removed (was {"kind": "logit_kl", "name": "logit_kl", "train": ["all"]...)'
    ]
    assert diff_resolved(shorter, old)[0].startswith("stages[1] added (")


def test_schema_describes_what_is_accepted() -> None:
    json.dumps(recipe_schema())
    schema = recipe_schema()["$defs"]
    for kind in ("Recipe", "DiffusionRecipe"):
        assert schema[kind]["additionalProperties"] is False
        assert {"version", "name", "model", "data", "stages"} == set(schema[kind]["required"])
    tokens = schema["LogitKL"]["properties"]["tokens"]
    assert {"integer", "string", "null"} == {choice["type"] for choice in tokens["anyOf"]}


# Of a number's description: what it counts, or that it is a share or a factor of something.
UNITS = (
    r"(?i)\b(tokens?|steps?|layers?|blocks|passes|columns|share|factor|norm|nats|rate|checkpoints|divides|seed|"
    r"evaluations|latents|samples|pixels|divergence|temperature|weights|version)\b"
)


def test_every_key_of_a_recipe_has_a_description_and_every_number_its_unit() -> None:
    schema = recipe_schema()
    assert schema["$id"] == "urn:linearize:recipe:1"
    bare, unitless = [], []
    for name, definition in schema["$defs"].items():
        for key, one in definition.get("properties", {}).items():
            about = one.get("description", "")
            if len(about) < 10:
                bare.append(f"{name}.{key}")
            kinds = {choice.get("type") for choice in (one, *one.get("anyOf", ()))}
            if kinds & {"integer", "number"} and not re.search(UNITS, about):
                unitless.append(f"{name}.{key}: {about}")
    assert not bare
    assert not unitless


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.yaml")), ids=lambda preset: preset.stem)
def test_presets_are_valid(preset: Path) -> None:
    text = preset.read_text(encoding="utf-8")
    if "base" in yaml.safe_load(text)["model"]:
        load_recipe(preset)
    else:  # for a base of the user's choice
        with pytest.raises(LinearizeError, match=rf"^{preset.stem} names no model: add model\.base=MODEL [^\n]+$"):
            load_recipe(preset)
        load_recipe(preset, ["model.base=some/model"])
    assert all(f"# {field} " in text for field in ("command", "hardware", "duration", "result"))


def optional(required: dict[str, Any], more: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=more)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="$"), min_size=1)
COUNT = st.integers(1, 2**40)
RATIO = st.floats(0, 1)
POSITIVE = st.floats(0, 1e30, exclude_min=True)
RATE = st.floats(1e-12, 1)
FACTOR = st.floats(1e-6, 1e6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.floats(-1e30, 1e30) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
LAYERS = st.sampled_from(["all", "7,15", "every:4", 7, [0, 3]])
SOURCE = st.one_of(
    optional({"files": st.lists(TEXT.map(lambda name: f"{name}.txt"), min_size=1, max_size=3)}, {}),
    optional({"path": TEXT}, {"name": TEXT, "split": TEXT, "streaming": st.booleans()}),
    optional({"demo": st.sampled_from(["train", "heldout"])}, {}),
)
PACK = optional({}, {"seq_len": st.integers(2, 2**40), "text_key": TEXT})
SCHEDULES = st.one_of(
    optional({"name": st.sampled_from(["constant", "linear", "cosine"])}, {"warmup_ratio": RATIO}),
    optional({"name": st.just("cosine_with_min_lr"), "min_lr_ratio": RATIO}, {"warmup_steps": COUNT}),
)
LORA = optional(
    {"r": COUNT, "alpha": FACTOR},
    {"dropout": st.floats(0, 0.9), "target_modules": st.lists(TEXT, min_size=1, max_size=3)},
)


@st.composite
def stages(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["attention_transfer", "logit_kl", "sft"]))
    parts = ["new", "lora"] if kind == "attention_transfer" else ["new", "mixer", "lora"]
    train = draw(st.lists(st.sampled_from(parts), min_size=1, unique=True))
    optimizer = optional(
        {"lr": RATE},
        {
            "weight_decay": st.floats(0, 1, exclude_max=True),
            "betas": st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
            "max_grad_norm": st.floats(1e-6, 1e30),
        },
    )
    stage = draw(
        optional(
            {"kind": st.just(kind), "train": st.just(train), "optimizer": optimizer},
            {
                "schedule": SCHEDULES,
                "batch": optional({}, {"per_device": COUNT, "gradient_accumulation_steps": COUNT}),
                "data": optional({}, {"train": SOURCE, "eval": SOURCE, "pack": PACK}),
            },
        )
    )
    if "lora" in train:
        stage["lora"] = draw(st.shared(LORA, key="lora"))  # a run has one set of adapters
    budgets = {"tokens": COUNT | COUNT.map("{}M".format), "steps": COUNT, "epochs": POSITIVE}
    budget = draw(st.sampled_from(sorted(budgets)))
    stage[budget] = draw(budgets[budget])
    if kind == "attention_transfer":
        errors = st.sampled_from(["relative", "mse"])
        stage["loss"] = draw(optional({}, {"error": errors, "weight": FACTOR}))
    if kind == "logit_kl":
        stage["loss"] = draw(optional({"kl": FACTOR}, {"ce": FACTOR, "temperature": st.floats(0.01, 100)}))
    return stage


RECIPES = optional(
    {
        "version": st.just(1),
        "name": st.from_regex("[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True),
        "model": optional(
            {"base": TEXT},
            {
                "revision": st.none() | TEXT,
                "dtype": st.sampled_from([None, "float32"]),
                "trust_remote_code": st.booleans(),
            },
        ),
        "data": optional({"train": SOURCE, "eval": SOURCE}, {"pack": PACK}),
        "stages": st.lists(stages(), min_size=1, max_size=3, unique_by=lambda stage: stage["kind"]).map(
            lambda drawn: sorted(drawn, key=lambda stage: stage["kind"])  # attention_transfer goes first
        ),
    },
    {
        "seed": st.integers(0, 2**32 - 1),
        "output_dir": TEXT | st.just("x/${name}"),
        "convert": st.none()
        | optional(
            {"mechanism": st.just("gsa")},
            {
                "options": optional({}, {"slots": st.integers(1, 1024), "rope": st.booleans()}),
                "layers": LAYERS,
                "keep_softmax": LAYERS,
                "kept_window": st.sampled_from([None, 64, "64@1,3", "auto:64", "auto:64:0.5"]),
            },
        ),
        "runtime": optional(
            {},
            {
                "device": st.sampled_from(["auto", "cuda"]),
                "precision": st.just("bf16"),
                "compile": st.booleans(),
            },
        ),
        "checkpoint": optional({}, {"every_steps": COUNT, "save_total_limit": COUNT}),
        "eval": optional({}, {"every_steps": st.none() | COUNT, "max_tokens": COUNT}),
        "track": optional({}, {"to": st.sampled_from(["none", "tensorboard", "wandb"])}),
        "finish": optional({}, {"merge_lora": st.booleans(), "verify": st.booleans()}),
    },
)
shared_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(shared_folder, max_examples=30)
@given(RECIPES)
def test_resolved_recipes_read_back_the_same(tmp_path: Path, written: dict[str, Any]) -> None:
    resolved = load(tmp_path, json.dumps(written)).resolved()  # JSON is YAML
    through_json = json.loads(json.dumps(resolved))
    assert through_json == resolved
    assert Recipe.model_validate(through_json).resolved() == resolved
    again = load(tmp_path, json.dumps(resolved, indent=2))
    assert diff_resolved(resolved, again.resolved()) == []
    assert again.resolved() == resolved


def loads_or_explains(folder: Path, text: str, *overrides: str) -> None:
    """Any other exception fails the test."""
    with contextlib.suppress(LinearizeError):
        load(folder, text, *overrides)


@settings(shared_folder, max_examples=60)
@given(st.text() | st.text("ab: -[]{},\n\"'#&*!|>%@`\\U?~0.$"))
def test_junk_is_explained(tmp_path: Path, text: str) -> None:
    loads_or_explains(tmp_path, text.encode("utf-8", "ignore").decode())


@settings(shared_folder, max_examples=60)
@given(st.data())
def test_damaged_recipes_are_explained(tmp_path: Path, data: st.DataObject) -> None:
    words = MINIMAL.replace("\n", " \n ").split(" ")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(words) - 1))
        words[at] = data.draw(st.sampled_from(["", "[", "}", "null", "- 1", "1e-3", "x: 1", "${", *words]))
    loads_or_explains(tmp_path, " ".join(words))


@settings(shared_folder, max_examples=60)
@given(
    st.recursive(
        JSON,
        lambda inner: (
            st.dictionaries(
                st.sampled_from(
                    ["name", "model", "data", "train", "files", "stages", "kind", "lora", "eval", "tokens"]
                ),
                inner | st.just("sft") | st.just(["lora"]),
            )
            | st.lists(inner)
        ),
    ),
    st.sampled_from(["stages[0]", "stages.sft.lora", "data", "data.train", "model.base", "eval", "x", "stages"]),
)
def test_wrong_shapes_are_explained(tmp_path: Path, value: Any, key: str) -> None:
    loads_or_explains(tmp_path, json.dumps(value), f"{key}=3")
    loads_or_explains(tmp_path, MINIMAL, f"{key}={json.dumps(value)}")


def test_held_out_tokens_are_written_as_those_of_stages_are() -> None:
    path = recipe_path("hybrid")
    assert load_recipe(path, ["model.base=some/model", "eval.max_tokens=16k"]).eval.max_tokens == 16_000
    with pytest.raises(LinearizeError, match=r"eval.max_tokens.*20M.*1.5B.*300k.*'16x'"):
        load_recipe(path, ["model.base=some/model", "eval.max_tokens=16x"])


def test_a_folder_named_as_a_preset_hides_no_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`linearize demo` reads the preset demo wherever it runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "mine"):
        (tmp_path / name).mkdir()
    assert recipe_path("demo").suffix == ".yaml"
    assert recipe_path("mine") == Path("mine")
    (tmp_path / "hybrid").write_text("a file")
    assert recipe_path("hybrid") == Path("hybrid")
