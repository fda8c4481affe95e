"""Turn a recipe into objects: devices and precision, budgets in steps, schedules, data sources."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import AutocastKwargs, DistributedType, InitProcessGroupKwargs, patch_environment

from ..data.packing import TextSource
from ..errors import IncompatibleError, ResourceError, leaves, redact
from ..recipe.data import TeacherSource, local_paths
from ..recipe.recipe import Recipe, Stage, portable, trains_source
from .deepspeed_zero3 import INSTEAD, read_config
from .device import on_cpu, resolve_precision
from .fsdp import read_plugin
from .small_adamw import SmallAdamW

Say = Callable[[str], None]
FUSED = ("cuda",)  # devices on which the optimizer is one kernel
SUPPORTED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.FSDP)
# The main process converts, tokenises and saves alone, while the others wait.
PATIENCE = timedelta(days=1)


def check_runtime(recipe: Recipe) -> str:
    """The precision as `resolve_precision` has it.

    Raises LinearizeError (exit 4) as that does, and for a tracker that is not installed.
    """
    track = recipe.track.to
    if track != "none" and track not in [str(kind.value) for kind in get_available_trackers()]:
        raise ResourceError(f"track.to {track} needs: pip install {track}")
    return resolve_precision(recipe.runtime.device, recipe.runtime.precision)


def hyperparameters(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as a tracker takes it: one value a key, such as `stages.0.optimizer.lr`; without secrets and
    paths of this machine."""
    return {
        ".".join(map(str, keys)): value if isinstance(value, int | float) else redact(str(value))
        for keys, value in leaves(portable(recipe.resolved()))
    }


@contextlib.contextmanager
def in_turns(accelerator: Accelerator) -> Iterator[None]:
    """Within: the processes of a machine work one after another, where each holds a whole model in its memory for a
    while."""
    turns = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    for _ in range(accelerator.local_process_index):
        accelerator.wait_for_everyone()
    yield
    for _ in range(accelerator.local_process_index, turns):
        accelerator.wait_for_everyone()


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Devices and precision, as the recipe says and `accelerate launch` set them up."""
    precision = check_runtime(recipe)
    track = None if recipe.track.to == "none" else recipe.track.to
    # Another run in this process may have had another precision, which accelerate would hold against this one.
    AcceleratorState._reset_state(True)
    plugin, zero = read_plugin(precision), read_config(recipe, precision)
    if plugin or zero:
        check_divided(recipe, zero=zero is not None)
    casts = AutocastKwargs(cache_enabled=caches_casts(recipe, zero is not None))
    handlers = [InitProcessGroupKwargs(timeout=PATIENCE), casts]
    # accelerate would give DeepSpeed the optimizer as well.
    with patch_environment(accelerate_use_deepspeed="false"):
        accelerator = Accelerator(
            mixed_precision=precision,
            cpu=on_cpu(recipe),
            log_with=track,
            project_dir=str(folder),
            fsdp_plugin=plugin,
            kwargs_handlers=handlers,
        )
    if accelerator.distributed_type not in SUPPORTED:
        kind = accelerator.distributed_type.value
        raise IncompatibleError(f"{kind} is not supported; launch with plain data parallelism or FSDP2")
    accelerator.state.fsdp_plugin = plugin  # on a CPU accelerate would drop it, and replicate in silence
    return accelerator


def check_divided(recipe: Recipe, *, zero: bool) -> None:
    """Refuse (exit 3) what does not know DeepSpeed's shards; and, where FSDP2 divides weights, an optimizer in little
    memory beside one of full size, for it shards the source's weights once, in one dtype for all stages."""
    small = [stage for stage in recipe.stages if stage.optimizer.memory == "small"]
    apart = [stage.name for stage in recipe.stages if stage.chunk_size]
    if zero and small:
        message = f"{small[0].name}: optimizer.memory small does not know DeepSpeed's shards. Set it to full, {INSTEAD}"
        raise IncompatibleError(message)
    if zero and apart:
        message = f"{apart[0]}: loss.chunk_size does not know DeepSpeed's shards. Set it to null, {INSTEAD}"
        raise IncompatibleError(message)
    moved = [stage for stage in recipe.stages if trains_source(stage.train)]
    full = [stage.name for stage in moved if stage.optimizer.memory == "full"]
    narrow = [stage.name for stage in moved if stage in small]
    if narrow and full:
        raise IncompatibleError(
            f"{narrow[0]} has optimizer.memory small, {full[0]} has full. Both train weights of the source, and FSDP2 "
            f"shards them once for all stages. Set stages.{full[0]}.optimizer.memory=small, or the other to full"
        )


