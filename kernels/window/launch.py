"""The window's kernels, host side: configurations, scratch, launches and the registered operator."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import Problem, launch, scratch, strides, unavailable, width
from ..gpu.operators import operator, own_namespace
from ..gpu.target import obstacle_of, target
from .kernels import (
    LOG2E, LOWEST, forward_kernel, gather_kernel, keys_kernel, queries_kernel, sinks_kernel,
)  # fmt: skip

WIDEST = 256


class Tiles(NamedTuple):
    """Of one kernel: queries and keys of a tile, warps, buffers for what the loop loads."""

    queries: int
    keys: int
    warps: int
    stages: int


class Config(NamedTuple):
    """Tiles of the kernels that walk over tokens, queries of a block of `sinks_kernel`, precision of products."""

    forward: Tiles
    queries: Tiles
    keys: Tiles
    block: int
    precision: str


def safe(shared: int, D: int, DV: int, dtype: torch.dtype) -> Config:
    """The largest tiles whose kernels need no more than `shared` bytes. Raises ValueError when the smallest do not fit.

    Tiles of 64 beside narrower heads would go wrong through Hopper's wgmma, and so would fp32 (mhla/launch.py).
    """
    exact, wide = dtype != torch.bfloat16, max(width(D), width(DV))
    narrow = min(width(D), width(DV)) < 64
    precision = {torch.bfloat16: "bf16x3", torch.float16: "bf16x3", torch.float32: "bf16x6"}[dtype]
    # Wider tiles in fp32 spill 10 KB a thread (triton 3.6).
    rows = (16 if wide > 128 else 32) if exact else 32 if narrow or wide > 128 else 64
    for size, stages in (*(((64, 3),) if rows == 64 else ()), (rows, 2), (rows, 1), (min(rows, 32), 1), (16, 1)):
        if shared_bytes(size, stages, D, DV, dtype) <= shared:
            one = Tiles(size, min(size, 32), 4, stages)
            keys = Tiles(min(size, 32), size, 4 if wide <= 64 or size == 64 else 8, stages)
            return Config(one, one._replace(warps=keys.warps), keys, size, precision)
    raise ValueError(f"head dims {D} and {DV} need more than {shared} bytes of shared memory")


def shared_bytes(size: int, stages: int, D: int, DV: int, dtype: torch.dtype) -> int:
    """Bound on the shared memory of every kernel: what stays, what a pipelined loop loads, computed factors."""
    item = 2 if dtype == torch.bfloat16 else 4
    return item * (width(D) + width(DV)) * (size + (stages + 1) * min(size, 32)) + 2 * item * size * size


@functools.cache
def configure(device: torch.device, dtype: torch.dtype, D: int, DV: int) -> Config:
    """The configuration for these inputs. Raises ValueError where nothing fits."""
    gpu = target(device)
    if gpu is None:
        return Config(Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1), 16, "ieee")
    return safe(gpu.shared, D, DV, dtype)


obstacle = obstacle_of(configure)


def runs_on(device: torch.device, dtypes: tuple[torch.dtype, ...], D: int, DV: int) -> str:
    """Why the kernels cannot take q, k and v of such dtypes; empty when they can."""
    if reason := unavailable(device, dtypes[0]):
        return reason
    if len({*dtypes}) > 1:
        return "q, k and v differ in dtype"
    if max(D, DV) > WIDEST:
        return f"head dim {max(D, DV)} exceeds {WIDEST}"
    return obstacle(device, dtypes[0], D, DV)


class Call(NamedTuple):
    """The inputs of the operator; `begin` and `end` [B,T] int32 of each token's document."""

    q: Tensor
    k: Tensor
    v: Tensor
    begin: Tensor | None
    end: Tensor | None
    window: int
    sink: int
    scale: float


