"""`linearize push`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import Exit, LinearizeError, absent
from ..terminal.arguments import Trust, path
from ..terminal.output import Json, print_json, say
from ..terminal.progress import starting
from ..terminal.tables import console, table


def push(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder that linearize convert or finetune wrote, or transformers saved.", parser=path),
    ],
    repo: Annotated[str, typer.Argument(help="Hub repository as user/repo. It is created if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    pr: Annotated[bool, typer.Option("--pr", help="Open a pull request instead of committing.")] = False,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(
            "--eval",
            help="File that linearize eval --tasks -o wrote: its results go into the card. Default: RUN/tasks.json, "
            "if it measured these weights.",
            parser=path,
        ),
    ] = None,
    trust_remote_code: Trust = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the folder, list what would be uploaded, and stop.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Upload a converted model and its card to the Hub. An interrupted push can be repeated."""
    if not folder.exists():
        raise LinearizeError(absent(folder, "no such folder").message, Exit.INCOMPATIBLE)
    with starting():
        from ..checkpoint.adopt import adopted
        from ..checkpoint.card import with_tasks
        from ..diffusion.convert import holds_diffusers
        from ..hub import push as hub

    asked: dict[str, Any] = {"private": private, "pr": pr, "message": message, "trust_remote_code": trust_remote_code}
    pipeline = holds_diffusers(str(folder))
    if pipeline and evaluation is not None:
        raise LinearizeError("--eval: tasks are for models that write text, and this is a pipeline. Leave it out")
    results, left_out = (None, "") if pipeline else hub.results_of(folder, evaluation)
    with contextlib.nullcontext(folder) if pipeline else adopted(folder, trust_remote_code=trust_remote_code) as whole:
        if pipeline:
            from ..diffusion.push import plan_push
        else:
            from ..hub.push import plan_push
        upload = plan_push(whole, repo, **asked)
        if results is not None:
            upload = upload.with_card(with_tasks(upload.card, results, repo.rpartition("/")[2]))
        for note in (*upload.notes, *([left_out] if left_out else [])):
            say(f"note: {note}")
        result: dict[str, Any] = {"upload": upload.to_json() | {"folder": str(folder)}}
        if dry_run:
            files_table(upload.files, f"to {repo}: {upload.message}")
            say(f"\n{upload.card}\ndry run: nothing was uploaded; leave out --dry-run to upload")
        else:
            result |= hub.push(upload, say)
    if as_json:
        print_json(result)


def files_table(files: dict[str, int], title: str) -> None:
    """What `linearize push` would upload: name -> bytes, and their sum."""
    rows = [(name, f"{size:,}") for name, size in [*files.items(), ("sum", sum(files.values()))]]
    console().print(table({"file": "text", "bytes": "number"}, rows, title))
