"""Load a checkpoint as anyone would, and say what was missing: FOLDER TARGET LIMIT LAYERS PADDED.

On TARGET `meta` tensors have names and shapes only: transformers would read every weight in the folder to load it
there. TARGET is else the file for the model's outputs, and single steps are compared with one pass.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import str_to_torch_dtype

from .behaviours import decoding
from .inputs import auto_class, keep_first, outputs


def main() -> None:
    """Prints `loaded`, shares of the work that are done, and the findings as JSON."""
    print("done 0.1", flush=True)  # and what looks at models; the rest is their code, and the end of the process
    folder, target, limit, layers, padded = sys.argv[1:6]
    config = keep_first(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True), int(layers))
    auto = auto_class(config)
    if target == "meta":
        model_class: Any = get_class_from_dynamic_module(config.auto_map[auto], folder)
        arguments = {"pretrained_model_name_or_path": None, "config": config, "state_dict": without_values(folder)}
        arguments["device_map"] = {"": "meta"}
    else:
        model_class = getattr(transformers, auto)
        arguments = {"pretrained_model_name_or_path": folder, "trust_remote_code": True, "dtype": torch.float32}
        arguments |= {"config": config} if int(layers) else {}
    model, report = model_class.from_pretrained(**arguments, output_loading_info=True)
    print("loaded\ndone 0.4", flush=True)
    steps = None
    if target != "meta":
        torch.save(outputs(model.eval(), padded == "padded"), target)
        steps = decoding(model, float(limit))
    ours = tuple(layer["site"]["path"] + ".mixer." for layer in model.config.linearize["layers"])
    mixers = {name: list(p.shape) for name, p in model.state_dict().items() if name.startswith(ours)}
    missing = {key: sorted(map(str, value)) for key, value in report.items()}
    print(json.dumps({"report": missing, "steps": steps, "mixers": mixers}))


def without_values(folder: str) -> dict[str, torch.Tensor]:
    """The tensors of a folder, on the meta device."""
    weights = {}
    for shard in Path(folder).glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dict
                value = file.get_slice(name)
                dtype = str_to_torch_dtype[value.get_dtype()]
                weights[name] = torch.empty(value.get_shape(), dtype=dtype, device="meta")
    return weights
