"""The command line: one file per command in `commands/`, each of which parses, calls, prints.

torch and transformers are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from . import __version__
from .commands import bench, convert, demo, doctor, finetune, generate, mechanisms, recipes
from .errors import Exit, LinearizeError
from .output import say

app = typer.Typer(
    name="linearize",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Replace softmax attention in a pretrained Transformer by a linear-time mechanism, distil, save.",
)


def main() -> None:
    """Run the command line; every LinearizeError becomes one message and its exit code."""
    try:
        app(standalone_mode=True)
    except LinearizeError as error:
        say(f"error: {error.message}")
        sys.exit(int(error.code))
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(int(Exit.INTERRUPTED))


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Never ask the Hub; use its cache only.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours, as with NO_COLOR=1.")] = False,
) -> None:
    if no_color:
        os.environ["NO_COLOR"] = "1"
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


# One line per command, in the order of `--help`.
app.command()(convert.convert)
app.command()(finetune.finetune)
app.add_typer(recipes.recipes, name="recipes")
app.command()(mechanisms.mechanisms)
app.command()(generate.generate)
app.command()(doctor.doctor)
app.command()(demo.demo)
app.add_typer(bench.bench, name="bench")
