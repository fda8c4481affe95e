"""`convert`: the plan as a value, every bad input with its exit code and nothing left behind, sources with code."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Command, holds, with_slow
from models import HYBRID, convert_folder, load, logits, save_source, small_model, tokens
from safetensors.torch import load_file, save_file

from linearize.checkpoint.carried import NAMES
from linearize.checkpoint.code import SourceClasses
from linearize.checkpoint.manifest import read_plan
from linearize.checkpoint.source import read_header
from linearize.checkpoint.write import MANIFEST
from linearize.convert import convert, next_step, plan_conversion, unread
from linearize.errors import Exit, LinearizeError
from linearize.plan.mechanisms import build_mixer, parse_settings, resolve_options
from linearize.plan.plan import Plan, choose_layers
from linearize.probe.found import Found
from linearize.recipe.recipe import load_recipe
from linearize.terminal.output import ranges
from linearize.train.save import meta_model
from linearize_kernels.hf.attention_hooks import mixers_of


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_source(tmp_path / "source")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source that tests only read."""
    return save_source(tmp_path_factory.mktemp("shared") / "source")


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


# ---------------------------------------------------------------- plan


def test_a_plan_survives_json(shared: Path) -> None:
    plan, _, _ = plan_conversion(str(shared), "gsa", layers=HYBRID, options={"slots": "16", "rope": "false"})
    data = json.loads(json.dumps(plan.to_json()))
    again = Plan.from_json(data)
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again.spec() == plan.spec()


def test_plans_of_other_versions(source: Path) -> None:
    folder = convert_folder(source, source.parent / "linear", "0-1")
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    plan = read_plan(folder)
    for field in ("others", "reads_masks"):
        del manifest["plan"][field]
    for step in manifest["plan"]["steps"]:
        del step["site"]["routed"]
    del manifest["format"]
    path.write_text(json.dumps(manifest))
    assert read_plan(folder) == plan
    del manifest["plan"]["steps"]
    path.write_text(json.dumps({**manifest, "format": 2, "linearize": "9.1"}))
    with pytest.raises(LinearizeError, match=r"written.*linearize.*9\.1") as newer:
        read_plan(folder)
    assert newer.value.code == Exit.INCOMPATIBLE
    path.write_text(json.dumps(manifest))
    with pytest.raises(LinearizeError, match=r"written.*linearize"):
        read_plan(folder)


def test_a_plan_says_what_changes_and_what_it_costs(shared: Path) -> None:
    plan, _, _ = plan_conversion(str(shared), "gsa", layers=HYBRID, options={"slots": 16})
    assert [(s.site.layer, s.site.path, s.mechanism) for s in plan.steps] == [
        (0, "model.layers.0.self_attn", "gsa"),
        (2, "model.layers.2.self_attn", "gsa"),
    ]
    site = plan.steps[0].site
    assert (site.hidden, site.heads, site.kv_heads, site.key_dim, site.value_dim, site.causal) == (32, 4, 2, 8, 8, True)
    assert [site.layer for site in plan.kept] == [1, 3]
    with torch.device("meta"):
        mixer = build_mixer("gsa", site, plan.steps[0].options)
    assert plan.steps[0].new_parameters == sum(p.numel() for p in mixer.parameters()) > 2 * 16 * 32
    assert plan.steps[0].state_bytes == mixer.state_bytes(0) >= 4 * 2 * 16 * (8 + 8)
    row = 2 * (8 + 8) * 4  # keys and values of one token in one layer, float32
    costs = plan.to_json()["decode_bytes"]
    assert costs["4096"] == {"source": 4 * 4096 * row, "converted": 2 * 4096 * row + 2 * plan.steps[0].state_bytes}
    assert costs["131072"]["source"] == 32 * costs["4096"]["source"]
    assert plan.needed_bytes == 4 * plan.new_parameters
    assert plan.source_bytes == (shared / "model.safetensors").stat().st_size
    assert (plan.dtype, plan.cast, plan.pickled) == ("float32", False, False)


def test_a_plan_counts_what_caches_of_sliding_windows_hold(tmp_path: Path) -> None:
    plan, _, _ = plan_conversion(str(save_source(tmp_path, "gemma2")), "la", layers="0,1")
    model = small_model("gemma2")
    cache = transformers.DynamicCache(config=model.config)
    model(tokens(1, 20), past_key_values=cache)
    sizes = [4 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers]
    assert sizes[0] < sizes[1]
    states = sum(step.state_bytes for step in plan.steps)
    assert plan.cache_bytes(20) == {"source": sum(sizes), "converted": sum(sizes[2:]) + states}
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("name", "to", "options", "told"),
    [
        ("qwen3", "mamba2", {}, "gdn --set native=true"),
        ("llama", "gdn", {"native": True}, "--to mamba2"),
        ("llama", "mamba2", {}, ""),
        ("qwen3", "gdn", {"native": True}, ""),
        ("qwen3", "gdn", {}, ""),  # which is not there for engines
    ],
)
def test_what_no_format_holds_is_told_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, to: str, options: dict[str, Any], told: str
) -> None:
    plan_conversion(str(save_source(tmp_path, name)), to, options=options, keep_softmax="3")
    message = " ".join(capsys.readouterr().err.split())
    assert holds(message, "note", "linearize export", told) if told else not message


