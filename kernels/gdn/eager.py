"""Gated DeltaNet in PyTorch: chunks in WY form with their gradient, and the step of one token.

A chunk of C tokens, b the cumulative sum of g inside it, S the state that enters, w_t the write gate, x, e, u rows:

    L_ti = (k_t.k_i) e^{b_t-b_i}  for i < t            Te = (I + L diag(beta))^{-1}
    x_t = w_t v_t - e^{b_t} S^T k_t                    e = Te x                        u_t = beta_t e_t
    o_t = c r_t [ e^{b_t} S^T q_t + sum_{i<=t} (q_t.k_i) e^{b_t-b_i} u_i ]
    S_out = e^{b_C} S + sum_i e^{b_C-b_i} k_i u_i^T

e_t is what the delta rule finds missing at k_t, and the inverse solves for all e of a chunk at once. Backwards, with
dS the gradient of S_out, do~_t = c r_t do_t, and sums over the query heads of a state:

    du_i = sum_{t>=i} (q_t.k_i) e^{b_t-b_i} do~_t + e^{b_C-b_i} dS^T k_i           dx = Te^T (beta . du)
    dS_in = e^{b_C} dS + sum_t e^{b_t} (q_t do~_t^T - k_t dx_t^T)                  dv_t = w_t dx_t
    R_ti = (do~_t.u_i) e^{b_t-b_i}  for i <= t         X_ti = (dx_t.u_i) e^{b_t-b_i}  for i < t
    dq_t = sum_i R_ti k_i + e^{b_t} S do~_t
    dk_t = [ -sum_i X_ti k_i - e^{b_t} S dx_t ] + [ sum_i (R_it q_i - X_it k_i) + e^{b_C-b_t} dS u_t ]
    dbeta_t = e_t.dx_t / beta_t = e_t.(du_t - sum_i L_it dx_i)

With dk = [read] + [write] as above, b_t has the gradient q_t.dq_t + k_t.read_t - k_t.write_t, b_C also <S_out, dS>,
and g_t that of all b from t on. States are recomputed for the backward pass.

Letters: B batch, T time, E state heads, G query heads per state, D key dim, Dv value dim, C chunk, N chunks. Rows of
queries are [C*G], the G heads of a token side by side (scan.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layers.arguments import state_dtype, to_gate_heads
from ..layers.scan import FLOOR, from_chunks, into_chunks, segment_masks


class Inputs(NamedTuple):
    """What every path takes: q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv], g and beta [B,T,E], gates or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    read_gate: Tensor | None
    write_gate: Tensor | None


class DeltaState(NamedTuple):
    """Decode state: the memory [B,E,D,Dv] in fp32."""

    memory: Tensor


def fresh_state(q: Tensor, v: Tensor, g: Tensor) -> DeltaState:
    """The empty memory for these shapes."""
    return DeltaState(q.new_zeros(q.shape[0], g.shape[2], q.shape[3], v.shape[3], dtype=state_dtype(q)))


def neutral(x: Inputs, padding: Tensor | None) -> Inputs:
    """Gates that leave the state alone at padding: g = 0 and beta = 0."""
    if padding is None:
        return x
    real = padding[:, :, None]
    return x._replace(g=torch.where(real, x.g, 0.0), beta=torch.where(real, x.beta, 0.0))


def written_values(x: Inputs, dtype: torch.dtype) -> Tensor:
    """w v [B,T,E,Dv]."""
    v = to_gate_heads(x.v.to(dtype), x.g.shape[2])
    return v if x.write_gate is None else v * x.write_gate[..., None].to(dtype)


def gated_output(x: Inputs, o: Tensor, padding: Tensor | None) -> Tensor:
    """r o, 0 at padding, in the dtype of the inputs: o [B,T,H,Dv]."""
    if x.read_gate is not None:
        o = o * x.read_gate[..., None].to(o.dtype)
    return (o if padding is None else o * padding[:, :, None, None]).to(x.q.dtype)


