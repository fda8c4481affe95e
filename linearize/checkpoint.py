"""The delta writer: source shards untouched, one shard of mixers, an index, code, and provenance."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from . import __version__, card
from .atomic import MANIFEST
from .errors import Exit, LinearizeError, redact
from .mechanisms import build_mixer
from .plan import Plan
from .render import Natives, auto_map, code_files
from .source import DTYPES, SMALL_FILES, Source, read_header

MIXER_SHARD = "model-mixers.safetensors"
# Never a name that save_pretrained would choose: older safetensors write in place, into the linked source file.
SOURCE_SHARD = "model-source-{:05d}-of-{:05d}.safetensors"
SINGLE_SHARD = SOURCE_SHARD.format(1, 1)
INDEX = "model.safetensors.index.json"
# Files that are rewritten or tell of the source alone.
NOT_COPIED = ("config.json", MANIFEST, "*.index.json", "trainer_state.json")
# The only folder that transformers reads: a loop of generation (custom_generate) knows the source, not this model.
TEMPLATES = "additional_chat_templates"


def write_checkpoint(folder: Path, source: Source, plan: Plan, natives: Natives, seed: int) -> None:
    """Write the whole converted model into the empty `folder`."""
    shards = write_source_shards(folder, source, plan, natives.tied())
    shards[MIXER_SHARD] = write_mixers(folder / MIXER_SHARD, plan, seed)
    write_index(folder, shards)
    _copy_small_files(folder, source)
    for name, text in code_files(plan, natives).items():
        if (folder / name).exists():
            raise LinearizeError(f"{source.name} has a {name} of its own, where ours must go", Exit.INCOMPATIBLE)
        (folder / name).write_text(text, "utf-8")
    write_json(folder / "config.json", converted_config(source.config, plan, natives))
    (folder / "README.md").write_text(card.model_card(plan, source.folder), "utf-8", errors="replace")
    write_json(folder / MANIFEST, manifest(folder, plan))


def converted_config(config: dict[str, Any], plan: Plan, natives: Natives) -> dict[str, Any]:
    """The source's config.json with our model type, classes and plan."""
    changed = {
        **config,
        "model_type": "linearized_" + natives.model_type,
        "architectures": ["Linearized" + natives.head.__name__],
        "auto_map": {**_other_code(config), **auto_map(natives)},
        "linearize": plan.spec(),
    }
    changed.pop("torch_dtype", None)
    changed["dtype"] = plan.dtype
    return changed


def _other_code(config: dict[str, Any]) -> dict[str, Any]:
    """Entries of the source's `auto_map` for tokenizers and processors; its model classes would run without mixers."""
    entries = config.get("auto_map")
    entries = entries if isinstance(entries, dict) else {}
    return {name: where for name, where in entries.items() if not name.startswith(("AutoModel", "AutoConfig"))}


