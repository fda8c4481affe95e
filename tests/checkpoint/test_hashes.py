"""Written tensors have hashes, config.json follows the plan, and kernels of the Hub are not loaded without trust."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, holds
from models import HYBRID, Zoo, convert_folder, copied, save_source
from safetensors import safe_open
from training import base, make_recipe, stage, train

from linearize.checkpoint.provenance import check_code
from linearize.checkpoint.source import read_header
from linearize.convert import load_config
from linearize.errors import Exit, LinearizeError
from linearize.verify.checks import NONE_UNTOUCHED, check_hashes, check_new, check_plan, manifest_of

MIXERS = "model-mixers.safetensors"
SOURCE = "model-source-00001-of-00001.safetensors"


def flip(path: Path, tensor: str) -> None:
    """Flip the lowest bit of the first number of a tensor, which is then still finite."""
    data = bytearray(path.read_bytes())
    data[read_header(path)[tensor].start] ^= 1
    path.unlink()  # it may be a link to the source's
    path.write_bytes(data)


def names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


# ---------------------------------------------------------------- weights


def test_a_flipped_bit_in_a_new_tensor_is_found_by_name(zoo: Zoo, tmp_path: Path, linearize: Command) -> None:
    folder = copied(zoo.folders("llama")[1], tmp_path / "folder")
    assert check_new(folder, True)[0] == "passed"
    tensor = names(folder / MIXERS)[0]
    flip(folder / MIXERS, tensor)
    assert check_new(folder, False) == ("failed", f"not the recorded bytes: {tensor}")


@pytest.mark.parametrize("how", ["cast", "pickled"])
def test_rewritten_shards_are_covered(tmp_path: Path, how: str) -> None:
    source = save_source(tmp_path / "source")
    if how == "pickled":
        import torch
        from safetensors.torch import load_file

        torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
        (source / "model.safetensors").unlink()
    folder = convert_folder(source, tmp_path / "linear", HYBRID, dtype="bfloat16")
    found = manifest_of(folder)
    held = {name for path in folder.glob("*.safetensors") for name in names(path)}
    assert found["written"]["tensors"].keys() | found["untouched"]["tensors"].keys() == held
    assert check_hashes(folder) == NONE_UNTOUCHED
    tensor = "model.layers.3.mlp.up_proj.weight"
    flip(folder / SOURCE, tensor)
    assert check_new(folder, False) == ("failed", f"not the recorded bytes: {tensor}")


@pytest.mark.parametrize("merge", [True, False])
def test_trained_weights_are_covered(tmp_path: Path, merge: bool) -> None:
    """Of two runs, one after the other: what the first trained and the second left alone stays covered."""
    converted = base(tmp_path / "root", "llama")
    stages = {"finish": {"verify": False, "merge_lora": merge}}
    first = make_recipe(tmp_path / "one", converted, stage("logit_kl", ["mixer", "lora"], steps=1), **stages)
    train(first)
    second = make_recipe(tmp_path / "two", tmp_path / "one/run/final", stage("logit_kl", "new", steps=1))
    train(second)
    for run in ("one", "two"):
        final = tmp_path / run / "run/final"
        found = manifest_of(final)
        held = {name for path in final.glob("*.safetensors") for name in names(path)}
        covered = found["written"]["tensors"].keys() | found["untouched"]["tensors"].keys()
        assert held <= covered | {name for shard in found["untouched"]["shards"] for name in names(final / shard)}
        assert check_new(final, True)[0] == check_hashes(final)[0] == "passed"
        trained = "model.layers.1.self_attn.q_proj.weight" if merge else names(final / MIXERS)[-1]
        assert trained in found["written"]["tensors"]
        flip(final / (SOURCE if merge else MIXERS), trained)
        assert check_new(final, False) == ("failed", f"not the recorded bytes: {trained}")
    if not merge:
        adapter = "adapter/adapter_model.safetensors"
        final = copied_tree(tmp_path / "one/run/final", tmp_path / "again")
        flip(final / MIXERS, trained)  # back
        flip(final / adapter, names(final / adapter)[0])
        assert check_new(final, False) == ("failed", f"not the recorded bytes: {adapter}")


def copied_tree(folder: Path, target: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, target))


def test_a_tensor_without_a_hash_is_named_and_an_older_folder_verifies(zoo: Zoo, tmp_path: Path) -> None:
    folder = copied(zoo.folders("llama")[1], tmp_path / "folder")
    found = manifest_of(folder)
    tensor, _ = found["written"]["tensors"].popitem()
    (folder / "linearize.json").write_text(json.dumps(found))
    assert check_new(folder, True) == ("failed", f"linearize.json has no hash of {tensor}")
    del found["written"]
    (folder / "linearize.json").write_text(json.dumps({**found, "linearize": "0.1.0"}))
    status, detail = check_new(folder, True)
    assert status == "passed"
    assert holds(detail, "linearize", "0.1.0")


@pytest.mark.slow
def test_an_upgrade_records_what_was_not(linearize: Command, tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parent / "data/written-by-0.1.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "llama-gsa"
    assert "recorded no hashes" in check_new(folder, True)[1]
    code, _, err = linearize("upgrade", folder)
    assert code == 0, err
    assert manifest_of(folder)["written"]["tensors"].keys() == set(names(folder / MIXERS))
    flip(folder / MIXERS, names(folder / MIXERS)[0])
    assert check_new(folder, True)[0] == "failed"


# ---------------------------------------------------------------- config.json and the plan


def no_layer(config: dict[str, Any]) -> None:
    del config["linearize"]["layers"][1]


def other_option(config: dict[str, Any]) -> None:
    config["linearize"]["layers"][0]["options"]["damping"] = 1.0


def other_site(config: dict[str, Any]) -> None:
    config["linearize"]["layers"][0]["site"]["scale"] = 1.0


def other_mechanism(config: dict[str, Any]) -> None:
    config["linearize"]["layers"][1]["mechanism"] = "gla"


def one_layer_twice(config: dict[str, Any]) -> None:
    layers = config["linearize"]["layers"]
    layers[1] = {**layers[1], "site": {**layers[1]["site"], "path": "model.layers.3.self_attn"}}


def masks(config: dict[str, Any]) -> None:
    config["linearize"]["all_linear"] = True


def nothing(config: dict[str, Any]) -> None:
    config["linearize"]["layers"] = 3


CHANGES: dict[Callable[[dict[str, Any]], None], str] = {
    no_layer: "model.layers.2.self_attn is not in it, the plan makes it linear",
    other_option: "model.layers.0.self_attn: damping is 1.0, the plan has 8.0",
    other_site: "model.layers.0.self_attn: site.scale is 1.0, the plan has 0.35",
    other_mechanism: "model.layers.2.self_attn: mechanism is 'gla', the plan has 'gsa'",
    one_layer_twice: "model.layers.3.self_attn is in it, the plan keeps softmax there",
    masks: "all_linear is True, the plan has False",
    nothing: "its entry linearize is damaged",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_config_that_does_not_follow_the_plan_is_refused(zoo: Zoo, tmp_path: Path, change: Any) -> None:
    folder = copied(zoo.folders("llama", HYBRID)[1], tmp_path / "folder")
    assert check_plan(folder) == ("passed", "")
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    status, detail = check_plan(folder)
    assert status == "failed"
    assert CHANGES[change] in detail
    for trust in (False, True):  # code may be trusted; this is no matter of code
        with pytest.raises(LinearizeError) as refused:
            check_code(folder, trust)
        assert refused.value.code == Exit.INCOMPATIBLE
        assert str(folder / "config.json") in refused.value.message


def test_every_command_refuses_it(zoo: Zoo, tmp_path: Path, linearize: Command) -> None:
    folder = copied(zoo.folders("llama", HYBRID)[1], tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    other_option(config)
    (folder / "config.json").write_text(json.dumps(config))
    commands = {("generate", folder, "a"): 3, ("push", folder, "me/model", "--dry-run"): 3, ("upgrade", folder): 3}
    commands |= {("eval", folder, "--teacher", folder): 3}
    for command, expected in commands.items():
        code, _, err = linearize(*command)
        assert (code, holds(err, "damping", "1.0", "8.0")) == (expected, True), err
    for dry in ([], ["--dry-run"]):
        code, _, err = linearize("finetune", "demo", f"model.base={folder}", "convert=null",
                                 f"output_dir={tmp_path / 'run'}", *dry)  # fmt: skip
        assert (code, holds(err, "damping", "1.0", "8.0")) == (3, True), err
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- kernels of the Hub

KERNELS = {
    "plain": {"attn_implementation": "someone/attention"},
    "private": {"_attn_implementation": "someone/attention:forward"},
    "wrapped": {"attn_implementation": "paged|someone/attention@v1"},
    "nested": {"text_config": {"_attn_implementation": "someone/attention"}},
    "by part": {"attn_implementation": {"vision_config": "someone/attention", "": "sdpa"}},
    "experts": {"experts_implementation": "someone/experts"},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_kernel_of_the_hub_needs_trust(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linearize: Command, kernel: str, file: str
) -> None:
    folder = copied(zoo.folders("llama")[1], tmp_path / "folder")

    def loaded(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the kernel loader was reached")

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", loaded)
    found = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**found, **KERNELS[kernel]}))
    for command in (("generate", folder, "a"), ("verify", folder), ("push", folder, "me/model", "--dry-run")):
        code, _, err = linearize(*command)
        assert code == 3, err
        assert f"{file} with" in err
        assert "someone/" in err
    check_code(folder, True)


def test_a_source_with_a_kernel_of_the_hub_needs_trust(tmp_path: Path, linearize: Command) -> None:
    source = save_source(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "attn_implementation": "someone/attention:f"}))
    for command in (("convert", source, "--to", "gsa", "--dry-run"), ("inspect", source), ("generate", source, "a")):
        code, _, err = linearize(*command)
        assert code == 3
        assert holds(err, "attn_implementation=someone/attention:f", "config.json")
    (source / "config.json").write_text(json.dumps({**config, "attn_implementation": "sdpa"}))
    assert linearize("inspect", source)[0] == 0


def test_what_is_no_kernel_passes(tmp_path: Path) -> None:
    from linearize.checkpoint.source import hub_kernel, open_source

    assert hub_kernel({"_name_or_path": "a/b", "cache_implementation": "static", "attn_implementation": None}) is None
    source = save_source(tmp_path / "source")
    assert load_config(open_source(str(source), None), False).model_type == "llama"