@pytest.mark.parametrize(("to", "options"), [("mamba2", {}), ("gdn", {"native": True})])
def test_native_layers_take_no_kept_heads(tmp_path: Path, to: str, options: dict[str, Any]) -> None:
    source = save_source(tmp_path, "qwen3" if to == "gdn" else "llama")
    with pytest.raises(LinearizeError, match=rf"keep-heads.*{to}.*--keep-softmax"):
        plan_conversion(str(source), to, options=options, keep_softmax="3", keep_heads="0:0")


def test_a_cast_is_planned(shared: Path) -> None:
    plan, _, _ = plan_conversion(str(shared), "gsa", dtype="bfloat16")
    weights = sum(p.numel() for p in small_model("llama").parameters())
    assert (plan.dtype, plan.cast) == ("bfloat16", True)
    assert plan.needed_bytes == 2 * (weights + plan.new_parameters)


@pytest.mark.parametrize(
    ("stored", "asked", "message"),
    [
        ("float32", "bfloat16", ("source's", "float32", "bfloat16")),
        ("bfloat16", "float32", ("source's", "bfloat16", "float32")),
        ("bfloat16", "bfloat16", ("source", "weights")),
        ("bfloat16", "keep", ("source", "weights")),
    ],
)
def test_a_dtype_that_changes_is_said(tmp_path: Path, linearize: Any, stored: str, asked: str, message: str) -> None:
    small_model("llama").to(getattr(torch, stored)).save_pretrained(tmp_path / "source")
    plan, _, _ = plan_conversion(str(tmp_path / "source"), "gsa", dtype=asked)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).rounding == plan.rounding
    code, _, err = linearize("convert", tmp_path / "source", "--to", "gsa", "--dtype", asked, "--dry-run")
    assert (code, holds(err, *message)) == (0, True), err


def test_what_is_dropped_is_said(tmp_path: Path) -> None:
    plan, _, _ = plan_conversion(str(save_source(tmp_path / "gemma", "gemma2")), "gsa")
    assert [note.partition(":")[0] for note in plan.notes] == ["sliding_window", "softcap"]
    assert "(layers 0,2)" in plan.notes[0]
    assert "(layers 0-3)" in plan.notes[1]
    plan, _, _ = plan_conversion(str(save_source(tmp_path / "llama")), "gsa")
    assert plan.notes == []


BIG = {
    "llama-70b": lambda: transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    ),
    "deepseek-v3": transformers.DeepseekV3Config,
    "mixtral": transformers.MixtralConfig,
}


@pytest.mark.parametrize("name", with_slow(BIG, "deepseek-v3", "mixtral"))
def test_a_dry_run_needs_the_config_alone(tmp_path: Path, name: str) -> None:
    config = BIG[name]()
    config.save_pretrained(tmp_path)
    start = time.process_time()
    plan, source, _ = plan_conversion(str(tmp_path), "gsa", weights=False)
    assert time.process_time() - start < 10.0  # deepseek-v3 took 5.02 beside three other programs on two cores
    assert source.shards == ()
    assert len(plan.steps) == config.num_hidden_layers
    assert plan.source_bytes > 4 * 40e9
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}


@pytest.mark.parametrize(
    ("layers", "keep", "chosen"),
    [
        ("all", "", [0, 1, 2, 3]),
        ("all", "1,3", [0, 2]),
        ("0-2", "", [0, 1, 2]),
        ("0-1,3", "", [0, 1, 3]),
        (" 1 , 2", "2", [1]),
        ("every:2", "", [0, 2]),
        ("every:3", "0", [3]),
        ("all", "every:2", [1, 3]),
        ("all", "every:2:1", [0, 2]),
    ],
)
def test_layers_are_chosen(shared: Path, layers: str, keep: str, chosen: list[int]) -> None:
    plan, _, _ = plan_conversion(str(shared), "gsa", layers=layers, keep_softmax=keep)
    assert [step.site.layer for step in plan.steps] == chosen
    assert sorted(chosen + [site.layer for site in plan.kept]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("layers", "keep", "message"),
    [
        ("0-9", "", r"--layers.*0-9.*4-9.*4.*\(0-3\)"),
        ("2,4,9", "", r"--layers.*2,4,9.*4,9.*4.*\(0-3\)"),
        ("0-999999999", "", r"--layers.*0-999999999.*4-999999999.*4"),
        ("9" * 5000, "", r"layer.*number"),
        ("", "", r"--layers.*empty.*0-3,7.*every:2"),
        (" , ", "", "--layers is empty"),
        ("all", "0-3", r"leaves.*convert"),
        ("all", "4", r"--keep-softmax.*4.*4.*4"),
        ("3-1", "", "3-1 runs backwards"),
        ("one", "", "'one'"),
        ("-1", "", r"--layers.*-1.*0.*-1"),
        ("0--2", "", r"layers.*0.*0--2"),
        ("all", "-1", r"--keep-softmax.*-1.*0"),
        ("every:0", "", r"every:N.*>=.*1"),
        ("every:x", "", r"'x'.*number"),
        ("all", "every:0", r"--keep-softmax.*every:0.*every:N.*>=.*1"),
        ("all", "every:2:4", r"--keep-softmax.*every:2:4.*4"),
        ("all", "x", r"'x'.*0-3,7.*every:4.*every:4:3.*auto:2"),
    ],
)
def test_layers_that_are_not_there_are_refused(shared: Path, layers: str, keep: str, message: str) -> None:
    steps = plan_conversion(str(shared), "gsa")[0].steps
    with pytest.raises(LinearizeError, match=message) as caught:
        choose_layers(Found(tuple(step.site for step in steps), ()), layers, keep)
    assert caught.value.code == Exit.USAGE


