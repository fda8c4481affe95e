"""Exact attention to the last W tokens: alone, or beside a mechanism that remembers the rest in a state of constant size.

    near_t = sum_{i <= S or t-W < i <= t} softmax_i(c q_t.k_i) v_i        o_t = w far_t + (1 - w) near_t

Where attention is bidirectional the window has W tokens on each side, t-W <= i <= t+W, and there is no state.

`far` is what the mechanism computes, over all tokens. How much softmax leaves to the tokens that near_t leaves out
depends on the token and on Z_t = sum_i e^{c q_t.k_i}: w_t = sigmoid(theta + u.x_t - a log Z_t), with theta, u and a
learned per head. A mechanism with a normaliser g of its own shares one with the window:
w_t = sigmoid(theta + u.x_t + log g_t - log Z_t).

The first S tokens of a document, its sink (0: none), stay exact because softmax gives them much weight whatever they
say (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453).

u and a start at 0, theta as one number for all heads, until `calibrate` gives each head its theta and a.

The decode state is the first S keys and values of each row's document, aligned to the left, then the last W, to the
right. (Arora et al., "Based", arXiv 2402.18668, and Zhang et al., "LoLCATs", arXiv 2410.10254, show what a short exact
window is worth to a linear layer.)

Letters: B batch, T time, H query heads, Hkv KV heads, G = H/Hkv, D key dim, Dv value dim, W window, S sink,
c <= W queries per block, N blocks. A block of c queries meets the W + c keys that end with its own, and one sink: a
query W tokens into its document stands in the document that its block begins in.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import initialization as init

from ..layers.arguments import Backend, several, use_kernels, wants_gradients
from ..layers.pool import check_pool, each_sequence, on_rows
from ..layout import TokenLayout, in_pass, of_starts, once
from ..mixer import Bounds, Mixer, AttentionSite, full_precision
from ..layers.scan import numbered
from ..layers.sequences import sequence_numbers
from .blend import blend
from .launch import runs_on, window_op
from .step import pool_op, step_op

# Queries of a block, at most, and where documents do not say how many, at least; scores of some blocks made at once.
BLOCK, SHORT, SCORES = 256, 32, 2**26
# From, to, and how many: the theta that calibration tries; a log Z may be as large as that.
THETAS = (-8.0, 24.0, 129)
# The sinks that calibration tries, beside the mean log Z of their head.
SINKS = (-12.0, 12.0, 97)


class Ring(NamedTuple):
    """The first S and the last W tokens, keys [B,S+W,Hkv,D] and values [B,S+W,Hkv,Dv], of a document that had `held`
    [B] int64 tokens so far; places that it did not reach are not read.
    """

    keys: Tensor
    values: Tensor
    held: Tensor


def empty_ring(k: Tensor, v: Tensor, size: int) -> Ring:
    """A state of `size` tokens that has seen nothing, for k [B,T,Hkv,D] and v [B,T,Hkv,Dv]."""
    B = k.shape[0]
    count = torch.zeros(B, dtype=torch.long, device=k.device)
    return Ring(k.new_zeros(B, size, *k.shape[2:]), v.new_zeros(B, size, *v.shape[2:]), count)


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    sink: int = 0,
    scale: float,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Ring | None = None,
    rows: Tensor | None = None,
    places: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Ring]:
    """Softmax over the first `sink` and the last `window` real tokens of the same document: o [B,T,H,Dv],
    log sum_i e^{c q.k_i} [B,T,H] fp32 and the ring after them.

    q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv]; `scale` multiplies q.k; `padding` [B,T] bool is True at real tokens,
    the others output 0; `segments` [B,T] int numbers documents, and a state that is handed in belongs to a row's
    first one. `cu_seqlens` [S+1] int32 with B=1: S sequences laid end to end; `state` then has S rows. `rows` [B] int:
    `state` is a pool, of which those rows are the call's (below 0: padding); they are changed in place. `places` [B,1] int64
    may then say how many tokens each has seen; it is not read beside padding. Time grows with
    T * window, and so does the memory of the PyTorch path. `backend`: `auto` runs the Triton kernels on a GPU where no
    state goes in, for one token after a state, and for sequences laid end to end without gradients; else PyTorch. The
    others insist.
    """
    check_pool(rows, state, q.shape[0], segments, cu_seqlens)
    (B, T, H, D), W = q.shape, window
    if T == 0:
        ring = empty_ring(k, v, sink + W) if state is None else state
        return q.new_zeros(B, 0, H, v.shape[-1]), q.new_zeros(B, 0, H, dtype=torch.float32), ring
    obstacle = runs_on(q.device, (q.dtype, k.dtype, v.dtype), D, v.shape[-1])
    if several(cu_seqlens) is None and state is None:
        cu_seqlens = None
    if cu_seqlens is not None:
        if wants_gradients(q, k, v, *(() if state is None else state[:2])):
            obstacle = obstacle or "sequences laid end to end, and gradients are wanted"
        sequences = _spliced if use_kernels(backend, obstacle) else _each
        return sequences(q, k, v, cu_seqlens, state, (sink, W), scale)
    if state is not None:
        obstacle = _step_obstacle(q, k, v, segments, state)
        if use_kernels(backend, obstacle and f"a state goes in, and {obstacle}"):
            known = places if rows is not None and padding is None else None
            return _step(q, k, v, *state, *(None,) * 5, padding, W, sink, scale, rows, known)
    whole = partial(_whole, q, k, v, (sink, W, T), scale, segments)
    if rows is not None:
        return on_rows(whole, state, rows, padding, T)
    return whole(padding, state, kernels=state is None and use_kernels(backend, obstacle))


def _whole(
    q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, int, int], scale: float, segments: Tensor | None, padding: Tensor
    | None, state: Ring | None, kernels: bool = False,
) -> tuple[Tensor, Tensor, Ring]:  # fmt: skip
    """What `window` returns for any number of tokens; `sizes` are S, W, T."""
    sink, W, _ = sizes
    order: Tensor | None = None
    if padding is not None:  # real tokens first, so that places count real tokens only
        order = padding.logical_not().long().argsort(dim=1, stable=True)
        q, k, v = (y.take_along_dim(order[:, :, None, None], 1) for y in (q, k, v))
    shared = segments if state is None and padding is None else None
    if kernels:
        spans = once(shared, ("window spans", W, sink), lambda: _spans(q, padding, segments, order, sizes))
        o, mass, _ = window_op(q, k, v, spans.begin, spans.end, W, sink, scale)
        ring = spans.state(k, v, sink, W)
    else:
        before = empty_ring(k, v, sink + W) if state is None else state
        keys, values = torch.cat([before.keys, k], 1), torch.cat([before.values, v], 1)  # [B,S+W+T,..]
        places = once(shared, ("window", W, sink), lambda: _places(before.held, padding, segments, order, sizes))
        o, mass = _blocks(q, keys, values, places.met, W, scale)
        ring = places.state(keys, values)
    if order is not None and padding is not None:
        back = order.argsort(1)
        o, mass = o.take_along_dim(back[:, :, None, None], 1), mass.take_along_dim(back[:, :, None], 1)
        o = o * padding[:, :, None, None]
    return o, mass, ring


def window_around(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, sink: int = 0, scale: float, padding: Tensor | None = None, segments:
    Tensor | None = None, cu_seqlens: Tensor | None = None,
)-> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax over the first `sink` real tokens of the same document, at most `window`, and over those at most `window`
    before or behind: o and log Z as of `window`, whose arguments these are. It runs in PyTorch."""
    T, S, W = q.shape[1], sink, window
    if T == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3], dtype=torch.float32)
    if cu_seqlens is not None:
        segments = torch.searchsorted(cu_seqlens[1:], torch.arange(T, device=q.device), right=True)[None]
    order: Tensor | None = None
    if padding is not None:  # real tokens first, so that places count real tokens only
        order = padding.logical_not().long().argsort(dim=1, stable=True)
        q, k, v = (y.take_along_dim(order[:, :, None, None], 1) for y in (q, k, v))
    shared = segments if padding is None and cu_seqlens is None else None
    met = once(shared, ("window around", W, S), lambda: _met_around(q, padding, segments, order, (S, W, T)))
    # Token i is at place S + W + i of S + 2 W + T, and the query beside it meets W places on each side.
    keys, values = (F.pad(y, (0, 0, 0, 0, S + W, W)) for y in (k, v))
    o, mass = _blocks(q, keys, values, met, 2 * W, scale)
    if order is not None and padding is not None:
        back = order.argsort(1)
        o, mass = o.take_along_dim(back[:, :, None, None], 1), mass.take_along_dim(back[:, :, None], 1)
        o = o * padding[:, :, None, None]
    return o, mass


