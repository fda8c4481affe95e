"""`linearize eval` of models that write no text: classes of images, maps of classes or numbers, and hidden tokens of
masked text."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from linearize_kernels.hf.attention_hooks import evaluating

from ..data.batches import (
    check_source,
    check_vocabulary,
    collate,
    forward,
    is_dense,
    is_numbers,
    open_processor,
    open_samples,
    targets,
)
from ..data.images import Images
from ..data.kinds import has_head, kind_of
from ..errors import Exit, LinearizeError
from ..recipe.recipe import Recipe
from ..terminal.progress import progress
from ..train.losses import IGNORED, cross_entropy
from ..train.predictions import apart
from ..train.runtime import to_source
from .evaluate import agreed, sample_count
from .generate import Opened, device_memory

IMAGES = 64  # in one forward pass


@device_memory()
def compare_answers(
    student: Opened, teacher: Opened, recipe: Recipe, batch_tokens: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Accuracies, agreement and KL on the images or the masked text of a recipe's data.eval, up to eval.max_tokens
    images or tokens; what `--json` prints. Hidden tokens, or patches, follow from the recipe's seed.

    Of models that predict classes of patches or pixels there are agreement and KL alone, of numbers the relative error;
    `predicts` is `classes`, `parts` or `numbers`.

    Raises LinearizeError: 2 for data that is not there, 3 for models that do not belong together or answer nothing.
    """
    ours, theirs, kind = student.model, teacher.model, kind_of(student.model)
    if kind_of(theirs) != kind or not (has_head(ours) and has_head(theirs)):
        raise LinearizeError(
            f"{type(ours).__name__} and {type(theirs).__name__} answer no question that both can be asked. Give models "
            "with heads, and the one that the student was converted from",
            Exit.INCOMPATIBLE,
        )
    source = recipe.data.eval
    check_source(source, ours, recipe.folder, "data.eval")
    processor = open_processor(student.folder, kind)
    with tempfile.TemporaryDirectory() as cache:
        limit = recipe.eval.max_tokens
        samples = open_samples(source, recipe.data.pack, ours, processor, Path(cache), start=recipe.folder, sft=False,
                               seed=recipe.seed, max_tokens=limit, say=say)  # fmt: skip
        if kind == "masked":
            check_vocabulary(processor, ours, [samples])
        result = _answers(ours, theirs, samples, limit, IMAGES if kind == "images" else batch_tokens)
        where = (
            samples.found.where
            if isinstance(samples, Images)
            else str(to_source(source, recipe.data.pack.text_key, recipe.folder))
        )
    return {"kind": kind, "data": where, **result}


@torch.no_grad()
def _answers(student: Any, teacher: Any, samples: Any, limit: int, at_once: int) -> dict[str, Any]:
    """The measures, over every image or hidden token; accuracy and perplexity over those with a label."""
    sums, labelled, asked, predicts = torch.zeros(6, dtype=torch.float64), 0, 0, "classes"
    number, size = sample_count(samples, limit), max(1, at_once // samples.seq_len)
    with evaluating(student), evaluating(teacher), progress("eval", number) as advance:
        for start in range(0, number, size):
            batch = collate([samples[i] for i in range(start, min(start + size, number))], student.device)
            wanted = targets(batch)
            known = wanted != IGNORED
            counted = batch["valid"] if "pixel_values" in batch else known
            both = [forward(model, batch) for model in (student, teacher)]
            if both[0].shape != both[1].shape:
                raise LinearizeError(
                    f"the student has {both[0].shape[-1]} answers, the teacher {both[1].shape[-1]}. Give the model "
                    "that the student was converted from",
                    Exit.INCOMPATIBLE,
                )
            distance = apart(both[0], both[1], counted, 1.0)
            asked += int(counted.sum())
            advance(len(wanted))
            if is_dense(both[0], batch):
                predicts = "numbers" if is_numbers(both[0]) else "parts"
                same = agreed(both[0], both[1], counted) if predicts == "parts" else distance.new_zeros(())
                sums[4:] += torch.stack([distance.double(), same.double()]).cpu()
                continue
            first = [logits.argmax(-1) for logits in both]
            hits = [((answer == wanted) & known).sum() for answer in first]
            losses = [cross_entropy(logits, wanted, num_tokens=1.0) for logits in both]
            same = ((first[0] == first[1]) & counted).sum()
            sums += torch.stack([*hits, *losses, distance, same]).double().cpu()
            labelled += int(known.sum())
    accuracy, loss = ((sums[i : i + 2] / max(labelled, 1)).tolist() for i in (0, 2))
    distance, same = (sums[4:] / max(asked, 1)).tolist()
    names = [f"{who}_{what}" for what in ("accuracy", "ppl") for who in ("student", "teacher")]
    found = [*accuracy, *(math.exp(min(x, 700.0)) for x in loss)] if labelled else [None] * 4
    return {
        "predicts": predicts,
        "asked": asked,
        "labelled": labelled,
        **dict(zip(names, found, strict=True)),
        "top1_agreement": None if predicts == "numbers" else same,
        "kl": None if predicts == "numbers" else distance,
        "relative_error": distance if predicts == "numbers" else None,
    }
