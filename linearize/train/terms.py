"""The terms that a stage's loss adds up. A new term is one function here, with `@term` and its weight.

All else reads `TERMS`: the recipe's schema (`loss.NAME` of a `feature_cosine` stage for a term that compares features,
of `logit_kl` for the others), the loss of all tokens at once (stages.py) and of some at a time (chunked_head.py),
metrics.jsonl, which has a loss of several terms apart, and the curves of the report. `attention_transfer` is no sum of
terms: each layer's error is backpropagated as it arises.

Recipes are read without torch, so this file imports nothing that needs it. A term is computed from a `Compared`
(predictions.py): by its methods, by those of its tensors, or by a formula of losses.py that the term imports itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from .predictions import Compared


class Term(NamedTuple):
    """One term of a loss: it is averaged over a step, and multiplied by its weight."""

    value: Callable[[Compared], Tensor]
    """A scalar with a gradient."""
    weight: float
    """Its factor unless the recipe gives another. `feature_cosine` has the terms of features, `logit_kl` the others."""
    teacher: Literal["logits", "features"] | None
    """What it compares with; None for what is learned from the data."""
    about: str
    """Describes its factor to whoever writes a recipe, with its unit."""


TERMS: dict[str, Term] = {}


def term(
    weight: float, teacher: Literal["logits", "features"] | None, about: str
) -> Callable[[Callable[[Compared], Tensor]], Callable[[Compared], Tensor]]:
    """Register the function below under its own name; the arguments are those of `Term`."""

    def register(value: Callable[[Compared], Tensor]) -> Callable[[Compared], Tensor]:
        TERMS[value.__name__] = Term(value, weight, teacher, about)
        return value

    return register


def total(at: Compared) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of `at.stage`, and where it has several terms, each by name, without its weight and detached."""
    weights = at.stage.weights
    values = {name: TERMS[name].value(at) for name in weights}
    first, *rest = (weights[name] * value for name, value in values.items())
    return sum(rest, first), {name: value.detach() for name, value in values.items()} if rest else {}


@term(weight=1.0, teacher="logits", about="Factor of the divergence, which is in nats a token.")
def kl(at: Compared) -> Tensor:
    return at.divergence()


@term(weight=0.0, teacher=None, about="Factor of the cross entropy with the text itself, in nats a token.")
def ce(at: Compared) -> Tensor:
    return at.label_loss()


@term(weight=1.0, teacher="features", about="Factor of one minus the cosine of each last hidden state.")
def cosine(at: Compared) -> Tensor:
    return at.cosine_distance()


@term(weight=0.0, teacher="features", about="Factor of one minus the cosine of each row's vector; see pooling.")
def embedding(at: Compared) -> Tensor:
    from .losses import embedding_distance

    return embedding_distance(*at.vectors, at.counts[2])


@term(
    weight=0.0,
    teacher="features",
    about="Factor of the squared difference between cosines of two rows' vectors, the mean over the pairs of a pass.",
)
def similarity(at: Compared) -> Tensor:
    from .losses import similarity_error

    return similarity_error(*at.vectors, at.counts[2])
