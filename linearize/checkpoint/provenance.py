"""Decide whether linearize wrote a folder, by which plan and version, and whether its code is unchanged."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import HF_MODULES_CACHE

from linearize_kernels.hf.attention_hooks import TRAINED
from linearize_kernels.mixer import AttentionSite

from .. import __version__
from ..errors import (
    MALFORMED,
    IncompatibleError,
    LinearizeError,
    ResourceError,
    quoted,
    reason_of,
    resource_error,
    some,
)
from ..plan.mechanisms import build_mixer, check_name, mechanism_names, present_options, renamed_options
from ..plan.plan import Plan
from ..probe.probe import model_class_of
from ..probe.trace import quiet
from . import write as checkpoint
from .code import IMAGE_TEXT, MODELING_FILE, SourceClasses, auto_map, modeling, plan_parts
from .flatten import imported
from .known_code import known_files, sha256_of
from .manifest import plan_in, plan_of, read_plan, recipes_of
from .source import ADAPTER_CONFIG, check_folder, hub_kernel, read_json, tensor_places

# Where `finetune` leaves a LoRA that it does not merge.
LORA_FOLDER = "adapter"
# A line of code that knows the cache by the name that transformers gives it from 5.24 on.
KNOWS_CACHE = 'CACHE_NAMES = ("cache",'
# A Trainer saves its checkpoints within the folder where it saves the model.
CHECKPOINT = re.compile(r"^checkpoint-\d+/")


class Origin(NamedTuple):
    """The `version` of linearize whose code a folder carries, and the files that are `changed` since it wrote them."""

    version: str
    changed: list[str]


def check_code(folder: Path, trust_remote_code: bool) -> Plan:
    """Check a folder's plan, config.json and code; return the plan.

    Raises LinearizeError (exit 3) for a config that does not, and unless `trust_remote_code` for code that no version
    of linearize wrote; 4 where transformers has no place for that code.
    """
    check_folder(folder)
    check_code_cache()
    plan = plan_in(folder)
    if not trust_remote_code:
        check_mechanisms(folder, plan)
    check_config(folder)
    if not trust_remote_code:
        refuse_code(folder, origin_of(folder, plan))
    return plan


def check_code_cache() -> None:
    """Raise LinearizeError (exit 4) where transformers cannot make its folder for the code that models ship."""
    try:
        os.makedirs(HF_MODULES_CACHE, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"cannot make {HF_MODULES_CACHE} ({error.strerror}), where transformers copies the code of a model. Set "
            "HF_HOME, or HF_MODULES_CACHE, to a folder that can be written"
        ) from error


@contextlib.contextmanager
def copying_code() -> Iterator[None]:
    """Within: no other linearize has transformers copy the code of a model to where it is imported. Files are written
    in place there, and a process that loads the same model would import half of one.

    Raises LinearizeError (exit 4) where there is no place for it.
    """
    check_code_cache()
    handle = os.open(HF_MODULES_CACHE, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def open_config(folder: Path) -> Any:
    """The config object of a converted folder, by its own code, which `check_code` has seen.

    Raises LinearizeError: 3 for values that it refuses, 4 where transformers has no place for that code.
    """
    with copying_code(), usable(folder):
        return AutoConfig.from_pretrained(folder, trust_remote_code=True)


@contextlib.contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Within: a config object is made of a folder's config.json. Raises LinearizeError (exit 3) for values that it
    refuses."""
    try:
        with quiet():
            yield
    except Exception as error:  # validators of many architectures raise as they like
        if resource_error(error) is not None:
            raise
        message = f"{folder / 'config.json'} cannot be used: {reason_of(error)}. Restore it, or convert the model again"
        raise IncompatibleError(message) from error


def check_mechanisms(folder: Path, plan: Plan) -> None:
    """Raise LinearizeError (exit 3) for a mechanism in a folder's plan or config.json that is unknown here, and for a
    config.json that cannot be read.
    """
    named, path = {step.mechanism for step in plan.steps}, folder / "config.json"
    config = read_json(path) if path.exists() else {}
    with contextlib.suppress(*MALFORMED):  # a config without a plan
        named |= {step.mechanism for step in plan_of(config).steps}
    for name in sorted(named):
        try:
            check_name(name)
        except LinearizeError as error:
            raise IncompatibleError(
                f"{folder}: {error.message}. Use the version of linearize that wrote it or a newer one, or download it "
                "again"
            ) from error


