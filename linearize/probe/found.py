"""What the probe found in a model, as values; reading a plan needs them, and no model class of transformers."""

from __future__ import annotations

import dataclasses

from linearize_kernels.mixer import AttentionSite


@dataclasses.dataclass(frozen=True)
class Other:
    """A module that mixes tokens and keeps doing it its own way; `reason` says why it cannot become linear."""

    layer: int | None
    path: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} is {self.kind}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Found:
    """What the probe saw: `sites` can become linear, `others` cannot.

    `fixed_rotation` are the paths of sites whose rotary embedding, as far as can be seen, cannot be taken away,
    `rotated` of those that are given theirs as an argument of its own, `numbered` of those that make it from positions.
    `reads_masks`: attention gets another mask than the model made, so the architecture's own code needs it whole.
    `flat` are the paths of sites whose tokens lie on a grid of rows and columns alone. `cached_tokens` is how
    many tokens the cache holds of sites that forget the others, by path.
    """

    sites: tuple[AttentionSite, ...]
    others: tuple[Other, ...]
    reads_masks: bool = False
    fixed_rotation: tuple[str, ...] = ()
    rotated: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    cached_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
