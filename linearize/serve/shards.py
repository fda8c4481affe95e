"""The part of a mixer that one process of several computes: some of its heads, with their parameters and states.

vLLM's tensor parallelism divides q, k and v by heads, and gives every process all hidden states. A mixer divides where
its heads do not know of each other. That is tried, not declared: `divides` compares the parts with the whole.

Letters: H query heads, Hkv KV heads, D key dim, Dv value dim.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import Tensor

from ..verify.tolerances import DIVIDED
from .states import code_of, layout_class

# Tokens of the trial.
TOKENS = 5


def shard_spec(spec: dict[str, Any], size: int) -> dict[str, Any]:
    """`config.linearize` with sites of the heads that one of `size` processes has."""
    layers = []
    for layer in spec["layers"]:
        site = layer["site"]
        own = {"heads": site["heads"] // size, "kv_heads": site["kv_heads"] // size}
        layers.append({**layer, "site": {**site, **own}})
    return {**spec, "layers": layers}


@torch.no_grad()
def shard(whole: Any, options: dict[str, Any], rank: int, size: int) -> Any:
    """The mixer of the heads of process `rank` of `size`. Of a parameter that is larger in `whole` it has its part.

    Raises ValueError for a parameter that is not `size` times as large.
    """
    site = dataclasses.replace(whole.site, heads=whole.site.heads // size, kv_heads=whole.site.kv_heads // size)
    like = next(whole.parameters(), torch.empty(0))
    memories = getattr(whole, "memories", 1)  # of each head, in a parameter one behind the other
    with torch.device(like.device):
        part: Any = type(whole)(site, **options).to(like.dtype)
    for name, value in vars(whole).items():  # what attention_hooks.py set
        part.__dict__.setdefault(name, value)
    for name, own in part.named_parameters():
        given = whole.get_parameter(name)
        for dim, length in enumerate(own.shape):
            if given.shape[dim] != length:
                if given.shape[dim] != size * length:
                    raise ValueError(f"{name} {list(given.shape)} is not {size} times {list(own.shape)}")
                copies = 1 if name.startswith("near.") else memories  # a head has one window
                each = given.unflatten(dim, (copies, -1)).chunk(size, dim + 1)
                given = each[rank].flatten(dim, dim + 1)
        own.data = given.clone()
    if hasattr(whole, "log_decay") and not hasattr(whole, "log_half_life"):  # RetNet's, numbered over all heads
        count = part.state_count
        part.log_decay = lambda device: whole.log_decay(device)[rank * count : (rank + 1) * count]
    return part.eval()


@torch.no_grad()
def divides(kind: Any, record: dict[str, Any], options: dict[str, Any], size: int) -> str:
    """Why the heads of a site (`record`, as config.json has it) cannot be divided among `size` processes; empty where
    they can: mixers of random parameters compute the same for all heads and part by part."""
    if record.get("softmax_groups"):
        return "some of its heads keep softmax"
    if record["heads"] % size or record["kv_heads"] % size:
        return f"{record['heads']} heads and {record['kv_heads']} KV heads are not divided by {size}"
    code = importlib.import_module(f"{code_of(kind)}.mixer")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        whole: Any = kind(code.AttentionSite.from_dict({**record, "layer": 0, "path": ""}), **options).eval()
        for parameter in whole.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape)
        site = whole.site
        q, k = torch.randn(2, TOKENS, site.heads, site.key_dim), torch.randn(2, TOKENS, site.kv_heads, site.key_dim)
        v, x = torch.randn(2, TOKENS, site.kv_heads, site.value_dim), torch.randn(2, TOKENS, site.hidden)
        x /= site.hidden**0.5
        layout = layout_class(whole)()
        expected: Tensor = whole(q, k, v, x, layout)[0]
        try:
            parts = [shard(whole, options, rank, size) for rank in range(size)]
            divided = zip(*(y.chunk(size, 2) for y in (q, k, v)), strict=True)
            found = torch.cat([part(*own, x, layout)[0] for part, own in zip(parts, divided, strict=True)], 2)
        except (ValueError, RuntimeError, AttributeError) as error:
            return str(error).splitlines()[0]
    distance = float((found - expected).abs().max() / expected.abs().max())
    return "" if distance <= DIVIDED else "its heads are computed from each other"
