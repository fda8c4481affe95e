"""Write a converted pipeline: unconverted parts as they are, and one more shard for each converted transformer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from .. import __version__
from ..checkpoint.card import PLACE, UNTRAINED, inherited, options_text
from ..checkpoint.carried import TEMPLATES, is_licence, is_read
from ..checkpoint.shards import place_shard
from ..checkpoint.source import Source
from ..checkpoint.write import (
    MANIFEST,
    Hashes,
    manifest,
    no_hashes,
    write_index,
    write_json,
    write_mixers,
    write_source_shards,
)
from ..errors import redact
from ..plan.plan import Plan
from ..terminal.output import layers_named
from .code import converted_config
from .probe import Part

INDEX_FILE = "model_index.json"
STEM = "diffusion_pytorch_model"
FORMATS = ((STEM, ".safetensors"), (STEM, ".bin"))
SHARDS = f"{STEM}.safetensors.index.json"
# The only names that diffusers downloads from the Hub.
SHARD = STEM + "-{:05d}-of-{:05d}.safetensors"
# Files of numbers, which may be links to the source's; small files are copied, for people edit them.
WEIGHTS = (".safetensors", ".bin", ".msgpack", ".onnx", ".pb", ".pt", ".pth", ".ckpt", ".gguf", ".h5")

CARD = Path(__file__).with_name("card.md").read_text("utf-8").removesuffix("\n")
PIPELINE = f"""from diffusers import DiffusionPipeline

{PLACE}
pipeline = DiffusionPipeline.from_pretrained(name, trust_remote_code=True)"""
MODEL = f"""from diffusers import AutoModel

{PLACE}
model = AutoModel.from_pretrained(name, trust_remote_code=True)"""


def write_pipeline(folder: Path, plan: Plan, source: Source, parts: list[Part], seed: int) -> None:
    """Write everything into the empty `folder`."""
    hashes = no_hashes()
    entries = {}
    hashes["untouched"]["shards"] |= copy_others(folder, source, parts, plan.copy)
    for part in parts:
        place = folder / part.name
        place.mkdir(exist_ok=True)
        own, entries[part.name] = write_part(place, part, part.own(plan), seed)
        for kind, found in own.items():
            for what, values in found.items():
                hashes[kind][what] |= {part.prefix + name: value for name, value in values.items()}
    if source.config:
        write_json(folder / INDEX_FILE, {**source.config, **entries})
    (folder / "README.md").write_text(card(plan, source), "utf-8", errors="replace")
    write_json(folder / MANIFEST, manifest(folder, plan, hashes))


def copy_others(folder: Path, source: Source, parts: list[Part], copy: bool) -> dict[str, str]:
    """Everything that diffusers reads but the transformers' own files; hashes of the weights among it, by name."""
    hashes = {}
    for path in other_files(source, parts)[0]:
        name = path.relative_to(source.folder)
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in WEIGHTS:
            hashes[name.as_posix()] = place_shard(path, target, copy)
        else:
            shutil.copyfile(path, target)
    return hashes


def other_files(source: Source, parts: list[Part]) -> tuple[list[Path], list[Path]]:
    """Files beside those of the transformers that convert: which go along, and which do not since nothing reads them.

    Along go the folders that model_index.json names, of them what diffusers and transformers read; licences; code.
    Hidden files and those that are written anew are in neither.
    """
    converted = {part.source.folder for part in parts}
    read = {source.folder / name for name, entry in source.config.items() if isinstance(entry, list)}
    along: list[Path] = []
    left: list[Path] = []
    for path in sorted(source.folder.rglob("*")):
        name = path.relative_to(source.folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_dir() or hidden or name.as_posix() in ("README.md", MANIFEST, INDEX_FILE):
            continue
        config = path.name in ("config.json", "scheduler_config.json") or path.match("*.index.json")
        if path.parent in converted and (path.suffix in WEIGHTS or config):
            continue
        template = path.suffix == ".jinja" and path.parent.name == TEMPLATES and path.parent.parent in read
        goes = template or path.suffix == ".py" or (path.parent == source.folder and is_licence(path))
        goes = goes or (path.parent in read and (config or path.suffix in WEIGHTS or is_read(path)))
        (along if goes else left).append(path)
    return along, left


def write_part(folder: Path, part: Part, plan: Plan, seed: int) -> tuple[Hashes, list[str]]:
    """A transformer in its folder: the hashes of its weights, and its entry of model_index.json."""
    count = len(part.source.shards)
    # As many as there will be: the last is the one of the mixers.
    pattern = SHARD.replace("of-{:05d}", f"of-{count + 1:05d}")
    plan = dataclasses.replace(plan, pickled=part.source.pickled)
    shards, hashes = write_source_shards(folder, part.source, plan, set(), pattern)
    mixers = pattern.format(count + 1)
    written = write_mixers(folder / mixers, plan, seed) if plan.steps else {}
    shards[mixers] = list(written)
    hashes["written"]["tensors"] |= written
    write_index(folder, {name: tensors for name, tensors in shards.items() if tensors}, SHARDS)
    config, name, text = converted_config(part.source.config, part.native, plan.spec())
    (folder / f"{name}.py").write_text(text, "utf-8")
    write_json(folder / "config.json", config)
    return hashes, [name, config["_class_name"]]


def card(plan: Plan, source: Source) -> str:
    """README.md."""
    mechanisms = sorted({step.mechanism for step in plan.steps})
    metadata: dict[str, Any] = {
        **inherited(source.folder),
        "library_name": "diffusers",
        "tags": ["linear-attention", "linearize", *mechanisms],
    }
    kept = [site.layer for site in plan.kept]
    return redact(
        CARD.format(
            metadata="\n".join(f"{key}: {json.dumps(value)}" for key, value in metadata.items()),
            name=plan.source,
            mechanisms=", ".join(name.upper() for name in mechanisms),
            architecture=plan.architecture,
            layers=layers_named(step.site.layer for step in plan.steps),
            kept=f"; softmax stays in {layers_named(kept)}" if kept else "",
            version=__version__,
            untrained=UNTRAINED,
            loading=PIPELINE if source.config else MODEL,
            new_parameters=plan.new_parameters,
            options=options_text(plan),
            notes="".join(f"\n- dropped: {note}" for note in plan.notes) + "\n" if plan.notes else "",
        )
    )
