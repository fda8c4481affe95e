"""Sizes that kernels are checked with: those of attention modules in use, and options as recipes ship them."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Query heads, key heads and channels of an attention module."""

    H: int
    Hkv: int
    D: int

    def __str__(self) -> str:
        return f"{self.H}/{self.Hkv}x{self.D}"


# Llama 3.2 1B, Llama 3.1 8B, Qwen 2.5 7B, Llama 3.3 70B, Qwen 2.5 14B, Gemma 2 2B and Gemma 3 1B, older models.
HEADS = tuple(
    Heads(*sizes)
    for sizes in (
        (32, 8, 64),
        (32, 8, 128),
        (28, 4, 128),
        (64, 8, 128),
        (40, 8, 128),
        (8, 4, 256),
        (8, 1, 256),
        (32, 32, 80),
        (32, 32, 96),
        (16, 16, 64),
    )
)


class Gpu(NamedTuple):
    """Capability, bytes of shared memory that a program may have, multiprocessors."""

    capability: int
    shared: int
    processors: int


GPUS = {"H200": Gpu(90, 232448, 132), "A100": Gpu(80, 166912, 108), "4090": Gpu(89, 101376, 128)}

NEAR = {"window": 64, "sink": 1}
# No option: attention there sees both sides.
BOTH_WAYS = {"causal": False}
# Mechanism -> its options, as recipes and defaults have them, with a memory for each key head and each query head.
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "gsa": (
        {},
        {"slots": 128, "state_heads": "query", "clock": 112, "half_life_min": 32},
        {"slots": 128, "state_heads": "query", "clock": 0, "half_life_min": 32, **NEAR},
        {"slots": 128},
        {"faithful": True, "slots": 64},
    ),
    "gla": ({**NEAR}, {"state_heads": "query", **NEAR}, {"feature_map": "hedgehog"}),
    "gdn": ({**NEAR}, {"state_heads": "query", **NEAR}),
    "retnet": ({**NEAR}, {"state_heads": "query", **NEAR}),
    "la": ({"feature_map": "hedgehog", **NEAR}, {}, BOTH_WAYS | {"feature_map": "hedgehog"}, BOTH_WAYS),
    "mhla": ({**NEAR}, {}, BOTH_WAYS),
    "saga": (BOTH_WAYS, BOTH_WAYS | {"feature_map": "elu", "norm": "head"}),
    "sla": (
        {"base": "gla", "feature_map": "hedgehog", "state_heads": "query", **NEAR},
        {"base": "gla", **NEAR},
        {"base": "gdn", "state_heads": "query"},
        {"base": "retnet"},
    ),
}


def site_and_options(
    name: str, options: dict[str, Any], heads: Heads, hidden: int = 64
) -> tuple[Any, Any, dict[str, Any]]:
    """The Mixer subclass of a mechanism, a site of such heads, and what its `__init__` takes beside it.

    Imports what a converted model with these options would: window.py where there is a window.
    """
    from linearize_kernels.mixer import Site, own_mixer, published_options

    kind, options = own_mixer(importlib.import_module(f"linearize_kernels.{name}.{name}")), dict(options)
    causal = options.pop("causal", True)
    if options.pop("faithful", False):
        options = published_options(kind, options.get("base")) | options
    if options.get("window"):
        importlib.import_module("linearize_kernels.window.window")
    site = Site(0, "a", "self", hidden, heads.H, heads.Hkv, heads.D, heads.D, heads.D**-0.5, causal=causal)
    return kind, site, options