class WindowProblem(Problem):
    def __init__(self, x: Call) -> None:
        super().__init__(x)
        self.begin, self.end, self.scale, self.E = x.begin, x.end, x.scale, x.k.shape[2]
        self.config = configure(x.q.device, x.q.dtype, self.D, self.DV)
        self.W, self.S, self.C = min(x.window, self.T), min(x.sink, self.T), self.config.block
        self.reach = max(self.W, self.C)

    def launch(self, kernel: Any, tiles: Tiles, grid: tuple[int, ...], *arguments: Any, **more: Any) -> None:
        """Run a kernel over a grid; all of its arguments but T, the blocks and heads are given."""
        launch(
            kernel, grid, *arguments, self.H, self.H // self.E, num_warps=tiles.warps,
            num_stages=tiles.stages, D=self.D, DV=self.DV, BD=width(self.D), BV=width(self.DV), BM=tiles.queries,
            BN=tiles.keys, C=self.C, DOCS=self.begin is not None, LOG2E=LOG2E, LOWEST=LOWEST,
            PREC=self.config.precision, **more,
        )  # fmt: skip

    def over_queries(self, kernel: Any, tiles: Tiles, *arguments: Any) -> None:
        """Run a kernel of which each program has a block of one head's queries."""
        N = -(-self.T // tiles.queries)
        self.launch(
            kernel, tiles, (self.B * self.H * N,), self.q, self.k, self.v, self.begin, *arguments, self.scale,
            *strides(self.q, self.k, self.v), self.T, N, self.W, self.S,
        )  # fmt: skip

    def sinks(self, mass: Tensor, do: Tensor, delta: Tensor) -> Tensor | None:
        """What queries beyond the reach give to the sinks of documents: [B*E,N,S,D+DV]; None where there are none."""
        if self.S == 0 or self.reach >= self.T:
            return None
        tiles, N, X = Tiles(self.C, 16, 4, 1), -(-self.T // self.C), self.S * (self.D + self.DV)
        part, total = scratch(self.q, self.B * self.H, N, X), scratch(self.q, self.B * self.E, N, X)
        self.launch(
            sinks_kernel, tiles, (self.B * self.H * N, -(-self.S // 16)), self.q, self.k, self.v, self.begin, self.end,
            mass, do, delta, part, self.scale, *strides(self.q, self.k, self.v), self.T, N, self.reach, self.S, BS=16,
        )  # fmt: skip
        self.launch(
            gather_kernel, tiles, (self.B * self.E * N, -(-X // 128)), part, self.begin, self.end, total, self.T, N,
            self.reach, X, BR=16, BX=128,
        )  # fmt: skip
        return total


def results(x: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Room for o [B,T,H,Dv], log Z [B,T,H] fp32, and in half precision what the rounding of o left out, else empty."""
    o = scratch(x.v, *x.q.shape[:3], x.v.shape[3], dtype=x.v.dtype)
    return o, scratch(x.q, *x.q.shape[:3]), scratch(x.v, *(o.shape if o.dtype.itemsize == 2 else (0,)), dtype=o.dtype)


def forward(call: Call, o: Tensor, mass: Tensor, low: Tensor) -> None:
    x = WindowProblem(call)
    x.over_queries(forward_kernel, x.config.forward, o, low if low.ndim > 1 else None, mass)


def backward(
    call: Call, do: Tensor, dmass: Tensor | None, o: Tensor, mass: Tensor, low: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v."""
    x, do = WindowProblem(call), do.contiguous()
    dmass = None if dmass is None else dmass.contiguous()
    delta = scratch(x.q, x.B, x.T, x.H)
    dq, dk, dv = (scratch(y, *y.shape, dtype=y.dtype) for y in (x.q, x.k, x.v))
    left = low if low.ndim > 1 else None
    x.over_queries(queries_kernel, x.config.queries, o, left, mass, do, dmass, delta, dq)
    far, tiles = x.sinks(mass, do, delta), x.config.keys
    N = -(-x.T // tiles.keys)
    x.launch(
        keys_kernel, tiles, (x.B * x.E * N,), x.q, x.k, x.v, x.begin, x.end, mass, do, delta, far, dk, dv, x.scale,
        *strides(x.q, x.k, x.v), x.T, N, x.W, x.reach, x.S, -(-x.T // x.C), FAR=far is not None,
    )  # fmt: skip
    return dq, dk, dv


def flops(x: Any) -> tuple[int, int]:
    """Every query meets a window and a sink, or all tokens where those are fewer; backward two products for each of the
    forward, what is computed again does not count."""
    B, T, H, D = x.q
    forward = 2 * B * T * H * min(x.window + x.sink, T) * (D + x.v[-1])
    return forward, 2 * forward


NAMESPACE = own_namespace(__name__, "window")
window_op = operator(
    NAMESPACE, "window", Call, results, forward, "o mass | low", kept="o mass low",
    backward=backward, leaves="q k v", usual=2, flops=flops,
)  # fmt: skip
