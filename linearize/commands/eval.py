"""`linearize eval`."""

from __future__ import annotations

import inspect
import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..demo import named_base
from ..terminal.arguments import path
from ..terminal.output import Json, finite, print_json, say
from ..terminal.progress import starting

if TYPE_CHECKING:
    from ..plan.plan import Plan

NO_RECIPE = (
    "no --recipe: measured on the held-out part of Python's standard library. For a model of other text, give a "
    "recipe, or data.eval='{files: [heldout.jsonl]}'"
)

# By which a result of this command is known.
BEGINS = '{"student": "'
PNG = b"\x89PNG"
# Options that mean something for models that write text alone, for tasks alone, and for models of transformers alone.
OF_TEXT = ("lengths", "trials", "generate", "seed")
OF_TASKS = ("limit", "few_shot")
OF_MODELS = (*OF_TEXT, "tasks", *OF_TASKS, "batch_tokens", "dtype")


def evaluate(
    student: Annotated[str, typer.Argument(help="Converted model: a local folder or a Hub id.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Recipe values as key.sub=value, to choose the text.")
    ] = None,
    teacher: Annotated[str, typer.Option(help="The original, before conversion.")] = "",
    recipe: Annotated[
        str,
        typer.Option(
            help="Recipe or preset that names the text: data.eval, data.pack and eval.max_tokens. The folder of a run: "
            "its text and its teacher; with --tasks its teacher alone. Without it the text is the held-out part of "
            "Python's standard library."
        ),
    ] = "",
    lengths: Annotated[
        str, typer.Option(help="Lengths of recall and needle texts in tokens, for example 256,1024.")
    ] = "256,512,1024",
    trials: Annotated[int, typer.Option(min=1, help="Number of texts for each task and length.")] = 32,
    generate: Annotated[
        int,
        typer.Option(
            min=0, help="Texts that each model writes by itself, to measure recall, Python that parses and repetition."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random texts.")] = 0,
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks of lm-evaluation-harness instead, for example arc_easy,hellaswag, or a file.yaml with a task "
            "of your own."
        ),
    ] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="With --tasks: only this many rows of each.")] = None,
    few_shot: Annotated[
        int | None, typer.Option(min=0, help="With --tasks: examples before each question. Default: the task's own.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one forward pass.")] = 8192,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Dtype: keep, float32, bfloat16 or float16.")] = "keep",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the models that linearize did not write.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File for the result as JSON: for linearize report, or with --tasks for linearize push.",
            parser=path,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a converted model with its teacher: perplexity, KL, agreement, recall and state size. For models of
    images or masked text: accuracy, agreement and KL. For models that predict maps: how far these are from the
    teacher's. For sentence encoders: similarities and searches. With --tasks: the results of lm-evaluation-harness."""
    with starting():
        from ..checkpoint.atomic import check_result
        from ..diffusion.convert import holds_diffusers
        from ..errors import LinearizeError, did_you_mean
        from ..page.record import EVAL
        from ..recipe.data import DemoSource
        from ..recipe.presets import recipe_path
        from ..train.runs import heldout_of

    run, own = Path(recipe), list[str]()
    of_run = bool(recipe) and (run / "run.json").is_file()
    teacher = teacher and named_base(teacher)
    given = {"lengths": lengths, "trials": trials, "generate": generate, "seed": seed}
    given |= {"batch_tokens": batch_tokens, "dtype": dtype, "tasks": tasks, "limit": limit, "few_shot": few_shot}
    options: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    if output is not None:
        check_result(output, BEGINS, "eval")
    if holds_diffusers(student):
        if teacher:
            raise LinearizeError("--teacher: a pipeline of diffusers has its teacher inside. Leave it out")
        _refuse(given, OF_MODELS, "a pipeline of diffusers is compared as the recipe's eval, seed and runtime say")
        chosen = [f"runtime.device={device}"] if device != "auto" else []
        _evaluate_latents(student, [*chosen, *(overrides or [])], recipe, trust_remote_code, output, as_json)
        return
    if tasks:
        reason = "with --tasks, lm-evaluation-harness measures alone"
        _refuse(given, OF_TEXT, reason)
        if recipe and not of_run:
            raise LinearizeError(f"--recipe {recipe}: {reason}, and only a run says what its teacher is. Leave it out")
        if overrides:
            raise LinearizeError(f"{' '.join(overrides)}: recipe values choose a text, and --tasks have their own")
        from ..measure.tasks import find_tasks, run_tasks
        from ..terminal.tables import tasks_table

        teacher = teacher or (heldout_of(run, _plan_of(student))[1] if of_run else "")
        if teacher:
            _note_converted(teacher)
        result = run_tasks(student, teacher, find_tasks(tasks, batch_tokens, limit, few_shot), **options)
        tasks_table(result)
        _write(result, output, as_json)
        return
    _refuse(given, OF_TASKS, "only --tasks have rows and examples")
    if recipe and not of_run and not recipe_path(recipe).is_file():
        near = [str(other) for other in run.parent.glob("*") if (other / "run.json").is_file() or other.is_file()]
        raise LinearizeError(f"--recipe {recipe}: no run and no recipe file is there.{did_you_mean(str(run), near)}")
    plan = _plan_of(student)
    if of_run:
        from ..measure.compare import SET_EVAL

        own, base = heldout_of(run, plan)
        teacher = teacher or base
        if not any(word.startswith("data.eval") for word in (*own, *(overrides or []))):
            raise LinearizeError(f"--recipe {recipe}: the run has no held-out data; {SET_EVAL}")
    if not teacher:
        named = f"; its linearize.json says {plan.source}" if plan else ""
        raise LinearizeError(f"--teacher is missing: give the model that the student was converted from{named}")
    from linearize_kernels.hf.attention_hooks import mixers_of

    from ..data.batches import has_head
    from ..measure.answers import compare_answers
    from ..measure.compare import EvalRequest, check_eval, compare, parse_lengths, text_recipe
    from ..measure.embeddings import compare_embeddings
    from ..measure.evaluate import check_finite, random_teacher_warning
    from ..measure.generate import load_any, with_tokenizer
    from ..terminal.tables import answers_table, comparison_table, embeddings_table, remarks
    from ..train.teacher import vocabulary_of
    from ..verify.child.inputs import writes_text

    text = text_recipe("" if of_run else recipe, teacher, [*own, *(overrides or [])])
    check_eval(text)
    if not recipe and isinstance(text.data.eval, DemoSource):
        home = Path(student).parent
        there = Path(student).name == "final" and (home / "run.json").is_file()
        say(NO_RECIPE + (f". For the text of its own run: --recipe {shlex.quote(str(home))}" if there else ""))
    _note_converted(teacher)
    request = EvalRequest(parse_lengths(lengths), trials, seed, batch_tokens, generate)
    ours, theirs = (load_any(name, None, teacher=False, **options) for name in (student, teacher))
    if not mixers_of(ours.model):
        itself = ", and is compared with itself" if Path(student).resolve() == Path(teacher).resolve() else ""
        say(f"note: {student} has no converted layer{itself}")
    result = {"student": student, "teacher": teacher, "seed": seed}
    if writes_text(ours.model):
        models = [
            with_tokenizer(opened, name, False, trust_remote_code)
            for opened, name in ((ours, student), (theirs, teacher))
        ]
        result |= compare(models[0], models[1], text, request)
        check_finite("the student", result["student_ppl"], result["kl"])
        comparison_table(result)
        random = random_teacher_warning(result["teacher_ppl"], vocabulary_of(theirs.model))
        for warning in filter(None, (random, result["positions"]["warning"], *remarks(result))):
            say(warning)
    else:
        _refuse(given, OF_TEXT, f"a {type(ours.model).__name__} writes no text")
        if has_head(ours.model) or has_head(theirs.model):
            result |= compare_answers(ours, theirs, text, batch_tokens, say)
            answers_table(result)
        else:
            result |= compare_embeddings(ours, theirs, text, batch_tokens)
            embeddings_table(result)
    _write(result, output, as_json)
    if of_run and output is None:
        say(f"not saved: with -o {shlex.quote(str(run / EVAL))} it is for linearize report and compare, too")


