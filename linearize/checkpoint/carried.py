"""Which files of a source folder go along into the result, beside its weights: those that transformers and
sentence-transformers read when they load a model.

A list of names, not of suffixes: a folder may also hold notes, keys of a cloud, states of a training. What is copied
here is what `linearize push` uploads later.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_imports

from ..errors import Exit, IncompatibleError, no_file
from .manifest import MANIFEST, check_complete, listed_files

# What transformers reads of tokenizers, processors and generation settings. The tokenizers' own names are those of
# `vocab_files_names` in every tokenizer class of transformers 5.17 and 5.23; a test compares them.
NAMES = frozenset(
    (
        *("generation_config.json", "chat_template.json", "chat_template.jinja"),
        *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
        *("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
        *(
            "vocab.json",
            "vocab.txt",
            "merges.txt",
            "dict.txt",
            "bpe.codes",
            "tekken.json",
            "audio_tokenizer_config.json",
        ),
        *("tokenizer.model", "spiece.model", "spm.model", "spm_char.model", "sentencepiece.model", "tiktoken.model"),
        *("sentencepiece.bpe.model", "source.spm", "target.spm", "target_vocab.json", "vocab-src.json"),
        *("vocab-tgt.json", "entity_vocab.json", "emoji.json", "normalizer.json", "byte_maps.json"),
        *("prophetnet.tokenizer", "word_shape.json", "word_pronunciation.json"),
    )
)
# Tokenizers of several versions of transformers, which tokenizer_config.json names.
VERSIONED = re.compile(r"tokenizer\.\d[\d.]*\.json")
# The licence, with what it asks to be passed on.
LICENCES = ("LICEN[CS]E*", "NOTICE*", "COPYING*", "USE_POLICY*")
# The only folder that transformers reads: a loop of generation (custom_generate) knows the source, not this model.
TEMPLATES = "additional_chat_templates"
# What sentence-transformers reads beside the model: which modules follow it, its settings, and those of each module.
SENTENCES = "modules.json"
SENTENCE_FILES = frozenset((SENTENCES, "config_sentence_transformers.json", "sentence_bert_config.json"))
MODULE_FILES = ("config.json", "model.safetensors")
# Files whose `auto_map` names code.
NAMING = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def is_read(path: Path) -> bool:
    """Whether transformers reads a file of this name, or it is a licence."""
    if path.name.startswith("."):
        return False
    return path.name in NAMES or VERSIONED.fullmatch(path.name) is not None or is_licence(path)


def check_carried(folder: Path) -> None:
    """Raise LinearizeError (exit 3) where what goes along was not copied with a converted folder. Pictures of its card
    do not, and are not downloaded either; a folder that transformers saved lists nothing."""
    if (folder / MANIFEST).exists():
        check_complete(folder, [name for name in listed_files(folder) if not is_read(folder / name)])


def is_licence(path: Path) -> bool:
    """Whether a file is a licence, or what one asks to be passed on."""
    return any(path.match(pattern) for pattern in LICENCES)


def carried_files(folder: Path) -> list[Path]:
    """The files of a model's folder that go along: what `is_read`, chat templates, what `sentence_files` finds, and the
    folder's own code with the files that it names.

    Raises LinearizeError (exit 3) for one that is no file, or a link that leaves the folder.
    """
    code = code_of(folder)
    text = "\n".join(path.read_text("utf-8", "replace") for path in code)
    named = set(re.findall(r"""["']([\w.-]+\.\w+)["']""", text)) - {"config.json", "linearize.json"}
    files = []
    for path in sorted(folder.iterdir()):
        data = path.name in named and not path.name.endswith((".index.json", ".safetensors", ".bin", ".py"))
        if (is_read(path) or data) and not path.is_dir():
            files.append(path)
    files += code + sorted((folder / TEMPLATES).glob("*.jinja")) + sentence_files(folder)
    for path in files:
        check_file(path, folder)
    return files


def sentence_files(folder: Path) -> list[Path]:
    """What sentence-transformers needs to load the folder as a sentence encoder: its settings, and the modules behind
    the model, such as pooling. Empty where a module has weights in another format than safetensors, or code of its
    own: only the package's own classes are known to work with the result.
    """
    modules = modules_of(folder)
    parts = [folder / module["path"] for module in modules if module["path"]]
    if not modules or any(part.is_dir() and list(part.glob("*.bin")) for part in parts):
        return []
    files = [folder / name for name in sorted(SENTENCE_FILES)]
    files += [part / name for part in parts for name in MODULE_FILES]
    return [path for path in files if os.path.lexists(path)]


def modules_of(folder: Path) -> list[dict[str, str]]:
    """The modules that modules.json names, where all are classes of sentence-transformers and lie in the folder or one
    level below; else none."""
    try:
        modules = json.loads((folder / SENTENCES).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    known = isinstance(modules, list) and all(
        isinstance(module, dict)
        and str(module.get("type")).startswith("sentence_transformers.")
        and re.fullmatch(r"[\w-]*", str(module.get("path")))
        for module in modules
    )
    return modules if known else []


def code_of(folder: Path) -> list[Path]:
    """The Python files that the `auto_map` of a folder names, and what they import from it, as transformers does."""
    waiting = [f"{module}.py" for name in NAMING for module in _modules(folder / name)]
    found: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        path = folder / name
        if name in found or not path.is_file():
            continue
        found[name] = path
        waiting += [f"{module}.py" for module in get_relative_imports(path) if "." not in module]
    return [path for _, path in sorted(found.items())]


def _modules(path: Path) -> Iterable[str]:
    """Modules of this folder that the `auto_map` of a JSON file, or of one of its parts, or a pipeline in it names."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    for part in (content, *content.values()) if isinstance(content, dict) else ():
        entries: list[Any] = []
        if isinstance(part, dict):
            entries += part["auto_map"].values() if isinstance(part.get("auto_map"), dict) else ()
            custom = part.get("custom_pipelines")
            entries += [one.get("impl") for one in custom.values()] if isinstance(custom, dict) else ()
        for entry in entries:
            for where in entry if isinstance(entry, list | tuple) else [entry]:
                if isinstance(where, str) and "--" not in where and where.count(".") == 1:
                    yield where.partition(".")[0]


def check_file(path: Path, folder: Path) -> None:
    """Raise LinearizeError (exit 3) unless `path` is a file that lies in `folder`, or in the blobs of the Hub's cache.

    A link may lead to any file of this machine, whose content would be copied, and uploaded later.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if not path.is_file():
        raise no_file(path, Exit.INCOMPATIBLE)
    blobs = root.parent.parent / "blobs"
    if root not in real.parents and not (root.parent.name == "snapshots" and blobs in real.parents):
        raise IncompatibleError(
            f"{path} is a link to {real}, outside of the source's folder, and its content would be copied. Remove it, "
            "or put the file itself there"
        )


def left_behind(folder: Path, used: Iterable[Path]) -> list[str]:
    """Names of the files and folders in `folder` that do not go along; `used` are its weights. Hidden ones, the card,
    config.json and indices are not counted: they are rewritten."""
    along = {path.relative_to(folder).parts[0] for path in [*carried_files(folder), *used]}
    along |= {"config.json", "linearize.json", "README.md"}
    there = (path for path in sorted(folder.iterdir()) if not path.is_dir() or any(path.iterdir()))
    names = (path.name + "/" * path.is_dir() for path in there)
    return [n for n in names if n.rstrip("/") not in along and not n.startswith(".") and not n.endswith(".index.json")]
