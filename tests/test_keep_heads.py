"""`--keep-heads` from the command line to a model that writes: plan, files, decoding, batches, training, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TOLERANCE, Command, holds, relative_error
from models import SMALL, convert_folder, load, logits, save_source, small_model, tokens
from transformers import DynamicCache

from linearize.checkpoint.manifest import read_plan
from linearize.convert import convert, plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.plan.keep import parse_groups, regrouped, written
from linearize_kernels.hf.attention_hooks import mixers_of
from linearize_kernels.hf.cache import record_past

HEADS = "0:1;3:0"
KV = ("num_key_value_heads", "intermediate_size", "max_position_embeddings")  # Falcon has other names, or none
OPTIONS = {"slots": 8, "chunk_size": 16}


def close(ours: torch.Tensor, reference: torch.Tensor) -> bool:
    return relative_error(ours, reference) < 2 * TOLERANCE[torch.float32]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("heads") / "source")


@pytest.fixture(scope="module")
def folder(source: Path) -> Path:
    """A model of four layers, of which two have a KV head of two that keeps softmax; verified in a clean process."""
    return convert_folder(source, source.parent / "heads", level="full", keep_heads=HEADS)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


# ---------------------------------------------------------------- the model


def test_heads_that_are_kept_are_the_sources_and_the_state_is_theirs(model: Any, folder: Path) -> None:
    plan = read_plan(folder)
    assert plan.softmax_groups == [(0, 1), (3, 0)]
    assert written(plan.softmax_groups) == HEADS
    mixers = mixers_of(model)
    assert [mixer.softmax and mixer.softmax.groups for mixer in mixers.values()] == [(1,), None, None, (0,)]
    assert [mixer.site.heads for mixer in mixers.values()] == [2, 4, 4, 2]
    cache = model(tokens(1, 30), use_cache=True).past_key_values
    held = [layer.state.softmax.keys.shape if hasattr(layer.state, "softmax") else None for layer in cache.layers]
    assert held == [(1, 30, 1, 8), None, None, (1, 30, 1, 8)]
    at = {n: plan.cache_bytes(n) for n in (0, 1000)}
    assert at[1000]["source"] == 1000 * 4 * 2 * (8 + 8) * 4
    assert at[1000]["converted"] - at[0]["converted"] == 1000 * 2 * (8 + 8) * 4
    assert sum(step.state_bytes for step in plan.steps) == at[0]["converted"]


@pytest.mark.slow
def test_verify_counts_the_state_beside_the_keys_of_those_heads(linearize: Command, folder: Path) -> None:
    code, out, err = linearize("verify", folder, "--strict", "--json")
    assert code == 0, err
    checks = {check["name"]: check["status"] for check in json.loads(out)["checks"]}
    assert {"prefill and steps", "left padding", "packed documents", "constant state"} <= checks.keys()
    assert {*checks.values()} == {"passed"}


def test_all_heads_but_one_nearly_are_the_source(tmp_path: Path, source: Path) -> None:
    """The output of a head that is kept is softmax's: with output projections of the others zero, so is the model."""
    heads = "0:1;1:1;2:1;3:1"
    changed = convert_folder(source, tmp_path / "most", keep_heads=heads)
    hybrid, original = load(changed), small_model("llama")
    for net in (hybrid, original):
        for layer in net.model.layers:
            layer.self_attn.o_proj.weight.data[:, :16] = 0.0
    ids = tokens(2, 40)
    assert close(logits(hybrid, ids), logits(original, ids))
    with hybrid.teacher():
        assert torch.equal(logits(hybrid, ids), logits(original, ids))


def test_a_cache_a_batch_and_packed_documents_give_what_one_pass_gives(model: Any) -> None:
    ids = tokens(2, 40)
    whole = logits(model, ids)
    cache, parts = DynamicCache(), []
    for part in ids.split([11, 1, 1, 17, 10], 1):
        parts.append(model(part, past_key_values=cache, use_cache=True).logits)
    assert close(torch.cat(parts, 1), whole)
    padded = torch.cat([torch.zeros(2, 7, dtype=torch.long), ids], 1)
    mask = (torch.arange(47) >= 7).long().expand(2, 47)
    assert close(logits(model, padded, attention_mask=mask)[:, 7:], whole)
    row = torch.cat([ids[:1], ids[1:]], 1)
    places = torch.arange(40).repeat(2)[None]
    lengths = torch.tensor([0, 40, 80], dtype=torch.int32)
    for told in (
        {"position_ids": places},
        {"position_ids": places, "cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths},
    ):
        assert close(logits(model, row, **told).view(2, 40, -1), whole)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}, {"prompt_lookup_num_tokens": 3}])
def test_generation_in_every_way_is_that_without_a_cache(model: Any, how: dict[str, Any]) -> None:
    ids = tokens(1, 14).repeat(1, 2)
    wanted = {"max_new_tokens": 12, "do_sample": False}
    plain = {"num_beams": how["num_beams"]} if "num_beams" in how else {}
    assert model.generate(ids, **wanted, **how).equal(model.generate(ids, **wanted, **plain, use_cache=False))


