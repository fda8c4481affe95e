"""`linearize verify`: check a saved folder, and run its code in a clean process.

Weights are compared with the hashes that linearize.json recorded, names with the index, and behaviours.py says in a
clean process whether the model loads and whether all ways to cut up a forward pass agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import plan_of, read_plan, saved_over
from ..checkpoint.provenance import check_mechanisms, differences, origin_of, outdated, refuse_code
from ..checkpoint.shards import file_hashes, in_parallel, index_fault, read_tensor, sha256, tensor_sha256
from ..checkpoint.source import (
    DTYPES,
    check_folder,
    check_revision,
    open_source,
    read_header,
    read_json,
    tensor_places,
    weight_map,
)
from ..checkpoint.write import INDEX, MANIFEST, no_hashes, uncovered
from ..errors import MALFORMED, Exit, IncompatibleError, LinearizeError, no_model, quoted, some
from ..plan.plan import Plan
from ..terminal.output import counted
from ..terminal.progress import Advance, progress
from . import tolerances
from .reload import clean_command, free_memory, result_of, started

# Tokens of a row: more than a chunk; strict: more than two chunks of the largest size.
LENGTH, STRICT_LENGTH = 100, 560
OTHER_BYTES = f". Where another tool trained them and copied {MANIFEST}, remove that file: the weights count as trained"
BEHAVIOURS = "from linearize_child.behaviours import main; main()"


@dataclasses.dataclass(frozen=True)
class Check:
    """One row of the table. `status` is passed, failed, warning (failed when strict) or skipped (the same)."""

    name: str
    status: str
    detail: str = ""
    difference: float | None = None
    limit: float | None = None


def verify_folder(
    model: str, *, strict: bool = False, trust_remote_code: bool = False, revision: str | None = None
) -> list[Check]:
    """Every check of the linearized model in a folder, or of `revision` on the Hub.

    Raises LinearizeError: 3 for what is no linearized model, and for code that this version does not write unless
    `trust_remote_code`; 2, 4 and 5 as `open_source`.
    """
    folder = Path(model).expanduser()
    if folder.is_dir() and model.strip():
        check_revision(model, revision)
    else:
        folder = open_source(model, revision).folder
    check_folder(folder)
    plan = read_config_plan(folder)
    with contextlib.suppress(LinearizeError):  # a manifest that cannot be read fails the check of files
        plan = read_plan(folder)
    origin = None
    if not trust_remote_code:
        check_mechanisms(folder, plan)
        origin = origin_of(folder, plan)
        refuse_code(folder, origin)
    checks = [
        attempt("files", lambda: check_files(folder)),
        attempt("config", lambda: check_plan(folder)),
        attempt("index", lambda: check_index(folder)),
        attempt("untouched weights", lambda: check_hashes(folder)),
        attempt("new weights", lambda: check_new(folder, strict)),
    ]
    reason = outdated(folder, plan, origin)
    checks += [Check("decoding", "failed", reason)] if reason else check_behaviours(folder, strict)
    return [strictly(check) for check in checks] if strict else checks


def strictly(check: Check) -> Check:
    status = "failed" if check.status in ("warning", "skipped") else check.status
    return dataclasses.replace(check, status=status)


def attempt(name: str, work: Callable[[], tuple[str, str]]) -> Check:
    """`work` returns (status, detail); files that cannot be read are failures."""
    try:
        return Check(name, *work())
    except LinearizeError as error:
        return Check(name, "failed", error.message.removeprefix("verification failed: "))
    except FileNotFoundError as error:
        return Check(name, "failed", f"{Path(str(error.filename)).name} is not there")
    except (OSError, EOFError, *MALFORMED) as error:
        return Check(name, "failed", f"{type(error).__name__}: {error}")


def read_config_plan(folder: Path) -> Plan:
    """The plan in config.json of a linearized model; raises LinearizeError (exit 3) that says what is there instead."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        linear = bool(config.get("linearize"))
    except FileNotFoundError as error:
        raise no_model(folder) from error
    except (OSError, *MALFORMED) as error:
        raise IncompatibleError(f"{folder} is no model folder: {path.name}: {error}") from error
    if not linear:
        kind = ", ".join(map(str, config.get("architectures") or [])) or "a model"
        raise IncompatibleError(
            f"{folder} is {kind} ({config.get('model_type')}) as transformers has it, with no layer that linearize "
            f"converted: nothing to verify. Convert it first: linearize convert {quoted(folder)} --to gsa"
        )
    try:
        return plan_of(config)
    except MALFORMED as error:
        message = f"{path}: its plan is damaged ({type(error).__name__}: {error}). Convert or download the model again"
        raise IncompatibleError(message) from error


