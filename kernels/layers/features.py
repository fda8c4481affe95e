"""Feature maps phi with positive phi(q).phi(k) in place of e^{c q.k}: what linear mechanisms share.

    elu       1 + elu(y)                      Katharopoulos et al., arXiv 2006.16236
    relu      relu(W y + b)                   Kasai et al., arXiv 2103.13076, W and b learned per head
    plain_relu  relu(y)                   the same without W and b
    hedgehog  softmax(W y), softmax(-W y)     Zhang et al., arXiv 2402.04347, W learned per head; 2 D features

Products of features are about 1 for inputs of unit size. Letters: B batch, T time, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..mixer import LEARNED, AttentionSite


def featured(y: Tensor, kind: str, scale: float, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Features [B,T,heads,size] in fp32 (or y's float64) of y [B,T,heads,D], with W [heads,D,D] and b [heads,D] of
    kinds that have them; `identity` gives y its share of `scale`, which softmax multiplies q.k with."""
    exact, D = torch.promote_types(y.dtype, torch.float32), y.shape[-1]
    y = y.to(exact) * scale**0.5
    if weight is not None:
        y = torch.einsum("bthd,hed->bthe", y, weight.to(exact))
    if kind == "elu":
        return (F.elu(y) + 1.0) * D**-0.5
    if kind == "relu" and bias is not None:
        return F.relu(y + bias.to(exact)) * (2.0 / D) ** 0.5
    if kind == "plain_relu":
        return F.relu(y)
    if kind == "hedgehog":
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1) * (D / 2.0) ** 0.5
    return y


class Features(nn.Module):
    """The map of one mixer: its own weights for each query head and each KV head, and each of their memories, the
    identity at first.

    Hedgehog's, where attention is causal, is that of q and k before `scale`, as published: of what is scaled, softmax
    over D channels is so even that all keys look alike, and a rate of 1e-2 takes hundreds of steps to sharpen it.
    """

    # Makes features in one launch, or returns None where it cannot.
    kernel: Callable[[Tensor, Tensor, Tensor | None, float], Tensor | None] | None = None

    def __init__(
        self, kind: Literal["elu", "relu", "plain_relu", "hedgehog"], heads: int, kv_heads: int, dim: int, scale: float,
        causal: bool = True,
    ):  # fmt: skip
        """`scale` is what softmax multiplies q.k with; q and k share it between them."""
        super().__init__()
        self.kind, self.scale = kind, scale
        self.start = scale**-0.5 if kind == "hedgehog" and causal else 1.0
        if kind in LEARNED:
            self.query_map = nn.Parameter(torch.empty(heads, dim, dim))
            self.key_map = nn.Parameter(torch.empty(kv_heads, dim, dim))
        if kind == "relu":
            self.query_bias = nn.Parameter(torch.empty(heads, dim))
            self.key_bias = nn.Parameter(torch.empty(kv_heads, dim))
        self.size = 2 * dim if kind == "hedgehog" else dim

    @classmethod
    def at(cls, site: AttentionSite, kind: Any, memories: int = 1) -> Features:
        """The map of a mixer at `site` with `memories` of each head, with kernels where it has weights."""
        found = cls(kind, memories * site.heads, memories * site.kv_heads, site.key_dim, site.scale, site.causal)
        if kind in LEARNED:
            found.kernel = import_module(".learned_maps", __package__).learned_map
        return found

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for name, weight in self.named_parameters():
            if name.endswith("map"):
                init.copy_(weight, self.start * torch.eye(weight.shape[-1], device=weight.device).expand_as(weight))
            else:
                init.zeros_(weight)

    def forward(self, y: Tensor, role: Literal["query", "key"]) -> Tensor:
        """Features [B,T,heads,size] of queries or keys y [B,T,heads,D], as `featured`; in y's dtype from a kernel."""
        weight: Any = getattr(self, f"{role}_map", None)
        bias = getattr(self, f"{role}_bias", None)
        found = None if self.kernel is None else self.kernel(y, weight, bias, self.scale**0.5)
        return featured(y, self.kind, self.scale, weight, bias) if found is None else found