def test_tokens_can_be_dropped_from_a_cache_that_records(model: Any) -> None:
    ids, cache = tokens(2, 30), DynamicCache()
    record_past(cache)
    model(ids[:, :10], past_key_values=cache)
    for t in range(10, 26):
        model(ids[:, t : t + 1], past_key_values=cache)
    assert not any(hasattr(call.before, "softmax") for call in cache.layers[0].past), "keys are held more than once"
    cache.crop(-9)
    again = model(ids[:, 17:], past_key_values=cache).logits
    assert close(again, logits(model, ids)[:, 17:])
    cache.crop(-16)
    assert close(model(ids[:, 14:], past_key_values=cache).logits, logits(model, ids)[:, 14:])


def test_tokens_behind_a_sliding_window_can_be_dropped_too(tmp_path: Path) -> None:
    """The heads kept forget what the window hides, so states that are recorded keep their own keys."""
    model = load(convert_folder(save_source(tmp_path / "source", "mistral"), tmp_path / "heads", keep_heads="1:0"))
    ids, cache = tokens(2, 30), DynamicCache()
    record_past(cache)
    for part in ids[:, :24].split([4, 5, 1, 1, 6, 7], 1):
        model(part, past_key_values=cache)
    assert cache.layers[1].state.softmax.keys.shape[1] == 5
    cache.crop(-18)
    assert close(model(ids[:, 6:], past_key_values=cache).logits, logits(model, ids)[:, 6:])


