"""AdamW in little memory: moments of 8 bits, and weights that need no float32 master.

Moments are stored in blocks of 256 numbers that share a scale, their largest magnitude (block-wise quantisation:
Dettmers et al., arXiv 2110.02861). The codes are evenly spaced in a root of the number instead of the paper's dynamic
tree: the first moment as sign and square root, the second as fourth root. So small values keep their
precision, and both moments underflow at the same size of a gradient: sqrt(v) never becomes much smaller than m.

Blocks lie within a row of the parameter [rows, ...]. FSDP2 divides parameters by rows, so each process has the moments
of its rows, and a checkpoint is the same for any number of processes.

A bfloat16 weight has 8 bits of mantissa, and an update of less than 1/512 of it would be lost in rounding. It is
rounded stochastically: up as often as the part that is lost says, so that the mean is the exact sum (Zamirai et al.,
arXiv 2010.06192). Tensors of one dimension or of fewer than 4,096 numbers keep float32 moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import small_adamw_triton
from .fsdp import like, whole

BLOCK = 256
LEAST = 4096
# Numbers that are in float32 at a time: a few temporary tensors of 64 MiB.
SLICE = 1 << 24


class SmallAdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) over dense parameters in float32 or bfloat16.

    `seed` decides how weights are rounded, together with the step and the parameter's number: a run that resumes, and
    every process that has the whole of one, rounds alike. Parameters may be DTensors that are divided by rows.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else closure()
        numbered = ((group, p) for group in self.param_groups for p in group["params"])
        for number, (group, parameter) in enumerate(numbered):
            if parameter.grad is not None:
                self._update(number, group, parameter)
        return loss

    def _update(self, number: int, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state.update(fresh_state(parameter))
        state["step"] += 1
        count, (b1, b2) = int(state["step"]), group["betas"]
        seed = hash((self.seed, count, number)) & (2**63 - 1)
        assert parameter.grad is not None
        own, values = local(parameter), {name: local(value) for name, value in state.items()}
        weights, gradients = (x.view(shape_in_rows(own)) for x in (own, local(parameter.grad).contiguous()))
        size, bias = group["lr"] / (1 - b1**count), math.sqrt(1 - b2**count)
        keep = 1 - group["lr"] * group["weight_decay"]
        if "exp_avg_scale" in values and small_adamw_triton.fits(weights, gradients):
            numbers = size, keep, bias, b1, b2, group["eps"]
            small_adamw_triton.update(weights, gradients, values, BLOCK, seed, numbers)
            return
        generator = torch.Generator(parameter.device).manual_seed(seed)
        for part, m, v in slices(values, *weights.shape):
            gradient = gradients[part].float()
            mean, square = load(m, signed=True), load(v, signed=False)
            mean.lerp_(gradient, 1 - b1)
            square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
            store(m, mean, signed=True)
            store(v, square, signed=False)
            change = mean.div_(square.sqrt_().div_(bias).add_(group["eps"]))
            weight = weights[part].float()
            weight.mul_(keep).sub_(change, alpha=size)
            weights[part] = rounded(weight, parameter.dtype, generator)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would convert the codes to the dtype of their parameters."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for number, values in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = placed(values, fresh_state(parameter))


Moment = tuple[
    Tensor, Tensor | None
]  # codes [r,c] and the scales of their blocks [r,blocks], or float32 numbers and None


def fresh_state(parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before its first step: a step count, both moments [rows,columns], and the scales of
    their blocks [rows,blocks], divided as the parameter is."""
    state, (rows, columns) = {"step": torch.zeros(())}, shape_in_rows(parameter)
    exact = parameter.ndim < 2 or parameter.numel() < LEAST
    for name, dtype in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        state[name] = zeros(parameter, rows, columns, torch.float32 if exact else dtype)
        if not exact:
            state[f"{name}_scale"] = zeros(parameter, rows, -(-columns // BLOCK), torch.float32)
    return state


def zeros(parameter: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[rows,columns] on a parameter's device; of a parameter that is divided by rows each process has its own."""
    if isinstance(parameter, DTensor):
        own = torch.zeros(len(parameter.to_local()), columns, dtype=dtype, device=parameter.device)
        return DTensor.from_local(
            own,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=torch.Size([rows, columns]),
            stride=(columns, 1),
        )
    return torch.zeros(rows, columns, dtype=dtype, device=parameter.device)


def placed(values: dict[str, Tensor], fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of a checkpoint where a fresh one has it, divided alike. Before 2026-11-24 blocks did not end
    with rows: such codes are read, and written anew."""
    found = dict(values)
    for name in ("exp_avg", "exp_avg_sq"):
        codes, scale, new = values[name], values.get(f"{name}_scale"), fresh.get(f"{name}_scale")
        if scale is None or (new is not None and (scale.ndim == 2 or fresh[name].shape[1] % BLOCK == 0)):
            continue
        signed = name == "exp_avg"
        moment = load((whole(codes, codes).view(1, -1), scale.view(1, -1)), signed=signed).view(fresh[name].shape)
        found[name] = moment
        found.pop(f"{name}_scale")
        if new is not None:
            found[name] = torch.zeros(fresh[name].shape, dtype=fresh[name].dtype, device=moment.device)
            found[f"{name}_scale"] = torch.zeros(new.shape, device=moment.device)
            store((found[name], found[f"{name}_scale"]), moment, signed=signed)
    return {key: _like(found[key], new) for key, new in fresh.items()}


def _like(value: Tensor, fresh: Tensor) -> Tensor:
    """`value`, which may be divided, with the shape and on the device of `fresh`, divided alike."""
    if isinstance(value, DTensor) and value.shape == fresh.shape:
        return value
    return like(whole(value, value).view(fresh.shape).to(fresh.device), fresh)


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shape_in_rows(tensor: Tensor) -> tuple[int, int]:
    """Its first dimension, and the product of the others; 1 for a number alone."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return rows, math.prod(tensor.shape[1:])


def slices(state: dict[str, Tensor], rows: int, columns: int) -> Iterator[tuple[tuple[slice, slice], Moment, Moment]]:
    """Stretches of at most SLICE numbers of a parameter [rows,columns], made of whole blocks, and views of both moments
    there."""
    wide, many = min(columns, SLICE), max(SLICE // max(columns, 1), 1)
    for first in range(0, rows, many):
        for start in range(0, columns, wide):
            part = slice(first, min(first + many, rows)), slice(start, min(start + wide, columns))
            blocks = part[0], slice(start // BLOCK, -(-part[1].stop // BLOCK))
            views = []
            for name in ("exp_avg", "exp_avg_sq"):
                scale = state.get(f"{name}_scale")
                views.append((state[name][part], None if scale is None else scale[blocks]))
            yield part, views[0], views[1]


def load(moment: Moment, *, signed: bool) -> Tensor:
    """A moment as new float32 numbers."""
    codes, scale = moment
    if scale is None:
        return codes.clone()
    root = codes.float()
    root = root.mul_(root.abs()).div_(127**2) if signed else root.div_(255).pow_(4)
    return in_blocks(root).mul_(scale[..., None]).flatten(1)[:, : codes.shape[1]]


def store(moment: Moment, value: Tensor, *, signed: bool) -> None:
    """Write float32 numbers into a moment."""
    codes, scale = moment
    if scale is None:
        codes.copy_(value)
        return
    blocks = in_blocks(value)
    scale.copy_(blocks.abs().amax(2))
    share = blocks / scale.clamp_min(1e-38)[..., None]
    if signed:
        code = share.abs().sqrt_().mul_(127).round_().copysign_(share)
    else:
        # At least 1: a second moment of 0 beside a first one that is not would be divided by.
        code = share.pow_(0.25).mul_(255).round_().clamp_(1, 255)
    codes.copy_(code.flatten(1)[:, : codes.shape[1]])


def in_blocks(value: Tensor) -> Tensor:
    """[rows,columns] as [rows,blocks,BLOCK], with zeros behind."""
    tail = -value.shape[1] % BLOCK
    return (torch.nn.functional.pad(value, (0, tail)) if tail else value).unflatten(1, (-1, BLOCK))


def rounded(value: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """float32 numbers in `dtype`; in bfloat16 rounded up with the probability that leaves the mean as it is."""
    if dtype != torch.bfloat16:
        return value.to(dtype)
    bits = value.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    return bits.add(noise).bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)
