"""Features of softmax attention that linear layers lack: the plan names them, and some need the user's consent.

The line between the two: can training the new layer on the teacher's outputs make up for it?

Named only, where training can. A sliding window, a mask of the module's own or a choice of keys (`indices`) hides
tokens from the teacher; the layer sees more and learns to forget. A soft cap bends scores that the layer never
computes; it is one more part of the function to learn, as the exponential is. Sinks let a head give weight to no token,
so its output shrinks; a state whose contents are learned can be small.

Refused, where it cannot. A bias on the scores (ALiBi, a relative position bias, a learned one) brings the layer what
neither hidden states nor q, k and v hold: often all that it knows of distance, so a mechanism without decay would be
blind to order. What nobody has judged yet (any other argument of the attention function) may be of that kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from linearize_kernels.mixer import AttentionSite

from ..errors import IncompatibleError, LinearizeError, did_you_mean
from ..terminal.output import layers_named, ranges


@dataclasses.dataclass(frozen=True)
class DroppedFeature:
    """One thing that a linear layer drops. `refused`: not without consent."""

    name: str
    what: str
    refused: bool = False


# By the keyword under which the softmax function receives it, or the name that the probe gave it.
NOTED = {
    "sliding_window": "the source attends to a sliding window, the linear layer to all that it may see",
    "own_mask": "the source hides tokens by a mask of its own, the linear layer sees all that it may",
    "indices": "the source attends to the keys that it picks, the linear layer to all that it may see",
    "softcap": "the source caps attention scores, the linear layer does not",
    "sinks": "the source has attention sinks, the linear layer does not",
    "relu_features": "the source is linear attention of relu(q) and relu(k), the linear layer has other features",
}
REFUSED = {
    "alibi": "the source knows distance by a bias on its scores, which the linear layer lacks",
    "position_bias": "the source adds a position bias to its scores, the linear layer does not",
    "score_bias": "the source adds a bias to its scores, the linear layer does not",
}
KNOWN = {name: DroppedFeature(name, what, name in REFUSED) for name, what in (NOTED | REFUSED).items()}
KNOWN["s_aux"] = KNOWN["sinks"]


def dropped_features(sites: Iterable[AttentionSite]) -> dict[DroppedFeature, list[int]]:
    """What making these sites linear drops, and at which layers."""
    found: dict[DroppedFeature, list[int]] = {}
    for site in sites:
        for extra in site.extras:
            unknown = DroppedFeature(extra, "the source's softmax is given it, the linear layer would ignore it", True)
            found.setdefault(KNOWN.get(extra, unknown), []).append(site.layer)
    return found


def check_dropped_features(sites: Iterable[AttentionSite], allowed: Iterable[str]) -> None:
    """Raise LinearizeError: exit 3 for a dropped feature that needs consent and has none, 2 for consent to one
    that is not dropped."""
    found = dropped_features(sites)
    names = [feature.name for feature in found]
    for name in allowed:
        if name not in names:
            lost = f"drops {', '.join(names)}" if names else "drops nothing of its softmax"
            raise LinearizeError(f"--allow-drop {name}: this conversion {lost}.{did_you_mean(name, names)}")
    refused = {feature: layers for feature, layers in found.items() if feature.refused and feature.name not in allowed}
    if refused:
        what = "; ".join(
            f"{feature.name} at {layers_named(layers)}: {feature.what}" for feature, layers in refused.items()
        )
        flags = " ".join(f"--allow-drop {feature.name}" for feature in refused)
        layers = ranges(sorted({layer for its in refused.values() for layer in its}))
        raise IncompatibleError(
            f"the result would lack {what}. Pass {flags} to convert all the same, or keep these layers: "
            f"--keep-softmax {layers}"
        )
