"""Each option of each version that users have computes after `linearize upgrade` what it computed before.

The code of those versions is in data/, see its README.md. A model has a layer for each mechanism, base, window and
option, and layers of the upgraded model get the hidden states of those of the old one.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import sys
import tarfile
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import relative_error, with_slow
from models import save_source, tokens
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, ViTConfig, ViTModel

from linearize.checkpoint import upgrade
from linearize.checkpoint.code import MODELING_FILE, modeling
from linearize.checkpoint.known_code import RELEASED
from linearize.checkpoint.manifest import MANIFEST
from linearize.checkpoint.write import converted_config
from linearize.convert import plan_conversion
from linearize.plan.mechanisms import MIXER_CLASS, mechanism_names
from linearize.plan.plan import Plan, Step
from linearize_kernels.mixer import AttentionSite

AUTO = {True: AutoModelForCausalLM, False: AutoModel}
CODE = Path(__file__).parent / "data" / "code-of-released-versions.tar.xz"
WINDOWS: tuple[dict[str, int], ...] = ({}, {"window": 4, "sink": 0}, {"window": 16, "sink": 1})
# Other values of numbers: small ones, since those of the defaults have no effect within 20 tokens.
NUMBERS = {"slots": 4, "damping": 2.0, "clock": 3, "half_life_min": 4.0, "half_life_max": 64.0, "gate_rank": 2,
           "chunk_size": 16, "taps": 2, "slope": 0.5, "blocks": 4, "block_size": 16, "rows": 2, "columns": 2,
           "dwc": 3}  # fmt: skip


def mechanisms(version: str, place: Path) -> tuple[dict[str, Any], Any]:
    """The mixers of a version by name, and its module `mixer`; its files, as they travelled, are in a folder of
    `place`."""
    with tarfile.open(CODE) as archive:
        archive.extractall(place, filter="data")
    package = types.ModuleType(version)
    package.__path__ = [str(place / version)]
    sys.modules[version] = package
    contract = importlib.import_module(".mixer", version)
    importlib.import_module(".window", version)  # it enters its name into the mixer's class
    paths = [path for path in sorted((place / version).glob("*.py")) if path.stem in mechanism_names()]
    names = [path.stem for path in paths if MIXER_CLASS.search(path.read_text("utf-8"))]
    return {name: contract.own_mixer(importlib.import_module(f".{name}", version)) for name in names}, contract


def cases(mixers: dict[str, Any], option_types: Any, causal: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each mechanism over each base with each window at its defaults, and with each option set otherwise."""
    for name, mixer in mixers.items():
        if not (mixer.causal if causal else mixer.bidirectional):
            continue
        for base, near in itertools.product([*mixer.bases] or [None], WINDOWS):
            known = option_types(mixer, base)
            if not near.keys() <= known.keys():
                continue
            options = {option: default for option, (_, _, default) in known.items()}
            options |= near | ({"base": base} if base else {})
            yield name, options
            for option, (kind, _, default) in known.items():
                values = typing.get_args(kind) or ((False, True) if kind is bool else (NUMBERS.get(option, default),))
                changed = values if option not in {"base", *near} else ()
                yield from ((name, {**options, option: value}) for value in changed if value != options[option])


def write_old(version: str, causal: bool, place: Path) -> tuple[Path, Plan]:
    """A folder of weights by chance as `version` wrote it, with a layer for each case, and its plan."""
    mixers, contract = mechanisms(version, place / "code")

    if causal:
        save_source(place / "source", num_hidden_layers=1)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
        config = ViTConfig(**sizes, num_hidden_layers=1, image_size=16, patch_size=4)
        ViTModel(config).save_pretrained(place / "source")
    # Of one layer: to probe hundreds takes longer than all the rest.
    plan, source, natives = plan_conversion(str(place / "source"), "la")
    (example,) = plan.steps

    def site(layer: int) -> AttentionSite:
        return dataclasses.replace(example.site, layer=layer, path=example.site.path.replace(".0.", f".{layer}."))

    def record(site: Any) -> dict[str, Any]:
        return {field.name: getattr(site, field.name) for field in dataclasses.fields(contract.Site)}

    def fits(name: str, options: dict[str, Any]) -> bool:
        try:
            with torch.device("meta"):
                mixers[name](contract.Site(**record(example.site)), **options)
        except ValueError:
            return False
        return True

    fitting = [case for case in cases(mixers, contract.option_types, causal) if fits(*case)]
    steps = tuple(Step(site(layer), *case, 0, 0) for layer, case in enumerate(fitting))
    plan = dataclasses.replace(plan, steps=steps)
    layers = [{"site": record(step.site), "mechanism": step.mechanism, "options": step.options} for step in steps]
    original = {**source.config, "num_hidden_layers": len(steps)}
    config = converted_config(original, plan, natives) | {"model_type": f"linearized_{plan.model_type}"}
    config["linearize"]["layers"] = layers
    del config["transformers_weights"]
    files = {path.name: path.read_text("utf-8") for path in (place / "code" / version).glob("*.py")}
    files[MODELING_FILE] = modeling(version, plan, natives, files)
    folder = place / "old"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    (folder / "config.json").write_text(json.dumps(config))
    model = AUTO[causal].from_config(AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True)
    for name, parameter in model.named_parameters():
        if ".mixer." in name:
            nn.init.normal_(parameter.data, 0.0, 0.2)
    save_file(dict(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    record_of = {**plan.to_json(), "steps": [{**layer, "new_parameters": 0, "state_bytes": 0} for layer in layers]}
    listed = [path.name for path in folder.iterdir()]
    (folder / MANIFEST).write_text(json.dumps({"linearize": version, "plan": record_of, "files": [*listed, MANIFEST]}))
    return folder, plan


@torch.no_grad()
def outputs(folder: Path, causal: bool, inputs: list[Tensor] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """What each attention layer of a folder gets and returns, where it does not get `inputs`."""
    model, report = AUTO[causal].from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), report
    seen: list[Tensor] = []
    found: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("hidden_states", args[0] if args else None)
        value = given / given.std() if inputs is None else inputs[len(seen)]
        seen.append(value)
        return ((), {**kwargs, "hidden_states": value}) if "hidden_states" in kwargs else ((value, *args[1:]), kwargs)

    for module in model.modules():
        if hasattr(module, "mixer"):
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(lambda module, args, output: found.append(output[0]))
    if causal:
        model(tokens(2, 40), use_cache=False)
    else:
        model(torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
    return seen, found


@pytest.mark.parametrize("causal", with_slow([True, False], True))
@pytest.mark.parametrize("version", RELEASED)
def test_every_option_computes_what_it_did(tmp_path: Path, version: str, causal: bool) -> None:
    folder, plan = write_old(version, causal, tmp_path)
    planned = upgrade.plan_upgrade(folder)
    assert planned is not None
    assert planned.version == version
    new = tmp_path / "new"
    new.mkdir()
    upgrade.write_code(new, planned)
    (new / "model.safetensors").symlink_to(folder / "model.safetensors")
    inputs, before = outputs(folder, causal)
    after = outputs(new, causal, inputs)[1]
    assert len(before) == len(after) == len(plan.steps)
    differ = {
        f"{step.mechanism} {step.options}": error
        for step, one, two in zip(plan.steps, before, after, strict=True)
        if not (error := relative_error(two, one)) < 1e-5
    }
    assert not differ
