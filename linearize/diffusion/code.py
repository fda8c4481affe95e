"""Render the one code file of a converted diffusion transformer, and the config entries that make diffusers load it.

diffusers takes along, from a folder or the Hub, one Python file for each component of a pipeline, named in
model_index.json, and puts those of all models into one folder. So the file holds every kernel file that it needs,
and a hash of it all is in its name: of two models in a process, each computes with its own.
"""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

from .. import __version__
from ..checkpoint.flatten import flat_files, imported
from ..errors import Exit, LinearizeError
from ..plan.mechanisms import load_mechanism

# By the class name of a processor that computes no softmax: who reads q, k and v as it does, and where that is.
READERS = {"SanaLinearAttnProcessor2_0": ("diffusers.models.transformers.sana_transformer", "SanaAttnProcessor2_0")}

# `load` makes modules of the carried text. A bar begins each line of it, for diffusers looks for imports in whatever
# begins a line with `from`, in strings too.
MODULE = '''"""{native} with linear attention; written by linearize {version}.

FILES are files of linearize's kernels folder, a bar before each line; `load` makes modules of them.
"""

import importlib.abc
import importlib.util
import os
import sys
import types

from diffusers import {native}
{imports}
NAME = "{name}"
MECHANISMS = {mechanisms}
READERS = {{{readers}}}
FILES = {{}}  # name -> text, in the order of their imports


class Carried(importlib.abc.ExecutionLoader):
    """Loads a module from FILES; tracebacks, inspect and Triton find its text."""

    def get_source(self, fullname):
        lines = FILES[fullname.rpartition(".")[2]].strip("\\n").split("\\n")
        return "".join(line[2:] + "\\n" for line in lines)

    def get_filename(self, fullname):
        return os.path.join(os.path.dirname(os.path.abspath(__file__)), *fullname.split(".")) + ".py"


def load():
    """The class, made once in a process."""
    package = sys.modules.get(NAME)
    if not hasattr(package, "Linearized{native}"):
        package = types.ModuleType(NAME)
        package.__path__ = []
        sys.modules[NAME] = package
        for file in FILES:
            spec = importlib.util.spec_from_loader(f"{{NAME}}.{{file}}", Carried())
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            setattr(package, file, module)
        mixers = {{name: package.mixer.own_mixer(getattr(package, name)) for name in MECHANISMS}}
        linearized = package.diffusion.linearized
        package.Linearized{native} = linearized({native}, mixers, READERS, __file__)
    return package.Linearized{native}


{files}

Linearized{native} = load()
'''


def readers(kinds: set[str]) -> dict[str, Any]:
    """The classes that stand in for those of `kinds` that compute no softmax."""
    found = {kind: READERS[kind] for kind in kinds & READERS.keys()}
    return {kind: getattr(importlib.import_module(place), name) for kind, (place, name) in found.items()}


def code_of(native: str, mechanisms: set[str], kinds: set[str]) -> tuple[str, str]:
    """Name, without `.py`, and text of the file for a class of diffusers whose processors are of `kinds`."""
    files = ordered(flat_files([*sorted(mechanisms), "diffusion"]))
    names = [load_mechanism(name).__module__.rpartition(".")[2] for name in sorted(mechanisms)]
    used = {kind: READERS[kind] for kind in sorted(kinds & READERS.keys())}
    text = MODULE.format(
        native=native,
        version=__version__,
        imports="".join(f"from {place} import {reader}\n" for place, reader in used.values()),
        name="{name}",
        mechanisms=names,
        readers=", ".join(f'"{kind}": {reader}' for kind, (_, reader) in used.items()),
        files="\n".join(carried(name, text) for name, text in files.items()),
    )
    name = "linearized_" + hashlib.sha256(text.encode()).hexdigest()[:12]
    return name, text.replace('NAME = "{name}"', f'NAME = "{name}"', 1)


def carried(file: str, text: str) -> str:
    """A kernel file as a string of Python, which begins no line with an import."""
    assert "'''" not in text, f"{file} has three quotes that end the string around it"
    lines = "\n".join(f"| {line}".rstrip() for line in text.split("\n")[:-1])
    return f"FILES[\"{file.removesuffix('.py')}\"] = r'''\n{lines}\n'''"


def ordered(files: dict[str, str]) -> dict[str, str]:
    """`files` by name, each after those that it imports."""
    found: dict[str, str] = {}

    def visit(name: str) -> None:
        for needed in imported(files[name]):
            visit(f"{needed}.py")
        found.setdefault(name, files[name])

    for name in sorted(files):
        visit(name)
    return found


def code_for(config: dict[str, Any]) -> tuple[str, str]:
    """`code_of` a converted transformer, by its config. Raises LinearizeError (exit 3) for another config."""
    try:
        native, spec = config["_class_name"].removeprefix("Linearized"), config["linearize"]
        kinds = {layer["site"]["kind"] for layer in spec["layers"]}
        return code_of(native, {layer["mechanism"] for layer in spec["layers"]}, kinds)
    except (KeyError, TypeError, AttributeError) as error:
        raise LinearizeError(f"config.json has no plan of linearize's: {error!r}", Exit.INCOMPATIBLE) from error


def converted_config(config: dict[str, Any], native: str, spec: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """The source's config.json with our class and plan; name and text of the code file beside it."""
    changed = {**config, "_class_name": f"Linearized{native}", "linearize": spec}
    name, text = code_for(changed)
    return {**changed, "auto_map": {"AutoModel": f"{name}.Linearized{native}"}}, name, text
