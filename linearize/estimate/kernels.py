"""Let a model on fake tensors take the paths that it takes on a GPU: its registered operators instead of PyTorch's."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from linearize_kernels.hf.attention_hooks import mixers_of

from .tracker import Tracker

KNOWN = (torch.bfloat16, torch.float16, torch.float32)
# Capability, shared memory and multiprocessors of an H100 or H200, for which launches are configured: what other cards
# choose changes tiles more than memory.
HOPPER = ((9, 0), 232448, 132)

Workspace = Callable[[Any, Any], int]


@contextlib.contextmanager
def as_on_gpu(model: Any) -> Iterator[Workspace]:
    """Within: the mixers of `model` call their Triton operators, of whose results fake tensors know the shapes.

    Otherwise they would run PyTorch's path, which keeps more for its backward pass, and whose loops over chunks take
    seconds a layer to follow. The model's code was copied for it alone, so nothing else in the process is changed.

    Yields what says of an operator and its inputs how many bytes its host side has at most, outputs and scratch memory
    together; 0 for operators of others.
    """
    packages = {type(mixer).__module__.rpartition(".")[0] + "." for mixer in mixers_of(model).values()}
    modules = [module for name, module in list(sys.modules.items()) if any(map(name.startswith, packages))]
    (kind,) = {module.Target for module in modules if hasattr(module, "Target")} or {tuple}

    def unavailable(device: torch.device, dtype: torch.dtype) -> str:
        return "" if dtype in KNOWN else f"dtype {dtype}"

    def target(device: torch.device) -> Any:
        return kind(*HOPPER)

    with contextlib.ExitStack() as stack:
        for module in modules:
            for function in (unavailable, target):
                if callable(getattr(module, function.__name__, None)):
                    stack.enter_context(mock.patch.object(module, function.__name__, function))
        yield workspace_of(modules)


def workspace_of(modules: list[ModuleType]) -> Workspace:
    """Of the operators that these modules register. The same call is followed once: layers are alike."""
    hosts = {name: host for module in modules for name, host in getattr(module, "HOSTS", {}).items()}
    known: dict[Any, int] = {}

    def workspace(function: Any, inputs: Any) -> int:
        host = hosts.get(function.name())
        if host is None:
            return 0
        key = function.name(), *((x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else x for x in inputs)
        if key not in known:
            with launching_nothing(modules):
                known[key] = most_of(host, inputs)
        return known[key]

    return workspace


def most_of(host: Callable[..., Any], inputs: Any) -> int:
    """The most bytes alive while a host side runs, beside its inputs."""
    given = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    tracker = Tracker()
    tracker.label(given, "inputs")
    tracker.restart()
    # In folders of before 2026-11-28 a host side gets a number first.
    first = (0,) if "call" in inspect.signature(host).parameters else ()
    with tracker:
        host(*first, *inputs)
    return tracker.highest - tracker.peak["inputs"]


class Dropped(dict[Any, Any]):
    """Collects no launch."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@contextlib.contextmanager
def launching_nothing(modules: list[ModuleType]) -> Iterator[None]:
    """Within: host sides of these modules allocate, and launch nothing."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value=0))
        for module in modules:
            if hasattr(module, "_collected"):
                stack.callback(module._collected.reset, module._collected.set(Dropped()))
        yield
