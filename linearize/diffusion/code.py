"""Render the one code file of a converted diffusion transformer, and the config entries that make diffusers load it.

diffusers takes along, from a folder or the Hub, one Python file for each component of a pipeline, named in
model_index.json, and puts those of all models into one folder. So the file holds every kernel file that it needs,
and a hash of it all is in its name: of two models in a process, each computes with its own.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping
from typing import Any

from linearize_kernels.mixer import AttentionSite

from .. import __version__
from ..checkpoint.flatten import flat_files, imported
from ..checkpoint.templates import templates_of, written
from ..errors import IncompatibleError
from ..plan.mechanisms import parts_of

# By the class name of a processor that computes no softmax: who reads q, k and v as it does, and where that is.
READERS = {"SanaLinearAttnProcessor2_0": ("diffusers.models.transformers.sana_transformer", "SanaAttnProcessor2_0")}
# What `carried` makes of a kernel file.
CARRIED = re.compile(r"^FILES\[\"(\w+)\"\] = r'''\n((?:\|.*\n)*)'''$", re.MULTILINE)


def readers(kinds: set[str]) -> dict[str, Any]:
    """The classes that stand in for those of `kinds` that compute no softmax."""
    found = {kind: READERS[kind] for kind in kinds & READERS.keys()}
    return {kind: getattr(importlib.import_module(place), name) for kind, (place, name) in found.items()}


def code_of(native: str, mechanisms: set[str], parts: set[str], kinds: set[str]) -> tuple[str, str]:
    """Name, without `.py`, and text of the file for a class of diffusers whose processors are of `kinds`. `parts` are
    the flat names of the files that options switch on."""
    files = flat_files([*sorted(mechanisms), *sorted(parts), "diffusion"])
    return module(__version__, native, mechanisms, kinds, files)


def module(
    version: str, native: str, mechanisms: set[str], kinds: set[str], files: Mapping[str, str]
) -> tuple[str, str]:
    """`code_of` as linearize `version` writes it with the kernel files `files` (name -> text)."""
    used = {kind: READERS[kind] for kind in sorted(kinds & READERS.keys())}
    text = templates_of(version).module.format(
        native=native,
        version=written(version),
        imports="".join(f"from {place} import {reader}\n" for place, reader in used.values()),
        name="{name}",
        mechanisms=sorted(mechanisms),
        readers=", ".join(f'"{kind}": {reader}' for kind, (_, reader) in used.items()),
        files="\n".join(carried(name, text) for name, text in ordered(files).items()),
    )
    name = "linearized_" + hashlib.sha256(text.encode()).hexdigest()[:12]
    return name, text.replace('NAME = "{name}"', f'NAME = "{name}"', 1)


def carried(file: str, text: str) -> str:
    """A kernel file as a string of Python, which begins no line with an import."""
    assert "'''" not in text, f"{file} has three quotes that end the string around it"
    lines = "\n".join(f"| {line}".rstrip() for line in text.split("\n")[:-1])
    return f"FILES[\"{file.removesuffix('.py')}\"] = r'''\n{lines}\n'''"


def carried_files(text: str) -> dict[str, str]:
    """File name -> text of the kernel files that the text of such a file carries: the inverse of `carried`."""
    return {
        f"{name}.py": "".join(f"{line[2:]}\n" for line in lines.splitlines()) for name, lines in CARRIED.findall(text)
    }


def ordered(files: Mapping[str, str]) -> dict[str, str]:
    """`files` by name, each after those that it imports."""
    found: dict[str, str] = {}

    def visit(name: str) -> None:
        for needed in imported(files[name]):
            if f"{needed}.py" in files:
                visit(f"{needed}.py")
        found.setdefault(name, files[name])

    for name in sorted(files):
        visit(name)
    return found


def code_for(config: dict[str, Any], version: str = __version__, text: str | None = None) -> tuple[str, str]:
    """`code_of` a converted transformer, by its config; or, with the kernel files that `text` carries, as `version`
    writes it. Raises LinearizeError (exit 3) for another config.
    """
    try:
        native, spec = config["_class_name"].removeprefix("Linearized"), config["linearize"]
        kinds = {layer["site"]["kind"] for layer in spec["layers"]}
        mechanisms = {layer["mechanism"] for layer in spec["layers"]}
        layers = [
            (layer["mechanism"], AttentionSite.from_dict(layer["site"]), layer["options"]) for layer in spec["layers"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise IncompatibleError(f"config.json has no plan of linearize's: {error!r}") from error
    if text is None:
        return code_of(native, mechanisms, {part for layer in layers for part in parts_of(*layer)}, kinds)
    return module(version, native, mechanisms, kinds, carried_files(text))


def converted_config(config: dict[str, Any], native: str, spec: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """The source's config.json with our class and plan; name and text of the code file beside it."""
    changed = {**config, "_class_name": f"Linearized{native}", "linearize": spec}
    name, text = code_for(changed)
    return {**changed, "auto_map": {"AutoModel": f"{name}.Linearized{native}"}}, name, text
