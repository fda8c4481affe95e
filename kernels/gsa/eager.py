"""GSA in PyTorch: the decode step, and the chunk form around chunks.py.

Letters as in gsa.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..layers.arguments import state_dtype, to_gate_heads
from .chunks import GSAChunks, Read, read_slots
from ..layers.scan import from_chunks, into_chunks


class GSAState(NamedTuple):
    """Decode state: keys [B,E,M,D], values [B,E,M,Dv] in fp32, and the number of tokens absorbed, [B] int64."""

    keys: Tensor
    values: Tensor
    seen: Tensor


def write_strength(g: Tensor) -> Tensor:
    """s = 1 - exp(g), as -expm1(g): at g = -1e-4 the direct form has no correct digit left in bf16."""
    return -torch.expm1(g)


def fresh_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> GSAState:
    """The empty memory for these shapes: zeros, nothing absorbed."""
    B, (E, M) = q.shape[0], g.shape[2:]
    dtype = state_dtype(q)
    return GSAState(
        q.new_zeros(B, E, M, k.shape[-1], dtype=dtype),
        q.new_zeros(B, E, M, v.shape[-1], dtype=dtype),
        torch.zeros(B, dtype=torch.long, device=q.device),
    )


def real_tokens(q: Tensor, padding: Tensor | None) -> Tensor:
    B, T = q.shape[:2]
    return torch.full((B,), T, device=q.device) if padding is None else padding.long().sum(1)


# ---------------------------------------------------------------- recurrent step


def gsa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float,
    padding: Tensor | None = None,
    state: GSAState | None = None,
    read: Read = "softmax",
) -> tuple[Tensor, GSAState]:
    """One token, T=1: eq. 6 as it stands. Reads and writes the state once."""
    E = g.shape[2]
    K, V, seen = fresh_state(q, k, v, g) if state is None else state
    g_t = g[:, 0].to(K.dtype)
    if padding is not None:
        g_t = torch.where(padding[:, 0, None, None], g_t, 0.0)
    alpha, s = g_t.exp()[..., None], write_strength(g_t)[..., None]  # [B,E,M,1]
    k_t, v_t = (to_gate_heads(y, E)[:, 0, :, None].to(K.dtype) for y in (k, v))  # [B,E,1,D]
    K, V = alpha * K + s * k_t, alpha * V + s * v_t
    q_t = q[:, 0].unflatten(1, (E, -1)).to(K.dtype)  # [B,E,G,D]
    p = read_slots(scale * (q_t @ K.mT), read)  # [B,E,G,M]
    o = (p @ V).flatten(1, 2)[:, None]  # [B,1,H,Dv]
    if padding is not None:
        o = o * padding[:, :, None, None]
    return o.to(q.dtype), GSAState(K, V, seen + real_tokens(q, padding))


# ---------------------------------------------------------------- chunk form


def gsa_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    padding: Tensor | None,
    segments: Tensor | None,
    state: GSAState | None,
    chunk_size: int,
    read: Read = "softmax",
) -> tuple[Tensor, GSAState]:
    (B, T, H, _), E = q.shape, g.shape[2]
    C = min(chunk_size, 1 << max(T - 1, 0).bit_length())
    K, V, seen = fresh_state(q, k, v, g) if state is None else state
    if T == 0:
        return q.new_zeros(B, 0, H, v.shape[-1]), GSAState(K, V, seen)
    if padding is not None:
        g = torch.where(padding[:, :, None, None], g, 0.0)
    inputs = (q.to(K.dtype) * scale, to_gate_heads(k, E), to_gate_heads(v, E), g)
    o, K, V = GSAChunks.apply(*(into_chunks(y, C, E, K.dtype) for y in inputs), K, V, segments, read)
    o = from_chunks(o, C, T)
    if padding is not None:
        o = o * padding[:, :, None, None]
    return o.to(q.dtype), GSAState(K, V, seen + real_tokens(q, padding))
