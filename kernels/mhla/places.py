"""MHLA's blocks: which block a token is in, and a layout in which each block of each document is a row of its own.

Letters: B batch, T time, R rows (of the batch, or sequences), N blocks of a row, C places in a block, M blocks of a
document. Rows of queries are [C*G], the G heads of a token side by side (scan.py).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import Grid, once
from ..layers.scan import into_chunks, numbered


class Places(NamedTuple):
    """Where tokens go: R rows of N blocks of C."""

    size: int  # C
    source: Tensor | None  # [R,N*C] which of the B*T tokens stands there, B*T for none; None: as they are
    table: Tensor | None  # `source` in int32, as the kernels take it
    place: Tensor | None  # [B,T] where each token stands among R*N*C, R*N*C for none
    number: Tensor  # [R or 1,N] int64 which block of its document it is
    document: Tensor  # [R or 1,N] int64 its document, -1 for a block that does not exist
    last: Tensor  # [R] the document that the row ends with
    tokens: Tensor  # [R] int64 how many tokens that document has
    untouched: Tensor  # [R] bool whether no token was added to the state's document, and no document began
    covered: bool = False  # whether every token surely has a place

    def rows(self, y: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """y [B,T,heads*G,Y] -> [R,heads,N,C*G,Y] in `dtype`, zeros where there is no token."""
        if self.source is not None:
            y = torch.cat([y.flatten(0, 1), y.new_zeros(1, *y.shape[2:])])[self.source]
        return into_chunks(y, self.size, heads, dtype)

    def tokens_of(self, y: Tensor, shape: tuple[int, int]) -> Tensor:
        """The inverse: [R,heads,N,C*G,Y] -> [B,T,heads*G,Y], zeros for tokens without a place."""
        y = y.unflatten(3, (self.size, -1)).permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(0, 2)
        if self.place is None:
            return y.unflatten(0, (shape[0], -1))[:, : shape[1]]
        return torch.cat([y, y.new_zeros(1, *y.shape[1:])])[self.place]


def place_rows(padding: Tensor | None, segments: Tensor | None, seen: Tensor | None, x: Tensor, C: int) -> Places:
    """Causal blocks of the rows of x [B,T,..]; `seen` [B] tokens of their first documents came before (None: none)."""
    if padding is None and segments is None and seen is None:
        B, T = x.shape[:2]
        zero = torch.zeros(B, dtype=torch.long, device=x.device)
        number = torch.arange(-(-T // C), device=x.device)[None]
        return Places(C, None, None, None, number, torch.zeros_like(number), zero, zero + T, zero == 1)
    place = _placed if segments is None else _placed_eagerly
    return place(padding, segments, seen, x, C)


def _placed(padding: Tensor | None, segments: Tensor | None, seen: Tensor | None, x: Tensor, C: int) -> Places:
    """Causal blocks of rows where not every token is one of a single document that begins there."""
    B, T = x.shape[:2]
    zero = torch.zeros(B, dtype=torch.long, device=x.device)
    real = torch.ones(B, T, dtype=torch.bool, device=x.device) if padding is None else padding
    document = zero[:, None].expand(B, T) if segments is None else numbered(segments)
    before = zero if seen is None else seen
    count = real.long().cumsum(1) - real.long()
    changes = F.pad(document[:, 1:] != document[:, :-1], (1, 0))
    offset = count - torch.where(changes, count, 0).cummax(1).values
    position = offset + torch.where(document == 0, before[:, None], 0)
    block = (real & ((offset == 0) | (position % C == 0))).long().cumsum(1) - 1
    if segments is not None:
        N = max(1, int(block.max()) + 1)
    else:
        N = -(-T // C) if seen is None else (T + C - 2) // C + 1
    last = document[:, -1]
    joined = (real & (document == last[:, None])).sum(1)
    tokens = joined + torch.where(last == 0, before, 0)
    return _scattered(real, block, position, document, N, C, B)._replace(
        last=last, tokens=tokens, untouched=(last == 0) & (joined == 0)
    )


# How many blocks there are is read from the device, and torch 2.11 fails to trace what follows it.
_placed_eagerly = torch.compiler.disable(_placed)


def place_sequences(cu: Tensor, seen: Tensor | None, T: int, C: int) -> Places:
    """The same for sequences laid end to end, `cu` [S+1]: each is a row."""
    host, cu = getattr(cu, "host", None), cu.long()
    S, lengths = cu.shape[0] - 1, cu[1:] - cu[:-1]
    before = torch.zeros_like(lengths) if seen is None else seen
    token = torch.arange(T, device=cu.device)
    row = torch.bucketize(token, cu[1:], right=True).clamp(max=S - 1)
    position = token - cu[row] + before[row]
    block = position // C - (before // C)[row]
    if host is None:
        N = max(1, int(block.max()) + 1) if T else 1
    else:  # a server's, which knows the longest without asking the GPU (layout.py's `of_starts`)
        longest = max(1, int(host.diff().max()))
        N = -(-longest // C) if seen is None else (longest + C - 2) // C + 1
    zero = torch.zeros_like(token)
    places = _scattered(zero[None] == 0, block[None], position[None], zero[None], N, C, S, row[None])
    return places._replace(last=torch.zeros_like(before), tokens=lengths + before, untouched=lengths == 0)


def _scattered(
    real: Tensor, block: Tensor, position: Tensor, document: Tensor, N: int, C: int, R: int, row: Tensor | None = None
) -> Places:
    """Places of real tokens [B,T], each in `block` of its row, and what those blocks are."""
    if row is None:
        row = torch.arange(R, device=real.device)[:, None]
    nowhere = R * N * C
    place = torch.where(real, (row * N + block) * C + position % C, nowhere)
    tokens = torch.arange(real.numel(), device=real.device).view_as(real)
    index = real.new_full((nowhere + 1,), real.numel(), dtype=torch.long).scatter(0, place.flatten(), tokens.flatten())
    cell = torch.where(real, row * N + block, R * N).flatten()
    number, own = (
        real.new_full((R * N + 1,), empty, dtype=torch.long).scatter(0, cell, y.flatten())[:-1].view(R, N)
        for empty, y in ((0, position // C), (-1, document))
    )
    none = tokens.new_zeros(0)
    source = index[:-1].view(R, N * C)
    return Places(C, source, source.int(), place, number, own, none, none, none)


def line_blocks(x: Tensor, M: int, padding: Tensor | None, segments: Tensor | None, outside: tuple[int, int]) -> Tensor:
    """The block of each token of x [B,T,..] when every document is cut into M parts as equal as can be: [B,T] int64.

    `outside` tokens at each end of a row are in no part: M.
    """
    B, T = x.shape[:2]
    real = torch.ones(B, T, dtype=torch.bool, device=x.device) if padding is None else padding
    token = torch.arange(T, device=x.device)
    inside = (token >= outside[0]) & (token < T - outside[1])
    counted = (real & inside).long()
    if segments is None:
        position, length = counted.cumsum(1) - counted, counted.sum(1, keepdim=True)
    else:
        document, documents = _by_value(segments)
        position, length = _rank(torch.where(counted > 0, document, documents))
    return torch.where(inside, position * M // length.clamp_min(1), M)


def _by_value(segments: Tensor) -> tuple[Tensor, int]:
    """The documents of bidirectional attention, numbered from 0, and their number: tokens of one value see each other
    wherever they are."""

    def made() -> tuple[Tensor, int]:
        values, document = segments.unique(return_inverse=True)
        return document, len(values)

    return once(segments, "by value", made)


def _rank(group: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of a group stand before each in its row, and how many the group has there; all [B,T] int64."""
    ordered, order = group.sort(dim=1, stable=True)
    first, after = (torch.searchsorted(ordered, ordered, right=right) for right in (False, True))
    rank = torch.arange(group.shape[1], device=group.device) - first
    before, size = (torch.zeros_like(order).scatter(1, order, y) for y in (rank, after - first))
    return before, size


