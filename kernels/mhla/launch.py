"""Causal MHLA on the GPU, host side: configurations, scratch, launches and the registered operators."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import Problem, dense, in_rows, interpreted, launch, scratch, strides, unavailable, width
from ..gpu.operators import operator, own_namespace
from ..gpu.target import obstacle_of, target
from .forward import mix_kernel, output_kernel, state_kernel, step_kernel, summary_kernel
from .backward import key_kernel, pairs_kernel, query_kernel, value_kernel, weights_kernel


class Config(NamedTuple):
    """Tile sizes, warps and what the tensor cores make of fp32 operands."""

    tile: int  # tokens
    block_f: int  # features
    block_v: int  # value dims: all of them
    block_x: int  # numbers of a summary that mixing takes at a time
    warps: int
    precision: str


def safe(shared: int, DV: int, Q: int, dtype: torch.dtype) -> Config:
    """The largest tiles whose kernels need no more than `shared` bytes.

    Raises ValueError when the smallest do not fit.
    """
    BV = width(DV)
    exact = dtype == torch.float32
    # In fp32, tiles of 64 would use Hopper's wgmma, whose three products race (gsa/). In bf16, wgmma with 32
    # columns reads beyond its operand (query_kernel, triton 3.6), so that features and values are cut like tokens.
    for tile, block_x in ((64, 128), (32, 128), (32, 64), (16, 32), (16, 16)):
        if tile == 64 and (exact or BV > 128):
            continue
        config = Config(tile, tile, max(tile, BV), block_x, 4, "bf16x6" if exact else "bf16x3")
        if shared_bytes(config, Q, dtype) <= shared:
            return config
    raise ValueError(f"{Q} blocks with head dim {DV} need more than {shared} bytes of shared memory")


def shared_bytes(c: Config, Q: int, dtype: torch.dtype) -> int:
    """Bound on the shared memory of every kernel, from the compiler's reports for 8.0 and 9.0."""
    item = 12 if dtype != torch.bfloat16 else 4
    inside = item * (c.tile * (2 * c.block_f + 2 * c.block_v + c.tile) + c.block_f * c.block_v)
    return max(inside, 8 * (Q * Q + 2 * Q * c.block_x))


def group(M: int) -> int:
    """Blocks of a group: a power of two that is at least M - 2."""
    return width(M - 2)


@functools.cache
def configure(device: torch.device, dtype: torch.dtype, DV: int, Q: int) -> Config:
    """The configuration for these inputs. Raises ValueError where nothing fits."""
    gpu = target(device)
    if gpu is None:
        return safe(1 << 20, DV, Q, dtype)._replace(tile=16, block_f=16, precision="ieee")
    return safe(gpu.shared, DV, Q, dtype)


obstacle = obstacle_of(configure)


def constants(c: Config, M: int, D: int, DV: int, *, normalise: bool, table: bool) -> dict[str, Any]:
    """The constants of every kernel."""
    return {
        "M": M,
        "F": D,
        "DV": DV,
        "CT": c.tile,
        "BF": c.block_f,
        "BV": c.block_v,
        "Q": group(M),
        "BX": c.block_x,
        "TABLE": table,
        "NORM": normalise,
        "PREC": c.precision,
    }


def exceeds_grid(rows: int) -> str:
    """Why the causal kernels cannot run for so many rows of heads; empty when they can."""
    return f"{rows} rows of heads exceed a GPU's grid of 65535" if rows > 65535 else ""


def runs_on(device: torch.device, dtype: torch.dtype, D: int, DV: int, M: int, causal: bool) -> str:
    """Why the kernels cannot take such inputs; empty when they can."""
    if reason := unavailable(device, dtype):
        return reason
    if D > 512 or DV > 256 or (causal and M > 130):
        return f"{D} features, head dim {DV} or {M} blocks exceed 512, 256 and 130"
    return obstacle(device, dtype, DV, group(M) if causal else 64)


