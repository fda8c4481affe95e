"""FSDP2: it shards the source's weights; mixers and adapters stay whole in each process.

Transfer losses are backpropagated inside forward, past FSDP's hooks; what they train must therefore stay out of its
hands. Gradients of whatever is whole are summed by hand (loop.py). torch and accelerate do the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor

from linearize_kernels.hf.attention_hooks import mixers_of

from ..errors import IncompatibleError
from .deepspeed_zero3 import flat


def read_plugin(precision: str) -> FullyShardedDataParallelPlugin | None:
    """What `accelerate launch` was told about FSDP, or None; one unit per decoder layer unless it said otherwise.

    Raises LinearizeError (exit 3) for what is not supported.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    # Every process reads the files; accelerate's broadcast knows nothing of parameters that stay whole.
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False)
    refused = {
        "FSDP version 1 is not supported: launch with --fsdp_version 2": plugin.fsdp_version != 2,
        "FSDP with parameters on the CPU is not supported: launch with --fsdp_offload_params false": (
            os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
        ),
        "FSDP's activation checkpointing is not supported: set runtime.gradient_checkpointing: true": (
            plugin.activation_checkpointing
        ),
        "FSDP with runtime.precision fp16 is not supported: use bf16": precision == "fp16",
    }
    for message, found in refused.items():
        if found:
            raise IncompatibleError(message)
    plugin.auto_wrap_policy = plugin.auto_wrap_policy or transformer_auto_wrap_policy
    if precision == "bf16":  # gradients are summed in float32, as one process would
        plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return plugin


def shard(model: Any, accelerator: Accelerator, trained: Container[str]) -> None:
    """Shard a model in place, from the CPU to the device a layer at a time; some stage needs gradients of the
    parameters that `trained` names. Who holds the parameters meanwhile keeps them whole on the device.

    FSDP looks in its first forward pass, and never again, which weights have gradients, and of what dtype: of one in
    each layer, so the source's weights among `trained` come in one dtype. That pass is here. Raises LinearizeError
    (exit 3) for a model that writes no text, whose input embedding accelerate shards twice.
    """
    if not model.can_generate():
        message = f"FSDP of {type(model).__name__}, which writes no text, is not supported: launch without --use_fsdp"
        raise IncompatibleError(message)
    require_gradients(model, trained)
    mixers = list(mixers_of(model).values())
    for mixer in mixers:
        mixer.to(accelerator.device)
    accelerator.state.fsdp_plugin.ignored_modules = mixers
    # accelerate would make masters of all that trains; those that are due are there.
    precision, accelerator.state._mixed_precision = accelerator.state._mixed_precision, "no"
    try:
        fsdp2_prepare_model(accelerator, model)
    finally:
        accelerator.state._mixed_precision = precision
    # A model that keeps its softmax has no other behaviour; it is in evaluation mode since it was loaded.
    softmax = model.teacher() if hasattr(model, "teacher") else contextlib.nullcontext()
    with torch.no_grad(), softmax, accelerator.autocast():
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=accelerator.device), use_cache=False)
    reshard(model)


def require_gradients(model: nn.Module, names: Container[str]) -> None:
    """Of these parameters, and of no others; apart, since a loop keeps its last parameter, which would stay whole."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def is_divided(module: Any) -> bool:
    """Whether a module is one of FSDP2's units."""
    return isinstance(module, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Free gathered weights, which a pass without backward leaves behind; only then do `parameters()` show shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    getattr(model, "release_gathered", lambda: None)()


def optimizer_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """What the optimizer sees of a model's parameter: itself, or its shard under DeepSpeed (deepspeed_zero3.py)."""
    return getattr(parameter, "shard", parameter)


def whole(tensor: Tensor, parameter: Tensor) -> Tensor:
    """All of a tensor that may be in shards as `parameter` is; every process must ask."""
    if not isinstance(tensor, DTensor):
        return tensor
    shape = getattr(parameter, "full_shape", tensor.shape)
    return tensor.full_tensor().view(-1)[: shape.numel()].view(shape)


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value`, which every process has whole, divided as `parameter` is; numbers such as a step count stay."""
    shape = getattr(parameter, "full_shape", parameter.shape)
    if not isinstance(parameter, DTensor) or value.shape != shape:
        return value
    value = value.to(parameter.device)
    if value.shape != parameter.shape:
        value = flat(value, parameter)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
