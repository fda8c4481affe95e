"""The source checkpoint: find it in a folder or on the Hub, and describe it by its headers, without weights."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..demo import DEMO, model_folder
from ..errors import Exit, IncompatibleError, LinearizeError, ResourceError, check_file, leaves, no_model
from ..hub.download import download
from .atomic import MANIFEST

# What belongs to a model beside its weights: configs, tokenizer, templates, its own code, and the licence with what it
# asks to be passed on. Weights of other frameworks, logs, tables, pictures and states of a training do not.
SMALL_FILES = (
    *("*.json", "*.py", "*.jinja"),
    *("*.txt", "*.model", "*.tiktoken", "*.bpe", "*.codes", "*.spm", "*.vocab"),
    *("LICEN[CS]E*", "NOTICE*", "COPYING*", "USE_POLICY*"),
)
# An adapter of peft in a model's own folder: transformers would put it onto the base that it names.
ADAPTER_CONFIG = "adapter_config.json"
# What tells of a model without its weights.
CONFIG_FILES = (
    "config.json",
    "preprocessor_config.json",
    "model_index.json",
    ADAPTER_CONFIG,
    MANIFEST,
    "*.py",
    "*.index.json",
)
# Weights in the order in which they are looked for: stem and suffix, in one file or, with an index, in many.
FORMATS = (("model", ".safetensors"), ("pytorch_model", ".bin"))
# Keys of a config that say how often a part is built, and more than any model has; building them takes half a minute.
AMOUNT = re.compile(r"(layer|block|depth|expert|group|stage|codebook)s?$")
MAX_AMOUNT = 20_000
# Keys of a config whose value may be a repository of kernels: attn_implementation, _attn_implementation and the like.
KERNEL_KEY = re.compile(r"_implementation(_internal)?$")
# Of a folder where a model of transformers is asked for.
OF_DIFFUSERS = (
    "is a model of diffusers. In a local folder (hf download ID --local-dir DIR) convert, verify and push take it, and "
    "finetune and eval with a recipe of latents; see docs/diffusers.md"
)
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors header; its `size` bytes start at byte `start` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    size: int = 0


Places = dict[str, tuple[Path, Entry]]  # name of a tensor -> its file, and where in it


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint on disk: `shards` in order, `tensors` for safetensors (empty for pickled weights)."""

    folder: Path
    name: str
    revision: str | None
    config: dict[str, Any]
    shards: tuple[Path, ...]
    pickled: bool
    block: tuple[int, int] | None = None  # rows and columns of a block of FP8 weights; then `config` does not tell

    @property
    def bytes(self) -> int:
        return sum(shard.stat().st_size for shard in self.shards)

    @property
    def converted(self) -> bool:
        """Whether the config is that of a model that linearize wrote."""
        classes = self.config.get("architectures") or []
        return "linearize" in self.config or any(str(name).startswith("Linearized") for name in classes)


def open_source(model: str, revision: str | None, *, weights: bool = True) -> Source:
    """The checkpoint in folder or GGUF file `model`, else the Hub repo of that name (downloaded; only its config if not
    `weights`).

    Raises LinearizeError: 2 for a revision of a folder and for an empty name, 3 for what is no usable checkpoint, 4 for
    unreadable files, 5 for the Hub.
    """
    if not model.strip():
        raise LinearizeError("the name of the model is empty. Give a folder, or the Hub's user/repo")
    folder = Path(os.path.expanduser(model))
    if folder.suffix == ".gguf" and not folder.is_dir():
        return _open_gguf(folder, revision, weights)
    try:
        if os.path.isfile(folder):
            with folder.open("rb") as file:
                if file.read(4) == b"GGUF":  # some programs keep theirs under other names
                    return _open_gguf(folder, revision, weights)
            raise IncompatibleError(f"{model} is a file; give the folder that holds config.json")
        local = _is_folder(folder)
        if local:
            check_revision(model, revision)
        else:
            names = SMALL_FILES if weights else CONFIG_FILES
            folder, revision = download(model, revision, names, weight_files if weights else None)
        check_folder(folder)
        config, block = _read_config(folder)
        shards, pickled = find_shards(folder, weights)
    except OSError as error:
        raise unreadable(error) from error
    shipped = os.path.realpath(folder) == os.path.realpath(model_folder())
    name = DEMO if shipped else os.path.basename(os.path.realpath(folder)) if local else model
    return Source(folder, name, revision, config, shards, pickled, block)


