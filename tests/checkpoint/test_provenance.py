"""Folders that an earlier version wrote stay trusted, edited ones do not, and `linearize upgrade` renews them.

The folders of 0.1.0 are in data/, see its README.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, holds, relative_error, with_slow
from models import Zoo, copied, load, logits, tokens
from training import byte_tokenizer, stage, write_recipe
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from linearize import __version__
from linearize.checkpoint import flatten, known_code, provenance, templates, upgrade
from linearize.checkpoint.code import code_files
from linearize.checkpoint.templates import TEMPLATES, number
from linearize.errors import LinearizeError
from linearize.plan import mechanisms
from linearize.serve import start
from linearize.verify import reload as reloading

OLD = "0.1.0"
DATA = Path(__file__).parent / "data"


def unpacked(version: str, place: Path) -> Path:
    with tarfile.open(DATA / f"written-by-{version}.tar.xz") as archive:
        archive.extractall(place, filter="data")
    return place


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that 0.1.0 wrote; not to be changed."""
    return unpacked(OLD, tmp_path_factory.mktemp("written"))


@pytest.fixture
def old(written: Path, tmp_path: Path) -> Path:
    """A copy of the Llama."""
    return copied(written / "llama-gsa", tmp_path / "llama-gsa")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def origin(folder: Path) -> provenance.Origin:
    return provenance.origin_of(folder, provenance.read_plan(folder))


# ---------------------------------------------------------------- the list of hashes


def test_every_travelling_file_has_its_hash() -> None:
    present = {row for row in known_code.read_rows() if row[0] == __version__}
    assert known_code.present_rows() <= present, f"known_code.txt is behind. Run: {known_code.COMMAND}"


@pytest.mark.parametrize("version", known_code.RELEASED)
def test_lines_and_templates_of_a_released_version_never_change(version: str) -> None:
    """A folder of that version would no longer be trusted. Set a newer version, or add a template under it."""
    rows = {row for row in known_code.read_rows() if row[0] == version}
    assert hashlib.sha256(known_code.as_text(rows).encode()).hexdigest() == known_code.RELEASED[version]
    if version in TEMPLATES:
        own = {name: known_code.sha256_of(text) for name, text in TEMPLATES[version]._asdict().items() if text}
        assert own.items() <= {name.removeprefix("template:"): value for _, name, value in rows}.items()


def test_versions_that_write_folders_have_numbers_of_their_own() -> None:
    assert __version__ not in known_code.RELEASED
    assert number(__version__) > max(map(number, known_code.RELEASED))


def test_the_script_adds_lines_and_takes_none_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_code, "PATH", tmp_path / "known_code.txt")
    kept = {("0.1.0", "seam.py", "a" * 64), ("0.1.0", "gone.py", "b" * 64), (__version__, "seam.py", "c" * 64)}
    known_code.PATH.write_text(known_code.as_text(kept))
    monkeypatch.setattr(known_code, "travelling_files", lambda: {"seam.py": "text\n", "new.py": "more\n"})
    monkeypatch.delitem(known_code.TEMPLATES, __version__, raising=False)
    assert known_code.update() == 2
    ours = {(__version__, name, hashlib.sha256(text).hexdigest())
            for name, text in (("seam.py", b"text\n"), ("new.py", b"more\n"))}  # fmt: skip
    assert known_code.read_rows() == kept | ours
    before = known_code.PATH.read_text()
    assert before.splitlines() == sorted(before.splitlines())
    monkeypatch.setitem(known_code.RELEASED, __version__, "")
    with pytest.raises(LinearizeError, match="is released"):
        known_code.update()
    assert known_code.PATH.read_text() == before


def test_versions_sort_by_number() -> None:
    assert sorted(["0.10.0", "0.9.1", "0.2.0"], key=number) == ["0.2.0", "0.9.1", "0.10.0"]


# ---------------------------------------------------------------- a folder of an earlier version is used as it is


# Their code knows the cache by its old name alone.
RENAMED = "cache" in CausalLMOutputWithPast.__dataclass_fields__


def test_verify(linearize: Command, written: Path) -> None:
    """Where it cannot decode, that is the one thing wrong, and the remedy is named."""
    code, out, err = linearize("verify", written / "llama-gsa", "--json")
    wrong = [check["name"] for check in json.loads(out)["checks"] if check["status"] != "passed"]
    assert wrong == ["decoding"] * RENAMED, err
    assert code == 6 * RENAMED, err
    assert (f"Run linearize upgrade {written / 'llama-gsa'}, or install" in err) == RENAMED


