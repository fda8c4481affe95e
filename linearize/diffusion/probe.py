"""Probe a diffusion transformer: run it once on the meta device and see which attention can become linear.

A module that attends to its own tokens is a site; one that reads a text or an image stays. No weights are read.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import torch
from torch import nn

from linearize_kernels.hf.diffusion import Processor
from linearize_kernels.mixer import AttentionSite

from ..checkpoint.source import Source
from ..errors import IncompatibleError
from ..plan.plan import Plan, Step
from ..probe.found import Found, Other
from ..probe.trace import quiet
from ..verify.child.latents import make_latents
from .code import READERS, readers


@dataclasses.dataclass(frozen=True)
class Part:
    """One transformer of a pipeline: its name there, its checkpoint, its class, and its model on the meta device."""

    name: str
    source: Source
    model: Any

    @property
    def native(self) -> str:
        """The name of its class."""
        return type(self.model).__name__

    @property
    def prefix(self) -> str:
        """What the paths of its modules begin with in a plan."""
        return f"{self.name}/" if self.name else ""

    def own(self, plan: Plan) -> Plan:
        """As much of a plan as belongs to this part, with the paths of the mixers' parents in its model."""
        return dataclasses.replace(plan, architecture=self.native, steps=own_steps(plan, self.prefix))


def own_steps(plan: Plan, prefix: str) -> tuple[Step, ...]:
    """Steps of the part whose paths have this prefix, with the paths of the mixers' parents in its own model."""
    steps = [step for step in plan.steps if step.site.path.startswith(prefix)]
    paths = [step.site.path.removeprefix(prefix) + ".processor" for step in steps]
    sites = [dataclasses.replace(s.site, path=path) for s, path in zip(steps, paths, strict=True)]
    return tuple(dataclasses.replace(step, site=site) for step, site in zip(steps, sites, strict=True))


class Recorder:
    """Stands where a mixer will be, and notes its call."""

    drop_rope = geometric = False

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, _: Any) -> Any:
        self.seen.append((q, k, v, x))
        return (v.new_zeros(*q.shape[:3], v.shape[-1]),)


def build(native: Any, source: Source) -> Any:
    """The native model without memory behind its weights. Raises LinearizeError (exit 3) for what it does not take."""
    try:
        with quiet(), torch.device("meta"):
            return native.from_config(source.config).eval()
    except Exception as error:  # whatever a class raises for a config
        raise IncompatibleError(
            f"{source.folder / 'config.json'} cannot be used: {type(error).__name__}: {error}"
        ) from error


def probe(part: Part) -> Found:
    """The sites of a part, in the order in which they run, and the attention that stays.

    Raises LinearizeError (exit 3) when the model does not run, or its tokens are not the patches that it makes first.
    """
    model = part.model
    attention = {path: module for path, module in model.named_modules() if hasattr(module, "set_processor")}
    natives = {path: module.processor for path, module in attention.items()}
    recorders: dict[str, Recorder] = {}
    patches: list[tuple[str, tuple[int, ...]]] = []
    hooks = [
        module.register_forward_hook(lambda m, a, out, path=path: patches.append((path, tuple(out.shape[2:]))))
        for path, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Conv3d)
    ]

    def before(module: Any, args: Any, kwargs: Any) -> None:
        path = next(path for path, other in attention.items() if other is module)
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        if given.get("encoder_hidden_states") is None:
            recorders[path] = Recorder()
            kind = type(natives[path]).__name__
            module.set_processor(Processor(natives[path], recorders[path], readers({kind}).get(kind)))

    hooks += [module.register_forward_pre_hook(before, with_kwargs=True) for module in attention.values()]
    try:
        with quiet(), torch.no_grad():
            model(**{name: value.to("meta") for name, value in make_latents(model).items()})
    except Exception as error:  # whatever a class raises
        reason = f"{part.native} cannot be probed on the meta device: {type(error).__name__}: {error}"
        raise IncompatibleError(reason) from error
    finally:
        for hook in hooks:
            hook.remove()
        for path in recorders:
            attention[path].set_processor(natives[path])
    sites = [_site(n, path, natives[path], one, *patches[0]) for n, (path, one) in enumerate(recorders.items())]
    kept = "reads what it is given beside the latents, and stays softmax"
    others = [Other(None, p, type(natives[p]).__name__, kept) for p in natives if p not in recorders]
    flat = tuple(site.path for site in sites if len(patches[0][1]) == 2)
    return Found(tuple(sites), tuple(others), flat=flat)


def _site(
    number: int, path: str, native: Any, recorder: Recorder, patches: str, size: tuple[int, ...]
) -> AttentionSite:
    ((q, k, v, x),) = recorder.seen
    if q.shape[1] != math.prod(size):
        raise IncompatibleError(
            f"{path}: its {q.shape[1]} tokens are not the {'x'.join(map(str, size))} patches of {patches}"
        )
    kind = type(native).__name__
    return AttentionSite(
        layer=number,
        path=path,
        kind=kind,
        hidden=x.shape[-1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        key_dim=k.shape[-1],
        value_dim=v.shape[-1],
        scale=q.shape[-1] ** -0.5,
        causal=False,
        extras=("relu_features",) if kind in READERS else (),
        grid="patches",
        grid_from=patches,
    )
