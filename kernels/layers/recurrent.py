"""What mixers with one memory [D,Dv] a head share (GLA, RetNet, Gated DeltaNet): options, the norm, the gates of SLA;
and of those without the delta rule the recurrence itself, for checking."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..layout import TokenLayout
from ..mixer import Mixer, AttentionSite, Tensors, as_autocast, check_half_lives, check_power_of_two, feature_parts, full_precision
from .arguments import to_gate_heads
from .norm import HeadNorm, fit_size
from .pool import put, take
from .rotary import rotated


class Recurrent(Mixer):
    """A mixer with `state_count` memories of `key_dim` features: one per KV head or query head."""

    pools = True
    # Where q and k are rotated, as rotary.py's Rope, for a mechanism with the choice.
    rope: str = "before"
    # Of the convolution over q, k and v, for a mechanism that has one; 1: none.
    taps: int = 1
    # Of each state head, whose outputs add up, for a mechanism with the choice; and which of them `calibrate` is at.
    memories: int = 1
    fitted = slice(None)
    query_map: Tensor | None
    key_map: Tensor | None
    # What `calibrate` tries for each memory: the name of a start, as `start_from` knows it -> candidates.
    tried: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def build(
        self, state_heads: str, feature_map: str, norm: str, half_lives: tuple[float, float], chunk_size: int
    ) -> None:
        """The parts and numbers that these options stand for.

        Raises ValueError when half_life_max < half_life_min, or chunk_size is no power of two.
        """
        check_half_lives(*half_lives)
        check_power_of_two(chunk_size=chunk_size)
        site, self.half_lives, self.chunk_size = self.site, half_lives, chunk_size
        self.state_count = site.heads if state_heads == "query" else site.kv_heads
        self.features: Any = None
        if feature_parts(feature_map):
            self.features = import_module(".features", __package__).Features.at(site, feature_map, self.memories)
        self.key_dim = site.key_dim if self.features is None else self.features.size
        self.norm = HeadNorm(self.memories * site.heads, site.value_dim) if norm == "head" else None

    def build_taps(self, taps: int) -> None:
        """The convolution over q, k and v, each channel by itself."""
        self.taps, site, M = taps, self.site, self.memories
        if taps > 1:
            conv = import_module(".conv", __package__)
            self.short_conv, self.conv_in_pool = conv.short_conv, conv.conv_in_pool
            self.query_taps = nn.Parameter(torch.empty(M * site.heads, site.key_dim, taps))
            self.key_taps = nn.Parameter(torch.empty(M * site.kv_heads, site.key_dim, taps))
            self.value_taps = nn.Parameter(torch.empty(M * site.kv_heads, site.value_dim, taps))

    def reset_taps(self) -> None:
        """The convolution starts as the identity."""
        for weight in (self.query_taps, self.key_taps, self.value_taps) if self.taps > 1 else ():
            identity = torch.zeros_like(weight)
            identity[..., -1] = 1.0
            init.copy_(weight, identity)

    def build_maps(self, wanted: bool) -> None:
        """Linear maps of q and k for each memory, in front of the convolution."""
        site, M = self.site, self.memories
        for role, heads in {"query": M * site.heads, "key": M * site.kv_heads}.items():
            weight = nn.Parameter(torch.empty(heads, site.key_dim, site.key_dim)) if wanted else None
            self.register_parameter(f"{role}_map", weight)

    def reset_maps(self) -> None:
        """Maps start as the identity, which `mapped` adds."""
        for weight in (self.query_map, self.key_map):
            if weight is not None:
                init.zeros_(weight)

    def mapped(self, y: Tensor, weight: Tensor | None) -> Tensor:
        """Queries or keys behind their maps, where there are any: y + D^-1/2 W y, by which W learns at the rate of other
        parameters."""
        if weight is None:
            return y
        heads = y.flatten(0, 1).transpose(0, 1)
        found = torch.baddbmm(heads, heads, weight.to(y.dtype).mT, alpha=self.site.key_dim**-0.5)
        return found.transpose(0, 1).unflatten(0, y.shape[:2])

    def for_memories(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B,T,heads,D] of every memory, those of the first memories in front: [B,T,M*heads,D]."""
        if self.memories > 1:
            q, k, v = (torch.cat([y] * self.memories, 2) for y in (q, k, v))
        return self.mapped(q, self.query_map), self.mapped(k, self.key_map), v

    def of_memories(self, o: Tensor) -> Tensor:
        """What a head's memories put out, [B,T,M*H,Dv], added up."""
        return o if self.memories == 1 else o.unflatten(2, (self.memories, -1)).sum(2)

    @classmethod
    def parts(cls, site: AttentionSite, options: dict[str, Any]) -> dict[str, str]:
        found = super().parts(site, options) | feature_parts(options["feature_map"])
        return found | ({"layers/conv": "short_conv"} if options.get("taps", 1) > 1 else {})

    def turn(self, y: Tensor, layout: TokenLayout) -> Tensor:
        """Queries or keys [B,T,heads,F] as the memory sees them: rotated here, where that comes after the features."""
        rotation = layout.rotation
        if self.rope != "after" or rotation is None:
            return y
        return rotated(y, rotation, self.site.key_dim, plain=layout.plain)

    # With SLA's gates behind the arguments of `Mixer.project`.
    project: Callable[..., tuple[Tensors, Tensors]]

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, state: Any, read_gate: Tensor | None =
        None, write_gate: Tensor | None = None,
    )-> tuple[Tensor, Any]:  # fmt: skip
        """`Mixer.mix`, with SLA's gates: `read_gate` [B,T,H] on the output, after the norm, which would cancel it;
        `write_gate` [B,T,E] on what is written."""
        inputs, beside = self.project(q, k, v, x, layout, read_gate, write_gate)
        outputs, state = self.scan(inputs, layout, state)
        return self.finish(outputs, beside, layout)[0], state

    def convolved(
        self, inputs: tuple[Tensor, Tensor, Tensor], layout: TokenLayout, tails: Any, *biases: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
        """q, k and v behind the convolution, where there is one, and what it goes on from: their last K - 1 tokens.
        `tails` are those of an earlier call, or three None; in a pool they are changed in place. With `biases` of q, k
        and v SiLU follows."""
        if self.taps == 1:
            if tails[0] is not None:
                return inputs, tails
            sequences = inputs[0].shape[0] if layout.cu_seqlens is None else len(layout.cu_seqlens) - 1
            return inputs, [y.new_empty(sequences, 0, *y.shape[2:], dtype=torch.float32) for y in inputs]
        rows = None if tails[0] is None else layout.rows
        taps, places = (self.query_taps, self.key_taps, self.value_taps), (layout.padding, layout.segments)
        if rows is not None:
            one = self.conv_in_pool(inputs, taps, tails, rows, biases, layout.padding)
            if one is not None:
                return one, tails
        held = tails if rows is None else [take(tail, rows) for tail in tails]
        made = [
            self.short_conv(*each, *places, layout.cu_seqlens, bias=bias, swish=bias is not None)
            for *each, bias in zip(inputs, taps, held, biases or (None,) * 3, strict=True)
        ]
        (q, k, v), ends = zip(*made, strict=True)
        if rows is None:
            return (q, k, v), ends
        put(tails, rows, ends)
        return (q, k, v), tails

    def recur(
        self, op: Callable[..., tuple[Tensor, Any]], layout: TokenLayout, state: Any, *inputs: Any, **gates: Any
    ) -> tuple[Tensor, Any]:
        """`op` on what `project` made."""
        # Autocast would run the fp32 memories' products in half precision.
        with full_precision(inputs[0].device):
            return op(
                *inputs, **gates, padding=layout.padding, segments=layout.segments, cu_seqlens=layout.cu_seqlens,
                state=state, rows=layout.rows, chunk_size=self.chunk_size,
            )  # fmt: skip

    def normed(self, o: Tensor, read_gate: Tensor | None, layout: TokenLayout) -> Tensor:
        """The norm of each head's output, where there is one, with SLA's gate behind it."""
        if self.norm is None:
            return o
        with full_precision(o.device):
            return self.norm(o, read_gate, plain=layout.plain)

    def starts(self) -> dict[str, tuple[Any, ...]]:
        """What `calibrate` tries with the options that this one has."""
        return self.tried

    def start_from(self, name: str, values: list[Any]) -> None:
        """Write the gates' biases, or the decays, that a start in `tried` stands for, given a value for each memory."""
        raise NotImplementedError(f"{type(self).__name__} tries no {name}")

    @torch.no_grad()
    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, o: Tensor, o_teacher: Tensor, layout: TokenLayout | None = None,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """For each memory take the start whose output is nearest to the teacher's, then fit the norm of each head.

        What a head's attention looks like decides how long its memory lasts best. The second memory of a head is fitted
        to what the first leaves of the teacher's output. Beside a window, which is fitted with the norm, and where gates
        start as published, only the norms follow the teacher. `gates` are SLA's.
        """
        M = self.memories
        if self.near is not None or self.half_lives[0] <= 0.0:
            self.calibrate_norms(o_teacher)
            return
        q, k, v = as_autocast(q, k, v)
        layout = TokenLayout() if layout is None else layout

        def run() -> Tensor:
            return self.mix(q, k, v, x, layout, None, *(gates or ()))[0].float()

        if M == 1:
            self._fit(run, o_teacher)
            return
        assert self.norm is not None
        norm, rest = self.norm.weight, o_teacher.float()
        found = torch.zeros_like(norm)
        for i in range(M):
            self.fitted = slice(i * self.state_count, (i + 1) * self.state_count)
            heads = slice(i * self.site.heads, (i + 1) * self.site.heads)
            norm.zero_()[heads] = 1.0
            self._fit(run, rest)
            found[heads] = norm[heads]
            rest = rest - run()
        norm.copy_(found)
        self.fitted = slice(None)

    def calibrate_norms(self, o_teacher: Tensor) -> None:
        """The norms alone: the memories of a head have equal parts of its teacher's output."""
        if self.norm is not None:
            M = self.memories
            self.norm.calibrate(o_teacher if M == 1 else o_teacher.repeat(1, 1, M, 1) / M**0.5)

    def _fit(self, run: Callable[[], Tensor], o_teacher: Tensor) -> None:
        """The starts of `fitted` memories, then the norms; `run` gives the output as it is."""
        for name, candidates in self.starts().items():
            errors = []
            for value in candidates:
                self.start_from(name, [value] * self.state_count)
                y = run()
                gain = (y * o_teacher.float()).sum((0, 1, 3)).clamp_min(0.0).square()
                fall = gain / y.square().sum((0, 1, 3)).clamp_min(1e-12)  # of the squared error, at the best size
                errors.append(-fall.unflatten(0, (self.state_count, -1)).sum(-1))
            best = torch.stack(errors).argmin(0).tolist()
            self.start_from(name, [candidates[i] for i in best])
        if self.norm is not None:
            fit_size(self.norm.weight.unflatten(0, (self.memories, -1)), run(), o_teacher)

    def state_bytes(self, tokens: int, item: int = 4) -> int:
        site = self.site
        tail = (self.taps - 1) * (site.heads * site.key_dim + site.kv_heads * (site.key_dim + site.value_dim))
        own = self.state_count * self.key_dim * site.value_dim + tail
        return super().state_bytes(tokens, item) + 4 * self.memories * own


def outer_products(
    x: tuple[Tensor, Tensor, Tensor, Tensor], scale: float | None, padding: Tensor | None, segments: Tensor | None,
    S: Tensor, read: Tensor | None, write: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S_t = diag(e^{g_t}) S_{t-1} + w_t k_t v_t^T, o_t = r_t S_t^T (c q_t) token by token, for checking: o [B,T,H,Dv] in
    q's dtype and the last S [B,E,D,Dv].

    `x`: q [B,T,H,D], k, v [B,T,Hkv,.] and g [B,T,E,D or 1]; `scale` c (None: D^-1/2); the gates [B,T,H] and [B,T,E].
    """
    q, k, v, g = x
    (B, T, H, D), E = q.shape, g.shape[2]
    scale, outputs = D**-0.5 if scale is None else scale, []
    read = torch.ones(B, T, H, dtype=S.dtype) if read is None else read.to(S.dtype)
    write = torch.ones(B, T, E, dtype=S.dtype) if write is None else write.to(S.dtype)
    for t in range(T):
        if segments is not None and t > 0:
            S = S * (segments[:, t] == segments[:, t - 1]).to(S.dtype)[:, None, None, None]
        real = torch.ones(B, dtype=torch.bool) if padding is None else padding[:, t]
        k_t, v_t = (to_gate_heads(y[:, t : t + 1], E)[:, 0].to(S.dtype) for y in (k, v))  # [B,E,D], [B,E,Dv]
        added = write[:, t, :, None, None] * k_t[..., None] * v_t[:, :, None]
        S = torch.where(real[:, None, None, None], g[:, t].to(S.dtype).exp()[..., None] * S + added, S)
        o_t = scale * torch.einsum("begd,bedv->begv", q[:, t].unflatten(1, (E, -1)).to(S.dtype), S)
        outputs.append(o_t.flatten(1, 2) * (read[:, t] * real[:, None])[..., None])
    o = torch.stack(outputs, 1) if outputs else q.new_zeros(B, 0, H, v.shape[-1])
    return o.to(q.dtype), S
