"""Linear layers of gates, whose biases stay in fp32 whatever dtype the model has.

A bias of 7.6 is a half-life of 1,400 tokens, and 7.625, which is 7.6 in bf16, one of 1,420: rounded in each round of
training, decays drift. Each part of a mixer names such parameters in `in_fp32` (mixer.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GateLinear(nn.Linear):
    """W x + b, where b stays in fp32 and is rounded to the dtype of W when it is used."""

    in_fp32 = ("bias",)

    def forward(self, x: Tensor) -> Tensor:
        """[..,in] -> [..,out] in the dtype of the product."""
        return F.linear(x, self.weight, None if self.bias is None else self.bias.to(self.weight.dtype))


class DecayLinear(GateLinear):
    """W x + b, added up in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """[..,in] -> [..,out], in fp32 (fp64 stays) where there is a bias."""
        return self.with_bias(F.linear(x, self.weight))

    def with_bias(self, product: Tensor) -> Tensor:
        """W x + b from W x: a server makes one product of several maps."""
        if self.bias is None:
            return product
        wide = torch.promote_types(product.dtype, torch.float32)
        return product.to(wide) + self.bias.to(wide)


def before_softplus(y: Tensor) -> Tensor:
    """The z with softplus(z) = y; e^y itself overflows where half-lives are thousandths of a token."""
    return y + torch.log(-torch.expm1(-y))
