"""Exact softmax in a few heads of a linear layer: groups of query heads that share a KV head.

    o_t = sum_{i <= t} softmax_i(c q_t.k_i) v_i        for the heads of the groups that keep softmax

A few heads do the retrieval of a whole model, and the others need no keys of distant tokens (Bick et al., "Retrieval-
Aware Distillation for Transformer-SSM Hybrids", arXiv 2602.11374). A mechanism computes those others from a site that
has their heads alone, so its parameters and its state are as small as if the heads kept were not there. The decode
state of the heads kept is the keys and values of all tokens, which grows with the text.

What the source's softmax does beyond c q.k is done here, too: a sliding window, a soft cap, sinks (`ScoreOptions`).

Letters: B batch, T new tokens, S tokens in the state, H query heads, Hkv KV heads, G = H/Hkv, K groups that keep
softmax, D key dim, Dv value dim.
"""

from __future__ import annotations

import dataclasses
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .scan import numbered

# Arguments of an architecture's softmax that the heads kept follow, by the names under which it is given them.
FOLLOWED = ("sliding_window", "softcap", "s_aux", "sinks")


class ScoreOptions(NamedTuple):
    """What a layer's softmax does to its scores c q.k: tokens see the last `window` ones (None: all before them), scores
    are cap tanh(score / cap), and each of all H heads has a score of its own for seeing nothing, `sinks` [H].
    """

    window: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None


class HeadState(NamedTuple):
    """Keys [B,S,K,D] and values [B,S,K,Dv] of the tokens so far, and which of them are real tokens of the row's last
    document, [B,S] bool (None: all)."""

    keys: Tensor
    values: Tensor
    real: Tensor | None


class SplitState(NamedTuple):
    """What a mechanism remembers for its heads, and the keys and values of the heads that keep softmax."""

    linear: Any
    softmax: HeadState

    def earlier(self, layout: Any) -> Any:
        """This state as `Earlier` where all later ones begin with its keys, so that a record of some states does not
        hold them several times; else itself. `layout` is the TokenLayout of the call behind it."""
        if layout.scores is not None and layout.scores.window is not None:  # which forgets the first keys
            return self
        return Earlier(self.linear, self.softmax.keys.shape[1], self.softmax.real)


class Earlier(NamedTuple):
    """A `SplitState` of before, of which the keys and values are the first `tokens` ones of a later state; `real` is its
    own."""

    linear: Any
    tokens: int
    real: Tensor | None

    def restored(self, now: SplitState) -> SplitState:
        """The inverse of `SplitState.earlier`, with any state that came after it."""
        keys, values, _ = now.softmax
        return SplitState(self.linear, HeadState(keys[:, : self.tokens], values[:, : self.tokens], self.real))


def score_options(kwargs: dict[str, Any]) -> ScoreOptions:
    """What the arguments of an attention function say of its scores."""
    sinks = kwargs.get("s_aux")
    sinks = kwargs.get("sinks") if sinks is None else sinks
    return ScoreOptions(kwargs.get("sliding_window"), kwargs.get("softcap"), sinks)


@dataclasses.dataclass(frozen=True)
class SoftmaxHeads:
    """The groups of heads of a layer that keep softmax, by the number of their KV head; `scale` is c."""

    heads: int
    kv_heads: int
    groups: tuple[int, ...]
    scale: float
    score_options = staticmethod(score_options)

    def runs(self) -> list[tuple[bool, int, int]]:
        """Neighbouring groups of one kind: whether they keep softmax, the first one and the one behind the last."""
        found, kept = [], [group in self.groups for group in range(self.kv_heads)]
        for keeps, members in groupby(range(self.kv_heads), key=kept.__getitem__):
            numbers = [*members]
            found.append((keeps, numbers[0], numbers[-1] + 1))
        return found

    def split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """y [B,T,H or Hkv,..] as (heads of the mechanism, heads that keep softmax); slices, for an index would be sent
        to the GPU in every call."""
        size = y.shape[2] // self.kv_heads
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for keeps, start, stop in self.runs():
            parts[keeps].append(y[:, :, start * size : stop * size])
        linear, softmax = (own[0] if len(own) == 1 else torch.cat(own, 2) for own in parts)
        return linear, softmax

    def join(self, linear: Tensor, softmax: Tensor) -> Tensor:
        """The inverse of `split`."""
        size, left, parts = self.heads // self.kv_heads, [0, 0], []
        for keeps, start, stop in self.runs():
            own, first = softmax if keeps else linear, left[keeps]
            left[keeps] = first + (stop - start) * size
            parts.append(own[:, :, first : left[keeps]].to(linear.dtype))
        return torch.cat(parts, 2)

    def state(self, linear: Any, softmax: HeadState) -> SplitState:
        """What the mechanism and the heads that keep softmax remember, as one state."""
        return SplitState(linear, softmax)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Any, state: HeadState | None
    ) -> tuple[Tensor, HeadState]:
        """Softmax of the heads kept: q [B,T,K G,D], k [B,T,K,D], v [B,T,K,Dv] -> o [B,T,K G,Dv], and the state.

        `layout` is the TokenLayout of the call; padding outputs 0, and a state belongs to a row's first document.
        """
        sinks = None
        if layout.scores is not None and layout.scores.sinks is not None:
            sinks = self.split(layout.scores.sinks[None, None])[1].flatten()
        scores = ScoreOptions() if layout.scores is None else layout.scores._replace(sinks=sinks)
        return softmax_heads(q, k, v, self.scale, scores, layout.padding, layout.segments, state)


