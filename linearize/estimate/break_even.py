"""From how many tokens a linear encoder is faster than SDPA, as measured, and what `convert` and `estimate` say of it.

A bidirectional encoder has no cache to save, so it is converted for speed on long inputs, and short ones become slower.
`python -m benchmarks.encoder_lengths` measures the ratios, of a block of DeiT-S: on a CPU of one row, on a GPU of
131,072 tokens at once, both sides compiled and in CUDA graphs.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from ..plan.plan import Plan

# Where, and by mechanism: tokens, and SDPA's time over the mechanism's.
PAYS: dict[str, dict[str, tuple[tuple[int, float], ...]]] = {
    "a CPU": {
        "la": ((196, 0.74), (1024, 1.37), (4096, 2.05), (16384, 6.40)),
        "mhla": ((196, 0.51), (1024, 1.32), (4096, 2.34), (16384, 5.75)),
        "saga": ((196, 0.57), (1024, 1.36), (4096, 1.93), (16384, 5.46)),
    },
    "an H200": {
        "la": ((196, 0.83), (1024, 1.08), (4096, 1.82), (16384, 4.96)),
        "mhla": ((196, 0.37), (1024, 0.89), (4096, 1.73), (16384, 4.69)),
        "saga": ((196, 0.63), (1024, 0.78), (4096, 1.29), (16384, 3.62)),
    },
}


def break_even_tokens(mechanism: str, where: str) -> int:
    """Tokens from which the mechanism is faster there, in hundreds: between two measurements on a line through their
    logarithms."""
    points = [(math.log(tokens), math.log(ratio)) for tokens, ratio in PAYS[where][mechanism]]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 < 0.0 <= y1:
            return 100 * round(math.exp(x0 - y0 * (x1 - x0) / (y1 - y0)) / 100)
    raise ValueError(f"{mechanism} does not break even on {where}")


def tokens_read(plan: Plan, config: Any) -> int | None:
    """The most tokens that the plan's linear layers read at once by the model's config: an image's patches and what
    stands before and after them, or the positions of text. None where it does not say, and for windows."""
    site = plan.linear[0].site
    if site.grid == "patches":
        parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
        for part in parts:
            sides = [_side(getattr(part, name, None)) for name in ("image_size", "patch_size")]
            if None not in sides:
                (h, w), (p, q) = sides
                return (h // p) * (w // q) + site.prefix + site.suffix
        return None
    most = getattr(config, "max_position_embeddings", None)
    return most if site.grid == "line" and isinstance(most, int) else None


def _side(size: Any) -> Any:
    """A size of an image or a patch as height and width; None for what is none."""
    if isinstance(size, int):
        return size, size
    return tuple(size) if isinstance(size, list | tuple) and len(size) == 2 else None


def measured_mechanism(plan: Plan) -> str | None:
    """The mechanism of a bidirectional plan, where it was measured beside SDPA."""
    step = plan.linear[0]
    return None if step.site.causal or step.mechanism not in PAYS["a CPU"] else step.mechanism


def speeds(plan: Plan) -> list[str]:
    """How fast a bidirectional plan's mechanism was beside SDPA, a line for each device; none for other plans."""
    mechanism = measured_mechanism(plan)
    return [
        f"{mechanism} compared with softmax on {where}: "
        + ", ".join(f"{ratio:g}x as fast with {tokens:,} tokens" for tokens, ratio in found[mechanism])
        for where, found in PAYS.items()
        if mechanism is not None
    ]


def slower(plan: Plan, config: Any) -> str:
    """A note on a bidirectional plan whose tokens softmax reads faster, on a CPU or on a GPU; empty for others."""
    mechanism = measured_mechanism(plan)
    if mechanism is None:
        return ""
    tokens, from_here = tokens_read(plan, config), {where: break_even_tokens(mechanism, where) for where in PAYS}
    short = tokens is not None and [where for where, most in from_here.items() if tokens < most]
    if not short:
        return ""
    figures = " and ".join(f"{most:,} on {where}" for where, most in from_here.items())
    return (
        f"note: this model reads {tokens:,} tokens at most, and softmax reads them faster on {' and '.join(short)}: "
        f"{mechanism} is faster from about {figures}. Convert it for longer inputs than these, or keep softmax"
    )
