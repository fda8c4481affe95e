"""Which device and precision a runtime means here; without accelerate, for commands that train nothing."""

from __future__ import annotations

import torch

from ..errors import ResourceError
from ..recipe.recipe import Recipe
from ..terminal.output import counted


def on_cpu(recipe: Recipe) -> bool:
    """Whether a run of this recipe takes the CPU here."""
    return takes_cpu(recipe.runtime.device)


def takes_cpu(device: str) -> bool:
    """Whether the `device` of a recipe's runtime is the CPU here."""
    return device == "cpu" or not torch.cuda.is_available()


def device_name(device: torch.device) -> str:
    """What a report calls the device that a run took."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {counted(torch.get_num_threads(), 'thread')}"


def resolve_precision(device: str, precision: str) -> str:
    """accelerate's name for the precision that a runtime asks for: bf16 on a GPU, fp32 on a CPU, unless told
    otherwise.

    Raises LinearizeError (exit 4) for a device that is not there, or a precision it has not.
    """
    if device == "cuda" and not torch.cuda.is_available():
        message = "runtime.device is cuda, but torch sees no CUDA device. Set it to cpu; linearize doctor shows torch"
        raise ResourceError(message)
    cpu = takes_cpu(device)
    if precision == "fp16" and cpu:
        raise ResourceError("runtime.precision fp16 needs a GPU; use fp32 or bf16 on a CPU")
    return {"fp32": "no", "auto": "no" if cpu else "bf16"}.get(precision, precision)