def softmax_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    scores: ScoreOptions,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    state: HeadState | None = None,
) -> tuple[Tensor, HeadState]:
    """Causal softmax over the real tokens of the same document: o [B,T,H,Dv] and the state after the last token.

    q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv]; `padding` [B,T] bool is True at real tokens, the others output 0;
    `segments` [B,T] int numbers documents, and a state that is handed in belongs to a row's first one.
    """
    B, T = q.shape[:2]
    S = 0 if state is None else state.keys.shape[1]
    keys, values = (k, v) if state is None else (torch.cat([state.keys, k], 1), torch.cat([state.values, v], 1))
    held = None if state is None else state.real
    real, document = _real(padding, held, (B, S, T), q.device), None
    if segments is not None:
        own = numbered(segments)
        document = F.pad(own, (S, 0))  # a state is of document 0
    visible = _visible(real, document, scores.window, (S, T), q.device)
    # A padding mask of the new tokens; on the left of a row they see nothing, and their output means nothing.
    o = _attention(q, keys, values, scale, scores, visible, S)
    if padding is not None:
        o = torch.where(padding[:, :, None, None], o, 0.0)
    if document is not None:
        of_last = document == document[:, -1:]
        real = of_last if real is None else real & of_last
    if scores.window is not None:
        first = max(S + T - scores.window + 1, 0)  # the next token sees no earlier one
        keys, values, real = keys[:, first:], values[:, first:], None if real is None else real[:, first:]
    return o, HeadState(keys, values, real)


def _real(padding: Tensor | None, held: Tensor | None, sizes: tuple[int, int, int], device: Any) -> Tensor | None:
    """Which of the S tokens held and the T new ones count, [B,S+T] bool; None: all."""
    B, S, T = sizes
    if padding is None and held is None:
        return None
    before = torch.ones(B, S, dtype=torch.bool, device=device) if held is None else held
    new = torch.ones(B, T, dtype=torch.bool, device=device) if padding is None else padding
    return torch.cat([before, new], 1)


def _visible(
    real: Tensor | None, document: Tensor | None, window: int | None, sizes: tuple[int, int], device: Any
) -> Tensor | None:
    """Which tokens each new one sees, [B or 1,T,S+T] bool; None where that is all up to itself.

    A token always sees itself, so that no row of padding is empty.
    """
    S, T = sizes
    whole = real is None and document is None and (window is None or window >= S + T)
    if whole and (T == 1 or S == 0):
        return None
    place = torch.arange(S + T, device=device)
    distance = place[S:, None] - place
    visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    visible = visible[None]
    if real is not None:
        visible = visible & real[:, None]
    if document is not None:
        visible = visible & (document[:, S:, None] == document[:, None])
    return visible | (distance == 0)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, scores: ScoreOptions, visible: Tensor | None, S: int
) -> Tensor:
    """Attention of q [B,T,H,D] to k [B,S+T,Hkv,D], v [B,S+T,Hkv,Dv]: [B,T,H,Dv]."""
    T, H, Hkv = q.shape[1], q.shape[2], k.shape[2]
    if scores.cap is not None or scores.sinks is not None:
        return _eager(q, k, v, scale, scores, visible, S)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if T == 1:  # the queries of a group as several of one head, so that no key is copied
        mask = None if visible is None else visible[:, None]
        rows = q[:, 0].unflatten(1, (Hkv, -1))  # [B,Hkv,G,D]
        return F.scaled_dot_product_attention(rows, k, v, mask, scale=scale).flatten(1, 2)[:, None]
    if visible is not None and Hkv != H:  # as transformers does: few backends take a mask beside shared keys
        k, v = (y.repeat_interleave(H // Hkv, 1) for y in (k, v))
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        None if visible is None else visible[:, None],
        is_causal=visible is None,
        scale=scale,
        enable_gqa=k.shape[1] != H,
    )
    return o.transpose(1, 2)


def _eager(
    q: Tensor, k: Tensor, v: Tensor, scale: float, scores: ScoreOptions, visible: Tensor | None, S: int
) -> Tensor:
    """`_attention` where scores are capped, or sinks take a share; weights [B,T,S+T] of each head are made."""
    T, Hkv = q.shape[1], k.shape[2]
    q = q.unflatten(2, (Hkv, -1))
    exact = torch.promote_types(q.dtype, torch.float32)
    x = torch.einsum("btkgd,bskd->bkgts", scale * q.to(exact), k.to(exact))
    if scores.cap is not None:
        x = scores.cap * (x / scores.cap).tanh()
    if visible is None:
        visible = torch.ones(T, S + T, dtype=torch.bool, device=q.device).tril(S)[None]
    x = x.masked_fill(~visible[:, None, None], -torch.inf)
    if scores.sinks is not None:
        sink = scores.sinks.to(exact).unflatten(0, (Hkv, -1))[None, :, :, None, None]
        x = torch.cat([x, sink.expand(*x.shape[:-1], 1)], -1)
    weights = x.softmax(-1)[..., : S + T]
    return torch.einsum("bkgts,bskd->btkgd", weights.to(v.dtype), v).flatten(2, 3)
