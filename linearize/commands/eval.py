"""`linearize eval`."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal import tables
from ..terminal.arguments import Converted, Device, Dtype, Trust, non_empty, one_of, path
from ..terminal.arguments import model as model_name
from ..terminal.output import Json, finite, nats, percent, print_json, say, size
from ..terminal.progress import starting

if TYPE_CHECKING:
    from ..plan.plan import Plan

NO_RECIPE = (
    "no --recipe: measured on the held-out part of Python's standard library. For a model of other text, give a "
    "recipe, or data.eval='{files: [heldout.jsonl]}'"
)

# By which a result of this command is known.
BEGINS = '{"student": "'
MOST = 100_000  # texts: all are made before the first is measured
PNG = b"\x89PNG"
# Options that mean something for models that write text alone, for tasks alone, and for models of transformers alone.
OF_TEXT = ("lengths", "trials", "generate", "seed")
OF_TASKS = ("limit", "few_shot")
OF_MODELS = (*OF_TEXT, "tasks", *OF_TASKS, "batch_tokens", "dtype", "without")

# Of layers with both, what `--without` switches off.
PARTS = ("memory", "window")


def evaluate(
    student: Converted,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Recipe values as key.sub=value, to choose the text.")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="The original, before conversion.", parser=non_empty)] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe or preset whose data.eval, data.pack and eval.max_tokens name the text; or the folder of a "
            "run, for its text and teacher (with --tasks its teacher alone). Default: held-out files of Python's "
            "standard library.",
            parser=non_empty,
        ),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Lengths of recall and needle texts in tokens, for example 256,1024.")
    ] = "256,512,1024",
    trials: Annotated[int, typer.Option(min=1, max=MOST, help="Number of texts for each task and length.")] = 32,
    generate: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST,
            help="Texts that each model generates, to measure recall and repetition; of "
            "conversations also whether answers end.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random texts.")] = 0,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Run these tasks of lm-evaluation-harness instead: arc_easy,hellaswag, piqa=rows.jsonl to read their "
            "data from a file, or a file.yaml with your own task.",
            parser=non_empty,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tasks: only this many rows of each.")] = None,
    few_shot: Annotated[
        int | None, typer.Option(min=0, help="With --tasks: examples before each question. Default: the task's own.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one forward pass.")] = 8192,
    without: Annotated[
        str | None,
        typer.Option(
            help="Switch off one part of the student's layers that have both: memory or window.",
            callback=one_of("--without", PARTS),
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "keep",
    trust_remote_code: Trust = False,
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
    from ..recipe.presets import recipe_path

    recipe, teacher = recipe or "", model_name(teacher) if teacher else ""
    run, own = Path(recipe), list[str]()
    of_run = bool(recipe) and (run / "run.json").is_file()
    if recipe and not of_run:
        recipe_path(recipe)
    with starting():
        from ..checkpoint.atomic import check_result
        from ..diffusion.convert import holds_diffusers
        from ..errors import LinearizeError, did_you_mean
        from ..page.record import EVAL
        from ..recipe.data import DemoSource, holds_images
        from ..train.runs import heldout_of

    given = {"lengths": lengths, "trials": trials, "generate": generate, "seed": seed}
    given |= {"batch_tokens": batch_tokens, "dtype": dtype, "tasks": tasks, "limit": limit, "few_shot": few_shot}
    given |= {"without": without}
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
    told = list[str]()  # what whoever reads the result later should know, too

    def tell(text: str) -> None:
        say(text)
        told.append(text)

    if without:
        tell(f"note: the student is measured without its {without}")
    if tasks:
        reason = "with --tasks, lm-evaluation-harness measures alone"
        of_needles = any(name.strip().startswith("needle=") for name in tasks.split(","))
        _refuse(given, ("generate",) if of_needles else OF_TEXT, reason)
        if recipe and not of_run:
            raise LinearizeError(f"--recipe {recipe}: {reason}, and only a run says what its teacher is. Leave it out")
        if overrides:
            raise LinearizeError(f"{' '.join(overrides)}: recipe values choose a text, and --tasks have their own")
        from ..measure.compare import EvalRequest, parse_lengths
        from ..measure.tasks import find_tasks, run_tasks

        teacher = teacher or (heldout_of(run, _plan_of(student))[1] if of_run else "")
        if teacher:
            _note_converted(teacher, tell)
        needle = EvalRequest(parse_lengths(lengths), min(trials, limit or trials), seed, batch_tokens)
        found = find_tasks(tasks, batch_tokens, limit, few_shot, needle)
        result = run_tasks(student, teacher, found, without or "", **options)
        result["notes"] = told
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
        named = f" (its linearize.json calls it {plan.source})" if plan else ""
        raise LinearizeError(f"--teacher is missing: give the model that the student was converted from{named}")
    from linearize_kernels.hf.attention_hooks import mixers_of

    from ..data.kinds import has_head
    from ..measure.answers import compare_answers
    from ..measure.compare import EvalRequest, check_eval, check_lengths, compare, parse_lengths, text_recipe
    from ..measure.embeddings import compare_embeddings
    from ..measure.evaluate import check_finite, random_teacher_warning
    from ..measure.generate import load_any, switch_off, with_tokenizer
    from ..train.teacher import vocabulary_of
    from ..verify.child.inputs import writes_text

    text = text_recipe("" if of_run else recipe, teacher, [*own, *(overrides or [])])
    check_eval(text)
    if not recipe and isinstance(text.data.eval, DemoSource):
        home = Path(student).parent
        there = Path(student).name == "final" and (home / "run.json").is_file()
        say(NO_RECIPE + (f". For the text of its own run: --recipe {shlex.quote(str(home))}" if there else ""))
    _note_converted(teacher, tell)
    request = EvalRequest(parse_lengths(lengths), trials, seed, batch_tokens, generate)
    ours, theirs = (load_any(name, None, teacher=False, **options) for name in (student, teacher))
    if without:
        switch_off(ours.model, without, student)
    if not mixers_of(ours.model):
        itself = ", and is compared with itself" if Path(student).resolve() == Path(teacher).resolve() else ""
        tell(f"note: {student} has no converted layer{itself}")
    result = {"student": student, "teacher": teacher, "seed": seed, **({"without": without} if without else {})}
    if writes_text(ours.model):
        models = [
            with_tokenizer(opened, name, False, trust_remote_code)
            for opened, name in ((ours, student), (theirs, teacher))
        ]
        result |= compare(models[0], models[1], text, request)
        check_finite("the student", result["student_ppl"], result["kl"])
        comparison_table(result)
        random = random_teacher_warning(result["teacher_ppl"], vocabulary_of(theirs.model))
        if random:
            tell(random)
        for warning in filter(None, (result["positions"]["warning"], *remarks(result))):
            say(warning)
    else:
        _refuse(given, OF_TEXT, f"a {type(ours.model).__name__} writes no text")
        if not holds_images(text.data.eval):
            check_lengths((ours.model, theirs.model), text)
        if has_head(ours.model) or has_head(theirs.model):
            result |= compare_answers(ours, theirs, text, batch_tokens, tell)
            answers_table(result)
        else:
            result |= compare_embeddings(ours, theirs, text, batch_tokens)
            embeddings_table(result)
    result["notes"] = told
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


def _note_converted(teacher: str, tell: Callable[[str], None]) -> None:
    """Tell so where the teacher is a converted model itself: its figures are not those of its softmax."""
    from ..checkpoint.manifest import is_linearized, plan_in
    from ..checkpoint.source import open_source
    from ..page.report import mechanisms

    folder = open_source(teacher, None).folder
    if is_linearized(folder):
        made = mechanisms(plan_in(folder)).lower()
        tell(
            f"note: --teacher {teacher} is itself converted ({made}); the figures are against that, not against softmax"
        )


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
    """A converted pipeline of diffusers, and its own teacher: predictions by noise level, and samples as a PNG."""
    from ..checkpoint.atomic import check_result, write_result
    from ..diffusion import finetune as story
    from ..diffusion.recipe import load_latents_recipe
    from ..errors import LinearizeError

    drawn = output.with_suffix(".png") if output is not None else None
    if output is not None and drawn == output:
        other = output.with_suffix(".json")
        raise LinearizeError(f"-o {output}: the result is JSON, and its picture is a PNG next to it. Try -o {other}")
    if drawn is not None:
        check_result(drawn, PNG, "eval")
    if not recipe:
        raise LinearizeError("--recipe is missing: give a recipe whose data are latents, see docs/diffusers.md")
    own = ["convert=null", f"model.base={json.dumps(student)}", f"model.trust_remote_code={json.dumps(trust)}"]
    result, png = story.evaluate(load_latents_recipe(recipe, [*overrides, *own]))
    tables.prediction_table(result["predictions"])
    if drawn is not None:
        write_result(drawn, png)
        say(f"wrote {drawn}: samples of the student, and of the teacher below")
    _write(result, output, as_json)


def comparison_table(result: dict[str, Any]) -> None:
    """What `linearize eval` measured."""
    student, teacher = result["student_ppl"], result["teacher_ppl"]
    rows: list[tuple[str, ...]] = [
        ("perplexity", f"{student:.3f} ({result['ppl_ratio']:.3f}x)", f"{teacher:.3f}"),
        ("KL from the teacher, nats a token", nats(result["kl"]), ""),
        ("same prediction (likeliest token)", percent(result["top1_agreement"]), ""),
        *tables.asked_rows(result),
    ]
    both = "both in " * (len({*result["dtypes"].values()}) > 1)
    for row in result["state"]:
        cells = [size(row[who]) for who in ("student", "teacher")]
        rows.append((f"state at {row['length']:,} tokens, {both}{result['state_dtype']}", *cells))
    columns = {"": "text", "student": "number", "teacher": "number"}
    title = f"{result['read']:,} tokens of {result['text']}, in rows of {result['seq_len']:,}; "
    title += f"{result['tokens']:,} of them are predicted; {tables.written_dtypes(result['dtypes'])}"
    tables.console().print(tables.table(columns, rows, title))
    tables.console().print(
        "recall: second words of a list of pairs, asked for by the first; needle: one such pair in other text"
    )
    tables.repeats_table(result["repeats"])
    tables.positions_table(result["positions"])


def answers_table(result: dict[str, Any]) -> None:
    """What `linearize eval` measured of images or masked text."""
    images, parts = result["kind"] == "images", result["predicts"] == "parts"
    one, many = ("image", "images") if images else ("hidden token", "hidden tokens")
    rows: list[tuple[str, ...]] = []
    if result["labelled"]:
        labels = "" if result["labelled"] == result["asked"] else f", {result['labelled']:,} with a label"
        rows = [
            (f"accuracy{labels}", percent(result["student_accuracy"]), percent(result["teacher_accuracy"])),
            ("perplexity of the labels", f"{result['student_ppl']:.3f}", f"{result['teacher_ppl']:.3f}"),
        ]
    if result["predicts"] == "numbers":
        rows = [("squared error relative to the teacher's own square", nats(result["relative_error"]), "")]
    else:
        one = "patch or pixel" if parts else one
        same = f"same class of a {one}" if parts else f"same {'class' if images else 'token'}"
        rows += [
            (same, percent(result["top1_agreement"]), ""),
            (f"KL from the teacher, nats per {one}", nats(result["kl"]), ""),
        ]
    columns = {"": "text", "student": "number", "teacher": "number"}
    tables.console().print(tables.table(columns, rows, f"{result['asked']:,} {many} of {result['data']}"))


def embeddings_table(result: dict[str, Any]) -> None:
    """What `linearize eval` measured of two encoders of text or of images."""
    rows: list[tuple[str, ...]] = []
    columns = {"": "text", "student": "number", "teacher": "number"}
    for what in ("images",) if "images" in result else ("sentences", "passages"):
        rows.append((f"Spearman of similarities, pairs of {what}", f"{result[f'spearman_{what}']:.4f}", ""))
        rows.append((f"cosine with the teacher's vector, {what}", f"{result[f'cosine_{what}']:.4f}", ""))
    if "images" in result:
        if "student_nearest_class" in result:
            found = (percent(result[f"{who}_nearest_class"]) for who in ("student", "teacher"))
            rows.append(("the nearest other image has the same class", *found))
        rows.append(("same nearest image", percent(result["same_answer"]), ""))
        tables.console().print(tables.table(columns, rows, f"{result['images']:,} images of {result['data']}"))
        return
    for places in (1, 10):
        found = (percent(result[f"{who}_found_{places}"]) for who in ("student", "teacher"))
        rows.append((f"passage found by its first sentence, top {places}", *found))
    rows.append(("same passage found first", percent(result["same_answer"]), ""))
    title = f"{result['passages']:,} passages of {result['data']}, {result['longest']:,} tokens at most"
    tables.console().print(tables.table(columns, rows, title))


def tasks_table(result: dict[str, Any]) -> None:
    """What lm-evaluation-harness measured."""
    kinds = ("text", "short", "number", "number", "number", "number")
    headings, rows = tables.task_rows(result)
    tables.console().print(
        tables.table(dict(zip(headings, kinds, strict=False)), rows, f"lm-evaluation-harness {result['harness']}")
    )
    for row in result["tasks"] if result["teacher"] else ():
        found = [one["teacher"] for one in row["metrics"] if one.get("higher_is_better")]
        if found and not any(found):
            tables.console().print(f"note: {row['task']} compares nothing here: the teacher itself is right in no row")


def remarks(result: dict[str, Any]) -> list[str]:
    """Sentences on figures of `linearize eval` that are easily misread."""
    nothing = tables.empty_tasks_note(result)
    return [note for note in (tables.note_below(result["ppl_ratio"]), f"note: {nothing}" * bool(nothing)) if note]