@pytest.mark.skipif(not RENAMED, reason="its code serves before transformers 5.24")
def test_code_that_cannot_decode_is_not_served(
    linearize: Command, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "is_installed", lambda name: name == "transformers")
    code, _, err = linearize("serve", written / "llama-gsa", "--server", "transformers")
    assert code == 3
    assert holds(err, "linearize", f"{OLD}", f"{written / 'llama-gsa'}", "transformers")


@pytest.mark.slow
def test_verify_of_an_encoder_and_of_diffusers(linearize: Command, written: Path) -> None:
    for name in ("vit-la", "dit-la"):
        code, _, err = linearize("verify", written / name)
        assert code == 0, err


def test_generate_and_eval(linearize: Command, written: Path) -> None:
    """With the code of this version where their own cannot decode; the folder stays as it is."""
    folder = written / "llama-gsa"
    before = contents(folder)
    code, out, err = linearize("generate", folder, "ab", "--max-new-tokens", "5", "--device", "cpu", "--json")
    assert code == 0, err
    assert len(json.loads(out)["tokens"]) == 5
    given = ("eval.max_tokens=512", "data.pack.seq_len=32", "--lengths", "512", "--trials", "1", "--json")
    code, out, err = linearize("eval", folder, "--teacher", folder, "--device", "cpu", *given)
    assert code == 0, err
    assert json.loads(out)["top1_agreement"] == 1
    assert contents(folder) == before


@pytest.mark.slow
def test_finetune_trains_with_the_code_of_this_version(linearize: Command, written: Path, tmp_path: Path) -> None:
    """On the old folder, which stays as it was; the result is this version's."""
    folder = written / "llama-gsa"
    before = contents(folder)
    recipe = write_recipe(tmp_path, folder, stage("attention_transfer", steps=2), stage("logit_kl", steps=2))
    assert linearize("finetune", recipe, "--dry-run")[0] == 0
    code, _, err = linearize("finetune", recipe)
    assert code == 0, err
    assert holds(err, "linearize", f"{OLD}")
    final = tmp_path / "run" / "final"
    assert origin(final) == (__version__, [])
    assert contents(folder) == before
    assert linearize("finetune", recipe)[0] == 0  # finished already
    shutil.rmtree(final)
    code, _, err = linearize("finetune", recipe)  # resumed: the base has been upgraded
    assert code == 0, err
    assert "has the code of" not in err


@pytest.fixture
def asks(tmp_path: Path) -> Path:
    """The folder of 0.2.0, of a type that transformers does not know."""
    folder = unpacked("0.2.0", tmp_path) / "llama-gsa"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "linearized_llama"
    return folder


def test_a_type_of_its_own_is_trusted(linearize: Command, asks: Path) -> None:
    assert origin(asks) == ("0.2.0", [])
    assert linearize("push", asks, "me/model", "--dry-run")[0] == 0
    config = json.loads((asks / "config.json").read_text())
    (asks / "config.json").write_text(json.dumps(config | {"model_type": "linearized_gpt2"}))
    code, _, err = linearize("push", asks, "me/model", "--dry-run")
    assert code == 3
    assert holds(err, "model_type", "'linearized_gpt2'", "'llama'")


@pytest.mark.slow
def test_a_type_of_its_own_is_upgraded_to_the_source_s(linearize: Command, asks: Path, tmp_path: Path) -> None:
    """Until then it is verified and generated from; what was saved of it by transformers comes back as well."""
    assert linearize("verify", asks)[0] == 0
    assert linearize("generate", asks, "ab", "--max-new-tokens", "5", "--device", "cpu")[0] == 0
    for part in (load(asks), byte_tokenizer()):
        part.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "linearized_llama"
    assert linearize("generate", tmp_path / "again", "ab", "--max-new-tokens", "5", "--device", "cpu")[0] == 0
    code, _, err = linearize("upgrade", asks, "-o", tmp_path / "new")
    assert code == 0, err
    assert holds(err, "logits", "before")
    assert type(AutoConfig.from_pretrained(tmp_path / "new")) is LlamaConfig  # nothing is asked
    assert linearize("verify", tmp_path / "new")[0] == 0


