"""Verify a converted pipeline: load it with diffusers in a clean process without linearize.

At the end of a conversion, and by `linearize verify`. The child runs verify/child/latents.py.
"""

from __future__ import annotations

import dataclasses
import importlib
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from linearize_kernels.hf.diffusion import attach
from linearize_kernels.mixer import own_mixer

from ..checkpoint.known_code import known_files, sha256_of
from ..checkpoint.provenance import Origin, layer_differences, refuse_code
from ..checkpoint.source import hub_kernel, read_header, read_json, unreadable
from ..checkpoint.write import MANIFEST, no_hashes
from ..errors import CheckFailedError, IncompatibleError, some
from ..plan.plan import Plan
from ..probe.trace import quiet
from ..verify import checks
from ..verify.checks import Check
from ..verify.child.latents import denoised, make_latents, parts_of
from ..verify.reload import (
    Level,
    clean_command,
    compare,
    fits_twice,
    free_memory,
    numbers,
    result_of,
    scratch_folder,
    started,
)
from ..verify.tolerances import RELOADED, STRICT
from .code import carried_files, code_for, readers
from .probe import Part, own_steps
from .write import INDEX_FILE, SHARDS

CHECK = """
import diffusers
diffusers.utils.logging.set_verbosity_error()
diffusers.utils.logging.disable_progress_bar()
from linearize_child.latents import main
main()
"""


# ---------------------------------------------------------------- after a conversion


def verify(folder: Path, level: Level, plan: Plan, parts: list[Part]) -> str:
    """Check a freshly written pipeline; returns a sentence that says what was checked.

    Raises LinearizeError (exit 6) when anything is missing, unexpected, of another shape, or unequal.
    """
    if level == "none":
        return "not verified (--verify none)"
    places = [folder / part.name for part in parts]
    full = level == "full" or (level == "auto" and fits_twice(places))
    with scratch_folder() as scratch:
        target = f"{scratch}/ours.pt" if full else "keys"
        with clean_command(CHECK, [str(folder), target, "0"]) as command, started(*command) as child:
            theirs = {part.name: source_outputs(folder, part, plan) for part in parts} if full else {}
            found = result_of(child)
        count = sum(check_keys(folder / name, shapes) for name, shapes in found["shapes"].items())
        message = (
            f"loaded by diffusers in a clean process without linearize: {count} tensors, none missing or unexpected"
        )
        if not full:
            return message + ("; outputs not compared (--verify full)" if level == "auto" else "")
        ours = torch.load(target)
    differ = "outputs differ from the source's by"
    worst = max(compare(ours[name][n], theirs[name][n], differ) for name in theirs for n in (0, 1))
    equal = "outputs equal those of the source's class with mixers and, as teacher, of the source"
    return f"{message}; {equal} (largest difference {worst:.1e})"


def check_keys(folder: Path, shapes: dict[str, list[int]]) -> int:
    """A transformer's shards hold what its class has; returns how many tensors. Raises LinearizeError (exit 6)."""
    wrong = shape_mismatches(folder, shapes)
    if wrong:
        raise CheckFailedError(f"verification failed: {wrong[0]}")
    return sum(len(read_header(path)) for path in folder.glob("*.safetensors"))


def shape_mismatches(folder: Path, shapes: dict[str, list[int]]) -> list[str]:
    """In what a transformer's shards are not as its class has them."""
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    stored = {name: list(entry.shape) for header in headers for name, entry in header.items()}
    missing = sorted(shapes.keys() - stored.keys())
    extra = sorted(name for name in stored.keys() - shapes.keys() if ".mixer." in name)
    wrong = [f"{kind}: {some(names)}" for kind, names in (("missing", missing), ("unexpected", extra)) if names]
    both = [name for name in shapes if name in stored]
    return wrong + [f"{n} is {stored[n]}, the model has {shapes[n]}" for n in both if stored[n] != shapes[n]]


def source_outputs(folder: Path, part: Part, plan: Plan) -> tuple[Tensor, Tensor]:
    """What the native class on the source's weights puts out, with the package's own mixers and without any."""
    own = part.own(plan)
    with quiet():
        model = type(part.model).from_pretrained(part.source.folder, torch_dtype=torch.float32)
    if plan.cast:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, plan.dtype)).float()
    teacher = denoised(model, make_latents(model))
    names = {step.mechanism for step in own.steps}
    mechanisms = {n: own_mixer(importlib.import_module(f"linearize_kernels.{n}.{n}")) for n in names}
    attach(model, own.spec(), mechanisms, readers({step.site.kind for step in own.steps}))
    mixers = load_file(max((folder / part.name).glob("*.safetensors")))
    assert not model.load_state_dict(mixers, strict=False).unexpected_keys
    return denoised(model, make_latents(model)), teacher


# ---------------------------------------------------------------- linearize verify


def verify_folder(
    folder: Path, *, strict: bool = False, trust_remote_code: bool = False, behaviours: bool = True
) -> list[Check]:
    """Every check of a converted pipeline, or of a transformer's own folder; without `behaviours` those of files.

    Raises LinearizeError: 3 for what linearize did not convert, for a damaged index or config, and for code that this
    version does not write unless `trust_remote_code`; 4 for files that cannot be read.
    """
    try:
        if (folder / INDEX_FILE).exists():
            read_json(folder / INDEX_FILE)  # or say what is wrong with it
        configs = converted_parts(folder, trust_remote_code)
    except OSError as error:
        raise unreadable(error) from error
    found = [checks.attempt("files", lambda: checks.check_files(folder))]
    for part, config in configs.items():
        label = f"{part}: " if part else ""
        found.append(checks.attempt(f"{label}config", partial(check_plan, folder, part, config)))
        found.append(checks.attempt(f"{label}index", partial(checks.check_index, folder / part, SHARDS)))
        found.append(
            checks.attempt(
                f"{label}new weights", partial(checks.check_new, folder / part, strict, manifest_of(folder, part))
            )
        )
    found.append(checks.attempt("untouched weights", partial(check_hashes, folder, [*configs])))
    if behaviours:
        found += check_behaviours(folder, STRICT if strict else RELOADED)
    return [checks.strictly(check) for check in found] if strict else found