def _met_around(
    q: Tensor, padding: Tensor | None, segments: Tensor | None, order: Tensor | None, sizes: tuple[int, int, int]
) -> _Met:
    """What the queries of `window_around` meet; `order` [B,T] puts real tokens first; `sizes` are S, W, T."""
    (S, W, T), B, device = sizes, len(q), q.device
    if segments is not None:
        segments = numbered(segments)
        segments = segments if order is None else segments.take_along_dim(order, 1)
    # A query that is more than W tokens into its document has to stand in the one that its block begins in.
    c = min(T, BLOCK, max(W, SHORT) if segments is None else W)
    document, begin = _documents(torch.zeros(B, dtype=torch.long, device=device), padding, segments, W, (B, T))
    tail = -T % c
    document = F.pad(document, (0, W + tail), value=-1).unfold(1, 2 * W + c, c)  # [B,N,2W+c]
    ahead = torch.arange(2 * W + c, device=device) - torch.arange(c, device=device)[:, None]
    visible = (document[:, :, W : W + c, None] == document[:, :, None, :]) & (ahead >= 0) & (ahead <= 2 * W)
    # What is at most W tokens away must not count twice.
    place = F.pad(torch.arange(T, device=device) - begin, (0, tail)).unflatten(1, (-1, c))
    visible = torch.cat([place[..., None] - W > torch.arange(S, device=device), visible], -1)
    sinks = S + W + begin[:, ::c, None] + torch.arange(S, device=device)
    return _Met(~visible, torch.arange(B, device=device)[:, None, None], sinks.clamp_max(S + 2 * W + T - 1))