def test_push(linearize: Command, written: Path) -> None:
    code, out, err = linearize("push", written / "llama-gsa", "me/model", "--dry-run", "--json")
    assert code == 0, err
    assert "seam.py" in json.loads(out)["upload"]["files"]


# ---------------------------------------------------------------- so is one of an earlier state of this version


def test_a_word_changed_in_a_docstring_leaves_folders_usable(
    linearize: Command, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script noted stays noted; `linearize upgrade` brings such a folder to the code that there is now."""
    folder = copied(zoo.folders("llama")[1], tmp_path / "written")
    assert origin(folder) == (__version__, [])
    texts = known_code.travelling_files()
    changed = texts | {"norm.py": texts["norm.py"].replace('"""', '"""Now: ', 1)}
    assert changed != texts
    for module in (known_code, flatten):
        monkeypatch.setattr(module, "travelling_files", lambda: changed)
    assert origin(folder) == (f"{__version__}.dev0", [])
    assert linearize("push", folder, "me/model", "--dry-run")[0] == 0
    planned = upgrade.plan_upgrade(folder)
    assert planned is not None
    assert planned.version == f"{__version__}.dev0"
    edited(folder, "norm.py")
    assert origin(folder).changed == ["norm.py"]
    assert linearize("push", folder, "me/model", "--dry-run")[0] == 3


# ---------------------------------------------------------------- what is not trusted


def edited(folder: Path, name: str, more: str = "\n# changed\n") -> None:
    with (folder / name).open("a") as file:
        file.write(more)


@pytest.mark.parametrize("name", ["seam.py", "gsa.py", "modeling_linearized.py"])
def test_edited_code_is_refused_by_file(linearize: Command, old: Path, name: str) -> None:
    edited(old, name)
    for command in (("verify", old), ("generate", old, "a"), ("push", old, "me/model", "--dry-run"), ("upgrade", old)):
        code, _, err = linearize(*command)
        assert code == 3
        assert holds(err, "linearize", f"{OLD}", f"({name})")


def test_what_the_manifest_says_does_not_count(old: Path) -> None:
    edited(old, "seam.py")
    path = old / "linearize.json"
    manifest = json.loads(path.read_text())
    manifest["code"]["seam.py"] = hashlib.sha256((old / "seam.py").read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))
    assert origin(old) == (OLD, ["seam.py"])


@pytest.mark.parametrize("name", ["extra.py", "custom_generate/generate.py", "scan.py"])
def test_a_known_file_under_a_wrong_name_is_refused(old: Path, name: str) -> None:
    (old / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(old / "norm.py", old / name)
    assert origin(old) == (OLD, [name])


def test_a_file_that_is_missing_is_named(old: Path) -> None:
    (old / "gates.py").unlink()
    assert origin(old) == (OLD, ["gates.py"])
    (old / "modeling_linearized.py").unlink()
    assert origin(old).changed == ["gates.py", "modeling_linearized.py"]


@pytest.fixture
def later(old: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Another version, 0.1.5, of which seam.py is another: its text by name."""
    text = (old / "seam.py").read_text() + "\n# of another version\n"
    known = known_code.known_files()
    monkeypatch.setattr(
        provenance, "known_files", lambda: {**known, "0.1.5": {**known[OLD], "seam.py": {known_code.sha256_of(text)}}}
    )
    return {"seam.py": text}


def test_files_of_two_versions_are_not_mixed(old: Path, later: dict[str, str]) -> None:
    (old / "seam.py").write_text(later["seam.py"])
    assert origin(old) == (OLD, ["seam.py of linearize 0.1.5"])
    modeling = old / "modeling_linearized.py"
    modeling.write_text(modeling.read_text().replace(f"linearize {OLD}", "linearize 0.1.5"))
    assert origin(old) == ("0.1.5", [])


def test_a_folder_is_rendered_with_the_template_of_its_version(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = TEMPLATES[OLD]._replace(modeling="# new\n" + TEMPLATES[OLD].modeling)
    monkeypatch.setitem(TEMPLATES, __version__, newest)
    assert templates.templates_of(__version__) is newest
    assert origin(old) == (OLD, [])
    plan = provenance.read_plan(old)
    assert code_files(plan, provenance.natives_of(plan))["modeling_linearized.py"].startswith("# new\n")
    with monkeypatch.context() as change:
        change.setitem(TEMPLATES, OLD, newest)  # as if 0.1.0 had written so
        assert origin(old).changed == ["modeling_linearized.py"]


@pytest.mark.parametrize("change", ["code", "file", "name", "more"])
def test_edited_code_of_diffusers_is_refused(linearize: Command, written: Path, tmp_path: Path, change: str) -> None:
    folder = copied(written / "dit-la", tmp_path / "dit-la")
    code = next(folder.glob("linearized_*.py"))
    if change == "code":
        edited(folder, code.name)
    elif change == "file":
        text = code.read_text()
        code.write_text(text.replace("| import torch\n", "| import torch\n| import os\n", 1))
        assert code.read_text() != text
    elif change == "name":
        code = code.rename(folder / "linearized_000000000000.py")
    else:
        code = folder / "more.py"
        code.write_text("1\n")
    status, _, err = linearize("verify", folder)
    assert status == 3
    assert holds(err, "carries", "linearize")
    assert code.name in err


# ---------------------------------------------------------------- upgrade


@pytest.mark.slow
def test_upgrade_in_place(linearize: Command, old: Path) -> None:
    """Code and config are this version's, weights and foreign files stay; a second time there is nothing to do."""
    (old / "notes").mkdir()
    (old / "notes" / "mine.txt").write_text("mine")
    before = contents(old)
    code, out, err = linearize("upgrade", old, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["upgraded"], told["from"], told["to"], told["output"]) == (True, OLD, __version__, str(old))
    assert holds(told["verified"], "logits", "before")
    after = contents(old)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} >= {
        "modeling_linearized.py",
        "linearize.json",
    }
    kept = [name for name in before if not name.endswith(".py") and name not in ("config.json", "linearize.json")]
    assert all(after[name] == before[name] for name in kept)
    assert origin(old) == (__version__, [])
    manifest = json.loads(after["linearize.json"])
    assert manifest["linearize"] == __version__
    assert [past["linearize"] for past in manifest["upgraded_from"]] == [OLD]
    assert set(manifest["files"]) == after.keys() - {"notes/mine.txt"}
    code, out, _ = linearize("upgrade", old, "--json")
    assert (code, json.loads(out)["upgraded"]) == (0, False)
    assert contents(old) == after


def test_upgrade_to_another_folder(linearize: Command, written: Path, tmp_path: Path) -> None:
    """Of an encoder whose code was edited and is trusted; the weights are linked, and the folder itself stays."""
    folder, output = copied(written / "vit-la", tmp_path / "vit-la"), tmp_path / "new"
    edited(folder, "seam.py")
    (folder / "mine.txt").write_text("mine")
    before = contents(folder)
    assert linearize("upgrade", folder, "-o", output)[0] == 3
    code, _, err = linearize("upgrade", folder, "-o", output, "--trust-remote-code")
    assert code == 0, err
    assert contents(folder) == before
    assert origin(output) == (__version__, [])
    assert not (output / "mine.txt").exists()
    shard = "model-source-00001-of-00001.safetensors"
    assert (output / shard).samefile(folder / shard)
    (folder / "README.md").rename(tmp_path / "elsewhere.md")
    (folder / "README.md").symlink_to(tmp_path / "elsewhere.md")
    code, _, err = linearize("upgrade", folder, "-o", tmp_path / "linked", "--trust-remote-code")
    assert (code, holds(err, "README.md")) == (3, True), err
    assert linearize("upgrade", folder, "-o", output)[0] == 2  # the output is not empty
    assert linearize("upgrade", folder, "-o", folder / "inside")[0] == 2
    assert linearize("upgrade", folder, "-o", folder)[0] == 2


@pytest.mark.parametrize("wrong", with_slow(["logits", "mixers"], "logits"))
def test_an_upgrade_that_fails_leaves_the_folder_as_it_was(
    linearize: Command, old: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    files = code_files(provenance.read_plan(old), provenance.natives_of(provenance.read_plan(old)))
    if wrong == "mixers":

        def others(plan: Any) -> Any:
            found, renamed = with_present_options(plan)
            found.steps[0].options["slots"] = 5
            return found, renamed

        with_present_options = upgrade.with_present_options
        monkeypatch.setattr(upgrade, "with_present_options", others)
    else:
        right = "return o.to(query.dtype), None"
        assert right in files["attention_hooks.py"]
        files["attention_hooks.py"] = files["attention_hooks.py"].replace(right, right.replace("o.to", "2 * o.to"))
    monkeypatch.setattr(upgrade, "code_files", lambda plan, natives: files)
    before = contents(old)
    code, _, err = linearize("upgrade", old)
    assert code == (3 if wrong == "mixers" else 6), err
    assert {"logits": "logits differ", "mixers": "its mixers are others"}[wrong] in err
    assert contents(old) == before
    assert [path.name for path in old.parent.iterdir()] == [old.name]


def test_options_get_their_present_names(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "linearize.json"):
        text = (old / name).read_text()
        assert '"slots": 4' in text
        (old / name).write_text(text.replace('"slots": 4', '"places": 4'))
    monkeypatch.setitem(mechanisms.RENAMED_OPTIONS, "places", "slots")
    planned = upgrade.plan_upgrade(old)
    assert planned is not None
    assert planned.renamed == {"places": "slots", "gate_heads": "state_heads"}
    (layer,) = planned.config["linearize"]["layers"]
    assert layer["options"]["slots"] == 4
    assert "places" not in layer["options"]
    assert mechanisms.resolve_options("gsa", {"places": 4})["slots"] == 4
    monkeypatch.setitem(mechanisms.RENAMED_OPTIONS, "slots", "window")  # a name that is still one stays
    assert mechanisms.present_options("gsa", {"slots": 4}) == {"slots": 4}


def test_what_cannot_be_upgraded_is_refused(linearize: Command, written: Path, zoo: Zoo, tmp_path: Path) -> None:
    code, _, err = linearize("upgrade", written / "dit-la")
    assert (code, holds(err, "Convert", "source")) == (3, True)
    code, _, err = linearize("upgrade", tmp_path / "none")
    assert (code, "no such folder" in err) == (2, True)
    code, _, err = linearize("upgrade", zoo.folders("llama")[0])
    assert (code, holds(err, "written", "linearize")) == (3, True)


def test_code_that_counts_padding_can_be_upgraded(linearize: Command, tmp_path: Path) -> None:
    """In 0.1.0 GLA saw padded rows turned by their padding; this version computes what the row alone gives."""
    with tarfile.open(DATA / "written-by-0.1.0-sla.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    code, _, err = linearize("upgrade", tmp_path / "sla-gla")
    assert code == 0, err
    assert holds(err, "logits", "before")
    model, ids = load(tmp_path / "sla-gla"), tokens(1, 20)
    mask = torch.ones_like(ids)
    mask[:, :7] = 0
    assert relative_error(logits(model, ids, attention_mask=mask)[:, 7:], logits(model, ids[:, 7:])) < 1e-5


def test_half_a_folder_is_not_upgraded(linearize: Command, old: Path) -> None:
    """The new linearize.json would not list what is gone, and nobody would miss it."""
    (old / "tokenizer.json").unlink()
    before = contents(old)
    for output in ([], ["-o", old.parent / "new"]):
        code, _, err = linearize("upgrade", old, *output)
        assert code == 3
        assert holds(err, "tokenizer.json", "linearize.json")
    assert contents(old) == before
    assert [path.name for path in old.parent.iterdir()] == [old.name]


def test_a_model_saved_over_a_folder_is_named(linearize: Command, zoo: Zoo, tmp_path: Path) -> None:
    folder = copied(zoo.folders("llama")[1], tmp_path / "over")
    load(folder).save_pretrained(folder)
    remedy = f"transformers saved a model into it later. Remove {folder / 'linearize.json'}, and the folder is taken as"
    for command in (["verify", folder], ["push", folder, "me/model", "--dry-run"]):
        code, out, err = linearize(*command)
        assert code != 0
        assert remedy in " ".join((out + err).split()), command
        assert "Errno" not in out + err
    (folder / "linearize.json").unlink()
    code, out, err = linearize("verify", folder, "--json")
    assert code == 0, err


def test_an_upgrade_that_is_interrupted_waits_for_nobody(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads wait for children, and it for its threads."""

    def reload(folder: Path, layers: int, padded: bool) -> Any:
        with reloading.started([sys.executable, "-c", "import time; time.sleep(100)"], {**os.environ}) as child:
            child.wait()
        raise LinearizeError("ended")

    folder = zoo.folders("llama")[1]
    monkeypatch.setattr(upgrade, "reload_logits", reload)
    monkeypatch.setattr(upgrade, "what_fits", lambda folder, plan: reloading.ALL_TWICE)
    begun = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `make test &` ignores it
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            upgrade.compared(folder, folder, provenance.read_plan(folder))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 50
    assert not reloading.RUNNING
