"""Files that are damaged, edited, special or gone: one message with an exit code, never a traceback, never a wait."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, holds, with_slow
from models import convert_folder, save_source
from safetensors.torch import load_file, save_file
from training import BASES, byte_tokenizer, make_recipe, stage, train, write_recipe

from linearize.checkpoint.provenance import check_code, origin_of, outdated
from linearize.convert import convert, plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.verify.checks import verify_folder
from linearize.verify.reload import RESTORE

Damage = Callable[[Path], None]
OPTIONS = {"slots": 4, "chunk_size": 16}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source`, a model with a tokenizer, and `ours`, the same converted; tests only read them."""
    place = tmp_path_factory.mktemp("shared")
    byte_tokenizer().save_pretrained(save_source(place / "source", **BASES["llama"]))
    convert_folder(place / "source", place / "ours", options=OPTIONS)
    return place


@pytest.fixture
def place(shared: Path, tmp_path: Path) -> Path:
    """Copies of both, beside a recipe that trains `ours` on train.jsonl."""
    for name in ("source", "ours"):
        shutil.copytree(shared / name, tmp_path / name)
    write_recipe(tmp_path, tmp_path / "ours", stage("logit_kl", steps=1))
    return tmp_path


COMMANDS = {
    "generate": ["ours", "ab", "--max-new-tokens", "2"],
    "verify": ["ours"],
    "push": ["ours", "user/repo", "--dry-run"],
    "finetune": ["recipe.yaml"],
    "inspect": ["source"],
    "convert": ["source", "--to", "gsa", "--set", "slots=4", "-o", "out", "--verify", "none"],
    "eval": ["ours", "--teacher", "source", "--lengths", "64", "--trials", "1"],
    "serve": ["ours"],
    "export": ["ours", "-o", "onnx"],
    "estimate": ["recipe.yaml"],
    "upgrade": ["ours", "-o", "upgraded"],
}
OF_OURS = ("generate", "verify", "push", "finetune")


def told(linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, command: str, *more: str) -> tuple[int, str]:
    """Exit code and message of a command in `place`."""
    monkeypatch.chdir(place)
    code, _, err = linearize(command, *COMMANDS[command], *more)
    assert "Traceback" not in err, err
    assert code != Exit.BUG, err
    return code, " ".join(err.split())


def change(path: Path, edit: Callable[[Any], None]) -> None:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def configure(name: str, value: Any) -> Damage:
    return lambda folder: change(folder / "config.json", lambda config: config.update({name: value}))


def of_layers(key: str, value: Any) -> Damage:
    """Another value in each layer of the plan that config.json holds."""

    def edit(config: Any) -> None:
        for layer in config["linearize"]["layers"]:
            layer[key] = value

    return lambda folder: change(folder / "config.json", edit)


def of_manifest(folder: Path) -> None:
    def edit(manifest: Any) -> None:
        for step in manifest["plan"]["steps"]:
            step["mechanism"] = "mlha"

    change(folder / "linearize.json", edit)


def more_tokens(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["ab"])
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------- what a model folder says


@pytest.mark.parametrize("command", OF_OURS)
@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (of_layers("mechanism", "gsaa"), ("'gsaa'", "'gsa'")),
        (of_manifest, ("'mlha'", "'mhla'")),
    ],
    ids=["config", "manifest"],
)
def test_a_mechanism_that_is_unknown_is_named(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, command: str, damage: Damage, wanted: str
) -> None:
    if damage is of_manifest and command == "verify":
        pytest.skip("reads the plan in config.json")
    damage(place / "ours")
    code, message = told(linearize, place, monkeypatch, command)
    assert (code, holds(message, *wanted)) == (Exit.INCOMPATIBLE, True), message


def piped(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (of_layers("mechanism", "gsaa"), ("'gsaa'", "'gsa'")),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), ("recursion", "exceeded")),
        (piped, ("config.json", "device")),
    ],
    ids=["mechanism", "nested", "pipe"],
)
def test_every_command_names_what_is_wrong_with_a_folder(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage, wanted: str
) -> None:
    damage(place / "ours")
    monkeypatch.setattr("linearize.serve.start.is_installed", lambda name: True)
    for command in ("serve", "export", "estimate", "upgrade", "eval"):
        code, message = told(linearize, place, monkeypatch, command)
        assert (code, holds(message, *wanted)) == (Exit.INCOMPATIBLE, True), (command, message)
    assert not {"onnx", "upgraded"} & {path.name for path in place.iterdir()}


