"""What the kernels of GLA share: where a program is, factors, decays of one chunk.

Inside a chunk e^{b_t-b_i} becomes a matrix product as in gsa_tiles.py: one reference in the middle of the chunk where
it decays by no more than 2^-RANGE, halving blocks where a channel decays by more (STRONG).

Letters as in gla.py; b is in units of log 2. `BK`, `BV` are widths of blocks of key and value channels.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from ..gpu.tiles import chunk, jit, load_each, load_rows, parts, tl


@jit
def place(p_chunks, T, N, heads, C: tl.constexpr, BLOCKS: tl.constexpr, VARLEN: tl.constexpr):
    """For grid (N * BLOCKS, B * heads): batch row, first token, head, block, tokens of the chunk, its slot."""
    i_n, i_x = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    i_b, i_h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    i_t, size, slot = chunk(p_chunks, i_n, i_b, T, N, C, VARLEN)
    return i_b, i_t, i_h, i_x, size, slot


@jit
def load_scaled(p_x, o_c, o_d, s_t, size, scale, D: tl.constexpr):
    """Rows [C,BK] in fp32 times scale."""
    return load_rows(p_x, o_c, o_d, s_t, size, D).to(tl.float32) * scale


@jit
def load_gate(p_r, o_c, s_r, size):
    """The gate of each token [C], 1 where there is none. Loaded once, ahead of the products: it is late."""
    b_r = tl.where(o_c < size, 1.0, 0.0)
    if p_r is not None:
        b_r = tl.load(p_r + o_c * s_r, mask=o_c < size, other=0.0).to(tl.float32)
    return b_r


@jit
def gate_ahead(p_r, o_t, s_r, T):
    """The gates of tokens o_t of a row, 0 outside of it."""
    return load_each(p_r, o_t, s_r, (o_t >= 0) & (o_t < T))


@jit
def running_sums(b_g, o_c, PREC: tl.constexpr):
    """Along a row of g [BK,C]: sums over the tokens up to and with each, and over those after it."""
    if PREC == "parts":
        # In three bf16 parts a product with ones and zeros is exact, and faster than a scan in a loop.
        b_m = (o_c[:, None] <= o_c[None, :]).to(tl.bfloat16)
        b_high = b_g.to(tl.bfloat16)
        b_rest = b_g - b_high.to(tl.float32)
        b_low = b_rest.to(tl.bfloat16)
        b_sum = tl.dot((b_rest - b_low.to(tl.float32)).to(tl.bfloat16), b_m)
        b_sum = tl.dot(b_high, b_m, tl.dot(b_low, b_m, b_sum))
        b_after = tl.minimum(tl.min(b_sum, 1)[:, None] - b_sum, 0.0)
    else:
        # A difference of sums would carry the rounding of all that was before.
        b_sum = tl.cumsum(b_g, 1)
        b_after = tl.cumsum(b_g, 1, reverse=True) - b_g
    return b_sum, b_after


@jit
def columns(o_c, o_k, s_t, size, D: tl.constexpr):
    """Offsets and mask of a transposed tile [BK,C]."""
    return o_k[:, None] + o_c[None, :] * s_t, (o_k < D)[:, None] & (o_c < size)[None, :]


# ---------------------------------------------------------------- factors


@jit
def cast(b_x, PREC: tl.constexpr):
    """A computed factor as operands, high and low."""
    return parts(b_x, PREC == "parts")


@jit
def exact(b_x, PREC: tl.constexpr):
    """A factor that the caller gave as an operand."""
    if PREC != "parts":
        b_x = b_x.to(tl.float32)
    return b_x
