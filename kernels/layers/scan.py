"""Chunk scans with a decay per channel: what gated mechanisms share (GSA's two passes, GLA).

A chunk of C tokens with log-decays g <= 0 and b their cumulative sum inside the chunk couples query t, key i <= t
and channel m by e^{b_t[m]-b_i[m]}. As a matrix product that needs a reference r between two factors,
e^{b_t-b_r} e^{b_r-b_i}. `couplings` covers every pair once:

    inside blocks of w tokens: r is the block's first token, so e^{b_r-b_i} >= 1
    between blocks: the keys of a left half meet the queries of the right half beside it, at widths w, 2w, .. C/2;
    r is the last token of the left half, so both factors are <= 1

w is the largest width at which no block decays by more than e^-RANGE: the whole chunk for common gates, 1 (where
e^{b_r-b_i} is 1) in the worst case. No factor overflows, and a token never depends on what comes after it.

Letters: B batch, T time, E gate (state) heads, G query heads per gate head, M decayed channels, D and Y other dims,
C chunk, N chunks, w width and n number of blocks. Rows of queries are [C*G], the G heads of a token side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import once

# e^44 is the square root of fp32's largest number: a sum of products with one such factor stays finite.
RANGE = 44.0
# e^-30 is 0 beside the rounding of what it is added to; without a floor, b has no digits left after a strong gate.
FLOOR = -30.0


def into_chunks(y: Tensor, C: int, heads: int, dtype: torch.dtype) -> Tensor:
    """[B,T,E*G,Y] -> [B,E,N,C*G,Y] in `dtype`, the tail filled with zeros (log-decay 0, nothing written)."""
    y = F.pad(y.to(dtype), (0, 0, 0, 0, 0, -y.shape[1] % C))
    return y.unflatten(1, (-1, C)).unflatten(3, (heads, -1)).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)


def from_chunks(y: Tensor, C: int, T: int) -> Tensor:
    """The inverse of `into_chunks`: [B,E,N,C*G,Y] -> [B,T,E*G,Y]."""
    return y.unflatten(3, (C, -1)).permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)[:, :T]


def scan_states(decay: Tensor, added: Tensor, S: Tensor) -> Tensor:
    """S_{n+1} = diag(decay_n) S_n + added_n over chunks, from S_0 to S_N: [B,E,N+1,M,D]."""
    states = [S]
    for n in range(added.shape[2]):
        states.append(torch.addcmul(added[:, :, n], decay[:, :, n, :, None], states[-1]))
    return torch.stack(states, 2)


def scan_states_back(decay: Tensor, added: Tensor, S: Tensor) -> Tensor:
    """S_n = diag(decay_n) S_{n+1} + added_n from S_N to S_0, which gradients obey: [B,E,N+1,M,D], S_0 first."""
    return scan_states(decay.flip(2), added.flip(2), S).flip(2)


def scaled(y: Tensor, decay: Tensor) -> Tensor:
    """Rows y [...,C*G,M], each times the decay [...,C,M] of its token."""
    return (y.unflatten(-2, (decay.shape[-2], -1)) * decay[..., None, :]).flatten(-3, -2)


class SegmentMasks(NamedTuple):
    """Where packed documents allow the flow; each broadcasts over heads and slots."""

    reads: Tensor  # [B,1,N,C,1] the token belongs to the document that entered the chunk
    writes: Tensor  # [B,1,N,C,1] the token belongs to the document that leaves it
    keeps: Tensor  # [B,1,N,1] one document entered and leaves
    pairs: Tensor  # [B,1,N,C,C] both tokens belong to one document


def numbered(segments: Tensor) -> Tensor:
    """The documents of `segments` [B,T], from 0 by their changes: a number that comes back is another document."""
    return once(segments, "numbered", lambda: F.pad(segments[:, 1:] != segments[:, :-1], (1, 0)).cumsum(1))


def segment_masks(segments: Tensor, C: int) -> SegmentMasks:
    """The masks for `segments` [B,T]. A state that is handed in belongs to a row's first document."""
    seg = numbered(segments)
    seg = torch.cat([seg, seg[:, -1:].expand(-1, -seg.shape[1] % C)], 1).unflatten(1, (-1, C))
    entered = F.pad(seg[:, :-1, -1], (1, 0))  # [B,N]
    reads = (seg == entered[..., None])[:, None, ..., None]
    writes = (seg == seg[..., -1:])[:, None, ..., None]
    keeps = (seg[..., -1] == entered)[:, None, :, None]
    return SegmentMasks(reads, writes, keeps, (seg[..., :, None] == seg[..., None, :])[:, None])


class Coupling(NamedTuple):
    """Blocks of w tokens whose queries meet their own keys, i <= t (parts=1), or those one block before (parts=2)."""

    width: int
    parts: int
    query_decay: Tensor  # e^{b_t - b_r} [B,E,N,n,w,M]
    key_decay: Tensor  # e^{b_r - b_i} [B,E,N,n,w,M]
    allowed: Tensor | None  # 1 where query and key may meet, [..,w,1,w]; None: everywhere

    def queries(self, y: Tensor) -> Tensor:
        """A view of the rows of y [..,C*G,Y] that ask: [..,n,w*G,Y]."""
        return y.unflatten(-2, (self.query_decay.shape[-3], self.parts, -1))[..., -1, :, :]

    def keys(self, y: Tensor) -> Tensor:
        """A view of the rows of y [..,C,Y] that are asked: [..,n,w,Y]."""
        return y.unflatten(-2, (-1, self.parts, self.width))[..., 0, :, :]

    def mask_(self, scores: Tensor) -> Tensor:
        """Write 0 to the scores [..,n,w*G,w] of pairs that do not meet."""
        if self.allowed is not None:
            scores.unflatten(-2, (self.width, -1)).mul_(self.allowed)
        return scores


