"""The GPU that kernels run on, as launch configurations see it, and why kernels cannot run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import warned_once, unavailable


class Target(NamedTuple):
    """Compute capability, bytes of shared memory that one program may have, and multiprocessors."""

    capability: tuple[int, int]
    shared: int
    processors: int


@functools.cache
def target(device: torch.device) -> Target | None:
    """A GPU as configurations see it; None for the interpreter, whose tiles are numpy arrays."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    # A property that torch has and its type stub has not.
    shared = getattr(properties, "shared_memory_per_block_optin")  # noqa: B009
    return Target((properties.major, properties.minor), shared, properties.multi_processor_count)


def obstacle_of(configure: Callable[..., Any]) -> Callable[..., str]:
    """A function of the same arguments: what the ValueError of `configure` says, empty when a configuration fits."""

    @torch.compiler.assume_constant_result
    def obstacle(*arguments: Any) -> str:
        try:
            configure(*arguments)
        except ValueError as error:
            return warned_once(str(error))
        return ""

    return obstacle


def refusal(q: Tensor, v: Tensor, widest: int, heads: int) -> str:
    """Why kernels of heads up to `widest`, with a program for each of so many heads a row, cannot take q [B,T,H,D] and
    v [B,T,Hkv,Dv]; empty when they can."""
    if reason := unavailable(q.device, q.dtype):
        return reason
    if v.dtype != q.dtype:
        return f"q has dtype {q.dtype} and v {v.dtype}"
    if max(q.shape[-1], v.shape[-1]) > widest:
        return f"head dim {q.shape[-1]} or {v.shape[-1]} exceeds {widest}"
    if q.shape[0] * heads > 65535:
        return f"{q.shape[0]} rows of {heads} heads exceed a GPU's grid"
    return ""
