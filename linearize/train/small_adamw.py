"""AdamW in little memory: moments of 8 bits, and weights that need no float32 master.

Moments are stored in blocks of 256 numbers that share a scale, their largest magnitude (block-wise quantisation:
Dettmers et al., arXiv 2110.02861). The codes are evenly spaced in a root of the number instead of the paper's dynamic
tree: the first moment as sign and square root, the second as fourth root. So small numbers keep digits, and what of a
gradient g is lost in g is lost in g^2, too: sqrt(v) never becomes much smaller than m.

A bfloat16 weight has 8 bits of mantissa, and an update of less than 1/512 of it would be lost in rounding. It is
rounded stochastically: up as often as the part that is lost says, so that the mean is the exact sum (Zamirai et al.,
arXiv 2010.06192). Tensors of fewer than 4,096 numbers keep float32 moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
LEAST = 4096
# Numbers that are in float32 at a time: a few temporary tensors of 64 MiB.
SLICE = 1 << 24


class SmallAdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) over dense parameters in float32 or bfloat16.

    `seed` decides how weights are rounded, together with the step and the parameter's number: a run that resumes, and
    every process of one, rounds alike.
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
        size, bias = group["lr"] / (1 - b1**count), math.sqrt(1 - b2**count)
        generator = torch.Generator(parameter.device).manual_seed(hash((self.seed, count, number)) & (2**63 - 1))
        assert parameter.grad is not None
        weights, gradients = parameter.view(-1), parameter.grad.reshape(-1)
        for part, m, v in slices(state, len(weights)):
            gradient = gradients[part].float()
            mean, square = load(m, signed=True), load(v, signed=False)
            mean.lerp_(gradient, 1 - b1)
            square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
            store(m, mean, signed=True)
            store(v, square, signed=False)
            change = mean.div_(square.sqrt_().div_(bias).add_(group["eps"]))
            weight = weights[part].float()
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=size)
            weights[part] = rounded(weight, parameter.dtype, generator)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would convert the codes to the dtype of their parameters."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for number, values in state_dict["state"].items():
            place = parameters[number].device
            moved = {key: value.to("cpu" if key == "step" else place) for key, value in values.items()}
            self.state[parameters[number]] = moved


Moment = tuple[Tensor, Tensor | None]  # codes and the scales of their blocks, or float32 numbers and None


def fresh_state(parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before its first step: a step count, both moments, and the scales of their blocks."""
    count, device = parameter.numel(), parameter.device
    state = {"step": torch.zeros(())}
    if count < LEAST:
        return state | {name: torch.zeros(count, device=device) for name in ("exp_avg", "exp_avg_sq")}
    scales = -(-count // BLOCK)
    for name, dtype in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        state[name] = torch.zeros(count, dtype=dtype, device=device)
        state[f"{name}_scale"] = torch.zeros(scales, device=device)
    return state


def slices(state: dict[str, Tensor], count: int) -> Iterator[tuple[slice, Moment, Moment]]:
    """Stretches of whole blocks of a parameter with `count` numbers, and views of both moments there."""
    for start in range(0, count, SLICE):
        part = slice(start, min(start + SLICE, count))
        blocks = slice(start // BLOCK, -(-part.stop // BLOCK))
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
    return in_blocks(root).mul_(scale[:, None]).view(-1)[: len(codes)]


def store(moment: Moment, value: Tensor, *, signed: bool) -> None:
    """Write float32 numbers into a moment."""
    codes, scale = moment
    if scale is None:
        codes.copy_(value)
        return
    blocks = in_blocks(value)
    scale.copy_(blocks.abs().amax(1))
    share = blocks / scale.clamp_min(1e-38)[:, None]
    if signed:
        code = share.abs().sqrt_().mul_(127).round_().copysign_(share)
    else:
        # At least 1: a second moment of 0 beside a first one that is not would be divided by.
        code = share.pow_(0.25).mul_(255).round_().clamp_(1, 255)
    codes.copy_(code.view(-1)[: len(codes)])


def in_blocks(value: Tensor) -> Tensor:
    """[count] as [blocks, BLOCK], with zeros behind."""
    tail = -len(value) % BLOCK
    return (torch.nn.functional.pad(value, (0, tail)) if tail else value).view(-1, BLOCK)


def rounded(value: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """float32 numbers in `dtype`; in bfloat16 rounded up with the probability that leaves the mean as it is."""
    if dtype != torch.bfloat16:
        return value.to(dtype)
    bits = value.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    return bits.add(noise).bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)