def _each(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, state: Ring | None, sizes: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor, Ring]:
    """`window` of sequences that begin at `cu` [n+1], one after the other; `sizes` are S, W."""
    sink, W = sizes

    def run(q: Tensor, k: Tensor, v: Tensor, state: Ring | None) -> tuple[Tensor, Tensor, Ring]:
        return _whole(q, k, v, (sink, W, q.shape[1]), scale, None, None, state)

    found: tuple[Tensor, Tensor, Ring] = each_sequence(run, cu, state, q=q, k=k, v=v)
    return found


class _Ends(NamedTuple):
    """Where the kernel and the rings of sequences laid end to end look. With rings of R places the kernel gets a longer
    row, in which each of the n sequences stands behind what its ring holds; R=0: their own row."""

    order: Any  # [n*R+T] of each place of the longer row, among all places of the rings and the tokens behind
    queries: Any  # [n*R+T] the token that it is, any for a place of a ring
    tokens: Any  # [T] the places of the tokens; like the two before it None where R=0
    starts: Tensor  # [1,n*R+T] int32 where the document of each place begins
    places: Tensor  # [n*(S+W)] of the tokens that the rings hold afterwards
    reached: Tensor  # [n,S+W,1,1] the document reached them
    held: Tensor  # [n] its tokens then


def _ends_of(cu: Tensor, T: int, held: Tensor | None, sizes: tuple[int, int]) -> _Ends:
    """For sequences that begin at `cu` [n+1], whose rings have seen `held` [n] tokens; None: there are no rings."""
    (sink, W), n, device, cu, number = sizes, len(cu) - 1, cu.device, cu.long(), sequence_numbers(cu, T)
    R, count, length = 0 if held is None else sink + W, torch.arange(n, device=device), cu.diff()
    real = torch.zeros_like(length) if held is None else held.clamp_max(R)
    ends = cu[1:] + (count + 1) * R
    begin = ends - length - real
    starts: Tensor = begin[number]
    order = queries = tokens = None
    if held is not None:
        index = torch.arange(R, device=device)
        own = index - (R - real)[:, None]  # place among the real ones, below 0 for none
        # Of its real places, moved to the right, what only the sink holds, then the window.
        source = torch.where(own < (real - held.clamp_max(W))[:, None], own, index) + count[:, None] * R
        before = (cu[:-1] + count * R)[:, None] + index
        tokens = torch.arange(T, device=device) + (number + 1) * R
        order, starts, in_row = cu.new_empty(n * R + T), cu.new_empty(n * R + T), starts
        # Places that hold nothing are documents of their own, of a token that there is.
        order[before] = torch.where(own >= 0, source, n * R + cu[:-1, None].clamp_max(T - 1))
        starts[before] = torch.where(own >= 0, begin[:, None], before)
        order[tokens] = n * R + torch.arange(T, device=device)
        starts[tokens] = in_row
        queries = (order - n * R).clamp_min(0)
    recent = ends[:, None] - W + torch.arange(W, device=device)
    places = torch.cat([begin[:, None] + torch.arange(sink, device=device), recent], 1)
    reached = ((places >= begin[:, None]) & (places < ends[:, None]))[:, :, None, None]
    after = length if held is None else held + length
    return _Ends(
        order, queries, tokens, starts.int()[None], places.clamp(0, len(starts) - 1).flatten(), reached, after
    )