def to_source(source: Any, text_key: str, folder: Path) -> TextSource:
    """A recipe's source of text, with relative files starting at the recipe's folder."""
    values = source.model_dump(exclude={"image_key", "label_key"})
    if "data_files" in values:
        values["data_files"] = tuple(values["data_files"])
    if "files" in values:
        values["files"] = local_paths(source, folder)
    return TextSource(**values, text_key=text_key)


def prompts_of(source: TeacherSource, text_key: str, folder: Path) -> TextSource | None:
    """The file of prompts that a teacher goes on from, None where it has no file."""
    files = local_paths(source, folder)
    return TextSource(files=files, text_key=text_key) if files else None


def make_optimizer(
    groups: list[dict[str, Any]], stage: Stage, device: torch.device, seed: int = 0
) -> torch.optim.Optimizer:
    """AdamW over `Student.groups`, as the stage says. `seed` is for the rounding of small ones."""
    chosen = stage.optimizer
    if chosen.memory == "small":
        return SmallAdamW(groups, lr=chosen.lr, betas=chosen.betas, weight_decay=chosen.weight_decay, seed=seed)
    fused = device.type in FUSED
    return torch.optim.AdamW(groups, lr=chosen.lr, betas=chosen.betas, weight_decay=chosen.weight_decay, fused=fused)


def clip(parameters: Iterable[torch.nn.Parameter], most: float) -> torch.Tensor:
    """torch's `clip_grad_norm_`, which multiplies bf16 gradients by a float32 number, one after another: five times as
    long as by one of their dtype."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    share = (most / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {grad.dtype for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], share.to(dtype))
    return norm


def caches_casts(recipe: Recipe, zero: bool) -> bool:
    """Whether autocast keeps its casts of weights for the whole of a forward pass.

    Not with DeepSpeed, which frees the weights. Nor with gradient checkpointing: a pass casts each weight once anyway,
    and the casts of all layers at once are 2 bytes for each parameter that trains.
    """
    return not zero and not recipe.runtime.gradient_checkpointing


def make_schedule(stage: Stage, steps: int) -> Callable[[int], float]:
    """Steps done -> factor of the learning rate, as transformers' schedules of these names have it, whose module
    imports its Trainer, and with it peft and bitsandbytes."""
    schedule = stage.schedule
    warmup, floor = schedule.warmup_steps or round(schedule.warmup_ratio * steps), schedule.min_lr_ratio or 0.0

    def factor(done: int) -> float:
        if done < warmup:
            return done / warmup
        left = max(0, steps - done) / max(1, steps - warmup)
        if schedule.name == "constant":
            return 1.0
        return left if schedule.name == "linear" else floor + (1 - floor) * (1 - math.cos(math.pi * left)) / 2

    return factor


def stage_steps(stage: Stage, per_step: int, seq_len: int, cap: int | None, n_blocks: int | None = None) -> int | None:
    """Optimizer steps of a stage from its budget, capped by --max-steps; None for epochs over unknown data."""
    if stage.steps is not None:
        steps = stage.steps
    elif stage.tokens is not None:
        steps = math.ceil(stage.tokens / (per_step * seq_len))
    elif n_blocks is not None and stage.epochs is not None:
        steps = math.ceil(stage.epochs * n_blocks / per_step)
    else:
        return cap
    return min(steps, cap or steps)