class Decays(NamedTuple):
    """Everything that follows from the gates of the chunks."""

    from_start: Tensor  # e^{b_t} [B,E,N,C,M]
    to_end: Tensor  # e^{b_C - b_i} [B,E,N,C,M]
    through: Tensor  # e^{b_C} [B,E,N,M]
    couplings: list[Coupling]


def chunk_decays(g: Tensor, segments: Tensor | None) -> Decays:
    """The decays for the log-gates g [B,E,N,C,M] of all chunks, with 0 between documents."""
    b = g.cumsum(-2)
    from_start, to_end, through = b.exp(), _after(g).exp(), b[..., -1, :].exp()
    w = block_width(b)
    if segments is None:
        return Decays(from_start, to_end, through, couplings(g, w, None))
    masks = segment_masks(segments, g.shape[-2])
    pairs = couplings(g, w, masks.pairs)
    return Decays(from_start * masks.reads, to_end * masks.writes, through * masks.keeps, pairs)


def couplings(g: Tensor, w: int, pairs: Tensor | None) -> list[Coupling]:
    """Couplings that cover every pair i <= t of a chunk once, for g [B,E,N,C,M]; `pairs` as in SegmentMasks.

    Each sums its own gates: differences of b would carry the rounding of a whole chunk of strong gates.
    """
    own = g.unflatten(-2, (-1, w)).cumsum(-2)
    offset = own - own[..., :1, :]
    causal = torch.ones(w, w, dtype=torch.bool, device=g.device).tril()[:, None]
    allowed = causal if pairs is None else causal & _blocks(pairs, w, parts=1)
    found = [Coupling(w, 1, offset.exp(), offset.neg().exp(), allowed.to(g.dtype))]
    while w < g.shape[-2]:
        left, right = g.unflatten(-2, (-1, 2, w)).unbind(-3)
        between = None if pairs is None else _blocks(pairs, w, parts=2).to(g.dtype)
        found.append(Coupling(w, 2, right.cumsum(-2).exp(), _after(left).exp(), between))
        w *= 2
    return found


def _after(g: Tensor) -> Tensor:
    """For each row of g [..,C,M], the sum of the rows below it."""
    return g.flip(-2).cumsum(-2).flip(-2) - g


def block_width(b: Tensor) -> int:
    """The largest power of two at which no block of rows decays by more than e^-RANGE; 1 where values are unknown."""
    w = 1 if torch.compiler.is_compiling() or b.is_meta else b.shape[-2]
    while w > 1 and not bool((b[..., ::w, :] - b[..., w - 1 :: w, :]).amax() <= RANGE):
        w //= 2
    return w


def _blocks(pairs: Tensor, w: int, parts: int) -> Tensor:
    """The blocks of pairs [B,1,N,C,C] that a coupling looks at: [B,1,N,n,w,1,w]."""
    n = pairs.shape[-1] // (w * parts)
    blocks = pairs.unflatten(-1, (n, parts, w))[..., 0, :].unflatten(-3, (n, parts, w))[..., -1, :, :, :]
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., None, :]


# ---------------------------------------------------------------- the pass with the decay on the read side


def values_pass(p: Tensor, v: Tensor, s: Tensor, V_in: Tensor, decays: Decays) -> Tensor:
    """The outputs o [B,E,N,C*G,Dv]."""
    o = scaled(p, decays.from_start) @ V_in
    for c in decays.couplings:
        scores = c.mask_(scaled(c.queries(p), c.query_decay) @ (c.keys(s) * c.key_decay).mT)
        c.queries(o).add_(scores @ c.keys(v))
    return o


def values_back(
    do: Tensor, p: Tensor, v: Tensor, s: Tensor, V_in: Tensor, decays: Decays
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dp, dv and ds of the values pass inside the chunk, and what each chunk adds to dV_in."""
    dp = scaled(do @ V_in.mT, decays.from_start)
    dv, ds = torch.zeros_like(v), torch.zeros_like(s)
    for c in decays.couplings:
        do_c, p_c, s_c = c.queries(do), scaled(c.queries(p), c.query_decay), c.keys(s) * c.key_decay
        scores, dscores = c.mask_(p_c @ s_c.mT), c.mask_(do_c @ c.keys(v).mT)
        c.queries(dp).add_(scaled(dscores @ s_c, c.query_decay))
        c.keys(dv).add_(scores.mT @ do_c)
        c.keys(ds).addcmul_(dscores.mT @ p_c, c.key_decay)
    return dp, dv, ds, scaled(p, decays.from_start).mT @ do


def document_tokens(seen: Tensor, padding: Tensor | None, segments: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Real tokens of each row's last document, [B] int64; `seen` [B] belong to its first."""
    real = torch.ones(shape, dtype=torch.bool, device=seen.device) if padding is None else padding
    if segments is None:
        return seen + real.sum(1)
    document = numbered(segments)
    last = document[:, -1:]
    return torch.where(last[:, 0] == 0, seen, 0) + (real & (document == last)).sum(1)
