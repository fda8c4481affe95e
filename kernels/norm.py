"""RMS norm of each head's output, for mechanisms whose outputs are sums rather than means."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init


class HeadNorm(nn.Module):
    """o / rms(o) over the value dim of each head, times a weight per head and channel."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.ones_(self.weight)

    def forward(self, o: Tensor, gate: Tensor | None = None) -> Tensor:
        """o [B,T,H,Dv], in its dtype. `gate` [B,T,H] multiplies what comes out: in front, the norm would cancel it."""
        y = o.float()
        factor = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        if gate is not None:
            factor = factor * gate.float()[..., None]
        return (y * factor * self.weight.float()).to(o.dtype)

    @torch.no_grad()
    def calibrate(self, o_teacher: Tensor) -> None:
        """Give each head's output the root mean square of the teacher's [B,T,H,Dv]."""
        rms = o_teacher.float().square().mean((0, 1, 3)).sqrt()
        self.weight.copy_(rms[:, None].expand_as(self.weight))
