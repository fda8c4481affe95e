"""SLA: softmax linear attention (Xu et al., "Softmax Linear Attention: Reclaiming Global Competition",
arXiv 2602.01744): heads compete for every token, over a linear mechanism whose heads do not know of each other.

Per token, with scores s_Q = x W_GQ over the H query heads and s_K = x W_GK over the E memories (paper eq. 4), the gates

    r_t = H softmax(s_Q)        w_t = E softmax(s_K)

scale what heads read and what memories take in (eqs. 10 to 16):

    retnet, gla   S_t = decay_t S_{t-1} + (w_t k_t) v_t^T        o_t = S_t^T (r_t q_t)
    gdn           S'  = alpha_t S_{t-1}     S_t = S' + k_t (beta_t (w_t v_t - S'^T k_t))^T     o_t = S_t^T (r_t q_t)

The paper's eqs. 14 to 16 leave out Gated DeltaNet's decay alpha_t; on its k a gate would change the delta rule. The
paper has neither H nor E in front of the softmax: equal scores then divide by H E. With them a mechanism with equal
scores is its base, exactly, which is where a conversion starts. A norm of each head's output would cancel r_t, so the
bases apply it behind their norms.

Letters: B batch, T time, H query heads, E memories (Hkv | E | H), D key dim, Dv value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..layout import TokenLayout
from ..mixer import Mixer, AttentionSite, Tensors, as_autocast, option_types, own_mixer
from ..layers.rotary import resolve_rope
from ..layers.row_softmax import row_softmax

Base = Literal["retnet", "gla", "gdn"]


def file_of(base: Base) -> Any:
    """The file of a base, which has its operator, its reference and its mixer. A checkpoint carries those in use."""
    if base == "retnet":
        return import_module("..retnet.retnet", __package__)
    if base == "gla":
        return import_module("..gla.gla", __package__)
    return import_module("..gdn.gdn", __package__)


def op_of(base: Base) -> Callable[..., tuple[Tensor, Any]]:
    """The operator of a base, such as `gla`."""
    op: Callable[..., tuple[Tensor, Any]] = getattr(file_of(base), base)
    return op


def sla(
    q: Tensor, k: Tensor, v: Tensor, *, base: Base, read_scores: Tensor, write_scores:
    Tensor, rescale: bool = True, **arguments: Any,
)-> tuple[Tensor, Any]:  # fmt: skip
    """What the operator `base` returns for q [B,T,H,D], k, v and its other `arguments`, with heads that compete.

    read_scores [B,T,H], write_scores [B,T,E]; `rescale` as published leaves H and E out.
    """
    gates = {"read_gate": head_softmax(read_scores, rescale), "write_gate": head_softmax(write_scores, rescale)}
    return op_of(base)(q, k, v, **arguments, **gates)


def head_softmax(scores: Tensor, rescale: bool, *, plain: bool = False) -> Tensor:
    """Softmax in fp32 over the heads of each token, [B,T,heads], times their number with `rescale`. `plain` keeps to
    PyTorch."""
    return row_softmax(scores, float(scores.shape[-1]) if rescale else 1.0, plain=plain)


def naive_sla(
    q: Tensor, k: Tensor, v: Tensor, *, base: Base, read_scores: Tensor, write_scores:
    Tensor, rescale: bool = True, **arguments: Any,
)-> tuple[Tensor, Any]:  # fmt: skip
    """Eqs. 4 and 10 to 16 as they stand, for checking: gates on q, and on k (gdn: on v), token by token."""
    E = write_scores.shape[-1]
    k, v = (y.repeat_interleave(E // y.shape[2], 2) for y in (k, v))
    read, write = (scores.exp() / scores.exp().sum(-1, keepdim=True) for scores in (read_scores, write_scores))
    if rescale:
        read, write = read * read.shape[-1], write * E
    if base == "gdn":
        v = v * write[..., None]
    else:
        k = k * write[..., None]
    o, state = getattr(file_of(base), f"naive_{base}")(q * read[..., None], k, v, **arguments)
    return o, state


# ---------------------------------------------------------------- the mixer


class SoftmaxLinearAttention(Mixer):
    """SLA in place of the softmax of one attention module: a base mechanism, and two small matrices that make gates.

    The options of the chosen base are options too; `linearize mechanisms gla` says what they are.
    """

    title = "Softmax linear attention"
    paper = "arXiv 2602.01744"
    pools = True
    state_formula = "that of the base"
    bases: ClassVar[tuple[str, ...]] = get_args(Base)
    about = {
        "base": "mechanism under the gates",
        "gate_input": "scores of the gates from the hidden state (theorem 4.2), or from q and k (eq. 4)",
        "gate_rescale": "multiply the gates by the number of heads",
    }
    published = {"gate_input": "qk", "gate_rescale": False}

    def __init__(
        self,
        site: AttentionSite,
        *,
        base: Base = "gla",
        gate_input: Literal["hidden", "qk"] = "hidden",
        gate_rescale: bool = True,
        **base_options: Any,
    ) -> None:
        """Raises ValueError for options that do not fit the base."""
        near = {name: base_options.pop(name) for name in option_types(Mixer) if name in base_options}
        # The window is this mixer's, of which the base knows nothing.
        kind = self.base_for(base)
        if base_options.get("rope", option_types(kind)["rope"][2]) == "auto":
            base_options["rope"] = resolve_rope("auto", near.get("window", 0))
        own: Any = kind(site, **base_options)
        super().__init__(site, not own.drop_rope, **near)
        self.base, self.gate_rescale = own, gate_rescale
        self.from_hidden = gate_input == "hidden"
        widths = [site.hidden] * 2 if self.from_hidden else [n * site.key_dim for n in (site.heads, site.kv_heads)]
        self.read = nn.Linear(widths[0], own.memories * site.heads, bias=False)
        self.write = nn.Linear(widths[1], own.memories * own.state_count, bias=False)

    @classmethod
    def base_for(cls, name: Any) -> type[Mixer]:
        return own_mixer(file_of(name))

    @classmethod
    def parts(cls, site: AttentionSite, options: dict[str, Any]) -> dict[str, str]:
        name, base = options["base"], cls.base_for(options["base"])
        return super().parts(site, options) | base.parts(site, options) | {f"{name}/{name}": base.__name__}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        for scores in (self.read, self.write):
            init.zeros_(scores.weight)

    def project(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout) -> tuple[Tensors, Tensors]:
        return self.base.project(q, k, v, x, layout, *self.gates(q, k, x, layout.plain))

    def scan(self, inputs: Tensors, layout: TokenLayout, state: Any) -> tuple[tuple[Tensor, ...], Any]:
        return self.base.scan(inputs, layout, state)

    def finish(
        self, outputs: tuple[Tensor, ...], beside: Tensors, layout: TokenLayout
    ) -> tuple[Tensor, Tensor | None]:
        return self.base.finish(outputs, beside, layout)

    def gates(self, q: Tensor, k: Tensor, x: Tensor, plain: bool = False) -> tuple[Tensor, Tensor]:
        """What heads read [B,T,H] and what memories take in [B,T,E], each M times where a head has M memories."""
        inputs = (x, x) if self.from_hidden else (q.flatten(2), k.flatten(2))
        scores, rescale = (self.read(inputs[0]), self.write(inputs[1])), self.gate_rescale
        return head_softmax(scores[0], rescale, plain=plain), head_softmax(scores[1], rescale, plain=plain)

    def state_bytes(self, tokens: int, item: int = 4) -> int:
        return super().state_bytes(tokens, item) + self.base.state_bytes(tokens, item)

    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, o: Tensor, o_teacher: Tensor, layout: TokenLayout | None = None
    ) -> None:
        if self.near is not None:  # the base knows of no window
            self.base.calibrate_norms(o_teacher)
            return
        q, k, v = as_autocast(q, k, v)
        self.base.calibrate(q, k, v, x, o, o_teacher, layout, self.gates(q, k, x))
