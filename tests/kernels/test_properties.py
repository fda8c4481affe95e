"""Random configs and recipes: the right answer or a documented exit code with a message, never a traceback."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import ARCHITECTURES, small_config
from training import recipe_values, stage

from linearize.cli import main
from linearize.errors import Exit, LinearizeError
from linearize.recipe.recipe import Recipe, load_recipe

quick = settings(
    deadline=None,
    derandomize=True,  # a new finding belongs into a test of its own, not into whoever's change comes next
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-2, 9) | st.sampled_from([2**31, 2**63, 10**30]) | st.floats(allow_subnormal=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)

# ---------------------------------------------------------------- configs

# Keys that decide what is built; those that say how much of it get small or absurd numbers: a thousand is no mistake.
AMOUNTS = ["num_hidden_layers", "n_layer"]
KEYS = ["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
        "max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta", "layer_types", "sliding_window",
        "tie_word_embeddings", "hidden_act", "rms_norm_eps", "dtype", "torch_dtype", "architectures", "auto_map",
        "model_type", "linearize", "quantization_config", "attn_implementation", "_attn_implementation",
        "pad_token_id", "eos_token_id", "n_embd", "n_head", "initializer_range", "is_decoder", "transformers_version",
        "add_cross_attention", "attention_dropout", "use_cache", "text_config", "label2id", "id2label"]  # fmt: skip
WORDS = st.sampled_from(
    ["llama", "gpt2", "mamba", "bert", "linearized_llama", "float16", "gelu", "linear", "yarn", "LlamaForCausalLM",
     "BertModel", "PreTrainedModel", "GenerationMixin", "full_attention", "sliding_attention", "eager", "own.Own"]
)  # fmt: skip
ROPE = st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta"]), JSON | WORDS)
VALUES = JSON | WORDS | st.lists(WORDS, max_size=4) | ROPE
SIZES = [key for key in KEYS if re.search("size|heads|n_|dim|id$", key)]
# Plausible ones get past the validators of transformers, to the probe; the others try the validators.
CHANGES = st.dictionaries(st.sampled_from(SIZES), st.integers(-1, 64), max_size=2) | st.dictionaries(
    st.sampled_from(KEYS), VALUES, max_size=3
)
LAYERS = st.dictionaries(st.sampled_from(AMOUNTS), st.integers(-1, 6) | st.sampled_from([10**9, 10**30]), max_size=1)


def command(*arguments: str | Path) -> tuple[int, str]:
    """The command line in this process: exit code and what it told people."""
    told, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["linearize", *map(str, arguments)])
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            try:
                main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 0
    return code, told.getvalue()


@pytest.mark.slow
@settings(quick, max_examples=60)
@given(st.sampled_from(sorted(ARCHITECTURES)), CHANGES, LAYERS)
def test_any_config_is_planned_or_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], layers: dict[str, Any]
) -> None:
    values = small_config(name).to_dict() | changes | layers
    (tmp_path / "config.json").write_text(json.dumps(values))
    code, told = command("convert", tmp_path, "--to", "gsa", "--dry-run")
    assert code in (Exit.OK, Exit.INCOMPATIBLE), told
    assert code == Exit.OK or re.search(r"^error: \S", told, re.MULTILINE), told


@settings(quick, max_examples=40)
@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_config_or_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    code, told = command("convert", tmp_path, "--to", "gsa", "--dry-run")
    assert code == Exit.INCOMPATIBLE, told


@settings(quick, max_examples=25)
@given(TEXT, TEXT, st.dictionaries(TEXT.filter(lambda key: "=" not in key and key), TEXT, max_size=2))
def test_any_words_are_options_or_refused(tmp_path: Path, layers: str, keep: str, options: dict[str, str]) -> None:
    small_config("llama").save_pretrained(tmp_path)
    given_options = [f"--set={key}={value}" for key, value in options.items()]
    arguments = [f"--layers={layers}", f"--keep-softmax={keep}", *given_options]
    code, told = command("convert", tmp_path, "--to", "gsa", "--dry-run", *arguments)
    assert code in (Exit.OK, Exit.USAGE), told


# ---------------------------------------------------------------- recipes

STAGES = [stage("attention_transfer"), stage("logit_kl", ["new", "lora"]), stage("sft", "mixer", tokens="1M")]
CONVERT = {"mechanism": "gsa", "options": {"slots": 8}}
FULL = Recipe.model_validate(recipe_values(Path("x"), Path("base"), *STAGES, convert=CONVERT)).resolved()


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@st.composite
def near_recipes(draw: st.DrawFn) -> dict[str, Any]:
    """A complete recipe with a few of its values, anywhere in it, dropped, moved, renamed or replaced."""
    tree = copy.deepcopy(FULL)
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(places(tree)))
        other_container, other_key = draw(st.sampled_from(places(tree)))
        change = draw(st.sampled_from(["replace", "drop", "rename", "copy"]))
        if change == "replace":
            container[key] = draw(JSON)
        elif change == "drop":
            del container[key]
        elif change == "rename" and isinstance(container, dict):
            container[draw(TEXT)] = container.pop(key)
        else:
            container[key] = copy.deepcopy(other_container[other_key])
        if not places(tree):
            break
    return tree


def load_or_refuse(path: Path) -> tuple[LinearizeError | None, dict[str, Any]]:
    """The resolved recipe, or why there is none; any other exception fails the test."""
    try:
        return None, load_recipe(path).resolved()
    except LinearizeError as error:
        return error, {}


@settings(quick, max_examples=100)
@given(near_recipes())
def test_any_recipe_reads_back_or_its_mistakes_have_places(tmp_path: Path, tree: dict[str, Any]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(tree, indent=1, default=str).replace("NaN", "null").replace("Infinity", "1e999"))
    refusal, resolved = load_or_refuse(path)
    if refusal is None:
        path.write_text(json.dumps(resolved))
        again, reread = load_or_refuse(path)
        assert again is None
        assert reread == resolved
        return
    assert refusal.code == Exit.USAGE
    for line in refusal.message.splitlines():
        assert re.match(rf"{re.escape(str(path))}:\d+:\d+[ :]", line), refusal.message


@pytest.mark.slow
@settings(quick, max_examples=25)
@given(near_recipes())
def test_any_recipe_is_planned_or_refused(tmp_path: Path, tree: dict[str, Any]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(tree).replace("NaN", "null").replace("Infinity", "1e999"))
    small_config("llama").save_pretrained(tmp_path / "base")
    code, told = command("finetune", path, f"model.base={tmp_path / 'base'}", "--dry-run")
    assert code in (Exit.OK, Exit.USAGE, Exit.INCOMPATIBLE, Exit.RESOURCE, Exit.HUB), told
