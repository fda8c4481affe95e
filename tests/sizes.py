"""Sizes that kernels are checked with: those of attention modules in use, and options as recipes ship them."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Query heads, KV heads and channels of an attention module."""

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
# No option: attention there is bidirectional.
BIDIRECTIONAL = {"causal": False}
PUBLISHED = BIDIRECTIONAL | {"faithful": True}
T2R = {"faithful": True, "feature_map": "plain_relu", "output_gate": False}
TURNS = {"slots": 128, "state_heads": "query", "half_life_min": 32}
# Mechanism -> its options in recipes/, each once (a test compares them).
PRESETS: dict[str, tuple[dict[str, Any], ...]] = {
    "gsa": (
        {**TURNS, "clock": 112},
        {**TURNS, "clock": 0, **NEAR},
        {"slots": 128},
        {"slots": 64, "state_heads": "query"},
        {"faithful": True, "slots": 64},
    ),
    "gla": ({**NEAR}, T2R),
    "gdn": ({**NEAR}, {"native": True, "memories": 2, "maps": True}),
    "mamba2": ({"memories": 2, "maps": True},),
    "retnet": ({**NEAR}, T2R),
    "la": (
        {"feature_map": "hedgehog", **NEAR},
        {"feature_map": "hedgehog", "slope": 0.99, "window": 64},
        BIDIRECTIONAL | {"feature_map": "hedgehog", "window": 32, "sink": 1},
        BIDIRECTIONAL | {"feature_map": "hedgehog"},
    ),
    "mhla": ({**NEAR}, {"faithful": True, "blocks": 32, "block_size": 64}, BIDIRECTIONAL, PUBLISHED),
    "saga": (BIDIRECTIONAL, PUBLISHED),
    "sla": (
        {
            "base": "gdn",
            "feature_map": "hedgehog",
            "state_heads": "query",
            "memories": 2,
            "taps": 4,
            "window": 128,
            "sink": 1,
        },
        {"base": "gla", "state_heads": "query", "window": 440, "sink": 1},
        {"base": "gla", "window": 128, "sink": 1},
        {"faithful": True, "base": "gla"},
    ),
    # What `--kept-window` makes of kept layers.
    "window": ({"window": 1024, "sink": 4}, {"window": 928, "sink": 1}),
}
# Defaults, the other number of memories, and other bases of SLA.
OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "gsa": ({},),
    "gla": ({"state_heads": "query", **NEAR}, {"feature_map": "hedgehog"}),
    "gdn": ({"state_heads": "query", **NEAR}, {"native": True}),
    "retnet": ({"state_heads": "query", **NEAR},),
    "la": ({}, BIDIRECTIONAL),
    "mamba2": ({},),
    "mhla": ({},),
    "saga": (BIDIRECTIONAL | {"feature_map": "elu", "norm": "head"}, BIDIRECTIONAL | {"window": 16, "sink": 1}),
    "sla": ({"base": "gla", **NEAR}, {"base": "gdn", "state_heads": "query"}, {"base": "retnet"}),
    "window": ({**NEAR},),
}
OPTIONS = {name: (*options, *OTHERS[name]) for name, options in PRESETS.items()}


def site_and_options(
    name: str, options: dict[str, Any], heads: Heads, hidden: int = 64
) -> tuple[Any, Any, dict[str, Any]]:
    """The Mixer subclass of a mechanism, a site of such heads, and what its `__init__` takes beside it.

    Imports what a converted model with these options would: window.py where there is a window.
    """
    from linearize.plan.mechanisms import published_options
    from linearize_kernels.mixer import AttentionSite, own_mixer

    kind, options = own_mixer(importlib.import_module(f"linearize_kernels.{name}.{name}")), dict(options)
    causal = options.pop("causal", True)
    if options.pop("faithful", False):
        options = published_options(kind, options.get("base")) | options
    for switch, others in kind.implied.items():
        options = (others if options.get(switch) else {}) | options
    if options.get("window"):
        importlib.import_module("linearize_kernels.window.window")
    site = AttentionSite(0, "a", "self", hidden, heads.H, heads.Hkv, heads.D, heads.D, heads.D**-0.5, causal=causal)
    return kind, site, options
