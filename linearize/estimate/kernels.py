"""Let a model on fake tensors take the paths that it takes on a GPU: its registered operators instead of PyTorch's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from linearize_kernels.hf.seam import mixers_of

KNOWN = (torch.bfloat16, torch.float16, torch.float32)


@contextlib.contextmanager
def as_on_gpu(model: Any) -> Iterator[None]:
    """Within: the mixers of `model` call their Triton operators, of whose results fake tensors know the shapes.

    Otherwise they would run PyTorch's path, which keeps more for its backward pass, and whose loops over chunks take
    seconds a layer to follow. The model's code was copied for it alone, so nothing else in the process is changed.
    """
    packages = {type(mixer).__module__.rpartition(".")[0] + "." for mixer in mixers_of(model).values()}

    def unavailable(device: torch.device, dtype: torch.dtype) -> str:
        return "" if dtype in KNOWN else f"dtype {dtype}"

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if any(name.startswith(package) for package in packages) and hasattr(module, "unavailable"):
                stack.enter_context(mock.patch.object(module, "unavailable", unavailable))
        yield
