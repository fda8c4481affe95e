"""MHLA in PyTorch: how summaries of blocks mix, the causal form, the bidirectional form, one step.

A block of queries needs the summaries of the M - 2 blocks before it, and the sum of all older ones. Mixing takes blocks
in groups of Q >= M - 2: they meet their own group and the one before as matrix products, and what lies before that as
a running sum.

Letters: as in mhla.py. R rows (of the batch, or sequences), N blocks of a row, C tokens of a block, Y = Dv, or Dv + 1
where the last value is the normaliser's 1. Rows of queries are [C*G], the G heads of a token side by side (scan.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..layers.arguments import wants_gradients
from .places import Places
from ..layers.scan import scan_states

# The least that a normaliser can be: features that are all zero have none.
GUARD = 1e-6


class MHLAState(NamedTuple):
    """What one layer remembers, in fp32.

    past [B,M-2,E,F,Y]: summaries of the last complete blocks, the newest first; old [B,E,F,Y]: all before those,
    summed; current [B,E,F,Y]: of the block that is not complete; mixed [B,E,F,Y]: what a query of that block reads of
    the complete ones; tokens [B] int64: how many the document has.
    """

    past: Tensor
    old: Tensor
    current: Tensor
    mixed: Tensor
    tokens: Tensor


# ---------------------------------------------------------------- how summaries mix


class Mixing(NamedTuple):
    """The weights of all pairs of blocks, in s groups of Q."""

    own: Tensor  # [R,E,s,Q,Q] of earlier blocks of the same group
    prev: Tensor  # [R,E,s,Q,Q] of the group before
    far: Tensor  # [R,E,s,Q] of the running sum of all before that
    adds: Tensor  # [R,s-2,Q] which blocks of each group join the sum of the group after next
    keeps: Tensor  # [R,s-1] whether the sum goes on from group to group, for a document may have ended

    @classmethod
    def of(cls, w: Tensor, number: Tensor, document: Tensor) -> Mixing:
        """For weights w [E,M,M] by row and distance, and what the blocks are, [R,N] each."""
        M, N = w.shape[-1], number.shape[1]
        Q = min(M, N)
        number, document = (F.pad(y, (0, -N % Q), value=-1).unflatten(1, (-1, Q)) for y in (number, document))
        older = (F.pad(y[:, :-1], (0, 0, 1, 0), value=-1) for y in (number, document))
        own, prev = _weights(w, number, document, number, document), _weights(w, number, document, *older)
        # A sum belongs to the document of the first block that it does not hold.
        owner = F.pad(document[:, :-1, 0], (1, 0))
        far = w[:, number.clamp(0, M - 1), -1].transpose(0, 1) * (document == owner[..., None])[:, None]
        adds, keeps = document[:, :-2] == document[:, 1:-1, :1], owner[:, 1:] == owner[:, :-1]
        return cls(own, prev, far, adds.to(w.dtype), keeps.to(w.dtype))

    def __call__(self, S: Tensor, old: Tensor | None) -> Tensor:
        """What every block reads of those before it: [R,E,N,F,Y] from summaries S of that shape and `old` [R,E,F,Y]."""
        N, (s, Q) = S.shape[2], self.far.shape[2:]
        shape = S.shape[3:]
        S = F.pad(S.flatten(3), (0, 0, 0, s * Q - N)).unflatten(2, (s, Q))
        mixed = self.own @ S
        if s > 1:
            mixed = torch.cat([mixed[:, :, :1], mixed[:, :, 1:] + self.prev[:, :, 1:] @ S[:, :, :-1]], 2)
        if s > 2 or old is not None:
            old = S.new_zeros(*S.shape[:2], S.shape[-1]) if old is None else old.flatten(2)
            added = self.adds[:, None, :, None] @ S[:, :, : max(0, s - 2)]
            added = F.pad(added, (0, 0, 0, 0, s - 1 - added.shape[2], 0))
            sums = scan_states(self.keeps[:, None, :, None], added, old[:, :, None])[..., 0, :]
            mixed = mixed + self.far[..., None] * sums[:, :, :, None]
        return mixed.flatten(2, 3)[:, :, :N].unflatten(3, shape)


def _weights(w: Tensor, number: Tensor, document: Tensor, older: Tensor, owner: Tensor) -> Tensor:
    """The weight of each pair of blocks, [R,s,Q] each: [R,E,s,Q,Q], 0 unless `older` is earlier in its document."""
    M = w.shape[-1]
    distance = number[..., :, None] - older[..., None, :]
    allowed = (distance > 0) & (document[..., :, None] == owner[..., None, :])
    rows = number.clamp(0, M - 1)[..., None].expand_as(distance)
    return w[:, rows, distance.clamp(0, M - 1)].transpose(0, 1) * allowed[:, None]


def mix_at(w: Tensor, block: Tensor, past: Tensor, old: Tensor) -> Tensor:
    """What block number `block` [B] reads: [B,E,F,Y] from past [B,M-2,E,F,Y] and old [B,E,F,Y]."""
    rows = w[:, block.clamp(max=w.shape[-1] - 1)].transpose(0, 1)  # [B,E,M]
    recent = torch.einsum("bed,bdefy->befy", rows[:, :, 1:-1], past)
    return recent + rows[:, :, -1, None, None] * old


# ---------------------------------------------------------------- the forms


def fresh_state(k: Tensor, M: int, Y: int, dtype: torch.dtype) -> MHLAState:
    """A state that has seen nothing, for keys [B,T,E,F]."""
    B, heads = k.shape[0], k.shape[2:]
    part, past = k.new_zeros(B, *heads, Y, dtype=dtype), k.new_zeros(B, M - 2, *heads, Y, dtype=dtype)
    return MHLAState(past, part, part, part, torch.zeros(B, dtype=torch.long, device=k.device))


def may_wait(x: Tensor) -> bool:
    """Whether Python may look at a value on x's device: not in a compiled or recorded call."""
    return not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def mhla_step(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, state: MHLAState, padding: Tensor | None, C: int
) -> tuple[Tensor, MHLAState]:
    """One token: sums [B,1,H,Y] and the state; q [B,1,H,F], k [B,1,E,F], v [B,1,E,Y], zeros at padding."""
    E, M = k.shape[2], w.shape[-1]
    current = state.current + k[:, 0, :, :, None] * v[:, 0, :, None]
    own = w[:, (state.tokens // C).clamp(max=M - 1), 0].T[..., None, None]  # [B,E,1,1]
    o = (q[:, 0].unflatten(1, (E, -1)) @ (state.mixed + own * current)).flatten(1, 2)[:, None]
    real = torch.ones_like(state.tokens, dtype=torch.bool) if padding is None else padding[:, 0]
    tokens = state.tokens + real
    full = real & (tokens % C == 0)
    if may_wait(q) and not bool(full.any()):
        return o, state._replace(current=current, tokens=tokens)
    line = torch.cat([current[:, None], state.past], 1)
    past, old = line[:, : M - 2], state.old + line[:, -1]
    ended = MHLAState(past, old, torch.zeros_like(current), mix_at(w, tokens // C, past, old), tokens)
    return o, _chosen(full, ended, state._replace(current=current, tokens=tokens))


def _chosen(which: Tensor, a: MHLAState, b: MHLAState) -> MHLAState:
    """Rows of a where `which` [B], else of b."""
    return MHLAState(*(torch.where(which.view(-1, *[1] * (x.ndim - 1)), x, y) for x, y in zip(a, b, strict=True)))


def mhla_causal(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, places: Places, state: MHLAState | None
) -> tuple[Tensor, MHLAState]:
    """Sums [B,T,H,Y] over each document, and the state after the last: q [B,T,H,F], k [B,T,E,F], v [B,T,E,Y]."""
    E, M, C, shape = k.shape[2], w.shape[-1], places.size, (q.shape[0], q.shape[1])
    number, document, old = places.number, places.document, None
    qs, ks, vs = (places.rows(y, E, w.dtype) for y in (q, k, v))
    S = ks.mT @ vs
    own = w[:, number.clamp(max=M - 1), 0].transpose(0, 1)[..., None, None]  # [R,E,N,1,1]
    if state is not None:
        old, entering = state.old, (state.current * (document[:, 0] == 0)[:, None, None, None])[:, :, None]
        S = torch.cat([state.past.flip(1).transpose(1, 2), S[:, :, :1] + entering, S[:, :, 1:]], 2)
        ago = torch.arange(2 - M, 0, device=q.device)
        number = torch.cat([(state.tokens // C)[:, None] + ago, number], 1)
        document = F.pad(document, (M - 2, 0))
    mixed = Mixing.of(w, number, document)(S, old)[:, :, number.shape[1] - places.number.shape[1] :]
    if state is not None:
        mixed = torch.cat([mixed[:, :, :1] + own[:, :, :1] * entering, mixed[:, :, 1:]], 2)
    causal = torch.ones(C, C, dtype=w.dtype, device=q.device).tril().repeat_interleave(qs.shape[-2] // C, 0)
    o = qs @ mixed + (own * (qs @ ks.mT) * causal) @ vs
    last = after(S, w, number, document, places, old)
    return places.tokens_of(o, shape), last if state is None else _chosen(places.untouched, state, last)


def after(S: Tensor, w: Tensor, number: Tensor, document: Tensor, places: Places, old: Tensor | None) -> MHLAState:
    """The state of each row's last document, from the summaries S [R,E,N,F,Y] of all its blocks."""
    M, N, block = w.shape[-1], S.shape[2], places.tokens // places.size
    own = document == places.last[:, None]  # [R,N]
    end = torch.where(own, torch.arange(N, device=S.device), -1).amax(1)
    shift = block - number.expand_as(own).gather(1, end.clamp_min(0)[:, None])[:, 0]
    index = (end + shift)[:, None] - torch.arange(M - 1, device=S.device)
    found = (index >= 0) & (index <= end[:, None]) & own.gather(1, index.clamp(0, N - 1))
    index, found = (y[:, :, None, None, None] for y in (index.clamp(0, N - 1), found))
    current, *_ = recent = (S.transpose(1, 2).take_along_dim(index, 1) * found).split([1, M - 2], 1)
    joined = (own & (number <= block[:, None] - (M - 1))).to(S.dtype)
    total = (joined[:, None, None] @ S.flatten(3)).squeeze(2).unflatten(2, S.shape[3:])
    if old is not None:
        total = total + old * (places.last == 0)[:, None, None, None]
    return MHLAState(recent[1], total, current[:, 0], mix_at(w, block, recent[1], total), places.tokens)


def mhla_bidirectional(q: Tensor, k: Tensor, v: Tensor, m: Tensor, places: Places) -> Tensor:
    """Sums [B,T,H,Y] over all tokens of a document; m [E,K,K] weights of block pairs; K blocks to a document."""
    E, K, shape = k.shape[2], m.shape[-1], (q.shape[0], q.shape[1])
    qs, ks, vs = (places.rows(y, E, m.dtype) for y in (q, k, v))
    S = (ks.mT @ vs).unflatten(2, (-1, K))
    mixed = (m[:, None] @ S.flatten(4)).unflatten(4, S.shape[4:]).flatten(2, 3)
    return places.tokens_of(qs @ mixed, shape)


# ---------------------------------------------------------------- the normaliser, and memory


def with_one(v: Tensor, normalise: bool, dtype: torch.dtype) -> Tensor:
    """[v, 1], whose last sum is the normaliser."""
    return F.pad(v.to(dtype), (0, 1), value=1.0) if normalise else v.to(dtype)


def recomputed(form: Any, *inputs: Tensor) -> Any:
    """`form` of the inputs, with nothing but them kept for the backward pass."""
    if wants_gradients(*inputs):
        return checkpoint(form, *inputs, use_reentrant=False, preserve_rng_state=False)
    return form(*inputs)


def divided(sums: Tensor, normalise: bool, padding: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """o [B,T,H,Dv] in `dtype` and the normaliser [B,T,H] of sums [B,T,H,Y]."""
    g = sums.new_ones(sums.shape[:3])
    if normalise:
        g = sums[..., -1].clamp_min(GUARD)
        sums = sums[..., :-1] / g[..., None]
    if padding is not None:
        sums = sums * padding[:, :, None, None]
    return sums.to(dtype), g
