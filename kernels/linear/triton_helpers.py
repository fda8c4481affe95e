"""What the kernels of linear attention share: products, rows of a stretch, and how far a state flows.

Precision: factors that the caller gave multiply exactly. Computed ones are rounded to bf16; those that sum up to a
state go in as two parts, 16 bits of them, and with SPLIT so does the state where it is read. fp16 cannot hold sums: its
products with computed factors are fp32 ones.

Letters as in causal.py.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from ..gpu.triton_helpers import as_operand, jit, tl

# ---------------------------------------------------------------- products


@jit
def given(b_x, b_y, b_acc, PREC: tl.constexpr):
    """acc + x @ y in fp32 where the caller gave both: exact products of half precision."""
    if b_x.dtype == tl.float32:
        b_acc = tl.dot(b_x, b_y, b_acc, input_precision=PREC)
    else:
        b_acc = tl.dot(b_x, b_y, b_acc)
    return b_acc


@jit
def given_left(b_x, b_y, b_acc, SPLIT: tl.constexpr, PREC: tl.constexpr):
    """acc + x @ y in fp32, y computed. bf16: y is rounded, or with SPLIT goes in as two parts. fp16 would overflow."""
    if b_x.dtype == tl.bfloat16:
        b_high = b_y.to(tl.bfloat16)
        b_acc = tl.dot(b_x, b_high, b_acc)
        if SPLIT:
            b_acc = tl.dot(b_x, (b_y - b_high.to(tl.float32)).to(tl.bfloat16), b_acc)
    else:
        b_acc = tl.dot(b_x.to(tl.float32), as_operand(b_y, PREC), b_acc, input_precision=PREC)
    return b_acc


@jit
def given_right(b_x, b_y, b_acc, PREC: tl.constexpr):
    """acc + x @ y in fp32, x computed; bf16: rounded."""
    if b_y.dtype == tl.bfloat16:
        b_acc = tl.dot(b_x.to(tl.bfloat16), b_y, b_acc)
    else:
        b_acc = tl.dot(as_operand(b_x, PREC), b_y.to(tl.float32), b_acc, input_precision=PREC)
    return b_acc


@jit
def times_state(b_x, b_S, PREC: tl.constexpr):
    """x @ S in fp32, S as the scan stored it: bf16 for bf16 rows, else fp32."""
    if b_x.dtype == tl.bfloat16:
        b_o = tl.dot(b_x, b_S)
    else:
        b_o = tl.dot(b_x.to(tl.float32), as_operand(b_S, PREC), input_precision=PREC)
    return b_o


# ---------------------------------------------------------------- places, loads, flow


@jit
def stretch(p_stretches, i_s, i_b, T: int, N: int, L, VARLEN: tl.constexpr):
    """First token of a stretch, its tokens, its slot."""
    if VARLEN:
        i_t, size = tl.load(p_stretches + 3 * i_s), tl.load(p_stretches + 3 * i_s + 1)
        slot = tl.load(p_stretches + 3 * i_s + 2).to(tl.int64)
    else:
        i_t, slot = i_s * L, i_b * N + i_s
        size = tl.minimum(T - i_t, L)
    return i_t.to(tl.int64), size, slot


@jit
def part(p_stretches, p_rows, i_row, i_p, T: int, N: int, L, P, CUT: tl.constexpr, VARLEN: tl.constexpr):
    """Of a row or sequence, or with CUT its i_p-th part of P stretches: the row of the batch, first token in that,
    tokens (none behind the end), first slot, and where its memory lies among those of all."""
    i_b, i_t, size, slot, place = i_row, (i_row * 0), T, i_row * N, i_row
    if VARLEN:
        i_b, slot = i_row * 0, tl.load(p_rows + 2 * i_row).to(tl.int64)
        count = tl.load(p_rows + 2 * i_row + 1)
        p_stretches += 3 * (slot - i_row)
        i_t = tl.load(p_stretches, mask=count > 0, other=0).to(tl.int64)
        size = tl.load(p_stretches + 3 * (count - 1), mask=count > 0, other=0)
        size += tl.load(p_stretches + 3 * (count - 1) + 1, mask=count > 0, other=0) - i_t.to(tl.int32)
    if CUT:
        parts = tl.cdiv(N, P)
        i_t += i_p * (L * P)
        size = tl.maximum(tl.minimum(size - i_p * (L * P), L * P), 0)
        slot, place = slot + i_p * P, i_row * parts + i_p
    return i_b, i_t, size, slot, place


@jit
def rows(p_x, o_c, o_d, s_t, m_c, D: tl.constexpr):
    """Rows of one head, [C,BD], zeros outside. Offsets inside a stretch fit 32 bits."""
    return tl.load(p_x + (o_c[:, None] * s_t + o_d[None, :]), mask=m_c[:, None] & (o_d < D)[None, :], other=0.0)


@jit
def numbers(p_x, o_c, s_t, m_c):
    """One number per token in fp32, [C], zeros outside."""
    return tl.load(p_x + o_c * s_t, mask=m_c, other=0.0).to(tl.float32)


@jit
def flow(p_seg, p_real, row, lam, o_c, i_t, left, C: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
         PADDED: tl.constexpr, REVERSE: tl.constexpr):  # fmt: skip
    """Of the chunk at token i_t of the row that begins at `row`: real tokens [C]; how much of the state each row sees
    [C], each writes [C], and the chunk leaves; the document of each token and its place among the real ones, [C]."""
    m_c = o_c < left
    last = tl.minimum(left, C) - 1
    b_seg = o_c * 0
    b_place = (o_c + 1).to(tl.float32)
    if PADDED:
        m_c = m_c & (tl.load(p_real + row + i_t + o_c, mask=m_c, other=0) != 0)
        b_place = tl.cumsum(m_c.to(tl.float32), 0)
    b_see = m_c.to(tl.float32)
    b_write = b_see
    keep = 1.0
    if DECAY:
        total = tl.max(tl.where(o_c <= last, b_place, 0.0), 0)
        keep = tl.exp2(lam * total)
        b_start, b_end = tl.exp2(lam * b_place), tl.exp2(tl.minimum(lam * (total - b_place), 0.0))
        if REVERSE:
            b_see, b_write = b_see * b_end, b_write * b_start
        else:
            b_see, b_write = b_see * b_start, b_write * b_end
    if SEGMENTS:
        p_seg += row
        b_seg = tl.load(p_seg + i_t + tl.minimum(o_c, last))
        entered, leaves = tl.load(p_seg + tl.maximum(i_t - 1, 0)), tl.load(p_seg + i_t + last)
        if REVERSE:
            b_see, b_write = tl.where(b_seg == leaves, b_see, 0.0), tl.where(b_seg == entered, b_write, 0.0)
        else:
            b_see, b_write = tl.where(b_seg == entered, b_see, 0.0), tl.where(b_seg == leaves, b_write, 0.0)
        keep = tl.where(entered == leaves, keep, 0.0)
    return m_c, b_see, b_write, keep, b_seg, b_place


@jit
def pairs(b_w, m_c, b_seg, b_place, lam, o_c, DECAY: tl.constexpr, SEGMENTS: tl.constexpr):
    """Weights [C,C] as far as column j comes through to row i."""
    m_w = (o_c[:, None] >= o_c[None, :]) & m_c[None, :]
    if SEGMENTS:
        m_w = m_w & (b_seg[:, None] == b_seg[None, :])
    if DECAY:
        b_far = tl.abs(b_place[:, None] - b_place[None, :])
        b_w *= tl.exp2(lam * b_far)
    return tl.where(m_w, b_w, 0.0)


@jit
def places(p_seg, p_real, p_place, row, i_t, o_t, size, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
           PADDED: tl.constexpr):  # fmt: skip
    """Of tokens o_t [C] of the stretch of `size` tokens at i_t, `row` in the batch: which are real; their documents and
    places among the real ones; the place in front of the stretch and its last; the documents that enter and leave it.

    Tokens behind the end have the last one's place and document.
    """
    m_c = o_t < size
    o_in = tl.minimum(o_t, size - 1)
    b_seg, b_place = o_t * 0, (o_in + 1).to(tl.float32)
    first, total = 0.0, size.to(tl.float32)
    entered, leaves = 0, 0
    if PADDED:
        m_c = m_c & (tl.load(p_real + row + o_t, mask=m_c, other=0) != 0)
        if DECAY:
            b_place = tl.load(p_place + row + o_in).to(tl.float32)
            first = tl.load(p_place + row - 1, mask=i_t > 0, other=0).to(tl.float32)
            total = tl.load(p_place + row + size - 1).to(tl.float32)
    if SEGMENTS:
        b_seg = tl.load(p_seg + row + o_in)
        entered = tl.load(p_seg + row + tl.where(i_t > 0, -1, 0))
        leaves = tl.load(p_seg + row + size - 1)
    return m_c, b_seg, b_place, first, total, entered, leaves
