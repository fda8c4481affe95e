"""What a linear layer will lack: said by name, and refused without consent where training cannot make up for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from conftest import Command, holds
from models import save_source, small_config

from linearize.convert import plan_conversion
from linearize.errors import Exit, LinearizeError
from linearize.job.source import plan_base
from linearize.plan.dropped_features import KNOWN, check_dropped_features
from linearize.probe.probe import probe
from linearize.recipe.recipe import load_recipe
from linearize_kernels.mixer import AttentionSite

TINY = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows distance by ALiBi alone; its config is all that a plan reads."""
    folder = tmp_path_factory.mktemp("drops") / "bloom"
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=4, n_head=4)
    config.architectures = ["BloomForCausalLM"]
    config.save_pretrained(folder)
    return folder


def plan(folder: Path, **arguments: Any) -> Any:
    return plan_conversion(str(folder), "gsa", weights=False, **arguments)[0]


def refusal(*arguments: Any, **named: Any) -> LinearizeError:
    """The error of a plan that must not come about."""
    with pytest.raises(LinearizeError) as caught:
        plan(*arguments, **named)
    return caught.value


def test_the_only_sense_of_distance_goes_by_consent(bloom: Path) -> None:
    error = refusal(bloom)
    assert error.code == Exit.INCOMPATIBLE
    for part in ("alibi at layers 0-3", "--allow-drop alibi", "--keep-softmax 0-3"):
        assert part in error.message
    assert "at layers 1,3" in refusal(bloom, keep_softmax="0,2").message
    (note,) = plan(bloom, allow_drop=["alibi"]).notes
    assert note.startswith("alibi: ")
    assert note.endswith("(layers 0-3)")


@pytest.mark.parametrize(
    ("name", "message"),
    [("alibbi", "drops alibi. Did you mean 'alibi'?"), ("sinks", "drops alibi."), ("", "drops alibi.")],
)
def test_consent_to_what_is_not_there_is_a_mistake(bloom: Path, name: str, message: str) -> None:
    error = refusal(bloom, allow_drop=["alibi", name])
    assert error.code == Exit.USAGE
    assert error.message.endswith(message)
    assert error.message.startswith(f"--allow-drop {name}: ")


def test_consent_where_nothing_is_lost(tmp_path: Path) -> None:
    error = refusal(save_source(tmp_path), allow_drop=["softcap"])
    assert error.message == "--allow-drop softcap: this conversion drops nothing of its softmax."


def test_a_switch_for_outputs_is_no_loss() -> None:
    """HuBERT hands `return_dict` on to its softmax."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    found = probe(transformers.HubertConfig(hidden_size=32, **sizes), transformers.HubertModel)
    assert [site.extras for site in found.sites] == [()]


def test_what_can_be_learned_is_noted(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        **TINY, num_hidden_layers=2, num_key_value_heads=2, head_dim=8, intermediate_size=32, num_local_experts=4
    )
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path / "gpt_oss")
    assert [note.partition(":")[0] for note in plan(tmp_path / "gpt_oss").notes] == ["sinks", "sliding_window"]
    assert plan(tmp_path / "gpt_oss", allow_drop=["sinks"]).notes == plan(tmp_path / "gpt_oss").notes


def test_a_mask_in_the_modules_own_code_is_noted(tmp_path: Path) -> None:
    config = transformers.GPTNeoConfig(
        vocab_size=97, hidden_size=32, num_heads=4, num_layers=2, attention_types=[[["global", "local"], 1]]
    )
    config.architectures = ["GPTNeoForCausalLM"]
    config.save_pretrained(tmp_path)
    assert [note.partition(":")[0] for note in plan(tmp_path).notes] == ["own_mask"]


def test_a_bias_hidden_in_the_mask_is_found(tmp_path: Path) -> None:
    """Doge adds a learned bias to the mask before it calls the interface."""
    config = transformers.DogeConfig(**TINY, num_hidden_layers=2, intermediate_size=32)
    config.architectures = ["DogeForCausalLM"]
    config.save_pretrained(tmp_path)
    assert holds(refusal(tmp_path).message, "score_bias", "0-1")
    assert plan(tmp_path, allow_drop=["score_bias"]).notes


class Tilted(transformers.LlamaForCausalLM):
    """Gives its softmax something that nobody has heard of."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, tilt=0.5, logits_to_keep=1, **kwargs)


