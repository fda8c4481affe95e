"""Gradients of a and b of the normalised kernel f(x) = a + b x (la.py), without what cancels.

With u_t = sum v_i and n_t of the tokens that t sees, M_t = S^T q_t and m_t = z.q_t, so that g_t = a n_t + b m_t, two
sums of a token carry the same gradient, and the rounding of o_t through delta_t = o_t.do_t - g_t dg_t with opposite
signs:

    A_t = a/g_t (do_t.u_t - n_t delta_t)        L_t = q_t.dq_t = b/g_t (do_t.M_t - m_t delta_t)

Where weights are nearly even, both are small differences of large numbers. With the share s_t = a n_t/g_t delta_t drops
out of

    X_t = (1 - s_t) A_t - s_t L_t = a b/g_t^2 (m_t do_t.u_t - n_t do_t.M_t)

    a da = sum X_t + s_t g_t dg_t         b db = sum -X_t + (1 - s_t) g_t dg_t

Both hold for any s_t. Signed features can take the share out of [0, 1], where it would multiply the rounding of A_t and
L_t: it is clamped.
Where the normaliser was guarded it is a constant, delta_t is 0, and a da = A_t, b db = L_t.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens whose sums run side by side: a sum along whole rows would keep few of a GPU's threads busy.
CHUNK = 64


def slope_gradients(
    a: Tensor, b: Tensor, do: Tensor, u: Tensor, n: Tensor, g: Tensor, rg: Tensor, delta: Tensor, along: Tensor,
    dg: Tensor | None, guard: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of a and b, [H] fp32.

    do [B,T,H,Dv]; u [B,T or 1,E,Dv] and n [B,T or 1,E or 1] of KV heads, fp32; g [B,T,H]; rg, delta [B,H,T]: 1/g, 0 at
    padding, and delta; along [blocks,B,T,H]: parts of q.dq; dg [B,T,H] arrives at g.
    """
    if along.is_meta:  # launches are only collected
        return along.sum((0, 1, 2)), along.sum((0, 1, 2))
    E = u.shape[2]
    n = n.expand(-1, -1, E).repeat_interleave(g.shape[2] // E, 2)
    rg, delta, L = rg.mT, delta.mT, along.sum(0)
    seen = (do.unflatten(2, (E, -1)) * u[:, :, :, None]).sum(-1).flatten(2)
    A = a * rg * (seen - n * delta)
    kept = g.abs() > guard
    share = torch.where(kept, (a * n / g).clamp(0.0, 1.0), 0.0)
    X = (1.0 - share) * A - share * L
    Y = torch.where(kept, -X, L)
    if dg is not None:
        mass = torch.where(kept, g * dg, 0.0)
        X, Y = X + share * mass, Y + (1.0 - share) * mass
    return X.sum((0, 1)) / a, Y.sum((0, 1)) / b


def sums_so_far(
    v: Tensor, padding: Tensor | None, segments: Tensor | None, cu: Tensor | None, first: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """u [B,T,E,Dv] and n [B,T,E or 1] in fp32, of the tokens of its document up to each.

    v [B,T,E,Dv]; `padding` [B,T] is True at real tokens; documents begin where `segments` [B,T] change, or at `cu`
    [S+1] of one row; `first`: u [rows,E,Dv] and n [rows,E] of what came before a row's first document, or before each
    sequence of `cu`.
    """
    B, T = v.shape[:2]
    real = v.new_ones(B, T, 1, 1) if padding is None else padding[:, :, None, None].to(v.dtype)
    sums = [_running(y) for y in (v if padding is None else torch.where(padding[:, :, None, None], v, 0.0), real)]
    token = torch.arange(T, device=v.device)
    row, start = torch.arange(B, device=v.device)[:, None], torch.zeros_like(token).expand(B, T)
    if cu is not None:
        sequence = torch.searchsorted(cu[1:].long(), token, right=True)
        row, start = sequence[None], cu[sequence][None].long()
    if segments is not None:
        change = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
        start = torch.where(change, token, 0).cummax(1).values
    if cu is not None or segments is not None:
        # Up to the token before the document: sums of the whole row less those.
        before = [F.pad(y, (0, 0, 0, 0, 1, 0)).take_along_dim(start[:, :, None, None], 1) for y in sums]
        sums = [y - x for y, x in zip(sums, before, strict=True)]
    if first is not None:
        enters = (start == 0)[:, :, None, None] if cu is None else 1.0
        sums = [y + enters * x[row] for y, x in zip(sums, (first[0], first[1][..., None]), strict=True)]
    return sums[0], sums[1][..., 0]


def _running(y: Tensor) -> Tensor:
    """Sums along tokens [B,T,...], fp32: inside chunks, and then over those."""
    T = y.shape[1]
    inside = F.pad(y, (0, 0, 0, 0, 0, -T % CHUNK)).unflatten(1, (-1, CHUNK)).cumsum(2, dtype=torch.float32)
    ends = inside[:, :, -1:]
    return (inside + (ends.cumsum(1) - ends)).flatten(1, 2)[:, :T]
