"""GSA on the GPU, host side: scratch, launches and the registered operators."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import Walk, configure, obstacle
from .forward import output_kernel, scan_kernel, states_kernel, step_kernel
from .backward import key_kernel, logits_kernel, query_kernel, writes_kernel
from .sweep import (
    attend_kernel,
    carry_kernel,
    factors_kernel,
    gates_kernel,
    keys_kernel,
    mix_kernel,
    read_kernel,
    sums_kernel,
)
from .walk import walk_kernel
from ..gpu.launch import (
    ChunkLayout, Problem, dense, in_rows, launch, lay_out, most_chunks, scratch, strides, width,
)  # fmt: skip
from ..gpu.operators import operator, own_namespace
from ..gpu.target import refusal
from ..layout import of_starts, once


def runs_on(q: Tensor, v: Tensor, g: Tensor) -> str:
    """Why the kernels cannot take these inputs; empty when they can."""
    if reason := refusal(q, v, 256, g.shape[2]):
        return reason
    if g.shape[-1] > 128:
        return f"{g.shape[-1]} slots exceed 128"
    return obstacle(q.device, q.dtype, g.shape[-1], q.shape[-1], v.shape[-1])


class Call(NamedTuple):
    """The inputs of the operator for several tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float
    segments: Tensor | None
    cu: Tensor | None
    K0: Tensor | None
    V0: Tensor | None
    # Where chunks of documents begin (`chunk_tables`).
    chunks: Tensor | None = None
    first: Tensor | None = None


