"""RMS norm of each head's output, for mechanisms whose outputs are sums rather than means."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init


def head_norm(o: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
    """o / rms(o) over the value dim of each head, times weight [H,Dv]; o [B,T,H,Dv], in its dtype.

    `gate` [B,T,H] multiplies what comes out: in front, the norm would cancel it.
    """
    y = o.float()
    factor = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    if gate is not None:
        factor = factor * gate.float()[..., None]
    return (y * factor * weight.float()).to(o.dtype)


@torch.no_grad()
def give_size(weight: Tensor, o_teacher: Tensor) -> None:
    """Set the weight [H,Dv] of a norm so that each head's output has the teacher's root mean square [B,T,H,Dv]."""
    rms = o_teacher.float().square().mean((0, 1, 3)).sqrt()
    weight.copy_(rms[:, None].expand_as(weight))


@torch.no_grad()
def fit_size(weight: Tensor, o: Tensor, o_teacher: Tensor) -> None:
    """Scale the weight [H,Dv] of a norm, so that each head's output o [B,T,H,Dv] under it comes as near to the teacher's
    as a factor can bring it: by least squares, and at least a tenth of what gives it the teacher's root mean square."""
    y, target = o.float(), o_teacher.float()
    power = y.square().sum((0, 1, 3)).clamp_min(1e-12)
    least = 0.1 * (target.square().sum((0, 1, 3)) / power).sqrt()
    factor = torch.maximum((y * target).sum((0, 1, 3)) / power, least)
    weight.mul_(factor[:, None].to(weight.dtype))


class HeadNorm(nn.Module):
    """`head_norm` with its weight."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.ones_(self.weight)

    def forward(self, o: Tensor, gate: Tensor | None = None) -> Tensor:
        return head_norm(o, self.weight, gate)

    def calibrate(self, o_teacher: Tensor) -> None:
        give_size(self.weight, o_teacher)