def refuse_code(folder: Path, origin: Origin) -> None:
    """Raise LinearizeError (exit 3) where files of a folder, whose code is about to run, were changed."""
    if origin.changed:
        raise IncompatibleError(
            f"{folder} carries other code than linearize {origin.version} wrote ({some(origin.changed)}), and it would "
            "run. Read it, then pass --trust-remote-code (in a recipe, model.trust_remote_code: true)"
        )


def with_present_options(plan: Plan) -> tuple[Plan, dict[str, str]]:
    """A plan with its options under their present names, and those that had another one: old -> new."""
    renamed: dict[str, str] = {}
    steps = []
    for step in plan.steps:
        renamed |= renamed_options(step.mechanism, step.options)
        steps.append(dataclasses.replace(step, options=present_options(step.mechanism, step.options)))
    return dataclasses.replace(plan, steps=tuple(steps)), renamed


def check_mixers(folder: Path, plan: Plan) -> None:
    """Raise LinearizeError (exit 3) where this version's mixers have other parameters than the folder has."""
    stored = {name: entry.shape for name, (_, entry) in tensor_places(folder.glob("*.safetensors")).items()}
    wanted: dict[str, tuple[int, ...]] = {}
    for step in plan.steps:
        with torch.device("meta"):
            state = build_mixer(step.mechanism, step.site, step.options).state_dict()
        wanted |= {f"{step.site.path}.mixer.{name}": tuple(value.shape) for name, value in state.items()}
    for name in sorted(wanted):
        if stored.get(name) != wanted[name]:
            found = f"{list(stored[name])} in {folder}" if name in stored else f"not in {folder}"
            raise IncompatibleError(
                f"{name} is {found}, and {list(wanted[name])} in linearize {__version__}: its mixers are others. "
                "Convert the source again, or use the version that wrote the folder"
            )


def trained_before(folder: Path, teacher: str | None = None) -> str:
    """What to note of a base whose source weights earlier runs trained, or whose LoRA one left apart; else empty.
    `teacher` is the name of another teacher of logits."""
    notes = []
    with contextlib.suppress(OSError, *MALFORMED):
        manifest = read_json(folder / checkpoint.MANIFEST)
        stages = [name for one in recipes_of(folder) for name in drifting_stages(one)]
        trained = read_json(folder / "config.json").get(TRAINED)
        if stages or trained:
            how = f"as {', '.join(stages)} trained them" if stages else "as an earlier training left them"
            what = (
                "the teacher is softmax on those. To distil further towards the source itself, name it:\n"
                f"    {source_as_teacher(manifest['plan'])}"
            )
            if teacher is not None:
                what = (
                    f"logits are learned from {teacher}. Attention outputs are compared with softmax on those weights"
                )
            notes.append(f"note: {folder} has the source's weights {how}, and {what}")
    if apart := lora_apart(folder):
        notes.append(f"note: the LoRA in {apart} was not merged, and this run begins without it")
    return "\n".join(notes)


def source_as_teacher(plan: dict[str, Any]) -> str:
    """What to add to `linearize finetune` so that the first source of a `plan` is the teacher of logits. A plan has
    the name of a folder without its path."""
    source, commit = plan["source"], plan.get("revision")
    if commit:
        return f"teacher.model={source} teacher.revision={commit}"
    return f"teacher.model=DIR    # DIR: the folder {source} that was converted first"


def drifting_stages(recipe: dict[str, Any]) -> list[str]:
    """Names of the stages of a resolved recipe that train weights of the source."""
    parts = {"mixer", "all", *(["lora"] if recipe["finish"]["merge_lora"] else [])}
    return [stage["name"] for stage in recipe["stages"] if parts & set(stage["train"])]


def lora_apart(folder: Path) -> Path | None:
    """Where the LoRA lies that `finetune` did not merge into the weights of a folder; None where there is none."""
    with contextlib.suppress(OSError, *MALFORMED):
        recipe = read_json(folder / checkpoint.MANIFEST)["recipe"]
        if not recipe["finish"]["merge_lora"] and any(stage["lora"] for stage in recipe["stages"]):
            return folder / LORA_FOLDER
    return None


