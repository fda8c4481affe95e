"""The swish gate on the output of RetNet (arXiv 2307.08621, eq. 8), GLA (arXiv 2312.06635, section 4.4) and MHLA.

    o_t . swish(W x_t + b)        one number for each channel of each query head
"""

from __future__ import annotations

import torch
from transformers import initialization as init

from .gate_linear import GateLinear

# swish(1.278) = 1: a conversion starts nearly as it would without the gate.
OPEN = 1.2784645427610738


class OutputGate(GateLinear):
    """The gate of outputs [B,T,heads,dim] by hidden states [B,T,hidden]."""

    def __init__(self, hidden: int, heads: int, dim: int) -> None:
        super().__init__(hidden, heads * dim)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.normal_(self.weight, 0.0, 0.02)
        init.constant_(self.bias, OPEN)
