"""What a teacher predicts of a batch, and how far a student's logits are from it.

The teacher is the student's own model with softmax, another model, or rows on disk that came with the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..data.batches import Batch, forward, is_numbers
from ..data.logits import INDICES, REST, VALUES
from .losses import TopLogits, logit_kl, row_error, top_kl
from .student import Student


def stored(batch: Batch) -> TopLogits | None:
    """The predictions that came with a batch, None where there are none."""
    return TopLogits(batch[VALUES], batch[INDICES], batch[REST]) if VALUES in batch else None


def predictions(student: Student, batch: Batch, autocast: Callable[[], Any]) -> Tensor | TopLogits:
    """What `forward` gives of the teacher, without gradient; or the top logits that were stored."""
    found = stored(batch)
    if found is not None:
        return found
    # A context of its own: autocast caches weights, and what it casts without gradients must not be reused.
    with student.teacher() as model, autocast():
        return forward(model, batch)[..., : student.vocabulary]


def divergence(
    student: Student,
    logits: Tensor,
    theirs: Tensor | TopLogits,
    valid: Tensor,
    *,
    num_tokens: Tensor | float,
    temperature: float = 1.0,
) -> Tensor:
    """`logit_kl` or `top_kl` of the student's logits [B,T,V] and what `predictions` gave; of images as `apart`."""
    if student.vocabulary not in (None, logits.shape[-1]):  # a slice of all would copy the gradient
        logits = logits[..., : student.vocabulary]
    if isinstance(theirs, TopLogits):
        return top_kl(logits, theirs, valid, temperature=temperature, num_tokens=num_tokens)
    return apart(logits, theirs, valid, num_tokens, temperature)


def apart(ours: Tensor, theirs: Tensor, valid: Tensor, count: Tensor | float, temperature: float = 1.0) -> Tensor:
    """How far two predictions of `forward` are apart, the sum over what is valid over `count`.

    Of distributions [B,T,K] it is `logit_kl` with valid [B,T]. Where valid [B,1] counts images and T their parts, it is
    the mean over an image's parts. Of numbers [B,P] it is `row_error`: they are no distribution.
    """
    if is_numbers(ours):
        return row_error(ours, theirs, valid[:, 0], count)
    parts = ours.shape[1] // valid.shape[1]
    return logit_kl(ours, theirs, valid.expand(-1, ours.shape[1]), temperature=temperature, num_tokens=count * parts)
