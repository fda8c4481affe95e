"""`linearize verify`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from ..errors import Exit, LinearizeError
from ..terminal.arguments import Revision, Trust
from ..terminal.output import Json, print_json
from ..terminal.progress import starting


def verify(
    model: Annotated[str, typer.Argument(metavar="DIR", help="Converted model: a local folder or a Hub id.")],
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Treat warnings and skipped checks as failures. Also run longer sequences, lower the limit from 1e-4 "
            "to 2e-5, and read all weights for values that are not finite.",
        ),
    ] = False,
    trust_remote_code: Trust = False,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Run every correctness check on a saved model, in a process without linearize."""
    with starting():
        from ..checkpoint.source import check_revision
        from ..diffusion import verify as of_diffusers
        from ..diffusion.convert import holds_diffusers
        from ..terminal.tables import checks_table
        from ..verify.checks import verify_folder

    how = {"strict": strict, "trust_remote_code": trust_remote_code}
    if holds_diffusers(model):
        check_revision(model, revision)
        checks = of_diffusers.verify_folder(Path(model).expanduser(), **how)
    else:
        checks = verify_folder(model, revision=revision, **how)
    failed = [check for check in checks if check.status == "failed"]
    checks_table(model, checks)
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        print_json({"model": model, "strict": strict, "passed": not failed, "checks": rows})
    if failed:
        raise LinearizeError(
            f"verification failed: {'; '.join(': '.join(filter(None, (c.name, c.detail))) for c in failed)}",
            Exit.CHECK_FAILED,
        )