def test_an_empty_name_is_no_model() -> None:
    with pytest.raises(LinearizeError, match=r"model.*empty") as caught:
        plan_conversion(" ", "gsa")
    assert caught.value.code == Exit.USAGE


def test_layers_without_softmax_are_refused(shared: Path) -> None:
    steps = plan_conversion(str(shared), "gsa")[0].steps[1::2]
    with pytest.raises(LinearizeError, match=r"--layers.*0-5.*0,2,4-5.*1,3"):
        choose_layers(Found(tuple(step.site for step in steps), ()), "0-5", "", "tiny")


def test_ranges_are_short() -> None:
    assert ranges([5, 0, 1, 2, 7, 8]) == "0-2,5,7-8"
    assert ranges([]) == ""


@pytest.mark.parametrize(
    ("mechanism", "options", "message"),
    [
        ("gsaa", {}, r"'gsaa'.*'gsa'.*Known.*gsa"),
        ("GSA", {}, "'gsa'"),
        ("", {}, r"mechanism.*''"),
        ("gsa", {"slot": "8"}, r"slot.*gsa.*'slots'"),
        ("gsa", {"slots": "0"}, r"slots=0.*>=.*1"),
        ("gsa", {"slots": "many"}, "slots=many"),
        ("gsa", {"slots": "8.5"}, r"slots=8.5"),
        ("gsa", {"damping": "nan"}, r"damping=nan.*>=.*0.1"),
        ("gsa", {"rope": "maybe"}, "rope=maybe"),
        ("gsa", {"norm": "hiden"}, r"norm=hiden.*'hidden'"),
        ("gsa", {"clock": "16", "slots": "8"}, r"clock=16.*<=.*slots=8"),
        ("gsa", {"slots@0": "0"}, r"slots=0.*>=.*1"),
        ("gsa", {"slot@0": "8"}, r"slot.*gsa.*'slots'"),
        ("gsa", {"slots@": "8"}, "slots@"),
        ("gsa", {"slots@2-7": "8"}, r"slots@2-7.*4-7.*0-3"),
        ("gsa", {"slots@7": "8"}, r"slots@7.*7.*0-3"),
        ("gsa", {"slots@a": "8"}, r"slots@a.*'a'.*rows@0-3,7=4"),
    ],
)
def test_mechanisms_and_options_are_checked(
    shared: Path, mechanism: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(LinearizeError, match=message) as caught:
        plan_conversion(str(shared), mechanism, options=options)
    assert caught.value.code == Exit.USAGE


@pytest.mark.parametrize("mechanism", ["gsa", "window"])
def test_new_parameters_are_said_to_be_untrained(
    shared: Path, tmp_path: Path, linearize: Command, mechanism: str
) -> None:
    """A window has none."""
    code, _, err = linearize("convert", shared, "--to", mechanism, "--verify", "none", "-o", tmp_path / "out")
    assert code == 0, err
    assert ("whose new parameters are untrained. Next: " in err) == (mechanism == "gsa")


@pytest.mark.parametrize(
    ("architecture", "files"), [("LlamaForCausalLM", "files"), ("ViTForImageClassification", "images")]
)
def test_how_a_conversion_goes_on_can_be_pasted(shared: Path, architecture: str, files: str) -> None:
    """With the recipe's data, and with one's own."""
    plan, _, natives = plan_conversion(str(shared), "la")
    plan = dataclasses.replace(plan, architecture=architecture)
    run, short, own = next_step(plan, Path("my model"), natives).splitlines()
    parts = ((run, "it: "), (short, " add "), (own, " add "))
    command, less, words = (shlex.split(line.partition(before)[2]) for line, before in parts)
    assert command[:2] == ["linearize", "finetune"]
    assert short.startswith("--dry-run tells the time.")
    assert ("A.txt or A.jsonl with the field text" in own) == (files == "files")
    assert load_recipe(command[2], command[3:]).convert is None
    if files == "files":
        small = load_recipe(command[2], [*command[3:], *less])
        assert [stage.tokens for stage in small.stages] == [10**6] * 2
        assert small.data.pack.seq_len == natives.source_config.max_position_embeddings < 1024
    recipe = load_recipe(command[2], [*command[3:], *words])
    assert (recipe.model.base, recipe.convert) == ("my model", None)
    assert all(files in source.model_fields_set for source in (recipe.data.train, recipe.data.eval))


@pytest.mark.parametrize(
    ("mechanism", "options", "preset"),
    [
        ("window", {}, "window"),
        ("window", {"keep_softmax": "1"}, "hybrid-window"),
        ("window", {"keep_softmax": "1", "sink": "0", "sink_logit": "true"}, "hybrid-window"),
        ("mamba2", {}, "hybrid-native"),
        ("gdn", {"native": "true"}, "hybrid-native-qwen3"),
        ("gdn", {}, "hybrid"),
    ],
)
def test_a_conversion_goes_on_by_the_preset_of_its_layers(
    shared: Path, mechanism: str, options: dict[str, str], preset: str
) -> None:
    """At a higher rate where a window begins far from softmax."""
    kept = options.get("keep_softmax", "")
    given = {name: value for name, value in options.items() if name != "keep_softmax"}
    plan, _, natives = plan_conversion(str(shared), mechanism, options=given, keep_softmax=kept)
    run, short, _ = next_step(plan, Path("my model"), natives).splitlines()
    assert ("optimizer.lr=1e-4" in run) is (given.get("sink") == "0")
    assert shlex.split(run.partition("it: ")[2])[:3] == ["linearize", "finetune", preset]
    recipe = load_recipe(preset, ["model.base=out", *shlex.split(short.partition(" add ")[2])])
    rows = {recipe.data_for(stage).pack.seq_len for stage in recipe.stages}
    assert rows == {natives.source_config.max_position_embeddings}
    assert {stage.tokens for stage in recipe.stages} == {10**6}


@pytest.mark.parametrize(
    ("name", "trains"),
    [
        ("LlamaForCausalLM", True),
        ("BertForMaskedLM", True),
        ("BertModel", True),
        ("BertForSequenceClassification", False),
        ("BartForConditionalGeneration", False),
        ("WhisperForConditionalGeneration", False),
    ],
)
def test_finetune_follows_where_it_has_data(shared: Path, name: str, trains: bool) -> None:
    plan, _, _ = plan_conversion(str(shared), "la")
    head = getattr(transformers, name)
    natives = SourceClasses(head.config_class(), head)
    told = next_step(dataclasses.replace(plan, architecture=name), Path("out"), natives)
    assert told.startswith("distil it" if trains else "train its mixers in a loop of your own")
    assert (name in told) != trains


def test_a_conversion_by_a_recipe_goes_on_with_it_and_its_values(shared: Path) -> None:
    plan, _, natives = plan_conversion(str(shared), "la")
    data = "data.train={files: [a.txt]}"
    told = ("hybrid-native", "model.base=m", data, "convert.keep_softmax=every:4")
    command = shlex.split(next_step(plan, Path("out"), natives, told).splitlines()[0].partition("it: ")[2])
    assert command == ["linearize", "finetune", "hybrid-native", data, "model.base=out", "convert=null"]
    assert next_step(plan, Path("out"), natives, ("hybrid", "model.base=m")) == next_step(plan, Path("out"), natives)


def test_published_options_come_with_faithful(shared: Path) -> None:
    options = plan_conversion(str(shared), "gsa", options={"faithful": "true", "slots": "8"})[0].steps[0].options
    assert (options["feature_map"], options["rope"], options["slots"]) == ("swish", False, 8)
    assert "faithful" not in options


def test_options_of_some_layers(source: Path, tmp_path: Path) -> None:
    """Are those of the layers that they name, in the plan, the saved model and the card."""
    given = {"slots@1-2": 16, "slots@2": "4", "faithful@3": "true"}
    folder = convert_folder(source, tmp_path / "linear", options=given)
    plan = read_plan(folder)
    assert [step.options["slots"] for step in plan.steps] == [8, 16, 4, 8]
    assert [step.options["rope"] for step in plan.steps] == [True, True, True, False]
    model = load(folder)
    assert [mixer.slots for mixer in mixers_of(model).values()] == [8, 16, 4, 8]
    assert model(tokens(1, 9)).logits.isfinite().all()
    card = (folder / "README.md").read_text()
    assert "layer 1: `slots=16`; layer 2: `slots=4`; layer 3: `" in card
    row = re.findall(r"\| options \| `(.+?)`", card)[0]
    assert "rope=true" in row
    assert resolve_options("gsa", parse_settings(row.split(", "))) == plan.steps[0].options


# ---------------------------------------------------------------- bad sources, each with its exit code


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard_up(folder: Path) -> None:
    small_model("llama").save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()


def of_dtype(part: str, dtype: torch.dtype) -> Callable[[Path], None]:
    """The tensors of that name as another kind of numbers."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        save_file({n: t.to(dtype) if part in n else t for n, t in tensors.items()}, path, {"format": "pt"})

    return damage


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def truncate_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:40])


def empty_shard(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def lose_shard(folder: Path) -> None:
    shard_up(folder)
    (folder / "model-00002-of-00005.safetensors").unlink(missing_ok=True)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def leave_the_folder(folder: Path) -> None:
    shard_up(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))


def index_of_numbers(folder: Path) -> None:
    shard_up(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": 3}}))


def lie(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A shard whose header says something else than its bytes."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return damage


def wider(header: dict[str, Any]) -> None:
    header["lm_head.weight"]["shape"] = [97, 64]


def beyond(header: dict[str, Any]) -> None:
    start, end = header["lm_head.weight"]["data_offsets"]
    header["lm_head.weight"]["data_offsets"] = [start + 10**9, end + 10**9]


def overlapping(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]


def not_numbers(header: dict[str, Any]) -> None:
    header["lm_head.weight"]["shape"] = "97x32"


def lose_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def pickle_weights(folder: Path, tensors: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


class Bomb:
    """Unpickled with trust, this writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def booby_trap(folder: Path) -> None:
    pickle_weights(folder, {"lm_head.weight": Bomb(folder / "executed")})


def pickled_list(folder: Path) -> None:
    pickle_weights(folder, [torch.zeros(1)])


def pickled_of_another_shape(folder: Path) -> None:
    pickle_weights(folder, small_model("llama", hidden_size=16).state_dict())


def garbage_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle at all")


def write_config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text) and None


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def own_code(folder: Path) -> None:
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (folder / "modeling_own.py").write_text("raise SystemExit('this must not run')\n")


