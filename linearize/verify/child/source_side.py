"""The other side of a comparison: the native class on the source's own weights, with mixers of the installed kernels.

FOLDER OUT SOURCE OPTIONS: FOLDER has the mixers' weights, OUT gets the outputs, OPTIONS are JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import load_file

from linearize_kernels.hf.attention_hooks import attach
from linearize_kernels.hf.capture import capture
from linearize_kernels.mixer import own_mixer

from .inputs import first_of_plan, keep_first, outputs


def main() -> None:
    """Prints `loaded` once the model is."""
    folder, out, source, options = *sys.argv[1:4], json.loads(sys.argv[4])
    model_class = getattr(transformers, options["class"], None) or transformers.AutoModelForCausalLM
    arguments: dict[str, Any] = {"dtype": getattr(torch, options["dtype"]), "trust_remote_code": options["trust"]}
    if options["layers"]:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=options["trust"])
        arguments["config"] = keep_first(config, options["layers"])
    if options["block"]:
        scheme = transformers.FineGrainedFP8Config(weight_block_size=tuple(options["block"]), dequantize=True)
        arguments["quantization_config"] = scheme
    model = model_class.from_pretrained(source, **arguments)
    for parameter in model.parameters() if options["block"] else ():  # transformers leaves these in the scales' dtype
        parameter.data = parameter.data.to(arguments["dtype"])
    spec = first_of_plan(options["spec"], options["layers"])
    importlib.import_module("linearize_kernels.window.window")
    names = {layer["mechanism"] for layer in spec["layers"]}
    mechanisms = {n: own_mixer(importlib.import_module(f"linearize_kernels.{n}.{n}")) for n in names}
    routed = all(layer["site"].get("routed", True) for layer in spec["layers"])
    attach(model, spec, mechanisms, None if routed else capture)
    mixers = load_file(f"{folder}/{options['mixers']}")
    places = tuple(layer["site"]["path"] + ".mixer." for layer in spec["layers"])
    mixers = {name: value for name, value in mixers.items() if name.startswith(places)}
    loaded = model.load_state_dict(mixers, strict=False)
    assert not loaded.unexpected_keys, loaded.unexpected_keys
    print("loaded", flush=True)
    model = model.float().eval()
    if arguments["dtype"] != torch.float32:  # what no weight says, such as the scale of Gemma's embeddings, was rounded
        with init_empty_weights(include_buffers=False):
            exact = dict(type(model)(model.config).named_buffers())
        for name in exact.keys() - model.state_dict().keys():
            model.get_buffer(name).copy_(exact[name])
    torch.save(outputs(model), out)
