"""`linearize eval --tasks NAME=FILE`: well known tasks on data in a file, without the Hub.

task_files/ holds a task of lm-evaluation-harness for each name, with the prompt and the metrics that the harness has
under that name. Rows may have the fields that they have on the Hub, or plain ones; here they become plain. Needles are
those of `linearize eval`: the file is the text around them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from linearize_kernels.hf.attention_hooks import evaluating

from ..data.documents import TextSource, pieces, rows_of
from ..errors import LinearizeError, absent, check_file, did_you_mean
from ..recipe.data import unreadable
from ..terminal.progress import progress
from ..verify.child.inputs import most_tokens
from .compare import EvalRequest
from .generate import Loaded
from .recall import Writer, score
from .recall import rows_of as rows_of_task

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
