"""What a teacher predicts of a batch, and how far a student's logits are from it, or from the labels.

The teacher is the student's own model with softmax, or another model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..data.augment import OTHERS, SHARE
from ..data.batches import Batch, forward, is_numbers, real_tokens, targets
from ..recipe.recipe import Stage
from .losses import IGNORED, cosine_distance, cross_entropy, logit_kl, pooled, row_error
from .student import Student


def predictions(student: Student, batch: Batch, autocast: Callable[[], Any]) -> Tensor:
    """What `forward` gives of the teacher, without gradient."""
    # A context of its own: autocast caches weights, and what it casts without gradients must not be reused.
    with student.teacher() as model, autocast():
        return forward(model, batch)[..., : student.vocabulary]


def divergence(
    student: Student,
    logits: Tensor,
    theirs: Tensor,
    valid: Tensor,
    *,
    num_tokens: Tensor | float,
    temperature: float = 1.0,
) -> Tensor:
    """`logit_kl` of the student's logits [B,T,V] and what `predictions` gave; of images as `apart`."""
    if student.vocabulary not in (None, logits.shape[-1]):  # a slice of all would copy the gradient
        logits = logits[..., : student.vocabulary]
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


def label_loss(found: Tensor, wanted: Tensor, batch: Batch, count: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross entropy with the targets `wanted` [B,T] over `count` of them; of the mixed images of a batch with both
    labels, in their shares."""
    own = smoothed_loss(found, wanted, count, smoothing)
    if OTHERS not in batch:
        return own
    return own.lerp(smoothed_loss(found, batch[OTHERS], count, smoothing), 1 - batch[SHARE].to(own.dtype))


def smoothed_loss(logits: Tensor, wanted: Tensor, count: Tensor, smoothing: float) -> Tensor:
    """Cross entropy where `smoothing` of each target goes to all classes alike (arXiv 1512.00567, section 7): what it
    adds is that share of the target's logit less the mean of all."""
    loss = cross_entropy(logits, wanted, num_tokens=count)
    if smoothing == 0.0:
        return loss
    asked = wanted != IGNORED
    own = logits.gather(-1, wanted.masked_fill(~asked, 0)[..., None])[..., 0].to(loss.dtype)
    return loss + smoothing * (own - logits.mean(-1, dtype=loss.dtype)).masked_fill(~asked, 0.0).sum() / count


@dataclass(frozen=True)
class Compared:
    """What the terms of a loss (terms.py) are computed from, for one micro batch. Letters: B rows, T tokens of a row, t
    of them at a time, V vocabulary."""

    stage: Stage
    student: Student
    batch: Batch
    """Labels and `valid` are [B,T], whatever part is compared."""
    counts: Tensor
    """Valid tokens, targets and rows [3] of the whole optimizer step, over micro batches and processes: every term is a
    sum divided by one of them, so that micro batches add up."""
    ours: Tensor
    """The student's logits [B,t,V]; of a model without a head its last hidden states."""
    theirs: Tensor | None
    """The teacher's; None where no term asks for them."""
    part: slice
    """Which t of the T tokens these are."""

    @property
    def targets(self) -> Tensor:
        """The right answer at each place [B,t], -100 where there is none."""
        return targets(self.batch)[:, self.part]

    @property
    def learned(self) -> tuple[Tensor, Tensor]:
        """The places [B,t] where the student learns its teacher's predictions, and how many the whole step has."""
        if self.stage.completions_alone:
            return self.targets != IGNORED, self.counts[1]
        return self.batch["valid"][:, self.part], self.counts[0]

    @property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """One vector of each row [B,D], the student's and the teacher's, by the stage's pooling."""
        assert isinstance(self.theirs, Tensor)
        real, pooling = real_tokens(self.batch), self.stage.pooling
        return pooled(self.ours, real, pooling), pooled(self.theirs, real, pooling)

    def divergence(self) -> Tensor:
        """How far the student's predictions are from the teacher's, at the stage's temperature."""
        assert self.theirs is not None
        places, count = self.learned
        temperature = self.stage.temperature
        return divergence(self.student, self.ours, self.theirs, places, num_tokens=count, temperature=temperature)

    def label_loss(self) -> Tensor:
        """Cross entropy with the targets, as far as the stage asks smoothed."""
        return label_loss(self.ours, self.targets, self.batch, self.counts[1], self.stage.label_smoothing)

    def cosine_distance(self) -> Tensor:
        """One minus the cosine of the hidden states and the teacher's."""
        assert isinstance(self.theirs, Tensor)
        share = self.batch["valid"].sum() / self.counts[0]
        return cosine_distance(self.ours, self.theirs, real_tokens(self.batch), share)
