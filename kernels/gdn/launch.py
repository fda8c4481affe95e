"""Gated DeltaNet on the GPU, host side: launch configurations, scratch, launches and the registered operators.

Configurations are shipped where they were measured, safe ones computed elsewhere; nothing is tuned at run time.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .forward import join_kernel, output_kernel, prepare_kernel, scan_kernel, step_kernel
from .backward import back_kernel, decay_kernel, key_kernel, local_kernel, query_kernel
from ..gpu.launch import Problem, dense, in_rows, launch, lay_out, scratch, strides, width
from ..gpu.operators import operator, own_namespace
from ..gpu.target import obstacle_of, refusal, target


class Launch(NamedTuple):
    """How one kernel runs."""

    # Columns that one program takes: of values (scan, back, output, local, join) or of keys (query, key).
    columns: int
    warps: int = 4
    # Buffers for the tiles of a loop over chunks.
    stages: int = 1
    # Registers a thread, where fewer than the compiler would take leave room for more programs.
    registers: int | None = None


class Config(NamedTuple):
    """Tile sizes, the precision of fp32 operands, how each kernel runs, and where rows are cut into pieces."""

    chunk_size: int
    block_d: int
    block_dv: int
    precision: str
    # Bits of a state that are kept: what has decayed by more is not followed from piece to piece.
    bits: int
    # Programs of the scan that run at once (0: rows are never cut), and the fewest chunks that make a piece.
    programs: int
    piece: int
    prepare: Launch
    scan: Launch
    output: Launch
    local: Launch
    back: Launch
    query: Launch
    key: Launch
    # The launches of scan and back that come first where rows are cut, and what joins the pieces.
    sums: Launch
    back_sums: Launch
    join: Launch

    def pieces(self, rows: int, chunks: int, DV: int) -> int:
        """Into how many pieces scan and back cut so many rows of heads, of so many chunks each.

        Pieces are walked twice, and once more for their M: two of them gain nothing.
        """
        most = min(self.programs // (rows * -(-DV // self.scan.columns)), chunks // self.piece, MOST_PIECES)
        return most if most > 2 else 1


# join_kernel looks at so many at once.
MOST_PIECES = 64

# (capability, BD, BDV) -> what differs from `safe` for bf16. Measured: one H200, B8 T2048 H16.
SHIPPED: dict[tuple[tuple[int, int], int, int], dict[str, Any]] = {
    ((9, 0), 128, 128): {"scan": Launch(64, stages=2), "sums": Launch(64, stages=2), "query": Launch(128)},
}


def configure(q: Tensor, v: Tensor) -> Config:
    """The configuration for these inputs on their device. Raises ValueError where nothing fits."""
    # Where shapes are symbols, head dims become numbers.
    return _configure(q.device, q.dtype, int(q.shape[3]), int(v.shape[3]))


@functools.cache
def _configure(device: torch.device, dtype: torch.dtype, D: int, DV: int) -> Config:
    gpu = target(device)
    if gpu is None:
        config = choose((0, 0), 1 << 20, 6, D, DV, dtype)
        return config._replace(chunk_size=32, precision="ieee", piece=1)
    return choose(*gpu, D, DV, dtype)


obstacle = obstacle_of(_configure)


@functools.cache
def choose(
    capability: tuple[int, int], shared: int, processors: int, D: int, DV: int, dtype: torch.dtype
) -> Config:
    """The shipped configuration for (capability, D), or one that fits `shared` bytes of shared memory."""
    config = safe(shared, D, DV, dtype)
    if join_bytes(config.block_d, config.join.columns) <= shared:
        config = config._replace(programs=2 * processors)
    if dtype == torch.bfloat16:
        config = config._replace(**SHIPPED.get((capability, config.block_d, config.block_dv), {}))
    return config


def safe(shared: int, D: int, DV: int, dtype: torch.dtype) -> Config:
    """The longest chunk whose kernels need no more than `shared` bytes.

    Raises ValueError when not even chunks of 16 tokens fit.
    """
    half = dtype == torch.bfloat16
    # Hopper's wgmma went wrong on tiles narrower than 64 beside chunks of 64 (docs/measurements/kernel-notes.md).
    BD, BDV = (max(64 if half else 16, width(x)) for x in (D, DV))
    wide = max(BD, BDV)
    # fp32 operands stay off wgmma, where three tf32 products race (seen with triton 3.6).
    longest = 64 if half and wide <= 128 else 32 if half or wide <= 128 else 16
    precision = {torch.bfloat16: "tf32", torch.float16: "bf16x3", torch.float32: "bf16x6"}[dtype]
    for C, block_k, along in ((64, 64, 64), (32, 64, 32), (16, 16, 16)):
        along, block_k, columns = min(along, BDV), min(block_k, BD), BDV if C > 16 else min(32, BDV)
        need = shared_elements(C, BD, BDV, block_k, along, columns) * (2 if half else 4)
        if longest >= C and need <= shared:
            launches = [Launch(n) for n in (C, along, columns, columns, along, block_k, block_k, along, along)]
            launches.append(Launch(min(64, BDV), warps=8 if BD > 64 else 4))
            return Config(C, BD, BDV, precision, 25 if dtype == torch.float32 else 17, 0, 4, *launches)
    raise ValueError(f"head dims {D} and {DV} need more than {shared} bytes of shared memory")


def shared_elements(C: int, BD: int, BDV: int, block_k: int, along: int, columns: int) -> int:
    """Bound on the shared memory of every kernel: all tiles of its products at once."""
    keys = 3 * C * BDV + 2 * block_k * BDV + 2 * C * block_k
    rows = 2 * C * BD + 2 * BD * along + 4 * C * along
    outputs = 2 * C * BD + C * columns + BD * columns
    return max(keys, rows, outputs) + 2 * C * C


def join_bytes(BD: int, columns: int) -> int:
    """Bound on the shared memory of join_kernel: M and a block of S, each in two bf16 parts or in fp32."""
    return 4 * BD * (BD + columns)


def runs_on(q: Tensor, v: Tensor, g: Tensor) -> str:
    """Why the kernels cannot take these inputs; empty when they can."""
    reason = refusal(q, v, 256, g.shape[2])
    return reason or obstacle(q.device, q.dtype, q.shape[-1], v.shape[-1])


class Call(NamedTuple):
    """The inputs of the operator for several tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    read_gate: Tensor | None
    write_gate: Tensor | None
    scale: float
    segments: Tensor | None
    cu: Tensor | None
    S0: Tensor | None


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


