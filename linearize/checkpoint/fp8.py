"""Weights in FP8 with a scale for each block, as DeepSeek-V3 and Qwen3-FP8 have them: read as float weights.

`x.weight` [out,in] is float8_e4m3fn, and `x.weight_scale_inv` [ceil(out/rows), ceil(in/columns)] has what each block of
rows x columns numbers is multiplied with (in spite of its name). Both may lie in different shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import IncompatibleError
from .shards import BLOCK, read_bytes, read_tensor, torch_dtype
from .source import Places, Source, read_header, tensor_places

FP8, SUFFIX = "F8_E4M3", "_scale_inv"


def is_scale(name: str, known: Any) -> bool:
    """Whether a tensor is the scales of another one of the `known` names."""
    return name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in known


def cut_blocks(source: Source) -> bool:
    """Whether an edge cuts a block of some FP8 weight. transformers 5.23 takes the size of blocks from the grid of the
    scales, and loads no such weight where it has to dequantize."""
    if source.block is None:
        return False
    weights = [entry.shape for _, entry in tensor_places(source.shards).values() if entry.dtype == FP8]
    return any(size % part for shape in weights for size, part in zip(shape, source.block, strict=False))


def float_tensors(source: Source) -> dict[str, torch.Tensor]:
    """The tensors of a source without values; those of FP8 with scales as bfloat16, and no scales."""
    found: dict[str, torch.Tensor] = {}
    for shard in source.shards:
        for name, entry in read_header(shard).items():
            found[name] = torch.empty(entry.shape, dtype=torch_dtype(shard, entry), device="meta")
    if source.block is None:
        return found
    return {
        name: value.to(torch.bfloat16) if value.dtype == torch.float8_e4m3fn else value
        for name, value in found.items()
        if not is_scale(name, found)
    }


def dequantized(name: str, known: Places, block: tuple[int, int]) -> Iterator[torch.Tensor]:
    """The numbers of an FP8 weight in float32, some rows at a time, flat.

    Raises LinearizeError (exit 3) for a weight without scales, or with scales of another shape.
    """
    shard, entry = known[name]
    where = known.get(name + SUFFIX)
    shape = tuple(math.ceil(size / part) for size, part in zip(entry.shape, block, strict=False))
    if where is None or len(entry.shape) != 2 or where[1].shape != shape:
        found = "none" if where is None else list(where[1].shape)
        raise IncompatibleError(
            f"{shard}: {name} is FP8 {list(entry.shape)} in blocks of {list(block)}, and its scales are {found}, not "
            f"{list(shape)}. Download the model again, or use its float version"
        )
    scales = torch.cat([part.float() for part in read_tensor(*where)]).view(shape)
    (rows, columns), at_once = entry.shape, max(1, BLOCK // max(1, entry.shape[1]))
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        data = b"".join(bytes(part) for part in read_bytes(shard, entry.start + first * columns, count * columns))
        values = torch.frombuffer(bytearray(data), dtype=torch.float8_e4m3fn).view(count, columns).float()
        of_rows = scales[torch.arange(first, first + count) // block[0]]
        yield (values * of_rows.repeat_interleave(block[1], 1)[:, :columns]).view(-1)