def _plan_of(student: str) -> Plan | None:
    """By what a student was converted, where it is a folder that says so."""
    from ..checkpoint.manifest import read_plan
    from ..errors import LinearizeError

    with suppress(LinearizeError):
        return read_plan(Path(student).expanduser())
    return None


def _note_converted(teacher: str) -> None:
    """Say so where the teacher is a converted model itself: figures beside it are not those beside its softmax."""
    from ..checkpoint.manifest import is_linearized, plan_in
    from ..checkpoint.source import open_source
    from ..page.report import mechanisms

    folder = open_source(teacher, None).folder
    if is_linearized(folder):
        made = mechanisms(plan_in(folder)).lower()
        say(f"note: --teacher {teacher} is itself converted ({made}); figures are beside that, not beside softmax")


def _write(result: dict[str, Any], output: Path | None, as_json: bool) -> None:
    """The result as JSON: into a file, and on stdout, where either was asked for."""
    from ..checkpoint.atomic import write_result

    if output is not None:
        write_result(output, json.dumps(finite(result)) + "\n")
        say(f"wrote {output}")
    if as_json:
        print_json(result)


def _refuse(given: dict[str, Any], names: tuple[str, ...], why: str) -> None:
    """Raise LinearizeError (exit 2) for options among `names` that were given and would have no effect."""
    from ..errors import LinearizeError

    defaults = inspect.signature(evaluate).parameters
    flags = [f"--{name.replace('_', '-')}" for name in names if given[name] != defaults[name].default]
    if flags:
        raise LinearizeError(f"{', '.join(flags)}: {why}. Leave {'it' if len(flags) == 1 else 'them'} out")


