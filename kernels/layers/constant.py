"""A bias for linear layers that have none: the direction in which hidden states are about the same.

    w = argmin sum_t (w.x_t - 1)^2 + r N |w|^2        so that (c w).x_t is about c for all tokens

Hidden states behind a norm have such a direction, large channels among others. A ridge r keeps w short.
"""

from __future__ import annotations

import torch
from torch import Tensor

# swish(OPEN) = 1: what a swish gate starts from, so that a conversion begins nearly as without it.
OPEN = 1.2784645427610738
# Of the mean square of a channel.
RIDGE = 1e-2


@torch.no_grad()
def ones_direction(x: Tensor) -> Tensor:
    """w [hidden] in fp32 from hidden states x [B,T,hidden]."""
    rows = x.flatten(0, -2).double()
    products = rows.mT @ rows / len(rows)
    ridge = RIDGE * products.diagonal().mean().clamp_min(1e-12)
    eye = torch.eye(len(products), dtype=rows.dtype, device=rows.device)
    return torch.linalg.solve(products + ridge * eye, rows.mean(0)).float()
