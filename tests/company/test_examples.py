"""examples/: what they hand to Axolotl and Unsloth names a converted folder and modules that it has."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml
from training import base
from transformers import AutoModelForCausalLM

from linearize.recipe.recipe import load_recipe

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def axolotl() -> dict[str, Any]:
    return dict(yaml.safe_load((EXAMPLES / "axolotl.yaml").read_text("utf-8")))


def unsloth() -> list[str]:
    """Its target modules; the file is read, not run."""
    tree = ast.parse((EXAMPLES / "unsloth_lora.py").read_text("utf-8"))
    (found,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TARGETS"
    )
    return list(ast.literal_eval(found))


def test_their_folder_is_what_finetune_writes() -> None:
    recipe = load_recipe("gsa", ["model.base=demo", "name=llama-gsa"])
    written = f"{recipe.output_dir}/final"
    assert Path(axolotl()["base_model"]).parts[-3:] == Path(written).parts[-3:]
    assert written.removeprefix(f"{Path.cwd()}/") in (EXAMPLES / "unsloth_lora.py").read_text("utf-8")


def test_their_modules_are_in_a_converted_model(tmp_path: Path) -> None:
    """Their loading runs the folder's code and names no attention, which a converted model refuses."""
    model = AutoModelForCausalLM.from_pretrained(base(tmp_path, "llama", layers="0"), trust_remote_code=True)
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    values = axolotl()
    assert set(values["lora_target_modules"]) | set(unsloth()) <= present
    assert values["trust_remote_code"] is True
    refused = ("attention", "attn", "xformers", "plugins", "lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel")
    assert not [key for key in values if any(word in key for word in refused)]


def test_axolotl_takes_its_config() -> None:
    schema = pytest.importorskip("axolotl.utils.schemas.config", reason="axolotl is not installed")
    values = axolotl()
    known = schema.AxolotlInputConfig.model_fields
    assert not [key for key in values if key not in known]
    found = schema.AxolotlInputConfig(**values).model_dump(exclude_none=True)
    for key in ("base_model", "lora_target_modules", "trust_remote_code", "sequence_len"):
        assert found[key] == values[key]