def check_merged(folder: Path, name: str) -> None:
    """Raise LinearizeError (exit 3) for a converted folder, which a user calls `name`, whose LoRA lies apart."""
    if lora_apart(folder) is not None:
        raise IncompatibleError(
            f"{name}: the LoRA in its folder {LORA_FOLDER} is apart from its weights, and the result would be without "
            "it. Train it again with finish.merge_lora=true"
        )


def untrained_mixers(folder: Path, plan: Plan) -> set[str]:
    """Paths of the attention modules whose mixer nothing has trained, in a folder of that `plan`."""
    if "recipe" in read_json(folder / checkpoint.MANIFEST):
        return set()
    if plan.reconversions:
        return set(plan.reconversions[-1].untrained)
    trained = read_json(folder / "config.json").get(TRAINED)
    return set() if trained else {step.site.path for step in plan.linear}


def check_config(folder: Path) -> None:
    """Raise LinearizeError (exit 3) where config.json does not follow the plan in linearize.json, if there is one."""
    if not (folder / checkpoint.MANIFEST).exists():
        return
    plan, config = read_plan(folder), read_json(folder / "config.json")
    found = next(differences(plan, config), None)
    if found:
        raise IncompatibleError(
            f"{folder / 'config.json'} does not follow the plan in {checkpoint.MANIFEST}: {found}. Restore the file, "
            "or download or convert the model again"
        )


def differences(plan: Plan, config: dict[str, Any]) -> Iterator[str]:
    """What a config.json says otherwise than its plan, in sentences."""
    if config.get("model_type") not in (plan.model_type, f"linearized_{plan.model_type}"):  # the latter before 0.3.0
        yield f"model_type is {config.get('model_type')!r}, the plan has {plan.model_type!r}"
    yield from layer_differences(plan, config)


def layer_differences(plan: Plan, config: dict[str, Any]) -> Iterator[str]:
    """What the entry `linearize` of a config.json says otherwise than its plan, in sentences."""
    spec = config.get("linearize")
    try:
        theirs = {layer["site"]["path"]: layer_values(layer) for layer in spec["layers"]}  # type: ignore[index]
    except (LookupError, TypeError, AttributeError) as error:
        yield f"its entry linearize is damaged ({type(error).__name__}: {error})"
        return
    spec = plan.spec()
    ours = {layer["site"]["path"]: layer_values(layer) for layer in spec["layers"]}
    yield from (f"{path} is not in it, the plan makes it linear" for path in ours.keys() - theirs.keys())
    yield from (f"{path} is in it, the plan keeps softmax there" for path in theirs.keys() - ours.keys())
    for path, values in ours.items():
        found = theirs.get(path, values)
        for key in sorted(values.keys() | found.keys()):
            if values.get(key) != found.get(key):
                yield f"{path}: {key} is {found.get(key)!r}, the plan has {values.get(key)!r}"
    if config["linearize"].get("all_linear") != spec["all_linear"]:
        yield f"all_linear is {config['linearize'].get('all_linear')!r}, the plan has {spec['all_linear']!r}"


def layer_values(layer: dict[str, Any]) -> dict[str, Any]:
    """Mechanism, options and site of one layer of a config, options under their present names."""
    site = dataclasses.asdict(AttentionSite.from_dict(layer["site"]))
    options = layer["options"]
    if layer["mechanism"] in mechanism_names():
        options = present_options(layer["mechanism"], options)
    return {"mechanism": layer["mechanism"], **{f"site.{name}": value for name, value in site.items()}, **options}


# ---------------------------------------------------------------- code