@pytest.mark.parametrize("name", ["gemma2", "mistral", "gpt_oss", "gpt2", "falcon"])
def test_softmax_of_other_architectures_is_followed(tmp_path: Path, name: str) -> None:
    """Windows, soft caps, sinks, scales of their own, and softmax in code of their own: all heads but the first
    group's are kept, whose output counts for nothing."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
        "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    }
    if name in kinds:
        kind, more = kinds[name]
        torch.manual_seed(5)
        common = {key: value for key, value in SMALL.items() if name != "falcon" or key not in ("head_dim", *KV)}
        original = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**common, **more))
        original.eval().save_pretrained(tmp_path / "source")
    else:
        save_source(tmp_path / "source", name)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval()
    groups = 4 if name in ("gpt2", "falcon") else 2  # Falcon repeats shared keys itself
    heads = regrouped(f"{layer}:{head}" for layer in range(4) for head in range(1, groups))
    hybrid = load(convert_folder(tmp_path / "source", tmp_path / "heads", keep_heads=heads))
    for net in (original, hybrid):
        for path, module in net.named_modules():
            if path.rpartition(".")[2] in ("o_proj", "dense", "c_proj") and "mlp" not in path:
                weight = module.weight.data
                first = (weight.shape[0] if name == "gpt2" else weight.shape[1]) // groups
                if name == "gpt2":
                    weight[:first] = 0.0
                else:
                    weight[:, :first] = 0.0
    ids = tokens(2, 30)
    assert close(logits(hybrid, ids), logits(original, ids))
    cache, parts = DynamicCache(config=hybrid.config), []
    for part in ids.split([11, 1, 1, 17], 1):
        parts.append(hybrid(part, past_key_values=cache, use_cache=True).logits)
    assert close(torch.cat(parts, 1), logits(original, ids))


# ---------------------------------------------------------------- the way there


def run(linearize: Command, source: Path, *arguments: Any) -> tuple[int, str, str]:
    settings = [part for name, value in OPTIONS.items() for part in ("--set", f"{name}={value}")]
    return linearize("convert", source, "--to", "gsa", *settings, *arguments)


def test_the_command_says_what_it_keeps(linearize: Command, source: Path) -> None:
    code, out, err = run(linearize, source, "--keep-heads", "3:0; 0:1", "--keep-softmax", "1", "--dry-run", "--json")
    assert code == 0, err
    plan = json.loads(out)["plan"]
    assert [step["site"]["softmax_groups"] for step in plan["steps"]] == [[1], [], [0]]
    assert [site["layer"] for site in plan["kept"]] == [1]
    assert holds(err, "(layer:head)", "0:1;3:0")
    assert "softmax in 1/2" in err
    assert "+ KV cache" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--keep-heads", "3"], 2, ("'3'", '"3:0,1;7:2"')),
        (["--keep-heads", "3:0;3:0"], 2, ("3:0", "named")),
        (["--keep-heads", ";"], 2, ("names", "head")),
        (["--keep-heads", "9:0"], 2, ("9", "become", "0-3")),
        (["--keep-heads", "2:0", "--keep-softmax", "2"], 2, ("2", "become")),
        (["--keep-heads", "2:2"], 2, ("2", "heads", "0", "1")),
        (["--keep-heads", "2:0,1"], 2, ("layer", "--keep-softmax", "2")),
        (["--keep-heads", "auto"], 2, ("auto:2", "auto:25%")),
        (["--keep-heads", "auto:5"], 2, ("keeps", "5", "4")),
        (["--keep-heads", "2:0", "--set", "rope=false"], 2, ("embedding", "features")),
        (["--keep-heads", "auto:1", "--set", "rope=false"], 2, ("embedding", "features")),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_written(
    linearize: Command, source: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    found, _, err = run(linearize, source, *arguments, "-o", tmp_path / "out")
    assert (found, holds(err, *message)) == (code, True), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "changes", "mechanism", "message"),
    [
        ("BloomConfig", {"n_layer": 2, "n_head": 4, "hidden_size": 32}, "gsa", "is given alibi"),
        ("Llama4TextConfig", {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 16}, "gsa",
         r"distant.*tokens"),
        ("LlamaConfig", {"num_key_value_heads": 1}, "gsa", r"becomes.*several"),
        ("ViTConfig", {"image_size": 16, "patch_size": 4}, "la", r"bidirectional.*softmax"),
    ],
)  # fmt: skip
def test_attention_whose_heads_cannot_be_kept_is_named(
    tmp_path: Path, name: str, changes: dict[str, Any], mechanism: str, message: str
) -> None:
    common = {} if name == "BloomConfig" else SMALL
    config = getattr(transformers, name)(**{**common, **changes})
    config.architectures = ["ViTForImageClassification"] if name == "ViTConfig" else None
    config.save_pretrained(tmp_path)
    asked: dict[str, Any] = {"allow_drop": ["alibi"] if name == "BloomConfig" else ()}
    heads = "auto:1" if name == "LlamaConfig" else "0:0"
    with pytest.raises(LinearizeError, match=message) as caught:
        plan_conversion(str(tmp_path), mechanism, keep_heads=heads, weights=False, **asked)
    assert caught.value.code == Exit.INCOMPATIBLE


def test_a_gate_of_features_behind_the_rotation_gives_way(source: Path) -> None:
    """GLA rotates behind its feature map where it can; beside heads that keep softmax, q and k come rotated."""
    plan, _, _ = plan_conversion(str(source), "gla", keep_heads="1:1", weights=False)
    assert [step.options["rope"] for step in plan.steps] == ["after", "before", "after", "after"]


def test_further_layers_have_the_options_of_those_with_heads_and_without(source: Path, tmp_path: Path) -> None:
    def further(name: str, **asked: Any) -> Any:
        planned = plan_conversion(str(source), "gla", keep_softmax="3", keep_heads="1:1", **asked)
        convert(*planned, tmp_path / name, level="none", say=lambda text: None)
        return plan_conversion(str(tmp_path / name), None, layers="3", weights=False)[0]

    assert [step.options["rope"] for step in further("auto").steps] == ["after", "before", "after", "after"]
    with pytest.raises(LinearizeError, match="have several options"):
        further("chosen", options={"rope@0": "before"})


def test_converting_again_restores_and_adds_heads(tmp_path: Path, folder: Path) -> None:
    def again(**asked: Any) -> Any:
        restore = asked.pop("restore", "")
        return plan_conversion(str(folder), asked.pop("mechanism", None), restore=restore, **asked)

    planned = again(restore="3")
    assert planned[0].softmax_groups == [(0, 1)]
    convert(*planned, tmp_path / "restored", level="none", say=lambda text: None)
    model = load(tmp_path / "restored")
    assert {path.split(".")[2]: bool(mixer.softmax) for path, mixer in mixers_of(model).items()} == {
        "0": True, "1": False, "2": False,
    }  # fmt: skip
    back = plan_conversion(str(tmp_path / "restored"), None, layers="3", keep_heads="3:1")
    assert back[0].softmax_groups == [(0, 1), (3, 1)]
    convert(*back, tmp_path / "back", level="none", say=lambda text: None)
    ids = tokens(2, 20)
    assert logits(load(tmp_path / "back"), ids).isfinite().all()
    for asked, message in (
        ({"keep_heads": "1:0", "restore": "3"}, r"linear layers of .* stay as they are"),
        ({"keep_heads": "auto:1", "restore": "3"}, "compares heads of a source"),
    ):
        with pytest.raises(LinearizeError, match=message):
            again(**asked)
    with pytest.raises(LinearizeError, match=r"1.*become.*3"):
        plan_conversion(str(tmp_path / "restored"), None, layers="3", keep_heads="1:1")


def test_a_cache_of_other_heads_is_refused(tmp_path: Path, source: Path, model: Any) -> None:
    other = load(convert_folder(source, tmp_path / "other", keep_heads="0:0;3:0"))
    cache = model(tokens(1, 5), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"softmax.*\[1\]"):
        other(tokens(1, 1), past_key_values=cache)


def test_names_of_heads_go_both_ways() -> None:
    assert parse_groups(" 7:2 ; 3:1, 0") == [(3, 0), (3, 1), (7, 2)]
    assert written([(7, 2), (3, 1), (3, 0)]) == regrouped(["3:0", "7:2", "3:1"]) == "3:0,1;7:2"
