"""The command line: parse, call, print. Human text goes to stderr, results to stdout.

torch and transformers are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .errors import Exit, LinearizeError

app = typer.Typer(
    name="linearize",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Replace softmax attention in a pretrained Transformer by a linear-time mechanism, distil, save.",
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


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


def say(text: str) -> None:
    """One message for a person."""
    print(text, file=sys.stderr, flush=True)


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


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="A local folder or a Hub id.")],
    to: Annotated[str, typer.Option("--to", help="Mechanism, for example gsa.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: ./NAME-MECHANISM.")] = None,
    layers: Annotated[str, typer.Option(help="all, 0-3,7 or every:2.")] = "all",
    keep_softmax: Annotated[str, typer.Option(help="Layers to leave alone, for example 7,15.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Mechanism option, key=value; repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="keep, float32, bfloat16, float16 or float64.")] = "keep",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; reads no weights.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what linearize wrote before.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the model ships.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    verify: Annotated[str, typer.Option(help="auto, full, keys or none.")] = "auto",
    as_json: Json = False,
) -> None:
    """Replace softmax attention; writes an ordinary Hugging Face model folder."""
    if verify not in ("auto", "full", "keys", "none"):
        raise LinearizeError(f"--verify {verify}: choose auto, full, keys or none")
    from . import convert as story
    from .mechanisms import parse_settings
    from .show import plan_table

    plan, source, natives = story.plan_conversion(
        model,
        to,
        layers=layers,
        keep_softmax=keep_softmax,
        options=parse_settings(settings or []),
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        weights=not dry_run,
    )
    plan_table(plan)
    result: dict[str, Any] = {"plan": plan.to_json()}
    if not dry_run:
        target = output or Path(f"{Path(source.name).name}-{to}")
        checked = story.convert(
            plan,
            source,
            natives,
            target,
            overwrite=overwrite,
            level=verify,  # type: ignore[arg-type]
            trust_remote_code=trust_remote_code,
            say=say,
        )
        say(f"saved {target}. Next: distil it with linearize finetune")
        result |= {"output": str(target), "verified": checked}
    if as_json:
        print(json.dumps(result))


@app.command()
def finetune(
    recipe: Annotated[Path, typer.Argument(help="A recipe file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, for example model.base=DIR.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what each stage will do and stop.")] = False,
    resume: Annotated[str, typer.Option(help="auto, never, or a checkpoint folder.")] = "auto",
    stage: Annotated[str | None, typer.Option(help="Run only the stage of this name.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="At most this many steps per stage.")] = None,
    as_json: Json = False,
) -> None:
    """Distil: attention transfer, logit KL, finetuning, as the recipe says."""
    from .recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    from . import finetune as story
    from .show import recipe_table, report_table

    if dry_run:
        plans = story.dry_run(loaded, say, max_steps)
        recipe_table(plans)
        result: dict[str, Any] = {"stages": plans}
    else:
        result = story.finetune(loaded, resume=resume, only=stage, max_steps=max_steps, say=say)
        report_table(result)
    if as_json:
        print(json.dumps(result))


@app.command()
def demo(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the run here; default: a temporary folder.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="Continued by teacher and student.")] = "def read_lines(path):\n",
    as_json: Json = False,
) -> None:
    """Convert, distil and compare the model that the package ships: three minutes on a CPU, no downloads."""
    from .demo.tour import tour

    report = tour(output, prompt, say)
    if as_json:
        print(json.dumps(report))


bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory.")
app.add_typer(bench, name="bench")


@bench.command("kernels")
def bench_kernels(
    mechanism: Annotated[str, typer.Option(help="Mechanism whose GPU kernels are measured.")] = "gsa",
    picture: Annotated[Path | None, typer.Option("--plot", help="Also draw the times into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """GPU kernels beside PyTorch, scaled dot product attention and, where installed, flash-linear-attention."""
    from .bench import bench_kernels as measure
    from .bench_report import markdown, plot

    result = measure(mechanism)
    print(json.dumps(result) if as_json else markdown(result))
    if picture is not None:
        plot(result, picture)
