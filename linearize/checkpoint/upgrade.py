"""`linearize upgrade`: a converted folder gets this version's code and config; its weights stay as they are."""

from __future__ import annotations

import dataclasses
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..convert import check_paths
from ..diffusion.convert import holds_diffusers
from ..errors import Exit, IncompatibleError, LinearizeError, absent
from ..plan.plan import Plan
from ..verify.reload import (
    FIRST,
    RESTORE,
    TOO_LARGE,
    check_keys,
    check_steps,
    compare,
    reload_logits,
    stop_children,
    what_fits,
)
from . import write as checkpoint
from .atomic import output_folder
from .carried import check_file
from .code import MODELING_FILE, code_files
from .known_code import known_files
from .manifest import WEIGHTS, check_complete, listed_files, read_plan
from .provenance import Origin, check_code, check_mixers, natives_of, origin_of, with_present_options
from .shards import link_or_copy
from .source import check_folder, open_source


@dataclasses.dataclass(frozen=True)
class Upgrade:
    """An upgrade, decided. `version` is that of the code in `folder`; `plan` has the options under their present names,
    `renamed` are those of another name before (old -> new). `carried` files go along as they are."""

    folder: Path
    output: Path
    version: str
    plan: Plan
    renamed: dict[str, str]
    code: dict[str, str]
    config: dict[str, Any]
    carried: tuple[str, ...]

    @property
    def in_place(self) -> bool:
        return self.output == self.folder


def plan_upgrade(folder: Path, output: Path | None = None, *, trust_remote_code: bool = False) -> Upgrade | None:
    """Decide an upgrade of `folder`, in place without `output`; None where the folder has this version's code already.

    Raises LinearizeError: 2 for a folder that is not there and an output that is in the way, 3 for a folder that
    linearize did not write, for code that no version of it wrote unless `trust_remote_code`, and for what this version
    cannot write anew.
    """
    if not folder.is_dir():
        raise absent(folder, "no such folder")
    check_folder(folder)
    if holds_diffusers(str(folder)):
        message = f"{folder} is a model of diffusers, which upgrade does not rewrite. Convert its source again"
        raise IncompatibleError(message)
    read_plan(folder)  # which says what to do where there is none
    source = open_source(str(folder), None)
    if output is not None:
        check_paths(source, output, overwrite=False)
    old = check_code(folder, trust_remote_code)
    try:
        natives = natives_of(old)
    except (ValueError, LinearizeError) as error:
        raise IncompatibleError(
            f"{folder} is {old.architecture} of code that came with its source, which upgrade cannot write anew. "
            "Convert the source again"
        ) from error
    plan, renamed = with_present_options(old)
    check_mixers(folder, plan)
    code = code_files(plan, natives)
    config = checkpoint.converted_config(source.config, plan, natives)
    origin = origin_of(folder, old)
    if origin == Origin(__version__, []) and json.loads(json.dumps(config)) == source.config:
        return None
    replaced = {name for known in known_files().values() for name in known} | {MODELING_FILE, *code}
    replaced |= {"config.json", checkpoint.MANIFEST}
    check_complete(folder, replaced)
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if output is not None:
        present &= set(listed_files(folder))
    carried = tuple(sorted(present - replaced))
    for name in carried if output is not None else ():
        if not name.endswith(WEIGHTS):  # which may lie on another disk
            check_file(folder / name, folder)
    return Upgrade(folder, output or folder, origin.version, plan, renamed, code, config, carried)


def upgrade(planned: Upgrade) -> str:
    """Carry an upgrade out; the output appears complete or not at all. Returns what was compared.

    Raises LinearizeError: 2 for an output that is in the way, 3 for a folder whose code does not run, 4 for a full
    disk, 6 where the upgraded model cannot be loaded or computes something else.
    """
    carried = planned.carried if planned.in_place else ()
    with output_folder(planned.output, planned.in_place or None, carried) as folder:
        for name in planned.carried:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            place = link_or_copy if planned.in_place or name.endswith(WEIGHTS) else shutil.copyfile
            place(planned.folder / name, target)
        write_code(folder, planned)
        checkpoint.write_json(folder / checkpoint.MANIFEST, upgraded_manifest(folder, planned))
        return compared(planned.folder, folder, planned.plan)


def write_code(folder: Path, planned: Upgrade) -> None:
    """Write the code and config.json of this version into `folder`."""
    for name, text in planned.code.items():
        (folder / name).write_text(text, "utf-8")
    checkpoint.write_json(folder / "config.json", planned.config)


def upgraded_manifest(folder: Path, planned: Upgrade) -> dict[str, Any]:
    """linearize.json of the upgraded `folder`: what the old one says, with this version's code, plan and versions."""
    old = json.loads((planned.folder / checkpoint.MANIFEST).read_text("utf-8"))
    hashes = checkpoint.recorded_hashes(old)
    checkpoint.cover(folder, hashes)
    new = checkpoint.manifest(folder, planned.plan, hashes)
    foreign = set(planned.carried) - set(old["files"])
    new["files"] = [name for name in new["files"] if name not in foreign]
    past = [*old.get("upgraded_from", []), {"linearize": planned.version, "versions": old.get("versions")}]
    return {**old, **new, "upgraded_from": past}


def compared(old: Path, new: Path, plan: Plan) -> str:
    """Load both folders in clean processes and compare their logits; says what was done. Where memory is short, one
    folder after the other, or their first layers alone. No row has padding: where no position_ids say otherwise, code
    of before 2026-11-22 numbers tokens from the start of the padding, and gates and features see other rotations.

    Raises LinearizeError: 3 for an old folder whose code does not run; 6 for tensors that are missing, and for logits
    that differ.
    """
    message, fits = "reloaded in a clean process: {} tensors, none missing, none unexpected", what_fits(new, plan)
    if fits is None:
        return message.format(check_keys(new)) + TOO_LARGE
    with ThreadPoolExecutor(2 if fits.twice else 1) as pool:
        before = pool.submit(logits_before, old, fits.layers)
        after = pool.submit(reload_logits, new, fits.layers, False)
        try:
            count, logits, child = after.result()
            difference = compare(logits, before.result(), "the upgraded model's logits differ from before by")
        except BaseException:  # Ctrl-C and SIGTERM, too: the pool waits for its threads
            pool.shutdown(wait=False, cancel_futures=True)
            stop_children()
            raise
    equal = f"; logits equal those of before (largest difference {difference:.1e})"
    return message.format(count) + equal + check_steps(child) + (FIRST.format(fits.layers) if fits.layers else "")


def logits_before(folder: Path, layers: int) -> torch.Tensor:
    """The logits of a folder with the code that it has, of its first `layers` (0: all). Raises LinearizeError (exit 3)
    where that cannot run."""
    try:
        return reload_logits(folder, layers, padded=False)[1]
    except LinearizeError as error:
        if error.code != Exit.CHECK_FAILED:
            raise
        reason = error.message.removeprefix("verification failed: ").removesuffix(RESTORE)
        raise IncompatibleError(
            f"the model in {folder} does not run as it is, and upgrade compares its logits with those of the result "
            f"({reason}). Restore its code, or convert the source again. Nothing was written"
        ) from error
