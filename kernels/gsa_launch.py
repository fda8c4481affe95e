"""GSA on the GPU, host side: scratch, launches, shipped configurations, and the registered operators.

The operators live in a namespace of this very module object: when several copies of the file meet in one process
(the package, checkpoints, versions), each keeps its own, whatever the order of imports.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .gsa_config import Config, configure, obstacle
from .gsa_triton import output_kernel, scan_kernel, states_kernel, step_kernel, triton
from .gsa_triton_bwd import key_kernel, query_kernel, writes_kernel


def runs_on(q: Tensor, v: Tensor, g: Tensor) -> str:
    """Why the kernels cannot take these inputs; empty when they can."""
    if triton is None:
        return "triton is not installed"
    if q.device.type != "cuda" and not interpreted():
        return f"the tensors are on {q.device}"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or v.dtype != q.dtype:
        return f"dtype {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > 256 or g.shape[-1] > 128:
        return f"head dim {q.shape[-1]}, {v.shape[-1]} or {g.shape[-1]} slots exceed 256, 256 and 128"
    if q.shape[0] * g.shape[2] > 65535:
        return f"{q.shape[0]} rows of {g.shape[2]} memories exceed a GPU's grid"
    return obstacle(q.device, q.dtype, g.shape[-1], q.shape[-1], v.shape[-1])


def interpreted() -> bool:
    """Whether triton runs its kernels on the CPU (TRITON_INTERPRET=1, for tests)."""
    return type(output_kernel).__name__ == "InterpretedFunction"


class Layout(NamedTuple):
    """How rows or sequences fall into chunks; a row of N chunks owns N + 1 slots."""

    chunks: int  # grid size: chunks per row, or a bound on all chunks of all sequences
    rows: int
    slots: int
    per_chunk: Tensor | None  # cu_seqlens: [chunks,3] first token, tokens, slot
    per_row: Tensor | None  # cu_seqlens: [rows,2] first slot, chunks


def lay_out(q: Tensor, cu: Tensor | None, C: int) -> Layout:
    """The chunks of q [B,T,H,D]. With cu_seqlens their number is only bounded, so that nothing waits for the GPU."""
    B, T = q.shape[:2]
    if cu is None:
        N = -(-T // C)
        return Layout(N, B, B * (N + 1), None, None)
    S, N = cu.shape[0] - 1, T // C + cu.shape[0] - 1
    cu = cu.long()
    counts = (cu[1:] - cu[:-1] + C - 1) // C
    ends = counts.cumsum(0)
    index = torch.arange(N, device=q.device)
    row = torch.searchsorted(ends, index, right=True).clamp(max=S - 1)
    token = cu[row] + (index - (ends - counts)[row]) * C
    size = torch.where(index < ends[-1], (cu[row + 1] - token).clamp(max=C), 0)
    per_chunk = torch.stack([token, size, index + row], -1).int()
    per_row = torch.stack([ends - counts + torch.arange(S, device=q.device), counts], -1).int()
    return Layout(N, S, N + S, per_chunk, per_row)


class Problem(NamedTuple):
    """The arguments of one call and what every launch derives from them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float
    segments: Tensor | None
    layout: Layout
    config: Config

    @property
    def sizes(self) -> dict[str, Any]:
        """Keyword arguments that all chunk kernels take."""
        D, DV, (E, M) = self.q.shape[-1], self.v.shape[-1], self.g.shape[2:]
        c = self.config
        return {
            "T": self.q.shape[1],
            "N": self.layout.chunks,
            "E": E,
            "M": M,
            "D": D,
            "DV": DV,
            "C": c.chunk,
            "BM": c.block_m,
            "BD": c.block_d,
            "BDV": c.block_dv,
            "VARLEN": self.layout.per_chunk is not None,
            "SEGMENTS": self.segments is not None,
            "PREC": c.precision,
        }

    @property
    def reading(self) -> dict[str, Any]:
        """What the kernels that work inside a chunk take on top."""
        E = self.g.shape[2]
        return {
            "H": self.q.shape[2],
            "SHARE": E // self.k.shape[2],
            "LEVELS": self.config.chunk.bit_length() - 1,
            "RANGE": self.config.range,
        }

    @property
    def grid(self) -> tuple[int, int]:
        return self.layout.chunks, self.q.shape[0] * self.g.shape[2]


