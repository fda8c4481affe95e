"""What gradient checkpointing keeps for the backward pass, in the host's memory: for rows so long that the inputs of
all layers, [B,T,hidden] each, do not fit beside the weights.

Copies go and come on the stream of the computation. A copy of a layer's input takes some hundredths of the time that
the layer takes, so a stream of its own would win nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LEAST = 2**20  # bytes; smaller tensors stay


class Host:
    """Takes tensors away from a device, and brings them back; weights of `model` stay."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def own(self) -> set[int]:
        """Where weights lie now. FSDP2 gathers them anew for each pass; what is in shards is in no computation."""
        whole = (parameter for parameter in self.model.parameters() if not isinstance(parameter, DTensor))
        return {parameter.untyped_storage().data_ptr() for parameter in whole}

    def takes(self, tensor: Tensor) -> bool:
        """Whether it goes: autograd keeps weights as well, which are there anyway."""
        return tensor.nbytes >= LEAST and tensor.untyped_storage().data_ptr() not in self.own()

    def away(self, tensor: Tensor) -> Any:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, copy.copy_(tensor, non_blocking=True)

    def back(self, kept: Any) -> Tensor:
        device, copy = kept
        return copy.to(device, non_blocking=True)


@contextlib.contextmanager
def offloaded(host: Host) -> Iterator[None]:
    """Within a forward pass: tensors that autograd keeps wait at `host`."""

    def pack(tensor: Tensor) -> Any:
        return (host.away(tensor), None) if host.takes(tensor) else (None, tensor)

    def unpack(kept: tuple[Any, Tensor | None]) -> Tensor:
        elsewhere, here = kept
        return host.back(elsewhere) if here is None else here

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
