"""`linearize eval`: measure a student beside its teacher, on the same text."""

from __future__ import annotations

import contextlib
import json
import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linearize_kernels.hf.attention_hooks import evaluating

from ..data.batches import check_there, collate, targets
from ..data.documents import TextSource, check_enough
from ..data.packing import Blocks, build_blocks, fingerprint
from ..errors import Exit, LinearizeError
from ..recipe.data import DemoSource, holds_images
from ..recipe.models import Eval
from ..recipe.recipe import Recipe, load_recipe
from ..terminal.progress import Advance, progress, silent
from ..train.chunked_head import logits_of, stretches
from ..train.losses import IGNORED
from ..train.runtime import to_source
from ..verify.child.behaviours import held_bytes
from ..verify.child.inputs import cache_of, most_tokens
from .evaluate import check_finite, sample_count
from .free_generation import beginnings, compare_answers, free_generation, questions, steps_of
from .generate import Loaded, device_memory
from .positions import TRAINED_LENGTH, figures, longest_text, positions, reader, warning_of
from .recall import Writer, rows_of, score
from .repeats import Repeats, tokens_back

TASKS = ("recall", "needle")
USUAL = "demo"  # the preset whose text is read where no recipe is given
SET_EVAL = "set it, for example data.eval='{files: [heldout.jsonl]}'"


@dataclass(frozen=True)
class EvalRequest:
    """What to measure: `lengths` in tokens, `trials` rows of each task and length, `batch_tokens` at a time; `generate`
    texts that each model writes by itself."""

    lengths: tuple[int, ...]
    trials: int
    seed: int
    batch_tokens: int
    generate: int = 0


