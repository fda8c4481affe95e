"""Write a checkpoint: source shards as they are, one shard of mixers, an index, code and a manifest."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .. import __version__
from ..errors import IncompatibleError
from ..plan.mechanisms import build_mixer
from ..plan.plan import Plan
from ..terminal.progress import Advance
from . import tokenizer
from .atomic import MANIFEST
from .carried import carried_files
from .code import SourceClasses, auto_map, code_files
from .fp8 import FP8, dequantized, is_scale
from .manifest import FORMAT
from .shards import (
    BLOCK,
    NAMES,
    TORCH_DTYPES,
    described,
    file_size,
    in_parallel,
    place_shard,
    read_tensor,
    sha256,
    tensor_sha256,
    write_shard,
)
from .source import DTYPES, Entry, Places, Source, read_header, read_json, tensor_places
from .templates import REFUSAL

MIXER_SHARD = "model-mixers.safetensors"
# Never a name that save_pretrained would choose: older safetensors write in place, into the linked source file.
SOURCE_SHARD = "model-source-{:05d}-of-{:05d}.safetensors"
INDEX = "model.safetensors.index.json"

Shards = dict[str, list[str]]  # file name -> tensor names
# "untouched", which has the source's bytes, and "written" -> "shards" (whole files) and "tensors" -> name -> sha256.
Hashes = dict[str, dict[str, dict[str, str]]]
Rewritten = tuple[dict[str, Entry], dict[str, str], set[str]]  # what a shard holds now; its hashes; what was cast


def write_checkpoint(folder: Path, source: Source, plan: Plan, natives: SourceClasses, seed: int) -> None:
    """Write the whole converted model into the empty `folder`."""
    shards, hashes = write_source_shards(folder, source, plan, natives.tied())
    mixers = write_mixers(folder / MIXER_SHARD, plan, seed)
    shards[MIXER_SHARD] = list(mixers)
    hashes["written"]["tensors"] |= mixers
    write_index(folder, shards)
    copy_carried(source.folder, folder)
    class_name = tokenizer.unnamed_class(source.folder)
    if class_name:
        path = folder / tokenizer.FILE
        write_json(path, {**(read_json(path) if path.exists() else {}), "tokenizer_class": class_name})
    code = code_files(plan, natives)
    for name in code:
        if (folder / name).exists():
            message = f"{source.name} has a {name} of its own, where ours must go. Rename it, and what imports it"
            raise IncompatibleError(message)
    write_rest(folder, source, plan, code, hashes, converted_config(source.config, plan, natives))


def write_rest(
    folder: Path, source: Source, plan: Plan, code: Mapping[str, str], hashes: Hashes, config: Any, **more: Any
) -> None:
    """All that is written anew beside the weights: `code`, `config` as config.json, the card, and linearize.json, with
    what is `more` in it."""
    for name, text in code.items():
        (folder / name).write_text(text, "utf-8")
    write_json(folder / "config.json", config)
    from . import card  # which imports recipes

    (folder / "README.md").write_text(card.model_card(plan, source.folder), "utf-8", errors="replace")
    cover(folder, hashes)
    write_json(folder / MANIFEST, {**manifest(folder, plan, hashes), **more})


def converted_config(config: dict[str, Any], plan: Plan, natives: SourceClasses) -> dict[str, Any]:
    """The source's config.json with our classes and plan. The model type stays: programs that know it ask for no trust
    until they load the model, and `refusing` keeps their classes from the weights."""
    changed = {
        **config,
        "model_type": natives.model_type,
        "architectures": ["Linearized" + natives.head.__name__],
        "auto_map": {**_other_code(config), **auto_map(natives)},
        "linearize": plan.spec(),
    }
    changed.pop("torch_dtype", None)
    changed["dtype"] = plan.dtype
    return refusing(changed, natives.config)


def refusing(config: dict[str, Any], config_class: Any) -> dict[str, Any]:
    """A config that no class of transformers loads weights by (see `templates.REFUSAL`), and so its parts: a native
    class reads the part that it is named for, such as `vision_config`."""
    parts = getattr(config_class, "sub_configs", {})
    changed = {
        name: refusing(value, parts[name]) if name in parts and isinstance(value, dict) else value
        for name, value in config.items()
    }
    return {**changed, "transformers_weights": REFUSAL}


def _other_code(config: dict[str, Any]) -> dict[str, Any]:
    """Entries of the source's `auto_map` for tokenizers and processors; its model classes would run without mixers."""
    entries = config.get("auto_map")
    entries = entries if isinstance(entries, dict) else {}
    return {name: where for name, where in entries.items() if not name.startswith(("AutoModel", "AutoConfig"))}


