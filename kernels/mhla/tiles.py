"""What the kernels of MHLA share: where the tokens of a tile are, the weights of pairs of blocks.

A block of L places is cut into tiles of CT. Where tokens are not in order (TABLE), a table [R,N,L] names the token,
counted through all rows, of each place. Summaries lie as [R,E,N,X], X = F Dv numbers of k v^T and, with the normaliser,
F more of k alone.

Letters: as in mhla.py and mhla_torch.py.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from ..gpu.tiles import dot, jit, parts, tl


@jit
def locate(L, heads, CT: tl.constexpr):
    """For grid (N * tiles of a block, R * heads): block, tile, how many tiles a block has, row, head."""
    tiles = tl.cdiv(L, CT)
    i_n, i_j = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    return i_n, i_j, tiles, tl.program_id(1) // heads, tl.program_id(1) % heads


@jit
def tile_tokens(p_table, i_r, i_n, o_c, T, N, L, B, TABLE: tl.constexpr):
    """Tokens at places o_c of a block, and which exist; with TABLE they count through the batch."""
    if TABLE:
        o_t = tl.load(p_table + (i_r.to(tl.int64) * N + i_n) * L + o_c, mask=o_c < L, other=B * T)
        m_t = (o_c < L) & (o_t < B * T)
    else:
        o_t = i_n * L + o_c
        m_t = (o_c < L) & (o_t < T)
    return o_t.to(tl.int64), m_t


@jit
def load_tile(p_x, o_t, m_t, o_d, s_t, D: tl.constexpr):
    """Rows of heads, zeros where there is no token: [CT,BD]."""
    return tl.load(p_x + o_t[:, None] * s_t + o_d[None, :], mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)


@jit
def store_tile(p_x, b_x, o_t, m_t, o_d, s_t, D: tl.constexpr):
    m_x = m_t[:, None] & (o_d < D)[None, :]
    tl.store(p_x + o_t[:, None] * s_t + o_d[None, :], b_x.to(p_x.dtype.element_ty), mask=m_x)


@jit
def load_summary(p_S, o_f, o_v, F: tl.constexpr, DV: tl.constexpr):
    """[BF,BV] of one block's summary in fp32."""
    m_S = (o_f < F)[:, None] & (o_v < DV)[None, :]
    return tl.load(p_S + o_f[:, None] * DV + o_v[None, :], mask=m_S, other=0.0)


@jit
def block_numbers(p_number, p_document, i_r, o_n, N, TABLE: tl.constexpr):
    """The number of each block o_n in its document, and that document; -1 for none."""
    if TABLE:
        o_x = i_r * N + o_n
        m_n = (o_n >= 0) & (o_n < N)
        b_number = tl.load(p_number + o_x, mask=m_n, other=0)
        b_document = tl.load(p_document + o_x, mask=m_n, other=-1)
    else:
        b_number = o_n
        b_document = tl.where((o_n >= 0) & (o_n < N), 0, -1)
    return b_number, b_document


@jit
def own_weight(p_w, p_number, i_r, i_n, i_e, N, M: tl.constexpr, TABLE: tl.constexpr):
    """m_ii of a block."""
    number = i_n
    if TABLE:
        number = tl.load(p_number + i_r * N + i_n)
    return tl.load(p_w + (i_e * M + tl.minimum(number, M - 1)) * M)


@jit
def pair_weights(p_w, b_i, b_di, b_j, b_dj, M: tl.constexpr):
    """w[min(i, M-1), min(i-j, M-1)], 0 unless j is an earlier block of i's document; i and j broadcast."""
    o_w = tl.minimum(tl.maximum(b_i, 0), M - 1) * M + tl.minimum(tl.maximum(b_i - b_j, 0), M - 1)
    return tl.load(p_w + o_w, mask=(b_i > b_j) & (b_di == b_dj) & (b_di >= 0), other=0.0)


@jit
def operands(b_x, PREC: tl.constexpr):
    """fp32 x as `times` takes it: in two parts, or as it is, twice."""
    return parts(b_x, PREC == "bf16x3")


@jit
def times(b_x, b_x_low, b_y, b_y_low, b_z, PREC: tl.constexpr):
    """x @ y + z. Triton's own bf16x3 keeps three products apart, and cleans each of NaN: more registers."""
    if PREC == "bf16x3":
        b_z = dot(b_x, b_x_low, b_y, b_y_low, PREC, b_z)
    else:
        b_z = tl.dot(b_x, b_y, b_z, input_precision=PREC)
    return b_z
