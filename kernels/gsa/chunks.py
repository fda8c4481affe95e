"""GSA in PyTorch, a chunk at a time: the chunk form of gsa.py and its gradient, derived by hand.

With b the cumulative log-decay inside the chunk, everything per slot m:

    keys    l_t = e^{b_t} . (K_in q_t) + sum_{i<=t} (q_t.k_i) e^{b_t-b_i} . s_i
    values  o_t = V_in^T (e^{b_t} . p_t) + sum_{i<=t} ( sum_m p_t e^{b_t-b_i} s_i ) v_i

Backwards, with a_ti = q_t.k_i and da_ti = do_t.v_i:

    dp_t = e^{b_t} . (V_in do_t) + sum_{i<=t} da_ti e^{b_t-b_i} . s_i        dl = p . (dp - sum_m p dp)
    ds_i = sum_{t>=i} e^{b_t-b_i} . (da_ti p_t + a_ti dl_t) + e^{b_C-b_i} . (dK_out k_i + dV_out v_i)

Each decay e^{b_t-b_i} counts b_t once and b_i once, so b needs no pass of its own:

    db_t = p_t . dp_t + l_t . dl_t - s_t . ds_t        db_C += sum_D ( K_out . dK_out + V_out . dV_out )

Autograd through the same steps would keep 15 times the bytes of l for the backward pass (H=8, Hkv=4, D=32, M=64);
this keeps 3 times as much.

Letters as in gsa.py; rows of queries, logits and outputs are [C*G], the G heads of a token side by side.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layers.scan import FLOOR, Decays, chunk_decays, scaled, scan_states, scan_states_back, values_back, values_pass


# What makes p of the logits l: softmax, or those of the paper's table 2.
Read = Literal["softmax", "identity", "swish", "relu", "relu2"]


def read_slots(logits: Tensor, read: Read) -> Tensor:
    """p [..,M] of logits [..,M]."""
    if read == "softmax":
        return torch.softmax(logits, -1)
    if read == "swish":
        return F.silu(logits)
    y = logits if read == "identity" else F.relu(logits)
    return y.square() if read == "relu2" else y


def _read_back(dp: Tensor, logits: Tensor, p: Tensor, read: Read) -> Tensor:
    """The gradient of the logits."""
    if read == "softmax":
        return p * (dp - (p * dp).sum(-1, keepdim=True))
    if read == "swish":
        sigma = logits.sigmoid()
        return dp * (sigma + p * (1.0 - sigma))
    if read == "identity":
        return dp
    return dp * (2.0 * F.relu(logits) if read == "relu2" else (logits > 0).to(dp.dtype))


class GSAChunks(torch.autograd.Function):
    """q [B,E,N,C*G,D], k [B,E,N,C,D], v [B,E,N,C,Dv], g [B,E,N,C,M], memories K [B,E,M,D], V [B,E,M,Dv], segments
    [B,T] or None and `read` -> o [B,E,N,C*G,Dv] and both memories after the last chunk. The scale is in q.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, K: Tensor, V: Tensor, segments: Tensor | None, read: Read
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.read = read
        g = g.clamp_min(FLOOR)
        s, decays = -torch.expm1(g), chunk_decays(g, segments)
        write = (s * decays.to_end).mT
        Ks, Vs = scan_states(decays.through, write @ k, K), scan_states(decays.through, write @ v, V)
        logits = _keys_pass(q, k, s, Ks[:, :, :-1], decays)
        o = values_pass(read_slots(logits, read), v, s, Vs[:, :, :-1], decays)
        ctx.save_for_backward(q, k, v, g, Ks, Vs, logits, segments)
        return o, Ks[:, :, -1].clone(), Vs[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dK: Tensor, dV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, Ks, Vs, logits, segments = ctx.saved_tensors
        s, decays = -torch.expm1(g), chunk_decays(g, segments)
        p = read_slots(logits, ctx.read)
        dp, dv, ds, dV_in = values_back(do.contiguous(), p, v, s, Vs[:, :, :-1], decays)
        dl = _read_back(dp, logits, p, ctx.read)
        dq, dk, ds_keys, dK_in = _keys_back(dl, q, k, s, Ks[:, :, :-1], decays)
        dKs, dVs = scan_states_back(decays.through, dK_in, dK), scan_states_back(decays.through, dV_in, dV)

        write, dK_out, dV_out = s * decays.to_end, dKs[:, :, 1:], dVs[:, :, 1:]
        dk += write @ dK_out
        dv += write @ dV_out
        ds += ds_keys + decays.to_end * (k @ dK_out.mT + v @ dV_out.mT)
        db = (p * dp + logits * dl).unflatten(-2, (g.shape[-2], -1)).sum(-2) - s * ds
        db[..., -1, :] += (Ks[:, :, 1:] * dK_out).sum(-1) + (Vs[:, :, 1:] * dV_out).sum(-1)
        dg = db.flip(-2).cumsum(-2).flip(-2) - (1.0 - s) * ds
        return dq, dk, dv, dg, dKs[:, :, 0], dVs[:, :, 0], None, None


def _keys_pass(q: Tensor, k: Tensor, s: Tensor, K_in: Tensor, decays: Decays) -> Tensor:
    """The logits l [B,E,N,C*G,M]."""
    logits = scaled(q @ K_in.mT, decays.from_start)
    for c in decays.couplings:
        scores = c.mask_(c.queries(q) @ c.keys(k).mT)
        c.queries(logits).add_(scaled(scores @ (c.keys(s) * c.key_decay), c.query_decay))
    return logits


def _keys_back(
    dl: Tensor, q: Tensor, k: Tensor, s: Tensor, K_in: Tensor, decays: Decays
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk and ds of the keys pass inside the chunk, and what each chunk adds to dK_in."""
    read = scaled(dl, decays.from_start)
    dq, dk, ds = read @ K_in, torch.zeros_like(k), torch.zeros_like(s)
    for c in decays.couplings:
        q_c, dl_c, s_c = c.queries(q), scaled(c.queries(dl), c.query_decay), c.keys(s) * c.key_decay
        scores, dscores = c.mask_(q_c @ c.keys(k).mT), c.mask_(dl_c @ s_c.mT)
        c.queries(dq).add_(dscores @ c.keys(k))
        c.keys(dk).add_(dscores.mT @ q_c)
        c.keys(ds).addcmul_(scores.mT @ dl_c, c.key_decay)
    return dq, dk, ds, read.mT @ q