def manifest(folder: Path, plan: Plan, hashes: Hashes) -> dict[str, Any]:
    """What linearize.json says: who wrote this folder, from what, by which plan, which files, and the `hashes`
    of the weights: of whole shards, and of tensors in shards that were rewritten."""
    import transformers

    files = sorted({*(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()), MANIFEST})
    versions = {"linearize": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "format": FORMAT,
        "linearize": __version__,
        "versions": versions,
        "plan": plan.to_json(),
        "files": files,
        "code": {path.relative_to(folder).as_posix(): sha256(path) for path in sorted(folder.rglob("*.py"))},
        **hashes,
    }


def past(folder: Path) -> dict[str, Any]:
    """What linearize.json of a converted `folder` tells of its earlier versions, for one that is made of it."""
    old = json.loads((folder / MANIFEST).read_text("utf-8"))
    return {key: old[key] for key in ("upgraded_from",) if key in old}


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


# ---------------------------------------------------------------- weights


def write_source_shards(
    folder: Path, source: Source, plan: Plan, tied: set[str], pattern: str = SOURCE_SHARD
) -> tuple[Shards, Hashes]:
    """Link, or rewrite where the format or dtype changes; also returns the hashes of it all."""
    found = no_hashes()
    names = {pattern.format(n, len(source.shards)): shard for n, shard in enumerate(source.shards, 1)}
    if source.pickled or plan.cast:
        known = {} if source.block is None else tensor_places(source.shards)
        cast: Callable[..., Rewritten] = partial(rewrite_cast, known, source.block)
        rewrite = rewrite_pickle if source.pickled else cast
        written = {name: rewrite(shard, folder / name, plan, tied) for name, shard in names.items()}
        for _, hashes, changed in written.values():
            for name, value in hashes.items():
                found["written" if name in changed else "untouched"]["tensors"][name] = value
        return {name: list(kept) for name, (kept, _, _) in written.items()}, found

    def place(name: str, advance: Advance) -> str:
        return place_shard(names[name], folder / name, plan.copy, advance)

    linked = in_parallel(place, names, "placing weights", lambda name: file_size(names[name]))
    shards = {name: list(read_header(shard)) for name, shard in names.items()}
    found["untouched"]["shards"] = dict(zip(names, linked, strict=True))
    return shards, found


def no_hashes() -> Hashes:
    """Where hashes are collected."""
    return {kind: {"shards": {}, "tensors": {}} for kind in ("untouched", "written")}


def recorded_hashes(manifest: dict[str, Any]) -> Hashes:
    """Those that a linearize.json has; an earlier version recorded fewer kinds."""
    return {kind: manifest.get(kind, none) for kind, none in no_hashes().items()}


def uncovered(folder: Path, hashes: Hashes) -> list[tuple[str, Path, Entry]]:
    """Every tensor in the shards of a folder of which no hash is recorded: its name, its file, and where it lies."""
    shards = {name for kind in hashes.values() for name in kind["shards"]}
    tensors = {name for kind in hashes.values() for name in kind["tensors"]}
    paths = [path for path in sorted(folder.glob("*.safetensors")) if path.name not in shards]
    return [(name, path, entry) for name, (path, entry) in tensor_places(paths).items() if name not in tensors]


def cover(folder: Path, hashes: Hashes) -> None:
    """Record hashes of what has none: an earlier version recorded those of the source's weights alone."""
    left = uncovered(folder, hashes)
    found = in_parallel(lambda one, advance: tensor_sha256(*one[1:], advance), left, "hashing", lambda one: one[2].size)
    hashes["written"]["tensors"] |= {name: value for (name, _, _), value in zip(left, found, strict=True)}


def rewrite_cast(
    known: Places, block: tuple[int, int] | None, shard: Path, target: Path, plan: Plan, tied: set[str]
) -> Rewritten:
    """Cast a safetensors file, block by block. In a source of FP8 `block`s float weights are made of those and of their
    scales, which lie where `known` says."""
    old = {name: entry for name, entry in read_header(shard).items() if not is_scale(name, known)}
    scaled = {name for name, entry in old.items() if block is not None and entry.dtype == FP8}
    # Only what is known to be floating is cast; float8 without such scales is not.
    cast = {name for name, entry in old.items() if name in scaled or entry.dtype in DTYPES}
    whole = NAMES[getattr(torch, plan.dtype)]
    entries = {name: dataclasses.replace(e, dtype=whole) if name in cast else e for name, e in old.items()}
    new = {name: TORCH_DTYPES[e.dtype] for name, e in entries.items() if e.dtype != old[name].dtype}

    def values(name: str) -> Iterator[torch.Tensor]:
        scales = block if name in scaled else None
        for part in read_tensor(shard, old[name]) if scales is None else dequantized(name, known, scales):
            yield part.to(new.get(name, part.dtype))

    return entries, write_shard(target, entries, values), set(new)