class GSAProblem(Problem):
    def __init__(self, call: Call, *, back: bool = False) -> None:
        """`back`: for the backward pass, which takes sequences laid end to end by forward.py's and backward.py's kernels."""
        super().__init__(call)
        self.g, self.scale, self.segments = call.g.contiguous(), call.scale, call.segments
        self.start = [None if x is None else x.float().contiguous() for x in (call.K0, call.V0)]
        (self.E, self.M), self.config = call.g.shape[2:], configure(call.q, call.v, call.g)
        self.swept = sweeps(self) and not (back and call.cu is not None)
        self.each = self.swept and call.cu is not None  # sequences are the pieces of a row
        if self.swept and self.config.sweep_chunk_size:
            self.config = self.config._replace(chunk_size=self.config.sweep_chunk_size)
        self.rows = self.B if call.cu is None else len(call.cu) - 1
        self.chunks = most_chunks(self.T, call.cu, self.config.chunk_size)
        self.grid = self.chunks, self.B * self.E
        # What chunk kernels take after their tensors and strides.
        self.counts = self.T, self.chunks, self.H, self.E, self.E // self.k.shape[2]
        # Query heads whose rows share one tile, where they come in that number.
        self.stack = self.config.stack if self.H // self.E % self.config.stack == 0 else 1
        self.constants = self._constants()

    def _constants(self) -> dict[str, Any]:
        c = self.config
        return {
            "M": self.M,
            "D": self.D,
            "DV": self.DV,
            "C": c.chunk_size,
            "LEVELS": c.chunk_size.bit_length() - 1,
            "BM": c.block_m,
            "BD": c.block_d,
            "BDV": c.block_dv,
            "VARLEN": self.call.cu is not None,
            "SEGMENTS": self.segments is not None or self.each,
            "EACH": self.each,
            "RANGE": c.range,
            "STACK": self.stack,
            "HOLD": c.hold,
            "PREC": c.precision,
        }

    @functools.cached_property
    def layout(self) -> ChunkLayout:
        """Of the kernels that have a program for each chunk; those that walk along rows need none."""
        return lay_out(self.call.q, self.call.cu, self.config.chunk_size)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 0, **changed: Any) -> None:
        launch(kernel, grid, *arguments, num_warps=warps or self.config.warps,
               **(self.constants | changed if changed else self.constants))  # fmt: skip

    def memory_pair(self, count: int) -> tuple[Tensor, Tensor]:
        """Room for key and value memories: [count,E,M,D] and [count,E,M,Dv] in fp32."""
        return self.new(count, self.E, self.M, self.D), self.new(count, self.E, self.M, self.DV)

    def key_gradients(self, summands: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Room for dk and dv. Gate heads that share a KV head each make their own part, of dtype `summands`, summed by
        `per_key_head`."""
        dtype = summands if self.k.shape[2] < self.E else self.k.dtype
        dk = self.new(self.B, self.T, self.E, self.D, dtype=dtype)
        return dk, self.new(self.B, self.T, self.E, self.DV, dtype=dtype)

    def per_key_head(self, dy: Tensor) -> Tensor:
        """dy [B,T,E,D] summed over the gate heads of each KV head, in k's dtype."""
        shared = self.k.shape[2] < self.E
        return dy.unflatten(2, (self.k.shape[2], -1)).sum(3).to(self.k.dtype) if shared else dy


class Memories(NamedTuple):
    """Scratch of one call: b [B,T,E,M], decay [slots,E,M], K [slots,E,M,D], V [slots,E,M,Dv]."""

    b: Tensor
    decay: Tensor
    K: Tensor
    V: Tensor


def scan(
    x: GSAProblem,
    decay: Tensor,
    K: Tensor,
    V: Tensor,
    start: list[Tensor | None],
    last: list[Tensor | None],
    reverse: bool,
    pieces: int = 0,
) -> None:
    """Run `scan_kernel` over K and V in place, from `start` and, where wanted, into `last`; over chunks or `pieces`."""
    count = pieces or x.chunks
    # One warp holds BX whole columns, four to a thread: little to exchange. Long rows keep more chunks in flight.
    BX, BN = min(128, x.config.block_d, x.config.block_dv), 2
    while BN < 16 and count > 32 * BN:
        BN *= 2
    x.launch(
        scan_kernel, (x.M * -(-max(x.D, x.DV) // BX), x.rows * x.E, 2),
        K, V, decay, *start, *last, x.layout.per_row, count, x.E, warps=1, BN=BN, BX=BX, REVERSE=reverse,
        START=start[0] is not None, LAST=last[0] is not None,
    )  # fmt: skip


def memories(x: GSAProblem, last: list[Tensor | None]) -> Memories:
    """What enters every chunk; the memories after the last token go to `last`."""
    out = Memories(x.new(x.B, x.T, x.E, x.M), x.new(x.layout.slots, x.E, x.M), *x.memory_pair(x.layout.slots))
    x.launch(states_kernel, x.grid, x.k, x.v, x.g, x.segments, x.layout.per_chunk, *out, *strides(x.k, x.v), *x.counts)
    scan(x, out.decay, out.K, out.V, x.start, last, reverse=False)
    return out


def results(x: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Room for o [B,T,H,Dv] and the memories after the last token, [rows,E,M,D] and [rows,E,M,Dv] in fp32."""
    (B, T, H, D), DV, rows = x.q.shape, x.v.shape[-1], len(x.q) if x.cu is None else len(x.cu) - 1
    K1, V1 = (scratch(x.q, rows, *x.g.shape[2:], dim) for dim in (D, DV))
    return scratch(x.q, B, T, H, DV, dtype=x.q.dtype), K1, V1


def forward(call: Call, o: Tensor, K1: Tensor, V1: Tensor) -> None:
    x = GSAProblem(call)
    if walks(x):
        x.launch(
            walk_kernel, (x.E, x.rows), x.q, x.k, x.v, x.g, call.cu, *x.start, K1, V1, o, x.scale,
            *strides(x.q, x.k, x.v), x.T, x.E, x.E // x.k.shape[2], warps=x.config.walk, START=x.start[0] is not None,
        )  # fmt: skip
        return
    if x.swept:
        _sweep_forward(Sweep(x), o, K1, V1)
        return
    m = memories(x, [K1, V1])
    x.launch(
        output_kernel, x.grid, x.q, x.k, x.v, x.g, x.segments, x.layout.per_chunk, m.b, m.K, m.V, o, x.scale,
        *strides(x.q, x.k, x.v), *x.counts, warps=x.config.warps * x.stack,
    )  # fmt: skip


def backward(
    call: Call, do: Tensor, dK1: Tensor | None, dV1: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, g and of the entering memories."""
    x, do = GSAProblem(call, back=True), dense(do)
    if x.swept:
        return _sweep_backward(Sweep(x), do, dK1, dV1)
    m, side_by_side = memories(x, [None, None]), x.config.warps * x.stack

    p, dl, db = x.new(x.B, x.T, x.H, x.M), x.new(x.B, x.T, x.H, x.M), x.new(x.B, x.T, x.E, x.M)
    x.launch(
        logits_kernel, x.grid, x.q, x.k, x.v, x.g, do, x.segments, x.layout.per_chunk, m.b, m.K, m.V, p, dl, db,
        x.scale, *strides(x.q, x.k, x.v, do), *x.counts, warps=side_by_side,
    )  # fmt: skip
    dq = x.new(x.B, x.T, x.H, x.D, dtype=x.q.dtype)
    x.launch(
        query_kernel, x.grid, x.k, x.g, x.segments, x.layout.per_chunk, m.b, m.K, dl, dq, *strides(x.k), *x.counts,
        warps=side_by_side,
    )  # fmt: skip

    dK, dV = torch.empty_like(m.K), torch.empty_like(m.V)
    x.launch(
        writes_kernel, (*x.grid, 2), x.q, do, x.segments, x.layout.per_chunk, m.b, p, dl, dK, dV, *strides(x.q, do),
        *x.counts,
    )  # fmt: skip
    first: list[Tensor | None] = [*x.memory_pair(x.rows)] if call.K0 is not None else [None, None]
    scan(x, m.decay, dK, dV, _both(x, dK1, dV1), first, reverse=True)

    dk, dv = x.key_gradients()
    # Each program reads its part of db before it writes dg there.
    dg = db if x.g.dtype == torch.float32 else x.new(x.B, x.T, x.E, x.M, dtype=x.g.dtype)
    for sent, y, w, S, dS, dy, out in ((do, x.v, p, m.V, dV, dv, db), (x.q, x.k, dl, m.K, dK, dk, dg)):
        x.launch(
            key_kernel, (2 * x.grid[0], x.grid[1]), sent, y, x.g, w, x.segments, x.layout.per_chunk, m.b, S, dS, db, dy,
            out, *strides(sent, y), *x.counts, warps=x.config.key_warps, num_stages=x.config.key_stages, D=y.shape[-1],
            BD=x.config.block_dv if y is x.v else x.config.block_d,
        )  # fmt: skip
    return dq, x.per_key_head(dk), x.per_key_head(dv), dg, *first


def _both(x: GSAProblem, *gradients: Tensor | None) -> list[Tensor | None]:
    """Both gradients of the last memories or neither."""
    if all(dS is None for dS in gradients):
        return [None, None]
    rooms = x.memory_pair(x.rows)
    return [room.zero_() if dS is None else dS.float().contiguous() for dS, room in zip(gradients, rooms, strict=True)]


# ---------------------------------------------------------------- a memory per query head: sweep.py

# Slots of a program, and its warps, of the kernels that load and store more than they compute.
SLOTS, WARPS = 64, 4
# Tokens of a row, on average, up to which one program walks along it.
LONGEST = 1024
# Programs of the second launch of `factors`, which finds nothing to do where gates are usual.
SECOND = 1024


def sweeps(x: GSAProblem) -> bool:
    """Whether the kernels of sweep.py take this call: a memory per query head, in sizes that they were written for, and
    work enough for their launches."""
    c = x.config
    if c.sweep_from > x.B * x.T * x.E:
        return False
    known = x.call.segments is None or x.call.chunks is not None
    return known and of_query_heads(x) and bool(c.sweep) and all(x.M % walk.part == x.D % walk.part == 0 for walk in c.sweep)


def of_query_heads(x: GSAProblem) -> bool:
    """Whether each query head has a memory, in sizes that fill tiles."""
    return x.H == x.E and x.D == x.DV == x.config.block_d and x.config.block_m == x.M


def walks(x: GSAProblem) -> bool:
    """Whether `walk_kernel` takes this call: memories that fit a program's registers, and short rows or sequences of so few
    tokens in all that the host is what waits."""
    c, tokens = x.config, x.B * x.T
    few = tokens * x.E <= c.walk_to and tokens <= x.rows * LONGEST
    return c.walk > 0 and x.segments is None and of_query_heads(x) and few


def chunk_tables(
    q: Tensor, v: Tensor, g: Tensor, documents: Tensor, cu: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """`tables` of a call whose rows hold `documents` [B,T], if sweep.py may take it; all layers of a pass share them.

    The operator gets them as inputs: what it made for a tensor and kept would be of another one in a compiled graph,
    which writes a second tensor into the memory, and the object, of a first.
    """
    c = configure(q, v, g)
    if not c.sweep or cu is not None:
        return None, None
    C = c.sweep_chunk_size or c.chunk_size
    return once(documents, ("chunks", C), lambda: tables(documents, C))


def tables(documents: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """Where the chunks of documents begin, which have C tokens each or what is left; made without a wait for the GPU.

    Of each row and chunk twice its first token, and 1 more where a document begins with it behind another; behind the
    last one 2 T: [B,T+2] int32. And how many chunks begin before every C-th token, and in all: [B,N+1] int32.
    `documents` [B,T] change their number where one begins.
    """
    (B, T), place = documents.shape, torch.arange(documents.shape[1], device=documents.device)
    new = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    starts = (place - torch.where(new, place, 0).cummax(1).values) % C == 0
    rank = starts.cumsum(1)
    chunks = place.new_full((B, T + 2), 2 * T)
    # What is no start goes to the last place, which nobody reads.
    chunks.scatter_(1, torch.where(starts, rank - 1, T + 1), 2 * place + new.long())
    first = torch.cat([F.pad(rank, (1, 0))[:, :T:C], rank[:, -1:]], 1)
    return chunks.int(), first.int()


def tables_of(cu: Tensor, T: int, C: int) -> tuple[Tensor, Tensor]:
    """`tables` of sequences that begin at `cu` [S+1], each with a memory of its own; and of each sequence the chunks that
    begin before it, then for the rest of [1,N+1] all of them, where N chunks are the most that there can be."""
    S, cu = len(cu) - 1, cu.long()
    ends = F.pad(((cu[1:] - cu[:-1] + C - 1) // C).cumsum(0), (1, 0))
    index = torch.arange(T + 2, device=cu.device)
    row = (torch.searchsorted(ends, index, right=True) - 1).clamp(max=S - 1)
    chunks = 2 * torch.where(index < ends[-1], cu[row] + (index - ends[row]) * C, cu[-1])
    first = torch.cat([ends, ends[-1:].expand(T // C)])
    return chunks.int()[None], first.int()[None]


class Sweep:
    """A call whose programs walk along rows, and its factors (sweep.py). Rows are cut into P pieces of L chunks; beside
    documents a piece has the chunks that begin within L * C tokens. Sequences are pieces of one chunk in that sense."""

    def __init__(self, x: GSAProblem) -> None:
        self.x, c = x, x.config
        N, heads = x.chunks, x.B * x.E
        self.read, self.mix, self.keys, self.gates = c.sweep
        self.tables: tuple[Tensor | None, Tensor | None] = x.call.chunks, x.call.first
        if x.call.cu is None:
            self.L = -(-N // max(1, min(N, c.sweep_programs // heads)))
            self.P = -(-N // self.L)
        else:
            cu = x.call.cu
            self.L, self.P = 1, len(cu) - 1
            self.tables = of_starts(cu, ("sweep", x.T, c.chunk_size), lambda starts: tables_of(starts, x.T, c.chunk_size))
        self.counts = x.T, N, self.L, self.P, x.E
        self.share = x.E // x.k.shape[2]
        self.d, self.W = x.new(x.B, x.T, x.E, x.M), self.factor()
        # A row of documents has more chunks than N, and at most one for each token.
        room, done = (N, N) if self.tables[0] is None else (x.T, 2 * N)
        steps = x.new(x.B, room, x.E, dtype=torch.int32).fill_(x.config.chunk_size)
        strong = x.new(x.B, x.E, dtype=torch.int32).zero_()
        second = min(N, max(1, SECOND // heads))
        for several, programs, part, warps in ((False, done, min(SLOTS, x.M), WARPS), (True, second, x.M, 4)):
            x.launch(
                factors_kernel, (programs * (x.M // part), heads), x.g, self.d, self.W, steps, strong, *self.tables, x.T, N,
                x.E, warps=warps, BX=part, SPLIT=x.M // part, STEPS=several,
            )  # fmt: skip
        # What every kernel takes of the gates.
        self.decays = x.g, self.d, steps, strong, *self.tables

    def factor(self) -> Tensor:
        """Room for a computed factor [B,T,E,M] as an operand of products: bf16 beside bf16 inputs, else fp32."""
        x = self.x
        return x.new(x.B, x.T, x.E, x.M, dtype=x.q.dtype if x.q.dtype == torch.bfloat16 else torch.float32)

    def launch(self, kernel: Any, walk: Walk, size: int, *arguments: Any, both: int = 1, **constants: Any) -> None:
        """For memories of `size` slots or columns; `both`: keys and values in one launch. A second launch takes the
        rows of which some chunks have several steps; there tiles cannot be loaded ahead."""
        for several in (False, True):
            part, warps, stages = (walk.part, 4, 1) if several else walk
            self.x.launch(
                kernel, (self.P * (size // part), self.x.B * self.x.E, both), *arguments, warps=warps,
                num_stages=stages, BX=part, SPLIT=size // part, STEPS=several, **constants,
            )  # fmt: skip

    def entering(self, cut: bool) -> tuple[Memories | None, list[Tensor]]:
        """Scratch and the memories that enter every piece, where rows are cut; else those before the row, or any
        tensor where none came."""
        x = self.x
        if not cut:
            return None, [self.d if y is None else y for y in x.start]
        slots = x.B * (self.P + 1)
        m = Memories(self.d, x.new(slots, x.E, x.M), *x.memory_pair(slots))
        self.launch(
            carry_kernel, self.mix, x.D, x.k, x.v, self.W, self.W, *self.decays, m.K, m.V, m.decay, *strides(x.k, x.v),
            *self.counts, self.share, both=2, REVERSE=False,
        )  # fmt: skip
        return m, [m.K, m.V]


def _sweep_forward(s: Sweep, o: Tensor, K1: Tensor, V1: Tensor) -> None:
    """As `forward`."""
    x = s.x
    cut = s.P > 1 and not x.each
    m, (K, V) = s.entering(cut)
    if m is not None:
        scan(x, m.decay, m.K, m.V, x.start, [K1, V1], reverse=False, pieces=s.P)
    carried = {"CUT": cut, "START": x.start[0] is not None, "LAST": not cut}
    logits, p = x.new(x.B, x.T, x.E, x.M), s.factor()
    s.launch(
        read_kernel, s.read, x.M, x.q, x.k, x.q, x.k, s.W, *s.decays, K, K, K1, K1, logits, logits, *strides(x.q, x.k, x.q, x.k),
        *s.counts, s.share, **carried,
    )  # fmt: skip
    _attend(s, logits, None, p, None, None)
    s.launch(mix_kernel, s.mix, x.D, x.v, p, s.W, *s.decays, V, V1, o, *strides(x.v), *s.counts, s.share, **carried)


def _attend(s: Sweep, logits: Tensor, dp: Tensor | None, p: Tensor, dl: Tensor | None, db: Tensor | None) -> None:
    """Run `attend_kernel`, 16 rows of slots a program; with dp for the backward."""
    x, rows = s.x, 16
    count = x.B * x.T * x.E
    x.launch(
        attend_kernel, (-(-count // rows),), logits, dp, s.d, p, dl, db, x.scale, count, warps=4,
        R=rows, BACKWARD=dp is not None,
    )  # fmt: skip


def _sweep_backward(s: Sweep, do: Tensor, dK1: Tensor | None, dV1: Tensor | None) -> tuple[Tensor | None, ...]:
    """As `backward`."""
    x = s.x
    end = _both(x, dK1, dV1)
    # The gradient of the last memories comes in as that of a piece's does.
    cut = s.P > 1 or end[0] is not None
    m, (K, V) = s.entering(cut)
    if m is not None:
        scan(x, m.decay, m.K, m.V, x.start, [None, None], reverse=False, pieces=s.P)
    carried = {"CUT": cut, "START": x.start[0] is not None, "LAST": False}
    logits, dp, db = (x.new(x.B, x.T, x.E, x.M) for _ in range(3))
    s.launch(
        read_kernel, s.read, x.M, x.q, x.k, do, x.v, s.W, *s.decays, K, V, K, V, logits, dp, *strides(x.q, x.k, do, x.v),
        *s.counts, s.share, both=2, **carried,
    )  # fmt: skip
    p, dl = s.factor(), s.factor()
    _attend(s, logits, dp, p, dl, db)
    dq = x.new(x.B, x.T, x.H, x.D, dtype=x.q.dtype)
    s.launch(
        mix_kernel, s.mix, x.D, x.k, dl, s.W, *s.decays, K, None, dq, *strides(x.k), *s.counts, s.share, **carried
    )

    first: list[Tensor | None] = [None, None] if x.start[0] is None else [*x.memory_pair(x.rows)]
    dK = dV = s.d
    if m is not None:
        dK, dV = torch.empty_like(m.K), torch.empty_like(m.V)
        s.launch(
            carry_kernel, s.mix, x.D, x.q, do, dl, p, *s.decays, dK, dV, None, *strides(x.q, do), *s.counts, 1, both=2,
            REVERSE=True,
        )  # fmt: skip
        scan(x, m.decay, dK, dV, end, first, reverse=True, pieces=s.P)
    dk, dv = x.key_gradients(x.k.dtype)
    s.launch(
        keys_kernel, s.keys, x.D, do, x.q, p, dl, s.W, *s.decays, dV, dK, *(s.d if y is None else y for y in first[::-1]), dv, dk, *strides(do, x.q),
        *s.counts, both=2, CUT=cut, LAST=not cut and first[0] is not None,
    )  # fmt: skip
    dsv, dsk, tail = x.new(x.B, x.T, x.E, x.M), x.new(x.B, x.T, x.E, x.M), x.new(2, x.B, s.P, x.E, x.M)
    S = (s.d, s.d) if m is None else (m.V, m.K)
    s.launch(
        gates_kernel, s.gates, x.M, do, x.q, x.v, x.k, p, dl, *s.decays, *S, dV, dK, dsv, dsk, tail,
        *strides(do, x.q, x.v, x.k), *s.counts, s.share, both=2, CUT=cut,
    )  # fmt: skip
    dg, part = torch.empty_like(x.g), min(SLOTS, x.M)
    x.launch(
        sums_kernel, (s.P * (x.M // part), x.B * x.E), dsv, dsk, db, x.g, s.d, s.W, tail, dg, *s.tables, x.T, s.counts[1], s.L, s.P, x.E,
        warps=WARPS, BX=part, SPLIT=x.M // part, CUT=cut,
    )  # fmt: skip
    return dq, x.per_key_head(dk), x.per_key_head(dv), dg, *first


# ---------------------------------------------------------------- one token


class StepCall(NamedTuple):
    """The inputs of the operators for one token; with rows the state is a pool, which is changed in place."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float
    padding: Tensor | None
    K: Tensor
    V: Tensor
    seen: Tensor
    rows: Tensor | None = None


def step_results(x: StepCall) -> tuple[Tensor, ...]:
    """Room for o [B,1,H,Dv] and, without rows, the new state."""
    o = scratch(x.q, *x.q.shape[:3], x.v.shape[-1], dtype=x.q.dtype)
    state = (scratch(y, *y.shape, dtype=y.dtype) for y in (x.K, x.V, x.seen))
    return (o, *state) if x.rows is None else (o,)


def step(x: StepCall, o: Tensor, *after: Tensor) -> None:
    """One token in one launch."""
    q, k, v, g, scale, padding, K, V, seen, rows = x
    (B, _, H, D), DV, (E, M) = q.shape, v.shape[-1], g.shape[2:]
    state = in_rows(K, rows), in_rows(V, rows), seen
    q, k, v, g, c = dense(q), dense(k), dense(v), g.contiguous(), configure(q, v, g)
    launch(
        step_kernel, (E, B), q, k, v, g, padding, rows, *state, o, *(after or state), scale, q.stride(0), q.stride(2),
        k.stride(0), k.stride(2), v.stride(0), v.stride(2), g.stride(0), 0 if padding is None else padding.stride(0),
        *(y.stride(0) for y in state), H, E, E // k.shape[2], num_warps=c.step_warps, M=M, D=D, DV=DV,
        BM=c.block_m, BX=c.step_columns, BG=width(H // E), PADDED=padding is not None or rows is not None,
        PREC=c.precision,
    )  # fmt: skip


def flops(x: Any) -> tuple[int, int]:
    """Of the chunk form, causal halves not discounted: 4 C (D + M) + 8 D M a token forward; backward 2.5 times that,
    and the forward's logits again."""
    (B, T, H, D), DV, M, C = x.q, x.v[-1], x.g[-1], 64
    forward = B * T * H * (2 * C * (D + DV + 2 * M) + 4 * M * (D + DV))
    return forward, 3 * forward


NAMESPACE = own_namespace(__name__, "gsa")
chunked_op = operator(
    NAMESPACE, "gsa", Call, results, forward, "o K1 V1", backward=backward, leaves="q k v g K0 V0", flops=flops
)
step_op = operator(NAMESPACE, "gsa_step", StepCall, step_results, step, "o K1 V1 seen1")
pool_op = operator(NAMESPACE, "gsa_step_pool", StepCall, step_results, step, "o", changed="K V seen")
