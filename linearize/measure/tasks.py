"""`linearize eval --tasks`: lm-evaluation-harness measures a student, and its teacher, on tasks of its own.

The harness is given the loaded model as it is; which tasks there are, their data and their metrics are its matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import yaml
from packaging.version import Version

from linearize_kernels.hf.attention_hooks import evaluating

from ..checkpoint.manifest import identity, is_linearized
from ..checkpoint.provenance import check_code
from ..checkpoint.source import open_source
from ..convert import load_config
from ..data.documents import TextSource, cache_alone, pieces, rows_of
from ..errors import (
    Exit,
    LinearizeError,
    absent,
    check_file,
    did_you_mean,
    quoted,
    reason_of,
    resource_error,
    undamaged,
)
from ..hub.download import unanswered
from ..hub.errors import hub_errors
from ..recipe.data import unreadable
from ..terminal.output import counted, say
from ..terminal.progress import progress
from ..terminal.tables import task_rows
from ..verify.child.inputs import most_tokens
from .compare import EvalRequest
from .generate import Loaded, device_memory, load, switch_off
from .recall import Writer, score
from .recall import rows_of as rows_of_task

RESULTS = "tasks.json"  # in a run's folder: linearize push reads it
HARNESS = "lm_eval"
ASKED = "nyu-mll/glue"  # whether the Hub answers at all is asked with this dataset
# The first version whose TaskManager loads tasks without running them.
OLDEST = "0.4.12"
NEEDED = f'--tasks needs lm-evaluation-harness: pip install "lm-eval>={OLDEST}"'
OWN_TASK = """A task of your own needs no Hub: --tasks words.yaml, with the lines below. It asks what words.jsonl
has, whose lines are like {"start": "import", "choices": ["os", "for"], "answer": 0}