def test_what_nobody_has_judged_goes_by_consent() -> None:
    sites = probe(small_config("llama"), Tilted).sites
    assert {site.extras for site in sites} == {("tilt",)}
    with pytest.raises(LinearizeError, match=r"0-3.*--allow-drop") as caught:
        check_dropped_features(sites, [])
    assert caught.value.code == Exit.INCOMPATIBLE
    check_dropped_features(sites, ["tilt"])


def test_every_loss_is_named_at_its_layers() -> None:
    def site(layer: int, *extras: str) -> AttentionSite:
        return AttentionSite(layer, f"layers.{layer}", "Attention", 32, 4, 4, 8, 8, 0.3, True, extras)

    sites = [site(0, "alibi", "softcap"), site(1), site(2, "alibi", "position_bias")]
    with pytest.raises(LinearizeError) as caught:
        check_dropped_features(sites, ["softcap"])
    for part in ("alibi at layers 0,2", "position_bias at layer 2", "--allow-drop alibi --allow-drop position_bias"):
        assert part in caught.value.message
    assert "--keep-softmax 0,2" in caught.value.message
    with pytest.raises(LinearizeError, match=r"position_bias.*2.*[^;]*"):
        check_dropped_features(sites, ["alibi"])
    check_dropped_features(sites, ["alibi", "position_bias"])
    assert {feature.name for feature in KNOWN.values() if feature.refused} == {"alibi", "position_bias", "score_bias"}


def test_the_command_takes_consent(bloom: Path, linearize: Command) -> None:
    ask = ("convert", str(bloom), "--to", "gsa", "--dry-run", "--json")
    code, out, err = linearize(*ask)
    assert (code, out) == (3, "")
    assert "--allow-drop alibi" in err
    for consent in (["--allow-drop", "alibi"], ["--allow-drop", "alibi,alibi"]):
        code, out, err = linearize(*ask, *consent)
        assert code == 0
        assert json.loads(out)["plan"]["notes"][0].startswith("alibi: ")
        assert "dropped alibi" in err
    assert linearize(*ask, "--allow-drop", "alibi,sinks")[0] == 2


@pytest.mark.parametrize("consent", ["alibi", "[alibi]"])
def test_a_recipe_takes_consent(bloom: Path, tmp_path: Path, consent: str) -> None:
    def recipe(**convert: str) -> Any:
        asked = ", ".join(f"{key}: {value}" for key, value in {"mechanism": "gsa", **convert}.items())
        (tmp_path / "r.yaml").write_text(
            f"version: 1\nname: r\nmodel: {{base: {bloom}}}\nconvert: {{{asked}}}\n"
            "data: {train: {files: [a.txt]}}\n"
            "stages:\n  - {kind: sft, train: all, optimizer: {lr: 0.1}, steps: 1}\n"
        )
        return load_recipe(tmp_path / "r.yaml")

    with pytest.raises(LinearizeError, match=r"convert.allow_drop=\[alibi\]"):
        plan_base(recipe(), weights=False)
    assert plan_base(recipe(allow_drop=consent), weights=False)[0].notes


def test_a_recipe_is_told_its_own_keys(bloom: Path) -> None:
    """What the message of a refused plan says can be pasted behind the recipe."""
    own = [f"model.base={bloom}"]
    with pytest.raises(LinearizeError) as caught:
        plan_base(load_recipe("gla", own), weights=False)
    assert "--" not in caught.value.message
    words = caught.value.message.replace("'", " ").split()
    consent = next(word for word in words if word.startswith("convert.allow_drop="))
    kept = next(word for word in words if word.startswith("convert.keep_softmax="))
    assert plan_base(load_recipe("gla", [*own, consent]), weights=False)[0].linear
    assert kept == "convert.keep_softmax=0-3"
    with pytest.raises(LinearizeError, match=r"convert\.mechanism=saga: .*causal"):
        plan_base(load_recipe("gla", [*own, consent, "convert={mechanism: saga}"]), weights=False)
    with pytest.raises(LinearizeError, match=r"convert\.keep_softmax=9: "):
        plan_base(load_recipe("gla", [*own, "convert.keep_softmax=9"]), weights=False)
