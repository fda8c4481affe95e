"""What a teacher predicts of a batch, and how far a student's logits are from it.

The teacher is the student's own model with softmax, another model, or rows on disk that came with the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..data.batches import Batch, forward
from ..data.logits import INDICES, REST, VALUES
from .losses import TopLogits, logit_kl, top_kl
from .student import Student


def stored(batch: Batch) -> TopLogits | None:
    """The predictions that came with a batch, None where there are none."""
    return TopLogits(batch[VALUES], batch[INDICES], batch[REST]) if VALUES in batch else None


def predictions(student: Student, batch: Batch, autocast: Callable[[], Any]) -> Tensor | TopLogits:
    """The teacher's logits [B,T,V] of a batch (of a model without a head its last hidden states), without gradient; or
    the top ones that were stored."""
    found = stored(batch)
    if found is not None:
        return found
    # A context of its own: autocast caches weights, and what it casts without gradients must not be reused.
    with student.teacher() as model, autocast():
        return forward(model, batch)[..., : student.vocabulary]


def divergence(student: Student, logits: Tensor, theirs: Tensor | TopLogits, valid: Tensor, **options: Any) -> Tensor:
    """`logit_kl` or `top_kl` of the student's logits [B,T,V] and what `predictions` gave; options as there."""
    if student.vocabulary not in (None, logits.shape[-1]):  # a slice of all would copy the gradient
        logits = logits[..., : student.vocabulary]
    if isinstance(theirs, TopLogits):
        return top_kl(logits, theirs, valid, **options)
    return logit_kl(logits, theirs, valid, **options)