class Memories(NamedTuple):
    """Scratch of one call: b [B,T,E,M], decay [slots,E,M], K [slots,E,M,D], V [slots,E,M,Dv]."""

    b: Tensor
    decay: Tensor
    K: Tensor
    V: Tensor


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Batch, time and head strides of [B,T,heads,D] tensors, whose last dimension is dense."""
    return tuple(step for tensor in tensors for step in tensor.stride()[:3])


def dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def problem(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, segments: Tensor | None, cu: Tensor | None
) -> Problem:
    config = configure(q, v, g)
    return Problem(dense(q), dense(k), dense(v), g.contiguous(), scale, segments, lay_out(q, cu, config.chunk), config)


def scan(
    x: Problem,
    decay: Tensor,
    K: Tensor,
    V: Tensor,
    start: list[Tensor | None],
    last: list[Tensor | None],
    reverse: bool,
) -> None:
    """Run `scan_kernel` over K and V in place, from `start` and, where wanted, into `last`."""
    (E, M, D), DV = K.shape[1:], V.shape[-1]
    # One warp holds BX whole columns, four to a thread: little to exchange. Long rows keep more chunks in flight.
    BX, BN = min(128, x.config.block_d, x.config.block_dv), 2
    while BN < 16 and x.layout.chunks > 32 * BN:
        BN *= 2
    scan_kernel[(M * -(-max(D, DV) // BX), x.layout.rows * E, 2)](
        K, V, decay, *start, *last, x.layout.per_row, N=x.layout.chunks, E=E, M=M, D=D, DV=DV, BN=BN, BX=BX,
        REVERSE=reverse, VARLEN=x.layout.per_row is not None, START=start[0] is not None, LAST=last[0] is not None,
        num_warps=1,
    )  # fmt: skip


def memories(x: Problem, start: list[Tensor | None], last: list[Tensor | None]) -> Memories:
    """What enters every chunk, from `start`; the memories after the last token go to `last`."""
    (B, T, E, M), slots = x.g.shape, x.layout.slots
    new: dict[str, Any] = {"device": x.q.device, "dtype": torch.float32}
    out = Memories(
        torch.empty(B, T, E, M, **new),
        torch.empty(slots, E, M, **new),
        torch.empty(slots, E, M, x.k.shape[-1], **new),
        torch.empty(slots, E, M, x.v.shape[-1], **new),
    )
    states_kernel[x.grid](
        x.k, x.v, x.g, x.segments, x.layout.per_chunk, *out, *strides(x.k, x.v), SHARE=x.reading["SHARE"],
        **x.sizes, num_warps=x.config.warps, num_stages=1,
    )  # fmt: skip
    scan(x, out.decay, out.K, out.V, start, last, reverse=False)
    return out


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    segments: Tensor | None,
    cu: Tensor | None,
    K0: Tensor | None,
    V0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B,T,H,Dv] and the memories after the last token, [rows,E,M,D] and [rows,E,M,Dv] in fp32."""
    x = problem(q, k, v, g, scale, segments, cu)
    (B, T, H, D), DV, (E, M) = q.shape, v.shape[-1], g.shape[2:]
    o = q.new_empty(B, T, H, DV)
    K1 = q.new_empty(x.layout.rows, E, M, D, dtype=torch.float32)
    V1 = q.new_empty(x.layout.rows, E, M, DV, dtype=torch.float32)
    m = memories(x, [_dense(K0), _dense(V0)], [K1, V1])
    heads = min(x.config.heads, H // E)
    output_kernel[(*x.grid, -(-(H // E) // heads))](
        x.q, x.k, x.v, x.g, segments, x.layout.per_chunk, m.b, m.K, m.V, o, scale, *strides(x.q, x.k, x.v),
        HEADS=heads, HOLD=x.config.hold, **x.sizes, **x.reading, num_warps=x.config.warps, num_stages=1,
    )  # fmt: skip
    return o, K1, V1


def backward(
    do: Tensor,
    dK1: Tensor | None,
    dV1: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    segments: Tensor | None,
    cu: Tensor | None,
    K0: Tensor | None,
    V0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g and of the entering memories (empty tensors where none entered)."""
    x = problem(q, k, v, g, scale, segments, cu)
    (B, T, H, D), DV, (E, M), rows = q.shape, v.shape[-1], g.shape[2:], x.layout.rows
    new: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
    do = dense(do)
    m = memories(x, [_dense(K0), _dense(V0)], [None, None])

    dq = torch.empty(B, T, H, D, device=q.device, dtype=q.dtype)
    p, dl = torch.empty(B, T, H, M, **new), torch.empty(B, T, H, M, **new)
    db = torch.empty(B, T, E, M, **new)
    query_kernel[x.grid](
        x.q, x.k, x.v, x.g, do, segments, x.layout.per_chunk, m.b, m.K, m.V, dq, p, dl, db, scale,
        *strides(x.q, x.k, x.v, do), HOLD=x.config.hold, **x.sizes, **x.reading, num_warps=x.config.warps, num_stages=1,
    )  # fmt: skip

    dK, dV = torch.empty_like(m.K), torch.empty_like(m.V)
    writes_kernel[x.grid](
        x.q, do, segments, x.layout.per_chunk, m.b, p, dl, dK, dV, scale, *strides(x.q, do), H=H,
        RANGE=x.config.range, **x.sizes, num_warps=x.config.warps, num_stages=1,
    )  # fmt: skip
    dK0 = torch.empty(rows, E, M, D, **new) if K0 is not None else torch.empty(0, **new)
    dV0 = torch.empty(rows, E, M, DV, **new) if V0 is not None else torch.empty(0, **new)
    last: list[Tensor | None] = [dK0, dV0] if K0 is not None else [None, None]
    scan(x, m.decay, dK, dV, _both(dK1, dV1, rows, (E, M, D, DV), new), last, reverse=True)

    # Gate heads that share a key head each make their own part of its gradient; the sum is below.
    shared = k.shape[2] < E
    dk = torch.empty(B, T, E, D, device=q.device, dtype=torch.float32 if shared else k.dtype)
    dv = torch.empty(B, T, E, DV, device=q.device, dtype=torch.float32 if shared else v.dtype)
    dg = torch.empty(B, T, E, M, device=q.device, dtype=g.dtype)
    key_kernel[x.grid](
        x.q, x.k, x.v, x.g, do, segments, x.layout.per_chunk, m.b, m.K, m.V, dK, dV, p, dl, db, dk, dv, dg, scale,
        *strides(x.q, x.k, x.v, do), **x.sizes, **x.reading, num_warps=x.config.warps, num_stages=x.config.key_stages,
    )  # fmt: skip
    if shared:
        dk = dk.unflatten(2, (k.shape[2], -1)).sum(3).to(k.dtype)
        dv = dv.unflatten(2, (k.shape[2], -1)).sum(3).to(v.dtype)
    return dq, dk, dv, dg, dK0, dV0


def _dense(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.float().contiguous()


def _both(
    dK: Tensor | None, dV: Tensor | None, rows: int, dims: tuple[int, int, int, int], new: dict[str, Any]
) -> list[Tensor | None]:
    """Both gradients of the last memories or neither."""
    if dK is None and dV is None:
        return [None, None]
    E, M, D, DV = dims
    dK = torch.zeros(rows, E, M, D, **new) if dK is None else _dense(dK)
    return [dK, torch.zeros(rows, E, M, DV, **new) if dV is None else _dense(dV)]


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    padding: Tensor | None,
    K: Tensor,
    V: Tensor,
    seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token in one launch: o [B,1,H,Dv] and the new state."""
    (B, _, H, D), DV, (E, M) = q.shape, v.shape[-1], g.shape[2:]
    q, k, v, g, K, V = dense(q), dense(k), dense(v), g.contiguous(), K.contiguous(), V.contiguous()
    o, K1, V1, seen1 = q.new_empty(B, 1, H, DV), torch.empty_like(K), torch.empty_like(V), torch.empty_like(seen)
    c = configure(q, v, g)
    step_kernel[(E, B)](
        q, k, v, g, padding, K, V, seen, o, K1, V1, seen1, scale, q.stride(0), q.stride(2), k.stride(0), k.stride(2),
        v.stride(0), v.stride(2), g.stride(0), 0 if padding is None else padding.stride(0), H, E, E // k.shape[2],
        M=M, D=D, DV=DV, BM=c.block_m, BX=c.step_columns, BG=max(16, 1 << (H // E - 1).bit_length()),
        PADDED=padding is not None, PREC=c.precision,
        num_warps=c.step_warps, num_stages=1,
    )  # fmt: skip
    return o, K1, V1, seen1


# ---------------------------------------------------------------- registration


def _own_namespace() -> str:
    """A namespace no other module object has taken; the name of the module makes it stable across processes."""
    name = "linearize_" + hashlib.sha256(__name__.encode()).hexdigest()[:12]
    taken = 0
    while hasattr(getattr(torch.ops, f"{name}_{taken}"), "gsa_forward"):
        taken += 1
    return f"{name}_{taken}"


NAMESPACE = _own_namespace()

FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, float scale, Tensor? segments, Tensor? cu, Tensor? K0, Tensor? V0)"
    " -> (Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor do, Tensor? dK1, Tensor? dV1, Tensor q, Tensor k, Tensor v, Tensor g, float scale, Tensor? segments,"
    " Tensor? cu, Tensor? K0, Tensor? V0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
STEP = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, float scale, Tensor? padding, Tensor K, Tensor V, Tensor seen)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)

chunked_op = torch.library.custom_op(f"{NAMESPACE}::gsa_forward", forward, mutates_args=(), schema=FORWARD)
backward_op = torch.library.custom_op(f"{NAMESPACE}::gsa_backward", backward, mutates_args=(), schema=BACKWARD)
step_op = torch.library.custom_op(f"{NAMESPACE}::gsa_step", step, mutates_args=(), schema=STEP)


@chunked_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    segments: Tensor | None,
    cu: Tensor | None,
    K0: Tensor | None,
    V0: Tensor | None,
) -> tuple[Tensor, ...]:
    rows, (E, M) = q.shape[0] if cu is None else cu.shape[0] - 1, g.shape[2:]
    return (
        q.new_empty(*q.shape[:3], v.shape[-1]),
        q.new_empty(rows, E, M, q.shape[-1], dtype=torch.float32),
        q.new_empty(rows, E, M, v.shape[-1], dtype=torch.float32),
    )


@backward_op.register_fake
def _(do: Tensor, dK1: Tensor | None, dV1: Tensor | None, *forward_inputs: Any) -> tuple[Tensor, ...]:
    *inputs, _, _, _, K0, V0 = forward_inputs
    dense_inputs = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
    return (*dense_inputs, *(do.new_empty(0 if x is None else x.shape, dtype=torch.float32) for x in (K0, V0)))


@step_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    padding: Tensor | None,
    K: Tensor,
    V: Tensor,
    seen: Tensor,
) -> tuple[Tensor, ...]:
    return (q.new_empty(*q.shape[:3], v.shape[-1]), *(torch.empty_like(x) for x in (K, V, seen)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, g, ctx.scale, segments, cu, K0, V0 = inputs
    ctx.save_for_backward(q, k, v, g, segments, cu, K0, V0)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dK1: Tensor | None, dV1: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, g, segments, cu, K0, V0 = ctx.saved_tensors
    if do is None:
        do = q.new_zeros(*q.shape[:3], v.shape[-1])
    *inputs, dK0, dV0 = backward_op(do, dK1, dV1, q, k, v, g, ctx.scale, segments, cu, K0, V0)
    return (*inputs, None, None, None, None if K0 is None else dK0, None if V0 is None else dV0)


chunked_op.register_autograd(_differentiate, setup_context=_save)


def _forward_flops(q: Any, k: Any, v: Any, g: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Multiply-adds of the chunk form, counted twice, causal halves not discounted: 4 C (D + M) + 8 D M a token."""
    (B, T, H, D), DV, M, C = q, v[-1], g[-1], 64
    return B * T * H * (2 * C * (D + DV + 2 * M) + 4 * M * (D + DV))


def _backward_flops(do: Any, dK1: Any, dV1: Any, *inputs: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """2.5 times the forward, and the forward's logits again."""
    return 3 * _forward_flops(*inputs)


_packets = getattr(torch.ops, NAMESPACE)
register_flop_formula(_packets.gsa_forward)(_forward_flops)
register_flop_formula(_packets.gsa_backward)(_backward_flops)