def gdn_step(x: Inputs, scale: float, padding: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence for one token: o [B,1,H,Dv] and the new memory."""
    x, E, dtype = neutral(x, padding), x.g.shape[2], S.dtype
    k, v = to_gate_heads(x.k.to(dtype), E)[:, 0], written_values(x, dtype)[:, 0]  # [B,E,D], [B,E,Dv]
    S = x.g[:, 0, :, None, None].to(dtype).exp() * S
    u = x.beta[:, 0, :, None].to(dtype) * (v - (k[..., None] * S).sum(-2))
    S = S + k[..., None] * u[..., None, :]
    o = scale * (x.q[:, 0].unflatten(1, (E, -1)).to(dtype) @ S).flatten(1, 2)[:, None]
    return gated_output(x, o, padding), S


def gdn_chunked(
    x: Inputs, scale: float, S: Tensor, padding: Tensor | None, segments: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The chunk form: o [B,T,H,Dv] in q's dtype and the last memory."""
    T, E, dtype = x.q.shape[1], x.g.shape[2], S.dtype
    C = min(chunk_size, 1 << max(T - 1, 0).bit_length())
    x = neutral(x, padding)
    g = x.g.to(dtype).clamp_min(FLOOR)
    rows = (scale * x.q.to(dtype), to_gate_heads(x.k, E), written_values(x, dtype), g[..., None], x.beta[..., None])
    q, k, v, g, beta = (into_chunks(y, C, E, dtype) for y in rows)
    o, S = DeltaChunks.apply(q, k, v, g[..., 0], beta[..., 0], S, segments)
    return gated_output(x, from_chunks(o, C, T), padding), S


class Chunks(NamedTuple):
    """What follows from keys and gates of each chunk alone; decays are 0 where documents part."""

    from_start: Tensor  # e^{b_t} [B,E,N,C]
    to_end: Tensor  # e^{b_C-b_t} [B,E,N,C]
    through: Tensor  # e^{b_C} [B,E,N]
    decay: Tensor  # e^{b_t-b_i} for i <= t, else 0 [B,E,N,C,C]
    L: Tensor  # [B,E,N,C,C]
    Te: Tensor  # [B,E,N,C,C]
    pairs: Tensor | None  # same document [B,1,N,C,C]


def _chunks(k: Tensor, g: Tensor, beta: Tensor, segments: Tensor | None) -> Chunks:
    """For k [B,E,N,C,D] and gates [B,E,N,C]. Sums in fp64: their differences keep the digits of a small gate."""
    C, dtype = k.shape[-2], k.dtype
    b = g.double().cumsum(-1)
    from_start, to_end, through = b.to(dtype).exp(), (b[..., -1:] - b).to(dtype).exp(), b[..., -1].to(dtype).exp()
    allowed = torch.ones(C, C, dtype=torch.bool, device=k.device).tril()
    pairs = None
    if segments is not None:
        masks = segment_masks(segments, C)
        pairs, allowed = masks.pairs, allowed & masks.pairs
        from_start, to_end = from_start * masks.reads[..., 0], to_end * masks.writes[..., 0]
        through = through * masks.keeps[..., 0]
    decay = (b[..., :, None] - b[..., None, :]).to(dtype).masked_fill(~allowed, -torch.inf).exp()
    L = ((k @ k.mT) * decay).tril(-1)
    one = torch.eye(C, dtype=dtype, device=k.device).expand_as(L)
    Te = torch.linalg.solve_triangular(L * beta[..., None, :] + one, one, upper=False, unitriangular=True)
    return Chunks(from_start, to_end, through, decay, L, Te, pairs)


def _scan(k: Tensor, v: Tensor, beta: Tensor, S: Tensor, c: Chunks) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk, and the last, [B,E,N+1,D,Dv]; e [B,E,N,C,Dv]."""
    states, missing = [S], []
    for n in range(k.shape[2]):
        S, k_n = states[-1], k[:, :, n]
        e = c.Te[:, :, n] @ (v[:, :, n] - c.from_start[:, :, n, :, None] * (k_n @ S))
        weight = (c.to_end[:, :, n] * beta[:, :, n])[..., None]
        states.append(c.through[:, :, n, None, None] * S + k_n.mT @ (weight * e))
        missing.append(e)
    return torch.stack(states, 2), torch.stack(missing, 2)


def _scan_back(k: Tensor, beta: Tensor, du: Tensor, read: Tensor, dS: Tensor, c: Chunks) -> tuple[Tensor, ...]:
    """Gradients of the states [B,E,N+1,D,Dv], the first one first, of u and of x [B,E,N,C,Dv].

    `du` [B,E,N,C,Dv] is what comes from the chunk itself, `read` [B,E,N,D,Dv] what its queries send to its state.
    """
    states, all_du, all_dx = [dS], [], []
    for n in reversed(range(k.shape[2])):
        dS, k_n = states[-1], k[:, :, n]
        du_n = du[:, :, n] + c.to_end[:, :, n, :, None] * (k_n @ dS)
        dx = c.Te[:, :, n].mT @ (beta[:, :, n, :, None] * du_n)
        erased = k_n.mT @ (c.from_start[:, :, n, :, None] * dx)
        states.append(c.through[:, :, n, None, None] * dS + read[:, :, n] - erased)
        all_du.append(du_n)
        all_dx.append(dx)
    return tuple(torch.stack(y[::-1], 2) for y in (states, all_du, all_dx))


def _per_query(y: Tensor, rows: int) -> Tensor:
    """Per-token factors [..,C] or [..,C,C] for the rows [C*G] of queries."""
    dim = 3
    return y.repeat_interleave(rows // y.shape[dim], dim)


class DeltaChunks(torch.autograd.Function):
    """q [B,E,N,C*G,D], k [B,E,N,C,D], v [B,E,N,C,Dv], g and beta [B,E,N,C], S [B,E,D,Dv], segments [B,T] or None
    -> o [B,E,N,C*G,Dv], S."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, segments: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        c = _chunks(k, g, beta, segments)
        states, e = _scan(k, v, beta, S, c)
        start, decay = _per_query(c.from_start, q.shape[-2])[..., None], _per_query(c.decay, q.shape[-2])
        o = start * (q @ states[:, :, :-1]) + ((q @ k.mT) * decay) @ (beta[..., None] * e)
        ctx.save_for_backward(q, k, v, g, beta, S, segments)
        return o, states[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, S, segments = ctx.saved_tensors
        c = _chunks(k, g, beta, segments)
        states, e = _scan(k, v, beta, S, c)
        entered, left = states[:, :, :-1], states[:, :, 1:]
        start, decay = _per_query(c.from_start, q.shape[-2])[..., None], _per_query(c.decay, q.shape[-2])
        read = (start * q).mT @ do
        dstates, du, dx = _scan_back(k, beta, ((q @ k.mT) * decay).mT @ do, read, dS, c)
        later = dstates[:, :, 1:]

        u = beta[..., None] * e
        R = (do @ u.mT) * decay
        X = ((dx @ u.mT) * c.decay).tril(-1)
        dq = R @ k + start * (do @ entered.mT)
        reading = -(X @ k) - c.from_start[..., None] * (dx @ entered.mT)
        writing = R.mT @ q - X.mT @ k + c.to_end[..., None] * (u @ later.mT)
        dbeta = (e * (du - c.L.mT @ dx)).sum(-1)
        per_token = (q * dq).sum(-1).unflatten(-1, (g.shape[-1], -1)).sum(-1)
        db = per_token + (k * (reading - writing)).sum(-1)
        through = (left * later).sum((-2, -1))[..., None]
        if c.pairs is None:
            dg = db.flip(-1).cumsum(-1).flip(-1) + through
        else:  # a gate acts inside its own document
            dg = (c.pairs.tril().to(db) * db[..., :, None]).sum(-2)
            dg = dg + through * segment_masks(segments, g.shape[-1]).writes[..., 0]
        return dq, reading + writing, dx, dg, dbeta, dstates[:, :, 0], None
