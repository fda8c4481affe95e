"""Inputs for one forward pass of a diffusion transformer, and the checks of a converted one.

This folder is copied to clean processes; nothing outside it may be imported here.

Letters: B batch, C channels; h, w rows and columns of a grid of patches, t frames of it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .inputs import difference, noise

# Patches, no axis as long as another.
FRAMES, ROWS, COLUMNS = 3, 7, 5


def dit(config: Mapping[str, Any], larger: int) -> dict[str, Tensor]:
    """Latents [B,C,h,w], always square, and class labels."""
    side = ROWS * larger * config["patch_size"]
    labels = torch.tensor([1, 2]) % config["num_embeds_ada_norm"]
    return {"hidden_states": noise(2, config["in_channels"], side, side), "class_labels": labels}


def sana(config: Mapping[str, Any], larger: int) -> dict[str, Tensor]:
    """Latents [B,C,h,w] and a caption."""
    patch, caption = config["patch_size"], noise(2, 6, config["caption_channels"])
    latents = noise(2, config["in_channels"], ROWS * larger * patch, COLUMNS * patch)
    guidance = {"guidance": torch.tensor([4.0, 4.0])} if config["guidance_embeds"] else {}
    return {"hidden_states": latents, "encoder_hidden_states": caption, **guidance}


def wan(config: Mapping[str, Any], larger: int) -> dict[str, Tensor]:
    """Latents [B,C,t,h,w] and a text; of models that start from an image, 512 tokens of text and the image's."""
    t, h, w = config["patch_size"]
    latents = noise(2, config["in_channels"], FRAMES * t, ROWS * larger * h, COLUMNS * w)
    inputs = {"hidden_states": latents, "encoder_hidden_states": noise(2, 6, config["text_dim"])}
    if config["added_kv_proj_dim"]:
        inputs["encoder_hidden_states"] = noise(2, 512, config["text_dim"])
    if config["image_dim"]:
        whole = config["pos_embed_seq_len"]  # of two images, where there is one
        shape = (4, whole // 2) if whole else (2, 257)
        inputs["encoder_hidden_states_image"] = noise(*shape, config["image_dim"])
    return inputs


# The transformers that are converted, by what their forward takes.
INPUTS: dict[str, Callable[[Mapping[str, Any], int], dict[str, Tensor]]] = {
    "DiTTransformer2DModel": dit,
    "SanaTransformer2DModel": sana,
    "WanTransformer3DModel": wan,
}


def make_latents(model: Any, larger: int = 1) -> dict[str, Tensor]:
    """Fixed inputs of two rows; `larger`: so many times the rows of patches."""
    kind = type(model).__name__.removeprefix("Linearized")
    return {**INPUTS[kind](model.config, larger), "timestep": torch.tensor([3, 40])}


def denoised(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What one pass puts out."""
    with torch.no_grad():
        return model(**inputs).sample


# ---------------------------------------------------------------- loading, as anyone would


def parts_of(folder: Path) -> list[str]:
    """Names of the components of a pipeline that linearize converted; of a transformer's own folder ``."""
    if not (folder / "model_index.json").exists():
        return [""]
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    entries = {name: str(entry[0]) for name, entry in index.items() if isinstance(entry, list) and entry}
    return [name for name, library in entries.items() if library.startswith("linearized_")]


def load_parts(folder: Path, trust: bool = True) -> dict[str, Any]:
    """The converted transformers by name, in float32, through their pipeline where there is one.

    Other models of the pipeline are left out, for they may be large, unless it cannot do without.
    """
    import diffusers

    options: dict[str, Any] = {"trust_remote_code": trust, "torch_dtype": torch.float32}
    parts = parts_of(folder)
    if parts == [""]:
        return {"": diffusers.AutoModel.from_pretrained(str(folder), **options)}
    models = {path.parent.name for path in folder.glob("*/*") if path.suffix in (".safetensors", ".bin")}
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    models |= {name for name, entry in index.items() if isinstance(entry, list) and entry[0] is None}
    absent: dict[str, None] = dict.fromkeys(models - set(parts))
    try:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, **options, **absent)
    except Exception:
        if not trust:
            raise
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, **options)
    return {name: getattr(pipeline, name) for name in parts}


