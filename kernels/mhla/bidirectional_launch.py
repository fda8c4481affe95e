"""Bidirectional MHLA on the GPU, host side: configurations, scratch, launches and the registered operator."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import Problem, launch, scratch
from ..gpu.operators import operator, own_namespace
from .bidirectional import back_kernel, give_kernel, product_kernel, read_kernel, sum_kernel, turn_kernel
from .launch import configure, fill
from .eager import GUARD
from .backward import pairs_kernel


class Tiles(NamedTuple):
    """How a kernel over tokens runs: tokens at a time, features of a program, warps, buffers, registers a thread."""

    tokens: int
    block_f: int
    warps: int = 4
    stages: int = 1
    registers: int | None = None


class Config(NamedTuple):
    """All kernels of a call. `product`: rows and columns of weights, numbers of a summary, warps, buffers; `pairs`:
    blocks of a group, numbers of a summary, warps, buffers."""

    sum: Tiles
    read: Tiles
    back: Tiles
    give: Tiles
    product: tuple[int, int, int, int, int]
    pairs: tuple[int, int, int, int]
    block_v: int
    precision: str


# (capability, F and Dv above 64) -> what differs from the safe ones for bf16. Measured: one H200.
SHIPPED: dict[tuple[tuple[int, int], bool], dict[str, Any]] = {
    ((9, 0), False): {
        "sum": Tiles(64, 64, 4, 3),
        "read": Tiles(64, 64, 4, 3),
        "back": Tiles(64, 64, 4, 3, 168),
        "give": Tiles(64, 64, 4),
    },
    ((9, 0), True): {
        "sum": Tiles(64, 128, 8, 2),
        "read": Tiles(64, 128, 4, 3),
        "back": Tiles(64, 128, 8, 3),
        "give": Tiles(64, 128, 4),
    },
}
# What differs where no gradient is wanted, and summaries are bf16: with features or value dims above 64, loads of `sum`
# that ran ahead gave results that changed between runs (errors of 2e-3 to 1e-1, triton 3.6).
WITHOUT_GRADIENTS: dict[tuple[tuple[int, int], bool], dict[str, Any]] = {
    ((9, 0), True): {"sum": Tiles(64, 128, 4)},
}
# The same for `product` and `pairs`, by the blocks of a document that they are for.
MANY: dict[str, Any] = {"product": (64, 32, 128, 4, 3), "pairs": (64, 32, 4, 2)}
SHIPPED_MIXES: dict[tuple[int, int], dict[int, dict[str, Any]]] = {
    (9, 0): {
        16: {"product": (16, 16, 64, 1, 1), "pairs": (16, 32, 1, 3)},
        32: {"pairs": (32, 32, 1, 2)},
        64: MANY,
        256: MANY,
    },
}
MIXES_WITHOUT_GRADIENTS: dict[tuple[int, int], dict[int, dict[str, Any]]] = {
    (9, 0): {128: {"product": (64, 16, 128, 4, 3)}, 256: {"product": (64, 16, 128, 4, 3)}},
}


@functools.cache
def tiles(device: torch.device, dtype: torch.dtype, F: int, DV: int, M: int, keep: bool) -> Config:
    """The configuration for these inputs, `keep` where gradients are wanted. Raises ValueError where nothing fits."""
    safe = configure(device, dtype, DV, 64)
    one = Tiles(safe.tile, safe.block_f, safe.warps)
    rows = max(16, 1 << (M - 1).bit_length())
    product = (16, 16, safe.block_x, 2, 1) if rows == 16 else (32, 32, safe.block_x, 4, 1)
    pairs = (rows, 32, 1, 1) if rows <= 32 else (64, 32, 4, 1)
    config = Config(one, one, one, one, product, pairs, safe.block_v, safe.precision)
    if dtype == torch.bfloat16 and device.type == "cuda" and max(F, DV) <= 128:
        capability, wide = torch.cuda.get_device_capability(device), max(F, DV) > 64
        changed = SHIPPED.get((capability, wide), {}) | SHIPPED_MIXES.get(capability, {}).get(rows, {})
        if not keep:
            changed |= WITHOUT_GRADIENTS.get((capability, wide), {})
            changed |= MIXES_WITHOUT_GRADIENTS.get(capability, {}).get(rows, {})
        config = config._replace(**changed)
    return config


class GridCall(NamedTuple):
    """The inputs of the operator. `table` as in launch.Call; `covered`: every token has a place; `keep`: a backward
    pass will want the summaries."""

    q: Tensor
    k: Tensor
    v: Tensor
    m: Tensor
    table: Tensor
    places: int
    covered: bool
    normalise: bool
    keep: bool


class GridProblem(Problem):
    def __init__(self, call: GridCall) -> None:
        super().__init__(call)
        self.q, self.k, self.v = (one_row(x) for x in (self.q, self.k, self.v))
        self.m, self.F, (self.E, self.M) = call.m.contiguous(), self.D, call.m.shape[:2]
        self.R, self.N = call.table.shape[0], call.table.shape[1] // call.places
        self.X = self.F * (self.DV + call.normalise)
        self.config = tiles(call.q.device, call.q.dtype, self.F, self.DV, self.M, call.keep)
        self.counts = self.T, self.N, call.places, self.B
        self.of_queries, self.of_keys = self.R * self.H * self.N, self.R * self.E * self.N
        self.constants: dict[str, Any] = {"F": self.F, "DV": self.DV, "BV": self.config.block_v, "NORM": call.normalise,
                          "PREC": self.config.precision}  # fmt: skip

    def over_tokens(self, kernel: Any, how: Tiles, programs: int, *arguments: Any, **more: Any) -> None:
        launch(kernel, (programs,), *arguments, num_warps=how.warps, num_stages=how.stages,
               maxnreg=how.registers, CT=how.tokens, BF=how.block_f, **self.constants, **more)  # fmt: skip

    def summaries(self) -> Tensor:
        return self.new(self.R, self.E, self.N, self.X)

    def result(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Room for a result; zeros where tokens without a place get none."""
        return self.filled(self.new(self.B, self.T, *shape, dtype=dtype), 0.0)

    def filled(self, out: Tensor, nothing: float) -> Tensor:
        return out if self.call.covered else out.fill_(nothing)

    def mixed(self, S: Tensor, P: Tensor, reverse: bool = False) -> Tensor:
        """What each block reads of all, into P [R,E,N,X]."""
        BN, BK, BX, warps, stages = self.config.product
        programs = -(-self.X // BX) * -(-self.M // BN) * self.R * self.E * (self.N // self.M)
        launch(product_kernel, (programs,), S, self.m, P, self.M, self.N, self.E, self.X,
               num_warps=warps, num_stages=stages, BN=BN, BK=BK, BX=BX, REVERSE=reverse,
               PREC=self.config.precision)  # fmt: skip
        return P

    def turned(self, D: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of S [R,E,N,X], and of m [E,M,M]."""
        Q, BX, warps, stages = self.config.pairs
        groups = -(-self.M // Q)
        rows = self.R * self.E * (self.N // self.M)
        splits, each = fill(rows * groups**2, self.X)
        pairs = self.new(splits, rows, groups**2, Q * Q)
        how: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "BX": BX,
                               "PREC": self.config.precision}  # fmt: skip
        if groups == 1:
            R = self.summaries()
            launch(
                turn_kernel, (rows * splits,), D, S, self.m, R, pairs, self.M, self.N, self.E, self.X, each, BN=Q, **how
            )
        else:
            R = self.mixed(D, self.summaries(), reverse=True)
            launch(pairs_kernel, (rows * groups**2, splits), D, S, None, pairs, None, self.M, self.X, each, groups**2,
                   Q=Q, CAUSAL=False, KEEP=False, **how)  # fmt: skip
        cells = pairs.view(splits * self.R, self.E, -1, groups, groups, Q, Q).sum((0, 2)).transpose(2, 3)
        return R, cells.reshape(self.E, groups * Q, -1)[:, : self.M, : self.M].contiguous()


def exceeds_offsets(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why the kernels, which count the numbers of one row in 32 bits, cannot take these; empty when they can."""
    widest = max(*(x.stride(1) for x in (q, k, v)), q.shape[2] * max(q.shape[3], v.shape[3]))
    return "" if q.shape[1] * widest < 1 << 31 else f"{q.shape[1]} tokens of {widest} numbers exceed 32 bits"


def one_row(x: Tensor) -> Tensor:
    """x, copied where tokens of all rows do not follow each other."""
    return x if x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()


def results(x: GridCall) -> tuple[Tensor, ...]:
    """Room for o [B,T,H,Dv], the normaliser [B,T,H] (empty without), summaries and what blocks read of them, [R,E,N,X]
    each. Both are most of what moves: in bf16, where no gradient of the weights has to come from them."""
    (B, T, H, F), DV, (R, places) = x.q.shape, x.v.shape[-1], x.table.shape
    summaries = R, x.m.shape[0], places // x.places, F * (DV + x.normalise)
    kind = torch.bfloat16 if x.q.dtype == torch.bfloat16 and not x.keep else torch.float32
    o, g = scratch(x.q, B, T, H, DV, dtype=x.v.dtype), scratch(x.q, *((B, T, H) if x.normalise else (0,)))
    return o, g, *(scratch(x.q, *summaries, dtype=kind) for _ in range(2))


def forward(call: GridCall, o: Tensor, g: Tensor, S: Tensor, P: Tensor) -> None:
    x = GridProblem(call)
    how, table = x.config.sum, x.call.table
    x.over_tokens(
        sum_kernel, how, x.of_keys * -(-x.F // how.block_f), x.k, x.v, table, S, *x.k.stride()[1:3],
        *x.v.stride()[1:3], *x.counts, x.E, x.X,
    )  # fmt: skip
    x.mixed(S, P)
    x.over_tokens(
        read_kernel, x.config.read, x.of_queries, x.q, table, P, x.filled(o, 0.0), x.filled(g, GUARD),
        *x.q.stride()[1:3], *x.counts, x.H, x.E, x.X,
    )  # fmt: skip


def backward(
    call: GridCall, do: Tensor, dg: Tensor | None, g: Tensor, S: Tensor, P: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and m."""
    x, do = GridProblem(call), do.contiguous()
    table, how = x.call.table, x.config.back
    dq, D = x.result(x.H, x.F, dtype=x.q.dtype), x.summaries()
    x.over_tokens(
        back_kernel, how, x.of_keys * -(-x.F // how.block_f), x.q, do, table, P, g,
        None if dg is None else dg.float().contiguous(), dq, D, *x.q.stride()[1:3], *x.counts, x.H, x.E, x.X,
        G=x.H // x.E,
    )  # fmt: skip
    R, dm = x.turned(D, S)
    dk, dv = x.result(x.E, x.F, dtype=x.k.dtype), x.result(x.E, x.DV, dtype=x.v.dtype)
    x.over_tokens(
        give_kernel, x.config.give, x.of_keys, x.k, x.v, table, R, dk, dv, *x.k.stride()[1:3], *x.v.stride()[1:3],
        *x.counts, x.E, x.X,
    )  # fmt: skip
    return dq, dk, dv, dm


def flops(x: Any) -> tuple[int, int]:
    """Summaries, what blocks read, and mixing; backward two and a half times that: P do, D, R v and R^T k, mixing, and
    the weights' gradient."""
    (B, T, H, F), DV, (E, M) = x.q, x.v[-1], x.m[:2]
    forward = 2 * B * T * (H + E) * F * DV + 2 * B * E * -(-T // x.places) * M * F * DV
    return forward, 5 * forward // 2


NAMESPACE = own_namespace(__name__, "mhla_grid")
grid_op = operator(
    NAMESPACE, "mhla_grid", GridCall, results, forward, "o g | S P", kept="g S P",
    backward=backward, leaves="q k v m", flops=flops,
)  # fmt: skip
