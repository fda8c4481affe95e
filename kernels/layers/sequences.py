"""Sequences laid end to end in one row, each of which goes on from a state of its own.

What looks back over a few tokens, a window or a convolution, finds them in a longer row: each sequence behind `size`
places that hold the end of what came before it. All is indices, so that nothing waits for the GPU.

Letters: T tokens of the row, S sequences, N = T + S * size tokens of the longer row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def sequence_numbers(cu: Tensor, T: int) -> Tensor:
    """Which sequence each of T tokens is of, [T] int64, for the starts `cu` [S+1]."""
    place = torch.arange(T, device=cu.device, dtype=cu.dtype)
    return torch.searchsorted(cu[1:], place, right=True).clamp_max(len(cu) - 2)


def sequence_places(cu: Tensor, T: int, seen: Tensor | int) -> Tensor:
    """The index of each token in its document, [1,T] int64, of which `seen` (a number or [S]) tokens came before."""
    number = sequence_numbers(cu, T)
    start = cu[:-1].long() - seen
    return (torch.arange(T, device=cu.device) - start[number])[None]


class Spliced(NamedTuple):
    """Places in the longer row."""

    tokens: Tensor  # [T] of each token
    held: Tensor  # [S,size] before each sequence
    ends: Tensor  # [S] behind its last token
    numbers: Tensor  # [T] the sequence of each token

    def join(self, held: Tensor, y: Tensor) -> Tensor:
        """Tokens y [1,T,..] behind what came before them, held [S,size,..]: [1,N,..] in y's dtype."""
        out = y.new_empty(1, y.shape[1] + self.held.numel(), *y.shape[2:])
        out[0].index_copy_(0, self.held.flatten(), held.flatten(0, 1).to(y.dtype))
        out[0].index_copy_(0, self.tokens, y[0])
        return out


def splice(cu: Tensor, T: int, size: int) -> Spliced:
    """The longer row of sequences that start at `cu` [S+1]."""
    number, count = sequence_numbers(cu, T), torch.arange(len(cu) - 1, device=cu.device)
    tokens = torch.arange(T, device=cu.device) + (number + 1) * size
    held = (cu[:-1].long() + count * size)[:, None] + torch.arange(size, device=cu.device)
    return Spliced(tokens, held, cu[1:].long() + (count + 1) * size, number)