def other_architecture(folder: Path) -> None:
    transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=97).save_pretrained(folder)


QUANTIZED = {"quant_method": "gptq", "bits": 4}
BAD_SOURCES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "has no config.json: not a Transformers model folder",
    ),
    "config is no JSON": (write_config("{"), "config.json is not valid JSON"),
    "config is a list": (write_config("[]"), "config.json holds list, expected an object"),
    "no model type": (write_config("{}"), "model_type is None, not a name"),
    "model type is a number": (config(model_type=7), "model_type is 7, not a name"),
    "unknown model type": (config(model_type="lama"), "config.json cannot be used"),
    "size is a string": (config(hidden_size="32"), "config.json cannot be used: .*[^:]$"),
    "size is zero": (config(num_attention_heads=0), "(cannot be used|cannot be probed)"),
    "no layers": (config(num_hidden_layers=0), "no attention found"),
    "no head": (config(architectures=["LlamaModel"]), "disagree: unexpected lm_head.weight"),
    "no attention": (other_architecture, "no attention found: MambaForCausalLM .* modules seen: .*MambaMixer"),
    "quantized": (config(quantization_config=QUANTIZED), r"is quantized \(gptq\): surgery needs float weights"),
    "adapter": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        r"adapter_config\.json: source is a base and an adapter\. Merge the adapter first",
    ),
    "own code": (own_code, r"ships its own code \(modeling_own.py\)\. Read it, then pass --trust-remote-code"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "truncated": (truncate, r"model\.safetensors is damaged or cut short: tensor .* ends at byte"),
    "truncated header": (truncate_header, "damaged or cut short: its header claims"),
    "empty shard": (empty_shard, "damaged or cut short"),
    "missing shard": (lose_shard, r"index\.json names model-0000\d-of-0000\d\.safetensors, which is missing"),
    "index leaves the folder": (leave_the_folder, "leaves the folder"),
    "index of numbers": (index_of_numbers, "must map tensor names to file names"),
    "header lies about a shape": (lie(wider), r"tensor lm_head\.weight has \d+ bytes, which its shape"),
    "header points beyond": (lie(beyond), r"tensor lm_head\.weight ends at byte"),
    "header overlaps": (lie(overlapping), "overlap or leave gaps"),
    "header without numbers": (lie(not_numbers), "damaged or cut short"),
    "weights are whole numbers": (of_dtype("", torch.int8), r"embed_tokens\.weight holds int8: surgery needs float"),
    "a weight is true or false": (of_dtype("1.mlp.up", torch.bool), r"layers\.1\.mlp\.up_proj\.weight holds bool"),
    "weights miss a tensor": (lose_tensor, r"disagree: missing model\.layers\.1\.self_attn\.q_proj\.weight.* save"),
    "config has other shapes": (
        config(intermediate_size=40),
        r"disagree: model\.\S+ is \[\S+ \d+\], the config asks for",
    ),
    "config has fewer layers": (config(num_hidden_layers=3), r"disagree: unexpected model\.layers\.3\.\S+, .* \.\.\."),
    "config has more layers": (config(num_hidden_layers=5), r"disagree: missing model\.layers\.4\."),
    "pickle with code": (booby_trap, "not a plain pickle of tensors .* It was not executed"),
    "pickle of a list": (pickled_list, "does not hold a plain mapping of names to tensors"),
    "pickle of another shape": (pickled_of_another_shape, r"disagree: \S+ is \[.*\], the config asks for"),
    "pickle of garbage": (garbage_pickle, "not a plain pickle of tensors"),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_a_bad_source_is_refused_and_nothing_is_left(source: Path, name: str) -> None:
    damage, message = BAD_SOURCES[name]
    damage(source)
    before = snapshot(source.parent)
    with pytest.raises(LinearizeError, match=message) as caught:
        convert_folder(source, source.parent / "new" / "linear")
    assert caught.value.code == Exit.INCOMPATIBLE
    assert "\n" not in caught.value.message
    assert snapshot(source.parent) == before
    assert [path.name for path in source.parent.iterdir()] == ["source"]
    assert not (source / "executed").exists()


def test_the_trap_of_that_pickle_works(tmp_path: Path) -> None:
    torch.save({"w": Bomb(tmp_path / "executed")}, tmp_path / "w.bin")
    with pytest.raises(Exception, match="weights_only"):
        torch.load(tmp_path / "w.bin", weights_only=True)
    torch.load(tmp_path / "w.bin", weights_only=False)
    assert (tmp_path / "executed").exists()


def test_a_converted_model_is_not_converted_again_unasked(source: Path) -> None:
    folder = convert_folder(source, source.parent / "linear", "0-1")
    with pytest.raises(LinearizeError, match=r"'gsa'.*0-1.*convert=null") as caught:
        plan_conversion(str(folder), "gsa")
    assert caught.value.code == Exit.INCOMPATIBLE
    edit_config(folder, linearize="by hand")
    with pytest.raises(LinearizeError, match=r"config\.json.*linearize"):
        plan_conversion(str(folder), "gsa")


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("no such folder", Exit.INCOMPATIBLE, "no such folder"),
        ("nobody/nothing-of-this-name", Exit.HUB, "'nobody/nothing-of-this-name'"),
    ],
)
def test_a_model_that_is_nowhere(model: str, code: Exit, message: str) -> None:
    with pytest.raises(LinearizeError, match=message) as caught:
        plan_conversion(model, "gsa")
    assert caught.value.code == code