def shapes_of(folder: Path, part: str) -> dict[str, list[int]]:
    """Names and shapes of all that the model of a converted transformer has, without memory behind it."""
    from diffusers.utils.dynamic_modules_utils import get_class_from_dynamic_module

    config = json.loads((folder / part / "config.json").read_text("utf-8"))
    module, _, name = config["auto_map"]["AutoModel"].partition(".")
    place = {"module_file": f"{module}.py", "class_name": name, "trust_remote_code": True}
    found: Any = get_class_from_dynamic_module(str(folder / part), **place)
    with torch.device("meta"):
        model = found.from_config(found.load_config(folder / part))
    return {name: list(value.shape) for name, value in model.state_dict().items()}


# ---------------------------------------------------------------- what it must do


def rows_alone(model: Any, larger: int = 1) -> float:
    """Rows of a batch are the rows alone."""
    inputs = make_latents(model, larger)
    whole, worst = denoised(model, inputs), 0.0
    for row in range(len(whole)):
        own = {n: value.chunk(len(whole))[row] for n, value in inputs.items()}
        worst = max(worst, difference(denoised(model, own), whole[row : row + 1]))
    return worst


def same_teacher(model: Any) -> float:
    """Under `teacher` it is the source's class with the source's weights."""
    native: Any = type(model).__mro__[2]
    other = native.from_config({k: v for k, v in model.config.items() if k not in ("linearize", "auto_map")})
    weights = {name: value for name, value in model.state_dict().items() if ".processor.mixer." not in name}
    other.load_state_dict(weights)
    inputs = make_latents(model)
    with model.teacher():
        return difference(denoised(model, inputs), denoised(other.eval(), inputs))


CHECKS: dict[str, Callable[[Any], float]] = {
    "rows alone": rows_alone,
    "another size": functools.partial(rows_alone, larger=2),
    "softmax teacher": same_teacher,
}


def row(check: Callable[[Any], float], model: Any, limit: float) -> dict[str, Any]:
    """The row of one check."""
    try:
        found = check(model)
    except Exception as error:
        return {"status": "failed", "detail": f"raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {"status": "passed" if found <= limit else "failed", "difference": found, "limit": limit}


def loads_without_trust(folder: Path) -> dict[str, Any]:
    """The row of a check that a user who does not run the folder's code gets no model of softmax in silence."""
    with contextlib.suppress(Exception):
        kinds = {type(model).__name__ for model in load_parts(folder, trust=False).values()}
        return {"status": "failed", "detail": f"without trust_remote_code it loads as {', '.join(kinds)}"}
    return {"status": "passed"}


def main() -> None:
    """`python -c ... FOLDER TARGET LIMIT`: keys; for TARGET `checks` the checks too, for a file the outputs there."""
    folder, target, limit = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    found: dict[str, Any] = {"shapes": {part: shapes_of(folder, part) for part in parts_of(folder)}, "checks": {}}
    models = {} if target == "keys" else load_parts(folder)
    print("loaded", flush=True)  # what goes wrong from here on is no matter of loading
    if target == "checks":
        for part, model in models.items():
            rows = {name: row(check, model, limit) for name, check in CHECKS.items()}
            found["checks"] |= {f"{part}: {name}".removeprefix(": "): value for name, value in rows.items()}
        found["checks"]["trust"] = loads_without_trust(folder)
    elif models:
        both = {}
        for part, model in models.items():
            both[part] = [denoised(model, make_latents(model))]
            with model.teacher():
                both[part].append(denoised(model, make_latents(model)))
        torch.save(both, target)
    print(json.dumps(found))