def parse_lengths(text: str, option: str = "--lengths") -> tuple[int, ...]:
    """`256,1024` -> (256, 1024). Raises LinearizeError (exit 2) for anything but numbers above 0."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,7}", part) for part in parts):
        raise LinearizeError(f"{option} {text}: give whole numbers with commas between, such as 256,1024")
    return tuple(map(int, parts))


def check_pair(student: Loaded, teacher: Loaded) -> None:
    """Raise LinearizeError (exit 3) unless both cut text into the same tokens."""
    if fingerprint(student.tokenizer, chat=False) != fingerprint(teacher.tokenizer, chat=False):
        raise LinearizeError(
            "student and teacher have different tokenizers: their predictions cannot be compared. Give the model "
            "that the student was converted from",
            Exit.INCOMPATIBLE,
        )
    ours, theirs = (model.model.get_input_embeddings().weight.shape[0] for model in (student, teacher))
    if ours != theirs:
        raise LinearizeError(
            f"the student's vocabulary has {ours} tokens, the teacher's {theirs}. Give the model that the student was "
            "converted from",
            Exit.INCOMPATIBLE,
        )


def check_lengths(models: Sequence[Any], recipe: Recipe, longest: int = 0) -> None:
    """Raise LinearizeError (exit 2) for texts of more tokens than one of the models takes."""
    for length, option in ((recipe.data.pack.seq_len, "data.pack.seq_len="), (longest, "--lengths ")):
        for model in models:
            most = most_tokens(model)
            if most is not None and length > most:
                message = f"{type(model).__name__} takes at most {most} tokens"
                raise LinearizeError(f"{option}{length}: {message}. Give {option}{most}, or less")


def text_recipe(recipe: str | Path, teacher: str | Path, overrides: Sequence[str]) -> Recipe:
    """The recipe that names the text of an evaluation: without one (empty), the demo's.

    With a text of one's own it then reads as much of that as `finetune` does by default: what the demo's recipe says is
    for the demo's text, and short so that the demo takes minutes.
    """
    named = f"model.base={json.dumps(str(teacher))}"
    text = load_recipe(recipe or USUAL, [named, *overrides])
    if recipe or isinstance(text.data.eval, DemoSource):
        return text
    return load_recipe(USUAL, [named, f"eval.max_tokens={Eval().max_tokens}", *overrides])


@device_memory()
def compare(student: Loaded, teacher: Loaded, recipe: Recipe, request: EvalRequest) -> dict[str, Any]:
    """All measures, on the evaluation text of a recipe; what `--json` prints.

    Raises LinearizeError: 2 for text or lengths that do not suffice, 3 for models that do not belong together.
    """
    if holds_images(recipe.data.eval):
        raise LinearizeError(f"the recipe's data.eval holds images, and these models are compared on text; {SET_EVAL}")
    check_pair(student, teacher)
    check_lengths((student.model, teacher.model), recipe, max(request.lengths))
    with tempfile.TemporaryDirectory() as cache:
        blocks = read_blocks(recipe, student.tokenizer, Path(cache))
        result = measure(student.model, teacher.model, student.tokenizer, blocks, recipe.eval.max_tokens, request)
    check_finite("the teacher", result["teacher_ppl"])
    source = to_source(recipe.data.eval, recipe.data.pack.text_key, recipe.folder)
    result |= {"text": str(source), "seq_len": recipe.data.pack.seq_len}
    result |= {"positions": far(student, teacher, source, recipe, request)}
    return {**result, "generated": compare_generations(student, teacher, source, request) if request.generate else None}


def compare_generations(student: Loaded, teacher: Loaded, source: TextSource, request: EvalRequest) -> dict[str, Any]:
    """What student and teacher generate after the beginnings of documents, and in lists of pairs at the first of the
    lengths; and of a text of conversations how both answer."""
    tokenizer, length = student.tokenizer, request.lengths[0]
    prompts = beginnings(source, tokenizer, request.generate)
    rows = rows_of("recall", Writer(tokenizer, request.seed), length, request.generate, [])
    found: dict[str, Any] = {"texts": len(prompts), "rows": len(rows), "length": length}
    with progress("texts of their own", 2 * steps_of(prompts, rows)) as advance:
        for who, loaded in (("student", student), ("teacher", teacher)):
            with evaluating(loaded.model):
                found[who] = free_generation(loaded.model, prompts, rows, advance)
        most = [most_tokens(loaded.model) or math.inf for loaded in (student, teacher)]
        asked = questions(source, tokenizer, request.generate, min(most))
        with evaluating(student.model), evaluating(teacher.model):
            found["answers"] = compare_answers(student.model, teacher.model, tokenizer, asked) if asked else None
    return found


def far(student: Loaded, teacher: Loaded, source: TextSource, recipe: Recipe, request: EvalRequest) -> dict[str, Any]:
    """Perplexity and KL by position, from the length that the student was trained at to a multiple of it; `recorded`
    says whether its folder names that length, which is else the recipe's."""
    recorded = getattr(student.model.config, TRAINED_LENGTH, None)
    found = positions(
        reader(student.model),
        reader(teacher.model),
        source,
        student.tokenizer,
        student.model.device,
        trained=recorded or recipe.data.pack.seq_len,
        longest=longest_text(student.model, teacher.model),
        tokens=recipe.eval.max_tokens,
        batch_tokens=request.batch_tokens,
    )
    found["recorded"] = recorded is not None
    return found | {"warning": warning_of(found)}


def check_eval(recipe: Recipe) -> None:
    """Before models are loaded: raise LinearizeError (exit 2) for a recipe without data.eval, or whose files are not
    there."""
    if recipe.data.eval is None:
        raise LinearizeError(f"the recipe has no data.eval; {SET_EVAL}")
    check_there(recipe.data.eval, recipe.folder)
    if not holds_images(recipe.data.eval):
        check_enough(to_source(recipe.data.eval, recipe.data.pack.text_key, recipe.folder))


def read_blocks(recipe: Recipe, tokenizer: Any, cache: Path) -> Blocks:
    """The evaluation text of a recipe, packed."""
    data = recipe.data
    source = to_source(data.eval, data.pack.text_key, recipe.folder)
    check_enough(source, tokenizer)
    return build_blocks(source, tokenizer, data.pack.seq_len, cache, sft=False, max_tokens=recipe.eval.max_tokens)