def test_a_model_beside_one_that_is_nowhere_is_named(shared: Path) -> None:
    wrong = shared.with_name(f"{shared.name}s")
    with pytest.raises(LinearizeError, match=rf"\(user/repo\).*'{shared}'"):
        plan_conversion(str(wrong), "gsa")


def test_a_dry_run_tells_where_a_real_run_writes(shared: Path, tmp_path: Path, linearize: Command) -> None:
    """And that it is refused, as a real run is."""
    for name, more, told in (
        ("new", (), ""),
        ("old", (), "has 1 file already"),
        ("old", ("--overwrite",), "not write"),
    ):
        (tmp_path / "old").mkdir(exist_ok=True)
        (tmp_path / "old" / "mine.txt").touch()
        ask = ("convert", shared, "--to", "gsa", "-o", tmp_path / name, *more)
        code, _, err = linearize(*ask, "--dry-run")
        assert (code, holds(err, f"{tmp_path / name}")) == (0, True), err
        assert ("note: a real run is refused: " in err and told in err) == bool(told), err
        if told:
            code, _, again = linearize(*ask)
            assert (code, told in again) == (Exit.USAGE, True)
            assert "new params" not in again  # refused before it plans, which may measure layers for minutes


def test_a_file_is_no_model(source: Path) -> None:
    with pytest.raises(LinearizeError, match=r"give.*folder") as caught:
        plan_conversion(str(source / "model.safetensors"), "gsa")
    assert caught.value.code == Exit.INCOMPATIBLE


