"""Convert a pipeline of diffusers, or the folder of one transformer: the story of ../convert.py.

Each transformer that the pipeline holds (some have two) becomes linear in its self-attention; whatever else is in the
folder goes along as it is. A transformer's own folder is a pipeline of one part without a name.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from ..checkpoint.atomic import output_folder
from ..checkpoint.carried import check_file
from ..checkpoint.source import Source, check_names, check_revision, find_shards, present, read_header, read_json
from ..checkpoint.write import meta_pickle
from ..convert import Say, check_disk, check_paths, check_secrets, disagree, own_code, stored_dtype
from ..errors import IncompatibleError, LinearizeError, ResourceError, some
from ..plan.plan import DIFFUSERS, Plan
from ..plan.request import Request
from ..probe.found import Found, Other
from ..probe.trace import quiet
from ..verify.child.latents import INPUTS
from ..verify.reload import Level
from .probe import Part, build, probe
from .write import FORMATS, INDEX_FILE, WEIGHTS, other_files, write_pipeline

# Classes that older checkpoints name, with the norm that tells what became of them.
FORMER = {("Transformer2DModel", "ada_norm_zero"): "DiTTransformer2DModel"}


def holds_diffusers(model: str) -> bool:
    """Whether `model` is a folder here with a pipeline or a model of diffusers."""
    folder = Path(os.path.expanduser(model))
    try:
        if not model.strip():  # which is no name of the working directory
            return False
        if (folder / INDEX_FILE).is_file():
            return True
        return "_class_name" in read_json(folder / "config.json")
    except (OSError, LinearizeError):  # the other story names what is wrong
        return False


def plan_conversion(
    model: str,
    mechanism: str | None,
    *,
    restore: str = "",
    keep_heads: str = "",
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
    **asked: Any,
) -> tuple[Plan, Source, list[Part]]:
    """Decide everything and touch nothing, as `plan_conversion` of ../convert.py; layers count on through all parts.

    Raises LinearizeError with the exit code of the obstacle.
    """
    if restore:
        raise LinearizeError("--restore: of models of diffusers, convert the source again with other --layers")
    if mechanism is None:
        raise LinearizeError("--to is missing: name the mechanism, such as --to gsa")
    request = Request(mechanism, keep_heads=keep_heads, **asked)
    check_revision(model, revision)
    folder = Path(os.path.expanduser(model))
    source, parts = open_parts(folder, load_diffusers(folder), weights)
    check_files(source, parts, trust_remote_code)
    if weights:
        for part in parts:
            check_weights(part)
    plan = request.plan(
        source,
        probe_parts(parts),
        architecture=" and ".join(dict.fromkeys(part.native for part in parts)),
        model_type=DIFFUSERS,
        stored=stored_dtype(parts[0].source),
        numbers=sum(p.numel() for part in parts for p in part.model.parameters()),
        pickled=any(part.source.pickled for part in parts),
    )
    return plan, source, [part for part in parts if part.own(plan).steps]


def convert(
    plan: Plan,
    source: Source,
    parts: list[Part],
    output: Path,
    *,
    overwrite: bool = False,
    level: Level = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
    say: Say = print,
) -> str:
    """Carry a plan out: write to a temporary folder, verify there, rename to `output`. Returns what was verified."""
    from .verify import verify

    with present():
        check_paths(source, output, overwrite)
        check_disk(plan, source, output)
    with output_folder(output, overwrite) as folder:
        write_pipeline(folder, plan, source, parts, seed)
        message = verify(folder, level, plan, parts)
    say(message)
    return message


# ---------------------------------------------------------------- the source


def load_diffusers(folder: Path) -> Any:
    """The package. Raises LinearizeError (exit 4) where it is missing."""
    try:
        with quiet():
            import diffusers
    except ImportError as error:
        raise ResourceError(
            f"{folder} is a model of diffusers, which cannot be imported ({error}). Install it: "
            'pip install "linearize[diffusers]"'
        ) from error
    diffusers.utils.logging.set_verbosity_error()
    return diffusers


def open_parts(folder: Path, diffusers: Any, weights: bool) -> tuple[Source, list[Part]]:
    """The folder as one source, whose shards are those of all its models, and the transformers that are converted.

    Raises LinearizeError (exit 3) for a folder without such, and for what cannot be used.
    """
    index = read_json(folder / INDEX_FILE) if (folder / INDEX_FILE).exists() else {}
    check_names(folder / INDEX_FILE, index)
    names = [n for n, e in index.items() if isinstance(e, list) and (folder / n / "config.json").exists()]
    kinds, parts = {}, []
    for name in names if index else [""]:
        config = read_json(folder / name / "config.json")
        kind = str(config.get("_class_name"))
        kinds[name] = kind = FORMER.get((kind, str(config.get("norm_type"))), kind)
        if kind.removeprefix("Linearized") in INPUTS:
            parts.append(_part(folder / name, name, config, kind, diffusers, weights))
    if not parts:
        models = [f"{kind} ({name})" if name else kind for name, kind in kinds.items() if kind != "None"]
        raise IncompatibleError(
            f"{folder} holds {', '.join(models) or 'no model of diffusers'}; of diffusers, linearize converts "
            f"{', '.join(INPUTS)}"
        )
    shards = tuple(sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".bin")))
    whole = Source(folder, os.path.basename(os.path.realpath(folder)), None, index, shards, False)
    check_secrets(whole)
    return whole, parts


def _part(folder: Path, name: str, config: dict[str, Any], kind: str, diffusers: Any, weights: bool) -> Part:
    if "linearize" in config:
        raise IncompatibleError(f"{folder} is linear already, as {kind}. Convert what it was made of")
    if config.get("quantization_config"):
        raise IncompatibleError(f"{folder} is quantized: surgery needs float weights; use its base model")
    if not hasattr(diffusers, kind):
        raise IncompatibleError(f"diffusers {diffusers.__version__} has no {kind}: upgrade it")
    source = Source(folder, folder.name, None, config, *find_shards(folder, weights, FORMATS))
    check_secrets(source)
    return Part(name, source, build(getattr(diffusers, kind), source))


def next_step(plan: Plan, folder: Path, *_: Any) -> str:
    """How to go on with a conversion."""
    return "train its mixers, see docs/diffusers.md"


def unread(source: Source, parts: list[Part]) -> list[str]:
    """What of the source's folder does not go along into the result, since diffusers reads none of it."""
    return [path.relative_to(source.folder).as_posix() for path in other_files(source, parts)[1]]


