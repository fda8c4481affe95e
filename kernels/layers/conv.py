"""A short causal convolution along the tokens of each document, a filter per channel, with its state for decoding.

    out_t = act(bias + sum_{i<K} taps_i y_{t-(K-1)+i})        the last tap weighs the token itself; act: none, or SiLU

Padding is left out of the count of tokens, and nothing crosses from one document to the next. In PyTorch that is some
ten passes over y; on a GPU it is one kernel each way, but beside padding, and one launch for q, k and v of a decode step
whose last tokens lie in a server's pool. Backwards, with p_t = do_t act'(..):

    dy_t = sum_s taps_{K-1-s} p_{t+s}        dtaps_i = sum_t p_t y_{t-(K-1)+i}        dbias = sum_t p_t

Letters: B batch, T time, K taps, Y channels of a head, S sequences.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gpu.launch import dense, in_rows, launch, scratch, unavailable
from ..gpu.operators import operator, own_namespace
from ..gpu.triton_helpers import jit, tl, triton
from ..layout import of_starts
from .arguments import wants_gradients
from .scan import numbered
from .sequences import sequence_numbers, splice

# Numbers of a program's tile, and tiles of a program backward, whose part of dtaps is one row.
TILE, TILES = 2048, 4


def short_conv(
    y: Tensor,
    taps: Tensor,
    tail: Tensor | None,
    padding: Tensor | None,
    segments: Tensor | None,
    cu: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    swish: bool = False,
    plain: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [B,T,heads,Y] in y's dtype, and the last K-1 tokens [B,K-1,heads,Y] fp32, zero where a document had fewer.

    y [B,T,heads,Y]; `taps` [heads,Y,K]; `tail` as an earlier call returned it, of a row's first document; `padding`
    [B,T] bool is True at real tokens (the output elsewhere means nothing); `segments` [B,T] int numbers documents.
    `cu` [S+1] int with B=1: S sequences laid end to end, of which `tail` has a row each, and so has the last K-1 tokens.
    `bias` [heads,Y]; `swish`: SiLU behind it. `plain` keeps to PyTorch.
    """
    if not plain and _takes(y, taps, tail, padding):
        number = None if segments is None else numbered(segments)
        if cu is not None:
            T = y.shape[1]
            number = of_starts(cu, ("numbers", T), lambda starts: sequence_numbers(starts, T)[None])
        made: tuple[Tensor, Tensor] = conv_op(y, taps, bias, tail, number, cu, swish)
        return made
    dtype, y = y.dtype, y.to(torch.promote_types(y.dtype, torch.float32))
    if cu is not None:
        out, tail = _sequences(y, taps, tail, cu)
    else:
        out, tail = _rows(y, taps, tail, padding, segments)
    out = out if bias is None else out + bias.to(out.dtype)
    return (F.silu(out) if swish else out).to(dtype), tail


