"""A GGUF file as a source: an ordinary folder with float weights, for as long as this process runs.

transformers knows how a file's metadata make a config and a tokenizer, and how llama.cpp ordered each weight. Its
loader holds a whole model in memory; here weights are dequantized one at a time. What it would leave out is refused.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers import modeling_gguf_pytorch_utils as theirs

from ..errors import (
    Exit,
    IncompatibleError,
    LinearizeError,
    ResourceError,
    absent,
    check_file,
    reason_of,
    resource_error,
    some,
    writing,
)
from ..export.to_gguf import INSTALL, SPLITS, llama3_factors
from ..probe.probe import model_class_of
from ..probe.trace import build_on_meta, quiet
from ..terminal.output import say, size
from ..terminal.progress import progress
from .atomic import scratch_beside

FILE = "model.gguf"
SHARD = 2**30  # bytes that are held until they are written
ROPE = "rope_freqs.weight"
# How Llama 3.1 and later stretch their rotary embedding, but for the factor, the largest number in that tensor.
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
# The ways to split text in front of byte pairs that come along in any version of transformers.
FOLLOWED = {"default", "gpt-2", "smollm", *SPLITS.values()}


def as_folder(path: Path, weights: bool) -> Path:
    """The model in a GGUF file as a folder, which is removed when this process ends.

    Raises LinearizeError: 3 for what cannot be read exactly, 4 without the package gguf and without room.
    """
    if not path.exists():
        raise IncompatibleError(absent(path).message)
    check_file(path, Exit.INCOMPATIBLE)
    if importlib.util.find_spec("gguf") is None:
        raise ResourceError(f"{path} needs the package gguf: {INSTALL}")
    found = path.stat()
    return _made(path.absolute(), weights, (found.st_size, found.st_mtime_ns), os.getpid())


@functools.cache
def _made(path: Path, weights: bool, version: tuple[int, int], process: int) -> Path:
    """Weights go beside the file: there is room on a disk for models, and a result on that disk links them."""
    with contextlib.ExitStack() as held:
        with writing(path.parent):
            place: Any = scratch_beside(path) if weights else tempfile.TemporaryDirectory()
            folder = Path(held.enter_context(place))
        with writing(folder):
            _write(folder, path, weights)
        kept = held.pop_all()
    # A process that was forked from this one ends earlier.
    atexit.register(lambda: kept.close() if os.getpid() == process else None)
    return folder


def _write(folder: Path, path: Path, weights: bool) -> None:
    import gguf

    with _readable(path):
        reader = gguf.GGUFReader(path)
        scalars = {name: field for name, field in reader.fields.items() if field.types[0] != gguf.GGUFValueType.ARRAY}
        facts = {name: field.contents() for name, field in scalars.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = str(facts.get("general.architecture"))
    check_facts(path, architecture, facts, len(tensors))
    # Not the file's own folder: a config or a tokenizer beside it may be of another model.
    (folder / FILE).symlink_to(path)
    with _readable(path), quiet():
        config = AutoConfig.from_pretrained(folder, gguf_file=FILE)
        if facts.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab"):
            _write_tokenizer(folder, facts)
    (folder / FILE).unlink()
    check_config(path, architecture, facts, config.get_text_config())
    if ROPE in tensors:
        config.rope_parameters = llama3_rope(path, config, torch.tensor(tensors.pop(ROPE).data))
    head = model_class_of(config)
    with _readable(path):
        meta = build_on_meta(config, head)
        processor = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)(config=config.to_dict())
        mapping = theirs.get_gguf_hf_weights_map(meta, processor)
    parts = parts_of(path, tensors, mapping, meta)
    dtype = dtype_of({tensor.tensor_type.name for tensor in tensors.values()})
    text = json.loads(config.to_json_string())
    text |= {"architectures": [head.__name__], "dtype": str(dtype).removeprefix("torch.")}
    text = {key: value for key, value in text.items() if key not in ("_name_or_path", "_model_name_or_path")}
    (folder / "config.json").write_text(json.dumps(shortest(text), indent=2) + "\n", "utf-8")
    if isinstance(facts.get("general.license"), str):  # for the card of what is made of it
        (folder / "README.md").write_text(f"---\nlicense: {json.dumps(facts['general.license'])}\n---\n", "utf-8")
    if not weights:
        return

    def value(name: str) -> Tensor:
        whole: dict[str, Any] = {"tensors": {}}  # where experts of several tensors are put together
        for tensor in parts[name]:
            array = gguf.dequantize(tensor.data, tensor.tensor_type)
            found = processor.process(
                weights=array, name=tensor.name, tensor_key_mapping=mapping, parsed_parameters=whole
            )
            if found.name is not None:
                whole["tensors"][name] = torch.tensor(found.weights)
        return whole["tensors"][name].to(dtype).contiguous()

    _write_weights(folder, path, {name: meta.state_dict()[name].shape for name in parts}, value, dtype)


def check_facts(path: Path, architecture: str, facts: dict[str, Any], tensors: int) -> None:
    """Refuse what the metadata say of a file that transformers does not read, or not exactly. `tensors`: how many the
    file has."""
    if facts.get("split.count", 0) > 1:
        raise refused(path, f"one of {facts['split.count']} parts. Join them: llama-gguf-split --merge FIRST OUT.gguf")
    known = {*theirs.GGUF_SUPPORTED_ARCHITECTURES, *theirs.TENSOR_PROCESSORS} - {"general", "tokenizer"}
    if architecture not in known:
        raise refused(
            path,
            f"of the architecture {architecture!r}; those that are read are {', '.join(sorted(known))}. Convert the "
            "float model that it was made from",
        )
    layers = facts.get(f"{architecture}.block_count", 0)
    if layers > tensors:  # to build millions takes forever
        raise refused(path, f"a file of {layers:,} layers by its metadata, with {tensors:,} tensors. Download it again")
    scaling = facts.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise refused(path, f"of a model with {scaling} scaling of its rotary embedding, which transformers leaves out")


def check_config(path: Path, architecture: str, facts: dict[str, Any], config: Any) -> None:
    """Refuse a file that says something of its attention which transformers does not read and whose default is another,
    as StarCoder2's base of rotary frequencies."""
    known: Any = theirs.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    read = known.get(architecture, {})
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [ropes] if "rope_theta" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    said: dict[str, list[Any]] = {
        "rope.freq_base": [rope["rope_theta"] for rope in ropes],
        "rope.dimension_count": [int(width * x) for rope in ropes if (x := rope.get("partial_rotary_factor"))],
        "attention.sliding_window": [getattr(config, "sliding_window", None) or 0],
    }
    said |= {name: [getattr(config, name, None)] for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    for name, ours in said.items():
        value = facts.get(f"{architecture}.{name}")
        if value is None or read.get(name) or not ours:
            continue
        if not any(math.isclose(value, x or 0, rel_tol=1e-6) for x in ours):
            raise refused(path, f"a file whose {name} is {value:g}; transformers leaves it out, for {ours[0]}")
    scale = getattr(config, "query_pre_attn_scalar", width)
    if scale != width:  # of Gemma with 27B weights, whose file does not say it
        raise refused(path, f"of a model with heads of {width} that transformers gives the scale of heads of {scale:g}")


def llama3_rope(path: Path, config: Any, divisors: Tensor) -> dict[str, Any]:
    """The config's words for what a file divides each frequency by. Refused where these are not Llama 3's numbers."""
    rope = {**config.rope_parameters, **LLAMA3, "factor": float(divisors.max())}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    expected = llama3_factors(rope, size).float()
    if expected.shape != divisors.shape or not torch.allclose(expected, divisors, rtol=1e-4):
        raise refused(path, f"a file whose {ROPE} is not that of Llama 3, and transformers leaves it out")
    return rope


def parts_of(path: Path, tensors: dict[str, Any], mapping: dict[str, str], meta: Any) -> dict[str, list[Any]]:
    """For each weight of the model the tensors that it is made of. Refused where any is missing, left over,
    or of another size."""
    parts: dict[str, list[Any]] = {}
    left = []
    for name, tensor in tensors.items():
        target = mapping.get(name, mapping.get(name.removesuffix(".weight")))
        parts.setdefault(target, []).append(tensor) if target else left.append(name)
    if left:
        raise refused(path, f"a file with {some(left)}, which transformers leaves out")
    missing = sorted(set(meta.state_dict()) - set(parts) - set(meta.all_tied_weights_keys))
    if missing:
        raise refused(path, f"a {type(meta).__name__} without {some(missing)}. Download it again")
    for name, tensors_of in parts.items():
        shape, count = list(meta.state_dict()[name].shape), sum(int(tensor.n_elements) for tensor in tensors_of)
        if count != math.prod(shape):  # transformers has no key for the size, and took its default
            raise refused(path, f"a file whose {name} has {count:,} numbers, and by transformers' config it is {shape}")
    return parts


def dtype_of(kinds: set[str]) -> torch.dtype:
    """The file's own float type; float32, which holds every number, where any tensor is quantized."""
    if not kinds <= {"F32", "F16", "BF16"}:
        return torch.float32
    return torch.bfloat16 if "BF16" in kinds else torch.float16 if "F16" in kinds else torch.float32


def shortest(value: Any) -> Any:
    """JSON values whose numbers are what was written: a file holds 1e-05 as the float32 9.999999747e-06."""
    if isinstance(value, dict | list):
        return {k: shortest(v) for k, v in value.items()} if isinstance(value, dict) else [shortest(v) for v in value]
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def _write_tokenizer(folder: Path, facts: dict[str, Any]) -> None:
    """Tokenizer and chat template as ordinary files."""
    from tokenizers import pre_tokenizers
    from transformers.integrations import gguf as integration

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    split = facts.get("tokenizer.ggml.pre", "default")
    if split == "smollm":
        digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(digits)
    more = getattr(integration.gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", ())
    if facts["tokenizer.ggml.model"] == "gpt2" and split not in {*FOLLOWED, *more}:
        say(f"note: the tokenizer splits text as {split!r} says, which transformers takes for GPT-2's way")
    tokenizer.save_pretrained(folder)


def _write_weights(folder: Path, path: Path, shapes: dict[str, Any], value: Any, dtype: torch.dtype) -> None:
    """Shards of some weights each, and their index."""
    sizes = {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}
    need, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if need > free:
        message = f"need {size(need)} in {path.parent} for the float weights of {path.name}, {size(free)} free"
        raise ResourceError(f"{message}. Make room, or move the file")
    shards: list[list[str]] = [[]]
    for name, count in sizes.items():
        if shards[-1] and sum(sizes[one] for one in shards[-1]) + count > SHARD:
            shards.append([])
        shards[-1].append(name)
    index: dict[str, str] = {}
    with progress("dequantizing", need) as advance:
        for number, names in enumerate(shards, 1):
            held = {}
            for name in names:
                with _readable(path):
                    held[name] = value(name)
                advance(sizes[name])
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file(held, folder / file, {"format": "pt"})
            index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": need}, "weight_map": index}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text + "\n", "utf-8")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Within: a file is read by packages that raise as they like, which becomes a message (exit 3)."""
    try:
        yield
    except Exception as error:
        if isinstance(error, LinearizeError) or resource_error(error) is not None:
            raise
        message = f"{path} cannot be read as GGUF: {type(error).__name__}: {reason_of(error)}"
        raise IncompatibleError(f"{message}. Download it again, or convert the float model") from error


def refused(path: Path, what: str) -> LinearizeError:
    """The error (exit 3) for a file that is not read exactly."""
    return IncompatibleError(f"{path} is {what}")