@pytest.mark.parametrize("folder", ["ours", "source"])
@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (configure("intermediate_size", 40), "disagree: .*(gate|up|down)_proj.weight is .*, the config asks for"),
        (configure("hidden_size", 24), "disagree: .*weight is .*, the config asks for"),
        (configure("num_attention_heads", 3), "cannot be (loaded|used)"),
        (more_tokens, "the tokenizer makes token 257, the model's embedding has 257 rows"),
    ],
    ids=["intermediate", "hidden", "heads", "tokenizer"],
)
def test_config_weights_and_tokenizer_that_do_not_belong_together(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, folder: str, damage: Damage, wanted: str
) -> None:
    damage(place / folder)
    monkeypatch.setitem(COMMANDS, "generate", [folder, *COMMANDS["generate"][1:]])
    code, message = told(linearize, place, monkeypatch, "generate")
    assert code == Exit.INCOMPATIBLE, message
    assert re.search(wanted, message), message


@pytest.mark.parametrize(
    "words",
    [
        "eval ours --teacher source --lengths 448 --trials 1 data.eval={files:[train.jsonl]}",
        "eval ours --teacher source --tasks piqa=piqa.jsonl",
        "convert source --to gsa --set slots=4 -o out --keep-softmax auto:1 --score-text train.jsonl",
        "convert source --to gsa --set slots=4 -o out --layers 0 --kept-window auto:16 --score-text train.jsonl",
        "finetune recipe.yaml 'data.train={teacher: {tokens: 9, length: 8, prompts: train.jsonl}}'",
    ],
)
def test_tokens_that_the_embedding_does_not_have(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """Which of many a text has is known when it is cut into tokens."""
    for name in ("ours", "source"):
        more_tokens(place / name)
    (place / "train.jsonl").write_text(json.dumps({"text": "ab and ab " * 99}) + "\n")
    (place / "piqa.jsonl").write_text('{"question": "ab?", "choices": ["a", "b"], "label": 1}\n')
    monkeypatch.chdir(place)
    code, _, message = linearize(*shlex.split(words))
    assert (code, holds(message, "tokenizer", "257")) == (Exit.INCOMPATIBLE, True), message
    assert not {"out", "logits"} & {path.name for path in place.iterdir()}


def test_half_a_folder_is_not_trained(linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result would be without what was not copied."""
    (place / "ours" / "generation_config.json").unlink()
    code, message = told(linearize, place, monkeypatch, "finetune")
    assert (code, holds(message, "generation_config.json", "linearize.json")) == (Exit.INCOMPATIBLE, True), message
    assert not (place / "run" / "final").exists()


def test_an_option_of_a_mechanism_that_is_no_number(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_layers("options", {"slots": "many"})(place / "ours")
    (place / "ours" / "linearize.json").unlink()  # as save_pretrained leaves a folder: nothing to compare with
    code, message = told(linearize, place, monkeypatch, "generate")
    assert (code, holds(message, "cannot", "loaded")) == (Exit.INCOMPATIBLE, True), message


@pytest.mark.parametrize("command", ["generate", "verify", "push", "upgrade"])
def test_an_option_of_another_type_is_an_edited_plan(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Which files such a plan needs cannot be said, so its code is nobody's."""

    def edit(manifest: Any) -> None:
        for step in manifest["plan"]["steps"]:
            step.update(mechanism="gdn", options={"taps": "x"})

    of_layers("mechanism", "gdn")(place / "ours")
    of_layers("options", {"taps": "x"})(place / "ours")
    change(place / "ours" / "linearize.json", edit)
    code, message = told(linearize, place, monkeypatch, command)
    assert code == Exit.INCOMPATIBLE, message
    assert re.search(r"other code than linearize .* wrote \(its plan: '>' not supported", message), message


@pytest.mark.slow
def test_the_mechanism_of_a_fork_is_named_among_what_is_not_linearizes(place: Path) -> None:
    """Its code may be trusted: then nothing is refused, and what it is is still asked."""
    ours = place / "ours"
    of_layers("mechanism", "mine")(ours)
    (ours / "linearize.json").unlink()  # as save_pretrained leaves a folder
    (ours / "gsa.py").rename(ours / "mine.py")
    modeling = ours / "modeling_linearized.py"
    modeling.write_text(modeling.read_text().replace("from .gsa ", "from .mine ").replace('"gsa"', '"mine"'))
    plan = check_code(ours, trust_remote_code=True)
    origin = origin_of(ours, plan)
    assert origin.changed[0].startswith("its plan: unknown mechanism 'mine'")
    assert origin.changed[1:] == ["mine.py", "modeling_linearized.py"]
    assert outdated(ours, plan) == ""
    checks = {check.name: check.status for check in verify_folder(str(ours), trust_remote_code=True)}
    assert checks["reload"] == "passed"


def other_class(folder: Path) -> None:
    change(folder / "tokenizer_config.json", lambda config: config.update(tokenizer_class="BertTokenizer"))


def no_vocabulary(folder: Path) -> None:
    change(folder / "tokenizer.json", lambda tokenizer: tokenizer["model"].update(vocab={}))


@pytest.mark.parametrize(
    ("command", "damage", "code", "wanted"),
    [
        ("generate", other_class, Exit.INCOMPATIBLE, ("tokens", "WordPiece")),
        ("finetune", other_class, Exit.INCOMPATIBLE, ("source's",)),
        ("generate", no_vocabulary, Exit.USAGE, ("prompt", "token")),
        ("finetune", no_vocabulary, Exit.INCOMPATIBLE, ("vocabulary", "short")),
    ],
)
def test_a_tokenizer_that_makes_no_tokens(
    linearize: Command,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    damage: Damage,
    code: Exit,
    wanted: str,
) -> None:
    damage(place / "ours")
    found, message = told(linearize, place, monkeypatch, command)
    assert (found, holds(message, *wanted)) == (code, True), message


@pytest.mark.parametrize(
    "settings",
    [{"eos_token_id": "<eos>"}, {"bad_words_ids": [[10**9]]}, {"eos_token_id": [{}]}],
    ids=["text", "beyond", "mapping"],
)
def test_settings_of_generation_that_transformers_refuses(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    (place / "ours" / "generation_config.json").write_text(json.dumps(settings))
    code, message = told(linearize, place, monkeypatch, "generate")
    assert (code, f"generation_config.json sets ({next(iter(settings))})" in message) == (Exit.INCOMPATIBLE, True), (
        message
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("more", [[], ["--temperature", "1"]], ids=["greedy", "sampled"])
def test_nothing_is_written_from_weights_that_are_no_numbers(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, value: float, more: list[str]
) -> None:
    """The likeliest of NaN is the first token, and sampling among them is an error of torch."""
    path = place / "ours" / "model-mixers.safetensors"
    tensors = load_file(path)
    save_file({name: torch.full_like(tensor, value) for name, tensor in tensors.items()}, path, {"format": "pt"})
    code, message = told(linearize, place, monkeypatch, "generate", *more)
    assert (code, holds(message, "linearize", "DIR", "--strict")) == (Exit.CHECK_FAILED, True)


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"],
)
def test_a_chat_template_that_fails(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    (place / "ours" / "chat_template.jinja").write_text(template)
    chats = ["data.train={files: [chat.jsonl]}", "stages=[{kind: sft, train: new, optimizer: {lr: 1e-3}, steps: 1}]"]
    code, message = told(linearize, place, monkeypatch, "finetune", *chats)
    assert (code, holds(message, "chat.jsonl:1")) == (Exit.USAGE, True), message


DEEP = '{"a":' * 10**5


@pytest.mark.parametrize("command", with_slow([*OF_OURS, "eval"], "verify", "push"))
@pytest.mark.parametrize("name", ["config.json", "linearize.json", "tokenizer_config.json", "tokenizer.json"])
def test_brackets_in_brackets_are_no_bug(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    (place / "ours" / name).write_text(DEEP)
    code, _ = told(linearize, place, monkeypatch, command)
    assert code in (Exit.OK, Exit.INCOMPATIBLE, Exit.CHECK_FAILED)
    assert code or (command in ("verify", "push") and name.startswith("tokenizer"))


def test_brackets_in_brackets_as_text(linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "train.jsonl").write_text('{"text": "a"}\n{"text":' + "[" * 10**5)
    code, message = told(linearize, place, monkeypatch, "finetune")
    assert (code, holds(message, "train.jsonl:2")) == (Exit.USAGE, True), message
    shutil.copytree(place / "ours", place / "out")
    (place / "out" / "linearize.json").write_text(DEEP)
    code, message = told(linearize, place, monkeypatch, "convert", "--overwrite")
    assert (code, holds(message, "files", "linearize")) == (Exit.USAGE, True), message


# ---------------------------------------------------------------- what is no file


SPECIAL = [
    ("generate", "ours/config.json", Exit.INCOMPATIBLE),
    ("verify", "ours/linearize.json", Exit.INCOMPATIBLE),
    ("push", "ours/model-mixers.safetensors", Exit.INCOMPATIBLE),
    ("finetune", "ours/tokenizer.json", Exit.INCOMPATIBLE),
    ("convert", "source/model.safetensors", Exit.INCOMPATIBLE),
    ("inspect", "source/config.json", Exit.INCOMPATIBLE),
    ("finetune", "train.jsonl", Exit.USAGE),
    ("finetune", "recipe.yaml", Exit.USAGE),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(("command", "name", "expected"), SPECIAL)
def test_a_pipe_or_a_device_is_not_waited_for(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, expected: Exit, kind: str
) -> None:
    path = place / name
    path.unlink()
    path.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(path)
    more = ["--dry-run"] if name == "train.jsonl" else []
    for arguments in ([], more):
        code, message = told(linearize, place, monkeypatch, command, *arguments)
        assert code == expected, message
        assert f"{path.name} is a " in message
        assert "not a file" in message


@pytest.mark.timeout(60)
def test_text_and_arrays_from_a_pipe(linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, command, more in [
        ("held.txt", "eval", "data.eval={files: [held.txt]}"),
        ("a.npz", "finetune", "data.train={arrays: a.npz}"),
    ]:
        os.mkfifo(place / name)
        code, message = told(linearize, place, monkeypatch, command, more)
        assert code in (Exit.USAGE, Exit.INCOMPATIBLE), message


@pytest.mark.parametrize("tokens", ["10000000", "10000000000"])
def test_blocks_that_no_memory_holds(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, tokens: str
) -> None:
    """What torch says of a size beyond memory, and of one beyond its numbers."""
    words = "can't allocate memory: you tried" if len(tokens) < 9 else "Storage size calculation overflowed"

    def fail(*arguments: Any, **named: Any) -> None:
        raise RuntimeError(f"[enforce fail at alloc_cpu.cpp:124] {words}")

    monkeypatch.setattr("linearize.data.batches.build_blocks", fail)
    code, message = told(linearize, place, monkeypatch, "finetune", f"data.pack.seq_len={tokens}")
    assert (code, holds(message, "data.pack.seq_len", f"{tokens}")) == (Exit.RESOURCE, True), message


@pytest.mark.parametrize("name", ["model-source-00001-of-00001.safetensors", "model-mixers.safetensors"])
def test_no_server_is_started_on_weights_that_are_cut_short(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    os.truncate(place / "ours" / name, (place / "ours" / name).stat().st_size // 2)
    monkeypatch.setattr("linearize.serve.start.is_installed", lambda name: True)
    monkeypatch.setattr("os.execv", lambda *arguments: pytest.fail("a server was started"))
    code, message = told(linearize, place, monkeypatch, "serve")
    assert (code, holds(message, f"{name}")) == (Exit.INCOMPATIBLE, True), message


@pytest.mark.parametrize(
    "damage", [configure("num_attention_heads", 3), configure("num_attention_heads", "two")], ids=["count", "text"]
)
def test_a_config_that_its_class_refuses_is_named_where_softmax_is_restored(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    damage(place / "ours")
    monkeypatch.setitem(COMMANDS, "convert", ["ours", "--restore", "0", "-o", "out", "--verify", "none"])
    code, message = told(linearize, place, monkeypatch, "convert")
    assert (code, holds(message, "ours/config.json")) == (Exit.INCOMPATIBLE, True), message
    assert not (place / "out").exists()


def test_upgrade_names_code_that_does_not_run(linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's error is part of the message; of the result, which runs, nothing is left."""

    def reloaded(folder: Path, layers: int, padded: bool = True) -> tuple[int, torch.Tensor, dict[str, Any]]:
        if folder.name == "ours":
            error = "a clean process cannot load it: AttributeError: no attribute 'GSA'"
            raise LinearizeError(f"verification failed: {error}{RESTORE}", Exit.CHECK_FAILED)
        return 1, torch.ones(1), {"steps": None}

    (place / "ours" / "gsa.py").write_text("")
    monkeypatch.setattr("linearize.checkpoint.upgrade.reload_logits", reloaded)
    code, message = told(linearize, place, monkeypatch, "upgrade", "--trust-remote-code")
    assert (code, holds(message, "AttributeError", "'GSA'")) == (Exit.INCOMPATIBLE, True)
    assert not (place / "upgraded").exists()


@pytest.mark.parametrize(("text", "wanted"), [('{"weight_map": {"model.', ("JSON",)), ("{}", ("weight_map",))])
def test_an_index_that_is_damaged_is_not_pushed(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, text: str, wanted: str
) -> None:
    (place / "ours" / "model.safetensors.index.json").write_text(text)
    code, message = told(linearize, place, monkeypatch, "push")
    assert (code, holds(message, *wanted)) == (Exit.INCOMPATIBLE, True), message


# ---------------------------------------------------------------- what is gone, or cannot be made


@pytest.mark.parametrize("lost", ["", "config.json", "model.safetensors", "tokenizer.json"])
def test_a_source_that_is_deleted_meanwhile(shared: Path, tmp_path: Path, lost: str) -> None:
    """Between the plan and the writing; nothing of the result is left."""
    source = Path(shutil.copytree(shared / "source", tmp_path / "source"))
    planned = plan_conversion(str(source), "gsa", options=OPTIONS)
    shutil.rmtree(source) if not lost else (source / lost).unlink()
    if lost in ("config.json", "tokenizer.json"):  # read already, or not known to have been there
        convert(*planned, tmp_path / "out", level="none", say=lambda text: None)
        return
    with pytest.raises(LinearizeError, match=f"{lost or 'source'}") as caught:
        convert(*planned, tmp_path / "out", level="none", say=lambda text: None)
    assert caught.value.code == Exit.RESOURCE
    assert not (tmp_path / "out").exists()


def test_a_base_that_is_deleted_meanwhile(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening of a run and the loading of its model."""
    ours = Path(shutil.copytree(shared / "ours", tmp_path / "ours"))
    monkeypatch.setattr("linearize.job.start.open_run", lambda *arguments: shutil.rmtree(ours))
    with pytest.raises(LinearizeError, match="ours") as caught:
        train(make_recipe(tmp_path, ours, stage("logit_kl", steps=1)))
    assert caught.value.code in (Exit.INCOMPATIBLE, Exit.RESOURCE)


@pytest.mark.parametrize("home", ["/proc/none/modules", "FILE/modules"])
def test_a_cache_of_code_that_cannot_be_made(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """As with an HF_HOME that is no folder."""
    home = home.replace("FILE", str(place / "recipe.yaml"))
    monkeypatch.setattr("linearize.checkpoint.provenance.HF_MODULES_CACHE", home)
    monkeypatch.setattr("linearize.serve.start.is_installed", lambda name: True)
    for command in ("generate", "finetune", "serve", "export", "estimate"):
        code, message = told(linearize, place, monkeypatch, command)
        assert (code, f"cannot make {home}" in message, "Set HF_HOME" in message) == (Exit.RESOURCE, True, True)


@pytest.mark.parametrize("command", ["finetune", "demo"])
def test_a_cache_of_code_that_cannot_be_made_is_told_before_layers_are_chosen(
    linearize: Command, place: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Choosing takes minutes, and then the model could not be loaded."""

    def choosing(*arguments: Any, **named: Any) -> None:
        pytest.fail("layers were chosen")

    for module in ("job.start", "job.resolve", "demo.tour"):
        monkeypatch.setattr(f"linearize.{module}.plan_base", choosing)
    monkeypatch.setattr("linearize.checkpoint.provenance.HF_MODULES_CACHE", "/proc/none/modules")
    more = ["model.base=source", "convert={mechanism: gsa, keep_softmax: auto:1}"] if command == "finetune" else []
    monkeypatch.setitem(COMMANDS, "demo", [])
    code, message = told(linearize, place, monkeypatch, command, *more)
    assert (code, "cannot make /proc/none/modules" in message) == (Exit.RESOURCE, True), message
    assert not (place / "run").exists()