def test_an_unknown_dtype_is_refused(shared: Path) -> None:
    with pytest.raises(LinearizeError, match=r"--dtype.*int8") as caught:
        plan_conversion(str(shared), "gsa", dtype="int8")
    assert caught.value.code == Exit.USAGE


# ---------------------------------------------------------------- bad outputs


@pytest.mark.parametrize("where", ["source", "source/inside", ".", "source/../source"])
def test_the_output_stays_clear_of_the_source(source: Path, where: str) -> None:
    before = snapshot(source.parent)
    with pytest.raises(LinearizeError, match=r"separate.*folders") as caught:
        convert_folder(source, source.parent / where)
    assert caught.value.code == Exit.USAGE
    assert snapshot(source.parent) == before


def test_an_output_in_the_way_is_kept(source: Path) -> None:
    output = source.parent / "linear"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    plan = plan_conversion(str(source), "gsa", options={"slots": 8})
    with pytest.raises(LinearizeError, match=r"1.*--overwrite.*linearize") as caught:
        convert(*plan, output, level="none")
    assert caught.value.code == Exit.USAGE
    with pytest.raises(LinearizeError, match=r"linearize.*\(notes.txt\)"):
        convert(*plan, output, level="none", overwrite=True)
    assert snapshot(output) == {"notes.txt": b"mine"}
    (source.parent / "file").write_text("mine")
    with pytest.raises(LinearizeError, match=r"choose.*-o"):
        convert(*plan, source.parent / "file", level="none", overwrite=True)


def test_overwrite_replaces_what_is_ours(source: Path) -> None:
    output = convert_folder(source, source.parent / "linear")
    plan = plan_conversion(str(source), "gsa", layers="1", options={"slots": 4})
    with pytest.raises(LinearizeError, match="--overwrite"):
        convert(*plan, output, level="none")
    convert(*plan, output, level="none", overwrite=True, say=lambda text: None)
    assert {path.name for path in source.parent.iterdir()} == {"source", "linear"}
    assert [layer["site"]["layer"] for layer in load(output).config.linearize["layers"]] == [1]
    (output / "more.txt").write_text("mine")
    with pytest.raises(LinearizeError, match=r"\(more.txt\)"):
        convert(*plan, output, level="none", overwrite=True)


def test_an_empty_folder_is_a_fine_output(source: Path) -> None:
    (source.parent / "linear").mkdir()
    load(convert_folder(source, source.parent / "linear"))


