"""Cards by name with the figures of their data sheets, and what one costs an hour. Imports no torch."""

from __future__ import annotations

import re

from ..errors import LinearizeError, did_you_mean

# Name -> GiB that torch sees, TFLOP/s of dense bf16 products with sums in fp32, GB/s, watts: the makers' data sheets,
# but for the memory of H200, which is measured.
CARDS: dict[str, tuple[float, float, float, float]] = {
    "a100-40g": (39.4, 312, 1555, 400),
    "a100-80g": (79.2, 312, 2039, 400),
    "h100": (79.2, 989, 3350, 700),
    "h200": (139.8, 989, 4800, 700),
    "b200": (178.0, 2250, 8000, 1000),
    "l40s": (44.4, 362, 864, 350),
    "l4": (22.0, 121, 300, 72),
    "a10g": (22.1, 70, 600, 300),
    "a6000": (47.5, 155, 768, 300),
    "3090": (23.6, 71, 936, 350),
    "4090": (23.6, 165, 1008, 450),
    "5090": (31.4, 210, 1792, 575),
}


def figures(name: str) -> tuple[float, float, float, float]:
    """Those of the card of that name. Raises LinearizeError (exit 2) with the nearest one."""
    if name.lower() not in CARDS:
        raise LinearizeError(f"--gpu {name}: not known.{did_you_mean(name, CARDS)} Known: {', '.join(CARDS)}")
    return CARDS[name.lower()]


def per_hour(price: str | None) -> float | None:
    """`2.5/h` as a number. Raises LinearizeError (exit 2)."""
    if price is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/h)?", price)
    if found is None:
        raise LinearizeError(f"--price {price}: give what one device costs in an hour, for example 2.5/h")
    return float(found[1])
