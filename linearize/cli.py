"""The command line: one file per command in `commands/`, each of which parses, calls, prints.

torch and transformers are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import atexit
import os
import platform
import shlex
import sys
import threading
import traceback
from inspect import getdoc
from typing import Annotated

import typer

from . import __version__
from .commands import (
    bench,
    convert,
    demo,
    doctor,
    estimate,
    eval,
    export,
    finetune,
    generate,
    inspect,
    mechanisms,
    push,
    recipes,
    report,
    runs,
    serve,
    upgrade,
    verify,
)
from .errors import Exit, LinearizeError, resource_error
from .terminal.output import quiet_other_packages, say, say_error, unwrapped
from .terminal.signals import interruptible

app = typer.Typer(
    name="linearize",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes around it take longer to import than all the rest of `--help`
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Replace softmax attention in a pretrained Transformer by a linear-time mechanism, distil, save.",
)


# How threads of OpenMP wait for each other, by any of its libraries; each reads its own when torch is imported.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def run() -> None:
    """`main` as the last act of a process, which ends without taking torch and transformers apart: they have nothing to
    put away that the system does not, and Python takes more than a second for it."""
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    threading._shutdown()  # type: ignore[attr-defined]  # as Python does: wait for threads, then call what is registered
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # Python says what it could not write
        sys.exit(code)
    os._exit(code)


def main() -> None:
    """Run the command line; an error becomes one message and its exit code, a bug a report without local values."""
    if not any(variable in os.environ for variable in WAITING):
        # By default they spin, on a core that another process could use. Child processes inherit this.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    quiet_other_packages()
    try:
        with interruptible():
            app(standalone_mode=True)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # whoever read the output left: `| head -1`
            sys.exit(int(Exit.CLOSED))
        if ended.code == Exit.INTERRUPTED:  # typer's answer to Ctrl-C
            say("interrupted")
        raise
    except Exception as error:
        known = error if isinstance(error, LinearizeError) else resource_error(error)
        rank = os.environ.get("RANK", "0")  # of several processes each speaks for itself
        where = "" if rank == "0" else f" in process {rank}"
        if known:
            say_error(where, known.message)
        else:
            say(bug_report(error))
        sys.exit(int(known.code if known else Exit.BUG))


def bug_report(error: Exception) -> str:
    """What to send when linearize fails in a way that it does not foresee: traceback, versions, command."""
    versions = {"linearize": __version__, "Python": platform.python_version()}
    versions |= {name: sys.modules[name].__version__ for name in ("torch", "transformers") if name in sys.modules}
    return (
        "".join(traceback.format_exception(error))
        + f"error: {type(error).__name__}, a bug in linearize. Please open an issue with the lines above and these:\n"
        + f"  command: {shlex.join(['linearize', *sys.argv[1:]])}\n"
        + f"  versions: {', '.join(f'{name} {version}' for name, version in versions.items())}, {platform.platform()}"
    )


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
app.command()(inspect.inspect)
app.command()(convert.convert)
app.command()(estimate.estimate)
app.command()(finetune.finetune)
app.command("eval")(eval.evaluate)
app.command()(report.report)
app.command()(runs.runs)
app.command()(runs.compare)
app.add_typer(recipes.recipes, name="recipes")
app.command()(push.push)
app.command()(mechanisms.mechanisms)
app.command()(generate.generate)
app.command()(serve.serve)
app.command()(export.export)
app.command()(verify.verify)
app.command()(upgrade.upgrade)
app.command()(doctor.doctor)
app.command()(demo.demo)
app.add_typer(bench.bench, name="bench")

# Typer keeps the line ends of every paragraph but the first, and cuts what it lists a command with.
for group in (app, recipes.recipes, bench.bench):
    for command in group.registered_commands:
        command.help = unwrapped(getdoc(command.callback) or "")
        command.short_help = command.help.partition("\n\n")[0]