def _open_gguf(path: Path, revision: str | None, weights: bool) -> Source:
    """The checkpoint in a GGUF file, under the file's name."""
    from .from_gguf import as_folder  # which imports transformers

    check_revision(str(path), revision)
    try:
        folder = as_folder(path, weights)
    except OSError as error:
        raise unreadable(error) from error
    return dataclasses.replace(open_source(str(folder), None, weights=weights), name=path.stem)


def check_revision(folder: str, revision: str | None) -> None:
    """Raise LinearizeError (exit 2) for a revision of a folder or file here, which has none."""
    if revision is not None:
        kind = "file" if os.path.isfile(folder) else "folder"
        message = f"{folder} is a {kind} here, and a revision ({revision}) is a branch, tag or commit on the Hub"
        raise LinearizeError(f"{message}. Leave it out, or give the Hub's user/repo")


def _is_folder(path: Path) -> bool:
    """Whether it is one here; a name that no path can have may still be a Hub id. Raises OSError when hidden."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return False
        raise


def unreadable(error: OSError) -> LinearizeError:
    """What to say (exit 4) of a file that the system does not give."""
    return ResourceError(f"cannot read {error.filename or 'the source'}: {error.strerror or error}")


@contextlib.contextmanager
def present() -> Iterator[None]:
    """Within: a source is read that was there before; a file that is gone becomes a message (exit 4)."""
    try:
        yield
    except FileNotFoundError as error:
        raise unreadable(error) from error


def _read_config(folder: Path) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """config.json without the scheme of FP8 weights, and the blocks of those."""
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    if "_class_name" in config or (folder / "model_index.json").exists():
        raise IncompatibleError(f"{folder} {OF_DIFFUSERS}")
    if not path.exists():
        raise no_model(folder)
    if not isinstance(config.get("model_type"), str):
        raise IncompatibleError(f"{path}: model_type is {config.get('model_type')!r}, not a name")
    quantization, block = config.get("quantization_config"), None
    if quantization:
        block = fp8_block(quantization)
        if block is None:
            raise quantized(folder, quantization)
        config = {key: value for key, value in config.items() if key != "quantization_config"}
    for keys, value in leaves(config):
        key = ".".join(one for one in keys if isinstance(one, str))
        if isinstance(value, int) and value > MAX_AMOUNT and AMOUNT.search(key):
            raise IncompatibleError(
                f"{path}: {key} is {value}, more than any model has (limit {MAX_AMOUNT:,}). Correct it, or download "
                "the file again"
            )
    return config, block


def fp8_block(quantization: Any) -> tuple[int, int] | None:
    """Rows and columns of a block that shares a scale, for FP8 weights as DeepSeek-V3's; None for any other scheme."""
    known = isinstance(quantization, dict) and quantization.get("quant_method") == "fp8"
    if not known or quantization.get("fmt", "e4m3") != "e4m3":
        return None
    match quantization.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def quantized(folder: Path, quantization: Any) -> LinearizeError:
    """The error (exit 3) for quantized weights, with the way to float ones."""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    card = folder / "README.md"
    text = card.read_text("utf-8", errors="replace")[:20_000] if card.is_file() else ""
    base = re.search(r"^base_model:\s*(?:-\s*)?([\w.-]+/[\w.-]+)\s*$", text, re.MULTILINE)
    load = {
        "mxfp4": "from_pretrained(IT, quantization_config=transformers.Mxfp4Config(dequantize=True))",
        "bitsandbytes": "from_pretrained(IT).dequantize()",
    }.get(str(method))
    how = "convert the float model that it was made from"
    if base is not None:
        how = f"convert the model that it was made from: linearize convert {base[1]}"
    elif load is not None:
        load = load.replace("IT", repr(str(folder)))
        how = f'make one: python -c "import transformers; transformers.AutoModelForCausalLM.{load}'
        how += ".save_pretrained('float')\", then linearize convert float"
    return IncompatibleError(f"{folder.name} is quantized ({method}): surgery needs float weights; {how}")


def check_folder(folder: Path) -> None:
    """Raise LinearizeError (exit 3) where what should be a file of a model is a pipe, a socket or a device."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if any(path.match(pattern) for pattern in (*SMALL_FILES, "*.safetensors", "*.bin")):
            check_file(path, Exit.INCOMPATIBLE)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises LinearizeError (exit 3) for another file, and for a pipe, which would never end."""
    check_file(path, Exit.INCOMPATIBLE)
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise IncompatibleError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise IncompatibleError(f"{path} holds {type(data).__name__}, expected an object")
    return data