task: words
dataset_path: json
dataset_kwargs: {data_files: {test: words.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}"""
DATA_FILES = "Relative paths of data files begin at the working directory, {}: put it there, or give its whole path"
# What a row of text is taken to have when a batch is counted in tokens: a question with an answer is seldom longer.
ROW_TOKENS = 512
# Resamples for the standard error of a perplexity, which they give to about 2 %. The harness's own 100,000 take minutes
# of all cores for LAMBADA.
RESAMPLES = 1000
# Entries of the harness's results that are no metrics.
FACTS = ("name", "alias", "sample_len", "sample_count")


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Tasks that were found under the `names` asked for, as the harness takes them (`specs`), and how to run them:
    `limit` rows of each (None: all), `few_shot` examples before a question (None: as the task has it), `batch_tokens`
    at a time. `local` are those with a file; for needles, which the harness does not ask, `needle` says what to ask."""

    names: tuple[str, ...]
    specs: tuple[str | dict[str, Any], ...]
    manager: Any
    batch_tokens: int
    limit: int | None
    few_shot: int | None
    local: tuple[Local, ...] = ()
    needle: EvalRequest | None = None


def find_tasks(
    text: str, batch_tokens: int, limit: int | None, few_shot: int | None, needle: EvalRequest | None = None
) -> Tasks:
    """The tasks that `--tasks` names: of the harness, with * for any part of a name, files with tasks of your own, or
    NAME=FILE for data of your own; `needle` is for the needles among these.

    Their data are fetched. Raises LinearizeError: 2 for a task that is unknown or cannot be run here, 4 for a package
    that is not installed, 5 for data that cannot be fetched.
    """
    check_harness()
    named = [name.strip() for name in text.split(",") if name.strip()]
    if not named:
        raise LinearizeError("--tasks names no task. Give names with commas between, such as arc_easy,hellaswag")
    parsed = {name: parse_local(name) for name in named}
    local = [one for one in parsed.values() if one]
    others = [name for name in named if not parsed[name]]
    with quiet_harness():
        manager = index(bool(others))
        found = list(dict.fromkeys(one for name in others for one in matching(name, manager)))
        asked = [*found, *(one.name for one in local)]
        twice = next((name for name in asked if asked.count(name) > 1), None)
        if twice:
            raise LinearizeError(f"--tasks {text}: {twice} is asked for twice. Leave one out")
        away = unanswered(ASKED, dataset=True) if any(name in manager.all_tasks for name in found) else None
        specs: list[str | dict[str, Any]] = [*found, *filter(None, map(spec, local))]
        with task_errors(text), needed_packages(named), cache_alone(away):
            loaded = manager.load(specs)["tasks"]
    for name, task in loaded.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise LinearizeError(
                f"--tasks {name}: it runs code that the model wrote. Use lm_eval itself, with --confirm_run_unsafe_code"
            )
        if getattr(task, "MULTIMODAL", False):
            raise LinearizeError(f"--tasks {name}: it asks about images, and the model reads text", Exit.INCOMPATIBLE)
        if few_shot and any(one.name == name for one in local) and len(task.eval_docs) <= few_shot:
            message = f"--few-shot {few_shot}: the file of {name} has {counted(len(task.eval_docs), 'row')}, and one is"
            raise LinearizeError(f"{message} the question. Ask for fewer examples, or give more rows")
    names = (*others, *(one.name for one in local))
    return Tasks(names, tuple(specs), manager, batch_tokens, limit, few_shot, tuple(local), needle)


@functools.cache
def index(own: bool) -> Any:
    """What loads tasks: with the harness's `own`, by name, reading whose files takes seconds, or such as have all with
    them."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=own)


def check_harness() -> None:
    """Raise LinearizeError (exit 4) unless the harness is installed, in a version that can be used."""
    try:
        found = importlib.metadata.version(HARNESS)
    except importlib.metadata.PackageNotFoundError as error:
        raise LinearizeError(NEEDED, Exit.RESOURCE) from error
    if Version(found) < Version(OLDEST):
        raise LinearizeError(f"{NEEDED}. Installed is {found}", Exit.RESOURCE)


def matching(name: str, manager: Any) -> list[str]:
    """The harness's names for one of `--tasks`. Raises LinearizeError (exit 2) where there is none."""
    if name.endswith(".yaml"):
        path = Path(name).expanduser().absolute()
        if not path.is_file():
            raise absent(Path(name).expanduser(), f"--tasks {name}: no such file", OWN_TASK)
        return [str(path)]
    found = manager.match_tasks([name])
    if not found and name in FORMS:
        raise LinearizeError(f"--tasks {name}: it needs a file, as --tasks {name}=FILE.jsonl")
    if not found:
        near = did_you_mean(name, manager.all_tasks)
        raise LinearizeError(
            f"--tasks {name}: lm-evaluation-harness has no such task.{near} lm_eval ls tasks lists them; the name of a "
            "file of your own ends with .yaml"
        )
    return list(found)


@contextlib.contextmanager
def task_errors(text: str) -> Iterator[None]:
    """Within: what the harness and its tasks raise becomes a LinearizeError that names the tasks."""
    offline = f"offline: the data of {text} are not in the cache. Leave out --offline, and unset HF_HUB_OFFLINE"
    try:
        with hub_errors(text, ".", offline):
            yield
    except LinearizeError as error:
        raise LinearizeError(f"{error.message}. {FROM_FILE}. {OWN_TASK}", error.code) from error
    except OSError as error:  # so the package datasets says of the Hub
        own = [name.strip() for name in text.split(",") if name.strip().endswith(".yaml")]
        gone = re.search("Unable to find '(/[^']+)'", str(error))  # and of a file
        if own and gone:
            what = f"--tasks {', '.join(own)}: no such data file"
            raise absent(Path(gone[1]), what, DATA_FILES.format(Path.cwd())) from error
        message = f"--tasks {text}: cannot read the data: {reason_of(error)}. {FROM_FILE}. {OWN_TASK}"
        raise LinearizeError(message, Exit.HUB) from error
    except Exception as error:  # tasks are data and code of many people
        raise LinearizeError(
            f"--tasks {text}: lm-evaluation-harness cannot load them ({type(error).__name__}: {reason_of(error)})"
        ) from error


@contextlib.contextmanager
def failing_tasks(names: Iterable[str]) -> Iterator[None]:
    """Within: what a task raises, as it makes questions of its rows or reads the answers, becomes a LinearizeError with
    its name (exit 2), and so does what the harness raises as it hands them to the model. What the model raises goes on
    as it is, and so does what the machine refuses."""
    try:
        yield
    except LinearizeError:
        raise
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        names_of = [frame.f_globals.get("__name__", "") for frame in frames]
        by_model = any(name.startswith("lm_eval.models.") for name in names_of)
        if (by_model and not names_of[-1].startswith("lm_eval.")) or resource_error(error):
            raise
        running = [frame.f_locals["task_name"] for frame in frames if "task_name" in frame.f_locals]
        name = running[-1] if running else ",".join(names)
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = reason_of(error) if str(error) else f"{last.line}, in {last.name} of {Path(last.filename).name}"
        raise LinearizeError(f"--tasks {name}: it fails on its rows ({type(error).__name__}: {reason})") from error


def check_model(name: str, trust_remote_code: bool) -> None:
    """Before hours with another model: raise LinearizeError as `load` does, where the files of `name` show why."""
    source = open_source(name, None)
    if is_linearized(source.folder):
        check_code(source.folder, trust_remote_code)
    else:
        load_config(source, trust_remote_code)


def run_tasks(student: str, teacher: str, tasks: Tasks, without: str = "", **options: Any) -> dict[str, Any]:
    """The results of `student`, and of `teacher` unless that is empty, one after the other: what `--json` prints.

    `options` are those of `load`. `without` names a part of the student that is switched off; `push` wants none.
    `model` tells it whether a folder still has the weights that were measured.
    """
    for name in filter(None, (teacher, student)):
        check_model(name, options["trust_remote_code"])
    folder = open_source(student, None).folder
    result: dict[str, Any] = {"student": student, "teacher": teacher or None}
    result |= {"model": identity(folder) if is_linearized(folder) else None, "without": without or None}
    result |= {"harness": importlib.metadata.version(HARNESS), "limit": tasks.limit}
    result |= {"files": {one.name: str(one.path) for one in tasks.local}, "tasks": []}
    for who, name in (("student", student), ("teacher", teacher)):
        if name:
            add(result["tasks"], run_one(name, tasks, options, without if who == "student" else ""), who)
    return result


@device_memory()
def run_one(name: str, tasks: Tasks, options: dict[str, Any], without: str = "") -> dict[str, Any]:
    """What the harness finds for the model `name`, which is let go afterwards."""
    from lm_eval import simple_evaluate

    opened = load(name, None, teacher=False, **options)
    if without:
        switch_off(opened.model, without, name)
    say(f"{name}: {', '.join(tasks.names)} by lm-evaluation-harness {importlib.metadata.version(HARNESS)}")
    needle = next((one for one in tasks.local if one.name == NEEDLE), None)
    asked = needles(opened, needle, tasks.needle) if needle and tasks.needle else {}
    if not tasks.specs:
        return asked
    rolling = any(one.name == ROLLING for one in tasks.local)
    with quiet_harness(), failing_tasks(tasks.names), needed_packages(tasks.names):
        model = harness_model(opened, tasks.batch_tokens)
        found = simple_evaluate(
            model=model,
            tasks=list(tasks.specs),
            task_manager=tasks.manager,
            limit=tasks.limit,
            num_fewshot=tasks.few_shot,
            bootstrap_iters=RESAMPLES,
            log_samples=rolling,
        )
    if rolling:
        rolling_errors(found)
    return {**found, **{key: {**found[key], **asked[key]} for key in asked}}


def harness_model(opened: Loaded, batch_tokens: int) -> Any:
    """A model as the harness takes it, of which a pass reads about `batch_tokens` tokens: rows of ROW_TOKENS for
    questions. Of running text it reads a row as long as the model's context, or as a pass where that is shorter."""
    from lm_eval.models.huggingface import HFLM

    class Bounded(HFLM):
        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            length = min(self.max_length, batch_tokens)
            with (
                mock.patch.object(self, "_max_length", length),
                mock.patch.object(self, "batch_size_per_gpu", max(1, batch_tokens // length)),
            ):
                return super().loglikelihood_rolling(requests, disable_tqdm)

    rows = max(1, batch_tokens // ROW_TOKENS)
    return Bounded(pretrained=opened.model, tokenizer=opened.tokenizer, batch_size=rows)


def add(rows: list[dict[str, Any]], found: dict[str, Any], who: str) -> None:
    """Add what the harness `found` for the `student`, whose rows are new, or for the `teacher`, to rows of tasks.

    `part_of` is the group whose mean a task is a part of; `rows` of `of_rows` were asked; `dataset` is its name on the
    Hub, or None for data that are elsewhere.
    """
    groups = found.get("groups") or {}
    parts = {part: group for group in groups for part in found["group_subtasks"].get(group, ())}
    for name, values in found["results"].items():
        config, count = found["configs"].get(name, {}), found["n-samples"].get(name, {})
        row = next((row for row in rows if row["task"] == name), None)
        if row is None:
            row = {"task": name, "version": (found.get("versions") or {}).get(name), "part_of": parts.get(name)}
            row |= {"dataset": on_hub(config), "config": config.get("dataset_name"), "split": split_of(config)}
            row |= {"few_shot": (found.get("n-shot") or {}).get(name), "rows": count.get("effective")}
            rows.append(row | {"of_rows": count.get("original"), "metrics": []})
            row = rows[-1]
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if key in FACTS or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            one = next((one for one in row["metrics"] if (one["metric"], one["filter"]) == (metric, chosen)), None)
            if one is None:
                better = found["higher_is_better"].get(name, {}).get(metric)
                one = {"metric": metric, "filter": chosen, "higher_is_better": better}
                row["metrics"].append(one)
            error = values.get(f"{metric}_stderr,{chosen}")
            one |= {who: value, f"{who}_error": error if isinstance(error, float) else None}


def on_hub(config: dict[str, Any]) -> str | None:
    """The name on the Hub of a task's data; None for files, which have none, and for a group."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as builders

    path = config.get("dataset_path")
    return path if isinstance(path, str) and path not in builders and not Path(path).exists() else None


def split_of(config: dict[str, Any]) -> str | None:
    """The part of the data that the harness asks about."""
    return config.get("test_split") or config.get("validation_split")


@contextlib.contextmanager
def needed_packages(names: Iterable[str]) -> Iterator[None]:
    """Within: a package that a metric or a dataset needs and that is not there becomes a LinearizeError (exit 4)."""
    try:
        yield
    except ImportError as error:
        message = f"--tasks {','.join(names)}: a package is not installed: {reason_of(error)}"
        raise LinearizeError(message, Exit.RESOURCE) from error


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """Within: the harness says nothing but errors, its bars are for terminals alone, and what tasks print goes to
    stderr, away from a result's JSON."""
    from tqdm import tqdm

    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    # The harness asks git for the commit of the folder in which it runs; outside a repository git prints an error.
    without_git = mock.patch("lm_eval.evaluator.get_git_commit_hash", return_value=None, create=True)
    made = tqdm.__init__

    def for_terminals(bar: Any, *given: Any, **asked: Any) -> None:
        made(bar, *given, **asked | {"disable": asked.get("disable") or not sys.stderr.isatty()})

    # The harness asks for bars explicitly, which overrules TQDM_DISABLE.
    bars = mock.patch.object(tqdm, "__init__", for_terminals)
    # It bootstraps in forks otherwise, which have this process's signal handlers and print that they were ended.
    without_forks = mock.patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"})
    try:
        with contextlib.redirect_stdout(sys.stderr), without_git, without_forks, bars:
            yield
    finally:
        log.setLevel(level)


def read_tasks(path: Path) -> dict[str, Any]:
    """What `linearize eval --tasks -o` wrote. Raises LinearizeError (exit 2) for anything else."""
    if not path.is_file():
        raise absent(path)
    with undamaged(path, f"Write it again: linearize eval DIR --tasks NAMES -o {quoted(path)}"):
        found = json.loads(path.read_text("utf-8"))
        if "tasks" not in found and "student" in found:
            raise LinearizeError(
                f"{path} has what eval measured without --tasks, which linearize report and compare show. For the "
                "card: linearize eval DIR --tasks NAMES -o ANOTHER"
            )
        task_rows(found)  # all that is needed is there
        return {**found, "model": found["model"], "limit": found["limit"], "harness": found["harness"]}


# ---------------------------------------------------------------- tasks on data in a file

# `--tasks NAME=FILE`: well known tasks without the Hub. task_files/ holds a task of lm-evaluation-harness for each
# name, with the prompt and the metrics that the harness has under that name. Rows may have the fields that they have
# on the Hub, or plain ones; here they become plain. Needles are those of `linearize eval`: the file is the text around
# them.


NEEDLE, ROLLING = "needle", "rolling_perplexity"
NEEDLE_TEXT = 65536  # tokens of a file from which the text around needles is taken
_ASKED, _HELLASWAG = ("question", "choices"), ("activity_label", "endings", "label")
# The fields that a row of each task has; where a task has two forms, the first that a row has is read.
FORMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "lambada_openai": (("context", "continuation"), ("text",)),
    "piqa": ((*_ASKED, "label"), ("goal", "sol1", "sol2", "label")),
    "arc_easy": ((*_ASKED, "label"), (*_ASKED, "answerKey")),
    "arc_challenge": ((*_ASKED, "label"), (*_ASKED, "answerKey")),
    "hellaswag": ((*_HELLASWAG, "ctx_a", "ctx_b"), (*_HELLASWAG, "ctx")),
    ROLLING: (("text",),),
    NEEDLE: (("text",),),
}
FROM_FILE = f"From a file, as --tasks NAME=FILE.jsonl, these are read: {', '.join(FORMS)}"


class Local(NamedTuple):
    """A task that is asked for with a file."""

    name: str
    path: Path

    def __str__(self) -> str:
        return f"--tasks {self.name}={self.path}"


def parse_local(text: str) -> Local | None:
    """`piqa=rows.jsonl`; None for a name without a file. Raises LinearizeError (exit 2) for a name that has no file
    of its own in task_files, and for a file that is not there."""
    name, mark, path = text.partition("=")
    if not mark or text.endswith(".yaml"):
        return None
    if name not in FORMS:
        raise LinearizeError(
            f"--tasks {text}: no task of that name reads a file.{did_you_mean(name, FORMS)} {FROM_FILE}. For others "
            "write a file.yaml with a task of your own"
        )
    if not path.strip():  # Path would read it as this folder
        raise LinearizeError(f"--tasks {text}: no file is named. Write {name}=FILE.jsonl")
    one = Local(name, Path(path).expanduser())
    if not one.path.is_file():
        check_file(one.path)
        raise absent(one.path, f"--tasks {text}: no such file")
    if reason := unreadable(one.path.name):
        raise LinearizeError(f"--tasks {text}: {reason}")
    return one


def read_local(one: Local) -> list[dict[str, Any]]:
    """All rows of the file, in plain fields. Raises LinearizeError (exit 2) with the line that the task cannot ask."""
    if one.path.suffix == ".txt" and FORMS[one.name][0] != ("text",):
        raise LinearizeError(f"{one}: a .txt has no questions. Give a .jsonl with {_forms(one.name)} in each line")
    rows = [plain(one.name, where, fields) for where, fields in rows_of(TextSource(files=(one.path,)))]
    if not rows:
        raise LinearizeError(f"{one}: the file has no rows")
    return rows


def spec(one: Local) -> dict[str, Any] | None:
    """The task as the harness takes it, with its rows; None for needles, which it does not ask. Raises LinearizeError
    as `read_local`."""
    rows = read_local(one)
    if one.name == NEEDLE:
        return None
    from datasets import Dataset

    data = {"test": Dataset.from_list(rows)}
    config = yaml.safe_load((Path(__file__).with_name("task_files") / f"{one.name}.yaml").read_text("utf-8"))
    return {**config, "custom_dataset": lambda **_: data}


def plain(task: str, where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """One row in plain fields: `context` and `continuation`, or `question`, `choices` and `label`, or `text`."""
    form = next((form for form in FORMS[task] if fields.keys() >= {*form}), None)
    if form is None:
        had = ", ".join(fields) or "none"
        raise LinearizeError(f"{where}: {task} needs the fields {_forms(task)}; this line has {had}")

    def read(key: str, empty: bool = False) -> str:
        value = fields[key]
        if not isinstance(value, str) or not (empty or value.strip()):
            raise LinearizeError(f"{where}: {key} of {task} is {str(value)[:40]!r}, and has to be a text")
        return value

    if "continuation" in form:
        return {"context": read("context", empty=True), "continuation": read("continuation")}
    if task == "lambada_openai":
        context, space, last = read("text").rpartition(" ")
        if not space or not last:
            raise LinearizeError(f"{where}: text of {task} has to end with a space and the word that is asked for")
        return {"context": context, "continuation": last}
    if form == ("text",):
        return {"text": read("text")}
    choices: Any  # what the line has, which may be no list of texts
    label = fields["answerKey" if "answerKey" in form else "label"]
    if "goal" in form:
        question, choices = read("goal", empty=True), [read("sol1", empty=True), read("sol2", empty=True)]
    elif "endings" in form:
        parts = [read(key, empty=True) for key in ("activity_label", *(key for key in form if key.startswith("ctx")))]
        shown = " ".join([parts[1], *(part.capitalize() for part in parts[2:])])
        question, choices = _without_marks(f"{parts[0]}: {shown}"), fields["endings"]
    else:
        question, choices = read("question"), fields["choices"]
    if "answerKey" in form:
        named = choices if isinstance(choices, Mapping) else {}
        choices, keys = named.get("text"), named.get("label")
        equal = isinstance(choices, list) and isinstance(keys, list) and len(keys) == len(choices)
        if not isinstance(keys, list) or not equal or label not in keys:
            raise LinearizeError(
                f"{where}: choices of {task} need text and label, two lists of one length, and answerKey is one of the "
                "labels; or choices is a list of texts, and label the number of the right one"
            )
        label = keys.index(label)
    texts = isinstance(choices, list) and all(isinstance(one, str) and one.strip() for one in choices)
    if not texts or len(choices) < 2:  # an empty one would be certain, and so always the model's choice
        raise LinearizeError(f"{where}: the answers of {task} have to be two texts or more, and none may be empty")
    if isinstance(label, bool) or not re.fullmatch("[0-9]{1,3}", str(label)) or int(label) >= len(choices):
        raise LinearizeError(
            f"{where}: label of {task} is {str(label)[:40]!r}, and has to be the number of the right answer, 0 to "
            f"{len(choices) - 1}"
        )
    choices = [_without_marks(one) for one in choices] if "endings" in form else choices
    return {"question": question, "choices": choices, "label": int(label)}


def _forms(task: str) -> str:
    return ", or ".join(" and ".join([", ".join(form[:-1])] * (len(form) > 1) + [form[-1]]) for form in FORMS[task])


def _without_marks(text: str) -> str:
    """HellaSwag's text without what WikiHow left in it, as the harness reads it."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def rolling_errors(found: dict[str, Any]) -> None:
    """Add to the harness's results the standard errors of rolling perplexities, which it has none of: those of a ratio
    of sums over documents."""
    values, rows = found["results"][ROLLING], found["samples"][ROLLING]
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        logs, sizes = zip(*(row[metric] for row in rows), strict=True)
        count, size = len(rows), sum(sizes)
        if count > 1:
            mean = sum(logs) / size
            squares = sum((log - mean * part) ** 2 for log, part in zip(logs, sizes, strict=True))
            error = math.sqrt(count / (count - 1) * squares) / size
            scale = 1 / math.log(2) if metric == "bits_per_byte" else values[f"{metric},none"]
            values[f"{metric}_stderr,none"] = error * scale


def needles(loaded: Loaded, one: Local, request: EvalRequest) -> dict[str, Any]:
    """How often a model finds a needle in the file's text, in the form of the harness's results: a task for each
    length. Raises LinearizeError (exit 2) for a text or a model that is too short."""
    longest, most = max(request.lengths), most_tokens(loaded.model)
    if most is not None and longest > most:
        raise LinearizeError(f"--lengths {longest}: the model takes at most {most} tokens. Give {most}, or less")
    text: list[int] = []
    for piece in pieces(TextSource(files=(one.path,), set_key=""), loaded.tokenizer, sft=False):
        text += piece.ids
        if len(text) >= max(NEEDLE_TEXT, longest):
            break
    if len(text) < longest:
        raise LinearizeError(f"{one}: it has {len(text)} tokens, and --lengths asks for {longest}. Give a longer text")
    found: dict[str, Any] = {key: {} for key in ("results", "configs", "n-samples", "higher_is_better")}
    made = {
        length: rows_of_task(NEEDLE, Writer(loaded.tokenizer, request.seed), length, request.trials, text)
        for length in request.lengths
    }
    with evaluating(loaded.model), progress("needles", request.trials * sum(request.lengths)) as advance:
        for length, rows in made.items():
            right = score(loaded.model, rows, max(1, request.batch_tokens // length), advance)["accuracy"]
            error = math.sqrt(right * (1 - right) / (len(rows) - 1)) if len(rows) > 1 else None
            name = f"{NEEDLE}_{length}"
            found["results"][name] = {"acc,none": right, "acc_stderr,none": error}
            found["n-samples"][name] = {"original": len(rows), "effective": len(rows)}
            found["higher_is_better"][name] = {"acc": True}
    return found