def origin_of(folder: Path, plan: Plan) -> Origin:
    """Which version wrote the code in a folder: the one of which fewest files differ.

    `changed` are the files that decide which code runs and are not that version's: Python, and JSON that names code.
    Python also in folders, for transformers runs custom_generate/generate.py; folders may be links. Checkpoints that a
    Trainer left in the folder have the same files. A `plan` from which no version writes code, as that of a fork's
    mechanism, is among them.
    """
    try:
        natives = natives_of(plan)
    except (ValueError, LinearizeError):  # of a model that transformers does not have
        return Origin(__version__, [f"the code of {plan.architecture}"])
    unread: set[str] = set()
    try:
        plan_parts(plan)
    except (LinearizeError, *MALFORMED) as error:
        unread.add(f"its plan: {reason_of(error)}")
    paths = {path for pattern in ("**/*.py", "*/*.py") for path in folder.glob(pattern) if path.is_file()}
    present = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    texts = {name: data.decode("utf-8", "replace") for name, data in present.items()}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in present.items()}
    origins = []
    for version, known in known_files().items():
        kinds = () if unread else (natives, natives.without_tasks)
        rendered = {sha256_of(modeling(version, plan, classes, texts)) for classes in kinds}
        ours = known | {MODELING_FILE: rendered}
        wrong = {name for name, value in hashes.items() if value not in ours.get(CHECKPOINT.sub("", name), ())}
        origins.append(Origin(version, sorted(wrong | unread | missing_files(texts))))
    origin = min(origins, key=lambda one: len(one.changed))
    changed = [with_origin(name, hashes.get(name)) for name in origin.changed]
    return Origin(origin.version, sorted([*changed, *named_code(folder, natives)]))


def natives_of(plan: Plan) -> SourceClasses:
    """The source's classes. Raises ValueError or LinearizeError for a model that transformers does not have."""
    with quiet():
        config = AutoConfig.for_model(plan.model_type, architectures=[plan.architecture])
    return SourceClasses(config, model_class_of(config))


def behind(folder: Path, plan: Plan, origin: Origin | None = None) -> str | None:
    """The earlier version that wrote all the code in a folder, or in its `origin` where that is known; None for code
    of this version or of nobody known."""
    origin = origin or origin_of(folder, plan)
    return None if origin.changed or origin.version == __version__ else origin.version


def outdated(folder: Path, plan: Plan, origin: Origin | None = None) -> str:
    """Why the code in a folder, of an earlier version, cannot decode with the transformers that is installed, and what
    to do; empty where it can. `origin` is that of the folder, where it is known."""
    causal = any(step.site.causal for step in plan.linear)
    if not causal or "cache" not in CausalLMOutputWithPast.__dataclass_fields__:
        return ""
    version = behind(folder, plan, origin)
    if version is None or any(KNOWS_CACHE in path.read_text("utf-8") for path in folder.glob("*.py")):
        return ""
    return (
        f"the code of linearize {version} in {folder} cannot decode with transformers {transformers.__version__}, "
        f"which renamed the cache in 5.24. Run linearize upgrade {quoted(folder)}, or install 'transformers<5.24'"
    )


def missing_files(texts: dict[str, str]) -> set[str]:
    """Files that the code in a folder imports and that are not there."""
    roots = {name for name in texts if "/" not in name} | {MODELING_FILE}
    needed = {f"{module}.py" for name in roots for module in imported(texts.get(name, ""))}
    return (needed | {MODELING_FILE}) - texts.keys()


def with_origin(name: str, value: str | None) -> str:
    """A file's name, with the version that wrote it where another one did."""
    versions = [version for version, known in known_files().items() if value in known.get(name, ())]
    return f"{name} of linearize {versions[0]}" if versions else name


def named_code(folder: Path, natives: SourceClasses) -> Iterator[str]:
    """Names of JSON files that name other code than linearize's: of this folder, of the Hub, of an adapter's base."""
    if (folder / ADAPTER_CONFIG).exists():  # transformers would load the base model that it names, and its code
        yield ADAPTER_CONFIG
    for path in folder.glob("*.json"):
        with contextlib.suppress(*MALFORMED):
            found = json.loads(path.read_text("utf-8"))
            if path.name == "config.json":
                known = [auto_map(natives), auto_map(natives.without_tasks)]
                # The first folders of 0.3.0 had no class for images with text.
                known += [{name: own for name, own in one.items() if name != IMAGE_TEXT} for one in known]
                named = found.get("auto_map") not in known
            else:  # processor_config.json has those of its parts one level down
                named = any(part.get("auto_map") for part in (found, *found.values()) if isinstance(part, dict))
            kernel = hub_kernel(found)
            if named or kernel:
                yield f"{path.name} with {kernel}" if kernel else path.name