def rewrite_pickle(shard: Path, target: Path, plan: Plan, tied: set[str]) -> Rewritten:
    """Write a pickle's tensors as safetensors, cast where the plan says so, block by block."""
    tensors = load_pickle(shard)
    kept = _independent(tensors, tied)
    old = {name: tensors[name].dtype for name in kept}
    new = {name: getattr(torch, plan.dtype) if plan.cast and d.is_floating_point else d for name, d in old.items()}
    entries = {name: described(name, tensors[name], new[name]) for name in kept}
    mapped, touched = zipfile.is_zipfile(shard), 0

    def values(name: str) -> Iterator[torch.Tensor]:
        nonlocal tensors, touched
        count = max(1, tensors[name].shape[0]) if tensors[name].ndim else 1
        rows = max(1, BLOCK * count // max(1, tensors[name].nbytes))
        for first in range(0, count, rows):
            # Pages that were read stay with the process until the file is no longer mapped.
            if mapped and touched > 4 * BLOCK:
                tensors, touched = load_pickle(shard), 0
            block = tensors[name][first : first + rows] if tensors[name].ndim else tensors[name]
            touched += block.nbytes
            yield block.to(new[name])

    return entries, write_shard(target, entries, values), {name for name in kept if new[name] != old[name]}


def load_pickle(shard: Path) -> dict[str, torch.Tensor]:
    """Tensors of a `.bin` shard, read with weights_only. Raises LinearizeError (exit 3) for anything but tensors."""
    try:
        # Files from before torch 1.6 cannot be mapped into memory.
        tensors = torch.load(shard, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(shard))
    except Exception as error:
        raise IncompatibleError(
            f"{shard} is not a plain pickle of tensors ({type(error).__name__}: {str(error).splitlines()[0]}). It was "
            "not executed. Use a safetensors version of the model"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        message = f"{shard} does not hold a plain mapping of names to tensors. Use a safetensors version of the model"
        raise IncompatibleError(message)
    return tensors


def meta_pickle(shard: Path) -> dict[str, torch.Tensor]:
    """Tensors of a `.bin` shard without their values."""
    return {name: tensor.to("meta") for name, tensor in load_pickle(shard).items()}


def _independent(tensors: dict[str, torch.Tensor], tied: set[str]) -> list[str]:
    """Names to keep: of `tied` ones that share memory with another, transformers ties them again."""
    kept: list[str] = []
    storages: set[int] = set()
    for name in sorted(tensors, key=lambda name: name in tied):
        storage = tensors[name].untyped_storage().data_ptr()
        if storage not in storages or name not in tied:
            kept.append(name)
        storages.add(storage)
    return kept


def write_mixers(
    path: Path, plan: Plan, seed: int, kept: Mapping[str, tuple[Path, Entry]] = MappingProxyType({})
) -> dict[str, str]:
    """Initialise every mixer, reproducibly, and save them as one shard, one at a time; returns the tensors' hashes.

    Tensors that are `kept` are copied from the file and place that are given with their names.
    """
    dtype = getattr(torch, plan.dtype)
    steps = {f"{step.site.path}.mixer.": step for step in plan.steps}
    entries: dict[str, Entry] = {}
    for prefix, step in steps.items():
        with torch.device("meta"):
            mixer = build_mixer(step.mechanism, step.site, step.options)
        dtypes = dict.fromkeys(mixer.fp32_names(), torch.promote_types(dtype, torch.float32))
        state = mixer.state_dict()
        entries |= {prefix + name: described(name, value, dtypes.get(name, dtype)) for name, value in state.items()}
    entries |= {name: Entry(entry.dtype, entry.shape) for name, (_, entry) in kept.items() if name in entries}
    built: dict[str, dict[str, torch.Tensor]] = {}

    def values(name: str) -> Iterator[torch.Tensor]:
        if name in kept:
            yield from read_tensor(*kept[name])
            return
        start = name.rindex(".mixer.") + len(".mixer.")
        prefix, own = name[:start], name[start:]
        if prefix not in built:
            step = steps[prefix]
            built.clear()
            mixer = build_mixer(step.mechanism, step.site, step.options)
            mixer.reset_parameters()
            built[prefix] = mixer.state_dict()
        yield built[prefix][own].to(TORCH_DTYPES[entries[name].dtype])

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return write_shard(path, entries, values)


def write_index(folder: Path, shards: Shards, name: str = INDEX) -> None:
    """model.safetensors.index.json, or one of another `name`, for these shards."""
    size = sum((folder / name).stat().st_size for name in shards)
    weight_map = {tensor: name for name, tensors in sorted(shards.items()) for tensor in tensors}
    write_json(folder / name, {"metadata": {"total_size": size}, "weight_map": weight_map})


def copy_carried(source: Path, folder: Path) -> None:
    """Copy what `carried_files` finds in the folder `source`."""
    for path in carried_files(source):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


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
