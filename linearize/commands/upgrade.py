"""`linearize upgrade`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..terminal.arguments import path, there
from ..terminal.output import Json, print_json, say
from ..terminal.progress import starting


def upgrade(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that convert or finetune wrote.", parser=there)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the result here. Default: replace DIR.", parser=path)
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run edited code in the folder, and replace it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring a converted folder to this version's code. The weights stay, and the logits are compared with before."""
    with starting():
        from .. import __version__
        from ..checkpoint.upgrade import plan_upgrade
        from ..checkpoint.upgrade import upgrade as carry_out

    planned = plan_upgrade(folder, output, trust_remote_code=trust_remote_code)
    result: dict[str, Any] = {"folder": str(folder), "to": __version__}
    if planned is None:
        say(f"{folder} has the code of linearize {__version__} already. Nothing was written")
        result |= {"upgraded": False, "output": str(folder), "from": __version__, "renamed": {}, "verified": None}
    else:
        checked = carry_out(planned)
        say(checked)
        for old, new in planned.renamed.items():
            say(f"option {old} is now {new}")
        say(f"saved {planned.output}: the code of linearize {planned.version} became that of {__version__}")
        result |= {"upgraded": True, "output": str(planned.output), "from": planned.version}
        result |= {"renamed": planned.renamed, "verified": checked}
    if as_json:
        print_json(result)