def _evaluate_latents(
    student: str, overrides: list[str], recipe: str, trust: bool, output: Path | None, as_json: bool
) -> None:
    """A converted pipeline of diffusers, beside its own teacher: predictions by noise level, and samples as a PNG."""
    from ..checkpoint.atomic import write_result
    from ..diffusion import finetune as story
    from ..diffusion.recipe import load_latents_recipe
    from ..errors import LinearizeError, check_file
    from ..terminal.tables import prediction_table

    drawn = output.with_suffix(".png") if output is not None else None
    if output is not None and drawn == output:
        other = output.with_suffix(".json")
        raise LinearizeError(f"-o {output}: the result is JSON, and its picture is a PNG beside it. Try -o {other}")
    if drawn is not None and drawn.is_dir():
        raise LinearizeError(f"-o {output}: its picture would be {drawn}, which is a folder. Choose another -o")
    if drawn is not None and drawn.exists():
        check_file(drawn)
        with drawn.open("rb") as file:
            if file.read(len(PNG)) != PNG:
                message = f"{drawn} is there already, and is no picture. Choose another -o, or move that one away"
                raise LinearizeError(message)
    if not recipe:
        raise LinearizeError("--recipe is missing: give a recipe whose data are latents, see docs/diffusers.md")
    own = ["convert=null", f"model.base={json.dumps(student)}", f"model.trust_remote_code={json.dumps(trust)}"]
    result, png = story.evaluate(load_latents_recipe(recipe, [*overrides, *own]))
    prediction_table(result["predictions"])
    if output is not None and drawn is not None:
        write_result(output, json.dumps(finite(result)) + "\n")
        write_result(drawn, png)
        say(f"wrote {output} and {drawn}: samples of the student, and of the teacher below")
    if as_json:
        print_json(result)