def check_files(source: Source, parts: list[Part], trust_remote_code: bool) -> None:
    """Raise LinearizeError (exit 3) for code of the source's own, unless that is trusted, for what is no file, and for
    links to elsewhere, except of weights."""
    for path in source.folder.rglob("*"):
        if path.is_symlink() and not path.is_file():
            message = f"{path} is a link to {os.path.realpath(path)}, no file. Put there what it stands for"
            raise IncompatibleError(message)
    for path in other_files(source, parts)[0]:
        if path.suffix not in WEIGHTS:
            check_file(path, source.folder)
    files = sorted(path.relative_to(source.folder).as_posix() for path in source.folder.rglob("*.py"))
    if files and not trust_remote_code:
        raise own_code(source, some(files))


def check_weights(part: Part) -> None:
    """Raise LinearizeError (exit 3) when config and weights disagree."""
    stored: dict[str, tuple[int, ...]] = {}
    for shard in part.source.shards:
        tensors: Any = meta_pickle(shard) if part.source.pickled else read_header(shard)
        stored |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted = {name: tuple(value.shape) for name, value in part.model.state_dict().items()}
    ignored = [*(part.model._keys_to_ignore_on_load_unexpected or ()), *(n for n, _ in part.model.named_buffers())]
    extra = {name for name in stored.keys() - wanted.keys() if not any(word in name for word in ignored)}
    wrong = [
        f"{name} is {list(stored[name])}, the config asks for {list(shape)}"
        for name, shape in wanted.items()
        if stored.get(name, shape) != shape
    ]
    for kind, names in (("missing", wanted.keys() - stored.keys()), ("unexpected", extra)):
        wrong += [f"{kind} {some(sorted(names))}"] if names else []
    if wrong:
        raise disagree(part.source.folder, wrong[0])


def check_one(folder: str | Path, parts: list[str]) -> None:
    """Refuse (exit 3) a pipeline of several transformers, each of which has noise levels of its own."""
    if len(parts) != 1:
        message = f"{folder} has {len(parts)} transformers that are linear, and one is trained at a time"
        raise IncompatibleError(f"{message}: give the folder of one of them")


def check_inputs(folder: str | Path, model: Any) -> None:
    """Refuse (exit 3) a transformer that takes more than latents and prompts."""
    extra = [key for key in ("image_dim", "added_kv_proj_dim", "guidance_embeds") if model.config.get(key)]
    if extra:
        message = f"{folder}: the transformer has {', '.join(extra)}, and takes more than latents and prompts"
        raise IncompatibleError(f"{message}. Train it as docs/diffusers.md says")


def probe_parts(parts: list[Part]) -> Found:
    """The sites of all parts, numbered on from part to part, their paths with the name of the part before."""
    sites: list[Any] = []
    others: list[Other] = []
    flat: list[str] = []
    for part in parts:
        found, start = probe(part), len(sites)
        sites += [dataclasses.replace(s, path=part.prefix + s.path, layer=start + s.layer) for s in found.sites]
        others += [dataclasses.replace(other, path=part.prefix + other.path) for other in found.others]
        flat += [part.prefix + path for path in found.flat]
    return Found(tuple(sites), tuple(others), flat=tuple(flat))