def conv_in_pool(
    inputs: tuple[Tensor, Tensor, Tensor], taps: tuple[Tensor, Tensor, Tensor], tails: tuple[Tensor, ...], rows: Tensor,
    biases: tuple[Tensor, ...] = (), padding: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """q, k and v [B,1,heads,Y] of one token behind the convolution, each as `short_conv` has it (with SiLU where there are
    biases), from `tails` [N,K-1,heads,Y] of a pool: rows [B] of them are read, and changed in place; below 0 is
    padding, whose output means nothing. None where the kernel does not take the call."""
    one = inputs[0].shape[1] == 1 and padding is None and not wants_gradients(*inputs, *taps, *biases, *tails)
    if not one or not all(map(_takes, inputs, taps, tails, (None,) * 3)) or any(y.dtype != torch.float32 for y in tails):
        return None
    made: tuple[Tensor, Tensor, Tensor] = pool_op(*inputs, *taps, *(biases or (None,) * 3), *tails, rows)
    return made


def _takes(y: Tensor, taps: Tensor, tail: Tensor | None, padding: Tensor | None) -> bool:
    """Whether the kernels take these inputs; what came before a call gets no gradient from them."""
    known = not any(unavailable(y.device, kind) for kind in (y.dtype, taps.dtype))
    return known and padding is None and y.numel() > 0 and not wants_gradients(tail)


def _rows(
    y: Tensor, taps: Tensor, tail: Tensor | None, padding: Tensor | None, segments: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The convolution of rows, in y's dtype."""
    (B, T), K = y.shape[:2], taps.shape[-1]
    tail = y.new_zeros(B, K - 1, *y.shape[2:]) if tail is None else tail
    if padding is None and segments is None:
        rows = torch.cat([tail, y], 1)
        return _weighed(rows, taps), rows[:, T:]
    document = torch.zeros(B, T, dtype=torch.long, device=y.device) if segments is None else numbered(segments)
    order, final = None, document[:, -1:]
    if padding is not None:  # real tokens first, so that places count real tokens only
        order = padding.logical_not().long().argsort(dim=1, stable=True)
        y, document = y.take_along_dim(order[:, :, None, None], 1), document.take_along_dim(order, 1)
    # The tail belongs to document 0, of which only padding may be left.
    rows, owner = torch.cat([tail, y], 1), F.pad(document, (K - 1, 0))
    out = torch.zeros_like(y)
    for i in range(K):
        own = owner[:, i : i + T] == document
        out = out + rows[:, i : i + T] * own[:, :, None, None] * taps[..., i].to(y.dtype)
    if order is not None:
        out = out.take_along_dim(order.argsort(1)[:, :, None, None], 1)
    end = torch.full((B, 1), T, device=y.device) if padding is None else padding.long().sum(1, keepdim=True)
    place = end + torch.arange(K - 1, device=y.device)
    kept = (owner.take_along_dim(place, 1) == final)[:, :, None, None]
    return out, rows.take_along_dim(place[:, :, None, None], 1) * kept


def _sequences(y: Tensor, taps: Tensor, tail: Tensor | None, cu: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution of sequences laid end to end, in y's dtype."""
    K = taps.shape[-1]
    tail = y.new_zeros(len(cu) - 1, K - 1, *y.shape[2:]) if tail is None else tail
    at = of_starts(cu, ("spliced", y.shape[1], K - 1), lambda starts: splice(starts, y.shape[1], K - 1))
    rows = at.join(tail, y)
    last = rows[0, at.ends[:, None] - (K - 1) + torch.arange(K - 1, device=y.device)]
    return _weighed(rows, taps).index_select(1, at.tokens - (K - 1)), last


def _weighed(rows: Tensor, taps: Tensor) -> Tensor:
    """out [B,T,heads,Y] of one document each, rows [B,K-1+T,heads,Y] with what came before it: a launch for each tap."""
    first, *others = taps.to(rows.dtype).unbind(-1)
    T = rows.shape[1] - len(others)
    out = rows[:, :T] * first
    for i, tap in enumerate(others, 1):
        out = torch.addcmul(out, rows[:, i : i + T], tap)
    return out


# ---------------------------------------------------------------- kernels


@jit
def place(p_number, o_t, T, s_n):
    """Which tokens of a row exist, and the document or sequence of each, 0 without numbers."""
    m_t, b_own = (o_t >= 0) & (o_t < T), o_t * 0
    if p_number is not None:
        b_own = tl.load(p_number + o_t.to(tl.int64) * s_n, mask=m_t, other=-1).to(tl.int32)
    return m_t, b_own


@jit
def look_back(p_y, p_tail, p_number, p_cu, o_t, o_d, back, i_b, i_h, T, H, s_t, s_n, D: tl.constexpr, K: tl.constexpr):
    """y `back` tokens before tokens o_t of a row, as their documents see it: [BR,BD] fp32."""
    m_t, b_own = place(p_number, o_t, T, s_n)
    m_s, b_other = place(p_number, o_t - back, T, s_n)
    m_y = (m_t & m_s & (b_own == b_other))[:, None] & (o_d < D)[None, :]
    b_y = tl.load(p_y + (o_t - back).to(tl.int64)[:, None] * s_t + o_d[None, :], mask=m_y, other=0.0).to(tl.float32)
    if p_tail is not None:
        start, row, m_first = o_t * 0, i_b.to(tl.int64), b_own == 0
        if p_cu is not None:
            start = tl.load(p_cu + b_own, mask=m_t, other=0).to(tl.int32)
            row, m_first = b_own.to(tl.int64), b_own >= 0
        o_tail = o_t - back - start + (K - 1)
        m_tail = m_t & m_first & (o_t - back < start)
        o_x = ((row * (K - 1) + o_tail) * H + i_h) * D
        b_y += tl.load(p_tail + o_x[:, None] + o_d[None, :], mask=m_tail[:, None] & (o_d < D)[None, :], other=0.0)
    return b_y


@jit
def weighed(p_y, p_taps, p_bias, p_tail, p_number, p_cu, o_t, o_d, i_b, i_h, T, H, s_t, s_n, D: tl.constexpr,
            K: tl.constexpr):  # fmt: skip
    """What the activation gets, [BR,BD]."""
    b_x = tl.zeros([o_t.shape[0], o_d.shape[0]], tl.float32)
    if p_bias is not None:
        b_x += tl.load(p_bias + i_h * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(K):
        b_tap = tl.load(p_taps + (i_h * D + o_d) * K + i, mask=o_d < D, other=0.0).to(tl.float32)
        b_x += b_tap[None, :] * look_back(p_y, p_tail, p_number, p_cu, o_t, o_d, K - 1 - i, i_b, i_h, T, H, s_t, s_n, D, K)
    return b_x


@jit
def forward_kernel(p_y, p_taps, p_bias, p_tail, p_number, p_cu, p_out, p_last, B: int, T: int, H, s_b, s_t, s_h, s_nb, s_n,
                   D: tl.constexpr, K: tl.constexpr, SWISH: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Grid (tiles of rows, then sequences, whose ends they store; H)."""
    i, i_h, o_d = tl.program_id(0), tl.program_id(1), tl.arange(0, BD)
    tiles = tl.cdiv(T, BR)
    if i < tiles * B:
        i_b, o_t = i // tiles, i % tiles * BR + tl.arange(0, BR)
        p_y += i_b.to(tl.int64) * s_b + i_h.to(tl.int64) * s_h
        if p_number is not None:
            p_number += i_b.to(tl.int64) * s_nb
        b_x = weighed(p_y, p_taps, p_bias, p_tail, p_number, p_cu, o_t, o_d, i_b, i_h, T, H, s_t, s_n, D, K)
        if SWISH:
            b_x *= tl.sigmoid(b_x)
        o_out = ((i_b.to(tl.int64) * T + o_t) * H + i_h) * D
        m_out = (o_t < T)[:, None] & (o_d < D)[None, :]
        tl.store(p_out + o_out[:, None] + o_d[None, :], b_x.to(p_out.dtype.element_ty), mask=m_out)
    else:
        store_end(p_y, p_tail, p_number, p_cu, p_last, o_d, i - tiles * B, i_h, T, H, s_b, s_t, s_h, s_nb, s_n, D, K)


@jit
def store_end(p_y, p_tail, p_number, p_cu, p_last, o_d, i_s, i_h, T, H, s_b, s_t, s_h, s_nb, s_n, D: tl.constexpr,
              K: tl.constexpr):  # fmt: skip
    """The last K-1 tokens of a sequence, of its last document."""
    start, end, row = i_s * 0, T + i_s * 0, i_s.to(tl.int64)
    if p_cu is not None:
        start, end = tl.load(p_cu + i_s).to(tl.int32), tl.load(p_cu + i_s + 1).to(tl.int32)
        row = row * 0
    p_y += row * s_b + i_h.to(tl.int64) * s_h
    number = i_s * 0
    if p_cu is None and p_number is not None:
        p_number += row * s_nb
        number = tl.load(p_number + (T - 1) * s_n).to(tl.int32)
    for j in tl.static_range(K - 1):
        o_t = end - (K - 1) + j
        seen = o_t >= start
        if p_cu is None and p_number is not None:
            seen = seen & (tl.load(p_number + o_t.to(tl.int64) * s_n, mask=seen, other=-1).to(tl.int32) == number)
        b_y = tl.load(p_y + o_t.to(tl.int64) * s_t + o_d, mask=o_d < tl.where(seen, D, 0), other=0.0).to(tl.float32)
        if p_tail is not None:
            held = tl.where((o_t < start) & (number == 0), D, 0)
            o_x = ((i_s.to(tl.int64) * (K - 1) + (o_t - start + K - 1)) * H + i_h) * D
            b_y += tl.load(p_tail + o_x + o_d, mask=o_d < held, other=0.0)
        tl.store(p_last + ((i_s.to(tl.int64) * (K - 1) + j) * H + i_h) * D + o_d, b_y, mask=o_d < D)


@jit
def step_kernel(p_q, p_k, p_v, p_qtaps, p_ktaps, p_vtaps, p_qbias, p_kbias, p_vbias, p_queries, p_keys, p_values, p_rows,
                p_oq, p_ok, p_ov, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_queries, s_keys, s_values, H, E, EV,
                D: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, SWISH: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """One token of q, k and v, and its place among the last ones. Grid (H + E + EV heads, rows)."""
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(p_rows + i_b).to(tl.int64)
    if i_h < H:
        step(p_q + i_b * s_qb + i_h * s_qh, p_qtaps, p_qbias, p_queries + row * s_queries, p_oq + (i_b * H + i_h) * D, row,
             i_h, H, D, K, SWISH, BD)  # fmt: skip
    elif i_h < H + E:
        i_h -= H
        step(p_k + i_b * s_kb + i_h * s_kh, p_ktaps, p_kbias, p_keys + row * s_keys, p_ok + (i_b * E + i_h) * D, row, i_h, E,
             D, K, SWISH, BD)  # fmt: skip
    else:
        i_h -= H + E
        step(p_v + i_b * s_vb + i_h * s_vh, p_vtaps, p_vbias, p_values + row * s_values, p_ov + (i_b * EV + i_h) * DV, row,
             i_h, EV, DV, K, SWISH, BD)  # fmt: skip


@jit
def step(p_y, p_taps, p_bias, p_tail, p_out, row, i_h, H, D: tl.constexpr, K: tl.constexpr, SWISH: tl.constexpr,
         BD: tl.constexpr):  # fmt: skip
    """One head of one token; a row below 0 reads no tail and writes none."""
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m_tail = o_d < tl.where(row >= 0, D, 0)
    b_y = tl.load(p_y + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_x = b_y * tl.load(p_taps + (i_h * D + o_d) * K + (K - 1), mask=m_d, other=0.0).to(tl.float32)
    for j in tl.static_range(K - 1):
        o_tail = (j * H + i_h) * D + o_d
        b_t = tl.load(p_tail + o_tail, mask=m_tail, other=0.0)
        b_x += b_t * tl.load(p_taps + (i_h * D + o_d) * K + j, mask=m_d, other=0.0).to(tl.float32)
        if j > 0:
            tl.store(p_tail + o_tail - H * D, b_t, mask=m_tail)
    tl.store(p_tail + ((K - 2) * H + i_h) * D + o_d, b_y, mask=m_tail)
    if SWISH:
        b_x += tl.load(p_bias + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_x *= tl.sigmoid(b_x)
    tl.store(p_out + o_d, b_x.to(p_out.dtype.element_ty), mask=m_d)


@jit
def behind(p_do, p_y, p_taps, p_bias, p_tail, p_number, p_cu, o_t, o_d, i_b, i_h, T, H, s_t, s_n, D: tl.constexpr,
           K: tl.constexpr, SWISH: tl.constexpr):  # fmt: skip
    """p of tokens o_t, [BR,BD]."""
    o_do = ((i_b.to(tl.int64) * T + o_t) * H + i_h) * D
    m_do = (o_t < T)[:, None] & (o_d < D)[None, :]
    b_p = tl.load(p_do + o_do[:, None] + o_d[None, :], mask=m_do, other=0.0).to(tl.float32)
    if SWISH:
        b_x = weighed(p_y, p_taps, p_bias, p_tail, p_number, p_cu, o_t, o_d, i_b, i_h, T, H, s_t, s_n, D, K)
        b_s = tl.sigmoid(b_x)
        b_p *= b_s * (1.0 + b_x * (1.0 - b_s))
    return b_p


@jit
def backward_kernel(p_do, p_dlast, p_y, p_taps, p_bias, p_tail, p_number, p_cu, p_dy, p_dtaps, p_dbias, T: int, H, s_b, s_t,
                    s_h, s_nb, s_n, D: tl.constexpr, K: tl.constexpr, SWISH: tl.constexpr, BR: tl.constexpr,
                    BD: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """dy, and of TILES tiles dtaps and dbias. Grid (rows / (BR * TILES) of each batch row, H)."""
    many = tl.cdiv(T, BR * TILES)
    i_b, i_n, i_h = tl.program_id(0) // many, tl.program_id(0) % many, tl.program_id(1)
    o_d, o_k = tl.arange(0, BD), tl.arange(0, BK)
    p_y += i_b.to(tl.int64) * s_b + i_h.to(tl.int64) * s_h
    if p_number is not None:
        p_number += i_b.to(tl.int64) * s_nb
    b_dtaps, b_dbias = tl.zeros([BK, BD], tl.float32), tl.zeros([BD], tl.float32)
    for tile in range(TILES):
        o_t = (i_n * TILES + tile) * BR + tl.arange(0, BR)
        m_t, b_own = place(p_number, o_t, T, s_n)
        b_dy = tl.zeros([BR, BD], tl.float32)
        for s in tl.static_range(K):
            m_s, b_other = place(p_number, o_t + s, T, s_n)
            b_p = behind(p_do, p_y, p_taps, p_bias, p_tail, p_number, p_cu, o_t + s, o_d, i_b, i_h, T, H, s_t, s_n, D, K,
                         SWISH)  # fmt: skip
            if s == 0:
                b_dbias += tl.sum(b_p, 0)
                for i in tl.static_range(K):
                    b_y = look_back(p_y, p_tail, p_number, p_cu, o_t, o_d, K - 1 - i, i_b, i_h, T, H, s_t, s_n, D, K)
                    b_dtaps += tl.where((o_k == i)[:, None], tl.sum(b_p * b_y, 0)[None, :], 0.0)
            b_tap = tl.load(p_taps + (i_h * D + o_d) * K + (K - 1 - s), mask=o_d < D, other=0.0).to(tl.float32)
            b_dy += tl.where((m_s & (b_own == b_other))[:, None], b_p * b_tap[None, :], 0.0)
        if p_dlast is not None:
            end, row, m_last = T + o_t * 0, i_b.to(tl.int64), m_t
            if p_cu is not None:
                end = tl.load(p_cu + b_own + 1, mask=m_t, other=0).to(tl.int32)
                row = b_own.to(tl.int64)
            elif p_number is not None:
                m_last = m_t & (b_own == tl.load(p_number + (T - 1) * s_n).to(tl.int32))
            j = o_t - end + (K - 1)
            o_last = ((row * (K - 1) + j) * H + i_h) * D
            m_last = (m_last & (j >= 0))[:, None] & (o_d < D)[None, :]
            b_dy += tl.load(p_dlast + o_last[:, None] + o_d[None, :], mask=m_last, other=0.0).to(tl.float32)
        o_dy = ((i_b.to(tl.int64) * T + o_t) * H + i_h) * D
        m_dy = (o_t < T)[:, None] & (o_d < D)[None, :]
        tl.store(p_dy + o_dy[:, None] + o_d[None, :], b_dy.to(p_dy.dtype.element_ty), mask=m_dy)
    o_part = tl.program_id(0).to(tl.int64) * H + i_h
    m_k = (o_k < K)[:, None] & (o_d < D)[None, :]
    tl.store(p_dtaps + (o_part * D + o_d)[None, :] * K + o_k[:, None], b_dtaps, mask=m_k)
    if p_dbias is not None:
        tl.store(p_dbias + o_part * D + o_d, b_dbias, mask=o_d < D)


# ---------------------------------------------------------------- host side


class StepCall(NamedTuple):
    """The inputs of the operator for one token of each row."""

    q: Tensor
    k: Tensor
    v: Tensor
    query_taps: Tensor
    key_taps: Tensor
    value_taps: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    queries: Tensor
    keys: Tensor
    values: Tensor
    rows: Tensor


def _step(x: StepCall, *out: Tensor) -> None:
    """One launch: a program for each head of q, k and v and each row."""
    inputs, K = [dense(y) for y in x[:3]], x.query_taps.shape[-1]
    taps, biases = (y.contiguous() for y in x[3:6]), (None if y is None else y.contiguous() for y in x[6:9])
    tails = [in_rows(y, x.rows) for y in x[9:12]]
    heads = [y.shape[2] for y in inputs]
    launch(
        step_kernel, (sum(heads), len(x.rows)), *inputs, *taps, *biases, *tails, x.rows, *out,
        *(y.stride(axis) for y in inputs for axis in (0, 2)), *(y.stride(0) for y in tails), *heads,
        num_warps=1, D=x.q.shape[-1], DV=x.v.shape[-1], K=K, SWISH=x.query_bias is not None,
        BD=triton.next_power_of_2(max(x.q.shape[-1], x.v.shape[-1])),
    )  # fmt: skip


class Call(NamedTuple):
    """The inputs of the operator. `number` [B,T]: the document or, with `cu`, the sequence of each token."""

    y: Tensor
    taps: Tensor
    bias: Tensor | None
    tail: Tensor | None
    number: Tensor | None
    cu: Tensor | None
    swish: bool


def _results(x: Call) -> list[Tensor]:
    sequences = len(x.y) if x.cu is None else len(x.cu) - 1
    return [scratch(x.y, *x.y.shape, dtype=x.y.dtype), scratch(x.y, sequences, x.taps.shape[-1] - 1, *x.y.shape[2:])]


def _inputs(x: Call) -> tuple[list[Tensor | None], tuple[int, ...], dict[str, Any]]:
    """Tensors, of which y and the numbers may be views; what kernels take behind their tensors; their constants."""
    (_, T, H, D), y = x.y.shape, dense(x.y)
    BD = triton.next_power_of_2(D)
    constants = {"D": D, "K": x.taps.shape[-1], "SWISH": x.swish, "BD": BD, "BR": max(1, TILE // BD), "TILES": TILES}
    tail = None if x.tail is None else x.tail.float().contiguous()
    tensors = [y, x.taps.contiguous(), None if x.bias is None else x.bias.contiguous(), tail, x.number, x.cu]
    return tensors, (T, H, *y.stride()[:3], *((0, 0) if x.number is None else x.number.stride())), constants


def _forward(x: Call, out: Tensor, last: Tensor) -> None:
    tensors, numbers, constants = _inputs(x)
    B, T, H, _ = x.y.shape
    grid = B * triton.cdiv(T, constants["BR"]) + len(last), H
    launch(forward_kernel, grid, *tensors, out, last, B, *numbers, num_warps=4, **constants)


def _backward(x: Call, do: Tensor, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
    """dy, dtaps and dbias."""
    tensors, numbers, constants = _inputs(x)
    (B, T, H, D), K = x.y.shape, x.taps.shape[-1]
    parts = B * triton.cdiv(T, constants["BR"] * TILES)
    dy, dtaps = scratch(x.y, *x.y.shape, dtype=x.y.dtype), scratch(x.y, parts, H, D, K)
    dbias = None if x.bias is None else scratch(x.y, parts, H, D)
    launch(backward_kernel, (parts, H), do.contiguous(), None if dlast is None else dlast.contiguous(), *tensors, dy, dtaps,
           dbias, *numbers, num_warps=4, BK=triton.next_power_of_2(K), **constants)  # fmt: skip
    return dy, dtaps.sum(0), None if dbias is None else dbias.sum(0)


NAMESPACE = own_namespace(__name__, "short_conv")
pool_op = operator(
    NAMESPACE, "short_conv_pool", StepCall, lambda x: [scratch(y, *y.shape, dtype=y.dtype) for y in x[:3]], _step, "q1 k1 v1",
    changed="queries keys values",
)  # fmt: skip
conv_op = operator(
    NAMESPACE, "short_conv", Call, _results, _forward, "out last", backward=_backward, leaves="y taps bias",
)  # fmt: skip
