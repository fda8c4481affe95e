"""Linear attention where every token sees all others, host side: launches and the registered operator."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from ..gpu.launch import ChunkLayout, dense, launch, lay_out, scratch, strides
from ..gpu.operators import operator, own_namespace
from .bidirectional import read_kernel
from .launch import GUARD, Call, LinearProblem, find_lengths, join, state_width, walk
from .slopes import slope_gradients


class Both(NamedTuple):
    """The inputs of the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    unit: bool
    precision: str
    padding: Tensor | None


class BothProblem(LinearProblem):
    """A call where every token sees all others."""

    def __init__(self, x: Both) -> None:
        call = *x[:5], None, None, None, 1.0, x.unit, x.precision, None, x.padding, None, None, True
        super().__init__(Call(*call))

    def _cut(self) -> tuple[ChunkLayout, int]:
        c = self.config
        L = self.pieces(self.E * -(-self.DV // c.sums_both.block), c.programs_both, c.sums_both.chunk_size)
        return lay_out(self.q, None, L), L

    @cached_property
    def part(self) -> int:
        return 1

    def total(
        self, left: Tensor, right: Tensor, coefficients: tuple[Any, ...], lengths: Tensor, out: Tensor, back: bool
    ) -> None:
        """The memory of all tokens into `out` [B,E,W], or BACK its gradient."""
        S = self.new(self.slots, self.E, self.W)
        inputs = left, right, coefficients, (lengths, lengths)
        walk(self, self.config.sums_both, *inputs, None, S, back, (None, None))
        join(self, S, None, out, back, False)

    def apply(self, role: str, x: Tensor, S: Tensor, own: Tensor, other: Tensor, g: Tensor,
              coefficients: tuple[Any, ...], dg: Tensor | None, along: Tensor | None, rq: Tensor, out: Tensor,
              aux: bool = False) -> None:  # fmt: skip
        """Rows of x times S: o, dq, dk or dv."""
        tiles, back = self.config.read, role in ("dk", "dv")
        heads, X, Z = self.E if back else self.H, x.shape[3], own.shape[3]
        c = self.constants(tiles, self.config.split_out if role == "out" else self.config.split_gradients)
        wide = {self.D: c["BD"], self.DV: c["BDV"]}
        c |= {"ROLE": role, "X": X, "Z": Z, "BX": wide[X], "BZ": min(tiles.block, wide[Z])}
        blocks = -(-Z // c["BZ"])
        L = self.pieces(heads * blocks, 4 * self.config.programs_both, tiles.chunk_size)
        launch(
            read_kernel, (-(-self.T // L) * blocks, self.B * heads), x, own, other, out, S, g, *coefficients, dg, along,
            self.a, self.b, rq, self.real, *strides(x, own, other), self.T, L, self.H, self.E, MASS=dg is not None,
            AUX=aux, **c,
        )  # fmt: skip


def results(x: Both) -> tuple[Tensor, ...]:
    """Room for o [B,T,H,Dv], g [B,T,H], inverse lengths of q, and the memory of all tokens [B,E,W]."""
    (B, T, H, D), E, DV = x.q.shape, x.k.shape[2], x.v.shape[3]
    lengths, W = scratch(x.q, B, H if x.unit else 0, T), state_width(D, DV, True)
    return scratch(x.q, B, T, H, DV, dtype=x.q.dtype), scratch(x.q, B, T, H), lengths, scratch(x.q, B, E, W)


def forward(call: Both, o: Tensor, g: Tensor, rq: Tensor, S: Tensor) -> None:
    x = BothProblem(call)
    rk = x.new(x.B, x.E if call.unit else 0, x.T)
    find_lengths(x, rk)
    x.total(x.k, x.v, (None, None), rk, S, False)
    # As far as shapes go, o is like v of its head.
    x.apply("out", x.q, S, x.v, x.v, g, (None, None), None, None, rq, o)


def backward(
    call: Both, do: Tensor, dg: Tensor | None, want_a: bool, want_b: bool, o: Tensor, g: Tensor, rq: Tensor,
    S: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v, a and b."""
    x, do, slopes = BothProblem(call), dense(do), want_a or want_b
    dg = None if dg is None else dg.contiguous()
    coefficients = x.new(x.B, x.H, x.T), x.new(x.B, x.H, x.T)
    along = x.new(-(-x.D // x.config.read.block) * slopes, x.B, x.T, x.H)
    dq, dk, dv = (scratch(y, *y.shape, dtype=x.q.dtype) for y in (x.q, x.k, x.v))
    x.apply("dq", do, S, x.q, o, g, coefficients, dg, along, rq, dq, slopes)
    R = x.new(x.B, x.E, x.W)
    x.total(x.q, do, coefficients, rq, R, True)
    x.apply("dk", x.v, R, x.k, x.k, g, coefficients, None, None, rq, dk)
    x.apply("dv", x.k, R, x.v, x.v, g, coefficients, None, None, rq, dv)
    if not slopes:
        return dq, dk, dv, None, None
    _, _, u, n = S[:, None].split([x.D * x.DV, x.D, x.DV, 4], -1)
    return dq, dk, dv, *slope_gradients(x.a, x.b, do, u, n[..., 0], g, *coefficients, along, dg, GUARD)


def flops(x: Any) -> tuple[int, int]:
    """4 D Dv a token and head; backward four products for two."""
    forward = 4 * x.q[0] * x.q[1] * x.q[2] * x.q[3] * x.v[-1]
    return forward, 2 * forward


NAMESPACE = own_namespace(__name__, "linear_both")
both_op = operator(
    NAMESPACE, "linear_both", Both, results, forward, "o g | rq total", kept="o g rq total",
    backward=backward, leaves="q k v a? b?", usual=0, flops=flops,
)  # fmt: skip
