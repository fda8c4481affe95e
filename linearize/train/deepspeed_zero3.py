"""DeepSpeed ZeRO-3: it shards the source's weights; mixers and adapters stay whole in each process.

DeepSpeed has the weights, no more: an engine of its own would want backward and the optimizer, but a transfer goes
backward inside forward and each stage trains something else. A weight that trains therefore has a second face,
`parameter.shard`: a flat DTensor over DeepSpeed's own memory, with gradients as ZeRO-3 would sum them. Everything
that deals in shards of FSDP2 (fsdp.py) deals in these.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Container
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from linearize_kernels.hf.attention_hooks import mixers_of

from ..errors import IncompatibleError, ResourceError
from ..recipe.recipe import Recipe

# What a DeepSpeed config may say beside `zero_optimization`, and where the recipe does.
OF_RECIPE = {
    "gradient_clipping": "stages.optimizer.max_grad_norm",
    "gradient_accumulation_steps": "stages.batch.gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "stages.batch.per_device",
    "train_batch_size": "stages.batch",
    "optimizer": "stages.optimizer",
    "scheduler": "stages.schedule",
    "bf16": "runtime.precision",
    "fp16": "runtime.precision",
}
# Of `zero_optimization`, what divides or rounds weights in another way, or moves them.
OTHER_SHARDS = ("mics_shard_size", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients",
                "zero_quantized_nontrainable_weights", "cpu_offload", "cpu_offload_params")  # fmt: skip
INSTEAD = "or launch with --use_fsdp --fsdp_version 2, which shards the same"


def read_config(recipe: Recipe, precision: str) -> dict[str, Any] | None:
    """DeepSpeed's `zero_optimization` as `accelerate launch` was told, or None; optimizer and batch are the recipe's.

    Raises LinearizeError: exit 4 without deepspeed, exit 3 for what is not supported or not as in the recipe.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    if importlib.util.find_spec("deepspeed") is None:
        raise ResourceError(
            "launched with --use_deepspeed, but deepspeed is not installed: pip install 'linearize[deepspeed]', "
            f"{INSTEAD}"
        )
    if recipe.runtime.device == "cpu" or not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before the first import
    from accelerate import DeepSpeedPlugin

    try:
        told = DeepSpeedPlugin().deepspeed_config
        config = {key: value for key, value in told["zero_optimization"].items() if value != "auto"}
        away = [(config.pop(key, None) or {}).get("device", "none") for key in ("offload_optimizer", "offload_param")]
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        stage = DeepSpeedZeroConfig(**config).stage
    except ValueError as error:
        reason = " ".join(str(error).split("[type=")[0].split()).rstrip(".")
        raise IncompatibleError(f"DeepSpeed's config cannot be used: {reason}. Launch with --zero_stage 3") from error
    other = [key for key in OTHER_SHARDS if config.get(key) is True or int(config.get(key) or 0) > 1]
    apart = [key for key in OF_RECIPE if not _agrees(key, told.get(key), recipe, precision)]
    refused = {
        f"DeepSpeed ZeRO stage {stage} is not supported: launch with --zero_stage 3, {INSTEAD}": stage != 3,
        "DeepSpeed's offloading is not supported: launch with --offload_optimizer_device none "
        "--offload_param_device none": any(device not in (None, "none") for device in away),
        f"DeepSpeed's {', '.join(other)} is not supported: leave it out of zero_optimization": bool(other),
        f"DeepSpeed's config has {', '.join(apart)}, which the recipe says: leave it out, and set "
        f"{', '.join(dict.fromkeys(OF_RECIPE[key] for key in apart))}": bool(apart),
        "DeepSpeed with runtime.compile is not supported: set runtime.compile: false": recipe.runtime.compile is True,
        "DeepSpeed with runtime.precision fp16 is not supported: use bf16": precision == "fp16",
    }
    for message, found in refused.items():
        if found:
            raise IncompatibleError(message)
    # Whatever stays gathered would not see what the optimizer writes into the shards.
    return config | {"stage3_param_persistence_threshold": 0}


def _agrees(key: str, value: Any, recipe: Recipe, precision: str) -> bool:
    """Whether a value of a DeepSpeed config leaves all to the recipe, or says the same; accelerate accumulates 1."""
    if value in (None, "auto") or (key, value) == ("gradient_accumulation_steps", 1):
        return True
    if key in ("bf16", "fp16"):
        return value.get("enabled") is not True or precision == key
    found: dict[str, set[Any]] = {
        "gradient_clipping": {stage.optimizer.max_grad_norm for stage in recipe.stages},
        "gradient_accumulation_steps": {stage.batch.gradient_accumulation_steps for stage in recipe.stages},
        "train_micro_batch_size_per_gpu": {stage.batch.per_device for stage in recipe.stages},
    }
    return [*found.get(key, ())] == [value]


def partition(model: Any, accelerator: Accelerator, config: dict[str, Any], trained: Container[str]) -> None:
    """Divide a model's weights in place; those that `trained` names get a `shard`, the model a `release_gathered`."""
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.utils.timer import NoopTimer

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(verbose=False)
    whole = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": config}
    zero = DeepSpeedConfig(whole).zero_config
    mixers = {path: mixer.to(accelerator.device) for path, mixer in mixers_of(model).items()}
    for path in mixers:  # DeepSpeed has no list of what to leave alone
        del model.get_submodule(path).mixer
    offload = DeepSpeedZeRoOffload(
        model,
        timers=NoopTimer(),
        ds_config=whole,
        overlap_comm=zero.overlap_comm,
        prefetch_bucket_size=zero.prefetch_bucket_size,
        max_reuse_distance=zero.max_reuse_distance,
        max_live_parameters=zero.max_live_parameters,
        param_persistence_threshold=zero.param_persistence_threshold,
    )
    sources: Any = nn.ParameterList(model.parameters())
    sources.ds_external_parameters = lambda: ()
    for path, mixer in mixers.items():
        model.get_submodule(path).mixer = mixer
    model.to(accelerator.device)  # buffers
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for name, parameter in model.named_parameters():
        if name not in trained or not hasattr(parameter, "ds_tensor"):
            continue
        local = parameter.ds_tensor.data
        parameter.shard = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
        parameter.shard.full_shape = parameter.ds_shape
        parameter.register_post_accumulate_grad_hook(sum_into_shard)
    model.release_gathered = lambda: offload.get_param_coordinator().release_and_reset_all(sources)


def sum_into_shard(parameter: Any) -> None:
    """A whole gradient becomes its share of the mean over processes, added to the shard's, and is forgotten."""
    shard = parameter.shard
    local = torch.empty_like(shard.to_local())
    dist.reduce_scatter_tensor(local, flat(parameter.grad, shard) / dist.get_world_size())
    parameter.grad = None
    grad = DTensor.from_local(local, shard.device_mesh, shard.placements)
    shard.grad = grad if shard.grad is None else shard.grad + grad


def flat(value: Tensor, shard: Any) -> Tensor:
    """`value` in one dimension, with zeros at the end until every process has as much of it."""
    return nn.functional.pad(value.reshape(-1), (0, shard.numel() - value.numel()))