def _spliced(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, state: Ring | None, sizes: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor, Ring]:
    """`_each` in one launch."""
    (sink, W), T, n = sizes, q.shape[1], len(cu) - 1
    held = None if state is None else state.held
    if held is None:
        ends = of_starts(cu, ("window", T, sizes), lambda starts: _ends_of(starts, T, None, sizes))
    else:
        ends = in_pass(cu, ("window after", T, sizes), lambda: _ends_of(cu, T, held, sizes))
    if state is not None:
        q = q.index_select(1, ends.queries)
        k, v = (
            torch.cat([ring.flatten(0, 1).to(y.dtype), y[0]]).index_select(0, ends.order)[None]
            for ring, y in zip(state[:2], (k, v), strict=True)
        )
    o, mass, _ = window_op(q, k, v, ends.starts, None, W, sink, scale)
    if state is not None:
        o, mass = o.index_select(1, ends.tokens), mass.index_select(1, ends.tokens)
    keys, values = (y[0].index_select(0, ends.places).view(n, sink + W, *y.shape[2:]) * ends.reached for y in (k, v))
    return o, mass, Ring(keys, values, ends.held)


def _step(*inputs: Any) -> tuple[Tensor, Tensor, Ring]:
    """The kernel of one decode step, given the fields of its StepCall."""
    ring, rows = inputs[3:6], inputs[-2]
    if rows is not None:
        return *pool_op(*inputs), Ring(*ring)
    o, mass, *after = step_op(*inputs)
    return o, mass, Ring(*after)


def _step_obstacle(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, state: Ring) -> str:
    """Why the kernel of one decode step cannot take this call; empty when it can."""
    if q.shape[1] != 1 or segments is not None:
        return "there are several tokens or documents"
    if wants_gradients(q, k, v, *state[:2]):
        return "gradients are wanted"
    return runs_on(q.device, (q.dtype, k.dtype, v.dtype, state.keys.dtype, state.values.dtype), q.shape[3], v.shape[3])


# ---------------------------------------------------------------- naive form


def naive_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    sink: int = 0,
    scale: float,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Softmax over the first `sink` and the last `window` real tokens of the same document, query by query, for
    checking: arguments and o as of `window`, in the dtype of the inputs."""
    B, T, H, _ = q.shape
    o = v.new_zeros(B, T, H, v.shape[-1])
    for b in range(B):
        real = [t for t in range(T) if padding is None or padding[b, t]]
        for place, t in enumerate(real):
            document: list[int] = []
            for i in reversed(real[: place + 1]):
                if segments is not None and segments[b, i] != segments[b, t]:
                    break
                document.insert(0, i)
            seen = sorted({*document[:sink], *document[-window:]})
            for h in range(H):
                own = h * k.shape[2] // H
                o[b, t, h] = torch.softmax(scale * k[b, seen, own] @ q[b, t, h], 0) @ v[b, seen, own]
    return o


class _Met(NamedTuple):
    """What blocks of c queries meet; a place is among S+W tokens and the T behind."""

    hidden: Tensor  # [B,N,c,S+W+c] the query does not meet the key
    rows: Tensor  # [B,1,1] the number of each row
    sinks: Tensor  # [B,N,S] places of the first tokens of the document that each block begins in


class _Places(NamedTuple):
    """What follows from the documents alone; the first S+W places are the state's."""

    met: _Met
    last: Tensor  # [B,1,S+W] of what the state after the input holds
    held: Tensor  # [B] how many tokens its document has then

    def state(self, keys: Tensor, values: Tensor) -> Ring:
        """The state after the input, from keys and values [B,S+W+T,..]."""
        rows = self.met.rows
        return Ring(keys[rows, self.last][:, 0], values[rows, self.last][:, 0], self.held)