def manifest(folder: Path, plan: Plan) -> dict[str, Any]:
    """What linearize.json says: who wrote this folder, from what, by which plan, and which files."""
    import transformers

    files = sorted({*(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()), MANIFEST})
    versions = {"linearize": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {"linearize": __version__, "versions": versions, "plan": plan.to_json(), "files": files}


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(redact(json.dumps(data, indent=2)) + "\n", "utf-8")


# ---------------------------------------------------------------- weights


def write_source_shards(folder: Path, source: Source, plan: Plan, tied: set[str]) -> dict[str, list[str]]:
    """Link, or rewrite where the format or dtype changes; returns shard name -> tensor names."""
    shards: dict[str, list[str]] = {}
    for number, shard in enumerate(source.shards, 1):
        name = SOURCE_SHARD.format(number, len(source.shards))
        if source.pickled:
            tensors = _cast(_independent(load_pickle(shard), tied), plan)
            save_file(tensors, folder / name, {"format": "pt"})
            shards[name] = list(tensors)
        elif plan.cast:
            with safe_open(shard, "pt") as file:
                tensors = _cast({key: file.get_tensor(key) for key in read_header(shard)}, plan)
            save_file(tensors, folder / name, {"format": "pt"})
            shards[name] = list(tensors)
        else:
            shards[name] = list(read_header(shard))
            link_or_copy(shard.resolve(), folder / name)
    return shards


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link, or a byte-for-byte copy where the file system does not allow one."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
            raise
        shutil.copyfile(source, target)


def load_pickle(shard: Path) -> dict[str, torch.Tensor]:
    """Tensors of a `.bin` shard, read with weights_only. Raises LinearizeError (exit 3) for anything but tensors."""
    try:
        tensors = torch.load(shard, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        tensors = _load_legacy_pickle(shard)
    except Exception as error:
        raise _pickle_error(shard, error) from error
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise LinearizeError(f"{shard} does not hold a plain mapping of names to tensors", Exit.INCOMPATIBLE)
    return tensors


def _load_legacy_pickle(shard: Path) -> Any:
    """Files from before torch 1.6 cannot be mapped into memory."""
    try:
        return torch.load(shard, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _pickle_error(shard, error) from error


def _pickle_error(shard: Path, error: Exception) -> LinearizeError:
    return LinearizeError(
        f"{shard} is not a plain pickle of tensors ({type(error).__name__}: {str(error).splitlines()[0]}). It was not "
        "executed. Use a safetensors version of the model",
        Exit.INCOMPATIBLE,
    )


def _cast(tensors: dict[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
    if not plan.cast:
        return tensors
    dtype = getattr(torch, plan.dtype)
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def _independent(tensors: dict[str, torch.Tensor], tied: set[str]) -> dict[str, torch.Tensor]:
    """Contiguous tensors without shared memory; a `tied` name that shares is dropped, transformers ties it again."""
    kept: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name in sorted(tensors, key=lambda name: name in tied):
        tensor = tensors[name]
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages and name in tied:
            continue
        kept[name] = tensor.clone(memory_format=torch.contiguous_format) if storage in storages else tensor.contiguous()
        storages.add(storage)
    return kept


def write_mixers(path: Path, plan: Plan, seed: int) -> list[str]:
    """Initialise every mixer, reproducibly, and save them as one shard; returns the tensor names."""
    tensors: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step in plan.steps:
            mixer = build_mixer(step.mechanism, step.site, step.options)
            mixer.reset_parameters()
            for name, value in mixer.state_dict().items():
                tensors[f"{step.site.path}.mixer.{name}"] = value.to(getattr(torch, plan.dtype))
    save_file(tensors, path, {"format": "pt"})
    return list(tensors)


def write_index(folder: Path, shards: dict[str, list[str]]) -> None:
    """model.safetensors.index.json for these shards."""
    size = sum((folder / name).stat().st_size for name in shards)
    weight_map = {tensor: name for name, tensors in sorted(shards.items()) for tensor in tensors}
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _copy_small_files(folder: Path, source: Source) -> None:
    """Tokenizer, generation config, chat templates, licence, the source's own code."""
    for path in [*sorted(source.folder.iterdir()), *sorted((source.folder / TEMPLATES).glob("*.jinja"))]:
        if _travels(path):
            target = folder / path.relative_to(source.folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def _travels(path: Path) -> bool:
    """Whether a file is copied. Links to files are followed; what should be copied and is no file is refused."""
    wanted = any(path.match(pattern) for pattern in SMALL_FILES)
    if not wanted or path.is_dir() or any(path.match(pattern) for pattern in (".*", *NOT_COPIED)):
        return False
    if not path.is_file():
        what = f"a link to {os.path.realpath(path)}" if path.is_symlink() else "a pipe or a device"
        raise LinearizeError(f"{path} is {what}: not a file. Remove it or replace it", Exit.INCOMPATIBLE)
    return True


def shard_dtype(shards: list[dict[str, Any]], declared: str | None) -> str:
    """The dtype of new parameters: what the config declares, else the one most weights are stored in."""
    if declared in DTYPES.values():
        return str(declared)
    votes: dict[str, int] = {}
    for tensors in shards:
        for tensor in tensors.values():
            name = DTYPES.get(tensor.dtype)
            if name:
                votes[name] = votes.get(name, 0) + 1
    return max(votes, key=lambda name: votes[name]) if votes else "float32"
