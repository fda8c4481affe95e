"""`linearize verify`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import CheckFailedError
from ..terminal.arguments import Revision, Trust
from ..terminal.arguments import model as model_name
from ..terminal.output import Json, counted, print_json
from ..terminal.progress import starting
from ..terminal.tables import console, table

if TYPE_CHECKING:
    from ..verify.checks import Check


def verify(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="Converted model: a local folder or a Hub id.", parser=model_name)
    ],
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Treat warnings and skipped checks as failures. Also run longer sequences, lower the tolerance from "
            "1e-4 to 2e-5, and look for NaN and infinity in all weights.",
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
        raise CheckFailedError(
            f"verification failed: {'; '.join(': '.join(filter(None, (c.name, c.detail))) for c in failed)}"
        )


# What a check of `verify` found to be so, by its name, where it passed and has no detail of its own.
FOUND = {
    "files": "the files and the code that linearize.json lists",
    "config": "config.json has the plan of linearize.json",
    "finite logits": "no NaN and no infinity",
    "finite outputs": "no NaN and no infinity",
    "prefill and steps": "one pass equals a prefill and single tokens",
    "chunk size": "other chunks change nothing",
    "left padding": "a padded row equals the row alone",
    "left padding without position_ids": "the mask alone is enough",
    "right padding": "a padded row equals the row alone",
    "packed documents": "documents in one row equal each alone",
    "beams": "states follow their beams",
    "generate": "generate() equals one pass over its text",
    "constant state": "states of linear layers do not grow",
    "trust": "without trust_remote_code it does not load",
    "rows alone": "a row of a batch equals the row alone",
    "padding": "padding changes nothing of a text",
    "another size": "rows of another size equal each alone",
    "softmax teacher": "under teacher() it is the source",
}


def checks_table(title: str, checks: list[Check]) -> None:
    """What `linearize verify` found."""
    columns = {"check": "short", "result": "short", "difference": "number", "limit": "number", "detail": "text"}
    rows: list[tuple[str, ...]] = []
    for check in checks:
        numbers = ["" if value is None else f"{value:.1e}" for value in (check.difference, check.limit)]
        detail = check.detail or (FOUND.get(check.name, "") if check.status == "passed" else "")
        rows.append((check.name, check.status, *numbers, detail))
    out = console()
    out.print(table(columns, rows, title))
    if any(check.difference is not None for check in checks):
        out.print("difference: the largest of any logit or output, over the largest of all")
    undecided = sum(check.status in ("warning", "skipped") for check in checks)
    if undecided:
        out.print(f"{counted(undecided, 'check')} of {len(checks)} neither passed nor failed; --strict fails such")
    elif all(check.status == "passed" for check in checks):
        out.print(f"all {len(checks)} checks passed")
