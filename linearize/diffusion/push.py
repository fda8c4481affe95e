"""Push a converted pipeline of diffusers: what of its folder goes to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoint.atomic import MANIFEST
from ..checkpoint.source import read_json
from ..errors import CheckFailedError, IncompatibleError
from ..hub.push import Upload, check_name, listed_upload
from ..plan.plan import Plan
from .verify import converted_parts, verify_folder


def plan_push(folder: Path, repo: str, *, trust_remote_code: bool = False, **how: Any) -> Upload:
    """As `plan_push` of ../hub/push.py. Raises LinearizeError: 2 for the name, 3 for a folder that linearize did not
    convert, 6 for one that does not verify."""
    check_name(repo)
    if not (folder / MANIFEST).exists():
        raise IncompatibleError(f"{folder} is no folder that linearize convert or finetune wrote")
    converted_parts(folder, trust_remote_code)
    failed = [row for row in verify_folder(folder, trust_remote_code=True, behaviours=False) if row.status == "failed"]
    if failed:
        raise CheckFailedError(f"{folder} does not verify: {failed[0].name}: {failed[0].detail}")
    plan = Plan.from_json(read_json(folder / MANIFEST)["plan"])
    return listed_upload(folder, plan, repo, **how)