def test_an_output_that_cannot_be_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = source.parent / "read-only"
    place.mkdir()
    real = Path.mkdir

    # Permissions do not bind the root user, who may run this.
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        if place in self.parents:
            raise PermissionError(13, "Permission denied", str(self))
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(LinearizeError, match="linear") as caught:
        convert_folder(source, place / "linear")
    assert caught.value.code == Exit.RESOURCE
    assert not list(place.iterdir())


def test_a_full_disk(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from linearize.checkpoint import write as checkpoint

    plan = plan_conversion(str(source), "gsa", options={"slots": 8})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        with pytest.raises(LinearizeError, match=r"(KiB|MiB)") as caught:
            convert(*plan, source.parent / "linear", level="none")
        assert caught.value.code == Exit.RESOURCE

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_shard", full)
    with pytest.raises(LinearizeError, match=r"space.*disk") as caught:
        convert(*plan, source.parent / "deep" / "linear", level="none")
    assert caught.value.code == Exit.RESOURCE
    assert [path.name for path in source.parent.iterdir()] == ["source"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, LinearizeError("verification failed", Exit.CHECK_FAILED)])
def test_an_interrupted_conversion_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    from linearize import convert as story

    def stop(*args: Any) -> str:
        raise error

    monkeypatch.setattr(story, "verify", stop)
    old = source.parent / "old"
    plan = plan_conversion(str(source), "gsa", options={"slots": 8})
    with pytest.raises((KeyboardInterrupt, LinearizeError)):
        convert(*plan, old)
    assert [path.name for path in source.parent.iterdir()] == ["source"]
    monkeypatch.undo()
    convert_folder(source, old)
    before = snapshot(old)
    monkeypatch.setattr(story, "verify", stop)
    with pytest.raises((KeyboardInterrupt, LinearizeError)):
        convert(*plan, old, overwrite=True)
    assert snapshot(old) == before


# ---------------------------------------------------------------- what else is in the folder


def test_files_that_are_read_travel_and_others_stay(source: Path) -> None:
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "LICENSE").write_text("terms")
    (source / "README.md").write_text("the source's card")
    (source / "model.onnx").write_bytes(b"graph")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("ref")
    (source / "assets").mkdir()
    (source / "assets" / "results.json").write_text("{}")
    (source / "curve.csv").write_text("1,2")
    for name in ("aws.json", "notes.txt", "deploy.py", "mine.model", "vocab.bak.json"):
        (source / name).write_text("secret")
    left = unread(plan_conversion(str(source), "gsa")[1])
    folder = convert_folder(source, source.parent / "linear")
    names = set(snapshot(folder))
    assert {"tokenizer.json", "generation_config.json", "chat_template.jinja", "LICENSE"} <= names
    secrets = {"aws.json", "notes.txt", "deploy.py", "mine.model", "vocab.bak.json"}
    assert not {"model.onnx", ".git/HEAD", "model.safetensors", "assets/results.json", "curve.csv", *secrets} & names
    assert set(left) == {"assets/", "curve.csv", "model.onnx", *secrets}
    assert not secrets & set(json.loads((folder / "linearize.json").read_text())["files"])
    assert load(folder).generation_config.temperature == 0.7


def test_every_file_of_every_tokenizer_travels() -> None:
    """The names are those of the tokenizers' own source, read without importing a hundred modules."""
    folder = Path(transformers.__file__).parent / "models"
    found = set()
    for path in folder.glob("*/tokenization_*.py"):
        blocks = re.findall(r"(?i)vocab_files_names\b[^=\n]*=\s*(\{.*?\})", path.read_text("utf-8"), re.DOTALL)
        found |= {name for block in blocks for name in re.findall(r':\s*"([\w.-]+)"', block)}
    assert len(found) > 20
    assert found <= NAMES


@pytest.mark.parametrize("where", ["elsewhere", "the blobs of the Hub's cache", "another name in the folder"])
def test_links_out_of_the_source_are_refused(source: Path, where: str) -> None:
    """vocab.txt -> /etc/passwd would be copied, and pushed."""
    target = source.parent / "theirs"
    folder = source
    if where == "the blobs of the Hub's cache":
        folder = source.parent / "models--a--b" / "snapshots" / "abc"
        shutil.copytree(source, folder)
        target = folder.parent.parent / "blobs" / "0"
        target.parent.mkdir()
    elif where != "elsewhere":
        target = folder / "words"
    target.write_text("secret")
    (folder / "vocab.txt").symlink_to(target)
    if where == "elsewhere":
        with pytest.raises(LinearizeError, match=r"vocab.txt.*source's") as caught:
            plan_conversion(str(folder), "gsa")
        assert caught.value.code == Exit.INCOMPATIBLE
    else:
        linear = convert_folder(folder, source.parent / "linear")
        assert (linear / "vocab.txt").read_text() == "secret"
        assert not (linear / "vocab.txt").is_symlink()


