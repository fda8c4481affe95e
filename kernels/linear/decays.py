"""Gradient of a decay gamma that is one number per memory, on the GPU, without what cancels.

With f_ti = gamma^{t-i} r_t w_i (c q_t.k_i)(do_t.v_i), which token i adds to the loss through token t,

    dlog gamma = sum_{i<=t} (t - i) f_ti

The sums over i and over t are q_t.dq_t and k_i.dk_i, and sum_t t (q_t.dq_t - k_t.dk_t) is the same number: a difference
of two that grow with the row, while most f_ti are of near tokens. bf16 leaves nothing of it: 0.23 of the gradient's norm
with 8 x 2048 tokens. So each distance is taken apart where the way from i to t leaves stretches; no distance is negative:

    both in one stretch            (t - i) f_ti                          gradients_kernel, for rows t: `far_q`
    i before the stretch of t      (t - front) q_t.dq_t of the state     the same
    t behind the stretch of i      (end - i) k_i.dk_i of the state       the same kernel, for rows i: `far_k`
    a stretch between them         its length, as often as f_ti          `far_through`: gamma^length S.dS

S is the state that enters a stretch, dS the gradient of the one that leaves it. Places count real tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def far_through(
    S: Tensor, dS: Tensor, log_decay: Tensor, T: int, L: int, per_chunk: Tensor | None, places: Tensor | None,
    segments: Tensor | None,
) -> Tensor:  # fmt: skip
    """What states that pass through stretches of L tokens add to the gradient of log_decay, [E] fp32.

    S, dS [slots,E,D*Dv]; log_decay [E]; `per_chunk` [stretches,3] of sequences end to end: first token, tokens, slot;
    `places` [B,T]: real tokens up to each; `segments` [B,T]: a state ends with its document.
    """
    slots, E = S.shape[:2]
    if dS.is_meta:  # launches are only collected
        return dS.new_empty(E, dtype=torch.float32)
    # One product a memory; a sum of products would hold them all in fp32.
    both = torch.bmm(S.view(slots * E, 1, -1), dS.view(slots * E, -1, 1)).view(slots, E).float()
    if per_chunk is None:
        token = torch.arange(0, T, L, device=S.device).repeat(slots // -(-T // L))
        size, row = (T - token).clamp(max=L), torch.arange(slots, device=S.device) // -(-T // L)
    else:
        token, size, slot = per_chunk.long().unbind(1)
        both, row = both[slot], torch.zeros_like(token)
    end = (token + size - 1).clamp(min=0)
    alive, length = size > 0, size
    if places is not None:
        length = places[row, end] - torch.where(token > 0, places[row, (token - 1).clamp(min=0)], 0)
    if segments is not None:
        alive = alive & (segments[row, (token - 1).clamp(min=0)] == segments[row, end])
    length = length[:, None].float()
    return torch.where(alive[:, None], length * torch.exp(length * log_decay) * both, 0.0).sum(0)