def grid_blocks(size: tuple[int, int, int], blocks: tuple[int, int, int], outside: tuple[int, int]) -> Tensor:
    """The same for a grid of `size` (t, h, w) cut into `blocks` along each axis: [T] int64."""
    along = [torch.arange(n) * m // n for n, m in zip(size, blocks, strict=True)]
    block = (along[0][:, None, None] * blocks[1] + along[1][:, None]) * blocks[2] + along[2]
    M = blocks[0] * blocks[1] * blocks[2]
    return torch.cat([torch.full((outside[0],), M), block.flatten(), torch.full((outside[1],), M)])


def place_groups(block: Tensor, K: int, longest: int, padding: Tensor | None, segments: Tensor | None) -> Places:
    """The tokens of each of K blocks [B,T] side by side, none of more than `longest`; documents have their own."""
    real = torch.ones_like(block, dtype=torch.bool) if padding is None else padding
    document, documents = (torch.zeros_like(block), 1) if segments is None else _by_value(segments)
    N = K * documents
    group = torch.where(real, document * K + block, N)
    rank, _ = _rank(group)
    places = _scattered(real, group.clamp(max=N - 1), rank, document, N, longest, len(block))
    return places._replace(covered=padding is None)


def number_of_blocks(grid: Grid, blocks: tuple[int, int, int]) -> int:
    """Blocks of a document: those of the grid, and one more where tokens are before or after it."""
    return math.prod(blocks) + (grid.prefix + grid.suffix > 0)


@functools.lru_cache(maxsize=64)
def grid_layout(grid: Grid, blocks: tuple[int, int, int], device: torch.device) -> tuple[Tensor, int]:
    """The block of each token of a grid of up to three axes [T], and the tokens of the largest block."""
    t, h, w = (1,) * (3 - len(grid.size)) + tuple(grid.size)
    block = grid_blocks((t, h, w), blocks, (grid.prefix, grid.suffix))
    # Without asking a tensor: torch.compile would not know the number.
    inside = math.prod([-(-n // m) for n, m in zip((t, h, w), blocks, strict=True)])
    return block.to(device), max(inside, grid.prefix + grid.suffix)


@functools.lru_cache(maxsize=64)
def _whole_grid(grid: Grid, blocks: tuple[int, int, int], B: int, device: torch.device) -> Places:
    block, longest = grid_layout(grid, blocks, device)
    return place_groups(block.expand(B, -1), number_of_blocks(grid, blocks), longest, None, None)


def place_grid(
    grid: Grid, blocks: tuple[int, int, int], x: Tensor, padding: Tensor | None = None, segments: Tensor | None = None
) -> Places:
    """Places of the tokens x [B,T,..] of a grid cut into `blocks` along its axes, and one block of tokens that the grid
    has around it, if any; remembered for grids without padding and segments, but not of fake tensors or in a graph."""
    real = type(x) is Tensor and not torch.compiler.is_compiling()
    if padding is None and segments is None and real:
        with torch.inference_mode(False):  # what is remembered there serves no later training
            return _whole_grid(grid, blocks, x.shape[0], x.device)
    block, longest = (grid_layout if real else grid_layout.__wrapped__)(grid, blocks, x.device)
    return place_groups(block.expand(x.shape[0], -1), number_of_blocks(grid, blocks), longest, padding, segments)


def place_line(
    x: Tensor, M: int, K: int, outside: tuple[int, int], padding: Tensor | None, segments: Tensor | None
) -> Places:
    """The same for a line cut into M blocks; K is M, or M + 1 with a block for tokens without a place."""
    block = line_blocks(x, M, padding, segments, outside)
    return place_groups(block, K, max(-(-x.shape[1] // M), sum(outside)), padding, segments)