@pytest.mark.parametrize("layers", ["all", HYBRID])
def test_the_native_classes_refuse_a_converted_folder(source: Path, layers: str) -> None:
    """They would load the source's weights, run softmax, and only report the mixers as unused."""
    folder = convert_folder(source, source.parent / "linear", layers)
    load(folder).save_pretrained(source.parent / "again")
    for place in (folder, source.parent / "again"):
        for native in (transformers.LlamaForCausalLM, transformers.LlamaModel):
            with pytest.raises(ValueError, match="layers"):
                native.from_pretrained(place)
    assert torch.equal(logits(load(source.parent / "again"), tokens(1, 7)), logits(load(folder), tokens(1, 7)))


def test_the_manifest_and_the_card_tell_the_facts(source: Path) -> None:
    folder = convert_folder(source, source.parent / "linear", HYBRID, options={"rope": False})
    manifest = json.loads((folder / MANIFEST).read_text())
    assert set(manifest["files"]) == set(snapshot(folder))
    assert set(manifest["versions"]) == {"linearize", "torch", "transformers"}
    plan = Plan.from_json(manifest["plan"])
    assert (plan.source, plan.revision, plan.architecture, plan.model_type) == (
        "source",
        None,
        "LlamaForCausalLM",
        "llama",
    )
    saved = json.loads((folder / "config.json").read_text())
    assert saved["linearize"] == json.loads(json.dumps(plan.spec()))
    assert saved["model_type"] == "llama"
    card = (folder / "README.md").read_text()
    for fact in (
        "`source` with its softmax",
        "- gsa",
        "GSA in layers 0,2; layers 1,3 keep softmax",
        "untrained: distil before use",
        "trust_remote_code=True",
        f"{plan.new_parameters:,}",
        f"{sum(step.state_bytes for step in plan.steps):,} bytes",
        "rope=false",
    ):
        assert fact in card


def test_the_same_seed_gives_the_same_mixers(source: Path) -> None:
    plan = plan_conversion(str(source), "gsa", options={"slots": 8})
    shards = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)
        convert(*plan, source.parent / str(number), level="none", seed=seed, say=lambda text: None)
        shards.append((source.parent / str(number) / "model-mixers.safetensors").read_bytes())
    assert shards[0] == shards[1] != shards[2]


# ---------------------------------------------------------------- sources with code of their own

OWN_CONFIG = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
OWN_MODEL = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
from .own_parts import factor

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * factor
        return out
"""


def source_with_code(folder: Path) -> Path:
    small_model("llama").save_pretrained(folder)
    (folder / "configuration_own.py").write_text(OWN_CONFIG)
    (folder / "modeling_own.py").write_text(OWN_MODEL)
    (folder / "own_parts.py").write_text("factor = 3.0\nWORDS = 'own_words.txt'\n")
    (folder / "own_words.txt").write_text("a b")
    (folder / "unused.py").write_text("key = 'secret'\n")
    entries = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_config(
        folder,
        model_type="own_llama",
        architectures=["OwnForCausalLM"],
        auto_map=entries | {"AutoTokenizer": ["own_parts.OwnTokenizer", None]},
    )
    return folder


@pytest.mark.slow
def test_a_source_with_its_own_code(tmp_path: Path) -> None:
    source = source_with_code(tmp_path / "source")
    with pytest.raises(LinearizeError, match=r"ships.*code") as caught:
        plan_conversion(str(source), "gsa")
    assert caught.value.code == Exit.INCOMPATIBLE
    planned = plan_conversion(str(source), "gsa", layers=HYBRID, trust_remote_code=True)
    assert (
        meta_model(None, planned, None, True).num_parameters()
        == planned[0].new_parameters + small_model("llama").num_parameters()
    )
    folder = convert_folder(source, tmp_path / "linear", HYBRID, trust_remote_code=True, level="full")
    assert (folder / "own_words.txt").read_text() == "a b"  # its code names it
    assert not (folder / "unused.py").exists()
    for path in source.iterdir():
        path.unlink()  # the result stands alone
    model, ids = load(folder), tokens(2, 9)
    assert model.config.auto_map["AutoTokenizer"] == ["own_parts.OwnTokenizer", None]
    with model.teacher():
        assert torch.equal(logits(model, ids), 3.0 * logits(small_model("llama"), ids))


def test_code_that_would_be_overwritten_is_refused(tmp_path: Path) -> None:
    source = source_with_code(tmp_path / "source")
    (source / "attention_hooks.py").write_text("theirs = True\n")
    (source / "own_parts.py").write_text("from .attention_hooks import theirs\nfactor = 3.0\n")
    with pytest.raises(LinearizeError, match=r"attention_hooks\.py") as caught:
        convert_folder(source, tmp_path / "linear", trust_remote_code=True)
    assert caught.value.code == Exit.INCOMPATIBLE
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_headers_are_read_as_they_are(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 2, dtype=torch.bfloat16), "empty": torch.zeros(0, 4), "scalar": torch.tensor(1)}
    save_file(tensors, tmp_path / "x.safetensors")
    found = {name: (t.dtype, t.shape) for name, t in read_header(tmp_path / "x.safetensors").items()}
    assert found == {"a": ("BF16", (3, 2)), "empty": ("F32", (0, 4)), "scalar": ("I64", ())}
    save_file({}, tmp_path / "none.safetensors")
    assert read_header(tmp_path / "none.safetensors") == {}