# ---------------------------------------------------------------- what is on disk


def manifest_of(folder: Path) -> dict[str, Any]:
    """linearize.json, empty where there is none: save_pretrained does not write it."""
    path = folder / MANIFEST
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def check_files(folder: Path) -> tuple[str, str]:
    """linearize.json lists the files and the hashes of the code; others beside them are worth a warning."""
    manifest = manifest_of(folder)
    if not manifest:
        return "warning", f"no {MANIFEST}: not written by linearize convert or finetune, or saved again since"
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    present = {name for name in present if not any(part.startswith((".", "__pycache__")) for part in name.split("/"))}
    listed, code = set(manifest["files"]), manifest.get("code", {})
    lost = sorted(name for name in listed - present if not name.split("/")[-1].startswith("."))
    if lost:
        return "failed", saved_over(folder) or f"missing: {some(lost)}"
    edited = sorted(name for name, value in code.items() if name in present and sha256(folder / name) != value)
    edited += sorted(name for name in present - listed if name.endswith(".py"))
    if edited:
        return "warning", f"code that linearize did not write: {some(edited)}"
    foreign = sorted(present - listed)
    return ("warning", f"files that linearize did not write: {some(foreign)}") if foreign else ("passed", "")


def check_plan(folder: Path) -> tuple[str, str]:
    """config.json follows the plan in linearize.json."""
    if not manifest_of(folder):
        return "passed", f"no {MANIFEST} to compare it with"
    found = list(differences(read_plan(folder), read_json(folder / "config.json")))
    return ("failed", f"not as {MANIFEST} has it: {'; '.join(found[:3])}") if found else ("passed", "")


def check_index(folder: Path, name: str = INDEX) -> tuple[str, str]:
    """Every tensor of the index is in the shard that it names, and the other way round. A single file, whose name is
    that of the index without its ending, comes before an index, as transformers reads them."""
    single = name.removesuffix(".index.json")
    if (folder / single).exists() or not (folder / name).exists():
        return "passed", f"{len(read_header(folder / single))} tensors"
    index = weight_map(folder / name)
    fault = index_fault(index, folder.glob("*.safetensors"))
    return ("failed", fault) if fault else ("passed", f"{len(index)} tensors")


NONE_UNTOUCHED = ("passed", "nothing to compare: all weights are new, trained or cast, as `new weights` compares them")


def check_hashes(folder: Path, recorded: dict[str, Any] | None = None) -> tuple[str, str]:
    """What linearize.json calls untouched, or what is `recorded`, has the bytes that were recorded."""
    own = recorded is None
    recorded = manifest_of(folder).get("untouched") if own else recorded
    if not recorded:
        return "warning", "no hashes are recorded"
    shards, tensors = recorded["shards"], recorded["tensors"]
    if not shards and not tensors:
        return NONE_UNTOUCHED
    hashes = file_hashes(folder, [folder / name for name in shards]).values()
    wrong = [name for name, value in zip(shards, hashes, strict=True) if value != shards[name]]
    if tensors:
        places = tensor_places(folder.glob("*.safetensors"))
        held = tensors.keys() & places.keys()

        def hashed(name: str, advance: Advance) -> str:
            return tensor_sha256(*places[name], advance)

        found = in_parallel(hashed, held, "hashing", lambda name: places[name][1].size)
        wrong += [name for name, value in zip(held, found, strict=True) if value != tensors[name]]
        wrong += [f"{name} (missing)" for name in tensors.keys() - held]
    if wrong:
        return "failed", f"not the recorded bytes: {some(sorted(wrong))}" + OTHER_BYTES * own
    others = f", {counted(len(tensors), 'tensor')} of other shards" if tensors else ""
    return "passed", counted(len(shards), "shard") + others