class Call(NamedTuple):
    """The inputs of the operator for several tokens.

    `table` [R,N*places] int32 says which token stands where (Places.table), `number` and `document` [R,N] int32 what
    its blocks are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    table: Tensor | None
    number: Tensor | None
    document: Tensor | None
    places: int
    normalise: bool


class CausalProblem(Problem):
    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.q, self.k, self.v = (self._flat(x, call.table) for x in (self.q, self.k, self.v))
        self.w, self.L, self.F, (self.E, self.M) = call.w.contiguous(), call.places, self.D, call.w.shape[:2]
        self.R = self.B if call.table is None else call.table.shape[0]
        self.N = -(-self.T // self.L) if call.table is None else call.table.shape[1] // self.L
        self.X = self.F * (self.DV + call.normalise)
        self.Q = group(self.M)
        self.groups = -(-self.N // self.Q)
        self.config = c = configure(call.q.device, call.q.dtype, self.DV, self.Q)
        self.tiles = self.N * -(-self.L // c.tile)
        self.f_blocks = -(-self.F // c.block_f)
        self.where = call.table, call.number
        # What kernels take after their tensors and strides.
        self.counts = self.T, self.N, self.L, self.B, self.H, self.E, self.X
        self.constants = constants(c, self.M, self.F, self.DV, normalise=call.normalise, table=call.table is not None)

    @staticmethod
    def _flat(x: Tensor, table: Tensor | None) -> Tensor:
        """x, copied where a table counts through rows that do not follow each other."""
        return x if table is None or x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, num_stages: int = 1, **changed: Any) -> None:
        launch(kernel, grid, *arguments, num_warps=self.config.warps, num_stages=num_stages,
               **(self.constants | changed))  # fmt: skip

    def result(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Room for a result; zeros where tokens without a place get none."""
        return self.cleared(self.new(self.B, self.T, *shape, dtype=dtype))

    def cleared(self, out: Tensor) -> Tensor:
        return out if self.call.table is None else out.zero_()

    def summaries(
        self, x: Tensor, y: Tensor, r: Tensor | None, u: Tensor | None, kind: int, S: Tensor | None = None
    ) -> Tensor:
        """sum x y^T of each block, and with the normaliser sum x: [R,E,N,X]. `kind` as in `summary_kernel`."""
        S = self.new(self.R, self.E, self.N, self.X) if S is None else S
        self.launch(
            summary_kernel, (self.N, self.R * self.E, self.f_blocks), x, y, r, u, self.call.table, S, *strides(x, y),
            self.T, self.N, self.L, self.B, self.E, x.shape[2] // self.E, self.X, KIND=kind,
            num_stages=2 if self.config.tile < self.L else 1,
        )  # fmt: skip
        return S

    def mixed(self, S: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor | None]:
        """What each block reads, [R,E,N,X], and the sums of what is older than the group before each."""
        P, BX = torch.empty_like(S), self.config.block_x
        far = self.new(self.R, self.E, self.groups, self.X) if self.groups > 2 and not reverse else None
        self.launch(
            mix_kernel, (-(-self.X // BX), self.R * self.E), S, self.w, self.call.number, self.call.document, P, far,
            self.N, self.E, self.X, REVERSE=reverse, KEEP=far is not None, PREV=self.groups > 1,
        )  # fmt: skip
        return P, far

    def outputs(self, P: Tensor, o: Tensor, g: Tensor, dg: Tensor | None, u: Tensor | None, back: bool) -> None:
        """Run `output_kernel`."""
        self.launch(
            output_kernel, (self.tiles, self.R * self.H), self.q, self.k, self.v, self.w, *self.where, P, o, g, dg, u,
            *strides(self.q, self.k, self.v), *self.counts, BACK=back, MASS=dg is not None,
        )  # fmt: skip

    def weights_gradient(self, D: Tensor, S: Tensor, far: Tensor | None, own: Tensor) -> Tensor:
        """dw [E,M,M]."""
        rows, count = self.R * self.E, 2 * self.groups
        splits, each = fill(rows * count, self.X)
        pairs = self.new(splits, rows, count, self.Q * self.Q)
        old = self.new(splits, rows, self.groups, self.Q)
        self.launch(
            pairs_kernel, (rows * count, splits), D, S, far, pairs, old, self.N, self.X, each, count, BX=32,
            KEEP=far is not None, CAUSAL=True,
        )  # fmt: skip
        pairs, old = (y.sum(0) if splits > 1 else y for y in (pairs, old))
        # Heads of one memory, tiles of one block.
        own = own.view(self.R, self.E, self.H // self.E, self.N, -1).sum((2, 4))
        dw = self.new(self.E, self.M, self.M)
        self.launch(
            weights_kernel, (self.M, self.E), pairs, old, own, self.call.number, self.call.document, dw, self.R, self.N,
            self.E, BM=1 << (self.M - 1).bit_length(), BN=16, KEEP=far is not None,
        )  # fmt: skip
        return dw


def fill(programs: int, X: int) -> tuple[int, int]:
    """Parts of X numbers, and numbers in each, for so many times more programs: enough to fill a GPU."""
    splits = max(1, min(X // 512, 2048 // programs))
    each = -(-X // (splits * 32)) * 32
    return -(-X // each), each


def results(x: Call) -> tuple[Tensor, ...]:
    """Room for o [B,T,H,Dv], the normaliser [B,T,H]; with a table the summaries of all blocks [R,E,N,X], else past, old,
    current and mixed of MHLAState after rows of one document each. What is not there is empty."""
    (B, T, H, F), (E, M), Y = x.q.shape, x.w.shape[:2], x.v.shape[-1] + x.normalise
    blocks: list[tuple[int, ...]] = [(0,), (B, M - 2, E, F, Y), *[(B, E, F, Y)] * 3]
    if x.table is not None:
        blocks = [(x.table.shape[0], E, x.table.shape[1] // x.places, F * Y), *[(0,)] * 4]
    shapes = (B, T, H) if x.normalise else (0,), *blocks
    return scratch(x.q, B, T, H, x.v.shape[-1], dtype=x.q.dtype), *(scratch(x.q, *shape) for shape in shapes)


def forward(call: Call, o: Tensor, g: Tensor, S: Tensor, *state: Tensor) -> None:
    x = CausalProblem(call)
    S = x.summaries(x.k, x.v, None, None, 0, None if call.table is None else S)
    P, _ = x.mixed(S)
    x.outputs(P, x.cleared(o), x.cleared(g), None, None, back=False)
    if call.table is None:
        x.launch(
            state_kernel, (-(-x.X // 256), x.R * x.E), S, x.w, *state, x.N, x.T // x.L, x.E, x.X, BX=256, Q=16
        )  # fmt: skip


def backward(call: Call, do: Tensor, dg: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and w."""
    x, do = CausalProblem(call), do.contiguous()
    S = x.summaries(x.k, x.v, None, None, 0)
    P, far = x.mixed(S)
    r = u = None
    if x.call.normalise:
        r, u = x.new(x.B, x.T, x.H), x.new(x.B, x.T, x.H)
        x.outputs(P, do, r, None if dg is None else dg.float().contiguous(), u, back=True)
    own = x.new(x.R, x.H, x.tiles, x.f_blocks)
    dq = x.result(x.H, x.F, dtype=x.q.dtype)
    x.launch(
        query_kernel, (x.tiles, x.R * x.H, x.f_blocks), x.q, x.k, x.v, do, r, u, x.w, *x.where, P, dq, own,
        *strides(x.q, x.k, x.v), *x.counts,
    )  # fmt: skip
    D = x.summaries(x.q, do, r, u, 2 if x.call.normalise else 1)
    R, _ = x.mixed(D, reverse=True)
    dk, dv = x.result(x.E, x.F, dtype=x.k.dtype), x.result(x.E, x.DV, dtype=x.v.dtype)
    x.launch(
        key_kernel, (x.tiles, x.R * x.E, x.f_blocks), x.q, x.k, x.v, do, r, u, x.w, *x.where, R, dk,
        *strides(x.q, x.v), *x.counts,
    )  # fmt: skip
    x.launch(
        value_kernel, (x.tiles, x.R * x.E), x.q, x.k, x.v, do, r, u, x.w, *x.where, R, dv, *strides(x.q, x.k), *x.counts
    )
    return dq, dk, dv, x.weights_gradient(D, S, far, own)


def flops(x: Any) -> tuple[int, int]:
    """Of the chunk form, causal halves not discounted: mixing M^2 F Dv a memory and M blocks. Backward 2.5 times the
    forward, and the forward again."""
    (B, T, H, F), DV, (E, M) = x.q, x.v[-1], x.w[:2]
    blocks = 2 * B * T * (H + E) * F * DV + 2 * B * E * -(-T // x.places) * M * F * DV
    forward = B * T * H * 2 * x.places * (F + DV) + blocks
    return forward, 7 * forward // 2


class StepCall(NamedTuple):
    """The inputs of the operators for one token; `edge`: whether any row may complete a block. With rows the state is a
    pool, which is changed in place."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    padding: Tensor | None
    past: Tensor
    old: Tensor
    current: Tensor
    mixed: Tensor
    tokens: Tensor
    places: int
    normalise: bool
    edge: bool
    rows: Tensor | None = None


def step_results(x: StepCall) -> tuple[Tensor, ...]:
    """Room for o [B,1,H,Dv], the normaliser [B,1,H] (nothing without) and, without rows, the new state: past, old and
    mixed are empty where `edge` is False, for they stay what they are."""
    o = scratch(x.q, *x.q.shape[:3], x.v.shape[-1], dtype=x.v.dtype)
    g = scratch(x.q, *(x.q.shape[:3] if x.normalise else (0,)))
    if x.rows is not None:
        return o, g
    past, old, mixed = (scratch(y, *(y.shape if x.edge else (0,)), dtype=y.dtype) for y in (x.past, x.old, x.mixed))
    current, tokens = (scratch(y, *y.shape, dtype=y.dtype) for y in (x.current, x.tokens))
    return o, g, past, old, current, mixed, tokens


def step(x: StepCall, o: Tensor, g: Tensor, *after: Tensor) -> None:
    """One token in one launch. In a pool the normaliser's sums, which all programs of a memory read, have another."""
    q, k, v, w, padding, *state, places, normalise, edge, rows = x
    q, k, v, w = dense(q), dense(k), dense(v), w.contiguous()
    (B, _, H, D), DV, (E, M) = q.shape, v.shape[-1], w.shape[:2]
    exact = torch.float32 in (q.dtype, v.dtype)
    state = [in_rows(y, rows) for y in state]
    tokens = state[-1] if rows is None else state[-1].index_select(0, rows.clamp_min(0))
    columns = [(0, DV + normalise)] if rows is None else [(0, DV), (DV, DV + 1)][: 1 + normalise]
    for start, end in columns:
        launch(
            step_kernel, (-(-(end - start) // 32), B * E), q, k, v, w, padding, rows, *state[:4], tokens, o, g,
            *(after or state), q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
            0 if padding is None else padding.stride(0), *(y.stride(0) for y in state), places, H, E,
            num_warps=4, M=M, F=D, DV=DV, BF=min(64, width(D)), BY=32, BG=width(H // E), NORM=normalise,
            PADDED=padding is not None, EDGE=edge, START=start, END=end,
            PREC="ieee" if interpreted() else "bf16x6" if exact else "bf16x3",
        )  # fmt: skip


NAMESPACE = own_namespace(__name__, "mhla")
mhla_op = operator(
    NAMESPACE, "mhla", Call, results, forward, "o g | S past old current mixed",
    backward=backward, leaves="q k v w", flops=flops,
)  # fmt: skip
step_op = operator(NAMESPACE, "mhla_step", StepCall, step_results, step, "o g past old current mixed tokens")
pool_op = operator(
    NAMESPACE, "mhla_step_pool", StepCall, step_results, step, "o g", changed="past old current mixed tokens"
)  # fmt: skip
