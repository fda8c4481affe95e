"""`linearize inspect`: a model's attention modules, and the mechanisms that fit them."""

from __future__ import annotations

import dataclasses
from typing import Any

from linearize_kernels.mixer import AttentionSite

from ..checkpoint.manifest import plan_in
from ..checkpoint.source import open_source
from ..convert import load_config, load_model_class
from ..errors import LinearizeError
from ..plan.mechanisms import load_mechanism, mechanism_names
from ..plan.plan import Plan, make_steps
from ..terminal.progress import progress
from .found import Found
from .probe import probe

# What reading the config and probing take beside a mechanism, which takes 1: 0.05 s, 0.6 s and 0.1 s for Llama 3.1 8B,
# on two CPU cores.
OPENED, PROBED = 0.5, 6.0


@dataclasses.dataclass(frozen=True)
class Fit:
    """Layers that a mechanism fits with its default options, and for the others the obstacle: (layer, why)."""

    mechanism: str
    title: str
    layers: tuple[int, ...]
    obstacles: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A model's config, looked at."""

    source: str
    architecture: str
    model_type: str
    found: Found
    fits: tuple[Fit, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "source": self.source,
            "architecture": self.architecture,
            "model_type": self.model_type,
            **dataclasses.asdict(self.found),
            "mechanisms": [dataclasses.asdict(fit) for fit in self.fits],
        }


@dataclasses.dataclass(frozen=True)
class Converted:
    """A model that linearize converted: the plan that its folder holds."""

    source: str
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"source": self.source, "converted": self.plan.to_json()}


def inspect_model(
    model: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> Inspection | Converted:
    """Look at a model's config, or at the plan of a converted one; weights are not read, nor downloaded.

    Raises LinearizeError: 3 when no softmax attention is found or the config is unusable, 5 for the Hub.
    """
    names, fits = mechanism_names(), list[Fit]()
    with progress("inspect", OPENED + PROBED + len(names)) as advance:
        source = open_source(model, revision, weights=False)
        if source.converted:
            return Converted(source.name, plan_in(source.folder))
        config = load_config(source, trust_remote_code)
        head = load_model_class(source, config, trust_remote_code)
        advance(OPENED)
        found = probe(config, head)
        advance(PROBED)
        for name in names:
            fits.append(_fit(name, found.sites))
            advance(1)
    return Inspection(source.name, head.__name__, config.model_type, found, tuple(fits))


def _fit(mechanism: str, sites: tuple[AttentionSite, ...]) -> Fit:
    """Whether a step of a plan can be made for each site: the same question that `convert` asks."""
    layers, obstacles = [], []
    for site in sites:
        try:
            make_steps([site], mechanism, {})
            layers.append(site.layer)
        except LinearizeError as error:
            obstacles.append((site.layer, error.message))
    return Fit(mechanism, load_mechanism(mechanism).title, tuple(layers), tuple(obstacles))
