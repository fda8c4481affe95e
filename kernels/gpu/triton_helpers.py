"""What Triton kernels of several mechanisms share: the guarded import, products, and rows of heads.

Precision with bf16 inputs: factors that the caller gave multiply exactly. Others are computed in fp32 and go in as two
bf16 parts, 16 bits of them: the error of a bf16 result is that of its own rounding. gsa/sweep.py rounds them once, and
passes them as given.

Letters: R rows of queries, C tokens of a chunk, `BD` a head dim D rounded up to a power of two.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without triton imports this file and keeps to the PyTorch path
    triton = tl = None


def jit(kernel: Callable[..., None]) -> Any:
    """triton.jit, or the function itself where there is no triton. Sizes that a kernel marks as int vary too much to
    compile for each that is 1 or a multiple of 16."""
    if triton is None:
        return kernel
    sizes = [name for name, kind in kernel.__annotations__.items() if kind in (int, "int")]
    return triton.jit(kernel, do_not_specialize=sizes)


# ---------------------------------------------------------------- products


@jit
def parts(b_x, SPLIT: tl.constexpr):
    """x as operands: with SPLIT bf16 and, again in bf16, what that leaves out; else x, twice.

    Taken once per tensor: both orientations of an operand then share their shared memory.
    """
    if SPLIT:
        b_high = b_x.to(tl.bfloat16)
        b_low = (b_x - b_high.to(tl.float32)).to(tl.bfloat16)
    else:
        b_high, b_low = b_x, b_x
    return b_high, b_low


@jit
def three_parts(b_x):
    """x in fp32 as three bf16 parts, which hold all of it: products with 0, 1 and -1 are exact."""
    b_high = b_x.to(tl.bfloat16)
    b_rest = b_x - b_high.to(tl.float32)
    b_mid = b_rest.to(tl.bfloat16)
    return b_high, b_mid, (b_rest - b_mid.to(tl.float32)).to(tl.bfloat16)


# Each takes what its product is added to, b_z: a sum of separate products would hold both in registers.


@jit
def dot(b_x, b_x_low, b_y, b_y_low, PREC: tl.constexpr, b_z=None):
    """x @ y + z in fp32, for two computed factors as `parts` returns them. PREC says what becomes of fp32 operands."""
    if b_x.dtype == tl.bfloat16:
        b_z = tl.dot(b_x, b_y, tl.dot(b_x, b_y_low, tl.dot(b_x_low, b_y, b_z)))
    else:
        b_z = tl.dot(b_x, b_y, b_z, input_precision=PREC)
    return b_z


@jit
def dot_given(b_x, b_y, PREC: tl.constexpr, b_z=None):
    """x @ y + z in fp32 where the caller gave both: exact products of bf16."""
    if b_x.dtype == tl.bfloat16:
        b_z = tl.dot(b_x, b_y, b_z)
    else:
        b_z = tl.dot(b_x.to(tl.float32), b_y.to(tl.float32), b_z, input_precision=PREC)
    return b_z


@jit
def dot_given_left(b_x, b_y, b_y_low, PREC: tl.constexpr, b_z=None):
    """x @ y + z in fp32, where x was given."""
    if b_x.dtype == tl.bfloat16:
        b_z = tl.dot(b_x, b_y, tl.dot(b_x, b_y_low, b_z))
    else:
        b_z = tl.dot(b_x.to(tl.float32), b_y, b_z, input_precision=PREC)
    return b_z


@jit
def dot_given_right(b_x, b_x_low, b_y, PREC: tl.constexpr, b_z=None):
    """x @ y + z in fp32, where y was given."""
    if b_y.dtype == tl.bfloat16:
        b_z = tl.dot(b_x, b_y, tl.dot(b_x_low, b_y, b_z))
    else:
        b_z = tl.dot(b_x, b_y.to(tl.float32), b_z, input_precision=PREC)
    return b_z


@jit
def as_operand(b_x, PREC: tl.constexpr):
    """Rounded to nearest where a tf32 tensor core would cut the low 13 bits off."""
    if PREC == "tf32":
        b_x = ((b_x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return b_x


# ---------------------------------------------------------------- places, loads and stores


@jit
def chunk(p_chunks, i_n, i_b, T, N, C, VARLEN: tl.constexpr):
    """First token of chunk i_n, of row i_b unless VARLEN, the tokens in it, and its slot (launch.py)."""
    if VARLEN:
        i_t = tl.load(p_chunks + 3 * i_n)
        size = tl.load(p_chunks + 3 * i_n + 1)
        slot = tl.load(p_chunks + 3 * i_n + 2).to(tl.int64)
    else:
        i_t = i_n * C
        size = tl.minimum(T - i_t, C)
        slot = i_b * (N + 1) + i_n
    return i_t.to(tl.int64), size, slot


@jit
def load_rows(p_x, o_c, o_d, s_t, size, D: tl.constexpr):
    """Rows of heads of a [B,T,heads,D] tensor: [C,BD], zeros outside. Offsets inside a chunk fit 32 bits."""
    m_x = (o_c < size)[:, None] & (o_d < D)[None, :]
    return tl.load(p_x + (o_c[:, None] * s_t + o_d[None, :]), mask=m_x, other=0.0)


@jit
def store_rows(p_x, b_x, o_c, o_d, s_t, size, D: tl.constexpr):
    m_x = (o_c < size)[:, None] & (o_d < D)[None, :]
    tl.store(p_x + (o_c[:, None] * s_t + o_d[None, :]), b_x.to(p_x.dtype.element_ty), mask=m_x)


@jit
def load_each(p_x, o_c, s_t, m_c):
    """One number a token, p_x + o_c s_t, in fp32: [C], 0 where m_c is not.

    Triton loads a vector shorter than a program has threads where it is used: beside a product that is 16 numbers a
    thread, each with its address in registers. As a sum of four columns, three of them empty, each is loaded once.
    """
    o_4 = tl.arange(0, 4)
    m_x = m_c[:, None] & (o_4 == 0)[None, :]
    return tl.sum(tl.load(p_x + (o_c[:, None] * s_t + o_4[None, :]), mask=m_x, other=0.0).to(tl.float32), 1)


@jit
def segment_flow(p_seg, o_c, i_t, size):
    """Document of each token [C], the one that entered with the chunk, the one that leaves it."""
    b_seg = tl.load(p_seg + i_t + tl.minimum(o_c, size - 1))
    return b_seg, tl.load(p_seg + tl.maximum(i_t - 1, 0)), tl.load(p_seg + i_t + size - 1)