def hub_kernel(config: Any) -> str | None:
    """`key=value` of the first entry of a config, or of one inside it, that names a kernel of the Hub, whose code would
    run: an attention or expert implementation with a slash in it. None where there is none."""
    left: list[tuple[str, Any]] = [("", config)]
    while left:  # as `leaves`, without the keys of all entries: a tokenizer has hundreds of thousands
        named, value = left.pop()
        if isinstance(value, dict):
            # Under such a key may be a value for each part of the model.
            left += [(named or key * bool(KERNEL_KEY.search(key)), item) for key, item in value.items()][::-1]
        elif isinstance(value, list):
            left += [(named, item) for item in value if named or isinstance(item, dict | list)][::-1]
        elif named and isinstance(value, str) and "/" in value:
            return f"{named}={value}"
    return None


def tensor_places(shards: Iterable[Path]) -> Places:
    """Where every tensor of safetensors files lies."""
    return {name: (shard, entry) for shard in shards for name, entry in read_header(shard).items()}


def find_shards(
    folder: Path, weights: bool, formats: tuple[tuple[str, str], ...] = FORMATS
) -> tuple[tuple[Path, ...], bool]:
    """Shards in order and whether they are pickled; safetensors win over pickles."""
    for stem, suffix in formats:
        index, single = folder / f"{stem}{suffix}.index.json", folder / f"{stem}{suffix}"
        # transformers prefers the single file when both are there, diffusers the index.
        if single.exists() and (formats is FORMATS or not index.exists()):
            return (single,), suffix == ".bin"
        if index.exists():
            return _indexed_shards(index, weights), suffix == ".bin"
    if not weights:
        return (), False
    names = ", ".join(f"{stem}{suffix}" for stem, suffix in formats)
    raise IncompatibleError(f"{folder} has no weights: expected {names} or their index")


def weight_files(folder: Path) -> list[list[str]]:
    """Names of the weights in each format, best first, by the indices in `folder`; without one, of a single file."""
    found = []
    for stem, suffix in FORMATS:
        index = folder / f"{stem}{suffix}.index.json"
        found.append(sorted(set(weight_map(index).values())) if index.exists() else [f"{stem}{suffix}"])
    return found


def weight_map(index: Path) -> dict[str, str]:
    """The shard of each tensor, as an index has it, none of them outside its folder. Raises LinearizeError (exit 3) for
    one that is damaged, or that names another place."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise IncompatibleError(f"{index}: weight_map must map tensor names to file names")
    check_names(index, found.values())
    return found


def check_names(index: Path, names: Iterable[str]) -> None:
    """Raise LinearizeError (exit 3) unless what an index names lies beside it."""
    for name in names:
        if Path(name).name != name or name in ("", ".."):
            raise IncompatibleError(f"{index}: {name!r} leaves the folder")


def _indexed_shards(index: Path, weights: bool) -> tuple[Path, ...]:
    shards = []
    for name in sorted(set(weight_map(index).values())):
        if os.path.isfile(index.parent / name):
            shards.append(index.parent / name)
        elif weights:
            raise IncompatibleError(f"{index} names {name}, which is missing. Download the model again")
    return tuple(shards)


def read_header(shard: Path) -> dict[str, Entry]:
    """Tensors of a safetensors file from its header. Raises LinearizeError when it is cut short or lies."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, MAX_HEADER):
                raise ValueError(f"its header claims {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors, spans = {}, [(0, 0)]
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            shape = tuple(int(n) for n in entry["shape"])
            if not 0 <= start <= end or end > size - 8 - length:
                raise ValueError(f"tensor {name} ends at byte {8 + length + end}, the file at {size}")
            item = ITEM_BYTES.get(entry["dtype"])
            if min(shape, default=0) < 0 or (item is not None and end - start != math.prod(shape) * item):
                raise ValueError(f"tensor {name} has {end - start} bytes, which its shape {list(shape)} does not fill")
            tensors[name] = Entry(entry["dtype"], shape, 8 + length + start, end - start)
            spans.append((start, end))
        if [end for _, end in sorted(spans)] != [*(start for start, _ in sorted(spans)[1:]), size - 8 - length]:
            raise ValueError("its tensors overlap or leave gaps")
    except OSError as error:
        raise unreadable(error) from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error) as error:
        raise IncompatibleError(f"{shard} is damaged or cut short: {error}. Download it again") from error
    return tensors