def measure(
    student: Any, teacher: Any, tokenizer: Any, blocks: Blocks, max_tokens: int, request: EvalRequest
) -> dict[str, Any]:
    """`compare` for models at hand, which are on one device."""
    number = sample_count(blocks, max_tokens)
    pair = {"student": student, "teacher": teacher}
    asked = len(TASKS) * request.trials * sum(request.lengths)
    total = 2 * (number * blocks.seq_len + asked)
    with evaluating(student), evaluating(teacher), progress("eval", total) as advance:
        text = [token for i in range(number) for token in blocks[i]["input_ids"].tolist()]
        # Needles first: a text that is too short for them is refused before anything is measured.
        made = {
            (task, length): rows_of(task, Writer(tokenizer, request.seed), length, request.trials, text)
            for task in reversed(TASKS)
            for length in request.lengths
        }
        result: dict[str, Any] = predictions(student, teacher, blocks, max_tokens, request.batch_tokens, advance)
        for task in TASKS:
            result[task] = []
            for length in request.lengths:
                rows = made[task, length]
                size = max(1, request.batch_tokens // length)
                scores = {who: score(model, rows, size, advance) for who, model in pair.items()}
                result[task].append({"length": length, "entries": rows[0].entries, **scores})
        result["dtypes"] = {who: str(model.dtype).removeprefix("torch.") for who, model in pair.items()}
        # What a model keeps in float32 in every dtype cannot be told from the rest of a float32 model, so the narrower
        # model is counted in the wider dtype, and never the other way round.
        wider = max(student.dtype, teacher.dtype, key=lambda dtype: dtype.itemsize)
        result["state_dtype"] = str(wider).removeprefix("torch.")
        result["state"] = [
            {"length": length, **{who: state_bytes(model, length, wider.itemsize) for who, model in pair.items()}}
            for length in request.lengths
        ]
    return result


@torch.no_grad()
def predictions(
    student: Any, teacher: Any, blocks: Blocks, max_tokens: int, batch_tokens: int, advance: Advance = silent
) -> dict[str, Any]:
    """Perplexities, KL(teacher, student) in nats a token, and how often both find the same token the likeliest; of
    targets apart by how far back they stood, too.

    Over the next-token targets of the first `max_tokens` tokens; documents in a block are kept apart. `advance` is told
    of tokens that are done. `read` counts what `finetune` counts, `tokens` what was predicted: all but the first token
    of each piece of a document in a block.
    """
    found, same = Repeats(), 0
    number, size = sample_count(blocks, max_tokens), max(1, batch_tokens // blocks.seq_len)
    for start in range(0, number, size):
        batch = collate([blocks[i] for i in range(start, min(start + size, number))], student.device)
        whole = targets(batch)
        back = tokens_back(batch["input_ids"], whole, batch.get("position_ids"))
        parts = stretches(student, batch)
        readers = [logits_of(model, batch, contextlib.nullcontext, parts) for model in (student, teacher)]
        for part in parts:
            wanted = whole[:, part]
            ours, theirs = (read(part) for read in readers)
            found.add(ours, theirs, wanted, back[:, part])
            same += int(((ours.argmax(-1) == theirs.argmax(-1)) & (wanted != IGNORED)).sum())
        advance(2 * whole.numel())
    sums, count = found.totals()
    result = {"read": number * blocks.seq_len, "tokens": count, **figures(sums, count)}
    return result | {"top1_agreement": same / max(count, 1), "repeats": found.rows()}


@torch.no_grad()
def state_bytes(model: Any, tokens: int, item: int = 1) -> int:
    """Bytes that a cache holds for one sequence of so many tokens, in layers of every kind; a floating number has at
    least `item`."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    layers = cache_of(model(input_ids=ids, use_cache=True)).layers
    return sum(held_bytes(vars(layer), item) for layer in layers)