def _places(
    count: Tensor, padding: Tensor | None, segments: Tensor | None, order: Tensor | None, sizes: tuple[int, int, int]
) -> _Places:
    """Where rows look whose state had `count` [B] tokens; `order` [B,T] puts real tokens first; `sizes` are S, W, T."""
    (S, W, T), B, device = sizes, len(count), count.device
    document, begin, last, held = _ends(count, padding, segments, order, sizes)
    c = min(W, T, BLOCK)
    tail = -T % c
    document = F.pad(document, (0, tail), value=-1).unfold(1, W + c, c)  # [B,N,W+c]
    visible = (document[:, :, W:, None] == document[:, :, None, :]) & _band(W, c, device)
    # A token always sees itself, so that no row of padding is empty.
    visible = visible | torch.eye(c, W + c, dtype=torch.bool, device=device).roll(W, 1)
    # What is still among the last W must not count twice.
    place = F.pad(torch.arange(T, device=device) - begin, (0, tail)).unflatten(1, (-1, c))
    visible = torch.cat([place[..., None] - W >= torch.arange(S, device=device), visible], -1)
    rows = torch.arange(B, device=device)[:, None, None]
    return _Places(_Met(~visible, rows, _first(begin[:, ::c], sizes)), last, held)


def _ends(
    count: Tensor, padding: Tensor | None, segments: Tensor | None, order: Tensor | None, sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `_documents` gives, and `last` and `held` of `_Places`; arguments as there."""
    (S, W, T), B, device = sizes, len(count), count.device
    final: Tensor | None = None
    if segments is not None:
        segments = numbered(segments)
        final = segments[:, -1:]
        segments = segments if order is None else segments.take_along_dim(order, 1)
    document, begin = _documents(count, padding, segments, W, (B, T))
    # The state after the input is of the document of the last real token.
    real: Any = T
    own = begin[:, -1:]
    if padding is not None:
        real = padding.long().sum(1, keepdim=True)
        own = begin.take_along_dim((real - 1).clamp_min(0), 1)
    held = real - own
    if padding is not None and final is not None:
        # A document may have begun with padding alone.
        held = torch.where(document.take_along_dim(real + W - 1, 1) == final, held, 0)
    ending = (S + real + torch.arange(W, device=device)).expand(B, W)
    return document, begin, torch.cat([_first(own, sizes), ending[:, None]], 2), held[:, 0]


class _Spans(NamedTuple):
    """What the kernels need to know of documents, and what `_Places` says of the state after the input; None but for
    `held` where every row is one document.
    """

    begin: Tensor | None  # [B,T] int32 where the document of each token begins, padding in the last
    end: Tensor | None  # [B,T] int32 behind its last token
    last: Tensor | None  # [B,S+W] of the tokens that the state holds
    held: Tensor  # [B]

    def state(self, k: Tensor, v: Tensor, S: int, W: int) -> Ring:
        """The state after k and v [B,T,..]."""
        if self.last is None:
            missing = [max(n - k.shape[1], 0) for n in (S, W)]
            parts = [(y[:, :S], y[:, -W:]) for y in (k, v)]
            if any(missing):
                first, recent = (0, 0, 0, 0, 0, missing[0]), (0, 0, 0, 0, missing[1], 0)
                parts = [(F.pad(one, first), F.pad(two, recent)) for one, two in parts]
            keys, values = (torch.cat(both, 1) for both in parts)
        else:
            keys, values = (y.take_along_dim(self.last[:, :, None, None], 1) for y in (k, v))
        return Ring(keys, values, self.held)


def _spans(
    q: Tensor, padding: Tensor | None, segments: Tensor | None, order: Tensor | None, sizes: tuple[int, int, int]
) -> _Spans:
    """The documents of q [B,T,..], which no state came before; arguments as for `_places`."""
    (S, W, T), B = sizes, len(q)
    if padding is None and segments is None:
        return _Spans(None, None, None, torch.full((B,), T, device=q.device))
    count = torch.zeros(B, dtype=torch.long, device=q.device)
    _, begin, last, held = _ends(count, padding, segments, order, sizes)
    place = torch.arange(T, device=q.device)
    following = F.pad(torch.where(begin == place, place, T)[:, 1:], (0, 1), value=T)
    end = following.flip(1).cummin(1).values.flip(1)
    return _Spans(begin.int(), end.int(), (last[:, 0] - S - W).clamp_min(0), held)


def _documents(
    count: Tensor, padding: Tensor | None, segments: Tensor | None, W: int, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The document number of the last W tokens and of each token of the input, real ones first: [B,W+T] int64, -1 for
    none. And where in the input the document of each of its tokens begins: [B,T] int64, below 0 what began before it.
    """
    device = count.device
    own = torch.zeros(shape, dtype=torch.long, device=device) if segments is None else segments
    if padding is not None:
        real = torch.arange(shape[1], device=device) < padding.long().sum(1, keepdim=True)
        own = torch.where(real, own, -1)
    held = torch.arange(W, device=device) >= W - count[:, None]
    # What came before belongs to document 0, of which only padding may be left.
    changed = own > F.pad(own[:, :-1], (1, 0))
    begin = torch.where(changed, torch.arange(shape[1], device=device), -count[:, None]).cummax(1).values
    return torch.cat([torch.where(held, 0, -1), own], 1), begin


def _blocks(q: Tensor, keys: Tensor, values: Tensor, places: _Met, W: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every query to what it meets of the W tokens and its block, and of the sink, and its
    log-normaliser. Without gradients the scores of some blocks at a time are made, SCORES numbers or those of one."""
    (B, T, H, _), Hkv, c = q.shape, keys.shape[2], places.hidden.shape[2]
    S, tail = keys.shape[1] - W - T, -T % c
    q = _lengthened(q, tail).unflatten(1, (-1, c)).unflatten(3, (Hkv, -1))  # [B,N,c,Hkv,G,D]
    last = [_lengthened(y[:, S:], tail).unfold(1, W + c, c) for y in (keys, values)]  # [B,N,Hkv,D,W+c]
    first = [y[places.rows, places.sinks].movedim(2, -1) for y in (keys, values)]  # [B,N,Hkv,D,S]

    def some(n: slice) -> tuple[Tensor, Tensor]:
        k, v = (torch.cat([x[:, n], y[:, n]], -1) if S else y[:, n] for x, y in zip(first, last, strict=True))
        return _attend(q[:, n], k, v, places.hidden[:, n], scale)

    N, each = q.shape[1], B * H * c * (S + W + c)
    if wants_gradients(q, keys, values) or N * each <= SCORES:
        o, mass = some(slice(None))
    else:
        step = max(1, SCORES // each)
        o, mass = (torch.cat(y, 1) for y in zip(*(some(slice(n, n + step)) for n in range(0, N, step)), strict=True))
    return o.flatten(3, 4).flatten(1, 2)[:, :T], mass.flatten(3, 4).flatten(1, 2)[:, :T]


def _attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Blocks of queries [B,N,c,Hkv,G,D] and what they meet, keys [B,N,Hkv,D,K]: o [B,N,c,Hkv,G,Dv] and log Z."""
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bnckgd,bnkdw->bnckgw", scale * q.to(exact), keys.to(exact))
    scores = scores.masked_fill(hidden[:, :, :, None, None], -torch.inf)
    weights, mass = _Softmax.apply(scores)  # mass [B,N,c,Hkv,G]
    return torch.einsum("bnckgw,bnkdw->bnckgd", weights.to(values.dtype), values), mass


def _lengthened(y: Tensor, tail: int) -> Tensor:
    """y [B,T,..] and `tail` tokens of zeros; padding by nothing would copy."""
    return F.pad(y, (0, 0, 0, 0, 0, tail)) if tail else y


class _Softmax(torch.autograd.Function):
    """softmax(s) and logsumexp(s) over the last dimension. Apart, they would pass over all scores twice as often."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor)-> tuple[Tensor, Tensor]:
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights)
        # The largest weight is e^{s - mass} of the largest score.
        return weights, scores.amax(-1) - weights.amax(-1).log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_weights: Tensor, d_mass: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        return torch.addcmul(d_scores, weights, d_mass[..., None])


def _first(begin: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """The places of the first S tokens [B,N,S] of documents that begin at `begin` [B,N]; of a shorter one, of whatever
    follows. `sizes` are S, W, T.
    """
    S, W, T = sizes
    count = torch.arange(S, device=begin.device)
    place = begin[..., None] + count  # in the input; what came before it is in the state
    return torch.where(place < 0, count, S + W + place).clamp_max(S + W + T - 1)


def _band(W: int, c: int, device: torch.device) -> Tensor:
    """Query r of a block sees its places r+1 .. r+W: [c,W+c] bool."""
    ahead = torch.arange(W + c, device=device) - torch.arange(c, device=device)[:, None]
    return (ahead >= 1) & (ahead <= W)


def _of_layout(
    q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, state: Ring | None, sizes: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor, Ring]:
    """`window` of a causal layout; autocast would round its scores to half precision. `sizes` are S, W."""
    sink, W = sizes
    with full_precision(q.device):
        return window(
            q, k, v, window=W, sink=sink, scale=scale, padding=layout.padding, segments=layout.segments, cu_seqlens=layout.cu_seqlens,
            rows=layout.rows, places=layout.places, state=state,
        )  # fmt: skip


class Window(nn.Module):
    """The window of one mixer, and per query head and token how much of the mechanism beside it comes through."""

    in_fp32 = ("far_logit", "near_share")

    def __init__(self, hidden: int, heads: int, window: int, sink: int, scale: float, shared: bool) -> None:
        super().__init__()
        self.window, self.sink, self.scale, self.shared = window, sink, scale, shared
        self.far_logit = nn.Parameter(torch.empty(heads))
        self.far_gate = nn.Parameter(torch.empty(heads, hidden))
        if not shared:
            self.near_share = nn.Parameter(torch.empty(heads))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # Least perplexity of a just converted model (docs/measurements/window.md), among -20, -6, -4, -2, -1, 0, 1.
        init.constant_(self.far_logit, -4.0 if self.shared else -1.0)
        init.zeros_(self.far_gate)
        if not self.shared:
            init.zeros_(self.near_share)

    def forward(
        self, far: Tensor, mass: Tensor | None, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, state:
        Ring | None,
    )-> tuple[Tensor, Ring | None]:  # fmt: skip
        """The mechanism's output `far` [B,T,H,Dv] mixed with exact attention to the window, and the ring.

        `mass` [B,T,H]: the mechanism's normaliser, where it has one; `x` [B,T,hidden].
        """
        gate = self.gate(x)
        if state is not None and not wants_gradients(far, gate) and not _step_obstacle(q, k, v, layout.segments, state):
            share = None if self.shared else self.near_share
            beside: Any = far, gate, self.far_logit, share, mass, layout.padding
            o, _, after = _step(q, k, v, *state, *beside, self.window, self.sink, self.scale, layout.rows, None)
            return o, after
        near, own_mass, ring = self.attend(q, k, v, layout, state)
        o = self.blended(far, mass, near, own_mass, self.far_logit.float() + gate.float())
        if layout.rows is not None:  # of padding log Z may be anything
            o = torch.where((layout.rows >= 0)[:, None, None, None], o, 0.0)
        return o, ring

    def gate(self, x: Tensor) -> Tensor:
        """u.x [B,T,H] of hidden states x [B,T,hidden]."""
        return F.linear(x, self.far_gate.to(x.dtype))

    def logit(self, x: Tensor) -> Tensor:
        """theta + u.x [B,T,H] fp32."""
        return self.far_logit.float() + self.gate(x).float()

    def blended(
        self, far: Tensor, mass: Tensor | None, near: Tensor, own_mass: Tensor, logit: Tensor, plain: bool = False
    ) -> Tensor:
        """w far + (1 - w) near; `mass` [B,T,H] the mechanism's normaliser, `own_mass` log Z of the window, `logit` that
        of w but for both."""
        logit = logit - self.near_share.float() * own_mass if mass is None else logit + mass.log() - own_mass
        return blend(far, near, torch.sigmoid(logit), plain=plain)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, state: Ring | None
    ) -> tuple[Tensor, Tensor, Ring | None]:
        """Exact attention to the window: o [B,T,H,Dv], log Z [B,T,H] fp32, and the ring; none where it is
        bidirectional."""
        if layout.causal:
            return _of_layout(q, k, v, layout, state, (self.sink, self.window), self.scale)
        with full_precision(q.device):
            o, mass = window_around(
                q, k, v, window=self.window, sink=self.sink, scale=self.scale, padding=layout.padding,
                segments=layout.segments, cu_seqlens=layout.cu_seqlens,
            )  # fmt: skip
        return o, mass, None

    @torch.no_grad()
    def calibrate(
        self, far: Tensor, mass: Tensor | None, q: Tensor, k: Tensor, v: Tensor, target: Tensor, layout: TokenLayout, *,
        free: bool,
    )-> Tensor:  # fmt: skip
        """Let each head start from the theta, and the a, whose mixture is nearest to softmax's output [B,T,H,Dv].

        Arguments as for `forward`, u taken for 0. Returns what to multiply `far` with, [H]: 1 unless it is `free`.
        """
        near, own_mass, _ = self.attend(q, k, v, layout, None)
        far, near, target = far.float(), near.float(), target.float()
        thetas, found, factors = torch.linspace(*THETAS, device=q.device), [], []
        pairs = ((far, far), (far, near), (far, target), (near, near), (near, target))
        ff, fn, ft, nn_, nt = ((x * y).sum(-1) for x, y in pairs)  # [B,T,H]
        for a in (0.0, 0.5, 1.0) if mass is None else (1.0,):
            logit = -a * own_mass if mass is None else mass.log() - own_mass
            for theta in thetas:
                w = torch.sigmoid(theta + logit)
                # ||factor w far + (1 - w) near - target||^2, but for what depends on the target alone
                square, product = (w * w * ff).sum((0, 1)), (w * (ft - (1.0 - w) * fn)).sum((0, 1))
                factor = (product / square.clamp_min(1e-12)).clamp_min(0.1) if free else torch.ones_like(product)
                rest = ((1.0 - w) * ((1.0 - w) * nn_ - 2.0 * nt)).sum((0, 1))
                found.append(rest + factor * (factor * square - 2.0 * product))
                factors.append(factor)
        best = torch.stack(found).argmin(0)  # [H]
        self.far_logit.copy_(thetas[best % len(thetas)])
        if not self.shared:
            self.near_share.copy_(0.5 * (best // len(thetas)))
        return torch.stack(factors).gather(0, best[None])[0]


Mixer.window_type = Window


# ---------------------------------------------------------------- the window alone


class SinkWindow(Mixer):
    """Softmax over the last W tokens and the first S of each document, and over nothing else: no memory beside it, no
    new parameters. It computes what softmax does as long as a text has at most S + W tokens.

    `--kept-window` makes kept softmax layers this, so that their memory does not grow (arXiv 2309.17453).

    With `sink_logit` each head has a learned number s in its denominator, which takes the weight that the first tokens
    had (gpt-oss, arXiv 2508.10925, and Granite-SWA have it): o = sum_i e^{c q.k_i} v_i / (e^s + sum_i e^{c q.k_i}).
    """

    title = "Exact softmax over the last tokens and the first ones"
    paper = "arXiv 2309.17453"
    state_formula = "b (S + W) Hkv (D + Dv) + 8: the last W and the first S keys and values, of b bytes a number"
    about = {
        "window": "softmax over this many last tokens",
        "sink": "softmax also over this many first tokens of each document",
        "sink_logit": "a learned number of each head in its softmax's denominator; finetune fits it to the teacher",
    }
    pools = True
    in_fp32 = ("sinks",)
    sinks: Tensor | None

    def __init__(
        self,
        site: AttentionSite,
        *,
        window: Annotated[int, Bounds(1, 65536)] = 1024,
        sink: Annotated[int, Bounds(0, 1024)] = 4,
        sink_logit: bool = False,
    ) -> None:
        super().__init__(site)
        self.window, self.sink = window, sink
        self.register_parameter("sinks", nn.Parameter(torch.empty(site.heads)) if sink_logit else None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """0, as Granite-SWA begins, until `calibrate` fits them."""
        if self.sinks is not None:
            init.zeros_(self.sinks)

    @torch.no_grad()
    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, o: Tensor, o_teacher: Tensor, layout: TokenLayout | None = None,
        gates: Any = None,
    ) -> None:  # fmt: skip
        """Each head's sink becomes the one with which its output is nearest to the teacher's."""
        if self.sinks is None:
            return
        near, mass, _ = self._attend(q, k, v, TokenLayout() if layout is None else layout, None)
        near, target, center = near.float(), o_teacher.float(), mass.mean((0, 1))
        square, product = near.square().sum(-1), (near * target).sum(-1)
        sinks = center + torch.linspace(*SINKS, device=q.device)[:, None]  # [N,H]
        kept = (torch.sigmoid(mass - sink) for sink in sinks)
        # ||y near - target||^2, but for what depends on the target alone
        errors = torch.stack([(y * (y * square - 2.0 * product)).sum((0, 1)) for y in kept])
        self.sinks.copy_(sinks.gather(0, errors.argmin(0)[None])[0])

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, state: Any) -> tuple[Tensor, Any]:
        o, mass, state = self._attend(q, k, v, layout, state)
        if self.sinks is not None:
            o = o * torch.sigmoid(mass - self.sinks.float())[..., None].to(o.dtype)
        return o, state

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, state: Any) -> tuple[Tensor, Tensor, Any]:
        return _of_layout(q, k, v, layout, state, (self.sink, self.window), self.site.scale)

    def state_bytes(self, tokens: int, item: int = 4) -> int:
        row = self.site.kv_heads * (self.site.key_dim + self.site.value_dim) * item
        return super().state_bytes(tokens, item) + (self.sink + self.window) * row + 8
