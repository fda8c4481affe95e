"""Latents and prompts from folders, how latents are noised, and what a transformer is given.

Letters: B batch, C channels of a latent, L tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import IncompatibleError, LinearizeError, absent, check_file, some
from ..page.drawing import pillow
from .recipe import Latents

Decode = Callable[[Tensor], Tensor]
ARRAYS, IMAGES = (".safetensors", ".pt", ".npy"), (".png", ".jpg", ".jpeg", ".webp")
# Names under which a file may hold its tensor, where it holds several.
NAMES = ("latents", "latent", "prompt_embeds", "prompts", "labels")


class Data(NamedTuple):
    """Latents [C,h,w] or [C,t,h,w] of one shape, and for each an embedding [L,D], a class, or None."""

    latents: list[Tensor]
    prompts: list[Tensor] | None

    def batch(self, rows: list[int], device: Any) -> tuple[Tensor, Tensor | None]:
        """Latents [B,C,..], and prompts [B,L,D] or classes [B]."""
        latents = torch.stack([self.latents[row] for row in rows]).to(device, torch.float32)
        prompts = None if self.prompts is None else torch.stack([self.prompts[row] for row in rows]).to(device)
        return latents, prompts


def read_data(source: Latents, start: Path, model: Any, encode: Callable[[Tensor], Tensor] | None) -> Data:
    """All latents of a folder and their prompts, checked against what `model` takes; `encode` makes latents of images
    [B,3,height,width] from -1 to 1, and is None where the pipeline has no VAE.

    Raises LinearizeError: 2 for a missing folder, 3 for files that are not what the model takes, and for images
    without a VAE.
    """
    folder = start / Path(source.latents).expanduser()
    files = _files(folder, (*ARRAYS, *IMAGES))
    images = [path for path in files if path.suffix.lower() in IMAGES]
    if images and len(images) < len(files):
        raise _wrong(f"{folder} holds latents and images. Give each a folder of its own")
    kind = type(model).__name__.removeprefix("Linearized")
    axes = 4 if kind.startswith("Wan") else 3
    if images:
        if encode is None:
            raise _wrong(f"{folder} holds images, and there is no VAE to encode them. Give the whole pipeline's folder")
        latents = {path: [encode(_image(path, source.size)[None])[0]] for path in images}
    else:
        latents = {path: _rows(path, axes) for path in files}
    _check_latents(folder, latents, model.config, axes)
    prompts = _prompts(source, start, latents, kind, model.config)
    return Data([one for rows in latents.values() for one in rows], prompts)


def files_of(source: Latents, start: Path) -> dict[str, tuple[Path, list[Path]]]:
    """The folders of a source, `latents` and where it has them `prompts`, each with its files that are read."""
    named = {"latents": (source.latents, (*ARRAYS, *IMAGES)), "prompts": (source.prompts, ARRAYS)}
    given = {key: (start / Path(name).expanduser(), kinds) for key, (name, kinds) in named.items() if name is not None}
    return {key: (folder, _files(folder, kinds)) for key, (folder, kinds) in given.items()}


def _wrong(message: str) -> LinearizeError:
    return IncompatibleError(message)


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if not folder.is_dir():
        raise absent(folder, "no such folder")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if not found:
        raise _wrong(f"{folder} holds no {', '.join(suffixes)} file")
    for path in found:
        check_file(path)
    if len({path.stem for path in found}) < len(found):
        raise _wrong(f"{folder} holds two files of one stem, which tells the prompts apart")
    return found


def read_tensor(path: Path) -> Tensor:
    """The tensor of a file: its only one, or the one that has a known name. Raises LinearizeError (exit 3)."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".npy":
            return torch.from_numpy(numpy.load(path, allow_pickle=False))
        if suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what readers raise for damaged files
        raise _wrong(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if isinstance(found, Tensor):
        return found
    known = [name for name in found if name in NAMES] if isinstance(found, dict) else []
    if isinstance(found, dict) and len(found) == 1:
        known = list(found)
    if len(known) != 1 or not isinstance(found[known[0]], Tensor):
        raise _wrong(f"{path} must hold one tensor, or one of the name {', '.join(NAMES)}")
    return found[known[0]]


def _rows(path: Path, axes: int) -> list[Tensor]:
    """What a file holds, one tensor of `axes` axes for each latent."""
    tensor = read_tensor(path)
    if tensor.ndim not in (axes, axes + 1):
        raise _wrong(f"{path} has shape {list(tensor.shape)}; a latent of this model has {axes} axes")
    if not tensor.numel():
        raise _wrong(f"{path} has shape {list(tensor.shape)}, which holds no latent")
    return list(tensor) if tensor.ndim > axes else [tensor]


def _image(path: Path, size: int | None) -> Tensor:
    """[3,height,width] from -1 to 1: the middle square at `size`, or as it is."""
    Image = pillow(f"reading {path}")
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        raise _wrong(f"{path} is no image: {error}") from error
    if size is not None:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        box = (left, top, left + side, top + side)
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def _check_latents(folder: Path, latents: dict[Path, list[Tensor]], config: Any, axes: int) -> None:
    shapes = {tuple(one.shape): path for path, rows in latents.items() for one in rows}
    if len(shapes) > 1:
        (first, one), (second, other) = list(shapes.items())[:2]
        raise _wrong(f"{folder}: {one.name} has latents {list(first)}, {other.name} {list(second)}. Give one shape")
    (shape,) = shapes
    if shape[0] != config["in_channels"]:
        raise _wrong(f"{folder} has latents of {shape[0]} channels, the model takes {config['in_channels']}")
    patch = config["patch_size"] if axes == 4 else [config["patch_size"]] * 2
    if any(side % cut for side, cut in zip(shape[1:], patch, strict=True)):
        raise _wrong(f"{folder} has latents {list(shape)}, which patches of {list(patch)} do not divide")
    if not all(bool(one.isfinite().all()) for rows in latents.values() for one in rows):
        raise _wrong(f"{folder} has latents that are not finite")


def _prompts(source: Latents, start: Path, latents: dict[Path, list[Tensor]], kind: str, config: Any) -> Any:
    """A prompt for each latent, by the stem of its file."""
    classes = kind.startswith("DiT")
    if source.prompts is None:
        what = "numbers of classes" if classes else "embeddings"
        raise _wrong(f"{kind} needs prompts: give data.train.prompts, a folder of {what} with the stems of the latents")
    folder = start / Path(source.prompts).expanduser()
    files = {path.stem: path for path in _files(folder, ARRAYS)}
    missing = sorted(path.stem for path in latents if path.stem not in files)
    if missing:
        raise _wrong(f"{folder} lacks the prompts of {some(missing)}")
    found: list[Tensor] = []
    for path, rows in latents.items():
        tensor, wanted = read_tensor(files[path.stem]), 0 if classes else 2
        own = list(tensor) if tensor.ndim == wanted + 1 else [tensor]
        if len(own) != len(rows) or own[0].ndim != wanted:
            due = "a number of a class" if classes else "an embedding [tokens,channels]"
            raise _wrong(f"{files[path.stem]} has shape {list(tensor.shape)}; it needs {due} for {len(rows)} latents")
        found += own
    if classes:
        top = config["num_embeds_ada_norm"]
        if any(one.is_floating_point() or not 0 <= int(one) <= top for one in found):
            raise _wrong(f"{folder} must hold whole numbers of classes from 0 to {top}")
        return [one.long() for one in found]
    width = config["caption_channels"] if "caption_channels" in config else config["text_dim"]
    shapes = {tuple(one.shape) for one in found}
    if len(shapes) > 1 or next(iter(shapes))[1] != width:
        raise _wrong(f"{folder} has embeddings {sorted(map(list, shapes))}; it needs one shape [tokens,{width}]")
    if not all(bool(one.isfinite().all()) for one in found):
        raise _wrong(f"{folder} has embeddings that are not finite")
    return [one.float() for one in found]


# ---------------------------------------------------------------- what the transformer is given


class Noise(NamedTuple):
    """How latents are noised: by `flow`, or by the cumulated alphas [steps] of a schedule of epsilon."""

    kind: str
    alphas: Tensor
    steps: int

    def at(self, latents: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B,C,..] at a noise level [B] from 0 to 1, and their time steps [B]."""
        wide = [-1] + [1] * (latents.ndim - 1)
        if self.kind == "flow":
            sigma = level.view(wide)
            return (1 - sigma) * latents + sigma * noise, level * self.steps
        time = (level * (self.steps - 1)).round().long()
        alpha = self.alphas.to(latents.device)[time].view(wide)
        return alpha.sqrt() * latents + (1 - alpha).sqrt() * noise, time


class Opened(NamedTuple):
    """The converted transformer and its noise; latents of training, those that predictions are compared on, and what
    makes images of latents, None without a VAE."""

    model: Any
    noise: Noise
    data: Data
    held: Data
    decode: Decode | None


def noise_of(asked: str, kind: str, scheduler: Any) -> Noise:
    """The noise of a recipe: what it asks for, or what the scheduler is made for; without one, epsilon for DiT."""
    import diffusers

    config = dict(scheduler.config) if scheduler is not None else {}
    flows = "FlowMatch" in type(scheduler).__name__ or config.get("prediction_type") == "flow_prediction"
    if scheduler is None:
        flows = not kind.removeprefix("Linearized").startswith("DiT")
    steps = config.get("num_train_timesteps", 1000)
    if asked == "flow" or (asked == "auto" and flows):
        return Noise("flow", torch.empty(0), steps)
    known = {} if flows else config
    made: Any = diffusers.DDPMScheduler.from_config(known)
    return Noise("epsilon", made.alphas_cumprod, len(made.alphas_cumprod))


def inputs_of(model: Any, latents: Tensor, time: Tensor, prompts: Tensor | None) -> dict[str, Any]:
    """The arguments of the transformer's forward."""
    name = "class_labels" if type(model).__name__.removeprefix("Linearized").startswith("DiT") else None
    given = {} if prompts is None else {name or "encoder_hidden_states": prompts}
    return {"hidden_states": latents, "timestep": time, **given}