def check_new(folder: Path, everything: bool, manifest: dict[str, Any] | None = None) -> tuple[str, str]:
    """The mixers' numbers (or `everything`) are finite, and new and trained weights have the bytes that were written:
    by linearize.json, or by the part of it that is given."""
    for shard in sorted(folder.glob("*.safetensors")):
        for name, entry in read_header(shard).items():
            wanted = (everything or ".mixer." in name) and entry.dtype in DTYPES
            if wanted and not all(bool(block.isfinite().all()) for block in read_tensor(shard, entry)):
                return "failed", f"{name} has values that are not finite"
    finite = "all weights are finite" if everything else "all mixers are finite"
    manifest = manifest_of(folder) if manifest is None else manifest
    if "written" not in manifest:
        version = manifest.get("linearize")
        older = f"; linearize {version} recorded no hashes of them, linearize upgrade does" if version else ""
        return "passed", finite + older
    status, detail = check_hashes(folder, manifest["written"])
    left = [name for name, _, _ in uncovered(folder, {kind: manifest[kind] for kind in no_hashes()})]
    if status == "passed" and left:
        return "failed", f"{MANIFEST} has no hash of {some(left)}"
    count = len(manifest["written"]["tensors"])
    return status, detail if status == "failed" else f"{finite}; {count} tensors have the recorded bytes"


# ---------------------------------------------------------------- what it computes


def check_behaviours(folder: Path, strict: bool) -> list[Check]:
    """Reload in a clean process and run the checks of child/behaviours.py there."""
    dtype = fitting_dtype(folder)
    if dtype is None:
        return [Check("reload", "skipped", "the weights exceed free memory; verify on a larger machine")]
    limit = (
        min(tolerances.STRICT, tolerances.BY_DTYPE[dtype])
        if strict and dtype == "float32"
        else tolerances.BY_DTYPE[dtype]
    )
    arguments = [str(folder.absolute()), dtype, str(STRICT_LENGTH if strict else LENGTH), str(limit)]

    def wrong(found: dict[str, Any]) -> list[str]:
        return [f"{kind.replace('_', ' ')}: {some(names)}" for kind, names in found["keys"].items()]

    return reload(BEHAVIOURS, arguments, wrong)


def reload(script: str, arguments: list[str], wrong: Callable[[dict[str, Any]], list[str]]) -> list[Check]:
    """What a script that loads a folder in a clean process found; `wrong` names the keys that do not match."""
    try:
        with clean_command(script, arguments) as command, started(*command) as child, progress("verify", 1) as advance:
            found = result_of(child, advance)
    except LinearizeError as error:
        if error.code != Exit.CHECK_FAILED:  # such as no room for temporary files
            raise
        return [Check("reload", "failed", error.message.removeprefix("verification failed: "))]
    keys = wrong(found)
    first = Check("reload", "failed" if keys else "passed", "; ".join(keys) or "no key missing, none unexpected")
    return [first, *(Check(name, **row) for name, row in found["checks"].items())]


def fitting_dtype(folder: Path) -> str | None:
    """float32 where the model fits memory so, else what it is stored in, else None."""
    free = free_memory()
    entries = [entry for shard in folder.glob("*.safetensors") for entry in read_header(shard).values()]
    numbers, stored = sum(math.prod(e.shape) for e in entries), sum(e.size for e in entries)
    if 4 * numbers < free:
        return "float32"
    kinds = [DTYPES[e.dtype] for e in entries if e.dtype in DTYPES]
    return max(set(kinds), key=kinds.count) if stored < free else None