def converted_parts(folder: Path, trust_remote_code: bool) -> dict[str, dict[str, Any]]:
    """The config.json of each converted transformer in a folder, by the part's name. Raises LinearizeError (exit 3)
    where there is none, and unless `trust_remote_code` for code that no version of linearize writes."""
    configs = {part: read_json(folder / part / "config.json") for part in parts_of(folder)}
    if not configs or not all(config.get("linearize") for config in configs.values()):
        raise IncompatibleError(
            f"{folder} holds no transformer that linearize converted: nothing to verify, train or push. Convert it "
            f"first: linearize convert {folder} --to mhla, or add convert to the recipe"
        )
    if not trust_remote_code:
        refuse_code(folder, origin_of(folder, configs))
    return configs


def origin_of(folder: Path, configs: dict[str, dict[str, Any]]) -> Origin:
    """Which version wrote the code in a folder, and the files that are not its: Python, and what names other code."""
    present = {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in folder.rglob("*.py")}
    origins = [changed_code(folder, configs, present, version) for version in known_files()]
    origin = min(origins, key=lambda one: len(one.changed))
    kernels = {path.relative_to(folder).as_posix(): hub_kernel(read_json(path)) for path in folder.rglob("config.json")}
    named = [f"{name} with {kernel}" for name, kernel in kernels.items() if kernel]
    return Origin(origin.version, sorted([*origin.changed, *named]))


def changed_code(folder: Path, configs: dict[str, dict[str, Any]], present: dict[str, str], version: str) -> Origin:
    """What of the Python files that are `present`, and of the files that name them, `version` did not write so."""
    expected: dict[str, str] = {}
    changed = set()
    index = read_json(folder / INDEX_FILE) if (folder / INDEX_FILE).exists() else {}
    known = known_files()[version]
    for part, config in configs.items():
        prefix = f"{part}/" if part else ""
        own = next((file for file in present if PurePosixPath(file).parent == PurePosixPath(part)), "")
        name, expected[f"{prefix}{name}.py"] = code_for(config, version, present.get(own, ""))
        carried = {file: sha256_of(one) for file, one in carried_files(present.get(own, "")).items()}
        if not carried or any(value not in known.get(file, ()) for file, value in carried.items()):
            changed.add(own or f"{prefix}{name}.py")
        if config.get("auto_map") != {"AutoModel": f"{name}.{config['_class_name']}"}:
            changed.add(f"{prefix}config.json")
        if part and index[part] != [name, config["_class_name"]]:
            changed.add(INDEX_FILE)
    changed |= {name for name in expected.keys() | present.keys() if expected.get(name) != present.get(name)}
    return Origin(version, sorted(changed))


def manifest_of(folder: Path, part: str) -> dict[str, Any]:
    """linearize.json with the hashes of one part alone, under its own names; empty where there is none."""
    manifest = checks.manifest_of(folder)
    prefix = f"{part}/" if part else ""
    for kind in no_hashes().keys() & manifest.keys():
        manifest[kind] = {
            place: {n.removeprefix(prefix): value for n, value in names.items() if n.startswith(prefix)}
            for place, names in manifest[kind].items()
        }
    return manifest


def check_plan(folder: Path, part: str, config: dict[str, Any]) -> tuple[str, str]:
    """The config.json of a part follows the plan in linearize.json."""
    manifest = checks.manifest_of(folder)
    if not manifest:
        return "passed", f"no {MANIFEST} to compare it with"
    plan, prefix = Plan.from_json(manifest["plan"]), f"{part}/" if part else ""
    own = own_steps(plan, prefix)
    found = list(layer_differences(dataclasses.replace(plan, steps=own), config))
    return ("failed", f"not as {MANIFEST} has it: {'; '.join(found[:3])}") if found else ("passed", "")


def check_hashes(folder: Path, parts: list[str]) -> tuple[str, str]:
    """What linearize.json calls untouched has the bytes that the source had."""
    if not (folder / MANIFEST).exists():
        return "warning", "no hashes are recorded"
    shards = read_json(folder / MANIFEST)["untouched"]["shards"]
    found = [checks.check_hashes(folder, {"shards": shards, "tensors": {}})]
    for part in parts:
        tensors = manifest_of(folder, part)["untouched"]["tensors"]
        found.append(checks.check_hashes(folder / part, {"shards": {}, "tensors": tensors}))
    compared = [row for row in found if row != checks.NONE_UNTOUCHED]
    return next((row for row in found if row[0] == "failed"), next(iter(compared), found[0]))


def check_behaviours(folder: Path, limit: float) -> list[Check]:
    """Reload in a clean process and run the checks of latents.py there."""
    if 4 * numbers(folder / part for part in parts_of(folder)) > free_memory():
        return [Check("reload", "skipped", "the weights exceed free memory; verify on a larger machine")]

    def wrong(found: dict[str, Any]) -> list[str]:
        return [
            message for part, shapes in found["shapes"].items() for message in shape_mismatches(folder / part, shapes)
        ]

    return checks.reload(CHECK, [str(folder.absolute()), "checks", str(limit)], wrong)