class GDNProblem(Problem):
    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.g, self.beta, self.scale = call.g.contiguous(), call.beta.contiguous(), call.scale
        self.read, self.write, self.segments = map(_contiguous, (call.read_gate, call.write_gate, call.segments))
        self.cu, self.S0 = call.cu, None if call.S0 is None else call.S0.float().contiguous()
        self.E, self.config = call.g.shape[2], configure(call.q, call.v)
        self.layout = lay_out(call.q, call.cu, self.config.chunk_size)
        self.scratch = torch.bfloat16 if call.q.dtype == torch.bfloat16 else torch.float32
        self.split = self.scratch == torch.bfloat16
        self.grid = self.layout.chunks, self.B * self.E
        self.pieces = pieces(call)
        # What kernels take after their tensors and strides; those of the query side take all.
        self.counts = self.T, self.layout.chunks, self.E, self.E // self.k.shape[2]
        self.all_counts = self.T, self.layout.chunks, self.H, *self.counts[2:]
        self.constants: dict[str, Any] = {
            "G": self.H // self.E,
            "D": self.D,
            "DV": self.DV,
            "C": self.config.chunk_size,
            "LEVELS": (self.config.chunk_size // 8).bit_length() - 1,
            "BD": self.config.block_d,
            "BITS": self.config.bits,
            "VARLEN": self.layout.per_chunk is not None,
            "SEGMENTS": self.segments is not None,
            "READ": self.read is not None,
            "WRITE": self.write is not None,
            "PREC": self.config.precision,
        }

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, how: Launch, **changed: Any) -> None:
        options: dict[str, Any] = {"num_warps": how.warps, "num_stages": how.stages, "maxnreg": how.registers}
        launch(kernel, grid, *arguments, **options, **(self.constants | changed))

    def along_rows(self, columns: int, *, moves: bool = False) -> tuple[int, int, int]:
        """The grid of a kernel that takes so many value columns of a state through the chunks of a piece of its row,
        with `moves` those of M, too."""
        blocks = -(-self.DV // columns) + (-(-self.D // columns) if moves else 0)
        return blocks, self.layout.rows * self.E, self.pieces

    def states(self) -> Tensor:
        return self.new(self.layout.slots, self.E, self.D, self.DV, dtype=self.scratch)

    def edges(self) -> Tensor:
        """A state for each piece."""
        return self.new(self.layout.rows, self.pieces, self.E, self.D, self.DV)

    def per_token(self) -> Tensor:
        return self.new(self.B, self.T, self.E, self.DV, dtype=self.scratch)


def pieces(x: Call) -> int:
    """Into how many pieces scan and back cut a row; of sequences laid end to end one of the mean length decides."""
    C, rows = (config := configure(x.q, x.v)).chunk_size, len(x.q) if x.cu is None else len(x.cu) - 1
    chunks = -(-x.q.shape[1] // C) if x.cu is None else (x.q.shape[1] // C + rows) // rows
    return config.pieces(rows * x.g.shape[2], chunks, int(x.v.shape[3]))


class Kept(NamedTuple):
    """What the backward pass takes over, where there are two parts each (fp32: one, and nothing): b [B,T,E], Te
    [B,T,E,C]. Where rows are cut, else nothing: what enters each piece [rows,pieces,E,D,Dv], M [rows,pieces,E,D,D], and
    whether it counts as zero [rows,pieces,E]."""

    b: Tensor
    b_low: Tensor
    Te: Tensor
    Te_low: Tensor
    starts: Tensor
    M: Tensor
    M_low: Tensor
    dead: Tensor


class Solved(NamedTuple):
    """Scratch of one call, in two parts each (fp32: one, twice): b [B,T,E], Te [B,T,E,C], e; and states."""

    b: tuple[Tensor, ...]
    Te: tuple[Tensor, ...]
    S: Tensor
    e: tuple[Tensor, Tensor]


def of_chunks(x: GDNProblem, kept: Kept) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """b and Te, both parts of each."""
    return (kept.b, kept.b_low), (kept.Te, kept.Te_low if x.split else kept.Te)


def prepare(x: GDNProblem, kept: Kept) -> None:
    """Fill b and Te."""
    b, Te = of_chunks(x, kept)
    x.launch(
        prepare_kernel, x.grid, x.k, x.g, x.beta, x.segments, x.layout.per_chunk, *b, *Te, *strides(x.k),
        *x.counts, how=x.config.prepare,
    )  # fmt: skip


def scan(x: GDNProblem, kept: Kept, first: Tensor | None, results: tuple[Tensor | None, ...], how: Launch) -> None:
    """One launch of the scan: S, e in two parts and the last state, or of pieces A, M in two parts and what is dead."""
    moves, (b, Te) = results[0] is None, of_chunks(x, kept)
    x.launch(
        scan_kernel, x.along_rows(how.columns, moves=moves), x.k, x.v, x.beta, x.write, x.segments, x.layout.per_row,
        x.cu, *b, *Te, first, *results, *strides(x.k, x.v), *x.counts, how=how, BV=how.columns,
        START=first is not None, LAST=results[3] is not None,
    )  # fmt: skip


def join(x: GDNProblem, A: Tensor, kept: Kept, first: Tensor | None, into: Tensor, *, reverse: bool) -> None:
    """What enters each piece, `reverse` the gradient of what leaves it."""
    how = x.config.join
    x.launch(
        join_kernel, x.along_rows(how.columns), A, kept.M, kept.M_low, kept.dead, first, into, x.E, how=how,
        BV=how.columns, START=first is not None, REVERSE=reverse,
    )  # fmt: skip


def enter_pieces(x: GDNProblem, kept: Kept) -> None:
    """Fill what is kept of pieces."""
    A = x.edges()
    M_low = kept.M_low if x.split else None
    scan(x, kept, x.S0, (None, None, None, None, A, kept.M, M_low, kept.dead), x.config.sums)
    join(x, A, kept, x.S0, kept.starts, reverse=False)


def solve(x: GDNProblem, kept: Kept, last: Tensor | None, *, exact: bool) -> Solved:
    """Everything up to the states that enter the chunks; the state after the last token goes to `last`. `exact` keeps
    both parts of e."""
    high = x.per_token()
    low = torch.empty_like(high) if x.split and exact else None
    out = Solved(*of_chunks(x, kept), x.states(), (high, high if low is None else low))
    first = x.S0 if x.pieces == 1 else kept.starts
    scan(x, kept, first, (out.S, high, low, last, None, None, None, None), x.config.scan)
    return out


def results(x: Call) -> tuple[Tensor, ...]:
    """Room for o [B,T,H,Dv], the state after the last token [rows,E,D,Dv] in fp32, and what is kept."""
    (B, T, H, D), E, DV, rows = x.q.shape, x.g.shape[2], x.v.shape[-1], len(x.q) if x.cu is None else len(x.cu) - 1
    kind = torch.bfloat16 if x.q.dtype == torch.bfloat16 else torch.float32
    P = pieces(x)
    cut = (rows, P, E) if P > 1 else (0, 1, E)
    sizes = (B, T, E, configure(x.q, x.v).chunk_size), (*cut, D, D)
    Te, Te_low, M, M_low = (
        scratch(x.q, *n, dtype=kind) for size in sizes for n in (size, size if kind == torch.bfloat16 else (0,))
    )
    kept = Kept(
        scratch(x.q, B, T, E), scratch(x.q, B, T, E), Te, Te_low, scratch(x.q, *cut, D, DV), M, M_low,
        scratch(x.q, *cut, dtype=torch.int32),
    )  # fmt: skip
    return scratch(x.q, B, T, H, DV, dtype=x.q.dtype), scratch(x.q, rows, E, D, DV), *kept


def forward(call: Call, o: Tensor, S1: Tensor, *parts: Tensor) -> None:
    x, kept = GDNProblem(call), Kept(*parts)
    c = x.config
    prepare(x, kept)
    if x.pieces > 1:
        enter_pieces(x, kept)
    s = solve(x, kept, S1, exact=False)
    x.launch(
        output_kernel, (*x.grid, -(-x.DV // c.output.columns)), x.q, x.k, x.beta, x.read, x.segments,
        x.layout.per_chunk, *s.b, s.S, s.e[0], o, x.scale, *strides(x.q, x.k), *x.all_counts, how=c.output,
        BV=c.output.columns,
    )  # fmt: skip


def backward(call: Call, do: Tensor, dS1: Tensor | None, *parts: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, g, beta, of both gates and of the first state; `parts` are what the forward pass kept."""
    x, do, kept = GDNProblem(call), dense(do), Kept(*parts)
    c, du = x.config, x.new(x.B, x.T, x.E, x.DV)
    s = solve(x, kept, None, exact=True)
    x.launch(
        local_kernel, (*x.grid, -(-x.DV // c.local.columns)), x.q, x.k, do, x.read, x.segments, x.layout.per_chunk,
        *s.b, du, x.scale, *strides(x.q, x.k, do), *x.all_counts, how=c.local, BV=c.local.columns,
    )  # fmt: skip
    dS, dx, dS0 = x.states(), x.per_token(), None if x.S0 is None else torch.empty_like(x.S0)
    last = None if dS1 is None else dS1.float().contiguous()
    dx_low = torch.empty_like(dx) if x.split else None

    def walk(how: Launch, first: Tensor | None, *made: Tensor | None) -> None:
        x.launch(
            back_kernel, x.along_rows(how.columns), x.q, x.k, do, x.beta, x.read, x.segments, x.layout.per_row, x.cu,
            *s.b, *s.Te, du, first, *made, x.scale, *strides(x.q, x.k, do), *x.all_counts, how=how, BV=how.columns,
            START=first is not None, LAST=made[3] is not None,
        )  # fmt: skip

    if x.pieces > 1:
        A, ends = x.edges(), x.edges()
        walk(c.back_sums, None, None, None, None, None, A)
        join(x, A, kept, last, ends, reverse=True)
        last = ends
    walk(c.back, last, dS, dx, dx_low, dS0, None)
    both = dx, dx if dx_low is None else dx_low
    return *_gradients(x, s, do, dS, both), dS0


def _gradients(x: GDNProblem, s: Solved, do: Tensor, dS: Tensor, dx: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    """What follows chunk by chunk: gradients of q, k, v, g, beta and of both gates."""
    # States that share a key head each make their own part of its gradients; the sum is below.
    c, shared = x.config, x.k.shape[2] < x.E
    of_queries, of_keys = (-(-x.D // how.columns) for how in (c.query, c.key))
    dq, dread = x.new(x.B, x.T, x.H, x.D, dtype=x.q.dtype), x.new(of_queries, x.B, x.T, x.H)
    x.launch(
        query_kernel, (*x.grid, of_queries), x.q, x.k, do, x.beta, x.read, x.segments, x.layout.per_chunk, *s.b, s.S,
        *s.e, dq, dread, x.scale, dread.stride(0), *strides(x.q, x.k, do), *x.all_counts, how=c.query,
        BK=c.query.columns, BV=c.block_dv,
    )  # fmt: skip
    dk = x.new(x.B, x.T, x.E, x.D, dtype=torch.float32 if shared else x.k.dtype)
    dv = dx[0] if x.write is None else x.new(x.B, x.T, x.E, x.DV, dtype=torch.float32 if shared else x.v.dtype)
    db, tail = x.new(of_keys, x.B, x.T, x.E), x.new(of_keys, x.layout.slots, x.E)
    dg, dbeta = torch.empty_like(x.g), torch.empty_like(x.beta)
    dwrite = None if x.write is None else torch.empty_like(x.write)
    x.launch(
        key_kernel, (*x.grid, of_keys), x.q, x.k, x.v, do, x.beta, x.read, x.write, x.segments, x.layout.per_chunk,
        *s.b, s.S, dS, *s.e, *dx, dk, dv, db, tail, dbeta, dwrite, x.scale, db.stride(0), tail.stride(0),
        *strides(x.q, x.k, x.v, do), *x.all_counts, how=c.key, BK=c.key.columns, BV=c.block_dv,
    )  # fmt: skip
    x.launch(
        decay_kernel, x.grid, db, tail, dread, x.read, x.segments, x.layout.per_chunk, dg, db.stride(0), tail.stride(0),
        dread.stride(0), *x.all_counts[:4], how=Launch(0, warps=1), QUERIES=of_queries, KEYS=of_keys,
    )  # fmt: skip
    if shared:
        dk, dv = (y.unflatten(2, (x.k.shape[2], -1)).sum(3, dtype=torch.float32) for y in (dk, dv))
    return dq, dk, dv, dg, dbeta, None if x.read is None else dread.sum(0), dwrite


def flops(x: Any) -> tuple[int, int]:
    """Of the chunk form, causal halves not discounted, without the inverse: per state head and token K K^T, K S, Te x
    and K^T u, per query head Q K^T, Q S and P u. Backward the states again, and two products for each of the forward's
    (X K and X^T K in place of those with Te)."""
    (B, T, H, D), DV, E, C = x.q, x.v[-1], x.g[2], 64
    states = B * T * E * (2 * C * (D + DV) + 4 * D * DV)
    forward = states + B * T * H * (2 * C * (D + DV) + 2 * D * DV)
    return forward, states + 2 * forward


class StepCall(NamedTuple):
    """The inputs of the operators for one token; with rows S is a pool, which is changed in place."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    read_gate: Tensor | None
    write_gate: Tensor | None
    scale: float
    padding: Tensor | None
    S: Tensor
    rows: Tensor | None = None


def step_results(x: StepCall) -> tuple[Tensor, ...]:
    """Room for o [B,1,H,Dv] and, without rows, the new state."""
    o = scratch(x.q, *x.q.shape[:3], x.v.shape[-1], dtype=x.q.dtype)
    return (o, scratch(x.S, *x.S.shape, dtype=x.S.dtype)) if x.rows is None else (o,)


def step(x: StepCall, o: Tensor, S1: Tensor | None = None) -> None:
    """One token in one launch."""
    q, k, v, g, beta, read, write, scale, padding, S, rows = x
    (B, _, H, D), DV, E = q.shape, v.shape[-1], g.shape[2]
    q, k, v, g, beta, S = dense(q), dense(k), dense(v), g.contiguous(), beta.contiguous(), in_rows(S, rows)
    BD = width(D)
    BV = 16 if BD > 128 else 32
    launch(
        step_kernel, (-(-DV // BV), E, B), q, k, v, g, beta, _contiguous(read), _contiguous(write), padding, rows, S,
        o, S if S1 is None else S1, scale, q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
        0 if padding is None else padding.stride(0), S.stride(0), H, E, E // k.shape[2], num_warps=4, D=D,
        DV=DV, BD=BD, BV=BV, READ=read is not None, WRITE=write is not None, PADDED=padding is not None,
    )  # fmt: skip


NAMESPACE = own_namespace(__name__, "gdn")
chunked_op = operator(
    NAMESPACE, "gdn", Call, results, forward, f"o S1 | {' '.join(Kept._fields)}", kept=" ".join(Kept._fields),
    backward=backward, leaves="q k v g beta read_gate write_gate S0", flops=flops,
)  # fmt: skip
step_op = operator(NAMESPACE, "gdn_step", StepCall, step_results, step, "o S1")
pool_op = operator(NAMESPACE, "gdn_step_pool", StepCall, step_results, step, "o", changed="S")
