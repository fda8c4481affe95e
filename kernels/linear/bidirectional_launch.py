"""Linear attention where every token sees all others, host side: launches of linear_both.py.

`both_forward` and `both_backward` take the arguments of their operators in linear_ops.py, in that order.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from ..gpu.launch import Layout, dense, entry, launch, lay_out, strides
from .bidirectional import read_kernel
from .launch import Call, Problem, join, lengths, walk


class Both(NamedTuple):
    """The arguments of the forward operator without direction."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    unit: bool
    precision: str
    padding: Tensor | None


class BothProblem(Problem):
    """A call where every token sees all others."""

    def __init__(self, number: int, x: Both) -> None:
        call = *x[:5], None, None, None, 1.0, x.unit, x.precision, None, x.padding, None, None, True
        super().__init__(number, Call(*call))

    def _cut(self) -> tuple[Layout, int]:
        c = self.config
        L = self.pieces(self.E * -(-self.DV // c.sums_both.block), c.programs_both, c.sums_both.chunk)
        return lay_out(self.q, None, L), L

    @cached_property
    def part(self) -> int:
        return 1

    def total(self, left: Tensor, right: Tensor, coefficients: tuple[Any, ...], lengths: Tensor, back: bool) -> Tensor:
        """The memory of all tokens [B,E,W], or BACK its gradient."""
        S, out = self.new(self.slots, self.E, self.W), self.new(self.B, self.E, self.W)
        inputs = left, right, coefficients, (lengths, lengths)
        walk(self, self.config.sums_both, *inputs, None, S, back, (None, None))
        join(self, S, None, out, back, False)
        return out

    def apply(self, role: str, x: Tensor, S: Tensor, own: Tensor, other: Tensor, g: Tensor,
              coefficients: tuple[Any, ...], dg: Tensor | None, along: Tensor | None, rq: Tensor,
              aux: bool = False) -> Tensor:  # fmt: skip
        """Rows of x times S: o, dq, dk or dv."""
        tiles, back = self.config.read, role in ("dk", "dv")
        heads, X, Z = self.E if back else self.H, x.shape[3], own.shape[3]
        out = self.new(self.B, self.T, heads, Z, dtype=self.q.dtype)
        c = self.constants(tiles, self.config.split_out if role == "out" else self.config.split_gradients)
        wide = {self.D: c["BD"], self.DV: c["BDV"]}
        c |= {"ROLE": role, "X": X, "Z": Z, "BX": wide[X], "BZ": min(tiles.block, wide[Z])}
        blocks = -(-Z // c["BZ"])
        L = self.pieces(heads * blocks, 4 * self.config.programs_both, tiles.chunk)
        launch(
            read_kernel, (-(-self.T // L) * blocks, self.B * heads), x, own, other, out, S, g, *coefficients, dg, along,
            self.a, self.b, rq, self.real, *strides(x, own, other), self.T, L, self.H, self.E, MASS=dg is not None,
            AUX=aux, **c,
        )  # fmt: skip
        return out


def run_both_forward(number: int, *inputs: Any) -> tuple[Tensor, ...]:
    """o [B,T,H,Dv], g [B,T,H], inverse lengths of q, and the memory of all tokens [B,E,W]."""
    x = BothProblem(number, Both(*inputs))
    g, rq = x.new(x.B, x.T, x.H), x.new(x.B, x.H if x.call.unit else 0, x.T)
    S = x.total(x.k, x.v, (None, None), lengths(x), False)
    # As far as shapes go, o is like v of its head.
    return x.apply("out", x.q, S, x.v, x.v, g, (None, None), None, None, rq), g, rq, S


def run_both_backward(
    number: int, do: Tensor, slopes: bool, dg: Tensor | None, o: Tensor, g: Tensor, rq: Tensor, S: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, and with `slopes` the sum of q.dq [H]."""
    x, do = BothProblem(number, Both(*inputs)), dense(do)
    dg = None if dg is None else dg.contiguous()
    coefficients = x.new(x.B, x.H, x.T), x.new(x.B, x.H, x.T)
    along = x.new(-(-x.D // x.config.read.block) * slopes, x.B, x.T, x.H)
    dq = x.apply("dq", do, S, x.q, o, g, coefficients, dg, along, rq, slopes)
    R = x.total(x.q, do, coefficients, rq, True)
    dk = x.apply("dk", x.v, R, x.k, x.k, g, coefficients, None, None, rq)
    dv = x.apply("dv", x.k, R, x.v, x.v, g, coefficients, None, None, rq)
    return dq, dk, dv, along.sum((0, 1, 2)) if slopes else x.new(0)


both_backward = entry(run_both_backward)
both_forward = entry(run_both_forward)
